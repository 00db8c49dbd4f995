//! Incremental fetch sessions (KIP-227): the server keeps the partitions that a consumer fetches,
//! so that later requests name only changes, and responses hold only what is new.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use kafka_protocol::messages::FetchRequest;
use kafka_protocol::messages::fetch_request::{FetchPartition, FetchTopic, ForgottenTopic};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::errors::ApiError;
use crate::topics::{MAX_NAME_BYTES, TopicRef, cut_name};
use crate::wire::once;

/// The greatest number of sessions (`max.incremental.fetch.session.cache.slots`).
const MAX_SESSIONS: usize = 1_000;

/// The greatest number of partitions in all sessions together.
const MAX_SESSION_PARTITIONS: usize = 500_000;

/// A session that was not used for this long may be evicted for a new one
/// (`min.incremental.fetch.session.eviction.ms`).
const EVICTION_AGE: Duration = Duration::from_secs(120);

const NO_SESSION: i32 = 0;
/// The epoch that begins a session.
const INITIAL_EPOCH: i32 = 0;
/// The epoch that requests no session and ends the one that the request names.
const FINAL_EPOCH: i32 = -1;

/// The key of a partition in a session.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) topic: TopicRef,
    pub(crate) partition: i32,
}

impl Key {
    /// Whether the name has a valid length. Keeping longer names would make the limit on partitions
    /// useless as a limit on memory.
    fn has_valid_name(&self) -> bool {
        match &self.topic {
            TopicRef::Name(name) => name.len() <= MAX_NAME_BYTES,
            TopicRef::Id(_) => true,
        }
    }
}

/// A partition of a fetch request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FetchTarget {
    pub(crate) key: Key,
    pub(crate) offset: i64,
    pub(crate) max_bytes: i32,
    pub(crate) leader_epoch: i32,
}

/// The part of a partition's response other than records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PartitionStatus {
    pub(crate) error_code: i16,
    pub(crate) high_watermark: i64,
    pub(crate) last_stable_offset: i64,
    pub(crate) log_start: i64,
}

struct SessionPartition {
    target: FetchTarget,
    /// The partition's position in the order in which the session's partitions are served.
    position: u64,
    status: Option<PartitionStatus>,
}

struct Session {
    next_epoch: i32,
    by_id: bool,
    partitions: HashMap<Key, SessionPartition>,
    order: BTreeMap<u64, Key>,
    next_position: u64,
    used_at: Instant,
}

impl Session {
    fn set(&mut self, target: FetchTarget) {
        if let Some(entry) = self.partitions.get_mut(&target.key) {
            entry.target = target;
            return;
        }
        let position = self.next_position;
        self.next_position += 1;
        self.order.insert(position, target.key.clone());
        self.partitions
            .insert(target.key.clone(), SessionPartition { target, position, status: None });
    }

    fn forget(&mut self, key: &Key) {
        if let Some(entry) = self.partitions.remove(key) {
            self.order.remove(&entry.position);
        }
    }

    fn targets(&self) -> Vec<FetchTarget> {
        self.order.values().map(|key| self.partitions[key].target.clone()).collect()
    }
}

/// A fetch request, resolved against its session.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fetch {
    /// The partitions to read, in this order.
    pub(crate) targets: Vec<FetchTarget>,
    /// The session ID for the response; 0 for none.
    pub(crate) session_id: i32,
    /// Whether the response holds only changed partitions.
    pub(crate) incremental: bool,
}

#[derive(Default)]
struct Cache {
    sessions: HashMap<i32, Session>,
    partitions: usize,
}

impl Cache {
    fn remove(&mut self, id: i32) -> Option<Session> {
        let session = self.sessions.remove(&id)?;
        self.partitions -= session.partitions.len();
        Some(session)
    }

    /// Makes space for a session of `partitions` by evicting sessions that were not used recently.
    /// Returns whether that succeeded.
    fn evict_for(&mut self, partitions: usize, now: Instant) -> bool {
        while self.sessions.len() >= MAX_SESSIONS
            || self.partitions + partitions > MAX_SESSION_PARTITIONS
        {
            let oldest = self.sessions.iter().min_by_key(|(_, session)| session.used_at);
            match oldest {
                Some((&id, session)) if now.duration_since(session.used_at) >= EVICTION_AGE => {
                    self.remove(id)
                }
                _ => return false,
            };
        }
        true
    }
}

/// All fetch sessions.
#[derive(Default)]
pub(crate) struct Sessions {
    cache: Mutex<Cache>,
}

impl Sessions {
    /// Resolves a request to its partitions and its session.
    ///
    /// # Errors
    /// The session does not exist, or the epoch is not its next one; the client then begins a new
    /// session.
    pub(crate) fn begin(
        &self,
        request: &FetchRequest,
        version: i16,
        now: Instant,
    ) -> Result<Fetch, ApiError> {
        let by_id = version >= 13;
        if request.session_epoch == FINAL_EPOCH || request.session_epoch == INITIAL_EPOCH {
            let mut cache = self.cache.lock();
            if request.session_id != NO_SESSION {
                cache.remove(request.session_id);
            }
            let targets = request.topics.iter().flat_map(|topic| targets(topic, by_id));
            let targets: Vec<FetchTarget> = once(targets, |target| target.key.clone()).collect();
            let mut session_id = NO_SESSION;
            if request.session_epoch == INITIAL_EPOCH
                && version >= 7
                && targets.iter().all(|target| target.key.has_valid_name())
                && cache.evict_for(targets.len(), now)
            {
                session_id = new_id(&cache.sessions);
                let mut session = Session {
                    next_epoch: 1,
                    by_id,
                    partitions: HashMap::with_capacity(targets.len()),
                    order: BTreeMap::new(),
                    next_position: 0,
                    used_at: now,
                };
                targets.iter().cloned().for_each(|target| session.set(target));
                cache.partitions += session.partitions.len();
                cache.sessions.insert(session_id, session);
            }
            return Ok(Fetch { targets, session_id, incremental: false });
        }

        let mut cache = self.cache.lock();
        let cache = &mut *cache;
        let session =
            cache.sessions.get_mut(&request.session_id).ok_or(ApiError::FetchSessionNotFound)?;
        if session.by_id != by_id {
            return Err(ApiError::FetchSessionTopicId);
        }
        if session.next_epoch != request.session_epoch {
            return Err(ApiError::InvalidFetchSessionEpoch {
                got: request.session_epoch,
                expected: session.next_epoch,
            });
        }
        let before = session.partitions.len();
        for target in request.topics.iter().flat_map(|topic| targets(topic, by_id)) {
            if session.partitions.contains_key(&target.key)
                || (target.key.has_valid_name()
                    && cache.partitions + session.partitions.len() - before
                        < MAX_SESSION_PARTITIONS)
            {
                session.set(target);
            } else {
                // The client begins a new session, or goes on without one if there is no space.
                let id = request.session_id;
                cache.partitions += session.partitions.len() - before;
                cache.remove(id);
                return Err(ApiError::FetchSessionNotFound);
            }
        }
        for key in request.forgotten_topics_data.iter().flat_map(|topic| forgotten(topic, by_id)) {
            session.forget(&key);
        }
        cache.partitions = cache.partitions + session.partitions.len() - before;
        if session.partitions.is_empty() {
            // As in Kafka, an empty session ends.
            cache.remove(request.session_id);
            return Ok(Fetch { targets: Vec::new(), session_id: NO_SESSION, incremental: false });
        }
        session.next_epoch = session.next_epoch.checked_add(1).unwrap_or(1);
        session.used_at = now;
        Ok(Fetch { targets: session.targets(), session_id: request.session_id, incremental: true })
    }

    /// Removes a session.
    pub(crate) fn forget(&self, session_id: i32) {
        self.cache.lock().remove(session_id);
    }

    /// Records the response of each partition, and returns for each whether an incremental response
    /// must contain it. A partition with records moves to the end of the session's order, so that a
    /// size limit starves none.
    pub(crate) fn finish<'a>(
        &self,
        session_id: i32,
        answers: impl IntoIterator<Item = (&'a Key, PartitionStatus, bool)>,
    ) -> Vec<bool> {
        let mut cache = self.cache.lock();
        let mut session = cache.sessions.get_mut(&session_id);
        let decide = |(key, status, has_records): (&Key, PartitionStatus, bool)| {
            let Some(session) = session.as_mut() else { return true };
            let next_position = session.next_position;
            let Some(entry) = session.partitions.get_mut(key) else { return true };
            let changed = entry.status != Some(status);
            // After an error, the next response contains the partition in any case.
            entry.status = (status.error_code == 0).then_some(status);
            if has_records {
                let position = std::mem::replace(&mut entry.position, next_position);
                session.next_position += 1;
                session.order.remove(&position);
                session.order.insert(next_position, key.clone());
            }
            changed || has_records
        };
        answers.into_iter().map(decide).collect()
    }
}

/// A random positive ID that no session has.
fn new_id(sessions: &HashMap<i32, Session>) -> i32 {
    loop {
        let id = (uuid::Uuid::new_v4().as_u128() as i32) & i32::MAX;
        if id != NO_SESSION && !sessions.contains_key(&id) {
            return id;
        }
    }
}

fn topic_ref(name: &str, id: uuid::Uuid, by_id: bool) -> TopicRef {
    if by_id { TopicRef::Id(id) } else { TopicRef::Name(Arc::from(cut_name(name))) }
}

fn targets(topic: &FetchTopic, by_id: bool) -> impl Iterator<Item = FetchTarget> {
    let topic_ref = topic_ref(&topic.topic, topic.topic_id, by_id);
    topic.partitions.iter().map(move |partition: &FetchPartition| FetchTarget {
        key: Key { topic: topic_ref.clone(), partition: partition.partition },
        offset: partition.fetch_offset,
        max_bytes: partition.partition_max_bytes,
        leader_epoch: partition.current_leader_epoch,
    })
}

fn forgotten(topic: &ForgottenTopic, by_id: bool) -> impl Iterator<Item = Key> {
    let topic_ref = topic_ref(&topic.topic, topic.topic_id, by_id);
    topic
        .partitions
        .iter()
        .map(move |partition| Key { topic: topic_ref.clone(), partition: *partition })
}

#[cfg(test)]
mod tests {
    use kafka_protocol::ResponseError;

    use super::*;

    fn request(session_id: i32, epoch: i32, partitions: &[(i32, i64)]) -> FetchRequest {
        let partitions = partitions.iter().map(|(partition, offset)| {
            FetchPartition::default()
                .with_partition(*partition)
                .with_fetch_offset(*offset)
                .with_partition_max_bytes(100)
        });
        let topic = FetchTopic::default()
            .with_topic(kafka_protocol::protocol::StrBytes::from_static_str("t").into())
            .with_partitions(partitions.collect());
        FetchRequest::default()
            .with_session_id(session_id)
            .with_session_epoch(epoch)
            .with_topics(vec![topic])
    }

    fn offsets(fetch: &Fetch) -> Vec<(i32, i64)> {
        fetch.targets.iter().map(|target| (target.key.partition, target.offset)).collect()
    }

    /// A request that removes these partitions.
    fn forgetting(session_id: i32, epoch: i32, partitions: Vec<i32>) -> FetchRequest {
        let topic = ForgottenTopic::default()
            .with_topic(kafka_protocol::protocol::StrBytes::from_static_str("t").into())
            .with_partitions(partitions);
        request(session_id, epoch, &[]).with_forgotten_topics_data(vec![topic])
    }

    fn status(high_watermark: i64) -> PartitionStatus {
        PartitionStatus {
            error_code: 0,
            high_watermark,
            last_stable_offset: high_watermark,
            log_start: 0,
        }
    }

    #[test]
    fn a_session_keeps_updates_and_drops_partitions() {
        let sessions = Sessions::default();
        let now = Instant::now();
        let full = sessions.begin(&request(0, 0, &[(0, 5), (1, 6)]), 12, now).unwrap();
        assert!(!full.incremental && full.session_id > 0);
        let id = full.session_id;

        let fetch = sessions.begin(&request(id, 1, &[(1, 7), (2, 8)]), 12, now).unwrap();
        assert!(fetch.incremental);
        assert_eq!(offsets(&fetch), [(0, 5), (1, 7), (2, 8)]);

        let forget = forgetting(id, 2, vec![0, 9]);
        assert_eq!(offsets(&sessions.begin(&forget, 12, now).unwrap()), [(1, 7), (2, 8)]);
        assert_eq!(sessions.cache.lock().partitions, 2);

        // A final fetch ends the session.
        let last = sessions.begin(&request(id, -1, &[(0, 1)]), 12, now).unwrap();
        assert_eq!((last.session_id, last.incremental), (0, false));
        assert_eq!(sessions.cache.lock().partitions, 0);
        assert_eq!(
            sessions.begin(&request(id, 3, &[]), 12, now).unwrap_err().kind(),
            ResponseError::FetchSessionIdNotFound
        );
    }

    #[test]
    fn a_session_ends_with_its_last_partition() {
        let (sessions, now) = (Sessions::default(), Instant::now());
        let id = sessions.begin(&request(0, 0, &[(0, 5)]), 12, now).unwrap().session_id;
        let last = sessions.begin(&forgetting(id, 1, vec![0]), 12, now).unwrap();
        assert_eq!((last.session_id, last.incremental, last.targets.len()), (0, false, 0));
        assert_eq!(sessions.cache.lock().sessions.len(), 0);
        assert_eq!(
            sessions.begin(&request(id, 2, &[]), 12, now).unwrap_err().kind(),
            ResponseError::FetchSessionIdNotFound
        );
    }

    #[test]
    fn wrong_epochs_and_ids_are_refused_and_change_nothing() {
        let sessions = Sessions::default();
        let now = Instant::now();
        let id = sessions.begin(&request(0, 0, &[(0, 5)]), 12, now).unwrap().session_id;
        for epoch in [2, 5, -7] {
            assert_eq!(
                sessions.begin(&request(id, epoch, &[]), 12, now).unwrap_err().kind(),
                ResponseError::InvalidFetchSessionEpoch,
                "{epoch}"
            );
        }
        assert_eq!(
            sessions.begin(&request(id, 1, &[]), 13, now).unwrap_err().kind(),
            ResponseError::FetchSessionTopicIdError
        );
        assert_eq!(
            sessions.begin(&request(id ^ 1, 1, &[]), 12, now).unwrap_err().kind(),
            ResponseError::FetchSessionIdNotFound
        );
        assert!(sessions.begin(&request(id, 1, &[]), 12, now).is_ok());
        assert_eq!(
            sessions.begin(&request(id, 1, &[]), 12, now).unwrap_err().kind(),
            ResponseError::InvalidFetchSessionEpoch,
            "the epoch is used up"
        );
    }

    #[test]
    fn an_incremental_response_holds_changes_and_records_move_to_the_end() {
        let sessions = Sessions::default();
        let now = Instant::now();
        let id = sessions.begin(&request(0, 0, &[(0, 0), (1, 0)]), 12, now).unwrap().session_id;
        let fetch = sessions.begin(&request(id, 1, &[]), 12, now).unwrap();
        let keys: Vec<Key> = fetch.targets.into_iter().map(|target| target.key).collect();
        assert_eq!(
            sessions.finish(id, [(&keys[0], status(1), true), (&keys[1], status(0), false)]),
            [true, true]
        );
        assert_eq!(
            sessions.finish(id, [(&keys[0], status(1), false), (&keys[1], status(0), false)]),
            [false, false]
        );
        assert_eq!(
            sessions.finish(id, [(&keys[0], status(2), false), (&keys[1], status(0), false)]),
            [true, false]
        );
        let error = PartitionStatus {
            error_code: ResponseError::OffsetOutOfRange.code(),
            high_watermark: -1,
            last_stable_offset: -1,
            log_start: -1,
        };
        for _ in 0..2 {
            assert_eq!(sessions.finish(id, [(&keys[0], error, false)]), [true]);
        }
        let fetch = sessions.begin(&request(id, 2, &[]), 12, now).unwrap();
        assert_eq!(offsets(&fetch), [(1, 0), (0, 0)]);
    }

    #[test]
    fn sessions_are_limited_and_old_ones_are_evicted() {
        let sessions = Sessions::default();
        let now = Instant::now();
        for _ in 0..MAX_SESSIONS {
            assert_ne!(sessions.begin(&request(0, 0, &[(0, 0)]), 12, now).unwrap().session_id, 0);
        }
        let begin = |at| sessions.begin(&request(0, 0, &[(0, 0)]), 12, at).unwrap().session_id;
        assert_eq!(begin(now + EVICTION_AGE / 2), 0, "no space: served without a session");
        assert_ne!(begin(now + EVICTION_AGE), 0);
        assert_eq!(sessions.cache.lock().sessions.len(), MAX_SESSIONS);
    }

    /// Else the limit on partitions would not limit memory.
    #[test]
    fn impossible_topic_names_are_not_kept_in_sessions() {
        let sessions = Sessions::default();
        let now = Instant::now();
        let long = |mut request: FetchRequest| {
            let name = "x".repeat(MAX_NAME_BYTES + 1);
            request.topics[0].topic = kafka_protocol::protocol::StrBytes::from_string(name).into();
            request
        };
        let fetch = sessions.begin(&long(request(0, 0, &[(0, 3)])), 12, now).unwrap();
        assert_eq!(
            (fetch.session_id, fetch.targets.len()),
            (0, 1),
            "served, but without a session"
        );

        let id = sessions.begin(&request(0, 0, &[(0, 3)]), 12, now).unwrap().session_id;
        let added = sessions.begin(&long(request(id, 1, &[(1, 3)])), 12, now);
        assert_eq!(added.unwrap_err().kind(), ResponseError::FetchSessionIdNotFound);
        assert_eq!(sessions.cache.lock().partitions, 0);
    }

    #[test]
    fn old_versions_have_no_sessions() {
        let sessions = Sessions::default();
        let fetch = sessions.begin(&request(0, -1, &[(0, 3)]), 6, Instant::now()).unwrap();
        assert_eq!((fetch.session_id, offsets(&fetch)), (0, vec![(0, 3)]));
    }
}
