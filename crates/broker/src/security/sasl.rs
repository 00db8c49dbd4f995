//! SASL: the mechanisms, and an exchange from its first message to its last.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use super::attempts::{Attempt, Attempts};
use super::oauth::{self, Oauth, OauthConfig};
use super::principal::Principal;
use super::scram::{Challenge, ClientFirst, Credential, Hash};
use super::users::{self, Users};

/// The number of PLAIN passwords that are hashed concurrently; each takes milliseconds of CPU.
const CONCURRENT_HASHES: usize = 2;

/// A failed attempt is answered this long after it began to be processed, or when it completes if
/// that is later. This is longer than hashing a password takes.
const FAILURE_DELAY: Duration = Duration::from_millis(100);

/// An authentication mechanism.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mechanism {
    /// The client sends its password.
    Plain,
    /// The client proves that it knows its password without sending it.
    ScramSha256,
    /// SCRAM with a longer hash.
    ScramSha512,
    /// The client sends a token signed by another party.
    OauthBearer,
}

impl Mechanism {
    const ALL: [Self; 4] = [Self::Plain, Self::ScramSha256, Self::ScramSha512, Self::OauthBearer];

    /// The registered name of the mechanism.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "PLAIN",
            Self::ScramSha256 => Hash::Sha256.mechanism(),
            Self::ScramSha512 => Hash::Sha512.mechanism(),
            Self::OauthBearer => "OAUTHBEARER",
        }
    }
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Mechanism {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|mechanism| mechanism.name() == text).ok_or_else(|| {
            let all = Self::ALL.map(Self::name).join(", ");
            format!("`{text}` is not a mechanism; these are {all}")
        })
    }
}

/// An exchange that waits for the client's next message.
pub(crate) struct Exchange {
    state: State,
    /// Held from the first message on. A client that does not continue has failed.
    attempt: Option<Attempt>,
}

enum State {
    Begun(Mechanism),
    /// Waits for the last message of SCRAM.
    Challenged(Mechanism, Hash, Box<(String, Challenge, Arc<Credential>)>),
    /// Waits for the empty message by which a client acknowledges that its token was refused.
    TokenRefused,
}

impl Exchange {
    pub(crate) fn new(mechanism: Mechanism) -> Self {
        Self { state: State::Begun(mechanism), attempt: None }
    }

    pub(crate) fn mechanism(&self) -> Mechanism {
        match self.state {
            State::Begun(mechanism) | State::Challenged(mechanism, ..) => mechanism,
            State::TokenRefused => Mechanism::OauthBearer,
        }
    }
}

/// The result of a message.
pub(crate) enum Step<Next> {
    /// Respond and wait for the next message.
    Continue(Next, Vec<u8>),
    /// Respond; the client is this user, for `lifetime` at most.
    Done { user: String, answer: Vec<u8>, lifetime: Option<Duration> },
    /// Refuse, with the same response for every reason, so that it does not reveal which users
    /// exist.
    Failed,
}

/// Verifies credentials.
pub(crate) struct Authentication {
    pub(crate) users: Users,
    oauth: Option<Oauth>,
    attempts: Arc<Attempts>,
    hashing: Semaphore,
}

impl Authentication {
    pub(crate) fn new(users: Users, oauth: Option<OauthConfig>) -> Self {
        Self {
            users,
            oauth: oauth.map(Oauth::new),
            attempts: Arc::default(),
            hashing: Semaphore::new(CONCURRENT_HASHES),
        }
    }

    /// Processes a message of a client, unless its address has too many failures. `again` is the
    /// principal of a client that re-authenticates. It is not compared with another user's
    /// password.
    ///
    /// # Returns
    /// `None` if the message was not processed because too many attempts of the address have
    /// failed.
    pub(crate) async fn step(
        &self,
        ip: IpAddr,
        again: Option<&Principal>,
        Exchange { state, attempt }: Exchange,
        message: &[u8],
    ) -> Option<Step<Exchange>> {
        let attempt = match attempt {
            Some(attempt) => Some(attempt),
            None if again.is_some() => Some(self.attempts.begin_reauthentication(ip)),
            None => self.attempts.begin(ip).await,
        };
        let Some(attempt) = attempt else {
            tokio::time::sleep(FAILURE_DELAY).await;
            return None;
        };
        // The response time must not reveal what was compared.
        let answer_failure_at = tokio::time::Instant::now() + FAILURE_DELAY;
        Some(match self.decide(state, again, message).await {
            Step::Continue(state, answer) => {
                Step::Continue(Exchange { state, attempt: Some(attempt) }, answer)
            }
            Step::Done { user, answer, lifetime } => {
                attempt.succeeded();
                Step::Done { user, answer, lifetime }
            }
            Step::Failed => {
                drop(attempt);
                tokio::time::sleep_until(answer_failure_at).await;
                Step::Failed
            }
        })
    }

    async fn decide(&self, state: State, again: Option<&Principal>, message: &[u8]) -> Step<State> {
        match state {
            State::Begun(Mechanism::Plain) => self.plain(again, message).await,
            State::Begun(mechanism @ Mechanism::ScramSha256) => {
                self.scram(mechanism, Hash::Sha256, again, message)
            }
            State::Begun(mechanism @ Mechanism::ScramSha512) => {
                self.scram(mechanism, Hash::Sha512, again, message)
            }
            State::Begun(Mechanism::OauthBearer) => self.bearer(message).await,
            State::Challenged(_, hash, challenged) => {
                let (user, challenge, credential) = *challenged;
                match challenge.verify(hash, &credential, message) {
                    Some(answer) => Step::Done { user, answer: answer.into(), lifetime: None },
                    None => Step::Failed,
                }
            }
            State::TokenRefused => Step::Failed,
        }
    }

    fn scram(
        &self,
        mechanism: Mechanism,
        hash: Hash,
        again: Option<&Principal>,
        message: &[u8],
    ) -> Step<State> {
        let Some(first) = ClientFirst::parse(message) else { return Step::Failed };
        if names_another_user(again, &first.user) {
            return Step::Failed;
        }
        let Ok(nonce) = users::nonce() else { return Step::Failed };
        let decoy = self.users.decoy(&first.user, hash);
        let credential = self.users.credential(&first.user, hash).unwrap_or(decoy);
        let (challenge, answer) = first.answer(&nonce, &credential);
        let challenged = Box::new((first.user, challenge, credential));
        Step::Continue(State::Challenged(mechanism, hash, challenged), answer.into())
    }

    async fn plain(&self, again: Option<&Principal>, message: &[u8]) -> Step<State> {
        let Some((user, password)) = plain_parts(message) else { return Step::Failed };
        if names_another_user(again, &user) {
            return Step::Failed;
        }
        let found = self.users.newest_credential(&user);
        let decoy = self.users.decoy(&user, Hash::Sha256);
        let exists = found.is_some();
        let (hash, credential) = found.unwrap_or((Hash::Sha256, decoy));
        let _one_of_few = self.hashing.acquire().await;
        let fits = tokio::task::spawn_blocking(move || credential.is_of_password(hash, &password));
        match fits.await {
            Ok(true) if exists => Step::Done { user, answer: Vec::new(), lifetime: None },
            _ => Step::Failed,
        }
    }

    async fn bearer(&self, message: &[u8]) -> Step<State> {
        let (Some(oauth), Some(token)) = (&self.oauth, oauth::token(message)) else {
            return Step::Failed;
        };
        match oauth.verify(token).await {
            Ok(accepted) => Step::Done {
                user: accepted.user,
                answer: Vec::new(),
                lifetime: Some(accepted.lifetime),
            },
            Err(reason) => {
                tracing::debug!("token refused: {reason}");
                let answer = br#"{"status":"invalid_token"}"#.to_vec();
                Step::Continue(State::TokenRefused, answer)
            }
        }
    }
}

/// Whether a client that re-authenticates names another user.
fn names_another_user(again: Option<&Principal>, user: &str) -> bool {
    again.is_some_and(|principal| *principal != Principal::user(user))
}

/// Splits a PLAIN message into user and password. Acting as another user is refused.
fn plain_parts(message: &[u8]) -> Option<(String, Vec<u8>)> {
    let mut parts = std::str::from_utf8(message).ok()?.split('\0');
    let (acting_as, user, password) = (parts.next()?, parts.next()?, parts.next()?);
    let good = parts.next().is_none()
        && (acting_as.is_empty() || acting_as == user)
        && !password.is_empty()
        && password.len() <= 1024
        && users::check_name(user).is_ok();
    good.then(|| (user.into(), password.as_bytes().to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_messages_are_split() {
        assert_eq!(plain_parts(b"\0a\0b"), Some(("a".into(), b"b".to_vec())));
        assert!(plain_parts(b"a\0a\0b").is_some());
        for wrong in ["", "\0", "\0a", "\0a\0", "\0\0b", "x\0a\0b", "\0a\0b\0c"] {
            assert_eq!(plain_parts(wrong.as_bytes()), None, "{wrong:?}");
        }
        assert_eq!(plain_parts(&[0, b'a', 0, 0xff]), None);
    }
}
