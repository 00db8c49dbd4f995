//! The dynamic settings of brokers and groups: in the catalog under `config/`, in memory as maps.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use alluvium_stream::{Change, Store};
use parking_lot::RwLock;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use super::broker::{self, BrokerSetting};
use super::group::ShareStart;
use super::{Alteration, Overrides, Source, Synonym, group, topic};
use crate::config::BrokerConfig;
use crate::connections::Limits;
use crate::errors::ApiError;
use crate::groups::GroupConfig;
use crate::groups::share::ShareRules;

const META_PREFIX: &str = "config/";
const GROUP_PREFIX: &str = "config/group/";

/// The greatest number of groups with settings of their own.
const MAX_GROUPS: usize = 10_000;

/// The longest name of a group with settings of its own, in bytes.
const MAX_GROUP_NAME_BYTES: usize = 255;

/// The owner of dynamic settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entity<'a> {
    /// All brokers.
    Brokers,
    /// This broker.
    ThisBroker,
    /// A group, whether it exists or not.
    Group(&'a str),
}

#[derive(Default, PartialEq, Eq)]
struct State {
    brokers: Overrides,
    this_broker: Overrides,
    groups: BTreeMap<String, Overrides>,
}

/// The dynamic settings of brokers and groups.
pub(crate) struct Configs {
    store: Store,
    node_id: i32,
    /// The settings that a broker has.
    pub(crate) broker_settings: Vec<BrokerSetting>,
    started_with: Overrides,
    groups: GroupConfig,
    state: RwLock<State>,
    /// Held during the check and commit of a change.
    changing: tokio::sync::Mutex<()>,
    changed: Notify,
}

impl Configs {
    /// Loads the dynamic settings from the catalog.
    ///
    /// # Errors
    /// The key of the first invalid entry, and the reason.
    pub(crate) fn open(store: Store, config: &BrokerConfig) -> Result<Arc<Self>, String> {
        let mut configs = Self {
            store,
            node_id: config.node_id,
            broker_settings: broker::settings(),
            started_with: broker::started_with(config),
            groups: config.groups.clone(),
            state: RwLock::default(),
            changing: tokio::sync::Mutex::new(()),
            changed: Notify::new(),
        };
        *configs.state.get_mut() = configs.stored()?;
        Ok(Arc::new(configs))
    }

    /// Reads what the catalog has.
    fn stored(&self) -> Result<State, String> {
        let mut state = State::default();
        for (key, value) in self.store.meta(META_PREFIX) {
            let overrides: Overrides =
                serde_json::from_slice(&value).map_err(|e| format!("{key}: {e}"))?;
            if let Some(group) = key.strip_prefix(GROUP_PREFIX) {
                state.groups.insert(group.to_owned(), overrides);
            } else if key == meta_key(Entity::Brokers, self.node_id) {
                state.brokers = overrides;
            } else if key == meta_key(Entity::ThisBroker, self.node_id) {
                state.this_broker = overrides;
            }
        }
        Ok(state)
    }

    /// Takes over what the catalog has now, from a store that another server writes. Returns
    /// whether anything has changed.
    ///
    /// # Errors
    /// The key of the first invalid entry, and the reason; nothing has changed.
    pub(crate) fn follow(&self) -> Result<bool, String> {
        let stored = self.stored()?;
        let mut state = self.state.write();
        if *state == stored {
            return Ok(false);
        }
        *state = stored;
        drop(state);
        self.changed.notify_waiters();
        Ok(true)
    }

    /// Changes dynamic settings. With `validate_only`, only checks whether that would succeed.
    ///
    /// # Errors
    /// Unknown names and invalid values; failed storage.
    pub(crate) async fn alter(
        &self,
        entity: Entity<'_>,
        alteration: &Alteration,
        validate_only: bool,
    ) -> Result<(), ApiError> {
        let _changing = self.changing.lock().await;
        let current = self.overrides(entity);
        let overrides = match entity {
            Entity::Group(name) => self.altered_group(name, &current, alteration)?,
            Entity::Brokers | Entity::ThisBroker => {
                let overrides = self.altered_broker(&current, alteration)?;
                self.check_local_retention(entity, &current, &overrides)?;
                overrides
            }
        };
        if validate_only || overrides == current {
            return Ok(());
        }
        let key = meta_key(entity, self.node_id);
        let change = if overrides.is_empty() {
            Change::DeleteMeta(key)
        } else {
            let value = serde_json::to_vec(&overrides)
                .map_err(|e| ApiError::Internal(format!("catalog entry: {e}")))?;
            Change::PutMeta { key, value }
        };
        self.store.commit(vec![change]).await?;
        self.apply(entity, overrides);
        self.changed.notify_waiters();
        Ok(())
    }

    fn apply(&self, entity: Entity<'_>, overrides: Overrides) {
        let mut state = self.state.write();
        match entity {
            Entity::Brokers => state.brokers = overrides,
            Entity::ThisBroker => state.this_broker = overrides,
            Entity::Group(name) if overrides.is_empty() => {
                state.groups.remove(name);
            }
            Entity::Group(name) => {
                state.groups.insert(name.to_owned(), overrides);
            }
        }
    }

    fn altered_group(
        &self,
        name: &str,
        current: &Overrides,
        alteration: &Alteration,
    ) -> Result<Overrides, ApiError> {
        if name.is_empty() {
            let reason = "Default group resources are not allowed.";
            return Err(ApiError::InvalidRequest(reason.into()));
        }
        if name.len() > MAX_GROUP_NAME_BYTES {
            return Err(ApiError::InvalidRequest(format!(
                "only groups with names of at most {MAX_GROUP_NAME_BYTES} bytes can have settings"
            )));
        }
        let altered = alteration.apply(group::find, current, |s| s.default.into())?;
        let mut overrides = Overrides::new();
        for (name, value) in altered {
            let setting = group::find(&name).ok_or_else(|| {
                ApiError::InvalidConfig(format!("Unknown group config name: {name}"))
            })?;
            let value = setting.check(&value).map_err(ApiError::InvalidConfig)?;
            // A value that was set under other bounds may stay.
            if current.get(&name) != Some(&value) {
                group::check_bounds(&self.groups, &name, &value)
                    .map_err(ApiError::InvalidConfig)?;
            }
            overrides.insert(name, value);
        }
        let state = self.state.read();
        if state.groups.len() >= MAX_GROUPS && !state.groups.contains_key(name) {
            return Err(ApiError::PolicyViolation(format!(
                "the limit of {MAX_GROUPS} groups with settings is reached"
            )));
        }
        Ok(overrides)
    }

    fn altered_broker(
        &self,
        current: &Overrides,
        alteration: &Alteration,
    ) -> Result<Overrides, ApiError> {
        let dynamic = |name: &str| self.broker_setting(name).and_then(|setting| setting.dynamic);
        let altered = alteration.apply(dynamic, current, |s| s.default.into())?;
        let mut overrides = Overrides::new();
        for (name, value) in altered {
            let setting = dynamic(&name).ok_or_else(|| {
                let mut message = format!("Cannot update these configs dynamically: [{name}]");
                if let Some(reason) = broker::refusal(&name) {
                    message.push_str(": ");
                    message.push_str(reason);
                }
                ApiError::InvalidRequest(message)
            })?;
            let value = setting.check_as(&name, &value).map_err(ApiError::InvalidRequest)?;
            if !setting.effective && current.get(&name) != Some(&value) {
                tracing::info!("broker setting {name} is set to {value}; it has no effect here");
            }
            let is_bound = setting.name == topic::MAX_MESSAGE_BYTES;
            if is_bound && current.get(&name) != Some(&value) {
                topic::warn_of_bound("brokers", Some(&value), self.store.max_batch_bytes());
            }
            overrides.insert(name, value);
        }
        Ok(overrides)
    }

    /// Checks the settings of local retention after a change of one of them.
    fn check_local_retention(
        &self,
        entity: Entity<'_>,
        current: &Overrides,
        overrides: &Overrides,
    ) -> Result<(), ApiError> {
        let mut names = broker::LOCAL_RETENTION.iter().flat_map(|(total, local)| [*total, *local]);
        if names.all(|name| current.get(name) == overrides.get(name)) {
            return Ok(());
        }
        let state = self.state.read();
        let (first, second) = match entity {
            Entity::Brokers => (&state.this_broker, overrides),
            _ => (overrides, &state.brokers),
        };
        let number = |name: &str| {
            let default = || self.broker_setting(name)?.dynamic.map(|setting| setting.default);
            let set = first.get(name).or_else(|| second.get(name)).map(String::as_str);
            set.or_else(default).and_then(|value| value.parse().ok()).unwrap_or(-1)
        };
        for (total, local) in broker::LOCAL_RETENTION {
            topic::check_local((total, number(total)), (local, number(local)))
                .map_err(ApiError::InvalidRequest)?;
        }
        Ok(())
    }

    /// The value of a broker setting that has one.
    fn broker_value(&self, name: &str) -> String {
        let setting = self.broker_setting(name);
        let first = setting.and_then(|setting| self.broker_synonyms(setting).into_iter().next());
        first.map(|first| first.value).unwrap_or_default()
    }

    /// The interval of checks of compacted partitions.
    pub(crate) fn cleaner_backoff(&self) -> Duration {
        let ms = self.broker_value(broker::CLEANER_BACKOFF).parse().unwrap_or(15_000);
        Duration::from_millis(ms)
    }

    /// The limits on connections.
    pub(crate) fn connection_limits(&self) -> Limits {
        let number = |name| self.broker_value(name).parse().unwrap_or(u32::MAX);
        let overrides = broker::per_ip(&self.broker_value(broker::MAX_CONNECTIONS_OVERRIDES));
        Limits {
            max: number(broker::MAX_CONNECTIONS),
            max_of_address: number(broker::MAX_CONNECTIONS_PER_IP),
            overrides: overrides.unwrap_or_default(),
        }
    }

    /// The limits on transfers with the object store in bytes per second, of copies and of fetches;
    /// 0 for none.
    pub(crate) fn transfer_limits(&self) -> [u64; 2] {
        [broker::COPY_QUOTA, broker::FETCH_QUOTA].map(|name| {
            let bytes_per_s = self.broker_value(name).parse().unwrap_or(i64::MAX);
            if bytes_per_s == i64::MAX { 0 } else { bytes_per_s.unsigned_abs() }
        })
    }

    /// Resolves when settings have changed.
    pub(crate) fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    fn broker_setting(&self, name: &str) -> Option<&BrokerSetting> {
        self.broker_settings.iter().find(|setting| setting.name == name)
    }

    /// The dynamic settings of an owner.
    pub(crate) fn overrides(&self, entity: Entity<'_>) -> Overrides {
        let state = self.state.read();
        match entity {
            Entity::Brokers => state.brokers.clone(),
            Entity::ThisBroker => state.this_broker.clone(),
            Entity::Group(name) => state.groups.get(name).cloned().unwrap_or_default(),
        }
    }

    /// The groups with settings of their own, in order.
    pub(crate) fn groups(&self) -> Vec<String> {
        self.state.read().groups.keys().cloned().collect()
    }

    /// The values of a setting for groups that do not set it: the broker's value for all groups, or
    /// else Kafka's default.
    pub(crate) fn group_synonyms(&self, setting: &super::Setting) -> Vec<Synonym> {
        let broker = setting.broker_name.and_then(|name| self.broker_setting(name));
        match broker {
            Some(broker) => self.broker_synonyms(broker),
            None => vec![Synonym {
                name: setting.broker_name.unwrap_or(setting.name),
                value: setting.default.to_owned(),
                source: Source::Default,
            }],
        }
    }

    /// The value of a group's setting.
    fn group_value(&self, group: &str, name: &str) -> String {
        let own = self.state.read().groups.get(group).and_then(|own| own.get(name).cloned());
        let of_all = || {
            let first = self.group_synonyms(group::find(name)?).into_iter().next()?;
            Some(first.value)
        };
        own.or_else(of_all).unwrap_or_default()
    }

    /// The value of a group's numeric setting.
    pub(crate) fn group_number(&self, group: &str, name: &str) -> i64 {
        self.group_value(group, name).parse().unwrap_or_default()
    }

    /// The value of a group's setting in milliseconds.
    pub(crate) fn group_time(&self, group: &str, name: &str) -> Duration {
        Duration::from_millis(u64::try_from(self.group_number(group, name)).unwrap_or_default())
    }

    /// The rules by which members of a share group acquire records.
    pub(crate) fn share_rules(&self, group: &str) -> ShareRules {
        let number = |name| self.group_number(group, name);
        ShareRules {
            lock_duration: self.group_time(group, "share.record.lock.duration.ms"),
            max_deliveries: u16::try_from(number("share.delivery.count.limit")).unwrap_or(1),
            max_in_flight: number("share.partition.max.record.locks").unsigned_abs(),
            read_committed: self.group_value(group, "share.isolation.level") == "read_committed",
            may_renew: self.group_value(group, "share.renew.acknowledge.enable") == "true",
        }
    }

    /// The start of a share group.
    pub(crate) fn share_start(&self, group: &str) -> ShareStart {
        let value = self.group_value(group, "share.auto.offset.reset");
        ShareStart::parse(&value).unwrap_or_else(|| {
            tracing::warn!(group, value, "invalid share.auto.offset.reset; using `latest`");
            ShareStart::Latest
        })
    }

    /// The values of a broker setting with their sources; the first is in effect.
    pub(crate) fn broker_synonyms(&self, setting: &BrokerSetting) -> Vec<Synonym> {
        let state = self.state.read();
        let set = [
            (&state.this_broker, Source::DynamicBroker),
            (&state.brokers, Source::DynamicDefault),
            (&self.started_with, Source::StaticBroker),
        ];
        let set = set
            .into_iter()
            .filter_map(|(values, source)| Some((values.get(setting.name)?.clone(), source)));
        let default = setting.default.map(|value| (value.to_owned(), Source::Default));
        let synonym = |(value, source)| Synonym { name: setting.name, value, source };
        set.chain(default).map(synonym).collect()
    }

    /// The values of a topic setting that come from the broker; the first is in effect.
    pub(crate) fn topic_synonyms(&self, setting: &super::Setting) -> Vec<Synonym> {
        let broker = setting.broker_name.and_then(|name| self.broker_setting(name));
        broker.map(|broker| self.broker_synonyms(broker)).unwrap_or_default()
    }

    /// The broker's values for settings of topics, by the topics' setting names, without Kafka's
    /// defaults.
    pub(crate) fn topic_defaults(&self) -> Overrides {
        let default = |setting: &'static super::Setting| {
            let first = self.topic_synonyms(setting).into_iter().next()?;
            Some((setting.name.to_owned(), first.value))
        };
        topic::SETTINGS.iter().filter_map(default).collect()
    }
}

fn meta_key(entity: Entity<'_>, node_id: i32) -> String {
    match entity {
        Entity::Brokers => format!("{META_PREFIX}brokers"),
        Entity::ThisBroker => format!("{META_PREFIX}broker/{node_id}"),
        Entity::Group(name) => format!("{GROUP_PREFIX}{name}"),
    }
}
