//! A tail that follows the chain.

use bytes::Bytes;

use super::Tail;
use crate::catalog::ObjectRange;
use crate::range::Range;
use crate::types::{StreamEpoch, StreamOffset};

/// What the chain has of a stream.
pub(crate) struct Stored<'a> {
    pub(crate) epoch: StreamEpoch,
    pub(crate) start: StreamOffset,
    pub(crate) uploaded_end: StreamOffset,
    pub(crate) checkpoint: &'a Option<Bytes>,
    pub(crate) ranges: &'a [ObjectRange],
}

impl Tail {
    /// Returns the positions in [`Stored::ranges`] of those that the tail does not have. Few
    /// neighbours change at a time, of possibly very many.
    pub(crate) fn new_ranges(&self, stored: &[ObjectRange]) -> std::ops::Range<usize> {
        let is_same = |(old, new): &(&Range, &ObjectRange)| {
            (old.object.id, old.start, old.end) == (new.object, new.start, new.end)
        };
        let first = self.ranges.iter().zip(stored).take_while(is_same).count();
        let rest = self.ranges.range(first..).rev().zip(stored[first..].iter().rev());
        first..stored.len() - rest.take_while(is_same).count()
    }

    /// Takes over what the chain has of the stream, where `new` are the ranges at the positions
    /// [`Self::new_ranges`]. Returns the ranges that the stream does not have any more. There must
    /// be no batches.
    pub(crate) fn follow(
        &mut self,
        stored: &Stored<'_>,
        at: std::ops::Range<usize>,
        new: Vec<Range>,
    ) -> Vec<Range> {
        assert!(self.batches.is_empty(), "a stream that follows the chain has batches");
        let kept_after = stored.ranges.len() - at.end;
        let added_bytes: u64 = new.iter().map(|range| range.payload_bytes).sum();
        let old = at.start..self.ranges.len() - kept_after;
        let after = self.ranges.split_off(old.end);
        let gone: Vec<_> = self.ranges.drain(old.start..).collect();
        self.ranges.extend(new);
        self.ranges.extend(after);
        self.range_bytes += added_bytes;
        self.range_bytes -= gone.iter().map(|range| range.payload_bytes).sum::<u64>();
        (self.epoch, self.start) = (stored.epoch, stored.start);
        self.uploaded_end = stored.uploaded_end;
        // A trim may have moved the start past what is uploaded.
        self.next = stored.uploaded_end.max(stored.start);
        self.recovered_end = self.next;
        self.checkpoint.clone_from(stored.checkpoint);
        self.followed += 1;
        gone
    }
}
