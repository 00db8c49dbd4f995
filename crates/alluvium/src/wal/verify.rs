//! `alluvium wal verify`.

use alluvium_wal::{OpenError, Wal};
use clap::Args;
use serde::Serialize;

use super::content::CatalogArgs;
use super::inspect::Inspected;
use super::{LogArgs, Walk, entry, open_read_only, scan, unusable};
use crate::output::{self, Failure};
use crate::progress::Meter;

/// Read the whole log and report whether it is intact.
///
/// Both copies of the header are checked, and every record from the trim offset to the end of the
/// log, with its checksums. Each gap is listed with its range of the log, the byte of the device
/// where it begins, and what was found there. Records after the end, which a crash left and which
/// were never acknowledged, are counted; they are not damage. Missing offsets of streams are
/// listed, with topic and partition if --catalog is given.
///
/// Nothing is written and no lock is taken: while a server has the log open, the command reads the
/// log up to its end at the time it gets there.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit codes: 0 the log is intact; 1 it is damaged, in a record or in one of its \
                  headers; 2 it could not be checked (no access, no write-ahead log, a read that \
                  fails where the log may end)."
)]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    log: LogArgs,
    #[command(flatten)]
    catalog: CatalogArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Verified {
    intact: bool,
    #[serde(flatten)]
    inspected: Inspected,
    scan: Walk,
}

/// Reads and checks the log.
///
/// # Errors
/// It is damaged (exit code 1), or cannot be checked (2).
pub(crate) fn run(args: &VerifyArgs) -> Result<(), Failure> {
    let path = args.log.path();
    let device = open_read_only(path).map_err(Failure::not_checked)?;
    let inspection = Wal::inspect(&device).map_err(refusal)?;
    let meter = Meter::new(format!("verifying {}", path.display()));
    let streams = args.catalog.streams().map_err(Failure::not_checked)?;
    let scan = scan(&device, &streams, &meter.callback()).map_err(Failure::not_checked)?;
    drop(meter);
    let inspected = Inspected::of(&device, &inspection);
    let mut complaints = inspected.complaints();
    complaints.extend(scan.complaint());
    let verified = Verified { intact: complaints.is_empty(), inspected, scan };
    if args.json {
        output::json(&verified)?;
    } else {
        verified.inspected.print()?;
        output::line("")?;
        verified.scan.print()?;
    }
    if !verified.intact {
        return Err(Failure::Failed(format!("{}: {}", path.display(), complaints.join("; "))));
    }
    if args.json { Ok(()) } else { entry("verdict", "intact: every checksum is correct") }
}

/// Classifies an error: headers that exist and are unusable are damage; with any other error there
/// was nothing to check.
fn refusal(error: OpenError) -> Failure {
    let damaged =
        matches!(error, OpenError::HeaderDamaged { .. } | OpenError::HeaderConflict { .. });
    let failure = unusable(error);
    if damaged { failure } else { failure.not_checked() }
}
