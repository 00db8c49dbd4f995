//! Statistics of an open cache.

use std::sync::atomic::Ordering;

use crate::clear::SetAside;
use crate::shared::Shared;

/// What a cache holds, and what it has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Number of keys, including those that have expired and are not yet removed.
    pub entries: usize,
    /// Number of journals on disk.
    pub journals: usize,
    /// Number of journals in memory.
    pub journals_in_memory: usize,
    /// Disk space of journals, in bytes. The next journal, which is allocated ahead of need, and
    /// hints are not included.
    pub disk_bytes: u64,
    /// Number of compressed journals.
    pub compressed: usize,
    /// Disk space of compressed journals, in bytes.
    pub compressed_bytes: u64,
    /// Decompressed size of compressed journals, in bytes.
    pub uncompressed_bytes: u64,
    /// Number of journals that stay plain because compression was not worthwhile or failed.
    pub incompressible: usize,
    /// Total size of the newest records of all keys, in bytes; up to a quarter too large.
    pub live_bytes: u64,
    /// Memory of journals, in bytes, including what is free for new ones and cached parts of cold
    /// ones. The bits that track publication, a 64th of this, are not included.
    pub memory_bytes: usize,
    /// The part of `memory_bytes` that holds records and decompressed frames of cold journals.
    pub block_bytes: usize,
    /// Memory of the frame tables of compressed journals, in bytes, which is outside the budget: up
    /// to a 1,300th of their contents.
    pub table_bytes: usize,
    /// Memory of the index, in bytes: its tables, and the marks of journal regions with dead
    /// records (an 8,192nd of the journals).
    pub index_bytes: usize,
    /// Bytes of keys and values put, and of keys deleted.
    pub user_bytes: u64,
    /// Bytes written to journal files, including by compaction, eviction and compression. Hints (24
    /// bytes for each record) are not included.
    pub written_bytes: u64,
    /// Number of times that a writer waited for the disk.
    pub stalls: u64,
    /// Number of journals compacted.
    pub compacted: u64,
    /// Number of journals promoted to memory.
    pub promoted: u64,
    /// Number of records that eviction removed.
    pub evicted: u64,
    /// Number of records that eviction kept because they had been read.
    pub kept: u64,
    /// Bytes of journals found damaged, when the cache was opened or when a journal was read whole
    /// later; each journal counts once. Damage met by single reads is not included.
    pub damaged_bytes: u64,
    /// Whether the last background task failed and is being retried:
    /// [`crate::Cache::upkeep_failure`].
    pub upkeep_failed: bool,
    /// Files that this opening or earlier ones could not use, as of the opening. They are outside
    /// every budget, and stay until [`crate::Cache::remove_damaged`] or an operator removes them.
    pub set_aside: SetAside,
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
            disk_bytes: shared.journals.budget.file_bytes(),
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
            damaged_bytes: shared.maintenance.damaged_bytes.load(Ordering::Relaxed),
            upkeep_failed: shared.maintenance.failure.lock().is_some(),
            set_aside: *shared.maintenance.set_aside.lock(),
        }
    }
}
