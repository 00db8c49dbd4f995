//! The APIs of transactional producers: AddPartitionsToTxn, AddOffsetsToTxn, TxnOffsetCommit,
//! EndTxn. See `docs/transactions.md`.

use std::collections::HashMap;
use std::sync::Arc;

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::add_partitions_to_txn_response::{
    AddPartitionsToTxnPartitionResult, AddPartitionsToTxnTopicResult,
};
use kafka_protocol::messages::txn_offset_commit_response::{
    TxnOffsetCommitResponsePartition, TxnOffsetCommitResponseTopic,
};
use kafka_protocol::messages::{
    AddOffsetsToTxnRequest, AddOffsetsToTxnResponse, AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse, EndTxnRequest, EndTxnResponse, ProducerId, TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
};

use super::Context;
use crate::batch::Outcome;
use crate::errors::ApiError;
use crate::groups::Position;
use crate::security::{Operation, Resource, ResourceType};
use crate::topics::{TopicRef, is_internal};
use crate::transactions::{Producer, Transactions};

/// The first version of EndTxn and TxnOffsetCommit that clients with version 2 of transactions
/// (KIP-890) send: each end raises the epoch, and partitions and groups join the transaction by
/// being used.
const FIRST_OF_VERSION_2: i16 = 5;

/// The first version of TxnOffsetCommit with TRANSACTION_ABORTABLE.
const FIRST_OFFSETS_WITH_ABORTABLE: i16 = 4;

/// The first version of AddPartitionsToTxn, AddOffsetsToTxn and EndTxn with PRODUCER_FENCED.
const FIRST_WITH_FENCED: i16 = 2;

fn code(error: ResponseError, version: i16) -> i16 {
    match error {
        ResponseError::ProducerFenced if version < FIRST_WITH_FENCED => {
            ResponseError::InvalidProducerEpoch.code()
        }
        error => error.code(),
    }
}

fn authorize(cx: &Context, transactional_id: &str) -> Result<(), ResponseError> {
    let id = Resource::TransactionalId(transactional_id);
    cx.authorize(Operation::Write, id).map_err(|error| error.kind())?;
    // As for InitProducerId, without which there is no such producer.
    cx.check_writable().map_err(|_| ResponseError::TransactionalIdAuthorizationFailed)
}

/// Adds all partitions, or none. Versions 0 to 3; the later ones are used between brokers.
pub(super) async fn add_partitions(
    cx: &Context,
    request: AddPartitionsToTxnRequest,
) -> AddPartitionsToTxnResponse {
    let (mut found, mut missing) = (Vec::new(), HashMap::new());
    for topic in &request.v3_and_below_topics {
        let wanted = TopicRef::Name(Arc::from(&**topic.name));
        // Kafka's error for its internal topics, which clients cannot write to.
        let known = match is_internal(&topic.name) {
            true => Err(ApiError::Unauthorized(ResourceType::Topic)),
            false => cx.topic(Operation::Write, &wanted),
        };
        for index in &topic.partitions {
            match &known {
                // A marker would take an offset of the import.
                Ok(known) if known.rules.append.is_import => {
                    let refused = ApiError::Importing.code();
                    missing.insert((topic.name.clone(), *index), refused);
                }
                Ok(known) if known.partition(*index).is_some() => found.push((known.id, *index)),
                Ok(_) => {
                    let unknown = ResponseError::UnknownTopicOrPartition.code();
                    missing.insert((topic.name.clone(), *index), unknown);
                }
                Err(error) => drop(missing.insert((topic.name.clone(), *index), error.code())),
            }
        }
    }
    let producer = Producer {
        transactional_id: &request.v3_and_below_transactional_id,
        id: request.v3_and_below_producer_id.0,
        epoch: request.v3_and_below_producer_epoch,
    };
    let allowed = authorize(cx, &request.v3_and_below_transactional_id);
    let outcome = match missing.is_empty() {
        _ if allowed.is_err() => allowed,
        true => cx.server.transactions.add(producer, found, Vec::new()).await,
        false => Err(ResponseError::OperationNotAttempted),
    };
    let outcome = outcome.map_or_else(|error| code(error, cx.version), |()| 0);
    let results = request.v3_and_below_topics.iter().map(|topic| {
        let partition = |index: &i32| {
            let missing = missing.get(&(topic.name.clone(), *index)).copied();
            let missing = missing.filter(|_| allowed.is_ok());
            AddPartitionsToTxnPartitionResult::default()
                .with_partition_index(*index)
                .with_partition_error_code(missing.unwrap_or(outcome))
        };
        AddPartitionsToTxnTopicResult::default()
            .with_name(topic.name.clone())
            .with_results_by_partition(topic.partitions.iter().map(partition).collect())
    });
    AddPartitionsToTxnResponse::default().with_results_by_topic_v3_and_below(results.collect())
}

pub(super) async fn add_offsets(
    cx: &Context,
    request: AddOffsetsToTxnRequest,
) -> AddOffsetsToTxnResponse {
    let producer = Producer {
        transactional_id: &request.transactional_id,
        id: request.producer_id.0,
        epoch: request.producer_epoch,
    };
    let groups = vec![request.group_id.as_str().to_owned()];
    let allowed = authorize(cx, &request.transactional_id).and_then(|()| {
        let group = Resource::Group(&request.group_id);
        cx.authorize(Operation::Read, group).map_err(|error| error.kind())
    });
    let added = match request.group_id.is_empty() {
        _ if allowed.is_err() => allowed,
        true => Err(ResponseError::InvalidGroupId),
        false => cx.server.transactions.add(producer, Vec::new(), groups).await,
    };
    let error_code = added.map_or_else(|error| code(error, cx.version), |()| 0);
    AddOffsetsToTxnResponse::default().with_error_code(error_code)
}

pub(super) async fn commit_offsets(
    cx: &Context,
    request: TxnOffsetCommitRequest,
) -> TxnOffsetCommitResponse {
    let groups = &cx.server.groups;
    let allowed = authorize(cx, &request.transactional_id).and_then(|()| {
        let group = Resource::Group(&request.group_id);
        cx.authorize(Operation::Read, group).map_err(|error| error.kind())
    });
    let view = cx.server.topics.view();
    let (mut good, mut meant, mut answers) = (Vec::new(), Vec::new(), Vec::new());
    for topic in &request.topics {
        let known = cx.server.topics.by_name(&topic.name).ok();
        let exists = |_: &str, index| known.as_ref().is_some_and(|t| t.partition(index).is_some());
        let (mut positions, mut errors) = (Vec::new(), Vec::new());
        for partition in &topic.partitions {
            let metadata = partition.committed_metadata.as_deref().unwrap_or_default();
            let index = partition.partition_index;
            let readable = cx.authorize(Operation::Read, Resource::Topic(&topic.name));
            let readable = readable.map_err(|error| error.kind());
            let checked =
                readable.and_then(|()| groups.check_position(&topic.name, index, metadata, exists));
            if checked.is_ok() {
                positions.push(Position {
                    partition: index,
                    offset: partition.committed_offset,
                    leader_epoch: partition.committed_leader_epoch,
                    metadata: metadata.to_owned(),
                });
            }
            errors.push((index, checked.err()));
        }
        if !positions.is_empty() {
            good.push((topic.name.as_str().to_owned(), positions));
            meant.extend(known.as_ref().map(|topic| topic.id));
        }
        answers.push((topic.name.clone(), errors));
    }
    let producer = Producer {
        transactional_id: &request.transactional_id,
        id: request.producer_id.0,
        epoch: request.producer_epoch,
    };
    let not_added = match cx.version {
        FIRST_OF_VERSION_2.. => None,
        FIRST_OFFSETS_WITH_ABORTABLE.. => Some(ResponseError::TransactionAbortable),
        _ => Some(ResponseError::InvalidTxnState),
    };
    // An earlier transaction may have been waited for, and another topic may have the name by now.
    let exist = || meant.iter().all(|id| cx.server.topics.by_id(*id).is_ok());
    let transactions = &cx.server.transactions;
    let outcome = match allowed {
        Err(refused) => Some(refused),
        Ok(()) => {
            let added = transactions.add_offsets(producer, &request, good, &view, not_added, exist);
            added.await.err()
        }
    };
    let topics = answers.into_iter().map(|(name, errors)| {
        let partitions = errors.into_iter().map(|(index, error)| {
            let code = outcome.or(error).map_or(0, |error| error.code());
            TxnOffsetCommitResponsePartition::default()
                .with_partition_index(index)
                .with_error_code(code)
        });
        TxnOffsetCommitResponseTopic::default()
            .with_name(name)
            .with_partitions(partitions.collect())
    });
    TxnOffsetCommitResponse::default().with_topics(topics.collect())
}

pub(super) async fn end(cx: &Context, request: EndTxnRequest) -> EndTxnResponse {
    let producer = Producer {
        transactional_id: &request.transactional_id,
        id: request.producer_id.0,
        epoch: request.producer_epoch,
    };
    let outcome = if request.committed { Outcome::Commit } else { Outcome::Abort };
    let raises_epoch = cx.version >= FIRST_OF_VERSION_2;
    let response = EndTxnResponse::default();
    let ended = match authorize(cx, &request.transactional_id) {
        Ok(()) => Transactions::end(&cx.server, producer, outcome, raises_epoch).await,
        Err(refused) => Err(refused),
    };
    match ended {
        Ok((id, epoch)) if raises_epoch => {
            response.with_producer_id(ProducerId(id)).with_producer_epoch(epoch)
        }
        Ok(_) => response,
        Err(error) => {
            tracing::debug!(id = &**request.transactional_id, %error, "transaction not ended");
            response.with_error_code(code(error, cx.version))
        }
    }
}
