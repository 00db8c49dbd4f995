//! Shared reads ("single flight"): what several readers want at the same time is fetched once.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::background::Background;

/// Fetches in flight, by the keys that they fetch; one may fetch several.
///
/// A fetch is a task that runs as long as there is a [`Flight`] of it: a reader that leaves does
/// not affect the others, and the task is cancelled when the last one leaves.
pub(super) struct Flights<K, T> {
    under_way: Arc<Mutex<UnderWay<K, T>>>,
    background: Arc<Background>,
}

pub(super) struct UnderWay<K, T> {
    by_key: HashMap<K, Known<T>>,
    next_number: u64,
}

struct Known<T> {
    number: u64,
    /// For joining; dead once there is no flight of it.
    task: Weak<Task>,
    result: watch::Receiver<Option<T>>,
}

/// Cancels the task when it is dropped.
struct Task(AbortHandle);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A reader's share of a fetch in flight.
#[derive(Clone)]
pub(crate) struct Flight<T> {
    task: Arc<Task>,
    result: watch::Receiver<Option<T>>,
}

impl<T: Clone> Flight<T> {
    /// Waits for the result; `None` if the task has panicked or the runtime ends.
    pub(super) async fn result(&mut self) -> Option<T> {
        self.result.wait_for(Option::is_some).await.ok().and_then(|result| result.clone())
    }

    /// Returns a handle that keeps the fetch running, without interest in the result.
    pub(crate) fn guard(&self) -> FlightGuard {
        FlightGuard { _task: self.task.clone() }
    }
}

/// Keeps a [`Flight`] running, without keeping its result in memory.
pub(crate) struct FlightGuard {
    _task: Arc<Task>,
}

impl<K: Copy + Eq + Hash + Send + 'static, T: Clone + Send + Sync + 'static> Flights<K, T> {
    /// Creates an empty set; fetches run in the background.
    pub(super) fn new(background: Arc<Background>) -> Self {
        let under_way = UnderWay { by_key: HashMap::new(), next_number: 0 };
        Self { under_way: Arc::new(Mutex::new(under_way)), background }
    }

    /// Locks the set. While it is locked, no fetch starts or completes: a key that is neither here
    /// nor in the cache is nowhere.
    pub(super) fn lock(&self) -> MutexGuard<'_, UnderWay<K, T>> {
        self.under_way.lock()
    }

    /// Starts a fetch of `keys`. It is removed when `fetch` is done, so by then `fetch` must have
    /// put into a cache whatever is to be found later.
    pub(super) fn start(
        &self,
        under_way: &mut UnderWay<K, T>,
        keys: Vec<K>,
        fetch: impl Future<Output = T> + Send + 'static,
    ) -> Flight<T> {
        let number = under_way.next_number;
        under_way.next_number += 1;
        let (sender, result) = watch::channel(None);
        let started = Arc::new(AtomicBool::new(false));
        let forget = Forget {
            under_way: self.under_way.clone(),
            keys: keys.clone(),
            number,
            started: started.clone(),
            starter: thread::current().id(),
        };
        let task = self.background.spawn(async move {
            let fetched = fetch.await;
            drop(forget);
            let _ = sender.send(Some(fetched));
        });
        let task = Arc::new(Task(task.abort_handle()));
        for key in keys {
            let known = Known { number, task: Arc::downgrade(&task), result: result.clone() };
            under_way.by_key.insert(key, known);
        }
        started.store(true, Ordering::Release);
        Flight { task, result }
    }
}

impl<K: Copy + Eq + Hash, T: Clone> UnderWay<K, T> {
    /// Joins the fetch of `key`, if there is one.
    pub(super) fn join(&self, key: &K) -> Option<Flight<T>> {
        let known = self.by_key.get(key)?;
        Some(Flight { task: known.task.upgrade()?, result: known.result.clone() })
    }

    /// Whether there is a fetch of `key`.
    pub(super) fn has(&self, key: &K) -> bool {
        self.by_key.get(key).is_some_and(|known| known.task.strong_count() > 0)
    }
}

/// Removes a fetch when it has completed or was cancelled.
struct Forget<K: Copy + Eq + Hash, T> {
    under_way: Arc<Mutex<UnderWay<K, T>>>,
    keys: Vec<K>,
    number: u64,
    /// Set when [`Flights::start`] is done.
    started: Arc<AtomicBool>,
    starter: thread::ThreadId,
}

impl<K: Copy + Eq + Hash, T> Drop for Forget<K, T> {
    fn drop(&mut self) {
        // A runtime that shuts down drops a task within the call that spawns it, where this thread
        // holds the lock. There is nothing to remove then.
        if !self.started.load(Ordering::Acquire) && thread::current().id() == self.starter {
            return;
        }
        let mut under_way = self.under_way.lock();
        for key in &self.keys {
            // Another fetch may have started after this one was cancelled.
            if under_way.by_key.get(key).is_some_and(|known| known.number == self.number) {
                under_way.by_key.remove(key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    type Test = Flights<u32, u32>;

    fn start(flights: &Test, keys: &[u32]) -> (Flight<u32>, oneshot::Sender<u32>) {
        let (complete, completed) = oneshot::channel();
        let mut under_way = flights.lock();
        let fetch = async move { completed.await.unwrap() };
        (flights.start(&mut under_way, keys.to_vec(), fetch), complete)
    }

    #[tokio::test]
    async fn all_readers_get_the_result_of_one_fetch() {
        let flights = Test::new(Arc::new(Background::start(0).unwrap()));
        let (mut first, complete) = start(&flights, &[1, 2]);
        let mut second = flights.lock().join(&2).unwrap();
        assert!(flights.lock().join(&3).is_none());
        complete.send(7).unwrap();
        assert_eq!((first.result().await, second.result().await), (Some(7), Some(7)));
        assert!(flights.lock().by_key.is_empty(), "removed before the result is sent");
    }

    #[tokio::test]
    async fn a_fetch_is_cancelled_with_its_last_reader() {
        let flights = Test::new(Arc::new(Background::start(0).unwrap()));
        let (first, mut complete) = start(&flights, &[1]);
        let mut second = flights.lock().join(&1).unwrap();
        drop(first);
        tokio::task::yield_now().await;
        assert!(!complete.is_closed());
        let guard = second.guard();
        drop(second);
        tokio::task::yield_now().await;
        assert!(!complete.is_closed(), "a guard keeps it running");
        second = flights.lock().join(&1).unwrap();
        drop(guard);
        drop(second);
        assert!(flights.lock().join(&1).is_none(), "another one may start now");
        let (mut other, complete_other) = start(&flights, &[1]);
        complete.closed().await;
        assert!(flights.lock().has(&1), "the end of one does not remove the other");
        complete_other.send(8).unwrap();
        assert_eq!(other.result().await, Some(8));
    }

    #[tokio::test]
    async fn a_panic_wakes_the_readers() {
        let flights = Test::new(Arc::new(Background::start(0).unwrap()));
        let defect = async { panic!("a defect") };
        let mut flight = flights.start(&mut flights.lock(), vec![1], defect);
        assert_eq!(flight.result().await, None);
        assert!(!flights.lock().has(&1));
    }
}
