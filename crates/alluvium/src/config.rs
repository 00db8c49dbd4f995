//! Configuration of `alluvium serve`: flag over environment over file over default.
//!
//! [`ServeOptions`] is what a person may write, each field optional, once for the command line and the environment and once for the
//! file. [`ServeConfig`] is what results: complete and checked. Nothing is rewritten silently; a value out of bounds is an error.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use alluvium_broker::{AuthorizationConfig, ListenerConfig, Mechanism};
use alluvium_device::{Durability, Engine};
use clap::Args;
use serde::{Deserialize, Deserializer};

use crate::address::{Address, AdminListen, HostPort};
use crate::listeners::Listeners;
use crate::objects::{ObjectStoreUrl, S3Settings};
use crate::units::{Size, Span};

/// Defaults and bounds, named in the help texts; a test keeps the two together.
pub(crate) mod limits {
    use std::time::Duration;

    use crate::units::{Size, Span};

    pub(crate) const DATA_DIR: &str = "./data";
    pub(crate) const LISTEN: &str = "127.0.0.1:9092";
    pub(crate) const ADMIN_LISTEN: &str = "127.0.0.1:9644";
    pub(crate) const LOG: &str = "info";
    pub(crate) const NODE_ID: u32 = 1;

    pub(crate) const WAL_CAPACITY: Size = Size::gib(2);
    pub(crate) const WAL_CAPACITY_MIN: Size = Size::mib(64);
    pub(crate) const WAL_CAPACITY_MAX: Size = Size::tib(16);

    pub(crate) const LOG_CACHE: Size = Size::gib(1);
    pub(crate) const LOG_CACHE_MIN: Size = Size::mib(16);
    pub(crate) const LOG_CACHE_MAX: Size = Size::tib(1);

    pub(crate) const BLOCK_CACHE: Size = Size::mib(64);
    pub(crate) const BLOCK_CACHE_MIN: Size = Size::mib(16);
    pub(crate) const LATE_READS: Size = Size::mib(128);
    pub(crate) const LATE_READS_MIN: Size = Size::mib(8);
    pub(crate) const LATE_MAX: Size = Size::tib(1);

    pub(crate) const RATE_MIN: Size = Size::mib(1);
    pub(crate) const RATE_MAX: Size = Size::tib(1);

    pub(crate) const UPLOAD_SIZE: Size = Size::mib(512);
    pub(crate) const UPLOAD_SIZE_MIN: Size = Size::mib(1);

    pub(crate) const COMPACTION_SIZE: Size = Size::mib(256);
    pub(crate) const COMPACTION_SIZE_MIN: Size = Size::kib(64);
    pub(crate) const COMPACTION_SIZE_MAX: Size = Size::gib(32);

    pub(crate) const UPLOAD_INTERVAL: Span = Span(Duration::from_secs(60));
    pub(crate) const UPLOAD_INTERVAL_MIN: Span = Span(Duration::from_millis(100));
    pub(crate) const UPLOAD_INTERVAL_MAX: Span = Span(Duration::from_secs(24 * 3600));

    pub(crate) const SESSION_LIFETIME_MIN: Span = Span(Duration::from_secs(1));
    pub(crate) const SESSION_LIFETIME_MAX: Span = Span(Duration::from_secs(365 * 86_400));
    pub(crate) const SKEW: Span = Span(Duration::from_secs(30));
    pub(crate) const SKEW_MIN: Span = Span(Duration::ZERO);
    pub(crate) const SKEW_MAX: Span = Span(Duration::from_secs(3600));

    pub(crate) const PARTITIONS: u32 = 1;
    pub(crate) const CONNECTIONS: u32 = 1_000;
    pub(crate) const CONNECTIONS_MAX: u32 = 100_000;
    pub(crate) const MESSAGE: Size = Size { bytes: 1_048_588 };
    pub(crate) const MESSAGE_MIN: Size = Size::kib(1);
    pub(crate) const MESSAGE_MAX: Size = Size::mib(8);
}
use limits as l;

/// The options of `alluvium serve`, as a person wrote them.
#[derive(Args, Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct ServeOptions {
    /// Read options from this TOML file. An unknown key is an error. Default: none.
    #[arg(long, env = "ALLUVIUM_CONFIG", value_name = "FILE")]
    #[serde(skip)]
    pub(crate) config: Option<PathBuf>,

    /// Directory of the catalog, and by default of the write-ahead log and the objects; created if it is missing. Default ./data.
    #[arg(long, env = "ALLUVIUM_DATA_DIR", value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,

    /// Address of the Kafka port in plain text; port 0 takes a free one. An address other than loopback needs
    /// --allow-plaintext-network. Default 127.0.0.1:9092, or none if there is a --listener.
    #[arg(long, env = "ALLUVIUM_LISTEN", value_name = "ADDR:PORT")]
    #[serde(deserialize_with = "from_text")]
    pub(crate) listen: Option<Address>,

    /// Name and port under which clients reach this server. Default: the address that it listens on.
    #[arg(long, env = "ALLUVIUM_ADVERTISE", value_name = "HOST:PORT")]
    #[serde(deserialize_with = "from_text")]
    pub(crate) advertise: Option<HostPort>,

    /// More ports for clients, with TLS and authentication: `{name = "tls", listen = "0.0.0.0:9093", protocol = "SSL", ...}`, several of
    /// these in brackets; in the file one `[[listener]]` each. What they have stands in docs/configuration.md. Default none.
    #[arg(long, env = "ALLUVIUM_LISTENER", value_name = "{...}")]
    pub(crate) listener: Option<Listeners>,

    /// Clients that have logged in by SASL do so again after this time at the latest (`connections.max.reauth.ms`). Default none, 1s to 365 days.
    #[arg(long, env = "ALLUVIUM_SESSION_LIFETIME", value_name = "TIME")]
    pub(crate) session_lifetime: Option<Span>,

    /// For OAUTHBEARER: the keys that tokens are signed with, a JWKS document in a file or at an https:// URL. Default none.
    #[arg(long, env = "ALLUVIUM_OAUTH_JWKS", value_name = "FILE|URL")]
    pub(crate) oauth_jwks: Option<String>,

    /// The issuer that each token must have (`iss`). Default none.
    #[arg(long, env = "ALLUVIUM_OAUTH_ISSUER", value_name = "TEXT")]
    pub(crate) oauth_issuer: Option<String>,

    /// The audience that each token must name (`aud`). Default none.
    #[arg(long, env = "ALLUVIUM_OAUTH_AUDIENCE", value_name = "TEXT")]
    pub(crate) oauth_audience: Option<String>,

    /// Scopes that each token must have, with spaces between them. Default none.
    #[arg(long, env = "ALLUVIUM_OAUTH_SCOPE", value_name = "TEXT")]
    pub(crate) oauth_scope: Option<String>,

    /// The claim that is the user's name. Default sub.
    #[arg(long, env = "ALLUVIUM_OAUTH_PRINCIPAL_CLAIM", value_name = "NAME")]
    pub(crate) oauth_principal_claim: Option<String>,

    /// How far the clocks of this machine and of the issuer may be apart. Default 30s, 0s to 1h.
    #[arg(long, env = "ALLUVIUM_OAUTH_CLOCK_SKEW", value_name = "TIME")]
    pub(crate) oauth_clock_skew: Option<Span>,

    /// Ask the ACLs before anything is done: what they do not allow is refused. Default false.
    #[arg(long, env = "ALLUVIUM_AUTHORIZATION", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) authorization: Option<bool>,

    /// Users who may do everything, as in `User:admin;User:CN=ops,O=example` (`super.users`). Default none.
    #[arg(long, env = "ALLUVIUM_SUPER_USERS", value_name = "USERS")]
    pub(crate) super_users: Option<String>,

    /// Allow everything to everybody where a resource has no ACL (`allow.everyone.if.no.acl.found`). Default false.
    #[arg(long, env = "ALLUVIUM_ALLOW_EVERYONE_IF_NO_ACL_FOUND", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) allow_everyone_if_no_acl_found: Option<bool>,

    /// Listen on the network without encryption or without authentication: everybody who reaches the port, or the way to it, can
    /// read and write everything. Default false.
    #[arg(long, env = "ALLUVIUM_ALLOW_PLAINTEXT_NETWORK", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) allow_plaintext_network: Option<bool>,

    /// The write-ahead log: a raw block device (/dev/...), or a file, which is created and pre-written. Default: `wal` in the data
    /// directory.
    #[arg(long, env = "ALLUVIUM_WAL", value_name = "PATH")]
    pub(crate) wal: Option<PathBuf>,

    /// Size of a new write-ahead log. An existing one keeps its size, whatever is said here: `alluvium wal resize` changes it, also while
    /// the server runs. Default 2GiB (of a block device: all of it), 64MiB to 16TiB.
    #[arg(long, env = "ALLUVIUM_WAL_CAPACITY", value_name = "SIZE")]
    pub(crate) wal_capacity: Option<Size>,

    /// Reserve the device of the write-ahead log for this machine, so that it refuses what an earlier server still writes from another one. For a whole SCSI disk or
    /// NVMe namespace with persistent reservations; refused elsewhere. It stays reserved when the server ends. Default false.
    #[arg(long, env = "ALLUVIUM_WAL_RESERVE", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) wal_reserve: Option<bool>,

    /// Format the write-ahead log although its target holds something else. What it holds is lost. An existing write-ahead
    /// log is never formatted by this command. On the command line only.
    #[arg(long)]
    #[serde(skip)]
    pub(crate) force_format: bool,

    /// Where records settle: s3://bucket/prefix, file:///absolute/path, or memory:// for trials (lost at the end of the process). The
    /// credentials for S3 come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or from the machine. Default: `objects` in the data
    /// directory.
    #[arg(long, env = "ALLUVIUM_OBJECT_STORE", value_name = "URL")]
    pub(crate) object_store: Option<String>,

    /// Where S3 is spoken, if not at AWS: `https://s3.example.org`. Default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or AWS.
    #[arg(long, env = "ALLUVIUM_S3_ENDPOINT", value_name = "URL")]
    pub(crate) s3_endpoint: Option<String>,

    /// The bucket's region. Default: AWS_REGION, AWS_DEFAULT_REGION, or us-east-1.
    #[arg(long, env = "ALLUVIUM_S3_REGION", value_name = "NAME")]
    pub(crate) s3_region: Option<String>,

    /// Name the bucket in the path (`https://host/bucket`) and not in the host's name (`https://bucket.host`). Default true with an
    /// endpoint, false at AWS.
    #[arg(long, env = "ALLUVIUM_S3_PATH_STYLE", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) s3_path_style: Option<bool>,

    /// Use an endpoint with http:// that is not on loopback: everybody on the way can read and change all records. Default false.
    #[arg(long, env = "ALLUVIUM_S3_ALLOW_HTTP", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) s3_allow_http: Option<bool>,

    /// Certificates (PEM) that are trusted beside the system's. Default: none.
    #[arg(long, env = "ALLUVIUM_S3_CA_FILE", value_name = "FILE")]
    pub(crate) s3_ca_file: Option<PathBuf>,

    /// What makes an acknowledged record durable: `dsync` = each write is followed by a flush or carries FUA; `device` =
    /// the device is trusted to keep what it has acknowledged, for disks with power-loss protection only; `auto` = dsync
    /// wherever there is a volatile write cache, and for every file. Default auto.
    #[arg(long, env = "ALLUVIUM_DURABILITY", value_name = "auto|dsync|device")]
    #[serde(deserialize_with = "from_text")]
    pub(crate) durability: Option<Durability>,

    /// How the device is driven: io_uring, threads (where the kernel or the container refuses io_uring), or auto, which
    /// takes io_uring if it can. Default auto.
    #[arg(long, env = "ALLUVIUM_ENGINE", value_name = "auto|io_uring|threads")]
    #[serde(deserialize_with = "from_text")]
    pub(crate) engine: Option<Engine>,

    /// Memory for recent records: what is not uploaded yet, and behind it what tail readers want. Default 1GiB, 16MiB to 1TiB.
    #[arg(long, env = "ALLUVIUM_LOG_CACHE", value_name = "SIZE")]
    pub(crate) log_cache: Option<Size>,

    /// Memory for what was read from objects, and may be wanted again. A quarter of it may be read ahead. Default 64MiB, 16MiB to 1TiB.
    #[arg(long, env = "ALLUVIUM_BLOCK_CACHE", value_name = "SIZE")]
    pub(crate) block_cache: Option<Size>,

    /// Memory for what is on its way from objects to consumers: what they fetch at the same time. Default 128MiB, 8MiB to 1TiB.
    #[arg(long, env = "ALLUVIUM_LATE_READ_MEMORY", value_name = "SIZE")]
    pub(crate) late_read_memory: Option<Size>,

    /// Bound on the traffic with the object store, in bytes per second, both ways together: uploads go before what consumers read from
    /// objects. Default none, 1MiB to 1TiB.
    #[arg(long, env = "ALLUVIUM_OBJECT_STORE_RATE", value_name = "SIZE")]
    pub(crate) object_store_rate: Option<Size>,

    /// Upload when this much is waiting; at most a quarter of the write-ahead log and half of the log cache. Default 512MiB, or that
    /// bound if it is smaller; at least 1MiB.
    #[arg(long, env = "ALLUVIUM_UPLOAD_SIZE", value_name = "SIZE")]
    pub(crate) upload_size: Option<Size>,

    /// Upload at least this often when anything is waiting. Default 1m, 100ms to 24h.
    #[arg(long, env = "ALLUVIUM_UPLOAD_INTERVAL", value_name = "TIME")]
    pub(crate) upload_interval: Option<Span>,

    /// Payload at which compaction ends an object of a partition. What is smaller than an eighth of it is brought together in the background; 0
    /// switches compaction off. Default 256MiB, 64KiB to 32GiB or 0.
    #[arg(long, env = "ALLUVIUM_COMPACTION_SIZE", value_name = "SIZE")]
    pub(crate) compaction_size: Option<Size>,

    /// Address for /metrics (Prometheus) and /healthz, or `none`. It follows the same rule as --listen. Default 127.0.0.1:9644.
    #[arg(long, env = "ALLUVIUM_ADMIN_LISTEN", value_name = "ADDR:PORT|none")]
    #[serde(deserialize_with = "from_text")]
    pub(crate) admin_listen: Option<AdminListen>,

    /// This server's id among the brokers (`node.id`), and in the write-ahead log's header. Default 1, 0 to 2147483647.
    #[arg(long, env = "ALLUVIUM_NODE_ID", value_name = "N")]
    pub(crate) node_id: Option<u32>,

    /// Id of the cluster. Default: the stored one, a random one at the very first start. 1 to 249 characters.
    #[arg(long, env = "ALLUVIUM_CLUSTER_ID", value_name = "ID")]
    pub(crate) cluster_id: Option<String>,

    /// Create a topic when a client asks for one that does not exist (`auto.create.topics.enable`). Default true.
    #[arg(long, env = "ALLUVIUM_AUTO_CREATE_TOPICS", value_name = "BOOL")]
    pub(crate) auto_create_topics: Option<bool>,

    /// Partitions of a topic that is created without a number (`num.partitions`). Default 1, 1 to 10000.
    #[arg(long, env = "ALLUVIUM_DEFAULT_PARTITIONS", value_name = "N")]
    pub(crate) default_partitions: Option<u32>,

    /// Largest record batch (`message.max.bytes`). Default 1048588B, 1KiB to 8MiB.
    #[arg(long, env = "ALLUVIUM_MAX_MESSAGE_SIZE", value_name = "SIZE")]
    pub(crate) max_message_size: Option<Size>,

    /// Bound on open connections; one more is closed at once. Default 1000, 1 to 100000.
    #[arg(long, env = "ALLUVIUM_MAX_CONNECTIONS", value_name = "N")]
    pub(crate) max_connections: Option<u32>,

    /// What is logged: error, warn, info, debug, trace, or a filter such as `info,alluvium_stream=debug`. Default info.
    #[arg(long, env = "ALLUVIUM_LOG", value_name = "LEVEL")]
    pub(crate) log: Option<String>,
}

/// Configuration of the server, complete and within bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServeConfig {
    pub(crate) data_dir: PathBuf,
    pub(crate) listeners: Vec<ListenerConfig>,
    pub(crate) session_lifetime: Option<Span>,
    pub(crate) oauth: Option<Oauth>,
    pub(crate) authorization: Option<AuthorizationConfig>,
    pub(crate) wal: PathBuf,
    /// `None`: an existing log keeps its size, a new file gets [`limits::WAL_CAPACITY`], a block device is taken whole.
    pub(crate) wal_capacity: Option<Size>,
    pub(crate) wal_reserve: bool,
    pub(crate) force_format: bool,
    pub(crate) object_store: ObjectStoreUrl,
    pub(crate) durability: Durability,
    pub(crate) engine: Engine,
    pub(crate) log_cache: Size,
    pub(crate) block_cache: Size,
    pub(crate) late_read_memory: Size,
    /// Bytes per second; `None`: no bound.
    pub(crate) object_store_rate: Option<Size>,
    /// `None`: as large as the other sizes allow, at most [`limits::UPLOAD_SIZE`].
    pub(crate) upload_size: Option<Size>,
    pub(crate) upload_interval: Span,
    /// 0 bytes: no compaction.
    pub(crate) compaction_size: Size,
    pub(crate) admin_listen: Option<SocketAddr>,
    pub(crate) node_id: u32,
    pub(crate) cluster_id: Option<String>,
    pub(crate) auto_create_topics: bool,
    pub(crate) default_partitions: u32,
    pub(crate) max_message_size: Size,
    pub(crate) max_connections: u32,
    pub(crate) log: String,
}

/// The configuration can not be used; the message names the option and what is allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct ConfigError(String);

/// Which tokens OAUTHBEARER takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Oauth {
    pub(crate) jwks: String,
    pub(crate) issuer: String,
    pub(crate) audience: String,
    pub(crate) scopes: Vec<String>,
    pub(crate) principal_claim: String,
    pub(crate) clock_skew: Span,
}

impl Oauth {
    fn resolve(
        jwks: Option<String>,
        issuer: Option<String>,
        audience: Option<String>,
        scope: Option<String>,
        principal_claim: Option<String>,
        clock_skew: Option<Span>,
    ) -> Result<Option<Self>, ConfigError> {
        match (jwks, issuer, audience) {
            (None, None, None) => Ok(None),
            (Some(jwks), Some(issuer), Some(audience)) => {
                if jwks.starts_with("http://") {
                    return Err(ConfigError(
                        "oauth-jwks is an http:// URL: whoever is on the way could let everybody in. Use https:// or a file".into(),
                    ));
                }
                let scope = scope.unwrap_or_default();
                Ok(Some(Self {
                    jwks,
                    issuer,
                    audience,
                    scopes: scope.split_whitespace().map(str::to_owned).collect(),
                    principal_claim: principal_claim.unwrap_or_else(|| "sub".into()),
                    clock_skew: clock_skew.unwrap_or(l::SKEW),
                }))
            }
            _ => Err(ConfigError(
                "oauth-jwks, oauth-issuer and oauth-audience belong together: a token that was made for somebody else must not let in".into(),
            )),
        }
    }
}

impl ServeConfig {
    /// Add the file that `options` names, then the defaults; check the bounds.
    ///
    /// # Errors
    /// A file that can not be read, an unknown key, a value out of bounds.
    pub(crate) fn load(options: ServeOptions) -> Result<Self, ConfigError> {
        let file = match &options.config {
            Some(path) => read_file(path)?,
            None => ServeOptions::default(),
        };
        Self::resolve(options.or(file))
    }

    fn resolve(options: ServeOptions) -> Result<Self, ConfigError> {
        let data_dir = options.data_dir.unwrap_or_else(|| l::DATA_DIR.into());
        let s3 = S3Settings {
            endpoint: options.s3_endpoint,
            region: options.s3_region,
            path_style: options.s3_path_style,
            allow_http: options.s3_allow_http,
            ca_file: options.s3_ca_file,
        };
        let object_store = match &options.object_store {
            Some(url) => ObjectStoreUrl::parse(url, s3).map_err(ConfigError)?,
            None => ObjectStoreUrl::Directory(data_dir.join("objects")),
        };
        let listen = options.listen.map(|Address(address)| address);
        let Address(default) = preset(l::LISTEN);
        let listeners = options.listener.unwrap_or_default();
        let listeners =
            listeners.resolve(listen, options.advertise, default).map_err(ConfigError)?;
        let oauth = Oauth::resolve(
            options.oauth_jwks,
            options.oauth_issuer,
            options.oauth_audience,
            options.oauth_scope,
            options.oauth_principal_claim,
            options.oauth_clock_skew,
        )?;
        let super_users = options.super_users.as_deref().unwrap_or_default().split(';');
        let super_users = super_users.map(str::trim).filter(|user| !user.is_empty());
        let super_users: Vec<_> = super_users.map(str::to_owned).collect();
        if let Some(user) = super_users.iter().find(|user| !user.starts_with("User:")) {
            return Err(ConfigError(format!(
                "super-users has `{user}`: a user is written as in User:admin, with semicolons between several"
            )));
        }
        let authorization = options.authorization.unwrap_or(false).then(|| AuthorizationConfig {
            super_users,
            allow_everyone_if_no_acl_found: options.allow_everyone_if_no_acl_found.unwrap_or(false),
        });
        let admin_listen = options.admin_listen.unwrap_or_else(|| preset(l::ADMIN_LISTEN));
        let config = Self {
            wal: options.wal.unwrap_or_else(|| data_dir.join("wal")),
            data_dir,
            listeners,
            session_lifetime: options.session_lifetime,
            oauth,
            authorization,
            wal_capacity: options.wal_capacity,
            wal_reserve: options.wal_reserve.unwrap_or(false),
            force_format: options.force_format,
            object_store,
            durability: options.durability.unwrap_or_default(),
            engine: options.engine.unwrap_or_default(),
            log_cache: options.log_cache.unwrap_or(l::LOG_CACHE),
            block_cache: options.block_cache.unwrap_or(l::BLOCK_CACHE),
            late_read_memory: options.late_read_memory.unwrap_or(l::LATE_READS),
            object_store_rate: options.object_store_rate,
            upload_size: options.upload_size,
            upload_interval: options.upload_interval.unwrap_or(l::UPLOAD_INTERVAL),
            compaction_size: options.compaction_size.unwrap_or(l::COMPACTION_SIZE),
            admin_listen: admin_listen.0,
            node_id: options.node_id.unwrap_or(l::NODE_ID),
            cluster_id: options.cluster_id,
            auto_create_topics: options.auto_create_topics.unwrap_or(true),
            default_partitions: options.default_partitions.unwrap_or(l::PARTITIONS),
            max_message_size: options.max_message_size.unwrap_or(l::MESSAGE),
            max_connections: options.max_connections.unwrap_or(l::CONNECTIONS),
            log: options.log.unwrap_or_else(|| l::LOG.into()),
        };
        config.check_bounds()?;
        config.check_reachable()?;
        config.check_exposure(options.allow_plaintext_network.unwrap_or(false))?;
        Ok(config)
    }

    fn check_bounds(&self) -> Result<(), ConfigError> {
        if let Some(capacity) = self.wal_capacity {
            within("wal-capacity", capacity, l::WAL_CAPACITY_MIN, l::WAL_CAPACITY_MAX)?;
            if !capacity.is_whole_pages() {
                return Err(ConfigError(format!(
                    "wal-capacity is {capacity}, which is not a multiple of 4KiB"
                )));
            }
        }
        within("log-cache", self.log_cache, l::LOG_CACHE_MIN, l::LOG_CACHE_MAX)?;
        within("block-cache", self.block_cache, l::BLOCK_CACHE_MIN, l::LATE_MAX)?;
        within("late-read-memory", self.late_read_memory, l::LATE_READS_MIN, l::LATE_MAX)?;
        if let Some(rate) = self.object_store_rate {
            within("object-store-rate", rate, l::RATE_MIN, l::RATE_MAX)?;
        }
        if let Some(size) = self.upload_size {
            let cache_bound = Size { bytes: self.log_cache.bytes / 2 };
            within("upload-size", size, l::UPLOAD_SIZE_MIN, cache_bound)?;
        }
        let (shortest, longest) = (l::UPLOAD_INTERVAL_MIN, l::UPLOAD_INTERVAL_MAX);
        within("upload-interval", self.upload_interval, shortest, longest)?;
        let (least, most) = (l::COMPACTION_SIZE_MIN, l::COMPACTION_SIZE_MAX);
        let size = self.compaction_size;
        if size.bytes > 0 && (size < least || size > most) {
            return Err(ConfigError(format!(
                "compaction-size is {size}, allowed are {least} to {most}, and 0 for no compaction"
            )));
        }
        if let Some(lifetime) = self.session_lifetime {
            within("session-lifetime", lifetime, l::SESSION_LIFETIME_MIN, l::SESSION_LIFETIME_MAX)?;
        }
        if let Some(oauth) = &self.oauth {
            within("oauth-clock-skew", oauth.clock_skew, l::SKEW_MIN, l::SKEW_MAX)?;
        }
        let tokens = |listener: &ListenerConfig| listener.sasl.contains(&Mechanism::OauthBearer);
        if self.oauth.is_none() && self.listeners.iter().any(tokens) {
            return Err(ConfigError(
                "a listener has OAUTHBEARER: say with oauth-jwks, oauth-issuer and oauth-audience which tokens are taken".into(),
            ));
        }
        within("node-id", self.node_id, 0, i32::MAX as u32)?;
        within("default-partitions", self.default_partitions, 1, 10_000)?;
        within("max-message-size", self.max_message_size, l::MESSAGE_MIN, l::MESSAGE_MAX)?;
        within("max-connections", self.max_connections, 1, l::CONNECTIONS_MAX)?;
        if let Some(id) = &self.cluster_id {
            within("cluster-id (number of characters)", id.chars().count(), 1, 249)?;
        }
        Ok(())
    }

    /// Clients are told an address to connect to, and "every address of this machine" is none.
    fn check_reachable(&self) -> Result<(), ConfigError> {
        let unreachable = |listener: &&ListenerConfig| {
            listener.listen.ip().is_unspecified() && listener.advertised_host.is_none()
        };
        match self.listeners.iter().find(unreachable) {
            Some(listener) => Err(ConfigError(format!(
                "listen is {}, which is no address that a client could connect to: name one with --advertise HOST:PORT, \
                 or `advertise` of listener {}",
                listener.listen, listener.name
            ))),
            None => Ok(()),
        }
    }

    /// Without authentication the loopback interface is the only protection there is, so leaving it takes a word of the operator.
    fn check_exposure(&self, allowed: bool) -> Result<(), ConfigError> {
        let open = self.listeners.iter().filter(|listener| !listener.is_protected());
        let open = open.map(|listener| (&*listener.name, "listen", listener.listen));
        let admin = self.admin_listen.map(|address| ("admin", "admin-listen", address));
        let mut exposed = open.chain(admin).filter(|(.., address)| !address.ip().is_loopback());
        match exposed.next().filter(|_| !allowed) {
            Some((name, option, address)) => Err(ConfigError(format!(
                "{option} is {address}, which the network can reach, and {name} lacks encryption or authentication: \
                 everybody who reaches it could read and write everything. Use 127.0.0.1, or TLS with \
                 authentication (docs/security.md), or give --allow-plaintext-network if the network is trusted"
            ))),
            None => Ok(()),
        }
    }
}

impl fmt::Display for ServeConfig {
    /// For the log: what is in effect, by the options' names. A default that depends on what else there is has no value yet.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or = |value: Option<String>, none: &str| value.unwrap_or_else(|| none.to_string());
        let listeners: Vec<_> = self.listeners.iter().map(ToString::to_string).collect();
        let capacity = or(self.wal_capacity.map(|size| size.to_string()), "default");
        let upload_size = or(self.upload_size.map(|size| size.to_string()), "default");
        let rate = or(self.object_store_rate.map(|size| size.to_string()), "none");
        let admin = or(self.admin_listen.map(|address| address.to_string()), "none");
        write!(
            f,
            "data-dir={} listeners={} wal={} wal-capacity={capacity} wal-reserve={} object-store={} durability={} \
             engine={} log-cache={} block-cache={} late-read-memory={} object-store-rate={rate} upload-size={upload_size} upload-interval={} compaction-size={} admin-listen={admin} node-id={} \
             auto-create-topics={} default-partitions={} max-message-size={} max-connections={}",
            self.data_dir.display(),
            listeners.join(","),
            self.wal.display(),
            self.wal_reserve,
            self.object_store,
            self.durability,
            self.engine,
            self.log_cache,
            self.block_cache,
            self.late_read_memory,
            self.upload_interval,
            self.compaction_size,
            self.node_id,
            self.auto_create_topics,
            self.default_partitions,
            self.max_message_size,
            self.max_connections,
        )
    }
}

impl ServeOptions {
    /// Each option from `self`, or else from `other`.
    fn or(self, other: Self) -> Self {
        Self {
            config: self.config.or(other.config),
            data_dir: self.data_dir.or(other.data_dir),
            listen: self.listen.or(other.listen),
            advertise: self.advertise.or(other.advertise),
            listener: self.listener.or(other.listener),
            session_lifetime: self.session_lifetime.or(other.session_lifetime),
            oauth_jwks: self.oauth_jwks.or(other.oauth_jwks),
            oauth_issuer: self.oauth_issuer.or(other.oauth_issuer),
            oauth_audience: self.oauth_audience.or(other.oauth_audience),
            oauth_scope: self.oauth_scope.or(other.oauth_scope),
            oauth_principal_claim: self.oauth_principal_claim.or(other.oauth_principal_claim),
            oauth_clock_skew: self.oauth_clock_skew.or(other.oauth_clock_skew),
            authorization: self.authorization.or(other.authorization),
            super_users: self.super_users.or(other.super_users),
            allow_everyone_if_no_acl_found: self
                .allow_everyone_if_no_acl_found
                .or(other.allow_everyone_if_no_acl_found),
            allow_plaintext_network: self.allow_plaintext_network.or(other.allow_plaintext_network),
            wal: self.wal.or(other.wal),
            wal_capacity: self.wal_capacity.or(other.wal_capacity),
            wal_reserve: self.wal_reserve.or(other.wal_reserve),
            force_format: self.force_format || other.force_format,
            object_store: self.object_store.or(other.object_store),
            s3_endpoint: self.s3_endpoint.or(other.s3_endpoint),
            s3_region: self.s3_region.or(other.s3_region),
            s3_path_style: self.s3_path_style.or(other.s3_path_style),
            s3_allow_http: self.s3_allow_http.or(other.s3_allow_http),
            s3_ca_file: self.s3_ca_file.or(other.s3_ca_file),
            durability: self.durability.or(other.durability),
            engine: self.engine.or(other.engine),
            log_cache: self.log_cache.or(other.log_cache),
            block_cache: self.block_cache.or(other.block_cache),
            late_read_memory: self.late_read_memory.or(other.late_read_memory),
            object_store_rate: self.object_store_rate.or(other.object_store_rate),
            upload_size: self.upload_size.or(other.upload_size),
            upload_interval: self.upload_interval.or(other.upload_interval),
            compaction_size: self.compaction_size.or(other.compaction_size),
            admin_listen: self.admin_listen.or(other.admin_listen),
            node_id: self.node_id.or(other.node_id),
            cluster_id: self.cluster_id.or(other.cluster_id),
            auto_create_topics: self.auto_create_topics.or(other.auto_create_topics),
            default_partitions: self.default_partitions.or(other.default_partitions),
            max_message_size: self.max_message_size.or(other.max_message_size),
            max_connections: self.max_connections.or(other.max_connections),
            log: self.log.or(other.log),
        }
    }
}

fn read_file(path: &Path) -> Result<ServeOptions, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| ConfigError(format!("configuration file {}: {error}", path.display())))?;
    toml::from_str(&text).map_err(|error| {
        let error = error.to_string();
        ConfigError(format!("configuration file {}: {}", path.display(), error.trim_end()))
    })
}

fn within<T: PartialOrd + Copy + fmt::Display>(
    option: &str,
    value: T,
    min: T,
    max: T,
) -> Result<(), ConfigError> {
    if value < min || value > max {
        return Err(ConfigError(format!("{option} is {value}, allowed are {min} to {max}")));
    }
    Ok(())
}

/// A default that is written as text, so that the help and the code agree.
fn preset<T: FromStr<Err = String>>(text: &str) -> T {
    text.parse().expect("the built-in default is valid")
}

/// For options whose type reads itself from a string.
pub(crate) fn from_text<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: fmt::Display>,
{
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

/// The same, for what has to be there.
pub(crate) fn required_text<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: fmt::Display>,
{
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, FromArgMatches};

    use super::*;

    fn flags(arguments: &[&str]) -> ServeOptions {
        let command = ServeOptions::augment_args(clap::Command::new("serve"));
        let matches = command
            .no_binary_name(true)
            .try_get_matches_from(arguments)
            .expect("the arguments are valid");
        ServeOptions::from_arg_matches(&matches).expect("the matches are complete")
    }

    fn file(text: &str) -> Result<ServeOptions, String> {
        toml::from_str(text).map_err(|error| error.to_string())
    }

    fn refused(arguments: &[&str]) -> String {
        ServeConfig::resolve(flags(arguments)).unwrap_err().to_string()
    }

    #[test]
    fn nothing_given_means_the_documented_defaults() {
        let config = ServeConfig::resolve(ServeOptions::default()).unwrap();
        assert_eq!(config.data_dir, Path::new("./data"));
        assert_eq!(config.wal, Path::new("./data/wal"));
        assert_eq!(config.object_store, ObjectStoreUrl::Directory("./data/objects".into()));
        let plaintext = ListenerConfig::plaintext("127.0.0.1:9092".parse().unwrap());
        assert_eq!(config.listeners, [plaintext]);
        assert_eq!(config.admin_listen, Some("127.0.0.1:9644".parse().unwrap()));
        assert_eq!((config.wal_capacity, config.upload_size), (None, None));
        assert_eq!(config.log_cache, Size::gib(1));
        assert_eq!(config.upload_interval, Span(std::time::Duration::from_secs(60)));
        assert_eq!((config.durability, config.engine), (Durability::Auto, Engine::Auto));
        assert!(config.auto_create_topics && !config.wal_reserve && !config.force_format);
    }

    #[test]
    fn a_flag_wins_over_the_file_and_the_file_over_the_default() {
        let file = file("node-id = 7\nlog-cache = \"64MiB\"\nadmin-listen = \"none\"").unwrap();
        let config = ServeConfig::resolve(flags(&["--node-id", "9"]).or(file)).unwrap();
        assert_eq!(config.node_id, 9);
        assert_eq!(config.log_cache, Size::mib(64));
        assert_eq!(config.admin_listen, None);
        assert_eq!(config.max_connections, limits::CONNECTIONS);
    }

    #[test]
    fn every_option_can_stand_in_the_file_under_its_own_name() {
        let text = r#"
            data-dir = "/srv/alluvium"
            listen = "[::1]:19092"
            advertise = "broker.example.org:9092"
            allow-plaintext-network = false
            wal = "/dev/vdb"
            wal-capacity = "4GiB"
            wal-reserve = true
            object-store = "s3://bucket/alluvium"
            s3-endpoint = "http://s3.example.org:9000"
            s3-region = "eu-central-1"
            s3-path-style = true
            s3-allow-http = true
            s3-ca-file = "/etc/ssl/own.pem"
            durability = "device"
            engine = "threads"
            log-cache = 1073741824
            block-cache = "32MiB"
            late-read-memory = "16MiB"
            object-store-rate = "100MiB"
            upload-size = "128MiB"
            upload-interval = "5m"
            compaction-size = 0
            admin-listen = "127.0.0.1:0"
            node-id = 3
            cluster-id = "test"
            auto-create-topics = false
            default-partitions = 6
            max-message-size = "2MiB"
            max-connections = 50
            log = "debug"
            session-lifetime = "1h"
            oauth-jwks = "https://issuer.example.org/keys"
            oauth-issuer = "https://issuer.example.org"
            oauth-audience = "kafka"
            oauth-scope = "kafka read"
            oauth-principal-claim = "sub"
            oauth-clock-skew = "10s"
            authorization = true
            super-users = "User:admin; User:CN=ops,O=example"
            allow-everyone-if-no-acl-found = true
            [[listener]]
            name = "tls"
            listen = "0.0.0.0:9093"
            advertise = "broker.example.org:9093"
            protocol = "SSL"
            tls-certificate = "server.pem"
            tls-key = "server.key"
            tls-client-auth = "required"
            tls-client-ca = "clients.pem"
            tls-principal-rules = "RULE:^CN=(.*?),.*$/$1/L, DEFAULT"
            [[listener]]
            name = "sasl"
            listen = "127.0.0.1:9094"
            protocol = "SASL_PLAINTEXT"
            sasl-mechanisms = ["PLAIN", "SCRAM-SHA-256", "OAUTHBEARER"]
        "#;
        let config = ServeConfig::resolve(file(text).unwrap()).unwrap();
        assert_eq!(config.wal, Path::new("/dev/vdb"));
        assert!(config.wal_reserve);
        assert_eq!(config.durability, Durability::Device);
        assert_eq!(config.engine, Engine::Threads);
        assert_eq!(config.log_cache, Size::gib(1));
        assert_eq!(config.compaction_size, Size { bytes: 0 });
        let [plaintext, tls, sasl] = &config.listeners[..] else { panic!("three listeners") };
        assert_eq!(sasl.sasl.len(), 3);
        let authorization = config.authorization.as_ref().unwrap();
        assert_eq!(authorization.super_users, ["User:admin", "User:CN=ops,O=example"]);
        assert_eq!(plaintext.advertised_host.as_deref(), Some("broker.example.org"));
        assert_eq!(tls.protocol(), "SSL");

        // All but the two that make no sense in a file.
        let options = ServeOptions::augment_args(clap::Command::new("serve"));
        for argument in options.get_arguments().filter_map(clap::Arg::get_long) {
            let begins = [format!("{argument} ="), format!("[[{argument}]]")];
            let in_file =
                text.lines().any(|line| begins.iter().any(|b| line.trim().starts_with(b)));
            let flag_only = ["config", "force-format"].contains(&argument);
            assert!(in_file != flag_only, "{argument}");
        }
    }

    #[test]
    fn the_documented_file_has_every_key_and_states_the_defaults() {
        let document = include_str!("../../../docs/configuration.md");
        let block = document.split("```toml\n").nth(1).expect("there is an example");
        let text = block.split("```").next().expect("it ends");
        let stated = ServeConfig::resolve(file(text).unwrap()).unwrap();
        assert_eq!(stated, ServeConfig::resolve(ServeOptions::default()).unwrap());

        // With its commented keys it is valid too, and nothing is missing.
        let uncommented = |line: &str| match line.strip_prefix('#') {
            Some(key) if !key.starts_with(' ') => format!("{key}\n"),
            _ => format!("{line}\n"),
        };
        let whole: String = text.lines().map(uncommented).collect();
        ServeConfig::resolve(file(&whole).unwrap()).unwrap();
        let keys: toml::Table = whole.parse().unwrap();
        let options = ServeOptions::augment_args(clap::Command::new("serve"));
        for argument in options.get_arguments().filter_map(clap::Arg::get_long) {
            let flag_only = ["config", "force-format"].contains(&argument);
            assert!(keys.contains_key(argument) != flag_only, "{argument}");
        }
    }

    #[test]
    fn an_unknown_key_in_the_file_is_an_error_that_names_it() {
        for key in ["wal_capacity", "force-format", "config", "lissen"] {
            let error = file(&format!("{key} = \"1\"")).unwrap_err();
            assert!(error.contains(key), "{error}");
        }
    }

    #[test]
    fn values_out_of_bounds_are_refused_by_name() {
        for (arguments, option) in [
            (["--wal-capacity", "1MiB"], "wal-capacity"),
            (["--log-cache", "1MiB"], "log-cache"),
            (["--block-cache", "1MiB"], "block-cache"),
            (["--late-read-memory", "1MiB"], "late-read-memory"),
            (["--object-store-rate", "1KiB"], "object-store-rate"),
            (["--upload-size", "600MiB"], "upload-size"),
            (["--upload-size", "1KiB"], "upload-size"),
            (["--upload-interval", "1ms"], "upload-interval"),
            (["--upload-interval", "25h"], "upload-interval"),
            (["--compaction-size", "1"], "compaction-size"),
            (["--compaction-size", "63KiB"], "compaction-size"),
            (["--compaction-size", "33GiB"], "compaction-size"),
            (["--node-id", "2147483648"], "node-id"),
            (["--default-partitions", "0"], "default-partitions"),
            (["--max-message-size", "9MiB"], "max-message-size"),
            (["--max-connections", "0"], "max-connections"),
            (["--cluster-id", ""], "cluster-id"),
        ] {
            let message = refused(&arguments);
            assert!(message.contains(option) && message.contains(" to "), "{message}");
        }
        let message = refused(&["--wal-capacity", "100000001"]);
        assert!(message.contains("wal-capacity") && message.contains("4KiB"), "{message}");
    }

    #[test]
    fn leaving_the_loopback_interface_takes_a_word_of_the_operator() {
        for option in ["--listen", "--admin-listen"] {
            for address in ["0.0.0.0:9092", "192.0.2.1:9092", "[::]:9092"] {
                let message = refused(&[option, address, "--advertise", "a:1"]);
                assert!(message.contains("--allow-plaintext-network"), "{message}");
            }
        }
        let allowed = flags(&["--listen", "192.0.2.1:9092", "--allow-plaintext-network"]);
        assert!(ServeConfig::resolve(allowed).is_ok());
        let taken_back = flags(&["--listen", "192.0.2.1:9092", "--allow-plaintext-network=false"]);
        assert!(ServeConfig::resolve(taken_back).is_err());
    }

    #[test]
    fn a_listener_with_tls_and_certificates_of_clients_may_leave_the_loopback_interface() {
        let tls = "name = 'x', listen = '0.0.0.0:1', advertise = 'a:1', protocol = 'SSL', tls-certificate = 'c', tls-key = 'k'";
        let mutual = format!("{{{tls}, tls-client-auth = 'required', tls-client-ca = 'ca'}}");
        let config = ServeConfig::resolve(flags(&["--listener", &mutual])).unwrap();
        // The port in plain text is there only if it is asked for, or alone.
        assert_eq!(config.listeners.len(), 1);
        let both = flags(&["--listener", &format!("[{mutual}]"), "--listen", "127.0.0.1:2"]);
        assert_eq!(ServeConfig::resolve(both).unwrap().listeners.len(), 2);
        let message = refused(&["--listener", &format!("{{{tls}}}")]);
        assert!(message.contains("--allow-plaintext-network"), "{message}");
        let optional = format!("{{{tls}, tls-client-auth = 'requested', tls-client-ca = 'ca'}}");
        let message = refused(&["--listener", &optional]);
        assert!(message.contains("--allow-plaintext-network"), "{message}");
        for (options, word) in [
            ("protocol = 'SSL'", "tls-certificate"),
            ("protocol = 'PLAINTEXT', tls-key = 'k'", "TLS"),
            (
                "protocol = 'SSL', tls-certificate = 'c', tls-key = 'k', tls-client-ca = 'ca'",
                "tls-client-auth",
            ),
            (
                "protocol = 'SSL', tls-certificate = 'c', tls-key = 'k', tls-client-auth = 'required'",
                "tls-client-ca",
            ),
        ] {
            let message = refused(&[
                "--listener",
                &format!("{{name = 'x', listen = '127.0.0.1:1', {options}}}"),
            ]);
            assert!(message.contains(word), "{message}");
        }
        for wrong in
            ["{name = 'x'}", "{nme = 'x'}", "x", "{name = 'x', listen = 'y', protocol = 'SSL'}"]
        {
            assert!(wrong.parse::<Listeners>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn security_options_that_would_do_something_else_are_refused() {
        for (arguments, word) in [
            (vec!["--super-users", "admin"], "User:admin"),
            (vec!["--super-users", "User:a,User:b;c"], "User:admin"),
            (vec!["--oauth-jwks", "keys.json"], "oauth-audience"),
            (
                vec!["--oauth-jwks", "http://a/k", "--oauth-issuer", "i", "--oauth-audience", "a"],
                "http://",
            ),
            (
                vec![
                    "--listener",
                    "{name='a', listen='127.0.0.1:1', protocol='SASL_PLAINTEXT', sasl-mechanisms=['OAUTHBEARER']}",
                ],
                "oauth-jwks",
            ),
            (
                vec![
                    "--listener",
                    "{name='a', listen='127.0.0.1:1', protocol='PLAINTEXT', sasl-mechanisms=['PLAIN']}",
                ],
                "SASL",
            ),
            (
                vec![
                    "--listener",
                    "{name='a', listen='127.0.0.1:1', protocol='SASL_PLAINTEXT', sasl-mechanisms=['GSSAPI']}",
                ],
                "GSSAPI",
            ),
            (
                vec!["--listener", "{name='a', listen='192.0.2.1:1', protocol='SASL_PLAINTEXT'}"],
                "--allow-plaintext-network",
            ),
            (vec!["--session-lifetime", "1ms"], "session-lifetime"),
        ] {
            let message = refused(&arguments);
            assert!(message.contains(word), "{message}");
        }
    }

    #[test]
    fn clients_need_an_address_to_connect_to() {
        let message = refused(&["--listen", "0.0.0.0:9092", "--allow-plaintext-network"]);
        assert!(message.contains("--advertise"), "{message}");
    }

    #[test]
    fn the_help_names_each_default_and_its_bounds() {
        let mut command = crate::cli::Cli::command();
        let serve = command.find_subcommand_mut("serve").expect("there is `serve`");
        let help = |long: &str| {
            let argument = serve
                .get_arguments()
                .find(|argument| argument.get_long() == Some(long))
                .unwrap_or_else(|| panic!("there is --{long}"));
            argument.get_help().expect("it has a help text").to_string()
        };
        let named: [(&str, Vec<String>); 15] = [
            ("data-dir", vec![l::DATA_DIR.into()]),
            ("listen", vec![l::LISTEN.into()]),
            ("admin-listen", vec![l::ADMIN_LISTEN.into()]),
            ("log", vec![l::LOG.into()]),
            ("node-id", vec![l::NODE_ID.to_string(), i32::MAX.to_string()]),
            ("wal-capacity", texts(&[l::WAL_CAPACITY, l::WAL_CAPACITY_MIN, l::WAL_CAPACITY_MAX])),
            ("log-cache", texts(&[l::LOG_CACHE, l::LOG_CACHE_MIN, l::LOG_CACHE_MAX])),
            ("block-cache", texts(&[l::BLOCK_CACHE, l::BLOCK_CACHE_MIN, l::LATE_MAX])),
            ("late-read-memory", texts(&[l::LATE_READS, l::LATE_READS_MIN, l::LATE_MAX])),
            ("upload-size", texts(&[l::UPLOAD_SIZE, l::UPLOAD_SIZE_MIN])),
            (
                "upload-interval",
                texts(&[l::UPLOAD_INTERVAL, l::UPLOAD_INTERVAL_MIN, l::UPLOAD_INTERVAL_MAX]),
            ),
            (
                "compaction-size",
                texts(&[l::COMPACTION_SIZE, l::COMPACTION_SIZE_MIN, l::COMPACTION_SIZE_MAX]),
            ),
            ("default-partitions", texts(&[l::PARTITIONS])),
            ("max-message-size", texts(&[l::MESSAGE, l::MESSAGE_MIN, l::MESSAGE_MAX])),
            ("max-connections", texts(&[l::CONNECTIONS, l::CONNECTIONS_MAX])),
        ];
        for (option, values) in named {
            let help = help(option);
            let default = format!("Default {}", values[0]);
            assert!(help.contains(&default), "--{option} does not say `{default}`: {help}");
            for bound in &values[1..] {
                assert!(help.contains(bound), "--{option} does not name {bound}: {help}");
            }
        }
        for argument in serve.get_arguments() {
            let Some(long) = argument.get_long().filter(|long| *long != "force-format") else {
                continue;
            };
            let help = argument.get_help().expect("it has a help text").to_string();
            assert!(help.contains("Default"), "--{long} states no default: {help}");
        }
    }

    fn texts<T: fmt::Display>(values: &[T]) -> Vec<String> {
        values.iter().map(ToString::to_string).collect()
    }
}
