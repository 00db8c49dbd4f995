//! `alluvium wal recover`.

use alluvium_wal::{Options, Record, Wal};
use clap::Args;
use serde::Serialize;

use super::content::{CatalogArgs, Content};
use super::{Header, LogArgs, TargetInfo, Walk, ago, entry, open_exclusively, unusable};
use crate::output::{self, Failure};
use crate::progress::Meter;
use crate::storage::with_window;
use crate::units::Size;

/// Take the log over from a server that is gone, and close it.
///
/// The log is recovered as at the start of a server, and closed, so that the next start reads its
/// end from the header. It keeps what a start would keep, which is every acknowledged record that
/// is not damaged. Nothing is uploaded or trimmed; the server does that. Missing offsets of streams
/// are listed, with topic and partition if --catalog is given.
///
/// Taking over means opening the log with the next epoch. The log ends at the first position that
/// was never durable; records behind that position, none of which was acknowledged, are discarded.
/// The previous owner is fenced: if it still runs, on another machine that reaches the device, it
/// notices at its next change of the header and stops. Until then it may acknowledge records that
/// are lost, and overwrite records of its successor. Only the device can prevent that: give
/// --reserve where it is supported, or first detach the device from the other machine or turn that
/// machine off. On the same machine this command refuses to run while another process has the log
/// open.
///
/// docs/format/wal.md, sections 3, 6 and 8, gives the reasons.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit codes: 0 taken over and closed; 1 refused, or damaged (then it is still \
                  taken over and closed, and the command says so)."
)]
pub(crate) struct RecoverArgs {
    #[command(flatten)]
    log: LogArgs,
    #[command(flatten)]
    catalog: CatalogArgs,
    /// Reserve the device for this machine first, so that it refuses writes from another machine (a
    /// whole SCSI disk or NVMe namespace with persistent reservations). It stays reserved: servers
    /// on other machines need --wal-reserve from then on.
    #[arg(long)]
    reserve: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Recovered {
    target: TargetInfo,
    /// The header before the command.
    before: Header,
    /// Result of recovery; `None` if the log was never opened.
    scan: Option<Walk>,
    /// The header after the command.
    header: Header,
}

/// Recovers the log and closes it.
///
/// # Errors
/// Another process has it open, it cannot be read or written, it contains no write-ahead log, or a
/// damaged one.
pub(crate) fn run(args: &RecoverArgs) -> Result<(), Failure> {
    let path = args.log.path();
    let streams = args.catalog.streams()?;
    let device = open_exclusively(path)?;
    let found = Wal::inspect(&device).map_err(unusable)?;
    let before = found.header;
    let target = TargetInfo::of(device.geometry());
    if before.epoch == 0 {
        // To the server, opening the log would look like a use by another server.
        if args.reserve {
            return Err(Failure::Failed(format!(
                "{} was never opened since it was formatted: there is nothing to take over, and \
                 it was not reserved. Its first server can reserve it (--wal-reserve)",
                path.display()
            )));
        }
        let recovered = Recovered {
            target,
            before: Header::of(&before),
            scan: None,
            header: Header::of(&before),
        };
        if args.json {
            return output::json(&recovered);
        }
        return output::line(format_args!(
            "{} was never opened since it was formatted: there is nothing to take over",
            path.display()
        ));
    }
    eprintln!(
        "taking over {target}: write-ahead log {}, of node {} in epoch {}, written {}, {}; as \
         epoch {}",
        before.wal_id,
        before.node_id,
        before.epoch,
        ago(before.written_at_ms),
        if before.clean_shutdown { "closed" } else { "not closed" },
        u64::from(before.epoch) + 1
    );
    let half_ring = Size { bytes: found.ring_bytes / 2 };
    let window = half_ring.min(Size { bytes: Options::default().window_bytes });
    let options = Options { node_id: before.node_id, reserve: args.reserve, ..with_window(window) };
    let meter = Meter::new(format!("recovering {}", path.display()));
    let mut content = Content::new(&streams);
    let mut visit = |record: Record| {
        content.add(&record);
        Ok(())
    };
    let (wal, report) = Wal::open(device.clone(), &options, Some(meter.callback()), &mut visit)
        .map_err(unusable)?;
    drop(meter);
    wal.close().map_err(Failure::new)?;
    let now = Wal::inspect(&device).map_err(unusable)?;
    let recovered = Recovered {
        target,
        before: Header::of(&before),
        scan: Some(Walk::of(&report, content)),
        header: Header::of(&now.header),
    };
    let walk = recovered.scan.as_ref().expect("it was just set");
    if args.json {
        output::json(&recovered)?;
    } else {
        walk.print()?;
        let header = &recovered.header;
        entry(
            "now",
            format!("epoch {}, closed at log offset {}", header.epoch, header.durable_offset),
        )?;
    }
    match walk.complaint() {
        None => Ok(()),
        Some(complaint) => Err(Failure::Failed(format!(
            "{}: taken over and closed, but {complaint}",
            path.display()
        ))),
    }
}
