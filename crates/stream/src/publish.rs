//! Deltas of the chain: what is published in them, and what follows once they are in the chain.
//!
//! A delta is frozen under [`CatalogState::committing`](crate::catalog_state::CatalogState),
//! created without that lock, and applied under it again. So the object store delays no change of a
//! topic, however slow it is. What was trimmed or deleted meanwhile is passed over.

pub(crate) mod task;
mod upload;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use alluvium_wal::{LogOffset, WalError};
use tokio::time::Instant;

use crate::catalog::ObjectInfo;
use crate::chain::{ChainChange, ChainWriter, Delta, Hints, PublishError};
use crate::clock::unix_ms;
use crate::ends::LargestCount;
use crate::error::StoreError;
use crate::faults::Reason;
use crate::objects::object_size;
use crate::request_class::RequestClass;
use crate::retry::Backoff;
use crate::shared::Shared;
use crate::types::{ObjectId, StreamId};

use upload::{PlannedCompaction, PlannedUpload};
pub(crate) use upload::{Replacement, UploadPart};

/// The time that the last delta of a run may take.
pub(crate) const LAST_DELTA: Duration = Duration::from_secs(10);

/// What a delta is published for. Each has the recorded lists, too.
#[derive(Clone)]
pub(crate) enum Publication {
    /// Lists that are recorded in the WAL. Nothing is published if there are none.
    Recorded,
    /// An upload, or a part of one: its objects, ranges and checkpoints. The last part has the cut,
    /// which becomes the uploaded end of the log. An object that is not needed any more, because
    /// its streams were deleted or trimmed meanwhile, is left to the object cleaner.
    Upload { cut: Option<LogOffset>, objects: Vec<Arc<ObjectInfo>>, parts: Vec<UploadPart> },
    /// An object compaction: its objects, and the replacement of ranges by ranges of them. A stream
    /// that was deleted or trimmed past its new range meanwhile is left out, and an object without
    /// ranges is left to the object cleaner.
    Compaction { objects: Vec<Arc<ObjectInfo>>, replacements: Vec<Replacement> },
    /// Batches of up to this number of offsets.
    LargestCount(LargestCount),
    /// Stream ids below this one.
    ReserveStreams(StreamId),
    /// The end of a run: the WAL is closed, so everything in it is durable.
    Close,
}

impl Publication {
    /// Returns the objects that it adds.
    fn objects(&self) -> &[Arc<ObjectInfo>] {
        match self {
            Self::Upload { objects, .. } | Self::Compaction { objects, .. } => objects,
            _ => &[],
        }
    }
}

/// What is applied in memory once a delta is in the chain.
enum Planned {
    Nothing,
    Upload(PlannedUpload),
    Compaction(PlannedCompaction),
    LargestCount(LargestCount),
    ReserveStreams(StreamId),
}

/// A delta that is frozen.
struct FrozenDelta {
    version: u64,
    bytes: usize,
    removed: Vec<ObjectId>,
    planned: Planned,
}

impl Shared {
    /// Publishes a delta and applies its effects in memory. Waits as long as the object store does
    /// not have it. Runs to its end even if the caller is dropped.
    ///
    /// # Errors
    /// [`StoreError::ObjectsMissing`] if written objects have disappeared: nothing was published,
    /// and they must be written again. After any other error the store has halted, or its WAL has
    /// failed; the next opening finds out whether the delta is in the chain.
    pub(crate) async fn publish(
        self: &Arc<Self>,
        publication: Publication,
    ) -> Result<(), StoreError> {
        let shared = self.clone();
        // Not with the priority of the caller: others wait for it.
        let task = self.objects.background().spawn_normal(async move {
            let mut writer = shared.catalog.writer.lock().await;
            // Caught before the lock is released: nothing may be published after a panic.
            shared.halt_on_panic(shared.publish_with(&mut writer, publication)).await?
        });
        task.await.unwrap_or_else(|cancelled| Err(StoreError::Failed(cancelled.to_string())))
    }

    async fn publish_with(
        self: &Arc<Self>,
        writer: &mut ChainWriter,
        publication: Publication,
    ) -> Result<(), StoreError> {
        let Some(frozen) = self.freeze(writer, &publication).await? else { return Ok(()) };
        if let Err(error) = self.create(writer, &publication).await {
            if let Some(mut lists) = writer.discard() {
                let mut unpublished = self.catalog.committing.lock().await;
                let FrozenDelta { bytes, removed, .. } = frozen;
                lists.append(&mut unpublished.lists);
                unpublished.lists = lists;
                unpublished.bytes += bytes;
                unpublished.removed.extend(removed);
            }
            return Err(error);
        }
        {
            let mut unpublished = self.catalog.committing.lock().await;
            if let Publication::Upload { cut: Some(cut), .. } = publication {
                unpublished.cut = cut;
            }
            match frozen.planned {
                Planned::Nothing => {}
                Planned::Upload(upload) => self.apply_upload(upload),
                Planned::Compaction(compaction) => self.apply_compaction(compaction),
                Planned::LargestCount(largest) => self.ends.set_largest_count(largest),
                Planned::ReserveStreams(end) => {
                    self.catalog.ids.reserved_streams.fetch_max(end.0, Ordering::Relaxed);
                }
            }
            self.catalog.published.store(frozen.version, Ordering::Release);
        }
        self.catalog.snapshot_wanted.notify_one();
        Ok(())
    }

    /// Fixes the next delta. Returns `None` if there is nothing to publish.
    async fn freeze(
        self: &Arc<Self>,
        writer: &mut ChainWriter,
        publication: &Publication,
    ) -> Result<Option<FrozenDelta>, StoreError> {
        if writer.is_frozen() {
            // Only after a halt: a delta waits for its outcome.
            return Err(self.failure().unwrap_or(StoreError::Closed));
        }
        if matches!(publication, Publication::Recorded)
            && self.catalog.committing.lock().await.lists.is_empty()
        {
            return Ok(None);
        }
        let hints = self.hints().await;
        let mut unpublished = self.catalog.committing.lock().await;
        if !matches!(publication, Publication::Close)
            && let Some(cause) = self.halted()
        {
            return Err(cause);
        }
        let mut cut = unpublished.cut;
        let (mut own, planned) = match publication {
            Publication::Recorded | Publication::Close => (Vec::new(), Planned::Nothing),
            Publication::Upload { cut: uploaded, objects, parts } => {
                cut = uploaded.unwrap_or(cut);
                let (own, planned) = PlannedUpload::new(objects, parts);
                (own, Planned::Upload(planned))
            }
            Publication::Compaction { objects, replacements } => {
                let (own, planned) = PlannedCompaction::new(objects, replacements);
                (own, Planned::Compaction(planned))
            }
            Publication::LargestCount(largest) => {
                (vec![ChainChange::LargestCount(largest.0)], Planned::LargestCount(*largest))
            }
            Publication::ReserveStreams(end) => {
                (vec![ChainChange::ReserveStreams(*end)], Planned::ReserveStreams(*end))
            }
        };
        let removed = std::mem::take(&mut unpublished.removed);
        own.extend(removed.iter().copied().map(ChainChange::RemoveObject));
        let bytes = std::mem::take(&mut unpublished.bytes);
        unpublished.version += 1;
        let version = unpublished.version;
        let delta = Delta {
            version,
            recorded: std::mem::take(&mut unpublished.lists),
            own,
            is_clean: matches!(publication, Publication::Close) && hints.is_empty(),
            hints,
            cut,
            wal_mark: self.wal.mark(),
            next_stream: StreamId(self.catalog.ids.given_streams.load(Ordering::Relaxed)),
            written_at_ms: unix_ms().cast_unsigned(),
        };
        // The order of deltas is that of the lock of the writer. Encoding takes long.
        drop(unpublished);
        writer.freeze(delta);
        Ok(Some(FrozenDelta { version, bytes, removed, planned }))
    }

    /// Creates the frozen delta; retries until the object store has it.
    async fn create(
        self: &Arc<Self>,
        writer: &mut ChainWriter,
        publication: &Publication,
    ) -> Result<(), StoreError> {
        let mut backoff = Backoff::new(self.options.retry());
        loop {
            // One request at a time: before each, the object before the delta is looked up again.
            let error = match writer.publish(Instant::now()).await {
                Ok(()) => break,
                Err(fenced @ PublishError::Fenced { .. }) => {
                    let error = StoreError::Replaced(fenced);
                    self.halt(error.clone());
                    return Err(error);
                }
                Err(error) => error,
            };
            if matches!(publication, Publication::Upload { .. }) {
                self.numbers.upload_failed(&error.to_string());
            }
            self.wait_after(&mut backoff, &error.to_string()).await?;
            // What was written to a directory below an unmounted mount point disappears when the
            // file system is mounted again. A delta that was sent went to an object store that has
            // the whole chain before it.
            if !writer.is_sent() && !self.objects_exist(publication.objects(), &mut backoff).await?
            {
                return Err(StoreError::ObjectsMissing);
            }
        }
        self.faults.report(Reason::CatalogBehind, None);
        Ok(())
    }

    /// Whether these objects exist.
    async fn objects_exist(
        &self,
        objects: &[Arc<ObjectInfo>],
        backoff: &mut Backoff,
    ) -> Result<bool, StoreError> {
        for object in objects {
            loop {
                let store = self.objects.store(RequestClass::Upload);
                match object_size(store, &object.name.as_str().into()).await {
                    Ok(Some(bytes)) if bytes == object.size_bytes => break,
                    Ok(_) => return Ok(false),
                    Err(error) => self.wait_after(backoff, &error.to_string()).await?,
                }
            }
        }
        Ok(true)
    }

    /// Waits after a failure. Fails when the store does.
    async fn wait_after(&self, backoff: &mut Backoff, error: &str) -> Result<(), StoreError> {
        let (wait, failures) = (backoff.failed(), backoff.failures());
        let detail = format!("the catalog in the object store is behind: {error}");
        tracing::warn!("{detail}; attempt {failures} failed, next attempt in {wait:?}");
        self.faults.report(Reason::CatalogBehind, Some(detail));
        tokio::select! {
            () = tokio::time::sleep(wait) => Ok(()),
            failure = self.failed() => Err(failure),
        }
    }

    /// Returns the durable ends of the streams with batches after their uploaded ends, for the next
    /// delta.
    async fn hints(&self) -> Hints {
        let durable = self.wal.durable();
        // It changes only with the lock of the writer.
        let published = self.catalog.version();
        let mut hints = Hints::new();
        self.visit_streams(|stream| {
            let mut tail = stream.tail.lock();
            let end = tail.durable_end(durable);
            tail.note_hint(end, published);
            if !tail.deleted && end > tail.uploaded_end {
                hints.insert(stream.id, end);
            }
        })
        .await;
        hints
    }

    /// Publishes what is left when the store is closed, so that the object store has everything
    /// but the batches that are in the WAL only. Nothing depends on it.
    pub(crate) async fn publish_last(self: &Arc<Self>) -> Result<(), StoreError> {
        match self.halted() {
            Some(StoreError::Closed) => {}
            // What is in memory may not be what was recorded.
            other => return Err(other.unwrap_or(StoreError::Closed)),
        }
        let mut writer = self.catalog.writer.lock().await;
        let until = Instant::now() + LAST_DELTA;
        let failed = |error: PublishError| StoreError::Failed(error.to_string());
        if writer.is_frozen() {
            writer.publish(until).await.map_err(failed)?;
            // Its effects are not in memory.
            return Ok(());
        }
        if let Some(frozen) = self.freeze(&mut writer, &Publication::Close).await? {
            writer.publish(until).await.map_err(failed)?;
            self.catalog.published.store(frozen.version, Ordering::Release);
        }
        Ok(())
    }

    /// Whether this server is still the only one: the object store has no later object of the
    /// chain, and both headers of the WAL are this writer's. `Ok(Err(_))`: it is not known.
    pub(crate) async fn is_owner(self: &Arc<Self>) -> Result<Result<bool, StoreError>, WalError> {
        match self.catalog.writer.lock().await.is_newest().await {
            Ok(true) => {}
            other => return Ok(other.map_err(StoreError::Object)),
        }
        let wal = self.wal.clone();
        let checking = self.checking.clone().lock_owned().await;
        let checked = tokio::task::spawn_blocking(move || {
            let checked = wal.verify_owner();
            drop((wal, checking));
            checked
        });
        match checked.await {
            Ok(Ok(())) => Ok(Ok(true)),
            Ok(Err(error)) if self.wal.stopped().is_some() => Err(error),
            Ok(Err(error)) => Ok(Err(StoreError::Wal(error))),
            Err(_) => Ok(Ok(false)), // the runtime ends
        }
    }
}
