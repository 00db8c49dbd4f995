//! Topics that are compacted by key, over TCP.

use std::time::Duration;

use alluvium_stream::{Reason, StreamOffset};
use bytes::{Buf, Bytes};
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::*;
use kafka_protocol::records::{Compression, RecordBatchDecoder};

use super::configs::set_well;
use super::harness::{Client, HANG, TestServer, fetch, text};
use super::transactions::Producer;
use crate::batch::BatchHeader;
use crate::batch::tests::CODECS;
use crate::log_compaction::clean_end;
use crate::log_compaction::tests::encode;
use crate::producer_state::ProducerStates;

pub(super) const READ_COMMITTED: i8 = 1;
pub(super) const READ_UNCOMMITTED: i8 = 0;

const COMPACT: [(&str, &str); 2] =
    [("cleanup.policy", "compact"), ("min.cleanable.dirty.ratio", "0")];

async fn start() -> TestServer {
    TestServer::with(16 << 20, |config| {
        config.log_compaction_check_interval = Duration::from_millis(1);
    })
    .await
}

/// Key, value and time of each record.
pub(super) fn batch(records: &[(&str, Option<&str>, i64)], compression: Compression) -> Bytes {
    let own = |text: &str| text.as_bytes().to_vec();
    let records: Vec<_> =
        records.iter().map(|(key, value, ms)| (Some(own(key)), value.map(own), *ms)).collect();
    encode(&records, (-1, -1, -1), compression)
}

async fn produce(server: &TestServer, topic: &str, records: &[(&str, Option<&str>, i64)]) -> i64 {
    let mut client = server.client().await;
    let (code, base) = client.produce(topic, 0, &batch(records, Compression::None)).await;
    assert_eq!(code, 0);
    base
}

/// Waits until all current records are compacted.
async fn compacted(server: &TestServer, topic: &str) {
    server.store().flush().await.unwrap();
    let partition = server.server().topics.by_name(topic).unwrap().partitions[0].clone();
    let (id, end) = (partition.stream.id(), partition.last_stable_offset().0);
    let wait = async {
        while clean_end(server.store(), id) < end {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(HANG, wait).await.expect("it is not compacted");
}

pub(super) type Record = (u64, String, Option<String>);

/// Reads all records from an offset on, as a client does.
pub(super) async fn read_from(
    client: &mut Client,
    topic: &str,
    from: i64,
    isolation: i8,
) -> Vec<Record> {
    let (mut next, mut found) = (from, Vec::new());
    loop {
        let request = fetch(topic, &[(0, next)], 0).with_isolation_level(isolation);
        let response = client.call(12, &request).await;
        let partition = &response.responses[0].partitions[0];
        assert_eq!(partition.error_code, 0);
        let mut aborted: Vec<_> = partition
            .aborted_transactions
            .iter()
            .flatten()
            .map(|aborted| (aborted.first_offset, aborted.producer_id.0))
            .collect();
        aborted.sort_unstable();
        let mut dropped = Vec::new();
        let mut records = partition.records.clone().unwrap();
        if records.is_empty() {
            return found;
        }
        while records.has_remaining() {
            let header = BatchHeader::parse(&records).unwrap();
            let mut batch = records.split_to(header.len_bytes);
            let end = header.base_offset + i64::from(header.offsets());
            assert!(end > next, "{next}..{end}");
            // As the Java consumer does.
            while aborted.first().is_some_and(|(first, _)| *first < end) {
                dropped.push(aborted.remove(0).1);
            }
            if header.is_control() {
                if crate::batch::outcome(&batch) == Some(crate::batch::Outcome::Abort) {
                    dropped.retain(|id| *id != header.producer_id);
                }
            } else if header.record_count > 0
                && !(header.is_transactional() && dropped.contains(&header.producer_id))
            {
                let read = RecordBatchDecoder::decode(&mut batch).unwrap();
                let text = |bytes: Bytes| String::from_utf8(bytes.to_vec()).unwrap();
                found.extend(read.records.into_iter().filter(|r| r.offset >= next).map(|record| {
                    let key = record.key.map(text).unwrap_or_default();
                    (record.offset as u64, key, record.value.map(text))
                }));
            }
            next = end;
        }
    }
}

fn records(wanted: &[(u64, &str, Option<&str>)]) -> Vec<Record> {
    let own = |text: &str| text.to_owned();
    wanted.iter().map(|(offset, key, value)| (*offset, own(key), value.map(own))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_value_of_each_key_is_read_under_its_offset_and_time() {
    for codec in CODECS {
        let mut server = start().await;
        server.topic("t", 1, &COMPACT).await;
        let mut client = server.client().await;
        for round in 0..5 {
            let value = format!("{round}");
            let at_ms = 1_000 + round * 10;
            let both = [("a", Some(&*value), at_ms), ("b", Some(&*value), at_ms + 1)];
            let (code, _) = client.produce("t", 0, &batch(&both, codec)).await;
            assert_eq!(code, 0);
            if round == 1 {
                let once = [("once", Some("x"), at_ms + 2)];
                assert_eq!(client.produce("t", 0, &batch(&once, codec)).await, (0, 4));
            }
        }
        compacted(&server, "t").await;
        let wanted = records(&[(4, "once", Some("x")), (9, "a", Some("4")), (10, "b", Some("4"))]);
        for crash in [false, true] {
            for from in 0..11 {
                let behind: Vec<_> =
                    wanted.iter().filter(|record| record.0 >= from).cloned().collect();
                let got = read_from(&mut client, "t", from.cast_signed(), READ_UNCOMMITTED).await;
                assert_eq!(got, behind, "{codec:?} from {from}");
            }
            for (time_ms, found) in [(0, (4, 1_012)), (1_013, (9, 1_040)), (1_041, (10, 1_041))] {
                assert_eq!(offset_at(&mut client, "t", time_ms).await, found);
            }
            assert_eq!(offset_at(&mut client, "t", 1_042).await, (-1, -1));
            assert_eq!(offset_at(&mut client, "t", -3).await, (10, 1_041));
            assert_eq!(client.fetch("t", 0, 11).await, (0, 11, Bytes::new()));
            if !crash {
                server.crash().await;
                client = server.client().await;
            }
        }
    }
}

pub(super) async fn offset_at(client: &mut Client, topic: &str, timestamp_ms: i64) -> (i64, i64) {
    use list_offsets_request::*;
    let partition = ListOffsetsPartition::default().with_timestamp(timestamp_ms);
    let topic = ListOffsetsTopic::default()
        .with_name(TopicName(text(topic)))
        .with_partitions(vec![partition]);
    let request =
        ListOffsetsRequest::default().with_replica_id((-1).into()).with_topics(vec![topic]);
    let response = client.call(7, &request).await;
    let partition = &response.topics[0].partitions[0];
    assert_eq!(partition.error_code, 0);
    (partition.offset, partition.timestamp)
}

#[tokio::test(flavor = "multi_thread")]
async fn tombstones_are_removed_after_their_retention() {
    for (retention_ms, stays) in [("0", false), ("3600000", true)] {
        let server = start().await;
        let configs = [COMPACT[0], COMPACT[1], ("delete.retention.ms", retention_ms)];
        server.topic("t", 1, &configs).await;
        produce(&server, "t", &[("a", Some("1"), 1), ("b", Some("1"), 2)]).await;
        produce(&server, "t", &[("a", None, 3)]).await;
        compacted(&server, "t").await;
        let mut client = server.client().await;
        let first = read_from(&mut client, "t", 0, READ_UNCOMMITTED).await;
        assert_eq!(first, records(&[(1, "b", Some("1")), (2, "a", None)]), "the first time");
        produce(&server, "t", &[("b", Some("2"), 4)]).await;
        compacted(&server, "t").await;
        let wanted = match stays {
            true => records(&[(2, "a", None), (3, "b", Some("2"))]),
            false => records(&[(3, "b", Some("2"))]),
        };
        assert_eq!(read_from(&mut client, "t", 0, READ_UNCOMMITTED).await, wanted);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_of_aborted_transactions_are_removed_and_committed_ones_stay() {
    for retention_ms in ["0", "3600000"] {
        let server = start().await;
        let configs = [COMPACT[0], COMPACT[1], ("delete.retention.ms", retention_ms)];
        let topic_id = server.topic("t", 1, &configs).await;
        let mut producer = Producer::init(&server, "a", false).await;
        producer.add("t", &[0]).await;
        // Keys 0 and 1 each time, at 0, 3 and 6.
        assert_eq!(producer.produce("t", topic_id, 0).await, (0, 0));
        assert_eq!(producer.end(true).await, 0);
        producer.add("t", &[0]).await;
        assert_eq!(producer.produce("t", topic_id, 0).await, (0, 3));
        assert_eq!(producer.end(false).await, 0);
        let mut client = server.client().await;
        let keys = |records: Vec<Record>| -> Vec<u64> {
            records.into_iter().map(|record| record.0).collect()
        };
        for pass in 0..3 {
            compacted(&server, "t").await;
            for isolation in [READ_COMMITTED, READ_UNCOMMITTED] {
                let got = keys(read_from(&mut client, "t", 0, isolation).await);
                assert_eq!(got[..2], [0, 1], "pass {pass}");
            }
            produce(&server, "t", &[("other", Some("x"), 1)]).await;
        }
        // Whether the marker has gone or not, the producer's later records are not treated as
        // aborted, and are compacted only when they are stable.
        producer.add("t", &[0]).await;
        assert_eq!(producer.produce("t", topic_id, 0).await, (0, 9));
        server.store().flush().await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(keys(read_from(&mut client, "t", 0, READ_COMMITTED).await)[..2], [0, 1]);
        assert_eq!(producer.end(true).await, 0);
        let got = keys(read_from(&mut client, "t", 0, READ_COMMITTED).await);
        assert_eq!(got[got.len() - 2..], [9, 10], "{got:?}");
        compacted(&server, "t").await;
        assert_eq!(keys(read_from(&mut client, "t", 0, READ_COMMITTED).await), [8, 9, 10]);
    }
}

/// A partition drops the state of aborted transactions together with their records: in memory, in
/// the checkpoint, and after a restart.
#[tokio::test(flavor = "multi_thread")]
async fn aborted_transactions_are_dropped_with_their_records() {
    let mut server = start().await;
    let topic_id = server.topic("t", 1, &COMPACT).await;
    let mut producer = Producer::init(&server, "a", false).await;
    for _ in 0..20 {
        producer.add("t", &[0]).await;
        assert_eq!(producer.produce("t", topic_id, 0).await.0, 0);
        assert_eq!(producer.end(false).await, 0);
    }
    let partition =
        |server: &TestServer| server.server().topics.by_name("t").unwrap().partitions[0].clone();
    compacted(&server, "t").await;
    assert_eq!(partition(&server).aborted_transactions(), 0);

    // The next ones are folded into a checkpoint that does not contain those; nothing is compacted
    // meanwhile.
    producer.add("t", &[0]).await;
    let (code, base) = producer.produce("t", topic_id, 0).await;
    assert_eq!(code, 0);
    let mut other = Producer::init(&server, "b", false).await;
    other.add("t", &[0]).await;
    assert_eq!(other.produce("t", topic_id, 0).await.0, 0);
    assert_eq!(other.end(false).await, 0);
    server.store().flush().await.unwrap();
    let checkpoint = partition(&server).stream.replay().checkpoint.unwrap();
    let states = ProducerStates::decode(&checkpoint, 0).unwrap();
    assert_eq!(states.aborted_in(0, u64::MAX).len(), 1, "the one that could not be compacted");

    server.restart().await;
    assert_eq!(partition(&server).aborted_transactions(), 1);
    let mut client = server.client().await;
    let got = read_from(&mut client, "t", 0, READ_COMMITTED).await;
    assert!(got.is_empty(), "the first one is open: {got:?}");
    let mut producer = Producer::init(&server, "a", false).await;
    producer.add("t", &[0]).await;
    let (code, next) = producer.produce("t", topic_id, 0).await;
    assert_eq!(code, 0);
    assert_eq!(producer.end(true).await, 0);
    let got = read_from(&mut client, "t", base, READ_COMMITTED).await;
    let offsets: Vec<_> = got.iter().map(|record| record.0.cast_signed()).collect();
    assert_eq!(offsets, [next, next + 1], "and was aborted by its producer's next incarnation");
}

/// To a reader that has read their records before they must not appear committed.
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_with_records_of_a_dropped_transaction_reads_again() {
    let server = start().await;
    let topic_id = server.topic("t", 1, &COMPACT).await;
    let mut producer = Producer::init(&server, "a", false).await;
    producer.add("t", &[0]).await;
    assert_eq!(producer.produce("t", topic_id, 0).await, (0, 0));
    assert_eq!(producer.end(false).await, 0);
    let partition = server.server().topics.by_name("t").unwrap().partitions[0].clone();
    let from = StreamOffset(0);
    let before = partition.read_snapshot();
    let old = partition.stream.fetch_now(from, 1 << 20).unwrap().batches;
    let aborted = partition.aborted_among(from, &old, before).unwrap();
    assert_eq!(aborted.len(), 1);

    compacted(&server, "t").await;
    assert!(partition.aborted_among(from, &old, before).is_none());
    let behind = old.last().unwrap().end();
    assert!(partition.aborted_among(behind, &old, before).is_some(), "no record of it is left");
    let before = partition.read_snapshot();
    let new = partition.stream.fetch(from, 1 << 20).await.unwrap().batches;
    assert!(partition.aborted_among(from, &new, before).unwrap().is_empty());
    assert!(new.iter().all(|batch| {
        let header = BatchHeader::parse(&batch.payload).unwrap();
        header.is_control() || header.record_count == 0
    }));
}

/// The pass is interrupted where it waits for objects.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_during_a_pass_loses_nothing() {
    let mut server = TestServer::simulated_with(16 << 20, |config| {
        config.log_compaction_check_interval = Duration::from_millis(1);
    })
    .await;
    server.topic("t", 1, &COMPACT).await;
    for round in 0..4 {
        let value = format!("{round}");
        let held = server.hold_objects().await;
        produce(&server, "t", &[("a", Some(&value), 1), (&value, Some("x"), 1)]).await;
        // An upload checks the ownership of the objects, which is held too.
        drop(held);
        server.store().flush().await.unwrap();
        let held = server.hold_objects().await;
        server.crash_while(held).await;
        let mut client = server.client().await;
        let got = read_from(&mut client, "t", 0, READ_UNCOMMITTED).await;
        let last_of_a = got.iter().rev().find(|record| record.1 == "a").unwrap();
        assert_eq!(last_of_a.2.as_deref(), Some(&*value));
        for key in 0..=round {
            assert!(got.iter().any(|record| record.1 == key.to_string()), "{key}: {got:?}");
        }
    }
    compacted(&server, "t").await;
    let mut client = server.client().await;
    let got = read_from(&mut client, "t", 0, READ_UNCOMMITTED).await;
    assert_eq!(got.len(), 5, "{got:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn records_without_a_key_are_refused() {
    let server = start().await;
    server.topic("t", 1, &COMPACT).await;
    server.topic("u", 1, &[]).await;
    let mut client = server.client().await;
    for codec in [Compression::None, Compression::Gzip, Compression::Zstd] {
        let records = [(Some(vec![1]), None, 1), (None, Some(vec![1]), 1)];
        let batch = encode(&records, (-1, -1, -1), codec);
        assert_eq!(client.produce("t", 0, &batch).await, (ResponseError::InvalidRecord.code(), -1));
        assert_eq!(client.produce("u", 0, &batch).await.0, 0);
    }
    assert_eq!(produce(&server, "t", &[("", Some("an empty key is one"), 1)]).await, 0);
}

/// Both policies: old records are removed, and of the others the last ones stay.
#[tokio::test(flavor = "multi_thread")]
async fn compacted_topics_can_have_a_retention() {
    let mut server = TestServer::with(16 << 20, |config| {
        config.log_compaction_check_interval = Duration::from_millis(1);
        config.retention_check_interval = Duration::from_millis(1);
    })
    .await;
    let now = crate::partition::unix_time_ms();
    let configs = [
        ("cleanup.policy", "compact,delete"),
        ("min.cleanable.dirty.ratio", "0"),
        ("retention.ms", "3600000"),
    ];
    server.topic("t", 1, &configs).await;
    produce(&server, "t", &[("old", Some("x"), now - 7_200_000)]).await;
    server.store().flush().await.unwrap();
    produce(&server, "t", &[("a", Some("1"), now), ("b", Some("1"), now), ("a", Some("2"), now)])
        .await;
    compacted(&server, "t").await;
    let mut client = server.client().await;
    let log_start = || server.server().topics.by_name("t").unwrap().partitions[0].log_start();
    let from = log_start();
    let got = read_from(&mut client, "t", from, READ_UNCOMMITTED).await;
    let wanted = records(&[(2, "b", Some("1")), (3, "a", Some("2"))]);
    assert!(got.ends_with(&wanted), "{got:?}");
    server.restart().await;
    let metadata = server.store().meta("cleaned/");
    assert_eq!(metadata.len(), 1);
    let delete = DeleteTopicsRequest::default().with_topic_names(vec![TopicName(text("t"))]);
    assert_eq!(server.client().await.call(5, &delete).await.responses[0].error_code, 0);
    assert_eq!(server.store().meta("cleaned/").len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn compaction_lag_limits_apply_regardless_of_the_dirty_ratio() {
    let server = start().await;
    let now = crate::partition::unix_time_ms();
    let lag = [COMPACT[0], COMPACT[1], ("min.compaction.lag.ms", "3600000")];
    server.topic("recent", 1, &lag).await;
    let old =
        [COMPACT[0], ("min.cleanable.dirty.ratio", "1"), ("max.compaction.lag.ms", "3600000")];
    server.topic("old", 1, &old).await;
    server.topic("never", 1, &[COMPACT[0], ("min.cleanable.dirty.ratio", "1")]).await;
    for topic in ["recent", "old", "never"] {
        produce(&server, topic, &[("a", Some("1"), now - 7_200_000)]).await;
        produce(&server, topic, &[("a", Some("2"), now)]).await;
    }
    compacted(&server, "old").await;
    let mut client = server.client().await;
    let last = records(&[(1, "a", Some("2"))]);
    assert_eq!(read_from(&mut client, "old", 0, READ_UNCOMMITTED).await, last);
    tokio::time::sleep(Duration::from_millis(50)).await;
    for topic in ["recent", "never"] {
        assert_eq!(read_from(&mut client, topic, 0, READ_UNCOMMITTED).await.len(), 2, "{topic}");
    }
}

/// The resource type.
const TOPIC: i8 = 2;

/// While the object store is unavailable: the backlog is visible, and is processed soon after.
#[tokio::test(flavor = "multi_thread")]
async fn compaction_resumes_soon_after_an_outage_of_the_object_store() {
    let server = start().await;
    server.topic("t", 1, &COMPACT).await;
    produce(&server, "t", &[("a", Some("1"), 1)]).await;
    compacted(&server, "t").await;
    // Not to be compacted before the outage.
    let mut client = server.client().await;
    let ratio = "min.cleanable.dirty.ratio";
    set_well(&mut client, (TOPIC, "t"), ratio, "1").await;
    produce(&server, "t", &[("a", Some("2"), 2), ("b", Some("3"), 3)]).await;
    server.store().flush().await.unwrap();
    let (there, away) = (server.objects().join("streams"), server.objects().join("away"));
    std::fs::rename(&there, &away).unwrap();
    set_well(&mut client, (TOPIC, "t"), ratio, "0").await;
    let metrics = &server.server().metrics;
    let fails = async {
        // More than once: it is retried.
        while metrics.log_compaction_failures.get() < 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(HANG, fails).await.expect("it is not retried");
    assert_eq!(metrics.log_compaction_failing.get(), 1);
    assert!(metrics.log_compaction_dirtiest.get() > 0.0);
    assert!(metrics.log_compaction_dirty_bytes.get() > 0);
    assert!(metrics.log_compaction_next_retry.get() > metrics.log_compaction_last_success.get());
    let degraded = server.store().degraded();
    let failing = degraded.iter().find(|it| it.reason == Reason::LogCompactionFailing).unwrap();
    assert!(failing.detail.contains("partition 0 of topic t"), "{failing:?}");

    std::fs::remove_dir_all(&there).ok();
    std::fs::rename(&away, &there).unwrap();
    compacted(&server, "t").await;
    let is_failing =
        || server.store().degraded().iter().any(|it| it.reason == Reason::LogCompactionFailing);
    let calms = async {
        // It is reported last, after the metrics.
        while is_failing() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(HANG, calms).await.expect("it still fails");
    assert_eq!(metrics.log_compaction_failing.get(), 0);
    assert_eq!(metrics.log_compaction_next_retry.get(), 0.0);
}

/// The next check would be in an hour.
#[tokio::test(flavor = "multi_thread")]
async fn the_compaction_check_interval_can_be_changed_at_run_time() {
    use incremental_alter_configs_request::*;
    let server = TestServer::with(16 << 20, |config| {
        config.log_compaction_check_interval = Duration::from_secs(3_600);
    })
    .await;
    server.topic("t", 1, &COMPACT).await;
    produce(&server, "t", &[("a", Some("1"), 1), ("a", Some("2"), 2)]).await;
    let backoff = AlterableConfig::default()
        .with_name(text("log.cleaner.backoff.ms"))
        .with_value(Some(text("1")));
    let brokers = AlterConfigsResource::default().with_resource_type(4).with_configs(vec![backoff]);
    let request = IncrementalAlterConfigsRequest::default().with_resources(vec![brokers]);
    assert_eq!(server.client().await.call(1, &request).await.responses[0].error_code, 0);
    compacted(&server, "t").await;
}
