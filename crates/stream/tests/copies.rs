//! Old copies and replaced servers: an old copy of the catalog or of a WAL, or a server that was
//! replaced by another one, does not destroy anything that was acknowledged later.
//! `docs/format/chain.md`, section 8.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use alluvium_device::sim::{SimDisk, SimOptions};
use alluvium_stream::chain::{Chain, ChainWriter, Delta, Fence, Hints};
use alluvium_stream::{
    AppendError, Batch, Change, LogOffset, StoreError, StreamId, StreamOffset, StreamWriter,
};
use alluvium_wal::Wal;
use common::*;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use uuid::Uuid;

const WAL_BYTES: u64 = 1 << 20;

fn put(key: &str) -> Change {
    Change::PutMeta { key: key.into(), value: vec![1] }
}

fn make_listings_old(objects: &Objects) {
    objects.clock_behind_s.store(2 * 24 * 60 * 60, Ordering::SeqCst);
}

fn listings_are_old_and_fail(objects: &Objects) {
    make_listings_old(objects);
    objects.lists_fail.store(true, Ordering::SeqCst);
}

/// Returns another server with this one's object store, on `disk`.
fn other_server(world: &World, disk: SimDisk) -> World {
    World {
        disk,
        objects: world.objects.clone(),
        options: world.options.clone(),
        wal_options: world.wal_options.clone(),
    }
}

/// Returns a copy of the disk as it is now.
fn cloned(disk: &SimDisk) -> SimDisk {
    SimDisk::from_image(&disk.image(), SimOptions::default())
}

/// Returns the error with which the store is refused. Nothing has changed.
async fn refused(world: &World) -> StoreError {
    let before = (world.disk.image(), contents(&world.objects).await);
    let Err(error) = world.try_start(Arc::new(Hash)).await else { panic!("it was opened") };
    assert!(world.disk.image() == before.0, "a refusal changes nothing");
    assert!(contents(&world.objects).await == before.1, "nor in the object store");
    error
}

/// Publishes a delta without the log: larger batches are allowed.
async fn publish(server: &Server, stream: &StreamWriter) -> Result<(), StoreError> {
    let not_next = stream.next_offset().0 + 1;
    let mut has_waited = false;
    for count in (15..32).map(|shift| 1 << shift) {
        loop {
            match stream.append(new_batch(&batch(stream.id(), not_next, count, 1))) {
                Err(AppendError::NotNext { .. }) if has_waited => return Ok(()),
                Err(AppendError::NotNext { .. }) => break, // this size is allowed
                Err(AppendError::Full) => has_waited = true,
                Err(AppendError::Failed(error)) => return Err(error),
                other => panic!("{:?}", other.err()),
            }
            let space = server.store.wait_for_space();
            tokio::time::timeout(HANG, space).await.expect("it hangs");
        }
    }
    panic!("all sizes are allowed")
}

/// Checks that nothing can be changed or appended, for this reason.
async fn assert_stopped(server: &Server, stream: &StreamWriter, why: fn(&StoreError) -> bool) {
    let cause = tokio::time::timeout(HANG, server.store.failed()).await.expect("it goes on");
    assert!(why(&cause), "{cause}");
    let next = batch(stream.id(), stream.next_offset().0, 1, 10);
    match stream.append(new_batch(&next)) {
        Err(AppendError::Failed(error)) => assert!(why(&error), "{error}"),
        other => panic!("{:?}", other.err()),
    }
    for refused in [
        server.store.commit(vec![put("topic")]).await.unwrap_err(),
        server.store.new_stream_ids(1).await.unwrap_err(),
        stream.trim(stream.start_offset()).await.unwrap_err(),
    ] {
        assert!(why(&refused), "{refused}");
    }
}

/// Whether this is the error of a server that was replaced by another one.
fn is_replaced(error: &StoreError) -> bool {
    let text = error.to_string();
    matches!(error, StoreError::Replaced(_)) && text.contains("another server has opened the store")
}

/// A is idle while B takes over the WAL, and uploads. Then A continues, and looks for orphans.
#[tokio::test]
async fn a_replaced_server_deletes_nothing_of_its_successor() {
    let mut world = World::new(WAL_BYTES, 1);
    let a = world.start_with(listings_are_old_and_fail).await;
    let stream = a.create_log().await;
    let id = stream.id();
    let mut batches = upload_each(&a, &stream, 0, 2).await;

    let other = other_server(&world, world.disk.clone());
    let b = other.start_with(listings_are_old_and_fail).await;
    let theirs = b.open(id).await;
    batches.extend(upload_each(&b, &theirs, 2, 6).await);
    // To A and to B, an orphan of an earlier run.
    let orphan = Path::from(format!("streams/{}/0000000000000009-orphan", world.header().wal_id));
    world.objects.put(&orphan, "x".into()).await.unwrap();
    let before = names(&world).await;
    assert_eq!(before.len(), 7);

    a.objects.lists_fail.store(false, Ordering::SeqCst);
    // B's objects are not orphans to A: whatever else A knows, it never reaches their numbers.
    eventually("A has listed them", || a.store.stats().orphans == 1).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(a.store.stats().orphans_deleted, 0);
    assert_eq!(names(&world).await, before);
    assert!(a.store.failure().is_none());
    // It finds out when it publishes something.
    let error = publish(&a, &stream).await.expect_err("it is replaced");
    assert!(is_replaced(&error), "{error}");
    assert_stopped(&a, &stream, is_replaced).await;
    assert_eq!(names(&world).await, before);
    b.objects.lists_fail.store(false, Ordering::SeqCst);
    eventually("B deletes it", || b.store.stats().orphans_deleted == 1).await;
    assert_eq!(names(&world).await.len(), 6);
    assert_eq!(read_from(&theirs, 0, 1500).await, batches);
    drop((stream, theirs));
    a.crash(&mut world);
}

#[tokio::test]
async fn a_replaced_server_cannot_change_the_catalog() {
    let mut world = World::new(WAL_BYTES, 1);
    let a = world.start().await;
    let stream = a.create_log().await;
    let id = stream.id();
    let batches = upload_each(&a, &stream, 0, 2).await;
    let other = other_server(&world, world.disk.clone());
    let b = other.start().await;
    let before = world.catalog_objects().await;

    // What it accepts until then is not acknowledged by the log of another server.
    drop(append(&a.store, &stream, &batch(id, 2, 1, 1000)).await);
    let error = a.store.flush().await.unwrap_err();
    assert!(is_replaced(&error), "{error}");
    assert_stopped(&a, &stream, is_replaced).await;
    assert!(world.catalog_objects().await == before);
    let state = world.catalog().await;
    assert!(!state.meta.contains_key("topic"));
    let theirs = b.store.stream(id).unwrap();
    assert_eq!(read_from(&theirs, 0, 1500).await, batches);
    drop((stream, theirs, b.store));
    a.crash(&mut world);
}

/// Two servers with one object store, on two devices with one log: no header shows one to the
/// other, so the first one goes on until it publishes something. What it has accepted stays in its
/// log.
#[tokio::test]
async fn a_server_whose_device_was_cloned_is_replaced() {
    let mut world = World::new(WAL_BYTES, 1);
    world.wal_options.node_id = 7;
    let a = world.start().await;
    let (stream, batches) = three_objects(&a).await;
    let id = stream.id();
    // A mark that the chain knows.
    publish(&a, &stream).await.unwrap();
    let mut other = other_server(&world, cloned(&world.disk));
    other.wal_options.node_id = 8;
    let b = other.start().await;

    let theirs = b.open(id).await;
    append(&a.store, &stream, &batch(id, 60, 1, 1000)).await.await.unwrap();
    a.store.commit(vec![put("a")]).await.unwrap();
    append(&b.store, &theirs, &batch(id, 60, 1, 2000)).await.await.unwrap();
    b.store.commit(vec![put("b")]).await.unwrap();
    assert!(a.store.failure().is_none());

    let trimmed = a.store.stats().wal.trimmed;
    let error = tokio::time::timeout(HANG, a.store.flush()).await.expect("it hangs").unwrap_err();
    assert!(is_replaced(&error), "{error}");
    assert!(error.to_string().contains("on node 8"), "{error}");
    assert_stopped(&a, &stream, is_replaced).await;
    assert_eq!(a.store.stats().wal.trimmed, trimmed);
    // The object that it wrote is an orphan.
    let written = names(&world).await.len();
    assert_eq!(written, 4);

    b.store.flush().await.unwrap();
    let expected = [batches, vec![batch(id, 60, 1, 2000)]].concat();
    assert_eq!(read_from(&theirs, 0, 1 << 20).await, expected);
    theirs.trim(StreamOffset(20)).await.unwrap();
    eventually("B deletes", || b.store.stats().retired_objects == 0).await;
    let before = contents(&world.objects).await;
    drop((stream, theirs));
    let _ = a.store.close().await;
    assert!(contents(&world.objects).await == before, "its end changes nothing");
    let header = world.header();
    assert!(header.trim == trimmed && header.durable > trimmed);
    b.close().await;
    let meta = world.catalog().await.meta;
    assert_eq!(meta.keys().collect::<Vec<_>>(), ["b"]);

    // A has the older log from now on.
    world.disk = world.disk.process_crash();
    let error = refused(&world).await;
    assert!(matches!(error, StoreError::OldWal { .. }), "{error}");
}

/// How a machine and its disk were cloned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cloned {
    /// While it was down; then the original was started.
    Down,
    /// While it ran; it has only appended since.
    Idle,
    /// While it ran; it has published something since.
    Busy,
}

/// A clone is refused once the chain shows that the original went on; until then the one that is
/// opened last has the store.
#[tokio::test]
async fn a_clone_is_refused_when_the_original_has_published_since() {
    for case in [Cloned::Down, Cloned::Idle, Cloned::Busy] {
        let mut world = World::new(WAL_BYTES, 1);
        let server = world.start().await;
        let (stream, batches) = three_objects(&server).await;
        let id = stream.id();
        drop(stream);
        server.close().await;

        let mut clone = cloned(&world.disk);
        let a = world.start().await;
        if case != Cloned::Down {
            clone = cloned(&world.disk);
        }
        let stream = a.open(id).await;
        append(&a.store, &stream, &batch(id, 60, 1, 1000)).await.await.unwrap();
        if case == Cloned::Busy {
            a.store.flush().await.unwrap();
            // It states the mark of the upload.
            publish(&a, &stream).await.unwrap();
        }
        let mut other = other_server(&world, clone);
        if case == Cloned::Idle {
            let b = other.start().await;
            let error = publish(&a, &stream).await.unwrap_err();
            assert!(is_replaced(&error), "{error}");
            let theirs = b.open(id).await;
            assert_eq!(read_from(&theirs, 0, 1 << 20).await, batches);
            drop(theirs);
            b.crash(&mut other);
        } else {
            match refused(&other).await {
                StoreError::OldWal { mark, seen } => assert!(mark < seen),
                error => panic!("{case:?}: {error}"),
            }
            publish(&a, &stream).await.unwrap();
            assert_eq!(read_from(&stream, 0, 1 << 20).await.len(), 31);
        }
        drop(stream);
        a.crash(&mut world);
    }
}

/// The object store was copied, and the server goes on with the copy; the one that was replaced by
/// it has changed its own catalog more often.
#[tokio::test]
async fn the_catalog_of_a_server_that_was_taken_over_is_refused() {
    let mut world = World::new(WAL_BYTES, 1);
    world.options.catalog_interval = Duration::from_millis(1);
    let a = world.start().await;
    let (stream, _) = three_objects(&a).await;
    let id = stream.id();
    let mut other = World {
        objects: Arc::new(in_memory(&contents(&world.objects).await).await),
        ..other_server(&world, cloned(&world.disk))
    };
    let b = other.start().await;
    for i in 0..100 {
        a.store.commit(vec![put(&i.to_string())]).await.unwrap();
    }
    let begun = std::time::Instant::now();
    while world.catalog().await.meta.len() < 100 {
        assert!(begun.elapsed() < HANG, "they are not published");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Nothing is trimmed in the WAL.
    b.open(id).await.trim(StreamOffset(20)).await.unwrap();
    eventually("it is deleted", || b.store.stats().retired_objects == 0).await;
    drop(stream);
    b.crash(&mut other);
    a.crash(&mut world);
    world.disk = other.disk;
    match refused(&world).await {
        StoreError::OldCatalog { version, mark, .. } => assert!(version < mark),
        error => panic!("{error}"),
    }
}

/// Nothing was appended or trimmed in the WAL since the copy was made, only objects were deleted: a
/// fresh copy is as good as the catalog, an old one is not.
#[tokio::test]
async fn an_old_catalog_is_refused_even_if_only_objects_have_changed() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let (stream, batches) = three_objects(&server).await;
    let id = stream.id();
    let old = world.catalog_objects().await;
    stream.trim(StreamOffset(20)).await.unwrap();
    eventually("an object is deleted", || server.store.stats().retired_objects == 0).await;
    assert_eq!(names(&world).await.len(), 2);
    drop(stream);
    server.crash(&mut world);

    let newest = world.replace_catalog(&old).await;
    match refused(&world).await {
        StoreError::OldCatalog { version, mark, uploaded, trimmed } => {
            assert!(version < mark && uploaded >= trimmed, "{version} {mark}");
        }
        other => panic!("{other}"),
    }
    assert_eq!(names(&world).await.len(), 2);
    world.objects = newest;
    let fresh = world.catalog_objects().await;
    world.replace_catalog(&fresh).await;
    let server = world.start().await;
    let stream = server.open(id).await;
    assert_eq!(read_from(&stream, 20, 1 << 20).await, batches[10..]);
    drop(stream);
    server.close().await;
}

/// Each delta with irreversible effects is followed by a mark before these: whenever a copy was
/// made, it is refused or it can still read everything.
#[tokio::test]
async fn a_copy_from_any_moment_is_refused_or_complete() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let mut copies = vec![world.catalog_objects().await];
    let stream = server.create_log().await;
    let id = stream.id();
    let mut trimmed = 0;
    for i in 0..6 {
        append(&server.store, &stream, &batch(id, i, 1, 1000)).await.await.unwrap();
        copies.push(world.catalog_objects().await);
        server.store.flush().await.unwrap();
        copies.push(world.catalog_objects().await);
        if i % 2 == 1 {
            trimmed = i;
            stream.trim(StreamOffset(trimmed)).await.unwrap();
            copies.push(world.catalog_objects().await);
            eventually("it is deleted", || server.store.stats().retired_objects == 0).await;
            copies.push(world.catalog_objects().await);
        }
    }
    append(&server.store, &stream, &batch(id, 6, 1, 1000)).await.await.unwrap();
    server.store.commit(vec![put("last")]).await.unwrap();
    let all: Vec<_> = (0..7).map(|i| batch(id, i, 1, 1000)).collect();
    drop(stream);
    server.crash(&mut world);
    let (mut opened, count) = (0, copies.len());
    for copy in copies {
        let mut other = world.copy().await;
        other.replace_catalog(&copy).await;
        match other.try_start(Arc::new(Hash)).await {
            Ok(server) => {
                opened += 1;
                let stream = server.open(id).await;
                assert_eq!(stream.start_offset(), StreamOffset(trimmed));
                let from = usize::try_from(trimmed).unwrap();
                assert_eq!(read_from(&stream, trimmed, 5000).await, all[from..]);
                assert!(server.store.meta_value("last").is_some());
                drop(stream);
                server.close().await;
            }
            Err(StoreError::OldCatalog { version, mark, .. }) => assert!(version < mark),
            Err(other) => panic!("{other}"),
        }
    }
    assert!((1..count / 2).contains(&opened), "{opened} of {count}");
}

#[tokio::test]
async fn an_old_copy_of_the_wal_is_refused() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    let id = stream.id();
    let mut batches = upload_each(&server, &stream, 0, 1).await;
    let old = cloned(&world.disk);
    batches.extend(upload_each(&server, &stream, 1, 3).await);
    drop(stream);
    server.crash(&mut world);
    let newest = std::mem::replace(&mut world.disk, old);
    match refused(&world).await {
        StoreError::OldWal { mark, seen } => assert!(mark < seen),
        other => panic!("{other}"),
    }
    world.disk = newest;
    let server = world.start().await;
    let stream = server.open(id).await;
    assert_eq!(read_from(&stream, 0, 1500).await, batches);
    // Nothing is uploaded or trimmed after this copy, but the log is closed, which is enough.
    let mut copies = vec![cloned(&world.disk)];
    append(&server.store, &stream, &batch(id, 3, 1, 1000)).await.await.unwrap();
    copies.push(cloned(&world.disk));
    drop(stream);
    server.close().await;
    // So is opening the log.
    copies.push(cloned(&world.disk));
    let closed = world.disk.clone();
    for copy in copies.drain(..2) {
        world.disk = copy;
        assert!(matches!(refused(&world).await, StoreError::OldWal { .. }));
    }
    world.disk = closed;
    world.start().await.close().await;
    world.disk = copies.remove(0);
    assert!(matches!(refused(&world).await, StoreError::OldWal { .. }));
}

/// The copy is from the same run, before its last upload, and the server was killed. The delta
/// after the upload states the mark that the upload has set.
#[tokio::test]
async fn a_copy_of_the_wal_from_before_an_upload_is_refused() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    let id = stream.id();
    append(&server.store, &stream, &batch(id, 0, 1, 1000)).await.await.unwrap();
    let copy = cloned(&world.disk);
    server.store.flush().await.unwrap();
    append(&server.store, &stream, &batch(id, 1, 1, 1000)).await.await.unwrap();
    publish(&server, &stream).await.unwrap();
    assert_eq!(world.catalog().await.header.wal_mark, world.header().mark);
    drop(stream);
    server.crash(&mut world);
    world.disk = copy;
    assert!(matches!(refused(&world).await, StoreError::OldWal { .. }));
}

/// A delta of a later epoch of the log, whatever marks it states.
#[tokio::test]
async fn a_copy_of_the_wal_with_an_older_epoch_is_refused() {
    let world = World::new(WAL_BYTES, 1);
    let retry = world.options.retry();
    let wal = world.header().wal_id;
    let chain = Chain::new(world.objects.clone(), wal, retry);
    let until = tokio::time::Instant::now() + HANG;
    let fence = |_: Option<&_>| {
        Ok::<_, String>(Fence {
            wal,
            epoch: 3,
            incarnation: Uuid::new_v4(),
            node: 0,
            written_at_ms: 0,
            term: None,
            next_stream: StreamId(0),
            own: Vec::new(),
            hints: Hints::new(),
        })
    };
    let mut writer = ChainWriter::open(chain, None, until, fence).await.unwrap();
    writer.freeze(Delta {
        version: writer.state().header.version + 1,
        recorded: Vec::new(),
        own: Vec::new(),
        hints: Hints::new(),
        cut: LogOffset(0),
        wal_mark: 0,
        next_stream: StreamId(0),
        is_clean: false,
        written_at_ms: 0,
    });
    writer.publish(until).await.unwrap();
    match refused(&world).await {
        StoreError::OldWalEpoch { epoch, seen } => assert_eq!((epoch, seen), (0, 3)),
        other => panic!("{other}"),
    }
}

/// A log that was in use belongs to a catalog, which may not be mounted.
#[tokio::test]
async fn a_used_log_without_a_catalog_is_refused() {
    let mut world = World::new(WAL_BYTES, 1);
    let (wal, _) =
        Wal::open(world.disk.device(), &world.wal_options, None, &mut |_| Ok(())).unwrap();
    wal.close().unwrap();
    match refused(&world).await {
        StoreError::NoCatalog { wal, epoch } => {
            assert_eq!((wal, epoch), (world.header().wal_id, 1));
        }
        other => panic!("{other}"),
    }
    assert!(world.try_catalog().await.is_none());
    world.disk = World::new(WAL_BYTES, 2).disk;
    world.start().await.close().await;
}

/// A backup of the catalog and of the device, from one moment, was restored. What came later is in
/// objects that this catalog does not have: they are orphans.
#[tokio::test]
async fn a_restored_backup_is_complete() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    let id = stream.id();
    let mut batches = upload_each(&server, &stream, 0, 2).await;
    batches.push(batch(id, 2, 1, 1000));
    append(&server.store, &stream, &batches[2]).await.await.unwrap();
    let (device, catalog) = (cloned(&world.disk), world.catalog_objects().await);
    upload_each(&server, &stream, 3, 5).await;
    drop(stream);
    server.crash(&mut world);
    let before = names(&world).await;
    assert_eq!(before.len(), 4);

    // Only the device: the catalog shows that there was a later one. Only the catalog: the device
    // shows that there was a later one.
    let newest = std::mem::replace(&mut world.disk, device);
    assert!(matches!(refused(&world).await, StoreError::OldWal { .. }));
    let device = std::mem::replace(&mut world.disk, newest);
    world.replace_catalog(&catalog).await;
    assert!(matches!(refused(&world).await, StoreError::OldCatalog { .. }));

    world.disk = device;
    for _ in 0..3 {
        let server = world.start_with(listings_are_old_and_fail).await;
        let stream = server.open(id).await;
        assert_eq!(read_from(&stream, 0, 1500).await, batches);
        drop(stream);
        server.crash(&mut world);
    }
    assert_eq!(names(&world).await, before, "they are too new");
    let server = world.start_with(make_listings_old).await;
    eventually("they are deleted", || server.store.stats().orphans_deleted == 2).await;
    let stream = server.open(id).await;
    assert_eq!(read_from(&stream, 0, 1500).await, batches);
    drop(stream);
    server.close().await;
}

/// The mark comes first, since a crash may come in between.
#[tokio::test]
async fn no_object_is_deleted_before_the_mark_is_durable() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let (stream, _) = three_objects(&server).await;
    let id = stream.id();
    server.objects.deletes_fail.store(true, Ordering::SeqCst);
    stream.trim(StreamOffset(20)).await.unwrap();
    eventually("it tries", || server.store.stats().clean_up_failures > 0).await;
    let state = world.catalog().await;
    assert_eq!(state.streams[&id].start, StreamOffset(20), "it is published");
    drop(stream);
    server.power_cut(&mut world);
    let mark = world.header().mark;
    assert!(mark >= state.header.version, "{mark} {}", state.header.version);
}

#[tokio::test]
async fn two_stores_in_one_object_store_do_not_touch_each_other() {
    let objects: Arc<object_store::memory::InMemory> = Arc::default();
    let worlds =
        [1, 2].map(|seed| World { objects: objects.clone(), ..World::new(WAL_BYTES, seed) });
    let mut stores: Vec<(Server, Vec<Batch>)> = Vec::new();
    for world in &worlds {
        let server = world.start_with(make_listings_old).await;
        let (_, batches) = three_objects(&server).await;
        stores.push((server, batches));
    }
    for (world, (server, batches)) in worlds.iter().zip(stores) {
        let id = server.store.stream_ids()[0];
        assert_eq!(read_from(&server.store.stream(id).unwrap(), 0, 1 << 20).await, batches);
        let state = world.catalog().await;
        assert_eq!((state.streams.len(), state.objects.len()), (1, 3));
        assert_eq!(server.store.stats().orphans, 0);
        server.close().await;
    }
    assert_eq!(names(&worlds[0]).await.len(), 6);
}
