//! Quotas: how many bytes a second clients may produce and fetch, by user and client id. Kept in the catalog under `quota/`.
//!
//! Each quota is a bucket that holds what may be moved in ten seconds, as in Kafka, where rates are measured over that long. Whoever takes
//! more is in debt, and is told for how long: its connection is not read from until then.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use alluvium_stream::{Change, Store};
use parking_lot::Mutex;

use crate::errors::ApiError;

const META_PREFIX: &str = "quota/";

/// What a bucket holds, in seconds of its rate.
const BURST_SECONDS: f64 = 10.0;

/// Buckets that are kept; clients choose their names. Beyond, clients share one, and so do those with long names.
const MAX_BUCKETS: usize = 10_000;

/// The longest name of a user or client that has a quota or a bucket of its own, in bytes.
pub(crate) const MAX_NAME_BYTES: usize = 255;

/// Entities that can have quotas.
const MAX_ENTITIES: usize = 10_000;

/// The longest that a connection is muted for: a quota that is raised later is felt by then.
const MAX_THROTTLE: Duration = Duration::from_secs(60);

/// One part of what a quota is for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Part {
    /// It does not matter.
    Any,
    /// Those that have no quota of their own.
    Default,
    Name(String),
}

/// What a quota is for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) struct Entity {
    pub(crate) user: Part,
    pub(crate) client: Part,
}

/// What is bounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Bound {
    Produced,
    Fetched,
}

impl Bound {
    /// Its name in Kafka.
    pub(crate) fn key(self) -> &'static str {
        match self {
            Self::Produced => "producer_byte_rate",
            Self::Fetched => "consumer_byte_rate",
        }
    }
}

/// The quotas of an entity, in bytes a second, by Kafka's names.
pub(crate) type Limits = BTreeMap<String, f64>;

/// A change of one quota; `None` removes it.
pub(crate) type Op = (String, Option<f64>);

#[derive(Debug)]
struct Bucket {
    /// What may be taken; negative for a debt.
    bytes: f64,
    at: Instant,
}

impl Bucket {
    /// Take `bytes`, and how long it is until the debt is paid.
    fn take(&mut self, rate: f64, bytes: f64, now: Instant) -> Duration {
        let since = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = self.at.max(now);
        self.bytes = (self.bytes + since * rate).min(rate * BURST_SECONDS) - bytes;
        if self.bytes >= 0.0 {
            return Duration::ZERO;
        }
        Duration::try_from_secs_f64(-self.bytes / rate).unwrap_or(MAX_THROTTLE).min(MAX_THROTTLE)
    }
}

/// Whose bucket it is: empty for what does not matter.
type BucketKey = (Bound, String, String);

#[derive(Default)]
struct State {
    limits: BTreeMap<Entity, Limits>,
    buckets: HashMap<BucketKey, Bucket>,
}

/// All quotas.
pub(crate) struct Quotas {
    store: Store,
    /// There is a quota: without one nobody pays for them.
    in_use: AtomicBool,
    state: Mutex<State>,
    changing: tokio::sync::Mutex<()>,
}

impl Quotas {
    /// Read the quotas from the catalog.
    ///
    /// # Errors
    /// The key of the first entry that does not make sense, and why.
    pub(crate) fn open(store: Store) -> Result<Self, String> {
        let mut limits = BTreeMap::new();
        for (key, value) in store.meta(META_PREFIX) {
            let bad = |e: serde_json::Error| format!("{key}: {e}");
            let entity: Entity = serde_json::from_str(&key[META_PREFIX.len()..]).map_err(bad)?;
            let of_entity: Limits = serde_json::from_slice(&value).map_err(bad)?;
            limits.insert(entity, of_entity);
        }
        Ok(Self {
            store,
            in_use: AtomicBool::new(!limits.is_empty()),
            state: Mutex::new(State { limits, buckets: HashMap::new() }),
            changing: tokio::sync::Mutex::new(()),
        })
    }

    /// Who has which quotas, in order.
    pub(crate) fn all(&self) -> Vec<(Entity, Limits)> {
        let state = self.state.lock();
        state.limits.iter().map(|(entity, limits)| (entity.clone(), limits.clone())).collect()
    }

    /// Change the quotas of an entity; values have been checked. With `validate_only` only check whether that would succeed.
    ///
    /// # Errors
    /// Too many entities; failed storage.
    pub(crate) async fn alter(
        &self,
        entity: Entity,
        ops: Vec<Op>,
        validate_only: bool,
    ) -> Result<(), ApiError> {
        let _changing = self.changing.lock().await;
        let (mut limits, entities) = {
            let state = self.state.lock();
            (state.limits.get(&entity).cloned().unwrap_or_default(), state.limits.len())
        };
        if limits.is_empty() && entities >= MAX_ENTITIES {
            return Err(ApiError::PolicyViolation(format!(
                "{MAX_ENTITIES} users and clients have quotas already"
            )));
        }
        for (key, value) in ops {
            match value {
                Some(value) => limits.insert(key, value),
                None => limits.remove(&key),
            };
        }
        if validate_only {
            return Ok(());
        }
        let internal = |e: serde_json::Error| ApiError::Internal(format!("catalog entry: {e}"));
        let name = serde_json::to_string(&entity).map_err(internal)?;
        let key = format!("{META_PREFIX}{name}");
        let change = if limits.is_empty() {
            Change::DeleteMeta(key)
        } else {
            Change::PutMeta { key, value: serde_json::to_vec(&limits).map_err(internal)? }
        };
        self.store.commit(vec![change]).await?;
        let mut state = self.state.lock();
        if limits.is_empty() {
            state.limits.remove(&entity);
        } else {
            state.limits.insert(entity, limits);
        }
        // Whoever was in debt begins anew: what it owed was owed to another rate.
        state.buckets.clear();
        self.in_use.store(!state.limits.is_empty(), Ordering::Release);
        Ok(())
    }

    /// A client has moved so many bytes: for how long it is to be kept waiting. With 0 bytes, what is left of that.
    pub(crate) fn charge(
        &self,
        bound: Bound,
        user: &str,
        client: &str,
        bytes: usize,
        now: Instant,
    ) -> Duration {
        if !self.in_use.load(Ordering::Acquire) {
            return Duration::ZERO;
        }
        let mut state = self.state.lock();
        let Some((rate, key)) = limit(&state.limits, bound, user, client) else {
            return Duration::ZERO;
        };
        if state.buckets.len() >= MAX_BUCKETS && !state.buckets.contains_key(&key) {
            // A bucket that nobody has taken from for so long is full, which is what a new one is.
            let full = Duration::from_secs_f64(BURST_SECONDS) + MAX_THROTTLE;
            state.buckets.retain(|_, bucket| now.saturating_duration_since(bucket.at) < full);
        }
        let shared = (bound, String::new(), String::new());
        let is_short = key.1.len().max(key.2.len()) <= MAX_NAME_BYTES;
        let has_room =
            is_short && (state.buckets.len() < MAX_BUCKETS || state.buckets.contains_key(&key));
        let bucket = state
            .buckets
            .entry(if has_room { key } else { shared })
            .or_insert(Bucket { bytes: rate * BURST_SECONDS, at: now });
        bucket.take(rate, bytes as f64, now)
    }
}

/// The quota that holds for a client, and its bucket. The most specific one holds, users before clients, as in Kafka.
fn limit(
    limits: &BTreeMap<Entity, Limits>,
    bound: Bound,
    user: &str,
    client: &str,
) -> Option<(f64, BucketKey)> {
    let named = |name: &str| Part::Name(name.to_owned());
    let users = [named(user), Part::Default, Part::Any];
    let clients = [named(client), Part::Default, Part::Any];
    for user_part in &users {
        for client_part in &clients {
            let entity = Entity { user: user_part.clone(), client: client_part.clone() };
            let Some(rate) = limits.get(&entity).and_then(|limits| limits.get(bound.key())) else {
                continue;
            };
            let of = |part: &Part, name: &str| {
                if *part == Part::Any { String::new() } else { name.to_owned() }
            };
            return Some((*rate, (bound, of(user_part, user), of(client_part, client))));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_specific_quota_holds() {
        let name = |name: &str| Part::Name(name.to_owned());
        // In the order in which they hold.
        let entities = [
            (name("u"), name("c")),
            (name("u"), Part::Default),
            (name("u"), Part::Any),
            (Part::Default, name("c")),
            (Part::Default, Part::Default),
            (Part::Default, Part::Any),
            (Part::Any, name("c")),
            (Part::Any, Part::Default),
        ];
        let mut limits = BTreeMap::new();
        for (rate, (user, client)) in entities.into_iter().enumerate().rev() {
            let rate = rate as f64;
            let limit_of = [("producer_byte_rate".to_owned(), rate)].into();
            limits.insert(Entity { user, client }, limit_of);
            assert_eq!(limit(&limits, Bound::Produced, "u", "c").unwrap().0, rate);
            assert!(limit(&limits, Bound::Fetched, "u", "c").is_none());
        }
        let bucket = |user, client| limit(&limits, Bound::Produced, user, client).unwrap();
        let key = |user: &str, client: &str| (Bound::Produced, user.to_owned(), client.to_owned());
        assert_eq!(bucket("u", "other"), (1.0, key("u", "other")));
        assert_eq!(bucket("other", "c"), (3.0, key("other", "c")));
        assert_eq!(bucket("other", "other"), (4.0, key("other", "other")));
    }

    #[test]
    fn who_takes_more_than_ten_seconds_of_the_rate_waits_until_it_is_paid() {
        let begun = Instant::now();
        let after = |seconds: u64| begun + Duration::from_secs(seconds);
        let mut bucket = Bucket { bytes: 1_000.0, at: begun };
        assert_eq!(bucket.take(100.0, 1_000.0, begun), Duration::ZERO);
        assert_eq!(bucket.take(100.0, 500.0, begun), Duration::from_secs(5));
        assert_eq!(bucket.take(100.0, 0.0, after(2)), Duration::from_secs(3));
        assert_eq!(bucket.take(100.0, 0.0, after(5)), Duration::ZERO);
        // It never holds more than ten seconds.
        assert_eq!(bucket.take(100.0, 1_100.0, after(1_000)), Duration::from_secs(1));
        assert_eq!(bucket.take(100.0, 1e9, after(1_000)), MAX_THROTTLE);
    }
}
