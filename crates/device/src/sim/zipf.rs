//! Skewed random numbers for workloads.

use super::Random;

/// YCSB's Zipfian generator, scrambled (Gray et al., "Quickly Generating Billion-Record Synthetic
/// Databases", SIGMOD 1994), with YCSB's exponent of 0.99.
#[derive(Clone, Debug)]
pub struct Zipf {
    items: f64,
    numbers: u64,
    alpha: f64,
    zeta: f64,
    eta: f64,
}

impl Zipf {
    const THETA: f64 = 0.99;

    /// Creates a generator for `0..numbers`. Takes time proportional to `numbers`, a few tenths of
    /// a second for ten million.
    pub fn new(numbers: u64) -> Self {
        let zeta_of = |n: u64| (1..=n).map(|i| (i as f64).powf(-Self::THETA)).sum::<f64>();
        let (items, zeta) = (numbers as f64, zeta_of(numbers));
        let eta = (1.0 - (2.0 / items).powf(1.0 - Self::THETA)) / (1.0 - zeta_of(2) / zeta);
        Self { items, numbers, alpha: 1.0 / (1.0 - Self::THETA), zeta, eta }
    }

    /// Draws a number. Panics if `numbers` is zero.
    pub fn next(&self, random: &mut Random) -> u64 {
        let u = (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let uz = u * self.zeta;
        let rank = if uz < 1.0 {
            0
        } else if uz < 1.0 + 0.5f64.powf(Self::THETA) {
            1
        } else {
            (self.items * (self.eta * u - self.eta + 1.0).powf(self.alpha)) as u64
        };
        // Scramble, so that popular numbers are not adjacent.
        Random::new(rank.min(self.numbers - 1)).next_u64() % self.numbers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zipf_distribution_mostly_draws_few_numbers() {
        let zipf = Zipf::new(10_000);
        let mut random = Random::new(1);
        let mut counts = vec![0; 10_000];
        for _ in 0..100_000 {
            counts[zipf.next(&mut random) as usize] += 1;
        }
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let top: i32 = counts[..100].iter().sum();
        assert!((50_000..65_000).contains(&top), "{top}");
    }
}
