//! The listeners for clients, as written in options.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use alluvium_broker::{ClientCertificates, ListenerConfig, Mechanism, PrincipalRules, TlsConfig};
use serde::Deserialize;

use crate::address::{Address, HostPort};
use crate::config::{from_text, required_text};

/// The `[[listener]]` tables of the file; or the value of the flag: a table in braces, or several
/// in brackets.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(transparent)]
pub(crate) struct Listeners(Vec<ListenerOptions>);

/// One listener.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ListenerOptions {
    name: String,
    #[serde(deserialize_with = "required_text")]
    listen: Address,
    #[serde(default, deserialize_with = "from_text")]
    advertise: Option<HostPort>,
    protocol: Protocol,
    tls_certificate: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    #[serde(default)]
    tls_client_auth: ClientAuth,
    tls_client_ca: Option<PathBuf>,
    #[serde(default, deserialize_with = "from_text")]
    tls_principal_rules: Option<PrincipalRules>,
    #[serde(default)]
    sasl_mechanisms: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
enum Protocol {
    Plaintext,
    Ssl,
    SaslPlaintext,
    SaslSsl,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ClientAuth {
    #[default]
    None,
    Requested,
    Required,
}

impl FromStr for Listeners {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Wrapped {
            listener: Listeners,
        }
        let several = match text.trim_start().starts_with('[') {
            true => format!("listener = {text}"),
            false => format!("listener = [{text}]"),
        };
        let wrapped: Wrapped = toml::from_str(&several).map_err(|error| {
            let why = error.message();
            format!(
                "{why}; write a listener as \
                     {{name = \"tls\", listen = \"127.0.0.1:9093\", protocol = \"SSL\", ...}}"
            )
        })?;
        Ok(wrapped.listener)
    }
}

impl Listeners {
    /// Returns the listeners to open: these, and one in plaintext at `listen`, or at `default` if
    /// there is no other.
    ///
    /// # Errors
    /// Options that contradict each other.
    pub(crate) fn resolve(
        self,
        listen: Option<SocketAddr>,
        advertise: Option<HostPort>,
        default: SocketAddr,
    ) -> Result<Vec<ListenerConfig>, String> {
        let plaintext = listen.or(self.0.is_empty().then_some(default));
        if plaintext.is_none() && advertise.is_some() {
            return Err(
                "advertise applies to listen, but there are only [[listener]] tables: set \
                        advertise there"
                    .into(),
            );
        }
        let mut resolved: Vec<_> = plaintext.map(ListenerConfig::plaintext).into_iter().collect();
        if let (Some(plaintext), Some(HostPort { host, port })) = (resolved.first_mut(), advertise)
        {
            (plaintext.advertised_host, plaintext.advertised_port) = (Some(host), Some(port));
        }
        for options in self.0 {
            let name = options.name.clone();
            resolved.push(options.resolve().map_err(|why| format!("listener {name}: {why}"))?);
        }
        Ok(resolved)
    }
}

impl ListenerOptions {
    fn resolve(self) -> Result<ListenerConfig, String> {
        let encrypted = matches!(self.protocol, Protocol::Ssl | Protocol::SaslSsl);
        let logs_in = matches!(self.protocol, Protocol::SaslPlaintext | Protocol::SaslSsl);
        let mut sasl = Vec::new();
        for name in &self.sasl_mechanisms {
            let mechanism: Mechanism = name.parse()?;
            if sasl.contains(&mechanism) {
                return Err(format!("sasl-mechanisms has {name} twice"));
            }
            sasl.push(mechanism);
        }
        match (logs_in, sasl.is_empty()) {
            (true, true) => sasl = vec![Mechanism::ScramSha256, Mechanism::ScramSha512],
            (false, false) => {
                return Err("sasl-mechanisms is set, but the protocol does not use SASL".into());
            }
            _ => {}
        }
        let tls = match (encrypted, self.tls_certificate, self.tls_key) {
            (true, Some(certificate), Some(key)) => Some(TlsConfig {
                clients: match (self.tls_client_auth, self.tls_client_ca) {
                    (ClientAuth::None, None) if self.tls_principal_rules.is_some() => {
                        return Err(
                            "tls-principal-rules needs tls-client-auth: requested or required"
                                .into(),
                        );
                    }
                    (ClientAuth::None, None) => ClientCertificates::None,
                    (ClientAuth::Requested, Some(ca)) => ClientCertificates::Requested(ca),
                    (ClientAuth::Required, Some(ca)) => ClientCertificates::Required(ca),
                    (ClientAuth::None, Some(_)) => {
                        return Err(
                            "tls-client-ca needs tls-client-auth: requested or required".into()
                        );
                    }
                    (_, None) => return Err("tls-client-auth needs tls-client-ca".into()),
                },
                rules: self.tls_principal_rules.unwrap_or_default(),
                ..TlsConfig::new(certificate, key)
            }),
            (true, ..) => return Err("tls-certificate and tls-key are required".into()),
            (false, None, None)
                if self.tls_client_ca.is_none()
                    && self.tls_principal_rules.is_none()
                    && matches!(self.tls_client_auth, ClientAuth::None) =>
            {
                None
            }
            (false, ..) => {
                return Err("TLS options are set, but the protocol does not use TLS".into());
            }
        };
        Ok(ListenerConfig {
            name: self.name,
            listen: self.listen.0,
            advertised_port: self.advertise.as_ref().map(|advertise| advertise.port),
            advertised_host: self.advertise.map(|advertise| advertise.host),
            tls,
            sasl,
        })
    }
}
