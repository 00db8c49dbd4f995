//! Cold reads: their results, their cost, and that they do not disturb other traffic. See
//! `docs/cold-reads.md`.

mod common;

use std::future::{pending, ready};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use alluvium_device::sim::Random;
use alluvium_stream::{Batch, FetchError, Stream, StreamId, StreamOffset, StreamWriter};
use common::*;
use futures::future::join_all;

const MIB: usize = 1 << 20;

/// Creates streams in several objects, each with blocks of about a MiB, with nothing of them in
/// memory.
async fn cold_streams(
    world: &World,
    streams: usize,
    objects: u64,
    per_object: u64,
) -> (Server, Vec<Vec<Batch>>) {
    let server = world.start().await;
    let mut all: Vec<(StreamWriter, Vec<Batch>)> = Vec::new();
    for _ in 0..streams {
        all.push((server.create_log().await, Vec::new()));
    }
    for object in 0..objects {
        for (stream, batches) in &mut all {
            for i in object * per_object..(object + 1) * per_object {
                let batch = batch(stream.id(), i * 3, 3, 300_000 + (i as usize * 7919) % 400_000);
                append(&server.store, stream, &batch).await.await.unwrap();
                batches.push(batch);
            }
        }
        server.store.flush().await.unwrap();
    }
    let batches = all.into_iter().map(|(_, batches)| batches).collect();
    server.close().await;
    (world.start().await, batches)
}

fn stream_of(server: &Server, batches: &[Batch]) -> Stream {
    let of = |id: &StreamId| payload(*id, batches[0].base.0, 32) == batches[0].payload[..32];
    let id = server.store.stream_ids().into_iter().find(of).unwrap();
    server.store.stream(id).unwrap()
}

fn reads(server: &Server) -> u64 {
    server.objects.reads.load(Ordering::SeqCst)
}

fn large_world(seed: u64) -> World {
    let mut world = World::new(64 << 20, seed);
    world.options.upload_bytes = 16 << 20;
    world.options.block_cache_bytes = 32 << 20;
    world
}

#[tokio::test]
async fn readers_at_the_same_position_share_fetches() {
    let (server, all) = cold_streams(&large_world(1), 1, 1, 6).await;
    let stream = stream_of(&server, &all[0]);
    let reading = server.objects.reading.lock().await;
    let readers: Vec<_> = (0..20)
        .map(|_| {
            let stream = stream.clone();
            tokio::spawn(async move { stream.fetch(StreamOffset(0), 50 * MIB).await })
        })
        .collect();
    eventually("all wait", || server.store.stats().reads.waiting == 20).await;
    assert_eq!(reads(&server), 1, "the index");
    // The first reader leaves; the others still get the data.
    readers[0].abort();
    drop(reading);
    for reader in readers.into_iter().skip(1) {
        assert_eq!(reader.await.unwrap().unwrap().batches, all[0]);
    }
    assert_eq!(reads(&server), 2, "the index and the blocks, once");
    drop(stream);
    server.close().await;
}

#[tokio::test]
async fn a_fetch_past_its_deadline_finds_the_data_the_next_time() {
    let (server, all) = cold_streams(&large_world(2), 1, 1, 6).await;
    let stream = stream_of(&server, &all[0]);
    let reading = server.objects.reading.lock().await;
    for _ in 0..3 {
        let fetched = stream.fetch_until(StreamOffset(0), 50 * MIB, ready(())).await.unwrap();
        assert!(fetched.cold && fetched.batches.is_empty());
        assert!(fetched.durable_end == all[0][5].end());
    }
    assert!(stream.fetch_now(StreamOffset(0), MIB).unwrap().cold);
    eventually("it continues", || reads(&server) == 1).await;
    drop(reading);
    eventually("the index is there", || server.store.stats().block_cache_used_bytes > 0).await;
    let reading = server.objects.reading.lock().await;
    assert!(
        stream.fetch_until(StreamOffset(0), 50 * MIB, ready(())).await.unwrap().batches.is_empty()
    );
    drop(reading);
    eventually("and the blocks", || server.store.stats().block_cache_used_bytes > MIB as u64).await;
    eventually("all of them", || {
        stream.fetch_now(StreamOffset(0), 50 * MIB).unwrap().batches == all[0]
    })
    .await;
    assert_eq!(reads(&server), 2);
    drop(stream);
    server.close().await;
}

#[tokio::test]
async fn a_dropped_fetch_cancels_its_requests() {
    let (server, all) = cold_streams(&large_world(3), 1, 1, 6).await;
    let stream = stream_of(&server, &all[0]);
    let reading = server.objects.reading.lock().await;
    let reader = tokio::spawn({
        let stream = stream.clone();
        async move { stream.fetch_until(StreamOffset(0), MIB, pending()).await.map(drop) }
    });
    eventually("it reads", || server.objects.open_bytes.load(Ordering::SeqCst) > 0).await;
    reader.abort();
    eventually("it is cancelled", || server.objects.open_bytes.load(Ordering::SeqCst) == 0).await;
    assert_eq!(server.store.stats().reads.waiting, 0);
    drop(reading);
    assert_eq!(read_from(&stream, 0, 2 * MIB).await, all[0]);
    drop(stream);
    server.close().await;
}

/// A read must wait for blocks that the cache cannot keep: they would be fetched again without end.
#[tokio::test]
async fn a_reader_without_a_cache_makes_progress() {
    let mut world = large_world(4);
    world.options.block_cache_bytes = 0;
    let (server, all) = cold_streams(&world, 1, 2, 5).await;
    let stream = stream_of(&server, &all[0]);
    let mut read: Vec<Batch> = Vec::new();
    while read.len() < all[0].len() {
        let next = read.last().map_or(StreamOffset(0), Batch::end);
        let fetched = stream.fetch_until(next, 2 * MIB, ready(())).await.unwrap();
        assert!(!fetched.batches.is_empty(), "at {next}");
        read.extend(fetched.batches);
    }
    assert_eq!(read, all[0]);
    drop(stream);
    server.close().await;
}

#[tokio::test]
async fn a_sequential_reader_finds_the_next_blocks_and_objects_fetched() {
    let (server, all) = cold_streams(&large_world(5), 1, 4, 8).await;
    let stream = stream_of(&server, &all[0]);
    let mut read: Vec<Batch> = Vec::new();
    let mut waited = 0;
    while read.len() < all[0].len() {
        let next = read.last().map_or(StreamOffset(0), Batch::end);
        let mut fetched = stream.fetch_now(next, MIB).unwrap();
        if fetched.batches.is_empty() {
            waited += 1;
            fetched = stream.fetch(next, MIB).await.unwrap();
        }
        read.extend(fetched.batches);
        // The reader is busy with what it has.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }
    assert_eq!(read, all[0]);
    let stats = server.store.stats().reads;
    assert!(waited <= 3, "{waited} waits for 32 batches in 4 objects: {stats:?}");
    let bytes: u64 = all[0].iter().map(|batch| batch.payload.len() as u64).sum();
    assert!(stats.get_bytes < bytes + (64 << 10), "nothing is fetched twice: {stats:?}");
    assert!(stats.ahead_used_bytes > bytes / 2 && stats.ahead_wasted_bytes == 0, "{stats:?}");
    assert!(stats.gets < 16, "neighbours with one GET: {stats:?}");
    assert_eq!((stats.returned_bytes, stats.ahead_unread_bytes, stats.waiting), (bytes, 0, 0));

    drop(stream);
    server.close().await;
}

#[tokio::test]
async fn nothing_is_read_ahead_for_a_random_reader() {
    let (server, all) = cold_streams(&large_world(5), 1, 4, 8).await;
    let stream = stream_of(&server, &all[0]);
    for at in [20, 3, 28, 11, 15, 7] {
        let fetched = stream.fetch(all[0][at].base, 1).await.unwrap();
        assert_eq!(fetched.batches, all[0][at..=at]);
    }
    let stats = server.store.stats().reads;
    assert_eq!((stats.ahead_used_bytes, stats.ahead_unread_bytes), (0, 0), "{stats:?}");
    drop(stream);
    server.close().await;
}

/// The bound is on bytes of all readers.
#[tokio::test]
async fn five_hundred_readers_stay_within_the_bound() {
    let mut world = large_world(6);
    world.options.cold_read_bytes = 8 << 20;
    let (server, all) = cold_streams(&world, 8, 1, 4).await;
    let streams: Vec<_> = all.iter().map(|batches| stream_of(&server, batches)).collect();
    *server.objects.chance.lock() = Some(Random::new(6)); // responses take a while
    let reading = server.objects.reading.lock().await;
    let mut readers = Vec::new();
    for reader in 0..500 {
        let (streams, all) = (streams.clone(), all.clone());
        readers.push(tokio::spawn(async move {
            let read = streams.iter().zip(&all).map(async |(stream, batches)| {
                let from = (reader % batches.len()) as u64 * 3;
                let read = stream.fetch(StreamOffset(from), 50 * MIB).await.unwrap();
                assert_eq!(read.batches, batches[reader % batches.len()..]);
            });
            join_all(read).await;
        }));
    }
    eventually("all wait", || server.store.stats().reads.waiting == 500 * 8).await;
    drop(reading);
    for reader in readers {
        reader.await.unwrap();
    }
    let most = server.objects.most_open_bytes.load(Ordering::SeqCst);
    assert!((4 << 20..=8 << 20).contains(&most), "{most} bytes at a time");
    let stats = server.store.stats().reads;
    let bytes: usize = all.iter().flatten().map(|batch| batch.payload.len()).sum();
    assert!(stats.get_bytes < 2 * bytes as u64, "{stats:?} for {bytes}");
    drop(streams);
    server.close().await;
}

/// Many readers of several kinds, a slow and failing object store, readers that give up, and trims:
/// every batch read is the one that was written.
#[tokio::test]
async fn concurrent_reads_return_what_was_written_despite_failures() {
    for seed in 0..6 {
        let mut world = large_world(seed);
        // From a cache for a few blocks to one for all of them.
        world.options.block_cache_bytes = (3 << 20) << seed;
        world.options.cold_read_bytes = 8 << 20;
        let (server, all) = cold_streams(&world, 2, 3, 6).await;
        *server.objects.chance.lock() = Some(Random::new(seed));
        server.objects.reads_fail_permille.store(100, Ordering::SeqCst);
        let all = Arc::new(all);
        let mut readers = Vec::new();
        for reader in 0..12 {
            let batches = all.clone();
            let streams: Vec<_> = all.iter().map(|batches| stream_of(&server, batches)).collect();
            readers.push(tokio::spawn(async move {
                let mut random = Random::new(seed * 1000 + reader);
                let (stream, batches) =
                    (&streams[reader as usize % 2], &batches[reader as usize % 2]);
                let mut next = StreamOffset(0);
                for _ in 0..60 {
                    if random.next_u64().is_multiple_of(10) {
                        next = batches[random.next_u64() as usize % batches.len()].base;
                    }
                    let max_bytes = random.next_u64() as usize % (3 * MIB);
                    let read = match random.next_u64() % 4 {
                        0 => stream.fetch_now(next, max_bytes),
                        1 => {
                            let mut yields = random.next_u64() % 30;
                            let enough = async {
                                while yields > 0 {
                                    yields -= 1;
                                    tokio::task::yield_now().await;
                                }
                            };
                            stream.fetch_until(next, max_bytes, enough).await
                        }
                        2 => {
                            let reading = stream.fetch(next, max_bytes);
                            let soon = async {
                                for _ in 0..5 {
                                    tokio::task::yield_now().await;
                                }
                            };
                            tokio::select! {
                                read = reading => read,
                                () = soon => continue,
                            }
                        }
                        _ => stream.fetch(next, max_bytes).await,
                    };
                    match read {
                        Ok(fetched) => {
                            let first = batches.partition_point(|batch| batch.end() <= next);
                            let expected = &batches[first..first + fetched.batches.len()];
                            assert_eq!(fetched.batches, expected, "seed {seed}, reader {reader}");
                            next = expected.last().map_or(next, Batch::end);
                        }
                        Err(FetchError::OutOfRange { start, .. }) => next = start,
                        Err(FetchError::Failed(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }));
        }
        // Objects are deleted while they are read.
        for at in [2, 6, 9, 12] {
            for _ in 0..200 {
                tokio::task::yield_now().await;
            }
            server
                .open(stream_of(&server, &all[1]).id())
                .await
                .trim(all[1][at].base)
                .await
                .unwrap();
        }
        for reader in readers {
            reader.await.unwrap();
        }
        assert!(server.objects.most_open_bytes.load(Ordering::SeqCst) <= 8 << 20);
        server.objects.reads_fail_permille.store(0, Ordering::SeqCst);
        assert_eq!(read_from(&stream_of(&server, &all[0]), 0, 2 * MIB).await, all[0]);
        eventually("nothing is left open", || {
            server.objects.open_bytes.load(Ordering::SeqCst) == 0
        })
        .await;
        server.close().await;
    }
}
