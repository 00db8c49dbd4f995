//! `alluvium wal bench --plot`: the charts of a report.

use std::path::Path;

use super::cloud;
use super::drive;
use super::paced::Measured;
use super::report::{Case, Report};
use super::sweep::{self, Sweep};
use crate::output::Failure;
use crate::units::Size;
use alluvium_chart::{Axis, Chart, Scale, Series};

const MIB: f64 = 1024.0 * 1024.0;

/// Writes the charts of what was measured into `directory`, over those of an earlier run.
///
/// # Errors
/// A file cannot be written.
pub(super) fn write(report: &Report, directory: &Path) -> Result<(), Failure> {
    for (name, chart) in charts(report) {
        let path = directory.join(name);
        std::fs::write(&path, chart.render())
            .map_err(|error| Failure::Failed(format!("{}: {error}", path.display())))?;
        eprintln!("wrote {}", path.display());
    }
    Ok(())
}

fn charts(report: &Report) -> Vec<(&'static str, Chart)> {
    let closed: Vec<_> = report.cases.iter().filter_map(Case::closed).collect();
    let paced: Vec<_> = report.cases.iter().filter_map(Case::paced).collect();
    let target = &report.target;
    let subtitle = match report.model {
        Some(model) => format!("modelled disk: {model}"),
        // Without the path, which has no meaning elsewhere.
        None => format!(
            "{} of {}, {}",
            target.kind,
            Size { bytes: target.size_bytes },
            target.durability()
        ),
    };
    let mut charts = Vec::new();
    if !closed.is_empty() {
        charts.push(("throughput-by-record.svg", closed_throughput(&closed, &subtitle)));
        charts.push(("latency-by-record.svg", closed_latency(&closed, &subtitle)));
    }
    if !paced.is_empty() {
        charts.push(("latency-over-load.svg", latency_over_load(&paced, &subtitle)));
        charts.push(("full-load-latency.svg", full_load_latency(report, &paced, &subtitle)));
        charts.push(("full-load-throughput.svg", full_load_throughput(report, &paced, &subtitle)));
    }
    if !report.sweeps.is_empty() {
        charts
            .push(("throughput-over-limit.svg", throughput_over_limit(&report.sweeps, &subtitle)));
    }
    charts
}

/// Sorts the values and removes duplicates.
fn distinct(values: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values.dedup();
    values
}

/// An axis of record sizes, evenly spaced.
fn record_axis(records: &[u64]) -> Axis {
    let names = records.iter().map(|bytes| Size { bytes: *bytes }.to_string()).collect();
    Axis { label: "record size".into(), scale: Scale::Names(names) }
}

fn axis(label: &str, scale: Scale) -> Axis {
    Axis { label: label.into(), scale }
}

/// One line per number of outstanding records.
fn by_outstanding(
    cases: &[&drive::Measured],
    records: &[u64],
    figure: impl Fn(&drive::Measured) -> f64,
) -> Vec<Series> {
    let outstanding = distinct(cases.iter().map(|case| case.outstanding as u64));
    let line = |outstanding: u64| Series {
        name: format!("{outstanding} outstanding"),
        points: points(records, |record| {
            let case = cases.iter().find(|case| {
                case.record_bytes as u64 == record && case.outstanding as u64 == outstanding
            })?;
            Some(figure(case))
        }),
        dashed: false,
    };
    outstanding.into_iter().map(line).collect()
}

/// The position of each record size and its figure, where there is one.
fn points(records: &[u64], figure: impl Fn(u64) -> Option<f64>) -> Vec<(f64, f64)> {
    let point = |(index, record): (usize, &u64)| Some((index as f64, figure(*record)?));
    records.iter().enumerate().filter_map(point).collect()
}

fn closed_throughput(cases: &[&drive::Measured], subtitle: &str) -> Chart {
    let records = distinct(cases.iter().map(|case| case.record_bytes as u64));
    Chart {
        title: "Throughput by record size".into(),
        subtitle: subtitle.into(),
        series: by_outstanding(cases, &records, |case| case.bytes_per_second / MIB),
        marks: Vec::new(),
        x: record_axis(&records),
        y: axis("payload in MiB/s", Scale::Logarithmic),
    }
}

fn closed_latency(cases: &[&drive::Measured], subtitle: &str) -> Chart {
    let records = distinct(cases.iter().map(|case| case.record_bytes as u64));
    Chart {
        title: "Median latency by record size".into(),
        subtitle: subtitle.into(),
        series: by_outstanding(cases, &records, |case| case.latency.p50_us),
        marks: Vec::new(),
        x: record_axis(&records),
        y: axis("latency in us, median", Scale::Logarithmic),
    }
}

fn latency_over_load(cases: &[&Measured], subtitle: &str) -> Chart {
    let records = distinct(cases.iter().map(|case| case.record_bytes as u64));
    let line = |record: u64| {
        let mut points: Vec<(f64, f64)> = cases
            .iter()
            .filter(|case| case.record_bytes as u64 == record)
            .map(|case| (case.offered_bytes_per_second as f64 / MIB, case.latency.mean_us / 1000.0))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series { name: Size { bytes: record }.to_string(), points, dashed: false }
    };
    Chart {
        title: "Mean latency over load, by record size".into(),
        subtitle: subtitle.into(),
        x: axis("offered load, payload in MiB/s", Scale::Linear),
        y: axis("latency in ms, mean", Scale::Logarithmic),
        series: records.iter().copied().map(line).collect(),
        marks: Vec::new(),
    }
}

fn throughput_over_limit(sweeps: &[Sweep], subtitle: &str) -> Chart {
    let line = |sweep: &Sweep| Series {
        name: format!("{} x {}", Size { bytes: sweep.record_bytes }, sweep.outstanding),
        points: (0_u32..)
            .zip(&sweep.steps)
            .map(|(index, step)| (f64::from(index), step.bytes_per_second / MIB))
            .collect(),
        dashed: false,
    };
    let names = sweep::STEPS.iter().map(|limit| sweep::name(*limit)).collect();
    Chart {
        title: "Throughput over the log's limit on writes, by record size and number outstanding"
            .into(),
        subtitle: subtitle.into(),
        x: Axis { label: "limit on writes".into(), scale: Scale::Names(names) },
        y: axis("payload in MiB/s", Scale::Linear),
        series: sweeps.iter().map(line).collect(),
        marks: Vec::new(),
    }
}

/// The cases at the largest load.
fn at_full_load<'a>(cases: &[&'a Measured]) -> (f64, Vec<&'a Measured>) {
    let full = cases.iter().map(|case| case.offered_bytes_per_second).max().unwrap_or_default();
    let at = cases.iter().copied().filter(|case| case.offered_bytes_per_second == full).collect();
    (full as f64 / MIB, at)
}

/// A line of `figure` over `records`.
fn line(name: &str, dashed: bool, records: &[u64], figure: impl Fn(u64) -> Option<f64>) -> Series {
    Series { name: name.into(), points: points(records, figure), dashed }
}

fn full_load_latency(report: &Report, cases: &[&Measured], subtitle: &str) -> Chart {
    let (load, cases) = at_full_load(cases);
    let records = distinct(cases.iter().map(|case| case.record_bytes as u64));
    let of = |record| cases.iter().find(|case| case.record_bytes as u64 == record);
    let mut series = vec![
        line("mean", false, &records, |record| Some(of(record)?.latency.mean_us / 1000.0)),
        line("99%", false, &records, |record| Some(of(record)?.latency.p99_us / 1000.0)),
    ];
    if has_reference(report) {
        let published = |record| Some(cloud::reference_mean_us(Size { bytes: record })? / 1000.0);
        series.push(line("published mean", true, &records, published));
    }
    if let Some(model) = report.model {
        let idle = |record| Some(model.0.idle_latency(record).as_secs_f64() * 1000.0);
        series.push(line("idle disk", true, &records, idle));
    }
    Chart {
        title: format!("Latency at {load} MiB/s, by record size"),
        subtitle: subtitle.into(),
        x: record_axis(&records),
        y: axis("latency in ms", Scale::Logarithmic),
        series,
        marks: Vec::new(),
    }
}

fn full_load_throughput(report: &Report, cases: &[&Measured], subtitle: &str) -> Chart {
    let (load, cases) = at_full_load(cases);
    let records = distinct(cases.iter().map(|case| case.record_bytes as u64));
    let of = |record| cases.iter().find(|case| case.record_bytes as u64 == record);
    let mut series = vec![
        line("payload", false, &records, |record| Some(of(record)?.bytes_per_second / MIB)),
        line("on the disk", false, &records, |record| {
            Some(of(record)?.disk.disk_bytes_per_second / MIB)
        }),
    ];
    if has_reference(report) {
        let published = |record| Some(cloud::reference_disk_rate(Size { bytes: record })? / MIB);
        series.push(line("published, on the disk", true, &records, published));
    }
    if let Some(model) = report.model {
        let quota = |_| Some(model.0.bandwidth_bytes_per_second as f64 / MIB);
        series.push(line("quota of the disk", true, &records, quota));
    }
    Chart {
        title: format!("Throughput at an offered load of {load} MiB/s, by record size"),
        subtitle: subtitle.into(),
        x: record_axis(&records),
        y: axis("throughput in MiB/s", Scale::Linear),
        series,
        marks: Vec::new(),
    }
}

/// Whether the full load of this report is the published one, on the disk that it was published
/// for.
fn has_reference(report: &Report) -> bool {
    report.verdicts.iter().any(cloud::Verdict::at_published_load)
}
