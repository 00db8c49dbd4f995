//! The results of `alluvium wal bench`, as JSON and as tables.

use std::time::Duration;

use serde::Serialize;

use super::cloud::{self, Model, Verdict};
use super::compare::{self, Comparison, Round};
use super::{TargetInfo, drive, fio, paced, reopen, sweep};
use crate::output::{self, Failure, Table};
use crate::units::{Size, Span};

/// All results of a run.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) machine: Machine,
    pub(super) target: TargetInfo,
    /// The modelled disk, as written on the command line.
    #[serde(serialize_with = "as_text")]
    pub(super) model: Option<Model>,
    pub(super) capacity_bytes: u64,
    /// Unless a case has its own.
    pub(super) window_bytes: u64,
    pub(super) io_depth: u16,
    pub(super) warmup_ms: u128,
    pub(super) duration_ms: u128,
    pub(super) cases: Vec<Case>,
    /// Of the cases that have a bar.
    pub(super) verdicts: Vec<Verdict>,
    pub(super) fio_version: Option<String>,
    pub(super) rounds: Vec<Round>,
    pub(super) comparisons: Vec<Comparison>,
    pub(super) recovery_rounds: Vec<reopen::Round>,
    pub(super) recoveries: Vec<reopen::Comparison>,
    pub(super) sweeps: Vec<sweep::Sweep>,
}

fn as_text<S: serde::Serializer>(model: &Option<Model>, serializer: S) -> Result<S::Ok, S::Error> {
    model.map(|model| model.to_string()).serialize(serializer)
}

/// The machine that was measured.
#[derive(Serialize)]
pub(super) struct Machine {
    cpu: String,
    cpus: usize,
    kernel: String,
}

/// A load on a log of its own.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Case {
    /// A number of outstanding records.
    Measured(drive::Measured),
    /// Records on a schedule.
    Paced(paced::Measured),
    /// The case cannot be measured.
    Skipped { record_bytes: u64, outstanding: usize, reason: String },
}

impl Case {
    /// The figures of a closed-loop case.
    pub(super) fn closed(&self) -> Option<&drive::Measured> {
        if let Self::Measured(measured) = self { Some(measured) } else { None }
    }

    /// The figures of an open-loop case.
    pub(super) fn paced(&self) -> Option<&paced::Measured> {
        if let Self::Paced(measured) = self { Some(measured) } else { None }
    }
}

impl Machine {
    pub(super) fn this() -> Self {
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

/// Prints the report as text.
///
/// # Errors
/// Standard output cannot be written to.
pub(super) fn print(report: &Report) -> Result<(), Failure> {
    let Report { machine, target, .. } = report;
    output::line(format_args!(
        "{}, {} CPUs, Linux {}; {target}; engine {}, {}; {} in use, window {}, I/O depth {}, {} \
         each",
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
    if let Some(model) = report.model {
        let quotas = if report.sweeps.is_empty() { "quotas" } else { "bandwidth" };
        output::line(format_args!(
            "at the speed of a modelled disk: {model}; the log is limited to the disk's {quotas}"
        ))?;
    }
    let closed: Vec<_> = report.cases.iter().filter_map(Case::closed).collect();
    let paced: Vec<_> = report.cases.iter().filter_map(Case::paced).collect();
    if !closed.is_empty() {
        output::line(format_args!("\n{}", closed_table(&closed, report.window_bytes)))?;
    }
    if !paced.is_empty() {
        output::line(format_args!("\n{}", cloud::table(report.model, &paced)))?;
    }
    for case in &report.cases {
        if let Case::Skipped { record_bytes, outstanding, reason } = case {
            let record = Size { bytes: *record_bytes };
            output::line(format_args!("not measured: {record} x {outstanding}: {reason}"))?;
        }
    }
    if let Some(table) = report.model.and_then(|model| cloud::reference_table(model, &paced)) {
        output::line(format_args!("\ncompared with the published figures at 120 MiB/s:\n{table}"))?;
    }
    if let Some(table) = report.model.and_then(|model| cloud::light_table(model, &paced)) {
        output::line(format_args!("\ncompared with the idle disk at 12 MiB/s:\n{table}"))?;
    }
    let version = report.fio_version.as_deref().unwrap_or("fio");
    if !report.rounds.is_empty() {
        let own = report.rounds.iter().flat_map(|round| &round.fio);
        output::line(format_args!("\n{}", fio_table(own)))?;
        output::line(format_args!(
            "\ncompared with {version}, medians of {} rounds:\n{}",
            report.rounds.len(),
            compare::table(&report.comparisons)
        ))?;
    }
    if !report.recovery_rounds.is_empty() {
        let own = report.recovery_rounds.iter().flat_map(|round| &round.fio);
        output::line(format_args!("\n{}", fio_table(own)))?;
        output::line(format_args!(
            "\nopened after a crash, compared with reads of {version}, medians of {} rounds:\n{}",
            report.recovery_rounds.len(),
            reopen::table(&report.recoveries)
        ))?;
    }
    if let Some(first) = report.sweeps.first() {
        output::line(format_args!(
            "\nwith a rising limit on writes, medians of {} rounds:\n{}",
            first.rounds(),
            sweep::table(&report.sweeps)
        ))?;
    }
    Ok(())
}

/// Builds the table of closed-loop loads; the window is shown where it is not the usual one.
fn closed_table(cases: &[&drive::Measured], usual_window_bytes: u64) -> Table {
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
        "",
    ]);
    for case in cases {
        let window = Size { bytes: case.window_bytes };
        table.row(vec![
            Size { bytes: case.record_bytes as u64 }.to_string(),
            case.outstanding.to_string(),
            format!("{:.1}", case.latency.p50_us),
            format!("{:.1}", case.latency.p99_us),
            format!("{:.1}", case.latency.p999_us),
            format!("{:.1}", case.latency.max_us),
            format!("{:.1}", case.bytes_per_second / f64::from(1 << 20)),
            format!("{:.0}", case.records as f64 / case.seconds),
            format!("{:.0}", case.device_writes_per_second),
            format!("{:.0}", case.flushes_per_second),
            format!("{:.2}", case.cpu_us_per_record),
            if window.bytes == usual_window_bytes {
                String::new()
            } else {
                format!("window {window}")
            },
        ]);
    }
    table
}

/// Builds the table of fio's own figures, round by round.
fn fio_table<'a>(rounds: impl Iterator<Item = &'a fio::Measured>) -> Table {
    let mut table = Table::of_numbers(&[
        "fio",
        "",
        "depth",
        "p50 us",
        "p99 us",
        "p99.9 us",
        "max us",
        "MiB/s",
        "requests/s",
    ]);
    for measured in rounds {
        table.row(vec![
            measured.direction.name().into(),
            Size { bytes: measured.block_bytes }.to_string(),
            measured.depth.to_string(),
            format!("{:.1}", measured.p50_us),
            format!("{:.1}", measured.p99_us),
            format!("{:.1}", measured.p999_us),
            format!("{:.1}", measured.max_us),
            format!("{:.1}", measured.bytes_per_second / f64::from(1 << 20)),
            format!("{:.0}", measured.requests_per_second),
        ]);
    }
    table
}
