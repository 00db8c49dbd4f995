//! Format versions of objects: what an earlier version has written, and what an object states of
//! itself. `docs/format/object.md`.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use alluvium_device::sim::SimDisk;
use alluvium_stream::{
    Batch, Change, Directory, KIND_LOG, LogOffset, StoredObject, StreamEpoch, StreamId,
    read_directory,
};
use bytes::Bytes;
use common::*;
use object_store::ObjectStoreExt;
use object_store::path::Path;

/// A log of 1 MiB and its object store, as a build before version 2 of objects has left them: three
/// streams in nine objects of four batches of each, and one batch of each in the log.
static VERSION_1: &[u8] = include_bytes!("data/store-v1.zst");

/// Returns the payload bytes of the batches of each stream of [`VERSION_1`].
fn payload_bytes(stream: usize) -> usize {
    100 + 50 * stream
}

/// Reads a name and bytes, each after both lengths.
fn take<'a>(rest: &mut &'a [u8]) -> (&'a str, &'a [u8]) {
    let length = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap()) as usize;
    let (name_bytes, len_bytes) = (length(0), length(4));
    let (name, then) = rest[8..].split_at(name_bytes);
    let (bytes, then) = then.split_at(len_bytes);
    *rest = then;
    (std::str::from_utf8(name).unwrap(), bytes)
}

/// Returns the world of [`VERSION_1`].
async fn world_of_version_1() -> World {
    let all = zstd::bulk::decompress(VERSION_1, 4 << 20).unwrap();
    let mut rest = &all[..];
    let (name, image) = take(&mut rest);
    assert_eq!(name, "wal");
    let mut objects = Contents::new();
    while !rest.is_empty() {
        let (name, bytes) = take(&mut rest);
        objects.push((Path::from(name), Bytes::copy_from_slice(bytes)));
    }
    let mut world = World::new(1 << 20, 1);
    world.disk = SimDisk::from_image(image, world.disk_options());
    world.objects = Arc::new(in_memory(&objects).await);
    world
}

async fn directories(world: &World) -> Vec<Directory> {
    let mut directories = Vec::new();
    for name in names(world).await {
        directories.push(read_directory(&*world.objects, &name).await.unwrap());
    }
    directories
}

/// The format versions that the catalog states, and how often.
async fn formats(world: &World) -> BTreeMap<u8, usize> {
    let mut formats = BTreeMap::new();
    for object in world.catalog().await.objects.values() {
        *formats.entry(object.format).or_default() += 1;
    }
    formats
}

#[tokio::test]
async fn a_store_of_version_1_is_read_and_compacted() {
    let mut world = world_of_version_1().await;
    assert_eq!(formats(&world).await, BTreeMap::from([(1, 9)]));
    for directory in directories(&world).await {
        let rows = directory.rows.iter().map(|row| (row.label.clone(), row.payload_bytes));
        let expected = (0..3).map(|stream| (None, 4 * payload_bytes(stream) as u64));
        assert!(rows.eq(expected), "the index says what is there: {directory:?}");
        assert_eq!((directory.format, directory.origin), (1, None));
    }

    let server = world.start().await;
    let mut ids = server.store.stream_ids();
    ids.sort();
    let written = |stream: usize, batches: u64| -> Vec<Batch> {
        let batches = (0..batches).map(|number| {
            let of_log = number == 36;
            let len_bytes = if of_log { 70 } else { payload_bytes(stream) };
            batch(ids[stream], number * 2, 2, len_bytes)
        });
        batches.collect()
    };
    for (stream, id) in ids.iter().enumerate() {
        let read = read_from(&server.store.stream(*id).unwrap(), 0, 700).await;
        assert!(read == written(stream, 37), "stream {id}");
    }
    // The next upload is of version 2, beside the others.
    server.store.flush().await.unwrap();
    server.close().await;
    assert_eq!(formats(&world).await, BTreeMap::from([(1, 9), (2, 1)]));

    world.options.compaction_bytes = 64 << 10;
    let server = world.start().await;
    eventually("objects are compacted", || server.store.stats().objects < 10).await;
    eventually("the sources are gone", || server.store.stats().retired_objects == 0).await;
    server.close().await;
    let compacted = formats(&world).await;
    assert!(compacted[&2] >= 2 && compacted.get(&1).is_none_or(|left| *left < 8), "{compacted:?}");

    world.options.compaction_bytes = 0;
    let server = world.start().await;
    for (stream, id) in ids.iter().enumerate() {
        let stored = server.store.stream(*id).unwrap();
        assert!(read_from(&stored, 0, 700).await == written(stream, 37), "stream {id}");
        let found = stored.find_time(20 * 35).await.unwrap();
        assert!(found.as_ref() == written(stream, 37).get(35), "stream {id}");
    }
    server.close().await;
    let state = world.catalog().await;
    let of_version_2: Vec<_> =
        directories(&world).await.into_iter().filter(|directory| directory.format == 2).collect();
    assert_eq!(of_version_2.len(), compacted[&2]);
    for directory in of_version_2 {
        let origin = directory.origin.unwrap();
        assert_eq!(origin.store, state.header.store);
        let object = state.objects.values().find(|object| object.nonce == directory.nonce).unwrap();
        assert_eq!(origin.generation, u32::from(object.generation));
        assert_eq!(origin.created_at_ms, object.created_at_ms);
        assert_eq!(origin.cut == LogOffset(0), object.generation > 0, "only of an upload");
    }
}

/// Creates streams with labels, and appends a batch to each.
async fn labelled(server: &Server, count: u32) -> Vec<(StreamId, Bytes, Batch)> {
    let ids = server.store.new_stream_ids(count).await.unwrap();
    let label = |id: StreamId| Bytes::from(format!(r#"{{"topic":"t","partition":{id}}}"#));
    for some in ids.chunks(1000) {
        let create =
            |id: &StreamId| Change::CreateStream { id: *id, kind: KIND_LOG, label: label(*id) };
        server.store.commit(some.iter().map(create).collect()).await.unwrap();
    }
    let mut streams = Vec::new();
    for id in ids {
        let stream = server.store.open_stream(id, StreamEpoch(0)).await.unwrap();
        let batch = batch(id, 0, 1, 20);
        append(&server.store, &stream, &batch).await.await.unwrap();
        streams.push((id, label(id), batch));
    }
    streams
}

/// Checks that a directory states what the catalog states of its object, and the labels.
async fn check(world: &World, name: &str, streams: &[(StreamId, Bytes, Batch)]) {
    let directory = read_directory(&*world.objects, name).await.unwrap();
    let state = world.catalog().await;
    let object = state.objects.values().find(|object| name == object.name(state.header.store));
    let object = object.unwrap();
    assert_eq!(directory.format, u32::from(object.format));
    assert_eq!(directory.nonce, object.nonce);
    assert_eq!(
        (directory.size_bytes, directory.index_position, directory.index_bytes),
        (object.size_bytes, object.index_position, object.index_bytes)
    );
    assert_eq!(directory.index_crc32c, object.index_crc32c);
    assert_eq!(directory.payload_bytes(), object.payload_bytes);
    let origin = directory.origin.unwrap();
    let header = &state.header;
    assert_eq!((origin.store, origin.incarnation), (header.store, header.incarnation));
    assert_eq!((origin.opening, origin.term), (header.opening, state.head.term));
    assert_eq!((origin.generation, origin.created_at_ms), (0, object.created_at_ms));
    assert_eq!(origin.cut, header.cut);
    assert_eq!(directory.rows.len(), streams.len());
    for (row, (id, label, _)) in directory.rows.iter().zip(streams) {
        assert_eq!((row.stream, row.kind, row.label.as_ref()), (*id, KIND_LOG, Some(label)));
        let range = &state.streams[id].ranges[0];
        assert_eq!((row.start, row.end), (range.start, range.end));
        assert_eq!(
            (row.payload_bytes, row.max_timestamp_ms),
            (range.payload_bytes, range.max_timestamp_ms)
        );
    }
}

#[tokio::test]
async fn an_object_states_its_writer_and_its_streams() {
    let mut world = World::new(1 << 20, 1);
    let server = world.start().await;
    let streams = labelled(&server, 5).await;
    server.store.flush().await.unwrap();
    let name = names(&world).await.remove(0);
    check(&world, &name, &streams).await;
    server.close().await;

    // After a restart the labels are those of the catalog, in the object store or in the log.
    let server = world.start().await;
    let recorded = labelled(&server, 2).await;
    server.crash(&mut world);
    let server = world.start().await;
    let mut all = streams.clone();
    for (id, _, batch) in &mut all {
        let stream = server.open(*id).await;
        *batch = common::batch(*id, 1, 1, 20);
        append(&server.store, &stream, batch).await.await.unwrap();
    }
    all.extend(recorded);
    server.store.flush().await.unwrap();
    let directory = directories(&world).await.pop().unwrap();
    let labels = directory.rows.iter().map(|row| (row.stream, row.label.clone().unwrap()));
    assert!(labels.eq(all.into_iter().map(|(id, label, _)| (id, label))));
    server.close().await;
}

/// With 10,000 streams in an object, a reader of one of them fetches only a part of the index.
#[tokio::test]
async fn reading_one_stream_of_many_fetches_a_part_of_the_index() {
    const STREAMS: u32 = 10_000;
    let mut world = World::new(64 << 20, 1);
    world.options.upload_bytes = 16 << 20;
    let server = world.start().await;
    let streams = labelled(&server, STREAMS).await;
    server.store.flush().await.unwrap();
    assert_eq!(server.store.stats().objects, 1);
    server.close().await;
    let name = names(&world).await.remove(0);
    check(&world, &name, &streams).await;
    let stored = StoredObject::open(world.objects.clone(), &Path::from(name.as_str())).await;
    let stored = stored.unwrap();
    assert_eq!(stored.blocks.len(), STREAMS as usize);
    assert!(stored.verify(&|_| {}).await.unwrap().is_empty());

    let block_bytes = 24 + 20;
    for number in [0, 72, 73, 5000, 9998, 9999] {
        let server = world.start().await;
        let (id, _, batch) = &streams[number];
        let stream = server.store.stream(*id).unwrap();
        let read = read_from(&stream, 0, 1 << 20).await;
        assert_eq!(&read[..], std::slice::from_ref(batch));
        let stats = server.store.stats().reads;
        assert_eq!(stats.gets, 3, "the top, a page, and a block");
        let index_bytes = stats.get_bytes - block_bytes;
        println!("stream {number} of {STREAMS}: {index_bytes} bytes of the index");
        assert!(index_bytes <= 16 << 10, "{index_bytes} bytes of the index");
        // Another stream of the same page.
        let (id, _, batch) = &streams[if number % 73 == 0 { number + 1 } else { number - 1 }];
        let other = read_from(&server.store.stream(*id).unwrap(), 0, 1 << 20).await;
        assert_eq!(&other[..], std::slice::from_ref(batch));
        assert_eq!(server.store.stats().reads.gets, 4, "a block only");
        server.close().await;
    }
    // Damaged in transit, in turn: the top, the page, the block, and each of them.
    for flips in [0b1, 0b10, 0b100, 0b10101] {
        let server = world.start().await;
        let (id, _, batch) = &streams[1234];
        let stream = server.store.stream(*id).unwrap();
        server.objects.flip_reads.store(flips, Ordering::SeqCst);
        let read = read_from(&stream, 0, 1 << 20).await;
        assert_eq!(&read[..], std::slice::from_ref(batch), "flips {flips:b}");
        let stats = server.store.stats().reads;
        assert_eq!(stats.gets, 3 + u64::from(flips.count_ones()));
        assert_eq!(stats.failures, 0);
        server.close().await;
    }
    let server = world.start().await;
    server.objects.flip_reads.store(0b110, Ordering::SeqCst);
    let stream = server.store.stream(streams[1234].0).unwrap();
    let error =
        stream.fetch(alluvium_stream::StreamOffset(0), 1 << 20).await.unwrap_err().to_string();
    assert!(
        error.contains("page 16 of the index does not match") && error.contains(&name),
        "{error}"
    );
    server.close().await;
}

#[tokio::test]
async fn an_object_of_a_later_version_in_the_catalog_is_refused() {
    let world = World::new(1 << 20, 1);
    let server = world.start().await;
    let (stream, _) = three_objects(&server).await;
    drop(stream);
    server.close().await;
    let mut state = world.catalog().await;
    let object = state.objects.values_mut().next().unwrap();
    object.format = 3;
    let retry = world.options.retry();
    let chain =
        alluvium_stream::chain::Chain::new(world.objects.clone(), state.header.store, retry);
    let snapshot = alluvium_stream::chain::Snapshot::of(state);
    chain.write_snapshot(snapshot).await.unwrap();
    let error = world.try_start(Arc::new(Hash)).await.err().unwrap().to_string();
    assert!(error.contains("format version 3 of an object"), "{error}");
    assert!(world.objects.head(&names(&world).await[0].as_str().into()).await.is_ok());
}
