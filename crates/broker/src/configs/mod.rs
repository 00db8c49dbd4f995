//! Settings by Kafka's names: their allowed values, and the sources of the values in effect.
//!
//! A setting of a topic comes from the topic, else from the broker's setting of the same meaning (a
//! *synonym*: `log.retention.ms` for `retention.ms`), else it has Kafka's default. A broker's
//! setting comes from the dynamic settings of this broker, the dynamic settings of all brokers, the
//! configuration that it was started with, or Kafka's default, in this order.

pub(crate) mod broker;
pub(crate) mod group;
mod store;
pub(crate) mod topic;

use std::collections::BTreeMap;

use crate::errors::ApiError;

pub(crate) use store::{Configs, Entity};
pub(crate) use topic::AppendRules;

/// The longest value of a setting in bytes: values are kept in memory.
const MAX_VALUE_BYTES: usize = 4 << 10;

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

impl ConfigType {
    fn name(self) -> &'static str {
        match self {
            Self::Boolean => "BOOLEAN",
            Self::String => "STRING",
            Self::Int => "INT",
            Self::Long => "LONG",
            Self::Double => "DOUBLE",
            Self::List => "LIST",
        }
    }
}

/// The allowed values of a setting, within its type.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Allowed {
    Any,
    AtLeast(i64),
    Between(i64, i64),
    /// -1, or a number in this range.
    MinusOneOr(i64, i64),
    /// One of these; for a list, each element.
    OneOf(&'static [&'static str]),
    /// Only this value, although Kafka supports others, for this reason.
    Only(&'static str, &'static str),
    /// `*`, or pairs of partition and broker.
    Replicas,
    /// The start of a share group.
    ShareStart,
    /// Numbers by address.
    PerIp,
}

/// The source of a value, with its number in the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Topic = 1,
    DynamicBroker = 2,
    DynamicDefault = 3,
    StaticBroker = 4,
    Default = 5,
    Group = 8,
}

/// A value with its source and the setting's name there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Synonym {
    pub(crate) name: &'static str,
    pub(crate) value: String,
    pub(crate) source: Source,
}

/// A setting.
#[derive(Debug)]
pub(crate) struct Setting {
    pub(crate) name: &'static str,
    pub(crate) kind: ConfigType,
    /// Kafka's default.
    pub(crate) default: &'static str,
    pub(crate) allowed: Allowed,
    /// The broker's setting that applies if this one is not set.
    pub(crate) broker_name: Option<&'static str>,
    /// Whether the setting has an effect here. A setting without one can be set for topics and
    /// groups and is reported; its documentation says so.
    pub(crate) effective: bool,
    pub(crate) documentation: &'static str,
}

impl Setting {
    /// Checks a value and returns it in its stored form.
    ///
    /// # Errors
    /// Why the value is not allowed, with Kafka's message.
    pub(crate) fn check(&self, value: &str) -> Result<String, String> {
        self.check_as(self.name, value)
    }

    /// Checks a value of a setting that has another name in messages.
    fn check_as(&self, name: &str, value: &str) -> Result<String, String> {
        let value = value.trim();
        if value.len() > MAX_VALUE_BYTES {
            return Err(format!("{name} can have at most {MAX_VALUE_BYTES} bytes"));
        }
        let invalid = |value: &str, reason: &str| {
            Err(format!("Invalid value {value} for configuration {name}: {reason}"))
        };
        let no_number = || invalid(value, &format!("Not a number of type {}", self.kind.name()));
        match self.kind {
            ConfigType::Boolean => {
                if !value.eq_ignore_ascii_case("true") && !value.eq_ignore_ascii_case("false") {
                    return invalid(value, "Expected value to be either true or false");
                }
                self.only(name, value.to_ascii_lowercase())
            }
            ConfigType::Int | ConfigType::Long => {
                let Ok(number) = value.parse::<i64>() else { return no_number() };
                if self.kind == ConfigType::Int && i32::try_from(number).is_err() {
                    return no_number();
                }
                if let Err(reason) = self.in_range(number as f64, |bound| number < bound) {
                    return invalid(&number.to_string(), &reason);
                }
                self.only(name, number.to_string())
            }
            ConfigType::Double => {
                let Some(number) = value.parse::<f64>().ok().filter(|number| number.is_finite())
                else {
                    return no_number();
                };
                if let Err(reason) = self.in_range(number, |bound| number < bound as f64) {
                    return invalid(&format!("{number:?}"), &reason);
                }
                Ok(format!("{number:?}"))
            }
            ConfigType::String => {
                if let Err(reason) = self.listed(value) {
                    return invalid(value, &reason);
                }
                self.only(name, value.to_owned())
            }
            ConfigType::List => {
                let mut elements: Vec<&str> = Vec::new();
                if value.is_empty() {
                    return Ok(String::new());
                }
                for element in value.split(',').map(str::trim) {
                    if element.is_empty() {
                        return Err(format!("Configuration '{name}' values must not be empty."));
                    }
                    if let Err(reason) = self.listed(element) {
                        return invalid(element, &reason);
                    }
                    if !elements.contains(&element) {
                        elements.push(element);
                    }
                }
                Ok(elements.join(","))
            }
        }
    }

    fn only(&self, name: &str, value: String) -> Result<String, String> {
        match self.allowed {
            Allowed::Only(only, reason) if value != only => {
                Err(format!("Invalid value {value} for configuration {name}: {reason}"))
            }
            _ => Ok(value),
        }
    }

    fn in_range(&self, number: f64, below: impl Fn(i64) -> bool) -> Result<(), String> {
        match self.allowed {
            Allowed::AtLeast(min) | Allowed::Between(min, _) if below(min) => {
                Err(format!("Value must be at least {min}"))
            }
            Allowed::Between(_, max) if number > max as f64 => {
                Err(format!("Value must be no more than {max}"))
            }
            Allowed::MinusOneOr(min, max)
                if number != -1.0 && !(min as f64..=max as f64).contains(&number) =>
            {
                Err(format!("Value must be between {min} and {max} or equal to -1"))
            }
            _ => Ok(()),
        }
    }

    fn listed(&self, value: &str) -> Result<(), String> {
        match self.allowed {
            Allowed::OneOf(values) if !values.contains(&value) => {
                Err(format!("String must be one of: {}", values.join(", ")))
            }
            Allowed::Replicas if value != "*" && !is_replica(value) => Err(format!(
                "{} must be the literal '*' or a list of replicas in the following format: \
                 [partitionId]:[brokerId],[partitionId]:[brokerId],...",
                self.name
            )),
            Allowed::PerIp => broker::per_ip(value).map(drop),
            Allowed::ShareStart if group::ShareStart::parse(value).is_none() => {
                Err("The value must be either 'earliest', 'latest' or of the format \
                     'by_duration:<PnDTnHnMn.nS>'."
                    .into())
            }
            _ => Ok(()),
        }
    }
}

fn is_replica(value: &str) -> bool {
    value.split_once(':').is_some_and(|(partition, broker)| {
        partition.parse::<u32>().is_ok() && broker.parse::<u32>().is_ok()
    })
}

/// An operation on one setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Set(String),
    Delete,
    /// Adds elements to a list.
    Append(String),
    /// Removes elements from a list.
    Subtract(String),
}

/// A change of the settings of one resource.
#[derive(Clone, Debug)]
pub(crate) struct Alteration {
    /// Each setting occurs once.
    pub(crate) ops: Vec<(String, Op)>,
    /// Whether settings that are not named lose their values.
    pub(crate) only_these: bool,
}

impl Alteration {
    /// Applies the change to `current`, without checking values. A list without a value of its own
    /// starts as `inherited`; `find` returns the setting with a name.
    ///
    /// # Errors
    /// [`ApiError::InvalidConfig`] if elements of a setting that is not a list are to be changed.
    pub(crate) fn apply(
        &self,
        find: impl Fn(&str) -> Option<&'static Setting>,
        current: &Overrides,
        inherited: impl Fn(&'static Setting) -> String,
    ) -> Result<Overrides, ApiError> {
        let mut overrides = if self.only_these { Overrides::new() } else { current.clone() };
        for (name, op) in &self.ops {
            if let Op::Append(elements) | Op::Subtract(elements) = op
                && elements.len() > MAX_VALUE_BYTES
            {
                // The limit bounds the comparisons, which are quadratic.
                let most = format!("{name} can have at most {MAX_VALUE_BYTES} bytes");
                return Err(ApiError::InvalidConfig(most));
            }
            let list = |verb: &str| {
                let setting = find(name).filter(|found| found.kind == ConfigType::List);
                let setting = setting.ok_or_else(|| {
                    ApiError::InvalidConfig(format!(
                        "Can't {verb} to key {name} because its type is not LIST."
                    ))
                })?;
                let value = current.get(name).cloned().unwrap_or_else(|| inherited(setting));
                let elements = value.split(',').filter(|element| !element.is_empty());
                Ok::<_, ApiError>(elements.map(str::to_owned).collect::<Vec<_>>())
            };
            let value = match op {
                Op::Set(value) => value.clone(),
                Op::Delete => {
                    overrides.remove(name);
                    continue;
                }
                Op::Append(more) => {
                    let mut elements = list("APPEND")?;
                    for element in more.split(',') {
                        if !elements.iter().any(|present| present == element) {
                            elements.push(element.to_owned());
                        }
                    }
                    elements.join(",")
                }
                Op::Subtract(less) => {
                    let mut elements = list("SUBTRACT")?;
                    elements.retain(|element| less.split(',').all(|gone| gone != element));
                    elements.join(",")
                }
            };
            overrides.insert(name.clone(), value);
        }
        Ok(overrides)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The messages of Apache Kafka 4.3.1, verbatim.
    #[test]
    fn invalid_values_are_refused_with_kafkas_messages() {
        let reason = |name: &str, value: &str| topic::find(name).unwrap().check(value).unwrap_err();
        for (name, value, expected) in [
            (
                "retention.ms",
                "x",
                "Invalid value x for configuration retention.ms: Not a number of type LONG",
            ),
            (
                "retention.ms",
                "",
                "Invalid value  for configuration retention.ms: Not a number of type LONG",
            ),
            (
                "retention.ms",
                "-2",
                "Invalid value -2 for configuration retention.ms: Value must be at least -1",
            ),
            (
                "segment.bytes",
                "1",
                "Invalid value 1 for configuration segment.bytes: Value must be at least 1048576",
            ),
            (
                "min.cleanable.dirty.ratio",
                "2",
                "Invalid value 2.0 for configuration min.cleanable.dirty.ratio: Value must be no \
                 more than 1",
            ),
            (
                "min.cleanable.dirty.ratio",
                "-1",
                "Invalid value -1.0 for configuration min.cleanable.dirty.ratio: Value must be at \
                 least 0",
            ),
            (
                "min.cleanable.dirty.ratio",
                "NaN",
                "Invalid value NaN for configuration min.cleanable.dirty.ratio: Not a number of \
                 type DOUBLE",
            ),
            (
                "preallocate",
                "yes",
                "Invalid value yes for configuration preallocate: Expected value to be either \
                 true or false",
            ),
            (
                "max.message.bytes",
                "99999999999",
                "Invalid value 99999999999 for configuration max.message.bytes: Not a number of \
                 type INT",
            ),
            (
                "cleanup.policy",
                "foo",
                "Invalid value foo for configuration cleanup.policy: String must be one of: \
                 compact, delete",
            ),
            (
                "cleanup.policy",
                "Delete",
                "Invalid value Delete for configuration cleanup.policy: String must be one of: \
                 compact, delete",
            ),
            (
                "cleanup.policy",
                "delete,",
                "Configuration 'cleanup.policy' values must not be empty.",
            ),
            (
                "message.timestamp.type",
                "x",
                "Invalid value x for configuration message.timestamp.type: String must be one of: \
                 CreateTime, LogAppendTime",
            ),
            (
                "compression.type",
                "foo",
                "Invalid value foo for configuration compression.type: String must be one of: \
                 uncompressed, zstd, lz4, snappy, gzip, producer",
            ),
            (
                "compression.gzip.level",
                "0",
                "Invalid value 0 for configuration compression.gzip.level: Value must be between \
                 1 and 9 or equal to -1",
            ),
            (
                "compression.lz4.level",
                "18",
                "Invalid value 18 for configuration compression.lz4.level: Value must be no more \
                 than 17",
            ),
        ] {
            assert_eq!(reason(name, value), expected);
        }
        let long = vec!["0:1"; 2_000].join(",");
        let too_long = reason("leader.replication.throttled.replicas", &long);
        assert!(too_long.contains("at most 4096 bytes"), "{too_long}");
        assert!(reason("min.insync.replicas", "2").contains("one replica"));
        assert!(reason("leader.replication.throttled.replicas", "x").contains("the literal '*'"));
    }

    #[test]
    fn values_are_normalized() {
        let stored = |name: &str, value: &str| topic::find(name).unwrap().check(value).unwrap();
        assert_eq!(stored("retention.ms", " 5 "), "5");
        assert_eq!(stored("preallocate", "TRUE"), "true");
        assert_eq!(stored("cleanup.policy", " delete , compact "), "delete,compact");
        assert_eq!(stored("cleanup.policy", "delete,delete"), "delete");
        assert_eq!(stored("cleanup.policy", ""), "");
        assert_eq!(stored("compression.gzip.level", "-1"), "-1");
        assert_eq!(stored("leader.replication.throttled.replicas", "0:1,1:1"), "0:1,1:1");
        assert_eq!(stored("min.cleanable.dirty.ratio", "1"), "1.0");
    }

    #[test]
    fn append_and_subtract_change_single_elements_of_lists() {
        let apply = |current: &str, op: Op| {
            let current = [("cleanup.policy".to_owned(), current.to_owned())].into();
            let ops = vec![("cleanup.policy".to_owned(), op)];
            let alteration = Alteration { ops, only_these: false };
            let overrides = alteration.apply(topic::find, &current, |_| unreachable!()).unwrap();
            overrides["cleanup.policy"].clone()
        };
        assert_eq!(apply("delete", Op::Append("compact,delete".into())), "delete,compact");
        assert_eq!(apply("delete,compact", Op::Subtract("delete,no".into())), "compact");
        assert_eq!(apply("delete", Op::Subtract("delete".into())), "");
        assert_eq!(apply("delete", Op::Set("x".into())), "x");
    }

    #[test]
    fn long_lists_are_refused_before_their_elements_are_compared() {
        let long = (0..2_000_000).map(|n| n.to_string()).collect::<Vec<_>>().join(",");
        for op in [Op::Append(long.clone()), Op::Subtract(long.clone())] {
            let ops = vec![("cleanup.policy".to_owned(), op)];
            let alteration = Alteration { ops, only_these: false };
            let refused = alteration.apply(topic::find, &Overrides::new(), |_| long.clone());
            assert!(refused.unwrap_err().to_string().contains("at most 4096 bytes"));
        }
    }

    #[test]
    fn every_table_is_sorted_and_its_defaults_are_valid() {
        for settings in [topic::SETTINGS, group::SETTINGS] {
            assert!(settings.is_sorted_by_key(|setting| setting.name));
            for setting in settings {
                assert_eq!(setting.check(setting.default).unwrap(), setting.default);
                let says_so = setting.documentation.contains("No effect here");
                assert_eq!(says_so, !setting.effective, "{}", setting.name);
            }
        }
    }
}
