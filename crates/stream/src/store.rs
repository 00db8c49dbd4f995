//! The store: all streams of one WAL, or of a chain that another process writes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use alluvium_device::SharedDevice;
use alluvium_wal::{HeaderInfo, ResizeError, Resizing};
use object_store::ObjectStore;
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::catalog::Change;
use crate::catalog_state::{CatalogState, Unpublished};
use crate::compaction_signal::CompactionSignal;
use crate::error::StoreError;
use crate::faults::{Degraded, Reason};
use crate::fold::Fold;
use crate::losses::Losses;
use crate::numbers::Numbers;
use crate::objects::{CountedStores, Objects};
use crate::options::Options;
use crate::polls::{Following, Polls};
use crate::read_ahead::Readers;
use crate::report::{Lost, Recovery};
use crate::shared::{Shared, UploadSignal};
use crate::stats::Stats;
use crate::stream::Stream;
use crate::types::StreamId;
use crate::view::{Basis, Failure, View};
use crate::wake::{self, SpaceGate, Wakes};
use crate::{compact, ends, follow, health, object_cleaner, publish, recover, upload};

const NOT_PUBLISHED: &str = "the log keeps the last changes of the catalog, which are not in the \
                             object store";

/// The result of [`Store::open`].
pub struct Opened {
    /// The store, open for traffic.
    pub store: Store,
    /// What recovery found.
    pub recovery: Recovery,
}

/// All streams of one WAL ([`Store::open`]), or of a chain that another process writes
/// ([`Store::follow`]): then nothing can be appended or changed ([`StoreError::ReadOnly`]). Cheap
/// to clone. It must be opened and used in a `tokio` runtime.
///
/// Close it with [`Store::close`]. Dropping the last handle instead stops it as a crash would and
/// wakes every waiter at a [`Stream`]; nothing is lost. A change of the catalog that is in progress
/// may end later, so a store that will be opened again in the same process must be closed.
#[derive(Clone)]
pub struct Store {
    pub(crate) view: Arc<View>,
    role: Role,
}

#[derive(Clone)]
enum Role {
    /// This process writes the store.
    Owner(Arc<Shared>, Arc<Tasks>),
    /// Another process does, and this one follows its chain.
    Follower(Arc<Polls>, Arc<FollowTask>),
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

/// The task that follows a chain.
struct FollowTask {
    view: Arc<View>,
    polls: Arc<Polls>,
    handle: JoinHandle<()>,
}

impl FollowTask {
    fn stop(&self) {
        self.handle.abort();
        self.view.fail(StoreError::Closed);
        self.polls.close(&StoreError::Closed);
    }
}

impl Drop for FollowTask {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Store {
    /// Recovers the WAL on `device`, which must be formatted, and opens it for traffic.
    ///
    /// The catalog is in the object store. It is bound to the WAL at the first open and refused
    /// with any other WAL afterwards, and so is an old copy of either of the two
    /// ([`StoreError::OldCatalog`], [`StoreError::OldWal`]). While the object store does not
    /// answer, the opening waits and logs why. `progress` reports how far the reading of the WAL
    /// is.
    ///
    /// Dropping the future does not stop a recovery that has begun: the device is in use until it
    /// ends.
    pub async fn open(
        device: SharedDevice,
        wal_options: alluvium_wal::Options,
        objects: Arc<dyn ObjectStore>,
        fold: Arc<dyn Fold>,
        options: Options,
        progress: Option<alluvium_wal::Progress>,
    ) -> Result<Opened, StoreError> {
        let stores = CountedStores::new(&objects);
        let objects = stores.catalog();
        let recovered =
            recover::recover(device, wal_options, &objects, fold.clone(), &options, progress);
        let recovered = recovered.await?;
        let start = recovered.recovery.wal.start;
        let losses = Arc::new(Losses::new(&recovered.recovery.gaps));
        let objects = Objects::new(stores, &options, losses.clone())?;
        let state = recovered.writer.state();
        let catalog = CatalogState {
            store: state.header.store,
            incarnation: state.header.incarnation,
            opening: state.header.opening,
            committing: tokio::sync::Mutex::new(Unpublished {
                version: state.header.version,
                lists: Vec::new(),
                bytes: 0,
                removed: Vec::new(),
                cut: state.header.cut,
            }),
            published: state.header.version.into(),
            recorded: recovered.recorded.into(),
            wanted: Notify::new(),
            snapshot_wanted: Notify::new(),
            ids: recovered.ids,
            term: state.head.term,
            writer: tokio::sync::Mutex::new(recovered.writer),
        };
        let compaction = CompactionSignal::new(&options);
        let threshold_bytes = options.upload_bytes.into();
        let view = Arc::new(View {
            basis: Basis::Log(recovered.wal.clone()),
            objects,
            readers: Readers::default(),
            options,
            max_batch_bytes: recovered.max_batch_bytes,
            streams: RwLock::new(recovered.streams),
            meta: RwLock::new(recovered.meta),
            object_table: Mutex::new(recovered.objects),
            wakes: Wakes::new(),
            faults: losses.faults.clone(),
            losses,
            failure: Failure::default(),
            fence: recovered.fence,
        });
        let shared = Arc::new(Shared {
            view: view.clone(),
            checking: Arc::default(),
            wal: recovered.wal,
            catalog,
            fold,
            cache: recovered.cache,
            space: SpaceGate::new(),
            upload: UploadSignal {
                wanted: Notify::new(),
                forced: AtomicBool::new(false),
                held: AtomicBool::new(!recovered.recovery.gaps.is_empty()),
                cut: AtomicU64::new(start.0),
                threshold_bytes,
                trimmed_to: Mutex::new(tokio::time::Instant::now()),
            },
            ends: recovered.ends,
            log_end: AtomicU64::new(0),
            batches_until: AtomicU64::new(0),
            retired: Notify::new(),
            compaction,
            numbers: Numbers::new(&recovered.recovery),
        });
        shared.follow_trim();
        // What was recovered may already be enough for an upload, and there may be objects to
        // delete.
        shared.upload.wanted.notify_one();
        shared.retired.notify_one();
        shared.compaction.changed(compact::all_streams(&shared));
        let Recovery { declared_gaps, .. } = recovered.recovery;
        let complete = recovered.recovery.lost() == Lost::default() && declared_gaps == 0;
        let mut handles = vec![
            shared.spawn(upload::run(shared.clone())),
            shared.spawn(wake::task::run(shared.clone())),
            shared.spawn(ends::task::run(shared.clone())),
            shared.spawn(publish::task::run(shared.clone())),
            shared.spawn(publish::task::run_upkeep(shared.clone())),
            shared.spawn(object_cleaner::run(shared.clone(), complete)),
        ];
        if shared.compaction.is_on() {
            let compaction = shared.guarded(compact::run(shared.clone()));
            handles.push(shared.objects.background().spawn(compaction));
        }
        let tasks = Tasks { shared: shared.clone(), handles: Mutex::new(handles) };
        let store = Self { view, role: Role::Owner(shared, Arc::new(tasks)) };
        Ok(Opened { store, recovery: recovered.recovery })
    }

    /// Opens a store that another process writes, for reading: everything that is in the chain.
    /// Follows the chain from then on, and writes nothing to the object store.
    ///
    /// While the object store does not answer, the opening waits and logs why; later, what was read
    /// before is served, and the fault is reported ([`Reason::CatalogNotFollowed`]).
    ///
    /// # Errors
    /// There is no such store, or its chain is damaged or of a later version; an option is invalid.
    pub async fn follow(
        objects: Arc<dyn ObjectStore>,
        store: Uuid,
        options: Options,
    ) -> Result<Self, StoreError> {
        let follower = follow::open(&objects, store, options).await?;
        let (view, polls) = (follower.view.clone(), follower.polls.clone());
        let handle = tokio::spawn(follower.run());
        let task = FollowTask { view: view.clone(), polls: polls.clone(), handle };
        Ok(Self { view, role: Role::Follower(polls, Arc::new(task)) })
    }

    /// Returns the part of a store that writes.
    ///
    /// # Errors
    /// [`StoreError::ReadOnly`].
    pub(crate) fn owner(&self) -> Result<&Arc<Shared>, StoreError> {
        match &self.role {
            Role::Owner(shared, _) => Ok(shared),
            Role::Follower(..) => Err(StoreError::ReadOnly),
        }
    }

    /// Whether another process writes the store, and this one follows.
    pub fn is_followed(&self) -> bool {
        matches!(self.role, Role::Follower(..))
    }

    /// Returns what is known of the chain that is followed; `None` if this process writes it.
    pub fn following(&self) -> Option<Following> {
        match &self.role {
            Role::Owner(..) => None,
            Role::Follower(polls, _) => Some(polls.following()),
        }
    }

    /// Returns the version of the catalog, and later ones as the chain is followed; `None` if this
    /// process writes it.
    pub fn versions(&self) -> Option<watch::Receiver<u64>> {
        match &self.role {
            Role::Owner(..) => None,
            Role::Follower(polls, _) => Some(polls.versions()),
        }
    }

    /// Returns a number that changes whenever metadata was taken over from the chain; 0 if this
    /// process writes the store.
    pub fn meta_changes(&self) -> u64 {
        match &self.role {
            Role::Owner(..) => 0,
            Role::Follower(polls, _) => polls.meta_changes(),
        }
    }

    /// Reads the chain up to its present end, if it is followed.
    ///
    /// # Errors
    /// It cannot be read.
    pub async fn catch_up(&self) -> Result<(), StoreError> {
        self.view.catch_up().await
    }

    /// Returns ids that no stream has had and that were not handed out before in this run. Each is
    /// for one stream, which must be created before the store is closed.
    pub async fn new_stream_ids(&self, count: u32) -> Result<Vec<StreamId>, StoreError> {
        self.owner()?.new_stream_ids(count).await
    }

    /// Applies changes in order, atomically and durably. When it returns, created streams are open
    /// and deleted ones are closed.
    ///
    /// A list may change a stream only once, with the epoch of its writer ([`StoreError::Fenced`]).
    /// A trim to the start or before it does nothing. Dropping the future does not stop a commit
    /// that has begun. If the WAL fails, it is unknown whether the changes are durable; nothing can
    /// be changed or appended until the store is opened again, which finds out.
    pub async fn commit(&self, changes: Vec<Change>) -> Result<(), StoreError> {
        self.owner()?.commit(changes).await
    }

    /// Returns the stream with this id for reading, if it exists.
    pub fn stream(&self, id: StreamId) -> Option<Stream> {
        let state = self.view.streams.read().get(&id)?.clone();
        Some(Stream::new(self.view.clone(), state))
    }

    /// Sets how messages name streams. Only the first call has an effect.
    pub fn name_streams(&self, names: impl Fn(StreamId) -> Option<String> + Send + Sync + 'static) {
        self.view.losses.name_streams(Box::new(names));
    }

    /// Allows uploads: the owner of the streams has handled what recovery found
    /// ([`Recovery::gaps`]). An upload folds gaps into checkpoints, after which a replay no longer
    /// shows them. So if there are any gaps, no upload begins before this call, unless an append
    /// finds no space.
    pub fn begin_uploads(&self) {
        if let Ok(shared) = self.owner() {
            shared.upload.held.store(false, Ordering::Release);
            shared.upload.wanted.notify_one();
        }
    }

    /// Returns the ids of all streams, in no particular order.
    pub fn stream_ids(&self) -> Vec<StreamId> {
        self.view.streams.read().keys().copied().collect()
    }

    /// Returns the owner's metadata whose keys have this prefix, sorted by key.
    pub fn meta(&self, prefix: &str) -> Vec<(String, Vec<u8>)> {
        let meta = self.view.meta.read();
        let from_prefix =
            meta.range::<str, _>((std::ops::Bound::Included(prefix), std::ops::Bound::Unbounded));
        let with_prefix = from_prefix.take_while(|(key, _)| key.starts_with(prefix));
        with_prefix.map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    /// Returns the metadata under exactly this key.
    pub fn meta_value(&self, key: &str) -> Option<Vec<u8>> {
        self.view.meta.read().get(key).cloned()
    }

    /// Resolves when space may have become free since the last append that found none, or when the
    /// store has failed or closed. Await it after [`crate::AppendError::Full`], then try again; an
    /// event between the two is not lost. Waiters are not ordered: a batch that needs much space at
    /// once may have to try repeatedly while smaller ones take it.
    pub async fn wait_for_space(&self) {
        if let Ok(shared) = self.owner() {
            shared.space.wait().await;
        }
    }

    /// Returns the cause once nothing can be appended any more: the WAL has latched, the catalog
    /// has failed, or the store was closed.
    pub fn failure(&self) -> Option<String> {
        self.view.failure().map(|failure| failure.to_string())
    }

    /// Returns [`Store::failure`], unless the store was closed before any failure.
    pub fn failure_unless_closed(&self) -> Option<String> {
        let failure = self.view.failure();
        failure.filter(|it| !matches!(it, StoreError::Closed)).map(|failure| failure.to_string())
    }

    /// Resolves with the cause once nothing can be appended any more, whether or not anything is
    /// being appended; see [`Store::failure`].
    pub async fn failed(&self) -> StoreError {
        match &self.role {
            Role::Owner(shared, _) => shared.failed().await,
            Role::Follower(..) => self.view.failed().await,
        }
    }

    /// Returns the largest payload that a batch may have.
    pub fn max_batch_bytes(&self) -> u64 {
        self.view.max_batch_bytes
    }

    /// Returns the newest header of the WAL.
    ///
    /// # Panics
    /// If the store is followed: this process has no WAL.
    pub fn wal_header(&self) -> HeaderInfo {
        self.owner().expect("this process writes the store").wal.header()
    }

    /// Returns the version of the catalog in the object store. Changes that are in the log alone do
    /// not raise it.
    pub fn catalog_version(&self) -> u64 {
        match &self.role {
            Role::Owner(shared, _) => shared.catalog.version(),
            Role::Follower(polls, _) => polls.last_applied().version,
        }
    }

    /// Returns the term: 0 at first, raised by each opening that may have lost records. It does not
    /// change while the store is open, unless it is followed.
    pub fn term(&self) -> u32 {
        match &self.role {
            Role::Owner(shared, _) => shared.catalog.term,
            Role::Follower(polls, _) => polls.term(),
        }
    }

    /// Changes the capacity of the WAL while it is in use; see
    /// [`alluvium_wal::Wal::request_resize`].
    ///
    /// # Panics
    /// If the store is followed: this process has no WAL.
    pub fn request_resize(&self, capacity_bytes: u64) -> Result<Resizing, ResizeError> {
        let shared = self.owner().expect("this process writes the store");
        let resizing = shared.wal.request_resize(capacity_bytes)?;
        // Before the ring shrinks: the uploads free the space that the change needs.
        shared.follow_capacity();
        Ok(resizing)
    }

    /// Returns numbers for metrics and tools.
    pub fn stats(&self) -> Stats {
        match &self.role {
            Role::Owner(shared, _) => Stats::of_owner(shared),
            Role::Follower(..) => Stats::of_view(&self.view),
        }
    }

    /// Limits the bytes per second of copies (what uploads write, and what compaction reads and
    /// writes) and of other reads, each of them within [`Options::object_store_bytes_per_s`]; 0
    /// means no bound. `limits` returns the two. It is called with a lock held, so that of
    /// concurrent changes the latest one wins. Effective at once.
    pub fn limit_transfers(&self, limits: impl FnOnce() -> [u64; 2]) {
        self.view.objects.transfers().limit(limits);
    }

    /// Returns the faults that are present while the store serves, at most one for each reason;
    /// empty if there is none.
    pub fn degraded(&self) -> Vec<Degraded> {
        health::degraded(&self.stats(), &self.view.losses.gaps(), &self.view.faults)
    }

    /// Reports a fault of a layer above the store or, with `None`, its end. See
    /// [`Store::degraded`].
    pub fn report(&self, reason: Reason, detail: Option<String>) {
        self.view.faults.report(reason, detail);
    }

    /// Uploads everything appended so far and waits until it is committed and the WAL is trimmed.
    /// Returns at once if there is nothing to upload. Only tests and orderly moves need it.
    pub async fn flush(&self) -> Result<(), StoreError> {
        let shared = self.owner()?;
        let target = shared.wal.appended();
        while shared.wal.stats().trimmed < target {
            if let Some(failure) = shared.failure() {
                return Err(failure);
            }
            let seen = shared.space.generation();
            shared.request_upload();
            shared.space.wait_after(seen).await;
        }
        Ok(())
    }

    /// Stops the background work and closes the WAL cleanly. What is not uploaded stays in the WAL
    /// for the next start. Dropping the future does not stop a close that has begun.
    pub async fn close(self) -> Result<(), StoreError> {
        let (shared, tasks) = match &self.role {
            Role::Owner(shared, tasks) => (shared.clone(), tasks.clone()),
            Role::Follower(_, task) => {
                task.stop();
                self.view.objects.close().await;
                return Ok(());
            }
        };
        // First, so that waiters do not wait for something that will not happen.
        shared.halt(StoreError::Closed);
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
            drop(shared.catalog.committing.lock().await);
            // Checks of the WAL's headers also run in tasks of their own.
            drop(shared.checking.lock().await);
            // A failed log reports its failure when it is closed below.
            let _ = ends::task::close(&shared).await;
            // A mark that no earlier copy of the WAL has. The last delta states it, so that such a
            // copy is refused; without it, the copy is still refused if the log was used since.
            let _ = shared.wal.set_mark(shared.catalog.version()).await;
            let wal = shared.wal.clone();
            let closed = tokio::task::spawn_blocking(move || wal.close()).await;
            // Nothing can be appended any more, so it can state that the WAL has nothing else.
            match tokio::time::timeout(publish::LAST_DELTA, shared.publish_last()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!("{NOT_PUBLISHED}: {error}"),
                Err(_) => tracing::warn!("{NOT_PUBLISHED} within {:?}", publish::LAST_DELTA),
            }
            // Last, because only the speed of a later start depends on it.
            shared.objects.close().await;
            closed.map_err(|error| StoreError::Failed(error.to_string()))?.map_err(StoreError::Wal)
        });
        closing.await.map_err(|error| StoreError::Failed(error.to_string()))?
    }
}

impl Stats {
    /// Returns the numbers of reads and of objects in use.
    fn of_view(view: &View) -> Self {
        let (objects, object_bytes, retired_objects) = {
            let table = view.object_table.lock();
            (table.live_count(), table.live_bytes(), table.retired.len())
        };
        let [damaged_objects, missing_objects] = view.lost_objects();
        Self {
            streams: view.streams.read().len(),
            block_cache_used_bytes: view.objects.cached_bytes(),
            disk_cache: view.objects.disk_cache_stats(),
            reads: view.objects.read_stats(),
            throttled: view.objects.transfers().throttled(),
            objects,
            object_bytes,
            retired_objects,
            damaged_objects,
            missing_objects,
            requests: view.objects.requests(),
            ..Self::default()
        }
    }

    /// Returns all numbers.
    fn of_owner(shared: &Shared) -> Self {
        let numbers = &shared.numbers;
        Self {
            cache_bound_bytes: shared.options.cache_bytes,
            cache_used_bytes: shared.cache.used_bytes(),
            cache_pinned_bytes: shared.cache.pinned_bytes(),
            log_behind_bytes: shared.log_behind_bytes(),
            log_age: shared.log_age(),
            uploads: numbers.uploads.load(Ordering::Relaxed),
            uploaded_bytes: numbers.uploaded_bytes.load(Ordering::Relaxed),
            compactions: numbers.compactions.load(Ordering::Relaxed),
            compacted_bytes: numbers.compacted_bytes.load(Ordering::Relaxed),
            compaction_failures: numbers.compaction_failures.load(Ordering::Relaxed),
            upload_failures: numbers.upload_failures.load(Ordering::Relaxed),
            upload_failing: numbers.upload_failing(),
            orphans: numbers.orphans.load(Ordering::Relaxed),
            orphans_deleted: numbers.orphans_deleted.load(Ordering::Relaxed),
            clean_up_failures: numbers.clean_up_failures.load(Ordering::Relaxed),
            refused_appends: numbers.refused_appends.load(Ordering::Relaxed),
            lost: numbers.lost,
            wal: shared.wal.stats(),
            ..Self::of_view(shared)
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::pin::pin;
    use std::time::Duration;

    use alluvium_device::sim::{SimDisk, SimOptions, Stepper};
    use alluvium_wal::{FormatOptions, Wal};
    use object_store::memory::InMemory;

    use super::*;

    /// Returns an empty store in memory and the task that drives its disk.
    pub(crate) async fn small_store() -> (Store, Stepper) {
        small_store_with(Arc::new(())).await
    }

    /// As [`small_store`], with a fold.
    pub(crate) async fn small_store_with(fold: Arc<dyn Fold>) -> (Store, Stepper) {
        let disk = SimDisk::new(SimOptions { capacity_bytes: 1 << 20, ..SimOptions::default() });
        Wal::format(&disk.device(), &FormatOptions::default()).unwrap();
        let stepper = Stepper::start(disk.clone());
        let wal_options = alluvium_wal::Options {
            window_bytes: 256 << 10,
            block_bytes: 16 << 10,
            max_record_bytes: 64 << 10,
            ..alluvium_wal::Options::default()
        };
        let objects = Arc::new(InMemory::new());
        let options = Options::for_wal(1 << 20);
        let opened = Store::open(disk.device(), wal_options, objects, fold, options, None);
        (opened.await.unwrap().store, stepper)
    }

    /// The next opener of the device must not find this one still using it.
    #[tokio::test]
    async fn closing_waits_for_a_check_of_the_headers() {
        let (store, _disk) = small_store().await;
        let shared = store.owner().unwrap().clone();
        let checking = shared.checking.clone().lock_owned().await;
        let mut closing = pin!(store.close());
        let early = tokio::time::timeout(Duration::from_millis(20), &mut closing).await;
        assert!(early.is_err() && shared.wal.stopped().is_none(), "it waits");
        drop(checking);
        closing.await.unwrap();
    }
}
