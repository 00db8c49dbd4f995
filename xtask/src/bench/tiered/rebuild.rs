//! A server that has lost its disk, under load: how long until it serves again, and what it moves.
//!
//! This server is killed while a producer runs, and loses its data directory; then also its log.
//! A broker of Kafka loses its logs; a producer runs on the other two until the broker is in sync.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use serde_json::Value;

use super::super::filesystem::{Raw, emptied, removed};
use super::super::load::{Load, Sample, due, quantile};
use super::super::{Bar, judged, settle, unix_seconds};
use super::{BROKERS, Options, PARTITIONS, System, cluster, log_limit, objects_volume, partitions};
use crate::Error;
use crate::client::LATEST;
use crate::exec::describe;
use crate::report::Case;
use crate::server::{Config, Ending, Objects, Server, clean};

const WAL_MEBIBYTES: u64 = 2048;
/// Seconds of load before a server is killed.
const BEFORE_SECONDS: u64 = 20;
/// Seconds of load after a server serves again.
const AFTER_SECONDS: u64 = 20;
/// Seconds of load while a broker of Kafka is rebuilt. The time after that is not in p95 and p99.
const MEASURED_SECONDS: u64 = 60;
const SPARE_MEBIBYTES: u64 = 1024;

// The targets.
const MOST_SECONDS: f64 = 2.0;
/// Between the largest and the smallest amount of data.
const MOST_SPREAD: f64 = 1.2;
const LEAST_SPEEDUP: f64 = 100.0;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Lost {
    /// The data directory; the log is on another disk.
    Data,
    /// The data directory and the log.
    All,
    /// The logs of one broker of three.
    Broker,
}

/// A rebuild.
pub(super) struct Rebuilt {
    system: System,
    lost: Lost,
    gibibytes: u32,
    /// From its start until the first batch is acknowledged; for a broker of Kafka, until no
    /// partition is under-replicated.
    seconds: f64,
    /// Until the first response with old records. NaN for a broker of Kafka: the others serve.
    first_old: f64,
    /// What the processes have read from disks and written to them until they are ready.
    moved_mebibytes: f64,
    p95: f64,
    p99: f64,
    /// Offsets that the rebuild states as lost.
    lost_offsets: u64,
}

impl Rebuilt {
    fn name(&self) -> String {
        let lost = match self.lost {
            Lost::Data => "data directory lost",
            Lost::All => "log lost, too",
            Lost::Broker => "one of three disks lost",
        };
        format!("{}, {lost}, {} GiB", self.system.name(), self.gibibytes)
    }
}

/// Measures all rebuilds.
pub(super) fn run(
    options: &Options,
    systems: &[System],
    binary: &Path,
    jars: &Path,
    directory: &Path,
) -> Result<Vec<Rebuilt>, Error> {
    let mut all = Vec::new();
    let of_kafka = [options.kafka_rebuilt];
    for system in systems {
        let amounts: &[u32] = match system {
            System::Local => &[],
            System::Tiered => &options.rebuilt,
            System::Kafka | System::TieredKafka => &of_kafka,
        };
        for gibibytes in amounts {
            emptied(directory)?;
            let rebuilt = match system.is_kafka() {
                false => server(options, *gibibytes, binary, directory)?,
                true => broker(options, *system, *gibibytes, binary, jars, directory)?,
            };
            rebuilt.iter().for_each(|rebuilt| println!("{}", line(rebuilt)));
            all.extend(rebuilt);
        }
    }
    removed(directory)?;
    Ok(all)
}

fn server(
    options: &Options,
    gibibytes: u32,
    binary: &Path,
    directory: &Path,
) -> Result<Vec<Rebuilt>, Error> {
    let old = u64::from(gibibytes) << 10;
    let disk = |name| Raw::new(directory, name, WAL_MEBIBYTES >> 10, log_limit(options));
    let (log, new_log) = (disk("log")?, disk("new-log")?);
    let objects = objects_volume(options, directory, "objects", old + SPARE_MEBIBYTES)?;
    let store = format!("file://{}", objects.path().join("store").display());
    let config = Config {
        binary: binary.to_path_buf(),
        directory: directory.join("server"),
        wal_mebibytes: WAL_MEBIBYTES,
        log_cache_mebibytes: 1024,
        wal: Some(log.path().to_path_buf()),
        objects: Some(Objects {
            // Compaction would need twice the space while the old data are written.
            arguments: ["--object-store", &store, "--compaction-size", "0"].map(Into::into).into(),
            environment: Vec::new(),
        }),
    };
    let data = config.directory.join("data");
    let mut server = Server::start(config)?;
    let load = Load::new(binary, server.address(), directory);
    for topic in ["old", "live"] {
        load.create(topic, PARTITIONS, &[])?;
    }
    load.run("produce", "old", &["--total", &format!("{old}MiB")])?;
    settle(&server)?;
    let mut all = Vec::new();
    for lost in [Lost::Data, Lost::All] {
        let rate = format!("{}MiB", options.rate);
        let words = ["--rate", &rate, "--duration", "1h"];
        let mut producer = load.start_named("before", "produce", "live", &words)?;
        thread::sleep(Duration::from_secs(BEFORE_SECONDS));
        let before = all_ends(&load.address)?;
        if producer.has_ended()? {
            return Err("the producer ended before the server was killed".into());
        }
        server.end(Ending::Sigkill)?;
        drop(producer);
        fs::remove_dir_all(&data)?;
        let started = unix_seconds();
        let (mut lost_offsets, mut moved) = (0, 0.0);
        if lost == Lost::All {
            server.use_wal(new_log.path());
            (lost_offsets, moved) = rebuild(binary, &store, &data, new_log.path())?;
        }
        server.start_again()?;
        moved += moved_mebibytes(server.pid())?;
        let after = all_ends(&load.address)?;
        let consumer = load.start("consume", "old", &["--duration", "2s"])?;
        let time = format!("{AFTER_SECONDS}s");
        let words = ["--rate", &rate, "--duration", &time];
        let producer = load.start("produce", "live", &words)?;
        let (consumed, produced) = (consumer.finish()?, producer.finish()?);
        // With the log everything that was readable is there. Without it partitions continue after
        // all offsets that may have been handed out.
        let is_kept = after.iter().zip(&before).all(|(after, before)| after >= before);
        if !is_kept || after.len() != before.len() {
            return Err(format!("ends of partitions: {before:?} before, {after:?} after").into());
        }
        all.push(Rebuilt {
            system: System::Tiered,
            lost,
            gibibytes,
            seconds: first(&produced) - started,
            first_old: first(&consumed) - started,
            moved_mebibytes: moved,
            p95: quantile(&produced, 0.95),
            p99: quantile(&produced, 0.99),
            lost_offsets,
        });
    }
    Ok(all)
}

/// Returns the ends of all partitions of both topics.
fn all_ends(address: &str) -> Result<Vec<i64>, Error> {
    let server = [address.to_owned()];
    let ends = |topic| partitions::offsets(&server, topic, LATEST);
    Ok([ends("old")?, ends("live")?].concat())
}

/// Returns the time of the first response.
fn first(samples: &[Sample]) -> f64 {
    samples.iter().map(Sample::done).fold(f64::INFINITY, f64::min)
}

/// Rebuilds a store whose log is lost. Returns the number of offsets that are stated as lost, and
/// the MiB that were read from disks and written to them.
fn rebuild(binary: &Path, store: &str, data: &Path, wal: &Path) -> Result<(u64, f64), Error> {
    /// The exit code if something is lost.
    const LOST: i32 = 3;
    // The kernel adds the I/O of an ended child to its parent's.
    let before = moved_mebibytes(std::process::id())?;
    let mut rebuild = clean(binary);
    rebuild.args(["rebuild", "--json", "--accept-loss", "--object-store", store]);
    rebuild.arg("--data-dir").arg(data).arg("--wal").arg(wal);
    let output = rebuild.output().map_err(|error| format!("{}: {error}", describe(&rebuild)))?;
    let failed = |reason: String| {
        let errors = String::from_utf8_lossy(&output.stderr);
        format!("`{}`: {reason}: {errors}", describe(&rebuild))
    };
    if !matches!(output.status.code(), Some(0 | LOST)) {
        return Err(failed(output.status.to_string()).into());
    }
    let report: Value =
        serde_json::from_slice(&output.stdout).map_err(|error| failed(error.to_string()))?;
    let lost = report["lost"].as_array().ok_or("the report of the rebuild has no `lost`")?;
    let mut offsets = 0;
    for lost in lost {
        let offset = |name| lost[name].as_u64().ok_or_else(|| failed(format!("no `{name}`")));
        offsets += offset("known_end")? - offset("from")?;
    }
    Ok((offsets, moved_mebibytes(std::process::id())? - before))
}

fn broker(
    options: &Options,
    system: System,
    gibibytes: u32,
    binary: &Path,
    jars: &Path,
    directory: &Path,
) -> Result<Vec<Rebuilt>, Error> {
    let old = u64::from(gibibytes) << 10;
    let (mut cluster, _volumes) = cluster(options, system, jars, directory, old + SPARE_MEBIBYTES)?;
    let load = Load::new(binary, cluster.address(), directory);
    for (topic, flushed) in [("old", false), ("live", true)] {
        load.create(topic, PARTITIONS, &system.settings(flushed))?;
        partitions::until_known(&cluster.brokers, topic)?;
    }
    load.run("produce", "old", &["--total", &format!("{old}MiB")])?;
    rustix::fs::sync();
    partitions::until_in_sync(&load.address, "old")?;
    if system == System::TieredKafka {
        partitions::until_remote(&cluster.brokers, "old")?;
    }
    // The last one: the first is the controller, too.
    let (lost, others) = cluster.brokers.split_last_mut().ok_or("no broker")?;
    lost.lose_logs()?;
    // The others lead all partitions from then on, before the producer starts.
    partitions::until_led_by_others(others, "live", BROKERS)?;
    let (rate, time) = (format!("{}MiB", options.rate), format!("{MEASURED_SECONDS}s"));
    let words = ["--rate", &rate, "--duration", &time];
    let producer = load.start("produce", "live", &words)?;
    let started = unix_seconds();
    lost.spawn_again()?;
    for topic in ["old", "live"] {
        partitions::until_in_sync(&load.address, topic)?;
    }
    let (seconds, moved) = (unix_seconds() - started, moved_mebibytes(lost.pid())?);
    let produced = due(&producer.finish()?, (started, started + seconds));
    Ok(vec![Rebuilt {
        system,
        lost: Lost::Broker,
        gibibytes,
        seconds,
        first_old: f64::NAN,
        moved_mebibytes: moved,
        p95: quantile(&produced, 0.95),
        p99: quantile(&produced, 0.99),
        lost_offsets: 0,
    }])
}

/// What a process has read from disks and written to them.
fn moved_mebibytes(pid: u32) -> Result<f64, Error> {
    let path = format!("/proc/{pid}/io");
    let io = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    let bytes = |name: &str| {
        let line = io.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        line.and_then(|line| line.parse::<f64>().ok()).ok_or_else(|| format!("{path}: no {name}"))
    };
    Ok((bytes("read_bytes")? + bytes("write_bytes")?) / f64::from(1 << 20))
}

fn line(rebuilt: &Rebuilt) -> String {
    format!(
        "  {}: {:.2} s, old records after {:.2} s, {:.0} MiB moved; \
         produce p95 {:.2}, p99 {:.2} ms; stated as lost: {} offsets",
        rebuilt.name(),
        rebuilt.seconds,
        rebuilt.first_old,
        rebuilt.moved_mebibytes,
        rebuilt.p95,
        rebuilt.p99,
        rebuilt.lost_offsets
    )
}

/// Formats all rebuilds.
pub(super) fn table(all: &[Rebuilt]) -> String {
    let mut text = format!(
        "{:<44}{:>9}{:>11}{:>12}{:>9}{:>9}\n",
        "rebuild", "s", "old, s", "MiB moved", "p95, ms", "p99, ms"
    );
    for rebuilt in all {
        text.push_str(&format!(
            "{:<44}{:>9.2}{:>11.2}{:>12.0}{:>9.2}{:>9.2}\n",
            rebuilt.name(),
            rebuilt.seconds,
            rebuilt.first_old,
            rebuilt.moved_mebibytes,
            rebuilt.p95,
            rebuilt.p99
        ));
    }
    text
}

/// Compares the rebuilds with the targets.
pub(super) fn judge(all: &[Rebuilt]) -> Vec<Case> {
    let mut cases = Vec::new();
    let ours: Vec<&Rebuilt> = all.iter().filter(|rebuilt| rebuilt.lost == Lost::Data).collect();
    let seconds = |pick: fn(f64, f64) -> f64| {
        ours.iter().map(|rebuilt| rebuilt.seconds).reduce(pick).unwrap_or(f64::NAN)
    };
    let (longest, shortest) = (seconds(f64::max), seconds(f64::min));
    cases.push(judged("longest rebuild, seconds", longest, Bar::AtMost(MOST_SECONDS)));
    cases.push(judged(
        "longest rebuild over shortest, of all amounts of data",
        longest / shortest,
        Bar::AtMost(MOST_SPREAD),
    ));
    for kafka in all.iter().filter(|rebuilt| rebuilt.system == System::Kafka) {
        let same = ours.iter().find(|rebuilt| rebuilt.gibibytes == kafka.gibibytes);
        cases.push(judged(
            "a replica of Kafka over this server, same amount of data",
            kafka.seconds / same.map_or(f64::NAN, |same| same.seconds),
            Bar::AtLeast(LEAST_SPEEDUP),
        ));
    }
    cases
}
