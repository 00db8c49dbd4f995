//! Compares the index of the journal cache with concurrent maps from 128 bits to 32, which is what
//! a position in a journal takes: decision 0013.

use std::hash::{BuildHasherDefault, Hasher};
use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use alluvium_device::sim::Random;
use alluvium_journal::directory::KeyDirectory;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::Options;
use crate::engine::Result;
use crate::report::{Line, Table, median};
use crate::system;

/// Reads of each thread.
const READS: u64 = 5_000_000;

/// A map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Name {
    Journal,
    Dashmap,
    Papaya,
    Scc,
}

const ALL: [Name; 4] = [Name::Journal, Name::Dashmap, Name::Papaya, Name::Scc];

impl Name {
    fn text(self) -> &'static str {
        match self {
            Self::Journal => "the index",
            Self::Dashmap => "dashmap",
            Self::Papaya => "papaya",
            Self::Scc => "scc",
        }
    }
}

/// A hasher for keys that are hashes already.
#[derive(Clone, Copy, Default)]
struct Folded(u64);

impl Hasher for Folded {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for eight in bytes.chunks_exact(8) {
            self.0 ^= u64::from_le_bytes(eight.try_into().expect("eight"));
        }
    }

    fn write_u128(&mut self, key: u128) {
        self.0 ^= (key >> 64) as u64 ^ key as u64;
    }
}

type Hash = BuildHasherDefault<Folded>;

trait Map: Sync {
    fn put(&self, key: u128, number: u32) -> Result<()>;
    fn get(&self, key: u128) -> Option<u32>;
}

impl Map for KeyDirectory {
    fn put(&self, key: u128, number: u32) -> Result<()> {
        Ok(Self::put(self, key, number)?)
    }

    fn get(&self, key: u128) -> Option<u32> {
        Self::get(self, key)
    }
}

impl Map for dashmap::DashMap<u128, u32, Hash> {
    fn put(&self, key: u128, number: u32) -> Result<()> {
        self.insert(key, number);
        Ok(())
    }

    fn get(&self, key: u128) -> Option<u32> {
        Self::get(self, &key).map(|number| *number)
    }
}

impl Map for papaya::HashMap<u128, u32, Hash> {
    fn put(&self, key: u128, number: u32) -> Result<()> {
        self.pin().insert(key, number);
        Ok(())
    }

    fn get(&self, key: u128) -> Option<u32> {
        self.pin().get(&key).copied()
    }
}

impl Map for scc::HashMap<u128, u32, Hash> {
    fn put(&self, key: u128, number: u32) -> Result<()> {
        self.upsert_sync(key, number);
        Ok(())
    }

    fn get(&self, key: u128) -> Option<u32> {
        self.read_sync(&key, |_, number| *number)
    }
}

/// Returns the key of a number: a bijection, so that keys are different (SplitMix64's finalizer,
/// for each half).
fn key(number: u64) -> u128 {
    let mix = |seed: u64| {
        let mut word = number.wrapping_add(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    };
    u128::from(mix(1)) << 64 | u128::from(mix(2))
}

/// The figures of one process: us of wall-clock time for each call, as seen by the calling thread,
/// and bytes for each entry.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Figures {
    put_us: f64,
    hit_us: f64,
    miss_us: f64,
    entry_bytes: f64,
}

/// Returns the time of each of the `calls` calls of each thread, in us.
fn timed(threads: u64, calls: u64, call: impl Fn(u64) -> Result<()> + Sync) -> Result<f64> {
    let barrier = Barrier::new(threads as usize + 1);
    thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|thread| {
                let (barrier, call) = (&barrier, &call);
                scope.spawn(move || {
                    barrier.wait();
                    call(thread).map_err(|error| error.to_string())
                })
            })
            .collect();
        barrier.wait();
        let begun = Instant::now();
        for thread in running {
            thread.join().expect("it does not panic")?;
        }
        Ok(begun.elapsed().as_secs_f64() * 1e6 / calls as f64)
    })
}

fn measure(map: &impl Map, entries: u64, threads: u64) -> Result<Figures> {
    let empty_bytes = system::resident()?.now_bytes;
    let each = entries / threads;
    let put_us = timed(threads, each, |thread| {
        (thread * each..(thread + 1) * each)
            .try_for_each(|number| map.put(key(number), number as u32))
    })?;
    let entry_bytes = (system::resident()?.now_bytes - empty_bytes) as f64 / entries as f64;
    let read = |first: u64, is_there: bool| {
        timed(threads, READS, |thread| {
            let mut random = Random::new(thread);
            for _ in 0..READS {
                let number = random.below(each * threads);
                if map.get(key(first + number)) != is_there.then_some(number as u32) {
                    return Err(format!("a wrong answer for {number}").into());
                }
            }
            Ok(())
        })
    };
    let hit_us = read(0, true)?;
    let miss_us = read(entries, false)?;
    Ok(Figures { put_us, hit_us, miss_us, entry_bytes })
}

/// Runs in a process of its own, whose memory is the map's.
pub fn child(name: Name, options: &Options) -> Result<()> {
    let (entries, threads) = (options.entries, options.threads.first().copied().unwrap_or(1));
    let figures = match name {
        Name::Journal => measure(&KeyDirectory::new()?, entries, threads),
        Name::Dashmap => measure(&dashmap::DashMap::with_hasher(Hash::default()), entries, threads),
        Name::Papaya => measure(&papaya::HashMap::with_hasher(Hash::default()), entries, threads),
        Name::Scc => measure(&scc::HashMap::with_hasher(Hash::default()), entries, threads),
    }?;
    println!("{}", serde_json::to_string(&figures)?);
    Ok(())
}

pub fn run(options: &Options) -> Result<()> {
    let threads = if options.threads.is_empty() { vec![1, 2] } else { options.threads.clone() };
    let head = vec!["threads", "map", "us/put", "us/get, present", "us/get, absent", "bytes/entry"];
    let mut lines = Vec::new();
    for threads in threads {
        let mut results: Vec<(Name, Figures)> = Vec::new();
        for _ in 0..options.rounds() {
            for name in ALL {
                let name_of = name.to_possible_value().expect("none is hidden");
                if options.is_measurement() {
                    system::wait_for_memory_reporting();
                }
                let output = Command::new(std::env::current_exe()?)
                    .args(["--index-child", name_of.get_name()])
                    .args(["--threads", &threads.to_string()])
                    .args(["--entries", &options.entries.to_string()])
                    .stderr(Stdio::inherit())
                    .output()?;
                if !output.status.success() {
                    return Err(format!("{}: {}", name.text(), output.status).into());
                }
                results.push((name, serde_json::from_slice(&output.stdout)?));
            }
        }
        for name in ALL {
            let cell = |figure: fn(&Figures) -> f64, digits: usize| {
                let mine = results.iter().filter(|(of, _)| *of == name).map(|(_, all)| figure(all));
                median(mine).map_or_else(|| "-".into(), |value| format!("{value:.digits$}"))
            };
            lines.push(Line::Cells(vec![
                threads.to_string(),
                name.text().into(),
                cell(|all| all.put_us, 3),
                cell(|all| all.hit_us, 3),
                cell(|all| all.miss_us, 3),
                cell(|all| all.entry_bytes, 1),
            ]));
        }
    }
    let table = Table { head, lines };
    println!("{} entries, medians of {} rounds", options.entries, options.rounds());
    println!("{}", table.text());
    std::fs::create_dir_all(&options.out)?;
    std::fs::write(options.out.join("index.md"), table.markdown())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_maps_return_right_answers() {
        let check = |map: &dyn Fn() -> Result<Figures>| {
            let figures = map().unwrap();
            assert!(figures.put_us > 0.0 && figures.hit_us > 0.0, "{figures:?}");
        };
        let entries = 10_000;
        check(&|| measure(&KeyDirectory::new()?, entries, 2));
        check(&|| measure(&dashmap::DashMap::with_hasher(Hash::default()), entries, 2));
        check(&|| measure(&papaya::HashMap::with_hasher(Hash::default()), entries, 2));
        check(&|| measure(&scc::HashMap::with_hasher(Hash::default()), entries, 2));
    }
}
