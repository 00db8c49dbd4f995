//! How transactions were decided to end, as far as the state stream still says it.

use std::collections::{HashMap, HashSet};

use alluvium_stream::Replay;
use uuid::Uuid;

use super::record::{Event, Record, Transactions as Table};
use super::transaction::{Doubt, Span, State, Transaction};
use crate::batch::{self, BatchHeader, Outcome};
use crate::producer_state::ProducerStates;
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
    /// See [`commits`].
    pub(super) commits: HashSet<(i64, i16)>,
    /// By producer id.
    transactional_ids: HashMap<i64, String>,
}

/// A marker that the coordinator, or a client, has written to a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Marker {
    pub(super) producer_id: i64,
    pub(super) epoch: i16,
    pub(super) outcome: Outcome,
    pub(super) at_ms: i64,
    /// The epoch of the producer's last records, with nothing lost since.
    pub(super) written_in: Option<i16>,
    /// Nothing that is not uploaded is lost before it.
    pub(super) is_before_losses: bool,
}

/// The markers of some producers in a partition. One that recovery has written lies where records are
/// lost, and is none.
pub(super) fn markers(replay: &Replay, wanted: &HashSet<i64>) -> Vec<Marker> {
    let checkpoint = replay.checkpoint.as_ref();
    // A start fails with a checkpoint that cannot be read.
    let states = checkpoint.and_then(|bytes| ProducerStates::decode(bytes, 0).ok());
    let states = states.unwrap_or_default();
    let open = states.open_transactions().map(|(id, epoch, ..)| (id, epoch));
    let mut epochs: HashMap<i64, i16> = open.filter(|(id, _)| wanted.contains(id)).collect();
    let (mut markers, mut is_before_losses) = (Vec::new(), true);
    let mut next = replay.checkpoint_end;
    for batch in &replay.batches {
        if batch.base > next || batch::mended(&batch.payload).is_some() {
            epochs.clear();
            is_before_losses = false;
        }
        next = batch.end();
        let Some(header) = BatchHeader::parse(&batch.payload) else { continue };
        let (producer_id, epoch) = (header.producer_id, header.producer_epoch);
        if !header.is_transactional() || !wanted.contains(&producer_id) {
            continue;
        }
        if !header.is_control() {
            epochs.insert(producer_id, epoch);
            continue;
        }
        let written_in = epochs.remove(&producer_id);
        let is_mended = batch::mended(&batch.payload).is_some();
        let Some(outcome) = batch::outcome(&batch.payload).filter(|_| !is_mended) else { continue };
        let at_ms = header.max_timestamp_ms;
        markers.push(Marker { producer_id, epoch, outcome, at_ms, written_in, is_before_losses });
    }
    markers
}

/// Producer ids, and the epochs in which they have written what was committed by a marker of the epoch
/// behind it.
pub(super) fn commits(replay: &Replay, wanted: &HashSet<i64>) -> Vec<(i64, i16)> {
    let raised = |marker: Marker| {
        let written_in = marker.written_in?;
        let is_raised = written_in.checked_add(1) == Some(marker.epoch);
        let is_commit = marker.outcome == Outcome::Commit;
        (is_raised && is_commit).then_some((marker.producer_id, written_in))
    };
    markers(replay, wanted).into_iter().filter_map(raised).collect()
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
        let mut by_producer = HashMap::new();
        for transaction in this.table.0.values() {
            this.is_partial |= transaction.doubt != Doubt::None;
            note(&mut by_producer, transaction, wanted);
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
                && let Some(transaction) = this.table.0.get(&id)
            {
                note(&mut by_producer, transaction, wanted);
            }
        }
        if replay.end > next {
            this.table.after_loss();
        }
        this.by_producer = by_producer;
        for (id, transaction) in &this.table.0 {
            for producer_id in [transaction.identity.producer_id, transaction.marker.0] {
                if wanted.contains(&producer_id) {
                    this.transactional_ids.insert(producer_id, id.clone());
                }
            }
        }
        Ok(this)
    }

    /// Whether some may be missing.
    pub(super) fn is_partial(&self) -> bool {
        self.is_partial
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

    /// The transactional id of a producer that is wanted.
    pub(super) fn transactional_id(&self, producer_id: i64) -> Option<&str> {
        self.transactional_ids.get(&producer_id).map(String::as_str)
    }
}

fn note(
    decisions: &mut HashMap<i64, Vec<Decision>>,
    transaction: &Transaction,
    wanted: &HashSet<i64>,
) {
    let (producer_id, epoch) = transaction.marker;
    if let State::Prepared(outcome) = transaction.state
        && wanted.contains(&producer_id)
    {
        let spans = transaction.spans.clone();
        decisions.entry(producer_id).or_default().push(Decision { outcome, epoch, spans });
    }
}
