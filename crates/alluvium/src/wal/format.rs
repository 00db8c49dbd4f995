//! `alluvium wal format`.

use alluvium_device::{Access, OpenOptions};
use alluvium_wal::{FormatOptions, OpenError, Wal};
use clap::Args;
use serde::Serialize;

use super::{Header, LogArgs, TargetInfo, check_capacity};
use crate::config::limits;
use crate::output::{self, Failure};
use crate::progress::Meter;
use crate::units::Size;

#[derive(Args, Debug)]
pub(crate) struct FormatArgs {
    #[command(flatten)]
    log: LogArgs,
    /// Bytes to use, at least 192KiB, a multiple of 4KiB. Default: all of an existing target; 2GiB
    /// for a new file.
    #[arg(long, value_name = "SIZE")]
    capacity: Option<Size>,
    /// ID of the server that will use the log; recorded in the header.
    #[arg(long, value_name = "N", default_value_t = limits::NODE_ID)]
    node_id: u32,
    /// Format even if the target contains other data or another write-ahead log, whose content is
    /// lost.
    #[arg(long)]
    force: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Formatted {
    target: TargetInfo,
    header: Header,
}

/// Formats the target.
///
/// # Errors
/// The target cannot be opened exclusively, is too small, or is not empty and `--force` was not
/// given.
pub(crate) fn run(args: &FormatArgs) -> Result<(), Failure> {
    args.capacity.map_or(Ok(()), check_capacity)?;
    let path = args.log.path();
    let new = !path.exists();
    let new_capacity = args.capacity.unwrap_or(limits::WAL_CAPACITY);
    let meter = Meter::new(format!("pre-writing {}", path.display()));
    let options = OpenOptions {
        access: Access::Exclusive,
        create_bytes: new.then_some(new_capacity.bytes),
        progress: Some(meter.callback()),
        ..OpenOptions::default()
    };
    let device = alluvium_device::open(path, &options)?;
    drop(meter);
    let target = TargetInfo::of(device.geometry());
    let capacity = args.capacity.unwrap_or(Size { bytes: target.size_bytes });
    eprintln!(
        "formatting {target}{}: write-ahead log of {capacity}{}",
        if new { " (new)" } else { "" },
        if args.force { ", overwriting its content" } else { ", if it is empty" },
    );
    let options = FormatOptions {
        capacity_bytes: args.capacity.map(|size| size.bytes),
        node_id: args.node_id,
        force: args.force,
        ..FormatOptions::default()
    };
    let header = Wal::format(&device, &options).map_err(|error| match error {
        OpenError::Occupied { device, looks_like } => Failure::Failed(format!(
            "{device} contains {looks_like}; formatting would destroy it. To do so, give --force"
        )),
        other => other.into(),
    })?;
    if args.json {
        return output::json(&Formatted { target, header: Header::of(&header) });
    }
    output::line(format_args!(
        "formatted {}: write-ahead log {}, {}",
        target.path,
        header.wal_id,
        Size { bytes: header.capacity_bytes }
    ))
}
