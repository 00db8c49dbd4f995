//! Produces one record to one partition over the network, and consumes the records of one.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use bytes::{BufMut, Bytes, BytesMut};
use kafka_protocol::messages::fetch_request::{FetchPartition, FetchTopic};
use kafka_protocol::messages::produce_request::{PartitionProduceData, TopicProduceData};
use kafka_protocol::messages::{
    FetchRequest, ProduceRequest, RequestHeader, ResponseHeader, TopicName,
};
use kafka_protocol::protocol::{Decodable, Encodable, Request, StrBytes};
use kafka_protocol::records::{
    Compression, NO_PARTITION_LEADER_EPOCH, NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE, Record,
    RecordBatchDecoder, RecordBatchEncoder, RecordEncodeOptions, TimestampType,
};

/// The last versions without tagged fields: headers are of the older kind.
const PRODUCE_VERSION: i16 = 8;
const FETCH_VERSION: i16 = 11;

/// Sends `value` to partition 0 of `topic` with acks=all. Returns the error code of the response; 0
/// is an acknowledgement.
///
/// # Errors
/// The server has closed the connection instead.
pub fn produce(broker: &str, topic: &str, value: &'static [u8]) -> io::Result<i16> {
    let record = Record {
        transactional: false,
        control: false,
        delete_horizon: false,
        partition_leader_epoch: NO_PARTITION_LEADER_EPOCH,
        producer_id: NO_PRODUCER_ID,
        producer_epoch: NO_PRODUCER_EPOCH,
        timestamp_type: TimestampType::Creation,
        offset: 0,
        sequence: NO_SEQUENCE,
        timestamp: 1,
        key: None,
        value: Some(Bytes::from_static(value)),
        headers: Default::default(),
    };
    let options = RecordEncodeOptions { version: 2, compression: Compression::None };
    let mut batch = BytesMut::new();
    RecordBatchEncoder::encode(&mut batch, [&record], &options).expect("the record is valid");
    let partition =
        PartitionProduceData::default().with_index(0).with_records(Some(batch.freeze()));
    let topic = TopicProduceData::default()
        .with_name(TopicName(StrBytes::from_string(topic.into())))
        .with_partition_data(vec![partition]);
    let request = ProduceRequest::default()
        .with_acks(-1)
        .with_timeout_ms(10_000)
        .with_topic_data(vec![topic]);

    let mut stream = TcpStream::connect(broker)?;
    let answer = call(&mut stream, PRODUCE_VERSION, &request)?;
    Ok(answer.responses[0].partition_responses[0].error_code)
}

/// Returns the values of the records in partition 0 of `topic`.
///
/// # Panics
/// The server does not answer, or a record cannot be read.
pub fn consume(broker: &str, topic: &str) -> Vec<String> {
    let mut stream = TcpStream::connect(broker).expect("the server accepts connections");
    let (mut values, mut next) = (Vec::new(), 0);
    loop {
        let partition = FetchPartition::default()
            .with_fetch_offset(next)
            .with_current_leader_epoch(-1)
            .with_log_start_offset(-1)
            .with_partition_max_bytes(1 << 20);
        let topic = FetchTopic::default()
            .with_topic(TopicName(StrBytes::from_string(topic.into())))
            .with_partitions(vec![partition]);
        let request = FetchRequest::default()
            .with_replica_id((-1).into())
            .with_max_wait_ms(10_000)
            .with_min_bytes(0)
            .with_max_bytes(1 << 20)
            .with_session_epoch(-1)
            .with_topics(vec![topic]);
        let answer = call(&mut stream, FETCH_VERSION, &request).expect("there is an answer");
        let partition = &answer.responses[0].partitions[0];
        assert_eq!(partition.error_code, 0, "a fetch at offset {next}");
        if next >= partition.high_watermark {
            return values;
        }
        let mut batches = partition.records.clone().expect("there are records");
        // Also of batches without records. There is none while an object is being read.
        next = next.max(end_of(&batches));
        let sets = RecordBatchDecoder::decode_all(&mut batches).expect("the records are valid");
        for record in sets.into_iter().flat_map(|set| set.records) {
            let value = record.value.expect("each record has a value");
            values.push(String::from_utf8_lossy(&value).into_owned());
        }
    }
}

/// Returns the offset after the last of these batches.
fn end_of(batches: &[u8]) -> i64 {
    let (mut end, mut rest) = (0, batches);
    while let Some((header, _)) = rest.split_at_checked(61) {
        let base = i64::from_be_bytes(header[..8].try_into().expect("8 bytes"));
        let bytes = i32::from_be_bytes(header[8..12].try_into().expect("4 bytes"));
        let delta = i32::from_be_bytes(header[23..27].try_into().expect("4 bytes"));
        end = base + i64::from(delta) + 1;
        rest = rest.get(12 + usize::try_from(bytes).expect("a length")..).unwrap_or(&[]);
    }
    end
}

fn call<R: Request>(stream: &mut TcpStream, version: i16, request: &R) -> io::Result<R::Response> {
    let header = RequestHeader::default()
        .with_request_api_key(R::KEY)
        .with_request_api_version(version)
        .with_correlation_id(1);
    let mut frame = BytesMut::new();
    frame.put_i32(0);
    header.encode(&mut frame, 1).expect("the header is valid");
    request.encode(&mut frame, version).expect("the request is valid");
    let length = i32::try_from(frame.len() - 4).expect("the request is small");
    frame[..4].copy_from_slice(&length.to_be_bytes());

    // Only a server that hangs takes so long.
    stream.set_read_timeout(Some(std::time::Duration::from_secs(120)))?;
    stream.write_all(&frame)?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let mut answer = vec![0; u32::from_be_bytes(length) as usize];
    stream.read_exact(&mut answer)?;
    let mut answer = Bytes::from(answer);
    ResponseHeader::decode(&mut answer, 0).expect("the answer has a header");
    Ok(R::Response::decode(&mut answer, version).expect("the answer is valid"))
}
