//! The bases that a group had at earlier checkpoints of this server. With them a source finds the
//! blocks that have changed since an index: those whose epoch is that of a later checkpoint.
//! `docs/format/volume-log.md`, section 3.

use std::collections::VecDeque;

use crate::log::{MAX_PAIRS, Pair};
use crate::types::{CheckpointNumber, Index};

/// Most pairs that are kept in memory, 16 bytes each: 16 MiB with 4,096 replicas.
const MAX_KEPT: usize = 256;

/// The pairs of a replica, the oldest first. Numbers and bases ascend.
///
/// There are only pairs of times at which the replica was exact, since its last pull. A pull leaves
/// blocks that were equal already as they were, with their old epochs, although entries that this
/// replica never applied may have changed them and changed them back.
#[derive(Debug, Default)]
pub(super) struct Pairs(VecDeque<Pair>);

impl Pairs {
    /// Takes the pairs of a checkpoint's record, which has the newest first.
    pub(super) fn of_record(pairs: &[Pair]) -> Self {
        Self(pairs.iter().rev().copied().collect())
    }

    /// Adds the newest one. It replaces one with the same base: fewer blocks have changed since.
    pub(super) fn push(&mut self, pair: Pair) {
        if let Some(last) = self.0.back_mut().filter(|last| last.base >= pair.base) {
            if last.base == pair.base {
                last.number = pair.number;
            }
            return;
        }
        if self.0.len() == MAX_KEPT {
            self.0.pop_front();
        }
        self.0.push_back(pair);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// The newest checkpoint whose base is at or below `since`. Blocks that have changed above
    /// `since` have changed above that base.
    pub(super) fn at_or_below(&self, since: Index) -> Option<CheckpointNumber> {
        let count = self.0.partition_point(|pair| pair.base <= since);
        count.checked_sub(1).map(|at| self.0[at].number)
    }

    /// The pairs for a record, the newest first, and before them `newest`, which the record itself
    /// makes true. Their distances in checkpoints double, so that few of them reach far back, also
    /// after many restarts.
    pub(super) fn for_record(&self, newest: Option<Pair>) -> Vec<Pair> {
        let mut thinned: Vec<Pair> = newest.into_iter().collect();
        let (mut end, mut distance) = (self.0.len(), 1);
        while thinned.len() < MAX_PAIRS && end > 0 {
            let pair = self.0[end - 1];
            if thinned.last().is_none_or(|last| pair.base < last.base) {
                thinned.push(pair);
            }
            let limit = thinned[0].number.0.saturating_sub(distance);
            end = self.0.partition_point(|pair| pair.number.0 <= limit).min(end - 1);
            distance *= 2;
        }
        thinned
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(number: u64) -> Pair {
        Pair { number: CheckpointNumber(number), base: Index(number * 10) }
    }

    fn pairs(count: u64) -> Pairs {
        let mut pairs = Pairs::default();
        (1..=count).for_each(|number| pairs.push(pair(number)));
        pairs
    }

    #[test]
    fn the_newest_checkpoint_that_covers_no_more_is_found() {
        let pairs = pairs(5);
        let found = |since| pairs.at_or_below(Index(since)).map(|number| number.0);
        assert_eq!([9, 10, 19, 20, 1000].map(found), [None, Some(1), Some(1), Some(2), Some(5)]);
        assert_eq!(Pairs::default().at_or_below(Index(1000)), None);
    }

    #[test]
    fn of_two_checkpoints_with_one_base_the_newer_counts() {
        let mut pairs = pairs(2);
        pairs.push(Pair { number: CheckpointNumber(3), base: Index(20) });
        assert_eq!(pairs.0.len(), 2);
        assert_eq!(pairs.at_or_below(Index(20)), Some(CheckpointNumber(3)));
    }

    fn numbers(record: &[Pair]) -> Vec<u64> {
        record.iter().map(|pair| pair.number.0).collect()
    }

    #[test]
    fn a_record_reaches_far_back_with_few_pairs() {
        assert_eq!(numbers(&pairs(10).for_record(Some(pair(11)))), [11, 10, 9, 8, 7, 3]);
        let same_base = Pair { number: CheckpointNumber(4), base: Index(30) };
        assert_eq!(numbers(&pairs(3).for_record(Some(same_base))), [4, 2, 1]);
        assert!(pairs(0).for_record(None).is_empty());
        let many = pairs(5000);
        assert_eq!(many.0.len(), MAX_KEPT);
        let record = many.for_record(Some(pair(5001)));
        let again = Pairs::of_record(&record);
        assert_eq!(again.at_or_below(Index(50_009)), Some(CheckpointNumber(5000)));
        assert_eq!(again.for_record(None)[0], record[0]);
    }

    #[test]
    fn restarts_keep_the_reach() {
        let mut pairs = pairs(200);
        for number in 201..240 {
            let record = pairs.for_record(Some(pair(number)));
            assert!(record.len() <= MAX_PAIRS);
            assert!(record.windows(2).all(|two| two[0].base > two[1].base));
            pairs = Pairs::of_record(&record);
        }
        let record = numbers(&pairs.for_record(None));
        assert!(*record.last().unwrap() < 150, "{record:?}");
    }
}
