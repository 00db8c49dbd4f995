//! A random number generator that is reproducible from a seed: SplitMix64. The tests must not
//! depend on the system's.

use std::time::Duration;

/// Pseudo-random numbers from a seed.
pub(crate) struct Rng(u64);

impl Rng {
    /// Two generators with the same seed yield the same numbers.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which must not be 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// A duration from `low` up to but not including `high`, in whole milliseconds.
    pub(crate) fn duration(&mut self, low: Duration, high: Duration) -> Duration {
        let span = (high - low).as_millis() as u64;
        low + Duration::from_millis(self.below(span.max(1)))
    }
}
