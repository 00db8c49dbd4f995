//! OffsetDelete.

use std::collections::HashSet;

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::offset_delete_request::OffsetDeleteRequestPartition;
use kafka_protocol::messages::offset_delete_response::{
    OffsetDeleteResponsePartition, OffsetDeleteResponseTopic,
};
use kafka_protocol::messages::{OffsetDeleteRequest, OffsetDeleteResponse};

use super::commits::Blocked;
use super::embedded;
use super::group::{Description, State};
use super::live::LiveGroup;
use super::offset_log::Prepared;
use super::offsets::Record;
use super::{Groups, Shared};
use crate::state_table::MAX_STRING_BYTES;

/// The topics that the members of a group read.
pub(super) enum Reads {
    These(HashSet<String>),
    /// Unknown: the members are joining, or have not sent their subscriptions in a known format.
    Unknown,
}

impl Groups {
    /// Handles OffsetDelete, version 0. Offsets of topics that members read stay. Answers when the
    /// deletion is durable. `exists` says whether a partition exists; it is called again right
    /// before the append, and must not accept another topic that was created under the same name
    /// since.
    pub async fn offset_delete(
        &self,
        request: OffsetDeleteRequest,
        exists: impl Fn(&str, i32) -> bool,
    ) -> OffsetDeleteResponse {
        let exists = |topic: &str, index| topic.len() <= MAX_STRING_BYTES && exists(topic, index);
        let mut requested = Vec::new();
        for topic in &request.topics {
            let indexes = topic.partitions.iter().map(|partition| partition.partition_index);
            let known: Vec<i32> = indexes.filter(|index| exists(&topic.name, *index)).collect();
            requested.push((topic.name.to_string(), known));
        }
        let reads = match self.shared.delete_offsets(&request.group_id, &requested, &exists).await {
            Ok(reads) => reads,
            Err(error) => return OffsetDeleteResponse::default().with_error_code(error.code()),
        };
        let topics = request.topics.into_iter().map(|topic| {
            let result = |partition: &OffsetDeleteRequestPartition| {
                let index = partition.partition_index;
                let error = if !exists(&topic.name, index) {
                    ResponseError::UnknownTopicOrPartition.code()
                } else if reads.includes(&topic.name) {
                    ResponseError::GroupSubscribedToTopic.code()
                } else {
                    0
                };
                OffsetDeleteResponsePartition::default()
                    .with_partition_index(index)
                    .with_error_code(error)
            };
            let partitions = topic.partitions.iter().map(result).collect();
            OffsetDeleteResponseTopic::default().with_name(topic.name).with_partitions(partitions)
        });
        OffsetDeleteResponse::default().with_topics(topics.collect())
    }
}

impl Shared {
    /// Deletes the offsets of those topics that no member reads.
    async fn delete_offsets(
        &self,
        group: &str,
        requested: &[(String, Vec<i32>)],
        exists: impl Fn(&str, i32) -> bool,
    ) -> Result<Reads, ResponseError> {
        self.check_open()?;
        // The group exists, so its name fits in a record.
        let slot = self.registry.get(group).ok_or(ResponseError::GroupIdNotFound)?;
        let mut reads = Reads::Unknown;
        self.write(|| {
            // Under the group's lock, so that no member can join and commit in between.
            self.registry.peek(&slot, |live, _| {
                reads = Reads::of(live).map_err(Blocked::Group)?;
                Ok(self.log.append_chosen(|_| {
                    let is_deletable = |(topic, indexes): &&(String, Vec<i32>)| {
                        // A topic is created and deleted as a whole, so one partition suffices.
                        indexes.first().is_some_and(|index| exists(topic, *index))
                            && !reads.includes(topic)
                    };
                    let topics: Vec<_> = requested.iter().filter(is_deletable).cloned().collect();
                    let is_any = !topics.is_empty();
                    let record = Record::Expired { group: group.to_owned(), topics };
                    is_any.then(|| Prepared::from(record))
                })?)
            })
        })
        .await?;
        Ok(reads)
    }
}

impl Reads {
    /// Returns the topics that the members of a group read.
    ///
    /// # Errors
    /// The group does not exist, or has members that are not consumers.
    pub(super) fn of(group: &LiveGroup) -> Result<Self, ResponseError> {
        match group {
            LiveGroup::Classic(group) => Self::of_classic(&group.describe()),
            LiveGroup::Consumer(group) => {
                Ok(group.subscribed_names().map_or(Self::Unknown, Self::These))
            }
            // It has share partitions instead of offsets.
            LiveGroup::Share(_) => Err(ResponseError::GroupIdNotFound),
        }
    }

    fn of_classic(group: &Description) -> Result<Self, ResponseError> {
        match group.state {
            State::Dead => Err(ResponseError::GroupIdNotFound),
            State::Empty => Ok(Self::These(HashSet::new())),
            _ if group.protocol_type.as_str() != embedded::CONSUMER => {
                Err(ResponseError::NonEmptyGroup)
            }
            State::Stable => {
                let mut topics = HashSet::new();
                for member in &group.members {
                    match embedded::read_topics(&member.metadata) {
                        Some(subscribed) => topics.extend(subscribed),
                        None => return Ok(Self::Unknown),
                    }
                }
                Ok(Self::These(topics))
            }
            State::Preparing | State::Completing => Ok(Self::Unknown),
        }
    }

    pub(super) fn includes(&self, topic: &str) -> bool {
        match self {
            Self::These(topics) => topics.contains(topic),
            Self::Unknown => true,
        }
    }
}
