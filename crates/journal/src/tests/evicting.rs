//! What happens to a key while its journal is evicted: the index does not name it any more, its
//! record is still in the file.

use super::*;

/// So few journals that the oldest one goes soon.
fn small() -> Options {
    Options { max_disk_bytes: 8 << 20, durability: Durability::Always, ..options() }
}

#[test]
fn what_is_deleted_while_its_journal_is_evicted_stays_deleted() {
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
            // Waits for room as soon as the keeper is held.
            for filler in 1000u64.. {
                cache.put(&filler.to_le_bytes(), &[2; 20_000]).unwrap();
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        directory.wait_for_removal();
        // What is found is looked at later: a panic here would wait for the writer for ever.
        let there = (0..KEYS).filter(|key| cache.contains(&key.to_le_bytes()).unwrap_or(true));
        let present = there.count();
        let deleted = (0..KEYS).filter(|key| is_deleted(*key));
        let deleted: Vec<_> = deleted.map(|key| cache.delete(&key.to_le_bytes())).collect();
        let left = [directory.killed(), directory.power_cut(1), directory.power_cut(2)];
        is_over.store(true, Ordering::Relaxed);
        directory.let_remove();
        (present, deleted, left)
    });
    assert_eq!(present, 0);
    assert!(deleted.iter().all(|was_there| matches!(was_there, Ok(false))), "{deleted:?}");
    drop(cache);
    for (index, left) in left.iter().enumerate() {
        for round in ["with hints", "without hints"] {
            let cache = open(left, &options());
            for key in 0..KEYS {
                // The others may be there again: nobody has removed them, and the record is the
                // last one.
                let is_there = cache.contains(&key.to_le_bytes()).unwrap();
                assert_eq!(is_there, !is_deleted(key), "{index}, {round}: {key}");
            }
            cache.close().unwrap();
            remove_hints(left);
        }
    }
}

/// Deleted and written by several threads while their journals are evicted all the time, and opened
/// anew: of a key there is the last value or none.
#[test]
fn what_was_replaced_does_not_come_back_by_eviction() {
    const THREADS: u64 = 3;
    // More than there is room for.
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

/// A journal that cannot be read is given up as a whole. Until its file is gone it is one of those
/// that are iterated, and readable again, perhaps.
#[test]
fn what_replaces_records_that_were_given_up_is_iterated_alone() {
    const KEYS: u64 = 20;
    let directory = SimDirectory::default();
    let cache = open(&directory, &small());
    for key in 0..KEYS {
        cache.put(&key.to_le_bytes(), &[1; 1000]).unwrap();
    }
    directory.fail_reads(1);
    directory.hold_removals();
    // The first four journals, and the beginning of the fifth, for which the oldest one has to go.
    // It is not in memory by then.
    for filler in 1000..1215u64 {
        cache.put(&filler.to_le_bytes(), &[2; 20_000]).unwrap();
    }
    directory.wait_for_removal();
    let put = (0..KEYS).try_for_each(|key| cache.put(&key.to_le_bytes(), &[3; 1000]));
    // What is found is looked at later: a panic here would wait for the keeper for ever.
    let found: Result<Vec<_>, _> = cache.iter().collect();
    directory.let_remove();
    put.unwrap();
    let mut values: Vec<_> = found.unwrap();
    values.retain(|entry| u64::from_le_bytes(entry.key().try_into().unwrap()) < KEYS);
    assert_eq!(values.len(), KEYS as usize);
    assert!(values.iter().all(|entry| entry.value() == [3; 1000]));
}

/// Else journals would be written anew one after the other, and writers wait, as long as all of it
/// is read.
#[test]
fn eviction_makes_room_also_of_large_records_that_are_read() {
    let cache =
        open(&SimDirectory::default(), &Options { durability: Durability::None, ..small() });
    for key in 0..40u64 {
        cache.put(&key.to_le_bytes(), &[7; 700_000]).unwrap();
        assert!(cache.contains(&key.to_le_bytes()).unwrap());
    }
    let stats = settled(&cache);
    // Each has a journal for itself.
    assert_eq!(stats.kept, 0);
    assert!(stats.evicted > 30, "{stats:?}");
}

/// Others have all files, so what eviction keeps finds no journal. That may last for ever.
#[test]
fn closing_does_not_wait_for_files() {
    let directory = SimDirectory::default();
    let options = Options { durability: Durability::None, ..small() };
    let cache = open(&directory, &options);
    // Three journals and most of a fourth, all of it read.
    for key in 0..3900u64 {
        cache.put(&key.to_le_bytes(), &[1; 1000]).unwrap();
        assert!(cache.contains(&key.to_le_bytes()).unwrap());
    }
    // The one behind the newest is there.
    while directory.list().unwrap().iter().filter(|name| name.ends_with(".journal")).count() < 5 {
        thread::yield_now();
    }
    directory.lack_files();
    // It takes over, and is full: for half of the first one, which has to go for its successor,
    // there is no room.
    cache.put(b"large", &vec![2; 1_040_000]).unwrap();
    while cache.stats().kept == 0 {
        thread::yield_now();
    }
    cache.close().unwrap();
    directory.have_files();
    // What it found no place for has gone.
    let left = contents(&open(&directory, &self::options())).len();
    assert!((3901 - 1020..3901 - 1000).contains(&left), "{left}");
}
