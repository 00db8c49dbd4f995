//! What object compaction costs producers: `cargo bench -p alluvium-stream --bench compaction --
//! --dir DIRECTORY`.
//!
//! A store is filled with a backlog of small objects. Each round opens two copies of it, one with
//! compaction and one without, in alternating order, and appends to them at a steady rate, with an
//! upload each second. Latency counts from when a batch was due until it is durable.
#![allow(missing_docs)]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use alluvium_device::{Durability, Geometry, OpenOptions, SharedDevice};
use alluvium_stream::{
    AppendError, Change, KIND_LOG, NewBatch, Options, Stats, Store, StreamEpoch, StreamOffset,
    StreamWriter, local_objects,
};
use alluvium_wal::{FormatOptions, Wal};
use bytes::Bytes;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

const STREAMS: u32 = 16;
const BATCH_BYTES: usize = 4 << 10;
const OBJECT_BYTES: u64 = 1 << 20;
const WAL_BYTES: u64 = 160 << 20;
const MIB: u64 = 1 << 20;
/// Interval of checks whether compaction has made requests to the object store.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// The first part of each measurement, which is not counted.
const WARMUP: Duration = Duration::from_millis(500);

struct Arguments {
    directory: PathBuf,
    rounds: u32,
    measured: Duration,
    backlog_bytes: u64,
    bytes_per_s: u64,
    durability: Durability,
}

impl Arguments {
    fn parse() -> Result<Self, String> {
        let mut all = Self {
            directory: std::env::temp_dir(),
            rounds: 5,
            measured: Duration::from_secs(10),
            backlog_bytes: 1024 * MIB,
            bytes_per_s: 8 * MIB,
            durability: Durability::Auto,
        };
        // Cargo adds this argument.
        let mut words = std::env::args().skip(1).filter(|word| word != "--bench");
        while let Some(option) = words.next() {
            let value = words.next().ok_or_else(|| format!("{option} needs a value"))?;
            let number = || match value.parse::<u32>() {
                Ok(number) if number > 0 => Ok(number),
                _ => Err(format!("{option} {value}: not a whole number above 0")),
            };
            match option.as_str() {
                "--dir" => all.directory = value.into(),
                "--rounds" => all.rounds = number()?,
                "--seconds" => all.measured = Duration::from_secs(number()?.into()),
                "--backlog-mib" => all.backlog_bytes = u64::from(number()?) * MIB,
                "--rate-mib" => all.bytes_per_s = u64::from(number()?) * MIB,
                "--durability" => all.durability = value.parse()?,
                _ => {
                    return Err(format!(
                        "{option}: there are --dir, --rounds, --seconds, --backlog-mib, \
                         --rate-mib and --durability"
                    ));
                }
            }
        }
        Ok(all)
    }
}

type Column = (&'static str, fn(&Measured) -> f64);

/// The results of half a round.
struct Measured {
    p50_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    cpu_ms_per_mib: f64,
    /// Share of checks at which compaction had made requests since the previous one.
    busy: f64,
    compacted_bytes: u64,
}

fn main() -> Result<(), String> {
    let arguments = Arguments::parse()?;
    let Arguments { directory, rounds, measured, backlog_bytes, bytes_per_s, .. } = &arguments;
    println!(
        "{rounds} rounds in {}: {} MiB in objects of {} MiB, then {} MiB/s for {measured:?}, \
         {STREAMS} streams, batches of {BATCH_BYTES} bytes",
        directory.display(),
        backlog_bytes / MIB,
        OBJECT_BYTES / MIB,
        bytes_per_s / MIB,
    );
    let filled = tempfile::tempdir_in(directory).expect("a directory in --dir");
    make(filled.path(), &arguments);
    println!("round  compaction  p50 ms   p99 ms   max ms  CPU ms/MiB  busy  compacted");
    let mut all: [Vec<Measured>; 2] = [Vec::new(), Vec::new()];
    for round in 0..*rounds {
        for turn in 0..2 {
            let is_on = (round + turn) % 2 == 1;
            let measured = half_a_round(&arguments, filled.path(), is_on);
            println!("{:>5}  {}", round + 1, measured.line(if is_on { "on" } else { "off" }));
            all[usize::from(is_on)].push(measured);
        }
    }
    let [off, on] = &all;
    println!();
    println!(
        "median        off       on  on/off, of the medians and of each round (least to most)"
    );
    let columns: [Column; 4] = [
        ("p50 ms", |of| of.p50_ms),
        ("p99 ms", |of| of.p99_ms),
        ("max ms", |of| of.max_ms),
        ("CPU ms/MiB", |of| of.cpu_ms_per_mib),
    ];
    for (name, column) in columns {
        let [off, on] = [off, on].map(|of| of.iter().map(column).collect::<Vec<_>>());
        let ratios = sorted(on.iter().zip(&off).map(|(on, off)| on / off).collect());
        let (off, on) = (median(off), median(on));
        println!(
            "{name:<10} {off:>8.3} {on:>8.3}  {:.3}; {:.3} ({:.3} to {:.3})",
            on / off,
            median(ratios.clone()),
            ratios[0],
            ratios[ratios.len() - 1]
        );
    }
    if on.iter().any(|of| of.busy < 0.5) {
        println!("compaction was idle for more than half of the time: enlarge --backlog-mib");
    }
    Ok(())
}

impl Measured {
    fn line(&self, compaction: &str) -> String {
        format!(
            "{compaction:>10} {:>7.3} {:>8.3} {:>8.3} {:>11.2} {:>4.0}% {:>6} MiB",
            self.p50_ms,
            self.p99_ms,
            self.max_ms,
            self.cpu_ms_per_mib,
            self.busy * 100.0,
            self.compacted_bytes / MIB
        )
    }
}

/// Creates the store that all others are copies of.
fn make(directory: &Path, arguments: &Arguments) {
    let device = device(directory, arguments.durability, Some(WAL_BYTES));
    Wal::format(&device, &FormatOptions::default()).expect("a new log");
    println!("{}", flush(device.geometry()));
    runtime().block_on(async {
        let store = open(directory, device, false).await;
        fill(&store, arguments.backlog_bytes).await;
        store.close().await.expect("it closes");
    });
}

/// Measures with its own copy and its own runtime.
fn half_a_round(arguments: &Arguments, filled: &Path, is_on: bool) -> Measured {
    let copy = tempfile::tempdir_in(&arguments.directory).expect("a directory in --dir");
    copy_store(filled, copy.path()).expect("there is space for a copy");
    let runtime = runtime();
    let device = device(copy.path(), arguments.durability, None);
    let store = runtime.block_on(open(copy.path(), device, is_on));
    let measured = measure(&runtime, &store, arguments);
    runtime.block_on(store.close()).expect("it closes");
    measured
}

fn runtime() -> Runtime {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.expect("a runtime")
}

/// Copies a store. Objects are linked, since existing ones are never written to. Everything is
/// synced before the measurement.
fn copy_store(from: &Path, to: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let (path, copy) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            std::fs::create_dir(&copy)?;
            copy_store(&path, &copy)?;
        } else if entry.file_name() == "wal" {
            std::fs::copy(&path, &copy)?;
            std::fs::File::open(&copy)?.sync_all()?;
        } else {
            std::fs::hard_link(&path, &copy)?;
        }
    }
    Ok(())
}

fn device(directory: &Path, durability: Durability, create_bytes: Option<u64>) -> SharedDevice {
    let options = OpenOptions { durability, create_bytes, ..OpenOptions::default() };
    alluvium_device::open(&directory.join("wal"), &options).expect("a file for the log")
}

fn flush(geometry: &Geometry) -> String {
    let flush = match (geometry.flushes, geometry.volatile_cache) {
        (true, _) => "each write is flushed, or carries FUA",
        (false, true) => "no write is flushed, although there may be a volatile cache",
        (false, false) => "no flush: no volatile cache is stated",
    };
    format!("write-ahead log: a file, {}; {flush}. Objects and catalog: fsync", geometry.engine)
}

async fn open(directory: &Path, device: SharedDevice, with_compaction: bool) -> Store {
    let defaults = Options::for_wal(WAL_BYTES);
    let options = Options {
        upload_interval: Duration::from_secs(1),
        compaction_bytes: if with_compaction { defaults.compaction_bytes } else { 0 },
        ..defaults
    };
    let objects = local_objects(&directory.join("objects")).expect("a directory");
    let wal = alluvium_wal::Options::default();
    let opened = Store::open(device, wal, objects, Arc::new(()), options, None).await;
    opened.expect("the catalog and the WAL match").store
}

/// Creates many small objects that all streams share.
async fn fill(store: &Store, bytes: u64) {
    let first = store.new_stream_ids(STREAMS).await.expect("ids");
    let create = first.iter().map(|id| Change::CreateStream {
        id: *id,
        kind: KIND_LOG,
        label: Bytes::new(),
    });
    store.commit(create.collect()).await.expect("streams");
    let mut source = Source::new(store).await;
    for _ in 0..bytes / OBJECT_BYTES {
        for _ in 0..OBJECT_BYTES / BATCH_BYTES as u64 {
            drop(source.append());
        }
        store.flush().await.expect("it is uploaded");
    }
}

/// A source of batches for all streams in turn.
struct Source {
    streams: Vec<(StreamWriter, u64)>,
    turn: usize,
    payload: Bytes,
}

impl Source {
    async fn new(store: &Store) -> Self {
        let mut streams = Vec::new();
        for id in store.stream_ids() {
            let stream =
                store.open_stream(id, StreamEpoch(0)).await.expect("it was there just now");
            let next = stream.next_offset().0;
            streams.push((stream, next));
        }
        let payload = (0..BATCH_BYTES).map(|at| (at * 31 % 251) as u8).collect();
        Self { streams, turn: 0, payload }
    }

    fn append(&mut self) -> alluvium_stream::Append {
        let (stream, next) = &mut self.streams[self.turn];
        let batch = NewBatch {
            base: StreamOffset(*next),
            count: 1,
            max_timestamp_ms: 1_700_000_000_000,
            payload: self.payload.clone(),
        };
        match stream.append(batch) {
            Ok(append) => {
                *next += 1;
                self.turn = (self.turn + 1) % self.streams.len();
                append
            }
            Err(AppendError::Full) => {
                panic!("the log is full: the disk does not keep up with --rate-mib")
            }
            Err(error) => panic!("append: {error}"),
        }
    }
}

/// Returns the number of compaction's requests to the object store.
fn asked(stats: &Stats) -> u64 {
    let of_compaction = stats.requests.iter().filter(|asked| asked.class == "compaction");
    of_compaction.map(|asked| asked.count).sum()
}

/// Appends from this thread, whose sleep is more precise than a runtime's.
fn measure(runtime: &Runtime, store: &Store, arguments: &Arguments) -> Measured {
    let mut source = runtime.block_on(Source::new(store));
    let interval =
        Duration::from_secs(1).mul_f64(BATCH_BYTES as f64 / arguments.bytes_per_s as f64);
    let (done, mut latencies) = mpsc::unbounded_channel();
    let _in_runtime = runtime.enter();
    let begun = Instant::now();
    let mut due = begun;
    let mut counted_from = None;
    let (mut next_check, mut checks, mut busy_checks) = (begun + WARMUP, 0_u32, 0_u32);
    let mut before = store.stats();
    let mut first = before.clone();
    while due < begun + WARMUP + arguments.measured {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let append = source.append();
        if due >= begun + WARMUP {
            counted_from.get_or_insert_with(cpu_s);
            let done = done.clone();
            tokio::spawn(async move {
                append.await.expect("it is durable");
                let _ = done.send(due.elapsed()); // received until the end
            });
        }
        if due >= next_check {
            let stats = store.stats();
            if checks == 0 {
                first = stats.clone();
            }
            checks += 1;
            busy_checks += u32::from(asked(&stats) > asked(&before));
            before = stats;
            next_check += CHECK_INTERVAL;
        }
        due += interval;
    }
    let cpu_s = cpu_s() - counted_from.expect("it was measured");
    drop(done);
    let mut all = Vec::new();
    while let Some(latency) = latencies.blocking_recv() {
        all.push(latency.as_secs_f64() * 1000.0);
    }
    let all = sorted(all);
    let at = |permille: usize| all[(all.len() * permille / 1000).min(all.len() - 1)];
    Measured {
        p50_ms: at(500),
        p99_ms: at(990),
        max_ms: at(1000),
        cpu_ms_per_mib: cpu_s * 1000.0 / ((all.len() * BATCH_BYTES) as f64 / MIB as f64),
        busy: f64::from(busy_checks) / f64::from(checks),
        compacted_bytes: before.compacted_bytes - first.compacted_bytes,
    }
}

fn sorted(mut all: Vec<f64>) -> Vec<f64> {
    all.sort_by(f64::total_cmp);
    all
}

fn median(all: Vec<f64>) -> f64 {
    let all = sorted(all);
    (all[(all.len() - 1) / 2] + all[all.len() / 2]) / 2.0
}

/// Returns the CPU time of this process, user and system, in seconds.
fn cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux has it");
    // The name, in parentheses, may contain blanks. Two fields count ticks, of which Linux shows
    // 100 per second.
    let fields = stat.rsplit_once(')').expect("the name ends").1.split_whitespace();
    fields.skip(11).take(2).map(|ticks| ticks.parse::<f64>().expect("a number")).sum::<f64>()
        / 100.0
}
