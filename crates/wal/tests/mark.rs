//! The mark, the user's number in the log: it never decreases, and an opener with an older one is
//! refused. Also the check of a writer whether it still owns the log.

mod common;

use std::sync::Arc;

use alluvium_device::sim::{Faults, Mode, Random, SimDisk, SimOptions};
use alluvium_device::{AlignedBuf, Completion, Device, DeviceError, Geometry, Request};
use alluvium_wal::{FormatOptions, HeaderInfo, OpenError, Options, Slot, Wal, WalError};
use common::*;
use parking_lot::Mutex;

const SLOTS: [u64; 2] = [0, 32 * 1024];

fn with_mark(mark: u64) -> Options {
    Options { mark: Some(mark), ..options() }
}

fn new_disk() -> SimDisk {
    let disk = disk(1 << 20);
    format(&disk);
    disk
}

/// The headers after a power cut.
fn durable_headers(disk: &SimDisk) -> Vec<HeaderInfo> {
    let mut image = vec![0; disk.image().len()];
    for at in SLOTS {
        let page = disk.peek_durable(at, PAGE as usize);
        image[at as usize..][..page.len()].copy_from_slice(&page);
    }
    let left = SimDisk::from_image(&image, SimOptions::default());
    let slots = Wal::inspect(&left.device()).unwrap().slots;
    slots
        .into_iter()
        .filter_map(|slot| match slot {
            Slot::Valid(header) => Some(header),
            _ => None,
        })
        .collect()
}

fn marks(disk: &SimDisk) -> Vec<u64> {
    durable_headers(disk).iter().map(|header| header.mark).collect()
}

#[test]
fn the_mark_survives_every_header_change() {
    let disk = new_disk();
    assert_eq!(marks(&disk), [0, 0]);
    let (wal, ..) = try_open(disk.device(), &with_mark(7)).unwrap();
    assert_eq!((wal.mark(), marks(&disk)), (7, vec![7, 7]));
    let append = wal.append(&[&[1; 5000]]).unwrap();
    let end = append.end();
    append.wait().unwrap();
    wal.trim(..end).wait().unwrap();
    wal.request_resize(512 << 10).unwrap().wait().unwrap();
    assert_eq!(marks(&disk), [7, 7]);
    wal.set_mark(9).wait().unwrap();
    wal.set_mark(8).wait().unwrap();
    assert_eq!((wal.mark(), wal.header().mark, marks(&disk)), (9, 9, vec![9, 9]));
    wal.close().unwrap();
    assert_eq!(marks(&disk), [9, 9]);
    Wal::resize(&disk.device(), 640 << 10, None).unwrap();
    assert_eq!(marks(&disk), [9, 9]);
    // An opener without a mark, such as a tool, leaves it unchanged.
    let (wal, ..) = open(&disk);
    assert_eq!((wal.mark(), marks(&disk)), (9, vec![9, 9]));
    drop(wal);
    let options = FormatOptions { force: true, ..FormatOptions::default() };
    let new = Wal::format(&disk.device(), &options).unwrap();
    assert_eq!(new.mark, 0, "another log");
}

#[test]
fn an_opener_with_a_mark_that_is_not_greater_is_refused() {
    let disk = new_disk();
    let (wal, ..) = try_open(disk.device(), &with_mark(7)).unwrap();
    wal.set_mark(u64::MAX - 1).wait().unwrap();
    drop(wal);
    let image = disk.image();
    for given in [0, 7, u64::MAX - 1] {
        match try_open(disk.device(), &with_mark(given)) {
            Err(OpenError::MarkNotAhead { found, given: named, .. }) => {
                assert_eq!((found, named), (u64::MAX - 1, given));
            }
            other => panic!("{other:?}"),
        }
        assert!(disk.image() == image, "a refusal changes nothing");
    }
    let (wal, ..) = try_open(disk.device(), &with_mark(u64::MAX)).unwrap();
    assert_eq!(wal.mark(), u64::MAX);
}

/// Of two openers that have read the same header, only one can open the log with the same mark.
#[test]
fn a_mark_opens_the_log_only_once() {
    let disk = new_disk();
    let (first, ..) = try_open(disk.device(), &with_mark(1)).unwrap();
    assert!(matches!(
        try_open(disk.device(), &with_mark(1)),
        Err(OpenError::MarkNotAhead { found: 1, given: 1, .. })
    ));
    first.append(&[b"x"]).unwrap().wait().unwrap();
}

/// At every moment of the two header writes: an acknowledged mark is in both headers, a power cut
/// never loses it, and no header has the trim without it.
#[test]
fn an_acknowledged_mark_survives_a_power_cut() {
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let disk = SimDisk::new(SimOptions {
            capacity_bytes: DATA_START + (1 << 20),
            seed,
            faults: Faults { survives_power_cut: 0.5, torn_by_power_cut: 0.5, ..Faults::default() },
            ..SimOptions::default()
        });
        format(&disk);
        let (wal, ..) = try_open(disk.device(), &with_mark(1)).unwrap();
        let ends: Vec<_> = (0..8)
            .map(|_| {
                let append = wal.append(&[&[1; 300]]).unwrap();
                let end = append.end();
                append.wait().unwrap();
                end
            })
            .collect();
        disk.set_mode(Mode::Queued);
        let (mut asked, mut trims) = (1, Vec::new());
        for _ in 0..random.below(30) {
            match random.below(4) {
                0 => {
                    asked += 1;
                    drop(wal.set_mark(asked));
                }
                1 if trims.len() < ends.len() => {
                    asked += 1;
                    let end = ends[trims.len()];
                    trims.push((end, asked));
                    drop(wal.trim_and_mark(..end, asked));
                }
                _ => drop(disk.step()),
            }
            let acknowledged = wal.mark();
            let headers = durable_headers(&disk);
            assert!(headers.iter().all(|header| header.mark >= acknowledged), "seed {seed}");
        }
        let acknowledged = wal.mark();
        drop(wal);
        let after = disk.power_cut();
        let found = Wal::inspect(&after.device()).unwrap().header;
        assert!((acknowledged..=asked).contains(&found.mark), "seed {seed}");
        let of_trim = trims.iter().find(|(end, _)| *end == found.trim);
        assert!(of_trim.is_none_or(|(_, mark)| found.mark >= *mark), "seed {seed}: {found:?}");
        let (wal, ..) = open(&after);
        assert_eq!(wal.mark(), found.mark);
    }
}

#[test]
fn a_refused_trim_leaves_the_mark_unchanged() {
    let disk = new_disk();
    let (wal, ..) = try_open(disk.device(), &with_mark(1)).unwrap();
    let beyond = alluvium_wal::LogOffset(wal.appended().0 + 1);
    let refused = wal.trim_and_mark(..beyond, 5).wait();
    assert!(matches!(refused, Err(WalError::TrimPastDurable { .. })), "{refused:?}");
    wal.trim(..wal.durable()).wait().unwrap();
    assert_eq!((wal.mark(), marks(&disk)), (1, vec![1, 1]));
    wal.close().unwrap();
}

#[test]
fn a_close_waits_for_a_mark() {
    let disk = new_disk();
    let (wal, ..) = open(&disk);
    disk.set_mode(Mode::Queued);
    let raise = wal.set_mark(5);
    let steps = {
        let disk = disk.clone();
        std::thread::spawn(move || {
            while !Wal::inspect(&SimDisk::from_image(&disk.image(), SimOptions::default()).device())
                .is_ok_and(|found| found.header.clean_shutdown)
            {
                disk.step();
            }
            disk.set_mode(Mode::Immediate);
        })
    };
    wal.close().unwrap();
    steps.join().unwrap();
    raise.wait().unwrap();
    assert_eq!(marks(&disk), [5, 5]);
}

/// Runs a callback when a header write has reached the disk, before the writer gets its completion.
struct Notified {
    disk: SimDisk,
    hook: Mutex<Option<Arc<dyn Fn() + Send + Sync>>>,
}

impl std::fmt::Debug for Notified {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.disk.fmt(f)
    }
}

impl Device for Notified {
    fn geometry(&self) -> &Geometry {
        self.disk.geometry()
    }
    fn alloc(&self, len_bytes: usize) -> AlignedBuf {
        self.disk.alloc(len_bytes)
    }
    fn submit(&self, request: Request, done: Completion) {
        let hook = match &request {
            Request::Write { at, .. } if at.0 < DATA_START => self.hook.lock().clone(),
            _ => None,
        };
        let notify = move |result| {
            if let Some(hook) = hook {
                hook();
            }
            done(result);
        };
        self.disk.submit(request, Box::new(notify));
    }
    fn failure(&self) -> Option<DeviceError> {
        self.disk.failure()
    }
}

#[test]
fn a_writer_recognises_its_own_headers() {
    let device = Arc::new(Notified { disk: new_disk(), hook: Mutex::default() });
    let (wal, ..) = try_open(device.clone(), &options()).unwrap();
    wal.verify_owner().unwrap();
    let checks = Arc::new(Mutex::new(Vec::new()));
    let hook = {
        let (wal, checks) = (wal.clone(), checks.clone());
        move || checks.lock().push(wal.verify_owner())
    };
    *device.hook.lock() = Some(Arc::new(hook));
    for mark in 1..4 {
        wal.set_mark(mark).wait().unwrap();
    }
    wal.clone().close().unwrap();
    *device.hook.lock() = None;
    assert_eq!(checks.lock().len(), 3 * 2 + 1);
    assert!(checks.lock().iter().all(Result::is_ok), "{checks:?}");
    assert!(matches!(wal.verify_owner(), Err(WalError::Closed)));
}

#[test]
fn verify_owner_finds_a_successor_and_stops_the_log() {
    for formatted in [false, true] {
        let disk = new_disk();
        let (old, ..) = open(&disk);
        if formatted {
            format(&disk);
        } else {
            drop(open(&disk));
        }
        let found = old.verify_owner();
        assert!(matches!(found, Err(WalError::Fenced { .. })), "{found:?}");
        assert!(matches!(old.stopped(), Some(WalError::Fenced { .. })));
        assert!(old.append(&[b"x"]).is_err());
    }
}

/// One readable slot is enough for the check; with none it fails.
#[test]
fn unreadable_slots_do_not_stop_a_writer() {
    let disk = new_disk();
    let (wal, ..) = open(&disk);
    let broken = Faults { read_error: 1.0, ..Faults::default() };
    disk.set_zone_faults(SLOTS[0]..SLOTS[0] + PAGE, broken);
    wal.verify_owner().unwrap();
    disk.set_zone_faults(SLOTS[1]..SLOTS[1] + PAGE, broken);
    assert!(matches!(wal.verify_owner(), Err(WalError::Device(_))));
    assert_eq!(wal.stopped().map(|cause| cause.to_string()), None);
    disk.clear_zones();
    wal.verify_owner().unwrap();
    wal.close().unwrap();
}
