#![doc = include_str!("../README.md")]
//! # Modules
//!
//! - `buffer.rs`: `AlignedBuf` (one owner, writable), `SharedBuf` (frozen, shared) and their pool
//! - `options.rs`, `claim.rs`: how a device is opened; the exclusive claim on it
//! - `engine/`: what engines share: acceptance, short transfers, the failure latch; io_uring and
//!   threads
//! - `read_rings.rs`: concurrent reads of many files for a thread that waits for them
//! - `target.rs`, `open.rs`: block devices and files: claim, size, write cache, creation in full
//! - `priority.rs`: low thread priority for processor and disk
//! - `reserve.rs`: persistent reservations: the disk refuses the writes of other hosts
//! - `sim.rs`: a simulated disk that loses unflushed data and that several hosts share
//! - `model.rs`: a disk in memory with the quotas and latency of a cloud disk
//! - `conformance.rs`: tests that every engine passes
//! - `arena.rs`, `memory.rs`: memory with concurrent appends and lock-free reads; mappings
#![allow(unsafe_code)]

mod arena;
mod buffer;
mod byte_size;
mod claim;
#[cfg(test)]
mod conformance;
mod copy;
mod engine;
mod error;
mod file_bytes;
mod memory;
pub mod model;
mod open;
mod options;
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
pub use byte_size::ByteSize;
pub use copy::copy_in_steps;
pub use error::{DeviceError, OpenError, ReserveError};
pub use file_bytes::FileBytes;
pub use memory::Words;
pub use open::open;
pub use options::{Access, Durability, Engine, OpenOptions, Progress};
pub use priority::lower_thread_priority;
pub use read_rings::{FileRead, ReadRings};

use std::fmt;
use std::sync::Arc;

/// A byte position on a device. Requests need multiples of [`PAGE_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceOffset(pub u64);

/// The properties of a device as it was opened.
#[derive(Clone, Debug)]
pub struct Geometry {
    /// Path, or a description for simulated devices. It appears in errors.
    pub name: String,
    /// Capacity when the device was opened; [`Device::capacity_bytes`] returns the current one.
    pub capacity_bytes: u64,
    /// Smallest unit that the device writes; at most [`PAGE_BYTES`].
    pub logical_block_bytes: u32,
    /// Whether the target is a raw block device (otherwise a regular file).
    pub block_device: bool,
    /// Whether an acknowledged write may still be in a volatile cache unless it is flushed. True
    /// for every regular file.
    pub volatile_cache: bool,
    /// Whether durable writes carry a flush or FUA; derived from [`Durability`] and
    /// `volatile_cache`.
    pub flushes: bool,
    /// Whether the device was opened read-only; writes and flushes then fail.
    pub read_only: bool,
    /// The engine that serves the requests: `io_uring`, `threads`, `simulated` or, behind a
    /// modelled disk, `memory`.
    pub engine: &'static str,
}

/// An I/O request. The engine owns its buffers from [`Device::submit`] until the completion runs.
pub enum Request {
    /// Fills the whole buffer from `at`. Completes with the buffer.
    Read {
        /// First byte.
        at: DeviceOffset,
        /// Destination; its length is the length of the read.
        buf: AlignedBuf,
    },
    /// Writes the whole buffer at `at`.
    Write {
        /// First byte.
        at: DeviceOffset,
        /// Source; its length is the length of the write.
        buf: SharedBuf,
        /// Complete only when the bytes are on stable storage. Has no effect if
        /// [`Geometry::flushes`] is false.
        durable: bool,
    },
    /// Completes when every write that completed before this request was submitted is on stable
    /// storage. Always sent to the device, whatever the durability setting.
    Flush,
}

/// A callback that runs once, on a thread of the engine and possibly in parallel with others. It
/// must not block; it may submit. A read returns its buffer, other requests return `None`. A
/// completion that panics latches the device.
pub type Completion = Box<dyn FnOnce(Result<Option<AlignedBuf>, DeviceError>) + Send>;

/// Block storage with asynchronous completion.
///
/// Requests may complete in any order, overlapping ones included. The engine continues short
/// transfers. The first failed write or flush **latches** the device: that request and every later
/// write or flush complete with the same [`DeviceError`], because the state of the device's data is
/// no longer known (after a failed `fsync` Linux marks the pages clean: see "PostgreSQL's fsync()
/// surprise", LWN 752063). Reads still work.
///
/// Dropping the last handle completes the requests in flight, then closes the device; when the drop
/// returns, the target can be opened again. A drop inside a completion does not wait: the engine's
/// thread closes the device when it is done.
pub trait Device: Send + Sync + fmt::Debug {
    /// The properties of this device.
    fn geometry(&self) -> &Geometry;

    /// The current capacity in bytes.
    fn capacity_bytes(&self) -> u64 {
        self.geometry().capacity_bytes
    }

    /// Changes the capacity to `bytes`, a positive multiple of [`PAGE_BYTES`], while the device is
    /// in use. Blocks; must not be called from a completion.
    ///
    /// A regular file is extended with zeroes, all of them written and synced when this returns, or
    /// truncated; `progress` is called with the bytes of the new part. The caller ensures that the
    /// part cut off is no longer needed and has no request in flight. A block device is resized
    /// elsewhere: its size is read again, and a size below `bytes` is refused
    /// ([`OpenError::TooSmall`]). On failure the capacity is unchanged; if the process is killed, a
    /// file has some length between the two, without a hole.
    ///
    /// # Errors
    /// The size is invalid or exceeds the process's file size limit, the device is read-only, or
    /// its size is fixed ([`OpenError::Unsuitable`]); there is no space ([`OpenError::NoSpace`]);
    /// any other system error.
    fn set_capacity(&self, bytes: u64, progress: Option<&Progress>) -> Result<(), OpenError> {
        let _ = (bytes, progress);
        let path = self.geometry().name.clone().into();
        Err(OpenError::Unsuitable { path, reason: "its size cannot be changed".into() })
    }

    /// Makes the device refuse the writes of all other hosts from now on, by a persistent
    /// reservation of a whole SCSI disk or NVMe namespace. Blocks; must not be called from a
    /// completion. Idempotent.
    ///
    /// Preempts any previous reservation of this kind and aborts the previous owner's in-flight
    /// writes: they fail with an error for which [`DeviceError::is_reserved`] holds, which latches
    /// the previous owner's device. Reads are not restricted. The reservation outlasts closing the
    /// device, the end of the process or host, and a power loss of the device. Processes on the
    /// same host are kept apart by [`Access::Exclusive`].
    ///
    /// # Errors
    /// The device does not support such reservations, or other software holds one.
    fn reserve(&self) -> Result<(), ReserveError> {
        let device = self.geometry().name.clone();
        Err(ReserveError::Unsupported { device, reason: "it is not a physical disk".into() })
    }

    /// Allocates an aligned buffer of `len_bytes` (rounded up to a page) from the engine's pool,
    /// which is registered with the kernel where possible, or from the heap if the pool is
    /// exhausted. Its content is unspecified but initialised.
    fn alloc(&self, len_bytes: usize) -> AlignedBuf;

    /// Queues a request. Never blocks on I/O and accepts any number of requests: the caller bounds
    /// the outstanding ones. Panics if position or length is unaligned or beyond the capacity,
    /// which is a defect of the caller.
    fn submit(&self, request: Request, done: Completion);

    /// The cause of the latch, or `None` if the device has not latched.
    fn failure(&self) -> Option<DeviceError>;
}

/// Blocking requests for recovery, headers and tools. They deadlock if called from a completion.
///
/// They fail as the corresponding requests do, and panic where [`Device::submit`] does.
impl dyn Device + '_ {
    /// Reads `len_bytes` at `at` and waits.
    pub fn read(&self, at: DeviceOffset, len_bytes: usize) -> Result<AlignedBuf, DeviceError> {
        let buf = self.alloc(len_bytes);
        let buf = self.wait(Request::Read { at, buf })?;
        Ok(buf.expect("a read returns its buffer"))
    }

    /// Writes `buf` at `at` durably and waits.
    pub fn write_durable(&self, at: DeviceOffset, buf: SharedBuf) -> Result<(), DeviceError> {
        self.wait(Request::Write { at, buf, durable: true }).map(drop)
    }

    /// Flushes and waits.
    pub fn flush(&self) -> Result<(), DeviceError> {
        self.wait(Request::Flush).map(drop)
    }

    fn wait(&self, request: Request) -> Result<Option<AlignedBuf>, DeviceError> {
        let (tx, rx) = std::sync::mpsc::sync_channel(1);
        self.submit(request, Box::new(move |result| drop(tx.send(result))));
        rx.recv().expect("an engine completes every request")
    }
}

/// A shared handle to a device.
pub type SharedDevice = Arc<dyn Device>;
