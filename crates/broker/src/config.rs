//! The configuration of the server.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use crate::groups::GroupConfig;
use crate::security::{ListenerConfig, Mechanism, SecurityConfig};

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

/// Configuration of a [`crate::Broker`]. [`BrokerConfig::validate`] rejects values out of bounds;
/// values are never adjusted silently.
#[derive(Clone, Debug)]
pub struct BrokerConfig {
    /// The listeners, 1 to 32. Default: one in plain text at 127.0.0.1:9092.
    pub listeners: Vec<ListenerConfig>,
    /// The security settings of all listeners.
    pub security: SecurityConfig,
    /// This server's ID in the cluster (`node.id`). Default 1, minimum 0.
    pub node_id: i32,
    /// The rack reported to clients (`broker.rack`). Default none; 1 to 249 bytes.
    pub rack: Option<String>,
    /// The cluster's ID. Default: the stored one, or a new random one on the first start. If set,
    /// it must equal the stored one. 1 to 249 characters.
    pub cluster_id: Option<String>,
    /// Whether a metadata request for a missing topic creates it if the client allows that
    /// (`auto.create.topics.enable`). Default true.
    pub auto_create_topics: bool,
    /// Partitions of a topic that is created without a number (`num.partitions`). Default 1, 1 to
    /// `max_partitions`.
    pub default_partitions: u32,
    /// Limit on the partitions of all topics together. Default 10,000, 1 to 1,000,000.
    pub max_partitions: u32,
    /// Largest record batch (`message.max.bytes`); a topic may set its own `max.message.bytes`.
    /// Default 1,048,588; 61 bytes (an empty batch) to 64 MiB.
    pub max_message_bytes: u32,
    /// Largest request (`socket.request.max.bytes`). Default 100 MiB, 1 KiB to 1 GiB.
    pub max_request_bytes: u32,
    /// Limit on the bytes of all requests that are being read or handled. Up to 64 KiB of each do
    /// not count (each connection has at most one request), and one further request of
    /// `max_request_bytes` is allowed. The same limit applies to the decoded form of requests with
    /// many elements, and to large responses other than fetch responses. Default 256 MiB;
    /// `max_request_bytes` to 1 TiB.
    pub queued_request_bytes: u64,
    /// Largest fetch response, whatever the client requests (`fetch.max.bytes`); a single batch may
    /// exceed it. Default 55 MiB, 1 KiB to 1 GiB.
    pub max_fetch_bytes: u32,
    /// Limit on the bytes of all fetch responses that are being read or sent. Up to 128 KiB of each
    /// do not count when it is reached. Default 512 MiB; `max_fetch_bytes` to 1 TiB.
    pub queued_fetch_bytes: u64,
    /// Limit on open connections (`max.connections`); further ones are closed at once. A connection
    /// takes about 15 KiB while idle, and at most about 0.5 MiB beside what has limits of its own.
    /// Default 10,000, 1 to 100,000.
    pub max_connections: u32,
    /// Limit on open connections per address (`max.connections.per.ip`). Default 2,147,483,647,
    /// which means no limit; 1 to that.
    pub max_connections_of_address: u32,
    /// Addresses with another limit (`max.connections.per.ip.overrides`); 0 refuses all
    /// connections. Default none; at most 10,000.
    pub max_connections_overrides: BTreeMap<IpAddr, u32>,
    /// A connection without a request for this long is closed (`connections.max.idle.ms`), and so
    /// is one that is not read for this long because its responses are incomplete. Default 10
    /// minutes, 1 second to 30 days.
    pub idle_timeout: Duration,
    /// A request must arrive completely within this time from its first byte, not counting waits
    /// for memory, each of which may take as long; a response must make progress within it. While
    /// others wait for the memory of requests or responses, a transfer must reach 64 KiB/s over a
    /// tenth of this time, and a response must complete at a rate that transfers all of it in this
    /// time if that is more. Otherwise the connection is closed. Default 30 seconds, 100 ms to 1
    /// hour.
    pub transfer_timeout: Duration,
    /// How long [`crate::Broker::shutdown`] waits for requests in flight. Default 10 seconds, at
    /// most 1 hour.
    pub shutdown_grace: Duration,
    /// Interval of the checks for records that `retention.ms` or `retention.bytes` release
    /// (`log.retention.check.interval.ms`). Default 5 minutes, 1 ms to 30 days.
    pub retention_check_interval: Duration,
    /// Interval of the checks for partitions to log-compact (`log.cleaner.backoff.ms`). Default 15
    /// seconds, 1 ms to 30 days.
    pub log_compaction_check_interval: Duration,
    /// Longest timeout that a producer may set for its transactions (`transaction.max.timeout.ms`).
    /// Default 15 minutes, 1 second to 24 hours.
    pub transaction_max_timeout: Duration,
    /// Time after its last transaction at which a transactional ID expires
    /// (`transactional.id.expiration.ms`), checked hourly. Default 7 days, 1 ms to 24 days.
    pub transactional_id_expiration: Duration,
    /// Limits and timeouts of consumer groups.
    pub groups: GroupConfig,
}

impl Default for BrokerConfig {
    fn default() -> Self {
        Self {
            listeners: vec![ListenerConfig::plaintext(SocketAddr::new(
                IpAddr::V4(Ipv4Addr::LOCALHOST),
                9092,
            ))],
            security: SecurityConfig::default(),
            node_id: 1,
            rack: None,
            cluster_id: None,
            auto_create_topics: true,
            default_partitions: 1,
            max_partitions: 10_000,
            max_message_bytes: 1_048_588,
            max_request_bytes: (100 * MIB) as u32,
            queued_request_bytes: 256 * MIB,
            max_fetch_bytes: (55 * MIB) as u32,
            queued_fetch_bytes: 512 * MIB,
            max_connections: 10_000,
            max_connections_of_address: i32::MAX as u32,
            max_connections_overrides: BTreeMap::new(),
            idle_timeout: Duration::from_secs(600),
            transfer_timeout: Duration::from_secs(30),
            shutdown_grace: Duration::from_secs(10),
            retention_check_interval: Duration::from_secs(300),
            log_compaction_check_interval: Duration::from_secs(15),
            transaction_max_timeout: Duration::from_secs(15 * 60),
            transactional_id_expiration: Duration::from_secs(7 * 86_400),
            groups: GroupConfig::default(),
        }
    }
}

impl BrokerConfig {
    /// Checks every field against its bounds.
    ///
    /// # Errors
    /// The first field that is out of bounds, with its value and the bounds.
    pub fn validate(&self) -> Result<(), InvalidConfig> {
        fn within<T: PartialOrd + Copy + std::fmt::Debug>(
            field: &'static str,
            value: T,
            min: T,
            max: T,
        ) -> Result<(), InvalidConfig> {
            if value < min || value > max {
                return Err(InvalidConfig(format!(
                    "{field} is {value:?}, but must be {min:?} to {max:?}"
                )));
            }
            Ok(())
        }
        within("listeners (number)", self.listeners.len(), 1, 32)?;
        for (index, listener) in self.listeners.iter().enumerate() {
            listener.validate()?;
            if self.listeners[..index].iter().any(|other| other.name == listener.name) {
                return Err(InvalidConfig(format!(
                    "two listeners have the name {:?}",
                    listener.name
                )));
            }
        }
        if let Some(id) = &self.cluster_id {
            within("cluster_id (length)", id.len(), 1, 249)?;
        }
        if let Some(rack) = &self.rack {
            within("rack (length)", rack.len(), 1, 249)?;
        }
        let tokens = |listener: &ListenerConfig| listener.sasl.contains(&Mechanism::OauthBearer);
        if self.security.oauth.is_none() && self.listeners.iter().any(tokens) {
            return Err(InvalidConfig(
                "a listener has OAUTHBEARER, but no OAuth settings are configured".into(),
            ));
        }
        if let Some(lifetime) = self.security.session_lifetime {
            let (least, most) = (Duration::from_secs(1), Duration::from_secs(365 * 86_400));
            within("session_lifetime", lifetime, least, most)?;
        }
        if let Some(oauth) = &self.security.oauth {
            let most = Duration::from_secs(3600);
            within("clock_skew", oauth.clock_skew, Duration::ZERO, most)?;
        }
        within("node_id", self.node_id, 0, i32::MAX)?;
        within("max_partitions", self.max_partitions, 1, 1_000_000)?;
        within("default_partitions", self.default_partitions, 1, self.max_partitions)?;
        within("max_message_bytes", u64::from(self.max_message_bytes), 61, 64 * MIB)?;
        within("max_request_bytes", u64::from(self.max_request_bytes), KIB, 1024 * MIB)?;
        within(
            "queued_request_bytes",
            self.queued_request_bytes,
            u64::from(self.max_request_bytes),
            MIB * MIB,
        )?;
        within("max_fetch_bytes", u64::from(self.max_fetch_bytes), KIB, 1024 * MIB)?;
        within(
            "queued_fetch_bytes",
            self.queued_fetch_bytes,
            u64::from(self.max_fetch_bytes),
            MIB * MIB,
        )?;
        within("max_connections", self.max_connections, 1, 100_000)?;
        let none = i32::MAX as u32;
        within("max_connections_of_address", self.max_connections_of_address, 1, none)?;
        let overrides = self.max_connections_overrides.len();
        within("max_connections_overrides (number)", overrides, 0, 10_000)?;
        within(
            "idle_timeout",
            self.idle_timeout,
            Duration::from_secs(1),
            Duration::from_secs(30 * 86_400),
        )?;
        within(
            "transfer_timeout",
            self.transfer_timeout,
            Duration::from_millis(100),
            Duration::from_secs(3600),
        )?;
        within(
            "retention_check_interval",
            self.retention_check_interval,
            Duration::from_millis(1),
            Duration::from_secs(30 * 86_400),
        )?;
        within(
            "log_compaction_check_interval",
            self.log_compaction_check_interval,
            Duration::from_millis(1),
            Duration::from_secs(30 * 86_400),
        )?;
        within(
            "transaction_max_timeout",
            self.transaction_max_timeout,
            Duration::from_secs(1),
            Duration::from_secs(86_400),
        )?;
        within(
            "transactional_id_expiration",
            self.transactional_id_expiration,
            Duration::from_millis(1),
            Duration::from_secs(24 * 86_400),
        )?;
        within("shutdown_grace", self.shutdown_grace, Duration::ZERO, Duration::from_secs(3600))
    }
}

/// A field of [`BrokerConfig`] is out of its bounds.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidConfig(pub(crate) String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_valid_and_each_bound_is_checked() {
        assert_eq!(BrokerConfig::default().validate(), Ok(()));
        type Change = fn(&mut BrokerConfig);
        let broken: [(&str, Change); 12] = [
            ("advertised_host", |c| c.listeners[0].listen = "0.0.0.0:9092".parse().unwrap()),
            ("node_id", |c| c.node_id = -1),
            ("default_partitions", |c| c.default_partitions = 0),
            ("max_message_bytes", |c| c.max_message_bytes = 60),
            ("queued_request_bytes", |c| c.queued_request_bytes = 1),
            ("queued_fetch_bytes", |c| c.queued_fetch_bytes = 1),
            ("max_connections", |c| c.max_connections = 0),
            ("max_connections_of_address", |c| c.max_connections_of_address = 0),
            ("idle_timeout", |c| c.idle_timeout = Duration::ZERO),
            ("rack", |c| c.rack = Some(String::new())),
            ("transaction_max_timeout", |c| c.transaction_max_timeout = Duration::ZERO),
            ("transactional_id_expiration", |c| {
                c.transactional_id_expiration = Duration::from_secs(25 * 86_400);
            }),
        ];
        for (field, change) in broken {
            let mut config = BrokerConfig::default();
            change(&mut config);
            let message = config.validate().unwrap_err().to_string();
            assert!(message.contains(field), "{field}: {message}");
        }
    }
}
