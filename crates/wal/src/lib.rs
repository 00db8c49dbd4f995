//! Delta WAL. Layout, protocol and crash argument: `docs/format/wal.md`.
#![forbid(unsafe_code)]

mod block;
mod error;
mod format;
mod header;
mod layout;
mod limit;
mod options;
mod probe;
mod record;
mod recovery;
mod report;
mod stats;
mod tape;
mod wait;
mod wal;
mod window;
mod writer;

pub use alluvium_device::DeviceOffset;
pub use error::{AppendError, OpenError, VisitError, WalError};
pub use layout::LogOffset;
pub use options::{FormatOptions, Options};
pub use report::{Damage, HeaderInfo, Inspection, Record, RecoveryReport, Slot};
pub use stats::Stats;
pub use wal::{Append, Durable, Room, Trim, Wal};

/// Told how far a long operation is: bytes done and, at most an estimate, bytes in total.
pub type Progress = std::sync::Arc<dyn Fn(u64, u64) + Send + Sync>;
