//! Operations on several keys, most of them on disk.

use std::path::Path;

use alluvium_device::AlignedBuf;

use super::*;
use crate::ScanCursor;
use crate::fetch::Batch;
use crate::files::RealDirectory;
use crate::journal::FIRST_RECORD;
use crate::position::Position;
use crate::shared::Shared;

const KEYS: u64 = 4000;
const KINDS: [Compression; 2] = [Compression::None, Compression::Lz4];

type Opening<'a> = &'a dyn Fn() -> Box<dyn Directory>;

/// Distinct compressible values made of words; some span several frames.
fn text(key: u64) -> Vec<u8> {
    let mut random = Random::new(key);
    let words = if key.is_multiple_of(60) { 12_000 } else { 1 + random.index(200) };
    (0..words).flat_map(|_| format!("word{} ", random.below(300)).into_bytes()).collect()
}

fn compressing(compression: Compression) -> Options {
    Options { compression, ..options() }
}

/// Opens a cache without its threads: nothing happens except by calls.
fn still(directory: Box<dyn Directory>, options: &Options) -> Shared {
    crate::open::open(directory, options.clone()).unwrap().0
}

/// Creates more journals than there is memory for, compressed if requested.
fn fill(directory: Opening<'_>, compression: Compression) -> BTreeMap<u64, Vec<u8>> {
    let cache = Cache::open_in(directory(), options()).unwrap();
    let map: BTreeMap<_, _> = (0..KEYS).map(|key| (key, text(key))).collect();
    for (key, value) in &map {
        cache.put(&key.to_le_bytes(), value).unwrap();
    }
    cache.close().unwrap();
    let shared = still(directory(), &compressing(compression));
    while shared.compress_one().unwrap() {}
    assert_eq!(Stats::of(&shared).compressed > 5, compression != Compression::None);
    map
}

fn filled(compression: Compression) -> (SimDirectory, BTreeMap<u64, Vec<u8>>) {
    let directory = SimDirectory::default();
    let map = fill(&|| -> Box<dyn Directory> { Box::new(directory.clone()) }, compression);
    (directory, map)
}

type Found = Result<Option<Vec<u8>>, Error>;

fn get_many(cache: &Cache, keys: &[u64]) -> Vec<Found> {
    let names: Vec<_> = keys.iter().map(|key| key.to_le_bytes()).collect();
    let found = cache.get_many(&names).into_iter();
    found.map(|found| Ok(found?.map(|value| value.to_vec()))).collect()
}

fn assert_matches_map(cache: &Cache, map: &BTreeMap<u64, Vec<u8>>, keys: &[u64]) {
    let found = get_many(cache, keys);
    assert_eq!(found.len(), keys.len());
    for (key, found) in keys.iter().zip(found) {
        assert!(found.unwrap().as_ref() == map.get(key), "key {key}");
    }
}

/// Checks keys of all journals, absent ones, neighbours in a page or a frame, and some of all these
/// twice: in memory, in journals that have left it, and on disk.
fn check(directory: Opening<'_>, compression: Compression) {
    let mut map = fill(directory, compression);
    // Without cached frames, and with.
    for memory_bytes in [4 * MIB, 6 * MIB] {
        let options = Options { memory_bytes, ..compressing(compression) };
        let cache = Cache::open_in(directory(), options).unwrap();
        for key in (0..KEYS).step_by(97) {
            cache.put(&key.to_le_bytes(), b"new").unwrap();
            map.insert(key, b"new".to_vec());
        }
        let mut random = Random::new(1);
        for _ in 0..20 {
            let mut keys: Vec<_> =
                (0..random.index(150)).map(|_| random.below(KEYS + 500)).collect();
            let first = random.below(KEYS);
            keys.extend(first..first + 40);
            keys.extend_from_within(..random.index(keys.len()));
            assert_matches_map(&cache, &map, &keys);
        }
        assert_matches_map(&cache, &map, &[]);
        let all: Vec<_> = map.keys().copied().collect();
        assert_matches_map(&cache, &map, &all);
        cache.close().unwrap();
    }
}

#[test]
fn get_many_finds_values_at_every_level() {
    for compression in KINDS {
        let directory = SimDirectory::default();
        check(&|| -> Box<dyn Directory> { Box::new(directory.clone()) }, compression);
        for has_rings in [true, false] {
            let temporary = tempfile::tempdir().unwrap();
            let open = || -> Box<dyn Directory> {
                let directory = RealDirectory::open(temporary.path(), true).unwrap().unwrap();
                Box::new(if has_rings { directory } else { directory.without_rings() })
            };
            check(&open, compression);
        }
    }
}

fn position_of(shared: &Shared, key: u64) -> Position {
    shared.index.find(shared.hasher.hash(&key.to_le_bytes())).unwrap()
}

/// Returns the number of counted disk reads.
fn reads(shared: &Shared) -> u64 {
    let all = shared.journals.all();
    all.iter().map(|journal| journal.counts.disk_reads.load(Ordering::Relaxed)).sum()
}

/// Adds as many of these keys to a batch as fit.
fn add(shared: &Shared, batch: &mut Batch, keys: &[u64]) -> usize {
    let fits = |key: &&u64| {
        let position = position_of(shared, **key);
        batch.add(&shared.journals.of(position).unwrap(), position)
    };
    keys.iter().take_while(fits).count()
}

#[test]
fn a_batch_reads_everything_that_its_records_need() {
    for compression in KINDS {
        let (directory, map) = filled(compression);
        let shared = still(Box::new(directory.clone()), &compressing(compression));
        let mut random = Random::new(2);
        let mut keys: Vec<_> = (0..1000).map(|_| random.below(KEYS)).collect();
        while !keys.is_empty() {
            let mut batch = Batch::default();
            let count = add(&shared, &mut batch, &keys);
            assert!(count > 0);
            let fetched = batch.read(&directory);
            let before = reads(&shared);
            directory.fail_reads(u64::MAX);
            for key in keys.drain(..count) {
                let position = position_of(&shared, key);
                let journal = shared.journals.of(position).unwrap();
                let loaded = journal.load_with(position, &fetched).unwrap();
                assert!(loaded.bytes().ends_with(&map[&key]), "key {key}");
            }
            directory.fail_reads(0);
            assert_eq!(reads(&shared), before);
        }
    }
}

#[test]
fn overlapping_pages_are_read_once() {
    for compression in KINDS {
        let (directory, _) = filled(compression);
        let shared = still(Box::new(directory.clone()), &compressing(compression));
        let mut batch = Batch::default();
        // Small neighbours: in one frame, or on both sides of a border.
        let neighbours: Vec<_> = (101..109).collect();
        assert_eq!(add(&shared, &mut batch, &neighbours), neighbours.len());
        let count = reads(&shared);
        assert!(count >= 1);
        if compression != Compression::None {
            assert!(count <= 3, "{count}");
        }
        assert_eq!(add(&shared, &mut batch, &neighbours), neighbours.len());
        assert_eq!(reads(&shared), count, "{compression}");
        assert_eq!(batch.read(&directory).len() as u64, count);
    }
}

#[test]
fn a_damaged_record_fails_only_reads_of_its_key() {
    for compression in KINDS {
        let (directory, map) = filled(compression);
        directory.corrupt("000000000002.journal", 4096 + 3000);
        let cache = open(&directory, &options());
        let is_sound = |key: &u64| cache.get(&key.to_le_bytes()).is_ok();
        let (sound, damaged): (Vec<u64>, Vec<u64>) = (0..KEYS).partition(is_sound);
        assert!((1..500).contains(&damaged.len()), "{}", damaged.len());
        assert_matches_map(&cache, &map, &sound);
        // In one call with sound ones, including some of its own frame or pages.
        let mut keys = sound[..100].to_vec();
        keys[50] = damaged[0];
        keys.extend([damaged[0] - 1, damaged[damaged.len() - 1] + 1, KEYS]);
        for (key, found) in keys.iter().zip(get_many(&cache, &keys)) {
            match found {
                Err(error @ Error::Corrupt { .. }) if damaged.contains(key) => {
                    let message = error.to_string();
                    assert!(message.starts_with("000000000002.journal, byte "), "{message}");
                }
                Ok(found) if !damaged.contains(key) => {
                    assert!(found.as_ref() == map.get(key), "key {key}");
                }
                found => panic!("key {key}: {found:?}"),
            }
        }
    }
}

#[test]
fn failed_reads_are_reported_and_retried_by_later_calls() {
    for compression in KINDS {
        let (directory, map) = filled(compression);
        let cache = open(&directory, &options());
        // In the oldest journal.
        let keys: Vec<_> = (100..150).collect();
        directory.fail_reads(u64::MAX);
        for found in get_many(&cache, &keys) {
            assert!(matches!(found, Err(Error::Io { .. })), "{compression}: {found:?}");
        }
        directory.fail_reads(1);
        assert_matches_map(&cache, &map, &keys);
    }
}

/// Errors name the file for every cache of the process and every kind of read.
#[test]
fn an_error_of_a_read_names_the_file() {
    for compression in KINDS {
        let directory = SimDirectory::at(Path::new("/caches/one"));
        fill(&|| -> Box<dyn Directory> { Box::new(directory.clone()) }, compression);
        let shared = still(Box::new(directory.clone()), &compressing(compression));
        let oldest = shared.journals.all()[0].clone();
        let position = position_of(&shared, 100);
        assert!(position.is_in(oldest.number));
        directory.fail_reads(u64::MAX);
        let mut memory = AlignedBuf::zeroed(MIB);
        let read = [
            oldest.load(position).map(drop),
            oldest.read_whole(oldest.end(), &mut memory),
            oldest.read_piece(FIRST_RECORD, oldest.end(), &mut memory).map(drop),
        ];
        for read in read {
            let Err(Error::Io { path, .. }) = &read else { panic!("{read:?}") };
            assert_eq!(path, Path::new("/caches/one/000000000000.journal"), "{compression}");
        }
        // Of any journal.
        let scanned = shared.scan(ScanCursor::default(), usize::MAX, |_| true);
        let Err(Error::Io { path, .. }) = &scanned else { panic!("{scanned:?}") };
        assert!(path.starts_with("/caches/one") && path.extension().is_some(), "{path:?}");
    }
}

/// Between the reads and the lookups some keys are replaced, and their journal is removed along
/// with all others that can be compacted.
#[test]
fn records_replaced_or_moved_meanwhile_are_found() {
    for compression in KINDS {
        let (directory, mut map) = filled(compression);
        let cache = Arc::new(open(&directory, &options()));
        let keys: Vec<_> = (100..150).collect();
        // So many that moving the others takes less space than their journal, compressed or not.
        let replaced =
            || (0..400u64).filter(|key| !(100..150).contains(key) || key.is_multiple_of(3));
        map.extend(replaced().map(|key| (key, b"new".to_vec())));
        let oldest = |cache: &Cache| cache.shared.journals.all()[0].number;
        let (other, before) = (cache.clone(), oldest(&cache));
        directory.after_reads(move || {
            for key in replaced() {
                other.put(&key.to_le_bytes(), b"new").unwrap();
            }
            // By this call, or by the maintenance thread before.
            other.compact(|_| {}).unwrap();
            assert!(oldest(&other) > before);
        });
        assert_matches_map(&cache, &map, &keys);
        assert_eq!(Arc::strong_count(&cache), 1, "nothing was read");
        let all: Vec<_> = map.keys().copied().collect();
        assert_matches_map(&cache, &map, &all);
    }
}

/// Only the disk shows whether a record with a time to live has expired. Between the reads and the
/// lookups an expired one is rewritten, and from then on nothing can be read.
#[test]
fn several_keys_are_deleted_with_one_batch_of_reads() {
    for compression in KINDS {
        let directory = SimDirectory::default();
        let cache = open(&directory, &options());
        for key in 0..KEYS {
            let (name, value) = (key.to_le_bytes(), text(key));
            let written = match key % 3 {
                0 => cache.put(&name, &value),
                1 => cache.put_with_ttl(&name, &value, Duration::ZERO),
                _ => cache.put_with_ttl(&name, &value, Duration::from_secs(3600)),
            };
            written.unwrap();
        }
        cache.close().unwrap();
        let shared = still(Box::new(directory.clone()), &compressing(compression));
        while shared.compress_one().unwrap() {}
        drop(shared);

        let cache = Arc::new(open(&directory, &options()));
        let delete = |keys: &[u64]| {
            let names: Vec<_> = keys.iter().map(|key| key.to_le_bytes()).collect();
            cache.delete_many(&names).unwrap()
        };
        // In the oldest journal. The index knows that these are present; one comes twice.
        let mut lasting: Vec<u64> = (0..90).step_by(3).collect();
        lasting.push(0);
        assert_eq!(delete(&lasting), 30, "{compression}");
        assert_eq!(reads(&cache.shared), 0, "{compression}");
        let (other, disk) = (cache.clone(), directory.clone());
        directory.after_reads(move || {
            other.put(&100u64.to_le_bytes(), b"new").unwrap();
            disk.fail_reads(u64::MAX);
        });
        let mut keys: Vec<_> = (100..130).collect();
        keys.push(KEYS + 1);
        // Ten have expired, except for the new one. One that could not be read would count as
        // present.
        assert_eq!(delete(&keys), 21, "{compression}");
        assert_eq!(Arc::strong_count(&cache), 1, "nothing was read");
        directory.fail_reads(0);
        for key in lasting.into_iter().chain(keys) {
            assert!(!cache.contains(&key.to_le_bytes()).unwrap(), "{compression}: {key}");
        }
        assert_eq!(delete(&[]), 0);
        assert!(matches!(cache.delete_many(&[b""]), Err(Error::KeyEmpty)));
    }
}
