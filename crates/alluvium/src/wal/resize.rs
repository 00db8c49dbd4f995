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

/// Give the log another capacity, whether or not its server runs.
///
/// A file that is too short is extended first, and written in full; one that was as long as the log
/// is shortened after it. A block device keeps its size, which is the bound. The records that are
/// not uploaded yet stay, and have to fit. Killed at any moment, the command leaves the log in its
/// old capacity or in the new one, and can be repeated.
///
/// A server that runs does it while it serves. It moves nothing, but waits until the records that
/// are not uploaded lie where they may stay: at once, or when the log next comes to the end of its
/// ring. If this command is interrupted the server goes on; asked for the capacity that the log
/// has, it forgets the request. Without a server, records are moved where they lie in the way,
/// through free space only.
///
/// --wal-capacity is for new logs: a server that is started with another one says so, and takes the
/// log as it is.
#[derive(Args, Debug)]
pub(crate) struct ResizeArgs {
    #[command(flatten)]
    log: LogArgs,
    /// Bytes to use, both headers included: at least 192KiB, a multiple of 4KiB.
    #[arg(long, value_name = "SIZE")]
    capacity: Size,
    /// Directory of the server that may have the log open (its --data-dir). Default: that of the
    /// log.
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
    /// What was there.
    before: Header,
    /// What is there now.
    header: Header,
}

/// Resize the log, and the file around it.
///
/// # Errors
/// Somebody has it open, it cannot be read or written, it holds no write-ahead log, the device is
/// too small, or the records do not fit.
pub(crate) fn run(args: &ResizeArgs) -> Result<(), Failure> {
    check_capacity(args.capacity)?;
    let (path, wanted) = (args.log.path(), args.capacity);
    // Before anything is written: what holds no log is not extended.
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
            "{error}. The log was not changed: no server that has it open answers at {}. Name its data directory with --data-dir, or stop the server first",
            socket.display()
        )),
        other => not_claimed(other),
    };
    let old = Size { bytes: before.capacity_bytes };
    if old == wanted {
        return print(args, target, &before, &before);
    }
    // From here on nobody else has it: what is done below rests on what is seen now.
    let device = alluvium_device::open(path, &OpenOptions::default()).map_err(in_use)?;
    if Wal::inspect(&device).map_err(unusable)?.header.capacity_bytes != before.capacity_bytes {
        return Err(Failure::Failed(format!(
            "{}: another process has resized it in this moment; look at it again",
            path.display()
        )));
    }
    target = TargetInfo::of(device.geometry());
    let (file, old_length) = (!device.geometry().block_device, target.size_bytes);
    if !file && wanted.bytes > old_length {
        return Err(Failure::Failed(format!(
            "{target} has no room for a write-ahead log of {wanted}"
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
                "{}: its write-ahead log cannot be resized to {wanted}: {reason}. {} of it are not uploaded yet, and the new ring has \
                 {}. Nothing was changed. Start the server and let it upload (it does so after --upload-interval at the latest), stop it, \
                 see the usage with `alluvium wal inspect`, and try again; or ask for another capacity",
                path.display(),
                about(live_bytes),
                about(ring_bytes)
            )));
        }
        Err(other) => return Err(unusable(other)),
    };
    // A file that was longer than its log holds something else behind it, for all that is known
    // here.
    if file && wanted < old && old_length == old.bytes {
        shorten(&device, wanted.bytes)?;
    }
    target.size_bytes = device.capacity_bytes();
    drop(device);
    print(args, target, &before, &header)
}

/// Where a server that has the log open would answer.
fn socket(args: &ResizeArgs) -> PathBuf {
    let directory = args.data_dir.as_deref().or_else(|| args.log.path().parent());
    directory.unwrap_or(Path::new("")).join(control::SOCKET)
}

fn shorten(device: &SharedDevice, bytes: u64) -> Result<(), Failure> {
    device.set_capacity(bytes, None).map_err(|error| {
        let there = Size { bytes };
        Failure::Failed(format!(
            "{error}. The log in it is whole, but the file could not be shortened to {there}"
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
        return output::line(format_args!("{target}: its write-ahead log has {new} already"));
    }
    output::line(format_args!(
        "resized {target}: write-ahead log {}, {old} before, {new} now",
        after.wal_id
    ))
}
