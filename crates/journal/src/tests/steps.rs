//! The process ends, or the power fails, before and after each change that compaction and eviction
//! make to the disk.

use super::cold::{plain, still};
use super::removing::{compact, without_maintenance_thread};
use super::*;
use crate::position::JournalNumber;
use crate::shared::Shared;

/// A time in the past.
const EXPIRED: u64 = 1;

pub(super) type Map = BTreeMap<Vec<u8>, Vec<u8>>;

/// Values by key, with the numbers of their journals.
type Written = BTreeMap<Vec<u8>, (Vec<u8>, u64)>;

/// An operation on a key.
enum Act {
    Put,
    PutExpired,
    Delete,
}

/// For each journal, which are written by consecutive processes: keys, and the operation on them.
fn acts() -> [Vec<(std::ops::Range<u64>, Act)>; 4] {
    use Act::{Delete, Put, PutExpired};
    [
        vec![(0..60, Put)],
        // The deleted, replaced and expired keys are in the journal before.
        vec![(0..10, Delete), (10..20, Put), (20..30, PutExpired), (100..120, Put)],
        // Some have two older records, in two journals; some that were deleted are present again.
        vec![(100..105, Delete), (105..110, Put), (10..15, Delete), (0..3, Put), (200..230, Put)],
        vec![(200..215, Put), (30..35, Delete), (110..112, Delete)],
    ]
}

/// Four journals, all of it on stable storage; and the live values, with the numbers of their
/// journals.
fn filled() -> (SimDirectory, Written) {
    let directory = SimDirectory::default();
    let mut map = Written::new();
    for (number, acts) in acts().into_iter().enumerate() {
        without_maintenance_thread(&directory, &plain(), |shared| {
            for (keys, act) in acts {
                for key in keys.map(u64::to_le_bytes) {
                    let value = [&key[..], &[number as u8; 500]].concat();
                    match act {
                        Act::Put => {
                            shared.put(&key, &value, None).unwrap();
                            map.insert(key.to_vec(), (value, number as u64));
                        }
                        Act::PutExpired => {
                            shared.put(&key, &value, Some(EXPIRED)).unwrap();
                            map.remove(&key[..]);
                        }
                        Act::Delete => {
                            assert!(shared.delete(&key).unwrap());
                            map.remove(&key[..]);
                        }
                    }
                }
            }
        });
    }
    let shared = still(&directory, &plain());
    assert_eq!(shared.journals.len(), 5, "those and the newest");
    // As found by another process after a kill.
    (directory.killed(), map)
}

/// Runs `work` up to each of its steps and examines what a crash leaves there; returns the number
/// of steps.
pub(super) fn crash_at_each_step(
    original: &SimDirectory,
    work: impl Fn(&SimDirectory, &Shared) -> crate::Result<()>,
    is_right: impl Fn(&Map) -> bool,
) -> u64 {
    for steps in 0.. {
        let directory = original.killed();
        let mut left = Vec::new();
        without_maintenance_thread(&directory, &plain(), |shared| {
            // Otherwise its creation would be among the steps.
            while shared.flush.state.lock().spare.is_none() {
                thread::yield_now();
            }
            directory.stop_after(steps);
            let worked = work(&directory, shared);
            assert_eq!(worked.is_err(), directory.has_failed(), "step {steps}: {worked:?}");
            left.push(("killed", directory.killed()));
            left.extend((0..8).map(|seed| ("without power", directory.power_cut(seed))));
            if worked.is_ok() {
                left.push(("done", directory.killed()));
            }
        });
        let is_done = left.iter().any(|(how, _)| *how == "done");
        for (crash, (how, left)) in left.into_iter().enumerate() {
            if crash % 2 == 0 {
                remove_hints(&left);
            }
            let cache = open(&left, &plain());
            assert!(is_right(&contents(&cache)), "step {steps}, crash {crash}, {how}");
            // The rest still hides what it has to.
            cache.compact(|_| ()).unwrap();
            assert!(is_right(&contents(&cache)), "step {steps}, crash {crash}, {how}: compacted");
            cache.close().unwrap();
            remove_hints(&left);
            let found = contents(&open(&left.power_cut(steps), &plain()));
            assert!(is_right(&found), "step {steps}, crash {crash}, {how}: opened again");
        }
        if is_done {
            return steps;
        }
    }
    unreachable!("it has an end")
}

#[test]
fn a_crash_at_any_step_of_compaction_loses_and_restores_nothing() {
    let (original, map) = filled();
    let map: Map = map.into_iter().map(|(key, (value, _))| (key, value)).collect();
    let work = |_: &SimDirectory, shared: &Shared| -> crate::Result<()> {
        let tombstones = |shared: &Shared| {
            let newest = shared.active.load();
            newest.counts.tombstone_bytes.load(Ordering::Relaxed)
        };
        // In the middle, at the end and at the beginning: what it hides is in an older one.
        for (number, has_to_hide) in [(1, true), (3, true), (0, false), (2, false)] {
            let before = tombstones(shared);
            compact(shared, number)?;
            assert_eq!(tombstones(shared) > before, has_to_hide, "{number}");
        }
        assert_eq!(shared.counters.compacted.load(Ordering::Relaxed), 4);
        Ok(())
    };
    let steps = crash_at_each_step(&original, work, |found| *found == map);
    // For each journal: a write, a sync, the removal of it and of its hint, a sync of the names.
    assert!(steps >= 16, "{steps}");
}

#[test]
fn a_crash_at_any_step_of_eviction_restores_nothing() {
    const READ: std::ops::Range<u64> = 45..60;
    let (original, map) = filled();
    let work = |_: &SimDirectory, shared: &Shared| -> crate::Result<()> {
        for key in READ.map(u64::to_le_bytes) {
            let hash = shared.hasher.hash(&key);
            let position = shared.index.find(hash).expect("it is there");
            shared.index.mark_read(hash, position);
        }
        for number in [0, 1] {
            assert_eq!(shared.journals.all()[0].number, JournalNumber(number));
            assert!(shared.evict_oldest()?);
        }
        assert_eq!(shared.counters.kept.load(Ordering::Relaxed), READ.count() as u64);
        assert!(shared.counters.evicted.load(Ordering::Relaxed) >= 30);
        Ok(())
    };
    let is_promised = |key: &[u8], number: u64| {
        number > 1 || READ.contains(&u64::from_le_bytes(key.try_into().unwrap()))
    };
    let is_right = |found: &Map| {
        let is_known = |(key, value): (&Vec<u8>, &Vec<u8>)| {
            map.get(key).is_some_and(|(written, _)| written == value)
        };
        let mut promised = map.iter().filter(|(key, (_, number))| is_promised(key, *number));
        found.iter().all(is_known) && promised.all(|(key, _)| found.contains_key(key))
    };
    let steps = crash_at_each_step(&original, work, is_right);
    assert!(steps >= 8, "{steps}");
}
