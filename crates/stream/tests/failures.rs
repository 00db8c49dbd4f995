//! A failure stops the store, changes nothing afterwards, and wakes every waiter.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use alluvium_device::sim::Faults;
use alluvium_stream::{
    AppendError, Batch, Change, Fold, Reason, StoreError, StreamId, StreamOffset,
};
use common::*;
use futures::FutureExt;
use tokio::sync::Notify;

const WAL_BYTES: u64 = 1 << 20;

/// Creates a stream with a batch that is not uploaded.
async fn create_with_a_batch(server: &Server) -> StreamId {
    let stream = server.create_log().await;
    append(&server.store, &stream, &batch(stream.id(), 0, 1, 100)).await.await.unwrap();
    stream.id()
}

/// Makes the device fail, so that the store has failed.
async fn fail_the_log(world: &World, server: &Server, id: StreamId) {
    world.disk.set_faults(Faults { write_error: 1.0, ..Default::default() });
    let stream = server.open(id).await;
    let next = stream.next_offset().0;
    append(&server.store, &stream, &batch(id, next, 1, 1)).await.await.unwrap_err();
    let cause = tokio::time::timeout(HANG, server.store.failed()).await.expect("it is reported");
    assert!(matches!(cause, StoreError::Wal(_)), "{cause}");
}

/// Checks that waiters are woken and that nothing can be changed any more.
async fn assert_stopped(server: &Server, world: &World, id: StreamId, why: &str) {
    let cause = tokio::time::timeout(HANG, server.store.failed()).await.expect("it is reported");
    assert!(cause.to_string().contains(why), "{cause}");
    tokio::time::timeout(HANG, server.store.wait_for_space())
        .await
        .expect("waiters for space are woken");
    let flushed = tokio::time::timeout(HANG, server.store.flush())
        .await
        .expect("and so are waiters for an upload");
    assert!(flushed.unwrap_err().to_string().contains(why));
    let stream = server.open(id).await;
    let refused = stream.append(new_batch(&batch(id, stream.next_offset().0, 1, 1)));
    assert!(matches!(refused, Err(AppendError::Failed(_))), "{:?}", refused.err());
    assert_unchangeable(&server.store, world, id, why).await;
}

async fn assert_unchangeable(
    store: &alluvium_stream::Store,
    world: &World,
    id: StreamId,
    why: &str,
) {
    let before = (world.catalog_objects().await, store.stats().wal.appended);
    let refused = store.commit(vec![delete(id)]).await.unwrap_err();
    assert!(refused.to_string().contains(why), "{refused}");
    let refused = store.new_stream_ids(1).await.unwrap_err();
    assert!(refused.to_string().contains(why), "{refused}");
    assert_eq!((world.catalog_objects().await, store.stats().wal.appended), before);
}

fn put(key: &str) -> Change {
    Change::PutMeta { key: key.into(), value: vec![1] }
}

#[tokio::test]
async fn nothing_is_committed_after_close_even_if_the_log_failed_before() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let id = server.create_log().await.id();
    fail_the_log(&world, &server, id).await;
    for refused in [
        server.store.commit(vec![put("a")]).await,
        server.store.open_stream(id, alluvium_stream::StreamEpoch(1)).await.map(drop),
    ] {
        assert!(matches!(refused, Err(StoreError::Wal(_))), "{refused:?}");
    }
    let kept = server.store.clone();
    server.store.close().await.expect_err("the log cannot be closed cleanly");
    assert_unchangeable(&kept, &world, id, "closed").await;
    drop((kept, server.stepper));
    // What was committed before is in the object store.
    assert!(world.catalog().await.streams.contains_key(&id));
    world.disk = world.disk.process_crash();
    world.disk.set_faults(Faults::default());
    let server = world.start().await;
    assert!(server.store.stream(id).is_some() && server.store.meta_value("a").is_none());
    server.close().await;
}

/// The record of a change is in flight when the log fails, so its outcome is unknown.
#[tokio::test]
async fn a_change_of_unknown_outcome_stops_the_store_until_it_is_opened_again() {
    for is_durable in [false, true] {
        let mut world = World::new(WAL_BYTES, 1);
        let server = world.start().await;
        let ids = [server.create_log().await.id(), create_with_a_batch(&server).await];
        server.stepper.hold(true);
        let mut commit = Box::pin(server.store.commit(vec![delete(ids[0]), put("a")]));
        assert!((&mut commit).now_or_never().is_none());
        eventually("it is in flight", || !world.disk.queued().is_empty()).await;
        assert!(server.store.stream(ids[0]).is_some(), "it is not applied yet");
        if is_durable {
            // The process is killed when the disk has the record, and before the answer.
            let disk = world.disk.clone();
            disk.run_until_idle();
            drop(commit);
        } else {
            world.disk.set_faults(Faults { write_error: 1.0, ..Default::default() });
            server.stepper.hold(false);
            let error = tokio::time::timeout(HANG, commit).await.expect("it hangs").unwrap_err();
            assert!(matches!(error, StoreError::Wal(_)), "{error:?}");
            assert_stopped(&server, &world, ids[1], "simulated disk").await;
        }
        server.crash(&mut world);
        world.disk.set_faults(Faults::default());
        let server = world.start().await;
        assert_eq!(server.store.stream(ids[0]).is_none(), is_durable, "all of it, or nothing");
        assert_eq!(server.store.meta_value("a").is_some(), is_durable);
        assert!(server.store.stream(ids[1]).is_some());
        server.close().await;
    }
}

/// Their reservation is sent, and its outcome is unknown.
#[tokio::test]
async fn ids_that_are_not_reserved_wait_for_the_object_store() {
    for mode in [CatalogMode::Fails, CatalogMode::LosesAnswers] {
        let mut world = World::new(WAL_BYTES, 1);
        let server = world.start().await;
        let id = create_with_a_batch(&server).await;
        let reserved = world.catalog().await.reserved.0;
        server.objects.set_catalog(mode);
        let rest = u32::try_from(reserved - id.0 - 1).unwrap();
        let last = server.store.new_stream_ids(rest).await.unwrap().pop().unwrap();
        assert_eq!(last.0 + 1, reserved, "those that are reserved need no object store");
        let asked = tokio::spawn({
            let store = server.store.clone();
            async move { store.new_stream_ids(5).await }
        });
        let failed = || server.objects.catalog_failed.load(Ordering::SeqCst);
        eventually("it tries again", || failed() >= 3).await;
        assert!(!asked.is_finished() && server.reports(Reason::CatalogBehind));
        server.objects.set_catalog(CatalogMode::Works);
        let ids = tokio::time::timeout(HANG, asked).await.expect("it hangs").unwrap().unwrap();
        assert_eq!(ids[0], StreamId(reserved));
        assert!(!server.reports(Reason::CatalogBehind));
        assert!(world.catalog().await.reserved.0 > reserved + 5);
        server.store.commit(vec![creation(ids[4], 0)]).await.unwrap();
        server.crash(&mut world);
        let server = world.start().await;
        assert_eq!(server.store.new_stream_ids(1).await.unwrap(), [StreamId(reserved + 5)]);
        server.close().await;
    }
}

/// An upload ends when its delta is in the chain, and until then the log keeps what it has written.
#[tokio::test]
async fn an_upload_waits_until_it_is_published() {
    for mode in [CatalogMode::Fails, CatalogMode::LosesAnswers] {
        for continues in [true, false] {
            let mut world = World::new(WAL_BYTES, 1);
            let server = world.start().await;
            let id = create_with_a_batch(&server).await;
            let before = server.store.stats().wal.trimmed;
            let flush = server.fail_an_upload(mode).await;
            let failing = || server.store.stats().upload_failing.map_or(0, |it| it.failures);
            eventually("it tries again", || failing() >= 3).await;
            let error = server.store.stats().upload_failing.unwrap().error;
            assert!(error.contains("injected 503"), "{error}");
            assert!(server.reports(Reason::CatalogBehind) && server.store.failure().is_none());
            // What is appended and changed meanwhile does not wait.
            let stream = server.open(id).await;
            append(&server.store, &stream, &batch(id, 1, 1, 100)).await.await.unwrap();
            server.store.commit(vec![put("a")]).await.unwrap();
            let other = create_with_a_batch(&server).await;
            let stats = server.store.stats();
            assert_eq!((stats.uploads, stats.objects, stats.wal.trimmed), (0, 0, before));
            let both = [batch(id, 0, 1, 100), batch(id, 1, 1, 100)];
            assert_eq!(read_from(&stream, 0, 1000).await, both);
            assert_eq!(names(&world).await.len(), 1);
            drop(stream);
            let server = if continues {
                server.objects.set_catalog(CatalogMode::Works);
                tokio::time::timeout(HANG, flush).await.expect("it hangs").unwrap().unwrap();
                assert!(!server.reports(Reason::CatalogBehind));
                assert_eq!(server.store.stats().upload_failing, None);
                server
            } else {
                abandon(flush).await;
                server.crash(&mut world);
                let server = world.start().await;
                let uploaded = u64::from(mode == CatalogMode::LosesAnswers);
                assert_eq!(server.recovery.skipped_uploaded, uploaded);
                assert_eq!(server.recovery.batches, 3 - uploaded);
                server
            };
            server.store.flush().await.unwrap();
            let (stream, state) = (server.open(id).await, world.catalog().await);
            assert_eq!(read_from(&stream, 0, 1000).await, both);
            let ranges = &state.streams[&id].ranges;
            let ends: Vec<_> = ranges.iter().map(|range| (range.start.0, range.end.0)).collect();
            match continues || mode == CatalogMode::LosesAnswers {
                true => assert_eq!(ends, [(0, 1), (1, 2)]),
                false => assert_eq!(ends, [(0, 2)], "it was uploaded again"),
            }
            assert!(state.streams.contains_key(&other) && state.meta.contains_key("a"));
            assert_eq!(state.objects.len(), server.store.stats().objects);
            drop(stream);
            server.close().await;
        }
    }
}

/// Begins an upload, which fails.
async fn fail_a_flush(server: &Server) {
    let flush = server.store.flush();
    tokio::time::timeout(HANG, flush).await.expect("it hangs").unwrap_err();
}

#[tokio::test]
async fn a_panic_in_a_publication_stops_the_store() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let id = create_with_a_batch(&server).await;
    server.objects.set_catalog(CatalogMode::Panics);
    fail_a_flush(&server).await;
    server.objects.set_catalog(CatalogMode::Works);
    assert_stopped(&server, &world, id, "a bug in the object store").await;
    server.crash(&mut world);

    let server = world.start().await;
    let more_than_reserved = world.catalog().await.reserved.0 as u32;
    server.objects.set_catalog(CatalogMode::Panics);
    server.objects.catalog_on.lock().clear();
    let caller = tokio::spawn({
        let store = server.store.clone();
        async move { store.new_stream_ids(more_than_reserved).await }
    });
    eventually("it has begun", || !server.objects.catalog_on.lock().is_empty()).await;
    caller.abort(); // the caller may be gone
    let _ = caller.await;
    let refused = tokio::time::timeout(HANG, server.store.failed()).await.expect("it goes on");
    server.objects.set_catalog(CatalogMode::Works);
    assert!(refused.to_string().contains("a bug in the object store"), "{refused}");
    assert_stopped(&server, &world, id, "a bug in the object store").await;
    server.crash(&mut world);
    let server = world.start().await;
    let stream = server.open(id).await;
    assert_eq!(read_from(&stream, 0, 1000).await, [batch(id, 0, 1, 100)]);
    drop(stream);
    server.close().await;
}

struct BadFold;

impl Fold for BadFold {
    fn fold(
        &self,
        _: StreamId,
        _: u8,
        _: std::ops::Range<StreamOffset>,
        _: StreamOffset,
        _: Option<&[u8]>,
        _: &[Batch],
    ) -> Option<Vec<u8>> {
        panic!("a bug in the fold")
    }
}

#[tokio::test]
async fn a_panic_in_an_upload_stops_the_store() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.try_start(Arc::new(BadFold)).await.unwrap();
    let id = create_with_a_batch(&server).await;
    fail_a_flush(&server).await;
    assert_stopped(&server, &world, id, "a bug in the fold").await;
    server.crash(&mut world);

    let server = world.start().await;
    server.objects.writes_panic.store(true, Ordering::SeqCst);
    let id = create_with_a_batch(&server).await;
    fail_a_flush(&server).await;
    assert_stopped(&server, &world, id, "a bug in the object store").await;
    server.crash(&mut world);
    let server = world.start().await;
    server.store.flush().await.unwrap();
    server.close().await;
}

#[tokio::test]
async fn waiters_are_woken_when_the_last_store_is_dropped() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    let id = stream.id();
    let notify = Arc::new(Notify::new());
    let _watch = stream.watch(&notify);
    drop(server.store);
    tokio::time::timeout(HANG, notify.notified()).await.expect("it is reported");
    let refused = stream.append(new_batch(&batch(id, 0, 1, 1)));
    assert!(matches!(refused, Err(AppendError::Failed(StoreError::Closed))), "{:?}", refused.err());
    assert_eq!(stream.durable_end(), StreamOffset(0));
    let refused = stream.trim(StreamOffset(0)).await;
    assert!(matches!(refused, Err(StoreError::Closed)), "{refused:?}");
    drop(server.stepper);
}

/// The object store is down and the log has failed: an object that could be written would not be
/// committed, so attempts end. So does the publication of what was written before.
#[tokio::test]
async fn uploads_are_not_retried_after_the_log_has_failed() {
    for is_written in [false, true] {
        let world = World::new(WAL_BYTES, 1);
        let server = world.start().await;
        let id = create_with_a_batch(&server).await;
        match is_written {
            false => server.objects.down.store(true, Ordering::SeqCst),
            true => server.objects.set_catalog(CatalogMode::Fails),
        }
        let flush = server.begin_flush();
        let attempts = || server.objects.failed.load(Ordering::SeqCst);
        let failures = || server.store.stats().upload_failing.map_or(0, |it| it.failures);
        eventually("it is retried repeatedly", || failures() > 3).await;
        fail_the_log(&world, &server, id).await;
        flush.await.unwrap().unwrap_err();
        // The next attempt would come within 4 ms.
        let mut seen = (attempts(), 0);
        eventually("retries end", || {
            seen = if seen.0 == attempts() { (seen.0, seen.1 + 1) } else { (attempts(), 0) };
            seen.1 >= 50
        })
        .await;
    }
}

/// The error of a failing upload shows whether waiting helps.
#[tokio::test]
async fn a_refusing_object_store_is_distinguished_from_one_that_is_down() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    create_with_a_batch(&server).await;
    server.objects.down.store(true, Ordering::SeqCst);
    let flush = tokio::spawn({
        let store = server.store.clone();
        async move { store.flush().await }
    });
    let error =
        || server.store.stats().upload_failing.map_or(String::new(), |failing| failing.error);
    let refused =
        || error().contains("retries fail until the bucket or the credentials are changed");
    eventually("it is down", || error().contains("injected 503") && !refused()).await;
    server.objects.refuses.store(true, Ordering::SeqCst);
    eventually("it refuses", || error().contains("injected 403") && refused()).await;
    // It is still retried: credentials may be changed elsewhere.
    server.objects.down.store(false, Ordering::SeqCst);
    flush.await.unwrap().unwrap();
    assert_eq!(server.store.stats().upload_failing, None);
    server.close().await;
}

/// It refuses all requests: uploads and deletions wait, changes do not, and all continue when it
/// accepts requests again.
#[tokio::test]
async fn an_object_store_that_refuses_the_catalog_does_not_stop_the_store() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let (kept, deleted) = (create_with_a_batch(&server).await, create_with_a_batch(&server).await);
    server.store.flush().await.unwrap();
    server.objects.refuses.store(true, Ordering::SeqCst);
    server.objects.set_catalog(CatalogMode::Fails);
    let before = world.catalog_objects().await;
    let stream = server.open(kept).await;
    append(&server.store, &stream, &batch(kept, 1, 1, 100)).await.await.unwrap();
    let flushing = server.begin_flush();
    let failures = || server.store.stats().upload_failing.map_or(0, |failing| failing.failures);
    eventually("the upload is retried", || failures() >= 2).await;
    server.store.commit(vec![delete(deleted)]).await.unwrap();
    let created = server.create_log().await.id();
    assert!(server.store.failure().is_none() && server.reports(Reason::CatalogBehind));
    assert_eq!(world.catalog_objects().await, before);

    server.objects.set_catalog(CatalogMode::Works);
    tokio::time::timeout(HANG, flushing).await.expect("it hangs").unwrap().unwrap();
    assert!(!server.reports(Reason::CatalogBehind));
    server.store.commit(vec![delete(kept)]).await.unwrap();
    eventually("the objects are forgotten", || server.store.stats().retired_objects == 0).await;
    let state = world.catalog().await;
    assert_eq!(state.streams.keys().collect::<Vec<_>>(), [&created], "published with the deletion");
    drop(stream);
    server.close().await;
}
