//! A blocking Kafka client: one connection, fixed versions, and unmodified answers.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use kafka_protocol::messages::incremental_alter_configs_request::{
    AlterConfigsResource, AlterableConfig,
};
use kafka_protocol::messages::list_offsets_request::{ListOffsetsPartition, ListOffsetsTopic};
use kafka_protocol::messages::list_offsets_response::ListOffsetsPartitionResponse;
use kafka_protocol::messages::{
    BrokerId, IncrementalAlterConfigsRequest, ListOffsetsRequest, RequestHeader, ResponseHeader,
    TopicName,
};
use kafka_protocol::protocol::{Decodable, Encodable, HeaderVersion, Request, StrBytes};

use crate::Error;

/// Kafka's special timestamps of ListOffsets.
pub(crate) const LATEST: i64 = -1;
pub(crate) const EARLIEST: i64 = -2;
/// The first offset that is not only in remote storage (KIP-405).
pub(crate) const EARLIEST_LOCAL: i64 = -4;
/// The longest wait for an answer. The server works on loopback and on a few MiB.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// A resource that has settings.
#[derive(Clone, Copy)]
pub(crate) enum Resource<'a> {
    Topic(&'a str),
    /// All brokers.
    Brokers,
}

/// A connection to the server under test.
pub(crate) struct Client {
    socket: TcpStream,
    correlation: i32,
}

impl Client {
    pub(crate) fn connect(address: SocketAddr) -> Result<Self, Error> {
        let socket = TcpStream::connect(address)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(ANSWER_LIMIT))?;
        socket.set_write_timeout(Some(ANSWER_LIMIT))?;
        Ok(Self { socket, correlation: 0 })
    }

    /// Sends a request and waits for its answer.
    pub(crate) fn call<R: Request>(
        &mut self,
        version: i16,
        request: &R,
    ) -> Result<R::Response, Error> {
        self.correlation += 1;
        let header = RequestHeader::default()
            .with_request_api_key(R::KEY)
            .with_request_api_version(version)
            .with_correlation_id(self.correlation)
            .with_client_id(Some(StrBytes::from_static_str("xtask")));
        let mut frame = BytesMut::new();
        frame.put_i32(0);
        header.encode(&mut frame, R::header_version(version)).map_err(|error| error.to_string())?;
        request.encode(&mut frame, version).map_err(|error| error.to_string())?;
        let length = i32::try_from(frame.len() - 4)?;
        frame[..4].copy_from_slice(&length.to_be_bytes());
        let failed = |error| format!("no answer to API {}: {error}", R::KEY);
        self.socket.write_all(&frame).map_err(failed)?;
        let mut length = [0; 4];
        self.socket.read_exact(&mut length).map_err(failed)?;
        let mut answer = vec![0; u32::from_be_bytes(length) as usize];
        self.socket.read_exact(&mut answer).map_err(failed)?;
        let mut answer = Bytes::from(answer);
        ResponseHeader::decode(&mut answer, R::Response::header_version(version))
            .map_err(|error| error.to_string())?;
        R::Response::decode(&mut answer, version).map_err(|error| error.to_string().into())
    }

    /// Sets a setting.
    pub(crate) fn set(
        &mut self,
        resource: Resource<'_>,
        name: &str,
        value: &str,
    ) -> Result<(), Error> {
        const TOPIC: i8 = 2;
        const BROKER: i8 = 4;
        let text = |text: &str| StrBytes::from_string(text.to_owned());
        let config = AlterableConfig::default()
            .with_name(text(name))
            .with_config_operation(0)
            .with_value(Some(text(value)));
        let (resource_type, resource_name) = match resource {
            Resource::Topic(topic) => (TOPIC, topic),
            Resource::Brokers => (BROKER, ""),
        };
        let resource = AlterConfigsResource::default()
            .with_resource_type(resource_type)
            .with_resource_name(text(resource_name))
            .with_configs(vec![config]);
        let request = IncrementalAlterConfigsRequest::default().with_resources(vec![resource]);
        for result in self.call(0, &request)?.responses {
            if result.error_code != 0 {
                let reason = result.error_message.unwrap_or_default();
                let code = result.error_code;
                return Err(format!("{name}={value}: error code {code}: {reason}").into());
            }
        }
        Ok(())
    }

    /// Asks for the offsets of partitions of a topic, by a time or one of Kafka's special values.
    pub(crate) fn list_offsets(
        &mut self,
        topic: &str,
        indexes: impl Iterator<Item = i32>,
        time: i64,
    ) -> Result<Vec<ListOffsetsPartitionResponse>, Error> {
        let wanted = indexes.map(|index| {
            ListOffsetsPartition::default()
                .with_partition_index(index)
                .with_current_leader_epoch(-1)
                .with_timestamp(time)
        });
        let topic = ListOffsetsTopic::default()
            .with_name(topic_name(topic))
            .with_partitions(wanted.collect());
        let request =
            ListOffsetsRequest::default().with_replica_id(BrokerId(-1)).with_topics(vec![topic]);
        let answer = self.call(8, &request)?;
        Ok(answer.topics.into_iter().flat_map(|topic| topic.partitions).collect())
    }
}

/// Converts a topic's name for requests.
pub(crate) fn topic_name(name: &str) -> TopicName {
    TopicName(StrBytes::from_string(name.to_owned()))
}
