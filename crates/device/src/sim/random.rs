//! The random number generator of simulations.

/// SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014):
/// a counter in steps of the golden ratio, each value mixed by two multiplications. Small, fast,
/// and without weak seeds. Not for secrets.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a generator. The same seed gives the same sequence, on every machine and in every
    /// build.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number in `0..bound`. Panics if `bound` is zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "nothing is below zero");
        // The high word of the product; its bias of bound / 2^64 does not matter here.
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// Returns an index into a sequence of `len` elements. Panics if `len` is zero.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// Returns true with `probability`. If that is zero, no number is drawn, so that disabling a
    /// fault leaves the rest of a run as it was before the fault existed.
    pub fn chance(&mut self, probability: f64) -> bool {
        // An f64 holds 53 bits exactly: a number in 0 <= x < 1.
        probability > 0.0
            && ((self.next_u64() >> 11) as f64) * (1.0 / (1u64 << 53) as f64) < probability
    }
}
