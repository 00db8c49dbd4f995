//! Configuration of `alluvium serve`: command line over environment over file over default.
//!
//! [`ServeOptions`] is what an operator may write, each field optional: parsed once from the
//! command line and the environment, and once from the file. [`ServeConfig`] is the result,
//! complete and checked. No value is adjusted silently; a value out of bounds is an error.

mod groups;
mod options;
mod read_only;
mod security;

use std::fmt;
use std::net::SocketAddr;
use std::path::{PathBuf, absolute};
use std::str::FromStr;
use std::time::Duration;

use alluvium_device::{Durability, Engine};

pub(crate) use self::groups::GroupTimes;
pub(crate) use self::options::{ServeOptions, from_text, required_text};
pub(crate) use self::read_only::ReadOnly;
pub(crate) use self::security::{Oauth, Security};
use crate::objects::{ObjectStoreUrl, S3Settings};
use crate::per_ip::PerIp;
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
    pub(crate) const COLD_READS: Size = Size::mib(128);
    pub(crate) const COLD_READS_MIN: Size = Size::mib(8);
    pub(crate) const READ_MEMORY_MAX: Size = Size::tib(1);

    pub(crate) const DISK_CACHE: Size = Size::gib(16);
    pub(crate) const DISK_CACHE_MIN: Size = Size::mib(128);
    pub(crate) const DISK_CACHE_MAX: Size = Size::tib(16);
    pub(crate) const DISK_CACHE_MEMORY: Size = Size::mib(128);
    pub(crate) const DISK_CACHE_MEMORY_MIN: Size = Size::mib(16);
    /// The memory is at least this fraction of the size on disk; with less, there would be more
    /// journals than a cache can have.
    pub(crate) const DISK_CACHE_MEMORY_PART: u64 = 16_384;

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
    pub(crate) const CATALOG_POLL: Span = Span(Duration::from_secs(1));
    pub(crate) const CATALOG_POLL_MIN: Span = Span(Duration::from_millis(100));
    pub(crate) const CATALOG_POLL_MAX: Span = Span(Duration::from_secs(3600));
    pub(crate) const CLEANER_INTERVAL: Span = Span(Duration::from_secs(15));
    pub(crate) const CLEANER_INTERVAL_MIN: Span = Span(Duration::from_millis(1));
    pub(crate) const CLEANER_INTERVAL_MAX: Span = Span(Duration::from_secs(24 * 3600));

    pub(crate) const SESSION_LIFETIME_MIN: Span = Span(Duration::from_secs(1));
    pub(crate) const SESSION_LIFETIME_MAX: Span = Span(Duration::from_secs(365 * 86_400));
    pub(crate) const SKEW: Span = Span(Duration::from_secs(30));
    pub(crate) const SKEW_MIN: Span = Span(Duration::ZERO);
    pub(crate) const SKEW_MAX: Span = Span(Duration::from_secs(3600));

    pub(crate) const TRANSACTION: Span = Span(Duration::from_secs(15 * 60));
    pub(crate) const TRANSACTION_MIN: Span = Span(Duration::from_secs(1));
    pub(crate) const TRANSACTION_MAX: Span = Span(Duration::from_secs(24 * 3600));
    pub(crate) const TRANSACTIONAL_ID: Span = Span(Duration::from_secs(7 * 86_400));
    /// The interval of the expiration task.
    pub(crate) const TRANSACTIONAL_ID_MIN: Span = Span(Duration::from_secs(3600));
    /// Kafka represents it in milliseconds of 32 bits.
    pub(crate) const TRANSACTIONAL_ID_MAX: Span = Span(Duration::from_secs(24 * 86_400));
    pub(crate) const OFFSETS: Span = Span(Duration::from_secs(7 * 86_400));
    pub(crate) const OFFSETS_MIN: Span = Span(Duration::from_secs(60));
    pub(crate) const OFFSETS_MAX: Span = Span(Duration::from_secs(3650 * 86_400));
    pub(crate) const OFFSETS_CHECK: Span = Span(Duration::from_secs(600));
    pub(crate) const OFFSETS_CHECK_MIN: Span = Span(Duration::from_secs(1));
    pub(crate) const OFFSETS_CHECK_MAX: Span = Span(Duration::from_secs(24 * 3600));
    pub(crate) const GROUP_SIZE: u32 = 5000;
    pub(crate) const GROUP_SIZE_MAX: u32 = 1_000_000;
    pub(crate) const OFFSET_METADATA: Size = Size::kib(4);
    pub(crate) const OFFSET_METADATA_MAX: Size = Size { bytes: i16::MAX as u64 };
    pub(crate) const REBALANCE_DELAY: Span = Span(Duration::ZERO);
    pub(crate) const REBALANCE_DELAY_MAX: Span = Span(Duration::from_secs(300));
    pub(crate) const SESSION_LEAST: Span = Span(Duration::from_secs(6));
    pub(crate) const SESSION_GREATEST: Span = Span(Duration::from_secs(30 * 60));
    pub(crate) const SESSION_MIN: Span = Span(Duration::from_millis(1));
    pub(crate) const SESSION_MAX: Span = Span(Duration::from_secs(24 * 3600));

    pub(crate) const PARTITIONS: u32 = 1;
    pub(crate) const CONNECTIONS: u32 = 10_000;
    pub(crate) const CONNECTIONS_MAX: u32 = 100_000;
    pub(crate) const IDLE: Span = Span(Duration::from_secs(600));
    pub(crate) const IDLE_MIN: Span = Span(Duration::from_secs(1));
    pub(crate) const IDLE_MAX: Span = Span(Duration::from_secs(30 * 86_400));
    pub(crate) const QUEUED_REQUESTS: Size = Size::mib(256);
    /// The size of the largest request.
    pub(crate) const QUEUED_REQUESTS_MIN: Size = Size::mib(100);
    pub(crate) const QUEUED_REQUESTS_MAX: Size = Size::tib(1);
    pub(crate) const MESSAGE: Size = Size { bytes: 1_048_588 };
    pub(crate) const MESSAGE_MIN: Size = Size::kib(1);
    pub(crate) const MESSAGE_MAX: Size = Size::mib(8);
}
use limits as l;

/// Configuration of the server, complete and within bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServeConfig {
    /// `None`: this server writes.
    pub(crate) read_only: Option<ReadOnly>,
    pub(crate) data_dir: PathBuf,
    pub(crate) security: Security,
    pub(crate) wal: PathBuf,
    /// `None`: an existing log keeps its size, a new file gets [`limits::WAL_CAPACITY`], a block
    /// device is used in full.
    pub(crate) wal_capacity: Option<Size>,
    pub(crate) wal_reserve: bool,
    pub(crate) force_format: bool,
    pub(crate) object_store: ObjectStoreUrl,
    pub(crate) durability: Durability,
    pub(crate) engine: Engine,
    pub(crate) log_cache: Size,
    pub(crate) block_cache: Size,
    pub(crate) cold_read_memory: Size,
    /// A directory. `None`: no disk cache.
    pub(crate) disk_cache: Option<PathBuf>,
    pub(crate) disk_cache_size: Size,
    pub(crate) disk_cache_memory: Size,
    /// Bytes per second; `None`: no limit.
    pub(crate) object_store_rate: Option<Size>,
    /// `None`: as large as the other sizes allow, at most [`limits::UPLOAD_SIZE`].
    pub(crate) upload_size: Option<Size>,
    pub(crate) upload_interval: Span,
    /// 0 bytes: no compaction.
    pub(crate) compaction_size: Size,
    pub(crate) log_compaction_interval: Span,
    pub(crate) admin_listen: Option<SocketAddr>,
    pub(crate) node_id: u32,
    pub(crate) rack: Option<String>,
    pub(crate) cluster_id: Option<String>,
    pub(crate) auto_create_topics: bool,
    pub(crate) default_partitions: u32,
    pub(crate) max_message_size: Size,
    pub(crate) max_connections: u32,
    /// `None`: no limit.
    pub(crate) max_connections_per_ip: Option<u32>,
    pub(crate) max_connections_per_ip_overrides: PerIp,
    pub(crate) idle_timeout: Span,
    pub(crate) queued_request_memory: Size,
    pub(crate) transaction_max_timeout: Span,
    pub(crate) transactional_id_expiration: Span,
    pub(crate) offsets_retention: Span,
    pub(crate) offset_metadata_max_size: Size,
    pub(crate) group_initial_rebalance_delay: Span,
    pub(crate) group_min_session_timeout: Span,
    pub(crate) group_max_session_timeout: Span,
    pub(crate) group_times: GroupTimes,
    pub(crate) group_max_size: u32,
    pub(crate) offsets_retention_check_interval: Span,
    pub(crate) log: String,
}

/// An invalid configuration; the message names the option and what is allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct ConfigError(String);

impl ServeConfig {
    /// Adds the file that `options` names, then the defaults, and checks the bounds.
    ///
    /// # Errors
    /// A file that cannot be read, an unknown key, a value out of bounds.
    pub(crate) fn load(options: ServeOptions) -> Result<Self, ConfigError> {
        let file = match &options.config {
            Some(path) => options::read_file(path)?,
            None => ServeOptions::default(),
        };
        Self::resolve(options.or(file))
    }

    fn resolve(options: ServeOptions) -> Result<Self, ConfigError> {
        let security = Security::resolve(&options)?;
        let read_only = ReadOnly::resolve(&options)?;
        let group_times = GroupTimes::of(&options);
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
        let admin_listen = options.admin_listen.unwrap_or_else(|| preset(l::ADMIN_LISTEN));
        if read_only.is_some() {
            ReadOnly::check(&object_store)?;
        }
        let config = Self {
            wal: options.wal.unwrap_or_else(|| data_dir.join("wal")),
            auto_create_topics: options.auto_create_topics.unwrap_or(read_only.is_none()),
            read_only,
            data_dir,
            security,
            wal_capacity: options.wal_capacity,
            wal_reserve: options.wal_reserve.unwrap_or(false),
            force_format: options.force_format,
            object_store,
            durability: options.durability.unwrap_or_default(),
            engine: options.engine.unwrap_or_default(),
            log_cache: options.log_cache.unwrap_or(l::LOG_CACHE),
            block_cache: options.block_cache.unwrap_or(l::BLOCK_CACHE),
            cold_read_memory: options.cold_read_memory.unwrap_or(l::COLD_READS),
            disk_cache: options.disk_cache,
            disk_cache_size: options.disk_cache_size.unwrap_or(l::DISK_CACHE),
            disk_cache_memory: options.disk_cache_memory.unwrap_or(l::DISK_CACHE_MEMORY),
            object_store_rate: options.object_store_rate,
            upload_size: options.upload_size,
            upload_interval: options.upload_interval.unwrap_or(l::UPLOAD_INTERVAL),
            compaction_size: options.compaction_size.unwrap_or(l::COMPACTION_SIZE),
            log_compaction_interval: options.log_compaction_interval.unwrap_or(l::CLEANER_INTERVAL),
            admin_listen: admin_listen.0,
            node_id: options.node_id.unwrap_or(l::NODE_ID),
            rack: options.rack,
            cluster_id: options.cluster_id,
            default_partitions: options.default_partitions.unwrap_or(l::PARTITIONS),
            max_message_size: options.max_message_size.unwrap_or(l::MESSAGE),
            max_connections: options.max_connections.unwrap_or(l::CONNECTIONS),
            max_connections_per_ip: options.max_connections_per_ip,
            max_connections_per_ip_overrides: options
                .max_connections_per_ip_overrides
                .unwrap_or_default(),
            idle_timeout: options.idle_timeout.unwrap_or(l::IDLE),
            queued_request_memory: options.queued_request_memory.unwrap_or(l::QUEUED_REQUESTS),
            transaction_max_timeout: options.transaction_max_timeout.unwrap_or(l::TRANSACTION),
            transactional_id_expiration: options
                .transactional_id_expiration
                .unwrap_or(l::TRANSACTIONAL_ID),
            offsets_retention: options.offsets_retention.unwrap_or(l::OFFSETS),
            offset_metadata_max_size: options
                .offset_metadata_max_size
                .unwrap_or(l::OFFSET_METADATA),
            group_initial_rebalance_delay: options
                .group_initial_rebalance_delay
                .unwrap_or(l::REBALANCE_DELAY),
            group_min_session_timeout: options
                .group_min_session_timeout
                .unwrap_or(l::SESSION_LEAST),
            group_max_session_timeout: options
                .group_max_session_timeout
                .unwrap_or(l::SESSION_GREATEST),
            group_times,
            group_max_size: options.group_max_size.unwrap_or(l::GROUP_SIZE),
            offsets_retention_check_interval: options
                .offsets_retention_check_interval
                .unwrap_or(l::OFFSETS_CHECK),
            log: options.log.unwrap_or_else(|| l::LOG.into()),
        };
        config.check_bounds()?;
        let exposed = options.allow_plaintext_network.unwrap_or(false);
        config.security.check_exposure(config.admin_listen, exposed)?;
        Ok(config)
    }

    fn check_bounds(&self) -> Result<(), ConfigError> {
        if let Some(capacity) = self.wal_capacity {
            check_wal_capacity(capacity)?;
        }
        within("log-cache", self.log_cache, l::LOG_CACHE_MIN, l::LOG_CACHE_MAX)?;
        within("block-cache", self.block_cache, l::BLOCK_CACHE_MIN, l::READ_MEMORY_MAX)?;
        within("cold-read-memory", self.cold_read_memory, l::COLD_READS_MIN, l::READ_MEMORY_MAX)?;
        self.check_disk_cache()?;
        if let Some(rate) = self.object_store_rate {
            within("object-store-rate", rate, l::RATE_MIN, l::RATE_MAX)?;
        }
        if let Some(size) = self.upload_size {
            let cache_bound = Size { bytes: self.log_cache.bytes / 2 };
            within("upload-size", size, l::UPLOAD_SIZE_MIN, cache_bound)?;
        }
        let (shortest, longest) = (l::UPLOAD_INTERVAL_MIN, l::UPLOAD_INTERVAL_MAX);
        within("upload-interval", self.upload_interval, shortest, longest)?;
        let (shortest, longest) = (l::CLEANER_INTERVAL_MIN, l::CLEANER_INTERVAL_MAX);
        within("log-compaction-interval", self.log_compaction_interval, shortest, longest)?;
        let (least, most) = (l::COMPACTION_SIZE_MIN, l::COMPACTION_SIZE_MAX);
        let size = self.compaction_size;
        if size.bytes > 0 && (size < least || size > most) {
            return Err(ConfigError(format!(
                "compaction-size is {size}, but must be {least} to {most}, or 0 for no compaction"
            )));
        }
        within("node-id", self.node_id, 0, i32::MAX as u32)?;
        within("default-partitions", self.default_partitions, 1, 10_000)?;
        within("max-message-size", self.max_message_size, l::MESSAGE_MIN, l::MESSAGE_MAX)?;
        within("max-connections", self.max_connections, 1, l::CONNECTIONS_MAX)?;
        if let Some(connections) = self.max_connections_per_ip {
            within("max-connections-per-ip", connections, 1, i32::MAX as u32)?;
        }
        let overrides = self.max_connections_per_ip_overrides.0.len();
        within("max-connections-per-ip-overrides (number)", overrides, 0, 10_000)?;
        within("idle-timeout", self.idle_timeout, l::IDLE_MIN, l::IDLE_MAX)?;
        let queued = self.queued_request_memory;
        within("queued-request-memory", queued, l::QUEUED_REQUESTS_MIN, l::QUEUED_REQUESTS_MAX)?;
        let timeout = self.transaction_max_timeout;
        within("transaction-max-timeout", timeout, l::TRANSACTION_MIN, l::TRANSACTION_MAX)?;
        let (expiration, least) = (self.transactional_id_expiration, l::TRANSACTIONAL_ID_MIN);
        within("transactional-id-expiration", expiration, least, l::TRANSACTIONAL_ID_MAX)?;
        within("offsets-retention", self.offsets_retention, l::OFFSETS_MIN, l::OFFSETS_MAX)?;
        let (metadata, most) = (self.offset_metadata_max_size, l::OFFSET_METADATA_MAX);
        within("offset-metadata-max-size", metadata, Size { bytes: 0 }, most)?;
        let (delay, most) = (self.group_initial_rebalance_delay, l::REBALANCE_DELAY_MAX);
        within("group-initial-rebalance-delay", delay, Span(Duration::ZERO), most)?;
        let (least, greatest) = (self.group_min_session_timeout, self.group_max_session_timeout);
        within("group-max-session-timeout", greatest, l::SESSION_MIN, l::SESSION_MAX)?;
        within("group-min-session-timeout", least, l::SESSION_MIN, greatest)?;
        self.group_times.check()?;
        within("group-max-size", self.group_max_size, 1, l::GROUP_SIZE_MAX)?;
        let check = self.offsets_retention_check_interval;
        let option = "offsets-retention-check-interval";
        within(option, check, l::OFFSETS_CHECK_MIN, l::OFFSETS_CHECK_MAX)?;
        if let Some(rack) = &self.rack {
            within("rack (number of bytes)", rack.len(), 1, 249)?;
        }
        if let Some(id) = &self.cluster_id {
            within("cluster-id (number of characters)", id.chars().count(), 1, 249)?;
        }
        Ok(())
    }

    fn check_disk_cache(&self) -> Result<(), ConfigError> {
        let size = self.disk_cache_size;
        within("disk-cache-size", size, l::DISK_CACHE_MIN, l::DISK_CACHE_MAX)?;
        let part = Size { bytes: size.bytes / l::DISK_CACHE_MEMORY_PART };
        let least = l::DISK_CACHE_MEMORY_MIN.max(part);
        within("disk-cache-memory", self.disk_cache_memory, least, l::READ_MEMORY_MAX)?;
        let Some(directory) = &self.disk_cache else { return Ok(()) };
        let objects = match &self.object_store {
            ObjectStoreUrl::Directory(objects) => Some(objects),
            ObjectStoreUrl::Memory | ObjectStoreUrl::S3(_) => None,
        };
        let is_it = |other: &PathBuf| match (absolute(directory), absolute(other)) {
            (Ok(directory), Ok(other)) => directory == other,
            _ => false,
        };
        if [Some(&self.data_dir), objects].into_iter().flatten().any(is_it) {
            return Err(ConfigError(format!(
                "disk-cache is {}, which contains records: the cache needs a directory of its \
                 own, whose content may be lost",
                directory.display()
            )));
        }
        Ok(())
    }
}

impl fmt::Display for ServeConfig {
    /// Formats the values in effect for the log, by option name. A default that depends on other
    /// values is shown as `default`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or = |value: Option<String>, none: &str| value.unwrap_or_else(|| none.to_string());
        let listeners: Vec<_> = self.security.listeners.iter().map(ToString::to_string).collect();
        let capacity = or(self.wal_capacity.map(|size| size.to_string()), "default");
        let upload_size = or(self.upload_size.map(|size| size.to_string()), "default");
        let rate = or(self.object_store_rate.map(|size| size.to_string()), "none");
        let admin = or(self.admin_listen.map(|address| address.to_string()), "none");
        let per_ip = or(self.max_connections_per_ip.map(|count| count.to_string()), "none");
        let rack = self.rack.as_deref().unwrap_or("none");
        let disk_cache = self.disk_cache.as_ref().map(|directory| directory.display().to_string());
        let disk_cache = or(disk_cache, "none");
        if let Some(ReadOnly { store, poll_interval }) = &self.read_only {
            let store = or(store.map(|store| store.to_string()), "default");
            write!(f, "read-only=true store={store} catalog-poll-interval={poll_interval} ")?;
        }
        write!(
            f,
            "data-dir={} listeners={} wal={} wal-capacity={capacity} wal-reserve={} \
             object-store={} durability={} engine={} log-cache={} block-cache={} \
             cold-read-memory={} disk-cache={disk_cache} disk-cache-size={} disk-cache-memory={} \
             object-store-rate={rate} upload-size={upload_size} upload-interval={} \
             compaction-size={} log-compaction-interval={} admin-listen={admin} node-id={} \
             auto-create-topics={} default-partitions={} max-message-size={} max-connections={} \
             max-connections-per-ip={per_ip} max-connections-per-ip-overrides={} idle-timeout={} \
             queued-request-memory={} transaction-max-timeout={} transactional-id-expiration={} \
             offsets-retention={} offset-metadata-max-size={} group-initial-rebalance-delay={} \
             group-min-session-timeout={} group-max-session-timeout={} {} group-max-size={} \
             offsets-retention-check-interval={} rack={rack}",
            self.data_dir.display(),
            listeners.join(","),
            self.wal.display(),
            self.wal_reserve,
            self.object_store,
            self.durability,
            self.engine,
            self.log_cache,
            self.block_cache,
            self.cold_read_memory,
            self.disk_cache_size,
            self.disk_cache_memory,
            self.upload_interval,
            self.compaction_size,
            self.log_compaction_interval,
            self.node_id,
            self.auto_create_topics,
            self.default_partitions,
            self.max_message_size,
            self.max_connections,
            self.max_connections_per_ip_overrides,
            self.idle_timeout,
            self.queued_request_memory,
            self.transaction_max_timeout,
            self.transactional_id_expiration,
            self.offsets_retention,
            self.offset_metadata_max_size,
            self.group_initial_rebalance_delay,
            self.group_min_session_timeout,
            self.group_max_session_timeout,
            self.group_times.to_log_text(),
            self.group_max_size,
            self.offsets_retention_check_interval,
        )
    }
}

/// Checks the capacity of a server's write-ahead log.
///
/// # Errors
/// It is out of bounds, or not a multiple of 4 KiB.
pub(crate) fn check_wal_capacity(capacity: Size) -> Result<(), ConfigError> {
    within("wal-capacity", capacity, l::WAL_CAPACITY_MIN, l::WAL_CAPACITY_MAX)?;
    if !capacity.is_whole_pages() {
        return Err(ConfigError(format!(
            "wal-capacity is {capacity}, which is not a multiple of 4KiB"
        )));
    }
    Ok(())
}

fn within<T: PartialOrd + Copy + fmt::Display>(
    option: &str,
    value: T,
    min: T,
    max: T,
) -> Result<(), ConfigError> {
    if value < min || value > max {
        return Err(ConfigError(format!("{option} is {value}, but must be {min} to {max}")));
    }
    Ok(())
}

/// Parses a default that is written as text, so that the help and the code agree.
fn preset<T: FromStr<Err = String>>(text: &str) -> T {
    text.parse().expect("the built-in default is valid")
}

#[cfg(test)]
mod tests;
