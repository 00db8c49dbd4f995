//! Puts the changes of consumer groups in line for the disk. Format and crash argument: `docs/format/group-state.md`.
//!
//! A group's changes are appended under the group's lock, so they are in its order; which group comes first is of no interest. Whoever wants to
//! tell of a change waits for the last record of its group: all records before it are durable then, too.

use alluvium_stream::{Append, NewBatch, Store, StoreError, StreamWriter};
use bytes::Bytes;
use futures::FutureExt;
use futures::future::Shared;
use parking_lot::Mutex;

use super::GroupsError;
use super::consumer::GroupStates;
use crate::state_stream::{self, KIND_GROUP_MEMBERS, Refused};
use crate::state_table;

/// Catalog metadata: the id of the stream, in decimal.
const STREAM_KEY: &str = "groups/members-stream";

/// Resolves when a record, and all before it, is durable. Any number may wait.
pub(super) type Durable = Shared<futures::future::BoxFuture<'static, Result<(), StoreError>>>;

pub(super) struct MemberLog {
    store: Store,
    stream: StreamWriter,
    /// Held from the look at the stream's end to the append.
    appending: Mutex<()>,
}

impl MemberLog {
    /// Find the stream, or create it, and rebuild the groups.
    pub(super) async fn open(store: Store) -> Result<(Self, GroupStates), GroupsError> {
        let stream = state_stream::open(&store, STREAM_KEY, KIND_GROUP_MEMBERS).await?;
        let replay = stream.replay();
        let states =
            state_table::rebuild::<GroupStates>(replay.checkpoint.as_deref(), &replay.batches)?;
        tracing::debug!(
            stream = %stream.id(),
            groups = states.0.len(),
            replayed_batches = replay.batches.len(),
            "consumer groups are loaded"
        );
        Ok((Self { store, stream, appending: Mutex::new(()) }, states))
    }

    /// Put a record in line. Does not wait.
    pub(super) fn append(&self, payload: Bytes) -> Result<Durable, Refused> {
        let _appending = self.appending.lock();
        let base = self.stream.next_offset();
        let batch = NewBatch { base, count: 1, max_timestamp_ms: -1, payload };
        let append: Append = self.stream.append(batch)?;
        Ok(append.boxed().shared())
    }

    /// Resolves when an append that met a lack of room may succeed.
    pub(super) async fn room(&self) {
        self.store.room().await;
    }
}
