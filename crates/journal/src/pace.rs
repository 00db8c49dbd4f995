//! How far writers may be ahead of the disk with [`crate::Durability::Interval`]: as far as it can
//! write and sync within the interval. Otherwise all of the memory could wait to be written, and a
//! crash could lose it, for as long as writing it takes.

use std::time::Duration;

use crate::shared::CHUNK_BYTES;

/// Always permitted: the unit of writing, and what arrives meanwhile.
pub(crate) const LEAST_AHEAD_BYTES: usize = 2 * CHUNK_BYTES;

/// The recent speed of a disk.
pub(crate) struct Pace {
    interval: Duration,
    /// How much may wait to be on stable storage.
    ahead_bytes: usize,
}

impl Pace {
    pub(crate) fn new(interval: Duration) -> Self {
        Self { interval, ahead_bytes: LEAST_AHEAD_BYTES }
    }

    /// Returns whether writers have to wait if this much is not on stable storage.
    pub(crate) fn is_exceeded(&self, unsynced_bytes: usize) -> bool {
        unsynced_bytes > self.ahead_bytes
    }

    /// Records that `bytes` were written and synced, and the time this took.
    pub(crate) fn synced(&mut self, bytes: usize, took: Duration) {
        // A small sync says nothing about large ones, since part of its time is constant.
        if bytes < self.ahead_bytes / 2 && took <= self.interval {
            return;
        }
        let fits = bytes as u128 * self.interval.as_nanos() / took.as_nanos().max(1);
        let fits = usize::try_from(fits).unwrap_or(usize::MAX);
        // A gradual increase: a disk absorbs in its cache what it cannot sustain.
        let most = self.ahead_bytes.saturating_mul(2);
        self.ahead_bytes = fits.min(most).max(LEAST_AHEAD_BYTES);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Bytes per second, and the time of an empty sync.
    struct Disk {
        bytes_per_second: u64,
        sync: Duration,
    }

    impl Disk {
        fn takes(&self, bytes: usize) -> Duration {
            let nanos = bytes as u128 * 1_000_000_000 / u128::from(self.bytes_per_second);
            Duration::from_nanos(nanos as u64) + self.sync
        }
    }

    /// Simulates writers faster than any disk: as much as permitted plus a chunk waits until it is
    /// synced. That takes as long as the age of the oldest write.
    fn age_of_oldest(pace: &mut Pace, disk: &Disk) -> Duration {
        let bytes = pace.ahead_bytes + CHUNK_BYTES;
        assert!(pace.is_exceeded(bytes) && !pace.is_exceeded(pace.ahead_bytes));
        let took = disk.takes(bytes);
        pace.synced(bytes, took);
        took
    }

    #[test]
    fn the_unsynced_amount_takes_an_interval() {
        const MILLISECOND: Duration = Duration::from_millis(1);
        let disks = [(20 << 20, 10), (100 << 20, 2), (1 << 30, 1), (6 << 30, 0)]
            .map(|(bytes_per_second, sync)| Disk { bytes_per_second, sync: MILLISECOND * sync });
        for interval in [1, 10, 100, 1000, 60_000].map(|millis| MILLISECOND * millis) {
            let mut pace = Pace::new(interval);
            // From one to the next: the first sync on a slower disk may take longer, by as much as
            // that is slower.
            for disk in disks.iter().chain(disks.iter().rev()) {
                let least = disk.takes(LEAST_AHEAD_BYTES + CHUNK_BYTES);
                // Less than a microsecond is rounding.
                let most = disk.takes(CHUNK_BYTES) + interval + Duration::from_micros(1);
                age_of_oldest(&mut pace, disk);
                for round in 0..40 {
                    let age = age_of_oldest(&mut pace, disk);
                    assert!(age <= most.max(least), "{interval:?}, round {round}: {age:?}");
                }
                // The age is not much smaller than necessary either.
                let age = age_of_oldest(&mut pace, disk);
                let could = interval.saturating_sub(disk.sync);
                assert!(age >= could * 9 / 10, "{interval:?}: {age:?}");
            }
        }
    }

    /// Small syncs of a slow writer say nothing about the disk.
    #[test]
    fn small_syncs_do_not_limit_later_writers() {
        let disk = Disk { bytes_per_second: 1 << 30, sync: Duration::from_millis(1) };
        let mut pace = Pace::new(Duration::from_millis(100));
        for _ in 0..40 {
            age_of_oldest(&mut pace, &disk);
        }
        let ahead_bytes = pace.ahead_bytes;
        (0..40).for_each(|_| pace.synced(4096, disk.takes(4096)));
        assert_eq!(pace.ahead_bytes, ahead_bytes);
        // But a sync that hangs counts even if it is small.
        pace.synced(4096, Duration::from_secs(5));
        assert_eq!(pace.ahead_bytes, LEAST_AHEAD_BYTES);
    }
}
