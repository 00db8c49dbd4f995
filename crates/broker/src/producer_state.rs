//! The sequences and transactions of a partition's idempotent producers: a pure function of the
//! partition's batches.
//!
//! Each batch of an idempotent producer carries the producer's ID, an epoch, and the sequence
//! number of its first record. A duplicate is detected among the producer's last five batches (a
//! Java producer has at most five in flight), a missing batch by a gap. A transaction begins with a
//! batch that is marked as transactional, and ends with a marker; see `docs/transactions.md`.

mod checkpoint;
mod totals;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use alluvium_stream::{Batch, StreamOffset};
use kafka_protocol::error::ResponseError;

use crate::batch::{self, BatchHeader, Outcome, Repaired};
use crate::errors::ApiError;
use crate::leader_epochs::LeaderEpochs;

pub(crate) use checkpoint::{BadCheckpoint, fold};
pub(crate) use totals::{Counted, Totals};

/// The number of a producer's batches among which duplicates are detected, as in Kafka.
const REMEMBERED_BATCHES: usize = 5;

/// The greatest number of producers in one partition. A further one evicts the one whose last batch
/// is the oldest in the log.
const MAX_PRODUCERS: usize = 5_000;

/// A producer expires when it has not appended for this long (`producer.id.expiration.ms`).
pub(crate) const EXPIRATION: Duration = Duration::from_secs(86_400);
const EXPIRATION_MS: i64 = EXPIRATION.as_millis() as i64;

/// Tables up to this capacity are not shrunk.
const SMALL_TABLE: usize = 64;

/// The time after a start in which no producer expires: the server may have been down for a day,
/// and a producer without a response retries (`delivery.timeout.ms`, 2 minutes by default).
const GRACE_MS: i64 = 3_600_000;

/// A batch that a producer has appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    base_sequence: i32,
    last_sequence: i32,
    /// The offset of its first record.
    pub(crate) base_offset: u64,
    /// The greatest timestamp of its records.
    pub(crate) max_timestamp_ms: i64,
}

impl Seen {
    /// The offset after the batch's last record.
    pub(crate) fn end(&self) -> StreamOffset {
        let delta = distance(self.base_sequence, self.last_sequence);
        StreamOffset(self.base_offset + u64::from(delta) + 1)
    }
}

/// The decision about a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Append it: it is the next one, or carries no sequence.
    Append,
    /// It was appended before, as this batch.
    Duplicate(Seen),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Producer {
    epoch: i16,
    /// The last batches of this epoch, oldest first; empty if a marker introduced the epoch. Its
    /// capacity equals its length: most producers send one batch.
    batches: Vec<Seen>,
    /// The first offset of the open transaction.
    transaction: Option<u64>,
    /// The first offset and the timestamp of the last batch or marker.
    last_offset: u64,
    last_timestamp_ms: i64,
    /// The time of the last append by the server's clock, or slightly later, in milliseconds since
    /// the Unix epoch. Record timestamps come from the client and are not used.
    used_ms: i64,
}

impl Producer {
    /// Whether the producer has been idle long enough to expire.
    fn is_expired(&self, now_ms: i64) -> bool {
        self.transaction.is_none() && now_ms.saturating_sub(self.used_ms) >= EXPIRATION_MS
    }
}

/// An aborted transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Aborted {
    pub(crate) producer_id: i64,
    pub(crate) first_offset: u64,
    pub(crate) marker_offset: u64,
    /// No transaction that was open when this one ended begins below this offset, hence none of
    /// those aborted later.
    stable_end: u64,
}

/// A producer as DescribeProducers reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ActiveProducer {
    pub(crate) id: i64,
    pub(crate) epoch: i16,
    /// -1 if nothing was appended in this epoch.
    pub(crate) last_sequence: i32,
    pub(crate) last_timestamp_ms: i64,
    /// The first offset of the open transaction.
    pub(crate) transaction: Option<i64>,
}

/// All producers of one partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProducerStates {
    producers: HashMap<i64, Producer>,
    /// Producers without an open transaction, by `last_offset` and ID: the first one is evicted
    /// first.
    idle: BTreeSet<(u64, i64)>,
    /// The greatest `last_offset` that any producer has had.
    newest_offset: u64,
    /// Producers with an open transaction, by its first offset.
    open: BTreeMap<u64, i64>,
    /// Transactions ended by a marker that may not be durable yet: first offset and marker offset,
    /// ordered by the latter.
    ending: VecDeque<(u64, u64)>,
    /// Ordered by marker offset.
    aborted: VecDeque<Aborted>,
    /// The end of the last range of lost offsets. It may have contained batches of any producer, so
    /// the sequence of a producer that has appended nothing since is not exactly known.
    lost_end: u64,
    /// The partition's leader epochs, which are derived from the same batches.
    epochs: LeaderEpochs,
}

/// Advances a sequence number. These run from 0 to `i32::MAX` and then begin at 0 again:
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
    /// Decides whether a batch is to be appended; changes nothing.
    ///
    /// An unknown producer may begin with any sequence number: its state may have expired, or its
    /// records may have been deleted. Kafka does the same (`ProducerAppendInfo.checkSequence`;
    /// UNKNOWN_PRODUCER_ID is history), except in transactions of version 2, where the first batch
    /// must have sequence 0; that is checked in `api/produce.rs`.
    ///
    /// # Errors
    /// [`ApiError::InvalidProducerEpoch`] for an epoch older than the current one,
    /// [`ApiError::OutOfOrderSequence`] for a gap or for a duplicate too old to be detected,
    /// INVALID_TXN_STATE for a non-transactional batch while its producer has a transaction open.
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
        if producer.transaction.is_some() && !batch.is_transactional() {
            return Err(ApiError::Transaction {
                kind: ResponseError::InvalidTxnState,
                reason: format!(
                    "producer {} has an open transaction and sent a batch outside of it",
                    batch.producer_id
                ),
            });
        }
        // Batches after the last known one may be lost, including the first one of a newer epoch. A
        // marker may have survived them; it says nothing about the sequence.
        let known = producer.batches.last().map_or(producer.last_offset, |seen| seen.base_offset);
        let may_skip = known < self.lost_end;
        if batch.producer_epoch > producer.epoch {
            return match batch.base_sequence {
                0 => Ok(Verdict::Append),
                _ if may_skip => Ok(Verdict::Append),
                _ => out_of_order(0),
            };
        }
        let last_sequence = advance(batch.base_sequence, batch.offsets() - 1);
        let same = |seen: &&Seen| {
            seen.base_sequence == batch.base_sequence && seen.last_sequence == last_sequence
        };
        if let Some(seen) = producer.batches.iter().find(same) {
            return Ok(Verdict::Duplicate(*seen));
        }
        let expected = producer.batches.last().map_or(0, |seen| advance(seen.last_sequence, 1));
        let skipped = distance(expected, batch.base_sequence);
        // Sequences wrap: a distance of more than half the range means behind.
        let is_next = skipped == 0 || (may_skip && skipped < 1 << 30);
        if is_next { Ok(Verdict::Append) } else { out_of_order(expected) }
    }

    /// Records a batch that was appended at `base_offset`. `now_ms` is a monotonic clock in
    /// milliseconds since the Unix epoch.
    pub(crate) fn record(
        &mut self,
        batch: &BatchHeader,
        base_offset: u64,
        max_timestamp_ms: i64,
        now_ms: i64,
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
        let producer_id = batch.producer_id;
        let producer = self.take_producer(batch, base_offset, max_timestamp_ms, now_ms);
        if producer.batches.len() == REMEMBERED_BATCHES {
            producer.batches.remove(0);
        }
        producer.batches.reserve_exact(1);
        producer.batches.push(seen);
        if producer.transaction.is_none() {
            if batch.is_transactional() {
                producer.transaction = Some(base_offset);
                self.open.insert(base_offset, producer_id);
            } else {
                self.idle.insert((base_offset, producer_id));
            }
        }
        self.bound();
    }

    /// Records a marker that was appended at `offset`: it ends the producer's transaction and may
    /// introduce a newer epoch.
    pub(crate) fn record_marker(
        &mut self,
        marker: &BatchHeader,
        outcome: Outcome,
        offset: u64,
        now_ms: i64,
    ) {
        let producer = self.take_producer(marker, offset, marker.max_timestamp_ms, now_ms);
        if let Some(first_offset) = producer.transaction.take() {
            self.open.remove(&first_offset);
            self.ending.push_back((first_offset, offset));
            if outcome == Outcome::Abort {
                self.aborted.push_back(Aborted {
                    producer_id: marker.producer_id,
                    first_offset,
                    marker_offset: offset,
                    stable_end: self.open.first_key_value().map_or(offset + 1, |(first, _)| *first),
                });
            }
        }
        self.idle.insert((offset, marker.producer_id));
        self.bound();
    }

    /// Returns the producer of an appended batch or marker, in the epoch of that batch. The caller
    /// puts it back into `idle` if it has no open transaction.
    fn take_producer(
        &mut self,
        batch: &BatchHeader,
        offset: u64,
        timestamp_ms: i64,
        now_ms: i64,
    ) -> &mut Producer {
        self.newest_offset = self.newest_offset.max(offset);
        let producer = self.producers.entry(batch.producer_id).or_insert_with(|| Producer {
            epoch: batch.producer_epoch,
            batches: Vec::new(),
            transaction: None,
            last_offset: offset,
            last_timestamp_ms: timestamp_ms,
            used_ms: now_ms,
        });
        self.idle.remove(&(producer.last_offset, batch.producer_id));
        if producer.epoch != batch.producer_epoch {
            producer.epoch = batch.producer_epoch;
            producer.batches.clear();
        }
        (producer.last_offset, producer.last_timestamp_ms) = (offset, timestamp_ms);
        producer.used_ms = now_ms;
        producer
    }

    /// Evicts a producer without an open transaction if there are too many producers.
    fn bound(&mut self) {
        if self.producers.len() > MAX_PRODUCERS {
            self.evict_oldest(1);
        }
    }

    /// Evicts `count` producers without an open transaction, those whose last batches are the
    /// oldest in the log. The last producer to append is not evicted: its client may not have
    /// received the response yet, and would retry.
    fn evict_oldest(&mut self, count: usize) {
        for _ in 0..count {
            let Some(&(last_offset, id)) = self.idle.first() else { return };
            #[cfg(test)]
            EXAMINED.set(EXAMINED.get() + 1);
            if last_offset >= self.newest_offset {
                return;
            }
            self.idle.pop_first();
            self.producers.remove(&id);
        }
    }

    /// Drops the producers that have not appended for [`EXPIRATION`] and have no open transaction.
    pub(crate) fn drop_expired(&mut self, now_ms: i64) {
        self.producers.retain(|id, producer| {
            let is_expired = producer.is_expired(now_ms);
            if is_expired {
                self.idle.remove(&(producer.last_offset, *id));
            }
            !is_expired
        });
        if self.producers.capacity() > SMALL_TABLE.max(4 * self.producers.len()) {
            self.producers.shrink_to_fit();
        }
    }

    /// Converts the last-append times of a checkpoint to a clock that is at `now_ms`.
    pub(crate) fn start_clock(&mut self, now_ms: i64) {
        let earliest_ms = now_ms.saturating_sub(EXPIRATION_MS - GRACE_MS);
        for producer in self.producers.values_mut() {
            producer.used_ms = producer.used_ms.max(earliest_ms).min(now_ms);
        }
    }

    /// Whether a batch would begin a transaction in this partition.
    pub(crate) fn begins_transaction(&self, batch: &BatchHeader) -> bool {
        batch.is_transactional() && self.open_transaction(batch.producer_id).is_none()
    }

    /// The number of transactions that are aborted or open.
    fn transactions(&self) -> usize {
        self.aborted.len() + self.open.len()
    }

    /// The first offset of all transactions that have not ended by a marker below `durable_end`:
    /// from there on nothing is stable.
    pub(crate) fn first_unstable(&mut self, durable_end: StreamOffset) -> Option<u64> {
        self.drop_ended(durable_end);
        let open = self.open.first_key_value().map(|(first, _)| *first);
        self.ending.iter().map(|(first, _)| *first).chain(open).min()
    }

    /// Drops transactions that ended by a marker below `durable_end`. Writers of markers call this
    /// too, since there may be no reader that does.
    pub(crate) fn drop_ended(&mut self, durable_end: StreamOffset) {
        while self.ending.front().is_some_and(|(_, marker)| *marker < durable_end.0) {
            self.ending.pop_front();
        }
    }

    #[cfg(test)]
    pub(crate) fn ending(&self) -> usize {
        self.ending.len()
    }

    /// The aborted transactions with records among `batches`, which were read from `from` on.
    ///
    /// Log compaction removes an aborted transaction's records, and later its marker. A client that
    /// got such a transaction in a response would wait for the marker, and drop what the producer
    /// has written since.
    pub(crate) fn aborted_among(&self, from: StreamOffset, batches: &[Batch]) -> Vec<Aborted> {
        let to = batches.last().map_or(from, Batch::end);
        let mut aborted = self.aborted_in(from.0, to.0);
        if aborted.is_empty() {
            return aborted;
        }
        let mut written: HashMap<i64, Vec<u64>> = HashMap::new();
        for batch in batches {
            let header = BatchHeader::parse(&batch.payload);
            if let Some(header) = header.filter(|h| h.is_transactional() && !h.is_control()) {
                written.entry(header.producer_id).or_default().push(batch.base.0);
            }
        }
        aborted.retain(|aborted| {
            let bases = written.get(&aborted.producer_id).map_or(&[][..], Vec::as_slice);
            let first = bases.partition_point(|base| *base < aborted.first_offset);
            bases.get(first).is_some_and(|base| *base < aborted.marker_offset)
        });
        aborted
    }

    /// The aborted transactions with offsets in `from..to`.
    pub(crate) fn aborted_in(&self, from: u64, to: u64) -> Vec<Aborted> {
        let begin = self.aborted.partition_point(|aborted| aborted.marker_offset < from);
        let mut found = Vec::new();
        for aborted in self.aborted.range(begin..) {
            if aborted.first_offset < to {
                found.push(*aborted);
            }
            if aborted.stable_end >= to {
                break;
            }
        }
        found
    }

    /// Drops the aborted transactions that ended before `end`; returns whether there were any.
    pub(crate) fn drop_aborted(&mut self, end: StreamOffset) -> bool {
        let gone = self.aborted.partition_point(|aborted| aborted.marker_offset < end.0);
        self.aborted.drain(..gone);
        if self.aborted.capacity() > SMALL_TABLE.max(4 * self.aborted.len()) {
            self.aborted.shrink_to_fit();
        }
        gone > 0
    }

    /// The current epoch of a producer.
    pub(crate) fn epoch(&self, producer_id: i64) -> Option<i16> {
        self.last_of(producer_id).map(|(epoch, _)| epoch)
    }

    /// The current epoch of a producer, and the time of its last batch or marker.
    pub(crate) fn last_of(&self, producer_id: i64) -> Option<(i16, i64)> {
        let producer = self.producers.get(&producer_id);
        producer.map(|producer| (producer.epoch, producer.last_timestamp_ms))
    }

    /// All producers, ordered by ID.
    pub(crate) fn active(&self) -> Vec<ActiveProducer> {
        let mut active: Vec<_> = self
            .producers
            .iter()
            .map(|(id, producer)| ActiveProducer {
                id: *id,
                epoch: producer.epoch,
                last_sequence: producer.batches.last().map_or(-1, |seen| seen.last_sequence),
                last_timestamp_ms: producer.last_timestamp_ms,
                transaction: producer.transaction.map(u64::cast_signed),
            })
            .collect();
        active.sort_unstable_by_key(|producer| producer.id);
        active
    }

    /// Records the batches of a stream from `from` to `to`, which are durable and were appended by
    /// `now_ms`. They are in the log, so nothing is checked. Offsets without a batch are lost.
    ///
    /// # Returns
    /// The markers that recovery wrote.
    pub(crate) fn replay(
        &mut self,
        from: StreamOffset,
        batches: &[Batch],
        to: StreamOffset,
        now_ms: i64,
    ) -> Vec<(Repaired, Outcome)> {
        let (mut next, mut repaired) = (from, Vec::new());
        self.epochs.continue_from(from.0);
        for batch in batches {
            if batch.base > next {
                self.lost_end = batch.base.0;
            }
            next = batch.end();
            self.epochs.appended(batch::leader_epoch(&batch.payload), next.0);
            let Some(header) = BatchHeader::parse(&batch.payload) else { continue };
            if !header.is_idempotent() {
                continue;
            }
            if !header.is_control() {
                self.record(&header, batch.base.0, batch.max_timestamp_ms, now_ms);
            } else if let Some(outcome) = batch::outcome(&batch.payload) {
                self.record_marker(&header, outcome, batch.base.0, now_ms);
                repaired
                    .extend(batch::repaired(&batch.payload).map(|repaired| (repaired, outcome)));
            }
        }
        if to > next {
            self.lost_end = to.0;
        }
        self.ending.clear();
        repaired
    }

    /// Removes the leader epochs. They do not change while a partition is open.
    pub(crate) fn take_epochs(&mut self) -> LeaderEpochs {
        std::mem::take(&mut self.epochs)
    }

    /// The first offset of the producer's open transaction.
    pub(crate) fn open_transaction(&self, producer_id: i64) -> Option<u64> {
        self.producers.get(&producer_id).and_then(|producer| producer.transaction)
    }

    /// The open transactions: producer ID, epoch, first offset, and time of the last batch.
    pub(crate) fn open_transactions(&self) -> impl Iterator<Item = (i64, i16, u64, i64)> {
        self.open.iter().filter_map(|(first, id)| {
            let producer = self.producers.get(id)?;
            Some((*id, producer.epoch, *first, producer.last_timestamp_ms))
        })
    }

    /// The time of the last append of any producer.
    fn latest_ms(&self) -> i64 {
        self.producers.values().map(|producer| producer.used_ms).max().unwrap_or(i64::MIN)
    }
}

#[cfg(test)]
thread_local!(
    /// The number of producers examined by evictions.
    static EXAMINED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) }
);

#[cfg(test)]
mod tests;
