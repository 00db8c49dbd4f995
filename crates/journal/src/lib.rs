#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod blocks;
mod cache;
mod clear;
mod codec;
mod compact;
mod compress;
mod dead;
mod demand;
mod error;
mod expired;
mod fields;
mod files;
mod flush;
mod frames;
#[cfg(all(any(test, fuzzing), not(loom)))]
#[doc(hidden)]
pub mod fuzz;
mod hash;
mod hint;
mod index;
mod inspect;
mod iter;
mod journal;
mod keep;
mod open;
mod options;
mod pieces;
mod place;
mod pool;
mod promote;
mod record;
mod recover;
mod room;
mod scan;
mod shared;
#[cfg(all(feature = "sim", not(loom)))]
pub mod sim;
mod stats;
mod swap;
mod sync;
#[cfg(all(test, not(loom)))]
mod tests;
mod walk;

pub use cache::{Cache, Lookup, Value};
pub use clear::clear;
pub use demand::Compacted;
pub use error::{Error, Result};
pub use inspect::{HintState, JournalReport, inspect};
pub use iter::{Entry, Iter};
pub use open::Recovered;
pub use options::{Compression, Durability, Options, WhenFull};
pub use place::JournalNumber;
pub use record::MAX_KEY_BYTES;
pub use scan::{ScanCursor, Scanned};
pub use stats::Stats;
pub use swap::{Swapped, Ttl, When};
