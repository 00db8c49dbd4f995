//! `alluvium cache bench`: the workloads of LevelDB's `db_bench`, on a cache of its own.

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use alluvium_device::sim::{Random, Zipf};
use alluvium_journal::Cache;
use clap::{Args, ValueEnum};
use hdrhistogram::Histogram;
use rustix::time::{ClockId, clock_gettime};

use super::memory;
use super::options::CacheArgs;
use crate::output::{self, Failure, Table};
use crate::units::{Size, about};

/// Measure a journal cache in a directory of its own, which is removed at the end.
///
/// Keys have 16 bytes. CPU is the processor time of the threads that call the cache, without its
/// background threads; time is wall-clock time. One call in 16 is timed for latencies; getmany has
/// none.
#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    /// An empty or new directory, on the disk to be measured.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Number of keys, at least one for each thread.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 10_000_000,
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    keys: u64,
    /// Bytes of a value.
    #[arg(long, value_name = "SIZE", default_value_t = Size { bytes: 100 })]
    value: Size,
    /// Threads that call the cache.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..=256)
    )]
    threads: u16,
    #[command(flatten)]
    cache: CacheArgs,
    /// What to measure, in this order; reads need a fillseq or fillrandom before them. Can be given
    /// several times. Default: all.
    #[arg(long, value_enum, value_name = "WORKLOAD")]
    workload: Vec<Workload>,
    /// Print JSON. Default: a table.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Workload {
    /// Write all keys in order, into an empty cache.
    Fillseq,
    /// Write as many random keys, into an empty cache.
    Fillrandom,
    /// Write as many random keys again.
    Overwrite,
    /// Iterate over all entries.
    Readseq,
    /// Read as many random keys.
    Readrandom,
    /// Read as many random keys, 32 at a time.
    Getmany,
    /// Read as many absent keys.
    Readmissing,
    /// 95% reads and 5% writes of keys with a Zipf distribution (YCSB's, 0.99).
    Mixed,
    /// Close the cache, and open it again.
    Reopen,
}

const ALL: [Workload; 9] = [
    Workload::Fillseq,
    Workload::Readseq,
    Workload::Fillrandom,
    Workload::Overwrite,
    Workload::Readrandom,
    Workload::Getmany,
    Workload::Readmissing,
    Workload::Mixed,
    Workload::Reopen,
];

/// All keys of the default load are in memory.
const DEFAULT_MEMORY: Size = Size::gib(3);
/// One call in this many is timed.
const TIMING_INTERVAL: u64 = 16;
const BATCH: usize = 32;
/// Values are slices of this many bytes, plus the length of a value.
const SAMPLE_BYTES: usize = 1 << 20;
const KEY_BYTES: usize = 16;
/// More than any disk has: such a request is a mistake, and would not end.
const MAX_BYTES: Size = Size::tib(256);

/// The measurement of a workload, in total for all threads.
#[derive(Default)]
struct Measurement {
    operations: u64,
    cpu: Duration,
    elapsed: Duration,
    latencies: Option<Histogram<u64>>,
}

impl Measurement {
    fn per_operation_us(&self, time: Duration) -> f64 {
        time.as_secs_f64() * 1e6 / self.operations.max(1) as f64
    }

    fn quantile_us(&self, quantile: f64) -> Option<f64> {
        let latencies = self.latencies.as_ref().filter(|it| !it.is_empty())?;
        Some(latencies.value_at_quantile(quantile) as f64 / 1e3)
    }
}

impl BenchArgs {
    /// Returns the error in the arguments, if there is one.
    fn usage_error(&self) -> Option<String> {
        let Self { keys, value, threads, .. } = self;
        if *keys < u64::from(*threads) {
            return Some(format!(
                "--keys {keys} are fewer than --threads {threads}: some threads would be idle"
            ));
        }
        let journal = self.cache.journal;
        if *value >= journal {
            return Some(format!(
                "--value {value} does not fit into a journal: --journal is {journal}"
            ));
        }
        let bytes = value.bytes.saturating_add(KEY_BYTES as u64).saturating_mul(*keys);
        (bytes > MAX_BYTES.bytes).then(|| {
            format!(
                "--keys {keys} with --value {value} are more than {MAX_BYTES}, which no disk has"
            )
        })
    }
}

/// Runs `alluvium cache bench`.
///
/// # Errors
/// Invalid arguments, the directory is not empty, or the cache fails.
pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    if let Some(error) = args.usage_error() {
        return Err(Failure::Usage(error));
    }
    memory::check(args.cache.memory(DEFAULT_MEMORY));
    if args.dir.exists() {
        let mut entries = args
            .dir
            .read_dir()
            .map_err(|error| Failure::Usage(format!("{}: {error}", args.dir.display())))?;
        if entries.next().is_some() {
            return Err(Failure::Usage(format!(
                "{} is not empty; the bench removes its directory at the end",
                args.dir.display()
            )));
        }
    }
    let removed = RemoveAtEnd(&args.dir);
    let workloads = if args.workload.is_empty() { &ALL[..] } else { &args.workload };
    let mut bench = Bench { args, cache: None };
    let mut table = Table::of_numbers(&[
        "workload",
        "operations",
        "us/op",
        "CPU us/op",
        "p50 us",
        "p99 us",
        "p99.9 us",
        "stalls",
        "on disk",
        "compressed",
        "memory",
    ]);
    let mut rows = Vec::new();
    for workload in workloads {
        let measured = bench.measure(*workload)?;
        let stats = bench.cache()?.stats();
        let quantile =
            |at| measured.quantile_us(at).map_or_else(|| "-".into(), |us| format!("{us:.2}"));
        let name =
            workload.to_possible_value().map_or_else(String::new, |it| it.get_name().to_owned());
        table.row(vec![
            name.clone(),
            measured.operations.to_string(),
            format!("{:.3}", measured.per_operation_us(measured.elapsed)),
            format!("{:.3}", measured.per_operation_us(measured.cpu)),
            quantile(0.5),
            quantile(0.99),
            quantile(0.999),
            stats.stalls.to_string(),
            about(stats.disk_bytes),
            match stats.compressed {
                0 => "-".into(),
                _ => format!(
                    "{} to {}",
                    about(stats.uncompressed_bytes),
                    about(stats.compressed_bytes)
                ),
            },
            about((stats.memory_bytes + stats.table_bytes + stats.index_bytes) as u64),
        ]);
        rows.push(serde_json::json!({
            "workload": name,
            "operations": measured.operations,
            "us_per_operation": measured.per_operation_us(measured.elapsed),
            "cpu_us_per_operation": measured.per_operation_us(measured.cpu),
            "p50_us": measured.quantile_us(0.5),
            "p99_us": measured.quantile_us(0.99),
            "p999_us": measured.quantile_us(0.999),
            "stalls": stats.stalls,
            "disk_bytes": stats.disk_bytes,
            "compressed": stats.compressed,
            "compressed_bytes": stats.compressed_bytes,
            "uncompressed_bytes": stats.uncompressed_bytes,
            "promoted": stats.promoted,
            "memory_bytes": stats.memory_bytes,
            "index_bytes": stats.index_bytes,
            "block_bytes": stats.block_bytes,
            "table_bytes": stats.table_bytes,
            "written_bytes": stats.written_bytes,
            "user_bytes": stats.user_bytes,
        }));
        if !args.json {
            tracing::info!(target: "alluvium::progress", "{name}: done");
        }
    }
    bench.close()?;
    drop(removed);
    match args.json {
        true => output::json(&rows),
        false => output::line(table),
    }
}

/// Removes what the bench has written when dropped.
struct RemoveAtEnd<'a>(&'a Path);

impl Drop for RemoveAtEnd<'_> {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(self.0)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!("{}: {error}", self.0.display());
        }
    }
}

struct Bench<'a> {
    args: &'a BenchArgs,
    cache: Option<Cache>,
}

impl Bench<'_> {
    fn cache(&mut self) -> Result<&Cache, Failure> {
        if self.cache.is_none() {
            self.cache = Some(self.open()?);
        }
        Ok(self.cache.as_ref().expect("opened above"))
    }

    fn open(&self) -> Result<Cache, Failure> {
        Ok(Cache::open(&self.args.dir, self.args.cache.options(DEFAULT_MEMORY))?)
    }

    fn close(&mut self) -> Result<(), Failure> {
        self.cache.take().map_or(Ok(()), Cache::close)?;
        Ok(())
    }

    fn measure(&mut self, workload: Workload) -> Result<Measurement, Failure> {
        if matches!(workload, Workload::Fillseq | Workload::Fillrandom) {
            self.close()?;
            drop(RemoveAtEnd(&self.args.dir));
        }
        if workload == Workload::Reopen {
            self.cache()?;
            self.close()?;
            let (started, cpu) = (Instant::now(), cpu_time());
            self.cache()?;
            return Ok(Measurement {
                operations: 1,
                cpu: cpu_time() - cpu,
                elapsed: started.elapsed(),
                latencies: None,
            });
        }
        let args = self.args;
        let cache = self.cache()?;
        // After opening, which checks the size of a journal, and so of a value.
        let values = sample(&mut Random::new(0x5eed), SAMPLE_BYTES + args.value.in_memory());
        let values = &values[..];
        let started = Instant::now();
        let measured = thread::scope(|scope| {
            let threads = u64::from(args.threads);
            let run =
                |thread| scope.spawn(move || run_thread(cache, args, values, workload, thread));
            let running: Vec<_> = (0..threads).map(run).collect();
            let mut all = Measurement::default();
            for thread in running {
                let measured = thread.join().expect("a workload does not panic")?;
                all.operations += measured.operations;
                all.cpu += measured.cpu;
                match (&mut all.latencies, measured.latencies) {
                    (Some(all), Some(latencies)) => all.add(latencies).expect("the same bounds"),
                    (none, latencies) => *none = latencies,
                }
            }
            Ok::<_, Failure>(all)
        })?;
        Ok(Measurement { elapsed: started.elapsed(), ..measured })
    }
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Returns sixteen hexadecimal digits.
fn key(number: u64) -> [u8; KEY_BYTES] {
    let mut key = [0; KEY_BYTES];
    for (at, digit) in key.iter_mut().enumerate() {
        *digit = b"0123456789abcdef"[(number >> (60 - at * 4) & 15) as usize];
    }
    key
}

/// Returns bytes to take values from: half of them compressible, as in `db_bench`.
fn sample(random: &mut Random, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 100);
    while bytes.len() < len {
        let raw: Vec<u8> = (0..50).map(|_| b' ' + (random.below(95)) as u8).collect();
        bytes.extend_from_slice(&raw);
        bytes.extend_from_slice(&raw);
    }
    bytes
}

/// Runs one thread, with slices of `values`.
fn run_thread(
    cache: &Cache,
    args: &BenchArgs,
    values: &[u8],
    workload: Workload,
    thread: u64,
) -> Result<Measurement, Failure> {
    let mut random = Random::new(0x5eed + thread);
    let threads = u64::from(args.threads);
    let operations = args.keys / threads;
    let value_len = args.value.in_memory();
    let value_at = |random: &mut Random| {
        let at = random.index(SAMPLE_BYTES);
        &values[at..at + value_len]
    };
    let zipf = (workload == Workload::Mixed).then(|| Zipf::new(args.keys));
    let mut latencies =
        Histogram::<u64>::new_with_bounds(1, 60_000_000_000, 3).expect("valid bounds");
    let mut batch = Vec::with_capacity(BATCH);
    let mut entries = cache.iter();
    let (mut done, mut read_bytes) = (0, 0);
    let cpu = cpu_time();
    while done < operations {
        let started = done.is_multiple_of(TIMING_INTERVAL).then(Instant::now);
        match workload {
            Workload::Fillseq => cache.put(&key(done * threads + thread), value_at(&mut random))?,
            Workload::Fillrandom | Workload::Overwrite => {
                cache.put(&key(random.below(args.keys)), value_at(&mut random))?;
            }
            Workload::Readrandom => {
                read_bytes +=
                    cache.get(&key(random.below(args.keys)))?.map_or(0, |value| value.len());
            }
            Workload::Readmissing => {
                let mut key = key(random.below(args.keys));
                key[15] = b'.';
                read_bytes += cache.get(&key)?.map_or(0, |value| value.len());
            }
            Workload::Getmany => {
                batch.push(key(random.below(args.keys)));
                if batch.len() == BATCH || done + 1 == operations {
                    for value in cache.get_many(&batch) {
                        read_bytes += value?.map_or(0, |value| value.len());
                    }
                    batch.clear();
                }
            }
            Workload::Mixed => {
                let number = zipf.as_ref().map_or(0, |zipf| zipf.next(&mut random));
                if random.below(100) < 5 {
                    cache.put(&key(number), value_at(&mut random))?;
                } else {
                    read_bytes += cache.get(&key(number))?.map_or(0, |value| value.len());
                }
            }
            Workload::Readseq => match entries.next() {
                Some(entry) => read_bytes += entry?.value().len(),
                None => break,
            },
            Workload::Reopen => unreachable!("not by threads"),
        }
        // All but the last of 32 keys are only collected here, so the latency of such a step would
        // be meaningless.
        if let Some(started) = started
            && !matches!(workload, Workload::Getmany)
        {
            latencies
                .saturating_record(u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX));
        }
        done += 1;
    }
    black_box(read_bytes);
    let latencies = (workload != Workload::Getmany).then_some(latencies);
    Ok(Measurement { operations: done, cpu: cpu_time() - cpu, elapsed: Duration::ZERO, latencies })
}

#[cfg(test)]
mod tests {
    use alluvium_journal::{Compression, Durability, WhenFull};
    use clap::Parser;

    use super::*;

    #[test]
    fn keys_are_sixteen_digits_in_order() {
        assert_eq!(&key(0x00ab), b"00000000000000ab");
        assert!((0..1000).all(|number| key(number) < key(number + 1)));
    }

    #[test]
    fn every_workload_runs() {
        let directory = tempfile::tempdir().unwrap();
        let args = BenchArgs {
            dir: directory.path().join("cache"),
            keys: 5000,
            value: Size { bytes: 100 },
            threads: 2,
            cache: CacheArgs {
                memory: Some(Size::mib(8)),
                max_disk: Size::mib(64),
                journal: Size::mib(1),
                durability: Durability::None,
                when_full: WhenFull::Evict,
                compression: Compression::Lz4,
            },
            workload: vec![],
            json: true,
        };
        run(&args).unwrap();
        assert!(!args.dir.exists());
        std::fs::create_dir(&args.dir).unwrap();
        std::fs::write(args.dir.join("mine"), "").unwrap();
        assert!(matches!(run(&args), Err(Failure::Usage(_))));
        assert!(args.dir.join("mine").exists());
    }

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: BenchArgs,
    }

    #[test]
    fn invalid_sizes_and_counts_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let dir = directory.path().join("cache");
        let parsed = |flags: &[&str]| {
            let dir = ["bench", "--dir", dir.to_str().unwrap()];
            Cli::try_parse_from([&dir[..], flags].concat()).map(|cli| cli.args)
        };
        for flags in [["--keys", "0"], ["--threads", "0"]] {
            let error = parsed(&flags).unwrap_err().to_string();
            assert!(error.contains(flags[0]), "{error}");
        }
        let args = parsed(&["--keys", "3", "--threads", "4"]).unwrap();
        let Err(Failure::Usage(error)) = run(&args) else { panic!("nothing is measured") };
        assert!(error.contains("--keys 3") && error.contains("--threads 4"), "{error}");
        // Values that do not fit into a journal, or that no disk can hold.
        for (flags, expected) in [
            (["--value", "1TiB"], "--value 1TiB does not fit into a journal"),
            (["--value", "128MiB"], "--journal is 128MiB"),
            (["--keys", "3000000000000"], "with --value 100B are more than 256TiB"),
            (["--keys", "18446744073709551615"], "are more than 256TiB"),
        ] {
            let args = parsed(&flags).unwrap();
            let Err(Failure::Usage(error)) = run(&args) else { panic!("{flags:?}") };
            assert!(error.contains(expected), "{error}");
        }
        assert!(!dir.exists());
    }
}
