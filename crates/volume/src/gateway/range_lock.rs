//! Locks of ranges of blocks. A lock waits for every earlier lock that overlaps it, whether that
//! one is held or waits itself, so locks are granted in the order of their requests and none
//! starves.

use std::collections::BTreeMap;
use std::ops::Range;

/// The locks that are held or waited for. A lock is known by the number of its request; later
/// requests have greater numbers.
#[derive(Debug)]
pub(super) struct RangeLocks {
    /// By class, first block and request. A lock of class c has at most 2^c blocks, so a query
    /// looks only that far below its range.
    locks: BTreeMap<(u32, u64, u64), Lock>,
    /// The number of locks of each class.
    classes: [u32; 64],
}

#[derive(Debug)]
struct Lock {
    end: u64,
    is_held: bool,
}

impl Default for RangeLocks {
    fn default() -> Self {
        Self { locks: BTreeMap::new(), classes: [0; 64] }
    }
}

impl RangeLocks {
    /// Requests a lock and returns whether it is held now. Otherwise it is held when
    /// [`RangeLocks::release`] returns it.
    pub(super) fn acquire(&mut self, request: u64, range: &Range<u64>) -> bool {
        let is_held = !self.overlapping(range).any(|_| true);
        let class = class(range);
        self.classes[class as usize] += 1;
        let lock = Lock { end: range.end, is_held };
        let former = self.locks.insert((class, range.start, request), lock);
        assert!(former.is_none(), "a request has one lock");
        is_held
    }

    /// Removes a lock, which may also be one that waits, and appends the locks that are held from
    /// now on to `granted`.
    pub(super) fn release(&mut self, request: u64, range: &Range<u64>, granted: &mut Vec<u64>) {
        let class = class(range);
        let lock = self.locks.remove(&(class, range.start, request));
        assert!(lock.is_some(), "the lock is known");
        self.classes[class as usize] -= 1;
        let may_follow: Vec<_> = self
            .overlapping(range)
            .filter(|(key, lock)| !lock.is_held && key.2 > request)
            .map(|(key, lock)| (*key, lock.end))
            .collect();
        for (key, end) in may_follow {
            let (_, start, request) = key;
            if !self.overlapping(&(start..end)).any(|(other, _)| other.2 < request) {
                self.locks.get_mut(&key).expect("it waits").is_held = true;
                granted.push(request);
            }
        }
    }

    /// The number of locks that are held or waited for.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.locks.len()
    }

    fn overlapping(&self, range: &Range<u64>) -> impl Iterator<Item = (&(u32, u64, u64), &Lock)> {
        let Range { start, end } = *range;
        let classes = (0_u32..).zip(&self.classes).filter(|(_, count)| **count > 0);
        classes.flat_map(move |(class, _)| {
            let lowest = start.saturating_sub((1 << class) - 1);
            let locks = self.locks.range((class, lowest, 0)..(class, end, 0));
            locks.filter(move |(_, lock)| lock.end > start)
        })
    }
}

/// The smallest c such that the range has at most 2^c blocks.
fn class(range: &Range<u64>) -> u32 {
    (range.end - range.start).next_power_of_two().trailing_zeros()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
        a.start < b.end && b.start < a.end
    }

    #[test]
    fn a_lock_does_not_overtake_a_waiting_one_that_it_overlaps() {
        let (mut locks, mut granted) = (RangeLocks::default(), Vec::new());
        assert!(locks.acquire(1, &(0..4)));
        assert!(!locks.acquire(2, &(3..9)));
        assert!(!locks.acquire(3, &(8..12)), "free, but the second one is earlier");
        assert!(locks.acquire(4, &(12..13)));
        locks.release(1, &(0..4), &mut granted);
        assert_eq!(granted, [2]);
        locks.release(2, &(3..9), &mut granted);
        assert_eq!(granted, [2, 3]);
    }

    #[test]
    fn a_waiting_lock_that_is_given_up_lets_the_ones_behind_it_through() {
        let (mut locks, mut granted) = (RangeLocks::default(), Vec::new());
        assert!(locks.acquire(1, &(0..4)));
        assert!(!locks.acquire(2, &(3..9)));
        assert!(!locks.acquire(3, &(8..12)));
        locks.release(2, &(3..9), &mut granted);
        assert_eq!(granted, [3]);
    }

    proptest! {
        /// The model is the rule itself: a lock is held if no earlier lock overlaps it.
        #[test]
        fn locks_are_held_exactly_if_no_earlier_one_overlaps(
            steps in prop::collection::vec(
                (
                    0..60_u64,
                    prop_oneof![4 => 1..4_u64, 1 => 1..70_u64],
                    any::<prop::sample::Index>(),
                    prop::bool::weighted(0.6),
                ),
                1..120,
            ),
        ) {
            let mut locks = RangeLocks::default();
            let mut model: BTreeMap<u64, Range<u64>> = BTreeMap::new();
            let mut held = BTreeSet::new();
            for (request, (start, len, victim, is_acquired)) in (1..).zip(steps) {
                if is_acquired {
                    let range = start..start + len;
                    if locks.acquire(request, &range) {
                        held.insert(request);
                    }
                    model.insert(request, range);
                } else if !model.is_empty() {
                    let victim = *model.keys().nth(victim.index(model.len())).unwrap();
                    let mut granted = Vec::new();
                    locks.release(victim, &model.remove(&victim).unwrap(), &mut granted);
                    held.remove(&victim);
                    held.extend(granted);
                }
                let is_first = |id: u64, range: &Range<u64>| {
                    !model.range(..id).any(|(_, other)| overlap(other, range))
                };
                let expected: BTreeSet<u64> = model
                    .iter()
                    .filter(|(id, range)| is_first(**id, range))
                    .map(|(id, _)| *id)
                    .collect();
                prop_assert_eq!(&held, &expected);
                prop_assert_eq!(locks.len(), model.len());
            }
        }
    }
}
