//! Object compaction: what is spread over many objects is merged into few, and readers notice
//! nothing.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use alluvium_device::sim::Random;
use alluvium_stream::chain::ChainObject;
use alluvium_stream::{Batch, Reason, Requests, Stream, StreamId, StreamOffset, StreamWriter};
use common::*;
use object_store::ObjectStoreExt;
use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

const WAL_BYTES: u64 = 1 << 20;

/// Compaction with a bound of 64 KiB: a stream's part of 8 KiB gets an object of its own.
fn world() -> World {
    let mut world = World::new(WAL_BYTES, 1);
    world.options.compaction_bytes = 64 << 10;
    world
}

fn off(world: &mut World) {
    world.options.compaction_bytes = 0;
}

fn on(world: &mut World) {
    world.options.compaction_bytes = 64 << 10;
}

/// Appends `count` batches to each stream, after the last one, and uploads them.
async fn upload(
    server: &Server,
    streams: &mut [(StreamWriter, Vec<Batch>)],
    count: u64,
    len_bytes: usize,
) {
    for (stream, batches) in &mut *streams {
        for _ in 0..count {
            let base = batches.last().map_or(0, |last| last.end().0);
            let batch = batch(stream.id(), base, 2, len_bytes);
            append(&server.store, stream, &batch).await.await.unwrap();
            batches.push(batch);
        }
    }
    server.store.flush().await.unwrap();
}

/// Makes `count` uploads, each of a batch of each stream.
async fn uploads(
    server: &Server,
    all: &mut [(StreamWriter, Vec<Batch>)],
    count: u32,
    len_bytes: usize,
) {
    for _ in 0..count {
        upload(server, all, 1, len_bytes).await;
    }
}

/// Ends a test: nothing was lost.
async fn close(server: Server, all: Vec<(StreamWriter, Vec<Batch>)>) {
    check(&all).await;
    drop(all);
    server.close().await;
}

async fn streams(server: &Server, count: usize) -> Vec<(StreamWriter, Vec<Batch>)> {
    let mut streams = Vec::new();
    for _ in 0..count {
        streams.push((server.create_log().await, Vec::new()));
    }
    streams
}

/// Restarts the server; returns its streams with their expected contents.
async fn restarted(
    server: Server,
    world: &World,
    streams: Vec<(StreamWriter, Vec<Batch>)>,
) -> (Server, Vec<(StreamWriter, Vec<Batch>)>) {
    let known: Vec<_> = streams.into_iter().map(|(stream, held)| (stream.id(), held)).collect();
    server.close().await;
    let server = world.start().await;
    let streams = opened(&server, known).await;
    (server, streams)
}

/// Restarts the server; compaction waits at its first read for as long as the last returned value
/// is kept.
async fn restarted_to_wait(
    server: Server,
    world: &World,
    streams: Vec<(StreamWriter, Vec<Batch>)>,
) -> (Server, Vec<(StreamId, Vec<Batch>)>, OwnedMutexGuard<()>) {
    let known = streams.into_iter().map(|(stream, held)| (stream.id(), held)).collect();
    server.close().await;
    // Before the store is opened.
    let reading = Mutex::new(None);
    let hold = |objects: &Objects| *reading.lock() = objects.reading.clone().try_lock_owned().ok();
    let server = world.start_with(hold).await;
    (server, known, reading.into_inner().expect("nothing reads yet"))
}

/// Returns a closed server that has uploaded eight objects of `count` streams and compacts them
/// after the next start, and the streams with their expected contents.
async fn eight_objects(count: usize) -> (World, Vec<(StreamId, Vec<Batch>)>) {
    let mut world = world();
    off(&mut world);
    let server = world.start().await;
    let mut all = streams(&server, count).await;
    uploads(&server, &mut all, 8, 500).await;
    on(&mut world);
    let known = all.into_iter().map(|(stream, held)| (stream.id(), held)).collect();
    server.close().await;
    (world, known)
}

async fn opened(
    server: &Server,
    known: impl IntoIterator<Item = (StreamId, Vec<Batch>)>,
) -> Vec<(StreamWriter, Vec<Batch>)> {
    let mut streams = Vec::new();
    for (id, held) in known {
        streams.push((server.open(id).await, held));
    }
    streams
}

/// Checks that everything in the streams behind their starts can be read with fetches of any size.
async fn check(streams: &[(StreamWriter, Vec<Batch>)]) {
    for (stream, held) in streams {
        let start = stream.start_offset();
        let held: Vec<_> = held.iter().filter(|batch| batch.end() > start).cloned().collect();
        let from = held.first().map_or(start, |first| first.base.max(start));
        for max_bytes in [1, 3000, 1 << 20] {
            assert_eq!(read_from(stream, from.0, max_bytes).await, held, "{}", stream.id());
        }
        let bytes: usize = held.iter().map(|batch| batch.payload.len()).sum();
        assert!(stream.size_bytes() >= bytes as u64, "{} of {bytes}", stream.size_bytes());
    }
}

/// Returns the objects in the catalog that streams have ranges in.
async fn live(world: &World) -> Vec<ChainObject> {
    let state = world.catalog().await;
    let ranges = state.streams.values().flat_map(|stream| &stream.ranges);
    let used: BTreeSet<_> = ranges.map(|range| range.object).collect();
    state.objects.into_values().filter(|object| used.contains(&object.id)).collect()
}

/// Waits until nothing is left to do, and what was compacted is gone from the object store.
async fn wait_until_idle(server: &Server, world: &World) {
    let begun = std::time::Instant::now();
    let mut before = u64::MAX;
    let mut quiet = 0;
    while quiet < 20 {
        tokio::time::sleep(Duration::from_millis(2)).await;
        let stats = server.store.stats();
        // No object is being written either.
        let is_tidy = stats.retired_objects == 0 && names(world).await.len() == stats.objects;
        assert!(begun.elapsed() < HANG, "{:?} {stats:?}", names(world).await);
        quiet = match stats.compactions == before && is_tidy {
            true => quiet + 1,
            false => 0,
        };
        before = stats.compactions;
    }
}

#[tokio::test]
async fn shared_objects_are_merged_and_large_streams_leave_them() {
    let mut world = world();
    off(&mut world);
    let server = world.start().await;
    let mut all = streams(&server, 6).await;
    for _ in 0..8 {
        upload(&server, &mut all[..5], 1, 300).await;
        upload(&server, &mut all[5..], 1, 2000).await;
    }
    uploads(&server, &mut all, 8, 300).await;
    assert_eq!(server.store.stats().objects, 24, "without compaction");
    on(&mut world);
    let (server, all) = restarted(server, &world, all).await;
    wait_until_idle(&server, &world).await;
    // One for every eight shared ones, and the large stream's own.
    let stats = server.store.stats();
    assert!(stats.objects <= 4, "{} objects", stats.objects);
    assert!(stats.compactions >= 3 && stats.compacted_bytes > 0);
    assert_eq!(stats.compaction_failures, 0);
    check(&all).await;
    let (server, all) = restarted(server, &world, all).await;
    check(&all).await;
    wait_until_idle(&server, &world).await;
    assert_eq!(server.store.stats().compactions, 0, "there is nothing left to do");
    drop(all);
    server.close().await;
}

/// Disabled compaction does nothing: not at the start, not after an upload, and not for wasted
/// space.
#[tokio::test]
async fn disabled_compaction_makes_no_requests() {
    let mut world = world();
    off(&mut world);
    let server = world.start().await;
    let mut all = streams(&server, 3).await;
    uploads(&server, &mut all, 20, 500).await;
    let (server, mut all) = restarted(server, &world, all).await;
    uploads(&server, &mut all, 20, 500).await;
    all[0].0.trim(all[0].1[30].end()).await.unwrap();
    all[1].0.trim(all[1].1[30].end()).await.unwrap();
    wait_until_idle(&server, &world).await;
    let stats = server.store.stats();
    let asked: Vec<_> = stats.requests.iter().filter(|of| of.class == "compaction").collect();
    assert!(asked.is_empty(), "{asked:?}");
    assert_eq!((stats.compactions, stats.compaction_failures, stats.objects), (0, 0, 40));
    close(server, all).await;
}

/// However many uploads there are, at most seven objects of a generation are left, and each byte
/// was written only a few times.
#[tokio::test]
async fn objects_do_not_accumulate_and_are_rewritten_only_a_few_times() {
    let world = world();
    let server = world.start().await;
    let mut all = streams(&server, 4).await;
    uploads(&server, &mut all, 100, 100).await;
    wait_until_idle(&server, &world).await;
    let stats = server.store.stats();
    assert!(stats.objects <= 7 + 7 + 7, "{} objects", stats.objects);
    assert!(
        stats.compacted_bytes <= 3 * stats.uploaded_bytes,
        "{} of {}",
        stats.compacted_bytes,
        stats.uploaded_bytes
    );
    close(server, all).await;
}

#[tokio::test]
async fn objects_of_a_single_stream_are_merged_too() {
    let world = world();
    let server = world.start().await;
    let mut all = streams(&server, 1).await;
    uploads(&server, &mut all, 64, 50).await;
    wait_until_idle(&server, &world).await;
    let objects = server.store.stats().objects;
    assert!(objects <= 7, "{objects} objects");
    close(server, all).await;
}

/// Five streams with enough for objects of their own, in the same eight shared objects: each of
/// these indexes is read only for the first stream.
#[tokio::test]
async fn an_index_is_read_once_for_all_streams() {
    let mut world = world();
    off(&mut world);
    let server = world.start().await;
    let mut all = streams(&server, 5).await;
    uploads(&server, &mut all, 8, 1500).await;
    on(&mut world);
    let (server, all) = restarted(server, &world, all).await;
    wait_until_idle(&server, &world).await;
    let stats = server.store.stats();
    assert_eq!((stats.compactions, stats.objects), (5, 5));
    let gets = |asked: &&Requests| (asked.class, asked.kind) == ("compaction", "get");
    let gets: u64 = stats.requests.iter().filter(gets).map(|asked| asked.count).sum();
    assert_eq!(gets, 8 + 5 * 8, "eight indexes, and a block of each stream in each object");
    close(server, all).await;
}

/// No object of a stream grows past the bound, and objects that are large enough stay as they are.
#[tokio::test]
async fn merged_objects_are_bounded() {
    let world = world();
    let server = world.start().await;
    let mut all = streams(&server, 1).await;
    uploads(&server, &mut all, 40, 8000).await;
    wait_until_idle(&server, &world).await;
    let sizes: Vec<_> = live(&world).await.iter().map(|object| object.payload_bytes).collect();
    assert!(sizes.iter().all(|bytes| *bytes <= 64 << 10), "{sizes:?}");
    assert!(sizes.len() <= 40 * 8000 / (32 << 10) + 7, "{sizes:?}");
    // More than an eighth.
    uploads(&server, &mut all, 8, 9000).await;
    wait_until_idle(&server, &world).await;
    let live = live(&world).await;
    assert_eq!(live.iter().filter(|object| object.payload_bytes == 9000).count(), 8);
    close(server, all).await;
}

#[tokio::test]
async fn space_of_trimmed_and_deleted_ranges_is_reclaimed() {
    let world = world();
    let server = world.start().await;
    let mut all = streams(&server, 4).await;
    upload(&server, &mut all, 4, 1000).await;
    let before = server.store.stats().object_bytes;
    for (stream, _) in all.drain(..2) {
        server.store.commit(vec![delete(stream.id())]).await.unwrap();
    }
    wait_until_idle(&server, &world).await;
    assert_eq!(server.store.stats().compactions, 0, "half of it is in use");
    let (stream, held) = &all[0];
    stream.trim(held.last().unwrap().end()).await.unwrap();
    upload(&server, &mut all[1..], 1, 10).await; // something to wake it
    wait_until_idle(&server, &world).await;
    let stats = server.store.stats();
    assert_eq!(stats.compactions, 1);
    assert!(stats.object_bytes < before / 2, "{} of {before}", stats.object_bytes);
    close(server, all).await;
}

/// A reader in the middle of an object keeps it.
#[tokio::test]
async fn no_object_is_deleted_while_it_is_read() {
    let mut world = world();
    off(&mut world);
    let server = world.start().await;
    let mut all = streams(&server, 2).await;
    uploads(&server, &mut all, 8, 500).await;
    let (server, all) = restarted(server, &world, all).await;
    let (stream, held) = &all[1];
    let reading = server.objects.reading.lock().await;
    let asked = tokio::spawn({
        let stream = Stream::clone(stream);
        async move { stream.fetch(StreamOffset(0), 1).await }
    });
    eventually("it reads", || server.objects.reads.load(Ordering::SeqCst) == 1).await;
    // The ranges are dropped as compaction would, which cannot run here since it has to read, too.
    let first = names(&world).await[0].clone();
    stream.trim(held[1].end()).await.unwrap();
    all[0].0.trim(all[0].1[1].end()).await.unwrap();
    eventually("all but one is deleted", || server.store.stats().retired_objects == 1).await;
    assert!(names(&world).await.contains(&first), "it is being read");
    drop(reading);
    assert_eq!(asked.await.unwrap().unwrap().batches, held[..1]);
    eventually("it is deleted", || server.store.stats().retired_objects == 0).await;
    assert!(!names(&world).await.contains(&first));
    drop(all);
    server.close().await;
}

#[tokio::test]
async fn trims_and_deletions_in_the_middle_are_respected() {
    let mut world = world();
    off(&mut world);
    let server = world.start().await;
    let mut all = streams(&server, 4).await;
    uploads(&server, &mut all, 8, 500).await;
    on(&mut world);
    let (server, known, reading) = restarted_to_wait(server, &world, all).await;
    eventually("it reads", || server.objects.reads.load(Ordering::SeqCst) > 0).await;
    let mut streams = opened(&server, known).await;
    streams[0].0.trim(streams[0].1[3].end()).await.unwrap();
    streams[1].0.trim(streams[1].1[7].end()).await.unwrap();
    streams.remove(2).0.delete().await.unwrap();
    drop(reading);
    wait_until_idle(&server, &world).await;
    assert_eq!(server.store.stats().compactions, 1);
    assert_eq!(server.store.stats().objects, 1);
    check(&streams).await;
    let (server, left) = restarted(server, &world, streams).await;
    check(&left).await;
    drop(left);
    server.close().await;
}

#[tokio::test]
async fn a_failing_object_store_delays_compaction_and_leaves_nothing_behind() {
    let (world, known) = eight_objects(3).await;
    let server = world.start_with(|objects| objects.fail_writes.store(5, Ordering::SeqCst)).await;
    eventually("it succeeds", || server.store.stats().compactions == 1).await;
    wait_until_idle(&server, &world).await;
    let stats = server.store.stats();
    assert_eq!((stats.compaction_failures, stats.objects), (5, 1));
    assert_eq!(server.store.degraded(), []);
    let all = opened(&server, known).await;
    close(server, all).await;
}

#[tokio::test]
async fn the_store_is_degraded_while_compaction_fails() {
    let (world, known) = eight_objects(3).await;
    let fail = |objects: &Objects| objects.fail_writes.store(u64::MAX, Ordering::SeqCst);
    let server = world.start_with(fail).await;
    let failing = || {
        let degraded = server.store.degraded();
        degraded.into_iter().find(|it| it.reason == Reason::ObjectCompactionFailing)
    };
    eventually("the failure is reported", || failing().is_some()).await;
    let detail = failing().unwrap().detail;
    assert!(detail.contains("failures in a row: "), "{detail}");
    server.objects.fail_writes.store(0, Ordering::SeqCst);
    eventually("the report ends", || failing().is_none()).await;
    assert_eq!(server.store.stats().compactions, 1);
    let all = opened(&server, known).await;
    close(server, all).await;
}

/// A damaged object is not copied, and intact data next to the damage can still be read.
#[tokio::test]
async fn damaged_objects_are_not_compacted() {
    let mut world = world();
    off(&mut world);
    let server = world.start().await;
    let mut all = streams(&server, 2).await;
    uploads(&server, &mut all, 8, 500).await;
    let name = names(&world).await[3].clone();
    let path = name.as_str().into();
    let mut bytes = world.objects.get(&path).await.unwrap().bytes().await.unwrap().to_vec();
    bytes[100] ^= 1;
    world.objects.put(&path, bytes.into()).await.unwrap();
    on(&mut world);
    let (server, all) = restarted(server, &world, all).await;
    wait_until_idle(&server, &world).await;
    let stats = server.store.stats();
    assert_eq!((stats.compactions, stats.compaction_failures, stats.objects), (0, 1, 8));
    check(&all[1..]).await;
    drop(all);
    server.close().await;
}

/// Damaged in transit: it is read again before it counts as damaged, which would exclude it until
/// the next start.
#[tokio::test]
async fn blocks_damaged_in_transit_are_read_again_and_compacted() {
    // Each of its reads, of eight indexes and eight objects' blocks.
    for read in 0..16 {
        let (world, known) = eight_objects(2).await;
        let flip = |objects: &Objects| objects.flip_reads.store(1 << read, Ordering::SeqCst);
        let server = world.start_with(flip).await;
        wait_until_idle(&server, &world).await;
        let stats = server.store.stats();
        assert_eq!((stats.compactions, stats.compaction_failures, stats.objects), (1, 0, 1));
        let all = opened(&server, known).await;
        close(server, all).await;
    }
}

/// Uploads and topics wait for a publication that has begun, so it does not run on a thread of low
/// priority.
#[tokio::test]
async fn compactions_are_not_published_on_threads_of_low_priority() {
    let mut world = world();
    world.options.background_threads = 1;
    off(&mut world);
    let server = world.start().await;
    let mut all = streams(&server, 2).await;
    uploads(&server, &mut all, 8, 500).await;
    on(&mut world);
    let (server, all) = restarted(server, &world, all).await;
    eventually("it is compacted", || server.store.stats().compactions == 1).await;
    let makes_way = |on: &Mutex<BTreeSet<String>>| on.lock().contains("alluvium-cold");
    assert!(makes_way(&server.objects.read_on), "{:?}", server.objects.read_on);
    assert!(!server.objects.catalog_on.lock().is_empty());
    assert!(!makes_way(&server.objects.catalog_on));
    close(server, all).await;
}

/// Its sources stay until it is in the chain, and are read meanwhile. After a crash, it is there or
/// is not.
#[tokio::test]
async fn a_compaction_waits_until_it_is_published() {
    for mode in [CatalogMode::Fails, CatalogMode::LosesAnswers] {
        for continues in [true, false] {
            let (mut world, known) = eight_objects(3).await;
            let server = world.start_with(hold_compaction(mode)).await;
            let failed = || server.objects.catalog_failed.load(Ordering::SeqCst);
            eventually("it is sent repeatedly", || failed() >= 3).await;
            let stats = server.store.stats();
            assert_eq!((stats.compactions, stats.objects, stats.retired_objects), (0, 8, 0));
            assert_eq!(names(&world).await.len(), 8 + 1);
            assert!(server.reports(Reason::CatalogBehind));
            let all = opened(&server, known).await;
            check(&all).await;
            let known: Vec<_> = all.into_iter().map(|(stream, held)| (stream.id(), held)).collect();
            let server = if continues {
                server.objects.set_catalog(CatalogMode::Works);
                eventually("it is published", || server.store.stats().compactions == 1).await;
                assert!(!server.reports(Reason::CatalogBehind));
                server
            } else {
                server.crash(&mut world);
                // What was written is too new for an orphan.
                let compacts_again = mode == CatalogMode::Fails;
                let server = world.start().await;
                let stats = || server.store.stats();
                eventually("the others are deleted", || {
                    stats().objects == 1 && stats().retired_objects == 0
                })
                .await;
                assert_eq!(stats().compactions, u64::from(compacts_again));
                assert_eq!(names(&world).await.len(), 1 + usize::from(compacts_again));
                server
            };
            eventually("they are deleted", || server.store.stats().retired_objects == 0).await;
            assert_eq!((server.store.stats().objects, live(&world).await.len()), (1, 1));
            let all = opened(&server, known).await;
            close(server, all).await;
        }
    }
}

/// Sets what happens to the PUTs of the catalog after those of an opening: a fence and a delta.
fn hold_compaction(mode: CatalogMode) -> impl Fn(&Objects) {
    move |objects| {
        let mut puts = 0;
        objects.decide_catalog(move |_| {
            puts += 1;
            if puts > 2 { mode } else { CatalogMode::Works }
        });
    }
}

/// The process dies at any moment, before or after a delta.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_at_any_moment_loses_and_duplicates_nothing() {
    let mut compactions = 0;
    for seed in 0..40 {
        let mut random = Random::new(seed);
        let mut world = world();
        let mut held: BTreeMap<StreamId, Vec<Batch>> = BTreeMap::new();
        for _ in 0..6 {
            let server = world.start().await;
            if held.is_empty() {
                for _ in 0..3 {
                    held.insert(server.create_log().await.id(), Vec::new());
                }
            }
            let mut all = opened(&server, std::mem::take(&mut held)).await;
            check(&all).await;
            for _ in 0..random.below(40) {
                let from = random.below(3) as usize;
                upload(&server, &mut all[from..], 1, 1 + random.below(3000) as usize).await;
                if random.below(8) == 0 {
                    let (stream, held) = &all[random.below(3) as usize];
                    if let Some(batch) = held.get(random.below(1 + held.len() as u64) as usize) {
                        stream.trim(batch.end()).await.unwrap();
                    }
                }
            }
            if random.below(2) == 0 {
                check(&all).await;
            }
            let modes = [CatalogMode::Works, CatalogMode::Fails, CatalogMode::LosesAnswers];
            server.objects.set_catalog(modes[random.below(3) as usize]);
            tokio::time::sleep(Duration::from_micros(random.below(2000))).await;
            held = all.into_iter().map(|(stream, held)| (stream.id(), held)).collect();
            compactions += server.store.stats().compactions;
            server.crash(&mut world);
        }
        let server = world.start().await;
        let all = opened(&server, held).await;
        check(&all).await;
        drop(all);
        server.close().await;
    }
    assert!(compactions > 100, "{compactions}");
}

/// An object that is lost, which no retry brings back: the others are compacted.
#[tokio::test]
async fn a_missing_object_does_not_delay_the_others() {
    let mut world = world();
    off(&mut world);
    let server = world.start().await;
    let mut all = streams(&server, 2).await;
    uploads(&server, &mut all, 12, 500).await;
    let gone = names(&world).await[1].clone();
    world.objects.delete(&gone.as_str().into()).await.unwrap();
    on(&mut world);
    let known: Vec<_> = all.into_iter().map(|(stream, held)| (stream.id(), held)).collect();
    server.close().await;
    let server = world.start().await;
    eventually("the others are compacted", || server.store.stats().compactions == 1).await;
    let stats = server.store.stats();
    assert_eq!((stats.objects, stats.compaction_failures), (12 - 8 + 1, 1));
    for (id, held) in &known {
        let stream = server.open(*id).await;
        assert_eq!(read_from(&stream, held[2].base.0, 1 << 20).await, held[2..]);
    }
    server.close().await;
}

/// A stream's pieces on both sides of a range that stays remain two ranges, and do not get objects
/// of their own.
#[tokio::test]
async fn pieces_that_are_not_neighbours_share_objects_too() {
    let mut world = world();
    off(&mut world);
    let server = world.start().await;
    let mut all = streams(&server, 20).await;
    for round in 0..8 {
        upload(&server, &mut all, 1, 50).await;
        if round == 3 {
            // Large enough to stay as it is, in the middle of the others: an upload of one stream,
            // for each.
            for at in 0..all.len() {
                upload(&server, &mut all[at..=at], 1, 40_000).await;
            }
        }
    }
    on(&mut world);
    let (server, all) = restarted(server, &world, all).await;
    wait_until_idle(&server, &world).await;
    assert_eq!(server.store.stats().objects, 20 + 2);
    close(server, all).await;
}

/// Streams that have large ranges between all of their small pieces, beside one that has none: its
/// pieces are merged, and theirs stay. After that, and after a restart, nothing is left to do.
#[tokio::test]
async fn pieces_between_large_ranges_are_not_rewritten_without_end() {
    let world = world();
    let server = world.start().await;
    let mut all = streams(&server, 3).await;
    for _ in 0..64 {
        upload(&server, &mut all, 1, 50).await;
        for at in 0..2 {
            upload(&server, &mut all[at..=at], 1, 10_000).await;
        }
    }
    wait_until_idle(&server, &world).await;
    let stats = server.store.stats();
    // 128 large ranges, 64 objects with the pieces between them, and those of the third stream.
    assert!(stats.objects <= 128 + 64 + 16, "{} objects", stats.objects);
    let merged = stats.compacted_bytes;
    assert!(merged < stats.uploaded_bytes / 4, "{merged} of {}", stats.uploaded_bytes);
    let quiet = world.catalog().await.streams[&all[2].0.id()].ranges.len();
    assert!(quiet <= 7 + 7 + 1, "{quiet} ranges of the stream without large ones");
    let (server, all) = restarted(server, &world, all).await;
    wait_until_idle(&server, &world).await;
    assert_eq!(server.store.stats().compactions, 0, "there is nothing left to do");
    close(server, all).await;
}

async fn written(world: &World) -> Vec<i64> {
    live(world).await.iter().map(|object| object.created_at_ms).collect()
}

/// The age of records is that of their object, and compaction keeps it.
#[tokio::test]
async fn a_merged_object_has_the_newest_time_of_its_sources() {
    let mut world = world();
    off(&mut world);
    let server = world.start().await;
    let mut all = streams(&server, 2).await;
    uploads(&server, &mut all, 8, 500).await;
    let newest = written(&world).await.into_iter().max().unwrap();
    tokio::time::sleep(Duration::from_millis(5)).await;
    on(&mut world);
    let (server, all) = restarted(server, &world, all).await;
    wait_until_idle(&server, &world).await;
    assert_eq!(written(&world).await, [newest]);
    drop(all);
    server.close().await;
}
