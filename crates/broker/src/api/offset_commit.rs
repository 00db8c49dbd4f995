//! OffsetCommit: topics by name, or by ID since version 10.

use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::{OffsetCommitResponse, TopicName};
use kafka_protocol::protocol::StrBytes;
use uuid::Uuid;

use super::{Answer, Context, Refused, groups};
use crate::groups::TopicsView;
use crate::topics::Topic;
use crate::wire::offsets::{OffsetCommit, OffsetCommitted};

/// The first version with topic IDs instead of names.
pub(super) const FIRST_WITH_TOPIC_IDS: i16 = 10;

pub(super) async fn handle(cx: Context, body: Bytes) -> Result<Answer, Refused> {
    let request = cx.decode(body)?;
    let mut response = committed(&cx, request).await;
    response.body.throttle_time_ms = cx.throttle_ms();
    cx.reply(&response)
}

async fn committed(cx: &Context, request: OffsetCommit) -> OffsetCommitted {
    let OffsetCommit { mut body, topic_ids } = request;
    if cx.version < FIRST_WITH_TOPIC_IDS {
        let body = groups::offset_commit(cx, body, |_| true).await;
        return OffsetCommitted { body, topic_ids };
    }
    // One snapshot for all, so that no two IDs have the same name.
    let view = cx.server.topics.view();
    for (topic, id) in body.topics.iter_mut().zip(&topic_ids) {
        // The others keep an empty name, which no topic has.
        if let Some(name) = view.name(*id) {
            topic.name = TopicName(StrBytes::from_string(name.to_string()));
        }
    }
    // Offsets are stored by name, which another topic may have by now.
    let is_meant = |topic: &Topic| view.name(topic.id).is_some();
    let mut body = groups::offset_commit(cx, body, is_meant).await;
    set_unknown_ids(&mut body, &topic_ids, &cx.server.topics.view());
    OffsetCommitted { body, topic_ids }
}

/// Sets UNKNOWN_TOPIC_ID for topics without a name and for topics deleted since. Errors of the
/// whole group take precedence, as in versions without IDs.
fn set_unknown_ids(response: &mut OffsetCommitResponse, ids: &[Uuid], now: &TopicsView) {
    for (topic, id) in response.topics.iter_mut().zip(ids) {
        let is_unnamed = topic.name.is_empty();
        let is_gone = is_unnamed || now.name(*id).is_none();
        for partition in &mut topic.partitions {
            let is_unknown = match ResponseError::try_from_code(partition.error_code) {
                Some(ResponseError::UnknownTopicOrPartition) => is_gone,
                Some(ResponseError::TopicAuthorizationFailed) => is_unnamed,
                _ => false,
            };
            if is_unknown {
                partition.error_code = ResponseError::UnknownTopicId.code();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kafka_protocol::messages::offset_commit_response::{
        OffsetCommitResponsePartition, OffsetCommitResponseTopic,
    };

    use super::*;

    #[test]
    fn a_topic_deleted_during_the_commit_gets_unknown_topic_id() {
        let ids = [1, 2, 3].map(Uuid::from_u128);
        // `a` was deleted, and another topic has its name.
        let topics = [("a", 4), ("b", 2)].map(|(name, id)| (name.into(), Uuid::from_u128(id), 1));
        let now = TopicsView::new(1, topics.into_iter());
        let [no_partition, no_member, denied, no_id] = [
            ResponseError::UnknownTopicOrPartition.code(),
            ResponseError::UnknownMemberId.code(),
            ResponseError::TopicAuthorizationFailed.code(),
            ResponseError::UnknownTopicId.code(),
        ];
        let codes = [0, no_partition, no_member, denied];
        let topic = |name: &'static str| {
            let partition = |code| OffsetCommitResponsePartition::default().with_error_code(code);
            OffsetCommitResponseTopic::default()
                .with_name(TopicName(StrBytes::from_static_str(name)))
                .with_partitions(codes.map(partition).into())
        };
        let mut response =
            OffsetCommitResponse::default().with_topics(["a", "b", ""].map(topic).into());
        set_unknown_ids(&mut response, &ids, &now);
        let answered = response.topics.iter().map(|topic| {
            topic.partitions.iter().map(|partition| partition.error_code).collect::<Vec<_>>()
        });
        let expected = [
            [0, no_id, no_member, denied],
            [0, no_partition, no_member, denied],
            [0, no_id, no_member, no_id],
        ];
        assert_eq!(answered.collect::<Vec<_>>(), expected);
    }
}
