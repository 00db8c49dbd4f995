//! Shared parts of the loads of `alluvium wal bench` and `alluvium bench`: the data that they
//! write, latency figures, and waits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::output::Failure;

/// Waits until this time, or until `stop` is set.
pub(crate) fn sleep_until(time: Instant, stop: &AtomicBool) {
    const LONGEST: Duration = Duration::from_millis(50);
    loop {
        let left = time.saturating_duration_since(Instant::now());
        if left.is_zero() || stop.load(Ordering::Relaxed) {
            return;
        }
        thread::sleep(left.min(LONGEST));
    }
}

/// Maximum recorded latency; a longer one counts as this.
const MAX_LATENCY_NS: u64 = 60_000_000_000;

/// A histogram of latencies with three significant digits.
pub(crate) struct Latencies(Histogram<u64>);

/// The latency figures of a load.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Summary {
    pub(crate) mean_us: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p999_us: f64,
    pub(crate) max_us: f64,
}

impl Latencies {
    pub(crate) fn new() -> Result<Self, Failure> {
        Histogram::new_with_bounds(1, MAX_LATENCY_NS, 3).map(Self).map_err(Failure::new)
    }

    pub(crate) fn record(&mut self, latency: Duration) {
        let nanos = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.0.saturating_record(nanos.max(1));
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.len()
    }

    /// Summarizes the latencies; all zero if nothing was recorded.
    pub(crate) fn summary(&self) -> Summary {
        let quantile = |q| self.0.value_at_quantile(q) as f64 / 1000.0;
        Summary {
            mean_us: self.0.mean() / 1000.0,
            p50_us: quantile(0.5),
            p99_us: quantile(0.99),
            p999_us: quantile(0.999),
            max_us: self.0.max() as f64 / 1000.0,
        }
    }
}

/// Bytes that neither a disk nor a file system can compress.
pub(crate) fn noise(len_bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        // xorshift64
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut bytes = Vec::with_capacity(len_bytes + 8);
    while bytes.len() < len_bytes {
        bytes.extend_from_slice(&next());
    }
    bytes.truncate(len_bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_has_the_requested_length_and_no_pattern() {
        assert!(noise(0).is_empty());
        let bytes = noise(100_001);
        assert_eq!(bytes.len(), 100_001);
        let mut seen = [0_u32; 256];
        bytes.iter().for_each(|byte| seen[usize::from(*byte)] += 1);
        // In an even distribution, each value occurs 390 times.
        assert!(seen.iter().all(|n| (250..550).contains(n)), "{seen:?}");
    }
}
