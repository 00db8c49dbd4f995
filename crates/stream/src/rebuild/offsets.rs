//! Sets of stream offsets.

use std::ops::Range;

use crate::types::StreamOffset;

/// Offsets, as ranges that are not empty, in order and without overlaps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Offsets(Vec<Range<StreamOffset>>);

impl Offsets {
    /// Returns the set of all offsets in these ranges.
    pub(super) fn of(ranges: impl IntoIterator<Item = Range<StreamOffset>>) -> Self {
        let mut ranges: Vec<_> = ranges.into_iter().filter(|range| !range.is_empty()).collect();
        ranges.sort_unstable_by_key(|range| range.start);
        let mut joined: Vec<Range<StreamOffset>> = Vec::with_capacity(ranges.len());
        for range in ranges {
            match joined.last_mut() {
                Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
                _ => joined.push(range),
            }
        }
        Self(joined)
    }

    /// Returns what is in this set and not in `other`.
    pub(super) fn without(&self, other: &Self) -> Self {
        let mut left = Vec::new();
        for range in &self.0 {
            let mut from = range.start;
            let first = other.0.partition_point(|removed| removed.end <= from);
            for removed in other.0[first..].iter().take_while(|removed| removed.start < range.end) {
                left.push(from..removed.start);
                from = removed.end;
            }
            left.push(from..range.end);
        }
        left.retain(|range| !range.is_empty());
        Self(left)
    }

    /// Returns the offsets of this set in `range`.
    pub(super) fn within(&self, range: &Range<StreamOffset>) -> Self {
        let first = self.0.partition_point(|other| other.end <= range.start);
        let met = self.0[first..].iter().take_while(|other| other.start < range.end);
        let cut = met.map(|other| other.start.max(range.start)..other.end.min(range.end));
        Self(cut.filter(|range| !range.is_empty()).collect())
    }

    /// Whether one of the offsets in `range` is in the set.
    pub(super) fn meets(&self, range: &Range<StreamOffset>) -> bool {
        let first = self.0.partition_point(|other| other.end <= range.start);
        !range.is_empty() && self.0.get(first).is_some_and(|other| other.start < range.end)
    }

    pub(super) fn into_ranges(self) -> Vec<Range<StreamOffset>> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use alluvium_device::sim::Random;

    use super::*;

    fn range(start: u64, end: u64) -> Range<StreamOffset> {
        StreamOffset(start)..StreamOffset(end)
    }

    fn random_set(random: &mut Random) -> (Offsets, BTreeSet<u64>) {
        let ranges: Vec<_> = (0..random.next_u64() % 6)
            .map(|_| {
                let start = random.next_u64() % 40;
                range(start, start + random.next_u64() % 9)
            })
            .collect();
        let all = ranges.iter().flat_map(|range| range.start.0..range.end.0).collect();
        (Offsets::of(ranges), all)
    }

    #[test]
    fn sets_behave_like_sets_of_numbers() {
        let mut random = Random::new(1);
        for _ in 0..2000 {
            let (left, left_all) = random_set(&mut random);
            let (right, right_all) = random_set(&mut random);
            let expected: BTreeSet<u64> = left_all.difference(&right_all).copied().collect();
            let found = left.without(&right);
            let all: Vec<u64> =
                found.0.iter().flat_map(|range| range.start.0..range.end.0).collect();
            assert_eq!(all, expected.into_iter().collect::<Vec<_>>(), "{left:?} {right:?}");
            let part = range(random.next_u64() % 40, random.next_u64() % 50);
            let within = left.within(&part);
            let all: Vec<u64> =
                within.0.iter().flat_map(|range| range.start.0..range.end.0).collect();
            let expected = left_all.iter().filter(|at| part.contains(&StreamOffset(**at)));
            assert_eq!(all, expected.copied().collect::<Vec<_>>(), "{left:?} {part:?}");
            let asked = range(random.next_u64() % 40, random.next_u64() % 50);
            let meets = (asked.start.0..asked.end.0).any(|offset| left_all.contains(&offset));
            assert_eq!(left.meets(&asked), meets, "{left:?} {asked:?}");
        }
    }
}
