//! Operations on a key while its journal is evicted: the index does not name it any more, and its
//! record is still in the file.

use super::*;

/// So few journals that the oldest one is soon evicted.
fn small() -> Options {
    Options { max_disk_bytes: 8 << 20, durability: Durability::Always, ..options() }
}

#[test]
fn a_key_deleted_while_its_journal_is_evicted_stays_deleted() {
    const KEYS: u64 = 20;
    let is_deleted = |key: u64| key.is_multiple_of(2);
    let directory = SimDirectory::default();
    let cache = open(&directory, &small());
    for key in 0..KEYS {
        cache.put(&key.to_le_bytes(), &[1; 1000]).unwrap();
    }
    directory.hold_removals();
    let is_over = AtomicBool::new(false);
    let (present, deleted, left) = thread::scope(|scope| {
        scope.spawn(|| {
            // Waits for space once the maintenance thread is blocked.
            for filler in 1000u64.. {
                cache.put(&filler.to_le_bytes(), &[2; 20_000]).unwrap();
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        directory.wait_for_removal();
        // Checked later: a panic here would wait for the writer forever.
        let there = (0..KEYS).filter(|key| cache.contains(&key.to_le_bytes()).unwrap_or(true));
        let present = there.count();
        let deleted = (0..KEYS).filter(|key| is_deleted(*key));
        let deleted: Vec<_> = deleted.map(|key| cache.delete(&key.to_le_bytes())).collect();
        let left = [directory.killed(), directory.power_cut(1), directory.power_cut(2)];
        is_over.store(true, Ordering::Relaxed);
        directory.allow_removals();
        (present, deleted, left)
    });
    assert_eq!(present, 0);
    assert!(deleted.iter().all(|was_there| matches!(was_there, Ok(false))), "{deleted:?}");
    drop(cache);
    for (index, left) in left.iter().enumerate() {
        for round in ["with hints", "without hints"] {
            let cache = open(left, &options());
            for key in 0..KEYS {
                // The others may be present again: they were not removed, and the record is the
                // last one.
                let is_there = cache.contains(&key.to_le_bytes()).unwrap();
                assert_eq!(is_there, !is_deleted(key), "{index}, {round}: {key}");
            }
            cache.close().unwrap();
            remove_hints(left);
        }
    }
}

/// Several threads delete and write keys while their journals are evicted continuously and the
/// cache is reopened: a key has its last value or none.
#[test]
fn a_replaced_value_is_not_restored_by_eviction() {
    const THREADS: u64 = 3;
    // More than there is space for.
    const KEYS: u64 = 400;
    let directory = SimDirectory::default();
    let options = Options { durability: Durability::None, ..small() };
    // By key: the last value; 0: deleted.
    let mut last = vec![0u64; (THREADS * KEYS) as usize];
    let mut evicted = 0;
    for round in 0..4 {
        let cache = open(&directory, &options);
        thread::scope(|scope| {
            for (thread, last) in last.chunks_mut(KEYS as usize).enumerate() {
                let cache = &cache;
                scope.spawn(move || {
                    let mut random = Random::new(round * THREADS + thread as u64);
                    for version in 1..800u64 {
                        let own = random.index(last.len());
                        let key = (thread as u64 * KEYS + own as u64).to_le_bytes();
                        if random.chance(0.3) {
                            last[own] = 0;
                            cache.delete(&key).unwrap();
                        } else {
                            last[own] = round * 1000 + version;
                            let content = last[own].to_le_bytes().repeat(random.index(4000) + 1);
                            cache.put(&key, &content).unwrap();
                        }
                        let other = random.index(last.len());
                        let key = (thread as u64 * KEYS + other as u64).to_le_bytes();
                        if let Some(found) = cache.get(&key).unwrap() {
                            assert_eq!(found[..8], last[other].to_le_bytes());
                        }
                    }
                });
            }
        });
        evicted += cache.stats().evicted;
        cache.flush().unwrap();
        let left = [("killed", directory.killed()), ("without power", directory.power_cut(round))];
        for (how, left) in left {
            for (key, content) in contents(&open(&left, &self::options())) {
                let key = u64::from_le_bytes(key[..].try_into().unwrap()) as usize;
                assert_eq!(content[..8], last[key].to_le_bytes(), "{how}, round {round}: {key}");
            }
        }
    }
    assert!(evicted > 100, "{evicted}");
}

/// A journal that cannot be read is given up as a whole. Until its file is removed it is iterated,
/// and may become readable again.
#[test]
fn replacements_of_lost_records_are_iterated_alone() {
    const KEYS: u64 = 20;
    let directory = SimDirectory::default();
    let cache = open(&directory, &small());
    for key in 0..KEYS {
        cache.put(&key.to_le_bytes(), &[1; 1000]).unwrap();
    }
    directory.fail_reads(1);
    directory.hold_removals();
    // The first four journals, and the beginning of the fifth, for which the oldest one, no longer
    // in memory, has to be evicted.
    for filler in 1000..1215u64 {
        cache.put(&filler.to_le_bytes(), &[2; 20_000]).unwrap();
    }
    directory.wait_for_removal();
    let put = (0..KEYS).try_for_each(|key| cache.put(&key.to_le_bytes(), &[3; 1000]));
    // Checked later: a panic here would wait for the maintenance thread forever.
    let found: Result<Vec<_>, _> = cache.iter().collect();
    directory.allow_removals();
    put.unwrap();
    let mut values: Vec<_> = found.unwrap();
    values.retain(|entry| u64::from_le_bytes(entry.key().try_into().unwrap()) < KEYS);
    assert_eq!(values.len(), KEYS as usize);
    assert!(values.iter().all(|entry| entry.value() == [3; 1000]));
}

/// Otherwise, as long as everything is read, journals would be rewritten one after the other while
/// writers wait.
#[test]
fn eviction_makes_space_even_if_large_records_are_read() {
    let cache =
        open(&SimDirectory::default(), &Options { durability: Durability::None, ..small() });
    for key in 0..40u64 {
        cache.put(&key.to_le_bytes(), &[7; 700_000]).unwrap();
        assert!(cache.contains(&key.to_le_bytes()).unwrap());
    }
    let stats = wait_until_idle(&cache);
    // Each has a journal for itself.
    assert_eq!(stats.kept, 0);
    assert!(stats.evicted > 30, "{stats:?}");
}

/// All file descriptors are in use elsewhere, so the records that eviction keeps find no journal,
/// perhaps permanently.
#[test]
fn closing_does_not_wait_for_descriptors() {
    let directory = SimDirectory::default();
    let options = Options { durability: Durability::None, ..small() };
    let cache = open(&directory, &options);
    // Three journals and most of a fourth, all of it read.
    for key in 0..3900u64 {
        cache.put(&key.to_le_bytes(), &[1; 1000]).unwrap();
        assert!(cache.contains(&key.to_le_bytes()).unwrap());
    }
    // The spare is ready.
    while directory.list().unwrap().iter().filter(|name| name.ends_with(".journal")).count() < 5 {
        thread::yield_now();
    }
    directory.limit_files();
    // It takes over and is full: there is no space for half of the first journal, which has to be
    // removed for its successor.
    cache.put(b"large", &vec![2; 1_040_000]).unwrap();
    while cache.stats().kept == 0 {
        thread::yield_now();
    }
    cache.close().unwrap();
    directory.unlimit_files();
    // The records that found no space are gone.
    let left = contents(&open(&directory, &self::options())).len();
    assert!((3901 - 1020..3901 - 1000).contains(&left), "{left}");
}
