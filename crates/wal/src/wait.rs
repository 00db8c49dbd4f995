//! Monotonic numbers, and waiting for them: no timer, no task and no allocation per waiter.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::thread::{self, Thread};
use crate::sync::{Mutex, thread_local};

/// A number that only grows, with the wakers of those that wait for it to reach a value.
#[derive(Debug)]
pub(crate) struct Watermark {
    value: AtomicU64,
    waiters: Mutex<Waiters>,
}

/// Waiters sorted by (target, id). They arrive nearly in order, so that the insertion point is
/// found near the back; reached ones are removed at the front. A dropped future leaves an empty
/// entry, and these never outnumber the others by more than a few, so memory is bounded by the
/// futures alive.
#[derive(Debug, Default)]
struct Waiters {
    queue: VecDeque<Waiter>,
    abandoned: usize,
    next_id: u64,
}

#[derive(Debug)]
struct Waiter {
    target: u64,
    id: u64,
    /// `None` once abandoned.
    waker: Option<Waker>,
}

/// Number of abandoned entries below which no clean-up is done.
const ABANDONED_KEPT: usize = 64;

impl Waiters {
    fn position(&self, target: u64, id: u64) -> Result<usize, usize> {
        self.queue.binary_search_by_key(&(target, id), |waiter| (waiter.target, waiter.id))
    }

    /// Adds or updates a waiter. Also returns the waker that is no longer needed, to be dropped
    /// outside the lock.
    fn register(&mut self, target: u64, id: Option<u64>, waker: Waker) -> (u64, Option<Waker>) {
        if let Some(id) = id
            && let Ok(at) = self.position(target, id)
        {
            return (id, self.queue[at].waker.replace(waker));
        }
        let id = self.next_id;
        self.next_id += 1;
        let waiter = Waiter { target, id, waker: Some(waker) };
        match self.queue.back() {
            Some(last) if last.target > target => {
                let at = self.position(target, id).expect_err("ids are not used twice");
                self.queue.insert(at, waiter);
            }
            _ => self.queue.push_back(waiter),
        }
        (id, None)
    }

    /// Empties the entry of a dropped future. Returns its waker, to be dropped outside the lock.
    fn abandon(&mut self, target: u64, id: u64) -> Option<Waker> {
        let at = self.position(target, id).ok()?;
        let waker = self.queue[at].waker.take();
        self.abandoned += 1;
        if self.abandoned > ABANDONED_KEPT + self.queue.len() / 2 {
            self.queue.retain(|waiter| waiter.waker.is_some());
            self.abandoned = 0;
        }
        waker
    }

    /// Removes the first waiter if its target is at most `value`.
    fn pop_reached(&mut self, value: u64) -> Option<Waiter> {
        let first = self.queue.front()?;
        if first.target > value {
            return None;
        }
        let first = self.queue.pop_front()?;
        self.abandoned -= usize::from(first.waker.is_none());
        Some(first)
    }
}

/// Wakers taken out per hold of the lock. They are cloned, run and dropped outside it, because a
/// waker is foreign code: dropping the last reference may drop its task, whose futures then abandon
/// their entries here.
const WAKE_BATCH: usize = 64;

impl Watermark {
    pub(crate) fn new(value: u64) -> Self {
        Self { value: AtomicU64::new(value), waiters: Mutex::default() }
    }

    pub(crate) fn get(&self) -> u64 {
        self.value.load(Ordering::Acquire)
    }

    /// Raises the number to at least `to`, and wakes the waiters that it reaches.
    pub(crate) fn advance(&self, to: u64) {
        self.value.fetch_max(to, Ordering::AcqRel);
        self.wake(to);
    }

    /// Wakes all waiters, so that they see that the number will not grow any more.
    pub(crate) fn wake_all(&self) {
        self.wake(u64::MAX);
    }

    fn wake(&self, reached: u64) {
        let mut batch: [Option<Waker>; WAKE_BATCH] = [const { None }; WAKE_BATCH];
        loop {
            let mut taken = 0;
            let mut waiters = self.waiters.lock();
            while taken < WAKE_BATCH
                && let Some(waiter) = waiters.pop_reached(reached)
            {
                if let Some(waker) = waiter.waker {
                    batch[taken] = Some(waker);
                    taken += 1;
                }
            }
            drop(waiters);
            for waker in batch[..taken].iter_mut().filter_map(Option::take) {
                waker.wake();
            }
            if taken < WAKE_BATCH {
                return;
            }
        }
    }

    /// Registers for a wake-up when the number reaches `target`. `failure` returns, under the
    /// lock, the reason if that can no longer happen; the code that causes it calls
    /// [`Watermark::wake_all`] afterwards, so that no waiter is missed.
    fn poll<E>(
        &self,
        target: u64,
        id: &mut Option<u64>,
        cx: &Context<'_>,
        failure: impl Fn() -> Option<E>,
    ) -> Poll<Result<(), E>> {
        if self.get() >= target {
            return Poll::Ready(Ok(()));
        }
        let waker = cx.waker().clone(); // dropped after the lock, like the one that it replaces
        let mut waiters = self.waiters.lock();
        // Before reading the number: a target reached before the stop has not failed.
        let failure = failure();
        if self.get() >= target {
            return Poll::Ready(Ok(()));
        }
        if let Some(error) = failure {
            return Poll::Ready(Err(error));
        }
        let (entry, replaced) = waiters.register(target, *id, waker);
        *id = Some(entry);
        drop(waiters);
        drop(replaced);
        Poll::Pending
    }

    #[cfg(test)]
    pub(crate) fn entries(&self) -> usize {
        self.waiters.lock().queue.len()
    }
}

/// A future's watermark, and the reason why its target may never be reached.
pub(crate) trait Source {
    type Error;
    fn watermark(&self) -> &Watermark;
    fn failure(&self) -> Option<Self::Error>;
}

/// A future that resolves when a watermark reaches a value, or never will. Dropping it removes it
/// from the waiters.
#[derive(Debug)]
pub(crate) struct Wait<S: Source> {
    source: S,
    target: u64,
    id: Option<u64>,
}

impl<S: Source> Wait<S> {
    pub(crate) fn new(source: S, target: u64) -> Self {
        Self { source, target, id: None }
    }

    pub(crate) fn target(&self) -> u64 {
        self.target
    }
}

impl<S: Source + Unpin> Future for Wait<S> {
    type Output = Result<(), S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        this.source.watermark().poll(this.target, &mut this.id, cx, || this.source.failure())
    }
}

impl<S: Source> Drop for Wait<S> {
    fn drop(&mut self) {
        if let Some(id) = self.id
            && self.source.watermark().get() < self.target
        {
            let waker = self.source.watermark().waiters.lock().abandon(self.target, id);
            drop(waker); // in a statement after the lock
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

thread_local! {
    static UNPARK: Waker = Waker::from(Arc::new(Unpark(thread::current())));
}

/// Polls `future` on this thread and sleeps in between.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    let waker = UNPARK.with(Clone::clone);
    let mut cx = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut cx) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize};

    use super::*;

    #[derive(Debug, Default)]
    struct Shared {
        stopped: AtomicBool,
        mark: Option<Watermark>,
    }

    #[derive(Clone, Debug)]
    struct At(Arc<Shared>);

    impl Source for At {
        type Error = &'static str;
        fn watermark(&self) -> &Watermark {
            self.0.mark.as_ref().unwrap()
        }
        fn failure(&self) -> Option<&'static str> {
            self.0.stopped.load(Ordering::Acquire).then_some("stopped")
        }
    }

    fn at(value: u64) -> At {
        At(Arc::new(Shared { mark: Some(Watermark::new(value)), ..Shared::default() }))
    }

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn exactly_the_reached_waiters_are_woken_in_any_order() {
        let mark = at(0);
        let counts: Vec<_> = (0..200).map(|_| Arc::new(Count::default())).collect();
        let mut waits = Vec::new();
        for (index, count) in counts.iter().enumerate() {
            let target = (index as u64 * 37) % 200 + 1; // a permutation of 1..=200
            let mut wait = Wait::new(mark.clone(), target);
            let waker = Waker::from(count.clone());
            assert!(Pin::new(&mut wait).poll(&mut Context::from_waker(&waker)).is_pending());
            waits.push((target, wait));
        }
        for reached in [0, 1, 70, 71, 199, 200] {
            mark.watermark().advance(reached);
            for ((target, wait), count) in waits.iter_mut().zip(&counts) {
                let woken = *target <= reached;
                assert_eq!(
                    count.0.load(Ordering::Relaxed),
                    usize::from(woken),
                    "target {target} at {reached}"
                );
                if woken {
                    let mut cx = Context::from_waker(Waker::noop());
                    assert_eq!(Pin::new(wait).poll(&mut cx), Poll::Ready(Ok(())));
                }
            }
        }
        assert_eq!(mark.watermark().entries(), 0);
    }

    #[test]
    fn a_future_has_one_entry_while_polled_and_none_when_dropped() {
        let mark = at(0);
        let mut kept = Wait::new(mark.clone(), 5);
        let count = Arc::new(Count::default());
        for _ in 0..1000 {
            let mut cx = Context::from_waker(Waker::noop());
            assert!(Pin::new(&mut kept).poll(&mut cx).is_pending());
        }
        let waker = Waker::from(count.clone());
        assert!(Pin::new(&mut kept).poll(&mut Context::from_waker(&waker)).is_pending());
        assert_eq!(mark.watermark().entries(), 1);
        for target in 0..10_000 {
            let mut dropped = Wait::new(mark.clone(), 10 + target % 7);
            let mut cx = Context::from_waker(Waker::noop());
            assert!(Pin::new(&mut dropped).poll(&mut cx).is_pending());
            drop(dropped);
            assert!(
                mark.watermark().entries() <= 2 * ABANDONED_KEPT + 2,
                "bounded by the futures alive"
            );
        }
        mark.watermark().advance(5);
        assert_eq!(count.0.load(Ordering::Relaxed), 1, "only the waker of the last poll is woken");
        mark.watermark().advance(100);
        assert_eq!(mark.watermark().entries(), 0);
    }

    #[test]
    fn a_stop_fails_targets_that_were_not_reached_before_it() {
        let mark = at(0);
        let waiting = mark.clone();
        let thread = thread::spawn(move || block_on(Wait::new(waiting, 10)));
        mark.watermark().advance(7);
        mark.0.stopped.store(true, Ordering::Release);
        mark.watermark().wake_all();
        assert_eq!(thread.join().unwrap(), Err("stopped"));
        assert_eq!(block_on(Wait::new(mark.clone(), 7)), Ok(()));
        assert_eq!(block_on(Wait::new(mark, 8)), Err("stopped"));
    }

    /// Dropping a waker may drop the task that it wakes, and with it the task's futures.
    #[test]
    fn wakers_are_dropped_outside_of_the_lock() {
        struct Held(At);
        impl Wake for Held {
            fn wake(self: Arc<Self>) {}
        }
        impl Drop for Held {
            fn drop(&mut self) {
                assert!(self.0.watermark().waiters.try_lock().is_some(), "dropped under the lock");
            }
        }
        let mark = at(0);
        let poll = |wait: &mut Wait<At>| {
            let waker = Waker::from(Arc::new(Held(mark.clone())));
            Pin::new(wait).poll(&mut Context::from_waker(&waker))
        };
        let mut replaced = Wait::new(mark.clone(), 5);
        assert!(poll(&mut replaced).is_pending());
        assert!(poll(&mut replaced).is_pending());
        drop(replaced);
        let mut woken = Wait::new(mark.clone(), 6);
        assert!(poll(&mut woken).is_pending());
        mark.watermark().advance(6);
        assert_eq!(poll(&mut woken), Poll::Ready(Ok(())));
    }

    #[test]
    fn no_wake_is_lost_between_threads() {
        let mark = at(0);
        let waiters: Vec<_> = (1..=4)
            .map(|_| {
                let mark = mark.clone();
                thread::spawn(move || {
                    (1..=2000).try_for_each(|target| block_on(Wait::new(mark.clone(), target)))
                })
            })
            .collect();
        for value in 1..=2000 {
            mark.watermark().advance(value);
        }
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), Ok(()));
        }
    }
}
