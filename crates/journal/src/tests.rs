//! Tests of whole caches: compared with a model, used by many threads, killed, after power cuts,
//! damaged, full.

mod cold;
mod counts;
mod crashes;
mod evicting;
mod expiring;
mod forged;
mod full;
mod histories;
mod iterating;
mod linear;
mod many;
mod memory;
mod nofile;
mod opening;
mod passes;
mod removed;
mod removing;
mod serving;
mod steps;
mod unfinished;
mod unreadable;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use alluvium_device::sim::Random;

use crate::files::Directory;
use crate::files::sim::SimDirectory;
use crate::{Cache, Compression, Durability, Error, MAX_KEY_BYTES, Options, Stats, WhenFull};

const MIB: usize = 1 << 20;

/// Small journals, a few of them in memory.
fn options() -> Options {
    Options {
        journal_bytes: MIB,
        memory_bytes: 4 * MIB,
        max_disk_bytes: 64 << 20,
        // Many of these tests depend on how much is on disk, and for how long; `cold` tests
        // compression.
        compression: Compression::None,
        ..Options::default()
    }
}

fn open(directory: &SimDirectory, options: &Options) -> Cache {
    Cache::open_in(Box::new(directory.clone()), options.clone()).unwrap()
}

/// Returns the contents of a cache without concurrent writes: a key that is returned twice was
/// moved, and has the same value.
fn contents(cache: &Cache) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in cache.iter() {
        let entry = entry.unwrap();
        let value = entry.value().to_vec();
        if let Some(other) = found.insert(entry.key().to_vec(), value) {
            assert_eq!(other, entry.value(), "two values of {:?}", entry.key());
        }
    }
    found
}

/// Removes all hints, so that the next opening reads the journals themselves.
fn remove_hints(directory: &SimDirectory) {
    let names = directory.list().unwrap();
    for name in names.iter().filter(|name| name.ends_with(".hint")) {
        directory.remove(name).unwrap();
    }
}

/// Returns a bound of a test, which `cargo xtask model` raises.
fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect(name))
}

/// Waits until no background work is left. Independent of the load of the machine: this thread does
/// what the maintenance thread has not got to.
fn wait_until_idle(cache: &Cache) -> Stats {
    let shared = &cache.shared;
    let mut is_warm = false;
    loop {
        // Sealed journals are then written and need their hints.
        cache.flush().unwrap();
        let before = cache.stats();
        let has_worked = {
            let _exclusive = shared.maintenance.exclusive.lock();
            shared.run_task(&mut is_warm).unwrap()
        };
        let lacks_spare = || shared.flush.state.lock().spare.is_none();
        if has_worked || (lacks_spare() && !shared.flush.lacks_spare()) {
            // The allocator is working, or there is more to do.
            thread::yield_now();
        } else if cache.stats() == before {
            return before;
        }
    }
}

/// Writes until the journal of `key` is no longer in memory; returns the number of keys written,
/// numbered from 0.
fn put_until_on_disk(cache: &Cache, key: &[u8]) -> u64 {
    let mut written = 0u64;
    // The journal itself is not accessed, since reads keep it in memory.
    while cache.read_bytes(key) == 0 {
        assert!(written < 40_000, "it stays in memory");
        for _ in 0..1000 {
            cache.put(&written.to_le_bytes(), &[1; 1000]).unwrap();
            written += 1;
        }
        // A background task that works on the journal, for example writes its hint, keeps it in
        // memory.
        wait_until_idle(cache);
    }
    written
}

fn key(key: u64) -> Vec<u8> {
    // Of different lengths, some long.
    let mut bytes = key.to_le_bytes().to_vec();
    bytes.resize(8 + (key % 7 * 5) as usize, b'k');
    bytes
}

fn value(random: &mut Random) -> Vec<u8> {
    let len = match random.below(20) {
        0 => 0,
        1 => random.index(40_000),
        _ => random.index(600),
    };
    let first = random.next_u64();
    (0..len).map(|at| (first.wrapping_mul(at as u64 + 1) >> 32) as u8).collect()
}

/// Every operation of a cache, compared with a map; the cache is reopened from time to time, with
/// hints and without.
#[test]
fn the_cache_agrees_with_a_map() {
    const COMPRESSIONS: [Compression; 4] =
        [Compression::None, Compression::Lz4, Compression::Zstd, Compression::Snappy];
    for seed in 0..8 {
        let mut random = Random::new(seed);
        let directory = SimDirectory::default();
        // With a cache of blocks, and without.
        let options = Options {
            compression: COMPRESSIONS[seed as usize % 4],
            memory_bytes: (4 + seed as usize / 4) * MIB,
            ..options()
        };
        let mut cache = open(&directory, &options);
        let mut map: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
        let mut compacted = 0;
        for step in 0..30_000 {
            let key = key(random.below(2000));
            match random.below(100) {
                0..45 => {
                    let value = value(&mut random);
                    cache.put(&key, &value).unwrap();
                    map.insert(key, value);
                }
                45..50 => {
                    let value = value(&mut random);
                    let is_new = !map.contains_key(&key);
                    assert_eq!(
                        cache.put_if_absent(&key, &value, None).unwrap(),
                        is_new,
                        "seed {seed}, step {step}"
                    );
                    map.entry(key).or_insert(value);
                }
                50..65 => {
                    let was_there = map.remove(&key).is_some();
                    assert_eq!(cache.delete(&key).unwrap(), was_there, "seed {seed}, step {step}");
                }
                65..70 => {
                    let keys: Vec<_> =
                        (0..random.below(80)).map(|_| self::key(random.below(2500))).collect();
                    let found = cache.get_many(&keys);
                    for (key, found) in keys.iter().zip(found) {
                        assert_eq!(
                            found.unwrap().as_deref(),
                            map.get(key).map(Vec::as_slice),
                            "seed {seed}, step {step}"
                        );
                    }
                }
                _ => {
                    let found = cache.get(&key).unwrap();
                    assert_eq!(
                        found.as_deref(),
                        map.get(&key).map(Vec::as_slice),
                        "seed {seed}, step {step}"
                    );
                }
            }
            if random.chance(0.0003) {
                assert!(contents(&cache) == map, "seed {seed}, step {step}");
                compacted += cache.stats().compacted;
                cache.close().unwrap();
                if random.chance(0.3) {
                    remove_hints(&directory);
                }
                cache = open(&directory, &options);
                let recovered = cache.recovered();
                assert_eq!(
                    (recovered.entries, recovered.damaged_bytes),
                    (map.len(), 0),
                    "seed {seed}, step {step}"
                );
                assert_eq!(cache.stats().entries, map.len());
            }
        }
        // Compaction yields to other work, and may not have finished before.
        let stats = wait_until_idle(&cache);
        assert!(compacted + stats.compacted > 0, "seed {seed}");
        assert_eq!(stats.evicted, 0);
        assert!(contents(&cache) == map, "seed {seed}");
    }
}

#[test]
fn a_value_stays_as_it_is_while_its_key_changes() {
    let directory = SimDirectory::default();
    let cache = open(&directory, &options());
    cache.put(b"key", &[1; 1000]).unwrap();
    let value = cache.get(b"key").unwrap().unwrap();
    let copy = value.clone();
    // Enough for its journal to leave the memory.
    for round in 0..8000u64 {
        cache.put(&round.to_le_bytes(), &[2; 1000]).unwrap();
    }
    cache.delete(b"key").unwrap();
    assert_eq!(*value, [1; 1000]);
    drop(cache);
    assert_eq!(*copy, [1; 1000]);
}

#[test]
fn invalid_keys_values_and_options_are_refused() {
    let directory = SimDirectory::default();
    let cache = open(&directory, &options());
    assert!(matches!(cache.put(b"", b"value"), Err(Error::KeyEmpty)));
    let long = vec![0; MAX_KEY_BYTES + 1];
    assert!(matches!(cache.put(&long, b""), Err(Error::KeyTooLong { len_bytes: 65_536 })));
    cache.put(&long[1..], b"").unwrap();
    let largest = MIB - 4096 - 16 - 1;
    assert!(matches!(cache.put(b"k", &vec![0; largest + 1]), Err(Error::ValueTooLong { .. })));
    cache.put(b"k", &vec![7; largest]).unwrap();
    assert_eq!(cache.get(b"k").unwrap().unwrap().len(), largest);
    assert!(!cache.delete(b"nothing").unwrap());
    assert!(cache.get(b"").unwrap().is_none());
    let too_little = Options { memory_bytes: 3 * MIB, ..options() };
    let error = Cache::open_in(Box::new(SimDirectory::default()), too_little).unwrap_err();
    assert!(error.to_string().contains("memory_bytes is 3145728"), "{error}");
}

#[test]
fn an_expired_value_is_absent() {
    let directory = SimDirectory::default();
    let cache = open(&directory, &options());
    let (short, long) = (Duration::from_millis(1), Duration::from_secs(3600));
    cache.put_with_ttl(b"short", b"1", short).unwrap();
    cache.put_with_ttl(b"long", b"2", long).unwrap();
    assert!(cache.put_if_absent(b"other", b"3", Some(short)).unwrap());
    thread::sleep(Duration::from_millis(5));
    assert!(cache.get(b"short").unwrap().is_none());
    assert!(!cache.contains(b"other").unwrap());
    let (value, left) = cache.get_with_ttl(b"long").unwrap().unwrap();
    assert_eq!(*value, *b"2");
    assert!(left.unwrap() <= long && left.unwrap() > long / 2);
    assert!(!cache.put_if_absent(b"long", b"4", None).unwrap());
    assert!(cache.put_if_absent(b"short", b"5", None).unwrap());
    assert!(!cache.delete(b"other").unwrap(), "it had expired");
    assert_eq!(contents(&cache).len(), 2);
    drop(cache);
    let cache = open(&directory, &options());
    assert_eq!(cache.get(b"short").unwrap().as_deref(), Some(&b"5"[..]));
    assert!(cache.get_with_ttl(b"long").unwrap().unwrap().1.is_some());
}

/// Each thread writes keys of its own and reads all keys: it finds its own last value, and for
/// other keys only values that were written for them.
#[test]
fn threads_work_on_one_cache() {
    const THREADS: u64 = 4;
    const KEYS: u64 = 300;
    let directory = SimDirectory::default();
    let options = Options { compression: Compression::Lz4, ..options() };
    let cache = Arc::new(open(&directory, &options));
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let cache = cache.clone();
            thread::spawn(move || {
                let mut random = Random::new(thread);
                let mut mine = vec![None; KEYS as usize];
                for version in 0..15_000u64 {
                    let key = thread * KEYS + random.below(KEYS);
                    let slot = &mut mine[(key % KEYS) as usize];
                    if random.chance(0.1) {
                        assert_eq!(
                            cache.delete(&key.to_le_bytes()).unwrap(),
                            slot.take().is_some()
                        );
                    } else {
                        let value = [key.to_le_bytes(), version.to_le_bytes()]
                            .concat()
                            .repeat(1 + random.index(30));
                        cache.put(&key.to_le_bytes(), &value).unwrap();
                        *slot = Some(value);
                    }
                    let found = cache.get(&key.to_le_bytes()).unwrap();
                    assert_eq!(found.as_deref(), slot.as_deref());
                    let other = random.below(THREADS * KEYS).to_le_bytes();
                    if let Some(found) = cache.get(&other).unwrap() {
                        assert!(
                            found.chunks(16).all(|part| part == &found[..16] && part[..8] == other)
                        );
                    }
                }
                mine
            })
        })
        .collect();
    let mut expected = BTreeMap::new();
    for (thread, mine) in threads.into_iter().enumerate() {
        let mine = mine.join().unwrap().into_iter().enumerate();
        expected.extend(mine.filter_map(|(at, value)| {
            Some(((thread as u64 * KEYS + at as u64).to_le_bytes().to_vec(), value?))
        }));
    }
    assert!(contents(&cache) == expected);
    drop(cache);
    assert!(contents(&open(&directory, &options)) == expected);
}

/// If several threads put an absent key, one succeeds and all see its value.
#[test]
fn one_of_many_concurrent_puts_if_absent_succeeds() {
    let cache = Arc::new(open(&SimDirectory::default(), &options()));
    for round in 0..200u64 {
        let threads: Vec<_> = (0..4u8)
            .map(|thread| {
                let cache = cache.clone();
                thread::spawn(move || {
                    let has_put =
                        cache.put_if_absent(&round.to_le_bytes(), &[thread], None).unwrap();
                    (has_put, thread, cache.get(&round.to_le_bytes()).unwrap().unwrap()[0])
                })
            })
            .collect();
        let all: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let won: Vec<_> = all.iter().filter(|(has_put, ..)| *has_put).collect();
        assert_eq!(won.len(), 1, "{all:?}");
        assert!(all.iter().all(|(_, _, seen)| *seen == won[0].1), "{all:?}");
    }
}

#[test]
fn the_oldest_records_are_evicted_except_those_read() {
    let directory = SimDirectory::default();
    let options = Options { max_disk_bytes: 12 << 20, ..options() };
    let cache = open(&directory, &options);
    let wanted = |key: u64| key < 100;
    for key in 0..100_000u64 {
        cache.put(&key.to_le_bytes(), &[key as u8; 500]).unwrap();
        if key % 200 == 0 {
            for old in (0..=key).filter(|key| wanted(*key)) {
                if let Some(value) = cache.get(&old.to_le_bytes()).unwrap() {
                    assert_eq!(*value, [old as u8; 500]);
                }
            }
        }
    }
    let stats = wait_until_idle(&cache);
    assert!(stats.disk_bytes <= 12 << 20, "{stats:?}");
    assert!(stats.evicted > 70_000 && stats.kept >= 100, "{stats:?}");
    assert_eq!(stats.evicted + stats.entries as u64, 100_000, "{stats:?}");
    let kept = (0..100u64).filter(|key| cache.contains(&key.to_le_bytes()).unwrap()).count();
    assert_eq!(kept, 100, "{stats:?}");
    assert!(cache.contains(&99_999u64.to_le_bytes()).unwrap());
    let before = contents(&cache);
    cache.close().unwrap();
    // Space for another journal, so that nothing is evicted now.
    let larger = Options { max_disk_bytes: 64 << 20, ..options };
    assert!(
        contents(&open(&directory, &larger)) == before,
        "what was moved is the newest of its key"
    );
}

#[test]
fn a_full_cache_without_eviction_refuses_writes() {
    let directory = SimDirectory::at("/srv/cache".as_ref());
    let options = Options { max_disk_bytes: 8 << 20, when_full: WhenFull::Refuse, ..options() };
    let cache = open(&directory, &options);
    let mut written = 0u64;
    let error = loop {
        match cache.put(&written.to_le_bytes(), &[3; 1000]) {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::DiskFull { max_bytes: 8_388_608, .. }), "{error}");
    assert!(error.to_string().starts_with("/srv/cache: no space for another journal"), "{error}");
    assert!(error.to_string().contains("or the disk is full"), "{error}");
    assert!((4900..5300).contains(&written), "{written}");
    for key in 0..written {
        assert!(cache.contains(&key.to_le_bytes()).unwrap());
    }
    assert_eq!(cache.stats().evicted, 0);
    // The advice of the error message works.
    for key in 0..written {
        if key % 4 > 0 {
            assert!(cache.delete(&key.to_le_bytes()).unwrap(), "{key}");
        }
    }
    let mut again = 0u64;
    while again < 2000 {
        match cache.put(&(written + again).to_le_bytes(), &[4; 1000]) {
            Ok(()) => again += 1,
            Err(Error::DiskFull { .. }) => thread::sleep(Duration::from_millis(10)),
            Err(error) => panic!("{error}"),
        }
    }
    let kept = (0..written).filter(|key| cache.contains(&key.to_le_bytes()).unwrap());
    assert_eq!(kept.count() as u64, written.div_ceil(4));
}

/// Deletions that fill no journal: only the next put shows that space has to be made.
#[test]
fn a_refused_put_makes_the_cache_reclaim_space() {
    let directory = SimDirectory::default();
    let options = Options { max_disk_bytes: 8 << 20, when_full: WhenFull::Refuse, ..options() };
    let cache = open(&directory, &options);
    let mut written = 0u64;
    while cache.put(&written.to_le_bytes(), &[3; 100_000]).is_ok() {
        written += 1;
    }
    // Written to the next journal, so that all earlier ones are sealed; afterwards the maintenance
    // thread has nothing to do.
    assert!(cache.delete(&0u64.to_le_bytes()).unwrap());
    wait_until_idle(&cache);
    for key in 1..written {
        assert!(cache.delete(&key.to_le_bytes()).unwrap(), "{key}");
    }
    for key in 0..30u64 {
        while let Err(error) = cache.put(&key.to_le_bytes(), &[4; 100_000]) {
            assert!(matches!(error, Error::DiskFull { .. }), "{error}");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Only deletions, behind an old journal that is live: background work comes to an end.
#[test]
fn compaction_of_tombstones_alone_terminates() {
    let directory = SimDirectory::default();
    let cache = open(&directory, &options());
    for key in 0..1000u64 {
        cache.put(&key.to_le_bytes(), &[1; 1000]).unwrap();
    }
    for key in 1000..80_000u64 {
        cache.put(&key.to_le_bytes(), b"").unwrap();
    }
    for key in 1000..80_000u64 {
        assert!(cache.delete(&key.to_le_bytes()).unwrap());
    }
    let stats = wait_until_idle(&cache);
    assert!(stats.compacted < 50, "{stats:?}");
    assert_eq!(stats.entries, 1000);
    drop(cache);
    assert_eq!(contents(&open(&directory, &options())).len(), 1000);
}

#[test]
fn a_disk_smaller_than_the_budget_suffices() {
    let directory = SimDirectory::default();
    let cache = open(&directory, &options());
    directory.limit(9 << 20);
    for key in 0..40_000u64 {
        cache.put(&key.to_le_bytes(), &[4; 1000]).unwrap();
    }
    assert!(cache.stats().evicted > 20_000, "{:?}", cache.stats());
    assert!(cache.contains(&39_999u64.to_le_bytes()).unwrap());
}

#[test]
fn after_a_failed_write_nothing_is_written_and_everything_is_readable() {
    let directory = SimDirectory::default();
    let cache = open(&directory, &Options { durability: Durability::Always, ..options() });
    cache.put(b"before", b"1").unwrap();
    directory.fail_writes();
    assert!(matches!(cache.put(b"after", b"2"), Err(Error::Io { .. })));
    // It can be read. But writes that reveal its presence fail.
    assert!(cache.put_if_absent(b"after", b"3", None).is_err());
    assert!(cache.swap(b"after", b"3", crate::When::IfAbsent, crate::Ttl::None).is_err());
    assert!(matches!(cache.put(b"later", b"3"), Err(Error::Io { .. })));
    assert_eq!(cache.get(b"before").unwrap().as_deref(), Some(&b"1"[..]));
    assert!(cache.flush().is_err());
    assert!(cache.close().is_err());
}

#[test]
fn a_damaged_record_is_reported_and_the_others_are_read() {
    let directory = SimDirectory::default();
    let cache = open(&directory, &options());
    for key in 0..100u64 {
        cache.put(&key.to_le_bytes(), &[5; 1000]).unwrap();
    }
    cache.close().unwrap();
    // In the value of the third record.
    directory.corrupt("000000000000.journal", 4096 + 2 * 1024 + 500);
    let cache = open(&directory, &options());
    assert!(matches!(cache.get(&2u64.to_le_bytes()), Err(Error::Corrupt { offset: 6144, .. })));
    assert_eq!(
        (0..100u64).filter(|key| cache.contains(&key.to_le_bytes()).unwrap_or(false)).count(),
        99
    );
    assert_eq!(contents(&cache).len(), 99);
    cache.put(&2u64.to_le_bytes(), b"again").unwrap();
    assert_eq!(cache.get(&2u64.to_le_bytes()).unwrap().as_deref(), Some(&b"again"[..]));
    drop(cache);
    directory.remove("000000000000.hint").unwrap();
    let cache = open(&directory, &options());
    assert_eq!((cache.recovered().damaged_bytes, cache.recovered().entries), (1024, 100));
}

#[test]
fn a_journal_without_its_header_is_read_with_its_hint_or_set_aside() {
    let directory = SimDirectory::default();
    open(&directory, &options()).put(b"key", b"value").unwrap();
    directory.corrupt("000000000000.journal", 5);
    // Without the hint the whole journal would be lost.
    let mut damaged_bytes = 0;
    let inspected = crate::inspect::inspect_in(&directory, |report| {
        damaged_bytes += report.damaged_bytes;
        Ok::<_, Error>(())
    });
    assert_eq!((inspected.unwrap(), damaged_bytes), (MIB, crate::journal::FIRST_RECORD as u64));
    let cache = open(&directory, &options());
    assert_eq!(cache.get(b"key").unwrap().as_deref(), Some(&b"value"[..]));
    drop(cache);
    directory.remove("000000000000.hint").unwrap();
    let cache = open(&directory, &options());
    assert!(cache.get(b"key").unwrap().is_none());
    assert_eq!((cache.recovered().entries, cache.recovered().damaged_bytes), (0, 8192));
    let names = directory.list().unwrap();
    assert!(names.contains(&"000000000000.journal.damaged".to_owned()), "{names:?}");
}

/// A kill between the creation of a journal's file and the writing of its header.
#[test]
fn a_journal_whose_creation_was_interrupted_is_removed() {
    let directory = SimDirectory::default();
    open(&directory, &options()).put(b"key", b"value").unwrap();
    for (name, len_bytes) in [("000000000007.journal", MIB as u64), ("000000000008.journal", 0)] {
        directory.create(name, len_bytes).unwrap();
    }
    let cache = open(&directory, &options());
    assert_eq!((cache.recovered().journals, cache.recovered().damaged_bytes), (1, 0));
    assert_eq!(cache.get(b"key").unwrap().as_deref(), Some(&b"value"[..]));
    let names = directory.list().unwrap();
    assert!(
        !names.iter().any(|name| name.contains("00007") || name.contains("damaged")),
        "{names:?}"
    );
}

/// A writer that publishes the last bytes of a journal after another one has found it full wakes
/// no thread, and may not return: waiters for the journal's memory or disk space must not depend on
/// it.
#[test]
fn a_journal_whose_last_bytes_are_published_late_is_written() {
    // With more memory than disk the next journal is ready, and the oldest one has to be removed
    // for it.
    let large_memory = Options { memory_bytes: 16 * MIB, max_disk_bytes: 8 << 20, ..options() };
    for options in [options(), large_memory] {
        let directory = SimDirectory::default();
        let cache = Arc::new(open(&directory, &options));
        let journal = cache.shared.active.load_full();
        let mut late = journal.arena.as_ref().unwrap().reserve(8).unwrap();
        late.fill(0);
        let (done, is_done) = std::sync::mpsc::channel();
        let writer = cache.clone();
        let writer = thread::spawn(move || {
            for key in 0..20_000u64 {
                writer.put(&key.to_le_bytes(), &[4; 1000]).unwrap();
            }
            done.send(()).unwrap();
        });
        while cache.stats().stalls == 0 || cache.shared.flush.state.lock().pending.len() < 2 {
            thread::yield_now();
        }
        // The flusher has found nothing to do.
        thread::sleep(Duration::from_millis(200));
        late.publish();
        is_done.recv_timeout(Duration::from_secs(60)).expect("the journal is written");
        writer.join().unwrap();
    }
}

/// The system gives less memory than the budget permits: journals share what there is, and if
/// readers hold it, writers wait until they release it.
#[test]
fn a_cache_without_more_memory_continues_with_what_it_has() {
    let directory = SimDirectory::at("/srv/cache".as_ref());
    let cache = open(&directory, &Options { memory_bytes: 16 * MIB, ..options() });
    while cache.shared.flush.state.lock().spare.is_none() {
        thread::yield_now();
    }
    cache.shared.pool.refuse(true);
    let free: Vec<_> = std::iter::from_fn(|| cache.shared.pool.take()).collect();
    let error = cache.shared.load_whole(&cache.shared.active.load(), 0).unwrap_err();
    assert!(error.to_string().starts_with("/srv/cache: no memory for a journal"), "{error}");
    drop(free);
    let put = |key: u64| cache.put(&key.to_le_bytes(), &[4; 1000]).unwrap();
    (0..6_000).for_each(put);
    let kept = cache.get(&5_999u64.to_le_bytes()).unwrap().unwrap();
    thread::scope(|scope| {
        let writer = scope.spawn(|| (6_000..12_000).for_each(put));
        while !cache.shared.flush.state.lock().lacks_resources {
            thread::yield_now();
        }
        assert_eq!(*kept, [4; 1000]);
        drop(kept);
        writer.join().unwrap();
    });
    assert_eq!(cache.stats().entries, 12_000);
    cache.close().unwrap();
}

/// The flusher may be at any step when the cache is closed.
#[test]
fn writes_before_a_close_are_present_after_it() {
    let directory = SimDirectory::default();
    let mut random = Random::new(3);
    let mut expected = BTreeMap::new();
    for round in 0..200u64 {
        let cache = open(&directory, &options());
        assert_eq!(cache.recovered().entries, expected.len(), "round {round}");
        for _ in 0..random.below(40) {
            let (key, value) = (key(random.below(100)), vec![round as u8; random.index(60_000)]);
            cache.put(&key, &value).unwrap();
            expected.insert(key, value);
        }
        cache.close().unwrap();
    }
    assert!(contents(&open(&directory, &options())) == expected);
}

#[test]
fn a_directory_without_a_cache_is_not_touched() {
    let directory = SimDirectory::default();
    open(&directory, &options()).put(b"key", b"value").unwrap();
    directory.corrupt("cache", 33);
    let error = Cache::open_in(Box::new(directory.clone()), options()).unwrap_err();
    assert!(error.to_string().contains("remove the directory"), "{error}");
    directory.remove("cache").unwrap();
    let error = Cache::open_in(Box::new(directory), options()).unwrap_err();
    assert!(error.to_string().contains("missing"), "{error}");
    let not_made = Options { create: false, ..options() };
    assert!(Cache::open_in(Box::new(SimDirectory::default()), not_made).is_err());
}

#[test]
fn a_directory_without_a_cache_is_unchanged_without_create() {
    let directory = tempfile::tempdir().unwrap();
    let not_made = || Options { create: false, ..options() };
    let error = Cache::open(directory.path(), not_made()).unwrap_err();
    assert!(matches!(error, Error::NoCache { .. }), "{error}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    let nested = directory.path().join("a/b/c");
    assert!(Cache::open(&nested, not_made()).is_err());
    assert!(!nested.exists());
    Cache::open(&nested, options()).unwrap().close().unwrap();
    // Also for a copy without the lock file.
    std::fs::remove_file(nested.join("lock")).unwrap();
    Cache::open(&nested, not_made()).unwrap().close().unwrap();
}

#[test]
fn a_directory_can_be_opened_once() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::open(directory.path(), options()).unwrap();
    let error = Cache::open(directory.path(), options()).unwrap_err();
    assert!(matches!(error, Error::InUse { .. }), "{error}");
    cache.put(b"key", b"value").unwrap();
    cache.close().unwrap();
    let cache = Cache::open(directory.path(), Options { create: false, ..options() }).unwrap();
    assert_eq!(cache.get(b"key").unwrap().as_deref(), Some(&b"value"[..]));
}

/// In real files: more data than memory and budget hold, written by two threads, then reopened.
#[test]
fn the_cache_works_in_real_files() {
    let directory = tempfile::tempdir().unwrap();
    let options = Options { max_disk_bytes: 16 << 20, ..options() };
    let cache = Arc::new(Cache::open(directory.path(), options.clone()).unwrap());
    let threads: Vec<_> = (0..2u64)
        .map(|thread| {
            let cache = cache.clone();
            thread::spawn(move || {
                for key in 0..20_000u64 {
                    cache
                        .put(&(key * 2 + thread).to_le_bytes(), &key.to_le_bytes().repeat(100))
                        .unwrap();
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let stats = wait_until_idle(&cache);
    assert!(stats.evicted > 0 && stats.disk_bytes <= 16 << 20, "{stats:?}");
    let before = contents(&cache);
    assert_eq!(before.len(), stats.entries);
    Arc::into_inner(cache).unwrap().close().unwrap();
    // Space for another journal, so that nothing is evicted now.
    let larger = Options { max_disk_bytes: 64 << 20, ..options };
    let cache = Cache::open(directory.path(), larger.clone()).unwrap();
    assert_eq!(cache.recovered().scanned, 0);
    assert!(contents(&cache) == before);
    // A journal that has lost its hint is read whole once, and not again.
    cache.close().unwrap();
    let names = || std::fs::read_dir(directory.path()).unwrap().map(|it| it.unwrap().path());
    let hints = || names().filter(|it| it.extension().is_some_and(|it| it == "hint"));
    let there = hints().count();
    assert!(there > 2, "{there}");
    hints().for_each(|hint| std::fs::remove_file(hint).unwrap());
    for scanned in [there, 0] {
        let cache = Cache::open(directory.path(), larger.clone()).unwrap();
        assert_eq!(cache.recovered().scanned, scanned);
        assert!(contents(&cache) == before);
        cache.close().unwrap();
    }
    for (key, value) in before {
        let key_number = u64::from_le_bytes(key[..].try_into().unwrap());
        assert_eq!(value, (key_number / 2).to_le_bytes().repeat(100));
    }
}

/// Keys that are present throughout are returned while others are written and the oldest journal is
/// evicted.
#[test]
fn an_iteration_returns_every_key_that_is_present_throughout() {
    let directory = SimDirectory::default();
    let cache = Arc::new(open(&directory, &Options { max_disk_bytes: 12 << 20, ..options() }));
    for key in 0..50u64 {
        cache.put(&key.to_le_bytes(), &[6; 100]).unwrap();
    }
    let is_done = Arc::new(AtomicBool::new(false));
    let rounds = Arc::new(AtomicU64::new(0));
    let writer = {
        let (cache, is_done, rounds) = (cache.clone(), is_done.clone(), rounds.clone());
        thread::spawn(move || {
            let mut key = 100u64;
            while !is_done.load(Ordering::Relaxed) {
                for _ in 0..200 {
                    cache.put(&key.to_le_bytes(), &[7; 1000]).unwrap();
                    key += 1;
                }
                for old in 0..50u64 {
                    assert!(cache.contains(&old.to_le_bytes()).unwrap());
                }
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        })
    };
    while rounds.load(Ordering::Relaxed) < 150 {
        let found = contents(&cache);
        assert!((0..50u64).all(|key| found.contains_key(&key.to_le_bytes()[..])));
    }
    is_done.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    assert!(cache.stats().kept > 50, "{:?}", cache.stats());
}
