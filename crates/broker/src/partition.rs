//! One partition: a stream whose batches are Kafka record batches, and the producers that write to it.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use alluvium_stream::{
    Append, AppendError, NewBatch, Store, StreamEpoch, StreamOffset, StreamWriter,
};
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::batch::{self, BatchHeader};
use crate::errors::ApiError;
use crate::producer_state::{BadCheckpoint, ProducerStates, Verdict};

/// One server leads all partitions, for ever: there is one leader epoch.
pub(crate) const LEADER_EPOCH: i32 = 0;

/// A partition's leader is the writer of its stream.
pub(crate) const WRITER_EPOCH: StreamEpoch = StreamEpoch(LEADER_EPOCH.unsigned_abs() as u64);

/// What a topic's configuration says about appends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AppendRules {
    /// `max.message.bytes`.
    pub(crate) max_batch_bytes: u32,
    /// `message.timestamp.type` is `LogAppendTime`.
    pub(crate) log_append_time: bool,
}

/// One partition of a topic.
pub(crate) struct Partition {
    pub(crate) stream: StreamWriter,
    /// Held from the check of a batch's sequence until the batch is in line, so that offsets and sequences have one order.
    producers: Mutex<ProducerStates>,
    started: Instant,
}

/// A batch in line, or found to be there already: what is known before it is durable.
pub(crate) struct Appended {
    pub(crate) base_offset: StreamOffset,
    /// The time that all its records carry; -1 when each carries its producer's.
    pub(crate) log_append_time_ms: i64,
    wait: Wait,
}

enum Wait {
    ForAppend {
        append: Append,
        records: u32,
    },
    /// A repetition: the batch that was appended first must be durable up to here.
    Until(StreamOffset),
}

impl Appended {
    /// The records that were put in line; `None` for a repetition.
    pub(crate) fn new_records(&self) -> Option<u32> {
        match self.wait {
            Wait::ForAppend { records, .. } => Some(records),
            Wait::Until(_) => None,
        }
    }
}

impl Partition {
    /// Rebuild the producers' state from the stream's checkpoint and the batches after it.
    ///
    /// # Errors
    /// A checkpoint that can not be read.
    pub(crate) fn open(stream: StreamWriter) -> Result<Self, BadCheckpoint> {
        let now = Duration::ZERO;
        let replay = stream.replay();
        let mut producers = match &replay.checkpoint {
            Some(bytes) => ProducerStates::decode(bytes, now)?,
            None => ProducerStates::default(),
        };
        producers.replay(&replay.batches, now);
        Ok(Self { stream, producers: Mutex::new(producers), started: Instant::now() })
    }

    /// Kafka's log start offset.
    pub(crate) fn log_start(&self) -> i64 {
        kafka_offset(self.stream.start_offset())
    }

    /// Kafka's high watermark; without transactions, the last stable offset too.
    pub(crate) fn high_watermark(&self) -> i64 {
        kafka_offset(self.stream.durable_end())
    }

    /// Check a client's idea of the leader epoch; -1 asks for no check.
    pub(crate) fn check_leader_epoch(&self, epoch: i32) -> Result<(), ApiError> {
        match epoch {
            -1 | LEADER_EPOCH => Ok(()),
            newer if newer > LEADER_EPOCH => Err(ApiError::UnknownLeaderEpoch(newer)),
            older => Err(ApiError::FencedLeaderEpoch(older)),
        }
    }

    /// Put a batch in line that [`batch::check_produced`] has let pass; `header` is its header. Waits while there is no
    /// room, until `deadline`; once in line, the batch will become durable whether or not anybody waits for it.
    ///
    /// # Errors
    /// What [`ProducerStates::check`] refuses, [`ApiError::TimedOut`] without room, failed storage.
    pub(crate) async fn append(
        &self,
        store: &Store,
        header: &BatchHeader,
        records: &[u8],
        rules: AppendRules,
        deadline: Instant,
    ) -> Result<Appended, ApiError> {
        loop {
            // Once in line the log cache keeps these bytes, so they are a copy of exactly the batch, not a slice of the request.
            let mut bytes = records.to_vec();
            let log_append_time_ms = if rules.log_append_time { unix_time_ms() } else { -1 };
            if rules.log_append_time {
                batch::set_log_append_time(&mut bytes, log_append_time_ms);
            }
            match self.try_append(header, bytes, log_append_time_ms) {
                Err(AppendError::Full) => {
                    timeout_at(deadline, store.room()).await.map_err(|_| ApiError::TimedOut)?;
                }
                Err(error) => return Err(error.into()),
                Ok(appended) => return appended,
            }
        }
    }

    /// One attempt. The outer error leaves everything unchanged.
    fn try_append(
        &self,
        header: &BatchHeader,
        mut bytes: Vec<u8>,
        log_append_time_ms: i64,
    ) -> Result<Result<Appended, ApiError>, AppendError> {
        let max_timestamp_ms =
            if log_append_time_ms < 0 { header.max_timestamp_ms } else { log_append_time_ms };
        let mut producers = self.producers.lock();
        match producers.check(header) {
            Err(refused) => return Ok(Err(refused)),
            Ok(Verdict::Duplicate(seen)) => {
                return Ok(Ok(Appended {
                    base_offset: StreamOffset(seen.base_offset),
                    log_append_time_ms: if log_append_time_ms < 0 {
                        -1
                    } else {
                        seen.max_timestamp_ms
                    },
                    wait: Wait::Until(seen.end()),
                }));
            }
            Ok(Verdict::Append) => {}
        }
        let base = self.stream.next_offset();
        batch::place(&mut bytes, base.0, LEADER_EPOCH);
        let append = self.stream.append(NewBatch {
            base,
            count: header.offsets(),
            max_timestamp_ms,
            payload: Bytes::from(bytes),
        })?;
        producers.record(header, base.0, max_timestamp_ms, self.started.elapsed());
        Ok(Ok(Appended {
            base_offset: base,
            log_append_time_ms,
            wait: Wait::ForAppend { append, records: header.offsets() },
        }))
    }

    /// Wait until a batch is durable, with everything before it.
    ///
    /// # Errors
    /// [`ApiError::TimedOut`] after `deadline`; failed storage.
    pub(crate) async fn durable(
        &self,
        store: &Store,
        appended: Appended,
        deadline: Instant,
    ) -> Result<(), ApiError> {
        let wait = async {
            match appended.wait {
                Wait::ForAppend { append, .. } => append.await.map_err(ApiError::from),
                Wait::Until(end) => self.durable_up_to(store, end).await,
            }
        };
        timeout_at(deadline, wait).await.map_err(|_| ApiError::TimedOut)?
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

/// An offset on the wire. A partition of 2^63 records does not exist.
pub(crate) fn kafka_offset(offset: StreamOffset) -> i64 {
    i64::try_from(offset.0).expect("offsets are below 2^63")
}

/// The wall clock, as record timestamps use it.
pub(crate) fn unix_time_ms() -> i64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since_epoch.as_millis()).unwrap_or(i64::MAX)
}
