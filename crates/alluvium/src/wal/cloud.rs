//! `--model`: the modelled disk, and the published figures that a log on such a disk is compared
//! with.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use alluvium_device::model::DiskModel;
use serde::Serialize;

use super::compare::of_bar;
use super::paced::Measured;
use crate::output::Table;
use crate::units::{Size, Span};

/// A modelled disk as written on the command line: `cloud`, or the settings that differ from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Model(pub(super) DiskModel);

/// The full load as a share of the disk's bandwidth: 120 of 125 MiB/s.
const FULL_LOAD: (u64, u64) = (24, 25);
/// Default loads, in percent of the full load.
const LOADS_PERCENT: [u64; 5] = [10, 25, 50, 75, 100];

impl Model {
    /// The default loads, in whole KiB per second.
    pub(super) fn rates(self) -> Vec<Size> {
        let bandwidth = u128::from(self.0.bandwidth_bytes_per_second);
        let whole = |percent: u64| {
            let parts = u128::from(FULL_LOAD.0 * percent);
            let kib = (bandwidth * parts).div_ceil(u128::from(FULL_LOAD.1 * 100) << 10);
            Size::kib(u64::try_from(kib).expect("no more than the bandwidth"))
        };
        LOADS_PERCENT.map(whole).to_vec()
    }
}

impl FromStr for Model {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut model = DiskModel::CLOUD;
        if text == "cloud" {
            return Ok(Self(model));
        }
        for part in text.split(',') {
            let Some((key, value)) = part.split_once('=') else {
                return Err(format!("`{part}` is neither `cloud` nor a setting such as iops=3000"));
            };
            let rate = || match value.parse::<Size>()?.bytes {
                bytes if bytes < 4096 => Err(format!("`{part}`: must be at least 4KiB per second")),
                bytes => Ok(bytes),
            };
            match key {
                "iops" => {
                    model.iops = value.parse().ok().filter(|iops| *iops > 0).ok_or_else(|| {
                        format!("`{part}`: must be a number from 1 to {}", u32::MAX)
                    })?;
                }
                "bandwidth" => model.bandwidth_bytes_per_second = rate()?,
                "transfer" => model.piece_bytes_per_second = rate()?,
                "latency" => model.latency = latency(value)?,
                _ => {
                    return Err(format!(
                        "`{key}` is not a setting of a modelled disk: use one of iops, bandwidth, \
                         latency, transfer"
                    ));
                }
            }
        }
        Ok(Self(model))
    }
}

/// Parses a latency. Latencies of disks are in microseconds, a unit that no other option has.
fn latency(text: &str) -> Result<Duration, String> {
    let latency = match text.strip_suffix("us") {
        Some(number) => Duration::from_micros(
            number.parse().map_err(|_| format!("`{text}` does not start with a whole number"))?,
        ),
        None => text.parse::<Span>().map_err(|error| error.replace("ms, s", "us, ms, s"))?.0,
    };
    if latency > Duration::from_secs(1) {
        return Err(format!("`{text}`: the latency must not be more than a second"));
    }
    Ok(latency)
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DiskModel { iops, bandwidth_bytes_per_second, latency, piece_bytes_per_second, .. } =
            self.0;
        write!(
            f,
            "iops={iops},bandwidth={},latency={}us,transfer={}",
            Size { bytes: bandwidth_bytes_per_second },
            latency.as_micros(),
            Size { bytes: piece_bytes_per_second },
        )
    }
}

/// A row of the published figures.
struct Reference {
    record: Size,
    mean_ms: f64,
    iops: f64,
    /// Measured on the disk, as is everything except the latency.
    mib_per_second: f64,
    request_kib: f64,
    queue: f64,
}

/// Delta WAL on a cloud disk of 3,000 IOPS and 125 MiB/s with 4 CPUs and 4 I/O threads, target 120
/// MiB/s: AutoMQ, "How to implement high-performance WAL based on raw devices?". There, each thread
/// paces itself from its last append and measures latency from the append, so that a late thread
/// offers less load; ours is an open loop.
const REFERENCE: [Reference; 6] = {
    const fn row(record: Size, figures: [f64; 5]) -> Reference {
        let [mean_ms, iops, mib_per_second, request_kib, queue] = figures;
        Reference { record, mean_ms, iops, mib_per_second, request_kib, queue }
    }
    [
        row(Size::kib(1), [0.990, 2800.0, 122.1, 44.7, 2.0]),
        row(Size::kib(4), [0.910, 2790.0, 119.9, 43.6, 2.0]),
        row(Size::kib(64), [1.120, 1580.0, 119.3, 77.3, 1.3]),
        row(Size::kib(128), [1.330, 963.0, 119.2, 126.7, 1.0]),
        row(Size::kib(256), [1.950, 486.0, 119.0, 251.0, 0.8]),
        row(Size::mib(1), [3.80, 486.0, 119.0, 251.0, 1.2]),
    ]
};
const REFERENCE_RATE: Size = Size::mib(120);
/// A tenth of the full load, at which queueing should be short.
const LIGHT_RATE: Size = Size::mib(12);
/// Bar for the light load: mean latency as a multiple of what an idle disk takes for such a record,
/// at most.
const LIGHT_BAR: f64 = 1.2;

/// The default record sizes on a modelled disk: those of the reference.
pub(super) fn records() -> Vec<Size> {
    REFERENCE.iter().map(|row| row.record).collect()
}

/// The published mean latency at a record size in microseconds.
pub(super) fn reference_mean_us(record: Size) -> Option<f64> {
    REFERENCE.iter().find(|row| row.record == record).map(|row| row.mean_ms * 1000.0)
}

/// The published bytes per second on the disk at a record size.
pub(super) fn reference_disk_rate(record: Size) -> Option<f64> {
    let row = REFERENCE.iter().find(|row| row.record == record)?;
    Some(row.mib_per_second * f64::from(1 << 20))
}

/// A measured load that has a bar.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Verdict {
    record_bytes: usize,
    offered_bytes_per_second: u64,
    mean_us: f64,
    /// Upper bound.
    bar_us: f64,
    /// At full load: the reference's figure.
    reference_disk_bytes_per_second: Option<f64>,
    met: bool,
}

impl Verdict {
    /// Whether this is a comparison with the reference.
    pub(super) fn at_published_load(&self) -> bool {
        self.reference_disk_bytes_per_second.is_some()
    }

    /// Returns `None` where there is no bar.
    pub(super) fn of(model: Model, measured: &Measured) -> Option<Self> {
        if model.0 != DiskModel::CLOUD {
            return None;
        }
        let record = Size { bytes: measured.record_bytes as u64 };
        let rate = Size { bytes: measured.offered_bytes_per_second };
        let (bar_us, disk_rate) = if rate == REFERENCE_RATE {
            (reference_mean_us(record)?, Some(reference_disk_rate(record)?))
        } else if rate == LIGHT_RATE {
            (model.0.idle_latency(record.bytes).as_secs_f64() * 1e6 * LIGHT_BAR, None)
        } else {
            return None;
        };
        let mean_us = measured.latency.mean_us;
        let fast_enough = disk_rate.is_none_or(|rate| measured.disk.disk_bytes_per_second >= rate);
        Some(Self {
            record_bytes: measured.record_bytes,
            offered_bytes_per_second: rate.bytes,
            mean_us,
            bar_us,
            reference_disk_bytes_per_second: disk_rate,
            met: mean_us <= bar_us && fast_enough && reservation(Some(model), measured).is_empty(),
        })
    }
}

/// Says whether a measurement was not steady, or got less than the offered load.
fn reservation(model: Option<Model>, measured: &Measured) -> &'static str {
    // The ends of the measured time may account for half a percent on a disk at its quota.
    let above = |rate: f64, quota: f64| rate > 1.005 * quota;
    let overdrawn = model.is_some_and(|Model(model)| {
        above(measured.disk.iops, model.iops.into())
            || above(measured.disk.disk_bytes_per_second, model.bandwidth_bytes_per_second as f64)
    });
    match (measured.saturated, overdrawn) {
        (true, _) => "saturated",
        (_, true) => "above the quota: use a longer --warmup to use up saved quota",
        _ => "",
    }
}

/// Builds the table of the measured loads.
pub(super) fn table(model: Option<Model>, cases: &[&Measured]) -> Table {
    let mut table = Table::of_numbers(&[
        "record",
        "offered",
        "mean ms",
        "p50 ms",
        "p99 ms",
        "p99.9 ms",
        "MiB/s",
        "disk IOPS",
        "disk MiB/s",
        "request KiB",
        "queue",
        "CPU us/record",
        "",
    ]);
    for case in cases {
        let ms = |us: f64| format!("{:.3}", us / 1000.0);
        let mib = |bytes: f64| format!("{:.1}", bytes / f64::from(1 << 20));
        table.row(vec![
            Size { bytes: case.record_bytes as u64 }.to_string(),
            format!("{}/s", Size { bytes: case.offered_bytes_per_second }),
            ms(case.latency.mean_us),
            ms(case.latency.p50_us),
            ms(case.latency.p99_us),
            ms(case.latency.p999_us),
            mib(case.bytes_per_second),
            format!("{:.0}", case.disk.iops),
            mib(case.disk.disk_bytes_per_second),
            format!("{:.1}", case.disk.request_bytes() / 1024.0),
            case.disk.queue.map_or_else(|| "-".into(), |queue| format!("{queue:.1}")),
            format!("{:.2}", case.cpu_us_per_record),
            reservation(model, case).into(),
        ]);
    }
    table
}

/// Builds the table that compares loads with the reference. `None` if none of those loads was
/// measured.
pub(super) fn reference_table(model: Model, cases: &[&Measured]) -> Option<Table> {
    let mut table = Table::of_numbers(&[
        "record",
        "mean ms",
        "",
        "disk MiB/s",
        "",
        "disk IOPS",
        "",
        "request KiB",
        "",
        "queue",
        "",
        "bar met",
    ]);
    let mut second = vec![String::new()];
    second.extend((0..5).flat_map(|_| ["here".to_string(), "published".to_string()]));
    table.row(second);
    let mut any = false;
    for row in &REFERENCE {
        let full = |case: &&&Measured| {
            case.record_bytes as u64 == row.record.bytes
                && case.offered_bytes_per_second == REFERENCE_RATE.bytes
        };
        let Some(case) = cases.iter().find(full) else { continue };
        let Some(verdict) = Verdict::of(model, case) else { continue };
        any = true;
        table.row(vec![
            row.record.to_string(),
            format!("{:.3}", case.latency.mean_us / 1000.0),
            format!("{:.3}", row.mean_ms),
            format!("{:.1}", case.disk.disk_bytes_per_second / f64::from(1 << 20)),
            format!("{:.1}", row.mib_per_second),
            format!("{:.0}", case.disk.iops),
            format!("{:.0}", row.iops),
            format!("{:.1}", case.disk.request_bytes() / 1024.0),
            format!("{:.1}", row.request_kib),
            format!("{:.1}", case.disk.queue.unwrap_or_default()),
            format!("{:.1}", row.queue),
            of_bar(verdict.met),
        ]);
    }
    any.then_some(table)
}

/// Builds the table that compares light loads with the idle disk. `None` if none was measured.
pub(super) fn light_table(model: Model, cases: &[&Measured]) -> Option<Table> {
    let mut table =
        Table::of_numbers(&["record", "mean ms", "idle disk ms", "ratio", "bar", "bar met"]);
    let mut any = false;
    for case in cases.iter().filter(|case| case.offered_bytes_per_second == LIGHT_RATE.bytes) {
        let Some(verdict) = Verdict::of(model, case) else { continue };
        any = true;
        let idle_us = verdict.bar_us / LIGHT_BAR;
        table.row(vec![
            Size { bytes: case.record_bytes as u64 }.to_string(),
            format!("{:.3}", verdict.mean_us / 1000.0),
            format!("{:.3}", idle_us / 1000.0),
            format!("{:.2}", verdict.mean_us / idle_us),
            format!("<= {LIGHT_BAR}"),
            of_bar(verdict.met),
        ]);
    }
    any.then_some(table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Summary;
    use crate::wal::paced::Disk;

    #[test]
    fn a_model_is_parsed_as_it_is_printed() {
        let cloud: Model = "cloud".parse().unwrap();
        assert_eq!(cloud.0, DiskModel::CLOUD);
        assert_eq!(cloud.to_string(), "iops=3000,bandwidth=125MiB,latency=500us,transfer=220MiB");
        assert_eq!(cloud.to_string().parse(), Ok(cloud));
        let fast: Model = "latency=2ms,iops=16000".parse().unwrap();
        assert_eq!((fast.0.iops, fast.0.latency), (16_000, Duration::from_millis(2)));
        assert_eq!(fast.0.bandwidth_bytes_per_second, 125 << 20, "otherwise like the cloud disk");
        assert_eq!(fast.to_string().parse(), Ok(fast));
    }

    #[test]
    fn invalid_models_are_refused_with_the_reason() {
        for (text, reason) in [
            ("", "neither `cloud` nor"),
            ("disk", "neither `cloud` nor"),
            ("iops=0", "from 1 to"),
            ("iops=-1", "from 1 to"),
            ("bandwidth=4095", "at least 4KiB"),
            ("bandwidth=1Gb", "unit of size"),
            ("latency=5", "us, ms"),
            ("latency=2s", "more than a second"),
            ("latency=xus", "whole number"),
            ("size=1", "one of iops, bandwidth"),
        ] {
            let error = text.parse::<Model>().unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn the_full_load_of_the_cloud_disk_is_the_published_one() {
        let rates = Model(DiskModel::CLOUD).rates();
        assert_eq!(rates, [12, 30, 60, 90, 120].map(Size::mib));
        assert_eq!((rates[0], rates[4]), (LIGHT_RATE, REFERENCE_RATE));
        let tiny: Model = "bandwidth=4KiB".parse().unwrap();
        assert_eq!(tiny.rates(), [1, 1, 2, 3, 4].map(Size::kib));
    }

    fn measured(record: Size, rate: Size, mean_us: f64, disk_mib: f64) -> Measured {
        Measured {
            record_bytes: record.bytes as usize,
            window_bytes: 0,
            offered_bytes_per_second: rate.bytes,
            records: 1,
            unacknowledged: 0,
            seconds: 1.0,
            latency: Summary { mean_us, ..Summary::default() },
            bytes_per_second: rate.bytes as f64,
            saturated: false,
            disk: Disk {
                iops: 1000.0,
                disk_bytes_per_second: disk_mib * f64::from(1 << 20),
                queue: Some(1.0),
            },
            cpu_us_per_record: 1.0,
        }
    }

    #[test]
    fn the_bar_is_latency_and_bandwidth_at_the_published_load() {
        let cloud = Model(DiskModel::CLOUD);
        let met = |rate: Size, mean_us, disk_mib| {
            Verdict::of(cloud, &measured(Size::kib(64), rate, mean_us, disk_mib)).map(|v| v.met)
        };
        assert_eq!(met(REFERENCE_RATE, 1120.0, 119.3), Some(true));
        assert_eq!(met(REFERENCE_RATE, 1121.0, 124.0), Some(false), "latency");
        assert_eq!(met(REFERENCE_RATE, 500.0, 119.2), Some(false), "bandwidth");
        // 0.5 ms and 64 KiB at 220 MiB/s are 784 us.
        assert_eq!(met(LIGHT_RATE, 940.0, 12.0), Some(true));
        assert_eq!(met(LIGHT_RATE, 942.0, 12.0), Some(false));
        assert_eq!(met(Size::mib(60), 1.0, 60.0), None);
        assert_eq!(met(REFERENCE_RATE, 500.0, 125.1), Some(true));
        assert_eq!(
            met(REFERENCE_RATE, 500.0, 126.0),
            Some(false),
            "more than the sustained rate of the disk"
        );
        let mut behind = measured(Size::kib(64), REFERENCE_RATE, 500.0, 122.0);
        behind.saturated = true;
        assert!(
            !Verdict::of(cloud, &behind).unwrap().met,
            "less was acknowledged than was offered"
        );
        let other: Model = "iops=16000".parse().unwrap();
        assert!(Verdict::of(other, &behind).is_none());
        assert!(Verdict::of(cloud, &measured(Size::kib(2), REFERENCE_RATE, 1.0, 122.0)).is_none());
    }

    #[test]
    fn only_measured_loads_are_compared_with_the_reference() {
        let cloud = Model(DiskModel::CLOUD);
        let case = measured(Size::kib(64), REFERENCE_RATE, 800.0, 121.0);
        assert!(light_table(cloud, &[&case]).is_none());
        let table = reference_table(cloud, &[&case]).unwrap().to_string();
        assert_eq!(table.lines().count(), 3, "{table}");
        assert!(
            table.contains("0.800") && table.contains("1.120") && table.contains("yes"),
            "{table}"
        );
    }
}
