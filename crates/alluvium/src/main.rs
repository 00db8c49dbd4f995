//! The `alluvium` binary: the server, and the tools beside it. This crate parses, wires and prints;
//! what it wires lives in the crates below.
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
mod jwks;
mod kafka;
mod listeners;
mod load;
mod log_queue;
mod object;
mod objects;
mod open_files;
mod output;
mod per_ip;
mod profile;
mod progress;
mod serve;
mod storage;
mod topic;
mod units;
mod user;
mod wal;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};

// Batches of some KiB live in the log cache until thousands of newer ones push them out, between
// what comes and goes with each request: glibc's malloc, with an arena for each thread, keeps half
// as much again (docs/benchmarks/uploads.md, "Resident memory").
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
        Command::Object(command) => object::run(command),
        Command::Serve(options) => serve::run(*options),
        Command::Topic(command) => topic::run(command),
        Command::User(command) => user::run(command),
        Command::Wal(command) => wal::run(command),
    };
    let code = match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    };
    output::finish_log();
    code
}
