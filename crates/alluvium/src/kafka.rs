//! A small blocking Kafka client: one connection, one request at a time, versions by what both sides know.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use kafka_protocol::ResponseError;
use kafka_protocol::messages::{
    ApiKey, ApiVersionsRequest, ApiVersionsResponse, RequestHeader, ResponseHeader,
};
use kafka_protocol::protocol::{
    Decodable, Encodable, HeaderVersion, Message, Request, StrBytes, VersionRange,
};

use crate::config::HostPort;

/// Longest answer that is accepted. The answers to administrative requests are far smaller.
const MAX_RESPONSE_BYTES: usize = 64 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Sent inside requests: how long the server may take.
pub(crate) const SERVER_TIMEOUT_MS: i32 = 30_000;
/// A little longer, so that it is the server that says that time has run out.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(35);

/// A connection to a broker.
pub(crate) struct Client {
    broker: String,
    stream: TcpStream,
    correlation: i32,
    served: HashMap<i16, VersionRange>,
}

/// A request did not get an answer that can be used. The message names the broker.
#[derive(Debug, thiserror::Error)]
#[error("{broker}: {reason}")]
pub(crate) struct ClientError {
    broker: String,
    reason: String,
}

/// What a Kafka error code means, for people: the server's words if it sent any.
pub(crate) fn refusal(code: i16, message: Option<&StrBytes>) -> Option<String> {
    let error = ResponseError::try_from_code(code)?;
    Some(match message.filter(|message| !message.is_empty()) {
        Some(message) => format!("{message} ({error})"),
        // Metadata has no message of its own, and this is what people meet.
        None if error == ResponseError::UnknownTopicOrPartition => {
            format!("the topic does not exist ({error})")
        }
        None => error.to_string(),
    })
}

impl Client {
    /// Connect, and ask which versions the broker serves.
    ///
    /// # Errors
    /// The address does not resolve, nobody listens, or what answers is not a Kafka server.
    pub(crate) fn connect(broker: &HostPort) -> Result<Self, ClientError> {
        let name = broker.to_string();
        let fail = |reason: String| ClientError { broker: name.clone(), reason };
        let addresses = (broker.host.as_str(), broker.port)
            .to_socket_addrs()
            .map_err(|error| fail(format!("can not resolve the name: {error}")))?;
        let mut last_error = "the name has no address".to_string();
        let mut connected = None;
        for address in addresses {
            match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
                Ok(stream) => {
                    connected = Some(stream);
                    break;
                }
                Err(error) => last_error = error.to_string(),
            }
        }
        let stream = connected.ok_or_else(|| {
            fail(format!("can not connect: {last_error}; is `alluvium serve` running there?"))
        })?;
        stream
            .set_nodelay(true)
            .and_then(|()| stream.set_read_timeout(Some(ANSWER_TIMEOUT)))
            .and_then(|()| stream.set_write_timeout(Some(ANSWER_TIMEOUT)))
            .map_err(|error| fail(error.to_string()))?;
        let mut client = Self { broker: name, stream, correlation: 0, served: HashMap::new() };
        client.learn_versions()?;
        Ok(client)
    }

    fn learn_versions(&mut self) -> Result<(), ClientError> {
        // Every broker answers version 0, and it says all that is needed here.
        let answer: ApiVersionsResponse =
            self.exchange(ApiKey::ApiVersions as i16, 0, &ApiVersionsRequest::default())?;
        if let Some(reason) = refusal(answer.error_code, None) {
            return Err(self.error(format!("it refuses to name its API versions: {reason}")));
        }
        self.served = answer
            .api_keys
            .iter()
            .map(|api| (api.api_key, VersionRange { min: api.min_version, max: api.max_version }))
            .collect();
        Ok(())
    }

    /// The newest version of `R` that both sides know, at most `newest`.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn version<R: Request>(&self, newest: i16) -> Result<i16, ClientError> {
        let mine = VersionRange { min: R::VERSIONS.min, max: R::VERSIONS.max.min(newest) };
        let common = self.served.get(&R::KEY).map(|served| served.intersect(&mine));
        match common {
            Some(common) if !common.is_empty() => Ok(common.max),
            _ => Err(self.error(format!(
                "it does not serve API {} in a version that this program knows ({mine})",
                R::KEY
            ))),
        }
    }

    /// Send a request and wait for its answer.
    ///
    /// # Errors
    /// The connection failed, or the answer can not be decoded.
    pub(crate) fn call<R: Request>(
        &mut self,
        version: i16,
        request: &R,
    ) -> Result<R::Response, ClientError> {
        self.exchange(R::KEY, version, request)
    }

    fn exchange<Q, A>(&mut self, key: i16, version: i16, request: &Q) -> Result<A, ClientError>
    where
        Q: Encodable + HeaderVersion,
        A: Decodable + HeaderVersion + Message,
    {
        self.correlation += 1;
        let header = RequestHeader::default()
            .with_request_api_key(key)
            .with_request_api_version(version)
            .with_correlation_id(self.correlation)
            .with_client_id(Some(StrBytes::from_static_str("alluvium")));
        let mut frame = BytesMut::new();
        frame.put_i32(0);
        header
            .encode(&mut frame, Q::header_version(version))
            .and_then(|()| request.encode(&mut frame, version))
            .map_err(|error| self.error(format!("can not encode the request: {error}")))?;
        let body_bytes = i32::try_from(frame.len() - 4)
            .map_err(|_| self.error("the request is too large".into()))?;
        frame[..4].copy_from_slice(&body_bytes.to_be_bytes());

        self.stream
            .write_all(&frame)
            .map_err(|error| self.error(format!("can not send: {error}")))?;
        let mut answer = self.receive()?;
        let unreadable = |error: &dyn std::fmt::Display| {
            self.error(format!("its answer is not a Kafka response: {error}"))
        };
        let header = ResponseHeader::decode(&mut answer, A::header_version(version))
            .map_err(|error| unreadable(&error))?;
        if header.correlation_id != self.correlation {
            return Err(unreadable(&format_args!(
                "correlation id {}, expected {}",
                header.correlation_id, self.correlation
            )));
        }
        A::decode(&mut answer, version).map_err(|error| unreadable(&error))
    }

    fn receive(&mut self) -> Result<Bytes, ClientError> {
        let mut length = [0; 4];
        self.read_exact(&mut length)?;
        let length = i64::from((&length[..]).get_i32());
        let length = usize::try_from(length)
            .ok()
            .filter(|length| *length <= MAX_RESPONSE_BYTES)
            .ok_or_else(|| {
                self.error(format!("it answers with a length of {length}: not a Kafka server?"))
            })?;
        let mut body = vec![0; length];
        self.read_exact(&mut body)?;
        Ok(body.into())
    }

    fn read_exact(&mut self, buf: &mut [u8]) -> Result<(), ClientError> {
        self.stream
            .read_exact(buf)
            .map_err(|error| self.error(format!("no complete answer: {error}")))
    }

    fn error(&self, reason: String) -> ClientError {
        ClientError { broker: self.broker.clone(), reason }
    }
}
