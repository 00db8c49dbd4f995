//! The configuration of topics: which settings are known, what they may be, what is in effect.

use std::collections::BTreeMap;

use crate::errors::ApiError;
use crate::partition::AppendRules;

/// Settings that differ from the default, by name.
pub(crate) type Overrides = BTreeMap<String, String>;

/// A setting's type, with its number in DescribeConfigs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConfigType {
    Boolean = 1,
    String = 2,
    Int = 3,
    Long = 5,
    Double = 6,
    List = 7,
}

/// A setting of a topic.
pub(crate) struct Setting {
    pub(crate) name: &'static str,
    pub(crate) kind: ConfigType,
    /// What holds without an override; `None` for settings that are stored and shown when given, and have no effect here.
    pub(crate) default: Option<&'static str>,
    /// Values allowed; empty when the type says it.
    allowed: &'static [&'static str],
    min: i64,
    pub(crate) documentation: &'static str,
}

const CLEANUP_POLICY: &str = "cleanup.policy";
const RETENTION_BYTES: &str = "retention.bytes";
const RETENTION_MS: &str = "retention.ms";
pub(crate) const MAX_MESSAGE_BYTES: &str = "max.message.bytes";
const TIMESTAMP_TYPE: &str = "message.timestamp.type";
const LOG_APPEND_TIME: &str = "LogAppendTime";

const fn effective(
    name: &'static str,
    kind: ConfigType,
    default: &'static str,
    documentation: &'static str,
) -> Setting {
    Setting { name, kind, default: Some(default), allowed: &[], min: i64::MIN, documentation }
}

const fn one_of(
    name: &'static str,
    kind: ConfigType,
    default: &'static str,
    allowed: &'static [&'static str],
    documentation: &'static str,
) -> Setting {
    Setting { name, kind, default: Some(default), allowed, min: i64::MIN, documentation }
}

const fn stored(name: &'static str, kind: ConfigType, min: i64) -> Setting {
    Setting {
        name,
        kind,
        default: None,
        allowed: &[],
        min,
        documentation: "Stored; has no effect on this server yet.",
    }
}

/// All settings that a topic can have, Kafka's names and types. `max.message.bytes` has the server's default.
pub(crate) const SETTINGS: &[Setting] = &[
    one_of(
        CLEANUP_POLICY,
        ConfigType::List,
        "delete",
        &["delete", "compact", "compact,delete", "delete,compact"],
        "With delete, retention.ms and retention.bytes hold. Records are not compacted yet.",
    ),
    one_of(
        "compression.type",
        ConfigType::String,
        "producer",
        &["producer"],
        "Batches keep the compression that the producer chose.",
    ),
    Setting {
        name: MAX_MESSAGE_BYTES,
        kind: ConfigType::Int,
        default: Some(""),
        allowed: &[],
        min: 0,
        documentation: "Largest record batch, after compression.",
    },
    one_of(
        TIMESTAMP_TYPE,
        ConfigType::String,
        "CreateTime",
        &["CreateTime", LOG_APPEND_TIME],
        "Whether records carry the producer's time or that of the append.",
    ),
    Setting {
        name: "min.insync.replicas",
        kind: ConfigType::Int,
        default: Some("1"),
        allowed: &["1"],
        min: 1,
        documentation: "Every acknowledged record is on stable storage; there is one replica.",
    },
    Setting {
        name: RETENTION_BYTES,
        kind: ConfigType::Long,
        default: Some("-1"),
        allowed: &[],
        min: -1,
        documentation: "The oldest records of a partition are deleted, object by object, while at least so many bytes are left. -1 for no bound.",
    },
    Setting {
        name: RETENTION_MS,
        kind: ConfigType::Long,
        default: Some("-1"),
        allowed: &[],
        min: -1,
        documentation: "Records are deleted, object by object, when the newest of an object is so old. -1 for no bound.",
    },
    effective(
        "unclean.leader.election.enable",
        ConfigType::Boolean,
        "false",
        "There is one replica, so there is no election.",
    ),
    stored("delete.retention.ms", ConfigType::Long, 0),
    stored("file.delete.delay.ms", ConfigType::Long, 0),
    stored("flush.messages", ConfigType::Long, 1),
    stored("flush.ms", ConfigType::Long, 0),
    stored("index.interval.bytes", ConfigType::Int, 0),
    stored("local.retention.bytes", ConfigType::Long, -2),
    stored("local.retention.ms", ConfigType::Long, -2),
    stored("max.compaction.lag.ms", ConfigType::Long, 1),
    stored("message.timestamp.after.max.ms", ConfigType::Long, 0),
    stored("message.timestamp.before.max.ms", ConfigType::Long, 0),
    stored("min.cleanable.dirty.ratio", ConfigType::Double, 0),
    stored("min.compaction.lag.ms", ConfigType::Long, 0),
    stored("preallocate", ConfigType::Boolean, 0),
    stored("remote.storage.enable", ConfigType::Boolean, 0),
    stored("segment.bytes", ConfigType::Int, 1),
    stored("segment.index.bytes", ConfigType::Int, 4),
    stored("segment.jitter.ms", ConfigType::Long, 0),
    stored("segment.ms", ConfigType::Long, 1),
];

/// Check one override.
///
/// # Errors
/// [`ApiError::InvalidConfig`] for an unknown name, or a value that the setting can not have.
pub(crate) fn check(name: &str, value: &str) -> Result<(), ApiError> {
    let Some(setting) = SETTINGS.iter().find(|setting| setting.name == name) else {
        return Err(ApiError::InvalidConfig(format!("a topic has no setting {name}")));
    };
    let at_least = |number: i64| number >= setting.min;
    let valid = match setting.kind {
        ConfigType::Boolean => matches!(value, "true" | "false"),
        ConfigType::Int => value.parse::<i32>().is_ok_and(|number| at_least(number.into())),
        ConfigType::Long => value.parse::<i64>().is_ok_and(at_least),
        ConfigType::Double => {
            value.parse::<f64>().is_ok_and(|number| (0.0..=1.0).contains(&number))
        }
        ConfigType::String | ConfigType::List => true,
    };
    if !valid {
        return Err(ApiError::InvalidConfig(format!("{name} can not be {value:?}")));
    }
    if !setting.allowed.is_empty() && !setting.allowed.contains(&value) {
        return Err(ApiError::InvalidConfig(format!(
            "{name} is {value:?}, this server has {}",
            setting.allowed.join(", ")
        )));
    }
    Ok(())
}

/// What the overrides of a topic mean for appends.
pub(crate) fn append_rules(overrides: &Overrides, default_max_batch_bytes: u32) -> AppendRules {
    AppendRules {
        max_batch_bytes: overrides
            .get(MAX_MESSAGE_BYTES)
            .and_then(|value| value.parse().ok())
            .unwrap_or(default_max_batch_bytes),
        log_append_time: overrides
            .get(TIMESTAMP_TYPE)
            .is_some_and(|value| value == LOG_APPEND_TIME),
    }
}

/// Which records of a topic may go. `None`: no bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RetentionRules {
    pub(crate) age_ms: Option<i64>,
    pub(crate) keep_bytes: Option<u64>,
}

/// What the overrides of a topic mean for its oldest records.
pub(crate) fn retention_rules(overrides: &Overrides) -> RetentionRules {
    let deletes = overrides
        .get(CLEANUP_POLICY)
        .is_none_or(|policies| policies.split(',').any(|p| p == "delete"));
    if !deletes {
        return RetentionRules::default();
    }
    let bound = |name| overrides.get(name).and_then(|value| value.parse::<i64>().ok());
    RetentionRules {
        age_ms: bound(RETENTION_MS).filter(|ms| *ms >= 0),
        keep_bytes: bound(RETENTION_BYTES).and_then(|bytes| u64::try_from(bytes).ok()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retention_needs_a_bound_and_the_policy() {
        let rules = |overrides: &[(&str, &str)]| {
            let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
            retention_rules(&overrides.iter().map(own).collect())
        };
        let none = RetentionRules::default();
        let (age, bytes) = (("retention.ms", "7"), ("retention.bytes", "9"));
        let both = RetentionRules { age_ms: Some(7), keep_bytes: Some(9) };
        assert_eq!(rules(&[]), none);
        assert_eq!(rules(&[("retention.ms", "-1"), ("retention.bytes", "-1")]), none);
        assert_eq!(rules(&[age, bytes]), both);
        assert_eq!(rules(&[age]), RetentionRules { keep_bytes: None, ..both });
        assert_eq!(rules(&[bytes, ("cleanup.policy", "compact,delete")]).keep_bytes, Some(9));
        assert_eq!(rules(&[age, bytes, ("cleanup.policy", "compact")]), none);
    }

    #[test]
    fn every_default_is_a_valid_value() {
        for setting in SETTINGS {
            match setting.default {
                Some("") => assert_eq!(setting.name, MAX_MESSAGE_BYTES),
                Some(default) => check(setting.name, default).unwrap(),
                None => {}
            }
        }
    }

    #[test]
    fn wrong_names_and_values_are_refused() {
        for (name, value) in [
            ("no.such.setting", "1"),
            ("max.message.bytes", "-1"),
            ("max.message.bytes", "many"),
            ("message.timestamp.type", "Sometime"),
            ("compression.type", "zstd"),
            ("min.insync.replicas", "2"),
            ("retention.ms", "-2"),
            ("preallocate", "yes"),
            ("min.cleanable.dirty.ratio", "2"),
        ] {
            assert_eq!(check(name, value).unwrap_err().code(), 40, "{name}={value}");
        }
    }

    #[test]
    fn overrides_take_effect() {
        let mut overrides = Overrides::new();
        assert_eq!(
            append_rules(&overrides, 9),
            AppendRules { max_batch_bytes: 9, log_append_time: false }
        );
        overrides.insert("max.message.bytes".into(), "100".into());
        overrides.insert("message.timestamp.type".into(), "LogAppendTime".into());
        assert_eq!(
            append_rules(&overrides, 9),
            AppendRules { max_batch_bytes: 100, log_append_time: true }
        );
    }
}
