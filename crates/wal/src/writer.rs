//! The open log: records into blocks, blocks to the device, completions back. `docs/format/wal.md`,
//! section 5.
//!
//! One short mutex guards the state. It is never held while the device or a waker is called: both
//! may run foreign code, and the simulated disk completes requests on the submitting thread.

mod group;
mod resizing;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use alluvium_device::{AlignedBuf, DeviceError, Request, SharedDevice};
use bytes::Bytes;

use crate::batch::{Parts, Placed};
use crate::block::{Block, Tail};
use crate::crc::crc32c_concat;
use crate::header;
use crate::layout::{HEADER_SLOT_AT, HEADER_SLOT_BYTES, LogOffset, Ring};
use crate::limit::{Alarm, Limiter};
use crate::record::Codec;
use crate::report::HeaderInfo;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, OnceLock};
use crate::wait::{Source, Wait, Watermark};
use crate::window::{Cursors, WindowSize};
use crate::{AppendError, DurationHistogram, Options, Stats, WalError};
use resizing::Resizing;

pub(crate) use resizing::Outcome;

/// The state shared by the handles, the futures and the requests in flight.
pub(crate) struct Shared {
    pub(crate) device: SharedDevice,
    options: Options,
    codec: Codec,
    epoch: u32,
    state: Mutex<State>,
    pub(crate) marks: Arc<Marks>,
    alarm: OnceLock<Alarm>,
    /// Time zero of the limiter.
    started: Instant,
}

/// The watermarks that futures wait for. Separate from [`Shared`], so that no future keeps the
/// device open, and so that a completion can release the device before it wakes a waiter that may
/// drop the last handle and open the device again.
pub(crate) struct Marks {
    /// The durable offset: everything before it is on stable storage.
    pub(crate) durable: Watermark,
    /// The trim offset that both headers carry.
    pub(crate) trimmed: Watermark,
    /// The user's mark that both headers carry.
    pub(crate) mark: Watermark,
    /// Counts the moves of the durable and trim offsets, for waiters for space.
    pub(crate) moves: Watermark,
    /// Counts the resizes that have taken effect or were replaced.
    pub(crate) resizes: Watermark,
    /// Value of `moves` when an append was last refused.
    refused_at: AtomicU64,
    /// Why the log has stopped: the first error, or the drop of the last handle.
    stopped: OnceLock<WalError>,
}

/// Stops the log when a panic unwinds through it: its state may be inconsistent, and waiters must
/// not wait for ever.
struct StopOnPanic<'a> {
    shared: &'a Shared,
    /// A panic from elsewhere is unwinding this thread and drops a user of the log: it does not
    /// concern the log.
    unwinding: bool,
}

impl<'a> StopOnPanic<'a> {
    fn new(shared: &'a Shared) -> Self {
        Self { shared, unwinding: std::thread::panicking() }
    }
}

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if !self.unwinding && std::thread::panicking() {
            self.shared.stop(WalError::Panicked);
        }
    }
}

impl Marks {
    pub(crate) fn stopped(&self) -> Option<WalError> {
        self.stopped.get().cloned()
    }

    /// The count of moves at which a refused append may succeed.
    pub(crate) fn next_move(&self) -> u64 {
        self.moves.get().min(self.refused_at.load(Ordering::Acquire)) + 1
    }
}

struct State {
    ring: Ring,
    cursors: Cursors,
    window: WindowSize,
    /// The block to which records are appended.
    current: Option<Block>,
    /// Closed blocks that wait for an I/O slot, in order.
    sealed: VecDeque<Block>,
    /// Blocks in flight, in order; the first has number `first_flight`.
    flights: VecDeque<Flight>,
    first_flight: u64,
    /// The unfinished page at the end of the last cut block.
    tail: Tail,
    limiter: Option<Limiter>,
    /// The limiter need not be asked before this time.
    throttled_until: Duration,
    headers: Headers,
    resizing: Resizing,
    closing: bool,
    counters: Counters,
}

/// A record's payload, checked and summed.
struct Payload<'a> {
    head: &'a [&'a [u8]],
    body: &'a Bytes,
    len: u32,
    crc: u32,
    body_crc: u32,
}

struct Flight {
    /// End of the last whole record in the block.
    boundary: LogOffset,
    bytes: u64,
    /// Requests not completed yet: one, or two at the end of the ring.
    pending: usize,
    /// Whether the device has received all of its requests. Until then its completions leave
    /// further submissions to the submitting thread, so that the stack does not grow with the
    /// number of blocks where the device completes on that thread.
    handed_over: bool,
}

/// A block to be written, and the durable offset that its padding records.
struct BlockWrite {
    flight: u64,
    /// The ring at the time of its selection, which stays in use until the block is written.
    ring: Ring,
    block: Block,
    durable: LogOffset,
}

#[derive(Default)]
struct Counters {
    records: u64,
    payload_bytes: u64,
    device_bytes: u64,
    block_writes: u64,
    requests: u64,
    header_writes: u64,
    padding_bytes: u64,
    write_times: DurationHistogram,
    moves: u64,
}

/// Changes of the header. Each is written to both slots, one after the other, first to the one that
/// does not hold the newest header; it takes effect when both are durable, so that either slot
/// alone can be lost at any time.
struct Headers {
    newest: HeaderInfo,
    /// Slot that holds `newest`.
    slot: usize,
    writing: Writing,
    /// The trim offset of the next change.
    wanted: LogOffset,
    /// The user's mark of the next change.
    wanted_mark: u64,
    /// Whether a header shall record the durable offset, see [`Shared::persist_durable`].
    wants_durable: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Writing {
    Nothing,
    FirstSlot,
    SecondSlot,
    /// A single write that moves the durable offset and changes nothing else.
    Durable,
}

struct HeaderWrite {
    slot: usize,
    header: HeaderInfo,
}

/// The result of a header change.
#[derive(Clone, Copy)]
struct Effect {
    trimmed: LogOffset,
    mark: u64,
    /// Count of moves.
    moves: u64,
    /// Count of resizes.
    resizes: u64,
}

/// A recovered log, about to be opened.
pub(crate) struct Recovered {
    pub(crate) device: SharedDevice,
    pub(crate) options: Options,
    /// The header of this epoch, durable in both slots, and the slot with the greater generation.
    pub(crate) header: HeaderInfo,
    pub(crate) slot: usize,
    /// The bytes before `header.durable` on its page.
    pub(crate) tail: Vec<u8>,
}

impl Shared {
    pub(crate) fn start(recovered: Recovered) -> Result<Arc<Self>, WalError> {
        let Recovered { device, options, header, slot, tail } = recovered;
        let ring = header.ring();
        let limiter = Limiter::new(options.iops, options.bandwidth_bytes_per_second);
        let limited = limiter.is_some();
        let shared = Arc::new(Self {
            codec: Codec::new(header.wal_id),
            epoch: header.epoch,
            marks: Arc::new(Marks {
                durable: Watermark::new(header.durable.0),
                trimmed: Watermark::new(header.trim.0),
                mark: Watermark::new(header.mark),
                moves: Watermark::new(0),
                resizes: Watermark::new(0),
                refused_at: AtomicU64::new(u64::MAX),
                stopped: OnceLock::new(),
            }),
            alarm: OnceLock::new(),
            started: Instant::now(),
            state: Mutex::new(State {
                ring,
                cursors: Cursors::new(
                    header.trim,
                    header.durable,
                    ring.bytes(),
                    header.window_bytes,
                ),
                window: WindowSize::new(&options, header.window_bytes),
                current: None,
                sealed: VecDeque::new(),
                flights: VecDeque::new(),
                first_flight: 0,
                tail: Tail::new(&tail),
                limiter,
                throttled_until: Duration::ZERO,
                headers: Headers {
                    wanted: header.trim,
                    wanted_mark: header.mark,
                    newest: header,
                    wants_durable: false,
                    slot,
                    writing: Writing::Nothing,
                },
                resizing: Resizing::default(),
                closing: false,
                counters: Counters::default(),
            }),
            device,
            options,
        });
        if limited {
            let weak = Arc::downgrade(&shared);
            let pump = move || {
                if let Some(shared) = weak.upgrade() {
                    shared.pump();
                }
            };
            let alarm = Alarm::start(pump).map_err(|cause| WalError::Thread(Arc::new(cause)))?;
            drop(shared.alarm.set(alarm));
        }
        Ok(shared)
    }

    /// Stops the log: nothing is acknowledged after this. The first cause counts.
    pub(crate) fn stop(&self, cause: WalError) {
        if self.marks.stopped.set(cause).is_ok() {
            if let Some(alarm) = self.alarm.get() {
                alarm.stop();
            }
            let Marks { durable, trimmed, mark, moves, resizes, .. } = &*self.marks;
            for watermark in [durable, trimmed, mark, moves, resizes] {
                watermark.wake_all();
            }
        }
    }

    fn alarm(&self) -> &Alarm {
        self.alarm.get().expect("started with the limiter")
    }

    fn failed(&self, cause: DeviceError) {
        let cause = WalError::of(cause);
        tracing::error!("{cause}; nothing is acknowledged until the WAL is opened again");
        self.stop(cause);
    }

    // -- Appending

    /// Appends the record `head` and `body`.
    pub(crate) fn append(
        self: &Arc<Self>,
        head: &[&[u8]],
        body: &Bytes,
    ) -> Result<Placed, AppendError> {
        let payload = self.payload(head, body)?;
        self.with_open_state(|state| state.append(self, &payload))
    }

    /// Appends `records` in order, until one is refused. Adds the position of each to `placed`.
    pub(crate) fn append_batch(
        self: &Arc<Self>,
        records: &[Parts<'_>],
        placed: &mut Vec<Placed>,
    ) -> Result<(), AppendError> {
        let mut payloads = Vec::with_capacity(records.len());
        let mut valid = Ok(());
        for record in records {
            match self.payload(record.head, record.body) {
                Ok(payload) => payloads.push(payload),
                Err(invalid) => {
                    valid = Err(invalid);
                    break;
                }
            }
        }
        self.with_open_state(|state| {
            for payload in &payloads {
                placed.push(state.append(self, payload)?);
            }
            Ok(())
        })?;
        valid
    }

    /// Checks the length of a record and computes its checksums, outside the lock.
    fn payload<'a>(
        &self,
        head: &'a [&'a [u8]],
        body: &'a Bytes,
    ) -> Result<Payload<'a>, AppendError> {
        let head_bytes: u64 = head.iter().map(|piece| piece.len() as u64).sum();
        let len_bytes = head_bytes + body.len() as u64;
        let max_bytes = self.options.max_record_bytes;
        let len = match u32::try_from(len_bytes) {
            Ok(0) => return Err(AppendError::Empty),
            Ok(len) if len <= max_bytes => len,
            _ => return Err(AppendError::TooLarge { len_bytes, max_bytes }),
        };
        let head_crc = head.iter().fold(0, |crc, piece| crc32c::crc32c_append(crc, piece));
        let body_crc = crc32c::crc32c(body);
        let crc = crc32c_concat(head_crc, body_crc, len - head_bytes as u32);
        Ok(Payload { head, body, len, crc, body_crc })
    }

    /// Runs `append` on the state of a log that is open, and then submits what can be written.
    fn with_open_state<T>(
        self: &Arc<Self>,
        append: impl FnOnce(&mut State) -> Result<T, AppendError>,
    ) -> Result<T, AppendError> {
        let _guard = StopOnPanic::new(self);
        let mut state = self.state.lock();
        if let Some(cause) = self.marks.stopped.get() {
            return Err(match cause {
                WalError::Closed => AppendError::Closed,
                cause => AppendError::Failed(cause.clone()),
            });
        }
        if state.closing {
            return Err(AppendError::Closed);
        }
        let appended = append(&mut state);
        if appended.is_err() {
            self.marks.refused_at.store(state.counters.moves, Ordering::Release);
        }
        let write = state.next_write(self);
        let header = state.next_header();
        drop(state);
        self.submit(write);
        self.submit_header(header);
        appended
    }

    // -- Block writes

    /// Submits the blocks that can be written.
    fn pump(self: &Arc<Self>) {
        let _guard = StopOnPanic::new(self);
        let write = self.state.lock().next_write(self);
        self.submit(write);
    }

    /// Submits `write` and the blocks that can follow it.
    fn submit(self: &Arc<Self>, mut write: Option<BlockWrite>) {
        while let Some(BlockWrite { flight, ring, block, durable }) = write {
            let (base, buf) = block.into_write(&*self.device, self.codec, self.epoch, durable);
            let begun = Instant::now();
            for piece in ring.pieces(base, buf.len() as u64) {
                let shared = self.clone();
                let request =
                    Request::Write { at: piece.at, buf: buf.slice(piece.range), durable: true };
                self.device.submit(
                    request,
                    Box::new(move |result| {
                        shared.landed(flight, begun.elapsed(), result.map(drop));
                    }),
                );
            }
            let mut state = self.state.lock();
            state.handed_over(flight);
            write = state.next_write(self);
        }
    }

    /// Handles the completion of a request of block `flight`, `took` after its submission. On the
    /// engine's thread.
    fn landed(self: Arc<Self>, flight: u64, took: Duration, result: Result<(), DeviceError>) {
        if let Err(cause) = result {
            return self.failed(cause);
        }
        let guard = StopOnPanic::new(&self);
        let mut state = self.state.lock();
        if self.marks.stopped.get().is_some() {
            return;
        }
        let (moved, handed_over) = state.landed(flight, took);
        let write = if handed_over { state.next_write(&self) } else { None };
        drop(state);
        self.submit(write); // the device first, then the waiters
        drop(guard);
        let marks = self.marks.clone();
        drop(self);
        if let Some((durable, moves)) = moved {
            marks.durable.advance(durable.0);
            marks.moves.advance(moves);
        }
    }

    // -- Headers

    /// Requests a trim and a mark. They are done when the watermarks `trimmed` and `mark` reach
    /// them.
    pub(crate) fn trim(self: &Arc<Self>, to: LogOffset, mark: u64) -> Result<(), WalError> {
        let _guard = StopOnPanic::new(self);
        let mut state = self.state.lock();
        if let Some(cause) = self.marks.stopped() {
            return Err(cause);
        }
        if state.closing {
            return Err(WalError::Closed);
        }
        let durable = state.cursors.durable();
        if to > durable {
            return Err(WalError::TrimPastDurable { to, durable });
        }
        state.headers.wanted = state.headers.wanted.max(to);
        state.headers.wanted_mark = state.headers.wanted_mark.max(mark);
        let write = state.next_header();
        drop(state);
        self.submit_header(write);
        Ok(())
    }

    /// Requests a header with the durable offset, unless the newest one has it. There is no
    /// notification.
    pub(crate) fn persist_durable(self: &Arc<Self>) {
        let _guard = StopOnPanic::new(self);
        let mut state = self.state.lock();
        if state.closing || self.marks.stopped.get().is_some() {
            return;
        }
        state.headers.wants_durable = true;
        let write = state.next_header();
        drop(state);
        self.submit_header(write);
    }

    /// Writes a header, unless the log has been taken over.
    fn submit_header(self: &Arc<Self>, write: Option<HeaderWrite>) {
        if let Some(write) = write {
            self.check_slot(0, write);
        }
    }

    /// Checks `slot` and the following ones before `write`.
    fn check_slot(self: &Arc<Self>, slot: usize, write: HeaderWrite) {
        let buf = self.device.alloc(HEADER_SLOT_BYTES as usize);
        let shared = self.clone();
        let checked = move |result: Result<Option<AlignedBuf>, DeviceError>| {
            let _guard = StopOnPanic::new(&shared);
            if shared.marks.stopped.get().is_some() {
                return;
            }
            // An unreadable slot is no evidence of a takeover.
            let found = result.ok().flatten().map(|page| header::decode(&page));
            if let Some(cause) = found.and_then(|found| write.header.taken_over(&found)) {
                return shared.taken_over(cause);
            }
            match slot {
                0 => shared.check_slot(1, write),
                _ => shared.write_header(write),
            }
        };
        self.device.submit(Request::Read { at: HEADER_SLOT_AT[slot], buf }, Box::new(checked));
    }

    fn taken_over(&self, cause: WalError) {
        tracing::error!("{cause}; the WAL has stopped");
        self.stop(cause);
    }

    fn write_header(self: &Arc<Self>, HeaderWrite { slot, header }: HeaderWrite) {
        let page = header.page(&*self.device);
        let request = Request::Write { at: HEADER_SLOT_AT[slot], buf: page, durable: true };
        let shared = self.clone();
        let done = move |result: Result<_, DeviceError>| match result {
            Ok(_) => shared.header_landed(slot, header),
            Err(cause) => shared.failed(cause),
        };
        self.device.submit(request, Box::new(done));
    }

    /// Handles the completion of `header` in `slot`. On the engine's thread.
    fn header_landed(self: Arc<Self>, slot: usize, header: HeaderInfo) {
        let guard = StopOnPanic::new(&self);
        let mut state = self.state.lock();
        if self.marks.stopped.get().is_some() {
            return;
        }
        let (header, effect) = state.header_landed(slot, header);
        let write = effect.and_then(|_| state.next_write(&self)); // a resize holds them back
        drop(state);
        self.submit_header(header);
        self.submit(write);
        drop(guard);
        let marks = self.marks.clone();
        drop(self);
        if let Some(Effect { trimmed, mark, moves, resizes }) = effect {
            marks.trimmed.advance(trimmed.0);
            marks.mark.advance(mark);
            marks.moves.advance(moves);
            marks.resizes.advance(resizes);
        }
    }

    // -- Closing and inspection

    /// Refuses further requests and waits for the earlier ones; then writes the clean header.
    /// Blocks.
    pub(crate) fn close(self: &Arc<Self>) -> Result<(), WalError> {
        let _guard = StopOnPanic::new(self);
        let (end, wanted, wanted_mark) = {
            let mut state = self.state.lock();
            // Even if nothing is outstanding: a clean header must not vouch for a log that has
            // failed.
            if let Some(cause) = self.marks.stopped() {
                return Err(cause);
            }
            if state.closing {
                return Err(WalError::Closed);
            }
            state.closing = true;
            state.resizing.withdraw();
            (state.cursors.appended(), state.headers.wanted, state.headers.wanted_mark)
        };
        crate::wait::block_on(Wait::new(DurableOf(self.marks.clone()), end.0))?;
        crate::wait::block_on(Wait::new(TrimmedOf(self.marks.clone()), wanted.0))?;
        crate::wait::block_on(Wait::new(MarkOf(self.marks.clone()), wanted_mark))?;
        let (slot, header) = loop {
            let state = self.state.lock();
            if state.headers.writing != Writing::Nothing {
                // A change for the window or the ring; it ends with a move.
                let next_move = state.counters.moves + 1;
                drop(state);
                crate::wait::block_on(Wait::new(MovesOf(self.marks.clone()), next_move))?;
                continue;
            }
            let newest = &state.headers.newest;
            // The end of the log: `end`, or that of a padding after it.
            let durable = state.cursors.durable();
            break (
                1 - state.headers.slot,
                HeaderInfo { durable, clean_shutdown: true, ..newest.next() },
            );
        };
        if let Err(cause) = header::check_slots(&*self.device, &header) {
            self.taken_over(cause.clone());
            return Err(cause);
        }
        // Where the device is trusted, writes carry no flush; request one here nevertheless.
        let closed = self
            .device
            .flush()
            .and_then(|()| {
                self.device.write_durable(HEADER_SLOT_AT[slot], header.page(&*self.device))
            })
            .and_then(|()| self.device.flush());
        match closed {
            Ok(()) => {
                self.stop(WalError::Closed);
                Ok(())
            }
            Err(cause) => {
                self.failed(cause.clone());
                Err(WalError::of(cause))
            }
        }
    }

    /// Implements [`Wal::verify_owner`](crate::Wal::verify_owner). Blocks.
    pub(crate) fn verify_owner(&self) -> Result<(), WalError> {
        if let Some(cause) = self.marks.stopped() {
            return Err(cause);
        }
        let slots = [0, 1].map(|slot| header::read_slot(&*self.device, slot));
        // Read after the slots: if a slot held a header of this writer, its write had begun by
        // then.
        let not_begun = {
            let state = self.state.lock();
            let Headers { newest, writing, .. } = &state.headers;
            let is_begun = *writing != Writing::Nothing || state.closing;
            if is_begun { newest.next().next() } else { newest.next() }
        };
        let found = slots.iter().flatten();
        if let Some(cause) = found.filter_map(|found| not_begun.taken_over(found)).next() {
            self.taken_over(cause.clone());
            return Err(cause);
        }
        match slots {
            [Err(cause), Err(_)] => Err(WalError::Device(cause)),
            _ => Ok(()),
        }
    }

    pub(crate) fn appended(&self) -> LogOffset {
        self.state.lock().cursors.appended()
    }

    pub(crate) fn header(&self) -> HeaderInfo {
        self.state.lock().headers.newest.clone()
    }

    pub(crate) fn stats(&self) -> Stats {
        let state = self.state.lock();
        let (cursors, counters) = (&state.cursors, &state.counters);
        let flushes = self.device.geometry().flushes;
        let (resize_to_bytes, resize_distance_bytes) = state.resize_pending();
        Stats {
            ring_bytes: state.ring.bytes(),
            used_bytes: cursors.appended().0 - cursors.trim().0,
            window_bytes: cursors.window_bytes(),
            window_used_bytes: cursors.outstanding_bytes(),
            in_flight: state.flights.len(),
            sealed_blocks: state.sealed.len(),
            trimmed: cursors.trim(),
            durable: cursors.durable(),
            appended: cursors.appended(),
            records: counters.records,
            payload_bytes: counters.payload_bytes,
            device_bytes: counters.device_bytes,
            block_writes: counters.block_writes,
            flushed_writes: if flushes { counters.requests + counters.header_writes } else { 0 },
            header_writes: counters.header_writes,
            padding_bytes: counters.padding_bytes,
            write_times: counters.write_times,
            resize_to_bytes,
            resize_distance_bytes,
            failed: self.marks.stopped.get().is_some_and(|it| !matches!(it, WalError::Closed)),
        }
    }
}

impl State {
    /// The first write of a header change, or the single write of the durable offset, if one is
    /// wanted and none is in flight.
    fn next_header(&mut self) -> Option<HeaderWrite> {
        if self.headers.writing != Writing::Nothing {
            return None;
        }
        let ring = self.begin_resize();
        let headers = &mut self.headers;
        let wanted = headers.wanted > headers.newest.trim
            || headers.wanted_mark > headers.newest.mark
            || self.window.wants_change();
        if ring.is_none() && !wanted {
            return self.next_durable_header();
        }
        headers.wants_durable = false; // this header carries it too
        headers.writing = Writing::FirstSlot;
        if let Some(limiter) = &mut self.limiter {
            // A header is written without delay, twice, each time after a check of both slots.
            limiter.charge_undelayed(6, HEADER_SLOT_BYTES);
        }
        let ring = ring.unwrap_or(self.ring);
        let header = HeaderInfo {
            capacity_bytes: ring.capacity_bytes(),
            origin_bytes: ring.origin_bytes(),
            trim: headers.wanted,
            mark: headers.wanted_mark,
            window_bytes: self.window.begin_change(&self.cursors),
            durable: self.cursors.durable(),
            ..headers.newest.next()
        };
        Some(HeaderWrite { slot: 1 - headers.slot, header })
    }

    /// The single write of a header that moves the durable offset. The slot with the newest header
    /// stays as it is, and no space is reused because of this write, so either slot alone can be
    /// lost, as after a change.
    fn next_durable_header(&mut self) -> Option<HeaderWrite> {
        let headers = &mut self.headers;
        let durable = self.cursors.durable();
        if !std::mem::take(&mut headers.wants_durable) || durable == headers.newest.durable {
            return None;
        }
        headers.writing = Writing::Durable;
        if let Some(limiter) = &mut self.limiter {
            limiter.charge_undelayed(3, HEADER_SLOT_BYTES);
        }
        let header = HeaderInfo { durable, ..headers.newest.next() };
        Some(HeaderWrite { slot: 1 - headers.slot, header })
    }

    /// Records that `header` is durable in `slot`. Returns the next header write and, if the change
    /// has taken effect, its result.
    fn header_landed(
        &mut self,
        slot: usize,
        header: HeaderInfo,
    ) -> (Option<HeaderWrite>, Option<Effect>) {
        let headers = &mut self.headers;
        assert_eq!(slot, 1 - headers.slot, "the newest header was overwritten");
        self.counters.header_writes += 1;
        headers.slot = slot;
        headers.newest = header;
        match headers.writing {
            Writing::Nothing => unreachable!("no header was in flight"),
            Writing::FirstSlot => {
                headers.writing = Writing::SecondSlot;
                (Some(HeaderWrite { slot: 1 - slot, header: headers.newest.next() }), None)
            }
            Writing::SecondSlot | Writing::Durable => {
                let is_change = headers.writing == Writing::SecondSlot;
                headers.writing = Writing::Nothing;
                let (trimmed, mark) = (headers.newest.trim, headers.newest.mark);
                let mut resizes = self.resizing.over();
                if is_change {
                    self.cursors.trim_to(trimmed);
                    self.window.changed(&mut self.cursors, headers.newest.window_bytes);
                    resizes = self.resized();
                }
                // For a single write too: a close that finds it in flight waits for this.
                self.counters.moves += 1;
                let effect = Effect { trimmed, mark, moves: self.counters.moves, resizes };
                (self.next_header(), Some(effect))
            }
        }
    }
}

// One type per watermark, so that a future's type states what it waits for.

pub(crate) struct DurableOf(pub(crate) Arc<Marks>);
pub(crate) struct TrimmedOf(pub(crate) Arc<Marks>);
pub(crate) struct MarkOf(pub(crate) Arc<Marks>);
pub(crate) struct MovesOf(pub(crate) Arc<Marks>);
pub(crate) struct ResizesOf(pub(crate) Arc<Marks>);

macro_rules! sources {
    ($($source:ident: $watermark:ident,)*) => {$(
        impl Source for $source {
            type Error = WalError;
            fn watermark(&self) -> &Watermark {
                &self.0.$watermark
            }
            fn failure(&self) -> Option<WalError> {
                self.0.stopped()
            }
        }
    )*};
}

sources! {
    DurableOf: durable,
    TrimmedOf: trimmed,
    MarkOf: mark,
    ResizesOf: resizes,
    MovesOf: moves,
}
