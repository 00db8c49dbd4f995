//! Evidence in a recovered log of the batches that are missing in it.

use std::collections::HashMap;
use std::ops::Range;

use alluvium_device::PAGE_BYTES;
use alluvium_wal::{LogOffset, RecoveryReport};

use crate::record::{
    End, Ends, HEADER_BYTES, Identified, MIN_RECORD_BYTES, WAL_HEADER_BYTES, remains,
};
use crate::types::{StreamId, StreamOffset};

/// More offsets than any number of clients uses in the time between two ends records. It keeps the
/// sum far from the greatest offset.
const MOST_SKIPPED: u64 = 1 << 48;

/// What the intact records show.
#[derive(Default)]
pub(crate) struct Evidence {
    /// The greatest end listed for each stream.
    next: HashMap<StreamId, StreamOffset>,
    /// Offsets that an earlier recovery skipped because they may have been handed out.
    skipped: HashMap<StreamId, Vec<Range<StreamOffset>>>,
    /// Ranges of the log in which all batches are listed.
    covered: Vec<Range<LogOffset>>,
    /// The incomplete list at this point of the log: the range that it covers, and the number of
    /// its parts so far, without a break.
    coming: Option<(Range<LogOffset>, u32)>,
}

/// What damage to the log may have cost.
pub(crate) struct Loss {
    /// For each stream, the offset that its batches are certain to have reached.
    pub(crate) next: HashMap<StreamId, StreamOffset>,
    /// Parts of the log whose former contents are unknown, in order: where each begins, and how
    /// many records it and those after it may have held.
    unknown: Vec<(LogOffset, u64)>,
    skipped: HashMap<StreamId, Vec<Range<StreamOffset>>>,
    /// The versions of lists of changes of the catalog whose records are damaged.
    pub(crate) lists: Vec<u64>,
}

/// Where a stream continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Continuation {
    /// The offset below which all offsets were handed out.
    pub(crate) known: StreamOffset,
    /// The offset from which on none was handed out. Those between `known` and here may have been.
    pub(crate) next: StreamOffset,
}

impl Evidence {
    /// Adds an intact ends record. Records come in log order.
    pub(crate) fn add(&mut self, ends: Ends) {
        for End { stream, next, known } in ends.ends {
            let greatest = self.next.entry(stream).or_default();
            *greatest = next.max(*greatest);
            if known < next {
                self.skipped.entry(stream).or_default().push(known..next);
            }
        }
        let range = ends.from..ends.to;
        let before = match self.coming.take() {
            Some((of, parts)) if of == range => parts,
            _ => 0,
        };
        // The list counts only as a whole: a missing part may have listed any stream.
        if ends.part != before {
            return;
        }
        match before + 1 == ends.parts {
            true => self.covered.push(range),
            false => self.coming = Some((range, before + 1)),
        }
    }

    /// Adds the durable end of a stream that the catalog states.
    pub(crate) fn add_hint(&mut self, stream: StreamId, end: StreamOffset) {
        let greatest = self.next.entry(stream).or_default();
        *greatest = end.max(*greatest);
    }

    /// Returns the greatest log offset that a list covers up to.
    pub(crate) fn covered_to(&self) -> LogOffset {
        self.covered.iter().map(|range| range.end).max().unwrap_or_default()
    }

    /// Assesses the damage. The contents of the log before `uploaded` are not missed.
    ///
    /// The remains of a damaged record may be from one lap earlier, if the write over them was
    /// lost. Such a record is trimmed: its list covers nothing behind the log's start, or its batch
    /// is uploaded or belongs to a deleted stream. `is_missing` returns whether a batch is none of
    /// these. A list of changes with a version up to `covers` is in the object store. A batch of a
    /// deleted stream counts only if the remains are certain: the log's own record header is intact
    /// and on the same page.
    pub(crate) fn judge(
        mut self,
        report: &RecoveryReport,
        uploaded: LogOffset,
        covers: u64,
        is_missing: impl Fn(StreamId, StreamOffset, bool) -> bool,
    ) -> Loss {
        self.covered.push(LogOffset(0)..uploaded);
        self.covered.sort_by_key(|range| range.start);
        let (mut unknown, mut lists) = (Vec::new(), Vec::new());
        for place in &report.damaged_ranges {
            let mut range = place.range.clone();
            let bytes = range.end.0 - range.start.0;
            if let Some(left) = remains(&place.head)
                && (left.record_bytes == bytes || !place.is_one_record && left.record_bytes < bytes)
            {
                let is_identified = match left.record {
                    Identified::Ends(to) => to >= report.start,
                    Identified::Catalog(version) => {
                        lists.extend((version > covers).then_some(version));
                        version > covers
                    }
                    Identified::Batch(stream, base, count) => {
                        let end = StreamOffset(base.0.saturating_add(count.into()));
                        let is_certain = place.is_one_record && has_header_on_page(range.start);
                        let is_identified =
                            range.start >= uploaded && is_missing(stream, end, is_certain);
                        if is_identified {
                            let known = self.next.entry(stream).or_default();
                            *known = end.max(*known);
                        }
                        is_identified
                    }
                };
                if is_identified {
                    range.start.0 += left.record_bytes;
                }
            }
            unknown.extend(self.uncovered(range));
        }
        let unknown = unknown
            .into_iter()
            .map(|range| (range.start, (range.end.0 - range.start.0).div_ceil(MIN_RECORD_BYTES)));
        let mut unknown: Vec<_> = unknown.collect();
        if report.end < uploaded {
            // The log's end is missing, and it is unknown how much of it.
            unknown.push((uploaded, report.ring_bytes / MIN_RECORD_BYTES));
        }
        Loss { next: self.next, unknown: suffix_sums(unknown), skipped: self.skipped, lists }
    }

    /// Returns the parts of `range` that no list covers.
    fn uncovered(&self, mut range: Range<LogOffset>) -> Vec<Range<LogOffset>> {
        let mut parts = Vec::new();
        for covered in &self.covered {
            if range.is_empty() || covered.start >= range.end {
                break;
            }
            if covered.start > range.start {
                parts.push(range.start..covered.start);
            }
            range.start = range.start.max(covered.end);
        }
        if !range.is_empty() {
            parts.push(range);
        }
        parts
    }
}

impl Loss {
    /// Returns where a stream continues that ends at `next` and whose last batch in the log ends at
    /// `log_end`: behind everything that it can have had. No batch has more than `largest_count`
    /// offsets.
    pub(crate) fn continuation(
        &self,
        stream: StreamId,
        next: StreamOffset,
        log_end: LogOffset,
        largest_count: u32,
    ) -> Continuation {
        let known = self.next.get(&stream).map_or(next, |known| next.max(*known));
        // The base of an intact batch of the stream shows what lay before it.
        let first = self.unknown.partition_point(|(at, _)| *at < log_end);
        let records = self.unknown.get(first).map_or(0, |(_, records)| *records);
        let offsets = records.saturating_mul(largest_count.into()).min(MOST_SKIPPED);
        Continuation { known, next: StreamOffset(known.0.saturating_add(offsets)) }
    }

    /// Returns the parts of a gap, in order, each with whether it was skipped by an earlier
    /// recovery: its offsets may have been handed out, while those of the others were.
    pub(crate) fn parts(
        &self,
        stream: StreamId,
        gap: Range<StreamOffset>,
    ) -> Vec<(Range<StreamOffset>, bool)> {
        let skipped = self.skipped.get(&stream).map_or(&[][..], |skipped| skipped);
        let mut skipped: Vec<_> = skipped
            .iter()
            .map(|range| range.start.max(gap.start)..range.end.min(gap.end))
            .filter(|range| range.start < range.end)
            .collect();
        skipped.sort_by_key(|range| range.start);
        let (mut parts, mut at) = (Vec::new(), gap.start);
        for range in skipped {
            if at < range.start {
                parts.push((at..range.start, false));
            }
            if at < range.end {
                parts.push((at.max(range.start)..range.end, true));
            }
            at = at.max(range.end);
        }
        if at < gap.end {
            parts.push((at..gap.end, false));
        }
        parts
    }
}

/// Replaces each number by the sum of the numbers from its position on.
fn suffix_sums(mut unknown: Vec<(LogOffset, u64)>) -> Vec<(LogOffset, u64)> {
    let mut sum = 0u64;
    for (_, records) in unknown.iter_mut().rev() {
        sum = sum.saturating_add(*records);
        *records = sum;
    }
    unknown
}

/// Whether the headers of a record that starts there, the log's own and the stream's, lie on one
/// page, which a single write puts there.
fn has_header_on_page(at: LogOffset) -> bool {
    let page_bytes = PAGE_BYTES as u64;
    at.0 % page_bytes + WAL_HEADER_BYTES + HEADER_BYTES as u64 <= page_bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> Range<LogOffset> {
        LogOffset(start)..LogOffset(end)
    }

    fn part(from: u64, to: u64, part: u32, parts: u32) -> Ends {
        let (stream, next) = (StreamId(u64::from(part)), StreamOffset(to));
        let ends = vec![End { stream, next, known: next }];
        let (from, to) = (LogOffset(from), LogOffset(to));
        Ends { from, to, part, parts, ends, catalog_version: None }
    }

    #[test]
    fn a_list_covers_its_range_only_if_all_of_its_parts_are_intact() {
        let mut evidence = Evidence::default();
        for ends in [
            part(0, 10, 0, 2),
            part(0, 10, 1, 2),
            part(10, 30, 1, 2), // the first part is missing
            part(20, 40, 0, 2), // the second part is missing
            part(50, 60, 0, 1),
            part(60, 70, 0, 3),
            part(60, 70, 2, 3),
        ] {
            evidence.add(ends);
        }
        assert_eq!(evidence.covered, [range(0, 10), range(50, 60)]);
        assert_eq!(evidence.covered_to(), LogOffset(60));
        assert_eq!(evidence.next[&StreamId(2)], StreamOffset(70), "what is listed counts");
        assert_eq!(evidence.uncovered(range(5, 55)), [range(10, 50)]);
        assert_eq!(evidence.uncovered(range(2, 9)), []);
        assert_eq!(evidence.uncovered(range(55, 80)), [range(60, 80)]);
        assert_eq!(evidence.uncovered(range(0, 80)), [range(10, 50), range(60, 80)]);
    }

    #[test]
    fn skipped_offsets_are_bounded_by_the_bytes_and_the_largest_batch() {
        let next = HashMap::from([(StreamId(1), StreamOffset(50))]);
        let unknown = suffix_sums(vec![(LogOffset(100), 2), (LogOffset(400), 3)]);
        let loss = Loss { next, unknown, skipped: HashMap::new(), lists: vec![] };
        let continuation = |stream, next, log_end| {
            let next = StreamOffset(next);
            let Continuation { known, next } =
                loss.continuation(StreamId(stream), next, LogOffset(log_end), 10);
            (known.0, next.0)
        };
        assert_eq!(continuation(1, 20, 0), (50, 100), "from the listed end on");
        assert_eq!(continuation(1, 70, 100), (70, 120));
        let reason = "a batch behind the first damage shows what was lost there";
        assert_eq!(continuation(2, 20, 300), (20, 50), "{reason}");
        assert_eq!(continuation(2, 20, 401), (20, 20));
        let unknown = suffix_sums(vec![(LogOffset(0), u64::MAX), (LogOffset(9), 1)]);
        let (next, skipped) = (HashMap::new(), HashMap::new());
        let all = Loss { next, unknown, skipped, lists: vec![] };
        let continuation = all.continuation(StreamId(1), StreamOffset(7), LogOffset(0), u32::MAX);
        assert_eq!(continuation.next.0, 7 + MOST_SKIPPED);
    }

    #[test]
    fn offsets_skipped_before_are_distinguished_from_lost_ones() {
        let offsets = |start, end| StreamOffset(start)..StreamOffset(end);
        let skipped = vec![offsets(50, 60), offsets(20, 30), offsets(25, 35)];
        let loss = Loss {
            next: HashMap::new(),
            unknown: vec![],
            skipped: HashMap::from([(StreamId(1), skipped)]),
            lists: vec![],
        };
        let parts = |stream, gap| loss.parts(StreamId(stream), gap);
        let expected = [
            (offsets(10, 20), false),
            (offsets(20, 30), true),
            (offsets(30, 35), true),
            (offsets(35, 50), false),
            (offsets(50, 55), true),
        ];
        assert_eq!(parts(1, offsets(10, 55)), expected);
        assert_eq!(parts(1, offsets(22, 24)), [(offsets(22, 24), true)]);
        assert_eq!(parts(2, offsets(22, 24)), [(offsets(22, 24), false)]);
    }
}
