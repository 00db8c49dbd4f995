//! The part of the volume campaign that belongs to the ordinary tests. A failure prints the command
//! that replays it.

use alluvium_sim::volume::{Mutation, Plan, Report, Schedule, campaign, run};

/// Long enough for a partition, an install that is interrupted, and the recovery from both.
const STEPS: u64 = 12_000;

/// Seeds within which a broken rule is found. Most are found within a few.
const SEEDS: u64 = 600;

#[test]
fn every_replica_stays_exact() {
    let count = 300;
    let plan = |seed| Plan {
        seed,
        steps: STEPS,
        schedule: None,
        mutation: Mutation::Sound,
        verbose: false,
    };
    let Report { outcome, failures } = campaign(0, count, plan, |_| {});
    if let Some(failure) = failures.first() {
        panic!("{} of {count} seeds failed; {failure}", failures.len());
    }
    println!("{outcome:#?}");
    // The cases of the campaign did happen, and often.
    assert!(outcome.acknowledged > 120 * count && outcome.discards > 20 * count, "{outcome:?}");
    assert!(outcome.duplicates > 10 * count && outcome.given_up > 15 * count, "{outcome:?}");
    assert!(outcome.no_space > count / 4 && outcome.fenced > 8 * count, "{outcome:?}");
    assert!(outcome.reads > 120 * count && outcome.compared > 2000 * count, "{outcome:?}");
    assert!(outcome.power_cuts > 5 * count && outcome.kills > 3 * count, "{outcome:?}");
    assert!(outcome.failed_devices > count / 2 && outcome.stopped > 3 * count, "{outcome:?}");
    assert!(outcome.rotten_records > count / 40, "{outcome:?}");
    assert!(outcome.rotten_sectors > count / 100, "{outcome:?}");
    assert!(outcome.replaced_disks > count / 100, "{outcome:?}");
    assert!(outcome.elections > 10 * count && outcome.checkpoints > 30 * count, "{outcome:?}");
    assert!(outcome.installs > 4 * count && outcome.interrupted_installs > count, "{outcome:?}");
    assert!(outcome.installs_of_changes > count, "{outcome:?}");
    assert!(outcome.carried_forward > count, "{outcome:?}");
    assert!(outcome.refused_appends > 2 * count, "{outcome:?}");
    assert!(outcome.commit_records > 80 * count, "{outcome:?}");
}

#[test]
fn a_seed_replays() {
    for seed in 0..6 {
        let plan =
            Plan { seed, steps: STEPS, schedule: None, mutation: Mutation::Sound, verbose: false };
        let [first, second] = [(); 2].map(|()| run(plan).map_err(|failure| failure.to_string()));
        assert_eq!(first, second, "seed {seed}");
    }
}

/// Where a broken rule is looked for, and the complaints of which it must lead to one; `None` if no
/// rule is broken, or if it takes too many seeds.
fn complaints(mutation: Mutation) -> Option<(Schedule, &'static [&'static str])> {
    /// What a replica serves, or has in its store, is wrong.
    const WRONG: &[&str] = &["CORRUPT", "NOT EXACT", "STALE or LOST"];
    const STALE: &[&str] = &["STALE or LOST"];
    const ORDER: &[&str] = &["ORDER"];
    const SPLIT: &[&str] = &["SPLIT"];
    /// The log cannot be what the replica has promised.
    const LOST: &[&str] = &["Lost", "Stopped"];
    Some(match mutation {
        // It takes about 1,000 seeds: `cargo xtask volume-sim --break pair-while-inexact`.
        Mutation::Sound | Mutation::PairWhileInexact => return None,
        Mutation::NoLandingWait
        | Mutation::NoFlush
        | Mutation::FlushResultIgnored
        | Mutation::FollowersSkipCheckpoint => (Schedule::Mixed, WRONG),
        Mutation::NoCommitRule | Mutation::WordAtApply | Mutation::CheckpointCommitLow => {
            (Schedule::BetweenDisks, WRONG)
        }
        Mutation::CommitInEachRecord => (Schedule::BetweenDisks, LOST),
        Mutation::SlotAtWriteBack => {
            (Schedule::FullStore, &["NOT LIVE", "NOT EXACT", "STALE or LOST"])
        }
        Mutation::FullRingIgnored => (Schedule::SlowStore, &["NOT LIVE"]),
        Mutation::TrimToCheckpoint => (Schedule::Mixed, LOST),
        Mutation::CarryForwardPart => (Schedule::SlowStore, LOST),
        Mutation::DamageReadOver => (Schedule::Damage, &["SPLIT", "CORRUPT"]),
        Mutation::CreatedAgain | Mutation::DamagedSectorFree => (Schedule::Damage, WRONG),
        Mutation::InstallWithoutRecord
        | Mutation::BarrierDropped
        | Mutation::InstallLeavesRest
        | Mutation::PulledWordTrusted
        | Mutation::OverlayNotSent
        | Mutation::NewestPair
        | Mutation::InstallOldVolumes => (Schedule::InterruptedInstalls, WRONG),
        Mutation::OtherSnapshot => (Schedule::InterruptedInstalls, &["only a pulled snapshot"]),
        Mutation::OldLogReleased | Mutation::InstallReportedEarly => {
            (Schedule::InterruptedInstalls, LOST)
        }
        Mutation::CommitOfInstall => (Schedule::InterruptedInstalls, SPLIT),
        Mutation::PersistedMessagesEarly => (Schedule::Mixed, SPLIT),
        Mutation::MessagesOvertakeReady => (Schedule::Mixed, LOST),
        Mutation::EpochAtProposal => (Schedule::Attachments, &["LOST", "NOT EXACT"]),
        Mutation::NoWindow | Mutation::EqualAttachEmpties => (Schedule::Attachments, WRONG),
        Mutation::NoRangeLock => (Schedule::Mixed, ORDER),
        Mutation::FailedOpReleased => (Schedule::Attachments, ORDER),
        Mutation::NoToken | Mutation::TokenIgnoresReads => (Schedule::Mixed, STALE),
    })
}

/// Checks that each broken rule that is looked for in one of the schedules is found.
fn must_be_found(schedules: &[Schedule]) {
    for mutation in Mutation::all() {
        let Some((schedule, complaints)) = complaints(mutation) else { continue };
        if !schedules.contains(&schedule) {
            continue;
        }
        let plan =
            |seed| Plan { seed, steps: STEPS, schedule: Some(schedule), mutation, verbose: false };
        let failures = (0..SEEDS).filter_map(|seed| run(plan(seed)).err());
        let mut others = 0;
        let found = failures
            .inspect(|_| others += 1)
            .find(|failure| complaints.iter().any(|complaint| failure.what.contains(complaint)));
        match found {
            Some(failure) => println!("{mutation}: seed {}", failure.seed),
            None => panic!("{mutation}: no {complaints:?}, but {others} other failures"),
        }
    }
}

#[test]
fn broken_rules_of_ops_and_checkpoints_are_found() {
    must_be_found(&[Schedule::Mixed, Schedule::Attachments, Schedule::SlowStore]);
}

#[test]
fn broken_rules_of_installs_are_found() {
    must_be_found(&[Schedule::InterruptedInstalls]);
}

#[test]
fn broken_rules_between_log_and_store_are_found() {
    must_be_found(&[Schedule::BetweenDisks, Schedule::FullStore]);
}

#[test]
fn broken_rules_of_damaged_disks_are_found() {
    must_be_found(&[Schedule::Damage]);
}
