//! CreateTopics.

use kafka_protocol::messages::create_topics_request::CreatableTopic;
use kafka_protocol::messages::create_topics_response::{
    CreatableTopicConfigs, CreatableTopicResult,
};
use kafka_protocol::messages::{BrokerId, CreateTopicsRequest, CreateTopicsResponse};
use kafka_protocol::protocol::StrBytes;

use super::{Context, describe_configs};
use crate::configs::Overrides;
use crate::errors::ApiError;
use crate::security::{Operation, Resource};
use crate::wire::{once, repeated};

/// The first version with THROTTLING_QUOTA_EXCEEDED.
const FIRST_WITH_QUOTA: i16 = 6;

/// Requests for more topics than this need a concurrency permit: each topic described in the
/// response takes about five KiB until the response is written.
const TOPICS_WITHOUT_PERMIT: usize = 50;

/// The number of topics per request whose settings are in the response; for further ones it only
/// confirms the creation. DescribeConfigs returns the settings of all.
const MAX_DESCRIBED: usize = 1_000;

pub(super) async fn handle(cx: &Context, request: CreateTopicsRequest) -> CreateTopicsResponse {
    if request.topics.len() > TOPICS_WITHOUT_PERMIT {
        cx.wait_for_permit().await;
    }
    let repeated = repeated(request.topics.iter().map(|topic| &topic.name));
    let mut results = Vec::with_capacity(request.topics.len());
    let mut described = 0;
    // One result per name, as in Kafka.
    for topic in once(&request.topics, |topic| topic.name.clone()) {
        let result = if repeated.contains(&topic.name) {
            Err(ApiError::InvalidRequest(format!(
                "topic {} is named more than once",
                &**topic.name
            )))
        } else {
            create(cx, topic, request.validate_only, described < MAX_DESCRIBED).await
        };
        described += usize::from(result.is_ok());
        results.push(result.unwrap_or_else(|error| {
            CreatableTopicResult::default()
                .with_name(topic.name.clone())
                .with_error_code(error.code())
                .with_error_message(error.message())
                .with_configs((cx.version < 5).then(Vec::new))
        }));
    }
    CreateTopicsResponse::default().with_topics(results)
}

async fn create(
    cx: &Context,
    wanted: &CreatableTopic,
    validate_only: bool,
    is_described: bool,
) -> Result<CreatableTopicResult, ApiError> {
    if !cx.may(Operation::Create, Resource::Cluster) {
        cx.authorize(Operation::Create, Resource::Topic(&wanted.name))?;
    }
    cx.check_writable()?;
    let partitions = partitions(cx, wanted)?;
    let mut overrides = Overrides::new();
    for config in &wanted.configs {
        let value = config.value.as_ref().ok_or_else(|| {
            ApiError::InvalidConfig(format!(
                "Null value not supported for topic configs: {}",
                &*config.name
            ))
        })?;
        overrides.insert(config.name.to_string(), value.to_string());
    }
    // Requests that cannot succeed are not charged.
    let mut topic =
        cx.server.create_topic(&wanted.name, partitions, overrides.clone(), true).await?;
    cx.charge_changes(partitions as usize, FIRST_WITH_QUOTA)?;
    if !validate_only {
        topic = cx.server.create_topic(&wanted.name, partitions, overrides, false).await?;
    }
    let may_be_described = match is_described {
        true => cx.authorize(Operation::DescribeConfigs, Resource::Topic(&wanted.name)),
        false => Err(ApiError::PolicyViolation(format!(
            "settings are returned for the first {MAX_DESCRIBED} topics of a request only"
        ))),
    };
    if let Err(error) = may_be_described {
        // The topic is created, but its settings are withheld.
        return Ok(CreatableTopicResult::default()
            .with_name(wanted.name.clone())
            .with_topic_id(topic.id)
            .with_error_message(None)
            .with_topic_config_error_code(if cx.version >= 5 { error.code() } else { 0 })
            .with_configs((cx.version < 5).then(Vec::new)));
    }
    let values = describe_configs::values_of_topic(&cx.server, &topic);
    let configs = values.map(|(name, value, source)| {
        CreatableTopicConfigs::default()
            .with_name(StrBytes::from_static_str(name))
            .with_value(Some(StrBytes::from_string(value)))
            .with_config_source(source as i8)
    });
    Ok(CreatableTopicResult::default()
        .with_name(wanted.name.clone())
        .with_topic_id(topic.id)
        .with_error_message(None)
        .with_num_partitions(i32::try_from(partitions).expect("partitions are bounded"))
        .with_replication_factor(1)
        .with_configs(Some(configs.collect())))
}

/// The number of partitions that the request specifies, directly or by an assignment.
fn partitions(cx: &Context, wanted: &CreatableTopic) -> Result<u32, ApiError> {
    if wanted.assignments.is_empty() {
        if !matches!(wanted.replication_factor, 1 | -1) {
            return Err(ApiError::InvalidReplicationFactor(wanted.replication_factor));
        }
        return match wanted.num_partitions {
            -1 => Ok(cx.server.config.default_partitions),
            count => u32::try_from(count).ok().filter(|count| *count > 0).ok_or_else(|| {
                ApiError::InvalidPartitions(format!(
                    "{count} partitions requested, at least 1 required"
                ))
            }),
        };
    }
    if wanted.num_partitions != -1 || wanted.replication_factor != -1 {
        return Err(ApiError::InvalidRequest(
            "with a replica assignment, the number of partitions and the replication factor must \
             be -1"
                .into(),
        ));
    }
    let mut indexes: Vec<i32> =
        wanted.assignments.iter().map(|assignment| assignment.partition_index).collect();
    indexes.sort_unstable();
    if !indexes.iter().copied().eq(0..indexes.len() as i32) {
        return Err(ApiError::InvalidReplicaAssignment(
            "the assigned partitions must be numbered 0, 1, 2 and so on".into(),
        ));
    }
    let only_this = [BrokerId(cx.server.node.id)];
    if wanted.assignments.iter().any(|assignment| assignment.broker_ids != only_this) {
        return Err(ApiError::InvalidReplicaAssignment(format!(
            "replicas can be assigned to broker {} only",
            cx.server.node.id
        )));
    }
    Ok(indexes.len() as u32)
}
