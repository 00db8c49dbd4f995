//! TLS of a listener: certificates from files, reloaded when they change, and clients'
//! certificates.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use parking_lot::RwLock;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{CertificateError, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::principal::{Principal, PrincipalRules};
use super::subject;

/// The time limit of a handshake, including its wait for a permit.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why certificates of old versions are refused, and what to do.
const OLD_VERSION: &str = "the certificate is of X.509 version 1 or 2, which TLS libraries refuse. \
    Issue it again as version 3, with the server's names as subjectAltName: \
    `openssl x509 -req ... -extfile FILE` where FILE has the line `subjectAltName=DNS:NAME`";

/// The largest file of certificates or keys.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Certificates of a listener. TLS 1.2 and 1.3 are supported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsConfig {
    /// The server's certificate and the intermediate certificates, in PEM. At most 1 MiB.
    pub certificate: PathBuf,
    /// The certificate's key in PEM: PKCS#8, PKCS#1 or SEC1, not encrypted. It may be the same
    /// file.
    pub key: PathBuf,
    /// Whether clients present certificates. Default: no.
    pub clients: ClientCertificates,
    /// How a client's name is derived from its certificate's subject.
    pub rules: PrincipalRules,
    /// The interval at which the files are checked for changes. Default 10 s, 1 ms to 1 day.
    pub reload_interval: Duration,
}

/// The certificates that clients present.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ClientCertificates {
    /// None.
    #[default]
    None,
    /// A certificate of one of the authorities in this PEM file, or none.
    Requested(PathBuf),
    /// A certificate of one of the authorities in this PEM file.
    Required(PathBuf),
}

impl ClientCertificates {
    fn authorities(&self) -> Option<&Path> {
        match self {
            Self::None => None,
            Self::Requested(file) | Self::Required(file) => Some(file),
        }
    }
}

impl TlsConfig {
    /// A configuration without client certificates.
    pub fn new(certificate: PathBuf, key: PathBuf) -> Self {
        Self {
            certificate,
            key,
            clients: ClientCertificates::None,
            rules: PrincipalRules::default(),
            reload_interval: Duration::from_secs(10),
        }
    }
}

/// Why certificates cannot be used, or a client is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TlsError {
    #[error("{}: {cause}", file.display())]
    File { file: PathBuf, cause: String },
    #[error("certificate and key: {0}")]
    Pair(String),
    #[error("the TLS handshake took more than {} s", HANDSHAKE_TIMEOUT.as_secs())]
    Slow,
    #[error("the TLS handshake failed: {0}")]
    Handshake(io::Error),
    #[error("the subject of the client's certificate cannot be read")]
    NoSubject,
    #[error("no rule derives a name from the certificate's subject {0:?}")]
    NoName(String),
}

/// The contents of the files.
#[derive(PartialEq, Eq)]
struct Files {
    certificate: Vec<u8>,
    key: Vec<u8>,
    authorities: Option<Vec<u8>>,
}

/// TLS of an open listener.
pub(crate) struct Tls {
    config: TlsConfig,
    current: Arc<RwLock<Arc<ServerConfig>>>,
    handshakes: Semaphore,
    reloading: tokio::task::JoinHandle<()>,
}

impl Drop for Tls {
    fn drop(&mut self) {
        self.reloading.abort();
    }
}

impl Tls {
    /// Reads the files, and starts to watch them for changes.
    ///
    /// # Errors
    /// The content of the files cannot be used.
    pub(crate) async fn open(config: TlsConfig) -> Result<Self, TlsError> {
        let files = read(&config).await?;
        let current = Arc::new(RwLock::new(Arc::new(make(&config, &files)?)));
        let reloading = tokio::spawn(reload(config.clone(), files, current.clone()));
        Ok(Self { config, current, handshakes: Semaphore::new(concurrent_handshakes()), reloading })
    }

    /// Does the handshake.
    ///
    /// # Returns
    /// The encrypted stream, and the principal in the client's certificate. If the client
    /// authenticates by SASL (`logs_in`), its certificate need not yield a name.
    ///
    /// # Errors
    /// The client does not speak TLS, has no trusted certificate where one is required, or takes
    /// too long.
    pub(crate) async fn accept(
        &self,
        socket: TcpStream,
        logs_in: bool,
    ) -> Result<(TlsStream<TcpStream>, Principal), TlsError> {
        let acceptor = TlsAcceptor::from(self.current.read().clone());
        let handshake = with_permit(&self.handshakes, acceptor.accept(socket));
        let stream = timeout(HANDSHAKE_TIMEOUT, handshake).await.map_err(|_| TlsError::Slow)?;
        let stream = stream.map_err(TlsError::Handshake)?;
        let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let principal = match shown {
            _ if logs_in => Principal::anonymous(),
            None => Principal::anonymous(),
            Some(certificate) => {
                let subject = subject::of(certificate).ok_or(TlsError::NoSubject)?;
                // Without a name, all such clients would be the same user.
                let name = self.config.rules.apply(&subject).filter(|name| !name.is_empty());
                Principal::user(&name.ok_or(TlsError::NoName(subject))?)
            }
        };
        Ok((stream, principal))
    }
}

/// The number of concurrent handshakes of a listener. A handshake takes some milliseconds of CPU;
/// half of the processors stay available to connected clients. A handshake that waits for its
/// client holds no permit: else silent clients would take all of them.
fn concurrent_handshakes() -> usize {
    std::thread::available_parallelism().map_or(1, |processors| processors.get().div_ceil(2))
}

/// Polls `work` with a permit, and releases the permit while it waits.
async fn with_permit<F: Future>(permits: &Semaphore, work: F) -> F::Output {
    let mut work = pin!(work);
    loop {
        let permit = permits.acquire().await;
        let step = futures::poll!(&mut work);
        drop(permit);
        match step {
            Poll::Ready(done) => return done,
            Poll::Pending => futures::pending!(),
        }
    }
}

/// Applies the files whenever they have changed. An unusable change is logged once, and the
/// previous certificates stay in use.
async fn reload(config: TlsConfig, mut known: Files, current: Arc<RwLock<Arc<ServerConfig>>>) {
    let mut last_complaint = String::new();
    loop {
        tokio::time::sleep(config.reload_interval).await;
        let changed = match read(&config).await {
            Ok(files) if files == known => None,
            Ok(files) => Some(make(&config, &files).map(|made| (files, made))),
            Err(error) => Some(Err(error)),
        };
        match changed {
            None => last_complaint.clear(),
            Some(Ok((files, made))) => {
                known = files;
                *current.write() = Arc::new(made);
                last_complaint.clear();
                tracing::info!(
                    certificate = %config.certificate.display(),
                    "new certificates are in use"
                );
            }
            Some(Err(error)) => {
                let complaint = error.to_string();
                if complaint != last_complaint {
                    tracing::warn!(
                        "the changed certificates cannot be used, the previous ones stay in use: \
                         {complaint}"
                    );
                }
                last_complaint = complaint;
            }
        }
    }
}

async fn read(config: &TlsConfig) -> Result<Files, TlsError> {
    Ok(Files {
        certificate: read_file(&config.certificate).await?,
        key: read_file(&config.key).await?,
        authorities: match config.clients.authorities() {
            Some(file) => Some(read_file(file).await?),
            None => None,
        },
    })
}

/// Reads a small file, off the serving threads.
pub(super) async fn read_file(file: &Path) -> Result<Vec<u8>, TlsError> {
    let path = file.to_owned();
    let read = move || {
        let len = std::fs::metadata(&path)?.len();
        if len > MAX_FILE_BYTES {
            let reason = format!("it has {len} bytes, the limit is {MAX_FILE_BYTES}");
            return Err(io::Error::other(reason));
        }
        std::fs::read(&path)
    };
    let read = tokio::task::spawn_blocking(read).await.unwrap_or_else(|e| Err(io::Error::other(e)));
    read.map_err(|error| TlsError::File { file: file.to_owned(), cause: error.to_string() })
}

fn make(config: &TlsConfig, files: &Files) -> Result<ServerConfig, TlsError> {
    let unusable = |file: &Path, cause: String| TlsError::File { file: file.to_owned(), cause };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let chain = certificates(&config.certificate, &files.certificate)?;
    if chain.first().is_some_and(|certificate| !subject::is_version_3(certificate)) {
        return Err(unusable(&config.certificate, OLD_VERSION.into()));
    }
    // The decoder's own error could show the content of the file.
    let key = PrivateKeyDer::from_pem_slice(&files.key)
        .map_err(|_| unusable(&config.key, "it has no usable private key in PEM".into()))?;
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| TlsError::Pair(error.to_string()))?;
    let builder = match (config.clients.authorities(), &files.authorities) {
        (Some(file), Some(pem)) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(file, pem)? {
                roots.add(certificate).map_err(|error| unusable(file, describe(&error)))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider);
            let verifier = match config.clients {
                ClientCertificates::Required(_) => verifier,
                _ => verifier.allow_unauthenticated(),
            };
            let verifier = verifier.build().map_err(|error| unusable(file, error.to_string()))?;
            builder.with_client_cert_verifier(verifier)
        }
        _ => builder.with_no_client_auth(),
    };
    let certificate = &config.certificate;
    let config = builder.with_single_cert(chain, key);
    let mut config = config.map_err(|error| match error {
        rustls::Error::InvalidCertificate(_) => unusable(certificate, describe(&error)),
        _ => TlsError::Pair(describe(&error)),
    })?;
    if files.authorities.is_some() {
        // A resumed session would reuse the client's certificate without checking whether it has
        // expired.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
    }
    Ok(config)
}

/// Describes what is wrong with certificates or keys. The messages of `rustls` contain names from
/// its code.
fn describe(error: &rustls::Error) -> String {
    use rustls::Error;
    let refused = |why: &str| format!("the certificate cannot be used: {why}");
    match error {
        Error::InconsistentKeys(_) => "the key is not the key of the certificate".into(),
        Error::InvalidCertificate(CertificateError::BadEncoding) => {
            refused("it is not an X.509 certificate, or is damaged")
        }
        Error::InvalidCertificate(CertificateError::Other(cause)) => {
            refused(&split_words(&cause.to_string()))
        }
        Error::InvalidCertificate(cause) => refused(&split_words(&cause.to_string())),
        other => other.to_string(),
    }
}

/// Splits a name such as `UnsupportedCriticalExtension` into words; other texts are unchanged.
fn split_words(name: &str) -> String {
    if !name.chars().all(|c| c.is_ascii_alphanumeric()) {
        return name.to_owned();
    }
    let mut words = String::new();
    for c in name.chars() {
        if c.is_ascii_uppercase() && !words.is_empty() {
            words.push(' ');
        }
        words.push(c.to_ascii_lowercase());
    }
    words
}

fn certificates(file: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let unusable = |cause: String| TlsError::File { file: file.to_owned(), cause };
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(|error| {
        unusable(match error {
            pem::Error::MissingSectionEnd { .. } => "a PEM section has no END line".into(),
            pem::Error::IllegalSectionStart { .. } => "a PEM BEGIN line is malformed".into(),
            pem::Error::Base64Decode(cause) => format!("a PEM section is not base64: {cause}"),
            other => other.to_string(),
        })
    })?;
    if found.is_empty() {
        return Err(unusable("it has no certificate in PEM".into()));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A certificate of version 1 with its key, as `openssl x509 -req` makes it without extensions.
    const VERSION_1: &str = "\
-----BEGIN CERTIFICATE-----
MIIBJTCBywIUSE5T4fuN9UDJ37QfR/Em4n889JkwCgYIKoZIzj0EAwIwFDESMBAG
A1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyNzAwNTAyNVoYDzIxMjYxMTAzMDA1MDI1
WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNC
AARQPi7DZWIw641JDIFlUurzEiicPSzv7e2WJ3XuF7/JBHl/ZRdSK9Sm6wwgWvGR
5fLWdrgjBlELsiEjNpO8UrcrMAoGCCqGSM49BAMCA0kAMEYCIQCJWPioI76pBRzN
lsKjssbheGxgFu5+VqwIJLPEU3HHAQIhAMtEqwy+QeOZUa3g5wMb1H37EI+X5gPN
QLKnDmwzFEE8
-----END CERTIFICATE-----
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgyf1KjReIAutyhZ92
hJBniRJCUwSL/1gltaZJMl6+08ChRANCAARQPi7DZWIw641JDIFlUurzEiicPSzv
7e2WJ3XuF7/JBHl/ZRdSK9Sm6wwgWvGR5fLWdrgjBlELsiEjNpO8Urcr
-----END PRIVATE KEY-----
";

    fn refusal(certificate: &str, key: &str, authorities: Option<&str>) -> String {
        let mut config = TlsConfig::new("cert.pem".into(), "key.pem".into());
        if authorities.is_some() {
            config.clients = ClientCertificates::Required("ca.pem".into());
        }
        let files = Files {
            certificate: certificate.into(),
            key: key.into(),
            authorities: authorities.map(Into::into),
        };
        make(&config, &files).expect_err("it is accepted").to_string()
    }

    #[test]
    fn unusable_files_are_refused_with_a_readable_reason() {
        let make = || {
            let key = rcgen::KeyPair::generate().unwrap();
            let params = rcgen::CertificateParams::new(vec!["localhost".into()]).unwrap();
            (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
        };
        let ((certificate, key), (_, other_key)) = (make(), make());
        let damaged = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        let (start, _) = certificate.split_once("-----END").unwrap();
        for (refusal, expected) in [
            (
                refusal(VERSION_1, VERSION_1, None),
                "cert.pem: the certificate is of X.509 version 1",
            ),
            (refusal(VERSION_1, VERSION_1, None), "Issue it again as version 3"),
            (refusal(&certificate, &other_key, None), "the key is not the key of the certificate"),
            (refusal(damaged, &key, None), "cert.pem: the certificate cannot be used"),
            (refusal(&certificate, &key, Some(damaged)), "ca.pem: the certificate cannot be used"),
            (refusal(start, &key, None), "cert.pem: a PEM section has no END line"),
            (refusal(&certificate, "no key", None), "key.pem: it has no usable private key in PEM"),
            (refusal(&certificate, &key, Some("none")), "ca.pem: it has no certificate in PEM"),
        ] {
            assert!(refusal.contains(expected), "{refusal}");
            for name in ["Other", "KeyMismatch", "BadEncoding", "Cert(", "[4", "{"] {
                assert!(!refusal.contains(name), "{refusal}");
            }
        }
        assert_eq!(split_words("UnsupportedCertVersion"), "unsupported cert version");
        assert_eq!(split_words("in words"), "in words");
    }
}
