//! The campaigns that are part of the ordinary tests. A failure prints the command that replays it.

use alluvium_sim::{Failure, Mutation, Outcome, Plan, Profile, campaign};

fn seeds(count: u64, profile: Profile, mutation: Mutation) -> Result<Outcome, Failure> {
    campaign(0, count, |seed| Plan { seed, profile, mutation, verbose: false }, |_| {})
}

fn must_pass(count: u64, profile: Profile) -> Outcome {
    let outcome =
        seeds(count, profile, Mutation::Sound).unwrap_or_else(|failure| panic!("{failure}"));
    println!("{outcome:#?}");
    // The cases of the campaign did happen, and often.
    let Outcome { appended, recovered, recoveries, dropped, interrupted, .. } = outcome;
    assert!(appended > 300 * count && recovered > 150 * count, "{outcome:?}");
    assert!(recoveries > 4 * count && dropped > 3 * count && interrupted > count, "{outcome:?}");
    let Outcome { interrupted_again, power_cuts, process_crashes, closes, .. } = outcome;
    assert!(interrupted_again > count / 4 && process_crashes > count, "{outcome:?}");
    assert!(power_cuts > 4 * count && closes > count / 3, "{outcome:?}");
    let Outcome { trims, refused, laps, grown, shrunk, .. } = outcome;
    assert!(trims > 8 * count && refused > 20 * count && laps > count / 4, "{outcome:?}");
    assert!(outcome.marks > 4 * count, "{outcome:?}");
    assert!(grown > count / 4 && shrunk > count / 100, "{outcome:?}");
    let Outcome { resized, moved, resizes_refused, resizes_interrupted, .. } = outcome;
    assert!(resized > count / 3 && moved > count / 20, "{outcome:?}");
    assert!(resizes_refused > count / 40 && resizes_interrupted > count / 20, "{outcome:?}");
    let Outcome { resized_in_use, resizes_cut_short, .. } = outcome;
    assert!(resized_in_use > count && resizes_cut_short > count / 20, "{outcome:?}");
    let Outcome { resizes_interrupted_late, takeovers, fenced, refused_writes, .. } = outcome;
    assert!(resizes_interrupted_late > count / 40, "{outcome:?}");
    assert!(takeovers > count / 10 && fenced > count / 20, "{outcome:?}");
    assert!(refused_writes > count / 20 && outcome.noticed > count / 100, "{outcome:?}");
    outcome
}

#[test]
fn ten_thousand_power_cuts_lose_nothing() {
    let outcome = must_pass(4000, Profile::PowerCut);
    assert!(outcome.power_cuts > 10_000, "{outcome:?}");
    assert_eq!(outcome.fenced, outcome.takeovers);
    let Outcome { damaged, late_writes, rotten, io_errors, no_space, .. } = outcome;
    assert_eq!((damaged, late_writes), (0, 0), "a crash is not damage");
    assert_eq!((rotten, io_errors, no_space), (0, 0, 0));
}

#[test]
fn faults_are_reported_and_never_handed_out() {
    let outcome = must_pass(2000, Profile::Faults);
    let Outcome { damaged, rotten, io_errors, no_space, .. } = outcome;
    assert!(damaged > 500 && rotten > 2000 && io_errors > 500 && no_space > 50, "{outcome:?}");
    let Outcome { late_writes, late_headers, openings_refused, noticed, .. } = outcome;
    assert!(late_writes > 500 && late_headers > 100 && noticed > 100, "{outcome:?}");
    assert!(openings_refused > 50, "{outcome:?}");
}

/// Negative control of the campaign: a defect introduced on purpose is found.
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
fn header_changes_in_one_slot_only_are_found() {
    must_be_found(3000, Profile::Faults, Mutation::OneHeaderSlot, "");
}

#[test]
fn a_resize_that_does_not_flush_its_copies_is_found() {
    must_be_found(
        1000,
        Profile::PowerCut,
        Mutation::VolatileCopies,
        "a resize has changed the log",
    );
}

#[test]
fn a_window_that_grows_before_a_header_states_it_is_found() {
    must_be_found(1000, Profile::PowerCut, Mutation::UnsaidGrowth, "header states a window of");
}

#[test]
fn an_owner_that_does_not_check_before_a_header_write_is_found() {
    must_be_found(1000, Profile::Faults, Mutation::BlindOwner, "");
}

#[test]
fn an_opening_that_does_not_verify_its_headers_is_found() {
    must_be_found(3000, Profile::Faults, Mutation::BlindOpening, "");
}

#[test]
fn a_disk_that_does_not_refuse_the_old_owner_is_found() {
    must_be_found(1000, Profile::PowerCut, Mutation::OpenFence, "");
}
