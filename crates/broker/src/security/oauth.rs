//! OAUTHBEARER (RFC 7628): tokens that are JWTs, signed by a key of a JWKS document.
//!
//! A token's signature (RS, PS and ES with SHA-2, EdDSA; never `none`, never a shared secret),
//! issuer, audience, `exp`, `nbf` and the required scopes are verified.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64URL;
use futures::future::BoxFuture;
use parking_lot::RwLock;
use ring::signature::{self, RsaPublicKeyComponents, UnparsedPublicKey};
use serde::Deserialize;
use serde_json::Value;

/// The interval at which the keys are read again; they are also read when a token names an unknown
/// key.
const REFRESH: Duration = Duration::from_secs(300);
/// The shortest time between two reads.
const LEAST_REFRESH: Duration = Duration::from_secs(10);
/// The greatest number of keys in a document.
const MAX_KEYS: usize = 256;

/// The source of the keys: a file or a URL. Each call reads it and returns at most 1 MiB.
#[derive(Clone)]
pub struct JwksSource(Arc<dyn Fn() -> BoxFuture<'static, Result<Vec<u8>, String>> + Send + Sync>);

impl JwksSource {
    /// Creates a source that reads with `read`.
    pub fn new(
        read: impl Fn() -> BoxFuture<'static, Result<Vec<u8>, String>> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(read))
    }
}

impl fmt::Debug for JwksSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JwksSource")
    }
}

/// The conditions for accepting a token.
#[derive(Clone, Debug)]
pub struct OauthConfig {
    /// The keys that tokens are signed with.
    pub keys: JwksSource,
    /// The required issuer (`iss`).
    pub issuer: String,
    /// The required entry of the audience (`aud`).
    pub audience: String,
    /// The claim with the user's name. Default `sub`.
    pub principal_claim: String,
    /// The required scopes, in `scope` (text) or `scp` (array). Default none.
    pub scopes: Vec<String>,
    /// The tolerated difference of the clocks. Default 30 s, at most 1 h.
    pub clock_skew: Duration,
}

/// A key of the document.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Jwk {
    kty: String,
    kid: Option<String>,
    alg: Option<String>,
    #[serde(rename = "use")]
    usage: Option<String>,
    crv: Option<String>,
    n: Option<String>,
    e: Option<String>,
    x: Option<String>,
    y: Option<String>,
}

#[derive(Deserialize)]
struct Jwks {
    keys: Vec<Value>,
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    /// Critical extensions, none of which is supported.
    crit: Option<Value>,
}

/// An accepted token.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Accepted {
    pub(crate) user: String,
    /// The time until the token expires.
    pub(crate) lifetime: Duration,
}

/// Verifies tokens.
pub(crate) struct Oauth {
    config: OauthConfig,
    keys: RwLock<Arc<Vec<Jwk>>>,
    /// When the keys were last read successfully.
    loaded: tokio::sync::Mutex<Option<Instant>>,
}

impl Oauth {
    pub(crate) fn new(config: OauthConfig) -> Self {
        Self { config, keys: RwLock::default(), loaded: Default::default() }
    }

    /// Reads the keys, unless that was done within `unless_within`.
    ///
    /// The read may take as long as the other side likes. Meanwhile callers that have keys
    /// (`has_keys`) continue with them: else a client with tokens of unknown keys could make all
    /// others wait.
    async fn load(&self, unless_within: Duration, has_keys: bool) {
        let mut loaded = match self.loaded.try_lock() {
            Ok(loaded) => loaded,
            Err(_) if has_keys => return,
            Err(_) => self.loaded.lock().await,
        };
        if loaded.is_some_and(|at| at.elapsed() < unless_within) {
            return;
        }
        *loaded = Some(Instant::now());
        let read = tokio::time::timeout(LEAST_REFRESH, (self.config.keys.0)()).await;
        match read.unwrap_or_else(|_| Err("timed out".into())).and_then(|text| parse_keys(&text)) {
            Ok(keys) => *self.keys.write() = Arc::new(keys),
            Err(error) => {
                tracing::warn!(
                    "the keys for OAUTHBEARER cannot be read, the previous ones stay in use: \
                     {error}"
                );
            }
        }
    }

    /// Verifies a token. The reason for a refusal contains nothing of the token.
    pub(crate) async fn verify(&self, token: &str) -> Result<Accepted, &'static str> {
        let has_keys = !self.keys.read().is_empty();
        self.load(REFRESH, has_keys).await;
        let unix_now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let unix_now = unix_now.map_or(0, |now| now.as_secs());
        let keys = self.keys.read().clone();
        let verified = check(&self.config, &keys, token, unix_now);
        if verified != Err(UNKNOWN_KEY) {
            return verified;
        }
        self.load(LEAST_REFRESH, false).await;
        let keys = self.keys.read().clone();
        check(&self.config, &keys, token, unix_now)
    }
}

const UNKNOWN_KEY: &str = "no key matches it";

fn parse_keys(text: &[u8]) -> Result<Vec<Jwk>, String> {
    let Jwks { keys } = serde_json::from_slice(text)
        .map_err(|_| "it is not a JSON document with an array `keys`".to_string())?;
    if keys.len() > MAX_KEYS {
        return Err(format!("it has {} keys, the limit is {MAX_KEYS}", keys.len()));
    }
    // An unsupported key may be meant for other servers.
    Ok(keys.into_iter().filter_map(|key| serde_json::from_value(key).ok()).collect())
}

/// Checks a token at `unix_now`, in seconds since 1970.
fn check(
    config: &OauthConfig,
    keys: &[Jwk],
    token: &str,
    unix_now: u64,
) -> Result<Accepted, &'static str> {
    const NO_JWT: &str = "it is not a JWT";
    let (signed, signature) = token.rsplit_once('.').ok_or(NO_JWT)?;
    let (header, claims) = signed.split_once('.').ok_or(NO_JWT)?;
    let decode = |text: &str| BASE64URL.decode(text).map_err(|_| NO_JWT);
    let header: Header = serde_json::from_slice(&decode(header)?).map_err(|_| NO_JWT)?;
    if header.crit.is_some() {
        return Err("it has critical extensions");
    }
    let signature = decode(signature)?;
    let fits = |key: &&Jwk| match (&header.kid, &key.kid) {
        (Some(wanted), Some(kid)) => wanted == kid,
        (Some(_), None) => false,
        (None, _) => true,
    };
    let mut candidates = keys.iter().filter(fits).peekable();
    candidates.peek().ok_or(UNKNOWN_KEY)?;
    if !candidates.any(|key| key.verifies(&header.alg, signed.as_bytes(), &signature)) {
        return Err("its signature is wrong");
    }

    let claims: Value = serde_json::from_slice(&decode(claims)?).map_err(|_| NO_JWT)?;
    if claims["iss"].as_str() != Some(&config.issuer) {
        return Err("it has another issuer");
    }
    if !texts(&claims["aud"]).any(|audience| audience == config.audience) {
        return Err("it is meant for another audience");
    }
    // Fractions of seconds are valid.
    let seconds = |claim: &str| claims[claim].as_f64().filter(|at| *at >= 0.0).map(|at| at as u64);
    let skew = config.clock_skew.as_secs();
    let expires = seconds("exp").ok_or("it has no expiry")?;
    if expires.saturating_add(skew) <= unix_now {
        return Err("it has expired");
    }
    if !claims["nbf"].is_null()
        && seconds("nbf").is_none_or(|begin| begin > unix_now.saturating_add(skew))
    {
        return Err("it is not valid yet");
    }
    let scope = claims["scope"].as_str().unwrap_or_default();
    let has = |wanted: &String| {
        scope.split(' ').any(|scope| scope == wanted)
            || texts(&claims["scope"]).chain(texts(&claims["scp"])).any(|scope| scope == wanted)
    };
    if !config.scopes.iter().all(has) {
        return Err("it lacks a scope");
    }
    let user = claims[&config.principal_claim].as_str().unwrap_or_default();
    super::users::check_name(user).map_err(|_| "it does not name a user")?;
    // A token that expires within the skew is valid for a moment at least; the longest lifetime is
    // a year.
    let lifetime = expires.saturating_add(skew).saturating_sub(unix_now).clamp(1, 365 * 86_400);
    Ok(Accepted { user: user.into(), lifetime: Duration::from_secs(lifetime) })
}

/// A string, or the strings of an array.
fn texts(value: &Value) -> impl Iterator<Item = &str> {
    let one = value.as_str();
    let several = value.as_array().into_iter().flatten().filter_map(Value::as_str);
    one.into_iter().chain(several)
}

impl Jwk {
    fn verifies(&self, alg: &str, message: &[u8], signature: &[u8]) -> bool {
        let meant_for_it = self.alg.as_deref().is_none_or(|own| own == alg)
            && self.usage.as_deref().is_none_or(|usage| usage == "sig");
        let part = |part: &Option<String>| BASE64URL.decode(part.as_deref()?).ok();
        if !meant_for_it {
            return false;
        }
        let verified = match self.kty.as_str() {
            "RSA" => (|| {
                let parameters = match alg {
                    "RS256" => &signature::RSA_PKCS1_2048_8192_SHA256,
                    "RS384" => &signature::RSA_PKCS1_2048_8192_SHA384,
                    "RS512" => &signature::RSA_PKCS1_2048_8192_SHA512,
                    "PS256" => &signature::RSA_PSS_2048_8192_SHA256,
                    "PS384" => &signature::RSA_PSS_2048_8192_SHA384,
                    "PS512" => &signature::RSA_PSS_2048_8192_SHA512,
                    _ => return None,
                };
                let key = RsaPublicKeyComponents { n: part(&self.n)?, e: part(&self.e)? };
                key.verify(parameters, message, signature).ok()
            })(),
            "EC" => (|| {
                let (algorithm, len): (&dyn signature::VerificationAlgorithm, _) =
                    match (alg, self.crv.as_deref()?) {
                        ("ES256", "P-256") => (&signature::ECDSA_P256_SHA256_FIXED, 32),
                        ("ES384", "P-384") => (&signature::ECDSA_P384_SHA384_FIXED, 48),
                        _ => return None,
                    };
                let (x, y) = (part(&self.x)?, part(&self.y)?);
                if x.len() != len || y.len() != len {
                    return None;
                }
                let point = [&[4], x.as_slice(), y.as_slice()].concat();
                UnparsedPublicKey::new(algorithm, point).verify(message, signature).ok()
            })(),
            "OKP" if alg == "EdDSA" && self.crv.as_deref() == Some("Ed25519") => (|| {
                let key = UnparsedPublicKey::new(&signature::ED25519, part(&self.x)?);
                key.verify(message, signature).ok()
            })(),
            _ => None,
        };
        verified.is_some()
    }
}

/// Extracts the token from the client's first message. `None` if it is not such a message, or names
/// another user to act as: that user would not be authenticated yet.
pub(crate) fn token(message: &[u8]) -> Option<&str> {
    let message = std::str::from_utf8(message).ok()?;
    let (header, pairs) = message.split_once('\x01')?;
    if header != "n,," && header != "y,," {
        return None;
    }
    let token = pairs.split('\x01').find_map(|pair| pair.strip_prefix("auth="))?;
    let (scheme, token) = token.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
}

/// Tokens for tests.
#[cfg(test)]
pub(crate) mod issuer {
    use ring::rand::SystemRandom;
    use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};

    use super::*;

    pub(crate) struct Issuer(EcdsaKeyPair);

    impl Issuer {
        pub(crate) fn new() -> Self {
            let random = SystemRandom::new();
            let algorithm = &ECDSA_P256_SHA256_FIXED_SIGNING;
            let pkcs8 = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap();
            Self(EcdsaKeyPair::from_pkcs8(algorithm, pkcs8.as_ref(), &random).unwrap())
        }

        pub(crate) fn jwks(&self, kid: &str) -> Vec<u8> {
            let point = self.0.public_key().as_ref();
            let [x, y] = [&point[1..33], &point[33..]].map(|part| BASE64URL.encode(part));
            let key = serde_json::json!({"kty": "EC", "crv": "P-256", "kid": kid, "x": x, "y": y});
            serde_json::json!({"keys": [key, {"kty": 7}, {"kty": "oct", "k": "AA"}]})
                .to_string()
                .into_bytes()
        }

        pub(crate) fn token(&self, header: &Value, claims: &Value) -> String {
            let [header, claims] = [header, claims].map(|part| BASE64URL.encode(part.to_string()));
            let signed = format!("{header}.{claims}");
            let signature = self.0.sign(&SystemRandom::new(), signed.as_bytes()).unwrap();
            format!("{signed}.{}", BASE64URL.encode(signature))
        }
    }

    pub(crate) fn config(keys: Vec<u8>) -> OauthConfig {
        OauthConfig {
            keys: JwksSource::new(move || {
                let keys = keys.clone();
                Box::pin(async { Ok(keys) })
            }),
            issuer: "https://issuer".into(),
            audience: "kafka".into(),
            principal_claim: "sub".into(),
            scopes: vec!["use".into()],
            clock_skew: Duration::from_secs(30),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::issuer::Issuer;
    use super::*;

    #[test]
    fn a_token_is_accepted_only_if_all_of_it_is_valid() {
        let issuer = Issuer::new();
        let config = issuer::config(vec![]);
        let keys = parse_keys(&issuer.jwks("k")).unwrap();
        let header = json!({"alg": "ES256", "kid": "k"});
        let good = json!({
            "iss": "https://issuer", "aud": ["x", "kafka"], "sub": "alice", "exp": 1100,
            "scope": "see use",
        });
        let now = 1000;
        let taken = |header: &Value, claims: &Value| {
            check(&config, &keys, &issuer.token(header, claims), now)
        };
        let accepted = Accepted { user: "alice".into(), lifetime: Duration::from_secs(130) };
        assert_eq!(taken(&header, &good), Ok(accepted));
        assert!(taken(&json!({"alg": "ES256"}), &good).is_ok());
        for (claim, right) in [("aud", json!("kafka")), ("exp", json!(971.5)), ("nbf", json!(1030))]
        {
            let mut claims = good.clone();
            claims[claim] = right;
            assert!(taken(&header, &claims).is_ok(), "{claims}");
        }
        for (claim, wrong) in [
            ("iss", json!("https://other")),
            ("iss", json!(null)),
            ("aud", json!("other")),
            ("aud", json!(["kafk"])),
            ("sub", json!("")),
            ("sub", json!(7)),
            ("exp", json!(970)),
            ("exp", json!("1100")),
            ("exp", json!(-1)),
            ("nbf", json!(1031)),
            ("nbf", json!("0")),
            ("scope", json!("user")),
            ("scope", json!(null)),
        ] {
            let mut claims = good.clone();
            claims[claim] = wrong;
            assert!(taken(&header, &claims).is_err(), "{claims}");
        }
        for header in [
            json!({"alg": "none", "kid": "k"}),
            json!({"alg": "HS256", "kid": "k"}),
            json!({"alg": "ES384", "kid": "k"}),
            json!({"alg": "ES256", "kid": "k", "crit": ["x"]}),
            json!({"kid": "k"}),
        ] {
            assert!(taken(&header, &good).is_err(), "{header}");
        }
        assert_eq!(taken(&json!({"alg": "ES256", "kid": "l"}), &good), Err(UNKNOWN_KEY));

        let token = issuer.token(&header, &good);
        let other = Issuer::new().token(&header, &good);
        let unsigned = format!("{}.", token.rsplit_once('.').unwrap().0);
        for wrong in ["", ".", "..", "a.b.c", &other, &unsigned, &format!("{token}A"), &token[1..]]
        {
            assert!(check(&config, &keys, wrong, now).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_token_is_found_in_the_first_message() {
        assert_eq!(token(b"n,,\x01auth=Bearer a.b.c\x01\x01"), Some("a.b.c"));
        assert_eq!(token(b"n,,\x01x=y\x01auth=bearer a.b.c\x01\x01"), Some("a.b.c"));
        for wrong in [
            "",
            "n,,",
            "n,,\x01\x01",
            "p=x,,\x01auth=Bearer a\x01\x01",
            "n,,\x01auth=Basic a\x01\x01",
            "n,a=b,\x01auth=Bearer a\x01\x01",
        ] {
            assert_eq!(token(wrong.as_bytes()), None, "{wrong:?}");
        }
    }

    #[tokio::test]
    async fn an_unknown_key_causes_a_reload() {
        let issuer = Arc::new(Issuer::new());
        let reads = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let (counted, keys) = (reads.clone(), issuer.clone());
        let mut config = issuer::config(vec![]);
        config.keys = JwksSource::new(move || {
            let n = counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let keys = keys.jwks(if n == 0 { "old" } else { "new" });
            Box::pin(async { Ok(keys) })
        });
        let oauth = Oauth::new(config);
        let claims = json!({
            "iss": "https://issuer", "aud": "kafka", "sub": "a", "exp": 1e12, "scope": "use",
        });
        let token = issuer.token(&json!({"alg": "ES256", "kid": "new"}), &claims);
        // The keys were just read, so they are not read again.
        assert_eq!(oauth.verify(&token).await, Err(UNKNOWN_KEY));
        assert_eq!(reads.load(std::sync::atomic::Ordering::Relaxed), 1);
        *oauth.loaded.lock().await = Instant::now().checked_sub(LEAST_REFRESH);
        assert_eq!(oauth.verify(&token).await.unwrap().user, "a");
    }

    #[tokio::test]
    async fn unknown_keys_do_not_block_other_clients() {
        let issuer = Arc::new(Issuer::new());
        let reading = Arc::new(tokio::sync::Notify::new());
        let (notify, keys) = (reading.clone(), issuer.clone());
        let first = std::sync::atomic::AtomicBool::new(true);
        let mut config = issuer::config(vec![]);
        config.keys = JwksSource::new(move || {
            if first.swap(false, std::sync::atomic::Ordering::Relaxed) {
                let keys = keys.jwks("known");
                return Box::pin(async { Ok(keys) });
            }
            // The other side does not respond any more.
            let notify = notify.clone();
            Box::pin(async move {
                notify.notify_one();
                std::future::pending().await
            })
        });
        let oauth = Arc::new(Oauth::new(config));
        let claims = json!({
            "iss": "https://issuer", "aud": "kafka", "sub": "a", "exp": 1e12, "scope": "use",
        });
        let token = |kid| issuer.token(&json!({"alg": "ES256", "kid": kid}), &claims);
        assert!(oauth.verify(&token("known")).await.is_ok());
        *oauth.loaded.lock().await = Instant::now().checked_sub(LEAST_REFRESH);
        let (attacked, unknown) = (oauth.clone(), token("unknown"));
        let attack = tokio::spawn(async move { attacked.verify(&unknown).await });
        reading.notified().await;
        let known = futures::FutureExt::now_or_never(oauth.verify(&token("known")));
        assert!(known.expect("it waits for the keys").is_ok());
        attack.abort();
    }
}
