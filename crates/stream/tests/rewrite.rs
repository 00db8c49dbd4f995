//! Streams that their owner rewrites: other batches over the same offsets.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use alluvium_stream::{Batch, Rewrite, Store, StoreError, Stream, StreamOffset};
use common::*;

const WAL_BYTES: u64 = 1 << 20;

/// Joins this number of batches into one, with all their payloads.
struct Join {
    count: usize,
    kept: Vec<Batch>,
    /// Omits the last batch of all: a defect.
    forgets: bool,
}

impl Join {
    fn new(count: usize) -> Self {
        Self { count, kept: Vec::new(), forgets: false }
    }

    fn join(&mut self, out: &mut Vec<Batch>) {
        let kept = std::mem::take(&mut self.kept);
        let (Some(first), Some(last)) = (kept.first(), kept.last()) else { return };
        out.push(Batch {
            base: first.base,
            count: (last.end().0 - first.base.0) as u32,
            max_timestamp_ms: kept.iter().map(|batch| batch.max_timestamp_ms).max().unwrap(),
            payload: kept.iter().flat_map(|batch| batch.payload.clone()).collect(),
        });
    }
}

impl Rewrite for Join {
    fn batches(&mut self, batches: Vec<Batch>, out: &mut Vec<Batch>) {
        for batch in batches {
            self.kept.push(batch);
            if self.kept.len() == self.count {
                self.join(out);
            }
        }
    }

    fn end(&mut self, _end: StreamOffset, out: &mut Vec<Batch>) {
        self.join(out);
        if self.forgets {
            out.pop();
        }
    }
}

/// Rewrites all of a stream; returns the number of steps.
async fn rewrite(
    store: &Store,
    stream: &Stream,
    to: u64,
    mut join: Join,
) -> Result<usize, StoreError> {
    let (mut at, mut steps) = (stream.start_offset(), 0);
    while at < StreamOffset(to) {
        let (rewriter, done) = store.rewrite(stream, at, StreamOffset(to), join).await?;
        (join, at, steps) = (rewriter, done.end, steps + 1);
    }
    Ok(steps)
}

/// Checks that the batches follow each other and together have these bytes.
fn assert_same(read: &[Batch], wanted: &[Batch]) {
    for (one, next) in read.iter().zip(&read[1..]) {
        assert_eq!(one.end(), next.base, "they follow each other");
    }
    assert_eq!(read.last().unwrap().end(), wanted.last().unwrap().end());
    let bytes = |batches: &[Batch]| -> Vec<u8> {
        batches.iter().flat_map(|batch| batch.payload.clone()).collect()
    };
    assert!(bytes(read) == bytes(wanted), "{} batches, {}", read.len(), wanted.len());
}

async fn seen(store: &Store, stream: &Stream, from: u64, to: u64) -> Vec<Batch> {
    let visit = |seen: &mut Vec<Batch>, batches: &[Batch]| {
        seen.extend_from_slice(batches);
        true
    };
    let (from, to) = (StreamOffset(from), StreamOffset(to));
    store.scan(stream, from, to, Vec::new(), visit).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn rewritten_batches_are_read_afterwards() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let (stream, batches) = three_objects(&server).await;
    let id = stream.id();
    assert_eq!(seen(&server.store, &stream, 0, 60).await, batches);
    assert_eq!(seen(&server.store, &stream, 21, 41).await, batches[10..21]);
    let parts = stream.stored_parts(StreamOffset(25));
    let ends: Vec<_> = parts.iter().map(|part| (part.start.0, part.end.0)).collect();
    assert_eq!(ends, [(20, 40), (40, 60)]);
    // The last part stays as it is.
    assert_eq!(rewrite(&server.store, &stream, 39, Join::new(4)).await.unwrap(), 1);
    let anew = seen(&server.store, &stream, 0, 60).await;
    assert_eq!(read_from(&stream, 0, 1 << 20).await, anew, "the log cache has dropped them");
    assert_eq!(anew.len(), 5 + 10);
    assert_same(&anew, &batches);
    assert_eq!(server.store.stats().objects, 2);
    drop(stream);
    server.crash(&mut world);
    let server = world.start().await;
    let stream = server.open(id).await;
    assert_eq!(read_from(&stream, 0, 1).await, anew);
    assert_eq!(read_from(&stream, 0, 1 << 20).await, anew);
    let within = stream.fetch(StreamOffset(13), 1).await.unwrap().batches;
    assert_eq!((within[0].base.0, within[0].end().0), (8, 16));
    drop(stream);
    server.close().await;
}

/// The batches in the log cache have other boundaries.
#[tokio::test(flavor = "multi_thread")]
async fn cached_batches_are_read_behind_rewritten_ones() {
    let world = World::new(WAL_BYTES, 2);
    let server = world.start().await;
    let (stream, mut batches) = three_objects(&server).await;
    let id = stream.id();
    drop(stream);
    server.close().await;
    let server = world.start().await;
    let stream = server.open(id).await;
    for base in 30..40 {
        let batch = batch(id, base * 2, 2, 1000);
        append(&server.store, &stream, &batch).await.await.unwrap();
        batches.push(batch);
    }
    server.store.flush().await.unwrap();
    assert_eq!(rewrite(&server.store, &stream, 80, Join::new(4)).await.unwrap(), 1);
    for max_bytes in [1, 10_000, 1 << 20] {
        let mut from = StreamOffset(0);
        while from < StreamOffset(80) {
            let read = stream.fetch(from, max_bytes).await.unwrap().batches;
            let last = read.last().unwrap().end();
            assert!(read[0].base <= from && last > from);
            for (one, next) in read.iter().zip(&read[1..]) {
                assert_eq!(one.end(), next.base);
            }
            from = last;
        }
    }
    drop(stream);
    server.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_that_does_not_cover_its_input_is_refused() {
    let world = World::new(WAL_BYTES, 3);
    let server = world.start().await;
    let (stream, batches) = three_objects(&server).await;
    let join = Join { forgets: true, ..Join::new(7) };
    let refused = rewrite(&server.store, &stream, 60, join).await;
    assert!(matches!(refused, Err(StoreError::InvalidChange(_))), "{refused:?}");
    assert_eq!(seen(&server.store, &stream, 0, 60).await, batches);
    assert_eq!(names(&world).await.len(), 3, "nothing is left of it");
    server.store.commit(vec![delete(stream.id())]).await.unwrap();
    let refused = rewrite(&server.store, &stream, 60, Join::new(2)).await;
    assert!(matches!(refused, Err(StoreError::InvalidChange(_))), "{refused:?}");
    drop(stream);
    server.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn trimmed_batches_are_left_out() {
    let world = World::new(WAL_BYTES, 4);
    let server = world.start().await;
    let (stream, batches) = three_objects(&server).await;
    let trim = alluvium_stream::Change::TrimStream {
        id: stream.id(),
        epoch: stream.epoch(),
        to: StreamOffset(27),
    };
    server.store.commit(vec![trim]).await.unwrap();
    assert_eq!(rewrite(&server.store, &stream, 60, Join::new(3)).await.unwrap(), 1);
    let parts = stream.stored_parts(StreamOffset(0));
    assert_eq!((parts.len(), parts[0].start.0, parts[0].end.0), (1, 26, 60));
    assert_same(&seen(&server.store, &stream, 0, 60).await, &batches[13..]);
    drop(stream);
    server.close().await;
}

/// Compaction, rewriting of streams and uploads, all at the same time.
#[tokio::test(flavor = "multi_thread")]
async fn compaction_and_rewriting_do_not_interfere() {
    let mut world = World::new(WAL_BYTES, 5);
    world.options.compaction_bytes = 64 << 10;
    let server = world.start().await;
    let mut streams = Vec::new();
    for _ in 0..3 {
        streams.push((server.create_log().await, Vec::new()));
    }
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let steps = Arc::new(AtomicUsize::new(0));
    let mut writers = tokio::task::JoinSet::new();
    for (stream, _) in &streams {
        let (store, stopped, steps) = (server.store.clone(), stopped.clone(), steps.clone());
        let stream = store.stream(stream.id()).unwrap();
        writers.spawn(async move {
            for count in [2, 3].into_iter().cycle() {
                if *stopped.borrow() {
                    break;
                }
                let done = rewrite(&store, &stream, stream.durable_end().0, Join::new(count));
                steps.fetch_add(done.await.unwrap(), Ordering::Relaxed);
                // So that pieces accumulate for compaction.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
    }
    let both_have_worked = || {
        let steps = steps.load(Ordering::Relaxed) as u64;
        steps > 20 && server.store.stats().compactions > steps + 5
    };
    let begun = std::time::Instant::now();
    while !both_have_worked() {
        assert!(begun.elapsed() < HANG, "{steps:?} steps");
        for (stream, held) in &mut streams {
            let base = held.last().map_or(0, |last: &Batch| last.end().0);
            for base in [base, base + 2] {
                let batch = batch(stream.id(), base, 2, 700);
                append(&server.store, stream, &batch).await.await.unwrap();
                held.push(batch);
            }
        }
        server.store.flush().await.unwrap();
    }
    stop.send_replace(true);
    writers.join_all().await;
    assert_eq!(server.store.stats().compaction_failures, 0);
    for (stream, held) in &streams {
        let end = held.last().unwrap().end().0;
        assert_same(&seen(&server.store, stream, 0, end).await, held);
    }
    drop(streams);
    server.close().await;
}

/// The publication of a rewrite goes on when its caller is dropped. A second rewrite, which has
/// read the same ranges meanwhile, must not replace what the first one has put in their place.
#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_rewrite_does_not_mix_with_a_later_one() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let (stream, batches) = three_objects(&server).await;
    let id = stream.id();
    let failed = || server.objects.catalog_failed.load(Ordering::SeqCst);
    let begin = |from: u64, to: u64| {
        let (store, stream) = (server.store.clone(), server.store.stream(id).unwrap());
        tokio::spawn(async move {
            let (from, to) = (StreamOffset(from), StreamOffset(to));
            store.rewrite(&stream, from, to, Join::new(4)).await.map(drop)
        })
    };
    for (first, second) in [((20, 60), (0, 40)), ((0, 40), (20, 60))] {
        server.objects.set_catalog(CatalogMode::Fails);
        let before = failed();
        let dropped = begin(first.0, first.1);
        eventually("its delta is sent", || failed() > before).await;
        dropped.abort();
        let later = begin(second.0, second.1);
        tokio::time::sleep(Duration::from_millis(100)).await;
        server.objects.set_catalog(CatalogMode::Works);
        later.await.unwrap().unwrap();
        assert_same(&seen(&server.store, &stream, 0, 60).await, &batches);
    }
    eventually("objects without ranges are deleted", || server.store.stats().retired_objects == 0)
        .await;
    server.crash(&mut world);
    let server = world.start().await;
    let stream = server.store.stream(id).unwrap();
    assert_same(&seen(&server.store, &stream, 0, 60).await, &batches);
    server.close().await;
}
