//! A log on a shared disk that its owner reserves: after a takeover the disk itself refuses the
//! writes of the old owner.

mod common;

use std::io;
use std::sync::Arc;

use alluvium_device::sim::{SimDisk, SimOptions};
use alluvium_device::{
    AlignedBuf, Completion, Device, DeviceError, Geometry, Request, ReserveError, SharedDevice,
};
use alluvium_wal::{AppendError, LogOffset, OpenError, Options, Wal, WalError};
use common::*;
use parking_lot::Mutex;

fn reserving() -> Options {
    Options { reserve: true, ..options() }
}

/// A host with slow requests, or one that dies.
#[derive(Clone)]
struct Host(Arc<Inner>);

struct Inner {
    disk: SimDisk,
    state: Mutex<State>,
    /// Called before the disk is reserved.
    before_reserving: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct State {
    holds: bool,
    held: Vec<(Request, Completion)>,
    /// Requests until the host dies.
    requests_left: Option<usize>,
}

impl Host {
    fn of(disk: &SimDisk, before_reserving: impl Fn() + Send + Sync + 'static) -> Self {
        let before_reserving = Box::new(before_reserving);
        Self(Arc::new(Inner { disk: disk.clone(), state: Mutex::default(), before_reserving }))
    }

    fn device(&self) -> SharedDevice {
        Arc::new(self.clone())
    }

    fn release(&self, count: usize) {
        for _ in 0..count {
            let (request, done) = self.0.state.lock().held.remove(0);
            self.0.disk.submit(request, done);
        }
    }

    fn release_all(&self) {
        self.0.state.lock().holds = false;
        while !self.0.state.lock().held.is_empty() {
            self.release(1);
        }
    }

    fn dies(state: &mut State) -> bool {
        match &mut state.requests_left {
            Some(0) => true,
            Some(left) => {
                *left -= 1;
                false
            }
            None => false,
        }
    }
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a host of {:?}", self.0.disk)
    }
}

impl Device for Host {
    fn geometry(&self) -> &Geometry {
        self.0.disk.geometry()
    }

    fn reserve(&self) -> Result<(), ReserveError> {
        (self.0.before_reserving)();
        self.0.disk.reserve()
    }

    fn alloc(&self, len_bytes: usize) -> AlignedBuf {
        self.0.disk.alloc(len_bytes)
    }

    fn submit(&self, request: Request, done: Completion) {
        let mut state = self.0.state.lock();
        if Self::dies(&mut state) {
            drop(state);
            return done(Err(DeviceError {
                device: "a host that has died".into(),
                operation: "request",
                at: 0,
                len_bytes: 0,
                source: Arc::new(io::Error::other("it has died")),
            }));
        }
        if state.holds {
            state.held.push((request, done));
        } else {
            drop(state);
            self.0.disk.submit(request, done);
        }
    }

    fn failure(&self) -> Option<DeviceError> {
        self.0.disk.failure()
    }
}

/// A formatted disk, as the first host reaches it.
fn new_disk() -> SimDisk {
    let disk = disk(1 << 20);
    format(&disk);
    disk
}

fn take_over(host: &SimDisk) -> (Wal, Vec<u8>) {
    let (wal, report, records) = try_open(host.device(), &reserving()).unwrap();
    assert!(report.damage.is_empty(), "{report}");
    (wal, names(&records))
}

fn append(wal: &Wal, name: u8) -> Result<LogOffset, WalError> {
    let append = wal.append(&[&[name; 5000]]).unwrap();
    let end = append.end();
    append.wait().map(|()| end)
}

fn is_refused(result: Result<LogOffset, WalError>) -> bool {
    let reason = "another host has reserved the device";
    matches!(result, Err(WalError::Fenced { found }) if found.ends_with(reason))
}

/// Without any check of the headers: a block write is enough.
#[test]
fn the_old_owner_stops_at_its_next_block() {
    let first = new_disk();
    let (old, _) = take_over(&first);
    append(&old, b'a').unwrap();
    let second = first.other_host();
    let (new, found) = take_over(&second);
    assert_eq!(found, b"a");
    append(&new, b'x').unwrap();
    let before = second.image();
    assert!(is_refused(append(&old, b'b')));
    assert!(matches!(old.append(&[b"c"]), Err(AppendError::Failed(WalError::Fenced { .. }))));
    assert!(matches!(old.stopped(), Some(WalError::Fenced { .. })));
    assert!(matches!(old.close(), Err(WalError::Fenced { .. })));
    assert!(second.image() == before && second.counters().reserved_writes == 1);
    append(&new, b'y').unwrap();
    new.close().unwrap();
    assert_eq!(take_over(&second.power_cut()).1, b"axy");
}

/// With any blocks of the old owner in flight, every acknowledged record is there, and none of its
/// successor's is overwritten.
#[test]
fn in_flight_blocks_of_the_old_owner_are_refused() {
    for arrived in 0..5 {
        let host = Host::of(&new_disk(), || {});
        let (old, ..) = try_open(host.device(), &reserving()).unwrap();
        append(&old, 0).unwrap();
        host.0.state.lock().holds = true;
        let appends: Vec<_> =
            (1..7).map(|name| old.append(&[&vec![name; 8000]]).unwrap()).collect();
        host.release(arrived);
        let acknowledged = appends.iter().filter(|append| append.end() <= old.durable()).count();

        let second = host.0.disk.other_host();
        let (new, found) = take_over(&second);
        assert!(found.len() > acknowledged, "{found:?} after {acknowledged} acknowledged");
        append(&new, b'x').unwrap();
        let before = second.image();
        host.release_all();
        assert!(second.image() == before);
        for (index, append) in appends.into_iter().enumerate() {
            let result = append.wait();
            assert_eq!(result.is_ok(), index < acknowledged, "{result:?}");
            assert!(result.is_ok() || matches!(result, Err(WalError::Fenced { .. })));
        }
        append(&new, b'y').unwrap();
        assert_eq!(take_over(&second.power_cut()).1, [&found[..], b"xy"].concat());
    }
}

/// Without a fence the write would go to a slot of the successor, since the check before it is long
/// past.
#[test]
fn an_in_flight_header_of_the_old_owner_is_refused() {
    // A trim is a check of two slots and a write, twice.
    for sent in [2, 5] {
        let host = Host::of(&new_disk(), || {});
        let (old, ..) = try_open(host.device(), &reserving()).unwrap();
        append(&old, b'a').unwrap();
        let kept = append(&old, b'b').unwrap();
        host.0.state.lock().holds = true;
        let trim = old.trim(..kept);
        for _ in 0..sent {
            host.release(1);
        }
        let second = host.0.disk.other_host();
        let (new, found) = take_over(&second);
        assert_eq!(found, if sent == 2 { &b"ab"[..] } else { b"" });
        append(&new, b'x').unwrap();
        let before = second.image();
        host.release_all();
        let refused = trim.wait();
        assert!(is_refused(refused.map(|()| kept)), "after {sent}");
        assert!(second.image() == before);
        append(&new, b'y').unwrap();
        assert_eq!(take_over(&second.power_cut()).1, [found, b"xy".to_vec()].concat());
    }
}

/// The old owner slept through the whole run of its successor, to its clean end. Only the disk can
/// stop it.
#[test]
fn a_closed_log_stays_reserved() {
    let first = new_disk();
    let (old, _) = take_over(&first);
    append(&old, b'a').unwrap();
    let second = first.other_host();
    let (new, _) = take_over(&second);
    append(&new, b'x').unwrap();
    new.close().unwrap();
    assert!(is_refused(append(&old, b'b')));
    drop(old);
    // The same host may open it again with or without the option; others need it.
    let (again, ..) = try_open(second.device(), &options()).unwrap();
    append(&again, b'y').unwrap();
    again.close().unwrap();
    let third = second.other_host();
    let error = try_open(third.device(), &options()).unwrap_err();
    assert!(error.to_string().ends_with("another host has reserved the device"), "{error}");
    assert_eq!(take_over(&third.other_host()).1, b"axy");
}

/// Until the disk is reserved the old owner can still write, and the successor uses the headers as
/// they are after the reservation.
#[test]
fn the_headers_are_read_again_after_the_reservation() {
    let disk = new_disk();
    let (old, _) = take_over(&disk);
    append(&old, b'a').unwrap();
    let kept = append(&old, b'b').unwrap();
    let second = disk.other_host();
    let acts = {
        let old = old.clone();
        move || {
            append(&old, b'c').unwrap();
            old.trim(..kept).wait().unwrap();
        }
    };
    let host = Host::of(&second, acts);
    let (_new, report, records) = try_open(host.device(), &reserving()).unwrap();
    assert_eq!((report.start, names(&records)), (kept, b"c".to_vec()));
    assert!(is_refused(append(&old, b'd')));
}

/// A successor that dies at any of its requests leaves a log that the next one can take over, and
/// the first owner excluded.
#[test]
fn a_takeover_interrupted_anywhere_can_be_repeated() {
    let mut died = 0;
    for cut in [false, true] {
        for requests_left in 0.. {
            let disk = new_disk();
            let (old, _) = take_over(&disk);
            append(&old, b'a').unwrap();
            append(&old, b'b').unwrap();
            let second = Host::of(&disk.other_host(), || {});
            second.0.state.lock().requests_left = Some(requests_left);
            let opened = try_open(second.device(), &reserving());
            let done = opened.is_ok();
            died += usize::from(!done);
            let third = second.0.disk.other_host();
            let third = if cut { third.power_cut() } else { third };
            let (new, found) = take_over(&third);
            assert_eq!(found, b"ab", "after {requests_left} requests");
            append(&new, b'x').unwrap();
            let before = third.image();
            assert!(append(&old, b'c').is_err());
            drop((opened, old));
            assert!(third.image() == before);
            new.close().unwrap();
            assert_eq!(take_over(&third.power_cut()).1, b"abx");
            if done {
                break;
            }
        }
    }
    assert!(died > 20, "{died} openings died");
}

#[test]
fn an_unreservable_disk_is_refused_only_if_a_reservation_is_requested() {
    let disk = SimDisk::new(SimOptions { reservations: false, ..SimOptions::default() });
    format(&disk);
    let before = disk.image();
    let error = try_open(disk.device(), &reserving()).unwrap_err();
    let OpenError::Reserve(ReserveError::Unsupported { .. }) = error else { panic!("{error}") };
    assert!(disk.image() == before);
    append(&open(&disk).0, b'a').unwrap();
}

#[test]
fn a_disk_reserved_by_other_software_is_left_alone() {
    let stranger = new_disk();
    stranger.reserve_with_other_key();
    let before = stranger.image();
    let host = stranger.other_host();
    let error = try_open(host.device(), &reserving()).unwrap_err();
    assert!(matches!(error, OpenError::Reserve(ReserveError::Held { .. })), "{error}");
    assert!(stranger.image() == before);
    append(&open(&stranger).0, b'a').unwrap();
}

/// A disk that holds no log, or one that cannot be opened with these options, is not reserved.
#[test]
fn only_a_valid_log_is_reserved() {
    let disk = SimDisk::new(SimOptions::default());
    assert!(try_open(disk.device(), &reserving()).is_err());
    format(&disk.other_host());
    let large = Options { window_bytes: 1 << 30, ..reserving() };
    assert!(try_open(disk.device(), &large).is_err());
    append(&open(&disk.other_host()).0, b'a').unwrap();
}
