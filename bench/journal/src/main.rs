//! Compares the journal cache with widely used engines: one harness, each engine in a process of
//! its own, all with the same memory; and compares its reads with and without its own maintenance.
//! `docs/benchmarks/journal.md` explains what is measured and why.

mod beside;
mod cgroup;
mod child;
mod directory;
mod engine;
mod engines;
mod race;
mod report;
mod saved;
mod system;
mod workload;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use crate::engine::Result;
use crate::engines::Name;

/// Measure the journal cache and other engines, and compare the figures with the targets.
///
/// Below a million entries it is a trial of the bench itself: one round, one thread, within a
/// minute.
#[derive(Parser, Debug)]
#[command(name = "alluvium-bench-journal")]
struct Options {
    /// Number of keys, of 16 bytes, with values of 100 bytes.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 10_000_000,
        value_parser = clap::value_parser!(u64).range(1000..)
    )]
    entries: u64,
    /// Number of rounds, in each of which all engines take turns; medians count. Default: 3, or 1
    /// below a million entries.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Numbers of threads that call the engine, measured one after the other. Default: 1,2, or 1
    /// below a million entries.
    #[arg(
        long,
        value_name = "N,N",
        value_delimiter = ',',
        value_parser = clap::value_parser!(u64).range(1..=64)
    )]
    threads: Vec<u64>,
    /// Which engines. Default: all. The targets compare with those that are selected.
    #[arg(long, value_enum, value_name = "NAME,NAME", value_delimiter = ',')]
    engines: Vec<Name>,
    /// Only with data that fit in memory, or only with data that do not. Default: both.
    #[arg(long, value_enum, value_name = "WHICH")]
    data: Option<Data>,
    /// MiB of memory for data that fit. Default: three times the data. An index of 32 bytes for
    /// each key comes on top, for every engine. For data that do not fit, the memory is a quarter
    /// of the data.
    #[arg(long, value_name = "MIB")]
    memory: Option<u64>,
    /// Seconds after which a workload without dependents is ended, and the length of each
    /// measurement during maintenance (a second in a trial).
    #[arg(
        long,
        value_name = "S",
        default_value_t = 10,
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    seconds: u64,
    /// Seconds after which filling a store is given up, with the workloads that depend on it.
    #[arg(
        long,
        value_name = "S",
        default_value_t = 900,
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    patience: u64,
    /// Only measure reads during maintenance. A run that is not restricted to a part measures them
    /// at its end.
    #[arg(long, conflicts_with_all = ["engines", "threads", "memory", "data"])]
    beside: bool,
    /// Only compare the index of the journal cache with concurrent maps (`index.md`).
    #[arg(long, conflicts_with_all = ["engines", "memory", "data", "beside"])]
    index: bool,
    /// Measure nothing: make the tables and plots from what runs have written into these
    /// directories, even if they were interrupted. Their settings have to be the same; rounds of
    /// the same engine are combined.
    #[arg(
        long,
        value_name = "DIR,DIR",
        value_delimiter = ',',
        conflicts_with_all = [
            "engines", "threads", "memory", "data", "beside", "index", "rounds", "entries",
        ]
    )]
    report: Vec<PathBuf>,
    /// MiB of records put per second while reads during maintenance are measured.
    #[arg(
        long,
        value_name = "MIB",
        default_value_t = 20,
        value_parser = clap::value_parser!(u64).range(1..=1024)
    )]
    rate: u64,
    /// Where stores are created and removed, on the disk to be measured: an empty or new directory.
    #[arg(long, value_name = "DIR", default_value = "target/bench-journal/stores")]
    dir: PathBuf,
    /// Where to write all figures (`results.jsonl`, `beside.jsonl`) and the tables (`tables.md`,
    /// `docs.md`, `beside.md`).
    #[arg(long, value_name = "DIR", default_value = "target/bench-journal")]
    out: PathBuf,
    /// Where to write the plots, except those of a trial. Default: nowhere.
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
    /// The instructions to a child of this program.
    #[arg(long, hide = true)]
    child: Option<String>,
    /// The map to be measured by a child of this program.
    #[arg(long, hide = true, value_enum)]
    index_child: Option<directory::Name>,
}

/// The size of the data relative to the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Data {
    Fits,
    Exceeds,
}

fn run(options: &Options) -> Result<()> {
    if let Some(spec) = &options.child {
        return child::run(&serde_json::from_str(spec)?);
    }
    if let Some(name) = options.index_child {
        return directory::child(name, options);
    }
    if options.index {
        return directory::run(options);
    }
    if !options.report.is_empty() {
        let results = saved::combine(&options.report)?;
        std::fs::create_dir_all(&options.out)?;
        return report::write(&results, &options.out, options.plots.as_deref());
    }
    if !options.beside {
        race::run(options)?;
    }
    let is_part =
        !options.engines.is_empty() || !options.threads.is_empty() || options.data.is_some();
    if !is_part {
        beside::run(options)?;
    }
    Ok(())
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
