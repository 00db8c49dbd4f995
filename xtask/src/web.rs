//! Web servers for the tests: a certificate authority that no system trusts, and a small HTTP
//! server.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use crate::Error;
use crate::exec::quietly;

const NEW_KEY: &str = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";

/// The test's own certificate authority, and a certificate that it issued for the loopback
/// interface, in a directory.
#[derive(Clone)]
pub(crate) struct Authority(PathBuf);

impl Authority {
    /// Its name is that of the directory: if two authorities had the same name, a certificate of
    /// the other one would be reported as invalid, not as unknown.
    pub(crate) fn new(directory: &Path) -> Result<Self, Error> {
        if directory.exists() {
            fs::remove_dir_all(directory)?;
        }
        fs::create_dir_all(directory)?;
        let name = directory.file_name().unwrap_or_default().to_string_lossy();
        let this = Self(directory.to_path_buf());
        this.openssl(&format!(
            "req -x509 {NEW_KEY} -keyout ca.key -out ca.pem -days 2 -subj /CN={name}"
        ))?;
        this.issue("/CN=server", "public.crt", "private.key")?;
        Ok(this)
    }

    /// Issues another certificate with its key, in these files of the directory.
    pub(crate) fn issue(&self, subject: &str, certificate: &str, key: &str) -> Result<(), Error> {
        let extensions =
            "subjectAltName=IP:127.0.0.1,DNS:localhost\nbasicConstraints=critical,CA:FALSE\n";
        fs::write(self.0.join("extensions"), extensions)?;
        self.openssl(&format!("req {NEW_KEY} -keyout {key} -out request -subj {subject}"))?;
        self.openssl(&format!(
            "x509 -req -in request -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 \
             -extfile extensions -out {certificate}"
        ))
    }

    fn openssl(&self, arguments: &str) -> Result<(), Error> {
        quietly(Command::new("openssl").current_dir(&self.0).args(arguments.split(' ')))
    }

    /// The directory where MinIO finds a certificate and its key, under the names that it expects.
    pub(crate) fn directory(&self) -> &Path {
        &self.0
    }

    /// The root certificate, for clients that trust the authority.
    pub(crate) fn root(&self) -> PathBuf {
        self.0.join("ca.pem")
    }

    pub(crate) fn certificate(&self) -> PathBuf {
        self.0.join("public.crt")
    }

    pub(crate) fn key(&self) -> PathBuf {
        self.0.join("private.key")
    }
}

/// A request of an HTTP client.
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) target: String,
    /// Header names are in lower case.
    pub(crate) headers: Vec<(String, String)>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|header| header.0 == name).map(|header| header.1.as_str())
    }
}

/// A response: status and body.
pub(crate) type Answer = (&'static str, String);

/// A web server that listens on loopback until it is dropped.
pub(crate) struct WebServer {
    address: SocketAddr,
    with_tls: bool,
    ended: Arc<AtomicBool>,
}

impl WebServer {
    /// Starts a server, with TLS if there is an `authority`.
    pub(crate) fn start(
        authority: Option<&Authority>,
        answer: impl Fn(&Request) -> Answer + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let (address, ended) = (listener.local_addr()?, Arc::new(AtomicBool::new(false)));
        let tls = authority.map(tls).transpose()?;
        let (with_tls, end) = (tls.is_some(), ended.clone());
        accept(listener, move |connection| serve(connection, tls.clone(), &answer), end);
        Ok(Self { address, with_tls, ended })
    }

    pub(crate) fn url(&self) -> String {
        let scheme = if self.with_tls { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }
}

impl Drop for WebServer {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        // Wakes the accepting thread.
        let _ = TcpStream::connect(self.address);
    }
}

/// Serves each connection in its own thread, until `ended` is set.
pub(crate) fn accept<E: 'static>(
    listener: TcpListener,
    serve: impl Fn(TcpStream) -> Result<(), E> + Send + Sync + 'static,
    ended: Arc<AtomicBool>,
) {
    let serve = Arc::new(serve);
    thread::spawn(move || {
        for connection in listener.incoming() {
            if ended.load(Ordering::SeqCst) {
                return;
            }
            let Ok(connection) = connection else { continue };
            let serve = serve.clone();
            // An error means that the connection ended, which both sides know.
            thread::spawn(move || drop(serve(connection)));
        }
    });
}

fn tls(authority: &Authority) -> Result<Arc<ServerConfig>, Error> {
    let chain = vec![CertificateDer::from_pem_file(authority.certificate())?];
    let key = PrivateKeyDer::from_pem_file(authority.key())?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config =
        ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    Ok(Arc::new(config?.with_no_client_auth().with_single_cert(chain, key)?))
}

fn serve(
    connection: TcpStream,
    tls: Option<Arc<ServerConfig>>,
    answer: &impl Fn(&Request) -> Answer,
) -> Result<(), Error> {
    connection.set_read_timeout(Some(Duration::from_secs(10)))?;
    match tls {
        Some(config) => {
            let tls = ServerConnection::new(config)?;
            answer_one(StreamOwned::new(tls, connection), answer)
        }
        None => answer_one(connection, answer),
    }
}

/// Answers one request; its body is ignored.
fn answer_one(
    mut connection: impl Read + Write,
    answer: &impl Fn(&Request) -> Answer,
) -> Result<(), Error> {
    let mut reader = BufReader::new(&mut connection);
    let (mut first, mut headers) = (String::new(), Vec::new());
    reader.read_line(&mut first)?;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        if line.trim().is_empty() {
            break;
        }
        let (name, value) = line.trim().split_once(':').ok_or("no header")?;
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let mut words = first.split(' ').map(str::to_owned);
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let request = Request { method, target, headers };
    // Closing a connection with unread data could discard the answer.
    let body_bytes = request.header("content-length").map_or(Ok(0), str::parse)?;
    std::io::copy(&mut reader.take(body_bytes), &mut std::io::sink())?;
    let (status, body) = answer(&request);
    let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: application/json");
    let answer = format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    connection.write_all(answer.as_bytes())?;
    Ok(connection.flush()?)
}
