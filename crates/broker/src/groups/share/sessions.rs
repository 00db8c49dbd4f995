//! Share sessions: the partitions that a member fetches, so that its requests contain only changes.
//! One per member and group.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicI64;

use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;

use super::table::TopicPartition;
use crate::errors::ApiError;

/// Maximum number of sessions (`group.share.max.share.sessions`).
const MAX_SESSIONS: usize = 2_000;

/// Maximum number of partitions in all sessions together. One session has no more than exist.
const MAX_SESSION_PARTITIONS: usize = 500_000;

const INITIAL_EPOCH: i32 = 0;
const FINAL_EPOCH: i32 = -1;

/// The owner of a session.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ShareSession {
    pub(crate) group: Arc<str>,
    pub(crate) member: Arc<str>,
}

/// The effect of a request on its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Begun,
    GoesOn,
    /// The session has ended; its records are released.
    Ended,
}

struct Session {
    next_epoch: i32,
    /// In the order in which they are served.
    partitions: Vec<TopicPartition>,
    /// The connection on which it was begun.
    connection: usize,
}

#[derive(Default)]
struct Cache {
    /// The number of sessions.
    open: Gauge<i64, AtomicI64>,
    sessions: HashMap<ShareSession, Session>,
    /// Sessions by connection.
    connections: HashMap<usize, HashSet<ShareSession>>,
    partitions: usize,
}

impl Cache {
    fn remove(&mut self, key: &ShareSession) -> bool {
        let Some(session) = self.sessions.remove(key) else { return false };
        self.open.dec();
        self.partitions -= session.partitions.len();
        if let Some(of_connection) = self.connections.get_mut(&session.connection) {
            of_connection.remove(key);
            if of_connection.is_empty() {
                self.connections.remove(&session.connection);
            }
        }
        true
    }

    /// Continues a session.
    fn go_on(&mut self, key: &ShareSession, epoch: i32) -> Result<&mut Session, ApiError> {
        let session = self.sessions.get_mut(key).ok_or(ApiError::ShareSessionNotFound)?;
        if session.next_epoch != epoch {
            let expected = session.next_epoch;
            return Err(ApiError::InvalidShareSessionEpoch { got: epoch, expected });
        }
        session.next_epoch = session.next_epoch.checked_add(1).unwrap_or(1);
        Ok(session)
    }

    fn end(&mut self, key: &ShareSession) -> Result<Step, ApiError> {
        if self.remove(key) { Ok(Step::Ended) } else { Err(ApiError::ShareSessionNotFound) }
    }
}

/// All share sessions.
pub(crate) struct ShareSessions {
    cache: Mutex<Cache>,
    /// The number of sessions.
    pub(crate) open: Gauge<i64, AtomicI64>,
}

impl Default for ShareSessions {
    fn default() -> Self {
        let cache = Cache::default();
        Self { open: cache.open.clone(), cache: Mutex::new(cache) }
    }
}

impl ShareSessions {
    /// Applies a ShareFetch. Returns its effect and the partitions to read, in this order.
    ///
    /// # Errors
    /// A session that does not exist, or an epoch that is not its next one: the member has to begin
    /// a new session. Too many sessions.
    pub(crate) fn fetch(
        &self,
        key: &ShareSession,
        epoch: i32,
        connection: usize,
        added: &[TopicPartition],
        forgotten: &[TopicPartition],
    ) -> Result<(Step, Vec<TopicPartition>), ApiError> {
        let cache = &mut *self.cache.lock();
        if epoch == FINAL_EPOCH {
            return Ok((cache.end(key)?, Vec::new()));
        }
        let mut step = Step::GoesOn;
        if epoch == INITIAL_EPOCH {
            cache.remove(key);
            if cache.sessions.len() >= MAX_SESSIONS {
                return Err(ApiError::ShareSessionLimit(MAX_SESSIONS));
            }
            let session = Session { next_epoch: 0, partitions: Vec::new(), connection };
            cache.sessions.insert(key.clone(), session);
            cache.open.inc();
            cache.connections.entry(connection).or_default().insert(key.clone());
            step = Step::Begun;
        }
        let session = cache.go_on(key, epoch)?;
        let before = session.partitions.len();
        let mut known: HashSet<TopicPartition> = session.partitions.iter().copied().collect();
        session.partitions.extend(added.iter().filter(|added| known.insert(**added)));
        if !forgotten.is_empty() {
            let forgotten: HashSet<_> = forgotten.iter().copied().collect();
            session.partitions.retain(|partition| !forgotten.contains(partition));
        }
        let partitions = session.partitions.clone();
        cache.partitions = cache.partitions + partitions.len() - before;
        if cache.partitions > MAX_SESSION_PARTITIONS {
            cache.remove(key);
            return Err(ApiError::ShareSessionLimit(MAX_SESSIONS));
        }
        Ok((step, partitions))
    }

    /// Removes partitions that do not exist any more.
    pub(crate) fn forget(&self, key: &ShareSession, gone: &[TopicPartition]) {
        let cache = &mut *self.cache.lock();
        let Some(session) = cache.sessions.get_mut(key) else { return };
        let before = session.partitions.len();
        let gone: HashSet<_> = gone.iter().collect();
        session.partitions.retain(|partition| !gone.contains(partition));
        cache.partitions -= before - session.partitions.len();
    }

    /// The number of partitions in all sessions.
    #[cfg(test)]
    pub(crate) fn partitions(&self) -> usize {
        self.cache.lock().partitions
    }

    /// Applies a ShareAcknowledge.
    ///
    /// # Errors
    /// As for [`Self::fetch`]; it cannot begin a session.
    pub(crate) fn acknowledge(&self, key: &ShareSession, epoch: i32) -> Result<Step, ApiError> {
        let mut cache = self.cache.lock();
        match epoch {
            FINAL_EPOCH => cache.end(key),
            INITIAL_EPOCH => Err(ApiError::InvalidShareSessionEpoch { got: epoch, expected: 1 }),
            epoch => cache.go_on(key, epoch).map(|_| Step::GoesOn),
        }
    }

    /// Whether the session exists.
    pub(crate) fn is_open(&self, key: &ShareSession) -> bool {
        self.cache.lock().sessions.contains_key(key)
    }

    /// Moves partitions that have delivered records to the end, so that others come first next
    /// time.
    pub(crate) fn served(&self, key: &ShareSession, served: &[TopicPartition]) {
        let mut cache = self.cache.lock();
        let Some(session) = cache.sessions.get_mut(key) else { return };
        let served: HashSet<_> = served.iter().collect();
        // Stable: their relative order does not change.
        session.partitions.sort_by_key(|partition| served.contains(partition));
    }

    /// Ends a session, if there is one.
    pub(super) fn end(&self, group: &str, member: &str) {
        let key = ShareSession { group: group.into(), member: member.into() };
        self.cache.lock().remove(&key);
    }

    /// Ends the sessions that were begun on a connection, and returns their owners.
    pub(super) fn end_all_of(&self, connection: usize) -> Vec<ShareSession> {
        let mut cache = self.cache.lock();
        let sessions = cache.connections.remove(&connection).unwrap_or_default();
        for key in &sessions {
            cache.remove(key);
        }
        sessions.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use kafka_protocol::ResponseError;
    use uuid::Uuid;

    use super::*;

    fn key(member: &str) -> ShareSession {
        ShareSession { group: "g".into(), member: member.into() }
    }

    fn at(partition: i32) -> TopicPartition {
        (Uuid::from_u128(1), partition)
    }

    #[test]
    fn a_session_keeps_its_partitions_and_rotates_them() {
        let sessions = ShareSessions::default();
        let (a, connection) = (key("a"), 7);
        let fetch = |epoch, added: &[i32], forgotten: &[i32]| {
            let of = |partitions: &[i32]| partitions.iter().map(|p| at(*p)).collect::<Vec<_>>();
            let fetched = sessions.fetch(&a, epoch, connection, &of(added), &of(forgotten));
            fetched.map(|(step, all)| (step, all.into_iter().map(|(_, p)| p).collect::<Vec<_>>()))
        };
        assert_eq!(fetch(1, &[0], &[]).unwrap_err().kind(), ResponseError::ShareSessionNotFound);
        assert_eq!(fetch(0, &[0, 1, 1], &[]).unwrap(), (Step::Begun, vec![0, 1]));
        assert_eq!(fetch(1, &[2], &[0]).unwrap(), (Step::GoesOn, vec![1, 2]));
        assert_eq!(fetch(1, &[], &[]).unwrap_err().kind(), ResponseError::InvalidShareSessionEpoch);
        sessions.served(&a, &[at(1)]);
        assert_eq!(fetch(2, &[], &[]).unwrap(), (Step::GoesOn, vec![2, 1]));
        sessions.forget(&a, &[at(1), at(9)]);
        assert_eq!(sessions.partitions(), 1);
        assert_eq!(
            sessions.acknowledge(&a, 0).unwrap_err().kind(),
            ResponseError::InvalidShareSessionEpoch
        );
        assert_eq!(sessions.acknowledge(&a, 3).unwrap(), Step::GoesOn);
        assert_eq!(fetch(-1, &[], &[]).unwrap(), (Step::Ended, vec![]));
        assert_eq!(fetch(-1, &[], &[]).unwrap_err().kind(), ResponseError::ShareSessionNotFound);
        assert_eq!(sessions.partitions(), 0);
        assert!(sessions.cache.lock().connections.is_empty());
    }

    #[test]
    fn sessions_are_bounded_and_end_with_their_connection() {
        let sessions = ShareSessions::default();
        for member in 0..MAX_SESSIONS {
            let fetched = sessions.fetch(&key(&member.to_string()), 0, member % 2, &[at(0)], &[]);
            assert_eq!(fetched.unwrap().0, Step::Begun);
        }
        assert_eq!(
            sessions.fetch(&key("x"), 0, 0, &[at(0)], &[]).unwrap_err().kind(),
            ResponseError::ShareSessionLimitReached
        );
        assert_eq!(sessions.fetch(&key("5"), 0, 1, &[at(0)], &[]).unwrap().0, Step::Begun);
        assert_eq!(sessions.end_all_of(1).len(), MAX_SESSIONS / 2);
        assert_eq!(sessions.open.get(), MAX_SESSIONS as i64 / 2);
        assert_eq!(
            sessions.acknowledge(&key("5"), 1).unwrap_err().kind(),
            ResponseError::ShareSessionNotFound
        );
        assert_eq!(sessions.fetch(&key("x"), 0, 0, &[at(0)], &[]).unwrap().0, Step::Begun);
    }
}
