//! The catalog: which streams and objects exist, and the owner's metadata, each change atomic and
//! durable.
//!
//! The catalog decides nothing. What becomes of an object when a stream goes is decided by the
//! store, which states it as a [`Change`]; so a catalog is a small, dumb, durable thing, and
//! another one (a shared one, for several brokers) is quick to write: it has to pass
//! [`conformance`].

use std::collections::BTreeMap;

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

/// One change; [`Catalog::commit`] applies a list of them in order, atomically.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A new stream, of epoch 0. Its id must come from [`crate::Store::new_stream_ids`] in this
    /// run, and serves for one stream only: batches of a stream that was deleted may still be in
    /// the WAL.
    CreateStream {
        /// Id.
        id: StreamId,
        /// The owner's tag for it, handed to [`crate::Fold`]: 0 = log, 1 = state (kept as a
        /// checkpoint only: after each upload its batches are dropped instead of being written to
        /// an object).
        kind: u8,
    },
    /// Remove a stream with its checkpoint; its objects' ranges become garbage.
    DeleteStream {
        /// Which.
        id: StreamId,
        /// The writer's; must be the stream's.
        epoch: StreamEpoch,
    },
    /// Records before `to` are gone: the start moves there, ranges that end at or before it are
    /// dropped. Does nothing if the start is there or later.
    TrimStream {
        /// Which.
        id: StreamId,
        /// The writer's; must be the stream's.
        epoch: StreamEpoch,
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
    /// Remove a metadata key; nothing happens if there is none.
    DeleteMeta(String),

    // What follows is for the store itself; `Store::commit` refuses it.
    /// The WAL that this catalog belongs to.
    BindWal(Uuid),
    /// All stream ids below this one have been handed out. Never goes back.
    NextStreamId(StreamId),
    /// A stream has a writer with this epoch, which becomes the stream's. Does nothing if it is
    /// that already. [`crate::Store::open_stream`] does it.
    OpenStream {
        /// Which.
        id: StreamId,
        /// Not older than the stream's.
        epoch: StreamEpoch,
    },
    /// An object is complete in the object store. Objects that are written at the same time are
    /// added in any order, so its id may be below [`Snapshot::next_object_id`]. Whoever gives ids
    /// out sees to it that none serves twice.
    AddObject(ObjectInfo),
    /// A stream was uploaded up to an offset. Replaces its checkpoint and adds its range, unless
    /// that ends at or before the start.
    Uploaded(Uploaded),
    /// All that the WAL holds before this offset is in this catalog or needs to be nowhere: the WAL
    /// may be trimmed up to here. Takes the place of what was said before. It goes back only where
    /// the log itself has: its end was damaged.
    LogUploaded(LogOffset),
    /// Ranges of a stream, neighbours, lie together in another object now.
    Replaced(Replaced),
    /// Both headers of the WAL are known to have this mark. Does nothing if a greater one is known.
    WalMarked(u64),
    /// A run of the store begins with this commit. The last [`LIVES_KEPT`] are remembered.
    BeginLife {
        /// Random. Nil is no life: only the version is raised.
        id: Uuid,
        /// The catalog's version becomes this one, unless it is further already.
        version: u64,
    },
    /// An object was deleted from the object store: forget it. Nothing happens if it is not known.
    ForgetObject(ObjectId),
}

/// A stream's part in an upload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uploaded {
    /// Which.
    pub stream: StreamId,
    /// Everything before it is in objects, or needs no object.
    pub uploaded_end: StreamOffset,
    /// The stream's start, which moves there unless it is further already. Only a stream that is
    /// kept as its checkpoint moves with its uploads.
    pub start: StreamOffset,
    /// The checkpoint at `uploaded_end`; `None` removes it.
    pub checkpoint: Option<Bytes>,
    /// Where the batches are; `None` if nothing of the stream had to be written.
    pub range: Option<ObjectRange>,
}

/// A stream's part in a compaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replaced {
    /// Which.
    pub stream: StreamId,
    /// Where the ranges start that are gone: neighbours, at least one, ascending.
    pub old: Vec<StreamOffset>,
    /// What they held, as far as it is behind the stream's start.
    pub new: ObjectRange,
}

/// A stream's part of an object. An object has at most one range of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectRange {
    /// Which object.
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

/// What has to be known of an object to read it. Layout: `docs/format/object.md`.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ObjectInfo {
    /// Its number.
    pub id: ObjectId,
    /// Its path in the object store.
    pub name: String,
    /// Its length.
    pub size_bytes: u64,
    /// Where its index starts.
    pub index_position: u64,
    /// Length of its index.
    pub index_bytes: u64,
    /// CRC32C of its index.
    pub index_crc32c: u32,
    /// When it was written, milliseconds since the Unix epoch, or the youngest of what it was
    /// compacted from: the age of records without a timestamp, and which objects compaction takes
    /// first.
    pub created_at_ms: i64,
    /// 0 if an upload has written it, else one more than the greatest of those it was compacted
    /// from.
    #[serde(default)]
    pub generation: u8,
    /// Payload that was written, in bytes; 0 if that is not known.
    #[serde(default)]
    pub payload_bytes: u64,
}

/// How many runs of the store a catalog remembers.
pub const LIVES_KEPT: usize = 1000;

/// A run of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    /// The version that the catalog had before: the last one of the life before it.
    pub after_version: u64,
    /// Random.
    pub id: Uuid,
}

/// All that a catalog holds.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Snapshot {
    /// See [`Change::BindWal`].
    pub wal_id: Option<Uuid>,
    /// The next stream id to hand out.
    pub next_stream_id: u64,
    /// Greater than the id of every object that was ever added.
    pub next_object_id: u64,
    /// See [`Change::LogUploaded`]. A WAL that is trimmed further was trimmed with a newer catalog
    /// than this one.
    pub uploaded_log: LogOffset,
    /// Raised by each commit. A WAL whose mark is greater was in use with a newer catalog than this
    /// one.
    pub version: u64,
    /// See [`Change::BeginLife`]; in order.
    pub lives: Vec<Life>,
    /// See [`Change::WalMarked`]; never goes back. A WAL whose mark is less is an old copy.
    pub wal_mark: u64,
    /// Streams by id.
    pub streams: BTreeMap<StreamId, StreamRow>,
    /// Objects by id. Those that no range refers to are garbage: to be deleted from the object
    /// store, then forgotten.
    pub objects: BTreeMap<ObjectId, ObjectInfo>,
    /// The owner's metadata.
    pub meta: BTreeMap<String, Vec<u8>>,
}

/// What a catalog holds of a stream.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct StreamRow {
    /// See [`Change::CreateStream`].
    pub kind: u8,
    /// The newest with which it was opened.
    pub epoch: StreamEpoch,
    /// Records before it are gone.
    pub start: StreamOffset,
    /// See [`Uploaded::uploaded_end`].
    pub uploaded_end: StreamOffset,
    /// See [`Uploaded::checkpoint`].
    pub checkpoint: Option<Bytes>,
    /// In offset order, none overlapping another.
    pub ranges: Vec<ObjectRange>,
}

/// What an operator does about a damaged catalog.
pub(crate) const RESTORE: &str = "Restore it from a copy, or from an export by `alluvium catalog \
                                  import`, of this log's last state";

/// A catalog operation failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CatalogError {
    /// The changes contradict what is there. Nothing has changed.
    #[error("catalog: refused: {0}")]
    Refused(String),
    /// The disk has no space for the changes. Nothing has changed, and others may succeed.
    #[error("catalog: no space: {0}")]
    Full(String),
    /// The catalog could not be opened, read or written. Whether changes have become durable is not
    /// known.
    #[error("catalog: {0}")]
    Failed(String),
}

/// Where streams, objects and metadata are recorded.
pub trait Catalog: Send + Sync + 'static {
    /// All that was committed. Blocking.
    fn load(&self) -> Result<Snapshot, CatalogError>;

    /// Apply all of `changes`, in order, or none; durable when it returns. Blocking. Raises
    /// [`Snapshot::version`] by one, also if there is nothing to change, or to what
    /// [`Change::BeginLife`] says, and returns it.
    ///
    /// Refused with nothing changed: creating a stream that exists or whose id was never handed
    /// out; deleting, trimming or uploading one that does not exist, or opening it; moving an
    /// uploaded end, an epoch or the next stream id back; deleting or trimming with another epoch
    /// than the stream's; adding an object whose id is that of another one; a range of an object
    /// that is not there or that does not follow the stream's last one; replacing ranges that are
    /// not there, or not neighbours, or by one that overlaps others. Nothing has changed either if
    /// there is no space ([`CatalogError::Full`]). After any other error the changes may or may not
    /// have become durable, and the store uses this catalog no more: it has to be opened anew.
    fn commit(&self, changes: &[Change]) -> Result<u64, CatalogError>;

    /// Why changes that add something may be refused for want of space, as the last commit, or the
    /// opening, has found it. None if they will not be.
    fn shortage(&self) -> Option<String> {
        None
    }
}

/// The changes that a catalog refuses, in words. Shared by the implementations so that they agree.
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
    /// Whether a writer's change is one of the stream's writer.
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
    /// Look at a [`Replaced`]: `found` are the stream's ranges from the first that is to go on, in
    /// order, one more than are to go if there are so many, and `before` is the one in front of
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
            return refused("they are not there, or not neighbours");
        }
        let after = found.get(old.len());
        if new.start >= new.end
            || before.is_some_and(|before| before.end > new.start)
            || found[old.len() - 1].end < new.end
            || after.is_some_and(|after| after.start < new.end)
        {
            return refused("it is empty, or reaches beyond them");
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
