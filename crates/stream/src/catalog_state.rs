//! What is kept of the catalog in memory besides streams and objects.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

use alluvium_wal::LogOffset;
use parking_lot::Mutex;
use tokio::sync::Notify;
use uuid::Uuid;

use crate::chain::{ChainWriter, RESERVED_STREAMS, Recorded};
use crate::types::{ObjectId, StreamId};

/// The state of the catalog in memory.
pub(crate) struct CatalogState {
    /// The id of the store.
    pub(crate) store: Uuid,
    /// This run of the store.
    pub(crate) incarnation: Uuid,
    /// The opening of this run.
    pub(crate) opening: u32,
    /// Held over each change of the catalog and of the memory derived from it, so that both see the
    /// changes in the same order: from the append of a list of changes to its effects in memory.
    /// Never while the object store is waited for.
    pub(crate) committing: tokio::sync::Mutex<Unpublished>,
    /// Held while a delta is published.
    pub(crate) writer: tokio::sync::Mutex<ChainWriter>,
    /// The version of the last object of the chain whose effects are in memory. Changed under
    /// [`Self::writer`].
    pub(crate) published: AtomicU64,
    /// The version of the last catalog record in the WAL; 0 if there was none.
    pub(crate) recorded: AtomicU64,
    /// Wakes the task that publishes recorded lists.
    pub(crate) wanted: Notify,
    /// Wakes the task that writes snapshots.
    pub(crate) snapshot_wanted: Notify,
    pub(crate) ids: Ids,
    /// See [`crate::Store::term`].
    pub(crate) term: u32,
}

/// What the next delta has, in addition to its own changes.
pub(crate) struct Unpublished {
    /// The greatest version that was used.
    pub(crate) version: u64,
    /// Lists that are durable in the WAL and applied in memory.
    pub(crate) lists: Vec<Recorded>,
    /// Bytes of the records of these lists, at least.
    pub(crate) bytes: usize,
    /// Objects that were deleted from the object store.
    pub(crate) removed: Vec<ObjectId>,
    /// See [`crate::chain::BodyHeader::cut`].
    pub(crate) cut: LogOffset,
}

impl CatalogState {
    /// Returns the version of the last object of the chain whose effects are in memory. The WAL may
    /// have it as its mark.
    pub(crate) fn version(&self) -> u64 {
        self.published.load(Ordering::Acquire)
    }

    /// Returns a number for an object, unique in this run; objects may be committed in any order.
    /// The number becomes durable with the object or a later one. Otherwise it may be used again
    /// after a restart, under another name.
    pub(crate) fn new_object_id(&self) -> ObjectId {
        ObjectId(self.ids.next_object.fetch_add(1, Ordering::Relaxed))
    }
}

/// The next ids to hand out.
pub(crate) struct Ids {
    /// Changed under [`CatalogState::committing`].
    pub(crate) next_stream: AtomicU64,
    /// Ids below it were given to streams. Changed under [`CatalogState::committing`].
    pub(crate) given_streams: AtomicU64,
    /// Ids handed out in this run that have no stream yet. Any other id below `next_stream` may
    /// have batches in the WAL.
    pub(crate) fresh_streams: Mutex<HashSet<StreamId>>,
    /// Ids below it may be given to streams. Changed under [`CatalogState::committing`].
    pub(crate) reserved_streams: AtomicU64,
    pub(crate) next_object: AtomicU64,
}

impl Ids {
    /// Returns the next ids for streams; if they are not reserved, the end up to which they must
    /// be. Called under [`CatalogState::committing`].
    pub(crate) fn take_streams(&self, count: u32) -> Result<Vec<StreamId>, StreamId> {
        let first = self.next_stream.load(Ordering::Relaxed);
        let next = first + u64::from(count);
        if next > self.reserved_streams.load(Ordering::Relaxed) {
            return Err(StreamId(next + RESERVED_STREAMS));
        }
        self.next_stream.store(next, Ordering::Relaxed);
        let ids: Vec<_> = (first..next).map(StreamId).collect();
        self.fresh_streams.lock().extend(&ids);
        Ok(ids)
    }
}
