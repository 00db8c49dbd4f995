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
async fn create_with_a_batch(life: &Life) -> StreamId {
    let stream = life.create_log().await;
    append(&life.store, &stream, &batch(stream.id(), 0, 1, 100)).await.await.unwrap();
    stream.id()
}

/// Makes the device fail, so that the store has failed.
async fn fail_the_log(world: &World, life: &Life, id: StreamId) {
    world.disk.set_faults(Faults { write_error: 1.0, ..Default::default() });
    let stream = life.open(id).await;
    let next = stream.next_offset().0;
    append(&life.store, &stream, &batch(id, next, 1, 1)).await.await.unwrap_err();
    let cause = tokio::time::timeout(HANG, life.store.failed()).await.expect("it is reported");
    assert!(matches!(cause, StoreError::Wal(_)), "{cause}");
}

/// Checks that waiters are woken and that nothing can be changed any more.
async fn assert_stopped(life: &Life, world: &World, id: StreamId, why: &str) {
    let cause = tokio::time::timeout(HANG, life.store.failed()).await.expect("it is reported");
    assert!(cause.to_string().contains(why), "{cause}");
    tokio::time::timeout(HANG, life.store.wait_for_space())
        .await
        .expect("waiters for space are woken");
    let flushed = tokio::time::timeout(HANG, life.store.flush()).await.expect(
        "and so are waiters \
                                                                               for an upload",
    );
    assert!(flushed.unwrap_err().to_string().contains(why));
    let stream = life.open(id).await;
    let refused = stream.append(new_batch(&batch(id, stream.next_offset().0, 1, 1)));
    assert!(matches!(refused, Err(AppendError::Failed(_))), "{:?}", refused.err());
    assert_unchangeable(&life.store, world, id, why).await;
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
    let life = world.start().await;
    let id = life.create_log().await.id();
    fail_the_log(&world, &life, id).await;
    let other = life.create_log().await.id(); // topics can still be changed
    let kept = life.store.clone();
    life.store.close().await.expect_err("the log cannot be closed cleanly");
    assert_unchangeable(&kept, &world, other, "closed").await;
}

#[tokio::test]
async fn a_commit_of_unknown_outcome_stops_the_store_even_if_the_log_failed_before() {
    let world = World::new(WAL_BYTES, 1);
    let life = world.start().await;
    let ids = [life.create_log().await.id(), life.create_log().await.id()];
    fail_the_log(&world, &life, ids[0]).await;
    life.catalog.set(CatalogMode::LosesAnswers);
    life.store.commit(vec![delete(ids[1])]).await.unwrap_err();
    life.catalog.set(CatalogMode::Works);
    assert_unchangeable(&life.store, &world, ids[0], "injected").await;
}

#[tokio::test]
async fn a_change_of_unknown_outcome_stops_the_store_until_it_is_opened_again() {
    let mut world = World::new(WAL_BYTES, 1);
    let life = world.start().await;
    let ids = [life.create_log().await.id(), create_with_a_batch(&life).await];
    life.catalog.set(CatalogMode::LosesAnswers);
    let error = life.store.commit(vec![delete(ids[0])]).await.unwrap_err();
    assert!(matches!(error, StoreError::Catalog(_)), "{error}");
    life.catalog.set(CatalogMode::Works);
    assert_stopped(&life, &world, ids[1], "injected").await;
    life.crash(&mut world);
    let life = world.start().await;
    assert!(life.store.stream(ids[0]).is_none(), "it took effect");
    assert!(life.store.stream(ids[1]).is_some());
    life.close().await;
}

#[tokio::test]
async fn ids_that_may_have_been_handed_out_are_not_handed_out_again() {
    let mut world = World::new(WAL_BYTES, 1);
    let life = world.start().await;
    let id = create_with_a_batch(&life).await;
    life.catalog.set(CatalogMode::LosesAnswers);
    life.store.new_stream_ids(5).await.unwrap_err();
    life.catalog.set(CatalogMode::Works);
    assert_stopped(&life, &world, id, "injected").await;
    life.crash(&mut world);
    let life = world.start().await;
    assert_eq!(life.store.new_stream_ids(1).await.unwrap(), [StreamId(id.0 + 6)]);
    life.close().await;
}

/// Appends something and makes its upload fail at `mode`.
async fn fail_an_upload(life: &Life, mode: CatalogMode) -> StreamId {
    let id = create_with_a_batch(life).await;
    life.catalog.set(mode);
    tokio::time::timeout(HANG, life.store.flush()).await.expect("it hangs").unwrap_err();
    life.catalog.set(CatalogMode::Works);
    id
}

#[tokio::test]
async fn an_upload_that_cannot_be_committed_stops_the_store() {
    let mut world = World::new(WAL_BYTES, 1);
    for mode in [CatalogMode::FailsUploads, CatalogMode::LosesAnswersOfUploads] {
        let life = world.start().await;
        let id = fail_an_upload(&life, mode).await;
        assert_stopped(&life, &world, id, "injected").await;
        assert_eq!(life.catalog.failed.load(Ordering::SeqCst), 1, "tried once");
        life.crash(&mut world);
        let life = world.start().await;
        let stream = life.open(id).await;
        assert_eq!(read_from(&stream, 0, 1000).await, [batch(id, 0, 1, 100)]);
        life.store.flush().await.unwrap();
        drop(stream);
        life.close().await;
    }
}

#[tokio::test]
async fn a_panic_in_the_catalog_stops_the_store() {
    let mut world = World::new(WAL_BYTES, 1);
    let life = world.start().await;
    let id = fail_an_upload(&life, CatalogMode::Panics).await;
    assert_stopped(&life, &world, id, "a bug in the catalog").await;
    life.crash(&mut world);

    let life = world.start().await;
    life.catalog.set(CatalogMode::Panics);
    let change = delete(id);
    let caller = tokio::spawn({
        let store = life.store.clone();
        async move { store.commit(vec![change]).await }
    });
    caller.abort(); // the caller may be gone
    let _ = caller.await;
    let refused = life.store.new_stream_ids(1).await.unwrap_err();
    life.catalog.set(CatalogMode::Works);
    assert!(refused.to_string().contains("a bug in the catalog"), "{refused}");
    assert_stopped(&life, &world, id, "a bug in the catalog").await;
    life.crash(&mut world);
    let life = world.start().await;
    assert!(life.store.stream(id).is_some());
    life.close().await;
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
    let life = world.try_start(Arc::new(BadFold)).await.unwrap();
    let id = fail_an_upload(&life, CatalogMode::Works).await;
    assert_stopped(&life, &world, id, "a bug in the fold").await;
    life.crash(&mut world);

    let life = world.start().await;
    life.objects.writes_panic.store(true, Ordering::SeqCst);
    let id = fail_an_upload(&life, CatalogMode::Works).await;
    assert_stopped(&life, &world, id, "a bug in the object store").await;
    life.crash(&mut world);
    let life = world.start().await;
    life.store.flush().await.unwrap();
    life.close().await;
}

#[tokio::test]
async fn waiters_are_woken_when_the_last_store_is_dropped() {
    let world = World::new(WAL_BYTES, 1);
    let life = world.start().await;
    let stream = life.create_log().await;
    let id = stream.id();
    let notify = Arc::new(Notify::new());
    let _watch = stream.watch(&notify);
    drop(life.store);
    tokio::time::timeout(HANG, notify.notified()).await.expect("it is reported");
    let refused = stream.append(new_batch(&batch(id, 0, 1, 1)));
    assert!(matches!(refused, Err(AppendError::Failed(StoreError::Closed))), "{:?}", refused.err());
    assert_eq!(stream.durable_end(), StreamOffset(0));
    let refused = stream.trim(StreamOffset(0)).await;
    assert!(matches!(refused, Err(StoreError::Closed)), "{refused:?}");
    drop(life.stepper);
}

/// The object store is down and the log has failed: an object that could be written would not be
/// committed, so attempts end.
#[tokio::test]
async fn uploads_are_not_retried_after_the_log_has_failed() {
    let world = World::new(WAL_BYTES, 1);
    let life = world.start().await;
    let id = create_with_a_batch(&life).await;
    life.objects.down.store(true, Ordering::SeqCst);
    let flush = tokio::spawn({
        let store = life.store.clone();
        async move { store.flush().await }
    });
    let failures = || life.store.stats().upload_failures;
    eventually("it is retried repeatedly", || failures() > 3).await;
    fail_the_log(&world, &life, id).await;
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
    let life = world.start().await;
    create_with_a_batch(&life).await;
    life.objects.down.store(true, Ordering::SeqCst);
    let flush = tokio::spawn({
        let store = life.store.clone();
        async move { store.flush().await }
    });
    let error = || life.store.stats().upload_failing.map_or(String::new(), |failing| failing.error);
    let refused =
        || error().contains("retries fail until the bucket or the credentials are changed");
    eventually("it is down", || error().contains("injected 503") && !refused()).await;
    life.objects.refuses.store(true, Ordering::SeqCst);
    eventually("it refuses", || error().contains("injected 403") && refused()).await;
    // It is still retried: credentials may be changed elsewhere.
    life.objects.down.store(false, Ordering::SeqCst);
    flush.await.unwrap().unwrap();
    assert_eq!(life.store.stats().upload_failing, None);
    life.close().await;
}

/// Changes are refused, background work waits, and both continue when there is space.
#[tokio::test]
async fn a_full_disk_of_the_catalog_does_not_stop_the_store() {
    let world = World::new(WAL_BYTES, 1);
    let life = world.start().await;
    let (kept, deleted) = (create_with_a_batch(&life).await, create_with_a_batch(&life).await);
    life.store.flush().await.unwrap();
    let is_full = || life.store.degraded().iter().any(|it| it.reason == Reason::CatalogDiskFull);
    life.catalog.set(CatalogMode::Full);
    let before = world.catalog.load().unwrap();
    let refusals = [
        life.store.commit(vec![delete(deleted)]).await.unwrap_err(),
        life.store.new_stream_ids(1).await.unwrap_err(),
    ];
    for refusal in refusals {
        assert!(matches!(refusal, StoreError::Catalog(CatalogError::Full(_))), "{refusal}");
    }
    let stream = life.open(kept).await;
    append(&life.store, &stream, &batch(kept, 1, 1, 100)).await.await.unwrap();
    let flushing = tokio::spawn({
        let store = life.store.clone();
        async move { store.flush().await }
    });
    let fails = async {
        while life.store.stats().upload_failing.is_none_or(|failing| failing.failures < 2) {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(HANG, fails).await.expect("the upload is retried");
    assert!(life.store.failure().is_none() && is_full());
    assert_eq!(world.catalog.load().unwrap(), before);

    life.catalog.set(CatalogMode::Works);
    tokio::time::timeout(HANG, flushing).await.expect("it hangs").unwrap().unwrap();
    life.store.commit(vec![delete(deleted)]).await.unwrap();
    life.create_log().await;
    assert!(!is_full());

    life.store.commit(vec![delete(kept)]).await.unwrap();
    let forgotten = async {
        while life.store.stats().retired_objects > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(HANG, forgotten).await.expect("the objects are forgotten");
    drop(stream);
    life.close().await;
}
