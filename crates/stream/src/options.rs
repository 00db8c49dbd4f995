//! Bounds and thresholds.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::StoreError;

const MIB: u64 = 1 << 20;
/// An object of this size has half as many parts as an object store accepts, with parts no larger
/// than in any other object.
const MAX_COMPACTION_BYTES: u64 = 32 << 30;
/// The bound of all durations, so that they can be added to any clock.
const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The minimum number of journals that a journal cache requires.
const JOURNALS_IN_MEMORY: usize = 4;
const JOURNALS_ON_DISK: u64 = 8;
/// Larger ones would slow down opening after a crash and make eviction coarser, and would only save
/// open files.
const MAX_JOURNAL_BYTES: usize = 128 << 20;
/// A journal cache with at most this many can be opened whatever the numbers of its journals are.
const MAX_JOURNALS: u64 = 1 << 17;

/// A cache on a local disk for blocks read from objects, behind [`Options::block_cache_bytes`]. See
/// `docs/disk-cache.md`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskCacheOptions {
    /// A directory used only by the cache; created if it is missing. Its contents may be lost at
    /// any time.
    pub directory: PathBuf,
    /// Disk space for journals, in bytes, plus 24 bytes for each block. At least 8 MiB.
    pub max_disk_bytes: u64,
    /// Memory for journals, in bytes: records that wait to be written and those written last. In
    /// addition the index takes 21 to 43 bytes for each block, 85 at most. At least 4 MiB, and a
    /// 16,384th of `max_disk_bytes`. More memory makes the journals of a new cache larger and keeps
    /// fewer files open: a journal has between an eighth and a quarter of it, at most 128 MiB.
    pub memory_bytes: usize,
}

impl DiskCacheOptions {
    /// Returns the size of a journal of a new cache: a power of two.
    pub(crate) fn journal_bytes(&self) -> usize {
        let on_disk = usize::try_from(self.max_disk_bytes / JOURNALS_ON_DISK).unwrap_or(usize::MAX);
        let most = (self.memory_bytes / JOURNALS_IN_MEMORY).min(on_disk).min(MAX_JOURNAL_BYTES);
        1 << most.max(1).ilog2()
    }

    /// Returns the number of journals, each of which is an open file.
    pub(crate) fn journals(&self) -> u64 {
        self.max_disk_bytes / self.journal_bytes() as u64
    }

    fn check(&self) -> Result<(), StoreError> {
        let reject = |message: String| Err(StoreError::InvalidOption(message));
        let Self { max_disk_bytes, memory_bytes, .. } = *self;
        if max_disk_bytes < 8 * MIB {
            return reject(format!("max_disk_bytes = {max_disk_bytes} is less than 8 MiB"));
        }
        if (memory_bytes as u64) < 4 * MIB {
            return reject(format!("memory_bytes = {memory_bytes} is less than 4 MiB"));
        }
        if self.journals() > MAX_JOURNALS {
            return reject(format!(
                "memory_bytes = {memory_bytes} is less than a 16,384th of max_disk_bytes = \
                 {max_disk_bytes}"
            ));
        }
        Ok(())
    }
}

/// Bounds and thresholds of a [`crate::Store`]. [`crate::Store::open`] checks them; no value is
/// adjusted silently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Hard bound of the log cache: payload and bookkeeping of all batches in memory, uploaded or
    /// not. Appends are refused when it is reached and nothing can be evicted. A single batch may
    /// take half of it. Default 1 GiB, at least 64 KiB.
    pub cache_bytes: u64,
    /// Growth of the WAL since the last upload that starts an upload. Default 512 MiB; at least 4
    /// KiB, at most a quarter of the WAL's capacity and half of `cache_bytes`, so that appends
    /// continue while an upload runs. If the WAL is made smaller while it is in use, a quarter of
    /// its new capacity applies.
    pub upload_bytes: u64,
    /// Longest time between uploads while there is anything to upload. An upload is spread over
    /// three quarters of the time in which its data was appended, at most of this interval, and
    /// writes at least 4 MiB/s. It runs at full speed when appends wait for it, the next upload is
    /// due, or half of the ring or three quarters of the cache are in use. Default 60 s, at least 1
    /// ms, at most 1 year.
    pub upload_interval: Duration,
    /// Bound of the memory cache for blocks read from objects. Default 64 MiB; 0 switches it off.
    pub block_cache_bytes: u64,
    /// A cache on a local disk behind the block cache. Default: none.
    pub disk_cache: Option<DiskCacheOptions>,
    /// Largest payload that compaction puts into one object of a stream. Object compaction merges
    /// pieces below 8 MiB, or below an eighth of this if that is less. Default 256 MiB, at least
    /// 64 KiB, at most 32 GiB; 0 switches object compaction off. See `docs/compaction.md`.
    pub compaction_bytes: u64,
    /// Hard bound on the bytes in flight from objects to readers, verified or not, for all readers
    /// together; a single larger batch is read alone. What has arrived is bounded by
    /// `block_cache_bytes` and by what readers hold. Default 128 MiB, at least 8 MiB.
    pub cold_read_bytes: u64,
    /// Bound on the bytes per second to and from the object store. Uploads have priority over cold
    /// reads, and cold reads over object compaction. Default 0: no bound; otherwise at least 1 MiB.
    pub object_store_bytes_per_s: u64,
    /// Number of threads for cold reads and object compaction, which run at low priority for the
    /// processor and local disks. Default 0: these tasks run in the runtime in which the store was
    /// opened.
    pub background_threads: usize,
    /// Delay after the first failure of an upload. It doubles with each further failure and is
    /// randomized by up to a half, so that many servers do not retry at the same moment. Default
    /// 100 ms, at least 1 ms.
    pub retry_initial: Duration,
    /// Longest delay between two attempts. Default 10 s, at least `retry_initial`, at most 1 year.
    pub retry_max: Duration,
    /// Interval at which the end of each stream is written to the WAL while batches are appended,
    /// and once after the last one; then, after the same time, the WAL's durable offset is written
    /// to its header. If a part of the WAL appended since the last such record is damaged, streams
    /// may skip offsets that they never used. See `docs/format/stream-record.md`. Default 1 s, at
    /// least 1 ms, at most 1 year.
    pub ends_interval: Duration,
    /// Time after which changes of the catalog, which are durable in the WAL, are written to the
    /// object store, if no upload writes them earlier. Default 1 s, at most 1 year.
    pub catalog_interval: Duration,
    /// Interval at which a store that is followed ([`crate::Store::follow`]) reads the chain.
    /// Default 1 s, at least 10 ms, at most 1 year.
    pub poll_interval: Duration,
    /// Age at which an object that the catalog does not record (its upload was interrupted) is
    /// deleted; newer ones may still be in flight from an earlier run. It is also the interval at
    /// which such objects are looked for. Default 24 h, at least 1 min, at most 1 year.
    pub orphan_age: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            cache_bytes: 1024 * MIB,
            upload_bytes: 512 * MIB,
            upload_interval: Duration::from_secs(60),
            block_cache_bytes: 64 * MIB,
            disk_cache: None,
            compaction_bytes: 256 * MIB,
            cold_read_bytes: 128 * MIB,
            object_store_bytes_per_s: 0,
            background_threads: 0,
            retry_initial: Duration::from_millis(100),
            retry_max: Duration::from_secs(10),
            ends_interval: Duration::from_secs(1),
            catalog_interval: Duration::from_secs(1),
            poll_interval: Duration::from_secs(1),
            orphan_age: Duration::from_secs(24 * 60 * 60),
        }
    }
}

impl Options {
    /// Returns the defaults, with `upload_bytes` lowered to what a WAL of `capacity_bytes` allows.
    pub fn for_wal(capacity_bytes: u64) -> Self {
        let default = Self::default();
        Self { upload_bytes: default.upload_bytes.min(capacity_bytes / 4), ..default }
    }

    /// Returns the first and the longest delay between two attempts.
    pub fn retry(&self) -> (Duration, Duration) {
        (self.retry_initial, self.retry_max)
    }

    pub(crate) fn check(&self, wal_capacity_bytes: u64) -> Result<(), StoreError> {
        let reject = |message: String| Err(StoreError::InvalidOption(message));
        let Self {
            cache_bytes,
            upload_bytes,
            upload_interval,
            cold_read_bytes,
            object_store_bytes_per_s: rate,
            retry_initial,
            retry_max,
            orphan_age,
            ends_interval,
            compaction_bytes,
            poll_interval,
            ..
        } = *self;
        if cache_bytes < 64 << 10 {
            return reject(format!("cache_bytes = {cache_bytes} is less than 65536"));
        }
        if upload_bytes < 4096 {
            return reject(format!("upload_bytes = {upload_bytes} is less than 4096"));
        }
        if upload_bytes > wal_capacity_bytes / 4 {
            return reject(format!(
                "upload_bytes = {upload_bytes} is more than a quarter of the WAL's \
                 {wal_capacity_bytes} bytes"
            ));
        }
        if upload_bytes > cache_bytes / 2 {
            return reject(format!(
                "upload_bytes = {upload_bytes} is more than half of cache_bytes = {cache_bytes}"
            ));
        }
        if upload_interval < Duration::from_millis(1) {
            return reject(format!("upload_interval = {upload_interval:?} is less than 1 ms"));
        }
        if upload_interval > YEAR {
            return reject(format!("upload_interval = {upload_interval:?} is more than 1 year"));
        }
        if (1..64 << 10).contains(&compaction_bytes) {
            return reject(format!("compaction_bytes = {compaction_bytes} is less than 65536"));
        }
        if compaction_bytes > MAX_COMPACTION_BYTES {
            return reject(format!("compaction_bytes = {compaction_bytes} is more than 32 GiB"));
        }
        if cold_read_bytes < 8 * MIB {
            return reject(format!("cold_read_bytes = {cold_read_bytes} is less than 8 MiB"));
        }
        if rate > 0 && rate < MIB {
            return reject(format!(
                "object_store_bytes_per_s = {rate} is neither 0 nor at least 1 MiB"
            ));
        }
        if retry_initial < Duration::from_millis(1) {
            return reject(format!("retry_initial = {retry_initial:?} is less than 1 ms"));
        }
        if retry_max < retry_initial {
            return reject(format!(
                "retry_max = {retry_max:?} is less than retry_initial = {retry_initial:?}"
            ));
        }
        if retry_max > YEAR {
            return reject(format!("retry_max = {retry_max:?} is more than 1 year"));
        }
        if ends_interval < Duration::from_millis(1) {
            return reject(format!("ends_interval = {ends_interval:?} is less than 1 ms"));
        }
        if ends_interval > YEAR {
            return reject(format!("ends_interval = {ends_interval:?} is more than 1 year"));
        }
        if poll_interval < Duration::from_millis(10) {
            return reject(format!("poll_interval = {poll_interval:?} is less than 10 ms"));
        }
        if poll_interval > YEAR {
            return reject(format!("poll_interval = {poll_interval:?} is more than 1 year"));
        }
        if orphan_age > YEAR {
            return reject(format!("orphan_age = {orphan_age:?} is more than 1 year"));
        }
        if orphan_age < Duration::from_secs(60) {
            return reject(format!("orphan_age = {orphan_age:?} is less than 1 min"));
        }
        self.disk_cache.as_ref().map_or(Ok(()), DiskCacheOptions::check)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_fit_a_large_wal_and_are_scaled_to_a_small_one() {
        Options::default().check(2048 * MIB).unwrap();
        for capacity in [192 << 10, MIB, 512 * MIB, 1 << 40] {
            Options::for_wal(capacity).check(capacity).unwrap();
        }
        assert_eq!(Options::for_wal(4 * MIB).upload_bytes, MIB);
        assert_eq!(Options::for_wal(1 << 40), Options::default());
    }

    #[test]
    fn journals_of_the_disk_cache_fit_its_memory_and_its_disk() {
        let options = |max_disk_bytes, memory_bytes| DiskCacheOptions {
            directory: PathBuf::new(),
            max_disk_bytes,
            memory_bytes,
        };
        for (disk_mib, memory_mib, journal_mib) in [
            (16 << 10, 128, 32),
            (8, 4, 1),
            (8, 1024, 1),
            (100, 1024, 8),
            (16 << 20, 1024, 128),
            (1 << 20, 100, 16),
        ] {
            let options = options(disk_mib * MIB, memory_mib << 20);
            options.check().unwrap();
            assert_eq!(options.journal_bytes(), journal_mib << 20, "{options:?}");
            // The minimum that a journal cache requires.
            assert!(options.memory_bytes >= 4 * options.journal_bytes());
            assert!(options.journals() >= 8);
        }
        let refused = |options: DiskCacheOptions| {
            let options = Options { disk_cache: Some(options), ..Options::default() };
            options.check(2048 * MIB).unwrap_err().to_string()
        };
        assert!(refused(options(8 * MIB - 1, 4 << 20)).contains("max_disk_bytes = 8388607"));
        assert!(refused(options(8 * MIB, (4 << 20) - 1)).contains("memory_bytes = 4194303"));
        assert!(refused(options(1 << 40, 16 << 20)).contains("memory_bytes = 16777216"));
        options(1 << 40, 64 << 20).check().unwrap();
    }

    #[test]
    fn each_refusal_names_the_option_and_its_value() {
        let refused = |options: Options| options.check(2048 * MIB).unwrap_err().to_string();
        let good = Options::default;
        assert!(refused(Options { cache_bytes: 1000, ..good() }).contains("cache_bytes = 1000"));
        assert!(refused(Options { upload_bytes: 7, ..good() }).contains("upload_bytes = 7"));
        assert!(
            refused(Options { upload_bytes: 513 * MIB, cache_bytes: 1 << 40, ..good() })
                .contains("quarter")
        );
        assert!(
            refused(Options { cache_bytes: 1023 * MIB, ..good() }).contains("half of cache_bytes")
        );
        assert!(
            refused(Options { upload_interval: Duration::ZERO, ..good() })
                .contains("upload_interval = 0ns")
        );
        assert!(
            refused(Options { cold_read_bytes: MIB, ..good() }).contains("cold_read_bytes = 1048")
        );
        assert!(
            refused(Options { object_store_bytes_per_s: 7, ..good() }).contains("bytes_per_s = 7")
        );
        assert!(
            refused(Options { retry_initial: Duration::ZERO, ..good() })
                .contains("retry_initial = 0ns")
        );
        assert!(
            refused(Options { retry_max: Duration::from_millis(99), ..good() })
                .contains("retry_max = 99ms")
        );
        assert!(
            refused(Options { ends_interval: Duration::ZERO, ..good() })
                .contains("ends_interval = 0ns")
        );
        assert!(
            refused(Options { poll_interval: Duration::ZERO, ..good() })
                .contains("poll_interval = 0ns")
        );
        assert!(
            refused(Options { orphan_age: Duration::from_secs(59), ..good() })
                .contains("orphan_age = 59s")
        );
        assert!(
            refused(Options { compaction_bytes: 1, ..good() }).contains("compaction_bytes = 1")
        );
        let most = 32 << 30;
        assert!(
            refused(Options { compaction_bytes: most + 1, ..good() })
                .contains("compaction_bytes = 34359738369")
        );
        for compaction_bytes in [0, 64 << 10, most] {
            Options { compaction_bytes, ..good() }.check(2048 * MIB).unwrap();
        }
        let endless = Duration::MAX;
        for (name, options) in [
            ("upload_interval", Options { upload_interval: endless, ..good() }),
            ("ends_interval", Options { ends_interval: endless, ..good() }),
            ("poll_interval", Options { poll_interval: endless, ..good() }),
            ("retry_max", Options { retry_max: endless, ..good() }),
            ("orphan_age", Options { orphan_age: endless, ..good() }),
        ] {
            let refusal = refused(options);
            assert!(refusal.starts_with(name) && refusal.contains("1 year"), "{refusal}");
        }
    }
}
