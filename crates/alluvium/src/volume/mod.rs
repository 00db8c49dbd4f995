//! `alluvium volume`: replicated block volumes. `docs/volumes.md` explains how they are run.
//!
//! - `serve.rs`: a server of volumes; `metrics.rs`: its metrics
//! - `export.rs`, `disk.rs`: a volume as an NBD disk
//! - `manage.rs`: create, list, info, attach, status, delete
//! - `coordination.rs`: the options with which commands reach the cluster

mod coordination;
mod disk;
mod export;
mod export_metrics;
mod manage;
mod metrics;
mod serve;

use std::net::SocketAddr;

use clap::Subcommand;
use tokio::runtime::Runtime;

use crate::output::{self, Failure};
use crate::serve::runtime;

pub(crate) use coordination::ClusterArgs;

/// The commands about volumes.
#[derive(Debug, Subcommand)]
pub(crate) enum VolumeCommand {
    Serve(Box<serve::ServeArgs>),
    Export(export::ExportArgs),
    Create(manage::CreateArgs),
    List(manage::ListArgs),
    Info(manage::InfoArgs),
    Attach(manage::AttachArgs),
    Status(manage::StatusArgs),
    Delete(manage::DeleteArgs),
}

/// Runs a `volume` command.
///
/// # Errors
/// Those of the command.
pub(crate) fn run(command: VolumeCommand) -> Result<(), Failure> {
    match command {
        VolumeCommand::Serve(args) => {
            let log = output::start_log_queue()?;
            output::start_server_logging(log, args.log())?;
            serve::run(*args)
        }
        VolumeCommand::Export(args) => {
            let log = output::start_log_queue()?;
            output::start_server_logging(log, args.log())?;
            export::run(args)
        }
        VolumeCommand::Create(args) => block_on(manage::create(args)),
        VolumeCommand::List(args) => block_on(manage::list(args)),
        VolumeCommand::Info(args) => block_on(manage::info(args)),
        VolumeCommand::Attach(args) => block_on(manage::attach(args)),
        VolumeCommand::Status(args) => block_on(manage::status(args)),
        VolumeCommand::Delete(args) => block_on(manage::delete(args)),
    }
}

/// Processors for each worker of a runtime that serves volumes.
const PROCESSORS_PER_WORKER: usize = 4;

/// The runtime of a server or an export. The shard and most of a volume's work are one task at a
/// time, so a second worker mostly wakes up to find nothing to do: on two processors it doubles the
/// processor time of a write.
fn serving_runtime() -> Result<Runtime, Failure> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    runtime(Some((processors / PROCESSORS_PER_WORKER).max(1)))
}

fn block_on(command: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    runtime(None)?.block_on(command)
}

/// What an attachment is registered with, for people: where the volume is used, and by which
/// process.
fn attached_by(place: &str) -> String {
    let host = rustix::system::uname();
    let host = host.nodename().to_string_lossy();
    format!("{place} on host {host} (process {})", std::process::id())
}

/// Requires an explicit option to listen beyond the loopback interface, which is the only
/// protection.
fn check_exposure(option: &str, address: SocketAddr, allowed: bool) -> Result<(), Failure> {
    match address.ip().is_loopback() || allowed {
        true => Ok(()),
        false => Err(Failure::Usage(format!(
            "{option} is {address}, which is reachable from the network, and it has neither \
             encryption nor authentication: use a loopback address, or give \
             --allow-plaintext-network if every machine that reaches it is trusted"
        ))),
    }
}
