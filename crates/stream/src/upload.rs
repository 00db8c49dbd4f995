//! Cut and upload, always in the order: log cache, object, catalog, trim.
//!
//! A cut is a log offset. Everything below it is durable, in the objects or checkpoints, and
//! committed before the WAL is trimmed to it, so a crash at any point neither loses nor duplicates
//! anything:
//!
//! | crash after | at the next start |
//! |---|---|
//! | the cut, or during the object | the WAL has everything; a partial object is an orphan |
//! | the object, before the commit | the WAL has everything; the object is an orphan |
//! | the commit, before the trim | the catalog has the WAL's batches as uploaded: skipped |
//!
//! An upload writes one object, and one more for each stream with much data. One commit covers all
//! of them, so a crash leaves any of them as orphans, or none. An upload writes at a [`Pace`] until
//! its completion becomes urgent.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use alluvium_wal::LogOffset;
use bytes::Bytes;
use tokio::time::Instant;

use crate::catalog::{ObjectInfo, ObjectRange};
use crate::error::StoreError;
use crate::fold::Fold;
use crate::object::BLOCK_TARGET_BYTES;
use crate::object_error::ObjectError;
use crate::output::{Attempt, Output, Source};
use crate::pace::Pace;
use crate::publish::{Publication, UploadPart};
use crate::request_class::RequestClass;
use crate::retry::Backoff;
use crate::shared::Shared;
use crate::tail::{Cached, StreamState};
use crate::types::{Batch, StreamOffset};

/// A stream with this much in an upload gets an object of its own: reading it transfers no data of
/// other streams, and it can be deleted together with the stream.
pub(crate) const OWN_OBJECT_BYTES: u64 = 8 << 20;
/// Bytes of checkpoints in one delta, which has a limit of 1 GiB. An upload with more takes several
/// deltas; the WAL is trimmed after the last one.
const MAX_CHECKPOINT_BYTES: usize = if cfg!(test) { 64 << 10 } else { 256 << 20 };
/// Number of batches that are folded or collected for writing at a time: what an upload adds to the
/// memory of the log cache.
const CHUNK_BATCHES: usize = 16 << 10;

/// A stream's batches in an upload: from its uploaded end to its last batch below the cut, plus
/// lost offsets after that batch.
#[derive(Clone)]
struct Part {
    stream: Arc<StreamState>,
    from: StreamOffset,
    to: StreamOffset,
    /// The end of the last batch.
    written_to: StreamOffset,
    /// Batches that end at or before this offset are folded, but not written.
    start: StreamOffset,
    /// The checkpoint need not describe anything before this offset.
    checkpoint_start: StreamOffset,
}

impl Part {
    fn is_written(&self) -> bool {
        !self.stream.is_state() && self.written_to > self.start.max(self.from)
    }

    /// Returns the next batches from `from` on, mapped by `taken`; none at the end, or when the
    /// stream was deleted.
    fn chunk<T>(
        &self,
        from: StreamOffset,
        max_bytes: usize,
        taken: impl FnMut(&Cached) -> T,
    ) -> Vec<T> {
        self.stream.tail.lock().pinned_chunk(from, self.to, CHUNK_BATCHES, max_bytes, taken)
    }
}

/// Runs the upload task. Ends when the store fails.
pub(crate) async fn run(shared: Arc<Shared>) {
    let mut last = Instant::now();
    loop {
        let elapsed = tokio::select! {
            () = shared.upload.wanted.notified() => false,
            () = tokio::time::sleep_until(last + shared.options.upload_interval) => true,
        };
        let forced = shared.upload.forced.load(Ordering::Acquire);
        if shared.upload.held.load(Ordering::Acquire) && !forced {
            last = Instant::now();
            continue;
        }
        shared.follow_capacity();
        let threshold_bytes = shared.upload.threshold_bytes.load(Ordering::Relaxed);
        if !(elapsed || forced || shared.log_behind_bytes() >= threshold_bytes) {
            continue;
        }
        let now = Instant::now();
        let gathered = (now - last).min(shared.options.upload_interval);
        last = now;
        match cycle(&shared, gathered).await {
            Ok(()) => {}
            Err(error @ StoreError::Wal(_)) => return shared.fail(error),
            Err(error) => return shared.halt(error),
        }
        shared.numbers.upload_done();
        shared.losses.reads_recovered();
        // In this order: a writer that was refused before tries again after the gate has opened,
        // and forces another upload if there is still no space.
        shared.upload.forced.store(false, Ordering::Release);
        shared.space.open();
    }
}

/// Performs one upload. If the object store is unavailable, retries until it is back or the WAL has
/// failed. Fails permanently if the WAL or the catalog does, or if the owner's [`crate::Fold`]
/// panics.
///
/// `gathered` is the time in which the uploaded data was appended.
async fn cycle(shared: &Arc<Shared>, gathered: Duration) -> Result<(), StoreError> {
    let taken = Instant::now();
    let cut = shared.wal.appended();
    if cut.0 == shared.upload.cut.swap(cut.0, Ordering::AcqRel) {
        // Same as the last cut, to which the log is trimmed.
        *shared.upload.trimmed_to.lock() = taken;
        return Ok(());
    }
    shared.wal.wait_durable(cut).await?;
    let parts = plan(shared, cut);
    let folded = fold(shared, &parts).await?;
    let bytes = folded.iter().map(|folded| folded.written_bytes).sum();
    let mut pace = Pace::new(bytes, gathered, &shared.upload.wanted);
    let sizes = folded.iter().map(|folded| folded.checkpoint.as_ref().map_or(0, Bytes::len));
    let deltas = deltas(sizes, MAX_CHECKPOINT_BYTES);
    for (number, of_delta) in deltas.iter().enumerate() {
        let is_last = number + 1 == deltas.len();
        let (parts, folded) = (&parts[of_delta.clone()], &folded[of_delta.clone()]);
        publish(shared, cut, is_last, parts, folded, &mut pace).await?;
    }
    drop(pace);
    shared.wal.trim_and_mark(..cut, shared.catalog.version()).await?;
    shared.follow_trim();
    *shared.upload.trimmed_to.lock() = taken;
    Ok(())
}

/// Divides the parts of an upload, by index, into neighbours that go into one delta; at least one.
fn deltas(checkpoint_bytes: impl Iterator<Item = usize>, max_bytes: usize) -> Vec<Range<usize>> {
    let mut deltas = vec![Range::default()];
    let mut bytes = 0;
    for (at, part_bytes) in checkpoint_bytes.enumerate() {
        bytes += part_bytes;
        let last = deltas.last_mut().expect("there is one");
        if bytes > max_bytes && last.start < last.end {
            bytes = part_bytes;
            deltas.push(at..at + 1);
        } else {
            last.end = at + 1;
        }
    }
    deltas
}

/// Writes the objects of parts that go into one delta, and publishes it. The last delta of an
/// upload has its cut.
async fn publish(
    shared: &Arc<Shared>,
    cut: LogOffset,
    is_last: bool,
    parts: &[Part],
    folded: &[Folded],
    pace: &mut Pace<'_>,
) -> Result<(), StoreError> {
    loop {
        let (objects, ranges) = write_all(shared, cut, parts, folded, pace).await?;
        let ready = parts.iter().zip(folded).zip(ranges);
        let ready = ready.map(|((part, folded), range)| UploadPart {
            stream: part.stream.clone(),
            uploaded_end: part.to,
            checkpoint: folded.checkpoint.clone(),
            range,
        });
        let cut = is_last.then_some(cut);
        let upload = Publication::Upload { cut, objects: objects.clone(), parts: ready.collect() };
        match shared.publish(upload).await {
            Err(StoreError::ObjectsMissing) => {}
            published => return published,
        }
        tracing::warn!("upload: written objects have disappeared; they are written again");
        let mut table = shared.object_table.lock();
        for object in &objects {
            table.uploading.remove(&object.name);
        }
    }
}

type AllWritten = (Vec<Arc<ObjectInfo>>, Vec<Option<ObjectRange>>);

/// Writes all objects of an upload and returns the range of each part.
async fn write_all(
    shared: &Shared,
    cut: LogOffset,
    parts: &[Part],
    folded: &[Folded],
    pace: &mut Pace<'_>,
) -> Result<AllWritten, StoreError> {
    let mut objects = Vec::new();
    let mut ranges = vec![None; parts.len()];
    for together in objects_of(parts, folded) {
        let members: Vec<&Part> = together.iter().map(|at| &parts[*at]).collect();
        let bytes = together.iter().map(|at| folded[*at].written_bytes).sum();
        let (object, written) = write_until_done(shared, cut, &members, bytes, pace).await?;
        objects.push(Arc::new(object));
        for (at, range) in together.into_iter().zip(written) {
            ranges[at] = range;
        }
    }
    Ok((objects, ranges))
}

/// Returns what lies below the cut, by stream. An append holds the lock of its stream's tail from
/// the WAL to the push, and the cut was taken before the tails are locked here, so every batch
/// below the cut is in its tail by now.
fn plan(shared: &Shared, cut: LogOffset) -> Vec<Part> {
    let streams: Vec<_> = shared.streams.read().values().cloned().collect();
    let parts = streams.into_iter().filter_map(|stream| {
        let tail = stream.tail.lock();
        let checkpoint_start = tail.start.max(tail.checkpoint_start);
        let (to, written_to) = tail.pinned_end(cut)?;
        let (from, start) = (tail.uploaded_end, tail.start);
        drop(tail);
        Some(Part { stream, from, to, written_to, start, checkpoint_start })
    });
    let mut parts: Vec<_> = parts.collect();
    parts.sort_by_key(|part| part.stream.id);
    parts
}

/// Assigns parts, by index, to objects: large streams get their own. Parts that are not written are
/// in none.
fn objects_of(parts: &[Part], folded: &[Folded]) -> Vec<Vec<usize>> {
    let mut objects = Vec::new();
    let mut shared = Vec::new();
    for (at, (part, folded)) in parts.iter().zip(folded).enumerate() {
        match part.is_written() {
            true if folded.written_bytes >= OWN_OBJECT_BYTES => objects.push(vec![at]),
            true => shared.push(at),
            false => {}
        }
    }
    if !shared.is_empty() {
        objects.push(shared);
    }
    objects
}

/// The result of folding a part's batches.
struct Folded {
    /// The stream's checkpoint at the part's end.
    checkpoint: Option<Bytes>,
    /// Bytes of payload to be written.
    written_bytes: u64,
}

/// Folds each part into its stream's checkpoint.
async fn fold(shared: &Arc<Shared>, parts: &[Part]) -> Result<Vec<Folded>, StoreError> {
    // Without a reference to the store: a fold may outlive the closing of the store and must not
    // keep the WAL open.
    let (owner, parts) = (shared.fold.clone(), parts.to_vec());
    let fold = move || parts.iter().map(|part| fold_part(&*owner, part)).collect();
    tokio::task::spawn_blocking(fold)
        .await
        .map_err(|error| StoreError::Failed(format!("cannot fold a checkpoint: {error}")))
}

fn fold_part(fold: &dyn Fold, part: &Part) -> Folded {
    let mut checkpoint = part.stream.tail.lock().checkpoint.clone();
    let mut written_bytes = 0;
    let mut from = part.from;
    while from < part.to {
        let batches = part.chunk(from, usize::MAX, Cached::to_batch);
        if batches.is_empty() && part.stream.tail.lock().deleted {
            break; // and its checkpoint is gone
        }
        // The checkpoint must include lost offsets after the last batch.
        let to = batches.last().map_or(part.to, Batch::end);
        let offsets = std::mem::replace(&mut from, to)..to;
        if part.is_written() {
            let written = batches.iter().filter(|batch| batch.end() > part.start);
            written_bytes += written.map(|batch| batch.payload.len() as u64).sum::<u64>();
        }
        checkpoint = fold
            .fold(
                part.stream.id,
                part.stream.kind,
                offsets,
                part.checkpoint_start,
                checkpoint.as_deref(),
                &batches,
            )
            .map(Bytes::from);
    }
    Folded { checkpoint, written_bytes }
}

type Written = (ObjectInfo, Vec<Option<ObjectRange>>);

/// Writes an object, with retries; paced until the first error.
async fn write_until_done(
    shared: &Shared,
    cut: LogOffset,
    parts: &[&Part],
    payload_bytes: u64,
    pace: &mut Pace<'_>,
) -> Result<Written, StoreError> {
    let id = shared.catalog.new_object_id();
    let mut backoff = Backoff::new(shared.options.retry());
    loop {
        let attempt = Attempt::new(shared, id);
        let (handle, source) =
            (shared.objects.handle(RequestClass::Upload), Source::Upload { cut });
        let mut output = Output::new(handle, &attempt, source, payload_bytes);
        let error = match write(shared, &mut output, pace, parts).await {
            Ok(written) => return Ok(written),
            Err(error) => error,
        };
        output.give_up(shared).await;
        pace.end();
        wait_after(shared, &mut backoff, &error).await?;
    }
}

async fn write(
    shared: &Shared,
    output: &mut Output<'_>,
    pace: &mut Pace<'_>,
    parts: &[&Part],
) -> Result<Written, ObjectError> {
    let mut ranges = Vec::with_capacity(parts.len());
    for part in parts {
        let mut range: Option<ObjectRange> = None;
        let mut from = part.from;
        while part.is_written() {
            let with_checksum = |batch: &Cached| (batch.to_batch(), batch.crc32c);
            let batches = part.chunk(from, BLOCK_TARGET_BYTES, with_checksum);
            let Some((last, _)) = batches.last() else { break };
            from = last.end();
            for (batch, crc32c) in batches.iter().filter(|(batch, _)| batch.end() > part.start) {
                let block = output.push(&part.stream, batch, Some(*crc32c), &mut range);
                if let Some(block) = block {
                    pace.wait(block.content_length() as u64, || shared.is_upload_urgent()).await;
                    output.write(block).await?;
                }
            }
            // Encoding never waits; let other tasks use the thread.
            tokio::task::yield_now().await;
        }
        ranges.push(range);
    }
    Ok((output.finish().await?, ranges))
}

/// Waits after an object could not be written. Fails when the WAL does: a store that accepts
/// nothing any more leaves the upload to the next one.
async fn wait_after(
    shared: &Shared,
    backoff: &mut Backoff,
    error: &ObjectError,
) -> Result<(), StoreError> {
    let hint = match error.is_permanent() {
        true => "; retries fail until the bucket or the credentials are changed",
        false => "",
    };
    let what = format!("cannot write: {error}{hint}");
    let failures = shared.numbers.upload_failed(&what);
    let wait = backoff.failed();
    tracing::warn!(
        "upload: {what}; attempt {failures} failed, next attempt in {wait:?}; the WAL keeps the \
         data"
    );
    tokio::select! {
        () = tokio::time::sleep(wait) => Ok(()),
        // No log reaches this offset, so this resolves only when the WAL stops.
        stopped = shared.wal.wait_durable(LogOffset(u64::MAX)) => Ok(stopped?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Change;
    use crate::store::tests::small_store_with;
    use crate::types::{KIND_LOG, NewBatch, StreamEpoch, StreamId};

    #[test]
    fn the_checkpoints_of_a_delta_have_a_limit() {
        let deltas = |sizes: &[usize]| deltas(sizes.iter().copied(), 10);
        assert_eq!(deltas(&[]), [Range::default()]);
        assert_eq!(deltas(&[4, 6, 1]), [0..2, 2..3]);
        assert_eq!(deltas(&[4, 6, 1, 20, 0, 9, 1]), [0..2, 2..3, 3..4, 4..7]);
    }

    /// A fold with large checkpoints.
    struct Large;

    impl Fold for Large {
        fn fold(
            &self,
            stream: StreamId,
            _: u8,
            _: Range<StreamOffset>,
            _: StreamOffset,
            _: Option<&[u8]>,
            _: &[Batch],
        ) -> Option<Vec<u8>> {
            Some(vec![stream.0 as u8; 30 << 10])
        }
    }

    #[tokio::test]
    async fn an_upload_with_many_large_checkpoints_takes_several_deltas() {
        let (store, _disk) = small_store_with(Arc::new(Large)).await;
        let ids = store.new_stream_ids(7).await.unwrap();
        let create =
            |id: &StreamId| Change::CreateStream { id: *id, kind: KIND_LOG, label: Bytes::new() };
        store.commit(ids.iter().map(create).collect()).await.unwrap();
        for id in &ids {
            let stream = store.open_stream(*id, StreamEpoch(0)).await.unwrap();
            let payload = Bytes::from_static(b"payload");
            let base = StreamOffset(0);
            let batch = NewBatch { base, count: 1, max_timestamp_ms: -1, payload };
            stream.append(batch).unwrap().await.unwrap();
        }
        let number =
            || async { store.owner().unwrap().catalog.writer.lock().await.state().head.number };
        let before = number().await;
        store.flush().await.unwrap();
        assert_eq!(number().await, before + 4, "two checkpoints in each");
        let state = store.owner().unwrap().catalog.writer.lock().await.state().clone();
        for id in &ids {
            let stream = &state.streams[id];
            assert_eq!((stream.uploaded_end, stream.ranges.len()), (StreamOffset(1), 1));
            assert_eq!(stream.checkpoint.as_ref().unwrap()[0], id.0 as u8);
        }
        assert!(state.header.cut > LogOffset(0));
        store.close().await.unwrap();
    }
}
