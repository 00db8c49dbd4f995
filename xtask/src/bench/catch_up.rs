//! Steady producing while lagging consumers read old data.
//!
//! The figures of a round: the latency and the rate of producing in its first third, and while
//! lagging consumers read; and the rate of these consumers, compared with what they reached alone
//! before.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use alluvium_chart::{Axis, Chart, Scale, Series};
use clap::Args;

use super::filesystem::{FileSystem, Limit, drop_caches, emptied, removed};
use super::load::{Load, Running, Sample, due, quantile, rate};
use super::probe::Probe;
use super::{Bar, Peer, cpu_time, judged, median, unix_seconds};
use crate::kafka::Kafka;
use crate::report::{Case, Report};
use crate::server::{Config, Objects, Server, release_binary};
use crate::{Error, ServerOptions, setup};

#[derive(Args)]
pub(crate) struct Options {
    /// Number of rounds; in each, all servers are measured from scratch. The medians count.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// MiB to produce per second. (Kafka, configured to flush each batch, does not keep up with
    /// much more.)
    #[arg(long, default_value_t = 10)]
    rate: u32,
    /// Seconds to produce in a round. Lagging consumers start after a third.
    #[arg(long, default_value_t = 45)]
    seconds: u32,
    /// MiB of old data. It should be more than can be read in the time; data that is read again
    /// comes from the file system's cache.
    #[arg(long, default_value_t = 5 * 1024)]
    old: u32,
    /// MiB per second of each volume, in each direction: one for the log and one for the objects;
    /// Kafka has one for both.
    #[arg(long, default_value_t = 150)]
    volume_rate: u64,
    /// Requests per second of the log's volume, in each direction.
    #[arg(long, default_value_t = 3000)]
    volume_iops: u64,
    /// Do not limit the volumes, which are all on the same disk. Old data is read repeatedly; the
    /// file system's cache is dropped each second, which takes about 20 ms of a core.
    #[arg(long)]
    unlimited: bool,
    /// Leave out Apache Kafka.
    #[arg(long)]
    no_kafka: bool,
    /// The directory for the plots.
    #[arg(long, value_name = "DIR", default_value = "docs/plots")]
    plots: PathBuf,
    #[command(flatten)]
    server: ServerOptions,
}

/// Partitions of each topic.
const PARTITIONS: u32 = 4;
/// More than a server with default settings keeps in memory, so that none of the old data is there.
const FILLER_MEBIBYTES: u32 = 1280;
/// How often the file system's cache is dropped where old data is read more than once.
const DROP_EVERY: Duration = Duration::from_secs(1);
/// Seconds that are left out after each change of the load.
const SETTLE_SECONDS: f64 = 2.0;

// The targets.
const MOST_P99_RATIO: f64 = 1.2;
const LEAST_PRODUCING: f64 = 0.98;
const LEAST_READING: f64 = 0.8;

#[derive(Clone, Copy, PartialEq, Eq)]
enum System {
    Alluvium,
    Kafka,
}

impl System {
    fn name(self) -> &'static str {
        match self {
            Self::Alluvium => "Alluvium",
            Self::Kafka => "Apache Kafka",
        }
    }
}

/// The measurements of a round.
struct Round {
    system: System,
    alone: f64,
    started: f64,
    third: f64,
    end: f64,
    produced: Vec<Sample>,
    consumed: Vec<Sample>,
    /// Latencies of the underlying disk during the round.
    probed: Vec<Sample>,
    /// Cores that the server used before, and with lagging consumers.
    cores: (f64, f64),
}

impl Round {
    fn before(&self) -> (f64, f64) {
        (self.started + SETTLE_SECONDS, self.third)
    }

    fn during(&self) -> (f64, f64) {
        (self.third + SETTLE_SECONDS, self.end)
    }

    fn p(&self, part: f64, time: (f64, f64)) -> f64 {
        quantile(&due(&self.produced, time), part)
    }

    /// The median of the p99 of each second, so that a second in which the disk stalls is only one
    /// of many.
    fn p99_of_a_second(&self, (from, to): (f64, f64)) -> f64 {
        let seconds = (to - from) as u32;
        median((0..seconds).map(|second| {
            let from = from + f64::from(second);
            self.p(0.99, (from, from + 1.0))
        }))
    }

    fn probe(&self, time: (f64, f64)) -> f64 {
        quantile(&due(&self.probed, time), 0.99)
    }

    fn producing(&self, (from, to): (f64, f64)) -> f64 {
        rate(&self.produced, from, to)
    }

    fn reading(&self) -> f64 {
        let (from, to) = self.during();
        rate(&self.consumed, from, to)
    }
}

pub(super) fn run(root: &Path, options: &Options) -> Result<Report, Error> {
    let binary = release_binary(root, options.server.server.as_deref())?;
    let mut systems = vec![System::Alluvium];
    let mut jars = PathBuf::new();
    if !options.no_kafka {
        systems.push(System::Kafka);
        jars = setup::kafka(root).map_err(|missing| Error::from(missing.to_string()))?;
    }
    let directory = root.join("target/e2e/run/catch-up");
    emptied(&directory)?;
    let mut rounds: Vec<Round> = Vec::new();
    for number in 1..=options.rounds {
        for system in &systems {
            println!("round {number} of {}: {}", options.rounds, system.name());
            let round = round(options, *system, &binary, &jars, &directory)?;
            println!("{}", line(&round));
            rounds.push(round);
        }
    }
    removed(&directory)?;
    println!("\n{}", table(&systems, &rounds));
    plot(&root.join(&options.plots), options, &systems, &rounds)?;
    let mut report = Report::default();
    report.suite("catch-up", || Ok(judge(&rounds)));
    Ok(report)
}

fn round(
    options: &Options,
    system: System,
    binary: &Path,
    jars: &Path,
    directory: &Path,
) -> Result<Round, Error> {
    let (rate, iops) =
        if options.unlimited { (0, 0) } else { (options.volume_rate, options.volume_iops) };
    let needed = u64::from(options.old + FILLER_MEBIBYTES + options.rate * options.seconds);
    let gibibytes = needed.div_ceil(1024) + 3;
    let limit = Limit { mebibytes_per_second: rate, iops };
    let log = FileSystem::new(directory, "log", gibibytes, limit)?;
    let objects = match system {
        System::Alluvium => {
            let limit = Limit { mebibytes_per_second: rate, iops: 0 };
            Some(FileSystem::new(directory, "objects", gibibytes, limit)?)
        }
        System::Kafka => None,
    };
    let peer = match &objects {
        Some(objects) => Peer::Alluvium(Box::new(Server::start(Config {
            binary: binary.to_path_buf(),
            directory: log.path().join("server"),
            wal_mebibytes: 2048,
            log_cache_mebibytes: 1024,
            wal: None,
            objects: Some(Objects {
                arguments: object_store(&objects.path().join("store"), rate),
                environment: Vec::new(),
            }),
        })?)),
        None => Peer::Kafka(Kafka::start(jars, &log.path().join("kafka"), "")?),
    };
    let load = Load::new(binary, peer.address(), directory);
    load.create("old", PARTITIONS, &[])?;
    load.create("filler", PARTITIONS, &[])?;
    // Each batch is on stable storage before it is acknowledged, as always with Alluvium. (The
    // topics with old data are not flushed: in Kafka that would take minutes.)
    let flushed: &[&str] = if system == System::Kafka { &["flush.messages=1"] } else { &[] };
    load.create("live", PARTITIONS, flushed)?;
    load.run("produce", "old", &["--total", &format!("{}MiB", options.old)])?;
    load.run("produce", "filler", &["--total", &format!("{FILLER_MEBIBYTES}MiB")])?;
    peer.settle()?;

    let third = f64::from(options.seconds) / 3.0;
    let milliseconds = |seconds: f64| format!("{}ms", (seconds * 1000.0) as u64);
    drop_caches()?;
    let alone_for = milliseconds(third);
    let alone = load.start("consume", "old", &["--duration", &alone_for])?;
    let alone = until_read(alone, options)?;
    let (from, to) = (alone[0].due + SETTLE_SECONDS, alone[0].due + third);
    let alone = super::load::rate(&alone, from, to);
    thread::sleep(Duration::from_secs(3));

    drop_caches()?;
    let probe = Probe::start(directory)?;
    let (rate, seconds) = (format!("{}MiB", options.rate), format!("{}s", options.seconds));
    let producer = load.start("produce", "live", &["--rate", &rate, "--duration", &seconds])?;
    let (started, cpu) = (unix_seconds(), cpu_time(peer.pid())?);
    while unix_seconds() < started + third {
        let left = Duration::from_secs_f64((started + third - unix_seconds()).max(0.001));
        thread::sleep(left.min(DROP_EVERY));
        if options.unlimited {
            drop_caches()?;
        }
    }
    let (at_third, cpu_at_third) = (unix_seconds(), cpu_time(peer.pid())?);
    let reading_for = milliseconds(2.0 * third);
    let consumer = load.start("consume", "old", &["--duration", &reading_for])?;
    let consumed = until_read(consumer, options)?;
    let cpu_at_end = cpu_time(peer.pid())?;
    let end = unix_seconds().min(started + 3.0 * third);
    let produced = producer.finish()?;
    let probed = probe.finish()?;
    Ok(Round {
        system,
        alone,
        started,
        third: at_third,
        end,
        produced,
        consumed,
        probed,
        cores: (
            (cpu_at_third - cpu).as_secs_f64() / (at_third - started),
            (cpu_at_end - cpu_at_third).as_secs_f64() / (end - at_third),
        ),
    })
}

/// The server's options, with the rate of the object store, as an operator would configure it.
fn object_store(directory: &Path, mebibytes_per_second: u64) -> Vec<String> {
    let mut arguments = vec!["--object-store".into(), format!("file://{}", directory.display())];
    if mebibytes_per_second > 0 {
        arguments.extend(["--object-store-rate".into(), format!("{mebibytes_per_second}MiB")]);
    }
    arguments
}

/// Waits for a client that reads old data from the volume, not from memory.
fn until_read(mut client: Running, options: &Options) -> Result<Vec<Sample>, Error> {
    while options.unlimited && !client.has_ended()? {
        thread::sleep(DROP_EVERY);
        drop_caches()?;
    }
    client.finish()
}

fn line(round: &Round) -> String {
    let (before, during) = (round.before(), round.during());
    format!(
        "  p50 {:.2} -> {:.2} ms, p99 {:.2} -> {:.2} ms, of a second {:.2} -> {:.2} ms, \
         of the disk {:.2} -> {:.2} ms; producing {:.1} -> {:.1} MiB/s; \
         cold reads {:.0} MiB/s, alone {:.0}; server {:.2} -> {:.2} cores",
        round.p(0.5, before),
        round.p(0.5, during),
        round.p(0.99, before),
        round.p(0.99, during),
        round.p99_of_a_second(before),
        round.p99_of_a_second(during),
        round.probe(before),
        round.probe(during),
        round.producing(before),
        round.producing(during),
        round.reading(),
        round.alone,
        round.cores.0,
        round.cores.1,
    )
}

/// A named figure of a round.
type Figure = (&'static str, fn(&Round) -> f64);

const FIGURES: [Figure; 18] = [
    ("p50 before, ms", |round| round.p(0.5, round.before())),
    ("p50 during, ms", |round| round.p(0.5, round.during())),
    ("p99 before, ms", |round| round.p(0.99, round.before())),
    ("p99 during, ms", |round| round.p(0.99, round.during())),
    ("p99 during / before", p99_ratio),
    ("p99 of a second before, ms", |round| round.p99_of_a_second(round.before())),
    ("p99 of a second during, ms", |round| round.p99_of_a_second(round.during())),
    ("p99 of a second, ratio", |round| {
        round.p99_of_a_second(round.during()) / round.p99_of_a_second(round.before())
    }),
    ("disk alone, p99 before, ms", |round| round.probe(round.before())),
    ("disk alone, p99 during, ms", |round| round.probe(round.during())),
    ("producing before, MiB/s", |round| round.producing(round.before())),
    ("producing during, MiB/s", |round| round.producing(round.during())),
    ("producing during / before", producing_ratio),
    ("cold reads alone, MiB/s", |round| round.alone),
    ("cold reads during, MiB/s", Round::reading),
    ("cold reads during / alone", reading_ratio),
    ("server's cores before", |round| round.cores.0),
    ("server's cores during", |round| round.cores.1),
];

fn p99_ratio(round: &Round) -> f64 {
    round.p(0.99, round.during()) / round.p(0.99, round.before())
}

fn producing_ratio(round: &Round) -> f64 {
    round.producing(round.during()) / round.producing(round.before())
}

fn reading_ratio(round: &Round) -> f64 {
    round.reading() / round.alone
}

fn of(rounds: &[Round], system: System, figure: fn(&Round) -> f64) -> f64 {
    median(rounds.iter().filter(|round| round.system == system).map(figure))
}

fn table(systems: &[System], rounds: &[Round]) -> String {
    let mut text = format!("{:<28}", "medians");
    for system in systems {
        text.push_str(&format!("{:>14}", system.name()));
    }
    for (name, figure) in FIGURES {
        text.push_str(&format!("\n{name:<28}"));
        for system in systems {
            text.push_str(&format!("{:>14.2}", of(rounds, *system, figure)));
        }
    }
    text
}

fn judge(rounds: &[Round]) -> Vec<Case> {
    let judge = |name, figure, bar| judged(name, of(rounds, System::Alluvium, figure), bar);
    vec![
        judge("p99 of producing, during over before", p99_ratio, Bar::AtMost(MOST_P99_RATIO)),
        judge(
            "rate of producing, during over before",
            producing_ratio,
            Bar::AtLeast(LEAST_PRODUCING),
        ),
        judge("cold reads, during over alone", reading_ratio, Bar::AtLeast(LEAST_READING)),
    ]
}

fn plot(
    directory: &Path,
    options: &Options,
    systems: &[System],
    rounds: &[Round],
) -> Result<(), Error> {
    fs::create_dir_all(directory)?;
    // One round of each, the median by the most important figure.
    let shown: Vec<&Round> = systems.iter().filter_map(|system| middle(rounds, *system)).collect();
    let each_second = |round: &Round, figure: &dyn Fn(f64, f64) -> f64| -> Vec<(f64, f64)> {
        let seconds = (round.end - round.started) as u32;
        let at = |second: u32| {
            let from = round.started + f64::from(second);
            (f64::from(second) + 0.5, figure(from, from + 1.0))
        };
        (0..seconds).map(at).filter(|point| point.1 > 0.0).collect()
    };
    let subtitle = if options.unlimited {
        format!("{} MiB/s produced, each batch flushed; everything on one disk", options.rate)
    } else {
        format!(
            "{} MiB/s produced, each batch flushed; volumes of {} MiB/s, {} IOPS",
            options.rate, options.volume_rate, options.volume_iops
        )
    };
    let chart = |title: &str, y: &str, scale: Scale, series: Vec<Series>| Chart {
        title: title.into(),
        subtitle: subtitle.clone(),
        x: Axis { label: "seconds".into(), scale: Scale::Linear },
        y: Axis { label: y.into(), scale },
        series,
        marks: vec![(f64::from(options.seconds) / 3.0, "lagging consumers start".into())],
    };
    let latency = shown.iter().map(|round| Series {
        name: round.system.name().into(),
        points: each_second(round, &|from, to| round.p(0.99, (from, to))),
        dashed: false,
    });
    let mut rates = Vec::new();
    for round in &shown {
        rates.push(Series {
            name: format!("{}, produced", round.system.name()),
            points: each_second(round, &|from, to| round.producing((from, to))),
            dashed: false,
        });
        rates.push(Series {
            name: format!("{}, consumed", round.system.name()),
            points: each_second(round, &|from, to| rate(&round.consumed, from, to)),
            dashed: true,
        });
    }
    let suffix = if options.unlimited { "-one-disk" } else { "" };
    for (name, chart) in [
        (
            format!("catch-up-latency{suffix}.svg"),
            chart(
                "Produce latency while lagging consumers read",
                "p99 of each second, ms",
                Scale::Logarithmic,
                latency.collect(),
            ),
        ),
        (
            format!("catch-up-rates{suffix}.svg"),
            chart("Producing and cold reads", "MiB/s", Scale::Logarithmic, rates),
        ),
    ] {
        let path = directory.join(name);
        fs::write(&path, chart.render())?;
        println!("wrote {}", path.display());
    }
    Ok(())
}

/// The round with the median ratio of latencies, the lower of two.
fn middle(rounds: &[Round], system: System) -> Option<&Round> {
    let mut of: Vec<&Round> = rounds.iter().filter(|round| round.system == system).collect();
    of.sort_by(|one, other| p99_ratio(one).total_cmp(&p99_ratio(other)));
    of.get(of.len().saturating_sub(1) / 2).copied()
}
