//! Offline resizing of a log with records: none is lost, whatever happens meanwhile.

mod common;

use std::collections::VecDeque;
use std::sync::Arc;

use alluvium_device::sim::{Faults, Mode, Random, SimDisk, SimOptions};
use alluvium_device::{AlignedBuf, Completion, Device, DeviceError, Geometry, Request};
use alluvium_wal::{FormatOptions, HeaderInfo, LogOffset, OpenError, Record, Slot, Wal};
use common::*;
use parking_lot::Mutex;

const SLOTS: [u64; 2] = [0, 32 * 1024];
/// Pages of the device; the logs on it take fewer.
const DEVICE: u64 = 128;

fn capacity(ring_pages: u64) -> u64 {
    DATA_START + ring_pages * PAGE
}

fn copy_of(disk: &SimDisk, seed: u64) -> SimDisk {
    let faults = Faults { survives_power_cut: 0.6, torn_by_power_cut: 0.5, ..Faults::default() };
    SimDisk::from_image(&disk.image(), SimOptions { seed, faults, ..SimOptions::default() })
}

/// A log in a ring of `ring` pages from page `start` to page `end` of the log, mostly not on their
/// boundaries. Not closed.
fn log(ring: u64, start: u64, end: u64) -> SimDisk {
    let disk = disk(DEVICE * PAGE);
    let options =
        FormatOptions { capacity_bytes: Some(capacity(ring)), ..FormatOptions::default() };
    Wal::format(&disk.device(), &options).unwrap();
    let (wal, ..) = open(&disk);
    let mut traffic = Traffic::new(&wal, Vec::new());
    traffic.append_until(start * PAGE + 900, 0);
    traffic.trim_all();
    traffic.append_until(end * PAGE - 3000, u64::MAX);
    drop(wal);
    disk.power_cut()
}

/// A writer's records, kept beside the log.
struct Traffic<'a> {
    wal: &'a Wal,
    live: VecDeque<Record>,
    count: u64,
}

impl<'a> Traffic<'a> {
    fn new(wal: &'a Wal, live: Vec<Record>) -> Self {
        Self { wal, live: live.into(), count: 0 }
    }

    /// Appends records of many sizes until the log ends at `end` or slightly after it, and keeps at
    /// most `keep_bytes` of it.
    fn append_until(&mut self, end: u64, keep_bytes: u64) {
        while self.wal.appended().0 < end {
            let left = end - self.wal.appended().0;
            let len = [1500, 40, 4064, 700, 9000][self.count as usize % 5].min(left);
            let payload = vec![self.count as u8; len as usize];
            self.count += 1;
            let append = self.wal.append(&[&payload]).unwrap();
            let (offset, end) = (append.offset(), append.end());
            append.wait().unwrap();
            self.live.push_back(Record {
                offset,
                end,
                epoch: self.wal.header().epoch,
                payload: payload.into(),
            });
            while self.live.front().is_some_and(|first| end.0 - first.offset.0 > keep_bytes) {
                let first = self.live.pop_front().unwrap();
                self.wal.trim(..first.end).wait().unwrap();
            }
        }
    }

    fn trim_all(&mut self) {
        self.wal.trim(..self.wal.durable()).wait().unwrap();
        self.live.clear();
    }
}

/// Checks that a log as on `disk` holds `before` and continues to work: three laps are appended,
/// with a crash in between.
fn check_continues(disk: &SimDisk, before: &[Record]) {
    let ring_bytes = Wal::inspect(&disk.device()).unwrap().ring_bytes;
    let mut disk = copy_of(disk, 0);
    let mut expected = before.to_vec();
    for _ in 0..2 {
        let (wal, report, records) = open(&disk);
        assert_eq!(records, expected);
        assert!(report.damage.is_empty() && report.end == wal.appended());
        let mut traffic = Traffic::new(&wal, records);
        let laps = wal.appended().0 + ring_bytes * 3 / 2;
        // Leave space for the largest record, and for the pages at both ends.
        traffic.append_until(laps, ring_bytes - 5 * PAGE);
        expected = traffic.live.into();
        drop(wal);
        disk = disk.power_cut();
    }
    assert_eq!(open(&disk).2, expected);
}

fn header(disk: &SimDisk) -> HeaderInfo {
    Wal::inspect(&disk.device()).unwrap().header
}

fn resize(disk: &SimDisk, ring_pages: u64) -> Result<HeaderInfo, OpenError> {
    Wal::resize(&disk.device(), capacity(ring_pages), None)
}

/// (pages of the ring, first page of the log, last page of the log)
const EMPTY: (u64, u64, u64) = (40, 70, 70);
const ONE_PIECE: (u64, u64, u64) = (40, 45, 60);
const AT_THE_END: (u64, u64, u64) = (40, 68, 80);
const ACROSS_THE_END: (u64, u64, u64) = (40, 72, 92);
const LONG_ACROSS_THE_END: (u64, u64, u64) = (40, 70, 94);
const NEARLY_FULL: (u64, u64, u64) = (40, 50, 88);

fn shaped((ring, start, end): (u64, u64, u64)) -> SimDisk {
    match start == end {
        true => {
            let disk = log(ring, start, start + 2);
            let (wal, ..) = open(&disk);
            wal.trim(..wal.durable()).wait().unwrap();
            drop(wal);
            disk.power_cut()
        }
        false => log(ring, start, end),
    }
}

#[test]
fn a_log_grows_and_shrinks_with_all_its_records() {
    for (shape, targets) in [
        (EMPTY, &[32, 33, 40, 41, 77, 128][..]),
        (ONE_PIECE, &[32, 35, 40, 45, 80, 128]),
        (AT_THE_END, &[32, 36, 39, 40, 41, 80, 128]),
        (ACROSS_THE_END, &[40, 53, 60, 128]),
        (NEARLY_FULL, &[40, 80, 128]),
    ] {
        let disk = shaped(shape);
        let before = scan(&disk).1;
        let old = header(&disk);
        for &target in targets {
            let disk = copy_of(&disk, target);
            let new = resize(&disk, target)
                .unwrap_or_else(|cause| panic!("{shape:?} to {target}: {cause}"));
            assert_eq!(new, header(&disk));
            assert_eq!(
                (new.capacity_bytes, new.trim, new.epoch),
                (capacity(target), old.trim, old.epoch + 1)
            );
            assert!(
                new.clean_shutdown && new.durable == new.epoch_start && new.durable >= old.durable
            );
            assert!(new.window_bytes <= target * PAGE / 2);
            // Acknowledged records are durable in their new position.
            let disk = disk.power_cut();
            let (report, records) = scan(&disk);
            assert_eq!(records, before, "{shape:?} to {target}");
            assert_eq!((report.end, report.damage.len()), (new.durable, 0));
            check_continues(&disk, &before);
        }
    }
}

#[test]
fn an_immovable_log_is_refused_and_the_disk_is_unchanged() {
    for (shape, targets) in [
        // The log does not fit.
        (NEARLY_FULL, &[32, 36][..]),
        (NEARLY_FULL, &[37]),
        // Live bytes at both ends of the ring, with too little free space between them.
        (LONG_ACROSS_THE_END, &[32, 39, 41, 49]),
    ] {
        let disk = shaped(shape);
        for &target in targets {
            let (image, counters) = (disk.image(), disk.counters());
            let refused = resize(&disk, target).unwrap_err();
            let OpenError::ResizeBlocked { live_bytes, ring_bytes, .. } = refused else {
                panic!("{shape:?} to {target}: {refused}")
            };
            assert_eq!(ring_bytes, target * PAGE);
            assert_eq!(live_bytes, (shape.2 - shape.1) * PAGE, "{shape:?}");
            assert!(
                disk.image() == image && disk.counters().writes == counters.writes,
                "{shape:?} to {target}"
            );
        }
        // As the message says: trim, and try again.
        let (wal, _, records) = open(&disk);
        let keep = records.last().unwrap();
        wal.trim(..keep.offset).wait().unwrap();
        drop(wal);
        let disk = disk.power_cut();
        resize(&disk, targets[0]).unwrap();
        check_continues(&disk, std::slice::from_ref(keep));
    }
}

/// Random rings, logs and targets: all records stay, or a refusal changes nothing.
#[test]
fn a_random_log_resizes_to_a_random_size_without_loss() {
    let mut random = Random::new(1);
    let (mut resized, mut refused) = (0, 0);
    for _ in 0..150 {
        let ring = 32 + random.below(60);
        let start = random.below(3 * ring);
        let disk = log(ring, start, start + 2 + random.below(ring - 4));
        let before = scan(&disk).1;
        let image = disk.image();
        let target = 32 + random.below(DEVICE - 31);
        match resize(&disk, target) {
            Ok(_) => {
                resized += 1;
                check_continues(&disk.power_cut(), &before);
            }
            Err(OpenError::ResizeBlocked { .. }) => {
                refused += 1;
                assert!(disk.image() == image);
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!(resized > 50 && refused > 10, "{resized} resized, {refused} refused");
}

#[test]
fn repeated_resizes_lose_nothing() {
    let mut random = Random::new(2);
    let mut disk = log(50, 30, 45);
    let mut resized = 0;
    for round in 0..60 {
        let before = scan(&disk).1;
        let target = 32 + random.below(DEVICE - 31);
        resized += u32::from(resize(&disk, target).is_ok());
        // Sometimes twice, before it is opened again.
        if random.chance(0.3) {
            resized += u32::from(resize(&disk, 32 + random.below(DEVICE - 31)).is_ok());
        }
        disk = disk.power_cut();
        let (wal, report, records) = open(&disk);
        assert_eq!(records, before, "round {round}");
        assert!(report.damage.is_empty());
        let mut traffic = Traffic::new(&wal, records);
        let live_bytes = random.below(report.ring_bytes - 6 * PAGE);
        traffic.append_until(wal.appended().0 + random.below(2 * report.ring_bytes), live_bytes);
        match random.below(2) {
            0 => wal.close().unwrap(),
            _ => drop(wal),
        }
        disk = disk.power_cut();
    }
    assert!(resized > 30, "{resized}");
}

/// Cuts the power while the request of this number is in flight; reads do not count.
#[derive(Debug)]
struct Plug {
    disk: SimDisk,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    left: u32,
    after: Option<SimDisk>,
}

impl Device for Plug {
    fn geometry(&self) -> &Geometry {
        self.disk.geometry()
    }

    fn alloc(&self, len_bytes: usize) -> AlignedBuf {
        self.disk.alloc(len_bytes)
    }

    fn submit(&self, request: Request, done: Completion) {
        let mut state = self.state.lock();
        let pulled =
            !matches!(request, Request::Read { .. }) && state.after.is_none() && state.left == 0;
        if pulled {
            self.disk.set_mode(Mode::Queued);
        }
        state.left = state.left.saturating_sub(u32::from(!matches!(request, Request::Read { .. })));
        drop(state);
        self.disk.submit(request, done);
        if pulled {
            let after = self.disk.power_cut();
            self.state.lock().after = Some(after);
        }
    }

    fn failure(&self) -> Option<DeviceError> {
        self.disk.failure()
    }
}

/// At every write and flush of a resize, with every fate of unflushed writes: the old capacity or
/// the new one, and all records.
#[test]
fn a_power_cut_leaves_either_capacity_and_all_records() {
    for (shape, target) in [
        (ONE_PIECE, 32),
        (ONE_PIECE, 100),
        (AT_THE_END, 36),
        (ACROSS_THE_END, 60),
        (NEARLY_FULL, 80),
        (EMPTY, 50),
    ] {
        let disk = shaped(shape);
        let before = scan(&disk).1;
        let mut found = [0, 0];
        for seed in 0..25 {
            for left in 0.. {
                let plug = Plug {
                    disk: copy_of(&disk, seed),
                    state: Mutex::new(State { left, after: None }),
                };
                let plug = Arc::new(plug);
                let done = Wal::resize(&(plug.clone() as _), capacity(target), None);
                let Some(after) = plug.state.lock().after.take() else {
                    done.unwrap();
                    break;
                };
                let capacity_bytes = header(&after).capacity_bytes;
                let new = capacity_bytes == capacity(target);
                assert!(new || capacity_bytes == capacity(shape.0), "{capacity_bytes}");
                found[usize::from(new)] += 1;
                let (report, records) = scan(&after);
                assert_eq!(records, before, "{shape:?} to {target}, seed {seed}, request {left}");
                assert!(report.damage.is_empty());
                if seed < 3 {
                    // It can be abandoned, and it can be repeated.
                    check_continues(&copy_of(&after, seed), &before);
                    resize(&after, target).unwrap();
                    check_continues(&after, &before);
                }
            }
        }
        assert!(
            found[0] > 50 && found[1] > 10,
            "{shape:?} to {target}: old and new capacity {found:?} times"
        );
    }
}

/// The log ends at damage that nothing proves. Behind that is the only proof of other damage, which
/// is not the end; the copies may go there.
#[test]
fn damage_proven_only_by_a_record_behind_the_end_is_kept() {
    // In a ring of 32 pages, pages behind page 31 of the ring go to its first ones, where the last
    // record is.
    let disk = log(40, 64, 68);
    let (wal, _, older) = open(&disk);
    disk.set_mode(Mode::Queued);
    let mut appends: Vec<_> = (0..12).map(|name| wal.append(&[&[name; 4064]]).unwrap()).collect();
    while wal.durable() < appends[1].end() {
        assert!(disk.step());
    }
    // The records before it prove nothing about each other.
    let proof = wal.durable();
    appends.push(wal.append(&[&[12; 4064]]).unwrap());
    disk.run_until_idle();
    let disk = disk.power_cut();
    let unproven = appends.iter().position(|append| append.offset() >= proof).unwrap() + 4;
    for index in [0, unproven] {
        flip(&disk, device_at((appends[index].offset().0 + 100) % (40 * PAGE)), 0);
    }
    let (report, before) = scan(&disk);
    assert_eq!(before.len(), older.len() + unproven - 1);
    assert_eq!((report.end, report.damage.len()), (appends[unproven].offset(), 1));
    assert!(report.dropped_records > 0);

    let mut interrupted = 0;
    for target in 32..60 {
        for left in 0.. {
            let plug = Plug {
                disk: copy_of(&disk, left.into()),
                state: Mutex::new(State { left, after: None }),
            };
            let plug = Arc::new(plug);
            let done = Wal::resize(&(plug.clone() as _), capacity(target), None);
            let Some(after) = plug.state.lock().after.take() else {
                assert!(matches!(done, Ok(_) | Err(OpenError::ResizeBlocked { .. })), "{done:?}");
                break;
            };
            interrupted += 1;
            assert_eq!(scan(&after).1, before, "to {target}, request {left}");
        }
    }
    assert!(interrupted > 50, "{interrupted}");
}

/// If the power is cut between the two header writes, either slot alone still describes a whole
/// log.
#[test]
fn either_header_alone_is_enough_at_any_moment() {
    for (shape, target) in [(ONE_PIECE, 32), (ACROSS_THE_END, 60), (NEARLY_FULL, 80)] {
        let disk = shaped(shape);
        let before = scan(&disk).1;
        for left in 0..20 {
            let plug =
                Plug { disk: copy_of(&disk, 0), state: Mutex::new(State { left, after: None }) };
            let plug = Arc::new(plug);
            let done = Wal::resize(&(plug.clone() as _), capacity(target), None);
            let after = plug.state.lock().after.take();
            let after = after.unwrap_or_else(|| {
                done.unwrap();
                plug.disk.power_cut()
            });
            for slot in SLOTS {
                let rotten = copy_of(&after, 0);
                flip(&rotten, slot + 48, 3);
                assert_eq!(
                    scan(&rotten).1,
                    before,
                    "{shape:?} to {target}, request {left}, without slot at {slot}"
                );
                check_continues(&rotten, &before);
            }
        }
    }
}

/// A log that ends at a hole, with an intact record after it that was never acknowledged. Also
/// returns that record's offset.
fn log_with_a_hole() -> (SimDisk, LogOffset) {
    let disk = disk(DEVICE * PAGE);
    let options = FormatOptions { capacity_bytes: Some(capacity(64)), ..FormatOptions::default() };
    Wal::format(&disk.device(), &options).unwrap();
    let (wal, ..) = open(&disk);
    wal.append(&[b"a"]).unwrap().wait().unwrap();
    disk.set_mode(Mode::Queued);
    let blocks: Vec<_> =
        (b'b'..=b'd').map(|name| wal.append(&[&vec![name; FILLER]]).unwrap()).collect();
    let last = blocks[2].offset();
    let at = disk
        .queued()
        .iter()
        .position(|(_, at, _)| *at == device_at(last.0 / PAGE * PAGE))
        .expect("the write is in flight");
    disk.step_at(at);
    disk.set_faults(Faults { survives_power_cut: 0.0, ..Faults::default() });
    (disk.power_cut(), last)
}

/// Payload length of a record that fills a block.
const FILLER: usize = 16 * 1024 - HEADER as usize;

#[test]
fn records_behind_the_end_do_not_come_back() {
    for target in [40, 64, 100] {
        let (disk, dropped) = log_with_a_hole();
        let (report, records) = scan(&disk);
        assert_eq!((names(&records), report.dropped_records), (vec![b'a'], 1));
        let new = resize(&disk, target).unwrap();
        assert_eq!((new.durable, new.origin_bytes), (records[0].end, 0), "it stays where it is");
        // The hole is filled exactly up to the dropped record, which is still there.
        let (wal, report, records) = open(&disk);
        assert_eq!((names(&records), report.dropped_records), (vec![b'a'], 0));
        for name in [b'x', b'y'] {
            wal.append(&[&vec![name; FILLER]]).unwrap().wait().unwrap();
        }
        assert_eq!(wal.appended(), dropped);
        assert_eq!(disk.peek(device_at(dropped.0), 4), b"ALRD");
        drop(wal);
        let disk = disk.power_cut();
        let (report, records) = scan(&disk);
        assert_eq!((names(&records), report.end), (b"axy".to_vec(), dropped));
        resize(&disk, 64).unwrap();
        assert_eq!(names(&open(&disk).2), b"axy");
    }
}

/// The process is killed but the power is not cut: readable records may be only in the device's
/// cache.
#[test]
fn records_left_in_the_cache_by_a_killed_process_stay() {
    for target in [32, 100] {
        let disk = shaped(ONE_PIECE);
        let (wal, _, acknowledged) = open(&disk);
        disk.set_mode(Mode::Queued);
        for name in 0..20 {
            drop(wal.append(&[&[name; 900]]).unwrap());
        }
        let all = Faults { survives_power_cut: 1.0, torn_by_power_cut: 0.0, ..Faults::default() };
        disk.set_faults(all);
        let disk = disk.process_crash();
        let before = scan(&disk).1;
        assert!(before.len() > acknowledged.len());
        resize(&disk, target).unwrap();
        disk.set_faults(Faults { survives_power_cut: 0.0, ..Faults::default() });
        let (report, records) = scan(&disk.power_cut());
        assert_eq!((records, report.damage.len()), (before, 0));
    }
}

/// The window recorded by the formatting is half of a large ring.
#[test]
fn a_log_that_was_never_opened_shrinks() {
    let disk = disk(DEVICE * PAGE);
    format(&disk);
    assert_eq!(header(&disk).window_bytes, DEVICE * PAGE / 2);
    let resized = resize(&disk, 40).unwrap();
    assert_eq!((resized.window_bytes, resized.epoch), (20 * PAGE, 0), "it stays one");
    check_continues(&disk, &[]);
}

#[test]
fn damage_is_moved_and_still_reported() {
    let disk = shaped(AT_THE_END);
    let (report, before) = scan(&disk);
    let bad = &before[before.len() / 2];
    flip(&disk, device_at((bad.offset.0 + HEADER) % (40 * PAGE)), 0);
    let damaged = scan(&disk);
    assert_eq!((damaged.0.damage.len(), damaged.1.len()), (1, before.len() - 1));
    resize(&disk, 36).unwrap();
    assert_ne!(header(&disk).origin_bytes, 0, "it was moved");
    let (after, records) = scan(&disk);
    assert_eq!(records, damaged.1);
    assert_eq!((after.end, &after.damage[0].range), (report.end, &damaged.0.damage[0].range));
}

#[test]
fn invalid_sizes_are_refused_and_nothing_is_written() {
    let disk = shaped(ONE_PIECE);
    let image = disk.image();
    let device_bytes = capacity(DEVICE);
    for wanted in [device_bytes + PAGE, u64::MAX - PAGE + 1] {
        let refused = Wal::resize(&disk.device(), wanted, None).unwrap_err();
        assert!(
            matches!(
                refused,
                OpenError::LargerThanDevice { wanted_bytes, .. } if wanted_bytes == wanted
            ),
            "{refused}"
        );
    }
    for wanted in [0, PAGE, capacity(31), capacity(40) + 512] {
        let refused = Wal::resize(&disk.device(), wanted, None).unwrap_err();
        assert!(refused.to_string().contains(&wanted.to_string()), "{refused}");
        assert!(matches!(refused, OpenError::InvalidOption(_)), "{refused}");
    }
    assert!(disk.image() == image);
    resize(&disk, DEVICE).unwrap();
    check_continues(&disk, &scan(&disk).1);
}

#[test]
fn an_unreadable_page_is_not_left_behind() {
    let unreadable = Faults { read_error: 1.0, ..Faults::default() };
    // In a ring of 36 pages, the pages from 116 on have to be moved, in one copy.
    let disk = log(80, 110, 120);
    let before = scan(&disk).1;
    let page = |page: u64| device_at((page % 80) * PAGE)..device_at((page % 80 + 1) * PAGE);
    for target in [36, 100] {
        let disk = copy_of(&disk, 0);
        // The read of the whole ring, which begins with its first page, and that of the bad page.
        disk.set_zone_faults(page(80), unreadable);
        disk.set_zone_faults(page(116), unreadable);
        let old = header(&disk);
        let result = resize(&disk, target);
        if target == 100 {
            result.expect("nothing is moved");
        } else {
            assert!(
                matches!(&result, Err(OpenError::Device(cause)) if cause.operation == "read"),
                "{result:?}"
            );
            let now = header(&disk);
            assert_eq!(
                (now.capacity_bytes, now.origin_bytes, now.durable, now.clean_shutdown),
                (old.capacity_bytes, old.origin_bytes, scan(&disk).0.end, true)
            );
        }
        disk.clear_zones();
        assert_eq!(scan(&disk).1, before, "to {target}");
        check_continues(&disk, &before);
    }
    // If the bad page may be the end of the log, it is unknown what has to be moved.
    let image = disk.image();
    disk.set_zone_faults(page(80), unreadable);
    disk.set_zone_faults(page(before.last().unwrap().end.0 / PAGE), unreadable);
    assert!(matches!(resize(&disk, 36), Err(OpenError::EndUnreadable { .. })));
    assert!(disk.image() == image);
    disk.clear_zones();
    check_continues(&disk, &before);
}

#[test]
fn a_failed_write_loses_no_record() {
    let disk = shaped(AT_THE_END);
    let before = scan(&disk).1;
    let mut failed = 0;
    for seed in 0..100 {
        for faults in [
            Faults { write_error: 0.3, ..Faults::default() },
            Faults { no_space: 0.3, ..Faults::default() },
            Faults { flush_error: 0.3, ..Faults::default() },
        ] {
            let disk = copy_of(&disk, seed);
            disk.set_faults(faults);
            let result = resize(&disk, 36);
            disk.set_faults(Faults::default());
            failed += u32::from(result.is_err());
            let disk = if seed % 2 == 0 { disk.power_cut() } else { disk.process_crash() };
            assert_eq!(scan(&disk).1, before, "seed {seed}, {faults:?}");
            resize(&disk, 36).unwrap();
            assert_eq!(scan(&disk).1, before);
        }
    }
    assert!(failed > 100, "{failed}");
}

/// The slot without the newest header is already lost when the resize begins.
#[test]
fn one_header_is_enough_to_start_a_resize() {
    for (slot, at) in SLOTS.into_iter().enumerate() {
        let disk = shaped(AT_THE_END);
        let before = scan(&disk).1;
        disk.poke(at, &[0xff; PAGE as usize]);
        let before_slots = Wal::inspect(&disk.device()).unwrap();
        assert_eq!(before_slots.newest, 1 - slot);
        resize(&disk, 36).unwrap();
        let after = Wal::inspect(&disk.device()).unwrap();
        assert!(after.slots.iter().all(
            |slot| matches!(slot, Slot::Valid(header) if header.capacity_bytes == capacity(36))
        ));
        check_continues(&disk, &before);
    }
}
