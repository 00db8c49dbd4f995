//! Reads the committed records of a topic in a store, as batches that another topic imports: at
//! their offsets, and without their producers. `docs/decisions/0028-import-at-given-offsets.md`.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use alluvium_stream::{FetchError, Store, StreamOffset};
use bytes::Bytes;
use uuid::Uuid;

use crate::batch::{
    self, Assembled, BatchHeader, Codec, IMPORT_EPOCH, MOST_IMPORTED_OFFSETS, Outcome,
};
use crate::partition::Partition;
use crate::producer_state::Totals;
use crate::records::{self, NO_TIMESTAMP, Record, Unpacked};
use crate::topics::{META_PREFIX, Stored};

/// Batches without records that one read returns at most: they bound its memory.
const MOST_COVERS: usize = 4096;

/// A topic of a store that this process follows ([`Store::follow`]).
pub struct StoredTopic {
    /// Its id.
    pub id: Uuid,
    /// Its settings, as far as they were set.
    pub configs: BTreeMap<String, String>,
    partitions: Vec<Arc<Partition>>,
}

/// Why a topic cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The store cannot be read.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The records of a batch cannot be read.
    #[error("the batch at offset {offset}: {reason}")]
    Batch {
        /// Its first offset.
        offset: u64,
        /// What is wrong.
        reason: String,
    },
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
}

impl StoredTopic {
    /// Opens a topic; `None` if there is none of this name.
    ///
    /// # Errors
    /// Its entry in the catalog, or the state of a partition, cannot be read.
    pub fn open(store: &Store, name: &str) -> Result<Option<Self>, String> {
        let Some(entry) = store.meta_value(&format!("{META_PREFIX}{name}")) else {
            return Ok(None);
        };
        let Stored { id, streams, configs } = serde_json::from_slice(&entry)
            .map_err(|error| format!("topic {name}: its catalog entry: {error}"))?;
        let totals = Arc::new(Totals::default());
        let partitions = streams.into_iter().enumerate().map(|(index, stream)| {
            let failed = |reason: String| format!("topic {name}, partition {index}: {reason}");
            let found = store.stream(stream);
            let stream = found.ok_or_else(|| failed(format!("no stream {stream}")))?;
            let partition = Partition::follow(stream, store, totals.clone());
            partition.map(Arc::new).map_err(|error| failed(error.to_string()))
        });
        Ok(Some(Self { id, configs, partitions: partitions.collect::<Result<_, _>>()? }))
    }

    /// Returns the names of all topics of a store.
    pub fn names(store: &Store) -> Vec<String> {
        let names = store.meta(META_PREFIX).into_iter();
        names.map(|(key, _)| key[META_PREFIX.len()..].to_owned()).collect()
    }

    /// Returns the number of partitions.
    pub fn partitions(&self) -> usize {
        self.partitions.len()
    }

    /// Returns the offsets that readers of committed records see: from the log start up to the last
    /// stable offset.
    ///
    /// # Panics
    /// If there is no such partition.
    pub fn offsets(&self, partition: usize) -> Range<u64> {
        let partition = &self.partitions[partition];
        let end = partition.last_stable_offset();
        partition.stream.start_offset().0.min(end.0)..end.0
    }

    /// Returns the end of a partition, with records of transactions that are open.
    ///
    /// # Panics
    /// If there is no such partition.
    pub fn end(&self, partition: usize) -> u64 {
        self.partitions[partition].stream.durable_end().0
    }

    /// Returns the payload of all batches of a partition, in bytes.
    ///
    /// # Panics
    /// If there is no such partition.
    pub fn size_bytes(&self, partition: usize) -> u64 {
        self.partitions[partition].stream.size_bytes()
    }

    /// Reads batches from `from` on, about `max_bytes` of them, up to `end` at most, which is not
    /// beyond the last stable offset. What precedes the log start counts as offsets without
    /// records.
    ///
    /// # Errors
    /// A read fails, or a batch cannot be split.
    ///
    /// # Panics
    /// If there is no such partition.
    pub async fn read(
        &self,
        partition: usize,
        from: u64,
        end: u64,
        max_bytes: usize,
    ) -> Result<Exported, ExportError> {
        let partition = &self.partitions[partition];
        let mut exported = Exported { next: from, ..Exported::default() };
        let start = partition.stream.start_offset().0;
        if from < start {
            exported.cover(start.min(end));
            return Ok(exported);
        }
        loop {
            let snapshot = partition.read_snapshot();
            let fetched = partition.stream.fetch(StreamOffset(from), max_bytes).await?;
            let mut batches = fetched.batches;
            // Everything before it was read, or has no record.
            let read_to = batches.last().map_or(end, |batch| batch.end().0).min(end);
            batches.retain(|batch| batch.base.0 < end);
            let among = partition.aborted_among(StreamOffset(from), &batches, snapshot);
            // Some were dropped meanwhile: their records are gone, too.
            let Some(aborted) = among else { continue };
            let aborted = aborted.iter().map(|it| (it.producer_id, it.first_offset));
            let batches = batches.into_iter().map(|batch| batch.payload);
            exported.add(batches, aborted.collect(), end)?;
            exported.cover(read_to);
            return Ok(exported);
        }
    }
}

impl Exported {
    /// Adds the committed records before `end` of these batches, which were read from the end of
    /// this part on. `aborted` are the transactions among them that were aborted: the producer and
    /// the first offset of each.
    fn add(
        &mut self,
        batches: impl Iterator<Item = Bytes>,
        mut aborted: Vec<(i64, u64)>,
        end: u64,
    ) -> Result<(), ExportError> {
        aborted.sort_by_key(|(_, first)| std::cmp::Reverse(*first));
        let mut dropping: HashSet<i64> = HashSet::new();
        for batch in batches {
            let header = BatchHeader::parse(&batch).ok_or_else(|| ExportError::Batch {
                offset: self.next,
                reason: "it has no header".into(),
            })?;
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
                    .map_err(|reason| ExportError::Batch { offset: base, reason })?,
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
    fn cover(&mut self, to: u64) -> bool {
        while self.next < to && self.batches.len() < MOST_COVERS {
            let count = (to - self.next).min(MOST_IMPORTED_OFFSETS.into());
            self.batches.push(batch::without_records(self.next, count, IMPORT_EPOCH).into());
            self.next += count;
        }
        self.next >= to
    }
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
        let mut exported = Exported { next: 10, ..Exported::default() };
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
            let mut exported = Exported { next: 103, ..Exported::default() };
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
            let mut exported = Exported { next: 100, ..Exported::default() };
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
