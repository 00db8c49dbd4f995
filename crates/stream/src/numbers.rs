//! Counters of a store.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::report::{Lost, Recovery};

/// Set while objects cannot be written, or the object store does not respond; attempts continue.
/// Until one succeeds, the WAL fills up; when it is full, appends are refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UploadFailing {
    /// Time since the first failure in a row.
    pub elapsed: Duration,
    /// Failures in a row; at least 1.
    pub failures: u32,
    /// The last error. It says so if retries cannot succeed before the bucket or the credentials
    /// are changed.
    pub error: String,
}

#[derive(Default)]
pub(crate) struct Numbers {
    pub(crate) uploads: AtomicU64,
    pub(crate) uploaded_bytes: AtomicU64,
    pub(crate) upload_failures: AtomicU64,
    pub(crate) upload_failing: Mutex<Option<FailingSince>>,
    pub(crate) orphans: AtomicUsize,
    pub(crate) orphans_deleted: AtomicU64,
    pub(crate) clean_up_failures: AtomicU64,
    pub(crate) refused_appends: AtomicU64,
    pub(crate) compactions: AtomicU64,
    pub(crate) compacted_bytes: AtomicU64,
    pub(crate) compaction_failures: AtomicU64,
    pub(crate) lost: Lost,
}

/// Internal form of [`UploadFailing`].
pub(crate) struct FailingSince {
    since: Instant,
    failures: u32,
    error: String,
}

impl Numbers {
    pub(crate) fn new(recovery: &Recovery) -> Self {
        Self { lost: recovery.lost(), ..Self::default() }
    }

    /// Counts a failed attempt of the running upload; returns the number of failures in a row.
    pub(crate) fn upload_failed(&self, error: &str) -> u32 {
        self.upload_failures.fetch_add(1, Ordering::Relaxed);
        let mut failing = self.upload_failing.lock();
        let failing = failing.get_or_insert_with(|| FailingSince {
            since: Instant::now(),
            failures: 0,
            error: String::new(),
        });
        failing.failures = failing.failures.saturating_add(1);
        error.clone_into(&mut failing.error);
        failing.failures
    }

    pub(crate) fn upload_done(&self) {
        *self.upload_failing.lock() = None;
    }

    pub(crate) fn upload_failing(&self) -> Option<UploadFailing> {
        let failing = self.upload_failing.lock();
        failing.as_ref().map(|FailingSince { since, failures, error }| UploadFailing {
            elapsed: since.elapsed(),
            failures: *failures,
            error: error.clone(),
        })
    }
}
