//! The listeners that clients connect to.

use std::fmt;
use std::net::SocketAddr;

use kafka_protocol::protocol::StrBytes;
use tokio::net::TcpListener;

use super::sasl::Mechanism;
use super::tls::{ClientCertificates, Tls, TlsConfig};
use crate::{InvalidConfig, StartError};

/// A listener that clients connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerConfig {
    /// Name for logs and metrics. 1 to 64 letters, digits, `-`, `_` and `.`; unique among the
    /// listeners.
    pub name: String,
    /// The address to listen on; port 0 selects a free port.
    pub listen: SocketAddr,
    /// Host name or address that is advertised to clients of this listener. Default: the
    /// bound address, which must then be a specific one (not `0.0.0.0` or `::`). 1 to 255
    /// characters.
    pub advertised_host: Option<String>,
    /// The port that is advertised to them. Default: the bound port. 1 to 65535.
    pub advertised_port: Option<u16>,
    /// TLS of the listener. Default none: everything is in plain text.
    pub tls: Option<TlsConfig>,
    /// The mechanisms by which clients authenticate, each once. Default: no authentication.
    pub sasl: Vec<Mechanism>,
}

impl ListenerConfig {
    /// A listener in plain text without authentication.
    pub fn plaintext(listen: SocketAddr) -> Self {
        Self {
            name: "PLAINTEXT".into(),
            listen,
            advertised_host: None,
            advertised_port: None,
            tls: None,
            sasl: Vec::new(),
        }
    }

    /// The listener's security protocol by Kafka's name.
    pub fn protocol(&self) -> &'static str {
        match (self.tls.is_some(), self.sasl.is_empty()) {
            (false, true) => "PLAINTEXT",
            (true, true) => "SSL",
            (false, false) => "SASL_PLAINTEXT",
            (true, false) => "SASL_SSL",
        }
    }

    /// Whether connections are encrypted and clients are authenticated.
    pub fn is_protected(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| {
            !self.sasl.is_empty() || matches!(tls.clients, ClientCertificates::Required(_))
        })
    }

    pub(crate) fn validate(&self) -> Result<(), InvalidConfig> {
        let refuse = |what: String| Err(InvalidConfig(format!("listener {:?}: {what}", self.name)));
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if !(1..=64).contains(&self.name.len()) || !self.name.chars().all(plain) {
            return refuse("a name must have 1 to 64 letters, digits, `-`, `_` and `.`".into());
        }
        match &self.advertised_host {
            Some(host) if !(1..=255).contains(&host.len()) => {
                return refuse(format!(
                    "advertised_host has {} characters, but must have 1 to 255",
                    host.len()
                ));
            }
            None if self.listen.ip().is_unspecified() => {
                return refuse(format!(
                    "clients cannot connect to the listen address {}: set advertised_host",
                    self.listen
                ));
            }
            _ => {}
        }
        if self.advertised_port == Some(0) {
            return refuse("advertised_port is 0, but must be 1 to 65535".into());
        }
        Ok(())
    }
}

impl fmt::Display for ListenerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, listen, advertised_host, advertised_port, .. } = self;
        write!(f, "{name}={}://{listen}", self.protocol())?;
        match (advertised_host, advertised_port) {
            (None, None) => Ok(()),
            (host, port) => {
                let port = port.unwrap_or(listen.port());
                write!(f, "/{}:{port}", host.as_deref().unwrap_or("default"))
            }
        }
    }
}

/// An open listener.
pub(crate) struct Listener {
    pub(crate) config: ListenerConfig,
    pub(crate) local_addr: SocketAddr,
    /// The host that is advertised to clients.
    pub(crate) host: StrBytes,
    pub(crate) port: i32,
    pub(crate) tls: Option<Tls>,
}

impl Listener {
    /// The listener in the form of `advertised.listeners`.
    pub(crate) fn advertised(&self) -> String {
        format!("{}://{}:{}", self.config.name, &*self.host, self.port)
    }

    /// Binds the port and reads the certificates.
    ///
    /// # Errors
    /// The address is in use or does not belong to this machine; certificates cannot be used.
    pub(crate) async fn open(config: ListenerConfig) -> Result<(Self, TcpListener), StartError> {
        let tls = match &config.tls {
            Some(tls) => Some(Tls::open(tls.clone()).await.map_err(|cause| StartError::Tls {
                listener: config.name.clone(),
                cause: cause.to_string(),
            })?),
            None => None,
        };
        let listen_error = |cause| StartError::Listen { addr: config.listen, cause };
        let socket = TcpListener::bind(config.listen).await.map_err(listen_error)?;
        let local_addr = socket.local_addr().map_err(listen_error)?;
        let host = config.advertised_host.clone().unwrap_or_else(|| local_addr.ip().to_string());
        let port = config.advertised_port.unwrap_or(local_addr.port()).into();
        Ok((Self { config, local_addr, host: StrBytes::from_string(host), port, tls }, socket))
    }
}
