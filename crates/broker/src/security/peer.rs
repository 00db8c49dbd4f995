//! Who is at the other end of a connection, and what has become of its logging in.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kafka_protocol::messages::ApiKey;
use kafka_protocol::protocol::StrBytes;
use parking_lot::Mutex;

use super::listeners::Listener;
use super::principal::Principal;
use super::sasl::{Authentication, Exchange, Mechanism, Step};

/// Requests, and messages of SASL, up to which a client has said who it is.
const MAX_UNAUTHENTICATED_BYTES: u32 = 64 << 10;

/// Requests for versions before a client has logged in. It is one, or two where the first was of a
/// version that is not known.
const MAX_ASKED_FOR_VERSIONS: u32 = 4;

/// The least time between the begins of two re-authentications; the first one may follow the login
/// at once, as in Kafka. There it is a second, in which clients of sessions of a second
/// authenticate again, when some nine tenths of it are over.
const MIN_REAUTHENTICATION_INTERVAL: Duration = Duration::from_millis(500);

/// The client of a connection.
pub(crate) struct Peer {
    pub(crate) listener: Arc<Listener>,
    pub(crate) ip: IpAddr,
    /// Its address as Kafka shows it: `/127.0.0.1`.
    pub(crate) host: StrBytes,
    session: Mutex<Session>,
}

#[derive(Default)]
struct Session {
    /// `None` until it has logged in, where it must.
    principal: Option<Principal>,
    mechanism: Option<Mechanism>,
    /// When the last re-authentication began.
    reauthenticated: Option<Instant>,
    ends: Option<Instant>,
    exchange: Option<Exchange>,
    asked_for_versions: u32,
    /// The messages of the exchange come as they are (KIP-43), not in requests.
    bare: bool,
}

/// Why a message of SASL, or a handshake, comes at the wrong time or is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// There is nothing to log in for, or the exchange has not begun or not ended.
    IllegalState,
    UnsupportedMechanism,
    Failed(Mechanism),
    /// Logging in anew must be as the same user and by the same mechanism.
    OtherPrincipal,
    /// It was not looked at: too many attempts of the address have failed. The connection is closed
    /// without an answer, which clients take for a failure of the network and try again: one that
    /// says that the password is wrong would end them.
    TooMany,
}

/// What a message of SASL is answered with.
pub(crate) struct Answered {
    pub(crate) answer: Vec<u8>,
    /// How long the session lasts that it has begun; `None` if it does not end, or has not begun.
    pub(crate) lifetime: Option<Duration>,
}

impl Peer {
    /// The client of a new connection, who it is by its certificate.
    pub(crate) fn new(listener: Arc<Listener>, ip: IpAddr, principal: Principal) -> Self {
        // One that came by an IPv6 socket with an IPv4 address is meant by the latter.
        let ip = ip.to_canonical();
        let principal = listener.config.sasl.is_empty().then_some(principal);
        let session = Mutex::new(Session { principal, ..Session::default() });
        Self { listener, ip, host: StrBytes::from_string(format!("/{ip}")), session }
    }

    /// Tells it from every other connection that is open.
    pub(crate) fn connection(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Who it is; `None` if it has not logged in yet.
    pub(crate) fn principal(&self) -> Option<Principal> {
        self.session.lock().principal.clone()
    }

    /// Whether it may send this request now. Between the messages of an exchange nothing else
    /// comes, as in Kafka: else who begins to log in and never ends would keep an attempt of its
    /// address for as long as it likes. Who has not logged in may ask for versions a few times and
    /// no more, or it could hold a connection for ever.
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

    /// Whether it has said who it is, is not about to do so anew, and its session lasts.
    pub(crate) fn is_logged_in(&self, now: Instant) -> bool {
        let session = self.session.lock();
        session.principal.is_some()
            && session.exchange.is_none()
            && session.ends.is_none_or(|ends| now < ends)
    }

    /// Whether it has still to say who it is, for the first time or anew.
    pub(crate) fn is_logging_in(&self) -> bool {
        let session = self.session.lock();
        session.principal.is_none() || session.exchange.is_some()
    }

    /// The largest request that is taken from it, if it is bounded more than others, and then it is
    /// not waited for as long either.
    pub(crate) fn max_request_bytes(&self) -> Option<u32> {
        self.is_logging_in().then_some(MAX_UNAUTHENTICATED_BYTES)
    }

    /// Whether what comes next is a bare message of SASL.
    pub(crate) fn sends_bare_message(&self) -> bool {
        let session = self.session.lock();
        session.bare && session.exchange.is_some()
    }

    /// Begin an exchange; `bare`: its messages come as they are.
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

    /// Take a message of an exchange. `longest` bounds the session that it begins.
    pub(crate) async fn message(
        &self,
        authentication: &Authentication,
        message: &[u8],
        longest: Option<Duration>,
    ) -> Result<Answered, Refusal> {
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
                Ok(Answered { answer, lifetime: None })
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
                Ok(Answered { answer, lifetime })
            }
            Step::Failed => Err(Refusal::Failed(mechanism)),
        }
    }
}
