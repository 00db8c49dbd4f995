//! What reads of a store need, whether this process writes the store or follows its writer.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};

use alluvium_wal::{LogOffset, Wal};
use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;

use crate::error::StoreError;
use crate::faults::Faults;
use crate::losses::Losses;
use crate::object_table::ObjectTable;
use crate::objects::Objects;
use crate::options::Options;
use crate::polls::Polls;
use crate::read_ahead::Readers;
use crate::tail::StreamState;
use crate::types::StreamId;
use crate::wake::{self, Wakes};

/// What reads of a store need.
pub(crate) struct View {
    pub(crate) basis: Basis,
    pub(crate) objects: Objects,
    pub(crate) readers: Readers,
    pub(crate) options: Options,
    /// See [`crate::Store::max_batch_bytes`].
    pub(crate) max_batch_bytes: u64,
    pub(crate) streams: RwLock<HashMap<StreamId, Arc<StreamState>>>,
    /// Metadata of the owner of the streams.
    pub(crate) meta: RwLock<BTreeMap<String, Vec<u8>>>,
    pub(crate) object_table: Mutex<ObjectTable>,
    pub(crate) wakes: Wakes,
    pub(crate) losses: Arc<Losses>,
    pub(crate) faults: Arc<Faults>,
    pub(crate) failure: Failure,
    /// The name of a fence of the chain, which is never deleted.
    pub(crate) fence: String,
}

/// What the contents of a view come from.
pub(crate) enum Basis {
    /// The catalog, and this WAL for what is not uploaded: this process writes the store.
    Log(Wal),
    /// The chain alone, as another process writes it.
    Chain(Arc<Polls>),
}

/// Whether and why a store has failed.
#[derive(Default)]
pub(crate) struct Failure {
    /// Why nothing can be appended any more, or the chain is not followed any more.
    pub(crate) cause: OnceLock<StoreError>,
    /// Notified when `cause` is set.
    pub(crate) is_set: Notify,
    /// Why the catalog cannot be changed any more. `cause` is also set then, perhaps to an earlier
    /// one.
    pub(crate) halted: OnceLock<StoreError>,
}

impl View {
    /// Returns the log offset below which everything is durable. What is in the chain is durable.
    pub(crate) fn durable(&self) -> LogOffset {
        match &self.basis {
            Basis::Log(wal) => wal.durable(),
            Basis::Chain(_) => LogOffset(u64::MAX),
        }
    }

    /// Called when an object is missing that a range is in. A process that follows the chain may be
    /// behind its writer, which has deleted the object: reads the chain up to its present end.
    ///
    /// # Errors
    /// The chain cannot be read, so it is unknown whether the object should be there.
    pub(crate) async fn catch_up(&self) -> Result<(), StoreError> {
        match &self.basis {
            Basis::Log(_) => Ok(()),
            Basis::Chain(polls) => polls.wait_for_new().await,
        }
    }

    pub(crate) fn failure(&self) -> Option<StoreError> {
        self.failure.cause.get().cloned()
    }

    /// Resolves with the cause once [`Self::fail`] was called.
    pub(crate) async fn failed(&self) -> StoreError {
        let failed = self.failure.is_set.notified();
        let mut failed = std::pin::pin!(failed);
        failed.as_mut().enable(); // before the check, so that no failure between the two is missed
        if self.failure().is_none() {
            failed.await;
        }
        self.failure().expect("it was set before the notification")
    }

    /// Records that the store has failed, and wakes the tasks that wait for that and the readers.
    /// Returns false if it had failed before. The caller must not hold the lock of a tail.
    pub(crate) fn fail(&self, failure: StoreError) -> bool {
        if self.failure.cause.set(failure).is_err() {
            return false;
        }
        self.failure.is_set.notify_waiters();
        let streams: Vec<_> = self.streams.read().values().cloned().collect();
        for stream in streams {
            wake::notify(&stream.watchers());
        }
        true
    }
}
