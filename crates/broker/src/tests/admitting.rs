//! Validation of produced batches, and the form in which they are stored.

use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::list_offsets_request::{ListOffsetsPartition, ListOffsetsTopic};
use kafka_protocol::messages::{ListOffsetsRequest, TopicName};
use kafka_protocol::records::{Compression, RecordBatchDecoder};

use super::harness::{Client, TestServer, produce, text};
use crate::batch::tests::{CODECS, encode, plain};
use crate::batch::{self, BatchHeader, Codec, HEADER_BYTES};
use crate::partition::unix_time_ms;
use crate::records;
use crate::wire::newer::Unchanged;

const HOUR_MS: i64 = 3_600_000;

/// Returns the error code and the records that are reported as invalid.
async fn blamed(server: &TestServer, topic: &str, batch: &Bytes) -> (i16, Vec<(i32, String)>) {
    let mut client = server.client().await;
    let response = client.call(9, &produce(topic, 0, batch, -1)).await;
    let partition = &response.responses[0].partition_responses[0];
    let reason = |error: &Option<kafka_protocol::protocol::StrBytes>| {
        error.as_ref().map(ToString::to_string).unwrap_or_default()
    };
    let errors = partition.record_errors.iter();
    let errors = errors.map(|e| (e.batch_index, reason(&e.batch_index_error_message)));
    (partition.error_code, errors.collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn times_out_of_range_are_refused_record_by_record() {
    let server = TestServer::start().await;
    server.topic("default", 1, &[]).await;
    server.topic("strict", 1, &[("message.timestamp.before.max.ms", "3600000")]).await;
    let by_server = [
        ("message.timestamp.type", "LogAppendTime"),
        ("message.timestamp.before.max.ms", "1"),
        ("message.timestamp.after.max.ms", "1"),
    ];
    server.topic("by-server", 1, &by_server).await;
    let now = unix_time_ms();
    for codec in [Compression::None, Compression::Zstd] {
        let batch = |times: &[i64]| encode(codec, (-1, -1, -1), times);
        let ahead = batch(&[now, now + 2 * HOUR_MS, 5, now + 3 * HOUR_MS]);
        let (code, records) = blamed(&server, "default", &ahead).await;
        let indexes: Vec<i32> = records.iter().map(|(index, _)| *index).collect();
        assert_eq!(
            (code, indexes),
            (ResponseError::InvalidTimestamp.code(), vec![1, 3]),
            "{codec:?}"
        );
        assert!(records[0].1.contains(&format!("Timestamp {}", now + 2 * HOUR_MS)));
        let (code, records) = blamed(&server, "strict", &batch(&[now, now - 2 * HOUR_MS])).await;
        assert_eq!(
            (code, records.len(), records[0].0),
            (ResponseError::InvalidTimestamp.code(), 1, 1),
            "{codec:?}"
        );
        for (topic, times) in [
            ("default", vec![now + HOUR_MS / 2, 0, -1]),
            ("strict", vec![now - HOUR_MS / 2, -1]),
            ("by-server", vec![0, now + 2 * HOUR_MS]),
        ] {
            assert_eq!(blamed(&server, topic, &batch(&times)).await.0, 0, "{topic} {codec:?}");
        }
    }
    // At most this many invalid records are reported.
    let (code, records) = blamed(&server, "default", &plain(&vec![now + 2 * HOUR_MS; 300])).await;
    assert_eq!((code, records.len()), (ResponseError::InvalidTimestamp.code(), 100));
}

// Varints are zigzag: 1 is -1, 2 is 1. Length, attributes, timestamp, offset, key, value, headers.
const FIRST: [u8; 8] = [14, 0, 0, 0, 2, b'k', 1, 0];
const SECOND: [u8; 8] = [14, 0, 0, 2, 2, b'k', 1, 0];
const SECOND_WITHOUT_KEY: [u8; 7] = [12, 0, 0, 2, 1, 1, 0];

/// A batch whose header claims two records.
fn of_two(records: &[&[u8]], codec: Codec) -> Bytes {
    let mut batch = plain(&[1_000, 1_000]).to_vec();
    batch.truncate(HEADER_BYTES);
    batch.extend_from_slice(&records.concat());
    batch::set_codec(&mut batch, Codec::None);
    match codec {
        Codec::None => batch.into(),
        codec => records::recompress(&batch, codec, 1, 1 << 20).unwrap().into(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_compacted_topic_requires_keys() {
    let server = TestServer::start().await;
    server.topic("plain", 1, &[]).await;
    server.topic("compacted", 1, &[("cleanup.policy", "delete,compact")]).await;
    for codec in [Codec::None, Codec::Gzip, Codec::Snappy, Codec::Lz4, Codec::Zstd] {
        let batch = of_two(&[&FIRST, &SECOND_WITHOUT_KEY], codec);
        assert_eq!(blamed(&server, "plain", &batch).await, (0, vec![]), "{codec:?}");
        let (code, records) = blamed(&server, "compacted", &batch).await;
        assert_eq!(
            (code, records.len(), records[0].0),
            (ResponseError::InvalidRecord.code(), 1, 1),
            "{codec:?}"
        );
        assert!(records[0].1.contains("without key"));
    }
    assert_eq!(blamed(&server, "compacted", &plain(&[1, 2])).await.0, 0);
}

/// A batch whose header does not match its records would break every reader of the topic, and
/// compaction.
#[tokio::test(flavor = "multi_thread")]
async fn the_records_of_every_batch_are_checked_compressed_or_not() {
    let server = TestServer::start().await;
    server.topic("plain", 1, &[]).await;
    server.topic("by-server", 1, &[("message.timestamp.type", "LogAppendTime")]).await;
    server.topic("compacted", 1, &[("cleanup.policy", "compact")]).await;
    server.topic("other", 1, &[("compression.type", "uncompressed")]).await;
    server.topic("strict", 1, &[("message.timestamp.before.max.ms", "9000000000000")]).await;
    let topics = ["plain", "by-server", "compacted", "other", "strict"];
    let too_short = [12, 0, 0, 2, 2, b'k', 1, 0];
    for codec in [Codec::None, Codec::Gzip, Codec::Snappy, Codec::Lz4, Codec::Zstd] {
        let bad: [&[&[u8]]; 4] =
            [&[&FIRST], &[&FIRST, &FIRST], &[&FIRST, &too_short], &[&FIRST, &SECOND, &SECOND]];
        for (n, records) in bad.into_iter().enumerate() {
            let batch = of_two(records, codec);
            for topic in topics {
                let (code, blamed) = blamed(&server, topic, &batch).await;
                assert_eq!(
                    (code, blamed),
                    (ResponseError::InvalidRecord.code(), vec![]),
                    "{topic} {codec:?} {n}"
                );
            }
        }
        let good = of_two(&[&FIRST, &SECOND], codec);
        for topic in topics {
            assert_eq!(blamed(&server, topic, &good).await, (0, vec![]), "{topic} {codec:?}");
        }
    }
}

/// An LZ4 frame with one uncompressed block. `check` is the second byte of the descriptor's
/// xxHash32.
fn lz4_frame(descriptor: &[u8], check: u8, content: &[u8]) -> Vec<u8> {
    let mut frame = vec![0x04, 0x22, 0x4d, 0x18];
    frame.extend(descriptor);
    frame.push(check);
    frame.extend((content.len() as u32 | 1 << 31).to_le_bytes());
    frame.extend(content);
    frame.extend([0; 4]);
    frame
}

/// Kafka's `Lz4BlockInputStream`, by which its broker and its Java clients read, refuses these.
#[tokio::test(flavor = "multi_thread")]
async fn lz4_frames_that_kafkas_clients_cannot_read_are_refused() {
    let server = TestServer::start().await;
    server.topic("plain", 1, &[]).await;
    server.topic("other", 1, &[("compression.type", "zstd")]).await;
    let small = of_two(&[&FIRST, &SECOND], Codec::None);
    // More than is decompressed on a serving thread.
    let large = plain(&vec![1_000; 20_000]);
    for (size, uncompressed) in [("small", small), ("large", large)] {
        let records = &uncompressed[HEADER_BYTES..];
        let with_block_mode = |mode| {
            let mut encoder = lz4::EncoderBuilder::new().block_mode(mode).build(vec![]).unwrap();
            std::io::copy(&mut &records[..], &mut encoder).unwrap();
            let (frame, finished) = encoder.finish();
            finished.unwrap();
            frame
        };
        let independent = with_block_mode(lz4::BlockMode::Independent);
        let cut = |bytes| independent[..independent.len() - bytes].to_vec();
        let frames = [
            ("independent blocks", independent.clone(), true),
            ("dependent blocks", with_block_mode(lz4::BlockMode::Linked), false),
            ("without the content's checksum", cut(4), false),
            ("without the end mark", cut(8), false),
            ("one stored block", lz4_frame(&[0x60, 0x70], 0x73, records), true),
            ("a dictionary", lz4_frame(&[0x61, 0x70, 0, 0, 0, 0], 0xd3, records), false),
        ];
        for (what, frame, is_readable) in frames {
            let mut batch = uncompressed[..HEADER_BYTES].to_vec();
            batch.extend(frame);
            batch::set_codec(&mut batch, Codec::Lz4);
            for topic in ["plain", "other"] {
                let (code, _) = blamed(&server, topic, &batch.clone().into()).await;
                let expected = if is_readable { 0 } else { ResponseError::InvalidRecord.code() };
                assert_eq!(code, expected, "{size}, {what}, {topic}");
            }
        }
    }
}

/// A zigzag varint.
fn varint(number: usize) -> Vec<u8> {
    let mut rest = number << 1;
    let mut bytes = Vec::new();
    while rest >= 0x80 {
        bytes.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    bytes.push(rest as u8);
    bytes
}

/// As in Apache Kafka 4.4: the setting bounds a record without the length in front of it, and
/// records of compressed batches only.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_of_a_compressed_batch_is_bounded() {
    let server = TestServer::start().await;
    let name = "max.decompressed.message.bytes";
    // Decompressed on a serving thread, off it, and as a stream.
    for value_bytes in [100, 300_000, 9 << 20] {
        let value = vec![b'v'; value_bytes];
        let body = [&[0, 0, 0, 2, b'k'][..], &varint(value_bytes), &value, &[0]].concat();
        let record = [varint(body.len()), body.clone()].concat();
        let (fits, bounded) = (format!("fits-{value_bytes}"), format!("bounded-{value_bytes}"));
        server.topic(&fits, 1, &[(name, &body.len().to_string())]).await;
        server.topic(&bounded, 1, &[(name, &(body.len() - 1).to_string())]).await;
        for codec in [Codec::None, Codec::Gzip, Codec::Snappy, Codec::Lz4, Codec::Zstd] {
            if codec == Codec::None && value_bytes > 1 << 20 {
                continue;
            }
            let batch = of_two(&[&record, &SECOND], codec);
            assert_eq!(blamed(&server, &fits, &batch).await.0, 0, "{value_bytes} {codec:?}");
            let code = if codec == Codec::None { 0 } else { ResponseError::InvalidRecord.code() };
            assert_eq!(blamed(&server, &bounded, &batch).await.0, code, "{value_bytes} {codec:?}");
        }
    }
}

/// A batch whose header gives `claimed_ms` as the maximum timestamp of its records.
fn claiming(codec: Compression, times_ms: &[i64], claimed_ms: i64) -> Bytes {
    let mut batch = encode(codec, (-1, -1, -1), times_ms).to_vec();
    batch::set_max_timestamp(&mut batch, claimed_ms);
    batch.into()
}

/// The offset and time that ListOffsets returns for `timestamp_ms`.
async fn offset_at(client: &mut Client, topic: &str, timestamp_ms: i64) -> (i64, i64) {
    let topic = ListOffsetsTopic::default()
        .with_name(TopicName(text(topic)))
        .with_partitions(vec![ListOffsetsPartition::default().with_timestamp(timestamp_ms)]);
    let request = Unchanged(ListOffsetsRequest::default().with_topics(vec![topic]));
    let Unchanged(response) = client.call(7, &request).await;
    let partition = &response.topics[0].partitions[0];
    assert_eq!(partition.error_code, 0);
    (partition.offset, partition.timestamp)
}

/// kafka-go's `WriteCompressedMessages` writes the last record's time there, other clients -1.
#[tokio::test(flavor = "multi_thread")]
async fn the_maximum_timestamp_is_computed_from_the_records() {
    let server = TestServer::start().await;
    let mut client = server.client().await;
    // Enough records for decompression in the background, and too few for it.
    for (size, count) in [("small", 3), ("large", 8_000)] {
        for codec in CODECS {
            for (claim, claimed_ms) in [("last", 1_000), ("none", -1), ("future", 9_000)] {
                let topic = format!("{size}-{codec:?}-{claim}");
                server.topic(&topic, 1, &[]).await;
                let mut times_ms = vec![1_000; count];
                times_ms[1] = 5_000;
                let batch = claiming(codec, &times_ms, claimed_ms);
                assert_eq!(client.produce(&topic, 0, &batch).await, (0, 0), "{topic}");
                let (_, _, kept) = client.fetch(&topic, 0, 0).await;
                let header = BatchHeader::parse(&kept).unwrap();
                assert_eq!(header.max_timestamp_ms, 5_000, "{topic}");
                assert_eq!(header.crc, crc32c::crc32c(&kept[21..]), "{topic}");
                for uploaded in [false, true] {
                    if uploaded {
                        server.store().flush().await.unwrap();
                    }
                    let greatest = offset_at(&mut client, &topic, -3).await;
                    assert_eq!(greatest, (1, 5_000), "{topic}");
                    assert_eq!(offset_at(&mut client, &topic, 1_001).await, (1, 5_000), "{topic}");
                    assert_eq!(offset_at(&mut client, &topic, 5_001).await, (-1, -1), "{topic}");
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_header_does_not_hide_times_that_are_out_of_range() {
    let server = TestServer::start().await;
    server.topic("default", 1, &[]).await;
    let now = unix_time_ms();
    for codec in CODECS {
        let batch = claiming(codec, &[now, now + 2 * HOUR_MS, now], now);
        let (code, records) = blamed(&server, "default", &batch).await;
        assert_eq!(
            (code, records.len(), records[0].0),
            (ResponseError::InvalidTimestamp.code(), 1, 1),
            "{codec:?}"
        );
        // Nor does it make times invalid that are in range.
        let batch = claiming(codec, &[now, now], now + 2 * HOUR_MS);
        assert_eq!(blamed(&server, "default", &batch).await, (0, vec![]), "{codec:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_are_stored_with_the_compression_of_the_topic() {
    let server = TestServer::start().await;
    let times: Vec<i64> = (0..500).collect();
    let records = |batch: Bytes| {
        let decoded = RecordBatchDecoder::decode(&mut batch.clone()).unwrap().records;
        decoded.into_iter().map(|r| (r.offset, r.timestamp, r.key, r.value)).collect::<Vec<_>>()
    };
    let sent = records(plain(&times));
    for (topic, codec) in [
        ("uncompressed", Codec::None),
        ("gzip", Codec::Gzip),
        ("snappy", Codec::Snappy),
        ("lz4", Codec::Lz4),
        ("zstd", Codec::Zstd),
    ] {
        server.topic(topic, 2, &[("compression.type", topic)]).await;
        let mut client = server.client().await;
        for (partition, sent_as) in [(0, Compression::None), (1, Compression::Lz4)] {
            let batch = encode(sent_as, (7, 0, 0), &times);
            assert_eq!(client.produce(topic, partition, &batch).await, (0, 0));
            // A repeated batch is recognised as such.
            assert_eq!(client.produce(topic, partition, &batch).await, (0, 0));
            let (_, high_watermark, kept) = client.fetch(topic, partition, 0).await;
            assert_eq!(high_watermark, 500);
            assert_eq!(BatchHeader::parse(&kept).unwrap().codec(), Some(codec), "{topic}");
            assert_eq!(records(kept), sent, "{topic}");
        }
    }
    // A batch that fits only when compressed is refused where it must be stored uncompressed.
    let settings = [("compression.type", "uncompressed"), ("max.message.bytes", "4000")];
    server.topic("small", 1, &settings).await;
    let batch = encode(Compression::Zstd, (-1, -1, -1), &times);
    assert!(batch.len() < 4_000 && plain(&times).len() > 4_000);
    assert_eq!(blamed(&server, "small", &batch).await.0, ResponseError::MessageTooLarge.code());
}
