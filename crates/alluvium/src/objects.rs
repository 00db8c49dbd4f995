//! The object store: its URL, how it is opened, and the check at the start that it is usable.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path as Location;
use object_store::prefix::PrefixStore;
use object_store::{BackoffConfig, Certificate, ClientOptions, ObjectStore, RetryConfig};
use url::{Host, Url};
use uuid::Uuid;

use crate::output::Failure;
use crate::profile::Profile;

/// Timeout of one HTTP request including its body: enough for a part of an upload at 420 KB/s.
const REQUEST: Duration = Duration::from_secs(20);
/// Timeout of a connection attempt, short because an unreachable endpoint should be reported soon.
const CONNECT: Duration = Duration::from_secs(5);
/// Total time and number of the client's own retries after a 5xx, a 429, a timeout or a broken
/// connection, with growing delays. Longer than [`REQUEST`], so that a timeout is followed by
/// another attempt, and shorter than the client's default, so that an outage is reported soon.
/// Callers have a deadline of their own (`alluvium_stream`), and uploads are retried without limit.
const RETRY: Duration = Duration::from_secs(25);
const RETRIES: usize = 10;
/// Time that a start waits for an answer of the object store before it reports that there is none.
const CHECK: Duration = Duration::from_secs(5);

/// Where objects are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ObjectStoreUrl {
    /// A local directory.
    Directory(PathBuf),
    /// Memory of the process, for trials.
    Memory,
    /// A bucket of S3 or of a compatible store.
    S3(Bucket),
}

/// A prefix in a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bucket {
    pub(crate) name: String,
    /// Without leading and trailing slashes; empty for the bucket itself.
    pub(crate) prefix: String,
    pub(crate) settings: S3Settings,
}

/// How S3 is reached. Settings that are absent come from AWS's own environment variables, then from
/// AWS's defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct S3Settings {
    pub(crate) endpoint: Option<String>,
    pub(crate) region: Option<String>,
    pub(crate) path_style: Option<bool>,
    pub(crate) allow_http: Option<bool>,
    pub(crate) ca_file: Option<PathBuf>,
}

/// Parses the ID of a store.
///
/// # Errors
/// It is not a UUID.
pub(crate) fn store_id(text: &str) -> Result<Uuid, String> {
    text.parse().map_err(|_| {
        "it must be the ID of a store, a UUID; `alluvium catalog list` shows those in an object \
         store"
            .into()
    })
}

impl ObjectStoreUrl {
    /// Parses a URL. `settings` apply to S3 only.
    pub(crate) fn parse(text: &str, settings: S3Settings) -> Result<Self, String> {
        let url = without_secrets("object-store", text, "file:///absolute/path")?;
        match url.scheme() {
            "memory" => Ok(Self::Memory),
            "file" => match url.to_file_path() {
                Ok(path) if path.is_absolute() => Ok(Self::Directory(path)),
                _ => Err(format!(
                    "object-store `{text}` does not name a local directory; write \
                     file:///absolute/path, with three slashes"
                )),
            },
            "s3" => {
                let name = url.host_str().filter(|_| url.port().is_none());
                let name = name.ok_or_else(|| {
                    format!("object-store `{text}` names no bucket; write s3://bucket/prefix")
                })?;
                settings.bucket_endpoint(name)?;
                let prefix = url.path().trim_matches('/');
                // Otherwise the objects would have other names than configured and than a policy of
                // the bucket states.
                if Location::from(prefix).as_ref() != prefix {
                    return Err(format!(
                        "object-store `{text}`: a prefix may contain only letters, digits, \
                         -_.!'() and single slashes"
                    ));
                }
                Ok(Self::S3(Bucket { name: name.into(), prefix: prefix.into(), settings }))
            }
            other => Err(format!(
                "object-store `{text}`: unknown scheme `{other}`; supported are s3://, file:// \
                 and memory://"
            )),
        }
    }
}

/// Parses a URL that will be shown and logged and therefore must not contain secrets. The error
/// does not repeat a secret.
fn without_secrets(option: &str, text: &str, example: &str) -> Result<Url, String> {
    let url = Url::parse(text).map_err(|error| match text.contains('@') {
        true => format!("{option} is not a URL ({error}); write {example}"),
        false => format!("{option} `{text}` is not a URL ({error}); write {example}"),
    })?;
    if !url.username().is_empty() || url.password().is_some() || url.query().is_some() {
        return Err(format!(
            "{option} contains a user or a query, but it is shown in logs: set credentials in the \
             environment as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use those of the \
             machine"
        ));
    }
    if url.fragment().is_some() {
        return Err(format!(
            "{option} `{text}` contains a #; in the name of a directory write %23"
        ));
    }
    Ok(url)
}

impl fmt::Display for ObjectStoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "{}", path.display()),
            Self::Memory => f.write_str("memory"),
            Self::S3(Bucket { name, prefix, settings }) => {
                write!(f, "s3://{name}")?;
                if !prefix.is_empty() {
                    write!(f, "/{prefix}")?;
                }
                match settings.endpoint() {
                    Some(endpoint) => write!(f, " at {endpoint}"),
                    None => Ok(()),
                }
            }
        }
    }
}

impl S3Settings {
    /// The endpoint from the settings, or else from the environment; `None` is AWS.
    fn endpoint(&self) -> Option<String> {
        let stated =
            || ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"].into_iter().find_map(environment);
        self.endpoint.clone().or_else(stated)
    }

    /// The URL of the bucket, if it is not at AWS: a path of the endpoint, or a subdomain of it.
    fn bucket_endpoint(&self, bucket: &str) -> Result<Option<Url>, String> {
        let Some(endpoint) = self.endpoint() else { return Ok(None) };
        let mut url = without_secrets("s3-endpoint", &endpoint, "https://s3.example.org")?;
        let plain = match url.scheme() {
            "https" => false,
            "http" => true,
            other => {
                return Err(format!(
                    "s3-endpoint `{endpoint}`: scheme `{other}` is not https:// or http://"
                ));
            }
        };
        let loopback = match url.host() {
            Some(Host::Ipv4(address)) => address.is_loopback(),
            Some(Host::Ipv6(address)) => address.is_loopback(),
            Some(Host::Domain(name)) => name == "localhost",
            None => false,
        };
        if plain && !loopback && !self.allow_http.unwrap_or(false) {
            return Err(format!(
                "s3-endpoint is {endpoint}: over http:// anyone on the network path can read and \
                 change all records. Use https://, or give --s3-allow-http if the network is \
                 trusted"
            ));
        }
        if !self.path_style() {
            let Some(Host::Domain(name)) = url.host() else {
                return Err(format!(
                    "s3-endpoint is {endpoint}: an IP address cannot have a bucket's name as a \
                     subdomain; do not disable --s3-path-style"
                ));
            };
            let name = format!("{bucket}.{name}");
            url.set_host(Some(&name))
                .map_err(|error| format!("s3-endpoint {endpoint}: {error}"))?;
        }
        Ok(Some(url))
    }

    /// Custom endpoints seldom have a DNS name for each bucket; AWS has.
    fn path_style(&self) -> bool {
        self.path_style.unwrap_or_else(|| self.endpoint().is_some())
    }
}

/// How S3 is reached; the same options as for `alluvium serve`.
#[derive(Args, Clone, Debug)]
pub(crate) struct S3Args {
    /// Endpoint, if it is not AWS: `https://s3.example.org`.
    #[arg(long, env = "ALLUVIUM_S3_ENDPOINT", value_name = "URL")]
    s3_endpoint: Option<String>,
    /// The bucket's region.
    #[arg(long, env = "ALLUVIUM_S3_REGION", value_name = "NAME")]
    s3_region: Option<String>,
    /// Put the bucket into the path of the URL and not into the host name.
    #[arg(long, env = "ALLUVIUM_S3_PATH_STYLE", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    s3_path_style: Option<bool>,
    /// Allow an http:// endpoint that is not on loopback.
    #[arg(long, env = "ALLUVIUM_S3_ALLOW_HTTP", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    s3_allow_http: Option<bool>,
    /// Certificates (PEM) to trust in addition to the system's.
    #[arg(long, env = "ALLUVIUM_S3_CA_FILE", value_name = "FILE")]
    s3_ca_file: Option<PathBuf>,
}

impl S3Args {
    /// Returns the settings.
    pub(crate) fn settings(&self) -> S3Settings {
        let Self { s3_endpoint, s3_region, s3_path_style, s3_allow_http, s3_ca_file } = self;
        S3Settings {
            endpoint: s3_endpoint.clone(),
            region: s3_region.clone(),
            path_style: *s3_path_style,
            allow_http: *s3_allow_http,
            ca_file: s3_ca_file.clone(),
        }
    }
}

/// Opens the object store, without a request to it.
///
/// # Errors
/// A local directory that cannot be created; invalid settings.
pub(crate) fn open(url: &ObjectStoreUrl) -> Result<Arc<dyn ObjectStore>, Failure> {
    match url {
        ObjectStoreUrl::Directory(directory) => alluvium_stream::local_objects(directory)
            .map_err(|error| Failure::Failed(format!("object store: {error}"))),
        ObjectStoreUrl::Memory => {
            tracing::warn!(
                "the object store is memory of this process: it grows without bound, and uploaded \
                 data is lost when the server stops. For trials only"
            );
            Ok(Arc::new(InMemory::new()))
        }
        ObjectStoreUrl::S3(bucket) => open_bucket(bucket, credentials(environment)?, RETRIES),
    }
}

/// The failure of a tool that is to read `memory://`.
pub(crate) fn memory_of_a_server() -> Failure {
    Failure::Usage("memory:// is memory of a server and cannot be read from outside".into())
}

/// Opens the object store to read only: a local directory is neither created nor marked.
///
/// # Errors
/// A local directory that does not exist; else as [`open`].
pub(crate) fn open_to_read(url: &ObjectStoreUrl) -> Result<Arc<dyn ObjectStore>, Failure> {
    let ObjectStoreUrl::Directory(directory) = url else { return open(url) };
    if !directory.is_dir() {
        return Err(Failure::Failed(format!("object store {url}: no such directory")));
    }
    match LocalFileSystem::new_with_prefix(directory) {
        Ok(store) => Ok(Arc::new(store)),
        Err(error) => Err(Failure::Failed(format!("object store {url}: {error}"))),
    }
}

fn open_bucket(
    bucket: &Bucket,
    credentials: AmazonS3Builder,
    max_retries: usize,
) -> Result<Arc<dyn ObjectStore>, Failure> {
    // Only the first call has an effect, and this is the only caller.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let settings = &bucket.settings;
    let endpoint = settings.bucket_endpoint(&bucket.name).map_err(Failure::Usage)?;
    let mut client = ClientOptions::new()
        .with_timeout(REQUEST)
        .with_connect_timeout(CONNECT)
        .with_allow_http(endpoint.as_ref().is_some_and(|url| url.scheme() == "http"));
    if let Some(file) = &settings.ca_file {
        for certificate in certificates(file)? {
            client = client.with_root_certificate(certificate);
        }
    }
    let mut builder = credentials
        .with_client_options(client)
        .with_retry(RetryConfig {
            backoff: BackoffConfig {
                max_backoff: Duration::from_secs(5),
                ..BackoffConfig::default()
            },
            max_retries,
            retry_timeout: RETRY,
        })
        // Objects are deleted one by one, and not every server implements bulk deletion.
        .with_disable_bulk_delete(true)
        .with_virtual_hosted_style_request(!settings.path_style())
        .with_bucket_name(&bucket.name);
    if let Some(region) = &settings.region {
        builder = builder.with_region(region);
    }
    if let Some(endpoint) = endpoint {
        builder = builder.with_endpoint(endpoint.as_str().trim_end_matches('/'));
    }
    let store = builder
        .build()
        .map_err(|error| Failure::Usage(format!("object store s3://{}: {error}", bucket.name)))?;
    Ok(match bucket.prefix.as_str() {
        "" => Arc::new(store),
        prefix => Arc::new(PrefixStore::new(store, prefix)),
    })
}

/// A variable of the environment, if it is not empty.
fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Credentials and region from AWS's environment variables or from a profile; without them, those
/// of the machine (container, instance).
///
/// # Errors
/// The profile is unusable, or the variables for container credentials are incomplete.
fn credentials(variable: impl Fn(&str) -> Option<String>) -> Result<AmazonS3Builder, Failure> {
    use AmazonS3ConfigKey as Key;
    let mut builder = AmazonS3Builder::new();
    if let Some(profile) = profile(&variable).map_err(Failure::Usage)? {
        if let Some(region) = profile.region {
            builder = builder.with_region(region);
        }
        match profile.credentials {
            Some(credentials) => builder = builder.with_credentials(Arc::new(credentials)),
            None => check_container(&variable).map_err(Failure::Usage)?,
        }
    }
    // Named one by one, so that other variables in the environment do not change where records go.
    let known = [
        ("AWS_ACCESS_KEY_ID", Key::AccessKeyId),
        ("AWS_SECRET_ACCESS_KEY", Key::SecretAccessKey),
        ("AWS_SESSION_TOKEN", Key::Token),
        ("AWS_DEFAULT_REGION", Key::DefaultRegion),
        ("AWS_REGION", Key::Region),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", Key::WebIdentityTokenFile),
        ("AWS_ROLE_ARN", Key::RoleArn),
        ("AWS_ROLE_SESSION_NAME", Key::RoleSessionName),
        ("AWS_ENDPOINT_URL_STS", Key::StsEndpoint),
        ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", Key::ContainerCredentialsRelativeUri),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", Key::ContainerCredentialsFullUri),
        ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", Key::ContainerAuthorizationTokenFile),
    ];
    let known = known.into_iter().filter_map(|(name, key)| Some((key, variable(name)?)));
    Ok(known.fold(builder, |builder, (key, value)| builder.with_config(key, value)))
}

/// The profile to use, if the environment itself has no credentials.
fn profile(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Profile>, String> {
    let before = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE"];
    match before.into_iter().any(|name| variable(name).is_some()) {
        true => Ok(None),
        false => Profile::find(variable).map(Some),
    }
}

/// Refuses variables that the client mishandles: with a URI but no token it uses the credentials of
/// the instance instead, and it panics on a token that is not valid in a header.
fn check_container(variable: impl Fn(&str) -> Option<String>) -> Result<(), String> {
    const URI: &str = "AWS_CONTAINER_CREDENTIALS_FULL_URI";
    const TOKEN: &str = "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE";
    if variable(URI).is_none() || variable("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI").is_some() {
        return Ok(());
    }
    let Some(file) = variable(TOKEN) else {
        return Err(format!("the environment has {URI}, but not {TOKEN}, which is needed with it"));
    };
    match std::fs::read(&file) {
        Ok(token) if token.iter().any(u8::is_ascii_control) => Err(format!(
            "{TOKEN}: {file} contains a line break or another control character; it must contain \
             only the token"
        )),
        // A missing file may be created later.
        _ => Ok(()),
    }
}

fn certificates(file: &Path) -> Result<Vec<Certificate>, Failure> {
    let failed =
        |reason: String| Failure::Usage(format!("s3-ca-file {}: {reason}", file.display()));
    let pem = std::fs::read(file).map_err(|error| failed(error.to_string()))?;
    let found = Certificate::from_pem_bundle(&pem).map_err(|error| failed(error.to_string()))?;
    match found.is_empty() {
        true => Err(failed("contains no certificate".into())),
        false => Ok(found),
    }
}

/// Lists the objects, up to the first one. An error that no later attempt can resolve fails the
/// start, before anything is created or written.
///
/// # Errors
/// The bucket does not exist, or the credentials are refused.
pub(crate) fn check(url: &ObjectStoreUrl) -> Result<(), Failure> {
    check_with(url, || credentials(environment))
}

fn check_with(
    url: &ObjectStoreUrl,
    credentials: impl FnOnce() -> Result<AmazonS3Builder, Failure>,
) -> Result<(), Failure> {
    let probe = async {
        match url {
            ObjectStoreUrl::S3(bucket) => {
                // A separate client, because its connections end with this runtime.
                let store = open_bucket(bucket, credentials()?, 0)?;
                list_objects(url, &*store).await
            }
            ObjectStoreUrl::Directory(directory) if directory.is_dir() => {
                let store = LocalFileSystem::new_with_prefix(directory)
                    .map_err(|error| Failure::Failed(format!("object store {url}: {error}")))?;
                list_objects(url, &store).await
            }
            ObjectStoreUrl::Directory(_) | ObjectStoreUrl::Memory => Ok(()),
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime =
        runtime.map_err(|error| Failure::Failed(format!("cannot start the runtime: {error}")))?;
    runtime.block_on(probe)
}

async fn list_objects(url: &ObjectStoreUrl, store: &dyn ObjectStore) -> Result<(), Failure> {
    let probe = alluvium_stream::probe_objects(store, None, &|_| true);
    match tokio::time::timeout(CHECK, probe).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) if error.is_permanent() => {
            let source = source(url);
            return Err(Failure::Failed(format!("object store {url}: {}{source}", error.reason())));
        }
        Ok(Err(error)) => warn(url, &error.reason()),
        Err(_) => warn(url, &format!("no answer within {} s", CHECK.as_secs())),
    }
    Ok(())
}

/// Where the credentials come from, if not from the environment: a hint for an operator who does
/// not know that source or has forgotten it.
fn source(url: &ObjectStoreUrl) -> String {
    if !matches!(url, ObjectStoreUrl::S3(_)) {
        return String::new();
    }
    let of_container =
        ["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"];
    match profile(environment).map(|profile| profile.map(|profile| profile.credentials)) {
        Ok(Some(Some(credentials))) => {
            format!(" (the credentials are those of the profile `{}`)", credentials.name())
        }
        Ok(Some(None)) if of_container.into_iter().all(|name| environment(name).is_none()) => {
            " (the environment has no credentials and there is no profile, so those of the \
             machine are used)"
                .into()
        }
        _ => String::new(),
    }
}

fn warn(url: &ObjectStoreUrl, reason: &str) {
    tracing::warn!(
        "the object store is unavailable: {url}: {reason}{}. It has the catalog, so the server \
         waits until it is available",
        source(url)
    );
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    fn parse(url: &str) -> Result<ObjectStoreUrl, String> {
        ObjectStoreUrl::parse(url, S3Settings::default())
    }

    fn at(endpoint: &str) -> S3Settings {
        S3Settings { endpoint: Some(endpoint.into()), ..S3Settings::default() }
    }

    #[test]
    fn object_store_urls_are_parsed() {
        assert_eq!(parse("file:///srv/o"), Ok(ObjectStoreUrl::Directory("/srv/o".into())));
        assert_eq!(parse("memory://"), Ok(ObjectStoreUrl::Memory));
        for (url, name, prefix) in [
            ("s3://bucket", "bucket", ""),
            ("s3://bucket/", "bucket", ""),
            ("s3://a.bucket/a/b/", "a.bucket", "a/b"),
            ("s3://a.bucket/a-b_c.d!e'(f)", "a.bucket", "a-b_c.d!e'(f)"),
        ] {
            let Ok(ObjectStoreUrl::S3(bucket)) = parse(url) else { panic!("{url}") };
            assert_eq!((bucket.name.as_str(), bucket.prefix.as_str()), (name, prefix));
        }
        for (url, reason) in [
            ("gs://bucket", "unknown scheme `gs`"),
            ("ftp://host", "unknown scheme `ftp`"),
            ("./objects", "file:///absolute/path"),
            ("file://objects", "three slashes"),
            ("s3:///prefix", "names no bucket"),
            ("s3://bucket:9000/prefix", "names no bucket"),
            ("s3://bucket/two words", "a prefix may contain"),
            ("s3://bucket/two%20words", "a prefix may contain"),
            ("s3://bucket/~home", "a prefix may contain"),
            ("s3://bucket/\u{fc}", "a prefix may contain"),
            ("s3://bucket/a//b", "a prefix may contain"),
            ("s3://bucket/a#b", "a #"),
            ("file:///srv/a#b", "%23"),
        ] {
            let error = parse(url).unwrap_err();
            assert!(error.contains(reason), "{url}: {error}");
        }
    }

    #[test]
    fn credentials_in_a_url_are_refused_and_not_repeated() {
        for url in ["s3://KEY:hush@bucket", "s3://hush@bucket", "s3://b?secret=hush", "s3//hush@b"]
        {
            let error = parse(url).unwrap_err();
            assert!(!error.contains("hush") && error.contains("object-store"), "{error}");
        }
        let endpoint = at("https://KEY:hush@s3.example.org");
        let error = ObjectStoreUrl::parse("s3://bucket", endpoint).unwrap_err();
        assert!(!error.contains("hush") && error.contains("s3-endpoint"), "{error}");
    }

    #[test]
    fn container_credentials_need_their_token() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let name = file.path().to_str().unwrap();
        let (uri, token) =
            ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE");
        let refused = |given: &[(&str, &str)]| {
            let variable = |name: &str| {
                let found = given.iter().find(|(given, _)| *given == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            credentials(variable).err().map(|failure| format!("{failure:?}"))
        };
        assert!(refused(&[(uri, "http://127.0.0.1/")]).unwrap().contains(token));
        assert_eq!(refused(&[(uri, "http://127.0.0.1/"), (token, "/not/there/yet")]), None);
        for (content, is_refused) in [("hush", false), ("hush\n", true), ("", false)] {
            std::fs::write(file.path(), content).unwrap();
            let refused = refused(&[(uri, "http://127.0.0.1/"), (token, name)]);
            assert_eq!(refused.is_some(), is_refused, "{content:?}: {refused:?}");
            assert!(refused.is_none_or(|reason| !reason.contains("hush")), "the token is a secret");
        }
        let others = [("AWS_ACCESS_KEY_ID", "id"), ("AWS_WEB_IDENTITY_TOKEN_FILE", "file")];
        for other in others {
            assert_eq!(refused(&[(uri, "http://127.0.0.1/"), other]), None, "it takes precedence");
        }
    }

    #[test]
    fn a_bucket_is_a_path_or_a_subdomain_of_the_endpoint() {
        let url = |settings: S3Settings| {
            settings.bucket_endpoint("b").map(|url| url.map(|url| url.to_string()))
        };
        let named = |endpoint| S3Settings { path_style: Some(false), ..at(endpoint) };
        assert_eq!(url(at("https://s3.example.org")), Ok(Some("https://s3.example.org/".into())));
        assert_eq!(
            url(named("https://s3.example.org:9000")),
            Ok(Some("https://b.s3.example.org:9000/".into()))
        );
        assert!(url(named("http://127.0.0.1:9000")).unwrap_err().contains("s3-path-style"));
        assert!(url(at("ftp://s3.example.org")).unwrap_err().contains("scheme `ftp`"));
    }

    #[test]
    fn plain_http_beyond_loopback_needs_an_explicit_option() {
        let allowed = |endpoint, allow_http| {
            S3Settings { allow_http, ..at(endpoint) }.bucket_endpoint("b").map(drop)
        };
        for loopback in ["http://127.0.0.1:9000", "http://localhost:9000", "http://[::1]:9000"] {
            assert_eq!(allowed(loopback, None), Ok(()));
        }
        let error = allowed("http://192.0.2.1:9000", None).unwrap_err();
        assert!(error.contains("--s3-allow-http"), "{error}");
        assert_eq!(allowed("http://192.0.2.1:9000", Some(true)), Ok(()));
    }

    #[test]
    fn certificates_are_read_when_the_store_is_opened() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("ca.pem");
        let opened = || {
            let settings = S3Settings { ca_file: Some(file.clone()), ..S3Settings::default() };
            match open(&ObjectStoreUrl::parse("s3://bucket", settings).unwrap()) {
                Err(Failure::Usage(reason)) => reason,
                _ => panic!("opening must fail"),
            }
        };
        assert!(opened().contains("ca.pem"), "{}", opened());
        std::fs::write(&file, "no certificate").unwrap();
        assert!(opened().contains("contains no certificate"), "{}", opened());
    }

    /// A server that gives every request the same answer.
    fn server(status: &'static str, body: &'static str) -> ObjectStoreUrl {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let Ok(mut connection) = connection else { return };
                let mut request = [0; 8192];
                let _ = connection.read(&mut request);
                let head = "Connection: close\r\nContent-Type: application/xml";
                let answer = format!(
                    "HTTP/1.1 {status}\r\n{head}\r\nContent-Length: {}\r\n\r\n{body}",
                    body.len()
                );
                let _ = connection.write_all(answer.as_bytes());
            }
        });
        ObjectStoreUrl::parse("s3://bucket/prefix", at(&endpoint)).unwrap()
    }

    /// The check with fixed credentials: the environment may have none, and the machine's must not
    /// be requested.
    fn checked(url: &ObjectStoreUrl) -> Result<(), Failure> {
        let credentials =
            AmazonS3Builder::new().with_access_key_id("id").with_secret_access_key("hush");
        check_with(url, || Ok(credentials))
    }

    #[test]
    fn only_permanent_errors_of_the_object_store_fail_the_start() {
        for (status, body, reason) in [
            ("404 Not Found", "<Error><Code>NoSuchBucket</Code></Error>", "NoSuchBucket"),
            (
                "403 Forbidden",
                "<Error><Code>AccessDenied</Code><Message>No.</Message></Error>",
                "AccessDenied: No.",
            ),
            ("403 Forbidden", "", "403 Forbidden"),
        ] {
            match checked(&server(status, body)) {
                Err(Failure::Failed(text)) => {
                    assert!(text.contains(reason) && text.contains("s3://bucket/prefix"), "{text}");
                    assert!(!text.contains("hush"), "{text}");
                }
                other => panic!("{status}: {other:?}"),
            }
        }
        assert!(checked(&server("400 Bad Request", "<Error><Code>Odd</Code></Error>")).is_ok());
        let empty = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>";
        assert!(checked(&server("200 OK", empty)).is_ok());
    }
}
