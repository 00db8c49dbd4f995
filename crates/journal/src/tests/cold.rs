//! Cold journals: compressed, killed during compression, damaged, and promoted.

use alluvium_device::PAGE_BYTES;

use super::*;
use crate::compact::STEP_BYTES;
use crate::files::Directory;
use crate::journal::Journal;
use crate::pool::Pooled;
use crate::shared::Shared;
use crate::{Lookup, ScanCursor, Ttl, When};

const CODECS: [Compression; 3] = [Compression::Lz4, Compression::Zstd, Compression::Snappy];

pub(super) fn plain() -> Options {
    Options { compression: Compression::None, ..options() }
}

fn compressing(compression: Compression) -> Options {
    Options { compression, ..options() }
}

/// Distinct compressible values made of words.
pub(super) fn text(key: u64) -> Vec<u8> {
    let mut random = Random::new(key);
    let words = 1 + random.index(200);
    (0..words).flat_map(|_| format!("word{} ", random.below(300)).into_bytes()).collect()
}

/// Creates this many keys in plain journals, then closes the cache.
fn filled(keys: u64) -> (SimDirectory, BTreeMap<Vec<u8>, Vec<u8>>) {
    let directory = SimDirectory::default();
    let cache = open(&directory, &plain());
    let mut map = BTreeMap::new();
    for key in 0..keys {
        cache.put(&key.to_le_bytes(), &text(key)).unwrap();
        map.insert(key.to_le_bytes().to_vec(), text(key));
    }
    cache.close().unwrap();
    (directory, map)
}

/// Opens a cache without its threads: nothing happens except by calls.
pub(super) fn still(directory: &SimDirectory, options: &Options) -> Shared {
    crate::open::open(Box::new(directory.clone()), options.clone()).unwrap().0
}

pub(super) fn compress_all(directory: &SimDirectory, options: &Options) -> Stats {
    let shared = still(directory, options);
    while shared.compress_one().unwrap() {}
    Stats::of(&shared)
}

fn remove_hints(directory: &SimDirectory) {
    for name in directory.list().unwrap().iter().filter(|name| name.ends_with(".hint")) {
        directory.remove(name).unwrap();
    }
}

#[test]
fn compressed_journals_have_the_same_records() {
    for compression in CODECS {
        let (directory, map) = filled(12_000);
        let stats = compress_all(&directory, &compressing(compression));
        assert!(stats.compressed >= 6, "{compression}: {stats:?}");
        assert!(stats.compressed_bytes * 4 < stats.uncompressed_bytes * 3, "{stats:?}");
        assert!(stats.disk_bytes < stats.uncompressed_bytes, "{stats:?}");
        assert_eq!(stats.incompressible, 0);
        // With hints and without, by a cache that compresses and by one that does not.
        for options in [compressing(compression), plain()] {
            let cache = open(&directory, &options);
            assert_eq!(cache.recovered().entries, map.len());
            assert_eq!(cache.recovered().damaged_bytes, 0);
            assert!(contents(&cache) == map, "{compression}");
            for (key, value) in &map {
                assert_eq!(cache.get(key).unwrap().as_deref(), Some(&value[..]));
            }
            assert!(cache.stats().compressed >= stats.compressed);
            cache.close().unwrap();
            remove_hints(&directory);
        }
    }
}

/// The first read of a record marks it, the second one caches it, plain or compressed; a cached
/// record is not mistaken for its replacement.
#[test]
fn a_record_that_is_read_again_is_not_read_from_the_disk_again() {
    for compression in [Compression::None, Compression::Lz4] {
        let (directory, map) = filled(12_000);
        // Memory for cached records in addition to the minimum of journals.
        let options = Options { memory_bytes: 5 * MIB, compression, ..options() };
        if compression != Compression::None {
            compress_all(&directory, &options);
        }
        let cache = open(&directory, &options);
        // Otherwise the maintenance thread would promote the journal that is read here.
        wait_until_idle(&cache);
        let key = map
            .keys()
            .find(|key| matches!(cache.try_get(key).unwrap(), Lookup::OnDisk))
            .expect("more than fits into memory");
        let value = &map[key];
        let disk_reads = || {
            let position = cache.shared.index.find(cache.shared.hasher.hash(key)).unwrap();
            let journal = cache.shared.journals.of(position).unwrap();
            journal.counts.disk_reads.load(Ordering::Relaxed)
        };
        assert_eq!(cache.get(key).unwrap().as_deref(), Some(&value[..]));
        assert!(matches!(cache.try_get(key).unwrap(), Lookup::OnDisk), "read once");
        assert_eq!(cache.get(key).unwrap().as_deref(), Some(&value[..]));
        let before = disk_reads();
        assert!(before > 0);
        assert_eq!(cache.get(key).unwrap().as_deref(), Some(&value[..]));
        let Lookup::Found(found, None) = cache.try_get(key).unwrap() else { panic!("not kept") };
        assert_eq!(*found, value[..]);
        assert_eq!(disk_reads(), before);
        let stats = cache.stats();
        assert!(stats.block_bytes >= value.len() && stats.memory_bytes <= 5 * MIB, "{stats:?}");
        cache.put(key, b"newer").unwrap();
        assert_eq!(cache.get(key).unwrap().as_deref(), Some(&b"newer"[..]));
        assert!(cache.delete(key).unwrap());
        assert!(cache.get(key).unwrap().is_none());
        cache.close().unwrap();
    }
}

/// A record is replaced while it is read from the disk, and expires afterwards. There was a value
/// throughout.
#[test]
fn the_replacement_of_an_expired_record_is_read() {
    for compression in [Compression::None, Compression::Lz4] {
        let directory = SimDirectory::default();
        let options = compressing(compression);
        let cache = Arc::new(open(&directory, &options));
        let now = cache.shared.clock.advance(1000);
        cache.shared.put(b"key", b"old", Some(now + 10)).unwrap();
        put_until_on_disk(&cache, b"key");
        let writer = cache.clone();
        // Otherwise the maintenance thread might read first.
        let turn = cache.shared.maintenance.exclusive.lock();
        directory.after_read(move || {
            writer.put(b"key", b"new").unwrap();
            writer.shared.clock.advance(10);
        });
        assert_eq!(cache.get(b"key").unwrap().as_deref(), Some(&b"new"[..]));
        drop(turn);
        // The hook has run.
        assert_eq!(Arc::strong_count(&cache), 1);
    }
}

/// Writes that replace or remove a cached record use it, and so do scans.
#[test]
fn a_cached_record_is_not_read_by_writes_and_scans() {
    let directory = SimDirectory::default();
    let cache = open(&directory, &plain());
    let keys: Vec<_> = (0..4u64).map(u64::to_le_bytes).collect();
    // A scan would read the beginning of a long record.
    let values: Vec<_> = [17_000, 1000, 1000, 1000].map(|len| vec![7u8; len]).into();
    for (key, value) in keys.iter().zip(&values) {
        cache.put_with_ttl(key, value, Duration::from_secs(3600)).unwrap();
    }
    cache.close().unwrap();
    let shared = still(&directory, &Options { memory_bytes: 5 * MIB, ..plain() });
    for key in &keys {
        let position = shared.index.find(shared.hasher.hash(key)).unwrap();
        let journal = shared.journals.of(position).unwrap();
        // As if it had been read before.
        shared.load_cold(&journal, position.marked_read(), Some(&[])).unwrap();
    }
    let reads = directory.reads();
    let (mut at, mut found) = (Some(ScanCursor::default()), 0);
    while let Some(from) = at {
        let scanned = shared.scan(from, 100, |bytes| bytes == 0).unwrap().unwrap();
        found += scanned.keys.len();
        at = scanned.next;
    }
    assert_eq!(found, 4);
    assert!(!shared.put_if_absent(&keys[0], b"new", None).unwrap());
    let swapped = shared.swap(&keys[1], b"new", When::Always, Ttl::Keep).unwrap();
    assert_eq!(swapped.old.as_deref(), Some(&values[1][..]));
    assert!(shared.delete(&keys[2]).unwrap());
    assert_eq!(directory.reads(), reads);
}

/// Cached records are not read again by `delete_many` either.
#[test]
fn cached_records_are_not_read_to_be_deleted() {
    let cache = open(&SimDirectory::default(), &Options { memory_bytes: 5 * MIB, ..plain() });
    let keys = [*b"one", *b"two"];
    for key in keys {
        cache.put_with_ttl(&key, b"value", Duration::from_secs(3600)).unwrap();
    }
    let position = cache.shared.index.find(cache.shared.hasher.hash(b"one")).unwrap();
    let counts = cache.shared.journals.of(position).unwrap().counts.clone();
    for key in keys {
        put_until_on_disk(&cache, &key);
        assert!(matches!(cache.try_get(&key).unwrap(), Lookup::OnDisk));
        (0..2).for_each(|_| assert!(cache.contains(&key).unwrap()));
        assert!(matches!(cache.try_get(&key).unwrap(), Lookup::Found(..)));
    }
    let before = counts.disk_reads.load(Ordering::Relaxed);
    assert!(before > 0);
    assert_eq!(cache.delete_many(&keys).unwrap(), 2);
    assert_eq!(counts.disk_reads.load(Ordering::Relaxed), before);
}

#[test]
fn an_incompressible_journal_stays_plain_and_is_tried_once() {
    let directory = SimDirectory::default();
    let cache = open(&directory, &plain());
    let mut random = Random::new(1);
    for key in 0..4000u64 {
        let value: Vec<u8> = (0..1000).map(|_| random.next_u64() as u8).collect();
        cache.put(&key.to_le_bytes(), &value).unwrap();
    }
    cache.close().unwrap();
    let shared = still(&directory, &compressing(Compression::Lz4));
    let journals = shared.journals.len();
    let mut tried = 0;
    while shared.compress_one().unwrap() {
        tried += 1;
        assert!(tried < journals, "again and again");
    }
    let stats = Stats::of(&shared);
    assert_eq!((stats.compressed, stats.incompressible), (0, tried));
    assert!(tried >= 3, "{stats:?}");
    assert!(!directory.list().unwrap().iter().any(|name| name.ends_with(".tmp")));
}

/// The process ends, or the power fails, before and after each change that compression makes to the
/// disk.
#[test]
fn a_crash_at_any_step_of_compression_loses_nothing() {
    let (original, map) = filled(4000);
    let options = compressing(Compression::Lz4);
    let mut steps = 0;
    loop {
        let directory = original.killed();
        let shared = still(&directory, &options);
        directory.fail_after(steps);
        // It fails if the names cannot be synced.
        while shared.compress_one().unwrap_or(false) {}
        let compressed = Stats::of(&shared).compressed;
        let seeds = 0..6;
        let left = seeds.map(|seed| directory.power_cut(seed)).chain([directory.killed()]);
        for (crash, left) in left.enumerate() {
            if crash % 2 == 0 {
                remove_hints(&left);
            }
            let cache = open(&left, &plain());
            assert_eq!(cache.recovered().damaged_bytes, 0, "step {steps}, crash {crash}");
            assert!(contents(&cache) == map, "step {steps}, crash {crash}");
            let names = left.list().unwrap();
            assert!(!names.iter().any(|name| name.ends_with(".tmp")), "{names:?}");
        }
        if !directory.has_failed() {
            assert!(compressed >= 2);
            break;
        }
        steps += 1;
    }
    // At least create, write, sync and rename, for two journals.
    assert!(steps >= 10, "{steps}");
}

#[test]
fn readers_of_the_plain_file_continue_while_it_is_replaced() {
    let (directory, map) = filled(6000);
    let shared = still(&directory, &compressing(Compression::Zstd));
    let old = shared.journals.all();
    let positions: Vec<_> = map
        .iter()
        .map(|(key, value)| (shared.index.find(shared.hasher.hash(key)).unwrap(), value))
        .collect();
    while shared.compress_one().unwrap() {}
    assert!(Stats::of(&shared).compressed >= 3);
    for (position, value) in positions {
        // In the journal as it was and as it is: a position denotes the same record in both.
        let old: &Journal = old.iter().find(|journal| position.is_in(journal.number)).unwrap();
        for loaded in [old.load(position), shared.journals.of(position).unwrap().load(position)] {
            assert!(loaded.unwrap().bytes().ends_with(value));
        }
    }
}

#[test]
fn a_damaged_frame_is_reported_and_everything_else_is_read() {
    let (directory, map) = filled(12_000);
    compress_all(&directory, &compressing(Compression::Lz4));
    let name = "000000000002.journal";
    directory.corrupt(name, 4096 + 3000);
    let cache = open(&directory, &plain());
    let mut damaged = Vec::new();
    for (key, value) in &map {
        match cache.get(key) {
            Ok(found) => assert_eq!(found.as_deref(), Some(&value[..])),
            Err(Error::Corrupt { journal, offset, .. }) => {
                assert_eq!(journal.0, 2);
                assert!((4096..MIB as u64).contains(&offset), "{offset}");
                damaged.push(key.clone());
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!((1..500).contains(&damaged.len()), "{}", damaged.len());
    assert_eq!(contents(&cache).len(), map.len() - damaged.len());
    cache.put(&damaged[0], b"again").unwrap();
    assert_eq!(cache.get(&damaged[0]).unwrap().as_deref(), Some(&b"again"[..]));
    drop(cache);
    // Without the hint it cannot be determined whose records these were.
    directory.remove("000000000002.hint").unwrap();
    let cache = open(&directory, &plain());
    let recovered = cache.recovered();
    assert!(recovered.damaged_bytes > 0, "{recovered:?}");
    assert_eq!(recovered.entries, map.len() - damaged.len() + 1);
    assert!(cache.get(&damaged[1]).unwrap().is_none());
}

#[test]
fn a_compressed_journal_without_its_table_is_damaged_or_set_aside() {
    let (directory, map) = filled(6000);
    compress_all(&directory, &compressing(Compression::Lz4));
    let name = "000000000001.journal";
    let len = directory.open(name).unwrap().len_bytes().unwrap() as usize;
    directory.corrupt(name, len - 10);
    let cache = open(&directory, &plain());
    assert!(cache.recovered().damaged_bytes > MIB as u64 / 2, "{:?}", cache.recovered());
    let damaged = map.keys().filter(|key| matches!(cache.get(key), Err(Error::Corrupt { .. })));
    let damaged = damaged.count();
    assert!(damaged > 100 && damaged < map.len() / 2, "{damaged}");
    assert_eq!(contents(&cache).len(), map.len() - damaged);
    drop(cache);
    directory.remove("000000000001.hint").unwrap();
    let cache = open(&directory, &plain());
    assert_eq!(cache.recovered().entries, map.len() - damaged);
    assert_eq!(cache.recovered().damaged_bytes, len as u64);
    assert!(directory.list().unwrap().contains(&format!("{name}.damaged")));
}

#[test]
fn a_compressed_journal_without_its_header_is_read_with_its_hint() {
    let (directory, map) = filled(6000);
    compress_all(&directory, &compressing(Compression::Snappy));
    directory.corrupt("000000000001.journal", 5);
    let cache = open(&directory, &plain());
    assert!(contents(&cache) == map);
    assert!(map.iter().all(|(key, value)| cache.get(key).unwrap().as_deref() == Some(&value[..])));
}

/// Compaction and eviction of compressed journals while others are compressed and everything is
/// rewritten.
#[test]
fn compressed_journals_are_compacted_and_evicted() {
    let directory = SimDirectory::default();
    let options = Options {
        max_disk_bytes: 12 << 20,
        memory_bytes: 5 * MIB,
        ..compressing(Compression::Lz4)
    };
    let cache = open(&directory, &options);
    let value = |key: u64, round: u64| [text(key), round.to_le_bytes().to_vec()].concat();
    for round in 0..4u64 {
        for key in round * 4000..(round + 3) * 4000 {
            cache.put(&key.to_le_bytes(), &value(key, round)).unwrap();
        }
        let stats = wait_until_idle(&cache);
        assert!(stats.compressed > 0, "{stats:?}");
        assert!(stats.disk_bytes <= 12 << 20, "{stats:?}");
        for key in 0..(round + 3) * 4000 {
            if let Some(found) = cache.get(&key.to_le_bytes()).unwrap() {
                let rounds = 0..=round;
                assert!(rounds.rev().any(|round| *found == value(key, round)[..]), "key {key}");
            }
        }
        let newest = (round + 3) * 4000 - 1;
        assert_eq!(
            cache.get(&newest.to_le_bytes()).unwrap().as_deref(),
            Some(&value(newest, round)[..])
        );
    }
    let before = contents(&cache);
    cache.close().unwrap();
    let larger = Options { max_disk_bytes: 64 << 20, ..options };
    assert!(contents(&open(&directory, &larger)) == before);
}

#[test]
fn a_cache_without_eviction_holds_more_when_it_compresses() {
    let directory = SimDirectory::default();
    let options = Options {
        max_disk_bytes: 8 << 20,
        when_full: WhenFull::Refuse,
        ..compressing(Compression::Lz4)
    };
    let cache = open(&directory, &options);
    let mut written = 0u64;
    // Plain journals hold 6,000 of them.
    while written < 12_000 {
        match cache.put(&written.to_le_bytes(), &[3; 1000]) {
            Ok(()) => written += 1,
            // Space is being made.
            Err(Error::DiskFull { .. }) => thread::sleep(Duration::from_millis(10)),
            Err(error) => panic!("{error}"),
        }
    }
    assert!((0..written).all(|key| cache.contains(&key.to_le_bytes()).unwrap()));
    assert!(cache.stats().disk_bytes <= 8 << 20, "{:?}", cache.stats());
}

/// Moved records are written plain. If they are not compressed again, reclaiming dead space must
/// not cost more than it gains.
#[test]
fn compaction_on_demand_does_not_undo_compression_for_little() {
    const KEYS: u64 = 12_000;
    let (directory, mut map) = filled(KEYS);
    assert!(compress_all(&directory, &compressing(Compression::Lz4)).compressed >= 6);
    let cache = open(&directory, &plain());
    for key in (0..KEYS).step_by(20) {
        assert!(cache.delete(&key.to_le_bytes()).unwrap());
        map.remove(&key.to_le_bytes()[..]);
    }
    let before = wait_until_idle(&cache);
    let compacted = cache.compact(|_| ()).unwrap();
    assert_eq!(compacted.done, compacted.journals);
    let after = cache.stats();
    // Records that were not compressed may have moved to another journal.
    assert!(after.disk_bytes <= before.disk_bytes + MIB as u64, "{before:?}, {after:?}");
    // If they take less than is gained they are moved nevertheless.
    for key in (0..KEYS).filter(|key| key % 8 > 0) {
        cache.delete(&key.to_le_bytes()).unwrap();
        map.remove(&key.to_le_bytes()[..]);
    }
    cache.compact(|_| ()).unwrap();
    assert_eq!(cache.stats().compressed, 0, "{:?}", cache.stats());
    assert!(contents(&cache) == map);
}

/// At least ten sealed journals and memory for 8: writers have three of these, and the journals
/// that an opening loads the others.
fn warm() -> (Shared, [Option<Pooled>; 2]) {
    let (directory, _) = filled(20_000);
    let shared = still(&directory, &Options { memory_bytes: 9 * MIB, ..plain() });
    while shared.load_one().unwrap() {}
    let writers = [(); 2].map(|()| shared.pool.take());
    (shared, writers)
}

fn hot(shared: &Shared) -> Vec<u64> {
    let newest = shared.active.load().number;
    let all = shared.journals.all();
    let hot = all.iter().filter(|it| it.arena.is_some() && it.number != newest);
    hot.map(|journal| journal.number.0).collect()
}

/// Acts as if a journal had been read this often.
fn read(shared: &Shared, number: u64, reads: u64) {
    let all = shared.journals.all();
    let journal = all.iter().find(|journal| journal.number.0 == number).unwrap();
    journal.counts.reads.fetch_add(reads, Ordering::Relaxed);
    if journal.arena.is_none() {
        journal.counts.disk_reads.fetch_add(reads, Ordering::Relaxed);
    }
}

fn promoted(shared: &Shared) -> u64 {
    Stats::of(shared).promoted
}

#[test]
fn an_opening_loads_the_newest_journals() {
    let (shared, _writers) = warm();
    let sealed = shared.journals.len() as u64 - 1;
    assert!(sealed >= 10, "{sealed}");
    assert_eq!(hot(&shared), (sealed - 5..sealed).collect::<Vec<_>>());
    assert!(shared.pool.memory_bytes() <= 8 * MIB);
}

#[test]
fn a_cold_journal_replaces_a_hot_one_that_is_read_less_than_half_as_often() {
    let (shared, _writers) = warm();
    let cost = shared.promotion_reads();
    let before = hot(&shared);
    assert!(!shared.promote_one().unwrap());
    before.iter().for_each(|number| read(&shared, *number, 80));
    // Not enough reads to justify loading it.
    read(&shared, 0, cost - 1);
    assert!(!shared.promote_one().unwrap());
    // Enough reads, but not more than twice what the other one may have been read, whose sampled
    // count may be too small by 64.
    read(&shared, 0, 2 * (80 + 64) - (cost - 1));
    assert!(shared.promote_one().unwrap());
    assert_eq!(hot(&shared), before);
    // The next attempt has to be justified again.
    assert!(!shared.promote_one().unwrap());
    read(&shared, 0, cost);
    read(&shared, before[2], 1);
    assert!(shared.promote_one().unwrap());
    let after = hot(&shared);
    assert_eq!(after, [&[0][..], &before[1..]].concat(), "the oldest of those that are read least");
    assert_eq!(promoted(&shared), 1);
    assert!(shared.pool.memory_bytes() <= 8 * MIB);
}

#[test]
fn memory_that_a_reader_holds_is_not_reused_and_the_budget_holds() {
    let (shared, _writers) = warm();
    let before = hot(&shared);
    let held: Vec<_> =
        shared.journals.all().iter().filter_map(|journal| journal.arena.clone()).collect();
    read(&shared, 0, 200);
    assert!(shared.promote_one().unwrap());
    // Its memory was not released, so nothing replaced it.
    assert_eq!(hot(&shared), before[1..]);
    assert!(shared.pool.memory_bytes() <= 8 * MIB);
    drop(held);
    read(&shared, 0, 200);
    assert!(shared.promote_one().unwrap());
    assert_eq!(hot(&shared), [&[0][..], &before[1..]].concat());
    assert!(shared.pool.memory_bytes() <= 8 * MIB);
}

/// Loading journals reads no more from the disk than the reads that caused it, in any order of
/// reads. If all journals are read equally often, none is exchanged.
#[test]
fn promotion_does_not_thrash() {
    let (shared, _writers) = warm();
    let cost = shared.promotion_reads();
    let sealed = shared.journals.len() as u64 - 1;
    let mut random = Random::new(4);
    let mut cold_reads = 0;
    for _ in 0..20_000 {
        let number = random.below(sealed);
        cold_reads += u64::from(!hot(&shared).contains(&number));
        read(&shared, number, 1);
        while shared.promote_one().unwrap() {}
        assert!(shared.pool.memory_bytes() <= 8 * MIB);
    }
    let count = promoted(&shared);
    assert!(count * cost * 4 <= cold_reads, "{count} promotions, {cold_reads} cold reads");
    // The journals read from now on are soon in memory, whatever was read before.
    for _ in 0..4000 {
        read(&shared, random.below(5), 1);
        while shared.promote_one().unwrap() {}
    }
    assert_eq!(hot(&shared), [0, 1, 2, 3, 4]);
}

/// One in 16 reads from memory is counted, as 16: sampling errors are no reason to demote a
/// journal.
#[test]
fn journals_with_even_reads_stay_in_memory() {
    let (shared, _writers) = warm();
    let sealed = shared.journals.len() as u64 - 1;
    let mut random = Random::new(5);
    for _ in 0..40_000 {
        let number = random.below(sealed);
        match hot(&shared).contains(&number) {
            true if random.below(16) == 0 => read(&shared, number, 16),
            true => {}
            false => read(&shared, number, 1),
        }
        while shared.promote_one().unwrap() {}
    }
    let count = promoted(&shared);
    assert!(count < 40, "{count} promotions");
}

/// Short-lived threads with a single read count as much as a long-lived one.
#[test]
fn reads_of_short_threads_are_counted() {
    let cache = open(&SimDirectory::default(), &options());
    cache.put(b"key", b"value").unwrap();
    for _ in 0..640 {
        thread::scope(|scope| {
            scope.spawn(|| assert!(cache.contains(b"key").unwrap()));
        });
    }
    let reads = cache.shared.active.load().counts.reads.load(Ordering::Relaxed);
    assert!((160..2560).contains(&reads), "{reads}");
}

#[test]
fn reads_promote_a_journal() {
    for compression in [Compression::None, Compression::Lz4] {
        let (directory, map) = filled(12_000);
        let options = compressing(compression);
        compress_all(&directory, &options);
        let cache = open(&directory, &options);
        let first: Vec<_> = (0..200u64).map(|key| key.to_le_bytes().to_vec()).collect();
        while cache.stats().promoted == 0 {
            for key in &first {
                assert_eq!(cache.get(key).unwrap().as_deref(), Some(&map[key][..]));
            }
        }
        let stats = wait_until_idle(&cache);
        assert!(stats.memory_bytes <= options.memory_bytes, "{stats:?}");
        for (key, value) in &map {
            assert_eq!(cache.get(key).unwrap().as_deref(), Some(&value[..]));
        }
    }
}

/// Writers have all the memory: journals are still reclaimed, in pieces, and within the memory
/// budget.
#[test]
fn reclaiming_space_respects_the_memory_budget() {
    for compression in [Compression::None, Compression::Lz4] {
        let (directory, _) = filled(12_000);
        compress_all(&directory, &compressing(compression));
        directory.corrupt("000000000001.journal", 4096 + 3000);
        let shared = still(&directory, &plain());
        let writers: Vec<_> = std::iter::from_fn(|| shared.pool.take()).collect();
        assert_eq!(writers.len(), 3, "the newest journal has one");
        let sealed = shared.journals.len() - 1;
        assert!(sealed >= 6, "{sealed}");
        for journal in shared.journals.all().iter().skip(2).take(sealed - 2) {
            let scan = shared.scan_live(journal, Duration::ZERO).unwrap();
            assert!(!scan.has_dead && !scan.is_damaged, "{compression}, {}", journal.number);
        }
        for left in (1..=sealed).rev() {
            assert!(shared.evict_oldest().unwrap());
            assert_eq!(shared.journals.len(), left);
        }
        assert!(!shared.evict_oldest().unwrap());
        assert_eq!(Stats::of(&shared).entries, 0);
        assert_eq!(shared.pool.most_bytes(), 4 * MIB);
    }
}

/// Many small reads let others in between; few large ones finish sooner.
#[test]
fn reclaiming_space_reads_larger_pieces_under_pressure() {
    let (directory, _) = filled(12_000);
    let crowded = directory.killed();
    let shared = still(&directory, &plain());
    let reads_of = |directory: &SimDirectory, work: &dyn Fn()| {
        let before = directory.reads();
        work();
        directory.reads() - before
    };
    let scan = |shared: &Shared| {
        // A complete one.
        let journal = shared.journals.all().swap_remove(1);
        assert!(!shared.scan_live(&journal, Duration::ZERO).unwrap().is_damaged);
    };
    let reads = reads_of(&directory, &|| scan(&shared));
    assert!(reads as usize >= MIB / STEP_BYTES - 1, "{reads}");
    let reads = reads_of(&directory, &|| assert!(shared.evict_oldest().unwrap()));
    assert!(reads <= 2, "{reads}");

    let shared = still(&crowded, &Options { max_disk_bytes: 8 << 20, ..plain() });
    assert!(shared.is_crowded());
    let reads = reads_of(&crowded, &|| scan(&shared));
    assert!(reads <= 2, "{reads}");
}

/// Without memory nothing after the damage can be located, perhaps for long; others can be
/// compressed.
#[test]
fn a_damaged_journal_does_not_prevent_compression_of_others() {
    let (directory, _) = filled(6000);
    directory.corrupt("000000000001.journal", 4096 + 3000);
    let shared = still(&directory, &compressing(Compression::Lz4));
    let _writers: Vec<_> = std::iter::from_fn(|| shared.pool.take()).collect();
    let mut errors = Vec::new();
    loop {
        match shared.compress_one() {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => errors.push(error),
        }
        assert!(errors.len() < 2, "again and again: {errors:?}");
    }
    assert!(matches!(errors[..], [Error::NoMemory { .. }]), "{errors:?}");
    assert!(Stats::of(&shared).compressed >= 2);
}

/// Records after the damage are found as long as there is memory for it.
#[test]
fn records_behind_damage_are_found() {
    let (directory, map) = filled(6000);
    compress_all(&directory, &compressing(Compression::Lz4));
    directory.corrupt("000000000001.journal", 4096 + 3000);
    let shared = still(&directory, &plain());
    let all = shared.journals.all();
    let mut keys = Vec::new();
    let step_bytes = || PAGE_BYTES;
    let damaged_bytes = shared.each_record(&all[1], step_bytes, |_, record| {
        keys.push(record.key().to_vec());
        Ok::<_, Error>(())
    });
    let damaged_bytes = damaged_bytes.unwrap();
    assert!((1..100_000).contains(&damaged_bytes), "{damaged_bytes}");
    let lost = map.keys().filter(|key| {
        let position = shared.index.find(shared.hasher.hash(key)).unwrap();
        position.is_in(all[1].number) && all[1].load(position).is_err()
    });
    let in_it = map.keys().filter(|key| {
        let position = shared.index.find(shared.hasher.hash(key)).unwrap();
        position.is_in(all[1].number)
    });
    assert_eq!(keys.len(), in_it.count() - lost.count());
    assert!(shared.pool.most_bytes() <= 4 * MIB);
}

/// Temporary errors do not keep a journal cold, or uncompacted, permanently.
#[test]
fn a_journal_that_could_not_be_read_is_retried() {
    let (directory, _) = filled(20_000);
    let shared = still(&directory, &Options { memory_bytes: 9 * MIB, ..plain() });
    let newest_sealed = shared.active.load().number.0 - 1;
    directory.fail_reads(1);
    assert!(matches!(shared.load_one(), Err(Error::Io { .. })));
    while shared.load_one().unwrap() {}
    let all = shared.journals.all();
    let failed = all.iter().find(|journal| journal.number.0 == newest_sealed).unwrap();
    assert!(failed.arena.is_none() && !failed.counts.is_damaged.load(Ordering::Relaxed));
    assert_eq!(hot(&shared), (newest_sealed - 5..newest_sealed).collect::<Vec<_>>());
    // Some time later.
    *failed.counts.failed_at.lock() = None;
    let coldest = shared.coldest_in_memory().unwrap();
    shared.demote(&coldest);
    drop((all, coldest));
    assert!(shared.load_one().unwrap());
    assert!(hot(&shared).contains(&newest_sealed));
    assert_eq!(Stats::of(&shared).damaged_bytes, 0);
}

/// Only its hint is left: everything in it is damaged, and reported as damaged.
#[test]
fn a_compressed_journal_without_header_and_footer_is_damaged() {
    let (directory, map) = filled(6000);
    compress_all(&directory, &compressing(Compression::Lz4));
    let name = "000000000001.journal";
    let len = directory.open(name).unwrap().len_bytes().unwrap() as usize;
    directory.corrupt(name, 5);
    directory.corrupt(name, len - 10);
    let cache = open(&directory, &plain());
    assert!(cache.recovered().damaged_bytes > MIB as u64 / 2, "{:?}", cache.recovered());
    assert_eq!(cache.stats().damaged_bytes, cache.recovered().damaged_bytes);
    let damaged = map.keys().filter(|key| matches!(cache.get(key), Err(Error::Corrupt { .. })));
    assert_eq!(contents(&cache).len() + damaged.count(), map.len());
}
