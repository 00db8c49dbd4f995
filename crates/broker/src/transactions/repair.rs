//! Repair of lost markers: a marker that the log has lost, and that later batches depend on, is put
//! back where it was lost. Argument: `docs/transactions.md`, "Damage".

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

use alluvium_stream::{Batch, DamagedStreams, History, LogOffset, StreamId, StreamOffset};

use super::STREAM_KEY;
use super::decisions::{At, Decisions, Known, PartitionKey};
use crate::batch::{self, BatchHeader, NO_LEADER_EPOCH, Outcome, Repaired};
use crate::producer_state::ProducerStates;
use crate::{state_stream, topics};

/// A lost marker.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Lost {
    producer_id: i64,
    epoch: i16,
    outcome: Outcome,
    is_known: bool,
    /// First offset of the transaction.
    first: u64,
    time_ms: i64,
    /// The gaps that it may have been in.
    gaps: Range<usize>,
}

/// An open transaction during the pass over the log.
struct Open {
    /// Its first batch.
    first: At,
    epoch: i16,
    time_ms: i64,
    /// Number of gaps before the last batch that certainly belongs to it.
    gaps_before: usize,
}

impl Open {
    /// Its marker is lost, in one of the gaps since its last batch that extends beyond `end`.
    fn lost(
        &self,
        (producer_id, epoch): (i64, i16),
        (outcome, is_known): (Outcome, bool),
        passed: &[Range<StreamOffset>],
        end: u64,
    ) -> Lost {
        let from = passed.partition_point(|gap| gap.end.0 <= end).max(self.gaps_before);
        Lost {
            producer_id,
            epoch,
            outcome,
            is_known,
            first: self.first.offset,
            time_ms: self.time_ms,
            gaps: from..passed.len(),
        }
    }
}

/// Returns the markers to put in the gaps of partitions.
pub(crate) fn markers_for_gaps(damaged: &DamagedStreams<'_>) -> Vec<(StreamId, Batch)> {
    let streams: HashMap<StreamId, _> = topics::streams(damaged.meta()).collect();
    let lossy: HashSet<StreamId> = damaged.gaps().iter().map(|gap| gap.stream).collect();
    let history = |stream: &StreamId| damaged.history(*stream);
    let mut partitions: Vec<_> = lossy
        .into_iter()
        .filter_map(|stream| Some((stream, streams.get(&stream)?, history(&stream)?)))
        .collect();
    partitions.sort_unstable_by_key(|(stream, ..)| *stream);
    let wanted = RefCell::new(HashSet::new());
    let note = |producer_id, _| {
        wanted.borrow_mut().insert(producer_id);
        Known::Undecided
    };
    for (_, (_, topic_id, index), history) in &partitions {
        drop(lost_markers((*topic_id, *index), history, note));
    }
    let wanted = wanted.into_inner();
    if wanted.is_empty() {
        return Vec::new();
    }
    let coordinator = state_stream::id_in(damaged.meta(), STREAM_KEY);
    let state = coordinator.as_ref().and_then(history);
    // The server does not start if a state stream cannot be read.
    let Some(Ok(mut decisions)) = state.map(|state| Decisions::read(&state, &wanted)) else {
        return Vec::new();
    };
    if decisions.is_partial() {
        for (stream, (_, topic_id, index)) in &streams {
            if let Some(history) = history(stream) {
                decisions.prove((*topic_id, *index), &history);
            }
        }
    }
    let mut markers = Vec::new();
    for (stream, (topic, topic_id, index), history) in partitions {
        let key = (*topic_id, *index);
        let known = |producer_id, first| decisions.of(producer_id, key, first);
        let lost = lost_markers(key, &history, known);
        let (assigned, unassigned) = assign_offsets(lost, &history.replay.gaps());
        for (offset, lost) in assigned {
            log_lost_marker(topic, *index, &decisions, &lost, Some(offset));
            let Lost { producer_id, epoch, outcome, is_known, time_ms, .. } = lost;
            let repaired = if is_known { Repaired::Decided } else { Repaired::Unknown };
            let marker = marker((producer_id, epoch), (outcome, repaired), time_ms, offset);
            markers.push((stream, marker));
        }
        for lost in unassigned {
            log_lost_marker(topic, *index, &decisions, &lost, None);
        }
    }
    markers
}

fn log_lost_marker(
    topic: &str,
    partition: i32,
    decisions: &Decisions,
    lost: &Lost,
    offset: Option<u64>,
) {
    let Lost { producer_id, epoch, outcome, is_known, first, .. } = lost;
    let transactional_id = decisions.transactional_id(*producer_id);
    let Some(offset) = offset else {
        tracing::error!(
            topic,
            partition,
            producer_id,
            epoch,
            transactional_id,
            first,
            "marker of a transaction was lost to damage and cannot be written again, as no lost \
             offset is left: the transaction merges with the next one of its producer"
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
            "marker of a transaction was lost to damage and is written again with the decided \
             outcome"
        ),
        false => tracing::error!(
            topic,
            partition,
            producer_id,
            epoch,
            transactional_id,
            first,
            offset,
            "end of a transaction was lost to damage and its outcome is unknown: the transaction \
             is ABORTED from its first offset to the offset of the loss"
        ),
    }
}

/// Returns a marker in place of a lost one.
pub(super) fn marker(
    (producer_id, epoch): (i64, i16),
    (outcome, repaired): (Outcome, Repaired),
    time_ms: i64,
    offset: u64,
) -> Batch {
    let mut bytes = batch::marker(producer_id, epoch, outcome, time_ms);
    batch::set_repaired(&mut bytes, repaired);
    // Records before it are lost. With an epoch it would extend that epoch over them, and consumers
    // would not learn of the loss.
    batch::set_base(&mut bytes, offset, NO_LEADER_EPOCH);
    Batch { base: StreamOffset(offset), count: 1, max_timestamp_ms: time_ms, payload: bytes.into() }
}

/// Returns the markers that must have been in the gaps of a partition, because the producers' later
/// batches belong to later transactions. `known` returns the decision on the transaction of a
/// producer whose first batch is given.
fn lost_markers<'a>(
    key: PartitionKey,
    History { replay, log_ends }: &History,
    known: impl Fn(i64, At) -> Known<'a>,
) -> Vec<Lost> {
    let gaps = replay.gaps();
    let checkpoint = replay.checkpoint.as_ref();
    // The start fails if a checkpoint cannot be read.
    let states = checkpoint.and_then(|bytes| ProducerStates::decode(bytes, 0).ok());
    let states = states.unwrap_or_default();
    let mut all_open: HashMap<i64, Open> = states
        .open_transactions()
        .map(|(id, epoch, offset, time_ms)| {
            let first = At { offset, log: LogOffset(0) };
            (id, Open { first, epoch, time_ms, gaps_before: 0 })
        })
        .collect();
    let (mut lost, mut passed) = (Vec::new(), 0);
    for (batch, log) in replay.batches.iter().zip(log_ends) {
        while gaps.get(passed).is_some_and(|gap| gap.end <= batch.base) {
            passed += 1;
        }
        let Some(header) = BatchHeader::parse(&batch.payload) else { continue };
        if !header.is_transactional() || !header.is_idempotent() {
            continue;
        }
        let (producer_id, epoch) = (header.producer_id, header.producer_epoch);
        let at = At { offset: batch.base.0, log: *log };
        let marker = if header.is_control() { batch::outcome(&batch.payload) } else { None };
        let open = all_open.remove(&producer_id);
        let in_doubt = open.as_ref().filter(|open| open.gaps_before < passed);
        let found = in_doubt.and_then(|open| {
            let unknown = || {
                open.lost((producer_id, open.epoch), (Outcome::Abort, false), &gaps[..passed], 0)
            };
            match (known(producer_id, open.first), marker) {
                // Whether the marker is its own or a later one's, the outcome is the decided one.
                (Known::Decided(decision), Some(ends)) if ends == decision.outcome => None,
                (Known::Decided(decision), None) if decision.holds(key, at) => None,
                (Known::Decided(decision), _) => {
                    let (ends, end) = ((decision.outcome, true), decision.end(key));
                    Some(open.lost((producer_id, decision.epoch), ends, &gaps[..passed], end))
                }
                (Known::Undecided, _) | (Known::Unknown, Some(Outcome::Abort)) => None,
                // It may belong to a later transaction.
                (Known::Unknown, None | Some(Outcome::Commit)) => Some(unknown()),
            }
        });
        if !header.is_control() {
            let time_ms = batch.max_timestamp_ms;
            let first = open.filter(|_| found.is_none()).map_or(at, |open| open.first);
            all_open.insert(producer_id, Open { first, epoch, time_ms, gaps_before: passed });
        }
        lost.extend(found);
    }
    lost
}

/// Assigns each lost marker an offset in one of the gaps that it may have been in. Returns these
/// and the markers without an offset.
fn assign_offsets(
    mut lost: Vec<Lost>,
    gaps: &[Range<StreamOffset>],
) -> (Vec<(u64, Lost)>, Vec<Lost>) {
    // Those whose last possible gap comes first go first: if there is space for all, each gets an
    // offset.
    lost.sort_by_key(|lost| (lost.gaps.end, lost.first, lost.producer_id));
    let mut assigned = Vec::new();
    for (at, gap) in gaps.iter().enumerate() {
        let mut next = gap.start.0;
        let fits = |lost: &mut Lost| {
            let fits = lost.gaps.contains(&at) && next < gap.end.0;
            if fits {
                assigned.push((next, lost.clone()));
                next += 1;
            }
            !fits
        };
        lost.retain_mut(fits);
    }
    (assigned, lost)
}

#[cfg(test)]
mod tests;
