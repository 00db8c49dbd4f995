//! The requests of a consumer, and what it delivers of the answers.

use std::collections::{BTreeMap, BTreeSet};

use kafka_protocol::messages::fetch_request::{FetchPartition, FetchTopic};
use kafka_protocol::messages::fetch_response::PartitionData;
use kafka_protocol::messages::{
    BrokerId, FetchRequest, FetchResponse, GroupId, MetadataRequest, OffsetFetchRequest,
};
use kafka_protocol::protocol::StrBytes;

use super::batch::{Batch, BatchKind};
use super::model::Partition;
use crate::Error;
use crate::client::{Client, topic_name};

const FETCH_BYTES: i32 = 1 << 20;
/// The error that ends a consumer's read. On all others it retries, or continues at another offset.
pub(super) const CORRUPT_MESSAGE: i16 = 2;

/// A record as it was fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fetched {
    pub(super) key: Option<Vec<u8>>,
    pub(super) value: Option<Vec<u8>>,
    pub(super) timestamp_ms: i64,
}

/// Lists all topics.
pub(super) fn topics(client: &mut Client) -> Result<BTreeSet<String>, Error> {
    let request = MetadataRequest::default().with_topics(None);
    let answer = client.call(5, &request)?;
    let names = answer.topics.into_iter().filter_map(|topic| topic.name);
    Ok(names.map(|name| name.to_string()).collect())
}

/// Fetches from partitions of a topic, at these offsets.
pub(super) fn fetch(
    client: &mut Client,
    topic: &str,
    positions: &BTreeMap<i32, i64>,
    committed: bool,
    max_wait_ms: i32,
) -> Result<FetchResponse, Error> {
    let wanted = positions.iter().map(|(index, offset)| {
        FetchPartition::default()
            .with_partition(*index)
            .with_current_leader_epoch(-1)
            .with_fetch_offset(*offset)
            .with_log_start_offset(-1)
            .with_partition_max_bytes(FETCH_BYTES)
    });
    let topic =
        FetchTopic::default().with_topic(topic_name(topic)).with_partitions(wanted.collect());
    let request = FetchRequest::default()
        .with_replica_id(BrokerId(-1))
        .with_max_wait_ms(max_wait_ms)
        .with_min_bytes(1)
        .with_max_bytes(4 * FETCH_BYTES)
        .with_isolation_level(i8::from(committed))
        .with_session_epoch(-1)
        .with_topics(vec![topic]);
    client.call(11, &request)
}

/// Returns the committed offsets of a group, or an error code.
pub(super) fn committed_offsets(
    client: &mut Client,
    group: &str,
) -> Result<Result<Vec<(Partition, i64)>, i16>, Error> {
    let request = OffsetFetchRequest::default()
        .with_group_id(GroupId(StrBytes::from_string(group.to_owned())))
        .with_topics(None);
    let answer = client.call(7, &request)?;
    if answer.error_code != 0 {
        return Ok(Err(answer.error_code));
    }
    let mut offsets = Vec::new();
    for topic in &answer.topics {
        for result in &topic.partitions {
            if result.error_code != 0 {
                return Ok(Err(result.error_code));
            }
            let topic = topic.name.to_string();
            let partition = Partition { topic, index: result.partition_index };
            offsets.push((partition, result.committed_offset));
        }
    }
    Ok(Ok(offsets))
}

/// What a consumer with an isolation level delivers of one answer.
pub(super) struct Isolation {
    committed: bool,
    /// First offset and producer of the aborted transactions that did not begin yet.
    aborted: Vec<(i64, i64)>,
    /// Producers in an aborted transaction.
    hidden: BTreeSet<i64>,
}

impl Isolation {
    /// Each answer names the aborted transactions of its batches.
    pub(super) fn of(answer: &PartitionData, committed: bool) -> Self {
        let aborted = answer.aborted_transactions.iter().flatten();
        let aborted = aborted.map(|each| (each.first_offset, each.producer_id.0)).collect();
        Self { committed, aborted, hidden: BTreeSet::new() }
    }

    /// Returns the records that are delivered of the next batch; none of a marker.
    pub(super) fn deliver(&mut self, batch: Batch) -> Vec<(i64, Fetched)> {
        let hidden = &mut self.hidden;
        self.aborted.retain(|(first, producer)| {
            let begins = *first < batch.end;
            if begins {
                hidden.insert(*producer);
            }
            !begins
        });
        if batch.kind != BatchKind::Data {
            hidden.remove(&batch.producer_id);
            return Vec::new();
        }
        if self.committed && batch.transactional && hidden.contains(&batch.producer_id) {
            return Vec::new();
        }
        let fetched = batch.records.into_iter().map(|(at, timestamp_ms, key, value)| {
            let (key, value) = (key.map(Into::into), value.map(Into::into));
            (at, Fetched { key, value, timestamp_ms })
        });
        fetched.collect()
    }
}
