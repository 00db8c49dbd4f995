//! Optional limits on block writes: two token buckets, and the thread that wakes the WAL when they
//! have refilled.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Condvar, Mutex};

/// A write counts once per started unit of this size, as on cloud disks (AWS: "I/O
/// characteristics", EBS user guide).
const COUNTED_BYTES: u64 = 256 * 1024;

/// Distances of early writes, as multiples of the limit's distance: QUICK while saved-up writes are
/// used, SLOW while they are being saved up again. With a load slightly above the limit (3,072
/// records/s at 3,000 writes/s), most records are due for a write at once, and occasionally two
/// share one. At exactly the limit's distance each would wait a little longer than the one before,
/// half a distance on average.
const QUICK: f64 = 0.96;
const SLOW: f64 = 1.1;
/// Fractions of the bucket's depth between which saving starts and ends.
const SAVE_BELOW: f64 = 0.8;
const SAVE_UP_TO: f64 = 0.9;

/// A token bucket. A write passes while the balance is positive and may overdraw it, so that a
/// block larger than the bucket passes, and the rate holds on average. Unused tokens of up to a
/// tenth of a second are kept: a burst after a pause does not wait.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    per_second: f64,
    balance: f64,
    refilled: Duration,
}

impl Bucket {
    /// Starts nearly empty: recovery has just read as fast as the device allows.
    fn new(per_second: f64) -> Self {
        Self { per_second, balance: 1.0, refilled: Duration::ZERO }
    }

    /// At least one token; otherwise a slow rate would never have any.
    fn depth(per_second: f64) -> f64 {
        (per_second / 10.0).max(1.0)
    }

    fn refill(&mut self, now: Duration) {
        let since = now.saturating_sub(self.refilled);
        self.refilled = self.refilled.max(now);
        self.balance = (self.balance + since.as_secs_f64() * self.per_second)
            .min(Self::depth(self.per_second));
    }

    /// Time until the balance is positive again. Never zero before that, so that waiting makes
    /// progress.
    fn wait(&self) -> Option<Duration> {
        (self.balance <= 0.0).then(|| {
            Duration::from_secs_f64(-self.balance / self.per_second) + Duration::from_nanos(1000)
        })
    }
}

/// The limits of a WAL. Times are arguments, relative to a fixed moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limiter {
    writes: Option<Bucket>,
    bytes: Option<Bucket>,
    /// When the next early write may be sent.
    early_at: Duration,
    /// Whether writes are being saved up.
    saving: bool,
}

impl Limiter {
    /// Creates a limiter; `None` if nothing is limited.
    pub(crate) fn new(iops: Option<u32>, bytes_per_second: Option<u64>) -> Option<Self> {
        (iops.is_some() || bytes_per_second.is_some()).then(|| Self {
            writes: iops.map(|rate| Bucket::new(f64::from(rate))),
            bytes: bytes_per_second.map(|rate| Bucket::new(rate as f64)),
            early_at: Duration::ZERO,
            saving: true,
        })
    }

    /// Whether the number of writes is limited.
    pub(crate) fn limits_writes(&self) -> bool {
        self.writes.is_some()
    }

    /// How long a partial block has to wait for its turn. Where writes are limited, such blocks are
    /// sent at even distances, however many writes are saved up. Sent in a bunch they would wait
    /// for each other: of three sent one right after the other, the first carries everything
    /// appended since the previous bunch and the others a page each, and the next one is sent when
    /// the first completes, which is twice the latency.
    pub(crate) fn early_wait(&self, now: Duration) -> Option<Duration> {
        self.writes.as_ref()?;
        self.early_at.checked_sub(now).filter(|wait| *wait > Duration::ZERO)
    }

    /// Whether bandwidth was unused lately: nearly all that can be saved up is. While the load uses
    /// the full bandwidth, any waste would keep a queue in the device from draining.
    pub(crate) fn has_bytes_to_spare(&mut self, now: Duration) -> bool {
        self.bytes.as_mut().is_none_or(|bucket| {
            bucket.refill(now);
            bucket.balance > Bucket::depth(bucket.per_second) * 0.9
        })
    }

    /// Charges `count` requests of `bytes` each that are sent without delay. They delay the next
    /// block by a second at most: their number depends on how often the user trims, and an
    /// unbounded debt would stop the log long after the last of them.
    pub(crate) fn charge_undelayed(&mut self, count: u32, bytes: u64) {
        for (bucket, cost) in [(&mut self.writes, 1.0), (&mut self.bytes, bytes as f64)] {
            if let Some(bucket) = bucket {
                let least = bucket.balance.min(-bucket.per_second);
                bucket.balance = (bucket.balance - f64::from(count) * cost).max(least);
            }
        }
    }

    /// Charges a write of `bytes`, or returns how long to wait before asking again.
    pub(crate) fn take(&mut self, now: Duration, bytes: u64) -> Result<(), Duration> {
        let mut wait = None;
        for bucket in [&mut self.writes, &mut self.bytes].into_iter().flatten() {
            bucket.refill(now);
            wait = wait.max(bucket.wait());
        }
        if let Some(wait) = wait {
            return Err(wait);
        }
        if let Some(bucket) = &mut self.bytes {
            bucket.balance -= bytes as f64;
        }
        if let Some(bucket) = &mut self.writes {
            // Disks with a quota count a large write as several.
            bucket.balance -= bytes.div_ceil(COUNTED_BYTES) as f64;
            let share = bucket.balance / Bucket::depth(bucket.per_second);
            self.saving = share < if self.saving { SAVE_UP_TO } else { SAVE_BELOW };
            let pace = if self.saving { SLOW } else { QUICK };
            // Counted from the due time, so that late wake-ups do not add up.
            let distance = Duration::from_secs_f64(pace / bucket.per_second);
            self.early_at = (self.early_at + distance).max(now);
        }
        Ok(())
    }
}

/// A thread that sleeps until the time set, calls back once, and sleeps again. Ends when dropped.
#[derive(Debug)]
pub(crate) struct Alarm {
    shared: Arc<AlarmShared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct AlarmShared {
    state: Mutex<AlarmState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct AlarmState {
    due: Option<Instant>,
    stopped: bool,
}

impl Alarm {
    pub(crate) fn start(ring: impl Fn() + Send + 'static) -> std::io::Result<Self> {
        let shared = Arc::new(AlarmShared::default());
        let of_thread = shared.clone();
        let thread =
            thread::Builder::new().name("wal-limit".into()).spawn(move || of_thread.run(ring))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Rings at `due`, or at an earlier time set before.
    pub(crate) fn set(&self, due: Instant) {
        let mut state = self.shared.state.lock();
        if state.due.is_none_or(|set| due < set) {
            state.due = Some(due);
            drop(state);
            self.shared.changed.notify_one();
        }
    }

    /// Disables the alarm; the thread ends.
    pub(crate) fn stop(&self) {
        self.shared.state.lock().stopped = true;
        self.shared.changed.notify_one();
    }
}

impl AlarmShared {
    fn run(&self, ring: impl Fn()) {
        let mut state = self.state.lock();
        while !state.stopped {
            match state.due {
                None => self.changed.wait(&mut state),
                Some(due) if due > Instant::now() => drop(self.changed.wait_until(&mut state, due)),
                Some(_) => {
                    state.due = None;
                    drop(state);
                    ring();
                    state = self.state.lock();
                }
            }
        }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
        {
            // If it has panicked, the log has been stopped; another panic here would only hide the
            // first.
            drop(thread.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Number of writes permitted within `total`, with each wait exactly as returned.
    fn granted(limiter: &mut Limiter, bytes: u64, total: Duration) -> u64 {
        let (mut now, mut count) = (Duration::ZERO, 0);
        while now < total && count < 1_000_000 {
            match limiter.take(now, bytes) {
                Ok(()) => count += 1,
                Err(wait) => {
                    assert!(wait > Duration::ZERO);
                    now += wait;
                }
            }
        }
        count
    }

    #[test]
    fn the_rate_holds_and_a_pause_saves_up_quota() {
        let mut limiter = Limiter::new(Some(100), None).unwrap();
        let count = granted(&mut limiter, 256 << 10, Duration::from_secs(10));
        assert!(
            (1000..=1002).contains(&count),
            "{count}: 1,000 expected in ten seconds, starting with nothing saved up"
        );
        let later = Duration::from_secs(60);
        for _ in 0..10 {
            limiter.take(later, 4096).expect("saved up during the pause");
        }
        assert!(limiter.take(later, 4096).is_err(), "only a tenth of a second is saved up");
    }

    #[test]
    fn a_block_larger_than_the_bucket_passes_and_is_charged() {
        let mut limiter = Limiter::new(None, Some(1 << 20)).unwrap();
        limiter.take(Duration::ZERO, 4 << 20).unwrap();
        let wait = limiter.take(Duration::ZERO, 4096).unwrap_err();
        assert!(wait > Duration::from_secs(3) && wait < Duration::from_millis(4001), "{wait:?}");
        limiter.take(wait, 4096).unwrap();
    }

    #[test]
    fn header_writes_delay_a_block_by_a_second_at_most() {
        let mut limiter = Limiter::new(Some(100), Some(1 << 20)).unwrap();
        for _ in 0..10_000 {
            limiter.charge_undelayed(6, 4096);
        }
        let wait = limiter.take(Duration::ZERO, 4096).expect_err("they count");
        assert!(wait <= Duration::from_millis(1001), "{wait:?}");
        // A block larger than that is still charged in full.
        limiter.take(wait, 4 << 20).unwrap();
        limiter.charge_undelayed(6, 4096);
        assert!(limiter.take(wait, 4096).unwrap_err() > Duration::from_secs(3));
    }

    /// Records arrive every `gap_us` for ten seconds and are to be written at once, under a limit
    /// of 1,000 writes/s. Returns their waits and the distances of the writes, in microseconds.
    fn early(gap_us: u64) -> (Vec<u64>, Vec<u64>) {
        let mut limiter = Limiter::new(Some(1000), None).unwrap();
        let (mut waiting, mut waits, mut writes) = (Vec::new(), Vec::new(), Vec::new());
        for now_us in (0..10_000_000).step_by(10) {
            if now_us % gap_us == 0 {
                waiting.push(now_us);
            }
            let now = Duration::from_micros(now_us);
            let goes = !waiting.is_empty() && limiter.early_wait(now).is_none();
            if goes && limiter.take(now, 4096).is_ok() {
                waits.extend(waiting.drain(..).map(|from_us| now_us - from_us));
                writes.push(now_us);
            }
        }
        (waits, writes.windows(2).map(|pair| pair[1] - pair[0]).collect())
    }

    #[test]
    fn early_writes_are_evenly_spaced_even_with_saved_quota() {
        let (_, distances) = early(50);
        assert!(distances.iter().all(|us| (900..=1200).contains(us)), "{distances:?}");
        // A tenth of a second of writes is saved up at the end.
        assert!((9850..=10_000).contains(&distances.len()), "{}", distances.len());
    }

    #[test]
    fn records_slightly_faster_than_the_limit_hardly_wait() {
        let (waits, distances) = early(980);
        let mean_us = waits.iter().sum::<u64>() / waits.len() as u64;
        assert!(mean_us < 200, "{mean_us}");
        assert!(distances.len() <= 10_000);
    }

    #[test]
    fn without_limits_there_is_no_limiter() {
        assert!(Limiter::new(None, None).is_none());
    }

    proptest! {
        /// A higher limit permits at least as much: regression test for a batching that depended on
        /// its limiter.
        #[test]
        fn a_higher_limit_never_permits_less(
            low in 1u32..5000, more in 1u32..100_000, kib in 4u64..1024,
        ) {
            let total = Duration::from_millis(700);
            let count = |iops, bandwidth| {
                granted(&mut Limiter::new(iops, bandwidth).unwrap(), kib << 10, total)
            };
            prop_assert!(count(Some(low), None) <= count(Some(low + more), None));
            let (low, more) = (u64::from(low) << 14, u64::from(more) << 14);
            prop_assert!(count(None, Some(low)) <= count(None, Some(low + more)));
        }
    }
}
