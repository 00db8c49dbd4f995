//! Regression tests for defects of other implementations of this design, and tests of the
//! interface's guarantees.

mod common;

use std::future::Future;
use std::ops::RangeTo;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use alluvium_device::sim::{Faults, Mode, SimDisk, SimOptions};
use alluvium_device::{AlignedBuf, Completion, Device, DeviceError, Geometry, Request};
use alluvium_wal::{
    Append, AppendError, FormatOptions, LogOffset, OpenError, Options, Wal, WalError,
};
use common::*;

const SLOTS: [u64; 2] = [0, 32 * 1024];

fn to(offset: LogOffset) -> RangeTo<LogOffset> {
    ..offset
}

fn poll<F: Future>(future: F) -> Poll<F::Output> {
    pin!(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// "12,709 writes and no flush on a write-back device."
#[test]
fn each_write_to_a_volatile_cache_carries_a_flush() {
    let disk = disk(1 << 20);
    format(&disk);
    let (wal, ..) = open(&disk);
    let before = disk.counters();
    for index in 0..100 {
        wal.append(&[&[index; 500]]).unwrap().wait().unwrap();
    }
    wal.trim(to(wal.durable())).wait().unwrap();
    let after = disk.counters();
    let writes = after.writes - before.writes;
    assert!(writes >= 102);
    assert_eq!(after.dsync_writes - before.dsync_writes, writes);
    let stats = wal.stats();
    assert_eq!(stats.flushed_writes, writes);
    assert_eq!((stats.records, stats.payload_bytes, stats.header_writes), (100, 50_000, 2));
    assert_eq!(stats.write_times.count(), stats.block_writes);
    let cut = disk.power_cut();
    assert_eq!(open(&cut).1.start, LogOffset(stats.durable.0));
}

/// "A stale header wins": the generation decides, across any number of openings.
#[test]
fn the_trim_offset_never_goes_back_over_reopenings_and_torn_header_writes() {
    let mut disk = SimDisk::new(SimOptions {
        capacity_bytes: DATA_START + (1 << 20),
        seed: 5,
        faults: Faults { torn_by_power_cut: 1.0, survives_power_cut: 0.8, ..Faults::default() },
        ..SimOptions::default()
    });
    format(&disk);
    let mut trimmed = LogOffset(0);
    let mut generation = 0;
    for round in 0..200u8 {
        let (wal, report, records) = open(&disk);
        assert!(report.start >= trimmed, "round {round}: {} after {trimmed}", report.start);
        assert!(report.damage.is_empty());
        assert!(wal.header().generation > generation);
        generation = wal.header().generation;
        assert!(
            names(&records).iter().all(|&name| name == round.wrapping_sub(1)),
            "only the last round is left"
        );
        let kept = wal.append(&[&[round; 100]]).unwrap();
        let kept_at = kept.offset();
        kept.wait().unwrap();
        wal.trim(to(kept_at)).wait().unwrap();
        trimmed = kept_at;
        // Another trim, with a power cut during its first or its second header write.
        disk.set_mode(Mode::Queued);
        drop(wal.trim(to(wal.durable())));
        if round % 2 == 0 {
            assert!(disk.step());
        }
        disk = disk.power_cut();
        let (again, records) = scan(&disk);
        if again.start == trimmed {
            assert_eq!(names(&records), [round]);
        } else {
            trimmed = again.start;
        }
    }
}

/// "Header freshness taken from uptime": after a reboot, or on another machine, a later header may
/// carry an earlier time.
#[test]
fn an_older_header_with_a_later_time_does_not_win() {
    let disk = disk(1 << 20);
    format(&disk);
    let (wal, ..) = open(&disk);
    wal.append(&[b"trimmed"]).unwrap().wait().unwrap();
    let kept = wal.append(&[b"kept"]).unwrap();
    let kept_at = kept.offset();
    kept.wait().unwrap();
    // The power is cut between the two header writes: only one of them has the trim.
    disk.set_mode(Mode::Queued);
    drop(wal.trim(to(kept_at)));
    for _ in 0..3 {
        assert!(disk.step()); // a check of both, and the first write
    }
    let cut = disk.power_cut();
    let newest = Wal::inspect(&cut.device()).unwrap().newest;
    for (slot, at) in SLOTS.into_iter().enumerate() {
        let written_at_ms = if slot == newest { 0u64 } else { 1 << 50 };
        let mut fields = cut.peek(at, 124);
        fields[88..96].copy_from_slice(&written_at_ms.to_le_bytes());
        let crc = crc32c::crc32c(&fields);
        cut.poke(at, &[&fields[..], &crc.to_le_bytes()].concat());
    }
    let (_, report, records) = open(&cut);
    assert_eq!((report.start, names(&records)), (kept_at, vec![b'k']));
}

/// A disk that is inspected before each write to a header slot.
#[derive(Debug)]
struct Watched(SimDisk);

impl Device for Watched {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }
    fn alloc(&self, len_bytes: usize) -> AlignedBuf {
        self.0.alloc(len_bytes)
    }
    fn submit(&self, request: Request, done: Completion) {
        if let Request::Write { at, .. } = &request
            && let Some(slot) = SLOTS.iter().position(|slot| *slot == at.0)
        {
            let newest = Wal::inspect(&self.0.device()).unwrap().newest;
            assert_ne!(slot, newest, "a write that tears would destroy the newest header");
        }
        self.0.submit(request, done);
    }
    fn failure(&self) -> Option<DeviceError> {
        self.0.failure()
    }
}

/// "Header slots written in turn, the turn restarted at slot 0 on every open": the next write goes
/// to the slot without the newest header.
#[test]
fn the_newest_header_is_never_overwritten() {
    let disk = disk(256 * 1024);
    format(&disk);
    let mut newest_seen = [0; 2];
    for round in 0..24u8 {
        let (wal, ..) = try_open(Arc::new(Watched(disk.clone())), &options()).unwrap();
        for _ in 0..round % 3 {
            wal.append(&[&[round; 100]]).unwrap().wait().unwrap();
            wal.trim(to(wal.durable())).wait().unwrap();
        }
        // A clean header is a single write, so that closing advances the turn.
        if round % 4 < 2 {
            wal.close().unwrap();
        }
        newest_seen[Wal::inspect(&disk.device()).unwrap().newest] += 1;
    }
    assert!(newest_seen.iter().all(|count| *count > 0), "from both: {newest_seen:?}");
}

/// Rot in either header, at any moment, has no effect: the other header is enough.
#[test]
fn either_header_alone_is_enough() {
    for slot in [0, 32 * 1024] {
        for bit in [3, 8 * 40, 8 * 66, 8 * 125] {
            let disk = disk(256 * 1024);
            format(&disk);
            let (wal, ..) = open(&disk);
            for index in 0..200u8 {
                wal.append(&[&[index; 3000]]).unwrap().wait().unwrap();
                if index % 20 == 19 {
                    wal.trim(to(LogOffset(wal.durable().0 - 3032))).wait().unwrap(); // several laps
                }
            }
            let cut = disk.power_cut();
            flip(&cut, slot + bit / 8, (bit % 8) as u8);
            let (wal, report, records) = open(&cut);
            assert_eq!(names(&records), [199], "slot at {slot}, bit {bit}");
            assert!(report.damage.is_empty());
            wal.append(&[b"next"]).unwrap().wait().unwrap();
            assert_eq!(open(&cut.power_cut()).2.len(), 2, "the opening repaired the header");
        }
    }
}

/// A trim that ends inside a record is a defect of the caller; the next opening reports it.
#[test]
fn a_trim_into_the_middle_of_a_record_is_reported_as_damage() {
    let disk = disk(1 << 20);
    format(&disk);
    let (wal, ..) = open(&disk);
    wal.append(&[&[1; 100]]).unwrap().wait().unwrap();
    wal.append(&[&[2; 100]]).unwrap().wait().unwrap();
    wal.trim(to(LogOffset(50))).wait().unwrap();
    let (_, report, records) = open(&disk.power_cut());
    assert_eq!(names(&records), [2]);
    assert_eq!(report.damage.len(), 1);
    assert_eq!(report.damage[0].range, LogOffset(50)..LogOffset(132));
}

/// "Recovery that resumes at the next 4 KiB after a bad record which itself ended on a 4 KiB
/// boundary."
#[test]
fn the_record_after_a_damaged_one_ending_on_a_page_boundary_is_found() {
    for bad_header in [false, true] {
        let disk = disk(1 << 20);
        format(&disk);
        let (wal, ..) = open(&disk);
        let bad = wal.append(&[&[1; (PAGE - HEADER) as usize]]).unwrap();
        assert_eq!(bad.end(), LogOffset(PAGE));
        bad.wait().unwrap();
        wal.append(&[b"\x02 the neighbour"]).unwrap().wait().unwrap();
        wal.append(&[b"\x03 proves both"]).unwrap().wait().unwrap();
        let cut = disk.power_cut();
        flip(&cut, device_at(if bad_header { 9 } else { PAGE - 1 }), 0);
        let (_, report, records) = open(&cut);
        assert_eq!(names(&records), [2, 3]);
        assert_eq!(report.damage.len(), 1);
        assert_eq!(report.damage[0].range, LogOffset(0)..LogOffset(PAGE));
        assert_eq!(report.damage[0].device_at.0, DATA_START);
    }
}

/// "After a re-format, half a million old records came back."
#[test]
fn records_of_an_earlier_format_do_not_come_back() {
    let disk = disk(1 << 20);
    format(&disk);
    let (wal, ..) = open(&disk);
    for index in 0..100 {
        wal.append(&[&[index; 1000]]).unwrap().wait().unwrap();
    }
    wal.close().unwrap();
    // Only the headers are new, as if nothing else had been erased.
    let old = disk.image();
    format(&disk);
    disk.poke(DATA_START, &old[DATA_START as usize..]);
    let (wal, report, records) = open(&disk);
    assert_eq!((records.len(), report.damage.len(), report.dropped_records), (0, 0, 0));
    // Same positions, lengths and epoch as the old records.
    wal.append(&[&[200; 1000]]).unwrap().wait().unwrap();
    let (_, report, records) = open(&disk.power_cut());
    assert_eq!((names(&records), report.dropped_records), (vec![200], 0));
}

/// "A record larger than the buffers accepted, failing later, and pinning the window for ever."
#[test]
fn an_oversized_record_is_refused_and_the_largest_always_fits() {
    let disk = disk(256 * 1024);
    format(&disk);
    let max = 64 * 1024 - 2 * PAGE as u32;
    let options = Options {
        window_bytes: 128 * 1024,
        block_bytes: 4096,
        max_record_bytes: max,
        ..Options::default()
    };
    let (wal, ..) = try_open(disk.device(), &options).unwrap();
    let before = wal.stats();
    let large = vec![7; max as usize + 1];
    assert!(matches!(
        wal.append(&[&large]),
        Err(AppendError::TooLarge { max_bytes, .. }) if max_bytes == max
    ));
    assert!(matches!(wal.append(&[]), Err(AppendError::Empty)));
    assert!(matches!(wal.append(&[&[], &[]]), Err(AppendError::Empty)));
    assert_eq!(wal.stats(), before);
    for index in 0..40u8 {
        // From every kind of position: on a page boundary, just after one, just before one.
        wal.append(&[&vec![index; [1, 4064, 4030, 4050][index as usize % 4]]])
            .unwrap()
            .wait()
            .unwrap();
        wal.append(&[&large[1..]]).unwrap_or_else(|cause| panic!("{cause}")).wait().unwrap();
        wal.trim(to(wal.durable())).wait().unwrap();
    }
    assert!(wal.durable().0 > 8 * 256 * 1024, "several laps");
    let refused = Options { max_record_bytes: max + 1, ..options };
    let cause = try_open(disk.power_cut().device(), &refused).unwrap_err().to_string();
    assert!(cause.contains(&(max + 1).to_string()) && cause.contains("131072"), "{cause}");
}

/// Trimmed space is reused only when the trim is durable in both headers.
#[test]
fn the_ring_is_reused_only_after_the_header_is_durable() {
    let disk = disk(256 * 1024);
    format(&disk);
    let (wal, ..) = open(&disk);
    let full = loop {
        match wal.append(&[&[1; 4000]]) {
            Ok(append) => append.wait().unwrap(),
            Err(cause) => break cause,
        }
    };
    assert!(
        matches!(full, AppendError::OverCapacity { ring_bytes, .. } if ring_bytes == 256 * 1024),
        "{full}"
    );
    let before = wal.stats();
    disk.set_mode(Mode::Queued);
    let space = wal.wait_space();
    let mut trim = wal.trim(to(wal.durable()));
    // Two header writes, each after a check of both slots.
    for _ in 0..6 {
        assert!(
            matches!(wal.append(&[&[2; 4000]]), Err(AppendError::OverCapacity { .. })),
            "not durable in both"
        );
        assert!(poll(&mut trim).is_pending());
        assert!(disk.step());
    }
    assert!(matches!(poll(&mut trim), Poll::Ready(Ok(()))));
    assert!(poll(space).is_ready());
    assert_eq!(wal.stats().appended, before.appended, "refusals change nothing");
    wal.append(&[&[2; 4000]]).map(drop).unwrap();
}

#[test]
fn a_full_window_refuses_appends_until_records_are_durable() {
    let disk = disk(1 << 20);
    format(&disk);
    let (wal, ..) = open(&disk);
    disk.set_mode(Mode::Queued);
    let mut taken = Vec::new();
    let refused = loop {
        match wal.append(&[&[1; 1000]]) {
            Ok(append) => taken.push(append),
            Err(cause) => break cause,
        }
    };
    assert!(matches!(refused, AppendError::WindowFull { window_bytes: 65536, .. }), "{refused}");
    // The whole window, less up to a page of padding in each of the first blocks.
    assert!(taken.len() >= 56, "{} records of 1032 bytes in 64 KiB", taken.len());
    let mut space = wal.wait_space();
    assert!(poll(&mut space).is_pending());
    disk.run_until_idle();
    assert!(poll(&mut space).is_ready());
    assert!(taken.into_iter().all(|append| matches!(poll(append), Poll::Ready(Ok(())))));
    // Created after the move that followed the refusal: it resolves at once.
    assert!(poll(wal.wait_space()).is_ready());
    wal.append(&[&[1; 1000]]).map(drop).unwrap();
}

/// "Every block padded to 4 KiB at low load: 8 MiB of small records filled a 64 MiB ring."
#[test]
fn small_records_at_a_low_rate_take_only_their_own_space() {
    let disk = disk(4 << 20);
    format(&disk);
    let (wal, ..) = open(&disk);
    for _ in 0..8000 {
        wal.append(&[&[1; 100]]).unwrap().wait().unwrap(); // one at a time
    }
    let stats = wal.stats();
    assert_eq!(stats.used_bytes, 8000 * 132, "each its header and itself");
    assert_eq!((stats.padding_bytes, stats.block_writes), (0, 8000));
    assert_eq!(open(&disk.power_cut()).2.len(), 8000);
}

/// "Batching that exists only because of the limiter": without any limit, records appended while a
/// write is in flight share the next one, and tiny blocks do not take the slots.
#[test]
fn records_appended_while_a_write_is_in_flight_share_the_next_one() {
    let disk = disk(1 << 20);
    format(&disk);
    let (wal, ..) = open(&disk);
    disk.set_mode(Mode::Queued);
    let appends: Vec<_> = (0..60).map(|index| wal.append(&[&[index; 100]]).unwrap()).collect();
    assert_eq!(wal.stats().in_flight, 1);
    disk.run_until_idle();
    assert!(appends.into_iter().all(|append| matches!(poll(append), Poll::Ready(Ok(())))));
    let stats = wal.stats();
    assert!(stats.block_writes <= 3, "{stats:?}");
    // Full blocks use all slots, once the single record before them, whose page they continue, is
    // durable.
    for index in 0..30 {
        wal.append(&[&[index; 1500]]).map(drop).unwrap();
    }
    disk.step();
    assert!(wal.stats().in_flight >= 2, "{:?}", wal.stats());
}

/// "A timer and a future per record": a record that is not awaited leaves nothing behind; an
/// awaited one leaves a waker, which is removed when it is woken.
#[test]
fn a_record_keeps_only_the_waker_of_its_waiter() {
    struct Task;
    impl Wake for Task {
        fn wake(self: Arc<Self>) {}
    }
    let disk = disk(1 << 20);
    format(&disk);
    let (wal, ..) = open(&disk);
    disk.set_mode(Mode::Queued);
    let task = Arc::new(Task);
    let waker = Waker::from(task.clone());
    let mut appends: Vec<_> = (0..200).map(|_| wal.append(&[&[1; 100]]).unwrap()).collect();
    assert_eq!(Arc::strong_count(&task), 2);
    for append in appends.iter_mut().step_by(2) {
        for _ in 0..3 {
            assert!(pin!(&mut *append).poll(&mut Context::from_waker(&waker)).is_pending());
        }
    }
    assert_eq!(Arc::strong_count(&task), 2 + 100);
    appends.truncate(100);
    assert_eq!(Arc::strong_count(&task), 2 + 50);
    disk.run_until_idle();
    assert_eq!(Arc::strong_count(&task), 2);
    assert!(size_of::<Append>() <= 6 * size_of::<u64>());
}

#[test]
fn acknowledgements_follow_the_log_not_the_device() {
    let disk = disk(1 << 20);
    format(&disk);
    let (wal, ..) = open(&disk);
    disk.set_mode(Mode::Queued);
    let mut appends: Vec<_> =
        (0..3).map(|index| wal.append(&[&[index; 16 * 1024 - HEADER as usize]]).unwrap()).collect();
    assert_eq!(disk.queued().len(), 3);
    disk.step_at(2);
    disk.step_at(1);
    assert_eq!(wal.durable(), LogOffset(0));
    assert!(appends.iter_mut().all(|append| poll(append).is_pending()));
    disk.step_at(0);
    assert_eq!(wal.durable(), wal.appended());
    assert!(appends.iter_mut().all(|append| poll(append).is_ready()));
}

#[test]
fn the_first_error_latches_and_every_waiter_gets_it() {
    for header in [false, true] {
        let disk = disk(1 << 20);
        format(&disk);
        let (wal, ..) = open(&disk);
        wal.append(&[b"before"]).unwrap().wait().unwrap();
        disk.set_faults(Faults { write_error: 1.0, ..Faults::default() });
        let cause = if header {
            wal.trim(to(wal.durable())).wait().unwrap_err()
        } else {
            wal.append(&[b"lost"]).unwrap().wait().unwrap_err()
        };
        assert!(matches!(&cause, WalError::Device(cause) if cause.operation == "write"), "{cause}");
        disk.set_faults(Faults::default());
        let refused = wal.append(&[b"later"]).unwrap_err();
        assert_eq!(refused.to_string(), cause.to_string());
        assert!(poll(wal.wait_space()).is_ready());
        assert!(matches!(
            poll(wal.wait_durable(LogOffset(1 << 40))),
            Poll::Ready(Err(WalError::Device(_)))
        ));
        assert!(wal.stats().failed);
        assert!(wal.close().is_err());
        assert_eq!(names(&open(&disk.power_cut()).2)[0], b'b');
    }
}

#[test]
fn after_a_close_appends_are_refused_and_reopening_scans_nothing() {
    let disk = disk(1 << 20);
    format(&disk);
    let (wal, report, _) = open(&disk);
    assert!(report.clean_shutdown, "formatted, never used");
    let other = wal.clone();
    let last = wal.append(&[b"last"]).unwrap();
    wal.trim(to(LogOffset(0))).wait().unwrap();
    wal.close().unwrap();
    assert!(matches!(poll(last), Poll::Ready(Ok(()))));
    assert!(matches!(other.append(&[b"x"]), Err(AppendError::Closed)));
    assert!(matches!(poll(other.trim(to(LogOffset(0)))), Poll::Ready(Err(WalError::Closed))));
    assert!(matches!(other.clone().close(), Err(WalError::Closed)));
    let reads = disk.counters().reads;
    let (report, records) = scan(&disk);
    assert!(report.clean_shutdown && names(&records) == b"l");
    assert_eq!(
        disk.counters().reads - reads,
        3,
        "two headers and the part of the ring with the end, nothing ahead of that"
    );
}

#[test]
fn dropping_the_last_handle_stops_without_a_clean_header() {
    let disk = disk(1 << 20);
    format(&disk);
    let (wal, ..) = open(&disk);
    wal.append(&[b"kept"]).unwrap().wait().unwrap();
    disk.set_mode(Mode::Queued);
    let mut open_end = wal.append(&[b"in flight"]).unwrap();
    drop(wal);
    assert!(matches!(poll(&mut open_end), Poll::Ready(Err(WalError::Closed))));
    let (_, report, records) = open(&disk.power_cut());
    assert!(!report.clean_shutdown && names(&records)[0] == b'k');
}

#[test]
fn limits_delay_writes_without_losing_any() {
    let disk = disk(1 << 20);
    format(&disk);
    let options =
        Options { iops: Some(500), bandwidth_bytes_per_second: Some(8 << 20), ..options() };
    let (wal, ..) = try_open(disk.device(), &options).unwrap();
    let appends: Vec<_> = (0..400).map(|index| wal.append(&[&[index as u8; 100]])).collect();
    for append in appends {
        append.unwrap().wait().unwrap();
    }
    let stats = wal.stats();
    assert!(stats.block_writes < 400, "what waits for quota goes together: {stats:?}");
    wal.close().unwrap();
    assert_eq!(open(&disk.power_cut()).2.len(), 400);
}

#[test]
fn format_refuses_to_destroy_other_data() {
    let disk = disk(1 << 20);
    disk.poke(1080, b"\x53\xef");
    let device = disk.device();
    let refused = Wal::format(&device, &FormatOptions::default()).unwrap_err().to_string();
    assert!(refused.contains("ext4") && refused.contains("force"), "{refused}");
    assert!(matches!(
        Wal::inspect(&device),
        Err(OpenError::NotAWal { looks_like, .. }) if looks_like.contains("ext4")
    ));
    Wal::format(&device, &FormatOptions { force: true, ..FormatOptions::default() }).unwrap();
    let refused = Wal::format(&device, &FormatOptions::default()).unwrap_err().to_string();
    assert!(refused.contains("an Alluvium WAL"), "{refused}");

    let small = Wal::format(
        &device,
        &FormatOptions { capacity_bytes: Some(1 << 30), ..FormatOptions::default() },
    );
    let message = small.unwrap_err().to_string();
    assert!(message.contains("1GiB exceeds the 1088KiB of the device"), "{message}");
    let empty = common::disk(1 << 20);
    assert!(matches!(Wal::inspect(&empty.device()), Err(OpenError::NotFormatted { .. })));
}

#[test]
fn a_wal_that_is_larger_than_its_device_is_refused() {
    let large = disk(2 << 20);
    format(&large);
    let image = large.image();
    let cut = SimDisk::from_image(&image[..1 << 20], SimOptions::default());
    let message = Wal::inspect(&cut.device()).unwrap_err().to_string();
    assert!(message.contains("2112KiB exceeds the 1MiB of the device"), "{message}");
}

/// A crash at each write of a forced format leaves the old WAL, none, or the new one; never a
/// mixture.
#[test]
fn a_crash_while_formatting_leaves_no_mixture() {
    let disk = disk(1 << 20);
    format(&disk);
    let (wal, ..) = open(&disk);
    wal.append(&[b"old"]).unwrap().wait().unwrap();
    let old_id = wal.id();
    let image = disk.image();
    for seed in 0..40 {
        for write in 0..8 {
            let faults = Faults { torn_by_power_cut: 0.5, ..Faults::default() };
            let disk =
                SimDisk::from_image(&image, SimOptions { seed, faults, ..SimOptions::default() });
            disk.set_mode(Mode::Queued);
            let device = disk.device();
            let formatter = std::thread::spawn(move || {
                Wal::format(&device, &FormatOptions { force: true, ..FormatOptions::default() })
            });
            let mut left = write;
            while left > 0 && !formatter.is_finished() {
                if disk.queued().iter().any(|(operation, ..)| *operation != "read") {
                    left -= 1;
                }
                if !disk.step() {
                    std::thread::yield_now();
                }
            }
            let cut = disk.power_cut();
            drop(formatter.join().unwrap());
            match Wal::inspect(&cut.device()) {
                Ok(inspection) if inspection.header.wal_id == old_id => {
                    assert_eq!(names(&open(&cut).2), b"o");
                }
                Ok(_) => assert!(open(&cut).2.is_empty()),
                Err(
                    OpenError::NotFormatted { .. }
                    | OpenError::HeaderDamaged { .. }
                    | OpenError::NotAWal { .. },
                ) => {}
                Err(other) => panic!("seed {seed}, write {write}: {other}"),
            }
        }
    }
}

/// A panic outside the log, whose unwinding drops a value that appends.
#[test]
fn an_append_while_another_panic_unwinds_does_not_stop_the_log() {
    struct LastWords<'a>(&'a Wal);
    impl Drop for LastWords<'_> {
        fn drop(&mut self) {
            self.0.append(&[b"last words"]).unwrap().wait().unwrap();
        }
    }
    let disk = disk(1 << 20);
    format(&disk);
    let (wal, ..) = open(&disk);
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let _last_words = LastWords(&wal);
        panic!("elsewhere");
    }));
    assert!(unwound.is_err());
    wal.append(&[b"next"]).unwrap().wait().unwrap();
    assert_eq!(names(&scan(&disk).1), b"ln");
}

/// A log whose state a panic may have left inconsistent gets no clean header, even if nothing is
/// outstanding.
#[test]
fn a_log_stopped_by_a_panic_is_not_closed_cleanly() {
    struct Bomb;
    impl Wake for Bomb {
        fn wake(self: Arc<Self>) {
            panic!("in foreign code");
        }
    }
    let disk = disk(1 << 20);
    format(&disk);
    let (wal, ..) = open(&disk);
    let mut durable = wal.wait_durable(LogOffset(1));
    let waker = Waker::from(Arc::new(Bomb));
    assert!(pin!(&mut durable).poll(&mut Context::from_waker(&waker)).is_pending());
    // The disk completes the write on this thread, inside the append.
    let unwound = catch_unwind(AssertUnwindSafe(|| wal.append(&[b"x"]).map(drop)));
    assert!(unwound.is_err() && wal.durable() == wal.appended());
    assert!(matches!(wal.close(), Err(WalError::Panicked)));
    let (report, records) = scan(&disk);
    assert!(!report.clean_shutdown && names(&records) == b"x");
}

#[test]
fn a_clean_log_ends_after_the_padding_written_by_its_close() {
    let disk = disk(1 << 20);
    format(&disk);
    let (wal, ..) = open(&disk);
    let other = wal.clone();
    disk.set_mode(Mode::Queued);
    wal.append(&[b"first"]).map(drop).unwrap();
    // It waits for the first one, whose page it continues, and is then padded, since it is a
    // quarter of a block.
    wal.append(&[&[2; 5000]]).map(drop).unwrap();
    let before = wal.appended();
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| wal.close());
        // This trims nothing; it only tests whether the close has begun.
        while !matches!(poll(other.trim(to(LogOffset(0)))), Poll::Ready(Err(WalError::Closed))) {
            std::thread::yield_now();
        }
        disk.set_mode(Mode::Immediate);
        closing.join().unwrap().unwrap();
    });
    let end = other.appended();
    assert!(end > before && end.0.is_multiple_of(PAGE));
    let (report, records) = scan(&disk);
    assert!(report.clean_shutdown && names(&records) == [b'f', 2]);
    assert_eq!(report.end, end);
}

/// On a disk that completes on the submitting thread, each block would otherwise be submitted from
/// the completion of the previous one.
#[test]
fn the_stack_does_not_grow_with_the_blocks_of_a_record() {
    let disk = disk(36 << 20);
    format(&disk);
    let options = Options {
        window_bytes: 18 << 20,
        block_bytes: 4096,
        max_record_bytes: 8 << 20,
        ..Options::default()
    };
    let (wal, ..) = try_open(disk.device(), &options).unwrap();
    wal.append(&[&vec![1; 8 << 20]]).unwrap().wait().unwrap();
    assert!(wal.stats().block_writes > 2000);
    assert_eq!(names(&open(&disk.power_cut()).2), [1]);
}

/// A record of a block's size, under limits, while the previous write is late: its last 32 bytes do
/// not wait for a write of their own.
#[test]
fn a_late_write_does_not_split_the_next_record() {
    let disk = disk(1 << 20);
    format(&disk);
    let limited =
        Options { iops: Some(1_000_000), bandwidth_bytes_per_second: Some(1 << 40), ..options() };
    let (wal, ..) = try_open(disk.device(), &limited).unwrap();
    disk.set_mode(Mode::Queued);
    let mut page = wal.append(&[&[1; 4096 - 32]]).unwrap();
    let mut record = wal.append(&[&[2; 16 * 1024]]).unwrap();
    assert!(poll(&mut page).is_pending() && poll(&mut record).is_pending());
    assert!(disk.step() && disk.step());
    assert!(poll(page).is_ready() && poll(record).is_ready());
    assert!(!disk.step(), "two writes are all");
}
