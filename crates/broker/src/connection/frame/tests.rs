//! Tests of the separation of batches: results, memory and pace.

use bytes::BytesMut;
use kafka_protocol::messages::produce_request::{PartitionProduceData, TopicProduceData};
use kafka_protocol::messages::{ProduceRequest, RequestHeader, TopicName, TransactionalId};
use kafka_protocol::protocol::{Decodable, StrBytes};
use uuid::Uuid;

use super::*;
use crate::tests::examples;
use crate::wire::shape;

/// The byte that the batches of these tests are filled with.
const FILL: u8 = 0xab;

async fn read(sent: &[u8], memory: &RequestMemory, buffer_bytes: usize) -> Frame {
    let mut reader = BufReader::with_capacity(buffer_bytes, sent);
    let (timeout, deadline) = (Duration::from_secs(60), Instant::now() + Duration::from_secs(60));
    let incoming = Incoming::new(&mut reader, sent.len(), memory, timeout, deadline);
    incoming.read_frame(true).await.unwrap()
}

fn request(version: i16, topics: &[&[Option<usize>]]) -> BytesMut {
    let partition = |(index, len_bytes): (usize, &Option<usize>)| {
        PartitionProduceData::default()
            .with_index(index as i32)
            .with_records(len_bytes.map(|len_bytes| vec![FILL; len_bytes].into()))
    };
    let topic = |partitions: &&[Option<usize>]| {
        let topic = TopicProduceData::default();
        let topic = match version {
            13.. => topic.with_topic_id(Uuid::from_u128(7)),
            _ => topic.with_name(TopicName(StrBytes::from_static_str("topic"))),
        };
        topic.with_partition_data(partitions.iter().enumerate().map(partition).collect())
    };
    let request = ProduceRequest::default()
        .with_transactional_id(Some(TransactionalId(StrBytes::from_static_str("id"))))
        .with_acks(-1)
        .with_timeout_ms(1_000)
        .with_topic_data(topics.iter().map(topic).collect());
    let header_version = ApiKey::Produce.request_header_version(version);
    let mut sent = examples::header(ApiKey::Produce as i16, version, 1, header_version);
    sent.extend_from_slice(&examples::encode(&request, version));
    sent
}

fn decoded(mut bytes: Bytes, version: i16) -> Option<ProduceRequest> {
    shape::PRODUCE.walk(&bytes, version, 1_000_000).ok()?;
    let header_version = ApiKey::Produce.request_header_version(version);
    RequestHeader::decode(&mut bytes, header_version).ok()?;
    ProduceRequest::decode(&mut bytes, version).ok()
}

fn fields(request: &mut ProduceRequest) -> impl Iterator<Item = &mut Option<Bytes>> {
    let partitions = request.topic_data.iter_mut().flat_map(|topic| &mut topic.partition_data);
    partitions.map(|partition| &mut partition.records)
}

/// The request as the handler sees it, with each batch put back.
fn joined(frame: Frame, version: i16) -> Option<ProduceRequest> {
    let mut request = decoded(frame.bytes, version)?;
    let mut apart = frame.batches.into_iter();
    for field in fields(&mut request).filter(|field| matches!(field, Some(it) if it.is_empty())) {
        *field = apart.next();
    }
    assert!(apart.next().is_none(), "a batch has no field");
    Some(request)
}

/// The request decoded without separating its batches.
fn whole(sent: &[u8], version: i16) -> Option<ProduceRequest> {
    let mut request = decoded(Bytes::copy_from_slice(sent), version)?;
    for field in fields(&mut request).filter(|field| matches!(field, Some(it) if it.is_empty())) {
        *field = None;
    }
    Some(request)
}

#[tokio::test]
async fn a_request_with_separate_batches_decodes_like_the_whole_request() {
    let memory = RequestMemory::new(1 << 30);
    let topics: [&[Option<usize>]; 3] = [
        &[Some(SEPARATE_BYTES), Some(10), None, Some(0)],
        &[],
        &[Some(SEPARATE_BYTES + 100), Some(70)],
    ];
    for version in VERSIONS {
        let sent = request(version, &topics);
        for buffer_bytes in [16, 8 << 10] {
            let frame = read(&sent, &memory, buffer_bytes).await;
            let lens: Vec<_> = frame.batches.iter().map(Bytes::len).collect();
            assert_eq!(lens, [SEPARATE_BYTES, SEPARATE_BYTES + 100], "v{version}");
            assert!(frame.bytes.len() < sent.len() - 2 * SEPARATE_BYTES);
            let request = joined(frame, version);
            assert!(request.is_some() && request == whole(&sent, version), "v{version}");
        }
    }
}

#[tokio::test]
async fn separating_batches_refuses_exactly_the_malformed_requests() {
    let memory = RequestMemory::new(1 << 30);
    let topics: [&[Option<usize>]; 2] =
        [&[Some(SEPARATE_BYTES), Some(0)], &[Some(5), Some(SEPARATE_BYTES)]];
    for version in [3, 8, 9, 13] {
        let sent = request(version, &topics);
        // Positions after key and version. The content of batches does not matter, so it is left
        // out.
        let positions = (4..sent.len()).filter(|at| sent[*at] != FILL || sent[*at - 1] != FILL);
        for at in positions {
            let short = &sent[..at];
            let frame = read(short, &memory, 64).await;
            assert_eq!(joined(frame, version), whole(short, version), "v{version}, {at} bytes");
            for byte in [0, 1, 2, 0x7f, 0x80, 0xff] {
                let mut damaged = sent.clone();
                damaged[at] = byte;
                let frame = read(&damaged, &memory, 64).await;
                let expected = whole(&damaged, version);
                assert_eq!(joined(frame, version), expected, "v{version}, {byte} at {at}");
            }
        }
    }
}

#[tokio::test]
async fn other_requests_are_unchanged() {
    let memory = RequestMemory::new(1 << 30);
    let produce = request(9, &[&[Some(SEPARATE_BYTES)]]);
    // Another API, unsupported versions, and less than a header.
    for (at, byte) in [(1, 1), (0, 1), (3, 2), (3, 14), (2, 1)] {
        let mut sent = produce.clone();
        sent[at] = byte;
        for sent in [&sent[..], &sent[..at + 1]] {
            let frame = read(sent, &memory, 64).await;
            assert!(frame.batches.is_empty());
            assert_eq!(frame.bytes, sent);
        }
    }
    assert!(read(&[], &memory, 64).await.bytes.is_empty());
}

#[tokio::test]
async fn a_batch_has_a_buffer_of_exactly_its_length() {
    let memory = RequestMemory::new(1 << 30);
    let all_bytes = memory.free_bytes();
    for len_bytes in [SEPARATE_BYTES, SMALL_FRAME_BYTES, 1 << 20, (5 << 20) + 17] {
        let sent = request(9, &[&[Some(len_bytes); 2]]);
        let Frame { bytes, batches, share } = read(&sent, &memory, 8 << 10).await;
        assert!(bytes.len() < 200);
        assert_eq!(batches.len(), 2);
        for batch in batches {
            let own = batch.try_into_mut().expect("the batch has another reference");
            assert_eq!((own.len(), own.capacity()), (len_bytes, len_bytes));
        }
        // The memory taken is that of the batches, except the bytes that each connection may use.
        let taken_bytes = all_bytes - memory.free_bytes();
        assert!(taken_bytes + SMALL_FRAME_BYTES >= sent.len(), "{taken_bytes} of {}", sent.len());
        drop(share);
        assert_eq!(memory.free_bytes(), all_bytes);
    }
}

/// The arrival of further batches does not reset the pace.
#[tokio::test]
async fn while_others_wait_the_pace_of_the_whole_request_counts() {
    let memory = RequestMemory::new(STEP_BYTES as u64);
    let sent = vec![0; 2 * STEP_BYTES];
    let mut reader = BufReader::with_capacity(64, &sent[..]);
    let (timeout, deadline) = (Duration::from_secs(600), Instant::now() + Duration::from_secs(600));
    let mut incoming = Incoming::new(&mut reader, sent.len(), &memory, timeout, deadline);
    incoming.read(&mut Vec::new(), SMALL_FRAME_BYTES).await.unwrap();
    assert!(!incoming.holds_memory);
    incoming.read(&mut Vec::new(), 64).await.unwrap();
    assert!(incoming.holds_memory && memory.is_exhausted());
    let span_began = incoming.span_began;
    for _ in 0..100 {
        incoming.read(&mut Vec::new(), 64).await.unwrap();
    }
    assert_eq!(incoming.span_began, span_began);
    // 6 KiB in a minute.
    let long_ago = span_began.checked_sub(Duration::from_secs(60)).expect("a clock past a minute");
    incoming.span_began = long_ago;
    assert!(matches!(incoming.check_pace(), Err(End::SlowRequest)));
    incoming.received_bytes += 1 << 30;
    assert!(incoming.check_pace().is_ok(), "the pace suffices");
    assert_eq!(incoming.span_received_bytes, incoming.received_bytes);
    incoming.span_began = long_ago;
    incoming.share = RequestShare::default();
    assert!(incoming.check_pace().is_ok(), "no request waits");
}
