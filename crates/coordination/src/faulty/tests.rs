//! Elections under faults, by seed.

use std::sync::Arc;

use bytes::Bytes;
use futures::future::join_all;

use super::*;
use crate::{Limits, ManualClock, MemoryCoordination, election};

const PREFIX: &str = "election/";
const TTL: Duration = Duration::from_secs(5);

/// Repeats an operation that may be repeated after every error, except for a lost lease.
async fn again<T>(mut operation: impl AsyncFnMut() -> Result<T>) -> Option<T> {
    loop {
        match operation().await {
            Ok(result) => return Some(result),
            Err(Error::LeaseNotFound(_)) => return None,
            Err(Error::Unavailable(_) | Error::Unknown(_) | Error::Compacted { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Enters the election until it has led `times`; each time it acts a few times while it leads.
async fn candidate(service: &Faulty<MemoryCoordination>, name: usize, times: usize) {
    let mut led = 0;
    while led < times {
        let lease = again(async || service.grant(TTL).await).await.unwrap().id;
        let value = Bytes::from(name.to_string());
        let enter = async || election::enter(service, PREFIX, lease, value.clone()).await;
        let Some(candidacy) = again(enter).await else { continue };
        let lead = async || election::lead(service, &candidacy).await;
        let Some(true) = again(lead).await else { continue };
        for _ in 0..3 {
            let value = candidacy.created.0.to_string();
            let changes = vec![Change::put("decision", value)];
            let guards = vec![candidacy.guard()];
            // Without its outcome: a late copy must not do harm either.
            let _ = service.commit(&Transaction { guards, changes }).await;
            let _ = service.keep_alive(lease).await;
        }
        led += 1;
        let _ = service.revoke(lease).await;
    }
}

#[tokio::test]
async fn a_leader_that_was_replaced_never_acts_whatever_fails() {
    let (mut decisions, mut leaders, mut late) = (0, std::collections::BTreeSet::new(), 0);
    for seed in 0..100 {
        let clock = ManualClock::default();
        let inner = MemoryCoordination::new(Limits::default(), Arc::new(clock.clone()));
        let service = Faulty::new(inner, Faults::ALL, seed);
        let candidates = join_all((0..3).map(|name| candidate(&service, name, 3)));
        // Leases whose answer was lost end by the clock, or they would lead for ever.
        let mut candidates = std::pin::pin!(candidates);
        let mut steps = 0;
        loop {
            let all = futures::future::poll_immediate(&mut candidates).await;
            if all.is_some() {
                break;
            }
            steps += 1;
            // Watches of tokio are pending when a task has run for long.
            yield_now().await;
            if steps % 50 == 0 {
                clock.advance(TTL);
                service.inner().expire().await.unwrap();
            }
        }
        service.settle().await.unwrap();
        let last = service.inner().list(&ListRequest::new("")).await.unwrap().revision;
        let mut watch = service.inner().watch("", Revision(0));
        let (mut at, mut highest) = (Revision(0), 0);
        while at < last {
            let changes = watch.next().await.unwrap().unwrap();
            at = changes.revision;
            for event in changes.events.iter().filter(|event| event.key == "decision") {
                let value = event.entry.as_ref().unwrap().value.clone();
                let created: u64 = std::str::from_utf8(&value).unwrap().parse().unwrap();
                assert!(created >= highest, "seed {seed}: an older leader acts at {at}");
                highest = created;
                leaders.insert((seed, created));
                decisions += 1;
            }
        }
        late += service.applied_late();
    }
    assert!(decisions > 500 && leaders.len() > 300 && late > 50);
}

#[tokio::test]
async fn the_same_seed_has_the_same_faults() {
    let run = async |seed| {
        let clock = Arc::new(ManualClock::default());
        let inner = MemoryCoordination::new(Limits::default(), clock);
        let service = Faulty::new(inner, Faults::ALL, seed);
        let mut answers = Vec::new();
        for n in 0..100 {
            let changes = vec![Change::put(format!("k{}", n % 7), n.to_string())];
            answers.push(service.commit(&Transaction { guards: Vec::new(), changes }).await);
        }
        answers
    };
    assert_eq!(run(7).await, run(7).await);
    assert_ne!(run(7).await, run(8).await);
}
