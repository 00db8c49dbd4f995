//! `alluvium cache inspect` and `verify`: the contents of a cache's files.

use std::path::{Path, PathBuf};

use alluvium_journal::{HintState, JournalReport, SetAside};
use clap::Args;
use serde_json::json;

use crate::output::{self, Failure, Table};
use crate::units::{about, counted};

/// Show the contents of a cache's journals. Reads all of them and changes nothing; the cache may be
/// in use, as for `verify`.
///
/// Exit codes: 0 nothing is damaged; 1 something is damaged, and everything was shown; 2 the cache
/// could not be inspected completely.
#[derive(Args, Debug)]
pub(crate) struct InspectArgs {
    /// The cache's directory.
    directory: PathBuf,
    /// Print JSON. Default: a table.
    #[arg(long)]
    json: bool,
}

/// Verify all records of a cache. Changes nothing.
///
/// If a process has the cache open, what it is writing at the moment may be reported as damage at
/// the end of the newest journal; it is not reported if the check is repeated.
///
/// Exit codes: 0 nothing is damaged; 1 something is damaged; 2 the cache could not be verified
/// completely.
#[derive(Args, Debug)]
pub(crate) struct VerifyArgs {
    /// The cache's directory.
    directory: PathBuf,
}

fn hint(report: &JournalReport) -> &'static str {
    match report.hint {
        HintState::Missing => "missing",
        HintState::Valid => "right",
        HintState::Mismatch => "wrong",
    }
}

/// Returns whether records are missing, or the hint disagrees with the journal.
fn is_damaged(report: &JournalReport) -> bool {
    report.damaged_bytes > 0 || report.hint == HintState::Mismatch
}

fn verdict(directory: &Path, is_damaged: bool) -> Result<(), Failure> {
    match is_damaged {
        true => Err(Failure::Failed(format!("{}: the cache is damaged", directory.display()))),
        false => Ok(()),
    }
}

/// Runs `alluvium cache inspect`.
///
/// # Errors
/// Something is damaged; the directory has no readable cache.
pub(crate) fn run(args: &InspectArgs) -> Result<(), Failure> {
    let mut reports = Vec::new();
    let inspected = alluvium_journal::inspect(&args.directory, |report| {
        reports.push(report);
        Ok::<_, Failure>(())
    });
    let journal_bytes = inspected.map_err(Failure::not_checked)?;
    show(args, &reports, journal_bytes, files_set_aside(&args.directory)?)?;
    verdict(&args.directory, reports.iter().any(is_damaged))
}

fn show(
    args: &InspectArgs,
    reports: &[JournalReport],
    journal_bytes: usize,
    aside: SetAside,
) -> Result<(), Failure> {
    if args.json {
        let journals = reports.iter().map(|report| {
            json!({
                "number": report.number.0,
                "compression": report.compression.to_string(),
                "file_bytes": report.file_bytes,
                "end_bytes": report.end_bytes,
                "values": report.values,
                "expired": report.expired,
                "tombstones": report.tombstones,
                "key_bytes": report.key_bytes,
                "value_bytes": report.value_bytes,
                "damaged_bytes": report.damaged_bytes,
                "hint": hint(report),
            })
        });
        return output::json(&json!({
            "journal_bytes": journal_bytes,
            "journals": journals.collect::<Vec<_>>(),
            "set_aside": { "files": aside.files, "bytes": aside.bytes },
        }));
    }
    let mut table = Table::of_numbers(&[
        "journal",
        "used",
        "compression",
        "on disk",
        "values",
        "expired",
        "tombstones",
        "keys",
        "value bytes",
        "damaged",
        "hint",
    ]);
    for report in reports {
        table.row(vec![
            report.number.to_string(),
            about(report.end_bytes),
            report.compression.to_string(),
            about(report.file_bytes),
            report.values.to_string(),
            report.expired.to_string(),
            report.tombstones.to_string(),
            about(report.key_bytes),
            about(report.value_bytes),
            report.damaged_bytes.to_string(),
            hint(report).to_string(),
        ]);
    }
    output::line(format_args!(
        "{} of up to {}",
        counted(reports.len() as u64, "journal", "journals"),
        about(journal_bytes as u64)
    ))?;
    output::line(table)?;
    print_set_aside(aside)
}

fn files_set_aside(directory: &Path) -> Result<SetAside, Failure> {
    alluvium_journal::files_set_aside(directory).map_err(|error| Failure::from(error).not_checked())
}

/// Reports files that were set aside: they are no longer journals of the cache, and take space.
fn print_set_aside(aside: SetAside) -> Result<(), Failure> {
    if aside.files == 0 {
        return Ok(());
    }
    output::line(format_args!(
        "{} of {} set aside (*.journal.damaged), which the cache does not use: inspect or remove \
         them",
        counted(aside.files as u64, "file", "files"),
        about(aside.bytes)
    ))
}

/// Runs `alluvium cache verify`.
///
/// # Errors
/// Something is damaged; the directory has no readable cache.
pub(crate) fn verify(args: &VerifyArgs) -> Result<(), Failure> {
    let (mut records, mut has_damage, mut has_damaged_bytes) = (0, false, false);
    let inspected = alluvium_journal::inspect(&args.directory, |report| {
        records += report.values + report.tombstones;
        has_damage |= is_damaged(&report);
        let journal = format!("journal {} ({})", report.number, report.file_name());
        if report.damaged_bytes > 0 {
            output::line(format_args!("{journal}: {} bytes are damaged", report.damaged_bytes))?;
            has_damaged_bytes = true;
        }
        if report.hint == HintState::Mismatch {
            output::line(format_args!(
                "{journal}: its hint disagrees with it; remove the hint, and the next opening \
                 reads the journal"
            ))?;
        }
        Ok(())
    });
    inspected.map_err(Failure::not_checked)?;
    if has_damaged_bytes {
        output::line(
            "Damaged records are not used: a read of such a key is an error, or finds nothing, \
             until the key is written or deleted. The other records are not affected.",
        )?;
    }
    print_set_aside(files_set_aside(&args.directory)?)?;
    verdict(&args.directory, has_damage)?;
    output::line(format_args!("{records} records, nothing is damaged"))
}
