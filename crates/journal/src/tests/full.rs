//! Caches that may not evict: whatever was refused, there is space again once enough is deleted,
//! and no thread waits forever.

use super::removing::without_maintenance_thread;
use super::*;

/// So few journals, 8, that it is soon full.
fn small() -> Options {
    Options { max_disk_bytes: 8 << 20, when_full: WhenFull::Refuse, ..options() }
}

/// Retries until there is space: space is made in the background.
fn until_there_is_space<T>(mut call: impl FnMut() -> crate::Result<T>) -> T {
    loop {
        match call() {
            Err(Error::DiskFull { .. }) => thread::sleep(Duration::from_millis(1)),
            done => return done.unwrap(),
        }
    }
}

/// Puts new keys until one is refused.
fn fill(cache: &Cache, random: &mut Random, map: &mut BTreeMap<Vec<u8>, Vec<u8>>) {
    loop {
        let (key, value) = (key(random.next_u64()), value(random));
        match cache.put(&key, &value) {
            Ok(()) => drop(map.insert(key, value)),
            Err(Error::DiskFull { .. }) => return,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_full_cache_accepts_puts_again_once_enough_is_deleted() {
    for seed in 0..4 {
        let mut random = Random::new(seed);
        let mut directory = SimDirectory::default();
        let mut map = BTreeMap::new();
        let mut cache = open(&directory, &small());
        for round in 0..6 {
            fill(&cache, &mut random, &mut map);
            // In the middle of it the process ends in one of several ways. Its successor needs a
            // journal too.
            match random.below(3) {
                0 => {
                    cache.close().unwrap();
                    cache = open(&directory, &small());
                }
                1 => {
                    cache.flush().unwrap();
                    let left = directory.killed();
                    drop(cache);
                    directory = left;
                    cache = open(&directory, &small());
                }
                _ => {}
            }
            assert!(contents(&cache) == map, "seed {seed}, round {round}");
            let deleted: Vec<_> = map.keys().filter(|_| random.chance(0.6)).cloned().collect();
            for key in &deleted {
                assert!(until_there_is_space(|| cache.delete(key)), "seed {seed}, round {round}");
                map.remove(key);
            }
            for _ in 0..200 {
                let (key, value) = (key(random.next_u64()), value(&mut random));
                until_there_is_space(|| cache.put(&key, &value));
                map.insert(key, value);
            }
            assert!(contents(&cache) == map, "seed {seed}, round {round}");
            assert_eq!(cache.stats().evicted, 0);
        }
    }
}

/// The tombstones take a quarter of the space of the values, more than is left to deletions: these
/// continue once some of it was compacted.
#[test]
fn everything_can_be_deleted_with_little_space_for_deletions() {
    const STEPS: usize = 7;
    let directory = SimDirectory::default();
    let cache = open(&directory, &small());
    let mut keys = 0u64;
    while cache.put(&keys.to_le_bytes(), &[1; 100]).is_ok() {
        keys += 1;
    }
    assert!((38_000..42_000).contains(&keys), "{keys}");
    // Some of each journal, repeatedly.
    for step in 0..STEPS as u64 {
        for key in (step..keys).step_by(STEPS) {
            assert!(until_there_is_space(|| cache.delete(&key.to_le_bytes())), "{key}");
        }
    }
    assert_eq!(cache.stats().entries, 0);
    for key in 0..4000u64 {
        until_there_is_space(|| cache.put(&key.to_le_bytes(), &[2; 1000]));
    }
    assert_eq!(contents(&cache).len(), 4000);
}

/// The headroom of deletions, compaction and the next opening must also exist on a disk that is
/// smaller than the budget.
#[test]
fn on_a_full_disk_everything_can_be_deleted_and_the_cache_opened_again() {
    for (seed, disk_bytes) in [(0, 12 * MIB), (1, 12 * MIB + MIB / 2), (2, 20 * MIB - 1)] {
        for is_killed in [false, true] {
            let mut random = Random::new(seed);
            let mut directory = SimDirectory::default();
            directory.limit(disk_bytes as u64);
            let options = Options { max_disk_bytes: 1 << 30, ..small() };
            let mut cache = open(&directory, &options);
            let mut map = BTreeMap::new();
            for round in 0..3 {
                fill(&cache, &mut random, &mut map);
                if is_killed {
                    cache.flush().unwrap();
                    let left = directory.killed();
                    drop(cache);
                    directory = left;
                } else {
                    cache.close().unwrap();
                }
                cache = open(&directory, &options);
                assert!(contents(&cache) == map, "seed {seed}, round {round}");
                for key in map.keys() {
                    assert!(until_there_is_space(|| cache.delete(key)), "seed {seed}");
                }
                map.clear();
                assert_eq!(cache.stats().entries, 0);
            }
            until_there_is_space(|| cache.put(b"a", b"b"));
        }
    }
}

/// Space that another program frees is used without further events.
#[test]
fn writes_succeed_again_when_the_disk_has_space() {
    let directory = SimDirectory::default();
    directory.limit(8 * MIB as u64);
    let cache = open(&directory, &Options { max_disk_bytes: 1 << 30, ..small() });
    let (mut random, mut map) = (Random::new(0), BTreeMap::new());
    fill(&cache, &mut random, &mut map);
    let before = map.len();
    directory.limit(16 * MIB as u64);
    until_there_is_space(|| cache.put(b"first", b"after"));
    map.insert(b"first".to_vec(), b"after".to_vec());
    fill(&cache, &mut random, &mut map);
    assert!(map.len() > before + before / 2, "{before}, {}", map.len());
    assert!(contents(&cache) == map);
}

const THREADS: u64 = 3;

/// Runs one of several threads, each with keys of its own: on a refusal it deletes half of what it
/// has and continues. Returns its final contents and the number of refusals.
fn put_and_delete(cache: &Cache, seed: u64, thread: u64) -> (BTreeMap<Vec<u8>, Vec<u8>>, u64) {
    let mut random = Random::new(seed * THREADS + thread);
    let mut mine = BTreeMap::new();
    let (mut written_bytes, mut refused) = (0, 0);
    while written_bytes < 12 * MIB {
        let key = (random.below(1 << 40) * THREADS + thread).to_le_bytes().to_vec();
        let value = value(&mut random);
        match cache.put(&key, &value) {
            Ok(()) => {
                written_bytes += value.len();
                mine.insert(key, value);
            }
            Err(Error::DiskFull { .. }) => {
                refused += 1;
                let deleted: Vec<_> = mine.keys().step_by(2).cloned().collect();
                for key in deleted {
                    assert!(until_there_is_space(|| cache.delete(&key)));
                    mine.remove(&key);
                }
                thread::sleep(Duration::from_millis(1));
            }
            Err(error) => panic!("{error}"),
        }
    }
    (mine, refused)
}

#[test]
fn threads_recover_from_a_full_cache() {
    for (seed, compression) in [(0, Compression::None), (1, Compression::Lz4)] {
        let directory = SimDirectory::default();
        let options = Options { compression, ..small() };
        let cache = open(&directory, &options);
        let found = thread::scope(|scope| {
            let cache = &cache;
            let threads: Vec<_> = (0..THREADS)
                .map(|thread| scope.spawn(move || put_and_delete(cache, seed, thread)))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(found.iter().map(|(_, refused)| refused).sum::<u64>() > 0);
        let expected: BTreeMap<_, _> = found.into_iter().flat_map(|(mine, _)| mine).collect();
        assert!(contents(&cache) == expected, "{compression}");
        cache.close().unwrap();
        assert!(contents(&open(&directory, &options)) == expected, "{compression}");
    }
}

/// Writers take the space that eviction makes, and compaction needs some of it too.
#[test]
fn compaction_on_demand_waits_for_eviction() {
    let directory = SimDirectory::default();
    let options = Options { max_disk_bytes: 8 << 20, ..options() };
    let cache = open(&directory, &options);
    let is_over = AtomicBool::new(false);
    let compacted = thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random::new(6);
            for _ in 0..40_000 {
                let key = random.below(4000).to_le_bytes();
                if cache.put(&key, &[5; 1000]).is_err() {
                    break;
                }
            }
            is_over.store(true, Ordering::Relaxed);
        });
        // Checked later: a panic here would leave the writer waiting.
        let mut compacted = Vec::new();
        while !is_over.load(Ordering::Relaxed) {
            compacted.push(cache.compact(|_| ()));
        }
        compacted
    });
    assert!(compacted.iter().all(Result::is_ok), "{compacted:?}");
    assert!(cache.stats().disk_bytes <= 8 << 20, "{:?}", cache.stats());
}

/// A failing eviction is retried indefinitely; compaction on demand reports the error.
#[test]
fn compaction_on_demand_does_not_wait_for_eviction_that_fails() {
    let directory = SimDirectory::default();
    // The oldest journal is damaged: compaction leaves it alone, and eviction does not.
    let cache = open(&directory, &options());
    for key in 0..900u64 {
        cache.put(&key.to_le_bytes(), &[5; 1000]).unwrap();
    }
    cache.close().unwrap();
    directory.corrupt("000000000000.journal", 4096 + 500);
    let cache = open(&directory, &options());
    directory.limit(8 << 20);
    directory.fail_removals(u64::MAX);
    let failed = thread::scope(|scope| {
        let writer = scope.spawn(|| {
            // Each journal has something to remove, but not much.
            for key in 0..20_000u64 {
                let key = if key.is_multiple_of(50) { 0 } else { key };
                while let Err(error) = cache.put(&key.to_le_bytes(), &[5; 1000]) {
                    assert!(matches!(error, Error::Io { .. }), "{error}");
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        // The disk is full: no journal can be created, and eviction was tried.
        while cache.stats().evicted == 0 && cache.upkeep_failure().is_none() {
            thread::sleep(Duration::from_millis(1));
        }
        let failed = cache.compact(|_| ());
        directory.fail_removals(0);
        writer.join().unwrap();
        failed
    });
    assert!(matches!(failed, Err(Error::Io { .. })), "{failed:?}");
    cache.compact(|_| ()).unwrap();
}

/// Eviction fails as in a directory that is not writable: writers get the reason for the lack of
/// space, and can write again when journals can be removed again. No journal is read twice for it.
#[test]
fn writers_get_the_error_of_a_failed_eviction() {
    let put = |cache: &Cache, key: u64| cache.put(&key.to_le_bytes(), &[5; 1000]);
    // With the budget used up, and with the disk full.
    for limit in [u64::MAX, 8 << 20] {
        let directory = SimDirectory::default();
        let max_disk_bytes = if limit == u64::MAX { 8 << 20 } else { 64 << 20 };
        let cache = open(&directory, &Options { max_disk_bytes, ..options() });
        directory.limit(limit);
        directory.fail_removals(u64::MAX);
        let mut key = 0;
        let error = loop {
            match put(&cache, key) {
                Ok(()) => key += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(error, Error::Io { action: "removing a journal", .. }), "{error}");
        assert!((3000..8000).contains(&key), "{key}");
        // The others are readable, and removals may succeed later.
        assert!(cache.failure().is_none());
        assert!(cache.contains(&(key - 1).to_le_bytes()).unwrap());
        // Once the task has ended.
        while !cache.stats().upkeep_failed {
            thread::yield_now();
        }
        assert!(matches!(cache.upkeep_failure(), Some(Error::Io { .. })));
        assert!(matches!(put(&cache, key), Err(Error::Io { .. })));
        {
            let _exclusive = cache.shared.maintenance.exclusive.lock();
            let reads = directory.reads();
            assert!(matches!(cache.shared.evict_oldest(), Err(Error::Io { .. })));
            assert_eq!(directory.reads(), reads);
        }
        directory.fail_removals(0);
        while let Err(error) = put(&cache, key) {
            assert!(matches!(error, Error::Io { .. }), "{error}");
            thread::sleep(Duration::from_millis(1));
        }
        (key..key + 10_000).for_each(|key| put(&cache, key).unwrap());
        wait_until_idle(&cache);
        while cache.stats().upkeep_failed {
            thread::yield_now();
        }
        assert!(cache.upkeep_failure().is_none());
        cache.close().unwrap();
    }
}

/// Expired records are neither deleted nor read: their space is reclaimed nevertheless, also after
/// a restart.
#[test]
fn expired_records_make_space() {
    let directory = SimDirectory::default();
    let mut cache = open(&directory, &small());
    for key in 0..500u64 {
        cache.put(&key.to_le_bytes(), &[1; 1000]).unwrap();
    }
    // Three times what there is space for.
    for key in 500..24_000u64 {
        let (name, value) = (key.to_le_bytes(), [2; 1000]);
        until_there_is_space(|| cache.put_with_ttl(&name, &value, Duration::ZERO));
        if key == 4000 {
            cache.close().unwrap();
            cache = open(&directory, &small());
        }
    }
    assert_eq!(cache.stats().evicted, 0);
    let found = contents(&cache);
    assert!(found.len() == 500 && found.values().all(|value| *value == [1; 1000]));
}

/// The oldest records are evicted if there is nothing else to remove. Expired records are something
/// else.
#[test]
fn expired_records_are_reclaimed_before_others_are_evicted() {
    const ALIVE: u64 = 1500;
    let directory = SimDirectory::default();
    let options = Options { max_disk_bytes: 16 << 20, ..options() };
    let cache = open(&directory, &options);
    for key in 0..ALIVE {
        cache.put(&key.to_le_bytes(), &[1; 1000]).unwrap();
    }
    for batch in 1..60u64 {
        for key in batch * 10_000..batch * 10_000 + 400 {
            cache.put_with_ttl(&key.to_le_bytes(), &[2; 1000], Duration::ZERO).unwrap();
        }
        // With more than this some have to be removed.
        while cache.stats().journals > 12 {
            thread::sleep(Duration::from_millis(1));
        }
    }
    assert_eq!(cache.stats().evicted, 0);
    assert_eq!(contents(&cache).len() as u64, ALIVE);
}

/// The scan of a journal finds the time of its next expiry, so it is not repeated each time that
/// space is needed.
#[test]
fn unexpired_records_are_scanned_once() {
    let directory = SimDirectory::default();
    let cache = open(&directory, &small());
    let mut keys = 0u64;
    while cache.put_with_ttl(&keys.to_le_bytes(), &[1; 1000], Duration::from_secs(3600)).is_ok() {
        keys += 1;
    }
    cache.close().unwrap();
    let (shared, _) = crate::open::open(Box::new(directory), small()).unwrap();
    let mut scans = 0;
    while shared.scan_for_expired() {
        scans += 1;
        assert!(scans <= 8, "there are no more journals");
    }
    assert!(scans >= 4, "{scans}");
    assert!(shared.least_live().is_none());
}

/// Expired records that were counted and are then replaced are dead already, which does not reduce
/// what is live.
#[test]
fn replaced_expired_records_are_not_counted_twice() {
    const KEYS: u64 = 900;
    let expires = |key: &u64| key % 5 < 2;
    let directory = SimDirectory::default();
    let options = Options { max_disk_bytes: 12 << 20, ..options() };
    without_maintenance_thread(&directory, &options, |shared| {
        shared.clock.advance(1000);
        for key in 0..KEYS {
            let expires_at = if expires(&key) { 2000 } else { 1_000_000 };
            shared.put(&key.to_le_bytes(), &[1; 1000], Some(expires_at)).unwrap();
        }
        let mut alive = KEYS;
        while !shared.is_crowded() {
            shared.put(&alive.to_le_bytes(), &[2; 1000], None).unwrap();
            alive += 1;
        }
        shared.flush.wait_for(shared.newest_point()).unwrap();
        shared.clock.advance(2000);
        assert!(shared.scan_for_expired() && !shared.scan_for_expired());
        // Two fifths of it could be removed, which is not enough.
        assert!(shared.least_live().is_none());
        for key in (0..KEYS).filter(expires) {
            shared.put(&key.to_le_bytes(), &[3; 1000], None).unwrap();
        }
        assert!(shared.is_crowded() && shared.least_live().is_none());
        // It is unknown whether the replaced records had expired, so it is scanned again.
        assert!(shared.scan_for_expired() && !shared.scan_for_expired());
        assert!(shared.least_live().is_none());
        // However wrong the count is, the journal is scanned before anything is moved.
        shared.journals.all()[0].counts.found_expired(MIB as u64 / 2, 0, u64::MAX);
        let (journal, most_alive_bytes) = shared.least_live().unwrap();
        assert!(!shared.compact_least_live(journal, most_alive_bytes).unwrap());
        assert!(shared.scan_for_expired() && !shared.scan_for_expired());
        assert!(shared.least_live().is_none());
        shared.clock.advance(2_000_000);
        assert!(shared.scan_for_expired() && !shared.scan_for_expired());
        let (journal, most_alive_bytes) = shared.least_live().unwrap();
        assert_eq!(journal.number.0, 0);
        assert!(shared.compact_least_live(journal, most_alive_bytes).unwrap());
    });
}
