//! The options of `alluvium serve` on the command line, in the environment and in the file.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use alluvium_device::{Durability, Engine};
use clap::Args;
use serde::{Deserialize, Deserializer};
use uuid::Uuid;

use super::ConfigError;
use crate::address::{Address, AdminListen, HostPort};
use crate::listeners::Listeners;
use crate::objects::store_id;
use crate::per_ip::PerIp;
use crate::units::{Size, Span};

/// The options of `alluvium serve` as written by the user.
#[derive(Args, Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct ServeOptions {
    /// Read options from this TOML file. An unknown key is an error. Default: none.
    #[arg(long, env = "ALLUVIUM_CONFIG", value_name = "FILE")]
    #[serde(skip)]
    pub(crate) config: Option<PathBuf>,

    /// Directory of the lock and, by default, of the write-ahead log and the objects; created if
    /// it does not exist. Default ./data.
    #[arg(long, env = "ALLUVIUM_DATA_DIR", value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,

    /// Serve what another server has uploaded to --object-store, to consumers only, and follow what
    /// it uploads later. Nothing is written to the object store, and there is neither a data
    /// directory nor a write-ahead log. docs/read-only.md. Default false.
    #[arg(long, env = "ALLUVIUM_READ_ONLY", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) read_only: Option<bool>,

    /// The store that a read-only server serves, if the object store has the catalogs of several
    /// servers; `alluvium catalog list` shows them. Default: the only one.
    #[arg(long, env = "ALLUVIUM_STORE", value_name = "ID", value_parser = store_id)]
    #[serde(deserialize_with = "from_text")]
    pub(crate) store: Option<Uuid>,

    /// Interval at which a read-only server looks for what was uploaded. Default 1s, 100ms to 1h.
    #[arg(long, env = "ALLUVIUM_CATALOG_POLL_INTERVAL", value_name = "TIME")]
    pub(crate) catalog_poll_interval: Option<Span>,

    /// Address of the plaintext Kafka port; port 0 selects a free one. An address other than
    /// loopback needs --allow-plaintext-network. Default 127.0.0.1:9092, or none if there is a
    /// --listener.
    #[arg(long, env = "ALLUVIUM_LISTEN", value_name = "ADDR:PORT")]
    #[serde(deserialize_with = "from_text")]
    pub(crate) listen: Option<Address>,

    /// Host name and port that are announced to clients. Default: the address of --listen.
    #[arg(long, env = "ALLUVIUM_ADVERTISE", value_name = "HOST:PORT")]
    #[serde(deserialize_with = "from_text")]
    pub(crate) advertise: Option<HostPort>,

    /// Further Kafka ports, with TLS and authentication: `{name = "tls", listen = "0.0.0.0:9093",
    /// protocol = "SSL", ...}`, several of these in brackets; in the file one `[[listener]]` each.
    /// docs/configuration.md lists their keys. Default none.
    #[arg(long, env = "ALLUVIUM_LISTENER", value_name = "{...}")]
    pub(crate) listener: Option<Listeners>,

    /// Time after which clients that have logged in by SASL have to do so again
    /// (`connections.max.reauth.ms`). Default none, 1s to 365 days.
    #[arg(long, env = "ALLUVIUM_SESSION_LIFETIME", value_name = "TIME")]
    pub(crate) session_lifetime: Option<Span>,

    /// For OAUTHBEARER: the keys that verify tokens, a JWKS document in a file or at an https://
    /// URL. Default none.
    #[arg(long, env = "ALLUVIUM_OAUTH_JWKS", value_name = "FILE|URL")]
    pub(crate) oauth_jwks: Option<String>,

    /// Required issuer of tokens (`iss`). Default none.
    #[arg(long, env = "ALLUVIUM_OAUTH_ISSUER", value_name = "TEXT")]
    pub(crate) oauth_issuer: Option<String>,

    /// Required audience of tokens (`aud`). Default none.
    #[arg(long, env = "ALLUVIUM_OAUTH_AUDIENCE", value_name = "TEXT")]
    pub(crate) oauth_audience: Option<String>,

    /// Required scopes of tokens, separated by spaces. Default none.
    #[arg(long, env = "ALLUVIUM_OAUTH_SCOPE", value_name = "TEXT")]
    pub(crate) oauth_scope: Option<String>,

    /// The claim that holds the user's name. Default sub.
    #[arg(long, env = "ALLUVIUM_OAUTH_PRINCIPAL_CLAIM", value_name = "NAME")]
    pub(crate) oauth_principal_claim: Option<String>,

    /// Tolerated difference between the clocks of this machine and of the issuer. Default 30s, 0s
    /// to 1h.
    #[arg(long, env = "ALLUVIUM_OAUTH_CLOCK_SKEW", value_name = "TIME")]
    pub(crate) oauth_clock_skew: Option<Span>,

    /// Check ACLs: operations that they do not allow are refused. Default false.
    #[arg(long, env = "ALLUVIUM_AUTHORIZATION", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) authorization: Option<bool>,

    /// Users with all rights, such as `User:admin;User:CN=ops,O=example` (`super.users`). Default
    /// none.
    #[arg(long, env = "ALLUVIUM_SUPER_USERS", value_name = "USERS")]
    pub(crate) super_users: Option<String>,

    /// Allow all operations to all users on a resource that has no ACL
    /// (`allow.everyone.if.no.acl.found`). Default false.
    #[arg(long, env = "ALLUVIUM_ALLOW_EVERYONE_IF_NO_ACL_FOUND", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) allow_everyone_if_no_acl_found: Option<bool>,

    /// Listen on the network without encryption or without authentication: everyone who can reach
    /// the port, or the path to it, can read and write everything. Default false.
    #[arg(long, env = "ALLUVIUM_ALLOW_PLAINTEXT_NETWORK", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) allow_plaintext_network: Option<bool>,

    /// The write-ahead log: a raw block device (/dev/...), or a file, which is created and written
    /// in full. Default: `wal` in the data directory.
    #[arg(long, env = "ALLUVIUM_WAL", value_name = "PATH")]
    pub(crate) wal: Option<PathBuf>,

    /// Size of a new write-ahead log. An existing log keeps its size regardless of this option;
    /// `alluvium wal resize` changes it, also while the server runs. Default 2GiB (of a block
    /// device: all of it), 64MiB to 16TiB.
    #[arg(long, env = "ALLUVIUM_WAL_CAPACITY", value_name = "SIZE")]
    pub(crate) wal_capacity: Option<Size>,

    /// Reserve the device of the write-ahead log for this machine, so that it refuses writes of an
    /// earlier server on another machine. Requires a whole SCSI disk or NVMe namespace with
    /// persistent reservations. The reservation stays when the server ends. Default false.
    #[arg(long, env = "ALLUVIUM_WAL_RESERVE", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) wal_reserve: Option<bool>,

    /// Format the write-ahead log although its target holds other data, which is lost. This command
    /// never formats an existing write-ahead log. Command line only.
    #[arg(long)]
    #[serde(skip)]
    pub(crate) force_format: bool,

    /// Object store for uploaded records: s3://bucket/prefix, file:///absolute/path, or memory://
    /// for trials (lost when the process ends). The credentials for S3 come from AWS_ACCESS_KEY_ID
    /// and AWS_SECRET_ACCESS_KEY, or from the machine. Default: `objects` in the data directory.
    #[arg(long, env = "ALLUVIUM_OBJECT_STORE", value_name = "URL")]
    pub(crate) object_store: Option<String>,

    /// S3 endpoint, if it is not AWS: `https://s3.example.org`. Default: AWS_ENDPOINT_URL_S3,
    /// AWS_ENDPOINT_URL, or AWS.
    #[arg(long, env = "ALLUVIUM_S3_ENDPOINT", value_name = "URL")]
    pub(crate) s3_endpoint: Option<String>,

    /// The bucket's region. Default: AWS_REGION, AWS_DEFAULT_REGION, or us-east-1.
    #[arg(long, env = "ALLUVIUM_S3_REGION", value_name = "NAME")]
    pub(crate) s3_region: Option<String>,

    /// Put the bucket into the path (`https://host/bucket`) instead of the host name
    /// (`https://bucket.host`). Default true with an endpoint, false at AWS.
    #[arg(long, env = "ALLUVIUM_S3_PATH_STYLE", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) s3_path_style: Option<bool>,

    /// Use an http:// endpoint that is not on loopback: everyone on the network path can read and
    /// change all records. Default false.
    #[arg(long, env = "ALLUVIUM_S3_ALLOW_HTTP", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) s3_allow_http: Option<bool>,

    /// Certificates (PEM) that are trusted in addition to the system's. Default: none.
    #[arg(long, env = "ALLUVIUM_S3_CA_FILE", value_name = "FILE")]
    pub(crate) s3_ca_file: Option<PathBuf>,

    /// What makes an acknowledged record durable: `dsync` = each write is followed by a flush or
    /// carries FUA; `device` = the device is relied on to keep completed writes, for disks with
    /// power-loss protection only; `auto` = dsync for every file and every device with a volatile
    /// write cache. Default auto.
    #[arg(long, env = "ALLUVIUM_DURABILITY", value_name = "auto|dsync|device")]
    #[serde(deserialize_with = "from_text")]
    pub(crate) durability: Option<Durability>,

    /// I/O engine of the device: io_uring, threads (where the kernel or the container refuses
    /// io_uring), or auto, which prefers io_uring. Default auto.
    #[arg(long, env = "ALLUVIUM_ENGINE", value_name = "auto|io_uring|threads")]
    #[serde(deserialize_with = "from_text")]
    pub(crate) engine: Option<Engine>,

    /// Memory for recent records: those that are not uploaded yet (while the object store is
    /// unreachable, at most this much is accepted), and uploaded ones that consumers at the tail
    /// read. Default 1GiB, 16MiB to 1TiB.
    #[arg(long, env = "ALLUVIUM_LOG_CACHE", value_name = "SIZE")]
    pub(crate) log_cache: Option<Size>,

    /// Memory for blocks that were read from objects. A quarter of it is available to read-ahead.
    /// Default 64MiB, 16MiB to 1TiB.
    #[arg(long, env = "ALLUVIUM_BLOCK_CACHE", value_name = "SIZE")]
    pub(crate) block_cache: Option<Size>,

    /// Memory for cold reads in flight, from objects to consumers. Default 128MiB, 8MiB to 1TiB.
    #[arg(long, env = "ALLUVIUM_COLD_READ_MEMORY", value_name = "SIZE")]
    pub(crate) cold_read_memory: Option<Size>,

    /// Directory of a cache on a local disk for blocks that were read from objects, kept across
    /// restarts; created if it does not exist, and used for nothing else. Its contents may be lost
    /// at any time. Default none.
    #[arg(long, env = "ALLUVIUM_DISK_CACHE", value_name = "DIR")]
    pub(crate) disk_cache: Option<PathBuf>,

    /// Disk space for --disk-cache. When it is full, the oldest blocks are evicted, except those
    /// that were read again. Default 16GiB, 128MiB to 16TiB.
    #[arg(long, env = "ALLUVIUM_DISK_CACHE_SIZE", value_name = "SIZE")]
    pub(crate) disk_cache_size: Option<Size>,

    /// Memory for --disk-cache: blocks that wait to be written or were written last; in addition it
    /// uses 21 to 43 bytes, at most 85, per block at the largest number of blocks so far. More
    /// memory means fewer open files. Default 128MiB, 16MiB and a 16384th of the disk space to
    /// 1TiB.
    #[arg(long, env = "ALLUVIUM_DISK_CACHE_MEMORY", value_name = "SIZE")]
    pub(crate) disk_cache_memory: Option<Size>,

    /// Limit on the traffic with the object store in bytes per second, both directions together;
    /// uploads take precedence over cold reads. Default none, 1MiB to 1TiB.
    #[arg(long, env = "ALLUVIUM_OBJECT_STORE_RATE", value_name = "SIZE")]
    pub(crate) object_store_rate: Option<Size>,

    /// Upload when this many bytes wait; at most a quarter of the write-ahead log and half of the
    /// log cache. Default 512MiB, or that limit if it is smaller; at least 1MiB.
    #[arg(long, env = "ALLUVIUM_UPLOAD_SIZE", value_name = "SIZE")]
    pub(crate) upload_size: Option<Size>,

    /// Longest time that appended records wait for an upload. Default 1m, 100ms to 24h.
    #[arg(long, env = "ALLUVIUM_UPLOAD_INTERVAL", value_name = "TIME")]
    pub(crate) upload_interval: Option<Span>,

    /// Largest payload of a partition that object compaction and log compaction put into one
    /// object. Parts of a partition below 8MiB, or below an eighth of this if that is less, are
    /// merged in the background; 0 disables object compaction. Default 256MiB, 64KiB to 32GiB or 0.
    #[arg(long, env = "ALLUVIUM_COMPACTION_SIZE", value_name = "SIZE")]
    pub(crate) compaction_size: Option<Size>,

    /// Interval of the checks of compacted topics for records to remove (`log.cleaner.backoff.ms`).
    /// Default 15s, 1ms to 24h.
    #[arg(long, env = "ALLUVIUM_LOG_COMPACTION_INTERVAL", value_name = "TIME")]
    pub(crate) log_compaction_interval: Option<Span>,

    /// Address for /metrics (Prometheus), /livez, /readyz and /healthz, or `none`. The rule of
    /// --listen about other addresses than loopback applies. Default 127.0.0.1:9644.
    #[arg(long, env = "ALLUVIUM_ADMIN_LISTEN", value_name = "ADDR:PORT|none")]
    #[serde(deserialize_with = "from_text")]
    pub(crate) admin_listen: Option<AdminListen>,

    /// ID of this server among the brokers (`node.id`), and in the header of the write-ahead log.
    /// Default 1, 0 to 2147483647.
    #[arg(long, env = "ALLUVIUM_NODE_ID", value_name = "N")]
    pub(crate) node_id: Option<u32>,

    /// Location of this server, as announced to clients (`broker.rack`). Default none, 1 to 249
    /// bytes.
    #[arg(long, env = "ALLUVIUM_RACK", value_name = "NAME")]
    pub(crate) rack: Option<String>,

    /// ID of the cluster. Default: the stored one, or a random one at the first start. 1 to 249
    /// characters.
    #[arg(long, env = "ALLUVIUM_CLUSTER_ID", value_name = "ID")]
    pub(crate) cluster_id: Option<String>,

    /// Create a topic when a client asks for one that does not exist (`auto.create.topics.enable`).
    /// Default true.
    #[arg(long, env = "ALLUVIUM_AUTO_CREATE_TOPICS", value_name = "BOOL")]
    pub(crate) auto_create_topics: Option<bool>,

    /// Number of partitions of a topic that is created without one (`num.partitions`). Default 1, 1
    /// to 10000.
    #[arg(long, env = "ALLUVIUM_DEFAULT_PARTITIONS", value_name = "N")]
    pub(crate) default_partitions: Option<u32>,

    /// Largest record batch (`message.max.bytes`). Default 1048588B, 1KiB to 8MiB.
    #[arg(long, env = "ALLUVIUM_MAX_MESSAGE_SIZE", value_name = "SIZE")]
    pub(crate) max_message_size: Option<Size>,

    /// Limit on open connections (`max.connections`, unlimited in Kafka); further ones are closed
    /// at once. Each uses 15KiB to 0.5MiB. Default 10000, 1 to 100000.
    #[arg(long, env = "ALLUVIUM_MAX_CONNECTIONS", value_name = "N")]
    pub(crate) max_connections: Option<u32>,

    /// Limit on open connections from one address (`max.connections.per.ip`). Default none, 1 to
    /// 2147483647.
    #[arg(long, env = "ALLUVIUM_MAX_CONNECTIONS_PER_IP", value_name = "N")]
    pub(crate) max_connections_per_ip: Option<u32>,

    /// Limits for single addresses, 0 refuses all: `10.0.0.1:500,10.0.0.2:0`
    /// (`max.connections.per.ip.overrides`). Default none.
    #[arg(long, env = "ALLUVIUM_MAX_CONNECTIONS_PER_IP_OVERRIDES", value_name = "IP:N,...")]
    #[serde(deserialize_with = "from_text")]
    pub(crate) max_connections_per_ip_overrides: Option<PerIp>,

    /// Time without a request after which a connection is closed (`connections.max.idle.ms`).
    /// Default 10m, 1s to 720h.
    #[arg(long, env = "ALLUVIUM_IDLE_TIMEOUT", value_name = "TIME")]
    pub(crate) idle_timeout: Option<Span>,

    /// Memory for requests that are being read and handled, except the first 64KiB of each; when it
    /// is used up, larger requests are not read until memory is free (`queued.max.request.bytes`).
    /// Default 256MiB, 100MiB to 1TiB.
    #[arg(long, env = "ALLUVIUM_QUEUED_REQUEST_MEMORY", value_name = "SIZE")]
    pub(crate) queued_request_memory: Option<Size>,

    /// Longest timeout of a producer's transactions (`transaction.max.timeout.ms`). Default 15m, 1s
    /// to 24h.
    #[arg(long, env = "ALLUVIUM_TRANSACTION_MAX_TIMEOUT", value_name = "TIME")]
    pub(crate) transaction_max_timeout: Option<Span>,

    /// Time after its last transaction after which a transactional ID is removed
    /// (`transactional.id.expiration.ms`); checked once an hour. Default 168h, 1h to 576h.
    #[arg(long, env = "ALLUVIUM_TRANSACTIONAL_ID_EXPIRATION", value_name = "TIME")]
    pub(crate) transactional_id_expiration: Option<Span>,

    /// Age at which a committed offset is removed, if its group has had no members for as long or
    /// its members do not subscribe to the topic (`offsets.retention.minutes`). Default 168h, 1m to
    /// 87600h.
    #[arg(long, env = "ALLUVIUM_OFFSETS_RETENTION", value_name = "TIME")]
    pub(crate) offsets_retention: Option<Span>,

    /// Longest metadata of a committed offset (`offset.metadata.max.bytes`). Default 4KiB, 0 to
    /// 32767B.
    #[arg(long, env = "ALLUVIUM_OFFSET_METADATA_MAX_SIZE", value_name = "SIZE")]
    pub(crate) offset_metadata_max_size: Option<Size>,

    /// Time that the first rebalance of an empty classic group waits for more members
    /// (`group.initial.rebalance.delay.ms`, 3s in Kafka). Default 0ms, up to 5m.
    #[arg(long, env = "ALLUVIUM_GROUP_INITIAL_REBALANCE_DELAY", value_name = "TIME")]
    pub(crate) group_initial_rebalance_delay: Option<Span>,

    /// Shortest session timeout of a member of a classic group (`group.min.session.timeout.ms`).
    /// Default 6s, 1ms to --group-max-session-timeout.
    #[arg(long, env = "ALLUVIUM_GROUP_MIN_SESSION_TIMEOUT", value_name = "TIME")]
    pub(crate) group_min_session_timeout: Option<Span>,

    /// Longest session timeout of a member of a classic group (`group.max.session.timeout.ms`).
    /// Default 30m, 1ms to 24h.
    #[arg(long, env = "ALLUVIUM_GROUP_MAX_SESSION_TIMEOUT", value_name = "TIME")]
    pub(crate) group_max_session_timeout: Option<Span>,

    /// Heartbeat interval of members of consumer groups (`group.consumer.heartbeat.interval.ms`).
    /// Default 5s, --group-consumer-min-heartbeat-interval to
    /// --group-consumer-max-heartbeat-interval.
    #[arg(long, env = "ALLUVIUM_GROUP_CONSUMER_HEARTBEAT_INTERVAL", value_name = "TIME")]
    pub(crate) group_consumer_heartbeat_interval: Option<Span>,

    /// Shortest heartbeat interval of a consumer group
    /// (`group.consumer.min.heartbeat.interval.ms`). Default 5s, 1ms to
    /// --group-consumer-heartbeat-interval.
    #[arg(long, env = "ALLUVIUM_GROUP_CONSUMER_MIN_HEARTBEAT_INTERVAL", value_name = "TIME")]
    pub(crate) group_consumer_min_heartbeat_interval: Option<Span>,

    /// Longest heartbeat interval of a consumer group (`group.consumer.max.heartbeat.interval.ms`).
    /// Default 15s, --group-consumer-heartbeat-interval to 24h.
    #[arg(long, env = "ALLUVIUM_GROUP_CONSUMER_MAX_HEARTBEAT_INTERVAL", value_name = "TIME")]
    pub(crate) group_consumer_max_heartbeat_interval: Option<Span>,

    /// Time without a heartbeat after which a member of a consumer group is removed
    /// (`group.consumer.session.timeout.ms`). Default 45s, --group-consumer-min-session-timeout to
    /// --group-consumer-max-session-timeout, more than --group-consumer-heartbeat-interval.
    #[arg(long, env = "ALLUVIUM_GROUP_CONSUMER_SESSION_TIMEOUT", value_name = "TIME")]
    pub(crate) group_consumer_session_timeout: Option<Span>,

    /// Shortest session timeout of a consumer group (`group.consumer.min.session.timeout.ms`).
    /// Default 45s, 1ms to --group-consumer-session-timeout.
    #[arg(long, env = "ALLUVIUM_GROUP_CONSUMER_MIN_SESSION_TIMEOUT", value_name = "TIME")]
    pub(crate) group_consumer_min_session_timeout: Option<Span>,

    /// Longest session timeout of a consumer group (`group.consumer.max.session.timeout.ms`).
    /// Default 1m, --group-consumer-session-timeout to 24h.
    #[arg(long, env = "ALLUVIUM_GROUP_CONSUMER_MAX_SESSION_TIMEOUT", value_name = "TIME")]
    pub(crate) group_consumer_max_session_timeout: Option<Span>,

    /// Heartbeat interval of members of share groups (`group.share.heartbeat.interval.ms`). Default
    /// 5s, --group-share-min-heartbeat-interval to --group-share-max-heartbeat-interval.
    #[arg(long, env = "ALLUVIUM_GROUP_SHARE_HEARTBEAT_INTERVAL", value_name = "TIME")]
    pub(crate) group_share_heartbeat_interval: Option<Span>,

    /// Shortest heartbeat interval of a share group (`group.share.min.heartbeat.interval.ms`).
    /// Default 5s, 1ms to --group-share-heartbeat-interval.
    #[arg(long, env = "ALLUVIUM_GROUP_SHARE_MIN_HEARTBEAT_INTERVAL", value_name = "TIME")]
    pub(crate) group_share_min_heartbeat_interval: Option<Span>,

    /// Longest heartbeat interval of a share group (`group.share.max.heartbeat.interval.ms`).
    /// Default 15s, --group-share-heartbeat-interval to 24h.
    #[arg(long, env = "ALLUVIUM_GROUP_SHARE_MAX_HEARTBEAT_INTERVAL", value_name = "TIME")]
    pub(crate) group_share_max_heartbeat_interval: Option<Span>,

    /// Time without a heartbeat after which a member of a share group is removed
    /// (`group.share.session.timeout.ms`). Default 45s, --group-share-min-session-timeout to
    /// --group-share-max-session-timeout, more than --group-share-heartbeat-interval.
    #[arg(long, env = "ALLUVIUM_GROUP_SHARE_SESSION_TIMEOUT", value_name = "TIME")]
    pub(crate) group_share_session_timeout: Option<Span>,

    /// Shortest session timeout of a share group (`group.share.min.session.timeout.ms`). Default
    /// 45s, 1ms to --group-share-session-timeout.
    #[arg(long, env = "ALLUVIUM_GROUP_SHARE_MIN_SESSION_TIMEOUT", value_name = "TIME")]
    pub(crate) group_share_min_session_timeout: Option<Span>,

    /// Longest session timeout of a share group (`group.share.max.session.timeout.ms`). Default 1m,
    /// --group-share-session-timeout to 24h.
    #[arg(long, env = "ALLUVIUM_GROUP_SHARE_MAX_SESSION_TIMEOUT", value_name = "TIME")]
    pub(crate) group_share_max_session_timeout: Option<Span>,

    /// Largest number of members of a classic or consumer group (`group.max.size`,
    /// `group.consumer.max.size`, unlimited in Kafka). Default 5000, 1 to 1000000.
    #[arg(long, env = "ALLUVIUM_GROUP_MAX_SIZE", value_name = "N")]
    pub(crate) group_max_size: Option<u32>,

    /// Interval of the checks for expired committed offsets, and for groups with neither members
    /// nor offsets (`offsets.retention.check.interval.ms`). Default 10m, 1s to 24h.
    #[arg(long, env = "ALLUVIUM_OFFSETS_RETENTION_CHECK_INTERVAL", value_name = "TIME")]
    pub(crate) offsets_retention_check_interval: Option<Span>,

    /// Log level: error, warn, info, debug, trace, or a filter such as
    /// `info,alluvium_stream=debug`. Default info.
    #[arg(long, env = "ALLUVIUM_LOG", value_name = "LEVEL")]
    pub(crate) log: Option<String>,
}

impl ServeOptions {
    /// Takes each option from `self`, and otherwise from `other`.
    pub(super) fn or(self, other: Self) -> Self {
        Self {
            config: self.config.or(other.config),
            data_dir: self.data_dir.or(other.data_dir),
            read_only: self.read_only.or(other.read_only),
            store: self.store.or(other.store),
            catalog_poll_interval: self.catalog_poll_interval.or(other.catalog_poll_interval),
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
            cold_read_memory: self.cold_read_memory.or(other.cold_read_memory),
            disk_cache: self.disk_cache.or(other.disk_cache),
            disk_cache_size: self.disk_cache_size.or(other.disk_cache_size),
            disk_cache_memory: self.disk_cache_memory.or(other.disk_cache_memory),
            object_store_rate: self.object_store_rate.or(other.object_store_rate),
            upload_size: self.upload_size.or(other.upload_size),
            upload_interval: self.upload_interval.or(other.upload_interval),
            compaction_size: self.compaction_size.or(other.compaction_size),
            log_compaction_interval: self.log_compaction_interval.or(other.log_compaction_interval),
            admin_listen: self.admin_listen.or(other.admin_listen),
            node_id: self.node_id.or(other.node_id),
            rack: self.rack.or(other.rack),
            cluster_id: self.cluster_id.or(other.cluster_id),
            auto_create_topics: self.auto_create_topics.or(other.auto_create_topics),
            default_partitions: self.default_partitions.or(other.default_partitions),
            max_message_size: self.max_message_size.or(other.max_message_size),
            max_connections: self.max_connections.or(other.max_connections),
            max_connections_per_ip: self.max_connections_per_ip.or(other.max_connections_per_ip),
            max_connections_per_ip_overrides: self
                .max_connections_per_ip_overrides
                .or(other.max_connections_per_ip_overrides),
            idle_timeout: self.idle_timeout.or(other.idle_timeout),
            queued_request_memory: self.queued_request_memory.or(other.queued_request_memory),
            transaction_max_timeout: self.transaction_max_timeout.or(other.transaction_max_timeout),
            transactional_id_expiration: self
                .transactional_id_expiration
                .or(other.transactional_id_expiration),
            offsets_retention: self.offsets_retention.or(other.offsets_retention),
            offset_metadata_max_size: self
                .offset_metadata_max_size
                .or(other.offset_metadata_max_size),
            group_initial_rebalance_delay: self
                .group_initial_rebalance_delay
                .or(other.group_initial_rebalance_delay),
            group_min_session_timeout: self
                .group_min_session_timeout
                .or(other.group_min_session_timeout),
            group_max_session_timeout: self
                .group_max_session_timeout
                .or(other.group_max_session_timeout),
            group_consumer_heartbeat_interval: self
                .group_consumer_heartbeat_interval
                .or(other.group_consumer_heartbeat_interval),
            group_consumer_min_heartbeat_interval: self
                .group_consumer_min_heartbeat_interval
                .or(other.group_consumer_min_heartbeat_interval),
            group_consumer_max_heartbeat_interval: self
                .group_consumer_max_heartbeat_interval
                .or(other.group_consumer_max_heartbeat_interval),
            group_consumer_session_timeout: self
                .group_consumer_session_timeout
                .or(other.group_consumer_session_timeout),
            group_consumer_min_session_timeout: self
                .group_consumer_min_session_timeout
                .or(other.group_consumer_min_session_timeout),
            group_consumer_max_session_timeout: self
                .group_consumer_max_session_timeout
                .or(other.group_consumer_max_session_timeout),
            group_share_heartbeat_interval: self
                .group_share_heartbeat_interval
                .or(other.group_share_heartbeat_interval),
            group_share_min_heartbeat_interval: self
                .group_share_min_heartbeat_interval
                .or(other.group_share_min_heartbeat_interval),
            group_share_max_heartbeat_interval: self
                .group_share_max_heartbeat_interval
                .or(other.group_share_max_heartbeat_interval),
            group_share_session_timeout: self
                .group_share_session_timeout
                .or(other.group_share_session_timeout),
            group_share_min_session_timeout: self
                .group_share_min_session_timeout
                .or(other.group_share_min_session_timeout),
            group_share_max_session_timeout: self
                .group_share_max_session_timeout
                .or(other.group_share_max_session_timeout),
            group_max_size: self.group_max_size.or(other.group_max_size),
            offsets_retention_check_interval: self
                .offsets_retention_check_interval
                .or(other.offsets_retention_check_interval),
            log: self.log.or(other.log),
        }
    }
}

pub(super) fn read_file(path: &Path) -> Result<ServeOptions, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| ConfigError(format!("configuration file {}: {error}", path.display())))?;
    toml::from_str(&text).map_err(|error| {
        let error = error.to_string();
        ConfigError(format!("configuration file {}: {}", path.display(), error.trim_end()))
    })
}

/// Deserializes an optional value whose type parses a string.
pub(crate) fn from_text<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: fmt::Display>,
{
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

/// Deserializes a required value whose type parses a string.
pub(crate) fn required_text<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: fmt::Display>,
{
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(serde::de::Error::custom)
}
