//! Delays between attempts.

use std::time::Duration;

use uuid::Uuid;

/// Returns the delay after this number of earlier failures.
pub(crate) fn backoff(initial: Duration, max: Duration, failures: u32) -> Duration {
    let longest = initial.saturating_mul(1 << failures.min(20)).min(max);
    jittered(longest, Uuid::new_v4().as_u128())
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
