//! DeleteTopics, by name or by ID.

use std::sync::Arc;

use kafka_protocol::messages::delete_topics_request::DeleteTopicState;
use kafka_protocol::messages::delete_topics_response::DeletableTopicResult;
use kafka_protocol::messages::{DeleteTopicsRequest, DeleteTopicsResponse};
use kafka_protocol::protocol::StrBytes;

use super::Context;
use crate::errors::ApiError;
use crate::security::{Operation, Resource};
use crate::topics::TopicRef;

/// The first version with THROTTLING_QUOTA_EXCEEDED.
const FIRST_WITH_QUOTA: i16 = 5;

pub(super) async fn handle(cx: &Context, request: DeleteTopicsRequest) -> DeleteTopicsResponse {
    let by_name = request
        .topic_names
        .into_iter()
        .map(|name| DeleteTopicState::default().with_name(Some(name)));
    let mut responses = Vec::new();
    let mut deleted = Vec::new();
    for deleting in by_name.chain(request.topics) {
        let mut result = DeletableTopicResult::default()
            .with_name(deleting.name.clone())
            .with_topic_id(deleting.topic_id)
            .with_error_message(None);
        match delete(cx, &deleting).await {
            Ok(topic) => {
                result.name = Some(StrBytes::from_string(topic.name.to_string()).into());
                result.topic_id = topic.id;
                deleted.push(topic.name.to_string());
            }
            Err(error) => {
                result.error_code = error.code();
                result.error_message = error.message();
            }
        }
        responses.push(result);
    }
    // Topics that are being deleted concurrently may exist again after a crash. Their offsets are
    // left to the request that deletes them.
    let topics = &cx.server.topics;
    let is_stored = |name: &str| topics.stored_by_name(name).is_some();
    if let Err(error) = cx.server.groups.forget_missing_topics(&deleted, is_stored).await {
        // They occupy space until the next start, and are dropped before another topic of the name
        // is created.
        tracing::warn!(topics = ?deleted, %error, "committed offsets not dropped");
    }
    if !deleted.is_empty() {
        cx.server.groups.shares().forget_missing_topics(|id| topics.stored_by_id(id).is_some());
    }
    DeleteTopicsResponse::default().with_responses(responses)
}

async fn delete(
    cx: &Context,
    deleting: &DeleteTopicState,
) -> Result<Arc<crate::topics::Topic>, ApiError> {
    let topic = match &deleting.name {
        Some(name) if deleting.topic_id.is_nil() => TopicRef::Name(Arc::from(&***name)),
        Some(_) => {
            return Err(ApiError::InvalidRequest(
                "a topic must not have both a name and an ID".into(),
            ));
        }
        None if deleting.topic_id.is_nil() => {
            return Err(ApiError::InvalidRequest("a topic must have a name or an ID".into()));
        }
        None => TopicRef::Id(deleting.topic_id),
    };
    let unseen = |error| match (error, &topic) {
        // A client that may not see a topic does not learn that its ID exists.
        (ApiError::Unauthorized(_), TopicRef::Id(_)) => ApiError::UnknownTopicId,
        (error, _) => error,
    };
    // As in Kafka, the right to delete in the cluster includes each of its topics.
    let deleting = match cx.may(Operation::Delete, Resource::Cluster) {
        true => cx.server.topics.find(&topic)?,
        false => {
            cx.topic(Operation::Describe, &topic).map_err(unseen)?;
            cx.topic(Operation::Delete, &topic)?
        }
    };
    cx.check_writable()?;
    let partitions = deleting.partitions.len();
    cx.charge_changes(partitions, FIRST_WITH_QUOTA)?;
    cx.server.topics.delete(&topic).await
}
