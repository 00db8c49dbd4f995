//! A token issuer: serves its keys and tokens over HTTPS.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};

use super::password;
use crate::Error;
use crate::web::{Answer, Authority, Request, WebServer};

pub(super) const NAME: &str = "https://issuer.test";
pub(super) const AUDIENCE: &str = "kafka";
const LIFETIME_SECONDS: i64 = 3600;

/// A key of the issuer, or of an impostor.
pub(super) struct Signer {
    key: EcdsaKeyPair,
    random: SystemRandom,
    /// The tokens that its endpoint has issued.
    given: Mutex<Vec<String>>,
}

impl Signer {
    pub(super) fn new() -> Result<Self, Error> {
        let (random, algorithm) = (SystemRandom::new(), &ECDSA_P256_SHA256_FIXED_SIGNING);
        let pkcs8 =
            EcdsaKeyPair::generate_pkcs8(algorithm, &random).map_err(|_| "no random numbers")?;
        let key = EcdsaKeyPair::from_pkcs8(algorithm, pkcs8.as_ref(), &random)
            .map_err(|error| error.to_string())?;
        Ok(Self { key, random, given: Mutex::default() })
    }

    /// The JWKS document with its public key.
    pub(super) fn jwks(&self) -> String {
        // An uncompressed point: a byte, x and y.
        let point = self.key.public_key().as_ref();
        let [x, y] = [&point[1..33], &point[33..]].map(|part| URL_SAFE_NO_PAD.encode(part));
        format!(
            r#"{{"keys":[{{"kty":"EC","crv":"P-256","kid":"1","use":"sig","x":"{x}","y":"{y}"}}]}}"#
        )
    }

    /// Signs a token that expires after this many seconds.
    pub(super) fn token(&self, user: &str, seconds: i64) -> Result<String, Error> {
        let now = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs())?;
        let (issued, expires) = (now.min(now + seconds) - 1, now + seconds);
        let claims = format!(
            r#"{{"iss":"{NAME}","aud":"{AUDIENCE}","sub":"{user}","scope":"kafka",
            "iat":{issued},"exp":{expires}}}"#
        );
        let header = URL_SAFE_NO_PAD.encode(r#"{"alg":"ES256","kid":"1","typ":"JWT"}"#);
        let signed = format!("{header}.{}", URL_SAFE_NO_PAD.encode(claims));
        let signature = self.key.sign(&self.random, signed.as_bytes());
        let signature = signature.map_err(|_| "no random numbers")?;
        Ok(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }
}

/// Listens on loopback until it is dropped.
pub(super) struct Issuer {
    pub(super) signer: Arc<Signer>,
    server: WebServer,
}

impl Issuer {
    pub(super) fn start(authority: &Authority) -> Result<Self, Error> {
        let signer = Arc::new(Signer::new()?);
        let answering = signer.clone();
        let server = WebServer::start(Some(authority), move |request| answering.answer(request))?;
        Ok(Self { signer, server })
    }

    pub(super) fn jwks_url(&self) -> String {
        format!("{}/jwks", self.server.url())
    }

    /// The tokens that clients have received so far.
    pub(super) fn given(&self) -> Vec<String> {
        self.signer.given.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The URL where clients get tokens for their credentials (RFC 6749, section 4.4).
    pub(super) fn token_url(&self) -> String {
        format!("{}/token", self.server.url())
    }
}

impl Signer {
    fn answer(&self, request: &Request) -> Answer {
        match (request.method.as_str(), request.target.as_str()) {
            ("GET", "/jwks") => ("200 OK", self.jwks()),
            ("POST", "/token") => {
                let token = user(request).and_then(|user| self.token(&user, LIFETIME_SECONDS).ok());
                match token {
                    Some(token) => {
                        let answer = format!(
                            r#"{{"access_token":"{token}","token_type":"Bearer",
                            "expires_in":{LIFETIME_SECONDS}}}"#
                        );
                        self.given.lock().unwrap_or_else(PoisonError::into_inner).push(token);
                        ("200 OK", answer)
                    }
                    None => ("401 Unauthorized", r#"{"error":"invalid_client"}"#.into()),
                }
            }
            _ => ("404 Not Found", String::new()),
        }
    }
}

/// Returns the user who requests a token, if the password is right.
fn user(request: &Request) -> Option<String> {
    let shown = STANDARD.decode(request.header("authorization")?.strip_prefix("Basic ")?).ok()?;
    let (user, shown) = std::str::from_utf8(&shown).ok()?.split_once(':')?;
    (shown == password(user)).then(|| user.to_owned())
}
