//! Markers for holes that a rebuild from objects has found: records that were uploaded, and are
//! lost with the objects that had them. Argument: `docs/transactions.md`, "Lost objects".

use std::ops::Range;

use alluvium_stream::{Batch, Filler, StreamOffset};

use super::repair::marker;
use crate::batch::{self, Outcome, Repaired};
use crate::producer_state::ProducerStates;

/// Returns markers for a hole of a partition. If the checkpoint describes the partition beyond the
/// hole, these are the lost markers of aborted transactions. Otherwise its end is the start of the
/// hole, and each transaction that is open there is aborted: its marker may be among the lost
/// records, and the next marker of its producer would decide it.
pub(crate) fn markers_for_hole(
    hole: Range<StreamOffset>,
    checkpoint: &[u8],
    checkpoint_end: StreamOffset,
) -> Vec<Filler> {
    // The start fails if a checkpoint cannot be read.
    let Ok(states) = ProducerStates::decode(checkpoint, 0) else { return Vec::new() };
    match checkpoint_end >= hole.end {
        true => lost_markers(&states, &hole),
        false => markers_of_open(&states, &hole),
    }
}

fn lost_markers(states: &ProducerStates, hole: &Range<StreamOffset>) -> Vec<Filler> {
    let Range { start, end } = *hole;
    let aborted = states.aborted_in(start.0, end.0).into_iter();
    let lost = aborted.filter(|aborted| {
        // One that begins in the hole has no records.
        aborted.first_offset < start.0 && aborted.marker_offset < end.0
    });
    lost.map(|aborted| {
        let id = aborted.producer_id;
        // An older epoch than the marker's would let a fenced producer append.
        let (epoch, time_ms) = states.last_of(id).unwrap_or_default();
        let offset = aborted.marker_offset;
        let outcome = (Outcome::Abort, Repaired::Decided);
        let batch = marker((id, epoch), outcome, time_ms, offset);
        Filler { batch, invalidated: None }
    })
    .collect()
}

fn markers_of_open(states: &ProducerStates, hole: &Range<StreamOffset>) -> Vec<Filler> {
    let mut offsets = hole.start.0..hole.end.0;
    let mut fillers = Vec::new();
    for (id, epoch, first, time_ms) in states.open_transactions() {
        let Some(offset) = offsets.next() else {
            tracing::error!(
                producer_id = id,
                first,
                hole = %hole.start,
                "the end of a transaction may be lost and cannot be written, as no lost offset is \
                 left: the transaction merges with the next one of its producer"
            );
            continue;
        };
        let outcome = (Outcome::Abort, Repaired::Unknown);
        let batch = marker((id, epoch), outcome, time_ms, offset);
        fillers.push(Filler { batch, invalidated: Some(StreamOffset(first)..hole.start) });
    }
    fillers
}

/// Returns the producer whose transaction a batch ends, if it is a marker.
pub fn producer_of_marker(batch: &Batch) -> Option<i64> {
    let header = batch::BatchHeader::parse(&batch.payload)?;
    batch::outcome(&batch.payload).filter(|_| header.is_control()).map(|_| header.producer_id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::BatchHeader;

    const HOLE: Range<StreamOffset> = StreamOffset(20)..StreamOffset(22);

    fn record(states: &mut ProducerStates, id: i64, epoch: i16, at: u64) {
        let marker = batch::marker(id, epoch, Outcome::Abort, 5);
        let transactional = 1 << 4;
        let header =
            BatchHeader { attributes: transactional, ..BatchHeader::parse(&marker).unwrap() };
        states.record(&header, at, 1000 + at.cast_signed(), 0);
    }

    fn end(states: &mut ProducerStates, id: i64, epoch: i16, outcome: Outcome, at: u64) {
        let marker = batch::marker(id, epoch, outcome, 5);
        states.record_marker(&BatchHeader::parse(&marker).unwrap(), outcome, at, 0);
    }

    fn filled(states: &ProducerStates, end: u64) -> Vec<(u64, i64, i16, i64, Option<u64>)> {
        let end = StreamOffset(end);
        let fillers = markers_for_hole(HOLE, &states.encode(end).unwrap(), end);
        let of = |Filler { batch, invalidated }: &Filler| {
            let header = BatchHeader::parse(&batch.payload).unwrap();
            assert_eq!(producer_of_marker(batch), Some(header.producer_id));
            assert_eq!(batch::outcome(&batch.payload), Some(Outcome::Abort));
            assert_eq!(batch::leader_epoch(&batch.payload), batch::NO_LEADER_EPOCH);
            let cause = if invalidated.is_some() { Repaired::Unknown } else { Repaired::Decided };
            assert_eq!(batch::repaired(&batch.payload), Some(cause));
            let first = invalidated.as_ref().map(|range| range.start.0);
            let (id, epoch) = (header.producer_id, header.producer_epoch);
            (batch.base.0, id, epoch, batch.max_timestamp_ms, first)
        };
        fillers.iter().map(of).collect()
    }

    #[test]
    fn transactions_that_are_open_at_a_hole_are_aborted() {
        let mut states = ProducerStates::default();
        record(&mut states, 1, 3, 10);
        record(&mut states, 2, 4, 11);
        end(&mut states, 2, 4, Outcome::Commit, 12);
        record(&mut states, 5, 0, 13);
        let first = [(20, 1, 3, 1010, Some(10)), (21, 5, 0, 1013, Some(13))];
        assert_eq!(filled(&states, 20), first);
        record(&mut states, 6, 0, 14);
        assert_eq!(filled(&states, 20), first, "the hole has two offsets");
    }

    #[test]
    fn lost_markers_of_aborted_transactions_are_written_again() {
        let mut states = ProducerStates::default();
        record(&mut states, 1, 3, 10);
        record(&mut states, 2, 3, 11);
        record(&mut states, 3, 3, 12);
        record(&mut states, 4, 3, 13);
        record(&mut states, 5, 3, 14);
        end(&mut states, 5, 3, Outcome::Abort, 19);
        end(&mut states, 3, 3, Outcome::Commit, 20);
        end(&mut states, 1, 3, Outcome::Abort, 21);
        end(&mut states, 2, 3, Outcome::Abort, 22);
        record(&mut states, 1, 6, 24);
        assert_eq!(filled(&states, 25), [(21, 1, 6, 1024, None)], "4 is open, and 2 ends later");
    }
}
