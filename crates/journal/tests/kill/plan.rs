//! The writes, determined by a seed and the number of the write.

use std::collections::HashMap;
use std::time::Duration;

use alluvium_device::sim::Random;
use alluvium_journal::{Cache, Durability, Options, WhenFull};

use super::Result;

pub(super) const MIB: usize = 1 << 20;
pub(super) const MEMORY_BYTES: usize = 4 * MIB;
pub(super) const INTERVAL: Duration = Duration::from_millis(5);
pub(super) const THREADS: usize = 2;
/// Keys of each thread.
pub(super) const KEYS: u64 = 150;

/// What is written, and to what kind of cache.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    pub(super) durability: Durability,
    /// More is written than the cache may keep; otherwise it keeps everything.
    pub(super) evicts: bool,
    pub(super) seed: u64,
}

/// By key: the number of the write whose value it has.
pub(super) type Left = HashMap<u64, u64>;

impl Plan {
    pub(super) fn name(&self) -> String {
        let durability = match self.durability {
            Durability::None => "none",
            Durability::Interval(_) => "interval",
            Durability::Always => "always",
        };
        format!("{durability} {} {}", self.evicts, self.seed)
    }

    pub(super) fn parse(name: &str) -> Result<Self> {
        let [durability, evicts, seed] = name.split(' ').collect::<Vec<_>>()[..] else {
            return Err("a plan has three words".into());
        };
        let durability = match durability {
            "none" => Durability::None,
            "interval" => Durability::Interval(INTERVAL),
            _ => Durability::Always,
        };
        Ok(Self { durability, evicts: evicts.parse()?, seed: seed.parse()? })
    }

    pub(super) fn options(&self) -> Options {
        let (max_disk_bytes, when_full) = match self.evicts {
            true => (8 << 20, WhenFull::Evict),
            false => (64 << 20, WhenFull::Refuse),
        };
        Options {
            memory_bytes: MEMORY_BYTES,
            journal_bytes: MIB,
            durability: self.durability,
            max_disk_bytes,
            when_full,
            ..Options::default()
        }
    }

    /// Returns the key of a write, and how many words its value has; `None`: it deletes.
    pub(super) fn write(&self, thread: usize, number: u64) -> (u64, Option<usize>) {
        let mut random = Random::new(self.seed ^ ((thread as u64) << 56) ^ (number << 8));
        let key = random.below(KEYS);
        let words = 1 + random.index(if self.evicts { 8000 } else { 80 });
        (key, (!random.chance(0.15)).then_some(words))
    }

    pub(super) fn value(thread: usize, number: u64, words: usize) -> Vec<u8> {
        (((thread as u64) << 56) | number).to_le_bytes().repeat(words)
    }

    pub(super) fn key(thread: usize, key: u64) -> String {
        format!("{thread} {key}")
    }

    /// Returns the minimum length of its record.
    pub(super) fn record_bytes(&self, thread: usize, number: u64) -> u64 {
        self.write(thread, number).1.map_or(32, |words| 16 + words as u64 * 8)
    }

    /// Returns what a cache contains, by thread.
    ///
    /// # Errors
    /// The cache cannot be read, or contains a value that was never written.
    pub(super) fn left_in(&self, cache: &Cache) -> Result<Vec<Left>> {
        let mut left = vec![Left::new(); THREADS];
        for entry in cache.iter() {
            let entry = entry?;
            let name = std::str::from_utf8(entry.key())?;
            let (thread, key) = name.split_once(' ').ok_or("a key that was never written")?;
            let (thread, key): (usize, u64) = (thread.parse()?, key.parse()?);
            let stamp = entry.value().first_chunk::<8>().ok_or("a value that was never written")?;
            let number = u64::from_le_bytes(*stamp) & (u64::MAX >> 8);
            let (of, words) = self.write(thread, number);
            let is_written = of == key
                && words.is_some_and(|words| entry.value() == Self::value(thread, number, words));
            if !is_written {
                return Err(format!("`{name}` has a value that was never written for it").into());
            }
            left[thread].insert(key, number);
        }
        Ok(left)
    }

    /// Applies a write to a model; returns its key.
    pub(super) fn apply(&self, model: &mut Left, thread: usize, number: u64) -> u64 {
        let (key, words) = self.write(thread, number);
        match words {
            Some(_) => drop(model.insert(key, number)),
            None => drop(model.remove(&key)),
        }
        key
    }
}
