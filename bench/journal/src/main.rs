//! The journal cache beside the engines that people use today: one harness, each engine in a
//! process of its own, all with the same memory; and its reads beside its own maintenance.
//! `docs/benchmarks.md`, "Journal cache", says what is measured and why so.

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

/// Measure the journal cache and other engines, and hold the figures against the bars.
///
/// Below a million entries it is a trial of the bench itself: one round, one thread, within a
/// minute.
#[derive(Parser, Debug)]
#[command(name = "alluvium-bench-journal")]
struct Options {
    /// Keys, of 16 bytes, with values of 100 bytes.
    #[arg(long, value_name = "N", default_value_t = 10_000_000, value_parser = clap::value_parser!(u64).range(1000..))]
    entries: u64,
    /// Rounds, in each of which all engines take turns; medians count. Default: 3, or 1 below a
    /// million entries.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Threads that call the engine, one number after the other. Default: 1,2, or 1 below a million
    /// entries.
    #[arg(long, value_name = "N,N", value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=64))]
    threads: Vec<u64>,
    /// Which engines. Default: all. The bars compare with those that are here.
    #[arg(long, value_enum, value_name = "NAME,NAME", value_delimiter = ',')]
    engines: Vec<Name>,
    /// Only where the data fit in memory, or only where they do not. Default: both.
    #[arg(long, value_enum, value_name = "WHICH")]
    data: Option<Data>,
    /// MiB of memory where all data fit in. Default: three times the data. An index of 32 bytes for
    /// each key comes on top, for every engine; then a quarter of the data is the memory.
    #[arg(long, value_name = "MIB")]
    memory: Option<u64>,
    /// Seconds after which a workload that nothing depends on is ended, and of each measurement
    /// beside maintenance (but a second in a trial).
    #[arg(long, value_name = "S", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
    /// Seconds after which filling a store is given up, with what would come after it.
    #[arg(long, value_name = "S", default_value_t = 900, value_parser = clap::value_parser!(u64).range(1..))]
    patience: u64,
    /// Only measure reads beside maintenance. It comes at the end of a run that is not told to
    /// measure a part.
    #[arg(long, conflicts_with_all = ["engines", "threads", "memory", "data"])]
    beside: bool,
    /// Only measure the index of the journal cache beside concurrent maps (`index.md`).
    #[arg(long, conflicts_with_all = ["engines", "memory", "data", "beside"])]
    index: bool,
    /// Measure nothing: make the tables and plots of what runs have written into these directories,
    /// also if they were ended before their time. Their settings have to be the same; rounds of one
    /// engine count together.
    #[arg(long, value_name = "DIR,DIR", value_delimiter = ',', conflicts_with_all = ["engines", "threads", "memory", "data", "beside", "index", "rounds", "entries"])]
    report: Vec<PathBuf>,
    /// MiB of records that are put each second while reads beside maintenance are measured.
    #[arg(long, value_name = "MIB", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=1024))]
    rate: u64,
    /// Where stores are made and removed, on the disk that is to be measured: an empty or new
    /// directory.
    #[arg(long, value_name = "DIR", default_value = "target/bench-journal/stores")]
    dir: PathBuf,
    /// Where to write all figures (`results.jsonl`, `beside.jsonl`) and the tables (`tables.md`,
    /// `docs.md`, `beside.md`).
    #[arg(long, value_name = "DIR", default_value = "target/bench-journal")]
    out: PathBuf,
    /// Where to write the plots, but those of a trial. Default: nowhere.
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
    /// What a child of this program is told.
    #[arg(long, hide = true)]
    child: Option<String>,
    /// The same for a map.
    #[arg(long, hide = true, value_enum)]
    index_child: Option<directory::Name>,
}

/// The data beside the memory.
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
        let results = saved::together(&options.report)?;
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
