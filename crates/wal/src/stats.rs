//! Statistics for metrics and tools.

use std::time::Duration;

use crate::LogOffset;

/// A consistent snapshot of the log's statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Size of the ring.
    pub ring_bytes: u64,
    /// Bytes of the ring that cannot be reused yet: from the durable trim offset to the next
    /// record's offset.
    pub used_bytes: u64,
    /// Current bound on bytes appended and not durable. It grows on demand.
    pub window_bytes: u64,
    /// Bytes appended and not durable.
    pub window_used_bytes: u64,
    /// Block writes in flight.
    pub in_flight: usize,
    /// Closed blocks that wait for an I/O slot.
    pub sealed_blocks: usize,
    /// Start of the log: the oldest record that is not durably trimmed.
    pub trimmed: LogOffset,
    /// The durable offset.
    pub durable: LogOffset,
    /// The next record's offset.
    pub appended: LogOffset,
    /// Records appended since the WAL was opened.
    pub records: u64,
    /// Total bytes of their payloads.
    pub payload_bytes: u64,
    /// Bytes sent to the device in block writes, including headers, padding and rewritten pages.
    pub device_bytes: u64,
    /// Block writes completed. A block that crosses the end of the ring takes two writes and counts
    /// once.
    pub block_writes: u64,
    /// Completed block and header writes that carried a flush or FUA: all, or none where the device
    /// is trusted.
    pub flushed_writes: u64,
    /// Header slots written.
    pub header_writes: u64,
    /// Bytes of padding that filled blocks up to a page boundary.
    pub padding_bytes: u64,
    /// Durations of block writes, including their flushes.
    pub write_times: DurationHistogram,
    /// The requested capacity, if a resize is pending or taking effect.
    pub resize_to_bytes: Option<u64>,
    /// Upper bound of the bytes by which the trim offset has to move before the pending resize
    /// takes effect.
    pub resize_distance_bytes: u64,
    /// Whether the WAL has failed.
    pub failed: bool,
}

/// The first bound of [`DurationHistogram`]; each is twice the one before.
const FIRST_BOUND: Duration = Duration::from_micros(50);
const BOUNDS: usize = 18;

/// A histogram of durations, in steps of a factor of two, from 50 us to 6.6 s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DurationHistogram {
    /// Counts by the first bound that is not exceeded; the last one counts durations above all
    /// bounds.
    counts: [u64; BOUNDS + 1],
    sum: Duration,
}

impl DurationHistogram {
    pub(crate) fn add(&mut self, took: Duration) {
        let within = Self::bounds().position(|bound| took <= bound);
        self.counts[within.unwrap_or(BOUNDS)] += 1;
        self.sum += took;
    }

    /// Each bound in ascending order, with the number of durations up to it and above the previous
    /// bound. The last bound is [`Duration::MAX`].
    pub fn buckets(&self) -> impl Iterator<Item = (Duration, u64)> {
        Self::bounds().chain([Duration::MAX]).zip(self.counts)
    }

    fn bounds() -> impl Iterator<Item = Duration> {
        (0..BOUNDS).map(|step| FIRST_BOUND * (1_u32 << step))
    }

    /// The number of durations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The sum of all durations.
    pub fn sum(&self) -> Duration {
        self.sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_counts_under_the_first_bound_it_does_not_exceed() {
        let micros = Duration::from_micros;
        let mut times = DurationHistogram::default();
        let bounds: Vec<_> = times.buckets().map(|(bound, _)| bound).collect();
        assert_eq!(bounds[..3], [micros(50), micros(100), micros(200)]);
        assert_eq!(bounds[17..], [micros(50 << 17), Duration::MAX]);
        for took in [Duration::ZERO, micros(50), micros(51), micros(100), micros(50 << 17)] {
            times.add(took);
        }
        times.add(micros((50 << 17) + 1));
        let counts: Vec<_> = times.buckets().map(|(_, count)| count).collect();
        assert_eq!((counts[..2].to_vec(), counts[17..].to_vec()), (vec![2, 2], vec![1, 1]));
        assert_eq!((times.count(), times.sum()), (6, micros(202 + (100 << 17))));
    }
}
