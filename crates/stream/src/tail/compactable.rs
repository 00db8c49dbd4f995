//! Selects neighbouring ranges of a stream that object compaction merges: `docs/compaction.md`.
//!
//! A stream may have hundreds of thousands of ranges, and appends wait for the lock of its tail. So
//! only ranges near a change are scanned, and only a bounded number of them while the tail is
//! locked.

use super::Tail;
use crate::range::Range;
use crate::types::{ObjectId, StreamOffset};

/// What makes a run of ranges worth merging.
#[derive(Clone, Copy)]
pub(crate) struct Choice {
    /// Number of ranges that are merged if together they are large, or if each has an object of its
    /// own.
    pub(crate) fan_in: usize,
    /// Payload of a large range, which is not merged.
    pub(crate) large_bytes: u64,
    /// Largest payload of an object. Fewer ranges are merged if they have half of it together.
    pub(crate) most_bytes: u64,
    /// Number of ranges scanned at a time, plus half as many before them. Runs that do not have
    /// enough payload in half as many ranges are not found.
    pub(crate) at_a_time: usize,
}

/// The offsets in which a stream has got new ranges since the last scan. Ranges in between that
/// have not changed are scanned too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Changed {
    from: StreamOffset,
    to: StreamOffset,
}

impl Changed {
    pub(crate) const ALL: Self = Self { from: StreamOffset(0), to: StreamOffset(u64::MAX) };

    pub(crate) fn at(range: &Range) -> Self {
        Self { from: range.start, to: range.end }
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self { from: self.from.min(other.from), to: self.to.max(other.to) }
    }
}

/// The result of a scan.
pub(crate) enum Compactable {
    /// Neighbours to be merged into one range.
    Found(Vec<Range>),
    /// Nothing yet, and this is left to scan.
    Further(Changed),
    Nothing,
}

impl Tail {
    /// Finds the oldest ranges that satisfy `choice`, with a changed one among them and none in an
    /// object that is `left_out`.
    pub(crate) fn compactable(
        &self,
        changed: Changed,
        choice: Choice,
        left_out: impl Fn(ObjectId) -> bool,
    ) -> Compactable {
        let is_candidate =
            |range: &Range| range.payload_bytes < choice.large_bytes && !left_out(range.object.id);
        let joins = |index: usize| {
            let (before, range) = (&self.ranges[index - 1], &self.ranges[index]);
            // The offsets of a hole are in no object.
            before.end == range.start
                && before.object.generation == range.object.generation
                && is_candidate(before)
                && is_candidate(range)
        };
        let at = self.ranges.partition_point(|range| range.end <= changed.from);
        let mut begin = at;
        while at < self.ranges.len()
            && begin > at.saturating_sub(choice.at_a_time / 2)
            && joins(begin)
        {
            begin -= 1;
        }
        let end = self.ranges.len().min(at.saturating_add(choice.at_a_time));
        let (mut first, mut bytes) = (begin, 0);
        for index in begin..end {
            let range = &self.ranges[index];
            if index > begin && !joins(index) {
                if range.start >= changed.to {
                    return Compactable::Nothing;
                }
                (first, bytes) = (index, 0);
            }
            bytes += range.payload_bytes;
            let count = index + 1 - first;
            let enough = count >= choice.fan_in || bytes >= choice.most_bytes / 2;
            if count > 1 && enough {
                // If all have objects of their own, one object fewer is a gain, however small they
                // are.
                let own = (index + 1).saturating_sub(choice.fan_in).max(first)..=index;
                let window = match bytes >= choice.large_bytes {
                    true => first..=index,
                    false if self.ranges.range(own.clone()).all(Range::is_own) => own,
                    false => continue,
                };
                return Compactable::Found(self.ranges.range(window).cloned().collect());
            }
        }
        match end < self.ranges.len() {
            true => Compactable::Further(Changed { from: self.ranges[end].start, ..changed }),
            false => Compactable::Nothing,
        }
    }

    /// Whether a range of this tail is not large, and is not merged with a neighbour, now or later:
    /// neighbours are large, in objects of their own, or missing for good.
    pub(crate) fn is_enclosed(&self, range: &Range, large_bytes: u64) -> bool {
        let at = self.ranges.partition_point(|other| other.start < range.start);
        let is_large = |range: &Range| range.payload_bytes >= large_bytes;
        let stays = |other: &Range| is_large(other) || other.is_own();
        let before = at.checked_sub(1).and_then(|at| self.ranges.get(at));
        let is_apart = before.is_none_or(|before| before.end != range.start || stays(before))
            && self.ranges.get(at + 1).is_some_and(|next| next.start != range.end || stays(next));
        is_apart && !is_large(range)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Arc;

    use alluvium_device::sim::Random;

    use super::*;
    use crate::catalog::ObjectInfo;

    /// A range; with `is_own` it is the only one in its object.
    fn range(start: u64, id: u64, generation: u8, payload_bytes: u64, is_own: bool) -> Range {
        let object = ObjectInfo {
            id: ObjectId(id),
            name: String::new(),
            size_bytes: 0,
            format: 2,
            index_position: 0,
            index_bytes: 0,
            index_crc32c: 0,
            created_at_ms: 0,
            generation,
            payload_bytes: payload_bytes + u64::from(!is_own),
        };
        Range {
            object: Arc::new(object),
            start: StreamOffset(start),
            end: StreamOffset(start + 1),
            payload_bytes,
            max_timestamp_ms: 0,
        }
    }

    const FEW: Choice = Choice { fan_in: 3, large_bytes: 10, most_bytes: 40, at_a_time: 10 };

    /// Whether any run satisfies the choice, by a scan of each window.
    fn has_candidate(tail: &Tail, left_out: &HashSet<ObjectId>) -> bool {
        let all: Vec<&Range> = tail.ranges.iter().collect();
        let mut windows = (2..=FEW.at_a_time / 2).flat_map(|count| all.windows(count));
        windows.any(|window| {
            let bytes: u64 = window.iter().map(|range| range.payload_bytes).sum();
            let fits = |range: &&Range| {
                range.object.generation == window[0].object.generation
                    && range.payload_bytes < FEW.large_bytes
                    && !left_out.contains(&range.object.id)
            };
            let own = window.len() == FEW.fan_in && window.iter().all(|range| range.is_own());
            window.iter().all(fits)
                && window.windows(2).all(|pair| pair[0].end == pair[1].start)
                && (window.len() >= FEW.fan_in || bytes >= FEW.most_bytes / 2)
                && (bytes >= FEW.large_bytes || own)
        })
    }

    #[test]
    fn a_range_is_enclosed_between_ranges_that_stay() {
        let is_enclosed = |ranges: &[(u64, u64, bool)], at: usize| {
            let mut tail = Tail::default();
            let ranges = ranges
                .iter()
                .map(|(start, bytes, is_own)| range(*start, 100 + start, 0, *bytes, *is_own));
            tail.ranges.extend(ranges);
            tail.is_enclosed(&tail.ranges[at], FEW.large_bytes)
        };
        let [small, own, large] = [(1, false), (1, true), (10, false)];
        let around = |before: (u64, bool), after: (u64, bool)| {
            is_enclosed(&[(0, before.0, before.1), (1, 1, false), (2, after.0, after.1)], 1)
        };
        assert!(around(own, own) && around(large, large) && around(own, large));
        assert!(!around(small, own) && !around(own, small) && !around(small, small));
        assert!(is_enclosed(&[(0, 1, false), (2, 1, false), (4, 1, false)], 1), "between holes");
        assert!(is_enclosed(&[(0, 1, false), (1, 1, true)], 0), "at the start");
        assert!(!is_enclosed(&[(0, 1, true), (1, 1, false)], 1), "more follows");
        assert!(!is_enclosed(&[(0, 1, true), (1, 10, false), (2, 1, true)], 1), "it is large");
    }

    /// Streams grow, sometimes with a hole, are trimmed, and have ranges replaced by one. From time
    /// to time the changed ranges are scanned, after which a scan of all ranges must find nothing.
    #[test]
    fn scanning_changed_ranges_finds_the_same_as_scanning_all() {
        let (mut found, mut further, mut checks) = (0, 0, 0);
        for seed in 0..400 {
            let mut random = Random::new(seed);
            let mut tail = Tail::default();
            let mut left_out = HashSet::new();
            let mut changed: Option<Changed> = None;
            for step in 0..150 {
                let id = 1000 * seed + step;
                let note = |range: &Range| {
                    let at = Changed::at(range);
                    Some(changed.map_or(at, |changed| changed.and(at)))
                };
                match random.below(12) {
                    0 if random.below(4) == 0 => {
                        let _ = tail.trim(StreamOffset(random.below(step + 1)));
                    }
                    // As a compaction of shared objects does.
                    1 if tail.ranges.len() > 3 => {
                        let at = random.below(tail.ranges.len() as u64 - 2) as usize;
                        let (first, last) = (tail.ranges[at].clone(), tail.ranges[at + 2].clone());
                        let new = range(first.start.0, id, random.below(3) as u8, 3, false);
                        let new = Range { end: last.end, ..new };
                        changed = note(&new);
                        tail.replace(first.start, 3, Some(new));
                    }
                    _ => {
                        let bytes = [1, 2, 5, 25][random.below(4) as usize];
                        let end = tail.ranges.back().map_or(0, |last| last.end.0);
                        let hole = u64::from(random.below(20) == 0);
                        let new = range(end + hole, id, 0, bytes, random.below(3) == 0);
                        if random.below(10) == 0 {
                            left_out.insert(new.object.id);
                        }
                        changed = note(&new);
                        tail.range_bytes += bytes;
                        tail.ranges.push_back(new);
                    }
                }
                if random.below(10) > 0 {
                    continue;
                }
                while let Some(looked_at) = changed {
                    match tail.compactable(looked_at, FEW, |id| left_out.contains(&id)) {
                        Compactable::Nothing => changed = None,
                        Compactable::Further(rest) => {
                            changed = Some(rest);
                            further += 1;
                        }
                        Compactable::Found(ranges) => {
                            assert!(ranges.len() > 1);
                            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
                            let bytes = ranges.iter().map(|range| range.payload_bytes).sum();
                            let generation = ranges[0].object.generation + 1;
                            let id = 1_000_000 + found;
                            let new = range(ranges[0].start.0, id, generation, bytes, true);
                            let new = Range { end: ranges[ranges.len() - 1].end, ..new };
                            changed = Some(looked_at.and(Changed::at(&new)));
                            tail.replace(new.start, ranges.len(), Some(new));
                            found += 1;
                        }
                    }
                }
                assert!(!has_candidate(&tail, &left_out), "seed {seed}, step {step}");
                checks += 1;
            }
        }
        println!("{found} found, {further} scans continued, {checks} checks");
        assert!(found > 1000 && further > 100 && checks > 1000);
    }
}
