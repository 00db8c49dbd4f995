//! The clock that expiries are compared with: milliseconds since 1970, by the system clock.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

#[cfg(all(test, not(loom)))]
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) fn now_millis() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, millis_of)
}

fn millis_of(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The clock of an open cache.
#[derive(Default)]
pub(crate) struct Clock {
    /// The time that a test has set; 0: the system clock is used.
    #[cfg(all(test, not(loom)))]
    set_millis: AtomicU64,
}

impl Clock {
    #[inline]
    pub(crate) fn now_millis(&self) -> u64 {
        #[cfg(all(test, not(loom)))]
        match self.set_millis.load(Ordering::SeqCst) {
            0 => {}
            set_millis => return set_millis,
        }
        now_millis()
    }

    /// Returns the time at which `ttl` ends, counted from now.
    pub(crate) fn expiry(&self, ttl: Duration) -> u64 {
        self.now_millis().saturating_add(millis_of(ttl))
    }

    /// Returns the time left until `at_millis`.
    pub(crate) fn left(&self, at_millis: u64) -> Duration {
        Duration::from_millis(at_millis.saturating_sub(self.now_millis()))
    }

    /// Stops the clock, this much later than the time that a test set before; returns the new time.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn advance(&self, millis: u64) -> u64 {
        self.set_millis.fetch_add(millis, Ordering::SeqCst) + millis
    }
}
