//! The limits on transfers to and from the object store: token buckets with bytes as tokens, and a
//! priority queue in front of each. See `docs/cold-reads.md`, 5.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::request_class::RequestClass;

/// The bucket's capacity in time: a pause of at most this long is made up for.
const BURST: Duration = Duration::from_millis(250);
/// The longest sleep before the bucket is looked at again, which bounds the arithmetic of times.
const LONGEST_SLEEP: Duration = Duration::from_secs(3600);

/// The limits on transfers: one for all of them, one for copies to the object store (uploads and
/// compaction), and one for reads. A transfer waits for its own limit first.
pub(crate) struct Transfers {
    all: Bandwidth,
    copy: Bandwidth,
    fetch: Bandwidth,
    /// Held while the limits change.
    changing: Mutex<()>,
}

/// How long transfers have waited for their own limit, all together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Throttled {
    /// Uploads and compaction.
    pub copy: Duration,
    /// Reads.
    pub fetch: Duration,
}

impl Transfers {
    /// Creates the limits; 0 means no bound on all transfers together. Copies and reads have no
    /// bound of their own.
    pub(crate) fn new(bytes_per_s: u64) -> Self {
        let [all, copy, fetch] = [bytes_per_s, 0, 0].map(Bandwidth::new);
        Self { all, copy, fetch, changing: Mutex::default() }
    }

    /// Waits until a transfer of `bytes` may start. Dropping the future may use up bytes of the
    /// class's own limit.
    pub(crate) async fn acquire(&self, class: RequestClass, bytes: u64) {
        match class {
            RequestClass::Upload | RequestClass::Compaction => {
                self.copy.acquire(class, bytes).await;
            }
            RequestClass::Read => self.fetch.acquire(class, bytes).await,
            RequestClass::CleanUp => {}
        }
        self.all.acquire(class, bytes).await;
    }

    /// Takes `bytes` for a read only if that makes no other transfer wait.
    pub(crate) fn try_acquire_spare(&self, bytes: u64) -> bool {
        if !self.fetch.try_acquire_spare(bytes) {
            return false;
        }
        let is_spare = self.all.try_acquire_spare(bytes);
        if !is_spare {
            self.fetch.give_back(bytes);
        }
        is_spare
    }

    /// Changes the limits of copies and reads to what `limits` returns; 0 means no bound.
    pub(crate) fn limit(&self, limits: impl FnOnce() -> [u64; 2]) {
        let _changing = self.changing.lock();
        let [copy, fetch] = limits();
        self.copy.limit(copy);
        self.fetch.limit(fetch);
    }

    /// Returns how long transfers have waited for their own limit.
    pub(crate) fn throttled(&self) -> Throttled {
        Throttled { copy: self.copy.waited(), fetch: self.fetch.waited() }
    }
}

/// A bound on the bytes per second.
///
/// A transfer starts when the bucket is not empty, and takes all of its bytes at once, so that the
/// bucket may go into debt; the next transfer starts when the debt is paid. So a transfer may be
/// larger than the bucket, the rate holds over any period except for one burst and one transfer,
/// and an urgent transfer waits for the debt of one transfer at most. Within a class the order is
/// first come, first served. A class gets what higher ones leave: if that is nothing, it waits
/// forever.
struct Bandwidth {
    state: Mutex<State>,
    waited_ns: AtomicU64,
}

struct State {
    /// `None`: no bound.
    bytes_per_s: Option<f64>,
    /// Negative: debt.
    free_bytes: f64,
    filled_at: Instant,
    /// The first entry waits for the bucket, the others for those before them.
    queue: BTreeMap<(RequestClass, u64), Arc<Notify>>,
    next_number: u64,
}

impl Bandwidth {
    /// Creates a limiter; 0 means no bound.
    fn new(bytes_per_s: u64) -> Self {
        let rate = bytes_per_s as f64;
        Self {
            state: Mutex::new(State {
                bytes_per_s: (bytes_per_s > 0).then_some(rate),
                free_bytes: rate * BURST.as_secs_f64(),
                filled_at: Instant::now(),
                queue: BTreeMap::new(),
                next_number: 0,
            }),
            waited_ns: AtomicU64::new(0),
        }
    }

    /// Changes the bound; 0 means no bound. The debt of earlier transfers is forgotten.
    fn limit(&self, bytes_per_s: u64) {
        let mut state = self.state.lock();
        let rate = (bytes_per_s > 0).then_some(bytes_per_s as f64);
        if state.bytes_per_s == rate {
            return;
        }
        state.bytes_per_s = rate;
        state.free_bytes = rate.unwrap_or_default() * BURST.as_secs_f64();
        state.filled_at = Instant::now();
        if let Some((_, first)) = state.queue.first_key_value() {
            first.notify_one();
        }
    }

    /// Returns bytes that were taken and are not used.
    fn give_back(&self, bytes: u64) {
        let mut state = self.state.lock();
        if state.bytes_per_s.is_some() {
            state.free_bytes += bytes as f64;
        }
    }

    /// Returns how long transfers have waited, all together.
    fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited_ns.load(Ordering::Relaxed))
    }

    /// Waits until a transfer of `bytes` may start. Dropping the future uses no bytes.
    async fn acquire(&self, class: RequestClass, bytes: u64) {
        let entry = {
            let mut state = self.state.lock();
            if state.would_be_first(class) && state.try_take(bytes).is_ok() {
                return;
            }
            state.enqueue(self, class)
        };
        loop {
            let until = {
                let mut state = self.state.lock();
                let is_first = state.queue.first_key_value().is_some_and(|(at, _)| *at == entry.at);
                match is_first {
                    true => match state.try_take(bytes) {
                        Ok(()) => return,
                        Err(until) => Some(until),
                    },
                    false => None,
                }
            };
            let woken = entry.wake.notified();
            match until {
                // A change of the bound wakes the first one.
                Some(until) => drop(tokio::time::timeout_at(until, woken).await),
                None => woken.await,
            }
        }
    }

    /// Takes `bytes` only if there is no queue and more than half of the bucket remains for
    /// mandatory transfers.
    fn try_acquire_spare(&self, bytes: u64) -> bool {
        let mut state = self.state.lock();
        let Some(rate) = state.bytes_per_s else { return true };
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

    /// Takes the bytes of a transfer, or returns when that may be possible.
    fn try_take(&mut self, bytes: u64) -> Result<(), Instant> {
        let Some(rate) = self.bytes_per_s else { return Ok(()) };
        self.fill(rate);
        // Half a byte: what rounding times to nanoseconds may lose.
        if self.free_bytes > -0.5 {
            self.free_bytes -= bytes as f64;
            return Ok(());
        }
        let seconds = (-self.free_bytes / rate).min(LONGEST_SLEEP.as_secs_f64());
        Err(self.filled_at + Duration::from_secs_f64(seconds))
    }

    fn enqueue<'a>(&mut self, bandwidth: &'a Bandwidth, class: RequestClass) -> QueueEntry<'a> {
        let at = (class, self.next_number);
        self.next_number += 1;
        let wake = Arc::new(Notify::new());
        self.queue.insert(at, wake.clone());
        QueueEntry { bandwidth, at, wake, since: Instant::now() }
    }
}

/// A position in the queue; dropping it, served or not, wakes the next entry.
struct QueueEntry<'a> {
    bandwidth: &'a Bandwidth,
    at: (RequestClass, u64),
    wake: Arc<Notify>,
    since: Instant,
}

impl Drop for QueueEntry<'_> {
    fn drop(&mut self) {
        let waited = u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.bandwidth.waited_ns.fetch_add(waited, Ordering::Relaxed);
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
    async fn copies_and_reads_have_limits_of_their_own_that_change() {
        use RequestClass::{CleanUp, Compaction, Read, Upload};
        let transfers = Arc::new(Transfers::new(0));
        let begun = Instant::now();
        transfers.acquire(Upload, 1 << 40).await;
        transfers.limit(|| [MIB, 4 * MIB]);
        let seconds = || begun.elapsed().as_secs_f64();
        // Each bucket begins full, and the first transfer puts it into debt.
        transfers.acquire(Upload, MIB).await;
        transfers.acquire(Read, MIB).await;
        assert_eq!(seconds(), 0.0);
        transfers.acquire(CleanUp, 1 << 40).await;
        transfers.acquire(Read, 4 * MIB).await;
        assert_eq!(seconds(), 0.0, "a full bucket was as large as the transfer");
        transfers.acquire(Read, MIB).await;
        assert_eq!(seconds(), 1.0);
        assert!(!transfers.try_acquire_spare(1));
        transfers.acquire(Compaction, 1 << 40).await;
        assert_eq!(seconds(), 1.0, "the debt of the upload was paid meanwhile");
        // It would take 12 days; the change of the limit ends the wait.
        let waiting = tokio::spawn({
            let transfers = transfers.clone();
            async move { transfers.acquire(Upload, 1).await }
        });
        tokio::task::yield_now().await;
        tokio::time::advance(Duration::from_secs(9)).await;
        assert!(!waiting.is_finished());
        transfers.limit(|| [0, 0]);
        waiting.await.unwrap();
        assert_eq!(seconds(), 10.0);
        let Throttled { copy, fetch } = transfers.throttled();
        assert_eq!((copy.as_secs(), fetch.as_secs()), (9, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn spare_bandwidth_that_is_refused_costs_nothing() {
        let transfers = Transfers::new(MIB);
        transfers.limit(|| [0, MIB]);
        transfers.acquire(RequestClass::Upload, MIB).await;
        for _ in 0..10 {
            assert!(!transfers.try_acquire_spare(MIB / 16), "the upload has put all into debt");
        }
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(transfers.try_acquire_spare(MIB / 16));
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
