//! The campaigns that run with the everyday tests. A failure prints the command that replays it.

use alluvium_sim::{Failure, Mutation, Outcome, Plan, Profile, campaign};

fn seeds(count: u64, profile: Profile, mutation: Mutation) -> Result<Outcome, Failure> {
    campaign(0, count, |seed| Plan { seed, profile, mutation, verbose: false }, |_| {})
}

fn must_pass(count: u64, profile: Profile) -> Outcome {
    seeds(count, profile, Mutation::Sound).unwrap_or_else(|failure| panic!("{failure}"))
}

#[test]
fn ten_thousand_power_cuts_lose_nothing() {
    let outcome = must_pass(10_000, Profile::PowerCut);
    println!("{outcome:#?}");
    // The cases that the campaign is about did happen, all of them often.
    let Outcome { appended, recovered, dropped, damaged, recoveries, interrupted, .. } = outcome;
    let Outcome { power_cuts, process_crashes, closes, trims, refused, laps, .. } = outcome;
    assert!(appended > 1_000_000 && recovered > 300_000 && recoveries > 30_000, "{outcome:?}");
    assert!(dropped > 10_000 && interrupted > 5_000, "{outcome:?}");
    assert!(power_cuts > 20_000 && process_crashes > 10_000 && closes > 2_000, "{outcome:?}");
    assert!(trims > 50_000 && refused > 20_000 && laps > 1_000, "{outcome:?}");
    assert_eq!(damaged, 0, "a crash is not damage");
}

#[test]
fn faults_are_reported_and_never_handed_out() {
    let outcome = must_pass(3_000, Profile::Faults);
    println!("{outcome:#?}");
    assert!(outcome.damaged > 500 && outcome.recovered > 100_000, "{outcome:?}");
}

/// The campaign has teeth: what is broken on purpose is found.
fn must_be_found(count: u64, profile: Profile, mutation: Mutation, complaint: &str) {
    match seeds(count, profile, mutation) {
        Ok(_) => panic!("{mutation:?} was not found within {count} seeds"),
        Err(failure) => {
            println!("{mutation:?}: {failure}");
            assert!(failure.what.contains(complaint), "{failure}");
        }
    }
}

#[test]
fn a_trusted_volatile_cache_is_found() {
    must_be_found(300, Profile::PowerCut, Mutation::TrustedCache, "");
}

#[test]
fn blocks_that_complete_before_they_are_written_are_found() {
    must_be_found(300, Profile::PowerCut, Mutation::EarlyCompletion, "");
}

#[test]
fn a_missing_flush_at_open_is_found() {
    must_be_found(2000, Profile::PowerCut, Mutation::NoFlushAtOpen, "");
}

#[test]
fn headers_without_a_flush_are_found() {
    must_be_found(2000, Profile::PowerCut, Mutation::VolatileHeaders, "");
}

#[test]
fn headers_in_one_slot_only_are_found() {
    must_be_found(3000, Profile::Faults, Mutation::OneHeaderSlot, "");
}
