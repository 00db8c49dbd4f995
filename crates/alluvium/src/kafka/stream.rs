//! The byte stream of a connection, with TLS if configured.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio_rustls::TlsConnector;

/// One half of a connection; both halves can be used at the same time.
pub(super) enum Stream {
    Plain(TcpStream),
    /// A thread encrypts what is written here, and decrypts what is read.
    Encrypted {
        plain: UnixStream,
        /// Why the connection broke.
        broken: Arc<OnceLock<String>>,
    },
}

impl Stream {
    /// Performs the TLS handshake with the server, whose certificate must be for `host`.
    ///
    /// # Errors
    /// The server does not support TLS, has a certificate for another name, or requires one of the
    /// client.
    pub(super) fn encrypted(
        socket: TcpStream,
        host: &str,
        config: Arc<ClientConfig>,
        patience: Duration,
    ) -> Result<Self, String> {
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| format!("{host} is not a name that a certificate can have"))?;
        let (plain, inner) = UnixStream::pair().map_err(|error| error.to_string())?;
        let broken = Arc::new(OnceLock::new());
        let (failure, channel) = (broken.clone(), mpsc::channel());
        let (sender, outcome) = channel;
        let carry = async move {
            let shaken = async {
                socket.set_nonblocking(true)?;
                let socket = tokio::net::TcpStream::from_std(socket)?;
                let encrypted = TlsConnector::from(config).connect(name, socket).await?;
                inner.set_nonblocking(true)?;
                io::Result::Ok((encrypted, tokio::net::UnixStream::from_std(inner)?))
            };
            match shaken.await {
                Err(error) => drop(sender.send(Err(format!("TLS handshake failed: {error}")))),
                Ok((mut encrypted, mut inner)) => {
                    let _ = sender.send(Ok(()));
                    // With TLS 1.3, a server refuses a certificate only after the client's
                    // handshake.
                    let carried = tokio::io::copy_bidirectional(&mut encrypted, &mut inner).await;
                    if let Err(error) = carried {
                        let _ = failure.set(error.to_string());
                    }
                }
            }
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .map_err(|error| error.to_string())?;
        thread::spawn(move || runtime.block_on(carry));
        match outcome.recv_timeout(patience) {
            Ok(shaken) => shaken.map(|()| Self::Encrypted { plain, broken }),
            Err(_) => Err(format!("TLS handshake incomplete after {} s", patience.as_secs())),
        }
    }

    pub(super) fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Plain(socket) => Self::Plain(socket.try_clone()?),
            Self::Encrypted { plain, broken } => {
                Self::Encrypted { plain: plain.try_clone()?, broken: broken.clone() }
            }
        })
    }

    pub(super) fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        let timeout = Some(timeout);
        match self {
            Self::Plain(socket) => {
                socket.set_read_timeout(timeout)?;
                socket.set_write_timeout(timeout)
            }
            Self::Encrypted { plain, .. } => {
                plain.set_read_timeout(timeout)?;
                plain.set_write_timeout(timeout)
            }
        }
    }

    /// Why reading or writing failed: the reason of the TLS layer, if it has one.
    pub(super) fn reason(&self, error: &io::Error) -> String {
        match self {
            Self::Encrypted { broken, .. } if broken.get().is_some() => {
                broken.get().cloned().unwrap_or_default()
            }
            _ => error.to_string(),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.read(buf),
            Self::Encrypted { plain, .. } => plain.read(buf),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.write(buf),
            Self::Encrypted { plain, .. } => plain.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
