//! The group coordinator: groups of every protocol, and their committed offsets.
//!
//! - `group`: one classic group as a pure state machine, with all rules of joining, leaving, static
//!   members and expiry.
//! - `consumer`: one consumer group (KIP-848), whose assignment the server computes; pure, with the
//!   format of its persisted state.
//! - `share`: share groups (KIP-932): their members and their in-flight records.
//! - `embedded`: the embedded protocol of classic consumers (subscription and assignment), parsed
//!   where a group changes its type.
//! - `live`: a group of any type; `registry`: the groups by name, each behind its own lock, and one
//!   timer for all.
//! - `offsets`: the table of committed offsets, its records and its checkpoint; pure, with the
//!   format.
//! - `offset_log`, `member_log`: make records durable. Changes are visible only once they are
//!   durable.
//! - `pending`: the partitions for which transactions have staged offsets.
//! - `membership`, `heartbeat`, `share_heartbeat`, `share_offsets`, `commits`, `admin`: the
//!   requests, translated from and to the protocol.
//!
//! `docs/consumer-groups.md` says what consumer groups survive, and why. The last complete
//! generation of a classic group is persisted, as in Kafka, and is durable before any member
//! receives its assignment; after a restart the members continue in it. Members that had joined for
//! the next generation join again: `docs/format/classic-group-state.md`.
//!
//! Generation numbers can therefore repeat: after a restart a generation can have a number that was
//! used before, and a group without persisted state starts again at 1. A member from before the
//! restart that holds such a number still cannot commit with it, because the member id is checked
//! before the generation (`group::Group::check_commit`), and a member id contains a random UUID
//! that no later member receives. This holds also if the old member asks for its id when it joins a
//! classic group. (A consumer group accepts a member of the classic protocol under the id that it
//! names, with no assignment, as Kafka's does.) A static member is identified by its instance id,
//! but must name its member id too, and the old member is fenced once the instance has joined
//! again. A group without members accepts commits only without a generation, as in Kafka; a member
//! always names one.

mod admin;
mod commits;
mod consumer;
mod delete_offsets;
mod embedded;
mod group;
mod heartbeat;
mod live;
mod member_log;
mod membership;
mod offset_log;
mod offsets;
mod pending;
mod registry;
pub(crate) mod share;
mod share_heartbeat;
mod share_offsets;
mod topics_view;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use alluvium_stream::Store;
use kafka_protocol::error::ResponseError;
use kafka_protocol::protocol::StrBytes;
use parking_lot::Mutex;
use tokio::task::JoinHandle;

use consumer::ConsumerRules;
use group::Rules;
use live::LiveGroup;
use member_log::MemberLog;
use offset_log::OffsetLog;
use pending::Pending;
use registry::{Registry, Slot, now};
use share::Shares;

use crate::partition::unix_time_ms;
use crate::state_stream::{KIND_CLASSIC_GROUPS, KIND_GROUP_MEMBERS, StateError};
use crate::state_table::Corrupt;

pub(crate) use consumer::GroupStates;
pub(crate) use group::PersistedGroups;
pub(crate) use heartbeat::ConsumerTimes;
pub(crate) use offsets::{Offsets, Position};
pub(crate) use share::ShareStates;
pub(crate) use topics_view::{TopicAccess, TopicVisibility, TopicsNow, TopicsView};

/// Catalog metadata: the id of the stream with the persisted state of classic groups, in decimal.
const CLASSIC_STREAM_KEY: &str = "groups/classic-stream";

/// Catalog metadata: the id of the stream with the members of consumer groups, in decimal.
const MEMBERS_STREAM_KEY: &str = "groups/members-stream";

/// The longest group id: the most that a protocol string with a 16-bit length can carry.
const MAX_GROUP_ID_BYTES: usize = i16::MAX as usize;

/// Bounds and times of the coordinator. Fields that correspond to a setting of Kafka give its name.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    /// `group.initial.rebalance.delay.ms`: how long the first rebalance of an empty group waits for
    /// more members than the first. Default 0, at most 5 min.
    ///
    /// Kafka's default is 3 s. It spares a large group that starts all at once some rebalances, and
    /// costs every consumer 3 s at every start. Here a rebalance is a few round trips and one small
    /// write, cooperative clients keep their partitions meanwhile, and most groups start small, so
    /// the default is no delay.
    pub initial_rebalance_delay: Duration,
    /// `group.min.session.timeout.ms`: default 6 s, at least 1 ms, at most `max_session_timeout`.
    pub min_session_timeout: Duration,
    /// `group.max.session.timeout.ms`: default 30 min, at most 24 h.
    pub max_session_timeout: Duration,
    /// `group.consumer.*`: times for members of consumer groups.
    pub consumer: MemberTimes,
    /// `group.share.*`: times for members of share groups.
    pub share: MemberTimes,
    /// `group.max.size` and `group.consumer.max.size`: maximum number of members of one group. The
    /// same bound applies separately to member ids that were issued and have not joined yet.
    /// Default 5000, at least 1.
    pub max_group_members: usize,
    /// Maximum number of groups, including those with offsets and no members. Default 100 000, at
    /// least 1.
    pub max_groups: usize,
    /// Bound on the memory for all groups (names, members, their subscriptions and assignments).
    /// Default 256 MiB, at least 1 MiB.
    pub max_membership_bytes: usize,
    /// Bound on the memory for committed offsets, about 100 bytes each. A commit that only
    /// overwrites is always accepted. Default 64 MiB, at least 1 MiB, at most 1 GiB. (All of it is
    /// written to the catalog at each upload.)
    pub max_offsets_bytes: usize,
    /// `offset.metadata.max.bytes`: default 4096, at most 32 767.
    pub max_offset_metadata_bytes: usize,
    /// `offsets.retention.minutes`: an offset is dropped when it is this old and either its group
    /// has had no members for this long, or the group's members are consumers that do not read the
    /// topic. Default 7 days, at least 1 min.
    ///
    /// Time in which the server was down does not count as "without members", except for a group
    /// that has had none since the start. Once `max_session_timeout` has passed since the start,
    /// such a group counts as without members since its newest offset was committed, or since the
    /// last record that it had members. That record is written when both [`Self::sweep_interval`]
    /// and a hundredth of the retention have passed. An offset that an open transaction is about to
    /// replace stays.
    pub offsets_retention: Duration,
    /// `offsets.retention.check.interval.ms`: interval of the check for such offsets, and for
    /// groups with neither members nor offsets. Default 10 min, at least 1 s.
    pub sweep_interval: Duration,
    /// How long a request waits until its record can be appended: for space in the log and, if it
    /// commits offsets, for the end of a transaction that commits offsets of the same partitions.
    /// It then fails with COORDINATOR_NOT_AVAILABLE, or for an acknowledgement of a share group
    /// with KAFKA_STORAGE_ERROR; clients retry both. Default 5 s, at most 1 min.
    pub append_timeout: Duration,
}

/// Times for members of groups that send heartbeats to the server (KIP-848, KIP-932). Kafka's names
/// have `group.consumer.` or `group.share.` in front. A group can have its own times within the
/// bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberTimes {
    /// `heartbeat.interval.ms`: the heartbeat interval given to members. Default 5 s, within the
    /// two bounds that follow, less than `session_timeout`.
    pub heartbeat_interval: Duration,
    /// `min.heartbeat.interval.ms`: default 5 s, at least 1 ms.
    pub min_heartbeat_interval: Duration,
    /// `max.heartbeat.interval.ms`: default 15 s, at most 24 h.
    pub max_heartbeat_interval: Duration,
    /// `session.timeout.ms`: a member that sends no heartbeat for this long is removed. Default 45
    /// s, within the two bounds that follow.
    pub session_timeout: Duration,
    /// `min.session.timeout.ms`: default 45 s, at least 1 ms.
    pub min_session_timeout: Duration,
    /// `max.session.timeout.ms`: default 60 s, at most 24 h.
    pub max_session_timeout: Duration,
}

impl Default for MemberTimes {
    fn default() -> Self {
        Self {
            heartbeat_interval: Duration::from_secs(5),
            min_heartbeat_interval: Duration::from_secs(5),
            max_heartbeat_interval: Duration::from_secs(15),
            session_timeout: Duration::from_secs(45),
            min_session_timeout: Duration::from_secs(45),
            max_session_timeout: Duration::from_secs(60),
        }
    }
}

impl MemberTimes {
    fn check(&self) -> Result<(), &'static str> {
        let (least, most) = (Duration::from_millis(1), Duration::from_secs(24 * 3600));
        let heartbeats =
            [self.min_heartbeat_interval, self.heartbeat_interval, self.max_heartbeat_interval];
        let sessions = [self.min_session_timeout, self.session_timeout, self.max_session_timeout];
        for [min, value, max] in [heartbeats, sessions] {
            if !(least <= min && min <= value && value <= max && max <= most) {
                return Err("heartbeat interval and session timeout must be within their bounds, \
                            and the bounds between 1 ms and 24 h");
            }
        }
        match self.heartbeat_interval < self.session_timeout {
            true => Ok(()),
            false => Err("the heartbeat interval must be less than the session timeout"),
        }
    }
}

impl Default for GroupConfig {
    fn default() -> Self {
        Self {
            initial_rebalance_delay: Duration::ZERO,
            min_session_timeout: Duration::from_secs(6),
            max_session_timeout: Duration::from_secs(30 * 60),
            consumer: MemberTimes::default(),
            share: MemberTimes::default(),
            max_group_members: 5000,
            max_groups: 100_000,
            max_membership_bytes: 256 << 20,
            max_offsets_bytes: 64 << 20,
            max_offset_metadata_bytes: 4096,
            offsets_retention: Duration::from_secs(7 * 24 * 3600),
            sweep_interval: Duration::from_secs(600),
            append_timeout: Duration::from_secs(5),
        }
    }
}

impl GroupConfig {
    /// Reports the first field that is outside its documented range.
    fn check(&self) -> Result<(), GroupsError> {
        let refuse = |what: &str| Err(GroupsError::Config(what.to_owned()));
        if self.initial_rebalance_delay > Duration::from_secs(300) {
            return refuse("the initial rebalance delay must be at most 5 min");
        }
        if self.min_session_timeout < Duration::from_millis(1)
            || self.min_session_timeout > self.max_session_timeout
        {
            return refuse(
                "the minimum session timeout must be at least 1 ms and at most the maximum",
            );
        }
        if self.max_session_timeout > Duration::from_secs(24 * 3600) {
            return refuse("the maximum session timeout must be at most 24 h");
        }
        for (kind, times) in [("consumer", &self.consumer), ("share", &self.share)] {
            times.check().map_err(|what| GroupsError::Config(format!("{kind} groups: {what}")))?;
        }
        if self.max_group_members == 0 || self.max_groups == 0 {
            return refuse("the limits of groups and of their members must be at least 1");
        }
        if self.max_membership_bytes < 1 << 20 {
            return refuse("the memory limit for group members must be at least 1 MiB");
        }
        if !(1 << 20..=1 << 30).contains(&self.max_offsets_bytes) {
            return refuse(
                "the memory limit for committed offsets must be between 1 MiB and 1 GiB",
            );
        }
        if self.max_offset_metadata_bytes > i16::MAX as usize {
            return refuse("offset metadata can be at most 32767 bytes");
        }
        if self.offsets_retention < Duration::from_secs(60) {
            return refuse("the offset retention must be at least 1 min");
        }
        if self.sweep_interval < Duration::from_secs(1) {
            return refuse("the interval of the retention check must be at least 1 s");
        }
        if self.append_timeout > Duration::from_secs(60) {
            return refuse("the append timeout of groups must be at most 1 min");
        }
        Ok(())
    }
}

/// An error of opening the coordinator or of one of its operations.
#[derive(Debug, thiserror::Error)]
pub enum GroupsError {
    /// A field of [`GroupConfig`] is out of range.
    #[error("group coordinator: {0}")]
    Config(String),
    /// The stream of committed offsets could not be opened.
    #[error("group coordinator: {0}")]
    State(#[from] StateError),
    /// The checkpoint or a batch of the offsets stream does not have this version's format.
    #[error("group coordinator: {0}")]
    Corrupt(#[from] Corrupt),
    /// A change could not be made durable now; a later attempt may succeed.
    #[error("group coordinator: the change was not written: {0}")]
    NotWritten(ResponseError),
}

/// The client that sends a JoinGroup.
#[derive(Clone, Debug)]
pub struct ClientInfo {
    /// The client id of the request header, empty if there is none.
    pub client_id: StrBytes,
    /// The peer's address in Kafka's notation: `/127.0.0.1`.
    pub client_host: StrBytes,
    /// The topics that the client may describe.
    pub(crate) visibility: TopicVisibility,
}

/// The group coordinator. Clones are cheap and share one state. A request may be dropped while it
/// waits: the group then behaves as if the client had lost the response.
#[derive(Clone)]
pub struct Groups {
    shared: Arc<Shared>,
}

struct Shared {
    config: GroupConfig,
    registry: Registry,
    log: OffsetLog,
    pending: Pending,
    closed: AtomicBool,
    timer_task: Mutex<Option<JoinHandle<()>>>,
}

impl Groups {
    /// Opens or creates the offsets stream, loads the committed offsets, and starts the timer.
    /// Needs a tokio runtime with time.
    ///
    /// # Errors
    /// An invalid configuration, a failed store, or offsets that cannot be read; nothing has been
    /// changed in the last case.
    pub async fn open(store: Store, config: GroupConfig) -> Result<Groups, GroupsError> {
        config.check()?;
        let log = OffsetLog::open(store.clone(), config.max_offsets_bytes).await?;
        let rules = Rules {
            initial_rebalance_delay: config.initial_rebalance_delay,
            max_members: config.max_group_members,
        };
        let consumer_rules = ConsumerRules {
            session_timeout: config.consumer.session_timeout,
            max_members: config.max_group_members,
        };
        let (member_log, consumer_groups) =
            MemberLog::open::<GroupStates>(store.clone(), MEMBERS_STREAM_KEY, KIND_GROUP_MEMBERS)
                .await?;
        let shares = Arc::new(Shares::open(store.clone()).await?);
        let (classic_log, persisted) =
            MemberLog::open::<PersistedGroups>(store, CLASSIC_STREAM_KEY, KIND_CLASSIC_GROUPS)
                .await?;
        let logs = (classic_log, member_log);
        let registry = Registry::new(rules, consumer_rules, logs, shares, config.max_groups);
        log.read(|table| registry.restore(table.groups(), persisted, consumer_groups));
        let closed = AtomicBool::new(false);
        let (pending, timer_task) = (Pending::default(), Mutex::new(None));
        let shared = Arc::new(Shared { config, registry, log, pending, closed, timer_task });
        let task = tokio::spawn(run_timer(Arc::downgrade(&shared)));
        *shared.timer_task.lock() = Some(task);
        Ok(Groups { shared })
    }

    /// The in-flight records of share groups.
    pub(crate) fn shares(&self) -> &Arc<Shares> {
        &self.shared.registry.shares
    }

    /// The offsets that transactions have staged for groups; maintained by the transaction
    /// coordinator.
    pub(crate) fn pending(&self) -> &Pending {
        &self.shared.pending
    }

    /// Answers every waiting request and every later one with COORDINATOR_NOT_AVAILABLE, and stops
    /// the timer. Committed offsets are already durable. Idempotent.
    pub async fn shutdown(&self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        for slot in self.shared.registry.all() {
            self.shared.registry.change(&slot, |group, _| {
                // Members of all groups continue after a restart, but only requests of classic
                // groups wait.
                if let LiveGroup::Classic(group) = group {
                    group.kill();
                }
            });
        }
        self.shared.registry.timer().wake();
        let task = self.shared.timer_task.lock().take();
        if let Some(task) = task
            && let Err(error) = task.await
        {
            tracing::error!(%error, "the timer of the group coordinator failed");
        }
    }
}

impl Shared {
    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Refuses requests once the coordinator is closed.
    fn check_open(&self) -> Result<(), ResponseError> {
        if self.is_closed() { Err(ResponseError::CoordinatorNotAvailable) } else { Ok(()) }
    }

    /// The rules of a consumer group that has these times.
    fn consumer_rules(&self, times: ConsumerTimes) -> ConsumerRules {
        ConsumerRules {
            session_timeout: times.session_timeout,
            max_members: self.config.max_group_members,
        }
    }

    fn create(&self, group_id: &str) -> Result<Arc<Slot>, ResponseError> {
        if self.registry.get(group_id).is_none() {
            self.check_membership_memory(group_id, Slot::bytes(group_id), None)?;
        }
        // Groups expire, so a client that retries finds space. Clients treat other errors as fatal.
        let out_of_memory = ResponseError::CoordinatorNotAvailable;
        let slot = self.registry.get_or_create(group_id).ok_or(out_of_memory)?;
        // A group created while `shutdown` iterates over the groups would keep its members waiting.
        self.check_open()?;
        Ok(slot)
    }
}

/// The only timer task: sleeps until the first deadline of any group. Does not keep the coordinator
/// alive.
async fn run_timer(shared: Weak<Shared>) {
    let Some((timer, shares, interval)) = shared.upgrade().map(|shared| {
        let registry = &shared.registry;
        (registry.timer(), Arc::clone(&registry.shares), shared.config.sweep_interval)
    }) else {
        return;
    };
    let mut next_sweep = now() + interval;
    // A task of its own: there may be very many groups, and deadlines of others pass meanwhile.
    let mut sweeping = tokio::spawn(async {});
    loop {
        let first = [timer.first(), shares.deadline()].into_iter().flatten();
        let next = first.fold(next_sweep, Instant::min);
        tokio::select! {
            () = timer.changed() => {}
            () = shares.deadline_changed() => {}
            () = tokio::time::sleep_until(next.into()) => {}
        }
        let Some(shared) = shared.upgrade().filter(|shared| !shared.is_closed()) else { break };
        shared.registry.expire();
        shares.expire();
        if now() >= next_sweep {
            if sweeping.is_finished() {
                let shared = Arc::clone(&shared);
                sweeping = tokio::spawn(async move { shared.sweep(now(), unix_time_ms()).await });
            }
            next_sweep = now() + interval;
        }
    }
    if let Err(error) = sweeping.await {
        tracing::error!(%error, "offset expiration task failed");
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Without this the task would sleep until the next deadline before it notices the drop.
        self.registry.timer().wake();
    }
}

#[cfg(test)]
mod tests;
