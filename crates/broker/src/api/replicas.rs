//! The administration of replicas and their disks: ElectLeaders, AlterPartitionReassignments,
//! ListPartitionReassignments, DescribeLogDirs, AlterReplicaLogDirs.
//!
//! Each partition has one replica, on this broker, which leads it permanently, in one directory. So
//! these APIs respond as Kafka does if there is nothing to do.

use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::alter_partition_reassignments_request::ReassignablePartition;
use kafka_protocol::messages::alter_partition_reassignments_response::{
    ReassignablePartitionResponse, ReassignableTopicResponse,
};
use kafka_protocol::messages::alter_replica_log_dirs_response::{
    AlterReplicaLogDirPartitionResult, AlterReplicaLogDirTopicResult,
};
use kafka_protocol::messages::describe_log_dirs_response::{
    DescribeLogDirsPartition, DescribeLogDirsResult, DescribeLogDirsTopic,
};
use kafka_protocol::messages::elect_leaders_request::TopicPartitions;
use kafka_protocol::messages::elect_leaders_response::{PartitionResult, ReplicaElectionResult};
use kafka_protocol::messages::{
    AlterPartitionReassignmentsRequest, AlterPartitionReassignmentsResponse,
    AlterReplicaLogDirsRequest, AlterReplicaLogDirsResponse, BrokerId, DescribeLogDirsRequest,
    DescribeLogDirsResponse, ElectLeadersRequest, ElectLeadersResponse,
    ListPartitionReassignmentsRequest, ListPartitionReassignmentsResponse,
};
use kafka_protocol::protocol::StrBytes;

use super::{Answer, Context, Refused};
use crate::security::{Operation, Resource};
use crate::topics::Topic;
use crate::wire::newer::{DescribedLogDirs, Unchanged};
use crate::wire::once;

/// The name of the single log directory.
const LOG_DIR: &str = "/alluvium";

/// Election types: the preferred replica, and any live one.
const ELECTION_TYPES: [i8; 2] = [0, 1];

pub(super) async fn elect_leaders(
    cx: &Context,
    request: ElectLeadersRequest,
) -> ElectLeadersResponse {
    if let Err(error) = cx.authorize(Operation::Alter, Resource::Cluster) {
        // Version 0 has an error field in partitions only.
        let refused = |named: TopicPartitions| {
            let result = |index: &i32| {
                PartitionResult::default()
                    .with_partition_id(*index)
                    .with_error_code(error.code())
                    .with_error_message(error.message())
            };
            ReplicaElectionResult::default()
                .with_partition_result(named.partitions.iter().map(result).collect())
                .with_topic(named.topic)
        };
        let named = request.topic_partitions.unwrap_or_default().into_iter();
        return ElectLeadersResponse::default()
            .with_error_code(if cx.version >= 1 { error.code() } else { 0 })
            .with_replica_election_results(named.map(refused).collect());
    }
    if !ELECTION_TYPES.contains(&request.election_type) {
        let error = ResponseError::InvalidRequest.code();
        return ElectLeadersResponse::default().with_error_code(error);
    }
    // A request for all partitions lists only those whose leader changes.
    let elected = request.topic_partitions.unwrap_or_default().into_iter().map(|named| {
        let topic = cx.server.topics.by_name(&named.topic);
        let result = |index: i32| {
            let (error, message) = match &topic {
                Err(_) => (ResponseError::UnknownTopicOrPartition, "No such topic."),
                Ok(topic) if topic.partition(index).is_none() => {
                    (ResponseError::UnknownTopicOrPartition, "No such partition.")
                }
                Ok(_) => (
                    ResponseError::ElectionNotNeeded,
                    "Leader election not needed for topic partition.",
                ),
            };
            PartitionResult::default()
                .with_partition_id(index)
                .with_error_code(error.code())
                .with_error_message(Some(StrBytes::from_static_str(message)))
        };
        let results = named.partitions.iter().copied().map(result).collect();
        ReplicaElectionResult::default()
            .with_topic(named.topic.clone())
            .with_partition_result(results)
    });
    ElectLeadersResponse::default().with_replica_election_results(elected.collect())
}

pub(super) async fn alter_reassignments(
    cx: &Context,
    request: AlterPartitionReassignmentsRequest,
) -> AlterPartitionReassignmentsResponse {
    if let Err(error) = cx.authorize(Operation::Alter, Resource::Cluster) {
        return AlterPartitionReassignmentsResponse::default()
            .with_allow_replication_factor_change(request.allow_replication_factor_change)
            .with_error_code(error.code())
            .with_error_message(error.message());
    }
    let topics = request.topics.into_iter().map(|named| {
        let topic = cx.server.topics.by_name(&named.name).ok();
        let result = |partition: ReassignablePartition| {
            let result = ReassignablePartitionResponse::default()
                .with_partition_index(partition.partition_index);
            match reassign(cx.server.node.id, topic.as_deref(), &partition) {
                Ok(()) => result.with_error_message(None),
                Err((error, message)) => result
                    .with_error_code(error.code())
                    .with_error_message(Some(StrBytes::from_string(message))),
            }
        };
        let partitions = named.partitions.into_iter().map(result).collect();
        ReassignableTopicResponse::default()
            .with_name(named.name.clone())
            .with_partitions(partitions)
    });
    AlterPartitionReassignmentsResponse::default()
        .with_error_message(None)
        .with_allow_replication_factor_change(request.allow_replication_factor_change)
        .with_responses(topics.collect())
}

/// Checks a reassignment: only the existing assignment is valid. (The messages omit the topic's
/// name, which is a field beside them: a request may have a million partitions.)
fn reassign(
    this: i32,
    topic: Option<&Topic>,
    wanted: &ReassignablePartition,
) -> Result<(), (ResponseError, String)> {
    let Some(topic) = topic else {
        let message = "Unable to find a topic of this name.".to_owned();
        return Err((ResponseError::UnknownTopicOrPartition, message));
    };
    if topic.partition(wanted.partition_index).is_none() {
        let message = "Unable to find this partition.".to_owned();
        return Err((ResponseError::UnknownTopicOrPartition, message));
    }
    let Some(replicas) = &wanted.replicas else {
        let message = "No partition reassignment is in progress.".to_owned();
        return Err((ResponseError::NoReassignmentInProgress, message));
    };
    let invalid = |what: String| {
        let message = format!("The manual partition assignment includes {what}");
        Err((ResponseError::InvalidReplicaAssignment, message))
    };
    if replicas.is_empty() {
        return invalid("an empty replica list.".into());
    }
    if let Some(other) = replicas.iter().find(|replica| ***replica != this) {
        return invalid(format!("broker {}, but no such broker is registered.", **other));
    }
    if replicas.len() > 1 {
        return invalid(format!("the broker {this} more than once."));
    }
    Ok(())
}

pub(super) async fn list_reassignments(
    cx: &Context,
    _request: ListPartitionReassignmentsRequest,
) -> ListPartitionReassignmentsResponse {
    if let Err(error) = cx.authorize(Operation::Describe, Resource::Cluster) {
        return ListPartitionReassignmentsResponse::default()
            .with_error_code(error.code())
            .with_error_message(error.message());
    }
    ListPartitionReassignmentsResponse::default().with_error_message(None)
}

pub(super) async fn describe_log_dirs(cx: Context, body: Bytes) -> Result<Answer, Refused> {
    let Unchanged(request) = cx.decode(body)?;
    let mut response = described_log_dirs(&cx, &request);
    response.throttle_time_ms = cx.throttle_ms();
    cx.reply(&DescribedLogDirs(response))
}

fn described_log_dirs(cx: &Context, request: &DescribeLogDirsRequest) -> DescribeLogDirsResponse {
    if let Err(error) = cx.authorize(Operation::Describe, Resource::Cluster) {
        // The first versions have an error field in directories only.
        let response = DescribeLogDirsResponse::default();
        return match cx.version {
            3.. => response.with_error_code(error.code()),
            _ => response.with_results(vec![
                DescribeLogDirsResult::default()
                    .with_log_dir(StrBytes::from_static_str(LOG_DIR))
                    .with_error_code(error.code()),
            ]),
        };
    }
    let server = &cx.server;
    let describe = |name: &str, wanted: Option<&[i32]>| {
        let topic = server.topics.by_name(name).ok()?;
        let indexes: Vec<i32> = match wanted {
            Some(wanted) => once(wanted.iter().copied(), |index| *index).collect(),
            None => (0..).take(topic.partitions.len()).collect(),
        };
        let size = |index: i32| {
            let size_bytes = topic.partition(index)?.stream.size_bytes();
            Some(
                DescribeLogDirsPartition::default()
                    .with_partition_index(index)
                    .with_partition_size(i64::try_from(size_bytes).unwrap_or(i64::MAX)),
            )
        };
        let topic_name = StrBytes::from_string(name.to_owned()).into();
        let partitions = indexes.into_iter().filter_map(size).collect();
        Some(DescribeLogDirsTopic::default().with_name(topic_name).with_partitions(partitions))
    };
    let topics = match &request.topics {
        Some(topics) => once(topics, |topic| topic.topic.clone())
            .filter_map(|topic| describe(&topic.topic, Some(&topic.partitions)))
            .collect(),
        None => {
            server.topics.all().iter().filter_map(|topic| describe(&topic.name, None)).collect()
        }
    };
    // Total and free size are unknown: most of the data is in an object store.
    let result = DescribeLogDirsResult::default()
        .with_log_dir(StrBytes::from_static_str(LOG_DIR))
        .with_topics(topics);
    DescribeLogDirsResponse::default().with_results(vec![result])
}

pub(super) async fn alter_log_dirs(
    cx: &Context,
    request: AlterReplicaLogDirsRequest,
) -> AlterReplicaLogDirsResponse {
    let refused = cx.authorize(Operation::Alter, Resource::Cluster).err();
    let mut results = Vec::new();
    for dir in request.dirs {
        for topic in dir.topics {
            let result = |index: i32| {
                let error = if let Some(refused) = &refused {
                    refused.code()
                } else if &*dir.path != LOG_DIR {
                    ResponseError::LogDirNotFound.code()
                } else if !cx.server.topics.has_partition(&topic.name, index) {
                    ResponseError::UnknownTopicOrPartition.code()
                } else {
                    0
                };
                AlterReplicaLogDirPartitionResult::default()
                    .with_partition_index(index)
                    .with_error_code(error)
            };
            let partitions = topic.partitions.iter().copied().map(result).collect();
            results.push(
                AlterReplicaLogDirTopicResult::default()
                    .with_topic_name(topic.name)
                    .with_partitions(partitions),
            );
        }
    }
    AlterReplicaLogDirsResponse::default().with_results(results)
}

/// The nodes with a replica of a partition: this one.
pub(super) fn replicas(cx: &Context) -> Vec<BrokerId> {
    vec![BrokerId(cx.server.node.id)]
}
