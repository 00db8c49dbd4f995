//! A partition: a stream whose batches are Kafka record batches, and the state of its producers.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use alluvium_stream::{
    Append, AppendError, Batch, NewBatch, Replay, Store, StoreError, Stream, StreamEpoch,
    StreamOffset, StreamWriter,
};
use bytes::{Bytes, BytesMut};
use kafka_protocol::error::ResponseError;
use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::batch::{self, BatchHeader, NO_LEADER_EPOCH, Outcome, Repaired};
use crate::configs::AppendRules;
use crate::errors::ApiError;
use crate::leader_epochs::LeaderEpochs;
use crate::producer_state::{
    Aborted, ActiveProducer, BadCheckpoint, Counted, ProducerStates, Totals, Verdict,
};

/// The epoch of a partition's stream writer: one server leads all partitions permanently.
pub(crate) const WRITER_EPOCH: StreamEpoch = StreamEpoch(0);

/// A partition of a topic.
pub(crate) struct Partition {
    pub(crate) stream: Stream,
    access: Access,
    /// Locked from the check of a batch's sequence until the batch is appended, so that offsets and
    /// sequences have the same order.
    producers: Mutex<Counted>,
    /// Whether a transaction is open, or was ended by a marker that may not be durable. Changed
    /// under the producers' lock, before the batch that makes it true is appended. Readers of a
    /// partition without transactions therefore do not take that lock.
    unstable: AtomicBool,
    /// All aborted transactions that were dropped from memory ended below this offset. Changed
    /// under the producers' lock.
    dropped_end: AtomicU64,
    /// Batches refused since the last sweep because of the limit on transactions.
    refused_transactions: AtomicU64,
    totals: Arc<Totals>,
    led: RwLock<Led>,
    /// Whether recovery found that records are lost, or a rebuild before it.
    has_lost: bool,
    /// The markers that recovery wrote in place of lost ones.
    repaired: Vec<(Repaired, Outcome)>,
    started: Instant,
    /// The wall clock at `started`.
    started_ms: i64,
}

/// What this server may do with a partition.
enum Access {
    Write(StreamWriter),
    /// Another server writes it.
    Read(Followed),
}

/// The state of a partition that another server writes: derived from the checkpoint that the stream
/// has, and derived again when the stream has a later one.
struct Followed {
    store: Store,
    /// What it was derived from: see [`Stream::followed`], and the term. Held while it is derived.
    seen: Mutex<(u64, u32)>,
    /// The end of the stream at that moment. What the stream has beyond it is not shown to readers
    /// of committed records.
    end: AtomicU64,
}

/// The leaders of a partition.
struct Led {
    /// The epoch in which batches are appended; see [`crate::leader_epochs`].
    epoch: i32,
    /// As of `end`.
    epochs: LeaderEpochs,
    /// The end of the stream when it was opened, or when this was derived.
    end: StreamOffset,
}

/// The state that a reader captures before it reads.
#[derive(Clone, Copy)]
pub(crate) struct ReadSnapshot {
    /// Kafka's last stable offset. Everything below it is immutable.
    pub(crate) last_stable_offset: StreamOffset,
    /// Aborted transactions that ended below this offset may have been dropped from memory.
    dropped_end: u64,
}

/// Why a batch was not appended.
pub(crate) enum AppendRejected {
    /// No free space, see [`Store::wait_for_space`].
    Full,
    Refused(ApiError),
}

/// A batch that is appended, or found to be a duplicate: what is known before it is durable.
pub(crate) struct Appended {
    pub(crate) base_offset: StreamOffset,
    /// The time of append that all records carry; -1 if each carries its producer's timestamp.
    pub(crate) log_append_time_ms: i64,
    wait: Wait,
}

enum Wait {
    ForAppend {
        append: Append,
        records: u32,
    },
    /// A duplicate: the stream must be durable up to here, the end of the batch that was appended
    /// first.
    Until(StreamOffset),
}

impl Appended {
    /// The number of records that were appended; `None` for a duplicate.
    pub(crate) fn new_records(&self) -> Option<u32> {
        match self.wait {
            Wait::ForAppend { records, .. } => Some(records),
            Wait::Until(_) => None,
        }
    }
}

impl From<AppendError> for AppendRejected {
    fn from(error: AppendError) -> Self {
        match error {
            AppendError::Full => Self::Full,
            error => Self::Refused(error.into()),
        }
    }
}

impl Partition {
    /// Rebuilds the producers' state from the stream's checkpoint and the batches after it.
    /// Everything before `clean_end` was log-compacted. The state counts in `totals`. Batches are
    /// appended in `leader_epoch`.
    ///
    /// # Errors
    /// The checkpoint cannot be read.
    pub(crate) fn open(
        stream: StreamWriter,
        clean_end: StreamOffset,
        leader_epoch: i32,
        totals: Arc<Totals>,
    ) -> Result<Self, BadCheckpoint> {
        let (started, started_ms) = (Instant::now(), unix_time_ms());
        let replay = stream.replay();
        let has_lost = !replay.gaps().is_empty() || stream.has_declared_loss();
        let (mut producers, epochs, repaired) = derive(&replay, leader_epoch, started_ms)?;
        producers.drop_aborted(clean_end.max(stream.start_offset()));
        stream.raise_checkpoint_start(clean_end);
        let unstable = producers.first_unstable(stream.durable_end()).is_some();
        Ok(Self {
            stream: stream.clone(),
            access: Access::Write(stream),
            producers: Mutex::new(Counted::new(producers, totals.clone())),
            unstable: AtomicBool::new(unstable),
            dropped_end: AtomicU64::new(0),
            refused_transactions: AtomicU64::new(0),
            totals,
            led: RwLock::new(Led { epoch: leader_epoch, epochs, end: replay.end }),
            repaired,
            has_lost,
            started,
            started_ms,
        })
    }

    /// Opens a partition that another server writes.
    ///
    /// # Errors
    /// The checkpoint cannot be read.
    pub(crate) fn follow(
        stream: Stream,
        store: &Store,
        totals: Arc<Totals>,
    ) -> Result<Self, BadCheckpoint> {
        let (started, started_ms) = (Instant::now(), unix_time_ms());
        let followed = Followed {
            store: store.clone(),
            seen: Mutex::new((u64::MAX, 0)),
            end: AtomicU64::new(0),
        };
        let led = Led { epoch: 0, epochs: LeaderEpochs::default(), end: StreamOffset(0) };
        let this = Self {
            stream,
            access: Access::Read(followed),
            producers: Mutex::new(Counted::new(ProducerStates::default(), totals.clone())),
            unstable: AtomicBool::new(false),
            dropped_end: AtomicU64::new(0),
            refused_transactions: AtomicU64::new(0),
            totals,
            led: RwLock::new(led),
            repaired: Vec::new(),
            has_lost: false,
            started,
            started_ms,
        };
        this.try_catch_up().map(|()| this)
    }

    /// Derives the state again if another server writes the partition and has uploaded something.
    fn catch_up(&self) {
        if let Err(error) = self.try_catch_up() {
            let stream = self.stream.id();
            tracing::error!(%stream, %error, "the newest state of a partition is not used");
        }
    }

    fn try_catch_up(&self) -> Result<(), BadCheckpoint> {
        let Access::Read(followed) = &self.access else { return Ok(()) };
        let mut seen = followed.seen.lock();
        // Before the stream is read: it may have a later state than this says.
        let now = (self.stream.followed(), followed.store.term());
        if *seen == now {
            return Ok(());
        }
        // Also if it fails: it would fail again.
        *seen = now;
        let mut replay = self.stream.replay();
        // A trim may be beyond what is uploaded. Nothing is lost there.
        let end = std::mem::replace(&mut replay.end, replay.checkpoint_end);
        let epoch = i32::try_from(now.1).expect("a term is raised once per opening");
        let (mut derived, epochs, _) = derive(&replay, epoch, self.now_ms())?;
        *self.led.write() = Led { epoch, epochs, end };
        let mut producers = self.producers.lock();
        let is_unstable = derived.first_unstable(end).is_some();
        producers.change(|producers| *producers = derived);
        self.unstable.store(is_unstable, Ordering::SeqCst);
        // The checkpoint may lack transactions that a reader of an earlier state has met.
        self.dropped_end.fetch_max(end.0, Ordering::SeqCst);
        followed.end.store(end.0, Ordering::SeqCst);
        Ok(())
    }

    /// The offset below which the state of producers is known.
    fn known_end(&self) -> StreamOffset {
        self.catch_up();
        let durable_end = self.stream.durable_end();
        match &self.access {
            Access::Write(_) => durable_end,
            Access::Read(followed) => {
                durable_end.min(StreamOffset(followed.end.load(Ordering::SeqCst)))
            }
        }
    }

    /// The right to write to the partition.
    ///
    /// # Errors
    /// Another server writes it.
    fn writer(&self) -> Result<&StreamWriter, StoreError> {
        match &self.access {
            Access::Write(writer) => Ok(writer),
            Access::Read(_) => Err(StoreError::ReadOnly),
        }
    }

    /// The epoch with which the stream was opened for writing.
    ///
    /// # Errors
    /// Another server writes the partition.
    pub(crate) fn writer_epoch(&self) -> Result<StreamEpoch, StoreError> {
        self.writer().map(StreamWriter::epoch)
    }

    /// A monotonic clock, in milliseconds since the Unix epoch.
    fn now_ms(&self) -> i64 {
        let elapsed_ms = i64::try_from(self.started.elapsed().as_millis()).unwrap_or(i64::MAX);
        self.started_ms.saturating_add(elapsed_ms)
    }

    /// Kafka's log start offset.
    pub(crate) fn log_start(&self) -> i64 {
        kafka_offset(self.stream.start_offset())
    }

    /// Kafka's high watermark.
    pub(crate) fn high_watermark(&self) -> i64 {
        kafka_offset(self.stream.durable_end())
    }

    /// Kafka's last stable offset: the offset below which each record's transaction is known to be
    /// committed or aborted (`docs/transactions.md`).
    pub(crate) fn last_stable_offset(&self) -> StreamOffset {
        // Read before the flag: a transactional batch that is durable by now has set the flag.
        let durable_end = self.known_end();
        if !self.unstable.load(Ordering::SeqCst) {
            return durable_end;
        }
        let mut producers = self.producers.lock();
        let first = producers.change(|producers| producers.first_unstable(durable_end));
        self.unstable.store(first.is_some(), Ordering::SeqCst);
        let last_stable_offset =
            first.map_or(durable_end, |first| StreamOffset(first).min(durable_end));
        // An open transaction may have begun with records that were deleted since.
        last_stable_offset.max(self.stream.start_offset())
    }

    /// The state that a reader of committed records captures before it reads.
    pub(crate) fn read_snapshot(&self) -> ReadSnapshot {
        self.catch_up();
        let dropped_end = self.dropped_end.load(Ordering::SeqCst);
        ReadSnapshot { last_stable_offset: self.last_stable_offset(), dropped_end }
    }

    /// The aborted transactions with records among `batches`, which were read from `from` on, after
    /// `snapshot` was captured. `None` if transactions that may be among them were dropped since: a
    /// new read finds no records of these.
    pub(crate) fn aborted_among(
        &self,
        from: StreamOffset,
        batches: &[Batch],
        snapshot: ReadSnapshot,
    ) -> Option<Vec<Aborted>> {
        if batches.is_empty() {
            return Some(Vec::new());
        }
        let producers = self.producers.lock();
        let dropped_end = self.dropped_end.load(Ordering::SeqCst);
        let are_known = dropped_end == snapshot.dropped_end || dropped_end <= from.0;
        are_known.then(|| producers.aborted_among(from, batches))
    }

    /// The aborted transactions that begin before `to`, as far as records of them may exist.
    pub(crate) fn aborted_before(&self, to: StreamOffset) -> Vec<Aborted> {
        self.producers.lock().aborted_in(0, to.0)
    }

    /// Records that everything before `end` is log-compacted. Later reads find no records of
    /// transactions that were aborted before it, so these are dropped (`docs/log-compaction.md`).
    pub(crate) fn record_compaction(&self, end: StreamOffset) {
        self.drop_aborted(&mut self.producers.lock(), end);
        self.stream.raise_checkpoint_start(end);
    }

    /// Drops the aborted transactions whose records are deleted.
    pub(crate) fn record_trim(&self) {
        self.drop_aborted(&mut self.producers.lock(), self.stream.start_offset());
    }

    /// Drops state that is not needed any more. In an idle partition nothing else does.
    ///
    /// # Returns
    /// The number of batches refused since the last call because too many aborted transactions are
    /// tracked.
    pub(crate) fn sweep(&self) -> u64 {
        self.record_trim();
        let now_ms = self.now_ms();
        self.producers.lock().change(|producers| producers.drop_expired(now_ms));
        self.refused_transactions.swap(0, Ordering::Relaxed)
    }

    fn drop_aborted(&self, producers: &mut Counted, end: StreamOffset) {
        if producers.change(|producers| producers.drop_aborted(end)) {
            self.dropped_end.fetch_max(end.0, Ordering::SeqCst);
        }
    }

    /// The number of aborted transactions that are tracked.
    #[cfg(test)]
    pub(crate) fn aborted_transactions(&self) -> usize {
        self.aborted_before(StreamOffset(u64::MAX)).len()
    }

    /// The number of tracked transactions whose markers may not be durable.
    #[cfg(test)]
    pub(crate) fn ending_transactions(&self) -> usize {
        self.producers.lock().ending()
    }

    /// Whether recovery found that records are lost, or a rebuild before it.
    pub(crate) fn has_lost(&self) -> bool {
        self.has_lost
    }

    /// The markers that recovery wrote in place of lost ones and that are not uploaded yet.
    pub(crate) fn repaired(&self) -> &[(Repaired, Outcome)] {
        &self.repaired
    }

    /// The offset range that contains all records of the producer's open transaction.
    pub(crate) fn transaction_span(&self, producer_id: i64) -> Option<Range<u64>> {
        let producers = self.producers.lock();
        let first = producers.open_transaction(producer_id)?;
        Some(first..self.stream.next_offset().0)
    }

    /// The open transactions: producer ID, epoch and first offset.
    pub(crate) fn open_transactions(&self) -> Vec<(i64, i16, u64)> {
        let producers = self.producers.lock();
        producers.open_transactions().map(|(id, epoch, first, _)| (id, epoch, first)).collect()
    }

    /// The producer's last epoch in this partition; `None` if the producer is unknown.
    pub(crate) fn producer_epoch(&self, producer_id: i64) -> Option<i16> {
        self.producers.lock().epoch(producer_id)
    }

    /// The last epochs of those of these producers that are known.
    pub(crate) fn producer_epochs(&self, of: &HashSet<i64>) -> Vec<(i64, i16)> {
        let producers = self.producers.lock();
        let epoch = |id: &i64| Some((*id, producers.epoch(*id)?));
        of.iter().filter_map(epoch).collect()
    }

    /// See [`ProducerStates::active`].
    pub(crate) fn active_producers(&self) -> Vec<ActiveProducer> {
        self.catch_up();
        self.producers.lock().active()
    }

    /// Whether this producer is known.
    pub(crate) fn knows_producer(&self, producer_id: i64) -> bool {
        self.producers.lock().epoch(producer_id).is_some()
    }

    /// Appends the marker that ends a producer's transaction.
    ///
    /// # Errors
    /// No free space, failed storage, a deleted partition; nothing has changed.
    pub(crate) fn append_marker(
        &self,
        producer_id: i64,
        epoch: i16,
        outcome: Outcome,
    ) -> Result<Append, AppendError> {
        self.append_marker_to(&mut self.producers.lock(), producer_id, epoch, outcome)
    }

    /// Appends a marker that does not come from this server's coordinator.
    ///
    /// # Errors
    /// Those of [`Self::append_marker`]; INVALID_PRODUCER_EPOCH if the producer has a newer epoch;
    /// INVALID_REQUEST if there cannot be such a producer.
    pub(crate) fn append_foreign_marker(
        &self,
        producer_id: i64,
        epoch: i16,
        outcome: Outcome,
    ) -> Result<Append, AppendRejected> {
        let mut producers = self.producers.lock();
        if let Some(current) = producers.epoch(producer_id).filter(|current| *current > epoch) {
            let got = epoch;
            return Err(AppendRejected::Refused(ApiError::InvalidProducerEpoch {
                producer_id,
                got,
                current,
            }));
        }
        if producer_id < 0 || epoch < 0 {
            let reason = format!("no producer has ID {producer_id} and epoch {epoch}");
            return Err(AppendRejected::Refused(ApiError::InvalidRequest(reason)));
        }
        Ok(self.append_marker_to(&mut producers, producer_id, epoch, outcome)?)
    }

    fn append_marker_to(
        &self,
        producers: &mut Counted,
        producer_id: i64,
        epoch: i16,
        outcome: Outcome,
    ) -> Result<Append, AppendError> {
        let writer = self.writer().map_err(AppendError::Failed)?;
        let now_ms = unix_time_ms();
        let mut bytes = batch::marker(producer_id, epoch, outcome, now_ms);
        let header = BatchHeader::parse(&bytes).expect("a marker has a header");
        let base = self.stream.next_offset();
        batch::set_base(&mut bytes, base.0, self.leader_epoch());
        let payload = Bytes::from(bytes);
        let append =
            writer.append(NewBatch { base, count: 1, max_timestamp_ms: now_ms, payload })?;
        let (now_ms, durable_end) = (self.now_ms(), self.stream.durable_end());
        producers.change(|producers| {
            producers.record_marker(&header, outcome, base.0, now_ms);
            producers.drop_ended(durable_end);
        });
        self.drop_aborted(producers, self.stream.start_offset());
        Ok(append)
    }

    /// Checks that one more transaction can be tracked in case it is aborted.
    ///
    /// # Errors
    /// TRANSACTION_ABORTABLE. Space is freed only when old records are deleted or compacted, which
    /// takes longer than any client retries, or never happens.
    fn check_transaction_limit(&self, producers: &mut Counted) -> Result<(), ApiError> {
        if producers.can_track_transaction() {
            return Ok(());
        }
        self.drop_aborted(producers, self.stream.start_offset());
        if producers.can_track_transaction() {
            return Ok(());
        }
        self.totals.refused.inc();
        self.refused_transactions.fetch_add(1, Ordering::Relaxed);
        Err(ApiError::Transaction {
            kind: ResponseError::TransactionAbortable,
            reason: "too many aborted transactions are tracked; their number decreases when old \
                records are deleted or compacted"
                .into(),
        })
    }

    /// Checks the leader epoch that a client sent; -1 requests no check.
    pub(crate) fn check_leader_epoch(&self, epoch: i32) -> Result<(), ApiError> {
        let current = self.leader_epoch();
        match epoch {
            NO_LEADER_EPOCH => Ok(()),
            same if same == current => Ok(()),
            newer if newer > current => Err(ApiError::UnknownLeaderEpoch(newer)),
            older => Err(ApiError::FencedLeaderEpoch(older)),
        }
    }

    /// The epoch in which batches are appended.
    pub(crate) fn leader_epoch(&self) -> i32 {
        self.catch_up();
        self.led.read().epoch
    }

    /// The leader epoch of the record at an offset, or of the next one after it; -1 if there is no
    /// such record and the epoch has no other.
    pub(crate) fn leader_epoch_at(&self, offset: StreamOffset) -> i32 {
        self.catch_up();
        let led = self.led.read();
        match led.epochs.at(offset.0) {
            // Batches were appended in it since.
            NO_LEADER_EPOCH if self.stream.next_offset() > led.end => led.epoch,
            epoch => epoch,
        }
    }

    /// The greatest leader epoch that is at most `epoch`, and the offset after its last record, but
    /// at least the log start; `None` if `epoch` has not begun.
    pub(crate) fn end_of_leader_epoch(&self, epoch: i32) -> Option<(i32, i64)> {
        self.catch_up();
        let (found, end) = self.led.read().epochs.end_of(epoch)?;
        let end = end.map_or_else(|| self.high_watermark(), |end| kafka_offset(StreamOffset(end)));
        Some((found, end.max(self.log_start())))
    }

    /// Appends a batch that passed [`batch::check_produced`]; `header` is its header. Waits for
    /// free space until `deadline`. An appended batch becomes durable whether or not a caller waits
    /// for it.
    ///
    /// The memory of `records` itself is appended if there is no other reference to it, else a
    /// copy. The log cache keeps this memory and counts the batch's length, so the caller ensures
    /// that it holds nothing else.
    ///
    /// Each attempt calls `guard` first and holds its result until the batch is appended.
    ///
    /// # Errors
    /// The errors of `guard` and [`ProducerStates::check`], TRANSACTION_ABORTABLE if too many
    /// transactions are tracked, [`ApiError::TimedOut`] if there is no free space in time, failed
    /// storage.
    pub(crate) async fn append<G>(
        &self,
        store: &Store,
        header: &BatchHeader,
        records: Bytes,
        rules: AppendRules,
        deadline: Instant,
        guard: impl Fn() -> Result<G, AppendRejected>,
    ) -> Result<Appended, ApiError> {
        let writer = self.writer()?;
        let mut batch = batch::into_mut(records);
        loop {
            let log_append_time_ms = if rules.log_append_time { unix_time_ms() } else { -1 };
            if rules.log_append_time {
                batch::set_log_append_time(&mut batch, log_append_time_ms);
            }
            let attempted = match guard() {
                Ok(_guard) => {
                    let at = rules.is_import.then_some(header.base_offset);
                    self.try_append(writer, header, &mut batch, log_append_time_ms, at)
                }
                Err(refused) => Err(refused),
            };
            match attempted {
                Err(AppendRejected::Full) => {
                    timeout_at(deadline, store.wait_for_space())
                        .await
                        .map_err(|_| ApiError::TimedOut)?;
                }
                Err(AppendRejected::Refused(error)) => return Err(error),
                Ok(appended) => return Ok(appended),
            }
        }
    }

    /// Makes one attempt to append, at the offset `at` if there is one. An error leaves everything
    /// unchanged except the batch's offset.
    fn try_append(
        &self,
        writer: &StreamWriter,
        header: &BatchHeader,
        batch: &mut BytesMut,
        log_append_time_ms: i64,
        at: Option<i64>,
    ) -> Result<Appended, AppendRejected> {
        let max_timestamp_ms =
            if log_append_time_ms < 0 { header.max_timestamp_ms } else { log_append_time_ms };
        let mut producers = self.producers.lock();
        match producers.check(header).map_err(AppendRejected::Refused)? {
            Verdict::Duplicate(seen) => {
                return Ok(Appended {
                    base_offset: StreamOffset(seen.base_offset),
                    log_append_time_ms: if log_append_time_ms < 0 {
                        -1
                    } else {
                        seen.max_timestamp_ms
                    },
                    wait: Wait::Until(seen.end()),
                });
            }
            Verdict::Append => {}
        }
        if producers.begins_transaction(header) {
            self.check_transaction_limit(&mut producers).map_err(AppendRejected::Refused)?;
        }
        let was_stable = header.is_transactional() && !self.unstable.swap(true, Ordering::SeqCst);
        let base = self.stream.next_offset();
        if let Some(offset) = at.filter(|at| *at != kafka_offset(base)) {
            let error = ApiError::OffsetOutOfRange { offset, start: base, end: base };
            return Err(AppendRejected::Refused(error));
        }
        batch::set_base(batch, base.0, self.leader_epoch());
        let payload = std::mem::take(batch).freeze();
        let appended = writer.append(NewBatch {
            base,
            count: header.offsets(),
            max_timestamp_ms,
            payload: payload.clone(),
        });
        let append = appended.inspect_err(|_| {
            // For the next attempt. The refused append kept no reference, so this does not copy.
            *batch = batch::into_mut(payload);
            if was_stable {
                self.unstable.store(false, Ordering::SeqCst);
            }
        })?;
        let now_ms = self.now_ms();
        producers.change(|producers| producers.record(header, base.0, max_timestamp_ms, now_ms));
        Ok(Appended {
            base_offset: base,
            log_append_time_ms,
            wait: Wait::ForAppend { append, records: header.record_count.unsigned_abs() },
        })
    }

    /// Waits until a batch and everything before it is durable, however long that takes: it is
    /// appended, so a client that got a timeout and retried would have it in the log twice.
    ///
    /// # Errors
    /// Failed storage.
    pub(crate) async fn durable(&self, store: &Store, appended: Appended) -> Result<(), ApiError> {
        match appended.wait {
            Wait::ForAppend { append, .. } => append.await.map_err(ApiError::from),
            Wait::Until(end) => self.durable_up_to(store, end).await,
        }
    }

    async fn durable_up_to(&self, store: &Store, end: StreamOffset) -> Result<(), ApiError> {
        let progress = Arc::new(Notify::new());
        let _watch = self.stream.watch(&progress);
        loop {
            let progressed = progress.notified();
            if self.stream.durable_end() >= end {
                return Ok(());
            }
            if let Some(cause) = store.failure() {
                return Err(ApiError::Storage(cause));
            }
            progressed.await;
        }
    }
}

/// The state of a partition at the end of a stream: its producers, the epochs of its leaders, and
/// the markers that recovery wrote.
type Derived = (ProducerStates, LeaderEpochs, Vec<(Repaired, Outcome)>);

/// Derives the state of a partition, whose present leader has `leader_epoch`.
///
/// # Errors
/// The checkpoint cannot be read.
fn derive(replay: &Replay, leader_epoch: i32, now_ms: i64) -> Result<Derived, BadCheckpoint> {
    let mut producers = match &replay.checkpoint {
        Some(bytes) => ProducerStates::decode(bytes, now_ms)?,
        None => ProducerStates::default(),
    };
    let repaired = producers.replay(replay.checkpoint_end, &replay.batches, replay.end, now_ms);
    let mut epochs = producers.take_epochs();
    epochs.begin(leader_epoch);
    producers.start_clock(now_ms);
    Ok((producers, epochs, repaired))
}

/// The epoch in which batches of any partition are appended.
pub(crate) fn current_leader_epoch(store: &Store) -> i32 {
    i32::try_from(store.term()).expect("a term is raised once per opening")
}

/// An offset as sent on the wire. No partition reaches 2^63 records.
pub(crate) fn kafka_offset(offset: StreamOffset) -> i64 {
    i64::try_from(offset.0).expect("offsets are below 2^63")
}

/// The wall clock in the unit of record timestamps.
pub(crate) fn unix_time_ms() -> i64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since_epoch.as_millis()).unwrap_or(i64::MAX)
}
