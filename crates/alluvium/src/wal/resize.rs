//! `alluvium wal resize`.

use std::path::{Path, PathBuf};

use alluvium_device::{OpenOptions, SharedDevice};
use alluvium_wal::{HeaderInfo, OpenError, Wal};
use clap::Args;
use serde::Serialize;

use super::{Header, LogArgs, TargetInfo, check_capacity, not_claimed, open_read_only, unusable};
use crate::control;
use crate::output::{self, Failure};
use crate::progress::Meter;
use crate::units::{Size, about};

/// Change the capacity of the log, whether or not its server runs.
///
/// A file that is too short is extended first, and written in full; a file that was as long as the
/// log is shortened afterwards. A block device keeps its size, which is the upper bound. Records
/// that are not uploaded yet stay, and must fit. Killed at any time, the command leaves the log
/// with its old capacity or with the new one, and can be repeated.
///
/// A running server resizes the log while it serves. It does not move records, but waits until
/// those that are not uploaded lie where they may stay: at once, or when the log next reaches the
/// end of its ring. If this command is interrupted, the server continues; a request for the current
/// capacity cancels a pending one. Without a server, records that are in the way are moved, through
/// free space only.
///
/// --wal-capacity is for new logs: a server that is started with another value logs a warning and
/// uses the log as it is.
#[derive(Args, Debug)]
pub(crate) struct ResizeArgs {
    #[command(flatten)]
    log: LogArgs,
    /// Bytes to use, including both headers: at least 192KiB, a multiple of 4KiB.
    #[arg(long, value_name = "SIZE")]
    capacity: Size,
    /// Data directory (--data-dir) of the server that may have the log open. Default: the directory
    /// of the log.
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Resized {
    /// With its size after the command.
    target: TargetInfo,
    /// The header before the command.
    before: Header,
    /// The header after the command.
    header: Header,
}

/// Resizes the log, and the file that contains it.
///
/// # Errors
/// Another process has it open, it cannot be read or written, it contains no write-ahead log, the
/// device is too small, or the records do not fit.
pub(crate) fn run(args: &ResizeArgs) -> Result<(), Failure> {
    check_capacity(args.capacity)?;
    let (path, wanted) = (args.log.path(), args.capacity);
    // Checked before anything is written: a file without a log is not extended.
    let device = open_read_only(path)?;
    let before = Wal::inspect(&device).map_err(unusable)?.header;
    let mut target = TargetInfo::of(device.geometry());
    drop(device);
    let socket = socket(args);
    if control::resize(&socket, path, wanted)? {
        let device = open_read_only(path)?;
        let header = Wal::inspect(&device).map_err(unusable)?.header;
        return print(args, TargetInfo::of(device.geometry()), &before, &header);
    }
    let in_use = |error| match error {
        alluvium_device::OpenError::InUse(_) => Failure::Failed(format!(
            "{error}. The log was not changed: no server that has it open answers at {}. Set its \
             data directory with --data-dir, or stop the server first",
            socket.display()
        )),
        other => not_claimed(other),
    };
    let old = Size { bytes: before.capacity_bytes };
    if old == wanted {
        return print(args, target, &before, &before);
    }
    // From here on this process has exclusive access, so the state read now stays valid for the
    // steps below.
    let device = alluvium_device::open(path, &OpenOptions::default()).map_err(in_use)?;
    if Wal::inspect(&device).map_err(unusable)?.header.capacity_bytes != before.capacity_bytes {
        return Err(Failure::Failed(format!(
            "{}: another process has just resized it; check it with `alluvium wal inspect`",
            path.display()
        )));
    }
    target = TargetInfo::of(device.geometry());
    let (file, old_length) = (!device.geometry().block_device, target.size_bytes);
    if !file && wanted.bytes > old_length {
        return Err(Failure::Failed(format!(
            "{target} is too small for a write-ahead log of {wanted}"
        )));
    }
    eprintln!("resizing {target}: write-ahead log {} from {old} to {wanted}", before.wal_id);
    let extended = wanted.bytes > old_length;
    if extended {
        let meter = Meter::new(format!("pre-writing {}", path.display()));
        device.set_capacity(wanted.bytes, Some(&meter.callback()))?;
    }
    let meter = Meter::new(format!("reading {}", path.display()));
    let resized = Wal::resize(&device, wanted.bytes, Some(meter.callback()));
    drop(meter);
    let header = match resized {
        Ok(header) => header,
        Err(OpenError::ResizeBlocked { live_bytes, ring_bytes, reason }) => {
            if extended {
                shorten(&device, old_length)?;
            }
            return Err(Failure::Failed(format!(
                "{}: its write-ahead log cannot be resized to {wanted}: {reason}. {} of it are \
                 not uploaded yet, and the new ring has {}. Nothing was changed. Start the server \
                 and let it upload (after --upload-interval at the latest), stop it, check the \
                 usage with `alluvium wal inspect`, and try again; or use another capacity",
                path.display(),
                about(live_bytes),
                about(ring_bytes)
            )));
        }
        Err(other) => return Err(unusable(other)),
    };
    // A file that was longer than its log may contain something else behind it.
    if file && wanted < old && old_length == old.bytes {
        shorten(&device, wanted.bytes)?;
    }
    target.size_bytes = device.capacity_bytes();
    drop(device);
    print(args, target, &before, &header)
}

/// The control socket of a server that has the log open.
fn socket(args: &ResizeArgs) -> PathBuf {
    let directory = args.data_dir.as_deref().or_else(|| args.log.path().parent());
    directory.unwrap_or(Path::new("")).join(control::SOCKET)
}

fn shorten(device: &SharedDevice, bytes: u64) -> Result<(), Failure> {
    device.set_capacity(bytes, None).map_err(|error| {
        let there = Size { bytes };
        Failure::Failed(format!(
            "{error}. The log is intact, but the file could not be shortened to {there}"
        ))
    })
}

fn print(
    args: &ResizeArgs,
    target: TargetInfo,
    before: &HeaderInfo,
    after: &HeaderInfo,
) -> Result<(), Failure> {
    if args.json {
        return output::json(&Resized {
            target,
            before: Header::of(before),
            header: Header::of(after),
        });
    }
    let (old, new) = (Size { bytes: before.capacity_bytes }, Size { bytes: after.capacity_bytes });
    if old == new {
        return output::line(format_args!("{target}: its write-ahead log already has {new}"));
    }
    output::line(format_args!(
        "resized {target}: write-ahead log {}, {old} before, {new} now",
        after.wal_id
    ))
}
