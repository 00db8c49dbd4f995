//! Comparison of the write-ahead log with fio: which figures are compared, and the bars.

use serde::Serialize;

use super::drive;
use super::fio::{self, Job};
use crate::output::Table;
use crate::units::{Size, about};

/// Jobs that measure the disk's bandwidth; the best depth counts.
pub(super) const BANDWIDTH_JOBS: [Job; 3] =
    [Job::write(Size::kib(256), 1), Job::write(Size::kib(256), 8), Job::write(Size::kib(256), 16)];
/// Job that measures the disk's latency.
pub(super) const LATENCY_JOB: Job = Job::write(Size::kib(4), 1);

/// A load of the log with its bar.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pairing {
    pub(super) record: Size,
    pub(super) outstanding: usize,
    pub(super) figure: Figure,
    pub(super) bar: f64,
}

/// The figure that is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Figure {
    /// Payload bytes per second as a share of fio's; at least the bar.
    Bandwidth,
    /// Median latency as a multiple of fio's; at most the bar.
    Latency,
    /// CPU time per record in microseconds, without fio; at most the bar.
    Cpu,
}

/// The targets of `docs/benchmarks/wal.md`.
pub(super) const PAIRINGS: [Pairing; 8] = {
    const fn pairing(record: Size, outstanding: usize, figure: Figure, bar: f64) -> Pairing {
        Pairing { record, outstanding, figure, bar }
    }
    [
        pairing(Size { bytes: 100 }, 1, Figure::Latency, 1.3),
        pairing(Size::kib(1), 1, Figure::Latency, 1.3),
        pairing(Size::kib(4), 1, Figure::Latency, 1.3),
        pairing(Size::kib(64), 64, Figure::Bandwidth, 0.9),
        pairing(Size::kib(256), 64, Figure::Bandwidth, 0.9),
        pairing(Size::mib(1), 32, Figure::Bandwidth, 0.9),
        pairing(Size::kib(1), 1024, Figure::Bandwidth, 0.6),
        pairing(Size::kib(1), 1024, Figure::Cpu, 2.0),
    ]
};

/// The measurements of one round.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Round {
    pub(super) fio: Vec<fio::Measured>,
    pub(super) wal: Vec<drive::Measured>,
}

/// A pairing's result over all rounds.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Comparison {
    record_bytes: u64,
    outstanding: usize,
    figure: &'static str,
    /// Medians over the rounds, in the figure's unit: bytes per second, or microseconds.
    wal: f64,
    fio: Option<f64>,
    /// Ratio of WAL to fio in each round; for CPU the figure itself.
    rounds: Vec<f64>,
    median: f64,
    bar: f64,
    met: bool,
}

impl Pairing {
    /// Compares over all rounds; `None` where a round lacks the load or fio's part.
    pub(super) fn compare(&self, rounds: &[Round]) -> Option<Comparison> {
        let figures: Vec<(f64, Option<f64>)> =
            rounds.iter().map(|round| self.figures(round)).collect::<Option<_>>()?;
        let ratios: Vec<f64> =
            figures.iter().map(|(wal, fio)| fio.map_or(*wal, |fio| wal / fio)).collect();
        let fio: Option<Vec<f64>> = figures.iter().map(|(_, fio)| *fio).collect();
        let wal: Vec<f64> = figures.iter().map(|(wal, _)| *wal).collect();
        let ratio = median(&ratios)?;
        let met = match self.figure {
            Figure::Bandwidth => ratio >= self.bar,
            Figure::Latency | Figure::Cpu => ratio <= self.bar,
        };
        Some(Comparison {
            record_bytes: self.record.bytes,
            outstanding: self.outstanding,
            figure: match self.figure {
                Figure::Bandwidth => "bandwidth",
                Figure::Latency => "p50 latency",
                Figure::Cpu => "CPU per record",
            },
            wal: median(&wal)?,
            fio: fio.as_deref().and_then(median),
            rounds: ratios,
            median: ratio,
            bar: self.bar,
            met,
        })
    }

    /// The log's figure and fio's in one round.
    fn figures(&self, round: &Round) -> Option<(f64, Option<f64>)> {
        let wal = round.wal.iter().find(|wal| {
            wal.record_bytes as u64 == self.record.bytes && wal.outstanding == self.outstanding
        })?;
        let fio_of = |job: &Job| {
            round.fio.iter().find(|m| m.block_bytes == job.block.bytes && m.depth == job.depth)
        };
        Some(match self.figure {
            Figure::Bandwidth => {
                let all: Option<Vec<f64>> =
                    BANDWIDTH_JOBS.iter().map(|job| Some(fio_of(job)?.bytes_per_second)).collect();
                (wal.bytes_per_second, Some(all?.into_iter().fold(0.0, f64::max)))
            }
            Figure::Latency => (wal.latency.p50_us, Some(fio_of(&LATENCY_JOB)?.p50_us)),
            Figure::Cpu => (wal.cpu_us_per_record, None),
        })
    }
}

/// The middle value; the mean of the two middle values if their number is even.
pub(super) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// Formats the ratios of all rounds for a table.
pub(super) fn of_rounds(ratios: &[f64]) -> String {
    let ratios: Vec<String> = ratios.iter().map(|ratio| format!("{ratio:.2}")).collect();
    ratios.join(" ")
}

/// Formats whether a bar is met, for a table; a missed bar stands out.
pub(super) fn of_bar(met: bool) -> String {
    if met { "yes" } else { "NO" }.into()
}

/// Builds the table of comparisons.
pub(super) fn table(comparisons: &[Comparison]) -> Table {
    let mut table = Table::of_numbers(&[
        "figure",
        "record",
        "outstanding",
        "WAL",
        "fio",
        "ratio",
        "rounds",
        "bar",
        "met",
    ]);
    for comparison in comparisons {
        let figure = |value: f64| match comparison.figure {
            "bandwidth" => format!("{}/s", about(value as u64)),
            _ => format!("{value:.2} us"),
        };
        let at = if comparison.figure == "bandwidth" { ">=" } else { "<=" };
        table.row(vec![
            comparison.figure.to_string(),
            Size { bytes: comparison.record_bytes }.to_string(),
            comparison.outstanding.to_string(),
            figure(comparison.wal),
            comparison.fio.map_or_else(|| "-".into(), figure),
            format!("{:.2}", comparison.median),
            of_rounds(&comparison.rounds),
            format!("{at} {}", comparison.bar),
            of_bar(comparison.met),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Summary;

    fn wal(
        record: Size,
        outstanding: usize,
        bytes_per_second: f64,
        p50_us: f64,
    ) -> drive::Measured {
        drive::Measured {
            record_bytes: record.bytes as usize,
            outstanding,
            window_bytes: 0,
            records: 1,
            seconds: 1.0,
            latency: Summary { p50_us, ..Summary::default() },
            bytes_per_second,
            device_writes_per_second: 0.0,
            flushes_per_second: 0.0,
            cpu_us_per_record: 1.5,
        }
    }

    fn fio(job: Job, bytes_per_second: f64, p50_us: f64) -> fio::Measured {
        fio::Measured {
            direction: job.direction,
            block_bytes: job.block.bytes,
            depth: job.depth,
            bytes_per_second,
            requests_per_second: 0.0,
            p50_us,
            p99_us: 0.0,
            p999_us: 0.0,
            max_us: 0.0,
        }
    }

    /// fio reaches 1000 bytes per second at its second depth, and 10 us; the log has the given
    /// figures.
    fn round(bytes_per_second: f64, p50_us: f64) -> Round {
        let mut bandwidths = [900.0, 1000.0, 950.0].into_iter();
        let mut jobs: Vec<_> =
            BANDWIDTH_JOBS.iter().map(|job| fio(*job, bandwidths.next().unwrap(), 1.0)).collect();
        jobs.push(fio(LATENCY_JOB, 1.0, 10.0));
        let all = PAIRINGS.iter().map(|p| wal(p.record, p.outstanding, bytes_per_second, p50_us));
        Round { fio: jobs, wal: all.collect() }
    }

    #[test]
    fn bandwidth_is_compared_with_the_best_depth_of_fio() {
        let rounds = [round(800.0, 9.0), round(950.0, 9.0), round(990.0, 9.0)];
        let large = PAIRINGS.iter().find(|p| p.record == Size::kib(64)).unwrap();
        let comparison = large.compare(&rounds).unwrap();
        assert_eq!(comparison.rounds, [0.8, 0.95, 0.99]);
        assert_eq!((comparison.median, comparison.met), (0.95, true));
        assert!(!large.compare(&rounds[..1]).unwrap().met);
    }

    #[test]
    fn latency_and_cpu_must_stay_below_their_bars() {
        let latency = PAIRINGS.iter().find(|p| p.figure == Figure::Latency).unwrap();
        assert!(latency.compare(&[round(1.0, 13.0)]).unwrap().met);
        assert!(!latency.compare(&[round(1.0, 13.1)]).unwrap().met);
        let cpu = PAIRINGS.iter().find(|p| p.figure == Figure::Cpu).unwrap();
        let comparison = cpu.compare(&[round(1.0, 1.0)]).unwrap();
        assert_eq!((comparison.median, comparison.fio, comparison.met), (1.5, None, true));
    }

    #[test]
    fn a_comparison_needs_both_sides_in_every_round() {
        let mut incomplete = round(1.0, 1.0);
        incomplete.fio.clear();
        for pairing in &PAIRINGS {
            let needs_fio = pairing.figure != Figure::Cpu;
            assert_eq!(pairing.compare(std::slice::from_ref(&incomplete)).is_none(), needs_fio);
            assert!(pairing.compare(&[]).is_none());
        }
    }

    #[test]
    fn the_median_of_an_even_number_is_the_mean_of_the_middle_two() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[]), None);
    }
}
