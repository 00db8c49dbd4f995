//! The device between a WAL and its simulated disk: pulls the plug at a chosen write, injects faults that the model knows
//! about, and misbehaves on purpose where a test wants to see the campaign notice.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use alluvium_device::sim::{Mode, Random, SimDisk};
use alluvium_device::{
    AlignedBuf, Completion, Device, DeviceError, DeviceOffset, Geometry, Request,
};
use parking_lot::Mutex;

/// First byte of the ring: `docs/format/wal.md`, section 2.
pub(crate) const DATA_START: u64 = 64 * 1024;
const PAGE: u64 = 4096;

/// A defect put in on purpose, to see that the campaign finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// None.
    Sound,
    /// Durable writes carry no flush, though the disk has a volatile cache.
    TrustedCache,
    /// The flush at the start of recovery does nothing.
    NoFlushAtOpen,
    /// Headers are written without a flush.
    VolatileHeaders,
    /// A header change is written to one slot only.
    OneHeaderSlot,
    /// Blocks complete before they are written.
    EarlyCompletion,
}

impl Mutation {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Sound,
        Self::TrustedCache,
        Self::NoFlushAtOpen,
        Self::VolatileHeaders,
        Self::OneHeaderSlot,
        Self::EarlyCompletion,
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
        })
    }
}

/// How a life ends.
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

/// Places of the device that do not hold what was written there: rotten, or hit by a lost or misdirected write.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hits {
    ranges: Vec<Range<u64>>,
    /// Counts the calls of `add`.
    added: u64,
}

impl Hits {
    pub(crate) fn add(&mut self, range: Range<u64>) {
        self.ranges.push(range);
        self.added += 1;
    }

    pub(crate) fn any_in(&self, range: &Range<u64>) -> bool {
        self.ranges.iter().any(|hit| hit.start < range.end && range.start < hit.end)
    }

    /// `range` has been written anew.
    fn heal(&mut self, range: &Range<u64>) {
        let mut left = Vec::with_capacity(self.ranges.len());
        for hit in self.ranges.drain(..) {
            let before = hit.start..hit.end.min(range.start);
            let after = hit.start.max(range.end)..hit.end;
            left.extend([before, after].into_iter().filter(|part| part.start < part.end));
        }
        self.ranges = left;
    }
}

/// Chances per block write.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WriteFaults {
    pub(crate) lost: f64,
    pub(crate) misdirected: f64,
}

/// See the module.
pub(crate) struct Plug {
    disk: SimDisk,
    mutation: Mutation,
    faults: WriteFaults,
    hits: Arc<Mutex<Hits>>,
    state: Mutex<State>,
}

struct State {
    random: Random,
    /// Writes until the plug is pulled, and how.
    fuse: Option<(u64, End)>,
    successor: Option<SimDisk>,
}

impl Plug {
    pub(crate) fn new(
        disk: SimDisk,
        mutation: Mutation,
        faults: WriteFaults,
        hits: Arc<Mutex<Hits>>,
        random: Random,
    ) -> Arc<Self> {
        let state = Mutex::new(State { random, fuse: None, successor: None });
        Arc::new(Self { disk, mutation, faults, hits, state })
    }

    /// Pull the plug while write number `writes` from now (0 is the next one) is in flight.
    pub(crate) fn set_fuse(&self, fuse: Option<(u64, End)>) {
        self.state.lock().fuse = fuse;
    }

    /// The disk after the plug was pulled.
    pub(crate) fn successor(&self) -> Option<SimDisk> {
        self.state.lock().successor.clone()
    }

    /// Whether this write is the one in which the plug is pulled.
    fn burns_down(&self) -> Option<End> {
        let mut state = self.state.lock();
        let (left, end) = state.fuse.take()?;
        if left == 0 {
            return Some(end);
        }
        state.fuse = Some((left - 1, end));
        None
    }

    /// Where a write of `len` bytes really goes: `None` nowhere.
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

    fn write(&self, at: u64, buf: alluvium_device::SharedBuf, durable: bool, done: Completion) {
        let len = buf.len() as u64;
        let header = at < DATA_START;
        if header && self.mutation == Mutation::OneHeaderSlot && at != 0 {
            return done(Ok(None));
        }
        let durable = durable && !(header && self.mutation == Mutation::VolatileHeaders);
        let to = self.destination(at, len);
        let astray: Vec<Range<u64>> = match to {
            Some(to) if to == at => Vec::new(),
            _ => std::iter::once(at).chain(to).map(|at| at..at + len).collect(),
        };
        // Until it lands it may or may not have happened.
        let go_astray = {
            let hits = self.hits.clone();
            move || astray.iter().for_each(|range| hits.lock().add(range.clone()))
        };
        go_astray();
        let hits = self.hits.clone();
        let added = hits.lock().added;
        // The first page may repeat what stood there, rot included.
        let healed = at + if header { 0 } else { PAGE }..at + len;
        let landed = move |result: &Result<Option<AlignedBuf>, DeviceError>| {
            // If something went astray in the meantime, nobody knows which of the two is there now.
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
}

impl Device for Plug {
    fn geometry(&self) -> &Geometry {
        self.disk.geometry()
    }

    fn alloc(&self, len_bytes: usize) -> AlignedBuf {
        self.disk.alloc(len_bytes)
    }

    fn submit(&self, request: Request, done: Completion) {
        match request {
            Request::Write { at, buf, durable } => match self.burns_down() {
                None => self.write(at.0, buf, durable, done),
                Some(end) => {
                    self.disk.set_mode(Mode::Queued);
                    self.write(at.0, buf, durable, done);
                    let successor = end.of(&self.disk);
                    self.state.lock().successor = Some(successor);
                }
            },
            Request::Flush if self.mutation == Mutation::NoFlushAtOpen => done(Ok(None)),
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
