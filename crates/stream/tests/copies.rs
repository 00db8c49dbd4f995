//! Old copies and stale owners: an old copy of a catalog or a WAL, or a server that was taken over,
//! does not destroy anything that was acknowledged later.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use alluvium_device::sim::{Faults, SimDisk, SimOptions};
use alluvium_stream::catalog::Snapshot;
use alluvium_stream::{
    Batch, Catalog, CatalogError, Change, MemoryCatalog, Recovery, Store, StoreError, StreamId,
    StreamOffset, StreamWriter,
};
use alluvium_wal::{Wal, WalError};
use common::*;
use object_store::ObjectStoreExt;

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

/// Returns another server with a copy of this one's current catalog, on `disk`.
fn copy_of(world: &World, disk: SimDisk) -> World {
    World {
        disk,
        objects: world.objects.clone(),
        catalog: Arc::new(world.catalog.load().unwrap().into()),
        options: world.options.clone(),
        wal_options: world.wal_options.clone(),
    }
}

/// Returns a copy of the disk as it is now.
fn cloned(disk: &SimDisk) -> SimDisk {
    SimDisk::from_image(&disk.image(), SimOptions::default())
}

/// Appends batches `from..to` of one offset each, and uploads each of them as an object of its own.
async fn upload_each(server: &Server, stream: &StreamWriter, from: u64, to: u64) -> Vec<Batch> {
    let mut batches = Vec::new();
    for base in from..to {
        batches.push(batch(stream.id(), base, 1, 1000));
        append(&server.store, stream, batches.last().unwrap()).await.await.unwrap();
        server.store.flush().await.unwrap();
    }
    batches
}

fn owner_of(world: &World) -> object_store::path::Path {
    let wal_id = world.catalog.load().unwrap().wal_id.unwrap();
    format!("streams/{wal_id}/owner").into()
}

async fn claim(world: &World) -> Option<serde_json::Value> {
    let found = world.objects.get(&owner_of(world)).await.ok()?;
    Some(serde_json::from_slice(&found.bytes().await.unwrap()).unwrap())
}

async fn claimed_by(world: &World, epoch: u64) {
    let begun = std::time::Instant::now();
    while claim(world).await.is_none_or(|claim| claim["epoch"] != epoch) {
        assert!(begun.elapsed() < HANG, "no server of epoch {epoch} has claimed the objects");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn refused(world: &World) -> StoreError {
    let image = world.disk.image();
    let version = world.catalog.load().unwrap().version;
    let Err(error) = world.try_start(Arc::new(Hash)).await else { panic!("it was opened") };
    assert!(world.disk.image() == image, "a refusal changes nothing");
    assert_eq!(world.catalog.load().unwrap().version, version, "nor in the catalog");
    error
}

/// A is idle while B takes over the WAL with a copy of A's data, and uploads. Then A continues, and
/// looks for orphans.
#[tokio::test]
async fn a_stale_owner_deletes_nothing_of_its_successor() {
    let mut world = World::new(WAL_BYTES, 1);
    let a = world.start_with(listings_are_old_and_fail).await;
    let stream = a.create_log().await;
    let id = stream.id();
    let mut batches = upload_each(&a, &stream, 0, 2).await;

    let other = copy_of(&world, world.disk.clone());
    let b = other.start_with(listings_are_old_and_fail).await;
    let theirs = b.open(id).await;
    batches.extend(upload_each(&b, &theirs, 2, 6).await);
    let before = names(&world).await;
    assert_eq!(before.len(), 6);

    a.objects.lists_fail.store(false, Ordering::SeqCst);
    eventually("A finds out", || a.store.failure().is_some()).await;
    assert!(a.store.failure().unwrap().contains("taken over"), "{:?}", a.store.failure());
    assert_eq!(a.store.stats().orphans_deleted, 0);
    assert_eq!(names(&world).await, before);
    assert_eq!(read_from(&theirs, 0, 1500).await, batches);

    // B's objects are not orphans to A: whatever else A knows, it never reaches their numbers.
    assert_eq!(a.store.stats().orphans, 0);
    drop((stream, theirs));
    a.crash(&mut world);
}

#[tokio::test]
async fn a_server_that_was_taken_over_cannot_change_its_catalog() {
    let mut world = World::new(WAL_BYTES, 1);
    let a = world.start().await;
    let stream = a.create_log().await;
    upload_each(&a, &stream, 0, 2).await;
    let other = copy_of(&world, world.disk.clone());
    let b = other.start().await;

    // It finds out by the upload's trim, or by the check before it deletes.
    drop(append(&a.store, &stream, &batch(stream.id(), 2, 1, 1000)).await.await);
    a.store.flush().await.unwrap_err();
    let version = world.catalog.load().unwrap().version;
    for refused in [
        a.store.commit(vec![put("topic")]).await.unwrap_err(),
        a.store.new_stream_ids(1).await.unwrap_err(),
        stream.trim(StreamOffset(1)).await.unwrap_err(),
    ] {
        assert!(matches!(refused, StoreError::Wal(WalError::Fenced { .. })), "{refused}");
    }
    assert_eq!(world.catalog.load().unwrap().version, version);
    drop(stream);
    a.crash(&mut world);
    drop(b.store);
}

/// The old server notices the takeover too late: its catalog has seen more commits than its
/// successor's.
#[tokio::test]
async fn the_catalog_of_a_server_that_was_taken_over_is_refused() {
    let mut world = World::new(WAL_BYTES, 1);
    let a = world.start().await;
    let (stream, _) = three_objects(&a).await;
    let id = stream.id();
    let mut other = copy_of(&world, world.disk.clone());
    let b = other.start().await;
    for i in 0..100 {
        a.store.commit(vec![put(&i.to_string())]).await.unwrap();
    }
    // Nothing is trimmed in the WAL.
    b.open(id).await.trim(StreamOffset(20)).await.unwrap();
    eventually("it is deleted", || b.store.stats().retired_objects == 0).await;
    drop(stream);
    b.crash(&mut other);
    drop(a);
    world.disk = other.disk;
    assert!(matches!(refused(&world).await, StoreError::OldCatalog { .. }));
}

/// Nothing was appended or trimmed in the WAL since the copy was made, only objects were deleted: a
/// fresh copy is as good as the catalog, an old one is not.
#[tokio::test]
async fn an_old_catalog_is_refused_even_if_only_objects_have_changed() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let (stream, batches) = three_objects(&server).await;
    let id = stream.id();
    let old = world.catalog.load().unwrap();
    stream.trim(StreamOffset(20)).await.unwrap();
    eventually("an object is deleted", || server.store.stats().retired_objects == 0).await;
    assert_eq!(names(&world).await.len(), 2);
    drop(stream);
    server.crash(&mut world);

    let newest = std::mem::replace(&mut world.catalog, Arc::new(old.into()));
    match refused(&world).await {
        StoreError::OldCatalog { version, mark, uploaded, trimmed } => {
            assert!(version < mark && uploaded >= trimmed, "{version} {mark}");
        }
        other => panic!("{other}"),
    }
    assert_eq!(names(&world).await.len(), 2);
    world.catalog = newest;
    let server = world.start().await;
    let stream = server.open(id).await;
    assert_eq!(read_from(&stream, 20, 1 << 20).await, batches[10..]);
    drop(stream);
    server.close().await;
}

/// Each commit with irreversible effects is followed by a mark before these: whenever a copy was
/// made, it is refused or it can still read everything.
#[tokio::test]
async fn a_copy_from_any_moment_is_refused_or_complete() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let mut copies = vec![world.catalog.load().unwrap()];
    let stream = server.create_log().await;
    let id = stream.id();
    let mut trimmed = 0;
    for i in 0..6 {
        append(&server.store, &stream, &batch(id, i, 1, 1000)).await.await.unwrap();
        copies.push(world.catalog.load().unwrap());
        server.store.flush().await.unwrap();
        copies.push(world.catalog.load().unwrap());
        if i % 2 == 1 {
            trimmed = i;
            stream.trim(StreamOffset(trimmed)).await.unwrap();
            copies.push(world.catalog.load().unwrap());
            eventually("it is deleted", || server.store.stats().retired_objects == 0).await;
            copies.push(world.catalog.load().unwrap());
        }
    }
    append(&server.store, &stream, &batch(id, 6, 1, 1000)).await.await.unwrap();
    let all: Vec<_> = (0..7).map(|i| batch(id, i, 1, 1000)).collect();
    drop(stream);
    server.crash(&mut world);
    let (mut opened, count) = (0, copies.len());
    for copy in copies {
        let uploaded = copy.streams.get(&id).map(|stream| stream.uploaded_end);
        let other =
            World { catalog: Arc::new(copy.into()), ..copy_of(&world, cloned(&world.disk)) };
        match other.try_start(Arc::new(Hash)).await {
            Ok(server) => {
                opened += 1;
                assert_eq!(uploaded, Some(StreamOffset(6)));
                let stream = server.open(id).await;
                let from = trimmed.max(stream.start_offset().0);
                assert_eq!(read_from(&stream, from, 5000).await, all[from as usize..]);
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

/// The copy is from the same run, before its last upload, and the server was killed.
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
    let seen = || world.catalog.load().unwrap().wal_mark;
    let mark = Wal::inspect(&world.disk.device()).unwrap().header.mark;
    eventually("the catalog records the mark", || seen() == mark).await;
    drop(stream);
    server.crash(&mut world);
    world.disk = copy;
    assert!(matches!(refused(&world).await, StoreError::OldWal { .. }));
}

/// A catalog with a hook before each commit.
struct Hooked {
    inner: Arc<MemoryCatalog>,
    commits: AtomicUsize,
    #[allow(clippy::type_complexity)]
    before: Box<dyn Fn(usize) -> Result<(), CatalogError> + Send + Sync>,
}

impl Catalog for Hooked {
    fn load(&self) -> Result<Snapshot, CatalogError> {
        self.inner.load()
    }
    fn commit(&self, changes: &[Change]) -> Result<u64, CatalogError> {
        (self.before)(self.commits.fetch_add(1, Ordering::SeqCst))?;
        self.inner.commit(changes)
    }
}

async fn open_with(
    world: &World,
    before: impl Fn(usize) -> Result<(), CatalogError> + Send + Sync + 'static,
) -> Result<Recovery, StoreError> {
    let catalog = Hooked {
        inner: world.catalog.clone(),
        commits: AtomicUsize::new(0),
        before: Box::new(before),
    };
    let opened = Store::open(
        world.disk.device(),
        world.wal_options.clone(),
        world.objects.clone(),
        Arc::new(catalog),
        Arc::new(Hash),
        world.options.clone(),
        None,
    );
    let opened = opened.await?;
    drop(opened.store);
    Ok(opened.recovery)
}

/// An upgrade records something new in the catalog; on a full disk it does so later.
#[tokio::test]
async fn a_catalog_whose_disk_is_full_is_opened() {
    let world = World::new(WAL_BYTES, 1);
    let full = |commit| match commit {
        1 => Err(CatalogError::Full("injected".into())),
        _ => Ok(()),
    };
    let largest_count = || world.catalog.load().unwrap().meta.get("stream/largest-count").cloned();
    open_with(&world, full).await.unwrap();
    let mark = Wal::inspect(&world.disk.device()).unwrap().header.mark;
    assert_eq!((world.catalog.load().unwrap().wal_mark, largest_count()), (mark, None));
    open_with(&world, |_| Ok(())).await.unwrap();
    assert_eq!(largest_count().as_deref(), Some(&b"16384"[..]));
}

/// An interrupted attempt may have changed the catalog, the header, or both.
#[tokio::test]
async fn interrupted_openings_do_not_prevent_the_next_one() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    let id = stream.id();
    let batches = upload_each(&server, &stream, 0, 2).await;
    drop(stream);
    server.crash(&mut world);
    let mark = |world: &World| Wal::inspect(&world.disk.device()).unwrap().header.mark;
    let version = |world: &World| world.catalog.load().unwrap().version;
    let fail = || Err(CatalogError::Failed("injected".into()));
    for _ in 0..3 {
        // Before any change.
        let (had, marked) = (version(&world), mark(&world));
        open_with(&world, move |_| fail()).await.expect_err("it fails");
        assert_eq!((version(&world), mark(&world)), (had, marked));
        // Between the catalog and the header.
        world.disk.set_faults(Faults { write_error: 1.0, ..Faults::default() });
        open_with(&world, |_| Ok(())).await.expect_err("it fails");
        world.disk = world.disk.power_cut();
        world.disk.set_faults(Faults::default());
        assert!(version(&world) > had && mark(&world) == marked);
        // Between the header and its record in the catalog.
        let second = move |commit| if commit == 1 { fail() } else { Ok(()) };
        open_with(&world, second).await.expect_err("it fails");
        assert!(mark(&world) == version(&world));
        world.disk = world.disk.power_cut();
    }
    let server = world.start().await;
    let stream = server.open(id).await;
    assert_eq!(read_from(&stream, 0, 1500).await, batches);
    drop(stream);
    server.close().await;
}

/// Another process opened the WAL after the catalog was compared with it, and before this one
/// opened it.
#[tokio::test]
async fn an_opening_in_between_is_detected() {
    for marks in [true, false] {
        let mut world = World::new(WAL_BYTES, 1);
        let server = world.start().await;
        let stream = server.create_log().await;
        let id = stream.id();
        upload_each(&server, &stream, 0, 2).await;
        append(&server.store, &stream, &batch(id, 2, 1, 1000)).await.await.unwrap();
        drop(stream);
        server.crash(&mut world);

        let (device, mut options) = (world.disk.device(), world.wal_options.clone());
        if marks {
            // With a copy of the catalog of the same version.
            options.mark = Some(world.catalog.load().unwrap().version + 1);
        }
        let competing_opening = move |commit| {
            if commit == 0 {
                let opened = Wal::open(device.clone(), &options, None, &mut |_| Ok(()));
                let (wal, _) = opened.expect("it comes first");
                wal.trim(..wal.appended()).wait().expect("it is the owner");
            }
            Ok(())
        };
        match open_with(&world, competing_opening).await {
            Err(StoreError::OldCatalog { version, mark, uploaded, trimmed }) => {
                assert!(version < mark && (marks || uploaded < trimmed), "{uploaded} {trimmed}");
            }
            other => panic!("{:?}", other.map(|recovery| recovery.to_string())),
        }
    }
}

/// From before there were versions and marks.
#[tokio::test]
async fn a_catalog_and_a_wal_without_a_mark_are_opened() {
    let mut world = World::new(WAL_BYTES, 1);
    let (wal, report) =
        Wal::open(world.disk.device(), &world.wal_options, None, &mut |_| Ok(())).unwrap();
    wal.close().unwrap();
    let found = Snapshot { wal_id: Some(report.wal_id), ..Snapshot::default() };
    world.catalog = Arc::new(found.into());
    let server = world.start().await;
    let stream = server.create_log().await;
    upload_each(&server, &stream, 0, 2).await;
    drop(stream);
    server.crash(&mut world);
    let header = Wal::inspect(&world.disk.device()).unwrap().header;
    assert!(header.mark > 0 && header.mark <= world.catalog.load().unwrap().version);
    world.start().await.close().await;
}

/// How a machine and its disk were cloned.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cloned {
    /// While it was down; then both were started.
    Down,
    /// While it ran; it has uploaded nothing since.
    Idle,
    /// While it ran; it has continued.
    Busy,
}

/// No header shows one clone to the other; the object store does. What the clone that is not the
/// owner accepts stays in its WAL.
#[tokio::test]
async fn one_of_two_clones_owns_the_objects() {
    for case in [Cloned::Down, Cloned::Idle, Cloned::Busy] {
        let world = World::new(WAL_BYTES, 1);
        let server = world.start().await;
        let (stream, _) = three_objects(&server).await;
        let id = stream.id();
        drop(stream);
        server.close().await;

        let mut other = copy_of(&world, cloned(&world.disk));
        let a = world.start().await;
        claimed_by(&world, 2).await;
        if case != Cloned::Down {
            other = copy_of(&world, cloned(&world.disk));
        }
        let stream = a.open(id).await;
        let mut next = 60;
        if case == Cloned::Busy {
            upload_each(&a, &stream, 60, 61).await;
            next = 61;
        }
        let b = other.start().await;
        let (owner, loser, next) = if case == Cloned::Idle {
            claimed_by(&world, 3).await;
            (&b, &a, 60)
        } else {
            (&a, &b, next)
        };
        drop(stream);
        let theirs = loser.open(id).await;
        let (trimmed, uploads) = (loser.store.stats().wal.trimmed, loser.store.stats().uploads);
        append(&loser.store, &theirs, &batch(id, 60, 1, 1000)).await.await.unwrap();
        let uploading = tokio::spawn({
            let store = loser.store.clone();
            async move { store.flush().await }
        });
        let owned = || loser.store.stats().upload_failing.is_some_and(|f| f.error.contains("owns"));
        eventually("it keeps what it has", owned).await;
        theirs.trim(StreamOffset(20)).await.unwrap();
        let tries = loser.store.stats().owner_conflicts;
        eventually("it tries again", || loser.store.stats().owner_conflicts >= tries + 10).await;
        let stats = loser.store.stats();
        assert_eq!((stats.wal.trimmed, stats.uploads), (trimmed, uploads));
        assert_eq!(stats.retired_objects, 1, "the other one still has it");

        let stream = owner.open(id).await;
        let count = usize::try_from(next).unwrap() - 60 + 30;
        assert_eq!(read_from(&stream, 0, 1 << 20).await.len(), count);
        upload_each(owner, &stream, next, next + 1).await;
        stream.trim(StreamOffset(20)).await.unwrap();
        eventually("it deletes", || owner.store.stats().retired_objects == 0).await;
        assert_eq!(owner.store.stats().owner_conflicts, 0);

        uploading.abort();
        let _ = uploading.await;
        drop((stream, theirs));
        a.close().await;
        b.close().await;
        let lost = [&world, &other].map(|world| Wal::inspect(&world.disk.device()).unwrap().header);
        assert!(lost.iter().any(|header| header.trim == trimmed && header.durable > trimmed));
    }
}

/// A backup of catalog and WAL was restored. They fit together; what came later is in the object
/// store and stays there.
#[tokio::test]
async fn a_restored_backup_deletes_no_newer_objects() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    upload_each(&server, &stream, 0, 2).await;
    let backup = copy_of(&world, cloned(&world.disk));
    upload_each(&server, &stream, 2, 4).await;
    drop(stream);
    server.crash(&mut world);
    let before = names(&world).await;
    assert_eq!(before.len(), 4);

    // However often it is started: a start raises its version and its epoch, but adds no knowledge.
    let mut backup = backup;
    for _ in 0..8 {
        let server = backup.start_with(make_listings_old).await;
        eventually("it deletes nothing", || server.store.stats().owner_conflicts > 0).await;
        assert_eq!(
            (names(&world).await, server.store.stats().orphans_deleted),
            (before.clone(), 0)
        );
        assert_eq!(server.store.stats().orphans, 2);
        server.crash(&mut backup);
    }

    // If the other server is gone for good, an operator deletes the owner object.
    backup.objects.delete(&owner_of(&backup)).await.unwrap();
    let server = backup.start_with(make_listings_old).await;
    eventually("they are deleted", || server.store.stats().orphans_deleted == 2).await;
    server.close().await;
}

#[tokio::test]
async fn the_owner_object_records_the_owner() {
    let mut world = World::new(WAL_BYTES, 1);
    world.wal_options.node_id = 7;
    let server = world.start().await;
    claimed_by(&world, 1).await;
    let first = claim(&world).await.unwrap();
    assert_eq!((&first["node_id"], &first["version"]), (&7.into(), &((1u64 << 32) + 1).into()));
    assert!(first["written_at_ms"].as_u64() > Some(1_600_000_000_000));
    let (stream, _) = three_objects(&server).await;
    stream.trim(StreamOffset(20)).await.unwrap();
    eventually("it is deleted", || server.store.stats().retired_objects == 0).await;
    let second = claim(&world).await.unwrap();
    assert_eq!((&second["life"], &second["epoch"]), (&first["life"], &1.into()));
    assert!(second["version"].as_u64() > first["version"].as_u64());
    drop(stream);
    server.crash(&mut world);

    // It is not an orphan, however old it is.
    let server = world.start_with(make_listings_old).await;
    claimed_by(&world, 2).await;
    assert_ne!(claim(&world).await.unwrap()["life"], first["life"]);
    assert_eq!((server.store.stats().orphans, server.store.stats().orphans_deleted), (0, 0));

    // Without a readable owner object nothing is deleted.
    for nonsense in ["", "{}", &"x".repeat(5000)] {
        let stream = server.open(StreamId(0)).await;
        let failures = server.store.stats().clean_up_failures;
        world.objects.put(&owner_of(&world), nonsense.to_owned().into()).await.unwrap();
        if stream.start_offset() < StreamOffset(40) {
            stream.trim(StreamOffset(40)).await.unwrap();
        }
        eventually("it tries again", || server.store.stats().clean_up_failures >= failures + 2)
            .await;
        assert_eq!(names(&world).await.len(), 2);
    }
    world.objects.delete(&owner_of(&world)).await.unwrap();
    eventually("it deletes", || server.store.stats().retired_objects == 0).await;
    assert_eq!(names(&world).await.len(), 1);
    server.close().await;
}

/// The mark comes first, since a crash may come in between.
#[tokio::test]
async fn no_object_is_deleted_before_the_mark_is_durable() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let (stream, _) = three_objects(&server).await;
    server.objects.deletes_fail.store(true, Ordering::SeqCst);
    stream.trim(StreamOffset(20)).await.unwrap();
    let retired_in = world.catalog.load().unwrap().version;
    eventually("it tries", || server.store.stats().clean_up_failures > 0).await;
    drop(stream);
    server.power_cut(&mut world);
    let mark = Wal::inspect(&world.disk.device()).unwrap().header.mark;
    assert!(mark >= retired_in, "{mark} {retired_in}");
}
