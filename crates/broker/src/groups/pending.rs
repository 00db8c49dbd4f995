//! The partitions for which transactions have staged offsets, by group. The offsets themselves are
//! in the transactions.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use super::offsets::Position;

/// Partitions by topic.
type Partitions = BTreeMap<String, BTreeSet<i32>>;

/// The partitions for which one transaction has staged offsets of a group.
#[derive(Default)]
struct Intent {
    partitions: Partitions,
    /// Whether the commit of the transaction is decided. Until it has ended, no other commit for
    /// these partitions is accepted: the steps that follow the decision may be repeated after a
    /// crash, and must not replace a newer offset.
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

/// Partitions with staged offsets. Its lock is the last in the lock order.
#[derive(Default)]
pub(crate) struct Pending {
    groups: Mutex<Intents>,
    /// Notified when a transaction with a decision has ended, or its decision was withdrawn.
    decision_ended: Notify,
}

impl Pending {
    /// Records that a transaction has offsets to commit for these partitions. An empty list means
    /// that it has none of the topic any more.
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

    /// Marks the transaction's offsets for these groups as decided, before its commit is decided.
    /// Returns `false` if another decided transaction concerns some of the same partitions: that
    /// one has to end first, see [`Self::decision_ended`].
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

    /// Withdraws the mark: the commit could not be decided.
    pub(crate) fn undecide<'a>(&self, groups: impl Iterator<Item = &'a String>, id: &str) {
        mark(&mut self.groups.lock(), groups, id, false);
        self.decision_ended.notify_waiters();
    }

    /// Removes a transaction that has ended.
    pub(crate) fn remove(&self, group: &str, id: &str) {
        let mut groups = self.groups.lock();
        let Some(transactions) = groups.get_mut(group) else { return };
        transactions.remove(id);
        if transactions.is_empty() {
            groups.remove(group);
        }
        drop(groups);
        self.decision_ended.notify_waiters();
    }

    /// Resolves when, after the call, a decided transaction ends or its decision is withdrawn.
    pub(crate) fn decision_ended(&self) -> Notified<'_> {
        self.decision_ended.notified()
    }

    /// Whether a decided transaction commits offsets for one of these partitions of the group.
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

    /// Whether an open transaction has offsets for the group, or had some that were deleted since.
    pub(super) fn concerns(&self, group: &str) -> bool {
        self.groups.lock().contains_key(group)
    }

    /// The ids of the transactions that have, or had, offsets for the group.
    pub(crate) fn transactions(&self, group: &str) -> Vec<Arc<str>> {
        let groups = self.groups.lock();
        groups.get(group).into_iter().flat_map(BTreeMap::keys).cloned().collect()
    }

    /// Whether [`Self::partitions`] is not empty.
    pub(crate) fn has_partitions(&self, group: &str) -> bool {
        let groups = self.groups.lock();
        let mut intents = groups.get(group).into_iter().flat_map(BTreeMap::values);
        intents.any(|intent| intent.partitions.values().any(|partitions| !partitions.is_empty()))
    }

    /// The partitions for which transactions that have not ended have offsets of the group to
    /// commit.
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

/// Sets for some groups whether the commit of a transaction's offsets is decided.
fn mark<'a>(all: &mut Intents, groups: impl Iterator<Item = &'a String>, id: &str, decided: bool) {
    for group in groups {
        let transactions = all.get_mut(group);
        if let Some(own) = transactions.and_then(|transactions| transactions.get_mut(id)) {
            own.is_decided = decided;
        }
    }
}
