//! The command line: the list of commands. Their options are defined in the modules of the
//! commands.

use clap::{Parser, Subcommand};

use crate::bench::BenchCommand;
use crate::cache::CacheCommand;
use crate::catalog::CatalogCommand;
use crate::config::ServeOptions;
use crate::import::ImportArgs;
use crate::object::ObjectCommand;
use crate::rebuild::RebuildArgs;
use crate::topic::TopicCommand;
use crate::user::UserCommand;
use crate::volume::VolumeCommand;
use crate::wal::WalCommand;

/// A Kafka-compatible streaming server on a raw-device write-ahead log.
#[derive(Debug, Parser)]
#[command(
    name = "alluvium",
    version,
    disable_help_subcommand = true,
    after_help = "Exit codes: 0 done; 1 failed; 2 wrong usage or configuration; 3 the write-ahead \
                  log failed while serving; 4 a defect of the server; 130 ended at once by a \
                  second signal."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the server.
    ///
    /// Every option can also be set as an environment variable (shown in brackets) or in a TOML
    /// file under the same name without the leading dashes, as in `wal-capacity = "2GiB"`. The
    /// command line overrides the environment, the environment overrides the file, and the file
    /// overrides the default. Sizes are written as 64KiB, 512MiB, 2GiB or in plain bytes, times as
    /// 500ms, 60s or 5m.
    Serve(Box<ServeOptions>),
    /// Create, list, describe and delete topics of a running server.
    #[command(subcommand)]
    Topic(TopicCommand),
    /// Add, list and delete users of the server on this machine, who log in with a password.
    #[command(subcommand)]
    User(UserCommand),
    /// Format, inspect, dump and measure a write-ahead log.
    #[command(subcommand)]
    Wal(WalCommand),
    /// Inspect and verify objects in a directory or in S3, and compare them with the catalog.
    #[command(subcommand)]
    Object(ObjectCommand),
    /// Serve, inspect, verify, compact and measure a journal cache.
    #[command(subcommand)]
    Cache(CacheCommand),
    /// Serve, export, create and inspect replicated block volumes.
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// List the catalogs in an object store, and export one as JSON.
    #[command(subcommand)]
    Catalog(CatalogCommand),
    Rebuild(RebuildArgs),
    Import(ImportArgs),
    /// Put load on a running server, this one or any other that speaks Kafka, and measure.
    #[command(subcommand)]
    Bench(BenchCommand),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
