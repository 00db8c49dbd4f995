//! Deletion of records and offsets, and paged descriptions of partitions.

use std::pin::pin;
use std::time::{Duration, Instant};

use futures::poll;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::*;

use super::harness::{Client, TestServer, produce, text};
use super::transactions::Producer;
use crate::batch::tests::plain;
use crate::topics::RECREATION_PAUSE;
use crate::wire::newer::{DescribedLogDirs, Unchanged};

pub(super) async fn delete(
    client: &mut Client,
    topic: &str,
    wanted: &[(i32, i64)],
) -> Vec<(i32, i16, i64)> {
    use delete_records_request::*;
    let partition = |(index, offset): &(i32, i64)| {
        DeleteRecordsPartition::default().with_partition_index(*index).with_offset(*offset)
    };
    let topic = DeleteRecordsTopic::default()
        .with_name(TopicName(text(topic)))
        .with_partitions(wanted.iter().map(partition).collect());
    let request = DeleteRecordsRequest::default().with_topics(vec![topic]);
    let response = client.call(2, &request).await.topics.remove(0);
    let reported = response.partitions.iter();
    reported.map(|p| (p.partition_index, p.error_code, p.low_watermark)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_deleted_up_to_an_offset_and_stay_deleted() {
    let mut server = TestServer::start().await;
    server.topic("t", 2, &[]).await;
    server.topic("compacted", 1, &[("cleanup.policy", "compact")]).await;
    server.topic("__consumer_offsets", 1, &[]).await;
    server.topic("both", 1, &[("cleanup.policy", "compact,delete")]).await;
    let mut client = server.client().await;
    for topic in ["t", "compacted", "both"] {
        for offset in 0..4 {
            assert_eq!(client.produce(topic, 0, &plain(&[1])).await, (0, offset));
        }
    }
    let wrong = [(0, 5), (0, -2), (7, 0), (0, i64::MAX)];
    let reported = [(0, 1, -1), (0, 1, -1), (7, 3, -1), (0, 1, -1)];
    assert_eq!(delete(&mut client, "t", &wrong).await, reported);
    assert_eq!(
        delete(&mut client, "no", &[(0, 0)]).await,
        [(0, ResponseError::UnknownTopicOrPartition.code(), -1)]
    );
    assert_eq!(delete(&mut client, "t", &[(0, 2), (1, 0)]).await, [(0, 0, 2), (1, 0, 0)]);
    // A lower offset has no effect.
    assert_eq!(delete(&mut client, "t", &[(0, 1)]).await, [(0, 0, 2)]);
    // For a partition that is named twice the last offset counts, and other partitions are not
    // affected.
    let twice = [(0, 1), (0, 3), (1, 0)];
    assert_eq!(delete(&mut client, "t", &twice).await, [(0, 0, 3), (0, 0, 3), (1, 0, 0)]);
    assert_eq!(
        delete(&mut client, "compacted", &[(0, -1)]).await,
        [(0, ResponseError::PolicyViolation.code(), -1)]
    );
    assert_eq!(
        delete(&mut client, "__consumer_offsets", &[(0, -1)]).await,
        [(0, ResponseError::InvalidTopicException.code(), -1)]
    );
    assert_eq!(delete(&mut client, "both", &[(0, -1)]).await, [(0, 0, 4)]);
    server.crash().await;
    let mut client = server.client().await;
    assert_eq!(client.fetch("t", 0, 1).await.0, ResponseError::OffsetOutOfRange.code());
    let (code, _, records) = client.fetch("t", 0, 3).await;
    assert!(code == 0 && !records.is_empty());
    assert_eq!(delete(&mut client, "t", &[(0, -1)]).await, [(0, 0, 4)]);
    assert_eq!(client.fetch("t", 0, 4).await.0, 0);
    assert_eq!(client.produce("t", 0, &plain(&[1])).await, (0, 4));
}

/// A consumer that waits at the end continues; one that fetches deleted records gets an error.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_fetch_survives_a_deletion() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let (mut client, mut consumer) = (server.client().await, server.client().await);
    assert_eq!(client.produce("t", 0, &plain(&[1])).await, (0, 0));
    let id = consumer.send(12, &super::harness::fetch("t", &[(0, 1)], 20_000)).await;
    server.begun("Fetch", 12, 1).await;
    assert_eq!(delete(&mut client, "t", &[(0, -1)]).await, [(0, 0, 1)]);
    let response = client.call(9, &produce("t", 0, &plain(&[2]), -1)).await;
    let produced = &response.responses[0].partition_responses[0];
    assert_eq!((produced.base_offset, produced.log_start_offset), (1, 1));
    let fetched = consumer.receive::<FetchRequest>(12, id).await;
    let partition = &fetched.responses[0].partitions[0];
    assert_eq!((partition.error_code, partition.log_start_offset), (0, 1));
    assert!(partition.records.as_ref().is_some_and(|records| !records.is_empty()));
}

/// A commit of the same offset for some partitions, without a member.
pub(super) fn commit_request(
    group: &str,
    topic: &str,
    partitions: &[i32],
    offset: i64,
) -> OffsetCommitRequest {
    use offset_commit_request::*;
    let partition = |index: &i32| {
        OffsetCommitRequestPartition::default()
            .with_partition_index(*index)
            .with_committed_offset(offset)
    };
    let topic = OffsetCommitRequestTopic::default()
        .with_name(TopicName(text(topic)))
        .with_partitions(partitions.iter().map(partition).collect());
    OffsetCommitRequest::default()
        .with_group_id(GroupId(text(group)))
        .with_generation_id_or_member_epoch(-1)
        .with_topics(vec![topic])
}

pub(super) async fn commit(client: &mut Client, group: &str, topic: &str, partitions: &[i32]) {
    let response = client.call(8, &commit_request(group, topic, partitions, 7)).await;
    assert!(response.topics[0].partitions.iter().all(|partition| partition.error_code == 0));
}

pub(super) async fn committed(client: &mut Client, group: &str) -> Vec<(String, i32)> {
    use offset_fetch_request::OffsetFetchRequestGroup;
    let group =
        OffsetFetchRequestGroup::default().with_group_id(GroupId(text(group))).with_topics(None);
    let request = OffsetFetchRequest::default().with_groups(vec![group]);
    let topics = client.call(8, &request).await.groups.remove(0).topics;
    let offsets = topics.iter().flat_map(|topic| {
        topic.partitions.iter().map(|p| (topic.name.to_string(), p.partition_index))
    });
    offsets.collect()
}

fn delete_offsets_request(group: &str, wanted: &[(&str, i32)]) -> OffsetDeleteRequest {
    use offset_delete_request::*;
    let topic = |(topic, index): &(&str, i32)| {
        let partition = OffsetDeleteRequestPartition::default().with_partition_index(*index);
        OffsetDeleteRequestTopic::default()
            .with_name(TopicName(text(topic)))
            .with_partitions(vec![partition])
    };
    OffsetDeleteRequest::default()
        .with_group_id(GroupId(text(group)))
        .with_topics(wanted.iter().map(topic).collect())
}

pub(super) async fn delete_offsets(
    client: &mut Client,
    group: &str,
    wanted: &[(&str, i32)],
) -> (i16, Vec<i16>) {
    let response = client.call(0, &delete_offsets_request(group, wanted)).await;
    let codes = response.topics.iter().flat_map(|t| &t.partitions).map(|p| p.error_code);
    (response.error_code, codes.collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn offsets_of_topics_without_subscribers_are_deleted() {
    use join_group_request::JoinGroupRequestProtocol;
    use sync_group_request::SyncGroupRequestAssignment;
    let mut server = TestServer::with(16 << 20, |config| {
        config.groups.initial_rebalance_delay = Duration::ZERO;
    })
    .await;
    server.topic("read", 2, &[]).await;
    server.topic("other", 2, &[]).await;
    let mut client = server.client().await;
    commit(&mut client, "g", "read", &[0, 1]).await;
    commit(&mut client, "g", "other", &[0, 1]).await;
    assert_eq!(
        delete_offsets(&mut client, "no", &[("read", 0)]).await,
        (ResponseError::GroupIdNotFound.code(), vec![])
    );
    let wanted = [("other", 0), ("other", 9), ("no", 0)];
    assert_eq!(
        delete_offsets(&mut client, "g", &wanted).await,
        (
            0,
            vec![
                0,
                ResponseError::UnknownTopicOrPartition.code(),
                ResponseError::UnknownTopicOrPartition.code()
            ]
        )
    );
    server.crash().await;
    let mut client = server.client().await;
    let left = [("other".to_owned(), 1), ("read".to_owned(), 0), ("read".to_owned(), 1)];
    assert_eq!(committed(&mut client, "g").await, left);

    let metadata =
        bytes::Bytes::from_static(b"\x00\x00\x00\x00\x00\x01\x00\x04read\xff\xff\xff\xff");
    let protocol =
        JoinGroupRequestProtocol::default().with_name(text("range")).with_metadata(metadata);
    let join = JoinGroupRequest::default()
        .with_group_id(GroupId(text("g")))
        .with_session_timeout_ms(30_000)
        .with_rebalance_timeout_ms(30_000)
        .with_protocol_type(text("consumer"))
        .with_protocols(vec![protocol]);
    let joined = client.call(3, &join).await;
    assert_eq!(joined.error_code, 0);
    // Until the member has its assignment, the subscriptions of the group are unknown.
    assert_eq!(
        delete_offsets(&mut client, "g", &[("other", 1)]).await,
        (0, vec![ResponseError::GroupSubscribedToTopic.code()])
    );
    let assignment = SyncGroupRequestAssignment::default().with_member_id(joined.member_id.clone());
    let sync = SyncGroupRequest::default()
        .with_group_id(GroupId(text("g")))
        .with_generation_id(joined.generation_id)
        .with_member_id(joined.member_id.clone())
        .with_assignments(vec![assignment]);
    assert_eq!(client.call(3, &sync).await.error_code, 0);
    let wanted = [("read", 0), ("other", 1)];
    assert_eq!(
        delete_offsets(&mut client, "g", &wanted).await,
        (0, vec![ResponseError::GroupSubscribedToTopic.code(), 0])
    );
    assert_eq!(committed(&mut client, "g").await, left[1..]);
}

async fn delete_topic(client: &mut Client, topic: &str) {
    let delete = DeleteTopicsRequest::default().with_topic_names(vec![TopicName(text(topic))]);
    assert_eq!(client.call(5, &delete).await.responses[0].error_code, 0);
}

/// kafka-go deletes a topic and then requests its metadata in a way that may create it. Kafka takes
/// a moment to do so; a client that keeps asking gets the topic.
#[tokio::test(flavor = "multi_thread")]
async fn a_metadata_request_does_not_recreate_a_topic_deleted_just_now() {
    let server = TestServer::start().await;
    for name in ["t", "other"] {
        server.topic(name, 1, &[]).await;
    }
    let mut client = server.client().await;
    let before = Instant::now();
    delete_topic(&mut client, "t").await;
    let after = Instant::now();

    let named = |name: &str| {
        let topic = metadata_request::MetadataRequestTopic::default();
        let topic = topic.with_name(Some(TopicName(text(name))));
        MetadataRequest::default().with_topics(Some(vec![topic]))
    };
    loop {
        let reported = client.call(12, &named("t")).await.topics.remove(0);
        if reported.error_code == 0 {
            assert_eq!(reported.partitions.len(), 1);
            break;
        }
        assert_eq!(
            (reported.error_code, reported.partitions.len()),
            (ResponseError::UnknownTopicOrPartition.code(), 0)
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(before.elapsed() >= RECREATION_PAUSE);
    // Other topics are created at once.
    let reported = client.call(12, &named("new")).await.topics.remove(0);
    assert_eq!((reported.error_code, reported.partitions.len()), (0, 1));

    let topics = &server.server().topics;
    assert!(topics.is_just_deleted("t", before));
    assert!(topics.is_just_deleted("t", before + RECREATION_PAUSE - Duration::from_nanos(1)));
    assert!(!topics.is_just_deleted("t", after + RECREATION_PAUSE));
    assert!(!topics.is_just_deleted("other", after));
    // An explicit request creates it.
    delete_topic(&mut client, "t").await;
    let topic = create_topics_request::CreatableTopic::default()
        .with_name(TopicName(text("t")))
        .with_num_partitions(2)
        .with_replication_factor(1);
    let created = client.call(7, &CreateTopicsRequest::default().with_topics(vec![topic])).await;
    assert_eq!(created.topics[0].error_code, 0);
    assert_eq!(client.call(12, &named("t")).await.topics[0].partitions.len(), 2);
}

/// A request that waits for space in the log concerns the topic that existed when it arrived.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_does_not_apply_to_a_topic_created_after_it_arrived() {
    let server = TestServer::simulated(16 << 20).await;
    server.topic("t", 1, &[]).await;
    server.topic("filler", 1, &[]).await;
    let mut client = server.client().await;
    let group = "g".repeat(500);
    let request = commit_request(&group, "t", &[0], 9);
    server.hold_disk(true);
    server.fill_log("filler");
    let mut waiting = pin!(server.send_bare(8, &request));
    assert!(poll!(waiting.as_mut()).is_pending());
    server.hold_disk(false);
    delete_topic(&mut client, "t").await;
    server.topic("t", 1, &[]).await;
    assert!(waiting.await);
    assert_eq!(committed(&mut client, &group).await, []);

    commit(&mut client, &group, "t", &[0]).await;
    let request = delete_offsets_request(&group, &[("t", 0)]);
    server.hold_disk(true);
    server.fill_log("filler");
    let mut waiting = pin!(server.send_bare(0, &request));
    assert!(poll!(waiting.as_mut()).is_pending());
    server.hold_disk(false);
    delete_topic(&mut client, "t").await;
    server.topic("t", 1, &[]).await;
    commit(&mut client, &group, "t", &[0]).await;
    assert!(waiting.await);
    assert_eq!(committed(&mut client, &group).await, [("t".to_owned(), 0)]);
}

pub(super) async fn delete_group(client: &mut Client, group: &str) -> i16 {
    let names = vec![GroupId(text(group))];
    let request = DeleteGroupsRequest::default().with_groups_names(names);
    client.call(2, &request).await.results[0].error_code
}

/// A transaction that was open all the time would restore the offsets, and the group with them.
#[tokio::test(flavor = "multi_thread")]
async fn deleted_offsets_of_a_group_are_not_committed_by_a_transaction() {
    for crash in [false, true] {
        let mut server = TestServer::start().await;
        server.topic("t", 3, &[]).await;
        server.topic("other", 1, &[]).await;
        let mut client = server.client().await;
        let mut producer = Producer::init(&server, "a", true).await;
        for group in ["deleted", "kept", "new"] {
            if group != "new" {
                commit(&mut client, group, "t", &[0]).await;
            }
            assert_eq!(producer.commit_offsets(group, "t", &[0, 1, 2], 9).await, 0);
            assert_eq!(producer.commit_offsets(group, "other", &[0], 9).await, 0);
        }
        assert_eq!(delete_group(&mut client, "deleted").await, 0);
        assert_eq!(
            delete_group(&mut client, "deleted").await,
            ResponseError::GroupIdNotFound.code()
        );
        // It has no offsets other than those of the transaction.
        assert_eq!(delete_group(&mut client, "new").await, 0);
        let wanted = [("t", 0), ("t", 2), ("t", 7)];
        assert_eq!(
            delete_offsets(&mut client, "kept", &wanted).await,
            (0, vec![0, 0, ResponseError::UnknownTopicOrPartition.code()])
        );
        if crash {
            server.crash().await;
            client = server.client().await;
            producer.reconnect(&server).await;
        }
        assert_eq!(producer.end(true).await, 0);
        let left = [("other".to_owned(), 0), ("t".to_owned(), 1)];
        assert_eq!(committed(&mut client, "kept").await, left);
        assert!(committed(&mut client, "deleted").await.is_empty());
        assert!(committed(&mut client, "new").await.is_empty());
        let groups = client.call(4, &ListGroupsRequest::default()).await.groups;
        let names: Vec<&str> = groups.iter().map(|group| group.group_id.as_str()).collect();
        assert_eq!(names, ["kept"]);
        // What the transaction commits from now on belongs to another group of that name.
        assert_eq!(producer.commit_offsets("deleted", "other", &[0], 3).await, 0);
        assert_eq!(producer.end(true).await, 0);
        assert_eq!(committed(&mut client, "deleted").await, left[..1]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_are_described_page_by_page() {
    use describe_topic_partitions_request::{Cursor, TopicRequest};
    let server = TestServer::start().await;
    server.topic("a", 2, &[]).await;
    server.topic("b", 3, &[]).await;
    let mut client = server.client().await;
    let mut pages = Vec::new();
    let mut cursor = None;
    loop {
        let request = DescribeTopicPartitionsRequest::default()
            .with_response_partition_limit(2)
            .with_cursor(cursor);
        let response = client.call(0, &request).await;
        let page: Vec<(String, i16, Vec<i32>)> = response
            .topics
            .iter()
            .map(|topic| {
                let indexes = topic.partitions.iter().map(|p| p.partition_index).collect();
                (topic.name.as_ref().unwrap().to_string(), topic.error_code, indexes)
            })
            .collect();
        pages.push(page);
        match response.next_cursor {
            Some(next) => {
                cursor = Some(
                    Cursor::default()
                        .with_topic_name(next.topic_name)
                        .with_partition_index(next.partition_index),
                );
            }
            None => break,
        }
    }
    let (a, b) = (
        |indexes: &[i32]| ("a".to_owned(), 0, indexes.to_vec()),
        |indexes: &[i32]| ("b".to_owned(), 0, indexes.to_vec()),
    );
    assert_eq!(pages, [vec![a(&[0, 1])], vec![b(&[0, 1])], vec![b(&[2])]]);

    let named = |name: &str| TopicRequest::default().with_name(TopicName(text(name)));
    let request = DescribeTopicPartitionsRequest::default()
        .with_topics(vec![named("no"), named("a"), named("n o")])
        .with_response_partition_limit(2_000);
    let response = client.call(0, &request).await;
    let codes: Vec<i16> = response.topics.iter().map(|topic| topic.error_code).collect();
    assert_eq!(
        codes,
        [
            0,
            ResponseError::InvalidTopicException.code(),
            ResponseError::UnknownTopicOrPartition.code()
        ]
    );
    assert_eq!(response.topics[0].partitions[0].isr_nodes, [BrokerId(1)]);

    // A cursor that no response to this request contained.
    for (topics, cursor) in [(vec!["a"], ("b", 0)), (vec!["a", "b"], ("a", -1))] {
        let cursor = Cursor::default()
            .with_topic_name(TopicName(text(cursor.0)))
            .with_partition_index(cursor.1);
        let request = DescribeTopicPartitionsRequest::default()
            .with_topics(topics.iter().map(|name| named(name)).collect())
            .with_response_partition_limit(2_000)
            .with_cursor(Some(cursor));
        let response = client.call(0, &request).await;
        assert_eq!(response.topics.len(), topics.len());
        assert!(
            response
                .topics
                .iter()
                .all(|topic| topic.error_code == ResponseError::InvalidRequest.code()),
            "{response:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn log_dirs_show_the_size_of_partitions() {
    let server = TestServer::start().await;
    server.topic("t", 2, &[]).await;
    let mut client = server.client().await;
    let batch = plain(&[1, 2, 3]);
    assert_eq!(client.produce("t", 1, &batch).await, (0, 0));
    let request = Unchanged(DescribeLogDirsRequest::default().with_topics(None));
    for version in [4, 5] {
        let DescribedLogDirs(response) = client.call(version, &request).await;
        let results = response.results;
        let partitions = &results[0].topics[0].partitions;
        let sizes: Vec<i64> = partitions.iter().map(|partition| partition.partition_size).collect();
        assert_eq!(sizes, [0, batch.len() as i64]);
        let (total, usable) = (results[0].total_bytes, results[0].usable_bytes);
        assert_eq!((results.len(), total, usable), (1, -1, -1));
    }
}
