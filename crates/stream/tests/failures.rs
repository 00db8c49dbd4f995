//! A failure stops the store, changes nothing afterwards, and wakes every waiter.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use alluvium_device::sim::Faults;
use alluvium_stream::{
    AppendError, Batch, Catalog, CatalogError, Fold, Reason, StoreError, StreamId, StreamOffset,
};
use common::*;
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
    let before = world.catalog.load().unwrap();
    let refused = store.commit(vec![delete(id)]).await.unwrap_err();
    assert!(refused.to_string().contains(why), "{refused}");
    let refused = store.new_stream_ids(1).await.unwrap_err();
    assert!(refused.to_string().contains(why), "{refused}");
    assert_eq!(world.catalog.load().unwrap(), before);
}

#[tokio::test]
async fn nothing_is_committed_after_close_even_if_the_log_failed_before() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let id = server.create_log().await.id();
    fail_the_log(&world, &server, id).await;
    let other = server.create_log().await.id(); // topics can still be changed
    let kept = server.store.clone();
    server.store.close().await.expect_err("the log cannot be closed cleanly");
    assert_unchangeable(&kept, &world, other, "closed").await;
}

#[tokio::test]
async fn a_commit_of_unknown_outcome_stops_the_store_even_if_the_log_failed_before() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let ids = [server.create_log().await.id(), server.create_log().await.id()];
    fail_the_log(&world, &server, ids[0]).await;
    server.catalog.set(CatalogMode::LosesAnswers);
    server.store.commit(vec![delete(ids[1])]).await.unwrap_err();
    server.catalog.set(CatalogMode::Works);
    assert_unchangeable(&server.store, &world, ids[0], "injected").await;
}

#[tokio::test]
async fn a_change_of_unknown_outcome_stops_the_store_until_it_is_opened_again() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let ids = [server.create_log().await.id(), create_with_a_batch(&server).await];
    server.catalog.set(CatalogMode::LosesAnswers);
    let error = server.store.commit(vec![delete(ids[0])]).await.unwrap_err();
    assert!(matches!(error, StoreError::Catalog(_)), "{error}");
    server.catalog.set(CatalogMode::Works);
    assert_stopped(&server, &world, ids[1], "injected").await;
    server.crash(&mut world);
    let server = world.start().await;
    assert!(server.store.stream(ids[0]).is_none(), "it took effect");
    assert!(server.store.stream(ids[1]).is_some());
    server.close().await;
}

#[tokio::test]
async fn ids_that_may_have_been_handed_out_are_not_handed_out_again() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let id = create_with_a_batch(&server).await;
    server.catalog.set(CatalogMode::LosesAnswers);
    server.store.new_stream_ids(5).await.unwrap_err();
    server.catalog.set(CatalogMode::Works);
    assert_stopped(&server, &world, id, "injected").await;
    server.crash(&mut world);
    let server = world.start().await;
    assert_eq!(server.store.new_stream_ids(1).await.unwrap(), [StreamId(id.0 + 6)]);
    server.close().await;
}

/// Appends something and makes its upload fail at `mode`.
async fn fail_an_upload(server: &Server, mode: CatalogMode) -> StreamId {
    let id = create_with_a_batch(server).await;
    server.catalog.set(mode);
    tokio::time::timeout(HANG, server.store.flush()).await.expect("it hangs").unwrap_err();
    server.catalog.set(CatalogMode::Works);
    id
}

#[tokio::test]
async fn an_upload_that_cannot_be_committed_stops_the_store() {
    let mut world = World::new(WAL_BYTES, 1);
    for mode in [CatalogMode::FailsUploads, CatalogMode::LosesAnswersOfUploads] {
        let server = world.start().await;
        let id = fail_an_upload(&server, mode).await;
        assert_stopped(&server, &world, id, "injected").await;
        assert_eq!(server.catalog.failed.load(Ordering::SeqCst), 1, "tried once");
        server.crash(&mut world);
        let server = world.start().await;
        let stream = server.open(id).await;
        assert_eq!(read_from(&stream, 0, 1000).await, [batch(id, 0, 1, 100)]);
        server.store.flush().await.unwrap();
        drop(stream);
        server.close().await;
    }
}

#[tokio::test]
async fn a_panic_in_the_catalog_stops_the_store() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let id = fail_an_upload(&server, CatalogMode::Panics).await;
    assert_stopped(&server, &world, id, "a bug in the catalog").await;
    server.crash(&mut world);

    let server = world.start().await;
    server.catalog.set(CatalogMode::Panics);
    let change = delete(id);
    let caller = tokio::spawn({
        let store = server.store.clone();
        async move { store.commit(vec![change]).await }
    });
    caller.abort(); // the caller may be gone
    let _ = caller.await;
    let refused = server.store.new_stream_ids(1).await.unwrap_err();
    server.catalog.set(CatalogMode::Works);
    assert!(refused.to_string().contains("a bug in the catalog"), "{refused}");
    assert_stopped(&server, &world, id, "a bug in the catalog").await;
    server.crash(&mut world);
    let server = world.start().await;
    assert!(server.store.stream(id).is_some());
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
    let id = fail_an_upload(&server, CatalogMode::Works).await;
    assert_stopped(&server, &world, id, "a bug in the fold").await;
    server.crash(&mut world);

    let server = world.start().await;
    server.objects.writes_panic.store(true, Ordering::SeqCst);
    let id = fail_an_upload(&server, CatalogMode::Works).await;
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
/// committed, so attempts end.
#[tokio::test]
async fn uploads_are_not_retried_after_the_log_has_failed() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let id = create_with_a_batch(&server).await;
    server.objects.down.store(true, Ordering::SeqCst);
    let flush = tokio::spawn({
        let store = server.store.clone();
        async move { store.flush().await }
    });
    let failures = || server.store.stats().upload_failures;
    eventually("it is retried repeatedly", || failures() > 3).await;
    fail_the_log(&world, &server, id).await;
    flush.await.unwrap().unwrap_err();
    // The next attempt would come within 4 ms.
    let mut seen = (failures(), 0);
    eventually("retries end", || {
        seen = if seen.0 == failures() { (seen.0, seen.1 + 1) } else { (failures(), 0) };
        seen.1 >= 50
    })
    .await;
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

/// Changes are refused, background work waits, and both continue when there is space.
#[tokio::test]
async fn a_full_disk_of_the_catalog_does_not_stop_the_store() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let (kept, deleted) = (create_with_a_batch(&server).await, create_with_a_batch(&server).await);
    server.store.flush().await.unwrap();
    let is_full = || server.store.degraded().iter().any(|it| it.reason == Reason::CatalogDiskFull);
    server.catalog.set(CatalogMode::Full);
    let before = world.catalog.load().unwrap();
    let refusals = [
        server.store.commit(vec![delete(deleted)]).await.unwrap_err(),
        server.store.new_stream_ids(1).await.unwrap_err(),
    ];
    for refusal in refusals {
        assert!(matches!(refusal, StoreError::Catalog(CatalogError::Full(_))), "{refusal}");
    }
    let stream = server.open(kept).await;
    append(&server.store, &stream, &batch(kept, 1, 1, 100)).await.await.unwrap();
    let flushing = tokio::spawn({
        let store = server.store.clone();
        async move { store.flush().await }
    });
    let fails = async {
        while server.store.stats().upload_failing.is_none_or(|failing| failing.failures < 2) {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(HANG, fails).await.expect("the upload is retried");
    assert!(server.store.failure().is_none() && is_full());
    assert_eq!(world.catalog.load().unwrap(), before);

    server.catalog.set(CatalogMode::Works);
    tokio::time::timeout(HANG, flushing).await.expect("it hangs").unwrap().unwrap();
    server.store.commit(vec![delete(deleted)]).await.unwrap();
    server.create_log().await;
    assert!(!is_full());

    server.store.commit(vec![delete(kept)]).await.unwrap();
    let forgotten = async {
        while server.store.stats().retired_objects > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(HANG, forgotten).await.expect("the objects are forgotten");
    drop(stream);
    server.close().await;
}
