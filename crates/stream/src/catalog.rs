//! The catalog: which streams and objects exist, and the owner's metadata, each change atomic and durable.

use crate::types::{StreamId, StreamOffset};

/// One change; [`Catalog::commit`] applies a list of them atomically.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Change {
    /// A new stream. Its id must come from [`crate::Store::new_stream_ids`].
    CreateStream {
        /// Id.
        id: StreamId,
        /// The owner's tag for it, handed to [`crate::Fold`]: 0 = log, 1 = state (kept as a checkpoint only: after each upload
        /// its batches are dropped instead of being written to an object).
        kind: u8,
    },
    /// Remove a stream; its objects' ranges become garbage.
    DeleteStream(StreamId),
    /// Records before `to` are gone.
    TrimStream {
        /// Which.
        id: StreamId,
        /// New start offset.
        to: StreamOffset,
    },
    /// Metadata of the store's owner (topics, configs). Keys are UTF-8, sorted by byte.
    PutMeta {
        /// Key.
        key: String,
        /// Value.
        value: Vec<u8>,
    },
    /// Remove a metadata key.
    DeleteMeta(String),
    // The implementer adds: CommitObject { .. }, DeleteObject, SetCheckpoint, AllocateStreamIds, ...
}

/// A catalog operation failed.
#[derive(Debug, thiserror::Error)]
#[error("catalog: {0}")]
pub struct CatalogError(pub String);

/// Where streams, objects and metadata are recorded.
pub trait Catalog: Send + Sync + 'static {
    /// Apply all of `changes` or none; durable when it returns. Blocking.
    fn commit(&self, changes: &[Change]) -> Result<(), CatalogError>;
}

/// The embedded catalog, on `redb`.
pub struct RedbCatalog {}
