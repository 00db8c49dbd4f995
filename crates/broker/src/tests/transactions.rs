//! Transactions over TCP: what producers may do, what readers see, what a crash leaves.

mod bounds;
mod damaged;
mod damaged_decisions;
mod refused;
mod topics;

use std::collections::HashMap;
use std::pin::pin;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use futures::poll;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::*;
use kafka_protocol::records::Compression;
use tokio::runtime::Handle;

use super::harness::{Client, TestServer, fetch, produce, text};
use crate::batch::tests::{encode, transactional};
use crate::batch::{BatchHeader, Outcome};
use crate::groups::Position;
use crate::topics::{GROUP_TOPIC, TopicRef};
use crate::transactions::{Transactions, forget_unused};

const COORDINATOR_NOT_AVAILABLE: i16 = ResponseError::CoordinatorNotAvailable.code();
const INVALID_TOPIC: i16 = ResponseError::InvalidTopicException.code();
const INVALID_REQUEST: i16 = ResponseError::InvalidRequest.code();
const POLICY_VIOLATION: i16 = ResponseError::PolicyViolation.code();
const INVALID_PRODUCER_EPOCH: i16 = ResponseError::InvalidProducerEpoch.code();
const INVALID_TXN_STATE: i16 = ResponseError::InvalidTxnState.code();
const INVALID_PRODUCER_ID_MAPPING: i16 = ResponseError::InvalidProducerIdMapping.code();
const PRODUCER_FENCED: i16 = ResponseError::ProducerFenced.code();
const TRANSACTION_ABORTABLE: i16 = ResponseError::TransactionAbortable.code();

/// A transactional producer of version 1 or version 2 of transactions (KIP-890).
pub(super) struct Producer {
    client: Client,
    transactional_id: &'static str,
    id: i64,
    epoch: i16,
    /// The next sequence of each partition.
    sequences: HashMap<(String, i32), i32>,
    version_2: bool,
}

impl Producer {
    pub(super) async fn init(
        server: &TestServer,
        transactional_id: &'static str,
        version_2: bool,
    ) -> Self {
        let mut client = server.client().await;
        let (id, epoch) = init(&mut client, transactional_id, 60_000).await.unwrap();
        Self { client, transactional_id, id, epoch, sequences: HashMap::new(), version_2 }
    }

    fn tid(&self) -> TransactionalId {
        TransactionalId(text(self.transactional_id))
    }

    pub(super) async fn add(&mut self, topic: &str, partitions: &[i32]) -> i16 {
        use add_partitions_to_txn_request::AddPartitionsToTxnTopic;
        let topic = AddPartitionsToTxnTopic::default()
            .with_name(TopicName(text(topic)))
            .with_partitions(partitions.to_vec());
        let request = AddPartitionsToTxnRequest::default()
            .with_v3_and_below_transactional_id(self.tid())
            .with_v3_and_below_producer_id(ProducerId(self.id))
            .with_v3_and_below_producer_epoch(self.epoch)
            .with_v3_and_below_topics(vec![topic]);
        let response = self.client.call(3, &request).await;
        let topic = &response.results_by_topic_v3_and_below[0];
        topic.results_by_partition[0].partition_error_code
    }

    /// Produces one batch; returns error code and base offset.
    pub(super) async fn produce(
        &mut self,
        topic: &str,
        topic_id: uuid::Uuid,
        partition: i32,
    ) -> (i16, i64) {
        let encode = |of| encode(Compression::None, of, &[1, 2]);
        self.produce_batch((topic, topic_id), partition, encode).await
    }

    /// Produces a batch that is encoded for this producer id, epoch and sequence.
    pub(super) async fn produce_batch(
        &mut self,
        (topic, topic_id): (&str, uuid::Uuid),
        partition: i32,
        encode: impl FnOnce((i64, i16, i32)) -> Bytes,
    ) -> (i16, i64) {
        let key = (topic.to_owned(), partition);
        let sequence = self.sequences.get(&key).copied().unwrap_or(0);
        let batch = transactional(&encode((self.id, self.epoch, sequence)));
        let (version, name) = if self.version_2 { (13, "") } else { (9, topic) };
        let mut request =
            produce(name, partition, &batch, -1).with_transactional_id(Some(self.tid()));
        if self.version_2 {
            request.topic_data[0].topic_id = topic_id;
        }
        let response = self.client.call(version, &request).await;
        let partition = &response.responses[0].partition_responses[0];
        if partition.error_code == 0 {
            let next = sequence + BatchHeader::parse(&batch).unwrap().offsets() as i32;
            self.sequences.insert(key, next);
        }
        (partition.error_code, partition.base_offset)
    }

    /// The producer in the coordinator's form.
    pub(super) fn identity(&self) -> crate::transactions::Producer<'static> {
        let (transactional_id, id, epoch) = (self.transactional_id, self.id, self.epoch);
        crate::transactions::Producer { transactional_id, id, epoch }
    }

    /// Connects to the restarted server.
    pub(super) async fn reconnect(&mut self, server: &TestServer) {
        self.client = server.client().await;
    }

    pub(super) async fn end(&mut self, commit: bool) -> i16 {
        let request = EndTxnRequest::default()
            .with_transactional_id(self.tid())
            .with_producer_id(ProducerId(self.id))
            .with_producer_epoch(self.epoch)
            .with_committed(commit);
        let response = self.client.call(if self.version_2 { 5 } else { 3 }, &request).await;
        if self.version_2 && response.error_code == 0 {
            (self.id, self.epoch) = (response.producer_id.0, response.producer_epoch);
            self.sequences.clear();
        }
        response.error_code
    }

    pub(super) async fn commit_offset(&mut self, group: &str, topic: &str, offset: i64) -> i16 {
        self.commit_offsets(group, topic, &[0], offset).await
    }

    /// Commits the same offset for some partitions; returns the error code of the first one.
    pub(super) async fn commit_offsets(
        &mut self,
        group: &str,
        topic: &str,
        partitions: &[i32],
        offset: i64,
    ) -> i16 {
        let request = self.offsets_request(group, topic, partitions, offset);
        let version = if self.version_2 { 5 } else { 3 };
        self.commit_offsets_by(version, &request).await
    }

    fn offsets_request(
        &self,
        group: &str,
        topic: &str,
        partitions: &[i32],
        offset: i64,
    ) -> TxnOffsetCommitRequest {
        use txn_offset_commit_request::*;
        let partition = |index: &i32| {
            TxnOffsetCommitRequestPartition::default()
                .with_partition_index(*index)
                .with_committed_offset(offset)
        };
        let topic = TxnOffsetCommitRequestTopic::default()
            .with_name(TopicName(text(topic)))
            .with_partitions(partitions.iter().map(partition).collect());
        TxnOffsetCommitRequest::default()
            .with_transactional_id(self.tid())
            .with_group_id(GroupId(text(group)))
            .with_producer_id(ProducerId(self.id))
            .with_producer_epoch(self.epoch)
            .with_topics(vec![topic])
    }

    async fn commit_offsets_by(&mut self, version: i16, request: &TxnOffsetCommitRequest) -> i16 {
        self.client.call(version, request).await.topics[0].partitions[0].error_code
    }

    pub(super) async fn add_offsets(&mut self, group: &str) -> i16 {
        let request = AddOffsetsToTxnRequest::default()
            .with_transactional_id(self.tid())
            .with_producer_id(ProducerId(self.id))
            .with_producer_epoch(self.epoch)
            .with_group_id(GroupId(text(group)));
        self.client.call(3, &request).await.error_code
    }
}

async fn init(client: &mut Client, id: &str, timeout_ms: i32) -> Result<(i64, i16), i16> {
    let request = InitProducerIdRequest::default()
        .with_transactional_id(Some(TransactionalId(text(id))))
        .with_transaction_timeout_ms(timeout_ms);
    let response = client.call(4, &request).await;
    match response.error_code {
        0 => Ok((response.producer_id.0, response.producer_epoch)),
        code => Err(code),
    }
}

/// What a reader of committed records gets from the start of a partition.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    high_watermark: i64,
    stable_end: i64,
    /// Base offsets, markers included.
    batches: Vec<u64>,
    /// Producer id and first offset.
    aborted: Vec<(i64, i64)>,
}

async fn committed(server: &TestServer, topic: &str, partition: i32) -> Seen {
    let request = fetch(topic, &[(partition, 0)], 0).with_isolation_level(1);
    let response = server.client().await.call(12, &request).await;
    let partition = &response.responses[0].partitions[0];
    assert_eq!(partition.error_code, 0);
    let mut rest: &Bytes = partition.records.as_ref().unwrap();
    let mut batches = Vec::new();
    let mut left;
    while let Some(header) = BatchHeader::parse(rest) {
        batches.push(header.base_offset.unsigned_abs());
        left = rest.slice(header.len_bytes..);
        rest = &left;
    }
    let aborted = partition.aborted_transactions.iter().flatten();
    Seen {
        high_watermark: partition.high_watermark,
        stable_end: partition.last_stable_offset,
        batches,
        aborted: aborted.map(|a| (a.producer_id.0, a.first_offset)).collect(),
    }
}

fn seen(high_watermark: i64, stable_end: i64, batches: &[u64], aborted: &[(i64, i64)]) -> Seen {
    Seen { high_watermark, stable_end, batches: batches.to_vec(), aborted: aborted.to_vec() }
}

/// The committed offset of partition 0 for a reader that requires stable offsets: error code and
/// offset.
async fn offset(server: &TestServer, group: &str, topic: &str) -> (i16, i64) {
    use offset_fetch_request::*;
    let topic = OffsetFetchRequestTopics::default()
        .with_name(TopicName(text(topic)))
        .with_partition_indexes(vec![0]);
    let group = OffsetFetchRequestGroup::default()
        .with_group_id(GroupId(text(group)))
        .with_topics(Some(vec![topic]));
    let request = OffsetFetchRequest::default().with_groups(vec![group]).with_require_stable(true);
    let response = server.client().await.call(8, &request).await;
    let partition = &response.groups[0].topics[0].partitions[0];
    (partition.error_code, partition.committed_offset)
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_of_committed_records_see_whole_transactions_only() {
    for version_2 in [false, true] {
        let server = TestServer::start().await;
        let topic_id = server.topic("t", 2, &[]).await;
        let mut producer = Producer::init(&server, "a", version_2).await;
        let id = producer.id;
        if !version_2 {
            assert_eq!(producer.produce("t", topic_id, 0).await, (INVALID_TXN_STATE, -1));
            assert_eq!(producer.add("t", &[0, 1]).await, 0);
        }
        assert_eq!(producer.produce("t", topic_id, 0).await, (0, 0));
        assert_eq!(committed(&server, "t", 0).await, seen(2, 0, &[], &[]));
        let (_, _, all) = server.client().await.fetch("t", 0, 0).await;
        assert!(!all.is_empty(), "others see the records at once");
        assert_eq!(producer.end(true).await, 0);
        assert_eq!(committed(&server, "t", 0).await, seen(3, 3, &[0, 2], &[]));

        // Another producer's plain batch inside an aborted transaction.
        if !version_2 {
            assert_eq!(producer.add("t", &[0]).await, 0);
        }
        assert_eq!(producer.produce("t", topic_id, 0).await, (0, 3));
        let plain = crate::batch::tests::plain(&[1]);
        assert_eq!(server.client().await.produce("t", 0, &plain).await, (0, 5));
        assert_eq!(committed(&server, "t", 0).await, seen(6, 3, &[0, 2], &[]));
        assert_eq!(producer.end(false).await, 0);
        let all = seen(7, 7, &[0, 2, 3, 5, 6], &[(id, 3)]);
        assert_eq!(committed(&server, "t", 0).await, all);
        assert_eq!(producer.epoch, if version_2 { 2 } else { 0 });
        // A partition that was added and not written to gets a marker; one that was not added gets
        // none.
        let markers = if version_2 { seen(0, 0, &[], &[]) } else { seen(1, 1, &[0], &[]) };
        assert_eq!(committed(&server, "t", 1).await, markers);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_producer_fences_the_older_and_aborts_its_transaction() {
    for version_2 in [false, true] {
        let server = TestServer::start().await;
        let topic_id = server.topic("t", 1, &[]).await;
        let mut old = Producer::init(&server, "a", version_2).await;
        old.add("t", &[0]).await;
        assert_eq!(old.produce("t", topic_id, 0).await, (0, 0));
        let new = Producer::init(&server, "a", version_2).await;
        // The abort uses up one epoch.
        assert_eq!((new.id, new.epoch), (old.id, 2));
        assert_eq!(committed(&server, "t", 0).await, seen(3, 3, &[0, 2], &[(old.id, 0)]));
        assert_eq!(old.produce("t", topic_id, 0).await, (INVALID_PRODUCER_EPOCH, -1));
        assert_eq!(old.add("t", &[0]).await, PRODUCER_FENCED);
        assert_eq!(old.end(true).await, PRODUCER_FENCED);
        assert_eq!(old.add_offsets("g").await, PRODUCER_FENCED);
        assert_eq!(old.commit_offset("g", "t", 1).await, INVALID_PRODUCER_EPOCH);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn staged_offsets_take_effect_at_the_commit_and_not_at_an_abort() {
    for version_2 in [false, true] {
        let server = TestServer::start().await;
        server.topic("t", 1, &[]).await;
        let mut producer = Producer::init(&server, "a", version_2).await;
        if !version_2 {
            assert_eq!(producer.commit_offset("g", "t", 9).await, INVALID_TXN_STATE);
            assert_eq!(producer.add_offsets("g").await, 0);
        }
        assert_eq!(producer.commit_offset("g", "t", 9).await, 0);
        assert_eq!(
            offset(&server, "g", "t").await,
            (ResponseError::UnstableOffsetCommit.code(), -1),
            "the offset may still be committed"
        );
        assert_eq!(producer.end(false).await, 0);
        assert_eq!(offset(&server, "g", "t").await, (0, -1));
        if !version_2 {
            assert_eq!(producer.add_offsets("g").await, 0);
        }
        assert_eq!(producer.commit_offset("g", "t", 9).await, 0);
        assert_eq!(producer.commit_offset("g", "t", 11).await, 0);
        assert_eq!(producer.end(true).await, 0);
        assert_eq!(offset(&server, "g", "t").await, (0, 11));
        if !version_2 {
            assert_eq!(producer.add_offsets("g").await, 0);
        }
        assert_eq!(
            producer.commit_offset("g", "unknown", 1).await,
            ResponseError::UnknownTopicOrPartition.code()
        );
    }
}

/// Otherwise a power cut could undo what was visible.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_is_visible_once_its_marker_is_durable() {
    let server = TestServer::simulated(16 << 20).await;
    let topic_id = server.topic("t", 1, &[]).await;
    let mut producer = Producer::init(&server, "a", true).await;
    assert_eq!(producer.produce("t", topic_id, 0).await, (0, 0));
    server.hold_disk(true);
    let (id, epoch) = (producer.id, producer.epoch);
    let end = tokio::spawn(async move { (producer.end(true).await, producer.epoch) });
    let partition = server.server().topics.by_name("t").unwrap().partitions[0].clone();
    while partition.stream.next_offset().0 < 3 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(partition.producer_epoch(id), Some(epoch + 1), "the marker is appended");
    assert_eq!(committed(&server, "t", 0).await, seen(2, 0, &[], &[]));
    server.hold_disk(false);
    assert_eq!(end.await.unwrap(), (0, epoch + 1));
    assert_eq!(committed(&server, "t", 0).await, seen(3, 3, &[0, 2], &[]));
}

#[tokio::test(flavor = "multi_thread")]
async fn open_transactions_continue_after_a_crash() {
    for uploaded in [false, true] {
        for commit in [false, true] {
            let mut server = TestServer::start().await;
            let topic_id = server.topic("t", 1, &[]).await;
            let mut producer = Producer::init(&server, "a", true).await;
            let id = producer.id;
            assert_eq!(producer.produce("t", topic_id, 0).await, (0, 0));
            assert_eq!(producer.commit_offset("g", "t", 5).await, 0);
            if uploaded {
                server.store().flush().await.unwrap();
            }
            server.crash().await;
            assert_eq!(committed(&server, "t", 0).await, seen(2, 0, &[], &[]));
            assert_eq!(
                offset(&server, "g", "t").await,
                (ResponseError::UnstableOffsetCommit.code(), -1)
            );
            producer.client = server.client().await;
            assert_eq!(producer.produce("t", topic_id, 0).await, (0, 2));
            assert_eq!(producer.end(commit).await, 0);
            let aborted: &[_] = if commit { &[] } else { &[(id, 0)] };
            let all = seen(5, 5, &[0, 2, 4], aborted);
            assert_eq!(committed(&server, "t", 0).await, all);
            assert_eq!(offset(&server, "g", "t").await, (0, if commit { 5 } else { -1 }));
            if uploaded {
                server.store().flush().await.unwrap();
            }
            server.crash().await;
            assert_eq!(committed(&server, "t", 0).await, all);
            assert_eq!(offset(&server, "g", "t").await, (0, if commit { 5 } else { -1 }));
        }
    }
}

/// The log ends after the decision, before or between the markers.
#[tokio::test(flavor = "multi_thread")]
async fn a_decided_transaction_is_completed_after_a_crash() {
    for markers in 0..=2 {
        for outcome in [Outcome::Commit, Outcome::Abort] {
            for version_2 in [false, true] {
                let mut server = TestServer::start().await;
                let topic_id = server.topic("t", 2, &[]).await;
                let mut producer = Producer::init(&server, "a", version_2).await;
                let id = producer.id;
                if !version_2 {
                    producer.add("t", &[0, 1]).await;
                    producer.add_offsets("g").await;
                }
                assert_eq!(producer.produce("t", topic_id, 0).await, (0, 0));
                producer.sequences.clear();
                assert_eq!(producer.produce("t", topic_id, 1).await, (0, 0));
                assert_eq!(producer.commit_offset("g", "t", 5).await, 0);
                let marker =
                    server.server().transactions.decide_only("a", outcome, version_2).await;
                for partition in &server.server().topics.by_name("t").unwrap().partitions[..markers]
                {
                    let marker = partition.append_marker(marker.0, marker.1, outcome).unwrap();
                    marker.await.unwrap();
                }
                server.crash().await;
                let aborted: &[_] = if outcome == Outcome::Commit { &[] } else { &[(id, 0)] };
                for partition in 0..2 {
                    let what = format!("{markers} markers, {outcome:?}, {partition}");
                    // An existing marker is written again.
                    let wanted = match (partition as usize) < markers {
                        true => seen(4, 4, &[0, 2, 3], aborted),
                        false => seen(3, 3, &[0, 2], aborted),
                    };
                    assert_eq!(committed(&server, "t", partition).await, wanted, "{what}");
                }
                let committed_offset = if outcome == Outcome::Commit { 5 } else { -1 };
                assert_eq!(offset(&server, "g", "t").await, (0, committed_offset));
                let again = Producer::init(&server, "a", version_2).await;
                assert_eq!(again.id, id);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timed_out_transaction_is_aborted_and_its_producer_continues() {
    let server = TestServer::start().await;
    let topic_id = server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let (id, epoch) = init(&mut client, "a", 100).await.unwrap();
    let mut producer = Producer {
        client,
        transactional_id: "a",
        id,
        epoch,
        sequences: HashMap::new(),
        version_2: true,
    };
    assert_eq!(producer.produce("t", topic_id, 0).await, (0, 0));
    let wanted = seen(3, 3, &[0, 2], &[(id, 0)]);
    let aborted = async {
        while committed(&server, "t", 0).await != wanted {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(super::harness::HANG, aborted).await.unwrap();
    assert_eq!(producer.produce("t", topic_id, 0).await, (INVALID_PRODUCER_EPOCH, -1));
    assert_eq!(producer.end(true).await, INVALID_TXN_STATE);
    producer.version_2 = false;
    assert_eq!(producer.end(false).await, PRODUCER_FENCED);
    producer.version_2 = true;
    assert_eq!(producer.end(false).await, 0);
    assert_eq!((producer.id, producer.epoch), (id, epoch + 1));
    assert_eq!(producer.produce("t", topic_id, 0).await, (0, 3));
    assert_eq!(producer.end(true).await, 0);
    for timeout_ms in [0, -1, 15 * 60 * 1_000 + 1] {
        assert_eq!(
            init(&mut producer.client, "b", timeout_ms).await,
            Err(ResponseError::InvalidTransactionTimeout.code()),
            "{timeout_ms}"
        );
    }
    assert_eq!(init(&mut producer.client, "", 1_000).await, Err(INVALID_REQUEST));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_transaction_can_be_requested_again() {
    let server = TestServer::start().await;
    let topic_id = server.topic("t", 1, &[]).await;
    for version_2 in [false, true] {
        let id = if version_2 { "b" } else { "a" };
        let mut producer = Producer::init(&server, id, version_2).await;
        producer.add("t", &[0]).await;
        assert_eq!(producer.produce("t", topic_id, 0).await.0, 0);
        let before = producer.epoch;
        assert_eq!(producer.end(true).await, 0);
        let after = (producer.id, producer.epoch);
        producer.epoch = before;
        assert_eq!(producer.end(true).await, 0, "the answer was lost");
        assert_eq!((producer.id, producer.epoch), after);
        producer.epoch = before;
        assert_eq!(producer.end(false).await, INVALID_TXN_STATE);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_can_list_transactions_and_end_hanging_ones() {
    use describe_producers_request::TopicRequest;
    use write_txn_markers_request::*;
    let server = TestServer::start().await;
    let topic_id = server.topic("t", 2, &[]).await;
    let mut producer = Producer::init(&server, "a", true).await;
    let _idle = Producer::init(&server, "b", true).await;
    assert_eq!(producer.produce("t", topic_id, 1).await, (0, 0));
    let mut client = server.client().await;

    let list = |states: &[&str]| {
        ListTransactionsRequest::default()
            .with_state_filters(states.iter().map(|state| text(state)).collect())
            .with_duration_filter(-1)
    };
    let listed = client.call(1, &list(&[])).await.transaction_states;
    let names: Vec<_> =
        listed.iter().map(|t| (&**t.transactional_id, &*t.transaction_state)).collect();
    assert_eq!(names, [("a", "Ongoing"), ("b", "Empty")]);
    let response = client.call(1, &list(&["Ongoing", "Nonsense"])).await;
    assert_eq!((response.transaction_states.len(), response.unknown_state_filters.len()), (1, 1));
    assert_eq!(client.call(1, &list(&["Nonsense"])).await.transaction_states.len(), 0);
    // Kafka's states that no transaction reaches here are known all the same; each unknown one is
    // returned once, and case matters.
    let filters = ["Dead", "PrepareEpochFence", "CompleteCommit", "x", "empty", "x"];
    let response = client.call(1, &list(&filters)).await;
    assert_eq!(response.transaction_states.len(), 0);
    assert_eq!(response.unknown_state_filters, ["x", "empty"].map(text));

    // A pattern of RE2/J that matches the whole id.
    let _longer = Producer::init(&server, "app-1", true).await;
    let mut matching = async |pattern: Option<&str>| {
        let request = list(&[]).with_transactional_id_pattern(pattern.map(text));
        let response = client.call(2, &request).await;
        let states = response.transaction_states.iter();
        let ids = states.map(|t| t.transactional_id.to_string()).collect::<Vec<_>>();
        (response.error_code, ids.join(" "))
    };
    assert_eq!(matching(Some("a")).await, (0, "a".to_owned()));
    assert_eq!(matching(Some("app-.*")).await, (0, "app-1".to_owned()));
    assert_eq!(matching(Some("")).await, (0, "a app-1 b".to_owned()));
    assert_eq!(matching(None).await, (0, "a app-1 b".to_owned()));
    // The parentheses do not match.
    assert_eq!(
        matching(Some("a)|(b")).await,
        (ResponseError::InvalidRegularExpression.code(), String::new())
    );

    let ids = ["a", "c"].map(|id| TransactionalId(text(id))).to_vec();
    let describe = DescribeTransactionsRequest::default().with_transactional_ids(ids);
    let described = client.call(0, &describe).await.transaction_states;
    assert_eq!(
        (described[0].error_code, described[1].error_code),
        (0, ResponseError::TransactionalIdNotFound.code())
    );
    assert_eq!(described[0].producer_id.0, producer.id);
    assert_eq!(described[0].topics[0].partitions, [1]);
    assert!(described[0].transaction_start_time_ms > 0);

    let topic =
        TopicRequest::default().with_name(TopicName(text("t"))).with_partition_indexes(vec![1, 7]);
    let request = DescribeProducersRequest::default().with_topics(vec![topic]);
    let partitions = client.call(0, &request).await.topics[0].partitions.clone();
    let active = &partitions[0].active_producers[0];
    assert_eq!((active.producer_id.0, active.last_sequence), (producer.id, 1));
    assert_eq!(active.current_txn_start_offset, 0);
    assert_eq!(partitions[1].error_code, ResponseError::UnknownTopicOrPartition.code());

    let topic = WritableTxnMarkerTopic::default()
        .with_name(TopicName(text("t")))
        .with_partition_indexes(vec![1, 7]);
    let marker = |epoch| {
        WritableTxnMarker::default()
            .with_producer_id(ProducerId(producer.id))
            .with_producer_epoch(epoch)
            .with_topics(vec![topic.clone()])
    };
    for (epoch, code) in [(-1, INVALID_PRODUCER_EPOCH), (0, 0)] {
        let request = WriteTxnMarkersRequest::default().with_markers(vec![marker(epoch)]);
        let written = client.call(1, &request).await;
        let codes: Vec<i16> =
            written.markers[0].topics[0].partitions.iter().map(|p| p.error_code).collect();
        assert_eq!(codes, [code, ResponseError::UnknownTopicOrPartition.code()]);
    }
    server.server().ensure_internal(GROUP_TOPIC).await;
    let of_unknown = [("t", 1, -1, 0, INVALID_REQUEST), ("t", 1, 9_999, -1, INVALID_REQUEST)];
    for (name, partition, id, epoch, code) in
        of_unknown.into_iter().chain([(GROUP_TOPIC, 0, producer.id, 0, INVALID_TOPIC)])
    {
        let topic = WritableTxnMarkerTopic::default()
            .with_name(TopicName(text(name)))
            .with_partition_indexes(vec![partition]);
        let marker = marker(epoch).with_producer_id(ProducerId(id)).with_topics(vec![topic]);
        let request = WriteTxnMarkersRequest::default().with_markers(vec![marker]);
        let written = client.call(1, &request).await;
        assert_eq!(written.markers[0].topics[0].partitions[0].error_code, code, "{name} {id}");
    }
    assert_eq!(committed(&server, "t", 1).await, seen(3, 3, &[0, 2], &[(producer.id, 0)]));
}

/// Batches of a transaction race with its end: none comes after the marker.
#[tokio::test(flavor = "multi_thread")]
async fn no_batch_is_appended_after_the_marker() {
    for round in 0..20 {
        let server = TestServer::start().await;
        let topic_id = server.topic("t", 1, &[]).await;
        let mut producer = Producer::init(&server, "a", round % 2 == 0).await;
        producer.add("t", &[0]).await;
        let mut other = Producer {
            client: server.client().await,
            transactional_id: "a",
            id: producer.id,
            epoch: producer.epoch,
            sequences: HashMap::new(),
            version_2: producer.version_2,
        };
        let writing =
            tokio::spawn(async move { while other.produce("t", topic_id, 0).await.0 == 0 {} });
        tokio::time::sleep(Duration::from_millis(round)).await;
        assert_eq!(producer.end(round % 3 == 0).await, 0);
        writing.await.unwrap();
        let seen = committed(&server, "t", 0).await;
        assert_eq!(seen.stable_end, seen.high_watermark, "a transaction hangs: {seen:?}");
    }
}

pub(super) async fn delete_topic(server: &TestServer, topic: &str) {
    let delete = DeleteTopicsRequest::default().with_topic_names(vec![TopicName(text(topic))]);
    assert_eq!(server.client().await.call(5, &delete).await.responses[0].error_code, 0);
}

/// No client reads the partition.
#[tokio::test(flavor = "multi_thread")]
async fn ended_transactions_are_dropped_without_readers() {
    let server = TestServer::start().await;
    let topic_id = server.topic("t", 1, &[]).await;
    let mut producer = Producer::init(&server, "a", true).await;
    for _ in 0..20 {
        assert_eq!(producer.produce("t", topic_id, 0).await.0, 0);
        assert_eq!(producer.end(true).await, 0);
    }
    let partition = server.server().topics.by_name("t").unwrap().partitions[0].clone();
    assert!(partition.ending_transactions() <= 2, "{}", partition.ending_transactions());
}
