//! The public interface: formatting, opening, the handle, and its futures.

use std::fmt;
use std::future::Future;
use std::ops::RangeTo;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use alluvium_device::SharedDevice;
use bytes::Bytes;
use uuid::Uuid;

use crate::batch::{Parts, Placed};
use crate::layout::LogOffset;
use crate::recovery::{self, Found};
use crate::report::{HeaderInfo, Inspection, Record, RecoveryReport};
use crate::wait::{Wait, block_on};
use crate::writer::{
    DurableOf, MarkOf, Marks, MovesOf, Outcome, Recovered, ResizesOf, Shared, TrimmedOf,
};
use crate::{
    AppendError, FormatOptions, OpenError, Options, Progress, ResizeError, Stats, VisitError,
    WalError, format, header, resize,
};

/// An open write-ahead log. Clones are handles to the same log.
///
/// When the last handle is dropped without [`Wal::close`], the log stops as in a crash: requests in
/// flight complete, nothing more is written, waiters get [`WalError::Closed`], and the next open
/// recovers.
#[derive(Clone)]
pub struct Wal {
    handle: Arc<Handle>,
}

/// Stops the log when the last [`Wal`] is dropped, while requests in flight may keep `shared`
/// alive.
struct Handle {
    shared: Arc<Shared>,
    wal_id: Uuid,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.stop(WalError::Closed);
    }
}

impl fmt::Debug for Wal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Wal({} on {})", self.handle.wal_id, self.handle.shared.device.geometry().name)
    }
}

impl Wal {
    /// Formats the device with an empty WAL.
    ///
    /// Refuses ([`OpenError::Occupied`]) if the first 1 MiB or the last 128 KiB of the device hold
    /// anything but zeros, naming what it recognises, unless [`FormatOptions::force`] is set. Old
    /// records can never come back: the new WAL has its own id. A crash during formatting leaves
    /// the old WAL, none, or the new one.
    ///
    /// # Errors
    /// An invalid capacity or window ([`OpenError::InvalidOption`],
    /// [`OpenError::LargerThanDevice`]), or [`OpenError::Occupied`]; in these cases nothing is
    /// written. [`OpenError::Device`] leaves the same state as a crash.
    pub fn format(device: &SharedDevice, options: &FormatOptions) -> Result<HeaderInfo, OpenError> {
        format::format(&**device, options)
    }

    /// Recovers the log, then opens it for traffic. Blocks; call it outside completions and async
    /// tasks.
    ///
    /// There must be no other writer on `device`. Requests of a dropped [`Wal`] may still be in
    /// flight: open the device anew, which is refused as long as there are any, or reuse a device
    /// handle only after [`Wal::close`].
    ///
    /// `visit` receives every record in log order. It must not assume that the log can be opened
    /// until this returns, but a record that it has received stays in the log until it is trimmed,
    /// whatever happens. If it fails, the log is not opened. Nothing is written before the walk has
    /// succeeded. Damage to acknowledged data does not fail the opening: it is listed in the
    /// report, and `visit` receives the records around it.
    ///
    /// `progress` is called with the bytes walked and the bytes known to exist.
    ///
    /// # Errors
    /// Options that do not fit the ring ([`OpenError::InvalidOption`]); a mark that is not greater
    /// than the log's ([`OpenError::MarkNotAhead`]); no log, or none that can be trusted; a log
    /// whose end cannot be read ([`OpenError::EndUnreadable`]); an error of `visit`; another writer
    /// that opens the log at the same time ([`OpenError::Fenced`]); a device that cannot be
    /// reserved ([`OpenError::Reserve`]); an error of the device.
    pub fn open(
        device: SharedDevice,
        options: &Options,
        progress: Option<Progress>,
        visit: &mut dyn FnMut(Record) -> Result<(), VisitError>,
    ) -> Result<(Self, RecoveryReport), OpenError> {
        let read_header = || {
            let Inspection { header, newest, ring_bytes, .. } = header::inspect(&*device)?;
            options.check(ring_bytes)?;
            if let Some(given) = options.mark.filter(|given| *given <= header.mark) {
                let (device, found) = (device.geometry().name.clone(), header.mark);
                return Err(OpenError::MarkNotAhead { device, found, given });
            }
            Ok::<_, OpenError>((header::next_epoch(&header)?, header, newest))
        };
        let mut current = read_header()?;
        if options.reserve {
            device.reserve()?;
            let name = &device.geometry().name;
            tracing::info!("{name}: reserved for this host; other hosts cannot write to it");
            // From here on there is no other writer; headers read earlier may have changed since.
            current = read_header()?;
        }
        let (epoch, found, slot) = current;
        // A readable record may be only in a volatile cache, left by a process that was killed. It
        // must not be lost after it has been handed out.
        device.flush()?;
        let Found { mut report, tail } = recovery::walk(&*device, &found, progress, visit)?;
        let first = HeaderInfo {
            window_bytes: options.initial_window_bytes(),
            epoch,
            node_id: options.node_id,
            epoch_start: report.end,
            durable: report.end,
            clean_shutdown: false,
            mark: options.mark.unwrap_or(found.mark),
            ..found.next()
        };
        let second = header::change(&*device, &found, slot, &first)?;
        report.epoch = epoch;
        let wal_id = second.wal_id;
        let shared = Shared::start(Recovered {
            device,
            options: options.clone(),
            header: second,
            slot,
            tail,
        })
        .map_err(|cause| OpenError::Thread(cause.to_string()))?;
        Ok((Self { handle: Arc::new(Handle { shared, wal_id }) }, report))
    }

    /// Walks the log as [`Wal::open`] does without writing anything. Works on a read-only device.
    ///
    /// Without the flush of an opening, the records seen may still be lost in a power cut. On a log
    /// that is being written, the end is wherever the walk meets it.
    ///
    /// # Errors
    /// The errors of [`Wal::open`] that reading can cause.
    pub fn scan(
        device: &SharedDevice,
        progress: Option<Progress>,
        visit: &mut dyn FnMut(Record) -> Result<(), VisitError>,
    ) -> Result<RecoveryReport, OpenError> {
        let inspection = header::inspect(&**device)?;
        Ok(recovery::walk(&**device, &inspection.header, progress, visit)?.report)
    }

    /// Changes the capacity, in bytes, of a log that is not open: a multiple of 4 KiB, at least 192
    /// KiB, at most the device. Blocks.
    ///
    /// Walks the log first, and moves records if necessary ([`OpenError::ResizeBlocked`] if that is
    /// impossible); nothing is lost, and a crash at any moment leaves the old capacity or the new
    /// one. A log that has never been opened keeps epoch 0. A smaller ring may reduce the window.
    /// The device's own size does not change: extend a file before growing the log.
    pub fn resize(
        device: &SharedDevice,
        capacity_bytes: u64,
        progress: Option<Progress>,
    ) -> Result<HeaderInfo, OpenError> {
        resize::resize(device, capacity_bytes, progress)
    }

    /// Reads both header slots and determines the valid one. Writes nothing.
    ///
    /// # Errors
    /// No slot is valid: the device is empty ([`OpenError::NotFormatted`]), or holds something
    /// else, a later version, damage, or two headers that contradict each other. The header states
    /// a capacity larger than the device. An error of the device.
    pub fn inspect(device: &SharedDevice) -> Result<Inspection, OpenError> {
        header::inspect(&**device)
    }

    /// The identity of the log, fixed when it was formatted.
    pub fn id(&self) -> Uuid {
        self.handle.wal_id
    }

    /// The newest header.
    pub fn header(&self) -> HeaderInfo {
        self.handle.shared.header()
    }

    /// Appends a record, the concatenation of `parts`. Copies it; never waits for I/O.
    ///
    /// The record's position is final when this returns; the future resolves when the record, and
    /// everything before it, is on stable storage. The record is written whether or not the future
    /// is polled. On an error nothing has changed.
    ///
    /// # Errors
    /// The ring is full until a trim ([`AppendError::OverCapacity`]), or the window until more is
    /// durable ([`AppendError::WindowFull`]): [`Wal::wait_space`] waits for either. The record is
    /// empty or larger than [`Options::max_record_bytes`]. The WAL has failed or is closed.
    pub fn append(&self, parts: &[&[u8]]) -> Result<Append, AppendError> {
        self.append_shared(parts, &Bytes::new())
    }

    /// Appends a record, the concatenation of `head` and `body`; [`Append::body_crc32c`] returns
    /// the checksum of `body`. A body of at least 32 KiB is not copied at once: until it is sent to
    /// the device, the log holds a reference to it, and thereby to the whole allocation that it
    /// belongs to.
    ///
    /// # Errors
    /// Those of [`Wal::append`].
    pub fn append_shared(&self, head: &[&[u8]], body: &Bytes) -> Result<Append, AppendError> {
        let Placed { offset, end, body_crc32c } = self.handle.shared.append(head, body)?;
        Ok(Append {
            offset,
            body_crc32c,
            wait: Wait::new(DurableOf(self.handle.shared.marks.clone()), end.0),
        })
    }

    /// Appends `records` in order under one lock, until one is refused, and adds the position of
    /// each appended record to `placed`. [`Wal::wait_durable`] of the last end waits for all.
    ///
    /// The next block is chosen after the last record, so that an idle log writes a batch that fits
    /// a block with one flush. Single appends write the first record at once, and the others only
    /// when that write has completed.
    ///
    /// # Errors
    /// Those of [`Wal::append`], for record number `placed.len()` (if `placed` was empty). The
    /// records before it are appended, it and the ones after it are not.
    pub fn append_batch(
        &self,
        records: &[Parts<'_>],
        placed: &mut Vec<Placed>,
    ) -> Result<(), AppendError> {
        self.handle.shared.append_batch(records, placed)
    }

    /// The durable offset: everything before it is on stable storage. One atomic load.
    pub fn durable(&self) -> LogOffset {
        LogOffset(self.handle.shared.marks.durable.get())
    }

    /// The current end of the log. The next record starts here or, if it begins a new block, after
    /// a padding.
    pub fn appended(&self) -> LogOffset {
        self.handle.shared.appended()
    }

    /// Resolves when everything before `offset` is durable. `offset` may be ahead of the end of the
    /// log.
    pub fn wait_durable(&self, offset: LogOffset) -> Durable {
        Durable { wait: Wait::new(DurableOf(self.handle.shared.marks.clone()), offset.0) }
    }

    /// Resolves when an append that was refused for lack of space may succeed: the durable or trim
    /// offset has moved since the last refusal (or, if there was none, since this call), or the WAL
    /// has stopped. With several writers, create it before an append that may be refused, so that
    /// no move is missed; it costs nothing until it is polled.
    pub fn wait_space(&self) -> Space {
        let marks = &self.handle.shared.marks;
        Space { wait: Wait::new(MovesOf(marks.clone()), marks.next_move()) }
    }

    /// Trims everything before `to.end`, which must be the start or the end of a record and
    /// durable. The future resolves when the trim is on stable storage; only then is the space
    /// reused. A trim behind an earlier one changes nothing.
    ///
    /// Trims take effect whether or not the future is polled. While one is being written, later
    /// ones coalesce.
    ///
    /// # Errors
    /// The future fails with [`WalError::TrimPastDurable`], or with the cause that stopped the WAL.
    /// It is not checked that `to.end` is the start or the end of a record; if it is not, the next
    /// opening reports damage.
    pub fn trim(&self, to: RangeTo<LogOffset>) -> Trim {
        self.change(to.end, 0)
    }

    /// Trims as [`Wal::trim`] does and raises the mark as [`Wal::set_mark`] does, in one change of
    /// the header: at no moment is the log trimmed and has the old mark. The future resolves when
    /// both are on stable storage.
    ///
    /// # Errors
    /// Those of [`Wal::trim`]. If the trim is refused, the mark is not raised either.
    pub fn trim_and_mark(&self, to: RangeTo<LogOffset>, mark: u64) -> Trim {
        self.change(to.end, mark)
    }

    /// Raises the log's mark to `mark`, unless it is already that high. The mark is a number that
    /// the log keeps for its user in every header, and that never decreases. A user that keeps
    /// other data beside the log can tell from it which of the two is older ([`Options::mark`]).
    /// The future resolves when both headers have it, so that either header alone can be lost.
    ///
    /// It takes effect whether or not the future is polled. While one is being written, later ones
    /// coalesce.
    ///
    /// # Errors
    /// The future fails with the cause that stopped the WAL.
    pub fn set_mark(&self, mark: u64) -> Trim {
        self.change(LogOffset(0), mark)
    }

    fn change(&self, to: LogOffset, mark: u64) -> Trim {
        let shared = &self.handle.shared;
        let marks = || shared.marks.clone();
        let waits = |()| (Wait::new(TrimmedOf(marks()), to.0), Wait::new(MarkOf(marks()), mark));
        Trim { wait: shared.trim(to, mark).map(waits) }
    }

    /// The mark that both headers have; see [`Wal::set_mark`]. One atomic load.
    pub fn mark(&self) -> u64 {
        self.handle.shared.marks.mark.get()
    }

    /// Writes the durable offset to a header, unless the newest header has it: one write, preceded
    /// by a check of both slots. To be called when the log becomes idle. From then on the next
    /// opening knows that everything before [`Wal::durable`] was durable, and reports damage at the
    /// very end of the log as damage instead of treating it as a torn write. Does not wait, and has
    /// no effect once the WAL has stopped.
    pub fn persist_durable(&self) {
        self.handle.shared.persist_durable();
    }

    /// Verifies that this is still the log's writer, as before each change of the header. Call it
    /// before an action outside the log that only its owner may take. Blocks; call it outside
    /// completions and async tasks. The answer holds for the moment at which the slots were read;
    /// only a reserved device ([`Options::reserve`]) guarantees more.
    ///
    /// # Errors
    /// [`WalError::Fenced`], which stops the WAL; the cause that stopped it before;
    /// [`WalError::Device`] if neither slot can be read, which changes nothing.
    pub fn verify_owner(&self) -> Result<(), WalError> {
        self.handle.shared.verify_owner()
    }

    /// Requests another capacity, in bytes, for the log while it is in use: a multiple of 4 KiB, at
    /// least 192 KiB, at most [`Device::capacity_bytes`](alluvium_device::Device::capacity_bytes),
    /// and such that [`Options::window_bytes`] is at most half of the new ring.
    ///
    /// Nothing is moved: the resize takes effect when the untrimmed records have the same positions
    /// in both rings, which is at once, or when the trim offset next reaches the end of the ring,
    /// or the time after ([`Stats::resize_distance_bytes`]). Until then a log that is to shrink
    /// keeps to the bound of the smaller ring ([`AppendError::OverCapacity`]). Blocks then wait for
    /// the time of two header writes; appends are accepted.
    ///
    /// Only the last request counts, and one for the current capacity withdraws it. A request is
    /// forgotten if the log is closed or the process ends before it has taken effect. The device's
    /// own size does not change: enlarge it before, or reduce it afterwards.
    ///
    /// # Errors
    /// The capacity is invalid, or the WAL has stopped. Nothing has changed.
    pub fn request_resize(&self, capacity_bytes: u64) -> Result<Resizing, ResizeError> {
        let shared = &self.handle.shared;
        let outcome = shared.request_resize(capacity_bytes)?;
        Ok(Resizing { capacity_bytes, outcome, marks: shared.marks.clone(), wait: None })
    }

    /// A snapshot of the log's statistics.
    pub fn stats(&self) -> Stats {
        self.handle.shared.stats()
    }

    /// Why the WAL has stopped: it has failed or is closed. `None` while it works.
    pub fn stopped(&self) -> Option<WalError> {
        self.handle.shared.marks.stopped()
    }

    /// Closes the log: refuses new appends and trims on all handles, waits until everything
    /// appended is durable, and writes the clean header, from which the next open knows where the
    /// log ends. Blocks; call it outside completions and async tasks.
    ///
    /// # Errors
    /// The WAL has failed, before or meanwhile; as after a crash, the next opening finds everything
    /// acknowledged. Or it was closed before.
    pub fn close(self) -> Result<(), WalError> {
        self.handle.shared.close()
    }
}

/// A record's position, and the future that resolves when the record and everything before it is
/// durable. It works on any runtime. Dropping it does not affect the record.
///
/// An error means that the WAL stopped before that: the record may or may not be found by the next
/// opening.
#[must_use = "the record is not durable before this resolves"]
pub struct Append {
    offset: LogOffset,
    body_crc32c: u32,
    /// Waits for the record's end.
    wait: Wait<DurableOf>,
}

impl Append {
    /// The start of the record.
    pub fn offset(&self) -> LogOffset {
        self.offset
    }

    /// The end of the record.
    pub fn end(&self) -> LogOffset {
        LogOffset(self.wait.target())
    }

    /// CRC-32C of the record's body ([`Wal::append_shared`]), of 0 bytes if it has none. It saves
    /// reading the body again when it is also written elsewhere.
    pub fn body_crc32c(&self) -> u32 {
        self.body_crc32c
    }

    /// Blocks the thread until the record is durable.
    pub fn wait(self) -> Result<(), WalError> {
        block_on(self)
    }
}

impl Future for Append {
    type Output = Result<(), WalError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.wait).poll(cx)
    }
}

impl fmt::Debug for Append {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Append({}..{})", self.offset, self.end())
    }
}

/// The future of [`Wal::wait_durable`]. An error means that the WAL stopped first.
#[must_use = "it does nothing unless it is polled"]
pub struct Durable {
    wait: Wait<DurableOf>,
}

impl Durable {
    /// Blocks the thread until it resolves.
    pub fn wait(self) -> Result<(), WalError> {
        block_on(self)
    }
}

impl Future for Durable {
    type Output = Result<(), WalError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.wait).poll(cx)
    }
}

impl fmt::Debug for Durable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Durable(..{})", self.wait.target())
    }
}

/// The future of [`Wal::wait_space`].
#[must_use = "it does nothing unless it is polled"]
pub struct Space {
    wait: Wait<MovesOf>,
}

impl Space {
    /// Blocks the thread until it resolves.
    pub fn wait(self) {
        block_on(self);
    }
}

impl Future for Space {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // If the WAL has stopped, the next append returns the error.
        Pin::new(&mut self.wait).poll(cx).map(drop)
    }
}

impl fmt::Debug for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Space(move {})", self.wait.target())
    }
}

/// The future of [`Wal::trim`], [`Wal::trim_and_mark`] and [`Wal::set_mark`]. If the WAL has
/// stopped, the change may or may not have taken effect.
#[must_use = "the change is not durable before this resolves"]
pub struct Trim {
    wait: Result<(Wait<TrimmedOf>, Wait<MarkOf>), WalError>,
}

impl Trim {
    /// Blocks the thread until it resolves.
    pub fn wait(self) -> Result<(), WalError> {
        block_on(self)
    }
}

impl Future for Trim {
    type Output = Result<(), WalError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.wait {
            Ok((trimmed, mark)) => match Pin::new(trimmed).poll(cx) {
                Poll::Ready(Ok(())) => Pin::new(mark).poll(cx),
                other => other,
            },
            Err(refused) => Poll::Ready(Err(refused.clone())),
        }
    }
}

impl fmt::Debug for Trim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.wait {
            Ok((trimmed, mark)) => {
                write!(f, "Trim(..{}, mark {})", trimmed.target(), mark.target())
            }
            Err(refused) => write!(f, "Trim({refused})"),
        }
    }
}

/// The future of [`Wal::request_resize`]. Dropping it does not affect the request.
#[must_use = "the log keeps its capacity until this resolves"]
pub struct Resizing {
    capacity_bytes: u64,
    outcome: Outcome,
    marks: Arc<Marks>,
    wait: Option<Wait<ResizesOf>>,
}

impl Resizing {
    /// Blocks the thread until it resolves.
    pub fn wait(self) -> Result<HeaderInfo, ResizeError> {
        block_on(self)
    }
}

impl Future for Resizing {
    type Output = Result<HeaderInfo, ResizeError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            // The outcome is set before it is counted; checked in the opposite order here, no
            // outcome is missed.
            let Self { marks, outcome, wait, .. } = &mut *self;
            let next = || Wait::new(ResizesOf(marks.clone()), marks.resizes.get() + 1);
            let wait = wait.get_or_insert_with(next);
            if let Some(outcome) = outcome.get() {
                return Poll::Ready(outcome.clone());
            }
            match Pin::new(wait).poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(())) => self.wait = None,
                Poll::Ready(Err(stopped)) => {
                    let failed = Err(ResizeError::Failed(stopped));
                    return Poll::Ready(self.outcome.get().cloned().unwrap_or(failed));
                }
            }
        }
    }
}

impl fmt::Debug for Resizing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Resizing(to {} bytes)", self.capacity_bytes)
    }
}
