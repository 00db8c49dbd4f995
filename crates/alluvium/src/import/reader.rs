//! Committed records of partitions, read over Kafka's protocol.

use std::collections::BTreeMap;
use std::time::Duration;

use alluvium_broker::Exported;
use kafka_protocol::ResponseError;
use kafka_protocol::messages::fetch_request::{FetchPartition, FetchTopic};
use kafka_protocol::messages::fetch_response::PartitionData;
use kafka_protocol::messages::list_offsets_request::{ListOffsetsPartition, ListOffsetsTopic};
use kafka_protocol::messages::offset_for_leader_epoch_request::{
    OffsetForLeaderPartition, OffsetForLeaderTopic,
};
use kafka_protocol::messages::{
    BrokerId, FetchRequest, ListOffsetsRequest, OffsetForLeaderEpochRequest, TopicName,
};

use crate::address::HostPort;
use crate::kafka::{Access, Client, partition_index, refusal, topic_name};
use crate::output::Failure;

/// A partition that answers nothing for this time, and is not complete, ends the import.
pub(super) const STALLED: Duration = Duration::from_secs(60);
/// The last version of Fetch that names topics by name.
const NEWEST_FETCH: i16 = 12;
const FETCH_MAX_WAIT_MS: i32 = 500;
/// Bytes of a response, and of one partition in it. A larger batch comes alone.
const FETCH_MAX_BYTES: i32 = 16 << 20;
const PARTITION_MAX_BYTES: i32 = 4 << 20;

/// Kafka's isolation levels. The last offset of a partition is its high watermark, or its last
/// stable offset.
#[derive(Clone, Copy)]
pub(super) enum Isolation {
    Uncommitted = 0,
    Committed = 1,
}

/// One partition, and where it continues.
#[derive(Clone)]
pub(super) struct Position {
    pub(super) topic: String,
    pub(super) partition: usize,
    pub(super) next: u64,
}

/// What a partition answered to a fetch.
pub(super) enum Fetched {
    Part(Exported),
    /// The offset is before the first one, or after the last one.
    OutOfRange,
    /// The partition has another leader, or none at the moment.
    Moved(String),
}

/// A connection that reads committed records of the partitions that a broker leads.
pub(super) struct Reader {
    client: Client,
    version: i16,
}

impl Reader {
    /// Connects to a broker.
    ///
    /// # Errors
    /// It cannot be reached, or refuses the login.
    pub(super) fn connect(address: &HostPort, access: &Access) -> Result<Self, Failure> {
        let client = Client::connect(address, access).map_err(Failure::new)?;
        let version = client.version::<FetchRequest>(NEWEST_FETCH).map_err(Failure::new)?;
        Ok(Self { client, version })
    }

    /// Returns the offset of each partition for one of Kafka's special timestamps.
    ///
    /// # Errors
    /// The broker does not lead one, or does not answer.
    pub(super) fn offsets(
        &mut self,
        positions: &[Position],
        timestamp: i64,
        isolation: Isolation,
    ) -> Result<Vec<u64>, Failure> {
        let version = self.client.version::<ListOffsetsRequest>(7).map_err(Failure::new)?;
        let topics = positions.iter().map(|position| {
            let partition = ListOffsetsPartition::default()
                .with_partition_index(partition_index(position.partition))
                .with_timestamp(timestamp);
            ListOffsetsTopic::default()
                .with_name(topic_name(&position.topic))
                .with_partitions(vec![partition])
        });
        let request = ListOffsetsRequest::default()
            .with_replica_id(BrokerId(-1))
            .with_isolation_level(isolation as i8)
            .with_topics(topics.collect());
        let answer = self.client.call(version, &request).map_err(Failure::new)?;
        let mut found = Offsets::default();
        for topic in &answer.topics {
            for it in &topic.partitions {
                found.add(&topic.name, it.partition_index, it.error_code, it.offset)?;
            }
        }
        let of = |position: &Position| found.of(position).ok_or_else(|| no_offset(position));
        positions.iter().map(of).collect()
    }

    /// Returns where the leader epoch of each position ends, or the last lower one that the log
    /// has: behind that, it has other records than when the epoch was current (KIP-320).
    ///
    /// # Errors
    /// The broker does not lead a partition, or does not answer.
    pub(super) fn epoch_ends(
        &mut self,
        positions: &[(Position, i32)],
    ) -> Result<Vec<Option<u64>>, Failure> {
        let version =
            self.client.version::<OffsetForLeaderEpochRequest>(4).map_err(Failure::new)?;
        let topics = positions.iter().map(|(position, epoch)| {
            let partition = OffsetForLeaderPartition::default()
                .with_partition(partition_index(position.partition))
                .with_leader_epoch(*epoch);
            OffsetForLeaderTopic::default()
                .with_topic(topic_name(&position.topic))
                .with_partitions(vec![partition])
        });
        let request = OffsetForLeaderEpochRequest::default()
            .with_replica_id(BrokerId(-1))
            .with_topics(topics.collect());
        let answer = self.client.call(version, &request).map_err(Failure::new)?;
        let mut found = Offsets::default();
        for topic in &answer.topics {
            for it in &topic.partitions {
                found.add(&topic.topic, it.partition, it.error_code, it.end_offset)?;
            }
        }
        Ok(positions.iter().map(|(position, _)| found.of(position)).collect())
    }

    /// Reads from these positions on. Returns the answers of partitions in the order of
    /// `positions`; partitions without an answer are left out.
    ///
    /// # Errors
    /// The connection failed, or a batch is damaged.
    pub(super) fn fetch(
        &mut self,
        positions: &[Position],
    ) -> Result<Vec<(usize, Fetched)>, Failure> {
        let topics = positions.iter().map(|position| {
            let partition = FetchPartition::default()
                .with_partition(partition_index(position.partition))
                .with_fetch_offset(i64::try_from(position.next).unwrap_or(i64::MAX))
                .with_partition_max_bytes(PARTITION_MAX_BYTES);
            FetchTopic::default()
                .with_topic(topic_name(&position.topic))
                .with_partitions(vec![partition])
        });
        // Without a fetch session: each request names all partitions.
        let request = FetchRequest::default()
            .with_replica_id(BrokerId(-1))
            .with_max_wait_ms(FETCH_MAX_WAIT_MS)
            .with_min_bytes(1)
            .with_max_bytes(FETCH_MAX_BYTES)
            .with_isolation_level(Isolation::Committed as i8)
            .with_session_epoch(-1)
            .with_topics(topics.collect());
        let answer = self.client.call(self.version, &request).map_err(Failure::new)?;
        if let Some(reason) = refusal(answer.error_code, None) {
            return Err(Failure::Failed(format!("fetch: {reason}")));
        }
        let mut answers = BTreeMap::new();
        for topic in &answer.responses {
            for data in &topic.partitions {
                answers.insert((topic.topic.0.as_str(), data.partition_index), data);
            }
        }
        let mut fetched = Vec::new();
        for (number, position) in positions.iter().enumerate() {
            let index = partition_index(position.partition);
            if let Some(data) = answers.get(&(position.topic.as_str(), index)) {
                let of =
                    |reason: &str| format!("topic {}, partition {index}: {reason}", position.topic);
                let part = part(position, data).map_err(|failure| match failure {
                    Failure::Lost(reason) => Failure::Lost(of(&reason)),
                    other => Failure::Failed(of(other.message())),
                })?;
                fetched.push((number, part));
            }
        }
        Ok(fetched)
    }
}

/// Offsets of an answer, by topic and partition.
#[derive(Default)]
struct Offsets(BTreeMap<(String, i32), i64>);

impl Offsets {
    fn add(
        &mut self,
        topic: &TopicName,
        index: i32,
        code: i16,
        offset: i64,
    ) -> Result<(), Failure> {
        let name = topic.0.to_string();
        if let Some(reason) = refusal(code, None) {
            return Err(Failure::Failed(format!("topic {name}, partition {index}: {reason}")));
        }
        self.0.insert((name, index), offset);
        Ok(())
    }

    /// Returns the offset of a partition, if the answer has one.
    fn of(&self, position: &Position) -> Option<u64> {
        let key = (position.topic.clone(), partition_index(position.partition));
        self.0.get(&key).and_then(|offset| u64::try_from(*offset).ok())
    }
}

fn no_offset(Position { topic, partition, .. }: &Position) -> Failure {
    Failure::Failed(format!("topic {topic}, partition {partition}: no offset in the answer"))
}

/// Reads the answer of one partition.
///
/// # Errors
/// The broker refuses, or, as [`Failure::Lost`], a batch cannot be imported.
fn part(position: &Position, data: &PartitionData) -> Result<Fetched, Failure> {
    use ResponseError as E;
    match ResponseError::try_from_code(data.error_code) {
        None => {}
        Some(E::OffsetOutOfRange) => return Ok(Fetched::OutOfRange),
        Some(
            error @ (E::NotLeaderOrFollower
            | E::LeaderNotAvailable
            | E::UnknownTopicOrPartition
            | E::ReplicaNotAvailable
            | E::KafkaStorageError
            | E::FencedLeaderEpoch
            | E::UnknownLeaderEpoch),
        ) => return Ok(Fetched::Moved(error.to_string())),
        Some(error) => return Err(Failure::new(error)),
    }
    let mut exported = Exported::from(position.next);
    let stable = u64::try_from(data.last_stable_offset)
        .map_err(|_| Failure::Failed("no last stable offset".into()))?;
    let aborted = data.aborted_transactions.iter().flatten();
    let aborted = aborted.map(|it| (it.producer_id.0, it.first_offset.cast_unsigned())).collect();
    if let Some(records) = data.records.as_ref().filter(|records| !records.is_empty()) {
        let added = exported.add_fetched(records, aborted, stable);
        added.map_err(|error| Failure::Lost(error.to_string()))?;
    }
    Ok(Fetched::Part(exported))
}
