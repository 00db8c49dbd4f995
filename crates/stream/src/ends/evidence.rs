//! What a recovered log says about the batches that are missing in it.

use std::collections::HashMap;
use std::ops::Range;

use alluvium_wal::{LogOffset, RecoveryReport};

use crate::record::{Ends, MIN_RECORD_BYTES, Was, remains};
use crate::types::{StreamId, StreamOffset};

/// More offsets than any number of clients claims in the time between two ends records. It keeps the sum far from the end of the offsets.
const MOST_SKIPPED: u64 = 1 << 48;

/// Collected from the intact records.
#[derive(Default)]
pub(crate) struct Evidence {
    /// The greatest end that was listed of each stream.
    next: HashMap<StreamId, StreamOffset>,
    /// Ranges of the log of which all batches are listed.
    covered: Vec<Range<LogOffset>>,
    /// The list whose parts come in: the range that it covers, and how many have come, without a break.
    coming: Option<(Range<LogOffset>, u32)>,
}

/// What the log's damage may have cost.
pub(crate) struct Loss {
    /// Streams whose batches certainly came this far.
    pub(crate) next: HashMap<StreamId, StreamOffset>,
    /// Parts of the log that held nobody knows what: where each begins, and how many records it may have held.
    pub(crate) unknown: Vec<(LogOffset, u64)>,
}

impl Evidence {
    /// An intact ends record. Records come in log order.
    pub(crate) fn add(&mut self, ends: Ends) {
        for (stream, next) in ends.next {
            let known = self.next.entry(stream).or_default();
            *known = next.max(*known);
        }
        let range = ends.from..ends.to;
        let before = match self.coming.take() {
            Some((of, parts)) if of == range => parts,
            _ => 0,
        };
        // The list counts as a whole: a part that is missing may have listed any stream.
        if ends.part != before {
            return;
        }
        match before + 1 == ends.parts {
            true => self.covered.push(range),
            false => self.coming = Some((range, before + 1)),
        }
    }

    /// The greatest log offset that a list covers up to.
    pub(crate) fn covered_to(&self) -> LogOffset {
        self.covered.iter().map(|range| range.end).max().unwrap_or_default()
    }

    /// Judge the damage. What the log held before `uploaded` is not missed.
    ///
    /// What is left of a damaged record may be what stood there one lap before, if the write over it got lost. Then it is trimmed, and so its list covers
    /// nothing behind the log's start, or its batch is uploaded, or of a stream that was deleted. `is_young` says whether a batch is none of that; of a deleted
    /// stream it may be if that is certain, since the log's own record header is intact.
    pub(crate) fn judge(
        mut self,
        report: &RecoveryReport,
        uploaded: LogOffset,
        is_young: impl Fn(StreamId, StreamOffset, bool) -> bool,
    ) -> Loss {
        self.covered.push(LogOffset(0)..uploaded);
        self.covered.sort_by_key(|range| range.start);
        let mut unknown = Vec::new();
        for place in &report.damaged_places {
            let mut range = place.range.clone();
            let bytes = range.end.0 - range.start.0;
            if let Some(left) = remains(&place.head)
                && (left.record_bytes == bytes || !place.is_one_record && left.record_bytes < bytes)
            {
                let is_told = match left.was {
                    Was::Ends(to) => to >= report.start,
                    Was::Batch(stream, base, count) => {
                        let end = StreamOffset(base.0.saturating_add(count.into()));
                        let is_told =
                            range.start >= uploaded && is_young(stream, end, place.is_one_record);
                        if is_told {
                            let known = self.next.entry(stream).or_default();
                            *known = end.max(*known);
                        }
                        is_told
                    }
                };
                if is_told {
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
            // The log's end is gone, and nothing tells how much of it.
            unknown.push((uploaded, report.ring_bytes / MIN_RECORD_BYTES));
        }
        Loss { next: self.next, unknown }
    }

    /// The parts of `range` that no list covers.
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
    /// Where a stream goes on that ends at `next`, and whose last batch in the log ends at `log_end`: behind all that it can have had.
    /// No batch has more than `largest_count` offsets.
    pub(crate) fn skipped(
        &self,
        stream: StreamId,
        next: StreamOffset,
        log_end: LogOffset,
        largest_count: u32,
    ) -> StreamOffset {
        let known = self.next.get(&stream).map_or(next, |known| next.max(*known));
        // What lies before an intact batch of the stream is told by its base.
        let unknown = self.unknown.iter().filter(|(at, _)| *at >= log_end);
        let records = unknown.fold(0u64, |sum, (_, records)| sum.saturating_add(*records));
        let offsets = records.saturating_mul(largest_count.into()).min(MOST_SKIPPED);
        StreamOffset(known.0.saturating_add(offsets))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> Range<LogOffset> {
        LogOffset(start)..LogOffset(end)
    }

    fn part(from: u64, to: u64, part: u32, parts: u32) -> Ends {
        let next = vec![(StreamId(u64::from(part)), StreamOffset(to))];
        Ends { from: LogOffset(from), to: LogOffset(to), part, parts, next }
    }

    #[test]
    fn a_list_covers_its_range_when_all_of_its_parts_are_there() {
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
    fn what_is_skipped_is_bounded_by_the_bytes_and_the_largest_batch() {
        let next = HashMap::from([(StreamId(1), StreamOffset(50))]);
        let loss = Loss { next, unknown: vec![(LogOffset(100), 2), (LogOffset(400), 3)] };
        let skipped = |stream, next, log_end| {
            loss.skipped(StreamId(stream), StreamOffset(next), LogOffset(log_end), 10).0
        };
        assert_eq!(skipped(1, 20, 0), 100, "from the listed end on");
        assert_eq!(skipped(1, 70, 100), 120);
        assert_eq!(skipped(2, 20, 300), 50, "a batch behind the first damage tells what that cost");
        assert_eq!(skipped(2, 20, 401), 20);
        let all = Loss { next: HashMap::new(), unknown: vec![(LogOffset(0), u64::MAX)] };
        let skipped = all.skipped(StreamId(1), StreamOffset(7), LogOffset(0), u32::MAX);
        assert_eq!(skipped.0, 7 + MOST_SKIPPED);
    }
}
