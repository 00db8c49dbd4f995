//! Requests of the consumer group protocol of KIP-848.

use bytes::Bytes;
use kafka_protocol::messages::{
    ApiKey, ConsumerGroupDescribeRequest, GroupId, TopicName, consumer_group_heartbeat_request,
};

use super::{World, encode, text};

pub(super) fn body(key: ApiKey, version: i16, world: &World) -> Option<Bytes> {
    Some(match key {
        ApiKey::ConsumerGroupHeartbeat => {
            use consumer_group_heartbeat_request::*;
            let owned = TopicPartitions::default()
                .with_topic_id(world.topic_id)
                .with_partitions(vec![0, 2]);
            let mut request = ConsumerGroupHeartbeatRequest::default()
                .with_group_id(GroupId(text(&world.group)))
                .with_member_id(text("member"))
                .with_member_epoch(5)
                .with_instance_id(Some(text("instance")))
                .with_rack_id(Some(text("rack")))
                .with_rebalance_timeout_ms(10_000)
                .with_subscribed_topic_names(Some(vec![TopicName(text(world.topic))]))
                .with_server_assignor(Some(text("uniform")))
                .with_topic_partitions(Some(vec![owned]));
            if version >= 1 {
                request.subscribed_topic_regex = Some(text("t.*"));
            }
            encode(&request, version)
        }
        ApiKey::ConsumerGroupDescribe => encode(
            &ConsumerGroupDescribeRequest::default()
                .with_group_ids(vec![GroupId(text(&world.group))])
                .with_include_authorized_operations(true),
            version,
        ),
        _ => return None,
    })
}
