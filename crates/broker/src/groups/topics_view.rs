//! The topics of the server at one moment, as the coordinator needs them.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use uuid::Uuid;

/// What a client may see of the topics, now and whenever it is asked.
pub(crate) trait See: Send + Sync {
    /// Whose sight it is: the same for clients that see the same.
    fn viewer(&self) -> &str;
    /// Differs from that of every other moment at which anybody saw something else.
    fn version(&self) -> u64;
    /// Whether it may know of this topic.
    fn sees(&self, topic: &str) -> bool;
}

/// None: it sees everything.
#[derive(Clone, Default)]
pub(crate) struct Sight(pub(crate) Option<Arc<dyn See>>);

impl Sight {
    pub(super) fn viewer(&self) -> &str {
        self.0.as_ref().map_or("", |see| see.viewer())
    }

    pub(super) fn version(&self) -> u64 {
        self.0.as_ref().map_or(0, |see| see.version())
    }

    pub(super) fn sees(&self, topic: &str) -> bool {
        self.0.as_ref().is_none_or(|see| see.sees(topic))
    }
}

impl fmt::Debug for Sight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.viewer())
    }
}

/// Where the topics can be looked at. Whoever holds a group's lock meanwhile sees nothing older
/// than whoever had it before.
pub(crate) trait TopicsNow: Sync {
    /// As they are now.
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
    /// Topics by name, id and number of partitions.
    pub(crate) fn new(version: u64, topics: impl Iterator<Item = (Arc<str>, Uuid, u32)>) -> Self {
        let mut view = Self { version, ..Self::default() };
        for (name, id, partitions) in topics {
            view.names.insert(id, Arc::clone(&name));
            view.by_name.insert(name, (id, partitions));
        }
        view
    }

    /// Differs from that of every other moment at which the topics were others.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Id and number of partitions.
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

/// For tests whose topics stay what they are.
#[cfg(test)]
impl TopicsNow for TopicsView {
    fn view(&self) -> Arc<TopicsView> {
        Arc::new(self.clone())
    }
}
