//! DeleteRecords: deletes the oldest records of partitions.

use std::collections::BTreeMap;

use alluvium_stream::{Change, StoreError, StreamOffset};
use kafka_protocol::messages::delete_records_request::DeleteRecordsTopic;
use kafka_protocol::messages::delete_records_response::{
    DeleteRecordsPartitionResult, DeleteRecordsTopicResult,
};
use kafka_protocol::messages::{DeleteRecordsRequest, DeleteRecordsResponse};

use super::Context;
use crate::errors::ApiError;
use crate::partition::{Partition, kafka_offset};
use crate::security::{Operation, Resource, ResourceType};
use crate::topics::check_not_internal;

/// The offset that means "all records that consumers can see".
const HIGH_WATERMARK: i64 = -1;

pub(super) async fn handle(cx: &Context, request: DeleteRecordsRequest) -> DeleteRecordsResponse {
    let mut topics = Vec::with_capacity(request.topics.len());
    for wanted in request.topics {
        let partitions = delete(cx, &wanted).await;
        topics.push(
            DeleteRecordsTopicResult::default().with_name(wanted.name).with_partitions(partitions),
        );
    }
    DeleteRecordsResponse::default().with_topics(topics)
}

/// Trims the partitions of a topic in one commit. A trimmed partition starts at the offset given in
/// the response.
async fn delete(cx: &Context, wanted: &DeleteRecordsTopic) -> Vec<DeleteRecordsPartitionResult> {
    let allowed = cx.authorize(Operation::Delete, Resource::Topic(&wanted.name));
    let topic = cx.server.topics.by_name(&wanted.name);
    // If a partition is named more than once, the last one counts, as in Kafka.
    let mut changes = BTreeMap::new();
    let mut outcomes = Vec::with_capacity(wanted.partitions.len());
    for asked in &wanted.partitions {
        let mut check = || {
            allowed.as_ref().map_err(|_| ApiError::Unauthorized(ResourceType::Topic))?;
            let topic = topic.as_ref().map_err(|_| ApiError::UnknownTopicOrPartition)?;
            let partition =
                topic.partition(asked.partition_index).ok_or(ApiError::UnknownTopicOrPartition)?;
            cx.check_writable()?;
            check_not_internal(&topic.name)?;
            if topic.rules.only_compacts {
                return Err(ApiError::PolicyViolation(
                    "records of a topic with cleanup.policy=compact cannot be deleted".into(),
                ));
            }
            let to = trim_to(partition, asked.offset)?;
            let (id, epoch) = (partition.stream.id(), partition.writer_epoch()?);
            if epoch != partition.stream.newest_epoch() {
                return Err(ApiError::NotLeader("another server leads this partition".into()));
            }
            changes.insert(id, Change::TrimStream { id, epoch, to });
            Ok(partition)
        };
        outcomes.push((asked.partition_index, check()));
    }
    let committed = if changes.is_empty() {
        Ok(())
    } else {
        cx.server.store.commit(changes.into_values().collect()).await.map_err(|error| match error {
            StoreError::InvalidChange(_) => ApiError::UnknownTopicOrPartition,
            error => error.into(),
        })
    };
    if let Err(error) = &committed {
        tracing::warn!(topic = &**wanted.name, %error, "records not deleted");
    }
    let mut results = Vec::with_capacity(outcomes.len());
    for (index, outcome) in outcomes {
        let result = DeleteRecordsPartitionResult::default().with_partition_index(index);
        results.push(match (outcome, &committed) {
            (Ok(partition), Ok(())) => {
                partition.record_trim();
                result.with_low_watermark(partition.log_start())
            }
            (Err(error), _) => result.with_low_watermark(-1).with_error_code(error.code()),
            (_, Err(error)) => result.with_low_watermark(-1).with_error_code(error.code()),
        });
    }
    results
}

/// The offset to trim a partition to.
fn trim_to(partition: &Partition, offset: i64) -> Result<StreamOffset, ApiError> {
    let end = partition.stream.durable_end();
    if offset == HIGH_WATERMARK {
        return Ok(end);
    }
    match u64::try_from(offset) {
        Ok(to) if offset <= kafka_offset(end) => Ok(StreamOffset(to)),
        _ => {
            Err(ApiError::OffsetOutOfRange { offset, start: partition.stream.start_offset(), end })
        }
    }
}
