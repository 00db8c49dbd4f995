//! Addresses as written in options.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::str::FromStr;

/// An address to listen on: `127.0.0.1:9092`, `[::1]:9092`, or a name that resolves, such as
/// `localhost:9092`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address(pub(crate) SocketAddr);

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let resolved = text.to_socket_addrs().map(|mut found| found.next());
        match resolved {
            Ok(Some(address)) => Ok(Self(address)),
            Ok(None) => Err(format!("`{text}` does not resolve to an address")),
            Err(error) => Err(format!("`{text}` is not an address like 127.0.0.1:9092: {error}")),
        }
    }
}

/// The admin port's address, or `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AdminListen(pub(crate) Option<SocketAddr>);

impl FromStr for AdminListen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self(None));
        }
        text.parse().map(|Address(address)| Self(Some(address)))
    }
}

/// A host name or address with a port; not resolved here, because clients resolve it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostPort {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl FromStr for HostPort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not HOST:PORT, as in broker.example.org:9092");
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let host = match host.strip_prefix('[') {
            Some(bracketed) => bracketed.strip_suffix(']').ok_or_else(wrong)?,
            None if host.contains(':') => return Err(wrong()),
            None => host,
        };
        let port = port.parse().map_err(|_| wrong())?;
        if host.is_empty() || host.len() > 255 || port == 0 {
            return Err(wrong());
        }
        Ok(Self { host: host.into(), port })
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advertised_addresses_keep_names_and_brackets_apart() {
        let parse = |text: &str| text.parse::<HostPort>();
        assert_eq!(parse("a.b:1"), Ok(HostPort { host: "a.b".into(), port: 1 }));
        let v6 = parse("[2001:db8::1]:9092").unwrap();
        assert_eq!((v6.host.as_str(), v6.port), ("2001:db8::1", 9092));
        assert_eq!(v6.to_string(), "[2001:db8::1]:9092");
        for text in ["", "host", ":1", "host:", "host:0", "host:65536", "::1:9092", "[::1:9092"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
