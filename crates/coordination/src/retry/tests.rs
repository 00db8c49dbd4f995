//! Retried transactions under faults, by seed.

use std::sync::Arc;

use futures::future::join_all;

use super::*;
use crate::faulty::{Faults, Faulty};
use crate::{Limits, ManualClock, MemoryCoordination};

fn faulty(faults: Faults, seed: u64) -> Faulty<MemoryCoordination> {
    let inner = MemoryCoordination::new(Limits::default(), Arc::new(ManualClock::default()));
    Faulty::new(inner, faults, seed)
}

fn increment(entry: Option<&crate::Entry>, mark: &str) -> Transaction {
    let count: u64 = entry.map_or(0, |entry| {
        let text = std::str::from_utf8(&entry.value).unwrap();
        text.split_once(' ').unwrap().0.parse().unwrap()
    });
    let guards = vec![Guard::unchanged("n", entry.map(|entry| entry.modified))];
    let changes = vec![Change::put("n", format!("{} {mark}", count + 1))];
    Transaction { guards, changes }
}

/// Increments of several writers. Returns the counter, how many were reported as applied, and how
/// many ended without an outcome.
async fn count(service: &Faulty<MemoryCoordination>, is_searched: bool) -> (u64, u64, u64) {
    const WRITERS: u64 = 4;
    const ATTEMPTS: u64 = 25;
    let first = increment(None, "first");
    service.inner().commit(&first).await.unwrap().unwrap();
    let write = async |writer: u64| {
        let (mut applied, mut unknown) = (0, 0);
        for attempt in 0..ATTEMPTS {
            let Ok(entry) = service.get("n").await else { continue };
            let transaction = increment(entry.as_ref(), &format!("{writer}-{attempt}"));
            let answer = match is_searched {
                true => commit(service, &transaction).await,
                // What a caller would do that takes a conflict as the outcome.
                false => loop {
                    match service.commit(&transaction).await {
                        Err(Error::Unknown(_) | Error::Unavailable(_)) => {}
                        answer => break answer,
                    }
                },
            };
            match answer {
                Ok(answer) => applied += u64::from(answer.is_ok()),
                Err(Error::Unknown(_)) => unknown += 1,
                Err(Error::Unavailable(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }
        (applied, unknown)
    };
    let counts = join_all((0..WRITERS).map(write)).await;
    service.settle().await.unwrap();
    let entry = service.inner().get("n").await.unwrap().unwrap();
    let counter = std::str::from_utf8(&entry.value).unwrap().split_once(' ').unwrap().0;
    let applied = counts.iter().map(|count| count.0).sum::<u64>() + 1;
    (counter.parse().unwrap(), applied, counts.iter().map(|count| count.1).sum())
}

#[tokio::test]
async fn a_retried_transaction_is_applied_once_and_its_outcome_is_right() {
    let (mut late, mut ambiguous, mut given_up) = (0, 0, 0);
    for seed in 0..300 {
        let service = faulty(Faults::ALL, seed);
        let (counter, applied, unknown) = count(&service, true).await;
        assert!((applied..=applied + unknown).contains(&counter), "seed {seed}");
        late += service.applied_late();
        ambiguous += unknown;
        // With the whole history every outcome is found, unless every attempt meets a fault.
        let service = faulty(Faults { cut_off: 0, ..Faults::ALL }, seed);
        let (counter, applied, unknown) = count(&service, true).await;
        assert!((applied..=applied + unknown).contains(&counter), "seed {seed}");
        given_up += unknown;
    }
    assert!(given_up < 5, "{given_up} of 30,000 have no outcome");
    assert!(late > 100 && ambiguous > 0, "{late} were late, {ambiguous} without an outcome");
}

#[tokio::test]
async fn without_the_search_of_the_history_outcomes_are_wrong() {
    let mut wrong = 0;
    for seed in 0..20 {
        let service = faulty(Faults { cut_off: 0, ..Faults::ALL }, seed);
        let (counter, applied, _) = count(&service, false).await;
        wrong += u64::from(counter != applied);
    }
    assert!(wrong > 0);
}

#[tokio::test]
async fn a_transaction_without_a_guarded_put_is_refused() {
    let service = faulty(Faults::ALL, 1);
    let put = Change::put("a", "1");
    let unguarded = Transaction { guards: Vec::new(), changes: vec![put.clone()] };
    let elsewhere = Transaction { guards: vec![Guard::Absent("b".into())], changes: vec![put] };
    for transaction in [unguarded, elsewhere] {
        let answer = commit(&service, &transaction).await;
        assert!(matches!(answer, Err(Error::Invalid(_))), "{answer:?}");
    }
}
