//! An object store in memory that fails on demand, and dies with the "process".

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use alluvium_device::sim::Random;
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetRange, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, UploadPart,
};
use parking_lot::Mutex;

/// Whether this object, or directory, is part of the catalog. Requests for it are not counted, and
/// fail only when all requests fail, or by [`CatalogMode`].
pub fn is_catalog(location: &Path) -> bool {
    location.parts().next().is_some_and(|first| ["catalogs", "wals"].contains(&first.as_ref()))
}

/// What happens to a PUT of an object of the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CatalogMode {
    Works,
    /// It fails and has no effect.
    Fails,
    /// It takes effect if it can, and an error is returned in any case.
    LosesAnswers,
    /// The client has a defect.
    Panics,
    /// The process dies before it takes effect.
    Dies,
    /// The process dies after it took effect.
    DiesAfter,
}

/// Decides about the next PUTs of objects of the catalog.
type Decide = dyn FnMut(&Path) -> CatalogMode + Send;

struct CatalogFaults(Box<Decide>);

impl fmt::Debug for CatalogFaults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CatalogFaults")
    }
}

/// A process, which may die. Requests with an effect hold the lock, so that none takes effect after
/// the death.
#[derive(Clone, Debug, Default)]
struct Process(Arc<Mutex<bool>>);

impl Process {
    /// Runs a request that has an effect; `None` if the process is dead.
    fn run<T>(&self, request: impl Future<Output = T>) -> Option<T> {
        let is_dead = self.0.lock();
        (!*is_dead).then(|| request.now_or_never().expect("an object store in memory"))
    }

    fn is_dead(&self) -> bool {
        *self.0.lock()
    }
}

/// Parts of an object.
#[derive(Debug)]
struct Upload {
    process: Process,
    inner: Box<dyn MultipartUpload>,
}

fn dead<T>() -> object_store::Result<T> {
    Err(object_store::Error::Generic { store: "Test", source: "the process is dead".into() })
}

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.inner.put_part(data)
    }

    async fn complete(&mut self) -> object_store::Result<PutResult> {
        self.process.run(self.inner.complete()).unwrap_or_else(dead)
    }

    async fn abort(&mut self) -> object_store::Result<()> {
        self.inner.abort().await
    }
}

/// An object store in memory that can be made to fail.
#[derive(Debug)]
pub struct Objects {
    inner: Arc<InMemory>,
    process: Process,
    catalog: Mutex<CatalogFaults>,
    /// The number of PUTs of objects of the catalog that have failed.
    pub catalog_failed: Arc<AtomicU64>,
    /// All requests fail.
    pub down: Arc<AtomicBool>,
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
    pub failed: Arc<AtomicU64>,
    pub reads: AtomicU64,
    /// The threads on which the catalog was read or written, and those on which anything else was
    /// read.
    pub catalog_on: Mutex<BTreeSet<String>>,
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
    pub fn new(inner: Arc<InMemory>) -> Self {
        Self {
            inner,
            process: Process::default(),
            catalog: Mutex::new(CatalogFaults(Box::new(|_| CatalogMode::Works))),
            catalog_failed: Arc::default(),
            down: Arc::default(),
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
            failed: Arc::default(),
            reads: AtomicU64::new(0),
            catalog_on: Mutex::default(),
            read_on: Mutex::default(),
            reads_fail_permille: AtomicU64::new(0),
            chance: Mutex::new(None),
            open_bytes: Arc::default(),
            most_open_bytes: AtomicU64::new(0),
        }
    }

    /// Kills the process: no request has an effect from now on.
    pub fn kill(&self) {
        *self.process.0.lock() = true;
    }

    /// Sets what happens to PUTs of objects of the catalog.
    pub fn set_catalog(&self, mode: CatalogMode) {
        self.decide_catalog(move |_| mode);
    }

    /// Sets what happens to each PUT of an object of the catalog.
    pub fn decide_catalog(&self, decide: impl FnMut(&Path) -> CatalogMode + Send + 'static) {
        *self.catalog.lock() = CatalogFaults(Box::new(decide));
    }

    fn put_catalog(
        &self,
        location: &Path,
        put: impl Future<Output = object_store::Result<PutResult>>,
    ) -> object_store::Result<PutResult> {
        self.catalog_on.lock().insert(thread_name());
        let mode = (self.catalog.lock().0)(location);
        let done = match mode {
            CatalogMode::Works | CatalogMode::LosesAnswers | CatalogMode::DiesAfter => {
                self.process.run(put).unwrap_or_else(dead)
            }
            CatalogMode::Fails => Err(self.error()),
            CatalogMode::Panics => panic!("a bug in the object store"),
            CatalogMode::Dies => {
                self.kill();
                dead()
            }
        };
        if mode == CatalogMode::DiesAfter {
            self.kill();
        }
        if mode == CatalogMode::Works {
            return done;
        }
        self.catalog_failed.fetch_add(1, Ordering::SeqCst);
        drop(done);
        Err(self.error())
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
        let down = self.process.is_dead() || self.down.load(Ordering::SeqCst);
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
        let put = |payload| self.inner.put_opts(location, payload, opts);
        if is_catalog(location) {
            return self.put_catalog(location, put(payload));
        }
        assert!(!self.writes_panic.load(Ordering::SeqCst), "a bug in the object store");
        let left = self.fail_writes.load(Ordering::SeqCst);
        if left > 0 {
            self.fail_writes.store(left - 1, Ordering::SeqCst);
            if left % 2 == 1 {
                self.process.run(put(payload)).unwrap_or_else(dead)?;
            }
            return Err(self.error());
        }
        let put = self.process.run(put(payload)).unwrap_or_else(dead);
        let _answer = self.answers.lock().await;
        put
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.check()?;
        let inner = self.inner.put_multipart_opts(location, opts).await?;
        Ok(Box::new(Upload { process: self.process.clone(), inner }))
    }

    async fn get_opts(
        &self,
        location: &Path,
        options: GetOptions,
    ) -> object_store::Result<GetResult> {
        self.check()?;
        let on = if is_catalog(location) { &self.catalog_on } else { &self.read_on };
        on.lock().insert(thread_name());
        if is_catalog(location) || options.head {
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
                // The last byte: the first one of a read of an index may precede it.
                if flips & 1 == 1
                    && let Some(last) = bytes.last_mut()
                {
                    *last ^= 1;
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
        if !is_catalog(location) {
            self.reads.fetch_add(1, Ordering::SeqCst);
        }
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
        let (inner, process) = (self.inner.clone(), self.process.clone());
        Box::pin(locations.and_then(move |location| {
            let deleted = process.run(inner.delete(&location)).unwrap_or_else(dead);
            futures::future::ready(deleted.map(|()| location))
        }))
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        let of_catalog = prefix.is_some_and(is_catalog);
        if self.check().is_err() || !of_catalog && self.lists_fail.load(Ordering::SeqCst) {
            let error = self.error();
            return Box::pin(futures::stream::once(async { Err(error) }));
        }
        if of_catalog {
            return self.inner.list(prefix);
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

fn thread_name() -> String {
    std::thread::current().name().unwrap_or_default().to_owned()
}
