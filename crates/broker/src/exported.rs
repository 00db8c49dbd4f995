//! The committed records of a part of a partition, as batches that another topic imports: at their
//! offsets, and without their producers. `docs/decisions/0028-import-at-given-offsets.md`.

use std::collections::HashSet;
use std::ops::Range;

use bytes::Bytes;
use ring::digest::{Context, SHA256};

use crate::batch::{
    self, Assembled, BatchHeader, Codec, IMPORT_EPOCH, MOST_IMPORTED_OFFSETS, Outcome,
};
use crate::records::{self, NO_TIMESTAMP, Record, Unpacked};

/// Batches without records that one part has at most: they bound its memory.
const MOST_COVERS: usize = 4096;

/// The records of a batch cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("the batch at offset {offset}: {reason}")]
pub struct BadBatch {
    /// Its first offset.
    pub offset: u64,
    /// What is wrong.
    pub reason: String,
}

/// A part of a partition.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Exported {
    /// Batches to import in this order. The first one begins where the read did, and each further
    /// one where the one before ends: where no committed record is, a batch has none.
    pub batches: Vec<Bytes>,
    /// The offset after the last batch.
    pub next: u64,
    /// The number of records in the batches.
    pub records: u64,
    /// The leader epoch of the last batch that was read, if there was one.
    pub leader_epoch: Option<i32>,
}

impl Exported {
    /// A part without offsets that begins here.
    pub fn from(next: u64) -> Self {
        Self { next, ..Self::default() }
    }

    /// Adds the committed records before `end` of a response to Fetch, which was read from the end
    /// of this part on. `aborted` are the aborted transactions of the response: the producer and
    /// the first offset of each. Offsets between batches, and before the first one, count as
    /// offsets without records. Batches that do not fit into this part are left out.
    ///
    /// # Errors
    /// A batch is damaged, or in a format older than 2, or cannot be split.
    pub fn add_fetched(
        &mut self,
        records: &Bytes,
        aborted: Vec<(i64, u64)>,
        end: u64,
    ) -> Result<(), BadBatch> {
        let batches = batches(records, self.next)?;
        let read_to = batches.last().map_or(self.next, |(header, _)| header.end()).min(end);
        self.leader_epoch = batches.last().map(|(_, batch)| batch::leader_epoch(batch));
        let is_before = |header: &BatchHeader| header.base_offset.cast_unsigned() < end;
        let wanted = batches.into_iter().take_while(|(header, _)| is_before(header));
        self.add(wanted.map(|(_, batch)| batch), aborted, end)?;
        self.cover(read_to);
        Ok(())
    }

    /// Adds the committed records before `end` of these batches, which were read from the end of
    /// this part on. `aborted` are the transactions among them that were aborted: the producer and
    /// the first offset of each. If they are too many for one part, the rest is left out.
    pub(crate) fn add(
        &mut self,
        batches: impl Iterator<Item = Bytes>,
        mut aborted: Vec<(i64, u64)>,
        end: u64,
    ) -> Result<(), BadBatch> {
        aborted.sort_by_key(|(_, first)| std::cmp::Reverse(*first));
        let mut dropping: HashSet<i64> = HashSet::new();
        for batch in batches {
            let header = BatchHeader::parse(&batch)
                .ok_or_else(|| BadBatch { offset: self.next, reason: "it has no header".into() })?;
            let base = header.base_offset.cast_unsigned();
            while let Some((id, _)) = aborted.pop_if(|(_, first)| *first <= base) {
                dropping.insert(id);
            }
            if header.is_control() {
                if batch::outcome(&batch) == Some(Outcome::Abort) {
                    dropping.remove(&header.producer_id);
                }
                continue;
            }
            if header.is_transactional() && dropping.contains(&header.producer_id) {
                continue;
            }
            // Log compaction joins batches, also across the offset of a reader, and across `end`.
            let is_whole = base >= self.next
                && header.offsets() <= MOST_IMPORTED_OFFSETS
                && base + u64::from(header.offsets()) <= end;
            let pieces = match is_whole {
                true => vec![batch],
                false => pieces(&batch, &header, self.next..end)
                    .map_err(|reason| BadBatch { offset: base, reason })?,
            };
            for piece in pieces {
                let header = BatchHeader::parse(&piece).expect("it was assembled, or parsed above");
                let base = header.base_offset.cast_unsigned();
                if !self.cover(base) {
                    return Ok(());
                }
                self.records += u64::from(header.record_count.cast_unsigned());
                self.next = base + u64::from(header.offsets());
                self.batches.push(without_producer(piece, &header));
            }
        }
        Ok(())
    }

    /// Covers the offsets up to `to` with batches without records. Returns false if they are too
    /// many for one part.
    pub fn cover(&mut self, to: u64) -> bool {
        while self.next < to && self.batches.len() < MOST_COVERS {
            let count = (to - self.next).min(MOST_IMPORTED_OFFSETS.into());
            self.batches.push(batch::without_records(self.next, count, IMPORT_EPOCH).into());
            self.next += count;
        }
        self.next >= to
    }
}

/// Splits a response to Fetch into its batches from offset `from` on. The last one may be
/// incomplete, and is left out then.
fn batches(records: &Bytes, from: u64) -> Result<Vec<(BatchHeader, Bytes)>, BadBatch> {
    let mut found = Vec::new();
    let (mut rest, mut next) = (records.clone(), from);
    while !rest.is_empty() {
        let wrong = |reason: String| BadBatch { offset: next, reason };
        batch::check_format(&rest).map_err(wrong)?;
        let Some(header) = BatchHeader::parse(&rest).filter(|it| it.len_bytes <= rest.len()) else {
            break;
        };
        let batch = rest.split_to(header.len_bytes);
        batch::check_crc(&batch, &header).map_err(wrong)?;
        if header.base_offset < 0 || header.last_offset_delta < 0 {
            return Err(wrong("an offset is negative".into()));
        }
        if header.end() <= next {
            // A response begins with the batch that has the offset; older ones were read before.
            continue;
        }
        next = header.end();
        found.push((header, batch));
    }
    if found.is_empty() && !records.is_empty() {
        let reason = format!("no complete batch in {} bytes", records.len());
        return Err(BadBatch { offset: from, reason });
    }
    Ok(found)
}

/// The number of records of a partition in a range of offsets, and a digest (SHA-256) of them: of
/// the offset, timestamp, key, value and headers of each.
#[derive(Clone)]
pub struct RecordDigest {
    /// The number of records.
    pub records: u64,
    context: Context,
}

impl Default for RecordDigest {
    fn default() -> Self {
        Self { records: 0, context: Context::new(&SHA256) }
    }
}

impl RecordDigest {
    /// Adds the records of a batch, in the order of their offsets.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn add(&mut self, batch: &[u8]) -> Result<(), BadBatch> {
        self.add_until(batch, u64::MAX)
    }

    /// Adds the records of a batch before this offset.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn add_until(&mut self, batch: &[u8], end: u64) -> Result<(), BadBatch> {
        let unpacked = unpack(batch)?;
        for record in unpacked.records().take_while(|record| record.offset < end) {
            self.records += 1;
            update(&mut self.context, &unpacked, &record);
        }
        Ok(())
    }

    /// Returns the digest, as hexadecimal digits.
    pub fn hex(&self) -> String {
        let digest = self.context.clone().finish();
        digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Returns the offset of each record of a batch, and a digest (SHA-256) of it as in
/// [`RecordDigest`].
///
/// # Errors
/// The records cannot be read.
pub fn record_digests(batch: &[u8]) -> Result<Vec<(u64, [u8; 32])>, BadBatch> {
    let unpacked = unpack(batch)?;
    let digests = unpacked.records().map(|record| {
        let mut context = Context::new(&SHA256);
        update(&mut context, &unpacked, &record);
        let digest = context.finish();
        (record.offset, digest.as_ref().try_into().expect("SHA-256 has 32 bytes"))
    });
    Ok(digests.collect())
}

fn unpack(batch: &[u8]) -> Result<Unpacked, BadBatch> {
    Unpacked::new(batch).map_err(|error| {
        let header = BatchHeader::parse(batch);
        let offset = header.map_or(0, |header| header.base_offset.cast_unsigned());
        BadBatch { offset, reason: error.to_string() }
    })
}

/// Adds offset, timestamp, key, value and headers of a record.
fn update(context: &mut Context, of: &Unpacked, record: &Record<'_>) {
    let header = of.header();
    let time = match header.is_log_append_time() {
        true => header.max_timestamp_ms,
        false => record.timestamp_ms,
    };
    context.update(&record.offset.to_be_bytes());
    context.update(&time.to_be_bytes());
    // Key, value and headers have their lengths in front of them.
    context.update(record.rest);
}

/// Returns the records of a batch at these offsets, in batches that an import may send.
fn pieces(batch: &[u8], header: &BatchHeader, wanted: Range<u64>) -> Result<Vec<Bytes>, String> {
    let unpacked = Unpacked::new(batch).map_err(|error| error.to_string())?;
    let records: Vec<_> =
        unpacked.records().filter(|record| wanted.contains(&record.offset)).collect();
    let mut pieces = Vec::new();
    let mut rest = &records[..];
    while let Some(first) = rest.first() {
        let base = first.offset;
        let is_near = |record: &Record<'_>| record.offset - base < MOST_IMPORTED_OFFSETS.into();
        let (piece, after) = rest.split_at(rest.partition_point(is_near));
        rest = after;
        let delta = |record: &Record<'_>| i32::try_from(record.offset - base).expect("it is near");
        let mut bytes = Vec::new();
        for record in piece {
            let time = record.timestamp_ms - header.base_timestamp_ms;
            records::put_record(&mut bytes, record, time, delta(record));
        }
        let newest = piece.iter().map(|record| record.timestamp_ms).max();
        let header = Assembled {
            base_offset: base,
            last_offset_delta: delta(&piece[piece.len() - 1]),
            codec: header.codec().unwrap_or(Codec::None),
            is_log_append_time: header.is_log_append_time(),
            base_timestamp_ms: header.base_timestamp_ms,
            max_timestamp_ms: match header.is_log_append_time() {
                true => header.max_timestamp_ms,
                false => newest.unwrap_or(NO_TIMESTAMP),
            },
            record_count: i32::try_from(piece.len()).expect("no more than the batch has"),
        };
        pieces.push(records::assemble(header, &bytes).into());
    }
    Ok(pieces)
}

/// Returns a batch as an import sends it.
fn without_producer(batch: Bytes, header: &BatchHeader) -> Bytes {
    let mut bytes = batch::into_mut(batch);
    batch::set_base(&mut bytes, header.base_offset.cast_unsigned(), IMPORT_EPOCH);
    if header.is_idempotent() || header.is_transactional() {
        batch::remove_producer(&mut bytes);
    }
    bytes.freeze()
}

#[cfg(test)]
mod tests {
    use kafka_protocol::records::Compression;

    use super::*;
    use crate::batch::tests::{CODECS, encode, transactional};

    fn at(batch: &[u8], base: u64) -> Bytes {
        let mut bytes = batch.to_vec();
        batch::set_base(&mut bytes, base, 0);
        bytes.into()
    }

    fn ranges(exported: &Exported) -> Vec<(u64, u32, i32)> {
        let of = |batch: &Bytes| {
            let header = batch::check_imported(batch, u32::MAX).unwrap();
            let unpacked = Unpacked::new(batch).unwrap();
            assert_eq!(unpacked.records().count(), header.record_count as usize);
            (header.base_offset as u64, header.offsets(), header.record_count)
        };
        exported.batches.iter().map(of).collect()
    }

    #[test]
    fn what_is_not_committed_is_covered() {
        let of_transaction = |id| transactional(&encode(Compression::Lz4, (id, 0, 0), &[5]));
        let marker = |id, outcome| batch::marker(id, 0, outcome, 5);
        let batches = [
            at(&of_transaction(1), 12),
            at(&of_transaction(2), 13),
            at(&marker(1, Outcome::Abort), 14),
            at(&marker(2, Outcome::Commit), 15),
            at(&of_transaction(1), 16),
            at(&marker(1, Outcome::Commit), 17),
            at(&encode(Compression::None, (9, 2, 7), &[6, 7]), 20),
        ];
        let mut exported = Exported::from(10);
        exported.add(batches.into_iter(), vec![(1, 12)], u64::MAX).unwrap();
        let expected = [(10, 3, 0), (13, 1, 1), (14, 2, 0), (16, 1, 1), (17, 3, 0), (20, 2, 2)];
        assert_eq!(ranges(&exported), expected);
        assert_eq!((exported.next, exported.records), (22, 4));
    }

    #[test]
    fn a_batch_is_split_at_a_reader_and_at_wide_gaps() {
        const FAR: u64 = 3 << 20;
        for codec in CODECS {
            let plain = encode(codec, (-1, -1, -1), &[1, 2, 3, 4]);
            let header = BatchHeader::parse(&plain).unwrap();
            let unpacked = Unpacked::new(&plain).unwrap();
            let mut bytes = Vec::new();
            let deltas = [0, 5, FAR, FAR + 1];
            for (record, delta) in unpacked.records().zip(deltas) {
                let time = record.timestamp_ms - header.base_timestamp_ms;
                records::put_record(&mut bytes, &record, time, delta as i32);
            }
            let codec = header.codec().unwrap();
            let wide = Assembled {
                base_offset: 100,
                last_offset_delta: (2 * FAR) as i32,
                codec,
                is_log_append_time: false,
                base_timestamp_ms: header.base_timestamp_ms,
                max_timestamp_ms: 4,
                record_count: 4,
            };
            let wide: Bytes = records::assemble(wide, &bytes).into();
            let mut exported = Exported::from(103);
            exported.add([wide.clone()].into_iter(), Vec::new(), u64::MAX).unwrap();
            let most = MOST_IMPORTED_OFFSETS;
            let next = 106 + u64::from(most);
            let expected = [
                (103, 2, 0),
                (105, 1, 1),
                (106, most, 0),
                (next, most, 0),
                (next + u64::from(most), most - 6, 0),
                (100 + FAR, 2, 2),
            ];
            assert_eq!(ranges(&exported), expected, "{codec:?}");
            let last = BatchHeader::parse(exported.batches.last().unwrap()).unwrap();
            assert_eq!((last.max_timestamp_ms, last.codec()), (4, Some(codec)));
            let mut exported = Exported::from(100);
            exported.add([wide].into_iter(), Vec::new(), 103).unwrap();
            assert_eq!(ranges(&exported), [(100, 1, 1)], "one record is before the end");
        }
    }

    #[test]
    fn a_part_is_bounded() {
        let mut exported = Exported::default();
        assert!(!exported.cover(1 << 40));
        assert_eq!(exported.next, MOST_COVERS as u64 * u64::from(MOST_IMPORTED_OFFSETS));
        assert_eq!(exported.batches.len(), MOST_COVERS);
    }
}
