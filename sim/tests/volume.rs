//! The part of the volume campaign that belongs to the ordinary tests. A failure prints the command
//! that replays it.

use alluvium_sim::volume::{Mutation, Plan, Report, campaign, run};

/// Long enough for a partition, an install that is interrupted, and the recovery from both.
const STEPS: u64 = 12_000;

fn seeds(count: u64, mutation: Mutation) -> Report {
    let plan = |seed| Plan { seed, steps: STEPS, mutation, verbose: false };
    campaign(0, count, plan, |_| {})
}

#[test]
fn every_replica_stays_exact() {
    let count = 300;
    let Report { outcome, failures } = seeds(count, Mutation::Sound);
    if let Some(failure) = failures.first() {
        panic!("{} of {count} seeds failed; {failure}", failures.len());
    }
    println!("{outcome:#?}");
    // The cases of the campaign did happen, and often.
    assert!(outcome.acknowledged > 150 * count && outcome.discards > 20 * count, "{outcome:?}");
    assert!(outcome.reads > 200 * count && outcome.reads_of_unknown > 5 * count, "{outcome:?}");
    assert!(outcome.compared > 2000 * count, "{outcome:?}");
    assert!(outcome.power_cuts > 5 * count && outcome.kills > 3 * count, "{outcome:?}");
    assert!(outcome.elections > 10 * count && outcome.checkpoints > 80 * count, "{outcome:?}");
    assert!(outcome.installs > 6 * count && outcome.interrupted_installs > count, "{outcome:?}");
    assert!(outcome.carried_forward > 5 * count, "{outcome:?}");
    assert!(outcome.refused_appends > 2 * count, "{outcome:?}");
    assert!(outcome.commit_records > 50 * count, "{outcome:?}");
}

#[test]
fn a_seed_replays() {
    for seed in 0..6 {
        let plan = Plan { seed, steps: STEPS, mutation: Mutation::Sound, verbose: false };
        let [first, second] = [(); 2].map(|()| run(plan).map_err(|failure| failure.to_string()));
        assert_eq!(first, second, "seed {seed}");
    }
}

/// The complaint that a broken rule must lead to at least once within this number of seeds, or
/// `None` if no rule is broken.
fn complaint(mutation: Mutation) -> Option<(u64, &'static str)> {
    Some(match mutation {
        Mutation::Sound => return None,
        Mutation::NoLandingWait => (10, "CORRUPT"),
        Mutation::NoFlush => (10, "CORRUPT"),
        Mutation::FollowersSkipCheckpoint => (10, "NOT EXACT"),
        Mutation::NoCommitRule => (10, "CORRUPT"),
        Mutation::WordAtApply => (40, "CORRUPT"),
        Mutation::FullRingIgnored => (40, "NOT LIVE"),
        Mutation::TrimToCheckpoint => (10, "the log does not join its checkpoint"),
        Mutation::CheckpointCommitLow => (20, "CORRUPT"),
        Mutation::CarryForwardPart => (20, "a hole in the recovered log"),
        Mutation::InstallWithoutRecord => (20, "CORRUPT"),
        Mutation::BarrierDropped => (20, "NOT EXACT"),
        Mutation::InstallLeavesRest => (10, "NOT EXACT"),
        Mutation::PulledWordTrusted => (40, "CORRUPT"),
        Mutation::OldLogReleased => (120, "the log does not join its checkpoint"),
        Mutation::CommitOfInstall => (40, "SPLIT"),
        Mutation::InstallReportedEarly => (10, "the log has the base's term"),
        Mutation::PersistedMessagesEarly => (10, "to_commit"),
        Mutation::NoToken => (10, "STALE or LOST"),
        Mutation::TokenIgnoresReads => (40, "STALE or LOST"),
    })
}

#[test]
fn every_broken_rule_is_found() {
    for mutation in Mutation::ALL.iter().copied() {
        let Some((count, complaint)) = complaint(mutation) else { continue };
        let failures = seeds(count, mutation).failures;
        let found = failures.iter().find(|failure| failure.what.contains(complaint));
        match found {
            Some(failure) => println!("{mutation}: {} of {count} seeds; {failure}", failures.len()),
            None => panic!(
                "{mutation}: no `{complaint}` within {count} seeds, but {} other failures",
                failures.len()
            ),
        }
    }
}
