//! Fetch: sessions, long polling, limits, offsets by time.

use std::time::Duration;

use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::fetch_request::{FetchPartition, ForgottenTopic};
use kafka_protocol::messages::list_offsets_request::{ListOffsetsPartition, ListOffsetsTopic};
use kafka_protocol::messages::{
    ApiKey, ApiVersionsRequest, FetchRequest, FetchResponse, ListOffsetsRequest,
    OffsetForLeaderEpochRequest, TopicName,
};
use kafka_protocol::records::Compression;
use tokio::time::{sleep, timeout};

use super::deleting::delete;
use super::harness::{Client, HANG, TestServer, fetch, stored, text};
use crate::batch::tests::{CODECS, encode, plain};
use crate::wire::newer::Unchanged;

fn in_session(id: i32, epoch: i32, partitions: &[(i32, i64)]) -> FetchRequest {
    let mut request = fetch("t", partitions, 0).with_session_id(id).with_session_epoch(epoch);
    if partitions.is_empty() {
        request.topics.clear();
    }
    request
}

/// Partitions with the lengths of their records.
fn shape(response: &FetchResponse) -> Vec<(i32, usize)> {
    let partitions = response.responses.iter().flat_map(|topic| &topic.partitions);
    partitions
        .map(|partition| (partition.partition_index, partition.records.as_ref().unwrap().len()))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_session_returns_what_is_new() {
    let server = TestServer::start().await;
    server.topic("t", 3, &[]).await;
    let mut client = server.client().await;
    let batch = plain(&[1]);
    let full = client.call(12, &in_session(0, 0, &[(0, 0), (1, 0)])).await;
    assert_eq!(shape(&full), [(0, 0), (1, 0)]);
    let id = full.session_id;
    assert!(id > 0);
    let nothing_new = client.call(12, &in_session(id, 1, &[])).await;
    assert_eq!((shape(&nothing_new), nothing_new.session_id), (vec![], id));

    client.produce("t", 1, &batch).await;
    client.produce("t", 2, &batch).await;
    let new = client.call(12, &in_session(id, 2, &[])).await;
    assert_eq!(shape(&new), [(1, batch.len())]);
    // The client continues after it, adds a partition, and removes one.
    let mut request = in_session(id, 3, &[(1, 1), (2, 0)]);
    request.forgotten_topics_data =
        vec![ForgottenTopic::default().with_topic(TopicName(text("t"))).with_partitions(vec![0])];
    assert_eq!(shape(&client.call(12, &request).await), [(2, batch.len())]);
    client.produce("t", 0, &batch).await;
    let after = client.call(12, &in_session(id, 4, &[(2, 1)])).await;
    assert_eq!(shape(&after), [], "0 was removed, 1 and 2 are at their ends");

    assert_eq!(
        client.call(12, &in_session(id, 9, &[])).await.error_code,
        ResponseError::InvalidFetchSessionEpoch.code()
    );
    assert_eq!(
        client.call(12, &in_session(id ^ 1, 1, &[])).await.error_code,
        ResponseError::FetchSessionIdNotFound.code()
    );
    let ended = client.call(12, &in_session(id, -1, &[(0, 0)])).await;
    assert_eq!((ended.session_id, shape(&ended)), (0, vec![(0, batch.len())]));
    assert_eq!(
        client.call(12, &in_session(id, 5, &[])).await.error_code,
        ResponseError::FetchSessionIdNotFound.code()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_fetch_is_woken_by_durable_records() {
    let server = TestServer::start().await;
    server.topic("t", 2, &[]).await;
    let (mut reader, mut writer) = (server.client().await, server.client().await);
    let batch = plain(&[1]);
    // The wait is longer than the test may take: only the event ends it.
    let waiting = reader.send(12, &fetch("t", &[(0, 0), (1, 0)], 600_000)).await;
    writer.produce("t", 1, &batch).await;
    let response = reader.receive::<FetchRequest>(12, waiting).await;
    assert_eq!(shape(&response), [(0, 0), (1, batch.len())]);

    let for_more_than_the_limit =
        fetch("t", &[(1, 0)], 600_000).with_min_bytes(i32::MAX).with_max_bytes(batch.len() as i32);
    let response = reader.call(12, &for_more_than_the_limit).await;
    assert_eq!(shape(&response), [(1, batch.len())], "a fetch for more would wait forever");

    let for_two = fetch("t", &[(0, 0), (1, 0)], 600_000).with_min_bytes(2 * batch.len() as i32);
    let waiting = reader.send(12, &for_two).await;
    writer.produce("t", 0, &batch).await;
    let response = reader.receive::<FetchRequest>(12, waiting).await;
    assert_eq!(shape(&response), [(0, batch.len()), (1, batch.len())]);

    let after_wait = fetch("t", &[(0, 0)], 20).with_min_bytes(1 << 20);
    assert_eq!(
        shape(&reader.call(12, &after_wait).await),
        [(0, batch.len())],
        "less than requested, when the time is over"
    );
}

/// Otherwise a dozen fetches of idle partitions could hold the whole response memory for as long as
/// they wait.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_fetch_holds_no_memory() {
    let mut server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let (mut reader, mut other) = (server.client().await, server.client().await);
    let batch = plain(&[1; 1_000]);
    other.produce("t", 0, &batch).await;
    let all_bytes = server.server().fetch_budget.free_bytes();
    let for_more = |max_wait_ms| fetch("t", &[(0, 0)], max_wait_ms).with_min_bytes(50 << 20);
    let waiting = reader.send(12, &for_more(600_000)).await;
    server.begun("Fetch", 12, 1).await;
    // Time to read existing records and to begin to wait.
    sleep(Duration::from_millis(100)).await;
    let given_back = async {
        while server.server().fetch_budget.free_bytes() < all_bytes {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(HANG, given_back).await.expect("a waiting fetch holds memory");
    // It returns what is there when its time is over, or the server stops.
    assert_eq!(shape(&other.call(12, &for_more(20)).await), [(0, batch.len())]);
    server.stop().await;
    let response = reader.receive::<FetchRequest>(12, waiting).await;
    assert_eq!(shape(&response), [(0, batch.len())]);
}

/// Clients that do not read their responses hold the whole response memory.
#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_without_response_memory_returns_little() {
    let server = TestServer::start().await;
    server.topic("t", 2, &[]).await;
    let mut client = server.client().await;
    let (small, large) = (plain(&[1; 1_000]), plain(&[1; 12_000]));
    assert!(small.len() < 64 << 10 && large.len() > 128 << 10, "{}", large.len());
    for _ in 0..20 {
        client.produce("t", 0, &small).await;
    }
    client.produce("t", 1, &large).await;
    let budget = &server.server().fetch_budget;
    let all = budget.acquire(usize::MAX).await;
    let (code, _, records) = client.fetch("t", 0, 0).await;
    assert_eq!(code, 0);
    assert!(records.len() >= small.len() && records.len() <= 128 << 10, "{}", records.len());
    // Nor does a partition without memory keep that one back.
    let response = client.call(12, &fetch("t", &[(0, 0), (1, 0)], 0)).await;
    assert_eq!(shape(&response), [(0, records.len()), (1, 0)]);
    // A single larger batch waits for its share.
    let waiting = client.send(12, &fetch("t", &[(1, 0)], 0)).await;
    server.begun("Fetch", 12, 3).await;
    assert!(timeout(Duration::from_millis(300), client.socket.peek(&mut [0])).await.is_err());
    drop(all);
    let response = client.receive::<FetchRequest>(12, waiting).await;
    assert_eq!(shape(&response), [(1, large.len())]);
}

/// A client gets at least one batch, and a topic may allow larger ones than others.
#[tokio::test(flavor = "multi_thread")]
async fn a_large_batch_is_charged_with_its_size() {
    const BATCH_BYTES: usize = 6 << 20;
    let server = TestServer::with(128 << 20, |_| {}).await;
    server.topic("t", 1, &[("max.message.bytes", "8000000")]).await;
    let mut client = server.client().await;
    let batch = plain(&vec![1; BATCH_BYTES * 1_000 / plain(&[1; 1_000]).len()]);
    assert_eq!(client.produce("t", 0, &batch).await, (0, 0));
    let budget = &server.server().fetch_budget;
    let total_bytes = budget.free_bytes();
    client.send(12, &fetch("t", &[(0, 0)], 0).with_max_bytes(1)).await;
    let counted = async {
        while budget.free_bytes() > total_bytes - batch.len() {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(HANG, counted).await.expect("it is not counted");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_holds_memory_needed_by_others_is_disconnected() {
    let server = TestServer::with(128 << 20, |config| {
        config.transfer_timeout = Duration::from_secs(10);
    })
    .await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let batch = plain(&[1; 12_000]);
    for _ in 0..(24 << 20) / batch.len() {
        assert_eq!(client.produce("t", 0, &batch).await.0, 0);
    }
    let mut all = fetch("t", &[(0, 0)], 0);
    all.topics[0].partitions[0].partition_max_bytes = i32::MAX;
    let budget = &server.server().fetch_budget;
    let total_bytes = budget.free_bytes();
    client.send(12, &all).await;
    let taken = async {
        while budget.free_bytes() > total_bytes - (20 << 20) {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(HANG, taken).await.expect("its response is not counted");
    // While no other request needs the memory, it has its full time.
    sleep(Duration::from_millis(1_500)).await;
    assert!(budget.free_bytes() <= total_bytes - (20 << 20));
    let rest = budget.acquire(budget.free_bytes()).await;
    let disconnected = async {
        while budget.free_bytes() == 0 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(Duration::from_secs(6), disconnected)
        .await
        .expect("others wait for a client that does not read");
    drop(rest);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_server_answers_waiting_fetches() {
    let mut server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut reader = server.client().await;
    let waiting = reader.send(12, &fetch("t", &[(0, 0)], 600_000)).await;
    // The request is being handled once a later request of another connection has been answered
    // after it was counted.
    loop {
        let mut metrics = String::new();
        prometheus_client::encoding::text::encode(&mut metrics, &server.registry).unwrap();
        if metrics.contains(r#"requests_total{api="Fetch",version="12"} 1"#) {
            break;
        }
        tokio::task::yield_now().await;
    }
    server.stop().await;
    let response = reader.receive::<FetchRequest>(12, waiting).await;
    assert_eq!(shape(&response), [(0, 0)]);
    assert!(reader.receive_frame().await.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn fetch_limits_hold_except_for_the_first_batch() {
    let server = TestServer::start().await;
    server.topic("t", 3, &[]).await;
    let mut client = server.client().await;
    let batch = plain(&[1; 10]);
    let len = batch.len();
    for partition in 0..3 {
        for _ in 0..4 {
            client.produce("t", partition, &batch).await;
        }
    }
    let all = [(0, 0), (1, 0), (2, 0)];
    let limited = |max_bytes: usize, partition_bytes: usize| {
        let mut request = fetch("t", &all, 0).with_max_bytes(max_bytes as i32);
        for partition in &mut request.topics[0].partitions {
            partition.partition_max_bytes = partition_bytes as i32;
        }
        request
    };
    for (max_bytes, partition_bytes, expected) in [
        (0, 0, [1, 0, 0]),
        (1, 1 << 20, [1, 0, 0]),
        (1 << 20, 1, [1, 0, 0]),
        (1 << 20, len, [1, 1, 1]),
        (1 << 20, 2 * len + 1, [2, 2, 2]),
        (3 * len, 2 * len, [2, 1, 0]),
        (5 * len - 1, 1 << 20, [4, 0, 0]),
        (5 * len, 1 << 20, [4, 1, 0]),
        (1 << 20, 1 << 20, [4, 4, 4]),
    ] {
        let response = client.call(12, &limited(max_bytes, partition_bytes)).await;
        let expected: Vec<_> = (0..3).zip(expected.map(|batches| batches * len)).collect();
        assert_eq!(shape(&response), expected, "{max_bytes} {partition_bytes}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_partitions_and_offsets_have_their_errors() {
    let server = TestServer::start().await;
    let id = server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    client.produce("t", 0, &plain(&[1, 2])).await;
    assert_eq!(client.fetch("t", 0, 2).await, (0, 2, Bytes::new()));
    assert_eq!(client.fetch("t", 0, 3).await.0, ResponseError::OffsetOutOfRange.code());
    assert_eq!(client.fetch("t", 0, -1).await.0, ResponseError::OffsetOutOfRange.code());
    assert_eq!(client.fetch("t", 1, 0).await.0, ResponseError::UnknownTopicOrPartition.code());
    assert_eq!(
        client.fetch("unknown", 0, 0).await.0,
        ResponseError::UnknownTopicOrPartition.code()
    );
    let mut by_id = fetch("", &[(0, 0)], 0);
    by_id.topics[0].topic_id = uuid::Uuid::from_u128(1);
    assert_eq!(
        client.call(13, &by_id).await.responses[0].partitions[0].error_code,
        ResponseError::UnknownTopicId.code()
    );
    by_id.topics[0].topic_id = id;
    for (epoch, code) in [
        (-1, 0),
        (0, 0),
        (1, ResponseError::UnknownLeaderEpoch.code()),
        (-2, ResponseError::FencedLeaderEpoch.code()),
    ] {
        by_id.topics[0].partitions = vec![
            FetchPartition::default()
                .with_current_leader_epoch(epoch)
                .with_partition_max_bytes(1 << 20),
        ];
        assert_eq!(
            client.call(13, &by_id).await.responses[0].partitions[0].error_code,
            code,
            "{epoch}"
        );
    }
}

async fn offset(client: &mut Client, version: i16, timestamp: i64) -> (i16, i64, i64) {
    let topic = ListOffsetsTopic::default()
        .with_name(TopicName(text("t")))
        .with_partitions(vec![ListOffsetsPartition::default().with_timestamp(timestamp)]);
    let request = Unchanged(ListOffsetsRequest::default().with_topics(vec![topic]));
    let Unchanged(response) = client.call(version, &request).await;
    let partition = &response.topics[0].partitions[0];
    assert_eq!(partition.leader_epoch, if version >= 4 && partition.offset >= 0 { 0 } else { -1 });
    (partition.error_code, partition.offset, partition.timestamp)
}

/// KIP-405, KIP-1005 and KIP-1023: the ends of the tiers, of a topic with `remote.storage.enable`.
#[tokio::test(flavor = "multi_thread")]
async fn the_ends_of_the_tiers_are_found() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[("remote.storage.enable", "true")]).await;
    let mut client = server.client().await;
    let produce = || encode(Compression::None, (-1, -1, -1), &[1, 2, 3]);
    let none = (0, -1, -1);
    assert_eq!(offset(&mut client, 9, -5).await, none);
    assert_eq!(offset(&mut client, 11, -6).await, (0, 0, -1));
    client.produce("t", 0, &produce()).await;
    assert_eq!(offset(&mut client, 8, -4).await, (0, 0, -1));
    assert_eq!(offset(&mut client, 9, -5).await, none, "nothing is uploaded");
    server.store().flush().await.unwrap();
    client.produce("t", 0, &produce()).await;
    assert_eq!(offset(&mut client, 9, -5).await, (0, 2, -1));
    assert_eq!(offset(&mut client, 11, -6).await, (0, 3, -1));
    assert_eq!(delete(&mut client, "t", &[(0, 5)]).await, [(0, 0, 5)]);
    for (version, timestamp) in [(1, -2), (8, -4), (11, -6)] {
        assert_eq!(offset(&mut client, version, timestamp).await, (0, 5, -1), "{timestamp}");
    }
    assert_eq!(offset(&mut client, 9, -5).await, none, "all that is uploaded is deleted");
}

#[tokio::test(flavor = "multi_thread")]
async fn offsets_are_found_by_time_to_the_record() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    assert_eq!(offset(&mut client, 7, -1).await, (0, 0, -1));
    assert_eq!(offset(&mut client, 7, -3).await, (0, -1, -1), "no record");
    for (i, codec) in CODECS.into_iter().enumerate() {
        let start = i as i64 * 100;
        client
            .produce("t", 0, &encode(codec, (-1, -1, -1), &[start, start + 40, start + 20]))
            .await;
    }
    for uploaded in [false, true] {
        if uploaded {
            server.store().flush().await.unwrap();
        }
        assert_eq!(offset(&mut client, 1, -1).await, (0, 15, -1));
        assert_eq!(offset(&mut client, 1, -2).await, (0, 0, -1));
        for (i, start) in (0..5).map(|i| (i * 3, i * 100)) {
            assert_eq!(offset(&mut client, 1, start).await, (0, i, start));
            assert_eq!(offset(&mut client, 1, start + 1).await, (0, i + 1, start + 40));
            assert_eq!(offset(&mut client, 1, start + 40).await, (0, i + 1, start + 40));
        }
        assert_eq!(offset(&mut client, 1, 41).await, (0, 3, 100), "the next batch");
        assert_eq!(offset(&mut client, 1, 441).await, (0, -1, -1), "later than all");
        assert_eq!(offset(&mut client, 7, -3).await, (0, 13, 440));
        assert_eq!(offset(&mut client, 8, -4).await, (0, 0, -1));
        assert_eq!(offset(&mut client, 9, -5).await, (0, -1, -1));
        assert_eq!(offset(&mut client, 11, -6).await, (0, -1, -1));
        assert_eq!(offset(&mut client, 11, -1).await, (0, 15, -1));
        assert_eq!(offset(&mut client, 11, 41).await, (0, 3, 100));
        assert_eq!(
            offset(&mut client, 10, -6).await.0,
            ResponseError::UnsupportedVersion.code(),
            "not in that version"
        );
        assert_eq!(
            offset(&mut client, 6, -3).await.0,
            ResponseError::UnsupportedVersion.code(),
            "not in that version"
        );
        assert_eq!(offset(&mut client, 10, -9).await.0, ResponseError::UnsupportedVersion.code());
    }
}

/// Nor is the time of a deleted record returned: a deletion may have removed the record that
/// determines a batch's time.
#[tokio::test(flavor = "multi_thread")]
async fn a_search_by_time_finds_remaining_records() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    for times in [&[10, 1000, 10, 10][..], &[10, 2000]] {
        let batch = encode(Compression::Zstd, (-1, -1, -1), times);
        assert_eq!(client.produce("t", 0, &batch).await.0, 0);
    }
    assert_eq!(offset(&mut client, 1, 500).await, (0, 1, 1000));
    assert_eq!(delete(&mut client, "t", &[(0, 2)]).await, [(0, 0, 2)]);
    // If nothing else is left, there is none.
    server.topic("alone", 1, &[]).await;
    let batch = encode(Compression::Zstd, (-1, -1, -1), &[10, 1000, 10]);
    assert_eq!(client.produce("alone", 0, &batch).await.0, 0);
    assert_eq!(delete(&mut client, "alone", &[(0, 2)]).await, [(0, 0, 2)]);
    let wanted = ListOffsetsPartition::default().with_timestamp(500);
    let topic = ListOffsetsTopic::default()
        .with_name(TopicName(text("alone")))
        .with_partitions(vec![wanted.clone()]);
    let request = ListOffsetsRequest::default().with_topics(vec![topic.clone()]);
    let Unchanged(response) = client.call(1, &Unchanged(request)).await;
    let found = &response.topics[0].partitions[0];
    assert_eq!((found.error_code, found.offset, found.timestamp), (0, -1, -1));
    // A partition that is named twice gets an error each time.
    let topic = topic.with_partitions(vec![wanted.clone(), wanted]);
    let request = ListOffsetsRequest::default().with_topics(vec![topic]);
    let Unchanged(response) = client.call(1, &Unchanged(request)).await;
    assert!(
        response.topics[0]
            .partitions
            .iter()
            .all(|p| p.error_code == ResponseError::InvalidRequest.code()),
        "{response:?}"
    );
    for uploaded in [false, true] {
        if uploaded {
            server.store().flush().await.unwrap();
        }
        assert_eq!(offset(&mut client, 1, 500).await, (0, 5, 2000));
        assert_eq!(offset(&mut client, 1, 5).await, (0, 2, 10));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cold_reads_return_the_same_bytes_from_objects() {
    let server = TestServer::start().await;
    server.topic("t", 20, &[]).await;
    let mut client = server.client().await;
    let mut expected = vec![Vec::new(); 20];
    for i in 0..60 {
        let partition = i % 20;
        let batch = encode(Compression::Lz4, (-1, -1, -1), &[i64::from(i), 7, 8]);
        let (_, base) = client.produce("t", partition, &batch).await;
        expected[partition as usize].extend_from_slice(&stored(&batch, base as u64));
    }
    server.store().flush().await.unwrap();
    let partitions: Vec<(i32, i64)> = (0..20).map(|partition| (partition, 0)).collect();
    let response = client.call(12, &fetch("t", &partitions, 0)).await;
    for (partition, expected) in response.responses[0].partitions.iter().zip(expected) {
        assert_eq!(partition.records.as_deref(), Some(&expected[..]));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_topic_ends_a_waiting_fetch() {
    use kafka_protocol::messages::DeleteTopicsRequest;
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let (mut reader, mut admin) = (server.client().await, server.client().await);
    let waiting = reader.send(12, &fetch("t", &[(0, 0)], 600_000)).await;
    let delete = DeleteTopicsRequest::default().with_topic_names(vec![TopicName(text("t"))]);
    assert_eq!(admin.call(5, &delete).await.responses[0].error_code, 0);
    let response = reader.receive::<FetchRequest>(12, waiting).await;
    assert_eq!(
        response.responses[0].partitions[0].error_code,
        ResponseError::UnknownTopicOrPartition.code()
    );
    assert_eq!(
        admin.call(5, &delete).await.responses[0].error_code,
        ResponseError::UnknownTopicOrPartition.code()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_current_leader_epoch_ends_at_the_high_watermark() {
    use kafka_protocol::messages::offset_for_leader_epoch_request::{
        OffsetForLeaderPartition, OffsetForLeaderTopic,
    };
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    client.produce("t", 0, &plain(&[1, 2])).await;
    for (current, epoch, expected) in [
        (0, 0, (0, 0, 2)),
        (-1, 5, (0, -1, -1)),
        (1, 0, (ResponseError::UnknownLeaderEpoch.code(), -1, -1)),
    ] {
        let partition = OffsetForLeaderPartition::default()
            .with_current_leader_epoch(current)
            .with_leader_epoch(epoch);
        let topic = OffsetForLeaderTopic::default()
            .with_topic(TopicName(text("t")))
            .with_partitions(vec![partition]);
        let response =
            client.call(4, &OffsetForLeaderEpochRequest::default().with_topics(vec![topic])).await;
        let partition = &response.topics[0].partitions[0];
        assert_eq!((partition.error_code, partition.leader_epoch, partition.end_offset), expected);
    }
}

/// As Apache Kafka 4: clients older than zstd in the protocol decompress it if they have the
/// library.
#[tokio::test(flavor = "multi_thread")]
async fn every_fetch_version_gets_batches_of_every_codec() {
    let server = TestServer::start().await;
    // A partition for each codec, and one with batches of all.
    let all = CODECS.len();
    let id = server.topic("t", all as i32 + 1, &[]).await;
    let mut client = server.client().await;
    let mut expected = vec![Vec::new(); all + 1];
    for (partition, codec) in CODECS.into_iter().enumerate() {
        let batch = encode(codec, (-1, -1, -1), &[2]);
        for partition in [partition, all] {
            let next = client.produce("t", partition as i32, &batch).await;
            assert_eq!(next.0, 0, "{codec:?}");
            expected[partition].extend_from_slice(&stored(&batch, next.1 as u64));
        }
    }
    let announced = client.call(0, &ApiVersionsRequest::default()).await;
    let announced = announced.api_keys.iter().find(|api| api.api_key == ApiKey::Fetch as i16);
    let announced = announced.expect("Fetch is announced");
    assert_eq!((announced.min_version, announced.max_version), (4, 18));
    for version in announced.min_version..=announced.max_version {
        let partitions: Vec<_> = (0..=all).map(|partition| (partition as i32, 0)).collect();
        let mut request = fetch("t", &partitions, 0);
        if version >= 13 {
            request.topics[0].topic = Default::default();
            request.topics[0].topic_id = id;
        }
        let response = client.call(version, &request).await;
        for (partition, expected) in response.responses[0].partitions.iter().zip(&expected) {
            let got = (partition.error_code, partition.records.as_deref());
            assert_eq!(got, (0, Some(&expected[..])), "v{version}, {}", partition.partition_index);
        }
    }
}

/// A client that repeats the request and disconnects could otherwise have any number of batches
/// decompressed at the same time.
#[tokio::test(flavor = "multi_thread")]
async fn a_decompression_is_counted_until_it_has_ended() {
    let server = TestServer::start().await;
    let server = server.server();
    let free = server.decompressions.available_permits();
    let (go_on, may_go_on) = std::sync::mpsc::channel::<()>();
    let (begun, has_begun) = tokio::sync::oneshot::channel();
    let decompression = server.run_decompression(move || {
        begun.send(()).unwrap();
        let _gone = may_go_on.recv();
        Ok(())
    });
    tokio::select! {
        _ = decompression => panic!("it waits"),
        begun = has_begun => begun.unwrap(),
    }
    assert_eq!(server.decompressions.available_permits(), free - 1);
    drop(go_on);
    while server.decompressions.available_permits() < free {
        sleep(Duration::from_millis(1)).await;
    }
}
