#![doc = include_str!("../README.md")]
//! # Example: the life cycle of a cache
//!
//! ```
//! use alluvium_journal::{Cache, Options};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path();
//! let options = Options { journal_bytes: 1 << 20, memory_bytes: 8 << 20, ..Options::default() };
//! let cache = Cache::open(path, options.clone())?;
//! cache.put(b"key", b"value")?;
//! let value = cache.get(b"key")?;
//! assert!(!cache.put_if_absent(b"key", b"other", None)?);
//! cache.put(b"key", b"new")?;
//! assert_eq!(value.as_deref(), Some(&b"value"[..])); // a snapshot: later writes do not change it
//! let values = cache.get_many(&[&b"key"[..], b"none"]); // one result per key
//! assert_eq!(values[0].as_ref().unwrap().as_deref(), Some(&b"new"[..]));
//! assert!(matches!(values[1], Ok(None)));
//! cache.close()?; // like drop, but reports whether everything was written
//!
//! let cache = Cache::open(path, options)?;
//! assert_eq!(cache.recovered().entries, 1);
//! for entry in cache.iter() {
//!     let entry = entry?;
//!     assert_eq!((entry.key(), entry.value()), (&b"key"[..], &b"new"[..]));
//! }
//! assert!(cache.delete(b"key")?);
//! assert!(!cache.contains(b"key")?);
//! # Ok(())
//! # }
//! ```
//!
//! # Modules
//!
//! - `cache.rs`, `cache/`, `options.rs`, `error.rs`, `stats.rs`: the public interface, and reads
//! - `shared.rs`, `swap.rs`: the write path; conditional writes
//! - `index.rs`, `index/`, `position.rs`, `hash.rs`: the index and its entries; the grower thread
//! - `journal.rs`, `journals.rs`, `pool.rs`, `disk_budget.rs`: a journal and its counts; the table
//!   of journals; memory and disk budgets
//! - `record.rs`, `hint.rs`, `frames.rs`, `codec.rs`, `fields.rs`: bytes of the format: records,
//!   hints, compressed journals
//! - `walk.rs`, `pieces.rs`, `iter.rs`, `scan.rs`: visiting a journal, past damage and in pieces;
//!   iteration; scan
//! - `dead_marks.rs`, `blocks.rs`: marks of dead records; cached records and frames
//! - `flush.rs`: the flusher thread: writes, syncs, seals
//! - `allocator.rs`: the allocator thread: the next journal, before it is needed
//! - `maintenance.rs`, `compact.rs`, `compact_all.rs`, `expired.rs`, `promote.rs`, `compress.rs`,
//!   `free_files.rs`: the maintenance thread: eviction, compaction, expiry, promotion, compression
//! - `pace.rs`, `clock.rs`: how far writers may be ahead of the disk with an interval; the clock
//!   for expiry
//! - `unreadable.rs`, `memory.rs`: unreadable pages are damage; fallible allocation
//! - `open.rs`, `recover.rs`, `inspect.rs`, `clear.rs`, `files.rs`: opening and recovery;
//!   inspection; removal; the directory, real and simulated
#![forbid(unsafe_code)]

mod allocator;
mod blocks;
mod cache;
mod clear;
mod clock;
mod codec;
mod compact;
mod compact_all;
mod compress;
mod dead_marks;
#[cfg(all(feature = "bench", not(loom)))]
pub mod directory;
mod disk_budget;
mod error;
mod expired;
mod fetch;
mod fields;
mod files;
mod flush;
mod frames;
mod free_files;
#[cfg(all(any(test, fuzzing), not(loom)))]
#[doc(hidden)]
pub mod fuzz;
mod hash;
mod hint;
mod index;
mod inspect;
mod iter;
mod journal;
mod journals;
mod maintenance;
mod memory;
mod open;
mod options;
mod pace;
mod pieces;
mod pool;
mod position;
mod promote;
mod record;
mod recover;
mod scan;
mod shared;
#[cfg(all(feature = "sim", not(loom)))]
pub mod sim;
mod stats;
mod swap;
mod sync;
#[cfg(all(test, not(loom)))]
mod tests;
mod unreadable;
mod waker;
mod walk;

pub use cache::{Cache, Lookup, Value};
pub use clear::{SetAside, clear, files_set_aside};
pub use compact_all::Compacted;
pub use error::{Error, Result};
pub use inspect::{HintState, JournalReport, inspect};
pub use iter::{Entry, Iter};
pub use open::Recovered;
pub use options::{Compression, Contents, Durability, Options, WhenFull};
pub use position::JournalNumber;
pub use record::MAX_KEY_BYTES;
pub use scan::{ScanCursor, Scanned};
pub use stats::Stats;
pub use swap::{Swapped, Ttl, When};
