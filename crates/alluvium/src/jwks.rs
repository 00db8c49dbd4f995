//! The source of the keys for OAUTHBEARER: a file, or an https:// URL.

use std::fs::File;
use std::io::Read;
use std::time::Duration;

use alluvium_broker::{JwksSource, OauthConfig};
use reqwest::Url;

use crate::config::Oauth;
use crate::units::Span;

/// Maximum size of the key document; real ones are far smaller.
const MAX_BYTES: usize = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) fn broker_config(config: &Oauth) -> OauthConfig {
    let Oauth { jwks, issuer, audience, scopes, principal_claim, clock_skew: Span(skew) } =
        config.clone();
    let keys = JwksSource::new(move || {
        let jwks = jwks.clone();
        Box::pin(async move {
            let document = read(&jwks).await;
            document.map_err(|error| format!("{}: {error}", without_secrets(&jwks)))
        })
    });
    OauthConfig { keys, issuer, audience, principal_claim, scopes, clock_skew: skew }
}

/// Formats the source for messages: a file as it is; a URL without user and query, which may
/// contain credentials.
fn without_secrets(jwks: &str) -> String {
    if !jwks.starts_with("https://") {
        return jwks.to_owned();
    }
    match Url::parse(jwks) {
        Ok(url) => format!("{}{}", url.origin().ascii_serialization(), url.path()),
        Err(error) => format!("the https:// URL ({error})"),
    }
}

async fn read(jwks: &str) -> Result<Vec<u8>, String> {
    let document = if jwks.starts_with("https://") {
        fetch(jwks).await.map_err(|error| error.without_url().to_string())?
    } else {
        let file = jwks.to_owned();
        let read = tokio::task::spawn_blocking(move || read_file(&file)).await;
        read.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?
    };
    document.ok_or(format!("the key document must have at most {MAX_BYTES} bytes, but is larger"))
}

/// Returns `None` if the file is too large, or endless.
fn read_file(file: &str) -> std::io::Result<Option<Vec<u8>>> {
    let mut document = Vec::new();
    File::open(file)?.take(MAX_BYTES as u64 + 1).read_to_end(&mut document)?;
    Ok((document.len() <= MAX_BYTES).then_some(document))
}

/// Returns `None` if the document is too large.
async fn fetch(url: &str) -> Result<Option<Vec<u8>>, reqwest::Error> {
    // Fails if the object store has installed it already.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The errors are logged whenever the document cannot be read.
    #[tokio::test]
    async fn errors_contain_no_secret_of_the_url() {
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = closed.local_addr().unwrap();
        drop(closed);
        for jwks in [
            format!("https://me:SECRET@{address}/jwks?key=SECRET"),
            format!("https://me:SECRET@{address}:1/jwks?key=SECRET"),
        ] {
            let error = read(&jwks).await.unwrap_err();
            let message = format!("{}: {error}", without_secrets(&jwks));
            assert!(!message.contains("SECRET"), "{message}");
        }
        assert_eq!(without_secrets("https://me:SECRET@a:8/b?c=SECRET#d"), "https://a:8/b");
        assert_eq!(without_secrets("/etc/jwks?"), "/etc/jwks?");
    }

    #[tokio::test]
    async fn too_large_and_endless_files_are_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        file.as_file().set_len(MAX_BYTES as u64).unwrap();
        assert_eq!(read(path).await.unwrap().len(), MAX_BYTES);
        file.as_file().set_len(MAX_BYTES as u64 + 1).unwrap();
        assert!(read(path).await.unwrap_err().contains("at most 1048576 bytes"));
        assert!(read("/dev/zero").await.unwrap_err().contains("at most 1048576 bytes"));
        assert!(read("/no such file").await.unwrap_err().contains("No such file"));
    }
}
