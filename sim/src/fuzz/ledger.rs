//! The required content of a log: each appended record, byte by byte, and the guarantees given for
//! it.
//!
//! Whether a record is damaged is determined from the image, which either holds the record as it
//! was written or does not. The cause of the damage need not be known.

use std::collections::BTreeMap;
use std::ops::Range;

use alluvium_device::sim::Random;

use super::reference::{Log, Record, Walked};
use crate::ring::{HEADER, padded};

/// An appended record.
struct Entry {
    /// Header and payload.
    bytes: Vec<u8>,
    /// Everything before it was durable when it was appended.
    proof: u64,
    /// Whether it was acknowledged, or handed out by a recovery: it must not disappear.
    promised: bool,
    /// Whether the disk has changed the bytes here: a live record, or the padding after it, is not
    /// in its position any more; or the header of a dropped record, or the padding after it, is
    /// there again.
    hit: bool,
    padding_hit: bool,
}

impl Entry {
    fn header(&self) -> &[u8] {
        &self.bytes[..HEADER as usize]
    }
}

/// The ledger; see the module documentation.
pub(super) struct Ledger {
    id: [u8; 16],
    appended: u64,
    live: BTreeMap<u64, Entry>,
    /// Records dropped by a recovery; they must not come back.
    dropped: Vec<(u64, Entry)>,
    /// The certain trim offset, and the greatest one ever requested.
    trimmed: u64,
    trim_asked: u64,
}

impl Ledger {
    pub(super) fn new(id: [u8; 16]) -> Self {
        let (live, dropped) = (BTreeMap::new(), Vec::new());
        Self { id, appended: 0, live, dropped, trimmed: 0, trim_asked: 0 }
    }

    // -- Traffic

    /// A unique payload.
    pub(super) fn payload(&mut self, len: usize) -> Vec<u8> {
        self.appended += 1;
        let mut random = Random::new(self.appended);
        let mut payload = Vec::with_capacity(len + 8);
        while payload.len() < len {
            payload.extend(random.next_u64().to_le_bytes());
        }
        payload.truncate(len);
        payload
    }

    /// Records that `payload` was appended while everything before `durable` was durable.
    pub(super) fn append(&mut self, range: Range<u64>, epoch: u32, durable: u64, payload: &[u8]) {
        let lag = (range.start - durable) as u32;
        let mut bytes = Record::data(range.start, epoch, lag, payload).encode(&self.id).to_vec();
        bytes.extend(payload);
        assert_eq!(range.end - range.start, bytes.len() as u64, "the record's place in the log");
        let (promised, hit, padding_hit) = (false, false, false);
        self.live.insert(range.start, Entry { bytes, proof: durable, promised, hit, padding_hit });
    }

    /// Records that everything before `durable` was acknowledged.
    pub(super) fn acknowledge(&mut self, durable: u64) {
        for (offset, entry) in self.live.range_mut(..durable).rev() {
            if entry.promised {
                break;
            }
            entry.promised = offset + entry.bytes.len() as u64 <= durable;
        }
    }

    /// Ends of promised records: the possible trim offsets.
    pub(super) fn bounds(&self) -> Vec<u64> {
        let promised = self.live.iter().take_while(|(_, entry)| entry.promised);
        promised.map(|(offset, entry)| offset + entry.bytes.len() as u64).collect()
    }

    /// Records a requested trim. Returns false if an earlier one went further.
    pub(super) fn request_trim(&mut self, to: u64) -> bool {
        let further = to > self.trim_asked;
        self.trim_asked = self.trim_asked.max(to);
        further
    }

    /// Records that a trim has taken effect.
    pub(super) fn trim(&mut self, to: u64) {
        self.trimmed = self.trimmed.max(to);
    }

    /// Records that everything requested has taken effect.
    pub(super) fn close(&mut self, end: u64) {
        self.acknowledge(end);
        self.trimmed = self.trim_asked;
    }

    /// Start and end of the log.
    pub(super) fn extent(&self) -> Range<u64> {
        let last = self.live.last_key_value();
        self.trimmed..last.map_or(self.trimmed, |(offset, entry)| offset + entry.bytes.len() as u64)
    }

    /// Records that the disk has changed bytes at rest, from `before` to `after`, as seen with one
    /// of the headers.
    pub(super) fn damage(&mut self, before: &Log, after: &Log) {
        for (&offset, entry) in &mut self.live {
            let end = offset + entry.bytes.len() as u64;
            let lost = |holds: &dyn Fn(&Log) -> bool| holds(before) && !holds(after);
            entry.hit |= lost(&|log| log.holds(offset, &entry.bytes));
            entry.padding_hit |= lost(&|log| log.padding_at(end).is_some());
        }
        for (offset, entry) in &mut self.dropped {
            let end = *offset + entry.bytes.len() as u64;
            let back = |holds: &dyn Fn(&Log) -> bool| !holds(before) && holds(after);
            entry.hit |= back(&|log| log.holds(*offset, entry.header()));
            entry.padding_hit |= back(&|log| log.padding_at(end).is_some());
        }
    }

    // -- Recovery

    /// Checks the findings of a walk over `log`.
    pub(super) fn check(&self, log: &Log, walked: &Walked) -> Result<(), String> {
        let start = log.header.trim;
        if start < self.trimmed || start > self.trim_asked {
            return Err(format!(
                "the log starts at {start}; {} was trimmed, {} was requested",
                self.trimmed, self.trim_asked
            ));
        }
        self.check_found(log, walked)?;
        let handed_out = |offset: u64| {
            walked.records.binary_search_by_key(&offset, |(offset, _)| *offset).is_ok()
        };
        for (&offset, entry) in self.live.range(start..) {
            let range = offset..offset + entry.bytes.len() as u64;
            if handed_out(offset) {
                continue;
            }
            if offset < walked.end {
                let overlaps =
                    |damage: &Range<u64>| damage.start < range.end && range.start < damage.end;
                let reported = walked.damage.iter().any(overlaps);
                let broken = entry.hit && !log.holds(offset, &entry.bytes);
                if !(broken && reported || self.claimed(log, &range)) {
                    return Err(format!(
                        "record {range:?} is missing before the end {}",
                        walked.end
                    ));
                }
            } else if entry.promised && !self.end_excused(log, walked.end) {
                return Err(format!(
                    "the promised record {range:?} is lost: the log ends at {}",
                    walked.end
                ));
            }
        }
        for damage in &walked.damage {
            if !self.broken(log, damage) && !self.claimed(log, damage) {
                return Err(format!("damage reported without a fault: {damage:?}"));
            }
        }
        Ok(())
    }

    /// Checks that every record handed out was appended, and not dropped.
    fn check_found(&self, log: &Log, walked: &Walked) -> Result<(), String> {
        for (offset, payload) in &walked.records {
            let genuine = |entry: &Entry| entry.bytes[HEADER as usize..] == payload[..];
            if self.live.get(offset).is_some_and(genuine) {
                continue;
            }
            if !self.dropped.iter().any(|(at, entry)| at == offset && genuine(entry)) {
                return Err(format!("the record at {offset} was never written"));
            }
            // The record that was here is gone, which uncovers an earlier one: the limit stated in
            // section 8 of the format.
            if !self.broken(log, &(*offset..offset + HEADER)) {
                return Err(format!("the dropped record at {offset} has come back"));
            }
        }
        Ok(())
    }

    /// Whether a live record that should be in `range`, itself or with its padding, is missing
    /// because of a fault of the disk.
    fn broken(&self, log: &Log, range: &Range<u64>) -> bool {
        self.live.range(..range.end).any(|(&offset, entry)| {
            let end = offset + entry.bytes.len() as u64;
            let overlaps = |from: u64| from < range.end && range.start < padded(end);
            entry.hit && overlaps(offset) && !log.holds(offset, &entry.bytes)
                || entry.padding_hit && overlaps(end) && log.padding_at(end).is_none()
        })
    }

    /// Whether a dropped record, or the padding after it, that the disk has brought back claims a
    /// part of `range`: the limit stated in section 8 of the format.
    fn claimed(&self, log: &Log, range: &Range<u64>) -> bool {
        self.dropped.iter().any(|(offset, entry)| {
            let end = offset + entry.bytes.len() as u64;
            let overlaps = |from: u64, to: u64| from < range.end && range.start < to;
            entry.hit && overlaps(*offset, end) && log.holds(*offset, entry.header())
                || entry.padding_hit && overlaps(end, padded(end)) && log.padding_at(end).is_some()
        })
    }

    /// Whether the log may end at `end` although promised records follow: the expected record is
    /// missing, and nothing behind it proves that it was there.
    fn end_excused(&self, log: &Log, end: u64) -> bool {
        let hole = end..end + 1;
        let window = log.header.window;
        let proven = self.live.range(end + 1..end + window).any(|(&offset, entry)| {
            entry.promised
                && entry.proof > end
                && log.holds(offset, &entry.bytes)
                && !self.claimed(log, &(end..offset))
        });
        (self.broken(log, &hole) || self.claimed(log, &hole)) && !proven
    }

    /// Records that the records handed out by a walk must not disappear.
    pub(super) fn promise(&mut self, walked: &Walked) {
        for (offset, _) in &walked.records {
            if let Some(entry) = self.live.get_mut(offset) {
                entry.promised = true;
            }
        }
    }

    /// Continues the log at the end of the walk.
    pub(super) fn continue_from(&mut self, log: &Log, walked: &Walked) {
        self.promise(walked);
        // If an old record is back, the log may end inside the record that replaced it.
        while let Some(last) = self.live.last_entry() {
            if last.key() + last.get().bytes.len() as u64 <= walked.end {
                break;
            }
            let (offset, entry) = last.remove_entry();
            self.dropped.push((offset, Entry { hit: false, padding_hit: false, ..entry }));
        }
        (self.trimmed, self.trim_asked) = (log.header.trim, log.header.trim);
        // The padding after the last trimmed record is still there.
        self.live.retain(|offset, entry| offset + entry.bytes.len() as u64 >= log.header.trim);
    }
}
