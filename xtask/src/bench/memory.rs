//! The resident memory of a server under a mixed load, compared with the bound from its settings.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use alluvium_chart::{Axis, Chart, Scale, Series};
use clap::Args;

use super::load::{Load, Running};
use super::watch::{Memory, watched};
use crate::exec::output;
use crate::report::{Case, Report};
use crate::server::{Config, Objects, Server, release_binary};
use crate::{Error, ServerOptions};

#[derive(Args)]
pub(crate) struct Options {
    /// Duration of the load.
    #[arg(long, default_value_t = 60)]
    minutes: u32,
    /// MiB to produce per second, half to each of two topics.
    #[arg(long, default_value_t = 12)]
    rate: u32,
    /// The directory for the plot.
    #[arg(long, value_name = "DIR", default_value = "docs/plots")]
    plots: PathBuf,
    #[command(flatten)]
    server: ServerOptions,
}

/// The duration in the test suite: retention runs once, five minutes after the start.
const SUITE_MINUTES: u32 = 7;
const SUITE_RATE: u32 = 8;

// The server's settings, MiB.
const WAL: u64 = 512;
const LOG_CACHE: u64 = 128;
const BLOCK_CACHE: u64 = 32;
const COLD_READS: u64 = 32;
const UPLOAD: u64 = 32;

const SAMPLE_EVERY: Duration = Duration::from_secs(1);
/// The interval in which the broker deletes data beyond `retention.bytes`.
const RETENTION_INTERVAL: Duration = Duration::from_secs(300);
/// A consumer is killed after this time.
const KILLED_AFTER: Duration = Duration::from_secs(3);
/// Maximum number of points in the plot: in a longer run each is the maximum of several seconds.
const POINTS: usize = 400;

/// A topic that exists throughout the run.
struct Topic {
    name: &'static str,
    partitions: u32,
    /// Size of a batch in KiB.
    batch: u32,
    /// Bytes of a partition beyond which data is deleted. 0: never.
    retention: u64,
}

/// Large streams, with their own objects.
const WIDE: Topic = Topic { name: "wide", partitions: 4, batch: 64, retention: 64 << 20 };
/// Small streams, which share objects.
const MANY: Topic = Topic { name: "many", partitions: 64, batch: 16, retention: 4 << 20 };
/// For lagging consumers; larger than all of the server's memory.
const OLD: Topic = Topic { name: "old", partitions: 4, batch: 64, retention: 0 };
const OLD_MEBIBYTES: u32 = 768;
/// Created, written, read and deleted, repeatedly.
const PASSING: Topic = Topic { name: "passing", partitions: 8, batch: 64, retention: 0 };
const PASSING_MEBIBYTES: u32 = 16;

/// Lagging consumers that run the whole time.
const LAGGING_CONSUMERS: u32 = 2;

/// The bound of the resident memory as a list of parts, in MiB.
struct Bound(Vec<(&'static str, f64)>);

impl Bound {
    /// `idle` is the server's memory before the first client connects.
    fn new(idle: f64) -> Self {
        let mebibytes = |kibibytes: u32| f64::from(kibibytes) / 1024.0;
        // `alluvium bench` has one connection for each partition, at most 16.
        let connections = |topic: &Topic| topic.partitions.min(16);
        let writers = [&WIDE, &MANY, &PASSING];
        let readers = [(&WIDE, 1), (&MANY, 1), (&OLD, LAGGING_CONSUMERS + 1), (&PASSING, 1)];
        // A connection has one request in memory at a time; its buffer grows to twice the received
        // bytes, and starts at 64 KiB.
        let requests: f64 = writers
            .iter()
            .map(|topic| f64::from(connections(topic)) * 2.0 * mebibytes(topic.batch + 64))
            .sum();
        // One fetch per connection, of 1 MiB for each partition; a batch holds at most twice its
        // payload.
        let responses: f64 =
            readers.iter().map(|(topic, count)| f64::from(topic.partitions * count) * 2.0).sum();
        let all_connections: u32 = writers.iter().map(|topic| connections(topic)).sum::<u32>()
            + readers.iter().map(|(topic, count)| connections(topic) * count).sum::<u32>();
        // Parts of 8 MiB: those in transfer, one being filled, a block of 1 MiB being encoded, and
        // the 1 MiB that a directory store writes at a time.
        let object = |on_their_way: f64| (on_their_way + 1.0) * 8.0 + 2.0;
        Self(vec![
            ("log cache (--log-cache)", LOG_CACHE as f64),
            ("block cache (--block-cache)", BLOCK_CACHE as f64),
            ("cold reads in progress (--cold-read-memory)", COLD_READS as f64),
            ("write-ahead log: window of 64 MiB", 64.0),
            ("an upload: the parts of an object", object(4.0)),
            (
                "compaction: 8 spans of 2 MiB, 7 MiB of indexes, parts of 2 objects",
                8.0 * 2.0 + 7.0 + 2.0 * object(2.0),
            ),
            ("requests of these clients (at most 256 MiB of any)", requests.min(256.0)),
            ("responses to these clients (at most 2 x 512 MiB to any)", responses.min(1024.0)),
            // Waiting answers, and buffers.
            ("connections, 264 KiB each", f64::from(all_connections) * mebibytes(264)),
            ("the idle server, measured", idle),
        ])
    }

    fn total(&self) -> f64 {
        self.0.iter().map(|(_, mebibytes)| mebibytes).sum()
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, mebibytes) in &self.0 {
            writeln!(f, "{what:<70}{mebibytes:>8.1} MiB")?;
        }
        write!(f, "{:<70}{:>8.1} MiB", "bound of the resident memory", self.total())
    }
}

pub(super) fn run(root: &Path, options: &Options) -> Result<Report, Error> {
    let binary = release_binary(root, options.server.server.as_deref())?;
    let plot = root.join(&options.plots).join("memory.svg");
    let mut report = Report::default();
    report.suite("memory", || {
        let directory = root.join("target/e2e/run/memory");
        measure(&binary, &directory, options.minutes, options.rate, &plot)
    });
    Ok(report)
}

/// The benchmark as part of `cargo xtask test`: seven minutes.
pub(crate) fn suite(root: &Path, binary: &Path, directory: &Path) -> Result<Vec<Case>, Error> {
    let plot = root.join("target/e2e/memory.svg");
    measure(binary, directory, SUITE_MINUTES, SUITE_RATE, &plot)
}

/// Data and logs are kept in `directory` if a case failed.
fn measure(
    binary: &Path,
    directory: &Path,
    minutes: u32,
    rate: u32,
    plot: &Path,
) -> Result<Vec<Case>, Error> {
    if directory.exists() {
        fs::remove_dir_all(directory)?;
    }
    fs::create_dir_all(directory)?;
    let server = Server::start(config(binary, directory))?;
    let idle = server.memory_kib().ok_or("the server has no resident memory")? as f64 / 1024.0;
    let bound = Bound::new(idle);
    println!("{bound}");
    let load = Load::new(binary, server.address(), directory);
    for Topic { name, partitions, retention, .. } in [WIDE, MANY, OLD] {
        let retention = (retention > 0).then(|| format!("retention.bytes={retention}"));
        let config: Vec<&str> = retention.iter().map(String::as_str).collect();
        load.create(name, partitions, &config)?;
    }
    let duration = Duration::from_secs(u64::from(minutes) * 60);
    let mut samples = Vec::new();
    let load_case = Case::run(&format!("{minutes} minutes of mixed load"), || {
        let (_, seen) = watched(&server, SAMPLE_EVERY, || mixed_load(&load, duration, rate))
            .map_err(|error| format!("{error}{}", server.log_tail()))?;
        samples = seen;
        Ok(())
    });
    let mut cases = vec![load_case];
    if !samples.is_empty() {
        draw(plot, &samples, &bound, rate)?;
        let peak = |of: fn(&Memory) -> f64| samples.iter().map(of).fold(0.0, f64::max);
        let (most, objects) = (peak(|memory| memory.resident), peak(|memory| memory.objects));
        println!("resident at most {most:.1} MiB; objects at most {objects:.0} MiB");
        cases.push(Case::run("resident memory stays within its bound", || {
            let bound = bound.total();
            if most <= bound {
                return Ok(());
            }
            Err(format!("{most:.1} MiB, of {bound:.1} MiB").into())
        }));
    }
    if duration > RETENTION_INTERVAL + Duration::from_secs(60) {
        cases.push(Case::run("retention deletes old records", || {
            [WIDE, MANY].iter().try_for_each(|topic| has_let_go(&load, topic))
        }));
    }
    if cases.iter().any(Case::has_failed) {
        println!("data and logs are kept in {}", directory.display());
        return Ok(cases);
    }
    server.finish()?;
    fs::remove_dir_all(directory)?;
    Ok(cases)
}

fn config(binary: &Path, directory: &Path) -> Config {
    let sizes =
        [("block-cache", BLOCK_CACHE), ("cold-read-memory", COLD_READS), ("upload-size", UPLOAD)];
    let arguments = sizes.map(|(name, size)| [format!("--{name}"), format!("{size}MiB")]);
    Config {
        binary: binary.to_path_buf(),
        directory: directory.join("server"),
        wal_mebibytes: WAL,
        log_cache_mebibytes: LOG_CACHE,
        wal: None,
        objects: Some(Objects { arguments: arguments.concat(), environment: Vec::new() }),
    }
}

/// Runs all loads until the time is over. The first failure ends it with an error.
fn mixed_load(load: &Load, duration: Duration, rate: u32) -> Result<(), Error> {
    let end = Instant::now() + duration;
    let total = format!("{OLD_MEBIBYTES}MiB");
    load.start_named("produce-old", "produce", OLD.name, &["--total", &total])?.wait()?;
    let left = end.saturating_duration_since(Instant::now());
    let seconds = format!("{}s", left.as_secs().max(1));
    let rate = format!("{}KiB", rate * 1024 / 2);
    let mut lasting = Vec::new();
    for topic in [WIDE, MANY] {
        let batch = format!("{}KiB", topic.batch);
        let produce = ["--rate", &rate, "--duration", &seconds, "--batch-size", &batch];
        let name = format!("produce-{}", topic.name);
        lasting.push(load.start_named(&name, "produce", topic.name, &produce)?);
        let name = format!("follow-{}", topic.name);
        let follow = ["--follow", "--duration", &seconds];
        lasting.push(load.start_named(&name, "consume", topic.name, &follow)?);
    }
    for number in 1..=LAGGING_CONSUMERS {
        let name = format!("lagging-{number}");
        lasting.push(load.start_named(&name, "consume", OLD.name, &["--duration", &seconds])?);
    }
    let mut passed = 0;
    // The last round must end before the permanent loads do.
    while Instant::now() + 4 * KILLED_AFTER < end {
        passing_topic(load, passed)?;
        passed += 1;
        killed_consumer(load)?;
        for client in &mut lasting {
            if client.has_ended()? {
                client.wait()?;
                return Err("a client ended too early".into());
            }
        }
    }
    println!("{passed} topics created and deleted, and as many consumers killed");
    lasting.iter_mut().try_for_each(Running::wait)
}

fn passing_topic(load: &Load, number: u32) -> Result<(), Error> {
    let topic = format!("{}-{number}", PASSING.name);
    let total = format!("{PASSING_MEBIBYTES}MiB");
    load.create(&topic, PASSING.partitions, &[])?;
    load.start_named("produce-passing", "produce", &topic, &["--total", &total])?.wait()?;
    load.start_named("consume-passing", "consume", &topic, &[])?.wait()?;
    load.delete(&topic)
}

fn killed_consumer(load: &Load) -> Result<(), Error> {
    // Longer than the consumer lives.
    let mut consumer = load.start_named("killed", "consume", OLD.name, &["--duration", "1h"])?;
    thread::sleep(KILLED_AFTER);
    if consumer.has_ended()? {
        consumer.wait()?;
        return Err("a consumer ended before it was killed".into());
    }
    // Dropping the consumer kills it.
    Ok(())
}

/// Checks that each partition of the topic begins after its first record.
fn has_let_go(load: &Load, topic: &Topic) -> Result<(), Error> {
    let mut describe = Command::new(&load.program);
    describe.args(["topic", "describe", topic.name, "--json", "--bootstrap", &load.address]);
    let described = String::from_utf8(output(&mut describe)?)?;
    let starts = described.split("\"log_start_offset\":").skip(1);
    let starts: Vec<&str> =
        starts.map(|rest| rest.split([',', '}']).next().unwrap_or_default().trim()).collect();
    if starts.len() != topic.partitions as usize || starts.contains(&"0") {
        return Err(format!("partitions of {} start at {starts:?}", topic.name).into());
    }
    Ok(())
}

fn draw(path: &Path, samples: &[Memory], bound: &Bound, rate: u32) -> Result<(), Error> {
    let together = samples.len().div_ceil(POINTS).max(1);
    let points = |of: fn(&Memory) -> f64| -> Vec<(f64, f64)> {
        let most = |some: &[Memory]| some.iter().map(of).fold(0.0, f64::max);
        samples.chunks(together).map(|some| (some[0].at / 60.0, most(some))).collect()
    };
    let series = |name: &str, points, dashed| Series { name: name.into(), points, dashed };
    let last = samples.last().map_or(0.0, |sample| sample.at / 60.0);
    let chart = Chart {
        title: "Resident memory under mixed load".into(),
        subtitle: format!(
            "{rate} MiB/s produced; log cache {LOG_CACHE} MiB, \
             block cache {BLOCK_CACHE} MiB, cold reads {COLD_READS} MiB"
        ),
        x: Axis { label: "minutes".into(), scale: Scale::Linear },
        y: Axis { label: "MiB".into(), scale: Scale::Linear },
        series: vec![
            series("resident set", points(|memory| memory.resident), false),
            series("of it, log cache", points(|memory| memory.cached), false),
            series("bound", vec![(0.0, bound.total()), (last, bound.total())], true),
        ],
        marks: Vec::new(),
    };
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    fs::write(path, chart.render())?;
    println!("wrote {}", path.display());
    Ok(())
}
