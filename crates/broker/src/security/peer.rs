//! The client of a connection and the state of its authentication.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kafka_protocol::messages::ApiKey;
use kafka_protocol::protocol::StrBytes;
use parking_lot::Mutex;

use super::listeners::Listener;
use super::principal::Principal;
use super::sasl::{Authentication, Exchange, Mechanism, Step};

/// The largest request or SASL message of an unauthenticated client.
const MAX_UNAUTHENTICATED_BYTES: u32 = 64 << 10;

/// The greatest number of ApiVersions requests before authentication. Clients send one, or two if
/// the first has an unsupported version.
const MAX_ASKED_FOR_VERSIONS: u32 = 4;

/// The shortest time between two re-authentications; the first may follow the login at once, as in
/// Kafka. Kafka's limit is a second; with sessions of a second, clients re-authenticate after about
/// nine tenths of it.
const MIN_REAUTHENTICATION_INTERVAL: Duration = Duration::from_millis(500);

/// The client of a connection.
pub(crate) struct Peer {
    pub(crate) listener: Arc<Listener>,
    pub(crate) ip: IpAddr,
    /// The client's address in Kafka's form: `/127.0.0.1`.
    pub(crate) host: StrBytes,
    session: Mutex<Session>,
}

#[derive(Default)]
struct Session {
    /// `None` until the client is authenticated, if it must be.
    principal: Option<Principal>,
    mechanism: Option<Mechanism>,
    /// When the last re-authentication began.
    reauthenticated: Option<Instant>,
    ends: Option<Instant>,
    exchange: Option<Exchange>,
    asked_for_versions: u32,
    /// Whether the messages of the exchange come without requests around them (KIP-43).
    bare: bool,
}

/// Why a SASL message or handshake is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The listener has no authentication, or the exchange has not begun or not ended.
    IllegalState,
    UnsupportedMechanism,
    Failed(Mechanism),
    /// A re-authentication must have the same user and mechanism.
    OtherPrincipal,
    /// Not processed: too many attempts of the address have failed. The connection is closed
    /// without a response, which clients treat as a network failure and retry; a response that the
    /// password is wrong would make them stop.
    TooMany,
}

/// The response to a SASL message.
pub(crate) struct SaslResponse {
    pub(crate) answer: Vec<u8>,
    /// The lifetime of the session that it has begun; `None` if the session has no end or has not
    /// begun.
    pub(crate) lifetime: Option<Duration>,
}

impl Peer {
    /// The client of a new connection; `principal` comes from its certificate.
    pub(crate) fn new(listener: Arc<Listener>, ip: IpAddr, principal: Principal) -> Self {
        // An IPv4 address on an IPv6 socket is converted to IPv4.
        let ip = ip.to_canonical();
        let principal = listener.config.sasl.is_empty().then_some(principal);
        let session = Mutex::new(Session { principal, ..Session::default() });
        Self { listener, ip, host: StrBytes::from_string(format!("/{ip}")), session }
    }

    /// A number that distinguishes this connection from all other open ones.
    pub(crate) fn connection(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// The client's principal; `None` before authentication.
    pub(crate) fn principal(&self) -> Option<Principal> {
        self.session.lock().principal.clone()
    }

    /// Whether the client may send this request now. As in Kafka, only the exchange's messages are
    /// allowed during an exchange: else a client that begins an authentication and never ends it
    /// would keep one of its address's attempts forever. An unauthenticated client may request the
    /// versions a few times only, or it could keep a connection forever.
    pub(crate) fn may_send(&self, key: ApiKey, now: Instant) -> bool {
        let mut session = self.session.lock();
        let logs_in = matches!(key, ApiKey::SaslHandshake | ApiKey::SaslAuthenticate);
        match &session.principal {
            _ if session.exchange.is_some() => logs_in,
            None if key == ApiKey::ApiVersions => {
                session.asked_for_versions += 1;
                session.asked_for_versions <= MAX_ASKED_FOR_VERSIONS
            }
            None => logs_in,
            Some(_) => logs_in || session.ends.is_none_or(|ends| now < ends),
        }
    }

    /// Whether the client is authenticated, is not re-authenticating, and its session has not
    /// ended.
    pub(crate) fn is_logged_in(&self, now: Instant) -> bool {
        let session = self.session.lock();
        session.principal.is_some()
            && session.exchange.is_none()
            && session.ends.is_none_or(|ends| now < ends)
    }

    /// Whether the client has yet to authenticate, or is re-authenticating.
    pub(crate) fn is_logging_in(&self) -> bool {
        let session = self.session.lock();
        session.principal.is_none() || session.exchange.is_some()
    }

    /// The largest request that is accepted from a client that is limited more than others; such a
    /// client also has less time.
    pub(crate) fn max_request_bytes(&self) -> Option<u32> {
        self.is_logging_in().then_some(MAX_UNAUTHENTICATED_BYTES)
    }

    /// Whether the next message is a SASL message without a request around it.
    pub(crate) fn sends_bare_message(&self) -> bool {
        let session = self.session.lock();
        session.bare && session.exchange.is_some()
    }

    /// Begins an exchange; `bare`: its messages come without requests around them.
    pub(crate) fn begin(&self, mechanism: &str, bare: bool, now: Instant) -> Result<(), Refusal> {
        let mut session = self.session.lock();
        let again = session.principal.is_some();
        let last = session.reauthenticated;
        let too_soon = last.is_some_and(|last| now < last + MIN_REAUTHENTICATION_INTERVAL);
        if session.exchange.is_some() || again && (session.ends.is_none() || too_soon) {
            return Err(Refusal::IllegalState);
        }
        let mechanism =
            self.listener.config.sasl.iter().copied().find(|known| known.name() == mechanism);
        let mechanism = mechanism.ok_or(match self.listener.config.sasl.is_empty() {
            true => Refusal::IllegalState,
            false => Refusal::UnsupportedMechanism,
        })?;
        if again && session.mechanism != Some(mechanism) {
            return Err(Refusal::OtherPrincipal);
        }
        if again {
            session.reauthenticated = Some(now);
        }
        session.exchange = Some(Exchange::new(mechanism));
        session.bare = bare;
        Ok(())
    }

    /// Handles a message of an exchange. `longest` limits the lifetime of the session.
    pub(crate) async fn message(
        &self,
        authentication: &Authentication,
        message: &[u8],
        longest: Option<Duration>,
    ) -> Result<SaslResponse, Refusal> {
        let (exchange, again) = {
            let mut session = self.session.lock();
            let exchange = session.exchange.take().ok_or(Refusal::IllegalState)?;
            (exchange, session.principal.clone())
        };
        let mechanism = exchange.mechanism();
        let step = authentication.step(self.ip, again.as_ref(), exchange, message).await;
        match step.ok_or(Refusal::TooMany)? {
            Step::Continue(exchange, answer) => {
                self.session.lock().exchange = Some(exchange);
                Ok(SaslResponse { answer, lifetime: None })
            }
            Step::Done { user, answer, lifetime } => {
                let principal = Principal::user(&user);
                let mut session = self.session.lock();
                if session.principal.as_ref().is_some_and(|before| *before != principal) {
                    return Err(Refusal::OtherPrincipal);
                }
                let lifetime = [lifetime, longest].into_iter().flatten().min();
                let now = Instant::now();
                session.principal = Some(principal);
                session.mechanism = Some(mechanism);
                session.ends = lifetime.map(|lifetime| now + lifetime);
                Ok(SaslResponse { answer, lifetime })
            }
            Step::Failed => Err(Refusal::Failed(mechanism)),
        }
    }
}
