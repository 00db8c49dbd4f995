//! An object store that panics when anything is written to it.

#![allow(unreachable_pub)]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult,
};

/// The object store of a process that must not write.
#[derive(Debug)]
pub struct ReadsOnly {
    inner: Arc<dyn ObjectStore>,
    /// All requests fail.
    pub down: AtomicBool,
    /// Listings of the catalog, and reads of objects of the chain.
    pub lists: AtomicU64,
    pub chain_reads: AtomicU64,
}

impl ReadsOnly {
    pub fn new(inner: Arc<dyn ObjectStore>) -> Self {
        let (lists, chain_reads) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { inner, down: AtomicBool::new(false), lists, chain_reads }
    }

    fn check(&self) -> object_store::Result<()> {
        match self.down.load(Ordering::SeqCst) {
            true => Err(object_store::Error::Generic { store: "Test", source: "503".into() }),
            false => Ok(()),
        }
    }
}

impl fmt::Display for ReadsOnly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadsOnly")
    }
}

#[async_trait]
impl ObjectStore for ReadsOnly {
    async fn put_opts(
        &self,
        location: &Path,
        _: PutPayload,
        _: PutOptions,
    ) -> object_store::Result<PutResult> {
        panic!("{location} is written")
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        _: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        panic!("{location} is written")
    }

    async fn get_opts(
        &self,
        location: &Path,
        options: GetOptions,
    ) -> object_store::Result<GetResult> {
        self.check()?;
        if location.as_ref().contains("/chain/") {
            self.chain_reads.fetch_add(1, Ordering::SeqCst);
        }
        self.inner.get_opts(location, options).await
    }

    fn delete_stream(
        &self,
        _: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        panic!("an object is deleted")
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.lists.fetch_add(1, Ordering::SeqCst);
        match self.check() {
            Ok(()) => self.inner.list(prefix),
            Err(error) => futures::stream::once(async { Err(error) }).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.check()?;
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, _: &Path, to: &Path, _: CopyOptions) -> object_store::Result<()> {
        panic!("{to} is written")
    }
}
