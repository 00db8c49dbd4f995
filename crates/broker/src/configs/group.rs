//! The settings of groups. The coordinator reads them through [`super::Configs::group_number`].

use std::time::Duration;

use super::{Allowed, ConfigType, Setting};
use crate::groups::GroupConfig;

type Text = std::string::String;

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

const fn text(
    name: &'static str,
    kind: ConfigType,
    default: &'static str,
    allowed: Allowed,
    documentation: &'static str,
) -> Setting {
    Setting { name, kind, default, allowed, broker_name: None, effective: true, documentation }
}

const fn unused(
    name: &'static str,
    broker_name: Option<&'static str>,
    kind: ConfigType,
    default: &'static str,
    allowed: Allowed,
) -> Setting {
    let documentation = "No effect here: there are no streams groups yet.";
    Setting { name, kind, default, allowed, broker_name, effective: false, documentation }
}

const fn no_dead_letters(
    name: &'static str,
    kind: ConfigType,
    default: &'static str,
    allowed: Allowed,
) -> Setting {
    let documentation = "No effect here: share groups do not support dead letter queues.";
    Setting { name, kind, default, allowed, broker_name: None, effective: false, documentation }
}

use Allowed::{Any, AtLeast, Between, OneOf};
use ConfigType::{Boolean, Int, List, String};

/// All settings of groups, by name. The bounds of heartbeat intervals and session timeouts are
/// those of the configuration; the others are the defaults of Kafka's brokers.
#[rustfmt::skip]
pub(crate) const SETTINGS: &[Setting] = &[
    ms("consumer.assignment.interval.ms", "group.consumer.assignment.interval.ms", "1000",
        Between(0, 15_000), false,
        "How long a new assignment waits for further changes of the group. No effect here: \
         assignments are computed at once."),
    ms("consumer.heartbeat.interval.ms", "group.consumer.heartbeat.interval.ms", "5000", AtLeast(1),
        true,
        "The heartbeat interval of members of a consumer group."),
    ms("consumer.session.timeout.ms", "group.consumer.session.timeout.ms", "45000", AtLeast(1),
        true,
        "The time without a heartbeat after which a member of a consumer group is removed."),
    no_dead_letters("errors.deadletterqueue.copy.record.enable", Boolean, "false", Any),
    no_dead_letters("errors.deadletterqueue.topic.name", String, "",
        Allowed::Only("", "share groups do not support dead letter queues")),
    ms("share.assignment.interval.ms", "group.share.assignment.interval.ms", "1000",
        Between(0, 15_000), false,
        "How long a new assignment waits for further changes of the group. No effect here: \
         assignments are computed at once."),
    text("share.auto.offset.reset", String, "latest", Allowed::ShareStart,
        "The start of a share group in a topic that is new to it: `earliest`, `latest`, or a time \
         before now, `by_duration:PnDTnHnMn.nS`."),
    ms("share.delivery.count.limit", "group.share.delivery.count.limit", "5", Between(2, 10), true,
        "The number of deliveries after which a record that was not accepted is archived."),
    ms("share.heartbeat.interval.ms", "group.share.heartbeat.interval.ms", "5000", AtLeast(1), true,
        "The heartbeat interval of members of a share group."),
    text("share.isolation.level", String, "read_uncommitted",
        OneOf(&["read_committed", "read_uncommitted"]),
        "Whether members get records of open and aborted transactions."),
    ms("share.partition.max.record.locks", "group.share.partition.max.record.locks", "2000",
        Between(100, 4_000), true,
        "The limit on a partition's records from the first unfinished to the last delivered one."),
    ms("share.record.lock.duration.ms", "group.share.record.lock.duration.ms", "30000",
        Between(15_000, 60_000), true,
        "How long a member holds a record before it is delivered to others."),
    text("share.renew.acknowledge.enable", Boolean, "true", Any,
        "Whether members may extend the time for a record."),
    ms("share.session.timeout.ms", "group.share.session.timeout.ms", "45000", AtLeast(1), true,
        "The time without a heartbeat after which a member of a share group is removed."),
    unused("streams.assignment.interval.ms", Some("group.streams.assignment.interval.ms"), Int,
        "1000", Between(0, 15_000)),
    unused("streams.assignor.name", Some("group.streams.assignors"), String, "sticky",
        OneOf(&["sticky"])),
    unused("streams.heartbeat.interval.ms", Some("group.streams.heartbeat.interval.ms"), Int,
        "5000", Between(5_000, 15_000)),
    unused("streams.initial.rebalance.delay.ms", Some("group.streams.initial.rebalance.delay.ms"),
        Int, "3000", AtLeast(0)),
    unused("streams.num.standby.replicas", Some("group.streams.num.standby.replicas"), Int, "0",
        Between(0, 2)),
    unused("streams.rack.aware.assignment.tags", Some("group.streams.rack.aware.assignment.tags"),
        List, "", Any),
    unused("streams.session.timeout.ms", Some("group.streams.session.timeout.ms"), Int, "45000",
        Between(45_000, 60_000)),
];

/// Checks a timeout or interval of members against the configured bounds.
///
/// # Errors
/// The violated bounds, with Kafka's message.
pub(super) fn check_bounds(config: &GroupConfig, name: &str, value: &str) -> Result<(), Text> {
    let (kind, time) = name.split_once('.').unwrap_or_default();
    let times = match kind {
        "consumer" => &config.consumer,
        "share" => &config.share,
        _ => return Ok(()),
    };
    let (min, max) = match time {
        "heartbeat.interval.ms" => (times.min_heartbeat_interval, times.max_heartbeat_interval),
        "session.timeout.ms" => (times.min_session_timeout, times.max_session_timeout),
        _ => return Ok(()),
    };
    let (min, max) = (min.as_millis(), max.as_millis());
    match value.parse::<u128>().is_ok_and(|value| (min..=max).contains(&value)) {
        true => Ok(()),
        false => Err(format!("{name} must be in the range {min} to {max} inclusive.")),
    }
}

/// The setting with this name.
pub(crate) fn find(name: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.name == name)
}

/// The offset at which a share group starts in a topic that is new to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShareStart {
    Earliest,
    Latest,
    /// The first record that is at most this old.
    Ago(Duration),
}

impl ShareStart {
    /// Parses a value; `None` if it is invalid.
    pub(super) fn parse(value: &str) -> Option<Self> {
        match value {
            "earliest" => Some(Self::Earliest),
            "latest" => Some(Self::Latest),
            other => iso_duration(other.strip_prefix("by_duration:")?).map(Self::Ago),
        }
    }
}

/// Parses an ISO 8601 duration of days, hours, minutes and seconds, in this order, each at most
/// once and at least one of them: `P1DT2H3M4.5S`.
fn iso_duration(text: &str) -> Option<Duration> {
    let text = text.to_ascii_uppercase();
    let (days, time) = match text.strip_prefix('P')?.split_once('T') {
        Some((_, "")) => return None,
        Some((days, time)) => (days, time),
        None => (text.strip_prefix('P')?, ""),
    };
    let mut rest = (days, time);
    let mut take = |unit: char, of_time: bool| -> Option<Option<f64>> {
        let part = if of_time { &mut rest.1 } else { &mut rest.0 };
        let Some((number, behind)) = part.split_once(unit) else { return Some(None) };
        *part = behind;
        let is_number = number.starts_with(|c: char| c.is_ascii_digit())
            && number.chars().all(|c| c.is_ascii_digit() || (unit == 'S' && c == '.'));
        if is_number { number.parse().ok().map(Some) } else { None }
    };
    let parts = [take('D', false)?, take('H', true)?, take('M', true)?, take('S', true)?];
    if rest != ("", "") || parts.iter().all(Option::is_none) {
        return None;
    }
    let seconds = parts.iter().zip([86_400.0, 3_600.0, 60.0, 1.0]);
    let seconds: f64 = seconds.map(|(part, unit)| part.unwrap_or(0.0) * unit).sum();
    Duration::try_from_secs_f64(seconds).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_groups_start_at_an_end_or_at_a_time() {
        let ago = |seconds: f64| Some(ShareStart::Ago(Duration::from_secs_f64(seconds)));
        for (value, start) in [
            ("earliest", Some(ShareStart::Earliest)),
            ("latest", Some(ShareStart::Latest)),
            ("by_duration:PT10M", ago(600.0)),
            ("by_duration:P1DT2H3M4.5S", ago(93_784.5)),
            ("by_duration:P2D", ago(172_800.0)),
            ("by_duration:PT0S", ago(0.0)),
            ("by_duration:P", None),
            ("by_duration:PT", None),
            ("by_duration:P1DT", None),
            ("by_duration:-PT1S", None),
            ("by_duration:PT-1S", None),
            ("by_duration:PT1S2M", None),
            ("by_duration:PT1.5M", None),
            ("by_duration:P1Y", None),
            ("by_duration:", None),
            ("PT1S", None),
            ("Latest", None),
            ("", None),
        ] {
            assert_eq!(ShareStart::parse(value), start, "{value}");
        }
    }
}
