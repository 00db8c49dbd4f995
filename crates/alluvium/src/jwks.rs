//! Where the keys for OAUTHBEARER come from: a file, or an https:// URL.

use std::fs::File;
use std::io::Read;
use std::time::Duration;

use alluvium_broker::{JwksSource, OauthConfig};
use reqwest::Url;

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
        Box::pin(async move {
            let document = read(&jwks).await;
            document.map_err(|error| format!("{}: {error}", without_secrets(&jwks)))
        })
    });
    OauthConfig { keys, issuer, audience, principal_claim, scopes, clock_skew: skew }
}

/// A file as it is; of a URL neither the user nor the query, which may be what lets the server in
/// there.
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
    document.ok_or(format!("a document of keys has at most {MAX_BYTES} bytes, this one has more"))
}

/// `None`: it is too large, as one that has no end is.
fn read_file(file: &str) -> std::io::Result<Option<Vec<u8>>> {
    let mut document = Vec::new();
    File::open(file)?.take(MAX_BYTES as u64 + 1).read_to_end(&mut document)?;
    Ok((document.len() <= MAX_BYTES).then_some(document))
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

#[cfg(test)]
mod tests {
    use super::*;

    /// They are logged whenever the document cannot be read.
    #[tokio::test]
    async fn errors_tell_no_secret_of_the_url() {
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = closed.local_addr().unwrap();
        drop(closed);
        for jwks in [
            format!("https://me:SECRET@{address}/jwks?key=SECRET"),
            format!("https://me:SECRET@{address}:1/jwks?key=SECRET"),
        ] {
            let error = read(&jwks).await.unwrap_err();
            let told = format!("{}: {error}", without_secrets(&jwks));
            assert!(!told.contains("SECRET"), "{told}");
        }
        assert_eq!(without_secrets("https://me:SECRET@a:8/b?c=SECRET#d"), "https://a:8/b");
        assert_eq!(without_secrets("/etc/jwks?"), "/etc/jwks?");
    }

    #[tokio::test]
    async fn a_file_that_is_too_large_or_has_no_end_is_refused() {
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
