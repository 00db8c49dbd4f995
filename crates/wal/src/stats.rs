//! Numbers for metrics and tools.

use std::time::Duration;

use crate::LogOffset;

/// A snapshot; the numbers belong to one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of the ring.
    pub ring_bytes: u64,
    /// Bytes of the ring that cannot be reused yet: from the durable trim offset to the next
    /// record's offset.
    pub used_bytes: u64,
    /// The bound, at the moment, on bytes that are appended and not durable. It grows on demand.
    pub window_bytes: u64,
    /// Bytes that are appended and not durable.
    pub window_used_bytes: u64,
    /// Block writes in flight.
    pub in_flight: usize,
    /// Blocks that wait for an I/O slot.
    pub sealed_blocks: usize,
    /// Start of the log: the oldest record that is not durably trimmed.
    pub trimmed: LogOffset,
    /// Everything before it is on stable storage.
    pub durable: LogOffset,
    /// The next record's offset.
    pub appended: LogOffset,
    /// Records appended since the WAL was opened.
    pub records: u64,
    /// Bytes of their payloads.
    pub payload_bytes: u64,
    /// Bytes handed to the device in block writes: headers, padding and rewritten pages included.
    pub device_bytes: u64,
    /// Block writes completed. A block that crosses the end of the ring is two writes and counts
    /// once.
    pub block_writes: u64,
    /// Block and header writes completed that carried a flush or FUA: all, or none where the device
    /// is trusted.
    pub flushed_writes: u64,
    /// Header slots written.
    pub header_writes: u64,
    /// Bytes that filled up blocks to a page boundary.
    pub padding_bytes: u64,
    /// How long the device took for each block write, with its flush.
    pub write_times: Times,
    /// The capacity that it is to have, if a request for another one waits or is taking effect.
    pub resize_to_bytes: Option<u64>,
    /// Bytes by which the trim offset has to move before the request that waits takes effect, at
    /// most.
    pub resize_distance_bytes: u64,
    /// Whether the WAL has failed.
    pub failed: bool,
}

/// The first bound of [`Times`]; each is twice the one before.
const FIRST_BOUND: Duration = Duration::from_micros(50);
const BOUNDS: usize = 18;

/// How often something took how long, in steps of a factor of two, from 50 us to 6.6 s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// By the first bound that is not exceeded; the last one is for what exceeds them all.
    counts: [u64; BOUNDS + 1],
    sum: Duration,
}

impl Times {
    pub(crate) fn add(&mut self, took: Duration) {
        let within = Self::bounds().position(|bound| took <= bound);
        self.counts[within.unwrap_or(BOUNDS)] += 1;
        self.sum += took;
    }

    /// How many took at most so long, and longer than the bound before; in ascending order. The
    /// last bound is [`Duration::MAX`].
    pub fn steps(&self) -> impl Iterator<Item = (Duration, u64)> {
        Self::bounds().chain([Duration::MAX]).zip(self.counts)
    }

    fn bounds() -> impl Iterator<Item = Duration> {
        (0..BOUNDS).map(|step| FIRST_BOUND * (1_u32 << step))
    }

    /// How many there were.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// How long all of them took together.
    pub fn sum(&self) -> Duration {
        self.sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_time_is_counted_under_the_first_bound_that_it_does_not_exceed() {
        let micros = Duration::from_micros;
        let mut times = Times::default();
        let bounds: Vec<_> = times.steps().map(|(bound, _)| bound).collect();
        assert_eq!(bounds[..3], [micros(50), micros(100), micros(200)]);
        assert_eq!(bounds[17..], [micros(50 << 17), Duration::MAX]);
        for took in [Duration::ZERO, micros(50), micros(51), micros(100), micros(50 << 17)] {
            times.add(took);
        }
        times.add(micros((50 << 17) + 1));
        let counts: Vec<_> = times.steps().map(|(_, count)| count).collect();
        assert_eq!((counts[..2].to_vec(), counts[17..].to_vec()), (vec![2, 2], vec![1, 1]));
        assert_eq!((times.count(), times.sum()), (6, micros(202 + (100 << 17))));
    }
}
