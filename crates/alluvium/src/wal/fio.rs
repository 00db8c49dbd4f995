//! fio on the same target, as the measure of what the disk can do.
//!
//! The comparison is fair only if both do the same to the disk: direct I/O, sequential writes (or
//! reads) of the same bytes, the same I/O interface of the kernel, and a flush with each write
//! exactly where the write-ahead log has one.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::output::Failure;
use crate::units::Size;

/// One run of fio, sequential.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) direction: Direction,
    pub(super) block: Size,
    pub(super) depth: u32,
}

impl Job {
    pub(super) const fn write(block: Size, depth: u32) -> Self {
        Self { direction: Direction::Write, block, depth }
    }

    pub(super) const fn read(block: Size, depth: u32) -> Self {
        Self { direction: Direction::Read, block, depth }
    }
}

/// The direction of a job; in JSON by fio's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Direction {
    Write,
    Read,
}

impl Direction {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
        }
    }
}

/// The settings shared by all jobs of a comparison.
#[derive(Clone, Debug)]
pub(super) struct Setting<'a> {
    pub(super) target: &'a Path,
    pub(super) size_bytes: u64,
    /// Flush with each write, as the write-ahead log does.
    pub(super) flushes: bool,
    /// As in [`alluvium_device::Geometry::engine`].
    pub(super) engine: &'static str,
    pub(super) warmup: Duration,
    pub(super) duration: Duration,
}

/// The figures that fio measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Measured {
    pub(super) direction: Direction,
    pub(super) block_bytes: u64,
    pub(super) depth: u32,
    pub(super) bytes_per_second: f64,
    pub(super) requests_per_second: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) p999_us: f64,
    pub(super) max_us: f64,
}

/// Returns the installed version.
///
/// # Errors
/// fio is not installed.
pub(super) fn version() -> Result<String, Failure> {
    let output = Command::new("fio").arg("--version").output().map_err(|error| {
        Failure::Failed(format!(
            "cannot start fio ({error}); on Debian, install it with `apt-get install fio`. \
             Without --fio the bench does not need it"
        ))
    })?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_string())
}

/// Runs one job.
///
/// # Errors
/// fio fails, or its report cannot be parsed.
pub(super) fn run(setting: &Setting<'_>, job: Job) -> Result<Measured, Failure> {
    let output = Command::new("fio")
        .args(arguments(setting, job))
        .output()
        .map_err(|error| Failure::Failed(format!("cannot start fio: {error}")))?;
    if !output.status.success() {
        return Err(Failure::Failed(format!(
            "fio failed ({}): {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        )));
    }
    parse(&String::from_utf8_lossy(&output.stdout), job)
}

fn arguments(setting: &Setting<'_>, job: Job) -> Vec<String> {
    // fio accepts a list of files, separated by colons.
    let target = setting.target.display().to_string().replace(':', "\\:");
    let mut arguments = vec![
        "--name=alluvium".to_string(),
        format!("--filename={target}"),
        format!("--rw={}", job.direction.name()),
        "--direct=1".into(),
        format!("--bs={}", job.block.bytes),
        // The target exists in full; it must be neither extended nor recreated.
        "--overwrite=1".into(),
        "--fallocate=none".into(),
        "--time_based=1".into(),
        format!("--runtime={}ms", setting.duration.as_millis()),
        format!("--ramp_time={}ms", setting.warmup.as_millis()),
        "--lat_percentiles=1".into(),
        "--clat_percentiles=0".into(),
        "--percentile_list=50:99:99.9".into(),
        "--group_reporting=1".into(),
        "--eta=never".into(),
        "--output-format=json".into(),
    ];
    if setting.flushes && job.direction == Direction::Write {
        arguments.push("--sync=dsync".into());
    }
    if setting.engine == "io_uring" {
        arguments.push("--ioengine=io_uring".into());
        arguments.push(format!("--iodepth={}", job.depth));
        arguments.push(format!("--size={}", setting.size_bytes));
    } else {
        // pwrite has one request in flight per thread, and each thread has its part of the target.
        let part = setting.size_bytes / u64::from(job.depth);
        let part = part - part % job.block.bytes;
        arguments.push("--ioengine=psync".into());
        arguments.push("--thread=1".into());
        arguments.push(format!("--numjobs={}", job.depth));
        arguments.push(format!("--size={part}"));
        arguments.push(format!("--offset_increment={part}"));
    }
    arguments
}

#[derive(Deserialize)]
struct Report {
    jobs: [JobReport; 1],
}

#[derive(Deserialize)]
struct JobReport {
    error: i64,
    /// The unused direction of a job has no percentiles, and is not read.
    #[serde(default)]
    write: serde_json::Value,
    #[serde(default)]
    read: serde_json::Value,
}

#[derive(Deserialize)]
struct DirectionReport {
    bw_bytes: f64,
    iops: f64,
    lat_ns: Latency,
}

#[derive(Deserialize)]
struct Latency {
    max: f64,
    percentile: Percentiles,
}

#[derive(Deserialize)]
struct Percentiles {
    #[serde(rename = "50.000000")]
    p50: f64,
    #[serde(rename = "99.000000")]
    p99: f64,
    #[serde(rename = "99.900000")]
    p999: f64,
}

fn parse(stdout: &str, job: Job) -> Result<Measured, Failure> {
    let unreadable =
        |reason: String| Failure::Failed(format!("cannot parse fio's report: {reason}"));
    // fio prints its warnings before the report, on the same stream.
    let start = stdout.find('{').ok_or_else(|| unreadable("no report found".into()))?;
    let report: Report =
        serde_json::from_str(&stdout[start..]).map_err(|error| unreadable(error.to_string()))?;
    let [JobReport { error, write, read }] = report.jobs;
    if error != 0 {
        return Err(Failure::Failed(format!("fio's job failed with error {error}")));
    }
    let own = match job.direction {
        Direction::Write => write,
        Direction::Read => read,
    };
    let DirectionReport { bw_bytes, iops, lat_ns } =
        serde_json::from_value(own).map_err(|error| unreadable(error.to_string()))?;
    let us = |ns: f64| ns / 1000.0;
    Ok(Measured {
        direction: job.direction,
        block_bytes: job.block.bytes,
        depth: job.depth,
        bytes_per_second: bw_bytes,
        requests_per_second: iops,
        p50_us: us(lat_ns.percentile.p50),
        p99_us: us(lat_ns.percentile.p99),
        p999_us: us(lat_ns.percentile.p999),
        max_us: us(lat_ns.max),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: Job = Job::write(Size::kib(256), 8);

    fn setting(engine: &'static str, flushes: bool) -> Setting<'static> {
        Setting {
            target: Path::new("/tmp/a:b"),
            size_bytes: 1 << 30,
            flushes,
            engine,
            warmup: Duration::from_millis(500),
            duration: Duration::from_secs(3),
        }
    }

    #[test]
    fn fio_flushes_exactly_where_the_log_does() {
        let flushing = arguments(&setting("io_uring", true), JOB);
        assert!(flushing.contains(&"--sync=dsync".into()));
        let trusting = arguments(&setting("io_uring", false), JOB);
        assert!(!trusting.iter().any(|argument| argument.starts_with("--sync")));
        assert!(trusting.contains(&"--filename=/tmp/a\\:b".into()));
        assert!(trusting.contains(&"--iodepth=8".into()));
        let reading = arguments(&setting("io_uring", true), Job::read(Size::mib(1), 8));
        assert!(!reading.iter().any(|argument| argument.starts_with("--sync")), "{reading:?}");
        assert!(reading.contains(&"--rw=read".into()) && flushing.contains(&"--rw=write".into()));
    }

    #[test]
    fn threads_get_a_part_of_the_target_each() {
        let arguments = arguments(&setting("threads", true), JOB);
        assert!(arguments.contains(&"--numjobs=8".into()));
        assert!(arguments.contains(&format!("--size={}", 128 << 20)));
        assert!(arguments.contains(&format!("--offset_increment={}", 128 << 20)));
    }

    #[test]
    fn the_report_is_found_behind_warnings() {
        for job in [JOB, Job::read(Size::kib(256), 8)] {
            let (own, other) = match job.direction {
                Direction::Write => ("write", "read"),
                Direction::Read => ("read", "write"),
            };
            let report = format!(
                r#"note: both iodepth >= 1 and synchronous I/O engine are selected
                {{"fio version": "fio-3.33", "jobs": [{{"jobname": "alluvium", "error": 0,
                  "{own}": {{
                  "io_bytes": 1, "bw_bytes": 2097152, "iops": 8.0,
                  "lat_ns": {{"min": 1, "max": 9000, "mean": 2.5, "percentile":
                    {{"50.000000": 1500, "99.000000": 2000, "99.900000": 3000}}}}}},
                  "{other}": {{"bw_bytes": 0, "iops": 0.0,
                    "lat_ns": {{"min": 0, "max": 0, "N": 0}}}}}}]}}"#
            );
            let measured = parse(&report, job).unwrap();
            assert_eq!(measured.direction, job.direction);
            assert_eq!(measured.bytes_per_second, 2_097_152.0);
            assert_eq!(measured.requests_per_second, 8.0);
            assert_eq!((measured.p50_us, measured.p999_us, measured.max_us), (1.5, 3.0, 9.0));
        }
    }

    #[test]
    fn invalid_reports_are_errors() {
        for text in [
            "",
            "fio: something is wrong",
            "{}",
            "{\"jobs\": []}",
            "{\"jobs\": [{}]}",
            "{\"jobs\": [{\"error\": 0}]}",
        ] {
            assert!(parse(text, JOB).is_err(), "{text}");
        }
        let failed = r#"{"jobs": [{"error": 5, "write": {"bw_bytes": 0, "iops": 0,
            "lat_ns": {"max": 0, "percentile":
                {"50.000000": 0, "99.000000": 0, "99.900000": 0}}}}]}"#;
        assert!(
            matches!(parse(failed, JOB), Err(Failure::Failed(text)) if text.contains("error 5"))
        );
    }
}
