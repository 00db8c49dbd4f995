//! What hands out credentials, in the place of AWS: the instance's metadata, the container's endpoint, the service that takes web identities.
//!
//! The first has an address that no test can have. It is reached as the HTTP proxy of the server, which then asks it for what it would ask that address.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use super::KEY;
use super::proxy::accept;
use super::tls::Authority;
use crate::Error;

/// What the asker shows: the container's token, the web identity, the token of the metadata.
pub(super) const IDENTITY: &str = "an-identity-of-the-test";
pub(super) const WRONG_IDENTITY: &str = "an-identity-that-is-wrong";
pub(super) const ROLE: &str = "arn:aws:iam::123456789012:role/of-the-test";
const METADATA: &str = "http://169.254.169.254/latest";

/// What is handed out.
#[derive(Clone, Copy)]
pub(super) struct Given {
    pub(super) secret: &'static str,
    pub(super) token: &'static str,
    /// When it expires: long ago is before the next request.
    pub(super) expiration: &'static str,
}

struct State {
    given: Mutex<Given>,
    handed_out: AtomicU64,
    ended: AtomicBool,
    tls: Option<Arc<ServerConfig>>,
}

/// Listens on loopback until it is dropped.
pub(super) struct Issuer {
    address: SocketAddr,
    state: Arc<State>,
}

impl Issuer {
    pub(super) fn start(authority: Option<&Authority>, given: Given) -> Result<Self, Error> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let state = Arc::new(State {
            given: Mutex::new(given),
            handed_out: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            tls: authority.map(tls).transpose()?,
        });
        accept(
            listener,
            state.clone(),
            |state| &state.ended,
            |state, connection| state.serve(connection),
        );
        Ok(Self { address, state })
    }

    pub(super) fn url(&self) -> String {
        let scheme = if self.state.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    pub(super) fn give(&self, given: Given) {
        *self.state.given.lock().expect("nobody panics with it") = given;
    }

    /// How often it has handed out credentials.
    pub(super) fn handed_out(&self) -> u64 {
        self.state.handed_out.load(Ordering::SeqCst)
    }
}

impl Drop for Issuer {
    fn drop(&mut self) {
        self.state.ended.store(true, Ordering::SeqCst);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
    }
}

fn tls(authority: &Authority) -> Result<Arc<ServerConfig>, Error> {
    let chain = vec![CertificateDer::from_pem_file(authority.certificate())?];
    let key = PrivateKeyDer::from_pem_file(authority.key())?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config =
        ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    Ok(Arc::new(config?.with_no_client_auth().with_single_cert(chain, key)?))
}

impl State {
    fn serve(&self, connection: TcpStream) -> Result<(), Error> {
        connection.set_read_timeout(Some(Duration::from_secs(10)))?;
        match &self.tls {
            Some(config) => {
                let tls = ServerConnection::new(config.clone())?;
                self.answer(StreamOwned::new(tls, connection))
            }
            None => self.answer(connection),
        }
    }

    /// One request; none has a body that matters.
    fn answer(&self, mut connection: impl Read + Write) -> Result<(), Error> {
        let mut reader = BufReader::new(&mut connection);
        let (mut request, mut headers) = (String::new(), Vec::new());
        reader.read_line(&mut request)?;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            if line.trim().is_empty() {
                break;
            }
            let (name, value) = line.trim().split_once(':').ok_or("no header")?;
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        let mut words = request.split(' ');
        let (method, target) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        let (status, body) = self.judge(method, target, &headers);
        let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\n");
        let answer = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
        connection.write_all(answer.as_bytes())?;
        Ok(connection.flush()?)
    }

    fn judge(
        &self,
        method: &str,
        target: &str,
        headers: &[(String, String)],
    ) -> (&'static str, String) {
        let has = |name: &str, value: &str| headers.iter().any(|it| it.0 == name && it.1 == value);
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
            // With an address of its own, and with the one that has only a path.
            ("/container", _) if has("authorization", IDENTITY) => self.json(),
            ("http://169.254.170.2/container", _) => self.json(),
            ("/", query) if query.contains("Action=AssumeRoleWithWebIdentity") => {
                let shown = format!("WebIdentityToken={IDENTITY}");
                match query.split('&').any(|it| it == shown) && query.contains("role%2Fof-the-test")
                {
                    true => self.xml(),
                    // AWS says in words what it was shown; so does this, to see that nobody repeats it.
                    false => (
                        "403 Forbidden",
                        format!(
                            "<ErrorResponse><Error><Code>AccessDenied</Code><Message>No.</Message></Error><Query>{query}</Query></ErrorResponse>"
                        ),
                    ),
                }
            }
            _ => refused,
        }
    }

    fn hand_out(&self) -> Given {
        self.handed_out.fetch_add(1, Ordering::SeqCst);
        *self.given.lock().expect("nobody panics with it")
    }

    fn json(&self) -> (&'static str, String) {
        let Given { secret, token, expiration } = self.hand_out();
        let body = format!(
            r#"{{"AccessKeyId":"{KEY}","SecretAccessKey":"{secret}","Token":"{token}","Expiration":"{expiration}"}}"#
        );
        ("200 OK", body)
    }

    fn xml(&self) -> (&'static str, String) {
        let Given { secret, token, expiration } = self.hand_out();
        let body = format!(
            "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{KEY}</AccessKeyId>\
             <SecretAccessKey>{secret}</SecretAccessKey><SessionToken>{token}</SessionToken><Expiration>{expiration}</Expiration>\
             </Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
        );
        ("200 OK", body)
    }
}
