//! The settings of groups. The coordinator asks [`super::Configs::group_number`] for them.

use super::{Allowed, ConfigType, Setting};

const fn ms(
    name: &'static str,
    broker_name: &'static str,
    default: &'static str,
    allowed: Allowed,
    effective: bool,
    documentation: &'static str,
) -> Setting {
    Setting {
        name,
        kind: Int,
        default,
        allowed,
        broker_name: Some(broker_name),
        effective,
        documentation,
    }
}

const fn unused(
    name: &'static str,
    broker_name: Option<&'static str>,
    kind: ConfigType,
    default: &'static str,
    allowed: Allowed,
) -> Setting {
    let documentation = "No effect here: there are neither share groups nor streams groups yet.";
    Setting { name, kind, default, allowed, broker_name, effective: false, documentation }
}

use Allowed::{Any, AtLeast, Between, OneOf, ShareStart};
use ConfigType::{Boolean, Int, String};

/// All settings that a group can have, by name. The bounds are those that Kafka's brokers have by default.
#[rustfmt::skip]
pub(crate) const SETTINGS: &[Setting] = &[
    ms("consumer.assignment.interval.ms", "group.consumer.assignment.interval.ms", "1000", Between(0, 15_000), false,
        "How long a new assignment waits for further changes of the group. No effect here: assignments are made at once."),
    ms("consumer.heartbeat.interval.ms", "group.consumer.heartbeat.interval.ms", "5000", Between(5_000, 15_000), true,
        "How often members of a consumer group are told to send a heartbeat."),
    ms("consumer.session.timeout.ms", "group.consumer.session.timeout.ms", "45000", Between(45_000, 60_000), true,
        "A member of a consumer group that sends no heartbeat for so long is removed."),
    unused("share.assignment.interval.ms", Some("group.share.assignment.interval.ms"), Int, "1000", Between(0, 15_000)),
    unused("share.auto.offset.reset", None, String, "latest", ShareStart),
    unused("share.delivery.count.limit", Some("group.share.delivery.count.limit"), Int, "5", Between(2, 10)),
    unused("share.heartbeat.interval.ms", Some("group.share.heartbeat.interval.ms"), Int, "5000", Between(5_000, 15_000)),
    unused("share.isolation.level", None, String, "read_uncommitted", OneOf(&["read_committed", "read_uncommitted"])),
    unused("share.partition.max.record.locks", Some("group.share.partition.max.record.locks"), Int, "2000", Between(100, 4_000)),
    unused("share.record.lock.duration.ms", Some("group.share.record.lock.duration.ms"), Int, "30000", Between(15_000, 60_000)),
    unused("share.renew.acknowledge.enable", None, Boolean, "true", Any),
    unused("share.session.timeout.ms", Some("group.share.session.timeout.ms"), Int, "45000", Between(45_000, 60_000)),
    unused("streams.assignment.interval.ms", Some("group.streams.assignment.interval.ms"), Int, "1000", Between(0, 15_000)),
    unused("streams.heartbeat.interval.ms", Some("group.streams.heartbeat.interval.ms"), Int, "5000", Between(5_000, 15_000)),
    unused("streams.initial.rebalance.delay.ms", Some("group.streams.initial.rebalance.delay.ms"), Int, "3000", AtLeast(0)),
    unused("streams.num.standby.replicas", Some("group.streams.num.standby.replicas"), Int, "0", Between(0, 2)),
    unused("streams.session.timeout.ms", Some("group.streams.session.timeout.ms"), Int, "45000", Between(45_000, 60_000)),
];

/// The setting of this name.
pub(crate) fn find(name: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.name == name)
}
