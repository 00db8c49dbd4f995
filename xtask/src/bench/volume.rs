//! A volume on three servers, each with a log and a store on devices of its own.
//!
//! The load is fio on an NBD export. All devices are files on the same disk, so each write of the
//! volume is at least six writes of this disk, and all flushes are flushes of it. A write is always
//! answered after a majority has flushed it in its log; with `dsync`, the leader's store has also
//! written it with a flush.

mod checkpoints;
mod cluster;
mod failover;
mod fio;
mod idle;
mod trace;
mod usage;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};

use self::cluster::{Apply, Cluster, Sizes};
use self::fio::{Length, Measured, Target, Workload};
use self::usage::Usage;
use super::{Bar, judged, median};
use crate::loopdev::{LoopDevice, write_image};
use crate::report::{Case, Report};
use crate::server::release_binary;
use crate::setup::{self, Missing};
use crate::{Error, ServerOptions};

#[derive(Args)]
pub(crate) struct Options {
    /// What to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Part::ALL)]
    parts: Vec<Part>,
    /// Rounds of the three cases, each with both ways of answering. Medians count.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Duration of each run of fio.
    #[arg(long, default_value_t = 15)]
    seconds: u32,
    /// Times that a leader is killed, and stopped.
    #[arg(long, default_value_t = 10)]
    repetitions: u32,
    /// Numbers of volumes, ascending, with which the idle servers are measured.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 100, 1000])]
    volumes: Vec<u32>,
    /// Try the benchmark out: smaller devices, one round, runs of 3 s, one repetition, 1 and 10
    /// volumes. The figures mean nothing.
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    server: ServerOptions,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The three cases, deferred and dsync.
    Cases,
    /// Latency with and without a checkpoint in progress.
    Checkpoints,
    /// The time to the next answer after a leader is killed, or stopped.
    Failover,
    /// Processor time of idle servers.
    Idle,
    /// Writes and flushes of the devices and of their disk in a second of each case. Needs root and
    /// the kernel's tracefs.
    Trace,
}

impl Part {
    const ALL: [Self; 5] =
        [Self::Cases, Self::Checkpoints, Self::Failover, Self::Idle, Self::Trace];
}

/// Less than 6 GiB for three servers. The stores have space for the slots of idle volumes.
const SIZES: Sizes = Sizes { log: 512, store: 1152, volume: 768 };
const QUICK_SIZES: Sizes = Sizes { log: 256, store: 288, volume: 192 };
/// The size of the device on which the disk itself is measured.
const DISK_MEBIBYTES: u64 = 256;

const RANDOM_DEEP: Workload =
    Workload { name: "4K random, depth 128", pattern: "randwrite", block_kibibytes: 4, depth: 128 };
const SEQUENTIAL: Workload = Workload {
    name: "512K sequential, depth 128",
    pattern: "write",
    block_kibibytes: 512,
    depth: 128,
};
const RANDOM_ONE: Workload =
    Workload { name: "4K random, depth 1", pattern: "randwrite", block_kibibytes: 4, depth: 1 };

/// A case, with the targets of its throughput, deferred over dsync, and of its device bytes per
/// user byte and copy.
const CASES: [(Workload, f64, f64); 3] =
    [(RANDOM_DEEP, 2.1, 2.2), (SEQUENTIAL, 1.35, 2.2), (RANDOM_ONE, 1.3, 3.1)];
/// The target of the processor time of a write of 4 KiB, in microseconds, without fio.
const CPU_US: f64 = 100.0;

pub(super) fn run(root: &Path, options: &Options) -> Result<Report, Error> {
    let binary = release_binary(root, options.server.server.as_deref())?;
    let directory = root.join("target/e2e/run/bench-volume");
    let mut report = Report::default();
    report.suite("bench volume", || match setup::nbd_clients() {
        Ok(()) => measure(&binary, &directory, options),
        Err(Missing::NotAllowed(reason)) => Ok(vec![Case::skipped("bench volume", reason)]),
        Err(Missing::Failed(error)) => Err(error),
    });
    Ok(report)
}

fn measure(binary: &Path, directory: &Path, options: &Options) -> Result<Vec<Case>, Error> {
    if directory.exists() {
        // Detaches the devices of an earlier run that was interrupted.
        drop(LoopDevice::left_in(directory)?);
        fs::remove_dir_all(directory)?;
    }
    fs::create_dir_all(directory)?;
    let mut cases = Vec::new();
    let ended = Plan::new(options).run(binary, directory, &mut cases);
    if ended.is_ok() {
        fs::remove_dir_all(directory)?;
    } else {
        println!("logs are kept in {}", directory.display());
        remove_images(directory)?;
    }
    ended?;
    Ok(cases)
}

/// Removes the files of the devices, which are large.
fn remove_images(directory: &Path) -> Result<(), Error> {
    for file in fs::read_dir(directory)? {
        let path = file?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if ["log", "store", "disk"].iter().any(|start| name.starts_with(start)) {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// What is measured, and for how long.
pub(super) struct Plan {
    parts: Vec<Part>,
    sizes: Sizes,
    rounds: u32,
    seconds: u32,
    repetitions: u32,
    volumes: Vec<u32>,
    idle_seconds: u64,
}

impl Plan {
    fn new(options: &Options) -> Self {
        let parts = options.parts.clone();
        match options.quick {
            true => Self {
                parts,
                sizes: QUICK_SIZES,
                rounds: 1,
                seconds: 3,
                repetitions: 1,
                volumes: vec![1, 10],
                idle_seconds: 3,
            },
            false => Self {
                parts,
                sizes: SIZES,
                rounds: options.rounds,
                seconds: options.seconds,
                repetitions: options.repetitions,
                volumes: options.volumes.clone(),
                idle_seconds: 30,
            },
        }
    }

    fn run(&self, binary: &Path, directory: &Path, cases: &mut Vec<Case>) -> Result<(), Error> {
        println!(
            "all devices are files of {}, on one disk; a write is answered when two of three \
             servers have flushed it in their logs, with dsync also when the leader's store has \
             written it with a flush",
            directory.display()
        );
        measure_disk(directory, self.seconds.min(5))?;
        let mut cluster = Cluster::create(binary, directory, self.sizes)?;
        cluster.start_export()?;
        let target = cluster.socket();
        // Each block has a place in the store before anything is measured.
        fio::run(
            directory,
            &Target::Export(&target),
            self.sizes.volume,
            &SEQUENTIAL,
            Length::Once,
            None,
        )?;
        if self.parts.contains(&Part::Cases) {
            cases.extend(self.cases(&mut cluster)?);
        }
        if self.parts.contains(&Part::Trace) {
            cases.push(trace::measure(&mut cluster, self)?);
        }
        cluster.restart(Apply::Deferred)?;
        if self.parts.contains(&Part::Checkpoints) {
            cases.extend(checkpoints::measure(&cluster, self)?);
        }
        if self.parts.contains(&Part::Failover) {
            cases.extend(failover::measure(&mut cluster, self)?);
        }
        if self.parts.contains(&Part::Idle) {
            cluster.stop_export()?;
            cases.extend(idle::measure(&cluster, self)?);
        }
        cluster.stop()
    }

    /// The three cases, deferred and dsync in turns.
    fn cases(&self, cluster: &mut Cluster) -> Result<Vec<Case>, Error> {
        let mut samples = Vec::new();
        for round in 1..=self.rounds {
            let mut modes = [Apply::Deferred, Apply::Dsync];
            if round % 2 == 0 {
                modes.reverse();
            }
            for apply in modes {
                cluster.restart(apply)?;
                for (workload, ..) in &CASES {
                    let sample = self.sample(cluster, apply, *workload)?;
                    println!("round {round}: {}", sample.line());
                    samples.push(sample);
                }
            }
        }
        println!("\n{}", table(&samples));
        Ok(judge(&samples))
    }

    fn sample(&self, cluster: &Cluster, apply: Apply, workload: Workload) -> Result<Sample, Error> {
        let socket = cluster.socket();
        let before = cluster.settled()?;
        let start = Instant::now();
        let fio = fio::run(
            &cluster.directory,
            &Target::Export(&socket),
            self.sizes.volume,
            &workload,
            Length::Seconds(self.seconds),
            None,
        )?;
        let seconds = start.elapsed().as_secs_f64();
        let during = cluster.usage()?.since(&before);
        let all = cluster.settled()?.since(&before);
        Ok(Sample { apply, workload, fio, seconds, during, all })
    }
}

/// What the disk does by itself, for comparison.
fn measure_disk(directory: &Path, seconds: u32) -> Result<(), Error> {
    let file = directory.join("disk");
    write_image(&file, DISK_MEBIBYTES)?;
    let device = LoopDevice::attach(&file);
    let path = device.as_ref().map_or(&*file, LoopDevice::path);
    let flushed: &[&str] = &["--sync=dsync"];
    for (workload, arguments, flush) in [
        (RANDOM_DEEP, &[][..], "no flush"),
        (RANDOM_DEEP, flushed, "a flush per write"),
        (SEQUENTIAL, &[][..], "no flush"),
        (SEQUENTIAL, flushed, "a flush per write"),
        (RANDOM_ONE, flushed, "a flush per write"),
    ] {
        let target = Target::Device(path, arguments);
        let length = Length::Seconds(seconds);
        let fio = fio::run(directory, &target, DISK_MEBIBYTES, &workload, length, None)?;
        println!(
            "the disk, {}, {flush}: {:.0} IOPS, {:.1} MiB/s, p50 {:.0} us, p99 {:.0} us",
            workload.name,
            fio.iops,
            fio.mebibytes_per_second(),
            fio.p50_us,
            fio.p99_us,
        );
    }
    drop(device);
    fs::remove_file(&file)?;
    Ok(())
}

/// One run of fio, and what it has cost.
struct Sample {
    apply: Apply,
    workload: Workload,
    fio: Measured,
    /// Duration of the run of fio, with its start.
    seconds: f64,
    /// What was used while fio ran.
    during: Usage,
    /// What was used until everything was written to the stores.
    all: Usage,
}

/// A figure of a sample.
type Figure = (&'static str, fn(&Sample) -> f64);

const FIGURES: [Figure; 22] = [
    ("IOPS", |sample| sample.fio.iops),
    ("MiB/s", |sample| sample.fio.mebibytes_per_second()),
    ("p50, us", |sample| sample.fio.p50_us),
    ("p99, us", |sample| sample.fio.p99_us),
    ("CPU per write, us", Sample::cpu_us),
    ("of it three servers", |sample| sample.per_write_us(sample.all.all_servers_cpu())),
    ("of it the export", |sample| sample.per_write_us(sample.all.export_cpu)),
    ("fio's CPU, % of one", |sample| sample.fio.cpu_percent),
    ("processors idle, %", |sample| sample.during.machine.idle_percent()),
    ("disk busy, %", |sample| sample.during.machine.disk_percent(sample.seconds)),
    ("device bytes (kernel)", |sample| sample.amplification(sample.all.kernel_bytes())),
    ("device bytes (counters)", |sample| {
        sample.amplification(Some(sample.all.counters.device_bytes()))
    }),
    ("of it the log", |sample| sample.amplification(Some(sample.all.counters.log_bytes))),
    ("of it sectors", |sample| sample.amplification(Some(sample.all.counters.checkpoint_bytes))),
    ("device flushes/s", |sample| {
        let flushes = sample.during.log.zip(sample.during.store);
        flushes.map_or(f64::NAN, |(log, store)| (log.flushes + store.flushes) as f64)
            / sample.seconds
    }),
    ("flushes/s (counters)", |sample| {
        let counters = &sample.during.counters;
        (counters.log_flushes + counters.store_flushes) / sample.seconds
    }),
    ("log writes/s", |sample| sample.during.counters.log_writes / sample.seconds),
    ("records per log write", |sample| {
        sample.during.counters.records / sample.during.counters.log_writes
    }),
    ("turns/s", |sample| sample.during.counters.turns / sample.seconds),
    ("busy answers/s", |sample| sample.during.counters.busy / sample.seconds),
    ("checkpoints", |sample| sample.during.counters.checkpoints),
    ("installs", |sample| sample.all.counters.installs),
];

impl Sample {
    fn per_write_us(&self, cpu: Duration) -> f64 {
        cpu.as_secs_f64() * 1e6 / self.fio.writes as f64
    }

    /// Processor time of the servers and the export for each write, in microseconds.
    fn cpu_us(&self) -> f64 {
        self.per_write_us(self.all.all_servers_cpu() + self.all.export_cpu)
    }

    /// Device bytes per user byte and copy.
    fn amplification(&self, bytes: Option<f64>) -> f64 {
        bytes.unwrap_or(f64::NAN) / (self.fio.bytes as f64 * cluster::SERVERS as f64)
    }

    /// Device bytes per user byte and copy, as the kernel counts them if it does.
    fn device_bytes(&self) -> f64 {
        let counted = self.all.counters.device_bytes();
        self.amplification(Some(self.all.kernel_bytes().unwrap_or(counted)))
    }

    fn line(&self) -> String {
        let figures = FIGURES.iter().map(|(name, figure)| format!("{name} {:.2}", figure(self)));
        let figures: Vec<String> = figures.collect();
        format!("{}, {}: {}", self.workload.name, self.apply.name(), figures.join("; "))
    }
}

fn of<'a>(
    samples: &'a [Sample],
    workload: &'a Workload,
    apply: Apply,
) -> impl Iterator<Item = &'a Sample> {
    samples.iter().filter(move |sample| sample.workload == *workload && sample.apply == apply)
}

/// Medians over the rounds. Log writes, turns and checkpoints are those of all servers together.
fn table(samples: &[Sample]) -> String {
    let mut text = format!("{:<26}", "medians of the rounds");
    for (workload, ..) in &CASES {
        text.push_str(&format!("{:>32}", workload.name));
    }
    text.push_str(&format!("\n{:<26}", ""));
    for _ in &CASES {
        text.push_str(&format!("{:>16}{:>16}", "deferred", "dsync"));
    }
    for (name, figure) in FIGURES {
        text.push_str(&format!("\n{name:<26}"));
        for (workload, ..) in &CASES {
            for apply in [Apply::Deferred, Apply::Dsync] {
                let value = median(of(samples, workload, apply).map(figure));
                text.push_str(&format!("{value:>16.2}"));
            }
        }
    }
    text
}

/// Compares with the targets. Ratios are those of the runs of one round.
fn judge(samples: &[Sample]) -> Vec<Case> {
    let mut cases = Vec::new();
    for (workload, least_ratio, most_bytes) in &CASES {
        let pairs = of(samples, workload, Apply::Deferred).zip(of(samples, workload, Apply::Dsync));
        let ratio = median(pairs.map(|(deferred, dsync)| deferred.fio.iops / dsync.fio.iops));
        let name = format!("{}: deferred over dsync", workload.name);
        cases.push(judged(&name, ratio, Bar::AtLeast(*least_ratio)));
        let deferred = || of(samples, workload, Apply::Deferred);
        let name = format!("{}: device bytes per user byte and copy", workload.name);
        cases.push(judged(
            &name,
            median(deferred().map(Sample::device_bytes)),
            Bar::AtMost(*most_bytes),
        ));
        if *workload == RANDOM_DEEP {
            let name = format!("{}: us of CPU per write", workload.name);
            cases.push(judged(&name, median(deferred().map(Sample::cpu_us)), Bar::AtMost(CPU_US)));
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::usage::{Counters, DeviceStat, Machine};
    use super::*;

    fn sample(apply: Apply, iops: f64, cpu_ms: u64, kibibytes: u64) -> Sample {
        let usage = Usage {
            servers_cpu: vec![Duration::from_millis(cpu_ms); 3],
            export_cpu: Duration::from_millis(cpu_ms),
            log: Some(DeviceStat { bytes: kibibytes << 10, ..DeviceStat::default() }),
            store: Some(DeviceStat::default()),
            machine: Machine::default(),
            counters: Counters::default(),
        };
        let fio = Measured { writes: 1000, bytes: 4096 * 1000, iops, ..Measured::default() };
        let during = usage.clone();
        Sample { apply, workload: RANDOM_DEEP, fio, seconds: 1.0, during, all: usage }
    }

    /// The cases that fail.
    fn missed(samples: &[Sample]) -> Vec<String> {
        let of_workload = |case: &Case| case.name.starts_with(RANDOM_DEEP.name);
        let missed = judge(samples).into_iter().filter(Case::has_failed).filter(of_workload);
        missed.map(|case| case.name.split(": ").nth(1).unwrap_or_default().to_owned()).collect()
    }

    #[test]
    fn figures_are_compared_with_their_targets() {
        // 4 * 25 ms for 1,000 writes; 2.2 times three copies of 4 KiB each.
        let good = || sample(Apply::Deferred, 2100.0, 25, 26_400);
        assert_eq!(good().cpu_us(), 100.0);
        assert!((good().device_bytes() - 2.2).abs() < 1e-9);
        let dsync = || sample(Apply::Dsync, 1000.0, 90, 90_000);
        assert!(missed(&[good(), dsync()]).is_empty());
        assert_eq!(
            missed(&[sample(Apply::Deferred, 2000.0, 26, 27_000), dsync()]),
            ["deferred over dsync", "device bytes per user byte and copy", "us of CPU per write"]
        );
        // Each round has a ratio of its own.
        let slow =
            || [sample(Apply::Deferred, 210.0, 25, 26_400), sample(Apply::Dsync, 99.0, 1, 1)];
        let rounds: Vec<Sample> =
            [good(), dsync()].into_iter().chain(slow()).chain(slow()).collect();
        assert!(missed(&rounds).is_empty());
    }

    #[test]
    fn each_case_has_two_columns() {
        let text =
            table(&[sample(Apply::Deferred, 2100.0, 25, 1), sample(Apply::Dsync, 9.0, 1, 1)]);
        let iops = text.lines().find(|line| line.starts_with("IOPS")).unwrap();
        let figures: Vec<&str> = iops.split_whitespace().skip(1).collect();
        assert_eq!(figures, ["2100.00", "9.00", "NaN", "NaN", "NaN", "NaN"]);
    }
}
