//! Recovery: holes, damage, the end of the log, and crashes during recovery.

mod common;

use std::ops::RangeTo;

use alluvium_device::sim::{Faults, Mode, SimDisk, SimOptions};
use alluvium_wal::{LogOffset, OpenError, Options, Wal};
use common::*;

fn to(offset: LogOffset) -> RangeTo<LogOffset> {
    ..offset
}

/// A log of `count` durable records of `len` bytes, not closed.
fn log(count: u8, len: usize) -> SimDisk {
    let disk = disk(1 << 20);
    format(&disk);
    let (wal, ..) = open(&disk);
    for name in 0..count {
        wal.append(&[&vec![name; len]]).unwrap().wait().unwrap();
    }
    disk.power_cut()
}

/// A record that recovery dropped must not come back when new records fill the hole exactly up to
/// it.
#[test]
fn a_dropped_record_stays_dropped_when_the_hole_is_filled_exactly_up_to_it() {
    let disk = disk(1 << 20);
    format(&disk);
    let (wal, ..) = open(&disk);
    let first = wal.append(&[b"a"]).unwrap();
    let hole = first.end();
    first.wait().unwrap();
    // Three full blocks in flight; only the last one reaches the disk.
    disk.set_mode(Mode::Queued);
    let len = 16 * 1024 - HEADER as usize;
    let appends: Vec<_> =
        (b'b'..=b'd').map(|name| wal.append(&[&vec![name; len]]).unwrap()).collect();
    let last = appends.last().unwrap().offset();
    let queued = disk.queued();
    assert_eq!((queued.len(), appends[0].offset()), (3, hole));
    disk.step_at(
        queued.iter().position(|(_, at, _)| *at == device_at(last.0)).expect("the last block"),
    );
    disk.set_faults(Faults { survives_power_cut: 0.0, ..Faults::default() });
    let cut = disk.power_cut();

    let (wal, report, records) = open(&cut);
    assert_eq!(names(&records), b"a");
    assert_eq!((report.end, report.dropped_records, report.damage.len()), (hole, 1, 0));
    for name in b'x'..=b'y' {
        wal.append(&[&vec![name; len]]).unwrap().wait().unwrap();
    }
    assert_eq!(wal.appended(), last, "the next record starts where the old one did");
    assert_eq!(cut.peek(device_at(last.0), 4), b"ALRD", "which is still on the disk");
    let (_, report, records) = open(&cut.power_cut());
    assert_eq!(names(&records), b"axy");
    assert_eq!((report.end, report.dropped_records, report.damage.len()), (last, 0, 0));
}

/// A crash at each of recovery's own writes, twice in a row, torn in every way: records handed out
/// stay.
#[test]
fn crashes_during_recovery_lose_no_records() {
    for seed in 0..60 {
        let disk = SimDisk::new(SimOptions {
            capacity_bytes: DATA_START + (1 << 20),
            seed,
            faults: Faults { survives_power_cut: 0.7, torn_by_power_cut: 0.7, ..Faults::default() },
            ..SimOptions::default()
        });
        format(&disk);
        let (wal, ..) = open(&disk);
        for name in 0..20 {
            wal.append(&[&[name; 700]]).unwrap().wait().unwrap();
        }
        disk.set_mode(Mode::Queued);
        for name in 20..40 {
            wal.append(&[&[name; 700]]).map(drop).unwrap();
        }
        let mut disk = disk.process_crash(); // torn writes visible, and volatile
        let mut handed_out: Option<Vec<u8>> = None;
        for headers in [0, 1, 0, 1] {
            let device = disk.device();
            disk.set_mode(Mode::Queued);
            let opener = std::thread::spawn(move || {
                let mut records = Vec::new();
                let result = Wal::open(device, &options(), None, &mut |record| {
                    records.push(record);
                    Ok(())
                });
                assert!(result.is_err(), "the power went");
                records
            });
            let mut left = headers;
            loop {
                assert!(!opener.is_finished(), "it ends only when the power goes");
                let queued = disk.queued();
                match queued.iter().position(|(operation, ..)| *operation == "write") {
                    Some(_) if left == 0 => break,
                    Some(write) => {
                        disk.step_at(write);
                        left -= 1;
                    }
                    None if queued.is_empty() => std::thread::yield_now(),
                    None => disk.step_at(0),
                }
            }
            disk = disk.power_cut();
            let seen = names(&opener.join().unwrap());
            assert!(seen.len() >= 20, "seed {seed}: what was acknowledged");
            assert_eq!(*handed_out.get_or_insert(seen.clone()), seen, "seed {seed}");
        }
        let (_, report, records) = open(&disk);
        assert_eq!(handed_out, Some(names(&records)), "seed {seed}");
        assert!(report.damage.is_empty());
    }
}

#[test]
fn damage_in_the_middle_is_reported_and_its_neighbours_are_handed_out() {
    let disk = log(10, 300);
    let record = 300 + HEADER;
    // Rot in each field of the header of record 4, and in its payload.
    for byte in [0, 3, 4, 7, 8, 15, 16, 20, 24, 28, 31, 32, 200, record - 1] {
        let rotten = SimDisk::from_image(&disk.image(), SimOptions::default());
        flip(&rotten, device_at(4 * record + byte), 5);
        let (wal, report, records) = open(&rotten);
        assert_eq!(names(&records), [0, 1, 2, 3, 5, 6, 7, 8, 9], "byte {byte}");
        assert_eq!(report.damage.len(), 1, "byte {byte}");
        assert_eq!(
            report.damage[0].range,
            LogOffset(4 * record)..LogOffset(5 * record),
            "byte {byte}"
        );
        assert_eq!(report.damage[0].device_at.0, device_at(4 * record));
        assert!(!report.damage[0].reason.is_empty());
        assert_eq!(report.end, LogOffset(10 * record));
        // The log continues, and the damage is reported again, now because the header covers it.
        wal.append(&[&[10; 300]]).unwrap().wait().unwrap();
        let (_, report, records) = open(&rotten.power_cut());
        assert_eq!((records.len(), report.damage.len()), (10, 1));
    }
}

/// Damage at the end: proven by a later record, covered by the header, or neither.
#[test]
fn damage_at_the_end_is_reported_only_if_proven() {
    let record = 300 + HEADER;
    let rotten = |disk: &SimDisk, index: u64| {
        let copy = SimDisk::from_image(&disk.image(), SimOptions::default());
        flip(&copy, device_at(index * record + 40), 0);
        copy
    };
    let disk = log(5, 300);
    // The last record proves the one before it durable: it was appended after that was
    // acknowledged.
    let (_, report, records) = open(&rotten(&disk, 3));
    assert_eq!((names(&records), report.damage.len()), (vec![0, 1, 2, 4], 1));
    // Nothing proves the last record: it cannot be distinguished from a torn write.
    let (_, report, records) = open(&rotten(&disk, 4));
    assert_eq!((names(&records), report.damage.len()), (vec![0, 1, 2, 3], 0));
    assert_eq!(report.end, LogOffset(4 * record));
    // After an opening, or a trim, the header covers it.
    let (wal, ..) = open(&disk);
    drop(wal);
    let disk = disk.power_cut();
    let (_, report, records) = open(&rotten(&disk, 4));
    assert_eq!((names(&records), report.damage.len()), (vec![0, 1, 2, 3], 1));
    assert_eq!(report.end, LogOffset(5 * record));
    // The header also covers it after a clean shutdown.
    let (wal, ..) = open(&disk);
    wal.append(&[&[5; 300]]).unwrap().wait().unwrap();
    wal.close().unwrap();
    let (_, report, records) = open(&rotten(&disk, 5));
    assert_eq!((names(&records), report.damage.len()), (vec![0, 1, 2, 3, 4], 1));
}

/// A writer that keeps its window full makes records that prove nothing about those right before
/// them. With one window of look-ahead the first hole would count as the end, and all later records
/// would be dropped.
#[test]
fn damage_is_recognised_under_a_window_that_was_always_full() {
    let disk = disk(1 << 20);
    format(&disk);
    let options = Options {
        window_bytes: 32 * 1024,
        block_bytes: 4096,
        max_record_bytes: 4064,
        io_depth: 1,
        ..options()
    };
    let (wal, ..) = try_open(disk.device(), &options).unwrap();
    disk.set_mode(Mode::Queued);
    let mut name = 0;
    while name < 100 {
        // Each fills a page exactly: no padding, whose proof would be better.
        match wal.append(&[&[name; 4064]]) {
            Ok(_) => name += 1,
            Err(_) => assert!(disk.step()),
        }
    }
    disk.run_until_idle();
    let cut = disk.power_cut();
    flip(&cut, device_at(30 * PAGE + 100), 0);
    let (_, report, records) = open(&cut);
    assert_eq!(records.len(), 99);
    assert_eq!(report.damage.len(), 1);
    assert_eq!((report.end, report.dropped_records), (LogOffset(100 * PAGE), 0));
}

/// A write that the disk has lost uncovers the header of a dropped record, which also claims the
/// range of an intact neighbour.
#[test]
fn an_old_header_does_not_hide_an_intact_neighbour() {
    let disk = disk(256 * 1024);
    format(&disk);
    let append = |name: u8, len: usize| {
        let (wal, ..) = open(&disk);
        wal.append(&[&vec![name; len]]).unwrap().wait().unwrap();
        wal
    };
    append(b'a', 4064).close().unwrap();
    // Lost in a power cut before it was acknowledged.
    drop(append(b'd', 8000));
    let old = disk.peek(device_at(PAGE), PAGE as usize);
    disk.poke(device_at(PAGE), &[0; 2 * PAGE as usize]);
    let wal = append(b'b', 4064);
    wal.append(&[&[b'c'; 4064]]).unwrap().wait().unwrap();
    wal.close().unwrap();
    disk.poke(device_at(PAGE), &old);
    for _ in 0..3 {
        let (wal, report, records) = open(&disk);
        assert_eq!(names(&records), b"ac");
        assert_eq!(report.damage.len(), 1);
        assert_eq!(report.damage[0].range, LogOffset(PAGE)..LogOffset(2 * PAGE));
        drop(wal);
    }
}

#[test]
fn many_damaged_records_lose_only_themselves() {
    let disk = log(200, 500);
    let record = 500 + HEADER;
    for index in (1..199).step_by(2) {
        flip(&disk, device_at(index * record + index % record), 1);
    }
    let (_, report, records) = open(&disk);
    assert_eq!(records.len(), 101);
    assert!(names(&records).iter().all(|name| name % 2 == 0 || *name == 199));
    assert_eq!(report.damage.len(), 99);
}

/// Damage longer than the window, below the header's durable offset.
#[test]
fn a_large_damaged_range_below_the_headers_durable_offset_is_crossed() {
    let disk = log(200, 3000);
    drop(open(&disk));
    let disk = disk.power_cut();
    disk.poke(device_at(20_000), &vec![0xff; 400_000]);
    let (_, report, records) = open(&disk);
    assert_eq!((report.damage.len(), report.end), (1, LogOffset(200 * 3032)));
    let lost = (420_000 / 3032) - (20_000 / 3032) + 1;
    assert_eq!(records.len(), 200 - lost);
    assert_eq!(report.damage[0].range.start, LogOffset(20_000 / 3032 * 3032));
}

/// An unreadable page in the middle of the log is damage, not the end of the log.
#[test]
fn unreadable_pages_are_damage_in_the_middle_and_refuse_the_opening_at_the_end() {
    let disk = log(20, 1000);
    let faults = Faults { read_error: 1.0, ..Faults::default() };
    let end = 20 * 1032_u64;
    // hits the read of the chunk, then that of this page
    disk.set_zone_faults(device_at(0)..device_at(PAGE), faults);
    let (wal, report, records) = open(&disk);
    assert_eq!(names(&records), (4..20).collect::<Vec<_>>());
    assert_eq!(report.damage.len(), 1);
    assert!(report.damage[0].reason.contains("not readable"), "{}", report.damage[0]);
    drop(wal);

    let disk = log(20, 1000);
    let before = disk.image();
    let last_page = end / PAGE * PAGE;
    disk.set_zone_faults(device_at(0)..device_at(1), faults);
    disk.set_zone_faults(device_at(last_page)..device_at(last_page + PAGE), faults);
    let mut seen = 0;
    let refused = Wal::open(disk.device(), &options(), None, &mut |_| {
        seen += 1;
        Ok(())
    });
    assert!(matches!(refused, Err(OpenError::EndUnreadable { .. })), "{refused:?}");
    assert!(disk.image() == before, "nothing was written");
    disk.clear_zones();
    assert_eq!(open(&disk).2.len(), 20, "and with the fault gone, nothing is lost");
}

#[test]
fn a_failing_visitor_leaves_the_log_unchanged() {
    let disk = log(5, 100);
    let before = disk.image();
    let result =
        Wal::open(disk.device(), &options(), None, &mut |record| match record.payload[0] {
            3 => Err("not this one".into()),
            _ => Ok(()),
        });
    let message = result.unwrap_err().to_string();
    assert!(message.contains("396") && message.contains("not this one"), "{message}");
    assert!(disk.image() == before);
}

#[test]
fn a_scan_writes_nothing_and_agrees_with_recovery() {
    let disk = log(50, 777);
    flip(&disk, device_at(10 * (777 + HEADER) + 50), 0);
    let before = (disk.image(), disk.counters().writes, disk.counters().flushes);
    let inspection = Wal::inspect(&disk.device()).unwrap();
    let (scanned, records) = scan(&disk);
    assert!(before == (disk.image(), disk.counters().writes, disk.counters().flushes));
    let (_, opened, again) = open(&disk);
    assert_eq!(records, again);
    assert_eq!(
        (scanned.end, &scanned.damage, scanned.wal_id),
        (opened.end, &opened.damage, opened.wal_id)
    );
    assert_eq!(
        (scanned.epoch, opened.epoch),
        (inspection.header.epoch, inspection.header.epoch + 1)
    );
    assert!(scanned.to_string().contains("49 records"), "{scanned}");
}

/// Many laps of the ring, with records over its end and trims inside pages.
#[test]
fn records_survive_many_laps_of_the_ring() {
    let mut disk = disk(37 * PAGE);
    format(&disk);
    let options =
        Options { window_bytes: 32 * 1024, block_bytes: 8192, max_record_bytes: 8000, ..options() };
    let mut name = 0u8;
    let mut alive: Vec<(LogOffset, u8)> = Vec::new();
    for round in 0..60 {
        let (wal, report, records) = try_open(disk.device(), &options).unwrap();
        assert_eq!(
            names(&records),
            alive.iter().map(|(_, name)| *name).collect::<Vec<_>>(),
            "round {round}"
        );
        assert!(report.damage.is_empty());
        for step in 0..40 {
            name = name.wrapping_add(1);
            let append = wal.append(&[&vec![name; 1 + (step * 997 + round * 31) % 7900]]).unwrap();
            alive.push((append.offset(), name));
            append.wait().unwrap();
            if alive.len() > 8 {
                alive.drain(..5);
                wal.trim(to(alive[0].0)).wait().unwrap();
            }
        }
        disk = match round % 3 {
            0 => disk.power_cut(),
            1 => disk.process_crash(),
            _ => {
                wal.close().unwrap();
                disk
            }
        };
    }
}

#[test]
fn progress_ends_at_the_end_of_the_log() {
    let disk = disk(64 << 20);
    format(&disk);
    let options = Options {
        window_bytes: 8 << 20,
        block_bytes: 256 * 1024,
        max_record_bytes: 1 << 20,
        ..options()
    };
    let (wal, ..) = try_open(disk.device(), &options).unwrap();
    for name in 0..30 {
        wal.append(&[&vec![name; 1 << 20]]).unwrap().wait().unwrap();
    }
    wal.close().unwrap();
    let calls = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = calls.clone();
    let progress: alluvium_wal::Progress =
        std::sync::Arc::new(move |done, total| seen.lock().unwrap().push((done, total)));
    Wal::scan(&disk.device(), Some(progress), &mut |_| Ok(())).unwrap();
    let calls = calls.lock().unwrap();
    assert!(calls.len() >= 7, "{calls:?}");
    assert!(
        calls.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 == pair[1].1),
        "{calls:?}"
    );
    assert!(calls.iter().all(|(done, total)| done <= total && *total > 30 << 20));
}
