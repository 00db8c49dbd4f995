//! What can go wrong, said once and for the reader: each message names the thing and the cause.

use std::sync::Arc;

use alluvium_device::{DeviceError, ReserveError};

use crate::LogOffset;

/// Whatever a `visit` callback fails with; handed back as [`OpenError::Visit`].
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
    #[error("{device}: holds no WAL: it is not formatted")]
    NotFormatted {
        /// Name of the device.
        device: String,
    },
    /// Something else is there. `format` refuses to destroy it without `force`, and `open` cannot
    /// read it.
    #[error("{device}: holds {looks_like}, not an Alluvium WAL")]
    NotAWal {
        /// Name of the device.
        device: String,
        /// What was recognised.
        looks_like: String,
    },
    /// `format` found something that it would destroy.
    #[error("{device}: holds {looks_like}; formatting would destroy it (give `force` to do so)")]
    Occupied {
        /// Name of the device.
        device: String,
        /// What was recognised.
        looks_like: String,
    },
    /// There was a WAL, but no header slot can be trusted any more.
    #[error("{device}: the WAL's header is damaged: slot 0: {slot_0}; slot 1: {slot_1}")]
    HeaderDamaged {
        /// Name of the device.
        device: String,
        /// What slot 0 holds.
        slot_0: String,
        /// What slot 1 holds.
        slot_1: String,
    },
    /// Both slots carry the same epoch and generation, or differ in their WAL id: two writers, or a
    /// copied slot.
    #[error("{device}: the header slots contradict each other: {reason}")]
    HeaderConflict {
        /// Name of the device.
        device: String,
        /// Both claims.
        reason: String,
    },
    /// Another writer has opened the WAL, or formatted it, since its header was read here. Nothing
    /// more is written.
    #[error("{device}: refusing to open it: {cause}")]
    Fenced {
        /// Name of the device.
        device: String,
        /// Who has it now.
        cause: WalError,
    },
    /// The log was marked by who used it last, and [`Options::mark`](crate::Options::mark) is not
    /// ahead of that: what the opener knows is older than the log.
    #[error(
        "{device}: the WAL has the mark {found}, and is to be opened with {given}, which is not ahead of it"
    )]
    MarkNotAhead {
        /// Name of the device.
        device: String,
        /// In the header.
        found: u64,
        /// By the options.
        given: u64,
    },
    /// Written by a later version of Alluvium.
    #[error(
        "{device}: the WAL has {found}; this program knows format version {known} and no flags"
    )]
    FutureVersion {
        /// Name of the device.
        device: String,
        /// Version and flags on the device.
        found: String,
        /// The newest that is known here.
        known: u32,
    },
    /// The WAL claims, or was asked to take, more bytes than the device has.
    #[error("{device}: capacity of {wanted_bytes} bytes, the device has {device_bytes}")]
    LargerThanDevice {
        /// Name of the device.
        device: String,
        /// Asked for, or stated by the header.
        wanted_bytes: u64,
        /// There.
        device_bytes: u64,
    },
    /// An option is out of its range. The message names the option, the value and the range.
    #[error("{0}")]
    InvalidOption(String),
    /// A part of the log could not be read where it decides whether the log ends there. To go on
    /// would risk dropping acknowledged records behind it.
    #[error(
        "the log cannot be read at {at}, where it may end; refusing to take that for the end: {cause}"
    )]
    EndUnreadable {
        /// The first logical offset that could not be read.
        at: LogOffset,
        /// What the device said.
        cause: DeviceError,
    },
    /// A log cannot be brought into a ring of another size as it lies now. Give more of it up
    /// (`trim`) and try again.
    #[error(
        "the WAL cannot be resized: {reason} ({live_bytes} bytes of log, a new ring of {ring_bytes} bytes); let it be trimmed, then try again"
    )]
    ResizeBlocked {
        /// From the page of the trim offset to that of the end.
        live_bytes: u64,
        /// Of the new ring.
        ring_bytes: u64,
        /// What is in the way.
        reason: String,
    },
    /// A thread of the WAL could not be started. The WAL was recovered, and can be opened again.
    #[error("{0}")]
    Thread(String),
    /// The callback failed.
    #[error("the reader of the log failed at {at}: {source}")]
    Visit {
        /// The record that it was given.
        at: LogOffset,
        /// What it said.
        source: VisitError,
    },
}

/// Why an open WAL can no longer do what it was asked. Cheap to clone: everybody who waits gets the
/// same one.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WalError {
    /// A write or a flush failed. The WAL has latched: nothing is acknowledged any more until it is
    /// opened again.
    #[error("the WAL has failed: {0}")]
    Device(#[source] DeviceError),
    /// The WAL was closed.
    #[error("the WAL is closed")]
    Closed,
    /// `trim` was asked to go past what is durable. Nothing has changed.
    #[error("cannot trim to {to}: the log is durable only up to {durable}")]
    TrimPastDurable {
        /// Asked for.
        to: LogOffset,
        /// The bound.
        durable: LogOffset,
    },
    /// Another writer has opened the WAL, or it was formatted. Nothing more is written. What was
    /// not acknowledged may be lost.
    #[error("the WAL was taken over: {found}")]
    Fenced {
        /// What stands in a header slot, or which write the device has refused because another host
        /// has reserved it.
        found: String,
    },
    /// A thread panicked inside the WAL, which is a defect of it. Nothing is acknowledged any more
    /// until it is opened again.
    #[error("the WAL has failed: a thread panicked inside it")]
    Panicked,
    /// A thread of the WAL could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] Arc<std::io::Error>),
}

impl WalError {
    /// Of a write or flush that has failed.
    pub(crate) fn of(cause: DeviceError) -> Self {
        match cause.is_reserved() {
            true => Self::Fenced { found: cause.to_string() },
            false => Self::Device(cause),
        }
    }
}

/// Why the log has not got the capacity that [`Wal::request_resize`](crate::Wal::request_resize)
/// asked for. It keeps the one that it has, and works on.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// The device has to be made larger first.
    #[error("a capacity of {capacity_bytes} bytes is more than the device has: {device_bytes}")]
    LargerThanDevice {
        /// Asked for.
        capacity_bytes: u64,
        /// There.
        device_bytes: u64,
    },
    /// No log can have it, or none with these options.
    #[error("a capacity of {capacity_bytes} bytes is refused: {reason}")]
    Refused {
        /// Asked for.
        capacity_bytes: u64,
        /// What is in the way.
        reason: String,
    },
    /// A later request came before this one could take effect.
    #[error("replaced by a request for {capacity_bytes} bytes")]
    Replaced {
        /// Asked for instead.
        capacity_bytes: u64,
    },
    /// The WAL has failed or is closed. After a crash it has the one capacity or the other.
    #[error(transparent)]
    Failed(#[from] WalError),
}

/// Why [`Wal::append`](crate::Wal::append) took nothing. The WAL is unchanged in every case.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AppendError {
    /// No room in the ring until something is trimmed.
    #[error("the WAL is full: {needed_bytes} bytes needed, {free_bytes} of {ring_bytes} free")]
    OverCapacity {
        /// Of this record, with its header and the padding that may follow it.
        needed_bytes: u64,
        /// Left in the ring.
        free_bytes: u64,
        /// Size of the ring; of the smaller one, if the log is to shrink.
        ring_bytes: u64,
    },
    /// Too much is appended that is not durable yet; wait for
    /// [`Wal::wait_room`](crate::Wal::wait_room).
    #[error(
        "the WAL's window is full: {needed_bytes} bytes needed, {free_bytes} of {window_bytes} free"
    )]
    WindowFull {
        /// Of this record, with its header and the padding that may follow it.
        needed_bytes: u64,
        /// Left in the window.
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
