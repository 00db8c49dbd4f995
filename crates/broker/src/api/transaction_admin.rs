//! The administration of transactions: DescribeTransactions, ListTransactions, DescribeProducers;
//! and WriteTxnMarkers, which ends a hanging one.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::describe_producers_response::{
    PartitionResponse, ProducerState, TopicResponse,
};
use kafka_protocol::messages::write_txn_markers_request::WritableTxnMarker;
use kafka_protocol::messages::write_txn_markers_response::{
    WritableTxnMarkerPartitionResult, WritableTxnMarkerResult, WritableTxnMarkerTopicResult,
};
use kafka_protocol::messages::{
    DescribeProducersRequest, DescribeProducersResponse, DescribeTransactionsRequest,
    DescribeTransactionsResponse, ListTransactionsRequest, ListTransactionsResponse, ProducerId,
    TopicName, TransactionalId, WriteTxnMarkersRequest, WriteTxnMarkersResponse,
    describe_transactions_response, list_transactions_response,
};
use kafka_protocol::protocol::StrBytes;
use tokio::time::{Instant, timeout_at};

use super::{Answer, Context, Refused};
use crate::batch::Outcome;
use crate::errors::ApiError;
use crate::partition::{AppendRejected, Partition, unix_time_ms};
use crate::pattern::{Pattern, TooCostly};
use crate::security::{Operation, Resource};
use crate::topics::{TopicRef, check_not_internal};
use crate::transactions::{Description, State};
use crate::wire::once;

/// How long WriteTxnMarkers waits for free space.
const WAIT_MAX: std::time::Duration = std::time::Duration::from_secs(5);

pub(super) async fn describe(
    cx: &Context,
    request: DescribeTransactionsRequest,
) -> DescribeTransactionsResponse {
    let states = once(request.transactional_ids, TransactionalId::clone).map(|id| {
        let state = describe_transactions_response::TransactionState::default();
        let allowed = cx.authorize(Operation::Describe, Resource::TransactionalId(&id));
        let found = allowed.map(|()| cx.server.transactions.describe(&id));
        let state = match found {
            Err(refused) => state.with_error_code(refused.code()),
            Ok(Some(description)) => described(cx, state, description),
            Ok(None) => state.with_error_code(ResponseError::TransactionalIdNotFound.code()),
        };
        state.with_transactional_id(id)
    });
    DescribeTransactionsResponse::default().with_transaction_states(states.collect())
}

fn described(
    cx: &Context,
    state: describe_transactions_response::TransactionState,
    description: Description,
) -> describe_transactions_response::TransactionState {
    let mut topics: BTreeMap<Arc<str>, Vec<i32>> = BTreeMap::new();
    for (id, partition) in description.partitions {
        // A deleted topic has no name, and topics that the client may not see are left out.
        if let Ok(topic) = cx.topic(Operation::Describe, &TopicRef::Id(id)) {
            topics.entry(topic.name.clone()).or_default().push(partition);
        }
    }
    let topics = topics.into_iter().map(|(name, partitions)| {
        describe_transactions_response::TopicData::default()
            .with_topic(TopicName(StrBytes::from_string(name.to_string())))
            .with_partitions(partitions)
    });
    state
        .with_transaction_state(StrBytes::from_static_str(description.state.name()))
        .with_transaction_timeout_ms(description.timeout_ms)
        .with_transaction_start_time_ms(description.started_at_ms)
        .with_producer_id(ProducerId(description.producer_id))
        .with_producer_epoch(description.epoch)
        .with_topics(topics.collect())
}

pub(super) async fn list(
    cx: &Context,
    request: ListTransactionsRequest,
) -> ListTransactionsResponse {
    let wanted = &request.state_filters;
    let unknown = wanted.iter().filter(|name| !State::is_known(name)).cloned();
    let unknown = once(unknown, StrBytes::clone).collect();
    let response = ListTransactionsResponse::default().with_unknown_state_filters(unknown);
    // Filters may have a million elements, and each transaction is checked against them.
    let is_wanted = |state: &State| wanted.iter().any(|name| state.name() == name.as_str());
    let known: Vec<State> = State::ALL.into_iter().filter(is_wanted).collect();
    let producers: HashSet<i64> = request.producer_id_filters.iter().map(|id| id.0).collect();
    if known.is_empty() && !request.state_filters.is_empty() {
        return response;
    }
    let pattern = request.transactional_id_pattern.as_deref().filter(|text| !text.is_empty());
    let Ok(mut pattern) = pattern.map(Pattern::new).transpose() else {
        return response.with_error_code(ResponseError::InvalidRegularExpression.code());
    };
    let now_ms = unix_time_ms();
    let passes = |description: &Description| {
        let by_state = known.is_empty() || known.contains(&description.state);
        let by_producer = producers.is_empty() || producers.contains(&description.producer_id);
        // As in Kafka, a transaction that has never begun (time -1) is older than any duration.
        let by_duration = request.duration_filter < 0
            || now_ms - description.started_at_ms > request.duration_filter;
        by_state && by_producer && by_duration
    };
    let all = cx.server.transactions.all().into_iter();
    let visible = |id: &str| cx.may(Operation::Describe, Resource::TransactionalId(id));
    let mut states = Vec::new();
    for (id, description) in all.filter(|(id, found)| passes(found) && visible(id)) {
        match pattern.as_mut().map_or(Ok(true), |pattern| pattern.is_match(&id)) {
            Ok(true) => {}
            Ok(false) => continue,
            Err(TooCostly) => {
                return response.with_error_code(ResponseError::InvalidRegularExpression.code());
            }
        }
        states.push(
            list_transactions_response::TransactionState::default()
                .with_transactional_id(TransactionalId(StrBytes::from_string(id.to_string())))
                .with_producer_id(ProducerId(description.producer_id))
                .with_transaction_state(StrBytes::from_static_str(description.state.name())),
        );
    }
    response.with_transaction_states(states)
}

pub(super) async fn describe_producers(
    cx: &Context,
    request: DescribeProducersRequest,
) -> DescribeProducersResponse {
    let topics = once(request.topics, |topic| topic.name.clone()).map(|topic| {
        let partition = |index: i32| {
            let response = PartitionResponse::default().with_partition_index(index);
            let allowed = cx.authorize(Operation::Read, Resource::Topic(&topic.name));
            match allowed.and_then(|()| find(cx, &topic.name, index)) {
                Ok(partition) => {
                    let active = partition.active_producers().into_iter().map(|producer| {
                        ProducerState::default()
                            .with_producer_id(ProducerId(producer.id))
                            .with_producer_epoch(producer.epoch.into())
                            .with_last_sequence(producer.last_sequence)
                            .with_last_timestamp(producer.last_timestamp_ms)
                            .with_coordinator_epoch(0)
                            .with_current_txn_start_offset(producer.transaction.unwrap_or(-1))
                    });
                    response.with_error_message(None).with_active_producers(active.collect())
                }
                Err(error) => {
                    response.with_error_code(error.code()).with_error_message(error.message())
                }
            }
        };
        let partitions = once(topic.partition_indexes.clone(), |index| *index).map(partition);
        TopicResponse::default().with_partitions(partitions.collect()).with_name(topic.name.clone())
    });
    DescribeProducersResponse::default().with_topics(topics.collect())
}

/// Handles WriteTxnMarkers. The coordinator writes its markers without it; operators end with it
/// transactions that no coordinator will end.
pub(super) async fn write_markers(cx: Context, body: Bytes) -> Result<Answer, Refused> {
    let request: WriteTxnMarkersRequest = cx.decode(body)?;
    let until = Instant::now() + WAIT_MAX;
    let mut markers = Vec::new();
    for marker in request.markers {
        let mut topics = Vec::new();
        for topic in &marker.topics {
            let mut partitions = Vec::new();
            for index in &topic.partition_indexes {
                let written = write_marker(&cx, &marker, &topic.name, *index, until).await;
                partitions.push(
                    WritableTxnMarkerPartitionResult::default()
                        .with_partition_index(*index)
                        .with_error_code(written.map_or_else(|error| error.code(), |()| 0)),
                );
            }
            topics.push(
                WritableTxnMarkerTopicResult::default()
                    .with_name(topic.name.clone())
                    .with_partitions(partitions),
            );
        }
        markers.push(
            WritableTxnMarkerResult::default()
                .with_producer_id(marker.producer_id)
                .with_topics(topics),
        );
    }
    cx.reply(&WriteTxnMarkersResponse::default().with_markers(markers))
}

async fn write_marker(
    cx: &Context,
    marker: &WritableTxnMarker,
    topic: &str,
    index: i32,
    until: Instant,
) -> Result<(), ApiError> {
    // Kafka requires ALTER or CLUSTER_ACTION; the latter is used between brokers.
    if !cx.may(Operation::Alter, Resource::Cluster) {
        cx.authorize(Operation::ClusterAction, Resource::Cluster)?;
    }
    cx.check_writable()?;
    check_not_internal(topic)?;
    let topic = cx.server.topics.by_name(topic)?;
    if topic.rules.append.is_import {
        // A marker would take an offset of the import.
        return Err(ApiError::Importing);
    }
    let partition = topic.partition(index).ok_or(ApiError::UnknownTopicOrPartition)?;
    let outcome = if marker.transaction_result { Outcome::Commit } else { Outcome::Abort };
    let (producer_id, epoch) = (marker.producer_id.0, marker.producer_epoch);
    loop {
        match partition.append_foreign_marker(producer_id, epoch, outcome) {
            Ok(append) => return Ok(append.await?),
            Err(AppendRejected::Refused(error)) => return Err(error),
            Err(AppendRejected::Full) => {
                let freed = timeout_at(until, cx.server.store.wait_for_space()).await;
                freed.map_err(|_| ApiError::TimedOut)?;
            }
        }
    }
}

fn find(cx: &Context, topic: &str, index: i32) -> Result<Arc<Partition>, ApiError> {
    let topic = cx.server.topics.by_name(topic)?;
    topic.partition(index).cloned().ok_or(ApiError::UnknownTopicOrPartition)
}
