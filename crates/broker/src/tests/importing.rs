//! Topics that take batches at the offsets that they have elsewhere (`alluvium.import`).

use alluvium_stream::{Options, Store};
use bytes::Bytes;
use kafka_protocol::error::ResponseError as E;
use kafka_protocol::records::Compression;

use super::configs::{TOPIC, alter_some};
use super::deleting::delete;
use super::harness::{Client, TestServer, produce, stored};
use super::transactions::Producer;
use crate::StoredTopic;
use crate::batch::tests::{encode, plain};
use crate::batch::{self, BatchHeader, IMPORT_EPOCH};
use crate::configs::topic::IMPORT;
use crate::records::Unpacked;

/// Returns a batch as an import sends it.
fn imported(batch: &[u8], offset: u64) -> Bytes {
    let mut bytes = batch.to_vec();
    batch::set_base(&mut bytes, offset, IMPORT_EPOCH);
    bytes.into()
}

/// Returns a batch of two records with the offsets 0 and `last`.
fn sparse(last: u8) -> Vec<u8> {
    let mut bytes = encode(Compression::None, (-1, -1, -1), &[7, 8]).to_vec();
    let records = &mut bytes[batch::HEADER_BYTES..];
    // The length of a record is a zigzag varint; attributes, timestamp delta and offset delta,
    // which is one too, follow.
    let second = 1 + usize::from(records[0] / 2);
    assert_eq!(records[second + 3], 2);
    records[second + 3] = 2 * last;
    batch::set_last_offset_delta(&mut bytes, last.into());
    bytes
}

async fn finish(client: &mut Client) {
    let done = alter_some(client, (TOPIC, "t"), &[(IMPORT, 1, None)], false).await;
    assert_eq!(done.0, 0, "{}", done.1);
}

async fn refused(client: &mut Client, batch: &Bytes) -> (Option<E>, String) {
    let response = client.call(9, &produce("t", 0, batch, -1)).await;
    let partition = &response.responses[0].partition_responses[0];
    let message = partition.error_message.as_ref().map(ToString::to_string);
    (E::try_from_code(partition.error_code), message.unwrap_or_default())
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_keep_their_offsets() {
    let mut server = TestServer::start().await;
    server.topic("t", 1, &[(IMPORT, "true"), ("cleanup.policy", "compact")]).await;
    let mut client = server.client().await;
    // The source begins at 100, and has offsets 100, 105 and 200 to 202.
    let batches = [
        imported(&batch::without_records(0, 100, 0), 0),
        imported(&sparse(5), 100),
        imported(&batch::without_records(0, 94, 0), 106),
        imported(&plain(&[1, 2, 3]), 200),
    ];
    for (batch, offset) in batches.iter().zip([0, 100, 106, 200]) {
        assert_eq!(client.produce("t", 0, batch).await, (0, offset));
    }
    // Another one at the same offset, and one that would leave a gap.
    for offset in [200, 204] {
        let (error, message) = refused(&mut client, &imported(&plain(&[1]), offset)).await;
        assert_eq!(error, Some(E::OffsetOutOfRange), "{message}");
        assert!(message.contains("203"), "{message}");
    }
    // A compacted topic can be cut at its start while it is imported.
    assert_eq!(delete(&mut client, "t", &[(0, 100)]).await, [(0, 0, 100)]);
    server.restart().await;
    let mut client = server.client().await;
    finish(&mut client).await;
    let (error, high_watermark, records) = client.fetch("t", 0, 100).await;
    assert_eq!((error, high_watermark), (0, 203));
    let expected: Vec<Bytes> =
        batches[1..].iter().zip([100, 106, 200]).map(|(batch, at)| stored(batch, at)).collect();
    assert_eq!(records, expected.concat());
}

#[tokio::test(flavor = "multi_thread")]
async fn producers_are_refused_until_an_import_is_done() {
    let server = TestServer::start().await;
    let id = server.topic("t", 1, &[(IMPORT, "true")]).await;
    let mut client = server.client().await;
    for batch in [plain(&[1]), encode(Compression::Lz4, (5, 0, 0), &[1])] {
        let (error, message) = refused(&mut client, &batch).await;
        assert_eq!(error, Some(E::PolicyViolation), "{message}");
        assert!(message.contains(IMPORT), "{message}");
    }
    assert_eq!(client.produce("t", 0, &imported(&plain(&[1]), 0)).await, (0, 0));
    // Nor are there markers, which would take offsets.
    for version_2 in [false, true] {
        let mut producer = Producer::init(&server, "id", version_2).await;
        if !version_2 {
            assert_eq!(producer.add("t", &[0]).await, E::PolicyViolation.code());
        }
        assert_eq!(producer.produce("t", id, 0).await.0, E::PolicyViolation.code());
        producer.end(false).await;
    }
    finish(&mut client).await;
    // It cannot begin again.
    let again = alter_some(&mut client, (TOPIC, "t"), &[(IMPORT, 0, Some("x"))], false).await;
    assert_eq!(again.0, E::InvalidConfig.code(), "{}", again.1);
    assert_eq!(client.produce("t", 0, &plain(&[1])).await, (0, 1));
    // An import that did not notice the end cannot append either, not even at offset 0.
    server.topic("ordinary", 1, &[]).await;
    for (topic, offset) in [("t", 2), ("ordinary", 0)] {
        let (error, _) = client.produce(topic, 0, &imported(&plain(&[1]), offset)).await;
        assert_eq!(error, E::InvalidRecord.code(), "{topic}");
    }
}

/// A topic is read from the objects of a server, and imported by it under another name, from a part
/// of a batch on.
#[tokio::test(flavor = "multi_thread")]
async fn a_stored_topic_can_be_imported() {
    let server = TestServer::start().await;
    let id = server.topic("t", 1, &[("retention.bytes", "77")]).await;
    let mut client = server.client().await;
    let mut expected = Vec::new();
    for (commit, timestamp) in [(true, 1), (false, 2), (true, 3)] {
        let mut producer = Producer::init(&server, "id", true).await;
        let encode = |of| encode(Compression::Zstd, of, &[timestamp, timestamp]);
        let offset = producer.produce_batch(("t", id), 0, encode).await.1;
        assert_eq!(producer.end(commit).await, 0);
        let (error, _) = client.produce("t", 0, &plain(&[10 * timestamp])).await;
        assert_eq!(error, 0);
        if commit {
            expected.extend([(offset, timestamp), (offset + 1, timestamp)]);
        }
        expected.push((offset + 3, 10 * timestamp));
    }
    let mut open = Producer::init(&server, "open", true).await;
    let end = open.produce("t", id, 0).await.1;
    assert_eq!(delete(&mut client, "t", &[(0, 1)]).await, [(0, 0, 1)]);
    expected.remove(0);
    server.store().flush().await.unwrap();
    let id = server.store().wal_header().wal_id;
    let source = Store::follow(server.object_store(), id, Options::default()).await.unwrap();
    assert_eq!(StoredTopic::names(&source), ["t"]);
    assert!(StoredTopic::open(&source, "u").unwrap().is_none());
    let topic = StoredTopic::open(&source, "t").unwrap().unwrap();
    assert_eq!(topic.configs["retention.bytes"], "77");
    assert_eq!((topic.partitions(), topic.offsets(0)), (1, 1..end as u64));
    server.topic("copy", 1, &[(IMPORT, "true")]).await;
    let mut next = 0;
    while next < topic.offsets(0).end {
        let part = topic.read(0, next, end as u64, 1).await.unwrap();
        for batch in part.batches {
            assert_eq!(client.produce("copy", 0, &batch).await.0, 0);
        }
        next = part.next;
    }
    assert_eq!(client.fetch("copy", 0, 0).await.1, end);
    let records = client.fetch("copy", 0, 0).await.2;
    let mut found = Vec::new();
    let mut rest = &records[..];
    while let Some(header) = BatchHeader::parse(rest) {
        assert!(!header.is_idempotent() && !header.is_transactional());
        let unpacked = Unpacked::new(&rest[..header.len_bytes]).unwrap();
        found.extend(unpacked.records().map(|it| (it.offset as i64, it.timestamp_ms)));
        rest = &rest[header.len_bytes..];
    }
    assert_eq!(found, expected);
    source.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_is_checked() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[(IMPORT, "true"), ("max.message.bytes", "1000")]).await;
    let mut client = server.client().await;
    let edited = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = plain(&[1, 2]).to_vec();
        edit(&mut bytes);
        imported(&bytes, 0)
    };
    let damaged = edited(&|bytes| *bytes.last_mut().unwrap() ^= 1);
    let many = imported(&batch::without_records(0, (1 << 20) + 1, 0), 0);
    let marker = batch::marker(7, 0, batch::Outcome::Commit, 5);
    for (batch, expected) in [
        (damaged, E::CorruptMessage),
        (many, E::InvalidRecord),
        (imported(&marker, 0), E::InvalidRecord),
        (imported(&encode(Compression::None, (7, 0, 0), &[1]), 0), E::InvalidRecord),
        // The second record lies beyond the end that the header states.
        (edited(&|bytes| batch::set_last_offset_delta(bytes, 0)), E::InvalidRecord),
        (imported(&plain(&[1]), u64::MAX), E::InvalidRecord),
    ] {
        let (error, message) = refused(&mut client, &batch).await;
        assert_eq!(error, Some(expected), "{message}");
    }
    // Compressed records, the time of their append, a wrong greatest timestamp, and a batch that
    // is too large for producers.
    let mut dated = encode(Compression::Zstd, (-1, -1, -1), &[7, 8]).to_vec();
    batch::set_log_append_time(&mut dated, 99);
    let mut wrong = plain(&[3, 4]).to_vec();
    batch::set_max_timestamp(&mut wrong, 1000);
    let large = encode(Compression::None, (-1, -1, -1), &[1; 200]);
    let batches = [imported(&dated, 0), imported(&wrong, 2), imported(&large, 4)];
    for batch in &batches {
        assert_eq!(client.produce("t", 0, batch).await.0, 0);
    }
    let records = client.fetch("t", 0, 0).await.2;
    let first = BatchHeader::parse(&records).unwrap();
    assert_eq!(records[..first.len_bytes], stored(&batches[0], 0));
    let second = BatchHeader::parse(&records[first.len_bytes..]).unwrap();
    assert_eq!((first.max_timestamp_ms, second.max_timestamp_ms), (99, 4));
    server.assert_alive().await;
}
