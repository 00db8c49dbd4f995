//! `alluvium bench`: load for a running server, using only the Kafka protocol, so that any other
//! server can be given the same load.
//!
//! One or two threads per connection, and no work that the measurement does not need: batches are
//! built once, and fetched data is checked and dropped. Client and server may share a machine,
//! where the client takes processor time from the server.

mod consume;
mod produce;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand};
use kafka_protocol::messages::metadata_response::MetadataResponseTopic;
use parking_lot::Mutex;
use serde::Serialize;

use crate::address::HostPort;
use crate::kafka::{Access, Client};
use crate::load::{Latencies, Summary};
use crate::output::{self, Failure, Table};
use crate::topic;
use crate::units::about;

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Produce to a topic, as fast as possible or at a rate, and measure the time until batches are
    /// acknowledged.
    Produce(produce::ProduceArgs),
    /// Consume a topic from its start or from its end, check the batches, and measure the speed.
    Consume(consume::ConsumeArgs),
}

#[derive(Args, Debug)]
struct LoadArgs {
    /// The topic. It must exist: `alluvium topic create`.
    topic: String,
    /// Connections, which share the partitions. Default: one per partition, at most 16. (With
    /// several brokers, this many to each.)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    connections: Option<u16>,
    /// Write a line for each request to this file: when it was due, in microseconds since 1970; its
    /// duration in microseconds, and its bytes. Default: none.
    #[arg(long, value_name = "FILE")]
    samples: Option<PathBuf>,
    #[command(flatten)]
    server: topic::Common,
}

/// Default limit on connections.
const CONNECTIONS: usize = 16;

/// Runs a `bench` command.
///
/// # Errors
/// The server cannot be reached or refuses, or its response is damaged.
pub(crate) fn run(command: BenchCommand) -> Result<(), Failure> {
    match command {
        BenchCommand::Produce(args) => produce::run(&args),
        BenchCommand::Consume(args) => consume::run(&args),
    }
}

/// Partitions that one connection serves, all led by the broker that it connects to.
struct Share {
    broker: HostPort,
    access: Access,
    partitions: Vec<i32>,
}

/// Requests the leaders of the topic's partitions, and distributes the partitions over connections.
fn shares(common: &LoadArgs) -> Result<(MetadataResponseTopic, Vec<Share>), Failure> {
    let access = common.server.access()?;
    let mut client = Client::connect(&common.server.bootstrap, &access).map_err(Failure::new)?;
    let mut answer = topic::metadata(&mut client, Some(std::slice::from_ref(&common.topic)))?;
    let topic = answer.topics.pop().filter(|topic| !topic.partitions.is_empty());
    let missing =
        || Failure::Failed(format!("topic {}: no partitions in the metadata", common.topic));
    let topic = topic.ok_or_else(missing)?;
    let most = common.connections.map_or(CONNECTIONS, usize::from);
    let connections = topic.partitions.len().min(most);
    let mut dealt: BTreeMap<(i32, usize), Vec<i32>> = BTreeMap::new();
    for (number, partition) in topic.partitions.iter().enumerate() {
        let key = (partition.leader_id.0, number % connections);
        dealt.entry(key).or_default().push(partition.partition_index);
    }
    let shares = dealt.into_iter().map(|((leader, _), partitions)| {
        let broker = answer.brokers.iter().find(|broker| broker.node_id.0 == leader);
        let broker = broker.ok_or_else(|| {
            Failure::Failed(format!(
                "topic {}: partition {} has no leader",
                common.topic, partitions[0]
            ))
        })?;
        let port = u16::try_from(broker.port)
            .map_err(|_| Failure::Failed(format!("broker {leader} has port {}", broker.port)))?;
        Ok(Share {
            broker: HostPort { host: broker.host.to_string(), port },
            access: access.clone(),
            partitions,
        })
    });
    let shares = shares.collect::<Result<Vec<_>, Failure>>()?;
    Ok((topic, shares))
}

/// A request that was answered.
struct Sample {
    /// When the request was due.
    due: Instant,
    latency: Duration,
    bytes: u64,
}

/// Counters shared by all connections.
struct Tally {
    started: Instant,
    started_unix: Duration,
    counts: Mutex<Counts>,
    /// Recorded only if they are to be written.
    samples: Option<(File, Mutex<Vec<Sample>>)>,
    /// Set when a connection has failed or the time is over; all connections stop.
    stop: AtomicBool,
}

struct Counts {
    bytes: u64,
    requests: u64,
    skipped: u64,
    all: Latencies,
    /// Since the last line of progress.
    recent: Latencies,
    recent_bytes: u64,
}

/// The figures of a run.
#[derive(Serialize)]
struct Outcome {
    topic: String,
    bytes: u64,
    requests: u64,
    /// Offsets that were deleted before they were read.
    skipped: u64,
    seconds: f64,
    bytes_per_second: f64,
    #[serde(flatten)]
    latency: Summary,
}

impl Tally {
    fn new(common: &LoadArgs) -> Result<Self, Failure> {
        let counts = Counts {
            bytes: 0,
            requests: 0,
            skipped: 0,
            all: Latencies::new()?,
            recent: Latencies::new()?,
            recent_bytes: 0,
        };
        // An error is reported before the run, not after it.
        let samples = match &common.samples {
            None => None,
            Some(path) => {
                let file = File::create(path).map_err(|error| of_samples(path, &error))?;
                Some((file, Mutex::default()))
            }
        };
        Ok(Self {
            started: Instant::now(),
            started_unix: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
            counts: Mutex::new(counts),
            samples,
            stop: AtomicBool::new(false),
        })
    }

    fn add(&self, sample: Sample) {
        let mut counts = self.counts.lock();
        counts.bytes += sample.bytes;
        counts.recent_bytes += sample.bytes;
        counts.requests += 1;
        counts.all.record(sample.latency);
        counts.recent.record(sample.latency);
        drop(counts);
        if let Some((_, samples)) = &self.samples {
            samples.lock().push(sample);
        }
    }

    /// Counts offsets that were deleted before they were read.
    fn skip(&self, offsets: u64) {
        self.counts.lock().skipped += offsets;
    }

    fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Waits until this time, or until the run is over.
    fn sleep_until(&self, time: Instant) {
        crate::load::sleep_until(time, &self.stop);
    }

    /// Runs one connection per share, with a line of progress each second.
    ///
    /// # Errors
    /// The first error of a connection, which stops the others.
    fn drive(
        &self,
        shares: &[Share],
        connection: impl Fn(usize, &Share) -> Result<(), Failure> + Sync,
    ) -> Result<(), Failure> {
        let (done, ended) = std::sync::mpsc::channel();
        let connection = &connection;
        thread::scope(|scope| {
            for (number, share) in shares.iter().enumerate() {
                let done = done.clone();
                scope.spawn(move || {
                    let result = connection(number, share);
                    // The receiver exists until all threads have ended.
                    let _ = done.send(result);
                });
            }
            drop(done);
            let mut outcome = Ok(());
            let mut next_line = self.started + Duration::from_secs(1);
            loop {
                let wait = next_line.saturating_duration_since(Instant::now());
                match ended.recv_timeout(wait) {
                    Ok(Ok(())) => {}
                    Ok(Err(failure)) => {
                        self.stop.store(true, Ordering::Relaxed);
                        outcome = outcome.and(Err(failure));
                    }
                    Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                        self.progress();
                        next_line += Duration::from_secs(1);
                    }
                    Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return outcome,
                }
            }
        })
    }

    fn progress(&self) {
        let mut counts = self.counts.lock();
        let Summary { p50_us, p99_us, max_us, .. } = counts.recent.summary();
        let bytes = std::mem::take(&mut counts.recent_bytes);
        counts.recent.clear();
        drop(counts);
        let seconds = self.started.elapsed().as_secs();
        // An error of standard error cannot be reported.
        let _ = writeln!(
            io::stderr(),
            "{seconds:>5} s  {:>12}/s  p50 {:>8.2} ms  p99 {:>8.2} ms  max {:>8.2} ms",
            about(bytes),
            p50_us / 1e3,
            p99_us / 1e3,
            max_us / 1e3
        );
    }

    /// Prints the figures and writes the samples.
    fn report(self, common: &LoadArgs) -> Result<(), Failure> {
        let seconds = self.started.elapsed().as_secs_f64();
        let counts = self.counts.into_inner();
        let outcome = Outcome {
            topic: common.topic.clone(),
            bytes: counts.bytes,
            requests: counts.requests,
            skipped: counts.skipped,
            seconds,
            bytes_per_second: counts.bytes as f64 / seconds,
            latency: counts.all.summary(),
        };
        if let (Some(path), Some((file, samples))) = (&common.samples, self.samples) {
            let samples = samples.into_inner();
            write_samples(file, self.started, self.started_unix, &samples)
                .map_err(|error| of_samples(path, &error))?;
        }
        if common.server.json {
            return output::json(&outcome);
        }
        let mut table = Table::of_numbers(&[
            "TOPIC", "BYTES", "REQUESTS", "RATE", "P50", "P99", "P99.9", "MAX",
        ]);
        let ms = |us: f64| format!("{:.2} ms", us / 1e3);
        table.row(vec![
            outcome.topic.clone(),
            about(outcome.bytes),
            outcome.requests.to_string(),
            format!("{}/s", about(outcome.bytes_per_second as u64)),
            ms(outcome.latency.p50_us),
            ms(outcome.latency.p99_us),
            ms(outcome.latency.p999_us),
            ms(outcome.latency.max_us),
        ]);
        output::line(table)?;
        match outcome.skipped {
            0 => Ok(()),
            skipped => output::line(format!(
                "{skipped} offsets were skipped: retention deleted them before they were read"
            )),
        }
    }
}

fn of_samples(path: &Path, error: &io::Error) -> Failure {
    Failure::Failed(format!("{}: {error}", path.display()))
}

fn write_samples(
    file: File,
    started: Instant,
    started_unix: Duration,
    samples: &[Sample],
) -> io::Result<()> {
    let mut file = BufWriter::new(file);
    writeln!(file, "due_unix_us,latency_us,bytes")?;
    for Sample { due, latency, bytes } in samples {
        let due = started_unix + due.saturating_duration_since(started);
        writeln!(file, "{},{},{bytes}", due.as_micros(), latency.as_micros())?;
    }
    file.into_inner()?.sync_all()
}
