//! Share groups (KIP-932): members share partitions, and say of each record what has become of it.
//!
//! - `state`: one share partition, purely; `table`: what is remembered of all, with the format.
//! - `sessions`: which partitions a member fetches, so that it need not say so each time.
//! - `members`: who is in a group, and gets which partitions, purely.
//! - here: the share partitions that live, each behind its lock, and their way to the disk.
//!
//! Locks, in the order in which they may be taken: a group's, the map's, a share partition's, then
//! the timer's or the log's.

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

/// Share partitions of all groups together.
const MAX_PARTITIONS: usize = 200_000;

/// Records of all share partitions together of which it is known what has become of them: each may
/// be an entry of its own in memory and in the checkpoint. (How many may be between a share
/// partition's start and its end is another bound, the group's.)
const MAX_TRACKED: u64 = 1_000_000;

/// What one share partition has in [`MAX_TRACKED`] at most: as much as a group's settings may
/// allow. It has more only after a restart, while nobody knows yet that most of it was compacted
/// away; that is one entry, however long.
const MAX_TRACKED_OF_ONE: u64 = 4_000;

/// What each may have in flight, whatever the others have: else what some group has left lying
/// would stop all. As little as a group's settings may allow.
const MIN_IN_FLIGHT: u64 = 100;

/// Share partitions that are looked through for the members of a connection that has ended, before
/// others have their turn.
const RELEASED_AT_ONCE: usize = 256;

/// How often it is told that there is no more room than that.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// What a group's settings say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShareRules {
    pub(crate) lock_duration: Duration,
    pub(crate) max_deliveries: u16,
    pub(crate) max_in_flight: u64,
    pub(crate) read_committed: bool,
    pub(crate) may_renew: bool,
}

/// Which share partition.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    group: Arc<str>,
    of: TopicPartition,
}

/// A share partition's place.
pub(crate) struct Slot {
    key: Key,
    /// The record by which it begins, if that was since the start.
    begun: Option<Durable>,
    live: Mutex<Live>,
}

struct Live {
    state: SharePartition,
    /// As the group's settings were when they were last looked at.
    max_deliveries: u16,
    /// It was deleted, and its place is taken from the map.
    is_gone: bool,
    /// Something was not written that nobody had to wait for: the next record tells everything.
    is_behind: bool,
    last_record: Option<Durable>,
    /// The entry that the timer has for it.
    scheduled: Option<Instant>,
    /// What it has in [`Shares::tracked`].
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

/// What is counted.
#[derive(Clone, Debug, Default)]
pub(crate) struct ShareCounters {
    /// Records whose lock was over.
    pub(crate) timed_out: Counter,
}

/// A share partition as admins see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Described {
    pub(crate) of: TopicPartition,
    pub(crate) start: StreamOffset,
    /// Offsets behind the start that nobody has to look at any more.
    pub(crate) settled: u64,
}

/// The share partitions of all groups.
pub(crate) struct Shares {
    log: MemberLog,
    places: RwLock<BTreeMap<Key, Arc<Slot>>>,
    timer: Timer<Key>,
    /// See [`MAX_TRACKED`].
    tracked: AtomicU64,
    warned_at: Mutex<Option<Instant>>,
    pub(crate) sessions: ShareSessions,
    pub(crate) counters: ShareCounters,
}

impl Shares {
    /// Find the stream, or create it, and rebuild the share partitions.
    pub(super) async fn open(store: Store) -> Result<Self, GroupsError> {
        let (log, states) = MemberLog::open::<ShareStates>(store, STREAM_KEY, KIND_SHARES).await?;
        let shares = Self {
            log,
            places: RwLock::default(),
            timer: Timer::default(),
            tracked: AtomicU64::new(0),
            warned_at: Mutex::default(),
            sessions: ShareSessions::default(),
            counters: ShareCounters::default(),
        };
        let mut places = shares.places.write();
        for (group, partitions) in states.0 {
            let group: Arc<str> = group.into();
            for (of, remembered) in partitions {
                shares.insert(
                    &mut places,
                    Key { group: Arc::clone(&group), of },
                    &remembered,
                    None,
                );
            }
        }
        drop(places);
        Ok(shares)
    }

    fn insert(
        &self,
        places: &mut BTreeMap<Key, Arc<Slot>>,
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
        places.insert(key, Arc::new(slot));
    }

    // ---- what there is ----

    /// The groups that have share partitions, in order.
    pub(super) fn groups(&self) -> Vec<Arc<str>> {
        let mut groups: Vec<_> =
            self.places.read().keys().map(|key| Arc::clone(&key.group)).collect();
        groups.dedup();
        groups
    }

    pub(super) fn has_group(&self, group: &str) -> bool {
        self.first_at_or_after(group, Uuid::nil()).is_some()
    }

    fn first_at_or_after(&self, group: &str, topic: Uuid) -> Option<TopicPartition> {
        let from = Key { group: group.into(), of: (topic, i32::MIN) };
        let places = self.places.read();
        let (key, _) = places.range(from..).next()?;
        (*key.group == *group).then_some(key.of)
    }

    /// Whether the group has any partition of the topic.
    pub(crate) fn has_topic(&self, group: &str, topic: Uuid) -> bool {
        self.first_at_or_after(group, topic).is_some_and(|(found, _)| found == topic)
    }

    pub(crate) fn get(&self, group: &str, of: TopicPartition) -> Option<Arc<Slot>> {
        self.places.read().get(&Key { group: group.into(), of }).cloned()
    }

    fn of_group(&self, group: &str) -> Vec<Arc<Slot>> {
        let from = Key { group: group.into(), of: (Uuid::nil(), i32::MIN) };
        let places = self.places.read();
        let slots = places.range(from..).take_while(|(key, _)| *key.group == *group);
        slots.map(|(_, slot)| Arc::clone(slot)).collect()
    }

    /// The share partitions of a group; what is not durable yet may be among it.
    pub(crate) fn describe(&self, group: &str) -> Vec<Described> {
        let describe = |slot: Arc<Slot>| {
            let live = slot.live.lock();
            let (start, settled) = (live.state.start(), live.state.settled());
            Described { of: slot.key.of, start, settled }
        };
        self.of_group(group).into_iter().map(describe).collect()
    }

    // ---- begin and end ----

    /// Have share partitions of a topic begin at these offsets; those that there are stay what they
    /// are, unless they are to begin anew. `exists` says whether there is still such a topic.
    ///
    /// # Returns
    /// What was written, if anything was. See [`Slot::begun`].
    ///
    /// # Errors
    /// A topic that was deleted meanwhile; the bound on share partitions; a log that takes nothing
    /// now. Nothing has changed.
    pub(super) fn begin(
        &self,
        group: &str,
        topic: Uuid,
        starts: &[(i32, StreamOffset)],
        anew: bool,
        exists: impl Fn() -> bool,
    ) -> Result<Option<Durable>, ApiError> {
        let mut places = self.places.write();
        // Under the lock that forgets: who deletes the topic later finds what begins here, and
        // behind an earlier one nothing would ever end it.
        if !exists() {
            return Err(ApiError::UnknownTopicOrPartition);
        }
        let group: Arc<str> = group.into();
        let key = |partition| Key { group: Arc::clone(&group), of: (topic, partition) };
        let starts = starts.iter().filter(|(index, _)| anew || !places.contains_key(&key(*index)));
        let begun: Vec<(TopicPartition, Remembered)> = starts
            .map(|(index, start)| ((topic, *index), Remembered { start: *start, changes: vec![] }))
            .collect();
        if begun.is_empty() {
            return Ok(None);
        }
        let new = begun.iter().filter(|((_, index), _)| !places.contains_key(&key(*index))).count();
        if new > 0 && places.len() + new > MAX_PARTITIONS {
            tracing::warn!(
                group = &*group,
                MAX_PARTITIONS,
                "share partitions are refused: there are too many"
            );
            return Err(ApiError::PolicyViolation(format!(
                "there are {} share partitions already, of at most {MAX_PARTITIONS}",
                places.len()
            )));
        }
        let old = begun.iter().filter_map(|((_, index), _)| places.get(&key(*index)).cloned());
        let old: Vec<_> = old.collect();
        let durable = self.end_by(&old, table::set(&group, &begun)).map_err(refused)?;
        for ((_, index), remembered) in begun {
            self.insert(&mut places, key(index), &remembered, Some(durable.clone()));
        }
        Ok(Some(durable))
    }

    /// Forget the share partitions of a topic. What to wait for; `None` if there are none.
    ///
    /// # Errors
    /// A log that takes nothing now. Nothing has changed.
    pub(super) fn forget_topic(
        &self,
        group: &str,
        topic: Uuid,
    ) -> Result<Option<Durable>, Refused> {
        self.forget(group, |of| of.0 == topic, || table::topic_forgotten(group, topic))
    }

    /// Forget all share partitions of a group.
    ///
    /// # Errors
    /// A log that takes nothing now. Nothing has changed.
    pub(super) fn forget_group(&self, group: &str) -> Result<Option<Durable>, Refused> {
        self.forget(group, |_| true, || table::group_deleted(group))
    }

    fn forget(
        &self,
        group: &str,
        is_meant: impl Fn(TopicPartition) -> bool,
        record: impl FnOnce() -> Bytes,
    ) -> Result<Option<Durable>, Refused> {
        let mut places = self.places.write();
        let from = Key { group: group.into(), of: (Uuid::nil(), i32::MIN) };
        let keys = places.range(from..).map(|(key, _)| key).take_while(|key| *key.group == *group);
        let keys: Vec<Key> = keys.filter(|key| is_meant(key.of)).cloned().collect();
        if keys.is_empty() {
            return Ok(None);
        }
        let slots: Vec<_> = keys.iter().filter_map(|key| places.get(key).cloned()).collect();
        let durable = self.end_by(&slots, record())?;
        for slot in slots {
            places.remove(&slot.key);
        }
        Ok(Some(durable))
    }

    /// Write a record by which these end. Nothing is written of them after it.
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

    /// Forget what there is of topics that do not exist; what cannot be written now is left for
    /// the next time.
    pub(crate) fn forget_missing_topics(&self, exists: impl Fn(Uuid) -> bool) {
        let mut topics: Vec<(Arc<str>, Uuid)> =
            self.places.read().keys().map(|key| (Arc::clone(&key.group), key.of.0)).collect();
        topics.dedup();
        for (group, topic) in topics.into_iter().filter(|(_, topic)| !exists(*topic)) {
            match self.forget_topic(&group, topic) {
                Ok(_) => {
                    tracing::info!(group = &*group, %topic, "a share group forgets a deleted topic");
                }
                Err(refused) => {
                    tracing::warn!(group = &*group, %topic, ?refused, "share partitions of a deleted topic stay for now");
                }
            }
        }
    }

    // ---- records ----

    /// From where to read for a member of the group, whose partition's log begins there. `None` if
    /// there is nothing to be had now.
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

    /// How many records of it may be in flight: as the group's settings say, as long as there is
    /// room for all.
    fn bound(&self, slot: &Slot, live: &Live, rules: &ShareRules) -> u64 {
        let others = self.tracked.load(Ordering::Relaxed).saturating_sub(live.tracked);
        let room = MAX_TRACKED.saturating_sub(others);
        if room < rules.max_in_flight {
            self.warn_of_no_room(slot);
        }
        rules.max_in_flight.min(room.max(MIN_IN_FLIGHT))
    }

    fn warn_of_no_room(&self, slot: &Slot) {
        let now = now();
        let mut warned_at = self.warned_at.lock();
        if warned_at.is_none_or(|at| now >= at + WARN_INTERVAL) {
            *warned_at = Some(now);
            tracing::warn!(
                group = &*slot.key.group,
                MAX_TRACKED,
                "share groups get fewer records at a time: too many records of all of them are neither done with nor before their share partition's start; \
                 a group that nobody uses any more should be deleted"
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

    /// A member says what has become of records: all or nothing.
    ///
    /// # Returns
    /// What to wait for before it is told that this is known; and the first offset that was not
    /// settled before: of what is below nothing was taken.
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

    /// A member has nothing any more of this group.
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

    /// The member of a group is gone: its session ends, and what it had goes back.
    pub(super) fn member_gone(&self, group: &str, member: &str, why: Return) {
        self.sessions.end(group, member);
        self.release(group, member, why);
    }

    /// A connection is gone, and with it the sessions that were begun on it.
    pub(crate) async fn disconnected(&self, connection: usize) {
        let mut gone = BTreeMap::<Arc<str>, HashSet<Arc<str>>>::new();
        for ShareSession { group, member } in self.sessions.end_all_of(connection) {
            tracing::debug!(
                group = &*group,
                member = &*member,
                "a share session ends with its connection"
            );
            gone.entry(group).or_default().insert(member);
        }
        let mut looked_through = 0;
        for (group, mut members) in gone {
            for slot in self.of_group(&group) {
                looked_through += 1;
                if looked_through % RELEASED_AT_ONCE == 0 {
                    yield_now().await;
                    // Who has begun a session on another connection meanwhile may have got records
                    // that are not to go back. Those of before wait for the end of their locks.
                    members.retain(|member| {
                        let (group, member) = (Arc::clone(&group), Arc::clone(member));
                        !self.sessions.is_open(&ShareSession { group, member })
                    });
                }
                self.release_of(&slot, |holder| members.contains(holder), Return::Lost);
            }
        }
    }

    /// When the first lock is over.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.timer.first()
    }

    /// Resolves when [`Self::deadline`] has come earlier.
    pub(super) async fn deadline_changed(&self) {
        self.timer.changed().await;
    }

    /// Take back what was locked for too long.
    pub(super) fn expire(&self) {
        let now = now();
        for key in self.timer.take_due(now) {
            let Some(slot) = self.places.read().get(&key).cloned() else { continue };
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
        // Nobody waits for it: what a crash forgets of it is how often records were handed out.
        if self.write(slot, live, None, changes).is_err() {
            live.is_behind = true;
        }
        self.changed(slot, live);
        live.wake();
    }

    /// Be woken when there may be something to acquire; check after subscribing. Ends when the
    /// `Notify` is dropped.
    pub(crate) fn watch(&self, slot: &Slot, notify: &Arc<Notify>) {
        let mut live = slot.live.lock();
        live.watchers.retain(|watcher| watcher.strong_count() > 0);
        live.watchers.push(Arc::downgrade(notify));
    }

    /// Resolves when a write that met a lack of room may succeed.
    pub(crate) async fn room(&self) {
        self.log.room().await;
    }

    /// Put changes in line by which the state has become what it is, or becomes `next`.
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

    /// Keep what is derived from a state in step with it.
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
    /// What to wait for before anybody gets records of it: a crash that forgets where it begins
    /// would have it begin elsewhere.
    pub(crate) fn begun(&self) -> Option<Durable> {
        self.begun.clone()
    }

    /// What to wait for before anybody is told of its state.
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

/// Wait for what was written.
///
/// # Errors
/// The store failed.
pub(crate) async fn durable(record: Option<Durable>) -> Result<(), ApiError> {
    match record {
        Some(record) => record.await.map_err(|error: StoreError| {
            tracing::error!("the state of share groups could not be written: {error}");
            ApiError::from(error)
        }),
        None => Ok(()),
    }
}

/// What a client is told when the log takes nothing now.
pub(crate) fn refused(refused: Refused) -> ApiError {
    match refused {
        Refused::NoRoom => {
            ApiError::Storage("the write-ahead log has no room now, try again".into())
        }
        Refused::TooLarge => ApiError::Storage("the record is larger than the store takes".into()),
        Refused::Fenced => ApiError::NotLeader("another server has taken over".into()),
        Refused::Failed(cause) => ApiError::Storage(cause),
    }
}
