//! `alluvium cache`: tools for the journal cache.

mod bench;
mod inspect;

use alluvium_journal::Error;
use clap::Subcommand;

use crate::output::{self, Failure};

#[derive(Debug, Subcommand)]
pub(crate) enum CacheCommand {
    Bench(bench::BenchArgs),
    Inspect(inspect::InspectArgs),
    Verify(inspect::VerifyArgs),
}

/// Run a `cache` command.
///
/// # Errors
/// What the command says it can fail with.
pub(crate) fn run(command: CacheCommand) -> Result<(), Failure> {
    output::start_logging("warn,alluvium::progress=info")?;
    match command {
        CacheCommand::Bench(args) => bench::run(&args),
        CacheCommand::Inspect(args) => inspect::run(&args),
        CacheCommand::Verify(args) => inspect::verify(&args),
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::NoCache { .. } => Self::Usage(error.to_string()),
            error => Self::new(error),
        }
    }
}
