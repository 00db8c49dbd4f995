//! The settings of a topic at one side, and what opening a topic changes at the target.

use std::collections::BTreeMap;

use alluvium_broker::IMPORT_SETTING;

use crate::kafka::Client;
use crate::output::Failure;
use crate::topic;

/// Kafka's source of a setting that was set for the topic.
const OF_TOPIC: i8 = 1;
/// Settings that decide which records are kept or accepted. They must be the same at both sides,
/// also where they come from the brokers.
const DECISIVE: [&str; 8] = [
    "cleanup.policy",
    "delete.retention.ms",
    "max.compaction.lag.ms",
    "max.message.bytes",
    "message.timestamp.type",
    "min.compaction.lag.ms",
    "retention.bytes",
    "retention.ms",
];

/// Settings of a topic, without the one that marks an import.
#[derive(Clone, Default)]
pub(super) struct Settings {
    /// Those that were set for the topic.
    pub(super) own: BTreeMap<String, String>,
    /// Those in effect, wherever they come from.
    effective: BTreeMap<String, String>,
}

/// A setting that differs: the value to set, or `None` to remove it.
pub(super) type Change = (String, Option<String>);

impl Settings {
    /// Requests the settings of a topic.
    ///
    /// # Errors
    /// The server refuses, or does not answer.
    pub(super) fn read(client: &mut Client, name: &str) -> Result<Self, Failure> {
        let mut settings = Self::default();
        for config in topic::described_configs(client, name)? {
            let Some(value) = config.value.filter(|_| &*config.name != IMPORT_SETTING) else {
                continue;
            };
            let (name, value) = (config.name.to_string(), value.to_string());
            if config.config_source == OF_TOPIC {
                settings.own.insert(name.clone(), value.clone());
            }
            settings.effective.insert(name, value);
        }
        Ok(settings)
    }

    /// Returns the settings that a topic of the target is to have.
    pub(super) fn wanted(&self) -> BTreeMap<String, String> {
        let decisive = DECISIVE.iter().filter_map(|name| self.effective.get_key_value(*name));
        let decisive = decisive.map(|(name, value)| (name.clone(), value.clone()));
        decisive.chain(self.own.clone()).collect()
    }

    /// Whether log compaction removes records.
    pub(super) fn is_compacted(&self) -> bool {
        self.effective.get("cleanup.policy").is_some_and(|policy| policy.contains("compact"))
    }

    /// Returns the value in effect.
    pub(super) fn effective(&self, name: &str) -> Option<&String> {
        self.effective.get(name)
    }

    /// Returns the changes of `target` after which the topic has the settings of this one.
    pub(super) fn changes(&self, target: &Self) -> Vec<Change> {
        let own = self.own.iter().filter(|(name, value)| target.own.get(*name) != Some(value));
        let mut changes: Vec<Change> =
            own.map(|(name, value)| (name.clone(), Some(value.clone()))).collect();
        for name in DECISIVE.into_iter().filter(|name| !self.own.contains_key(*name)) {
            let value = self.effective.get(name);
            let is_same = value.is_none() || target.effective.get(name) == value;
            if !is_same {
                changes.push((name.to_owned(), value.cloned()));
            }
        }
        let is_kept = |name: &str| self.own.contains_key(name) || DECISIVE.contains(&name);
        let removed = target.own.keys().filter(|name| !is_kept(name));
        changes.extend(removed.map(|name| (name.clone(), None)));
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(own: &[(&str, &str)], effective: &[(&str, &str)]) -> Settings {
        let map = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
        };
        let effective = [effective, own].concat();
        Settings { own: map(own), effective: map(&effective) }
    }

    #[test]
    fn a_topic_gets_its_own_settings_and_decisive_ones_of_brokers() {
        let source = settings(
            &[("retention.bytes", "7"), ("segment.bytes", "9")],
            &[("retention.ms", "-1"), ("flush.ms", "5"), ("cleanup.policy", "delete")],
        );
        let target = settings(
            &[("segment.bytes", "8"), ("flush.messages", "1"), ("max.message.bytes", "3")],
            &[("retention.ms", "604800000"), ("flush.ms", "6"), ("cleanup.policy", "delete")],
        );
        let set = |name: &str, value: &str| (name.to_owned(), Some(value.to_owned()));
        let expected = [
            set("retention.bytes", "7"),
            set("segment.bytes", "9"),
            set("retention.ms", "-1"),
            ("flush.messages".to_owned(), None),
        ];
        assert_eq!(source.changes(&target), expected);
        let names = ["cleanup.policy", "retention.bytes", "retention.ms", "segment.bytes"];
        assert_eq!(source.wanted().into_keys().collect::<Vec<_>>(), names);
        assert!(!source.is_compacted());
    }
}
