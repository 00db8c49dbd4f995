//! Share groups (KIP-932): members share partitions, and acknowledge each record individually.
//!
//! - `state`: one share partition as a pure state machine; `table`: the persisted state of all,
//!   with the format.
//! - `sessions`: the partitions that a member fetches, so that it need not send them each time.
//! - `members`: the members of a group and their assignments, pure.
//! - here: the live share partitions, each behind its lock, and their writes.
//!
//! Lock order: a group's, the map's, a share partition's, then the timer's or the log's.

mod members;
mod sessions;
mod state;
mod table;

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use alluvium_stream::{Store, StoreError, StreamOffset};
use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use prometheus_client::metrics::counter::Counter;
use tokio::sync::Notify;
use tokio::task::yield_now;
use uuid::Uuid;

use super::GroupsError;
use super::member_log::MemberLog;
use super::registry::{Timer, now};
use crate::errors::ApiError;
use crate::state_stream::{KIND_SHARES, Refused};

pub(crate) use super::member_log::Durable;
pub(super) use members::{MEMBER_BYTES, ShareBeat, ShareGroup, ShareMember, unknown_member};
pub(crate) use sessions::{ShareSession, ShareSessions, Step};
pub(crate) use state::{Ack, AckKind, Acquired, Found, Return, Wanted};
pub(crate) use table::{ShareStates, TopicPartition};

use state::{Change, NotAcquired, SharePartition};
use table::Remembered;

/// Catalog metadata: the id of the stream, in decimal.
const STREAM_KEY: &str = "groups/shares-stream";

/// Maximum number of share partitions of all groups together.
const MAX_PARTITIONS: usize = 200_000;

/// Bound on the records of all share partitions together whose delivery state is tracked: each may
/// be an entry of its own in memory and in the checkpoint. (How many may be between a share
/// partition's start and its end is a separate bound, set per group.)
const MAX_TRACKED: u64 = 1_000_000;

/// The most that one share partition counts in [`MAX_TRACKED`]: the maximum that a group's settings
/// allow. It has more only after a restart, until it is known that most of it was compacted away;
/// that is one entry, however long.
const MAX_TRACKED_OF_ONE: u64 = 4_000;

/// What each share partition may have in flight, whatever the others have: otherwise records left
/// unacknowledged by one group would stop all groups. The minimum that a group's settings allow.
const MIN_IN_FLIGHT: u64 = 100;

/// Number of share partitions that are checked for the members of a closed connection before the
/// task yields.
const RELEASED_AT_ONCE: usize = 256;

/// Minimum time between two warnings that only [`MIN_IN_FLIGHT`] is left.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// The settings of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShareRules {
    pub(crate) lock_duration: Duration,
    pub(crate) max_deliveries: u16,
    pub(crate) max_in_flight: u64,
    pub(crate) read_committed: bool,
    pub(crate) may_renew: bool,
}

/// Identifies a share partition.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    group: Arc<str>,
    of: TopicPartition,
}

/// A share partition's entry in the map.
pub(crate) struct Slot {
    key: Key,
    /// The record by which it begins, if that was written since the start.
    begun: Option<Durable>,
    live: Mutex<Live>,
}

struct Live {
    state: SharePartition,
    /// The group's setting when it was last read.
    max_deliveries: u16,
    /// Whether it was deleted and removed from the map.
    is_gone: bool,
    /// Whether a write that no request waited for failed: the next record then contains the whole
    /// state.
    is_behind: bool,
    last_record: Option<Durable>,
    /// The timer's entry for it.
    scheduled: Option<Instant>,
    /// Its share of [`Shares::tracked`].
    tracked: u64,
    watchers: Vec<Weak<Notify>>,
}

/// Why an acknowledgement is refused; nothing has changed.
#[derive(Debug)]
pub(crate) enum NotTaken {
    NotAcquired,
    /// The share partition was deleted.
    Gone,
    Log(Refused),
}

/// Counters of share groups.
#[derive(Clone, Debug, Default)]
pub(crate) struct ShareCounters {
    /// Records whose lock expired.
    pub(crate) timed_out: Counter,
}

/// A share partition as shown to admins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Described {
    pub(crate) of: TopicPartition,
    pub(crate) start: StreamOffset,
    /// Offsets after the start that need no delivery any more.
    pub(crate) finished: u64,
}

/// The share partitions of all groups.
pub(crate) struct Shares {
    log: MemberLog,
    by_key: RwLock<BTreeMap<Key, Arc<Slot>>>,
    timer: Timer<Key>,
    /// See [`MAX_TRACKED`].
    tracked: AtomicU64,
    warned_at: Mutex<Option<Instant>>,
    pub(crate) sessions: ShareSessions,
    pub(crate) counters: ShareCounters,
}

impl Shares {
    /// Opens the stream, or creates it, and rebuilds the share partitions.
    pub(super) async fn open(store: Store) -> Result<Self, GroupsError> {
        let (log, states) = MemberLog::open::<ShareStates>(store, STREAM_KEY, KIND_SHARES).await?;
        let shares = Self {
            log,
            by_key: RwLock::default(),
            timer: Timer::default(),
            tracked: AtomicU64::new(0),
            warned_at: Mutex::default(),
            sessions: ShareSessions::default(),
            counters: ShareCounters::default(),
        };
        let mut by_key = shares.by_key.write();
        for (group, partitions) in states.0 {
            let group: Arc<str> = group.into();
            for (of, remembered) in partitions {
                shares.insert(
                    &mut by_key,
                    Key { group: Arc::clone(&group), of },
                    &remembered,
                    None,
                );
            }
        }
        drop(by_key);
        Ok(shares)
    }

    fn insert(
        &self,
        by_key: &mut BTreeMap<Key, Arc<Slot>>,
        key: Key,
        remembered: &Remembered,
        begun: Option<Durable>,
    ) {
        let mut live = Live {
            state: remembered.live(),
            max_deliveries: u16::MAX,
            is_gone: false,
            is_behind: false,
            last_record: begun.clone(),
            scheduled: None,
            tracked: 0,
            watchers: Vec::new(),
        };
        self.count(&mut live);
        let slot = Slot { key: key.clone(), begun, live: Mutex::new(live) };
        by_key.insert(key, Arc::new(slot));
    }

    // ---- lookup ----

    /// Returns the groups that have share partitions, in order.
    pub(super) fn groups(&self) -> Vec<Arc<str>> {
        let mut groups: Vec<_> =
            self.by_key.read().keys().map(|key| Arc::clone(&key.group)).collect();
        groups.dedup();
        groups
    }

    pub(super) fn has_group(&self, group: &str) -> bool {
        self.first_at_or_after(group, Uuid::nil()).is_some()
    }

    fn first_at_or_after(&self, group: &str, topic: Uuid) -> Option<TopicPartition> {
        let from = Key { group: group.into(), of: (topic, i32::MIN) };
        let by_key = self.by_key.read();
        let (key, _) = by_key.range(from..).next()?;
        (*key.group == *group).then_some(key.of)
    }

    /// Whether the group has any partition of the topic.
    pub(crate) fn has_topic(&self, group: &str, topic: Uuid) -> bool {
        self.first_at_or_after(group, topic).is_some_and(|(found, _)| found == topic)
    }

    pub(crate) fn get(&self, group: &str, of: TopicPartition) -> Option<Arc<Slot>> {
        self.by_key.read().get(&Key { group: group.into(), of }).cloned()
    }

    fn of_group(&self, group: &str) -> Vec<Arc<Slot>> {
        let from = Key { group: group.into(), of: (Uuid::nil(), i32::MIN) };
        let by_key = self.by_key.read();
        let slots = by_key.range(from..).take_while(|(key, _)| *key.group == *group);
        slots.map(|(_, slot)| Arc::clone(slot)).collect()
    }

    /// Returns the share partitions of a group, possibly with state that is not durable yet.
    pub(crate) fn describe(&self, group: &str) -> Vec<Described> {
        let describe = |slot: Arc<Slot>| {
            let live = slot.live.lock();
            let (start, finished) = (live.state.start(), live.state.finished());
            Described { of: slot.key.of, start, finished }
        };
        self.of_group(group).into_iter().map(describe).collect()
    }

    // ---- creation and deletion ----

    /// Creates share partitions of a topic that begin at these offsets. Existing ones stay as they
    /// are, unless they are to be reset. `exists` says whether the topic still exists.
    ///
    /// # Returns
    /// The record that was appended, if any. See [`Slot::begun`].
    ///
    /// # Errors
    /// A topic that was deleted meanwhile; the bound on share partitions; a log that accepts no
    /// record now. Nothing has changed.
    pub(super) fn begin(
        &self,
        group: &str,
        topic: Uuid,
        starts: &[(i32, StreamOffset)],
        anew: bool,
        exists: impl Fn() -> bool,
    ) -> Result<Option<Durable>, ApiError> {
        let mut by_key = self.by_key.write();
        // Under the lock that deletions take: a later deletion of the topic finds the share
        // partitions that begin here, and after an earlier one they would never be deleted.
        if !exists() {
            return Err(ApiError::UnknownTopicOrPartition);
        }
        let group: Arc<str> = group.into();
        let key = |partition| Key { group: Arc::clone(&group), of: (topic, partition) };
        let starts = starts.iter().filter(|(index, _)| anew || !by_key.contains_key(&key(*index)));
        let begun: Vec<(TopicPartition, Remembered)> = starts
            .map(|(index, start)| ((topic, *index), Remembered { start: *start, changes: vec![] }))
            .collect();
        if begun.is_empty() {
            return Ok(None);
        }
        let new = begun.iter().filter(|((_, index), _)| !by_key.contains_key(&key(*index))).count();
        if new > 0 && by_key.len() + new > MAX_PARTITIONS {
            tracing::warn!(
                group = &*group,
                MAX_PARTITIONS,
                "share partitions refused: limit reached"
            );
            return Err(ApiError::PolicyViolation(format!(
                "there are already {} share partitions of at most {MAX_PARTITIONS}",
                by_key.len()
            )));
        }
        let old = begun.iter().filter_map(|((_, index), _)| by_key.get(&key(*index)).cloned());
        let old: Vec<_> = old.collect();
        let durable = self.end_by(&old, table::set(&group, &begun)).map_err(refused)?;
        for ((_, index), remembered) in begun {
            self.insert(&mut by_key, key(index), &remembered, Some(durable.clone()));
        }
        Ok(Some(durable))
    }

    /// Deletes the share partitions of a topic. Returns the record to wait for; `None` if there are
    /// none.
    ///
    /// # Errors
    /// A log that accepts no record now. Nothing has changed.
    pub(super) fn forget_topic(
        &self,
        group: &str,
        topic: Uuid,
    ) -> Result<Option<Durable>, Refused> {
        self.forget(group, |of| of.0 == topic, || table::topic_forgotten(group, topic))
    }

    /// Deletes all share partitions of a group.
    ///
    /// # Errors
    /// A log that accepts no record now. Nothing has changed.
    pub(super) fn forget_group(&self, group: &str) -> Result<Option<Durable>, Refused> {
        self.forget(group, |_| true, || table::group_deleted(group))
    }

    fn forget(
        &self,
        group: &str,
        is_meant: impl Fn(TopicPartition) -> bool,
        record: impl FnOnce() -> Bytes,
    ) -> Result<Option<Durable>, Refused> {
        let mut by_key = self.by_key.write();
        let from = Key { group: group.into(), of: (Uuid::nil(), i32::MIN) };
        let keys = by_key.range(from..).map(|(key, _)| key).take_while(|key| *key.group == *group);
        let keys: Vec<Key> = keys.filter(|key| is_meant(key.of)).cloned().collect();
        if keys.is_empty() {
            return Ok(None);
        }
        let slots: Vec<_> = keys.iter().filter_map(|key| by_key.get(key).cloned()).collect();
        let durable = self.end_by(&slots, record())?;
        for slot in slots {
            by_key.remove(&slot.key);
        }
        Ok(Some(durable))
    }

    /// Appends the record that deletes these share partitions. No record of them follows it.
    fn end_by(&self, slots: &[Arc<Slot>], record: Bytes) -> Result<Durable, Refused> {
        let mut locked: Vec<_> = slots.iter().map(|slot| slot.live.lock()).collect();
        let durable = self.log.append(record)?;
        for (slot, live) in slots.iter().zip(&mut locked) {
            live.is_gone = true;
            live.state = SharePartition::new(StreamOffset(0), []);
            self.changed(slot, live);
            live.wake();
        }
        Ok(durable)
    }

    /// Deletes the share partitions of topics that do not exist. A deletion that cannot be written
    /// now is left for the next call.
    pub(crate) fn forget_missing_topics(&self, exists: impl Fn(Uuid) -> bool) {
        let mut topics: Vec<(Arc<str>, Uuid)> =
            self.by_key.read().keys().map(|key| (Arc::clone(&key.group), key.of.0)).collect();
        topics.dedup();
        for (group, topic) in topics.into_iter().filter(|(_, topic)| !exists(*topic)) {
            match self.forget_topic(&group, topic) {
                Ok(_) => {
                    tracing::info!(
                        group = &*group,
                        %topic,
                        "share partitions of a deleted topic removed"
                    );
                }
                Err(refused) => {
                    tracing::warn!(
                        group = &*group,
                        %topic,
                        ?refused,
                        "share partitions of a deleted topic could not be removed yet"
                    );
                }
            }
        }
    }

    // ---- records ----

    /// Returns the offset at which to read for a member of the group; the partition's log begins at
    /// `log_start`. `None` if nothing can be acquired now.
    pub(crate) fn next_read(
        &self,
        slot: &Slot,
        rules: &ShareRules,
        log_start: StreamOffset,
    ) -> Option<StreamOffset> {
        let mut live = slot.live.lock();
        if live.is_gone {
            return None;
        }
        live.max_deliveries = rules.max_deliveries;
        if live.state.cut(log_start) {
            self.changed(slot, &mut live);
        }
        live.state.next_read(self.bound(slot, &live, rules))
    }

    /// How many records may be in flight: the group's setting, while [`MAX_TRACKED`] leaves space
    /// for it.
    fn bound(&self, slot: &Slot, live: &Live, rules: &ShareRules) -> u64 {
        let others = self.tracked.load(Ordering::Relaxed).saturating_sub(live.tracked);
        let space = MAX_TRACKED.saturating_sub(others);
        if space < rules.max_in_flight {
            self.warn_of_limit(slot);
        }
        rules.max_in_flight.min(space.max(MIN_IN_FLIGHT))
    }

    fn warn_of_limit(&self, slot: &Slot) {
        let now = now();
        let mut warned_at = self.warned_at.lock();
        if warned_at.is_none_or(|at| now >= at + WARN_INTERVAL) {
            *warned_at = Some(now);
            tracing::warn!(
                group = &*slot.key.group,
                MAX_TRACKED,
                "share groups get fewer records at a time: the limit of tracked records over all \
                 groups is reached; delete groups that are not used any more"
            );
        }
    }

    /// See [`SharePartition::acquire`].
    pub(crate) fn acquire(
        &self,
        slot: &Slot,
        rules: &ShareRules,
        (read_from, found): (StreamOffset, &[Found]),
        member: &Arc<str>,
        wanted: Wanted,
    ) -> Vec<Acquired> {
        let mut live = slot.live.lock();
        if live.is_gone {
            return Vec::new();
        }
        let wanted = Wanted { max_in_flight: self.bound(slot, &live, rules), ..wanted };
        let until = now() + rules.lock_duration;
        let acquired = live.state.acquire(read_from, found, member, until, wanted);
        self.changed(slot, &mut live);
        acquired
    }

    /// Applies a member's acknowledgements: all or none.
    ///
    /// # Returns
    /// The record to wait for before the request is answered; and the first offset that was not
    /// finished before: nothing below it was changed.
    ///
    /// # Errors
    /// See [`NotTaken`].
    pub(crate) fn acknowledge(
        &self,
        slot: &Slot,
        rules: &ShareRules,
        log_start: StreamOffset,
        member: &str,
        acks: &[Ack],
    ) -> Result<(Option<Durable>, StreamOffset), NotTaken> {
        let mut live = slot.live.lock();
        if live.is_gone {
            return Err(NotTaken::Gone);
        }
        live.max_deliveries = rules.max_deliveries;
        let mut next = live.state.clone();
        next.cut(log_start);
        let start = next.start();
        let until = now() + rules.lock_duration;
        let changes = next
            .acknowledge(member, acks, until, rules.max_deliveries)
            .map_err(|NotAcquired| NotTaken::NotAcquired)?;
        if !changes.is_empty() {
            self.write(slot, &mut live, Some(&next), &changes).map_err(NotTaken::Log)?;
        }
        live.state = next;
        self.changed(slot, &mut live);
        live.wake();
        Ok((live.last_record.clone(), start))
    }

    /// Releases all records of this group that a member has acquired.
    pub(crate) fn release(&self, group: &str, member: &str, why: Return) {
        for slot in self.of_group(group) {
            self.release_of(&slot, |holder| holder == member, why);
        }
    }

    fn release_of(&self, slot: &Slot, is_of_them: impl Fn(&str) -> bool, why: Return) {
        let live = &mut *slot.live.lock();
        let changes = live.state.release(is_of_them, why, live.max_deliveries);
        self.taken_back(slot, live, &changes);
    }

    /// The member has left the group: its session ends, and its records are released.
    pub(super) fn member_gone(&self, group: &str, member: &str, why: Return) {
        self.sessions.end(group, member);
        self.release(group, member, why);
    }

    /// Ends the sessions of a closed connection.
    pub(crate) async fn disconnected(&self, connection: usize) {
        let mut gone = BTreeMap::<Arc<str>, HashSet<Arc<str>>>::new();
        for ShareSession { group, member } in self.sessions.end_all_of(connection) {
            tracing::debug!(
                group = &*group,
                member = &*member,
                "share session ended with its connection"
            );
            gone.entry(group).or_default().insert(member);
        }
        let mut checked = 0;
        for (group, mut members) in gone {
            for slot in self.of_group(&group) {
                checked += 1;
                if checked % RELEASED_AT_ONCE == 0 {
                    yield_now().await;
                    // A member that has begun a session on another connection since may have
                    // acquired new records, which must not be released. Those from before wait
                    // until their locks expire.
                    members.retain(|member| {
                        let (group, member) = (Arc::clone(&group), Arc::clone(member));
                        !self.sessions.is_open(&ShareSession { group, member })
                    });
                }
                self.release_of(&slot, |holder| members.contains(holder), Return::Lost);
            }
        }
    }

    /// When the first lock expires.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.timer.first()
    }

    /// Resolves when [`Self::deadline`] has become earlier.
    pub(super) async fn deadline_changed(&self) {
        self.timer.changed().await;
    }

    /// Releases records whose locks have expired.
    pub(super) fn expire(&self) {
        let now = now();
        for key in self.timer.take_due(now) {
            let Some(slot) = self.by_key.read().get(&key).cloned() else { continue };
            let live = &mut *slot.live.lock();
            // It may have been moved since it was taken out.
            live.scheduled = live.scheduled.filter(|at| *at > now);
            let changes = live.state.expire(now, live.max_deliveries);
            let records: u64 = changes.iter().map(|change| change.to.0 - change.from.0).sum();
            self.counters.timed_out.inc_by(records);
            self.taken_back(&slot, live, &changes);
            self.changed(&slot, live);
        }
    }

    fn taken_back(&self, slot: &Slot, live: &mut Live, changes: &[Change]) {
        if changes.is_empty() {
            return;
        }
        // No request waits for it: a crash would only lose delivery counts.
        if self.write(slot, live, None, changes).is_err() {
            live.is_behind = true;
        }
        self.changed(slot, live);
        live.wake();
    }

    /// Registers a `Notify` that is woken when there may be something to acquire; check after
    /// subscribing. Ends when the `Notify` is dropped.
    pub(crate) fn watch(&self, slot: &Slot, notify: &Arc<Notify>) {
        let mut live = slot.live.lock();
        live.watchers.retain(|watcher| watcher.strong_count() > 0);
        live.watchers.push(Arc::downgrade(notify));
    }

    /// Resolves when a write that failed for lack of space may succeed.
    pub(crate) async fn wait_for_space(&self) {
        self.log.wait_for_space().await;
    }

    /// Appends the changes that led to the current state, or lead to `next`.
    fn write(
        &self,
        slot: &Slot,
        live: &mut Live,
        next: Option<&SharePartition>,
        changes: &[Change],
    ) -> Result<(), Refused> {
        let state = next.unwrap_or(&live.state);
        let (group, of) = (&slot.key.group, slot.key.of);
        let start = state.start();
        let record = if live.is_behind {
            table::set(group, &[(of, Remembered { start, changes: state.remembered() })])
        } else {
            table::changed(group, of, start, changes)
        };
        live.last_record = Some(self.log.append(record)?);
        live.is_behind = false;
        Ok(())
    }

    /// Updates the data derived from a state.
    fn changed(&self, slot: &Slot, live: &mut Live) {
        self.count(live);
        let deadline = live.state.deadline();
        if deadline != live.scheduled {
            self.timer.move_entry(&slot.key, live.scheduled, deadline);
            live.scheduled = deadline;
        }
    }

    fn count(&self, live: &mut Live) {
        let tracked = live.state.in_flight().min(MAX_TRACKED_OF_ONE);
        self.tracked.fetch_add(tracked, Ordering::Relaxed);
        self.tracked.fetch_sub(live.tracked, Ordering::Relaxed);
        live.tracked = tracked;
    }
}

impl Slot {
    /// The record to wait for before any client gets records: if a crash lost the start offset, the
    /// share partition would begin elsewhere.
    pub(crate) fn begun(&self) -> Option<Durable> {
        self.begun.clone()
    }

    /// The record to wait for before the state is shown to a client.
    pub(crate) fn last_record(&self) -> Option<Durable> {
        self.live.lock().last_record.clone()
    }
}

impl Live {
    fn wake(&mut self) {
        self.watchers.retain(|watcher| {
            let watcher = watcher.upgrade();
            watcher.inspect(|watcher| watcher.notify_one()).is_some()
        });
    }
}

/// Waits until the record is durable.
///
/// # Errors
/// The store failed.
pub(crate) async fn durable(record: Option<Durable>) -> Result<(), ApiError> {
    match record {
        Some(record) => record.await.map_err(|error: StoreError| {
            tracing::error!("share group state could not be written: {error}");
            ApiError::from(error)
        }),
        None => Ok(()),
    }
}

/// The error for a client when the log accepts no record now.
pub(crate) fn refused(refused: Refused) -> ApiError {
    match refused {
        Refused::Full => ApiError::Storage("the write-ahead log is full, try again".into()),
        Refused::TooLarge => {
            ApiError::Storage("the record exceeds the maximum size of the store".into())
        }
        Refused::Fenced => ApiError::NotLeader("another server has taken over".into()),
        Refused::Failed(cause) => ApiError::Storage(cause),
    }
}
