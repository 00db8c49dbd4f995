//! DescribeShareGroupOffsets, AlterShareGroupOffsets, DeleteShareGroupOffsets: the offsets of share
//! groups.

use std::collections::BTreeMap;
use std::sync::Arc;

use alluvium_stream::StreamOffset;
use kafka_protocol::messages::alter_share_group_offsets_response::{
    AlterShareGroupOffsetsResponsePartition, AlterShareGroupOffsetsResponseTopic,
};
use kafka_protocol::messages::{
    AlterShareGroupOffsetsRequest, AlterShareGroupOffsetsResponse, DeleteShareGroupOffsetsRequest,
    DeleteShareGroupOffsetsResponse, TopicName,
    delete_share_group_offsets_response as delete_response,
};
use kafka_protocol::protocol::StrBytes;
use uuid::Uuid;

use super::Context;
use super::share::error_fields;
use crate::errors::ApiError;
use crate::groups::share::Described;
use crate::partition::kafka_offset;
use crate::security::{Operation, Resource};
use crate::topics::TopicRef;
use crate::wire::once;
use crate::wire::share::{
    DescribeShareOffsets, DescribedGroup, DescribedPartition, DescribedShareOffsets, DescribedTopic,
};

/// The offset of a share group that has not started.
const NOT_BEGUN: i64 = -1;
const UNKNOWN_LAG: i64 = -1;

pub(super) async fn describe(cx: &Context, request: DescribeShareOffsets) -> DescribedShareOffsets {
    let mut groups = Vec::new();
    for group in once(request.0.groups, |group| group.group_id.clone()) {
        let group_id = group.group_id.0.clone();
        let mut described = DescribedGroup { group_id, ..DescribedGroup::default() };
        let code = cx.group_code(Operation::Describe, &group.group_id);
        if code != 0 {
            described.error_code = code;
            groups.push(described);
            continue;
        }
        let partitions = match cx.server.groups.share_partitions(&group.group_id).await {
            Ok(partitions) => partitions,
            Err(fault) => {
                described.error_code = fault.error.code();
                described.error_message = Some(StrBytes::from_string(fault.message));
                groups.push(described);
                continue;
            }
        };
        let mut by_topic: BTreeMap<Uuid, BTreeMap<i32, Described>> = BTreeMap::new();
        for partition in partitions {
            by_topic.entry(partition.of.0).or_default().insert(partition.of.1, partition);
        }
        described.topics = match group.topics {
            // Topics that the client may not see are left out.
            None => by_topic.iter().filter_map(|(id, known)| all_of(cx, *id, known)).collect(),
            Some(topics) => {
                let topics = once(topics, |topic| topic.topic_name.clone());
                topics.map(|t| these_of(cx, &t.topic_name, t.partitions, &by_topic)).collect()
            }
        };
        groups.push(described);
    }
    DescribedShareOffsets { groups, ..DescribedShareOffsets::default() }
}

fn all_of(cx: &Context, id: Uuid, known: &BTreeMap<i32, Described>) -> Option<DescribedTopic> {
    let topic = cx.server.topics.by_id(id).ok()?;
    cx.authorize(Operation::Describe, Resource::Topic(&topic.name)).ok()?;
    let partitions = known.values().map(|known| partition(&topic, known.of.1, Some(known)));
    Some(DescribedTopic {
        name: StrBytes::from_string(topic.name.to_string()),
        id,
        partitions: partitions.collect(),
    })
}

fn these_of(
    cx: &Context,
    name: &TopicName,
    indexes: Vec<i32>,
    known: &BTreeMap<Uuid, BTreeMap<i32, Described>>,
) -> DescribedTopic {
    let topic = cx.topic(Operation::Describe, &TopicRef::Name(Arc::from(&***name)));
    let known = topic.as_ref().ok().and_then(|topic| known.get(&topic.id));
    let partitions = once(indexes, |index| *index).map(|index| match &topic {
        Ok(topic) => partition(topic, index, known.and_then(|known| known.get(&index))),
        Err(error) => failed(index, error),
    });
    DescribedTopic {
        name: name.0.clone(),
        id: topic.as_ref().map_or(Uuid::nil(), |topic| topic.id),
        partitions: partitions.collect(),
    }
}

fn partition(
    topic: &crate::topics::Topic,
    index: i32,
    known: Option<&Described>,
) -> DescribedPartition {
    let Some(partition) = topic.partition(index) else {
        return failed(index, &ApiError::UnknownTopicOrPartition);
    };
    let begun = DescribedPartition { index, lag: UNKNOWN_LAG, ..DescribedPartition::default() };
    match known {
        None => DescribedPartition { start_offset: NOT_BEGUN, ..begun },
        Some(known) => {
            // The log start may have moved since the group's last read.
            let start = known.start.max(partition.stream.start_offset());
            let behind = partition.stream.durable_end().0.saturating_sub(start.0);
            let lag = behind.saturating_sub(known.finished);
            DescribedPartition {
                start_offset: kafka_offset(start),
                leader_epoch: partition.leader_epoch(),
                lag: i64::try_from(lag).unwrap_or(i64::MAX),
                ..begun
            }
        }
    }
}

fn failed(index: i32, error: &ApiError) -> DescribedPartition {
    let (error_code, error_message) = error_fields(Some(error));
    let (start_offset, lag) = (NOT_BEGUN, UNKNOWN_LAG);
    DescribedPartition { index, start_offset, leader_epoch: -1, lag, error_code, error_message }
}

/// Checks that the client may do this with the group, and that the group's state allows it.
///
/// # Errors
/// Code and message for the response.
fn check(
    cx: &Context,
    operation: Operation,
    group: &str,
    may_be_new: bool,
) -> Result<(), (i16, Option<StrBytes>)> {
    match cx.group_code(operation, group) {
        0 => {}
        code => return Err((code, None)),
    }
    cx.check_writable().map_err(|error| error_fields(Some(&error)))?;
    cx.server
        .groups
        .check_alterable(group, may_be_new)
        .map_err(|fault| (fault.error.code(), Some(StrBytes::from_string(fault.message))))
}

pub(super) async fn alter(
    cx: &Context,
    request: AlterShareGroupOffsetsRequest,
) -> AlterShareGroupOffsetsResponse {
    let response = AlterShareGroupOffsetsResponse::default();
    if let Err((code, message)) = check(cx, Operation::Read, &request.group_id, true) {
        return response.with_error_code(code).with_error_message(message);
    }
    let mut topics = Vec::new();
    for topic in once(request.topics, |topic| topic.topic_name.clone()) {
        let found = cx.topic(Operation::Read, &TopicRef::Name(Arc::from(&**topic.topic_name)));
        let wanted = once(topic.partitions, |p| p.partition_index);
        let checked = wanted.map(|p| {
            let start = match &found {
                Err(error) => Err(error_fields(Some(error))),
                Ok(found) if found.partition(p.partition_index).is_none() => {
                    Err(error_fields(Some(&ApiError::UnknownTopicOrPartition)))
                }
                Ok(_) => u64::try_from(p.start_offset).map(StreamOffset).map_err(|_| {
                    error_fields(Some(&ApiError::InvalidRequest("an offset is negative".into())))
                }),
            };
            (p.partition_index, start)
        });
        let checked: Vec<_> = checked.collect();
        let starts = checked
            .iter()
            .filter_map(|(index, start)| start.as_ref().ok().map(|start| (*index, *start)));
        let starts: Vec<(i32, StreamOffset)> = starts.collect();
        let mut outcome = (0, None);
        if let Ok(found) = &found
            && !starts.is_empty()
        {
            let exists = || cx.server.topics.by_id(found.id).is_ok();
            let groups = &cx.server.groups;
            if let Err(fault) =
                groups.alter_shares(&request.group_id, found.id, &starts, exists).await
            {
                outcome = (fault.error.code(), Some(StrBytes::from_string(fault.message)));
            }
        }
        let partitions = checked.into_iter().map(|(index, start)| {
            let (code, message) = start.err().unwrap_or_else(|| outcome.clone());
            AlterShareGroupOffsetsResponsePartition::default()
                .with_partition_index(index)
                .with_error_code(code)
                .with_error_message(message)
        });
        topics.push(
            AlterShareGroupOffsetsResponseTopic::default()
                .with_partitions(partitions.collect())
                .with_topic_name(topic.topic_name)
                .with_topic_id(found.map_or(Uuid::nil(), |topic| topic.id)),
        );
    }
    response.with_responses(topics)
}

pub(super) async fn delete(
    cx: &Context,
    request: DeleteShareGroupOffsetsRequest,
) -> DeleteShareGroupOffsetsResponse {
    let response = DeleteShareGroupOffsetsResponse::default();
    if let Err((code, message)) = check(cx, Operation::Delete, &request.group_id, false) {
        return response.with_error_code(code).with_error_message(message);
    }
    let mut topics = Vec::new();
    for topic in once(request.topics, |topic| topic.topic_name.clone()) {
        let found = cx.topic(Operation::Read, &TopicRef::Name(Arc::from(&**topic.topic_name)));
        let (code, message) = match &found {
            Err(error) => error_fields(Some(error)),
            Ok(found) => match cx.server.groups.delete_shares(&request.group_id, found.id).await {
                Ok(true) => (0, None),
                Ok(false) => {
                    let message = "There is no offset information to delete.";
                    let code = ApiError::UnknownTopicOrPartition.code();
                    (code, Some(StrBytes::from_static_str(message)))
                }
                Err(fault) => (fault.error.code(), Some(StrBytes::from_string(fault.message))),
            },
        };
        topics.push(
            delete_response::DeleteShareGroupOffsetsResponseTopic::default()
                .with_topic_name(topic.topic_name)
                .with_topic_id(found.map_or(Uuid::nil(), |topic| topic.id))
                .with_error_code(code)
                .with_error_message(message),
        );
    }
    response.with_responses(topics)
}
