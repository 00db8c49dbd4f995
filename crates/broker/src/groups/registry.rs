//! The groups by name, each behind its own lock, and one timer for all of them.
//!
//! Lock order: a group's lock, then the timer's or a log's, then the lock of the topics. The map's
//! lock is never held together with a group's, except at start ([`Registry::restore`]), when there
//! is no other user. A transaction's lock is taken before a group's.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::protocol::StrBytes;
use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;

use super::commits::Blocked;
use super::consumer::{self, ConsumerGroup, ConsumerRules, GroupState, GroupStates};
use super::embedded;
use super::group::{
    Effect, Group, Joined, PersistedGroups, Refusal, Rules, State, Synced, encode_removal,
};
use super::live::{ClassicGroup, LiveGroup};
use super::member_log::{Durable, MemberLog};
use super::offset_log;
use super::share::{Return, ShareGroup, Shares};
use super::topics_view::TopicsView;
use crate::state_stream::Refused;

/// Bound on the persisted state of all classic groups. All of it is written to the catalog at each
/// upload if it has changed.
const MAX_PERSISTED_BYTES: usize = 64 << 20;

pub(super) type JoinAnswer = Result<Joined, Refusal>;
pub(super) type SyncAnswer = Result<Synced, ResponseError>;

/// The clock of all groups; tokio's, so that tests can control it.
pub(super) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// A group's entry in the map. A slot that was removed from the map holds a dead group.
pub(super) struct Slot {
    pub(super) name: Arc<str>,
    live: Mutex<Live>,
}

impl Slot {
    /// Estimated memory of a group of this name without members.
    pub(super) fn bytes(name: &str) -> usize {
        size_of::<Self>() + name.len() + 64
    }
}

struct Live {
    group: LiveGroup,
    /// The timer's entry for this group.
    scheduled: Option<Instant>,
    /// The bytes of this group's members that are included in [`Registry::size_bytes`].
    counted_bytes: usize,
    /// Size of the appended record of its persisted state as a classic group; 0 if there is none.
    persisted_bytes: usize,
    /// The record of its state that could not be appended for lack of space. No member joins or
    /// leaves meanwhile, so the record stays valid for the next attempt; each waiting request makes
    /// one.
    refused: Option<Bytes>,
    /// The last record of its members that was appended since the start.
    last_record: Option<Durable>,
}

/// All groups.
pub(super) struct Registry {
    rules: Rules,
    consumer_rules: ConsumerRules,
    /// Persisted state of classic groups.
    classic_log: MemberLog,
    /// Members of consumer groups.
    log: MemberLog,
    /// In-flight records of share groups.
    pub(super) shares: Arc<Shares>,
    max_groups: usize,
    started_at: Instant,
    slots: RwLock<HashMap<Arc<str>, Arc<Slot>>>,
    timer: Arc<Timer>,
    size_bytes: AtomicUsize,
    persisted_bytes: AtomicUsize,
}

impl Registry {
    pub(super) fn new(
        rules: Rules,
        consumer_rules: ConsumerRules,
        (classic_log, log): (MemberLog, MemberLog),
        shares: Arc<Shares>,
        max_groups: usize,
    ) -> Self {
        Self {
            rules,
            consumer_rules,
            classic_log,
            log,
            shares,
            max_groups,
            started_at: now(),
            slots: RwLock::default(),
            timer: Arc::default(),
            size_bytes: AtomicUsize::new(0),
            persisted_bytes: AtomicUsize::new(0),
        }
    }

    pub(super) fn timer(&self) -> Arc<Timer> {
        Arc::clone(&self.timer)
    }

    pub(super) fn get(&self, name: &str) -> Option<Arc<Slot>> {
        self.slots.read().get(name).cloned()
    }

    /// Returns the group, or creates it. `None` if the maximum number of groups is reached.
    pub(super) fn get_or_create(&self, name: &str) -> Option<Arc<Slot>> {
        if let Some(slot) = self.get(name) {
            return Some(slot);
        }
        let mut slots = self.slots.write();
        if let Some(slot) = slots.get(name) {
            return Some(Arc::clone(slot));
        }
        if slots.len() >= self.max_groups {
            tracing::warn!(
                group = name,
                max_groups = self.max_groups,
                "group refused: limit reached"
            );
            return None;
        }
        Some(self.insert(&mut slots, name, now()))
    }

    /// Restores groups that are known from the disk: those with offsets and those of each type.
    /// They exist already, so the maximum number of groups does not apply.
    pub(super) fn restore<'a>(
        &self,
        with_offsets: impl Iterator<Item = &'a str>,
        classic_groups: PersistedGroups,
        consumer_groups: GroupStates,
    ) {
        let mut slots = self.slots.write();
        let mut slot_of = |name: &str| match slots.get(name) {
            Some(slot) => Arc::clone(slot),
            None => self.insert(&mut slots, name, self.started_at),
        };
        for name in with_offsets {
            slot_of(name);
        }
        for (name, persisted) in classic_groups.0 {
            let slot = slot_of(&name);
            let persisted_bytes = persisted.encode(&name).len();
            self.persisted_bytes.fetch_add(persisted_bytes, Ordering::Relaxed);
            let mut live = slot.live.lock();
            live.persisted_bytes = persisted_bytes;
            live.group =
                LiveGroup::Classic(Group::from_persisted(self.rules, self.started_at, persisted));
            self.change_locked(&slot, &mut live, |_, _| ());
        }
        for (name, state) in consumer_groups.0 {
            let slot = slot_of(&name);
            let group = ConsumerGroup::new(state, self.consumer_rules, self.started_at);
            slot.live.lock().group = LiveGroup::Consumer(group);
            self.change(&slot, |_, _| ());
        }
        for name in self.shares.groups() {
            let slot = slot_of(&name);
            slot.live.lock().group = LiveGroup::Share(ShareGroup::new(self.started_at));
        }
    }

    /// Whether a group has had no members since the server started. Whether it had any before that
    /// is unknown.
    pub(super) fn was_vacant_at_start(&self, vacant_since: Instant) -> bool {
        vacant_since <= self.started_at
    }

    /// Returns the group, or creates it regardless of the maximum number of groups.
    fn get_or_create_unbounded(&self, name: &str) -> Arc<Slot> {
        let mut slots = self.slots.write();
        if let Some(slot) = slots.get(name) {
            return Arc::clone(slot);
        }
        self.insert(&mut slots, name, now())
    }

    fn insert(
        &self,
        slots: &mut HashMap<Arc<str>, Arc<Slot>>,
        name: &str,
        now: Instant,
    ) -> Arc<Slot> {
        let name: Arc<str> = name.into();
        let group = LiveGroup::Classic(Group::new(self.rules, now));
        let live = Mutex::new(Live {
            group,
            scheduled: None,
            counted_bytes: 0,
            persisted_bytes: 0,
            refused: None,
            last_record: None,
        });
        let slot = Arc::new(Slot { name: Arc::clone(&name), live });
        self.size_bytes.fetch_add(Slot::bytes(&name), Ordering::Relaxed);
        slots.insert(name, Arc::clone(&slot));
        slot
    }

    /// Returns all groups, sorted by name.
    pub(super) fn all(&self) -> Vec<Arc<Slot>> {
        let mut slots: Vec<_> = self.slots.read().values().cloned().collect();
        slots.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        slots
    }

    /// Removes a slot whose group is dead.
    pub(super) fn remove(&self, slot: &Arc<Slot>) {
        let mut slots = self.slots.write();
        if slots.get(&slot.name).is_some_and(|found| Arc::ptr_eq(found, slot)) {
            slots.remove(&slot.name);
            self.size_bytes.fetch_sub(Slot::bytes(&slot.name), Ordering::Relaxed);
        }
    }

    /// Estimated memory of all groups and their members.
    pub(super) fn size_bytes(&self) -> usize {
        self.size_bytes.load(Ordering::Relaxed)
    }

    /// Reads a group, or applies a change that neither changes its members nor makes a deadline
    /// earlier.
    pub(super) fn peek<R>(
        &self,
        slot: &Slot,
        read: impl FnOnce(&mut LiveGroup, Instant) -> R,
    ) -> R {
        read(&mut slot.live.lock().group, now())
    }

    /// Runs `act` under the lock of a live group of this name: otherwise the group could be deleted
    /// at the same time and the action would apply to no group. A missing group is created. A dead
    /// one is replaced, since it may not have been removed from the map yet. Not subject to the
    /// maximum number of groups.
    pub(super) fn with_live_group<R>(&self, name: &str, act: impl Fn() -> R) -> R {
        loop {
            let slot = self.get(name).unwrap_or_else(|| self.get_or_create_unbounded(name));
            match self.peek(&slot, |group, _| (!group.is_dead()).then(&act)) {
                Some(done) => return done,
                None => self.remove(&slot),
            }
        }
    }

    /// Applies an event to a group and carries out its effects.
    pub(super) fn change<R>(
        &self,
        slot: &Slot,
        event: impl FnOnce(&mut LiveGroup, Instant) -> R,
    ) -> R {
        self.change_locked(slot, &mut slot.live.lock(), event)
    }

    fn change_locked<R>(
        &self,
        slot: &Slot,
        live: &mut Live,
        event: impl FnOnce(&mut LiveGroup, Instant) -> R,
    ) -> R {
        // Write what an earlier event left, so that this one finds nothing unwritten unless there
        // is no space.
        let _ = self.write_locked(slot, live);
        let before = epoch(&live.group);
        let result = event(&mut live.group, now());
        if let LiveGroup::Classic(group) = &mut live.group {
            apply_effects(slot, group);
        }
        let _ = self.write_locked(slot, live);
        self.downgrade_to_classic(slot, live);
        let after = epoch(&live.group);
        if after != before {
            tracing::info!(
                group = &*slot.name,
                generation = after,
                members = match &live.group {
                    LiveGroup::Classic(group) => group.member_count(),
                    LiveGroup::Consumer(group) => group.state().members.len(),
                    LiveGroup::Share(group) => group.members().len(),
                },
                state = live.group.state_name(),
                "new generation"
            );
        }
        let size_bytes = live.group.size_bytes();
        self.size_bytes.fetch_add(size_bytes, Ordering::Relaxed);
        self.size_bytes.fetch_sub(live.counted_bytes, Ordering::Relaxed);
        live.counted_bytes = size_bytes;
        let deadline = live.group.deadline();
        if deadline != live.scheduled {
            self.timer.move_entry(&slot.name, live.scheduled, deadline);
            live.scheduled = deadline;
        }
        result
    }

    // ---- type changes, and the logs ----

    /// Returns the consumer group that a classic group becomes with its first member of the
    /// consumer protocol: if it has no members, or if its members are consumers. The caller
    /// replaces the classic group with it if it accepts the member.
    ///
    /// # Errors
    /// COORDINATOR_LOAD_IN_PROGRESS: the members cannot be converted now.
    pub(super) fn as_consumer(
        &self,
        group: &LiveGroup,
        topics: &TopicsView,
        now: Instant,
    ) -> Result<Option<ConsumerGroup>, ResponseError> {
        let LiveGroup::Classic(classic) = group else { return Ok(None) };
        let rules = self.consumer_rules;
        if classic.state() == State::Empty {
            return Ok(Some(ConsumerGroup::new(GroupState::default(), rules, now)));
        }
        if classic.protocol_type().is_none_or(|named| named.as_str() != embedded::CONSUMER) {
            return Ok(None);
        }
        // The assignment is known only once all members have received theirs.
        let migrants = classic.stable_members().ok_or(ResponseError::CoordinatorLoadInProgress)?;
        Ok(ConsumerGroup::of_migrants(rules, now, topics, classic.generation(), migrants))
    }

    /// Returns the share group in a slot, for an event. A classic group without members becomes one
    /// if `convert` is set.
    pub(super) fn share(
        group: &mut LiveGroup,
        convert: bool,
        now: Instant,
    ) -> Option<&mut ShareGroup> {
        if convert && group.is_vacant_classic() {
            *group = LiveGroup::Share(ShareGroup::new(now));
        }
        match group {
            LiveGroup::Classic(_) | LiveGroup::Consumer(_) => None,
            LiveGroup::Share(group) => Some(group),
        }
    }

    /// Converts a consumer group whose members all speak the classic protocol to a classic group;
    /// they join again. If the log accepts no record now, the next event tries again.
    fn downgrade_to_classic(&self, slot: &Slot, live: &mut Live) {
        let LiveGroup::Consumer(group) = &live.group else { return };
        if !group.is_all_classic() || !group.unwritten().is_empty() {
            return;
        }
        let Ok(durable) = self.log.append(consumer::encode_deletion(&slot.name)) else { return };
        live.last_record = Some(durable);
        tracing::info!(group = &*slot.name, "a consumer group was converted to a classic group");
        // The newest epoch that any member has received, so that members that have it commit their
        // progress before they join again. The group's epoch is ahead of it, because the last
        // member of the consumer protocol has left.
        let (generation, migrants) = (group.state().target_epoch, group.migrants());
        let protocol_type = StrBytes::from_static_str(embedded::CONSUMER);
        let classic = Group::of_migrants(self.rules, now(), generation, protocol_type, migrants);
        live.group = LiveGroup::Classic(classic);
    }

    /// Converts a consumer group without members to a classic one and appends the record of it. A
    /// classic group stays as it is, and must have nothing unwritten. A share group must have
    /// neither members nor share partitions.
    ///
    /// # Errors
    /// INCONSISTENT_GROUP_PROTOCOL while it has members; a log that accepts no record now.
    pub(super) fn make_classic<'a>(
        &self,
        slot: &Slot,
        group: &'a mut LiveGroup,
        now: Instant,
    ) -> Result<&'a mut ClassicGroup, Blocked> {
        if let LiveGroup::Consumer(consumer) = group {
            if !consumer.is_empty() {
                return Err(ResponseError::InconsistentGroupProtocol.into());
            }
            if !consumer.unwritten().is_empty() {
                return Err(offset_log::Refused::Stream(Refused::Full).into());
            }
            // A group without an epoch was never written.
            if consumer.state().epoch > 0 {
                let record = consumer::encode_deletion(&slot.name);
                // No request waits for it: until it is durable there is a consumer group without
                // members.
                drop(self.log.append(record).map_err(offset_log::Refused::Stream)?);
            }
            *group = LiveGroup::Classic(Group::new(self.rules, now));
        }
        if let LiveGroup::Share(share) = group {
            if !share.is_empty() || self.shares.has_group(&slot.name) {
                return Err(ResponseError::InconsistentGroupProtocol.into());
            }
            *group = LiveGroup::Classic(Group::new(self.rules, now));
        }
        let classic = group.classic()?;
        match classic.is_unwritten() {
            true => Err(offset_log::Refused::Stream(Refused::Full).into()),
            false => Ok(classic),
        }
    }

    /// Appends the records of a group's unwritten changes.
    ///
    /// # Returns
    /// The record to wait for before the group's state may be shown to a client.
    ///
    /// # Errors
    /// The log accepts no record now. The changes are retained, and tried again with the next event
    /// or after a delay.
    pub(super) fn write(&self, slot: &Slot) -> Result<Option<Durable>, Refused> {
        let mut live = slot.live.lock();
        self.write_locked(slot, &mut live)?;
        Ok(live.last_record.clone())
    }

    fn write_locked(&self, slot: &Slot, live: &mut Live) -> Result<(), Refused> {
        self.persist(slot, live)?;
        let LiveGroup::Consumer(group) = &mut live.group else { return Ok(()) };
        while !group.unwritten().is_empty() {
            let (record, changes) = consumer::encode_changes(&slot.name, group.unwritten());
            match self.log.append(record) {
                Ok(durable) => {
                    group.written(changes);
                    live.last_record = Some(durable);
                }
                Err(refused) => {
                    group.not_written(now());
                    return Err(refused);
                }
            }
        }
        Ok(())
    }

    /// Appends the persisted state of a classic group, or the record that it has none any more,
    /// before any record of the group of another type that it has become.
    fn persist(&self, slot: &Slot, live: &mut Live) -> Result<(), Refused> {
        let persisted = match &live.group {
            LiveGroup::Classic(group) if !group.is_unwritten() => return Ok(()),
            LiveGroup::Classic(group) => live.refused.take().or_else(|| {
                let persisted = group.persisted()?;
                let bytes = persisted.record_bytes(&slot.name);
                self.fits_persisted(slot, live.persisted_bytes, bytes)
                    .then(|| persisted.encode(&slot.name))
            }),
            LiveGroup::Consumer(_) | LiveGroup::Share(_) => None,
        };
        let persisted_bytes = persisted.as_ref().map_or(0, Bytes::len);
        let removal = (live.persisted_bytes > 0).then(|| encode_removal(&slot.name));
        if let Some(record) = persisted.or(removal) {
            match self.classic_log.append(record.clone()) {
                Ok(durable) => live.last_record = Some(durable),
                Err(refused) => {
                    live.refused = (persisted_bytes > 0).then_some(record);
                    match &mut live.group {
                        LiveGroup::Classic(group) => group.not_written(now()),
                        LiveGroup::Consumer(group) => group.not_written(now()),
                        LiveGroup::Share(_) => {}
                    }
                    return Err(refused);
                }
            }
            self.persisted_bytes.fetch_add(persisted_bytes, Ordering::Relaxed);
            self.persisted_bytes.fetch_sub(live.persisted_bytes, Ordering::Relaxed);
            live.persisted_bytes = persisted_bytes;
        }
        if let LiveGroup::Classic(group) = &mut live.group {
            group.written();
        }
        Ok(())
    }

    /// Whether a state record of this many bytes fits in place of one of `instead_of_bytes`. If it
    /// does not, the members of the group join again after a restart.
    fn fits_persisted(&self, slot: &Slot, instead_of_bytes: usize, bytes: usize) -> bool {
        let others_bytes = self.persisted_bytes.load(Ordering::Relaxed) - instead_of_bytes;
        let fits = bytes as u64 <= self.classic_log.max_record_bytes()
            && others_bytes + bytes <= MAX_PERSISTED_BYTES;
        if !fits {
            tracing::warn!(
                group = &*slot.name,
                bytes,
                others_bytes,
                "members of a group exceed the limit of persisted state, they must join again \
                 after a restart"
            );
        }
        fits
    }

    /// Resolves when a write that failed for lack of space may succeed.
    pub(super) async fn wait_for_space(&self) {
        self.log.wait_for_space().await;
    }

    /// Expires what is due in the groups whose entries the timer returns.
    pub(super) fn expire(&self) {
        let now = now();
        for name in self.timer.take_due(now) {
            let Some(slot) = self.get(&name) else { continue };
            let mut live = slot.live.lock();
            // Another event may have moved the entry since it was taken out.
            live.scheduled = live.scheduled.filter(|at| *at > now);
            self.change_locked(&slot, &mut live, |group, now| match group {
                LiveGroup::Classic(group) => group.tick(now),
                LiveGroup::Consumer(group) => {
                    for (member, why) in group.tick(now) {
                        dropped(&slot, &member, why);
                    }
                }
                LiveGroup::Share(group) => {
                    for member in group.tick(now) {
                        dropped(&slot, &member, "session timed out");
                        self.shares.member_gone(&slot.name, &member, Return::Lost);
                    }
                }
            });
        }
    }
}

/// Answers the waiting requests.
fn apply_effects(slot: &Slot, group: &mut ClassicGroup) {
    for effect in group.take_effects() {
        // The receiver is dropped when the client disconnects.
        match effect {
            Effect::Joined(waiter, answer) => drop(waiter.send(answer)),
            Effect::Synced(waiter, answer) => drop(waiter.send(answer)),
            Effect::Dropped(member, why) => dropped(slot, &member, why),
        }
    }
}

fn dropped(slot: &Slot, member: &str, why: &str) {
    tracing::info!(group = &*slot.name, member, "member removed: {why}");
}

/// The generation of a classic group, or the group epoch of another.
fn epoch(group: &LiveGroup) -> i32 {
    match group {
        LiveGroup::Classic(group) => group.generation(),
        LiveGroup::Consumer(group) => group.state().epoch,
        LiveGroup::Share(group) => group.epoch(),
    }
}

/// The deadlines of groups or share partitions: one entry for each that has a deadline. Heartbeats
/// only move deadlines to later, so they leave the entry unchanged; it then fires early and is
/// moved to the actual deadline.
pub(super) struct Timer<K = Arc<str>> {
    entries: Mutex<BTreeSet<(Instant, K)>>,
    /// Notified when the first entry has become earlier, or when the coordinator closes.
    changed: Notify,
}

impl<K> Default for Timer<K> {
    fn default() -> Self {
        Self { entries: Mutex::default(), changed: Notify::default() }
    }
}

impl<K: Clone + Ord> Timer<K> {
    pub(super) fn move_entry(&self, name: &K, from: Option<Instant>, to: Option<Instant>) {
        let mut entries = self.entries.lock();
        let first_before = entries.first().map(|(at, _)| *at);
        if let Some(from) = from {
            entries.remove(&(from, name.clone()));
        }
        if let Some(to) = to {
            entries.insert((to, name.clone()));
            if first_before.is_none_or(|first| to < first) {
                self.changed.notify_one();
            }
        }
    }

    pub(super) fn take_due(&self, now: Instant) -> Vec<K> {
        let mut due = Vec::new();
        let mut entries = self.entries.lock();
        while entries.first().is_some_and(|(at, _)| *at <= now) {
            due.extend(entries.pop_first().map(|(_, name)| name));
        }
        due
    }

    /// When the first entry is due.
    pub(super) fn first(&self) -> Option<Instant> {
        self.entries.lock().first().map(|(at, _)| *at)
    }

    /// Resolves when [`Self::first`] has become earlier, or after [`Self::wake`].
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    pub(super) fn wake(&self) {
        self.changed.notify_one();
    }
}
