//! Markers that the log has lost, with batches behind the loss that hang on them: they are put where they were lost. Argument: `docs/transactions.md`, "Damage".

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

use alluvium_stream::{Batch, Damaged, Replay, StreamId, StreamOffset};

use super::STREAM_KEY;
use super::decisions::{Decisions, Known, commits};
use crate::batch::{self, BatchHeader, Mended, Outcome};
use crate::partition::LEADER_EPOCH;
use crate::producer_state::ProducerStates;
use crate::{state_stream, topics};

/// A marker that is lost.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Lost {
    producer_id: i64,
    epoch: i16,
    outcome: Outcome,
    is_known: bool,
    /// Of the transaction.
    first: u64,
    time_ms: i64,
    /// The gaps that it may have been in.
    gaps: Range<usize>,
}

/// An open transaction on the way through the log.
struct Open {
    first: u64,
    epoch: i16,
    time_ms: i64,
    /// How many gaps lie before the last batch that is certainly part of it.
    gaps_before: usize,
}

/// The markers to put in the gaps of partitions.
pub(crate) fn mend(damaged: &Damaged<'_>) -> Vec<(StreamId, Batch)> {
    let streams: HashMap<StreamId, _> = topics::streams(damaged.meta()).collect();
    let lossy: HashSet<StreamId> = damaged.gaps().iter().map(|gap| gap.stream).collect();
    let replays = |stream: &StreamId| damaged.replay(*stream);
    let mut partitions: Vec<_> = lossy
        .into_iter()
        .filter_map(|stream| Some((stream, streams.get(&stream)?, replays(&stream)?)))
        .collect();
    partitions.sort_unstable_by_key(|(stream, ..)| *stream);
    let wanted = RefCell::new(HashSet::new());
    let note = |producer_id, _, _| {
        wanted.borrow_mut().insert(producer_id);
        Known::Undecided
    };
    for (_, _, replay) in &partitions {
        drop(lost_markers(replay, note));
    }
    let wanted = wanted.into_inner();
    if wanted.is_empty() {
        return Vec::new();
    }
    let coordinator = state_stream::id_in(damaged.meta(), STREAM_KEY);
    let read =
        coordinator.as_ref().and_then(replays).map(|replay| Decisions::read(&replay, &wanted));
    // The server does not start with a state stream that cannot be read.
    let Some(Ok(mut decisions)) = read else { return Vec::new() };
    for replay in streams.keys().filter_map(replays) {
        decisions.commits.extend(commits(&replay, &wanted));
    }
    let mut mended = Vec::new();
    for (stream, (topic, topic_id, index), replay) in partitions {
        let of = |id, epoch, first| decisions.of(id, epoch, (*topic_id, *index), first);
        let (placed, unplaced) = place(lost_markers(&replay, of), &replay.gaps());
        for (offset, lost) in placed {
            tell(topic, *index, &decisions, &lost, Some(offset));
            mended.push((stream, marker(&lost, offset)));
        }
        for lost in unplaced {
            tell(topic, *index, &decisions, &lost, None);
        }
    }
    mended
}

fn tell(topic: &str, partition: i32, decisions: &Decisions, lost: &Lost, offset: Option<u64>) {
    let Lost { producer_id, epoch, outcome, is_known, first, .. } = lost;
    let transactional_id = decisions.transactional_id(*producer_id).unwrap_or("unknown");
    let Some(offset) = offset else {
        tracing::error!(
            topic,
            partition,
            producer_id,
            epoch,
            transactional_id,
            first,
            "a transaction whose end is lost cannot be told from the next one of its producer: there is no lost offset left for its marker"
        );
        return;
    };
    match is_known {
        true => tracing::warn!(
            topic,
            partition,
            producer_id,
            epoch,
            transactional_id,
            first,
            offset,
            ?outcome,
            "the marker of a transaction was lost to damage and is written again, as was decided"
        ),
        false => tracing::error!(
            topic,
            partition,
            producer_id,
            epoch,
            transactional_id,
            first,
            offset,
            "the end of a transaction was lost to damage, and it is not known how it was decided: it is ABORTED here, from its first offset to the offset of the loss"
        ),
    }
}

fn marker(lost: &Lost, offset: u64) -> Batch {
    let mut bytes = batch::marker(lost.producer_id, lost.epoch, lost.outcome, lost.time_ms);
    batch::set_mended(&mut bytes, if lost.is_known { Mended::Decided } else { Mended::Unknown });
    batch::place(&mut bytes, offset, LEADER_EPOCH);
    Batch {
        base: StreamOffset(offset),
        count: 1,
        max_timestamp_ms: lost.time_ms,
        payload: bytes.into(),
    }
}

/// The markers that must have been in the gaps of a partition, since what follows of their producers is of later transactions. `known` is asked about the transaction of a producer, in this
/// epoch, that has a record at this offset.
fn lost_markers(replay: &Replay, known: impl Fn(i64, i16, u64) -> Known) -> Vec<Lost> {
    let gaps = replay.gaps();
    let checkpoint = replay.checkpoint.as_ref();
    // A start fails with a checkpoint that cannot be read.
    let states = checkpoint.and_then(|bytes| ProducerStates::decode(bytes, 0).ok());
    let states = states.unwrap_or_default();
    let mut all_open: HashMap<i64, Open> = states
        .open_transactions()
        .map(|(id, epoch, first, time_ms)| (id, Open { first, epoch, time_ms, gaps_before: 0 }))
        .collect();
    let (mut lost, mut passed) = (Vec::new(), 0);
    for batch in &replay.batches {
        while gaps.get(passed).is_some_and(|gap| gap.end <= batch.base) {
            passed += 1;
        }
        let Some(header) = BatchHeader::parse(&batch.payload) else { continue };
        if !header.is_transactional() || !header.is_idempotent() {
            continue;
        }
        let (producer_id, epoch, base) = (header.producer_id, header.producer_epoch, batch.base.0);
        let marker = if header.is_control() { batch::outcome(&batch.payload) } else { None };
        let open = all_open.remove(&producer_id);
        let in_doubt = open.as_ref().filter(|open| open.gaps_before < passed);
        let found = in_doubt.and_then(|open| {
            let lost = |epoch, outcome, is_known, end| Lost {
                producer_id,
                epoch,
                outcome,
                is_known,
                first: open.first,
                time_ms: open.time_ms,
                gaps: (open.gaps_before..passed).find(|at| gaps[*at].end.0 > end).unwrap_or(passed)
                    ..passed,
            };
            match (known(producer_id, open.epoch, open.first), marker) {
                (Known::Decided { outcome, epoch: of_marker, end }, None) => {
                    let goes_on = match end {
                        Some(end) => base < end,
                        None => epoch < of_marker,
                    };
                    (!goes_on).then(|| lost(of_marker, outcome, true, end.unwrap_or(0)))
                }
                // Whether the marker is its own or a later one's, it ends as was decided.
                (Known::Decided { outcome, epoch: of_marker, end }, Some(ends)) => {
                    (ends != outcome).then(|| lost(of_marker, outcome, true, end.unwrap_or(0)))
                }
                (Known::Undecided, _) => None,
                (Known::Unknown, None) => Some(lost(open.epoch, Outcome::Abort, false, 0)),
                // It may be of a later transaction.
                (Known::Unknown, Some(ends)) => {
                    (ends == Outcome::Commit).then(|| lost(open.epoch, Outcome::Abort, false, 0))
                }
            }
        });
        if !header.is_control() {
            let time_ms = batch.max_timestamp_ms;
            let first = open.filter(|_| found.is_none()).map_or(base, |open| open.first);
            all_open.insert(producer_id, Open { first, epoch, time_ms, gaps_before: passed });
        }
        lost.extend(found);
    }
    lost
}

/// An offset for each lost marker in one of the gaps that it may have been in, and the markers for which there is none.
fn place(mut lost: Vec<Lost>, gaps: &[Range<StreamOffset>]) -> (Vec<(u64, Lost)>, Vec<Lost>) {
    // Those that have to be in an early gap first: if there is room for all, they all find it.
    lost.sort_by_key(|lost| (lost.gaps.end, lost.first));
    let mut placed = Vec::new();
    for (at, gap) in gaps.iter().enumerate() {
        let mut next = gap.start.0;
        let fits = |lost: &mut Lost| {
            let fits = lost.gaps.contains(&at) && next < gap.end.0;
            if fits {
                placed.push((next, lost.clone()));
                next += 1;
            }
            !fits
        };
        lost.retain_mut(fits);
    }
    (placed, lost)
}

#[cfg(test)]
mod tests;
