//! Produce: batches are appended in the order of the requests; the response waits until they are
//! durable.
//!
//! A request's timeout covers what happens before its batches are appended: the end of an earlier
//! transaction, and the wait for free space in the log. Unlike in Kafka, no batch that is in the
//! log gets a timeout. In Kafka the timeout bounds the wait for other replicas: its client does not
//! know whether the batch stays, and without idempotence a retry may write it twice. Here an
//! appended batch is never taken back, only the disk is waited for, and REQUEST_TIMED_OUT always
//! means that nothing was written.
//!
//! The bytes that are appended are those read from the socket, in the same memory
//! (`docs/copies.md`).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::produce_request::{PartitionProduceData, TopicProduceData};
use kafka_protocol::messages::produce_response::{
    BatchIndexAndErrorMessage, PartitionProduceResponse, TopicProduceResponse,
};
use kafka_protocol::messages::{ProduceRequest, ProduceResponse};
use kafka_protocol::protocol::StrBytes;
use tokio::time::Instant;

use super::{Answer, Context, Refused};
use crate::admission;
use crate::batch::BatchHeader;
use crate::errors::ApiError;
use crate::partition::{AppendRejected, Appended, Partition, kafka_offset};
use crate::quotas::Bound;
use crate::security::{Operation, Resource};
use crate::topics::{Topic, TopicRef, check_not_internal, cut_name};
use crate::transactions::{AppendGuard, Producer, TransactionRef};

/// The first version with topic IDs.
const FIRST_WITH_TOPIC_IDS: i16 = 13;

/// The first version in which writing to a partition adds it to the transaction (KIP-890).
const FIRST_THAT_ADDS: i16 = 12;
/// The first version with TRANSACTION_ABORTABLE.
const FIRST_WITH_ABORTABLE: i16 = 11;

/// A partition's part of a request, after its append.
struct PendingAppend {
    index: i32,
    outcome: Result<(Arc<Partition>, Appended), ApiError>,
}

pub(super) async fn handle(cx: Context, body: Bytes) -> Result<Answer, Refused> {
    let batches = cx.take_batches();
    let len_bytes = body.len() + batches.iter().map(Bytes::len).sum::<usize>();
    cx.charge(Bound::Produced, len_bytes as f64);
    let mut batches = batches.into_iter();
    let request: ProduceRequest = cx.decode(body)?;
    let deadline = Instant::now() + Duration::from_millis(request.timeout_ms.max(0) as u64);
    let acks = request.acks;
    let transaction = match cx.check_writable() {
        Ok(()) => Transaction::of(&cx, &request, deadline).await,
        // Refused below.
        Err(_) => Transaction::None,
    };
    let mut topics = Vec::with_capacity(request.topic_data.len());
    for data in &request.topic_data {
        let found = find(&cx, data);
        let mut partitions = Vec::with_capacity(data.partition_data.len());
        for partition in &data.partition_data {
            let sent = records(partition, &mut batches);
            let index = partition.index;
            let outcome = match (&found, check(&cx, &request)) {
                (Ok(topic), Ok(())) => {
                    append(&cx, topic, index, sent, &transaction, deadline).await
                }
                (_, Err(refused)) => Err(refused),
                (Err(unknown), Ok(())) => Err(match unknown {
                    ApiError::UnknownTopicId => ApiError::UnknownTopicId,
                    ApiError::InvalidTopicName(why) => ApiError::InvalidTopicName(why.clone()),
                    ApiError::Unauthorized(kind) => ApiError::Unauthorized(*kind),
                    _ => ApiError::UnknownTopicOrPartition,
                }),
            };
            if let Err(error) = &outcome {
                tracing::debug!(
                    topic = &**data.name,
                    partition = partition.index,
                    %error,
                    "batch refused"
                );
                cx.server.metrics.error(error);
            }
            partitions.push(PendingAppend { index: partition.index, outcome });
        }
        // A copy of the name: a slice would keep the whole request in memory until its batches are
        // durable.
        let response = TopicProduceResponse::default()
            .with_name(StrBytes::from_string(cut_name(&data.name).to_owned()).into())
            .with_topic_id(data.topic_id);
        topics.push((response, partitions));
    }
    drop((request, batches));
    let throttle_ms = cx.throttle_ms();

    if acks == 0 {
        let failed = topics
            .iter()
            .flat_map(|(_, partitions)| partitions)
            .any(|partition| partition.outcome.is_err());
        return Ok(if failed { Answer::Close } else { Answer::Nothing });
    }
    let held_bytes = topics.len() * size_of::<TopicProduceResponse>()
        + topics.iter().map(|(_, partitions)| partitions.len()).sum::<usize>()
            * (size_of::<PendingAppend>() + size_of::<PartitionProduceResponse>());
    let response = Box::pin(async move {
        let mut responses = Vec::with_capacity(topics.len());
        for (response, partitions) in topics {
            let mut partition_responses = Vec::with_capacity(partitions.len());
            for partition in partitions {
                partition_responses.push(when_durable(&cx, partition).await);
            }
            responses.push(response.with_partition_responses(partition_responses));
        }
        cx.encode(
            &ProduceResponse::default()
                .with_throttle_time_ms(throttle_ms)
                .with_responses(responses),
        )
    });
    Ok(Answer::Later { response, held_bytes })
}

/// Checks the conditions that apply to all partitions of a request.
fn check(cx: &Context, request: &ProduceRequest) -> Result<(), ApiError> {
    cx.check_writable()?;
    if !matches!(request.acks, -1..=1) {
        return Err(ApiError::InvalidRequiredAcks(request.acks));
    }
    Ok(())
}

fn find(cx: &Context, data: &TopicProduceData) -> Result<Arc<Topic>, ApiError> {
    let wanted = match cx.version {
        FIRST_WITH_TOPIC_IDS.. => TopicRef::Id(data.topic_id),
        _ => TopicRef::Name(Arc::from(&**data.name)),
    };
    let topic = cx.topic(Operation::Write, &wanted)?;
    check_not_internal(&topic.name)?;
    Ok(topic)
}

/// The transaction that a request's batches may belong to.
enum Transaction {
    /// The request names none.
    None,
    Found {
        id: String,
        transaction: TransactionRef,
    },
    Refused(ResponseError),
}

impl Transaction {
    async fn of(cx: &Context, request: &ProduceRequest, deadline: Instant) -> Self {
        let Some(id) = &request.transactional_id else { return Self::None };
        if let Err(error) = cx.authorize(Operation::Write, Resource::TransactionalId(id)) {
            return Self::Refused(error.kind());
        }
        match cx.server.transactions.ready(id, deadline).await {
            Ok(transaction) => Self::Found { id: id.to_string(), transaction },
            Err(error) => Self::Refused(error),
        }
    }

    /// Checks whether a batch may be appended to the partition. It may be while the result is held.
    fn check_batch(
        &self,
        cx: &Context,
        header: &BatchHeader,
        topic: &Topic,
        index: i32,
    ) -> Result<Option<AppendGuard<'_>>, AppendRejected> {
        let refuse = |kind: ResponseError| {
            let reason =
                format!("a transactional batch of producer {}: {kind}", header.producer_id);
            Err(AppendRejected::Refused(ApiError::Transaction { kind, reason }))
        };
        match self {
            _ if !header.is_transactional() => Ok(None),
            // As in Kafka: using no transactional ID is not authorized.
            Self::None => refuse(ResponseError::TransactionalIdAuthorizationFailed),
            Self::Refused(error) => refuse(*error),
            Self::Found { id, transaction } => {
                let producer = Producer {
                    transactional_id: id,
                    id: header.producer_id,
                    epoch: header.producer_epoch,
                };
                let not_added = match cx.version {
                    FIRST_THAT_ADDS.. => None,
                    FIRST_WITH_ABORTABLE.. => Some(ResponseError::TransactionAbortable),
                    _ => Some(ResponseError::InvalidTxnState),
                };
                let transactions = &cx.server.transactions;
                let deleted = || cx.server.topics.deleted_ids(&topic.name);
                let partition = (topic.id, index);
                transactions
                    .begin_append(transaction, producer, partition, not_added, deleted)
                    .map(Some)
            }
        }
    }
}

/// Takes what was sent to a partition, in memory that holds nothing else: once appended, it belongs
/// to the log cache. `batches` are those that were read separately.
fn records(data: &PartitionProduceData, batches: &mut impl Iterator<Item = Bytes>) -> Bytes {
    match &data.records {
        None => Bytes::new(),
        Some(records) if records.is_empty() => batches.next().unwrap_or_default(),
        Some(records) => Bytes::copy_from_slice(records),
    }
}

async fn append(
    cx: &Context,
    topic: &Topic,
    index: i32,
    sent: Bytes,
    transaction: &Transaction,
    deadline: Instant,
) -> Result<(Arc<Partition>, Appended), ApiError> {
    let partition = topic.partition(index).ok_or(ApiError::UnknownTopicOrPartition)?;
    let rules = topic.rules.append;
    let (header, records) = admission::validate(&cx.server, rules, cx.version, sent).await?;
    let check = || {
        let guard = transaction.check_batch(cx, &header, topic, index)?;
        // In transactions with an epoch of their own, the first batch in a partition has sequence
        // 0. A later batch must not be appended before it, or the first one would be out of order
        // forever (as in Kafka's `ProducerAppendInfo`). The transaction's lock is held, so no other
        // batch of this producer is appended in between.
        if guard.is_some()
            && cx.version >= FIRST_THAT_ADDS
            && header.base_sequence != 0
            && !partition.knows_producer(header.producer_id)
        {
            return Err(AppendRejected::Refused(ApiError::OutOfOrderSequence {
                producer_id: header.producer_id,
                epoch: header.producer_epoch,
                got: header.base_sequence,
                expected: 0,
            }));
        }
        Ok(guard)
    };
    let appended = partition
        .append(&cx.server.store, &header, records, rules, deadline, check)
        .await
        .map_err(|error| in_version(error, cx.version))?;
    if let Some(count) = appended.new_records() {
        cx.server.metrics.produced_bytes.inc_by(header.len_bytes as u64);
        cx.server.metrics.produced_records.inc_by(count.into());
    }
    Ok((partition.clone(), appended))
}

/// Maps an error for an older client, which aborts its transaction on any error that it does not
/// retry.
fn in_version(error: ApiError, version: i16) -> ApiError {
    match error {
        ApiError::Transaction { kind: ResponseError::TransactionAbortable, reason }
            if version < FIRST_WITH_ABORTABLE =>
        {
            ApiError::PolicyViolation(reason)
        }
        error => error,
    }
}

async fn when_durable(cx: &Context, pending: PendingAppend) -> PartitionProduceResponse {
    let response = PartitionProduceResponse::default().with_index(pending.index);
    let durable = async {
        let (partition, appended) = pending.outcome?;
        let (base_offset, log_append_time_ms) = (appended.base_offset, appended.log_append_time_ms);
        partition
            .durable(&cx.server.store, appended)
            .await
            .inspect_err(|e| cx.server.metrics.error(e))?;
        Ok::<_, ApiError>((kafka_offset(base_offset), log_append_time_ms, partition.log_start()))
    };
    match durable.await {
        Ok((base_offset, log_append_time_ms, log_start)) => response
            .with_base_offset(base_offset)
            .with_log_append_time_ms(log_append_time_ms)
            .with_log_start_offset(log_start),
        Err(error) => response
            .with_base_offset(-1)
            .with_error_code(error.code())
            .with_error_message(error.message())
            .with_record_errors(record_errors(error)),
    }
}

/// The records that caused a rejection.
fn record_errors(error: ApiError) -> Vec<BatchIndexAndErrorMessage> {
    let ApiError::RejectedRecords { records, .. } = error else { return Vec::new() };
    let blamed = |(index, reason): (i32, String)| {
        BatchIndexAndErrorMessage::default()
            .with_batch_index(index)
            .with_batch_index_error_message(Some(StrBytes::from_string(reason)))
    };
    records.into_iter().map(blamed).collect()
}
