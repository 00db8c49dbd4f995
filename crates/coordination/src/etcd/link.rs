//! The connection to etcd: which member is asked, what is sent again, and what an error means.

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use std::{io, mem};

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt as _, Stream};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tonic::client::Grpc;
use tonic::codegen::Service;
use tonic::codegen::http::uri::{PathAndQuery, Uri};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, ConnectError, Request, Status, Streaming};
use tonic_prost::ProstCodec;

use super::rpc::{
    Answer as _, Authenticate, Header, KeyValue, Range, Unary, WATCH_PATH, WatchAnswer,
    WatchRequest,
};
use super::{EtcdOptions, identity_of};
use crate::{Error, Identity, Result, Revision};

/// The pause between attempts.
pub(super) const BACK_OFF: Duration = Duration::from_millis(100);
/// The time after which an operation that can be sent again is sent to the next member.
pub(super) const ATTEMPT: Duration = Duration::from_secs(2);
/// etcd closes a connection that is pinged more often than every 5 s.
const ALIVE_EVERY: Duration = Duration::from_secs(10);
const ALIVE_WITHIN: Duration = Duration::from_secs(5);
/// Most bytes of an answer of a watch. etcd divides larger ones.
const MAX_WATCH_BYTES: usize = 64 << 20;
/// What may arrive for a watch that is not polled. Only streams are limited: the limit of the
/// connection is the greatest that HTTP/2 has, so that such a watch stops nothing else.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;

/// Opens one connection. A [`Channel`] would open another one by itself when it has ended, without
/// the checks of [`Link::dial`].
struct Once {
    address: String,
    is_used: bool,
}

impl Service<Uri> for Once {
    type Response = TokioIo<TcpStream>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let (address, is_used) = (self.address.clone(), mem::replace(&mut self.is_used, true));
        let connection = async move {
            if is_used {
                return Err(io::Error::other("the connection has ended"));
            }
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            Ok(TokioIo::new(stream))
        };
        connection.boxed()
    }
}

/// A connection to one member.
pub(super) struct Open {
    channel: Channel,
    token: Option<MetadataValue<Ascii>>,
}

impl Open {
    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let metadata = request.metadata_mut();
        // With this, a member that has no leader refuses the call at once.
        metadata.insert("hasleader", MetadataValue::from_static("true"));
        if let Some(token) = &self.token {
            metadata.insert("token", token.clone());
        }
        request
    }

    async fn grpc(&self, max_bytes: usize) -> std::result::Result<Grpc<Channel>, Status> {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(max_bytes);
        grpc.ready().await.map_err(|error| Status::from_error(error.into()))?;
        Ok(grpc)
    }

    async fn unary<Q: Unary>(&self, message: Q) -> std::result::Result<Q::Answer, Status> {
        let codec = ProstCodec::<Q, Q::Answer>::default();
        let path = PathAndQuery::from_static(Q::PATH);
        let mut grpc = self.grpc(Q::MAX_ANSWER_BYTES).await?;
        let answer = grpc.unary(self.request(message), path, codec).await?;
        Ok(answer.into_inner())
    }

    pub(super) async fn watch(
        &self,
        requests: impl Stream<Item = WatchRequest> + Send + 'static,
    ) -> std::result::Result<Streaming<WatchAnswer>, Status> {
        let codec = ProstCodec::<WatchRequest, WatchAnswer>::default();
        let path = PathAndQuery::from_static(WATCH_PATH);
        let mut grpc = self.grpc(MAX_WATCH_BYTES).await?;
        let answer = grpc.streaming(self.request(requests), path, codec).await?;
        Ok(answer.into_inner())
    }
}

/// An answer that says that nothing was done, and why.
#[derive(Debug)]
pub(super) enum Refusal {
    Compacted,
    Future,
    LeaseNotFound,
    /// The answer is above [`Unary::MAX_ANSWER_BYTES`].
    TooLarge,
    /// The error for the caller.
    Other(Error),
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Failure {
    Refused(Refusal),
    Error(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

/// What the status of a failed call means.
enum Verdict {
    Refused(Refusal),
    /// Nothing was done; it can be sent again. The reason, and whether to leave the connection.
    Again(String, bool),
    /// Whether anything was done is unknown.
    Broken(String),
}

/// Refusals of a member that come before it does anything.
const REFUSED: [&str; 3] = [
    "etcdserver: no leader",
    "etcdserver: not capable",
    "etcdserver: rpc not supported for learner",
];

fn verdict(status: &Status) -> Verdict {
    let message = status.message();
    if is_unsent(status) || REFUSED.contains(&message) {
        return Verdict::Again(reason(status), true);
    }
    if message == "etcdserver: too many requests" {
        return Verdict::Again(message.to_owned(), false);
    }
    Verdict::Refused(match status.code() {
        Code::OutOfRange if message.contains("has been compacted") => Refusal::Compacted,
        Code::OutOfRange if message.contains("future revision") => Refusal::Future,
        Code::OutOfRange if message.contains("message length too large") => Refusal::TooLarge,
        Code::NotFound if message.contains("lease not found") => Refusal::LeaseNotFound,
        Code::ResourceExhausted if message.contains("space exceeded") => {
            Refusal::Other(Error::Full(format!("etcd: {message}")))
        }
        // The token has expired, or users have changed.
        Code::Unauthenticated => return Verdict::Again(message.to_owned(), true),
        Code::InvalidArgument if message.contains("revision of auth store is old") => {
            return Verdict::Again(message.to_owned(), true);
        }
        Code::InvalidArgument
        | Code::NotFound
        | Code::OutOfRange
        | Code::PermissionDenied
        | Code::FailedPrecondition
        | Code::ResourceExhausted
        | Code::Unimplemented => Refusal::Other(Error::Invalid(format!("etcd: {message}"))),
        _ => return Verdict::Broken(reason(status)),
    })
}

/// Whether there was no connection to send a request on.
fn is_unsent(status: &Status) -> bool {
    let mut source = status.source();
    while let Some(error) = source {
        if error.is::<ConnectError>() {
            return true;
        }
        source = error.source();
    }
    false
}

/// The message of a status with those of its sources, which have the cause.
pub(super) fn reason(status: &Status) -> String {
    with_sources(status.message().to_owned(), status.source())
}

fn with_sources(
    mut text: String,
    mut source: Option<&(dyn std::error::Error + 'static)>,
) -> String {
    while let Some(error) = source {
        let next = error.to_string();
        if !text.contains(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        source = error.source();
    }
    text
}

fn transport_reason(error: &tonic::transport::Error) -> String {
    with_sources(error.to_string(), error.source())
}

/// The current connection, and the member to try next.
#[derive(Default)]
struct Current {
    open: Option<Arc<Open>>,
    next: usize,
    /// Why the last one ended, or could not be opened.
    reason: String,
}

/// The history that the client uses.
#[derive(Clone, Copy, Default)]
struct Known {
    cluster: Option<u64>,
    /// With the revision that wrote it.
    identity: Option<(Identity, Revision)>,
}

/// The client's view of the members.
pub(super) struct Link {
    options: EtcdOptions,
    endpoints: Vec<Endpoint>,
    current: Mutex<Current>,
    /// Held while a connection is opened.
    dialing: tokio::sync::Mutex<()>,
    known: Mutex<Known>,
    /// The greatest revision that etcd has shown.
    seen: AtomicU64,
    /// Why nothing is asked any more.
    ended: Mutex<Option<Error>>,
}

impl Link {
    pub(super) fn new(options: EtcdOptions) -> Result<Self> {
        let endpoint = |address: &String| {
            let scheme = if options.tls.is_some() { "https" } else { "http" };
            let invalid = |error: tonic::transport::Error| {
                Error::Invalid(format!("etcd at {address}: {}", transport_reason(&error)))
            };
            let mut endpoint = Endpoint::from_shared(format!("{scheme}://{address}"))
                .map_err(invalid)?
                .connect_timeout(options.connect_timeout)
                .http2_keep_alive_interval(ALIVE_EVERY)
                .keep_alive_timeout(ALIVE_WITHIN)
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW);
            if let Some(tls) = &options.tls {
                // Without the brackets of an IPv6 address.
                let host = address.rsplit_once(':').map_or(address.as_str(), |(host, _)| host);
                let mut config = ClientTlsConfig::new()
                    .ca_certificate(Certificate::from_pem(&tls.ca))
                    .domain_name(host.trim_matches(['[', ']']));
                if let Some((certificate, key)) = &tls.identity {
                    config =
                        config.identity(tonic::transport::Identity::from_pem(certificate, key));
                }
                endpoint = endpoint.tls_config(config).map_err(invalid)?;
            }
            Ok(endpoint)
        };
        if options.endpoints.is_empty() {
            return Err(Error::Invalid("no address of etcd was given".to_owned()));
        }
        let endpoints = options.endpoints.iter().map(endpoint).collect::<Result<_>>()?;
        Ok(Self {
            options,
            endpoints,
            current: Mutex::default(),
            dialing: tokio::sync::Mutex::default(),
            known: Mutex::default(),
            seen: AtomicU64::new(0),
            ended: Mutex::default(),
        })
    }

    pub(super) fn options(&self) -> &EtcdOptions {
        &self.options
    }

    /// The key of the identity of the history.
    pub(super) fn identity_key(&self) -> Bytes {
        Bytes::from(format!("/alluvium/{}/identity", self.options.cluster))
    }

    pub(super) fn identity(&self) -> Option<(Identity, Revision)> {
        self.known.lock().identity
    }

    /// Ends all operations and watches, now and later.
    pub(super) fn end(&self, error: Error) -> Error {
        tracing::error!(%error, "coordination is not used any more");
        self.ended.lock().get_or_insert(error).clone()
    }

    pub(super) fn check_ended(&self) -> Result<()> {
        self.ended.lock().clone().map_or(Ok(()), Err)
    }

    /// Takes the identity of the history that this client has written.
    pub(super) fn set_identity(&self, identity: Identity, written: Revision) {
        self.known.lock().identity = Some((identity, written));
    }

    /// Decodes the identity of the history, and checks that it is the known one.
    pub(super) fn check_identity(&self, found: &KeyValue) -> Result<Identity> {
        let (found, written) = identity_of(found)?;
        let known = *self.known.lock().identity.get_or_insert((found, written));
        if known == (found, written) {
            return Ok(found);
        }
        Err(self.end(Error::Replaced(format!(
            "etcd had {} of revision {}, and now has {found} of revision {written}; restart this \
             process if that is intended",
            known.0, known.1
        ))))
    }

    /// Checks that an answer is of the history that the client uses. `floor`: the revision that it
    /// must have reached.
    pub(super) fn check(&self, header: Option<&Header>, floor: u64) -> Result<Revision> {
        let header = header.cloned().unwrap_or_default();
        let revision = u64::try_from(header.revision).unwrap_or(0);
        let cluster = *self.known.lock().cluster.get_or_insert(header.cluster_id);
        if cluster != header.cluster_id {
            return Err(self.end(Error::Replaced(format!(
                "a member of etcd is of cluster {:x}, and others are of {cluster:x}",
                header.cluster_id
            ))));
        }
        if revision < floor {
            return Err(self.end(Error::Replaced(format!(
                "etcd is at revision {revision}, and was at {floor} before: it was set back, and \
                 the restore was not recorded"
            ))));
        }
        self.seen.fetch_max(revision, Ordering::Relaxed);
        Ok(Revision(revision))
    }

    /// Returns the connection, and opens one if there is none. The error is the last reason.
    pub(super) async fn connected(&self) -> std::result::Result<Arc<Open>, String> {
        let current = || self.current.lock().open.clone();
        if let Some(open) = current() {
            return Ok(open);
        }
        let _dialing = self.dialing.lock().await;
        if let Some(open) = current() {
            return Ok(open);
        }
        for _ in 0..self.endpoints.len() {
            let number = {
                let mut current = self.current.lock();
                let number = current.next % self.endpoints.len();
                current.next = number + 1;
                number
            };
            let reason = match timeout(self.options.connect_timeout, self.dial(number)).await {
                Ok(Ok(open)) => {
                    let open = Arc::new(open);
                    self.current.lock().open = Some(open.clone());
                    return Ok(open);
                }
                Ok(Err(reason)) => reason,
                Err(_) => format!("no answer within {:?}", self.options.connect_timeout),
            };
            self.current.lock().reason = format!("{}: {reason}", self.options.endpoints[number]);
            self.check_ended().map_err(|error| error.to_string())?;
        }
        Err(self.current.lock().reason.clone())
    }

    async fn dial(&self, number: usize) -> std::result::Result<Open, String> {
        let once = Once { address: self.options.endpoints[number].clone(), is_used: false };
        let channel = self.endpoints[number].connect_with_connector(once).await;
        let channel = channel.map_err(|error| transport_reason(&error))?;
        let mut open = Open { channel, token: None };
        if let Some((name, password)) = &self.options.user {
            let request = Authenticate { name: name.clone(), password: password.clone() };
            let answer = open.unary(request).await.map_err(|status| reason(&status))?;
            let token = answer.token.parse().map_err(|_| "etcd's token is malformed")?;
            open.token = Some(token);
        }
        let floor = self.seen.load(Ordering::Relaxed);
        let question = Range { key: self.identity_key(), ..Range::default() };
        let answer = open.unary(question).await.map_err(|status| reason(&status))?;
        let text = |error: Error| error.to_string();
        self.check(answer.header(), floor).map_err(text)?;
        if let Some(found) = answer.kvs.first() {
            self.check_identity(found).map_err(text)?;
        }
        Ok(open)
    }

    /// Leaves a connection that does not work. The next one goes to the next member.
    pub(super) fn leave(&self, open: &Arc<Open>, reason: &str) {
        let mut current = self.current.lock();
        if current.open.as_ref().is_some_and(|current| Arc::ptr_eq(current, open)) {
            tracing::debug!(reason, "connection to etcd left");
            current.open = None;
            reason.clone_into(&mut current.reason);
        }
    }

    /// Asks what changes nothing, or the same if it is asked twice. Returns the answer, and the
    /// revision of the member that has answered.
    pub(super) async fn ask<Q: Unary>(
        &self,
        request: Q,
    ) -> std::result::Result<(Q::Answer, Revision), Failure> {
        self.call(request, false).await
    }

    /// Sends a change, once. Returns the answer, and the revision of the member that has answered.
    pub(super) async fn change<Q: Unary>(
        &self,
        request: Q,
    ) -> std::result::Result<(Q::Answer, Revision), Failure> {
        self.call(request, true).await
    }

    async fn call<Q: Unary>(
        &self,
        request: Q,
        is_change: bool,
    ) -> std::result::Result<(Q::Answer, Revision), Failure> {
        /// What was tried last.
        #[derive(Default)]
        struct Last {
            reason: String,
            /// The connection on which a change was sent.
            sent: Option<Arc<Open>>,
        }
        let last = Mutex::new(Last::default());
        let attempts = async {
            loop {
                self.check_ended()?;
                let open = match self.connected().await {
                    Ok(open) => open,
                    Err(reason) => {
                        last.lock().reason = reason;
                        sleep(BACK_OFF).await;
                        continue;
                    }
                };
                let floor = self.seen.load(Ordering::Relaxed);
                last.lock().sent = is_change.then(|| open.clone());
                let answer = open.unary(request.clone());
                let answer = match is_change {
                    true => answer.await,
                    false => match timeout(ATTEMPT, answer).await {
                        Ok(answer) => answer,
                        Err(_) => Err(Status::unavailable(format!("no answer within {ATTEMPT:?}"))),
                    },
                };
                let status = match answer {
                    Ok(answer) => {
                        let floor = if Q::IS_LINEARIZABLE { floor } else { 0 };
                        return match self.check(answer.header(), floor) {
                            Ok(revision) => Ok((answer, revision)),
                            // It was made, in a history that counts no more.
                            Err(error) if is_change => {
                                Err(Error::Unknown(error.to_string()).into())
                            }
                            Err(error) => Err(error.into()),
                        };
                    }
                    Err(status) => status,
                };
                match verdict(&status) {
                    // etcd also says so of a change that it has made.
                    Verdict::Refused(Refusal::Other(Error::Full(text))) if is_change => {
                        return Err(Error::Unknown(text).into());
                    }
                    Verdict::Refused(refusal) => return Err(Failure::Refused(refusal)),
                    Verdict::Again(reason, leave) => {
                        if leave {
                            self.leave(&open, &reason);
                        }
                        *last.lock() = Last { reason, sent: None };
                    }
                    Verdict::Broken(reason) => {
                        self.leave(&open, &reason);
                        if is_change {
                            let reason = format!("etcd has not answered: {reason}");
                            return Err(Error::Unknown(reason).into());
                        }
                        last.lock().reason = reason;
                    }
                }
                sleep(BACK_OFF).await;
            }
        };
        let limit = self.options.deadline;
        if let Ok(answer) = timeout(limit, attempts).await {
            return answer;
        }
        let Last { reason, sent } = last.into_inner();
        if let Some(open) = sent {
            // The member may hang: the next operation is sent to another one.
            self.leave(&open, "no answer");
            return Err(Error::Unknown(format!("etcd has not answered within {limit:?}")).into());
        }
        Err(self.unavailable(&reason).into())
    }

    fn unavailable(&self, reason: &str) -> Error {
        let reason = if reason.is_empty() { "no answer" } else { reason };
        let endpoints = self.options.endpoints.join(", ");
        let limit = self.options.deadline;
        Error::Unavailable(format!("etcd at {endpoints} was tried for {limit:?}: {reason}"))
    }

    /// Returns the current revision of the whole cluster.
    pub(super) async fn revision(&self) -> std::result::Result<Revision, Failure> {
        let question = Range { key: self.identity_key(), count_only: true, ..Range::default() };
        Ok(self.ask(question).await?.1)
    }
}
