//! `alluvium cache`: a journal cache as a server, and its tools.

mod bench;
mod compact;
mod inspect;
mod memory;
mod options;
mod serve;

use alluvium_journal::Error;
use clap::Subcommand;

use crate::output::{self, Failure};

#[derive(Debug, Subcommand)]
pub(crate) enum CacheCommand {
    Serve(Box<serve::ServeArgs>),
    Bench(bench::BenchArgs),
    Compact(compact::CompactArgs),
    Inspect(inspect::InspectArgs),
    Verify(inspect::VerifyArgs),
}

/// Runs a `cache` command.
///
/// # Errors
/// Those of the command.
pub(crate) fn run(command: CacheCommand) -> Result<(), Failure> {
    match &command {
        CacheCommand::Serve(args) => {
            let log = output::start_log_queue()?;
            output::start_server_logging(log, args.log())?;
        }
        _ => output::start_logging("warn,alluvium::progress=info")?,
    }
    match command {
        CacheCommand::Serve(args) => serve::run(&args),
        CacheCommand::Bench(args) => bench::run(&args),
        CacheCommand::Compact(args) => compact::run(&args),
        CacheCommand::Inspect(args) => inspect::run(&args),
        CacheCommand::Verify(args) => inspect::verify(&args),
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::NoCache { path, reason } => {
                Self::Usage(format!("{}: {}", path.display(), options::in_flags(&reason)))
            }
            Error::OtherContents { .. } => Self::Usage(error.to_string()),
            error => Self::new(error),
        }
    }
}
