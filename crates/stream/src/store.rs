//! The store: all streams of one WAL.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use alluvium_device::SharedDevice;
use alluvium_wal::{HeaderInfo, LogOffset, ResizeError, Resizing, Wal, WalError};
use futures::FutureExt;
use object_store::ObjectStore;
use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::cache::LogCache;
use crate::catalog::{Catalog, CatalogError, Change};
use crate::compact::{self, Compaction};
use crate::ends::{self, Ends};
use crate::health::{self, Degraded, Faults, Reason};
use crate::losses::{Losses, LostObjects};
use crate::numbers::{Lost, Numbers, UploadFailing};
pub(crate) use crate::object_table::{ObjectTable, Used};
use crate::objects::{DiskCacheStats, ObjectError, Objects, ReadStats, Requests};
use crate::options::Options;
use crate::owner::Owner;
use crate::read_ahead::Readers;
use crate::recover::{self, Recovery};
use crate::stream::Stream;
use crate::tail::StreamState;
use crate::types::{Fold, StreamEpoch, StreamId};
use crate::wake::{SpaceGate, Wakes};
use crate::{object_cleaner, panics, upload, wake};

/// Why an operation of the store failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// The store has failed; the text is that of the first failure.
    #[error("the store has failed: {0}")]
    Failed(String),
    /// The store was closed.
    #[error("the store is closed")]
    Closed,
    /// An option is out of range. The message names the option, the value and the bound.
    #[error("{0}")]
    InvalidOption(String),
    /// An invalid change, such as a trim past the durable end. Nothing has changed.
    #[error("{0}")]
    InvalidChange(String),
    /// A newer writer has opened the stream. Nothing has changed.
    #[error(
        "stream {stream} was opened with epoch {newest}: a writer with epoch {epoch} can no \
         longer change it"
    )]
    Fenced {
        /// The stream.
        stream: StreamId,
        /// The epoch of the fenced writer.
        epoch: StreamEpoch,
        /// The newest epoch with which the stream was opened.
        newest: StreamEpoch,
    },
    /// The catalog and the WAL do not belong together. Continuing would drop records or assign them
    /// to the wrong streams.
    #[error(
        "the catalog belongs to the WAL {catalog}, but the device holds the WAL {wal}. Open the \
         WAL with the catalog that it was last in use with"
    )]
    WrongWal {
        /// The WAL that the catalog is bound to.
        catalog: Uuid,
        /// The WAL on the device.
        wal: Uuid,
    },
    /// The catalog was in use with this WAL before, and a newer catalog has been since. Continuing
    /// would lose records permanently.
    #[error(
        "the catalog is new or an old copy: it has version {version} and what the WAL held before \
         {uploaded}, but the WAL was in use with version {mark} and is trimmed up to {trimmed}. \
         The rest is in objects that only a newer catalog records: open the WAL with that catalog"
    )]
    OldCatalog {
        /// The version of this catalog.
        version: u64,
        /// The mark of the WAL: the version of the catalog that it was last in use with.
        mark: u64,
        /// The log offset below which this catalog has the contents of the WAL.
        uploaded: LogOffset,
        /// The WAL's trim offset.
        trimmed: LogOffset,
    },
    /// The WAL was in use with this catalog after this copy of the WAL was made. Everything
    /// appended since would be lost permanently.
    #[error(
        "the device holds an old copy of the WAL: it was last in use with version {mark} of the \
         catalog, but the catalog has been in use with the WAL at version {seen}. Open the \
         catalog with the device that it was last in use with, or restore copies of both from the \
         same moment"
    )]
    OldWal {
        /// The mark in the header of this copy.
        mark: u64,
        /// The greatest mark that the WAL is known to have had.
        seen: u64,
    },
    /// The WAL could not be opened.
    #[error("cannot open the WAL: {0}")]
    Open(Arc<alluvium_wal::OpenError>),
    /// The WAL has failed.
    #[error(transparent)]
    Wal(#[from] WalError),
    /// The catalog could not be read or written.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// An object could not be read.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// Another server owns the objects, so none is written or deleted. Nothing has changed.
    #[error("another server owns the objects")]
    NotOwner,
}

/// The result of [`Store::open`].
pub struct Opened {
    /// The store, open for traffic.
    pub store: Store,
    /// What recovery found.
    pub recovery: Recovery,
}

/// Numbers for metrics and tools. They are read one after the other, so they are not a consistent
/// snapshot.
#[derive(Clone, Debug)]
pub struct Stats {
    /// The number of streams.
    pub streams: usize,
    /// The bound of the log cache, [`Options::cache_bytes`].
    pub cache_bound_bytes: u64,
    /// Bytes of the log cache in use, bookkeeping included.
    pub cache_used_bytes: u64,
    /// Bytes of the log cache that are not uploaded yet and cannot be evicted.
    pub cache_pinned_bytes: u64,
    /// Bytes appended to the WAL since the last upload began.
    pub log_behind_bytes: u64,
    /// An upper bound of the age of the oldest record that is not trimmed: the time since the cut
    /// was taken that the WAL is trimmed to. The cut moves at each [`Options::upload_interval`],
    /// also while nothing is appended. For records that recovery found, the time since the start. 0
    /// if everything is trimmed.
    pub log_age: Duration,
    /// Bytes of verified blocks and indexes in memory.
    pub block_cache_used_bytes: u64,
    /// Statistics of the cache of verified blocks and indexes on a local disk.
    pub disk_cache: DiskCacheStats,
    /// Statistics of reads from objects.
    pub reads: ReadStats,
    /// Objects in use.
    pub objects: usize,
    /// Bytes of the objects in use.
    pub object_bytes: u64,
    /// Objects waiting to be deleted.
    pub retired_objects: usize,
    /// Objects in use that a reader or compaction found damaged.
    pub damaged_objects: LostObjects,
    /// Objects in use that were missing from the object store.
    pub missing_objects: LostObjects,
    /// Uploads committed since the start, including those that needed no object.
    pub uploads: u64,
    /// Requests to the object store by class and kind; combinations without a request are left out.
    pub requests: Vec<Requests>,
    /// Bytes of objects committed since the start.
    pub uploaded_bytes: u64,
    /// Object compactions committed since the start.
    pub compactions: u64,
    /// Bytes of objects written by object compaction.
    pub compacted_bytes: u64,
    /// Object compactions that failed, whether they are retried or not.
    pub compaction_failures: u64,
    /// Failed attempts to write an object.
    pub upload_failures: u64,
    /// Set while objects cannot be written: from the first failed attempt until an upload
    /// completes.
    pub upload_failing: Option<UploadFailing>,
    /// Old objects that the catalog does not record and that still exist: they could not be deleted
    /// yet, or are kept because they may hold something that is [lost](Stats::lost). As of the last
    /// scan, which runs every [`Options::orphan_age`].
    pub orphans: usize,
    /// Orphans deleted since the start.
    pub orphans_deleted: u64,
    /// Failed attempts to delete an unneeded object or to list the objects.
    pub clean_up_failures: u64,
    /// Appends refused because the log, the window or the log cache was full.
    pub refused_appends: u64,
    /// What was lost before the start. Constant while the store is open.
    pub lost: Lost,
    /// Deletions of objects and trims of the WAL that were refused because another store owns the
    /// same objects: one that has taken over the WAL or has a copy of it.
    pub owner_conflicts: u64,
    /// Statistics of the WAL.
    pub wal: alluvium_wal::Stats,
}

/// All streams of one WAL. Cheap to clone. It must be opened and used in a `tokio` runtime.
///
/// Close it with [`Store::close`]. Dropping the last handle instead stops it as a crash would and
/// wakes every waiter at a [`Stream`]; nothing is lost. A commit to the catalog that is in progress
/// may end later, so a store that will be opened again in the same process must be closed.
#[derive(Clone)]
pub struct Store {
    pub(crate) shared: Arc<Shared>,
    tasks: Arc<Tasks>,
}

struct Tasks {
    shared: Arc<Shared>,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.handles.lock().iter().for_each(JoinHandle::abort);
        self.shared.halt(StoreError::Closed);
    }
}

/// The state that handles and tasks share.
pub(crate) struct Shared {
    pub(crate) wal: Wal,
    pub(crate) wal_id: Uuid,
    pub(crate) owner: Owner,
    pub(crate) objects: Objects,
    pub(crate) readers: Readers,
    pub(crate) catalog: Arc<dyn Catalog>,
    /// The catalog's version after the last commit whose effects are in memory or are about to be.
    pub(crate) version: AtomicU64,
    pub(crate) fold: Arc<dyn Fold>,
    pub(crate) options: Options,
    pub(crate) max_batch_bytes: u64,
    pub(crate) streams: RwLock<HashMap<StreamId, Arc<StreamState>>>,
    pub(crate) meta: RwLock<BTreeMap<String, Vec<u8>>>,
    pub(crate) cache: LogCache,
    pub(crate) space: SpaceGate,
    pub(crate) wakes: Wakes,
    pub(crate) upload: UploadSignal,
    pub(crate) ends: Ends,
    pub(crate) object_table: Mutex<ObjectTable>,
    /// Held over each change of the catalog and of the memory derived from it, so that both see the
    /// changes in the same order.
    pub(crate) committing: tokio::sync::Mutex<()>,
    pub(crate) ids: Ids,
    /// Wakes the object cleaner.
    pub(crate) retired: Notify,
    pub(crate) losses: Arc<Losses>,
    pub(crate) compaction: Compaction,
    pub(crate) numbers: Numbers,
    pub(crate) faults: Arc<Faults>,
    /// Why nothing can be appended any more.
    failure: OnceLock<StoreError>,
    /// Notified when `failure` is set.
    failed: Notify,
    /// Why the catalog cannot be changed any more. `failure` is also set then, perhaps to an
    /// earlier cause.
    halted: OnceLock<StoreError>,
}

/// The next ids to hand out.
pub(crate) struct Ids {
    /// Changed under [`Shared::committing`].
    pub(crate) next_stream: AtomicU64,
    /// Ids handed out in this run that have no stream yet. Any other id below `next_stream` may
    /// have batches in the WAL.
    pub(crate) fresh_streams: Mutex<HashSet<StreamId>>,
    pub(crate) next_object: AtomicU64,
}

/// The key prefix of the store's own metadata.
pub(crate) const OWN_META_PREFIX: &str = "stream/";

/// How appends request an upload.
pub(crate) struct UploadSignal {
    pub(crate) wanted: Notify,
    /// An append found no space.
    pub(crate) forced: AtomicBool,
    /// Recovery found gaps, and the owner of the streams has not handled them yet.
    pub(crate) held: AtomicBool,
    /// The log offset of the last cut.
    pub(crate) cut: AtomicU64,
    /// [`Options::upload_bytes`], or a quarter of the WAL if that is less because the WAL was
    /// resized.
    pub(crate) threshold_bytes: AtomicU64,
    /// When the cut was taken that the WAL is trimmed to; initially the start. No record appended
    /// in this run that is not trimmed is older.
    pub(crate) trimmed_to: Mutex<tokio::time::Instant>,
}

impl Store {
    /// Recovers the WAL on `device`, which must be formatted, and opens it for traffic.
    ///
    /// The object store is not accessed, so an object store that is down delays nothing. `catalog`
    /// is bound to the WAL at the first open and refused with any other WAL afterwards, and so is
    /// an old copy of either of the two ([`StoreError::OldCatalog`], [`StoreError::OldWal`]).
    /// `progress` reports how far recovery is.
    ///
    /// Dropping the future does not stop a recovery that has begun: the device is in use until it
    /// ends.
    pub async fn open(
        device: SharedDevice,
        wal_options: alluvium_wal::Options,
        objects: Arc<dyn ObjectStore>,
        catalog: Arc<dyn Catalog>,
        fold: Arc<dyn Fold>,
        options: Options,
        progress: Option<alluvium_wal::Progress>,
    ) -> Result<Opened, StoreError> {
        let recovered = {
            let (catalog, fold, options) = (catalog.clone(), fold.clone(), options.clone());
            let recover = move || {
                recover::recover(device, &wal_options, &*catalog, &*fold, &options, progress)
            };
            tokio::task::spawn_blocking(recover)
                .await
                .map_err(|error| StoreError::Failed(error.to_string()))??
        };
        let start = recovered.recovery.wal.start;
        let losses = Arc::new(Losses::new(&recovered.recovery.gaps));
        let objects = Objects::new(&objects, &options, losses.clone())?;
        let shared = Arc::new(Shared {
            wal_id: recovered.recovery.wal.wal_id,
            owner: Owner::new(&recovered.wal, recovered.incarnations),
            wal: recovered.wal,
            objects,
            readers: Readers::default(),
            catalog,
            version: recovered.version.into(),
            fold,
            max_batch_bytes: recovered.max_batch_bytes,
            streams: RwLock::new(recovered.streams),
            meta: RwLock::new(recovered.meta),
            cache: recovered.cache,
            space: SpaceGate::new(),
            wakes: Wakes::new(),
            upload: UploadSignal {
                wanted: Notify::new(),
                forced: AtomicBool::new(false),
                held: AtomicBool::new(!recovered.recovery.gaps.is_empty()),
                cut: AtomicU64::new(start.0),
                threshold_bytes: AtomicU64::new(options.upload_bytes),
                trimmed_to: Mutex::new(tokio::time::Instant::now()),
            },
            ends: recovered.ends,
            object_table: Mutex::new(recovered.objects),
            committing: tokio::sync::Mutex::new(()),
            ids: recovered.ids,
            retired: Notify::new(),
            compaction: Compaction::new(&options),
            numbers: Numbers::new(&recovered.recovery),
            faults: losses.faults.clone(),
            losses,
            failure: OnceLock::new(),
            failed: Notify::new(),
            halted: OnceLock::new(),
            options,
        });
        shared.faults.report(Reason::CatalogDiskFull, shared.catalog.shortage());
        // What was recovered may already be enough for an upload, and there may be objects to
        // delete.
        shared.upload.wanted.notify_one();
        shared.retired.notify_one();
        shared.compaction.changed(compact::all_streams(&shared));
        let complete = recovered.recovery.lost() == Lost::default();
        let mut handles = vec![
            shared.spawn(upload::run(shared.clone())),
            shared.spawn(wake::run(shared.clone())),
            shared.spawn(ends::run(shared.clone())),
            shared.spawn(object_cleaner::run(shared.clone(), complete)),
        ];
        if shared.compaction.is_on() {
            let compaction = shared.guarded(compact::run(shared.clone()));
            handles.push(shared.objects.background().spawn(compaction));
        }
        let tasks = Tasks { shared: shared.clone(), handles: Mutex::new(handles) };
        let store = Self { shared, tasks: Arc::new(tasks) };
        Ok(Opened { store, recovery: recovered.recovery })
    }

    /// Returns ids that were never handed out before, also not in an earlier run. Each is for one
    /// stream, which must be created before the store is closed.
    pub async fn new_stream_ids(&self, count: u32) -> Result<Vec<StreamId>, StoreError> {
        self.shared.new_stream_ids(count).await
    }

    /// Applies changes in order, atomically and durably. When it returns, created streams are open
    /// and deleted ones are closed.
    ///
    /// A list may change a stream only once, with the epoch of its writer ([`StoreError::Fenced`]).
    /// A trim to the start or before it does nothing. Dropping the future does not stop a commit
    /// that has begun. If the catalog fails, it is unknown whether the changes are durable; nothing
    /// can be changed or appended until the store is opened again, which finds out.
    pub async fn commit(&self, changes: Vec<Change>) -> Result<(), StoreError> {
        self.shared.commit(changes).await
    }

    /// Returns the stream with this id for reading, if it exists.
    pub fn stream(&self, id: StreamId) -> Option<Stream> {
        let state = self.shared.streams.read().get(&id)?.clone();
        Some(Stream::new(self.shared.clone(), state))
    }

    /// Sets how messages name streams. Only the first call has an effect.
    pub fn name_streams(&self, names: impl Fn(StreamId) -> Option<String> + Send + Sync + 'static) {
        self.shared.losses.name_streams(Box::new(names));
    }

    /// Allows uploads: the owner of the streams has handled what recovery found
    /// ([`Recovery::gaps`]). An upload folds gaps into checkpoints, after which a replay no longer
    /// shows them. So if there are any gaps, no upload begins before this call, unless an append
    /// finds no space.
    pub fn begin_uploads(&self) {
        self.shared.upload.held.store(false, Ordering::Release);
        self.shared.upload.wanted.notify_one();
    }

    /// Returns the ids of all streams, in no particular order.
    pub fn stream_ids(&self) -> Vec<StreamId> {
        self.shared.streams.read().keys().copied().collect()
    }

    /// Returns the owner's metadata whose keys have this prefix, sorted by key.
    pub fn meta(&self, prefix: &str) -> Vec<(String, Vec<u8>)> {
        let meta = self.shared.meta.read();
        let from_prefix =
            meta.range::<str, _>((std::ops::Bound::Included(prefix), std::ops::Bound::Unbounded));
        let with_prefix = from_prefix.take_while(|(key, _)| key.starts_with(prefix));
        let of_owner = with_prefix.filter(|(key, _)| !key.starts_with(OWN_META_PREFIX));
        of_owner.map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    /// Returns the metadata under exactly this key.
    pub fn meta_value(&self, key: &str) -> Option<Vec<u8>> {
        self.shared.meta.read().get(key).cloned()
    }

    /// Resolves when space may have become free since the last append that found none, or when the
    /// store has failed or closed. Await it after [`crate::AppendError::Full`], then try again; an
    /// event between the two is not lost. Waiters are not ordered: a batch that needs much space at
    /// once may have to try repeatedly while smaller ones take it.
    pub async fn wait_for_space(&self) {
        self.shared.space.wait().await;
    }

    /// Returns the cause once nothing can be appended any more: the WAL has latched, the catalog
    /// has failed, or the store was closed.
    pub fn failure(&self) -> Option<String> {
        self.shared.failure().map(|failure| failure.to_string())
    }

    /// Returns [`Store::failure`], unless the store was closed before any failure.
    pub fn failure_unless_closed(&self) -> Option<String> {
        let failure = self.shared.failure();
        failure.filter(|it| !matches!(it, StoreError::Closed)).map(|failure| failure.to_string())
    }

    /// Resolves with the cause once nothing can be appended any more, whether or not anything is
    /// being appended; see [`Store::failure`].
    pub async fn failed(&self) -> StoreError {
        let shared = &*self.shared;
        let failed = shared.failed.notified();
        let mut failed = std::pin::pin!(failed);
        failed.as_mut().enable(); // before the check, so that no failure between the two is missed
        if let Some(failure) = shared.failure() {
            return failure;
        }
        tokio::select! {
            () = failed => {}
            // No log reaches this offset, so this resolves only when the WAL stops.
            stopped = shared.wal.wait_durable(LogOffset(u64::MAX)) => {
                shared.fail(stopped.err().map_or(StoreError::Closed, StoreError::Wal));
            }
        }
        shared.failure().expect("it was set before the notification")
    }

    /// Returns the largest payload that a batch may have.
    pub fn max_batch_bytes(&self) -> u64 {
        self.shared.max_batch_bytes
    }

    /// Returns the newest header of the WAL.
    pub fn wal_header(&self) -> HeaderInfo {
        self.shared.wal.header()
    }

    /// Returns the version of the catalog; each change raises it by one.
    pub fn catalog_version(&self) -> u64 {
        self.shared.version()
    }

    /// Changes the capacity of the WAL while it is in use; see
    /// [`alluvium_wal::Wal::request_resize`].
    pub fn request_resize(&self, capacity_bytes: u64) -> Result<Resizing, ResizeError> {
        let resizing = self.shared.wal.request_resize(capacity_bytes)?;
        // Before the ring shrinks: the uploads free the space that the change needs.
        self.shared.follow_capacity();
        Ok(resizing)
    }

    /// Returns numbers for metrics and tools.
    pub fn stats(&self) -> Stats {
        let shared = &*self.shared;
        let (objects, object_bytes, retired_objects) = {
            let table = shared.object_table.lock();
            (table.live_count(), table.live_bytes(), table.retired.len())
        };
        let [damaged_objects, missing_objects] = shared.lost_objects();
        Stats {
            streams: shared.streams.read().len(),
            cache_bound_bytes: shared.options.cache_bytes,
            cache_used_bytes: shared.cache.used_bytes(),
            cache_pinned_bytes: shared.cache.pinned_bytes(),
            log_behind_bytes: shared.log_behind_bytes(),
            log_age: shared.log_age(),
            block_cache_used_bytes: shared.objects.cached_bytes(),
            disk_cache: shared.objects.disk_cache_stats(),
            reads: shared.objects.read_stats(),
            objects,
            object_bytes,
            retired_objects,
            damaged_objects,
            missing_objects,
            uploads: shared.numbers.uploads.load(Ordering::Relaxed),
            requests: shared.objects.requests(),
            uploaded_bytes: shared.numbers.uploaded_bytes.load(Ordering::Relaxed),
            compactions: shared.numbers.compactions.load(Ordering::Relaxed),
            compacted_bytes: shared.numbers.compacted_bytes.load(Ordering::Relaxed),
            compaction_failures: shared.numbers.compaction_failures.load(Ordering::Relaxed),
            upload_failures: shared.numbers.upload_failures.load(Ordering::Relaxed),
            upload_failing: shared.numbers.upload_failing(),
            orphans: shared.numbers.orphans.load(Ordering::Relaxed),
            orphans_deleted: shared.numbers.orphans_deleted.load(Ordering::Relaxed),
            clean_up_failures: shared.numbers.clean_up_failures.load(Ordering::Relaxed),
            owner_conflicts: shared.numbers.owner_conflicts.load(Ordering::Relaxed),
            refused_appends: shared.numbers.refused_appends.load(Ordering::Relaxed),
            lost: shared.numbers.lost,
            wal: shared.wal.stats(),
        }
    }

    /// Returns the faults that are present while the store serves, at most one for each reason;
    /// empty if there is none.
    pub fn degraded(&self) -> Vec<Degraded> {
        health::degraded(&self.stats(), &self.shared.losses.gaps(), &self.shared.faults)
    }

    /// Reports a fault of a layer above the store or, with `None`, its end. See
    /// [`Store::degraded`].
    pub fn report(&self, reason: Reason, detail: Option<String>) {
        self.shared.faults.report(reason, detail);
    }

    /// Uploads everything appended so far and waits until it is committed and the WAL is trimmed.
    /// Returns at once if there is nothing to upload. Only tests and orderly moves need it.
    pub async fn flush(&self) -> Result<(), StoreError> {
        let target = self.shared.wal.appended();
        while self.shared.wal.stats().trimmed < target {
            if let Some(failure) = self.shared.failure() {
                return Err(failure);
            }
            let seen = self.shared.space.generation();
            self.shared.request_upload();
            self.shared.space.wait_after(seen).await;
        }
        Ok(())
    }

    /// Stops the background work and closes the WAL cleanly. What is not uploaded stays in the WAL
    /// for the next start. Dropping the future does not stop a close that has begun.
    pub async fn close(self) -> Result<(), StoreError> {
        // First, so that waiters do not wait for something that will not happen.
        self.shared.halt(StoreError::Closed);
        let (shared, tasks) = (self.shared.clone(), self.tasks.clone());
        let closing = tokio::spawn(async move {
            let handles = std::mem::take(&mut *tasks.handles.lock());
            for handle in &handles {
                handle.abort();
            }
            for handle in handles {
                // Either it was cancelled, or its failure is already reported.
                let _ = handle.await;
            }
            // Commits run in tasks of their own. A later one sees the halt; wait for one that has
            // begun before.
            drop(shared.committing.lock().await);
            // Ownership checks of the WAL also run in tasks of their own.
            shared.owner.wait_for_check().await;
            // A failed log reports its failure when it is closed below.
            let _ = ends::close(&shared).await;
            // A mark that no earlier copy of the WAL has.
            let _ = shared.wal.set_mark(shared.version()).await;
            let (wal, catalog) = (shared.wal.clone(), shared.catalog.clone());
            let close = move || {
                let mark = wal.mark();
                wal.close()?;
                // Without this, such a copy is still refused if the log was used since.
                if let Err(error) = catalog.commit(&[Change::WalMarked(mark)]) {
                    tracing::warn!("an old copy of the WAL may not be recognized: {error}");
                }
                Ok(())
            };
            let closed = tokio::task::spawn_blocking(close).await;
            // Last, because only the speed of a later start depends on it.
            shared.objects.close().await;
            closed.map_err(|error| StoreError::Failed(error.to_string()))?.map_err(StoreError::Wal)
        });
        closing.await.map_err(|error| StoreError::Failed(error.to_string()))?
    }
}

impl Shared {
    pub(crate) fn failure(&self) -> Option<StoreError> {
        self.failure.get().cloned()
    }

    /// Records that the store has failed and wakes all waiters. The first cause counts. The caller
    /// must not hold the lock of a tail.
    pub(crate) fn fail(&self, failure: StoreError) {
        if self.failure.set(failure).is_err() {
            return;
        }
        match self.failure.get() {
            None | Some(StoreError::Closed) => {}
            Some(cause) => {
                tracing::error!("nothing can be appended until the store is opened again: {cause}");
            }
        }
        self.failed.notify_waiters();
        self.space.open_forever();
        let streams: Vec<_> = self.streams.read().values().cloned().collect();
        for stream in streams {
            wake::notify(&stream.watchers());
        }
    }

    /// Forbids changes of the catalog and of the memory derived from it: one of them may be behind
    /// the other, or the store is closed. Appends fail, too. The first cause counts.
    pub(crate) fn halt(&self, cause: StoreError) {
        let _ = self.halted.set(cause.clone());
        self.fail(cause);
    }

    /// Returns why nothing may be changed any more. Once another writer has the WAL, nothing that
    /// was built on it counts, and the next owner may have a copy of this catalog: a change made
    /// here would be in neither.
    pub(crate) fn halted(&self) -> Option<StoreError> {
        let fenced = || match self.wal.stopped()? {
            fenced @ WalError::Fenced { .. } => Some(StoreError::Wal(fenced)),
            _ => None,
        };
        self.halted.get().cloned().or_else(fenced)
    }

    /// Runs `work`. If it panics, memory may be inconsistent and events that others wait for may
    /// never come, so the store halts.
    pub(crate) async fn halt_on_panic<T>(
        &self,
        work: impl Future<Output = T>,
    ) -> Result<T, StoreError> {
        AssertUnwindSafe(work).catch_unwind().await.map_err(|panic| {
            let defect = StoreError::Failed(format!("a defect: {}", panics::text(&*panic)));
            self.halt(defect.clone());
            defect
        })
    }

    /// Wraps a task that runs as long as the store; a panic halts the store.
    fn guarded(
        self: &Arc<Self>,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> impl Future<Output = ()> + Send + 'static {
        let shared = self.clone();
        async move {
            // The halt has reported it.
            let _ = shared.halt_on_panic(task).await;
        }
    }

    fn spawn(self: &Arc<Self>, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        tokio::spawn(self.guarded(task))
    }

    /// Returns the bytes appended to the WAL since the last cut.
    pub(crate) fn log_behind_bytes(&self) -> u64 {
        self.wal.appended().0.saturating_sub(self.upload.cut.load(Ordering::Acquire))
    }

    /// See [`Stats::log_age`].
    fn log_age(&self) -> Duration {
        let wal = self.wal.stats();
        match wal.trimmed == wal.appended {
            true => Duration::ZERO,
            false => self.upload.trimmed_to.lock().elapsed(),
        }
    }

    /// Applies the bound of [`Options::upload_bytes`] to a resized WAL, so that appends can
    /// continue while an upload runs.
    pub(crate) fn follow_capacity(&self) {
        let capacity_bytes = self.wal.header().capacity_bytes;
        let wanted_bytes = self.wal.stats().resize_to_bytes.unwrap_or(capacity_bytes);
        let threshold_bytes = self.options.upload_bytes.min(capacity_bytes.min(wanted_bytes) / 4);
        self.upload.threshold_bytes.store(threshold_bytes, Ordering::Relaxed);
    }

    /// Requests an upload if the log, which has grown to `end`, is far enough ahead of the last
    /// cut.
    pub(crate) fn request_upload_if_due(&self, end: LogOffset) {
        let behind = end.0.saturating_sub(self.upload.cut.load(Ordering::Acquire));
        if behind >= self.upload.threshold_bytes.load(Ordering::Relaxed) {
            self.upload.wanted.notify_one();
        }
    }

    /// Whether a running upload must finish soon because appends wait for it or are about to. An
    /// upload begins with at most a quarter of the ring and half of the cache behind it (more only
    /// after recovery or a resize), so the thresholds here leave space to finish at full speed.
    pub(crate) fn is_upload_urgent(&self) -> bool {
        let wal = self.wal.stats();
        self.upload.forced.load(Ordering::Acquire)
            || self.failure().is_some()
            || self.log_behind_bytes() >= self.options.upload_bytes
            || wal.used_bytes >= wal.ring_bytes / 2
            || self.cache.pinned_bytes() >= self.options.cache_bytes / 4 * 3
    }

    /// Requests an upload regardless of the thresholds.
    pub(crate) fn request_upload(&self) {
        self.upload.forced.store(true, Ordering::Release);
        self.upload.wanted.notify_one();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::pin::pin;

    use alluvium_device::sim::{SimDisk, SimOptions, Stepper};
    use alluvium_wal::{FormatOptions, Wal};
    use object_store::memory::InMemory;

    use super::*;
    use crate::MemoryCatalog;

    /// Returns an empty store in memory and the task that drives its disk.
    pub(crate) async fn small_store() -> (Store, Stepper) {
        let disk = SimDisk::new(SimOptions { capacity_bytes: 1 << 20, ..SimOptions::default() });
        Wal::format(&disk.device(), &FormatOptions::default()).unwrap();
        let stepper = Stepper::start(disk.clone());
        let wal_options = alluvium_wal::Options {
            window_bytes: 256 << 10,
            block_bytes: 16 << 10,
            max_record_bytes: 64 << 10,
            ..alluvium_wal::Options::default()
        };
        let (objects, catalog) = (Arc::new(InMemory::new()), Arc::new(MemoryCatalog::default()));
        let (fold, options) = (Arc::new(()), Options::for_wal(1 << 20));
        let opened = Store::open(disk.device(), wal_options, objects, catalog, fold, options, None);
        (opened.await.unwrap().store, stepper)
    }

    /// The next opener of the device must not find this one still using it.
    #[tokio::test]
    async fn closing_waits_for_an_ownership_check() {
        let (store, _disk) = small_store().await;
        let shared = store.shared.clone();
        let checking = shared.owner.begin_check().await;
        let mut closing = pin!(store.close());
        let early = tokio::time::timeout(Duration::from_millis(20), &mut closing).await;
        assert!(early.is_err() && shared.wal.stopped().is_none(), "it waits");
        drop(checking);
        closing.await.unwrap();
    }
}
