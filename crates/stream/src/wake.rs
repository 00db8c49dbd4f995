//! Wakes waiters: readers for more durable data, writers for space. A single task does it; it waits
//! for events of the WAL and never polls.

pub(crate) mod task;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use alluvium_wal::{LogOffset, Space};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use crate::tail::StreamState;
use crate::types::StreamId;

/// Lets writers wait for space without losing a wake-up.
///
/// Each event that may have freed space starts a new generation. An append reads the generation
/// **before** it tries and, when it fails, records that a later one is needed. So the wait sees an
/// event between the failure and the wait. The code that makes an append fail must ensure a later
/// event: for the log cache and the ring that is the upload it requests, for the window it is
/// [`Wakes::wait_for_wal`].
pub(crate) struct SpaceGate {
    generation: watch::Sender<u64>,
    /// The least generation in which a retry makes sense.
    needed: AtomicU64,
}

impl SpaceGate {
    pub(crate) fn new() -> Self {
        Self { generation: watch::Sender::new(0), needed: AtomicU64::new(0) }
    }

    pub(crate) fn generation(&self) -> u64 {
        *self.generation.borrow()
    }

    /// Records that an append which began in generation `seen` found no space.
    pub(crate) fn full(&self, seen: u64) {
        self.needed.fetch_max(seen.saturating_add(1), Ordering::AcqRel);
    }

    /// Wakes writers: space may be free.
    pub(crate) fn open(&self) {
        self.generation.send_modify(|generation| *generation = generation.saturating_add(1));
    }

    /// Wakes writers, and makes all later waits return at once.
    pub(crate) fn open_forever(&self) {
        self.generation.send_replace(u64::MAX);
    }

    pub(crate) async fn wait(&self) {
        self.wait_for(self.needed.load(Ordering::Acquire)).await;
    }

    /// Waits for an event after generation `seen`.
    pub(crate) async fn wait_after(&self, seen: u64) {
        self.wait_for(seen.saturating_add(1)).await;
    }

    async fn wait_for(&self, needed: u64) {
        let mut generation = self.generation.subscribe();
        generation
            .wait_for(|generation| *generation >= needed)
            .await
            .expect("the sender is borrowed from self");
    }
}

/// What the waking task waits for.
pub(crate) struct Wakes {
    /// Watched streams with batches that are not durable, by the log offset at which the next one
    /// becomes durable. Locked while a tail is, never the other way round.
    queue: Mutex<BTreeMap<(LogOffset, StreamId), Arc<StreamState>>>,
    wal_space: Mutex<WalSpace>,
    changed: Notify,
}

#[derive(Default)]
struct WalSpace {
    /// A writer waits for the WAL, and [`SpaceGate::open`] will be called for it.
    waiting: bool,
    future: Option<Space>,
}

impl Wakes {
    pub(crate) fn new() -> Self {
        Self { queue: Mutex::default(), wal_space: Mutex::default(), changed: Notify::new() }
    }

    /// Registers `stream`: its watchers are woken when the log is durable up to `at`.
    pub(crate) fn queue(&self, at: LogOffset, stream: Arc<StreamState>) {
        let mut queue = self.queue.lock();
        let key = (at, stream.id);
        queue.insert(key, stream);
        if queue.first_key_value().is_some_and(|(first, _)| *first == key) {
            self.changed.notify_one();
        }
    }

    /// Opens the gate when the WAL has more space. The future was created before the append that
    /// failed.
    pub(crate) fn wait_for_wal(&self, future: Space) {
        let mut space = self.wal_space.lock();
        if !space.waiting {
            *space = WalSpace { waiting: true, future: Some(future) };
            self.changed.notify_one();
        }
    }

    fn first(&self) -> Option<LogOffset> {
        self.queue.lock().first_key_value().map(|((at, _), _)| *at)
    }

    fn take_durable(&self, durable: LogOffset) -> Vec<Arc<StreamState>> {
        let mut queue = self.queue.lock();
        let mut taken = Vec::new();
        while let Some(first) = queue.first_entry().filter(|first| first.key().0 <= durable) {
            taken.push(first.remove());
        }
        taken
    }
}

/// Notifies the watchers. The caller must not hold a lock.
pub(crate) fn notify(watchers: &[Arc<Notify>]) {
    watchers.iter().for_each(|watcher| watcher.notify_one());
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn an_event_between_the_failure_and_the_wait_is_seen() {
        let gate = SpaceGate::new();
        assert!(gate.wait().now_or_never().is_some(), "no writer was refused");
        let seen = gate.generation();
        gate.full(seen);
        assert!(gate.wait().now_or_never().is_none());
        gate.open();
        assert!(gate.wait().now_or_never().is_some());

        // The event comes after the attempt has begun and before its failure is recorded.
        let seen = gate.generation();
        gate.open();
        gate.full(seen);
        assert!(gate.wait().now_or_never().is_some());

        gate.full(gate.generation());
        gate.open_forever();
        gate.full(gate.generation());
        assert!(gate.wait().now_or_never().is_some(), "after a failure no writer waits");
    }
}
