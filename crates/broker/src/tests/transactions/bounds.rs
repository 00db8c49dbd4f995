//! Bounds of transactions: ids, memory, offsets and times.

use super::*;

/// More than one record can hold: 256 KiB in a log of 4 MiB.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_commits_more_offsets_than_a_record_can_hold() {
    use txn_offset_commit_request::*;
    let mut server = TestServer::with(4 << 20, |_| {}).await;
    server.topic("t", 100, &[]).await;
    let mut producer = Producer::init(&server, "a", true).await;
    let metadata = "m".repeat(4_000);
    for ten in 0..10 {
        let partition = |index| {
            TxnOffsetCommitRequestPartition::default()
                .with_partition_index(ten * 10 + index)
                .with_committed_offset(5)
                .with_committed_metadata(Some(text(&metadata)))
        };
        let topic = TxnOffsetCommitRequestTopic::default()
            .with_name(TopicName(text("t")))
            .with_partitions((0..10).map(partition).collect());
        let request = TxnOffsetCommitRequest::default()
            .with_transactional_id(producer.tid())
            .with_group_id(GroupId(text("g")))
            .with_producer_id(ProducerId(producer.id))
            .with_producer_epoch(producer.epoch)
            .with_topics(vec![topic]);
        let response = producer.client.call(5, &request).await;
        assert!(response.topics[0].partitions.iter().all(|p| p.error_code == 0));
    }
    assert_eq!(producer.end(true).await, 0);
    for crash in [true, false] {
        use offset_fetch_request::*;
        let group = OffsetFetchRequestGroup::default().with_group_id(GroupId(text("g")));
        let group = group.with_topics(None);
        let request =
            OffsetFetchRequest::default().with_groups(vec![group]).with_require_stable(true);
        let response = server.client().await.call(8, &request).await;
        let committed = &response.groups[0].topics[0].partitions;
        assert_eq!(committed.len(), 100);
        assert!(committed.iter().all(|p| p.error_code == 0 && p.committed_offset == 5));
        if crash {
            server.crash().await;
        }
    }
}

/// A client that makes up ids, by their number or by their bytes, blocks neither transactions nor
/// new producers.
#[tokio::test(flavor = "multi_thread")]
async fn any_number_of_ids_does_not_block_transactions() {
    for len in [16, 1_024] {
        let mut server = TestServer::start().await;
        let topic_id = server.topic("t", 1, &[]).await;
        let mut idle = Producer::init(&server, "idle", true).await;
        let mut open = Producer::init(&server, "open", true).await;
        assert_eq!(open.produce("t", topic_id, 0).await.0, 0);
        server.server().transactions.fill(len);
        assert_eq!(open.commit_offset("g", "t", 5).await, 0);
        let mut new = Producer::init(&server, "new", true).await;
        assert_eq!(new.produce("t", topic_id, 0).await.0, 0);
        // The least recently used id was removed.
        assert_eq!(idle.produce("t", topic_id, 0).await.0, INVALID_PRODUCER_ID_MAPPING);

        server.crash().await;
        for producer in [&mut idle, &mut open, &mut new] {
            producer.reconnect(&server).await;
        }
        assert_eq!(idle.produce("t", topic_id, 0).await.0, INVALID_PRODUCER_ID_MAPPING);
        server.server().transactions.fill(len);
        assert_eq!(open.commit_offset("h", "t", 6).await, 0);
        let mut idle = Producer::init(&server, "idle", true).await;
        assert_eq!(idle.produce("t", topic_id, 0).await.0, 0);
        for producer in [&mut idle, &mut open, &mut new] {
            assert_eq!(producer.end(true).await, 0);
        }
        assert_eq!(offset(&server, "g", "t").await, (0, 5));
        assert_eq!(offset(&server, "h", "t").await, (0, 6));
    }
}

/// A hundred thousand of the longest ones would take three gigabytes.
#[tokio::test(flavor = "multi_thread")]
async fn transactional_ids_are_bounded_and_longer_ones_from_earlier_builds_remain_valid() {
    let mut server = TestServer::start().await;
    let mut client = server.client().await;
    let too_long = "i".repeat(1_025);
    assert_eq!(init(&mut client, &too_long, 1_000).await, Err(INVALID_REQUEST));
    assert_eq!(init(&mut client, "", 1_000).await, Err(INVALID_REQUEST));
    init(&mut client, &too_long[1..], 1_000).await.unwrap();
    let old = "o".repeat(30_000);
    server.server().transactions.take(&old).await;
    assert_eq!(server.server().transactions.sizes(), (31_024, 0));
    server.crash().await;
    assert_eq!(server.server().transactions.sizes(), (31_024, 0));
    let (_, epoch) = init(&mut server.client().await, &old, 1_000).await.unwrap();
    assert_eq!(epoch, 1);
}

/// Memory of a transaction is not available to others before it ends.
#[tokio::test(flavor = "multi_thread")]
async fn one_transaction_cannot_use_all_memory_of_transactions() {
    use txn_offset_commit_request::*;
    let server = TestServer::with(64 << 20, |_| {}).await;
    server.topic("t", 100, &[]).await;
    let mut greedy = Producer::init(&server, "greedy", true).await;
    let metadata = text(&"m".repeat(4_000));
    let partition = |index| {
        TxnOffsetCommitRequestPartition::default()
            .with_partition_index(index)
            .with_committed_offset(5)
            .with_committed_metadata(Some(metadata.clone()))
    };
    let topic = TxnOffsetCommitRequestTopic::default()
        .with_name(TopicName(text("t")))
        .with_partitions((0..100).map(partition).collect());
    let mut taken = 0;
    loop {
        let request = TxnOffsetCommitRequest::default()
            .with_transactional_id(greedy.tid())
            .with_group_id(GroupId(text(&format!("g{taken}"))))
            .with_producer_id(ProducerId(greedy.id))
            .with_producer_epoch(greedy.epoch)
            .with_topics(vec![topic.clone()]);
        match greedy.client.call(5, &request).await.topics[0].partitions[0].error_code {
            0 => taken += 1,
            code => break assert_eq!(code, POLICY_VIOLATION),
        }
        assert!(taken < 100, "there is no bound");
    }
    assert!((15..25).contains(&taken), "{taken}");
    // A request that only overwrites is accepted.
    assert_eq!(greedy.commit_offset("g0", "t", 6).await, 0);
    let mut modest = Producer::init(&server, "modest", true).await;
    assert_eq!(modest.commit_offset("g", "t", 5).await, 0);
    assert_eq!(modest.end(true).await, 0);
    assert_eq!(greedy.end(false).await, 0);
    assert_eq!(server.server().transactions.sizes(), ("greedymodest".len(), 0));
    assert_eq!(greedy.commit_offset("g", "t", 7).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn transaction_timeout_and_expiration_of_ids_are_configurable() {
    const INVALID_TRANSACTION_TIMEOUT: i16 = ResponseError::InvalidTransactionTimeout.code();
    let server = TestServer::with(16 << 20, |config| {
        config.transaction_max_timeout = Duration::from_secs(3_600);
        config.transactional_id_expiration = Duration::from_millis(1);
    })
    .await;
    let mut client = server.client().await;
    let longer = init(&mut client, "longer", 3_600_001).await;
    assert_eq!(longer, Err(INVALID_TRANSACTION_TIMEOUT));
    init(&mut client, "id", 3_600_000).await.unwrap();
    let transactions = &server.server().transactions;
    assert_eq!(transactions.sizes(), ("id".len(), 0));
    tokio::time::sleep(Duration::from_millis(50)).await;
    forget_unused(server.server()).await;
    assert_eq!(transactions.sizes(), (0, 0));
}
