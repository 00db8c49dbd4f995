//! A stream's state: its tail in the log cache and the ranges of the rest in objects.
//!
//! Offsets, from oldest to newest; the order is an invariant:
//!
//! ```text
//!         in objects              in the log cache, and in the WAL
//!   |---------------------------|-------------------------|
//! start                    uploaded_end                 next
//!                  |--------------------------------------|
//!                  batches (those before uploaded_end may be evicted)
//! ```
//!
//! A trim may move `start` past `uploaded_end`. The batches between stay, hidden from readers,
//! until the upload that folds them into the checkpoint.

mod compactable;
mod follow;
mod state;

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::sync::Arc;

use alluvium_wal::LogOffset;
use bytes::Bytes;
use tokio::sync::Notify;

use crate::budget::Budget;
use crate::range::Range;
use crate::types::{Batch, StreamEpoch, StreamOffset};

pub(crate) use compactable::{Changed, Choice, Compactable};
pub(crate) use follow::Stored;
pub(crate) use state::StreamState;

/// Memory cost of a cached batch besides its payload: its entry (64 bytes), the same again for
/// spare capacity of the deque, the payload's reference count, and the allocator's overhead for
/// both.
pub(crate) const BATCH_OVERHEAD_BYTES: u64 = 192;
const _: () = assert!(size_of::<Cached>() as u64 <= BATCH_OVERHEAD_BYTES / 3);
/// Spare entries that a deque may have in addition to as many as it holds.
const SPARE_ENTRIES: usize = 16;

/// Offsets that a stream may use after the end that the chain shows. The least number that has
/// space for two batches of 2^31 offsets, and more than any number of clients uses between two
/// uploads.
pub(crate) const UNHINTED_OFFSETS: u64 = 1 << 33;

/// A batch in the log cache.
pub(crate) struct Cached {
    pub(crate) base: StreamOffset,
    pub(crate) count: u32,
    pub(crate) max_timestamp_ms: i64,
    /// Log offset at which its WAL record ends: the batch is durable when the log is durable up to
    /// here.
    pub(crate) log_end: LogOffset,
    pub(crate) payload: Bytes,
    /// CRC32C of the payload as computed for the log, so that an upload need not compute it again.
    pub(crate) crc32c: u32,
}

impl Cached {
    pub(crate) fn end(&self) -> StreamOffset {
        StreamOffset(self.base.0 + u64::from(self.count))
    }

    pub(crate) fn cost_bytes(&self) -> u64 {
        cost_bytes(self.payload.len())
    }

    pub(crate) fn to_batch(&self) -> Batch {
        Batch {
            base: self.base,
            count: self.count,
            max_timestamp_ms: self.max_timestamp_ms,
            payload: self.payload.clone(),
        }
    }
}

/// Returns the memory cost in the log cache of a batch with this payload.
pub(crate) const fn cost_bytes(payload_bytes: usize) -> u64 {
    payload_bytes as u64 + BATCH_OVERHEAD_BYTES
}

/// Where the tiers of a stream begin and end, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiers {
    /// The first offset that can be read.
    pub start: StreamOffset,
    /// The first offset that is in memory; the uploaded end if nothing before it is. Everything
    /// from here on is read without the object store.
    pub local_start: StreamOffset,
    /// The offset after the last one that is in objects. The start, if that has passed it.
    pub uploaded_end: StreamOffset,
    /// The offset below which everything is durable: Kafka's high watermark.
    pub durable_end: StreamOffset,
}

impl Tiers {
    fn are_ordered(&self) -> bool {
        let Self { start, local_start, uploaded_end, durable_end } = *self;
        start <= local_start && local_start <= uploaded_end && uploaded_end <= durable_end
    }
}

/// What a change of a tail released in the log cache.
#[derive(Clone, Copy, Default)]
#[must_use]
pub(crate) struct Released {
    /// Bytes no longer cached.
    pub(crate) freed_bytes: u64,
    /// Bytes no longer pinned, whether still cached or not.
    pub(crate) unpinned_bytes: u64,
}

/// What an upload changes in a stream.
pub(crate) struct UploadedPart {
    pub(crate) uploaded_end: StreamOffset,
    pub(crate) start: StreamOffset,
    pub(crate) checkpoint: Option<Bytes>,
    pub(crate) range: Option<Range>,
}

/// Where the next batches of a fetch are.
pub(crate) enum Source {
    /// The batches themselves; none if there is nothing (durable) yet.
    Cached(Vec<Batch>),
    /// The object that has them.
    Object(Range),
}

#[derive(Default)]
pub(crate) struct Tail {
    pub(crate) deleted: bool,
    /// The newest epoch with which the stream was opened, durably. Changed only with
    /// [`crate::catalog_state::CatalogState::committing`] held as well.
    pub(crate) epoch: StreamEpoch,
    pub(crate) start: StreamOffset,
    pub(crate) next: StreamOffset,
    pub(crate) uploaded_end: StreamOffset,
    /// The end of the stream at recovery: everything before it is durable or lost.
    recovered_end: StreamOffset,
    /// The end of the stream that the chain shows.
    hint: StreamOffset,
    /// The end that the next delta states, and the version of the chain before it. It takes the
    /// place of `hint` once the chain has a later version.
    next_hint: (u64, StreamOffset),
    pub(crate) checkpoint: Option<Bytes>,
    /// The owner declared that checkpoints need not describe anything before this offset, just as
    /// for `start`.
    pub(crate) checkpoint_start: StreamOffset,
    /// See [`crate::Stream::has_declared_loss`].
    pub(crate) has_declared_loss: bool,
    /// In offset order, and so in log order.
    batches: VecDeque<Cached>,
    /// In offset order; all end after `start`.
    ranges: VecDeque<Range>,
    /// Bytes of payload in `ranges`.
    range_bytes: u64,
    /// Bytes of payload in batches that are after both `start` and `uploaded_end`.
    tail_bytes: u64,
    /// How often the chain's contents were taken over; see [`Self::follow`].
    pub(crate) followed: u64,
    /// Woken when more becomes durable.
    pub(crate) watchers: Vec<Arc<Notify>>,
    /// Whether the stream is queued in [`crate::wake::Wakes`].
    pub(crate) wake_queued: bool,
    /// The stream's key in [`crate::cache::LogCache`], if it is listed there.
    pub(crate) evictable_at: Option<LogOffset>,
}

impl Tail {
    /// Creates the tail of a stream from the catalog.
    pub(crate) fn restored(
        start: StreamOffset,
        uploaded_end: StreamOffset,
        checkpoint: Option<Bytes>,
        ranges: VecDeque<Range>,
    ) -> Self {
        let range_bytes = ranges.iter().map(|range| range.payload_bytes).sum();
        Self {
            start,
            next: uploaded_end,
            uploaded_end,
            recovered_end: uploaded_end,
            checkpoint,
            ranges,
            range_bytes,
            ..Self::default()
        }
    }

    /// Adds a batch at the end. Only in recovery may there be a gap before it.
    pub(crate) fn push(&mut self, batch: Cached) {
        assert!(batch.base >= self.next, "batch {} comes before {}", batch.base, self.next);
        self.next = batch.end();
        if batch.end() > self.start {
            self.tail_bytes += batch.payload.len() as u64;
        }
        self.batches.push_back(batch);
    }

    /// Inserts a batch into a gap that recovery found. It becomes durable with the batch before it,
    /// or at its own log offset if there is none. Returns false if there is no gap.
    pub(crate) fn fill(&mut self, mut batch: Cached) -> bool {
        let at = self.batches.partition_point(|other| other.base < batch.base);
        let before = at.checked_sub(1).map(|at| &self.batches[at]);
        let is_free = before.map_or(self.uploaded_end, Cached::end) <= batch.base
            && batch.end() <= self.batches.get(at).map_or(self.next, |after| after.base);
        if !is_free {
            return false;
        }
        if let Some(before) = before {
            batch.log_end = before.log_end;
        }
        if batch.end() > self.start {
            self.tail_bytes += batch.payload.len() as u64;
        }
        self.batches.insert(at, batch);
        true
    }

    /// Ends recovery of the stream: the log has no more of its batches. It continues at `next`, and
    /// missing offsets before that are lost.
    pub(crate) fn recovered(&mut self, next: StreamOffset) {
        assert!(next >= self.next, "the stream continues at {next}, before {}", self.next);
        self.next = next;
        self.recovered_end = next;
        // The first delta of the opening has it.
        self.next_hint = (0, next);
    }

    /// Notes the end that the next delta states. `published` is the version of the chain before it.
    pub(crate) fn note_hint(&mut self, end: StreamOffset, published: u64) {
        self.hint = self.published_hint(published);
        self.next_hint = (published, end);
    }

    fn published_hint(&self, published: u64) -> StreamOffset {
        match self.next_hint {
            (before, end) if before < published => end,
            _ => self.hint,
        }
    }

    /// Returns the offset that no batch may pass before the chain, whose version is `published`,
    /// has another delta: if the WAL is lost, the stream continues there.
    pub(crate) fn append_limit(&self, published: u64) -> StreamOffset {
        StreamOffset(self.published_hint(published).0.saturating_add(UNHINTED_OFFSETS))
    }

    /// Whether the stream's last offsets are lost: a gap without a batch behind it.
    pub(crate) fn ends_with_gap(&self) -> bool {
        self.batches.back().map_or(self.uploaded_end, Cached::end) < self.next
    }

    /// Returns the log offset up to which the log must be durable for the whole stream to be
    /// durable.
    pub(crate) fn log_end(&self) -> LogOffset {
        self.batches.back().map_or(LogOffset(0), |last| last.log_end)
    }

    /// Returns the end of what is durable when the log is durable up to `durable`. Batches that are
    /// not durable are at the deque's end.
    pub(crate) fn durable_end(&self, durable: LogOffset) -> StreamOffset {
        if self.batches.back().is_none_or(|last| last.log_end <= durable) {
            return self.next;
        }
        let end = match self.batches.partition_point(|batch| batch.log_end <= durable) {
            0 => self.batches[0].base,
            durables => self.batches[durables - 1].end(),
        };
        // The last batch may lie behind a gap: without it the stream still ends where recovery
        // ended it.
        end.max(self.recovered_end)
    }

    /// Returns the log offset at which the next batch becomes durable.
    pub(crate) fn next_durable(&self, durable: LogOffset) -> Option<LogOffset> {
        if self.batches.back()?.log_end <= durable {
            return None;
        }
        let next = self.batches.partition_point(|batch| batch.log_end <= durable);
        Some(self.batches[next].log_end)
    }

    /// Returns the bytes of payload from `start` to `next`. A batch before `start` counts as long
    /// as its range does.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.range_bytes + self.tail_bytes
    }

    fn first_pinned(&self) -> usize {
        self.batches.partition_point(|batch| batch.base < self.uploaded_end)
    }

    pub(crate) fn pinned(&self) -> impl Iterator<Item = &Cached> {
        self.batches.range(self.first_pinned()..)
    }

    /// Returns the uploaded end after an upload of all pinned batches whose records end at or
    /// before `cut`, including lost offsets behind them, and the end of the last one of these
    /// batches (the current uploaded end if there is none). `None` if the uploaded end does not
    /// change.
    pub(crate) fn pinned_end(&self, cut: LogOffset) -> Option<(StreamOffset, StreamOffset)> {
        let below = self.batches.partition_point(|batch| batch.log_end <= cut);
        let end = self.batches.get(below).map_or(self.next, |next| next.base);
        let last = (below > self.first_pinned()).then(|| self.batches[below - 1].end());
        (end > self.uploaded_end && !self.deleted).then(|| (end, last.unwrap_or(self.uploaded_end)))
    }

    /// Returns pinned batches from `from` to `to`, mapped by `taken`: at least one if there is one,
    /// up to both limits.
    pub(crate) fn pinned_chunk<T>(
        &self,
        from: StreamOffset,
        to: StreamOffset,
        max_batches: usize,
        max_bytes: usize,
        taken: impl FnMut(&Cached) -> T,
    ) -> Vec<T> {
        let first = self.batches.partition_point(|batch| batch.base < from);
        let mut budget = Budget::new(max_bytes);
        self.batches
            .range(first..)
            .take(max_batches)
            .take_while(|batch| batch.base < to && budget.take(batch.payload.len()))
            .map(taken)
            .collect()
    }

    /// Finds the durable batches from the one that contains `from`, or the next one after a gap.
    pub(crate) fn source(
        &self,
        from: StreamOffset,
        budget: &mut Budget,
        durable: LogOffset,
    ) -> Source {
        let first = self.batches.partition_point(|batch| batch.end() <= from);
        let cache_start = self.batches.front().map(|batch| batch.base);
        if cache_start.is_none_or(|cache_start| from < cache_start) {
            let range = self.ranges.get(self.ranges.partition_point(|range| range.end <= from));
            if let Some(range) = range
                .filter(|range| cache_start.is_none_or(|cache_start| range.start < cache_start))
            {
                return Source::Object(range.clone());
            }
        }
        let batches = self.batches.range(first..);
        let batches = batches
            .take_while(|batch| batch.log_end <= durable && budget.take(batch.payload.len()));
        Source::Cached(batches.map(Cached::to_batch).collect())
    }

    /// Returns where the tiers of the stream begin and end.
    pub(crate) fn tiers(&self, durable: LogOffset) -> Tiers {
        let uploaded_end = self.uploaded_end.max(self.start);
        let in_memory = self.batches.front().map_or(uploaded_end, |batch| batch.base);
        let tiers = Tiers {
            start: self.start,
            local_start: in_memory.clamp(self.start, uploaded_end),
            uploaded_end,
            durable_end: self.durable_end(durable),
        };
        debug_assert!(tiers.are_ordered(), "{tiers:?}");
        tiers
    }

    /// Returns the end of the oldest ranges that retention need not keep; the start if there are
    /// none.
    pub(crate) fn retention_point(
        &self,
        older_than_ms: Option<i64>,
        keep_bytes: Option<u64>,
    ) -> StreamOffset {
        let mut point = self.start;
        let mut left_bytes = self.size_bytes();
        for range in &self.ranges {
            left_bytes -= range.payload_bytes;
            let is_old = older_than_ms.is_some_and(|limit| range.newest_ms() < limit);
            if !is_old && keep_bytes.is_none_or(|keep| left_bytes < keep) {
                break;
            }
            point = range.end;
        }
        point
    }

    /// Returns the range that starts at `start`.
    pub(crate) fn range_at(&self, start: StreamOffset) -> Option<&Range> {
        let at = self.ranges.partition_point(|range| range.start < start);
        self.ranges.get(at).filter(|range| range.start == start)
    }

    /// Replaces `count` ranges (at least one) from `first` on by `new`, if there is one, and
    /// returns them. Moves at most half of the other ranges, once.
    pub(crate) fn replace(
        &mut self,
        first: StreamOffset,
        count: usize,
        new: Option<Range>,
    ) -> Vec<Range> {
        let at = self.ranges.partition_point(|range| range.start < first);
        let mut gone = Vec::with_capacity(count);
        let mut from = at;
        if let Some(new) = new {
            self.range_bytes += new.payload_bytes;
            gone.push(std::mem::replace(&mut self.ranges[at], new));
            from += 1;
        }
        gone.extend(self.ranges.drain(from..at + count));
        self.range_bytes -= gone.iter().map(|range| range.payload_bytes).sum::<u64>();
        gone
    }

    /// Returns the visible ranges that end after `from`, oldest first. There may be hundreds of
    /// thousands: a caller that visits all of them takes a few at a time and releases the lock in
    /// between.
    pub(crate) fn ranges_after(&self, from: StreamOffset) -> impl Iterator<Item = &Range> {
        self.ranges.range(self.ranges.partition_point(|range| range.end <= from)..)
    }

    /// Returns the visible, durable batches that are in no range, oldest first.
    fn visible(&self, durable: LogOffset) -> impl Iterator<Item = &Cached> {
        let trimmed = self.batches.partition_point(|batch| batch.end() <= self.start);
        let first = trimmed.max(self.first_pinned());
        self.batches.range(first..).take_while(move |batch| batch.log_end <= durable)
    }

    /// Returns the first [visible](Self::visible) batch that ends after `from` and whose greatest
    /// timestamp is at least `timestamp_ms`.
    pub(crate) fn find_time(
        &self,
        from: StreamOffset,
        timestamp_ms: i64,
        durable: LogOffset,
    ) -> Option<Batch> {
        let mut visible = self.visible(durable).filter(|batch| batch.end() > from);
        visible.find(|batch| batch.max_timestamp_ms >= timestamp_ms).map(Cached::to_batch)
    }

    /// Returns the first [visible](Self::visible) batch with the greatest timestamp.
    pub(crate) fn max_time(&self, durable: LogOffset) -> Option<Batch> {
        let first_of_equals = |batch: &&Cached| (batch.max_timestamp_ms, Reverse(batch.base));
        self.visible(durable).max_by_key(first_of_equals).map(Cached::to_batch)
    }

    /// Applies a committed upload. The uploaded batches stay cached, except those below the start.
    pub(crate) fn uploaded(&mut self, part: UploadedPart) -> Released {
        let pinned = self.first_pinned();
        let end = self.batches.partition_point(|batch| batch.base < part.uploaded_end);
        let mut released = Released::default();
        for batch in self.batches.range(pinned..end) {
            released.unpinned_bytes += batch.cost_bytes();
            if batch.end() > self.start {
                self.tail_bytes -= batch.payload.len() as u64;
            }
        }
        self.uploaded_end = part.uploaded_end;
        self.checkpoint = part.checkpoint;
        self.start = part.start;
        if let Some(range) = part.range {
            self.range_bytes += range.payload_bytes;
            self.ranges.push_back(range);
        }
        released.freed_bytes += self.drop_unreadable();
        released
    }

    /// Drops cached batches that are uploaded and end at or before `to`: they were rewritten and
    /// must be read from their new objects.
    pub(crate) fn drop_cached_before(&mut self, to: StreamOffset) -> Released {
        let uploaded_end = self.uploaded_end;
        let gone =
            self.batches.partition_point(|batch| batch.end() <= to && batch.base < uploaded_end);
        let freed_bytes = self.batches.drain(..gone).map(|batch| batch.cost_bytes()).sum();
        self.shrink();
        Released { freed_bytes, unpinned_bytes: 0 }
    }

    /// Drops cached batches that are uploaded and end at or before `start`.
    fn drop_unreadable(&mut self) -> u64 {
        let (start, uploaded_end) = (self.start, self.uploaded_end);
        let gone =
            self.batches.partition_point(|batch| batch.end() <= start && batch.base < uploaded_end);
        let freed = self.batches.drain(..gone).map(|batch| batch.cost_bytes()).sum();
        self.shrink();
        freed
    }

    /// Shrinks the deque, so that the charge for a batch's entry stays true. At least half of the
    /// entries have gone since the last time, so the cost per batch is small.
    fn shrink(&mut self) {
        let len = self.batches.len();
        if self.batches.capacity() > 2 * len + SPARE_ENTRIES {
            self.batches.shrink_to(len + len / 2);
        }
    }

    /// Moves the start to `to`, if that is later; returns the ranges that are dropped.
    pub(crate) fn trim(&mut self, to: StreamOffset) -> (Released, Vec<Range>) {
        let pinned = self.first_pinned();
        let cut_off = self.batches.range(pinned..).skip_while(|batch| batch.end() <= self.start);
        let cut_off_bytes: u64 = cut_off
            .take_while(|batch| batch.end() <= to)
            .map(|batch| batch.payload.len() as u64)
            .sum();
        self.tail_bytes -= cut_off_bytes;
        self.start = self.start.max(to);
        let gone = self.ranges.partition_point(|range| range.end <= to);
        let gone: Vec<_> = self.ranges.drain(..gone).collect();
        self.range_bytes -= gone.iter().map(|range| range.payload_bytes).sum::<u64>();
        let freed_bytes = self.drop_unreadable();
        (Released { freed_bytes, unpinned_bytes: 0 }, gone)
    }

    /// Drops everything; returns the ranges that are dropped.
    pub(crate) fn delete(&mut self) -> (Released, Vec<Range>) {
        let unpinned_bytes = self.pinned().map(Cached::cost_bytes).sum();
        let freed_bytes = self.batches.drain(..).map(|batch| batch.cost_bytes()).sum();
        self.shrink();
        self.deleted = true;
        self.checkpoint = None;
        (self.range_bytes, self.tail_bytes) = (0, 0);
        (Released { freed_bytes, unpinned_bytes }, self.ranges.drain(..).collect())
    }

    /// Returns the end of the oldest batch's record if that batch is uploaded.
    pub(crate) fn first_evictable(&self) -> Option<LogOffset> {
        let first = self.batches.front()?;
        (first.base < self.uploaded_end).then_some(first.log_end)
    }

    /// Drops uploaded batches with records up to `limit`, oldest first, until `want_bytes` are
    /// free; returns the number of bytes freed.
    pub(crate) fn evict(&mut self, limit: LogOffset, want_bytes: u64) -> u64 {
        let mut freed = 0;
        while freed < want_bytes
            && let Some(first) = self.batches.front()
            && first.base < self.uploaded_end
            && first.log_end <= limit
        {
            freed += first.cost_bytes();
            self.batches.pop_front();
        }
        self.shrink();
        freed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::ObjectInfo;
    use crate::types::ObjectId;

    fn object() -> Arc<ObjectInfo> {
        Arc::new(ObjectInfo {
            id: ObjectId(1),
            name: "o".into(),
            size_bytes: 0,
            format: 2,
            index_position: 0,
            index_bytes: 0,
            index_crc32c: 0,
            created_at_ms: 0,
            generation: 0,
            payload_bytes: 0,
        })
    }

    fn range(start: u64, end: u64) -> Range {
        Range {
            object: object(),
            start: StreamOffset(start),
            end: StreamOffset(end),
            payload_bytes: (end - start) * 10,
            max_timestamp_ms: 0,
        }
    }

    /// Pushes a batch of one offset and ten bytes; its record ends at ten times its end.
    fn push(tail: &mut Tail, base: u64) {
        tail.push(Cached {
            base: StreamOffset(base),
            count: 1,
            max_timestamp_ms: 0,
            log_end: LogOffset((base + 1) * 10),
            payload: Bytes::from_static(b"0123456789"),
            crc32c: 0,
        });
    }

    /// Offsets 0..4 in an object, 4..8 in the log cache, not uploaded.
    fn tail() -> Tail {
        let mut tail = Tail::restored(StreamOffset(0), StreamOffset(4), None, [range(0, 4)].into());
        (4..8).for_each(|base| push(&mut tail, base));
        tail
    }

    fn uploaded(tail: &mut Tail, end: u64, range: Option<Range>) -> Released {
        let start = tail.start;
        let uploaded_end = StreamOffset(end);
        tail.uploaded(UploadedPart { uploaded_end, start, checkpoint: None, range })
    }

    #[test]
    fn the_durable_end_follows_the_log() {
        let tail = tail();
        for (log, end, next) in [
            (0, 4, Some(50)),
            (49, 4, Some(50)),
            (50, 5, Some(60)),
            (79, 7, Some(80)),
            (80, 8, None),
        ] {
            assert_eq!(tail.durable_end(LogOffset(log)), StreamOffset(end), "at {log}");
            assert_eq!(tail.next_durable(LogOffset(log)), next.map(LogOffset), "at {log}");
        }
        assert_eq!(Tail::default().durable_end(LogOffset(0)), StreamOffset(0));
    }

    #[test]
    fn the_durable_end_is_not_below_the_start_after_damage() {
        let mut tail = Tail::restored(StreamOffset(10), StreamOffset(0), None, [].into());
        push(&mut tail, 0);
        tail.recovered(tail.start); // as recovery does
        assert_eq!(tail.durable_end(LogOffset(10)), StreamOffset(10));
        push(&mut tail, 10);
        assert_eq!(
            tail.durable_end(LogOffset(10)),
            StreamOffset(10),
            "before the new batch is durable"
        );
        assert_eq!(tail.durable_end(LogOffset(110)), StreamOffset(11));
    }

    #[test]
    fn a_source_is_the_location_of_the_offset() {
        let mut tail = Tail::restored(
            StreamOffset(0),
            StreamOffset(10),
            None,
            [range(0, 2), range(5, 10)].into(),
        );
        push(&mut tail, 10);
        push(&mut tail, 15);
        let source = |from: u64| match tail.source(
            StreamOffset(from),
            &mut Budget::new(100),
            LogOffset(1000),
        ) {
            Source::Cached(batches) => {
                batches.first().map_or("end".into(), |first| format!("cached {}", first.base))
            }
            Source::Object(range) => format!("object {}", range.start),
        };
        assert_eq!((source(0), source(1)), ("object 0".into(), "object 0".into()));
        assert_eq!(
            (source(2), source(4), source(9)),
            ("object 5".into(), "object 5".into(), "object 5".into()),
            "a gap"
        );
        assert_eq!(
            (source(10), source(11), source(14)),
            ("cached 10".into(), "cached 15".into(), "cached 15".into())
        );
        assert_eq!(source(16), "end");
    }

    #[test]
    fn bytes_are_counted_once_wherever_they_are() {
        let mut tail = tail();
        assert_eq!(tail.size_bytes(), 80);
        let released = uploaded(&mut tail, 6, Some(range(4, 6)));
        assert_eq!(
            (tail.size_bytes(), released.freed_bytes, released.unpinned_bytes),
            (80, 0, 2 * cost_bytes(10))
        );
        assert_eq!(tail.evict(LogOffset(59), 1), cost_bytes(10));
        assert_eq!(
            (tail.evict(LogOffset(59), u64::MAX), tail.first_evictable()),
            (0, Some(LogOffset(60)))
        );
        assert_eq!(
            tail.evict(LogOffset(u64::MAX), u64::MAX),
            cost_bytes(10),
            "what is pinned stays"
        );
        assert_eq!(tail.first_evictable(), None);
        assert_eq!(tail.pinned().count(), 2);

        let (released, gone) = tail.trim(StreamOffset(7));
        assert_eq!(
            (tail.size_bytes(), released.freed_bytes, gone.len()),
            (10, 0, 2),
            "a trimmed batch stays for the fold"
        );
        assert_eq!(
            tail.pinned_chunk(StreamOffset(6), StreamOffset(8), 9, 99, Cached::end).len(),
            2
        );
        let released = uploaded(&mut tail, 8, Some(range(7, 8)));
        assert_eq!(
            (tail.size_bytes(), released.freed_bytes, released.unpinned_bytes),
            (10, cost_bytes(10), 2 * cost_bytes(10))
        );
        let (released, gone) = tail.delete();
        assert_eq!(
            (tail.size_bytes(), released.freed_bytes, released.unpinned_bytes, gone.len()),
            (0, cost_bytes(10), 0, 1)
        );
    }

    #[test]
    fn spare_capacity_is_released() {
        let within =
            |tail: &Tail| tail.batches.capacity() <= 2 * tail.batches.len() + SPARE_ENTRIES;
        let mut tail = Tail::default();
        (0..10_000).for_each(|base| push(&mut tail, base));
        let _ = uploaded(&mut tail, 9_999, Some(range(0, 9_999)));
        for left in (1..10_000).rev() {
            assert_eq!(tail.evict(LogOffset(u64::MAX), 1), cost_bytes(10));
            assert!(within(&tail) && tail.batches.len() == left, "{}", tail.batches.capacity());
        }
        (10_000..20_000).for_each(|base| push(&mut tail, base));
        let _ = tail.trim(StreamOffset(20_000));
        let _ = uploaded(&mut tail, 20_000, None);
        assert!(within(&tail));
        (20_000..30_000).for_each(|base| push(&mut tail, base));
        let _ = tail.delete();
        assert!(within(&tail));
    }

    #[test]
    fn a_cut_takes_whole_records_below_it() {
        let tail = tail();
        for (cut, end) in
            [(0, None), (49, None), (50, Some(5)), (59, Some(5)), (80, Some(8)), (999, Some(8))]
        {
            let both = end.map(|end| (StreamOffset(end), StreamOffset(end)));
            assert_eq!(tail.pinned_end(LogOffset(cut)), both, "cut at {cut}");
        }
    }

    /// Lost offsets are uploaded with the batches before them, or alone, and never return.
    #[test]
    fn a_gap_at_the_end_is_uploaded_and_does_not_lower_the_durable_end() {
        let ends = |tail: &Tail, cut| {
            tail.pinned_end(LogOffset(cut)).map(|(uploaded, written)| (uploaded.0, written.0))
        };
        let mut tail = tail();
        assert!(!tail.ends_with_gap());
        tail.recovered(StreamOffset(20));
        assert!(tail.ends_with_gap());
        assert_eq!(ends(&tail, 80), Some((20, 8)));
        assert_eq!(tail.durable_end(LogOffset(80)), StreamOffset(20));
        push(&mut tail, 20);
        assert!(!tail.ends_with_gap());
        assert_eq!(tail.durable_end(LogOffset(80)), StreamOffset(20), "it is not durable yet");
        assert_eq!((ends(&tail, 80), ends(&tail, 210)), (Some((20, 8)), Some((21, 21))));
        let _ = uploaded(&mut tail, 20, Some(range(4, 8)));
        assert_eq!(ends(&tail, 80), None);

        let mut tail = Tail::restored(StreamOffset(0), StreamOffset(4), None, [range(0, 4)].into());
        assert_eq!(ends(&tail, 80), None);
        tail.recovered(StreamOffset(9));
        assert_eq!(ends(&tail, 80), Some((9, 4)), "nothing is written");
        let _ = uploaded(&mut tail, 9, None);
        assert_eq!((ends(&tail, 80), tail.durable_end(LogOffset(0))), (None, StreamOffset(9)));
    }
}
