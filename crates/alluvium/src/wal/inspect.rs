//! `alluvium wal inspect`.

use alluvium_device::SharedDevice;
use alluvium_stream::{StreamRecord, decode_record};
use alluvium_wal::{Inspection, Slot, Wal};
use clap::Args;
use serde::Serialize;

use super::content::Streams;
use super::{Header, LogArgs, TargetInfo, Walk, ago, entry, open_read_only, scan, unusable};
use crate::output::{self, Failure, Table};
use crate::progress::Meter;
use crate::units::{Size, about, usage};

#[derive(Args, Debug)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    log: LogArgs,
    /// Read the whole log too: count the records, find its end, report damage (exit code 1 if there
    /// is any).
    #[arg(long)]
    scan: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Content of a target.
#[derive(Serialize)]
pub(super) struct Inspected {
    target: TargetInfo,
    slots: Vec<SlotView>,
    newest_slot: usize,
    header: Header,
    ring_bytes: u64,
    /// According to the newest header. If the last writer did not close the log, there may be more
    /// behind it, which `scan` finds.
    used_bytes: u64,
    /// Time at which the oldest batch was created, according to its producer. The log itself
    /// records no times of records.
    oldest_timestamp_ms: Option<u64>,
}

#[derive(Serialize)]
struct Scanned {
    #[serde(flatten)]
    inspected: Inspected,
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

/// Shows the content of a target.
///
/// # Errors
/// It cannot be read, contains no write-ahead log, or, with `--scan`, a damaged one.
pub(crate) fn run(args: &InspectArgs) -> Result<(), Failure> {
    let device = open_read_only(args.log.path())?;
    let inspection = Wal::inspect(&device).map_err(unusable)?;
    let walk = if args.scan {
        let meter = Meter::new(format!("reading {}", args.log.path().display()));
        Some(scan(&device, &Streams::default(), &meter.callback())?)
    } else {
        None
    };
    let scanned = Scanned { inspected: Inspected::of(&device, &inspection), scan: walk };
    if args.json {
        output::json(&scanned)?;
    } else {
        scanned.inspected.print()?;
        if let Some(walk) = &scanned.scan {
            output::line("")?;
            walk.print()?;
        }
    }
    scanned.scan.map_or(Ok(()), |walk| walk.verdict(args.log.path()))
}

impl Inspected {
    pub(super) fn of(device: &SharedDevice, inspection: &Inspection) -> Self {
        let Inspection { slots, newest, header, ring_bytes } = inspection;
        Self {
            target: TargetInfo::of(device.geometry()),
            slots: slots.iter().map(SlotView::of).collect(),
            newest_slot: *newest,
            header: Header::of(header),
            ring_bytes: *ring_bytes,
            used_bytes: header.durable.0 - header.trim.0,
            oldest_timestamp_ms: oldest_timestamp_ms(device),
        }
    }

    pub(super) fn print(&self) -> Result<(), Failure> {
        let Self { target, header, .. } = self;
        let open = !header.clean_shutdown;
        entry("target", target)?;
        entry("block", format!("{} B logical", target.logical_block_bytes))?;
        entry("durability", format!("auto: {}", target.durability()))?;
        entry("WAL id", &header.wal_id)?;
        entry("capacity", Size { bytes: header.capacity_bytes })?;
        let at_least = if open { " at least" } else { "" };
        entry("usage", format!("{}{at_least}", usage(self.used_bytes, self.ring_bytes)))?;
        entry("log", format!("{}..{}{at_least}", header.trim_offset, header.durable_offset))?;
        entry(
            "origin",
            format!("log offset 0 lies at byte {} of the ring", header.ring_origin_bytes),
        )?;
        entry("window", Size { bytes: header.window_bytes })?;
        entry("epoch", format!("{}, from log offset {}", header.epoch, header.epoch_start_offset))?;
        entry("mark", header.mark)?;
        entry("node", header.node_id)?;
        entry("written", ago(header.written_at_ms))?;
        let state = if open { "open: in use, or its writer was killed" } else { "closed" };
        entry("shutdown", state)?;
        if let Some(oldest) = self.oldest_timestamp_ms {
            entry("oldest", format!("batch of {}, by its producer's clock", ago(oldest)))?;
        }
        output::line(format_args!("\n{}", self.slots()))?;
        self.complaints().into_iter().try_for_each(output::line)
    }

    fn slots(&self) -> Table {
        let mut table = Table::of_text(&[
            "SLOT",
            "STATE",
            "GENERATION",
            "EPOCH",
            "NODE",
            "MARK",
            "LOG",
            "WINDOW",
            "SHUTDOWN",
            "WRITTEN",
        ]);
        for (i, slot) in self.slots.iter().enumerate() {
            let newest = if i == self.newest_slot { " (newest)" } else { "" };
            let mut row = vec![format!("{i}{newest}"), slot.state.into()];
            if let Some(header) = &slot.header {
                row.extend([
                    header.generation.to_string(),
                    header.epoch.to_string(),
                    header.node_id.to_string(),
                    header.mark.to_string(),
                    format!("{}..{}", header.trim_offset, header.durable_offset),
                    about(header.window_bytes),
                    if header.clean_shutdown { "closed" } else { "open" }.into(),
                    ago(header.written_at_ms),
                ]);
            }
            table.row(row);
        }
        table
    }

    /// Describes faults of the header slots and their consequences.
    pub(super) fn complaints(&self) -> Vec<String> {
        let lost = self.slots.iter().enumerate().filter(|(_, slot)| slot.header.is_none());
        lost.map(|(i, slot)| {
            format!(
                "header slot {i} is lost ({}); slot {} is sufficient, and the next writer \
                 restores both",
                slot.detail, self.newest_slot
            )
        })
        .collect()
    }
}

/// Ends the scan after the first batch.
#[derive(Debug, thiserror::Error)]
#[error("the first batch was read")]
struct Enough;

/// The timestamp of the first batch, if it has one. Errors that occur while reading the log are not
/// reported here.
fn oldest_timestamp_ms(device: &SharedDevice) -> Option<u64> {
    let mut first = None;
    let _ = Wal::scan(device, None, &mut |record| match decode_record(&record.payload) {
        Ok(StreamRecord::Ends(_) | StreamRecord::Catalog(_)) => Ok(()),
        Ok(StreamRecord::Batch(_, batch)) => {
            first = Some(batch.max_timestamp_ms);
            Err(Enough.into())
        }
        Err(_) => Err(Enough.into()),
    });
    first?.try_into().ok()
}
