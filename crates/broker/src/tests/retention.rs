//! Old records are deleted, and only those.

use std::time::Duration;

use alluvium_stream::StreamEpoch;

use kafka_protocol::error::ResponseError;
use kafka_protocol::records::Compression;

use super::harness::{HANG, TestServer};
use crate::batch;
use crate::batch::tests::{encode, plain};
use crate::partition::unix_time_ms;

/// Produces batches to partition 0, with an upload after each.
async fn produce(server: &TestServer, topic: &str, times_ms: &[i64]) {
    let mut client = server.client().await;
    for (number, time_ms) in times_ms.iter().enumerate() {
        assert_eq!(client.produce(topic, 0, &plain(&[*time_ms])).await, (0, number as i64));
        server.server().store.flush().await.unwrap();
    }
}

fn log_start(server: &TestServer, topic: &str) -> i64 {
    server.server().topics.by_name(topic).unwrap().partitions[0].log_start()
}

async fn starts_at(server: &TestServer, topic: &str, offset: i64) {
    let wait = async {
        while log_start(server, topic) != offset {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let found = tokio::time::timeout(HANG, wait).await;
    found.unwrap_or_else(|_| panic!("{topic} starts at {}", log_start(server, topic)));
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_deleted_by_age_and_by_size() {
    let mut server = TestServer::with(16 << 20, |config| {
        config.retention_check_interval = Duration::from_millis(1);
    })
    .await;
    let now = unix_time_ms();
    let times = [now - 90_000_000, now - 80_000_000, now, now - 90_000_000, now];
    let len = plain(&[now]).len();
    let two = (2 * len).to_string();
    for (topic, configs) in [
        ("kept", vec![]),
        ("kept-too", vec![("retention.ms", "-1"), ("retention.bytes", "-1")]),
        ("compacted", vec![("retention.ms", "3600000"), ("cleanup.policy", "compact")]),
        ("by-age", vec![("retention.ms", "3600000")]),
        ("by-size", vec![("retention.bytes", two.as_str())]),
        ("by-both", vec![("retention.ms", "3600000"), ("retention.bytes", two.as_str())]),
        ("by-less", vec![("retention.ms", "85000000")]),
    ] {
        server.topic(topic, 1, &configs).await;
        produce(&server, topic, &times).await;
    }
    // An old record after a recent one stays as long as that does; by size the recent one is
    // deleted, and then the old one.
    for (topic, start) in [("by-age", 2), ("by-size", 3), ("by-both", 4), ("by-less", 1)] {
        starts_at(&server, topic, start).await;
        let mut client = server.client().await;
        let (code, _, records) = client.fetch(topic, 0, start).await;
        assert!(code == 0 && !records.is_empty(), "{topic}: {code}");
        let (code, _, _) = client.fetch(topic, 0, start - 1).await;
        assert_eq!(code, ResponseError::OffsetOutOfRange.code(), "{topic}: out of range");
    }
    server.restart().await;
    for (topic, start) in [("kept", 0), ("kept-too", 0), ("compacted", 0), ("by-age", 2)] {
        assert_eq!(log_start(&server, topic), start, "{topic}");
    }
}

/// According to the header of a compressed batch all of its records are old, but one of them is
/// not.
#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_header_does_not_delete_a_recent_record() {
    let server = TestServer::with(16 << 20, |config| {
        config.retention_check_interval = Duration::from_millis(1);
    })
    .await;
    server.topic("t", 1, &[("retention.ms", "3600000")]).await;
    let now = unix_time_ms();
    let old = now - 90_000_000;
    let mut wrong = encode(Compression::Lz4, (-1, -1, -1), &[old, now, old]).to_vec();
    batch::set_max_timestamp(&mut wrong, old);
    let mut client = server.client().await;
    for (batch, base) in [(plain(&[old]), 0), (wrong.into(), 1), (plain(&[now]), 4)] {
        assert_eq!(client.produce("t", 0, &batch).await, (0, base));
        server.server().store.flush().await.unwrap();
    }
    starts_at(&server, "t", 1).await;
    crate::retention::run_once(server.server()).await;
    assert_eq!(log_start(&server, "t"), 1);
}

/// Records that are only in the log are not deleted, however old they are.
#[tokio::test(flavor = "multi_thread")]
async fn records_that_are_not_uploaded_stay() {
    let server = TestServer::with(16 << 20, |config| {
        config.retention_check_interval = Duration::from_millis(1);
    })
    .await;
    server.topic("t", 2, &[("retention.ms", "0")]).await;
    produce(&server, "t", &[1, 1]).await;
    let mut client = server.client().await;
    assert_eq!(client.produce("t", 0, &plain(&[1])).await, (0, 2));
    starts_at(&server, "t", 2).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(log_start(&server, "t"), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_of_another_leader_do_not_block_retention_of_others() {
    let server = TestServer::with(16 << 20, |config| {
        config.retention_check_interval = Duration::from_millis(1);
    })
    .await;
    server.topic("t", 2, &[("retention.ms", "3600000")]).await;
    let partitions = &server.server().topics.by_name("t").unwrap().partitions;
    let old = plain(&[unix_time_ms() - 90_000_000]);
    let mut client = server.client().await;
    for partition in [0, 1] {
        assert_eq!(client.produce("t", partition, &old).await, (0, 0));
    }
    // Before there is an object with which it could be deleted.
    let epoch = StreamEpoch(1);
    let _other = server.store().open_stream(partitions[0].stream.id(), epoch).await.unwrap();
    server.server().store.flush().await.unwrap();
    let wait = async {
        while partitions[1].log_start() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(HANG, wait).await.expect("it is old, and is not trimmed");
    assert_eq!(partitions[0].log_start(), 0);
}
