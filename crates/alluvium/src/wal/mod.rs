//! `alluvium wal`: tools for one write-ahead log, with or without a server beside it.

mod bench;
mod cloud;
mod compare;
mod drive;
mod dump;
mod fio;
mod format;
mod inspect;
mod latency;
mod paced;
mod plot;
mod report;
mod svg;

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use alluvium_device::{Access, Geometry, OpenOptions, SharedDevice};
use alluvium_wal::{HeaderInfo, RecoveryReport};
use clap::Subcommand;
use serde::Serialize;

use crate::output::{self, Failure};
use crate::units::Size;

#[derive(Debug, Subcommand)]
pub(crate) enum WalCommand {
    /// Make a write-ahead log on a block device or in a file.
    Format(format::FormatArgs),
    /// Show both header slots, the geometry and the usage. Reads only, also beside a running server.
    Inspect(inspect::InspectArgs),
    /// List the records. Reads only, also beside a running server.
    Dump(dump::DumpArgs),
    /// Measure latency, bandwidth and CPU time of a write-ahead log, on request beside fio or on a modelled cloud disk. Overwrites the
    /// target.
    Bench(Box<bench::BenchArgs>),
}

/// Run a `wal` command.
///
/// # Errors
/// What the command says it can fail with.
pub(crate) fn run(command: WalCommand) -> Result<(), Failure> {
    // The tools print their results; of the log only warnings and progress are wanted.
    output::start_logging("warn,alluvium::progress=info")?;
    match command {
        WalCommand::Format(args) => format::run(&args),
        WalCommand::Inspect(args) => inspect::run(&args),
        WalCommand::Dump(args) => dump::run(&args),
        WalCommand::Bench(args) => bench::run(&args),
    }
}

fn open_read_only(target: &Path) -> Result<SharedDevice, Failure> {
    let options = OpenOptions { access: Access::ReadOnly, ..OpenOptions::default() };
    alluvium_device::open(target, &options).map_err(Failure::new)
}

/// What the kernel says about the target.
#[derive(Serialize)]
struct TargetInfo {
    path: String,
    kind: &'static str,
    size_bytes: u64,
    logical_block_bytes: u32,
    volatile_cache: bool,
    /// Whether `--durability auto` flushes here.
    flushes: bool,
    engine: &'static str,
}

impl TargetInfo {
    fn of(geometry: &Geometry) -> Self {
        Self {
            path: geometry.name.clone(),
            kind: if geometry.block_device { "block device" } else { "file" },
            size_bytes: geometry.capacity_bytes,
            logical_block_bytes: geometry.logical_block_bytes,
            volatile_cache: geometry.volatile_cache,
            flushes: geometry.flushes,
            engine: geometry.engine,
        }
    }

    /// How an acknowledged write is durable here, in words.
    fn durability(&self) -> &'static str {
        match (self.flushes, self.volatile_cache) {
            (true, true) => "each write is flushed (the target has, or may have, a volatile cache)",
            (true, false) => {
                "each write is flushed (asked for; the device states no volatile cache)"
            }
            (false, true) => {
                "the device is trusted (asked for; it has, or may have, a volatile cache)"
            }
            (false, false) => "no flush is needed: the device states no volatile cache",
        }
    }
}

impl std::fmt::Display for TargetInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let size = Size { bytes: self.size_bytes };
        write!(f, "{}, a {} of {size}", self.path, self.kind)
    }
}

/// A header slot's fields, for JSON.
#[derive(Serialize)]
struct Header {
    wal_id: String,
    generation: u64,
    capacity_bytes: u64,
    trim_offset: u64,
    durable_offset: u64,
    window_bytes: u64,
    epoch: u32,
    epoch_start_offset: u64,
    node_id: u32,
    written_at_ms: u64,
    clean_shutdown: bool,
    ring_origin_bytes: u64,
}

impl Header {
    fn of(info: &HeaderInfo) -> Self {
        Self {
            wal_id: info.wal_id.to_string(),
            generation: info.generation,
            capacity_bytes: info.capacity_bytes,
            trim_offset: info.trim.0,
            durable_offset: info.durable.0,
            window_bytes: info.window_bytes,
            epoch: info.epoch,
            epoch_start_offset: info.epoch_start.0,
            node_id: info.node_id,
            written_at_ms: info.written_at_ms,
            clean_shutdown: info.clean_shutdown,
            ring_origin_bytes: info.origin_bytes,
        }
    }
}

/// What a walk through the log found, for JSON and for people.
#[derive(Serialize)]
struct Walk {
    records: u64,
    payload_bytes: u64,
    start_offset: u64,
    end_offset: u64,
    used_bytes: u64,
    ring_bytes: u64,
    clean_shutdown: bool,
    epoch: u32,
    dropped_records: u64,
    damage: Vec<Damaged>,
    elapsed_ms: u128,
}

#[derive(Serialize)]
struct Damaged {
    start_offset: u64,
    end_offset: u64,
    device_at: u64,
    reason: String,
}

impl Walk {
    fn of(report: &RecoveryReport) -> Self {
        let damaged = |damage: &alluvium_wal::Damage| Damaged {
            start_offset: damage.range.start.0,
            end_offset: damage.range.end.0,
            device_at: damage.device_at.0,
            reason: damage.reason.clone(),
        };
        Self {
            records: report.records,
            payload_bytes: report.payload_bytes,
            start_offset: report.start.0,
            end_offset: report.end.0,
            used_bytes: report.end.0 - report.start.0,
            ring_bytes: report.ring_bytes,
            clean_shutdown: report.clean_shutdown,
            epoch: report.epoch,
            dropped_records: report.dropped_records,
            damage: report.damage.iter().map(damaged).collect(),
            elapsed_ms: report.elapsed.as_millis(),
        }
    }

    /// Acknowledged records that can not be read are a failure of the command, after it has printed everything.
    fn verdict(&self, target: &Path) -> Result<(), Failure> {
        match self.damage.len() {
            0 => Ok(()),
            n => Err(Failure::Failed(format!(
                "{}: the log is damaged at {n} place{}; first at log offset {} (device byte {}): {}",
                target.display(),
                if n == 1 { "" } else { "s" },
                self.damage[0].start_offset,
                self.damage[0].device_at,
                self.damage[0].reason
            ))),
        }
    }
}

/// `3 m 5 s ago`, from Unix time in milliseconds.
fn ago(unix_ms: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    match now.checked_sub(Duration::from_millis(unix_ms)) {
        Some(age) => format!("{} ago", rough(age)),
        None => "in the future by this machine's clock".into(),
    }
}

fn rough(age: Duration) -> String {
    let seconds = age.as_secs();
    match (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60) {
        (0, 0, 0, s) => format!("{s} s"),
        (0, 0, m, s) => format!("{m} m {s} s"),
        (0, h, m, _) => format!("{h} h {m} m"),
        (d, h, _, _) => format!("{d} d {h} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_told_in_two_units() {
        for (seconds, text) in
            [(0, "0 s"), (59, "59 s"), (185, "3 m 5 s"), (7260, "2 h 1 m"), (90_000, "1 d 1 h")]
        {
            assert_eq!(rough(Duration::from_secs(seconds)), text);
        }
        assert_eq!(ago(u64::MAX), "in the future by this machine's clock");
    }
}
