//! The Kafka cluster that is imported: its topics, their settings and records.

use std::collections::BTreeMap;

use kafka_protocol::messages::metadata_response::{MetadataResponseBroker, MetadataResponseTopic};
use uuid::Uuid;

use super::reader::{Isolation, Position, Reader};
use crate::address::HostPort;
use crate::kafka::{Access, Client};
use crate::output::Failure;
use crate::topic::{self, name_of};

/// A cluster, reached by one of its brokers, as it was when the connection was made.
pub(super) struct Source {
    pub(super) access: Access,
    pub(super) admin: Client,
    pub(super) brokers: BTreeMap<i32, HostPort>,
    /// Its cluster id.
    pub(super) cluster: String,
    /// All topics but internal ones.
    pub(super) topics: Vec<SourceTopic>,
}

/// A topic of the source.
#[derive(Clone)]
pub(super) struct SourceTopic {
    pub(super) name: String,
    pub(super) id: Uuid,
    /// The leader of each partition.
    pub(super) leaders: Vec<i32>,
}

/// Returns what the identities of the topics of a cluster begin with.
fn identity(cluster: &str) -> String {
    format!("kafka {cluster}, topic ")
}

impl SourceTopic {
    /// Returns the permanent identity of the topic: a topic that is created again has another ID.
    /// Kafka before 2.8 has no IDs.
    pub(super) fn id_in(&self, cluster: &str) -> String {
        let of_cluster = identity(cluster);
        match self.id.is_nil() {
            true => format!("{of_cluster}{}", self.name),
            false => format!("{of_cluster}{}", self.id),
        }
    }

    /// Returns the first partition without a leader.
    pub(super) fn without_leader(&self) -> Option<usize> {
        self.leaders.iter().position(|leader| *leader < 0)
    }

    /// Returns the partitions, with their leaders.
    pub(super) fn positions(&self) -> Vec<(Position, i32)> {
        let position = |partition| Position { topic: self.name.clone(), partition, next: 0 };
        let leaders = self.leaders.iter().enumerate();
        leaders.map(|(partition, leader)| (position(partition), *leader)).collect()
    }
}

impl Source {
    /// Returns what the identities of its topics begin with.
    pub(super) fn identity(&self) -> String {
        identity(&self.cluster)
    }

    /// Connects to the first address that answers, and asks for the topics and brokers.
    ///
    /// # Errors
    /// No address answers, in which case the error is the last one's; or a topic cannot be read.
    pub(super) fn connect(seeds: &[HostPort], access: &Access) -> Result<Self, Failure> {
        let mut last = Failure::Usage("--from names no address".into());
        for seed in seeds {
            match Client::connect(seed, access) {
                Ok(admin) => return Self::of(admin, access),
                Err(error) => last = Failure::new(error),
            }
        }
        Err(last)
    }

    fn of(mut admin: Client, access: &Access) -> Result<Self, Failure> {
        let answer = topic::metadata(&mut admin, None)?;
        let address = |broker: &MetadataResponseBroker| {
            let node = broker.node_id.0;
            let port = u16::try_from(broker.port)
                .map_err(|_| Failure::Failed(format!("broker {node} has port {}", broker.port)))?;
            Ok((node, HostPort { host: broker.host.to_string(), port }))
        };
        let brokers = answer.brokers.iter().map(address).collect::<Result<_, Failure>>()?;
        let topics = answer.topics.iter().filter(|topic| !topic.is_internal);
        Ok(Self {
            access: access.clone(),
            admin,
            brokers,
            cluster: answer.cluster_id.as_ref().map(ToString::to_string).unwrap_or_default(),
            topics: topics.map(source_topic).collect::<Result<_, _>>()?,
        })
    }

    /// Connects to a broker of the cluster.
    ///
    /// # Errors
    /// It is not known, or cannot be reached.
    pub(super) fn broker(&self, node: i32) -> Result<Reader, Failure> {
        let address = self.brokers.get(&node);
        let missing = || Failure::Failed(format!("broker {node} is not available"));
        Reader::connect(address.ok_or_else(missing)?, &self.access)
    }

    /// Returns the offset of each partition for one of Kafka's special timestamps, asking its
    /// leader.
    ///
    /// # Errors
    /// A leader is not known, cannot be reached, or refuses.
    pub(super) fn offsets(
        &self,
        partitions: &[(Position, i32)],
        timestamp: i64,
        isolation: Isolation,
    ) -> Result<Vec<u64>, Failure> {
        let mut of_leaders: BTreeMap<i32, Vec<usize>> = BTreeMap::new();
        for (number, (_, leader)) in partitions.iter().enumerate() {
            of_leaders.entry(*leader).or_default().push(number);
        }
        let mut found = vec![0; partitions.len()];
        for (leader, numbers) in of_leaders {
            let wanted: Vec<_> =
                numbers.iter().map(|number| partitions[*number].0.clone()).collect();
            let offsets = self.broker(leader)?.offsets(&wanted, timestamp, isolation)?;
            for (number, offset) in numbers.into_iter().zip(offsets) {
                found[number] = offset;
            }
        }
        Ok(found)
    }
}

fn source_topic(topic: &MetadataResponseTopic) -> Result<SourceTopic, Failure> {
    let name = name_of(topic).to_owned();
    let mut partitions: Vec<_> = topic.partitions.iter().collect();
    partitions.sort_by_key(|partition| partition.partition_index);
    let is_whole = (0..).zip(&partitions).all(|(index, it)| it.partition_index == index);
    if !is_whole {
        let reason = format!("topic {name}: the source does not list all of its partitions");
        return Err(Failure::Failed(reason));
    }
    let leaders = partitions.iter().map(|partition| partition.leader_id.0).collect();
    Ok(SourceTopic { name, id: topic.topic_id, leaders })
}
