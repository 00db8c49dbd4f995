//! Produces one record to one partition over the network.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use bytes::{BufMut, Bytes, BytesMut};
use kafka_protocol::messages::produce_request::{PartitionProduceData, TopicProduceData};
use kafka_protocol::messages::{
    ApiKey, ProduceRequest, ProduceResponse, RequestHeader, ResponseHeader, TopicName,
};
use kafka_protocol::protocol::{Decodable, Encodable, StrBytes};
use kafka_protocol::records::{
    Compression, NO_PARTITION_LEADER_EPOCH, NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE, Record,
    RecordBatchEncoder, RecordEncodeOptions, TimestampType,
};

/// The last version without tagged fields: headers are of the older kind.
const VERSION: i16 = 8;

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

    let header = RequestHeader::default()
        .with_request_api_key(ApiKey::Produce as i16)
        .with_request_api_version(VERSION)
        .with_correlation_id(1);
    let mut frame = BytesMut::new();
    frame.put_i32(0);
    header.encode(&mut frame, 1).expect("the header is valid");
    request.encode(&mut frame, VERSION).expect("the request is valid");
    let length = i32::try_from(frame.len() - 4).expect("the request is small");
    frame[..4].copy_from_slice(&length.to_be_bytes());

    let mut stream = TcpStream::connect(broker)?;
    // Only a server that hangs takes so long.
    stream.set_read_timeout(Some(std::time::Duration::from_secs(120)))?;
    stream.write_all(&frame)?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let mut answer = vec![0; u32::from_be_bytes(length) as usize];
    stream.read_exact(&mut answer)?;
    let mut answer = Bytes::from(answer);
    ResponseHeader::decode(&mut answer, 0).expect("the answer has a header");
    let answer = ProduceResponse::decode(&mut answer, VERSION).expect("the answer is valid");
    Ok(answer.responses[0].partition_responses[0].error_code)
}
