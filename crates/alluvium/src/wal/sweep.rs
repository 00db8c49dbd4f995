//! `alluvium wal bench --raise-limit`: the throughput of a log whose own limit on writes is raised
//! step by step.
//!
//! Throughput must never fall. In a log that gathers records only while its limit delays it, it
//! would: with more writes allowed, writes get smaller, until the log is bound by their number.

use serde::Serialize;

use super::compare::{median, of_bar};
use super::drive;
use crate::output::Table;
use crate::units::Size;

/// Writes per second; the last step has no limit.
pub(super) const STEPS: [Option<u32>; 7] =
    [Some(3000), Some(6000), Some(12_000), Some(25_000), Some(50_000), Some(100_000), None];
/// The default record sizes.
pub(super) const RECORDS: [Size; 4] = [Size::kib(1), Size::kib(4), Size::kib(64), Size::kib(256)];
/// The share by which a step may be below one with a lower limit. On a shared machine, smaller
/// differences cannot be distinguished from noise.
const NOISE: f64 = 0.03;

/// A number of outstanding records at which the limit, and not the load, bounds throughput: several
/// blocks of them.
pub(super) fn enough_outstanding(record: Size) -> usize {
    if record.bytes <= 4096 { 1024 } else { 64 }
}

/// The measurements of each step, in one round.
pub(super) type Round = Vec<drive::Measured>;

/// A load under all steps, medians over the rounds.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Sweep {
    pub(super) record_bytes: u64,
    pub(super) outstanding: usize,
    pub(super) steps: Vec<Step>,
    /// The largest share by which a step is below one with a lower limit; 0 if none is. The two are
    /// compared within each round, and the median of the rounds counts, because a shared disk may
    /// be three times as fast a minute later.
    largest_fall: f64,
    /// The largest fall that counts as noise.
    noise: f64,
    met: bool,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Step {
    /// Null means no limit.
    pub(super) iops_limit: Option<u32>,
    /// Payload.
    pub(super) bytes_per_second: f64,
    device_writes_per_second: f64,
    p50_us: f64,
    /// `bytes_per_second` of each round.
    rounds: Vec<f64>,
}

/// Combines the rounds of a load. Each has all of [`STEPS`], in order.
pub(super) fn sweep(record: Size, outstanding: usize, rounds: &[Round]) -> Sweep {
    let step = |(index, iops_limit): (usize, &Option<u32>)| {
        let all = |figure: fn(&drive::Measured) -> f64| -> Vec<f64> {
            rounds.iter().map(|round| figure(&round[index])).collect()
        };
        let middle = |figure| median(&all(figure)).unwrap_or_default();
        Step {
            iops_limit: *iops_limit,
            bytes_per_second: middle(|measured| measured.bytes_per_second),
            device_writes_per_second: middle(|measured| measured.device_writes_per_second),
            p50_us: middle(|measured| measured.latency.p50_us),
            rounds: all(|measured| measured.bytes_per_second),
        }
    };
    let steps: Vec<Step> = STEPS.iter().enumerate().map(step).collect();
    let largest_fall = largest_fall(&steps);
    Sweep {
        record_bytes: record.bytes,
        outstanding,
        steps,
        largest_fall,
        noise: NOISE,
        met: largest_fall <= NOISE,
    }
}

impl Sweep {
    /// The number of rounds behind the medians.
    pub(super) fn rounds(&self) -> usize {
        self.steps.first().map_or(0, |step| step.rounds.len())
    }
}

fn largest_fall(steps: &[Step]) -> f64 {
    let fall = |lower: &Step, higher: &Step| {
        let ratios: Vec<f64> =
            lower.rounds.iter().zip(&higher.rounds).map(|(lower, higher)| higher / lower).collect();
        1.0 - median(&ratios).unwrap_or(1.0)
    };
    let pairs = (0..steps.len()).flat_map(|higher| (0..higher).map(move |lower| (lower, higher)));
    pairs.map(|(lower, higher)| fall(&steps[lower], &steps[higher])).fold(0.0, f64::max)
}

/// Formats the limit.
pub(super) fn name(iops_limit: Option<u32>) -> String {
    match iops_limit {
        Some(iops) if iops % 1000 == 0 => format!("{}k/s", iops / 1000),
        Some(iops) => format!("{iops}/s"),
        None => "none".into(),
    }
}

/// Builds the table: MiB/s by limit, and below them writes per second.
pub(super) fn table(sweeps: &[Sweep]) -> Table {
    let mut headings = vec!["record".to_string(), "outstanding".into(), "".into()];
    headings.extend(STEPS.iter().map(|limit| name(*limit)));
    headings.extend(["largest fall".into(), "bar".into(), "met".into()]);
    let headings: Vec<&str> = headings.iter().map(String::as_str).collect();
    let mut table = Table::of_numbers(&headings);
    for sweep in sweeps {
        let mut row = vec![
            Size { bytes: sweep.record_bytes }.to_string(),
            sweep.outstanding.to_string(),
            "MiB/s".into(),
        ];
        let mib = |step: &Step| format!("{:.0}", step.bytes_per_second / f64::from(1 << 20));
        row.extend(sweep.steps.iter().map(mib));
        row.push(format!("{:.1}%", 100.0 * sweep.largest_fall));
        row.push(format!("<= {:.0}%", 100.0 * sweep.noise));
        row.push(of_bar(sweep.met));
        table.row(row);
        let mut row = vec![String::new(), String::new(), "writes/s".into()];
        row.extend(sweep.steps.iter().map(|step| format!("{:.0}", step.device_writes_per_second)));
        row.extend([String::new(), String::new(), String::new()]);
        table.row(row);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Summary;

    fn round(bytes_per_second: [f64; STEPS.len()]) -> Round {
        let measured = |bytes_per_second| drive::Measured {
            record_bytes: 1024,
            outstanding: 1024,
            window_bytes: 0,
            records: 1,
            seconds: 1.0,
            latency: Summary::default(),
            bytes_per_second,
            device_writes_per_second: 1.0,
            flushes_per_second: 0.0,
            cpu_us_per_record: 1.0,
        };
        bytes_per_second.into_iter().map(measured).collect()
    }

    #[test]
    fn a_fall_is_measured_from_the_best_lower_limit_and_within_each_round() {
        let fall = |rounds: &[Round]| sweep(Size::kib(1), 1024, rounds).largest_fall;
        let falling = round([1.0, 4.0, 3.0, 2.0, 5.0, 5.0, 5.0]);
        assert_eq!(fall(std::slice::from_ref(&falling)), 0.5, "in two steps");
        // A disk that slows down from round to round is not a fall.
        let good = [1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0];
        let slower = |by: f64| round(good.map(|figure| figure / by));
        assert_eq!(fall(&[slower(1.0), slower(3.0), slower(9.0)]), 0.0);
    }

    #[test]
    fn one_bad_round_is_noise_and_two_of_three_are_a_fall() {
        let good = round([1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]);
        let bad = round([1.0, 2.0, 4.0, 8.0, 6.0, 8.0, 8.0]);
        let fine = sweep(Size::kib(1), 1024, &[good.clone(), bad.clone(), good.clone()]);
        assert_eq!((fine.largest_fall, fine.met), (0.0, true));
        let fallen = sweep(Size::kib(1), 1024, &[bad.clone(), good, bad]);
        assert_eq!((fallen.largest_fall, fallen.met), (0.25, false));
        let text = table(&[fine, fallen]).to_string();
        for part in ["3k/s", "100k/s", "none", "25.0%", "yes", "NO"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
