//! Cold reads from a distant object store, with and without a cache on a local disk.
//!
//! In rounds, a server with `--disk-cache` and one without, each from scratch, with its own S3
//! server behind a proxy that delays each request. All data is read cold, twice; the server is
//! restarted before each reading, so that memory is empty.

use std::fs;
use std::path::Path;
use std::time::Duration;

use clap::Args;

use super::load::{Load, Sample};
use super::{Bar, judged, median, settle};
use crate::report::{Case, Report};
use crate::s3::{self, Gateway, NetworkState, Proxy};
use crate::server::{Config, Ending, Metrics, Server, release_binary};
use crate::{Error, ServerOptions, setup};

#[derive(Args)]
pub(crate) struct Options {
    /// Number of rounds; in each, both servers are measured from scratch. The medians count.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// MiB to produce and to read cold: less than the disk cache holds.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(64..=8192))]
    mebibytes: u32,
    /// Partitions of the topic. One client reads all of them.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    partitions: u32,
    /// Milliseconds by which each request to the object store is delayed during the cold reads.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=1000))]
    latency_ms: u64,
    #[command(flatten)]
    server: ServerOptions,
}

const WAL_MEBIBYTES: u64 = 512;
const LOG_CACHE_MEBIBYTES: u64 = 256;
/// Opening takes milliseconds, and at most 16 MiB wait to be written.
const LIMIT: Duration = Duration::from_secs(120);
const MEBIBYTE: f64 = (1 << 20) as f64;

/// One cold reading of all data.
#[derive(Clone, Copy)]
struct Reading {
    seconds: f64,
    mebibytes: f64,
    /// GETs of the server for blocks and indexes of objects.
    gets: f64,
    fetched_mebibytes: f64,
    /// Blocks and indexes that the disk cache dropped.
    dropped: f64,
}

/// The measurements of one server in a round.
struct Round {
    has_cache: bool,
    first: Reading,
    second: Reading,
}

pub(super) fn run(root: &Path, options: &Options) -> Result<Report, Error> {
    let binary = release_binary(root, options.server.server.as_deref())?;
    let gateway = setup::s3_server(root, s3::Peer::Versitygw)
        .map_err(|missing| Error::from(missing.to_string()))?;
    let directory = root.join("target/e2e/run/disk-cache");
    let mut rounds = Vec::new();
    for number in 1..=options.rounds {
        // The servers alternate in going first.
        for has_cache in [number % 2 == 0, number % 2 == 1] {
            let which = if has_cache { "with" } else { "without" };
            println!("round {number} of {}: {which} a disk cache", options.rounds);
            if directory.exists() {
                fs::remove_dir_all(&directory)?;
            }
            fs::create_dir_all(&directory)?;
            let round = round(options, has_cache, &binary, &gateway, &directory)?;
            for (which, reading) in [("first", &round.first), ("second", &round.second)] {
                println!(
                    "  {which} reading: {:.2} s, {:.0} MiB/s; {:.0} GETs, \
                     {:.0} MiB fetched; {:.0} writes dropped",
                    reading.seconds,
                    reading.mebibytes / reading.seconds,
                    reading.gets,
                    reading.fetched_mebibytes,
                    reading.dropped
                );
            }
            rounds.push(round);
        }
    }
    fs::remove_dir_all(&directory)?;
    println!(
        "\n{} MiB in {} partitions, each request delayed by {} ms; medians of {} rounds",
        options.mebibytes, options.partitions, options.latency_ms, options.rounds
    );
    println!("{}", table(&rounds));
    let mut report = Report::default();
    report.suite("disk cache", || Ok(judge(&rounds)));
    Ok(report)
}

fn round(
    options: &Options,
    has_cache: bool,
    binary: &Path,
    gateway: &Path,
    directory: &Path,
) -> Result<Round, Error> {
    let gateway =
        Gateway::start(s3::Peer::Versitygw, gateway, &directory.join("object-store"), None)?;
    let proxy = Proxy::start(gateway.address(), 0)?;
    let disk_cache = format!("--disk-cache={}", directory.join("disk-cache").display());
    let mut arguments = vec!["--upload-size=64MiB", "--upload-interval=10s"];
    if has_cache {
        arguments.push(&disk_cache);
    }
    let mut server = Server::start(Config {
        binary: binary.to_path_buf(),
        directory: directory.join("server"),
        wal_mebibytes: WAL_MEBIBYTES,
        log_cache_mebibytes: LOG_CACHE_MEBIBYTES,
        wal: None,
        objects: Some(gateway.objects_at(proxy.address(), &arguments)),
    })?;
    let load = Load::new(binary, server.address(), directory);
    load.create("topic", options.partitions, &[])?;
    load.run("produce", "topic", &["--total", &format!("{}MiB", options.mebibytes)])?;
    settle(&server)?;
    proxy.set(NetworkState::Delayed(Duration::from_millis(options.latency_ms)));
    let mut reading = || -> Result<Reading, Error> {
        server.end(Ending::Sigterm)?;
        server.start_again()?;
        read_all(&server, &load, has_cache, options)
    };
    let (first, second) = (reading()?, reading()?);
    server.finish()?;
    gateway.finish()?;
    Ok(Round { has_cache, first, second })
}

/// Reads all data from a freshly started server.
fn read_all(
    server: &Server,
    load: &Load,
    has_cache: bool,
    options: &Options,
) -> Result<Reading, Error> {
    if has_cache {
        until(server, "the disk cache is open", |metrics| {
            metrics.get("alluvium_disk_cache_open") == Some(1.0)
        })?;
    }
    let samples = load.run("consume", "topic", &[])?;
    if has_cache {
        // Dropped writes are counted, and so are the requests of the next reading for them.
        until(server, "everything missing is in the disk cache", |metrics| {
            let value = |what: &str| metrics.get(&format!("alluvium_disk_cache_{what}_total"));
            let taken = value("writes").zip(value("dropped_writes"));
            let taken = taken.map(|(written, dropped)| written + dropped);
            taken.zip(value("misses")).is_some_and(|(taken, missing)| taken >= missing)
        })?;
    }
    let begun = samples[0].due;
    let ended = samples.iter().map(Sample::done).fold(begun, f64::max);
    let mebibytes = samples.iter().map(|sample| sample.bytes).sum::<f64>() / MEBIBYTE;
    if mebibytes < f64::from(options.mebibytes) {
        return Err(format!("{mebibytes:.0} MiB were read of {}", options.mebibytes).into());
    }
    let metrics = server.metrics()?;
    let value = |name: &str| metrics.get(name).ok_or_else(|| format!("no metric {name}"));
    Ok(Reading {
        seconds: ended - begun,
        mebibytes,
        gets: value("alluvium_cold_read_gets_total")?,
        fetched_mebibytes: value("alluvium_cold_read_get_bytes_total")? / MEBIBYTE,
        // A server without a disk cache may not have this metric.
        dropped: metrics.get("alluvium_disk_cache_dropped_writes_total").unwrap_or(0.0),
    })
}

/// Polls the server's metrics until the condition holds.
fn until(server: &Server, what: &str, holds: impl Fn(&Metrics) -> bool) -> Result<(), Error> {
    server.until(what, LIMIT, |metrics| {
        if metrics.get("alluvium_disk_cache_failed") == Some(1.0) {
            return Err(format!("the disk cache failed{}", server.log_tail()).into());
        }
        Ok(holds(metrics))
    })
}

/// A named figure of a round.
type Figure = (&'static str, fn(&Round) -> f64);

const FIGURES: [Figure; 6] = [
    ("first reading, s", |round| round.first.seconds),
    ("second reading, s", |round| round.second.seconds),
    ("first reading, GETs", |round| round.first.gets),
    ("second reading, GETs", |round| round.second.gets),
    ("first reading, MiB fetched", |round| round.first.fetched_mebibytes),
    ("second reading, MiB fetched", |round| round.second.fetched_mebibytes),
];

fn table(rounds: &[Round]) -> String {
    let of = |has_cache: bool, figure: fn(&Round) -> f64| {
        median(rounds.iter().filter(|round| round.has_cache == has_cache).map(figure))
    };
    let mut text = format!("{:<30}{:>14}{:>18}", "", "no disk cache", "with a disk cache");
    for (name, figure) in FIGURES {
        let (without, with) = (of(false, figure), of(true, figure));
        text.push_str(&format!("\n{name:<30}{without:>14.2}{with:>18.2}"));
    }
    text
}

/// Checks that data that was read once is not fetched again, unless it was dropped because the disk
/// did not keep up.
fn judge(rounds: &[Round]) -> Vec<Case> {
    let cached = rounds.iter().filter(|round| round.has_cache);
    let again = cached.map(|round| (round.second.gets - round.first.dropped).max(0.0));
    let name = "GETs of the second reading with a disk cache, beyond dropped writes";
    vec![judged(name, again.fold(0.0, f64::max), Bar::AtMost(0.0))]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(has_cache: bool, again: f64, dropped: f64) -> Round {
        let first =
            Reading { seconds: 4.0, mebibytes: 64.0, gets: 90.0, fetched_mebibytes: 65.0, dropped };
        let second =
            Reading { seconds: 1.0, gets: again, fetched_mebibytes: 0.0, dropped: 0.0, ..first };
        Round { has_cache, first, second }
    }

    #[test]
    fn data_that_was_read_once_is_not_fetched_again() {
        let missed = |rounds: &[Round]| judge(rounds)[0].has_failed();
        assert!(!missed(&[round(false, 90.0, 0.0), round(true, 0.0, 0.0)]));
        assert!(missed(&[round(true, 0.0, 0.0), round(true, 1.0, 0.0)]), "each round counts");
        assert!(!missed(&[round(true, 3.0, 3.0)]), "it was dropped");
        assert!(missed(&[round(true, 4.0, 3.0), round(true, 0.0, 9.0)]));
    }

    #[test]
    fn both_servers_have_a_column() {
        let text = table(&[round(true, 0.0, 0.0), round(false, 88.0, 0.0)]);
        let again = text.lines().find(|line| line.starts_with("second reading, GETs"));
        let figures: Vec<&str> = again.unwrap_or_default().split_whitespace().skip(3).collect();
        assert_eq!(figures, ["88.00", "0.00"], "{text}");
    }
}
