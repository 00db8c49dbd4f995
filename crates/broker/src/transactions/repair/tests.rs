use kafka_protocol::records::Compression;

use super::super::decisions::Decision;
use super::super::transaction::Span;
use super::*;
use crate::batch::tests::{encode, transactional};

/// An entry of the log of producer 7, or a loss.
#[derive(Clone, Copy)]
enum In {
    /// One record in this epoch.
    Record(i16),
    Marker(i16, Outcome),
    Lost(u64),
}

use In::{Lost as Gap, Marker, Record};
use Outcome::{Abort, Commit};

const KEY: PartitionKey = (uuid::Uuid::from_u128(1), 0);

/// Each record is as long as its number of offsets.
fn history(log: &[In]) -> History {
    let mut batches = Vec::new();
    let mut next = 0;
    for step in log {
        let payload = match step {
            Gap(count) => {
                next += count;
                continue;
            }
            Record(epoch) => transactional(&encode(Compression::None, (7, *epoch, 0), &[1])),
            Marker(epoch, outcome) => batch::marker(7, *epoch, *outcome, 1).into(),
        };
        batches.push(Batch { base: StreamOffset(next), count: 1, max_timestamp_ms: 1, payload });
        next += 1;
    }
    let log_ends = batches.iter().map(|batch: &Batch| LogOffset(batch.end().0)).collect();
    let (checkpoint, checkpoint_end, end) = (None, StreamOffset(0), StreamOffset(next));
    History {
        replay: alluvium_stream::Replay { checkpoint, checkpoint_end, batches, end },
        log_ends,
    }
}

/// The markers that are put into the log: offset, epoch, outcome, whether it is known. The end of
/// the transaction in 0..`end` is known.
fn repaired(log: &[In], decided: Option<(Outcome, i16, u64)>) -> Vec<(u64, i16, Outcome, bool)> {
    repaired_with(log, decided, Known::Undecided)
}

fn repaired_with(
    log: &[In],
    decided: Option<(Outcome, i16, u64)>,
    others: Known<'_>,
) -> Vec<(u64, i16, Outcome, bool)> {
    let history = history(log);
    let decision = decided.map(|(outcome, epoch, end)| {
        Decision::of_spans(outcome, epoch, &[Span { partition: KEY, records: 0..end }])
    });
    let lost = lost_markers(KEY, &history, |id, first| {
        assert_eq!(id, 7);
        let decision = decision.as_ref().filter(|decision| decision.holds(KEY, first));
        decision.map_or(others, Known::Decided)
    });
    let (assigned, unassigned) = assign_offsets(lost, &history.replay.gaps());
    assert_eq!(unassigned, []);
    assigned.into_iter().map(|(at, lost)| (at, lost.epoch, lost.outcome, lost.is_known)).collect()
}

#[test]
fn a_lost_marker_is_put_back_if_a_later_batch_would_be_attributed_to_its_transaction() {
    for outcome in [Commit, Abort] {
        let other = if outcome == Commit { Abort } else { Commit };
        let known = Some((outcome, 1, 1));
        // A record of the next transaction, in the same epoch or another one.
        for epoch in [0, 1] {
            let log = [Record(0), Gap(3), Record(epoch), Marker(1, other)];
            assert_eq!(repaired(&log, known), [(1, 1, outcome, true)]);
        }
        // The next transaction has lost its records, not its marker.
        assert_eq!(
            repaired(&[Record(0), Gap(3), Marker(1, other)], known),
            [(1, 1, outcome, true)]
        );
        // Its own marker, or one with the same effect.
        assert_eq!(repaired(&[Record(0), Gap(3), Marker(1, outcome)], known), []);
        // Nothing follows: it is appended at the end, or is about to be.
        assert_eq!(repaired(&[Record(0), Gap(3)], known), []);
        // Nothing is lost before its marker.
        assert_eq!(repaired(&[Record(0), Marker(1, outcome), Gap(3), Record(1)], known), []);
        // It continues after the loss of some of its records.
        let known = Some((outcome, 1, 6));
        let log = [Record(0), Gap(3), Record(0), Record(0), Marker(1, outcome), Record(1)];
        assert_eq!(repaired(&log, known), []);
        // And loses its marker in another gap.
        let log = [Record(0), Gap(3), Record(0), Record(0), Gap(2), Record(1)];
        assert_eq!(repaired(&log, known), [(6, 1, outcome, true)]);
    }
}

#[test]
fn a_transaction_without_known_decision_is_aborted_if_it_may_have_ended() {
    let unknown = Known::Unknown;
    let repaired = |log: &[In], known| repaired_with(log, None, known);
    for epoch in [0, 1] {
        let log = [Record(0), Gap(3), Record(epoch), Marker(1, Commit)];
        assert_eq!(repaired(&log, unknown), [(1, 0, Abort, false)]);
    }
    assert_eq!(repaired(&[Record(0), Gap(3), Marker(0, Commit)], unknown), [(1, 0, Abort, false)]);
    assert_eq!(repaired(&[Record(0), Gap(3), Marker(0, Abort)], unknown), []);
    assert_eq!(repaired(&[Record(0), Gap(3), Marker(1, Commit)], unknown), [(1, 0, Abort, false)]);
    // Nothing follows: the start decides.
    assert_eq!(repaired(&[Record(0), Gap(3)], unknown), []);
    // It was not decided: all that follows belongs to it, and the coordinator ends it.
    let undecided = Known::Undecided;
    assert_eq!(repaired(&[Record(0), Gap(3), Record(0), Gap(1), Record(0)], undecided), []);
}

#[test]
fn a_marker_in_place_of_a_lost_one_has_no_leader_epoch() {
    let lost = Lost {
        producer_id: 7,
        epoch: 0,
        outcome: Abort,
        is_known: true,
        first: 1,
        time_ms: 0,
        gaps: 0..1,
    };
    let marker =
        marker((lost.producer_id, lost.epoch), (lost.outcome, Repaired::Unknown), lost.time_ms, 10);
    assert_eq!((marker.base.0, batch::leader_epoch(&marker.payload)), (10, -1));
}

#[test]
fn every_lost_marker_gets_an_offset_in_a_possible_gap() {
    let lost = |first, gaps| Lost {
        producer_id: 7,
        epoch: 0,
        outcome: Abort,
        is_known: true,
        first,
        time_ms: 0,
        gaps,
    };
    let gaps = [10, 20].map(|start| StreamOffset(start)..StreamOffset(start + 1));
    // The one that may have been in either gap takes the other one.
    let (assigned, unassigned) = assign_offsets(vec![lost(1, 0..2), lost(2, 0..1)], &gaps);
    assert_eq!(assigned, [(10, lost(2, 0..1)), (20, lost(1, 0..2))]);
    assert_eq!(unassigned, []);
    let (assigned, unassigned) = assign_offsets(vec![lost(1, 0..1), lost(2, 0..1)], &gaps);
    assert_eq!((assigned.len(), unassigned.len()), (1, 1));
}
