//! The limit on transfers to and from the object store: a token bucket with bytes as tokens, and a
//! priority queue in front of it. See `docs/cold-reads.md`, 5.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::request_class::RequestClass;

/// The bucket's capacity in time: a pause of at most this long is made up for.
const BURST: Duration = Duration::from_millis(250);

/// A bound on the bytes per second for all request classes together.
///
/// A transfer starts when the bucket is not empty, and takes all of its bytes at once, so that the
/// bucket may go into debt; the next transfer starts when the debt is paid. So a transfer may be
/// larger than the bucket, the rate holds over any period except for one burst and one transfer,
/// and an urgent transfer waits for the debt of one transfer at most. Within a class the order is
/// first come, first served. A class gets what higher ones leave: if that is nothing, it waits
/// forever.
pub(crate) struct Bandwidth {
    /// `None`: no bound.
    bytes_per_s: Option<f64>,
    state: Mutex<State>,
}

struct State {
    /// Negative: debt.
    free_bytes: f64,
    filled_at: Instant,
    /// The first entry waits for the bucket, the others for those before them.
    queue: BTreeMap<(RequestClass, u64), Arc<Notify>>,
    next_number: u64,
}

impl Bandwidth {
    /// Creates a limiter; 0 means no bound.
    pub(crate) fn new(bytes_per_s: u64) -> Self {
        let rate = bytes_per_s as f64;
        Self {
            bytes_per_s: (bytes_per_s > 0).then_some(rate),
            state: Mutex::new(State {
                free_bytes: rate * BURST.as_secs_f64(),
                filled_at: Instant::now(),
                queue: BTreeMap::new(),
                next_number: 0,
            }),
        }
    }

    /// Waits until a transfer of `bytes` may start. Dropping the future uses no bytes.
    pub(crate) async fn acquire(&self, class: RequestClass, bytes: u64) {
        let Some(rate) = self.bytes_per_s else { return };
        let entry = {
            let mut state = self.state.lock();
            if state.would_be_first(class) && state.try_take(rate, bytes) {
                return;
            }
            state.enqueue(self, class)
        };
        loop {
            let until = {
                let mut state = self.state.lock();
                let is_first = state.queue.first_key_value().is_some_and(|(at, _)| *at == entry.at);
                match is_first {
                    true if state.try_take(rate, bytes) => return,
                    true => Some(state.filled_at + state.until_free(rate)),
                    false => None,
                }
            };
            match until {
                Some(until) => tokio::time::sleep_until(until).await,
                None => entry.wake.notified().await,
            }
        }
    }

    /// Takes `bytes` only if there is no queue and more than half of the bucket remains for
    /// mandatory transfers.
    pub(crate) fn try_acquire_spare(&self, bytes: u64) -> bool {
        let Some(rate) = self.bytes_per_s else { return true };
        let mut state = self.state.lock();
        state.fill(rate);
        let is_spare = state.queue.is_empty()
            && state.free_bytes - bytes as f64 > rate * BURST.as_secs_f64() / 2.0;
        if is_spare {
            state.free_bytes -= bytes as f64;
        }
        is_spare
    }
}

impl State {
    fn would_be_first(&self, class: RequestClass) -> bool {
        self.queue.first_key_value().is_none_or(|((first, _), _)| class < *first)
    }

    fn fill(&mut self, rate: f64) {
        let now = Instant::now();
        let flown = rate * now.duration_since(self.filled_at).as_secs_f64();
        self.free_bytes = (self.free_bytes + flown).min(rate * BURST.as_secs_f64());
        self.filled_at = now;
    }

    fn try_take(&mut self, rate: f64, bytes: u64) -> bool {
        self.fill(rate);
        // Half a byte: what rounding times to nanoseconds may lose.
        let starts = self.free_bytes > -0.5;
        if starts {
            self.free_bytes -= bytes as f64;
        }
        starts
    }

    fn until_free(&self, rate: f64) -> Duration {
        Duration::from_secs_f64((-self.free_bytes).max(0.0) / rate)
    }

    fn enqueue<'a>(&mut self, bandwidth: &'a Bandwidth, class: RequestClass) -> QueueEntry<'a> {
        let at = (class, self.next_number);
        self.next_number += 1;
        let wake = Arc::new(Notify::new());
        self.queue.insert(at, wake.clone());
        QueueEntry { bandwidth, at, wake }
    }
}

/// A position in the queue; dropping it, served or not, wakes the next entry.
struct QueueEntry<'a> {
    bandwidth: &'a Bandwidth,
    at: (RequestClass, u64),
    wake: Arc<Notify>,
}

impl Drop for QueueEntry<'_> {
    fn drop(&mut self) {
        let mut state = self.bandwidth.state.lock();
        state.queue.remove(&self.at);
        if let Some((_, next)) = state.queue.first_key_value() {
            next.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Starts transfers in this order, each after the previous one has queued; returns their order
    /// and times in ms.
    async fn starts(rate: u64, transfers: &[(RequestClass, u64)]) -> Vec<(usize, u64)> {
        let bandwidth = Arc::new(Bandwidth::new(rate));
        let (started, begun) = (Arc::new(Mutex::new(Vec::new())), Instant::now());
        let mut tasks = Vec::new();
        for (i, &(class, bytes)) in transfers.iter().enumerate() {
            let (bandwidth, started) = (bandwidth.clone(), started.clone());
            tasks.push(tokio::spawn(async move {
                bandwidth.acquire(class, bytes).await;
                let at = begun.elapsed().as_secs_f64() * 1000.0;
                started.lock().push((i, at.round() as u64));
            }));
            tokio::task::yield_now().await;
        }
        for task in tasks {
            task.await.unwrap();
        }
        assert!(bandwidth.state.lock().queue.is_empty());
        Arc::into_inner(started).unwrap().into_inner()
    }

    #[tokio::test(start_paused = true)]
    async fn urgent_transfers_go_first_and_the_rate_holds() {
        use RequestClass::{Compaction, Read, Upload};
        // The bucket's 256 KiB pay for a quarter of the first transfer; each MiB takes a second.
        let order = [Compaction, Read, Compaction, Upload, Read, Upload];
        let started = starts(MIB, &order.map(|class| (class, MIB))).await;
        assert_eq!(started, [(0, 0), (3, 750), (5, 1750), (1, 2750), (4, 3750), (2, 4750)]);
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_bound_no_transfer_waits() {
        let started =
            starts(0, &[(RequestClass::Compaction, 1 << 60), (RequestClass::Upload, 1 << 60)])
                .await;
        assert_eq!(started, [(0, 0), (1, 0)]);
        assert!(Bandwidth::new(0).try_acquire_spare(1 << 60));
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_wait_frees_its_queue_position() {
        let bandwidth = Arc::new(Bandwidth::new(MIB));
        bandwidth.acquire(RequestClass::Upload, MIB).await;
        let wait = |class| {
            let bandwidth = bandwidth.clone();
            tokio::spawn(async move { bandwidth.acquire(class, MIB).await })
        };
        let (first, second) = (wait(RequestClass::Upload), wait(RequestClass::Read));
        tokio::task::yield_now().await;
        first.abort();
        let begun = Instant::now();
        second.await.unwrap();
        assert_eq!(begun.elapsed().as_millis(), 750, "the first one's share is available");
    }

    #[tokio::test(start_paused = true)]
    async fn spare_bandwidth_is_granted_without_waiting_and_no_more() {
        let bandwidth = Arc::new(Bandwidth::new(4 * MIB));
        assert!(bandwidth.try_acquire_spare(MIB / 2 - 1));
        assert!(!bandwidth.try_acquire_spare(1), "half of the bucket stays");
        tokio::time::advance(Duration::from_secs(1)).await;
        bandwidth.acquire(RequestClass::Upload, 2 * MIB).await;
        let waiting = tokio::spawn({
            let bandwidth = bandwidth.clone();
            async move { bandwidth.acquire(RequestClass::Compaction, 1).await }
        });
        tokio::task::yield_now().await;
        assert!(!bandwidth.try_acquire_spare(0), "a transfer is queued");
        waiting.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_is_made_up_for_by_one_burst_only() {
        let bandwidth = Bandwidth::new(MIB);
        tokio::time::advance(Duration::from_secs(3600)).await;
        let begun = Instant::now();
        for _ in 0..9 {
            bandwidth.acquire(RequestClass::Read, MIB / 4).await;
        }
        // The first is paid from the bucket, the second finds it empty and without debt.
        assert_eq!(begun.elapsed().as_millis(), 7 * 250);
    }
}
