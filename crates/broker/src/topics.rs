//! The topics, their partitions and configurations: in the catalog as `topic/<name>`, in memory as
//! a map.
//!
//! The layout of the catalog entry is in `docs/format/broker-metadata.md`.

mod follow;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use alluvium_stream::{Change, KIND_LOG, Store, StoreError, StreamId, StreamOffset};
use parking_lot::{Mutex, RwLock};
use uuid::Uuid;

use crate::configs::topic::{RetentionRules, Rules};
use crate::configs::{Alteration, Overrides, Setting, topic as settings};
use crate::errors::ApiError;
use crate::groups::{TopicsNow, TopicsView};
use crate::label::Label;
use crate::log_compaction;
use crate::partition::{Partition, WRITER_EPOCH, current_leader_epoch, unix_time_ms};
use crate::producer_state::Totals;

pub(crate) const META_PREFIX: &str = "topic/";

/// Kafka's internal topics. This server keeps their content in state streams.
pub(crate) const GROUP_TOPIC: &str = "__consumer_offsets";
pub(crate) const TRANSACTION_TOPIC: &str = "__transaction_state";
const SHARE_GROUP_TOPIC: &str = "__share_group_state";
/// The log of Kafka's controllers, which is not a topic.
pub(crate) const METADATA_TOPIC: &str = "__cluster_metadata";

/// Whether a topic is one of Kafka's internal topics. It is created when its coordinator is first
/// requested, since clients and tools expect it. It is empty and cannot be written to.
#[must_use]
pub fn is_internal(name: &str) -> bool {
    [GROUP_TOPIC, TRANSACTION_TOPIC, SHARE_GROUP_TOPIC].contains(&name)
}

/// Refuses to change the content of an internal topic.
///
/// # Errors
/// INVALID_TOPIC_EXCEPTION: internal topics are empty here.
pub(crate) fn check_not_internal(name: &str) -> Result<(), ApiError> {
    match is_internal(name) {
        true => Err(ApiError::InvalidTopicName(format!("{name} is an internal topic"))),
        false => Ok(()),
    }
}

/// The greatest number of deleted topics that are tracked for transactions that have written to
/// them.
const MAX_DELETED: usize = 1_000;

/// How long a deleted name is not auto-created again by a metadata request. sarama, the client with
/// the shortest retry time, retries for 750 ms.
pub(crate) const RECREATION_PAUSE: Duration = Duration::from_millis(500);

/// The longest topic name.
pub(crate) const MAX_NAME_BYTES: usize = 249;

/// An immutable snapshot of a topic; a change creates a new one.
pub(crate) struct Topic {
    pub(crate) name: Arc<str>,
    pub(crate) id: Uuid,
    pub(crate) partitions: Vec<Arc<Partition>>,
    pub(crate) overrides: Overrides,
    pub(crate) rules: Rules,
}

impl Topic {
    /// Returns the trims of all partitions of the topic that exceed a limit, and the number of
    /// offsets that they delete.
    ///
    /// # Errors
    /// The server does not write the partitions.
    pub(crate) fn trims(&self, rules: RetentionRules) -> Result<(Vec<Change>, u64), StoreError> {
        let RetentionRules { age_ms, keep_bytes } = rules;
        if age_ms.is_none() && keep_bytes.is_none() {
            return Ok((Vec::new(), 0));
        }
        let older_than_ms = age_ms.map(|age| unix_time_ms().saturating_sub(age));
        let mut changes = Vec::new();
        let mut offsets = 0;
        // A stream with another writer is not this server's to trim, and must not fail the commit
        // of the rest.
        for partition in &self.partitions {
            let (stream, epoch) = (&partition.stream, partition.writer_epoch()?);
            if epoch != stream.newest_epoch() {
                continue;
            }
            let (start, to) =
                (stream.start_offset(), stream.retention_point(older_than_ms, keep_bytes));
            if to > start {
                offsets += to.0 - start.0;
                changes.push(Change::TrimStream { id: stream.id(), epoch, to });
            }
        }
        Ok((changes, offsets))
    }

    /// The partition with this index.
    pub(crate) fn partition(&self, index: i32) -> Option<&Arc<Partition>> {
        self.partitions.get(usize::try_from(index).ok()?)
    }

    /// The catalog change that stores the topic with `more` partitions added.
    fn entry(&self, more: &[StreamId]) -> Result<Change, ApiError> {
        let present = self.partitions.iter().map(|partition| partition.stream.id());
        let stored = Stored {
            id: self.id,
            streams: present.chain(more.iter().copied()).collect(),
            configs: self.overrides.clone(),
        };
        let value = serde_json::to_vec(&stored)
            .map_err(|e| ApiError::Internal(format!("catalog entry: {e}")))?;
        Ok(Change::PutMeta { key: meta_key(&self.name), value })
    }
}

/// A topic in a request: by name in older versions, by ID in newer ones.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum TopicRef {
    Name(Arc<str>),
    Id(Uuid),
}

/// The catalog entry of a topic.
#[derive(serde::Serialize, serde::Deserialize)]
pub(crate) struct Stored {
    pub(crate) id: Uuid,
    /// The partitions' streams, in order.
    pub(crate) streams: Vec<StreamId>,
    pub(crate) configs: Overrides,
}

/// Creates a stream for each partition of a topic whose stream does not exist: damage of the log
/// has lost the creation, and a later change of the topic is intact.
async fn create_lost(store: &Store, name: &str, topic: &mut Stored) -> Result<(), StoreError> {
    let mut changes = Vec::new();
    for (partition, id) in (0..).zip(&mut topic.streams) {
        if store.stream(*id).is_some() {
            continue;
        }
        tracing::error!(
            "topic {name}, partition {partition}: its creation was lost with a part of the \
             write-ahead log; it is created again, without records"
        );
        *id = store.new_stream_ids(1).await?[0];
        changes.push(create_stream(*id, name, topic.id, partition));
    }
    if changes.is_empty() {
        return Ok(());
    }
    let value = serde_json::to_vec(&*topic).expect("it was read as JSON");
    changes.push(Change::PutMeta { key: meta_key(name), value });
    store.commit(changes).await
}

/// Returns the change that creates the stream of a partition.
fn create_stream(id: StreamId, topic: &str, topic_id: Uuid, partition: u32) -> Change {
    let label = Label::Partition { topic: topic.into(), id: topic_id, partition }.encode();
    Change::CreateStream { id, kind: KIND_LOG, label }
}

/// Lists the streams of all partitions in the catalog's metadata: the topic's name and ID, and the
/// partition. An unreadable entry is left out.
pub(crate) fn streams(
    meta: &BTreeMap<String, Vec<u8>>,
) -> impl Iterator<Item = (StreamId, (Arc<str>, Uuid, i32))> {
    let topics = meta.iter().filter_map(|(key, value)| {
        let name: Arc<str> = key.strip_prefix(META_PREFIX)?.into();
        let stored: Stored = serde_json::from_slice(value).ok()?;
        Some((name, stored))
    });
    topics.flat_map(|(name, Stored { id, streams, .. })| {
        let of = move |(index, stream)| (stream, (name.clone(), id, index));
        (0..).zip(streams).map(of)
    })
}

/// An invalid catalog entry.
#[derive(Debug, thiserror::Error)]
#[error("topic {topic}: {reason}")]
pub(crate) struct BadTopic {
    topic: String,
    reason: String,
}

#[derive(Default)]
struct Maps {
    by_name: BTreeMap<Arc<str>, Arc<Topic>>,
    by_id: HashMap<Uuid, Arc<Topic>>,
    /// Topic names by the name that they have in Kafka's metrics.
    by_metric_name: HashMap<String, Arc<str>>,
    partitions: usize,
    /// A topic whose deletion is not durable yet. It cannot be found, but may exist again after a
    /// crash.
    deleting: Option<Arc<Topic>>,
    /// Incremented with every change.
    version: u64,
}

impl Maps {
    fn insert(&mut self, topic: &Arc<Topic>) {
        self.version += 1;
        self.partitions += topic.partitions.len();
        self.by_id.insert(topic.id, topic.clone());
        self.by_metric_name.insert(metric_name(&topic.name), topic.name.clone());
        if let Some(old) = self.by_name.insert(topic.name.clone(), topic.clone()) {
            self.partitions -= old.partitions.len();
        }
    }

    fn remove(&mut self, topic: &Topic) {
        self.version += 1;
        if let Some(old) = self.by_name.remove(&topic.name) {
            self.partitions -= old.partitions.len();
        }
        self.by_id.remove(&topic.id);
        self.by_metric_name.remove(&metric_name(&topic.name));
    }

    fn begin_deletion(&mut self, topic: &Arc<Topic>) {
        self.remove(topic);
        self.deleting = Some(topic.clone());
    }

    /// Ends a deletion, which is durable or has failed.
    fn end_deletion(&mut self, topic: &Arc<Topic>, is_deleted: bool) {
        self.deleting = None;
        if !is_deleted {
            self.insert(topic);
        }
    }
}

/// All topics.
pub(crate) struct Topics {
    store: Store,
    max_partitions: usize,
    /// Totals of the partitions' producer state.
    pub(crate) totals: Arc<Totals>,
    /// The broker's defaults for settings that a topic does not override, by topic setting names.
    defaults: RwLock<Overrides>,
    maps: RwLock<Maps>,
    /// The last view that was requested.
    view: Mutex<Arc<TopicsView>>,
    /// Held during the check and commit of a change, so that changes are serialized.
    changing: tokio::sync::Mutex<()>,
    /// The entries of the catalog that were taken over, if the store is followed.
    followed: Mutex<BTreeMap<String, Vec<u8>>>,
    /// The last topics that were deleted since the start.
    deleted: Mutex<VecDeque<Deleted>>,
    /// While a test holds it, no deletion becomes durable.
    #[cfg(test)]
    pub(crate) held_deletions: tokio::sync::Mutex<()>,
}

/// A deleted topic, or one that is being deleted as long as it has no time.
struct Deleted {
    name: Arc<str>,
    id: Uuid,
    at: Option<Instant>,
}

impl TopicsNow for Topics {
    fn view(&self) -> Arc<TopicsView> {
        Topics::view(self)
    }
}

impl Topics {
    /// Loads the topics from the catalog and rebuilds the state of their partitions.
    ///
    /// # Errors
    /// The first invalid entry or checkpoint.
    pub(crate) async fn open(
        store: Store,
        defaults: Overrides,
        max_partitions: u32,
    ) -> Result<Self, BadTopic> {
        let mut maps = Maps::default();
        let totals = Arc::<Totals>::default();
        let clean_ends = log_compaction::CleanEnds::load(&store);
        // Those of a store that is followed are taken over below.
        let entries = if store.is_followed() { Vec::new() } else { store.meta(META_PREFIX) };
        for (key, value) in entries {
            let name = &key[META_PREFIX.len()..];
            let bad = |reason: String| BadTopic { topic: name.to_owned(), reason };
            let mut stored: Stored = serde_json::from_slice(&value)
                .map_err(|e| bad(format!("its catalog entry: {e}")))?;
            create_lost(&store, name, &mut stored).await.map_err(|e| bad(e.to_string()))?;
            let mut partitions = Vec::with_capacity(stored.streams.len());
            for (index, id) in stored.streams.into_iter().enumerate() {
                let bad = |e: &dyn std::fmt::Display| bad(format!("partition {index}: {e}"));
                let stream = store.open_stream(id, WRITER_EPOCH).await.map_err(|e| bad(&e))?;
                let partition = Partition::open(
                    stream,
                    clean_ends.of(id),
                    current_leader_epoch(&store),
                    totals.clone(),
                );
                partitions.push(Arc::new(partition.map_err(|e| bad(&e))?));
            }
            maps.insert(&Arc::new(Topic {
                name: name.into(),
                id: stored.id,
                partitions,
                rules: Rules::new(&stored.configs, &defaults).bounded(store.max_batch_bytes()),
                overrides: stored.configs,
            }));
        }
        let topics = Self {
            store,
            defaults: RwLock::new(defaults),
            max_partitions: max_partitions as usize,
            totals,
            maps: RwLock::new(maps),
            view: Mutex::default(),
            changing: tokio::sync::Mutex::new(()),
            followed: Mutex::default(),
            deleted: Mutex::default(),
            #[cfg(test)]
            held_deletions: Default::default(),
        };
        if topics.store.is_followed()
            && let Some(bad) = topics.follow().await.1.into_iter().next()
        {
            return Err(bad);
        }
        Ok(topics)
    }

    /// The topic with this name.
    pub(crate) fn by_name(&self, name: &str) -> Result<Arc<Topic>, ApiError> {
        self.maps.read().by_name.get(name).cloned().ok_or(ApiError::UnknownTopicOrPartition)
    }

    /// The topic with this ID.
    pub(crate) fn by_id(&self, id: Uuid) -> Result<Arc<Topic>, ApiError> {
        self.maps.read().by_id.get(&id).cloned().ok_or(ApiError::UnknownTopicId)
    }

    /// The topic that a request names.
    pub(crate) fn find(&self, topic: &TopicRef) -> Result<Arc<Topic>, ApiError> {
        match topic {
            TopicRef::Name(name) => self.by_name(name),
            TopicRef::Id(id) => self.by_id(*id),
        }
    }

    /// The topic with this ID, including one whose deletion is not durable yet. State that is
    /// persisted meanwhile must be consistent with a restart after which the topic still exists.
    pub(crate) fn stored_by_id(&self, id: Uuid) -> Option<Arc<Topic>> {
        let maps = self.maps.read();
        let deleting = || maps.deleting.as_ref().filter(|topic| topic.id == id);
        maps.by_id.get(&id).or_else(deleting).cloned()
    }

    /// The topic with this name, including one whose deletion is not durable yet.
    pub(crate) fn stored_by_name(&self, name: &str) -> Option<Arc<Topic>> {
        let maps = self.maps.read();
        let deleting = || maps.deleting.as_ref().filter(|topic| *topic.name == *name);
        maps.by_name.get(name).or_else(deleting).cloned()
    }

    /// The IDs of recently deleted topics of this name.
    pub(crate) fn deleted_ids(&self, name: &str) -> Vec<Uuid> {
        let deleted = self.deleted.lock();
        deleted.iter().filter(|topic| *topic.name == *name).map(|topic| topic.id).collect()
    }

    /// Whether a topic of this name was deleted within [`RECREATION_PAUSE`].
    pub(crate) fn is_just_deleted(&self, name: &str, now: Instant) -> bool {
        let just = |at: Instant| now.saturating_duration_since(at) < RECREATION_PAUSE;
        let deleted = self.deleted.lock();
        let mut of_name = deleted.iter().filter(|topic| *topic.name == *name);
        of_name.any(|topic| topic.at.is_none_or(just))
    }

    /// Whether this partition exists.
    pub(crate) fn has_partition(&self, topic: &str, partition: i32) -> bool {
        self.by_name(topic).is_ok_and(|topic| topic.partition(partition).is_some())
    }

    /// The topic and partition of a stream, for messages.
    pub(crate) fn name_of(&self, stream: StreamId) -> Option<String> {
        self.maps.read().by_name.values().find_map(|topic| {
            let at = topic.partitions.iter().position(|one| one.stream.id() == stream)?;
            Some(partition_name(&topic.name, at))
        })
    }

    /// The streams that neither a topic nor the server's own state refers to, in ascending order.
    /// Damage to the log can leave such a stream, if the change that created it or that deleted it
    /// is lost.
    pub(crate) fn unknown_streams(&self) -> Vec<StreamId> {
        let state = state_stream_names(&self.store.meta(""));
        let topics = self.all();
        let partitions = topics.iter().flat_map(|topic| &topic.partitions);
        let of_topics: HashSet<_> = partitions.map(|partition| partition.stream.id()).collect();
        let is_unknown = |id: &StreamId| !of_topics.contains(id) && !state.contains_key(id);
        let mut unknown: Vec<_> = self.store.stream_ids().into_iter().filter(is_unknown).collect();
        unknown.sort_unstable();
        unknown
    }

    /// All topics in the order of their names.
    pub(crate) fn all(&self) -> Vec<Arc<Topic>> {
        self.maps.read().by_name.values().cloned().collect()
    }

    /// The current topics for the group coordinator. The view is rebuilt only after topics have
    /// changed.
    pub(crate) fn view(&self) -> Arc<TopicsView> {
        let mut view = self.view.lock();
        let maps = self.maps.read();
        if view.version() != maps.version {
            let topics = maps.by_name.values().map(|topic| {
                let partitions = u32::try_from(topic.partitions.len()).expect("they are bounded");
                (Arc::clone(&topic.name), topic.id, partitions)
            });
            *view = Arc::new(TopicsView::new(maps.version, topics));
        }
        Arc::clone(&view)
    }

    /// The number of partitions of all topics.
    pub(crate) fn partitions(&self) -> usize {
        self.maps.read().partitions
    }

    /// Creates a topic, atomically and durably. With `validate_only`, only checks whether that
    /// would succeed. `forget` removes leftovers of earlier topics of this name; meanwhile no topic
    /// is created or deleted.
    ///
    /// # Errors
    /// An invalid name, one that exists or collides, invalid numbers or settings; failed storage.
    pub(crate) async fn create(
        &self,
        name: &str,
        partitions: u32,
        overrides: Overrides,
        validate_only: bool,
        forget: impl Future<Output = Result<(), ApiError>>,
    ) -> Result<Arc<Topic>, ApiError> {
        let _changing = self.changing.lock().await;
        if name == METADATA_TOPIC {
            // Kafka's message.
            return Err(ApiError::InvalidRequest(format!(
                "Creation of internal topic {name} is prohibited."
            )));
        }
        check_name(name)?;
        self.check_free(name)?;
        self.check_partition_limit(partitions)?;
        let overrides = settings::check(&overrides)?;
        settings::check_tiers(&Overrides::new(), &overrides, &self.defaults.read())?;
        let mut topic = Topic {
            name: name.into(),
            id: if validate_only { Uuid::nil() } else { Uuid::new_v4() },
            partitions: Vec::new(),
            rules: self.rules(&overrides, &self.defaults.read()),
            overrides,
        };
        if !validate_only {
            forget.await?;
            topic.partitions = self.commit_with_new_streams(&topic, partitions).await?;
            self.warn_of_bound(&topic);
        }
        let topic = Arc::new(topic);
        if !validate_only {
            self.maps.write().insert(&topic);
        }
        Ok(topic)
    }

    /// Adds partitions to a topic, up to `total`.
    ///
    /// # Errors
    /// An unknown topic, a number that is not greater than the present one; failed storage.
    pub(crate) async fn grow(
        &self,
        name: &str,
        total: u32,
        validate_only: bool,
    ) -> Result<(), ApiError> {
        let _changing = self.changing.lock().await;
        let topic = self.by_name(name)?;
        let present = u32::try_from(topic.partitions.len()).expect("partitions are bounded");
        if total <= present {
            return Err(ApiError::InvalidPartitions(format!(
                "topic {name} already has {present} partitions, {total} requested"
            )));
        }
        self.check_partition_limit(total - present)?;
        if validate_only {
            return Ok(());
        }
        let partitions = self.commit_with_new_streams(&topic, total - present).await?;
        let grown = Topic {
            name: topic.name.clone(),
            id: topic.id,
            partitions,
            overrides: topic.overrides.clone(),
            rules: topic.rules,
        };
        self.maps.write().insert(&Arc::new(grown));
        Ok(())
    }

    /// Changes a topic's settings, effective with the next batch. With `validate_only`, only checks
    /// whether that would succeed.
    ///
    /// # Errors
    /// An unknown topic, unknown names, invalid values; failed storage.
    pub(crate) async fn alter(
        &self,
        name: &str,
        alteration: &Alteration,
        validate_only: bool,
    ) -> Result<(), ApiError> {
        let _changing = self.changing.lock().await;
        let topic = self.by_name(name)?;
        let inherited = |setting: &'static Setting| {
            let default = self.defaults.read().get(setting.name).cloned();
            default.unwrap_or_else(|| setting.default.to_owned())
        };
        let overrides = alteration.apply(settings::find, &topic.overrides, inherited)?;
        let overrides = settings::check(&overrides)?;
        settings::check_import(&topic.overrides, &overrides)?;
        settings::check_tiers(&topic.overrides, &overrides, &self.defaults.read())?;
        if validate_only || overrides == topic.overrides {
            return Ok(());
        }
        let altered = Topic {
            name: topic.name.clone(),
            id: topic.id,
            partitions: topic.partitions.clone(),
            rules: self.rules(&overrides, &self.defaults.read()),
            overrides,
        };
        let mut changes = vec![altered.entry(&[])?];
        let Rules { append, is_tiered, local_retention, .. } = topic.rules;
        let is_off = is_tiered && !altered.rules.is_tiered && !append.is_import;
        let (trims, offsets) = match is_off {
            true => topic.trims(local_retention)?,
            false => (Vec::new(), 0),
        };
        // One commit, so that a crash cannot leave what should be deleted.
        changes.extend(trims);
        self.store.commit(changes).await?;
        if offsets > 0 {
            tracing::info!(topic = name, offsets, "remote storage switched off, records deleted");
        }
        let is_bound_new = altered.overrides.get(settings::MAX_MESSAGE_BYTES)
            != topic.overrides.get(settings::MAX_MESSAGE_BYTES);
        if is_bound_new {
            self.warn_of_bound(&altered);
        }
        self.maps.write().insert(&Arc::new(altered));
        Ok(())
    }

    /// Re-reads the broker's defaults from `defaults` after they have changed.
    pub(crate) async fn refresh_defaults(&self, defaults: impl FnOnce() -> Overrides) {
        let _changing = self.changing.lock().await;
        let defaults = defaults();
        for topic in self.all() {
            let altered = Topic {
                name: topic.name.clone(),
                id: topic.id,
                partitions: topic.partitions.clone(),
                rules: self.rules(&topic.overrides, &defaults),
                overrides: topic.overrides.clone(),
            };
            self.maps.write().insert(&Arc::new(altered));
        }
        *self.defaults.write() = defaults;
    }

    /// Notes that a topic was deleted at this time, or is being deleted.
    fn note_deleted(&self, topic: &Topic, at: Option<Instant>) {
        let mut deleted = self.deleted.lock();
        if deleted.len() == MAX_DELETED {
            deleted.pop_front();
        }
        deleted.push_back(Deleted { name: topic.name.clone(), id: topic.id, at });
    }

    /// Deletes a topic and its records.
    ///
    /// # Errors
    /// An unknown topic, failed storage.
    pub(crate) async fn delete(&self, topic: &TopicRef) -> Result<Arc<Topic>, ApiError> {
        let _changing = self.changing.lock().await;
        let topic = self.find(topic)?;
        let delete = |partition: &Arc<Partition>| {
            let (id, epoch) = (partition.stream.id(), partition.writer_epoch()?);
            Ok(Change::DeleteStream { id, epoch })
        };
        let deletions = topic.partitions.iter().map(delete).collect::<Result<_, StoreError>>();
        let mut changes: Vec<Change> = deletions?;
        let cleaned = |partition: &Arc<Partition>| log_compaction::meta_key(partition.stream.id());
        changes.extend(topic.partitions.iter().map(cleaned).map(Change::DeleteMeta));
        changes.push(Change::DeleteMeta(meta_key(&topic.name)));
        self.note_deleted(&topic, None);
        // Before the streams: their deletion wakes readers, which must not find the topic any more.
        self.maps.write().begin_deletion(&topic);
        #[cfg(test)]
        drop(self.held_deletions.lock().await);
        let deleted = self.store.commit(changes).await;
        self.maps.write().end_deletion(&topic, deleted.is_ok());
        if let Some(last) = self.deleted.lock().back_mut() {
            last.at = Some(Instant::now());
        }
        deleted?;
        Ok(topic)
    }

    /// Creates `count` streams and stores `topic` with them, in one commit. Returns all its
    /// partitions, the new ones last.
    async fn commit_with_new_streams(
        &self,
        topic: &Topic,
        count: u32,
    ) -> Result<Vec<Arc<Partition>>, ApiError> {
        let new = self.store.new_stream_ids(count).await?;
        let indexes = (0..).skip(topic.partitions.len());
        let mut changes: Vec<Change> = new
            .iter()
            .zip(indexes)
            .map(|(id, partition)| create_stream(*id, &topic.name, topic.id, partition))
            .collect();
        changes.push(topic.entry(&new)?);
        self.store.commit(changes).await?;
        let mut partitions = topic.partitions.clone();
        for id in new {
            let stream = self.store.open_stream(id, WRITER_EPOCH).await?;
            let (clean_end, epoch) = (StreamOffset(0), current_leader_epoch(&self.store));
            let partition = Partition::open(stream, clean_end, epoch, self.totals.clone());
            let partition = partition.map_err(|e| ApiError::Internal(e.to_string()))?;
            partitions.push(Arc::new(partition));
        }
        Ok(partitions)
    }

    fn rules(&self, overrides: &Overrides, defaults: &Overrides) -> Rules {
        Rules::new(overrides, defaults).bounded(self.store.max_batch_bytes())
    }

    fn warn_of_bound(&self, topic: &Topic) {
        let own = topic.overrides.get(settings::MAX_MESSAGE_BYTES);
        settings::warn_of_bound(&topic.name, own, self.store.max_batch_bytes());
    }

    /// Checks that a name is free. Names that differ only in `.` and `_` would have the same metric
    /// names; as in Kafka, the second one is refused.
    fn check_free(&self, name: &str) -> Result<(), ApiError> {
        let maps = self.maps.read();
        if maps.by_name.contains_key(name) {
            return Err(ApiError::TopicExists(name.to_owned()));
        }
        match maps.by_metric_name.get(&metric_name(name)) {
            Some(other) => Err(ApiError::InvalidTopicName(format!(
                "topic {name} collides with the existing topic {other}"
            ))),
            None => Ok(()),
        }
    }

    fn check_partition_limit(&self, more: u32) -> Result<(), ApiError> {
        if more == 0 {
            return Err(ApiError::InvalidPartitions("a topic must have a partition".into()));
        }
        let present = self.partitions();
        if present + more as usize > self.max_partitions {
            return Err(ApiError::PolicyViolation(format!(
                "{more} more partitions would exceed the limit of {} in total, {present} exist",
                self.max_partitions
            )));
        }
        Ok(())
    }
}

/// The name of a partition in messages.
fn partition_name(topic: &str, index: usize) -> String {
    format!("partition {index} of topic {topic}")
}

/// Names each stream from the metadata of a catalog, for messages: the partition and topic that it
/// holds, or the server's own state. Unreadable metadata is left out.
pub fn stream_names<'a>(
    meta: impl Iterator<Item = (&'a str, &'a [u8])>,
) -> HashMap<StreamId, String> {
    let mut names = HashMap::new();
    for (key, value) in meta {
        if let Some(topic) = key.strip_prefix(META_PREFIX) {
            let Ok(stored) = serde_json::from_slice::<Stored>(value) else { continue };
            let streams = stored.streams.into_iter().enumerate();
            names.extend(streams.map(|(index, stream)| (stream, partition_name(topic, index))));
        } else {
            names.extend(state_stream_name(key, value));
        }
    }
    names
}

/// Names the streams with the server's own state.
pub(crate) fn state_stream_names(meta: &[(String, Vec<u8>)]) -> HashMap<StreamId, String> {
    meta.iter().filter_map(|(key, value)| state_stream_name(key, value)).collect()
}

fn state_stream_name(key: &str, value: &[u8]) -> Option<(StreamId, String)> {
    let state = key.strip_suffix("stream").filter(|_| !key.starts_with(META_PREFIX))?;
    let id = str::from_utf8(value).ok()?.parse().ok()?;
    let state = state.trim_end_matches(['-', '/']).replace(['/', '-'], " ");
    Some((StreamId(id), format!("the server's own state of {state}")))
}

fn meta_key(name: &str) -> String {
    format!("{META_PREFIX}{name}")
}

fn metric_name(name: &str) -> String {
    name.replace('.', "_")
}

/// Cuts a name to one byte more than a topic name can have, so that state that outlives a request
/// does not keep long invalid names.
pub(crate) fn cut_name(name: &str) -> &str {
    &name[..name.ceil_char_boundary(MAX_NAME_BYTES + 1)]
}

/// Checks Kafka's rules for topic names (`Topic.validate`).
///
/// # Errors
/// [`ApiError::InvalidTopicName`] with the violated rule.
pub(crate) fn check_name(name: &str) -> Result<(), ApiError> {
    let invalid = |reason: String| Err(ApiError::InvalidTopicName(reason));
    if name.is_empty() {
        return invalid("a topic name cannot be empty".into());
    }
    if name == "." || name == ".." {
        return invalid(format!("a topic name cannot be {name:?}"));
    }
    if name.len() > MAX_NAME_BYTES {
        return invalid(format!(
            "a topic name can have at most {MAX_NAME_BYTES} characters, this one has {}",
            name.len()
        ));
    }
    if let Some(bad) =
        name.chars().find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')))
    {
        return invalid(format!(
            "a topic name can have letters, digits, '.', '_' and '-' only, this one has {bad:?}"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kafka_protocol::ResponseError;

    use super::*;

    #[test]
    fn names_follow_kafkas_rules() {
        for good in ["a", "a.b_c-D9", &"x".repeat(249), "..."] {
            check_name(good).unwrap();
        }
        for bad in ["", ".", "..", "a b", "a/b", "ä", "a\0", &"x".repeat(250)] {
            assert_eq!(
                check_name(bad).unwrap_err().kind(),
                ResponseError::InvalidTopicException,
                "{bad:?}"
            );
        }
    }
}
