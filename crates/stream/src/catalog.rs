//! What the catalog records: streams, objects, and the metadata of their owner. It is a chain of
//! objects in the object store and records in the WAL: [`crate::chain`].

use bytes::Bytes;
use uuid::Uuid;

use crate::object::IndexPlace;
pub use crate::types::MAX_LABEL_BYTES;
use crate::types::{ObjectId, StreamEpoch, StreamId, StreamOffset};

/// One change by the owner of the streams; [`crate::Store::commit`] applies a list of them in
/// order, atomically.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Creates a stream with epoch 0. Its id must come from [`crate::Store::new_stream_ids`] in
    /// this run and is for one stream only: batches of a deleted stream may still be in the WAL.
    CreateStream {
        /// Its id.
        id: StreamId,
        /// The owner's tag for it, passed to [`crate::Fold`]: 0 = log, 1 = state (only the
        /// checkpoint is kept: after each upload the stream's batches are dropped instead of being
        /// written to an object).
        kind: u8,
        /// What the stream is, for tools that have nothing but the object store. Opaque, at most
        /// [`MAX_LABEL_BYTES`].
        label: Bytes,
    },
    /// Removes a stream with its checkpoint and ranges; objects without other ranges become
    /// garbage.
    DeleteStream {
        /// The stream.
        id: StreamId,
        /// The writer's epoch; must be the stream's.
        epoch: StreamEpoch,
    },
    /// Removes the records before `to`: the start moves there, and ranges that end at or before it
    /// are dropped. Does nothing if the start is there or later.
    TrimStream {
        /// The stream.
        id: StreamId,
        /// The writer's epoch; must be the stream's.
        epoch: StreamEpoch,
        /// The new start offset.
        to: StreamOffset,
    },
    /// Sets metadata of the store's owner (topics, configurations). Keys are UTF-8, sorted by byte.
    PutMeta {
        /// The key.
        key: String,
        /// The value.
        value: Vec<u8>,
    },
    /// Removes a metadata key; does nothing if there is none.
    DeleteMeta(String),
}

/// A stream's part in an upload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uploaded {
    /// The stream.
    pub stream: StreamId,
    /// Everything before it is in objects, or needs no object.
    pub uploaded_end: StreamOffset,
    /// The stream's start, which moves there unless it is already greater. Only for a stream of
    /// which only the checkpoint is kept do uploads move the start.
    pub start: StreamOffset,
    /// The checkpoint at `uploaded_end`; `None` removes it.
    pub checkpoint: Option<Bytes>,
    /// The range of the batches; `None` if nothing of the stream had to be written.
    pub range: Option<ObjectRange>,
}

/// A stream's part in an object compaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replaced {
    /// The stream.
    pub stream: StreamId,
    /// The starts of the replaced ranges: neighbours, at least one, ascending.
    pub old: Vec<StreamOffset>,
    /// The new range, with the contents of the replaced ones that are behind the stream's start.
    pub new: ObjectRange,
}

/// A stream's part of an object. An object has at most one range of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectRange {
    /// The object.
    pub object: ObjectId,
    /// First offset of the first batch.
    pub start: StreamOffset,
    /// Offset after the last batch.
    pub end: StreamOffset,
    /// Payload of the batches, in bytes.
    pub payload_bytes: u64,
    /// Greatest timestamp of the batches.
    pub max_timestamp_ms: i64,
}

/// What is needed to read an object. Layout: `docs/format/object.md`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Its number.
    pub id: ObjectId,
    /// Its path in the object store.
    pub name: String,
    /// Its length.
    pub size_bytes: u64,
    /// Its format version.
    pub format: u8,
    /// Position of its index; since format version 2 of the top of the index.
    pub index_position: u64,
    /// Length of its index; since format version 2 of the top.
    pub index_bytes: u64,
    /// CRC32C of its index; since format version 2 of the top.
    pub index_crc32c: u32,
    /// When it was written, in milliseconds since the Unix epoch; for a compacted object the newest
    /// time of its sources. Used as the age of records without a timestamp, and for the order of
    /// object compaction.
    pub created_at_ms: i64,
    /// 0 if written by an upload, otherwise one more than the greatest generation of its sources.
    pub generation: u8,
    /// Bytes of payload that were written; 0 if unknown.
    pub payload_bytes: u64,
}

impl ObjectInfo {
    /// Returns where its index is.
    pub(crate) fn index(&self) -> IndexPlace {
        IndexPlace {
            format: self.format.into(),
            position: self.index_position,
            len_bytes: self.index_bytes,
            crc32c: self.index_crc32c,
        }
    }
}

/// Number of runs of the store that a catalog keeps.
pub const INCARNATIONS_KEPT: usize = 1000;

/// A run of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Incarnation {
    /// The version of the catalog before this run: the last one of the previous run.
    pub after_version: u64,
    /// Random.
    pub id: Uuid,
}
