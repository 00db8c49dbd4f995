//! Changes of the catalog by the owner of the streams. Each list is one record of the WAL. They run
//! one at a time, each in its own task, so a caller that is dropped leaves nothing half-done.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use alluvium_wal::AppendError;
use futures::future::BoxFuture;

use crate::catalog::{Change, MAX_LABEL_BYTES};
use crate::catalog_state::Unpublished;
use crate::chain::{ChainChange, Recorded, encode_recorded};
use crate::error::StoreError;
use crate::publish::Publication;
use crate::range::Range;
use crate::record::{CatalogRecord, encode_catalog};
use crate::shared::Shared;
use crate::tail::{StreamState, Tail};
use crate::types::{StreamEpoch, StreamId};
use crate::wake;

/// Bytes of lists that the chain does not have yet. They are in one delta, which has a limit.
const MAX_UNPUBLISHED_BYTES: usize = 256 << 20;

impl Shared {
    /// Changes the catalog and the memory derived from it. `work` runs exclusively and to its end
    /// even if the caller is dropped, and does not begin once the store has halted.
    async fn change<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl for<'a> FnOnce(
            &'a Arc<Self>,
            &'a mut Unpublished,
        ) -> BoxFuture<'a, Result<T, StoreError>>
        + Send
        + 'static,
    ) -> Result<T, StoreError> {
        let shared = self.clone();
        // Not with the priority of the caller: others wait for it.
        let task = self.objects.background().spawn_normal(async move {
            let mut unpublished = shared.catalog.committing.lock().await;
            match shared.halted() {
                Some(cause) => Err(cause),
                // Caught before the lock is released: no other change may follow a panic.
                None => shared.halt_on_panic(work(&shared, &mut unpublished)).await?,
            }
        });
        task.await.unwrap_or_else(|cancelled| Err(StoreError::Failed(cancelled.to_string())))
    }

    /// Appends a list of changes to the WAL and waits until it is durable. If there is no space for
    /// it, nothing has changed. After any other error it is unknown whether it is durable, so the
    /// store halts; opening it again reads the actual state.
    async fn record(
        &self,
        unpublished: &mut Unpublished,
        changes: Vec<ChainChange>,
    ) -> Result<(), StoreError> {
        let version = unpublished.version + 1;
        let record = encode_catalog(&CatalogRecord {
            version,
            before: self.catalog.recorded.load(Ordering::Relaxed),
            next_stream: StreamId(self.catalog.ids.next_stream.load(Ordering::Relaxed)),
            count: u32::try_from(changes.len()).expect("each change takes memory"),
            changes: encode_recorded(&changes).into(),
        });
        let max_bytes = self.ends.max_record_bytes();
        if record.len() > max_bytes as usize {
            let bytes = record.len();
            return Err(StoreError::InvalidChange(format!(
                "a list of {} changes takes {bytes} bytes, more than a record of the log, which \
                 has at most {max_bytes}",
                changes.len()
            )));
        }
        if unpublished.bytes + record.len() > MAX_UNPUBLISHED_BYTES {
            return Err(self.log_full());
        }
        // What retention removes frees nothing before an upload, for which the space is kept.
        let is_trim = |change: &ChainChange| matches!(change, ChainChange::TrimStream { .. });
        if changes.iter().all(is_trim) && !self.has_space_for(record.len() as u64) {
            return Err(self.log_full());
        }
        let end = loop {
            let space = self.wal.wait_space();
            match self.wal.append(&[&record]) {
                Ok(append) => break append.end(),
                Err(AppendError::WindowFull { .. }) => space.await,
                Err(AppendError::OverCapacity { .. }) => return Err(self.log_full()),
                Err(AppendError::Failed(error)) => return Err(StoreError::Wal(error)),
                Err(AppendError::Closed) => return Err(StoreError::Closed),
                Err(error) => {
                    return Err(StoreError::Failed(format!("a list of changes: {error}")));
                }
            }
        };
        self.catalog.recorded.store(version, Ordering::Release);
        unpublished.version = version;
        self.ends.appended();
        self.request_upload_if_due(end);
        if let Err(error) = self.wal.wait_durable(end).await {
            let error = StoreError::Wal(error);
            self.halt(error.clone());
            return Err(error);
        }
        unpublished.lists.push(Recorded { version, changes });
        unpublished.bytes += record.len();
        self.catalog.wanted.notify_one();
        Ok(())
    }

    /// Returns the error of a change for which the log has no space, and requests an upload, which
    /// frees some.
    fn log_full(&self) -> StoreError {
        self.request_upload();
        StoreError::LogFull
    }

    pub(crate) async fn new_stream_ids(
        self: &Arc<Self>,
        count: u32,
    ) -> Result<Vec<StreamId>, StoreError> {
        loop {
            let taken = self.change(move |shared, _| {
                Box::pin(async move { Ok(shared.catalog.ids.take_streams(count)) })
            });
            match taken.await? {
                Ok(ids) => return Ok(ids),
                // Recovery must know an upper bound of the ids, even if the WAL is lost.
                Err(end) => {
                    self.publish(Publication::ReserveStreams(end)).await?;
                }
            }
        }
    }

    pub(crate) async fn commit(
        self: &Arc<Self>,
        mut changes: Vec<Change>,
    ) -> Result<(), StoreError> {
        self.change(|shared, unpublished| {
            Box::pin(async move {
                shared.check(&changes)?;
                // A trim that was overtaken by another one, or by a state stream's upload, has no
                // effect.
                changes.retain(|change| !shared.is_overtaken(change));
                if changes.is_empty() {
                    return Ok(());
                }
                let recorded = changes.iter().cloned().map(ChainChange::from).collect();
                shared.record(unpublished, recorded).await?;
                for change in changes {
                    shared.apply(change);
                }
                // Deleted and trimmed streams may have freed space in the log cache.
                shared.space.open();
                Ok(())
            })
        })
        .await
    }

    /// Fences writers of the stream with an epoch older than `epoch`, once it returns.
    pub(crate) async fn open_stream(
        self: &Arc<Self>,
        id: StreamId,
        epoch: StreamEpoch,
    ) -> Result<(), StoreError> {
        self.change(move |shared, unpublished| {
            Box::pin(async move {
                let stream = shared.streams.read().get(&id).cloned();
                let stream = stream.ok_or_else(|| StoreError::no_stream(id))?;
                if stream.tail.lock().epoch >= epoch {
                    return Ok(()); // another call was faster
                }
                let opened = ChainChange::OpenStream { id, epoch };
                shared.record(unpublished, vec![opened]).await?;
                stream.tail.lock().epoch = epoch;
                // Wakes the previous writer if it waits for space, so that it learns that it is
                // fenced.
                shared.space.open();
                Ok(())
            })
        })
        .await
    }

    fn is_overtaken(&self, change: &Change) -> bool {
        let Change::TrimStream { id, to, .. } = change else { return false };
        let stream = self.streams.read().get(id).cloned();
        stream.is_some_and(|stream| *to <= stream.tail.lock().start)
    }

    /// Refuses invalid changes.
    fn check(&self, changes: &[Change]) -> Result<(), StoreError> {
        let invalid = |message: String| Err(StoreError::InvalidChange(message));
        let mut touched = HashSet::new();
        for change in changes {
            let (id, epoch, to) = match change {
                Change::CreateStream { id, label, .. } => {
                    if label.len() > MAX_LABEL_BYTES {
                        let bytes = label.len();
                        return invalid(format!(
                            "the label of stream {id} has {bytes} bytes, more than \
                             {MAX_LABEL_BYTES}"
                        ));
                    }
                    if !self.catalog.ids.fresh_streams.lock().contains(id) || !touched.insert(*id) {
                        return invalid(format!("stream id {id} is not new"));
                    }
                    continue;
                }
                Change::PutMeta { .. } | Change::DeleteMeta(_) => continue,
                Change::DeleteStream { id, epoch } => (*id, *epoch, None),
                Change::TrimStream { id, epoch, to } => (*id, *epoch, Some(*to)),
            };
            let Some(stream) = self.streams.read().get(&id).cloned() else {
                return Err(StoreError::no_stream(id));
            };
            if !touched.insert(id) {
                return invalid(format!("stream {id} is changed twice in one list"));
            }
            let durable = self.wal.durable();
            let (newest, durable_end) = {
                let tail = stream.tail.lock();
                (tail.epoch, tail.durable_end(durable))
            };
            if epoch < newest {
                return Err(StoreError::Fenced { stream: id, epoch, newest });
            }
            if epoch > newest {
                return invalid(format!("stream {id} was never opened with epoch {epoch}"));
            }
            if let Some(to) = to.filter(|to| *to > durable_end) {
                return invalid(format!(
                    "stream {id} can be trimmed to {durable_end} at most, not to {to}"
                ));
            }
        }
        Ok(())
    }

    fn apply(&self, change: Change) {
        match change {
            Change::CreateStream { id, kind, label } => {
                let ids = &self.catalog.ids;
                ids.fresh_streams.lock().remove(&id);
                ids.given_streams.fetch_max(id.0 + 1, Ordering::Relaxed);
                let stream = StreamState::new(id, kind, label, Tail::default());
                self.streams.write().insert(id, Arc::new(stream));
            }
            Change::DeleteStream { id, .. } => {
                let Some(stream) = self.streams.write().remove(&id) else { return };
                let (released, gone) = stream.tail.lock().delete();
                wake::notify(&stream.watchers());
                self.cache.release(released);
                self.cache.withdraw(&stream);
                self.drop_ranges(&gone);
            }
            Change::TrimStream { id, to, .. } => {
                let Some(stream) = self.streams.read().get(&id).cloned() else { return };
                let (released, gone) = stream.tail.lock().trim(to);
                stream.moved.removed(gone.len());
                self.cache.release(released);
                self.drop_ranges(&gone);
            }
            Change::PutMeta { key, value } => drop(self.meta.write().insert(key, value)),
            Change::DeleteMeta(key) => drop(self.meta.write().remove(&key)),
        }
    }

    /// Releases ranges that the catalog has dropped. The object cleaner deletes objects without
    /// references.
    pub(crate) fn drop_ranges(&self, gone: &[Range]) {
        let mut table = self.object_table.lock();
        for range in gone {
            if table.release(range) {
                self.retired.notify_one();
            }
        }
        drop(table);
        if !gone.is_empty() {
            // The ranges left in a shared object may be less than half of it now.
            self.compaction.wanted.notify_one();
        }
    }
}
