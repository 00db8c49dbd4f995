//! Rewriting of a stream's batches in objects by the stream's owner: `docs/log-compaction.md`.

use std::panic::resume_unwind;
use std::sync::Arc;

use super::{Destination, Failure, RANGES_AT_A_TIME, Run, Sources, Written, output};
use crate::catalog::ObjectRange;
use crate::error::StoreError;
use crate::output::{Attempt, Output, Source};
use crate::publish::Replacement;
use crate::range::Range;
use crate::shared::Shared;
use crate::store::Store;
use crate::stream::Stream;
use crate::tail::StreamState;
use crate::types::{Batch, StreamOffset};

/// Payload of a step if the size of objects is not bounded.
const STEP_BYTES: u64 = 256 << 20;

/// Rewrites batches. Runs on a thread that may block.
///
/// The output covers the input: its batches follow each other without a gap, from the first offset
/// of the first batch to the end of the last one. There may be fewer or more batches than in the
/// input, and a batch may be empty.
pub trait Rewrite: Send + Sized + 'static {
    /// Takes the next batches, in offset order. Completed ones are added to `out`; others may be
    /// kept until later.
    fn batches(&mut self, batches: Vec<Batch>, out: &mut Vec<Batch>);

    /// Ends the input for now: adds what was kept to `out`, up to `end`.
    fn end(&mut self, end: StreamOffset, out: &mut Vec<Batch>);
}

/// A part of a stream in one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredPart {
    /// The offset of its first batch.
    pub start: StreamOffset,
    /// The offset after its last batch.
    pub end: StreamOffset,
    /// Bytes of payload of its batches.
    pub payload_bytes: u64,
    /// Greatest timestamp of its batches, or its time of creation if none has one.
    pub newest_ms: i64,
}

/// The result of a step of [`Store::rewrite`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rewritten {
    /// The offset up to which the stream is rewritten.
    pub end: StreamOffset,
    /// Bytes of payload that were read.
    pub read_bytes: u64,
    /// Bytes of payload that replace them.
    pub written_bytes: u64,
}

impl Stream {
    /// Returns the parts in objects that end after `from`, in order.
    pub fn stored_parts(&self, from: StreamOffset) -> Vec<StoredPart> {
        let mut parts: Vec<StoredPart> = Vec::new();
        loop {
            let (count, from) = (parts.len(), parts.last().map_or(from, |last| last.end));
            let tail = self.state.tail.lock();
            let ranges = tail.ranges_after(from).take(RANGES_AT_A_TIME);
            parts.extend(ranges.map(|range| StoredPart {
                start: range.start,
                end: range.end,
                payload_bytes: range.payload_bytes,
                newest_ms: range.newest_ms(),
            }));
            drop(tail);
            if parts.len() < count + RANGES_AT_A_TIME {
                return parts;
            }
        }
    }
}

impl Store {
    /// Runs work that may wait on the threads of [`crate::Options::background_threads`], until it
    /// is done or this future is dropped.
    ///
    /// # Errors
    /// The store's runtime is shutting down.
    pub async fn in_background<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.view.objects.background().run(work).await
    }

    /// Passes `state` and each batch in objects from `from` to `to` to `visit`, in order and once.
    /// Bypasses the caches and reads as slowly as object compaction. Ends early when `visit`, which
    /// runs on a thread that may block, returns false. A batch that contains `from` is passed as a
    /// whole.
    ///
    /// # Errors
    /// The stream was deleted, or an object cannot be read.
    pub async fn scan<S: Send + 'static>(
        &self,
        stream: &Stream,
        from: StreamOffset,
        to: StreamOffset,
        state: S,
        visit: fn(&mut S, &[Batch]) -> bool,
    ) -> Result<S, StoreError> {
        let scanned = self.scan_all(stream, from, to, state, visit).await;
        self.classified(scanned).await
    }

    async fn scan_all<S: Send + 'static>(
        &self,
        stream: &Stream,
        mut from: StreamOffset,
        to: StreamOffset,
        mut state: S,
        visit: fn(&mut S, &[Batch]) -> bool,
    ) -> Result<S, StoreError> {
        let shared = self.owner()?;
        while let Some(run) = next_run(shared, &stream.state, from, to)? {
            let first = from.max(stream.start_offset());
            from = run.end();
            let mut sources = Sources::of(shared, &run).await?;
            for range in &run.ranges {
                while let Some(mut batches) = sources.next(range, run.stream.id).await? {
                    batches.retain(|batch| batch.end() > first && batch.base < to);
                    let (visited, goes_on) = blocking(move || {
                        let goes_on = visit(&mut state, &batches);
                        (state, goes_on)
                    })
                    .await?;
                    state = visited;
                    if !goes_on {
                        return Ok(state);
                    }
                }
            }
        }
        Ok(state)
    }

    /// Rewrites what is in objects from `from` on with `rewriter`: whole parts, from the one that
    /// contains `from` (or follows it) up to the one that contains the last offset before `to`, and
    /// at most the payload of one object. Call it again with the rest until [`Rewritten::end`] is
    /// `to` or more: each step is committed by itself and independent of the previous one.
    ///
    /// If this future is dropped, or fails, either nothing has changed or the step is done. Objects
    /// written by a dropped step are deleted by a later run of the store.
    ///
    /// # Errors
    /// The stream was deleted, an object cannot be read or written, another server owns the
    /// objects, or the output of the rewriter does not cover its input
    /// ([`StoreError::InvalidChange`]).
    pub async fn rewrite<R: Rewrite>(
        &self,
        stream: &Stream,
        from: StreamOffset,
        to: StreamOffset,
        rewriter: R,
    ) -> Result<(R, Rewritten), StoreError> {
        // Object compaction and this never work on the same ranges: each selects its ranges with
        // this lock held.
        let shared = self.owner()?;
        let _exclusive = shared.compaction.exclusive.lock().await;
        let Some(run) = next_run(shared, &stream.state, from, to)? else {
            return Ok((rewriter, Rewritten { end: to, read_bytes: 0, written_bytes: 0 }));
        };
        let (end, read_bytes) = (run.end(), run.payload_bytes());
        let done = step(shared, run, rewriter).await.map_err(StoreError::from);
        let (rewriter, written_bytes) = self.classified(done).await?;
        Ok((rewriter, Rewritten { end, read_bytes, written_bytes }))
    }
}

impl Store {
    async fn classified<T>(&self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        match result {
            Err(StoreError::Object(error)) => Err(self.view.classified(error).await.into()),
            result => result,
        }
    }
}

/// Returns the ranges of a step that begins at `from`.
fn next_run(
    shared: &Shared,
    stream: &Arc<StreamState>,
    from: StreamOffset,
    to: StreamOffset,
) -> Result<Option<Run>, StoreError> {
    let tail = stream.tail.lock();
    if tail.deleted {
        return Err(StoreError::no_stream(stream.id));
    }
    let in_reach = tail.ranges_after(from).take_while(|range| range.start < to);
    let ranges: Vec<Range> = in_reach.take(RANGES_AT_A_TIME).cloned().collect();
    drop(tail);
    if ranges.is_empty() {
        return Ok(None);
    }
    let most_bytes = match shared.options.compaction_bytes {
        0 => STEP_BYTES,
        most_bytes => most_bytes,
    };
    let mut run = Run { stream: stream.clone(), ranges, destination: Destination::Alone };
    Ok(Some(run.split_off(most_bytes)))
}

/// Rewrites a run into one object and commits it; returns its payload.
async fn step<R: Rewrite>(
    shared: &Arc<Shared>,
    run: Run,
    rewriter: R,
) -> Result<(R, u64), Failure> {
    let objects = || run.ranges.iter().map(|range| &range.object);
    let source = Source::Objects {
        generation: objects().map(|object| object.generation).max().unwrap_or(0).saturating_add(1),
        created_at_ms: objects().map(|object| object.created_at_ms).max().unwrap_or(0),
    };
    let mut sources = Sources::of(shared, &run).await?;
    let attempt = Attempt::new(shared, shared.catalog.new_object_id());
    let mut writing = Writing {
        stream: run.stream.clone(),
        output: output(shared, &attempt, source, run.payload_bytes()),
        new: None,
        next: None,
    };
    let result = writing.write(&run, &mut sources, rewriter).await;
    let (rewriter, result) = match result {
        Ok(rewriter) => (Some(rewriter), Ok(())),
        Err(failure) => (None, Err(failure)),
    };
    let replace = |new| Replacement { stream: run.stream.clone(), old: run.ranges.clone(), new };
    let replacements = writing.new.map(replace).into_iter().collect();
    let mut written = Written::default();
    written.end_output(shared, writing.output, result, replacements).await?;
    let written_bytes = written.payload_bytes;
    written.commit(shared).await?;
    let released = run.stream.tail.lock().drop_cached_before(run.end());
    shared.cache.release(released);
    Ok((rewriter.expect("nothing has failed"), written_bytes))
}

/// A step in progress.
struct Writing<'a> {
    stream: Arc<StreamState>,
    output: Output<'a>,
    new: Option<ObjectRange>,
    /// Where the next batch must begin; `None` before the first one.
    next: Option<StreamOffset>,
}

impl Writing<'_> {
    /// Writes all of `run`, or nothing if the stream was trimmed past it.
    async fn write<R: Rewrite>(
        &mut self,
        run: &Run,
        sources: &mut Sources<'_>,
        mut rewriter: R,
    ) -> Result<R, Failure> {
        let start = run.stream.tail.lock().start;
        for range in &run.ranges {
            while let Some(mut batches) = sources.next(range, self.stream.id).await? {
                batches.retain(|batch| batch.end() > start);
                let Some(first) = batches.first() else { continue };
                self.next.get_or_insert(first.base);
                let (then, out) = blocking(move || {
                    let mut out = Vec::new();
                    rewriter.batches(batches, &mut out);
                    (rewriter, out)
                })
                .await?;
                rewriter = then;
                self.push(out).await?;
            }
        }
        let end = run.end();
        if self.next.is_none() {
            return Ok(rewriter);
        }
        let (rewriter, out) = blocking(move || {
            let mut out = Vec::new();
            rewriter.end(end, &mut out);
            (rewriter, out)
        })
        .await?;
        self.push(out).await?;
        self.check_next(end)?;
        Ok(rewriter)
    }

    async fn push(&mut self, batches: Vec<Batch>) -> Result<(), Failure> {
        for batch in batches {
            self.check_next(batch.base)?;
            self.next = Some(batch.end());
            if let Some(block) = self.output.push(&self.stream, &batch, None, &mut self.new) {
                self.output.write(block).await?;
            }
        }
        Ok(())
    }

    fn check_next(&self, found: StreamOffset) -> Result<(), StoreError> {
        match self.next {
            Some(next) if next != found => Err(StoreError::InvalidChange(format!(
                "a defect: in the rewritten stream {}, offset {next} is followed by {found}",
                self.stream.id
            ))),
            _ => Ok(()),
        }
    }
}

/// Runs `work` on a thread that may block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, StoreError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Ok(done),
        Err(ended) => match ended.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            Err(cancelled) => Err(StoreError::Failed(cancelled.to_string())),
        },
    }
}
