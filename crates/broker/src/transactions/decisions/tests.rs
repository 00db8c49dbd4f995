use alluvium_stream::{Batch, Replay, StreamOffset};
use bytes::Bytes;
use kafka_protocol::records::Compression;

use super::*;
use crate::batch::Repaired;
use crate::batch::tests::{encode, transactional};
use crate::transactions::transaction::Identity;

const A: PartitionKey = (Uuid::from_u128(1), 0);
const B: PartitionKey = (Uuid::from_u128(1), 1);

/// A position in the log, and its content: of producer 7, whose transactional id is "id".
type In = (u64, What);

#[derive(Clone)]
enum What {
    Event(Event),
    Record,
    Marker(i16, Outcome),
    /// Written by recovery.
    Repaired(Outcome),
    Lost,
}

use Outcome::{Abort, Commit};
use What::{Lost, Marker, Record as Rec};

fn history(log: &[In]) -> History {
    let payload = |what: &What| -> Option<Bytes> {
        Some(match what {
            What::Event(event) => {
                let (id, event) = ("id".to_owned(), event.clone());
                Record { id, at_ms: 0, event }.encode().into()
            }
            Rec => transactional(&encode(Compression::None, (7, 0, 0), &[1])),
            Marker(epoch, outcome) => batch::marker(7, *epoch, *outcome, 1).into(),
            What::Repaired(outcome) => {
                let mut marker = batch::marker(7, 0, *outcome, 1);
                batch::set_repaired(&mut marker, Repaired::Unknown);
                marker.into()
            }
            Lost => return None,
        })
    };
    let batches = (0..).zip(log).filter_map(|(base, (_, what))| {
        let (base, payload) = (StreamOffset(base), payload(what)?);
        Some(Batch { base, count: 1, max_timestamp_ms: 1, payload })
    });
    let intact = log.iter().filter(|(_, what)| !matches!(what, Lost));
    let log_ends = intact.map(|(at, _)| LogOffset(*at)).collect();
    let (checkpoint, checkpoint_end) = (None, StreamOffset(0));
    let end = StreamOffset(log.len() as u64);
    let batches = batches.collect();
    History { replay: Replay { checkpoint, checkpoint_end, batches, end }, log_ends }
}

fn begun() -> In {
    let identity = Identity { producer_id: 7, epoch: 0, ..Identity::default() };
    (1, What::Event(Event::Initialised { identity, timeout_ms: 1 }))
}

fn added(at: u64, keys: &[PartitionKey]) -> In {
    (at, What::Event(Event::Added { partitions: keys.to_vec(), groups: Vec::new() }))
}

fn prepared(at: u64, outcome: Outcome) -> In {
    let identity = Identity { producer_id: 7, epoch: 0, ..Identity::default() };
    let (marker, spans, resolves_doubt) = ((7, 0), Some(Vec::new()), false);
    (at, What::Event(Event::Prepared { outcome, marker, identity, spans, resolves_doubt }))
}

/// What is known about the record of partition A at a position of the log, from the records of the
/// state stream and the marker of partition B; and whether the last transaction is committed.
fn known(state: &[In], b: &[In], at: u64) -> (Option<Outcome>, bool) {
    let state = [&[begun()], state].concat();
    let mut decisions = Decisions::read(&history(&state), &[7].into()).unwrap();
    assert!(decisions.is_partial());
    decisions.prove(B, &history(b));
    let outcome = match decisions.of(7, A, At { offset: 0, log: LogOffset(at) }) {
        Known::Decided(decision) => Some(decision.outcome),
        Known::Unknown => None,
        Known::Undecided => panic!("the decision may be lost"),
    };
    (outcome, decisions.is_committed(7))
}

#[test]
fn a_commit_marker_after_the_addition_of_its_partition_proves_the_commit() {
    let state = [added(10, &[A, B]), (0, Lost)];
    let commit = (30, Marker(0, Commit));
    for epoch in [0, 1] {
        let marker = (30, Marker(epoch, Commit));
        assert_eq!(known(&state, &[(20, Rec), marker.clone()], 15), (Some(Commit), true));
        // Also where the producer has added a partition and not written to it.
        assert_eq!(known(&state, &[marker], 15), (Some(Commit), true));
    }
    // Partitions that are added one after the other.
    let state_2 = [added(10, &[A]), added(25, &[B]), (0, Lost)];
    assert_eq!(known(&state_2, std::slice::from_ref(&commit), 15), (Some(Commit), true));
    // Records before this transaction, or after its marker, belong to others.
    for at in [5, 35] {
        assert_eq!(known(&state, std::slice::from_ref(&commit), at).0, None);
    }
    // Without a proof it is aborted anyway.
    assert_eq!(known(&state, &[(30, Marker(0, Abort))], 15), (None, false));
    // An earlier marker belongs to an earlier transaction, a later one to a later transaction.
    assert_eq!(known(&state, &[(5, Marker(0, Commit))], 3), (None, false));
    let first = (30, Marker(0, Abort));
    assert_eq!(known(&state, &[first, (40, Marker(0, Commit))], 15), (None, false));
    // Its own may be lost.
    assert_eq!(known(&state, &[(20, Rec), (0, Lost), commit.clone()], 15), (None, false));
    assert_eq!(
        known(&state, &[(20, Rec), (0, Lost), (25, Rec), commit.clone()], 15),
        (None, false)
    );
    let repaired = (20, What::Repaired(Abort));
    assert_eq!(known(&state, &[(20, Rec), repaired, (25, Rec), commit.clone()], 15), (None, false));
    // Losses before it was added do not matter.
    assert_eq!(known(&state, &[(3, Rec), (0, Lost), (6, Rec), commit.clone()], 15).0, Some(Commit));
    // A partition that may belong to a later transaction only.
    assert_eq!(
        known(&[added(10, &[A]), (0, Lost)], std::slice::from_ref(&commit), 15),
        (None, false)
    );
    let later = [added(10, &[A]), (0, Lost), added(25, &[B])];
    assert_eq!(known(&later, std::slice::from_ref(&commit), 15), (None, false));
    // Nothing is lost between that addition and the marker, so it is decided, or open.
    let known_since = [(0, Lost), added(10, &[A, B])];
    assert_eq!(known(&known_since, &[commit], 15), (None, false));
}

#[test]
fn a_marker_after_the_next_known_decision_proves_nothing_about_earlier_transactions() {
    let commit = [(30, Marker(0, Commit))];
    let state = |at| [added(10, &[A, B]), (0, Lost), prepared(at, Abort)];
    assert_eq!(known(&state(20), &commit, 15), (None, false));
    // One before it is that of an earlier transaction, not the one that ends then.
    assert_eq!(known(&state(40), &commit, 15), (Some(Commit), false));
}
