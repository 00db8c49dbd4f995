//! The model: the required content of the log, kept beside it.

use std::collections::BTreeMap;
use std::ops::Range;

use alluvium_device::sim::Random;
use alluvium_wal::{HeaderInfo, Inspection, LogOffset, Record, RecoveryReport, Slot, Wal};

use crate::plug::Hits;
use crate::ring::{PAGE, Ring, padded};

/// A record that was appended and not dropped.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) id: u64,
    pub(crate) end: u64,
    len: usize,
    epoch: u32,
    /// Everything before it was durable when it was appended.
    proof: u64,
    /// Whether it was acknowledged, or handed out by a recovery: it must not disappear.
    pub(crate) promised: bool,
}

/// The model; see the module documentation.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    seed: u64,
    pub(crate) ring: Ring,
    next_id: u64,
    /// Epoch of the last opening.
    epoch: u32,
    pub(crate) records: BTreeMap<u64, Entry>,
    /// Records that a recovery has dropped, and those that an old owner appended; they must not
    /// come back.
    dropped: BTreeMap<(u64, u64), Entry>,
    /// The certain trim offset, and the greatest one ever requested.
    pub(crate) trimmed: u64,
    pub(crate) trim_asked: u64,
    /// The mark that is certainly durable, and the greatest one ever requested.
    pub(crate) mark: u64,
    pub(crate) mark_asked: u64,
}

/// The findings of a recovery.
pub(crate) struct Seen<'a> {
    pub(crate) records: &'a [Record],
    pub(crate) report: &'a RecoveryReport,
    /// The header from which it recovered.
    pub(crate) header: &'a HeaderInfo,
}

impl Model {
    pub(crate) fn new(seed: u64, header: &HeaderInfo) -> Self {
        Self {
            seed,
            ring: Ring::of(header),
            next_id: 0,
            epoch: header.epoch,
            records: BTreeMap::new(),
            dropped: BTreeMap::new(),
            trimmed: 0,
            trim_asked: 0,
            mark: 0,
            mark_asked: 0,
        }
    }

    /// The payload of record `id`: its number, then bytes derived from it.
    fn payload(&self, id: u64, len: usize) -> Vec<u8> {
        let mut random = Random::new(self.seed ^ id.wrapping_mul(0x9e37_79b9));
        let mut payload: Vec<u8> = Vec::with_capacity(len + 8);
        payload.extend(id.to_le_bytes());
        while payload.len() < len {
            payload.extend(random.next_u64().to_le_bytes());
        }
        payload.truncate(len);
        payload
    }

    pub(crate) fn next_payload(&self, len: usize) -> Vec<u8> {
        self.nth_payload(0, len)
    }

    /// The payload that follows `n` others, of a record of the same batch.
    pub(crate) fn nth_payload(&self, n: u64, len: usize) -> Vec<u8> {
        self.payload(self.next_id + n, len)
    }

    /// Records that the payload of [`Model::next_payload`] was appended.
    pub(crate) fn appended(
        &mut self,
        offset: LogOffset,
        end: LogOffset,
        len: usize,
        durable: LogOffset,
    ) -> Result<(), String> {
        if let Some((last, entry)) = self.records.last_key_value()
            && (offset.0 < entry.end || offset.0 - entry.end >= 2 * PAGE)
        {
            return Err(format!("append at {offset} after the record {last}..{}", entry.end));
        }
        let entry = self.entry(end, len, self.epoch, durable);
        self.records.insert(offset.0, entry);
        Ok(())
    }

    /// Records that the payload of [`Model::next_payload`] was appended by an old owner.
    pub(crate) fn appended_late(
        &mut self,
        offset: LogOffset,
        end: LogOffset,
        len: usize,
        epoch: u32,
    ) {
        let entry = self.entry(end, len, epoch, offset);
        self.dropped.insert((offset.0, entry.id), entry);
    }

    /// With `probability`, returns a new mark and records it as requested.
    pub(crate) fn next_mark(&mut self, random: &mut Random, probability: f64) -> Option<u64> {
        random.chance(probability).then(|| {
            self.mark_asked += 1 + random.below(3);
            self.mark_asked
        })
    }

    /// Records that the log was opened with this mark, or with its previous one.
    pub(crate) fn opened(&mut self, wal: &Wal, given: Option<u64>) -> Result<(), String> {
        let mark = wal.mark();
        if given.is_some_and(|given| given != mark) || mark < self.mark {
            return Err(format!("opened with {given:?} after {}: the mark is {mark}", self.mark));
        }
        self.mark = mark;
        self.mark_asked = mark; // pending requests are forgotten
        Ok(())
    }

    fn entry(&mut self, end: LogOffset, len: usize, epoch: u32, durable: LogOffset) -> Entry {
        let id = self.next_id;
        self.next_id += 1;
        Entry { id, end: end.0, len, epoch, proof: durable.0, promised: false }
    }

    /// Records that everything before `durable` was acknowledged.
    pub(crate) fn acknowledged(&mut self, durable: LogOffset) {
        for entry in self.records.values_mut().rev().skip_while(|entry| entry.end > durable.0) {
            if entry.promised {
                break;
            }
            entry.promised = true;
        }
    }

    fn hit(&self, hits: &Hits, range: &Range<u64>) -> bool {
        self.ring.on_device(range).any(|piece| hits.any_in(&piece))
    }

    /// Records that the log may be in another ring now. `hits` are moved with it.
    pub(crate) fn resized(&mut self, header: &HeaderInfo, hits: &mut Hits) {
        let ring = Ring::of(header);
        if ring != self.ring {
            // Includes the part cut off by the walk of the resize, which is not judged yet.
            let end = self.records.last_key_value().map_or(0, |(_, last)| last.end);
            hits.moved(self.ring, ring, &(header.trim.0..end));
            self.ring = ring;
        }
    }

    /// Checks the headers before a recovery from them.
    pub(crate) fn check_headers(&self, found: &Inspection, hits: &Hits) -> Result<(), String> {
        let newest = found.header.epoch;
        // If an old owner has written a header, rot in the other one is enough to bring the old one
        // back.
        if newest < self.epoch && !hits.late_header {
            return Err(format!("the newest header is of epoch {newest}, after {}", self.epoch));
        }
        let mark = found.header.mark;
        if mark < self.mark && !hits.late_header {
            return Err(format!("the mark is {mark}, but {} was durable", self.mark));
        }
        if mark > self.mark_asked && !hits.late_header {
            return Err(format!(
                "the mark is {mark}, but none above {} was requested",
                self.mark_asked
            ));
        }
        for slot in &found.slots {
            let Slot::Valid(header) = slot else { continue };
            for (offset, entry) in self.records.range(header.durable.0..) {
                let outstanding = entry.end - entry.proof;
                if entry.epoch == header.epoch && outstanding > header.window_bytes {
                    return Err(format!(
                        "record {offset}..{} was appended with {outstanding} bytes outstanding, a \
                         header states a window of {}",
                        entry.end, header.window_bytes
                    ));
                }
            }
        }
        Ok(())
    }

    /// Checks the records that a walk has handed out, complete or not.
    fn check_records(
        &self,
        seen: &[Record],
        start: u64,
        epoch_start: LogOffset,
        hits: &Hits,
    ) -> Result<(), String> {
        let mut last = start;
        for record in seen {
            let (offset, end) = (record.offset.0, record.end.0);
            if offset < last {
                return Err(format!(
                    "record {offset}..{end} is out of order: the last one ended at {last}"
                ));
            }
            last = end;
            let genuine = |entry: &Entry| {
                entry.end == end
                    && entry.epoch == record.epoch
                    && record.payload == self.payload(entry.id, entry.len)
            };
            if self.records.get(&offset).is_some_and(genuine) {
                continue;
            }
            let dropped = self
                .dropped
                .range((offset, 0)..=(offset, u64::MAX))
                .any(|(_, entry)| genuine(entry));
            match dropped {
                // A write that the disk lost or misdirected uncovers an earlier record, and a late
                // write puts one there: the limit stated in section 8 of the format. Neither
                // happens in the newest epoch.
                true if self.hit(hits, &(offset..end)) && record.offset < epoch_start => {}
                true => return Err(format!("the dropped record {offset}..{end} has come back")),
                false => return Err(format!("record {offset}..{end} was never written")),
            }
        }
        Ok(())
    }

    fn check_trim(&self, start: u64) -> Result<(), String> {
        if start < self.trimmed {
            return Err(format!(
                "the log starts at {start}, but {} was trimmed durably",
                self.trimmed
            ));
        }
        if start > self.trim_asked {
            return Err(format!(
                "the log starts at {start}, but no trim beyond {} was requested",
                self.trim_asked
            ));
        }
        Ok(())
    }

    /// Records that a recovery was interrupted after it had handed out `seen`, which must not
    /// disappear.
    pub(crate) fn interrupted(
        &mut self,
        seen: &[Record],
        header: &HeaderInfo,
        hits: &Hits,
    ) -> Result<(), String> {
        let Some(first) = seen.first() else { return Ok(()) };
        self.check_trim(self.trimmed.max(first.offset.0.min(self.trim_asked)))?;
        self.check_records(seen, self.trimmed, header.epoch_start, hits)?;
        self.promise(seen);
        Ok(())
    }

    fn promise(&mut self, seen: &[Record]) {
        for record in seen {
            if let Some(entry) = self.records.get_mut(&record.offset.0) {
                entry.promised = true;
            }
        }
    }

    /// Records a complete recovery. `hits` are the faults that may excuse a loss; without any,
    /// nothing is excused.
    pub(crate) fn recovered(&mut self, seen: &Seen<'_>, hits: &Hits) -> Result<(), String> {
        let report = seen.report;
        let (start, end) = (report.start.0, report.end.0);
        self.check_trim(start)?;
        self.check_records(seen.records, start, seen.header.epoch_start, hits)?;
        let handed_out = |offset: u64| {
            seen.records.binary_search_by_key(&offset, |record| record.offset.0).is_ok()
        };
        let reported = |range: &Range<u64>| {
            report
                .damage
                .iter()
                .any(|damage| damage.range.start.0 < range.end && range.start < damage.range.end.0)
        };
        // A lost write uncovers a dropped record, and the padding after it, in place of later
        // records: a limit stated in section 8.
        let uncovered = |range: &Range<u64>| {
            let before = seen.records.partition_point(|record| record.offset.0 < range.end);
            before.checked_sub(1).is_some_and(|last| {
                let last = &seen.records[last];
                self.records.get(&last.offset.0).is_none_or(|live| live.end != last.end.0)
            })
        };
        // The rest of a hit record that has an uncovered padding in its middle.
        let rest_of_hit = |range: &Range<u64>| {
            let before = self.records.range(..range.end).rev();
            before
                .take_while(|(_, entry)| entry.end > range.start)
                .any(|(&offset, entry)| self.hit(hits, &(offset..entry.end)))
        };
        // The remains, before the page boundary, of a padding whose header was hit behind that
        // boundary.
        let start_of_hit_padding = |range: &Range<u64>| {
            let before = self.records.range(..range.start).next_back();
            let follows = before.is_some_and(|(_, entry)| entry.end == range.start);
            (follows || range.start == start)
                && range.end <= padded(range.start)
                && self.hit(hits, &(range.start..padded(range.start)))
        };
        for damage in &report.damage {
            // The rest of what was there follows an uncovered record.
            let range = damage.range.start.0..damage.range.end.0;
            let excused = self.hit(hits, &range)
                || uncovered(&range)
                || rest_of_hit(&range)
                || start_of_hit_padding(&range);
            if !excused {
                return Err(format!("damage where no fault hit: {damage}"));
            }
        }
        // It also follows an uncovered padding alone, after a record or damage.
        let under_padding = |range: &Range<u64>| {
            let records = seen.records.iter().map(|record| record.end.0);
            let damage = report.damage.iter().map(|damage| damage.range.end.0);
            let before = records.chain(damage).filter(|&end| end <= range.start).max();
            before.is_some_and(|end| range.end <= padded(end))
        };
        for (&offset, entry) in self.records.range(start..) {
            let range = offset..entry.end;
            if offset < end {
                // Before the end, a record may only be missing if that is reported; and only a hit
                // record may be damaged.
                let excused = (reported(&range) || uncovered(&range) || under_padding(&range))
                    && self.hit(hits, &range);
                if !handed_out(offset) && !excused {
                    return Err(format!(
                        "record {offset}..{} is missing before the end {end}",
                        entry.end
                    ));
                }
            } else if entry.promised && !self.end_excused(hits, end, seen.header.window_bytes) {
                return Err(format!(
                    "the promised record {offset}..{} is lost: the log ends at {end}",
                    entry.end
                ));
            }
        }
        let lost = self.records.split_off(&end);
        self.dropped.extend(lost.into_iter().map(|(offset, entry)| ((offset, entry.id), entry)));
        self.records = self.records.split_off(&start);
        self.epoch = report.epoch;
        self.trimmed = start;
        self.trim_asked = start; // pending requests are forgotten
        self.promise(seen.records);
        Ok(())
    }

    /// Whether a fault explains that the log ends at `end` although promised records follow: the
    /// record at `end` was hit, and no intact record behind it proves that it was durable. See the
    /// limit stated in the format.
    fn end_excused(&self, hits: &Hits, end: u64, window_bytes: u64) -> bool {
        let Some((_, first)) = self.records.range(end..).next() else { return false };
        let proven = self.records.range(end..end + window_bytes).any(|(&offset, entry)| {
            entry.promised && entry.proof > end && !self.hit(hits, &(offset..entry.end))
        });
        self.hit(hits, &(end..first.end)) && !proven
    }
}
