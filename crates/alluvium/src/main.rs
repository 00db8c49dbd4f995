//! The `alluvium` binary: the server and its tools. This crate parses options, connects the
//! components of the crates below, and prints.
//!
//! # Modules
//!
//! - `config.rs`, `config/`, `listeners.rs`: options, their bounds and defaults; listeners
//! - `serve.rs`, `storage.rs`: `serve`: start and stop; opening of log, catalog and objects
//! - `admin.rs`, `admin/`: metrics over HTTP; probes; limits on the connections of the admin port
//! - `log_queue.rs`, `output.rs`, `defect.rs`: logging that never blocks; results and exit codes; a
//!   panic ends the server
//! - `control.rs`, `unix_socket.rs`: the socket by which commands reach a running server
//! - `objects.rs`, `profile.rs`: object stores and their credentials
//! - `jwks.rs`, `user.rs`, `password.rs`: keys of OAUTHBEARER tokens; `user`; passwords in files
//! - `topic.rs`, `kafka.rs`, `kafka/`: `topic`, and the Kafka client of `topic` and `bench`
//! - `wal/`, `object/`, `catalog.rs`, `rebuild.rs`: tools for logs, objects and the catalog;
//!   rebuild after the loss of a log
//! - `import/`: topics of a Kafka cluster, copied at their offsets
//! - `bench/`, `load.rs`: load for any Kafka server
//! - `cache/`: tools of the journal cache, and its Redis server
//! - `volume/`: servers of block volumes, NBD exports, and their tools
#![forbid(unsafe_code)]

mod address;
mod admin;
mod bench;
mod cache;
mod catalog;
mod cli;
mod config;
mod control;
mod defect;
mod import;
mod jwks;
mod kafka;
mod listeners;
mod load;
mod log_queue;
mod object;
mod objects;
mod open_files;
mod output;
mod password;
mod per_ip;
mod profile;
mod progress;
mod rebuild;
mod serve;
mod storage;
mod topic;
mod units;
mod unix_socket;
mod user;
mod volume;
mod wal;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};

// Batches of some KiB stay in the log cache until thousands of newer ones evict them, between
// short-lived allocations of each request: glibc's malloc, with an arena per thread, takes half as
// much memory again (docs/benchmarks/uploads.md, "Resident memory").
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // Help and version go to standard output.
        Err(answer) if !answer.use_stderr() => answer.exit(),
        Err(error) => return output::refuse(&error),
    };
    let done = match cli.command {
        Command::Bench(command) => bench::run(command),
        Command::Cache(command) => cache::run(command),
        Command::Catalog(command) => catalog::run(command),
        Command::Import(args) => import::run(&args),
        Command::Object(command) => object::run(command),
        Command::Rebuild(args) => rebuild::run(&args),
        Command::Serve(options) => serve::run(*options),
        Command::Topic(command) => topic::run(command),
        Command::User(command) => user::run(command),
        Command::Volume(command) => volume::run(command),
        Command::Wal(command) => wal::run(command),
    };
    let code = match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    };
    output::finish_log();
    code
}
