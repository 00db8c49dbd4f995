//! A stream's handle for reading. It shares only the tail's mutex with the stream's writer, and
//! holds it briefly.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;

use tokio::sync::Notify;

use crate::budget::Budget;
use crate::error::FetchError;
use crate::moved::Moved;
use crate::objects::{Deadline, Part};
use crate::range::Range;
use crate::read_ahead::Reader;
use crate::replay::{History, Replay};
use crate::tail::{Source, StreamState, Tiers};
use crate::types::{Batch, StreamEpoch, StreamId, StreamOffset};
use crate::view::View;

/// The number of objects after which a fetch stops and returns what it has.
const OBJECTS_PER_FETCH: usize = 8;

/// The result of a fetch.
#[derive(Debug)]
pub struct Fetched {
    /// The batches in order. The first contains the requested offset or is the next one after a
    /// gap. A batch from an object keeps at most about twice the memory of its payload alive, not a
    /// larger part of the object.
    pub batches: Vec<Batch>,
    /// The stream's start.
    pub start: StreamOffset,
    /// The offset below which everything is durable: Kafka's high watermark.
    pub durable_end: StreamOffset,
    /// The last batches are from an object, or the next ones are in one and were not waited for.
    pub cold: bool,
}

impl Fetched {
    /// Returns the durable offsets from `from`, where the read began, that no batch has: they are
    /// lost. Empty if `from` is in a batch, or may be in one that was not read.
    pub fn gap(&self, from: StreamOffset) -> std::ops::Range<StreamOffset> {
        let end = match self.batches.first() {
            Some(first) => first.base,
            None if self.cold => from,
            None => self.durable_end,
        };
        from..end.max(from)
    }
}

/// One stream, for reading. To write to it, open it with [`crate::Store::open_stream`]. Cheap to
/// clone.
#[derive(Clone)]
pub struct Stream {
    pub(crate) view: Arc<View>,
    pub(crate) state: Arc<StreamState>,
}

impl Stream {
    pub(crate) fn new(view: Arc<View>, state: Arc<StreamState>) -> Self {
        Self { view, state }
    }

    /// Returns the stream's id.
    pub fn id(&self) -> StreamId {
        self.state.id
    }

    /// Returns the newest epoch with which the stream was opened; 0 if it never was.
    pub fn newest_epoch(&self) -> StreamEpoch {
        self.state.tail.lock().epoch
    }

    /// Returns the offset of the first readable record.
    pub fn start_offset(&self) -> StreamOffset {
        self.state.tail.lock().start
    }

    /// Returns the offset that the next batch must carry; it counts batches that are not durable
    /// yet.
    pub fn next_offset(&self) -> StreamOffset {
        self.state.tail.lock().next
    }

    /// Returns the offset below which everything is durable: Kafka's high watermark.
    pub fn durable_end(&self) -> StreamOffset {
        let durable = self.view.durable();
        self.state.tail.lock().durable_end(durable)
    }

    /// Returns where the tiers of the stream begin and end.
    pub fn tiers(&self) -> Tiers {
        let tail = self.state.tail.lock();
        // After the lock: what is uploaded by now is durable.
        tail.tiers(self.view.durable())
    }

    /// Returns a number that changes whenever the stream's contents were taken over from the chain
    /// ([`crate::Store::follow`]); 0 if this process writes the store.
    pub fn followed(&self) -> u64 {
        self.state.tail.lock().followed
    }

    /// Returns the bytes of payload from the start to the next offset. If a trim ends inside an
    /// object, all of the stream's batches in that object still count.
    pub fn size_bytes(&self) -> u64 {
        self.state.tail.lock().size_bytes()
    }

    /// Returns what the stream has in the object store and has moved since the process started.
    pub fn moved(&self) -> Moved {
        self.state.moved()
    }

    /// Returns durable batches from the one that contains `from`, up to `max_bytes` of payload but
    /// at least one if there is any. Empty at the end.
    ///
    /// It may return less than there is, but never nothing if there is something. No lock is held
    /// while an object is read.
    pub async fn fetch(&self, from: StreamOffset, max_bytes: usize) -> Result<Fetched, FetchError> {
        self.read(from, max_bytes, &mut None).await
    }

    /// Fetches like [`Self::fetch`], but when `enough` completes it returns what it has, perhaps
    /// nothing, instead of waiting for objects. The read that it was waiting for continues for a
    /// while, and the next call that begins where this one ended picks it up. Dropping the future
    /// cancels that read.
    ///
    /// Blocks that do not fit into the block cache are waited for even so: they would be fetched in
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

    /// Fetches like [`Self::fetch`], but only what is in memory: never waits.
    pub fn fetch_now(&self, from: StreamOffset, max_bytes: usize) -> Result<Fetched, FetchError> {
        let mut reading = Reading::new(from, max_bytes);
        for _ in 0..OBJECTS_PER_FETCH {
            let Some(range) = reading.locate(self)? else { break };
            let (objects, budget) = (&self.view.objects, &mut reading.budget);
            let read = objects.fetch_cached(&range.object, self.state.id, reading.next, budget);
            if read.is_empty() {
                break;
            }
            self.add_read(&mut reading, read);
        }
        if reading.is_cold() && !reading.batches.is_empty() {
            let reader = self.view.readers.take(self.state.id, from);
            self.store_reader(reader, reading.next);
        }
        Ok(reading.fetched())
    }

    async fn read(
        &self,
        from: StreamOffset,
        max_bytes: usize,
        deadline: &mut Option<Deadline<'_>>,
    ) -> Result<Fetched, FetchError> {
        let mut reading = Reading::new(from, max_bytes);
        let mut missing = None;
        let mut reader = None;
        for _ in 0..OBJECTS_PER_FETCH {
            let Some(range) = reading.locate(self)? else { break };
            // Taken while the read runs: if this future is dropped, the reader's requests are
            // cancelled.
            reader = reader.or_else(|| self.view.readers.take(self.state.id, from));
            let (objects, budget) = (&self.view.objects, &mut reading.budget);
            let read = objects.fetch(&range.object, self.state.id, reading.next, budget, deadline);
            match read.await {
                Ok(Part { batches, deferred: None }) => {
                    let nothing_there = batches.is_empty() && !reading.budget.is_spent();
                    self.add_read(&mut reading, batches);
                    // Not skipped: batches that the catalog records are lost.
                    if nothing_there && reading.batches.is_empty() {
                        self.state.moved.read_failed();
                        return Err(self.view.read_failed(objects.missing(&range)).await);
                    }
                    if nothing_there {
                        break;
                    }
                }
                Ok(Part { batches, deferred: Some(guard) }) => {
                    self.add_read(&mut reading, batches);
                    let mut reader = reader.unwrap_or_default();
                    reader.waited_for(guard);
                    self.view.readers.store(self.state.id, reading.next, reader);
                    return Ok(reading.fetched());
                }
                Err(_) if !reading.batches.is_empty() => {
                    self.state.moved.read_failed();
                    break;
                }
                // Deleted between the lookup and the read, because the stream was trimmed or its
                // batches are in another object now: look it up again, once per object.
                Err(error) if error.is_not_found() && missing != Some(range.object.id) => {
                    missing = Some(range.object.id);
                    self.view.catch_up().await.map_err(FetchError::Failed)?;
                }
                Err(error) => {
                    self.state.moved.read_failed();
                    return Err(self.view.read_failed(error).await);
                }
            }
        }
        if reading.is_cold() && !reading.batches.is_empty() {
            self.store_reader(reader, reading.next);
        }
        Ok(reading.fetched())
    }

    /// Adds the batches of an object.
    fn add_read(&self, reading: &mut Reading, batches: Vec<Batch>) {
        let before = reading.batches.len();
        reading.add(batches);
        let added = &reading.batches[before..];
        if !added.is_empty() {
            self.state.moved.read(added.iter().map(|batch| batch.payload.len() as u64).sum());
        }
    }

    /// Registers a lagging reader that has read up to `next`. One that has read here before reads
    /// ahead.
    fn store_reader(&self, reader: Option<Reader>, next: StreamOffset) {
        let reader = match reader {
            Some(mut reader) => {
                reader.read_on(&self.view.objects, &self.state, next);
                reader
            }
            None => Reader::default(),
        };
        self.view.readers.store(self.state.id, next, reader);
    }

    /// Returns the offset that the stream could start at by a retention rule: behind its oldest
    /// records in objects, as long as all records of an object are older than `older_than_ms` (by
    /// the object's greatest timestamp, or the time of writing if there is none), or at least
    /// `keep_bytes` of payload remain. This does not trim anything. Returns the start if nothing
    /// can go; what is not uploaded yet never can, and a stream's part of one object goes only as a
    /// whole.
    pub fn retention_point(
        &self,
        older_than_ms: Option<i64>,
        keep_bytes: Option<u64>,
    ) -> StreamOffset {
        self.state.tail.lock().retention_point(older_than_ms, keep_bytes)
    }

    /// Declares that checkpoints need not describe anything before `to`, as if it was trimmed
    /// ([`crate::Fold::fold`]). Nothing else changes and nothing is stored: the owner calls this
    /// again after a restart. Does nothing if a later offset was declared before.
    pub fn raise_checkpoint_start(&self, to: StreamOffset) {
        let mut tail = self.state.tail.lock();
        tail.checkpoint_start = tail.checkpoint_start.max(to);
    }

    /// Returns the checkpoint and all batches after it, taken at one moment, for rebuilding state
    /// at start.
    pub fn replay(&self) -> Replay {
        Replay::of(&self.state.tail.lock())
    }

    /// Returns [`Self::replay`] with positions in the log.
    pub fn history(&self) -> History {
        History::of(&self.state.tail.lock())
    }

    /// Whether offsets of the stream were declared lost by a rebuild, and the metadata had
    /// [`crate::DECLARED_LOSS`] at the opening: the owner has not dealt with the loss yet.
    pub fn has_declared_loss(&self) -> bool {
        self.state.tail.lock().has_declared_loss
    }

    /// Subscribes to the stream: `notify` is woken when more of it becomes durable, it is deleted,
    /// or the store fails. One `Notify` may watch many streams; dropping the [`Watch`] ends the
    /// subscription. Check after subscribing: only later events wake. Wakes with
    /// [`Notify::notify_one`], so only one task may wait, and an event before it waits is not lost.
    pub fn watch(&self, notify: &Arc<Notify>) -> Watch {
        let mut tail = self.state.tail.lock();
        tail.watchers.push(notify.clone());
        // After the push: what becomes durable from now on must wake it.
        if !tail.wake_queued
            && let Some(at) = tail.next_durable(self.view.durable())
        {
            tail.wake_queued = true;
            self.view.wakes.queue(at, self.state.clone());
        }
        Watch { state: self.state.clone(), notify: notify.clone() }
    }
}

/// A read of a stream in progress.
struct Reading {
    batches: Vec<Batch>,
    next: StreamOffset,
    budget: Budget,
    start: StreamOffset,
    durable_end: StreamOffset,
    /// The last lookup found an object.
    cold: bool,
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
            cold: false,
        }
    }

    /// Takes what is in the tail, or returns the range to read next; `None` at the end.
    fn locate(&mut self, stream: &Stream) -> Result<Option<Range>, FetchError> {
        let durable = stream.view.durable();
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
            Source::Cached(cached) => {
                self.cold = false;
                if !self.overlaps(&cached) {
                    self.batches.extend(cached);
                }
                Ok(None)
            }
            Source::Object(range) => {
                self.cold = true;
                Ok(Some(range))
            }
        }
    }

    /// Whether `batches` begin before the end of what was read. After a stream was rewritten, its
    /// batches have other boundaries than earlier ones, which may still be in the log cache or in
    /// an object that is being read. So the next batch may begin inside the last one. A reader that
    /// continues from the end of the last one gets it then.
    fn overlaps(&self, batches: &[Batch]) -> bool {
        let first = batches.first().filter(|_| !self.batches.is_empty());
        first.is_some_and(|first| first.base < self.next)
    }

    /// Adds the batches of an object; ends the read if they overlap what was read.
    fn add(&mut self, batches: Vec<Batch>) {
        if self.overlaps(&batches) {
            self.budget.close();
            return;
        }
        self.next = batches.last().map_or(self.next, Batch::end).max(self.next);
        self.batches.extend(batches);
    }

    fn is_cold(&self) -> bool {
        self.cold
    }

    fn fetched(self) -> Fetched {
        let Self { batches, start, durable_end, cold, .. } = self;
        Fetched { batches, start, durable_end, cold }
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
    use bytes::Bytes;

    use super::*;

    /// A read from an object written before a rewrite, followed by batches written by it.
    #[test]
    fn a_read_ends_before_a_batch_that_overlaps_it() {
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
