//! Damaged or missing objects: the errors for clients and operators.

use std::path::PathBuf;

use alluvium_stream::Reason;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::list_offsets_request::{ListOffsetsPartition, ListOffsetsTopic};
use kafka_protocol::messages::{ListOffsetsRequest, TopicName};

use super::harness::{TestServer, fetch, stored, text};
use crate::batch::tests::plain;

const CORRUPT_MESSAGE: i16 = ResponseError::CorruptMessage.code();
const UNKNOWN_SERVER_ERROR: i16 = ResponseError::UnknownServerError.code();
const KAFKA_STORAGE_ERROR: i16 = ResponseError::KafkaStorageError.code();

/// A batch in each partition of topic t, only in an object, and the object's file: it begins with
/// that of partition 0.
async fn two_partitions() -> (TestServer, PathBuf) {
    let mut server = TestServer::start().await;
    server.topic("t", 2, &[]).await;
    for partition in [0, 1] {
        server.client().await.produce("t", partition, &plain(&[1, 2, 3])).await;
    }
    let file = in_an_object(&mut server).await;
    (server, file)
}

/// A batch in partition 1 of topic t that is only in an object, and the object's file.
async fn one_object() -> (TestServer, PathBuf) {
    let mut server = TestServer::start().await;
    server.topic("t", 2, &[]).await;
    server.client().await.produce("t", 1, &plain(&[1, 2, 3])).await;
    let file = in_an_object(&mut server).await;
    (server, file)
}

/// Moves all records to an object and out of memory.
pub(super) async fn in_an_object(server: &mut TestServer) -> PathBuf {
    server.store().flush().await.unwrap();
    server.restart().await;
    let streams = server.objects().join("streams");
    let store = std::fs::read_dir(streams).unwrap().next().unwrap().unwrap().path();
    let files = std::fs::read_dir(store).unwrap().map(|file| file.unwrap().path());
    let mut files: Vec<_> = files.collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files.remove(0)
}

/// The codes of a fetch of the batch, and of a search by time.
async fn codes(server: &TestServer) -> (i16, i16) {
    let mut client = server.client().await;
    let fetched = client.call(12, &fetch("t", &[(1, 0)], 0)).await;
    let partition = ListOffsetsPartition::default().with_partition_index(1).with_timestamp(1);
    let topic = ListOffsetsTopic::default()
        .with_name(TopicName(text("t")))
        .with_partitions(vec![partition]);
    let found = client.call(7, &ListOffsetsRequest::default().with_topics(vec![topic])).await;
    (fetched.responses[0].partitions[0].error_code, found.topics[0].partitions[0].error_code)
}

fn degraded(server: &TestServer) -> Vec<(Reason, String)> {
    let found = server.store().degraded().into_iter();
    // The clean-up after the start may meet the damage as well, at any time.
    let found = found.filter(|found| found.reason != Reason::ObjectDeletionFailing);
    found.map(|found| (found.reason, found.detail)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_fails_a_read_and_is_reported_with_topic_and_partition() {
    let (server, file) = one_object().await;
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[40] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    for _ in 0..2 {
        assert_eq!(codes(&server).await, (CORRUPT_MESSAGE, UNKNOWN_SERVER_ERROR));
        let [(Reason::ObjectsDamaged, detail)] = &degraded(&server)[..] else {
            panic!("{:?}", degraded(&server));
        };
        assert!(detail.contains("damaged: 1"), "{detail}");
        assert!(detail.contains("offsets 0 to 2 of partition 1 of topic t"), "{detail}");
        let stats = server.store().stats();
        assert_eq!((stats.damaged_objects.count, stats.missing_objects.count), (1, 0));
    }
    // Deleting the topic clears the fault.
    let topic = crate::topics::TopicRef::Name("t".into());
    server.server().topics.delete(&topic).await.unwrap();
    assert_eq!(degraded(&server), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_object_fails_reads_until_it_is_back() {
    let (server, file) = one_object().await;
    let away = file.with_extension("away");
    std::fs::rename(&file, &away).unwrap();
    assert_eq!(codes(&server).await, (CORRUPT_MESSAGE, UNKNOWN_SERVER_ERROR));
    let [(Reason::ObjectsMissing, detail)] = &degraded(&server)[..] else {
        panic!("{:?}", degraded(&server));
    };
    assert!(detail.contains("offsets 0 to 2 of partition 1 of topic t"), "{detail}");
    assert_eq!(server.store().stats().missing_objects.count, 1);

    // All of them: another file system than that of the objects.
    let (catalogs, hidden) = (server.objects().join("catalogs"), server.objects().join("hidden"));
    std::fs::rename(&catalogs, &hidden).unwrap();
    assert_eq!(codes(&server).await, (KAFKA_STORAGE_ERROR, KAFKA_STORAGE_ERROR));
    let [_, (Reason::ColdReadsFailing, detail)] = &degraded(&server)[..] else {
        panic!("{:?}", degraded(&server));
    };
    assert!(detail.contains("this is the right object store"), "{detail}");

    std::fs::rename(&hidden, &catalogs).unwrap();
    std::fs::rename(&away, &file).unwrap();
    let response = server.client().await.call(12, &fetch("t", &[(1, 0)], 0)).await;
    let partition = &response.responses[0].partitions[0];
    assert_eq!(partition.records, Some(stored(&plain(&[1, 2, 3]), 0)));
    assert_eq!(degraded(&server), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_from_a_cache_do_not_hide_a_missing_object() {
    let (server, file) = two_partitions().await;
    let read = async |partition| {
        let response = server.client().await.call(12, &fetch("t", &[(partition, 0)], 0)).await;
        response.responses[0].partitions[0].error_code
    };
    assert_eq!(read(0).await, 0);
    let away = file.with_extension("away");
    std::fs::rename(&file, &away).unwrap();
    assert_eq!(codes(&server).await, (CORRUPT_MESSAGE, UNKNOWN_SERVER_ERROR));
    for _ in 0..2 {
        assert_eq!(read(0).await, 0);
        let [(Reason::ObjectsMissing, _)] = &degraded(&server)[..] else {
            panic!("{:?}", degraded(&server));
        };
    }
    std::fs::rename(&away, &file).unwrap();
    assert_eq!(read(1).await, 0);
    assert_eq!(degraded(&server), []);
}
