//! Delays between attempts.

use std::time::Duration;

use uuid::Uuid;

/// The delays between the attempts of one task, which grow with each failure.
pub(crate) struct Backoff {
    initial: Duration,
    max: Duration,
    failures: u32,
}

impl Backoff {
    /// `retry` is the first and the longest delay.
    pub(crate) fn new((initial, max): (Duration, Duration)) -> Self {
        Self { initial, max, failures: 0 }
    }

    /// Counts a failure. Returns the delay before the next attempt.
    pub(crate) fn failed(&mut self) -> Duration {
        let longest = self.initial.saturating_mul(1 << self.failures.min(20)).min(self.max);
        self.failures = self.failures.saturating_add(1);
        jittered(longest, Uuid::new_v4().as_u128())
    }

    /// Returns the number of failures in a row.
    pub(crate) fn failures(&self) -> u32 {
        self.failures
    }

    /// Begins again after a success.
    pub(crate) fn succeeded(&mut self) {
        self.failures = 0;
    }
}

/// Returns a duration between half and all of `longest`.
fn jittered(longest: Duration, random: u128) -> Duration {
    let permille = u32::try_from(random % 501).expect("below 501");
    longest / 2 + longest * permille / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_to_the_longest_one() {
        let initial = Duration::from_millis(8);
        let mut backoff = Backoff::new((initial, Duration::from_secs(1)));
        for longest_ms in [8, 16, 32, 64, 128, 256, 512, 1000, 1000] {
            let longest = Duration::from_millis(longest_ms);
            assert!((longest / 2..=longest).contains(&backoff.failed()));
        }
        assert_eq!(backoff.failures(), 9);
        backoff.succeeded();
        assert!(backoff.failed() <= initial);
        let mut backoff = Backoff { failures: u32::MAX, ..backoff };
        assert!(backoff.failed() <= Duration::from_secs(1));
    }

    #[test]
    fn jitter_stays_within_its_bounds() {
        let longest = Duration::from_secs(10);
        assert_eq!(jittered(longest, 0), longest / 2);
        assert_eq!(jittered(longest, 500), longest);
        assert_eq!(jittered(longest, 501), longest / 2);
        for random in 0..2000 {
            assert!((longest / 2..=longest).contains(&jittered(longest, random)));
        }
    }
}
