//! Waits for Kafka's partitions: for their leaders, their replicas and their remote storage.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::MetadataRequest;
use kafka_protocol::messages::metadata_request::MetadataRequestTopic;
use kafka_protocol::messages::metadata_response::MetadataResponsePartition;

use super::PARTITIONS;
use crate::Error;
use crate::client::{Client, EARLIEST_LOCAL, LATEST, topic_name};
use crate::kafka::Kafka;

/// Records of 1 KiB in the local retention and in two segments.
const MOST_LOCAL_RECORDS: i64 = (32 + 2 * 16) << 10;
const LIMIT: Duration = Duration::from_secs(1800);
const POLL_EVERY: Duration = Duration::from_millis(100);
/// A broker shows a new leader a moment before that one leads.
const UNTIL_LED: Duration = Duration::from_secs(1);

/// Waits until each broker has learned of a new topic. Until then it refuses batches, and the
/// bench's client does not retry.
pub(super) fn until_known(brokers: &[Kafka], topic: &str) -> Result<(), Error> {
    for broker in brokers {
        until_in_sync(&broker.address(), topic)?;
    }
    thread::sleep(UNTIL_LED);
    Ok(())
}

/// Waits until no partition is under-replicated.
pub(super) fn until_in_sync(address: &str, topic: &str) -> Result<(), Error> {
    until(address, topic, "no partition is under-replicated", |partition| {
        partition.isr_nodes.len() == partition.replica_nodes.len()
    })
}

/// Waits until brokers other than this one lead all partitions, and each of them knows it.
pub(super) fn until_led_by_others(others: &[Kafka], topic: &str, broker: u32) -> Result<(), Error> {
    for other in others {
        until(&other.address(), topic, "other brokers lead all partitions", |partition| {
            u32::try_from(partition.leader_id.0).is_ok_and(|leader| leader != broker)
        })?;
    }
    thread::sleep(UNTIL_LED);
    Ok(())
}

fn until(
    address: &str,
    topic: &str,
    what: &str,
    holds: impl Fn(&MetadataResponsePartition) -> bool,
) -> Result<(), Error> {
    let wanted = MetadataRequestTopic::default().with_name(Some(topic_name(topic)));
    let request = MetadataRequest::default().with_topics(Some(vec![wanted]));
    let mut client = Client::connect(address.parse()?)?;
    poll(&format!("topic {topic}: {what}"), || {
        let response = client.call(9, &request)?;
        let mut partitions = response.topics.iter().flat_map(|topic| &topic.partitions);
        let count = partitions.clone().count();
        Ok(count == PARTITIONS as usize && partitions.all(&holds))
    })
}

/// Waits until all but the newest records of a topic are only in remote storage.
pub(super) fn until_remote(brokers: &[Kafka], topic: &str) -> Result<(), Error> {
    let brokers: Vec<_> = brokers.iter().map(Kafka::address).collect();
    poll(&format!("topic {topic} is in remote storage"), || {
        let ends = offsets(&brokers, topic, LATEST)?;
        let local = offsets(&brokers, topic, EARLIEST_LOCAL)?;
        let mut kept = ends.iter().zip(&local).map(|(end, local)| end - local);
        Ok(kept.all(|records| records <= MOST_LOCAL_RECORDS))
    })
}

fn poll(what: &str, mut holds: impl FnMut() -> Result<bool, Error>) -> Result<(), Error> {
    let deadline = Instant::now() + LIMIT;
    while !holds()? {
        if Instant::now() >= deadline {
            return Err(format!("not within {} s: {what}", LIMIT.as_secs()).into());
        }
        thread::sleep(POLL_EVERY);
    }
    Ok(())
}

/// Returns an offset of each partition of a topic, by one of Kafka's special timestamps, from the
/// broker that leads it.
pub(super) fn offsets(brokers: &[String], topic: &str, time: i64) -> Result<Vec<i64>, Error> {
    const NOT_LEADER: i16 = ResponseError::NotLeaderOrFollower.code();
    let mut offsets = BTreeMap::new();
    for address in brokers {
        let mut client = Client::connect(address.parse()?)?;
        for found in client.list_offsets(topic, 0..PARTITIONS as i32, time)? {
            match found.error_code {
                0 => drop(offsets.insert(found.partition_index, found.offset)),
                NOT_LEADER => {}
                code => return Err(format!("ListOffsets of {topic}: error code {code}").into()),
            }
        }
    }
    match offsets.len() == PARTITIONS as usize {
        true => Ok(offsets.into_values().collect()),
        false => Err(format!("topic {topic}: partitions without a leader: {offsets:?}").into()),
    }
}
