//! Counters of reads from objects.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::types::Batch;

/// Statistics of reads from objects since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadStats {
    /// Ranged GETs started, for blocks and indexes.
    pub gets: u64,
    /// Bytes requested by them.
    pub get_bytes: u64,
    /// Indexes and blocks that could not be read: no response, missing, or damaged.
    pub failures: u64,
    /// Bytes of payload returned to readers from objects, from memory or not.
    pub returned_bytes: u64,
    /// Requested blocks that were in memory.
    pub hits: u64,
    /// Requested blocks that were waited for.
    pub misses: u64,
    /// Bytes of blocks that were read ahead and then requested.
    pub ahead_used_bytes: u64,
    /// Bytes of blocks that were read ahead and evicted without having been requested.
    pub ahead_wasted_bytes: u64,
    /// Bytes of blocks that are being read ahead, or were and have not been requested yet.
    pub ahead_unread_bytes: u64,
    /// Reads that are waiting for the object store now.
    pub waiting: u64,
}

#[derive(Default)]
pub(super) struct ReadNumbers {
    gets: AtomicU64,
    get_bytes: AtomicU64,
    failures: AtomicU64,
    returned_bytes: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
    ahead_used_bytes: AtomicU64,
    ahead_wasted_bytes: AtomicU64,
    ahead_unread_bytes: AtomicU64,
    waiting: AtomicU64,
}

impl ReadNumbers {
    pub(super) fn get(&self, bytes: u64) {
        self.gets.fetch_add(1, Ordering::Relaxed);
        self.get_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn failed(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn returned(&self, batches: &[Batch]) {
        let bytes: usize = batches.iter().map(|batch| batch.payload.len()).sum();
        self.returned_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn hit(&self) {
        self.hits.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn miss(&self) {
        self.misses.fetch_add(1, Ordering::Relaxed);
    }

    /// See [`ReadStats::ahead_unread_bytes`].
    pub(super) fn ahead_bytes(&self) -> u64 {
        self.ahead_unread_bytes.load(Ordering::Relaxed)
    }

    /// Counts a waiting read until the result is dropped.
    pub(super) fn waiting(&self) -> Waiting<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(self)
    }

    pub(super) fn stats(&self) -> ReadStats {
        let load = |number: &AtomicU64| number.load(Ordering::Relaxed);
        ReadStats {
            gets: load(&self.gets),
            get_bytes: load(&self.get_bytes),
            failures: load(&self.failures),
            returned_bytes: load(&self.returned_bytes),
            hits: load(&self.hits),
            misses: load(&self.misses),
            ahead_used_bytes: load(&self.ahead_used_bytes),
            ahead_wasted_bytes: load(&self.ahead_wasted_bytes),
            ahead_unread_bytes: load(&self.ahead_unread_bytes),
            waiting: load(&self.waiting),
        }
    }
}

pub(super) struct Waiting<'a>(&'a ReadNumbers);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A block that is read ahead. It counts as unread until it is requested or dropped.
pub(super) struct Ahead {
    numbers: Arc<ReadNumbers>,
    len_bytes: u64,
    fetched: bool,
    unread: AtomicBool,
}

impl Ahead {
    pub(super) fn begin(
        numbers: &Arc<ReadNumbers>,
        blocks: impl Iterator<Item = u32>,
    ) -> Vec<Ahead> {
        let begin = |len_bytes: u32| {
            let len_bytes = u64::from(len_bytes);
            numbers.ahead_unread_bytes.fetch_add(len_bytes, Ordering::Relaxed);
            let numbers = numbers.clone();
            Ahead { numbers, len_bytes, fetched: false, unread: AtomicBool::new(true) }
        };
        blocks.map(begin).collect()
    }

    pub(super) fn fetched(mut self) -> Self {
        self.fetched = true;
        self
    }

    /// Records that the block was requested; returns whether this is the first request.
    pub(super) fn wanted(&self) -> bool {
        let is_first = self.unread.swap(false, Ordering::Relaxed);
        if is_first {
            self.numbers.ahead_unread_bytes.fetch_sub(self.len_bytes, Ordering::Relaxed);
            self.numbers.ahead_used_bytes.fetch_add(self.len_bytes, Ordering::Relaxed);
        }
        is_first
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        if self.unread.swap(false, Ordering::Relaxed) {
            self.numbers.ahead_unread_bytes.fetch_sub(self.len_bytes, Ordering::Relaxed);
            if self.fetched {
                self.numbers.ahead_wasted_bytes.fetch_add(self.len_bytes, Ordering::Relaxed);
            }
        }
    }
}
