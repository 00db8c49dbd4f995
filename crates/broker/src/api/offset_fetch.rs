//! OffsetFetch: committed offsets, and which of them an open transaction may replace.

use std::collections::{BTreeSet, HashMap};

use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::offset_fetch_request::OffsetFetchRequestGroup;
use kafka_protocol::messages::offset_fetch_response::{
    OffsetFetchResponseGroup, OffsetFetchResponsePartitions, OffsetFetchResponseTopics,
};
use kafka_protocol::messages::{OffsetFetchRequest, OffsetFetchResponse, TopicName};
use kafka_protocol::protocol::StrBytes;
use uuid::Uuid;

use super::offset_commit::FIRST_WITH_TOPIC_IDS;
use super::{Answer, Context, Refused};
use crate::groups::TopicsView;
use crate::security::{Operation, Resource};
use crate::wire::offsets::{OffsetFetch, OffsetsFetched};
use crate::wire::once;

/// Replaces an offset by an error. The partition types before and since version 8 differ, but have
/// the same fields.
macro_rules! withhold {
    ($partition:ident, $code:expr) => {
        $partition.error_code = $code;
        $partition.committed_offset = -1;
        $partition.committed_leader_epoch = -1;
        $partition.metadata = Some(StrBytes::new());
    };
}

pub(super) async fn handle(cx: Context, body: Bytes) -> Result<Answer, Refused> {
    let request: OffsetFetch = cx.decode(body)?;
    let mut response = match cx.version {
        FIRST_WITH_TOPIC_IDS.. => by_id(&cx, request).await,
        _ => {
            let body = by_name(&cx, request.body).await;
            OffsetsFetched { body, topic_ids: Vec::new() }
        }
    };
    response.body.throttle_time_ms = cx.throttle_ms();
    cx.reply(&response)
}

/// Handles requests by topic ID. Offsets are stored by name, so IDs are replaced by names and back.
/// A topic whose name went to another topic in between is left out.
async fn by_id(cx: &Context, request: OffsetFetch) -> OffsetsFetched {
    let OffsetFetch { mut body, topic_ids } = request;
    let groups = once(body.groups.into_iter().zip(topic_ids), |(group, _)| group.group_id.clone());
    let before = cx.server.topics.view();
    let asked: Vec<Asked>;
    (body.groups, asked) = groups.map(|(group, ids)| Asked::new(group, ids, &before)).unzip();
    let mut body = by_name(cx, body).await;
    let after = cx.server.topics.view();
    let groups = body.groups.iter_mut().zip(asked);
    let topic_ids = groups.map(|(group, asked)| asked.answer(group, &before, &after)).collect();
    OffsetsFetched { body, topic_ids }
}

/// The part of a group's request that names cannot express.
struct Asked {
    /// Whether all topics are requested.
    for_all: bool,
    /// The IDs of the topics that were replaced by names, in order.
    ids: Vec<Uuid>,
    /// IDs of no topic, with their partitions.
    unknown: Vec<(Uuid, Vec<i32>)>,
}

impl Asked {
    /// Replaces the topic IDs of a group by names, and takes out unknown ones.
    fn new(
        mut group: OffsetFetchRequestGroup,
        all_ids: Vec<Uuid>,
        topics: &TopicsView,
    ) -> (OffsetFetchRequestGroup, Self) {
        let (mut ids, mut unknown) = (Vec::new(), Vec::new());
        let named = group.topics.take().map(|asked| {
            let named = asked.into_iter().zip(all_ids).filter_map(|(topic, id)| {
                let Some(name) = topics.name(id) else {
                    unknown.push((id, topic.partition_indexes));
                    return None;
                };
                ids.push(id);
                Some(topic.with_name(TopicName(StrBytes::from_string(name.to_string()))))
            });
            named.collect()
        });
        let asked = Self { for_all: named.is_none(), ids, unknown };
        (group.with_topics(named), asked)
    }

    /// Converts the offsets found by name to a response by ID; returns the IDs of its topics.
    fn answer(
        self,
        found: &mut OffsetFetchResponseGroup,
        before: &TopicsView,
        after: &TopicsView,
    ) -> Vec<Uuid> {
        if found.error_code != 0 {
            return Vec::new();
        }
        if self.for_all {
            // As in Kafka, a topic without an ID is left out: one that was deleted or created
            // concurrently.
            let id = |topic: &OffsetFetchResponseTopics| {
                let (id, _) = before.get(&topic.name)?;
                after.name(id).map(|_| id)
            };
            found.topics.retain(|topic| id(topic).is_some());
            return found.topics.iter().filter_map(id).collect();
        }
        let mut ids = self.ids;
        for (topic, id) in found.topics.iter_mut().zip(&ids) {
            if after.name(*id).is_none() {
                for partition in &mut topic.partitions {
                    withhold!(partition, ResponseError::UnknownTopicId.code());
                }
            }
        }
        for (id, indexes) in self.unknown {
            let partitions = indexes.into_iter().map(|index| {
                let mut partition =
                    OffsetFetchResponsePartitions::default().with_partition_index(index);
                withhold!(partition, ResponseError::UnknownTopicId.code());
                partition
            });
            let topic = OffsetFetchResponseTopics::default();
            found.topics.push(topic.with_partitions(partitions.collect()));
            ids.push(id);
        }
        ids
    }
}

/// Handles versions before 10, and what version 10 has in common with them.
async fn by_name(cx: &Context, request: OffsetFetchRequest) -> OffsetFetchResponse {
    if cx.server.authorizer.is_none() {
        return fetch(cx, request).await;
    }
    // Topics that the client may not see are left out of a request for all, and refused in a
    // request by name. A group that is named twice gets one response, for its first request.
    let all: HashMap<_, _> = once(&request.groups, |group| group.group_id.clone())
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
    // Before the offsets are read: the offsets of transactions that end until then are included.
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

/// The partitions with offsets staged in a transaction that has not ended, by group.
fn pending(cx: &Context, request: &OffsetFetchRequest) -> HashMap<String, BTreeSet<(String, i32)>> {
    let named = request.groups.iter().map(|group| &group.group_id).chain([&request.group_id]);
    // A request may name a group a million times.
    let pending = once(named, |group| *group)
        .map(|group| (group.to_string(), cx.server.groups.pending().partitions(group)));
    pending.filter(|(_, partitions)| !partitions.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use kafka_protocol::messages::offset_fetch_request::OffsetFetchRequestTopics;

    use super::*;

    fn view(version: u64, topics: &[(&str, u128)]) -> TopicsView {
        let topics = topics.iter().map(|(name, id)| ((*name).into(), Uuid::from_u128(*id), 1));
        TopicsView::new(version, topics)
    }

    fn found(names: &[&'static str]) -> OffsetFetchResponseGroup {
        let topic = |&name: &&'static str| {
            let partition = OffsetFetchResponsePartitions::default().with_committed_offset(5);
            OffsetFetchResponseTopics::default()
                .with_name(TopicName(StrBytes::from_static_str(name)))
                .with_partitions(vec![partition])
        };
        OffsetFetchResponseGroup::default().with_topics(names.iter().map(topic).collect())
    }

    /// Between the two views `a` is deleted and another topic gets its name, `d` is deleted, `e` is
    /// created.
    #[test]
    fn offsets_are_never_returned_under_the_id_of_another_topic() {
        let before = view(1, &[("a", 1), ("b", 2), ("d", 4)]);
        let after = view(2, &[("a", 11), ("b", 2), ("e", 5)]);

        let topic = OffsetFetchRequestTopics::default().with_partition_indexes(vec![0]);
        let group = OffsetFetchRequestGroup::default().with_topics(Some(vec![topic; 5]));
        let ids = [1, 5, 2, 11, 4].map(Uuid::from_u128);
        let (named, asked) = Asked::new(group, ids.into(), &before);
        let names = named.topics.unwrap().into_iter().map(|topic| topic.name.to_string());
        assert_eq!(names.collect::<Vec<_>>(), ["a", "b", "d"]);
        let mut some = found(&["a", "b", "d"]);
        let answered = asked.answer(&mut some, &before, &after);
        assert_eq!(answered, [1, 2, 4, 5, 11].map(Uuid::from_u128));
        let partitions = some.topics.iter().map(|topic| &topic.partitions[0]);
        let partitions: Vec<_> =
            partitions.map(|p| (p.partition_index, p.error_code, p.committed_offset)).collect();
        let gone = (0, 100, -1);
        assert_eq!(partitions, [gone, (0, 0, 5), gone, gone, gone]);

        let all = OffsetFetchRequestGroup::default().with_topics(None);
        let (_, asked) = Asked::new(all, Vec::new(), &before);
        let mut all = found(&["a", "b", "d", "e"]);
        assert_eq!(asked.answer(&mut all, &before, &after), [Uuid::from_u128(2)]);
        assert_eq!(all.topics.len(), 1);
    }

    #[test]
    fn a_group_with_an_error_has_no_topics() {
        let none = view(0, &[]);
        let topic = OffsetFetchRequestTopics::default().with_partition_indexes(vec![0]);
        let group = OffsetFetchRequestGroup::default().with_topics(Some(vec![topic]));
        let (_, asked) = Asked::new(group, vec![Uuid::nil()], &none);
        let mut found = found(&[]).with_error_code(ResponseError::UnknownMemberId.code());
        assert!(asked.answer(&mut found, &none, &none).is_empty());
        assert!(found.topics.is_empty());
    }
}
