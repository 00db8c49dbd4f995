//! One transaction as a state machine: the decisions on requests, and the changes by events. No
//! I/O, no clock.
//!
//! The rules are Kafka's (`TransactionMetadata`, `TransactionCoordinator`); they are described in
//! KIP-98, KIP-360 and KIP-890.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use kafka_protocol::error::ResponseError;
use uuid::Uuid;

use super::record::Event;
use crate::batch::Outcome;
use crate::groups::Position;

/// Means "no epoch" or "no producer ID".
const NONE: i16 = -1;
const NO_PRODUCER: i64 = -1;

/// Estimated memory of an element apart from its strings.
const ENTRY_BYTES: usize = 64;

/// The last epoch that a producer receives. The one after it is used only to fence it.
const LAST_EPOCH: i16 = i16::MAX - 1;

/// The current producer and the previous one: a client that has lost a response repeats the request
/// with the previous identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) producer_id: i64,
    pub(super) epoch: i16,
    pub(super) previous_producer_id: i64,
    pub(super) previous_epoch: i16,
}

impl Default for Identity {
    fn default() -> Self {
        Self {
            producer_id: NO_PRODUCER,
            epoch: NONE,
            previous_producer_id: NO_PRODUCER,
            previous_epoch: NONE,
        }
    }
}

impl Identity {
    /// Returns producer id and epoch.
    pub(super) fn current(&self) -> (i64, i16) {
        (self.producer_id, self.epoch)
    }

    /// A new producer that replaces this one.
    fn replaced_by(&self, producer_id: i64, previous_epoch: i16) -> Self {
        Self { producer_id, epoch: 0, previous_producer_id: self.producer_id, previous_epoch }
    }

    /// This producer in its next epoch.
    fn raised(&self, previous_epoch: i16) -> Self {
        Self { epoch: self.epoch.saturating_add(1), previous_epoch, ..*self }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Empty,
    Ongoing,
    Prepared(Outcome),
    Completed(Outcome),
}

impl State {
    pub(crate) const ALL: [State; 6] = [
        State::Empty,
        State::Ongoing,
        State::Prepared(Outcome::Commit),
        State::Prepared(Outcome::Abort),
        State::Completed(Outcome::Commit),
        State::Completed(Outcome::Abort),
    ];

    /// The name that Kafka's tools show.
    pub(crate) fn name(self) -> &'static str {
        match self {
            State::Empty => "Empty",
            State::Ongoing => "Ongoing",
            State::Prepared(Outcome::Commit) => "PrepareCommit",
            State::Prepared(Outcome::Abort) => "PrepareAbort",
            State::Completed(Outcome::Commit) => "CompleteCommit",
            State::Completed(Outcome::Abort) => "CompleteAbort",
        }
    }

    /// Whether Kafka has a state of this name. Kafka has two more, which no transaction reaches
    /// here.
    pub(crate) fn is_known(name: &str) -> bool {
        matches!(name, "Dead" | "PrepareEpochFence")
            || Self::ALL.iter().any(|state| state.name() == name)
    }

    /// The number in the checkpoint: Kafka's.
    pub(super) fn number(self) -> u8 {
        Self::ALL.iter().position(|state| *state == self).map_or(0, |at| at as u8)
    }

    pub(super) fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }
}

/// Offsets to commit, by topic and partition.
pub(super) type Offsets = BTreeMap<String, BTreeMap<i32, Position>>;

/// The records of a transaction in a partition: all records of its producer in this range belong to
/// it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Span {
    /// Topic id and partition.
    pub(super) partition: (Uuid, i32),
    pub(super) records: Range<u64>,
}

/// How reliable a transaction's state is after records of the state stream were lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Doubt {
    #[default]
    None,
    /// The state is that from before the loss. The transaction may have ended since, and others.
    Stale,
    /// Later additions may belong to a different transaction than earlier ones.
    Mixed,
    /// An open transaction was ended at a start. Before it, unknown transactions may have ended and
    /// unknown epochs may have been issued.
    Resolved,
    /// The last transaction is known again. The next epoch may have been issued before.
    Renew,
}

impl Doubt {
    /// Whether a start has to resolve it.
    pub(super) fn is_open(self) -> bool {
        matches!(self, Self::Stale | Self::Mixed)
    }

    /// The number in the checkpoint.
    pub(super) fn number(self) -> u8 {
        self as u8
    }

    pub(super) fn from_number(number: u8) -> Option<Self> {
        let all = [Self::None, Self::Stale, Self::Mixed, Self::Resolved, Self::Renew];
        all.into_iter().find(|doubt| doubt.number() == number)
    }
}

/// The transaction of one transactional id: the current one, or the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Transaction {
    pub(super) identity: Identity,
    pub(super) timeout_ms: i32,
    pub(super) state: State,
    /// Producer id and epoch of the markers of a prepared transaction.
    pub(super) marker: (i64, i16),
    /// When the open transaction, or the one that has ended, began; -1 if there was none since the
    /// producer was initialised. Milliseconds since the Unix epoch.
    pub(super) started_at_ms: i64,
    pub(super) updated_at_ms: i64,
    /// Topic id and partition.
    pub(super) partitions: BTreeSet<(Uuid, i32)>,
    pub(super) groups: BTreeSet<String>,
    /// By group.
    pub(super) offsets: BTreeMap<String, Offsets>,
    /// The spans of the records of a prepared transaction. `None`: not recorded for all partitions.
    pub(super) spans: Option<Vec<Span>>,
    pub(super) doubt: Doubt,
}

/// The decision on an InitProducerId.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Init {
    /// The producer gets this identity. `None`: it has it already.
    Begin(Option<Identity>),
    /// A new producer id has to be allocated first.
    NeedsProducerId,
    /// The open transaction has to be aborted first, by this event.
    AbortFirst(Event),
    /// The end of a transaction has to be waited for.
    Wait,
}

/// The decision on an EndTxn.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The transaction ends by this event.
    Prepare(Event),
    /// It has already ended with this outcome: the client repeats its request.
    Done,
    /// It is already being ended with this outcome.
    Wait,
    /// A new producer id has to be allocated first.
    NeedsProducerId,
}

impl Default for Transaction {
    fn default() -> Self {
        Self {
            identity: Identity::default(),
            timeout_ms: 0,
            state: State::Empty,
            marker: (NO_PRODUCER, NONE),
            started_at_ms: -1,
            updated_at_ms: -1,
            partitions: BTreeSet::new(),
            groups: BTreeSet::new(),
            offsets: BTreeMap::new(),
            spans: None,
            doubt: Doubt::None,
        }
    }
}

impl Transaction {
    /// Decides on an InitProducerId. `expected` is the identity that the client sends.
    /// `new_producer_id` is one that was never issued.
    ///
    /// # Errors
    /// PRODUCER_FENCED: another producer has initialised since.
    pub(super) fn init(
        &self,
        expected: Option<(i64, i16)>,
        new_producer_id: Option<i64>,
    ) -> Result<Init, ResponseError> {
        let current = self.identity;
        let new = |previous_epoch| match new_producer_id {
            Some(id) => Init::Begin(Some(current.replaced_by(id, previous_epoch))),
            None => Init::NeedsProducerId,
        };
        if current.epoch == NONE {
            return Ok(new(NONE));
        }
        if let Some((producer_id, epoch)) = expected {
            let is_predecessor = producer_id == current.previous_producer_id
                && (epoch >= LAST_EPOCH || current.epoch == 0 && epoch == current.previous_epoch);
            if producer_id != current.producer_id && !is_predecessor {
                return Err(ResponseError::ProducerFenced);
            }
        }
        match self.state {
            State::Prepared(_) => return Ok(Init::Wait),
            // Kafka aborts it for any epoch, and refuses the client afterwards.
            State::Ongoing if expected.is_some_and(|expected| expected != current.current()) => {
                return Err(ResponseError::ProducerFenced);
            }
            State::Ongoing if expected.is_none() => return Ok(Init::AbortFirst(self.fence())),
            // The same producer: it continues in the raised epoch, and repeats the request if
            // necessary.
            State::Ongoing => {
                let event = self.prepare(Outcome::Abort, true, new_producer_id);
                return Ok(event.map_or(Init::NeedsProducerId, Init::AbortFirst));
            }
            State::Empty | State::Completed(_) => {}
        }
        match expected {
            None if self.is_exhausted() => Ok(new(NONE)),
            None => Ok(Init::Begin(Some(current.raised(NONE)))),
            Some((_, epoch)) if epoch == current.epoch && self.is_exhausted() => Ok(new(epoch)),
            Some((_, epoch)) if epoch == current.epoch => {
                Ok(Init::Begin(Some(current.raised(epoch))))
            }
            // The client has lost the response.
            Some((_, epoch)) if epoch == current.previous_epoch => Ok(Init::Begin(None)),
            Some(_) => Err(ResponseError::ProducerFenced),
        }
    }

    /// Whether the next producer needs another producer id, because every remaining epoch may have
    /// been issued.
    fn is_exhausted(&self) -> bool {
        self.identity.epoch >= LAST_EPOCH || self.has_lost_epochs()
    }

    /// Whether transactions may be lost that have begun, also in the current epoch.
    fn has_lost_epochs(&self) -> bool {
        matches!(self.doubt, Doubt::Resolved | Doubt::Renew)
    }

    /// Returns the event that aborts an open transaction on timeout. The producer learns of it with
    /// its next request and continues: if it aborts or initialises with its previous identity, it
    /// receives the current epoch, as in Kafka with `transaction.version` 2. If that would take a
    /// new producer id, it is fenced, unlike in Kafka.
    pub(super) fn time_out(&self) -> Event {
        self.prepare(Outcome::Abort, true, None).unwrap_or_else(|| self.fence())
    }

    /// Returns the event that aborts the open transaction for another producer, and fences its own.
    fn fence(&self) -> Event {
        let identity = self.identity.raised(NONE);
        let marker = identity.current();
        let outcome = Outcome::Abort;
        Event::Prepared { outcome, marker, identity, spans: None, resolves_doubt: false }
    }

    /// Checks whether this producer may add to the transaction now.
    ///
    /// # Errors
    /// INVALID_PRODUCER_ID_MAPPING, PRODUCER_FENCED, CONCURRENT_TRANSACTIONS while the last one is
    /// being ended. The first one also after a loss in which a transaction may have begun: what is
    /// added could belong to that one, and its other records are lost. Clients abort it and
    /// initialise again.
    pub(super) fn check_open(&self, producer_id: i64, epoch: i16) -> Result<(), ResponseError> {
        if producer_id != self.identity.producer_id || producer_id == NO_PRODUCER {
            return Err(ResponseError::InvalidProducerIdMapping);
        }
        if epoch != self.identity.epoch {
            return Err(ResponseError::ProducerFenced);
        }
        match self.state {
            State::Prepared(_) => Err(ResponseError::ConcurrentTransactions),
            _ if self.has_lost_epochs() => Err(ResponseError::InvalidProducerIdMapping),
            State::Empty | State::Ongoing | State::Completed(_) => Ok(()),
        }
    }

    /// Decides on an EndTxn. `raises_epoch`: the client supports version 2 of transactions, where
    /// every end raises the epoch.
    ///
    /// # Errors
    /// INVALID_PRODUCER_ID_MAPPING, PRODUCER_FENCED, INVALID_TXN_STATE: there is nothing that could
    /// end with this outcome.
    pub(super) fn end(
        &self,
        (producer_id, epoch): (i64, i16),
        outcome: Outcome,
        raises_epoch: bool,
        new_producer_id: Option<i64>,
    ) -> Result<End, ResponseError> {
        let current = self.identity;
        // The id is about to get its first producer.
        if current.producer_id == NO_PRODUCER {
            return Err(ResponseError::InvalidProducerIdMapping);
        }
        let is_prepared = matches!(self.state, State::Prepared(_));
        let has_ended = matches!(self.state, State::Completed(_));
        // A client that repeats the request after a lost response sends its previous epoch; a
        // client of version 2 sends it for no other reason.
        let asks_again = raises_epoch && epoch != NONE && epoch == current.previous_epoch && {
            let by_epoch =
                producer_id == current.producer_id && current.epoch.checked_sub(1) == Some(epoch);
            // The previous epoch is that of the previous producer id.
            let by_id = producer_id == current.previous_producer_id && current.epoch == 0;
            (is_prepared || has_ended) && (by_epoch || by_id)
        };
        if producer_id != current.producer_id && !asks_again {
            return Err(ResponseError::InvalidProducerIdMapping);
        }
        let is_next = epoch == current.epoch && !(raises_epoch && is_prepared);
        if !is_next && !asks_again {
            return Err(ResponseError::ProducerFenced);
        }
        // In version 1 the epoch does not identify the transaction that the client means.
        let is_repetition = asks_again || (!raises_epoch && self.doubt != Doubt::Resolved);
        let prepare = || {
            let event = self.prepare(outcome, raises_epoch, new_producer_id);
            event.map_or(End::NeedsProducerId, End::Prepare)
        };
        match self.state {
            State::Ongoing => Ok(prepare()),
            State::Prepared(decided) if decided == outcome => Ok(End::Wait),
            State::Completed(ended) if is_repetition && ended == outcome => Ok(End::Done),
            // In version 2 a client may abort a transaction that it has not begun, to get a new
            // epoch.
            State::Empty | State::Completed(_)
                if raises_epoch && !asks_again && outcome == Outcome::Abort =>
            {
                Ok(prepare())
            }
            State::Empty | State::Prepared(_) | State::Completed(_) => {
                Err(ResponseError::InvalidTxnState)
            }
        }
    }

    /// Returns the event that ends the transaction by its own producer, which continues. `None`: a
    /// new producer id has to be allocated first.
    fn prepare(
        &self,
        outcome: Outcome,
        raises_epoch: bool,
        new_producer_id: Option<i64>,
    ) -> Option<Event> {
        let current = self.identity;
        if !raises_epoch {
            let (marker, identity) = (current.current(), current);
            let (spans, resolves_doubt) = (None, false);
            return Some(Event::Prepared { outcome, marker, identity, spans, resolves_doubt });
        }
        let raised = current.raised(current.epoch);
        let identity = match self.is_exhausted() {
            false => raised,
            true => current.replaced_by(new_producer_id?, current.epoch),
        };
        let (marker, spans, resolves_doubt) = (raised.current(), None, false);
        Some(Event::Prepared { outcome, marker, identity, spans, resolves_doubt })
    }

    /// When the open transaction times out, in milliseconds since the Unix epoch.
    pub(super) fn deadline_ms(&self) -> Option<i64> {
        (self.state == State::Ongoing)
            .then(|| self.started_at_ms.saturating_add(self.timeout_ms.into()))
    }

    /// The time of the last event of an id that has no transaction to end; -1 if there was none
    /// yet.
    pub(super) fn unused_since_ms(&self) -> Option<i64> {
        matches!(self.state, State::Empty | State::Completed(_)).then_some(self.updated_at_ms)
    }

    /// Applies an event. [`Event::Removed`] changes nothing here: the caller drops the transaction.
    pub(super) fn apply(&mut self, at_ms: i64, event: Event) {
        self.updated_at_ms = at_ms;
        match event {
            Event::Initialised { identity, timeout_ms } => {
                // The same producer may initialise again.
                if self.doubt.is_open() || identity.producer_id != self.identity.producer_id {
                    self.doubt = Doubt::None;
                }
                self.identity = identity;
                self.timeout_ms = timeout_ms;
                self.state = State::Empty;
                self.started_at_ms = -1;
                // There is something to clear only if the record of its end was lost.
                self.close();
            }
            Event::Added { partitions, groups } => {
                if self.state != State::Ongoing {
                    self.state = State::Ongoing;
                    self.started_at_ms = at_ms;
                }
                self.partitions.extend(partitions);
                self.groups.extend(groups);
                self.mix();
            }
            Event::Offsets { group, topics } => {
                self.mix();
                self.add_offsets(group, topics);
            }
            Event::Prepared { outcome, marker, identity, spans, resolves_doubt } => {
                if !resolves_doubt {
                    // The transaction that ends may be a later one than that from before the loss.
                    self.mix();
                }
                self.doubt = match self.doubt {
                    _ if resolves_doubt => Doubt::Renew,
                    _ if identity.producer_id != self.identity.producer_id => Doubt::None,
                    Doubt::Resolved | Doubt::Renew => Doubt::Renew,
                    Doubt::None | Doubt::Stale | Doubt::Mixed => Doubt::None,
                };
                self.state = State::Prepared(outcome);
                self.marker = marker;
                self.identity = identity;
                // Some are new only if the record that added them was lost.
                self.partitions.extend(spans.iter().flatten().map(|span| span.partition));
                self.spans = spans;
            }
            Event::Completed => {
                // If the decision is lost, the state stays as before, in doubt, until the decision
                // is known.
                let State::Prepared(outcome) = self.state else { return };
                self.state = State::Completed(outcome);
                self.close();
            }
            Event::Removed | Event::Resolved => {}
        }
    }

    /// Clears the contents of the transaction.
    fn close(&mut self) {
        self.partitions.clear();
        self.groups.clear();
        self.offsets.clear();
        self.spans = None;
    }

    /// What follows may belong to a later transaction than the one known before the loss. Offsets
    /// from before the loss are not committed with it: they may be those of an aborted transaction,
    /// and the group would skip records.
    fn mix(&mut self) {
        if self.doubt == Doubt::Stale {
            self.offsets.clear();
            self.doubt = Doubt::Mixed;
        }
    }

    /// Records that the following records of the stream were lost.
    pub(super) fn after_loss(&mut self) {
        if self.doubt != Doubt::Mixed {
            self.doubt = Doubt::Stale;
        }
    }

    /// Records that a start has ended the open transaction.
    pub(super) fn resolved(&mut self) {
        if self.doubt.is_open() && self.state != State::Ongoing {
            self.doubt = Doubt::Resolved;
        }
    }

    /// Returns the event by which a start ends an open transaction that is in doubt; `epoch` is the
    /// highest epoch of its producer in any partition. The producer is fenced: another one may have
    /// initialised since.
    pub(super) fn resolve(&self, epoch: i16, outcome: Outcome) -> Event {
        let known = Identity { epoch: epoch.max(self.identity.epoch), ..self.identity };
        let identity = known.raised(NONE);
        let (marker, spans) = (identity.current(), None);
        Event::Prepared { outcome, marker, identity, spans, resolves_doubt: true }
    }

    pub(super) fn add_offsets(&mut self, group: String, topics: Vec<(String, Vec<Position>)>) {
        let offsets = self.offsets.entry(group).or_default();
        for (name, positions) in topics {
            if positions.is_empty() {
                offsets.remove(&name);
                continue;
            }
            let partitions = offsets.entry(name).or_default();
            partitions.extend(positions.into_iter().map(|p| (p.partition, p)));
        }
    }

    /// Estimated growth by an event; 0 if it only overwrites or removes.
    pub(super) fn growth_bytes(&self, event: &Event) -> usize {
        match event {
            Event::Added { partitions, groups } => {
                let partitions = partitions.iter().filter(|p| !self.partitions.contains(*p));
                let groups = groups.iter().filter(|group| !self.groups.contains(*group));
                let groups: usize = groups.map(|group| ENTRY_BYTES + group.len()).sum();
                partitions.count() * ENTRY_BYTES + groups
            }
            Event::Offsets { group, topics } => {
                let known = self.offsets.get(group);
                let of_topic = |(name, positions): &(String, Vec<Position>)| {
                    let known = known.and_then(|topics| topics.get(name));
                    let grows = |p: &Position| match known.and_then(|old| old.get(&p.partition)) {
                        Some(old) => p.metadata.len().saturating_sub(old.metadata.len()),
                        None => 2 * ENTRY_BYTES + p.metadata.len(),
                    };
                    let is_new = known.is_none() && !positions.is_empty();
                    let name_bytes = if is_new { ENTRY_BYTES + name.len() } else { 0 };
                    name_bytes + positions.iter().map(grows).sum::<usize>()
                };
                topics.iter().map(of_topic).sum()
            }
            Event::Initialised { .. }
            | Event::Prepared { .. }
            | Event::Completed
            | Event::Resolved
            | Event::Removed => 0,
        }
    }

    /// Estimated memory of the contents.
    pub(super) fn size_bytes(&self) -> usize {
        let groups: usize = self.groups.iter().map(|group| ENTRY_BYTES + group.len()).sum();
        let positions = self.offsets.values().flatten().flat_map(|(name, partitions)| {
            let each = partitions.values().map(|p| 2 * ENTRY_BYTES + p.metadata.len());
            each.chain([ENTRY_BYTES + name.len()])
        });
        let spans = self.spans.as_ref().map_or(0, Vec::len);
        (self.partitions.len() + spans) * ENTRY_BYTES + groups + positions.sum::<usize>()
    }
}
