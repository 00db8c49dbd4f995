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

use crate::ahead::Readers;
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
use crate::recover::{self, Recovery};
use crate::stream::Stream;
use crate::tail::StreamState;
use crate::types::{Fold, StreamEpoch, StreamId};
use crate::wake::{RoomGate, Wakes};
use crate::{janitor, panics, upload, wake};

/// Why the store could not do something.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// The store cannot go on; the cause is the first one.
    #[error("the store has failed: {0}")]
    Failed(String),
    /// The store was closed.
    #[error("the store is closed")]
    Closed,
    /// An option is out of its range. The message names the option, the value and the bound.
    #[error("{0}")]
    InvalidOption(String),
    /// A change that makes no sense, such as trimming past the durable end. Nothing has changed.
    #[error("{0}")]
    InvalidChange(String),
    /// A newer writer has opened the stream. Nothing has changed.
    #[error(
        "stream {stream} was opened with epoch {newest}: a writer with epoch {epoch} changes nothing any more"
    )]
    Fenced {
        /// Which.
        stream: StreamId,
        /// The writer's.
        epoch: StreamEpoch,
        /// The newest.
        newest: StreamEpoch,
    },
    /// Catalog and WAL do not belong together. Going on would drop records, or give them to the
    /// wrong streams.
    #[error(
        "the catalog belongs to the WAL {catalog}, the device holds the WAL {wal}. Open the WAL with \
         the catalog that it was in use with last"
    )]
    WrongWal {
        /// In the catalog.
        catalog: Uuid,
        /// On the device.
        wal: Uuid,
    },
    /// The catalog was in use with this WAL once, and a newer one has been since. Going on would
    /// lose records for good.
    #[error(
        "the catalog is new or an old copy: it is of version {version} and has what the WAL held before {uploaded}, and the WAL was in use with version \
         {mark} and trimmed up to {trimmed}. The rest is in objects that a newer catalog knows: open the WAL with that one"
    )]
    OldCatalog {
        /// Of this catalog.
        version: u64,
        /// The WAL's mark: the version of the catalog that it was in use with last.
        mark: u64,
        /// Up to here the catalog has what the WAL held.
        uploaded: LogOffset,
        /// The WAL's trim offset.
        trimmed: LogOffset,
    },
    /// The WAL that the catalog belongs to was in use with it since this copy of it was made. What
    /// was appended since would be lost for good.
    #[error(
        "the device holds an old copy of the WAL: it is of the time of version {mark} of the catalog, which has seen the WAL with version {seen}. \
         Open the catalog with the device that was in use last, or both as they were at one moment"
    )]
    OldWal {
        /// In the header of this copy.
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
    /// Another server owns the objects: nothing is written or deleted. Nothing has changed.
    #[error("another server owns the objects")]
    NotOwner,
}

/// What [`Store::open`] gives.
pub struct Opened {
    /// The store, open for traffic.
    pub store: Store,
    /// What was found.
    pub recovery: Recovery,
}

/// Numbers for metrics and tools. Taken one after another, not at one moment.
#[derive(Clone, Debug)]
pub struct Stats {
    /// Streams that exist.
    pub streams: usize,
    /// The bound of the log cache, [`Options::cache_bytes`].
    pub cache_bound_bytes: u64,
    /// Batches in the log cache, bookkeeping included.
    pub cache_used_bytes: u64,
    /// The part of it that is not uploaded yet and cannot be evicted.
    pub cache_pinned_bytes: u64,
    /// What the WAL has grown by since the last upload began.
    pub log_behind_bytes: u64,
    /// How old the oldest record that is not trimmed is, at most: since the cut was taken that the
    /// WAL is trimmed to. The cut moves at each [`Options::upload_interval`], also while nothing is
    /// appended. Of records that recovery found, the time since the start. 0 if there is no such
    /// record.
    pub log_age: Duration,
    /// Verified blocks and indexes in memory.
    pub block_cache_used_bytes: u64,
    /// Verified blocks and indexes on a local disk.
    pub disk_cache: DiskCacheStats,
    /// Reads from objects.
    pub reads: ReadStats,
    /// Objects in use.
    pub objects: usize,
    /// Their size.
    pub object_bytes: u64,
    /// Objects waiting to be deleted.
    pub retired_objects: usize,
    /// Objects in use that a reader, or compaction, has found to be damaged.
    pub damaged_objects: LostObjects,
    /// Objects in use that were not there.
    pub missing_objects: LostObjects,
    /// Uploads committed since the start, those that needed no object included.
    pub uploads: u64,
    /// What was asked of the object store, by cause and kind; what was never asked is not there.
    pub requests: Vec<Requests>,
    /// Bytes of objects committed since the start.
    pub uploaded_bytes: u64,
    /// Compactions committed since the start.
    pub compactions: u64,
    /// Bytes of objects that they have written.
    pub compacted_bytes: u64,
    /// Compactions that have failed, and were given up or will be tried again.
    pub compaction_failures: u64,
    /// Failed attempts to write an object.
    pub upload_failures: u64,
    /// Set while objects cannot be written: from the first failed attempt until an upload has come
    /// to its end.
    pub upload_failing: Option<UploadFailing>,
    /// Old objects that the catalog does not know, and that are still there: they could not be
    /// deleted yet, or are kept because something is [lost](Stats::lost) that they may hold. As of
    /// the last look, which comes each [`Options::orphan_age`].
    pub orphans: usize,
    /// Orphans deleted since the start.
    pub orphans_deleted: u64,
    /// Failed attempts to delete what is not needed: an object, or all of them when they cannot be
    /// listed.
    pub clean_up_failures: u64,
    /// Appends that found no room.
    pub pushbacks: u64,
    /// What was lost before the start. Does not change while the store is open.
    pub lost: Lost,
    /// Times that no object was deleted, or the WAL not trimmed, since another store owns the same
    /// objects: one that has taken the WAL over, or has a copy of it.
    pub owner_conflicts: u64,
    /// The WAL's numbers.
    pub wal: alluvium_wal::Stats,
}

/// All streams of one WAL. Cheap to clone; must live, and be opened, in a `tokio` runtime.
///
/// Close it with [`Store::close`]. Dropping the last handle instead stops it as a crash would, and
/// wakes who still waits at a [`Stream`]; nothing is lost by that. A change of the catalog that has
/// begun ends later, so a store that is to be opened again in this process has to be closed.
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

/// What handles and tasks share.
pub(crate) struct Shared {
    pub(crate) wal: Wal,
    pub(crate) wal_id: Uuid,
    pub(crate) owner: Owner,
    pub(crate) objects: Objects,
    pub(crate) readers: Readers,
    pub(crate) catalog: Arc<dyn Catalog>,
    /// The catalog's version after the last commit whose consequences are in memory, or about to
    /// be.
    pub(crate) version: AtomicU64,
    pub(crate) fold: Arc<dyn Fold>,
    pub(crate) options: Options,
    pub(crate) max_batch_bytes: u64,
    pub(crate) streams: RwLock<HashMap<StreamId, Arc<StreamState>>>,
    pub(crate) meta: RwLock<BTreeMap<String, Vec<u8>>>,
    pub(crate) cache: LogCache,
    pub(crate) room: RoomGate,
    pub(crate) wakes: Wakes,
    pub(crate) upload: UploadSignal,
    pub(crate) ends: Ends,
    pub(crate) object_table: Mutex<ObjectTable>,
    /// Held over each change of the catalog and of what is derived from it in memory, so that both
    /// have one order.
    pub(crate) committing: tokio::sync::Mutex<()>,
    pub(crate) ids: Ids,
    /// Wakes the janitor.
    pub(crate) retired: Notify,
    pub(crate) losses: Arc<Losses>,
    pub(crate) compaction: Compaction,
    pub(crate) numbers: Numbers,
    pub(crate) faults: Arc<Faults>,
    /// Why nothing can be appended any more.
    failure: OnceLock<StoreError>,
    /// `failure` was set.
    failed: Notify,
    /// Why the catalog cannot be changed any more. `failure` is set too then, perhaps to something
    /// that came before.
    halted: OnceLock<StoreError>,
}

/// Ids to hand out next.
pub(crate) struct Ids {
    /// Changed under [`Shared::committing`].
    pub(crate) next_stream: AtomicU64,
    /// Handed out in this run, and not used yet. Others may have batches in the WAL.
    pub(crate) fresh_streams: Mutex<HashSet<StreamId>>,
    pub(crate) next_object: AtomicU64,
}

/// Metadata of the store itself.
pub(crate) const OWN_META_PREFIX: &str = "stream/";

/// How appends ask for an upload.
pub(crate) struct UploadSignal {
    pub(crate) wanted: Notify,
    /// An append found no room.
    pub(crate) forced: AtomicBool,
    /// Recovery has found gaps, and the owner of the streams has not dealt with them yet.
    pub(crate) held: AtomicBool,
    /// The log offset of the last cut.
    pub(crate) cut: AtomicU64,
    /// [`Options::upload_bytes`], or a quarter of the WAL if that is less since the WAL was
    /// resized.
    pub(crate) threshold_bytes: AtomicU64,
    /// When the cut was taken that the WAL is trimmed to; at first, the start. No record that was
    /// appended in this life and is not trimmed is older.
    pub(crate) trimmed_to: Mutex<tokio::time::Instant>,
}

impl Store {
    /// Recover the WAL on `device`, which must have been formatted, and open it for traffic.
    ///
    /// Nothing of the object store is needed for it, so an object store that is down delays
    /// nothing. `catalog` is bound to the WAL at the first open and refused with another one
    /// afterwards, and so is an old copy of either of the two ([`StoreError::OldCatalog`],
    /// [`StoreError::OldWal`]). `progress` is told how far recovery is.
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
            owner: Owner::new(&recovered.wal, recovered.lives),
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
            room: RoomGate::new(),
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
        shared.compaction.changed(compact::everything(&shared));
        let complete = recovered.recovery.lost() == Lost::default();
        let mut handles = vec![
            shared.spawn(upload::run(shared.clone())),
            shared.spawn(wake::run(shared.clone())),
            shared.spawn(ends::run(shared.clone())),
            shared.spawn(janitor::run(shared.clone(), complete)),
        ];
        if shared.compaction.is_on() {
            let compaction = shared.lasting(compact::run(shared.clone()));
            handles.push(shared.objects.background().spawn(compaction));
        }
        let tasks = Tasks { shared: shared.clone(), handles: Mutex::new(handles) };
        let store = Self { shared, tasks: Arc::new(tasks) };
        Ok(Opened { store, recovery: recovered.recovery })
    }

    /// Fresh ids, never handed out before, also not in an earlier life. Each serves for one stream,
    /// which is to be created before the store is closed.
    pub async fn new_stream_ids(&self, count: u32) -> Result<Vec<StreamId>, StoreError> {
        self.shared.new_stream_ids(count).await
    }

    /// Apply changes in order, atomically and durably; created streams are open, and deleted ones
    /// closed, when it returns.
    ///
    /// A list may change a stream only once, and with the epoch of its writer
    /// ([`StoreError::Fenced`]). A trim to or before the start does nothing. Dropping the future
    /// does not stop what has begun. If the catalog fails it is not known whether the changes
    /// became durable; nothing can be changed or appended then until the store is opened again,
    /// which finds out.
    pub async fn commit(&self, changes: Vec<Change>) -> Result<(), StoreError> {
        self.shared.commit(changes).await
    }

    /// The stream with this id, if it exists, for reading.
    pub fn stream(&self, id: StreamId) -> Option<Stream> {
        let state = self.shared.streams.read().get(&id)?.clone();
        Some(Stream::new(self.shared.clone(), state))
    }

    /// What the owner calls its streams, for messages about them. The first call counts.
    pub fn name_streams(&self, names: impl Fn(StreamId) -> Option<String> + Send + Sync + 'static) {
        self.shared.losses.name_streams(Box::new(names));
    }

    /// The owner of the streams has dealt with what recovery found ([`Recovery::gaps`]). An upload
    /// makes gaps a part of checkpoints, from where no replay tells of them, so if there are any,
    /// none begins before this is called, unless an append finds no room.
    pub fn begin_uploads(&self) {
        self.shared.upload.held.store(false, Ordering::Release);
        self.shared.upload.wanted.notify_one();
    }

    /// The ids of all streams, in no order.
    pub fn stream_ids(&self) -> Vec<StreamId> {
        self.shared.streams.read().keys().copied().collect()
    }

    /// All metadata of the owner under a prefix, sorted by key.
    pub fn meta(&self, prefix: &str) -> Vec<(String, Vec<u8>)> {
        let meta = self.shared.meta.read();
        let from_prefix =
            meta.range::<str, _>((std::ops::Bound::Included(prefix), std::ops::Bound::Unbounded));
        let with_prefix = from_prefix.take_while(|(key, _)| key.starts_with(prefix));
        let of_owner = with_prefix.filter(|(key, _)| !key.starts_with(OWN_META_PREFIX));
        of_owner.map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    /// The metadata under this very key.
    pub fn meta_value(&self, key: &str) -> Option<Vec<u8>> {
        self.shared.meta.read().get(key).cloned()
    }

    /// Resolves when space may have become free since the last append that found none, or the store
    /// has failed or closed. Used after [`crate::AppendError::Full`]: await it, then try again; an
    /// event between the two is not lost. There is no order among those who wait: a batch that
    /// needs much room at once may have to try again while small ones take it.
    pub async fn room(&self) {
        self.shared.room.wait().await;
    }

    /// Set once nothing can be appended any more: the WAL has latched, the catalog has failed, or
    /// the store was closed.
    pub fn failure(&self) -> Option<String> {
        self.shared.failure().map(|failure| failure.to_string())
    }

    /// [`Store::failure`], unless the store was closed before anything failed.
    pub fn failure_unless_closed(&self) -> Option<String> {
        let failure = self.shared.failure();
        failure.filter(|it| !matches!(it, StoreError::Closed)).map(|failure| failure.to_string())
    }

    /// Resolves with the cause once nothing can be appended any more, whether or not anybody
    /// appends; see [`Store::failure`].
    pub async fn failed(&self) -> StoreError {
        let shared = &*self.shared;
        let told = shared.failed.notified();
        let mut told = std::pin::pin!(told);
        told.as_mut().enable(); // before the look, so that nothing between the two is missed
        if let Some(failure) = shared.failure() {
            return failure;
        }
        tokio::select! {
            () = told => {}
            // An offset that no log reaches: this resolves when the WAL stops.
            stopped = shared.wal.wait_durable(LogOffset(u64::MAX)) => {
                shared.fail(stopped.err().map_or(StoreError::Closed, StoreError::Wal));
            }
        }
        shared.failure().expect("it was set, here or by who told")
    }

    /// The largest payload that a batch may have.
    pub fn max_batch_bytes(&self) -> u64 {
        self.shared.max_batch_bytes
    }

    /// The newest header of the WAL.
    pub fn wal_header(&self) -> HeaderInfo {
        self.shared.wal.header()
    }

    /// The version of the catalog: each change raises it by one.
    pub fn catalog_version(&self) -> u64 {
        self.shared.version()
    }

    /// Give the WAL another capacity while it is in use; see [`alluvium_wal::Wal::request_resize`].
    pub fn request_resize(&self, capacity_bytes: u64) -> Result<Resizing, ResizeError> {
        let resizing = self.shared.wal.request_resize(capacity_bytes)?;
        // Before a smaller ring is there: its uploads make room for the change.
        self.shared.follow_capacity();
        Ok(resizing)
    }

    /// Numbers for metrics and tools.
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
            pushbacks: shared.numbers.pushbacks.load(Ordering::Relaxed),
            lost: shared.numbers.lost,
            wal: shared.wal.stats(),
        }
    }

    /// What is wrong while the store serves, at most one entry for each reason; empty if all is
    /// well.
    pub fn degraded(&self) -> Vec<Degraded> {
        health::degraded(&self.stats(), &self.shared.losses.gaps(), &self.shared.faults)
    }

    /// Report a fault of a layer above the store, or, with `None`, that it is over. See
    /// [`Store::degraded`].
    pub fn report(&self, reason: Reason, detail: Option<String>) {
        self.shared.faults.report(reason, detail);
    }

    /// Upload what has been appended so far, and wait until it is committed and the WAL is trimmed;
    /// returns at once if there is nothing. Not needed for anything but tests and orderly moves.
    pub async fn flush(&self) -> Result<(), StoreError> {
        let target = self.shared.wal.appended();
        while self.shared.wal.stats().trimmed < target {
            if let Some(failure) = self.shared.failure() {
                return Err(failure);
            }
            let seen = self.shared.room.generation();
            self.shared.request_upload();
            self.shared.room.wait_after(seen).await;
        }
        Ok(())
    }

    /// Stop the background work and close the WAL cleanly. What is not uploaded stays in the WAL
    /// for the next start. Dropping the future does not stop what has begun.
    pub async fn close(self) -> Result<(), StoreError> {
        // At once, so that nobody waits for what will not come.
        self.shared.halt(StoreError::Closed);
        let (shared, tasks) = (self.shared.clone(), self.tasks.clone());
        let closing = tokio::spawn(async move {
            let handles = std::mem::take(&mut *tasks.handles.lock());
            for handle in &handles {
                handle.abort();
            }
            for handle in handles {
                // It was cancelled, or has ended with a failure that everybody knows.
                let _ = handle.await;
            }
            // Commits run in tasks of their own. Whoever begins now sees the halt; wait for the one
            // that has begun before.
            drop(shared.committing.lock().await);
            // So does a look at the WAL.
            shared.owner.looked().await;
            // A log that has failed says so when it is closed.
            let _ = ends::close(&shared).await;
            // A mark that no copy of the WAL has that was made before.
            let _ = shared.wal.set_mark(shared.version()).await;
            let (wal, catalog) = (shared.wal.clone(), shared.catalog.clone());
            let close = move || {
                let mark = wal.mark();
                wal.close()?;
                // Such a copy would be refused all the same if the log had been used since.
                if let Err(error) = catalog.commit(&[Change::WalMarked(mark)]) {
                    tracing::warn!("an old copy of the WAL may not be recognized: {error}");
                }
                Ok(())
            };
            let closed = tokio::task::spawn_blocking(close).await;
            // Last, since only a later start's speed depends on it.
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

    /// Nothing can go on: say so, and let nobody wait for what will not come. The first cause
    /// counts. Not to be called with a tail locked.
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
        self.room.open_for_ever();
        let streams: Vec<_> = self.streams.read().values().cloned().collect();
        for stream in streams {
            wake::notify(&stream.watchers());
        }
    }

    /// Nothing may be changed any more, neither the catalog nor what is derived from it in memory:
    /// one of them may be behind the other, or the store is closed. Appends end with it. The first
    /// cause counts.
    pub(crate) fn halt(&self, cause: StoreError) {
        let _ = self.halted.set(cause.clone());
        self.fail(cause);
    }

    /// Why nothing may be changed any more. From when another writer has the WAL, nothing of what
    /// was built on it counts, and the next owner may have a copy of this catalog: what is changed
    /// here would be in neither.
    pub(crate) fn halted(&self) -> Option<StoreError> {
        let fenced = || match self.wal.stopped()? {
            fenced @ WalError::Fenced { .. } => Some(StoreError::Wal(fenced)),
            _ => None,
        };
        self.halted.get().cloned().or_else(fenced)
    }

    /// Run `work`. If it panics nobody knows what is true in memory any more, and what others wait
    /// for may never come: the store halts.
    pub(crate) async fn caught<T>(&self, work: impl Future<Output = T>) -> Result<T, StoreError> {
        AssertUnwindSafe(work).catch_unwind().await.map_err(|panic| {
            let defect = StoreError::Failed(format!("a defect: {}", panics::text(&*panic)));
            self.halt(defect.clone());
            defect
        })
    }

    /// A task of the store's life.
    fn lasting(
        self: &Arc<Self>,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> impl Future<Output = ()> + Send + 'static {
        let shared = self.clone();
        async move {
            // The halt has said it.
            let _ = shared.caught(task).await;
        }
    }

    fn spawn(self: &Arc<Self>, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        tokio::spawn(self.lasting(task))
    }

    /// What the WAL has grown by since the last cut.
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

    /// The bound of [`Options::upload_bytes`], with which appends go on while an upload runs, holds
    /// for a WAL that was resized too.
    pub(crate) fn follow_capacity(&self) {
        let capacity_bytes = self.wal.header().capacity_bytes;
        let wanted_bytes = self.wal.stats().resize_to_bytes.unwrap_or(capacity_bytes);
        let threshold_bytes = self.options.upload_bytes.min(capacity_bytes.min(wanted_bytes) / 4);
        self.upload.threshold_bytes.store(threshold_bytes, Ordering::Relaxed);
    }

    /// The log has grown up to `end`: ask for an upload if it is time.
    pub(crate) fn grown(&self, end: LogOffset) {
        let behind = end.0.saturating_sub(self.upload.cut.load(Ordering::Acquire));
        if behind >= self.upload.threshold_bytes.load(Ordering::Relaxed) {
            self.upload.wanted.notify_one();
        }
    }

    /// Whether an upload that is running has to end soon: somebody waits for it, or will. An upload
    /// begins with at most a quarter of the ring and half of the cache behind it, unless recovery
    /// or a resize made that more, so what is asked for here leaves room for the end at full speed.
    pub(crate) fn hurries_upload(&self) -> bool {
        let wal = self.wal.stats();
        self.upload.forced.load(Ordering::Acquire)
            || self.failure().is_some()
            || self.log_behind_bytes() >= self.options.upload_bytes
            || wal.used_bytes >= wal.ring_bytes / 2
            || self.cache.pinned_bytes() >= self.options.cache_bytes / 4 * 3
    }

    /// Ask for an upload whatever the thresholds say.
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

    /// With nothing in it, in memory; and who moves its disk.
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

    /// Whoever opens the device after that finds nobody there.
    #[tokio::test]
    async fn closing_waits_for_a_look_at_the_wal() {
        let (store, _disk) = small_store().await;
        let shared = store.shared.clone();
        let looking = shared.owner.begin_look().await;
        let mut closing = pin!(store.close());
        let early = tokio::time::timeout(Duration::from_millis(20), &mut closing).await;
        assert!(early.is_err() && shared.wal.stopped().is_none(), "it has waited");
        drop(looking);
        closing.await.unwrap();
    }
}
