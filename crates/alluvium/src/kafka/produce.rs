//! Requests to Produce, each with one batch.

use bytes::Bytes;
use kafka_protocol::messages::produce_request::{PartitionProduceData, TopicProduceData};
use kafka_protocol::messages::{ProduceRequest, ProduceResponse};

use super::{SERVER_TIMEOUT_MS, refusal, topic_name};

/// The last version that names topics by name.
pub(crate) const NEWEST: i16 = 12;

/// The value of `acks` for an answer once all replicas in sync have the batch.
pub(crate) const ALL: i16 = -1;

/// Returns a request that is answered when the batch is acknowledged as `acks` says.
pub(crate) fn request(acks: i16, topic: &str, partition: i32, batch: Bytes) -> ProduceRequest {
    let data = PartitionProduceData::default().with_index(partition).with_records(Some(batch));
    let topic =
        TopicProduceData::default().with_name(topic_name(topic)).with_partition_data(vec![data]);
    ProduceRequest::default()
        .with_acks(acks)
        .with_timeout_ms(SERVER_TIMEOUT_MS)
        .with_topic_data(vec![topic])
}

/// Checks that the batch was accepted.
///
/// # Errors
/// It was refused.
pub(crate) fn check(answer: &ProduceResponse) -> Result<(), String> {
    for topic in &answer.responses {
        for partition in &topic.partition_responses {
            if let Some(reason) = refusal(partition.error_code, partition.error_message.as_ref()) {
                let (name, index) = (topic.name.0.as_str(), partition.index);
                return Err(format!("topic {name}, partition {index}: {reason}"));
            }
        }
    }
    Ok(())
}
