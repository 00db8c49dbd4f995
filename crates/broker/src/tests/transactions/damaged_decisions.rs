//! Transactions whose decision is lost to damage of the write-ahead log, together with other
//! records: no outcome is taken from another transaction, and no transaction has mixed outcomes.

use super::*;

/// Kinds of records of the state stream: docs/format/transaction-state.md.
const INITIALISED: u8 = 1;
const ADDED: u8 = 2;
pub(super) const PREPARED: u8 = 7;
const COMPLETED: u8 = 5;

const INVALID_PRODUCER_ID_MAPPING: i16 = ResponseError::InvalidProducerIdMapping.code();

/// Damages the `n`th batch of this producer at this offset of any partition, in log order.
pub(super) fn flip_batch(wal: &mut [u8], (producer_id, base_offset): (i64, u64), n: usize) {
    let is_it = |at: &usize| {
        let header = wal.get(*at..).and_then(BatchHeader::parse);
        header.is_some_and(|header| {
            header.magic == 2 && header.producer_id == producer_id && header.is_transactional()
        })
    };
    let found = wal.windows(8).enumerate();
    let found = found.filter(|(_, bytes)| **bytes == base_offset.to_be_bytes()).map(|(at, _)| at);
    let at = found.filter(is_it).nth(n).expect("it is in the log");
    wal[at + 65] ^= 1;
}

/// Damages the `n`th record of this kind in the state stream, of a transactional id of one letter.
pub(super) fn flip_state(wal: &mut [u8], id: u8, kind: u8, n: usize) {
    let begin = [1, kind, 1, 0, id];
    let found = wal.windows(begin.len()).enumerate().filter(|(_, bytes)| *bytes == begin);
    let at = found.map(|(at, _)| at).nth(n).expect("it is in the log");
    wal[at + begin.len()] ^= 1;
}

pub(super) async fn begin(producer: &mut Producer, partitions: &[i32]) {
    if !producer.version_2 {
        assert_eq!(producer.add("t", partitions).await, 0);
    }
}

/// A loss at the end of the log is not noticed, so another record follows.
async fn go_on(server: &TestServer) {
    server.topic("other", 1, &[]).await;
    let plain = crate::batch::tests::plain(&[1]);
    assert_eq!(server.client().await.produce("other", 0, &plain).await, (0, 0));
}

/// Checks after a start, a second one with the same damage, and one from the uploaded state.
async fn at_each_start(server: &mut TestServer, check: impl AsyncFn(&TestServer, &str)) {
    check(server, "first start").await;
    server.crash().await;
    check(server, "second start").await;
    server.store().flush().await.unwrap();
    server.crash().await;
    check(server, "after an upload").await;
}

/// The decision and all markers of an aborted transaction are lost; the marker of the next one, a
/// commit, is intact.
#[tokio::test(flavor = "multi_thread")]
async fn a_later_commit_does_not_commit_an_aborted_transaction() {
    for version_2 in [false, true] {
        for intact_record in [false, true] {
            let label = format!("version 2: {version_2}, record: {intact_record}");
            let mut server = TestServer::start().await;
            let topic_id = server.topic("t", 2, &[]).await;
            let mut producer = Producer::init(&server, "a", version_2).await;
            let id = producer.id;
            begin(&mut producer, &[0, 1]).await;
            for partition in [0, 1] {
                assert_eq!(producer.produce("t", topic_id, partition).await, (0, 0));
            }
            if !version_2 {
                assert_eq!(producer.add_offsets("g").await, 0);
            }
            assert_eq!(producer.commit_offset("g", "t", 1).await, 0);
            // The markers' timestamps are at least a millisecond after the transaction's begin.
            tokio::time::sleep(Duration::from_millis(2)).await;
            assert_eq!(producer.end(false).await, 0);
            begin(&mut producer, &[1]).await;
            assert_eq!(producer.produce("t", topic_id, 1).await, (0, 3));
            assert_eq!(producer.end(true).await, 0);
            go_on(&server).await;
            server
                .crash_and_damage(|wal| {
                    flip_state(wal, b'a', PREPARED, 0);
                    flip_batch(wal, (id, 2), 0);
                    flip_batch(wal, (id, 2), 1);
                    flip_state(wal, b'a', COMPLETED, 0);
                    // The first one names the partitions and the group; in version 2 each has its
                    // own.
                    let added = if version_2 { 3 } else { 2 };
                    flip_state(wal, b'a', ADDED, added);
                    if !intact_record {
                        flip_batch(wal, (id, 3), 0);
                    }
                    flip_state(wal, b'a', PREPARED, 1);
                })
                .await;
            at_each_start(&mut server, async |server, when| {
                for partition in [0, 1] {
                    let seen = committed(server, "t", partition).await;
                    assert_eq!(seen.stable_end, seen.high_watermark, "{label}, {when}");
                    assert!(seen.aborted.contains(&(id, 0)), "{partition}, {label}, {when}");
                    assert!(!seen.aborted.contains(&(id, 3)), "{partition}, {label}, {when}");
                }
                assert_eq!(offset(server, "g", "t").await, (0, -1), "{label}, {when}");
            })
            .await;
        }
    }
}

/// The decision of a transaction in three partitions is lost, and two of its markers. The third one
/// proves the outcome for all of them, whatever the producer has done since.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_marker_decides_all_partitions_of_its_transaction() {
    for case in 0..16 {
        let [version_2, uploaded, commits, next] = [1, 2, 4, 8].map(|bit| case & bit != 0);
        let label = format!("2: {version_2}, uploaded: {uploaded}, {commits}, {next}");
        let mut server = TestServer::start().await;
        let topic_id = server.topic("t", 3, &[]).await;
        let mut producer = Producer::init(&server, "a", version_2).await;
        let id = producer.id;
        begin(&mut producer, &[0, 1, 2]).await;
        for partition in [0, 1, 2] {
            assert_eq!(producer.produce("t", topic_id, partition).await, (0, 0));
        }
        if uploaded {
            server.store().flush().await.unwrap();
        }
        assert_eq!(producer.end(commits).await, 0);
        if next {
            begin(&mut producer, &[1]).await;
            assert_eq!(producer.produce("t", topic_id, 1).await, (0, 3));
            assert_eq!(producer.end(false).await, 0);
        }
        go_on(&server).await;
        server
            .crash_and_damage(|wal| {
                flip_state(wal, b'a', PREPARED, 0);
                flip_batch(wal, (id, 2), 0);
                flip_batch(wal, (id, 2), 1);
            })
            .await;
        at_each_start(&mut server, async |server, when| {
            for partition in [0, 1, 2] {
                let seen = committed(server, "t", partition).await;
                assert_eq!(seen.stable_end, seen.high_watermark, "{partition}, {label}, {when}");
                let is_aborted = seen.aborted.contains(&(id, 0));
                assert_eq!(is_aborted, !commits, "{partition}, {label}, {when}");
                let other = seen.aborted.contains(&(id, 3));
                assert_eq!(other, next && partition == 1, "{partition}, {label}, {when}");
            }
        })
        .await;
    }
}

/// The offsets of a transaction that a marker proves to be committed are committed, too.
#[tokio::test(flavor = "multi_thread")]
async fn offsets_of_a_transaction_with_a_proven_commit_are_committed() {
    for version_2 in [false, true] {
        let mut server = TestServer::start().await;
        let topic_id = server.topic("t", 1, &[]).await;
        let mut producer = Producer::init(&server, "a", version_2).await;
        begin(&mut producer, &[0]).await;
        assert_eq!(producer.produce("t", topic_id, 0).await, (0, 0));
        if !version_2 {
            assert_eq!(producer.add_offsets("g").await, 0);
        }
        assert_eq!(producer.commit_offset("g", "t", 1).await, 0);
        assert_eq!(producer.end(true).await, 0);
        go_on(&server).await;
        let begin = [1u8, 0, b'g'];
        server
            .crash_and_damage(|wal| {
                flip_state(wal, b'a', PREPARED, 0);
                flip_state(wal, b'a', COMPLETED, 0);
                let found = wal.windows(3).enumerate().filter(|(_, bytes)| *bytes == begin);
                let at = found.map(|(at, _)| at).next_back().expect("the group's commit");
                wal[at + 2] ^= 1;
            })
            .await;
        at_each_start(&mut server, async |server, when| {
            assert_eq!(committed(server, "t", 0).await.aborted, [], "{version_2}, {when}");
            assert_eq!(offset(server, "g", "t").await, (0, 1), "{version_2}, {when}");
        })
        .await;
    }
}

/// The lost records belong to another transactional id. The client repeats the request for the end
/// of its own transaction, since it has lost the response.
#[tokio::test(flavor = "multi_thread")]
async fn a_loss_of_other_records_does_not_change_ended_transactions() {
    let mut server = TestServer::start().await;
    let topic_id = server.topic("t", 1, &[]).await;
    let mut producer = Producer::init(&server, "a", true).await;
    assert_eq!(producer.produce("t", topic_id, 0).await, (0, 0));
    let asks_again = (producer.id, producer.epoch);
    assert_eq!(producer.end(true).await, 0);
    let now = (producer.id, producer.epoch);
    let _other = Producer::init(&server, "b", true).await;
    go_on(&server).await;
    server.crash_and_damage(|wal| flip_state(wal, b'b', INITIALISED, 0)).await;
    producer.reconnect(&server).await;
    for _ in 0..2 {
        (producer.id, producer.epoch) = asks_again;
        assert_eq!(producer.end(true).await, 0);
        assert_eq!((producer.id, producer.epoch), now);
        server.crash().await;
        producer.reconnect(&server).await;
    }
    // Before it continues it has to initialise: it may have begun a transaction that is lost.
    assert_eq!(producer.produce("t", topic_id, 0).await.0, INVALID_PRODUCER_ID_MAPPING);
    let mut producer = Producer::init(&server, "a", true).await;
    let now = (producer.id, producer.epoch);
    assert_eq!(producer.produce("t", topic_id, 0).await, (0, 3));
    assert_eq!(producer.end(true).await, 0);
    let old = now;
    let now = (producer.id, producer.epoch);
    (producer.id, producer.epoch) = old;
    assert_eq!(producer.end(true).await, 0, "it has lost this response, too");
    assert_eq!((producer.id, producer.epoch), now);
    assert_eq!(committed(&server, "t", 0).await, seen(6, 6, &[0, 2, 3, 5], &[]));
}

/// In version 1 the epoch stays, so the server cannot know which transaction the client means: the
/// known one, or a later one that is lost as a whole.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_of_version_1_never_receives_the_outcome_of_another_transaction() {
    let mut server = TestServer::start().await;
    let topic_id = server.topic("t", 1, &[]).await;
    let mut producer = Producer::init(&server, "a", false).await;
    for first in [0, 3] {
        begin(&mut producer, &[0]).await;
        assert_eq!(producer.produce("t", topic_id, 0).await, (0, first));
        assert_eq!(producer.end(true).await, 0);
    }
    let id = producer.id;
    go_on(&server).await;
    server
        .crash_and_damage(|wal| {
            flip_state(wal, b'a', ADDED, 1);
            flip_state(wal, b'a', PREPARED, 1);
            flip_batch(wal, (id, 5), 0);
            flip_state(wal, b'a', COMPLETED, 1);
        })
        .await;
    assert_eq!(committed(&server, "t", 0).await.aborted, [(id, 3)]);
    producer.reconnect(&server).await;
    assert_eq!(producer.end(true).await, INVALID_TXN_STATE);
    // It initialises, and its next transaction is known.
    assert_eq!(producer.add("t", &[0]).await, INVALID_PRODUCER_ID_MAPPING);
    let mut producer = Producer::init(&server, "a", false).await;
    assert_ne!(producer.id, id);
    begin(&mut producer, &[0]).await;
    assert_eq!(producer.produce("t", topic_id, 0).await.0, 0);
    assert_eq!(producer.end(true).await, 0);
    assert_eq!(producer.end(true).await, 0, "it repeats the request");
}

/// An epoch is not issued twice, although the record of it is lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_epoch_is_not_issued_to_another_producer() {
    for version_2 in [false, true] {
        let mut server = TestServer::start().await;
        let topic_id = server.topic("t", 1, &[]).await;
        let mut old = Producer::init(&server, "a", version_2).await;
        let lost = Producer::init(&server, "a", version_2).await;
        assert_eq!((lost.id, lost.epoch), (old.id, old.epoch + 1));
        go_on(&server).await;
        server.crash_and_damage(|wal| flip_state(wal, b'a', INITIALISED, 1)).await;
        // The server knows the older one only, and that it may not be the newest.
        old.reconnect(&server).await;
        let refused = match version_2 {
            false => old.add("t", &[0]).await,
            true => old.produce("t", topic_id, 0).await.0,
        };
        assert_eq!(refused, INVALID_PRODUCER_ID_MAPPING);
        server.crash().await;
        let next = Producer::init(&server, "a", version_2).await;
        assert_ne!((next.id, next.epoch), (lost.id, lost.epoch));
        assert_ne!((next.id, next.epoch), (old.id, old.epoch));
    }
}

/// A transaction has begun, and all that shows it is lost: what its producer adds afterwards must
/// not be committed without the rest. Clients abort it and initialise again.
#[tokio::test(flavor = "multi_thread")]
async fn a_producer_cannot_continue_a_transaction_whose_begin_is_lost() {
    for version_2 in [false, true] {
        let mut server = TestServer::start().await;
        let topic_id = server.topic("t", 2, &[]).await;
        let mut producer = Producer::init(&server, "a", version_2).await;
        begin(&mut producer, &[0]).await;
        assert_eq!(producer.produce("t", topic_id, 0).await, (0, 0));
        assert_eq!(producer.end(true).await, 0);
        server.store().flush().await.unwrap();
        let id = producer.id;
        begin(&mut producer, &[0]).await;
        assert_eq!(producer.produce("t", topic_id, 0).await, (0, 3));
        go_on(&server).await;
        server
            .crash_and_damage(|wal| {
                flip_state(wal, b'a', ADDED, 1);
                flip_batch(wal, (id, 3), 0);
            })
            .await;
        producer.reconnect(&server).await;
        let refused = match version_2 {
            false => producer.add("t", &[1]).await,
            true => producer.produce("t", topic_id, 1).await.0,
        };
        assert_eq!(refused, INVALID_PRODUCER_ID_MAPPING, "version 2: {version_2}");
        let mut producer = Producer::init(&server, "a", version_2).await;
        assert_ne!(producer.id, id);
        begin(&mut producer, &[1]).await;
        assert_eq!(producer.produce("t", topic_id, 1).await, (0, 0));
        assert_eq!(producer.end(true).await, 0);
    }
}

/// An open transaction is aborted in an epoch that was issued before, by the end of it that is
/// lost: the producer in that epoch has begun another one.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_epoch_does_not_continue_after_an_abort() {
    let mut server = TestServer::start().await;
    let topic_id = server.topic("t", 2, &[]).await;
    let mut producer = Producer::init(&server, "a", true).await;
    let id = producer.id;
    assert_eq!(producer.produce("t", topic_id, 0).await, (0, 0));
    server.store().flush().await.unwrap();
    assert_eq!(producer.end(true).await, 0);
    assert_eq!(producer.produce("t", topic_id, 0).await, (0, 3));
    go_on(&server).await;
    server
        .crash_and_damage(|wal| {
            for (kind, n) in [(PREPARED, 0), (COMPLETED, 0), (ADDED, 1)] {
                flip_state(wal, b'a', kind, n);
            }
            for offset in [2, 3] {
                flip_batch(wal, (id, offset), 0);
            }
        })
        .await;
    producer.reconnect(&server).await;
    let refused = producer.produce("t", topic_id, 1).await.0;
    assert_eq!(refused, INVALID_PRODUCER_ID_MAPPING);
    assert_ne!(producer.end(true).await, 0);
    let next = Producer::init(&server, "a", true).await;
    assert_ne!(next.id, id);
}
