//! The Kafka cluster that is imported: its topics, their settings and records.

use std::collections::BTreeMap;

use kafka_protocol::messages::MetadataResponse;
use kafka_protocol::messages::metadata_response::{MetadataResponseBroker, MetadataResponseTopic};
use uuid::Uuid;

use super::reader::{Isolation, Position, Reader};
use crate::address::HostPort;
use crate::kafka::{Access, Client};
use crate::output::Failure;
use crate::topic::{self, name_of};

/// A cluster, reached by one of its brokers.
pub(super) struct Source {
    pub(super) access: Access,
    pub(super) admin: Client,
    pub(super) brokers: BTreeMap<i32, HostPort>,
    /// Its cluster id.
    pub(super) cluster: String,
}

/// A topic of the source.
#[derive(Clone)]
pub(super) struct SourceTopic {
    pub(super) name: String,
    pub(super) id: Uuid,
    /// The leader of each partition.
    pub(super) leaders: Vec<i32>,
}

impl SourceTopic {
    /// Returns the permanent identity of the topic: a topic that is created again has another ID.
    /// Kafka before 2.8 has no IDs.
    pub(super) fn id_in(&self, cluster: &str) -> String {
        match self.id.is_nil() {
            true => format!("kafka {cluster}, topic {}", self.name),
            false => format!("kafka {cluster}, topic {}", self.id),
        }
    }
}

impl Source {
    /// Connects to the first address that answers.
    ///
    /// # Errors
    /// No address answers; the error is the last one's.
    pub(super) fn connect(seeds: &[HostPort], access: &Access) -> Result<Self, Failure> {
        let mut last = None;
        for seed in seeds {
            match Client::connect(seed, access) {
                Ok(admin) => {
                    let (brokers, cluster) = (BTreeMap::new(), String::new());
                    return Ok(Self { access: access.clone(), admin, brokers, cluster });
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.map_or_else(|| Failure::Usage("--from names no address".into()), Failure::new))
    }

    /// Returns all topics but internal ones, and learns the addresses of the brokers.
    ///
    /// # Errors
    /// The source does not answer, or a topic cannot be read.
    pub(super) fn topics(&mut self) -> Result<Vec<SourceTopic>, Failure> {
        let answer = topic::metadata(&mut self.admin, None)?;
        self.learn(&answer)?;
        let topics = answer.topics.iter().filter(|topic| !topic.is_internal);
        topics.map(source_topic).collect()
    }

    fn learn(&mut self, answer: &MetadataResponse) -> Result<(), Failure> {
        let id = answer.cluster_id.as_ref();
        self.cluster = id.map(ToString::to_string).unwrap_or_default();
        let address = |broker: &MetadataResponseBroker| {
            let node = broker.node_id.0;
            let port = u16::try_from(broker.port)
                .map_err(|_| Failure::Failed(format!("broker {node} has port {}", broker.port)))?;
            Ok((node, HostPort { host: broker.host.to_string(), port }))
        };
        self.brokers = answer.brokers.iter().map(address).collect::<Result<_, Failure>>()?;
        Ok(())
    }

    /// Connects to a broker of the cluster.
    ///
    /// # Errors
    /// It is not known, or cannot be reached.
    pub(super) fn broker(&self, node: i32) -> Result<Reader, String> {
        let address =
            self.brokers.get(&node).ok_or_else(|| format!("broker {node} is not available"))?;
        Reader::connect(address, &self.access)
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
    ) -> Result<Vec<u64>, String> {
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
