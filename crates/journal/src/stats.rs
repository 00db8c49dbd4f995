//! Figures of an open cache.

use std::sync::atomic::Ordering;

use crate::clear::KeptAside;
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
    /// Room on disk that journals take, in bytes. The one that is kept ready for when the newest is
    /// full, and hints, are not counted.
    pub disk_bytes: u64,
    /// Journals that are compressed.
    pub compressed: usize,
    /// Room on disk that these take, in bytes.
    pub compressed_bytes: u64,
    /// Bytes that are in them, decompressed.
    pub uncompressed_bytes: u64,
    /// Journals that stay as they were written because compressing them was not worth it, or has
    /// failed.
    pub incompressible: usize,
    /// Bytes of records that are the newest of their keys; up to a quarter too many.
    pub live_bytes: u64,
    /// Memory of journals, in bytes, what is kept free for new ones and what is kept of cold ones
    /// included. The bits that tell what is written, a 64th of it, are not.
    pub memory_bytes: usize,
    /// Of these, records and decompressed frames of cold journals.
    pub block_bytes: usize,
    /// Memory of the tables of compressed journals, in bytes, which is not within the budget: up to
    /// a 1,300th of what is in them.
    pub table_bytes: usize,
    /// Memory of the index, in bytes: of its tables, and of the marks where in journals records are
    /// that do not count any more (an 8,192nd part of the journals).
    pub index_bytes: usize,
    /// Bytes of keys and values that were put, and of keys that were deleted.
    pub user_bytes: u64,
    /// Bytes that were written to files of journals, by compaction, eviction and compression too.
    /// Hints are not counted: 24 bytes for each record.
    pub written_bytes: u64,
    /// Times that a writer waited for the disk.
    pub stalls: u64,
    /// Journals that were compacted.
    pub compacted: u64,
    /// Journals that were brought back into memory because they were read.
    pub promoted: u64,
    /// Records that eviction removed.
    pub evicted: u64,
    /// Records that eviction kept because they had been read.
    pub kept: u64,
    /// Bytes of journals that were found damaged, when the cache was opened or when a journal was
    /// read as a whole since; of each journal once. Single reads that meet damage are not counted.
    pub damaged_bytes: u64,
    /// The last work in the background has failed, and is tried again:
    /// [`crate::Cache::upkeep_failure`].
    pub upkeep_failed: bool,
    /// Files that openings could not use, this one or others before it: in no budget, and there
    /// until [`crate::Cache::remove_damaged`] or somebody else removes them. As they were when the
    /// cache was opened.
    pub kept_aside: KeptAside,
}

impl Stats {
    pub(crate) fn of(shared: &Shared) -> Self {
        let journals = shared.journals.all();
        let counters = &shared.counters;
        let compressed = || journals.iter().filter_map(|it| Some((it, it.frames.as_ref()?)));
        let block_bytes = shared.blocks.bytes();
        Self {
            entries: shared.index.len(),
            journals: journals.len(),
            journals_in_memory: journals.iter().filter(|it| it.arena.is_some()).count(),
            disk_bytes: shared.journals.room.file_bytes(),
            compressed: compressed().count(),
            compressed_bytes: compressed().map(|(it, _)| it.file_bytes).sum(),
            uncompressed_bytes: compressed().map(|(_, frames)| frames.end() as u64).sum(),
            incompressible: journals
                .iter()
                .filter(|it| it.counts.stays_plain.load(Ordering::Relaxed))
                .count(),
            live_bytes: journals
                .iter()
                .map(|it| it.counts.live_bytes.load(Ordering::Relaxed))
                .sum(),
            memory_bytes: shared.pool.memory_bytes() + block_bytes,
            block_bytes,
            table_bytes: compressed().map(|(_, frames)| frames.memory_bytes()).sum(),
            index_bytes: shared.index.memory_bytes()
                + journals.iter().map(|it| it.counts.dead.memory_bytes()).sum::<usize>(),
            user_bytes: shared.index.user_bytes(),
            written_bytes: counters.written_bytes.load(Ordering::Relaxed),
            stalls: counters.stalls.load(Ordering::Relaxed),
            compacted: counters.compacted.load(Ordering::Relaxed),
            promoted: counters.promoted.load(Ordering::Relaxed),
            evicted: counters.evicted.load(Ordering::Relaxed),
            kept: counters.kept.load(Ordering::Relaxed),
            damaged_bytes: shared.keep.damaged_bytes.load(Ordering::Relaxed),
            upkeep_failed: shared.keep.failure.lock().is_some(),
            kept_aside: *shared.keep.kept_aside.lock(),
        }
    }
}
