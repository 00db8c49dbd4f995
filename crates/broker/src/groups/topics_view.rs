//! A snapshot of the server's topics, as the coordinator needs it.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use uuid::Uuid;

/// Decides which topics a client may describe, at the time of each call.
pub(crate) trait TopicAccess: Send + Sync {
    /// Identifies the principal: equal for clients that may describe the same topics.
    fn viewer(&self) -> &str;
    /// Changes whenever the visible topics of any client may have changed.
    fn version(&self) -> u64;
    /// Whether the client may describe this topic.
    fn is_visible(&self, topic: &str) -> bool;
}

/// The topic visibility of a client. `None`: it sees all topics.
#[derive(Clone, Default)]
pub(crate) struct TopicVisibility(pub(crate) Option<Arc<dyn TopicAccess>>);

impl TopicVisibility {
    pub(super) fn viewer(&self) -> &str {
        self.0.as_ref().map_or("", |access| access.viewer())
    }

    pub(super) fn version(&self) -> u64 {
        self.0.as_ref().map_or(0, |access| access.version())
    }

    pub(super) fn is_visible(&self, topic: &str) -> bool {
        self.0.as_ref().is_none_or(|access| access.is_visible(topic))
    }
}

impl fmt::Debug for TopicVisibility {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.viewer())
    }
}

/// Provides snapshots of the topics. Under a group's lock, a snapshot is never older than the one
/// of the lock's previous holder.
pub(crate) trait TopicsNow: Sync {
    /// Returns the current topics.
    fn view(&self) -> Arc<TopicsView>;
}

/// All topics at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct TopicsView {
    /// Grows with every change of the topics while the server runs.
    version: u64,
    by_name: BTreeMap<Arc<str>, (Uuid, u32)>,
    names: HashMap<Uuid, Arc<str>>,
}

impl TopicsView {
    /// Creates a view of topics with their names, ids and numbers of partitions.
    pub(crate) fn new(version: u64, topics: impl Iterator<Item = (Arc<str>, Uuid, u32)>) -> Self {
        let mut view = Self { version, ..Self::default() };
        for (name, id, partitions) in topics {
            view.names.insert(id, Arc::clone(&name));
            view.by_name.insert(name, (id, partitions));
        }
        view
    }

    /// A number that differs between snapshots with different topics.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Returns id and number of partitions.
    pub(crate) fn get(&self, name: &str) -> Option<(Uuid, u32)> {
        self.by_name.get(name).copied()
    }

    pub(crate) fn name(&self, id: Uuid) -> Option<&Arc<str>> {
        self.names.get(&id)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &Arc<str>> {
        self.by_name.keys()
    }
}

/// For tests with constant topics.
#[cfg(test)]
impl TopicsNow for TopicsView {
    fn view(&self) -> Arc<TopicsView> {
        Arc::new(self.clone())
    }
}
