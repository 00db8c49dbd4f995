//! Append, fetch, trim, delete, watch, metadata.

mod common;

use std::sync::Arc;
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use alluvium_stream::{
    AppendError, Batch, Change, FetchError, Gap, GapCause, KIND_LOG, KIND_STATE, MAX_LABEL_BYTES,
    Options, StoreError, Stream, StreamEpoch, StreamId, StreamOffset,
};
use bytes::Bytes;
use common::*;
use futures::FutureExt;
use object_store::ObjectStoreExt;
use tokio::sync::Notify;

const WAL_BYTES: u64 = 1 << 20;

#[tokio::test]
async fn appended_batches_are_fetched() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    let mut batches = Vec::new();
    let mut next = 0;
    for count in [1, 5, 2, 1, 9] {
        let batch = batch(stream.id(), next, count, 100 * count as usize);
        assert_eq!(stream.next_offset().0, next);
        append(&server.store, &stream, &batch).await.await.unwrap();
        next += u64::from(count);
        batches.push(batch);
    }
    assert_eq!((stream.next_offset(), stream.durable_end()), (StreamOffset(18), StreamOffset(18)));
    assert_eq!(stream.size_bytes(), 1800);
    assert_eq!(read_from(&stream, 0, 1 << 20).await, batches);
    assert_eq!(read_from(&stream, 0, 1).await, batches, "one at a time");
    assert_eq!(read_from(&stream, 7, 400).await, batches[2..], "from inside a batch");
    let at_end = stream.fetch(StreamOffset(18), 1000).await.unwrap();
    assert_eq!((at_end.batches.len(), at_end.durable_end), (0, StreamOffset(18)));
    let beyond = stream.fetch(StreamOffset(19), 1000).await;
    assert!(
        matches!(beyond, Err(FetchError::OutOfRange { end: StreamOffset(18), .. })),
        "{beyond:?}"
    );
    server.close().await;
}

#[tokio::test]
async fn wrong_batches_are_refused_and_change_nothing() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    let id = stream.id();
    let refused = stream.append(new_batch(&batch(id, 1, 1, 10)));
    assert!(matches!(
        refused,
        Err(AppendError::NotNext { expected: StreamOffset(0), got: StreamOffset(1) })
    ));
    let max = usize::try_from(server.store.max_batch_bytes()).unwrap();
    let refused = stream.append(new_batch(&batch(id, 0, 1, max + 1)));
    assert!(
        matches!(refused, Err(AppendError::TooLarge { max_bytes, .. }) if max_bytes == max as u64)
    );
    assert_eq!(server.store.stats().cache_used_bytes, 0, "nothing stays reserved");
    let largest = batch(id, 0, 1, max);
    append(&server.store, &stream, &largest).await.await.unwrap();
    assert_eq!(read_from(&stream, 0, 1).await, [largest]);
    server.close().await;
}

#[tokio::test]
async fn a_batch_is_visible_when_it_is_durable_and_not_before() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    let first = batch(stream.id(), 0, 2, 100);
    append(&server.store, &stream, &first).await.await.unwrap();

    server.stepper.hold(true);
    let notify = Arc::new(Notify::new());
    let watch = stream.watch(&notify);
    let second = batch(stream.id(), 2, 3, 100);
    let mut done = append(&server.store, &stream, &second).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!((&mut done).now_or_never().is_none(), "not acknowledged");
    assert_eq!((stream.next_offset(), stream.durable_end()), (StreamOffset(5), StreamOffset(2)));
    assert_eq!(read_from(&stream, 0, 1 << 20).await, std::slice::from_ref(&first));
    assert!(
        stream.fetch(StreamOffset(3), 100).await.unwrap().batches.is_empty(),
        "in range, not readable yet"
    );
    assert_eq!(stream.find_time(20).await.unwrap(), None);
    assert!(
        matches!(stream.trim(StreamOffset(3)).await, Err(StoreError::InvalidChange(_))),
        "not past the durable end"
    );
    assert!(notify.notified().now_or_never().is_none(), "not woken");

    // A later subscriber is woken too.
    let late_notify = Arc::new(Notify::new());
    let _late = stream.watch(&late_notify);
    server.stepper.hold(false);
    tokio::time::timeout(HANG, notify.notified()).await.expect("woken");
    tokio::time::timeout(HANG, late_notify.notified()).await.expect("woken");
    assert_eq!(stream.durable_end(), StreamOffset(5));
    assert_eq!(read_from(&stream, 0, 1 << 20).await, [first, second]);
    done.await.unwrap();

    drop(watch);
    append(&server.store, &stream, &batch(stream.id(), 5, 1, 10)).await.await.unwrap();
    tokio::time::timeout(HANG, late_notify.notified()).await.expect("woken again");
    assert!(notify.notified().now_or_never().is_none(), "a subscription ends with its handle");
    server.close().await;
}

/// Executes the queued request with the lowest position on the disk.
fn step_first(world: &World) {
    let queued = world.disk.queued();
    let first = (0..queued.len()).min_by_key(|at| queued[*at].1).expect("something is queued");
    world.disk.step_at(first);
}

#[tokio::test]
async fn watchers_are_woken_for_each_group_that_becomes_durable() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    server.stepper.hold(true);
    let notify = Arc::new(Notify::new());
    let mut watch = None;
    let mut pending = Vec::new();
    // Each is larger than a block, so each is a write of its own. The subscription comes after the
    // first append.
    for i in 0..3 {
        let batch = batch(stream.id(), i, 1, 20_000);
        pending.push(append(&server.store, &stream, &batch).await);
        watch.get_or_insert_with(|| stream.watch(&notify));
    }
    let mut seen = StreamOffset(0);
    while seen < StreamOffset(3) {
        assert!(notify.notified().now_or_never().is_none(), "not woken before more is durable");
        eventually("a write is queued", || !world.disk.queued().is_empty()).await;
        step_first(&world);
        eventually("it is durable", || stream.durable_end() > seen).await;
        seen = stream.durable_end();
        tokio::time::timeout(HANG, notify.notified()).await.expect("woken");
    }
    server.stepper.hold(false);
    drop((watch, stream));
    server.close().await;
}

#[tokio::test]
async fn one_notify_watches_many_streams_through_many_wakes() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let mut streams = Vec::new();
    for _ in 0..10 {
        streams.push(server.create_log().await);
    }
    let notify = Arc::new(Notify::new());
    let _watches: Vec<_> = streams.iter().map(|stream| stream.watch(&notify)).collect();
    for round in 0..200u64 {
        let stream = &streams[usize::try_from(round * 7 % 10).unwrap()];
        let before = stream.durable_end();
        drop(append(&server.store, stream, &batch(stream.id(), before.0, 1, 50)).await);
        while stream.durable_end() == before {
            tokio::time::timeout(HANG, notify.notified()).await.expect("a wake-up was lost");
        }
    }
    server.close().await;
}

/// Wakers are foreign code, which may access the stream.
#[test]
fn no_lock_is_held_over_a_waker() {
    struct ReadsOnWake(Stream);
    impl Wake for ReadsOnWake {
        fn wake(self: Arc<Self>) {
            self.0.durable_end();
        }
    }
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let world = World::new(WAL_BYTES, 1);
            let server = world.start().await;
            let stream = server.create_log().await;
            let waker = Waker::from(Arc::new(ReadsOnWake(stream.clone())));
            let notify = Arc::new(Notify::new());
            let _watch = stream.watch(&notify);
            let wait = || {
                let mut notified = Box::pin(notify.notified());
                assert!(notified.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
                notified
            };
            for change in [None, Some(delete(stream.id()))] {
                let mut notified = wait();
                match change {
                    None => {
                        drop(append(&server.store, &stream, &batch(stream.id(), 0, 1, 9)).await);
                    }
                    Some(delete) => server.store.commit(vec![delete]).await.unwrap(),
                }
                eventually("it is woken", || (&mut notified).now_or_never().is_some()).await;
            }
            let other = server.create_log().await;
            let _watch = other.watch(&notify);
            let notified = wait();
            server.close().await;
            notified.await;
            sender.send(()).unwrap();
        });
    });
    receiver.recv_timeout(HANG).expect("a deadlock");
}

#[tokio::test]
async fn trimmed_records_stay_removed_after_a_restart() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    let id = stream.id();
    let batches: Vec<Batch> = (0..10).map(|i| batch(id, i * 2, 2, 100)).collect();
    for batch in &batches {
        append(&server.store, &stream, batch).await.await.unwrap();
    }
    stream.trim(StreamOffset(7)).await.unwrap();
    stream.trim(StreamOffset(3)).await.unwrap(); // before the start: nothing to do
    assert_eq!((stream.start_offset(), stream.size_bytes()), (StreamOffset(7), 700));
    assert!(matches!(
        stream.fetch(StreamOffset(6), 1).await,
        Err(FetchError::OutOfRange { start: StreamOffset(7), .. })
    ));
    assert_eq!(
        read_from(&stream, 7, 1000).await,
        batches[3..],
        "the batch that contains the start"
    );
    drop(stream);
    server.crash(&mut world);

    let server = world.start().await;
    let stream = server.open(id).await;
    assert_eq!((stream.start_offset(), stream.next_offset()), (StreamOffset(7), StreamOffset(20)));
    assert_eq!(read_from(&stream, 7, 1000).await, batches[3..]);
    server.store.flush().await.unwrap();
    assert_eq!(stream.size_bytes(), 700, "only what was left went to the object");
    assert_eq!(
        state_of(&stream),
        expected_state(id, &batches),
        "a trim does not undo what was trimmed"
    );
    stream.trim(StreamOffset(20)).await.unwrap();
    assert_eq!((stream.size_bytes(), stream.start_offset()), (0, StreamOffset(20)));
    drop(stream);
    server.close().await;

    let server = world.start().await;
    let stream = server.open(id).await;
    assert_eq!(
        (stream.start_offset(), stream.next_offset()),
        (StreamOffset(20), StreamOffset(20)),
        "offsets are not reused"
    );
    assert_eq!(state_of(&stream), expected_state(id, &batches));
    server.close().await;
}

#[tokio::test]
async fn trimmed_offsets_are_not_handed_out_again_even_if_the_log_is_lost() {
    let mut world = World::new(WAL_BYTES, 1);
    world.options.catalog_interval = Duration::from_millis(1);
    let server = world.start().await;
    let stream = server.create_log().await;
    let id = stream.id();
    append(&server.store, &stream, &batch(id, 0, 9, 100)).await.await.unwrap();
    stream.trim(StreamOffset(9)).await.unwrap();
    let begun = std::time::Instant::now();
    while world.catalog().await.streams.get(&id).is_none_or(|found| found.start.0 < 9) {
        assert!(begun.elapsed() < HANG, "the trim is not published");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(stream);
    server.crash(&mut world);
    let ring_at = 64 << 10;
    world.disk.poke(ring_at, &vec![0; usize::try_from(WAL_BYTES - ring_at).unwrap()]);

    let server = world.start().await;
    assert_eq!(server.recovery.batches, 0);
    let lost = StreamOffset(0)..StreamOffset(9);
    assert_eq!(
        server.recovery.gaps,
        [Gap { stream: id, offsets: lost, cause: GapCause::Lost }],
        "they were not folded"
    );
    let stream = server.open(id).await;
    assert_eq!((stream.start_offset(), stream.next_offset()), (StreamOffset(9), StreamOffset(9)));
    append(&server.store, &stream, &batch(id, 9, 1, 100)).await.await.unwrap();
    assert_eq!(read_from(&stream, 9, 1).await.len(), 1);
    drop(stream);
    server.close().await;
}

#[tokio::test]
async fn only_the_checkpoint_of_a_state_stream_is_kept() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let stream = server.create(KIND_STATE).await;
    let id = stream.id();
    let batches: Vec<Batch> = (0..20).map(|i| batch(id, i, 1, 200)).collect();
    for (i, batch) in batches.iter().enumerate() {
        append(&server.store, &stream, batch).await.await.unwrap();
        if i == 11 {
            server.store.flush().await.unwrap();
            assert_eq!((stream.start_offset(), stream.size_bytes()), (StreamOffset(12), 0));
            assert_eq!(server.store.stats().cache_used_bytes, 0, "its batches leave the log cache");
        }
    }
    assert_eq!(server.store.stats().objects, 0, "nothing of it is written to objects");
    assert_eq!(stream.replay().checkpoint_end, StreamOffset(12));
    assert_eq!(state_of(&stream), expected_state(id, &batches));
    assert_eq!(read_from(&stream, 12, 1000).await, batches[12..]);
    drop(stream);
    server.crash(&mut world);
    let server = world.start().await;
    let stream = server.open(id).await;
    assert_eq!((stream.start_offset(), stream.next_offset()), (StreamOffset(12), StreamOffset(20)));
    assert_eq!(state_of(&stream), expected_state(id, &batches));
    server.close().await;
}

#[tokio::test]
async fn a_deleted_stream_is_gone_and_its_id_is_not_reused() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    let id = stream.id();
    append(&server.store, &stream, &batch(id, 0, 1, 100)).await.await.unwrap();
    let notify = Arc::new(Notify::new());
    let _watch = stream.watch(&notify);
    server.store.commit(vec![delete(id)]).await.unwrap();
    assert!(notify.notified().now_or_never().is_some(), "watchers are woken");
    assert!(server.store.stream(id).is_none());
    let again = server.store.commit(vec![creation(id, KIND_LOG)]).await;
    assert!(matches!(again, Err(StoreError::InvalidChange(_))), "its batches are in the log");
    assert!(matches!(stream.append(new_batch(&batch(id, 1, 1, 10))), Err(AppendError::Deleted)));
    assert!(matches!(stream.fetch(StreamOffset(0), 10).await, Err(FetchError::Deleted)));
    assert!(matches!(stream.find_time(0).await, Err(FetchError::Deleted)));
    assert_eq!(server.store.stats().cache_used_bytes, 0);
    let other = server.create_log().await;
    assert!(other.id() > id);
    append(&server.store, &other, &batch(other.id(), 0, 1, 100)).await.await.unwrap();
    drop((stream, other, _watch));
    server.crash(&mut world);

    let server = world.start().await;
    assert_eq!((server.recovery.skipped_deleted, server.recovery.batches), (1, 1));
    assert!(server.store.stream(id).is_none());
    let again = server.store.commit(vec![creation(id, KIND_LOG)]).await;
    assert!(matches!(again, Err(StoreError::InvalidChange(_))), "{again:?}");
    assert!(server.store.new_stream_ids(3).await.unwrap().iter().all(|new| *new > StreamId(1)));
    server.store.flush().await.unwrap();
    let wal = server.store.stats().wal;
    assert!(
        wal.used_bytes <= 4096,
        "what a deleted stream left in the WAL does not block its reuse: {wal:?}"
    );
    server.close().await;
}

#[tokio::test]
async fn commits_are_checked_and_atomic() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let put = |key: &str, value: &[u8]| Change::PutMeta { key: key.into(), value: value.into() };
    let label = |len_bytes| Bytes::from(vec![7; len_bytes]);
    let ids = server.store.new_stream_ids(2).await.unwrap();
    server
        .store
        .commit(vec![
            creation(ids[0], KIND_LOG),
            put("topic/b", b"2"),
            put("topic/a", b"1"),
            put("zone", b"3"),
        ])
        .await
        .unwrap();
    for refused in [
        creation(ids[0], KIND_LOG),
        creation(StreamId(99), KIND_LOG),
        delete(ids[1]),
        Change::TrimStream { id: ids[0], epoch: StreamEpoch(0), to: StreamOffset(1) },
        Change::CreateStream { id: ids[1], kind: 0, label: label(MAX_LABEL_BYTES + 1) },
    ] {
        let appended = server.store.stats().wal.appended;
        let list = vec![put("topic/c", b"no"), refused.clone()];
        let error = server.store.commit(list).await.unwrap_err();
        assert!(matches!(error, StoreError::InvalidChange(_)), "{refused:?}: {error}");
        assert_eq!(server.store.stats().wal.appended, appended, "nothing is recorded");
    }
    let create = Change::CreateStream { id: ids[1], kind: KIND_LOG, label: label(MAX_LABEL_BYTES) };
    let twice = vec![create.clone(), create.clone()];
    assert!(server.store.commit(twice).await.unwrap_err().to_string().contains("is not new"));
    server.store.commit(vec![create]).await.expect("a refusal does not use up an id");
    let twice = vec![delete(ids[0]), delete(ids[0])];
    assert!(server.store.commit(twice).await.unwrap_err().to_string().contains("twice"));
    let meta = |server: &Server, prefix: &str| {
        server
            .store
            .meta(prefix)
            .into_iter()
            .map(|(key, value)| format!("{key}={}", value[0] as char))
            .collect::<Vec<_>>()
    };
    assert_eq!(meta(&server, "topic/"), ["topic/a=1", "topic/b=2"]);
    assert_eq!(meta(&server, "").len(), 3);
    server.store.commit(vec![Change::DeleteMeta("topic/a".into())]).await.unwrap();
    server.crash(&mut world);

    let server = world.start().await;
    assert_eq!(meta(&server, "topic/"), ["topic/b=2"]);
    assert_eq!(server.store.stream_ids().len(), 2);

    // Dropping the future leaves nothing half-done.
    let id = server.store.new_stream_ids(1).await.unwrap()[0];
    let commit = server.store.commit(vec![creation(id, KIND_LOG), put("topic/d", b"4")]);
    assert!(Box::pin(commit).as_mut().now_or_never().is_none());
    eventually("the commit finishes by itself", || server.store.stream(id).is_some()).await;
    server.close().await;
}

#[tokio::test]
async fn catalog_and_wal_must_belong_together() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    append(&server.store, &stream, &batch(stream.id(), 0, 1, 100)).await.await.unwrap();
    drop(stream);
    server.close().await;

    let objects = std::mem::take(&mut world.objects);
    let error = world.try_start(Arc::new(())).await.err().expect("no catalog, a WAL with records");
    let StoreError::NoCatalog { wal, epoch: 1 } = error else { panic!("{error}") };
    assert_eq!(wal, world.header().wal_id);
    assert_eq!(contents(&world.objects).await, [], "nothing was written");

    // The store with the id of the other WAL.
    let mut other = World::new(WAL_BYTES, 2);
    let foreign = other.header().wal_id;
    other.objects = objects.clone();
    let bound = object_store::path::Path::from(format!("wals/{foreign}"));
    objects.put(&bound, wal.to_string().into()).await.unwrap();
    let before = contents(&objects).await;
    let error = other.try_start(Arc::new(())).await.err().expect("another WAL");
    let StoreError::WrongWal { catalog, wal: found } = error else { panic!("{error}") };
    assert_eq!((catalog, found), (wal, foreign));
    assert_eq!(contents(&objects).await, before, "nothing was written");
    objects.delete(&bound).await.unwrap();

    world.objects = objects;
    world.options = Options { upload_bytes: 1, ..world.options.clone() };
    let error = world.try_start(Arc::new(())).await.err().expect("a bad option");
    assert!(matches!(error, StoreError::InvalidOption(_)), "{error}");

    world.options = small_options(WAL_BYTES).0;
    let server = world.start().await;
    assert_eq!(server.recovery.batches, 1, "the refusals have harmed nothing");
    server.close().await;
}

#[tokio::test]
async fn after_close_and_after_a_failure_nothing_hangs() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    let (store, id) = (server.store.clone(), stream.id());
    server.close().await;
    assert!(matches!(stream.append(new_batch(&batch(id, 0, 1, 1))), Err(AppendError::Failed(_))));
    assert!(matches!(store.commit(vec![delete(id)]).await, Err(StoreError::Closed)));
    assert!(store.failure().unwrap().contains("closed"));
    assert_eq!(store.failure_unless_closed(), None);
    tokio::time::timeout(HANG, store.wait_for_space()).await.unwrap();

    let server = world.start().await;
    let stream = server.open(id).await;
    let notify = Arc::new(Notify::new());
    let _watch = stream.watch(&notify);
    append(&server.store, &stream, &batch(id, 0, 1, 1)).await.await.unwrap();
    tokio::time::timeout(HANG, notify.notified()).await.unwrap();
    let faults = alluvium_device::sim::Faults { write_error: 1.0, ..Default::default() };
    world.disk.set_faults(faults);
    let error = append(&server.store, &stream, &batch(id, 1, 1, 1)).await.await.unwrap_err();
    tokio::time::timeout(HANG, notify.notified()).await.expect("watchers are woken by a failure");
    eventually("the failure is known", || server.store.failure().is_some()).await;
    assert_eq!(server.store.failure_unless_closed(), server.store.failure());
    assert!(error.to_string().contains("simulated disk"), "names the device: {error}");
    assert!(matches!(stream.append(new_batch(&batch(id, 2, 1, 1))), Err(AppendError::Failed(_))));
    assert_eq!(read_from(&stream, 0, 10).await.len(), 1, "what is durable can still be read");
    tokio::time::timeout(HANG, server.store.wait_for_space()).await.unwrap();
    assert!(server.store.flush().await.is_err());
}
