//! The second pass of log compaction: selects the records to keep and assembles them into batches.

use alluvium_stream::{Batch, Rewrite, StreamOffset};

use super::keys::{AbortedTransactions, FirstPass, Keys, unpack};
use crate::batch::{self, Assembled, BatchHeader, Codec, NO_LEADER_EPOCH, Outcome};
use crate::records::{self, Record};

/// The approximate limit for a batch of several records, before compression.
const BATCH_BYTES: usize = 256 << 10;

/// The timestamps of a batch's records.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Times {
    /// Each record has its own.
    OfRecords,
    /// All have the time of their append.
    OfAppend(i64),
}

/// The records of the batch that is being assembled.
struct Open {
    records: Vec<u8>,
    count: i32,
    codec: Codec,
    times: Times,
    base_timestamp_ms: i64,
    max_timestamp_ms: i64,
    last_offset: u64,
}

/// Rewrites a partition's batches without obsolete records. The output covers the same offsets: a
/// batch also covers the offsets of the removed records before and after its own.
pub(super) struct Cleaner {
    keys: Keys,
    aborted: AbortedTransactions,
    /// Batches from this offset on stay unchanged.
    end: u64,
    /// Tombstones and markers before this offset were first compacted long enough ago to be
    /// removed.
    tombstones_before: u64,
    /// The first offset that the output does not cover yet; `None` before the first batch of a
    /// step.
    covered: Option<u64>,
    /// The leader epoch of the last batch that was read. Batches of different epochs are not
    /// joined.
    leader_epoch: i32,
    open: Option<Open>,
}

impl Cleaner {
    pub(super) fn new(first: FirstPass, end: u64, tombstones_before: u64) -> Self {
        let FirstPass { keys, aborted, .. } = first;
        let (covered, leader_epoch, open) = (None, NO_LEADER_EPOCH, None);
        Self { keys, aborted, end, tombstones_before, covered, leader_epoch, open }
    }

    fn batch(&mut self, batch: Batch, out: &mut Vec<Batch>) {
        let base = batch.base.0;
        self.covered.get_or_insert(base);
        let leader_epoch = batch::leader_epoch(&batch.payload);
        if leader_epoch != self.leader_epoch {
            if let Some(open) = &self.open {
                self.cover(open.last_offset + 1, out);
            }
            self.leader_epoch = leader_epoch;
        }
        if base >= self.end {
            return self.keep(batch, out);
        }
        let Some(header) = BatchHeader::parse(&batch.payload) else {
            return self.keep_unread(batch, out);
        };
        if header.is_control() {
            match batch::outcome(&batch.payload) {
                Some(Outcome::Commit) => {}
                // It stays as long as a reader may still hold records of the transaction.
                Some(Outcome::Abort) if base < self.tombstones_before => {}
                _ => self.keep(batch, out),
            }
            return;
        }
        if self.aborted.has(&header, base) {
            return;
        }
        let Some(unpacked) = unpack(&batch) else { return self.keep_unread(batch, out) };
        let count = unpacked.records().filter(|record| self.stays(record)).count();
        if count == header.record_count as usize
            && !header.is_transactional()
            && unpacked.len_bytes() >= BATCH_BYTES / 2
        {
            return self.keep(batch, out);
        }
        let times = match header.is_log_append_time() {
            true => Times::OfAppend(header.max_timestamp_ms),
            false => Times::OfRecords,
        };
        for record in unpacked.records() {
            if self.stays(&record) {
                self.put(&record, times, header.codec().unwrap_or(Codec::None), out);
            }
        }
    }

    fn stays(&self, record: &Record<'_>) -> bool {
        let Some(key) = record.key else { return false };
        let is_over = record.is_tombstone && record.offset < self.tombstones_before;
        !is_over && !self.keys.is_replaced(key, record.offset)
    }

    fn put(&mut self, record: &Record<'_>, times: Times, codec: Codec, out: &mut Vec<Batch>) {
        if let Some(open) = &self.open {
            let is_far = record.timestamp_ms.checked_sub(open.base_timestamp_ms).is_none();
            let is_other = open.times != times || open.codec != codec;
            // A large record gets a batch of its own: a compressed batch of its producer then
            // yields a batch about as small as before.
            let is_full = open.records.len().saturating_add(record.rest.len()) > BATCH_BYTES;
            if is_full || is_other || is_far {
                self.cover(open.last_offset + 1, out);
            }
        }
        let covered = self.covered.expect("a batch was added");
        if record.offset - covered > i32::MAX as u64 {
            self.cover(record.offset, out);
        }
        let base = self.covered.expect("a batch was added");
        let open = self.open.get_or_insert_with(|| Open {
            records: Vec::new(),
            count: 0,
            codec,
            times,
            base_timestamp_ms: record.timestamp_ms,
            max_timestamp_ms: record.timestamp_ms,
            last_offset: record.offset,
        });
        let delta_ms = record.timestamp_ms - open.base_timestamp_ms;
        let delta = i32::try_from(record.offset - base)
            .expect("the distance to the last offset is limited");
        records::put_record(&mut open.records, record, delta_ms, delta);
        open.count += 1;
        open.max_timestamp_ms = open.max_timestamp_ms.max(record.timestamp_ms);
        open.last_offset = record.offset;
    }

    /// Emits batches that cover everything before `to`.
    fn cover(&mut self, to: u64, out: &mut Vec<Batch>) {
        let mut base = self.covered.expect("a batch was added");
        let mut open = self.open.take();
        while base < to {
            let count = (to - base).min(batch::MOST_OFFSETS);
            out.push(match open.take() {
                Some(open) => assemble(base, count, self.leader_epoch, &open),
                None => {
                    let bytes = batch::without_records(base, count, self.leader_epoch);
                    batch_of(base, count, -1, bytes)
                }
            });
            base += count;
        }
        self.covered = Some(to);
    }

    fn keep(&mut self, batch: Batch, out: &mut Vec<Batch>) {
        self.cover(batch.base.0, out);
        self.covered = Some(batch.end().0);
        out.push(batch);
    }

    /// An unread batch may hold a record with any key: removing a later tombstone could bring that
    /// record back.
    fn keep_unread(&mut self, batch: Batch, out: &mut Vec<Batch>) {
        self.tombstones_before = self.tombstones_before.min(batch.base.0);
        self.keep(batch, out);
    }
}

impl Rewrite for Cleaner {
    fn batches(&mut self, batches: Vec<Batch>, out: &mut Vec<Batch>) {
        for batch in batches {
            self.batch(batch, out);
        }
    }

    fn end(&mut self, end: StreamOffset, out: &mut Vec<Batch>) {
        self.cover(end.0, out);
        self.covered = None;
    }
}

/// Assembles a batch of `count` offsets with these records.
fn assemble(base: u64, count: u64, leader_epoch: i32, open: &Open) -> Batch {
    let (is_log_append_time, max_timestamp_ms) = match open.times {
        Times::OfAppend(time_ms) => (true, time_ms),
        Times::OfRecords => (false, open.max_timestamp_ms),
    };
    let header = Assembled {
        base_offset: base,
        last_offset_delta: i32::try_from(count - 1).expect("at most 2^31 offsets"),
        codec: open.codec,
        is_log_append_time,
        base_timestamp_ms: open.base_timestamp_ms,
        max_timestamp_ms,
        record_count: open.count,
    };
    let mut bytes = records::assemble(header, &open.records);
    batch::set_base(&mut bytes, base, leader_epoch);
    batch_of(base, count, max_timestamp_ms, bytes)
}

fn batch_of(base: u64, count: u64, max_timestamp_ms: i64, payload: Vec<u8>) -> Batch {
    Batch {
        base: StreamOffset(base),
        count: u32::try_from(count).expect("at most 2^31 offsets"),
        max_timestamp_ms,
        payload: payload.into(),
    }
}
