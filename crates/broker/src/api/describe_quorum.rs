//! DescribeQuorum: the quorum that stores the metadata. It consists of this server alone, and its
//! log is the catalog in the object store, whose version increases with each publication.

use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::describe_quorum_response::{
    Node, PartitionData, ReplicaState, TopicData,
};
use kafka_protocol::messages::{
    BrokerId, DescribeQuorumRequest, DescribeQuorumResponse, describe_quorum_request,
};
use uuid::Uuid;

use super::{Answer, Context, Refused};
use crate::partition::unix_time_ms;
use crate::security::{Operation, Resource};
use crate::topics::METADATA_TOPIC;

pub(super) async fn handle(cx: Context, body: Bytes) -> Result<Answer, Refused> {
    let request: DescribeQuorumRequest = cx.decode(body)?;
    let response = DescribeQuorumResponse::default();
    if let Err(error) = cx.authorize(Operation::Describe, Resource::Cluster) {
        let message = if cx.version >= 2 { error.message() } else { None };
        return cx.reply(&response.with_error_code(error.code()).with_error_message(message));
    }
    let is_known = matches!(
        &request.topics[..],
        [topic] if &**topic.topic_name == METADATA_TOPIC
            && matches!(&topic.partitions[..], [partition] if partition.partition_index == 0)
    );
    let topics = request.topics.iter().map(|topic| {
        let partitions = topic.partitions.iter();
        let described = partitions.map(|partition| match is_known {
            true => described(&cx),
            false => unknown(partition),
        });
        TopicData::default()
            .with_topic_name(topic.topic_name.clone())
            .with_partitions(described.collect())
    });
    let mut response = response.with_topics(topics.collect());
    if cx.version >= 2 && is_known {
        // Clients use the brokers' listeners: there are no controllers with listeners of their own.
        response.nodes = vec![Node::default().with_node_id(BrokerId(cx.server.node.id))];
    }
    cx.reply(&response)
}

fn described(cx: &Context) -> PartitionData {
    let this = BrokerId(cx.server.node.id);
    let version = i64::try_from(cx.server.store.catalog_version()).unwrap_or(i64::MAX);
    let mut voter = ReplicaState::default().with_replica_id(this).with_log_end_offset(version);
    if cx.version >= 1 {
        let now_ms = unix_time_ms();
        voter.last_fetch_timestamp = now_ms;
        voter.last_caught_up_timestamp = now_ms;
    }
    if cx.version >= 2 {
        voter.replica_directory_id = Uuid::nil();
    }
    PartitionData::default()
        .with_leader_id(this)
        // One voter leads the quorum permanently.
        .with_leader_epoch(0)
        .with_high_watermark(version)
        .with_current_voters(vec![voter])
}

fn unknown(partition: &describe_quorum_request::PartitionData) -> PartitionData {
    PartitionData::default()
        .with_partition_index(partition.partition_index)
        .with_error_code(ResponseError::UnknownTopicOrPartition.code())
        .with_error_message(None)
        .with_leader_id(BrokerId(-1))
        .with_leader_epoch(-1)
        .with_high_watermark(-1)
}
