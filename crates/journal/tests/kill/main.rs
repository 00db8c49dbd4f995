//! Kills (SIGKILL) a process with an open cache while it writes, repeatedly, and compares what is
//! left with what it reported: the table in `docs/journal-cache.md`, "Durability". `cargo xtask
//! kill --cache` goes further.
//!
//! The process is this test's own binary, as [`the_process`]. It reports through a pipe what it has
//! found, and which of its writes have returned; all of them are determined by a seed and their
//! number. It ends with its parent.
#![cfg(unix)]
#![forbid(unsafe_code)]

mod campaign;
mod plan;
mod process;

use std::path::Path;
use std::process::exit;
use std::time::Duration;

use alluvium_journal::Durability;

use self::campaign::Campaign;
use self::plan::{INTERVAL, Plan};

/// Longer than anything takes: it only stops a test that hangs.
const PATIENCE: Duration = Duration::from_secs(120);
const PROCESS_DIRECTORY: &str = "ALLUVIUM_KILL_DIRECTORY";
const PROCESS_PLAN: &str = "ALLUVIUM_KILL_PLAN";

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Not a test: the process that the tests start and kill.
#[test]
fn the_process() {
    let (Ok(directory), Ok(plan)) = (std::env::var(PROCESS_DIRECTORY), std::env::var(PROCESS_PLAN))
    else {
        return;
    };
    let lived = Plan::parse(&plan).and_then(|plan| process::live(Path::new(&directory), plan));
    if let Err(error) = lived {
        eprintln!("the process: {error}");
        exit(1);
    }
    exit(0);
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect(name))
}

/// Runs the rounds of one plan; after a failure the files are kept.
fn campaign(durability: Durability, evicts: bool) {
    let (rounds, seed) = (number("ALLUVIUM_KILL_ROUNDS", 5), number("ALLUVIUM_KILL_SEED", 1));
    let plan = Plan { durability, evicts, seed };
    let mut campaign = Campaign::new(plan).unwrap();
    let ran = (1..=rounds).try_for_each(|_| campaign.round()).and_then(|()| campaign.end());
    let (kills, writes) = (campaign.kills, campaign.writes);
    if let Err(error) = ran {
        let path = campaign.directory.keep();
        panic!(
            "plan {}, after {kills} kills: {error}\nthe files stay in {}",
            plan.name(),
            path.display()
        );
    }
    println!("{}: {kills} kills, {writes} writes: what was promised was there", plan.name());
}

#[test]
fn a_killed_process_loses_nothing_with_always() {
    campaign(Durability::Always, false);
}

#[test]
fn a_killed_process_loses_the_last_writes_with_interval() {
    campaign(Durability::Interval(INTERVAL), false);
}

#[test]
fn a_killed_process_loses_the_last_writes_with_none() {
    campaign(Durability::None, false);
}

#[test]
fn a_killed_process_restores_no_replaced_value_with_always() {
    campaign(Durability::Always, true);
}

#[test]
fn a_killed_process_restores_no_replaced_value_with_interval() {
    campaign(Durability::Interval(INTERVAL), true);
}

#[test]
fn a_killed_process_restores_no_replaced_value_with_none() {
    campaign(Durability::None, true);
}
