//! For which partitions transactions have offsets to commit, by group. The offsets themselves are
//! in the transactions.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use super::offsets::Position;

/// Partitions by topic.
type Partitions = BTreeMap<String, BTreeSet<i32>>;

/// What a transaction has for a group.
#[derive(Default)]
struct Intent {
    partitions: Partitions,
    /// It is decided that the transaction commits. Until it has ended nobody else commits for these
    /// partitions: what follows the decision may be done again after a crash, and must not replace
    /// anything newer then.
    is_decided: bool,
}

impl Intent {
    fn concerns(&self, topic: &str, partition: i32) -> bool {
        self.partitions.get(topic).is_some_and(|partitions| partitions.contains(&partition))
    }

    fn meets(&self, other: &Intent) -> bool {
        let mut theirs = other.partitions.iter();
        theirs.any(|(topic, partitions)| partitions.iter().any(|p| self.concerns(topic, *p)))
    }
}

/// By group and transactional id.
type Intents = HashMap<String, BTreeMap<Arc<str>, Intent>>;

/// Its lock is taken behind all others.
#[derive(Default)]
pub(crate) struct Pending {
    groups: Mutex<Intents>,
    /// Nothing is decided any more of what a transaction has, or had.
    settled: Notify,
}

impl Pending {
    /// A transaction has offsets to commit for these partitions. With no partitions: it has none of
    /// the topic any more.
    pub(crate) fn add<'a>(
        &self,
        group: &str,
        id: &Arc<str>,
        topics: impl Iterator<Item = (&'a str, Vec<i32>)>,
    ) {
        let mut groups = self.groups.lock();
        let transactions = groups.entry(group.to_owned()).or_default();
        let of_transaction = &mut transactions.entry(id.clone()).or_default().partitions;
        for (topic, partitions) in topics {
            if partitions.is_empty() {
                of_transaction.remove(topic);
            } else {
                of_transaction.entry(topic.to_owned()).or_default().extend(partitions);
            }
        }
    }

    /// That a transaction commits what it has for these groups is about to be decided. Whether that
    /// may be: another one of which it is decided, for some of the same partitions, has to end
    /// first, see [`Self::settled`].
    pub(crate) fn decide<'a>(&self, groups: impl Iterator<Item = &'a String>, id: &str) -> bool {
        let mut all = self.groups.lock();
        let groups: Vec<_> = groups.collect();
        for group in &groups {
            let Some(transactions) = all.get(*group) else { continue };
            let Some(own) = transactions.get(id) else { continue };
            let mut decided = transactions.values().filter(|intent| intent.is_decided);
            if decided.any(|other| other.meets(own)) {
                return false;
            }
        }
        mark(&mut all, groups.into_iter(), id, true);
        true
    }

    /// It could not be decided.
    pub(crate) fn undecide<'a>(&self, groups: impl Iterator<Item = &'a String>, id: &str) {
        mark(&mut self.groups.lock(), groups, id, false);
        self.settled.notify_waiters();
    }

    /// A transaction has ended.
    pub(crate) fn remove(&self, group: &str, id: &str) {
        let mut groups = self.groups.lock();
        let Some(transactions) = groups.get_mut(group) else { return };
        transactions.remove(id);
        if transactions.is_empty() {
            groups.remove(group);
        }
        drop(groups);
        self.settled.notify_waiters();
    }

    /// Resolves when something was decided and is not any more, from the call on.
    pub(crate) fn settled(&self) -> Notified<'_> {
        self.settled.notified()
    }

    /// Whether a transaction of which that is decided commits for one of these partitions of the
    /// group.
    pub(super) fn is_decided(&self, group: &str, topics: &[(String, Vec<Position>)]) -> bool {
        let groups = self.groups.lock();
        let mut intents = groups.get(group).into_iter().flat_map(BTreeMap::values);
        intents.any(|intent| {
            let concerned = |(topic, positions): &(String, Vec<Position>)| {
                positions.iter().any(|position| intent.concerns(topic, position.partition))
            };
            intent.is_decided && topics.iter().any(concerned)
        })
    }

    /// Whether an open transaction has offsets for the group, or had some that were deleted
    /// meanwhile.
    pub(super) fn concerns(&self, group: &str) -> bool {
        self.groups.lock().contains_key(group)
    }

    /// The ids of those transactions.
    pub(crate) fn transactions(&self, group: &str) -> Vec<Arc<str>> {
        let groups = self.groups.lock();
        groups.get(group).into_iter().flat_map(BTreeMap::keys).cloned().collect()
    }

    /// Whether there are any of [`Self::partitions`].
    pub(crate) fn has_partitions(&self, group: &str) -> bool {
        let groups = self.groups.lock();
        let mut intents = groups.get(group).into_iter().flat_map(BTreeMap::values);
        intents.any(|intent| intent.partitions.values().any(|partitions| !partitions.is_empty()))
    }

    /// The partitions for which transactions that have not ended have offsets to commit for the
    /// group.
    pub(crate) fn partitions(&self, group: &str) -> BTreeSet<(String, i32)> {
        let groups = self.groups.lock();
        let intents = groups.get(group).into_iter().flat_map(BTreeMap::values);
        let topics = intents.flat_map(|intent| &intent.partitions);
        let of_topic = topics.flat_map(|(topic, partitions)| {
            partitions.iter().map(move |partition| (topic.clone(), *partition))
        });
        of_topic.collect()
    }
}

/// Note for some groups whether it is decided that a transaction commits what it has for them.
fn mark<'a>(all: &mut Intents, groups: impl Iterator<Item = &'a String>, id: &str, decided: bool) {
    for group in groups {
        let transactions = all.get_mut(group);
        if let Some(own) = transactions.and_then(|transactions| transactions.get_mut(id)) {
            own.is_decided = decided;
        }
    }
}
