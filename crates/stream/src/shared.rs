//! The state that handles and tasks of a store share that this process writes.

use std::future::Future;
use std::ops::Deref;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use alluvium_wal::{LogOffset, Wal, WalError};
use futures::FutureExt;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::cache::LogCache;
use crate::catalog_state::CatalogState;
use crate::compaction_signal::CompactionSignal;
use crate::ends::Ends;
use crate::error::StoreError;
use crate::fold::Fold;
use crate::numbers::Numbers;
use crate::panics;
use crate::record::WAL_HEADER_BYTES;
use crate::tail::StreamState;
use crate::view::View;
use crate::wake::SpaceGate;

/// The part of the ring that is kept for changes of the catalog, so that topics can be created and
/// deleted while the object store is away and the log is full.
const CATALOG_SPACE_BYTES: u64 = 1 << 20;
/// The share of a small ring that is kept at most.
const CATALOG_SPACE_SHARE: u64 = 16;
/// Number of streams that are visited without a pause.
const CHUNK_STREAMS: usize = 1024;

/// The state that handles and tasks share. It is also the [`View`] of the store.
pub(crate) struct Shared {
    pub(crate) view: Arc<View>,
    pub(crate) wal: Wal,
    /// Held during a check of the WAL's headers, which continues if its caller is dropped. It keeps
    /// the device open.
    pub(crate) checking: Arc<tokio::sync::Mutex<()>>,
    pub(crate) catalog: CatalogState,
    pub(crate) fold: Arc<dyn Fold>,
    pub(crate) cache: LogCache,
    pub(crate) space: SpaceGate,
    pub(crate) upload: UploadSignal,
    pub(crate) ends: Ends,
    /// The end of the log, as of about the last append: it is read without the lock of the WAL.
    pub(crate) log_end: AtomicU64,
    /// The end of the part of the ring that batches may use; the rest is for changes of the
    /// catalog.
    pub(crate) batches_until: AtomicU64,
    /// Wakes the object cleaner.
    pub(crate) retired: Notify,
    pub(crate) compaction: CompactionSignal,
    pub(crate) numbers: Numbers,
}

impl Deref for Shared {
    type Target = View;

    fn deref(&self) -> &View {
        &self.view
    }
}

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

impl Shared {
    /// Resolves with the cause once nothing can be appended any more.
    pub(crate) async fn failed(&self) -> StoreError {
        let failed = self.failure.is_set.notified();
        let mut failed = std::pin::pin!(failed);
        failed.as_mut().enable(); // before the check, so that no failure between the two is missed
        if let Some(failure) = self.failure() {
            return failure;
        }
        tokio::select! {
            () = failed => {}
            // No log reaches this offset, so this resolves only when the WAL stops.
            stopped = self.wal.wait_durable(LogOffset(u64::MAX)) => {
                self.fail(stopped.err().map_or(StoreError::Closed, StoreError::Wal));
            }
        }
        self.failure().expect("it was set before the notification")
    }

    /// Records that the store has failed and wakes all waiters. The first cause counts. The caller
    /// must not hold the lock of a tail.
    pub(crate) fn fail(&self, failure: StoreError) {
        if !self.view.fail(failure) {
            return;
        }
        match self.failure() {
            None | Some(StoreError::Closed) => {}
            Some(cause) => {
                tracing::error!("nothing can be appended until the store is opened again: {cause}");
            }
        }
        self.space.open_forever();
    }

    /// Forbids changes of the catalog and of the memory derived from it: one of them may be behind
    /// the other, or the store is closed. Appends fail, too. The first cause counts.
    pub(crate) fn halt(&self, cause: StoreError) {
        let _ = self.failure.halted.set(cause.clone());
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
        self.failure.halted.get().cloned().or_else(fenced)
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
    pub(crate) fn guarded(
        self: &Arc<Self>,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> impl Future<Output = ()> + Send + 'static {
        let shared = self.clone();
        async move {
            // The halt has reported it.
            let _ = shared.halt_on_panic(task).await;
        }
    }

    pub(crate) fn spawn(
        self: &Arc<Self>,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        tokio::spawn(self.guarded(task))
    }

    /// Returns the bytes appended to the WAL since the last cut.
    pub(crate) fn log_behind_bytes(&self) -> u64 {
        self.wal.appended().0.saturating_sub(self.upload.cut.load(Ordering::Acquire))
    }

    /// See [`crate::Stats::log_age`].
    pub(crate) fn log_age(&self) -> Duration {
        let wal = self.wal.stats();
        match wal.trimmed == wal.appended {
            true => Duration::ZERO,
            false => self.upload.trimmed_to.lock().elapsed(),
        }
    }

    /// Visits all streams, with pauses in which other tasks may run.
    pub(crate) async fn visit_streams(&self, mut visit: impl FnMut(&Arc<StreamState>)) {
        let streams: Vec<_> = self.streams.read().values().cloned().collect();
        for some in streams.chunks(CHUNK_STREAMS) {
            some.iter().for_each(&mut visit);
            tokio::task::yield_now().await;
        }
    }

    /// Whether a record of this length leaves the space that is kept for changes of the catalog.
    pub(crate) fn has_space_for(&self, record_bytes: u64) -> bool {
        let end = self.log_end.load(Ordering::Relaxed) + WAL_HEADER_BYTES + record_bytes;
        end <= self.batches_until.load(Ordering::Relaxed)
    }

    /// Notes how far batches may be appended, after the log was trimmed or resized.
    pub(crate) fn follow_trim(&self) {
        let wal = self.wal.stats();
        let ring_bytes = wal.resize_to_bytes.map_or(wal.ring_bytes, |to| wal.ring_bytes.min(to));
        let kept_bytes = CATALOG_SPACE_BYTES.min(ring_bytes / CATALOG_SPACE_SHARE);
        let until = wal.trimmed.0 + ring_bytes - kept_bytes;
        self.batches_until.store(until, Ordering::Relaxed);
        self.log_end.store(wal.appended.0, Ordering::Relaxed);
    }

    /// Applies the bound of [`Options::upload_bytes`] to a resized WAL, so that appends can
    /// continue while an upload runs.
    pub(crate) fn follow_capacity(&self) {
        let capacity_bytes = self.wal.header().capacity_bytes;
        let wanted_bytes = self.wal.stats().resize_to_bytes.unwrap_or(capacity_bytes);
        let threshold_bytes = self.options.upload_bytes.min(capacity_bytes.min(wanted_bytes) / 4);
        self.upload.threshold_bytes.store(threshold_bytes, Ordering::Relaxed);
        self.follow_trim();
    }

    /// Requests an upload if the log, which has grown to `end`, is far enough ahead of the last
    /// cut.
    pub(crate) fn request_upload_if_due(&self, end: LogOffset) {
        self.log_end.store(end.0, Ordering::Relaxed);
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
