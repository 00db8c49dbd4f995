//! Which partial blocks are written while others are in flight: `docs/format/wal.md`, section 5.

mod common;

use alluvium_device::sim::{Mode, SimDisk};
use alluvium_wal::{Options, Wal};
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
