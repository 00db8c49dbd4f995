//! The catalog, and what is kept of it in memory besides streams and objects.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

use crate::catalog::Catalog;
use crate::types::{ObjectId, StreamId};

/// The catalog and its state in memory.
pub(crate) struct CatalogState {
    pub(crate) durable: Arc<dyn Catalog>,
    /// The catalog's version after the last commit whose effects are in memory or are about to be.
    pub(crate) version: AtomicU64,
    /// Held over each change of the catalog and of the memory derived from it, so that both see the
    /// changes in the same order.
    pub(crate) committing: tokio::sync::Mutex<()>,
    pub(crate) ids: Ids,
    /// See [`crate::Store::term`].
    pub(crate) term: u32,
    /// Metadata of the owner of the streams, and of the store.
    pub(crate) meta: RwLock<BTreeMap<String, Vec<u8>>>,
}

impl CatalogState {
    /// Returns the catalog's version: at least that of each commit with effects in memory.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
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
    /// Ids handed out in this run that have no stream yet. Any other id below `next_stream` may
    /// have batches in the WAL.
    pub(crate) fresh_streams: Mutex<HashSet<StreamId>>,
    pub(crate) next_object: AtomicU64,
}
