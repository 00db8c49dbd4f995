//! The chain: the catalog in the object store. `docs/format/chain.md`.
//!
//! From the top to the bottom; no import points up in this list.
//!
//! - `fuzz.rs`: the checks of the fuzz target
//! - `writer.rs`, `clean_up.rs`: the one writer of a chain: fences and deltas; deletion
//! - `reader.rs`: a reader that follows it
//! - `salvage.rs`: what is left of a damaged chain
//! - `objects.rs`: its objects in the object store; loading
//! - `snapshot.rs`, `state.rs`: the bytes of a snapshot; the state of the catalog
//! - `entry.rs`, `body.rs`, `change.rs`: fences and deltas; their bodies; the changes in them

mod body;
mod change;
mod clean_up;
mod entry;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod objects;
mod reader;
mod salvage;
mod snapshot;
mod state;
mod writer;

pub use body::{Body, BodyHeader, Hints, ObjectKind, Recorded};
pub use change::{ChainChange, ChainObject};
pub(crate) use change::{decode_recorded, encode_recorded};
pub use clean_up::{CleanUp, DELETION_AGE};
pub use entry::Entry;
pub use objects::{Chain, SnapshotName, list_stores, list_stores_with_data};
pub(crate) use reader::{ChainChanges, ChainReader};
pub use salvage::{LostEntries, Salvaged};
pub use snapshot::Snapshot;
pub use state::{ChainState, ChainStream, Gaps, Head};
pub(crate) use writer::RESERVED_STREAMS;
pub use writer::{By, ChainWriter, Delta, Fence, FenceError, PublishError};
