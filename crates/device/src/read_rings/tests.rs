//! Each test runs with a ring, where the system supports it, and without.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsFd;

use super::*;
use crate::AlignedBuf;

/// The content of a file at each byte; it differs between files.
fn byte(file: usize, at: usize) -> u8 {
    (at / 7 + at / PAGE_BYTES * 3 + file * 101) as u8
}

/// A file of `len_bytes`.
fn file(number: usize, len_bytes: usize) -> File {
    let mut file = tempfile::tempfile().unwrap();
    let bytes: Vec<u8> = (0..len_bytes).map(|at| byte(number, at)).collect();
    file.write_all(&bytes).unwrap();
    file
}

/// File, position and length of a read.
type Wanted = (usize, usize, usize);

/// Executes the reads and checks that each byte is the file's, or zero beyond its end.
fn read_all(rings: &ReadRings, files: &[(File, usize)], wanted: &[Wanted]) {
    let mut bufs: Vec<_> = wanted.iter().map(|(_, _, len)| AlignedBuf::zeroed(*len)).collect();
    bufs.iter_mut().for_each(|buf| buf.fill(0xee));
    let mut reads: Vec<_> = wanted
        .iter()
        .zip(&mut bufs)
        .map(|((file, at, _), to)| FileRead { file: files[*file].0.as_fd(), at: *at as u64, to })
        .collect();
    let results = rings.read(&mut reads);
    assert_eq!(results.len(), wanted.len());
    for (((file, at, _), buf), result) in wanted.iter().zip(&bufs).zip(results) {
        result.unwrap();
        let len_bytes = files[*file].1;
        let is_right = |(index, found): (usize, &u8)| {
            let at = at + index;
            *found == if at < len_bytes { byte(*file, at) } else { 0 }
        };
        assert!(buf.iter().enumerate().all(is_right), "file {file} at {at}");
    }
}

/// Files that end at a page boundary, that end inside a page, and that are empty.
fn files() -> Vec<(File, usize)> {
    let lengths = [64 * PAGE_BYTES, 10 * PAGE_BYTES + 1000, 511, 0];
    lengths.into_iter().enumerate().map(|(number, len)| (file(number, len), len)).collect()
}

#[test]
fn reads_return_their_bytes_and_zeroes_beyond_the_end() {
    let files = files();
    for rings in [ReadRings::new(2), ReadRings::new(0)] {
        let mut wanted = Vec::new();
        for file in 0..files.len() {
            for page in [0, 1, 9, 10, 11, 63, 64] {
                for pages in [1, 2, 60] {
                    wanted.push((file, page * PAGE_BYTES, pages * PAGE_BYTES));
                }
            }
        }
        // Many more than a ring has entries; repeated, since rings are reused; then few, and none.
        assert!(wanted.len() > 2 * ENTRIES);
        for _ in 0..3 {
            read_all(&rings, &files, &wanted);
            for len in [0, 1, 2, ENTRIES, ENTRIES + 1] {
                read_all(&rings, &files, &wanted[wanted.len() - len..]);
            }
        }
    }
}

#[test]
fn a_failed_read_does_not_affect_the_others() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    std::fs::write(&path, [7; PAGE_BYTES]).unwrap();
    let (readable, unreadable) =
        (File::open(&path).unwrap(), OpenOptions::new().write(true).open(&path).unwrap());
    for rings in [ReadRings::new(1), ReadRings::new(0)] {
        for failing in [0, 3, ENTRIES + 2] {
            let mut bufs: Vec<_> =
                (0..ENTRIES + 5).map(|_| AlignedBuf::zeroed(PAGE_BYTES)).collect();
            let mut reads = Vec::new();
            for (index, to) in bufs.iter_mut().enumerate() {
                let file = if index == failing { &unreadable } else { &readable };
                reads.push(FileRead { file: file.as_fd(), at: 0, to });
            }
            for (index, result) in rings.read(&mut reads).into_iter().enumerate() {
                match result {
                    Ok(()) => assert!(reads[index].to.iter().all(|byte| *byte == 7), "{index}"),
                    Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EBADF)),
                }
                assert_eq!(index == failing, reads[index].to[0] != 7, "{index}");
            }
        }
    }
}

/// More callers than rings, so that some get none.
#[test]
fn concurrent_callers_get_their_own_bytes() {
    let files = files();
    let rings = ReadRings::new(2);
    thread::scope(|scope| {
        for thread in 0..6 {
            let (files, rings) = (&files, &rings);
            scope.spawn(move || {
                for round in 0..50 {
                    let of = |index: usize| (index * (thread + 1) + round) % 64 * PAGE_BYTES;
                    let wanted: Vec<Wanted> =
                        (0..40).map(|index| (index % 4, of(index), 2 * PAGE_BYTES)).collect();
                    read_all(rings, files, &wanted);
                }
            });
        }
    });
    let state = rings.state.lock();
    assert!(state.free.len() <= 2, "{} rings", state.free.len());
}

#[test]
fn a_refused_ring_is_not_tried_again() {
    let rings = ReadRings::new(3);
    let is_there = rings.take().is_some();
    assert_eq!(rings.state.lock().left, if is_there { 2 } else { 0 });
}
