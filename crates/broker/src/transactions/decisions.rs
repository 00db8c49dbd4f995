//! How transactions have ended, as far as the state stream records it or a marker proves it.
//! Argument: `docs/transactions.md`, "Damage".

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use alluvium_stream::{History, LogOffset};
use uuid::Uuid;

use super::record::{Event, Record, Transactions as Table};
use super::transaction::{Span, State};
use crate::batch::{self, BatchHeader, Outcome};
use crate::state_table::{self, Corrupt, Table as _};

/// A partition: topic id and index.
pub(super) type PartitionKey = (Uuid, i32);

/// Position of a batch in its partition and in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At {
    pub(super) offset: u64,
    /// The end of its record; zero if the batch is uploaded.
    pub(super) log: LogOffset,
}

/// The decision on a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Decision {
    pub(super) outcome: Outcome,
    /// Epoch of the markers.
    pub(super) epoch: i16,
    /// Whether it is the last one of its producer, and the transaction is not completed.
    pub(super) is_due: bool,
    records: Records,
}

/// The records of its producer that belong to a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Records {
    /// Those at these offsets of partitions.
    Spans(HashMap<PartitionKey, Range<u64>>),
    /// Those in this part of the log, in which the producer had no other transaction open.
    Log(Range<LogOffset>),
}

impl Decision {
    /// The decision on a transaction with records in these spans.
    pub(super) fn of_spans(outcome: Outcome, epoch: i16, spans: &[Span]) -> Self {
        let spans = spans.iter().map(|Span { partition, records }| (*partition, records.clone()));
        Self { outcome, epoch, is_due: false, records: Records::Spans(spans.collect()) }
    }

    /// Whether a record of the producer belongs to the transaction.
    pub(super) fn holds(&self, key: PartitionKey, at: At) -> bool {
        match &self.records {
            Records::Spans(spans) => {
                spans.get(&key).is_some_and(|records| records.contains(&at.offset))
            }
            Records::Log(part) => part.contains(&at.log),
        }
    }

    /// The marker in a partition is not below this offset.
    pub(super) fn end(&self, key: PartitionKey) -> u64 {
        match &self.records {
            Records::Spans(spans) => spans.get(&key).map_or(0, |records| records.end),
            Records::Log(_) => 0,
        }
    }
}

/// What is known about the end of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known<'a> {
    Decided(&'a Decision),
    /// It was not decided.
    Undecided,
    /// Unknown whether it was decided.
    Unknown,
}

/// These partitions were added at `at` to a transaction that was open since `from`, or earlier.
struct Added {
    from: LogOffset,
    at: LogOffset,
    /// The next known decision on a transaction of the producer.
    until: LogOffset,
    keys: HashSet<PartitionKey>,
    /// Number of losses of the state stream before it. If there is another one before `until`, an
    /// earlier decision may be lost.
    losses: usize,
}

/// Means that no next decision is known.
const OPEN: LogOffset = LogOffset(u64::MAX);

/// The decisions on the transactions of some producers.
#[derive(Default)]
pub(super) struct Decisions {
    by_producer: HashMap<i64, Vec<Decision>>,
    /// Additions to transactions whose decision may be lost.
    added: HashMap<i64, Vec<Added>>,
    /// Producers whose last transaction is committed, though its decision is lost.
    committed: HashSet<i64>,
    /// Whether decisions may be missing.
    is_partial: bool,
    /// Number of losses of the state stream, as far as it is read.
    losses: usize,
    ids: HashMap<i64, String>,
}

impl Decisions {
    /// Reads the decisions on producers that are `wanted` from the state stream.
    ///
    /// # Errors
    /// The stream cannot be read.
    pub(super) fn read(
        History { replay, log_ends }: &History,
        wanted: &HashSet<i64>,
    ) -> Result<Self, Corrupt> {
        let mut this = Self { is_partial: !replay.gaps().is_empty(), ..Self::default() };
        let mut table: Table =
            replay.checkpoint.as_deref().map(state_table::decode).transpose()?.unwrap_or_default();
        for transaction in table.0.values() {
            this.is_partial |= transaction.doubt.is_open();
            let (marker, producer_id) = (transaction.marker, transaction.identity.producer_id);
            match transaction.state {
                State::Prepared(outcome) if wanted.contains(&marker.0) => {
                    // It was open when the checkpoint was made: its records are uploaded.
                    let part = LogOffset(0)..LogOffset(1);
                    this.decide(marker, outcome, transaction.spans.as_deref(), part);
                }
                State::Ongoing if wanted.contains(&producer_id) && !transaction.doubt.is_open() => {
                    this.add(producer_id, transaction.partitions.iter(), LogOffset(0));
                }
                _ => {}
            }
        }
        let mut next = replay.checkpoint_end;
        for (batch, log) in replay.batches.iter().zip(log_ends) {
            if batch.base > next {
                table.after_loss();
                this.losses += 1;
            }
            next = batch.end();
            let Record { id, event, .. } = Record::decode(&batch.payload)?;
            let producer_id = table.0.get(&id).map_or(-1, |known| known.identity.producer_id);
            match &event {
                Event::Added { partitions, .. } if wanted.contains(&producer_id) => {
                    this.add(producer_id, partitions.iter(), *log);
                }
                Event::Prepared { outcome, marker, spans, .. } if wanted.contains(&marker.0) => {
                    let began = this.close(marker.0, *log).unwrap_or(*log);
                    this.decide(*marker, *outcome, spans.as_deref(), began..*log);
                }
                Event::Initialised { .. } | Event::Removed => drop(this.close(producer_id, *log)),
                _ => {}
            }
            table.apply_encoded(&batch.payload)?;
        }
        if replay.end > next {
            table.after_loss();
            this.losses += 1;
        }
        for added in this.added.values_mut() {
            added.retain(|added| added.losses < this.losses);
        }
        for (id, transaction) in &table.0 {
            if let State::Prepared(_) = transaction.state
                && let Some(decisions) = this.by_producer.get_mut(&transaction.marker.0)
                && let Some(last) = decisions.last_mut()
            {
                last.is_due = true;
            }
            for producer_id in [transaction.marker.0, transaction.identity.producer_id] {
                if wanted.contains(&producer_id) {
                    this.ids.insert(producer_id, id.clone());
                }
            }
        }
        Ok(this)
    }

    fn add<'a>(&mut self, id: i64, keys: impl Iterator<Item = &'a PartitionKey>, at: LogOffset) {
        let (keys, losses) = (keys.copied().collect(), self.losses);
        let added = self.added.entry(id).or_default();
        let same = added.last().filter(|last| last.until == OPEN && last.losses == losses);
        let from = same.map_or(at, |last| last.from);
        added.push(Added { from, at, until: OPEN, keys, losses });
    }

    /// Records that a transaction of the producer has ended. Returns the position since which it
    /// certainly was this one.
    fn close(&mut self, producer_id: i64, at: LogOffset) -> Option<LogOffset> {
        let added = self.added.get_mut(&producer_id)?;
        let began = added.iter().find(|added| added.losses == self.losses).map(|added| added.from);
        added.retain(|added| added.losses < self.losses);
        for added in added.iter_mut().filter(|added| added.until == OPEN) {
            added.until = at;
        }
        began
    }

    /// Records a decision on a transaction that was open in `part` of the log; it was made at the
    /// end of that part.
    fn decide(
        &mut self,
        (producer_id, epoch): (i64, i16),
        outcome: Outcome,
        spans: Option<&[Span]>,
        part: Range<LogOffset>,
    ) {
        let decision = match spans {
            Some(spans) => Decision::of_spans(outcome, epoch, spans),
            None => Decision { outcome, epoch, is_due: false, records: Records::Log(part) },
        };
        self.by_producer.entry(producer_id).or_default().push(decision);
    }

    /// Whether decisions may be missing, so that markers have to be searched ([`Self::prove`]).
    pub(super) fn is_partial(&self) -> bool {
        self.is_partial
    }

    /// Derives lost decisions from the markers of a partition.
    ///
    /// Each partition of a transaction gets its marker, in the log after the record that added the
    /// partition and before anything that the producer does next. So the first marker of the
    /// producer after that record is the transaction's own, if nothing of the partition is lost
    /// between them. All that the producer has written in this part of the log belongs to this
    /// transaction.
    pub(super) fn prove(&mut self, key: PartitionKey, History { replay, log_ends }: &History) {
        let mut before: HashMap<i64, LogOffset> = HashMap::new();
        let (mut next, mut lost_to, mut is_repaired) = (replay.checkpoint_end, LogOffset(0), false);
        for (batch, log) in replay.batches.iter().zip(log_ends) {
            // A marker that recovery has written is at a loss.
            if batch.base > next || is_repaired {
                lost_to = *log;
            }
            next = batch.end();
            let header = BatchHeader::parse(&batch.payload).filter(BatchHeader::is_control);
            is_repaired = header.is_some() && batch::repaired(&batch.payload).is_some();
            let Some((header, outcome)) = header.zip(batch::outcome(&batch.payload)) else {
                continue;
            };
            let (producer_id, epoch) = (header.producer_id, header.producer_epoch);
            let Some(added) = self.added.get(&producer_id).filter(|_| !is_repaired) else {
                continue;
            };
            let from =
                before.insert(producer_id, *log).map_or(lost_to, |before| before.max(lost_to));
            let own = |added: &&Added| {
                added.keys.contains(&key)
                    && from <= added.at
                    && added.at < *log
                    && *log < added.until
            };
            // Only commits need a proof.
            let Some(own) = added.iter().find(own).filter(|_| outcome == Outcome::Commit) else {
                continue;
            };
            if own.until == OPEN {
                self.committed.insert(producer_id);
            }
            let records = Records::Log(own.from..*log);
            let decision = Decision { outcome, epoch, is_due: false, records };
            self.by_producer.entry(producer_id).or_default().push(decision);
        }
    }

    /// Returns what is known about the transaction that a record of this producer in a partition
    /// belongs to.
    pub(super) fn of(&self, producer_id: i64, key: PartitionKey, at: At) -> Known<'_> {
        let decisions = self.by_producer.get(&producer_id).map_or(&[][..], Vec::as_slice);
        match decisions.iter().find(|decision| decision.holds(key, at)) {
            Some(decision) => Known::Decided(decision),
            None if self.is_partial => Known::Unknown,
            None => Known::Undecided,
        }
    }

    /// Whether the transaction that the state stream leaves open is proven to be committed.
    pub(super) fn is_committed(&self, producer_id: i64) -> bool {
        self.committed.contains(&producer_id)
    }

    /// The transactional id of a producer.
    pub(super) fn transactional_id(&self, producer_id: i64) -> &str {
        self.ids.get(&producer_id).map_or("unknown", String::as_str)
    }
}

#[cfg(test)]
mod tests;
