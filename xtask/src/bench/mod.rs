//! Benchmarks of whole servers: each figure is compared with that of another run or server,
//! measured within a quarter of an hour.

mod catch_up;
mod disk_cache;
mod filesystem;
pub(crate) mod journal;
mod kafka;
mod load;
mod memory;
mod probe;
mod tiered;
mod upload;
mod volume;
mod watch;

use std::fmt;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Subcommand;

use crate::Error;
use crate::kafka::Kafka;
use crate::report::{Case, Report};
use crate::server::Server;

pub(crate) use memory::suite as memory_suite;

#[derive(Subcommand)]
pub(crate) enum Bench {
    /// Measure how lagging consumers affect producers, compared with Apache Kafka. Needs root: it
    /// creates volumes on loop devices and drops the file system's cache.
    CatchUp(catch_up::Options),
    /// Measure the three cases of KIP-405, this server beside three brokers of Apache Kafka, with
    /// tiered storage and without it: a normal load, late consumers, and a server that has lost its
    /// disk. Needs root: it creates volumes on loop devices and drops the file system's cache.
    Tiered(tiered::Options),
    /// Measure the cost of uploads and compaction: CPU and memory compared with a server without
    /// them; requests, bytes and money per GiB.
    Upload(upload::Options),
    /// Measure cold reads from a distant object store, with and without a cache on a local disk.
    /// Builds an S3 server from source with Go.
    DiskCache(disk_cache::Options),
    /// Run Kafka's own performance tools against this server, and against Apache Kafka with and
    /// without flushes.
    Kafka(kafka::Options),
    /// Compare the journal cache with RocksDB, LevelDB, fjall, redb, LMDB and foyer. Needs root: it
    /// limits the memory of each with a control group.
    Journal(journal::Options),
    /// Check that resident memory stays below the bound from the settings, under a mixed load.
    Memory(memory::Options),
    /// Measure a volume on three servers: the two ways of answering a write, CPU and device bytes
    /// per write, checkpoints, failover, idle volumes. As root, on loop devices.
    Volume(volume::Options),
}

/// Runs a benchmark. A missed target is a failure.
pub(crate) fn run(root: &Path, bench: &Bench) -> Result<Report, Error> {
    match bench {
        Bench::CatchUp(options) => catch_up::run(root, options),
        Bench::Tiered(options) => tiered::run(root, options),
        Bench::Upload(options) => upload::run(root, options),
        Bench::DiskCache(options) => disk_cache::run(root, options),
        Bench::Kafka(options) => kafka::run(root, options),
        Bench::Journal(options) => Ok(journal::run(root, options)),
        Bench::Memory(options) => memory::run(root, options),
        Bench::Volume(options) => volume::run(root, options),
    }
}

/// The target of a figure.
#[derive(Clone, Copy)]
enum Bar {
    AtLeast(f64),
    AtMost(f64),
}

impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtLeast(bar) => write!(f, "at least {bar}"),
            Self::AtMost(bar) => write!(f, "at most {bar}"),
        }
    }
}

/// Compares a figure with its target, and prints both.
fn judged(name: &str, value: f64, bar: Bar) -> Case {
    println!("{name}: {value:.2}, must be {bar}");
    let met = match bar {
        Bar::AtLeast(least) => value >= least,
        Bar::AtMost(most) => value <= most,
    };
    if met { Case::passed(name) } else { Case::failed(name, format!("{value:.2}, must be {bar}")) }
}

/// Limit of the wait for uploads and compactions of data produced before.
const QUIET_LIMIT: Duration = Duration::from_secs(180);

/// A measured server. It is killed when dropped.
enum Peer {
    Alluvium(Box<Server>),
    Kafka(Kafka),
}

impl Peer {
    fn address(&self) -> String {
        match self {
            Self::Alluvium(server) => server.address(),
            Self::Kafka(kafka) => kafka.address(),
        }
    }

    fn pid(&self) -> u32 {
        match self {
            Self::Alluvium(server) => server.pid(),
            Self::Kafka(kafka) => kafka.pid(),
        }
    }

    /// Waits until all produced data is at its final location.
    fn settle(&self) -> Result<(), Error> {
        let Self::Alluvium(server) = self else {
            rustix::fs::sync();
            thread::sleep(Duration::from_secs(5));
            return Ok(());
        };
        settle(server)
    }
}

/// Waits until all produced data is in objects, and compaction is idle.
fn settle(server: &Server) -> Result<(), Error> {
    let deadline = Instant::now() + QUIET_LIMIT;
    let mut before = None;
    loop {
        let metrics = server.metrics()?;
        let pinned = metrics.get("alluvium_log_cache_pinned_bytes");
        let written = metrics.get("alluvium_object_compacted_bytes_total");
        // The metric appears with the first compaction.
        let read =
            metrics.get("alluvium_object_store_bytes_total{cause=\"compaction\",kind=\"get\"}");
        if pinned == Some(0.0) && before == Some((written, read)) {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err("uploads and compactions did not finish".into());
        }
        before = Some((written, read));
        thread::sleep(Duration::from_secs(5));
    }
}

/// The median; for an even number, the mean of the middle two; NaN without values.
fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.len().wrapping_sub(1) / 2, values.len() / 2);
    match (values.get(low), values.get(high)) {
        (Some(low), Some(high)) => f64::midpoint(*low, *high),
        _ => f64::NAN,
    }
}

fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// User and system time that a process has used.
fn cpu_time(pid: u32) -> Result<Duration, Error> {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    let ticks = cpu_ticks(&stat).ok_or_else(|| format!("{path}: `{stat}`"))?;
    let per_second = rustix::param::clock_ticks_per_second();
    Ok(Duration::from_secs_f64(ticks as f64 / per_second as f64))
}

/// The clock ticks of user and system time in a line of /proc/PID/stat.
fn cpu_ticks(stat: &str) -> Option<u64> {
    // After the name, which may contain anything.
    let (_, fields) = stat.rsplit_once(") ")?;
    let ticks = |field: usize| fields.split(' ').nth(field)?.parse::<u64>().ok();
    Some(ticks(11)? + ticks(12)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_met_or_missed() {
        let missed = |value, bar| judged("figure", value, bar).has_failed();
        assert!(!missed(1.1, Bar::AtMost(1.1)));
        assert!(missed(1.2, Bar::AtMost(1.1)));
        assert!(!missed(0.8, Bar::AtLeast(0.8)));
        assert!(missed(0.7, Bar::AtLeast(0.8)));
        // Without a measurement.
        assert!(missed(f64::NAN, Bar::AtMost(1.1)) && missed(f64::NAN, Bar::AtLeast(0.8)));
    }

    #[test]
    fn cpu_ticks_are_those_of_user_and_system_time() {
        let stat = "71 (a (b) 9 9) S 1 71 71 0 -1 4194560 35 0 1 0 120 34 7 8 20 0 5 0 99 10 11";
        assert_eq!(cpu_ticks(stat), Some(154));
        for incomplete in ["", "71 (a) S 1 71 71 0 -1 4194560 35 0 1 0 120", "71 a S 1"] {
            assert_eq!(cpu_ticks(incomplete), None, "{incomplete}");
        }
    }

    #[test]
    fn the_median_is_the_middle_value() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median([]).is_nan());
    }
}
