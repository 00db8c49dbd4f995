//! Metadata of streams whose entries in the catalog are lost, from the labels of the streams: for a
//! rebuild from objects. `docs/rebuild.md`.

use std::collections::{BTreeMap, HashSet};

use alluvium_stream::StreamId;
use bytes::Bytes;
use uuid::Uuid;

use crate::label::Label;
use crate::producer_ids;
use crate::topics::{META_PREFIX, Stored};

/// Settings of a topic whose own settings are lost. Nothing is deleted until its owner sets what it
/// had: a compacted topic would lose what is older than the default retention.
const SAFE_CONFIGS: [(&str, &str); 2] = [("retention.bytes", "-1"), ("retention.ms", "-1")];

/// What labels show of lost metadata.
#[derive(Debug, Default)]
pub struct Restored {
    /// Entries of the catalog to add or replace.
    pub meta: BTreeMap<String, Bytes>,
    /// Streams to create: partitions without records, with their labels.
    pub streams: Vec<(StreamId, Bytes)>,
    /// Topics whose entry was made from labels. Their settings are lost.
    pub topics: Vec<RestoredTopic>,
    /// Streams that get no name: that of their topic is another topic's.
    pub unnamed: Vec<UnnamedPartition>,
}

/// A topic whose entry was made from labels, or got more partitions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoredTopic {
    /// Its name.
    pub name: String,
    /// Its number of partitions, at least: later ones had no records in objects.
    pub partitions: usize,
    /// Its entry was lost, and with it its settings.
    pub is_new: bool,
}

/// A partition that gets no name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnnamedPartition {
    /// The stream.
    pub stream: StreamId,
    /// The topic that it was a partition of.
    pub topic: String,
    /// The partition.
    pub partition: u32,
}

/// Returns the entries of topics and of the server's own state that are not in `meta`, and that the
/// `labels` of streams show. Of several topics with one name the one with the newest stream gets
/// it. `fresh` returns ids for new streams. `term` is the store's after the loss.
pub fn restore_metadata<'a>(
    meta: &BTreeMap<String, Bytes>,
    labels: impl Iterator<Item = (StreamId, &'a [u8])>,
    term: u32,
    mut fresh: impl FnMut() -> StreamId,
) -> Restored {
    let mut restored = Restored::default();
    let mut stored: BTreeMap<&str, Stored> = BTreeMap::new();
    for (key, value) in meta {
        let Some(name) = key.strip_prefix(META_PREFIX) else { continue };
        stored.extend(serde_json::from_slice(value).ok().map(|topic| (name, topic)));
    }
    let named: HashSet<StreamId> =
        stored.values().flat_map(|topic| topic.streams.iter().copied()).collect();
    // By name and by ID of the topic.
    let mut found: BTreeMap<String, BTreeMap<Uuid, BTreeMap<u32, StreamId>>> = BTreeMap::new();
    for (stream, label) in labels {
        match Label::decode(label) {
            Some(Label::Partition { topic, id, partition }) if !named.contains(&stream) => {
                let topics = found.entry(topic.into_owned()).or_default();
                topics.entry(id).or_default().insert(partition, stream);
            }
            Some(Label::State { state }) if !meta.contains_key(&*state) => {
                // Streams ascend, so the newest one stays.
                restored.meta.insert(state.into_owned(), stream.0.to_string().into());
            }
            _ => {}
        }
    }
    for (name, mut topics) in found {
        let known = stored.remove(&*name);
        let newest = |streams: &BTreeMap<u32, StreamId>| streams.values().max().copied();
        let id = match &known {
            Some(topic) => Some(topic.id),
            None => topics.iter().max_by_key(|(_, streams)| newest(streams)).map(|(id, _)| *id),
        };
        let chosen = id.and_then(|id| Some((id, topics.remove(&id)?)));
        if let Some((id, streams)) = chosen {
            add_topic(&mut restored, &name, id, known, streams, &mut fresh);
        }
        for (partition, stream) in topics.into_values().flatten() {
            restored.unnamed.push(UnnamedPartition { stream, topic: name.clone(), partition });
        }
    }
    if !meta.contains_key(producer_ids::META_KEY) {
        // Each term passes over that many, and all ids that were given out lie below.
        let next = producer_ids::SKIPPED.saturating_mul(i64::from(term) + 1);
        restored.meta.insert(producer_ids::META_KEY.into(), next.to_string().into());
    }
    restored
}

/// Adds the entry of a topic with these streams by partition.
fn add_topic(
    restored: &mut Restored,
    name: &str,
    id: Uuid,
    known: Option<Stored>,
    streams: BTreeMap<u32, StreamId>,
    fresh: &mut impl FnMut() -> StreamId,
) {
    let is_new = known.is_none();
    let configs = || SAFE_CONFIGS.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let mut topic = known.unwrap_or_else(|| Stored { id, streams: Vec::new(), configs: configs() });
    for (partition, stream) in streams {
        let index = partition as usize;
        if index < topic.streams.len() {
            // The entry names another stream for it.
            let topic = name.to_owned();
            restored.unnamed.push(UnnamedPartition { stream, topic, partition });
            continue;
        }
        while topic.streams.len() < index {
            let empty = fresh();
            let partition = u32::try_from(topic.streams.len()).expect("below a partition");
            let label = Label::Partition { topic: name.into(), id, partition };
            restored.streams.push((empty, label.encode()));
            topic.streams.push(empty);
        }
        topic.streams.push(stream);
    }
    let value = serde_json::to_vec(&topic).expect("a struct of texts and numbers");
    restored.meta.insert(format!("{META_PREFIX}{name}"), value.into());
    let (name, partitions) = (name.to_owned(), topic.streams.len());
    restored.topics.push(RestoredTopic { name, partitions, is_new });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(topic: &str, id: u128, partition: u32) -> Bytes {
        Label::Partition { topic: topic.into(), id: Uuid::from_u128(id), partition }.encode()
    }

    fn restore(meta: &[(&str, &str)], labels: &[(u64, Bytes)]) -> Restored {
        let meta = meta.iter().map(|(key, value)| (key.to_string(), value.to_string().into()));
        let labels = labels.iter().map(|(id, label)| (StreamId(*id), &label[..]));
        let mut next = 1000;
        restore_metadata(&meta.collect(), labels, 7, || {
            next += 1;
            StreamId(next)
        })
    }

    fn topic(restored: &Restored, name: &str) -> (u128, Vec<u64>) {
        let stored: Stored =
            serde_json::from_slice(&restored.meta[&format!("topic/{name}")]).unwrap();
        (stored.id.as_u128(), stored.streams.iter().map(|stream| stream.0).collect())
    }

    #[test]
    fn topics_come_back_with_all_partitions_up_to_the_last_one_with_records() {
        let state = Label::State { state: "groups/offsets-stream".into() }.encode();
        let labels =
            [(1, label("a", 1, 0)), (2, label("a", 1, 3)), (3, label("b", 2, 0)), (4, state)];
        let restored = restore(&[], &labels);
        assert_eq!(topic(&restored, "a"), (1, vec![1, 1001, 1002, 2]));
        assert_eq!(topic(&restored, "b"), (2, vec![3]));
        assert_eq!(restored.streams.len(), 2);
        assert_eq!(restored.streams[1], (StreamId(1002), label("a", 1, 2)));
        assert_eq!(restored.meta["groups/offsets-stream"], "4");
        assert_eq!(restored.meta["producer-ids/next"], "8000000000");
        let stored: Stored = serde_json::from_slice(&restored.meta["topic/a"]).unwrap();
        assert_eq!(stored.configs["retention.ms"], "-1");
        assert_eq!(stored.configs["retention.bytes"], "-1");
        assert!(restored.unnamed.is_empty());
    }

    #[test]
    fn what_the_catalog_has_stays() {
        let id = Uuid::from_u128(1);
        let entry = format!(r#"{{"id":"{id}","streams":[1],"configs":{{"x":"y"}}}}"#);
        let meta = [("topic/a", &*entry), ("producer-ids/next", "5"), ("s", "9")];
        let known = [(1, label("a", 1, 0)), (9, Label::State { state: "s".into() }.encode())];
        assert!(restore(&meta, &known).meta.is_empty());
        // A partition was added, and the change of the entry is lost.
        let added = [(1, label("a", 1, 0)), (2, label("a", 1, 1)), (3, label("a", 2, 0))];
        let restored = restore(&meta, &added);
        assert_eq!(topic(&restored, "a"), (1, vec![1, 2]));
        let stored: Stored = serde_json::from_slice(&restored.meta["topic/a"]).unwrap();
        assert_eq!(stored.configs["x"], "y");
        let is_new = false;
        let expected = RestoredTopic { name: "a".into(), partitions: 2, is_new };
        assert_eq!(restored.topics, [expected]);
        let other = UnnamedPartition { stream: StreamId(3), topic: "a".into(), partition: 0 };
        assert_eq!(restored.unnamed, [other], "a deleted topic of the name");
    }

    #[test]
    fn of_two_topics_with_a_name_the_newer_one_gets_it() {
        let labels = [(1, label("a", 9, 0)), (2, label("a", 9, 1)), (5, label("a", 3, 0))];
        let restored = restore(&[], &labels);
        assert_eq!(topic(&restored, "a"), (3, vec![5]));
        let unnamed: Vec<_> = restored.unnamed.iter().map(|it| it.stream.0).collect();
        assert_eq!(unnamed, [1, 2]);
    }
}
