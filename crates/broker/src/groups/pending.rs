//! For which partitions transactions have offsets to commit, by group. The offsets themselves are in the transactions.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;

/// Partitions by topic.
type Partitions = BTreeMap<String, BTreeSet<i32>>;

/// By group and transactional id. Its lock is taken behind all others.
#[derive(Default)]
pub(crate) struct Pending {
    groups: Mutex<HashMap<String, BTreeMap<Arc<str>, Partitions>>>,
}

impl Pending {
    /// A transaction has offsets to commit for these partitions. With no partitions: it has none of the topic any more.
    pub(crate) fn add<'a>(
        &self,
        group: &str,
        id: &Arc<str>,
        topics: impl Iterator<Item = (&'a str, Vec<i32>)>,
    ) {
        let mut groups = self.groups.lock();
        let transactions = groups.entry(group.to_owned()).or_default();
        let of_transaction = transactions.entry(id.clone()).or_default();
        for (topic, partitions) in topics {
            if partitions.is_empty() {
                of_transaction.remove(topic);
            } else {
                of_transaction.entry(topic.to_owned()).or_default().extend(partitions);
            }
        }
    }

    /// A transaction has ended.
    pub(crate) fn remove(&self, group: &str, id: &str) {
        let mut groups = self.groups.lock();
        let Some(transactions) = groups.get_mut(group) else { return };
        transactions.remove(id);
        if transactions.is_empty() {
            groups.remove(group);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.groups.lock().is_empty()
    }

    /// Whether an open transaction has offsets for the group, or had some that were deleted meanwhile.
    pub(super) fn concerns(&self, group: &str) -> bool {
        self.groups.lock().contains_key(group)
    }

    /// The ids of those transactions.
    pub(crate) fn transactions(&self, group: &str) -> Vec<Arc<str>> {
        let groups = self.groups.lock();
        groups.get(group).into_iter().flat_map(BTreeMap::keys).cloned().collect()
    }

    /// The partitions for which transactions that have not ended have offsets to commit for the group.
    pub(crate) fn partitions(&self, group: &str) -> BTreeSet<(String, i32)> {
        let groups = self.groups.lock();
        let topics = groups.get(group).into_iter().flat_map(BTreeMap::values).flatten();
        let of_topic = topics.flat_map(|(topic, partitions)| {
            partitions.iter().map(move |partition| (topic.clone(), *partition))
        });
        of_topic.collect()
    }
}
