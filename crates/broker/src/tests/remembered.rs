//! The state of producers and of aborted transactions in partitions is bounded, and expires.

use std::time::Duration;

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::*;
use kafka_protocol::records::Compression;

use super::deleting::delete;
use super::harness::{TestServer, text};
use super::transactions::Producer;
use crate::batch::tests::encode;
use crate::partition::unix_time_ms;
use crate::producer_state::EXPIRATION;
use crate::retention;

const POLICY_VIOLATION: i16 = ResponseError::PolicyViolation.code();
const TRANSACTION_ABORTABLE: i16 = ResponseError::TransactionAbortable.code();

/// Transactions that a partition may track whatever others do.
const FREE: usize = 128;

#[tokio::test(flavor = "multi_thread")]
async fn transactions_over_the_bound_cannot_begin_and_existing_ones_can_end() {
    for (version_2, refused) in [(true, TRANSACTION_ABORTABLE), (false, POLICY_VIOLATION)] {
        let mut server = TestServer::start().await;
        let topic_id = server.topic("t", 2, &[]).await;
        let mut producer = Producer::init(&server, "a", version_2).await;
        for _ in 0..FREE - 1 {
            producer.add("t", &[0]).await;
            assert_eq!(producer.produce("t", topic_id, 0).await.0, 0);
            assert_eq!(producer.end(false).await, 0);
        }
        let mut open = Producer::init(&server, "open", version_2).await;
        open.add("t", &[0]).await;
        assert_eq!(open.produce("t", topic_id, 0).await.0, 0);

        // Then the bound is reached, whether the state comes from the log alone or from an upload.
        for uploaded in [false, false, true] {
            if uploaded {
                server.store().flush().await.unwrap();
                server.crash().await;
                producer.reconnect(&server).await;
                open.reconnect(&server).await;
            }
            let totals = server.server().topics.totals.clone();
            totals.fill();
            producer.add("t", &[0]).await;
            assert_eq!(producer.produce("t", topic_id, 0).await, (refused, -1));
            assert_eq!(totals.refused.get(), 1);
            // A producer that gets the error aborts, and can do so.
            assert_eq!(producer.end(false).await, 0);
            assert_eq!(open.produce("t", topic_id, 0).await.0, 0);
            server.crash().await;
            producer.reconnect(&server).await;
            open.reconnect(&server).await;
        }
        server.server().topics.totals.fill();
        assert_eq!(open.end(false).await, 0);
        let partitions = server.server().topics.by_name("t").unwrap().partitions.clone();
        assert_eq!(partitions[0].aborted_transactions(), FREE);
        producer.add("t", &[0]).await;
        assert_eq!(producer.produce("t", topic_id, 0).await, (refused, -1));
        assert_eq!(producer.end(false).await, 0);

        // Elsewhere transactions continue, and here once the records are deleted.
        let mut other = Producer::init(&server, "b", version_2).await;
        other.add("t", &[1]).await;
        assert_eq!(other.produce("t", topic_id, 1).await.0, 0);
        assert_eq!(other.end(true).await, 0);
        let deleted = delete(&mut server.client().await, "t", &[(0, -1)]).await;
        assert_eq!((deleted[0].1, partitions[0].aborted_transactions()), (0, 0));
        producer.add("t", &[0]).await;
        assert_eq!(producer.produce("t", topic_id, 0).await.0, 0);
        assert_eq!(producer.end(true).await, 0);
    }
}

/// The producers that DescribeProducers returns for partition 0.
async fn known(server: &TestServer) -> Vec<i64> {
    use describe_producers_request::TopicRequest;
    let topic =
        TopicRequest::default().with_name(TopicName(text("t"))).with_partition_indexes(vec![0]);
    let request = DescribeProducersRequest::default().with_topics(vec![topic]);
    let response = server.client().await.call(0, &request).await;
    let active = &response.topics[0].partitions[0].active_producers;
    active.iter().map(|producer| producer.producer_id.0).collect()
}

/// Advances the time, and runs the periodic check of partitions.
async fn pass(server: &TestServer, time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
    retention::run_once(server.server()).await;
}

#[tokio::test]
async fn producer_state_expires_in_an_idle_partition() {
    const QUIET: i64 = 1_000_000;
    let server = TestServer::start().await;
    let topic_id = server.topic("t", 1, &[]).await;
    let mut open = Producer::init(&server, "a", true).await;
    assert_eq!(open.produce("t", topic_id, 0).await.0, 0);
    // However old its records are.
    let batch = encode(Compression::None, (QUIET, 0, 0), &[5]);
    assert_eq!(server.client().await.produce("t", 0, &batch).await.0, 0);
    pass(&server, EXPIRATION - Duration::from_secs(3_600)).await;
    let before = known(&server).await;
    assert!(before.len() == 2 && before.contains(&QUIET), "{before:?}");
    assert_eq!(server.server().topics.totals.producers.get(), 2);
    pass(&server, Duration::from_secs(2 * 3_600)).await;
    let after = known(&server).await;
    assert!(after.len() == 1 && !after.contains(&QUIET), "what is open stays: {after:?}");
    assert_eq!(server.server().topics.totals.producers.get(), 1);
    // Any sequence of an expired producer is accepted.
    let batch = encode(Compression::None, (QUIET, 0, 77), &[5]);
    assert_eq!(server.client().await.produce("t", 0, &batch).await.0, 0);
}

/// Timestamps of records are set by the client: those of an import may be years apart, and a client
/// without a response retries all the same.
#[tokio::test]
async fn a_repeated_batch_is_recognised_after_a_crash_regardless_of_timestamps() {
    const IMPORT: i64 = 1_000_000;
    const PRESENT: i64 = 1_000_001;
    let mut server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let day_ms = EXPIRATION.as_millis() as i64;
    let mut batches: Vec<_> = (0..5)
        .map(|at| encode(Compression::None, (IMPORT, 0, at), &[2 * day_ms * i64::from(at)]))
        .collect();
    batches.push(encode(Compression::None, (PRESENT, 0, 0), &[unix_time_ms()]));
    for (at, batch) in batches.iter().enumerate() {
        assert_eq!(server.client().await.produce("t", 0, batch).await, (0, at as i64));
    }
    // From the log alone; then from the checkpoint of an upload that a current record has followed.
    for uploaded in [false, true] {
        if uploaded {
            server.store().flush().await.unwrap();
        }
        server.crash().await;
        for (at, batch) in batches.iter().enumerate() {
            assert_eq!(server.client().await.produce("t", 0, batch).await, (0, at as i64));
        }
    }
    let after = encode(Compression::None, (IMPORT, 0, 5), &[5]);
    assert_eq!(server.client().await.produce("t", 0, &after).await, (0, 6));
}
