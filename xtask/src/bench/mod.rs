//! Benchmarks of whole servers: each figure beside that of another run, or another server, in the same quarter of an hour.

mod catch_up;
mod kafka;
mod load;
mod volume;

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Subcommand;

use crate::Error;
use crate::report::Report;

#[derive(Subcommand)]
pub(crate) enum Bench {
    /// What late consumers do to producers, beside Apache Kafka. As root: it makes volumes of loop devices and drops the file system's cache.
    CatchUp(catch_up::Options),
}

/// Run a benchmark. What misses its bar has failed.
pub(crate) fn run(root: &Path, bench: &Bench) -> Result<Report, Error> {
    match bench {
        Bench::CatchUp(options) => catch_up::run(root, options),
    }
}

/// The middle one, or the mean of the two in the middle; NaN of nothing.
fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.len().wrapping_sub(1) / 2, values.len() / 2);
    match (values.get(low), values.get(high)) {
        (Some(low), Some(high)) => f64::midpoint(*low, *high),
        _ => f64::NAN,
    }
}

fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// User and system time that a process has used.
fn cpu_time(pid: u32) -> Result<Duration, Error> {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    // Behind the name, which may hold anything.
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    let ticks =
        |field: usize| fields.split(' ').nth(field).and_then(|ticks| ticks.parse::<u64>().ok());
    let (Some(user), Some(system)) = (ticks(11), ticks(12)) else {
        return Err(format!("{path}: `{stat}`").into());
    };
    let per_second = rustix::param::clock_ticks_per_second();
    Ok(Duration::from_secs_f64((user + system) as f64 / per_second as f64))
}
