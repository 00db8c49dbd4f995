//! The interface between the server and what it exports.

use async_trait::async_trait;
use bytes::Bytes;

/// A disk that the server exports. Positions and lengths are bytes and need no alignment.
///
/// The server relies on the following:
///
/// - **A write that was answered is durable.** The same holds for `zero` and `discard`. The server
///   therefore ignores the FUA flag.
/// - **All connections share one state.** An answered write is visible to every later read, on
///   whichever connection. The server advertises that a client may use several.
/// - **Operations are concurrent.** The server does not order requests, not even overlapping ones.
///   A block that two concurrent writes overlap has the content of either.
/// - **Ranges are valid.** They are not empty and end at or below the size that the disk had when
///   the connection began.
///
/// A future is dropped before its end only if its connection has ended, and the operation did not
/// complete within the grace period of [`crate::Options::grace`]. The operation may then take
/// effect or not; if it may take effect later, the disk orders it before later overlapping ones.
#[async_trait]
pub trait Disk: Send + Sync + 'static {
    /// The size in bytes. A connection uses the size at its beginning: clients cannot be notified
    /// of a change.
    fn size_bytes(&self) -> u64;

    /// Whether the disk refuses changes. Clients get EPERM for them, and the disk is not called.
    fn is_read_only(&self) -> bool;

    /// Reads `len` bytes, at most 32 MiB. The parts are in order and have `len` bytes in total.
    async fn read(&self, at: u64, len: u32) -> Result<Vec<Part>, DiskError>;

    /// Writes at most 1 MiB. The server splits larger requests at multiples of 1 MiB, and starts
    /// with a request before all of it has arrived.
    async fn write(&self, at: u64, data: Bytes) -> Result<(), DiskError>;

    /// Makes the range read as zeros.
    async fn zero(&self, at: u64, len: u64, mode: ZeroMode) -> Result<(), DiskError>;

    /// Whether `zero` takes less time than a write of as many bytes. If not, clients that ask for
    /// fast zeroing get an error at once.
    fn is_zero_fast(&self, at: u64, len: u64, mode: ZeroMode) -> bool;

    /// Releases the space of the range, or a part of it. What is released reads as zeros or as it
    /// was.
    async fn discard(&self, at: u64, len: u64) -> Result<(), DiskError>;

    /// Returns when all operations answered before the call are durable.
    async fn flush(&self) -> Result<(), DiskError>;

    /// Describes the range from its beginning in at least one and at most `max_extents` extents.
    /// They may end before or after the end of the range.
    async fn status(&self, at: u64, len: u64, max_extents: usize)
    -> Result<Vec<Extent>, DiskError>;

    /// Prepares reads of the range, which a client has announced.
    async fn prefetch(&self, _at: u64, _len: u64) -> Result<(), DiskError> {
        Ok(())
    }
}

/// A part of a range that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Bytes; they are sent without a copy.
    Data(Bytes),
    /// That many zeros.
    Zeros(u32),
}

impl Part {
    /// Number of bytes of the disk.
    pub fn len(&self) -> usize {
        match self {
            Self::Data(data) => data.len(),
            Self::Zeros(len) => *len as usize,
        }
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What becomes of the space of a range that is zeroed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroMode {
    /// It may be released.
    MayFree,
    /// It stays allocated, or becomes so: later writes do not fail for lack of space.
    Allocate,
}

/// A run of bytes with the same allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Number of bytes, positive.
    pub len: u64,
    /// Their allocation.
    pub allocation: Allocation,
}

/// What a disk keeps of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// Allocated, with any content.
    Data,
    /// Allocated; reads as zeros.
    Zeros,
    /// Not allocated; reads as zeros, and a write may fail for lack of space.
    Hole,
}

/// Why an operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// No space for the change.
    #[error("no space left")]
    NoSpace,
    /// Another attachment has replaced this one. The connection ends after its answers.
    #[error("the disk is attached elsewhere")]
    Fenced,
    /// The request is not valid for this disk.
    #[error("{0}")]
    Invalid(String),
    /// Any other failure. Clients that negotiated structured replies get the text.
    #[error("{0}")]
    Io(String),
}
