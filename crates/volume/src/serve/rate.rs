//! A bound on the bytes per second of all pulls in one direction.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

/// Longest wait for one batch. With so many pulls that each would wait longer, the bound is
/// exceeded: a pull without progress for half a minute is given up.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

pub(super) struct Rate {
    /// 0: no bound.
    bytes_per_s: u64,
    /// When what was taken has been paid for.
    paid_at: Mutex<Instant>,
}

impl Rate {
    pub(super) fn new(bytes_per_s: u64) -> Self {
        Self { bytes_per_s, paid_at: Mutex::new(Instant::now()) }
    }

    /// Takes bytes, and waits until those that were taken before are paid for.
    pub(super) async fn take(&self, bytes: u64) {
        if self.bytes_per_s == 0 || bytes == 0 {
            return;
        }
        let cost = Duration::from_secs_f64(bytes as f64 / self.bytes_per_s as f64);
        let now = Instant::now();
        let begin = {
            let mut paid_at = self.paid_at.lock();
            let begin = (*paid_at).clamp(now, now + LONGEST_WAIT);
            *paid_at = begin + cost;
            begin
        };
        sleep_until(begin).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn bytes_are_taken_at_the_rate() {
        let (rate, start) = (Rate::new(1000), Instant::now());
        for _ in 0..5 {
            rate.take(500).await;
        }
        assert_eq!(start.elapsed(), Duration::from_secs(2), "the first ones do not wait");
        tokio::time::advance(Duration::from_secs(60)).await;
        let start = Instant::now();
        rate.take(500).await;
        rate.take(500).await;
        assert_eq!(start.elapsed(), Duration::from_millis(500), "nothing is saved up");
        rate.take(100_000).await;
        let start = Instant::now();
        rate.take(1).await;
        assert_eq!(start.elapsed(), LONGEST_WAIT);
        let unbounded = Rate::new(0);
        let start = Instant::now();
        unbounded.take(u64::MAX).await;
        assert_eq!(start.elapsed(), Duration::ZERO);
    }
}
