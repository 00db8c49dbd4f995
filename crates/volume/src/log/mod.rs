//! What a volume server keeps in its write-ahead log: `docs/format/volume-log.md`.

mod checkpoint;
mod error;
mod group;
mod record;
mod survey;
#[cfg(test)]
mod survey_tests;
#[cfg(test)]
mod tests;

pub use checkpoint::{Assembler, Checkpoint};
pub use error::RecordError;
pub use group::{GroupCheckpoint, Pair};
pub use record::{
    CheckpointPart, Entries, Entry, EntryKind, FinishedChunks, Install, MAX_ENTRIES, Record,
    Tombstone,
};
pub use survey::{Loss, Survey, Surveyor};
