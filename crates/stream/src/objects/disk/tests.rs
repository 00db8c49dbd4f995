//! The disk cache alone: what it keeps, what it rejects, and that any fault of its disk is reported
//! and costs no more than what was cached.

use std::fs;

use alluvium_journal::JournalNumber;
use alluvium_journal::sim::SimulatedDirectory;

use super::*;

/// Long enough for a loaded machine; reached only by a test that hangs.
const HANG: Duration = Duration::from_secs(60);
const PIECE_BYTES: usize = 64 << 10;

/// Journals of a MiB, four of them in memory.
fn options(directory: PathBuf) -> DiskCacheOptions {
    DiskCacheOptions { directory, max_disk_bytes: 64 << 20, memory_bytes: 4 << 20 }
}

fn started(disk: &SimulatedDirectory) -> DiskCache {
    started_with(disk, options(PathBuf::new()))
}

fn started_with(disk: &SimulatedDirectory, options: DiskCacheOptions) -> DiskCache {
    let disk = disk.clone();
    let open = move || disk.open(journal_options(&options)).map_err(|error| error.to_string());
    DiskCache::start_with("simulated".into(), open)
}

async fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < HANG, "never happened: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn opened(cache: DiskCache) -> DiskCache {
    eventually("it is open", || cache.stats().is_open).await;
    cache
}

/// Returns the bytes of a piece, which contain its position.
fn piece(position: u64) -> Bytes {
    let bytes = position.to_le_bytes().into_iter().cycle().take(PIECE_BYTES);
    bytes.collect::<Vec<_>>().into()
}

/// Puts pieces, each when the one before it is written.
async fn put_all(cache: &DiskCache, positions: std::ops::Range<u64>) {
    for position in positions {
        cache.put("object", position, &piece(position));
        let queue = &cache.shared.queued_bytes;
        eventually("it is written", || queue.load(Ordering::Relaxed) == 0).await;
    }
}

/// Returns how many of the pieces are found, and checks their bytes.
async fn count_found(cache: &DiskCache, positions: std::ops::Range<u64>) -> usize {
    let mut count = 0;
    for position in positions {
        let found = cache.get("object", &[position]).await.remove(0);
        assert!(found.as_ref().is_none_or(|found| *found == piece(position)));
        count += usize::from(found.is_some());
    }
    count
}

#[tokio::test]
async fn a_piece_is_found_by_name_and_position_also_by_the_next_process() {
    let disk = SimulatedDirectory::default();
    let cache = opened(started(&disk)).await;
    put_all(&cache, 0..40).await;
    let found = cache.get("object", &[3, 40, 5]).await;
    assert_eq!(found, [Some(piece(3)), None, Some(piece(5))]);
    assert_eq!(cache.get("other", &[3]).await, [None]);
    assert!(cache.may_have("object", 3) && !cache.may_have("object", 41));
    let stats = cache.stats();
    assert_eq!((stats.hits, stats.misses), (2, 2));
    assert_eq!((stats.writes, stats.entries), (40, 40));
    assert_eq!(stats.written_bytes, 40 * PIECE_BYTES as u64);
    assert_eq!(stats.hit_bytes, 2 * PIECE_BYTES as u64);
    assert!(stats.disk_bytes >= stats.written_bytes && stats.memory_bytes >= 2 << 20);
    cache.close().await;
    // Later calls do nothing and do not wait.
    cache.put("object", 3, &piece(3));
    assert_eq!(cache.get("object", &[3]).await, [None]);
    let stats = cache.stats();
    assert!(!stats.is_open && !stats.has_failed, "{stats:?}");

    let cache = opened(started(&disk)).await;
    assert_eq!(count_found(&cache, 0..45).await, 40);
    cache.close().await;
}

/// If the disk is slower than pieces arrive, pieces are dropped, and no caller waits.
#[tokio::test]
async fn the_write_queue_is_bounded() {
    let disk = SimulatedDirectory::default();
    let (let_open, may_open) = mpsc::channel::<()>();
    let open = {
        let disk = disk.clone();
        move || {
            let _ = may_open.recv();
            disk.open(journal_options(&options(PathBuf::new()))).map_err(|error| error.to_string())
        }
    };
    let cache = DiskCache::start_with("simulated".into(), open);
    let fit = QUEUE_BYTES / PIECE_BYTES as u64;
    for position in 0..fit + 3 {
        cache.put("object", position, &piece(position));
    }
    assert_eq!(count_found(&cache, 0..5).await, 0, "it is not open yet");
    let stats = cache.stats();
    assert_eq!((stats.dropped_writes, stats.writes), (3, 0));
    drop(let_open);
    eventually("the others are written", || cache.stats().writes == fit).await;
    assert_eq!(count_found(&cache, 0..fit + 3).await, fit as usize);
    let too_large = Bytes::from(vec![7; 2 << 20]);
    cache.put("object", 1000, &too_large);
    eventually("it is dropped", || cache.stats().dropped_writes == 4).await;
    assert!(!cache.stats().has_failed);
    cache.close().await;
}

#[tokio::test]
async fn a_full_disk_limits_the_cache() {
    let disk = SimulatedDirectory::default();
    // Of the 64 MiB that it may use.
    disk.limit(10 << 20);
    let cache = opened(started(&disk)).await;
    put_all(&cache, 0..500).await;
    let stats = cache.stats();
    assert!(stats.is_open && !stats.has_failed, "{stats:?}");
    assert!(stats.evicted > 300 && stats.disk_bytes <= 10 << 20, "{stats:?}");
    let found = count_found(&cache, 0..500).await;
    assert!(found > 30, "{found} pieces of 64 KiB");
    cache.close().await;

    // There is not even space for a journal: the cache is given up.
    let disk = SimulatedDirectory::default();
    disk.limit(64 << 10);
    let cache = started(&disk);
    eventually("it is reported", || cache.stats().has_failed).await;
    cache.put("object", 0, &piece(0));
    assert_eq!(count_found(&cache, 0..1).await, 0);
    cache.close().await;
}

#[tokio::test]
async fn after_a_failed_write_the_cache_is_read_only() {
    let disk = SimulatedDirectory::default();
    let cache = opened(started(&disk)).await;
    put_all(&cache, 0..40).await;
    disk.fail_writes();
    let mut position = 40;
    // Data goes to the disk a MiB at a time.
    eventually("a write has failed", || {
        cache.put("object", position, &piece(position));
        position += 1;
        cache.stats().has_failed
    })
    .await;
    assert_eq!(count_found(&cache, 0..40).await, 40);
    eventually("the queue is empty", || cache.shared.queued_bytes.load(Ordering::Relaxed) == 0)
        .await;
    let before = cache.stats();
    assert!(before.is_open && before.errors == 1, "{before:?}");
    cache.put("object", 10_000, &piece(10_000));
    let after = cache.stats();
    assert_eq!(after.dropped_writes, before.dropped_writes + 1);
    assert_eq!((after.writes, after.errors), (before.writes, before.errors));
    cache.close().await;
}

#[tokio::test]
async fn the_cache_is_given_up_when_nothing_can_be_read() {
    let disk = SimulatedDirectory::default();
    let cache = opened(started(&disk)).await;
    // Of eight journals four are in memory; the oldest is not.
    put_all(&cache, 0..128).await;
    eventually("the oldest is on disk", || {
        let guard = cache.shared.cache.read();
        let found = guard.as_ref().unwrap().try_get(&key("object", 0)).unwrap();
        matches!(found, Lookup::OnDisk)
    })
    .await;
    disk.fail_reads();
    for failures in 1..=u64::from(MOST_FAILURES) {
        let stats = cache.stats();
        assert!(stats.is_open && !stats.has_failed, "{stats:?}");
        // A miss of the other piece does not count as a success.
        assert_eq!(cache.get("object", &[0, 1000]).await, [None, None]);
        assert_eq!(cache.stats().errors, failures);
    }
    let stats = cache.stats();
    assert!(!stats.is_open && stats.has_failed, "{stats:?}");
    assert!(!cache.may_have("object", 127));
    assert_eq!(count_found(&cache, 120..128).await, 0, "also what is in memory");
    cache.close().await;
}

#[tokio::test]
async fn failures_count_in_a_row_and_damage_does_not() {
    let cache = opened(started(&SimulatedDirectory::default())).await;
    let corrupt = Error::Corrupt { path: "1.journal".into(), journal: JournalNumber(1), offset: 0 };
    for _ in 0..10 {
        for _ in 1..MOST_FAILURES {
            cache.shared.failed(&"no response");
            cache.shared.count_error(&corrupt);
        }
        put_all(&cache, 0..1).await;
        assert_eq!(count_found(&cache, 0..1).await, 1);
    }
    let stats = cache.stats();
    assert!(stats.is_open && !stats.has_failed, "{stats:?}");
    let each = 10 * u64::from(MOST_FAILURES - 1);
    assert_eq!((stats.errors, stats.damaged), (each, each));
    cache.close().await;
}

#[tokio::test]
async fn a_directory_is_used_by_one_cache_only() {
    let directory = tempfile::tempdir().unwrap();
    let options = options(directory.path().join("made"));
    let cache = opened(DiskCache::start(&options)).await;
    let other = DiskCache::start(&options);
    eventually("the other has failed", || other.stats().has_failed).await;
    put_all(&cache, 0..10).await;
    other.put("object", 0, &piece(0));
    assert_eq!(count_found(&other, 0..10).await, 0);
    assert_eq!(count_found(&cache, 0..10).await, 10);
    other.close().await;
    cache.close().await;
    let again = opened(DiskCache::start(&options)).await;
    assert_eq!(count_found(&again, 0..10).await, 10);
    again.close().await;
}

#[tokio::test]
async fn an_unusable_cache_is_emptied_unless_other_files_are_there() {
    let directory = tempfile::tempdir().unwrap();
    let options = options(directory.path().into());
    let cache = opened(DiskCache::start(&options)).await;
    put_all(&cache, 0..10).await;
    cache.close().await;
    let identity = directory.path().join("cache");
    let spoil = |at: usize| {
        let mut bytes = fs::read(&identity).unwrap();
        bytes[at] ^= 1;
        fs::write(&identity, bytes).unwrap();
    };
    spoil(40);
    let cache = opened(DiskCache::start(&options)).await;
    assert_eq!(count_found(&cache, 0..10).await, 0);
    put_all(&cache, 0..10).await;
    assert_eq!(count_found(&cache, 0..10).await, 10);
    cache.close().await;

    // Journals that are too large for the current limits.
    let larger = DiskCacheOptions { max_disk_bytes: 256 << 20, memory_bytes: 32 << 20, ..options };
    fs::remove_file(&identity).unwrap();
    opened(DiskCache::start(&larger)).await.close().await;
    let options = DiskCacheOptions { memory_bytes: 4 << 20, ..larger };
    let cache = opened(DiskCache::start(&options)).await;
    put_all(&cache, 0..10).await;
    cache.close().await;

    // With a file of another program: nothing is removed, and the cache is given up.
    let other = directory.path().join("thesis");
    fs::write(&other, "the only copy").unwrap();
    spoil(0);
    let cache = DiskCache::start(&options);
    eventually("it is reported", || cache.stats().has_failed).await;
    cache.close().await;
    assert!(other.exists() && identity.exists());
}

/// A directory with another cache, whose contents may exist only there.
#[tokio::test]
async fn a_cache_of_another_kind_is_left_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let options = options(directory.path().into());
    // Larger than the disk cache would create it, and so also unusable for it.
    let of_another = alluvium_journal::Options {
        journal_bytes: 16 << 20,
        memory_bytes: 64 << 20,
        ..alluvium_journal::Options::default()
    };
    let another = Cache::open(directory.path(), of_another.clone()).unwrap();
    another.put(b"thesis", b"the only copy").unwrap();
    another.close().unwrap();
    let error = open_with(&options, 1000).unwrap_err();
    assert!(error.contains("choose another directory"), "{error}");
    let cache = DiskCache::start(&options);
    eventually("it is reported", || cache.stats().has_failed).await;
    cache.close().await;
    let another = Cache::open(directory.path(), of_another).unwrap();
    assert_eq!(another.get(b"thesis").unwrap().as_deref(), Some(b"the only copy".as_slice()));
}

/// Journals keep the size that they got when the cache was created. If the cache may be larger
/// later, there are more of them than the options suggest.
#[test]
fn a_cache_whose_journals_need_too_many_files_is_emptied() {
    let directory = tempfile::tempdir().unwrap();
    let options = options(directory.path().into());
    let cache = open_with(&options, 1000).unwrap();
    cache.put(b"key", b"value").unwrap();
    cache.close().unwrap();
    // 16 journals, or 256 of the existing size.
    let larger = DiskCacheOptions { max_disk_bytes: 256 << 20, memory_bytes: 64 << 20, ..options };
    let cache = open_with(&larger, 512).unwrap();
    assert!(cache.contains(b"key").unwrap());
    cache.close().unwrap();
    let cache = open_with(&larger, 511).unwrap();
    assert!(!cache.contains(b"key").unwrap());
    assert!(cache.max_record_bytes() > 8 << 20);
    cache.put(b"key", b"value").unwrap();
    cache.close().unwrap();
    assert!(open_with(&larger, 32).unwrap().contains(b"key").unwrap());
    assert!(open_with(&larger, 31).unwrap_err().contains("16 open files"));
}
