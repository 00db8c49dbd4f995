//! A stream's handle for reading. With its writer it shares the tail's mutex for moments, and
//! nothing else.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;

use alluvium_wal::LogOffset;
use bytes::Bytes;
use tokio::sync::Notify;

use crate::ahead::Reader;
use crate::objects::{Budget, Enough, Part};
use crate::store::{Shared, StoreError};
use crate::tail::{Cached, Range, Source, StreamState, Tail};
use crate::types::{Batch, StreamEpoch, StreamId, StreamOffset};

/// A fetch that goes on from one object to the next stops after this many, with what it has.
const OBJECTS_PER_FETCH: usize = 8;

/// Why nothing was read.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// Before the start or after the end.
    #[error("offset {offset} is outside {start}..={end}")]
    OutOfRange {
        /// Asked for.
        offset: StreamOffset,
        /// The stream's start.
        start: StreamOffset,
        /// The stream's next offset.
        end: StreamOffset,
    },
    /// The stream is gone.
    #[error("the stream was deleted")]
    Deleted,
    /// An object could not be read. If it is damaged or missing ([`crate::ObjectError::is_loss`])
    /// its records are lost; else another try may succeed.
    #[error("{0}")]
    Failed(StoreError),
}

/// A fetch's answer.
#[derive(Debug)]
pub struct Fetched {
    /// In order; the first contains the wanted offset (or is the next one after a gap). What comes
    /// from an object keeps about twice the memory of its payload at most, and no larger part of
    /// the object.
    pub batches: Vec<Batch>,
    /// The stream's start.
    pub start: StreamOffset,
    /// Everything before it is durable: Kafka's high watermark.
    pub durable_end: StreamOffset,
    /// The last batches are from an object, or what follows is in one and was not waited for.
    pub late: bool,
}

impl Fetched {
    /// The durable offsets from `from` on, where the read began, that no batch has: they are lost.
    /// Empty if there is a batch, or may be one that was not read.
    pub fn gap(&self, from: StreamOffset) -> std::ops::Range<StreamOffset> {
        let end = match self.batches.first() {
            Some(first) => first.base,
            None if self.late => from,
            None => self.durable_end,
        };
        from..end.max(from)
    }
}

/// What a stream's owner rebuilds its state from: fold `batches` into `checkpoint`.
#[derive(Clone, Debug)]
pub struct Replay {
    /// As [`crate::Fold`] returned it at the last upload.
    pub checkpoint: Option<Bytes>,
    /// The checkpoint describes the stream up to here.
    pub checkpoint_end: StreamOffset,
    /// All batches after it, in order, durable or not, and below the stream's start too if a trim
    /// has passed them.
    pub batches: Vec<Batch>,
    /// Where the stream ends: behind the last batch, or further if what followed it is lost.
    pub end: StreamOffset,
}

impl Replay {
    pub(crate) fn of(tail: &Tail) -> Self {
        Self {
            checkpoint: tail.checkpoint.clone(),
            checkpoint_end: tail.uploaded_end,
            batches: tail.pinned().map(Cached::to_batch).collect(),
            end: tail.next,
        }
    }

    /// The offsets that are lost: where a batch does not begin at the end of what is before it, and
    /// behind the last one.
    pub fn gaps(&self) -> Vec<std::ops::Range<StreamOffset>> {
        let starts = self.batches.iter().map(|batch| batch.base).chain([self.end]);
        let ends = [self.checkpoint_end].into_iter().chain(self.batches.iter().map(Batch::end));
        ends.zip(starts).filter(|(end, start)| end < start).map(|(end, start)| end..start).collect()
    }
}

/// A [`Replay`], and where in the log its batches lie.
#[derive(Clone, Debug)]
pub struct History {
    /// The stream.
    pub replay: Replay,
    /// Of each batch, the end of its record. All streams share the log, so these positions tell in
    /// which order batches of different streams were appended.
    pub log_ends: Vec<LogOffset>,
}

impl History {
    pub(crate) fn of(tail: &Tail) -> Self {
        let log_ends = tail.pinned().map(|cached| cached.log_end).collect();
        Self { replay: Replay::of(tail), log_ends }
    }
}

/// One stream, to read from; who writes to it has opened it ([`crate::Store::open_stream`]). Cheap
/// to clone.
#[derive(Clone)]
pub struct Stream {
    pub(crate) shared: Arc<Shared>,
    pub(crate) state: Arc<StreamState>,
}

impl Stream {
    pub(crate) fn new(shared: Arc<Shared>, state: Arc<StreamState>) -> Self {
        Self { shared, state }
    }

    /// Its id.
    pub fn id(&self) -> StreamId {
        self.state.id
    }

    /// The newest epoch with which it was opened; 0 if it never was.
    pub fn newest_epoch(&self) -> StreamEpoch {
        self.state.tail.lock().epoch
    }

    /// Records before it are gone.
    pub fn start_offset(&self) -> StreamOffset {
        self.state.tail.lock().start
    }

    /// The offset that the next batch must carry; counts batches that are not durable yet.
    pub fn next_offset(&self) -> StreamOffset {
        self.state.tail.lock().next
    }

    /// Everything before it is durable: Kafka's high watermark.
    pub fn durable_end(&self) -> StreamOffset {
        let durable = self.shared.wal.durable();
        self.state.tail.lock().durable_end(durable)
    }

    /// Payload from start to next, in bytes. Batches of an object that a trim has passed count
    /// until it has passed all that the object has of this stream.
    pub fn size_bytes(&self) -> u64 {
        self.state.tail.lock().size_bytes()
    }

    /// Durable batches from the one containing `from`, up to `max_bytes` of payload, at least one
    /// if there is any. Empty at the end.
    ///
    /// May return less than there is, but never nothing if there is something. No lock is held
    /// while an object is read.
    pub async fn fetch(&self, from: StreamOffset, max_bytes: usize) -> Result<Fetched, FetchError> {
        self.read(from, max_bytes, &mut None).await
    }

    /// As [`Self::fetch`], but when `enough` completes it ends with what there is, perhaps nothing,
    /// instead of waiting for objects. What it was waiting for goes on for a while, and the next
    /// call that begins where this one has ended finds it. Dropping the future gives it up.
    ///
    /// What the cache of blocks has no place for is waited for all the same: it would be fetched in
    /// vain again and again.
    pub async fn fetch_until(
        &self,
        from: StreamOffset,
        max_bytes: usize,
        enough: impl Future<Output = ()> + Send,
    ) -> Result<Fetched, FetchError> {
        let enough = pin!(enough);
        self.read(from, max_bytes, &mut Some(enough)).await
    }

    /// As [`Self::fetch`], of what is in memory: never waits.
    pub fn fetch_now(&self, from: StreamOffset, max_bytes: usize) -> Result<Fetched, FetchError> {
        let mut reading = Reading::new(from, max_bytes);
        for _ in 0..OBJECTS_PER_FETCH {
            let Some(range) = reading.look(self)? else { break };
            let (objects, budget) = (&self.shared.objects, &mut reading.budget);
            let read = objects.fetch_cached(&range.object, self.state.id, reading.next, budget);
            if read.is_empty() {
                break;
            }
            reading.add(read);
        }
        if reading.is_late() && !reading.batches.is_empty() {
            let reader = self.shared.readers.take(self.state.id, from);
            self.leave(reader, reading.next);
        }
        Ok(reading.fetched())
    }

    async fn read(
        &self,
        from: StreamOffset,
        max_bytes: usize,
        until: &mut Option<Enough<'_>>,
    ) -> Result<Fetched, FetchError> {
        let mut reading = Reading::new(from, max_bytes);
        let mut missing = None;
        let mut reader = None;
        for _ in 0..OBJECTS_PER_FETCH {
            let Some(range) = reading.look(self)? else { break };
            // Taken while it reads: if this is dropped, so is what is on its way for the reader.
            reader = reader.or_else(|| self.shared.readers.take(self.state.id, from));
            let (objects, budget) = (&self.shared.objects, &mut reading.budget);
            let read = objects.fetch(&range.object, self.state.id, reading.next, budget, until);
            match read.await {
                Ok(Part { batches, late: None }) => {
                    let nothing_there = batches.is_empty() && !reading.budget.is_spent();
                    reading.add(batches);
                    // Not passed over: what the catalog says to be there is lost.
                    if nothing_there && reading.batches.is_empty() {
                        return Err(self.shared.read_failed(objects.missing(&range)).await);
                    }
                    if nothing_there {
                        break;
                    }
                }
                Ok(Part { batches, late: Some(ticket) }) => {
                    reading.add(batches);
                    let mut reader = reader.unwrap_or_default();
                    reader.waited_for(ticket);
                    self.shared.readers.leave(self.state.id, reading.next, reader);
                    return Ok(reading.fetched());
                }
                Err(_) if !reading.batches.is_empty() => break,
                // Deleted between the look and the read, because the stream was trimmed, or its
                // batches are in another object now: look again, once per object.
                Err(error) if error.is_not_found() && missing != Some(range.object.id) => {
                    missing = Some(range.object.id);
                }
                Err(error) => {
                    return Err(self.shared.read_failed(error).await);
                }
            }
        }
        if reading.is_late() && !reading.batches.is_empty() {
            self.leave(reader, reading.next);
        }
        Ok(reading.fetched())
    }

    /// A late reader has read up to `next`. Who has read before reads ahead.
    fn leave(&self, reader: Option<Reader>, next: StreamOffset) {
        let reader = match reader {
            Some(mut reader) => {
                reader.read_on(&self.shared.objects, &self.state, next);
                reader
            }
            None => Reader::default(),
        };
        self.shared.readers.leave(self.state.id, next, reader);
    }

    /// Where the stream could start by a rule of retention: behind its oldest records in objects,
    /// as long as all of an object's were older than `older_than_ms` (by their greatest timestamp,
    /// or the time of writing if there is none), or `keep_bytes` of payload would be left. Nothing
    /// is trimmed by this. The start if nothing can go; what is not uploaded yet never can, nor a
    /// part of what lies in one object.
    pub fn retention_point(
        &self,
        older_than_ms: Option<i64>,
        keep_bytes: Option<u64>,
    ) -> StreamOffset {
        self.state.tail.lock().retention_point(older_than_ms, keep_bytes)
    }

    /// Tell that checkpoints need not speak of what lies before `to`, as if it was trimmed
    /// ([`crate::Fold::fold`]). Nothing else changes, and nothing is stored: who opens the stream
    /// after a restart says it again. Does nothing if more was said.
    pub fn settle(&self, to: StreamOffset) {
        let mut tail = self.state.tail.lock();
        tail.settled = tail.settled.max(to);
    }

    /// Checkpoint and all batches after it, taken at one moment, for rebuilding state at start.
    pub fn replay(&self) -> Replay {
        Replay::of(&self.state.tail.lock())
    }

    /// As [`Self::replay`], with positions in the log.
    pub fn history(&self) -> History {
        History::of(&self.state.tail.lock())
    }

    /// Be woken when more of the stream becomes durable, it is deleted, or the store fails. One
    /// `Notify` may watch many streams; dropping the [`Watch`] ends it. Check after subscribing:
    /// only later events wake. Wakes with [`Notify::notify_one`], so one task waits and an event
    /// before it waits is not lost.
    pub fn watch(&self, notify: &Arc<Notify>) -> Watch {
        let mut tail = self.state.tail.lock();
        tail.watchers.push(notify.clone());
        // After the push: what becomes durable from here on has to wake it.
        if !tail.wake_queued
            && let Some(at) = tail.next_durable(self.shared.wal.durable())
        {
            tail.wake_queued = true;
            self.shared.wakes.queue(at, self.state.clone());
        }
        Watch { state: self.state.clone(), notify: notify.clone() }
    }
}

/// A read of a stream, as far as it has come.
struct Reading {
    batches: Vec<Batch>,
    next: StreamOffset,
    budget: Budget,
    start: StreamOffset,
    durable_end: StreamOffset,
    /// The last look has found an object.
    late: bool,
}

impl Reading {
    fn new(from: StreamOffset, max_bytes: usize) -> Self {
        let none = StreamOffset(0);
        let budget = Budget::new(max_bytes);
        Self {
            batches: Vec::new(),
            next: from,
            budget,
            start: none,
            durable_end: none,
            late: false,
        }
    }

    /// Where it goes on: takes what is in the tail, or returns the range to read next; `None` at
    /// the end.
    fn look(&mut self, stream: &Stream) -> Result<Option<Range>, FetchError> {
        let durable = stream.shared.wal.durable();
        let tail = stream.state.tail.lock();
        if tail.deleted {
            return Err(FetchError::Deleted);
        }
        (self.start, self.durable_end) = (tail.start, tail.durable_end(durable));
        if self.next < tail.start || self.next > tail.next {
            if !self.batches.is_empty() {
                return Ok(None); // trimmed meanwhile
            }
            let (offset, start, end) = (self.next, tail.start, tail.next);
            return Err(FetchError::OutOfRange { offset, start, end });
        }
        if self.budget.is_spent() {
            return Ok(None);
        }
        match tail.source(self.next, &mut self.budget, durable) {
            Source::Cached(young) => {
                self.late = false;
                if !self.overlaps(&young) {
                    self.batches.extend(young);
                }
                Ok(None)
            }
            Source::Object(range) => {
                self.late = true;
                Ok(Some(range))
            }
        }
    }

    /// Whether `batches` begin before the end of what there is. Where a stream was written anew,
    /// its batches have other ends than those from before, which the log cache, or an object that
    /// is still read, may have: so what follows may begin within the last one. Who goes on from its
    /// end gets it then, by itself.
    fn overlaps(&self, batches: &[Batch]) -> bool {
        let first = batches.first().filter(|_| !self.batches.is_empty());
        first.is_some_and(|first| first.base < self.next)
    }

    /// What an object has given; ends the read if it cannot follow what there is.
    fn add(&mut self, batches: Vec<Batch>) {
        if self.overlaps(&batches) {
            self.budget.close();
            return;
        }
        self.next = batches.last().map_or(self.next, Batch::end).max(self.next);
        self.batches.extend(batches);
    }

    fn is_late(&self) -> bool {
        self.late
    }

    fn fetched(self) -> Fetched {
        let Self { batches, start, durable_end, late, .. } = self;
        Fetched { batches, start, durable_end, late }
    }
}

/// A subscription; see [`Stream::watch`].
#[must_use = "dropping it ends the subscription"]
pub struct Watch {
    state: Arc<StreamState>,
    notify: Arc<Notify>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut tail = self.state.tail.lock();
        if let Some(at) =
            tail.watchers.iter().position(|watcher| Arc::ptr_eq(watcher, &self.notify))
        {
            tail.watchers.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An object that was read from before, and then what was written anew.
    #[test]
    fn a_read_ends_where_what_follows_begins_before_its_end() {
        let batch = |base, count| Batch {
            base: StreamOffset(base),
            count,
            max_timestamp_ms: 0,
            payload: Bytes::from_static(b"x"),
        };
        let mut reading = Reading::new(StreamOffset(3), 100);
        for batch in [batch(2, 2), batch(4, 4), batch(7, 2), batch(8, 1)] {
            if !reading.budget.is_spent() {
                assert!(reading.budget.take(1));
                reading.add(vec![batch]);
            }
        }
        assert_eq!(reading.next, StreamOffset(8));
        assert_eq!(reading.batches, [batch(2, 2), batch(4, 4)]);
    }
}
