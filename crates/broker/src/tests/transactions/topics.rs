//! Transactions beside topics that are created and deleted.

use super::*;

/// Deleted topics do not block the transaction, and a new one of the same name is not part of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_outlives_a_topic() {
    let server = TestServer::start().await;
    let gone = server.topic("gone", 1, &[]).await;
    let stays = server.topic("stays", 1, &[]).await;
    let mut producer = Producer::init(&server, "a", true).await;
    assert_eq!(producer.produce("gone", gone, 0).await, (0, 0));
    assert_eq!(producer.commit_offset("g", "gone", 1).await, 0);
    producer.sequences.clear();
    assert_eq!(producer.produce("stays", stays, 0).await, (0, 0));
    delete_topic(&server, "gone").await;
    assert_eq!(producer.end(true).await, 0);
    assert_eq!(committed(&server, "stays", 0).await, seen(3, 3, &[0, 2], &[]));
    server.topic("gone", 1, &[]).await;
    assert_eq!(committed(&server, "gone", 0).await, seen(0, 0, &[], &[]));
    assert_eq!(offset(&server, "g", "gone").await, (0, -1));
}

/// The deletion is not durable when the transaction ends, and never becomes so. Otherwise the topic
/// would have an open transaction forever, and the offsets would be lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_topic_whose_deletion_is_lost_keeps_its_committed_transactions() {
    let mut server = TestServer::simulated(16 << 20).await;
    let topic_id = server.topic("t", 1, &[]).await;
    let mut producer = Producer::init(&server, "a", true).await;
    assert_eq!(producer.produce("t", topic_id, 0).await, (0, 0));
    assert_eq!(producer.commit_offset("g", "t", 5).await, 0);
    let at = server.server().clone();
    let holder = at.clone();
    let held = holder.topics.held_deletions.lock().await;
    let delete = tokio::spawn(async move { at.topics.delete(&TopicRef::Id(topic_id)).await });
    while server.server().topics.by_id(topic_id).is_ok() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(producer.end(true).await, 0);
    assert!(!delete.is_finished());
    delete.abort();
    assert!(delete.await.is_err());
    drop(held);
    drop(holder);
    server.kill(true).await;
    assert_eq!(committed(&server, "t", 0).await, seen(3, 3, &[0, 2], &[]));
    assert_eq!(offset(&server, "g", "t").await, (0, 5));
}

/// Staged offsets name topics by name, and another topic may have the name by then.
#[tokio::test(flavor = "multi_thread")]
async fn a_new_topic_gets_no_staged_offsets_of_an_older_one_of_its_name() {
    for (crash, uploaded) in [(false, false), (true, false), (true, true)] {
        for again in [false, true] {
            let mut server = TestServer::start().await;
            server.topic("t", 1, &[]).await;
            server.topic("other", 1, &[]).await;
            let mut producer = Producer::init(&server, "a", true).await;
            assert_eq!(producer.commit_offset("g", "t", 9).await, 0);
            assert_eq!(producer.commit_offset("g", "other", 7).await, 0);
            delete_topic(&server, "t").await;
            server.topic("t", 1, &[]).await;
            // A request to create an existing topic does not remove its offsets.
            let exists = server.server().create_topic("other", 1, Default::default(), false).await;
            assert!(exists.is_err());
            if again {
                assert_eq!(producer.commit_offset("g", "t", 3).await, 0);
            }
            if crash {
                if uploaded {
                    server.store().flush().await.unwrap();
                }
                server.crash().await;
                producer.reconnect(&server).await;
            }
            assert_eq!(
                offset(&server, "g", "t").await,
                if again { (ResponseError::UnstableOffsetCommit.code(), -1) } else { (0, -1) }
            );
            assert_eq!(
                offset(&server, "g", "other").await,
                (ResponseError::UnstableOffsetCommit.code(), -1)
            );
            assert_eq!(producer.end(true).await, 0);
            assert_eq!(offset(&server, "g", "t").await, (0, if again { 3 } else { -1 }));
            assert_eq!(offset(&server, "g", "other").await, (0, 7));
        }
    }
}

/// Its offsets may be about to be appended.
#[tokio::test(flavor = "multi_thread")]
async fn a_topic_is_not_created_before_a_transaction_with_its_name_has_ended() {
    let mut server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut producer = Producer::init(&server, "a", true).await;
    assert_eq!(producer.commit_offset("g", "t", 9).await, 0);
    server.server().transactions.decide_only("a", Outcome::Commit, true).await;
    delete_topic(&server, "t").await;
    let refused = server.server().create_topic("t", 1, Default::default(), false).await;
    assert!(matches!(refused, Err(crate::errors::ApiError::Storage(_))));
    server.crash().await;
    server.topic("t", 1, &[]).await;
    assert_eq!(offset(&server, "g", "t").await, (0, -1));
}

/// Nor before the offsets of a request that has seen the older topic are appended. A task that has
/// to wait does so on its own thread: a blocked thread of the runtime may be the one that polls all
/// sockets.
#[tokio::test(flavor = "multi_thread")]
async fn a_topic_is_not_created_between_the_check_of_the_older_one_and_the_record() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut producer = Producer::init(&server, "a", true).await;
    let runtime = Handle::current();
    let (checked, has_checked) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel::<()>();
    let (at, on, identity) = (server.server().clone(), runtime.clone(), producer.identity());
    let commit = thread::spawn(move || {
        let request = TxnOffsetCommitRequest::default().with_group_id(GroupId(text("g")));
        let request = request.with_generation_id(-1);
        let position =
            Position { partition: 0, offset: 9, leader_epoch: -1, metadata: String::new() };
        let topics = vec![("t".to_owned(), vec![position])];
        let (view, id) = (at.topics.view(), at.topics.by_name("t").unwrap().id);
        let exists = || {
            let exists = at.topics.by_id(id).is_ok();
            checked.send(()).unwrap();
            // Later checks continue at once.
            let _ = may_go_on.recv();
            exists
        };
        on.block_on(at.transactions.add_offsets(identity, &request, topics, &view, None, exists))
    });
    has_checked.recv().unwrap();
    delete_topic(&server, "t").await;
    let (at, on) = (server.server().clone(), runtime);
    let create = thread::spawn(move || {
        on.block_on(at.create_topic("t", 1, Default::default(), false)).map(|_| ())
    });
    // Time for it to come in between.
    tokio::time::sleep(Duration::from_millis(200)).await;
    drop(go_on);
    assert!(commit.join().unwrap().is_ok() && create.join().unwrap().is_ok());
    assert_eq!(producer.end(true).await, 0);
    assert_eq!(offset(&server, "g", "t").await, (0, -1));
}

/// No topic is created meanwhile, but everything else continues.
#[tokio::test(flavor = "multi_thread")]
async fn a_search_of_all_transactions_yields_to_other_tasks() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut producer = Producer::init(&server, "a", true).await;
    assert_eq!(producer.commit_offset("g", "t", 9).await, 0);
    let ids: Vec<String> = (0..1_500).map(|n| n.to_string()).collect();
    let begun = ids.iter().map(|id| Transactions::init(server.server(), id, None, 60_000));
    assert!(join_all(begun).await.iter().all(Result::is_ok));
    let mut forgotten = pin!(Transactions::forget_offsets(server.server(), "absent"));
    assert!(poll!(forgotten.as_mut()).is_pending());
    forgotten.await.unwrap();
}

/// Kafka's transactions identify partitions by name: one continues in a topic that was created
/// again, and ends there with a marker. The client has added the partition, and does not do so
/// again.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_continues_in_a_topic_that_was_created_again() {
    for version_2 in [false, true] {
        for commit in [true, false] {
            let server = TestServer::start().await;
            let mut topic_id = server.topic("t", 2, &[]).await;
            let mut producer = Producer::init(&server, "a", version_2).await;
            if !version_2 {
                assert_eq!(producer.add("t", &[0]).await, 0);
            }
            assert_eq!(producer.produce("t", topic_id, 0).await, (0, 0));
            for _ in 0..2 {
                delete_topic(&server, "t").await;
                topic_id = server.topic("t", 2, &[]).await;
                if version_2 {
                    // Its first batch in a partition has sequence 0, as in Kafka.
                    producer.sequences.clear();
                }
                assert_eq!(producer.produce("t", topic_id, 0).await, (0, 0));
            }
            // The other partition was never part of it.
            if !version_2 {
                assert_eq!(producer.produce("t", topic_id, 1).await.0, INVALID_TXN_STATE);
            }
            let id = producer.id;
            assert_eq!(producer.end(commit).await, 0);
            let expected =
                if commit { seen(3, 3, &[0, 2], &[]) } else { seen(3, 3, &[0, 2], &[(id, 0)]) };
            let found = committed(&server, "t", 0).await;
            assert_eq!(found, expected, "{version_2} {commit}");
            assert_eq!(committed(&server, "t", 1).await, seen(0, 0, &[], &[]));
        }
    }
}
