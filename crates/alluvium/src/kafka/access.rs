//! Client authentication and encryption: the file of `--command-config`, with the property names of
//! librdkafka and of Kafka's own tools.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use alluvium_broker::Mechanism;
use rustls::ClientConfig;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use url::Url;

use super::login::Login;
use super::properties;

/// TLS and login; the default is neither.
#[derive(Clone, Default)]
pub(crate) struct Access {
    /// The option that names the file, if that is not `--command-config`.
    pub(crate) option: Option<&'static str>,
    pub(super) tls: Option<Arc<ClientConfig>>,
    pub(super) login: Option<Arc<Login>>,
}

/// The properties that are read, each with its names in librdkafka and in Kafka's tools.
const CA: [&str; 2] = ["ssl.ca.location", "ssl.truststore.location"];
const CERTIFICATE: [&str; 2] = ["ssl.certificate.location", "ssl.keystore.location"];
const KEY: [&str; 1] = ["ssl.key.location"];
const MECHANISM: [&str; 2] = ["sasl.mechanism", "sasl.mechanisms"];
const USER: [&str; 1] = ["sasl.username"];
const PASSWORD: [&str; 1] = ["sasl.password"];
const TOKEN: [&str; 1] = ["sasl.oauthbearer.token.endpoint.url"];
/// Kafka's tools require it for tokens; it carries no other information.
const TOKEN_HANDLER: [&str; 1] = ["sasl.login.callback.handler.class"];
const JAAS: &str = "sasl.jaas.config";
const PROTOCOL: &str = "security.protocol";
const STORE_TYPES: [&str; 2] = ["ssl.truststore.type", "ssl.keystore.type"];

impl Access {
    /// Reads a file of properties. Without one: plaintext, and no login.
    ///
    /// # Errors
    /// It is unusable.
    pub(crate) fn of(file: Option<&Path>) -> Result<Self, String> {
        file.map(Self::read).transpose().map(Option::unwrap_or_default)
    }

    /// Reads a file of properties.
    ///
    /// # Errors
    /// It cannot be read, or has settings that are not supported. No error shows a password.
    pub(crate) fn read(file: &Path) -> Result<Self, String> {
        let wrong = |why: String| format!("{}: {why}", file.display());
        let text = std::fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
        Properties::parse(&text).and_then(|properties| properties.access()).map_err(wrong)
    }
}

struct Properties(BTreeMap<String, String>);

impl Properties {
    fn parse(text: &str) -> Result<Self, String> {
        let properties = properties::parse(text)?;
        let of_sasl = [&MECHANISM[..], &USER, &PASSWORD, &TOKEN, &TOKEN_HANDLER].concat();
        let of_tls = [&CA[..], &CERTIFICATE, &KEY, &STORE_TYPES].concat();
        let known = [of_tls, of_sasl, vec![JAAS, PROTOCOL]].concat();
        // Other properties are for other programs that share the file, and unrelated to security.
        let unknown = properties.keys().find(|name| {
            ["ssl.", "sasl.", "security."].iter().any(|of| name.starts_with(of))
                && !known.contains(&name.as_str())
        });
        match unknown {
            Some(name) => {
                Err(format!("{name} is not supported; supported are {}", known.join(", ")))
            }
            None => Ok(Self(properties)),
        }
    }

    fn get(&self, names: &[&str]) -> Option<&str> {
        names.iter().find_map(|name| self.0.get(*name)).map(String::as_str)
    }

    fn access(&self) -> Result<Access, String> {
        let protocol = self.get(&[PROTOCOL]).unwrap_or("PLAINTEXT").to_ascii_uppercase();
        let (encrypted, logs_in) = match protocol.as_str() {
            "PLAINTEXT" => (false, false),
            "SSL" => (true, false),
            "SASL_PLAINTEXT" => (false, true),
            "SASL_SSL" => (true, true),
            other => {
                return Err(format!(
                    "{PROTOCOL} is {other}, but must be PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL"
                ));
            }
        };
        let unused = |prefix: &str| self.0.keys().find(|name| name.starts_with(prefix)).cloned();
        if let Some(name) = unused("ssl.").filter(|_| !encrypted) {
            return Err(format!("{name} is set, but {PROTOCOL} is {protocol}"));
        }
        if let Some(name) = unused("sasl.").filter(|_| !logs_in) {
            return Err(format!("{name} is set, but {PROTOCOL} is {protocol}"));
        }
        Ok(Access {
            option: None,
            tls: encrypted.then(|| self.tls()).transpose()?.map(Arc::new),
            login: logs_in.then(|| self.login()).transpose()?.map(Arc::new),
        })
    }

    fn tls(&self) -> Result<ClientConfig, String> {
        for name in STORE_TYPES {
            if let Some(kind) = self.get(&[name]).filter(|kind| !kind.eq_ignore_ascii_case("PEM")) {
                return Err(format!("{name} is {kind}, but only PEM is supported"));
            }
        }
        let mut roots = RootCertStore::empty();
        match self.get(&CA) {
            Some(file) => {
                for certificate in certificates(file)? {
                    roots.add(certificate).map_err(|error| format!("{file}: {error}"))?;
                }
            }
            None => {
                let found = rustls_native_certs::load_native_certs();
                roots.add_parsable_certificates(found.certs);
                if roots.is_empty() {
                    return Err(format!(
                        "this system has no trusted certificate authority: set one with {}",
                        CA[0]
                    ));
                }
            }
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_root_certificates(roots);
        let Some(file) = self.get(&CERTIFICATE) else {
            return Ok(builder.with_no_client_auth());
        };
        let key_file = self.get(&KEY).unwrap_or(file);
        // The decoder's own message could show content of the file.
        let key = PrivateKeyDer::from_pem_file(key_file)
            .map_err(|_| format!("{key_file} contains no usable private key in PEM"))?;
        builder
            .with_client_auth_cert(certificates(file)?, key)
            .map_err(|error| format!("{file} and {key_file}: {error}"))
    }

    fn login(&self) -> Result<Login, String> {
        let name = self.get(&MECHANISM).ok_or_else(|| format!("{} is missing", MECHANISM[0]))?;
        let mechanism: Mechanism = name.parse()?;
        if mechanism == Mechanism::OauthBearer {
            return Ok(Login { mechanism, user: String::new(), password: self.token()? });
        }
        let of_tokens = [TOKEN[0], TOKEN_HANDLER[0]];
        if let Some(name) = of_tokens.into_iter().find(|name| self.0.contains_key(*name)) {
            return Err(format!("{name} is set, but {} is {}", MECHANISM[0], mechanism.name()));
        }
        let jaas = |name| self.get(&[JAAS]).and_then(|text| quoted(text, name));
        let user = self.get(&USER).map(str::to_owned).or_else(|| jaas("username"));
        let password = self.get(&PASSWORD).map(str::to_owned).or_else(|| jaas("password"));
        match (user, password) {
            (Some(user), Some(password)) => Ok(Login { mechanism, user, password }),
            _ => Err(format!(
                "{} and {} are missing, and so is a {JAAS} with a username and a password",
                USER[0], PASSWORD[0]
            )),
        }
    }

    /// Reads the token from a file, configured as for Kafka's tools.
    fn token(&self) -> Result<String, String> {
        const HANDLER: &str = ".OAuthBearerLoginCallbackHandler";
        if let Some(other) = self.get(&TOKEN_HANDLER).filter(|class| !class.ends_with(HANDLER)) {
            return Err(format!(
                "{} is {other}, but only Kafka's own is supported",
                TOKEN_HANDLER[0]
            ));
        }
        let url = self.get(&TOKEN).ok_or_else(|| format!("{} is missing", TOKEN[0]))?;
        let file = Url::parse(url).ok().filter(|url| url.scheme() == "file");
        // An error does not show the URL: a URL of another kind may contain a secret.
        let file = file
            .and_then(|url| url.to_file_path().ok())
            .ok_or_else(|| format!("{} is not the URL of a file: file:///...", TOKEN[0]))?;
        let content = std::fs::read_to_string(&file);
        let content = content.map_err(|error| format!("{}: {error}", file.display()))?;
        let token = content.trim();
        let is_part = |c: char| c.is_ascii_alphanumeric() || "-_.=".contains(c);
        match !token.is_empty() && token.chars().all(is_part) {
            true => Ok(token.to_owned()),
            false => Err(format!("{} contains no token", file.display())),
        }
    }
}

fn certificates(file: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let found =
        CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let found = found.map_err(|error| format!("{file}: {error}"))?;
    match found.is_empty() {
        true => Err(format!("{file}: contains no certificate in PEM")),
        false => Ok(found),
    }
}

/// The value of `name="value"` in a line of JAAS, with the escapes of Java's `StreamTokenizer`.
fn quoted(text: &str, name: &str) -> Option<String> {
    let begin = text.match_indices(name).find_map(|(at, _)| {
        let alone = text[..at].ends_with(|before: char| before.is_whitespace());
        text[at + name.len()..].trim_start().strip_prefix('=').filter(|_| alone)
    })?;
    let mut chars = begin.trim_start().strip_prefix('"')?.chars();
    let mut value = String::new();
    loop {
        value.push(match chars.next()? {
            '"' => return Some(value),
            '\\' => match chars.next()? {
                'a' => '\x07',
                'b' => '\x08',
                't' => '\t',
                'n' => '\n',
                'v' => '\x0b',
                'f' => '\x0c',
                'r' => '\r',
                // Up to 0377.
                first @ '0'..='7' => {
                    let mut number = first as u32 - '0' as u32;
                    for _ in 0..if first <= '3' { 2 } else { 1 } {
                        let rest = chars.as_str();
                        let Some(digit @ b'0'..=b'7') = rest.bytes().next() else { break };
                        number = number * 8 + u32::from(digit - b'0');
                        chars = rest[1..].chars();
                    }
                    char::from_u32(number)?
                }
                c => c,
            },
            c => c,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn login(text: &str) -> (String, String) {
        let login = Properties::parse(text).unwrap().login().unwrap();
        (login.user, login.password)
    }

    #[test]
    fn names_of_librdkafka_and_of_kafkas_tools_are_equivalent() {
        let wanted = ("alice".to_owned(), "a=\"b, c".to_owned());
        let rdkafka =
            "# comment\nsasl.mechanisms=PLAIN\nsasl.username = alice\nsasl.password=a=\"b, c\n";
        assert_eq!(login(rdkafka), wanted);
        let kafka = "client.id=x\nsasl.mechanism=SCRAM-SHA-256\n\
             sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required \\\n\
             username=\"alice\" password=\"a=\\\\\"b, c\";\n";
        assert_eq!(login(kafka), wanted);
    }

    /// Unescaped as a property file first, then as JAAS.
    #[test]
    fn a_password_is_unescaped_as_by_java() {
        for (written, password) in [
            (r"a\\\\b", "a\\b"),
            (r"a\\b", "a\x08"),
            (r"a\\nb\\101\\4567", "a\nbA%67"),
            (r#"a\\"b"#, "a\"b"),
            (r"a\u0042", "aB"),
        ] {
            let text = format!(
                "sasl.mechanism=PLAIN\nsasl.jaas.config=x required username=\"u\" \
                 password=\"{written}\";"
            );
            assert_eq!(login(&text), ("u".to_owned(), password.to_owned()), "{written}");
        }
    }

    #[test]
    fn a_token_is_read_from_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a token");
        let module = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLogin";
        let text = format!(
            "sasl.mechanism=OAUTHBEARER\n\
             sasl.login.callback.handler.class={module}CallbackHandler\n\
             sasl.jaas.config={module}Module required;\nsasl.oauthbearer.token.endpoint.url={}\n",
            Url::from_file_path(&file).unwrap()
        );
        let token = || Properties::parse(&text).unwrap().login().map(|login| login.password);
        assert!(token().unwrap_err().contains("a token"), "there is no such file");
        for (content, good) in
            [("aa.b-_.cc==\n", true), ("", false), ("a b", false), ("a\x01b", false)]
        {
            std::fs::write(&file, content).unwrap();
            let wanted = match good {
                true => Ok(content.trim().to_owned()),
                false => Err(format!("{} contains no token", file.display())),
            };
            assert_eq!(token(), wanted);
        }
    }

    #[test]
    fn properties_that_would_have_no_effect_are_refused() {
        let no_file = "security.protocol=SSL\nssl.ca.location=/there/is/none";
        let https = "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=OAUTHBEARER\n\
             sasl.oauthbearer.token.endpoint.url=https://there/token";
        let handler = "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=OAUTHBEARER\n\
             sasl.login.callback.handler.class=x.Mine";
        let unused = "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\nsasl.username=a\n\
             sasl.password=b\nsasl.oauthbearer.token.endpoint.url=file:///token";
        for (text, word) in [
            ("security.protocol=TLS", "SASL_SSL"),
            ("sasl.password=\\u00", "sasl.password contains"),
            ("security.protocol=SSL\nssl.endpoint.identification.algorithm=", "not supported"),
            ("sasl.username=a", "PLAINTEXT"),
            ("security.protocol=SASL_PLAINTEXT", "sasl.mechanism"),
            ("security.protocol=SASL_PLAINTEXT\nsasl.mechanism=GSSAPI", "SCRAM-SHA-512"),
            ("security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN", "sasl.username"),
            ("security.protocol=SASL_SSL\nsasl.mechanism=OAUTHBEARER", "endpoint.url"),
            (https, "file:///"),
            (handler, "x.Mine"),
            (unused, "PLAIN"),
            ("security.protocol=SSL\nssl.truststore.type=JKS", "PEM"),
            (no_file, "/there/is/none"),
        ] {
            let refused = Properties::parse(text).and_then(|properties| properties.access());
            let message = refused.err().expect(text);
            assert!(message.contains(word), "{message}");
        }
    }
}
