//! OffsetForLeaderEpoch: the end of a leader epoch (KIP-320).

use kafka_protocol::messages::offset_for_leader_epoch_request::OffsetForLeaderPartition;
use kafka_protocol::messages::offset_for_leader_epoch_response::{
    EpochEndOffset, OffsetForLeaderTopicResult,
};
use kafka_protocol::messages::{OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse};

use super::Context;
use crate::errors::ApiError;
use crate::security::{Operation, Resource};

pub(super) async fn handle(
    cx: &Context,
    request: OffsetForLeaderEpochRequest,
) -> OffsetForLeaderEpochResponse {
    let topic =
        |topic: kafka_protocol::messages::offset_for_leader_epoch_request::OffsetForLeaderTopic| {
            let partition = |wanted: &OffsetForLeaderPartition| {
                let answer = EpochEndOffset::default().with_partition(wanted.partition);
                match end_offset(cx, &topic.topic, wanted) {
                    Ok(Some((epoch, end))) => answer.with_leader_epoch(epoch).with_end_offset(end),
                    Ok(None) => answer,
                    Err(error) => answer.with_error_code(error.code()),
                }
            };
            OffsetForLeaderTopicResult::default()
                .with_partitions(topic.partitions.iter().map(partition).collect())
                .with_topic(topic.topic)
        };
    OffsetForLeaderEpochResponse::default()
        .with_topics(request.topics.into_iter().map(topic).collect())
}

/// The greatest epoch that is at most the wanted one, and its end; `None` if the wanted epoch has
/// not begun.
fn end_offset(
    cx: &Context,
    topic: &str,
    wanted: &OffsetForLeaderPartition,
) -> Result<Option<(i32, i64)>, ApiError> {
    cx.authorize(Operation::Describe, Resource::Topic(topic))?;
    let topic = cx.server.topics.by_name(topic)?;
    let partition = topic.partition(wanted.partition).ok_or(ApiError::UnknownTopicOrPartition)?;
    partition.check_leader_epoch(wanted.current_leader_epoch)?;
    Ok(partition.end_of_leader_epoch(wanted.leader_epoch))
}
