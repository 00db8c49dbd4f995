//! Small WALs and caches, many writers, object stores that are down: appends are refused, but
//! nothing is lost and nothing hangs.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use alluvium_device::sim::Random;
use alluvium_stream::{
    AppendError, Batch, FetchError, KIND_LOG, KIND_STATE, Opened, Options, Reason, Store,
    StoreError, StreamEpoch, StreamId, StreamOffset, StreamWriter,
};
use alluvium_wal::{FormatOptions, Wal};
use bytes::Bytes;
use common::*;
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use tokio::task::{JoinHandle, JoinSet};

/// Runs one writer of these batches, with some in flight at a time; checks that each is readable
/// once it is acknowledged.
async fn write(store: Store, stream: &StreamWriter, batches: Vec<Batch>, in_flight: usize) {
    let mut pending = std::collections::VecDeque::new();
    for batch in batches {
        pending.push_back((append(&store, stream, &batch).await, batch.end()));
        if pending.len() >= in_flight {
            let (done, end) = pending.pop_front().unwrap();
            done.await.unwrap();
            assert!(stream.durable_end() >= end, "acknowledged is durable");
        }
    }
    for (done, _) in pending {
        done.await.unwrap();
    }
}

/// Returns the batches of a writer; sizes vary with the seed.
fn batches_of(id: StreamId, rounds: u64, longest: u64) -> Vec<Batch> {
    let mut random = Random::new(id.0);
    let len = |random: &mut Random| usize::try_from(random.below(longest)).unwrap();
    (0..rounds).map(|i| batch(id, i * 3, 3, len(&mut random))).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_writers_finish_on_a_wal_smaller_than_their_data() {
    let mut world = World::new(1 << 20, 1);
    world.options.upload_interval = Duration::from_millis(20);
    let server = world.start().await;
    let mut writers = JoinSet::new();
    let mut streams = Vec::new();
    let mut all = Vec::new();
    for i in 0..16 {
        let writer = server.create(if i % 4 == 3 { KIND_STATE } else { KIND_LOG }).await;
        let batches = batches_of(writer.id(), 300, 4000);
        all.push((writer.clone(), batches));
        streams.push(writer);
    }
    // The object store is down until writers are refused; then it stays up.
    server.objects.down.store(true, Ordering::SeqCst);
    for (i, (writer, (_, batches))) in streams.into_iter().zip(&all).enumerate() {
        let (store, batches) = (server.store.clone(), batches.clone());
        writers.spawn(async move { write(store, &writer, batches, 1 + i).await });
    }
    // Not all of them: the log has space for the batches of one.
    eventually("writers are refused", || server.store.stats().refused_appends >= 8).await;
    server.objects.down.store(false, Ordering::SeqCst);
    tokio::time::timeout(HANG, writers.join_all()).await.expect("a writer is stuck");
    let stats = server.store.stats();
    assert!(
        stats.uploads > 5 && stats.refused_appends > 0,
        "the test caused no backpressure: {stats:?}"
    );
    assert!(stats.wal.payload_bytes > 7 << 20, "several laps");
    assert!(stats.cache_used_bytes <= stats.cache_bound_bytes);
    for (stream, batches) in &all {
        assert_eq!(state_of(stream), expected_state(stream.id(), batches));
        let start = stream.start_offset().0;
        let expected: Vec<_> =
            batches.iter().filter(|batch| batch.base.0 >= start).cloned().collect();
        // A state stream's start moves meanwhile; its checkpoint was checked above.
        if start == 0 {
            assert_eq!(read_from(stream, 0, 100_000).await, expected);
        }
    }
    drop(all);
    server.close().await;
}

/// Readers in parallel with writers, trims, uploads, evictions and a block cache that is too small.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn acknowledged_batches_stay_readable_during_trims_uploads_and_evictions() {
    const COUNT: u64 = 2;
    const BATCHES: u64 = 2000;
    fn nth(id: StreamId, base: u64) -> Batch {
        batch(id, base, COUNT as u32, 50 + usize::try_from(base * 37 % 700).unwrap())
    }
    let mut world = World::new(1 << 20, 7);
    world.options.cache_bytes = 160 << 10;
    world.options.upload_bytes = 40 << 10;
    world.options.block_cache_bytes = 20_000;
    let server = world.start().await;
    let mut tasks = JoinSet::new();
    for n in 0..4 {
        let writer = server.create_log().await;
        let stream = writer.clone();
        let acknowledged = Arc::new(AtomicU64::new(0));
        tasks.spawn({
            let (store, stream) = (server.store.clone(), writer);
            let acknowledged = acknowledged.clone();
            async move {
                let mut random = Random::new(n);
                let mut next = 0;
                while next < BATCHES * COUNT {
                    let mut pending = Vec::new();
                    for _ in 0..1 + random.below(10) {
                        pending.push(append(&store, &stream, &nth(stream.id(), next)).await);
                        next += COUNT;
                    }
                    for done in pending {
                        done.await.unwrap();
                    }
                    acknowledged.store(next, Ordering::SeqCst);
                    let (start, end) = (stream.start_offset().0, stream.durable_end().0);
                    if end - start > 400 && random.chance(0.1) {
                        let to = start + random.below((end - start) / 2);
                        stream.trim(StreamOffset(to)).await.unwrap();
                    }
                }
            }
        });
        for reader in 0..2 {
            let (stream, acknowledged) = (stream.clone(), acknowledged.clone());
            tasks.spawn(async move {
                let mut random = Random::new(100 * n + reader);
                let mut read = 0;
                loop {
                    let known = acknowledged.load(Ordering::SeqCst);
                    let start = stream.start_offset().0;
                    if known >= BATCHES * COUNT && read >= 20 {
                        return;
                    }
                    // Reads from memory never wait, and other tasks must run.
                    tokio::task::yield_now().await;
                    if known <= start {
                        continue;
                    }
                    let greatest = stream.max_time().await.unwrap().map_or(0, |last| last.end().0);
                    assert!(greatest >= known, "{greatest} of {known}");
                    let from = start + random.below(known - start);
                    let max_bytes = usize::try_from(random.below(6000)).unwrap();
                    let fetched = match stream.fetch(StreamOffset(from), max_bytes).await {
                        Ok(fetched) => fetched,
                        Err(FetchError::OutOfRange { start, .. }) if start.0 > from => continue,
                        Err(error) => panic!("{error}"),
                    };
                    assert!(!fetched.batches.is_empty() && fetched.durable_end.0 >= known);
                    for (base, batch) in (from / COUNT..).zip(fetched.batches) {
                        assert_eq!(batch, nth(stream.id(), base * COUNT));
                    }
                    read += 1;
                }
            });
        }
    }
    while let Some(ended) =
        tokio::time::timeout(HANG, tasks.join_next()).await.expect("a task is stuck")
    {
        ended.unwrap();
    }
    let stats = server.store.stats();
    assert!(stats.uploads > 10, "{stats:?}");
    server.close().await;
}

/// The uploader takes cuts without a pause while appends run: no batch may be missed between the
/// log and the tails.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_append_is_missed_by_a_cut() {
    let mut world = World::new(1 << 20, 1);
    let server = world.start().await;
    let flusher = tokio::spawn({
        let store = server.store.clone();
        async move {
            loop {
                store.flush().await.unwrap();
                tokio::task::yield_now().await;
            }
        }
    });
    let mut writers = JoinSet::new();
    for _ in 0..4 {
        let (store, writer) = (server.store.clone(), server.create_log().await);
        let id = writer.id();
        writers.spawn(async move {
            let mut batches: Vec<Batch> = Vec::new();
            while store.stats().uploads < 50 {
                let from = batches.len() as u64;
                let more: Vec<_> = (from..from + 20).map(|i| batch(id, i, 1, 100)).collect();
                write(store.clone(), &writer, more.clone(), 8).await;
                batches.extend(more);
            }
            (id, batches)
        });
    }
    let all = tokio::time::timeout(HANG, writers.join_all()).await.expect("a writer is stuck");
    flusher.abort();
    let _ = flusher.await;
    server.store.flush().await.unwrap();
    server.crash(&mut world);
    let server = world.start().await;
    assert_eq!(server.recovery.batches, 0, "all was uploaded, so what a cut had missed is gone");
    for (id, batches) in all {
        let stream = server.open(id).await;
        assert_eq!(read_from(&stream, 0, 100_000).await, batches);
        assert_eq!(state_of(&stream), expected_state(id, &batches));
    }
    server.close().await;
}

#[tokio::test]
async fn an_object_store_that_is_down_causes_backpressure_and_no_loss() {
    let world = World::new(1 << 20, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    server.objects.down.store(true, Ordering::SeqCst);
    let batches = batches_of(stream.id(), 1500, 2000);
    let mut next = batches.iter();
    let mut taken = 0;
    // Until it is full permanently: then the writer waits for space that never comes.
    let refused = loop {
        let batch = next.next().expect("the WAL is smaller than what there is to write");
        match stream.append(new_batch(batch)) {
            Ok(done) => {
                taken += 1;
                done.await.unwrap();
            }
            Err(AppendError::Full) => break batch,
            Err(error) => panic!("{error}"),
        }
    };
    eventually("it keeps trying", || server.objects.failed.load(Ordering::SeqCst) > 3).await;
    let woken = tokio::time::timeout(Duration::from_millis(50), async {
        loop {
            server.store.wait_for_space().await;
            if stream.append(new_batch(refused)).is_ok() {
                break;
            }
        }
    });
    assert!(woken.await.is_err(), "there is no space while the object store is down");
    assert!(server.store.failure().is_none(), "the store has not failed");
    let stats = server.store.stats();
    assert!(
        stats.cache_used_bytes <= stats.cache_bound_bytes
            && stats.wal.used_bytes <= stats.wal.ring_bytes
    );
    assert_eq!(read_from(&stream, 0, 1 << 20).await, batches[..taken], "reads continue");

    server.objects.down.store(false, Ordering::SeqCst);
    for batch in &batches[taken..] {
        append(&server.store, &stream, batch).await.await.unwrap();
    }
    assert_eq!(read_from(&stream, 0, 1 << 20).await, batches);
    assert_eq!(state_of(&stream), expected_state(stream.id(), &batches));
    drop(stream);
    server.close().await;
}

/// A missing response is also a failure, only later.
#[tokio::test]
async fn requests_without_a_response_are_retried() {
    let world = World::new(1 << 20, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    append(&server.store, &stream, &batch(stream.id(), 0, 1, 100)).await.await.unwrap();
    let answer = server.objects.answers.lock().await;
    let flush = server.begin_flush();
    while names(&world).await.is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(301)).await;
    tokio::time::resume();
    eventually("the failure is known", || server.store.stats().upload_failing.is_some()).await;
    let error = server.store.stats().upload_failing.unwrap().error;
    assert!(error.contains("no response"), "{error}");
    drop(answer);
    flush.await.unwrap().unwrap();
    drop(stream);
    server.close().await;
}

/// Replaces the contents of the object store by `others`; returns the former contents.
async fn exchange(world: &World, others: Vec<(Path, Bytes)>) -> Vec<(Path, Bytes)> {
    let mut taken = Vec::new();
    let names: Vec<_> =
        world.objects.list(None).map_ok(|it| it.location).try_collect().await.unwrap();
    for name in names {
        taken.push((name.clone(), world.objects.get(&name).await.unwrap().bytes().await.unwrap()));
        world.objects.delete(&name).await.unwrap();
    }
    for (name, bytes) in others {
        world.objects.put(&name, bytes.into()).await.unwrap();
    }
    taken
}

/// Starts an upload and waits until it has found another object store than before. It continues
/// when the original one is back.
async fn refused(server: &Server) -> JoinHandle<Result<(), StoreError>> {
    let flush = server.begin_flush();
    eventually("the replacement is noticed", || server.store.stats().upload_failing.is_some())
        .await;
    let error = server.store.stats().upload_failing.unwrap().error;
    assert!(error.contains("not mounted"), "{error}");
    assert!(server.reports(Reason::CatalogBehind));
    flush
}

/// Waits until the upload has succeeded in the original object store.
async fn accepted(server: &Server, flush: JoinHandle<Result<(), StoreError>>) {
    tokio::time::timeout(HANG, flush).await.unwrap().unwrap().unwrap();
    assert_eq!(server.store.degraded(), []);
}

async fn all_is_uploaded(server: Server, mut world: World, id: StreamId, batches: &[Batch]) {
    server.crash(&mut world);
    let server = world.start().await;
    assert_eq!(server.recovery.batches, 0, "nothing is in the WAL alone");
    let stream = server.store.stream(id).unwrap();
    assert_eq!(read_from(&stream, 0, 1 << 20).await, batches);
    drop(stream);
    server.close().await;
}

/// A directory whose file system is not mounted can still be written to. What was written there is
/// not committed, and is written again when the file system is mounted.
#[tokio::test]
async fn nothing_is_committed_to_a_replaced_object_store() {
    let world = World::new(1 << 20, 1);
    let server = world.start().await;
    let (stream, mut batches) = three_objects(&server).await;
    let id = stream.id();
    let mounted = exchange(&world, Vec::new()).await;
    batches.push(batch(id, 60, 1, 100));
    append(&server.store, &stream, &batches[30]).await.await.unwrap();
    let flush = refused(&server).await;
    assert_eq!(names(&world).await.len(), 1, "it was written");
    let left = exchange(&world, mounted).await;
    assert!(left.iter().all(|(name, _)| !is_catalog(name)), "nothing was published");
    accepted(&server, flush).await;
    drop(stream);
    all_is_uploaded(server, world, id, &batches).await;
}

/// The mount point of an object store that is not mounted at the start may hold objects of an
/// earlier run.
#[tokio::test]
async fn a_replaced_object_store_is_not_opened() {
    let mut world = World::new(1 << 20, 1);
    let server = world.start().await;
    let below = contents(&world.objects).await;
    let (stream, mut batches) = three_objects(&server).await;
    let id = stream.id();
    batches.push(batch(id, 60, 1, 100));
    append(&server.store, &stream, &batches[30]).await.await.unwrap();
    drop(stream);
    server.crash(&mut world);
    let stray = (Path::from(names(&world).await.pop().unwrap()), Bytes::from_static(b"stray"));
    for (others, is_old) in [(vec![stray.clone()], false), ([below, vec![stray]].concat(), true)] {
        let mounted = exchange(&world, others.clone()).await;
        let refused = world.try_start(Arc::new(Hash)).await.err().expect("it is another one");
        match refused {
            StoreError::NoCatalog { .. } => assert!(!is_old),
            StoreError::OldCatalog { .. } => assert!(is_old),
            other => panic!("{other}"),
        }
        assert_eq!(exchange(&world, mounted).await, others, "nothing was written");
    }
    let server = world.start().await;
    server.store.flush().await.unwrap();
    all_is_uploaded(server, world, id, &batches).await;
}

/// Objects that this run has written before the file system was mounted over them, which are found
/// again when that is unmounted.
#[tokio::test]
async fn an_older_chain_of_this_run_is_not_continued() {
    let world = World::new(1 << 20, 1);
    let server = world.start().await;
    let below = contents(&world.objects).await;
    assert!(!below.is_empty());
    let (stream, mut batches) = three_objects(&server).await;
    let mounted = exchange(&world, below.clone()).await;
    batches.push(batch(stream.id(), 60, 1, 100));
    append(&server.store, &stream, &batches[30]).await.await.unwrap();
    let flush = refused(&server).await;
    let left = exchange(&world, mounted).await;
    let published = left.into_iter().filter(|(name, _)| is_catalog(name));
    assert!(published.eq(below), "nothing was published");
    accepted(&server, flush).await;
    let id = stream.id();
    drop(stream);
    all_is_uploaded(server, world, id, &batches).await;
}

#[tokio::test]
async fn an_upload_happens_by_time_when_there_is_something() {
    let mut world = World::new(1 << 20, 1);
    world.options.upload_interval = Duration::from_millis(10);
    let server = world.start().await;
    let stream = server.create_log().await;
    append(&server.store, &stream, &batch(stream.id(), 0, 1, 100)).await.await.unwrap();
    eventually("an upload", || server.store.stats().uploads == 1).await;
    eventually("the trim", || server.store.stats().wal.used_bytes <= 4096).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(server.store.stats().uploads, 1, "nothing is uploaded when there is nothing");
    drop(stream);
    server.close().await;
}

#[tokio::test]
async fn an_upload_happens_when_enough_has_been_appended() {
    let world = World::new(1 << 20, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    let mut appended = 0;
    for i in 0..1000 {
        append(&server.store, &stream, &batch(stream.id(), i, 1, 1000)).await.await.unwrap();
        appended += 1;
        if server.store.stats().uploads > 0 {
            break;
        }
    }
    // 128 KiB, with a page for each record that is waited for.
    assert!((20..1000).contains(&appended), "{appended}");
    drop(stream);
    server.close().await;
}

/// The old threshold exceeds the new ring: with it, each upload would begin only when a writer is
/// refused.
#[tokio::test]
async fn a_wal_that_was_made_smaller_is_uploaded_sooner() {
    const SMALLER_BYTES: u64 = 256 << 10;
    let mut world = World::new(1 << 20, 1);
    world.options.upload_bytes = 256 << 10;
    world.wal_options.window_bytes = 64 << 10;
    world.wal_options.max_record_bytes = 8 << 10;
    let server = world.start().await;
    let stream = server.create_log().await;
    let resizing = server.store.request_resize(SMALLER_BYTES).unwrap();
    for i in 0..1000 {
        append(&server.store, &stream, &batch(stream.id(), i, 1, 1000)).await.await.unwrap();
        if server.store.stats().log_behind_bytes >= SMALLER_BYTES / 4 {
            eventually("an upload", || server.store.stats().log_behind_bytes < SMALLER_BYTES / 4)
                .await;
        }
    }
    assert_eq!(resizing.await.unwrap().capacity_bytes, SMALLER_BYTES);
    assert_eq!(server.store.stats().refused_appends, 0);
    drop(stream);
    server.close().await;
}

/// With real components: a file on disk, a local directory; 64 MiB through a WAL of 4 MiB,
/// with a restart in the middle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_wal_carries_many_times_its_size() {
    const WAL_BYTES: u64 = 4 << 20;
    const TOTAL_BYTES: u64 = 64 << 20;
    let directory = tempfile::tempdir().unwrap();
    let open = || async {
        let options = alluvium_device::OpenOptions {
            create_bytes: Some(WAL_BYTES),
            durability: alluvium_device::Durability::Device,
            ..Default::default()
        };
        let path = directory.path().join("wal");
        let is_new = !path.exists();
        let device = alluvium_device::open(&path, &options).unwrap();
        if is_new {
            Wal::format(&device, &FormatOptions::default()).unwrap();
        }
        let wal_options = small_options(WAL_BYTES).1;
        let objects = alluvium_stream::local_objects(&directory.path().join("objects")).unwrap();
        let options = Options { cache_bytes: 6 << 20, ..Options::for_wal(WAL_BYTES) };
        let opened = Store::open(device, wal_options, objects, Arc::new(Hash), options, None);
        let Opened { store, recovery } = opened.await.unwrap();
        (store, recovery)
    };

    let (mut store, _) = open().await;
    let ids = store.new_stream_ids(8).await.unwrap();
    let create = ids.iter().map(|id| creation(*id, KIND_LOG));
    store.commit(create.collect()).await.unwrap();
    let written = Arc::new(AtomicU64::new(0));
    for half in 0..2u64 {
        let mut writers = JoinSet::new();
        for id in &ids {
            let rounds = TOTAL_BYTES / 2 / 8 / 16_384;
            let batches = (half * rounds..(half + 1) * rounds)
                .map(|i| batch(*id, i * 3, 3, 16_384))
                .collect();
            let (store, writer) =
                (store.clone(), store.open_stream(*id, StreamEpoch(0)).await.unwrap());
            writers.spawn(async move { write(store, &writer, batches, 16).await });
            written.fetch_add(rounds * 16_384, Ordering::Relaxed);
        }
        tokio::time::timeout(HANG, writers.join_all()).await.expect("a writer is stuck");
        let stats = store.stats();
        assert!(stats.cache_used_bytes <= stats.cache_bound_bytes, "{stats:?}");
        store.close().await.unwrap();
        let (again, recovery) = open().await;
        assert!(recovery.wal.clean_shutdown);
        assert_eq!((recovery.streams, recovery.gaps.len()), (8, 0));
        store = again;
    }
    assert_eq!(written.load(Ordering::Relaxed), TOTAL_BYTES);
    let stats = store.stats();
    assert!(stats.object_bytes > TOTAL_BYTES - WAL_BYTES, "{stats:?}");
    for id in ids {
        let stream = store.stream(id).unwrap();
        let mut expected_base = 0;
        while expected_base < stream.durable_end().0 {
            for read in stream.fetch(StreamOffset(expected_base), 1 << 20).await.unwrap().batches {
                assert_eq!(read, batch(id, expected_base, 3, 16_384));
                expected_base += 3;
            }
        }
        assert_eq!(expected_base, TOTAL_BYTES / 8 / 16_384 * 3);
    }
    store.close().await.unwrap();
}

/// Time stands still, so a paced upload makes no progress until it becomes urgent.
#[tokio::test]
async fn an_upload_is_paced_until_a_caller_waits_for_it() {
    let mut world = World::new(128 << 20, 1);
    world.options.cache_bytes = 128 << 20;
    world.options.upload_bytes = 32 << 20;
    world.wal_options.max_record_bytes = 2 << 20;
    let server = world.start().await;
    let stream = server.create_log().await;
    for i in 0..12 {
        append(&server.store, &stream, &batch(stream.id(), i, 1, 1 << 20)).await.await.unwrap();
    }
    tokio::time::pause();
    // A paused clock advances when all tasks are idle, but not while a blocking task runs.
    let (end, ended) = std::sync::mpsc::channel();
    let holding = tokio::task::spawn_blocking(move || ended.recv_timeout(HANG).is_ok());
    tokio::time::advance(world.options.upload_interval).await;
    for _ in 0..300 {
        tokio::task::yield_now().await;
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(server.store.stats().uploads, 0, "12 MiB take seconds");
    server.store.flush().await.unwrap();
    assert_eq!(server.store.stats().uploads, 1);
    let _ = end.send(());
    assert!(holding.await.unwrap(), "the flush does not wait for time to pass");
    tokio::time::resume();
    drop(stream);
    server.close().await;
}
