//! Changes of the catalog and their effects in memory. They run one at a time, each in its own
//! task, so a caller that is dropped leaves nothing half-done.

use std::collections::{BTreeMap, HashSet};
use std::future::Future;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use alluvium_wal::LogOffset;
use bytes::Bytes;

use crate::catalog::{CatalogError, Change, ObjectInfo, ObjectRange, Replaced, Uploaded};
use crate::ends::LargestCount;
use crate::error::StoreError;
use crate::faults::Reason;
use crate::object_table::Used;
use crate::range::Range;
use crate::shared::Shared;
use crate::tail::{Changed, StreamState, Tail, UploadedPart};
use crate::types::{ObjectId, StreamEpoch, StreamId, StreamOffset};
use crate::wake;

/// A stream's part of an upload, ready to be committed.
#[derive(Clone)]
pub(crate) struct UploadPart {
    pub(crate) stream: Arc<StreamState>,
    pub(crate) uploaded_end: StreamOffset,
    pub(crate) checkpoint: Option<Bytes>,
    /// The part's range in one of the upload's objects.
    pub(crate) range: Option<ObjectRange>,
}

/// A stream's part of an object compaction, ready to be committed.
pub(crate) struct Replacement {
    pub(crate) stream: Arc<StreamState>,
    /// The ranges to replace; they were neighbours when they were read.
    pub(crate) old: Vec<Range>,
    pub(crate) new: ObjectRange,
}

/// Objects to be committed, with the amount that streams have in them.
type NewObjects = BTreeMap<ObjectId, (Arc<ObjectInfo>, Used)>;

fn unused(objects: Vec<Arc<ObjectInfo>>) -> NewObjects {
    objects.into_iter().map(|object| (object.id, (object, Used::default()))).collect()
}

/// Returns the changes that add the objects in which some stream has a range, and their total size.
fn added(objects: &NewObjects) -> (Vec<Change>, u64) {
    let used = objects.values().filter(|(_, used)| used.streams > 0).map(|(object, _)| object);
    let bytes = used.clone().map(|object| object.size_bytes).sum();
    (used.map(|object| Change::AddObject(ObjectInfo::clone(object))).collect(), bytes)
}

impl Shared {
    /// Changes the catalog and the memory derived from it. `work` runs exclusively and to its end
    /// even if the caller is dropped, and does not begin once the store has halted. A failed WAL
    /// does not prevent it: topics can still be deleted.
    async fn change<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let shared = self.clone();
        // Not with the priority of the caller: others wait for it.
        let task = self.objects.background().spawn_normal(async move {
            let _alone = shared.catalog.committing.lock().await;
            match shared.halted() {
                Some(cause) => Err(cause),
                // Caught before the lock is released: no other change may follow a panic.
                None => shared.halt_on_panic(work).await?,
            }
        });
        task.await.unwrap_or_else(|cancelled| Err(StoreError::Failed(cancelled.to_string())))
    }

    /// Commits changes to the catalog. If it refuses them, or has no space, the catalog is
    /// unchanged. After any other error its contents are unknown and it may accept nothing more, so
    /// the store halts; opening it again reads the actual state.
    async fn write_catalog(&self, mut changes: Vec<Change>) -> Result<(), StoreError> {
        changes.push(Change::WalMarked(self.wal.mark()));
        let catalog = self.catalog.durable.clone();
        let commit = move || catalog.commit(&changes);
        let committed = match tokio::task::spawn_blocking(commit).await {
            Ok(committed) => committed.map_err(StoreError::Catalog),
            Err(ended) => match ended.try_into_panic() {
                Ok(panic) => resume_unwind(panic),
                Err(cancelled) => Err(StoreError::Failed(cancelled.to_string())),
            },
        };
        match &committed {
            Ok(version) => {
                self.catalog.version.store(*version, Ordering::Release);
                self.faults.report(Reason::CatalogDiskFull, self.catalog.durable.shortage());
            }
            Err(StoreError::Catalog(CatalogError::Refused(_))) => {}
            Err(StoreError::Catalog(error @ CatalogError::Full(_))) => {
                self.faults.report(Reason::CatalogDiskFull, Some(error.to_string()));
            }
            Err(error) => self.halt(error.clone()),
        }
        committed.map(drop)
    }

    /// Records the WAL's mark in the catalog.
    pub(crate) async fn note_mark(self: &Arc<Self>) -> Result<(), StoreError> {
        let shared = self.clone();
        self.change(async move { shared.write_catalog(Vec::new()).await }).await
    }

    pub(crate) async fn new_stream_ids(
        self: &Arc<Self>,
        count: u32,
    ) -> Result<Vec<StreamId>, StoreError> {
        let shared = self.clone();
        self.change(async move {
            let first = shared.catalog.ids.next_stream.load(Ordering::Relaxed);
            let next = first + u64::from(count);
            // Stored first: if it is unknown whether ids were handed out, they are not handed out
            // again.
            shared.catalog.ids.next_stream.store(next, Ordering::Relaxed);
            shared.write_catalog(vec![Change::NextStreamId(StreamId(next))]).await?;
            let ids: Vec<_> = (first..next).map(StreamId).collect();
            shared.catalog.ids.fresh_streams.lock().extend(&ids);
            Ok(ids)
        })
        .await
    }

    /// Allows batches of up to `count` records, once it returns.
    pub(crate) async fn commit_largest_count(
        self: &Arc<Self>,
        count: u32,
    ) -> Result<(), StoreError> {
        let shared = self.clone();
        self.change(async move {
            let largest = LargestCount::at_least(count);
            if largest.0 > shared.ends.largest_count() {
                shared.write_catalog(vec![largest.change()]).await?;
                shared.apply(largest.change());
                shared.ends.set_largest_count(largest);
            }
            Ok(())
        })
        .await
    }

    pub(crate) async fn commit(
        self: &Arc<Self>,
        mut changes: Vec<Change>,
    ) -> Result<(), StoreError> {
        let shared = self.clone();
        self.change(async move {
            shared.check(&changes)?;
            // A trim that was overtaken by another one, or by a state stream's upload, has no
            // effect.
            changes.retain(|change| !shared.is_overtaken(change));
            shared.write_catalog(changes.clone()).await?;
            for change in changes {
                shared.apply(change);
            }
            // Deleted and trimmed streams may have freed space in the log cache.
            shared.space.open();
            Ok(())
        })
        .await
    }

    /// Fences writers of the stream with an epoch older than `epoch`, once it returns.
    pub(crate) async fn open_stream(
        self: &Arc<Self>,
        id: StreamId,
        epoch: StreamEpoch,
    ) -> Result<(), StoreError> {
        let shared = self.clone();
        self.change(async move {
            let stream = shared.streams.read().get(&id).cloned();
            let stream = stream.ok_or_else(|| StoreError::no_stream(id))?;
            if stream.tail.lock().epoch >= epoch {
                return Ok(()); // another call was faster
            }
            shared.write_catalog(vec![Change::OpenStream { id, epoch }]).await?;
            stream.tail.lock().epoch = epoch;
            // Wakes the previous writer if it waits for space, so that it learns that it is fenced.
            shared.space.open();
            Ok(())
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
                Change::CreateStream { id, .. } => {
                    if !self.catalog.ids.fresh_streams.lock().contains(id) || !touched.insert(*id) {
                        return invalid(format!("stream id {id} is not new"));
                    }
                    continue;
                }
                Change::PutMeta { .. } | Change::DeleteMeta(_) => continue,
                Change::DeleteStream { id, epoch } => (*id, *epoch, None),
                Change::TrimStream { id, epoch, to } => (*id, *epoch, Some(*to)),
                Change::BindWal(_)
                | Change::NextStreamId(_)
                | Change::OpenStream { .. }
                | Change::AddObject(_)
                | Change::Uploaded(_)
                | Change::LogUploaded(_)
                | Change::Replaced(_)
                | Change::WalMarked(_)
                | Change::BeginIncarnation { .. }
                | Change::RemoveObject(_) => {
                    return invalid(format!("only the store itself may do this: {change:?}"));
                }
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
            Change::CreateStream { id, kind } => {
                self.catalog.ids.fresh_streams.lock().remove(&id);
                let stream = StreamState::new(id, kind, Tail::default());
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
                self.cache.release(released);
                self.drop_ranges(&gone);
            }
            Change::PutMeta { key, value } => drop(self.catalog.meta.write().insert(key, value)),
            Change::DeleteMeta(key) => drop(self.catalog.meta.write().remove(&key)),
            Change::BindWal(_)
            | Change::NextStreamId(_)
            | Change::OpenStream { .. }
            | Change::AddObject(_)
            | Change::Uploaded(_)
            | Change::LogUploaded(_)
            | Change::Replaced(_)
            | Change::WalMarked(_)
            | Change::BeginIncarnation { .. }
            | Change::RemoveObject(_) => unreachable!("refused by check"),
        }
    }

    /// Releases ranges that the catalog has dropped. The object cleaner deletes objects without
    /// references.
    fn drop_ranges(&self, gone: &[Range]) {
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

    /// Commits an upload atomically: its objects, ranges and checkpoints, and `cut` as the uploaded
    /// end of the log. An object that is not needed any more, because its streams were deleted or
    /// trimmed meanwhile, is left to the object cleaner and never recorded in the catalog.
    pub(crate) async fn commit_upload(
        self: &Arc<Self>,
        cut: LogOffset,
        objects: Vec<Arc<ObjectInfo>>,
        parts: Vec<UploadPart>,
    ) -> Result<(), StoreError> {
        let shared = self.clone();
        self.change(async move {
            let mut live = unused(objects);
            let mut uploaded = Vec::with_capacity(parts.len());
            let mut applied = Vec::with_capacity(parts.len());
            for part in parts {
                let tail = part.stream.tail.lock();
                if tail.deleted {
                    continue;
                }
                let start = if part.stream.is_state() {
                    tail.start.max(part.uploaded_end)
                } else {
                    tail.start
                };
                drop(tail);
                let range = part.range.filter(|range| range.end > start);
                let tail_range = range.as_ref().map(|range| {
                    let object = live.get_mut(&range.object);
                    let (object, used) = object.expect("a range lies in one of the objects");
                    used.add(range.payload_bytes);
                    Range::of(object.clone(), range)
                });
                uploaded.push(Change::Uploaded(Uploaded {
                    stream: part.stream.id,
                    uploaded_end: part.uploaded_end,
                    start,
                    checkpoint: part.checkpoint.clone(),
                    range,
                }));
                let part_done = UploadedPart {
                    uploaded_end: part.uploaded_end,
                    start,
                    checkpoint: part.checkpoint,
                    range: tail_range,
                };
                applied.push((part.stream, part_done));
            }
            let (mut changes, used_bytes) = added(&live);
            changes.append(&mut uploaded);
            changes.push(Change::LogUploaded(cut));
            shared.write_catalog(changes).await?;
            shared.numbers.uploaded_bytes.fetch_add(used_bytes, Ordering::Relaxed);
            shared.insert_objects(live);
            shared.numbers.uploads.fetch_add(1, Ordering::Relaxed);
            let mut changed = Vec::with_capacity(applied.len());
            for (stream, part) in applied {
                changed.extend(part.range.as_ref().map(|range| (stream.id, Changed::at(range))));
                let released = stream.tail.lock().uploaded(part);
                shared.cache.release(released);
                shared.cache.offer(&stream);
            }
            shared.cache.evict_to_bound();
            shared.compaction.changed(changed);
            Ok(())
        })
        .await
    }

    /// Commits an object compaction: its objects, and the replacement of ranges by ranges of them.
    /// A stream that was deleted or trimmed past its new range meanwhile is left out, and an object
    /// without ranges is left to the object cleaner.
    pub(crate) async fn commit_compaction(
        self: &Arc<Self>,
        objects: Vec<Arc<ObjectInfo>>,
        replacements: Vec<Replacement>,
    ) -> Result<(), StoreError> {
        let shared = self.clone();
        self.change(async move {
            let mut live = unused(objects);
            let mut replaced = Vec::with_capacity(replacements.len());
            let mut applied = Vec::with_capacity(replacements.len());
            for Replacement { stream, old, new } in replacements {
                let old: Vec<_> = {
                    let tail = stream.tail.lock();
                    if tail.deleted || new.end <= tail.start {
                        continue;
                    }
                    // Only object compaction replaces ranges, one run at a time, so missing ranges
                    // were trimmed.
                    let starts = old.into_iter().map(|range| range.start);
                    starts.filter(|start| tail.range_at(*start).is_some()).collect()
                };
                let object = live.get_mut(&new.object);
                let (object, used) = object.expect("a range lies in one of the objects");
                used.add(new.payload_bytes);
                let range = Range::of(object.clone(), &new);
                applied.push((stream.clone(), old[0], old.len(), range));
                replaced.push(Change::Replaced(Replaced { stream: stream.id, old, new }));
            }
            let (mut changes, used_bytes) = added(&live);
            changes.append(&mut replaced);
            shared.write_catalog(changes).await?;
            shared.numbers.compactions.fetch_add(1, Ordering::Relaxed);
            shared.numbers.compacted_bytes.fetch_add(used_bytes, Ordering::Relaxed);
            shared.insert_objects(live);
            let mut changed = Vec::with_capacity(applied.len());
            for (stream, first, count, range) in applied {
                changed.push((stream.id, Changed::at(&range)));
                let gone = stream.tail.lock().replace(first, count, range);
                shared.drop_ranges(&gone);
            }
            shared.compaction.changed(changed);
            Ok(())
        })
        .await
    }

    /// Adds committed objects to the table; those without ranges are retired.
    fn insert_objects(&self, objects: NewObjects) {
        let mut table = self.object_table.lock();
        for (object, used) in objects.into_values() {
            table.uploading.remove(&object.name);
            table.insert(object, used);
        }
        self.retired.notify_one(); // one may be retired
    }

    /// Removes objects from the catalog that the object cleaner has deleted from the object store.
    pub(crate) async fn remove_objects(
        self: &Arc<Self>,
        ids: Vec<ObjectId>,
    ) -> Result<(), StoreError> {
        let shared = self.clone();
        self.change(async move {
            shared.write_catalog(ids.iter().copied().map(Change::RemoveObject).collect()).await?;
            let mut table = shared.object_table.lock();
            for id in &ids {
                table.retired.remove(id);
            }
            Ok(())
        })
        .await
    }
}
