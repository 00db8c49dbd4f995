//! Large requests, which are handled off the threads that serve connections.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use bytes::Bytes;
use kafka_protocol::messages::list_offsets_request::{ListOffsetsPartition, ListOffsetsTopic};
use kafka_protocol::messages::produce_request::PartitionProduceData;
use kafka_protocol::messages::{ApiVersionsRequest, ListOffsetsRequest, ProduceRequest, TopicName};
use tokio::time::timeout;

use super::harness::{HANG, TestServer, produce, text};
use crate::batch::tests::plain;
use crate::large_requests::{LargeRequests, MAX_SERVED_BYTES, MAX_SERVED_ELEMENTS};

/// A request with this many array elements: one topic, and partitions of it that do not exist.
fn list_offsets(elements: usize) -> ListOffsetsRequest {
    let partitions = vec![ListOffsetsPartition::default().with_partition_index(9); elements - 1];
    let topic = ListOffsetsTopic::default().with_name(TopicName(text("t")));
    ListOffsetsRequest::default().with_topics(vec![topic.with_partitions(partitions)])
}

/// Keeps all threads for large requests busy until the result is dropped.
async fn occupy(server: &TestServer) -> Vec<mpsc::Sender<()>> {
    let mut held = Vec::new();
    for _ in 0..LargeRequests::threads() {
        let (release, released) = mpsc::channel::<()>();
        let (started, has_started) = tokio::sync::oneshot::channel();
        let server = server.server().clone();
        tokio::spawn(async move {
            let busy = async move {
                started.send(()).unwrap();
                let _ = released.recv();
            };
            server.large_requests.run(busy).await;
        });
        has_started.await.unwrap();
        held.push(release);
    }
    held
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_with_many_elements_run_off_the_serving_threads() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let occupied = occupy(&server).await;

    let mut large = server.client().await;
    let id = large.send(7, &list_offsets(MAX_SERVED_ELEMENTS + 1)).await;
    server.begun("ListOffsets", 7, 1).await;
    let mut small = server.client().await;
    let answer = small.call(7, &list_offsets(MAX_SERVED_ELEMENTS)).await;
    assert_eq!(answer.topics[0].partitions.len(), MAX_SERVED_ELEMENTS - 1);
    let early = timeout(Duration::from_millis(100), large.socket.peek(&mut [0])).await;
    assert!(early.is_err(), "a large request ran on a serving thread");

    drop(occupied);
    let answer = large.receive::<ListOffsetsRequest>(7, id).await;
    assert_eq!(answer.topics[0].partitions.len(), MAX_SERVED_ELEMENTS);
    server.assert_alive().await;
}

/// The number of elements of a request is not known before it is walked.
#[tokio::test(flavor = "multi_thread")]
async fn requests_of_many_bytes_are_checked_off_the_serving_threads() {
    let server = TestServer::start().await;
    let occupied = occupy(&server).await;
    let request = |bytes: usize| {
        let unknown = [(99, Bytes::from(vec![0; bytes]))];
        ApiVersionsRequest::default()
            .with_client_software_name(text("test"))
            .with_client_software_version(text("1"))
            .with_unknown_tagged_fields(unknown.into())
    };

    let mut large = server.client().await;
    let id = large.send(3, &request(MAX_SERVED_BYTES)).await;
    server.begun("ApiVersions", 3, 1).await;
    let mut small = server.client().await;
    assert_eq!(small.call(3, &request(MAX_SERVED_BYTES - 1_000)).await.error_code, 0);
    let early = timeout(Duration::from_millis(100), large.socket.peek(&mut [0])).await;
    assert!(early.is_err(), "a large request was checked on a serving thread");

    drop(occupied);
    assert_eq!(large.receive::<ApiVersionsRequest>(3, id).await.error_code, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn deferred_responses_with_many_elements_are_encoded_off_the_serving_threads() {
    let server = TestServer::simulated(16 << 20).await;
    server.topic("t", 1, &[]).await;
    server.hold_disk(true);
    let mut request = produce("t", 0, &plain(&[1]), -1);
    let unknown = PartitionProduceData::default().with_index(9).with_records(None);
    request.topic_data[0].partition_data.resize(MAX_SERVED_ELEMENTS, unknown);
    let mut client = server.client().await;
    let large = client.send(9, &request).await;
    let next = client.send(0, &ApiVersionsRequest::default()).await;
    // The next request begins when the large one has been handled, except for its response.
    server.begun("ApiVersions", 0, 1).await;
    let occupied = occupy(&server).await;
    server.hold_disk(false);
    let early = timeout(Duration::from_millis(100), client.socket.peek(&mut [0])).await;
    assert!(early.is_err(), "a large response was encoded on a serving thread");

    drop(occupied);
    let answer = client.receive::<ProduceRequest>(9, large).await;
    let partitions = &answer.responses[0].partition_responses;
    assert_eq!(partitions.len(), MAX_SERVED_ELEMENTS);
    assert_eq!(partitions[0].error_code, 0);
    client.receive::<ApiVersionsRequest>(0, next).await;
}

/// Otherwise clients that connect and disconnect could queue work without limit.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_large_request_does_not_run_later() {
    let server = TestServer::start().await;
    let occupied = occupy(&server).await;
    let has_run = Arc::new(AtomicBool::new(false));
    let flag = has_run.clone();
    let mut waiting =
        Box::pin(server.server().large_requests.run(async move { flag.store(true, Relaxed) }));
    assert!(futures::poll!(&mut waiting).is_pending());
    drop(waiting);

    drop(occupied);
    let dropped = async {
        while Arc::strong_count(&has_run) > 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(HANG, dropped).await.expect("the task ends");
    assert!(!has_run.load(Relaxed));
}
