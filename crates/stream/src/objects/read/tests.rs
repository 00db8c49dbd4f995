//! The cache's policy, and how reads and uploads share the bandwidth to the object store.

mod pages;

use std::collections::VecDeque;
use std::time::Duration;

use alluvium_wal::LogOffset;
use bytes::Bytes;
use object_store::ObjectStoreExt;
use object_store::memory::InMemory;
use tokio::time::Instant;
use uuid::Uuid;

use super::*;
use crate::output::{Attempt, Author, Output, Source};
use crate::tail::{StreamState, Tail};
use crate::types::KIND_LOG;

fn store() -> Arc<dyn ObjectStore> {
    Arc::new(InMemory::new())
}

/// A quarter of the memory for both is for blocks that are read ahead.
fn objects(cache_bytes: u64) -> Objects {
    let block_cache_bytes = (cache_bytes * 4).div_ceil(3);
    let options = Options { block_cache_bytes, ..Options::default() };
    Objects::new(CountedStores::new(&store()), &options, Arc::default()).unwrap()
}

/// A block of full size.
fn decoded() -> Cached {
    Cached::Block(Arc::new(Decoded { batches: Vec::new(), len_bytes: 1 << 20, ahead: None }))
}

fn block(position: u64) -> Key {
    Key::Block(ObjectId(0), position)
}

/// Reads like a reader: from the cache, or fetches and caches the block. Returns whether it was
/// cached.
fn read(objects: &Objects, key: Key) -> bool {
    let hit = objects.core.cache.get(&key).is_some();
    if !hit {
        objects.core.cache.insert(key, decoded());
    }
    hit
}

/// Reads a block ahead.
fn read_ahead(objects: &Objects, key: Key) -> Arc<Decoded> {
    let ahead = Ahead::begin(&objects.core.numbers, std::iter::once(1 << 20)).pop();
    let ahead = ahead.map(Ahead::fetched);
    let decoded = Arc::new(Decoded { batches: Vec::new(), len_bytes: 1 << 20, ahead });
    objects.core.keep(key, &decoded);
    decoded
}

/// Blocks that are read again and again stay cached while much data is read once.
#[tokio::test]
async fn a_scan_does_not_flush_the_cache() {
    let objects = objects(64 << 20);
    let hot = || (0..24).map(|i| read(&objects, block(i))).filter(|hit| *hit).count();
    for _ in 0..3 {
        hot();
    }
    assert_eq!(hot(), 24);
    // A scan of sixteen times the cache; between two rounds of hot reads it reads a half of the
    // cache.
    let mut hits = 0;
    for round in 0..32 {
        for position in 0..32 {
            read(&objects, block(1000 + round * 32 + position));
        }
        hits += hot();
    }
    assert!(hits > 32 * 24 * 95 / 100, "{hits} of {}", 32 * 24);
    // A scan without interruptions.
    for position in 0..1024 {
        read(&objects, block(100_000 + position));
    }
    let hits = hot();
    assert!(hits >= 22, "{hits} of 24 after a scan of 1024");
    // Scans with read-ahead, by this number of blocks.
    for before in [0, 1, 16] {
        let mut ahead = VecDeque::new();
        for position in 0..1024 {
            let key = block(1_000_000 * (1 + before as u64) + position);
            ahead.push_back((key, read_ahead(&objects, key)));
            if ahead.len() > before {
                let (key, decoded) = ahead.pop_front().unwrap();
                objects.core.wanted(key, &decoded);
            }
        }
        let hits = hot();
        assert!(hits >= 22, "{hits} of 24 after a scan that is {before} ahead");
    }
}

/// With many readers, much is read before one of them continues: what was read ahead for it must
/// stay. After its first use it is treated like a block that was fetched.
#[tokio::test]
async fn blocks_read_ahead_stay_until_they_are_requested() {
    let objects = objects(64 << 20);
    let described = |position| Block {
        stream: StreamId(1),
        start: StreamOffset(0),
        end: StreamOffset(1),
        position,
        len_bytes: 1 << 20,
        entries: 1,
        max_timestamp_ms: 0,
        crc32c: 0,
    };
    let is_here = |at: u64| objects.core.cached_block(ObjectId(0), &described(at)).is_some();
    let kept: Vec<_> = (0..16).map(|at| (block(at), read_ahead(&objects, block(at)))).collect();
    for position in 0..1024 {
        read(&objects, block(1_000 + position));
    }
    assert_eq!((0..16).filter(|at| is_here(*at)).count(), 16);
    assert_eq!(objects.core.ahead_buffer.bytes(), 16 << 20);
    kept.iter().for_each(|(key, decoded)| objects.core.wanted(*key, decoded));
    // Not by `cached_block`, which counts as a use.
    let cached = || kept.iter().filter(|(key, _)| objects.core.cache.peek(key).is_some()).count();
    assert_eq!((objects.core.ahead_buffer.bytes(), cached()), (0, 16));
    for position in 0..64 {
        read(&objects, block(10_000 + position));
    }
    assert_eq!(cached(), 0);
}

/// Two readers, a third of the cache apart, with the cache full of other blocks: the second one
/// finds what the first one fetched.
#[tokio::test]
async fn blocks_read_once_stay_for_the_next_reader() {
    let objects = objects(64 << 20);
    for _ in 0..3 {
        for position in 0..64 {
            read(&objects, block(1_000_000 + position));
        }
    }
    let (ahead, mut hits) = (21, 0);
    for position in 0..1000 {
        read(&objects, block(position));
        hits += u64::from(position >= ahead && read(&objects, block(position - ahead)));
    }
    assert!(hits > 950, "{hits} of 979");
}

#[tokio::test]
async fn a_block_as_large_as_half_of_the_cache_is_kept() {
    let objects = objects(16 << 20);
    for i in 0..16 {
        read(&objects, block(i));
    }
    let large = Decoded { batches: Vec::new(), len_bytes: 8 << 20, ahead: None };
    objects.core.cache.insert(block(99), Cached::Block(Arc::new(large)));
    assert!(objects.core.cache.peek(&block(99)).is_some());
}

fn attempt() -> Attempt {
    let nil = Uuid::nil();
    let by = Author { store: nil, incarnation: nil, opening: 0, term: 0 };
    Attempt { id: ObjectId(1), nonce: Uuid::from_u128(1), name: "o".into(), by }
}

/// Writes an object of this number of batches, each a block of a MiB.
async fn written(objects: &Objects, stream: StreamId, batches: u64) -> Arc<ObjectInfo> {
    let attempt = attempt();
    let source = Source::Upload { cut: LogOffset(0) };
    let mut output = Output::new(objects.handle(RequestClass::Upload), &attempt, source, 0);
    let stream = StreamState::new(stream, KIND_LOG, Bytes::new(), Tail::default());
    let mut range = None;
    for base in 0..batches {
        let payload = Bytes::from(vec![base as u8; (1 << 20) - ENTRY_BYTES]);
        let batch = Batch { base: StreamOffset(base), count: 1, max_timestamp_ms: 0, payload };
        if let Some(block) = output.push(&stream, &batch, None, &mut range) {
            output.write(block).await.unwrap();
        }
    }
    Arc::new(output.finish().await.unwrap())
}

/// Both directions count, except for what is cached.
#[tokio::test(start_paused = true)]
async fn writing_and_reading_keep_to_the_rate() {
    let options = Options { object_store_bytes_per_s: 1 << 20, ..Options::default() };
    let objects = Objects::new(CountedStores::new(&store()), &options, Arc::default()).unwrap();
    let begun = Instant::now();
    let stream = StreamId(7);
    let object = written(&objects, stream, 4).await;
    // A burst is free, and the last block's bytes are still a debt when it starts.
    assert_eq!(begun.elapsed().as_millis() / 100, 37);
    for _ in 0..2 {
        for from in [0, 2] {
            let budget = &mut Budget::new(2 << 20);
            let from = StreamOffset(from);
            let part = objects.fetch(&object, stream, from, budget, &mut None).await.unwrap();
            assert_eq!(part.batches.len(), 2);
        }
    }
    // The 2 MiB of the last read are a debt.
    assert_eq!(begun.elapsed().as_millis() / 100, 57);
    let stats = objects.read_stats();
    // For the 48 bytes left of the first budget a third block is used if it is cached, and not
    // fetched otherwise.
    assert_eq!((stats.gets, stats.hits, stats.misses), (3, 5, 4));
}

/// Read-ahead leaves memory and bandwidth to others that could need it.
#[tokio::test(start_paused = true)]
async fn read_ahead_uses_only_spare_memory_and_bandwidth() {
    let options =
        Options { cold_read_bytes: 16 << 20, block_cache_bytes: 16 << 20, ..Options::default() };
    let objects = Objects::new(CountedStores::new(&store()), &options, Arc::default()).unwrap();
    let stream = StreamId(7);
    let object = written(&objects, stream, 12).await;
    let blocks = objects.blocks(&object, stream, StreamOffset(0)).await.unwrap();
    let blocks = blocks.after(StreamOffset(0));

    let all = objects.core.acquire_memory(13 << 20).await;
    let (done, under_way) = objects.fetch_ahead(&object, &blocks[..4]);
    assert_eq!((done, under_way.len()), (0, 0), "others have the permits");
    drop(all);

    let (done, under_way) = objects.fetch_ahead(&object, &blocks[..4]);
    assert_eq!((done, under_way.len()), (4, 1), "one GET");
    assert_eq!(objects.fetch_ahead(&object, &blocks[4..]).0, 0, "a quarter of the cache is unread");
    assert_eq!(objects.read_stats().ahead_unread_bytes, 4 << 20);
    drop(under_way);
    tokio::task::yield_now().await;
    assert_eq!(objects.read_stats().ahead_unread_bytes, 0, "given up");

    let (_, under_way) = objects.fetch_ahead(&object, &blocks[..2]);
    futures::future::join_all(under_way).await;
    let (done, under_way) = objects.fetch_ahead(&object, &blocks[..2]);
    assert_eq!((done, under_way.len()), (2, 0), "they are cached");
    objects.block(&object, &blocks[0]).await.unwrap();
    let stats = objects.read_stats();
    assert_eq!((stats.ahead_used_bytes, stats.ahead_unread_bytes), (1 << 20, 1 << 20));
    // Blocks that are never requested are dropped for others in the end.
    assert_eq!(objects.fetch_ahead(&object, &blocks[4..8]).0, 0);
    tokio::time::advance(Duration::from_secs(5)).await;
    let (done, _under_way) = objects.fetch_ahead(&object, &blocks[4..8]);
    assert_eq!((done, objects.read_stats().ahead_wasted_bytes), (4, 1 << 20));
}

/// A reader that joins a fetch which fails retries once, together with the others: otherwise the
/// last of many would wait for as many deadlines, one after the other.
#[tokio::test]
async fn many_readers_of_an_unreadable_index_retry_once_together() {
    let objects = objects(1 << 20);
    let object = written(&objects, StreamId(7), 1).await;
    objects.delete(&object.name).await.unwrap();
    let readers: Vec<_> = (0..50)
        .map(|_| {
            let (objects, object) = (objects.clone(), object.clone());
            tokio::spawn(async move {
                objects.blocks(&object, StreamId(7), StreamOffset(0)).await.err()
            })
        })
        .collect();
    for reader in readers {
        assert!(reader.await.unwrap().is_some_and(|error| error.is_not_found()));
    }
    let stats = objects.read_stats();
    assert_eq!((stats.gets, stats.failures), (2, 2));
}

#[tokio::test]
async fn failed_reads_are_counted() {
    let objects = objects(1 << 20);
    let object = written(&objects, StreamId(7), 1).await;
    let store = objects.store(RequestClass::Upload);
    let whole = store.get(&"o".into()).await.unwrap().bytes().await.unwrap();
    let last_of_index = usize::try_from(object.index_position + object.index_bytes).unwrap() - 1;
    for (at, failures) in [(last_of_index, 1), (100, 2), (0, 2)] {
        let mut damaged = whole.to_vec();
        damaged[at] ^= 1;
        store.put(&"o".into(), damaged.into()).await.unwrap();
        let budget = &mut Budget::new(1);
        let from = StreamOffset(0);
        let part = objects.fetch(&object, StreamId(7), from, budget, &mut None).await;
        assert_eq!(part.is_ok(), at == 0, "readers do not read the header");
        assert_eq!(objects.read_stats().failures, failures);
    }
}

/// There may be a hundred thousand streams in an object, and a thousand readers at as many objects.
#[test]
fn a_reader_keeps_only_its_streams_part_of_an_index() {
    let block = |stream, position| Block {
        stream: StreamId(stream),
        start: StreamOffset(position),
        end: StreamOffset(position + 1),
        position,
        len_bytes: 1,
        entries: 1,
        max_timestamp_ms: 0,
        crc32c: 0,
    };
    let index: Vec<_> = (0..100).map(|number| block(number / 2, number)).collect();
    let index = Arc::new(index);
    for stream in 0..=50 {
        let blocks = StreamBlocks::new(index.clone(), StreamId(stream));
        let positions = blocks.after(StreamOffset(0)).iter().map(|block| block.position);
        let expected = (2 * stream..2 * stream + 2).filter(|_| stream < 50);
        assert!(positions.eq(expected), "stream {stream}");
    }
    let blocks = StreamBlocks::new(index.clone(), StreamId(7));
    assert!(Arc::strong_count(&index) == 1 && blocks.index().len() == 2);
    let alone = Arc::new(vec![block(7, 0), block(7, 1)]);
    let blocks = StreamBlocks::new(alone.clone(), StreamId(7));
    assert!(Arc::ptr_eq(blocks.index(), &alone), "nothing is copied if all of it is the stream's");
}
