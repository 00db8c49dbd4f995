//! Objects: reads, damage, search by time.

mod common;

use std::sync::atomic::Ordering;
use std::time::Duration;

use alluvium_stream::chain::{Chain, Snapshot};
use alluvium_stream::object::Whole;
use alluvium_stream::{Batch, FetchError, KIND_LOG, KIND_STATE, StreamOffset, StreamWriter};
use common::*;
use object_store::ObjectStoreExt;

const WAL_BYTES: u64 = 1 << 20;

/// Restarts the server, which removes what is uploaded from the log cache.
async fn restart(server: Server, world: &World) -> Server {
    server.close().await;
    world.start().await
}

#[tokio::test]
async fn cached_data_is_read_from_memory_and_older_data_from_objects() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let (stream, batches) = three_objects(&server).await;
    assert_eq!(read_from(&stream, 0, 5000).await, batches);
    assert_eq!(
        server.objects.reads.load(Ordering::SeqCst),
        0,
        "uploaded, and still in the log cache"
    );
    let id = stream.id();
    drop(stream);

    let server = restart(server, &world).await;
    let stream = server.open(id).await;
    assert_eq!(
        read_from(&stream, 0, 1 << 20).await,
        batches,
        "one fetch runs through several objects"
    );
    let reads = server.objects.reads.load(Ordering::SeqCst);
    let cached = server.store.stats().block_cache_used_bytes;
    assert!((30_000..1 << 20).contains(&cached), "{cached}");
    assert_eq!(reads, 6, "an index and a block of each object");
    assert_eq!(read_from(&stream, 0, 700).await, batches);
    assert_eq!(read_from(&stream, 33, 2500).await, batches[16..]);
    assert_eq!(server.objects.reads.load(Ordering::SeqCst), reads, "again from the block cache");

    // Partly from objects, partly from the log cache.
    let more: Vec<Batch> = (30..35).map(|i| batch(id, i * 2, 2, 1000)).collect();
    for batch in &more {
        append(&server.store, &stream, batch).await.await.unwrap();
    }
    let all = [batches, more].concat();
    assert_eq!(stream.fetch(StreamOffset(50), 1 << 20).await.unwrap().batches, all[25..]);
    assert_eq!(stream.size_bytes(), 35_000);
    drop(stream);
    server.close().await;
}

#[tokio::test]
async fn objects_can_be_read_without_the_catalog() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let other = server.create_log().await;
    append(&server.store, &other, &batch(other.id(), 0, 7, 10)).await.await.unwrap();
    let (stream, batches) = three_objects(&server).await;
    let name = &names(&world).await[0];
    let object =
        Whole::open(world.objects.get(&name.as_str().into()).await.unwrap().bytes().await.unwrap())
            .unwrap();
    assert!(name.ends_with(&object.nonce.simple().to_string()), "{name}");
    assert_eq!(
        object.blocks.iter().map(|block| block.stream).collect::<Vec<_>>(),
        [other.id(), stream.id()]
    );
    assert_eq!(object.batches(&object.blocks[1]).unwrap(), batches[..10]);
    drop((stream, other));
    server.close().await;
}

#[tokio::test]
async fn a_damaged_object_is_an_error_that_names_it() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let (stream, batches) = three_objects(&server).await;
    let id = stream.id();
    drop(stream);
    server.close().await;
    let name = names(&world).await[1].clone();
    let good = world.objects.get(&name.as_str().into()).await.unwrap().bytes().await.unwrap();
    let top = good.len() - 64 - 32;

    for (damaged_at, what) in [
        (40, "the block does not match its checksum"),
        (top - 10, "page 0 of the index does not match its checksum"),
        (top + 10, "the top of the index does not match its checksum"),
    ] {
        let mut bytes = good.to_vec();
        bytes[damaged_at] ^= 0x10;
        world.objects.put(&name.as_str().into(), bytes.into()).await.unwrap();
        let server = world.start().await;
        let stream = server.open(id).await;
        let error = stream.fetch(StreamOffset(20), 1000).await.unwrap_err();
        assert!(matches!(error, FetchError::Failed(_)));
        let text = error.to_string();
        assert!(text.contains(&name) && text.contains(what) && text.contains("at byte"), "{text}");
        assert_eq!(
            stream.fetch(StreamOffset(0), 1 << 20).await.unwrap().batches,
            batches[..10],
            "up to the damage"
        );
        assert_eq!(
            stream.fetch(StreamOffset(40), 1 << 20).await.unwrap().batches,
            batches[20..],
            "and behind it"
        );
        assert!(stream.find_time(200).await.is_err());
        drop(stream);
        server.close().await;
    }

    // Truncated; missing; and restored.
    world.objects.put(&name.as_str().into(), good.slice(..100).into()).await.unwrap();
    let server = world.start().await;
    let stream = server.open(id).await;
    assert!(stream.fetch(StreamOffset(20), 1000).await.unwrap_err().to_string().contains(&name));
    world.objects.delete(&name.as_str().into()).await.unwrap();
    assert!(stream.fetch(StreamOffset(20), 1000).await.unwrap_err().to_string().contains(&name));
    world.objects.put(&name.as_str().into(), good.into()).await.unwrap();
    assert_eq!(read_from(&stream, 0, 5000).await, batches, "errors are not cached");
    drop(stream);
    server.close().await;
}

/// A search finds what was durable when it began, even if it has moved from memory to objects
/// since.
#[tokio::test]
async fn times_are_found_while_an_upload_moves_batches() {
    let mut world = World::new(WAL_BYTES, 1);
    world.options.cache_bytes = 300 << 10;
    world.options.upload_bytes = 100 << 10;
    let server = world.start().await;
    let stream = server.create_log().await;
    let id = stream.id();
    // The first object's range has a timestamp whose batch was trimmed, so the object must be read.
    let first = Batch { max_timestamp_ms: 1000, ..batch(id, 0, 1, 1000) };
    append(&server.store, &stream, &first).await.await.unwrap();
    for i in 1..20 {
        append(&server.store, &stream, &batch(id, i, 1, 1000)).await.await.unwrap();
        if i == 9 {
            server.store.flush().await.unwrap();
        }
    }
    stream.trim(StreamOffset(1)).await.unwrap();
    drop(stream);
    let server = restart(server, &world).await;
    let (stream, other) = (server.store.stream(id).unwrap(), server.create_log().await);
    let reading = server.objects.reading.lock().await;
    let ask = |time: Option<i64>| {
        let stream = stream.clone();
        tokio::spawn(async move {
            match time {
                Some(time) => stream.find_time(time).await,
                None => stream.max_time().await,
            }
        })
    };
    let asked = [(ask(Some(150)), 15), (ask(None), 19)];
    eventually("both wait for the object", || server.store.stats().reads.waiting == 2).await;
    // The rest is uploaded, and evicted by appends to another stream.
    server.store.flush().await.unwrap();
    for i in 0..600 {
        append(&server.store, &other, &batch(other.id(), i, 1, 1000)).await.await.unwrap();
    }
    drop(reading);
    for (asked, expected) in asked {
        let found = asked.await.unwrap().unwrap().unwrap();
        assert_eq!(found, batch(id, expected, 1, 1000));
    }
    drop((stream, other));
    server.close().await;
}

#[tokio::test]
async fn a_search_keeps_the_objects_of_a_deleted_stream_until_it_ends() {
    let world = World::new(WAL_BYTES, 1);
    let (server, stream, batches) = three_cold_objects(&world).await;
    let id = stream.id();
    let reading = server.objects.reading.lock().await;
    let asked = tokio::spawn({
        let stream = stream.clone();
        async move { stream.find_time(0).await }
    });
    eventually("it reads an object", || server.objects.reads.load(Ordering::SeqCst) == 1).await;
    server.store.commit(vec![delete(id)]).await.unwrap();
    drop(reading);
    assert_eq!(asked.await.unwrap().unwrap(), Some(batches[0].clone()));
    assert!(matches!(stream.find_time(0).await, Err(FetchError::Deleted)));
    eventually("the objects are gone", || server.store.stats().retired_objects == 0).await;
    server.close().await;
}

/// Creates the batches of [`three_objects`], with nothing of them in memory.
async fn three_cold_objects(world: &World) -> (Server, StreamWriter, Vec<Batch>) {
    let server = world.start().await;
    let (stream, batches) = three_objects(&server).await;
    let id = stream.id();
    drop(stream);
    let server = restart(server, world).await;
    let stream = server.open(id).await;
    (server, stream, batches)
}

/// Creates a stream with batches of a block each, in one object, with nothing of it in memory.
async fn large_batches(world: &World, count: u64) -> (Server, StreamWriter, Vec<Batch>) {
    let server = world.start().await;
    let stream = server.create_log().await;
    let id = stream.id();
    let batches: Vec<Batch> = (0..count).map(|i| batch(id, i, 1, 1_000_000)).collect();
    for batch in &batches {
        append(&server.store, &stream, batch).await.await.unwrap();
    }
    server.store.flush().await.unwrap();
    drop(stream);
    let server = restart(server, world).await;
    let stream = server.open(id).await;
    (server, stream, batches)
}

#[tokio::test]
async fn batches_before_damage_are_read() {
    for block_cache_bytes in [0, 64 << 20] {
        let mut world = World::new(64 << 20, 1);
        world.options.upload_bytes = 16 << 20;
        world.options.block_cache_bytes = block_cache_bytes;
        let (server, stream, batches) = large_batches(&world, 14).await;
        // One read returns eight blocks.
        server.objects.unreadable_at.store(12_500_000, Ordering::SeqCst);
        let mut next = 0;
        let mut errors = 0;
        while errors < 3 {
            match stream.fetch(StreamOffset(next), 50 << 20).await {
                Ok(fetched) => next = fetched.batches.last().expect("something").end().0,
                Err(FetchError::Failed(_)) => errors += 1,
                Err(other) => panic!("{other}"),
            }
        }
        assert_eq!(next, 8);

        // A damaged block in the middle of a read.
        server.objects.unreadable_at.store(u64::MAX, Ordering::SeqCst);
        drop(stream);
        let server = restart(server, &world).await;
        let name = names(&world).await.remove(0);
        let mut bytes = whole(&world, &name).await;
        bytes[5_500_000] ^= 1;
        world.objects.put(&name.into(), bytes.into()).await.unwrap();
        let stream = server.open(batches_stream(&server)).await;
        let fetched = stream.fetch(StreamOffset(2), 50 << 20).await.unwrap();
        assert_eq!(fetched.batches, batches[2..5]);
        assert!(stream.fetch(StreamOffset(5), 50 << 20).await.is_err());
        assert_eq!(stream.fetch(StreamOffset(6), 1).await.unwrap().batches, batches[6..7]);
        drop(stream);
        server.close().await;
    }
}

fn batches_stream(server: &Server) -> alluvium_stream::StreamId {
    server.store.stream_ids()[0]
}

/// Plain HTTP has no better checksum than TCP's. What was damaged in transit is intact in the
/// object store.
#[tokio::test]
async fn blocks_damaged_in_transit_are_read_again() {
    let world = World::new(WAL_BYTES, 1);
    let (server, stream, batches) = three_cold_objects(&world).await;
    let id = stream.id();
    // The index is damaged, or the block, or both.
    for (flips, from) in [(0b01, 40), (0b10, 20), (0b101, 0)] {
        server.objects.flip_reads.store(flips, Ordering::SeqCst);
        let fetched = stream.fetch(StreamOffset(from), 1 << 20).await.unwrap();
        assert_eq!(fetched.batches[0], batches[usize::try_from(from).unwrap() / 2]);
    }
    assert_eq!(server.store.stats().reads.failures, 0);
    drop(stream);

    let server = restart(server, &world).await;
    let stream = server.open(id).await;
    for flips in [0b11, 0b110] {
        server.objects.flip_reads.store(flips, Ordering::SeqCst);
        let error = stream.fetch(StreamOffset(0), 1).await.unwrap_err();
        assert!(error.to_string().contains("does not match its checksum"), "{error}");
    }
    drop(stream);
    server.close().await;
}

async fn whole(world: &World, name: &str) -> Vec<u8> {
    world.objects.get(&name.into()).await.unwrap().bytes().await.unwrap().to_vec()
}

/// A wrong catalog must not make records vanish silently.
#[tokio::test]
async fn an_object_without_a_range_of_the_catalog_is_an_error() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let (stream, batches) = three_objects(&server).await;
    let id = stream.id();
    drop(stream);
    server.close().await;
    let mut state = world.catalog().await;
    let ranges = &mut state.streams.get_mut(&id).unwrap().ranges;
    ranges[1].object = ranges[0].object;
    let retry = world.options.retry();
    let chain = Chain::new(world.objects.clone(), state.header.store, retry);
    chain.write_snapshot(Snapshot::of(state)).await.unwrap();
    let server = world.start().await;
    let stream = server.store.stream(id).unwrap();
    let before = stream.fetch(StreamOffset(0), 1 << 20).await.unwrap().batches;
    assert_eq!(before, batches[..10], "up to there");
    let error = stream.fetch(StreamOffset(20), 1 << 20).await.unwrap_err().to_string();
    assert!(error.contains("the index has no batches in 20..40"), "{error}");
    drop(stream);
    server.close().await;
}

#[tokio::test]
async fn a_missing_object_is_an_error() {
    let mut world = World::new(64 << 20, 1);
    world.options.block_cache_bytes = 64 << 20;
    let (server, stream, batches) = large_batches(&world, 4).await;
    assert_eq!(stream.fetch(StreamOffset(0), 1_500_000).await.unwrap().batches, batches[..1]);
    let name = names(&world).await.remove(0);
    world.objects.delete(&name.into()).await.unwrap();
    // The index and some blocks are in memory: these are returned first, and then the error.
    let mut next = 0;
    let error = loop {
        match stream.fetch(StreamOffset(next), 1_900_000).await {
            Ok(fetched) => next = fetched.batches.last().expect("something").end().0,
            Err(error) => break error,
        }
    };
    assert!(next < 4 && matches!(error, FetchError::Failed(_)), "{next}: {error}");
    drop(stream);
    server.close().await;
}

/// Blocks are a MiB, and a reader may want a few bytes of each.
#[tokio::test]
async fn batches_keep_at_most_twice_their_payload_in_memory() {
    let world = World::new(8 << 20, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    let batches: Vec<Batch> = (0..2000).map(|i| batch(stream.id(), i, 1, 300)).collect();
    for batch in &batches {
        drop(append(&server.store, &stream, batch).await);
    }
    server.store.flush().await.unwrap();
    let id = stream.id();
    drop(stream);
    let server = restart(server, &world).await;
    let stream = server.open(id).await;
    for from in [0, 700, 1999] {
        let few = stream.fetch(StreamOffset(from), 1000).await.unwrap().batches;
        assert!(!few.is_empty() && few.iter().all(|batch| batch.payload.is_unique()));
    }
    let found = stream.find_time(700 * 10).await.unwrap().unwrap();
    assert_eq!((&found, found.payload.is_unique()), (&batches[700], true));
    let found = stream.max_time().await.unwrap().unwrap();
    assert_eq!((&found, found.payload.is_unique()), (&batches[1999], true));
    let all = stream.fetch(StreamOffset(0), 1 << 20).await.unwrap().batches;
    assert!(all == batches && !all[0].payload.is_unique(), "no copy of a whole block");
    drop(stream);
    server.close().await;
}

/// The greatest timestamp of each block shows which block to read, in any order of timestamps.
#[tokio::test]
async fn a_search_by_time_costs_an_index_and_one_block() {
    let mut world = World::new(32 << 20, 1);
    world.options.upload_bytes = 8 << 20;
    world.options.block_cache_bytes = 64 << 20;
    let server = world.start().await;
    let stream = server.create_log().await;
    // Three in a block.
    let times = [30, 50, 10, 20, -1, 20, 5, 60, 90, 40, 55, 90];
    let batches = times.iter().zip(0..).map(|(time, base)| Batch {
        max_timestamp_ms: *time,
        ..batch(stream.id(), base, 1, 300_000)
    });
    let batches: Vec<Batch> = batches.collect();
    for batch in &batches {
        append(&server.store, &stream, batch).await.await.unwrap();
    }
    server.store.flush().await.unwrap();
    assert_eq!(server.store.stats().objects, 1);
    let id = stream.id();
    drop(stream);
    let server = restart(server, &world).await;
    let stream = server.store.stream(id).unwrap();
    let mut reads = 0;
    for (time, first, cost) in [
        (91, None, 0),
        (51, Some(7), 2), // the index, and the third block
        (61, Some(8), 0),
        (90, Some(8), 0),
        (31, Some(1), 1), // the first block
        (0, Some(0), 0),
        (50, Some(1), 0),
    ] {
        let found = stream.find_time(time).await.unwrap();
        assert_eq!(found, first.map(|at: usize| batches[at].clone()), "from {time} on");
        let before = std::mem::replace(&mut reads, server.objects.reads.load(Ordering::SeqCst));
        assert_eq!(reads - before, cost, "from {time} on");
    }
    assert_eq!(stream.max_time().await.unwrap(), Some(batches[8].clone()));
    assert_eq!(server.objects.reads.load(Ordering::SeqCst), reads);
    drop(stream);
    server.close().await;
}

#[tokio::test]
async fn streams_deleted_during_their_upload_leave_nothing() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let mut streams = Vec::new();
    for kind in [KIND_LOG, KIND_LOG, KIND_STATE] {
        let stream = server.create(kind).await;
        for i in 0..10 {
            append(&server.store, &stream, &batch(stream.id(), i, 1, 100)).await.await.unwrap();
        }
        streams.push(stream);
    }
    let answer = server.objects.answers.lock().await;
    let flush = tokio::spawn({
        let store = server.store.clone();
        async move { store.flush().await }
    });
    while names(&world).await.is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    streams[2].trim(StreamOffset(3)).await.unwrap();
    streams[1].trim(StreamOffset(10)).await.unwrap();
    server.store.commit(vec![delete(streams[0].id())]).await.unwrap();
    drop(answer);
    flush.await.unwrap().unwrap();
    let starts = [streams[1].start_offset(), streams[2].start_offset()];
    assert_eq!(starts, [StreamOffset(10), StreamOffset(10)]);
    while !names(&world).await.is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await; // it is not needed any more
    }
    assert_eq!(server.store.stats().objects, 0);
    drop(streams);
    let server = restart(server, &world).await;
    assert_eq!((server.store.stats().objects, server.store.stats().retired_objects), (0, 0));
    server.close().await;
}

#[tokio::test]
async fn batches_are_found_by_time() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let stream = server.create(KIND_LOG).await;
    let id = stream.id();
    // Not in order, as with clients' clocks; with equal ones, and with none (-1).
    let times = [50, 20, 70, -1, 70, 10, 90, 30, 90, 40];
    let batches: Vec<Batch> = (0u64..)
        .zip(times)
        .map(|(i, max_timestamp_ms)| Batch { max_timestamp_ms, ..batch(id, i, 1, 100) })
        .collect();
    for (i, batch) in batches.iter().enumerate() {
        append(&server.store, &stream, batch).await.await.unwrap();
        if i == 3 || i == 6 {
            server.store.flush().await.unwrap();
        }
    }
    drop(stream);
    let server = restart(server, &world).await;
    let stream = server.open(id).await;
    let check = async |start: usize| {
        for time in [-5, -1, 0, 20, 21, 50, 51, 70, 71, 90, 91] {
            let expected = batches[start..].iter().find(|batch| batch.max_timestamp_ms >= time);
            assert_eq!(
                stream.find_time(time).await.unwrap().as_ref(),
                expected,
                "{time} from {start}"
            );
        }
        let mut expected: Option<&Batch> = None;
        for batch in &batches[start..] {
            if expected.is_none_or(|best| batch.max_timestamp_ms > best.max_timestamp_ms) {
                expected = Some(batch);
            }
        }
        assert_eq!(stream.max_time().await.unwrap().as_ref(), expected, "from {start}");
    };
    for start in 0..=10 {
        stream.trim(StreamOffset(start)).await.unwrap();
        check(usize::try_from(start).unwrap()).await;
    }
    server.store.flush().await.unwrap();
    check(10).await;
    drop(stream);
    server.close().await;
}

#[tokio::test]
async fn large_objects_are_written_in_parts() {
    let mut world = World::new(64 << 20, 1);
    world.options.cache_bytes = 128 << 20;
    world.options.block_cache_bytes = 0;
    let server = world.start().await;
    let mut all = Vec::new();
    for _ in 0..3 {
        let stream = server.create_log().await;
        let batches: Vec<Batch> = (0..7).map(|i| batch(stream.id(), i, 1, 900_000)).collect();
        for batch in &batches {
            append(&server.store, &stream, batch).await.await.unwrap();
        }
        all.push((stream.id(), batches));
    }
    server.store.flush().await.unwrap();
    let stats = server.store.stats();
    assert!(stats.object_bytes > 18_900_000, "{stats:?}");
    let server = restart(server, &world).await;
    for (id, batches) in all {
        let stream = server.open(id).await;
        assert_eq!(read_from(&stream, 0, 3_000_000).await, batches);
    }
    let stats = server.store.stats();
    assert_eq!(stats.block_cache_used_bytes, 0, "switched off");
    server.close().await;
}

/// Returns the number and bytes of requests to the object store.
fn requests(server: &Server, class: &str, kind: &str) -> (u64, u64) {
    let requests = server.store.stats().requests;
    let found = requests.iter().find(|found| (found.class, found.kind) == (class, kind));
    found.map_or((0, 0), |found| (found.count, found.bytes))
}

/// One upload, one commit, several objects: one for each large stream, and one for the rest.
#[tokio::test]
async fn a_large_stream_has_an_object_of_its_own() {
    let mut world = World::new(128 << 20, 1);
    world.options.cache_bytes = 128 << 20;
    world.options.upload_bytes = 32 << 20;
    world.wal_options.max_record_bytes = 2 << 20;
    let server = world.start().await;
    let mut streams = Vec::new();
    // Slightly more than 8 MiB, twice, and three streams with less.
    for count in [9, 1, 8, 7, 1] {
        let stream = server.create_log().await;
        let batches: Vec<Batch> = (0..count).map(|i| batch(stream.id(), i, 1, 1 << 20)).collect();
        for batch in &batches {
            append(&server.store, &stream, batch).await.await.unwrap();
        }
        streams.push((stream, batches));
    }
    server.store.flush().await.unwrap();
    let stats = server.store.stats();
    assert_eq!((stats.uploads, stats.objects), (1, 3));
    assert_eq!(names(&world).await.len(), 3);
    assert!(stats.uploaded_bytes == stats.object_bytes && stats.object_bytes > 26 << 20);
    // All three are slightly larger than one part.
    assert_eq!(requests(&server, "upload", "multipart"), (6, 0));
    assert_eq!(requests(&server, "upload", "part"), (6, stats.uploaded_bytes));
    assert_eq!(requests(&server, "upload", "put"), (0, 0));
    assert_eq!(requests(&server, "clean-up", "delete"), (0, 0));

    // Deleting the stream deletes its object, and no other.
    let delete = |at: usize| server.store.commit(vec![delete(streams[at].0.id())]);
    delete(0).await.unwrap();
    eventually("its object is deleted", || server.store.stats().retired_objects == 0).await;
    assert_eq!((server.store.stats().objects, names(&world).await.len()), (2, 2));
    assert_eq!(requests(&server, "clean-up", "delete"), (1, 0));
    delete(1).await.unwrap();
    assert_eq!(server.store.stats().objects, 2, "others have a part in it");

    server.crash(&mut world);
    let server = world.start().await;
    assert_eq!((server.recovery.batches, server.store.stats().objects), (0, 2));
    for (stream, batches) in &streams[2..] {
        let stream = server.open(stream.id()).await;
        assert_eq!(read_from(&stream, 0, 4 << 20).await, *batches);
    }
    let (count, bytes) = requests(&server, "read", "get");
    assert!(count == server.objects.reads.load(Ordering::SeqCst) && bytes > 16 << 20, "{bytes}");
    server.close().await;
}

/// A connection that died unnoticed delays a reader by seconds, without an error.
#[tokio::test]
async fn a_read_without_a_response_is_retried_once() {
    let world = World::new(WAL_BYTES, 1);
    let (server, stream, batches) = three_cold_objects(&world).await;
    let answer = server.objects.reading.lock().await;
    let fetch = tokio::spawn(async move { stream.fetch(StreamOffset(0), 1).await });
    let reads = || server.objects.reads.load(Ordering::SeqCst);
    eventually("it is asked", || reads() == 1).await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(16)).await;
    tokio::time::resume();
    eventually("it is asked again", || reads() == 2).await;
    drop(answer);
    assert_eq!(fetch.await.unwrap().unwrap().batches, batches[..1]);
    server.close().await;
}
