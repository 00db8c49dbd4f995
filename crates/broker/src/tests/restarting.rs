//! State that survives a restart.

use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::{
    CreatePartitionsRequest, DeleteTopicsRequest, GroupId, InitProducerIdRequest, MetadataRequest,
    OffsetCommitRequest, OffsetFetchRequest, TopicName,
};
use kafka_protocol::protocol::Request as _;
use kafka_protocol::records::Compression;

use super::examples::{self, World};
use super::harness::{TestServer, stored, text};
use crate::batch::tests::encode;
use crate::topics::TopicRef;

fn of_producer(id: i64, sequence: i32) -> Bytes {
    encode(Compression::Zstd, (id, 0, sequence), &[5])
}

/// The three ways in which a server can have stopped: closed, killed, and killed after an upload
/// has moved the checkpoint.
#[derive(Clone, Copy, Debug)]
enum Stop {
    Closed,
    Killed,
    KilledAfterUpload,
}

async fn stop_and_start(server: &mut TestServer, how: Stop) {
    match how {
        Stop::Closed => server.restart().await,
        Stop::Killed => server.crash().await,
        Stop::KilledAfterUpload => {
            server.store().flush().await.unwrap();
            server.crash().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_and_producers_survive() {
    for how in [Stop::Closed, Stop::Killed, Stop::KilledAfterUpload] {
        let mut server = TestServer::start().await;
        server.topic("t", 1, &[]).await;
        let mut expected = Vec::new();
        for round in 0..3 {
            let mut client = server.client().await;
            if round > 0 {
                for i in 0..3 {
                    let sequence = (round - 1) * 3 + i;
                    let repeated = client.produce("t", 0, &of_producer(1, sequence)).await;
                    assert_eq!(
                        repeated,
                        (0, sequence.into()),
                        "{how:?}: a batch repeated from before the restart"
                    );
                }
                assert_eq!(
                    client.produce("t", 0, &of_producer(1, round * 3 + 1)).await.0,
                    ResponseError::OutOfOrderSequenceNumber.code(),
                    "{how:?}: a gap"
                );
            }
            for i in 0..3 {
                let sequence = round * 3 + i;
                let batch = of_producer(1, sequence);
                assert_eq!(client.produce("t", 0, &batch).await, (0, sequence.into()), "{how:?}");
                expected.extend_from_slice(&stored(&batch, sequence as u64));
            }
            stop_and_start(&mut server, how).await;
            let (error, high_watermark, records) = server.client().await.fetch("t", 0, 0).await;
            assert_eq!((error, high_watermark), (0, i64::from(round + 1) * 3), "{how:?}");
            assert_eq!(records, expected, "{how:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn topics_ids_settings_and_the_cluster_survive() {
    let mut server = TestServer::start().await;
    let kept = server.topic("kept", 2, &[("max.message.bytes", "300")]).await;
    server.topic("deleted", 2, &[]).await;
    let mut client = server.client().await;
    let delete = DeleteTopicsRequest::default().with_topic_names(vec![TopicName(text("deleted"))]);
    assert_eq!(client.call(5, &delete).await.responses[0].error_code, 0);
    let grow = {
        use kafka_protocol::messages::create_partitions_request::CreatePartitionsTopic;
        let topic = CreatePartitionsTopic::default()
            .with_name(TopicName(text("kept")))
            .with_count(5)
            .with_assignments(None);
        CreatePartitionsRequest::default().with_topics(vec![topic])
    };
    assert_eq!(client.call(3, &grow).await.results[0].error_code, 0);
    assert_eq!(
        client.call(3, &grow).await.results[0].error_code,
        ResponseError::InvalidPartitions.code(),
        "5 is not an increase"
    );
    let small = encode(Compression::None, (-1, -1, -1), &[1]);
    assert_eq!(client.produce("kept", 4, &small).await, (0, 0));
    let all = MetadataRequest::default().with_topics(None);
    let before = client.call(12, &all).await;

    for how in [Stop::Killed, Stop::Closed] {
        stop_and_start(&mut server, how).await;
        let mut client = server.client().await;
        let after = client.call(12, &all).await;
        assert_eq!(after.cluster_id, before.cluster_id);
        assert_eq!(after.topics, before.topics);
        assert_eq!(after.topics.len(), 1);
        assert_eq!((after.topics[0].topic_id, after.topics[0].partitions.len()), (kept, 5));
        assert_eq!(client.fetch("kept", 4, 0).await, (0, 1, stored(&small, 0)));
        let large = encode(Compression::None, (-1, -1, -1), &[1; 20]);
        assert_eq!(
            client.produce("kept", 0, &large).await.0,
            ResponseError::MessageTooLarge.code(),
            "its limit"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn producer_ids_are_never_issued_twice() {
    let mut server = TestServer::start().await;
    let mut seen = std::collections::HashSet::new();
    for how in [Stop::Killed, Stop::Closed, Stop::KilledAfterUpload] {
        for _ in 0..5 {
            let request = InitProducerIdRequest::default().with_transactional_id(None);
            let response = server.client().await.call(4, &request).await;
            assert_eq!((response.error_code, response.producer_epoch), (0, 0));
            assert!(seen.insert(response.producer_id), "{:?} twice", response.producer_id);
        }
        stop_and_start(&mut server, how).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn committed_offsets_survive() {
    let mut server = TestServer::start().await;
    server.topic("topic", 1, &[]).await;
    let world = World::imaginary();
    let commit = examples::request(OffsetCommitRequest::KEY.try_into().unwrap(), 9, 1, &world);
    let fetch = examples::request(OffsetFetchRequest::KEY.try_into().unwrap(), 9, 2, &world);
    let mut client = server.client().await;
    client.send_frame(&commit).await;
    client.receive_frame().await.unwrap();
    for how in [Stop::Killed, Stop::KilledAfterUpload, Stop::Closed] {
        stop_and_start(&mut server, how).await;
        let mut client = server.client().await;
        client.send_frame(&fetch).await;
        let response = client.receive_frame().await.unwrap();
        let response =
            examples::decode_response(OffsetFetchRequest::KEY.try_into().unwrap(), 9, 2, response);
        assert!(response.contains("committed_offset: 1,"), "{how:?}: {response}");
    }
}

/// A topic and its offsets are deleted one after the other, and the server may stop in between.
#[tokio::test(flavor = "multi_thread")]
async fn offsets_of_a_deleted_topic_do_not_pass_to_the_next_one_of_its_name() {
    use kafka_protocol::messages::offset_commit_request::*;
    use kafka_protocol::messages::offset_fetch_request::OffsetFetchRequestTopic;
    let name = || TopicName(text("t"));
    let group = || GroupId(text("g"));
    let partition = OffsetCommitRequestPartition::default().with_committed_offset(7);
    let topic =
        OffsetCommitRequestTopic::default().with_name(name()).with_partitions(vec![partition]);
    let commit = OffsetCommitRequest::default().with_group_id(group()).with_topics(vec![topic]);
    let topic =
        OffsetFetchRequestTopic::default().with_name(name()).with_partition_indexes(vec![0]);
    let fetch = OffsetFetchRequest::default().with_group_id(group()).with_topics(Some(vec![topic]));
    let offset = async |server: &TestServer| {
        let response = server.client().await.call(7, &fetch).await;
        response.topics[0].partitions[0].committed_offset
    };
    for how in [None, Some(Stop::Killed), Some(Stop::KilledAfterUpload)] {
        let mut server = TestServer::start().await;
        server.topic("t", 1, &[]).await;
        server.topic("other", 1, &[]).await;
        let committed = server.client().await.call(8, &commit).await;
        assert_eq!(committed.topics[0].partitions[0].error_code, 0);
        assert_eq!(offset(&server).await, 7);
        server.server().topics.delete(&TopicRef::Name("t".into())).await.unwrap();
        if let Some(how) = how {
            stop_and_start(&mut server, how).await;
            assert_eq!(offset(&server).await, -1, "{how:?}");
        }
        server.topic("t", 1, &[]).await;
        assert_eq!(offset(&server).await, -1, "{how:?}");
        stop_and_start(&mut server, Stop::Killed).await;
        assert_eq!(offset(&server).await, -1, "{how:?}: durably");
    }
}
