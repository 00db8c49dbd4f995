//! Counts requests to the object store by class and kind.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, UploadPart,
};

use crate::request_class::RequestClass;

/// Requests of one kind and class to the object store since the start. A request that the store's
/// client retries by itself counts once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requests {
    /// `upload`, `read`, `compaction`, `clean-up` or `catalog`.
    pub class: &'static str,
    /// `put`, `part`, `multipart` (begin, end or abort of an object in parts), `get`, `list`
    /// (however many pages) or `delete`.
    pub kind: &'static str,
    /// Number of requests.
    pub count: u64,
    /// Bytes of objects sent or received.
    pub bytes: u64,
}

const CLASSES: [(RequestClass, &str); 4] = [
    (RequestClass::Upload, "upload"),
    (RequestClass::Read, "read"),
    (RequestClass::Compaction, "compaction"),
    (RequestClass::CleanUp, "clean-up"),
];

#[derive(Clone, Copy)]
enum Kind {
    Put,
    Part,
    Multipart,
    Get,
    List,
    Delete,
}

const KINDS: [&str; 6] = ["put", "part", "multipart", "get", "list", "delete"];

#[derive(Debug, Default)]
struct Counter {
    count: AtomicU64,
    bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct Counters([Counter; KINDS.len()]);

impl Counters {
    fn count(&self, kind: Kind, bytes: usize) {
        let counter = &self.0[kind as usize];
        counter.count.fetch_add(1, Ordering::Relaxed);
        counter.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// The class of the requests of the chain, which have no bandwidth class.
const CATALOG: &str = "catalog";

/// An object store, wrapped once for each class, and for the catalog.
pub(crate) struct CountedStores {
    classes: [Counted; CLASSES.len()],
    catalog: Arc<Counted>,
}

impl CountedStores {
    pub(crate) fn new(store: &Arc<dyn ObjectStore>) -> Self {
        let counted = || Counted { inner: store.clone(), counters: Arc::default() };
        Self { classes: CLASSES.map(|_| counted()), catalog: Arc::new(counted()) }
    }

    pub(crate) fn get(&self, class: RequestClass) -> &dyn ObjectStore {
        &self.classes[class as usize]
    }

    /// Returns the object store for the chain.
    pub(crate) fn catalog(&self) -> Arc<dyn ObjectStore> {
        self.catalog.clone()
    }

    /// Returns the number of requests of each kind and class.
    pub(crate) fn requests(&self) -> Vec<Requests> {
        let mut requests = Vec::new();
        let classes = self.classes.iter().zip(CLASSES.map(|(_, class)| class));
        for (store, class) in classes.chain([(&*self.catalog, CATALOG)]) {
            for (Counter { count, bytes }, kind) in store.counters.0.iter().zip(KINDS) {
                let (count, bytes) = (count.load(Ordering::Relaxed), bytes.load(Ordering::Relaxed));
                if count > 0 {
                    requests.push(Requests { class, kind, count, bytes });
                }
            }
        }
        requests
    }
}

#[derive(Debug)]
struct Counted {
    inner: Arc<dyn ObjectStore>,
    counters: Arc<Counters>,
}

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for Counted {
    async fn put_opts(&self, to: &Path, data: PutPayload, o: PutOptions) -> Result<PutResult> {
        self.counters.count(Kind::Put, data.content_length());
        self.inner.put_opts(to, data, o).await
    }

    async fn put_multipart_opts(
        &self,
        to: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.counters.count(Kind::Multipart, 0);
        let inner = self.inner.put_multipart_opts(to, options).await?;
        Ok(Box::new(CountedUpload { inner, counters: self.counters.clone() }))
    }

    async fn get_opts(&self, from: &Path, options: GetOptions) -> Result<GetResult> {
        let got = self.inner.get_opts(from, options).await;
        let bytes = got.as_ref().map_or(0, |got| got.range.end - got.range.start);
        self.counters.count(Kind::Get, usize::try_from(bytes).unwrap_or(usize::MAX));
        got
    }

    fn delete_stream(
        &self,
        names: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let counters = self.counters.clone();
        self.inner.delete_stream(Box::pin(names.inspect(move |_| counters.count(Kind::Delete, 0))))
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.counters.count(Kind::List, 0);
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.counters.count(Kind::List, 0);
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.counters.count(Kind::Put, 0);
        self.inner.copy_opts(from, to, options).await
    }
}

#[derive(Debug)]
struct CountedUpload {
    inner: Box<dyn MultipartUpload>,
    counters: Arc<Counters>,
}

#[async_trait]
impl MultipartUpload for CountedUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.counters.count(Kind::Part, data.content_length());
        self.inner.put_part(data)
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.counters.count(Kind::Multipart, 0);
        self.inner.complete().await
    }

    async fn abort(&mut self) -> Result<()> {
        self.counters.count(Kind::Multipart, 0);
        self.inner.abort().await
    }
}
