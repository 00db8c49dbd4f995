//! The clock that leases are measured with, as an argument.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// A clock that never goes back.
pub trait Clock: Send + Sync {
    /// Returns the time since a moment that stays the same while the clock exists.
    fn now(&self) -> Duration;
}

/// The system's monotonic clock. It stands still while the machine is suspended, so leases live
/// longer by that time.
#[derive(Clone, Debug)]
pub struct SystemClock(Instant);

impl Default for SystemClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}

/// A clock that moves only by [`ManualClock::advance`]. Clones share the time.
#[derive(Clone, Debug, Default)]
pub struct ManualClock(Arc<Mutex<Duration>>);

impl ManualClock {
    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        *self.0.lock() += by;
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        *self.0.lock()
    }
}
