//! Cold fetches, from an object store that hangs.

use bytes::Bytes;
use kafka_protocol::ResponseError;
use kafka_protocol::messages::list_offsets_request::{ListOffsetsPartition, ListOffsetsTopic};
use kafka_protocol::messages::{
    FetchRequest, FetchResponse, ListOffsetsRequest, ListOffsetsResponse, TopicName,
};

use super::harness::{Client, HANG, TestServer, fetch, stored, text};
use crate::batch::tests::plain;

/// Longer than a test may take.
const FOR_EVER_MS: i32 = 600_000;

/// Error code and records of each partition.
fn records(response: &FetchResponse) -> Vec<(i16, Bytes)> {
    let partitions = response.responses.iter().flat_map(|topic| &topic.partitions);
    partitions.map(|partition| (partition.error_code, partition.records.clone().unwrap())).collect()
}

/// A server with a batch in partition 0 that is only in an object, and one in partition 1 that is
/// only in memory.
async fn cold_and_recent() -> (TestServer, Bytes, Bytes) {
    // Budgets for one response each.
    let mut server = TestServer::simulated_with(16 << 20, |config| {
        config.max_message_bytes = 1 << 20;
        config.max_fetch_bytes = 1 << 20;
        config.queued_fetch_bytes = 2 << 20;
    })
    .await;
    server.topic("t", 2, &[]).await;
    let (cold, recent) = (plain(&[1, 2, 3]), plain(&[7]));
    server.client().await.produce("t", 0, &cold).await;
    server.store().flush().await.unwrap();
    server.restart().await;
    server.client().await.produce("t", 1, &recent).await;
    (server, stored(&cold, 0), stored(&recent, 0))
}

async fn waiting(server: &TestServer, count: u64) {
    let waits = async {
        while server.store().stats().reads.waiting != count {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(HANG, waits).await.expect("this number of reads never waits");
}

#[tokio::test(flavor = "multi_thread")]
async fn tail_reads_do_not_wait_for_cold_reads() {
    let (server, cold, recent) = cold_and_recent().await;
    let held = server.hold_objects().await;
    let mut readers: Vec<(Client, i32)> = Vec::new();
    for _ in 0..20 {
        let mut client = server.client().await;
        let id = client.send(12, &fetch("t", &[(0, 0)], FOR_EVER_MS)).await;
        readers.push((client, id));
    }
    server.begun("Fetch", 12, 20).await;
    waiting(&server, 1).await;
    for _ in 0..3 {
        let response = server.client().await.call(12, &fetch("t", &[(1, 0)], FOR_EVER_MS)).await;
        assert_eq!(records(&response), [(0, recent.clone())]);
    }
    drop(held);
    for (mut client, id) in readers {
        let response = client.receive::<FetchRequest>(12, id).await;
        assert_eq!(records(&response), [(0, cold.clone())]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_returns_available_records_when_it_has_enough_or_its_time_is_over() {
    let (server, cold, recent) = cold_and_recent().await;
    let mut client = server.client().await;
    let held = server.hold_objects().await;
    let both = fetch("t", &[(0, 0), (1, 0)], FOR_EVER_MS);
    let nothing = (0, Bytes::new());
    let response = client.call(12, &both).await;
    assert_eq!(
        records(&response),
        [nothing.clone(), (0, recent.clone())],
        "enough without objects"
    );
    // A single batch may be larger than requested. It is not kept back for one that is not there.
    let mut one = both.clone();
    one.topics[0].partitions.iter_mut().for_each(|partition| partition.partition_max_bytes = 1);
    let response = client.call(12, &one).await;
    assert_eq!(records(&response), [nothing.clone(), (0, recent)]);
    let response = client.call(12, &fetch("t", &[(0, 0)], 20)).await;
    assert_eq!(
        records(&response)[..],
        std::slice::from_ref(&nothing)[..],
        "no error: the time is over"
    );

    // A record that arrives while the fetch waits for an object ends the wait.
    let id = client.send(12, &fetch("t", &[(0, 0), (1, 1)], FOR_EVER_MS)).await;
    waiting(&server, 1).await;
    server.client().await.produce("t", 1, &plain(&[8])).await;
    let response = client.receive::<FetchRequest>(12, id).await;
    assert_eq!(records(&response), [nothing, (0, stored(&plain(&[8]), 1))]);

    drop(held);
    let response = client.call(12, &fetch("t", &[(0, 0)], FOR_EVER_MS)).await;
    assert_eq!(records(&response), [(0, cold)]);
    let gets = server.store().stats().reads.gets;
    assert_eq!(gets, 2, "an index and a block: what was not waited for was not fetched again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_search_by_time_times_out_without_delaying_other_partitions() {
    let (server, _, _) = cold_and_recent().await;
    let mut client = server.client().await;
    let by_time = |timestamp: i64, timeout_ms: i32| {
        let partition = |index| {
            ListOffsetsPartition::default().with_partition_index(index).with_timestamp(timestamp)
        };
        let topic = ListOffsetsTopic::default()
            .with_name(TopicName(text("t")))
            .with_partitions(vec![partition(0), partition(1)]);
        ListOffsetsRequest::default().with_topics(vec![topic]).with_timeout_ms(timeout_ms)
    };
    let answers = |response: &ListOffsetsResponse| {
        let partitions = response.topics[0].partitions.iter();
        partitions.map(|it| (it.error_code, it.offset)).collect::<Vec<_>>()
    };
    let held = server.hold_objects().await;
    let timed_out = (ResponseError::RequestTimedOut.code(), -1);
    // The first record from a time on, and the one with the maximum timestamp (-3).
    for timestamp in [2, -3] {
        let response = client.call(10, &by_time(timestamp, 20)).await;
        assert_eq!(answers(&response), [timed_out, (0, 0)], "{timestamp}");
        waiting(&server, 0).await;
    }
    drop(held);
    for (timestamp, offset) in [(2, 1), (-3, 2)] {
        let response = client.call(10, &by_time(timestamp, FOR_EVER_MS)).await;
        assert_eq!(answers(&response), [(0, offset), (0, 0)], "{timestamp}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cold_reads_are_cancelled_when_the_client_disconnects() {
    let (server, _, _) = cold_and_recent().await;
    let _held = server.hold_objects().await;
    let mut client = server.client().await;
    client.send(12, &fetch("t", &[(0, 0)], FOR_EVER_MS)).await;
    waiting(&server, 1).await;
    drop(client);
    let metrics = async {
        loop {
            let mut metrics = String::new();
            prometheus_client::encoding::text::encode(&mut metrics, &server.registry).unwrap();
            if metrics.contains("alluvium_kafka_connections 0\n") {
                return metrics;
            }
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    let metrics = tokio::time::timeout(HANG, metrics).await.expect("the connection does not end");
    assert!(
        !metrics.contains("alluvium_kafka_errors_total{"),
        "it waited to the GET's end: {metrics}"
    );
    waiting(&server, 0).await;
    server.assert_alive().await;
}
