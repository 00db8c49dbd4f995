//! `alluvium wal`: tools for one write-ahead log, some of which also work while a server has it
//! open.

mod bench;
mod cloud;
mod compare;
mod content;
mod drive;
mod dump;
mod fio;
mod format;
mod inspect;
mod paced;
mod plot;
mod recover;
mod reopen;
mod report;
mod resize;
mod sweep;
mod verify;

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use alluvium_device::{Access, Geometry, OpenOptions, SharedDevice};
use alluvium_wal::{Damage, HeaderInfo, OpenError, Progress, Record, RecoveryReport, Wal};
use clap::{Args, Subcommand};
use serde::Serialize;

use self::content::{Content, Streams};
use crate::output::{self, Failure, Table};
use crate::units::{Size, about, counted};

#[derive(Debug, Subcommand)]
pub(crate) enum WalCommand {
    /// Create a write-ahead log on a block device, or in a file, which is created and pre-written
    /// if it does not exist.
    Format(format::FormatArgs),
    /// Show both header slots, the geometry and the usage. Reads only; also works while a server
    /// has the log open.
    Inspect(inspect::InspectArgs),
    /// List the records and their content: batches with offsets and streams, and lists of the ends
    /// of streams. Reads only; also works while a server has the log open. With --catalog, topics
    /// are named.
    Dump(dump::DumpArgs),
    Verify(verify::VerifyArgs),
    Recover(recover::RecoverArgs),
    Resize(resize::ResizeArgs),
    /// Measure latency, bandwidth and CPU time of a write-ahead log: alone, compared with fio, on a
    /// modelled cloud disk, with a rising limit on writes, or when opened after a crash. Overwrites
    /// the target.
    Bench(Box<bench::BenchArgs>),
}

/// Runs a `wal` command.
///
/// # Errors
/// Those of the command.
pub(crate) fn run(command: WalCommand) -> Result<(), Failure> {
    // The tools print their results; only warnings and progress are logged.
    output::start_logging("warn,alluvium::progress=info")?;
    match command {
        WalCommand::Format(args) => format::run(&args),
        WalCommand::Inspect(args) => inspect::run(&args),
        WalCommand::Dump(args) => dump::run(&args),
        WalCommand::Verify(args) => verify::run(&args),
        WalCommand::Recover(args) => recover::run(&args),
        WalCommand::Resize(args) => resize::run(&args),
        WalCommand::Bench(args) => bench::run(&args),
    }
}

/// Size of the two headers and the smallest ring; see `docs/format/wal.md`.
const SMALLEST: Size = Size::kib(192);

/// The log that a command applies to.
#[derive(Args, Debug)]
#[group(id = "log", required = true, multiple = false)]
struct LogArgs {
    /// The write-ahead log: a block device or a file.
    #[arg(value_name = "TARGET")]
    positional: Option<PathBuf>,
    /// The write-ahead log, as a named option.
    #[arg(long = "target", value_name = "PATH")]
    named: Option<PathBuf>,
}

impl LogArgs {
    fn path(&self) -> &Path {
        self.positional.as_ref().or(self.named.as_ref()).expect("one of the two is required")
    }
}

fn check_capacity(capacity: Size) -> Result<(), Failure> {
    if capacity < SMALLEST || !capacity.is_whole_pages() {
        return Err(Failure::Usage(format!(
            "--capacity is {capacity}; it must be a multiple of 4KiB, and at least {SMALLEST}"
        )));
    }
    Ok(())
}

fn open_read_only(target: &Path) -> Result<SharedDevice, Failure> {
    let options = OpenOptions { access: Access::ReadOnly, ..OpenOptions::default() };
    Ok(alluvium_device::open(target, &options)?)
}

/// Opens a log to change it. Fails while another process has it open.
fn open_exclusively(target: &Path) -> Result<SharedDevice, Failure> {
    let options = OpenOptions { access: Access::Exclusive, ..OpenOptions::default() };
    alluvium_device::open(target, &options).map_err(not_claimed)
}

fn not_claimed(error: alluvium_device::OpenError) -> Failure {
    match error {
        alluvium_device::OpenError::InUse(_) => Failure::Failed(format!(
            "{error}. The log was not changed: stop the server that has it open first"
        )),
        other => other.into(),
    }
}

/// Reads a log to its end while a server may be writing to it. A scan that was overtaken by the
/// writer is repeated from the current trim offset.
fn scan(device: &SharedDevice, streams: &Streams, progress: &Progress) -> Result<Walk, Failure> {
    /// A log is trimmed once per upload, and read in seconds.
    const ATTEMPTS: u32 = 5;
    let mut device = device.clone();
    for _ in 0..ATTEMPTS {
        let mut content = Content::new(streams);
        let mut visit = |record: Record| {
            content.add(&record);
            Ok(())
        };
        let walked = Wal::scan(&device, Some(progress.clone()), &mut visit)
            .and_then(|report| Ok((overtaken(&device, &report)?, report)));
        match walked {
            Ok((false, report)) => return Ok(Walk::of(&report, content)),
            Ok((true, _)) => {}
            Err(error) => device = resized(&device)?.ok_or_else(|| unusable(error))?,
        }
    }
    Err(Failure::Failed(format!(
        "{}: the log is trimmed and overwritten faster than it can be read: stop its server first",
        device.geometry().name
    )))
}

/// Whether space covered by `report` was trimmed during the scan: it may have been overwritten
/// before it was read.
fn overtaken(device: &SharedDevice, report: &RecoveryReport) -> Result<bool, OpenError> {
    let trim = Wal::inspect(device)?.header.trim;
    Ok(report.end < trim || report.damage.iter().any(|damage| damage.range.start < trim))
}

/// Reopens the device if its size has changed since it was opened: its server has resized the log,
/// and what was read is meaningless. Returns `None` if the size is unchanged.
fn resized(device: &SharedDevice) -> Result<Option<SharedDevice>, Failure> {
    let now = open_read_only(Path::new(&device.geometry().name))?;
    Ok((now.capacity_bytes() != device.capacity_bytes()).then_some(now))
}

/// Explains why the target cannot be used as a log.
fn unusable(error: OpenError) -> Failure {
    match error {
        OpenError::LargerThanDevice { device, wanted_bytes, device_bytes } => {
            let (wanted, there) = (Size { bytes: wanted_bytes }, Size { bytes: device_bytes });
            Failure::Failed(if wanted <= SMALLEST {
                format!(
                    "{device}: {there} is too small for a write-ahead log, which needs at least \
                     {SMALLEST}"
                )
            } else {
                format!(
                    "{device}: its write-ahead log needs {wanted}, but it has only {there}: it \
                     was truncated, or is a part of another file or device"
                )
            })
        }
        other => other.into(),
    }
}

/// What the kernel reports about the target.
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

    /// Describes how an acknowledged write becomes durable here.
    fn durability(&self) -> &'static str {
        match (self.flushes, self.volatile_cache) {
            (true, true) => "each write is flushed (the target has, or may have, a volatile cache)",
            (true, false) => {
                "each write is flushed (as configured; the device reports no volatile cache)"
            }
            (false, true) => {
                "writes are not flushed (as configured; the device has, or may have, a volatile \
                 cache)"
            }
            (false, false) => "no flush is needed: the device reports no volatile cache",
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
    mark: u64,
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
            mark: info.mark,
        }
    }
}

/// Result of reading a log, for JSON and as text.
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
    content: Content,
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
    fn of(report: &RecoveryReport, content: Content) -> Self {
        let damaged = |damage: &Damage| Damaged {
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
            content: content.finish(),
            elapsed_ms: report.elapsed.as_millis(),
        }
    }

    /// Prints the result as text.
    fn print(&self) -> Result<(), Failure> {
        entry("records", format!("{}, {} of payload", self.records, about(self.payload_bytes)))?;
        let end = if self.clean_shutdown { "" } else { ", not closed" };
        entry("log", format!("{}..{}{end}", self.start_offset, self.end_offset))?;
        if self.dropped_records > 0 {
            let dropped = counted(self.dropped_records, "record", "records");
            entry("dropped", format!("{dropped} behind the end, never acknowledged"))?;
        }
        if self.damage.is_empty() {
            return self.content.print();
        }
        let mut table =
            Table::of_text(&["DAMAGED FROM", "TO", "BYTES", "AT DEVICE BYTE", "REASON"]);
        for damage in &self.damage {
            table.row(vec![
                damage.start_offset.to_string(),
                damage.end_offset.to_string(),
                (damage.end_offset - damage.start_offset).to_string(),
                damage.device_at.to_string(),
                damage.reason.clone(),
            ]);
        }
        self.content.print()?;
        output::line(format_args!("\n{table}"))
    }

    /// Describes the damage, if there is any.
    fn complaint(&self) -> Option<String> {
        let first = self.damage.first()?;
        Some(format!(
            "the log is damaged at {}; first at log offset {} (device byte {}): {}",
            counted(self.damage.len() as u64, "place", "places"),
            first.start_offset,
            first.device_at,
            first.reason
        ))
    }

    /// Fails the command if acknowledged records cannot be read; called after everything has been
    /// printed.
    fn verdict(&self, target: &Path) -> Result<(), Failure> {
        match self.complaint() {
            None => Ok(()),
            Some(complaint) => Err(Failure::Failed(format!("{}: {complaint}", target.display()))),
        }
    }
}

/// Prints a line with a name, for text output.
fn entry(name: &str, text: impl std::fmt::Display) -> Result<(), Failure> {
    output::line(format_args!("{name:<12}{text}"))
}

/// Formats a Unix time in milliseconds as in `3 m 5 s ago`.
fn ago(unix_ms: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    match now.checked_sub(Duration::from_millis(unix_ms)) {
        Some(age) => format!("{} ago", rough(age)),
        None => "in the future according to this machine's clock".into(),
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
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use alluvium_wal::{FormatOptions, Options};

    use super::*;

    /// Creates and opens a log of 2 MiB; returns it with its device.
    fn create(path: &Path) -> (SharedDevice, Wal) {
        let options = OpenOptions { create_bytes: Some(2 << 20), ..OpenOptions::default() };
        let device = alluvium_device::open(path, &options).unwrap();
        Wal::format(&device, &FormatOptions::default()).unwrap();
        let options = Options {
            window_bytes: 256 << 10,
            block_bytes: 64 << 10,
            max_record_bytes: 100 << 10,
            ..Options::default()
        };
        let (wal, _) = Wal::open(device.clone(), &options, None, &mut |_| Ok(())).unwrap();
        (device, wal)
    }

    /// A reader holds no claim on the log: the writer trims what the reader has not reached yet,
    /// and overwrites it.
    #[test]
    fn a_walk_that_was_overtaken_is_repeated() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("wal");
        let (_, wal) = create(&path);
        let append = move |wal: &Wal| {
            let append = wal.append(&[&[7; 100 << 10]]).unwrap();
            let at = append.offset();
            append.wait().unwrap();
            at
        };
        for _ in 0..15 {
            append(&wal);
        }
        let reader = open_read_only(&path).unwrap();
        // Overwrites the log `times` times between reading the headers and the first read: more is
        // written than was free.
        let overtaking = |times: u32| -> Progress {
            let (wal, left) = (wal.clone(), AtomicU32::new(times));
            Arc::new(move |done, _| {
                if done == 0 && left.load(Ordering::Relaxed) > 0 {
                    left.fetch_sub(1, Ordering::Relaxed);
                    let last = append(&wal);
                    wal.trim(..last).wait().unwrap();
                    (0..14).for_each(|_| _ = append(&wal));
                }
            })
        };
        let once = Wal::scan(&reader, Some(overtaking(1)), &mut |_| Ok(())).unwrap();
        assert!(overtaken(&reader, &once).unwrap());
        assert_eq!(once.records, 0);

        let repeated = scan(&reader, &Streams::default(), &overtaking(4)).unwrap();
        assert_eq!((repeated.records, repeated.damage.len()), (15, 0));
        assert_eq!(repeated.end_offset, wal.appended().0);
        let refused = scan(&reader, &Streams::default(), &overtaking(5)).err().unwrap();
        assert!(format!("{refused:?}").contains("faster than it can be read"), "{refused:?}");
    }

    /// The writer resizes the log and its file while it is being read.
    #[test]
    fn a_walk_over_a_log_that_is_resized_is_repeated() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("wal");
        let (device, wal) = create(&path);
        let append = |wal: &Wal, n: u32| {
            (0..n).for_each(|_| wal.append(&[&[7; 100 << 10]]).unwrap().wait().unwrap());
        };
        append(&wal, 15);
        for bytes in [4 << 20, 1 << 20] {
            let (wal, device, resized) = (wal.clone(), device.clone(), AtomicU32::new(0));
            let resizing: Progress = Arc::new(move |done, _| {
                if done == 0 && resized.fetch_add(1, Ordering::Relaxed) == 0 {
                    device.set_capacity(device.capacity_bytes().max(bytes), None).unwrap();
                    wal.trim(..wal.durable()).wait().unwrap();
                    wal.request_resize(bytes).unwrap().wait().unwrap();
                    device.set_capacity(bytes, None).unwrap();
                    append(&wal, 3);
                }
            });
            let report =
                scan(&open_read_only(&path).unwrap(), &Streams::default(), &resizing).unwrap();
            assert_eq!((report.records, report.damage.len()), (3, 0));
            assert_eq!(report.ring_bytes, bytes - (64 << 10));
        }
    }

    #[test]
    fn ages_are_shown_in_two_units() {
        for (seconds, text) in
            [(0, "0 s"), (59, "59 s"), (185, "3 m 5 s"), (7260, "2 h 1 m"), (90_000, "1 d 1 h")]
        {
            assert_eq!(rough(Duration::from_secs(seconds)), text);
        }
        assert_eq!(ago(u64::MAX), "in the future according to this machine's clock");
    }
}
