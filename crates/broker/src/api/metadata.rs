//! Metadata: the brokers and the topics. Creates requested topics where that is allowed.

use std::sync::Arc;
use std::time::Instant;

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::metadata_request::MetadataRequestTopic;
use kafka_protocol::messages::metadata_response::{
    MetadataResponseBroker, MetadataResponsePartition, MetadataResponseTopic,
};
use kafka_protocol::messages::{BrokerId, MetadataRequest, MetadataResponse};
use kafka_protocol::protocol::StrBytes;

use super::Context;
use super::describe_cluster;
use crate::configs::Overrides;
use crate::errors::ApiError;
use crate::partition::Partition;
use crate::security::{Operation, Resource};
use crate::topics::{METADATA_TOPIC, Topic, TopicRef, is_internal};
use crate::wire::once;

/// Responses with more partitions need a concurrency permit.
const PARTITIONS_WITHOUT_PERMIT: usize = 2_000;

pub(super) async fn handle(cx: &Context, request: MetadataRequest) -> MetadataResponse {
    let node = &cx.server.node;
    let mut topics = Vec::new();
    // Version 0 has no null list; its empty list means all.
    let wanted = request.topics.filter(|wanted| !wanted.is_empty() || cx.version > 0);
    let partitions = match &wanted {
        Some(wanted) => wanted.iter().map(|topic| partitions_of(cx, topic)).sum(),
        None => cx.server.topics.partitions(),
    };
    if partitions > PARTITIONS_WITHOUT_PERMIT {
        cx.wait_for_permit().await;
    }
    match wanted {
        Some(wanted) => {
            for topic in once(&wanted, |topic| (&topic.name, topic.topic_id)) {
                topics.push(describe_wanted(cx, topic, request.allow_auto_topic_creation).await);
            }
        }
        None => {
            let all = cx.server.topics.all();
            let may =
                |topic: &&Arc<Topic>| cx.may(Operation::Describe, Resource::Topic(&topic.name));
            topics.extend(all.iter().filter(may).map(|topic| describe(cx, topic)));
        }
    }
    if request.include_topic_authorized_operations {
        // As in Kafka: for each topic whose name the client may see, whether it exists or not.
        let hidden = ResponseError::TopicAuthorizationFailed.code();
        for topic in topics.iter_mut().filter(|topic| topic.error_code != hidden) {
            let Some(name) = topic.name.as_deref().filter(|name| !name.is_empty()) else {
                continue;
            };
            topic.topic_authorized_operations = cx.authorized_operations(Resource::Topic(name));
        }
    }
    let mut response = MetadataResponse::default()
        .with_brokers(vec![
            MetadataResponseBroker::default()
                .with_node_id(BrokerId(node.id))
                .with_host(cx.peer.listener.host.clone())
                .with_port(cx.peer.listener.port)
                .with_rack(node.rack.clone()),
        ])
        .with_cluster_id(Some(node.cluster_id.clone()))
        .with_controller_id(BrokerId(node.id))
        .with_topics(topics);
    if request.include_cluster_authorized_operations {
        response.cluster_authorized_operations = describe_cluster::operations(cx);
    }
    response
}

/// The number of partitions that the response may have for a topic.
fn partitions_of(cx: &Context, wanted: &MetadataRequestTopic) -> usize {
    let topics = &cx.server.topics;
    let found = match &wanted.name {
        Some(name) if wanted.topic_id.is_nil() => topics.by_name(name),
        _ => topics.by_id(wanted.topic_id),
    };
    // It may be created by this request.
    found.map_or(cx.server.config.default_partitions as usize, |topic| topic.partitions.len())
}

async fn describe_wanted(
    cx: &Context,
    wanted: &MetadataRequestTopic,
    may_create: bool,
) -> MetadataResponseTopic {
    let found = match &wanted.name {
        // kafka-clients sends an empty name with an ID.
        _ if !wanted.topic_id.is_nil() => {
            match cx.topic(Operation::Describe, &TopicRef::Id(wanted.topic_id)) {
                // A client that may not see a topic does not learn that its ID exists.
                Err(ApiError::Unauthorized(_)) => Err(ApiError::UnknownTopicId),
                found => found,
            }
        }
        Some(name) => by_name(cx, name, may_create).await,
        None => Err(ApiError::InvalidRequest("a topic must have a name or an ID".into())),
    };
    match found {
        Ok(topic) => describe(cx, &topic),
        Err(error) => {
            // The first versions have no nullable name, and the request had one.
            let name = wanted.name.clone().filter(|_| wanted.topic_id.is_nil());
            let name = name.or_else(|| (cx.version < 12).then(Default::default));
            MetadataResponseTopic::default()
                .with_error_code(error.code())
                .with_name(name)
                .with_topic_id(wanted.topic_id)
        }
    }
}

async fn by_name(cx: &Context, name: &str, may_create: bool) -> Result<Arc<Topic>, ApiError> {
    let server = &cx.server;
    cx.authorize(Operation::Describe, Resource::Topic(name))?;
    match server.topics.by_name(name) {
        Err(ApiError::UnknownTopicOrPartition)
            if may_create && server.config.auto_create_topics && name != METADATA_TOPIC =>
        {
            if !cx.may(Operation::Create, Resource::Cluster) {
                cx.authorize(Operation::Create, Resource::Topic(name))?;
            }
            crate::topics::check_name(name)?;
            // A client that deletes a topic and then requests its metadata finds none, as in Kafka,
            // where a new topic takes a moment to appear. The tests of kafka-go rely on that.
            if server.topics.is_just_deleted(name, Instant::now()) {
                return Err(ApiError::UnknownTopicOrPartition);
            }
            // A throttled client gets the error for a missing topic, and retries.
            let partitions = server.config.default_partitions as usize;
            cx.charge_changes(partitions, 0).map_err(|_| ApiError::UnknownTopicOrPartition)?;
            match server
                .create_topic(name, server.config.default_partitions, Overrides::new(), false)
                .await
            {
                // Another request was faster.
                Err(ApiError::TopicExists(_)) => server.topics.by_name(name),
                created => created,
            }
        }
        Err(ApiError::UnknownTopicOrPartition) => {
            crate::topics::check_name(name)?;
            Err(ApiError::UnknownTopicOrPartition)
        }
        found => found,
    }
}

fn describe(cx: &Context, topic: &Topic) -> MetadataResponseTopic {
    let node = BrokerId(cx.server.node.id);
    let partition = |(index, partition): (usize, &Arc<Partition>)| {
        MetadataResponsePartition::default()
            .with_partition_index(i32::try_from(index).expect("partitions are bounded"))
            .with_leader_id(node)
            .with_leader_epoch(partition.leader_epoch())
            .with_replica_nodes(vec![node])
            .with_isr_nodes(vec![node])
    };
    MetadataResponseTopic::default()
        .with_name(Some(StrBytes::from_string(topic.name.to_string()).into()))
        .with_topic_id(topic.id)
        .with_is_internal(is_internal(&topic.name))
        .with_partitions(topic.partitions.iter().enumerate().map(partition).collect())
}
