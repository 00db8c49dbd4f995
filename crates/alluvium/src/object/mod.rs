//! `alluvium object`: tools for objects in the object store.

mod content;
mod find;
mod gc;
mod inspect;
mod probe;
mod verify;

use alluvium_stream::ObjectError;
use clap::Subcommand;

use crate::catalog;
use crate::output::{self, Failure};

#[derive(Debug, Subcommand)]
pub(crate) enum ObjectCommand {
    /// Show an object's header, its index, and its content by stream. Reads no records.
    Inspect(inspect::InspectArgs),
    Verify(verify::VerifyArgs),
    Gc(gc::GcArgs),
    Probe(probe::ProbeArgs),
}

/// Runs an `object` command.
///
/// # Errors
/// Those of the command.
pub(crate) fn run(command: ObjectCommand) -> Result<(), Failure> {
    // The tools print their results; only warnings and progress are logged.
    output::start_logging("warn,alluvium::progress=info")?;
    catalog::blocking(async {
        match command {
            ObjectCommand::Gc(args) => gc::run(&args).await,
            ObjectCommand::Probe(args) => probe::run(&args).await,
            ObjectCommand::Inspect(args) => inspect::run(&args).await,
            ObjectCommand::Verify(args) => verify::run(&args).await,
        }
    })
}

/// Distinguishes damage that was found from errors because of which nothing was checked.
fn failure(shown: &str, error: &ObjectError) -> Failure {
    let message = format!("{shown}: {}", error.reason());
    match error {
        ObjectError::Damaged { .. } => Failure::Failed(message),
        ObjectError::Store { .. } => Failure::NotChecked(message),
    }
}

/// Formats a greatest timestamp: milliseconds since the Unix epoch.
fn timestamp(max_timestamp_ms: i64) -> String {
    if max_timestamp_ms == -1 { "-".into() } else { max_timestamp_ms.to_string() }
}
