//! The catalog: which streams and objects exist, and the owner's metadata. Each change is atomic
//! and durable.
//!
//! The catalog makes no decisions. The store decides, for example, what happens to an object when a
//! stream is deleted, and states it as a [`Change`]. So a catalog is small and simple, and another
//! one (such as a shared one for several brokers) is quick to write: it must pass [`conformance`].

use std::collections::BTreeMap;
use std::str::FromStr;

use alluvium_wal::LogOffset;
use bytes::Bytes;
use uuid::Uuid;

use crate::types::{ObjectId, StreamEpoch, StreamId, StreamOffset};

pub mod conformance;
pub mod export;
mod memory;
mod redb;

pub use memory::MemoryCatalog;
pub use redb::RedbCatalog;

/// The key prefix of the store's own metadata.
pub(crate) const OWN_META_PREFIX: &str = "stream/";

/// Returns the decimal number under a key of the store's own metadata, if there is one.
pub(crate) fn own_number<T: FromStr>(meta: &BTreeMap<String, Vec<u8>>, key: &str) -> Option<T> {
    std::str::from_utf8(meta.get(key)?).ok()?.parse().ok()
}

/// One change; [`Catalog::commit`] applies a list of them in order, atomically.
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

    // The following changes are made only by the store itself; `Store::commit` refuses them.
    /// Binds the catalog to this WAL.
    BindWal(Uuid),
    /// Records that all stream ids below this one have been handed out. Never decreases.
    NextStreamId(StreamId),
    /// Sets the epoch of a stream to that of its new writer. Does nothing if it is that already.
    /// Made by [`crate::Store::open_stream`].
    OpenStream {
        /// The stream.
        id: StreamId,
        /// The writer's epoch; not older than the stream's.
        epoch: StreamEpoch,
    },
    /// Adds an object that is complete in the object store. Objects that are written concurrently
    /// are added in any order, so its id may be below [`Snapshot::next_object_id`]. The component
    /// that assigns ids ensures that none is used twice.
    AddObject(ObjectInfo),
    /// Records the upload of a stream up to an offset. Replaces its checkpoint and adds its range,
    /// unless that ends at or before the start.
    Uploaded(Uploaded),
    /// Sets the log offset below which everything in the WAL is in this catalog or not needed any
    /// more: the WAL may be trimmed up to here. It decreases only if the log itself does, because
    /// its end was damaged.
    LogUploaded(LogOffset),
    /// Replaces neighbouring ranges of a stream by one range in another object.
    Replaced(Replaced),
    /// Records that both headers of the WAL have this mark. Does nothing if a greater one is
    /// recorded.
    WalMarked(u64),
    /// Begins a run of the store with this commit. The last [`INCARNATIONS_KEPT`] runs are kept.
    BeginIncarnation {
        /// Random. Nil if no run begins: only the version is raised.
        id: Uuid,
        /// The new version of the catalog, unless that is already greater.
        version: u64,
    },
    /// Removes an object that was deleted from the object store. Does nothing if there is none.
    RemoveObject(ObjectId),
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
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ObjectInfo {
    /// Its number.
    pub id: ObjectId,
    /// Its path in the object store.
    pub name: String,
    /// Its length.
    pub size_bytes: u64,
    /// Position of its index.
    pub index_position: u64,
    /// Length of its index.
    pub index_bytes: u64,
    /// CRC32C of its index.
    pub index_crc32c: u32,
    /// When it was written, in milliseconds since the Unix epoch; for a compacted object the newest
    /// time of its sources. Used as the age of records without a timestamp, and for the order of
    /// object compaction.
    pub created_at_ms: i64,
    /// 0 if written by an upload, otherwise one more than the greatest generation of its sources.
    #[serde(default)]
    pub generation: u8,
    /// Bytes of payload that were written; 0 if unknown.
    #[serde(default)]
    pub payload_bytes: u64,
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

/// The complete contents of a catalog.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Snapshot {
    /// See [`Change::BindWal`].
    pub wal_id: Option<Uuid>,
    /// The next stream id to hand out.
    pub next_stream_id: u64,
    /// Greater than the id of every object that was ever added.
    pub next_object_id: u64,
    /// See [`Change::LogUploaded`]. A WAL that is trimmed further was in use with a newer catalog
    /// than this one.
    pub uploaded_log: LogOffset,
    /// Raised by each commit. A WAL with a greater mark was in use with a newer catalog than this
    /// one.
    pub version: u64,
    /// See [`Change::BeginIncarnation`]; in order.
    pub incarnations: Vec<Incarnation>,
    /// See [`Change::WalMarked`]; never decreases. A WAL with a lower mark is an old copy.
    pub wal_mark: u64,
    /// Streams by id.
    pub streams: BTreeMap<StreamId, StreamRow>,
    /// Objects by id. Those without a range are garbage: they are deleted from the object store and
    /// then removed here.
    pub objects: BTreeMap<ObjectId, ObjectInfo>,
    /// The owner's metadata.
    pub meta: BTreeMap<String, Vec<u8>>,
}

/// What a catalog records of a stream.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct StreamRow {
    /// See [`Change::CreateStream`].
    pub kind: u8,
    /// The newest epoch with which it was opened.
    pub epoch: StreamEpoch,
    /// The offset of the first readable record.
    pub start: StreamOffset,
    /// See [`Uploaded::uploaded_end`].
    pub uploaded_end: StreamOffset,
    /// See [`Uploaded::checkpoint`].
    pub checkpoint: Option<Bytes>,
    /// Its ranges in offset order, without overlaps.
    pub ranges: Vec<ObjectRange>,
}

/// Advice to an operator with a damaged catalog.
pub(crate) const RESTORE: &str = "Restore it from a copy of this log's last state, or import an \
                                  export of it with `alluvium catalog import`";

/// Why a catalog operation failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CatalogError {
    /// The changes contradict the contents. Nothing has changed.
    #[error("catalog: refused: {0}")]
    Refused(String),
    /// The disk has no space for the changes. Nothing has changed, and other changes may succeed.
    #[error("catalog: no space: {0}")]
    Full(String),
    /// The catalog could not be opened, read or written. It is unknown whether the changes are
    /// durable.
    #[error("catalog: {0}")]
    Failed(String),
}

/// The durable record of streams, objects and metadata.
pub trait Catalog: Send + Sync + 'static {
    /// Returns everything that was committed. Blocking.
    fn load(&self) -> Result<Snapshot, CatalogError>;

    /// Applies all of `changes` in order, or none; they are durable when it returns. Blocking.
    /// Raises [`Snapshot::version`] by one, also for an empty list, or to the version of a
    /// [`Change::BeginIncarnation`], and returns it.
    ///
    /// Refused with nothing changed: creating a stream that exists or whose id was never handed
    /// out; deleting, trimming, uploading or opening one that does not exist; moving an uploaded
    /// end, an epoch or the next stream id back; deleting or trimming with another epoch than the
    /// stream's; adding an object with the id of another one; a range in an object that does not
    /// exist or that does not follow the stream's last range; replacing ranges that do not exist or
    /// are not neighbours, or by one that overlaps others. Nothing has changed either if there is
    /// no space ([`CatalogError::Full`]). After any other error it is unknown whether the changes
    /// are durable, and the store does not use this catalog any more: it must be opened again.
    fn commit(&self, changes: &[Change]) -> Result<u64, CatalogError>;

    /// Returns why changes that add something may be refused for lack of space, as of the last
    /// commit or the opening. `None` if they are not refused.
    fn shortage(&self) -> Option<String> {
        None
    }
}

/// Errors for refused changes, shared by the implementations so that they agree.
mod refusal {
    use super::{
        CatalogError, ObjectId, ObjectRange, Replaced, StreamEpoch, StreamId, StreamOffset,
    };

    pub(super) fn id_not_handed_out(id: StreamId, next: u64) -> CatalogError {
        CatalogError::Refused(format!(
            "stream id {id} was never handed out, the next one is {next}"
        ))
    }
    pub(super) fn exists(id: StreamId) -> CatalogError {
        CatalogError::Refused(format!("stream {id} exists already"))
    }
    pub(super) fn no_stream(id: StreamId) -> CatalogError {
        CatalogError::Refused(format!("there is no stream {id}"))
    }
    /// Checks that a writer's epoch is that of the stream.
    pub(super) fn of_epoch(
        id: StreamId,
        epoch: StreamEpoch,
        newest: StreamEpoch,
    ) -> Result<(), CatalogError> {
        if epoch == newest {
            return Ok(());
        }
        Err(CatalogError::Refused(format!(
            "epoch {epoch} may not change stream {id}, which was opened with epoch {newest}"
        )))
    }
    pub(super) fn no_object(id: ObjectId) -> CatalogError {
        CatalogError::Refused(format!("there is no object {id}"))
    }
    pub(super) fn object_exists(id: ObjectId) -> CatalogError {
        CatalogError::Refused(format!("object {id} exists already"))
    }
    pub(super) fn back(what: &str, from: u64, to: u64) -> CatalogError {
        CatalogError::Refused(format!("{what} cannot go back from {from} to {to}"))
    }
    /// Checks a [`Replaced`]: `found` are the stream's ranges from the first replaced one on, in
    /// order, one more than are replaced if there is one, and `before` is the range in front of
    /// them.
    pub(super) fn of_replaced(
        Replaced { stream, old, new }: &Replaced,
        before: Option<&ObjectRange>,
        found: &[ObjectRange],
    ) -> Result<(), CatalogError> {
        let refused = |why: &str| {
            Err(CatalogError::Refused(format!(
                "range {}..{} of stream {stream} cannot replace others: {why}",
                new.start, new.end
            )))
        };
        if old.is_empty() || !old.iter().eq(found.iter().take(old.len()).map(|range| &range.start))
        {
            return refused("they do not exist or are not neighbours");
        }
        let after = found.get(old.len());
        if new.start >= new.end
            || before.is_some_and(|before| before.end > new.start)
            || found[old.len() - 1].end < new.end
            || after.is_some_and(|after| after.start < new.end)
        {
            return refused("it is empty or reaches beyond them");
        }
        Ok(())
    }
    pub(super) fn not_after(
        id: StreamId,
        range: &ObjectRange,
        last_end: StreamOffset,
    ) -> CatalogError {
        CatalogError::Refused(format!(
            "range {}..{} of stream {id} does not follow the last one, which ends at {last_end}",
            range.start, range.end
        ))
    }
}
