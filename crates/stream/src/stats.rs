//! Numbers for metrics and tools.

use std::time::Duration;

use crate::bandwidth::Throttled;
use crate::losses::LostObjects;
use crate::numbers::UploadFailing;
use crate::objects::{DiskCacheStats, ReadStats, Requests};
use crate::report::Lost;

/// Numbers for metrics and tools. They are read one after the other, so they are not a consistent
/// snapshot. Of a store that is followed, those of reads and of objects in use are set.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// The number of streams.
    pub streams: usize,
    /// The bound of the log cache, [`crate::Options::cache_bytes`].
    pub cache_bound_bytes: u64,
    /// Bytes of the log cache in use, bookkeeping included.
    pub cache_used_bytes: u64,
    /// Bytes of the log cache that are not uploaded yet and cannot be evicted.
    pub cache_pinned_bytes: u64,
    /// Bytes appended to the WAL since the last upload began.
    pub log_behind_bytes: u64,
    /// An upper bound of the age of the oldest record that is not trimmed: the time since the cut
    /// was taken that the WAL is trimmed to. The cut moves at each
    /// [`crate::Options::upload_interval`], also while nothing is appended. For records that
    /// recovery found, the time since the start. 0 if everything is trimmed.
    pub log_age: Duration,
    /// Bytes of verified blocks and indexes in memory.
    pub block_cache_used_bytes: u64,
    /// Statistics of the cache of verified blocks and indexes on a local disk.
    pub disk_cache: DiskCacheStats,
    /// Statistics of reads from objects.
    pub reads: ReadStats,
    /// Objects in use.
    pub objects: usize,
    /// Bytes of the objects in use.
    pub object_bytes: u64,
    /// Objects waiting to be deleted.
    pub retired_objects: usize,
    /// Objects in use that a reader or compaction found damaged.
    pub damaged_objects: LostObjects,
    /// Objects in use that were missing from the object store.
    pub missing_objects: LostObjects,
    /// Uploads committed since the start, including those that needed no object.
    pub uploads: u64,
    /// Requests to the object store by class and kind; combinations without a request are left out.
    pub requests: Vec<Requests>,
    /// Bytes of objects committed since the start.
    pub uploaded_bytes: u64,
    /// Object compactions committed since the start.
    pub compactions: u64,
    /// Bytes of objects written by object compaction.
    pub compacted_bytes: u64,
    /// Object compactions that failed, whether they are retried or not.
    pub compaction_failures: u64,
    /// Failed attempts to write an object.
    pub upload_failures: u64,
    /// Set while objects cannot be written: from the first failed attempt until an upload
    /// completes.
    pub upload_failing: Option<UploadFailing>,
    /// Old objects that the catalog does not record and that still exist: they could not be deleted
    /// yet, or are kept because they may hold something that is [lost](Stats::lost). As of the last
    /// scan, which runs every [`crate::Options::orphan_age`].
    pub orphans: usize,
    /// Orphans deleted since the start.
    pub orphans_deleted: u64,
    /// Failed attempts to delete an unneeded object or to list the objects.
    pub clean_up_failures: u64,
    /// How long transfers have waited for the limits of [`crate::Store::limit_transfers`].
    pub throttled: Throttled,
    /// Appends refused because the log, the window or the log cache was full.
    pub refused_appends: u64,
    /// What was lost before the start. Constant while the store is open.
    pub lost: Lost,
    /// Statistics of the WAL.
    pub wal: alluvium_wal::Stats,
}
