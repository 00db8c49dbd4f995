//! A small blocking Kafka client: one connection, with the newest versions that both sides support,
//! and with TLS and a login if configured.

mod access;
mod login;
pub(crate) mod produce;
mod properties;
mod stream;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use kafka_protocol::ResponseError;
use kafka_protocol::messages::{
    ApiVersionsRequest, RequestHeader, ResponseHeader, SaslAuthenticateRequest,
    SaslHandshakeRequest, TopicName,
};
use kafka_protocol::protocol::{
    Decodable, Encodable, HeaderVersion, Request, StrBytes, VersionRange,
};

use self::login::Login;
use self::stream::Stream;
use crate::address::HostPort;

pub(crate) use self::access::Access;

/// Maximum accepted length of a response. Responses to administrative requests are far smaller.
const MAX_RESPONSE_BYTES: usize = 64 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The first bytes of a TLS alert; as a length they would be far above the maximum.
const TLS_ALERT: [u8; 2] = [21, 3];
/// Sent inside requests: the time that the server may take.
pub(crate) const SERVER_TIMEOUT_MS: i32 = 30_000;
/// A little longer, so that the server is the one to report a timeout.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(35);

/// A connection to a broker.
pub(crate) struct Client {
    sending: Sending,
    receiving: Receiving,
    served: HashMap<i16, VersionRange>,
}

/// The sending half of a connection.
pub(crate) struct Sending {
    broker: String,
    stream: Stream,
    correlation: i32,
    frame: BytesMut,
}

/// The receiving half of a connection; responses arrive in the order of the requests.
pub(crate) struct Receiving {
    broker: String,
    stream: Stream,
    /// The connection has neither TLS nor a login.
    is_plain: bool,
    /// The option that names the file of client properties.
    option: &'static str,
}

/// A request without a usable response. The message names the broker.
#[derive(Debug, thiserror::Error)]
#[error("{broker}: {reason}")]
pub(crate) struct ClientError {
    broker: String,
    reason: String,
}

/// Returns the name of a topic, as in requests.
pub(crate) fn topic_name(name: &str) -> TopicName {
    TopicName(StrBytes::from_string(name.to_owned()))
}

/// Returns the index of a partition, as in requests.
pub(crate) fn partition_index(partition: usize) -> i32 {
    i32::try_from(partition).expect("a server has listed it with this type")
}

/// Describes a Kafka error code, with the server's message if there is one.
pub(crate) fn refusal(code: i16, message: Option<&StrBytes>) -> Option<String> {
    let error = ResponseError::try_from_code(code)?;
    Some(match message.filter(|message| !message.is_empty()) {
        Some(message) => format!("{message} ({error})"),
        // Metadata responses have no message, and this error is the common one.
        None if error == ResponseError::UnknownTopicOrPartition => {
            format!("the topic does not exist ({error})")
        }
        None => error.to_string(),
    })
}

impl Client {
    /// Connects, requests the broker's API versions, and logs in.
    ///
    /// # Errors
    /// The address does not resolve, the connection is refused, the peer is not a Kafka server, or
    /// it refuses the login.
    pub(crate) fn connect(broker: &HostPort, access: &Access) -> Result<Self, ClientError> {
        let name = broker.to_string();
        let fail = |reason: String| ClientError { broker: name.clone(), reason };
        let addresses = (broker.host.as_str(), broker.port)
            .to_socket_addrs()
            .map_err(|error| fail(format!("cannot resolve the name: {error}")))?;
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
            fail(format!("cannot connect: {last_error}; is a server running there?"))
        })?;
        stream.set_nodelay(true).map_err(|error| fail(error.to_string()))?;
        let stream = match &access.tls {
            None => Stream::Plain(stream),
            Some(tls) => Stream::encrypted(stream, &broker.host, tls.clone(), ANSWER_TIMEOUT)
                .map_err(fail)?,
        };
        let halves = stream.set_timeout(ANSWER_TIMEOUT).and_then(|()| stream.try_clone());
        let reading = halves.map_err(|error| fail(error.to_string()))?;
        let is_plain = access.tls.is_none() && access.login.is_none();
        let frame = BytesMut::new();
        let mut client = Self {
            receiving: Receiving {
                broker: name.clone(),
                stream: reading,
                is_plain,
                option: access.option.unwrap_or("--command-config"),
            },
            sending: Sending { broker: name, stream, correlation: 0, frame },
            served: HashMap::new(),
        };
        client.learn_versions()?;
        if let Some(login) = &access.login {
            client.log_in(login)?;
        }
        Ok(client)
    }

    fn log_in(&mut self, login: &Login) -> Result<(), ClientError> {
        let mechanism = login.mechanism.name();
        let version = self.version::<SaslAuthenticateRequest>(2)?;
        let handshake =
            SaslHandshakeRequest::default().with_mechanism(StrBytes::from_static_str(mechanism));
        let answer = self.call(1, &handshake)?;
        if let Some(reason) = refusal(answer.error_code, None) {
            let others: Vec<&str> = answer.mechanisms.iter().map(|name| &**name).collect();
            let others = match others.is_empty() {
                true => "its listener does not use SASL".to_owned(),
                false => format!("its listener accepts {}", others.join(", ")),
            };
            return Err(self
                .sending
                .error(format!("cannot log in with {mechanism}: {others} ({reason})")));
        }
        // An exchange ends with a refusal or a broken connection; the caller needs to distinguish
        // them.
        let mut broken = None;
        let outcome = login.run(&mut |message| {
            let request = SaslAuthenticateRequest::default().with_auth_bytes(message.into());
            match self.call(version, &request) {
                Ok(answer) => match refusal(answer.error_code, answer.error_message.as_ref()) {
                    Some(reason) => Err(reason),
                    None => Ok(answer.auth_bytes.to_vec()),
                },
                Err(error) => {
                    broken = Some(error);
                    Err(String::new())
                }
            }
        });
        match (outcome, broken) {
            (_, Some(error)) => Err(error),
            (Err(reason), None) => Err(self.sending.error(format!("cannot log in: {reason}"))),
            (Ok(()), None) => Ok(()),
        }
    }

    /// Splits the connection, so that requests can be sent while earlier ones are unanswered.
    pub(crate) fn into_halves(self) -> (Sending, Receiving) {
        (self.sending, self.receiving)
    }

    fn learn_versions(&mut self) -> Result<(), ClientError> {
        // Every broker supports version 0, which is sufficient here.
        let answer = self.call(0, &ApiVersionsRequest::default())?;
        if let Some(reason) = refusal(answer.error_code, None) {
            return Err(self
                .sending
                .error(format!("it refuses to report its API versions: {reason}")));
        }
        self.served = answer
            .api_keys
            .iter()
            .map(|api| (api.api_key, VersionRange { min: api.min_version, max: api.max_version }))
            .collect();
        Ok(())
    }

    /// The newest version of `R` that both sides support, at most `newest`.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn version<R: Request>(&self, newest: i16) -> Result<i16, ClientError> {
        let mine = VersionRange { min: R::VERSIONS.min, max: R::VERSIONS.max.min(newest) };
        let common = self.served.get(&R::KEY).map(|served| served.intersect(&mine));
        match common {
            Some(common) if !common.is_empty() => Ok(common.max),
            _ => Err(self.sending.error(format!(
                "it does not support API {} in a version that this program supports ({mine})",
                R::KEY
            ))),
        }
    }

    /// Sends a request and waits for its response.
    ///
    /// # Errors
    /// The connection failed, or the response cannot be decoded.
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
    /// Sends a request. Returns its correlation ID.
    ///
    /// # Errors
    /// The connection failed, or the request cannot be encoded.
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
            .map_err(|error| self.error(format!("cannot encode the request: {error}")))?;
        let body_bytes = i32::try_from(self.frame.len() - 4)
            .map_err(|_| self.error("the request is too large".into()))?;
        self.frame[..4].copy_from_slice(&body_bytes.to_be_bytes());
        self.stream
            .write_all(&self.frame)
            .map_err(|error| self.error(format!("cannot send: {}", self.stream.reason(&error))))?;
        Ok(self.correlation)
    }

    fn error(&self, reason: String) -> ClientError {
        ClientError { broker: self.broker.clone(), reason }
    }
}

impl Receiving {
    /// Waits for the response to the oldest unanswered request, which was an `R` with this
    /// correlation ID.
    ///
    /// # Errors
    /// The connection failed, or the response cannot be decoded.
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
        if length.starts_with(&TLS_ALERT) {
            return Err(self.error(format!(
                "it answers with TLS: set security.protocol=SSL or SASL_SSL in the file of {}",
                self.option
            )));
        }
        let length = i64::from((&length[..]).get_i32());
        let length = usize::try_from(length)
            .ok()
            .filter(|length| *length <= MAX_RESPONSE_BYTES)
            .ok_or_else(|| {
                self.error(format!("it answers with a length of {length}: is it a Kafka server?"))
            })?;
        let mut body = vec![0; length];
        self.read_exact(&mut body)?;
        Ok(body.into())
    }

    fn read_exact(&mut self, buf: &mut [u8]) -> Result<(), ClientError> {
        self.stream.read_exact(buf).map_err(|error| {
            if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut)
            {
                let seconds = ANSWER_TIMEOUT.as_secs();
                return self.error(format!("no answer within {seconds} s"));
            }
            let reason = self.stream.reason(&error);
            // A listener with TLS or SASL closes the connection of a client that does not use it.
            let hint = match self.is_plain && error.kind() == std::io::ErrorKind::UnexpectedEof {
                true => format!(
                    "; if its listener uses TLS or SASL, configure that with {}",
                    self.option
                ),
                false => String::new(),
            };
            self.error(format!("incomplete answer: {reason}{hint}"))
        })
    }

    fn error(&self, reason: String) -> ClientError {
        ClientError { broker: self.broker.clone(), reason }
    }
}
