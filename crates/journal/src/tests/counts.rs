//! The counts that an opening makes for each journal, compared with the index.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use alluvium_device::PAGE_BYTES;

use super::*;
use crate::record::Kind;
use crate::shared::Shared;

/// Writes journals with records of which some were replaced and some deleted, with too many live
/// ones for a compaction.
fn written(directory: &SimDirectory, seed: u64) {
    let mut random = Random::new(seed);
    let cache = open(directory, &options());
    for step in 0..40_000u64 {
        let key = match random.chance(0.2) {
            true => random.below(step + 1),
            false => step,
        };
        cache.put(&self::key(key), &[7; 120]).unwrap();
        if random.chance(0.05) {
            cache.delete(&self::key(random.below(step + 1))).unwrap();
        }
    }
    assert_eq!(cache.stats().compacted, 0);
    cache.close().unwrap();
}

/// Checks that the sums of live bytes are those of the index, and that the index names what is not
/// marked as dead; returns how many values are marked, and how many there are.
fn check(shared: &Shared) -> (usize, usize) {
    let mut live = BTreeMap::new();
    shared.index.retain(|position| {
        *live.entry(position.short_number()).or_insert(0) += position.max_len_bytes() as u64;
        true
    });
    let (mut marked, mut values) = (0, 0);
    let newest = shared.flush.oldest_unwritten();
    for journal in shared.journals.all().iter().filter(|it| it.number != newest) {
        let counts = &journal.counts;
        let expected = live.get(&(journal.number.0 as u32)).copied().unwrap_or(0);
        assert_eq!(counts.live_bytes.load(Ordering::Relaxed), expected, "{}", journal.number);
        let step_bytes = || PAGE_BYTES;
        let damaged_bytes = shared.each_record(journal, step_bytes, |first, record| {
            let hash = shared.hasher.hash(record.key());
            let position = record.position(journal.number, first, hash);
            let named = shared.index.find(hash);
            if record.header().kind == Kind::Value {
                values += 1;
                let may_be_dead = counts.dead.may_be_dead(first);
                marked += usize::from(may_be_dead);
                assert!(may_be_dead || named.is_some_and(|it| it.is_same(position)));
            }
            Ok::<_, Error>(())
        });
        assert_eq!(damaged_bytes.unwrap(), 0);
    }
    (marked, values)
}

#[test]
fn an_opening_counts_live_records_exactly() {
    for seed in 0..4 {
        let directory = SimDirectory::default();
        written(&directory, seed);
        let without_hints = directory.killed();
        remove_hints(&without_hints);
        let [with, without] = [directory, without_hints].map(|directory| {
            let (shared, recovered) =
                crate::open::open(Box::new(directory), options()).expect("closed before");
            (check(&shared), recovered.entries)
        });
        assert_eq!(with, without);
        let ((marked, values), _) = with;
        // A fifth was replaced, a twentieth deleted; each of these has a neighbour in its unit.
        assert!(
            values > 30_000 && marked * 5 > values && marked * 3 < values * 2,
            "{marked} of {values}"
        );
    }
}

#[test]
fn replacements_and_deletions_are_marked() {
    let directory = SimDirectory::default();
    written(&directory, 9);
    let (shared, _) = crate::open::open(Box::new(directory), options()).unwrap();
    let (before, values) = check(&shared);
    // No thread runs: what is put stays in the newest journal.
    for key in (0..40_000u64).step_by(50) {
        let (key, value) = (self::key(key), [1; 10]);
        match shared.put_if_absent(&key, &value, None).unwrap() {
            true => {}
            false => drop(shared.delete(&key).unwrap()),
        }
    }
    let (after, same_values) = check(&shared);
    assert_eq!(values, same_values);
    assert!(after > before + 500, "{before} and {after} of {values}");
}
