//! The settings of the broker, by Kafka's names.
//!
//! Four kinds can be set at run time: defaults of topics, defaults of groups, settings in `LIVE`,
//! which take effect at once, and settings in `UNUSED`, which are only stored. The others keep the
//! values that the server was started with.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::Allowed::{Any, AtLeast, Between};
use super::{ConfigType, Overrides, Setting, group, topic};
use crate::config::BrokerConfig;
use crate::producer_state;

/// A setting of the broker.
pub(crate) struct BrokerSetting {
    pub(crate) name: &'static str,
    pub(crate) kind: ConfigType,
    /// Kafka's default; `None` if it has none.
    pub(crate) default: Option<&'static str>,
    pub(crate) documentation: &'static str,
    /// The allowed values if it can be set while the server runs; a value that has any effect takes
    /// effect at once. For a default of topics, the topic's setting.
    pub(crate) dynamic: Option<&'static Setting>,
}

const fn fixed(
    name: &'static str,
    kind: ConfigType,
    default: Option<&'static str>,
    documentation: &'static str,
) -> BrokerSetting {
    BrokerSetting { name, kind, default, documentation, dynamic: None }
}

use ConfigType::{Boolean, Double, Int, List, Long, String};

/// The settings that are fixed at the start.
#[rustfmt::skip]
const FIXED: &[BrokerSetting] = &[
    fixed("advertised.listeners", List, None, "The addresses that clients connect to."),
    fixed("auto.create.topics.enable", Boolean, Some("true"),
        "Whether requests for metadata of missing topics create them."),
    fixed("broker.id", Int, None, "This server's ID."),
    fixed("broker.rack", String, None, "The rack of this server."),
    fixed("connections.max.idle.ms", Long, Some("600000"),
        "The time after which idle connections are closed."),
    fixed("connections.max.reauth.ms", Long, Some("0"),
        "The longest time after which SASL clients must re-authenticate; 0 for never."),
    fixed("default.replication.factor", Int, Some("1"), "The replicas of a new topic: always one."),
    fixed("delete.topic.enable", Boolean, Some("true"), "Whether topics can be deleted."),
    fixed("fetch.max.bytes", Int, Some("57671680"),
        "The largest fetch response; a larger first batch is returned nevertheless."),
    fixed("group.consumer.heartbeat.interval.ms", Int, Some("5000"),
        "The heartbeat interval of members of consumer groups."),
    fixed("group.consumer.min.heartbeat.interval.ms", Int, Some("5000"),
        "The shortest heartbeat interval of a consumer group."),
    fixed("group.consumer.max.heartbeat.interval.ms", Int, Some("15000"),
        "The longest heartbeat interval of a consumer group."),
    fixed("group.consumer.session.timeout.ms", Int, Some("45000"),
        "The time without a heartbeat after which a member of a consumer group is removed."),
    fixed("group.consumer.min.session.timeout.ms", Int, Some("45000"),
        "The shortest session timeout of a consumer group."),
    fixed("group.consumer.max.session.timeout.ms", Int, Some("60000"),
        "The longest session timeout of a consumer group."),
    fixed("group.share.heartbeat.interval.ms", Int, Some("5000"),
        "The heartbeat interval of members of share groups."),
    fixed("group.share.min.heartbeat.interval.ms", Int, Some("5000"),
        "The shortest heartbeat interval of a share group."),
    fixed("group.share.max.heartbeat.interval.ms", Int, Some("15000"),
        "The longest heartbeat interval of a share group."),
    fixed("group.share.session.timeout.ms", Int, Some("45000"),
        "The time without a heartbeat after which a member of a share group is removed."),
    fixed("group.share.min.session.timeout.ms", Int, Some("45000"),
        "The shortest session timeout of a share group."),
    fixed("group.share.max.session.timeout.ms", Int, Some("60000"),
        "The longest session timeout of a share group."),
    fixed("group.share.max.size", Int, Some("200"),
        "The greatest number of members of a share group."),
    fixed("group.consumer.max.size", Int, Some("2147483647"),
        "The greatest number of members of a consumer group."),
    fixed("group.consumer.migration.policy", String, Some("bidirectional"),
        "A group migrates to the new protocol with its first such member, and back with its last."),
    fixed("group.initial.rebalance.delay.ms", Int, Some("3000"),
        "How long the first rebalance of an empty classic group waits for further members."),
    fixed("group.max.session.timeout.ms", Int, Some("1800000"),
        "The longest session timeout of a member of a classic group."),
    fixed("group.max.size", Int, Some("2147483647"),
        "The greatest number of members of a classic group."),
    fixed("group.min.session.timeout.ms", Int, Some("6000"),
        "The shortest session timeout of a member of a classic group."),
    fixed("log.retention.check.interval.ms", Long, Some("300000"),
        "The interval of the checks for records to delete."),
    fixed("log.retention.hours", Int, Some("168"),
        "How long records are kept if neither the topic nor log.retention.ms sets it."),
    fixed("node.id", Int, None, "This server's ID."),
    fixed("offset.metadata.max.bytes", Int, Some("4096"),
        "The longest metadata of a committed offset, in bytes."),
    fixed("offsets.retention.check.interval.ms", Long, Some("600000"),
        "The interval of the checks for expired committed offsets."),
    fixed("offsets.retention.minutes", Int, Some("10080"),
        "The age at which an offset expires if its group had no members for as long or does not \
         subscribe to the topic."),
    fixed("num.partitions", Int, Some("1"),
        "The partitions of a topic that is created without a number."),
    fixed("process.roles", List, None, "The single server is broker and controller."),
    fixed("producer.id.expiration.ms", Int, Some("86400000"),
        "The time without writes after which a partition drops a producer."),
    fixed("queued.max.request.bytes", Long, None, "The limit on the bytes of requests in memory."),
    fixed("remote.log.manager.copy.quota.window.num", Int, Some("11"),
        "Windows of the quota of copies. It is a token bucket here, with bursts of 250 ms."),
    fixed("remote.log.manager.copy.quota.window.size.seconds", Int, Some("1"),
        "The length of a window of the quota of copies."),
    fixed("remote.log.manager.fetch.quota.window.num", Int, Some("11"),
        "Windows of the quota of fetches. It is a token bucket here, with bursts of 250 ms."),
    fixed("remote.log.manager.fetch.quota.window.size.seconds", Int, Some("1"),
        "The length of a window of the quota of fetches."),
    fixed("remote.log.storage.system.enable", Boolean, Some("false"),
        "Whether topics can have tiered storage; always true."),
    fixed("socket.request.max.bytes", Int, Some("104857600"), "The largest request."),
    fixed("transaction.max.timeout.ms", Int, Some("900000"),
        "The longest timeout of a transaction."),
    fixed("transactional.id.expiration.ms", Int, Some("604800000"),
        "The time after its last transaction at which a transactional ID expires."),
];

const fn unused(
    name: &'static str,
    kind: ConfigType,
    default: &'static str,
    allowed: super::Allowed,
    documentation: &'static str,
) -> Setting {
    Setting { name, kind, default, allowed, broker_name: None, effective: false, documentation }
}

/// Settings that Kafka's operators change at run time, with Kafka's types, defaults and bounds;
/// here they are only stored and reported.
#[rustfmt::skip]
const UNUSED: &[Setting] = &[
    unused("background.threads", Int, "10", AtLeast(1),
        "Threads for background tasks. No effect here."),
    unused("follower.fetch.last.tiered.offset.enable", Boolean, "false", Any,
        "The start of new followers. No effect here: there is one replica."),
    unused("follower.replication.throttled.rate", Long, "9223372036854775807", AtLeast(0),
        "The limit on replication during reassignments. No effect here: there is one replica."),
    unused("group.consumer.assignment.interval.ms", Int, "1000", AtLeast(0),
        "Time between two assignments of a group. No effect here: assignments are computed at \
         once."),
    unused("group.consumer.assignor.offload.enable", Boolean, "true", Any,
        "Whether assignments have threads of their own. No effect here."),
    unused("group.coordinator.cached.buffer.max.bytes", Int, "1048588", AtLeast(524_288),
        "Write buffer that the coordinator caches. No effect here: it caches none."),
    unused("group.share.assignment.interval.ms", Int, "1000", AtLeast(0),
        "Time between two assignments of a group. No effect here: assignments are computed at \
         once."),
    unused("group.share.assignor.offload.enable", Boolean, "true", Any,
        "Whether assignments have threads of their own. No effect here."),
    unused("group.streams.assignment.interval.ms", Int, "1000", AtLeast(0),
        "Time between two assignments of a group. No effect here: there are no streams groups."),
    unused("group.streams.assignor.offload.enable", Boolean, "true", Any,
        "Whether assignments have threads of their own. No effect here: there are no streams \
         groups."),
    unused("leader.replication.throttled.rate", Long, "9223372036854775807", AtLeast(0),
        "The limit on replication during reassignments. No effect here: there is one replica."),
    unused("log.cleaner.dedupe.buffer.size", Long, "134217728", Any,
        "Memory for log compaction. No effect here: it takes 25 MiB."),
    unused("log.cleaner.io.buffer.load.factor", Double, "0.9", Any,
        "Load factor of log compaction's memory. No effect here."),
    unused("log.cleaner.io.buffer.size", Int, "524288", AtLeast(0),
        "I/O buffer of log compaction. No effect here."),
    unused("log.cleaner.io.max.bytes.per.second", Double, "1.7976931348623157E308", Any,
        "The limit on log compaction's I/O. No effect here: it pauses as long as it reads; see \
         also --object-store-rate."),
    unused("log.cleaner.threads", Int, "1", AtLeast(0),
        "Threads for log compaction. No effect here: there is one."),
    unused("num.io.threads", Int, "8", AtLeast(1),
        "Threads for requests. No effect here: there is one per processor."),
    unused("num.network.threads", Int, "3", AtLeast(1),
        "Threads for connections. No effect here: there is one per processor."),
    unused("num.recovery.threads.per.data.dir", Int, "2", AtLeast(1),
        "Threads for log recovery. No effect here: there is one log."),
    unused("num.replica.fetchers", Int, "1", AtLeast(1),
        "Threads that fetch from leaders. No effect here: there is one replica."),
    unused("remote.fetch.max.wait.ms", Int, "500", AtLeast(1),
        "The time that a fetch waits for remote storage. No effect here: the request's time \
         applies."),
    unused("remote.list.offsets.request.timeout.ms", Long, "30000", AtLeast(1),
        "The time that a search in remote storage may take. No effect here: it is 20 s at most."),
    unused("remote.log.index.file.cache.total.size.bytes", Long, "1073741824", AtLeast(1),
        "Disk space for indexes of remote segments. No effect here: see --block-cache."),
    unused("remote.log.manager.copier.thread.pool.size", Int, "10", AtLeast(1),
        "Threads that copy segments. No effect here: uploads are one task."),
    unused("remote.log.manager.expiration.thread.pool.size", Int, "10", AtLeast(1),
        "Threads that delete remote segments. No effect here: it is one task."),
    unused("remote.log.manager.follower.thread.pool.size", Int, "2", AtLeast(1),
        "Threads of followers. No effect here: there is one replica."),
    unused("remote.log.reader.threads", Int, "10", AtLeast(1),
        "Threads that read remote segments. No effect here: reads are tasks."),
    unused("replica.alter.log.dirs.io.max.bytes.per.second", Long, "9223372036854775807",
        AtLeast(0),
        "The limit on moves between log directories. No effect here: there is one directory."),
    unused("sasl.kerberos.kinit.cmd", String, "/usr/bin/kinit", Any,
        "The path of kinit. No effect here: there is no Kerberos."),
    unused("sasl.kerberos.min.time.before.relogin", Long, "60000", Any,
        "Time between two logins. No effect here: there is no Kerberos."),
    unused("sasl.kerberos.principal.to.local.rules", List, "DEFAULT", Any,
        "Mapping of principals to names. No effect here: there is no Kerberos."),
    unused("sasl.kerberos.ticket.renew.jitter", Double, "0.05", Between(0, 1),
        "Jitter of renewals. No effect here: there is no Kerberos."),
    unused("sasl.kerberos.ticket.renew.window.factor", Double, "0.8", Between(0, 1),
        "When a ticket is renewed. No effect here: there is no Kerberos."),
    unused("share.coordinator.cached.buffer.max.bytes", Int, "1048588", AtLeast(524_288),
        "Write buffer that the coordinator caches. No effect here: it caches none."),
];

const fn live(
    name: &'static str,
    kind: ConfigType,
    default: &'static str,
    allowed: super::Allowed,
    documentation: &'static str,
) -> Setting {
    Setting { name, kind, default, allowed, broker_name: None, effective: true, documentation }
}

/// The longest interval of checks of compacted partitions: 30 days.
const MAX_BACKOFF_MS: i64 = 30 * 86_400_000;

pub(crate) const CLEANER_BACKOFF: &str = "log.cleaner.backoff.ms";
/// The quotas of KIP-956.
pub(crate) const COPY_QUOTA: &str = "remote.log.manager.copy.max.bytes.per.second";
pub(crate) const FETCH_QUOTA: &str = "remote.log.manager.fetch.max.bytes.per.second";
pub(crate) const MAX_CONNECTIONS: &str = "max.connections";
pub(crate) const MAX_CONNECTIONS_PER_IP: &str = "max.connections.per.ip";
pub(crate) const MAX_CONNECTIONS_OVERRIDES: &str = "max.connections.per.ip.overrides";

/// Settings that take effect at once and are not defaults of topics or groups.
#[rustfmt::skip]
const LIVE: &[Setting] = &[
    live(CLEANER_BACKOFF, Long, "15000", Between(1, MAX_BACKOFF_MS),
        "The interval of the checks of compacted topics, in milliseconds; 0 is refused."),
    live(MAX_CONNECTIONS, Int, "2147483647", Between(1, 100_000),
        "The limit on open connections. Lowering it does not close connections."),
    live(MAX_CONNECTIONS_PER_IP, Int, "2147483647", Between(1, i32::MAX as i64),
        "The limit on open connections from one address."),
    live(MAX_CONNECTIONS_OVERRIDES, String, "", super::Allowed::PerIp,
        "Limits for single addresses, such as 10.0.0.1:100,10.0.0.2:5. Host names are refused."),
    live(COPY_QUOTA, Long, "9223372036854775807", AtLeast(1),
        "The limit on bytes per second of uploads and compaction. If producers write more, the log \
         fills up, and they wait."),
    live(FETCH_QUOTA, Long, "9223372036854775807", AtLeast(1),
        "The limit on bytes per second that other tasks read from the object store."),
    live("transaction.partition.verification.enable", Boolean, "true", super::Allowed::Only("true",
        "every transactional batch is verified"),
        "Whether transactional batches are verified; always true."),
];

/// Settings that Kafka's operators can change at run time and that are refused here, with the
/// reason. A name that ends with a dot is a prefix.
#[rustfmt::skip]
pub(crate) const REFUSED: &[(&str, &str)] = &[
    ("config.providers", "the server does not load classes"),
    ("cordoned.log.dirs", "there is one log directory, which cannot be cordoned"),
    ("errors.deadletterqueue.", "share groups do not support dead letter queues"),
    ("listener.", "listeners are configured at the start of the server"),
    ("listeners", "listeners are configured at the start of the server"),
    ("max.connection.creation.rate",
        "connections are limited in number by max.connections and in rate by the quota \
         connection_creation_rate of addresses"),
    ("metric.reporters",
        "the server does not load classes; its metrics are at /metrics of the admin port"),
    ("principal.builder.class",
        "the server does not load classes; see the listener's tls-principal-rules"),
    ("producer.id.expiration.ms", "the expiration of producers is fixed: one day"),
    ("sasl.",
        "mechanisms are set by the listener's sasl-mechanisms; the server is not a SASL client"),
    ("ssl.", "certificates are set by the listener, and their files are reloaded when they change"),
];

/// Why a setting that Kafka's operators can change is refused.
pub(crate) fn refusal(name: &str) -> Option<&'static str> {
    let fits = |(known, _): &&(&str, &str)| match known.ends_with('.') {
        true => name.starts_with(known),
        false => name == *known,
    };
    REFUSED.iter().find(fits).map(|(_, reason)| *reason)
}

/// Parses limits by address such as `10.0.0.1:100,10.0.0.2:5`: the form of
/// `max.connections.per.ip.overrides`.
///
/// # Errors
/// The invalid part.
pub fn per_ip(text: &str) -> Result<BTreeMap<IpAddr, u32>, std::string::String> {
    let mut bounds = BTreeMap::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let bound = part.rsplit_once(':').and_then(|(ip, bound)| {
            // Splits at the last colon: earlier ones belong to an IPv6 address.
            let ip = ip.strip_prefix('[').and_then(|ip| ip.strip_suffix(']')).unwrap_or(ip);
            let bound = bound.parse::<u32>().ok().filter(|bound| i32::try_from(*bound).is_ok());
            Some((ip.parse::<IpAddr>().ok()?.to_canonical(), bound?))
        });
        let (ip, bound) = bound
            .ok_or_else(|| format!("`{part}` does not have the form IP:N, such as 10.0.0.1:100"))?;
        if bounds.insert(ip, bound).is_some() {
            return Err(format!("{ip} occurs twice"));
        }
    }
    Ok(bounds)
}

/// Settings of retention, and those of local retention, which must not keep more.
pub(super) const LOCAL_RETENTION: [(&str, &str); 2] = [
    ("log.retention.bytes", "log.local.retention.bytes"),
    ("log.retention.ms", "log.local.retention.ms"),
];

/// All settings of the broker, by name.
pub(crate) fn settings() -> Vec<BrokerSetting> {
    let of_topics = topic::SETTINGS.iter().filter_map(|setting| {
        // Kafka has older names for these too, which have the defaults.
        let has_other_default = matches!(
            setting.name,
            "retention.ms" | "segment.ms" | "segment.jitter.ms" | "flush.ms"
        );
        Some(BrokerSetting {
            name: setting.broker_name?,
            kind: setting.kind,
            default: (!has_other_default).then_some(setting.default),
            documentation: setting.documentation,
            dynamic: Some(setting),
        })
    });
    // Kafka fixes these at the start of a broker; this server has no file of properties for them.
    // The configuration has those in `FIXED`.
    let of_groups = group::SETTINGS.iter().filter(|setting| setting.effective);
    let of_groups = of_groups.filter_map(|setting| {
        let name = setting.broker_name?;
        let is_fixed = FIXED.iter().any(|fixed| fixed.name == name);
        (!is_fixed).then_some(BrokerSetting {
            name,
            kind: setting.kind,
            default: Some(setting.default),
            documentation: setting.documentation,
            dynamic: Some(setting),
        })
    });
    let mut settings: Vec<_> = of_topics.chain(of_groups).collect();
    settings.extend(UNUSED.iter().chain(LIVE).map(|setting| BrokerSetting {
        name: setting.name,
        kind: setting.kind,
        // Kafka has no limit here, but this server does.
        default: (setting.name != MAX_CONNECTIONS).then_some(setting.default),
        documentation: setting.documentation,
        dynamic: Some(setting),
    }));
    for setting in FIXED {
        settings.push(BrokerSetting { ..*setting });
    }
    settings.sort_by_key(|setting| setting.name);
    settings
}

/// The values that the server was started with, as far as the configuration contains them, without
/// those that equal Kafka's defaults.
pub(super) fn started_with(config: &BrokerConfig) -> Overrides {
    let number = |number: u64| number.to_string();
    let millis = |time: std::time::Duration| time.as_millis().to_string();
    let groups = &config.groups;
    let values = [
        ("auto.create.topics.enable", config.auto_create_topics.to_string()),
        ("broker.id", config.node_id.to_string()),
        ("connections.max.idle.ms", millis(config.idle_timeout)),
        ("connections.max.reauth.ms", millis(config.security.session_lifetime.unwrap_or_default())),
        ("fetch.max.bytes", number(config.max_fetch_bytes.into())),
        ("group.consumer.heartbeat.interval.ms", millis(groups.consumer.heartbeat_interval)),
        (
            "group.consumer.min.heartbeat.interval.ms",
            millis(groups.consumer.min_heartbeat_interval),
        ),
        (
            "group.consumer.max.heartbeat.interval.ms",
            millis(groups.consumer.max_heartbeat_interval),
        ),
        ("group.consumer.session.timeout.ms", millis(groups.consumer.session_timeout)),
        ("group.consumer.min.session.timeout.ms", millis(groups.consumer.min_session_timeout)),
        ("group.consumer.max.session.timeout.ms", millis(groups.consumer.max_session_timeout)),
        ("group.share.heartbeat.interval.ms", millis(groups.share.heartbeat_interval)),
        ("group.share.min.heartbeat.interval.ms", millis(groups.share.min_heartbeat_interval)),
        ("group.share.max.heartbeat.interval.ms", millis(groups.share.max_heartbeat_interval)),
        ("group.share.session.timeout.ms", millis(groups.share.session_timeout)),
        ("group.share.min.session.timeout.ms", millis(groups.share.min_session_timeout)),
        ("group.share.max.session.timeout.ms", millis(groups.share.max_session_timeout)),
        ("group.consumer.max.size", groups.max_group_members.to_string()),
        ("group.initial.rebalance.delay.ms", millis(groups.initial_rebalance_delay)),
        ("group.max.session.timeout.ms", millis(groups.max_session_timeout)),
        ("group.max.size", groups.max_group_members.to_string()),
        ("group.min.session.timeout.ms", millis(groups.min_session_timeout)),
        (CLEANER_BACKOFF, millis(config.log_compaction_check_interval)),
        ("log.retention.check.interval.ms", millis(config.retention_check_interval)),
        (MAX_CONNECTIONS, number(config.max_connections.into())),
        (MAX_CONNECTIONS_PER_IP, number(config.max_connections_of_address.into())),
        (MAX_CONNECTIONS_OVERRIDES, of_addresses(&config.max_connections_overrides)),
        ("message.max.bytes", number(config.max_message_bytes.into())),
        ("node.id", config.node_id.to_string()),
        ("num.partitions", number(config.default_partitions.into())),
        ("offset.metadata.max.bytes", groups.max_offset_metadata_bytes.to_string()),
        ("offsets.retention.check.interval.ms", millis(groups.sweep_interval)),
        ("offsets.retention.minutes", number(groups.offsets_retention.as_secs() / 60)),
        ("process.roles", "broker,controller".to_owned()),
        ("producer.id.expiration.ms", millis(producer_state::EXPIRATION)),
        ("queued.max.request.bytes", number(config.queued_request_bytes)),
        ("remote.log.storage.system.enable", "true".to_owned()),
        ("socket.request.max.bytes", number(config.max_request_bytes.into())),
        ("transaction.max.timeout.ms", millis(config.transaction_max_timeout)),
        ("transactional.id.expiration.ms", millis(config.transactional_id_expiration)),
    ];
    let defaults = settings();
    let differs = |(name, value): &(&str, std::string::String)| {
        defaults.iter().all(|setting| setting.name != *name || setting.default != Some(value))
    };
    let rack = config.rack.clone().map(|rack| ("broker.rack", rack));
    let values = values.into_iter().filter(differs).chain(rack);
    values.map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Formats limits by address as Kafka does: `10.0.0.1:100,10.0.0.2:5`.
fn of_addresses(connections: &BTreeMap<IpAddr, u32>) -> std::string::String {
    connections.iter().map(|(ip, max)| format!("{ip}:{max}")).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_values_that_equal_the_default_are_not_static_settings() {
        let config = BrokerConfig { max_message_bytes: 77, ..BrokerConfig::default() };
        let started_with = started_with(&config);
        assert_eq!(started_with["message.max.bytes"], "77");
        assert!(!started_with.contains_key("num.partitions"));
        assert!(started_with.contains_key("max.connections"));
    }

    #[test]
    fn the_reauthentication_time_is_described() {
        let name = "connections.max.reauth.ms";
        let mut config = BrokerConfig::default();
        let settings = settings();
        let setting = settings.iter().find(|setting| setting.name == name);
        assert_eq!(setting.expect("a setting").default, Some("0"));
        assert!(!started_with(&config).contains_key(name));
        config.security.session_lifetime = Some(std::time::Duration::from_secs(5));
        assert_eq!(started_with(&config)[name], "5000");
    }

    #[test]
    fn setting_names_are_unique() {
        let settings = settings();
        assert!(settings.windows(2).all(|pair| pair[0].name < pair[1].name));
        let dynamic = |name: &str| {
            settings.iter().find(|setting| setting.name == name).unwrap().dynamic.is_some()
        };
        assert!(dynamic("log.retention.ms") && dynamic("log.segment.bytes"));
        assert!(dynamic("num.io.threads") && !dynamic("num.partitions"));
    }

    #[test]
    fn settings_without_effect_say_so_and_have_valid_defaults() {
        for setting in UNUSED {
            assert!(setting.documentation.contains("No effect here"), "{}", setting.name);
            setting.check(setting.default).unwrap();
        }
    }
}
