//! `alluvium wal bench`: performance of a write-ahead log on a target: alone, compared with fio,
//! and on a modelled cloud disk.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use alluvium_device::model::ModelledDisk;
use alluvium_device::{Access, Durability, Engine, OpenOptions, SharedDevice};
use alluvium_wal::{FormatOptions, OpenError, Options, Wal};
use clap::Args;

use super::cloud::{self, Model, Verdict};
use super::compare::{BANDWIDTH_JOBS, LATENCY_JOB, PAIRINGS, Round};
use super::drive::{self, Load};
use super::fio::{self, Job};
use super::paced::{self, Pace};
use super::report::{self, Case, Machine, Report};
use super::{TargetInfo, plot, reopen, sweep};
use crate::output::{self, Failure};
use crate::progress::Meter;
use crate::storage::with_window;
use crate::units::{Size, Span, about};

const RECORDS: [Size; 6] =
    [Size { bytes: 100 }, Size::kib(1), Size::kib(4), Size::kib(64), Size::kib(256), Size::mib(1)];
const OUTSTANDING: [usize; 3] = [1, 64, 1024];
/// Capacity of a new file.
const NEW_CAPACITY: Size = Size::gib(1);
/// Capacity on an existing target: enough for several laps a minute, without using a whole disk.
const MAX_CAPACITY: Size = Size::gib(4);
/// Capacity of a log in memory, all of which is allocated.
const MEMORY_CAPACITY: Size = Size::mib(256);
const WINDOW: Size = Size::mib(64);
const WARMUP: Duration = Duration::from_millis(500);
/// Longer than a load of 1% above the quotas needs to use up a tenth of a second of saved quota.
const MODEL_WARMUP: Duration = Duration::from_secs(10);
/// The largest window that a log can have.
const MAX_WINDOW: Size = Size::gib(1);

#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    /// A block device or file. A file that does not exist is created, and removed at the end
    /// (unless the bench is killed). Optional with --model: without it the modelled disk is in
    /// memory.
    #[arg(long, value_name = "PATH", required_unless_present = "model")]
    target: Option<PathBuf>,
    /// Overwrite the target even if it is not empty. Default: no.
    #[arg(long, requires = "target")]
    force: bool,
    /// Bytes to use, a multiple of 4KiB. Default: 1GiB for a new file, up to 4GiB of an existing
    /// target, 256MiB of memory.
    #[arg(long, value_name = "SIZE")]
    capacity: Option<Size>,
    /// As for `alluvium serve`: auto, dsync or device.
    #[arg(long, value_name = "auto|dsync|device", default_value_t = Durability::Auto)]
    durability: Durability,
    /// As for `alluvium serve`: auto, io_uring or threads.
    #[arg(long, value_name = "auto|io_uring|threads", default_value_t = Engine::Auto)]
    engine: Engine,
    /// Measure at the speed of a modelled disk: `cloud` (3,000 IOPS and 125 MiB/s, a request above
    /// 256 KiB counting as several; 0.5 ms per request plus its bytes at 220 MiB/s), or settings
    /// that differ from it, as in `iops=16000,bandwidth=1000MiB,latency=400us,transfer=1GiB`. The
    /// log is limited to the same IOPS and bandwidth. Default: the target at its own speed.
    #[arg(long, value_name = "cloud|KEY=VALUE,...")]
    model: Option<Model>,
    /// Measure only this record size; can be repeated. Default: 100B, 1KiB, 4KiB, 64KiB, 256KiB,
    /// 1MiB; with --model 1KiB, 4KiB, 64KiB, 128KiB, 256KiB, 1MiB.
    #[arg(long, value_name = "SIZE", value_parser = record_size)]
    record: Vec<Size>,
    /// Closed loop: keep this number of records outstanding; can be repeated. Latency is measured
    /// from the call of append. Default: 1, 64, 1024; with --model see --rate.
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=1_000_000),
        conflicts_with = "rate",
    )]
    outstanding: Vec<u32>,
    /// Open loop: offer this number of bytes of records per second, evenly spaced, however long
    /// earlier ones take; can be repeated. Latency is measured from the time at which a record was
    /// due. Default with --model: 10, 25, 50, 75 and 100% of a full load, which is 96% of the
    /// disk's bandwidth (120MiB for `cloud`).
    #[arg(long, value_name = "SIZE")]
    rate: Vec<Size>,
    /// Length of each measurement.
    #[arg(long, value_name = "TIME", default_value_t = Span(Duration::from_secs(3)))]
    duration: Span,
    /// Warm-up before each measurement. Default: 500ms; with --model 10s, because a load above the
    /// quotas first uses up the quota that the disk had saved.
    #[arg(long, value_name = "TIME")]
    warmup: Option<Span>,
    /// Limit on bytes appended and not durable. Default: 64MiB, or half of the ring if that is
    /// less; more for a load that needs it.
    #[arg(long, value_name = "SIZE")]
    window: Option<Size>,
    /// Block writes in flight.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 8,
        value_parser = clap::value_parser!(u16).range(1..=1024),
    )]
    io_depth: u16,
    /// Then compare with fio on the same target with the same durability, in alternating rounds.
    /// Default: no.
    #[arg(long, conflicts_with = "model")]
    fio: bool,
    /// Instead raise the log's own limit on writes from 3,000 per second to 100,000 and to none, in
    /// alternating rounds, and report whether throughput falls. Closed loop; record sizes are 1KiB,
    /// 4KiB, 64KiB and 256KiB unless set with --record, and 1,024 records are outstanding up to
    /// 4KiB and 64 above unless set with --outstanding. Default: no.
    #[arg(long, conflicts_with_all = ["fio", "rate"])]
    raise_limit: bool,
    /// Instead fill the target (up to 1GiB) with records of 1KiB and of 64KiB, or of the sizes set
    /// with --record, drop the log without closing it, as in a crash, and measure how fast it is
    /// opened again, compared with fio's sequential reads of 1MiB, in alternating rounds. Default:
    /// no.
    #[arg(
        long,
        requires = "target",
        conflicts_with_all = ["fio", "model", "rate", "outstanding", "plot", "raise_limit"],
    )]
    recovery: bool,
    /// Number of rounds with --fio, --raise-limit and --recovery; medians are reported.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 3,
        value_parser = clap::value_parser!(u16).range(1..),
    )]
    pairs: u16,
    /// With --fio: omit the table of all record sizes. Default: no.
    #[arg(long, requires = "fio")]
    only_pairs: bool,
    /// Write plots of the tables as SVG files into this directory, which is created if it is
    /// missing. Default: none.
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
    /// Print JSON. Default: tables.
    #[arg(long)]
    json: bool,
}

impl BenchArgs {
    fn warmup(&self) -> Duration {
        let default = if self.model.is_some() { MODEL_WARMUP } else { WARMUP };
        self.warmup.map_or(default, |warmup| warmup.0)
    }
}

fn record_size(text: &str) -> Result<Size, String> {
    let size: Size = text.parse()?;
    match size.bytes {
        0 => Err("a record has at least one byte".into()),
        _ if size > MAX_WINDOW => Err(format!("the largest window is {MAX_WINDOW}")),
        _ => Ok(size),
    }
}

/// Runs the measurements.
///
/// # Errors
/// The target is unusable, is not empty, or fails; fio is needed and missing; plots cannot be
/// written.
pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    if args.duration.0.is_zero() {
        return Err(Failure::Usage("--duration is 0: nothing would be measured".into()));
    }
    for load in loads(args) {
        let LoadKind::Open(rate) = load else { continue };
        for record in records(args) {
            let offered = u128::from(rate.bytes) * args.duration.0.as_nanos();
            if offered < u128::from(record.bytes) * 1_000_000_000 {
                return Err(Failure::Usage(format!(
                    "{rate} per second offer no record of {record} within {}; use a longer \
                     --duration or another --rate",
                    args.duration
                )));
            }
        }
    }
    if let Some(directory) = &args.plot {
        std::fs::create_dir_all(directory)
            .map_err(|error| Failure::Failed(format!("{}: {error}", directory.display())))?;
    }
    let fio_version = if args.fio || args.recovery { Some(fio::version()?) } else { None };
    let new = args.target.as_deref().filter(|target| !target.exists());
    let _removed_at_the_end = new.map(Created);
    let bench = Bench::prepare(args)?;
    let instead = args.only_pairs || args.raise_limit || args.recovery;
    let cases = if instead { Vec::new() } else { bench.cases()? };
    let rounds = if let (true, Some(target)) = (args.fio, &args.target) {
        bench.rounds(|backwards| bench.round(target, backwards))?
    } else {
        Vec::new()
    };
    let recovery_rounds = if let (true, Some(target)) = (args.recovery, &args.target) {
        bench.rounds(|backwards| bench.recovery_round(target, backwards))?
    } else {
        Vec::new()
    };
    let sweeps = if args.raise_limit { bench.sweeps()? } else { Vec::new() };
    let verdict = |case: &Case| Verdict::of(args.model?, case.paced()?);
    let report = Report {
        machine: Machine::this(),
        capacity_bytes: bench.capacity.bytes,
        target: bench.target,
        model: args.model,
        window_bytes: bench.window.bytes,
        io_depth: args.io_depth,
        warmup_ms: args.warmup().as_millis(),
        duration_ms: args.duration.0.as_millis(),
        verdicts: cases.iter().filter_map(verdict).collect(),
        cases,
        fio_version,
        comparisons: PAIRINGS.iter().filter_map(|pairing| pairing.compare(&rounds)).collect(),
        rounds,
        recoveries: records(args)
            .into_iter()
            .filter_map(|record| reopen::compare(record, &recovery_rounds))
            .collect(),
        recovery_rounds,
        sweeps,
    };
    if let Some(directory) = &args.plot {
        plot::write(&report, directory)?;
    }
    if args.json { output::json(&report) } else { report::print(&report) }
}

/// Removes the file that the bench created. A file that existed before stays.
struct Created<'a>(&'a Path);

impl Drop for Created<'_> {
    fn drop(&mut self) {
        match std::fs::remove_file(self.0) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => eprintln!("{}: cannot be removed: {error}", self.0.display()),
        }
    }
}

fn records(args: &BenchArgs) -> Vec<Size> {
    match (&args.record, args.model) {
        (chosen, _) if !chosen.is_empty() => chosen.clone(),
        _ if args.recovery => reopen::RECORDS.to_vec(),
        _ if args.raise_limit => sweep::RECORDS.to_vec(),
        (_, Some(_)) => cloud::records(),
        (_, None) => RECORDS.to_vec(),
    }
}

/// The load on a log.
#[derive(Clone, Copy)]
enum LoadKind {
    /// A number of outstanding records.
    Closed(usize),
    /// A number of bytes per second.
    Open(Size),
}

fn loads(args: &BenchArgs) -> Vec<LoadKind> {
    let open = |rates: &[Size]| rates.iter().copied().map(LoadKind::Open).collect();
    match (&args.rate[..], &args.outstanding[..], args.model) {
        ([], [], Some(model)) => open(&model.rates()),
        ([], [], None) => OUTSTANDING.map(LoadKind::Closed).to_vec(),
        ([], chosen, _) => chosen.iter().map(|n| LoadKind::Closed(*n as usize)).collect(),
        (rates, _, _) => open(rates),
    }
}

struct Bench<'a> {
    args: &'a BenchArgs,
    target: TargetInfo,
    capacity: Size,
    half_ring: Size,
    window: Size,
}

/// An open target, and the model in front of it.
struct Disk {
    device: SharedDevice,
    model: Option<Arc<ModelledDisk>>,
}

impl<'a> Bench<'a> {
    /// Opens the target once, creates it if it is missing, and ensures that it may be overwritten.
    fn prepare(args: &'a BenchArgs) -> Result<Self, Failure> {
        let device = match &args.target {
            None => open_disk(args, args.capacity.unwrap_or(MEMORY_CAPACITY))?.device,
            Some(path) => {
                let new = !path.exists();
                let meter = Meter::new(format!("pre-writing {}", path.display()));
                let options = OpenOptions {
                    create_bytes: new.then_some(args.capacity.unwrap_or(NEW_CAPACITY).bytes),
                    progress: Some(meter.callback()),
                    ..open_options(args)
                };
                alluvium_device::open(path, &options).map_err(Failure::new)?
            }
        };
        let target = TargetInfo::of(device.geometry());
        let whole = Size { bytes: target.size_bytes };
        let capacity = args.capacity.unwrap_or(whole.min(MAX_CAPACITY));
        let ring_bytes = format(&device, capacity, args.force)?;
        let half_ring = Size { bytes: ring_bytes / 2 };
        let window = args.window.unwrap_or(WINDOW.min(half_ring));
        if window > half_ring {
            return Err(Failure::Usage(format!(
                "--window is {window}, but must be at most half of the ring, {}",
                about(half_ring.bytes)
            )));
        }
        Ok(Self { args, target, capacity, half_ring, window })
    }

    /// Measures all record sizes under all loads.
    fn cases(&self) -> Result<Vec<Case>, Failure> {
        let mut cases = Vec::new();
        for record in records(self.args) {
            for load in loads(self.args) {
                cases.push(match load {
                    LoadKind::Open(rate) => Case::Paced(self.pace(record, rate)?),
                    LoadKind::Closed(outstanding) => match self.window_for(record, outstanding) {
                        Ok(_) => Case::Measured(self.measure(record, outstanding)?),
                        Err(reason) => {
                            eprintln!("skipping {record} x {outstanding}: {reason}");
                            Case::Skipped { record_bytes: record.bytes, outstanding, reason }
                        }
                    },
                });
            }
        }
        Ok(cases)
    }

    /// Returns a window that fits this number of records, or the reason why there is none and which
    /// option would help.
    fn window_for(&self, record: Size, outstanding: usize) -> Result<Size, String> {
        let needed = window_needed(record, outstanding);
        if needed > MAX_WINDOW {
            return Err(format!(
                "needs a window of {needed}, but the largest is {MAX_WINDOW}; use a lower \
                 --outstanding"
            ));
        }
        if self.args.window.is_some() {
            return if needed <= self.window {
                Ok(self.window)
            } else {
                Err(format!("does not fit into --window {}; use --window {needed}", self.window))
            };
        }
        if needed > self.half_ring {
            // Twice the window, plus the headers in front of the ring and rounding.
            let capacity = Size::mib((2 * needed.bytes).div_ceil(1 << 20) + 1);
            return Err(format!(
                "needs a window of {needed}, but at most half of the ring is allowed; use \
                 --capacity {capacity}"
            ));
        }
        Ok(needed.max(self.window))
    }

    /// Returns the options for a log that accepts records of size `record`.
    fn options(&self, record: Size, window: Size) -> Result<Options, Failure> {
        let defaults = with_window(window);
        let quotas = self.args.model.map(|model| model.0);
        Ok(Options {
            io_depth: usize::from(self.args.io_depth),
            max_record_bytes: defaults
                .max_record_bytes
                .max(u32::try_from(record.bytes).map_err(Failure::new)?),
            iops: quotas.map(|model| model.iops),
            bandwidth_bytes_per_second: quotas.map(|model| model.bandwidth_bytes_per_second),
            ..defaults
        })
    }

    /// Creates and opens an empty log.
    fn open_log(&self, options: &Options) -> Result<(Wal, Option<Arc<ModelledDisk>>), Failure> {
        let Disk { device, model } = open_disk(self.args, self.capacity)?;
        // The content of the target is the bench's own by now.
        format(&device, self.capacity, true)?;
        let (wal, _) = Wal::open(device, options, None, &mut |_| Ok(())).map_err(Failure::new)?;
        Ok((wal, model))
    }

    /// Runs a closed-loop load on a log of its own.
    fn measure(&self, record: Size, outstanding: usize) -> Result<drive::Measured, Failure> {
        eprintln!("measuring {record} x {outstanding}");
        let window = self.window_for(record, outstanding).map_err(Failure::Usage)?;
        self.measure_with(record, outstanding, &self.options(record, window)?)
    }

    fn measure_with(
        &self,
        record: Size,
        outstanding: usize,
        options: &Options,
    ) -> Result<drive::Measured, Failure> {
        let (wal, _disk) = self.open_log(options)?;
        let load = Load {
            record_bytes: usize::try_from(record.bytes).map_err(Failure::new)?,
            outstanding,
            warmup: self.args.warmup(),
            duration: self.args.duration.0,
            window_bytes: options.window_bytes,
        };
        let measured = drive::drive(&wal, &load)?;
        wal.close().map_err(Failure::new)?;
        Ok(measured)
    }

    /// Runs an open-loop load on a log of its own.
    fn pace(&self, record: Size, rate: Size) -> Result<paced::Measured, Failure> {
        eprintln!("measuring {record} at {rate}/s");
        let window = self.window_for(record, 1).map_err(Failure::Usage)?;
        let (wal, disk) = self.open_log(&self.options(record, window)?)?;
        let pace = Pace {
            record_bytes: usize::try_from(record.bytes).map_err(Failure::new)?,
            bytes_per_second: rate.bytes,
            warmup: self.args.warmup(),
            duration: self.args.duration.0,
            window_bytes: window.bytes,
        };
        let measured = paced::drive(&wal, disk.as_deref(), &pace)?;
        wal.close().map_err(Failure::new)?;
        Ok(measured)
    }

    /// Measures everything that is compared, once. Log and fio alternate, so that a disk whose
    /// speed changes affects both; every second round has the reverse order, so that neither is
    /// always first.
    fn round(&self, target: &Path, backwards: bool) -> Result<Round, Failure> {
        let mut loads: Vec<(Size, usize)> = Vec::new();
        for pairing in &PAIRINGS {
            let load = (pairing.record, pairing.outstanding);
            let fits = self.window_for(pairing.record, pairing.outstanding).is_ok();
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
        let setting = self.fio_setting(target);
        let mut round = Round { fio: Vec::new(), wal: Vec::new() };
        for step in steps {
            match step {
                Step::Fio(job) => round.fio.push(beside(&setting, job)?),
                Step::Wal(record, outstanding) => {
                    round.wal.push(self.measure(record, outstanding)?);
                }
            }
        }
        Ok(round)
    }

    fn fio_setting<'t>(&self, target: &'t Path) -> fio::Setting<'t> {
        fio::Setting {
            target,
            size_bytes: self.capacity.bytes,
            flushes: self.target.flushes,
            engine: self.target.engine,
            warmup: self.args.warmup(),
            duration: self.args.duration.0,
        }
    }

    /// Runs the configured number of rounds; the argument of `round` selects the reverse order.
    fn rounds<R>(&self, round: impl Fn(bool) -> Result<R, Failure>) -> Result<Vec<R>, Failure> {
        let pairs = self.args.pairs;
        let run = |n: u16| {
            eprintln!("round {} of {pairs}", n + 1);
            round(n % 2 == 1)
        };
        (0..pairs).map(run).collect()
    }

    /// Measures each record size and each of fio's jobs once, alternating.
    fn recovery_round(&self, target: &Path, backwards: bool) -> Result<reopen::Round, Failure> {
        let setting = self.fio_setting(target);
        let mut round = reopen::Round { fio: Vec::new(), opened: Vec::new() };
        let (records, jobs) = (records(self.args), reopen::READ_JOBS);
        let mut order: Vec<usize> = (0..records.len().max(jobs.len())).collect();
        if backwards {
            order.reverse();
        }
        for index in order {
            if let Some(job) = jobs.get(index) {
                round.fio.push(beside(&setting, *job)?);
            }
            if let Some(record) = records.get(index) {
                round.opened.push(self.reopen(*record)?);
            }
        }
        Ok(round)
    }

    /// Fills a log, drops it without closing it, and opens it again.
    fn reopen(&self, record: Size) -> Result<reopen::Measured, Failure> {
        let window = self.window_for(record, 1).map_err(Failure::Usage)?;
        let options = self.options(record, window)?;
        eprintln!("filling the log with records of {record}");
        let (wal, _disk) = self.open_log(&options)?;
        let filled = reopen::fill(wal, record)?;
        eprintln!("opening it again");
        reopen::reopen(open_disk(self.args, self.capacity)?.device, &options, &filled)
    }

    /// Measures each load under each limit; every second round goes from the highest limit to the
    /// lowest.
    fn sweeps(&self) -> Result<Vec<sweep::Sweep>, Failure> {
        let loads: Vec<(Size, usize)> = records(self.args)
            .into_iter()
            .flat_map(|record| match &self.args.outstanding[..] {
                [] => vec![(record, sweep::enough_outstanding(record))],
                chosen => chosen.iter().map(|n| (record, *n as usize)).collect(),
            })
            .collect();
        let rounds = self.rounds(|backwards| {
            loads.iter().map(|(record, n)| self.sweep_round(*record, *n, backwards)).collect()
        })?;
        let sweep = |(index, (record, outstanding)): (usize, &(Size, usize))| {
            let own: Vec<_> =
                rounds.iter().map(|round: &Vec<sweep::Round>| round[index].clone()).collect();
            sweep::sweep(*record, *outstanding, &own)
        };
        Ok(loads.iter().enumerate().map(sweep).collect())
    }

    fn sweep_round(
        &self,
        record: Size,
        outstanding: usize,
        backwards: bool,
    ) -> Result<sweep::Round, Failure> {
        let window = self.window_for(record, outstanding).map_err(Failure::Usage)?;
        let mut limits = sweep::STEPS;
        if backwards {
            limits.reverse();
        }
        let at = |iops| {
            eprintln!("measuring {record} x {outstanding}, limit {}", sweep::name(iops));
            let options = Options { iops, ..self.options(record, window)? };
            self.measure_with(record, outstanding, &options)
        };
        let mut round: sweep::Round = limits.into_iter().map(at).collect::<Result<_, _>>()?;
        if backwards {
            round.reverse();
        }
        Ok(round)
    }
}

fn beside(setting: &fio::Setting<'_>, job: Job) -> Result<fio::Measured, Failure> {
    eprintln!("measuring fio, {} {} x {}", job.direction.name(), job.block, job.depth);
    fio::run(setting, job)
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

/// Opens the target, behind the model if there is one; without a target, memory.
fn open_disk(args: &BenchArgs, capacity: Size) -> Result<Disk, Failure> {
    let modelled = |disk: std::io::Result<ModelledDisk>| {
        let disk = Arc::new(disk.map_err(Failure::new)?);
        Ok(Disk { device: disk.clone(), model: Some(disk) })
    };
    let open = |path: &Path| alluvium_device::open(path, &open_options(args)).map_err(Failure::new);
    match (&args.target, args.model) {
        (Some(path), Some(model)) => modelled(ModelledDisk::over(open(path)?, &model.0)),
        (Some(path), None) => Ok(Disk { device: open(path)?, model: None }),
        (None, Some(model)) => modelled(ModelledDisk::in_memory(capacity.bytes, &model.0)),
        (None, None) => Err(Failure::Usage("neither --target nor --model is given".into())),
    }
}

/// Returns the size of the ring in bytes.
fn format(device: &SharedDevice, capacity: Size, force: bool) -> Result<u64, Failure> {
    let options =
        FormatOptions { capacity_bytes: Some(capacity.bytes), force, ..FormatOptions::default() };
    match Wal::format(device, &options) {
        Ok(_) => Ok(Wal::inspect(device).map_err(Failure::new)?.ring_bytes),
        Err(OpenError::Occupied { device, looks_like }) => Err(Failure::Failed(format!(
            "{device} contains {looks_like}; the bench would overwrite it. To do so, give --force"
        ))),
        Err(error) => Err(Failure::new(error)),
    }
}

/// The smallest window, in whole MiB, in which this number of records fits at the same time.
fn window_needed(record: Size, outstanding: usize) -> Size {
    /// A record's header; see `docs/format/wal.md`.
    const HEADER_BYTES: u64 = 32;
    // Blocks are padded by at most a sixteenth; blocks of large records by up to two pages.
    const PADDING_BYTES: u64 = 8 << 10;
    let each = record.bytes + HEADER_BYTES;
    let all = each.saturating_add(PADDING_BYTES.min(each / 16)).saturating_mul(outstanding as u64);
    // In addition, a record may take at most half of the window.
    let one = 2 * (each + PADDING_BYTES);
    Size::mib(all.max(one).div_ceil(1 << 20).min(u64::MAX >> 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_holds_the_records_and_their_padding() {
        assert_eq!(window_needed(Size::kib(256), 64), Size::mib(17));
        assert_eq!(window_needed(Size::kib(1), 1024), Size::mib(2));
        assert_eq!(window_needed(Size::mib(1), 64), Size::mib(65));
        assert_eq!(
            window_needed(Size::mib(40), 1),
            Size::mib(81),
            "a record takes at most half of it"
        );
        assert!(window_needed(Size::mib(1), usize::MAX) > MAX_WINDOW);
    }
}
