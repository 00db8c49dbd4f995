//! What is put and read: the same sequence of keys for each engine.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use alluvium_device::sim::Random;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

pub type Key = [u8; 16];
pub const VALUE_BYTES: usize = 100;
/// The size of a key and its value.
pub const ENTRY_BYTES: u64 = (size_of::<Key>() + VALUE_BYTES) as u64;
/// Keys that are read in one call.
pub const BATCH_KEYS: usize = 32;
/// One operation in this many is timed. A prime, so that it does not coincide with transactions or
/// batches.
pub const TIMED: u32 = 17;

/// A workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Workload {
    /// Put all keys in order, into an empty store.
    Fillseq,
    /// Iterate over all entries; with several threads each sees all.
    Readseq,
    /// Put all keys once in a random order, into an empty store.
    Fillrandom,
    /// Put all keys again, in another order.
    Overwrite,
    /// Read as many random keys.
    Readrandom,
    /// Read as many absent keys, which lie between the present ones.
    Readmissing,
    /// Read as many random keys, 32 in a call if the engine supports it.
    Getmany,
    /// 95% reads and 5% writes of keys with a Zipf distribution (YCSB's, 0.99).
    Mixed,
}

impl Workload {
    pub fn text(self) -> &'static str {
        match self {
            Self::Fillseq => "fillseq",
            Self::Readseq => "readseq",
            Self::Fillrandom => "fillrandom",
            Self::Overwrite => "overwrite",
            Self::Readrandom => "readrandom",
            Self::Readmissing => "readmissing",
            Self::Getmany => "getmany",
            Self::Mixed => "mixed",
        }
    }

    /// Returns whether it puts a value under each key, which later workloads depend on.
    pub fn fills(self) -> bool {
        matches!(self, Self::Fillseq | Self::Fillrandom)
    }

    /// Returns whether it only puts.
    pub fn writes(self) -> bool {
        self.fills() || self == Self::Overwrite
    }

    /// Returns the generation that its values are marked with.
    pub fn generation(self) -> u8 {
        match self {
            Self::Overwrite => 2,
            Self::Mixed => 3,
            _ => 1,
        }
    }
}

fn scattered(number: u64) -> u64 {
    number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn key_of(number: u64, tail: u64) -> Key {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&number.to_be_bytes());
    key[8..].copy_from_slice(&tail.to_be_bytes());
    key
}

/// Returns the key of a number. Keys have the order of their numbers.
pub fn key(number: u64) -> Key {
    key_of(number, scattered(number))
}

/// Returns a neighbour of a key, which is never put.
pub fn missing(number: u64) -> Key {
    key_of(number, !scattered(number))
}

/// Generates values of 100 bytes, half of them compressible as in `db_bench`, that identify their
/// keys.
pub struct Values {
    sample: Vec<u8>,
    /// The position of the next value in the sample: sequential, which the processor prefetches, so
    /// that generating values contributes little to what is measured.
    at: usize,
    value: [u8; VALUE_BYTES],
}

const SAMPLE_BYTES: usize = 1 << 20;
const NUMBER_BYTES: usize = 8;

impl Values {
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut sample = Vec::with_capacity(SAMPLE_BYTES + 2 * VALUE_BYTES);
        while sample.len() < SAMPLE_BYTES + VALUE_BYTES {
            let half: Vec<u8> =
                (0..VALUE_BYTES / 2).map(|_| b' ' + random.below(95) as u8).collect();
            sample.extend_from_slice(&half);
            sample.extend_from_slice(&half);
        }
        Self { sample, at: 0, value: [0; VALUE_BYTES] }
    }

    pub fn draw(&mut self, number: u64, generation: u8) -> &[u8] {
        let at = self.at;
        self.at = (at + VALUE_BYTES) % SAMPLE_BYTES;
        self.value.copy_from_slice(&self.sample[at..at + VALUE_BYTES]);
        self.value[..NUMBER_BYTES].copy_from_slice(&number.to_le_bytes());
        self.value[NUMBER_BYTES] = generation;
        &self.value
    }

    /// Returns whether this is a value of that key, of this generation or a later one.
    pub fn matches(value: &[u8], number: u64, generation: u8) -> bool {
        value.len() == VALUE_BYTES
            && value[..NUMBER_BYTES] == number.to_le_bytes()
            && value[NUMBER_BYTES] >= generation
    }
}

/// The numbers `0..count`, each once, in a pseudo-random order.
#[derive(Clone, Copy)]
pub struct Order {
    count: u64,
    mask: u64,
    shift: u32,
    seed: u64,
}

impl Order {
    /// `count` must be above zero.
    pub fn new(count: u64, seed: u64) -> Self {
        let bits = (u64::BITS - (count - 1).leading_zeros()).max(1);
        let mask = u64::MAX >> (u64::BITS - bits);
        Self { count, mask, shift: (bits / 2).max(1), seed: Random::new(seed).next_u64() }
    }

    /// Returns the number at this position. Each step is a bijection on the numbers of that many
    /// bits, and so is iterating until the number is in range.
    pub fn at(&self, position: u64) -> u64 {
        let mut number = position;
        loop {
            for multiplier in [0xbf58_476d_1ce4_e5b9_u64, 0x94d0_49bb_1331_11eb] {
                number = (number ^ self.seed).wrapping_mul(multiplier) & self.mask;
                number ^= number >> self.shift;
            }
            if number < self.count {
                return number;
            }
        }
    }
}

/// Counts operations, times one of [`TIMED`], and ends the workload at its time limit.
pub struct Sampler<'a> {
    pub latencies: Histogram<u64>,
    pub operations: u64,
    /// It was ended by the time limit.
    pub is_over: bool,
    left: u32,
    started: Option<Instant>,
    deadline: Instant,
    progress: &'a AtomicU64,
}

/// A minute, in ns.
const MOST_NS: u64 = 60_000_000_000;

/// Returns an empty histogram of ns, up to a minute.
pub fn latencies() -> Histogram<u64> {
    Histogram::new_with_bounds(1, MOST_NS, 3).expect("valid bounds")
}

/// Records the time of an operation.
#[inline]
pub fn record(latencies: &mut Histogram<u64>, took: Duration) {
    latencies.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
}

impl<'a> Sampler<'a> {
    pub fn new(limit: Duration, progress: &'a AtomicU64) -> Self {
        Self {
            latencies: latencies(),
            operations: 0,
            is_over: false,
            left: TIMED,
            started: None,
            deadline: Instant::now() + limit,
            progress,
        }
    }

    /// Starts the time.
    pub fn begin(&mut self, limit: Duration) {
        self.deadline = Instant::now() + limit;
    }

    /// Ends the previous operation and begins one of this many keys; false if none should begin.
    #[inline]
    pub fn tick(&mut self, keys: u64) -> bool {
        if let Some(started) = self.started.take() {
            self.sampled(started);
        }
        if self.is_over {
            return false;
        }
        self.operations += keys;
        self.left -= 1;
        if self.left == 0 {
            self.left = TIMED;
            self.started = Some(Instant::now());
        }
        true
    }

    fn sampled(&mut self, started: Instant) {
        let now = Instant::now();
        record(&mut self.latencies, now - started);
        self.progress.store(self.operations, Ordering::Relaxed);
        self.is_over = now >= self.deadline;
    }
}

/// The puts of one thread. The time between two draws is that of a put, including the beginning and
/// end of a transaction between them.
pub struct Puts<'a> {
    pub sampler: Sampler<'a>,
    values: Values,
    order: Option<Order>,
    generation: u8,
    next: u64,
    step: u64,
    end: u64,
}

impl<'a> Puts<'a> {
    /// Creates the puts of the thread with this number of `threads` threads, which puts each
    /// `threads`th of `entries` keys.
    pub fn new(
        workload: Workload,
        entries: u64,
        thread: u64,
        threads: u64,
        sampler: Sampler<'a>,
    ) -> Self {
        let generation = workload.generation();
        Self {
            sampler,
            values: Values::new(thread),
            order: (workload != Workload::Fillseq).then(|| Order::new(entries, generation.into())),
            generation,
            next: thread,
            step: threads,
            end: entries,
        }
    }

    /// Returns the next key and value; none at the end.
    #[inline]
    pub fn draw(&mut self) -> Option<(Key, &[u8])> {
        if self.next >= self.end || !self.sampler.tick(1) {
            return None;
        }
        let number = self.order.map_or(self.next, |order| order.at(self.next));
        self.next += self.step;
        Some((key(number), self.values.draw(number, self.generation)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_the_order_of_their_numbers_and_missing_ones_are_between() {
        for number in 0..1000 {
            assert!(key(number) < key(number + 1));
            assert_ne!(key(number), missing(number));
            assert!(missing(number + 1) > key(number) && missing(number) < key(number + 1));
        }
    }

    #[test]
    fn values_identify_their_keys() {
        let mut values = Values::new(1);
        let value = values.draw(7, 2).to_vec();
        assert!(Values::matches(&value, 7, 1) && Values::matches(&value, 7, 2));
        assert!(!Values::matches(&value, 8, 2) && !Values::matches(&value, 7, 3));
        assert!(!Values::matches(&value[..99], 7, 2));
        assert_ne!(values.draw(7, 2), value, "another part of the sample");
    }

    #[test]
    fn an_order_has_each_number_once() {
        for count in [1, 2, 3, 17, 1000, 1024, 4097] {
            for seed in 0..3 {
                let order = Order::new(count, seed);
                let mut seen: Vec<u64> = (0..count).map(|position| order.at(position)).collect();
                let neighbours = seen.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count();
                assert!(count < 1000 || neighbours < 50, "{neighbours} of {count}");
                seen.sort_unstable();
                assert!(seen.into_iter().eq(0..count));
            }
        }
    }

    #[test]
    fn threads_share_the_keys() {
        let progress = AtomicU64::new(0);
        let mut keys = Vec::new();
        for thread in 0..3 {
            let sampler = Sampler::new(Duration::from_secs(600), &progress);
            let mut puts = Puts::new(Workload::Fillrandom, 100, thread, 3, sampler);
            while let Some((key, value)) = puts.draw() {
                let number = u64::from_be_bytes(key[..8].try_into().unwrap());
                assert!(Values::matches(value, number, 1));
                keys.push(number);
            }
            assert!(!puts.sampler.is_over);
            assert!(!puts.sampler.latencies.is_empty());
        }
        keys.sort_unstable();
        assert!(keys.into_iter().eq(0..100));
    }

    #[test]
    fn puts_end_at_the_time_limit() {
        let progress = AtomicU64::new(0);
        let sampler = Sampler::new(Duration::ZERO, &progress);
        let mut puts = Puts::new(Workload::Overwrite, 1_000_000, 0, 1, sampler);
        let mut drawn = 0;
        while puts.draw().is_some() {
            drawn += 1;
        }
        assert_eq!(drawn, u64::from(TIMED), "the first sample looks at the clock");
        assert!(puts.sampler.is_over);
        assert_eq!((puts.sampler.operations, progress.load(Ordering::Relaxed)), (drawn, drawn));
    }
}
