//! The sequences of idempotent producers in one partition: a pure function of the partition's batches.
//!
//! Each batch of an idempotent producer carries the producer's id, an epoch, and the sequence number of its first record. A batch
//! that was sent twice is recognised among the producer's last five (a Java producer has at most five in
//! flight), a missing one by a gap. Layout of the checkpoint: `docs/format/producer-state.md`.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use alluvium_stream::{Batch, StreamOffset};

use crate::batch::BatchHeader;
use crate::errors::ApiError;

/// Batches of a producer that a retry is recognised among, as in Kafka.
const REMEMBERED_BATCHES: usize = 5;

/// Producers that one partition remembers. One more drops the one whose last batch is the oldest in the log.
const MAX_PRODUCERS: usize = 5_000;

/// A producer that has not appended for so long is forgotten (`producer.id.expiration.ms`).
const EXPIRATION: Duration = Duration::from_secs(86_400);
const SWEEP_INTERVAL: Duration = Duration::from_secs(600);

const FORMAT_VERSION: u8 = 1;

/// A batch that a producer has appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    base_sequence: i32,
    last_sequence: i32,
    /// Offset of its first record.
    pub(crate) base_offset: u64,
    /// Greatest timestamp of its records.
    pub(crate) max_timestamp_ms: i64,
}

impl Seen {
    /// The offset after the batch's last record.
    pub(crate) fn end(&self) -> StreamOffset {
        let delta = distance(self.base_sequence, self.last_sequence);
        StreamOffset(self.base_offset + u64::from(delta) + 1)
    }
}

/// What to do with a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is the next one, or carries no sequence.
    Append,
    /// It is in the log already, here.
    Duplicate(Seen),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Producer {
    epoch: i16,
    /// Never empty, oldest first.
    batches: VecDeque<Seen>,
    /// When it last appended, on the caller's clock; not part of the checkpoint.
    used_at: Duration,
}

impl Producer {
    fn last(&self) -> &Seen {
        self.batches.back().expect("a producer is remembered with its first batch")
    }
}

/// All producers of one partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProducerStates {
    producers: HashMap<i64, Producer>,
    swept_at: Duration,
}

/// Sequence numbers run from 0 to `i32::MAX` and then begin at 0 again:
///
/// | base | records | last |
/// |---|---|---|
/// | 0 | 1 | 0 |
/// | 2147483645 | 3 | 2147483647 |
/// | 2147483647 | 1 | 2147483647 |
/// | 2147483647 | 2 | 0 |
/// | 2147483646 | 5 | 2 |
fn advance(sequence: i32, by: u32) -> i32 {
    ((i64::from(sequence) + i64::from(by)) & i64::from(i32::MAX)) as i32
}

/// How far `to` is ahead of `from`, over the wrap: `distance(2147483646, 2)` is 4.
fn distance(from: i32, to: i32) -> u32 {
    ((i64::from(to) - i64::from(from)) & i64::from(i32::MAX)) as u32
}

impl ProducerStates {
    /// Decide about a batch; changes nothing.
    ///
    /// A producer of which nothing is known may begin with any sequence number: its state may have expired, or its records
    /// may have been deleted. So does Kafka (`ProducerAppendInfo.checkSequence`; UNKNOWN_PRODUCER_ID is history).
    ///
    /// # Errors
    /// [`ApiError::InvalidProducerEpoch`] for an epoch that a newer one has replaced, [`ApiError::OutOfOrderSequence`] for a
    /// gap, or for a repetition that is too old to be recognised.
    pub(crate) fn check(&self, batch: &BatchHeader) -> Result<Verdict, ApiError> {
        if !batch.is_idempotent() {
            return Ok(Verdict::Append);
        }
        let Some(producer) = self.producers.get(&batch.producer_id) else {
            return Ok(Verdict::Append);
        };
        let out_of_order = |expected| {
            Err(ApiError::OutOfOrderSequence {
                producer_id: batch.producer_id,
                epoch: batch.producer_epoch,
                got: batch.base_sequence,
                expected,
            })
        };
        if batch.producer_epoch < producer.epoch {
            return Err(ApiError::InvalidProducerEpoch {
                producer_id: batch.producer_id,
                got: batch.producer_epoch,
                current: producer.epoch,
            });
        }
        if batch.producer_epoch > producer.epoch {
            return if batch.base_sequence == 0 { Ok(Verdict::Append) } else { out_of_order(0) };
        }
        let last_sequence = advance(batch.base_sequence, batch.offsets() - 1);
        let same = |seen: &&Seen| {
            seen.base_sequence == batch.base_sequence && seen.last_sequence == last_sequence
        };
        if let Some(seen) = producer.batches.iter().find(same) {
            return Ok(Verdict::Duplicate(*seen));
        }
        let expected = advance(producer.last().last_sequence, 1);
        if batch.base_sequence == expected { Ok(Verdict::Append) } else { out_of_order(expected) }
    }

    /// Remember a batch that is in the log at `base_offset`. `now` is any clock that does not go back.
    pub(crate) fn record(
        &mut self,
        batch: &BatchHeader,
        base_offset: u64,
        max_timestamp_ms: i64,
        now: Duration,
    ) {
        if !batch.is_idempotent() {
            return;
        }
        let seen = Seen {
            base_sequence: batch.base_sequence,
            last_sequence: advance(batch.base_sequence, batch.offsets() - 1),
            base_offset,
            max_timestamp_ms,
        };
        let producer = self.producers.entry(batch.producer_id).or_insert_with(|| Producer {
            epoch: batch.producer_epoch,
            batches: VecDeque::with_capacity(REMEMBERED_BATCHES),
            used_at: now,
        });
        if producer.epoch != batch.producer_epoch {
            producer.epoch = batch.producer_epoch;
            producer.batches.clear();
        }
        if producer.batches.len() == REMEMBERED_BATCHES {
            producer.batches.pop_front();
        }
        producer.batches.push_back(seen);
        producer.used_at = now;

        if now.saturating_sub(self.swept_at) >= SWEEP_INTERVAL {
            self.swept_at = now;
            self.producers.retain(|_, producer| now.saturating_sub(producer.used_at) < EXPIRATION);
        }
        if self.producers.len() > MAX_PRODUCERS {
            let oldest =
                self.producers.iter().min_by_key(|(_, producer)| producer.last().base_offset);
            let oldest = *oldest.expect("there are more than the bound").0;
            self.producers.remove(&oldest);
        }
    }

    /// Remember the batches of a stream. Nothing is checked: they are in the log.
    pub(crate) fn replay(&mut self, batches: &[Batch], now: Duration) {
        for batch in batches {
            if let Some(header) = BatchHeader::parse(&batch.payload) {
                self.record(&header, batch.base.0, batch.max_timestamp_ms, now);
            }
        }
    }

    /// The checkpoint; `None` when there is nothing to remember. Equal states give equal bytes.
    pub(crate) fn encode(&self) -> Option<Vec<u8>> {
        if self.producers.is_empty() {
            return None;
        }
        let mut producers: Vec<_> = self.producers.iter().collect();
        producers.sort_unstable_by_key(|(id, _)| **id);
        let mut out = vec![FORMAT_VERSION];
        out.extend_from_slice(&(producers.len() as u32).to_le_bytes());
        for (id, producer) in producers {
            out.extend_from_slice(&id.to_le_bytes());
            out.extend_from_slice(&producer.epoch.to_le_bytes());
            out.push(producer.batches.len() as u8);
            for seen in &producer.batches {
                out.extend_from_slice(&seen.base_sequence.to_le_bytes());
                out.extend_from_slice(&seen.last_sequence.to_le_bytes());
                out.extend_from_slice(&seen.base_offset.to_le_bytes());
                out.extend_from_slice(&seen.max_timestamp_ms.to_le_bytes());
            }
        }
        let crc = crc32c::crc32c(&out);
        out.extend_from_slice(&crc.to_le_bytes());
        Some(out)
    }

    /// Read a checkpoint; its producers count as used at `now`.
    ///
    /// # Errors
    /// What is wrong with the bytes.
    pub(crate) fn decode(bytes: &[u8], now: Duration) -> Result<Self, BadCheckpoint> {
        // The version comes first: another one may end in another way.
        match bytes.first() {
            Some(&FORMAT_VERSION) => {}
            Some(&other) => return Err(BadCheckpoint::Version(other)),
            None => return Err(BadCheckpoint::Truncated),
        }
        let (content, crc) = bytes.split_last_chunk().ok_or(BadCheckpoint::Truncated)?;
        if crc32c::crc32c(content) != u32::from_le_bytes(*crc) {
            return Err(BadCheckpoint::Checksum);
        }
        let mut reader = Reader(content.get(1..).ok_or(BadCheckpoint::Truncated)?);
        let count = u32::from_le_bytes(reader.take()?);
        let mut producers = HashMap::new();
        for _ in 0..count {
            let id = i64::from_le_bytes(reader.take()?);
            let epoch = i16::from_le_bytes(reader.take()?);
            let len = u8::from_le_bytes(reader.take()?);
            if len == 0 || usize::from(len) > REMEMBERED_BATCHES {
                return Err(BadCheckpoint::Content(format!("producer {id} with {len} batches")));
            }
            let mut batches = VecDeque::with_capacity(REMEMBERED_BATCHES);
            for _ in 0..len {
                batches.push_back(Seen {
                    base_sequence: i32::from_le_bytes(reader.take()?),
                    last_sequence: i32::from_le_bytes(reader.take()?),
                    base_offset: u64::from_le_bytes(reader.take()?),
                    max_timestamp_ms: i64::from_le_bytes(reader.take()?),
                });
            }
            producers.insert(id, Producer { epoch, batches, used_at: now });
        }
        if !reader.0.is_empty() {
            return Err(BadCheckpoint::Content(format!("{} bytes behind the end", reader.0.len())));
        }
        Ok(Self { producers, swept_at: now })
    }
}

/// A producer checkpoint that can not be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadCheckpoint {
    #[error("producer state of format version {0}, this program reads version 1")]
    Version(u8),
    #[error("producer state ends in the middle")]
    Truncated,
    #[error("producer state does not have its checksum")]
    Checksum,
    #[error("producer state is damaged: {0}")]
    Content(String),
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], BadCheckpoint> {
        let (head, rest) = self.0.split_first_chunk().ok_or(BadCheckpoint::Truncated)?;
        self.0 = rest;
        Ok(*head)
    }
}

/// The checkpoint after `batches`; see [`alluvium_stream::Fold`].
pub(crate) fn fold(previous: Option<&[u8]>, batches: &[Batch]) -> Option<Vec<u8>> {
    // No clock: a fold depends on its arguments alone, so only the bound on the number of producers applies.
    let now = Duration::ZERO;
    let mut states = match previous.map(|bytes| ProducerStates::decode(bytes, now)).transpose() {
        Ok(states) => states.unwrap_or_default(),
        Err(error) => {
            // The server refuses to start on such a checkpoint, so it is not this server's.
            tracing::error!(%error, "a partition's producer checkpoint is unreadable and begins anew");
            ProducerStates::default()
        }
    };
    states.replay(batches, now);
    states.encode()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1);

    fn batch(producer_id: i64, epoch: i16, base_sequence: i32, records: i32) -> BatchHeader {
        BatchHeader {
            base_offset: 0,
            len_bytes: 61,
            magic: 2,
            crc: 0,
            attributes: 0,
            last_offset_delta: records - 1,
            base_timestamp_ms: 0,
            max_timestamp_ms: 0,
            producer_id,
            producer_epoch: epoch,
            base_sequence,
            record_count: records,
        }
    }

    fn append(states: &mut ProducerStates, header: &BatchHeader, offset: u64) {
        assert_eq!(states.check(header).unwrap(), Verdict::Append);
        states.record(header, offset, 7, NOW);
    }

    #[test]
    fn sequences_wrap_to_zero() {
        assert_eq!(advance(0, 0), 0);
        assert_eq!(advance(2_147_483_645, 2), 2_147_483_647);
        assert_eq!(advance(2_147_483_647, 0), 2_147_483_647);
        assert_eq!(advance(2_147_483_647, 1), 0);
        assert_eq!(advance(2_147_483_646, 4), 2);
        assert_eq!(distance(2_147_483_646, 2), 4);
        assert_eq!(distance(5, 5), 0);

        let mut states = ProducerStates::default();
        append(&mut states, &batch(1, 0, i32::MAX - 1, 5), 100);
        // The last record had sequence 2.
        let duplicate = states.check(&batch(1, 0, i32::MAX - 1, 5)).unwrap();
        assert!(
            matches!(duplicate, Verdict::Duplicate(seen) if seen.base_offset == 100 && seen.end().0 == 105)
        );
        append(&mut states, &batch(1, 0, 3, 1), 105);
        assert_eq!(states.check(&batch(1, 0, 5, 1)).unwrap_err().code(), 45);
    }

    #[test]
    fn a_repetition_is_recognised_among_the_last_five() {
        let mut states = ProducerStates::default();
        for i in 0..6 {
            append(&mut states, &batch(1, 0, i * 10, 10), i as u64 * 10);
        }
        for i in 1..6 {
            let verdict = states.check(&batch(1, 0, i * 10, 10)).unwrap();
            assert!(
                matches!(verdict, Verdict::Duplicate(seen) if seen.base_offset == i as u64 * 10)
            );
        }
        assert_eq!(
            states.check(&batch(1, 0, 0, 10)).unwrap_err().code(),
            45,
            "too old to be recognised"
        );
        assert_eq!(states.check(&batch(1, 0, 50, 9)).unwrap_err().code(), 45, "not the same batch");
        assert_eq!(states.check(&batch(1, 0, 61, 1)).unwrap_err().code(), 45, "a gap");
        assert_eq!(states.check(&batch(1, 0, 60, 1)).unwrap(), Verdict::Append);
    }

    #[test]
    fn a_new_epoch_begins_at_zero_and_ends_the_old_one() {
        let mut states = ProducerStates::default();
        append(&mut states, &batch(1, 3, 0, 1), 0);
        assert_eq!(states.check(&batch(1, 4, 1, 1)).unwrap_err().code(), 45);
        append(&mut states, &batch(1, 4, 0, 1), 1);
        assert_eq!(states.check(&batch(1, 3, 1, 1)).unwrap_err().code(), 47);
        assert_eq!(
            states.check(&batch(1, 3, 0, 1)).unwrap_err().code(),
            47,
            "its batches are forgotten"
        );
    }

    #[test]
    fn an_unknown_producer_may_begin_anywhere_and_a_plain_batch_is_never_checked() {
        let mut states = ProducerStates::default();
        append(&mut states, &batch(9, 2, 1234, 1), 0);
        let plain = batch(-1, -1, -1, 3);
        append(&mut states, &plain, 1);
        append(&mut states, &plain, 4);
        assert_eq!(states.producers.len(), 1);
    }

    #[test]
    fn producers_are_bounded_and_expire() {
        let mut states = ProducerStates::default();
        for id in 0..MAX_PRODUCERS as i64 + 10 {
            states.record(&batch(id, 0, 0, 1), id as u64, 0, NOW);
        }
        assert_eq!(states.producers.len(), MAX_PRODUCERS);
        assert!(
            !states.producers.contains_key(&9) && states.producers.contains_key(&10),
            "the oldest go"
        );

        states.record(&batch(1_000_000, 0, 0, 1), 1_000_000, 0, NOW + EXPIRATION);
        assert_eq!(states.producers.len(), 1);
    }

    #[test]
    fn a_checkpoint_is_what_was_written() {
        assert_eq!(ProducerStates::default().encode(), None);
        let mut states = ProducerStates::default();
        for i in 0..7 {
            states.record(&batch(i % 3, 2, 0, 4), i as u64 * 4, i, NOW);
        }
        let bytes = states.encode().unwrap();
        let mut read = ProducerStates::decode(&bytes, NOW).unwrap();
        read.swept_at = states.swept_at;
        assert_eq!(read, states);
        for len in 0..bytes.len() {
            assert!(ProducerStates::decode(&bytes[..len], NOW).is_err(), "{len} bytes");
        }
        for bit in 8..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(ProducerStates::decode(&damaged, NOW).unwrap_err(), BadCheckpoint::Checksum);
        }
        let with_checksum =
            |content: &[u8]| [content, &crc32c::crc32c(content).to_le_bytes()].concat();
        let content = &bytes[..bytes.len() - 4];
        let longer = with_checksum(&[content, &[0]].concat());
        assert!(matches!(ProducerStates::decode(&longer, NOW), Err(BadCheckpoint::Content(_))));
        let shorter = with_checksum(&content[..content.len() - 1]);
        assert_eq!(ProducerStates::decode(&shorter, NOW).unwrap_err(), BadCheckpoint::Truncated);
        let mut newer = bytes.clone();
        newer[0] = 2;
        assert_eq!(ProducerStates::decode(&newer, NOW).unwrap_err(), BadCheckpoint::Version(2));
    }

    /// Bytes that format version 1 has written; they must open for ever.
    #[test]
    fn version_1_still_opens() {
        let mut states = ProducerStates::default();
        states.record(&batch(5, 1, 7, 2), 9, 11, NOW);
        let bytes = [
            1, 1, 0, 0, 0, // version, one producer
            5, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, // id, epoch, one batch
            7, 0, 0, 0, 8, 0, 0, 0, // base and last sequence
            9, 0, 0, 0, 0, 0, 0, 0, // base offset
            11, 0, 0, 0, 0, 0, 0, 0, // greatest timestamp
            208, 136, 9, 6, // CRC32C
        ];
        assert_eq!(states.encode().unwrap(), bytes);
        let mut read = ProducerStates::decode(&bytes, NOW).unwrap();
        read.swept_at = states.swept_at;
        assert_eq!(read, states);
    }

    #[test]
    fn folding_in_parts_is_folding_at_once() {
        let produced = |sequence, base| {
            let payload = crate::batch::tests::encode(
                kafka_protocol::records::Compression::None,
                (4, 0, sequence),
                &[1, 2],
            );
            Batch { base: StreamOffset(base), count: 2, max_timestamp_ms: 2, payload }
        };
        let batches = [produced(0, 0), produced(2, 2), produced(4, 4)];
        let at_once = fold(None, &batches);
        let in_parts = fold(fold(None, &batches[..1]).as_deref(), &batches[1..]);
        assert_eq!(at_once, in_parts);
        let states = ProducerStates::decode(&at_once.unwrap(), NOW).unwrap();
        assert_eq!(states.check(&batch(4, 0, 6, 1)).unwrap(), Verdict::Append);
    }
}
