//! A store under a small log, against plain maps: power cuts and kills at any request, replicas
//! that are removed and created again, installs, and a store that is often full.

mod log;
mod server;
mod steps;

use proptest::prelude::*;

use self::server::{Check, Server};
use self::steps::{Step, case};
use crate::rules::Broken;

fn run(seed: u64, steps: &[Step], broken: Broken) -> Check {
    let mut server = Server::new(seed, broken);
    for step in steps {
        server.step(*step)?;
    }
    server.end()
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(200)
    })]

    #[test]
    fn a_replica_is_exact_after_every_crash((seed, steps) in case()) {
        prop_assert_eq!(run(seed, &steps, Broken::default()), Ok(()));
    }
}

/// The number of the first of `cases` cases that fails with a broken rule, and how.
#[cfg(feature = "simulation")]
fn first_failure(rule: crate::rules::Rule, cases: u32) -> Option<(u32, String)> {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use proptest::strategy::ValueTree as _;
    use proptest::test_runner::TestRunner;

    let mut runner = TestRunner::deterministic();
    (0..cases).find_map(|number| {
        let (seed, steps) = case().new_tree(&mut runner).unwrap().current();
        let run = || run(seed, &steps, Broken::rule(rule));
        let failure = match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(())) => return None,
            Ok(Err(failure)) => failure,
            Err(_) => "a panic".into(),
        };
        Some((number, failure))
    })
}

#[cfg(feature = "simulation")]
#[test]
fn each_broken_rule_is_found() {
    use crate::rules::Rule;

    let rules = [
        Rule::LandingWait,
        Rule::Flush,
        Rule::FlushResult,
        Rule::CommitRule,
        Rule::WordAtSubmission,
        Rule::FreedSlotWaits,
        Rule::FormerReplica,
        Rule::SlotAtApply,
        Rule::InstallRemoves,
        Rule::PulledWord,
    ];
    let found: Vec<_> = rules.map(|rule| (rule, first_failure(rule, 3000))).into();
    for (rule, failure) in &found {
        println!("{rule:?}: {failure:?}");
    }
    let missed: Vec<_> = found.iter().filter(|(_, case)| case.is_none()).collect();
    assert!(missed.is_empty(), "not found: {missed:?}");
}
