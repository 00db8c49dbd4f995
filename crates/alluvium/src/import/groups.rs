//! Committed offsets of consumer groups.

use std::collections::{BTreeMap, BTreeSet};

use kafka_protocol::ResponseError;
use kafka_protocol::messages::offset_commit_request::{
    OffsetCommitRequestPartition, OffsetCommitRequestTopic,
};
use kafka_protocol::messages::offset_delete_request::{
    OffsetDeleteRequestPartition, OffsetDeleteRequestTopic,
};
use kafka_protocol::messages::{
    FindCoordinatorRequest, GroupId, ListGroupsRequest, OffsetCommitRequest, OffsetDeleteRequest,
    OffsetFetchRequest,
};
use kafka_protocol::protocol::StrBytes;
use serde::Serialize;

use super::source::Source;
use crate::address::HostPort;
use crate::kafka::{Access, Client, partition_index, refusal, topic_name};
use crate::output::Failure;

/// The last versions that ask for one group. This one of OffsetFetch is the first that can refuse
/// offsets of open transactions.
const NEWEST_OFFSET_FETCH: i16 = 7;
const NEWEST_FIND: i16 = 3;
/// The last version of OffsetCommit that names topics.
const NEWEST_COMMIT: i16 = 9;
/// The group whose offsets at the target are the ends of what was compared with the source.
const VERIFIED: &str = "alluvium-import";
/// The key type of a coordinator of groups.
const GROUP: i8 = 0;

/// The committed offsets of one group.
pub(super) struct Group {
    pub(super) name: String,
    topics: Vec<OffsetCommitRequestTopic>,
    /// Why the source does not return one of its offsets.
    refused: Option<(String, ResponseError)>,
}

/// A group whose offsets are not copied.
#[derive(Serialize)]
pub(super) struct LeftOut {
    pub(super) group: String,
    pub(super) reason: String,
    /// Its topics that are being imported.
    pub(super) topics: Vec<String>,
}

impl Group {
    /// Lowers offsets beyond the ends of partitions.
    pub(super) fn cap(&mut self, end: impl Fn(&str, usize) -> Option<u64>) {
        for topic in &mut self.topics {
            for partition in &mut topic.partitions {
                // Epochs of another cluster mean nothing at the target.
                partition.committed_leader_epoch = -1;
                let index = usize::try_from(partition.partition_index).unwrap_or(usize::MAX);
                let end = end(&topic.name.0, index).and_then(|end| i64::try_from(end).ok());
                if let Some(end) = end {
                    partition.committed_offset = partition.committed_offset.min(end);
                }
            }
        }
    }

    fn left_out(&self, reason: String) -> LeftOut {
        let topics = self.topics.iter().map(|topic| topic.name.0.to_string());
        let refused = self.refused.iter().map(|(topic, _)| topic.clone());
        LeftOut { group: self.name.clone(), reason, topics: topics.chain(refused).collect() }
    }

    /// Whether it has committed no offset of the topics.
    pub(super) fn is_empty(&self) -> bool {
        self.topics.is_empty()
    }
}

/// Reads the committed offsets of all groups, for these topics.
///
/// # Errors
/// A broker does not answer, or refuses.
pub(super) fn read(source: &mut Source, topics: &BTreeSet<&str>) -> Result<Vec<Group>, Failure> {
    let access = source.access.clone();
    let mut names = BTreeSet::new();
    for broker in source.brokers.values() {
        let mut client = Client::connect(broker, &access).map_err(Failure::new)?;
        let version = client.version::<ListGroupsRequest>(5).map_err(Failure::new)?;
        let answer = client.call(version, &ListGroupsRequest::default()).map_err(Failure::new)?;
        if let Some(reason) = refusal(answer.error_code, None) {
            return Err(Failure::Failed(format!("groups of broker {broker}: {reason}")));
        }
        names.extend(answer.groups.iter().map(|group| group.group_id.to_string()));
    }
    names.remove(VERIFIED);
    let group = |name: String| {
        let mut client = coordinator(&mut source.admin, &access, &name)?;
        read_one(&mut client, name, topics)
    };
    names.into_iter().map(group).collect()
}

/// Reads the committed offsets of a group at its coordinator, for these topics.
fn read_one(client: &mut Client, name: String, topics: &BTreeSet<&str>) -> Result<Group, Failure> {
    let failed = |reason: String| Failure::Failed(format!("group {name}: {reason}"));
    let version =
        client.version::<OffsetFetchRequest>(NEWEST_OFFSET_FETCH).map_err(Failure::new)?;
    let request = OffsetFetchRequest::default()
        .with_group_id(GroupId(StrBytes::from_string(name.clone())))
        .with_topics(None)
        .with_require_stable(version == NEWEST_OFFSET_FETCH);
    let answer = client.call(version, &request).map_err(Failure::new)?;
    if let Some(reason) = refusal(answer.error_code, None) {
        return Err(failed(reason));
    }
    let mut found: BTreeMap<String, Vec<OffsetCommitRequestPartition>> = BTreeMap::new();
    let mut refused = None;
    for topic in answer.topics.iter().filter(|topic| topics.contains(&*topic.name.0)) {
        for it in &topic.partitions {
            if let Some(error) = ResponseError::try_from_code(it.error_code) {
                refused = Some((topic.name.0.to_string(), error));
            } else if it.committed_offset >= 0 {
                let partition = OffsetCommitRequestPartition::default()
                    .with_partition_index(it.partition_index)
                    .with_committed_offset(it.committed_offset)
                    .with_committed_leader_epoch(it.committed_leader_epoch)
                    .with_committed_metadata(it.metadata.clone());
                found.entry(topic.name.0.to_string()).or_default().push(partition);
            }
        }
    }
    let topics = found.into_iter().map(|(topic, partitions)| {
        OffsetCommitRequestTopic::default()
            .with_name(topic_name(&topic))
            .with_partitions(partitions)
    });
    let topics = topics.collect();
    Ok(Group { name, topics, refused })
}

/// Connects to the coordinator of a group.
fn coordinator(admin: &mut Client, access: &Access, group: &str) -> Result<Client, Failure> {
    let failed = |reason: String| Failure::Failed(format!("group {group}: {reason}"));
    let version = admin.version::<FindCoordinatorRequest>(NEWEST_FIND).map_err(Failure::new)?;
    let request = FindCoordinatorRequest::default()
        .with_key_type(GROUP)
        .with_key(StrBytes::from_string(group.to_owned()));
    let answer = admin.call(version, &request).map_err(Failure::new)?;
    if let Some(reason) = refusal(answer.error_code, None) {
        return Err(failed(reason));
    }
    let (host, port) = (answer.host.to_string(), answer.port);
    let port =
        u16::try_from(port).map_err(|_| failed(format!("its coordinator has port {port}")))?;
    Client::connect(&HostPort { host, port }, access).map_err(Failure::new)
}

/// Commits the offsets of groups at the target. Returns the groups that it refuses.
///
/// # Errors
/// It does not answer.
pub(super) fn commit(client: &mut Client, groups: &[Group]) -> Result<Vec<LeftOut>, Failure> {
    let version = client.version::<OffsetCommitRequest>(NEWEST_COMMIT).map_err(Failure::new)?;
    let mut left_out = Vec::new();
    for group in groups {
        if let Some((topic, error)) = &group.refused {
            let reason = format!("the source does not return its offset of topic {topic}: {error}");
            left_out.push(group.left_out(reason));
            continue;
        }
        if group.is_empty() {
            continue;
        }
        // Without a member: accepted while the group has none.
        let request = OffsetCommitRequest::default()
            .with_group_id(GroupId(StrBytes::from_string(group.name.clone())))
            .with_generation_id_or_member_epoch(-1)
            .with_topics(group.topics.clone());
        let answer = client.call(version, &request).map_err(Failure::new)?;
        let results = answer.topics.iter().flat_map(|topic| &topic.partitions);
        if let Some(reason) = results.into_iter().find_map(|it| refusal(it.error_code, None)) {
            left_out.push(group.left_out(reason));
        }
    }
    Ok(left_out)
}

/// Up to where a partition was compared with the source.
#[derive(Clone, Copy, Default)]
pub(super) struct Verified {
    pub(super) end: u64,
    /// The leader epoch of the source's last batch before the end, if it is known.
    pub(super) epoch: Option<i32>,
}

/// Returns up to where partitions of these topics were compared with the source.
///
/// # Errors
/// The target does not answer, or refuses.
pub(super) fn verified(
    client: &mut Client,
    topics: &BTreeSet<&str>,
) -> Result<BTreeMap<(String, usize), Verified>, Failure> {
    let group = read_one(client, VERIFIED.to_owned(), topics)?;
    let mut verified = BTreeMap::new();
    for topic in &group.topics {
        for partition in &topic.partitions {
            let index = usize::try_from(partition.partition_index).map_err(Failure::new)?;
            let end = partition.committed_offset.cast_unsigned();
            let epoch = Some(partition.committed_leader_epoch).filter(|epoch| *epoch >= 0);
            verified.insert((topic.name.0.to_string(), index), Verified { end, epoch });
        }
    }
    Ok(verified)
}

/// Notes the offsets up to which partitions were compared.
///
/// # Errors
/// The target does not answer, or refuses.
pub(super) fn note_verified<'a>(
    client: &mut Client,
    ends: impl Iterator<Item = (&'a str, usize, Verified)>,
) -> Result<(), Failure> {
    let mut topics: BTreeMap<&str, Vec<OffsetCommitRequestPartition>> = BTreeMap::new();
    for (topic, partition, Verified { end, epoch }) in ends {
        let partition = OffsetCommitRequestPartition::default()
            .with_partition_index(partition_index(partition))
            .with_committed_offset(i64::try_from(end).map_err(Failure::new)?)
            .with_committed_leader_epoch(epoch.unwrap_or(-1));
        topics.entry(topic).or_default().push(partition);
    }
    let topics = topics.into_iter().map(|(topic, partitions)| {
        OffsetCommitRequestTopic::default().with_name(topic_name(topic)).with_partitions(partitions)
    });
    let group = Group { name: VERIFIED.to_owned(), topics: topics.collect(), refused: None };
    match commit(client, &[group])?.pop() {
        None => Ok(()),
        Some(LeftOut { group, reason, .. }) => {
            Err(Failure::Failed(format!("group {group}: {reason}")))
        }
    }
}

/// Deletes the note for a topic that is opened.
///
/// # Errors
/// The target does not answer, or refuses.
pub(super) fn forget_verified(
    client: &mut Client,
    topic: &str,
    partitions: usize,
) -> Result<(), Failure> {
    let version = client.version::<OffsetDeleteRequest>(0).map_err(Failure::new)?;
    let partition = |index| {
        OffsetDeleteRequestPartition::default().with_partition_index(partition_index(index))
    };
    let topic = OffsetDeleteRequestTopic::default()
        .with_name(topic_name(topic))
        .with_partitions((0..partitions).map(partition).collect());
    let request = OffsetDeleteRequest::default()
        .with_group_id(GroupId(StrBytes::from_static_str(VERIFIED)))
        .with_topics(vec![topic]);
    let answer = client.call(version, &request).map_err(Failure::new)?;
    match ResponseError::try_from_code(answer.error_code) {
        None | Some(ResponseError::GroupIdNotFound) => Ok(()),
        Some(error) => Err(Failure::Failed(format!("group {VERIFIED}: {error}"))),
    }
}
