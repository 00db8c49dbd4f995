//! A single ranged GET.

use std::fs::File;
use std::io;

use alluvium_device::{FileBytes, PAGE_BYTES};
use bytes::Bytes;
use futures::TryStreamExt;
use futures::stream::BoxStream;
use object_store::{GetOptions, GetRange, GetResult, GetResultPayload, ObjectStore};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::{Request, within};
use crate::damage::Damage;
use crate::object_error::ObjectError;

/// Bytes of a file that are read at once: the kernel requests all of it from the disk, and the
/// log's writes queue behind it.
const READ_BYTES: usize = 256 << 10;
/// A piece of a file of at least this size is read into its final memory, together with the rest of
/// its first and last page; a smaller one is copied out of what was read.
const OWN_PAGES_BYTES: usize = 128 << 10;

/// Reads neighbouring pieces of an object from `from` on, of these lengths; shorter ones where the
/// object ends. Each is in its own memory and copied once: keeping a piece must not keep anything
/// else, except for the rest of three pages with a large one, so that bounds on bytes are bounds on
/// memory.
pub(super) async fn get(
    store: &dyn ObjectStore,
    name: &str,
    from: u64,
    lens: Vec<usize>,
) -> Result<Vec<Bytes>, ObjectError> {
    match try_get(store, name, from, lens.clone()).await {
        // A connection that died unnoticed is the most likely reason, and the retry uses a new one.
        Err(error) if error.is_temporary() => try_get(store, name, from, lens).await,
        answer => answer,
    }
}

/// Returns the result of a second read after the first one did not match its checksum. The data may
/// have been damaged in transit, since plain HTTP has no better checksum than TCP's. Only after a
/// second mismatch does an object count as damaged, which fails reads, and excludes it from object
/// compaction until the next start.
pub(super) fn read_again<T>(
    name: &str,
    damage: &Damage,
    again: Result<T, Damage>,
) -> Result<T, ObjectError> {
    if again.is_ok() {
        tracing::warn!("object {name} was {damage}, but a second read is intact");
    }
    again.map_err(|damage| ObjectError::damaged(name, damage))
}

async fn try_get(
    store: &dyn ObjectStore,
    name: &str,
    from: u64,
    lens: Vec<usize>,
) -> Result<Vec<Bytes>, ObjectError> {
    let len_bytes: u64 = lens.iter().map(|len| *len as u64).sum();
    let range = Some(GetRange::Bounded(from..from + len_bytes));
    let request = async {
        let options = GetOptions { range, ..GetOptions::default() };
        let GetResult { payload, .. } = store.get_opts(&name.into(), options).await?;
        match payload {
            GetResultPayload::Stream(chunks) => fill(chunks, lens).await,
            GetResultPayload::File(file, _) => {
                let read = move || read_pieces(&file, from, &lens);
                let read = tokio::task::spawn_blocking(read).await;
                read.map_err(io::Error::other).and_then(|read| read).map_err(|error| {
                    object_store::Error::Generic { store: "local file", source: error.into() }
                })
            }
        }
    };
    within(Request::Get, name, request).await
}

/// Distributes a stream over the pieces.
async fn fill(
    mut chunks: BoxStream<'static, object_store::Result<Bytes>>,
    lens: Vec<usize>,
) -> object_store::Result<Vec<Bytes>> {
    let mut chunk = Bytes::new();
    let mut pieces = Vec::with_capacity(lens.len());
    for len in lens {
        let mut piece = Vec::with_capacity(len);
        while piece.len() < len {
            if chunk.is_empty() {
                match chunks.try_next().await? {
                    Some(next) => chunk = next,
                    None => break,
                }
            }
            let taken = chunk.split_to(chunk.len().min(len - piece.len()));
            piece.extend_from_slice(&taken);
        }
        pieces.push(Bytes::from(piece));
    }
    Ok(pieces)
}

/// Reads pieces of a file, bypassing the page cache where the file system allows it: objects are
/// written past it, and reading them into it first costs five times the processor time
/// (`docs/benchmarks/cold-reads.md`, "Reading objects from files").
fn read_pieces(file: &File, from: u64, lens: &[usize]) -> io::Result<Vec<Bytes>> {
    let flags = fcntl_getfl(file)?;
    let is_direct = fcntl_setfl(file, flags | OFlags::DIRECT).is_ok();
    let read = || read_all(|pages, at, most| pages.read_more(file, at, most), from, lens);
    match read() {
        // The file system may need larger units, or a read was short and the rest begins within a
        // page.
        Err(error) if is_direct && error.kind() == io::ErrorKind::InvalidInput => {
            fcntl_setfl(file, flags)?;
            read()
        }
        read => read,
    }
}

/// Reads whole pages with `read_more`, which has the signature of [`FileBytes::read_more`].
fn read_all(
    read_more: impl Fn(&mut FileBytes, u64, usize) -> io::Result<usize>,
    from: u64,
    lens: &[usize],
) -> io::Result<Vec<Bytes>> {
    let mut pieces = Vec::with_capacity(lens.len());
    let mut at = from;
    for run in lens.chunk_by(|one, next| *one.max(next) < OWN_PAGES_BYTES) {
        match run {
            [len] if *len >= OWN_PAGES_BYTES => pieces.push(read_large(&read_more, at, *len)?),
            small => read_small(&read_more, at, small, &mut pieces)?,
        }
        at += run.iter().map(|len| *len as u64).sum::<u64>();
    }
    Ok(pieces)
}

fn read_large(
    read_more: impl Fn(&mut FileBytes, u64, usize) -> io::Result<usize>,
    from: u64,
    len: usize,
) -> io::Result<Bytes> {
    let (first_page, before) = page(from);
    let end = before + len;
    let mut pages = FileBytes::with_capacity(end);
    while pages.len() < end {
        let wanted = (end - pages.len()).next_multiple_of(PAGE_BYTES).min(READ_BYTES);
        let at = first_page + pages.len() as u64;
        // A short read is not necessarily the end: a signal or a network may be the reason.
        if read_more(&mut pages, at, wanted)? == 0 {
            break;
        }
    }
    let end = end.min(pages.len());
    Ok(Bytes::from(pages).slice(before.min(end)..end))
}

/// Reads step by step, and copies the pieces out of the steps.
fn read_small(
    read_more: impl Fn(&mut FileBytes, u64, usize) -> io::Result<usize>,
    from: u64,
    lens: &[usize],
    pieces: &mut Vec<Bytes>,
) -> io::Result<()> {
    let (mut at, mut before) = page(from);
    let mut left = before + lens.iter().sum::<usize>();
    let mut step = FileBytes::with_capacity(left.min(READ_BYTES));
    // How much of the step was copied or is not wanted.
    let mut used = 0;
    let mut is_end = false;
    for len in lens {
        let mut piece = Vec::with_capacity(*len);
        while piece.len() < *len {
            if used == step.len() {
                if is_end {
                    break;
                }
                step.clear();
                let wanted = left.next_multiple_of(PAGE_BYTES).min(READ_BYTES);
                let came = read_more(&mut step, at, wanted)?;
                is_end = came == 0;
                used = before.min(came);
                (at, before, left) = (at + came as u64, before - used, left.saturating_sub(came));
                continue;
            }
            let taken = (step.len() - used).min(len - piece.len());
            piece.extend_from_slice(&step[used..used + taken]);
            used += taken;
        }
        pieces.push(Bytes::from(piece));
    }
    Ok(())
}

/// Returns the start of the page with this position, and the number of bytes before it in the page.
fn page(position: u64) -> (u64, usize) {
    let before = position % PAGE_BYTES as u64;
    (position - before, usize::try_from(before).expect("less than a page"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether reads bypass the page cache now.
    fn is_direct(file: &File) -> bool {
        fcntl_getfl(file).unwrap().contains(OFlags::DIRECT)
    }

    /// Pieces that begin and end anywhere, also after the end of the file.
    #[test]
    fn pieces_have_the_bytes_of_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("object");
        std::fs::write(&path, []).unwrap();
        let file = File::open(&path).unwrap();
        let flags = fcntl_getfl(&file).unwrap();
        let has_direct = fcntl_setfl(&file, flags | OFlags::DIRECT)
            .inspect_err(|error| eprintln!("only the page cache is tested, in {path:?}: {error}"))
            .is_ok();
        for len_bytes in [0, 1, PAGE_BYTES, 2 * READ_BYTES + 17, 6 * READ_BYTES] {
            let whole: Vec<u8> = (0..len_bytes).map(|i| (i * 7 + i / PAGE_BYTES) as u8).collect();
            std::fs::write(&path, &whole).unwrap();
            for from in [0, 1, PAGE_BYTES - 1, PAGE_BYTES, READ_BYTES - 3, 2 * READ_BYTES] {
                let lens = vec![1, PAGE_BYTES, 0, 3, READ_BYTES, 17, READ_BYTES + 1];
                let mut at = from;
                let there = lens.iter().map(|len| {
                    let there = at.min(len_bytes)..(at + len).min(len_bytes);
                    at += len;
                    Bytes::copy_from_slice(&whole[there])
                });
                let there: Vec<Bytes> = there.collect();
                let file = File::open(&path).unwrap();
                assert!(read_pieces(&file, from as u64, &lens).unwrap() == there);
                // Behind its end a file may refuse direct reads.
                assert!(at > len_bytes || is_direct(&file) == has_direct);
                // With the page cache.
                let file = File::open(&path).unwrap();
                let read = |pages: &mut FileBytes, at, most| pages.read_more(&file, at, most);
                assert!(read_all(read, from as u64, &lens).unwrap() == there);
                assert!(!is_direct(&file));
            }
        }
    }

    #[test]
    fn a_short_read_is_not_the_end() {
        let whole: Vec<u8> =
            (0..OWN_PAGES_BYTES + 5 * PAGE_BYTES).map(|i| (i * 7 + i / PAGE_BYTES) as u8).collect();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("object");
        std::fs::write(&path, &whole).unwrap();
        let file = File::open(&path).unwrap();
        for most_bytes in [1, 1_000, PAGE_BYTES, PAGE_BYTES + 1] {
            let read = |pages: &mut FileBytes, at, most: usize| {
                pages.read_more(&file, at, most.min(most_bytes))
            };
            let lens = [PAGE_BYTES, 3, OWN_PAGES_BYTES, 7, OWN_PAGES_BYTES];
            let pieces = read_all(read, 5, &lens).unwrap();
            let mut rest = &whole[5..];
            for (len, piece) in lens.iter().zip(&pieces) {
                let there = rest.split_off(..rest.len().min(*len)).unwrap();
                assert!(piece == there, "{len} bytes, at most {most_bytes} at once");
            }
            assert_eq!(pieces.len(), lens.len());
        }
    }

    #[test]
    fn the_page_cache_serves_where_direct_reads_are_refused() {
        let file = File::open("/proc/self/limits").unwrap();
        let whole = std::fs::read("/proc/self/limits").unwrap();
        let read = read_pieces(&file, 3, &[5]).unwrap();
        assert!(!is_direct(&file), "the test needs a file that refuses direct reads");
        assert_eq!(read, [&whole[3..8]]);
    }
}
