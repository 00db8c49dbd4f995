//! Listeners, TLS, SASL and ACLs from the client's side.

mod limits;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::*;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::harness::{Client, HANG, TestServer, produce_to, text};
use crate::security::{Credential, Hash, MAX_CREDENTIALS, UserError, issuer, scram_client};
use crate::{ClientCertificates, ListenerConfig, Mechanism, TlsConfig};

/// A certificate authority, and the files that a server reads.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    der: CertificateDer<'static>,
    dir: TempDir,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "an authority");
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let this = Self {
            pem: certificate.pem(),
            der: certificate.der().clone(),
            issuer: Issuer::new(params, key),
            dir: tempfile::tempdir().unwrap(),
        };
        std::fs::write(this.file("ca.pem"), &this.pem).unwrap();
        this.renew();
        this
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes another certificate and key for the server.
    fn renew(&self) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".into()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        // Both in one file, so that they match at every moment.
        let both = self.file("next.pem");
        std::fs::write(&both, certificate.pem() + &key.serialize_pem()).unwrap();
        std::fs::rename(&both, self.file("server.pem")).unwrap();
    }

    fn listener(&self, name: &str) -> ListenerConfig {
        let mut tls = TlsConfig::new(self.file("server.pem"), self.file("server.pem"));
        tls.reload_interval = Duration::from_millis(5);
        ListenerConfig {
            name: name.into(),
            tls: Some(tls),
            ..ListenerConfig::plaintext("127.0.0.1:0".parse().unwrap())
        }
    }

    fn mutual(&self, name: &str, required: bool) -> ListenerConfig {
        let mut listener = self.listener(name);
        let tls = listener.tls.as_mut().unwrap();
        tls.clients = match required {
            true => ClientCertificates::Required(self.file("ca.pem")),
            false => ClientCertificates::Requested(self.file("ca.pem")),
        };
        tls.rules = "RULE:^CN=([a-z]*),O=here$/$1/U".parse().unwrap();
        listener
    }

    /// The client configuration with a certificate of this subject.
    fn client(
        &self,
        subject: Option<&[(DnType, &str)]>,
        valid_for: Duration,
        versions: &[&'static rustls::SupportedProtocolVersion],
    ) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(self.der.clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .unwrap()
            .with_root_certificates(roots);
        let config = match subject {
            None => builder.with_no_client_auth(),
            Some(parts) => {
                let mut params = CertificateParams::default();
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
                params.not_after = rcgen::date_time_ymd(1970, 1, 1) + now + valid_for;
                params.distinguished_name = Default::default();
                for (kind, value) in parts {
                    params.distinguished_name.push(kind.clone(), *value);
                }
                let key = KeyPair::generate().unwrap();
                let certificate = params.signed_by(&key, &self.issuer).unwrap();
                let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
                builder.with_client_auth_cert(vec![certificate.der().clone()], key).unwrap()
            }
        };
        Arc::new(config)
    }

    /// Connects, with a certificate of this subject.
    async fn connect(
        &self,
        server: &TestServer,
        listener: &str,
        subject: Option<&[(DnType, &str)]>,
        versions: &[&'static rustls::SupportedProtocolVersion],
    ) -> std::io::Result<Client<TlsStream<TcpStream>>> {
        connect_by(
            &self.client(subject, Duration::from_secs(3600), versions),
            server.addr_of(listener),
        )
        .await
    }
}

async fn connect_by(
    config: &Arc<ClientConfig>,
    addr: SocketAddr,
) -> std::io::Result<Client<TlsStream<TcpStream>>> {
    let socket = TcpStream::connect(addr).await?;
    let name = ServerName::try_from("localhost").unwrap();
    Ok(Client::over(TlsConnector::from(config.clone()).connect(name, socket).await?))
}

const BOTH: &[&rustls::SupportedProtocolVersion] = rustls::ALL_VERSIONS;

/// Whether the server still answers this client.
async fn served<S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin>(
    client: &mut Client<S>,
) -> bool {
    let request =
        super::examples::request(ApiKey::ApiVersions, 0, 1, &super::examples::World::imaginary());
    client.try_send_frame(&request).await.is_ok() && client.receive_frame().await.is_some()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_listener_announces_its_own_address() {
    let server = TestServer::with(16 << 20, |config| {
        let local = "127.0.0.1:0".parse().unwrap();
        config.listeners.push(ListenerConfig {
            name: "external".into(),
            advertised_host: Some("broker.example.org".into()),
            advertised_port: Some(19_092),
            ..ListenerConfig::plaintext(local)
        });
    })
    .await;
    let inside = server.addr();
    for (addr, host, port) in [
        (inside, "127.0.0.1", i32::from(inside.port())),
        (server.addr_of("external"), "broker.example.org", 19_092),
    ] {
        let mut client = Client::connect(addr).await;
        let metadata = client.call(12, &MetadataRequest::default()).await;
        assert_eq!((&*metadata.brokers[0].host, metadata.brokers[0].port), (host, port));
        let cluster =
            client.call(1, &DescribeClusterRequest::default().with_endpoint_type(1)).await;
        assert_eq!((&*cluster.brokers[0].host, cluster.brokers[0].port), (host, port));
        let find = FindCoordinatorRequest::default().with_coordinator_keys(vec![text("g")]);
        let found = &client.call(4, &find).await.coordinators[0];
        assert_eq!((&*found.host, found.port), (host, port));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_connection_limit_applies_to_all_listeners_together() {
    let server = TestServer::with(16 << 20, |config| {
        config.max_connections = 1;
        let local = "127.0.0.1:0".parse().unwrap();
        config
            .listeners
            .push(ListenerConfig { name: "other".into(), ..ListenerConfig::plaintext(local) });
    })
    .await;
    let mut first = server.client().await;
    assert!(served(&mut first).await);
    let mut second = Client::connect(server.addr_of("other")).await;
    assert!(!served(&mut second).await);
    drop(first);
    let freed =
        async { while !served(&mut Client::connect(server.addr_of("other")).await).await {} };
    tokio::time::timeout(HANG, freed).await.expect("the slot is not released");
}

#[tokio::test(flavor = "multi_thread")]
async fn records_can_be_produced_and_fetched_with_both_tls_versions() {
    let authority = Authority::new();
    let server =
        TestServer::with(64 << 20, |config| config.listeners.push(authority.listener("tls"))).await;
    server.topic("t", 1, &[]).await;
    let batch = crate::batch::tests::plain(&[1, 2]);
    for (n, version) in [&rustls::version::TLS12, &rustls::version::TLS13].into_iter().enumerate() {
        let mut client = authority.connect(&server, "tls", None, &[version]).await.unwrap();
        let (error, offset) = client.produce("t", 0, &batch).await;
        assert_eq!((error, offset), (0, 2 * n as i64));
        let (error, _, records) = client.fetch("t", 0, 0).await;
        assert_eq!(error, 0);
        assert_eq!(records.len(), batch.len() * (n + 1));
    }
    // A client that does not speak TLS gets no answer, and does not affect others.
    let mut plain = Client::connect(server.addr_of("tls")).await;
    assert!(!served(&mut plain).await);
    let mut client = authority.connect(&server, "tls", None, BOTH).await.unwrap();
    assert!(served(&mut client).await);
}

/// Also if more was sent than the server reads before it has answered.
#[tokio::test(flavor = "multi_thread")]
async fn a_disconnected_tls_client_does_not_hold_its_connection_during_a_disk_stall() {
    let authority = Authority::new();
    let server = TestServer::simulated_with(16 << 20, |config| {
        config.transfer_timeout = Duration::from_secs(1);
        config.listeners.push(authority.listener("tls"));
    })
    .await;
    server.topic("t", 1, &[]).await;
    server.hold_disk(true);
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let mut client = authority.connect(&server, "tls", None, &[version]).await.unwrap();
        client.send_many(&produce_to("t", 1), 150).await;
        drop(client);
        server.all_disconnected().await;
    }
    server.hold_disk(false);
}

/// Others are accepted before the silent ones time out.
#[tokio::test(flavor = "multi_thread")]
async fn silent_clients_do_not_block_tls_handshakes_of_others() {
    let authority = Authority::new();
    let server =
        TestServer::with(16 << 20, |config| config.listeners.push(authority.listener("tls"))).await;
    let mut silent = Vec::new();
    for _ in 0..200 {
        silent.push(TcpStream::connect(server.addr_of("tls")).await.unwrap());
    }
    let mut client = authority.connect(&server, "tls", None, BOTH).await.unwrap();
    assert!(served(&mut client).await);
    for socket in &silent {
        let waits = socket.try_read(&mut [0]).expect_err("it was disconnected");
        assert_eq!(waits.kind(), std::io::ErrorKind::WouldBlock);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_reloaded_and_invalid_ones_are_ignored() {
    let authority = Authority::new();
    let server =
        TestServer::with(16 << 20, |config| config.listeners.push(authority.listener("tls"))).await;
    let shown = async || {
        let client = authority.connect(&server, "tls", None, BOTH).await.unwrap();
        client.socket.get_ref().1.peer_certificates().unwrap()[0].to_vec()
    };
    let mut old = authority.connect(&server, "tls", None, BOTH).await.unwrap();
    let first = shown().await;
    for broken in ["", "no PEM", &authority.pem] {
        std::fs::write(authority.file("server.pem"), broken).unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(shown().await, first);
    }
    authority.renew();
    let renewed = async { while shown().await == first {} };
    tokio::time::timeout(HANG, renewed).await.expect("the new certificate is not used");
    assert!(served(&mut old).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn client_certificates_are_required_where_configured() {
    let authority = Authority::new();
    let server = TestServer::with(16 << 20, |config| {
        config.listeners.push(authority.mutual("must", true));
        config.listeners.push(authority.mutual("may", false));
    })
    .await;
    let alice: &[_] = &[(DnType::OrganizationName, "here"), (DnType::CommonName, "alice")];
    let nameless: &[_] = &[(DnType::CommonName, "alice")];
    let mut stranger = Authority::new();
    stranger.der = authority.der.clone();
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let comes_in = async |listener, subject| match authority
            .connect(&server, listener, subject, &[version])
            .await
        {
            Ok(mut client) => served(&mut client).await,
            Err(_) => false,
        };
        assert!(comes_in("must", Some(alice)).await);
        assert!(comes_in("may", Some(alice)).await);
        assert!(comes_in("may", None).await);
        assert!(!comes_in("must", None).await);
        // No rule maps this one to a name.
        assert!(!comes_in("may", Some(nameless)).await);
    }
    for listener in ["must", "may"] {
        if let Ok(mut client) = stranger.connect(&server, listener, Some(alice), BOTH).await {
            assert!(!served(&mut client).await);
        }
    }
}

/// A resumed TLS session would take the certificate from the previous one, without a check.
#[tokio::test(flavor = "multi_thread")]
async fn an_expired_certificate_cannot_resume_a_session() {
    let authority = Authority::new();
    let server =
        TestServer::with(16 << 20, |config| config.listeners.push(authority.mutual("must", true)))
            .await;
    let alice: &[_] = &[(DnType::OrganizationName, "here"), (DnType::CommonName, "alice")];
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let mut valid = Duration::from_secs(3);
        loop {
            let config = authority.client(Some(alice), valid, &[version]);
            let begun = Instant::now();
            let comes_in = async || match connect_by(&config, server.addr_of("must")).await {
                Ok(mut client) => served(&mut client).await,
                Err(_) => false,
            };
            let came_in = comes_in().await && comes_in().await;
            if !came_in {
                // The machine was too busy for such a short validity.
                assert!(begun.elapsed() + Duration::from_secs(1) > valid, "{version:?}");
                valid *= 2;
                continue;
            }
            tokio::time::sleep((valid + Duration::from_secs(1)).saturating_sub(begun.elapsed()))
                .await;
            assert!(!comes_in().await, "{version:?}");
            break;
        }
    }
}

/// A client that authenticates by SASL has the name given there; the certificate only has to be
/// trusted.
#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_needs_no_name_if_its_client_authenticates_by_sasl() {
    let authority = Authority::new();
    let server = with_users(|config| {
        let mut listener = authority.mutual("both", true);
        listener.sasl = vec![Mechanism::ScramSha256];
        config.listeners.push(listener);
    })
    .await;
    let nameless: &[_] = &[(DnType::OrganizationName, "elsewhere")];
    let mut client = authority.connect(&server, "both", Some(nameless), BOTH).await.unwrap();
    assert_eq!(client.scram(Hash::Sha256, "bob", "builder").await.0, 0);
    let without = authority.connect(&server, "both", None, BOTH).await;
    assert!(match without {
        Ok(mut client) => !served(&mut client).await,
        Err(_) => true,
    });
}

pub(super) fn sasl(name: &str, mechanisms: &[Mechanism]) -> ListenerConfig {
    ListenerConfig {
        name: name.into(),
        sasl: mechanisms.to_vec(),
        ..ListenerConfig::plaintext("127.0.0.1:0".parse().unwrap())
    }
}

const ALL: &[Mechanism] =
    &[Mechanism::Plain, Mechanism::ScramSha256, Mechanism::ScramSha512, Mechanism::OauthBearer];

/// The result of an attempt to authenticate: the code, the last message, the session's lifetime.
pub(super) type Outcome = (i16, Bytes, i64);

impl<S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin> Client<S> {
    pub(super) async fn handshake(&mut self, mechanism: &str) -> i16 {
        let request = SaslHandshakeRequest::default().with_mechanism(text(mechanism));
        self.call(1, &request).await.error_code
    }

    async fn token(&mut self, token: &str) -> Outcome {
        let token = Bytes::copy_from_slice(token.as_bytes());
        let request = SaslAuthenticateRequest::default().with_auth_bytes(token);
        let response = self.call(2, &request).await;
        (response.error_code, response.auth_bytes, response.session_lifetime_ms)
    }

    pub(super) async fn plain(&mut self, user: &str, password: &str) -> Outcome {
        assert_eq!(self.handshake("PLAIN").await, 0);
        self.token(&format!("\0{user}\0{password}")).await
    }

    /// The code of the response; `None` if the connection is closed instead.
    async fn try_plain(&mut self, user: &str, password: &str) -> Option<i16> {
        assert_eq!(self.handshake("PLAIN").await, 0);
        let token = format!("\0{user}\0{password}");
        let request = SaslAuthenticateRequest::default().with_auth_bytes(token.into());
        self.send(1, &request).await;
        // After the correlation id.
        let answer = self.receive_frame().await?;
        Some(i16::from_be_bytes([answer[4], answer[5]]))
    }

    async fn scram(&mut self, hash: Hash, user: &str, password: &str) -> Outcome {
        assert_eq!(self.handshake(hash.mechanism()).await, 0);
        let bare = format!("n={user},r=nonce");
        let (error, first, _) = self.token(&format!("n,,{bare}")).await;
        assert_eq!(error, 0);
        let first = std::str::from_utf8(&first).unwrap();
        let (last, answer) = scram_client::finish(hash, password, &bare, first);
        let outcome = self.token(&last).await;
        if outcome.0 == 0 {
            assert_eq!(outcome.1, answer.as_bytes());
        }
        outcome
    }

    async fn bearer(&mut self, token: &str) -> Outcome {
        assert_eq!(self.handshake("OAUTHBEARER").await, 0);
        self.token(&format!("n,,\x01auth=Bearer {token}\x01\x01")).await
    }
}

async fn with_users(configure: impl FnOnce(&mut crate::BrokerConfig)) -> TestServer {
    let server = TestServer::with(16 << 20, |config| {
        config.listeners.push(sasl("sasl", &ALL[..3]));
        configure(config);
    })
    .await;
    let users = &server.server().authentication.users;
    users.set_password("alice", "wonder=land,").await.unwrap();
    users.set_password("bob", "builder").await.unwrap();
    server
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_authenticate_with_their_passwords_after_a_restart() {
    let mut server = with_users(|_| {}).await;
    for _ in 0..2 {
        let addr = server.addr_of("sasl");
        let connect = || Client::connect(addr);
        for hash in Hash::ALL {
            let mut client = connect().await;
            assert_eq!(client.scram(hash, "alice", "wonder=land,").await.0, 0);
            assert!(served(&mut client).await);
            client.call(12, &MetadataRequest::default()).await;
            // A client whose session does not end has no reason to authenticate again.
            assert_eq!(client.handshake("PLAIN").await, ResponseError::IllegalSaslState.code());
            assert!(served(&mut client).await);
        }
        let mut client = connect().await;
        assert_eq!(client.plain("bob", "builder").await, (0, Bytes::new(), 0));
        client.call(12, &MetadataRequest::default()).await;
        for (user, password) in [("bob", "wonder=land,"), ("absent", "builder"), ("bob", "")] {
            for mechanism in 0..3 {
                let mut client = connect().await;
                let outcome = match mechanism {
                    0 => client.plain(user, password).await,
                    1 => client.scram(Hash::Sha256, user, password).await,
                    _ => client.scram(Hash::Sha512, user, password).await,
                };
                assert_eq!(
                    outcome,
                    (ResponseError::SaslAuthenticationFailed.code(), Bytes::new(), 0)
                );
                assert!(client.receive_frame().await.is_none());
            }
        }
        server.restart().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_names_a_user_for_acls() {
    let authority = Authority::new();
    let server = TestServer::with(16 << 20, |config| {
        config.listeners.push(authority.mutual("may", false));
        config.security.authorization = Some(crate::AuthorizationConfig {
            super_users: vec!["User:ALICE".into()],
            ..Default::default()
        });
    })
    .await;
    server.server().create_topic("topic", 1, Default::default(), false).await.unwrap();
    let subject =
        |name: &'static str| [(DnType::OrganizationName, "here"), (DnType::CommonName, name)];
    let (alice, bob) = (subject("alice"), subject("bob"));
    for (subject, topics) in [(Some(&alice[..]), 1), (Some(&bob[..]), 0), (None, 0)] {
        let mut client = authority.connect(&server, "may", subject, BOTH).await.unwrap();
        let all = MetadataRequest::default().with_topics(None);
        assert_eq!(client.call(12, &all).await.topics.len(), topics, "{subject:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_without_a_name_is_refused() {
    let authority = Authority::new();
    let with_rules = |name: &str, rules: &str| {
        let mut listener = authority.mutual(name, true);
        listener.tls.as_mut().unwrap().rules = rules.parse().unwrap();
        listener
    };
    let server = TestServer::with(16 << 20, |config| {
        config.listeners.push(with_rules("as-it-is", "DEFAULT"));
        config.listeners.push(with_rules("organization", "RULE:^(?:O=([a-z]*))?.*$/$1/"));
    })
    .await;
    let organization: &[_] = &[(DnType::OrganizationName, "here")];
    let name: &[_] = &[(DnType::CommonName, "alice")];
    for (listener, subject, comes_in) in [
        ("as-it-is", name, true),
        ("as-it-is", &[], false),
        ("organization", organization, true),
        ("organization", name, false),
    ] {
        // With TLS 1.3 the client's handshake completes before its certificate is checked.
        let served = match authority.connect(&server, listener, Some(subject), BOTH).await {
            Ok(mut client) => served(&mut client).await,
            Err(_) => false,
        };
        assert_eq!(served, comes_in, "{listener}: {subject:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recorded_sasl_exchange_cannot_be_replayed() {
    let server = with_users(|_| {}).await;
    let bare = "n=bob,r=nonce";
    let mut overheard = String::new();
    for attempt in 0..2 {
        let mut client = Client::connect(server.addr_of("sasl")).await;
        client.handshake("SCRAM-SHA-256").await;
        let first = client.token(&format!("n,,{bare}")).await.1;
        if attempt == 0 {
            let first = std::str::from_utf8(&first).unwrap();
            overheard = scram_client::finish(Hash::Sha256, "builder", bare, first).0;
            assert_eq!(client.token(&overheard).await.0, 0);
            // Nor on the same connection: the exchange is over.
            assert_eq!(client.token(&overheard).await.0, ResponseError::IllegalSaslState.code());
        } else {
            assert_eq!(
                client.token(&overheard).await.0,
                ResponseError::SaslAuthenticationFailed.code()
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_users_cannot_be_distinguished_from_existing_ones() {
    let mut server = with_users(|_| {}).await;
    let mut firsts = Vec::new();
    for _ in 0..2 {
        for user in ["alice", "absent"] {
            let mut client = Client::connect(server.addr_of("sasl")).await;
            client.handshake("SCRAM-SHA-256").await;
            let first = client.token(&format!("n,,n={user},r=x")).await.1;
            let first = String::from_utf8(first.to_vec()).unwrap();
            let (nonce, rest) = first.split_once(",s=").unwrap();
            firsts.push((nonce.len(), rest.len(), rest.to_owned()));
        }
        server.restart().await;
    }
    assert_eq!((firsts[0].0, firsts[0].1), (firsts[1].0, firsts[1].1));
    assert_ne!(firsts[0].2, firsts[1].2);
    // The salt of both stays the same.
    assert_eq!(firsts[..2], firsts[2..]);
}

#[tokio::test(flavor = "multi_thread")]
async fn unauthenticated_clients_are_not_served() {
    let server = with_users(|_| {}).await;
    let world = super::examples::World::imaginary();
    for api in crate::api::APIS {
        let allowed = [ApiKey::ApiVersions, ApiKey::SaslHandshake, ApiKey::SaslAuthenticate]
            .contains(&api.key);
        let mut client = Client::connect(server.addr_of("sasl")).await;
        let request = super::examples::request(api.key, api.max, 1, &world);
        client.send_frame(&request).await;
        assert_eq!(client.receive_frame().await.is_some(), allowed, "{}", api.name);
    }
    // Nor may it send much, or messages out of order, or ask for a mechanism that is not there.
    use tokio::io::AsyncWriteExt;
    let mut client = Client::connect(server.addr_of("sasl")).await;
    client.socket.write_all(&[0, 1, 0, 1]).await.unwrap();
    assert!(client.receive_frame().await.is_none());
    let mut client = Client::connect(server.addr_of("sasl")).await;
    assert_eq!(client.token("x").await.0, ResponseError::IllegalSaslState.code());
    assert!(client.receive_frame().await.is_none());
    let mut client = Client::connect(server.addr_of("sasl")).await;
    let gssapi = SaslHandshakeRequest::default().with_mechanism(text("GSSAPI"));
    let response = client.call(1, &gssapi).await;
    assert_eq!(
        (response.error_code, response.mechanisms.len()),
        (ResponseError::UnsupportedSaslMechanism.code(), 3)
    );
    assert!(client.receive_frame().await.is_none());
    let mut client = Client::connect(server.addr_of("sasl")).await;
    assert_eq!(client.handshake("PLAIN").await, 0);
    assert_eq!(client.handshake("PLAIN").await, ResponseError::IllegalSaslState.code());
}

#[tokio::test(flavor = "multi_thread")]
async fn sasl_messages_without_kafka_headers_are_accepted() {
    let server = with_users(|_| {}).await;
    let begin = SaslHandshakeRequest::default().with_mechanism(text("PLAIN"));
    let mut client = Client::connect(server.addr_of("sasl")).await;
    assert_eq!(client.call(0, &begin).await.error_code, 0);
    client.send_frame(b"\0bob\0builder").await;
    assert_eq!(client.receive_frame().await.unwrap(), Bytes::new());
    client.call(12, &MetadataRequest::default()).await;
    let mut client = Client::connect(server.addr_of("sasl")).await;
    client.call(0, &begin).await;
    client.send_frame(b"\0bob\0wrong").await;
    assert!(client.receive_frame().await.is_none());
}

/// A password that was changed for one SCRAM mechanism is the one that counts for PLAIN.
#[tokio::test(flavor = "multi_thread")]
async fn plain_accepts_the_newest_password() {
    let mut server = with_users(|_| {}).await;
    let salt = b"salt".to_vec();
    for (hash, password, old) in
        [(Hash::Sha512, "newer", "builder"), (Hash::Sha256, "newest", "newer")]
    {
        let iterations = std::num::NonZeroU32::new(4096).unwrap();
        let made = Credential::of_password(hash, password.as_bytes(), salt.clone(), iterations);
        let users = &server.server().authentication.users;
        users.change(vec![(("bob".into(), hash), Some(made))]).await.unwrap();
        for _ in 0..2 {
            let log_in = async |password: &str| {
                Client::connect(server.addr_of("sasl")).await.plain("bob", password).await.0
            };
            assert_eq!(log_in(password).await, 0);
            assert_eq!(log_in(old).await, ResponseError::SaslAuthenticationFailed.code());
            server.restart().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_accepted_and_sessions_expire() {
    let key = issuer::Issuer::new();
    let jwks = key.jwks("k");
    let server = TestServer::with(16 << 20, |config| {
        config.listeners.push(sasl("sasl", ALL));
        config.security.oauth = Some(issuer::config(jwks));
        config.security.session_lifetime = Some(Duration::from_millis(1500));
    })
    .await;
    let users = &server.server().authentication.users;
    users.set_password("alice", "a").await.unwrap();
    let token = |user: &str, expires: f64| {
        let claims = serde_json::json!({
            "iss": "https://issuer", "aud": "kafka", "sub": user, "exp": expires, "scope": "use"
        });
        key.token(&serde_json::json!({"alg": "ES256", "kid": "k"}), &claims)
    };
    let connect = async || Client::connect(server.addr_of("sasl")).await;

    let mut client = connect().await;
    assert_eq!(client.bearer(&token("carol", 1e11)).await, (0, Bytes::new(), 1500));
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(client.bearer(&token("carol", 1e11)).await.0, 0);
    client.call(12, &MetadataRequest::default()).await;
    // No mechanism changes the identity of a client.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(
        client.bearer(&token("mallory", 1e11)).await.0,
        ResponseError::SaslAuthenticationFailed.code()
    );
    assert!(client.receive_frame().await.is_none());

    let mut late = connect().await;
    assert_eq!(late.plain("alice", "a").await.2, 1500);
    tokio::time::sleep(Duration::from_millis(1600)).await;
    late.send(12, &MetadataRequest::default()).await;
    assert!(late.receive_frame().await.is_none());

    // A client that is refused receives the reason, and acknowledges it.
    let mut client = connect().await;
    let (error, reported, _) = client.bearer(&token("carol", 1.0)).await;
    assert_eq!((error, &reported[..]), (0, &br#"{"status":"invalid_token"}"#[..]));
    assert_eq!(client.token("\x01").await.0, ResponseError::SaslAuthenticationFailed.code());
    assert!(client.receive_frame().await.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn passwords_are_changed_by_clients_as_in_kafka() {
    use alter_user_scram_credentials_request::*;
    use describe_user_scram_credentials_request::UserName;
    let mut server = with_users(|_| {}).await;
    let upsertion = |name: &str, mechanism, iterations| {
        ScramCredentialUpsertion::default()
            .with_name(text(name))
            .with_mechanism(mechanism)
            .with_iterations(iterations)
            .with_salt(Bytes::from_static(b"salt"))
            .with_salted_password(Bytes::from_static(b"salted"))
    };
    let deletion = |name: &str, mechanism| {
        ScramCredentialDeletion::default().with_name(text(name)).with_mechanism(mechanism)
    };
    let mut client = server.client().await;
    for (deletions, upsertions, code) in [
        (vec![], vec![upsertion("dave", 1, 4095)], 93),
        (vec![], vec![upsertion("dave", 1, 16_385)], 93),
        (vec![], vec![upsertion("", 1, 4096)], 93),
        (vec![], vec![upsertion("dave", 3, 4096)], 33),
        (vec![deletion("dave", 1)], vec![], 91),
        (vec![deletion("bob", 1)], vec![upsertion("bob", 1, 4096)], 92),
        (vec![deletion("bob", 1)], vec![], 0),
        (vec![], vec![upsertion("dave", 1, 4096), upsertion("dave", 2, 16_384)], 0),
    ] {
        let request = AlterUserScramCredentialsRequest::default()
            .with_deletions(deletions)
            .with_upsertions(upsertions);
        let results = client.call(0, &request).await.results;
        assert_eq!(results.len(), 1);
        assert_eq!(results[0].error_code, code, "{request:?}: {results:?}");
    }
    server.restart().await;
    let mut client = server.client().await;
    let describe = |users: Option<&[&str]>| {
        let name = |name: &&str| UserName::default().with_name(text(name));
        let users = users.map(|users| users.iter().map(name).collect());
        DescribeUserScramCredentialsRequest::default().with_users(users)
    };
    let all = client.call(0, &describe(None)).await.results;
    let reported: Vec<_> = all
        .iter()
        .map(|user| {
            let infos = user.credential_infos.iter().map(|info| (info.mechanism, info.iterations));
            (&*user.user, infos.collect::<Vec<_>>())
        })
        .collect();
    assert_eq!(
        reported,
        [
            ("dave", vec![(1, 4096), (2, 16_384)]),
            ("bob", vec![(2, 4096)]),
            ("alice", vec![(1, 4096), (2, 4096)])
        ]
    );
    let some = client.call(0, &describe(Some(&["bob", "eve", "dave", "dave"]))).await.results;
    let codes: Vec<_> = some.iter().map(|user| (&*user.user, user.error_code)).collect();
    assert_eq!(
        codes,
        [
            ("dave", ResponseError::DuplicateResource.code()),
            ("bob", 0),
            ("eve", ResponseError::ResourceNotFound.code())
        ]
    );
}
