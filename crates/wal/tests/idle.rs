//! An idle log records in its header how far it is durable, so that damage at its very end is
//! recognised as damage.

mod common;

use alluvium_device::sim::{Faults, Mode, SimDisk, SimOptions};
use alluvium_wal::{HeaderInfo, LogOffset, Slot, Wal};
use common::*;

const SLOTS: [u64; 2] = [0, 32 * 1024];

/// Three durable records of a server that becomes idle and is then killed; returns start and end of
/// the last one.
fn killed(idle: impl Fn(&Wal)) -> (SimDisk, LogOffset, LogOffset) {
    let disk = disk(1 << 20);
    format(&disk);
    let (wal, ..) = open(&disk);
    let mut last = (LogOffset(0), LogOffset(0));
    for name in b"abc" {
        let append = wal.append(&[&[*name; 500]]).unwrap();
        last = (append.offset(), append.end());
        append.wait().unwrap();
    }
    idle(&wal);
    (disk.process_crash(), last.0, last.1)
}

fn slots(disk: &SimDisk) -> [HeaderInfo; 2] {
    Wal::inspect(&disk.device()).unwrap().slots.map(|slot| match slot {
        Slot::Valid(header) => header,
        other => panic!("{other}"),
    })
}

#[test]
fn damage_to_the_last_record_of_an_idle_log_is_reported() {
    // In the payload, in the record header, and the whole page.
    for (at, len) in [(HEADER + 100, 1), (5, 1), (0, 532)] {
        let (disk, last, end) = killed(Wal::persist_durable);
        disk.poke(device_at(last.0 + at), &vec![0xff; len]);
        let (report, records) = scan(&disk);
        assert_eq!(names(&records), b"ab");
        assert_eq!((report.damage.len(), report.end), (1, end), "{len} bytes at {at}");
        assert_eq!(report.damage[0].range, last..end);
        let ranges = &report.damaged_ranges;
        assert_eq!((ranges.len(), ranges[0].range.clone()), (1, last..end));
        assert_eq!(ranges[0].is_one_record, at > HEADER, "whether the record header is intact");
        let expected = disk.peek(device_at(last.0 + HEADER), ranges[0].head.len());
        assert_eq!((&ranges[0].head[..], ranges[0].head.len()), (&expected[..], 96));
    }
}

/// The limit stated in section 8 of the format: nothing proves that the last record was ever
/// durable.
#[test]
fn without_a_header_or_a_later_record_the_damage_looks_like_a_torn_write() {
    let (disk, last, _) = killed(|_| ());
    disk.poke(device_at(last.0 + HEADER + 100), &[0xff]);
    let (report, records) = scan(&disk);
    assert_eq!((&names(&records)[..], report.damage.len(), report.end), (&b"ab"[..], 0, last));
}

#[test]
fn persist_durable_is_one_write_to_the_older_slot_or_none() {
    let (disk, ..) = killed(|wal| {
        let before = wal.stats().header_writes;
        wal.persist_durable();
        wal.persist_durable();
        assert_eq!(wal.stats().header_writes, before + 1);
        assert_eq!(wal.header().durable, wal.durable());
        // A trim carries the durable offset as well.
        wal.append(&[b"d"]).unwrap().wait().unwrap();
        wal.trim(..wal.durable()).wait().unwrap();
        wal.persist_durable();
        assert_eq!(wal.stats().header_writes, before + 3);
        wal.append(&[b"e"]).unwrap().wait().unwrap();
        wal.persist_durable();
        assert_eq!(wal.stats().header_writes, before + 4);
    });
    let mut headers = slots(&disk);
    headers.sort_by_key(|header| header.generation);
    let [older, newer] = headers;
    assert_eq!(older.generation + 1, newer.generation);
    let expected = HeaderInfo {
        generation: newer.generation,
        durable: newer.durable,
        written_at_ms: newer.written_at_ms,
        ..older.clone()
    };
    assert_eq!(newer, expected, "nothing else has changed");
    assert!(newer.durable > older.durable);
}

/// A power cut at each step of the write, torn or not, and then the loss of either slot.
#[test]
fn any_outcome_of_the_header_write_leaves_a_whole_log() {
    for seed in 0..200 {
        let disk = SimDisk::new(SimOptions {
            capacity_bytes: DATA_START + (1 << 20),
            seed,
            faults: Faults { survives_power_cut: 0.5, torn_by_power_cut: 0.5, ..Faults::default() },
            ..SimOptions::default()
        });
        format(&disk);
        let (wal, ..) = open(&disk);
        wal.append(&[b"a"]).unwrap().wait().unwrap();
        wal.trim(..wal.durable()).wait().unwrap();
        wal.append(&[b"b"]).unwrap().wait().unwrap();
        disk.set_mode(Mode::Queued);
        wal.persist_durable();
        let appends = [b"c", b"d"].map(|name| wal.append(&[name]).unwrap());
        let trim = wal.trim(..LogOffset(0));
        for _ in 0..seed % 8 {
            disk.step();
        }
        let image = disk.power_cut().image();
        drop((wal, appends, trim));
        for lost in [None, Some(0), Some(1)] {
            let cut = SimDisk::from_image(&image, SimOptions::default());
            if let Some(slot) = lost {
                cut.poke(SLOTS[slot], &[0xff; 512]);
            }
            // A torn write has lost one slot; without the other one nothing is left.
            if Wal::inspect(&cut.device()).is_err() {
                assert!(lost.is_some(), "seed {seed}");
                continue;
            }
            let (_, report, records) = open(&cut);
            assert!(names(&records).starts_with(b"b"), "seed {seed}: {report}");
            assert_eq!(report.damage, []);
        }
    }
}

/// The header write may be in flight when the log closes or a trim is requested.
#[test]
fn a_close_and_a_trim_wait_for_persist_durable() {
    let disk = disk(1 << 20);
    format(&disk);
    let (wal, ..) = open(&disk);
    let end = {
        let append = wal.append(&[b"a"]).unwrap();
        let end = append.end();
        append.wait().unwrap();
        end
    };
    disk.set_mode(Mode::Queued);
    wal.persist_durable();
    let trim = wal.trim(..end);
    disk.run_until_idle();
    trim.wait().unwrap();
    disk.set_mode(Mode::Immediate);
    assert_eq!(slots(&disk).map(|header| header.trim), [end; 2]);
    wal.append(&[b"b"]).unwrap().wait().unwrap();
    disk.set_mode(Mode::Queued);
    wal.persist_durable();
    let closing = std::thread::spawn({
        let wal = wal.clone();
        move || wal.close()
    });
    while !closing.is_finished() {
        disk.run_until_idle();
        std::thread::yield_now();
    }
    closing.join().unwrap().unwrap();
    disk.set_mode(Mode::Immediate);
    let (report, records) = scan(&disk);
    assert_eq!((&names(&records)[..], report.clean_shutdown), (&b"b"[..], true));
    wal.persist_durable(); // closed: no effect
}
