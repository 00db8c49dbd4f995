//! The common part of all engines: validation of requests, continuation of short transfers, the
//! latch.
//!
//! An engine moves a [`Job`] through `next -> kernel (or simulation) -> advance` until it has an
//! outcome, then gives it to [`Core::finish`]. All decisions are made here, without I/O, so all
//! engines behave alike.

mod inbox;
#[cfg(all(test, loom))]
mod models;
#[cfg(test)]
mod tests;
pub(crate) mod threads;
pub(crate) mod uring;

use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use rustix::io::Errno;

use crate::buffer::Pool;
use crate::byte_size::PAGE;
use crate::claim::Claim;
use crate::error::Reserved;
use crate::options::Progress;
use crate::reserve;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, OnceLock};
use crate::target;
use crate::{
    AlignedBuf, ByteSize, Completion, Device, DeviceError, DeviceOffset, Geometry, OpenError,
    PAGE_BYTES, Request, ReserveError, SharedBuf,
};

/// Consecutive `EAGAIN` results of a transfer, without any progress, before that becomes its error.
/// The kernel uses `EAGAIN` for temporary shortages; a permanent one must not cause an endless
/// loop.
const MAX_RETRIES: u32 = 1_000;

/// A request in progress.
pub(crate) struct Job {
    at: u64,
    /// Bytes already transferred.
    done: usize,
    retries: u32,
    body: Body,
    completion: Completion,
}

enum Body {
    Read(AlignedBuf),
    Write { buf: SharedBuf, dsync: bool },
    Flush,
}

/// The part of a job that the kernel still has to do.
pub(crate) enum Transfer<'a> {
    Read { at: u64, buf: &'a mut [u8], registered: bool },
    Write { at: u64, buf: &'a [u8], registered: bool, dsync: bool },
    Flush,
}

impl Job {
    pub(crate) fn next(&mut self) -> Transfer<'_> {
        let at = self.at + self.done as u64;
        match &mut self.body {
            Body::Read(buf) => {
                let registered = buf.registered();
                Transfer::Read { at, buf: &mut buf[self.done..], registered }
            }
            Body::Write { buf, dsync } => Transfer::Write {
                at,
                buf: &buf[self.done..],
                registered: buf.registered(),
                dsync: *dsync,
            },
            Body::Flush => Transfer::Flush,
        }
    }

    /// Records the result of one transfer. Returns `None` if more is to be done, otherwise the
    /// outcome of the job.
    ///
    /// Progress counts in whole logical blocks: Direct I/O cannot continue inside one.
    pub(crate) fn advance(
        &mut self,
        result: Result<usize, Errno>,
        block_bytes: u32,
    ) -> Option<io::Result<()>> {
        let (len, nothing) = match &self.body {
            Body::Read(buf) => (buf.len(), io::ErrorKind::UnexpectedEof),
            Body::Write { buf, .. } => (buf.len(), io::ErrorKind::WriteZero),
            Body::Flush => (0, io::ErrorKind::Other),
        };
        match result {
            Err(Errno::INTR) => None,
            Err(Errno::AGAIN) if self.retries < MAX_RETRIES => {
                self.retries += 1;
                None
            }
            Err(errno) => Some(Err(errno.into())),
            Ok(moved) => {
                assert!(
                    moved <= len - self.done,
                    "{moved} bytes transferred where {} were requested",
                    len - self.done
                );
                if self.done + moved == len {
                    self.done = len;
                    return Some(Ok(()));
                }
                let whole = moved - moved % block_bytes as usize;
                if whole == 0 {
                    return Some(Err(nothing.into()));
                }
                self.done += whole;
                self.retries = 0;
                None
            }
        }
    }

    /// First byte and length of the whole request.
    pub(crate) fn extent(&self) -> (u64, usize) {
        match &self.body {
            Body::Read(buf) => (self.at, buf.len()),
            Body::Write { buf, .. } => (self.at, buf.len()),
            Body::Flush => (0, 0),
        }
    }

    /// Position and bytes that a write still has to transfer.
    pub(crate) fn unwritten(&self) -> Option<(u64, &[u8])> {
        match &self.body {
            Body::Write { buf, .. } => Some((self.at + self.done as u64, &buf[self.done..])),
            Body::Read(_) | Body::Flush => None,
        }
    }

    pub(crate) fn is_read(&self) -> bool {
        matches!(self.body, Body::Read(_))
    }

    pub(crate) fn operation(&self) -> &'static str {
        match self.body {
            Body::Read(_) => "read",
            Body::Write { .. } => "write",
            Body::Flush => "flush",
        }
    }
}

/// The part of a device that outlives every request: its properties, and whether it has failed.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) geometry: Geometry,
    /// The current capacity; initially that of the geometry.
    capacity_bytes: AtomicU64,
    /// Serialises capacity changes.
    resizing: Mutex<()>,
    name: Arc<str>,
    latch: OnceLock<DeviceError>,
    /// Released by the last user of the device, which may be a thread of the engine.
    claim: Option<Arc<Claim>>,
}

impl Core {
    pub(crate) fn new(geometry: Geometry, claim: Option<Arc<Claim>>) -> Self {
        let name = geometry.name.as_str().into();
        let capacity_bytes = AtomicU64::new(geometry.capacity_bytes);
        let resizing = Mutex::new(());
        Self { geometry, capacity_bytes, resizing, name, latch: OnceLock::new(), claim }
    }

    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes.load(Ordering::Acquire)
    }

    /// Sets the capacity of a device that is not backed by a target.
    pub(crate) fn store_capacity(&self, bytes: u64) {
        assert!(
            bytes > 0 && bytes.is_multiple_of(PAGE_BYTES as u64),
            "{}: a capacity of {bytes} bytes is not a positive multiple of a page",
            self.name
        );
        self.capacity_bytes.store(bytes, Ordering::Release);
    }

    /// Implements [`Device::set_capacity`](crate::Device::set_capacity).
    pub(crate) fn set_capacity(
        &self,
        bytes: u64,
        progress: Option<&Progress>,
    ) -> Result<(), OpenError> {
        let path = Path::new(&*self.name);
        let unsuitable = |reason: String| OpenError::Unsuitable { path: path.to_owned(), reason };
        let Some(claim) = &self.claim else {
            return Err(unsuitable("is open read-only".into()));
        };
        if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES as u64) {
            let reason =
                format!("cannot have {}: not a positive multiple of {PAGE}", ByteSize(bytes));
            return Err(unsuitable(reason));
        }
        let _one_at_a_time = self.resizing.lock();
        let before = self.capacity_bytes();
        // Bytes about to be cut off are refused before the change, new bytes accepted only after
        // it.
        self.store_capacity(before.min(bytes));
        let after = target::set_capacity(path, claim, self.geometry.block_device, bytes, progress);
        self.store_capacity(*after.as_ref().unwrap_or(&before));
        after.map(drop)
    }

    /// Implements [`Device::reserve`](crate::Device::reserve).
    pub(crate) fn reserve(&self) -> Result<(), ReserveError> {
        let unsupported = |reason: &str| {
            Err(ReserveError::Unsupported { device: self.name.to_string(), reason: reason.into() })
        };
        match &self.claim {
            None => unsupported("it is open read-only"),
            Some(_) if !self.geometry.block_device => unsupported("it is a regular file"),
            Some(claim) => reserve::acquire_block_device(claim, &self.name),
        }
    }

    pub(crate) fn failure(&self) -> Option<DeviceError> {
        self.latch.get().cloned()
    }

    /// Turns a request into a job. Panics if the request is unaligned or outside the device.
    pub(crate) fn accept(&self, request: Request, completion: Completion) -> Job {
        let (at, len, body) = match request {
            Request::Read { at: DeviceOffset(at), buf } => (at, buf.len(), Body::Read(buf)),
            Request::Write { at: DeviceOffset(at), buf, durable } => {
                (at, buf.len(), Body::Write { dsync: durable && self.geometry.flushes, buf })
            }
            Request::Flush => (0, 0, Body::Flush),
        };
        let capacity = self.capacity_bytes();
        assert!(
            at.is_multiple_of(PAGE_BYTES as u64),
            "{}: position {at} is not a multiple of a page",
            self.name
        );
        assert!(
            len.is_multiple_of(PAGE_BYTES),
            "{}: length {len} is not a multiple of a page",
            self.name
        );
        assert!(
            at.checked_add(len as u64).is_some_and(|end| end <= capacity),
            "{}: {len} bytes at {at} lie beyond the capacity of {capacity} bytes",
            self.name
        );
        Job { at, done: 0, retries: 0, body, completion }
    }

    /// Why `job` must not reach the device: it writes or flushes, and the device has latched or is
    /// read-only.
    pub(crate) fn refusal(&self, job: &Job) -> Option<io::Error> {
        if job.is_read() {
            None
        } else if let Some(cause) = self.latch.get() {
            Some(io::Error::other(cause.clone()))
        } else if self.geometry.read_only {
            Some(io::Error::new(io::ErrorKind::PermissionDenied, "the device is open read-only"))
        } else {
            None
        }
    }

    /// Ends a job. Nothing is acknowledged after the latch, whatever `result` says.
    pub(crate) fn complete(&self, job: Job, result: io::Result<()>) -> Completed {
        let (at, len) = job.extent();
        let error = |source: io::Error| DeviceError {
            device: self.name.clone(),
            operation: job.operation(),
            at,
            len_bytes: len as u64,
            source: Arc::new(match self.geometry.block_device {
                true => Reserved::recognise(source),
                false => source,
            }),
        };
        let outcome = if job.is_read() {
            result.map_err(error)
        } else {
            match (self.latch.get(), result) {
                (Some(first), _) => Err(first.clone()),
                (None, Ok(())) => Ok(()),
                // A write to a read-only device is not a failure of the device and does not latch
                // it.
                (None, Err(source)) if self.geometry.read_only => Err(error(source)),
                (None, Err(source)) => Err(self.latch_with(error(source))),
            }
        };
        let buf = match job.body {
            Body::Read(buf) => Some(buf),
            Body::Write { .. } | Body::Flush => None,
        };
        Completed { completion: job.completion, outcome: outcome.map(|()| buf) }
    }

    /// Ends a job and runs its completion. A panicking completion latches the device: the
    /// requester's state is unknown, and the engine's thread must continue for other requests.
    pub(crate) fn finish(&self, job: Job, result: io::Result<()>) {
        let (operation, (at, len)) = (job.operation(), job.extent());
        let completed = self.complete(job, result);
        if catch_unwind(AssertUnwindSafe(|| completed.run())).is_err() {
            self.latch_with(DeviceError {
                device: self.name.clone(),
                operation,
                at,
                len_bytes: len as u64,
                source: Arc::new(io::Error::other("the completion of the request panicked")),
            });
        }
    }

    /// Latches with `error` unless the device has latched before. Returns the first cause.
    fn latch_with(&self, error: DeviceError) -> DeviceError {
        let first = self.latch.get_or_init(|| {
            tracing::error!("{error}; the device refuses writes until it is opened again");
            error
        });
        first.clone()
    }
}

/// An implementation of [`Device`] from a core, a pool and a mechanism that moves jobs.
pub(crate) trait Engine: Send + Sync + fmt::Debug {
    fn core(&self) -> &Core;
    fn pool(&self) -> &Arc<Pool>;
    /// Starts a job of [`Core::accept`], which ends in [`Core::finish`].
    fn push(&self, job: Job);
}

impl<E: Engine> Device for E {
    fn geometry(&self) -> &Geometry {
        &self.core().geometry
    }

    fn capacity_bytes(&self) -> u64 {
        self.core().capacity_bytes()
    }

    fn set_capacity(&self, bytes: u64, progress: Option<&Progress>) -> Result<(), OpenError> {
        self.core().set_capacity(bytes, progress)
    }

    fn reserve(&self) -> Result<(), ReserveError> {
        self.core().reserve()
    }

    fn alloc(&self, len_bytes: usize) -> AlignedBuf {
        self.pool().alloc(len_bytes)
    }

    fn submit(&self, request: Request, done: Completion) {
        self.push(self.core().accept(request, done));
    }

    fn failure(&self) -> Option<DeviceError> {
        self.core().failure()
    }
}

/// A finished job whose completion has not run yet.
pub(crate) struct Completed {
    completion: Completion,
    outcome: Result<Option<AlignedBuf>, DeviceError>,
}

impl Completed {
    pub(crate) fn run(self) {
        (self.completion)(self.outcome);
    }
}
