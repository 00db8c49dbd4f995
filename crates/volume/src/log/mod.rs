//! What a volume server keeps in its write-ahead log: `docs/format/volume-log.md`.

mod checkpoint;
mod error;
mod extents;
mod group;
mod record;
mod survey;
#[cfg(test)]
mod survey_tests;
#[cfg(test)]
mod tests;
mod writer;

pub use checkpoint::{Assembler, Checkpoint};
pub use error::RecordError;
pub(crate) use extents::Extents;
pub(crate) use group::MAX_PAIRS;
pub use group::{GroupCheckpoint, Pair};
pub use record::{
    CheckpointPart, Entries, Entry, EntryKind, FinishedChunks, Install, MAX_ENTRIES, Record,
    Tombstone,
};
pub use survey::{Loss, Survey, Surveyor};
pub(crate) use writer::{Encoded, Item, LogWriter, Promise, States};
