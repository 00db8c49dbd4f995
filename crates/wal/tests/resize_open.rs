//! Resizing of a log in use: it takes effect when nothing has to be moved, and loses nothing
//! whenever the power is cut.

mod common;

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use alluvium_device::Device;
use alluvium_device::sim::{Faults, Mode, Random, SimDisk, SimOptions};
use alluvium_wal::{
    Append, AppendError, FormatOptions, LogOffset, Options, Record, ResizeError, Resizing, Slot,
    Trim, Wal, WalError,
};
use common::*;

/// Pages of the device; the logs on it take fewer.
const DEVICE: u64 = 128;

fn capacity(ring_pages: u64) -> u64 {
    DATA_START + ring_pages * PAGE
}

fn sim_options(seed: u64) -> SimOptions {
    let faults = Faults { survives_power_cut: 0.6, torn_by_power_cut: 0.5, ..Faults::default() };
    SimOptions { capacity_bytes: capacity(DEVICE), seed, faults, ..SimOptions::default() }
}

fn formatted(ring_pages: u64, seed: u64) -> SimDisk {
    let disk = SimDisk::new(sim_options(seed));
    let options =
        FormatOptions { capacity_bytes: Some(capacity(ring_pages)), ..FormatOptions::default() };
    Wal::format(&disk.device(), &options).unwrap();
    disk
}

fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// The writer's knowledge of the log's content.
#[derive(Clone, Default)]
struct Known {
    /// Appended, and possibly not trimmed.
    records: VecDeque<Record>,
    /// Acknowledged up to here.
    durable: u64,
    /// Durably trimmed up to here.
    trimmed: u64,
    trim_asked: u64,
    named: u64,
}

/// A run of a writer whose disk executes requests in random order.
struct Session {
    disk: SimDisk,
    wal: Wal,
    random: Random,
    known: Known,
    trims: Vec<(u64, Trim)>,
    resizes: Vec<(u64, Resizing)>,
    resized: u64,
}

impl Session {
    /// Recovers the log and compares it with `known`.
    fn open(disk: SimDisk, mut known: Known, random: Random) -> Self {
        let (wal, report, records) = open(&disk);
        assert!(report.damage.is_empty(), "{report}");
        let start = report.start.0;
        assert!(
            (known.trimmed..=known.trim_asked).contains(&start),
            "trimmed to {start}, {} to {} were asked for",
            known.trimmed,
            known.trim_asked
        );
        assert!(report.end.0 >= known.durable, "ends at {}, {} lost", report.end, known.durable);
        known.records.retain(|record| record.offset.0 >= start);
        assert!(records.len() <= known.records.len(), "{} records too many", records.len());
        for (found, known) in records.iter().zip(&known.records) {
            assert_eq!((found.offset, &found.payload), (known.offset, &known.payload));
        }
        let lost =
            known.records.range(records.len()..).find(|record| record.end.0 <= known.durable);
        assert!(lost.is_none(), "{lost:?} was acknowledged, {} recovered", records.len());
        known.records.truncate(records.len());
        (known.trimmed, known.trim_asked, known.durable) = (start, start, report.end.0);
        disk.set_mode(Mode::Queued);
        Self { disk, wal, random, known, trims: Vec::new(), resizes: Vec::new(), resized: 0 }
    }

    /// Appends a record. Returns false if there is no space.
    fn append(&mut self, len: usize) -> bool {
        self.known.named += 1;
        let mut payload = vec![self.known.named as u8; len];
        let name = self.known.named.to_le_bytes();
        payload[..len.min(8)].copy_from_slice(&name[..len.min(8)]);
        match self.wal.append(&[&payload]) {
            Ok(append) => {
                let (offset, end) = (append.offset(), append.end());
                drop(append);
                self.known.records.push_back(Record {
                    offset,
                    end,
                    epoch: 0,
                    payload: payload.into(),
                });
                true
            }
            Err(AppendError::OverCapacity { .. } | AppendError::WindowFull { .. }) => false,
            Err(other) => panic!("{other}"),
        }
    }

    fn append_any(&mut self) -> bool {
        let len = match self.random.below(4) {
            0 => 1 + self.random.below(16_000),
            1 => PAGE - 32,
            _ => 1 + self.random.below(900),
        };
        self.append(len as usize)
    }

    fn trim(&mut self, to: u64) {
        if to > self.known.trim_asked {
            self.known.trim_asked = to;
            self.trims.push((to, self.wal.trim(..LogOffset(to))));
        }
    }

    /// Trims the given share of the durable log.
    fn trim_some(&mut self, permille: u64) {
        let durable = self.wal.durable().0;
        let ends = self.known.records.iter().map(|record| record.end.0);
        let ends: Vec<u64> = ends.filter(|end| *end <= durable).collect();
        if let Some(end) = ends.get(ends.len() * permille as usize / 1001) {
            self.trim(*end);
        }
    }

    fn resize(&mut self, ring_pages: u64) {
        let resizing = self.wal.request_resize(capacity(ring_pages)).unwrap();
        self.resizes.push((ring_pages, resizing));
    }

    fn poll_futures(&mut self) {
        let known = &mut self.known;
        known.durable = self.wal.durable().0;
        self.trims.retain_mut(|(to, trim)| match poll(trim) {
            Poll::Pending => true,
            Poll::Ready(done) => {
                done.unwrap();
                known.trimmed = known.trimmed.max(*to);
                false
            }
        });
        let trimmed = known.trimmed;
        known.records.retain(|record| record.offset.0 >= trimmed);
        let resized = &mut self.resized;
        self.resizes.retain_mut(|(ring_pages, resizing)| match poll(resizing) {
            Poll::Pending => true,
            Poll::Ready(Ok(header)) => {
                assert_eq!(header.capacity_bytes, capacity(*ring_pages));
                *resized += 1;
                false
            }
            Poll::Ready(Err(ResizeError::Replaced { .. })) => false,
            Poll::Ready(Err(other)) => panic!("{other}"),
        });
    }

    fn run_until_idle(&mut self) {
        self.disk.run_until_idle();
        self.poll_futures();
    }

    /// Cuts the power; returns the writer's knowledge and the disk.
    fn cut_power(mut self) -> (SimDisk, Known, Random) {
        self.poll_futures();
        (self.disk.power_cut(), self.known, self.random)
    }

    /// Appends, with immediate execution, until the log ends at or after `end`, and keeps about
    /// `keep_bytes` of it.
    fn append_until(&mut self, end: u64, keep_bytes: u64) {
        while self.wal.appended().0 < end {
            if !self.append(1500) {
                self.trim_some(100);
            }
            self.run_until_idle();
            let bound = self.wal.appended().0.saturating_sub(keep_bytes);
            let ends = self.known.records.iter().map(|record| record.end.0);
            if let Some(end) = ends.filter(|end| *end <= bound).max() {
                self.trim(end);
                self.run_until_idle();
            }
        }
    }
}

/// A log in a ring of `ring` pages from about page `start` to about page `end`, with nothing
/// outstanding.
fn session(ring: u64, start: u64, end: u64, seed: u64) -> Session {
    let disk = formatted(ring, seed);
    let mut session = Session::open(disk, Known::default(), Random::new(seed));
    session.append_until(start * PAGE + 900, 0);
    session.append_until(end * PAGE - 2000, (end - start) * PAGE);
    session
}

/// Continues for two laps, with a power cut in between, and checks that nothing is lost.
fn check_continues(disk: SimDisk, known: Known, random: Random) {
    let mut session = Session::open(disk, known, random);
    for _ in 0..2 {
        let ring_bytes = session.wal.stats().ring_bytes;
        session.append_until(session.wal.appended().0 + ring_bytes, ring_bytes / 2);
        let (disk, known, random) = session.cut_power();
        session = Session::open(disk, known, random);
    }
}

#[test]
fn a_log_in_one_piece_is_resized_at_once() {
    for (from, start, end, to) in
        [(40, 45, 60, 128), (40, 45, 60, 32), (40, 68, 79, 41), (128, 130, 150, 32)]
    {
        let mut session = session(from, start, end, 0);
        let before = session.wal.header();
        session.resize(to);
        assert_eq!(session.wal.stats().resize_to_bytes, Some(capacity(to)));
        assert_eq!(session.wal.stats().resize_distance_bytes, 0);
        session.run_until_idle();
        assert_eq!((session.resized, session.resizes.len()), (1, 0), "{from} to {to}");
        let (header, stats) = (session.wal.header(), session.wal.stats());
        assert_eq!(header.capacity_bytes, capacity(to));
        assert_eq!(header.generation, before.generation + 2, "one change");
        assert_eq!((stats.ring_bytes, stats.resize_to_bytes), (to * PAGE, None));
        let (disk, known, random) = session.cut_power();
        check_continues(disk, known, random);
    }
}

/// A log that holds only the repeated bytes of a page can be placed anywhere.
#[test]
fn an_empty_log_is_resized_at_once_wherever_it_ends() {
    let mut session = session(128, 150, 250, 0);
    session.trim(session.wal.durable().0);
    session.run_until_idle();
    assert_ne!(session.wal.appended().0 % PAGE, 0);
    session.resize(32);
    session.run_until_idle();
    assert_eq!(session.resized, 1);
    let (disk, known, random) = session.cut_power();
    check_continues(disk, known, random);
}

#[test]
fn a_log_across_the_end_waits_for_the_trim_to_pass_it() {
    let mut session = session(40, 72, 90, 0);
    session.resize(64);
    session.run_until_idle();
    assert_eq!(session.wal.stats().resize_to_bytes, Some(capacity(64)));
    assert_eq!(session.wal.stats().resize_distance_bytes, (80 - 72) * PAGE);
    assert_eq!(session.wal.stats().ring_bytes, 40 * PAGE);
    session.append_until(95 * PAGE, 17 * PAGE);
    assert_eq!(session.resized, 0, "the log is unchanged until then");
    session.append_until(99 * PAGE, 17 * PAGE);
    assert_eq!((session.resized, session.wal.stats().ring_bytes), (1, 64 * PAGE));
    let (disk, known, random) = session.cut_power();
    check_continues(disk, known, random);
}

#[test]
fn a_log_that_is_to_shrink_keeps_to_the_smaller_ring() {
    let mut session = session(100, 150, 170, 0);
    session.resize(40);
    while session.append(4064) {
        session.run_until_idle();
    }
    let refused = session.wal.append(&[&[0; 4064]]);
    let Err(AppendError::OverCapacity { ring_bytes, .. }) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!((ring_bytes, session.wal.stats().ring_bytes), (40 * PAGE, 100 * PAGE));
    assert!(session.wal.stats().used_bytes <= 40 * PAGE);

    // After the withdrawal the whole ring is available again, and waiters for space are woken.
    let mut space = session.wal.wait_space();
    assert!(poll(&mut space).is_pending());
    session.resize(100);
    assert!(poll(&mut space).is_ready());
    session.poll_futures();
    assert_eq!((session.resized, session.wal.stats().resize_to_bytes), (1, None));
    assert!(session.append(4064));
    session.run_until_idle();

    session.resize(40);
    let distance = session.wal.stats().resize_distance_bytes;
    assert_eq!(distance, (200 - 150) * PAGE);
    session.append_until(199 * PAGE, 30 * PAGE);
    assert_eq!(session.resized, 1);
    session.append_until(240 * PAGE, 30 * PAGE);
    assert_eq!((session.resized, session.wal.stats().ring_bytes), (2, 40 * PAGE));
    let (disk, known, random) = session.cut_power();
    check_continues(disk, known, random);
}

#[test]
fn blocks_wait_for_the_headers_and_appends_do_not() {
    let mut session = session(40, 45, 60, 0);
    assert!(session.append(9000));
    assert_eq!(session.wal.stats().in_flight, 1);
    session.resize(64);
    assert!(session.append(9000) && session.append(300));
    assert_eq!(session.wal.stats().in_flight, 1, "held back");
    while session.wal.stats().ring_bytes == 40 * PAGE {
        let blocks = session.disk.queued().iter().filter(|(_, at, _)| *at >= DATA_START).count();
        assert!(blocks <= 1 && session.wal.stats().in_flight <= 1);
        assert!(session.disk.step());
    }
    assert!(session.wal.stats().in_flight > 0, "blocks are written again");
    session.run_until_idle();
    assert_eq!(session.wal.durable(), session.wal.appended());
    let (disk, known, random) = session.cut_power();
    check_continues(disk, known, random);
}

#[test]
fn appended_but_unsubmitted_bytes_have_to_fit_too() {
    // The submitted part is inside the smaller ring, the queued part after it is not.
    let session = session(100, 105, 125, 0);
    let (disk, ..) = session.cut_power();
    let (wal, ..) = try_open(disk.device(), &Options { io_depth: 1, ..options() }).unwrap();
    disk.set_mode(Mode::Queued);
    while wal.append(&[&[1; 4064]]).is_ok() {}
    let stats = wal.stats();
    assert_eq!(stats.in_flight, 1);
    assert!(stats.appended.0 > 105 * PAGE + 32 * PAGE);
    let mut resizing = wal.request_resize(capacity(32)).unwrap();
    assert!(wal.stats().resize_distance_bytes > 0);
    disk.run_until_idle();
    assert_eq!((wal.durable(), wal.stats().ring_bytes), (wal.appended(), 100 * PAGE));
    assert!(poll(&mut resizing).is_pending());
    let mut trim = wal.trim(..wal.durable());
    disk.run_until_idle();
    assert!(poll(&mut trim).is_ready() && poll(&mut resizing).is_ready());
}

#[test]
fn only_the_last_request_counts() {
    let mut session = session(40, 72, 90, 0);
    let mut first = session.wal.request_resize(capacity(64)).unwrap();
    let mut again = session.wal.request_resize(capacity(64)).unwrap();
    let mut second = session.wal.request_resize(capacity(50)).unwrap();
    for replaced in [&mut first, &mut again] {
        let outcome = poll(replaced);
        let Poll::Ready(Err(ResizeError::Replaced { capacity_bytes })) = outcome else {
            panic!("{outcome:?}");
        };
        assert_eq!(capacity_bytes, capacity(50));
    }
    assert!(poll(&mut second).is_pending());
    let present = session.wal.request_resize(capacity(40)).unwrap().wait().unwrap();
    assert_eq!(present, session.wal.header(), "nothing is written");
    assert!(matches!(poll(&mut second), Poll::Ready(Err(ResizeError::Replaced { .. }))));

    // A resize whose headers are being written takes effect, and the next one follows it.
    session.trim(session.wal.durable().0);
    session.run_until_idle();
    session.resize(64);
    assert!(session.disk.step());
    session.resize(70);
    session.resize(80);
    let mut same = session.wal.request_resize(capacity(80)).unwrap();
    session.run_until_idle();
    assert_eq!((session.resized, session.resizes.len()), (2, 0), "64, then 80");
    assert!(
        matches!(poll(&mut same), Poll::Ready(Ok(header)) if header.capacity_bytes == capacity(80))
    );
    session.resize(64);
    assert!(session.disk.step());
    session.resize(64);
    session.resize(80);
    session.run_until_idle();
    assert_eq!((session.resized, session.wal.stats().ring_bytes), (5, 80 * PAGE));
}

#[test]
fn an_invalid_capacity_changes_nothing() {
    let mut session = session(40, 45, 60, 0);
    let before = session.wal.stats();
    let refused = session.wal.request_resize(capacity(DEVICE + 1)).unwrap_err();
    assert!(matches!(refused, ResizeError::LargerThanDevice { .. }), "{refused}");
    for (bytes, reason) in [
        (capacity(40) + 1, "not a multiple of 4096"),
        (capacity(31), "less than 196608"),
        (0, "less than 196608"),
    ] {
        let refused = session.wal.request_resize(bytes).unwrap_err().to_string();
        assert!(refused.contains(reason), "{refused}");
    }
    assert_eq!(session.wal.stats(), before);
    // The device can be enlarged.
    session.disk.set_capacity(capacity(200), None).unwrap();
    session.resize(200);
    session.run_until_idle();
    assert_eq!(session.resized, 1);
    let (disk, known, random) = session.cut_power();
    check_continues(disk, known, random);
}

#[test]
fn a_ring_of_less_than_two_windows_is_refused() {
    let disk = formatted(128, 0);
    let wide = Options { window_bytes: 50 * PAGE, ..options() };
    let (wal, ..) = try_open(disk.device(), &wide).unwrap();
    let refused = wal.request_resize(capacity(99)).unwrap_err().to_string();
    assert!(refused.contains("window_bytes = 204800 is more than half"), "{refused}");
    wal.request_resize(capacity(100)).unwrap().wait().unwrap();
}

#[test]
fn waiters_for_a_resize_are_notified_when_the_log_stops() {
    // A close withdraws a resize that has not begun.
    let session = session(40, 72, 90, 0);
    session.disk.set_mode(Mode::Immediate);
    let mut waiting = session.wal.request_resize(capacity(64)).unwrap();
    assert!(poll(&mut waiting).is_pending());
    let Session { wal, disk, .. } = session;
    wal.close().unwrap();
    let outcome = poll(&mut waiting);
    assert!(
        matches!(outcome, Poll::Ready(Err(ResizeError::Failed(WalError::Closed)))),
        "{outcome:?}"
    );
    let (report, _) = scan(&disk);
    assert!(report.clean_shutdown && report.ring_bytes == 40 * PAGE);

    // A failed header write fails the log.
    let (wal, ..) = open(&disk);
    disk.set_zone_faults(0..DATA_START, Faults { write_error: 1.0, ..Faults::default() });
    wal.trim(..wal.durable()).wait().unwrap_err();
    let refused = wal.request_resize(capacity(64)).unwrap_err();
    assert!(matches!(refused, ResizeError::Failed(WalError::Device(_))), "{refused}");

    let disk = disk.power_cut();
    disk.clear_zones();
    let (wal, ..) = open(&disk);
    wal.trim(..wal.durable()).wait().unwrap();
    disk.set_zone_faults(0..DATA_START, Faults { write_error: 1.0, ..Faults::default() });
    let failed = wal.request_resize(capacity(64)).unwrap().wait().unwrap_err();
    assert!(matches!(failed, ResizeError::Failed(WalError::Device(_))), "{failed}");
    let disk = disk.power_cut();
    disk.clear_zones();

    // Another owner.
    let (wal, ..) = open(&disk);
    let (next, ..) = open(&disk);
    let failed = wal.request_resize(capacity(64)).unwrap().wait().unwrap_err();
    assert!(matches!(failed, ResizeError::Failed(WalError::Fenced { .. })), "{failed}");
    next.close().unwrap();
}

#[test]
fn a_close_waits_for_a_resize_that_has_begun() {
    let mut session = session(40, 45, 60, 0);
    session.resize(64);
    assert!(session.disk.step());
    let Session { wal, disk, mut resizes, .. } = session;
    let stepper = alluvium_device::sim::Stepper::start(disk.clone());
    wal.close().unwrap();
    assert!(matches!(poll(&mut resizes[0].1), Poll::Ready(Ok(_))));
    drop(stepper);
    let (report, _) = scan(&disk);
    assert!(report.clean_shutdown && report.ring_bytes == 64 * PAGE);
}

/// A short scenario with a power cut at every request that the disk has executed: blocks are in
/// flight when the resize is requested, some of them over the end of the ring.
#[test]
fn a_power_cut_at_any_moment_leaves_a_whole_log() {
    let shapes = [
        (40, 45, 60, 32),
        (40, 45, 60, 64),
        (40, 62, 77, 64),
        (40, 62, 77, 41),
        (40, 72, 90, 64),
        (60, 62, 75, 34),
        (60, 100, 118, 34),
    ];
    let mut found = [0, 0];
    for (shape, seed) in shapes.iter().flat_map(|shape| (0..4).map(move |seed| (shape, seed))) {
        let &(from, start, end, to) = shape;
        let (disk, known, _) = session(from, start, end, seed).cut_power();
        let image = disk.image();
        for cut in 0.. {
            let disk = SimDisk::from_image(&image, sim_options(seed + cut));
            let mut session = Session::open(disk, known.clone(), Random::new(seed));
            let mut steps = 0;
            let mut cut_here = |session: &mut Session| {
                session.poll_futures();
                steps += 1;
                steps > cut || !session.disk.step()
            };
            // Four blocks in flight, then the request, then more than a lap.
            for _ in 0..4 {
                session.append(15_000);
            }
            session.resize(to);
            let mut over = false;
            for _ in 0..20 {
                session.append(15_000);
                session.append(700);
                session.trim_some(900);
                over = over || (0..4).any(|_| cut_here(&mut session));
            }
            while !over {
                over = cut_here(&mut session);
            }
            let done = steps <= cut;
            let (disk, known, random) = session.cut_power();
            let capacity_bytes = Wal::inspect(&disk.device()).unwrap().header.capacity_bytes;
            found[usize::from(capacity_bytes == capacity(to))] += 1;
            let inspection = Wal::inspect(&disk.device()).unwrap();
            if inspection.slots.iter().all(|slot| matches!(slot, Slot::Valid(_))) {
                // Either slot is enough, whatever it states.
                for at in [0, 32 * 1024] {
                    let rotten = SimDisk::from_image(&disk.image(), SimOptions::default());
                    flip(&rotten, at + 48, 3);
                    drop(Session::open(rotten, known.clone(), Random::new(seed)));
                }
            }
            match (cut + seed) % 20 {
                0 => check_continues(disk, known, random),
                _ => drop(Session::open(disk, known, random)),
            }
            if done {
                break;
            }
        }
    }
    assert!(found[0] > 200 && found[1] > 200, "old and new capacity {found:?} times");
}

/// Runs of any length under any traffic, with requests for any capacity at any moment.
#[test]
fn random_resize_requests_lose_nothing() {
    let (mut resized, mut sessions) = (0, 0);
    for seed in 0..150 {
        let mut random = Random::new(seed);
        let (mut disk, mut known) = (formatted(32 + random.below(97), seed), Known::default());
        for _ in 0..4 {
            let mut session = Session::open(disk, known, random);
            let often = 1 + session.random.below(60);
            let (append, step) = (1 + session.random.below(8), 1 + session.random.below(8));
            for _ in 0..100 + session.random.below(900) {
                match session.random.below(append + step + 1) {
                    dice if dice < append => drop(session.append_any()),
                    dice if dice < append + step => drop(session.disk.step()),
                    _ => {
                        let permille = session.random.below(1001);
                        session.trim_some(permille);
                    }
                }
                if session.random.below(often) == 0 {
                    let pages = 32 + session.random.below(DEVICE - 31);
                    session.resize(pages);
                }
                session.poll_futures();
            }
            (resized, sessions) = (resized + session.resized, sessions + 1);
            (disk, known, random) = session.cut_power();
        }
        drop(Session::open(disk, known, random));
    }
    assert!(resized > 2 * sessions, "{resized} resizes in {sessions} sessions");
}

/// Every append is acknowledged, and eventually every request is granted.
#[test]
fn a_request_is_granted_within_two_laps() {
    for seed in 0..60 {
        let mut random = Random::new(seed);
        let from = 32 + random.below(97);
        let start = random.below(300);
        let end = start + 3 + random.below(from - 8);
        let mut session = session(from, start, end, seed);
        let to = 32 + random.below(97);
        let (trim, mut appends) = (session.known.trimmed, Vec::<Append>::new());
        session.resize(to);
        let distance = session.wal.stats().resize_distance_bytes;
        assert!(distance <= 2 * from * PAGE);
        while session.resized == 0 {
            // Fill the log as far as possible.
            while let Ok(append) = session.wal.append(&[&[1; 3000]]) {
                appends.push(append);
            }
            session.run_until_idle();
            appends.retain_mut(|append| poll(append).is_pending());
            assert!(appends.is_empty(), "everything written is acknowledged");
            let trimmed = session.wal.stats().trimmed.0;
            assert!(session.resized > 0 || trimmed < trim + distance + PAGE, "{from} to {to}");
            session.trims.push((trimmed, session.wal.trim(..session.wal.durable())));
            session.run_until_idle();
        }
        assert_eq!(session.wal.stats().ring_bytes, to * PAGE);
    }
}
