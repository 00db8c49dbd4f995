//! A test environment for a store: a simulated disk, and an object store and a catalog that fail on
//! demand and die with the "process".

#![allow(dead_code, unreachable_pub)] // each test file uses a part of it

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use alluvium_device::sim::{Random, SimDisk, SimOptions, Stepper};
use alluvium_stream::catalog::Snapshot;
use alluvium_stream::{
    AppendError, Batch, Catalog, CatalogError, Change, Fold, KIND_LOG, MemoryCatalog, NewBatch,
    Opened, Options, Recovery, Store, StoreError, Stream, StreamEpoch, StreamId, StreamOffset,
    StreamWriter,
};
use alluvium_wal::{FormatOptions, Wal};
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetRange, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult,
};
use parking_lot::Mutex;

/// Long enough for a loaded machine; reached only by a test that hangs.
pub const HANG: Duration = Duration::from_secs(60);

/// What outlives a process (disk, objects, catalog), and the options of the next process.
pub struct World {
    pub disk: SimDisk,
    pub objects: Arc<InMemory>,
    pub catalog: Arc<MemoryCatalog>,
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
        Self { disk, objects: Arc::default(), catalog: Arc::default(), options, wal_options }
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
        self.start_as(Arc::new(Hash), prepare).await.unwrap()
    }

    pub async fn try_start(&self, fold: Arc<dyn Fold>) -> Result<Server, StoreError> {
        self.start_as(fold, |_| ()).await
    }

    async fn start_as(
        &self,
        fold: Arc<dyn Fold>,
        prepare: impl Fn(&Objects),
    ) -> Result<Server, StoreError> {
        let objects = Arc::new(Objects::new(self.objects.clone()));
        prepare(&objects);
        let catalog = Arc::new(FailingCatalog::new(self.catalog.clone()));
        // Opening is blocking work of the WAL on a disk that responds at once; from then on a
        // thread drives the disk.
        let stepper = Stepper::start(self.disk.clone());
        let opened = Store::open(
            self.disk.device(),
            self.wal_options.clone(),
            objects.clone(),
            catalog.clone(),
            fold,
            self.options.clone(),
            None,
        );
        let Opened { store, recovery } = opened.await?;
        Ok(Server { store, recovery, objects, catalog, stepper })
    }
}

/// One run of the server.
pub struct Server {
    pub store: Store,
    pub recovery: Recovery,
    pub objects: Arc<Objects>,
    pub catalog: Arc<FailingCatalog>,
    pub stepper: Stepper,
}

impl Server {
    /// Stops the server in an orderly way.
    pub async fn close(self) {
        self.store.close().await.unwrap();
        drop(self.stepper);
    }

    /// Kills the process: from this moment on nothing reaches catalog, objects or disk any more.
    pub fn crash(self, world: &mut World) {
        self.end(world, SimDisk::process_crash);
    }

    /// Cuts the power: the process is killed and the disk loses what was not flushed.
    pub fn power_cut(self, world: &mut World) {
        self.end(world, SimDisk::power_cut);
    }

    fn end(self, world: &mut World, end: impl Fn(&SimDisk) -> SimDisk) {
        self.objects.dead.store(true, Ordering::SeqCst);
        self.catalog.set(CatalogMode::Dead);
        world.disk = end(&world.disk);
        drop(self.store);
    }

    pub async fn create(&self, kind: u8) -> StreamWriter {
        let id = self.store.new_stream_ids(1).await.unwrap()[0];
        self.store.commit(vec![Change::CreateStream { id, kind }]).await.unwrap();
        self.open(id).await
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

/// Returns the deletion of a stream that was never opened with an epoch greater than 0.
pub fn delete(id: StreamId) -> Change {
    Change::DeleteStream { id, epoch: StreamEpoch(0) }
}

/// Returns the names in the object store, sorted, without the owner object.
pub async fn names(world: &World) -> Vec<String> {
    let mut names: Vec<_> = world
        .objects
        .list(None)
        .map_ok(|object| object.location)
        .try_filter(|location| futures::future::ready(!is_owner(location)))
        .map_ok(|location| location.to_string())
        .try_collect()
        .await
        .unwrap();
    names.sort();
    names
}

/// Whether this is the owner object. Requests for it are not counted, and fail only when all
/// requests fail.
pub fn is_owner(location: &Path) -> bool {
    location.filename() == Some("owner")
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CatalogMode {
    Works,
    /// Commits of uploads fail and change nothing.
    FailsUploads,
    /// Commits of uploads take effect, but return an error.
    LosesAnswersOfUploads,
    /// All commits take effect, but return an error.
    LosesAnswers,
    /// The next commit of a compaction is refused and changes nothing.
    RefusesACompaction,
    /// The disk is full: all commits are refused and change nothing.
    Full,
    Panics,
    /// Everything fails.
    Dead,
}

pub struct FailingCatalog {
    inner: Arc<MemoryCatalog>,
    /// Held during a commit, so that the process dies before or after it.
    pub mode: Mutex<CatalogMode>,
    pub failed: AtomicU64,
}

impl FailingCatalog {
    fn new(inner: Arc<MemoryCatalog>) -> Self {
        Self { inner, mode: Mutex::new(CatalogMode::Works), failed: AtomicU64::new(0) }
    }

    pub fn set(&self, mode: CatalogMode) {
        *self.mode.lock() = mode;
    }

    fn fail(&self) -> Result<u64, CatalogError> {
        self.failed.fetch_add(1, Ordering::SeqCst);
        Err(CatalogError::Failed("injected".into()))
    }
}

impl Catalog for FailingCatalog {
    fn load(&self) -> Result<Snapshot, CatalogError> {
        self.inner.load()
    }

    fn commit(&self, changes: &[Change]) -> Result<u64, CatalogError> {
        let mut mode = self.mode.lock();
        let is_compaction = changes.iter().any(|change| matches!(change, Change::Replaced(_)));
        let is_upload = changes.iter().any(|change| matches!(change, Change::LogUploaded(_)));
        match *mode {
            CatalogMode::Dead => return self.fail(),
            CatalogMode::FailsUploads if is_upload => return self.fail(),
            CatalogMode::RefusesACompaction if is_compaction => {
                *mode = CatalogMode::Works;
                self.failed.fetch_add(1, Ordering::SeqCst);
                return Err(CatalogError::Refused("injected".into()));
            }
            CatalogMode::Full => {
                self.failed.fetch_add(1, Ordering::SeqCst);
                return Err(CatalogError::Full("injected".into()));
            }
            CatalogMode::Panics => panic!("a bug in the catalog"),
            _ => {}
        }
        let version = self.inner.commit(changes)?;
        match *mode {
            CatalogMode::LosesAnswersOfUploads if is_upload => self.fail(),
            CatalogMode::LosesAnswers => self.fail(),
            _ => Ok(version),
        }
    }
}

/// An object store in memory that can be made to fail.
#[derive(Debug)]
pub struct Objects {
    inner: Arc<InMemory>,
    dead: AtomicBool,
    /// All requests fail.
    pub down: AtomicBool,
    /// Failures are permanent.
    pub refuses: AtomicBool,
    pub deletes_fail: AtomicBool,
    pub lists_fail: AtomicBool,
    /// Listings report objects as older than they are, by this number of seconds.
    pub clock_behind_s: AtomicU64,
    pub writes_panic: AtomicBool,
    /// While this is held, writes take effect but get no response.
    pub answers: tokio::sync::Mutex<()>,
    /// While this is held, reads wait.
    pub reading: Arc<tokio::sync::Mutex<()>>,
    /// Reads of this position fail.
    pub unreadable_at: AtomicU64,
    /// Which of the next reads return data with a flipped bit; the lowest bit is for the next read.
    pub flip_reads: AtomicU64,
    /// The number of next writes that fail: even ones without effect, odd ones after the object was
    /// written.
    pub fail_writes: AtomicU64,
    pub failed: AtomicU64,
    pub reads: AtomicU64,
    /// The threads on which the owner object was read, and those on which anything else was.
    pub owner_read_on: Mutex<BTreeSet<String>>,
    pub read_on: Mutex<BTreeSet<String>>,
    /// The number of reads in a thousand that fail; each read also takes a while. Both are random.
    pub reads_fail_permille: AtomicU64,
    pub chance: Mutex<Option<Random>>,
    /// Bytes requested by reads whose responses have not been taken or dropped yet, and the maximum
    /// so far.
    pub open_bytes: Arc<AtomicU64>,
    pub most_open_bytes: AtomicU64,
}

/// Bytes of [`Objects::open_bytes`].
struct Open(Arc<AtomicU64>, u64);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::SeqCst);
    }
}

impl Objects {
    fn new(inner: Arc<InMemory>) -> Self {
        Self {
            inner,
            dead: AtomicBool::new(false),
            down: AtomicBool::new(false),
            refuses: AtomicBool::new(false),
            deletes_fail: AtomicBool::new(false),
            lists_fail: AtomicBool::new(false),
            clock_behind_s: AtomicU64::new(0),
            writes_panic: AtomicBool::new(false),
            answers: tokio::sync::Mutex::default(),
            reading: Arc::default(),
            unreadable_at: AtomicU64::new(u64::MAX),
            flip_reads: AtomicU64::new(0),
            fail_writes: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            owner_read_on: Mutex::default(),
            read_on: Mutex::default(),
            reads_fail_permille: AtomicU64::new(0),
            chance: Mutex::new(None),
            open_bytes: Arc::default(),
            most_open_bytes: AtomicU64::new(0),
        }
    }

    fn error(&self) -> object_store::Error {
        self.failed.fetch_add(1, Ordering::SeqCst);
        if self.refuses.load(Ordering::SeqCst) {
            let source = "injected 403".into();
            return object_store::Error::PermissionDenied { path: "it".into(), source };
        }
        object_store::Error::Generic { store: "Test", source: "injected 503".into() }
    }

    fn check(&self) -> object_store::Result<()> {
        let down = self.dead.load(Ordering::SeqCst) || self.down.load(Ordering::SeqCst);
        if down { Err(self.error()) } else { Ok(()) }
    }
}

impl fmt::Display for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Test")
    }
}

#[async_trait]
impl ObjectStore for Objects {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> object_store::Result<PutResult> {
        self.check()?;
        if is_owner(location) {
            return self.inner.put_opts(location, payload, opts).await;
        }
        assert!(!self.writes_panic.load(Ordering::SeqCst), "a bug in the object store");
        let left = self.fail_writes.load(Ordering::SeqCst);
        if left > 0 {
            self.fail_writes.store(left - 1, Ordering::SeqCst);
            if left % 2 == 1 {
                self.inner.put_opts(location, payload, opts).await?;
            }
            return Err(self.error());
        }
        let put = self.inner.put_opts(location, payload, opts).await;
        let _answer = self.answers.lock().await;
        put
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.check()?;
        self.inner.put_multipart_opts(location, opts).await
    }

    async fn get_opts(
        &self,
        location: &Path,
        options: GetOptions,
    ) -> object_store::Result<GetResult> {
        self.check()?;
        let on = if is_owner(location) { &self.owner_read_on } else { &self.read_on };
        on.lock().insert(std::thread::current().name().unwrap_or_default().to_owned());
        if is_owner(location) || options.head {
            return self.inner.get_opts(location, options).await;
        }
        self.reads.fetch_add(1, Ordering::SeqCst);
        let bytes = match &options.range {
            Some(GetRange::Bounded(range)) => range.end - range.start,
            _ => 0,
        };
        let open_bytes = self.open_bytes.fetch_add(bytes, Ordering::SeqCst) + bytes;
        self.most_open_bytes.fetch_max(open_bytes, Ordering::SeqCst);
        let open = Open(self.open_bytes.clone(), bytes);
        drop(self.reading.lock().await);
        let chances =
            self.chance.lock().as_mut().map(|chance| (chance.next_u64(), chance.next_u64()));
        if let Some((pauses, fails)) = chances {
            for _ in 0..pauses % 20 {
                tokio::task::yield_now().await;
            }
            if fails % 1000 < self.reads_fail_permille.load(Ordering::SeqCst) {
                return Err(self.error());
            }
        }
        if let Some(GetRange::Bounded(range)) = &options.range
            && range.contains(&self.unreadable_at.load(Ordering::SeqCst))
        {
            return Err(self.error());
        }
        let mut result = self.inner.get_opts(location, options).await?;
        if let GetResultPayload::Stream(bytes) = result.payload {
            let flips = self.flip_reads.load(Ordering::SeqCst);
            self.flip_reads.store(flips >> 1, Ordering::SeqCst);
            let held = bytes.map_ok(move |bytes| {
                let _ = &open;
                let mut bytes = bytes.to_vec();
                if flips & 1 == 1 {
                    bytes[0] ^= 1;
                }
                bytes.into()
            });
            result.payload = GetResultPayload::Stream(held.boxed());
        }
        Ok(result)
    }

    async fn get_ranges(
        &self,
        location: &Path,
        ranges: &[Range<u64>],
    ) -> object_store::Result<Vec<Bytes>> {
        self.check()?;
        self.reads.fetch_add(1, Ordering::SeqCst);
        self.inner.get_ranges(location, ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        if self.check().is_err() || self.deletes_fail.load(Ordering::SeqCst) {
            let error = self.error();
            return Box::pin(futures::stream::once(async { Err(error) }));
        }
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        if self.check().is_err() || self.lists_fail.load(Ordering::SeqCst) {
            let error = self.error();
            return Box::pin(futures::stream::once(async { Err(error) }));
        }
        let behind = Duration::from_secs(self.clock_behind_s.load(Ordering::SeqCst));
        let older = move |object: ObjectMeta| ObjectMeta {
            last_modified: object.last_modified - behind,
            ..object
        };
        Box::pin(self.inner.list(prefix).map_ok(older))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.check()?;
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(
        &self,
        from: &Path,
        to: &Path,
        options: CopyOptions,
    ) -> object_store::Result<()> {
        self.check()?;
        self.inner.copy_opts(from, to, options).await
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
