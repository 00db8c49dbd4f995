//! The interface: opening, the handle, and the futures.

use std::fmt;
use std::future::Future;
use std::ops::RangeTo;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use alluvium_device::SharedDevice;
use bytes::Bytes;
use uuid::Uuid;

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

/// An open write-ahead log. Clones are handles to the same one.
///
/// When the last handle is dropped without [`Wal::close`], the log stops as in a crash: what is in
/// flight completes, nothing more is written, those who wait get [`WalError::Closed`], and the next
/// open recovers.
#[derive(Clone)]
pub struct Wal {
    handle: Arc<Handle>,
}

/// Its drop is the end of the last [`Wal`], while requests in flight may keep `shared` alive.
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
    /// Make an empty WAL on the device.
    ///
    /// Refuses ([`OpenError::Occupied`]) where the first 1 MiB or the last 128 KiB of the device
    /// hold anything but zeros, and says what it looks like, unless [`FormatOptions::force`] is
    /// set. Old records can never come back: the new WAL has an id of its own. A crash in the
    /// middle leaves the old WAL, none, or the new one.
    ///
    /// # Errors
    /// A capacity or a window out of its range ([`OpenError::InvalidOption`],
    /// [`OpenError::LargerThanDevice`]), and
    /// [`OpenError::Occupied`]: nothing is written. [`OpenError::Device`] leaves what a crash leaves.
    pub fn format(device: &SharedDevice, options: &FormatOptions) -> Result<HeaderInfo, OpenError> {
        format::format(&**device, options)
    }

    /// Recover the log, then open it for traffic. Blocks; call it outside of completions and async
    /// tasks.
    ///
    /// Nothing else may be writing to `device`. After a [`Wal`] was dropped, its requests in flight
    /// may be: open the device anew, which is refused as long as there are any, or keep a handle
    /// for this only after [`Wal::close`].
    ///
    /// `visit` gets every record in log order. It must not assume that the log can be opened until
    /// this returns, but what it has seen stays in the log until it is trimmed, whatever happens.
    /// If it fails, the log is not opened. Nothing is written before the walk has succeeded. Damage
    /// in what was acknowledged does not fail the opening: it is listed in the report, and the
    /// records around it are handed out.
    ///
    /// `progress` is told the bytes walked and the bytes that are known to be there.
    ///
    /// # Errors
    /// Options that do not fit the ring ([`OpenError::InvalidOption`]); a mark that is not ahead of
    /// the log's ([`OpenError::MarkNotAhead`]); no log, or none that can be trusted; a log whose
    /// end cannot be read ([`OpenError::EndUnreadable`]); an error of `visit`; another writer that
    /// is opening it too ([`OpenError::Fenced`]); a device that cannot be reserved
    /// ([`OpenError::Reserve`]); an error of the device.
    pub fn open(
        device: SharedDevice,
        options: &Options,
        progress: Option<Progress>,
        visit: &mut dyn FnMut(Record) -> Result<(), VisitError>,
    ) -> Result<(Self, RecoveryReport), OpenError> {
        let look = || {
            let Inspection { header, newest, ring_bytes, .. } = header::inspect(&*device)?;
            options.check(ring_bytes)?;
            if let Some(given) = options.mark.filter(|given| *given <= header.mark) {
                let (device, found) = (device.geometry().name.clone(), header.mark);
                return Err(OpenError::MarkNotAhead { device, found, given });
            }
            Ok::<_, OpenError>((header::next_epoch(&header)?, header, newest))
        };
        let mut looked = look()?;
        if options.reserve {
            device.reserve()?;
            let name = &device.geometry().name;
            tracing::info!("{name}: reserved for this host: writes of others are refused");
            // Only from here on nobody else writes: what was read before may have been changed
            // since.
            looked = look()?;
        }
        let (epoch, found, slot) = looked;
        // A record that can be read may be in a volatile cache only, left there by a process that
        // was killed. It must not be lost after it has been handed out.
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

    /// The walk of [`Wal::open`] without writing anything, also on a device that was opened for
    /// reading only.
    ///
    /// Without the flush of an opening, what is seen may still be lost to a power cut. On a log
    /// that somebody is writing to, the end is wherever the walk meets it.
    ///
    /// # Errors
    /// Those of [`Wal::open`] that reading can have.
    pub fn scan(
        device: &SharedDevice,
        progress: Option<Progress>,
        visit: &mut dyn FnMut(Record) -> Result<(), VisitError>,
    ) -> Result<RecoveryReport, OpenError> {
        let inspection = header::inspect(&**device)?;
        Ok(recovery::walk(&**device, &inspection.header, progress, visit)?.report)
    }

    /// Give a log that nobody has open another capacity, in bytes: a multiple of 4 KiB, at least
    /// 192 KiB, at most the device. Blocks.
    ///
    /// Walks the log first, and moves what has to be moved ([`OpenError::ResizeBlocked`] if that
    /// cannot be done); nothing is lost, and a crash at any moment leaves the old capacity or the
    /// new one. A log that nobody has opened stays one, of epoch 0. A smaller ring may have a
    /// smaller window. Does not change the device's own size: extend a file before it grows.
    pub fn resize(
        device: &SharedDevice,
        capacity_bytes: u64,
        progress: Option<Progress>,
    ) -> Result<HeaderInfo, OpenError> {
        resize::resize(device, capacity_bytes, progress)
    }

    /// Both header slots and which one counts. Writes nothing.
    ///
    /// # Errors
    /// No slot counts: nothing is there ([`OpenError::NotFormatted`]), something else, a later
    /// version, damage, or two headers that contradict each other. The header claims more than the
    /// device has. An error of the device.
    pub fn inspect(device: &SharedDevice) -> Result<Inspection, OpenError> {
        header::inspect(&**device)
    }

    /// Identity of the log, fixed when it was formatted.
    pub fn id(&self) -> Uuid {
        self.handle.wal_id
    }

    /// The newest header.
    pub fn header(&self) -> HeaderInfo {
        self.handle.shared.header()
    }

    /// Put a record, the concatenation of `parts`, at the end of the log. Copies it; never waits
    /// for I/O.
    ///
    /// The place is settled when this returns; the future says when the record, and everything
    /// before it, is on stable storage. The record is written whether or not the future is polled.
    /// On an error nothing has changed.
    ///
    /// # Errors
    /// No room in the ring before something is trimmed ([`AppendError::OverCapacity`]), or in the
    /// window before something is durable ([`AppendError::WindowFull`]): for both there is
    /// [`Wal::wait_room`]. No byte or more than [`Options::max_record_bytes`]. The WAL has failed
    /// or is closed.
    pub fn append(&self, parts: &[&[u8]]) -> Result<Append, AppendError> {
        self.append_shared(parts, &Bytes::new())
    }

    /// As [`Wal::append`], of the concatenation of `head` and then `body`, of which
    /// [`Append::body_crc32c`] tells the checksum. A body of 32 KiB and more is not copied at once:
    /// until it is on its way to the device, the log holds a reference to it, and with it to all of
    /// the memory that it is a part of.
    ///
    /// # Errors
    /// Those of [`Wal::append`].
    pub fn append_shared(&self, head: &[&[u8]], body: &Bytes) -> Result<Append, AppendError> {
        let (offset, end, body_crc32c) = self.handle.shared.append(head, body)?;
        Ok(Append {
            offset,
            body_crc32c,
            wait: Wait::new(DurableOf(self.handle.shared.marks.clone()), end.0),
        })
    }

    /// Everything before it is on stable storage. One atomic load.
    pub fn durable(&self) -> LogOffset {
        LogOffset(self.handle.shared.marks.durable.get())
    }

    /// Where the log ends now. The next record starts here or, if it begins a new block, behind a
    /// padding.
    pub fn appended(&self) -> LogOffset {
        self.handle.shared.appended()
    }

    /// Resolves when everything before `offset` is durable, which may lie ahead of what has been
    /// appended.
    pub fn wait_durable(&self, offset: LogOffset) -> Durable {
        Durable { wait: Wait::new(DurableOf(self.handle.shared.marks.clone()), offset.0) }
    }

    /// Resolves when an append that was refused for lack of room may succeed: durability or the
    /// trim have moved since the last refusal (or, if there was none, since this call), or the WAL
    /// has stopped. With several writers, take it before the append that may be refused, so that no
    /// move is missed; it costs nothing until it is polled.
    pub fn wait_room(&self) -> Room {
        let marks = &self.handle.shared.marks;
        Room { wait: Wait::new(MovesOf(marks.clone()), marks.next_move()) }
    }

    /// Give up everything before `to.end`, which is the start or the end of a record and durable.
    /// The future resolves when that is on stable storage; only then is the space reused. A trim
    /// that is behind an earlier one changes nothing.
    ///
    /// Trims take effect whether or not the future is polled. While one is written, later ones
    /// coalesce.
    ///
    /// # Errors
    /// Of the future: [`WalError::TrimPastDurable`], and whatever has stopped the WAL. That
    /// `to.end` is a place between records is not checked; a log that begins elsewhere is reported
    /// as damaged by the next opening.
    pub fn trim(&self, to: RangeTo<LogOffset>) -> Trim {
        self.change(to.end, 0)
    }

    /// As [`Wal::trim`], and raise the mark as [`Wal::set_mark`] does, with the same change of the
    /// header: there is no moment at which the log is trimmed and has the mark of before. The
    /// future resolves when both are on stable storage.
    ///
    /// # Errors
    /// Those of [`Wal::trim`]. If the place is refused, the mark is not raised either.
    pub fn trim_and_mark(&self, to: RangeTo<LogOffset>, mark: u64) -> Trim {
        self.change(to.end, mark)
    }

    /// Raise the log's mark to `mark`, unless it is there already: a number that the log keeps for
    /// its user, in every header, and that never goes back. What it counts is the user's affair; a
    /// user that keeps something else beside the log sees by it which of the two is older
    /// ([`Options::mark`]). The future resolves when both headers have it, so that either alone can
    /// be lost.
    ///
    /// It takes effect whether or not the future is polled. While one is written, later ones
    /// coalesce.
    ///
    /// # Errors
    /// Of the future: whatever has stopped the WAL.
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

    /// Write the durable offset to a header, unless the newest header has it: one write, with a
    /// look at both slots before it. To be called when the log becomes idle. From then on the next
    /// opening knows that everything before [`Wal::durable`] was durable, and reports damage at the
    /// very end of the log as damage instead of taking it for a write that a crash has torn. Does
    /// not wait, and does nothing once the WAL has stopped.
    pub fn persist_durable(&self) {
        self.handle.shared.persist_durable();
    }

    /// Look whether this is still the log's writer, as before each change of the header: for who is
    /// about to do, outside of the log, what only its owner may do. Blocks; call it outside of
    /// completions and async tasks. It tells what was so when the slots were read; only a device
    /// that is reserved ([`Options::reserve`]) promises more.
    ///
    /// # Errors
    /// [`WalError::Fenced`], which stops the WAL; whatever has stopped it before;
    /// [`WalError::Device`] if neither slot can be read, which changes nothing.
    pub fn verify_owner(&self) -> Result<(), WalError> {
        self.handle.shared.verify_owner()
    }

    /// Give the log another capacity while it is in use, in bytes: a multiple of 4 KiB, at least
    /// 192 KiB, at most [`Device::capacity_bytes`](alluvium_device::Device::capacity_bytes), and
    /// such that [`Options::window_bytes`] is at most half of the new ring.
    ///
    /// Nothing is moved: it takes effect when the records that are not trimmed lie at the same
    /// places in both rings, which is at once or when the trim offset next comes to the end of the
    /// ring, or the time after ([`Stats::resize_distance_bytes`]). Until then a log that is to
    /// shrink keeps to the bound of the smaller ring ([`AppendError::OverCapacity`]). Then blocks
    /// wait for the time of two header writes; appends are taken.
    ///
    /// The last request counts, and one for the capacity that the log has withdraws it. A request
    /// is forgotten if the log is closed or the process ends before it has taken effect. Does not
    /// change the device's own size: make it larger before, or smaller afterwards.
    ///
    /// # Errors
    /// The capacity cannot be had, or the WAL has stopped. Nothing has changed.
    pub fn request_resize(&self, capacity_bytes: u64) -> Result<Resizing, ResizeError> {
        let shared = &self.handle.shared;
        let outcome = shared.request_resize(capacity_bytes)?;
        Ok(Resizing { capacity_bytes, outcome, marks: shared.marks.clone(), wait: None })
    }

    /// Numbers of this moment.
    pub fn stats(&self) -> Stats {
        self.handle.shared.stats()
    }

    /// Why the WAL does nothing any more: it has failed or is closed.
    pub fn stopped(&self) -> Option<WalError> {
        self.handle.shared.marks.stopped()
    }

    /// Refuse new appends and trims on all handles, wait until everything appended is durable, and
    /// write the header that tells the next open where the log ends. Blocks; call it outside of
    /// completions and async tasks.
    ///
    /// # Errors
    /// The WAL has failed, before or in the meantime: as after a crash, the next opening finds what
    /// was acknowledged. Or it was closed before.
    pub fn close(self) -> Result<(), WalError> {
        self.handle.shared.close()
    }
}

/// A record's place, and the future that resolves when it and everything before it is durable. It
/// belongs to no runtime. Dropping it changes nothing about the record.
///
/// An error says that the WAL has stopped before that: the record may be there after the next
/// opening, or not.
#[must_use = "the record is not durable before this resolves"]
pub struct Append {
    offset: LogOffset,
    body_crc32c: u32,
    /// For the record's end.
    wait: Wait<DurableOf>,
}

impl Append {
    /// Where the record starts.
    pub fn offset(&self) -> LogOffset {
        self.offset
    }

    /// Where it ends.
    pub fn end(&self) -> LogOffset {
        LogOffset(self.wait.target())
    }

    /// CRC-32C of the record's body ([`Wal::append_shared`]), of 0 bytes if it has none. Who writes
    /// the body elsewhere, too, need not read it once more for that.
    pub fn body_crc32c(&self) -> u32 {
        self.body_crc32c
    }

    /// Block this thread until it is durable.
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

/// See [`Wal::wait_durable`]. An error says that the WAL has stopped before.
#[must_use = "it does nothing unless it is polled"]
pub struct Durable {
    wait: Wait<DurableOf>,
}

impl Durable {
    /// Block this thread until it resolves.
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

/// See [`Wal::wait_room`].
#[must_use = "it does nothing unless it is polled"]
pub struct Room {
    wait: Wait<MovesOf>,
}

impl Room {
    /// Block this thread until it resolves.
    pub fn wait(self) {
        block_on(self);
    }
}

impl Future for Room {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // A WAL that has stopped says so at the next append.
        Pin::new(&mut self.wait).poll(cx).map(drop)
    }
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Room(move {})", self.wait.target())
    }
}

/// See [`Wal::trim`], [`Wal::trim_and_mark`] and [`Wal::set_mark`]. If the error is that of a WAL
/// that has stopped, the change may have taken effect or not.
#[must_use = "nothing has changed for certain before this resolves"]
pub struct Trim {
    wait: Result<(Wait<TrimmedOf>, Wait<MarkOf>), WalError>,
}

impl Trim {
    /// Block this thread until it resolves.
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

/// See [`Wal::request_resize`]. Dropping it leaves the request as it is.
#[must_use = "the log has its former capacity until this resolves"]
pub struct Resizing {
    capacity_bytes: u64,
    outcome: Outcome,
    marks: Arc<Marks>,
    wait: Option<Wait<ResizesOf>>,
}

impl Resizing {
    /// Block this thread until it resolves.
    pub fn wait(self) -> Result<HeaderInfo, ResizeError> {
        block_on(self)
    }
}

impl Future for Resizing {
    type Output = Result<HeaderInfo, ResizeError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            // The outcome is there before it is counted: looked at in the opposite order, none is
            // missed.
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
