//! The simulated disk: it separates durable bytes from those in its cache, and can lose the
//! difference in every way.
//!
//! It has no threads and no clock: all chance comes from a seed, and requests are executed on the
//! thread that calls [`SimDisk::step`] (or submits, in [`Mode::Immediate`]). A single-threaded test
//! with the same seed replays exactly. A test with its own runtime leaves the stepping to a
//! [`Stepper`].
//!
//! # What it models
//!
//! - A completed write is visible to readers at once, but stays in the volatile cache. It becomes
//!   durable if it was submitted as durable (and [`Geometry::flushes`]), or by a flush that was
//!   **submitted after it completed**; a flush does not cover writes that complete while it runs. A
//!   disk without volatile cache makes every completed write durable.
//! - [`SimDisk::power_cut`]: durable bytes stay. Each unflushed or in-flight write survives whole,
//!   torn at sectors of [`SECTOR_BYTES`] (a prefix, or any subset), or not at all; so unflushed
//!   writes persist in any subset, which is equivalent to reordering in a cache. Overlapping
//!   completed writes keep their order; overlapping writes in flight have none.
//! - [`SimDisk::process_crash`]: the process dies, the disk does not. Completed writes stay
//!   visible, and volatile.
//! - [`SimDisk::other_host`]: several hosts reach the disk, and one of them can have the others'
//!   writes refused ([`Device::reserve`]).
//! - [`Faults`]: wrong behaviour while the power is on, per zone of the disk.
//!
//! # Example
//!
//! ```
//! use alluvium_device::sim::{Mode, SimDisk, SimOptions};
//! use alluvium_device::{Device, DeviceOffset, Request, SharedDevice};
//!
//! let disk = SimDisk::new(SimOptions { seed: 7, ..SimOptions::default() });
//! let device: SharedDevice = disk.device();
//! let mut page = device.alloc(4096);
//! page.fill(1);
//! disk.set_mode(Mode::Queued);
//! let write = Request::Write { at: DeviceOffset(0), buf: page.freeze(), durable: true };
//! device.submit(write, Box::new(|result| drop(result.unwrap())));
//! assert!(disk.step());
//! let after = disk.power_cut();
//! assert_eq!(after.peek(0, 4096), [1; 4096]);
//! ```

mod random;
mod reservation;
mod stepper;
mod storage;
#[cfg(test)]
mod tests;
mod zipf;

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use rustix::io::Errno;

pub use random::Random;
use reservation::Reservation;
pub use stepper::Stepper;
use storage::{Pages, Storage, write_sectors};
pub use zipf::Zipf;

use crate::engine::{Core, Job, Transfer};
use crate::sync::{Condvar, Mutex};
use crate::{
    AlignedBuf, Completion, Device, DeviceError, Durability, Geometry, OpenError, PAGE_BYTES,
    Progress, Request, ReserveError, SharedDevice,
};

/// The atomic unit of a power cut: a sector is written whole or not at all.
pub const SECTOR_BYTES: usize = 512;

/// When submitted requests are executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Inside `submit`, completion included, on the caller's thread. For blocking use: formatting,
    /// recovery, tools. A caller that submits while holding a lock that its own completion takes
    /// would deadlock.
    Immediate,
    /// By [`SimDisk::step`], in an order that the seed determines. A blocking call on the stepping
    /// thread would never return.
    Queued,
}

/// Probabilities of faults, each between 0 and 1, drawn per request unless stated otherwise. By
/// default a disk has no faults; its unflushed writes may survive a power cut in any way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Faults {
    /// A read fails with `EIO`.
    pub read_error: f64,
    /// A write fails with `EIO`. It leaves nothing, part or all of its bytes, in the volatile
    /// cache.
    pub write_error: f64,
    /// A write fails with `ENOSPC` and leaves nothing.
    pub no_space: f64,
    /// A flush fails with `EIO` and makes nothing durable. Drawn from the disk's faults, not from a
    /// zone's.
    pub flush_error: f64,
    /// A read or write transfers only part of its bytes, not always whole sectors. The engine
    /// continues it.
    pub short_transfer: f64,
    /// A write is acknowledged and dropped, also for readers.
    pub lost_write: f64,
    /// A write goes to other pages of the disk; its intended position is unchanged.
    pub misdirected_write: f64,
    /// One bit of a write flips on its way to the media.
    pub bit_rot: f64,
    /// A flush, or the flush of a durable write, is acknowledged and has no effect, which shows at
    /// a power cut. For [`Request::Flush`] drawn from the disk's faults.
    pub lying_flush: f64,
    /// At a power cut, per unflushed or in-flight write: some of it reaches the media.
    pub survives_power_cut: f64,
    /// At a power cut, per write that reaches the media: only part of it does.
    pub torn_by_power_cut: f64,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            read_error: 0.0,
            write_error: 0.0,
            no_space: 0.0,
            flush_error: 0.0,
            short_transfer: 0.0,
            lost_write: 0.0,
            misdirected_write: 0.0,
            bit_rot: 0.0,
            lying_flush: 0.0,
            survives_power_cut: 0.5,
            torn_by_power_cut: 0.5,
        }
    }
}

/// Counts of operations and faults, with which a test can assert that its fault happened. The
/// successor of a disk after a power cut or crash starts with the counts of that event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Reads that succeeded.
    pub reads: u64,
    /// Writes that were acknowledged.
    pub writes: u64,
    /// Acknowledged writes that were submitted as durable on a disk with [`Geometry::flushes`].
    pub dsync_writes: u64,
    /// Flushes that were acknowledged.
    pub flushes: u64,
    /// Writes that were refused because another host has reserved the disk.
    pub reserved_writes: u64,
    /// See [`Faults::read_error`].
    pub read_errors: u64,
    /// See [`Faults::write_error`].
    pub write_errors: u64,
    /// See [`Faults::no_space`].
    pub no_space: u64,
    /// See [`Faults::flush_error`].
    pub flush_errors: u64,
    /// See [`Faults::short_transfer`].
    pub short_transfers: u64,
    /// See [`Faults::lost_write`].
    pub lost_writes: u64,
    /// See [`Faults::misdirected_write`].
    pub misdirected_writes: u64,
    /// Bits flipped, by [`Faults::bit_rot`] and [`SimDisk::rot`].
    pub rotten_bits: u64,
    /// See [`Faults::lying_flush`].
    pub lying_flushes: u64,
    /// Unflushed or in-flight writes that a power cut or crash dropped completely.
    pub dropped_at_cut: u64,
    /// Unflushed or in-flight writes that a power cut or crash kept in part.
    pub torn_at_cut: u64,
    /// Unflushed or in-flight writes that a power cut or crash kept completely.
    pub kept_at_cut: u64,
}

/// Parameters of a simulated disk.
#[derive(Clone, Copy, Debug)]
pub struct SimOptions {
    /// A positive multiple of [`PAGE_BYTES`]. Default 1 MiB. Only written pages take memory.
    pub capacity_bytes: u64,
    /// Determines every random choice. Default 0.
    pub seed: u64,
    /// Whether completed writes need a flush. Default true.
    pub volatile_cache: bool,
    /// As for a real device. Default [`Durability::Auto`].
    pub durability: Durability,
    /// Whether the disk can be reserved. Default true.
    pub reservations: bool,
    /// Faults of the disk outside zones. Default: none.
    pub faults: Faults,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            capacity_bytes: 1024 * 1024,
            seed: 0,
            volatile_cache: true,
            durability: Durability::Auto,
            reservations: true,
            faults: Faults::default(),
        }
    }
}

/// A simulated disk. Clones are handles to the same disk, from the same host.
#[derive(Clone)]
pub struct SimDisk(Arc<Inner>);

/// One host's view of the disk: each host has its own latch.
struct Inner {
    core: Arc<Core>,
    medium: Arc<Medium>,
}

/// The state that all hosts share.
struct Medium {
    state: Mutex<State>,
    /// For [`Stepper`]: signals a new queued request or a change of its flags.
    changed: Condvar,
}

struct State {
    mode: Mode,
    /// Set after a power cut or crash: this disk only returns errors, and its successor takes over.
    ended: bool,
    random: Random,
    storage: Storage,
    queue: Vec<Queued>,
    /// `None` if the disk cannot be reserved.
    reservation: Option<Reservation>,
    faults: FaultMap,
    counters: Counters,
}

/// The faults of the disk and of its zones.
#[derive(Clone)]
struct FaultMap {
    disk: Faults,
    zones: Vec<(Range<u64>, Faults)>,
}

impl FaultMap {
    fn at(&self, at: u64) -> Faults {
        let zone = self.zones.iter().rev().find(|(zone, _)| zone.contains(&at));
        zone.map_or(self.disk, |(_, faults)| *faults)
    }
}

struct Queued {
    job: Job,
    /// The mark of the writes that had completed at submission, which a flush covers.
    mark: u64,
    /// The host that submitted it.
    from: Arc<Core>,
}

/// The event that ended a disk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    PowerCut,
    ProcessCrash,
}

impl SimDisk {
    /// Creates a disk of zeroes in [`Mode::Immediate`]. Panics unless the capacity is a positive
    /// multiple of a page.
    pub fn new(options: SimOptions) -> Self {
        Self::with_storage(options, Storage::default())
    }

    /// Creates a disk with the durable content `image`; its length is the capacity, whatever
    /// `options` say.
    pub fn from_image(image: &[u8], options: SimOptions) -> Self {
        let mut media = Pages::default();
        media.write(0, image);
        let options = SimOptions { capacity_bytes: image.len() as u64, ..options };
        Self::with_storage(options, Storage::from_media(media))
    }

    fn with_storage(options: SimOptions, storage: Storage) -> Self {
        let capacity_bytes = options.capacity_bytes;
        assert!(
            capacity_bytes > 0 && capacity_bytes.is_multiple_of(PAGE_BYTES as u64),
            "a capacity of {capacity_bytes} bytes is not a positive multiple of a page"
        );
        let geometry = Geometry {
            name: format!("simulated disk (seed {})", options.seed),
            capacity_bytes,
            logical_block_bytes: SECTOR_BYTES as u32,
            block_device: true,
            volatile_cache: options.volatile_cache,
            flushes: options.durability.flushes(options.volatile_cache),
            read_only: false,
            engine: "simulated",
        };
        let reservation = options.reservations.then(Reservation::default);
        Self::assemble(
            Arc::new(Core::new(geometry, None)),
            State {
                mode: Mode::Immediate,
                ended: false,
                random: Random::new(options.seed),
                storage,
                queue: Vec::new(),
                reservation,
                faults: FaultMap { disk: options.faults, zones: Vec::new() },
                counters: Counters::default(),
            },
        )
    }

    fn assemble(core: Arc<Core>, state: State) -> Self {
        let medium = Medium { state: Mutex::new(state), changed: Condvar::new() };
        Self(Arc::new(Inner { core, medium: Arc::new(medium) }))
    }

    /// Returns a handle for the layers above.
    pub fn device(&self) -> SharedDevice {
        Arc::new(self.clone())
    }

    /// Returns the same disk as seen from another host.
    pub fn other_host(&self) -> Self {
        let capacity_bytes = self.0.core.capacity_bytes();
        let core = Core::new(Geometry { capacity_bytes, ..self.0.core.geometry.clone() }, None);
        Self(Arc::new(Inner { core: Arc::new(core), medium: self.0.medium.clone() }))
    }

    // -- Execution

    /// Sets when requests run from now on. A change to [`Mode::Immediate`] first executes what is
    /// queued.
    pub fn set_mode(&self, mode: Mode) {
        self.0.medium.state.lock().mode = mode;
        if mode == Mode::Immediate {
            self.run_until_idle();
        }
    }

    /// Executes one queued request, chosen by the seed, and runs its completion here; only part of
    /// the request if the transfer is short. Returns false if nothing is queued.
    pub fn step(&self) -> bool {
        self.0
            .step(|state| (!state.queue.is_empty()).then(|| state.random.index(state.queue.len())))
    }

    /// Executes the request at `index` of [`SimDisk::queued`], as [`SimDisk::step`] does. Panics if
    /// there is none.
    pub fn step_at(&self, index: usize) {
        self.0.step(|_| Some(index));
    }

    /// Steps until nothing is queued, including requests that completions submit.
    pub fn run_until_idle(&self) {
        while self.step() {}
    }

    /// The queued requests, as operation (`read`, `write`, `flush`), first byte and length.
    pub fn queued(&self) -> Vec<(&'static str, u64, usize)> {
        let state = self.0.medium.state.lock();
        let describe = |queued: &Queued| {
            let (at, len) = queued.job.extent();
            (queued.job.operation(), at, len)
        };
        state.queue.iter().map(describe).collect()
    }

    // -- Faults

    /// Replaces the faults of the disk.
    pub fn set_faults(&self, faults: Faults) {
        self.0.medium.state.lock().faults.disk = faults;
    }

    /// Sets the faults for requests that begin in `zone` (bytes). The zone set last wins.
    pub fn set_zone_faults(&self, zone: Range<u64>, faults: Faults) {
        self.0.medium.state.lock().faults.zones.push((zone, faults));
    }

    /// Removes all zones.
    pub fn clear_zones(&self) {
        self.0.medium.state.lock().faults.zones.clear();
    }

    /// The counts so far.
    pub fn counters(&self) -> Counters {
        self.0.medium.state.lock().counters
    }

    /// Flips `bits` randomly chosen bits at rest within `range` (bytes). A bit may be chosen twice.
    pub fn rot(&self, range: Range<u64>, bits: u32) {
        let state = &mut *self.0.medium.state.lock();
        for _ in 0..bits {
            let at = range.start + state.random.below(range.end - range.start);
            let mut byte = [0];
            state.storage.read(at, &mut byte);
            byte[0] ^= 1 << state.random.below(8);
            state.storage.overwrite(at, &byte);
            state.counters.rotten_bits += 1;
        }
    }

    // -- Bytes

    /// Returns `len` bytes at `at`, any position, as a reader would see them now.
    pub fn peek(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.medium.state.lock().storage.read(at, &mut bytes);
        bytes
    }

    /// Returns the durable content of `len` bytes at `at`, any position.
    pub fn peek_durable(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.medium.state.lock().storage.read_durable(at, &mut bytes);
        bytes
    }

    /// Stores `bytes` at `at`, any position, visible and durable, without faults.
    pub fn poke(&self, at: u64, bytes: &[u8]) {
        assert!(
            at + bytes.len() as u64 <= self.0.core.capacity_bytes(),
            "beyond the end of the disk"
        );
        self.0.medium.state.lock().storage.overwrite(at, bytes);
    }

    /// Returns the whole disk as a reader would see it now.
    pub fn image(&self) -> Vec<u8> {
        self.peek(0, self.0.core.capacity_bytes() as usize)
    }

    // -- Ends

    /// Cuts the power. Returns the disk as it is found afterwards, in [`Mode::Immediate`], with the
    /// same faults and the same sequence of random numbers. This disk has ended: queued requests
    /// and later ones fail.
    #[must_use]
    pub fn power_cut(&self) -> Self {
        self.end(End::PowerCut)
    }

    /// Kills the process that uses the disk. Returns the disk as the next process finds it, in
    /// [`Mode::Immediate`]: all completed writes are visible and as volatile as before; writes in
    /// flight happened completely, partly or not at all. This disk has ended.
    #[must_use]
    pub fn process_crash(&self) -> Self {
        self.end(End::ProcessCrash)
    }

    fn end(&self, end: End) -> Self {
        let capacity_bytes = self.0.core.capacity_bytes();
        let geometry = Geometry { capacity_bytes, ..self.0.core.geometry.clone() };
        let core = Arc::new(Core::new(geometry, None));
        let (successor, orphans) = {
            let state = &mut *self.0.medium.state.lock();
            assert!(!state.ended, "this disk has ended; use its successor");
            state.ended = true;
            let orphans = std::mem::take(&mut state.queue);
            let mut successor = state.successor(end, orphans.iter().map(|queued| &queued.job));
            if let Some(reservation) = &mut successor.reservation {
                reservation.restart(&self.0.core, &core);
            }
            (successor, orphans)
        };
        for Queued { job, from, .. } in orphans {
            from.complete(job, Err(ended())).run();
        }
        Self::assemble(core, successor)
    }
}

fn ended() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the power was cut or the process killed")
}

impl Inner {
    /// Executes one transfer of the request that `choose` picks.
    fn step(&self, choose: impl FnOnce(&mut State) -> Option<usize>) -> bool {
        let completed = {
            let state = &mut *self.medium.state.lock();
            let Some(index) = choose(state) else { return false };
            let queued = state.queue.swap_remove(index);
            let from = queued.from.clone();
            match state.execute(queued) {
                Ok((job, result)) => from.complete(job, result),
                Err(unfinished) => {
                    state.queue.push(unfinished);
                    return true;
                }
            }
        };
        completed.run(); // not under the lock: completions submit
        true
    }
}

impl State {
    /// Executes one transfer. Returns the outcome of the request, or the request itself if more is
    /// to be done.
    fn execute(&mut self, mut queued: Queued) -> Result<(Job, io::Result<()>), Queued> {
        let refusal = if self.ended { Some(ended()) } else { queued.from.refusal(&queued.job) };
        if let Some(refusal) = refusal {
            return Ok((queued.job, Err(refusal)));
        }
        let writes = queued.job.unwritten().is_some();
        if writes && self.reservation.as_ref().is_some_and(|held| held.excludes(&queued.from)) {
            self.counters.reserved_writes += 1;
            return Ok((queued.job, Err(Errno::BADE.into())));
        }
        let moved = self.transfer(queued.job.next(), queued.mark, &queued.from);
        match queued.job.advance(moved, SECTOR_BYTES as u32) {
            Some(result) => Ok((queued.job, result)),
            None => Err(queued),
        }
    }

    fn transfer(&mut self, transfer: Transfer<'_>, mark: u64, core: &Core) -> Result<usize, Errno> {
        match transfer {
            Transfer::Read { at, buf, .. } => self.read(at, buf),
            Transfer::Write { at, buf, dsync, .. } => self.write(at, buf, dsync, core),
            Transfer::Flush => self.flush(mark),
        }
    }

    fn read(&mut self, at: u64, buf: &mut [u8]) -> Result<usize, Errno> {
        let faults = self.faults.at(at);
        if self.random.chance(faults.read_error) {
            self.counters.read_errors += 1;
            return Err(Errno::IO);
        }
        let moved = self.moved(faults, buf.len());
        self.storage.read(at, &mut buf[..moved]);
        self.counters.reads += u64::from(moved == buf.len());
        Ok(moved)
    }

    fn write(&mut self, at: u64, buf: &[u8], dsync: bool, core: &Core) -> Result<usize, Errno> {
        let faults = self.faults.at(at);
        if self.random.chance(faults.write_error) {
            self.counters.write_errors += 1;
            let live = surviving_sectors(&mut self.random, faults, buf.len() / SECTOR_BYTES);
            self.storage.write_back(at, buf, live);
            return Err(Errno::IO);
        }
        if self.random.chance(faults.no_space) {
            self.counters.no_space += 1;
            return Err(Errno::NOSPC);
        }
        let moved = self.moved(faults, buf.len());
        let mut data = buf[..moved - moved % SECTOR_BYTES].to_vec();
        let mut to = at;
        if self.random.chance(faults.misdirected_write) {
            to = self.elsewhere(at, data.len(), core.capacity_bytes());
            self.counters.misdirected_writes += u64::from(to != at);
        }
        if self.random.chance(faults.bit_rot) {
            let index = self.random.index(data.len());
            data[index] ^= 1 << self.random.below(8);
            self.counters.rotten_bits += 1;
        }
        if self.random.chance(faults.lost_write) {
            self.counters.lost_writes += 1;
        } else if !core.geometry.volatile_cache {
            self.storage.write_through(to, &data);
        } else if !dsync {
            self.storage.write_back(to, &data, vec![true; data.len() / SECTOR_BYTES]);
        } else if self.random.chance(faults.lying_flush) {
            self.counters.lying_flushes += 1;
            self.storage.write_back(to, &data, vec![true; data.len() / SECTOR_BYTES]);
        } else {
            self.storage.write_through(to, &data);
        }
        let last = moved == buf.len();
        self.counters.writes += u64::from(last);
        self.counters.dsync_writes += u64::from(last && dsync);
        Ok(moved)
    }

    fn flush(&mut self, mark: u64) -> Result<usize, Errno> {
        if self.random.chance(self.faults.disk.flush_error) {
            self.counters.flush_errors += 1;
            return Err(Errno::IO);
        }
        if self.random.chance(self.faults.disk.lying_flush) {
            self.counters.lying_flushes += 1;
        } else {
            self.storage.flush(mark);
        }
        self.counters.flushes += 1;
        Ok(0)
    }

    /// The number of bytes, of `len`, that a transfer moves: all, or at least one sector and some
    /// odd bytes.
    fn moved(&mut self, faults: Faults, len: usize) -> usize {
        if len <= SECTOR_BYTES || !self.random.chance(faults.short_transfer) {
            return len;
        }
        self.counters.short_transfers += 1;
        SECTOR_BYTES + self.random.index(len - SECTOR_BYTES)
    }

    /// Another page at which `len` bytes fit, if there is one.
    fn elsewhere(&mut self, at: u64, len: usize, capacity_bytes: u64) -> u64 {
        let page_bytes = PAGE_BYTES as u64;
        let pages = (capacity_bytes - len as u64) / page_bytes;
        match pages {
            0 => at,
            _ => {
                let page = self.random.below(pages);
                // Skips the page of `at` itself.
                (page + u64::from(page >= at / page_bytes)) * page_bytes
            }
        }
    }

    /// The state of the disk after `end`.
    fn successor<'a>(&mut self, end: End, in_flight: impl Iterator<Item = &'a Job>) -> Self {
        let Self { random, storage, faults, reservation, .. } = self;
        let mut counters = Counters::default();
        let mut survive = |random: &mut Random, at: u64, sectors: usize| {
            let which = surviving_sectors(random, faults.at(at), sectors);
            match which.iter().filter(|kept| **kept).count() {
                0 => counters.dropped_at_cut += 1,
                kept if kept == sectors => counters.kept_at_cut += 1,
                _ => counters.torn_at_cut += 1,
            }
            which
        };
        // Writes in flight at the same time have no order among them.
        let mut writes: Vec<(u64, &[u8])> = in_flight.filter_map(Job::unwritten).collect();
        for last in (1..writes.len()).rev() {
            writes.swap(last, random.index(last + 1));
        }
        let storage = match end {
            End::PowerCut => {
                let mut media = storage.after_power_cut(|at, sectors| survive(random, at, sectors));
                for (at, data) in writes {
                    let which = survive(random, at, data.len() / SECTOR_BYTES);
                    write_sectors(&mut media, at, data, &which);
                }
                Storage::from_media(media)
            }
            End::ProcessCrash => {
                let mut storage = storage.clone();
                for (at, data) in writes {
                    let which = survive(random, at, data.len() / SECTOR_BYTES);
                    storage.write_back(at, data, which);
                }
                storage
            }
        };
        Self {
            mode: Mode::Immediate,
            ended: false,
            random: random.clone(),
            storage,
            queue: Vec::new(),
            // A reservation survives a power loss.
            reservation: reservation.clone(),
            faults: faults.clone(),
            counters,
        }
    }
}

/// The sectors that arrive of an unacknowledged write of `sectors` sectors: none, all, a prefix, or
/// any subset.
fn surviving_sectors(random: &mut Random, faults: Faults, sectors: usize) -> Vec<bool> {
    if !random.chance(faults.survives_power_cut) {
        vec![false; sectors]
    } else if !random.chance(faults.torn_by_power_cut) {
        vec![true; sectors]
    } else if random.chance(0.5) {
        let prefix = random.index(sectors);
        (0..sectors).map(|sector| sector < prefix).collect()
    } else {
        (0..sectors).map(|_| random.chance(0.5)).collect()
    }
}

impl Device for SimDisk {
    fn geometry(&self) -> &Geometry {
        &self.0.core.geometry
    }

    fn capacity_bytes(&self) -> u64 {
        self.0.core.capacity_bytes()
    }

    /// Accepts any length. Bytes never written are zero; bytes cut off are kept but not accessible.
    fn set_capacity(&self, bytes: u64, _: Option<&Progress>) -> Result<(), OpenError> {
        self.0.core.store_capacity(bytes);
        Ok(())
    }

    fn reserve(&self) -> Result<(), ReserveError> {
        self.acquire()
    }

    /// Filled with a pattern, so that no code comes to rely on zeroes that a real pool would not
    /// provide.
    fn alloc(&self, len_bytes: usize) -> AlignedBuf {
        let mut buf = AlignedBuf::zeroed(len_bytes);
        buf.fill(0xa5);
        buf
    }

    fn submit(&self, request: Request, done: Completion) {
        let job = self.0.core.accept(request, done);
        let completed = {
            let state = &mut *self.0.medium.state.lock();
            let from = self.0.core.clone();
            let mut queued = Queued { job, mark: state.storage.mark(), from };
            if state.mode == Mode::Queued && !state.ended {
                state.queue.push(queued);
                self.0.medium.changed.notify_all();
                return;
            }
            loop {
                match state.execute(queued) {
                    Ok((job, result)) => break self.0.core.complete(job, result),
                    Err(unfinished) => queued = unfinished,
                }
            }
        };
        completed.run(); // not under the lock: completions submit
    }

    fn failure(&self) -> Option<DeviceError> {
        self.0.core.failure()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // As with every device, dropping the last handle completes the requests in flight.
        let own = |queued: &Queued| Arc::ptr_eq(&queued.from, &self.core);
        while self.step(|state| state.queue.iter().position(own)) {}
    }
}

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.core.geometry.name)
    }
}
