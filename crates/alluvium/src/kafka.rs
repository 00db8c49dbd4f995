//! A small blocking Kafka client: one connection, versions by what both sides know.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use kafka_protocol::ResponseError;
use kafka_protocol::messages::{ApiVersionsRequest, RequestHeader, ResponseHeader};
use kafka_protocol::protocol::{
    Decodable, Encodable, HeaderVersion, Request, StrBytes, VersionRange,
};

use crate::address::HostPort;

/// Longest answer that is accepted. The answers to administrative requests are far smaller.
const MAX_RESPONSE_BYTES: usize = 64 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Sent inside requests: how long the server may take.
pub(crate) const SERVER_TIMEOUT_MS: i32 = 30_000;
/// A little longer, so that it is the server that says that time has run out.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(35);

/// A connection to a broker.
pub(crate) struct Client {
    sending: Sending,
    receiving: Receiving,
    served: HashMap<i16, VersionRange>,
}

/// The half of a connection that requests go into.
pub(crate) struct Sending {
    broker: String,
    stream: TcpStream,
    correlation: i32,
    frame: BytesMut,
}

/// The half that answers come out of, in the order of the requests.
pub(crate) struct Receiving {
    broker: String,
    stream: TcpStream,
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
        let reading = stream.try_clone().map_err(|error| fail(error.to_string()))?;
        let frame = BytesMut::new();
        let mut client = Self {
            receiving: Receiving { broker: name.clone(), stream: reading },
            sending: Sending { broker: name, stream, correlation: 0, frame },
            served: HashMap::new(),
        };
        client.learn_versions()?;
        Ok(client)
    }

    /// To send requests while earlier ones have no answer yet.
    pub(crate) fn into_halves(self) -> (Sending, Receiving) {
        (self.sending, self.receiving)
    }

    fn learn_versions(&mut self) -> Result<(), ClientError> {
        // Every broker answers version 0, and it says all that is needed here.
        let answer = self.call(0, &ApiVersionsRequest::default())?;
        if let Some(reason) = refusal(answer.error_code, None) {
            return Err(self
                .sending
                .error(format!("it refuses to name its API versions: {reason}")));
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
            _ => Err(self.sending.error(format!(
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
        let correlation = self.sending.send(version, request)?;
        self.receiving.answer::<R>(version, correlation)
    }
}

impl Sending {
    /// Send a request. Returns its correlation id.
    ///
    /// # Errors
    /// The connection failed, or the request can not be encoded.
    pub(crate) fn send<R: Request>(
        &mut self,
        version: i16,
        request: &R,
    ) -> Result<i32, ClientError> {
        self.correlation = self.correlation.wrapping_add(1);
        let header = RequestHeader::default()
            .with_request_api_key(R::KEY)
            .with_request_api_version(version)
            .with_correlation_id(self.correlation)
            .with_client_id(Some(StrBytes::from_static_str("alluvium")));
        self.frame.clear();
        self.frame.put_i32(0);
        header
            .encode(&mut self.frame, R::header_version(version))
            .and_then(|()| request.encode(&mut self.frame, version))
            .map_err(|error| self.error(format!("can not encode the request: {error}")))?;
        let body_bytes = i32::try_from(self.frame.len() - 4)
            .map_err(|_| self.error("the request is too large".into()))?;
        self.frame[..4].copy_from_slice(&body_bytes.to_be_bytes());
        self.stream
            .write_all(&self.frame)
            .map_err(|error| self.error(format!("can not send: {error}")))?;
        Ok(self.correlation)
    }

    fn error(&self, reason: String) -> ClientError {
        ClientError { broker: self.broker.clone(), reason }
    }
}

impl Receiving {
    /// Wait for the answer to the oldest request that has none, which was an `R` with this correlation id.
    ///
    /// # Errors
    /// The connection failed, or the answer can not be decoded.
    pub(crate) fn answer<R: Request>(
        &mut self,
        version: i16,
        correlation: i32,
    ) -> Result<R::Response, ClientError> {
        let mut answer = self.receive()?;
        let unreadable = |error: &dyn std::fmt::Display| {
            self.error(format!("its answer is not a Kafka response: {error}"))
        };
        let header = ResponseHeader::decode(&mut answer, R::Response::header_version(version))
            .map_err(|error| unreadable(&error))?;
        if header.correlation_id != correlation {
            return Err(unreadable(&format_args!(
                "correlation id {}, expected {correlation}",
                header.correlation_id
            )));
        }
        R::Response::decode(&mut answer, version).map_err(|error| unreadable(&error))
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
