//! Which partial blocks are written while others are in flight: `docs/format/wal.md`, section 5.

mod common;

use alluvium_device::sim::{Mode, SimDisk};
use alluvium_wal::{AppendError, Options, Parts, Wal};
use bytes::Bytes;
use common::*;

/// A log with blocks of 256 KiB, on a disk that has not completed any append yet.
fn held() -> (SimDisk, Wal) {
    let disk = disk(16 << 20);
    format(&disk);
    let options = Options {
        window_bytes: 8 << 20,
        block_bytes: 256 << 10,
        max_record_bytes: 512 << 10,
        ..Options::default()
    };
    let (wal, ..) = try_open(disk.device(), &options).unwrap();
    disk.set_mode(Mode::Queued);
    (disk, wal)
}

fn append(wal: &Wal, record_bytes: u64) {
    let payload = vec![7; (record_bytes - HEADER) as usize];
    wal.append(&[&payload]).map(drop).unwrap();
}

/// Lengths of the writes that the disk has received, in order.
fn writes(disk: &SimDisk) -> Vec<usize> {
    disk.queued().into_iter().map(|(_, _, len)| len).collect()
}

/// Flushes queue in the disk, and a group needs only one, even where a padding would waste little.
#[test]
fn small_blocks_are_grouped_while_one_is_written() {
    let (disk, wal) = held();
    for _ in 0..5 {
        append(&wal, 15_600);
    }
    assert_eq!(writes(&disk), [16 << 10], "the first one alone");
    assert!(disk.step());
    assert_eq!(writes(&disk).len(), 1, "the other four together");
    assert!(disk.step());
    assert!(writes(&disk).is_empty());
    assert_eq!(wal.durable(), wal.appended());
    disk.set_mode(Mode::Immediate);
    drop(wal);
    assert_eq!(scan(&disk).1.len(), 5);
}

#[test]
fn a_small_block_is_cut_where_it_ends() {
    let (disk, wal) = held();
    append(&wal, 13_000);
    append(&wal, 13_000);
    assert_eq!(writes(&disk), [16 << 10], "the first one alone, cut where it ends");
    assert!(disk.step());
    // Its first page repeats the end of the first one.
    assert_eq!(writes(&disk), [16 << 10]);
    disk.run_until_idle();
    assert_eq!(wal.appended().0, 26_000, "no padding");
}

#[test]
fn two_large_partial_blocks_are_written_and_the_next_one_grows() {
    let (disk, wal) = held();
    for _ in 0..4 {
        append(&wal, 70_000);
    }
    assert_eq!(writes(&disk), [72 << 10; 2]);
    disk.step_at(0);
    assert_eq!(writes(&disk), [72 << 10, 140 << 10], "what has come meanwhile goes together");
    disk.run_until_idle();
    assert_eq!(wal.durable(), wal.appended());
}

/// Slots are reserved for full blocks while much is in flight.
#[test]
fn small_blocks_are_not_written_beside_large_ones() {
    let (disk, wal) = held();
    append(&wal, 70_000);
    append(&wal, 15_600);
    append(&wal, 15_600);
    assert_eq!(writes(&disk), [72 << 10]);
    disk.run_until_idle();
    assert_eq!(wal.durable(), wal.appended());
}

/// The parts of records without a body.
fn parts<'a>(heads: &'a [[&'a [u8]; 1]], none: &'a Bytes) -> Vec<Parts<'a>> {
    heads.iter().map(|head| Parts { head, body: none }).collect()
}

#[test]
fn an_idle_log_writes_a_batch_with_one_write() {
    let (disk, wal) = held();
    let payloads = [1, 2, 3].map(|byte| vec![byte; 5000]);
    let heads = payloads.each_ref().map(|payload| [&payload[..]]);
    let mut placed = Vec::new();
    wal.append_batch(&parts(&heads, &Bytes::new()), &mut placed).unwrap();
    assert_eq!(writes(&disk), [16 << 10], "all three in one write of 15,096 bytes");
    assert_eq!(placed.iter().map(|at| at.offset.0).collect::<Vec<_>>(), [0, 5032, 10_064]);
    assert!(disk.step());
    assert_eq!(wal.durable(), placed[2].end);
    disk.set_mode(Mode::Immediate);
    drop(wal);
    let found = scan(&disk).1;
    assert_eq!(found.iter().map(|record| record.payload.to_vec()).collect::<Vec<_>>(), payloads);
}

#[test]
fn a_batch_larger_than_a_block_is_written_in_full_blocks() {
    let (disk, wal) = held();
    let payload = vec![7; 100_000];
    let heads = [[&payload[..]]; 4];
    let mut placed = Vec::new();
    wal.append_batch(&parts(&heads, &Bytes::new()), &mut placed).unwrap();
    assert_eq!(placed.len(), 4);
    assert_eq!(writes(&disk), [256 << 10, 136 << 10], "a full block, and the rest padded");
    disk.run_until_idle();
    assert_eq!(wal.durable(), wal.appended());
    assert!(wal.durable() >= placed[3].end);
    disk.set_mode(Mode::Immediate);
    drop(wal);
    assert_eq!(scan(&disk).1.len(), 4);
}

#[test]
fn a_batch_ends_at_its_first_refused_record() {
    let (disk, wal) = held();
    let (small, large) = (vec![7; 1000], vec![7; 600 << 10]);
    let none = Bytes::new();
    for refused in [&large[..], &[]] {
        let heads = [[&small[..]], [&small[..]], [refused], [&small[..]]];
        let mut placed = Vec::new();
        let error = wal.append_batch(&parts(&heads, &none), &mut placed).unwrap_err();
        assert!(matches!(error, AppendError::TooLarge { .. } | AppendError::Empty), "{error}");
        assert_eq!(placed.len(), 2, "the records before it are appended");
    }
    // The disk completes nothing, and the window begins with 520 KiB.
    let full = vec![7; 50_000];
    let heads = [[&full[..]]; 20];
    let mut placed = Vec::new();
    let error = wal.append_batch(&parts(&heads, &none), &mut placed).unwrap_err();
    assert!(matches!(error, AppendError::WindowFull { .. }), "{error}");
    assert_eq!(placed.len(), 10);
    let space = wal.wait_space();
    disk.run_until_idle();
    space.wait();
    wal.append_batch(&parts(&heads[..4], &none), &mut placed).unwrap();
    disk.run_until_idle();
    assert_eq!((placed.len(), wal.durable()), (14, wal.appended()));
    disk.set_mode(Mode::Immediate);
    drop(wal);
    assert_eq!(scan(&disk).1.len(), 4 + 14);
}

#[test]
fn a_body_of_a_batch_is_summed_and_shared() {
    let (disk, wal) = held();
    let body = Bytes::from(vec![9; 100_000]);
    let mut placed = Vec::new();
    let records = [Parts { head: &[b"a", b"b"], body: &body }, Parts { head: &[], body: &body }];
    wal.append_batch(&records, &mut placed).unwrap();
    assert_eq!(placed[0].body_crc32c, crc32c::crc32c(&body));
    assert_eq!(placed[1].end.0 - placed[1].offset.0, 100_000 + HEADER);
    disk.run_until_idle();
    disk.set_mode(Mode::Immediate);
    drop(wal);
    let found = scan(&disk).1;
    assert_eq!(found[0].payload, [b"ab", &body[..]].concat());
    assert_eq!(found[1].payload, body);
}

#[test]
fn an_empty_batch_changes_nothing_and_a_closed_log_refuses_batches() {
    let (disk, wal) = held();
    let mut placed = Vec::new();
    wal.append_batch(&[], &mut placed).unwrap();
    assert!(placed.is_empty() && writes(&disk).is_empty());
    disk.set_mode(Mode::Immediate);
    wal.clone().close().unwrap();
    let none = Bytes::new();
    let closed = wal.append_batch(&parts(&[[b"late"]], &none), &mut placed);
    assert!(matches!(closed, Err(AppendError::Closed)), "{closed:?}");
}
