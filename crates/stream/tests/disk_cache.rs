//! The disk cache behind a store: what is on disk is not requested from the object store, also
//! after a restart, and whatever happens to the directory, readers get what was written.
//! `docs/disk-cache.md`.

mod common;

use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;

use alluvium_device::sim::Random;
use alluvium_stream::{Batch, DiskCacheOptions, DiskCacheStats, StreamId};
use common::*;
use futures::future::join_all;
use tempfile::TempDir;

const MIB: usize = 1 << 20;

fn directory() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// A world with a disk cache in `directory`, and hardly any block cache, so that second reads go to
/// the disk cache.
fn world(seed: u64, directory: &Path) -> World {
    let mut world = World::new(64 << 20, seed);
    world.options.upload_bytes = 16 << 20;
    world.options.block_cache_bytes = 2 << 20;
    world.options.disk_cache = Some(DiskCacheOptions {
        directory: directory.to_owned(),
        max_disk_bytes: 64 << 20,
        memory_bytes: 8 << 20,
    });
    world
}

/// Writes a stream in two objects; nothing of it is in memory or on disk.
async fn written(world: &World, batches: u64, batch_bytes: usize) -> (StreamId, Vec<Batch>) {
    let server = world.start().await;
    let stream = server.create_log().await;
    let id = stream.id();
    let all: Vec<_> = (0..batches).map(|i| batch(id, i * 3, 3, batch_bytes)).collect();
    for half in all.chunks(all.len().div_ceil(2)) {
        for batch in half {
            append(&server.store, &stream, batch).await.await.unwrap();
        }
        server.store.flush().await.unwrap();
    }
    assert_eq!(server.store.stats().objects, 2);
    drop(stream);
    server.close().await;
    (id, all)
}

fn stats(server: &Server) -> DiskCacheStats {
    server.store.stats().disk_cache
}

fn reads(server: &Server) -> u64 {
    server.objects.reads.load(Ordering::SeqCst)
}

/// Starts a server and waits until its disk cache is open.
async fn start(world: &World) -> Server {
    opened(world.start().await).await
}

async fn opened(server: Server) -> Server {
    eventually("the disk cache is open", || stats(&server).is_open || stats(&server).has_failed)
        .await;
    assert!(!stats(&server).has_failed);
    server
}

async fn read(server: &Server, id: StreamId) -> Vec<Batch> {
    read_from(&server.store.stream(id).unwrap(), 0, 3 * MIB).await
}

/// Waits until everything that was fetched is on disk.
async fn wait_until_written(server: &Server) {
    let is_written = |stats: DiskCacheStats| stats.writes + stats.dropped_writes >= stats.misses;
    eventually("what was fetched is on disk", || is_written(stats(server))).await;
    assert_eq!(stats(server).dropped_writes, 0);
}

#[tokio::test]
async fn blocks_read_before_a_restart_are_not_fetched_again() {
    let directory = directory();
    let world = world(1, directory.path());
    let (id, batches) = written(&world, 20, 400_000).await;

    let server = start(&world).await;
    assert!(read(&server, id).await == batches);
    wait_until_written(&server).await;
    let fetched = reads(&server);
    assert!(fetched >= 4, "two indexes, and the blocks of two objects");
    let first = stats(&server);
    assert!(first.written_bytes > 8_000_000, "{first:?}");
    // The block cache holds only a part of it.
    assert!(read(&server, id).await == batches);
    assert_eq!(reads(&server), fetched);
    assert!(stats(&server).hits > 0);
    server.close().await;

    let server = start(&world).await;
    assert!(read(&server, id).await == batches);
    let again = stats(&server);
    assert_eq!((reads(&server), server.store.stats().reads.gets), (0, 0), "{again:?}");
    assert_eq!((again.misses, again.writes, again.damaged, again.errors), (0, 0, 0, 0));
    assert!(again.hits >= again.entries as u64 && again.hit_bytes > 8_000_000, "{again:?}");
    server.close().await;
}

#[tokio::test]
async fn blocks_on_disk_are_read_while_the_object_store_is_down() {
    let directory = directory();
    let world = world(2, directory.path());
    let (id, batches) = written(&world, 20, 400_000).await;
    let server = start(&world).await;
    assert!(read(&server, id).await == batches);
    wait_until_written(&server).await;
    server.close().await;

    let server = world.start().await;
    server.objects.down.store(true, Ordering::SeqCst);
    let server = opened(server).await;
    assert!(read(&server, id).await == batches);
    server.close().await;
}

#[tokio::test]
async fn a_lost_directory_only_slows_reads_down() {
    let directory = directory();
    let world = world(3, directory.path());
    let (id, batches) = written(&world, 20, 400_000).await;
    for is_in_use in [false, true, false] {
        let server = start(&world).await;
        if is_in_use {
            // Files are created in it meanwhile.
            while directory.path().exists() {
                let _ = fs::remove_dir_all(directory.path());
            }
        }
        assert!(read(&server, id).await == batches);
        assert!(reads(&server) >= 4, "all of it from the object store");
        assert!(read(&server, id).await == batches, "from any level of the cache");
        server.close().await;
        let _ = fs::remove_dir_all(directory.path());
    }
}

/// Changes bytes anywhere in the files of a directory, or truncates one.
fn damage(directory: &Path, random: &mut Random) {
    let mut files: Vec<_> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for _ in 0..1 + random.index(12) {
        let path = &files[random.index(files.len())];
        let mut bytes = fs::read(path).unwrap();
        if bytes.is_empty() {
            continue;
        }
        let at = random.index(bytes.len());
        match random.below(8) {
            0 => bytes.truncate(at),
            1 => {
                let end = bytes.len().min(at + random.index(20_000));
                bytes[at..end].fill(random.below(256) as u8);
            }
            _ => bytes[at] ^= 1 << random.below(8),
        }
        fs::write(path, bytes).unwrap();
    }
}

#[tokio::test]
async fn a_damaged_directory_does_not_affect_reads_and_is_repaired() {
    let directory = directory();
    let world = world(4, directory.path());
    let (id, batches) = written(&world, 60, 20_000).await;
    let mut fetched = 0;
    for seed in 0..30 {
        let server = start(&world).await;
        assert!(read(&server, id).await == batches, "seed {seed}");
        wait_until_written(&server).await;
        fetched += reads(&server);
        server.close().await;

        let server = start(&world).await;
        assert!(read(&server, id).await == batches, "seed {seed}");
        assert_eq!(reads(&server), 0, "seed {seed}: what was damaged was cached again");
        server.close().await;
        damage(directory.path(), &mut Random::new(seed));
    }
    assert!(fetched > 10, "nothing was hit");
}

/// Concurrent readers, each in another order, read more than the disk may hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_readers_of_more_than_the_cache_holds_get_what_was_written() {
    let directory = directory();
    let mut world = world(5, directory.path());
    let (id, batches) = written(&world, 60, 400_000).await;
    let disk = world.options.disk_cache.as_mut().unwrap();
    (disk.max_disk_bytes, disk.memory_bytes) = (12 << 20, 4 << 20);
    world.options.background_threads = 2;
    let server = start(&world).await;
    let readers = (0..8).map(|seed| {
        let (stream, batches) = (server.store.stream(id).unwrap(), batches.clone());
        tokio::spawn(async move {
            let mut random = Random::new(seed);
            for _ in 0..20 {
                let first = random.index(batches.len());
                let max_bytes = 1 + random.index(4 * MIB);
                let fetched = stream.fetch(batches[first].base, max_bytes).await.unwrap();
                let count = fetched.batches.len();
                assert!(count > 0 && fetched.batches == batches[first..first + count]);
            }
        })
    });
    for reader in join_all(readers).await {
        reader.unwrap();
    }
    eventually("the oldest was evicted", || stats(&server).evicted > 0).await;
    let stats = stats(&server);
    assert!(stats.is_open && stats.hits > 0 && stats.damaged == 0, "{stats:?}");
    server.close().await;
}

/// An index of several pages is kept on disk as its top and the pages that were read.
#[tokio::test]
async fn pages_of_an_index_are_read_from_disk() {
    let directory = directory();
    let world = world(7, directory.path());
    let server = world.start().await;
    let mut streams = Vec::new();
    for _ in 0..300 {
        let stream = server.create_log().await;
        let batch = batch(stream.id(), 0, 1, 50);
        append(&server.store, &stream, &batch).await.await.unwrap();
        streams.push((stream.id(), batch));
    }
    server.store.flush().await.unwrap();
    assert_eq!(server.store.stats().objects, 1);
    server.close().await;

    let wanted = [3, 150, 299];
    let server = start(&world).await;
    for at in wanted {
        let (id, batch) = &streams[at];
        assert_eq!(read(&server, *id).await, std::slice::from_ref(batch));
    }
    wait_until_written(&server).await;
    assert_eq!(reads(&server), 7, "the top, three pages, and three blocks");
    server.close().await;

    let server = start(&world).await;
    for at in wanted {
        let (id, batch) = &streams[at];
        assert_eq!(read(&server, *id).await, std::slice::from_ref(batch));
    }
    assert_eq!((reads(&server), stats(&server).damaged), (0, 0));
    // A page that was not read before is fetched with its block; the top is on disk.
    let (id, batch) = &streams[80];
    assert_eq!(read(&server, *id).await, std::slice::from_ref(batch));
    assert_eq!(reads(&server), 2);
    server.close().await;
}
