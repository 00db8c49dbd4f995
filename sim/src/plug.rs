//! The device between a WAL and its simulated disk. It cuts the power at a chosen write, injects
//! faults known to the model, introduces defects that the campaign must find, and is the path of an
//! old owner to a disk that has a new one.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use alluvium_device::sim::{Mode, Random, SimDisk};
use alluvium_device::{
    AlignedBuf, Completion, Device, DeviceError, DeviceOffset, Geometry, Request, SharedBuf,
};
use parking_lot::Mutex;

use crate::ring::{DATA_START, PAGE, Ring};

/// A defect introduced on purpose, to verify that the campaign finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// No defect.
    Sound,
    /// Durable writes carry no flush, though the disk has a volatile cache.
    TrustedCache,
    /// The flush at the start of recovery has no effect.
    NoFlushAtOpen,
    /// Headers are written without a flush.
    VolatileHeaders,
    /// A header change of an open log is written to one slot only.
    OneHeaderSlot,
    /// Blocks complete before they are written.
    EarlyCompletion,
    /// A resize writes its headers before its copies are flushed.
    VolatileCopies,
    /// A window grows without the headers stating it.
    UnsaidGrowth,
    /// An owner does not see the headers of its successor.
    BlindOwner,
    /// An owner that has begun to write its headers does not see those of an old one.
    BlindOpening,
    /// The disk does not refuse the old owner although it should.
    OpenFence,
}

impl Mutation {
    /// All mutations.
    pub const ALL: [Self; 11] = [
        Self::Sound,
        Self::TrustedCache,
        Self::NoFlushAtOpen,
        Self::VolatileHeaders,
        Self::OneHeaderSlot,
        Self::EarlyCompletion,
        Self::VolatileCopies,
        Self::UnsaidGrowth,
        Self::BlindOwner,
        Self::BlindOpening,
        Self::OpenFence,
    ];
}

impl fmt::Display for Mutation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sound => "sound",
            Self::TrustedCache => "trusted-cache",
            Self::NoFlushAtOpen => "no-flush-at-open",
            Self::VolatileHeaders => "volatile-headers",
            Self::OneHeaderSlot => "one-header-slot",
            Self::EarlyCompletion => "early-completion",
            Self::VolatileCopies => "volatile-copies",
            Self::UnsaidGrowth => "unsaid-growth",
            Self::BlindOwner => "blind-owner",
            Self::BlindOpening => "blind-opening",
            Self::OpenFence => "open-fence",
        })
    }
}

/// How a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    PowerCut,
    ProcessCrash,
}

impl End {
    pub(crate) fn of(self, disk: &SimDisk) -> SimDisk {
        match self {
            Self::PowerCut => disk.power_cut(),
            Self::ProcessCrash => disk.process_crash(),
        }
    }
}

/// Ranges of the device that do not hold what was written there: rotten, or hit by a lost,
/// misdirected or late write.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hits {
    ranges: Vec<Range<u64>>,
    /// Number of calls of `add`.
    added: u64,
    /// Whether an old owner has overwritten its successor's header.
    pub(crate) late_header: bool,
}

impl Hits {
    pub(crate) fn add(&mut self, range: Range<u64>) {
        self.ranges.push(range);
        self.added += 1;
    }

    pub(crate) fn any_in(&self, range: &Range<u64>) -> bool {
        self.ranges.iter().any(|hit| hit.start < range.end && range.start < hit.end)
    }

    /// Removes `range`, which has been written again.
    fn heal(&mut self, range: &Range<u64>) {
        let mut left = Vec::with_capacity(self.ranges.len());
        for hit in self.ranges.drain(..) {
            let before = hit.start..hit.end.min(range.start);
            let after = hit.start.max(range.end)..hit.end;
            left.extend([before, after].into_iter().filter(|part| part.start < part.end));
        }
        self.ranges = left;
    }

    /// Moves the hits of `live` from one ring to the other.
    pub(crate) fn moved(&mut self, from: Ring, to: Ring, live: &Range<u64>) {
        for page in (live.start / PAGE * PAGE..live.end).step_by(PAGE as usize) {
            let place = |ring: Ring| ring.on_device(&(page..page + PAGE)).next().expect("a page");
            let (old, new) = (place(from), place(to));
            if old != new {
                let hits =
                    self.ranges.iter().map(|hit| hit.start.max(old.start)..hit.end.min(old.end));
                let hits: Vec<_> = hits.filter(|part| part.start < part.end).collect();
                for hit in hits {
                    self.add(hit.start - old.start + new.start..hit.end - old.start + new.start);
                }
            }
        }
    }
}

/// Probabilities per block write.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WriteFaults {
    pub(crate) lost: f64,
    pub(crate) misdirected: f64,
}

/// The device; see the module documentation.
pub(crate) struct Plug {
    disk: SimDisk,
    mutation: Mutation,
    faults: WriteFaults,
    hits: Arc<Mutex<Hits>>,
    state: Mutex<State>,
}

struct State {
    random: Random,
    /// Number of writes until the cut, and how it happens.
    fuse: Option<(u64, End)>,
    successor: Option<SimDisk>,
    /// Whether writes are copies of a resize, which copy existing damage.
    copies: bool,
    /// Header writes so far; the first two open the log.
    headers: u64,
    /// The window in the first header, for [`Mutation::UnsaidGrowth`].
    window: Option<[u8; 8]>,
    /// The old owner's path to this disk.
    old_owner: Option<Arc<Plug>>,
    taken_over: Option<TakenOver>,
}

/// The state of an owner whose log has been taken over.
struct TakenOver {
    fenced: bool,
    /// Whether requests are held until [`Plug::arrive`].
    holds: bool,
    held: Vec<(Request, Completion)>,
    counts: Arrivals,
}

/// Counts of an old owner's writes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Arrivals {
    pub(crate) refused: u64,
    pub(crate) landed: u64,
    pub(crate) headers: u64,
}

impl Plug {
    pub(crate) fn new(
        disk: SimDisk,
        mutation: Mutation,
        faults: WriteFaults,
        hits: Arc<Mutex<Hits>>,
        random: Random,
    ) -> Arc<Self> {
        let state = Mutex::new(State {
            random,
            fuse: None,
            successor: None,
            copies: false,
            headers: 0,
            window: None,
            old_owner: None,
            taken_over: None,
        });
        Arc::new(Self { disk, mutation, faults, hits, state })
    }

    /// Cuts the power while write number `writes` from now (0 is the next one) is in flight.
    pub(crate) fn set_fuse(&self, fuse: Option<(u64, End)>) {
        self.state.lock().fuse = fuse;
    }

    /// Declares all further writes to be those of a resize.
    pub(crate) fn set_copies(&self) {
        self.state.lock().copies = true;
    }

    /// Makes the old owner's requests arrive while this device is used.
    pub(crate) fn set_old_owner(&self, old_owner: Option<Arc<Self>>) {
        self.state.lock().old_owner = old_owner;
    }

    /// The disk after the cut.
    pub(crate) fn successor(&self) -> Option<SimDisk> {
        self.state.lock().successor.clone()
    }

    /// Whether the cut happens at this write, and how.
    fn takes_cut(&self) -> Option<End> {
        let mut state = self.state.lock();
        let (left, end) = state.fuse.take()?;
        if left == 0 {
            return Some(end);
        }
        state.fuse = Some((left - 1, end));
        None
    }

    /// The actual position of a write of `len` bytes; `None` if it is lost.
    fn destination(&self, at: u64, len: u64) -> Option<u64> {
        let mut state = self.state.lock();
        if at < DATA_START {
            return Some(at);
        }
        if state.random.chance(self.faults.lost) {
            return None;
        }
        if state.random.chance(self.faults.misdirected) {
            let pages = (self.disk.geometry().capacity_bytes - DATA_START - len) / PAGE + 1;
            return Some(DATA_START + state.random.below(pages) * PAGE);
        }
        Some(at)
    }

    fn write(&self, at: u64, buf: SharedBuf, durable: bool, done: Completion) {
        let len = buf.len() as u64;
        let header = at < DATA_START;
        let (copies, headers) = {
            let mut state = self.state.lock();
            state.headers += u64::from(header);
            (state.copies, state.headers)
        };
        if header && self.mutation == Mutation::OneHeaderSlot && at != 0 && headers > 2 {
            return done(Ok(None));
        }
        let buf = if header { self.mutated(buf) } else { buf };
        let durable = durable
            && !(header && self.mutation == Mutation::VolatileHeaders)
            && !(!header && copies && self.mutation == Mutation::VolatileCopies);
        let to = self.destination(at, len);
        let astray: Vec<Range<u64>> = match to {
            Some(to) if to == at => Vec::new(),
            _ => std::iter::once(at).chain(to).map(|at| at..at + len).collect(),
        };
        // Until it completes, the write may or may not have happened.
        let go_astray = {
            let hits = self.hits.clone();
            move || astray.iter().for_each(|range| hits.lock().add(range.clone()))
        };
        go_astray();
        let hits = self.hits.clone();
        let added = hits.lock().added;
        // The first page may repeat earlier bytes, rot included, and a copy is no better than its
        // source.
        let healed = match header {
            true => at..at + len,
            false if copies => at..at,
            false => at + PAGE..at + len,
        };
        let landed = move |result: &Result<Option<AlignedBuf>, DeviceError>| {
            // If another write went astray meanwhile, it is unknown which of the two is there now.
            let mut good = hits.lock();
            if result.is_ok() && to == Some(at) && healed.start < healed.end && good.added == added
            {
                good.heal(&healed);
            }
            drop(good);
            go_astray();
        };
        match to {
            None => done(Ok(None)),
            Some(to) if self.mutation == Mutation::EarlyCompletion && !header => {
                self.disk
                    .submit(Request::Write { at: DeviceOffset(to), buf, durable }, Box::new(drop));
                done(Ok(None));
            }
            Some(to) => {
                let done: Completion = Box::new(move |result| {
                    landed(&result);
                    done(result);
                });
                self.disk.submit(Request::Write { at: DeviceOffset(to), buf, durable }, done);
            }
        }
    }

    /// The header that is written instead of this one.
    fn mutated(&self, page: SharedBuf) -> SharedBuf {
        /// Fields of `docs/format/wal.md`, section 3.
        const WINDOW: Range<usize> = 56..64;
        const CRC: Range<usize> = 124..128;
        if self.mutation != Mutation::UnsaidGrowth {
            return page;
        }
        let window: [u8; 8] = page[WINDOW].try_into().expect("eight bytes");
        let mut state = self.state.lock();
        let first = *state.window.get_or_insert(window);
        let said = u64::from_le_bytes(window).min(u64::from_le_bytes(first));
        let mut changed = self.disk.alloc(page.len());
        changed.copy_from_slice(&page);
        changed[WINDOW].copy_from_slice(&said.to_le_bytes());
        let crc = crc32c::crc32c(&changed[..CRC.start]);
        changed[CRC].copy_from_slice(&crc.to_le_bytes());
        changed.freeze()
    }

    // -- The path of an old owner

    /// Declares this disk taken over: requests are held until they [arrive](Self::arrive), and do
    /// not see the disk's queue.
    pub(crate) fn set_taken_over(&self, fenced: bool) {
        let taken_over =
            TakenOver { fenced, holds: true, held: Vec::new(), counts: Arrivals::default() };
        self.state.lock().taken_over = Some(taken_over);
    }

    /// Lets one held request arrive, chosen at random. Returns false if there is none.
    pub(crate) fn arrive(&self) -> bool {
        let mut state = self.state.lock();
        let State { taken_over: Some(taken_over), random, .. } = &mut *state else { return false };
        if taken_over.held.is_empty() {
            return false;
        }
        let (request, done) = taken_over.held.swap_remove(random.index(taken_over.held.len()));
        let fenced = taken_over.fenced;
        drop(state);
        self.arrived(fenced, request, done);
        true
    }

    /// Lets all held requests arrive, and future ones at once.
    pub(crate) fn release_all(&self) {
        self.state.lock().taken_over.as_mut().expect("an old owner's").holds = false;
        while self.arrive() {}
    }

    /// Ends the disk. Returns the counts of the old owner's writes.
    pub(crate) fn finish(&self) -> Arrivals {
        let mut state = self.state.lock();
        let taken_over = state.taken_over.as_mut().expect("an old owner's");
        (taken_over.fenced, taken_over.holds) = (true, false);
        let (lost, counts) = (std::mem::take(&mut taken_over.held), taken_over.counts);
        drop(state);
        for (request, done) in lost {
            done(Err(refusal(&request)));
        }
        counts
    }

    fn arrived(&self, fenced: bool, request: Request, done: Completion) {
        match request {
            Request::Flush => done(Ok(None)),
            Request::Read { at, .. }
                if at.0 < DATA_START && self.mutation == Mutation::BlindOwner =>
            {
                done(Err(refusal(&request)));
            }
            Request::Read { at, mut buf } => {
                let bytes = self.disk.peek(at.0, buf.len());
                buf.copy_from_slice(&bytes);
                done(Ok(Some(buf)));
            }
            Request::Write { .. } if fenced && self.mutation != Mutation::OpenFence => {
                self.count(|counts| counts.refused += 1);
                done(Err(refusal(&request)));
            }
            Request::Write { at: DeviceOffset(at), buf, .. } => {
                self.count(|counts| {
                    counts.landed += 1;
                    counts.headers += u64::from(at < DATA_START);
                });
                let before = self.disk.peek(at, buf.len());
                let differs = |index: &usize| before[*index] != buf[*index];
                let (first, last) = ((0..buf.len()).find(differs), (0..buf.len()).rfind(differs));
                if let (Some(first), Some(last), false) = (first, last, fenced) {
                    let mut hits = self.hits.lock();
                    hits.add(at + first as u64..at + last as u64 + 1);
                    hits.late_header |= at < DATA_START;
                }
                self.disk.poke(at, &buf);
                done(Ok(None));
            }
        }
    }

    fn count(&self, count: impl FnOnce(&mut Arrivals)) {
        count(&mut self.state.lock().taken_over.as_mut().expect("an old owner's").counts);
    }
}

fn refusal(request: &Request) -> DeviceError {
    let (operation, at, len_bytes) = match request {
        Request::Read { at, buf } => ("read", at.0, buf.len()),
        Request::Write { at, buf, .. } => ("write", at.0, buf.len()),
        Request::Flush => ("flush", 0, 0),
    };
    DeviceError {
        device: "a disk that has another owner".into(),
        operation,
        at,
        len_bytes: len_bytes as u64,
        source: Arc::new(io::Error::other("reservation conflict")),
    }
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
        if let Some(taken_over) = &mut state.taken_over {
            if taken_over.holds {
                return taken_over.held.push((request, done));
            }
            let fenced = taken_over.fenced;
            drop(state);
            return self.arrived(fenced, request, done);
        }
        // Mostly around header accesses, where the order matters most.
        let arrivals = match &request {
            Request::Read { at, .. } | Request::Write { at, .. } if at.0 < DATA_START => {
                state.random.below(2)
            }
            _ => u64::from(state.random.chance(0.2)),
        };
        let (copies, headers, old_owner) = (state.copies, state.headers, state.old_owner.clone());
        drop(state);
        for _ in 0..arrivals {
            old_owner.as_ref().map(|old_owner| old_owner.arrive());
        }
        match request {
            Request::Write { at, buf, durable } => match self.takes_cut() {
                None => self.write(at.0, buf, durable, done),
                Some(end) => {
                    self.disk.set_mode(Mode::Queued);
                    self.write(at.0, buf, durable, done);
                    let successor = end.of(&self.disk);
                    self.state.lock().successor = Some(successor);
                }
            },
            Request::Read { at, .. }
                if at.0 < DATA_START && headers > 0 && self.mutation == Mutation::BlindOpening =>
            {
                done(Err(refusal(&request)));
            }
            Request::Flush if self.mutation == Mutation::NoFlushAtOpen => done(Ok(None)),
            Request::Flush if copies && self.mutation == Mutation::VolatileCopies => done(Ok(None)),
            request => self.disk.submit(request, done),
        }
    }

    fn failure(&self) -> Option<DeviceError> {
        self.disk.failure()
    }
}

impl fmt::Debug for Plug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.disk)
    }
}
