//! The errors of the WAL. Each message names the subject and the cause.

use std::sync::Arc;

use alluvium_device::{ByteSize, DeviceError, ReserveError};

use crate::LogOffset;

/// The error of a `visit` callback; returned as [`OpenError::Visit`].
pub type VisitError = Box<dyn std::error::Error + Send + Sync>;

/// Why a WAL could not be formatted, inspected or opened. Nothing has been written unless the
/// variant says so.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The device could not be read or written.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device could not be reserved ([`Options::reserve`](crate::Options::reserve)).
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// Both header slots are empty.
    #[error("{device}: holds no WAL: the device is not formatted")]
    NotFormatted {
        /// Name of the device.
        device: String,
    },
    /// The device holds something else. `format` refuses to destroy it without `force`, and `open`
    /// cannot read it.
    #[error("{device}: holds {looks_like}, not an Alluvium WAL")]
    NotAWal {
        /// Name of the device.
        device: String,
        /// What was recognised.
        looks_like: String,
    },
    /// `format` found data that it would destroy.
    #[error(
        "{device}: holds {looks_like}; formatting would destroy it (use `force` to format anyway)"
    )]
    Occupied {
        /// Name of the device.
        device: String,
        /// What was recognised.
        looks_like: String,
    },
    /// There was a WAL, but neither header slot can be trusted any more.
    #[error("{device}: the WAL's header is damaged: slot 0: {slot_0}; slot 1: {slot_1}")]
    HeaderDamaged {
        /// Name of the device.
        device: String,
        /// Content of slot 0.
        slot_0: String,
        /// Content of slot 1.
        slot_1: String,
    },
    /// Both slots carry the same epoch and generation, or differ in their WAL id: two writers, or a
    /// copied slot.
    #[error("{device}: the header slots contradict each other: {reason}")]
    HeaderConflict {
        /// Name of the device.
        device: String,
        /// The contradicting values.
        reason: String,
    },
    /// Another writer has opened or formatted the WAL since its header was read here. Nothing more
    /// is written.
    #[error("{device}: the WAL is not opened: {cause}")]
    Fenced {
        /// Name of the device.
        device: String,
        /// The other writer.
        cause: WalError,
    },
    /// [`Options::mark`](crate::Options::mark) is not greater than the log's mark: the data that
    /// the opener has is older than the log.
    #[error(
        "{device}: the WAL has the mark {found}; the mark {given}, given to open it, is not greater"
    )]
    MarkNotAhead {
        /// Name of the device.
        device: String,
        /// The header's mark.
        found: u64,
        /// The mark in the options.
        given: u64,
    },
    /// The WAL was written by a later version of Alluvium.
    #[error(
        "{device}: the WAL has {found}; this program knows format version {known} and no flags"
    )]
    FutureVersion {
        /// Name of the device.
        device: String,
        /// Version and flags on the device.
        found: String,
        /// The newest version that this program supports.
        known: u32,
    },
    /// The WAL states, or was given, a capacity larger than the device.
    #[error(
        "{device}: a capacity of {} exceeds the {} of the device",
        ByteSize(*wanted_bytes),
        ByteSize(*device_bytes)
    )]
    LargerThanDevice {
        /// Name of the device.
        device: String,
        /// Requested size, or the size in the header.
        wanted_bytes: u64,
        /// Size of the device.
        device_bytes: u64,
    },
    /// An option is out of its range. The message names the option, the value and the range.
    #[error("{0}")]
    InvalidOption(String),
    /// A part of the log could not be read at a point where it decides whether the log ends there.
    /// To continue would risk dropping acknowledged records behind it.
    #[error(
        "the log cannot be read at {at}, where it may end; not opened, since acknowledged records \
         behind it could be lost: {cause}"
    )]
    EndUnreadable {
        /// The first logical offset that could not be read.
        at: LogOffset,
        /// The error of the device.
        cause: DeviceError,
    },
    /// The log cannot be moved into a ring of another size from its current position. Trim more of
    /// it (`trim`) and try again.
    #[error(
        "the WAL cannot be resized: {reason} ({live_bytes} bytes of log, a new ring of \
         {ring_bytes} bytes); trim it, then try again"
    )]
    ResizeBlocked {
        /// Bytes from the page of the trim offset to that of the end.
        live_bytes: u64,
        /// Size of the new ring.
        ring_bytes: u64,
        /// What prevents the move.
        reason: String,
    },
    /// A thread of the WAL could not be started. The WAL was recovered and can be opened again.
    #[error("{0}")]
    Thread(String),
    /// The `visit` callback failed.
    #[error("the visitor of the log failed at {at}: {source}")]
    Visit {
        /// The record that it received.
        at: LogOffset,
        /// Its error.
        source: VisitError,
    },
}

/// Why an open WAL cannot do what was requested. Cheap to clone: every waiter gets the same error.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WalError {
    /// A write or a flush failed. The WAL has latched: nothing is acknowledged until it is opened
    /// again.
    #[error("the WAL has failed: {0}")]
    Device(#[source] DeviceError),
    /// The WAL was closed.
    #[error("the WAL is closed")]
    Closed,
    /// A trim beyond the durable offset was requested. Nothing has changed.
    #[error("cannot trim to {to}: the log is durable only up to {durable}")]
    TrimPastDurable {
        /// Requested offset.
        to: LogOffset,
        /// The durable offset.
        durable: LogOffset,
    },
    /// Another writer has opened or formatted the WAL. Nothing more is written. Data not yet
    /// acknowledged may be lost.
    #[error("the WAL was taken over: {found}")]
    Fenced {
        /// The foreign header found, or the write that the device refused because another host has
        /// reserved it.
        found: String,
    },
    /// A thread panicked inside the WAL, which is a defect. Nothing is acknowledged until it is
    /// opened again.
    #[error("the WAL has failed: a thread panicked inside it")]
    Panicked,
    /// A thread of the WAL could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] Arc<std::io::Error>),
}

impl WalError {
    /// Converts the error of a write or flush.
    pub(crate) fn of(cause: DeviceError) -> Self {
        match cause.is_reserved() {
            true => Self::Fenced { found: cause.to_string() },
            false => Self::Device(cause),
        }
    }
}

/// Why a request of [`Wal::request_resize`](crate::Wal::request_resize) was not granted. The log
/// keeps its capacity and continues.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// The device has to be enlarged first.
    #[error(
        "a capacity of {} exceeds the {} of the device",
        ByteSize(*capacity_bytes),
        ByteSize(*device_bytes)
    )]
    LargerThanDevice {
        /// Requested capacity.
        capacity_bytes: u64,
        /// Size of the device.
        device_bytes: u64,
    },
    /// The capacity is invalid for any log, or with these options.
    #[error("a capacity of {} is refused: {reason}", ByteSize(*capacity_bytes))]
    Refused {
        /// Requested capacity.
        capacity_bytes: u64,
        /// Why it is invalid.
        reason: String,
    },
    /// A later request replaced this one before it took effect.
    #[error("replaced by a request for {capacity_bytes} bytes")]
    Replaced {
        /// The capacity of the later request.
        capacity_bytes: u64,
    },
    /// The WAL has failed or is closed. After a crash it has either capacity.
    #[error(transparent)]
    Failed(#[from] WalError),
}

/// Why [`Wal::append`](crate::Wal::append) refused a record. The WAL is unchanged in every case.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AppendError {
    /// The ring is full until a trim.
    #[error("the WAL is full: {needed_bytes} bytes needed, {free_bytes} of {ring_bytes} free")]
    OverCapacity {
        /// Bytes of this record, with its header and the padding that may follow it.
        needed_bytes: u64,
        /// Free bytes of the ring.
        free_bytes: u64,
        /// Size of the ring; of the smaller one if the log is to shrink.
        ring_bytes: u64,
    },
    /// The window is full until more is durable; wait with
    /// [`Wal::wait_space`](crate::Wal::wait_space).
    #[error(
        "the WAL's window is full: {needed_bytes} bytes needed, {free_bytes} of {window_bytes} free"
    )]
    WindowFull {
        /// Bytes of this record, with its header and the padding that may follow it.
        needed_bytes: u64,
        /// Free bytes of the window.
        free_bytes: u64,
        /// Size of the window.
        window_bytes: u64,
    },
    /// The record can never be appended.
    #[error("a record of {len_bytes} bytes is larger than the limit of {max_bytes}")]
    TooLarge {
        /// Length of the payload.
        len_bytes: u64,
        /// [`Options::max_record_bytes`](crate::Options::max_record_bytes).
        max_bytes: u32,
    },
    /// The payload is empty. A record has at least one byte.
    #[error("a record cannot be empty")]
    Empty,
    /// The WAL has failed; the cause is the first error.
    #[error(transparent)]
    Failed(WalError),
    /// The WAL is closed or closing.
    #[error("the WAL is closed")]
    Closed,
}
