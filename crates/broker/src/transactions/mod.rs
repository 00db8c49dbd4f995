//! The transaction coordinator. Design and crash argument: `docs/transactions.md`.
//!
//! - `transaction`: one transaction as a pure state machine.
//! - `record`: the records of the state stream, and its checkpoint.
//! - `end`: writes the markers and offsets of a decided transaction; timeouts; expiry of ids.
//! - `decisions`, `repair`, `reconcile`: repair after damage of the log.
//! - `holes`: repair after a loss of objects.
//! - `forget`: removal of staged offsets that must not be committed any more.
//! - this file: the transactions by transactional id, each behind its lock, and the requests.

mod decisions;
mod end;
mod forget;
mod holes;
mod reconcile;
mod record;
mod repair;
mod transaction;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use alluvium_stream::{Append, NewBatch, Replay, Store, StoreError, StreamWriter};
use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::TxnOffsetCommitRequest;
use parking_lot::{Mutex, MutexGuard, RwLock};
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use uuid::Uuid;

use crate::batch::Outcome;
use crate::errors::ApiError;
use crate::groups::{Groups, Position, TopicsView};
use crate::partition::{AppendRejected, unix_time_ms};
use crate::producer_ids::ProducerIds;
use crate::server::Server;
use crate::state_stream::{self, KIND_TRANSACTIONS, Refused, StateError};
use crate::state_table::{self, Corrupt};

#[cfg(test)]
pub(crate) use end::forget_unused;
pub(crate) use end::run;
pub(crate) use holes::markers_for_hole;
pub use holes::producer_of_marker;
pub(crate) use reconcile::start;
pub(crate) use record::Transactions as Table;
use record::{Event, Record};
pub(crate) use repair::markers_for_gaps;
pub(crate) use transaction::State;
use transaction::{End, Init, Transaction};

const STREAM_KEY: &str = "transactions/stream";

/// Bounds on transactional ids: their number, and their total bytes. Beyond that the least recently
/// used ids are removed.
const MAX_IDS: usize = 100_000;
const MAX_IDS_BYTES: usize = 64 << 20;
/// The longest transactional id that is accepted. Longer ones from earlier versions remain valid.
const MAX_ID_BYTES: usize = 1024;
/// Bound on the memory for the contents of transactions that have not ended.
const MAX_OPEN_BYTES: usize = 64 << 20;
/// The most that one transaction can use of it.
const MAX_TRANSACTION_BYTES: usize = MAX_OPEN_BYTES / 8;
/// How long a request waits for space in the log, or for the end of a transaction.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// Why the coordinator could not start.
#[derive(Debug, thiserror::Error)]
pub enum TransactionsError {
    /// The state stream could not be opened.
    #[error("{0}")]
    State(#[from] StateError),
    /// Its checkpoint or a record does not have this version's format.
    #[error("{0}")]
    Corrupt(#[from] Corrupt),
    /// A transaction that a crash interrupted could not be ended.
    #[error("transaction {id} could not be completed: {cause}")]
    NotEnded {
        /// The transactional id.
        id: String,
        /// The reason.
        cause: String,
    },
}

/// A transactional id's entry in the map.
struct Slot {
    id: Arc<str>,
    transaction: Mutex<Transaction>,
    /// Notified when a transaction has ended.
    ended: Notify,
}

type Slots = HashMap<Arc<str>, Arc<Slot>>;

/// All transactions.
pub(crate) struct Transactions {
    store: Store,
    /// Whether records of the state stream are lost.
    has_lost: bool,
    /// Locked from reading its next offset until the record is appended. `None` on a read-only
    /// server, which has no transactions.
    stream: Option<Mutex<StreamWriter>>,
    slots: RwLock<Slots>,
    /// Ids without an open transaction, by the time of their last event, in milliseconds since the
    /// Unix epoch.
    unused: Mutex<BTreeSet<(i64, Arc<str>)>>,
    /// Open transactions by the time at which they time out, in milliseconds since the Unix epoch.
    deadlines: Mutex<BTreeSet<(i64, Arc<str>)>>,
    /// Notified when the earliest deadline has become earlier.
    sooner: Notify,
    /// The group coordinator. It tracks the partitions for which transactions have staged offsets,
    /// until those are durable.
    groups: Groups,
    ids_bytes: AtomicUsize,
    /// Memory for the contents of transactions.
    open_bytes: AtomicUsize,
    /// The number of open transactions, as a metric.
    open: Gauge<i64, AtomicI64>,
}

/// The data for DescribeTransactions.
pub(crate) struct Description {
    pub(crate) state: State,
    pub(crate) producer_id: i64,
    pub(crate) epoch: i16,
    pub(crate) timeout_ms: i32,
    /// When the current or last transaction began; -1 if none has begun.
    pub(crate) started_at_ms: i64,
    pub(crate) partitions: Vec<(Uuid, i32)>,
}

/// Holds a transaction open for an append while this value lives.
pub(crate) struct AppendGuard<'a>(
    #[expect(dead_code, reason = "held for its lock")] MutexGuard<'a, Transaction>,
);

/// The producer that writes a transactional batch.
#[derive(Clone, Copy)]
pub(crate) struct Producer<'a> {
    pub(crate) transactional_id: &'a str,
    pub(crate) id: i64,
    pub(crate) epoch: i16,
}

impl Transactions {
    /// Opens or creates the state stream, and loads its state. [`start`] has to follow once
    /// partitions and groups are loaded.
    pub(crate) async fn open(
        store: Store,
        groups: Groups,
        open: Gauge<i64, AtomicI64>,
    ) -> Result<Self, TransactionsError> {
        let (stream, replay) = match store.is_followed() {
            true => (None, Replay::default()),
            false => {
                let stream = state_stream::open(&store, STREAM_KEY, KIND_TRANSACTIONS).await?;
                let replay = stream.replay();
                (Some(Mutex::new(stream)), replay)
            }
        };
        let Table(table) = state_table::load(&replay)?;
        let is_doubtful = |transaction: &Transaction| transaction.doubt.is_open();
        let has_lost = !replay.gaps().is_empty() || table.values().any(is_doubtful);
        let this = Self {
            store,
            has_lost,
            stream,
            slots: RwLock::default(),
            unused: Mutex::default(),
            deadlines: Mutex::default(),
            sooner: Notify::new(),
            groups,
            ids_bytes: AtomicUsize::new(0),
            open_bytes: AtomicUsize::new(0),
            open,
        };
        let mut slots = this.slots.write();
        for (id, transaction) in table {
            let id: Arc<str> = id.into();
            if let Some(at_ms) = transaction.deadline_ms() {
                this.deadlines.lock().insert((at_ms, id.clone()));
            }
            this.open_bytes.fetch_add(transaction.size_bytes(), Ordering::Relaxed);
            for (group, topics) in &transaction.offsets {
                let partitions = topics.iter().map(|(topic, positions)| {
                    (topic.as_str(), positions.keys().copied().collect::<Vec<i32>>())
                });
                this.groups.pending().add(group, &id, partitions);
                if !topics.is_empty() {
                    this.groups.ensure(group);
                }
            }
            this.insert(&mut slots, id, transaction);
        }
        drop(slots);
        this.open.set(this.deadlines.lock().len() as i64);
        Ok(this)
    }

    fn get(&self, id: &str) -> Option<Arc<Slot>> {
        self.slots.read().get(id).cloned()
    }

    /// Returns an id's slot. A new id may replace the least recently used ones.
    fn get_or_create(&self, id: &str) -> Result<Arc<Slot>, Blocked> {
        if let Some(slot) = self.get(id) {
            return Ok(slot);
        }
        if id.is_empty() || id.len() > MAX_ID_BYTES {
            return Err(ResponseError::InvalidRequest.into());
        }
        let mut slots = self.slots.write();
        if let Some(slot) = slots.get(id) {
            return Ok(slot.clone());
        }
        let has_space = |slots: &Slots| {
            let ids_bytes = self.ids_bytes.load(Ordering::Relaxed);
            slots.len() < MAX_IDS && ids_bytes + id.len() <= MAX_IDS_BYTES
        };
        while !has_space(&slots) {
            if !self.forget_oldest(&mut slots, i64::MAX)? {
                tracing::warn!(ids = slots.len(), "transactional id refused: all ids are in use");
                return Err(ResponseError::CoordinatorNotAvailable.into());
            }
        }
        Ok(self.insert(&mut slots, id.into(), Transaction::default()))
    }

    fn insert(&self, slots: &mut Slots, id: Arc<str>, transaction: Transaction) -> Arc<Slot> {
        if let Some(at_ms) = transaction.unused_since_ms() {
            self.unused.lock().insert((at_ms, id.clone()));
        }
        self.ids_bytes.fetch_add(id.len(), Ordering::Relaxed);
        let transaction = Mutex::new(transaction);
        let slot = Arc::new(Slot { id: id.clone(), transaction, ended: Notify::new() });
        slots.insert(id, slot.clone());
        slot
    }

    /// Removes the least recently used id, if it has not been used since `before_ms`. Returns
    /// whether there was one.
    ///
    /// Under the lock of the map: otherwise a producer could find the slot that is about to be
    /// removed.
    fn forget_oldest(&self, slots: &mut Slots, before_ms: i64) -> Result<bool, Refused> {
        let mut unused = self.unused.lock();
        let mut old = unused.iter().take_while(|(at_ms, _)| *at_ms < before_ms);
        // A request that has looked an id up may be about to use it. There are no more of these
        // than requests.
        let is_free = |slot: &Arc<Slot>| Arc::strong_count(slot) == 1;
        let Some(oldest) = old.find(|(_, id)| slots.get(id).is_some_and(is_free)).cloned() else {
            return Ok(false);
        };
        let (_, id) = &oldest;
        if slots.contains_key(id) {
            let _append = self.append(id, unix_time_ms(), &Event::Removed)?;
        }
        slots.remove(id);
        unused.remove(&oldest);
        self.ids_bytes.fetch_sub(id.len(), Ordering::Relaxed);
        Ok(true)
    }

    /// Appends a record and applies its event; the caller holds the transaction's lock. The event
    /// takes effect only once the record is durable.
    fn change(
        &self,
        slot: &Slot,
        transaction: &mut Transaction,
        event: Event,
    ) -> Result<Append, Refused> {
        let at_ms = unix_time_ms();
        let append = self.append(&slot.id, at_ms, &event)?;
        self.apply(slot, transaction, at_ms, event);
        Ok(append)
    }

    /// Decides the end of a transaction by this event. Returns `None` while another decided
    /// transaction commits offsets for some of the same partitions.
    fn decide(
        &self,
        slot: &Slot,
        transaction: &mut Transaction,
        event: Event,
    ) -> Result<Option<Append>, Refused> {
        let commits = matches!(event, Event::Prepared { outcome: Outcome::Commit, .. });
        let pending = self.groups.pending();
        if commits && !pending.decide(transaction.offsets.keys(), &slot.id) {
            return Ok(None);
        }
        let decided = self.change(slot, transaction, event);
        if commits && decided.is_err() {
            pending.undecide(transaction.offsets.keys(), &slot.id);
        }
        decided.map(Some)
    }

    fn append(&self, id: &str, at_ms: i64, event: &Event) -> Result<Append, Refused> {
        let record = Record { id: id.to_owned(), at_ms, event: event.clone() };
        let payload = Bytes::from(record.encode().into_boxed_slice());
        let Some(stream) = &self.stream else {
            return Err(Refused::Failed(StoreError::ReadOnly.to_string()));
        };
        let stream = stream.lock();
        let base = stream.next_offset();
        Ok(stream.append(NewBatch { base, count: 1, max_timestamp_ms: at_ms, payload })?)
    }

    fn apply(&self, slot: &Slot, transaction: &mut Transaction, at_ms: i64, event: Event) {
        let (bytes, deadline) = (transaction.size_bytes(), transaction.deadline_ms());
        let unused = transaction.unused_since_ms();
        if let Event::Offsets { group, topics } = &event {
            let partitions = topics.iter().map(|(topic, positions)| {
                (topic.as_str(), positions.iter().map(|p| p.partition).collect::<Vec<i32>>())
            });
            self.groups.pending().add(group, &slot.id, partitions);
        }
        if event == Event::Completed {
            for group in transaction.offsets.keys() {
                self.groups.pending().remove(group, &slot.id);
            }
        }
        transaction.apply(at_ms, event);
        self.open_bytes.fetch_add(transaction.size_bytes(), Ordering::Relaxed);
        self.open_bytes.fetch_sub(bytes, Ordering::Relaxed);
        if transaction.deadline_ms() != deadline {
            self.move_deadline(&slot.id, deadline, transaction.deadline_ms());
        }
        if transaction.unused_since_ms() != unused {
            let of = |at_ms| (at_ms, slot.id.clone());
            let mut all = self.unused.lock();
            if let Some(from) = unused {
                all.remove(&of(from));
            }
            all.extend(transaction.unused_since_ms().map(of));
        }
    }

    fn move_deadline(&self, id: &Arc<str>, from: Option<i64>, to: Option<i64>) {
        let mut deadlines = self.deadlines.lock();
        if let Some(from) = from {
            deadlines.remove(&(from, id.clone()));
        }
        if let Some(to) = to {
            deadlines.insert((to, id.clone()));
            if deadlines.first().is_some_and(|(first, _)| *first == to) {
                self.sooner.notify_one();
            }
        }
        self.open.set(deadlines.len() as i64);
    }

    /// Repeats an attempt that may find no space, whenever there is some, for at most [`WAIT_MAX`].
    async fn with_space<T>(
        &self,
        mut attempt: impl FnMut() -> Result<T, Blocked>,
    ) -> Result<T, ResponseError> {
        let until = Instant::now() + WAIT_MAX;
        loop {
            match attempt() {
                Ok(done) => return Ok(done),
                Err(Blocked::Error(error)) => return Err(error),
                Err(Blocked::Log(Refused::Full)) => {}
                Err(Blocked::Log(refused)) => return Err(in_protocol(refused)),
            }
            if timeout_at(until, self.store.wait_for_space()).await.is_err() {
                return Err(ResponseError::CoordinatorNotAvailable);
            }
        }
    }

    /// Handles InitProducerId of a transactional producer, and returns its producer id and epoch.
    /// `expected` is the identity that the client sends.
    pub(crate) async fn init(
        server: &Arc<Server>,
        id: &str,
        expected: Option<(i64, i16)>,
        timeout_ms: i32,
    ) -> Result<(i64, i16), ResponseError> {
        let this = &server.transactions;
        let timeout = u64::try_from(timeout_ms).unwrap_or(0);
        if timeout == 0 || Duration::from_millis(timeout) > server.config.transaction_max_timeout {
            return Err(ResponseError::InvalidTransactionTimeout);
        }
        let slot = this.with_space(|| this.get_or_create(id)).await?;
        let step = |new_producer_id| {
            let mut transaction = slot.transaction.lock();
            Ok(match transaction.init(expected, new_producer_id)? {
                Init::Begin(identity) => {
                    let identity = identity.unwrap_or(transaction.identity);
                    let event = Event::Initialised { identity, timeout_ms };
                    let append = this.change(&slot, &mut transaction, event)?;
                    Step::Done(Some(append), identity.current())
                }
                Init::AbortFirst(event) => {
                    let event = end::with_spans(server, &transaction, event);
                    let _append = this.change(&slot, &mut transaction, event)?;
                    end::start(server, &slot);
                    Step::Wait
                }
                Init::Wait => Step::Wait,
                Init::NeedsProducerId => Step::NeedsProducerId,
            })
        };
        let until = Instant::now() + WAIT_MAX;
        let (append, current) = Self::take_steps(server, &slot, until, step).await?;
        durable(append).await?;
        Ok(current)
    }

    /// Runs steps until only the record has to be waited for. Returns the producer's identity from
    /// then on.
    async fn take_steps(
        server: &Server,
        slot: &Slot,
        until: Instant,
        mut step: impl FnMut(Option<i64>) -> Result<Step, Blocked>,
    ) -> Result<(Option<Append>, (i64, i16)), ResponseError> {
        let mut new_producer_id = None;
        loop {
            let others = server.groups.pending().decision_ended();
            match server.transactions.with_space(|| step(new_producer_id)).await? {
                Step::Done(append, current) => return Ok((append, current)),
                Step::Wait => slot.wait_for_end(until).await?,
                Step::WaitForOthers => {
                    let ended = timeout_at(until, others).await;
                    ended.map_err(|_| ResponseError::ConcurrentTransactions)?;
                }
                Step::NeedsProducerId => {
                    new_producer_id = Some(allocate(&server.producer_ids).await?);
                }
            }
        }
    }

    /// Lets a producer append a batch to a partition while the result lives. The partition must be
    /// part of the transaction, or the error is `not_added`; with `None` (KIP-890) this adds it. It
    /// is also added if the same partition of one of the `deleted` topics is part of the
    /// transaction: Kafka's transactions identify partitions by name, and continue in a topic that
    /// was created again.
    pub(crate) fn begin_append<'a>(
        &self,
        slot: &'a TransactionRef,
        producer: Producer<'_>,
        partition: (Uuid, i32),
        not_added: Option<ResponseError>,
        deleted: impl FnOnce() -> Vec<Uuid>,
    ) -> Result<AppendGuard<'a>, AppendRejected> {
        let refuse = |kind, reason: &str| {
            let reason = format!("transactional id {:?}: {reason}", producer.transactional_id);
            AppendRejected::Refused(ApiError::Transaction { kind, reason })
        };
        let mut transaction = slot.0.transaction.lock();
        match transaction.check_open(producer.id, producer.epoch) {
            Ok(()) => {}
            // Every client handles this error for a batch.
            Err(ResponseError::ProducerFenced) => {
                return Err(refuse(
                    ResponseError::InvalidProducerEpoch,
                    "another producer with this transactional id has initialised, or the \
                     transaction has timed out",
                ));
            }
            Err(kind) => return Err(refuse(kind, &kind.to_string())),
        }
        if transaction.partitions.contains(&partition) {
            return Ok(AppendGuard(transaction));
        }
        if let Some(kind) = not_added {
            let was_added = |id: &Uuid| transaction.partitions.contains(&(*id, partition.1));
            if !deleted().iter().any(was_added) {
                return Err(refuse(kind, "the partition is not part of the transaction"));
            }
        }
        let event = Event::Added { partitions: vec![partition], groups: Vec::new() };
        self.check_memory(&transaction, transaction.growth_bytes(&event))
            .map_err(|kind| refuse(kind, "the memory limit of transactions is reached"))?;
        match self.change(&slot.0, &mut transaction, event) {
            Ok(_) => Ok(AppendGuard(transaction)),
            Err(Refused::Full) => Err(AppendRejected::Full),
            Err(refused) => {
                Err(refuse(ResponseError::CoordinatorNotAvailable, &format!("{refused:?}")))
            }
        }
    }

    /// Returns the transaction of a producer, once no earlier one of it is being ended.
    ///
    /// # Errors
    /// INVALID_PRODUCER_ID_MAPPING if there is none; CONCURRENT_TRANSACTIONS after `until`.
    pub(crate) async fn ready(
        &self,
        id: &str,
        until: Instant,
    ) -> Result<TransactionRef, ResponseError> {
        let slot = self.get(id).ok_or(ResponseError::InvalidProducerIdMapping)?;
        slot.wait_for_end(until).await?;
        Ok(TransactionRef(slot))
    }

    /// Handles AddPartitionsToTxn and AddOffsetsToTxn: durable when it returns.
    pub(crate) async fn add(
        &self,
        producer: Producer<'_>,
        partitions: Vec<(Uuid, i32)>,
        groups: Vec<String>,
    ) -> Result<(), ResponseError> {
        let slot = self.ready(producer.transactional_id, Instant::now() + WAIT_MAX).await?.0;
        let append = self
            .with_space(|| {
                let mut transaction = slot.transaction.lock();
                transaction.check_open(producer.id, producer.epoch)?;
                let is_known = transaction.state == State::Ongoing
                    && partitions.iter().all(|p| transaction.partitions.contains(p))
                    && groups.iter().all(|g| transaction.groups.contains(g));
                if is_known {
                    return Ok(None);
                }
                let event = Event::Added { partitions: partitions.clone(), groups: groups.clone() };
                self.check_memory(&transaction, transaction.growth_bytes(&event))?;
                Ok(Some(self.change(&slot, &mut transaction, event)?))
            })
            .await?;
        durable(append).await
    }

    /// Handles TxnOffsetCommit for `topics` of the request: durable when it returns. The group must
    /// be part of the transaction, or the error is `not_added`; with `None` (KIP-890) this adds it.
    /// `exist` is called right before the append.
    pub(crate) async fn add_offsets(
        &self,
        producer: Producer<'_>,
        request: &TxnOffsetCommitRequest,
        topics: Vec<(String, Vec<Position>)>,
        view: &TopicsView,
        not_added: Option<ResponseError>,
        exist: impl Fn() -> bool,
    ) -> Result<(), ResponseError> {
        let group = request.group_id.as_str();
        let slot = self.ready(producer.transactional_id, Instant::now() + WAIT_MAX).await?.0;
        let append = self
            .with_space(|| {
                let mut transaction = slot.transaction.lock();
                transaction.check_open(producer.id, producer.epoch).map_err(
                    |error| match error {
                        ResponseError::ProducerFenced => ResponseError::InvalidProducerEpoch,
                        error => error,
                    },
                )?;
                if let Some(not_added) = not_added
                    && !transaction.groups.contains(group)
                {
                    return Err(not_added.into());
                }
                if !exist() {
                    return Err(ResponseError::UnknownTopicOrPartition.into());
                }
                let groups = vec![group.to_owned()];
                let added = Event::Added { partitions: Vec::new(), groups };
                let event = Event::Offsets { group: group.to_owned(), topics: topics.clone() };
                let growth = transaction.growth_bytes(&added) + transaction.growth_bytes(&event);
                let record = || -> Result<Append, Blocked> {
                    self.check_memory(&transaction, growth)?;
                    if !transaction.groups.contains(group) {
                        let _append = self.change(&slot, &mut transaction, added)?;
                    }
                    Ok(self.change(&slot, &mut transaction, event)?)
                };
                let append =
                    self.groups.commit_in_transaction(request, &topics, view, record)??;
                Ok(Some(append))
            })
            .await?;
        durable(append).await
    }

    /// Handles EndTxn, and returns the producer id and epoch to continue with. `raises_epoch`: the
    /// client supports version 2 of transactions.
    pub(crate) async fn end(
        server: &Arc<Server>,
        producer: Producer<'_>,
        outcome: Outcome,
        raises_epoch: bool,
    ) -> Result<(i64, i16), ResponseError> {
        let this = &server.transactions;
        let slot =
            this.get(producer.transactional_id).ok_or(ResponseError::InvalidProducerIdMapping)?;
        let step = |new_producer_id| {
            let mut transaction = slot.transaction.lock();
            let by = (producer.id, producer.epoch);
            Ok(match transaction.end(by, outcome, raises_epoch, new_producer_id)? {
                End::Prepare(event) => {
                    let event = end::with_spans(server, &transaction, event);
                    match this.decide(&slot, &mut transaction, event)? {
                        Some(append) => {
                            end::start(server, &slot);
                            Step::Done(Some(append), transaction.identity.current())
                        }
                        None => Step::WaitForOthers,
                    }
                }
                End::Done => Step::Done(None, transaction.identity.current()),
                End::Wait => Step::Wait,
                End::NeedsProducerId => Step::NeedsProducerId,
            })
        };
        let until = Instant::now() + WAIT_MAX;
        let (append, current) = Self::take_steps(server, &slot, until, step).await?;
        // If there is space, markers and offsets are appended right after the decision, so waiting
        // for the end costs one flush. Without space the decision is enough.
        if append.is_some() && slot.wait_for_end(until).await.is_err() {
            durable(append).await?;
        }
        Ok(current)
    }

    pub(crate) fn describe(&self, id: &str) -> Option<Description> {
        self.get(id).and_then(|slot| describe(&slot.transaction.lock()))
    }

    /// Returns all transactional ids, sorted.
    pub(crate) fn all(&self) -> Vec<(Arc<str>, Description)> {
        // One slot at a time: a referenced slot cannot be removed in favour of another id.
        let ids: Vec<Arc<str>> = self.slots.read().keys().cloned().collect();
        let described = |id: Arc<str>| {
            let description = describe(&self.get(&id)?.transaction.lock())?;
            Some((id, description))
        };
        let mut all: Vec<_> = ids.into_iter().filter_map(described).collect();
        all.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        all
    }

    /// Checks whether a transaction may use this much more memory.
    ///
    /// # Errors
    /// POLICY_VIOLATION if it has its maximum: it frees nothing before it ends.
    /// COORDINATOR_NOT_AVAILABLE if nothing is left: other transactions end.
    fn check_memory(
        &self,
        transaction: &Transaction,
        more_bytes: usize,
    ) -> Result<(), ResponseError> {
        if more_bytes == 0 {
            return Ok(());
        }
        if transaction.size_bytes() + more_bytes > MAX_TRANSACTION_BYTES {
            tracing::warn!(
                bound = MAX_TRANSACTION_BYTES,
                "refused: memory limit of a transaction reached"
            );
            return Err(ResponseError::PolicyViolation);
        }
        if self.open_bytes.load(Ordering::Relaxed) + more_bytes > MAX_OPEN_BYTES {
            tracing::warn!(
                bound = MAX_OPEN_BYTES,
                "refused: memory limit of all transactions reached"
            );
            return Err(ResponseError::CoordinatorNotAvailable);
        }
        Ok(())
    }
}

/// A reference to a transaction that was looked up.
pub(crate) struct TransactionRef(Arc<Slot>);

impl Slot {
    /// Waits until no transaction is being ended.
    async fn wait_for_end(&self, until: Instant) -> Result<(), ResponseError> {
        loop {
            let ended = self.ended.notified();
            if !matches!(self.transaction.lock().state, State::Prepared(_)) {
                return Ok(());
            }
            if timeout_at(until, ended).await.is_err() {
                return Err(ResponseError::ConcurrentTransactions);
            }
        }
    }
}

/// The result of one step.
enum Step {
    /// The producer has this id and epoch once the record, if there is one, is durable.
    Done(Option<Append>, (i64, i16)),
    /// A transaction is being ended.
    Wait,
    /// Other transactions are being ended that commit offsets for the same partitions.
    WaitForOthers,
    NeedsProducerId,
}

/// Why an attempt has changed nothing.
enum Blocked {
    Log(Refused),
    Error(ResponseError),
}

impl From<Refused> for Blocked {
    fn from(refused: Refused) -> Self {
        Self::Log(refused)
    }
}

impl From<ResponseError> for Blocked {
    fn from(error: ResponseError) -> Self {
        Self::Error(error)
    }
}

fn in_protocol(refused: Refused) -> ResponseError {
    match refused {
        Refused::Full => ResponseError::CoordinatorNotAvailable,
        Refused::TooLarge => ResponseError::RecordListTooLarge,
        Refused::Fenced => ResponseError::NotCoordinator,
        Refused::Failed(cause) => {
            tracing::error!("transaction state cannot be written: {cause}");
            ResponseError::CoordinatorNotAvailable
        }
    }
}

async fn durable(append: Option<Append>) -> Result<(), ResponseError> {
    let Some(append) = append else { return Ok(()) };
    append.await.map_err(|_| ResponseError::CoordinatorNotAvailable)
}

async fn allocate(ids: &ProducerIds) -> Result<i64, ResponseError> {
    ids.allocate().await.map_err(|error| {
        match error {
            ApiError::LogFull => tracing::debug!(%error, "producer ID not allocated"),
            _ => tracing::error!(%error, "producer ID could not be allocated"),
        }
        ResponseError::CoordinatorNotAvailable
    })
}

/// Returns `None` for an id whose first InitProducerId has not completed.
fn describe(transaction: &Transaction) -> Option<Description> {
    let (producer_id, epoch) = transaction.identity.current();
    (producer_id >= 0).then(|| Description {
        state: transaction.state,
        producer_id,
        epoch,
        timeout_ms: transaction.timeout_ms,
        started_at_ms: transaction.started_at_ms,
        partitions: transaction.partitions.iter().copied().collect(),
    })
}

#[cfg(test)]
mod tests;
