//! Tests of the passes against a model that holds the records in a list.

use std::collections::{BTreeMap, HashSet};

use alluvium_stream::{Batch, Rewrite, StoredPart, StreamOffset};
use bytes::{Bytes, BytesMut};
use kafka_protocol::records::{
    Compression, Record, RecordBatchDecoder, RecordBatchEncoder, RecordEncodeOptions, TimestampType,
};
use proptest::prelude::*;

use super::cleaner::Cleaner;
use super::keys::{AbortedTransactions, FirstPass};
use super::*;
use crate::batch::{self, Outcome, tests::transactional};
use crate::producer_state::ProducerStates;

/// A record as a reader sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    offset: u64,
    timestamp_ms: i64,
    key: Option<Vec<u8>>,
    value: Option<Vec<u8>>,
}

#[derive(Clone, Debug)]
enum Step {
    /// Records (key, value, time), optionally in a producer's transaction, optionally with the time
    /// of append.
    Batch {
        records: Vec<(Option<u8>, Option<u8>, i64)>,
        transaction: Option<i64>,
        codec: u8,
        appended_ms: Option<i64>,
    },
    End {
        producer: i64,
        outcome: Outcome,
    },
    /// A batch whose records cannot be read.
    Garbage,
}

fn codec(number: u8) -> Compression {
    match number {
        0 => Compression::None,
        1 => Compression::Gzip,
        2 => Compression::Snappy,
        3 => Compression::Lz4,
        _ => Compression::Zstd,
    }
}

/// Key, value and time of a record.
type Encoded = (Option<Vec<u8>>, Option<Vec<u8>>, i64);

pub(crate) fn encode(
    records: &[Encoded],
    producer: (i64, i16, i32),
    compression: Compression,
) -> Bytes {
    let record = |(index, (key, value, timestamp)): (usize, &Encoded)| Record {
        transactional: false,
        control: false,
        delete_horizon: false,
        partition_leader_epoch: -1,
        producer_id: producer.0,
        producer_epoch: producer.1,
        timestamp_type: TimestampType::Creation,
        offset: index as i64,
        sequence: producer.2.wrapping_add(index as i32),
        timestamp: *timestamp,
        key: key.clone().map(Bytes::from),
        value: value.clone().map(Bytes::from),
        headers: [("h".into(), Some(Bytes::from_static(b"x")))].into(),
    };
    let records: Vec<_> = records.iter().enumerate().map(record).collect();
    let mut out = BytesMut::new();
    let options = RecordEncodeOptions { version: 2, compression };
    RecordBatchEncoder::encode(&mut out, &records, &options).unwrap();
    out.freeze()
}

/// A partition as it was written.
#[derive(Default)]
struct Log {
    batches: Vec<Batch>,
    producers: ProducerStates,
    /// All records, with the producer of those in a transaction.
    records: Vec<(Seen, Option<i64>)>,
    /// Offset, producer and outcome.
    markers: Vec<(u64, i64, Outcome)>,
    /// Offsets of unreadable batches.
    garbage: Vec<u64>,
    sequences: BTreeMap<i64, i32>,
}

impl Log {
    fn next(&self) -> u64 {
        self.batches.last().map_or(0, |last| last.end().0)
    }

    fn push(&mut self, mut bytes: Vec<u8>) {
        let base = self.next();
        batch::set_base(&mut bytes, base, 0);
        let header = BatchHeader::parse(&bytes).unwrap();
        self.batches.push(Batch {
            base: StreamOffset(base),
            count: header.offsets(),
            max_timestamp_ms: header.max_timestamp_ms,
            payload: bytes.into(),
        });
        let (from, to) = (StreamOffset(base), StreamOffset(self.next()));
        self.producers.replay(from, &self.batches[self.batches.len() - 1..], to, 0);
    }

    fn step(&mut self, step: &Step) {
        let base = self.next();
        match step {
            Step::Batch { records, transaction, codec: number, appended_ms } => {
                // Long values, so that the output has several batches.
                let value = |value: u8| vec![value; 9_000 * usize::from(value % 7)];
                let encoded: Vec<_> = records
                    .iter()
                    .map(|(key, v, ms)| (key.map(|key| vec![key]), v.map(value), *ms))
                    .collect();
                let sequence = transaction.map(|id| self.sequences.entry(id).or_default());
                let producer = match (transaction, sequence) {
                    (Some(id), Some(sequence)) => {
                        *sequence += records.len() as i32;
                        (*id, 0, *sequence - records.len() as i32)
                    }
                    _ => (-1, -1, -1),
                };
                let mut bytes = encode(&encoded, producer, codec(*number));
                if transaction.is_some() {
                    bytes = transactional(&bytes);
                }
                let mut bytes = bytes.to_vec();
                if let Some(ms) = appended_ms {
                    batch::set_log_append_time(&mut bytes, *ms);
                }
                self.push(bytes);
                for (index, (key, value, ms)) in encoded.into_iter().enumerate() {
                    let offset = base + index as u64;
                    let timestamp_ms = appended_ms.unwrap_or(ms);
                    self.records.push((Seen { offset, timestamp_ms, key, value }, *transaction));
                }
            }
            Step::End { producer, outcome } => {
                self.push(batch::marker(*producer, 0, *outcome, 5));
                self.markers.push((base, *producer, *outcome));
            }
            Step::Garbage => {
                let mut bytes =
                    encode(&[(None, None, 1)], (-1, -1, -1), Compression::Gzip).to_vec();
                let len = bytes.len();
                bytes[len - 9] ^= 0xff;
                batch::set_max_timestamp(&mut bytes, 1);
                self.push(bytes);
                self.garbage.push(base);
            }
        }
    }

    /// Whether the record's transaction was aborted.
    fn is_aborted(&self, offset: u64, transaction: Option<i64>) -> bool {
        let end = self.markers.iter().find(|(at, id, _)| Some(*id) == transaction && *at > offset);
        end.is_some_and(|(_, _, outcome)| *outcome == Outcome::Abort)
    }

    /// The records of [`Self::compacted`] that were not aborted.
    fn committed(&self, end: u64, tombstones_before: u64) -> Vec<Seen> {
        let aborted: HashSet<u64> = self
            .records
            .iter()
            .filter(|(record, transaction)| self.is_aborted(record.offset, *transaction))
            .map(|(record, _)| record.offset)
            .collect();
        let mut left = self.compacted(end, tombstones_before);
        left.retain(|record| !aborted.contains(&record.offset));
        left
    }

    /// The expected records after everything before `end` was compacted; tombstones before
    /// `tombstones_before` are removed.
    fn compacted(&self, end: u64, tombstones_before: u64) -> Vec<Seen> {
        let first_garbage = self.garbage.first().copied().unwrap_or(u64::MAX);
        let stays = |(index, (record, transaction)): (usize, &(Seen, Option<i64>))| {
            if record.offset >= end {
                return true;
            }
            let replaces = |(other, transaction): &(Seen, Option<i64>)| {
                other.key == record.key
                    && other.offset < end
                    && !self.is_aborted(other.offset, *transaction)
            };
            record.key.is_some()
                && !self.is_aborted(record.offset, *transaction)
                && !self.records[index + 1..].iter().any(replaces)
                && (record.value.is_some() || record.offset >= tombstones_before.min(first_garbage))
        };
        let all = self.records.iter().enumerate();
        all.filter(|(index, record)| stays((*index, record)))
            .map(|(_, (seen, _))| seen.clone())
            .collect()
    }
}

/// Reads committed records as a client does, `piece` batches at a time: it drops the records of an
/// aborted transaction from the transaction's first offset until it meets the marker.
fn read_committed(batches: &[Batch], producers: &ProducerStates, piece: usize) -> Vec<Seen> {
    let mut seen = Vec::new();
    for fetched in batches.chunks(piece) {
        let aborted = producers.aborted_among(fetched[0].base, fetched);
        let mut listed: Vec<_> =
            aborted.iter().map(|aborted| (aborted.first_offset, aborted.producer_id)).collect();
        listed.sort_unstable();
        let mut dropped = HashSet::new();
        for batch in fetched {
            let begun = listed.partition_point(|(first, _)| *first < batch.end().0);
            dropped.extend(listed.drain(..begun).map(|(_, id)| id));
            let header = BatchHeader::parse(&batch.payload).unwrap();
            if header.is_control() {
                if batch::outcome(&batch.payload) == Some(Outcome::Abort) {
                    dropped.remove(&header.producer_id);
                }
            } else if !(header.is_transactional() && dropped.contains(&header.producer_id)) {
                seen.extend(read(std::slice::from_ref(batch)));
            }
        }
    }
    seen
}

/// Reads all records; markers and unreadable batches are left out.
fn read(batches: &[Batch]) -> Vec<Seen> {
    let mut seen = Vec::new();
    for batch in batches {
        let header = BatchHeader::parse(&batch.payload).unwrap();
        assert_eq!(header.len_bytes, batch.payload.len());
        assert_eq!((header.base_offset as u64, header.offsets()), (batch.base.0, batch.count));
        assert_eq!(header.max_timestamp_ms, batch.max_timestamp_ms);
        assert_eq!(header.crc, crc32c::crc32c(&batch.payload[21..]));
        if header.is_control() || header.record_count == 0 {
            continue;
        }
        let Ok(read) = RecordBatchDecoder::decode(&mut batch.payload.clone()) else { continue };
        let greatest = read.records.iter().map(|record| record.timestamp).max();
        for record in read.records {
            assert_eq!(record.headers.len(), 1);
            let timestamp_ms = match header.is_log_append_time() {
                true => header.max_timestamp_ms,
                false => {
                    assert_eq!(greatest, Some(header.max_timestamp_ms));
                    record.timestamp
                }
            };
            seen.push(Seen {
                offset: record.offset as u64,
                timestamp_ms,
                key: record.key.map(|key| key.to_vec()),
                value: record.value.map(|value| value.to_vec()),
            });
        }
    }
    seen
}

/// Runs both passes in pieces of `piece` batches.
fn pass(
    batches: &[Batch],
    producers: &ProducerStates,
    (from, end): (u64, u64),
    tombstones_before: u64,
    piece: usize,
) -> Vec<Batch> {
    let aborted = AbortedTransactions::new(producers.aborted_in(0, u64::MAX));
    let mut first = FirstPass::new(from, aborted, MAX_KEYS);
    let dirty = batches.iter().filter(|batch| batch.base.0 >= from && batch.base.0 < end);
    assert!(first.batches(&dirty.cloned().collect::<Vec<_>>()));
    let mut cleaner = Cleaner::new(first, end, tombstones_before);
    let mut out = Vec::new();
    for step in batches.chunks(piece) {
        if step[0].base.0 >= end {
            out.extend_from_slice(step);
            continue;
        }
        for batches in step.chunks(2) {
            cleaner.batches(batches.to_vec(), &mut out);
        }
        cleaner.end(step[step.len() - 1].end(), &mut out);
    }
    for (one, next) in out.iter().zip(&out[1..]) {
        assert_eq!(one.end(), next.base);
    }
    assert_eq!(out[0].base, batches[0].base);
    assert_eq!(out[out.len() - 1].end(), batches[batches.len() - 1].end());
    out
}

fn step() -> impl Strategy<Value = Step> {
    let key = prop_oneof![1 => Just(None), 12 => (0u8..8).prop_map(Some)];
    let value = prop_oneof![1 => Just(None), 3 => any::<u8>().prop_map(Some)];
    let time =
        prop_oneof![8 => 0i64..1_000, 1 => Just(-1), 1 => any::<i64>().prop_map(|ms| ms / 4)];
    let records = prop::collection::vec((key, value, time), 1..6);
    let transaction = prop_oneof![2 => Just(None), 1 => (0i64..3).prop_map(Some)];
    let appended_ms = prop_oneof![4 => Just(None), 1 => (0i64..2).prop_map(Some)];
    let batch = (records, transaction, 0u8..5, appended_ms).prop_map(
        |(records, transaction, codec, appended_ms)| Step::Batch {
            records,
            transaction,
            codec,
            appended_ms,
        },
    );
    let outcome = prop_oneof![Just(Outcome::Commit), Just(Outcome::Abort)];
    let end = (0i64..3, outcome).prop_map(|(producer, outcome)| Step::End { producer, outcome });
    prop_oneof![60 => batch, 20 => end, 1 => Just(Step::Garbage)]
}

/// Records of different codecs do not share a batch, nor does a large record with others: a batch
/// of a few KiB could grow to 64 MiB, and with it the storage, and fetch responses beyond what was
/// reserved for them.
#[test]
fn a_batch_does_not_absorb_its_neighbours() {
    let mut log = Log::default();
    let large = vec![0; 8 << 20];
    for (key, value, codec) in [
        (b"a", vec![1; 10], Compression::None),
        (b"b", large.clone(), Compression::Zstd),
        (b"c", vec![2; 10], Compression::Zstd),
        (b"d", vec![3; 10], Compression::Lz4),
        (b"e", large, Compression::Lz4),
    ] {
        // Only the last of the two records with the key stays, so each batch is rewritten.
        let key = Some(key.to_vec());
        let records = [(key.clone(), Some(vec![]), 1), (key, Some(value), 1)];
        log.push(encode(&records, (-1, -1, -1), codec).to_vec());
    }
    let before: Vec<usize> = log.batches.iter().map(|batch| batch.payload.len()).collect();
    let out = pass(&log.batches, &log.producers, (0, 10), 0, 5);
    let last: Vec<Seen> = read(&log.batches).into_iter().skip(1).step_by(2).collect();
    assert_eq!(read(&out), last);
    let after: Vec<usize> = out.iter().map(|batch| batch.payload.len()).collect();
    assert_eq!(after.len(), 5, "{before:?} {after:?}");
    for (before, after) in before.iter().zip(&after) {
        assert!(*after <= before + before / 4 + 64, "{before} {after}");
    }
}

/// A consumer that reads a compacted batch learns the epoch in which its records were appended. No
/// batch of an epoch reaches over the end of the epoch, although its last record is removed and
/// offsets are lost behind it.
#[test]
fn batches_of_different_leader_epochs_are_not_joined() {
    let mut log = Log::default();
    let epochs = [(b"a", 0), (b"b", 0), (b"c", 0), (b"c", 3), (b"d", 3), (b"e", 4)];
    for (at, (key, epoch)) in epochs.into_iter().enumerate() {
        let records = [(Some(key.to_vec()), Some(vec![1]), 1)];
        log.push(encode(&records, (-1, -1, -1), Compression::None).to_vec());
        let batch = log.batches.last_mut().unwrap();
        // 3 to 10 are lost.
        let base = batch.base.0 + if at == 3 { 7 } else { 0 };
        let mut bytes = batch.payload.to_vec();
        batch::set_base(&mut bytes, base, epoch);
        *batch = Batch { base: StreamOffset(base), payload: bytes.into(), ..batch.clone() };
    }
    let out = pass(&log.batches, &log.producers, (0, 13), 0, 6);
    let epochs = out.iter().map(|it| (it.base.0, it.end().0, batch::leader_epoch(&it.payload)));
    assert_eq!(epochs.collect::<Vec<_>>(), [(0, 2, 0), (2, 12, 3), (12, 13, 4)]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Passes that follow one another, each over the output of the one before, and without the
    /// aborted transactions that it covered.
    #[test]
    fn the_last_record_of_each_key_stays(
        steps in prop::collection::vec(step(), 1..60),
        cuts in prop::collection::vec(
            (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
            1..4,
        ),
        piece in 1usize..40,
    ) {
        let mut log = Log::default();
        steps.iter().for_each(|step| log.step(step));
        // Only stable records are compacted.
        for producer in 0..3 {
            log.step(&Step::End { producer, outcome: Outcome::Commit });
        }
        let mut ends: Vec<u64> =
            cuts.iter().map(|(at, _)| log.batches[at.index(log.batches.len())].end().0).collect();
        ends.sort_unstable();
        let mut batches = log.batches.clone();
        let (mut from, mut tombstones_before) = (0, 0);
        for (end, (_, before)) in ends.into_iter().zip(cuts) {
            // Only what an earlier pass compacted.
            if from > 0 {
                tombstones_before = tombstones_before.max(before.index(from as usize + 1) as u64);
            }
            batches = pass(&batches, &log.producers, (from, end), tombstones_before, piece);
            let wanted = log.compacted(end, tombstones_before);
            let got = read(&batches);
            // Unreadable batches are kept, but a reader finds no records in them.
            prop_assert_eq!(got.len(), wanted.len());
            for (got, wanted) in got.iter().zip(&wanted) {
                prop_assert_eq!(got, wanted);
            }
            log.producers.drop_aborted(StreamOffset(end));
            let wanted = log.committed(end, tombstones_before);
            prop_assert_eq!(read_committed(&batches, &log.producers, piece), wanted);
            // The dropped transactions are not needed again: later batches are folded into a
            // checkpoint without them.
            let remembered = log.producers.aborted_in(0, u64::MAX).len();
            let ended = log.markers.iter().filter(|(at, _, outcome)| {
                *at >= end && *outcome == Outcome::Abort
            });
            prop_assert!(remembered <= ended.count());
            for (offset, _, outcome) in &log.markers {
                let is_there = batches.iter().any(|batch| {
                    BatchHeader::parse(&batch.payload).unwrap().is_control()
                        && batch.base.0 == *offset
                        && batch::outcome(&batch.payload) == Some(*outcome)
                });
                let stays =
                    *offset >= end || *outcome == Outcome::Abort && *offset >= tombstones_before;
                let first_garbage = log.garbage.first().copied().unwrap_or(u64::MAX);
                if *offset < first_garbage {
                    prop_assert_eq!(is_there, stays);
                }
            }
            from = end;
        }
    }
}

fn log(records: &[(u8, Option<u8>)]) -> Log {
    let mut log = Log::default();
    for (key, value) in records {
        log.step(&Step::Batch {
            records: vec![(Some(*key), *value, 1)],
            transaction: None,
            codec: 0,
            appended_ms: None,
        });
    }
    log
}

/// Keys that do not fit into the map are left to the next pass.
#[test]
fn a_full_map_ends_the_pass() {
    let log = log(&[(1, Some(0)), (2, Some(0)), (1, Some(0)), (3, Some(0)), (1, Some(0))]);
    let mut first = FirstPass::new(0, AbortedTransactions::default(), 2);
    assert!(!first.batches(&log.batches));
    assert_eq!((first.end, first.is_full), (2, true));
    let mut cleaner = Cleaner::new(first, 2, 0);
    let mut out = Vec::new();
    cleaner.batches(log.batches.clone(), &mut out);
    cleaner.end(StreamOffset(5), &mut out);
    let offsets: Vec<_> = read(&out).iter().map(|seen| seen.offset).collect();
    assert_eq!(offsets, [0, 1, 2, 3, 4]);
    assert_eq!(out[1..], log.batches[2..], "they are unchanged");
    let part = |start, end| StoredPart {
        start: StreamOffset(start),
        end: StreamOffset(end),
        payload_bytes: 1,
        newest_ms: 1,
    };
    for (parts, full, end) in [
        (vec![part(0, 3), part(3, 9), part(9, 12)], 10, 9),
        (vec![part(0, 3), part(3, 9), part(9, 12)], 9, 9),
        (vec![part(0, 30)], 10, 10),
    ] {
        assert_eq!(end_of_full(&parts, full), end);
    }
}

#[test]
fn large_holes_are_covered_by_several_batches() {
    let two = log(&[(1, Some(1)), (2, Some(1))]);
    let far = 5_000_000_000u64;
    let mut bytes = two.batches[1].payload.to_vec();
    batch::set_base(&mut bytes, far, 0);
    let second = Batch { base: StreamOffset(far), payload: bytes.into(), ..two.batches[1].clone() };
    let first = FirstPass::new(0, AbortedTransactions::default(), MAX_KEYS);
    let mut cleaner = Cleaner::new(first, u64::MAX, 0);
    let mut out = Vec::new();
    cleaner.batches(vec![two.batches[0].clone(), second], &mut out);
    cleaner.end(StreamOffset(2 * far), &mut out);
    let ends: Vec<_> = out.iter().map(|batch| batch.end().0).collect();
    assert_eq!(ends, [1 << 31, 2 << 31, far, far + (1 << 31), far + (2 << 31), 2 * far]);
    let offsets: Vec<_> = read(&out).iter().map(|seen| seen.offset).collect();
    assert_eq!(offsets, [0, far]);
}

#[test]
fn dirty_bytes_are_those_not_compacted_that_may_be() {
    let rules = |min_lag_ms| CompactionRules {
        min_dirty_ratio: 0.5,
        min_lag_ms,
        max_lag_ms: i64::MAX,
        delete_retention_ms: 10,
    };
    let parts: Vec<_> = (0..4)
        .map(|i| StoredPart {
            start: StreamOffset(i * 10),
            end: StreamOffset(i * 10 + 10),
            payload_bytes: 100,
            newest_ms: 1_000 + i.cast_signed(),
        })
        .collect();
    // Clean end, stable end, min.compaction.lag.ms; clean bytes, dirty bytes, end.
    for ((clean_end, last_stable, lag_ms), (clean_bytes, dirty_bytes, to)) in [
        ((0, 40, 0), (0, 400, 40)),
        ((10, 40, 0), (100, 300, 40)),
        ((15, 40, 0), (150, 250, 40)),
        ((15, 39, 0), (150, 150, 30)),
        ((40, 40, 0), (400, 0, 40)),
        // Now is 1010.
        ((10, 40, 9), (100, 100, 20)),
        ((10, 40, 10), (100, 0, 10)),
        ((0, 5, 0), (0, 0, 0)),
    ] {
        let plan = Plan::new(&parts, clean_end, last_stable, 1_010, &rules(lag_ms));
        assert_eq!(plan, Plan { clean_bytes, dirty_bytes, to });
    }
    assert!(Plan::new(&[], 0, 0, 0, &rules(0)).dirty_ratio() == 0.0);
    assert!(Plan::new(&parts, 10, 40, 0, &rules(0)).dirty_ratio() == 0.75);
}

#[test]
fn clean_ends_are_kept_for_the_delete_retention() {
    let rules = CompactionRules {
        min_dirty_ratio: 0.5,
        min_lag_ms: 0,
        max_lag_ms: i64::MAX,
        delete_retention_ms: 1_000,
    };
    let mut cleaned = Cleaned::default();
    assert_eq!((cleaned.end(), cleaned.end_at(i64::MAX)), (0, 0));
    for time_ms in [100i64, 600, 1_200, 1_700] {
        cleaned.push(time_ms.cast_unsigned() * 2, time_ms, &rules);
    }
    assert_eq!(cleaned.ends, [(1_200, 600), (2_400, 1_200), (3_400, 1_700)]);
    assert_eq!((cleaned.end(), cleaned.end_at(1_199), cleaned.end_at(599)), (3_400, 1_200, 0));
    // A clock that goes back; and many passes, none of which waits forever.
    cleaned.push(3_500, 1_000, &rules);
    assert_eq!(cleaned.ends.last(), Some(&(3_500, 1_700)));
    let mut over = 0;
    for time_ms in 1_700i64..10_000 {
        cleaned.push(time_ms.cast_unsigned() * 3, time_ms, &rules);
        assert!(cleaned.ends.len() <= ENDS as usize + 3 && cleaned.ends.is_sorted());
        over = cleaned.end_at(time_ms - 1_000);
        assert!(over <= (time_ms - 1_000).cast_unsigned() * 3 || over <= 3_500);
    }
    assert!(over > 26_750, "{over}");
}
