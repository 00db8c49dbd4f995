//! `alluvium wal inspect`.

use std::path::PathBuf;

use alluvium_wal::{Inspection, Slot, Wal};
use clap::Args;
use serde::Serialize;

use super::{Header, TargetInfo, Walk, ago, open_read_only};
use crate::output::{self, Failure};
use crate::progress::Meter;
use crate::units::{Size, about, counted, usage};

#[derive(Args, Debug)]
pub(crate) struct InspectArgs {
    /// The block device or file.
    target: PathBuf,
    /// Read the whole log too: count the records, find where it ends, report damage (exit code 1 if there is any).
    #[arg(long)]
    scan: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Inspected {
    target: TargetInfo,
    slots: Vec<SlotView>,
    newest_slot: usize,
    header: Header,
    ring_bytes: u64,
    /// By the newest header. Where the last writer did not close the log, it may go on behind it: `scan` tells.
    used_bytes: u64,
    scan: Option<Walk>,
}

#[derive(Serialize)]
struct SlotView {
    state: &'static str,
    detail: String,
    header: Option<Header>,
}

impl SlotView {
    fn of(slot: &Slot) -> Self {
        let (state, header) = match slot {
            Slot::Valid(header) => ("valid", Some(Header::of(header))),
            Slot::Empty => ("empty", None),
            Slot::Future(_) => ("future", None),
            Slot::Damaged(_) => ("damaged", None),
            Slot::Foreign => ("foreign", None),
        };
        Self { state, detail: slot.to_string(), header }
    }
}

/// Show what a target holds.
///
/// # Errors
/// It can not be read, holds no write-ahead log, or, with `--scan`, a damaged one.
pub(crate) fn run(args: &InspectArgs) -> Result<(), Failure> {
    let device = open_read_only(&args.target)?;
    let Inspection { slots, newest, header, ring_bytes } =
        Wal::inspect(&device).map_err(Failure::new)?;
    let scan = if args.scan {
        let meter = Meter::new(format!("reading {}", args.target.display()));
        let report = Wal::scan(&device, Some(meter.callback()), &mut |_| Ok(()));
        Some(Walk::of(&report.map_err(Failure::new)?))
    } else {
        None
    };
    let inspected = Inspected {
        target: TargetInfo::of(device.geometry()),
        slots: slots.iter().map(SlotView::of).collect(),
        newest_slot: newest,
        header: Header::of(&header),
        ring_bytes,
        used_bytes: header.durable.0 - header.trim.0,
        scan,
    };
    if args.json {
        output::json(&inspected)?;
    } else {
        print(&inspected)?;
    }
    inspected.scan.map_or(Ok(()), |walk| walk.verdict(&args.target))
}

fn print(inspected: &Inspected) -> Result<(), Failure> {
    let Inspected { target, header, .. } = inspected;
    let entry = |name: &str, text: String| output::line(format_args!("{name:<12}{text}"));
    entry("target", target.to_string())?;
    entry("block", format!("{} B logical", target.logical_block_bytes))?;
    entry("durability", format!("auto: {}", target.durability()))?;
    entry("WAL id", header.wal_id.clone())?;
    entry(
        "capacity",
        format!(
            "{}, ring of {}, window of {}",
            Size { bytes: header.capacity_bytes },
            about(inspected.ring_bytes),
            Size { bytes: header.window_bytes }
        ),
    )?;
    let state = if header.clean_shutdown {
        "closed cleanly"
    } else {
        "open: in use, or its writer was killed"
    };
    entry("state", format!("{state}; epoch {}, node {}", header.epoch, header.node_id))?;
    entry(
        "log",
        format!(
            "from {} to {}{}",
            header.trim_offset,
            header.durable_offset,
            if header.clean_shutdown { "" } else { " at least" }
        ),
    )?;
    entry("usage", usage(inspected.used_bytes, inspected.ring_bytes))?;
    for (i, slot) in inspected.slots.iter().enumerate() {
        let mark = if i == inspected.newest_slot { " (newest)" } else { "" };
        let detail = match &slot.header {
            Some(header) => format!(
                "valid, generation {}, written {}, log {}..{}{mark}",
                header.generation,
                ago(header.written_at_ms),
                header.trim_offset,
                header.durable_offset
            ),
            None => slot.detail.clone(),
        };
        entry(&format!("slot {i}"), detail)?;
    }
    let Some(walk) = &inspected.scan else { return Ok(()) };
    entry(
        "scan",
        format!(
            "{}, {} of payload, log {}..{}, {}, in {:.1} s",
            counted(walk.records, "record", "records"),
            about(walk.payload_bytes),
            walk.start_offset,
            walk.end_offset,
            usage(walk.used_bytes, walk.ring_bytes),
            walk.elapsed_ms as f64 / 1000.0
        ),
    )?;
    if walk.dropped_records > 0 {
        let dropped = format!("{} behind the end, never acknowledged", walk.dropped_records);
        entry("dropped", dropped)?;
    }
    for damage in &walk.damage {
        entry(
            "damage",
            format!(
                "log {}..{}, device byte {}: {}",
                damage.start_offset, damage.end_offset, damage.device_at, damage.reason
            ),
        )?;
    }
    Ok(())
}
