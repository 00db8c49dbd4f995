//! Quotas: limits on what clients produce, fetch, spend in handler threads and change, by user and
//! client ID, and on the rate of new connections, by address. They are stored in the catalog under
//! `quota/`.
//!
//! Each quota is a token bucket that holds ten seconds of its rate; Kafka measures rates over the
//! same time. A client that takes more is in debt and is throttled: the response states for how
//! long, and the connection is not read until then.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use alluvium_stream::{Change, Store};
use parking_lot::Mutex;

use crate::errors::ApiError;

const META_PREFIX: &str = "quota/";

/// The capacity of a bucket, in seconds of its rate.
const BURST_SECONDS: f64 = 10.0;

/// The greatest number of buckets for one kind of quota; clients choose the names. Beyond it, all
/// clients with the same rate share a bucket, as do clients with long names.
const MAX_BUCKETS: usize = 10_000;

/// The interval at which a full table is swept for unneeded buckets.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// The longest name of a user or client that has a quota or a bucket of its own, in bytes.
pub(crate) const MAX_NAME_BYTES: usize = 255;

/// The greatest number of entities with quotas.
const MAX_ENTITIES: usize = 10_000;

/// The longest throttle for quotas in bytes: a quota that is raised takes effect by then.
const MAX_THROTTLE: Duration = Duration::from_secs(60);

/// The longest throttle for other quotas, as in Kafka. The rest of the debt throttles the next
/// request.
const MAX_SHORT_THROTTLE: Duration = Duration::from_secs(1);

/// One part of the entity that a quota applies to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Part {
    /// Any value.
    Any,
    /// Every name without a quota of its own.
    Default,
    Name(String),
}

impl Part {
    fn is_any(&self) -> bool {
        *self == Self::Any
    }
}

/// The entity that a quota applies to: users and clients, or addresses.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) struct Entity {
    pub(crate) user: Part,
    pub(crate) client: Part,
    /// Never combined with the other two.
    #[serde(default = "any", skip_serializing_if = "Part::is_any")]
    pub(crate) ip: Part,
}

fn any() -> Part {
    Part::Any
}

/// The quantity that a quota limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Bound {
    /// Produced bytes per second.
    Produced,
    /// Fetched bytes per second.
    Fetched,
    /// Time of request handler threads, in percent of one thread.
    Handling,
    /// Partitions created and deleted per second (KIP-599).
    Changes,
    /// Connections per second that an address opens (KIP-612).
    Connections,
}

impl Bound {
    /// The quotas of users and clients.
    pub(crate) const OF_CLIENTS: [Self; 4] =
        [Self::Produced, Self::Fetched, Self::Handling, Self::Changes];
    /// The quotas of addresses.
    pub(crate) const OF_ADDRESSES: [Self; 1] = [Self::Connections];

    /// The quota's name in Kafka.
    pub(crate) fn key(self) -> &'static str {
        match self {
            Self::Produced => "producer_byte_rate",
            Self::Fetched => "consumer_byte_rate",
            Self::Handling => "request_percentage",
            Self::Changes => "controller_mutation_rate",
            Self::Connections => "connection_creation_rate",
        }
    }

    /// The greatest value; `None` where fractions are allowed.
    pub(crate) fn max_whole(self) -> Option<f64> {
        match self {
            Self::Produced | Self::Fetched => Some(i64::MAX as f64),
            Self::Connections => Some(i32::MAX.into()),
            Self::Handling | Self::Changes => None,
        }
    }

    fn max_throttle(self) -> Duration {
        match self {
            Self::Produced | Self::Fetched | Self::Changes => MAX_THROTTLE,
            Self::Handling | Self::Connections => MAX_SHORT_THROTTLE,
        }
    }

    fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// The client or address that a quota is charged to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum QuotaOwner<'a> {
    Client { user: &'a str, client: &'a str },
    Address(IpAddr),
}

/// The quotas of an entity by Kafka's names, in the units of [`Bound`].
pub(crate) type Limits = BTreeMap<String, f64>;

/// A change of one quota; `None` removes it.
pub(crate) type Op = (String, Option<f64>);

#[derive(Debug)]
struct Bucket {
    /// Tokens added per second.
    rate: f64,
    /// The available tokens; negative for a debt.
    left: f64,
    at: Instant,
}

impl Bucket {
    fn full(rate: f64, now: Instant) -> Self {
        Self { rate, left: rate * BURST_SECONDS, at: now }
    }

    /// The tokens available at `now`.
    fn left_at(&self, now: Instant) -> f64 {
        let since = now.saturating_duration_since(self.at).as_secs_f64();
        (self.left + since * self.rate).min(self.rate * BURST_SECONDS)
    }

    /// Whether the bucket equals a new one.
    fn is_full(&self, now: Instant) -> bool {
        self.left_at(now) >= self.rate * BURST_SECONDS
    }

    /// Takes `amount` tokens and returns the time until the debt is paid.
    fn take(&mut self, amount: f64, now: Instant) -> Duration {
        self.left = self.left_at(now) - amount;
        self.at = self.at.max(now);
        if self.left >= 0.0 {
            return Duration::ZERO;
        }
        Duration::try_from_secs_f64(-self.left / self.rate).unwrap_or(MAX_THROTTLE)
    }
}

/// The owner of a bucket: user and client, or address; empty for a part that does not matter.
type BucketKey = (String, String);

/// The buckets of one kind of quota. The kinds have separate limits on buckets.
#[derive(Default)]
struct Buckets {
    own: HashMap<BucketKey, Bucket>,
    /// The buckets shared by clients that get none of their own, by the bits of their rate. There
    /// are at most as many rates as quotas.
    shared: HashMap<u64, Bucket>,
    swept_at: Option<Instant>,
}

impl Buckets {
    fn get(&mut self, key: BucketKey, rate: f64, now: Instant) -> &mut Bucket {
        let is_short = key.0.len().max(key.1.len()) <= MAX_NAME_BYTES;
        if is_short && self.own.len() >= MAX_BUCKETS && !self.own.contains_key(&key) {
            self.sweep(now);
        }
        let is_kept = is_short && (self.own.len() < MAX_BUCKETS || self.own.contains_key(&key));
        let full = || Bucket::full(rate, now);
        let bucket = if is_kept {
            self.own.entry(key).or_insert_with(full)
        } else {
            self.shared.entry(rate.to_bits()).or_insert_with(full)
        };
        if bucket.rate != rate {
            // The debt belonged to the previous rate.
            *bucket = full();
        }
        bucket
    }

    /// Frees buckets, unless that was tried less than [`SWEEP_INTERVAL`] ago.
    fn sweep(&mut self, now: Instant) {
        if self.swept_at.is_none_or(|at| now.saturating_duration_since(at) >= SWEEP_INTERVAL) {
            self.swept_at = Some(now);
            self.drop_full(now);
        }
    }

    /// Drops full buckets, which equal new ones.
    fn drop_full(&mut self, now: Instant) {
        self.own.retain(|_, bucket| !bucket.is_full(now));
        self.shared.retain(|_, bucket| !bucket.is_full(now));
    }
}

#[derive(Default)]
struct State {
    limits: BTreeMap<Entity, Limits>,
    buckets: HashMap<Bound, Buckets>,
}

impl State {
    /// The bucket of this client or address, if it has a quota.
    fn bucket(&mut self, bound: Bound, owner: QuotaOwner<'_>, now: Instant) -> Option<&mut Bucket> {
        let (rate, key) = limit(&self.limits, bound, owner)?;
        Some(self.buckets.entry(bound).or_default().get(key, rate, now))
    }
}

/// All quotas.
pub(crate) struct Quotas {
    store: Store,
    /// The bits of the quotas that any entity has. The others cost nothing.
    in_use: AtomicU8,
    state: Mutex<State>,
    changing: tokio::sync::Mutex<()>,
}

impl Quotas {
    /// Loads the quotas from the catalog.
    ///
    /// # Errors
    /// The key of the first invalid entry, and the reason.
    pub(crate) fn open(store: Store) -> Result<Self, String> {
        let limits = stored(&store)?;
        Ok(Self {
            store,
            in_use: AtomicU8::new(in_use(&limits)),
            state: Mutex::new(State { limits, ..State::default() }),
            changing: tokio::sync::Mutex::new(()),
        })
    }

    /// Takes over what the catalog has now, from a store that another server writes.
    ///
    /// # Errors
    /// The key of the first invalid entry, and the reason; nothing has changed.
    pub(crate) fn follow(&self) -> Result<(), String> {
        let limits = stored(&self.store)?;
        self.in_use.store(in_use(&limits), Ordering::Relaxed);
        self.state.lock().limits = limits;
        Ok(())
    }

    /// All entities and their quotas, in order.
    pub(crate) fn all(&self) -> Vec<(Entity, Limits)> {
        let state = self.state.lock();
        state.limits.iter().map(|(entity, limits)| (entity.clone(), limits.clone())).collect()
    }

    /// Changes the quotas of an entity; the values are already checked. With `validate_only`, only
    /// checks whether that would succeed.
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
                "the limit of {MAX_ENTITIES} users, clients and addresses with quotas is reached"
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
        // Debts remain unless the rate has changed. Buckets of rates that no entity has any more
        // must not stay forever.
        state.buckets.values_mut().for_each(|buckets| buckets.drop_full(Instant::now()));
        self.in_use.store(in_use(&state.limits), Ordering::Release);
        Ok(())
    }

    /// Whether any entity has this quota.
    pub(crate) fn bound(&self, bound: Bound) -> bool {
        self.in_use.load(Ordering::Acquire) & bound.bit() != 0
    }

    /// Charges `amount` and returns the throttle time. An amount of 0 returns the rest of the
    /// current throttle.
    pub(crate) fn charge(
        &self,
        bound: Bound,
        owner: QuotaOwner<'_>,
        amount: f64,
        now: Instant,
    ) -> Duration {
        self.with_bucket(bound, owner, now, |bucket| bucket.take(amount, now))
    }

    /// Charges `amount`, which may leave a debt, unless there is a debt already.
    ///
    /// # Errors
    /// There is a debt; the time until it is paid.
    pub(crate) fn try_charge(
        &self,
        bound: Bound,
        owner: QuotaOwner<'_>,
        amount: f64,
        now: Instant,
    ) -> Result<(), Duration> {
        let wait = self.with_bucket(bound, owner, now, |bucket| {
            let wait = bucket.take(0.0, now);
            if wait.is_zero() {
                bucket.take(amount, now);
            }
            wait
        });
        if wait.is_zero() { Ok(()) } else { Err(wait) }
    }

    /// Takes from the bucket of this client or address, if it has a quota.
    fn with_bucket(
        &self,
        bound: Bound,
        owner: QuotaOwner<'_>,
        now: Instant,
        take: impl FnOnce(&mut Bucket) -> Duration,
    ) -> Duration {
        if !self.bound(bound) {
            return Duration::ZERO;
        }
        let mut state = self.state.lock();
        let Some(bucket) = state.bucket(bound, owner, now) else { return Duration::ZERO };
        let wait = take(bucket).min(bound.max_throttle());
        // Older debt is dropped, as Kafka drops old samples: else many connections, each throttled
        // for at most the maximum, would leave a debt for which all of them wait for hours.
        let remembered = match bound {
            Bound::Handling => BURST_SECONDS,
            Bound::Produced | Bound::Fetched => MAX_THROTTLE.as_secs_f64(),
            // Kafka also uses a token bucket for these.
            Bound::Changes | Bound::Connections => return wait,
        };
        bucket.left = bucket.left.max(-bucket.rate * remembered);
        wait
    }
}

/// Reads what the catalog has.
fn stored(store: &Store) -> Result<BTreeMap<Entity, Limits>, String> {
    let mut limits = BTreeMap::new();
    for (key, value) in store.meta(META_PREFIX) {
        let bad = |e: serde_json::Error| format!("{key}: {e}");
        let entity: Entity = serde_json::from_str(&key[META_PREFIX.len()..]).map_err(bad)?;
        let of_entity: Limits = serde_json::from_slice(&value).map_err(bad)?;
        limits.insert(entity, of_entity);
    }
    Ok(limits)
}

/// The bits of the quotas in `limits`.
fn in_use(limits: &BTreeMap<Entity, Limits>) -> u8 {
    let all = Bound::OF_CLIENTS.into_iter().chain(Bound::OF_ADDRESSES);
    let is_used = |bound: &Bound| limits.values().any(|limits| limits.contains_key(bound.key()));
    all.filter(is_used).fold(0, |bits, bound| bits | bound.bit())
}

/// The rate that applies to a client or address, and its bucket. The most specific quota applies,
/// users before clients, as in Kafka.
fn limit(
    limits: &BTreeMap<Entity, Limits>,
    bound: Bound,
    owner: QuotaOwner<'_>,
) -> Option<(f64, BucketKey)> {
    let rate = |entity: &Entity| limits.get(entity)?.get(bound.key()).copied();
    let (user, client) = match owner {
        QuotaOwner::Client { user, client } => (user, client),
        QuotaOwner::Address(ip) => {
            let ip = ip.to_canonical().to_string();
            let of = |ip| rate(&Entity { user: Part::Any, client: Part::Any, ip });
            let rate = of(Part::Name(ip.clone())).or_else(|| of(Part::Default))?;
            return Some((rate, (ip, String::new())));
        }
    };
    let named = |name: &str| Part::Name(name.to_owned());
    let users = [named(user), Part::Default, Part::Any];
    let clients = [named(client), Part::Default, Part::Any];
    for user_part in &users {
        for client_part in &clients {
            let (of_user, of_client) = (user_part.clone(), client_part.clone());
            let Some(rate) = rate(&Entity { user: of_user, client: of_client, ip: Part::Any })
            else {
                continue;
            };
            let of = |part: &Part, name: &str| {
                if part.is_any() { String::new() } else { name.to_owned() }
            };
            return Some((rate, (of(user_part, user), of(client_part, client))));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_specific_quota_applies() {
        let name = |name: &str| Part::Name(name.to_owned());
        // In the order of precedence.
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
            limits.insert(Entity { user, client, ip: Part::Any }, limit_of);
            let owner = QuotaOwner::Client { user: "u", client: "c" };
            assert_eq!(limit(&limits, Bound::Produced, owner).unwrap().0, rate);
            assert!(limit(&limits, Bound::Fetched, owner).is_none());
        }
        let bucket = |user, client| {
            limit(&limits, Bound::Produced, QuotaOwner::Client { user, client }).unwrap()
        };
        let key = |user: &str, client: &str| (user.to_owned(), client.to_owned());
        assert_eq!(bucket("u", "other"), (1.0, key("u", "other")));
        assert_eq!(bucket("other", "c"), (3.0, key("other", "c")));
        assert_eq!(bucket("other", "other"), (4.0, key("other", "other")));
    }

    #[test]
    fn an_address_has_its_own_bucket_with_its_own_or_the_default_quota() {
        let of = |ip| Entity { user: Part::Any, client: Part::Any, ip };
        let rate = |rate: f64| Limits::from([("connection_creation_rate".to_owned(), rate)]);
        let mut limits = BTreeMap::from([(of(Part::Default), rate(5.0))]);
        limits.insert(of(Part::Name("10.0.0.1".into())), rate(2.0));
        let found = |ip: &str| {
            limit(&limits, Bound::Connections, QuotaOwner::Address(ip.parse().unwrap())).unwrap()
        };
        let key = |ip: &str| (ip.to_owned(), String::new());
        assert_eq!(found("10.0.0.1"), (2.0, key("10.0.0.1")));
        assert_eq!(found("::ffff:10.0.0.1"), (2.0, key("10.0.0.1")));
        assert_eq!(found("10.0.0.2"), (5.0, key("10.0.0.2")));
        assert_eq!(in_use(&limits), Bound::Connections.bit());
    }

    /// The stored form from before addresses could have quotas.
    #[test]
    fn an_entity_without_an_address_keeps_its_stored_form() {
        let stored = r#"{"user":{"name":"u"},"client":"default"}"#;
        let entity: Entity = serde_json::from_str(stored).unwrap();
        let wanted = Entity { user: Part::Name("u".into()), client: Part::Default, ip: Part::Any };
        assert_eq!(entity, wanted);
        assert_eq!(serde_json::to_string(&entity).unwrap(), stored);
    }

    #[test]
    fn a_debt_beyond_ten_seconds_of_the_rate_throttles_until_it_is_paid() {
        let begun = Instant::now();
        let after = |seconds: u64| begun + Duration::from_secs(seconds);
        let mut bucket = Bucket::full(100.0, begun);
        assert_eq!(bucket.take(1_000.0, begun), Duration::ZERO);
        assert_eq!(bucket.take(500.0, begun), Duration::from_secs(5));
        assert_eq!(bucket.take(0.0, after(2)), Duration::from_secs(3));
        assert!(!bucket.is_full(after(14)));
        assert!(bucket.is_full(after(15)));
        assert_eq!(bucket.take(0.0, after(5)), Duration::ZERO);
        // A bucket never holds more than ten seconds of its rate.
        assert_eq!(bucket.take(1_100.0, after(1_000)), Duration::from_secs(1));
        assert_eq!(bucket.take(f64::MAX, after(1_000)), MAX_THROTTLE);
    }

    fn named(n: usize) -> BucketKey {
        (String::new(), format!("client {n}"))
    }

    /// Programs often change quotas one by one. Debts of other clients must remain, or each change
    /// would give every client ten free seconds.
    #[test]
    fn a_changed_rate_resets_only_its_own_buckets() {
        let now = Instant::now();
        let mut buckets = Buckets::default();
        for n in 0..2 {
            buckets.get(named(n), 100.0, now).take(1_500.0, now);
        }
        assert_eq!(buckets.get(named(0), 200.0, now).left_at(now), 2_000.0);
        assert_eq!(buckets.get(named(1), 100.0, now).left_at(now), -500.0);
        // A debt to another rate does not come back with the old rate.
        assert_eq!(buckets.get(named(0), 100.0, now).left_at(now), 1_000.0);
    }

    /// A client that uses many names does not keep others from getting a bucket.
    #[test]
    fn a_full_table_is_swept_of_full_buckets_once_a_second() {
        let begun = Instant::now();
        let after = |millis| begun + Duration::from_millis(millis);
        let mut buckets = Buckets::default();
        // The first lacks two seconds of its rate, the others a millisecond.
        for n in 0..MAX_BUCKETS {
            let amount = if n == 0 { 200.0 } else { 0.1 };
            buckets.get(named(n), 100.0, begun).take(amount, begun);
        }
        buckets.get(named(MAX_BUCKETS), 100.0, begun).take(1.0, begun);
        assert_eq!((buckets.own.len(), buckets.shared.len()), (MAX_BUCKETS, 1));
        // All but the first are full by now, but the last sweep is less than a second old.
        buckets.get(named(MAX_BUCKETS), 100.0, after(999)).take(1.0, after(999));
        assert_eq!((buckets.own.len(), buckets.swept_at), (MAX_BUCKETS, Some(begun)));
        buckets.get(named(MAX_BUCKETS), 100.0, after(1_000));
        assert_eq!((buckets.own.len(), buckets.swept_at), (2, Some(after(1_000))));
        assert_eq!(buckets.get(named(0), 100.0, after(1_000)).left_at(after(1_000)), 900.0);
    }

    #[test]
    fn clients_without_their_own_bucket_share_one_per_rate() {
        let now = Instant::now();
        let mut buckets = Buckets::default();
        let long = || (String::new(), "x".repeat(MAX_NAME_BYTES + 1));
        buckets.get(long(), 1.0, now).take(1.0, now);
        assert_eq!(buckets.get(long(), 1.0, now).left_at(now), 9.0);
        assert_eq!(buckets.get(long(), 2.0, now).left_at(now), 20.0);
        assert!(buckets.own.is_empty());
    }

    #[test]
    fn client_names_do_not_use_up_the_buckets_of_addresses() {
        let quota = |key: &str, rate: f64| Limits::from([(key.to_owned(), rate)]);
        let of = |client, ip| Entity { user: Part::Any, client, ip };
        let limits = [
            (of(Part::Default, Part::Any), quota("request_percentage", 100.0)),
            (of(Part::Any, Part::Default), quota("connection_creation_rate", 5.0)),
        ];
        let mut state = State { limits: limits.into(), ..State::default() };
        let now = Instant::now();
        for n in 0..=MAX_BUCKETS {
            let owner = QuotaOwner::Client { user: "u", client: &format!("client {n}") };
            state.bucket(Bound::Handling, owner, now).unwrap().take(0.1, now);
        }
        for address in ["10.0.0.1", "10.0.0.2"] {
            let owner = QuotaOwner::Address(address.parse().unwrap());
            let bucket = state.bucket(Bound::Connections, owner, now).unwrap();
            assert_eq!((bucket.rate, bucket.left_at(now)), (5.0, 50.0));
            bucket.take(40.0, now);
        }
    }
}
