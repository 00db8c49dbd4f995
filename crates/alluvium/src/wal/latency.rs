//! What the loads of `alluvium wal bench` say about latency.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::output::Failure;

/// Longest latency that is told apart; a longer one counts as this.
const MAX_LATENCY_NS: u64 = 60_000_000_000;

/// Latencies to three digits, each of them.
pub(super) struct Latencies(Histogram<u64>);

/// The figures of a load.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Summary {
    pub(super) mean_us: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) p999_us: f64,
    pub(super) max_us: f64,
}

impl Latencies {
    pub(super) fn new() -> Result<Self, Failure> {
        Histogram::new_with_bounds(1, MAX_LATENCY_NS, 3).map(Self).map_err(Failure::new)
    }

    pub(super) fn record(&mut self, latency: Duration) {
        let nanos = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.0.saturating_record(nanos.max(1));
    }

    pub(super) fn count(&self) -> u64 {
        self.0.len()
    }

    /// All zero if nothing was recorded.
    pub(super) fn summary(&self) -> Summary {
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
