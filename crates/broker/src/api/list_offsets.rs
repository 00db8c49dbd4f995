//! ListOffsets: the offset of a timestamp, or one of the ends of a partition.

use std::time::Duration;

use kafka_protocol::messages::list_offsets_request::{ListOffsetsPartition, ListOffsetsTopic};
use kafka_protocol::messages::list_offsets_response::{
    ListOffsetsPartitionResponse, ListOffsetsTopicResponse,
};
use kafka_protocol::messages::{ListOffsetsRequest, ListOffsetsResponse};

use alluvium_stream::{Batch, FetchError, StreamOffset, Tiers};
use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use tokio::time::{Instant, timeout_at};

use super::{Answer as Reply, Context, Refused};
use crate::batch::NO_LEADER_EPOCH;
use crate::errors::ApiError;
use crate::partition::{Partition, kafka_offset};
use crate::records;
use crate::security::{Operation, Resource};
use crate::wire::newer::Unchanged;
use crate::wire::repeated;

const READ_COMMITTED: i8 = 1;

const LATEST: i64 = -1;
const EARLIEST: i64 = -2;
/// The record with the greatest timestamp.
const MAX_TIMESTAMP: i64 = -3;
/// The first offset that is read without the object store (KIP-405); the log start without
/// `remote.storage.enable`, as in Kafka.
const EARLIEST_LOCAL: i64 = -4;
/// The last offset in the object store (KIP-1005); none without `remote.storage.enable`, as in
/// Kafka.
const LATEST_TIERED: i64 = -5;
/// The first offset that is not uploaded yet (KIP-1023); none without `remote.storage.enable`.
const EARLIEST_PENDING_UPLOAD: i64 = -6;

/// How long objects are read for a request, over all its partitions: longer than one GET may take
/// (15 s), so that a retry finds the result in the cache and gets further; shorter than a client
/// waits for a response (`request.timeout.ms`, 30 s), so that it gets one.
const OBJECTS_MAX: Duration = Duration::from_secs(20);

/// A search by time ends after this number of batches whose headers announce a time that none of
/// their records has: each costs its decompression.
const MAX_PROMISES: usize = 16;

/// The result if there is no such record.
const NONE: Answer = Answer { offset: -1, timestamp_ms: -1, leader_epoch: NO_LEADER_EPOCH };

#[derive(Clone, Copy)]
struct Answer {
    offset: i64,
    timestamp_ms: i64,
    /// Of the record at the offset; -1 if there is no offset.
    leader_epoch: i32,
}

pub(super) async fn handle(cx: Context, body: Bytes) -> Result<Reply, Refused> {
    let Unchanged(request) = cx.decode(body)?;
    let mut response = listed(&cx, request).await;
    response.throttle_time_ms = cx.throttle_ms();
    cx.reply(&Unchanged(response))
}

async fn listed(cx: &Context, request: ListOffsetsRequest) -> ListOffsetsResponse {
    let until = Instant::now() + objects_time(request.timeout_ms);
    let read_committed = request.isolation_level == READ_COMMITTED;
    let mut topics = Vec::with_capacity(request.topics.len());
    let named = request.topics.iter().flat_map(|topic| {
        topic.partitions.iter().map(|wanted| (topic.name.clone(), wanted.partition_index))
    });
    let repeated = repeated(named);
    for topic in request.topics {
        let mut partitions = Vec::with_capacity(topic.partitions.len());
        for wanted in &topic.partitions {
            let response = ListOffsetsPartitionResponse::default()
                .with_partition_index(wanted.partition_index);
            // As in Kafka; each may cost the decompression of a batch.
            let is_repeated = repeated.contains(&(topic.name.clone(), wanted.partition_index));
            let found = match is_repeated {
                true => Err(ApiError::InvalidRequest("a partition is named more than once".into())),
                false => find(cx, &topic, wanted, read_committed, until).await,
            };
            partitions.push(match found {
                Ok(answer) => response
                    .with_offset(answer.offset)
                    .with_timestamp(answer.timestamp_ms)
                    .with_leader_epoch(match cx.version {
                        4.. => answer.leader_epoch,
                        _ => NO_LEADER_EPOCH,
                    }),
                Err(error) => {
                    cx.server.metrics.error(&error);
                    response.with_error_code(code(&error))
                }
            });
        }
        topics.push(
            ListOffsetsTopicResponse::default().with_name(topic.name).with_partitions(partitions),
        );
    }
    ListOffsetsResponse::default().with_topics(topics)
}

/// Maps the error to a code for this API: clients retry CORRUPT_MESSAGE here, unlike in a Fetch.
fn code(error: &ApiError) -> i16 {
    match error {
        ApiError::Lost(_) => ResponseError::UnknownServerError.code(),
        error => error.code(),
    }
}

/// How long objects are read for a client with this timeout; before version 10 the request has none
/// (0).
fn objects_time(timeout_ms: i32) -> Duration {
    match u64::try_from(timeout_ms) {
        Ok(1..) => OBJECTS_MAX.min(Duration::from_millis(timeout_ms as u64)),
        _ => OBJECTS_MAX,
    }
}

/// Runs a search until its deadline. A search that does not have to wait succeeds even after it.
async fn in_time(
    until: Instant,
    search: impl Future<Output = Result<Option<Batch>, FetchError>>,
) -> Result<Option<Batch>, ApiError> {
    Ok(timeout_at(until, search).await.map_err(|_| ApiError::ObjectsTooSlow)??)
}

async fn find(
    cx: &Context,
    topic: &ListOffsetsTopic,
    wanted: &ListOffsetsPartition,
    read_committed: bool,
    until: Instant,
) -> Result<Answer, ApiError> {
    cx.authorize(Operation::Describe, Resource::Topic(&topic.name))?;
    let topic = cx.server.topics.by_name(&topic.name)?;
    let partition =
        topic.partition(wanted.partition_index).ok_or(ApiError::UnknownTopicOrPartition)?;
    partition.check_leader_epoch(wanted.current_leader_epoch)?;
    let end = |offset| Answer { offset, ..NONE };
    let latest = match read_committed {
        true => kafka_offset(partition.last_stable_offset()),
        false => partition.high_watermark(),
    };
    let is_tiered = topic.rules.is_tiered;
    let found = match wanted.timestamp {
        LATEST => Ok(end(latest)),
        EARLIEST => Ok(end(partition.log_start())),
        MAX_TIMESTAMP if cx.version >= 7 => by_max_timestamp(cx, partition, until).await,
        EARLIEST_LOCAL if cx.version >= 8 => Ok(end(match is_tiered {
            true => kafka_offset(partition.stream.tiers().local_start),
            false => partition.log_start(),
        })),
        LATEST_TIERED if cx.version >= 9 => {
            let Tiers { start, uploaded_end, .. } = partition.stream.tiers();
            let is_uploaded = is_tiered && uploaded_end > start;
            Ok(if is_uploaded { end(kafka_offset(uploaded_end) - 1) } else { NONE })
        }
        EARLIEST_PENDING_UPLOAD if cx.version >= 11 => {
            let pending = end(kafka_offset(partition.stream.tiers().uploaded_end));
            Ok(if is_tiered { pending } else { NONE })
        }
        timestamp_ms if timestamp_ms >= 0 => by_time(cx, partition, timestamp_ms, until).await,
        other => Err(ApiError::UnsupportedTimestamp(other)),
    };
    // For a reader of committed records, unstable records do not exist.
    let is_record = |answer: &Answer| answer.timestamp_ms >= 0;
    found.map(|answer| match u64::try_from(answer.offset) {
        Ok(_) if is_record(&answer) && answer.offset >= latest => NONE,
        Ok(offset) => {
            Answer { leader_epoch: partition.leader_epoch_at(StreamOffset(offset)), ..answer }
        }
        Err(_) => NONE,
    })
}

/// Finds the first record whose timestamp is at least `timestamp_ms`.
pub(super) async fn offset_of_time(
    cx: &Context,
    partition: &Partition,
    timestamp_ms: i64,
) -> Result<Option<i64>, ApiError> {
    let until = Instant::now() + OBJECTS_MAX;
    let found = by_time(cx, partition, timestamp_ms, until).await?;
    Ok((found.offset >= 0).then_some(found.offset))
}

async fn by_time(
    cx: &Context,
    partition: &Partition,
    timestamp_ms: i64,
    until: Instant,
) -> Result<Answer, ApiError> {
    let mut from = StreamOffset(0);
    for _ in 0..MAX_PROMISES {
        let found = in_time(until, partition.stream.find_time_from(from, timestamp_ms)).await?;
        let Some(batch) = found else { return Ok(NONE) };
        from = batch.end();
        if let Some(answer) = first_at_or_after(cx, partition, batch, timestamp_ms).await? {
            return Ok(answer);
        }
        // The header announced a time that none of its records, or none of the remaining ones, has.
        if Instant::now() >= until {
            break;
        }
    }
    // Everything before is older: a reader that starts there misses nothing.
    let from = from.max(partition.stream.start_offset());
    Ok(Answer { offset: kafka_offset(from), timestamp_ms, ..NONE })
}

async fn by_max_timestamp(
    cx: &Context,
    partition: &Partition,
    until: Instant,
) -> Result<Answer, ApiError> {
    match in_time(until, partition.stream.max_time()).await? {
        Some(batch) if batch.max_timestamp_ms >= 0 => {
            let (base, timestamp_ms) = (batch.base, batch.max_timestamp_ms);
            let found = first_at_or_after(cx, partition, batch, timestamp_ms).await?;
            // A deletion may have removed the record; Kafka still returns its time.
            let offset = kafka_offset(base.max(partition.stream.start_offset()));
            Ok(found.unwrap_or(Answer { offset, timestamp_ms, ..NONE }))
        }
        _ => Ok(NONE),
    }
}

/// Finds the first remaining record of a batch whose timestamp is at least `timestamp_ms`.
async fn first_at_or_after(
    cx: &Context,
    partition: &Partition,
    batch: Batch,
    timestamp_ms: i64,
) -> Result<Option<Answer>, ApiError> {
    // A trim may have removed a part of the batch.
    let from = batch.base.max(partition.stream.start_offset());
    let search = move || records::first_at_or_after(&batch.payload, from.0, timestamp_ms);
    Ok(cx.server.run_decompression(search).await?.map(|found| Answer {
        offset: i64::try_from(found.offset).unwrap_or(i64::MAX),
        timestamp_ms: found.timestamp_ms,
        ..NONE
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_read_for_the_clients_timeout_up_to_a_maximum() {
        for (timeout_ms, ms) in
            [(1, 1), (5_000, 5_000), (30_000, 20_000), (0, 20_000), (-1, 20_000)]
        {
            assert_eq!(objects_time(timeout_ms), Duration::from_millis(ms), "{timeout_ms}");
        }
    }
}
