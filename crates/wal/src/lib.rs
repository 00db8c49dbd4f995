#![doc = include_str!("../README.md")]
//! # Example: write, trim and recover
//!
//! ```
//! use alluvium_device::OpenOptions;
//! use alluvium_wal::{FormatOptions, Options, Wal};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("wal");
//! // A file of 1 MiB, or a block device.
//! let target = OpenOptions { create_bytes: Some(1 << 20), ..OpenOptions::default() };
//! let device = alluvium_device::open(&path, &target)?;
//! Wal::format(&device, &FormatOptions::default())?;
//!
//! let options = Options {
//!     window_bytes: 256 << 10,
//!     block_bytes: 64 << 10,
//!     max_record_bytes: 64 << 10,
//!     ..Options::default()
//! };
//! let (wal, report) = Wal::open(device, &options, None, &mut |_| Ok(()))?;
//! assert_eq!(report.records, 0);
//! let first = wal.append(&[b"header, ", b"payload"])?;
//! let second = wal.append(&[b"second"])?;
//! let keep_from = second.offset();
//! first.wait()?; // or `.await`
//! second.wait()?;
//! wal.trim(..keep_from).wait()?;
//! drop(wal); // as in a crash of the process
//!
//! let device = alluvium_device::open(&path, &target)?;
//! let mut seen = Vec::new();
//! let (wal, report) = Wal::open(device, &options, None, &mut |record| {
//!     seen.push(record.payload);
//!     Ok(())
//! })?;
//! assert_eq!(seen, ["second"]);
//! assert!(!report.clean_shutdown && report.damage.is_empty());
//! wal.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Reading the code
//!
//! A record's path is [`Wal::append`], `writer.rs`, `writer/group.rs` (group commit), `block.rs`,
//! the device, and back through `writer.rs` and `wait.rs`.
//!
//! # Modules
//!
//! - `layout.rs`, `record.rs`, `header.rs`, `crc.rs`: bytes of the format; checksums combined from
//!   those of parts
//! - `window.rs`, `block.rs`: cursors and their order, the window; blocks: pad, cut, carry
//! - `batch.rs`: the types of [`Wal::append_batch`]
//! - `writer.rs`, `writer/`: the open log and its headers; group commit; online resize
//! - `wait.rs`, `limit.rs`: futures; limits on IOPS and bandwidth
//! - `recovery.rs`, `tape.rs`: the walk; reading ahead
//! - `format.rs`, `probe.rs`, `resize.rs`: creating a WAL; recognizing other contents; offline
//!   resize
#![forbid(unsafe_code)]

mod batch;
mod block;
mod crc;
mod error;
mod format;
mod header;
mod layout;
mod limit;
#[cfg(all(test, loom))]
mod models;
mod options;
mod probe;
mod record;
mod recovery;
mod report;
mod resize;
mod stats;
mod sync;
mod tape;
mod wait;
mod wal;
mod window;
mod writer;

pub use alluvium_device::DeviceOffset;
pub use batch::{Parts, Placed};
pub use crc::crc32c_concat;
pub use error::{AppendError, OpenError, ResizeError, VisitError, WalError};
pub use layout::LogOffset;
pub use options::{FormatOptions, Options};
pub use probe::looks_like;
pub use report::{Damage, DamagedRange, HeaderInfo, Inspection, Record, RecoveryReport, Slot};
pub use stats::{DurationHistogram, Stats};
pub use wal::{Append, Durable, Resizing, Space, Trim, Wal};

/// A progress callback of a long operation: bytes done, and an estimate of the total that may be
/// too low.
pub type Progress = std::sync::Arc<dyn Fn(u64, u64) + Send + Sync>;
