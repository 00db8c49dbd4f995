//! A stand-in for AWS that issues credentials: the instance's metadata, the container's endpoint,
//! the service for web identities.
//!
//! The first has an address that no test can have. The stand-in is the HTTP proxy of the server
//! instead, which then asks it for what it would ask that address.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::KEY;
use crate::Error;
use crate::web::{Answer, Authority, Request, WebServer};

/// What the client presents: the container's token, the web identity, the token of the metadata.
pub(super) const IDENTITY: &str = "an-identity-of-the-test";
pub(super) const WRONG_IDENTITY: &str = "an-identity-that-is-wrong";
pub(super) const ROLE: &str = "arn:aws:iam::123456789012:role/of-the-test";
const METADATA: &str = "http://169.254.169.254/latest";

/// The issued credentials.
#[derive(Clone, Copy)]
pub(super) struct Credentials {
    pub(super) secret: &'static str,
    pub(super) token: &'static str,
    /// Expiration time; a time in the past expires before the next request.
    pub(super) expiration: &'static str,
}

struct State {
    current: Mutex<Credentials>,
    handed_out: AtomicU64,
}

/// Listens on loopback until it is dropped.
pub(super) struct Issuer {
    server: WebServer,
    state: Arc<State>,
}

impl Issuer {
    pub(super) fn start(
        authority: Option<&Authority>,
        initial: Credentials,
    ) -> Result<Self, Error> {
        let state = Arc::new(State { current: Mutex::new(initial), handed_out: AtomicU64::new(0) });
        let answering = state.clone();
        let server = WebServer::start(authority, move |request| answering.judge(request))?;
        Ok(Self { server, state })
    }

    pub(super) fn url(&self) -> String {
        self.server.url()
    }

    pub(super) fn issue(&self, credentials: Credentials) {
        *self.state.current.lock().expect("no thread panics with the lock held") = credentials;
    }

    /// Number of times that it has issued credentials.
    pub(super) fn handed_out(&self) -> u64 {
        self.state.handed_out.load(Ordering::SeqCst)
    }
}

impl State {
    fn judge(&self, request: &Request) -> Answer {
        let (method, target) = (request.method.as_str(), request.target.as_str());
        let has = |name: &str, value: &str| request.header(name) == Some(value);
        let refused = ("403 Forbidden", String::new());
        let of_instance = has("x-aws-ec2-metadata-token", IDENTITY);
        if let Some(path) = target.strip_prefix(METADATA) {
            return match (method, path) {
                ("PUT", "/api/token") => ("200 OK", IDENTITY.into()),
                ("GET", "/meta-data/iam/security-credentials/") if of_instance => {
                    ("200 OK", "role".into())
                }
                ("GET", "/meta-data/iam/security-credentials/role") if of_instance => self.json(),
                _ => refused,
            };
        }
        match target.split_once('?').unwrap_or((target, "")) {
            // Both for a full URL and for one that consists of a path only.
            ("/container", _) if has("authorization", IDENTITY) => self.json(),
            ("http://169.254.170.2/container", _) => self.json(),
            ("/", query) if query.contains("Action=AssumeRoleWithWebIdentity") => {
                let shown = format!("WebIdentityToken={IDENTITY}");
                match query.split('&').any(|it| it == shown) && query.contains("role%2Fof-the-test")
                {
                    true => self.xml(),
                    // AWS repeats in its message what was presented; so does this, to check that
                    // the server does not repeat it.
                    false => (
                        "403 Forbidden",
                        format!(
                            "<ErrorResponse><Error><Code>AccessDenied</Code>\
                             <Message>No.</Message></Error><Query>{query}</Query></ErrorResponse>"
                        ),
                    ),
                }
            }
            _ => refused,
        }
    }

    fn hand_out(&self) -> Credentials {
        self.handed_out.fetch_add(1, Ordering::SeqCst);
        *self.current.lock().expect("no thread panics with the lock held")
    }

    fn json(&self) -> Answer {
        let Credentials { secret, token, expiration } = self.hand_out();
        let body = format!(
            r#"{{"AccessKeyId":"{KEY}","SecretAccessKey":"{secret}","Token":"{token}",
            "Expiration":"{expiration}"}}"#
        );
        ("200 OK", body)
    }

    fn xml(&self) -> Answer {
        let Credentials { secret, token, expiration } = self.hand_out();
        let body = format!(
            "<AssumeRoleWithWebIdentityResponse>\
             <AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{KEY}</AccessKeyId>\
             <SecretAccessKey>{secret}</SecretAccessKey><SessionToken>{token}</SessionToken>\
             <Expiration>{expiration}</Expiration>\
             </Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
        );
        ("200 OK", body)
    }
}
