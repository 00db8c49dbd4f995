//! Iterations over journals that are not in memory.

use std::collections::BTreeSet;

use super::cold::{compress_all, still, text};
use super::removing::{compact, without_maintenance_thread};
use super::*;
use crate::iter::{Entry, Iter};

/// Journals of several MiB.
fn large(compression: Compression) -> Options {
    Options {
        journal_bytes: 8 * MIB,
        memory_bytes: 32 * MIB,
        max_disk_bytes: 128 << 20,
        compression,
        ..options()
    }
}

/// Some are longer than a piece, and most cross the end of a piece sooner or later.
fn long(key: u64) -> Vec<u8> {
    let least_bytes = match key % 20 {
        0 => 3 * MIB / 2,
        1..8 => 50_000,
        _ => 1,
    };
    let text = text(key);
    text.repeat(least_bytes.div_ceil(text.len()))
}

/// At least two sealed journals.
fn filled(compression: Compression) -> (SimDirectory, BTreeMap<Vec<u8>, Vec<u8>>) {
    let directory = SimDirectory::default();
    let cache = open(&directory, &large(Compression::None));
    let mut map = BTreeMap::new();
    for key in 0..240u64 {
        cache.put(&key.to_le_bytes(), &long(key)).unwrap();
        map.insert(key.to_le_bytes().to_vec(), long(key));
    }
    cache.close().unwrap();
    if compression != Compression::None {
        assert!(compress_all(&directory, &large(compression)).compressed >= 2);
    }
    (directory, map)
}

fn map_of(entries: &[Entry]) -> BTreeMap<Vec<u8>, Vec<u8>> {
    entries.iter().map(|entry| (entry.key().to_vec(), entry.value().to_vec())).collect()
}

/// Writers have all of the budget, and returned entries stay valid while the iteration continues.
#[test]
fn cold_journals_are_iterated_in_pieces() {
    for compression in [Compression::None, Compression::Lz4] {
        let (directory, map) = filled(compression);
        let shared = still(&directory, &large(compression));
        let _writers: Vec<_> = std::iter::from_fn(|| shared.pool.take()).collect();
        let entries: Vec<_> = Iter::new(&shared).collect::<Result<_, _>>().unwrap();
        assert_eq!(entries.len(), map.len(), "{compression}");
        assert!(map_of(&entries) == map, "{compression}");
        assert_eq!(shared.pool.most_bytes(), 32 * MIB, "{compression}");
    }
}

/// Each journal is found by its number: searching all journals for the next one would take
/// quadratic time.
#[test]
fn an_iteration_lists_journals_once_and_new_ones_at_its_end() {
    const JOURNALS: u64 = 20;
    let directory = SimDirectory::default();
    for key in 0..JOURNALS {
        without_maintenance_thread(&directory, &options(), |shared| {
            shared.put(&key.to_le_bytes(), b"value", None).unwrap();
        });
    }
    without_maintenance_thread(&directory, &options(), |shared| {
        assert_eq!(shared.journals.len() as u64, JOURNALS + 1);
        let key_of = |entry: Result<Entry, Error>| {
            u64::from_le_bytes(entry.unwrap().key().try_into().unwrap())
        };
        let listings = || shared.journals.listings.load(Ordering::Relaxed);
        let before = listings();
        let mut entries = Iter::new(shared).map(key_of);
        assert_eq!(entries.next(), Some(0));
        // A journal not yet visited is removed, and one is added at the end.
        compact(shared, 4).unwrap();
        let newest = shared.active.load().number;
        while shared.active.load().number == newest {
            shared.put(&(JOURNALS + 1).to_le_bytes(), &[1; 100_000], None).unwrap();
        }
        let found: BTreeSet<_> = entries.collect();
        let expected: BTreeSet<_> = (1..JOURNALS).chain([JOURNALS + 1]).collect();
        assert_eq!(found, expected);
        // At the beginning, and at the end of the journals known then; creating journals lists some
        // too.
        let listings = listings() - before;
        assert!(listings < JOURNALS as usize / 2, "{listings}");
    });
}

/// The damage is in the first record, which is longer than a piece.
#[test]
fn an_iteration_finds_records_behind_damage_on_disk() {
    for compression in [Compression::None, Compression::Lz4] {
        let (directory, map) = filled(compression);
        directory.corrupt("000000000000.journal", 4096 + 3000);
        let shared = still(&directory, &large(compression));
        let entries: Vec<_> = Iter::new(&shared).collect::<Result<_, _>>().unwrap();
        let mut undamaged = map.clone();
        undamaged.remove(&0u64.to_le_bytes()[..]);
        assert!(map_of(&entries) == undamaged, "{compression}");
    }
}

/// An unreadable journal is reported, and the others are iterated.
#[test]
fn an_iteration_continues_after_an_unreadable_journal() {
    let (directory, map) = filled(Compression::None);
    let shared = still(&directory, &large(Compression::None));
    directory.fail_reads(1);
    let (found, failed): (Vec<_>, Vec<_>) = Iter::new(&shared).partition(Result::is_ok);
    assert!(matches!(failed[..], [Err(Error::Io { .. })]), "{failed:?}");
    let entries: Vec<_> = found.into_iter().map(Result::unwrap).collect();
    let found = map_of(&entries);
    assert!(found.len() > map.len() / 3 && found.len() < map.len(), "{}", found.len());
    assert!(found.iter().all(|(key, value)| map[key] == *value));
}
