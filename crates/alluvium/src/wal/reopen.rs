//! `alluvium wal bench --recovery`: how fast a log that was not closed is opened again, compared
//! with fio reading the same target.

use std::time::Instant;

use alluvium_device::SharedDevice;
use alluvium_wal::{AppendError, LogOffset, Options, Wal};
use bytes::Bytes;
use serde::Serialize;

use super::compare::{median, of_bar, of_rounds};
use super::drive::cpu_time;
use super::fio::{self, Job};
use crate::load::noise;
use crate::output::{Failure, Table};
use crate::units::{Size, about};

/// The default record sizes.
pub(super) const RECORDS: [Size; 2] = [Size::kib(1), Size::kib(64)];
/// The reads that recovery is compared with: the same reads, without processing the data. The
/// faster job counts.
pub(super) const READ_JOBS: [Job; 2] = [Job::read(Size::mib(1), 1), Job::read(Size::mib(1), 8)];
/// Size of the log that is opened, unless the ring has less.
const MAX_LOG_BYTES: u64 = 1 << 30;
/// The bar, as a share of fio's bandwidth.
const BAR: f64 = 0.9;

/// A log that was written and not closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Filled {
    record_bytes: u64,
    records: u64,
    end: LogOffset,
}

/// The result of opening it.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Measured {
    pub(super) record_bytes: u64,
    pub(super) records: u64,
    /// Records with their headers, and padding.
    pub(super) log_bytes: u64,
    /// From the call of `open` until the log accepts records: the headers, the flush, the scan, and
    /// the change of the header.
    pub(super) seconds: f64,
    /// The scan alone.
    pub(super) walk_seconds: f64,
    /// `log_bytes` in `seconds`.
    pub(super) bytes_per_second: f64,
    /// User and system time of the whole process.
    pub(super) cpu_us_per_record: f64,
}

/// The measurements of one round.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Round {
    pub(super) fio: Vec<fio::Measured>,
    pub(super) opened: Vec<Measured>,
}

/// A record size's result over all rounds.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Comparison {
    record_bytes: u64,
    records: u64,
    log_bytes: u64,
    /// Medians over the rounds.
    seconds: f64,
    bytes_per_second: f64,
    fio_bytes_per_second: f64,
    cpu_us_per_record: f64,
    /// Ratio of recovery to fio in each round.
    rounds: Vec<f64>,
    median: f64,
    bar: f64,
    met: bool,
}

/// Fills `wal`, which is empty, with durable records of `record` bytes each, up to 1 GiB or until
/// the ring is full, and drops it without closing it, as in a crash.
///
/// # Errors
/// The write-ahead log fails, or cannot hold a record.
pub(super) fn fill(wal: Wal, record: Size) -> Result<Filled, Failure> {
    /// Less than the smallest window, so that it need not grow and the headers stay as they were
    /// after opening.
    const AHEAD_BYTES: u64 = 1 << 20;
    let payload: Bytes = noise(usize::try_from(record.bytes).map_err(Failure::new)?).into();
    let start = wal.stats().trimmed;
    let (mut records, mut end) = (0, start);
    while end.0 - start.0 < MAX_LOG_BYTES {
        match wal.append_shared(&[], &payload) {
            Ok(append) => (records, end) = (records + 1, append.end()),
            Err(AppendError::OverCapacity { .. }) if records > 0 => break,
            Err(error) => return Err(Failure::new(error)),
        }
        // Padding after the last record may be durable with it.
        if end.0.saturating_sub(wal.durable().0) > 2 * AHEAD_BYTES {
            wal.wait_durable(LogOffset(end.0 - AHEAD_BYTES)).wait().map_err(Failure::new)?;
        }
    }
    wal.wait_durable(end).wait().map_err(Failure::new)?;
    // Everything is durable, and nothing in flight would keep the target from being opened again.
    drop(wal);
    Ok(Filled { record_bytes: record.bytes, records, end })
}

/// Opens the filled log once, and leaves it unclosed as before.
///
/// # Errors
/// It cannot be opened, or does not contain what was written to it.
pub(super) fn reopen(
    device: SharedDevice,
    options: &Options,
    filled: &Filled,
) -> Result<Measured, Failure> {
    let (cpu_before, started) = (cpu_time(), Instant::now());
    let (_wal, report) = Wal::open(device, options, None, &mut |_| Ok(())).map_err(Failure::new)?;
    let (elapsed, cpu) = (started.elapsed(), cpu_time() - cpu_before);
    if report.records != filled.records || report.end < filled.end || !report.damage.is_empty() {
        return Err(Failure::Failed(format!(
            "of {} acknowledged records up to {}, {} were found up to {}, with damage in {} \
             places: the target or the log loses writes",
            filled.records,
            filled.end,
            report.records,
            report.end,
            report.damage.len()
        )));
    }
    let log_bytes = report.end.0 - report.start.0;
    let seconds = elapsed.as_secs_f64();
    Ok(Measured {
        record_bytes: filled.record_bytes,
        records: report.records,
        log_bytes,
        seconds,
        walk_seconds: report.elapsed.as_secs_f64(),
        bytes_per_second: log_bytes as f64 / seconds,
        cpu_us_per_record: cpu.as_secs_f64() * 1e6 / report.records as f64,
    })
}

/// Compares a record size over all rounds; `None` where a round lacks it or a part of fio's.
pub(super) fn compare(record: Size, rounds: &[Round]) -> Option<Comparison> {
    let opened_in = |round: &Round| {
        round.opened.iter().find(|opened| opened.record_bytes == record.bytes).copied()
    };
    let fio_in = |round: &Round| {
        let of = |job: &Job| {
            let same =
                |m: &&fio::Measured| m.block_bytes == job.block.bytes && m.depth == job.depth;
            round.fio.iter().find(same).map(|measured| measured.bytes_per_second)
        };
        let all: Option<Vec<f64>> = READ_JOBS.iter().map(of).collect();
        Some(all?.into_iter().fold(0.0, f64::max))
    };
    let opened: Vec<Measured> = rounds.iter().map(opened_in).collect::<Option<_>>()?;
    let fio: Vec<f64> = rounds.iter().map(fio_in).collect::<Option<_>>()?;
    let ratios: Vec<f64> =
        opened.iter().zip(&fio).map(|(opened, fio)| opened.bytes_per_second / fio).collect();
    let of_opened =
        |figure: fn(&Measured) -> f64| median(&opened.iter().map(figure).collect::<Vec<_>>());
    let ratio = median(&ratios)?;
    Some(Comparison {
        record_bytes: record.bytes,
        records: opened[0].records,
        log_bytes: opened[0].log_bytes,
        seconds: of_opened(|opened| opened.seconds)?,
        bytes_per_second: of_opened(|opened| opened.bytes_per_second)?,
        fio_bytes_per_second: median(&fio)?,
        cpu_us_per_record: of_opened(|opened| opened.cpu_us_per_record)?,
        rounds: ratios,
        median: ratio,
        bar: BAR,
        met: ratio >= BAR,
    })
}

/// Builds the table of comparisons.
pub(super) fn table(comparisons: &[Comparison]) -> Table {
    let mut table = Table::of_numbers(&[
        "record",
        "records",
        "log",
        "opened in",
        "CPU us/record",
        "WAL",
        "fio",
        "ratio",
        "rounds",
        "bar",
        "met",
    ]);
    for comparison in comparisons {
        table.row(vec![
            Size { bytes: comparison.record_bytes }.to_string(),
            comparison.records.to_string(),
            about(comparison.log_bytes),
            format!("{:.3} s", comparison.seconds),
            format!("{:.2}", comparison.cpu_us_per_record),
            format!("{}/s", about(comparison.bytes_per_second as u64)),
            format!("{}/s", about(comparison.fio_bytes_per_second as u64)),
            format!("{:.2}", comparison.median),
            of_rounds(&comparison.rounds),
            format!(">= {}", comparison.bar),
            of_bar(comparison.met),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use alluvium_device::sim::{SimDisk, SimOptions};
    use alluvium_wal::FormatOptions;

    use super::*;

    /// A log of `capacity_bytes` on a simulated disk, filled with records of 1 KiB, and the disk.
    fn filled(capacity_bytes: u64) -> (SimDisk, Options, Filled) {
        let disk = SimDisk::new(SimOptions { capacity_bytes, ..SimOptions::default() });
        let options =
            Options { window_bytes: 4 << 20, max_record_bytes: 1 << 20, ..Options::default() };
        let device = disk.device();
        Wal::format(&device, &FormatOptions::default()).unwrap();
        let (wal, _) = Wal::open(device, &options, None, &mut |_| Ok(())).unwrap();
        let filled = fill(wal, Size::kib(1)).unwrap();
        (disk, options, filled)
    }

    #[test]
    fn every_record_is_found_at_each_opening() {
        let (disk, options, filled) = filled(16 << 20);
        // 32 bytes of header each, and less than a record of free space left.
        assert_eq!(filled.records, ((16 << 20) - (64 << 10)) / 1056);
        for _ in 0..2 {
            let measured = reopen(disk.device(), &options, &filled).unwrap();
            assert_eq!((measured.records, measured.record_bytes), (filled.records, 1024));
            assert_eq!(measured.log_bytes, filled.records * 1056);
            assert!(measured.walk_seconds <= measured.seconds);
        }
    }

    #[test]
    fn lost_records_fail_the_measurement() {
        let (disk, options, filled) = filled(16 << 20);
        disk.poke(8 << 20, &[0xff; 4096]);
        let error = reopen(disk.device(), &options, &filled).unwrap_err();
        assert!(format!("{error:?}").contains("damage in 1 places"), "{error:?}");
    }

    fn round(fio: [f64; 2], opened: f64) -> Round {
        let job = |(job, bytes_per_second): (&Job, f64)| fio::Measured {
            direction: job.direction,
            block_bytes: job.block.bytes,
            depth: job.depth,
            bytes_per_second,
            requests_per_second: 0.0,
            p50_us: 0.0,
            p99_us: 0.0,
            p999_us: 0.0,
            max_us: 0.0,
        };
        Round {
            fio: READ_JOBS.iter().zip(fio).map(job).collect(),
            opened: vec![Measured {
                record_bytes: 1024,
                records: 1,
                log_bytes: 1056,
                seconds: 1.0,
                walk_seconds: 1.0,
                bytes_per_second: opened,
                cpu_us_per_record: 1.0,
            }],
        }
    }

    #[test]
    fn recovery_is_compared_by_median_with_the_better_depth_of_fio() {
        let rounds = [
            round([900.0, 1000.0], 800.0),
            round([1000.0, 500.0], 950.0),
            round([1.0, 1000.0], 900.0),
        ];
        let comparison = compare(Size::kib(1), &rounds).unwrap();
        assert_eq!(comparison.rounds, [0.8, 0.95, 0.9]);
        assert_eq!((comparison.median, comparison.met), (0.9, true));
        assert!(!compare(Size::kib(1), &rounds[..1]).unwrap().met);
        assert!(compare(Size::kib(64), &rounds).is_none(), "not measured");
        let mut incomplete = round([1.0, 1.0], 1.0);
        incomplete.fio.pop();
        assert!(compare(Size::kib(1), &[incomplete]).is_none());
    }
}
