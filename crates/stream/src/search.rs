//! Searches a stream by time.
//!
//! A stream may have hundreds of thousands of ranges, and appends wait for the lock of its tail. So
//! a search holds it for a few ranges at a time and continues at the offset that it has reached.
//! Changes of the stream in between do no harm: an upload moves batches to a range behind that
//! offset, a trim removes what must not be visible any more, and a range that replaces others has
//! the same batches at the same offsets.

use std::cmp::Reverse;

use crate::error::FetchError;
use crate::object_error::ObjectError;
use crate::range::Range;
use crate::stream::Stream;
use crate::tail::Tail;
use crate::types::{Batch, ObjectId, StreamOffset};

/// Ranges scanned while the tail is locked; this takes about a microsecond.
const RANGES_AT_A_TIME: usize = 1024;

/// The result of scanning some of the ranges.
struct Scanned {
    /// The range selected among them.
    picked: Option<Range>,
    next: Next,
}

enum Next {
    /// There are more, from this offset on.
    Further(StreamOffset),
    /// These were the last ones; with the batch selected in the tail at the same moment.
    End(Option<Batch>),
}

impl Stream {
    /// Returns the first durable batch whose `max_timestamp_ms` is at least `timestamp_ms`.
    ///
    /// # Errors
    /// The stream was deleted, or an object that may hold the batch cannot be read.
    pub async fn find_time(&self, timestamp_ms: i64) -> Result<Option<Batch>, FetchError> {
        self.find_time_from(StreamOffset(0), timestamp_ms).await
    }

    /// Returns the first durable batch that ends after `from` and whose `max_timestamp_ms` is at
    /// least `timestamp_ms`.
    ///
    /// # Errors
    /// See [`Self::find_time`].
    pub async fn find_time_from(
        &self,
        mut from: StreamOffset,
        timestamp_ms: i64,
    ) -> Result<Option<Batch>, FetchError> {
        let mut gone = None;
        loop {
            let scanned = self.scan(
                from,
                |mut ranges| {
                    Iterator::find(&mut ranges, |range| range.max_timestamp_ms >= timestamp_ms)
                },
                |tail| tail.find_time(from, timestamp_ms, self.view.durable()),
            )?;
            let range = match (scanned.picked, scanned.next) {
                (Some(range), _) => range,
                (None, Next::End(cached)) => return Ok(cached),
                (None, Next::Further(next)) => {
                    from = next;
                    tokio::task::yield_now().await;
                    continue;
                }
            };
            match self.find_time_in(&range, from, timestamp_ms).await {
                Ok(Some(mut batch)) => {
                    batch.own_payload();
                    return Ok(Some(batch));
                }
                // A trim has removed the batch that the range has the timestamp of, or it lies
                // before `from`.
                Ok(None) => from = range.end,
                Err(error) => self.retry_if_moved(&range, error, &mut gone).await?,
            }
        }
    }

    async fn find_time_in(
        &self,
        range: &Range,
        from: StreamOffset,
        timestamp_ms: i64,
    ) -> Result<Option<Batch>, ObjectError> {
        let from = from.max(self.start_offset());
        let objects = &self.view.objects;
        let blocks = objects.blocks(&range.object, self.state.id, from).await?;
        let blocks = blocks.after(from).iter();
        for block in blocks.filter(|block| block.max_timestamp_ms >= timestamp_ms) {
            let block = objects.block(&range.object, block).await?;
            let mut visible = block.batches.iter().filter(|batch| batch.end() > from);
            if let Some(batch) = visible.find(|batch| batch.max_timestamp_ms >= timestamp_ms) {
                return Ok(Some(batch.clone()));
            }
        }
        Ok(None)
    }

    /// Returns the durable batch with the greatest `max_timestamp_ms`, the first one if there are
    /// several.
    ///
    /// # Errors
    /// The stream was deleted, or an object that may hold the batch cannot be read.
    pub async fn max_time(&self) -> Result<Option<Batch>, FetchError> {
        let mut best: Option<Batch> = None;
        let mut read: Vec<ObjectId> = Vec::new();
        let mut gone = None;
        loop {
            // A range's timestamp is an upper bound: a trim may have removed its greatest batch. So
            // the range with the greatest bound is read first, and the search ends when no other
            // one can be better.
            let (range, cached) = self.most_promising(best.as_ref(), &read).await?;
            let cached_is_better = |timestamp_ms: i64| {
                cached.as_ref().is_some_and(|cached| cached.max_timestamp_ms > timestamp_ms)
            };
            let Some(range) = range.filter(|range| !cached_is_better(range.max_timestamp_ms))
            else {
                return Ok(match best {
                    Some(mut best) if !cached_is_better(best.max_timestamp_ms) => {
                        best.own_payload();
                        Some(best)
                    }
                    _ => cached,
                });
            };
            match self.max_time_in(&range, best.clone()).await {
                Ok(found) => {
                    best = found;
                    read.push(range.object.id);
                }
                Err(error) => self.retry_if_moved(&range, error, &mut gone).await?,
            }
        }
    }

    /// Returns the first of the ranges with the greatest timestamp, among those that are not `read`
    /// and may have a better batch than `best`, and the best batch of the tail at the moment of the
    /// last range's scan.
    async fn most_promising(
        &self,
        best: Option<&Batch>,
        read: &[ObjectId],
    ) -> Result<(Option<Range>, Option<Batch>), FetchError> {
        let mut promising: Option<Range> = None;
        let mut from = StreamOffset(0);
        loop {
            let promise = |range: &Range| (range.max_timestamp_ms, Reverse(range.start));
            let may_be_better = |range: &&Range| {
                is_better((range.max_timestamp_ms, range.start), best)
                    && !read.contains(&range.object.id)
            };
            let scanned = self.scan(
                from,
                |ranges| ranges.filter(may_be_better).max_by_key(|range| promise(range)),
                |tail| tail.max_time(self.view.durable()),
            )?;
            let both = promising.into_iter().chain(scanned.picked);
            promising = both.max_by_key(promise);
            match scanned.next {
                Next::End(cached) => return Ok((promising, cached)),
                Next::Further(next) => from = next,
            }
            tokio::task::yield_now().await;
        }
    }

    /// Returns the better one of `best` and the best batch of `range`.
    async fn max_time_in(
        &self,
        range: &Range,
        mut best: Option<Batch>,
    ) -> Result<Option<Batch>, ObjectError> {
        let start = self.start_offset();
        let objects = &self.view.objects;
        let blocks = objects.blocks(&range.object, self.state.id, start).await?;
        let mut blocks: Vec<_> = blocks.after(start).iter().collect();
        blocks.sort_by_key(|block| Reverse(block.max_timestamp_ms));
        for block in blocks {
            if !is_better((block.max_timestamp_ms, block.start), best.as_ref()) {
                continue;
            }
            let block = objects.block(&range.object, block).await?;
            for batch in block.batches.iter().filter(|batch| batch.end() > start) {
                if is_better((batch.max_timestamp_ms, batch.base), best.as_ref()) {
                    best = Some(batch.clone());
                }
            }
        }
        Ok(best)
    }

    /// Scans some ranges from `from` on and, after the last one, the tail.
    fn scan(
        &self,
        from: StreamOffset,
        pick: impl for<'a> FnOnce(&mut dyn Iterator<Item = &'a Range>) -> Option<&'a Range>,
        cached: impl FnOnce(&Tail) -> Option<Batch>,
    ) -> Result<Scanned, FetchError> {
        let tail = self.state.tail.lock();
        if tail.deleted {
            return Err(FetchError::Deleted);
        }
        let mut ranges = tail.ranges_after(from);
        let mut last = from;
        let mut few = ranges.by_ref().take(RANGES_AT_A_TIME).inspect(|range| last = range.end);
        let picked = pick(&mut few).cloned();
        let next = match ranges.next() {
            Some(_) => Next::Further(last),
            None => Next::End(cached(&tail)),
        };
        Ok(Scanned { picked, next })
    }
}

/// Whether a batch with this timestamp and base is to be preferred to `best`.
fn is_better((timestamp_ms, base): (i64, StreamOffset), best: Option<&Batch>) -> bool {
    best.is_none_or(|best| {
        (timestamp_ms, Reverse(base)) > (best.max_timestamp_ms, Reverse(best.base))
    })
}

impl Stream {
    /// Decides whether to retry after an error. A missing object was deleted between the scan and
    /// the read: the stream was trimmed past it, or its batches are in another object now, which
    /// the next scan finds. An object that is missing twice is an error.
    async fn retry_if_moved(
        &self,
        range: &Range,
        error: ObjectError,
        gone: &mut Option<ObjectId>,
    ) -> Result<(), FetchError> {
        if error.is_not_found() && gone.replace(range.object.id) != Some(range.object.id) {
            return self.view.catch_up().await.map_err(FetchError::Failed);
        }
        Err(self.view.read_failed(error).await)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;

    use alluvium_device::sim::Stepper;
    use alluvium_wal::LogOffset;
    use bytes::Bytes;
    use futures::FutureExt;
    use object_store::ObjectStoreExt;
    use uuid::Uuid;

    use super::*;
    use crate::output::{Attempt, Author, Output, Source};
    use crate::request_class::RequestClass;
    use crate::store::tests::small_store;
    use crate::types::{KIND_LOG, StreamId};
    use crate::{Change, Store};

    const BATCHES: u64 = 40;

    fn time(base: u64) -> i64 {
        // Not in order: the time of every fourth batch is earlier by 100 ms.
        (base * 10).cast_signed() - if base % 4 == 3 { 100 } else { 0 }
    }

    fn batch(base: u64) -> Batch {
        let payload = Bytes::from(vec![base as u8; 100]);
        Batch { base: StreamOffset(base), count: 1, max_timestamp_ms: time(base), payload }
    }

    /// Writes some batches as one object; returns its range.
    async fn object(stream: &Stream, id: u64, bases: std::ops::Range<u64>) -> Range {
        let (nonce, name) = (Uuid::from_u128(id.into()), format!("object-{id}"));
        let by = Author { store: nonce, incarnation: nonce, opening: 0, term: 0 };
        let attempt = Attempt { id: ObjectId(1000 + id), nonce, name, by };
        let handle = stream.view.objects.handle(RequestClass::Upload);
        let source = Source::Upload { cut: LogOffset(0) };
        let mut output = Output::new(handle, &attempt, source, 0);
        let mut range = None;
        for base in bases {
            assert!(output.push(&stream.state, &batch(base), None, &mut range).is_none());
        }
        let object = output.finish().await.unwrap();
        Range::of(Arc::new(object), &range.unwrap())
    }

    fn put_in_place(stream: &Stream, ranges: Vec<Range>) {
        let end = ranges.last().unwrap().end;
        *stream.state.tail.lock() = Tail::restored(StreamOffset(0), end, None, ranges.into());
    }

    struct World {
        store: Store,
        stream: Stream,
        _disk: Stepper,
    }

    /// Creates a stream with nothing in memory, in objects with `per_object` batches each.
    async fn world(per_object: u64) -> (World, Vec<Range>) {
        let (store, _disk) = small_store().await;
        let id: StreamId = store.new_stream_ids(1).await.unwrap()[0];
        let create = Change::CreateStream { id, kind: KIND_LOG, label: Bytes::new() };
        store.commit(vec![create]).await.unwrap();
        let stream = store.stream(id).unwrap();
        let mut ranges = Vec::new();
        for first in (0..BATCHES).step_by(per_object as usize) {
            ranges.push(object(&stream, first, first..first + per_object).await);
        }
        put_in_place(&stream, ranges.clone());
        (World { store, stream, _disk }, ranges)
    }

    async fn delete(stream: &Stream, ranges: &[Range]) {
        for range in ranges {
            let name = range.object.name.as_str().into();
            stream.view.objects.store(RequestClass::CleanUp).delete(&name).await.unwrap();
        }
    }

    /// Each query gets as far as reading an object, which is then deleted, with its batches in
    /// another one or nowhere.
    #[tokio::test]
    async fn a_read_of_a_deleted_object_is_retried_at_the_new_one() {
        for question in 0..3 {
            for replaced in [true, false] {
                let (world, ranges) = world(10).await;
                let stream = &world.stream;
                let mut asked = pin!(async {
                    match question {
                        0 => stream.find_time(150).await,
                        1 => stream.max_time().await,
                        _ => {
                            let fetched = stream.fetch(StreamOffset(15), 1).await;
                            fetched.map(|fetched| fetched.batches.into_iter().next())
                        }
                    }
                });
                assert!(asked.as_mut().now_or_never().is_none());
                assert_eq!(stream.view.objects.read_stats().waiting, 1);
                // The read is a task that has not begun, and nothing here waits.
                delete(stream, &ranges).await;
                if replaced {
                    let whole = object(stream, 77, 0..BATCHES).await;
                    put_in_place(stream, vec![whole]);
                }
                let found = asked.await;
                match replaced {
                    true => {
                        let expected = [16, 38, 15][question];
                        assert_eq!(found.unwrap(), Some(batch(expected)), "question {question}");
                    }
                    false => assert!(
                        matches!(&found, Err(FetchError::Failed(_))),
                        "an object that stays missing is an error: {found:?}"
                    ),
                }
                world.store.close().await.unwrap();
            }
        }
    }

    /// With more ranges than one scan covers, all are scanned, wherever the batch is.
    #[tokio::test]
    async fn many_ranges_are_searched_a_few_at_a_time() {
        let (world, ranges) = world(10).await;
        let stream = &world.stream;
        // The first ones have no timestamp and are never read.
        let ahead = 3 * RANGES_AT_A_TIME as u64 + 5;
        let shift = |range: &Range| Range {
            start: StreamOffset(range.start.0 + ahead),
            end: StreamOffset(range.end.0 + ahead),
            ..range.clone()
        };
        let dull = |at: u64| Range {
            start: StreamOffset(at),
            end: StreamOffset(at + 1),
            max_timestamp_ms: -1,
            ..ranges[0].clone()
        };
        let all: Vec<_> = (0..ahead).map(dull).chain(ranges.iter().map(shift)).collect();
        put_in_place(stream, all);
        let mut scans = 0;
        let mut from = StreamOffset(0);
        loop {
            let scanned = stream
                .scan(
                    from,
                    |ranges| ranges.filter(|range| range.max_timestamp_ms > 0).last(),
                    |_| None,
                )
                .unwrap();
            scans += 1;
            match scanned.next {
                Next::Further(next) => {
                    assert!(next > from && scanned.picked.is_none());
                    from = next;
                }
                Next::End(_) => {
                    assert_eq!(scanned.picked.unwrap().end, StreamOffset(ahead + BATCHES));
                    break;
                }
            }
        }
        assert_eq!(scans, 4);
        world.store.close().await.unwrap();
    }
}
