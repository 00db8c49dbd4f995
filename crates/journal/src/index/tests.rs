//! The index compared with a map, and its readers concurrent with its writers.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;

use alluvium_device::sim::Random;

use super::*;
use crate::position::{Granule, JournalNumber};

/// Few shards and few buckets, so that probe sequences overlap.
fn hash(key: u64) -> KeyHash {
    let mut random = Random::new(key);
    KeyHash { high: random.next_u64() & 0x0400_0000_0000_00ff, fingerprint: random.next_u64() }
}

fn position(version: u64, hash: KeyHash) -> Position {
    Position::new(
        JournalNumber(version >> 20),
        Granule(512 + (version & 0xf_ffff) as u32),
        64,
        false,
        hash,
    )
}

#[test]
fn the_index_agrees_with_a_map() {
    for seed in 0..20 {
        let mut random = Random::new(seed);
        let index = Index::with_capacity(0).unwrap();
        let mut map = HashMap::new();
        let keys = 1 + random.below(5000);
        for version in 0..20_000 {
            let key = random.below(keys);
            let hash = hash(key);
            let mut writer = index.lock(hash);
            if random.chance(0.4) {
                assert_eq!(writer.remove(), map.remove(&key), "seed {seed}");
            } else {
                let position = position(version, hash);
                writer.reserve_slot().unwrap();
                assert_eq!(writer.set(position), map.insert(key, position), "seed {seed}");
            }
        }
        assert_eq!(index.len(), map.len(), "seed {seed}");
        for key in 0..keys {
            assert_eq!(index.find(hash(key)), map.get(&key).copied(), "seed {seed}, key {key}");
        }
        let mut seen = 0;
        index.retain(|position| {
            seen += 1;
            position.first().0.is_multiple_of(2)
        });
        assert_eq!(seen, map.len());
        map.retain(|_, position| position.first().0.is_multiple_of(2));
        for key in 0..keys {
            assert_eq!(index.find(hash(key)), map.get(&key).copied(), "seed {seed}, key {key}");
        }
    }
}

#[test]
fn a_table_with_a_stable_number_of_keys_does_not_grow() {
    let index = Index::with_capacity(1000).unwrap();
    let bytes = index.memory_bytes();
    for version in 0..200_000 {
        let (new, old) = (hash(version), version.checked_sub(50).map(hash));
        let mut writer = index.lock(new);
        writer.reserve_slot().unwrap();
        writer.set(position(version, new));
        drop(writer);
        if let Some(old) = old {
            assert!(index.lock(old).remove().is_some());
        }
    }
    assert_eq!((index.len(), index.memory_bytes()), (50, bytes));
}

/// Writers continue in a crowded table until it is full; the grower replaces it before that if it
/// is in time.
#[test]
fn a_crowded_table_is_replaced_once_by_the_grower_or_a_writer() {
    let of_one_shard = |key: u64| KeyHash { high: 0, ..hash(key) };
    for comes_late in [false, true] {
        let index = Index::with_capacity(0).unwrap();
        let (small, bytes) = (index.shards[0].table.load().slots(), index.memory_bytes());
        let insert = |key: u64| {
            let mut writer = index.lock(of_one_shard(key));
            writer.reserve_slot().unwrap();
            assert_eq!(writer.set(position(key, of_one_shard(key))), None);
        };
        let (crowded, most) =
            (crowded_slots(FIRST_BUCKETS_LOG2) as u64, max_slots(FIRST_BUCKETS_LOG2) as u64);
        (0..crowded).for_each(insert);
        assert!(!index.grow_crowded(), "no table is crowded");
        let keys = if comes_late { most + 1 } else { crowded + 1 };
        (crowded..keys).for_each(insert);
        let is_grown = |index: &Index| index.shards[0].table.load().slots() == 2 * small;
        assert_eq!(is_grown(&index), comes_late);
        assert!(index.grow_crowded());
        assert!(is_grown(&index) && !index.grow_crowded());
        assert_eq!(index.memory_bytes(), bytes / 64 * 65);
        for key in 0..keys {
            let hash = of_one_shard(key);
            assert_eq!(index.find(hash), Some(position(key, hash)));
        }
    }
}

/// Keys are removed while the grower creates a table, which is then not needed; it is requested
/// again when keys come back.
#[test]
fn a_table_that_was_created_in_vain_is_requested_again() {
    let of_one_shard = |key: u64| KeyHash { high: 0, ..hash(key) };
    let index = Index::with_capacity(0).unwrap();
    let small = index.shards[0].table.load().slots();
    let insert = |key: u64| {
        let mut writer = index.lock(of_one_shard(key));
        writer.reserve_slot().unwrap();
        writer.set(position(key, of_one_shard(key)));
    };
    let crowded = crowded_slots(FIRST_BUCKETS_LOG2) as u64 + 1;
    (0..crowded).for_each(insert);
    assert_eq!(index.grower.next(), Some(0));
    let made = Table::new(index.required_size(0).unwrap()).unwrap();
    for key in 0..crowded {
        assert!(index.lock(of_one_shard(key)).remove().is_some());
    }
    index.replace(0, made);
    assert_eq!(index.shards[0].table.load().slots(), small, "it is not crowded any more");
    (0..crowded).for_each(insert);
    assert!(index.grow_crowded(), "it is crowded again");
}

#[test]
fn the_newest_record_is_recovered_in_any_order() {
    let hash = hash(1);
    let [old, middle, new] = [5, 1 << 20, (1 << 20) + 1].map(|version| position(version, hash));
    let orders = [[old, middle, new], [new, old, middle], [middle, new, old], [new, middle, old]];
    for order in orders {
        let index = Index::with_capacity(0).unwrap();
        for position in order {
            index.recover(hash, position).unwrap();
        }
        assert_eq!(index.find(hash), Some(new));
    }
}

#[test]
fn the_newest_record_is_recovered_where_the_numbers_wrap() {
    let hash = hash(1);
    let in_journal = |number| Position::new(JournalNumber(number), Granule(600), 64, false, hash);
    let wrap = 1 << crate::position::NUMBER_BITS;
    let [old, middle, new] = [wrap - 1, wrap, wrap + 1].map(in_journal);
    for order in [[old, middle, new], [new, old, middle], [middle, new, old], [new, middle, old]] {
        let index = Index::with_capacity(0).unwrap();
        for position in order {
            index.recover(hash, position).unwrap();
        }
        assert_eq!(index.find(hash), Some(new));
    }
}

/// Of 128 bits of a key's hash 78 are used: shard, tag and fingerprint. Keys that differ in one of
/// them have separate entries.
#[test]
fn keys_with_the_same_fingerprint_differ_by_shard_and_tag() {
    let mut random = Random::new(1);
    let index = Index::with_capacity(0).unwrap();
    let mut map = HashMap::new();
    // All of a shard in one bucket, in more slots than it has.
    let hash = |random: &mut Random| KeyHash {
        high: (random.below(2) << 63) + random.below(16),
        fingerprint: 1 + random.below(2),
    };
    let of = |hash: KeyHash| (hash.high, hash.fingerprint);
    for version in 0..20_000 {
        let hash = hash(&mut random);
        let mut writer = index.lock(hash);
        assert_eq!(writer.get(), map.get(&of(hash)).copied());
        if random.chance(0.4) {
            assert_eq!(writer.remove(), map.remove(&of(hash)));
        } else {
            writer.reserve_slot().unwrap();
            let position = position(version, hash);
            assert_eq!(writer.set(position), map.insert(of(hash), position));
        }
        drop(writer);
        let other = KeyHash { high: hash.high ^ random.below(16), ..hash };
        assert_eq!(index.find(other), map.get(&of(other)).copied());
    }
    assert!(index.len() == map.len() && map.len() > 20);
}

#[test]
fn the_read_mark_is_set_only_on_the_record_that_was_read() {
    let index = Index::with_capacity(0).unwrap();
    let hash = hash(1);
    let (old, new) = (position(1, hash), position(2, hash));
    index.lock(hash).set(old);
    index.mark_read(hash, old);
    assert_eq!(index.find(hash), Some(old.marked_read()));
    assert_eq!(index.lock(hash).set(new), Some(old.marked_read()));
    index.mark_read(hash, old);
    assert_eq!(index.find(hash), Some(new), "the one that was read is gone");
    index.lock(hash).remove();
    index.mark_read(hash, new);
    assert_eq!(index.find(hash), None);
}

/// Keys are added, removed and moved while their table is replaced. A reader finds what belongs to
/// a key, and always finds the key that is present throughout.
#[test]
fn readers_find_present_keys_while_others_write() {
    let index = Arc::new(Index::with_capacity(0).unwrap());
    let stays = hash(u64::MAX);
    index.lock(stays).set(position(0, stays));
    let is_done = Arc::new(AtomicBool::new(false));
    let grower = {
        let (index, is_done) = (index.clone(), is_done.clone());
        thread::spawn(move || {
            while !is_done.load(Ordering::Relaxed) {
                index.grow_crowded();
            }
        })
    };
    let readers: Vec<_> = (0..2)
        .map(|seed| {
            let (index, is_done) = (index.clone(), is_done.clone());
            thread::spawn(move || {
                let mut random = Random::new(seed);
                while !is_done.load(Ordering::Relaxed) {
                    assert!(index.find(stays).is_some());
                    let key = random.below(3000);
                    if let Some(found) = index.find(hash(key)) {
                        assert_eq!(u64::from(found.first().0 - 512) % 3000, key);
                        index.mark_read(hash(key), found);
                    }
                }
            })
        })
        .collect();
    let mut random = Random::new(7);
    for round in 0..100_000u64 {
        let key = random.below(3000);
        let hash = hash(key);
        let mut writer = index.lock(hash);
        if round.is_multiple_of(3) {
            writer.remove();
        } else {
            writer.reserve_slot().unwrap();
            writer.set(position(round % 300 * 3000 + key, hash));
        }
    }
    is_done.store(true, Ordering::Relaxed);
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    grower.join().unwrap();
}
