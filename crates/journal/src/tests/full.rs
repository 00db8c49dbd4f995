//! Caches that may not evict: whatever was refused, once enough is deleted there is room again, and
//! nobody waits for ever.

use super::removing::without_keeper;
use super::*;

/// So few journals that it is full soon: 8.
fn small() -> Options {
    Options { max_disk_bytes: 8 << 20, when_full: WhenFull::Refuse, ..options() }
}

/// As often as it takes: what makes room is behind it.
fn until_there_is_room<T>(mut call: impl FnMut() -> crate::Result<T>) -> T {
    loop {
        match call() {
            Err(Error::DiskFull { .. }) => thread::sleep(Duration::from_millis(1)),
            done => return done.unwrap(),
        }
    }
}

/// Puts of new keys, until one is refused.
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
fn a_full_cache_takes_puts_again_once_enough_is_deleted() {
    for seed in 0..4 {
        let mut random = Random::new(seed);
        let mut directory = SimDirectory::default();
        let mut map = BTreeMap::new();
        let mut cache = open(&directory, &small());
        for round in 0..6 {
            fill(&cache, &mut random, &mut map);
            // In the middle of it the process ends, one way or another. What it begins next takes a
            // journal, too.
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
            let doomed: Vec<_> = map.keys().filter(|_| random.chance(0.6)).cloned().collect();
            for key in &doomed {
                assert!(until_there_is_room(|| cache.delete(key)), "seed {seed}, round {round}");
                map.remove(key);
            }
            for _ in 0..200 {
                let (key, value) = (key(random.next_u64()), value(&mut random));
                until_there_is_room(|| cache.put(&key, &value));
                map.insert(key, value);
            }
            assert!(contents(&cache) == map, "seed {seed}, round {round}");
            assert_eq!(cache.stats().evicted, 0);
        }
    }
}

/// What says that they are gone takes a quarter of what they took, more than is left to deletions:
/// they go on as soon as some of it was compacted.
#[test]
fn everything_can_be_deleted_though_deletions_have_little_room() {
    const STEPS: usize = 7;
    let directory = SimDirectory::default();
    let cache = open(&directory, &small());
    let mut keys = 0u64;
    while cache.put(&keys.to_le_bytes(), &[1; 100]).is_ok() {
        keys += 1;
    }
    assert!((38_000..42_000).contains(&keys), "{keys}");
    // Some of each journal, again and again.
    for step in 0..STEPS as u64 {
        for key in (step..keys).step_by(STEPS) {
            assert!(until_there_is_room(|| cache.delete(&key.to_le_bytes())), "{key}");
        }
    }
    assert_eq!(cache.stats().entries, 0);
    for key in 0..4000u64 {
        until_there_is_room(|| cache.put(&key.to_le_bytes(), &[2; 1000]));
    }
    assert_eq!(contents(&cache).len(), 4000);
}

/// What is left to deletions, compaction and the next opening has to be on the disk, too, where
/// that is smaller than the budget.
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
                    assert!(until_there_is_room(|| cache.delete(key)), "seed {seed}");
                }
                map.clear();
                assert_eq!(cache.stats().entries, 0);
            }
            until_there_is_room(|| cache.put(b"a", b"b"));
        }
    }
}

/// Room that somebody else gives back is used, without anything that is made.
#[test]
fn who_was_refused_for_the_disk_is_not_any_more_when_it_has_room() {
    let directory = SimDirectory::default();
    directory.limit(8 * MIB as u64);
    let cache = open(&directory, &Options { max_disk_bytes: 1 << 30, ..small() });
    let (mut random, mut map) = (Random::new(0), BTreeMap::new());
    fill(&cache, &mut random, &mut map);
    let before = map.len();
    directory.limit(16 * MIB as u64);
    until_there_is_room(|| cache.put(b"first", b"after"));
    map.insert(b"first".to_vec(), b"after".to_vec());
    fill(&cache, &mut random, &mut map);
    assert!(map.len() > before + before / 2, "{before}, {}", map.len());
    assert!(contents(&cache) == map);
}

const THREADS: u64 = 3;

/// One of several threads, each with keys of its own: whoever is refused deletes half of what he
/// has and goes on. Returns what he has in the end, and how often he was refused.
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
                let doomed: Vec<_> = mine.keys().step_by(2).cloned().collect();
                for key in doomed {
                    assert!(until_there_is_room(|| cache.delete(&key)));
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
fn threads_get_out_of_a_full_cache() {
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

/// Writers take what eviction gives, and compaction needs some of it too.
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
        // What is found is looked at later: a panic here would leave the writer alone.
        let mut compacted = Vec::new();
        while !is_over.load(Ordering::Relaxed) {
            compacted.push(cache.compact(|_| ()));
        }
        compacted
    });
    assert!(compacted.iter().all(Result::is_ok), "{compacted:?}");
    assert!(cache.stats().disk_bytes <= 8 << 20, "{:?}", cache.stats());
}

/// Eviction that fails is tried again for ever; whoever compacts hears of it.
#[test]
fn compaction_on_demand_does_not_wait_for_eviction_that_fails() {
    let directory = SimDirectory::default();
    // The oldest journal is damaged: compaction leaves it alone, and eviction does not.
    let cache = open(&directory, &options());
    for key in 0..900u64 {
        cache.put(&key.to_le_bytes(), &[5; 1000]).unwrap();
    }
    cache.close().unwrap();
    directory.spoil("000000000000.journal", 4096 + 500);
    let cache = open(&directory, &options());
    directory.limit(8 << 20);
    directory.fail_removals(u64::MAX);
    let failed = thread::scope(|scope| {
        let writer = scope.spawn(|| {
            // In each journal something can go, and not much.
            for key in 0..20_000u64 {
                let key = if key.is_multiple_of(50) { 0 } else { key };
                while let Err(error) = cache.put(&key.to_le_bytes(), &[5; 1000]) {
                    assert!(matches!(error, Error::Io { .. }), "{error}");
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        // The disk is full: no journal can be made, and eviction was tried.
        while cache.stats().evicted == 0 {
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

/// As in a directory that has lost its write permission: whoever writes hears why there is no room,
/// and can write again when journals can be removed again. Nothing is read for it twice.
#[test]
fn writers_hear_of_an_eviction_that_fails() {
    let put = |cache: &Cache, key: u64| cache.put(&key.to_le_bytes(), &[5; 1000]);
    // Where the budget is used up, and where the disk itself is full.
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
        // The others are read, and removals may succeed some day.
        assert!(cache.failure().is_none());
        assert!(cache.contains(&(key - 1).to_le_bytes()).unwrap());
        // As soon as the turn is over.
        while !cache.stats().upkeep_failed {
            thread::yield_now();
        }
        assert!(matches!(cache.upkeep_failure(), Some(Error::Io { .. })));
        assert!(matches!(put(&cache, key), Err(Error::Io { .. })));
        {
            let _turn = cache.shared.keep.turn.lock();
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
        settled(&cache);
        while cache.stats().upkeep_failed {
            thread::yield_now();
        }
        assert!(cache.upkeep_failure().is_none());
        cache.close().unwrap();
    }
}

/// Nobody deletes what has expired, and nobody asks for it: its room comes back all the same, also
/// if the process that has written it is gone.
#[test]
fn what_has_expired_makes_room() {
    let directory = SimDirectory::default();
    let mut cache = open(&directory, &small());
    for key in 0..500u64 {
        cache.put(&key.to_le_bytes(), &[1; 1000]).unwrap();
    }
    // Three times what there is room for.
    for key in 500..24_000u64 {
        let (name, value) = (key.to_le_bytes(), [2; 1000]);
        until_there_is_room(|| cache.put_with_ttl(&name, &value, Duration::ZERO));
        if key == 4000 {
            cache.close().unwrap();
            cache = open(&directory, &small());
        }
    }
    assert_eq!(cache.stats().evicted, 0);
    let found = contents(&cache);
    assert!(found.len() == 500 && found.values().all(|value| *value == [1; 1000]));
}

/// The oldest go when there is nothing else. What has expired is something else.
#[test]
fn what_has_expired_goes_before_what_has_not() {
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
        // With more than this some have to go.
        while cache.stats().journals > 12 {
            thread::sleep(Duration::from_millis(1));
        }
    }
    assert_eq!(cache.stats().evicted, 0);
    assert_eq!(contents(&cache).len() as u64, ALIVE);
}

/// When something will expire, a journal tells who reads it: once, and not as often as room is
/// wanted.
#[test]
fn what_has_not_expired_is_looked_at_once() {
    let directory = SimDirectory::default();
    let cache = open(&directory, &small());
    let mut keys = 0u64;
    while cache.put_with_ttl(&keys.to_le_bytes(), &[1; 1000], Duration::from_secs(3600)).is_ok() {
        keys += 1;
    }
    cache.close().unwrap();
    let (shared, _) = crate::open::open(Box::new(directory), small()).unwrap();
    let mut looks = 0;
    while shared.look_for_expired() {
        looks += 1;
        assert!(looks <= 8, "there are no more journals");
    }
    assert!(looks >= 4, "{looks}");
    assert!(shared.emptiest().is_none());
}

/// What had expired when it was looked at is replaced: it is dead already, and what is alive has
/// not become less by that.
#[test]
fn what_has_expired_and_was_replaced_is_not_counted_twice() {
    const KEYS: u64 = 900;
    let expires = |key: &u64| key % 5 < 2;
    let directory = SimDirectory::default();
    let options = Options { max_disk_bytes: 12 << 20, ..options() };
    without_keeper(&directory, &options, |shared| {
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
        assert!(shared.look_for_expired() && !shared.look_for_expired());
        // Two fifths of it would go, which is not enough.
        assert!(shared.emptiest().is_none());
        for key in (0..KEYS).filter(expires) {
            shared.put(&key.to_le_bytes(), &[3; 1000], None).unwrap();
        }
        assert!(shared.is_crowded() && shared.emptiest().is_none());
        // Nobody knows whether it had expired, so it is looked at again.
        assert!(shared.look_for_expired() && !shared.look_for_expired());
        assert!(shared.emptiest().is_none());
        // However wrong that is: it is looked through before anything is moved.
        shared.journals.all()[0].counts.found_expired(MIB as u64 / 2, 0, u64::MAX);
        let (journal, most_alive_bytes) = shared.emptiest().unwrap();
        assert!(!shared.compact_emptiest(journal, most_alive_bytes).unwrap());
        assert!(shared.look_for_expired() && !shared.look_for_expired());
        assert!(shared.emptiest().is_none());
        shared.clock.advance(2_000_000);
        assert!(shared.look_for_expired() && !shared.look_for_expired());
        let (journal, most_alive_bytes) = shared.emptiest().unwrap();
        assert_eq!(journal.number.0, 0);
        assert!(shared.compact_emptiest(journal, most_alive_bytes).unwrap());
    });
}
