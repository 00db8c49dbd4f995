//! The settings of the broker under the names that Kafka has for them.
//!
//! Those that say what holds for topics which do not say it themselves can be set while the server runs, and so can some that Kafka's operators set and that have
//! no effect here. The others are what it was started with.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::Allowed::{Any, AtLeast, Between};
use super::{ConfigType, Overrides, Setting, topic};
use crate::config::BrokerConfig;
use crate::producer_state;

/// A setting of the broker.
pub(crate) struct BrokerSetting {
    pub(crate) name: &'static str,
    pub(crate) kind: ConfigType,
    /// Kafka's default; `None` where it has none.
    pub(crate) default: Option<&'static str>,
    pub(crate) documentation: &'static str,
    /// It can be set while the server runs, and takes effect at once, as far as it has one: what it may be. That of topics, where it stands in for one.
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

/// What the server was started with.
#[rustfmt::skip]
const FIXED: &[BrokerSetting] = &[
    fixed("advertised.listeners", List, None, "Where clients connect to."),
    fixed("auto.create.topics.enable", Boolean, Some("true"), "Create topics that clients ask for."),
    fixed("broker.id", Int, None, "This server's id."),
    fixed("broker.rack", String, None, "Where this server stands."),
    fixed("connections.max.idle.ms", Long, Some("600000"), "Idle connections are closed after this time."),
    fixed("default.replication.factor", Int, Some("1"), "There is one replica."),
    fixed("delete.topic.enable", Boolean, Some("true"), "Topics can be deleted."),
    fixed("fetch.max.bytes", Int, Some("57671680"), "The largest fetch response, a first batch that is larger excepted."),
    fixed("group.consumer.heartbeat.interval.ms", Int, Some("5000"), "How often members of consumer groups are told to send a heartbeat."),
    fixed("group.consumer.max.size", Int, Some("2147483647"), "Members of a consumer group."),
    fixed("group.consumer.migration.policy", String, Some("bidirectional"), "A group goes over to the new protocol with the first member that speaks it, and back with the last."),
    fixed("group.consumer.session.timeout.ms", Int, Some("45000"), "A member of a consumer group that sends no heartbeat for so long is removed."),
    fixed("group.initial.rebalance.delay.ms", Int, Some("3000"), "How long the first rebalance of an empty classic group waits for more members."),
    fixed("group.max.session.timeout.ms", Int, Some("1800000"), "The longest session timeout that a member of a classic group may have."),
    fixed("group.max.size", Int, Some("2147483647"), "Members of a classic group."),
    fixed("group.min.session.timeout.ms", Int, Some("6000"), "The shortest session timeout that a member of a classic group may have."),
    fixed("log.cleaner.backoff.ms", Long, Some("15000"), "How often partitions of compacted topics are looked at."),
    fixed("log.retention.check.interval.ms", Long, Some("300000"), "How often old records are looked for."),
    fixed("log.retention.hours", Int, Some("168"), "How long records are kept where neither the topic nor log.retention.ms says so."),
    fixed("max.connections", Int, None, "Bound on open connections."),
    fixed("max.connections.per.ip", Int, Some("2147483647"), "Bound on open connections from one address."),
    fixed("max.connections.per.ip.overrides", String, Some(""), "Addresses for which another bound holds."),
    fixed("node.id", Int, None, "This server's id."),
    fixed("offset.metadata.max.bytes", Int, Some("4096"), "The longest metadata of a committed offset."),
    fixed("offsets.retention.check.interval.ms", Long, Some("600000"), "How often old committed offsets are looked for."),
    fixed("offsets.retention.minutes", Int, Some("10080"), "An offset is dropped when it is this old and its group has been without members for as long, or its members do not read the topic."),
    fixed("num.partitions", Int, Some("1"), "Partitions of a topic that is created without a number."),
    fixed("process.roles", List, None, "The one server is broker and controller."),
    fixed("producer.id.expiration.ms", Int, Some("86400000"), "A partition forgets a producer that has not written for so long."),
    fixed("queued.max.request.bytes", Long, None, "Bound on the bytes of requests in memory."),
    fixed("socket.request.max.bytes", Int, Some("104857600"), "The largest request."),
    fixed("transaction.max.timeout.ms", Int, Some("900000"), "The longest timeout that a transaction may have."),
    fixed("transactional.id.expiration.ms", Int, Some("604800000"), "A transactional id is forgotten so long after its last transaction."),
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

/// What Kafka's operators set while it runs, with Kafka's types, defaults and bounds; here it is kept and shown.
#[rustfmt::skip]
const UNUSED: &[Setting] = &[
    unused("background.threads", Int, "10", AtLeast(1), "Threads for tasks in the background. No effect here."),
    unused("log.cleaner.dedupe.buffer.size", Long, "134217728", Any, "Memory for log compaction. No effect here: it takes 25 MiB."),
    unused("log.cleaner.io.buffer.load.factor", Double, "0.9", Any, "How full log compaction's memory may be. No effect here."),
    unused("log.cleaner.io.buffer.size", Int, "524288", AtLeast(0), "Memory for log compaction's reads and writes. No effect here."),
    unused("log.cleaner.io.max.bytes.per.second", Double, "1.7976931348623157E308", Any, "Bound on log compaction's reads and writes. No effect here: it rests as long as it reads; see also --object-store-rate."),
    unused("log.cleaner.threads", Int, "1", AtLeast(0), "Threads for log compaction. No effect here: there is one."),
    unused("num.io.threads", Int, "8", AtLeast(1), "Threads for requests. No effect here: there are as many as processors."),
    unused("num.network.threads", Int, "3", AtLeast(1), "Threads for connections. No effect here: there are as many as processors."),
    unused("num.recovery.threads.per.data.dir", Int, "2", AtLeast(1), "Threads for the recovery of logs. No effect here: there is one log."),
    unused("num.replica.fetchers", Int, "1", AtLeast(0), "Threads that fetch from leaders. No effect here: there is one replica."),
    unused("sasl.kerberos.kinit.cmd", String, "/usr/bin/kinit", Any, "Where kinit is. No effect here: there is no Kerberos."),
    unused("sasl.kerberos.min.time.before.relogin", Long, "60000", Any, "Time between two logins. No effect here: there is no Kerberos."),
    unused("sasl.kerberos.principal.to.local.rules", List, "DEFAULT", Any, "How principals become names. No effect here: there is no Kerberos."),
    unused("sasl.kerberos.ticket.renew.jitter", Double, "0.05", Between(0, 1), "Spread of renewals. No effect here: there is no Kerberos."),
    unused("sasl.kerberos.ticket.renew.window.factor", Double, "0.8", Between(0, 1), "When a ticket is renewed. No effect here: there is no Kerberos."),
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
    let mut settings: Vec<_> = of_topics.collect();
    settings.extend(UNUSED.iter().map(|setting| BrokerSetting {
        name: setting.name,
        kind: setting.kind,
        default: Some(setting.default),
        documentation: setting.documentation,
        dynamic: Some(setting),
    }));
    for setting in FIXED {
        settings.push(BrokerSetting { ..*setting });
    }
    settings.sort_by_key(|setting| setting.name);
    settings
}

/// The values that the server was started with, as far as the configuration has them, without those that are Kafka's defaults.
pub(super) fn started_with(config: &BrokerConfig) -> Overrides {
    let number = |number: u64| number.to_string();
    let millis = |time: std::time::Duration| time.as_millis().to_string();
    let groups = &config.groups;
    let values = [
        ("auto.create.topics.enable", config.auto_create_topics.to_string()),
        ("broker.id", config.node_id.to_string()),
        ("connections.max.idle.ms", millis(config.idle_timeout)),
        ("fetch.max.bytes", number(config.max_fetch_bytes.into())),
        ("group.consumer.heartbeat.interval.ms", millis(groups.consumer_heartbeat_interval)),
        ("group.consumer.max.size", groups.max_group_members.to_string()),
        ("group.consumer.session.timeout.ms", millis(groups.consumer_session_timeout)),
        ("group.initial.rebalance.delay.ms", millis(groups.initial_rebalance_delay)),
        ("group.max.session.timeout.ms", millis(groups.max_session_timeout)),
        ("group.max.size", groups.max_group_members.to_string()),
        ("group.min.session.timeout.ms", millis(groups.min_session_timeout)),
        ("log.cleaner.backoff.ms", millis(config.log_compaction_check_interval)),
        ("log.retention.check.interval.ms", millis(config.retention_check_interval)),
        ("max.connections", number(config.max_connections.into())),
        ("max.connections.per.ip", number(config.max_connections_of_address.into())),
        ("max.connections.per.ip.overrides", of_addresses(&config.max_connections_overrides)),
        ("message.max.bytes", number(config.max_message_bytes.into())),
        ("node.id", config.node_id.to_string()),
        ("num.partitions", number(config.default_partitions.into())),
        ("offset.metadata.max.bytes", groups.max_offset_metadata_bytes.to_string()),
        ("offsets.retention.check.interval.ms", millis(groups.sweep_interval)),
        ("offsets.retention.minutes", number(groups.offsets_retention.as_secs() / 60)),
        ("process.roles", "broker,controller".to_owned()),
        ("producer.id.expiration.ms", millis(producer_state::EXPIRATION)),
        ("queued.max.request.bytes", number(config.queued_request_bytes)),
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

/// As Kafka writes them: `10.0.0.1:100,10.0.0.2:5`.
fn of_addresses(connections: &BTreeMap<IpAddr, u32>) -> std::string::String {
    connections.iter().map(|(ip, max)| format!("{ip}:{max}")).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_configuration_leaves_as_it_is_is_no_setting_of_the_operators() {
        let config = BrokerConfig { max_message_bytes: 77, ..BrokerConfig::default() };
        let started_with = started_with(&config);
        assert_eq!(started_with["message.max.bytes"], "77");
        assert!(!started_with.contains_key("num.partitions"));
        assert!(started_with.contains_key("max.connections"));
    }

    #[test]
    fn names_are_there_once() {
        let settings = settings();
        assert!(settings.windows(2).all(|pair| pair[0].name < pair[1].name));
        let dynamic = |name: &str| {
            settings.iter().find(|setting| setting.name == name).unwrap().dynamic.is_some()
        };
        assert!(dynamic("log.retention.ms") && dynamic("log.segment.bytes"));
        assert!(dynamic("num.io.threads") && !dynamic("num.partitions"));
    }

    #[test]
    fn what_has_no_effect_says_so_and_its_default_is_one_that_may_be_set() {
        for setting in UNUSED {
            assert!(setting.documentation.contains("No effect here"), "{}", setting.name);
            setting.check(setting.default).unwrap();
        }
    }
}
