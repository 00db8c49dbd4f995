//! `alluvium wal bench`: what a write-ahead log does on a target, alone and beside fio.

use std::path::{Path, PathBuf};
use std::time::Duration;

use alluvium_device::{Access, Durability, Engine, OpenOptions, SharedDevice};
use alluvium_wal::{FormatOptions, OpenError, Options, Wal};
use clap::Args;
use serde::Serialize;

use super::TargetInfo;
use super::compare::{self, BANDWIDTH_JOBS, Comparison, LATENCY_JOB, PAIRINGS, Round};
use super::drive::{self, Load};
use super::fio::{self, Job};
use crate::output::{self, Failure, Table};
use crate::progress::Meter;
use crate::storage::with_window;
use crate::units::{Size, Span, about};

const RECORDS: [Size; 6] =
    [Size { bytes: 100 }, Size::kib(1), Size::kib(4), Size::kib(64), Size::kib(256), Size::mib(1)];
const OUTSTANDING: [usize; 3] = [1, 64, 1024];
/// Of a new file.
const NEW_CAPACITY: Size = Size::gib(1);
/// Of an existing target: enough for several laps a minute, without asking for a whole disk.
const MAX_CAPACITY: Size = Size::gib(4);
const WINDOW: Size = Size::mib(64);

#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    /// A block device or file. A file that does not exist is created, and removed at the end (unless the bench is killed).
    #[arg(long, value_name = "PATH")]
    target: PathBuf,
    /// Overwrite the target although it holds something.
    #[arg(long)]
    force: bool,
    /// Bytes to use, a multiple of 4KiB. Default: 1GiB of a new file, up to 4GiB of an existing target.
    #[arg(long, value_name = "SIZE")]
    capacity: Option<Size>,
    /// As for `alluvium serve`: auto, dsync or device.
    #[arg(long, value_name = "auto|dsync|device", default_value_t = Durability::Auto)]
    durability: Durability,
    /// As for `alluvium serve`: auto, io_uring or threads.
    #[arg(long, value_name = "auto|io_uring|threads", default_value_t = Engine::Auto)]
    engine: Engine,
    /// Measure only this record size; can be repeated. Default: 100B, 1KiB, 4KiB, 64KiB, 256KiB, 1MiB.
    #[arg(long, value_name = "SIZE")]
    record: Vec<Size>,
    /// Measure only with so many records outstanding; can be repeated. Default: 1, 64, 1024.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    outstanding: Vec<u32>,
    /// Length of each measurement.
    #[arg(long, value_name = "TIME", default_value_t = Span(Duration::from_secs(3)))]
    duration: Span,
    /// Run so long before each measurement.
    #[arg(long, value_name = "TIME", default_value_t = Span(Duration::from_millis(500)))]
    warmup: Span,
    /// Bound on what is appended and not durable; records that do not fit into it are not measured. Default: 64MiB, or half of the
    /// ring if that is less.
    #[arg(long, value_name = "SIZE")]
    window: Option<Size>,
    /// Block writes in flight.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    io_depth: u16,
    /// Then compare with fio on the same target with the same durability, in rounds that take turns.
    #[arg(long)]
    fio: bool,
    /// Number of rounds with fio; the medians count.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    pairs: u16,
    /// With --fio: leave out the table of all record sizes.
    #[arg(long, requires = "fio")]
    only_pairs: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    machine: Machine,
    target: TargetInfo,
    capacity_bytes: u64,
    window_bytes: u64,
    io_depth: u16,
    warmup_ms: u128,
    duration_ms: u128,
    cases: Vec<Case>,
    fio_version: Option<String>,
    rounds: Vec<Round>,
    comparisons: Vec<Comparison>,
}

#[derive(Serialize)]
struct Machine {
    cpu: String,
    cpus: usize,
    kernel: String,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Case {
    Measured(drive::Measured),
    Skipped { record_bytes: u64, outstanding: usize, reason: String },
}

/// Measure.
///
/// # Errors
/// The target can not be used, holds something, or fails; fio is wanted and missing.
pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    if args.duration.0.is_zero() {
        return Err(Failure::Usage("--duration is 0: nothing would be measured".into()));
    }
    let fio_version = if args.fio { Some(fio::version()?) } else { None };
    let _removed_at_the_end = (!args.target.exists()).then(|| Created(&args.target));
    let bench = Bench::prepare(args)?;
    let cases = if args.only_pairs { Vec::new() } else { bench.matrix()? };
    let mut rounds = Vec::new();
    if args.fio {
        for n in 0..args.pairs {
            eprintln!("round {} of {} with fio", n + 1, args.pairs);
            rounds.push(bench.round(n % 2 == 1)?);
        }
    }
    let report = Report {
        machine: Machine::this(),
        capacity_bytes: bench.capacity.bytes,
        target: bench.target,
        window_bytes: bench.window.bytes,
        io_depth: args.io_depth,
        warmup_ms: args.warmup.0.as_millis(),
        duration_ms: args.duration.0.as_millis(),
        cases,
        fio_version,
        comparisons: PAIRINGS.iter().filter_map(|pairing| pairing.compare(&rounds)).collect(),
        rounds,
    };
    if args.json { output::json(&report) } else { print(&report) }
}

/// Removes the file that the bench has created. One that was there before stays.
struct Created<'a>(&'a Path);

impl Drop for Created<'_> {
    fn drop(&mut self) {
        match std::fs::remove_file(self.0) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => eprintln!("{}: can not be removed: {error}", self.0.display()),
        }
    }
}

struct Bench<'a> {
    args: &'a BenchArgs,
    target: TargetInfo,
    capacity: Size,
    window: Size,
}

impl<'a> Bench<'a> {
    /// Open the target once, create it if it is missing, and make sure that it may be overwritten.
    fn prepare(args: &'a BenchArgs) -> Result<Self, Failure> {
        let new = !args.target.exists();
        let meter = Meter::new(format!("pre-writing {}", args.target.display()));
        let options = OpenOptions {
            create_bytes: new.then_some(args.capacity.unwrap_or(NEW_CAPACITY).bytes),
            progress: Some(meter.callback()),
            ..open_options(args)
        };
        let device = alluvium_device::open(&args.target, &options).map_err(Failure::new)?;
        let target = TargetInfo::of(device.geometry());
        let whole = Size { bytes: target.size_bytes };
        let capacity = args.capacity.unwrap_or(whole.min(MAX_CAPACITY));
        let mut bench = Self { args, target, capacity, window: WINDOW };
        let half_ring = Size { bytes: bench.format(&device, args.force)? / 2 };
        bench.window = args.window.unwrap_or(WINDOW.min(half_ring));
        if bench.window > half_ring {
            return Err(Failure::Usage(format!(
                "--window is {}, allowed is at most half of the ring, {}",
                bench.window,
                about(half_ring.bytes)
            )));
        }
        Ok(bench)
    }

    /// The size of the ring in bytes.
    fn format(&self, device: &SharedDevice, force: bool) -> Result<u64, Failure> {
        let options = FormatOptions {
            capacity_bytes: Some(self.capacity.bytes),
            force,
            ..FormatOptions::default()
        };
        match Wal::format(device, &options) {
            Ok(_) => Ok(Wal::inspect(device).map_err(Failure::new)?.ring_bytes),
            Err(OpenError::Occupied { device, looks_like }) => Err(Failure::Failed(format!(
                "{device} holds {looks_like}; the bench would overwrite it. Give --force if that is meant"
            ))),
            Err(error) => Err(Failure::new(error)),
        }
    }

    /// All record sizes with all numbers of outstanding records.
    fn matrix(&self) -> Result<Vec<Case>, Failure> {
        let records = if self.args.record.is_empty() { &RECORDS[..] } else { &self.args.record };
        let outstanding: Vec<usize> = match self.args.outstanding.as_slice() {
            [] => OUTSTANDING.to_vec(),
            chosen => chosen.iter().map(|n| *n as usize).collect(),
        };
        let mut cases = Vec::new();
        for &record in records {
            for &outstanding in &outstanding {
                cases.push(match misfit(record, outstanding, self.window) {
                    Some(reason) => {
                        eprintln!("skipping {record} x {outstanding}: {reason}");
                        Case::Skipped { record_bytes: record.bytes, outstanding, reason }
                    }
                    None => Case::Measured(self.measure(record, outstanding)?),
                });
            }
        }
        Ok(cases)
    }

    /// A load on a log of its own.
    fn measure(&self, record: Size, outstanding: usize) -> Result<drive::Measured, Failure> {
        eprintln!("measuring {record} x {outstanding}");
        let device = alluvium_device::open(&self.args.target, &open_options(self.args))
            .map_err(Failure::new)?;
        // What is there is the bench's own by now.
        self.format(&device, true)?;
        let options =
            Options { io_depth: usize::from(self.args.io_depth), ..with_window(self.window) };
        let (wal, _) = Wal::open(device, &options, None, &mut |_| Ok(())).map_err(Failure::new)?;
        let load = Load {
            record_bytes: usize::try_from(record.bytes).map_err(Failure::new)?,
            outstanding,
            warmup: self.args.warmup.0,
            duration: self.args.duration.0,
        };
        let measured = drive::drive(&wal, &load)?;
        wal.close().map_err(Failure::new)?;
        Ok(measured)
    }

    /// Everything that is compared, once. Log and fio take turns, so that a disk that changes its mind does so for both; every
    /// second round goes backwards, so that neither always comes first.
    fn round(&self, backwards: bool) -> Result<Round, Failure> {
        let mut loads: Vec<(Size, usize)> = Vec::new();
        for pairing in &PAIRINGS {
            let load = (pairing.record, pairing.outstanding);
            let fits = misfit(pairing.record, pairing.outstanding, self.window).is_none();
            if fits && !loads.contains(&load) {
                loads.push(load);
            }
        }
        let jobs: Vec<Job> = std::iter::once(LATENCY_JOB).chain(BANDWIDTH_JOBS).collect();
        let mut steps: Vec<Step> = Vec::new();
        for i in 0..loads.len().max(jobs.len()) {
            steps.extend(jobs.get(i).map(|job| Step::Fio(*job)));
            steps
                .extend(loads.get(i).map(|(record, outstanding)| Step::Wal(*record, *outstanding)));
        }
        if backwards {
            steps.reverse();
        }
        let setting = fio::Setting {
            target: &self.args.target,
            size_bytes: self.capacity.bytes,
            flushes: self.target.flushes,
            engine: self.target.engine,
            warmup: self.args.warmup.0,
            duration: self.args.duration.0,
        };
        let mut round = Round { fio: Vec::new(), wal: Vec::new() };
        for step in steps {
            match step {
                Step::Fio(job) => {
                    eprintln!("measuring fio {} x {}", job.block, job.depth);
                    round.fio.push(fio::run(&setting, job)?);
                }
                Step::Wal(record, outstanding) => {
                    round.wal.push(self.measure(record, outstanding)?);
                }
            }
        }
        Ok(round)
    }
}

enum Step {
    Fio(Job),
    Wal(Size, usize),
}

fn open_options(args: &BenchArgs) -> OpenOptions {
    OpenOptions {
        access: Access::Exclusive,
        durability: args.durability,
        engine: args.engine,
        io_depth: usize::from(args.io_depth),
        ..OpenOptions::default()
    }
}

/// Why so many records of that size can not be outstanding, if they can not.
fn misfit(record: Size, outstanding: usize, window: Size) -> Option<String> {
    /// A record's header; see `docs/format/wal.md`. Padding comes on top, and the log says so when it is too much.
    const HEADER_BYTES: u64 = 32;
    let largest = Size { bytes: u64::from(with_window(window).max_record_bytes) };
    if record > largest {
        return Some(format!("with a window of {window} a record has at most {largest}"));
    }
    let needed = (record.bytes + HEADER_BYTES).saturating_mul(outstanding as u64);
    (needed > window.bytes)
        .then(|| format!("{} outstanding do not fit into the window of {window}", about(needed)))
}

impl Machine {
    fn this() -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == "model name").then(|| value.trim().to_string())
        });
        let uname = rustix::system::uname();
        Self {
            cpu: model.unwrap_or_else(|| uname.machine().to_string_lossy().into_owned()),
            cpus: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            kernel: uname.release().to_string_lossy().into_owned(),
        }
    }
}

fn print(report: &Report) -> Result<(), Failure> {
    let Report { machine, target, .. } = report;
    output::line(format_args!(
        "{}, {} CPUs, Linux {}; {target}; engine {}, {}; {} in use, window {}, I/O depth {}, {} each",
        machine.cpu,
        machine.cpus,
        machine.kernel,
        target.engine,
        target.durability(),
        Size { bytes: report.capacity_bytes },
        Size { bytes: report.window_bytes },
        report.io_depth,
        Span(Duration::from_millis(u64::try_from(report.duration_ms).unwrap_or(u64::MAX))),
    ))?;
    if !report.cases.is_empty() {
        output::line(format_args!("\n{}", cases_table(&report.cases)))?;
    }
    if !report.rounds.is_empty() {
        output::line(format_args!("\n{}", fio_table(&report.rounds)))?;
        let version = report.fio_version.as_deref().unwrap_or("fio");
        output::line(format_args!(
            "\nbeside {version}, medians of {} rounds:\n{}",
            report.rounds.len(),
            compare::table(&report.comparisons)
        ))?;
    }
    Ok(())
}

fn cases_table(cases: &[Case]) -> Table {
    let mut table = Table::of_numbers(&[
        "record",
        "outstanding",
        "p50 us",
        "p99 us",
        "p99.9 us",
        "max us",
        "MiB/s",
        "records/s",
        "writes/s",
        "flushes/s",
        "CPU us/record",
    ]);
    for case in cases {
        table.row(match case {
            Case::Measured(m) => vec![
                Size { bytes: m.record_bytes as u64 }.to_string(),
                m.outstanding.to_string(),
                format!("{:.1}", m.p50_us),
                format!("{:.1}", m.p99_us),
                format!("{:.1}", m.p999_us),
                format!("{:.1}", m.max_us),
                format!("{:.1}", m.bytes_per_second / f64::from(1 << 20)),
                format!("{:.0}", m.records as f64 / m.seconds),
                format!("{:.0}", m.device_writes_per_second),
                format!("{:.0}", m.flushes_per_second),
                format!("{:.2}", m.cpu_us_per_record),
            ],
            Case::Skipped { record_bytes, outstanding, .. } => vec![
                Size { bytes: *record_bytes }.to_string(),
                outstanding.to_string(),
                "skipped".into(),
            ],
        });
    }
    table
}

/// fio's own figures, round by round.
fn fio_table(rounds: &[Round]) -> Table {
    let mut table = Table::of_numbers(&[
        "fio", "depth", "p50 us", "p99 us", "p99.9 us", "max us", "MiB/s", "writes/s",
    ]);
    for measured in rounds.iter().flat_map(|round| &round.fio) {
        table.row(vec![
            Size { bytes: measured.block_bytes }.to_string(),
            measured.depth.to_string(),
            format!("{:.1}", measured.p50_us),
            format!("{:.1}", measured.p99_us),
            format!("{:.1}", measured.p999_us),
            format!("{:.1}", measured.max_us),
            format!("{:.1}", measured.bytes_per_second / f64::from(1 << 20)),
            format!("{:.0}", measured.writes_per_second),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_into_the_window_is_named() {
        let window = Size::mib(64);
        assert_eq!(misfit(Size::kib(256), 64, window), None);
        let reason = misfit(Size::mib(1), 64, window).unwrap();
        assert!(reason.contains("64MiB") && reason.contains("64.0 MiB"), "{reason}");
        let reason = misfit(Size::mib(17), 1, window).unwrap();
        assert!(reason.contains("at most 16MiB"), "{reason}");
        assert!(misfit(Size { bytes: 100 }, usize::MAX, window).is_some());
    }
}
