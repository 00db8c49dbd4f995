#![doc = include_str!("../README.md")]
#![allow(unsafe_code)]

mod arena;
mod buffer;
#[cfg(test)]
mod conformance;
mod copy;
mod engine;
mod error;
mod file_bytes;
mod memory;
pub mod model;
mod open;
mod priority;
mod read_rings;
mod reserve;
pub mod sim;
#[cfg(not(loom))]
mod sync;
#[cfg(loom)]
#[doc(hidden)]
pub mod sync;
mod target;

pub use arena::{Arena, GRANULE_BYTES, Reservation};
pub use buffer::{AlignedBuf, PAGE_BYTES, SharedBuf};
pub use copy::copy_in_steps;
pub use error::{DeviceError, OpenError, ReserveError};
pub use file_bytes::FileBytes;
pub use memory::Words;
pub use open::{Access, Durability, Engine, OpenOptions, Progress, open};
pub use priority::make_way;
pub use read_rings::{FileRead, ReadRings};

use std::fmt;
use std::sync::Arc;

/// A byte position on a device. Requests need multiples of [`PAGE_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceOffset(pub u64);

/// What a device is and promises, as it was opened.
#[derive(Clone, Debug)]
pub struct Geometry {
    /// Path, or a description for simulated devices. Errors name it.
    pub name: String,
    /// Bytes that could be addressed when it was opened; [`Device::capacity_bytes`] follows its
    /// changes.
    pub capacity_bytes: u64,
    /// Smallest unit that the device writes; at most [`PAGE_BYTES`].
    pub logical_block_bytes: u32,
    /// Whether the target is a raw block device (otherwise a regular file).
    pub block_device: bool,
    /// Whether an acknowledged write may still sit in a volatile cache unless it is flushed. True
    /// for every regular file.
    pub volatile_cache: bool,
    /// Whether durable writes carry a flush or FUA: resolved from [`Durability`] and
    /// `volatile_cache`.
    pub flushes: bool,
    /// Whether it was opened for reading only; writes and flushes fail then.
    pub read_only: bool,
    /// The engine that serves the requests: `io_uring`, `threads`, `simulated` or, behind a
    /// modelled disk, `memory`.
    pub engine: &'static str,
}

/// One request. The engine owns the buffers from [`Device::submit`] until the completion runs.
pub enum Request {
    /// Fill the whole buffer from `at`. Completes with the buffer.
    Read {
        /// First byte.
        at: DeviceOffset,
        /// Destination; its length is the length of the read.
        buf: AlignedBuf,
    },
    /// Write the whole buffer at `at`.
    Write {
        /// First byte.
        at: DeviceOffset,
        /// Source; its length is the length of the write.
        buf: SharedBuf,
        /// Complete only when the bytes are on stable storage (a no-op promise where
        /// [`Geometry::flushes`] is false).
        durable: bool,
    },
    /// Complete when every write that completed before this request was submitted is on stable
    /// storage. Always reaches the device, whatever the durability setting.
    Flush,
}

/// Runs once, on a thread of the engine, perhaps beside others; it must not block. It may submit. A
/// read hands its buffer back, other requests `None`. One that panics latches the device.
pub type Completion = Box<dyn FnOnce(Result<Option<AlignedBuf>, DeviceError>) + Send>;

/// Block storage with asynchronous completion.
///
/// Requests may complete in any order, overlapping ones included. Short transfers are continued by
/// the engine. The first failed write or flush **latches** the device: that request and every later
/// write or flush complete with the same [`DeviceError`], because nothing is known any more about
/// what the device kept (after a failed `fsync` Linux marks the pages clean: see "PostgreSQL's
/// fsync() surprise", LWN 752063). Reads still work.
///
/// Dropping the last handle completes what is in flight, then closes; when the drop returns, others
/// may open the target. (Dropped inside a completion it does not wait: the engine's thread closes
/// when it is done.)
pub trait Device: Send + Sync + fmt::Debug {
    /// What this device is.
    fn geometry(&self) -> &Geometry;

    /// Bytes that can be addressed now.
    fn capacity_bytes(&self) -> u64 {
        self.geometry().capacity_bytes
    }

    /// Make it `bytes` long, a positive multiple of [`PAGE_BYTES`], while it is in use. Blocks; not
    /// for completions.
    ///
    /// A regular file is lengthened with zeroes that are all written and synced when this returns,
    /// or shortened; `progress` is told the bytes of the new part. The caller sees to it that
    /// nothing is in flight, or still wanted, in what is cut off. A block device changes elsewhere:
    /// its size is read again, and refused ([`OpenError::TooSmall`]) if that is less than `bytes`.
    /// If this fails the capacity is the former one; if the process is killed, a file has any
    /// length between the two, without a hole in it.
    ///
    /// # Errors
    /// A size that cannot be, or beyond what the process may have; a device that was opened for
    /// reading only, or whose size is fixed ([`OpenError::Unsuitable`]). No space
    /// ([`OpenError::NoSpace`]); whatever else the system says.
    fn set_capacity(&self, bytes: u64, progress: Option<&Progress>) -> Result<(), OpenError> {
        let _ = (bytes, progress);
        let path = self.geometry().name.clone().into();
        Err(OpenError::Unsuitable { path, reason: "its size cannot be changed".into() })
    }

    /// Have the device itself refuse the writes of all other hosts from now on (a persistent
    /// reservation, of a whole SCSI disk or NVMe namespace). Blocks; not for completions. Done
    /// again, it changes nothing.
    ///
    /// Whoever had reserved it in this way loses that, and what he still has on its way is aborted:
    /// his writes fail with an error that [`DeviceError::is_reserved`], and so latch his device.
    /// Reads succeed for everybody. It stays reserved for this host when it is closed, when the
    /// process or the host ends, and when the device loses its power; processes of one host are
    /// kept apart by [`Access::Exclusive`].
    ///
    /// # Errors
    /// It has no such reservations, or somebody else has it who is no owner of this kind.
    fn reserve(&self) -> Result<(), ReserveError> {
        let device = self.geometry().name.clone();
        Err(ReserveError::Unsupported { device, reason: "it is no disk of its own".into() })
    }

    /// An aligned buffer of `len_bytes` (rounded up to a page) from the engine's pool; registered
    /// with the kernel where the engine can; from the heap when the pool has none left. Its content
    /// is unspecified but initialised.
    fn alloc(&self, len_bytes: usize) -> AlignedBuf;

    /// Hand over a request. Never blocks on I/O, and takes any number: whoever submits bounds what
    /// is outstanding. Panics if position or length is not aligned or beyond the capacity: that is
    /// a defect of the caller.
    fn submit(&self, request: Request, done: Completion);

    /// The cause, once the device has latched.
    fn failure(&self) -> Option<DeviceError>;
}

/// Blocking conveniences for recovery, headers and tools. Not for completion callbacks: they would
/// wait for themselves.
///
/// They fail as their requests do, and panic where [`Device::submit`] does.
impl dyn Device + '_ {
    /// Read `len_bytes` at `at` and wait.
    pub fn read(&self, at: DeviceOffset, len_bytes: usize) -> Result<AlignedBuf, DeviceError> {
        let buf = self.alloc(len_bytes);
        let buf = self.wait(Request::Read { at, buf })?;
        Ok(buf.expect("a read hands its buffer back"))
    }

    /// Write `buf` at `at` durably and wait.
    pub fn write_durable(&self, at: DeviceOffset, buf: SharedBuf) -> Result<(), DeviceError> {
        self.wait(Request::Write { at, buf, durable: true }).map(drop)
    }

    /// Flush and wait.
    pub fn flush(&self) -> Result<(), DeviceError> {
        self.wait(Request::Flush).map(drop)
    }

    fn wait(&self, request: Request) -> Result<Option<AlignedBuf>, DeviceError> {
        let (tx, rx) = std::sync::mpsc::sync_channel(1);
        self.submit(request, Box::new(move |result| drop(tx.send(result))));
        rx.recv().expect("an engine completes every request")
    }
}

/// A device that several owners share.
pub type SharedDevice = Arc<dyn Device>;
