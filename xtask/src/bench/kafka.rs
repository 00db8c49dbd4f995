//! Kafka's own performance tools against this server and Apache Kafka, alternately:
//! `ProducerPerformance`, `ConsumerPerformance` and `EndToEndLatency`.
//!
//! The server has one half of the processors, the one that handles the disk's interrupts, and the
//! tools have the other. Alluvium always flushes before it acknowledges; Kafka runs with its
//! defaults, which leave flushing to the kernel, and with `flush.messages=1`, which gives the same
//! guarantee. All data is in the same file system.

mod figures;
mod printed;
mod processors;
mod tools;

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use clap::Args;

use super::{Peer, cpu_time};
use crate::kafka::Kafka;
use crate::report::{Case, Report};
use crate::server::{Config, Objects, Server, release_binary};
use crate::{Error, ServerOptions, setup};

use processors::Processors;
use tools::{Measured, Tools};

#[derive(Args)]
pub(crate) struct Options {
    /// Number of rounds; in each, all servers are measured from scratch. The medians count.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Seconds of producing at each rate, as far as the server keeps up; the second half counts.
    #[arg(long, default_value_t = 40)]
    seconds: u32,
    /// MB (10^6 bytes) to produce per second, or `max`; the rates are measured in sequence.
    #[arg(long, value_delimiter = ',', default_value = "max,30,5")]
    rates: Vec<Rate>,
    /// Partitions of the topic.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 100, 1000])]
    partitions: Vec<u32>,
    /// Number of records whose latency from producer to consumer is measured, one after the other;
    /// 0 for none. The tool has no warm-up, and the first records take ten times as long: they
    /// should be less than one percent.
    #[arg(long, default_value_t = 5000)]
    end_to_end: u32,
    /// MiB of recent records that this server keeps in memory for tail reads. (Kafka leaves that to
    /// the page cache, which is not counted as its memory.)
    #[arg(long, default_value_t = 32)]
    log_cache: u64,
    /// MiB of the server's block cache for data read from objects.
    #[arg(long, default_value_t = 32)]
    block_cache: u64,
    /// The directory for the plots.
    #[arg(long, value_name = "DIR", default_value = "docs/plots")]
    plots: PathBuf,
    /// Measure nothing: print tables, plots and targets from the output of earlier runs, which must
    /// have had the same settings.
    #[arg(long, value_name = "FILE", value_delimiter = ',')]
    report: Vec<PathBuf>,
    #[command(flatten)]
    server: ServerOptions,
}

/// The rate of producing.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rate {
    /// 10^6 bytes a second.
    Megabytes(u32),
    /// As fast as possible.
    Max,
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(0) | Err(_) if text != "max" => Err("a number of MB per second, or `max`".into()),
            Ok(megabytes) => Ok(Self::Megabytes(megabytes)),
            Err(_) => Ok(Self::Max),
        }
    }
}

impl std::fmt::Display for Rate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Megabytes(megabytes) => write!(f, "{megabytes} MB/s"),
            Self::Max => f.write_str("max"),
        }
    }
}

/// A measured system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum System {
    /// Each batch is on stable storage before it is acknowledged.
    Alluvium,
    /// Also on stable storage before the acknowledgement, through `flush.messages=1`.
    KafkaFlushed,
    /// With its defaults: acknowledged from the page cache.
    KafkaUnflushed,
}

const SYSTEMS: [System; 3] = [System::Alluvium, System::KafkaFlushed, System::KafkaUnflushed];

impl System {
    fn name(self) -> &'static str {
        match self {
            Self::Alluvium => "Alluvium",
            Self::KafkaFlushed => "Kafka, flushed",
            Self::KafkaUnflushed => "Kafka, no flush",
        }
    }

    /// Configuration of its topics.
    fn settings(self) -> &'static [&'static str] {
        match self {
            Self::KafkaFlushed => &["flush.messages=1"],
            Self::Alluvium | Self::KafkaUnflushed => &[],
        }
    }
}

/// A measured load.
#[derive(Clone, Copy, PartialEq)]
enum Load {
    Produce(Rate),
    /// Produces without waiting for acknowledgements: the cost of the tool itself. Only for
    /// Alluvium; it would be the same for the others.
    Unacknowledged(Rate),
    Consume,
    EndToEnd,
}

/// What one tool measured of one server, and the server's resource usage.
struct Sample {
    system: System,
    partitions: u32,
    load: Load,
    /// MiB per second; 0 for [`Load::EndToEnd`].
    throughput: f64,
    /// 0 for [`Load::Consume`].
    p50_ms: f64,
    p99_ms: f64,
    /// MiB per second of the server's processor time, user and system.
    per_cpu_second: f64,
    /// Peak resident memory of the server during the load, in MiB.
    peak_memory: f64,
}

const RECORD_BYTES: u32 = 1024;
/// Sent first, to estimate the rate that saturates the server.
const FIRST_RECORDS: u64 = 20_000;
/// The mean number of records per partition of a topic before the measurement. Apache Kafka maps
/// two index files for each partition; their first entries cause page faults, 15 ms of processor
/// time each here, and with 1,000 partitions half a minute in which it does nothing else. Batches
/// have 15 records, and the second one of a partition makes its first entries.
const FIRST_OF_A_PARTITION: u64 = 64;
/// Then as fast as possible for this long: a JVM that has just started has not yet compiled its hot
/// code.
const WARM_UP_SECONDS: u32 = 15;
/// Repeated while the rate increases by this factor: the first few records say little about many,
/// especially with 1,000 partitions.
const STILL_RISING: f64 = 1.25;
const MAX_WARM_UPS: u32 = 6;
const WAL_MEBIBYTES: u64 = 2048;
/// As fast as possible, with the default linger.ms.
const FLAT_OUT: &[&str] = &["acks=all"];
/// At a fixed rate, latency matters, not how long a producer waits for more records before it sends
/// (linger.ms, 5 ms by default).
const AT_A_RATE: &[&str] = &["acks=all", "linger.ms=0"];
const UNACKNOWLEDGED: &[&str] = &["acks=0", "linger.ms=0"];

pub(super) fn run(root: &Path, options: &Options) -> Result<Report, Error> {
    if !options.report.is_empty() {
        let read = |path: &PathBuf| {
            fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
        };
        let outputs: Result<Vec<_>, _> = options.report.iter().map(read).collect();
        let (rounds, samples) = printed::read(options, &outputs?)?;
        return tell(root, options, rounds, &samples, Vec::new());
    }
    let binary = release_binary(root, options.server.server.as_deref())?;
    let jars = setup::kafka(root).map_err(|missing| Error::from(missing.to_string()))?;
    let directory = root.join("target/e2e/run/bench-kafka");
    fs::create_dir_all(&directory)?;
    let processors = Processors::divided(&directory)?;
    let mut samples = Vec::new();
    let mut broken = Vec::new();
    for round in 1..=options.rounds {
        for partitions in &options.partitions {
            for position in 0..SYSTEMS.len() {
                // The systems alternate in going first.
                let system = SYSTEMS[(position + round as usize - 1) % SYSTEMS.len()];
                println!(
                    "round {round} of {}: {partitions} partitions, {}",
                    options.rounds,
                    system.name()
                );
                if directory.exists() {
                    fs::remove_dir_all(&directory)?;
                }
                fs::create_dir_all(&directory)?;
                // Dirty pages of the previous system must not be written back during this
                // measurement.
                rustix::fs::sync();
                let under_test = UnderTest {
                    options,
                    system,
                    partitions: *partitions,
                    binary: &binary,
                    jars: &jars,
                    directory: &directory,
                };
                // A system that stalls or fails does not discard the figures of the others; it is
                // reported at the end.
                if let Err(error) = under_test.measure(&processors, &mut samples) {
                    let what = format!("round {round}, {partitions} partitions, {}", system.name());
                    println!("  {what}: {error}");
                    broken.push(Case::failed(&what, error));
                }
            }
        }
    }
    fs::remove_dir_all(&directory)?;
    tell(root, options, options.rounds, &samples, broken)
}

/// Prints tables and targets, and writes the plots.
fn tell(
    root: &Path,
    options: &Options,
    rounds: u32,
    samples: &[Sample],
    mut cases: Vec<Case>,
) -> Result<Report, Error> {
    for partitions in &options.partitions {
        println!("\n{}", figures::table(options, *partitions, samples));
    }
    figures::plot(&root.join(&options.plots), options, rounds, samples)?;
    let mut report = Report::default();
    cases.extend(figures::judge(options, samples));
    report.suite("bench kafka", || Ok(cases));
    Ok(report)
}

/// One server with topics of this many partitions.
struct UnderTest<'a> {
    options: &'a Options,
    system: System,
    partitions: u32,
    binary: &'a Path,
    jars: &'a Path,
    directory: &'a Path,
}

impl UnderTest<'_> {
    fn measure(&self, processors: &Processors, samples: &mut Vec<Sample>) -> Result<(), Error> {
        let server = Processors::on(&processors.server, || self.start())?;
        Processors::on(&processors.tools, || self.loads(&server, samples))
    }

    fn start(&self) -> Result<Peer, Error> {
        let directory = self.directory.join("server");
        if self.system != System::Alluvium {
            return Ok(Peer::Kafka(Kafka::start(self.jars, &directory, "")?));
        }
        Ok(Peer::Alluvium(Box::new(Server::start(Config {
            binary: self.binary.to_path_buf(),
            directory,
            wal_mebibytes: WAL_MEBIBYTES,
            log_cache_mebibytes: self.options.log_cache,
            wal: None,
            objects: Some(Objects {
                arguments: vec!["--block-cache".into(), format!("{}MiB", self.options.block_cache)],
                environment: Vec::new(),
            }),
        })?)))
    }

    fn loads(&self, server: &Peer, samples: &mut Vec<Sample>) -> Result<(), Error> {
        let tools = Tools {
            jars: self.jars,
            address: server.address(),
            settings: self.system.settings(),
            partitions: self.partitions,
        };
        tools.create("warm-up")?;
        let first_of_all = u64::from(self.partitions) * FIRST_OF_A_PARTITION;
        let records = FIRST_RECORDS.max(first_of_all);
        let mut most = tools.produce("warm-up", records, None, FLAT_OUT)?.throughput;
        for _ in 0..MAX_WARM_UPS {
            let (records, _) = amount(Rate::Max, WARM_UP_SECONDS, most);
            let now = tools.produce("warm-up", records, None, FLAT_OUT)?.throughput;
            let is_warm = now < most * STILL_RISING;
            most = most.max(now);
            if is_warm {
                break;
            }
        }
        tools.delete("warm-up")?;
        for (number, rate) in self.options.rates.iter().enumerate() {
            let topic = format!("topic-{number}");
            tools.create(&topic)?;
            tools.produce(&topic, first_of_all, None, FLAT_OUT)?;
            let (records, per_second) = amount(*rate, self.options.seconds, most);
            // Dirty pages from before must not be written back during this measurement.
            rustix::fs::sync();
            let cost = Cost::start(server.pid())?;
            let settings = if per_second.is_some() { AT_A_RATE } else { FLAT_OUT };
            let produced = tools.produce(&topic, records, per_second, settings)?;
            // The first records met a server that had just started.
            most = most.max(produced.throughput);
            samples.push(self.sample(Load::Produce(*rate), &produced, records, &cost)?);
            if *rate == Rate::Max {
                let cost = Cost::start(server.pid())?;
                let consumed = tools.consume(&topic, records)?;
                samples.push(self.sample(Load::Consume, &consumed, records, &cost)?);
            } else if self.system == System::Alluvium {
                let cost = Cost::start(server.pid())?;
                let sent = tools.produce(&topic, records, per_second, UNACKNOWLEDGED)?;
                samples.push(self.sample(Load::Unacknowledged(*rate), &sent, records, &cost)?);
            }
            tools.delete(&topic)?;
        }
        if self.options.end_to_end > 0 {
            tools.create("end-to-end")?;
            let cost = Cost::start(server.pid())?;
            let records = self.options.end_to_end;
            let measured = tools.end_to_end("end-to-end", records)?;
            samples.push(self.sample(Load::EndToEnd, &measured, records.into(), &cost)?);
        }
        Ok(())
    }

    fn sample(
        &self,
        load: Load,
        measured: &Measured,
        records: u64,
        cost: &Cost,
    ) -> Result<Sample, Error> {
        let (cpu, peak_memory) = cost.so_far()?;
        let mebibytes = (records * u64::from(RECORD_BYTES)) as f64 / f64::from(1 << 20);
        let sample = Sample {
            system: self.system,
            partitions: self.partitions,
            load,
            throughput: measured.throughput,
            p50_ms: measured.p50_ms,
            p99_ms: measured.p99_ms,
            per_cpu_second: mebibytes / cpu.as_secs_f64(),
            peak_memory,
        };
        println!("  {}", figures::line(&sample, cost.started.elapsed(), cpu));
        Ok(sample)
    }
}

/// The number of records to send within `seconds`, and per second, to a server that handles at most
/// `most` MiB per second.
fn amount(rate: Rate, seconds: u32, most: f64) -> (u64, Option<u64>) {
    let most = most * f64::from(1 << 20) / f64::from(RECORD_BYTES);
    let asked = match rate {
        Rate::Megabytes(megabytes) => {
            Some(u64::from(megabytes) * 1_000_000 / u64::from(RECORD_BYTES))
        }
        Rate::Max => None,
    };
    let each_second = asked.map_or(most, |asked| most.min(asked as f64));
    ((each_second * f64::from(seconds)) as u64, asked)
}

/// The resources that a server uses from a moment on.
struct Cost {
    pid: u32,
    started: Instant,
    cpu: Duration,
}

impl Cost {
    fn start(pid: u32) -> Result<Self, Error> {
        // Resets the peak of the resident set (proc(5)).
        fs::write(format!("/proc/{pid}/clear_refs"), "5")?;
        Ok(Self { pid, started: Instant::now(), cpu: cpu_time(pid)? })
    }

    /// Returns the processor time, and the peak of the resident set in MiB.
    fn so_far(&self) -> Result<(Duration, f64), Error> {
        let path = format!("/proc/{}/status", self.pid);
        let status = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kibibytes = peak.and_then(|peak| peak.trim().strip_suffix(" kB")?.parse::<f64>().ok());
        let kibibytes = kibibytes.ok_or_else(|| format!("{path} has no VmHWM"))?;
        Ok((cpu_time(self.pid)?.saturating_sub(self.cpu), kibibytes / 1024.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_a_number_or_max() {
        assert_eq!("5".parse(), Ok(Rate::Megabytes(5)));
        assert_eq!("max".parse(), Ok(Rate::Max));
        for wrong in ["", "0", "-1", "fast", "5.5"] {
            assert!(wrong.parse::<Rate>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn no_more_is_sent_than_the_server_handles_in_the_time() {
        let second = 5_000_000 / 1024;
        assert_eq!(amount(Rate::Megabytes(5), 1, 10.0), (second, Some(second)));
        assert_eq!(amount(Rate::Megabytes(30), 2, 10.0), (20_480, Some(30_000_000 / 1024)));
        assert_eq!(amount(Rate::Max, 2, 10.0), (20_480, None));
    }
}
