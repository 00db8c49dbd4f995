//! Refused additions to transactions, and invalid producers.

use super::*;

/// A batch that is ahead of the first one of its transaction in a partition is not appended before
/// it: the first one would be out of order forever.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_begins_in_a_partition_with_its_first_batch() {
    let server = TestServer::start().await;
    let topic_id = server.topic("t", 1, &[]).await;
    let mut producer = Producer::init(&server, "a", true).await;
    for base in [0, 5] {
        producer.sequences.insert(("t".into(), 0), 2);
        assert_eq!(
            producer.produce("t", topic_id, 0).await,
            (ResponseError::OutOfOrderSequenceNumber.code(), -1)
        );
        producer.sequences.clear();
        assert_eq!(producer.produce("t", topic_id, 0).await, (0, base));
        assert_eq!(producer.produce("t", topic_id, 0).await, (0, base + 2));
        assert_eq!(producer.end(true).await, 0);
    }
    // With version 1 the epoch stays, and a producer whose state has expired meanwhile continues
    // with its sequence.
    let mut older = Producer::init(&server, "b", false).await;
    assert_eq!(older.add("t", &[0]).await, 0);
    older.sequences.insert(("t".into(), 0), 2);
    assert_eq!(older.produce("t", topic_id, 0).await, (0, 10));
}

/// Depends on the version, as in Kafka.
#[tokio::test(flavor = "multi_thread")]
async fn offsets_of_a_group_that_was_not_added_are_refused_or_add_it() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut producer = Producer::init(&server, "a", true).await;
    let request = producer.offsets_request("g", "t", &[0], 1);
    for (version, code) in [(3, INVALID_TXN_STATE), (4, TRANSACTION_ABORTABLE), (5, 0), (4, 0)] {
        assert_eq!(producer.commit_offsets_by(version, &request).await, code, "{version}");
    }
}

/// Clients do not write to the topics that represent Kafka's internal ones, and neither do markers.
#[tokio::test(flavor = "multi_thread")]
async fn transactions_cannot_write_to_internal_topics() {
    let server = TestServer::start().await;
    server.topic("__consumer_offsets", 1, &[]).await;
    let mut producer = Producer::init(&server, "a", false).await;
    assert_eq!(
        producer.add("__consumer_offsets", &[0]).await,
        ResponseError::TopicAuthorizationFailed.code()
    );
    let topic = server.server().topics.by_name("__consumer_offsets").unwrap();
    assert_eq!(topic.partitions[0].stream.next_offset().0, 0);
}

/// With a transactional id or without one.
#[tokio::test(flavor = "multi_thread")]
async fn producer_id_and_epoch_must_be_sent_together() {
    let server = TestServer::start().await;
    let mut client = server.client().await;
    for id in [None, Some("a")] {
        for (producer_id, epoch, code) in [
            (5, -1, ResponseError::InvalidRequest.code()),
            (-1, 5, ResponseError::InvalidRequest.code()),
            (-1, -1, 0),
        ] {
            let request = InitProducerIdRequest::default()
                .with_transactional_id(id.map(|id| TransactionalId(text(id))))
                .with_transaction_timeout_ms(1_000)
                .with_producer_id(ProducerId(producer_id))
                .with_producer_epoch(epoch);
            let what = format!("{id:?}, {producer_id}, {epoch}");
            assert_eq!(client.call(4, &request).await.error_code, code, "{what}");
        }
    }
}

/// Between its first InitProducerId and the record of that an id has no producer, and no other may
/// act as one.
#[tokio::test(flavor = "multi_thread")]
async fn an_id_without_producer_refuses_every_producer() {
    let server = TestServer::simulated(16 << 20).await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    // Reserves a block of producer ids, which takes a record of the log.
    init(&mut client, "other", 60_000).await.unwrap();
    server.hold_disk(true);
    server.fill_log("t");
    // There is space for a hundred bytes.
    let long: &'static str = Box::leak("a".repeat(500).into_boxed_str());
    assert_eq!(init(&mut client, long, 60_000).await, Err(COORDINATOR_NOT_AVAILABLE));
    let mut absent = Producer {
        client: server.client().await,
        transactional_id: long,
        id: -1,
        epoch: -1,
        sequences: HashMap::new(),
        version_2: true,
    };
    assert_eq!(absent.end(false).await, INVALID_PRODUCER_ID_MAPPING);
    assert_eq!(absent.add("t", &[0]).await, INVALID_PRODUCER_ID_MAPPING);
    assert_eq!(absent.add_offsets("g").await, INVALID_PRODUCER_ID_MAPPING);
    server.hold_disk(false);
    let (id, epoch) = loop {
        match init(&mut client, long, 60_000).await {
            Ok(producer) => break producer,
            Err(code) => assert!(
                [ResponseError::CoordinatorLoadInProgress.code(), COORDINATOR_NOT_AVAILABLE]
                    .contains(&code),
                "{code}"
            ),
        }
    };
    assert!(id >= 0 && epoch == 0, "{id} {epoch}");
}
