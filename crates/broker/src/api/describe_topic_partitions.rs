//! DescribeTopicPartitions: the partitions of topics, in pages.

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::describe_topic_partitions_request::TopicRequest;
use kafka_protocol::messages::describe_topic_partitions_response::{
    Cursor, DescribeTopicPartitionsResponsePartition, DescribeTopicPartitionsResponseTopic,
};
use kafka_protocol::messages::{
    BrokerId, DescribeTopicPartitionsRequest, DescribeTopicPartitionsResponse, TopicName,
};
use kafka_protocol::protocol::StrBytes;

use super::Context;
use super::replicas::replicas;
use crate::errors::ApiError;
use crate::security::{Operation, Resource};
use crate::topics::{check_name, is_internal};

/// The greatest number of partitions in one response, as in Kafka
/// (`max.request.partition.size.limit`).
const MAX_PARTITIONS: usize = 2_000;

pub(super) async fn handle(
    cx: &Context,
    request: DescribeTopicPartitionsRequest,
) -> DescribeTopicPartitionsResponse {
    let server = &cx.server;
    if let Some(cursor) = &request.cursor {
        let is_named = request.topics.iter().any(|topic| topic.name == cursor.topic_name);
        if cursor.partition_index < 0 || !(is_named || request.topics.is_empty()) {
            return refused(&request);
        }
    }
    let describable = |name: &str| cx.authorize(Operation::Describe, Resource::Topic(name));
    let (first_topic, first_partition) = match &request.cursor {
        Some(cursor) => (cursor.topic_name.to_string(), cursor.partition_index),
        None => (String::new(), 0),
    };
    let mut names: Vec<String> = if request.topics.is_empty() {
        let all = server.topics.all();
        let seen = all.iter().filter(|topic| describable(&topic.name).is_ok());
        seen.map(|topic| topic.name.to_string()).collect()
    } else {
        request.topics.iter().map(|topic| topic.name.to_string()).collect()
    };
    names.retain(|name| *name >= first_topic);
    names.sort_unstable();
    names.dedup();

    let limit = usize::try_from(request.response_partition_limit).unwrap_or(0);
    let mut left = limit.clamp(1, MAX_PARTITIONS);
    let mut response = DescribeTopicPartitionsResponse::default().with_next_cursor(None);
    for name in names {
        let from = if name == first_topic { first_partition } else { 0 };
        let wire_name = TopicName(StrBytes::from_string(name.clone()));
        if left == 0 {
            response.next_cursor =
                Some(Cursor::default().with_topic_name(wire_name).with_partition_index(from));
            break;
        }
        let found = describable(&name)
            .and_then(|()| check_name(&name))
            .and_then(|()| server.topics.by_name(&name));
        let described =
            DescribeTopicPartitionsResponseTopic::default().with_name(Some(wire_name.clone()));
        let topic = match found {
            Ok(topic) => topic,
            Err(error) => {
                // An error counts as a partition too, so that the response stays bounded.
                left -= 1;
                response.topics.push(described.with_error_code(ApiError::code(&error)));
                continue;
            }
        };
        let count = i32::try_from(topic.partitions.len()).unwrap_or(i32::MAX);
        let end = count.min(from.saturating_add(i32::try_from(left).unwrap_or(i32::MAX)));
        let partition = |index: i32| {
            DescribeTopicPartitionsResponsePartition::default()
                .with_partition_index(index)
                .with_leader_id(BrokerId(server.node.id))
                .with_leader_epoch(topic.partitions[index as usize].leader_epoch())
                .with_replica_nodes(replicas(cx))
                .with_isr_nodes(replicas(cx))
                .with_eligible_leader_replicas(Some(Vec::new()))
                .with_last_known_elr(Some(Vec::new()))
        };
        let partitions: Vec<_> = (from..end).map(partition).collect();
        left -= partitions.len();
        response.topics.push(
            described
                .with_topic_id(topic.id)
                .with_is_internal(is_internal(&topic.name))
                .with_topic_authorized_operations(cx.authorized_operations(Resource::Topic(&name)))
                .with_partitions(partitions),
        );
        if end < count {
            response.next_cursor =
                Some(Cursor::default().with_topic_name(wire_name).with_partition_index(end));
            break;
        }
    }
    response
}

/// Kafka's response to a cursor that no response for these topics contained.
fn refused(request: &DescribeTopicPartitionsRequest) -> DescribeTopicPartitionsResponse {
    let refused = |topic: &TopicRequest| {
        DescribeTopicPartitionsResponseTopic::default()
            .with_name(Some(topic.name.clone()))
            .with_error_code(ResponseError::InvalidRequest.code())
    };
    DescribeTopicPartitionsResponse::default()
        .with_next_cursor(None)
        .with_topics(request.topics.iter().map(refused).collect())
}
