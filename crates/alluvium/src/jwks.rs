//! Where the keys for OAUTHBEARER come from: a file, or an https:// URL.

use std::time::Duration;

use alluvium_broker::{JwksSource, OauthConfig};

use crate::config::Oauth;
use crate::units::Span;

/// The document of keys is far smaller.
const MAX_BYTES: usize = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) fn broker_config(config: &Oauth) -> OauthConfig {
    let Oauth { jwks, issuer, audience, scopes, principal_claim, clock_skew: Span(skew) } =
        config.clone();
    let keys = JwksSource::new(move || {
        let jwks = jwks.clone();
        Box::pin(async move { read(&jwks).await.map_err(|error| format!("{jwks}: {error}")) })
    });
    OauthConfig { keys, issuer, audience, principal_claim, scopes, clock_skew: skew }
}

async fn read(jwks: &str) -> Result<Vec<u8>, String> {
    if !jwks.starts_with("https://") {
        let file = jwks.to_owned();
        let read = tokio::task::spawn_blocking(move || std::fs::read(file)).await;
        return read.map_err(|e| e.to_string())?.map_err(|e| e.to_string());
    }
    fetch(jwks)
        .await
        .map_err(|error| error.to_string())?
        .ok_or(format!("more than {MAX_BYTES} bytes"))
}

/// `None`: it is too large.
async fn fetch(url: &str) -> Result<Option<Vec<u8>>, reqwest::Error> {
    // It is there already, if the object store has needed it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::builder().timeout(TIMEOUT).https_only(true).build()?;
    let mut answer = client.get(url).send().await?.error_for_status()?;
    let mut document = Vec::new();
    while let Some(chunk) = answer.chunk().await? {
        document.extend_from_slice(&chunk);
        if document.len() > MAX_BYTES {
            return Ok(None);
        }
    }
    Ok(Some(document))
}
