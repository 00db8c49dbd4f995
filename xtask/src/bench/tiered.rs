//! The cases of KIP-405's performance table: a normal load, late consumers beside it, and a server
//! that has lost its disk; with tiered storage and without it, of this server and of Apache Kafka
//! with three brokers.
//!
//! Each system is measured from scratch, in turns. A producer runs at one rate, first alone, then
//! beside consumers of old data, once with acks=all and once with acks=1.

mod partitions;
mod rebuild;

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use clap::Args;

use super::filesystem::{FileSystem, Limit, drop_caches, emptied, removed};
use super::load::{Load, Sample, due, quantile, rate};
use super::probe::{self, Probe};
use super::{Bar, cpu_time, judged, median, settle, unix_seconds};
use crate::kafka::{Cluster, Member};
use crate::report::{Case, Report};
use crate::server::{Config, Objects, Server, release_binary};
use crate::{Error, ServerOptions, setup};

#[derive(Args)]
pub(crate) struct Options {
    /// The cases to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Part::Load, Part::Rebuild])]
    cases: Vec<Part>,
    /// Number of rounds of the cases of load; in each, all systems are measured from scratch. The
    /// medians count.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// MiB to produce per second, with acks=all. With acks=1 it is 1.8 times as much.
    #[arg(long, default_value_t = 8)]
    rate: u32,
    /// Seconds of each of the two parts of a run: alone, and beside late consumers. More than the
    /// minute between two uploads. The first 10 beside late consumers do not count.
    #[arg(long, default_value_t = 65, value_parser = clap::value_parser!(u32).range(15..))]
    seconds: u32,
    /// MiB of old data.
    #[arg(long, default_value_t = 5 * 1024)]
    old: u32,
    /// The rate of late consumers, as a multiple of the rate of producing.
    #[arg(long, default_value_t = 6)]
    late: u32,
    /// MiB per second of each volume, in each direction: for this server one for the log and one
    /// for the objects; for Kafka one for each broker, and one for remote storage.
    #[arg(long, default_value_t = 150)]
    volume_rate: u64,
    /// Requests per second of a volume, in each direction, but for those of objects.
    #[arg(long, default_value_t = 3000)]
    volume_iops: u64,
    /// GiB of old data with which this server is rebuilt.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 5, 10, 20])]
    rebuilt: Vec<u32>,
    /// GiB of old data with which a broker of Kafka is rebuilt.
    #[arg(long, default_value_t = 10)]
    kafka_rebuilt: u32,
    /// Leave out Apache Kafka.
    #[arg(long)]
    no_kafka: bool,
    #[command(flatten)]
    server: ServerOptions,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// A normal load, and late consumers beside it.
    Load,
    /// A server that has lost its disk, under load.
    Rebuild,
}

/// Partitions of each topic.
const PARTITIONS: u32 = 12;
const BROKERS: u32 = 3;
/// More than a server with default settings keeps in memory, so that none of the old data is there.
const FILLER_MEBIBYTES: u32 = 1280;
/// Seconds that are left out at the start, and after the late consumers start.
const WARM_UP_SECONDS: f64 = 10.0;
/// The rate with acks=1, in relation to that with acks=all.
const RATE_OF_ONE: f64 = 1.8;
const ACKS: [&str; 2] = ["all", "1"];

// The targets.
const MOST_NORMAL: f64 = 1.05;
const MOST_LATE: f64 = 1.2;
const LATE_ENOUGH: Bar = Bar::AtLeast(0.9);
/// More than this, and what is left is too little to judge by.
const MOST_STALLED: f64 = 0.25;

#[derive(Clone, Copy, PartialEq, Eq)]
enum System {
    /// Without uploads during the run: everything is in the log and in memory.
    Local,
    Tiered,
    Kafka,
    TieredKafka,
}

impl System {
    const ALL: [Self; 4] = [Self::Local, Self::Tiered, Self::Kafka, Self::TieredKafka];

    fn name(self) -> &'static str {
        match self {
            Self::Local => "Alluvium, local",
            Self::Tiered => "Alluvium",
            Self::Kafka => "Kafka",
            Self::TieredKafka => "Kafka, tiered",
        }
    }

    fn is_kafka(self) -> bool {
        matches!(self, Self::Kafka | Self::TieredKafka)
    }

    /// Whether it has old data that late consumers read.
    fn has_old(self) -> bool {
        self != Self::Local
    }

    /// The settings of a topic. With `flushed` Kafka flushes each batch before it acknowledges it.
    fn settings(self, flushed: bool) -> Vec<&'static str> {
        let mut settings = Vec::new();
        if self.is_kafka() && flushed {
            // Each batch is on stable storage before it is acknowledged, as always here.
            settings.push("flush.messages=1");
        }
        if self == Self::TieredKafka {
            settings.extend([
                "remote.storage.enable=true",
                "segment.bytes=16777216",
                "local.retention.bytes=33554432",
            ]);
        }
        settings
    }
}

/// A running system, with its volumes.
struct Running {
    peers: Peers,
    // Unmounted after the servers have ended.
    _volumes: Vec<FileSystem>,
}

enum Peers {
    Server(Box<Server>),
    Cluster(Cluster),
}

impl Peers {
    fn address(&self) -> String {
        match self {
            Self::Server(server) => server.address(),
            Self::Cluster(cluster) => cluster.address(),
        }
    }

    /// Creates a topic, and waits until all brokers know it.
    fn create(&self, load: &Load, topic: &str, settings: &[&str]) -> Result<(), Error> {
        load.create(topic, PARTITIONS, settings)?;
        match self {
            Self::Server(_) => Ok(()),
            Self::Cluster(cluster) => partitions::until_known(&cluster.brokers, topic),
        }
    }

    /// The number of uploads of this server.
    fn uploads(&self) -> Result<f64, Error> {
        match self {
            Self::Server(server) => server.metric("alluvium_uploads_total"),
            Self::Cluster(_) => Ok(0.0),
        }
    }

    /// User and system time of all processes.
    fn cpu(&self) -> Result<Duration, Error> {
        match self {
            Self::Server(server) => cpu_time(server.pid()),
            Self::Cluster(cluster) => {
                cluster.brokers.iter().map(|broker| cpu_time(broker.pid())).sum()
            }
        }
    }
}

/// The measurements of one system with one kind of acknowledgement.
struct Run {
    system: System,
    acks: &'static str,
    /// MiB per second that late consumers are to read.
    late: f64,
    /// Uploads in the time alone.
    uploads: f64,
    produced: Vec<Sample>,
    consumed: Vec<Sample>,
    probed: Vec<Sample>,
    alone: (f64, f64),
    beside: Option<(f64, f64)>,
    /// Processor time of the servers per MiB produced, alone, in ms.
    cpu_ms: f64,
}

impl Run {
    fn p(&self, part: f64, time: (f64, f64)) -> f64 {
        quantile(&due(&self.produced, time), part)
    }

    /// A figure of the time beside late consumers.
    fn beside(&self, figure: impl FnOnce((f64, f64)) -> f64) -> f64 {
        self.beside.map_or(f64::NAN, figure)
    }

    /// The p99 without the seconds in which a write of the probe stalled.
    fn undisturbed(&self, time: (f64, f64)) -> f64 {
        quantile(&probe::undisturbed(&self.produced, &self.probed, time), 0.99)
    }

    /// The part of the seconds in which a write of the probe stalled.
    fn stalled(&self, time: (f64, f64)) -> f64 {
        probe::stalled(&self.probed, time)
    }
}

pub(super) fn run(root: &Path, options: &Options) -> Result<Report, Error> {
    let binary = release_binary(root, options.server.server.as_deref())?;
    let mut jars = PathBuf::new();
    if !options.no_kafka {
        jars = setup::tiered_kafka(root).map_err(|missing| Error::from(missing.to_string()))?;
    }
    let systems = System::ALL.into_iter().filter(|it| !(options.no_kafka && it.is_kafka()));
    let systems: Vec<_> = systems.collect();
    let directory = root.join("target/e2e/run/tiered");
    let mut report = Report::default();
    if options.cases.contains(&Part::Load) {
        let runs = load(options, &systems, &binary, &jars, &directory)?;
        println!("\n{}", table(&systems, &runs));
        report.suite("tiered", || Ok(judge(&runs)));
    }
    if options.cases.contains(&Part::Rebuild) {
        let rebuilt = rebuild::run(options, &systems, &binary, &jars, &directory)?;
        println!("\n{}", rebuild::table(&rebuilt));
        report.suite("tiered: rebuild", || Ok(rebuild::judge(&rebuilt)));
    }
    Ok(report)
}

fn load(
    options: &Options,
    systems: &[System],
    binary: &Path,
    jars: &Path,
    directory: &Path,
) -> Result<Vec<Run>, Error> {
    let mut runs = Vec::new();
    for round in 1..=options.rounds {
        for system in systems {
            println!("round {round} of {}: {}", options.rounds, system.name());
            emptied(directory)?;
            let measured = measure(options, *system, binary, jars, directory)?;
            measured.iter().for_each(|run| println!("{}", line(run)));
            runs.extend(measured);
        }
    }
    removed(directory)?;
    Ok(runs)
}

fn measure(
    options: &Options,
    system: System,
    binary: &Path,
    jars: &Path,
    directory: &Path,
) -> Result<Vec<Run>, Error> {
    let running = start(options, system, binary, jars, directory)?;
    let load = Load::new(binary, running.peers.address(), directory);
    if system.has_old() {
        for topic in ["old", "filler"] {
            running.peers.create(&load, topic, &system.settings(false))?;
        }
        load.run("produce", "old", &["--total", &format!("{}MiB", options.old)])?;
        load.run("produce", "filler", &["--total", &format!("{FILLER_MEBIBYTES}MiB")])?;
        match &running.peers {
            Peers::Server(server) => settle(server)?,
            Peers::Cluster(cluster) => {
                rustix::fs::sync();
                if system == System::TieredKafka {
                    partitions::until_remote(&cluster.brokers, "old")?;
                }
            }
        }
    }
    ACKS.iter().map(|acks| produce(options, system, acks, &running, &load)).collect()
}

/// Produces at the rate, alone and then beside late consumers.
fn produce(
    options: &Options,
    system: System,
    acks: &'static str,
    running: &Running,
    load: &Load,
) -> Result<Run, Error> {
    let topic = format!("live-{acks}");
    running.peers.create(load, &topic, &system.settings(acks == "all"))?;
    let seconds = f64::from(options.seconds);
    let parts = if system.has_old() { 2.0 } else { 1.0 };
    let mebibytes_per_second = match acks {
        "all" => f64::from(options.rate),
        _ => f64::from(options.rate) * RATE_OF_ONE,
    };
    let kibibytes = (mebibytes_per_second * 1024.0) as u64;
    let offered = format!("{kibibytes}KiB");
    let time = format!("{}s", (WARM_UP_SECONDS + seconds * parts) as u64);
    drop_caches()?;
    let probe = Probe::start(&load.directory)?;
    let words = ["--rate", &offered, "--duration", &time, "--acks", acks];
    let producer = load.start("produce", &topic, &words)?;
    let started = unix_seconds();
    thread::sleep(Duration::from_secs_f64(WARM_UP_SECONDS));
    let (before, from, uploads) = (running.peers.cpu()?, unix_seconds(), running.peers.uploads()?);
    thread::sleep(Duration::from_secs_f64(seconds));
    let (after, to) = (running.peers.cpu()?, unix_seconds());
    let uploads = running.peers.uploads()? - uploads;
    let mut consumed = Vec::new();
    let mut beside = None;
    if system.has_old() {
        let late = format!("{}KiB", kibibytes * u64::from(options.late));
        let time = format!("{}s", options.seconds);
        consumed = load.run("consume", "old", &["--rate", &late, "--duration", &time])?;
        beside = Some((to + WARM_UP_SECONDS, started + WARM_UP_SECONDS + seconds * parts));
    }
    let produced = producer.finish()?;
    let mebibytes = rate(&produced, from, to) * (to - from);
    Ok(Run {
        system,
        acks,
        late: mebibytes_per_second * f64::from(options.late),
        uploads,
        produced,
        consumed,
        probed: probe.finish()?,
        alone: (from, to),
        beside,
        cpu_ms: (after - before).as_secs_f64() * 1e3 / mebibytes,
    })
}

fn start(
    options: &Options,
    system: System,
    binary: &Path,
    jars: &Path,
    directory: &Path,
) -> Result<Running, Error> {
    let parts = if system.has_old() { 2.0 } else { 1.0 };
    let seconds = WARM_UP_SECONDS + f64::from(options.seconds) * parts;
    let produced = (f64::from(options.rate) * (1.0 + RATE_OF_ONE) * seconds) as u64;
    let old = if system.has_old() { options.old + FILLER_MEBIBYTES } else { 0 };
    let all = u64::from(old) + produced;
    if system.is_kafka() {
        let (cluster, volumes) = cluster(options, system, jars, directory, all)?;
        return Ok(Running { peers: Peers::Cluster(cluster), _volumes: volumes });
    }
    // Without uploads, all that is produced stays in the log and in memory: an upload is at most a
    // quarter of the log, and half of the log cache.
    let mebibytes = produced * 5 / 4 + 64;
    let (wal_mebibytes, log_cache_mebibytes) = match system {
        System::Local => (mebibytes * 4 + 64, mebibytes * 2),
        _ => (2048, 1024),
    };
    let log = log_volume(options, directory, "log", wal_mebibytes)?;
    // Compaction writes records again before it deletes the old objects.
    let objects = objects_volume(options, directory, "objects", all * 2)?;
    let store = format!("file://{}", objects.path().join("store").display());
    let mut arguments = vec!["--object-store".to_owned(), store];
    arguments.extend(["--object-store-rate".into(), format!("{}MiB", options.volume_rate)]);
    if system == System::Local {
        let upload = ["--upload-interval", "1h", "--compaction-size", "0", "--upload-size"];
        arguments.extend(upload.map(str::to_owned));
        arguments.push(format!("{mebibytes}MiB"));
    }
    let server = Server::start(Config {
        binary: binary.to_path_buf(),
        directory: log.path().join("server"),
        wal_mebibytes,
        log_cache_mebibytes,
        wal: None,
        objects: Some(Objects { arguments, environment: Vec::new() }),
    })?;
    Ok(Running { peers: Peers::Server(Box::new(server)), _volumes: vec![log, objects] })
}

/// Creates a volume for a log of this size.
fn log_volume(
    options: &Options,
    directory: &Path,
    name: &str,
    mebibytes: u64,
) -> Result<FileSystem, Error> {
    FileSystem::new(directory, name, mebibytes.div_ceil(1024) + 2, log_limit(options))
}

/// The limits of a volume for a log.
fn log_limit(options: &Options) -> Limit {
    Limit { mebibytes_per_second: options.volume_rate, iops: options.volume_iops }
}

/// Creates a volume for objects of this size.
fn objects_volume(
    options: &Options,
    directory: &Path,
    name: &str,
    mebibytes: u64,
) -> Result<FileSystem, Error> {
    let limit = Limit { mebibytes_per_second: options.volume_rate, iops: 0 };
    FileSystem::new(directory, name, mebibytes.div_ceil(1024) + 2, limit)
}

/// Starts Kafka's brokers, each of which has a volume of this size.
fn cluster(
    options: &Options,
    system: System,
    jars: &Path,
    directory: &Path,
    mebibytes: u64,
) -> Result<(Cluster, Vec<FileSystem>), Error> {
    let mut volumes = Vec::new();
    let remote = directory.join("remote");
    if system == System::TieredKafka {
        volumes.push(objects_volume(options, directory, "remote", mebibytes)?);
    }
    let mut members = Vec::new();
    for node in 1..=BROKERS {
        let own = log_volume(options, directory, &format!("broker-{node}"), mebibytes)?;
        let directory = own.path().join("kafka");
        let further = properties(system, &remote);
        members.push(Member { directory, further, listener: None });
        volumes.push(own);
    }
    Ok((Cluster::start(jars, &members)?, volumes))
}

/// Settings of a broker: three replicas, of which two must be in sync; and the tiered storage of
/// Kafka's own tests, which copies segments into a directory.
fn properties(system: System, remote: &Path) -> String {
    let mut properties = "default.replication.factor=3\n\
                          min.insync.replicas=2\n\
                          offsets.topic.replication.factor=3\n\
                          auto.leader.rebalance.enable=false\n\
                          group.initial.rebalance.delay.ms=0\n"
        .to_owned();
    if system == System::TieredKafka {
        let remote = remote.display();
        properties.push_str(&format!(
            "remote.log.storage.system.enable=true\n\
             remote.log.storage.manager.class.name=\
             org.apache.kafka.server.log.remote.storage.LocalTieredStorage\n\
             remote.log.storage.manager.impl.prefix=rsm.config.\n\
             rsm.config.dir={remote}\n\
             remote.log.metadata.manager.class.name=org.apache.kafka.server.log.remote.metadata.\
             storage.TopicBasedRemoteLogMetadataManager\n\
             remote.log.metadata.manager.impl.prefix=rlmm.config.\n\
             remote.log.metadata.manager.listener.name=PLAINTEXT\n\
             rlmm.config.remote.log.metadata.topic.replication.factor=3\n\
             rlmm.config.remote.log.metadata.topic.num.partitions=5\n\
             remote.log.manager.task.interval.ms=1000\n\
             log.retention.check.interval.ms=2000\n"
        ));
    }
    properties
}

fn line(run: &Run) -> String {
    let p = |time| {
        format!(
            "p95 {:.2}, p99 {:.2} ms ({:.2} without the {:.0}% of seconds with stalls of the disk)",
            run.p(0.95, time),
            run.p(0.99, time),
            run.undisturbed(time),
            100.0 * run.stalled(time)
        )
    };
    let late = match run.beside {
        None => String::new(),
        Some(time) => {
            let rate = rate(&run.consumed, time.0, time.1);
            format!("\n    beside late consumers at {rate:.0} MiB/s: {}", p(time))
        }
    };
    format!("  acks={}: {}; {:.2} ms of CPU per MiB{late}", run.acks, p(run.alone), run.cpu_ms)
}

/// A named figure of a run.
type Figure = (&'static str, fn(&Run) -> f64);

const FIGURES: [Figure; 11] = [
    ("p95, ms", |run| run.p(0.95, run.alone)),
    ("p99, ms", |run| run.p(0.99, run.alone)),
    ("  without stalls of the disk", normal),
    ("beside late consumers: p95, ms", |run| run.beside(|time| run.p(0.95, time))),
    ("  p99, ms", |run| run.beside(|time| run.p(0.99, time))),
    ("  without stalls of the disk", |run| run.beside(|time| run.undisturbed(time))),
    ("  in relation to that before", late_ratio),
    ("late consumers, MiB/s", |run| run.beside(|(from, to)| rate(&run.consumed, from, to))),
    ("seconds with stalls, before, %", |run| 100.0 * run.stalled(run.alone)),
    ("  beside late consumers, %", |run| run.beside(|time| 100.0 * run.stalled(time))),
    ("CPU per MiB, ms", |run| run.cpu_ms),
];

fn normal(run: &Run) -> f64 {
    run.undisturbed(run.alone)
}

fn late_ratio(run: &Run) -> f64 {
    run.beside(|time| run.undisturbed(time)) / normal(run)
}

fn late_rate(run: &Run) -> f64 {
    run.beside(|(from, to)| rate(&run.consumed, from, to)) / run.late
}

fn of(runs: &[Run], system: System, acks: &str, figure: fn(&Run) -> f64) -> f64 {
    let these = runs.iter().filter(|run| (run.system, run.acks) == (system, acks));
    median(these.map(figure))
}

fn table(systems: &[System], runs: &[Run]) -> String {
    let mut text = String::new();
    for acks in ACKS {
        text.push_str(&format!("{:<32}", format!("acks={acks}, medians")));
        for system in systems {
            text.push_str(&format!("{:>17}", system.name()));
        }
        for (name, figure) in FIGURES {
            text.push_str(&format!("\n{name:<32}"));
            for system in systems {
                text.push_str(&format!("{:>17.2}", of(runs, *system, acks, figure)));
            }
        }
        text.push_str("\n\n");
    }
    text
}

fn judge(runs: &[Run]) -> Vec<Case> {
    let mut cases = Vec::new();
    for acks in ACKS {
        let normal = |system| of(runs, system, acks, normal);
        let tiered = |figure| of(runs, System::Tiered, acks, figure);
        let mut judge = |name: &str, value, bar| {
            cases.push(judged(&format!("acks={acks}: {name}"), value, bar));
        };
        judge(
            "p99 with uploads over p99 without, stalls of the disk apart",
            normal(System::Tiered) / normal(System::Local),
            Bar::AtMost(MOST_NORMAL),
        );
        judge("uploads while producing", tiered(|run| run.uploads), Bar::AtLeast(1.0));
        judge(
            "the same without uploads",
            of(runs, System::Local, acks, |run| run.uploads),
            Bar::AtMost(0.0),
        );
        judge(
            "p99 beside late consumers over p99 alone, stalls of the disk apart",
            tiered(late_ratio),
            Bar::AtMost(MOST_LATE),
        );
        judge("rate of late consumers over the intended one", tiered(late_rate), LATE_ENOUGH);
        // Interference of the server itself would be left out, too.
        judge(
            "part of the seconds that are left out, beside late consumers",
            tiered(|run| run.beside(|time| run.stalled(time))),
            Bar::AtMost(MOST_STALLED),
        );
    }
    cases
}
