//! Runs the power-cut campaign, or replays one seed of it.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use alluvium_sim::campaign::print_progress;
use alluvium_sim::{Mutation, Outcome, Plan, Profile, campaign, run};
use clap::Parser;

/// Cut the power under a write-ahead log many times, and check that it keeps its guarantees.
#[derive(Debug, Parser)]
#[command(name = "alluvium-sim")]
struct Cli {
    /// Number of seeds to run.
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    start: u64,
    /// Replay only this seed and print each step.
    #[arg(long)]
    seed: Option<u64>,
    /// Faults of the disk: `power-cut` for none, or `faults` (bit rot, I/O errors, a full disk,
    /// lost and misdirected writes, and old owners that continue to write).
    #[arg(long, default_value = "power-cut", value_parser = profile)]
    profile: Profile,
    /// Introduce a defect, which the campaign must find: `trusted-cache`, `no-flush-at-open`,
    /// `volatile-headers`, `one-header-slot`, `early-completion`, `volatile-copies`,
    /// `unsaid-growth`, `blind-owner`, `blind-opening` or `open-fence`.
    #[arg(long = "break", value_name = "MUTATION")]
    #[arg(default_value = "sound", value_parser = mutation)]
    mutation: Mutation,
}

fn profile(name: &str) -> Result<Profile, String> {
    [Profile::PowerCut, Profile::Faults]
        .into_iter()
        .find(|profile| profile.to_string() == name)
        .ok_or_else(|| "expected `power-cut` or `faults`".into())
}

fn mutation(name: &str) -> Result<Mutation, String> {
    Mutation::ALL
        .into_iter()
        .find(|mutation| mutation.to_string() == name)
        .ok_or_else(|| "no such mutation; see --help".into())
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let plan = |seed, verbose| Plan { seed, profile: cli.profile, mutation: cli.mutation, verbose };
    let result = match cli.seed {
        Some(seed) => run(plan(seed, true)),
        None => campaign(cli.start, cli.seeds, |seed| plan(seed, false), print_progress(cli.seeds)),
    };
    match result {
        Ok(outcome) => {
            print(&outcome);
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}

fn print(outcome: &Outcome) {
    println!("no failure: {outcome:#?}");
}
