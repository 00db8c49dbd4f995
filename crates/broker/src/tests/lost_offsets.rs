//! Offsets that are lost to damage of the write-ahead log, as clients see them: before the next
//! record, at the end of a partition, and in the middle of a partition.

use alluvium_stream::Reason;
use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::describe_topic_partitions_request::TopicRequest;
use kafka_protocol::messages::list_offsets_request::{ListOffsetsPartition, ListOffsetsTopic};
use kafka_protocol::messages::list_offsets_response::ListOffsetsPartitionResponse;
use kafka_protocol::messages::metadata_request::MetadataRequestTopic;
use kafka_protocol::messages::offset_commit_request::{
    OffsetCommitRequestPartition, OffsetCommitRequestTopic,
};
use kafka_protocol::messages::offset_for_leader_epoch_request::{
    OffsetForLeaderPartition, OffsetForLeaderTopic,
};
use kafka_protocol::messages::{
    DescribeTopicPartitionsRequest, GroupId, ListOffsetsRequest, MetadataRequest,
    OffsetCommitRequest, OffsetForLeaderEpochRequest, TopicName,
};
use kafka_protocol::records::{Compression, RecordBatchDecoder};

use super::deleting::delete;
use super::harness::{TestServer, fetch, stored, text};
use crate::batch::tests::{encode, plain};
use crate::batch::{self, BatchHeader};

/// Damages the records of the log that hold these bytes.
pub(super) fn damage(wal: &mut [u8], batches: &[Bytes]) {
    for batch in batches {
        let mut starts = wal.windows(batch.len()).enumerate();
        let (at, _) = starts.find(|(_, bytes)| bytes == batch).expect("the batch is in the log");
        wal[at + batch.len() - 1] ^= 1;
    }
}

/// Appends a record that proves that those before it were durable: without it, damage to the last
/// one looks like a torn write.
pub(super) async fn prove(server: &TestServer) {
    server.topic("proof", 1, &[]).await;
    assert_eq!(server.client().await.produce("proof", 0, &plain(&[1])).await, (0, 0));
}

/// Fetches partition 0 of `t` from an offset: first offset, offset after the last one and number of
/// records of each batch; high watermark, and last stable offset.
async fn fetched(
    server: &TestServer,
    from: i64,
    is_committed: bool,
) -> (Vec<(i64, i64, i32)>, i64, i64) {
    let request = fetch("t", &[(0, from)], 0).with_isolation_level(is_committed.into());
    let response = server.client().await.call(12, &request).await;
    let partition = &response.responses[0].partitions[0];
    assert_eq!(partition.error_code, 0, "from {from}");
    let mut rest = partition.records.clone().unwrap();
    // Its checks include the CRC.
    RecordBatchDecoder::decode_all(&mut rest.clone()).unwrap();
    let mut batches = Vec::new();
    while let Some(header) = BatchHeader::parse(&rest) {
        let end = header.base_offset + i64::from(header.last_offset_delta) + 1;
        // A batch that only covers lost offsets has none.
        let epoch = batch::leader_epoch(&rest);
        assert_eq!(epoch == -1, header.record_count == 0, "{epoch} at {}", header.base_offset);
        batches.push((header.base_offset, end, header.record_count));
        rest = rest.slice(header.len_bytes..);
    }
    (batches, partition.high_watermark, partition.last_stable_offset)
}

/// What ListOffsets returns for a time.
async fn list(server: &TestServer, timestamp_ms: i64) -> ListOffsetsPartitionResponse {
    let partition = ListOffsetsPartition::default().with_timestamp(timestamp_ms);
    let topic = ListOffsetsTopic::default()
        .with_name(TopicName(text("t")))
        .with_partitions(vec![partition]);
    let request = ListOffsetsRequest::default().with_topics(vec![topic]);
    let response = server.client().await.call(7, &request).await;
    let partition = &response.topics[0].partitions[0];
    assert_eq!(partition.error_code, 0, "{timestamp_ms}");
    partition.clone()
}

/// The offset and timestamp that ListOffsets returns for a time.
async fn listed(server: &TestServer, timestamp_ms: i64) -> (i64, i64) {
    let partition = list(server, timestamp_ms).await;
    (partition.offset, partition.timestamp)
}

/// The answer to a client that knows `current` as the leader epoch and asks where `asked` ends:
/// error code, epoch and end.
async fn epoch_end(server: &TestServer, current: i32, asked: i32) -> (i16, i32, i64) {
    let partition = OffsetForLeaderPartition::default()
        .with_current_leader_epoch(current)
        .with_leader_epoch(asked);
    let topic = OffsetForLeaderTopic::default()
        .with_topic(TopicName(text("t")))
        .with_partitions(vec![partition]);
    let request = OffsetForLeaderEpochRequest::default().with_topics(vec![topic]);
    let response = server.client().await.call(4, &request).await;
    let partition = &response.topics[0].partitions[0];
    (partition.error_code, partition.leader_epoch, partition.end_offset)
}

/// The leader epoch in Metadata and DescribeTopicPartitions.
async fn leader_epoch(server: &TestServer) -> i32 {
    let topic = MetadataRequestTopic::default().with_name(Some(TopicName(text("t"))));
    let request = MetadataRequest::default().with_topics(Some(vec![topic]));
    let response = server.client().await.call(12, &request).await;
    let epoch = response.topics[0].partitions[0].leader_epoch;
    let topic = TopicRequest::default().with_name(TopicName(text("t")));
    let request = DescribeTopicPartitionsRequest::default()
        .with_topics(vec![topic])
        .with_response_partition_limit(10);
    let response = server.client().await.call(0, &request).await;
    assert_eq!(response.topics[0].partitions[0].leader_epoch, epoch);
    epoch
}

/// The leader epoch that ListOffsets returns for a time.
async fn epoch_listed(server: &TestServer, timestamp_ms: i64) -> i32 {
    list(server, timestamp_ms).await.leader_epoch
}

/// Batches of two records each: those at 0 and 4 stay, those at 2 and 6 are lost.
#[tokio::test(flavor = "multi_thread")]
async fn clients_pass_lost_offsets_at_the_end_and_in_the_middle() {
    let mut server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let batches = [[10, 20], [30, 40], [50, 60], [70, 80]].map(|times| plain(&times));
    for (batch, base) in batches.iter().zip([0, 2, 4, 6]) {
        assert_eq!(client.produce("t", 0, batch).await, (0, base));
    }
    prove(&server).await;
    drop(client);
    let lost = [stored(&batches[1], 2), stored(&batches[3], 6)];
    server.crash_and_damage(|wal| damage(wal, &lost)).await;
    assert_eq!(server.store().stats().lost.gaps, 2);

    // As recovered; recovered again from the damaged log; and from what was uploaded.
    for step in 0..3 {
        for is_committed in [false, true] {
            let fetched = |from| fetched(&server, from, is_committed);
            let label = format!("step {step}, committed {is_committed}");
            let both = vec![(0, 2, 2), (4, 6, 2)];
            assert_eq!(fetched(0).await, (both, 8, 8), "{label}");
            for from in [2, 3, 4, 5] {
                assert_eq!(fetched(from).await, (vec![(4, 6, 2)], 8, 8), "from {from}, {label}");
            }
            for from in [6, 7] {
                assert_eq!(fetched(from).await, (vec![(from, 8, 0)], 8, 8), "{label}");
            }
            assert_eq!(fetched(8).await, (vec![], 8, 8), "{label}");
        }
        for (time, found) in [
            (-1, (8, -1)),
            (-2, (0, -1)),
            (-3, (5, 60)),
            (15, (1, 20)),
            (25, (4, 50)),
            (60, (5, 60)),
            (61, (-1, -1)),
        ] {
            assert_eq!(listed(&server, time).await, found, "{time} in step {step}");
        }
        // Each opening that finds the damage raises the leader epoch. A consumer that has read what
        // was lost at the end is beyond the end of its epoch.
        let current = [1, 2, 2][step];
        assert_eq!(leader_epoch(&server).await, current);
        assert_eq!(epoch_end(&server, current, 0).await, (0, 0, 6));
        assert_eq!(epoch_end(&server, current, current).await, (0, current, 8));
        let unknown = ResponseError::UnknownLeaderEpoch.code();
        assert_eq!(epoch_end(&server, current + 1, 0).await, (unknown, -1, -1));
        let fenced = ResponseError::FencedLeaderEpoch.code();
        assert_eq!(epoch_end(&server, current - 1, 0).await, (fenced, -1, -1));
        assert_eq!(epoch_end(&server, -1, current + 1).await, (0, -1, -1));
        assert_eq!(epoch_listed(&server, 25).await, 0);
        // It has no record, and is forgotten if the next opening raises the epoch again.
        assert_eq!(epoch_listed(&server, -1).await, -1);
        match step {
            0 => server.crash().await,
            1 => {
                server.store().flush().await.unwrap();
                server.restart().await;
            }
            _ => {}
        }
    }
    // The gap at the end is in the middle now.
    let next = plain(&[90, 100]);
    assert_eq!(server.client().await.produce("t", 0, &next).await, (0, 8));
    for from in [6, 7, 8] {
        assert_eq!(fetched(&server, from, false).await, (vec![(8, 10, 2)], 10, 10));
    }
    assert_eq!(listed(&server, 61).await, (8, 90));
    assert_eq!((epoch_listed(&server, 25).await, epoch_listed(&server, 61).await), (0, 2));
    // Also after its upload and a start, where nothing is lost.
    server.store().flush().await.unwrap();
    server.restart().await;
    assert_eq!(leader_epoch(&server).await, 2);
    for (asked, end) in [(0, 6), (2, 10)] {
        assert_eq!(epoch_end(&server, 2, asked).await, (0, asked, end));
    }
    assert_eq!(epoch_end(&server, 2, 1).await, (0, 0, 6), "an epoch without records");
    // A topic that is created later has no other epoch.
    server.topic("later", 1, &[]).await;
    assert_eq!(server.client().await.produce("later", 0, &next).await, (0, 0));
    let found = server.client().await.fetch("later", 0, 0).await;
    assert_eq!(batch::leader_epoch(&found.2), 2);
}

/// A consumer that has read everything before the log start has read nothing that was lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_epoch_ends_at_the_log_start_at_least() {
    let mut server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let batches = [[10, 20], [30, 40]].map(|times| plain(&times));
    for (batch, base) in batches.iter().zip([0, 2]) {
        assert_eq!(client.produce("t", 0, batch).await, (0, base));
    }
    assert_eq!(delete(&mut client, "t", &[(0, 4)]).await, [(0, 0, 4)]);
    prove(&server).await;
    drop(client);
    server.crash_and_damage(|wal| damage(wal, &[stored(&batches[1], 2)])).await;
    assert_eq!(leader_epoch(&server).await, 1);
    assert_eq!(epoch_end(&server, 1, 0).await, (0, 0, 4));
}

/// A loss in a stream with the server's own state is counted and named like one in a partition.
#[tokio::test(flavor = "multi_thread")]
async fn lost_state_is_counted_and_named() {
    let mut server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let commit = OffsetCommitRequest::default()
        .with_group_id(GroupId(text("a-group-of-this-test")))
        .with_topics(vec![
            OffsetCommitRequestTopic::default().with_name(TopicName(text("t"))).with_partitions(
                vec![OffsetCommitRequestPartition::default().with_committed_offset(7)],
            ),
        ]);
    let committed = server.client().await.call(8, &commit).await;
    assert_eq!(committed.topics[0].partitions[0].error_code, 0);
    prove(&server).await;
    server
        .crash_and_damage(|wal| {
            let name = b"a-group-of-this-test";
            let found = wal.windows(name.len()).position(|bytes| bytes == name).unwrap();
            wal[found] ^= 1;
        })
        .await;
    let lost = server.store().stats().lost;
    assert_eq!((lost.gaps, lost.offsets, lost.skipped_gaps), (1, 1, 0));
    let degraded = server.store().degraded().into_iter();
    let detail = degraded.filter(|found| found.reason == Reason::OffsetsLost).map(|it| it.detail);
    let detail = detail.collect::<String>();
    let named = "lost: offsets 0 to 0 of the server's own state of groups offsets";
    assert!(detail.contains(named), "{detail}");
}

/// A loss at the end of a partition is still known after the upload: a producer that may have
/// appended the lost batch is not refused forever.
#[tokio::test(flavor = "multi_thread")]
async fn a_producer_whose_last_batch_is_lost_continues_after_an_upload() {
    let mut server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let batch = |sequence| encode(Compression::None, (9, 0, sequence), &[1, 2]);
    let mut client = server.client().await;
    for sequence in [0, 2] {
        assert_eq!(client.produce("t", 0, &batch(sequence)).await, (0, i64::from(sequence)));
    }
    prove(&server).await;
    drop(client);
    let lost = [stored(&batch(2), 2)];
    server.crash_and_damage(|wal| damage(wal, &lost)).await;
    server.store().flush().await.unwrap();
    server.restart().await;
    assert_eq!(server.store().stats().lost.gaps, 0);
    assert_eq!(server.client().await.produce("t", 0, &batch(4)).await, (0, 4));
}

/// A fetch that waits for more is answered with what moves its position.
#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_in_a_gap_at_the_end_does_not_wait() {
    let mut server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let batch = plain(&[10, 20]);
    assert_eq!(server.client().await.produce("t", 0, &batch).await, (0, 0));
    prove(&server).await;
    let lost = [stored(&batch, 0)];
    server.crash_and_damage(|wal| damage(wal, &lost)).await;
    let response = server.client().await.call(12, &fetch("t", &[(0, 0)], i32::MAX)).await;
    let records = response.responses[0].partitions[0].records.clone().unwrap();
    let header = BatchHeader::parse(&records).unwrap();
    assert_eq!((header.base_offset, header.last_offset_delta, header.record_count), (0, 1, 0));
}
