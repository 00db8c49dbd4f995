//! Changes of topics while the log is full, because objects cannot be written.

use std::time::Duration;

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::create_topics_request::CreatableTopic;
use kafka_protocol::messages::create_topics_response::CreatableTopicResult;
use kafka_protocol::messages::{CreateTopicsRequest, DeleteTopicsRequest, TopicName};

use super::deleting::delete;
use super::harness::{HANG, TestServer, produce, text};
use crate::batch::tests::plain;
use crate::topics::MAX_NAME_BYTES;

const REQUEST_TIMED_OUT: i16 = ResponseError::RequestTimedOut.code();

async fn create(server: &TestServer, name: &str, partitions: i32) -> CreatableTopicResult {
    let topic = CreatableTopic::default()
        .with_name(TopicName(text(name)))
        .with_num_partitions(partitions)
        .with_replication_factor(1);
    let request = CreateTopicsRequest::default().with_topics(vec![topic]);
    server.client().await.call(7, &request).await.topics.remove(0)
}

fn log_start(server: &TestServer, topic: &str) -> i64 {
    server.server().topics.by_name(topic).unwrap().partitions[0].log_start()
}

/// Fills the log with batches of topic `filler`, while objects cannot be written.
async fn fill(server: &TestServer) {
    let large = produce("filler", 0, &plain(&[1; 10_000]), -1).with_timeout_ms(50);
    let mut client = server.client().await;
    while client.call(9, &large).await.responses[0].partition_responses[0].error_code == 0 {}
    let mut used_bytes = 0;
    while server.store().stats().wal.used_bytes > used_bytes {
        used_bytes = server.store().stats().wal.used_bytes;
        server.fill_log("filler");
        let wait = async {
            let written = || {
                let wal = server.store().stats().wal;
                wal.durable == wal.appended
            };
            while !written() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(HANG, wait).await.expect("the log is not written");
    }
}

/// A part of the log is kept for changes of topics. Deletions of records do not use it. What does
/// not fit is refused as an append is, until an upload has freed space.
#[tokio::test(flavor = "multi_thread")]
async fn topics_are_created_and_deleted_while_the_log_is_full() {
    let mut server = TestServer::simulated(16 << 20).await;
    for topic in ["old", "gone", "filler"] {
        server.topic(topic, 1, &[("retention.ms", "3600000")]).await;
    }
    let mut client = server.client().await;
    assert_eq!(client.produce("old", 0, &plain(&[1])).await, (0, 0));
    server.store().flush().await.unwrap();
    server.fail_objects(true);
    fill(&server).await;

    server.topic("new", 1, &[]).await;
    let name = vec![TopicName(text("gone"))];
    let deleted = client.call(5, &DeleteTopicsRequest::default().with_topic_names(name)).await;
    assert_eq!(deleted.responses[0].error_code, 0);
    crate::retention::run_once(server.server()).await;
    assert_eq!(log_start(&server, "old"), 0);
    assert_eq!(delete(&mut client, "old", &[(0, 1)]).await, [(0, REQUEST_TIMED_OUT, -1)]);

    let (name, mut last) = (|n: usize| format!("{n:0>MAX_NAME_BYTES$}"), 0);
    let refused = loop {
        let created = create(&server, &name(last), 1_000).await;
        if created.error_code != 0 {
            break created;
        }
        last += 1;
    };
    assert_eq!(refused.error_code, REQUEST_TIMED_OUT, "{refused:?}");
    assert!(refused.error_message.unwrap().contains("the log has no free space now"));
    assert!(last > 0 && server.server().topics.by_name(&name(last)).is_err());

    server.fail_objects(false);
    let trimmed = async {
        while log_start(&server, "old") == 0 {
            crate::retention::run_once(server.server()).await;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(HANG, trimmed).await.expect("retention does not continue");
    assert_eq!(create(&server, &name(last), 1_000).await.error_code, 0);
    server.kill(true).await;
    for (topic, exists) in [("old", true), ("new", true), (&name(last), true), ("gone", false)] {
        assert_eq!(server.server().topics.by_name(topic).is_ok(), exists, "{topic}");
    }
    assert_eq!(log_start(&server, "old"), 1);
}

/// A retry would fail in the same way.
#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_does_not_fit_into_a_record_of_the_log_is_refused() {
    let server = TestServer::simulated(16 << 20).await;
    let name = "x".repeat(MAX_NAME_BYTES);
    let refused = create(&server, &name, 10_000).await;
    assert_eq!(refused.error_code, ResponseError::PolicyViolation.code(), "{refused:?}");
    let reason = refused.error_message.unwrap();
    assert!(reason.contains("more than a record of the log"), "{reason}");
    assert_eq!(create(&server, &name, 1_000).await.error_code, 0);
}
