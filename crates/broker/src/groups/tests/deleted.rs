//! Topics that are deleted while a change of their offsets waits for space in the log.

use std::pin::pin;
use std::sync::atomic::AtomicBool;

use futures::poll;
use kafka_protocol::messages::OffsetDeleteRequest;
use kafka_protocol::messages::offset_delete_request::{
    OffsetDeleteRequestPartition, OffsetDeleteRequestTopic,
};

use super::*;
use crate::groups::offset_log::Prepared;
use crate::groups::offsets::Record;

/// Fills the log, so that it has no space while the disk does not complete writes.
fn fill(groups: &Groups) {
    for metadata_bytes in [4096, 64, 0] {
        let metadata = "n".repeat(metadata_bytes);
        let position = Position { partition: 0, offset: 1, leader_epoch: -1, metadata };
        let topics = vec![("f".to_owned(), vec![position])];
        let record = Record::Commit { group: "f".to_owned(), committed_at_ms: 0, topics };
        let record = Prepared::from(record);
        while groups.shared.log.append(&record).is_ok() {}
    }
}

/// A topic that can be deleted, beside one that stays.
struct Topics {
    is_deleted: AtomicBool,
}

impl Topics {
    fn exists(&self, topic: &str) -> bool {
        topic != "topic" || !self.is_deleted.load(Ordering::SeqCst)
    }

    /// Deletes the topic and its offsets, as DeleteTopics does; another topic may have the name
    /// from then on.
    async fn delete(&self, world: &World, groups: &Groups) {
        self.is_deleted.store(true, Ordering::SeqCst);
        let names = ["topic".to_owned()];
        let forget = groups.forget_missing_topics(&names, |name| self.exists(name));
        world.run(forget).await.expect("written");
    }
}

/// Otherwise consumers of the new topic would begin where the old one ended.
#[tokio::test]
async fn a_commit_waiting_for_space_does_not_apply_to_a_later_topic_of_the_name() {
    let world = World::new();
    let (_store, groups) = world.start().await;
    let topics = Topics { is_deleted: AtomicBool::new(false) };
    fill(&groups);
    let view = TopicsView::default();
    let request = commit_request("g", &[("topic", 0, 7), ("topic-b", 0, 8)]);
    let mut waiting =
        pin!(groups.offset_commit(request, 9, &view, |topic, _| topics.exists(topic)));
    assert!(poll!(waiting.as_mut()).is_pending());
    topics.delete(&world, &groups).await;
    let answered = world.run(waiting).await;
    let codes = answered.topics.iter().map(|topic| topic.partitions[0].error_code);
    let unknown = ResponseError::UnknownTopicOrPartition.code();
    assert_eq!(codes.collect::<Vec<_>>(), [unknown, unknown]);
    assert_eq!(fetch(&groups, "g").await, []);
}

/// The remaining offset is the new topic's.
#[tokio::test]
async fn an_offset_deletion_waiting_for_space_does_not_apply_to_a_later_topic_of_the_name() {
    let world = World::new();
    let (_store, groups) = world.start().await;
    let topics = Topics { is_deleted: AtomicBool::new(false) };
    let request = commit_request("g", &[("topic", 0, 7), ("topic-b", 0, 8)]);
    assert_eq!(world.run(commit(&groups, request)).await, [0, 0]);
    fill(&groups);
    let topic = |name| {
        let partition = OffsetDeleteRequestPartition::default().with_partition_index(0);
        OffsetDeleteRequestTopic::default()
            .with_name(TopicName(s(name)))
            .with_partitions(vec![partition])
    };
    let request = OffsetDeleteRequest::default()
        .with_group_id(group_id("g"))
        .with_topics(vec![topic("topic"), topic("topic-b")]);
    let mut waiting = pin!(groups.offset_delete(request, |topic, _| topics.exists(topic)));
    assert!(poll!(waiting.as_mut()).is_pending());
    topics.is_deleted.store(true, Ordering::SeqCst);
    let answered = world.run(waiting).await;
    let codes = answered.topics.iter().map(|topic| topic.partitions[0].error_code);
    let codes: Vec<i16> = codes.collect();
    assert_eq!(codes, [ResponseError::UnknownTopicOrPartition.code(), 0]);
    assert_eq!(fetch(&groups, "g").await, [found("topic", 0, 7)]);
}
