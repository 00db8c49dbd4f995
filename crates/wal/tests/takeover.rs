//! Two writers of one log: the later one owns it, and the first one notices. What a device must
//! guarantee for that, and what it need not.

mod common;

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use alluvium_device::sim::{Faults, Mode, SimDisk, SimOptions};
use alluvium_device::{
    AlignedBuf, Completion, Device, DeviceError, Geometry, Request, SharedDevice,
};
use alluvium_wal::{Append, AppendError, FormatOptions, LogOffset, OpenError, Wal, WalError};
use common::*;
use parking_lot::Mutex;

const SLOTS: [u64; 2] = [0, 32 * 1024];

/// One machine's path to a shared disk.
#[derive(Clone, Debug)]
struct Host(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    disk: SimDisk,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Whether the disk refuses this machine's writes.
    fenced: bool,
    /// Whether requests are held in flight.
    holds: bool,
    held: Vec<(Request, Completion)>,
    /// Called before each request to a header.
    before_headers: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} held", self.held.len())
    }
}

impl Host {
    fn of(disk: &SimDisk) -> Self {
        Self(Arc::new(Inner { disk: disk.clone(), state: Mutex::default() }))
    }

    fn device(&self) -> SharedDevice {
        Arc::new(self.clone())
    }

    fn hold(&self) {
        self.0.state.lock().holds = true;
    }

    fn held(&self) -> usize {
        self.0.state.lock().held.len()
    }

    /// Executes the requests held now, in the order of submission. Requests that follow from them
    /// are held again.
    fn release(&self) {
        let held = std::mem::take(&mut self.0.state.lock().held);
        for (request, done) in held {
            self.arrive(request, done);
        }
    }

    /// Executes all held requests and all that follow from them.
    fn release_all(&self) {
        self.0.state.lock().holds = false;
        while self.held() > 0 {
            self.release();
        }
    }

    fn fence(&self) {
        self.0.state.lock().fenced = true;
    }

    fn arrive(&self, request: Request, done: Completion) {
        let hook = self.0.state.lock().before_headers.clone();
        if let (Some(hook), Request::Read { at, .. } | Request::Write { at, .. }) = (hook, &request)
            && at.0 < DATA_START
        {
            hook();
        }
        match request {
            Request::Write { at, buf, .. } if self.0.state.lock().fenced => {
                let source = Arc::new(io::Error::other("reservation conflict"));
                done(Err(DeviceError {
                    device: "a fenced disk".into(),
                    operation: "write",
                    at: at.0,
                    len_bytes: buf.len() as u64,
                    source,
                }));
            }
            request => self.0.disk.submit(request, done),
        }
    }
}

impl Device for Host {
    fn geometry(&self) -> &Geometry {
        self.0.disk.geometry()
    }

    fn alloc(&self, len_bytes: usize) -> AlignedBuf {
        self.0.disk.alloc(len_bytes)
    }

    fn submit(&self, request: Request, done: Completion) {
        let mut state = self.0.state.lock();
        if state.holds {
            state.held.push((request, done));
        } else {
            drop(state);
            self.arrive(request, done);
        }
    }

    fn failure(&self) -> Option<DeviceError> {
        None
    }
}

fn new_disk() -> SimDisk {
    let disk = disk(1 << 20);
    format(&disk);
    disk
}

fn open_on(host: &Host) -> Wal {
    try_open(host.device(), &options()).unwrap().0
}

fn append(wal: &Wal, name: u8, len: usize) -> LogOffset {
    let append = wal.append(&[&vec![name; len]]).unwrap();
    let end = append.end();
    append.wait().unwrap();
    end
}

fn headers(disk: &SimDisk) -> Vec<u8> {
    SLOTS.iter().flat_map(|&at| disk.peek(at, PAGE as usize)).collect()
}

fn is_fenced(result: &Result<(), WalError>) -> bool {
    matches!(result, Err(WalError::Fenced { .. }))
}

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn count_acknowledged(appends: &mut [Append]) -> usize {
    appends.iter_mut().map(poll).filter(|polled| matches!(polled, Poll::Ready(Ok(())))).count()
}

fn poll<F: Future>(future: F) -> Poll<F::Output> {
    pin!(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// The first owner continues until its next header write, and no further. Its successor is not
/// affected.
#[test]
fn the_first_owner_stops_at_its_next_trim_and_writes_no_header() {
    let disk = new_disk();
    let (first, second) = (Host::of(&disk), Host::of(&disk));
    let old = open_on(&first);
    let kept = append(&old, b'a', 5000);
    let new = open_on(&second);
    append(&new, b'x', 6000);
    let before = headers(&disk);

    let cause = old.trim(..kept).wait().unwrap_err();
    assert!(matches!(&cause, WalError::Fenced { found } if found.contains("epoch 2")), "{cause}");
    assert!(headers(&disk) == before);
    assert!(matches!(old.stopped(), Some(WalError::Fenced { .. })) && old.stats().failed);
    // Permanently.
    assert!(matches!(old.append(&[b"b"]), Err(AppendError::Failed(WalError::Fenced { .. }))));
    assert!(is_fenced(&old.trim(..kept).wait()) && is_fenced(&old.clone().close()));
    drop(old);
    assert!(headers(&disk) == before);

    append(&new, b'y', 100);
    new.trim(..kept).wait().unwrap();
    let (_, report, records) = open(&disk.power_cut());
    assert_eq!((names(&records), report.damage.len()), (b"xy".to_vec(), 0));
}

#[test]
fn the_first_owner_does_not_write_its_clean_header() {
    let disk = new_disk();
    let old = open_on(&Host::of(&disk));
    append(&old, b'a', 5000);
    let new = open_on(&Host::of(&disk));
    append(&new, b'x', 6000);
    let before = headers(&disk);
    let other_handle = old.clone();
    assert!(is_fenced(&old.close()));
    assert!(headers(&disk) == before);
    assert!(matches!(
        other_handle.append(&[b"b"]),
        Err(AppendError::Failed(WalError::Fenced { .. }))
    ));
    new.close().unwrap();
    let (_, report, records) = open(&disk.power_cut());
    assert!(report.clean_shutdown && names(&records) == b"ax");
}

/// Waiters of every kind are woken.
#[test]
fn all_waiters_are_woken_with_the_cause() {
    let disk = new_disk();
    let host = Host::of(&disk);
    let old = open_on(&host);
    let kept = append(&old, b'a', 5000);
    let durable_before = old.durable();
    host.hold();
    let mut appends: Vec<_> =
        (0..10).map(|name| old.append(&[&vec![name; 3000]]).unwrap()).collect();
    let mut durable = old.wait_durable(LogOffset(1 << 40));
    let mut trim = old.trim(..kept);
    let mut space = old.wait_space();
    open_on(&Host::of(&disk));

    let wakes = Arc::new(Wakes::default());
    let waker = Waker::from(wakes.clone());
    let mut cx = Context::from_waker(&waker);
    for append in &mut appends {
        assert!(Pin::new(append).poll(&mut cx).is_pending());
    }
    assert!(Pin::new(&mut durable).poll(&mut cx).is_pending());
    assert!(Pin::new(&mut trim).poll(&mut cx).is_pending());
    assert!(Pin::new(&mut space).poll(&mut cx).is_pending());

    // The checks of both slots; the blocks are still in flight.
    let reads = || {
        let mut state = host.0.state.lock();
        let read =
            state.held.iter().position(|(request, _)| matches!(request, Request::Read { .. }));
        read.map(|index| state.held.remove(index))
    };
    while let Some((request, done)) = reads() {
        host.arrive(request, done);
    }
    assert_eq!(wakes.0.load(Ordering::Relaxed), appends.len() + 3);
    assert!(
        appends
            .iter_mut()
            .all(|append| matches!(poll(append), Poll::Ready(Err(WalError::Fenced { .. }))))
    );
    assert!(matches!(poll(durable), Poll::Ready(Err(WalError::Fenced { .. }))));
    assert!(matches!(poll(trim), Poll::Ready(Err(WalError::Fenced { .. }))));
    assert!(poll(space).is_ready());
    // Late completions acknowledge nothing and submit nothing.
    host.release();
    assert_eq!(host.held(), 0);
    assert_eq!(old.durable(), durable_before);
}

/// The device refuses the first owner from the takeover on: every record acknowledged by either is
/// there, and nothing else happens.
#[test]
fn with_a_fenced_device_nothing_is_lost() {
    for arrived in 0..5 {
        let disk = new_disk();
        let (first, second) = (Host::of(&disk), Host::of(&disk));
        let old = open_on(&first);
        append(&old, 0, 700);
        first.hold();
        // Full blocks, several of them in flight at once.
        let mut appends: Vec<_> =
            (1..7).map(|name| old.append(&[&vec![name; 8000]]).unwrap()).collect();
        for _ in 0..arrived {
            let (request, done) = first.0.state.lock().held.remove(0);
            first.arrive(request, done);
        }
        let acknowledged = count_acknowledged(&mut appends);

        first.fence();
        let (new, report, records) = try_open(second.device(), &options()).unwrap();
        assert!(records.len() > acknowledged, "{arrived} writes have arrived");
        let handed_out = names(&records);
        assert_eq!(handed_out, (0..records.len() as u8).collect::<Vec<_>>());
        append(&new, b'x', 3000);
        let before = disk.image();
        first.release_all();
        drop(old.append(&[b"late"]));
        assert!(disk.image() == before, "the old owner does nothing");
        for (index, append) in appends.iter_mut().enumerate() {
            match poll(append) {
                Poll::Ready(Ok(())) => assert!(index < acknowledged),
                Poll::Ready(Err(cause)) => assert!(matches!(cause, WalError::Device(_)), "{cause}"),
                Poll::Pending => panic!("a waiter was forgotten"),
            }
        }
        append(&new, b'y', 20);
        let (_, again, records) = open(&disk.power_cut());
        assert_eq!(names(&records), [&handed_out[..], b"xy"].concat());
        assert!(again.damage.is_empty() && again.start == report.start);
    }
}

/// Without a fence, the first owner overwrites its successor's records. That shows as damage or not
/// at all, never as a record of the successor's epoch.
#[test]
fn without_a_fence_late_writes_are_damage_not_records() {
    let (mut damaged, mut late_acknowledged) = (0, 0);
    for (arrived, successors) in
        (0..4).flat_map(|arrived| (0..8).map(move |successors| (arrived, successors)))
    {
        let disk = new_disk();
        let (first, second) = (Host::of(&disk), Host::of(&disk));
        let old = open_on(&first);
        append(&old, 0, 700);
        first.hold();
        let mut appends: Vec<_> =
            (1..7).map(|name| old.append(&[&vec![name; 8000]]).unwrap()).collect();
        for _ in 0..arrived {
            let (request, done) = first.0.state.lock().held.remove(0);
            first.arrive(request, done);
        }
        let acknowledged = count_acknowledged(&mut appends);
        let (new, report, records) = try_open(second.device(), &options()).unwrap();
        assert!(records.len() > acknowledged);
        let written: Vec<_> = (0..successors)
            .map(|index| {
                let offset = new.appended();
                append(&new, 100 + index, 4500);
                (offset, 100 + index)
            })
            .collect();
        first.release_all();
        late_acknowledged += count_acknowledged(&mut appends[acknowledged..]);
        assert!(is_fenced(&old.trim(..old.durable()).wait()), "and then it notices");

        let (found, after) = scan(&disk.power_cut());
        // Every record that recovery handed out is there: the old owner's writes repeat it.
        assert_eq!(after[..records.len()], records);
        for record in &after[records.len()..] {
            assert!(record.offset >= report.end && record.epoch == report.epoch);
            assert!(written.contains(&(record.offset, record.payload[0])), "{record:?}");
        }
        damaged += found.damage.len();
        for (offset, _) in written {
            let there = after.iter().any(|record| record.offset == offset);
            let reported = found.damage.iter().any(|damage| damage.range.contains(&offset));
            assert!(
                there || reported || offset >= found.end,
                "{offset} is neither there nor reported"
            );
        }
    }
    assert!(
        damaged > 5 && late_acknowledged > 20,
        "{damaged} damaged, {late_acknowledged} acknowledged by the old owner"
    );
}

/// A late record does not become one of an earlier epoch either, once there is a later epoch: here
/// it starts where a record of the successor does, and reaches over the end of that epoch.
#[test]
fn a_late_record_that_reaches_over_the_end_of_an_epoch_stays_damage() {
    let disk = new_disk();
    let (first, second) = (Host::of(&disk), Host::of(&disk));
    let old = open_on(&first);
    let start = append(&old, b'a', 700);
    first.hold();
    let late = old.append(&[&[b'b'; 2000]]).unwrap();
    assert_eq!(late.offset(), start);
    let new = open_on(&second);
    let end = append(&new, b'x', 100);
    new.close().unwrap();
    first.release_all();
    drop(old);
    for epoch in 3..6 {
        let (wal, report, records) = open(&disk);
        assert_eq!((names(&records), report.epoch), (b"a".to_vec(), epoch));
        assert_eq!(report.damage.len(), 1);
        assert_eq!((&report.damage[0].range, report.end), (&(start..end), end));
        drop(wal);
    }
}

/// The header write of the first owner was sent before its successor opened the log, and arrives
/// late. It goes to the slot that is not valid.
#[test]
fn a_late_header_write_has_no_effect() {
    // A trim is a check of two slots and a write, twice.
    for sent in [2, 5] {
        let disk = new_disk();
        let (first, second) = (Host::of(&disk), Host::of(&disk));
        let old = open_on(&first);
        append(&old, b'a', 5000);
        let kept = append(&old, b'b', 5000);
        first.hold();
        let mut trim = old.trim(..LogOffset(5032));
        for _ in 0..sent {
            first.release();
        }
        let (new, _, records) = try_open(second.device(), &options()).unwrap();
        assert_eq!(names(&records), if sent == 2 { &b"ab"[..] } else { b"b" });
        append(&new, b'x', 6000);
        let before = headers(&disk);
        first.release();
        assert!(headers(&disk) != before, "it has arrived");
        let (_, records) = scan(&disk);
        assert_eq!(names(&records)[names(&records).len() - 2..], *b"bx");
        first.release_all();
        match sent {
            2 => assert!(matches!(poll(&mut trim), Poll::Ready(Err(WalError::Fenced { .. })))),
            _ => assert!(is_fenced(&old.trim(..kept).wait())),
        }
        // The successor is not affected either.
        new.trim(..kept).wait().unwrap();
        append(&new, b'y', 100);
        let (_, report, records) = open(&disk.power_cut());
        assert_eq!((names(&records), report.damage.len()), (b"xy".to_vec(), 0));
    }
}

/// The successor opens the log between the two header writes of a change.
#[test]
fn a_change_is_not_completed_over_a_successor() {
    let disk = new_disk();
    let (first, second) = (Host::of(&disk), Host::of(&disk));
    let old = open_on(&first);
    append(&old, b'a', 5000);
    append(&old, b'b', 5000);
    first.hold();
    let trim = old.trim(..LogOffset(5032));
    for _ in 0..3 {
        first.release();
    }
    let (_new, report, records) = try_open(second.device(), &options()).unwrap();
    assert_eq!(
        (report.start, names(&records)),
        (LogOffset(5032), b"b".to_vec()),
        "one of two writes"
    );
    let before = headers(&disk);
    first.release_all();
    assert!(is_fenced(&trim.wait()));
    assert!(headers(&disk) == before);
}

/// An opening and a change of the header by the old owner (a check of two slots and a write,
/// twice), in every interleaving. Either the opening is refused, or the old owner notices; and
/// every record acknowledged by an accepted owner is there, whatever the other one still writes.
#[test]
fn every_interleaving_has_one_owner() {
    let image = {
        let disk = disk(128 << 10);
        format(&disk);
        let old = open_on(&Host::of(&disk));
        append(&old, b'a', 5000);
        append(&old, b'b', 5000);
        drop(old);
        disk.image()
    };
    // The number of requests of the opening before each step of the change.
    let mut steps = vec![0; 6];
    let (mut orders, mut refused) = (0, 0);
    loop {
        let disk = SimDisk::from_image(&image, SimOptions::default());
        let (first, second) = (Host::of(&disk), Host::of(&disk));
        let old = open_on(&first);
        first.hold();
        let _trim = old.trim(..LogOffset(5032));
        let count = Arc::new(AtomicUsize::new(0));
        let taken = Arc::new(AtomicUsize::new(0));
        let hook = {
            let (first, count, taken, steps) =
                (first.clone(), count.clone(), taken.clone(), steps.clone());
            move || {
                let now = count.fetch_add(1, Ordering::Relaxed);
                while steps.get(taken.load(Ordering::Relaxed)).is_some_and(|&at| at <= now) {
                    taken.fetch_add(1, Ordering::Relaxed);
                    first.release();
                }
            }
        };
        second.0.state.lock().before_headers = Some(Arc::new(hook));
        let opened = try_open(second.device(), &options());
        second.0.state.lock().before_headers = None;
        orders += 1;
        match opened {
            Ok((new, ..)) => {
                append(&new, b'x', 6000);
                first.release_all();
                assert!(is_fenced(&old.close()), "{steps:?}: two owners");
                let disk = disk.power_cut();
                let (_, report, records) = open(&disk);
                assert!(names(&records).ends_with(b"bx"), "{steps:?}: {:?}", names(&records));
                assert!(report.damage.is_empty());
            }
            Err(OpenError::Fenced { .. }) => {
                refused += 1;
                first.release_all();
                let (new, ..) = try_open(second.device(), &options()).unwrap();
                append(&new, b'x', 6000);
                assert!(is_fenced(&old.close()), "{steps:?}: two owners");
                assert!(names(&open(&disk.power_cut()).2).ends_with(b"bx"), "{steps:?}");
            }
            Err(other) => panic!("{steps:?}: {other}"),
        }
        // The next interleaving: the steps keep their order, and some may follow the opening.
        let requests = count.load(Ordering::Relaxed);
        let Some(last) = steps.iter().rposition(|&at| at < requests) else { break };
        let next = steps[last] + 1;
        steps[last..].fill(next);
    }
    assert!(orders > 3000 && refused > 100, "{orders} orders, {refused} refused");
}

#[test]
fn formatting_by_another_writer_is_noticed() {
    for close in [false, true] {
        let disk = new_disk();
        let old = open_on(&Host::of(&disk));
        let end = append(&old, b'a', 5000);
        format(&disk);
        let before = headers(&disk);
        let cause =
            if close { old.close().unwrap_err() } else { old.trim(..end).wait().unwrap_err() };
        let new_id = Wal::inspect(&disk.device()).unwrap().header.wal_id.to_string();
        assert!(matches!(&cause, WalError::Fenced { found } if found.contains(&new_id)), "{cause}");
        assert!(headers(&disk) == before);
        assert!(open(&disk.power_cut()).2.is_empty());
    }
}

#[test]
fn resizing_by_another_writer_is_noticed() {
    let disk = new_disk();
    let old = open_on(&Host::of(&disk));
    let end = append(&old, b'a', 5000);
    Wal::resize(&disk.device(), DATA_START + (512 << 10), None).unwrap();
    let before = headers(&disk);
    assert!(is_fenced(&old.trim(..end).wait()));
    assert!(headers(&disk) == before);
    assert_eq!(names(&open(&disk.power_cut()).2), b"a");
}

/// A later version of the program has taken the log over and writes headers that this version does
/// not support.
#[test]
fn a_header_of_a_later_version_is_noticed() {
    let disk = new_disk();
    let old = open_on(&Host::of(&disk));
    let end = append(&old, b'a', 5000);
    for at in SLOTS {
        let mut page = disk.peek(at, PAGE as usize);
        page[8] = 2;
        let crc = crc32c::crc32c(&page[..124]);
        page[124..128].copy_from_slice(&crc.to_le_bytes());
        disk.poke(at, &page);
    }
    let before = headers(&disk);
    let cause = old.trim(..end).wait().unwrap_err();
    assert!(matches!(&cause, WalError::Fenced { found } if found.contains("version 2")), "{cause}");
    assert!(headers(&disk) == before);
}

/// An unreadable or damaged slot is no evidence of a takeover; the other slot decides.
#[test]
fn an_unreadable_slot_does_not_stop_a_writer() {
    let faults = Faults { read_error: 1.0, ..Faults::default() };
    for broken in [&SLOTS[..1], &SLOTS[1..], &SLOTS[..]] {
        for damaged in [false, true] {
            let break_slots = |disk: &SimDisk| {
                for &at in broken {
                    match damaged {
                        true => flip(disk, at + 40, 2),
                        false => disk.set_zone_faults(at..at + PAGE, faults),
                    }
                }
            };
            let disk = new_disk();
            let wal = open_on(&Host::of(&disk));
            let end = append(&wal, b'a', 5000);
            append(&wal, b'b', 5000);
            break_slots(&disk);
            wal.trim(..end).wait().unwrap();
            break_slots(&disk);
            wal.close().unwrap();
            disk.clear_zones();
            assert_eq!(names(&open(&disk.power_cut()).2), b"b");

            let disk = new_disk();
            let old = open_on(&Host::of(&disk));
            let end = append(&old, b'a', 5000);
            let _new = open_on(&Host::of(&disk));
            break_slots(&disk);
            let seen = is_fenced(&old.trim(..end).wait());
            assert_eq!(seen, broken.len() == 1, "{broken:?}, damaged: {damaged}");
        }
    }
}

/// An opening has to see both headers that it has written: an unreadable one may have been
/// overwritten by the first owner.
#[test]
fn an_opening_that_cannot_read_its_headers_is_refused() {
    let faults = Faults { read_error: 1.0, ..Faults::default() };
    for damaged in [false, true] {
        for slot in SLOTS {
            let disk = new_disk();
            let wal = open_on(&Host::of(&disk));
            append(&wal, b'a', 5000);
            drop(wal);
            let (host, requests) = (Host::of(&disk), AtomicUsize::new(0));
            let broken = disk.clone();
            host.0.state.lock().before_headers = Some(Arc::new(move || {
                // Two reads to select a header, then twice two reads to check and one write.
                if requests.fetch_add(1, Ordering::Relaxed) == 8 {
                    match damaged {
                        true => flip(&broken, slot + 40, 2),
                        false => broken.set_zone_faults(slot..slot + PAGE, faults),
                    }
                }
            }));
            let refused = Wal::open(host.device(), &options(), None, &mut |_| Ok(()));
            match refused.map(drop) {
                Err(OpenError::Fenced { cause, .. }) if damaged => {
                    assert!(cause.to_string().contains("damaged"), "{cause}");
                }
                Err(OpenError::Device(_)) if !damaged => {}
                other => panic!("slot at {slot}, damaged: {damaged}: {other:?}"),
            }
            disk.clear_zones();
            assert_eq!(names(&open(&disk.power_cut()).2), b"a");
        }
    }
}

/// Recovery takes time. A writer that opens the log in the meantime owns it.
#[test]
fn an_opening_that_was_overtaken_writes_nothing() {
    for format_it in [false, true] {
        let disk = new_disk();
        let wal = open_on(&Host::of(&disk));
        append(&wal, b'a', 5000);
        drop(wal);
        let mut other = None;
        let mut before = Vec::new();
        let refused = Wal::open(Host::of(&disk).device(), &options(), None, &mut |_| {
            if format_it {
                format(&disk);
            } else {
                let wal = open_on(&Host::of(&disk));
                append(&wal, b'x', 6000);
                other = Some(wal);
            }
            before = disk.image();
            Ok(())
        });
        assert!(matches!(refused, Err(OpenError::Fenced { .. })), "{refused:?}");
        assert!(disk.image() == before);
        if let Some(wal) = other {
            append(&wal, b'y', 100);
            wal.trim(..LogOffset(5032)).wait().unwrap();
            assert_eq!(names(&open(&disk.power_cut()).2), b"xy");
        }
    }
}

#[test]
fn a_resize_that_was_overtaken_changes_no_header() {
    let disk = new_disk();
    let wal = open_on(&Host::of(&disk));
    append(&wal, b'a', 5000);
    drop(wal);
    let other = Mutex::new(None);
    let begun = {
        let disk = disk.clone();
        let other = Arc::new(other);
        let kept = other.clone();
        let progress: alluvium_wal::Progress = Arc::new(move |_, _| {
            kept.lock().get_or_insert_with(|| open_on(&Host::of(&disk)));
        });
        (progress, other)
    };
    let refused = Wal::resize(&disk.device(), DATA_START + (512 << 10), Some(begun.0));
    assert!(matches!(refused, Err(OpenError::Fenced { .. })), "{refused:?}");
    let wal = begun.1.lock().take().expect("it was opened");
    append(&wal, b'x', 5000);
    wal.trim(..LogOffset(5032)).wait().unwrap();
    assert_eq!(names(&open(&disk.power_cut()).2), b"x");
}

/// The handle is dropped while the writer checks the slots: that is a crash, after which nothing is
/// written.
#[test]
fn a_writer_that_has_stopped_writes_no_header() {
    let disk = new_disk();
    let wal = open_on(&Host::of(&disk));
    let end = append(&wal, b'a', 5000);
    disk.set_mode(Mode::Queued);
    let trim = wal.trim(..end);
    assert_eq!(disk.queued().len(), 1, "the first check");
    let before = headers(&disk);
    drop(wal);
    disk.run_until_idle();
    assert!(matches!(poll(trim), Poll::Ready(Err(WalError::Closed))));
    assert!(headers(&disk) == before);
}

/// Inspecting a formatted disk does not take it over.
#[test]
fn inspecting_does_not_take_over() {
    let disk = new_disk();
    let wal = open_on(&Host::of(&disk));
    let end = append(&wal, b'a', 5000);
    scan(&disk);
    Wal::inspect(&disk.device()).unwrap();
    assert!(Wal::format(&disk.device(), &FormatOptions::default()).is_err());
    assert!(Wal::resize(&disk.device(), DATA_START, None).is_err());
    wal.trim(..end).wait().unwrap();
    wal.close().unwrap();
}
