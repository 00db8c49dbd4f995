//! Runs the volume campaign, or replays one seed of it.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use alluvium_sim::campaign::print_progress;
use alluvium_sim::volume::{Mutation, Plan, Schedule, campaign, run};
use clap::Parser;

/// Seeds that run twice, to show that a seed replays.
const REPLAYED: u64 = 3;

/// Failures that are printed.
const PRINTED: usize = 10;

/// Cut the power of replicated volumes many times, and check that every replica stays exact.
#[derive(Debug, Parser)]
#[command(name = "volume")]
struct Cli {
    /// Number of seeds to run.
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    start: u64,
    /// Steps of each seed.
    #[arg(long, default_value_t = 12_000)]
    steps: u64,
    /// Replay only this seed and print each event.
    #[arg(long)]
    seed: Option<u64>,
    /// Where all seeds put the faults. By default each seed draws one of these.
    #[arg(long)]
    schedule: Option<Schedule>,
    /// Break a rule of the protocol; the campaign then fails if no seed finds it.
    #[arg(long = "break", value_name = "MUTATION", default_value_t = Mutation::Sound)]
    mutation: Mutation,
}

impl Cli {
    fn plan(&self, seed: u64, verbose: bool) -> Plan {
        let Self { steps, schedule, mutation, .. } = *self;
        Plan { seed, steps, schedule, mutation, verbose }
    }

    /// Checks that the first seeds do the same when they run again.
    fn replays(&self) -> bool {
        let digest = |seed| run(self.plan(seed, false)).map(|(_, digest)| digest).ok();
        let mut seeds = self.start..self.start + self.seeds.min(REPLAYED);
        let differs = seeds.find(|seed| digest(*seed) != digest(*seed));
        if let Some(seed) = differs {
            eprintln!("seed {seed} does not replay");
        }
        differs.is_none()
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Some(seed) = cli.seed {
        return match run(cli.plan(seed, true)) {
            Ok((outcome, digest)) => {
                println!("no failure, digest {digest:016x}: {outcome:#?}");
                ExitCode::SUCCESS
            }
            Err(failure) => {
                eprintln!("{failure}");
                ExitCode::FAILURE
            }
        };
    }
    if cli.mutation == Mutation::Sound && !cli.replays() {
        return ExitCode::FAILURE;
    }
    let plan = |seed| cli.plan(seed, false);
    let report = campaign(cli.start, cli.seeds, plan, print_progress(cli.seeds));
    for failure in report.failures.iter().take(PRINTED) {
        eprintln!("{failure}");
    }
    println!("{:#?}", report.outcome);
    println!("{}: {} of {} seeds failed", cli.mutation, report.failures.len(), cli.seeds);
    let expects_failures = cli.mutation != Mutation::Sound;
    if expects_failures == report.failures.is_empty() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}
