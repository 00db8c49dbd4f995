//! Figures of an open cache.

use std::sync::atomic::Ordering;

use crate::shared::Shared;

/// What a cache holds and what it has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Keys, those that have expired and were not yet removed included.
    pub entries: usize,
    /// Journals on disk.
    pub journals: usize,
    /// Of these, journals in memory.
    pub journals_in_memory: usize,
    /// Room on disk that journals take, in bytes.
    pub disk_bytes: u64,
    /// Bytes of records that are the newest of their keys; up to a quarter too many.
    pub live_bytes: u64,
    /// Memory of journals, in bytes, what is kept free for new ones included.
    pub memory_bytes: usize,
    /// Memory of the index, in bytes.
    pub index_bytes: usize,
    /// Bytes of keys and values that were put.
    pub user_bytes: u64,
    /// Bytes of records that were written to files.
    pub written_bytes: u64,
    /// Times that a writer waited for the disk.
    pub stalls: u64,
    /// Journals that were compacted.
    pub compacted: u64,
    /// Records that eviction removed.
    pub evicted: u64,
    /// Records that eviction kept because they had been read.
    pub kept: u64,
    /// Bytes that were found damaged.
    pub damaged_bytes: u64,
}

impl Stats {
    pub(crate) fn of(shared: &Shared) -> Self {
        let journals = shared.journals.all();
        let counters = &shared.counters;
        Self {
            entries: shared.index.len(),
            journals: journals.len(),
            journals_in_memory: journals.iter().filter(|it| it.arena.is_some()).count(),
            disk_bytes: shared.journals.file_bytes(),
            live_bytes: journals
                .iter()
                .map(|it| it.counts.live_bytes.load(Ordering::Relaxed))
                .sum(),
            memory_bytes: shared.pool.memory_bytes(),
            index_bytes: shared.index.memory_bytes(),
            user_bytes: counters.user_bytes.load(Ordering::Relaxed),
            written_bytes: counters.written_bytes.load(Ordering::Relaxed),
            stalls: counters.stalls.load(Ordering::Relaxed),
            compacted: counters.compacted.load(Ordering::Relaxed),
            evicted: counters.evicted.load(Ordering::Relaxed),
            kept: counters.kept.load(Ordering::Relaxed),
            damaged_bytes: shared.keep.damaged_bytes.load(Ordering::Relaxed),
        }
    }
}
