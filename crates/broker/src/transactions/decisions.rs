//! How transactions were decided to end, as far as the state stream still says it.

use std::collections::{HashMap, HashSet};

use alluvium_stream::Replay;
use uuid::Uuid;

use super::record::{Event, Record, Transactions as Table};
use super::transaction::{Doubt, Span, State, Transaction};
use crate::batch::Outcome;
use crate::state_table::{self, Corrupt, Table as _};

struct Decision {
    outcome: Outcome,
    /// Of the markers.
    epoch: i16,
    spans: Option<Vec<Span>>,
}

/// Of some producers.
#[derive(Default)]
pub(super) struct Decisions {
    by_producer: HashMap<i64, Vec<Decision>>,
    /// Some may be missing.
    is_partial: bool,
    /// The transactions after the last record.
    pub(super) table: Table,
    /// Producer ids, and the epochs in which they have written what was committed by a marker of the epoch behind it.
    pub(super) commits: HashSet<(i64, i16)>,
}

/// What is known of the end of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known {
    /// It ends so. Its records all lie below `end`; `None`: they are those of the epoch before the marker's.
    Decided { outcome: Outcome, epoch: i16, end: Option<u64> },
    /// Nothing was decided of it.
    Undecided,
    /// It may be decided or not.
    Unknown,
}

impl Decisions {
    /// What the state stream says of producers that are `wanted`.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn read(replay: &Replay, wanted: &HashSet<i64>) -> Result<Self, Corrupt> {
        let mut this = Self { is_partial: !replay.gaps().is_empty(), ..Self::default() };
        if let Some(checkpoint) = &replay.checkpoint {
            this.table = state_table::decode(checkpoint)?;
        }
        let all: Vec<_> = this.table.0.values().cloned().collect();
        for transaction in &all {
            this.is_partial |= transaction.doubt != Doubt::None;
            this.note(transaction, wanted);
        }
        let mut next = replay.checkpoint_end;
        for batch in &replay.batches {
            if batch.base > next {
                this.table.after_loss();
            }
            next = batch.end();
            this.table.apply_encoded(&batch.payload)?;
            let Record { id, event, .. } = Record::decode(&batch.payload)?;
            if let Event::Prepared { .. } = event
                && let Some(transaction) = this.table.0.get(&id).cloned()
            {
                this.note(&transaction, wanted);
            }
        }
        if replay.end > next {
            this.table.after_loss();
        }
        Ok(this)
    }

    fn note(&mut self, transaction: &Transaction, wanted: &HashSet<i64>) {
        let (producer_id, epoch) = transaction.marker;
        if let State::Prepared(outcome) = transaction.state
            && wanted.contains(&producer_id)
        {
            let spans = transaction.spans.clone();
            let decision = Decision { outcome, epoch, spans };
            self.by_producer.entry(producer_id).or_default().push(decision);
        }
    }

    /// What is known of the transaction to which the record at offset `first` of a partition belongs, which this producer has written in this epoch.
    pub(super) fn of(
        &self,
        producer_id: i64,
        epoch: i16,
        partition: (Uuid, i32),
        first: u64,
    ) -> Known {
        let decisions = self.by_producer.get(&producer_id).map_or(&[][..], Vec::as_slice);
        for Decision { outcome, epoch, spans } in decisions {
            let mut spans = spans.iter().flatten();
            let holds = |span: &&Span| span.partition == partition && span.records.contains(&first);
            if let Some(span) = spans.find(holds) {
                let (outcome, epoch, end) = (*outcome, *epoch, Some(span.records.end));
                return Known::Decided { outcome, epoch, end };
            }
        }
        let are_all_told = decisions.iter().all(|decision| decision.spans.is_some());
        if !self.is_partial && are_all_told {
            return Known::Undecided;
        }
        // Only commits of version 2 of transactions raise the epoch, and then there is one transaction in it.
        let raised = epoch.saturating_add(1);
        match self.commits.contains(&(producer_id, epoch)) {
            true => Known::Decided { outcome: Outcome::Commit, epoch: raised, end: None },
            false => Known::Unknown,
        }
    }

    /// The transactional id of a producer.
    pub(super) fn transactional_id(&self, producer_id: i64) -> Option<&str> {
        let is_its = |transaction: &Transaction| {
            transaction.identity.producer_id == producer_id || transaction.marker.0 == producer_id
        };
        self.table.0.iter().find(|(_, transaction)| is_its(transaction)).map(|(id, _)| id.as_str())
    }
}
