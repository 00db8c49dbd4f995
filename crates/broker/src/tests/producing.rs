//! Produce: acknowledgements, order, sequences, durability, backpressure.

use std::time::Duration;

use alluvium_stream::{StreamEpoch, StreamOffset};
use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::list_offsets_request::{ListOffsetsPartition, ListOffsetsTopic};
use kafka_protocol::messages::produce_request::PartitionProduceData;
use kafka_protocol::messages::{
    ApiVersionsRequest, DeleteTopicsRequest, ListOffsetsRequest, ProduceRequest, TopicName,
    TransactionalId,
};
use kafka_protocol::records::Compression;
use tokio::io::AsyncWriteExt;
use tokio::time::{Instant, timeout};

use super::harness::{HANG, TestServer, fetch, produce, produce_to, stored, text};
use crate::BrokerConfig;
use crate::batch::tests::{CODECS, encode, plain, transactional};
use crate::batch::{self, BatchHeader};
use crate::topics::Topics;

/// Requests that a connection begins before any is answered: those whose responses are queued, the
/// one that is waited for, and the one whose response has no slot.
const UNANSWERED: usize = 66;

fn of_producer(id: i64, epoch: i16, sequence: i32, records: usize) -> Bytes {
    encode(Compression::None, (id, epoch, sequence), &vec![1_000; records])
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_returned_unchanged_for_every_compression_and_version() {
    let server = TestServer::start().await;
    let id = server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let mut expected = Vec::new();
    let mut next = 0;
    for version in 3..=13 {
        for codec in CODECS {
            if codec == Compression::Zstd && version < 7 {
                continue;
            }
            let batch = encode(codec, (-1, -1, -1), &[version.into(), 2, 3]);
            let mut request = produce("t", 0, &batch, if version % 2 == 0 { -1 } else { 1 });
            if version >= 13 {
                request.topic_data[0].name = Default::default();
                request.topic_data[0].topic_id = id;
            }
            let response = client.call(version, &request).await;
            let partition = &response.responses[0].partition_responses[0];
            assert_eq!(
                (partition.error_code, partition.base_offset),
                (0, next),
                "v{version} {codec:?}"
            );
            expected.extend_from_slice(&stored(&batch, next as u64));
            next += 3;
        }
    }
    for version in 4..=18 {
        let mut request = fetch("t", &[(0, 0)], 0);
        if version >= 13 {
            request.topics[0].topic = Default::default();
            request.topics[0].topic_id = id;
        }
        let response = client.call(version, &request).await;
        let partition = &response.responses[0].partitions[0];
        assert_eq!(partition.records.as_deref(), Some(&expected[..]), "v{version}");
        assert_eq!(partition.high_watermark, next);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_batches_have_kafkas_error_codes_and_change_nothing() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[("max.message.bytes", "200")]).await;
    let mut client = server.client().await;
    let good = plain(&[1]);
    let mut corrupt = good.to_vec();
    *corrupt.last_mut().unwrap() ^= 1;
    assert_eq!(
        client.produce("t", 0, &corrupt.into()).await,
        (ResponseError::CorruptMessage.code(), -1)
    );
    assert_eq!(
        client.produce("t", 0, &plain(&[1; 20])).await,
        (ResponseError::MessageTooLarge.code(), -1)
    );
    assert_eq!(
        client.produce("t", 0, &Bytes::new()).await,
        (ResponseError::InvalidRecord.code(), -1)
    );
    assert_eq!(
        client.produce("t", 1, &good).await,
        (ResponseError::UnknownTopicOrPartition.code(), -1)
    );
    assert_eq!(
        client.produce("unknown", 0, &good).await,
        (ResponseError::UnknownTopicOrPartition.code(), -1)
    );
    let code = |response: kafka_protocol::messages::ProduceResponse| {
        response.responses[0].partition_responses[0].error_code
    };
    let mut by_id = produce("", 0, &good, -1);
    by_id.topic_data[0].topic_id = uuid::Uuid::from_u128(3);
    assert_eq!(code(client.call(13, &by_id).await), ResponseError::UnknownTopicId.code());
    assert_eq!(
        code(client.call(9, &produce("t", 0, &good, 2)).await),
        ResponseError::InvalidRequiredAcks.code()
    );
    let transactional = transactional(&of_producer(7, 0, 0, 1));
    assert_eq!(
        code(client.call(9, &produce("t", 0, &transactional, -1)).await),
        ResponseError::TransactionalIdAuthorizationFailed.code()
    );
    let unknown =
        produce("t", 0, &transactional, -1).with_transactional_id(Some(TransactionalId(text("x"))));
    assert_eq!(
        code(client.call(9, &unknown).await),
        ResponseError::InvalidProducerIdMapping.code()
    );
    assert_eq!(client.produce("t", 0, &good).await, (0, 0));
    assert_eq!(client.fetch("t", 0, 0).await, (0, 1, stored(&good, 0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_batches_return_the_first_offset_and_sequence_gaps_are_refused() {
    let server = TestServer::start().await;
    server.topic("t", 2, &[]).await;
    let mut client = server.client().await;
    assert_eq!(client.produce("t", 0, &of_producer(7, 0, 0, 2)).await, (0, 0));
    assert_eq!(client.produce("t", 0, &plain(&[5])).await, (0, 2));
    assert_eq!(client.produce("t", 0, &of_producer(7, 0, 2, 3)).await, (0, 3));
    assert_eq!(client.produce("t", 0, &of_producer(7, 0, 0, 2)).await, (0, 0), "a repetition");
    assert_eq!(client.produce("t", 0, &of_producer(7, 0, 2, 3)).await, (0, 3), "a repetition");
    assert_eq!(
        client.produce("t", 0, &of_producer(7, 0, 6, 1)).await,
        (ResponseError::OutOfOrderSequenceNumber.code(), -1),
        "a gap"
    );
    assert_eq!(client.produce("t", 0, &of_producer(7, 1, 0, 1)).await, (0, 6), "a new epoch");
    assert_eq!(
        client.produce("t", 0, &of_producer(7, 0, 5, 1)).await,
        (ResponseError::InvalidProducerEpoch.code(), -1),
        "the old epoch"
    );
    assert_eq!(
        client.produce("t", 1, &of_producer(7, 0, 0, 1)).await,
        (0, 0),
        "each partition has its own"
    );
    let (_, high_watermark, _) = client.fetch("t", 0, 0).await;
    assert_eq!(high_watermark, 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn acks_0_has_no_response_and_an_error_closes_the_connection() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    client.send(9, &produce("t", 0, &plain(&[1]), 0)).await;
    // The next response is that of the next request.
    assert_eq!(client.produce("t", 0, &plain(&[2])).await, (0, 1));
    client.send(9, &produce("t", 9, &plain(&[1]), 0)).await;
    assert!(client.receive_frame().await.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_handled_and_answered_in_order() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let mut sent = Vec::new();
    for i in 0..200 {
        let batch = of_producer(9, 0, i, 1);
        sent.push(client.send(9, &produce("t", 0, &batch, -1)).await);
    }
    for (offset, correlation_id) in sent.into_iter().enumerate() {
        let response = client.receive::<ProduceRequest>(9, correlation_id).await;
        let partition = &response.responses[0].partition_responses[0];
        assert_eq!((partition.error_code, partition.base_offset), (0, offset as i64));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_neither_acknowledged_nor_visible_before_they_are_durable() {
    let server = TestServer::simulated(16 << 20).await;
    server.topic("t", 1, &[]).await;
    let (mut first, mut again, mut reader) =
        (server.client().await, server.client().await, server.client().await);
    server.hold_disk(true);
    let batch = of_producer(3, 0, 0, 1);
    let first_id = first.send(9, &produce("t", 0, &batch, -1)).await;
    // Handled while the previous one waits; answered after it.
    let behind = first.send(0, &ApiVersionsRequest::default()).await;
    // A later request of the other connection finds the batch appended.
    while server
        .store()
        .stream_ids()
        .iter()
        .all(|id| server.store().stream(*id).unwrap().next_offset().0 == 0)
    {
        tokio::task::yield_now().await;
    }
    let again_id = again.send(9, &produce("t", 0, &batch, -1)).await;
    assert_eq!(reader.fetch("t", 0, 0).await, (0, 0, Bytes::new()));
    let mut byte = [0];
    for waiting in [&first, &again] {
        let early = timeout(Duration::from_millis(100), waiting.socket.peek(&mut byte)).await;
        assert!(early.is_err(), "answered before the disk has written");
    }

    server.hold_disk(false);
    for (client, id) in [(&mut first, first_id), (&mut again, again_id)] {
        let response = client.receive::<ProduceRequest>(9, id).await;
        let partition = &response.responses[0].partition_responses[0];
        assert_eq!((partition.error_code, partition.base_offset), (0, 0));
    }
    first.receive::<ApiVersionsRequest>(0, behind).await;
    assert_eq!(reader.fetch("t", 0, 0).await, (0, 1, stored(&batch, 0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn appended_records_stay_when_the_client_disconnects() {
    let server = TestServer::simulated(16 << 20).await;
    server.topic("t", 1, &[]).await;
    server.hold_disk(true);
    let mut client = server.client().await;
    let batch = of_producer(3, 0, 0, 1);
    client.send(9, &produce("t", 0, &batch, -1)).await;
    while server
        .store()
        .stream_ids()
        .iter()
        .all(|id| server.store().stream(*id).unwrap().next_offset().0 == 0)
    {
        tokio::task::yield_now().await;
    }
    drop(client);
    server.hold_disk(false);
    assert_eq!(
        server.client().await.produce("t", 0, &batch).await,
        (0, 0),
        "the repetition is recognised"
    );
    assert_eq!(server.client().await.produce("t", 0, &of_producer(3, 0, 1, 1)).await, (0, 1));
}

/// Otherwise a client would resend what is in the log.
#[tokio::test(flavor = "multi_thread")]
async fn the_produce_timeout_covers_waiting_for_log_space_and_not_for_the_disk() {
    for acks in [1, -1] {
        let server = TestServer::simulated(16 << 20).await;
        server.topic("t", 1, &[]).await;
        let partition = server.server().topics.by_name("t").unwrap().partitions[0].clone();
        server.hold_disk(true);
        let mut clients = [server.client().await, server.client().await];
        let request = produce("t", 0, &of_producer(3, 0, 0, 1), acks).with_timeout_ms(0);
        let mut ids = Vec::new();
        for client in &mut clients {
            ids.push(client.send(9, &request).await);
            while partition.stream.next_offset().0 == 0 {
                tokio::task::yield_now().await;
            }
        }
        server.fill_log("t");
        let full = partition.stream.next_offset();
        let large = produce("t", 0, &of_producer(-1, -1, -1, 100), acks).with_timeout_ms(20);
        let refused = server.client().await.call(9, &large).await;
        let refused = &refused.responses[0].partition_responses[0];
        assert_eq!(
            (refused.error_code, refused.base_offset),
            (ResponseError::RequestTimedOut.code(), -1),
            "there is no space"
        );
        let mut byte = [0];
        for client in &clients {
            let early = timeout(Duration::from_millis(50), client.socket.peek(&mut byte));
            assert!(early.await.is_err(), "answered before the disk has written");
        }

        server.hold_disk(false);
        for (client, id) in clients.iter_mut().zip(ids) {
            let response = client.receive::<ProduceRequest>(9, id).await;
            let answer = &response.responses[0].partition_responses[0];
            assert_eq!((answer.error_code, answer.base_offset), (0, 0), "acks {acks}");
        }
        assert_eq!(partition.stream.next_offset(), full, "refused records are not in the log");
    }
}

/// A stalled disk does not hold the connection of a client that has disconnected.
#[tokio::test(flavor = "multi_thread")]
async fn a_disconnected_client_does_not_hold_its_connection_during_a_disk_stall() {
    let configure = |config: &mut BrokerConfig| config.transfer_timeout = Duration::from_secs(1);
    let server = TestServer::simulated_with(16 << 20, configure).await;
    server.topic("t", 1, &[]).await;
    let partition = server.server().topics.by_name("t").unwrap().partitions[0].clone();
    server.hold_disk(true);
    let mut client = server.client().await;
    let request = produce("t", 0, &of_producer(3, 0, 0, 1), -1).with_timeout_ms(i32::MAX);
    client.send(9, &request).await;
    while partition.stream.next_offset().0 == 0 {
        tokio::task::yield_now().await;
    }
    drop(client);
    server.all_disconnected().await;
    server.hold_disk(false);
}

/// Nor if more was sent than the server reads before it has answered.
#[tokio::test(flavor = "multi_thread")]
async fn a_disconnected_client_with_unread_requests_does_not_hold_its_connection() {
    let configure = |config: &mut BrokerConfig| config.transfer_timeout = Duration::from_secs(1);
    let server = TestServer::simulated_with(16 << 20, configure).await;
    server.topic("t", 300, &[]).await;
    server.hold_disk(true);
    // More responses than may wait; and more bytes of them.
    for (partitions, requests) in [(1, UNANSWERED + 4), (300, 4)] {
        let mut client = server.client().await;
        client.send_many(&produce_to("t", partitions), requests).await;
        drop(client);
        server.all_disconnected().await;
    }
    server.hold_disk(false);
}

/// The disconnect is not noticed if the system could not receive all that the client has sent.
#[tokio::test(flavor = "multi_thread")]
async fn an_undetected_disconnect_is_closed_after_a_timeout() {
    let configure = |config: &mut BrokerConfig| {
        config.transfer_timeout = Duration::from_secs(1);
        config.idle_timeout = Duration::from_secs(2);
    };
    let server = TestServer::simulated_with(16 << 20, configure).await;
    server.topic("t", 1, &[]).await;
    server.hold_disk(true);
    let mut client = server.client().await;
    client.send_many(&produce_to("t", 1), 2_000).await;
    drop(client);
    server.all_disconnected().await;
    server.hold_disk(false);
}

/// Connected clients do not delay the stop of the server.
#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_server_does_not_wait_for_unread_requests() {
    let configure = |config: &mut BrokerConfig| {
        config.transfer_timeout = Duration::from_secs(1);
        config.shutdown_grace = Duration::from_secs(3_600);
    };
    let mut server = TestServer::simulated_with(16 << 20, configure).await;
    server.topic("t", 1, &[]).await;
    server.hold_disk(true);
    let mut client = server.client().await;
    client.send_many(&produce_to("t", 1), 200).await;
    server.begun("Produce", 9, UNANSWERED).await;
    timeout(HANG, server.crash()).await.expect("the server does not stop");
}

/// It may have nothing more to send, and wait for the response.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_has_shut_down_its_sending_side_is_answered() {
    let server = TestServer::simulated(16 << 20).await;
    server.topic("t", 1, &[]).await;
    let partition = server.server().topics.by_name("t").unwrap().partitions[0].clone();
    server.hold_disk(true);
    let mut client = server.client().await;
    let request = produce("t", 0, &of_producer(3, 0, 0, 1), -1);
    let id = client.send(9, &request).await;
    client.socket.shutdown().await.unwrap();
    while partition.stream.next_offset().0 == 0 {
        tokio::task::yield_now().await;
    }
    server.hold_disk(false);
    let response = client.receive::<ProduceRequest>(9, id).await;
    assert_eq!(response.responses[0].partition_responses[0].error_code, 0);
}

/// Also with more requests than the server reads before it has answered.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_has_shut_down_its_sending_side_receives_all_responses() {
    let configure = |config: &mut BrokerConfig| config.transfer_timeout = Duration::from_secs(5);
    let server = TestServer::simulated_with(16 << 20, configure).await;
    server.topic("t", 1, &[]).await;
    server.hold_disk(true);
    let mut client = server.client().await;
    let ids = client.send_many(&produce_to("t", 1), 200).await;
    client.socket.shutdown().await.unwrap();
    server.begun("Produce", 9, UNANSWERED).await;
    // Time for the server to notice that.
    tokio::time::sleep(Duration::from_secs(1)).await;
    server.hold_disk(false);
    for (id, offset) in ids.into_iter().zip(0..) {
        let response = client.receive::<ProduceRequest>(9, id).await;
        let answer = &response.responses[0].partition_responses[0];
        assert_eq!((answer.error_code, answer.base_offset), (0, offset));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_beyond_the_size_of_the_log_can_be_produced() {
    let server = TestServer::with(2 << 20, |_| {}).await;
    server.topic("t", 2, &[]).await;
    let batch = encode(Compression::None, (-1, -1, -1), &vec![1; 3_000]);
    let mut clients = Vec::new();
    for partition in 0..2 {
        let mut client = server.client().await;
        let batch = batch.clone();
        clients.push(tokio::spawn(async move {
            for i in 0..60 {
                assert_eq!(client.produce("t", partition, &batch).await, (0, i * 3_000));
            }
        }));
    }
    for client in clients {
        client.await.unwrap();
    }
    // The first ones come from objects, byte for byte.
    let mut client = server.client().await;
    for i in [0, 1, 30, 59] {
        let (error, _, records) = client.fetch("t", 1, i * 3_000).await;
        assert_eq!(error, 0);
        assert_eq!(records[..batch.len()], stored(&batch, i as u64 * 3_000)[..]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_can_use_log_append_time() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[("message.timestamp.type", "LogAppendTime")]).await;
    let mut client = server.client().await;
    let before = crate::partition::unix_time_ms();
    let batch = of_producer(4, 0, 0, 2);
    let request = produce("t", 0, &batch, -1);
    let response = client.call(9, &request).await;
    let time = response.responses[0].partition_responses[0].log_append_time_ms;
    assert!(time >= before);
    let (_, _, records) = client.fetch("t", 0, 0).await;
    let header = BatchHeader::parse(&records).unwrap();
    assert!(header.is_log_append_time());
    assert_eq!(header.max_timestamp_ms, time);
    let again = client.call(9, &request).await;
    assert_eq!(
        again.responses[0].partition_responses[0].log_append_time_ms, time,
        "as the first time"
    );
}

/// Stored records are served to every reader, and a client stops at invalid ones.
#[tokio::test(flavor = "multi_thread")]
async fn uncompressed_records_that_are_unreadable_are_refused() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let good = plain(&[500, 900]);
    let edited = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = good.to_vec();
        edit(&mut bytes);
        // Recomputes the CRC.
        let header = BatchHeader::parse(&bytes).unwrap();
        batch::set_max_timestamp(&mut bytes, header.max_timestamp_ms);
        Bytes::from(bytes)
    };
    // The first record: its length, attributes, timestamp delta, offset delta.
    let (length, offset_delta) = (batch::HEADER_BYTES, batch::HEADER_BYTES + 3);
    assert_eq!(good[offset_delta], 0);
    assert_eq!(
        client.produce("t", 0, &edited(&|b| b[length] += 2)).await,
        (ResponseError::InvalidRecord.code(), -1)
    );
    assert_eq!(
        client.produce("t", 0, &edited(&|b| b[offset_delta] = 2)).await,
        (ResponseError::InvalidRecord.code(), -1)
    );
    // Its header does not contain the maximum timestamp of its records: it is corrected, as by
    // Kafka.
    let boasting = edited(&|b| batch::set_max_timestamp(b, 7_000));
    assert_eq!(client.produce("t", 0, &boasting).await, (0, 0));
    assert_eq!(client.fetch("t", 0, 0).await, (0, 2, stored(&good, 0)));
}

/// Some clients (Sarama) leave the maximum timestamp in the header at -1. Offsets are searched by
/// it.
#[tokio::test(flavor = "multi_thread")]
async fn a_missing_maximum_timestamp_is_computed() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let missing = |batch: &Bytes| {
        let mut bytes = batch.to_vec();
        batch::set_max_timestamp(&mut bytes, -1);
        bytes
    };
    let mut next = 0;
    for codec in [Compression::None, Compression::Gzip, Compression::Zstd] {
        let batch = encode(codec, (-1, -1, -1), &[next + 500, next + 900, next + 700]);
        let produced = client.produce("t", 0, &missing(&batch).into()).await;
        assert_eq!(produced, (0, next / 1_000 * 3), "{codec:?}");
        let fetched = client.fetch("t", 0, produced.1).await.2;
        assert_eq!(fetched, stored(&batch, produced.1 as u64), "{codec:?}: as if it had been set");

        let wanted = ListOffsetsPartition::default().with_timestamp(next + 800);
        let topic = ListOffsetsTopic::default()
            .with_name(TopicName(text("t")))
            .with_partitions(vec![wanted]);
        let request = ListOffsetsRequest::default().with_topics(vec![topic]);
        let found = &client.call(7, &request).await.topics[0].partitions[0];
        assert_eq!((found.offset, found.timestamp), (produced.1 + 1, next + 900), "{codec:?}");
        next += 1_000;
    }
    // It cannot be determined from unreadable records.
    let mut damaged = missing(&encode(Compression::None, (-1, -1, -1), &[500, 900]));
    *damaged.last_mut().unwrap() = 0x7f;
    damaged[batch::HEADER_BYTES] = 0xff;
    batch::set_max_timestamp(&mut damaged, -1);
    assert_eq!(
        client.produce("t", 0, &damaged.into()).await.0,
        ResponseError::InvalidRecord.code()
    );
    // Without timestamps there is none to determine.
    let none = encode(Compression::None, (-1, -1, -1), &[-1, -1]);
    assert_eq!(client.produce("t", 0, &none).await.0, 0);
}

/// Another writer has opened a partition's stream, as the next leader would.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_whose_stream_was_taken_over_has_another_leader() {
    const NOT_LEADER: i16 = ResponseError::NotLeaderOrFollower.code();
    let server = TestServer::start().await;
    server.topic("t", 2, &[]).await;
    let mut client = server.client().await;
    let batch = of_producer(3, 0, 0, 1);
    assert_eq!(client.produce("t", 0, &batch).await, (0, 0));
    let stream = server.server().topics.by_name("t").unwrap().partitions[0].stream.id();
    let other = server.store().open_stream(stream, StreamEpoch(1)).await.unwrap();

    assert_eq!(client.produce("t", 0, &of_producer(3, 0, 1, 1)).await, (NOT_LEADER, -1));
    assert_eq!(other.next_offset().0, 1, "nothing was appended");
    assert_eq!(client.produce("t", 1, &of_producer(3, 0, 0, 1)).await, (0, 0), "it leads this one");
    assert_eq!(client.fetch("t", 0, 0).await, (0, 1, stored(&batch, 0)));
    let names = vec![TopicName(text("t"))];
    let delete = DeleteTopicsRequest::default().with_topic_names(names).with_timeout_ms(30_000);
    let deleted = client.call(5, &delete).await;
    assert_eq!(deleted.responses[0].error_code, NOT_LEADER);
    assert_eq!(client.fetch("t", 0, 0).await, (0, 1, stored(&batch, 0)), "it is there");
    let refused = Topics::open(server.store().clone(), Default::default(), 10).await.err().unwrap();
    assert!(
        refused.to_string().contains("partition 0: stream"),
        "the error names the partition: {refused}"
    );
}

/// A batch that has its memory to itself is not copied; memory that is shared is neither changed
/// nor kept.
#[tokio::test(flavor = "multi_thread")]
async fn the_log_cache_keeps_the_received_memory_of_a_batch() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let topic = server.server().topics.by_name("t").unwrap();
    let (partition, store) = (&topic.partitions[0], &server.server().store);
    let shared = plain(&[1, 2]);
    let header = BatchHeader::parse(&shared).unwrap();
    let own = Bytes::from(shared.to_vec());
    let at = own.as_ptr();
    for records in [own, shared.clone()] {
        let (rules, deadline) = (topic.rules.append, Instant::now() + HANG);
        let appended = partition.append(store, &header, records, rules, deadline, || Ok(())).await;
        partition.durable(store, appended.unwrap()).await.unwrap();
    }
    let kept = partition.stream.fetch_now(StreamOffset(0), 1 << 20).unwrap().batches;
    assert_eq!(kept[0].payload, stored(&shared, 0));
    assert_eq!(kept[1].payload, stored(&shared, 2));
    assert_eq!(kept[0].payload.as_ptr(), at);
    assert_ne!(kept[1].payload.as_ptr(), shared.as_ptr());
    assert_eq!(shared, plain(&[1, 2]), "it is unchanged");
}

/// Batches that are read apart from their request, and others, whatever happens to the rest.
#[tokio::test(flavor = "multi_thread")]
async fn each_batch_of_a_request_is_appended_to_its_partition() {
    let server = TestServer::start().await;
    server.topic("t", 3, &[]).await;
    let mut client = server.client().await;
    let large = |from_ms: i64| plain(&(from_ms..from_ms + 500).collect::<Vec<_>>());
    let mut damaged = large(1).to_vec();
    *damaged.last_mut().unwrap() ^= 1;
    let sent = [
        (0, Some(large(1_000))),
        (7, Some(large(2_000))),
        (1, Some(plain(&[3]))),
        (1, None),
        (2, Some(damaged.into())),
        (2, Some(Bytes::new())),
        (2, Some(large(4_000))),
    ];
    for (round, version) in [(0, 3), (1, 9)] {
        let mut request = produce("t", 0, &Bytes::new(), -1);
        let partition = |(index, records): &(i32, Option<Bytes>)| {
            PartitionProduceData::default().with_index(*index).with_records(records.clone())
        };
        request.topic_data[0].partition_data = sent.iter().map(partition).collect();
        let response = client.call(version, &request).await;
        let partitions = &response.responses[0].partition_responses;
        let codes: Vec<i16> = partitions.iter().map(|partition| partition.error_code).collect();
        assert_eq!(
            codes,
            [
                0,
                ResponseError::UnknownTopicOrPartition.code(),
                0,
                ResponseError::InvalidRecord.code(),
                ResponseError::CorruptMessage.code(),
                ResponseError::InvalidRecord.code(),
                0
            ],
            "v{version}"
        );
        for (partition, batch) in [(0, large(1_000)), (1, plain(&[3])), (2, large(4_000))] {
            let base = round * u64::from(BatchHeader::parse(&batch).unwrap().offsets());
            let (code, _, kept) = client.fetch("t", partition, base as i64).await;
            assert_eq!((code, kept), (0, stored(&batch, base)), "v{version}, {partition}");
        }
    }
}
