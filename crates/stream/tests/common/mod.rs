//! A test environment for a store: a simulated disk, and an object store that fails on demand and
//! dies with the "process".

#![allow(dead_code, unreachable_pub)] // each test file uses a part of it

mod objects;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use alluvium_device::sim::{Random, SimDisk, SimOptions, Stepper};
use alluvium_stream::chain::{Chain, ChainState};
use alluvium_stream::{
    AppendError, Batch, Change, Fold, KIND_LOG, NewBatch, Opened, Options, Reason, Rebuild,
    RebuildError, Recovery, Store, StoreError, Stream, StreamEpoch, StreamId, StreamOffset,
    StreamWriter, locate,
};
use alluvium_wal::{FormatOptions, HeaderInfo, Wal};
use bytes::Bytes;
use futures::TryStreamExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use tokio::task::JoinHandle;
use uuid::Uuid;

pub use objects::{CatalogMode, Objects, is_catalog};

/// Long enough for a loaded machine; reached only by a test that hangs.
pub const HANG: Duration = Duration::from_secs(60);

/// What outlives a process (disk, objects), and the options of the next process.
pub struct World {
    pub disk: SimDisk,
    pub objects: Arc<InMemory>,
    pub options: Options,
    pub wal_options: alluvium_wal::Options,
}

/// Returns options for a small WAL, with matching thresholds.
pub fn small_options(wal_capacity_bytes: u64) -> (Options, alluvium_wal::Options) {
    let options = Options {
        cache_bytes: wal_capacity_bytes,
        upload_bytes: wal_capacity_bytes / 8,
        upload_interval: Duration::from_secs(3600),
        // Only the tests append.
        ends_interval: Duration::from_secs(365 * 24 * 60 * 60),
        // Changes of the catalog are published by uploads only.
        catalog_interval: Duration::from_secs(3600),
        block_cache_bytes: 1 << 20,
        // Objects stay as they were written, unless a test enables compaction.
        compaction_bytes: 0,
        retry_initial: Duration::from_millis(1),
        retry_max: Duration::from_millis(4),
        ..Options::default()
    };
    let wal_options = alluvium_wal::Options {
        window_bytes: (wal_capacity_bytes / 4) & !4095,
        block_bytes: 16 << 10,
        max_record_bytes: u32::try_from(wal_capacity_bytes / 16).unwrap(),
        ..alluvium_wal::Options::default()
    };
    (options, wal_options)
}

impl World {
    pub fn new(wal_capacity_bytes: u64, seed: u64) -> Self {
        let disk = SimDisk::new(SimOptions {
            capacity_bytes: wal_capacity_bytes,
            seed,
            ..SimOptions::default()
        });
        Wal::format(&disk.device(), &FormatOptions::default()).unwrap();
        let (options, wal_options) = small_options(wal_capacity_bytes);
        Self { disk, objects: Arc::default(), options, wal_options }
    }

    /// Returns a world with copies of what this one has now, and nothing in common with it.
    pub async fn copy(&self) -> Self {
        Self {
            disk: SimDisk::from_image(&self.disk.image(), self.disk_options()),
            objects: Arc::new(in_memory(&contents(&self.objects).await).await),
            options: self.options.clone(),
            wal_options: self.wal_options.clone(),
        }
    }

    /// Returns the header of the log.
    pub fn header(&self) -> HeaderInfo {
        Wal::inspect(&self.disk.device()).unwrap().header
    }

    /// Returns the catalog in the object store; `None` if there is none.
    pub async fn try_catalog(&self) -> Option<ChainState> {
        let retry = self.options.retry();
        let store = locate(&*self.objects, self.header().wal_id).await.unwrap();
        Chain::new(self.objects.clone(), store, retry).load().await.unwrap()
    }

    /// Returns the catalog in the object store. It does not have what was recorded in the log since
    /// the last publication.
    pub async fn catalog(&self) -> ChainState {
        self.try_catalog().await.expect("a catalog")
    }

    /// Returns the objects of the catalog, of which an old copy may be restored later.
    pub async fn catalog_objects(&self) -> Contents {
        let mut found = contents(&self.objects).await;
        found.retain(|(location, _)| is_catalog(location));
        found
    }

    /// Puts other objects in place of those of the catalog; returns the object store with those.
    pub async fn replace_catalog(&mut self, by: &Contents) -> Arc<InMemory> {
        let mut all = contents(&self.objects).await;
        all.retain(|(location, _)| !is_catalog(location));
        all.extend_from_slice(by);
        std::mem::replace(&mut self.objects, Arc::new(in_memory(&all).await))
    }

    /// Returns the object store.
    pub fn store(&self) -> Arc<dyn ObjectStore> {
        self.objects.clone()
    }

    /// Rebuilds a store from its objects, with the log or without it.
    pub async fn rebuild_from_objects(
        &self,
        store: Uuid,
        has_log: bool,
        fold: Arc<dyn Fold>,
    ) -> Result<Rebuild, RebuildError> {
        let log = has_log.then(|| self.disk.device());
        let options = Options::default();
        Rebuild::from_objects(&self.store(), store, log, &fold, &options, &|_, _, _| ()).await
    }

    /// Replaces the disk by a new, formatted one.
    pub fn lose_disk(&mut self, wal_capacity_bytes: u64) -> HeaderInfo {
        self.disk = SimDisk::new(SimOptions {
            capacity_bytes: wal_capacity_bytes,
            seed: 7,
            ..SimOptions::default()
        });
        Wal::format(&self.disk.device(), &FormatOptions::default()).unwrap()
    }

    /// Returns the options for a disk made from an image of this one.
    pub fn disk_options(&self) -> SimOptions {
        SimOptions { seed: 1, ..SimOptions::default() }
    }

    pub async fn start(&self) -> Server {
        self.try_start(Arc::new(Hash)).await.unwrap()
    }

    /// Starts a server with an object store that `prepare` has prepared.
    pub async fn start_with(&self, prepare: impl Fn(&Objects)) -> Server {
        self.start_with_fold(Arc::new(Hash), prepare).await.unwrap()
    }

    pub async fn try_start(&self, fold: Arc<dyn Fold>) -> Result<Server, StoreError> {
        self.start_with_fold(fold, |_| ()).await
    }

    /// Starts a server with this fold, and an object store that `prepare` has prepared.
    pub async fn start_with_fold(
        &self,
        fold: Arc<dyn Fold>,
        prepare: impl Fn(&Objects),
    ) -> Result<Server, StoreError> {
        let objects = Arc::new(Objects::new(self.objects.clone()));
        prepare(&objects);
        // Opening is blocking work of the WAL on a disk that responds at once; from then on a
        // thread drives the disk.
        let stepper = Stepper::start(self.disk.clone());
        let opened = Store::open(
            self.disk.device(),
            self.wal_options.clone(),
            objects.clone(),
            fold,
            self.options.clone(),
            None,
        );
        let Opened { store, recovery } = opened.await?;
        Ok(Server { store, recovery, objects, stepper })
    }
}

/// Names and bytes of objects.
pub type Contents = Vec<(Path, Bytes)>;

/// Returns everything in an object store, sorted by name.
pub async fn contents(objects: &InMemory) -> Contents {
    let names = objects.list(None).map_ok(|object| object.location);
    let mut names: Vec<Path> = names.try_collect().await.unwrap();
    names.sort();
    let mut found = Contents::new();
    for name in names {
        let bytes = objects.get(&name).await.unwrap().bytes().await.unwrap();
        found.push((name, bytes));
    }
    found
}

/// Returns an object store with these contents.
pub async fn in_memory(contents: &Contents) -> InMemory {
    let objects = InMemory::new();
    for (name, bytes) in contents {
        objects.put(name, bytes.clone().into()).await.unwrap();
    }
    objects
}

/// One run of the server.
pub struct Server {
    pub store: Store,
    pub recovery: Recovery,
    pub objects: Arc<Objects>,
    pub stepper: Stepper,
}

impl Server {
    /// Stops the server in an orderly way.
    pub async fn close(self) {
        self.store.close().await.unwrap();
        drop(self.stepper);
    }

    /// Kills the process: from this moment on nothing reaches objects or disk any more.
    pub fn crash(self, world: &mut World) {
        self.end(world, SimDisk::process_crash);
    }

    /// Cuts the power: the process is killed and the disk loses what was not flushed.
    pub fn power_cut(self, world: &mut World) {
        self.end(world, SimDisk::power_cut);
    }

    fn end(self, world: &mut World, end: impl Fn(&SimDisk) -> SimDisk) {
        self.objects.kill();
        world.disk = end(&world.disk);
        drop(self.store);
    }

    pub async fn create(&self, kind: u8) -> StreamWriter {
        let id = self.store.new_stream_ids(1).await.unwrap()[0];
        self.store.commit(vec![creation(id, kind)]).await.unwrap();
        self.open(id).await
    }

    /// Begins to upload everything. The task ends with the upload, or when the store fails.
    pub fn begin_flush(&self) -> JoinHandle<Result<(), StoreError>> {
        let store = self.store.clone();
        tokio::spawn(async move { store.flush().await })
    }

    /// Whether a fault is reported.
    pub fn reports(&self, reason: Reason) -> bool {
        self.store.degraded().iter().any(|fault| fault.reason == reason)
    }

    /// Begins to upload everything, and waits until the delta of the upload has failed: it is in
    /// the object store with [`CatalogMode::LosesAnswers`], and is not with [`CatalogMode::Fails`].
    /// Its publication goes on until the process ends or the mode changes.
    pub async fn fail_an_upload(&self, mode: CatalogMode) -> JoinHandle<Result<(), StoreError>> {
        self.objects.set_catalog(mode);
        let failed = || self.objects.catalog_failed.load(Ordering::SeqCst);
        let before = failed();
        let flush = self.begin_flush();
        // There may be nothing to upload.
        eventually("the delta is sent", || failed() > before || flush.is_finished()).await;
        flush
    }

    /// Opens a stream for writing with its current epoch.
    pub async fn open(&self, id: StreamId) -> StreamWriter {
        let epoch = self.store.stream(id).unwrap().newest_epoch();
        self.store.open_stream(id, epoch).await.unwrap()
    }

    pub async fn create_log(&self) -> StreamWriter {
        self.create(KIND_LOG).await
    }
}

/// Ends a task that may wait for a server that is about to end.
pub async fn abandon<T>(task: JoinHandle<T>) {
    task.abort();
    let _ = task.await;
}

/// Appends and uploads three objects of ten batches each.
pub async fn three_objects(server: &Server) -> (StreamWriter, Vec<Batch>) {
    let stream = server.create_log().await;
    let batches: Vec<Batch> = (0..30).map(|i| batch(stream.id(), i * 2, 2, 1000)).collect();
    for (i, batch) in batches.iter().enumerate() {
        append(&server.store, &stream, batch).await.await.unwrap();
        if i % 10 == 9 {
            server.store.flush().await.unwrap();
        }
    }
    assert_eq!(server.store.stats().objects, 3);
    (stream, batches)
}

/// Appends batches `from..to` of one offset each, and uploads each of them as an object of its own.
pub async fn upload_each(server: &Server, stream: &StreamWriter, from: u64, to: u64) -> Vec<Batch> {
    let mut batches = Vec::new();
    for base in from..to {
        batches.push(batch(stream.id(), base, 1, 1000));
        append(&server.store, stream, batches.last().unwrap()).await.await.unwrap();
        server.store.flush().await.unwrap();
    }
    batches
}

/// Returns the creation of a stream.
pub fn creation(id: StreamId, kind: u8) -> Change {
    Change::CreateStream { id, kind, label: Bytes::new() }
}

/// Returns the deletion of a stream that was never opened with an epoch greater than 0.
pub fn delete(id: StreamId) -> Change {
    Change::DeleteStream { id, epoch: StreamEpoch(0) }
}

/// Returns the names in the object store, sorted, without those of the catalog.
pub async fn names(world: &World) -> Vec<String> {
    let mut names: Vec<_> = world
        .objects
        .list(None)
        .map_ok(|object| object.location)
        .try_filter(|location| futures::future::ready(!is_catalog(location)))
        .map_ok(|location| location.to_string())
        .try_collect()
        .await
        .unwrap();
    names.sort();
    names
}

/// Returns pseudo-random bytes that depend on the stream and the offset.
pub fn payload(stream: StreamId, base: u64, len_bytes: usize) -> Bytes {
    let mut random = Random::new(stream.0 << 40 ^ base);
    let mut bytes = Vec::with_capacity(len_bytes + 8);
    while bytes.len() < len_bytes {
        bytes.extend(random.next_u64().to_le_bytes());
    }
    bytes.truncate(len_bytes);
    bytes.into()
}

/// Returns the batch that a stream of this test has at `base`.
pub fn batch(stream: StreamId, base: u64, count: u32, len_bytes: usize) -> Batch {
    Batch {
        base: StreamOffset(base),
        count,
        max_timestamp_ms: (base * 10).cast_signed(),
        payload: payload(stream, base, len_bytes),
    }
}

pub fn new_batch(batch: &Batch) -> NewBatch {
    let Batch { base, count, max_timestamp_ms, payload } = batch.clone();
    NewBatch { base, count, max_timestamp_ms, payload }
}

/// Appends at the end, waiting for space as often as necessary; returns the acknowledgement.
pub async fn append(
    store: &Store,
    stream: &StreamWriter,
    batch: &Batch,
) -> alluvium_stream::Append {
    loop {
        match stream.append(new_batch(batch)) {
            Ok(append) => return append,
            Err(AppendError::Full) => {
                tokio::time::timeout(HANG, store.wait_for_space())
                    .await
                    .expect("a wake-up was lost");
            }
            Err(error) => panic!("append: {error}"),
        }
    }
}

/// Reads all batches from `from` on, by fetches of about `max_bytes`.
pub async fn read_from(stream: &Stream, from: u64, max_bytes: usize) -> Vec<Batch> {
    let mut read: Vec<Batch> = Vec::new();
    let mut next = StreamOffset(from);
    loop {
        let fetched = stream.fetch(next, max_bytes).await.unwrap();
        let Some(last) = fetched.batches.last() else {
            assert!(
                next >= fetched.durable_end,
                "nothing at {next}, and the durable end is {}",
                fetched.durable_end
            );
            return read;
        };
        let bytes: usize = fetched.batches.iter().map(|batch| batch.payload.len()).sum();
        assert!(
            bytes <= max_bytes || fetched.batches.len() == 1,
            "{bytes} bytes of at most {max_bytes}"
        );
        next = last.end();
        read.extend(fetched.batches);
    }
}

/// Reads all batches that a stream has, whatever gaps there are.
pub async fn read_all(server: &Server, id: StreamId) -> Vec<Batch> {
    let stream = server.store.stream(id).unwrap();
    let (mut read, mut next) = (Vec::new(), stream.start_offset());
    loop {
        let fetched = stream.fetch(next, 10_000).await.unwrap();
        let Some(last) = fetched.batches.last() else { return read };
        next = last.end();
        read.extend(fetched.batches);
    }
}

/// A fold whose checkpoint is a chain over all batches: the end offset, and a checksum of
/// everything before it.
pub struct Hash;

impl Fold for Hash {
    fn fold(
        &self,
        stream: StreamId,
        _: u8,
        offsets: Range<StreamOffset>,
        _: StreamOffset,
        previous: Option<&[u8]>,
        batches: &[Batch],
    ) -> Option<Vec<u8>> {
        let (mut end, mut crc) = match previous {
            Some(bytes) => (
                u64::from_le_bytes(bytes[..8].try_into().unwrap()),
                u32::from_le_bytes(bytes[8..].try_into().unwrap()),
            ),
            None => (0, u32::try_from(stream.0).unwrap()),
        };
        assert_eq!(offsets.start.0, end, "stream {stream}: a fold must not skip or repeat offsets");
        for batch in batches {
            assert_eq!(
                batch.base.0, end,
                "stream {stream}: a fold must not skip or repeat a batch"
            );
            end = batch.end().0;
            crc = crc32c::crc32c_append(crc, &batch.payload);
        }
        assert_eq!(offsets.end.0, end, "stream {stream}");
        Some([end.to_le_bytes().as_slice(), &crc.to_le_bytes()].concat())
    }
}

/// Returns the owner's state: the checkpoint folded with all batches after it.
pub fn state_of(stream: &Stream) -> Option<Vec<u8>> {
    let replay = stream.replay();
    match replay.batches.is_empty() {
        true => replay.checkpoint.map(|bytes| bytes.to_vec()),
        false => Hash.fold(
            stream.id(),
            0,
            replay.checkpoint_end..replay.end,
            stream.start_offset(),
            replay.checkpoint.as_deref(),
            &replay.batches,
        ),
    }
}

/// Returns the expected value of [`state_of`] for a stream with these batches.
pub fn expected_state(stream: StreamId, batches: &[Batch]) -> Option<Vec<u8>> {
    if batches.is_empty() {
        None
    } else {
        let end = batches[batches.len() - 1].end();
        Hash.fold(stream, 0, StreamOffset(0)..end, StreamOffset(0), None, batches)
    }
}

/// Waits until `done` returns true, for background work without an event that a test could wait
/// for.
pub async fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !done() {
        assert!(begun.elapsed() < HANG, "never happened: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
