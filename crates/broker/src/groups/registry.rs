//! The groups by name, each behind its own lock, and the one timer for all of them.
//!
//! Locks, in the order in which they may be taken: a group's, then the timer's or the offset log's. The map's lock is never held together
//! with a group's.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use kafka_protocol::error::ResponseError;
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, oneshot};

use super::group::{Effect, Group, Joined, Refusal, Rules, Synced};

pub(super) type JoinAnswer = Result<Joined, Refusal>;
pub(super) type SyncAnswer = Result<Synced, ResponseError>;
/// A group whose waiters are the requests' answers.
pub(super) type LiveGroup = Group<oneshot::Sender<JoinAnswer>, oneshot::Sender<SyncAnswer>>;

/// The clock of all groups; tokio's, so that tests can move it.
pub(super) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// A group's place. A slot that was taken out of the map holds a dead group.
pub(super) struct Slot {
    pub(super) name: Arc<str>,
    live: Mutex<Live>,
}

impl Slot {
    /// What a group of this name takes without members, about.
    pub(super) fn bytes(name: &str) -> usize {
        size_of::<Self>() + name.len() + 64
    }
}

struct Live {
    group: LiveGroup,
    /// The entry that the timer has for this group.
    scheduled: Option<Instant>,
    /// What this group's members have in [`Registry::size_bytes`].
    counted_bytes: usize,
}

/// All groups.
pub(super) struct Registry {
    rules: Rules,
    max_groups: usize,
    slots: RwLock<HashMap<Arc<str>, Arc<Slot>>>,
    timer: Arc<Timer>,
    size_bytes: AtomicUsize,
}

impl Registry {
    pub(super) fn new(rules: Rules, max_groups: usize) -> Self {
        Self {
            rules,
            max_groups,
            slots: RwLock::default(),
            timer: Arc::default(),
            size_bytes: AtomicUsize::new(0),
        }
    }

    pub(super) fn timer(&self) -> Arc<Timer> {
        Arc::clone(&self.timer)
    }

    pub(super) fn get(&self, name: &str) -> Option<Arc<Slot>> {
        self.slots.read().get(name).cloned()
    }

    /// `None` when there are as many groups as there may be.
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
                "a group is refused: there are too many"
            );
            return None;
        }
        Some(self.insert(&mut slots, name))
    }

    /// For groups that are known from their offsets: not subject to the bound, since they exist already.
    pub(super) fn restore<'a>(&self, names: impl Iterator<Item = &'a str>) {
        let mut slots = self.slots.write();
        for name in names {
            self.insert(&mut slots, name);
        }
    }

    /// The same for one, which may have come back meanwhile.
    pub(super) fn revive(&self, name: &str) -> Arc<Slot> {
        let mut slots = self.slots.write();
        if let Some(slot) = slots.get(name) {
            return Arc::clone(slot);
        }
        self.insert(&mut slots, name)
    }

    fn insert(&self, slots: &mut HashMap<Arc<str>, Arc<Slot>>, name: &str) -> Arc<Slot> {
        let name: Arc<str> = name.into();
        let group = Group::new(self.rules, now());
        let live = Mutex::new(Live { group, scheduled: None, counted_bytes: 0 });
        let slot = Arc::new(Slot { name: Arc::clone(&name), live });
        self.size_bytes.fetch_add(Slot::bytes(&name), Ordering::Relaxed);
        slots.insert(name, Arc::clone(&slot));
        slot
    }

    /// Sorted by name.
    pub(super) fn all(&self) -> Vec<Arc<Slot>> {
        let mut slots: Vec<_> = self.slots.read().values().cloned().collect();
        slots.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        slots
    }

    /// Take out a slot whose group is dead.
    pub(super) fn remove(&self, slot: &Arc<Slot>) {
        let mut slots = self.slots.write();
        if slots.get(&slot.name).is_some_and(|found| Arc::ptr_eq(found, slot)) {
            slots.remove(&slot.name);
            self.size_bytes.fetch_sub(Slot::bytes(&slot.name), Ordering::Relaxed);
        }
    }

    /// An estimate of the memory that all groups and their members take.
    pub(super) fn size_bytes(&self) -> usize {
        self.size_bytes.load(Ordering::Relaxed)
    }

    /// Look at a group, or do what changes neither its members nor moves a deadline to earlier.
    pub(super) fn peek<R>(
        &self,
        slot: &Slot,
        look: impl FnOnce(&mut LiveGroup, Instant) -> R,
    ) -> R {
        look(&mut slot.live.lock().group, now())
    }

    /// Let an event happen to a group, and carry out its effects.
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
        let generation = live.group.generation();
        let result = event(&mut live.group, now());
        for effect in live.group.take_effects() {
            // A receiver is gone when its client's connection is.
            match effect {
                Effect::Joined(waiter, answer) => drop(waiter.send(answer)),
                Effect::Synced(waiter, answer) => drop(waiter.send(answer)),
                Effect::Dropped(member, why) => {
                    tracing::info!(
                        group = &*slot.name,
                        member = &*member,
                        "a member was removed: {why}"
                    );
                }
            }
        }
        if live.group.generation() != generation {
            let (generation, members) = (live.group.generation(), live.group.member_count());
            tracing::info!(
                group = &*slot.name,
                generation,
                members,
                state = live.group.state().name(),
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

    /// Expire what is due in the groups whose entries the timer hands out.
    pub(super) fn expire(&self) {
        let now = now();
        for name in self.timer.take_due(now) {
            let Some(slot) = self.get(&name) else { continue };
            let mut live = slot.live.lock();
            // Another event may have moved the entry since it was taken out.
            live.scheduled = live.scheduled.filter(|at| *at > now);
            self.change_locked(&slot, &mut live, Group::tick);
        }
    }
}

/// When which group has something to expire: one entry for each group that has a deadline. Members' heartbeats only move
/// deadlines to later, so they leave the entry as it is; it comes up early, and is put where it belongs then.
#[derive(Default)]
pub(super) struct Timer {
    entries: Mutex<BTreeSet<(Instant, Arc<str>)>>,
    /// The first entry came earlier than it was, or the coordinator closes.
    changed: Notify,
}

impl Timer {
    fn move_entry(&self, name: &Arc<str>, from: Option<Instant>, to: Option<Instant>) {
        let mut entries = self.entries.lock();
        let first_before = entries.first().map(|(at, _)| *at);
        if let Some(from) = from {
            entries.remove(&(from, Arc::clone(name)));
        }
        if let Some(to) = to {
            entries.insert((to, Arc::clone(name)));
            if first_before.is_none_or(|first| to < first) {
                self.changed.notify_one();
            }
        }
    }

    fn take_due(&self, now: Instant) -> Vec<Arc<str>> {
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

    /// Resolves when [`Self::first`] has come earlier, or after [`Self::wake`].
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    pub(super) fn wake(&self) {
        self.changed.notify_one();
    }
}
