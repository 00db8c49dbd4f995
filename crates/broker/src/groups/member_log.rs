//! Appends the changes of groups and of share partitions to the log. Formats and crash arguments:
//! `docs/format/group-state.md`, `docs/format/classic-group-state.md`,
//! `docs/format/share-state.md`.
//!
//! A group's changes are appended under the group's lock, so they are in the group's order; the
//! order between groups does not matter. A caller that shows a change to a client waits for the
//! last record of the group: all records before it are durable then, too.

use alluvium_stream::{NewBatch, Store, StoreError};
use bytes::Bytes;
use futures::FutureExt;
use futures::future::Shared;
use parking_lot::Mutex;

use super::GroupsError;
use crate::state_stream::{Refused, StateStream};
use crate::state_table::{self, Table};

/// Resolves when a record, and all before it, is durable. Any number of callers may wait.
pub(crate) type Durable = Shared<futures::future::BoxFuture<'static, Result<(), StoreError>>>;

pub(super) struct MemberLog {
    store: Store,
    stream: StateStream,
    /// Held from reading the stream's end to the append.
    appending: Mutex<()>,
}

impl MemberLog {
    /// Opens the stream that the catalog names under `key`, or creates it, and rebuilds the table,
    /// which is empty on a read-only server: its groups have their own members.
    pub(super) async fn open<T: Table>(
        store: Store,
        key: &'static str,
        kind: u8,
    ) -> Result<(Self, T), GroupsError> {
        let (stream, replay) = StateStream::open(&store, key, kind, false).await?;
        let states = state_table::load::<T>(&replay)?;
        tracing::debug!(replayed_batches = replay.batches.len(), "{} are loaded", T::WHAT);
        Ok((Self { store, stream, appending: Mutex::new(()) }, states))
    }

    /// Appends a record. Does not wait.
    pub(super) fn append(&self, payload: Bytes) -> Result<Durable, Refused> {
        let _appending = self.appending.lock();
        let base = self.stream.next_offset();
        let batch = NewBatch { base, count: 1, max_timestamp_ms: -1, payload };
        Ok(self.stream.append(batch)?.boxed().shared())
    }

    /// The size of the largest record that the log accepts.
    pub(super) fn max_record_bytes(&self) -> u64 {
        self.store.max_batch_bytes()
    }

    /// Resolves when an append that failed for lack of space may succeed.
    pub(super) async fn wait_for_space(&self) {
        self.store.wait_for_space().await;
    }
}
