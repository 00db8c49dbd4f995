//! Transactions that have lost a part to damage of the write-ahead log while the server was down.

use super::super::harness::stored;
use super::super::lost_offsets::{damage, prove};
use super::damaged_decisions::{PREPARED, begin, flip_batch, flip_state};
use super::*;

/// Damages the record of the log that holds the batch at this offset of a producer: flips one bit
/// after its header.
fn flip(wal: &mut [u8], (producer_id, base_offset): (i64, u64), is_control: bool) {
    let starts: Vec<usize> = wal
        .windows(8)
        .enumerate()
        .filter(|(_, bytes)| **bytes == base_offset.to_be_bytes())
        .map(|(at, _)| at)
        .filter(|at| {
            let header = wal.get(*at..).and_then(BatchHeader::parse);
            header.is_some_and(|header| {
                header.magic == 2
                    && header.producer_id == producer_id
                    && header.is_transactional()
                    && header.is_control() == is_control
            })
        })
        .collect();
    assert_eq!(starts.len(), 1, "the batch is in the log once");
    wal[starts[0] + 65] ^= 1;
}

fn flip_marker(wal: &mut [u8], producer_id: i64, offset: u64) {
    flip(wal, (producer_id, offset), true);
}

/// Number of transactions that were ended at the start, by outcome.
fn ended_after_loss(server: &TestServer, outcome: &str) -> u64 {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &server.registry).unwrap();
    let name =
        format!("alluvium_kafka_transactions_ended_after_loss_total{{outcome=\"{outcome}\"}} ");
    let value = text.lines().find_map(|line| line.strip_prefix(&name));
    value.map_or(0, |value| value.parse().unwrap())
}

/// All combinations of: version of transactions, the outcome whose marker is lost, the outcome of
/// the producer's next transaction.
fn cases() -> impl Iterator<Item = (bool, bool, bool)> {
    (0..8).map(|case| (case & 1 != 0, case & 2 != 0, case & 4 != 0))
}

/// Checks after the first start, after another one with the damaged log, and after one from the
/// uploaded state.
async fn restarts(server: &mut TestServer, expected: &Seen) {
    assert_eq!(committed(server, "t", 0).await, *expected);
    server.crash().await;
    assert_eq!(committed(server, "t", 0).await, *expected, "after a restart");
    server.store().flush().await.unwrap();
    server.crash().await;
    assert_eq!(committed(server, "t", 0).await, *expected, "after an upload");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_marker_is_written_again_with_the_decided_outcome() {
    for (version_2, lost, next) in cases() {
        let mut server = TestServer::start().await;
        let topic_id = server.topic("t", 1, &[]).await;
        let mut producer = Producer::init(&server, "a", version_2).await;
        let id = producer.id;
        begin(&mut producer, &[0]).await;
        assert_eq!(producer.produce("t", topic_id, 0).await, (0, 0));
        assert_eq!(producer.end(lost).await, 0);
        let plain = crate::batch::tests::plain(&[1]);
        assert_eq!(server.client().await.produce("t", 0, &plain).await, (0, 3));
        server.crash_and_damage(|wal| flip_marker(wal, id, 2)).await;

        let mut aborted = if lost { vec![] } else { vec![(id, 0)] };
        let after = committed(&server, "t", 0).await;
        assert_eq!((after.high_watermark, after.stable_end), (5, 5), "{version_2} {lost}");
        assert_eq!(after.aborted, aborted);
        producer.reconnect(&server).await;
        begin(&mut producer, &[0]).await;
        let first = producer.produce("t", topic_id, 0).await;
        assert_eq!(first.0, 0);
        assert_eq!(producer.end(next).await, 0);
        if !next {
            aborted.push((id, first.1));
        }
        let after = committed(&server, "t", 0).await;
        assert_eq!(after.stable_end, after.high_watermark);
        assert_eq!(after.aborted, aborted, "{version_2} {lost} {next}");
        restarts(&mut server, &after).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_later_transaction_does_not_decide_one_whose_marker_is_lost() {
    for (version_2, lost, next) in cases() {
        let mut server = TestServer::start().await;
        let topic_id = server.topic("t", 1, &[]).await;
        let mut producer = Producer::init(&server, "a", version_2).await;
        let id = producer.id;
        let mut aborted = Vec::new();
        for (first, commits) in [(0, lost), (3, next), (6, lost)] {
            begin(&mut producer, &[0]).await;
            assert_eq!(producer.produce("t", topic_id, 0).await, (0, first));
            assert_eq!(producer.end(commits).await, 0);
            if !commits {
                aborted.push((id, first));
            }
        }
        let expected = Seen { aborted, ..seen(9, 9, &[0, 2, 3, 5, 6, 8], &[]) };
        assert_eq!(committed(&server, "t", 0).await, expected);
        server.crash_and_damage(|wal| flip_marker(wal, id, 2)).await;
        restarts(&mut server, &expected).await;
    }
}

/// Decision and marker are lost together. The producer's next transaction says nothing about the
/// outcome.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_with_a_lost_decision_is_aborted() {
    for (version_2, lost, next) in cases() {
        let mut server = TestServer::start().await;
        let topic_id = server.topic("t", 1, &[]).await;
        let mut producer = Producer::init(&server, "a", version_2).await;
        let id = producer.id;
        for (first, commits) in [(0, lost), (3, next)] {
            begin(&mut producer, &[0]).await;
            assert_eq!(producer.produce("t", topic_id, 0).await, (0, first));
            assert_eq!(producer.end(commits).await, 0);
        }
        server
            .crash_and_damage(|wal| {
                flip_marker(wal, id, 2);
                flip_state(wal, b'a', PREPARED, 0);
            })
            .await;
        assert_eq!(ended_after_loss(&server, "unknown"), 1, "{version_2} {lost} {next}");
        let mut aborted = vec![(id, 0)];
        if !next {
            aborted.push((id, 3));
        }
        let expected = Seen { aborted, ..seen(6, 6, &[0, 2, 3, 5], &[]) };
        restarts(&mut server, &expected).await;
        // The producer's next incarnation continues.
        let mut successor = Producer::init(&server, "a", version_2).await;
        begin(&mut successor, &[0]).await;
        assert_eq!(successor.produce("t", topic_id, 0).await, (0, 6));
        assert_eq!(successor.end(true).await, 0);
        assert_eq!(committed(&server, "t", 0).await.stable_end, 9);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_transaction_with_lost_records_is_aborted() {
    for version_2 in [false, true] {
        let mut server = TestServer::start().await;
        let topic_id = server.topic("t", 1, &[]).await;
        let mut producer = Producer::init(&server, "a", version_2).await;
        let id = producer.id;
        begin(&mut producer, &[0]).await;
        for first in [0, 2, 4] {
            assert_eq!(producer.produce("t", topic_id, 0).await, (0, first));
        }
        server.crash_and_damage(|wal| flip(wal, (id, 2), false)).await;
        assert_eq!(ended_after_loss(&server, "interrupted"), 1);
        let expected = seen(7, 7, &[0, 4, 6], &[(id, 0)]);
        assert_eq!(committed(&server, "t", 0).await, expected);
        producer.reconnect(&server).await;
        let fenced = producer.produce("t", topic_id, 0).await;
        assert_eq!(fenced, (INVALID_PRODUCER_EPOCH, -1), "lost records are not committed");
        assert_ne!(producer.end(true).await, 0);
        let mut successor = Producer::init(&server, "a", version_2).await;
        begin(&mut successor, &[0]).await;
        assert_eq!(successor.produce("t", topic_id, 0).await, (0, 7));
        assert_eq!(successor.end(true).await, 0);
        let expected = seen(10, 10, &[0, 4, 6, 7, 9], &[(id, 0)]);
        restarts(&mut server, &expected).await;
    }
}

/// All records of a transaction in a partition are lost, so none is open there.
#[tokio::test(flavor = "multi_thread")]
async fn an_open_transaction_is_aborted_if_all_its_records_are_lost() {
    for version_2 in [false, true] {
        let mut server = TestServer::start().await;
        let topic_id = server.topic("t", 2, &[]).await;
        let mut producer = Producer::init(&server, "a", version_2).await;
        let id = producer.id;
        begin(&mut producer, &[0, 1]).await;
        assert_eq!(producer.produce("t", topic_id, 0).await, (0, 0));
        let plain = crate::batch::tests::plain(&[1]);
        assert_eq!(server.client().await.produce("t", 0, &plain).await, (0, 2));
        assert_eq!(producer.produce("t", topic_id, 1).await, (0, 0));
        server
            .crash_and_damage(|wal| {
                // Both partitions have one at this offset; the first one in the log is that of
                // partition 0.
                flip_batch(wal, (id, 0), 0);
            })
            .await;
        assert_eq!(committed(&server, "t", 1).await, seen(3, 3, &[0, 2], &[(id, 0)]));
        let zero = committed(&server, "t", 0).await;
        assert_eq!(zero.stable_end, zero.high_watermark);
        producer.reconnect(&server).await;
        assert_ne!(producer.end(true).await, 0);
    }
}

/// The decision is lost, and the markers are not. In the second case one of two markers is lost,
/// too: the other one determines the outcome.
#[tokio::test(flavor = "multi_thread")]
async fn markers_are_not_contradicted_if_the_decision_is_lost() {
    for (version_2, commits, with_marker) in cases() {
        let mut server = TestServer::start().await;
        let topic_id = server.topic("t", 2, &[]).await;
        let mut producer = Producer::init(&server, "a", version_2).await;
        let id = producer.id;
        begin(&mut producer, &[0, 1]).await;
        for partition in [0, 1] {
            assert_eq!(producer.produce("t", topic_id, partition).await, (0, 0));
        }
        // The marker's timestamp is at least a millisecond after the transaction's begin.
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert_eq!(producer.end(commits).await, 0);
        for partition in [0, 1] {
            let plain = crate::batch::tests::plain(&[1]);
            assert_eq!(server.client().await.produce("t", partition, &plain).await, (0, 3));
        }
        server
            .crash_and_damage(|wal| {
                flip_state(wal, b'a', PREPARED, 0);
                if with_marker {
                    flip_batch(wal, (id, 2), 0);
                }
            })
            .await;
        let aborted = if commits { vec![] } else { vec![(id, 0)] };
        for partition in [0, 1] {
            let seen = committed(&server, "t", partition).await;
            assert_eq!(seen.stable_end, seen.high_watermark);
            assert_eq!(seen.aborted, aborted, "{version_2} {commits} {with_marker} {partition}");
        }
        let mut successor = Producer::init(&server, "a", version_2).await;
        assert_ne!(successor.id, id, "epochs of that id may be lost");
        let successor_id = successor.id;
        begin(&mut successor, &[0]).await;
        let (code, first) = successor.produce("t", topic_id, 0).await;
        assert_eq!(code, 0);
        assert_eq!(successor.end(!commits).await, 0);
        let mut aborted = aborted;
        if commits {
            aborted.push((successor_id, first));
        }
        let after = committed(&server, "t", 0).await;
        assert_eq!((after.stable_end, &after.aborted), (after.high_watermark, &aborted));
        restarts(&mut server, &after).await;
    }
}

/// An open transaction follows the lost offsets, so a reader of committed records gets to its first
/// offset and no further.
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_of_committed_records_passes_lost_offsets_before_an_open_transaction() {
    let mut server = TestServer::start().await;
    let topic_id = server.topic("t", 1, &[]).await;
    let plain = crate::batch::tests::plain(&[1, 2]);
    assert_eq!(server.client().await.produce("t", 0, &plain).await, (0, 0));
    prove(&server).await;
    let lost = [stored(&plain, 0)];
    server.crash_and_damage(|wal| damage(wal, &lost)).await;
    let mut producer = Producer::init(&server, "a", true).await;
    assert_eq!(producer.produce("t", topic_id, 0).await, (0, 2));

    let request = fetch("t", &[(0, 0)], 0).with_isolation_level(1);
    let response = server.client().await.call(12, &request).await;
    let partition = &response.responses[0].partitions[0];
    assert_eq!((partition.high_watermark, partition.last_stable_offset), (4, 2));
    let records = partition.records.as_ref().unwrap();
    let header = BatchHeader::parse(records).unwrap();
    assert_eq!((header.base_offset, header.last_offset_delta, header.record_count), (0, 1, 0));
    assert_eq!(records.len(), header.len_bytes);

    assert_eq!(producer.end(true).await, 0);
    assert_eq!(committed(&server, "t", 0).await, seen(5, 5, &[2, 4], &[]));
}
