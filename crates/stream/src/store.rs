//! CONTRACT SKELETON, to be replaced: the signatures that the broker relies on.
#![allow(unused_variables, missing_docs, clippy::todo, clippy::needless_pass_by_value)]

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::Notify;

use crate::catalog::Change;
use crate::types::{Batch, NewBatch, StreamId, StreamOffset};

/// Bounds and thresholds (documented fields: meaning, default, min, max).
#[derive(Clone, Debug)]
pub struct Options {
    /// Hard bound of the log cache: 1 GiB by default.
    pub cache_bytes: u64,
    /// Upload when this much is not uploaded: 512 MiB, at most a quarter of the WAL and half of the cache.
    pub upload_bytes: u64,
    /// Upload at least this often when there is anything: 60 s.
    pub upload_interval: Duration,
}

/// What [`Store::open`] found.
pub struct Opened {
    pub store: Store,
    // + the WAL's recovery report, batches and streams recovered, skipped, elapsed
}

#[derive(Clone, Debug)]
pub struct Stats {}

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("the store failed: {0}")]
    Failed(String),
}

/// All streams of one WAL. Cheap to clone.
#[derive(Clone)]
pub struct Store {}

impl Store {
    // pub async fn open(device, wal_options, objects: Arc<dyn ObjectStore>, catalog: Arc<dyn Catalog>, fold: Arc<dyn Fold>, options, progress) -> Result<Opened, StoreError>

    /// A fresh id, never handed out before, also not in an earlier life.
    pub async fn new_stream_ids(&self, count: u32) -> Result<Vec<StreamId>, StoreError> {
        todo!()
    }
    /// Apply changes atomically and durably; created streams are open when it returns.
    pub async fn commit(&self, changes: Vec<Change>) -> Result<(), StoreError> {
        todo!()
    }
    pub fn stream(&self, id: StreamId) -> Option<Stream> {
        todo!()
    }
    /// All metadata under a prefix, sorted by key.
    pub fn meta(&self, prefix: &str) -> Vec<(String, Vec<u8>)> {
        todo!()
    }
    /// Resolves when space may have become free (an upload was committed, the WAL was trimmed, durability moved), or the store failed. Used after
    /// [`AppendError::Full`].
    /// The usage is plain: on `Full`, `store.room().await`, then try again; a wakeup between the two calls is not lost.
    pub async fn room(&self) {
        todo!()
    }
    /// Set once the WAL has latched: nothing can be appended any more.
    pub fn failure(&self) -> Option<String> {
        todo!()
    }
    pub fn stats(&self) -> Stats {
        todo!()
    }
    /// Stop uploads, close the WAL cleanly.
    pub async fn close(self) -> Result<(), StoreError> {
        todo!()
    }
}

#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// No room now: wait for [`Store::room`] and try again. Nothing has changed.
    #[error("the write-ahead log or the log cache is full")]
    Full,
    #[error("a batch of {len_bytes} bytes exceeds the limit of {max_bytes}")]
    TooLarge { len_bytes: u64, max_bytes: u64 },
    #[error("the batch starts at {got}, the stream's next offset is {expected}")]
    NotNext { expected: StreamOffset, got: StreamOffset },
    #[error("the stream was deleted")]
    Deleted,
    #[error("{0}")]
    Failed(StoreError),
}

#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// Before the start or after the end.
    #[error("offset {offset} is outside {start}..={end}")]
    OutOfRange { offset: StreamOffset, start: StreamOffset, end: StreamOffset },
    #[error("the stream was deleted")]
    Deleted,
    #[error("{0}")]
    Failed(StoreError),
}

/// A fetch's answer.
#[derive(Debug)]
pub struct Fetched {
    /// In order; the first contains the wanted offset (or is the next one after a gap).
    pub batches: Vec<Batch>,
    pub start: StreamOffset,
    /// Everything before it is durable: Kafka's high watermark.
    pub durable_end: StreamOffset,
}

/// What a stream's owner rebuilds its state from: fold `batches` into `checkpoint`.
#[derive(Clone, Debug)]
pub struct Replay {
    /// As [`crate::Fold`] returned it at the last upload.
    pub checkpoint: Option<bytes::Bytes>,
    /// The checkpoint describes the stream up to here.
    pub checkpoint_end: StreamOffset,
    /// All batches after it, in order, durable or not.
    pub batches: Vec<Batch>,
}

/// One stream. Cheap to clone.
#[derive(Clone)]
pub struct Stream {}

impl Stream {
    pub fn id(&self) -> StreamId {
        todo!()
    }
    pub fn start_offset(&self) -> StreamOffset {
        todo!()
    }
    /// The offset that the next batch must carry; counts batches that are not durable yet.
    pub fn next_offset(&self) -> StreamOffset {
        todo!()
    }
    /// Everything before it is durable: Kafka's high watermark.
    pub fn durable_end(&self) -> StreamOffset {
        todo!()
    }
    /// Put a batch in line; the future completes when it, and everything before it, is durable. Does not block or
    /// wait; dropping the future changes nothing.
    pub fn append(&self, batch: NewBatch) -> Result<Append, AppendError> {
        todo!()
    }
    /// Durable batches from the one containing `from`, up to `max_bytes` of payload, at least one if there is any. Empty at the end.
    pub async fn fetch(&self, from: StreamOffset, max_bytes: usize) -> Result<Fetched, FetchError> {
        todo!()
    }
    /// The first batch whose `max_timestamp_ms` is at least `timestamp_ms`.
    pub async fn find_time(&self, timestamp_ms: i64) -> Result<Option<Batch>, FetchError> {
        todo!()
    }
    /// The greatest max_timestamp_ms of the stream with the base of its batch, for ListOffsets -3.
    pub async fn max_time(&self) -> Result<Option<Batch>, FetchError> {
        todo!()
    }
    pub async fn trim(&self, to: StreamOffset) -> Result<(), StoreError> {
        todo!()
    }
    /// Bytes of payload from start to end.
    pub fn size_bytes(&self) -> u64 {
        todo!()
    }
    /// Checkpoint and the batches after it, taken at one moment: USE THIS for rebuilding state. The two calls below race with an
    /// upload in between (an upload moves the checkpoint and shortens the batches), and will go.
    pub fn replay(&self) -> Replay {
        todo!()
    }
    /// The checkpoint of the last upload, and the offset up to which it describes the stream.
    pub fn checkpoint(&self) -> (Option<Vec<u8>>, StreamOffset) {
        todo!()
    }
    /// The batches after the checkpoint (all of them are in the log cache), in order, durable or not. For rebuilding state at start.
    pub fn after_checkpoint(&self) -> Vec<Batch> {
        todo!()
    }
    /// Be woken when more of the stream becomes readable. One `Notify` may watch many streams; dropping the
    /// [`Watch`] ends it. Check again after subscribing: only later events wake. Wakes when data becomes *durable*.
    pub fn watch(&self, notify: &Arc<Notify>) -> Watch {
        todo!()
    }
}

pub struct Watch {}

/// Completes when the batch is durable.
pub struct Append {}

impl Future for Append {
    type Output = Result<(), StoreError>;
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        todo!()
    }
}
