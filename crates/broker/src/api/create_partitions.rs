//! CreatePartitions: adds partitions to existing topics.

use kafka_protocol::messages::create_partitions_request::CreatePartitionsTopic;
use kafka_protocol::messages::create_partitions_response::CreatePartitionsTopicResult;
use kafka_protocol::messages::{BrokerId, CreatePartitionsRequest, CreatePartitionsResponse};

use super::Context;
use crate::errors::ApiError;
use crate::security::{Operation, Resource};
use crate::wire::{once, repeated};

/// The first version with THROTTLING_QUOTA_EXCEEDED.
const FIRST_WITH_QUOTA: i16 = 3;

pub(super) async fn handle(
    cx: &Context,
    request: CreatePartitionsRequest,
) -> CreatePartitionsResponse {
    let repeated = repeated(request.topics.iter().map(|topic| &topic.name));
    let mut results = Vec::with_capacity(request.topics.len());
    // One result per name, as in Kafka.
    for topic in once(&request.topics, |topic| topic.name.clone()) {
        let grown = if repeated.contains(&topic.name) {
            Err(ApiError::InvalidRequest(format!(
                "topic {} is named more than once",
                &**topic.name
            )))
        } else {
            grow(cx, topic, request.validate_only).await
        };
        let result = CreatePartitionsTopicResult::default().with_name(topic.name.clone());
        results.push(match grown {
            Ok(()) => result.with_error_message(None),
            Err(error) => result.with_error_code(error.code()).with_error_message(error.message()),
        });
    }
    CreatePartitionsResponse::default().with_results(results)
}

async fn grow(
    cx: &Context,
    wanted: &CreatePartitionsTopic,
    validate_only: bool,
) -> Result<(), ApiError> {
    cx.authorize(Operation::Alter, Resource::Topic(&wanted.name))?;
    cx.check_writable()?;
    let total = u32::try_from(wanted.count).map_err(|_| {
        let reason = format!("{} partitions requested, at least 1 required", wanted.count);
        ApiError::InvalidPartitions(reason)
    })?;
    if let Some(assignments) = &wanted.assignments {
        let present = cx.server.topics.by_name(&wanted.name)?.partitions.len();
        // A number that is not greater than the present one is refused below.
        let new = (total as usize).saturating_sub(present);
        if new > 0 && new != assignments.len() {
            return Err(ApiError::InvalidReplicaAssignment(format!(
                "{} assignments given for {new} new partitions",
                assignments.len()
            )));
        }
        let only_this = [BrokerId(cx.server.node.id)];
        if assignments.iter().any(|assignment| assignment.broker_ids != only_this) {
            return Err(ApiError::InvalidReplicaAssignment(format!(
                "replicas can be assigned to broker {} only",
                cx.server.node.id
            )));
        }
    }
    // Requests that cannot succeed are not charged.
    let present = cx.server.topics.by_name(&wanted.name)?.partitions.len();
    cx.server.topics.grow(&wanted.name, total, true).await?;
    cx.charge_changes((total as usize).saturating_sub(present), FIRST_WITH_QUOTA)?;
    if validate_only {
        return Ok(());
    }
    cx.server.topics.grow(&wanted.name, total, false).await
}
