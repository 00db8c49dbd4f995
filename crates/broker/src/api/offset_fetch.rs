//! OffsetFetch: committed offsets; and which of them a transaction may be about to replace.

use std::collections::{BTreeSet, HashMap};

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::{OffsetFetchRequest, OffsetFetchResponse};
use kafka_protocol::protocol::StrBytes;

use super::Context;
use crate::security::{Operation, Resource};

/// An error in the place of an offset. The types of partitions before and since version 8 are two, with the same fields.
macro_rules! withhold {
    ($partition:ident, $code:expr) => {
        $partition.error_code = $code;
        $partition.committed_offset = -1;
        $partition.committed_leader_epoch = -1;
        $partition.metadata = Some(StrBytes::new());
    };
}

pub(super) async fn handle(cx: &Context, request: OffsetFetchRequest) -> OffsetFetchResponse {
    if cx.server.authorizer.is_none() {
        return fetch(cx, request).await;
    }
    // What the client may not see is left out where it asks for all, and refused where it asks for it.
    let all: HashMap<_, _> = request
        .groups
        .iter()
        .map(|group| (group.group_id.clone(), group.topics.is_none()))
        .collect();
    let asks_for_all = request.topics.is_none();
    let group_id = request.group_id.clone();
    let mut response = fetch(cx, request).await;
    let refused = |name: &str| cx.authorize(Operation::Describe, Resource::Topic(name)).err();
    for group in &mut response.groups {
        if let Err(error) = cx.authorize(Operation::Describe, Resource::Group(&group.group_id)) {
            group.topics.clear();
            group.error_code = error.code();
        }
        if all.get(&group.group_id) == Some(&true) {
            group.topics.retain(|topic| refused(&topic.name).is_none());
        }
        for topic in &mut group.topics {
            let Some(error) = refused(&topic.name) else { continue };
            for partition in &mut topic.partitions {
                withhold!(partition, error.code());
            }
        }
    }
    let group = match cx.version {
        8.. => None,
        _ => cx.authorize(Operation::Describe, Resource::Group(&group_id)).err(),
    };
    if let Some(error) = &group
        && cx.version >= 2
    {
        response.topics.clear();
        response.error_code = error.code();
    }
    if asks_for_all {
        response.topics.retain(|topic| refused(&topic.name).is_none());
    }
    for topic in &mut response.topics {
        let refused = refused(&topic.name);
        let Some(error) = group.as_ref().or(refused.as_ref()) else { continue };
        for partition in &mut topic.partitions {
            withhold!(partition, error.code());
        }
    }
    response
}

async fn fetch(cx: &Context, request: OffsetFetchRequest) -> OffsetFetchResponse {
    // Before the offsets are read: what has ended by then is among them.
    let pending = if request.require_stable { pending(cx, &request) } else { HashMap::new() };
    let single = request.group_id.clone();
    let mut response = cx.server.groups.offset_fetch(request, cx.version).await;
    let is_pending = |group: &str, topic: &str, partition: i32| {
        let pending = pending.get(group);
        pending.is_some_and(|pending| pending.contains(&(topic.to_owned(), partition)))
    };
    let unstable = ResponseError::UnstableOffsetCommit.code();
    for group in &mut response.groups {
        for topic in &mut group.topics {
            for partition in &mut topic.partitions {
                if is_pending(&group.group_id, &topic.name, partition.partition_index) {
                    withhold!(partition, unstable);
                }
            }
        }
    }
    for topic in &mut response.topics {
        for partition in &mut topic.partitions {
            if is_pending(&single, &topic.name, partition.partition_index) {
                withhold!(partition, unstable);
            }
        }
    }
    response
}

/// By group, the partitions for which a transaction that has not ended has an offset.
fn pending(cx: &Context, request: &OffsetFetchRequest) -> HashMap<String, BTreeSet<(String, i32)>> {
    let named = request.groups.iter().map(|group| &group.group_id).chain([&request.group_id]);
    let pending =
        named.map(|group| (group.to_string(), cx.server.groups.pending().partitions(group)));
    pending.filter(|(_, partitions)| !partitions.is_empty()).collect()
}
