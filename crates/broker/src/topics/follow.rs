//! The topics of a store that another server writes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::{BadTopic, META_PREFIX, Stored, Topic, Topics};
use crate::partition::Partition;

impl Topics {
    /// Takes over the topics that the catalog has now, from the store that is followed. Returns
    /// whether topics were removed, and the entries that cannot be used: the topics stay as they
    /// were, and the next call tries again.
    pub(crate) async fn follow(&self) -> (bool, Vec<BadTopic>) {
        let _changing = self.changing.lock().await;
        let entries: BTreeMap<String, Vec<u8>> = self.store.meta(META_PREFIX).into_iter().collect();
        let before = std::mem::take(&mut *self.followed.lock());
        let is_removed =
            before.keys().filter(|key| !entries.contains_key(*key)).fold(false, |_, key| {
                self.remove_followed(&key[META_PREFIX.len()..]);
                true
            });
        let mut followed = BTreeMap::new();
        let mut bad = Vec::new();
        for (key, value) in entries {
            if before.get(&key) != Some(&value) {
                let name = &key[META_PREFIX.len()..];
                if let Err(reason) = self.take_over(name, &value) {
                    bad.push(BadTopic { topic: name.to_owned(), reason });
                    continue;
                }
            }
            followed.insert(key, value);
        }
        *self.followed.lock() = followed;
        (is_removed, bad)
    }

    fn take_over(&self, name: &str, entry: &[u8]) -> Result<(), String> {
        let Stored { id, streams, configs } =
            serde_json::from_slice(entry).map_err(|error| format!("its catalog entry: {error}"))?;
        let present = self.by_name(name).ok();
        let kept = present.as_ref().filter(|topic| topic.id == id);
        let mut partitions = Vec::with_capacity(streams.len());
        for (index, stream) in streams.into_iter().enumerate() {
            let known = kept.and_then(|topic| topic.partitions.get(index));
            if let Some(known) = known.filter(|known| known.stream.id() == stream) {
                partitions.push(known.clone());
                continue;
            }
            let found = self.store.stream(stream);
            let found = found.ok_or_else(|| {
                format!("partition {index}: there is no stream {stream} in the catalog")
            })?;
            let partition = Partition::follow(found, &self.store, self.totals.clone());
            let partition = partition.map_err(|error| format!("partition {index}: {error}"))?;
            partitions.push(Arc::new(partition));
        }
        if present.is_some() && kept.is_none() {
            // It was deleted and created again since.
            self.remove_followed(name);
        }
        let rules = self.rules(&configs, &self.defaults.read());
        let topic = Topic { name: name.into(), id, partitions, overrides: configs, rules };
        self.maps.write().insert(&Arc::new(topic));
        Ok(())
    }

    fn remove_followed(&self, name: &str) {
        let Ok(topic) = self.by_name(name) else { return };
        self.maps.write().remove(&topic);
        self.note_deleted(&topic, Some(Instant::now()));
    }
}
