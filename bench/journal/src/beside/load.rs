//! One scenario: a cache with background work, a thread that puts records at a steady rate, and one
//! that reads.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use alluvium_device::PAGE_BYTES;
use alluvium_device::sim::Random;
use alluvium_journal::{Cache, Compression, Lookup, Options, Stats};
use hdrhistogram::Histogram;
use serde::Serialize;

use super::scenario::{LASTING, Reads, Scenario};
use crate::engine::Result;
use crate::system;
use crate::workload::{ENTRY_BYTES, TIMED, Values, key, latencies, record};

/// The size of an entry in its journal, with its header, in whole granules.
const RECORD_BYTES: u64 = (16 + ENTRY_BYTES).next_multiple_of(8);

// The following are in journals' worth of puts:
/// Put before anything is measured.
const FILLED: u64 = 32;
/// Journals in memory, including the newest one and its successor.
const IN_MEMORY: u64 = 8;
/// The last puts, which are in memory in each scenario: what maintenance moves comes in between,
/// and is less than half of it.
const HOT: u64 = 2;
/// The age, or the distance from the end of the fill, of puts that are on disk in each scenario.
const COLD: Range<u64> = IN_MEMORY..20;
/// The disk budget if it is to be used up: includes what is read in [`COLD`], what eviction keeps,
/// and the journals that it keeps free.
const BUDGET: u64 = 32;
/// Unused part of the disk budget otherwise.
const SPARE: u64 = 16;

/// The generation that all values are marked with.
const GENERATION: u8 = 1;
/// The writer sleeps this long, and puts what is due then.
const TICK: Duration = Duration::from_millis(1);
/// It catches up by putting at most this many times as much.
const MOST_DUE: u64 = 10;
/// A journal of 16 MiB takes less than a second.
const COMPRESSED_WITHIN: Duration = Duration::from_secs(300);
const POLL_EVERY: Duration = Duration::from_millis(10);
/// Keys that are looked up in memory between two reads of the disk: journals are not promoted if
/// those in memory are read more.
const BETWEEN: u32 = 16;

/// The settings of all scenarios.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub journal_bytes: u64,
    /// Records put while others are read.
    pub bytes_per_second: u64,
    /// The time of reads before those that count: what is read then was put at that rate, and not
    /// by the fill.
    pub lead: Duration,
    /// The time of the reads that count.
    pub time: Duration,
}

impl Setting {
    fn journal_records(&self) -> u64 {
        (self.journal_bytes - PAGE_BYTES as u64) / RECORD_BYTES
    }

    /// Returns the disk space for everything that is put in a scenario, and what compaction moves
    /// of it.
    pub fn disk_bytes(&self) -> u64 {
        let seconds = (2 * (self.lead + self.time)).as_secs_f64();
        let meanwhile = (self.bytes_per_second as f64 * seconds) as u64;
        let put = (FILLED * self.journal_bytes).saturating_add(meanwhile);
        (put / 4).saturating_mul(5).saturating_add(SPARE * self.journal_bytes)
    }

    /// Returns the options of a cache that is to be filled.
    fn options(&self, scenario: Scenario) -> Result<Options> {
        // Part of the memory is for decompressed data: one more journal, or there would be one
        // less.
        let (compression, for_blocks) = match scenario.has_compressed() {
            true => (Compression::Lz4, 1),
            false => (Compression::None, 0),
        };
        Ok(Options {
            memory_bytes: usize::try_from((IN_MEMORY + for_blocks) * self.journal_bytes)?,
            max_disk_bytes: match scenario {
                Scenario::Eviction => BUDGET * self.journal_bytes,
                _ => self.disk_bytes(),
            },
            journal_bytes: usize::try_from(self.journal_bytes)?,
            compression,
            ..Options::default()
        })
    }
}

/// Number of journals processed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Work {
    pub compacted: u64,
    pub compressed: u64,
    /// Estimated from the records that eviction has processed.
    pub evicted: f64,
    pub promoted: u64,
}

impl Work {
    fn between(before: &Stats, after: &Stats, journal_records: u64) -> Self {
        let processed = |stats: &Stats| stats.evicted + stats.kept;
        Self {
            compacted: after.compacted - before.compacted,
            compressed: after.compressed.saturating_sub(before.compressed) as u64,
            evicted: (processed(after) - processed(before)) as f64 / journal_records as f64,
            promoted: after.promoted - before.promoted,
        }
    }

    /// Returns the journals of a scenario's own work; for the quiet one, of all work that it should
    /// not have.
    pub fn of(&self, scenario: Scenario) -> f64 {
        let (compacted, compressed) = (self.compacted as f64, self.compressed as f64);
        match scenario {
            Scenario::Quiet | Scenario::Compressed => compacted + compressed + self.evicted,
            Scenario::Compaction => compacted,
            Scenario::Compression => compressed,
            Scenario::Eviction => self.evicted,
        }
    }
}

/// A measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub reads: Reads,
    pub scenario: Scenario,
    pub seconds: f64,
    pub reads_per_second: f64,
    /// Number of calls that were timed; the times are theirs.
    pub timed: u64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub p999_us: f64,
    pub longest_us: f64,
    /// The fraction of the keys checked for it whose record was not in memory.
    pub on_disk: f64,
    /// Number of values of another key.
    pub wrong: u64,
    /// Number of keys without a value.
    pub missing: u64,
    /// Background work during the measurement.
    pub work: Work,
    /// Keys and values put during the measurement.
    pub put_bytes_per_second: f64,
    /// Number of times that the writer waited for the disk during the measurement.
    pub stalls: u64,
}

/// The results of a reader.
struct ReaderResults {
    reads: u64,
    latencies: Histogram<u64>,
    /// Number of keys whose location was checked, and of those on disk.
    checked: u64,
    on_disk: u64,
    wrong: u64,
    missing: u64,
}

impl ReaderResults {
    fn new() -> Self {
        Self { reads: 0, latencies: latencies(), checked: 0, on_disk: 0, wrong: 0, missing: 0 }
    }

    #[inline]
    fn count(&mut self, value: Option<&[u8]>, number: u64) {
        self.reads += 1;
        match value {
            Some(value) => self.wrong += u64::from(!Values::matches(value, number, GENERATION)),
            None => self.missing += 1,
        }
    }
}

/// A cache with puts and reads.
struct Load<'a> {
    cache: &'a Cache,
    scenario: Scenario,
    setting: &'a Setting,
    journal_records: u64,
    /// Number of puts that have returned, including the fill; updated from time to time.
    puts: AtomicU64,
}

/// Fills a new cache, and measures its reads while more is put.
pub fn run(scenario: Scenario, setting: &Setting, path: &Path) -> Result<Vec<Row>> {
    let cache = filled(scenario, setting, path)?;
    // Deferred work of the fill is not part of the measurement.
    system::wait_until_idle();
    let rows = Load::new(&cache, scenario, setting).measure()?;
    cache.close()?;
    Ok(rows)
}

/// Returns a new cache in the initial state of a scenario.
fn filled(scenario: Scenario, setting: &Setting, path: &Path) -> Result<Cache> {
    let options = setting.options(scenario)?;
    let cache = Cache::open(path, options.clone())?;
    Load::new(&cache, scenario, setting).fill()?;
    if scenario.has_compressed() {
        compressed(&cache)?;
    }
    if scenario != Scenario::Compressed {
        return Ok(cache);
    }
    // Opened without compression, what is compressed stays so, and what leaves the memory from now
    // on stays plain.
    cache.close()?;
    Ok(Cache::open(path, Options { compression: Compression::None, ..options })?)
}

/// Waits until everything that is not in memory is compressed.
fn compressed(cache: &Cache) -> Result<()> {
    let until = Instant::now() + COMPRESSED_WITHIN;
    loop {
        let stats = cache.stats();
        if stats.compressed + stats.journals_in_memory >= stats.journals {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(format!("compression is not complete after a long time: {stats:?}").into());
        }
        thread::sleep(POLL_EVERY);
    }
}

impl<'a> Load<'a> {
    fn new(cache: &'a Cache, scenario: Scenario, setting: &'a Setting) -> Self {
        let journal_records = setting.journal_records();
        let puts = AtomicU64::new(FILLED * journal_records);
        Self { cache, scenario, setting, journal_records, puts }
    }

    fn put(&self, put: u64, values: &mut Values) -> Result<()> {
        let number = self.scenario.number(put, self.journal_records);
        Ok(self.cache.put(&key(number), values.draw(number, GENERATION))?)
    }

    /// Puts as fast as possible.
    fn fill(&self) -> Result<()> {
        let mut values = Values::new(1);
        let puts = FILLED * self.journal_records;
        for put in 0..puts {
            self.put(put, &mut values)?;
            if put.is_multiple_of(LASTING) {
                let number = self.scenario.number(put, self.journal_records);
                self.cache.get(&key(number))?;
            }
        }
        Ok(self.cache.flush()?)
    }

    /// Measures all reads of this scenario, while another thread puts.
    fn measure(&self) -> Result<Vec<Row>> {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let writer = scope.spawn(|| self.write(&is_over));
            let rows: Result<Vec<Row>> =
                self.scenario.reads().iter().map(|reads| self.row(*reads)).collect();
            is_over.store(true, Ordering::Relaxed);
            writer.join().expect("the writer does not panic")?;
            rows
        })
    }

    /// Puts at the rate until `is_over` is set.
    fn write(&self, is_over: &AtomicBool) -> Result<()> {
        let puts_per_second = self.setting.bytes_per_second as f64 / RECORD_BYTES as f64;
        let most_due = MOST_DUE * ((puts_per_second * TICK.as_secs_f64()) as u64 + 1);
        let mut values = Values::new(2);
        let first = self.puts.load(Ordering::Acquire);
        let began = Instant::now();
        let mut next = first;
        while !is_over.load(Ordering::Relaxed) {
            let due = first + (began.elapsed().as_secs_f64() * puts_per_second) as u64;
            let due = due.clamp(next, next + most_due);
            for put in next..due {
                self.put(put, &mut values)?;
            }
            next = due;
            self.puts.store(next, Ordering::Release);
            thread::sleep(TICK);
        }
        Ok(())
    }

    fn row(&self, reads: Reads) -> Result<Row> {
        let read = |time| match reads {
            Reads::Memory => self.read_memory(time),
            Reads::Disk => self.read_disk(time, |age| self.put_before(age)),
            Reads::Compressed => self.read_disk(time, |age| self.filled_before(age)),
        };
        read(self.setting.lead)?;
        let before = self.cache.stats();
        let began = Instant::now();
        let results = read(self.setting.time)?;
        let seconds = began.elapsed().as_secs_f64();
        let after = self.cache.stats();
        let quantile = |at| results.latencies.value_at_quantile(at) as f64 / 1e3;
        Ok(Row {
            reads,
            scenario: self.scenario,
            seconds,
            reads_per_second: results.reads as f64 / seconds,
            timed: results.latencies.len(),
            p50_us: quantile(0.5),
            p99_us: quantile(0.99),
            p999_us: quantile(0.999),
            longest_us: results.latencies.max() as f64 / 1e3,
            on_disk: results.on_disk as f64 / results.checked.max(1) as f64,
            wrong: results.wrong,
            missing: results.missing,
            work: Work::between(&before, &after, self.journal_records),
            put_bytes_per_second: (after.user_bytes - before.user_bytes) as f64 / seconds,
            stalls: after.stalls - before.stalls,
        })
    }

    /// Returns the number of the key that was put this many puts before the newest one.
    fn put_before(&self, puts: u64) -> u64 {
        let put = self.puts.load(Ordering::Acquire) - 1 - puts;
        self.scenario.number(put, self.journal_records)
    }

    /// Returns the number of the key that was put this many puts before the end of the fill.
    fn filled_before(&self, puts: u64) -> u64 {
        self.scenario.number(FILLED * self.journal_records - 1 - puts, self.journal_records)
    }

    /// Reads the keys that were put last.
    fn read_memory(&self, time: Duration) -> Result<ReaderResults> {
        let hot = HOT * self.journal_records;
        let mut random = Random::new(3);
        let mut results = ReaderResults::new();
        let until = Instant::now() + time;
        loop {
            for _ in 1..TIMED {
                let number = self.put_before(random.below(hot));
                results.count(self.cache.get(&key(number))?.as_deref(), number);
            }
            let number = self.put_before(random.below(hot));
            let key = key(number);
            let began = Instant::now();
            let value = self.cache.get(&key)?;
            let ended = Instant::now();
            record(&mut results.latencies, ended - began);
            results.count(value.as_deref(), number);
            // Not before: the record would then be in the processor's cache.
            results.checked += 1;
            results.on_disk += u64::from(matches!(self.cache.try_get(&key)?, Lookup::OnDisk));
            if ended >= until {
                return Ok(results);
            }
        }
    }

    /// Reads keys whose records are on disk; `number_of` returns the key that was put some puts
    /// ago.
    fn read_disk(&self, time: Duration, number_of: impl Fn(u64) -> u64) -> Result<ReaderResults> {
        let memory = IN_MEMORY * self.journal_records;
        let cold = COLD.start * self.journal_records..COLD.end * self.journal_records;
        let mut random = Random::new(4);
        let mut results = ReaderResults::new();
        let until = Instant::now() + time;
        loop {
            for _ in 0..BETWEEN {
                // Newer ones more often, so that the oldest leaves the memory.
                let part = random.below(memory);
                self.cache.try_get(&key(self.put_before(part * part / memory)))?;
            }
            let number = number_of(cold.start + random.below(cold.end - cold.start));
            let key = key(number);
            results.checked += 1;
            match self.cache.try_get(&key)? {
                Lookup::OnDisk => {
                    results.on_disk += 1;
                    let began = Instant::now();
                    let value = self.cache.get(&key)?;
                    record(&mut results.latencies, began.elapsed());
                    results.count(value.as_deref(), number);
                }
                Lookup::Found(..) => {}
                Lookup::Absent => results.missing += 1,
            }
            if Instant::now() >= until {
                return Ok(results);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::scenario::{REPLACED, SCENARIOS};
    use super::*;

    const SETTING: Setting = Setting {
        journal_bytes: 1 << 20,
        bytes_per_second: 4 << 20,
        lead: Duration::from_millis(10),
        time: Duration::from_millis(100),
    };

    #[test]
    fn journal_records_is_the_capacity_of_a_journal() {
        let directory = tempfile::tempdir().unwrap();
        let options = SETTING.options(Scenario::Quiet).unwrap();
        let cache = Cache::open(directory.path(), options).unwrap();
        let load = Load::new(&cache, Scenario::Quiet, &SETTING);
        let mut values = Values::new(1);
        for put in 0..load.journal_records {
            load.put(put, &mut values).unwrap();
        }
        assert_eq!(cache.stats().journals, 1, "they fit");
        load.put(load.journal_records, &mut values).unwrap();
        assert_eq!(cache.stats().journals, 2, "one more needs a second journal");
        cache.close().unwrap();
    }

    #[test]
    fn each_scenario_has_its_background_work_and_finds_all_keys() {
        for scenario in SCENARIOS {
            let directory = tempfile::tempdir().unwrap();
            let cache = filled(scenario, &SETTING, directory.path()).unwrap();
            let load = Load::new(&cache, scenario, &SETTING);
            let begun = match scenario {
                // Compression happened before.
                Scenario::Compressed => cache.stats(),
                _ => Stats::default(),
            };
            let is_compressed = cache.stats().compressed as u64 > FILLED / 2;
            assert_eq!(is_compressed, scenario.has_compressed(), "{:?}", cache.stats());
            let work = || Work::between(&begun, &cache.stats(), load.journal_records).of(scenario);
            if scenario.is_quiet() {
                assert_eq!(work(), 0.0);
            }
            let until = Instant::now() + Duration::from_secs(60);
            while !scenario.is_quiet() && work() == 0.0 {
                assert!(Instant::now() < until, "{}: {:?}", scenario.text(), cache.stats());
                thread::sleep(Duration::from_millis(1));
            }
            let ages = COLD.start * load.journal_records..COLD.end * load.journal_records;
            let (mut checked, mut on_disk) = (0, 0);
            for age in ages.step_by(97) {
                let found = cache.try_get(&key(load.put_before(age))).unwrap();
                assert!(!matches!(found, Lookup::Absent), "{}: {age}", scenario.text());
                checked += 1;
                on_disk += u32::from(matches!(found, Lookup::OnDisk));
            }
            // Whichever journals are in memory, they are a minority.
            assert!(on_disk * 4 > checked, "{}: {on_disk} of {checked}", scenario.text());
            let rows = load.measure().unwrap();
            let reads: Vec<Reads> = rows.iter().map(|row| row.reads).collect();
            assert_eq!(reads, scenario.reads());
            for row in rows {
                assert!(row.timed > 0 || row.reads != Reads::Memory, "{row:?}");
                assert_eq!((row.wrong, row.missing), (0, 0), "{row:?}");
            }
            if scenario.is_quiet() {
                assert_eq!(work(), 0.0, "what has left the memory meanwhile stays plain");
            }
            cache.close().unwrap();
        }
    }

    #[test]
    fn keys_are_replaced_only_after_they_were_read() {
        let journal_records = SETTING.journal_records();
        let replaced_after = REPLACED * journal_records;
        let mut last = HashMap::new();
        let (mut least, mut replaced) = (u64::MAX, 0);
        for put in 0..3 * replaced_after {
            let number = Scenario::Compaction.number(put, journal_records);
            if let Some(before) = last.insert(number, put) {
                least = least.min(put - before);
                replaced += 1;
            }
        }
        assert!(least >= replaced_after && COLD.end < REPLACED, "{least}");
        // All but the first of three, and for the lasting ones, all but the first two.
        let lasting = replaced_after / LASTING;
        assert_eq!(replaced, 2 * (replaced_after - lasting) + lasting);
    }
}
