use kafka_protocol::records::Compression;

use super::*;
use crate::batch::tests::{encode, transactional};

/// What is in the log of producer 7, or is lost.
#[derive(Clone, Copy)]
enum In {
    /// One record in this epoch.
    Record(i16),
    Marker(i16, Outcome),
    Lost(u64),
}

use In::{Lost as Gap, Marker, Record};
use Outcome::{Abort, Commit};

fn replay(log: &[In]) -> Replay {
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
    Replay { checkpoint: None, checkpoint_end: StreamOffset(0), batches, end: StreamOffset(next) }
}

/// The markers that are put into the log: offset, epoch, outcome, whether it is known.
fn mended(log: &[In], known: impl Fn(i16, u64) -> Known) -> Vec<(u64, i16, Outcome, bool)> {
    let replay = replay(log);
    let lost = lost_markers(&replay, |id, epoch, first| {
        assert_eq!(id, 7);
        known(epoch, first)
    });
    let (placed, unplaced) = place(lost, &replay.gaps());
    assert_eq!(unplaced, []);
    placed.into_iter().map(|(at, lost)| (at, lost.epoch, lost.outcome, lost.is_known)).collect()
}

/// The transaction in 0..`end` is decided, nothing else.
fn decided(outcome: Outcome, epoch: i16, end: u64) -> impl Fn(i16, u64) -> Known {
    move |_, first| match first < end {
        true => Known::Decided { outcome, epoch, end: Some(end) },
        false => Known::Undecided,
    }
}

#[test]
fn a_marker_goes_where_it_was_lost_if_something_follows_that_would_be_taken_for_its_transaction() {
    for outcome in [Commit, Abort] {
        let other = if outcome == Commit { Abort } else { Commit };
        let known = decided(outcome, 1, 1);
        // A record of the next transaction, in the same epoch or another one.
        for epoch in [0, 1] {
            let log = [Record(0), Gap(3), Record(epoch), Marker(1, other)];
            assert_eq!(mended(&log, &known), [(1, 1, outcome, true)]);
        }
        // The next transaction has lost its records, not its marker.
        assert_eq!(mended(&[Record(0), Gap(3), Marker(1, other)], &known), [(1, 1, outcome, true)]);
        // Its own marker, or one that does the same.
        assert_eq!(mended(&[Record(0), Gap(3), Marker(1, outcome)], &known), []);
        // Nothing follows: it is appended at the end, or is about to be.
        assert_eq!(mended(&[Record(0), Gap(3)], &known), []);
        // Nothing is lost before its marker.
        assert_eq!(mended(&[Record(0), Marker(1, outcome), Gap(3), Record(1)], &known), []);
        // It goes on behind the loss of some of its records.
        let known = decided(outcome, 1, 6);
        let log = [Record(0), Gap(3), Record(0), Record(0), Marker(1, outcome), Record(1)];
        assert_eq!(mended(&log, &known), []);
        // And loses its marker in another gap.
        let log = [Record(0), Gap(3), Record(0), Record(0), Gap(2), Record(1)];
        assert_eq!(mended(&log, &known), [(6, 1, outcome, true)]);
    }
}

#[test]
fn what_is_not_known_to_be_decided_is_aborted_if_it_may_have_ended() {
    let unknown = |_, _| Known::Unknown;
    for epoch in [0, 1] {
        let log = [Record(0), Gap(3), Record(epoch), Marker(1, Commit)];
        assert_eq!(mended(&log, unknown), [(1, 0, Abort, false)]);
    }
    assert_eq!(mended(&[Record(0), Gap(3), Marker(0, Commit)], unknown), [(1, 0, Abort, false)]);
    assert_eq!(mended(&[Record(0), Gap(3), Marker(0, Abort)], unknown), []);
    assert_eq!(mended(&[Record(0), Gap(3), Marker(1, Commit)], unknown), [(1, 0, Abort, false)]);
    // Nothing was decided: all that follows is part of it, and the coordinator ends it.
    let undecided = |_, _| Known::Undecided;
    assert_eq!(mended(&[Record(0), Gap(3), Record(0), Gap(1), Record(0)], undecided), []);
}

#[test]
fn a_commit_that_raises_the_epoch_says_how_the_transaction_of_that_epoch_has_ended() {
    let of = |log: &[In]| commits(&replay(log), &[7].into());
    assert_eq!(of(&[Record(3), Marker(4, Commit)]), [(7, 3)]);
    assert_eq!(of(&[Record(3), Marker(4, Abort)]), [], "it may have been fenced");
    // Version 1, after an InitProducerId.
    assert_eq!(of(&[Record(4), Marker(4, Commit)]), []);
    assert_eq!(of(&[Record(3), Gap(2), Marker(4, Commit)]), [], "what it ends may be lost");
    assert_eq!(commits(&replay(&[Record(3), Marker(4, Commit)]), &[8].into()), []);
    // Its records are uploaded already.
    let mut states = ProducerStates::default();
    let log = replay(&[Record(3), Marker(4, Commit)]);
    let (uploaded, rest) = log.batches.split_at(1);
    let end = uploaded[0].end();
    states.replay(log.checkpoint_end, uploaded, end, 1);
    let log = Replay {
        checkpoint: states.encode().map(Into::into),
        checkpoint_end: end,
        batches: rest.to_vec(),
        end: log.end,
    };
    assert_eq!(commits(&log, &[7].into()), [(7, 3)]);
    // Recovery has written it where something is lost.
    let mut log = replay(&[Record(3), Marker(4, Commit)]);
    let mut mended = log.batches[1].payload.to_vec();
    batch::set_mended(&mut mended, Mended::Decided);
    log.batches[1].payload = mended.into();
    assert_eq!(commits(&log, &[7].into()), []);
}

#[test]
fn every_lost_marker_finds_room_where_it_may_have_been() {
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
    // The one that may have been in either gap gives way.
    let (placed, unplaced) = place(vec![lost(1, 0..2), lost(2, 0..1)], &gaps);
    assert_eq!(placed, [(10, lost(2, 0..1)), (20, lost(1, 0..2))]);
    assert_eq!(unplaced, []);
    let (placed, unplaced) = place(vec![lost(1, 0..1), lost(2, 0..1)], &gaps);
    assert_eq!((placed.len(), unplaced.len()), (1, 1));
}
