//! Objects without references are deleted from the object store, and no others.

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use alluvium_stream::{KIND_LOG, Opened, Reason, Store, StreamEpoch, StreamOffset};
use common::*;
use object_store::ObjectStoreExt;

const WAL_BYTES: u64 = 1 << 20;

#[tokio::test]
async fn an_object_is_deleted_when_no_stream_has_a_part_of_it() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let other = server.create_log().await;
    append(&server.store, &other, &batch(other.id(), 0, 1, 10)).await.await.unwrap();
    let (stream, batches) = three_objects(&server).await;
    let before = names(&world).await;

    stream.trim(StreamOffset(39)).await.unwrap();
    assert_eq!(
        server.store.stats().objects,
        3,
        "the first has a part of the other stream, the second a batch that is not trimmed"
    );
    stream.trim(StreamOffset(40)).await.unwrap();
    eventually("the second object is deleted", || server.store.stats().retired_objects == 0).await;
    assert_eq!(names(&world).await, [before[0].clone(), before[2].clone()]);
    assert_eq!((server.store.stats().objects, stream.size_bytes()), (2, 10_000));
    assert_eq!(read_from(&stream, 40, 1 << 20).await, batches[20..]);

    // Failed deletions are retried, also after the next start.
    server.objects.deletes_fail.store(true, Ordering::SeqCst);
    server.store.commit(vec![delete(other.id()), delete(stream.id())]).await.unwrap();
    eventually("it tries again", || server.store.stats().clean_up_failures >= 5).await;
    assert_eq!(
        (
            names(&world).await.len(),
            server.store.stats().objects,
            server.store.stats().retired_objects
        ),
        (2, 0, 2)
    );
    drop((stream, other));
    server.crash(&mut world);
    let server =
        world.start_with(|objects| objects.deletes_fail.store(true, Ordering::SeqCst)).await;
    eventually("it tries again", || server.store.stats().clean_up_failures >= 5).await;
    assert_eq!((names(&world).await.len(), server.store.stats().retired_objects), (2, 2));
    server.objects.deletes_fail.store(false, Ordering::SeqCst);
    eventually("all objects are deleted", || server.store.stats().retired_objects == 0).await;
    assert_eq!(names(&world).await, [""; 0]);
    server.close().await;
    let server = world.start().await;
    assert_eq!(server.store.stats().retired_objects, 0, "and forgotten");
    server.close().await;
}

/// Otherwise the chain would have ranges in an object that is gone, if the log was lost.
#[tokio::test]
async fn no_object_is_deleted_before_the_chain_has_dropped_it() {
    for mode in [CatalogMode::Fails, CatalogMode::LosesAnswers] {
        let mut world = World::new(WAL_BYTES, 1);
        let server = world.start().await;
        let (stream, _) = three_objects(&server).await;
        let id = stream.id();
        drop(stream);
        server.objects.set_catalog(mode);
        server.store.commit(vec![delete(id)]).await.unwrap();
        let failed = || server.objects.catalog_failed.load(Ordering::SeqCst);
        eventually("it is sent repeatedly", || failed() >= 3).await;
        let stats = server.store.stats();
        assert_eq!((names(&world).await.len(), stats.objects, stats.retired_objects), (3, 0, 3));
        server.crash(&mut world);
        let server = world.start().await;
        assert!(server.store.stream(id).is_none());
        eventually("they are deleted", || server.store.stats().retired_objects == 0).await;
        assert_eq!(names(&world).await, [""; 0]);
        let mark = world.header().mark;
        assert!(mark > 0 && mark <= world.catalog().await.header.version);
        server.close().await;
        assert!(world.catalog().await.objects.is_empty(), "and forgotten");
    }
}

/// Puts an object that an interrupted upload has left behind.
async fn put_orphan(world: &World) {
    let wal_id = world.header().wal_id;
    let name = format!("streams/{wal_id}/0000000000000009-orphan");
    world.objects.put(&name.into(), "x".into()).await.unwrap();
}

fn make_listings_old(objects: &Objects) {
    objects.clock_behind_s.store(2 * 24 * 60 * 60, Ordering::SeqCst);
}

#[tokio::test]
async fn failed_listings_and_deletions_of_orphans_are_retried() {
    let world = World::new(WAL_BYTES, 1);
    world.start().await.close().await;
    put_orphan(&world).await;
    let server = world
        .start_with(|objects| {
            make_listings_old(objects);
            objects.lists_fail.store(true, Ordering::SeqCst);
            objects.deletes_fail.store(true, Ordering::SeqCst);
        })
        .await;
    eventually("it lists again", || server.store.stats().clean_up_failures >= 3).await;
    assert_eq!(server.store.stats().orphans, 0, "it is unknown");
    server.objects.lists_fail.store(false, Ordering::SeqCst);
    eventually("it is found", || server.store.stats().orphans == 1).await;
    let failures = server.store.stats().clean_up_failures;
    eventually("it tries again", || server.store.stats().clean_up_failures >= failures + 3).await;
    assert_eq!(names(&world).await.len(), 1);
    let reasons: Vec<_> = server.store.degraded().into_iter().map(|it| it.reason).collect();
    assert_eq!(reasons, [Reason::ObjectDeletionFailing]);
    server.objects.deletes_fail.store(false, Ordering::SeqCst);
    eventually("it is deleted", || server.store.stats().orphans == 0).await;
    eventually("the report ends", || server.store.degraded().is_empty()).await;
    assert_eq!((server.store.stats().orphans_deleted, names(&world).await.len()), (1, 0));
    server.close().await;
}

/// The object store's clock is behind ours by more than the least age of an orphan.
#[tokio::test]
async fn an_object_that_waits_for_its_commit_is_not_an_orphan() {
    let world = World::new(WAL_BYTES, 1);
    let server = world
        .start_with(|objects| {
            make_listings_old(objects);
            objects.lists_fail.store(true, Ordering::SeqCst);
        })
        .await;
    let (stream, batch) = (server.create_log().await, |id| batch(id, 0, 1, 1000));
    append(&server.store, &stream, &batch(stream.id())).await.await.unwrap();
    let answer = server.objects.answers.lock().await;
    let flush = tokio::spawn({
        let store = server.store.clone();
        async move { store.flush().await }
    });
    while names(&world).await.is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    put_orphan(&world).await;
    server.objects.lists_fail.store(false, Ordering::SeqCst);
    eventually("it has scanned", || server.store.stats().orphans_deleted == 1).await;
    drop(answer);
    flush.await.unwrap().unwrap();
    let id = stream.id();
    drop(stream);
    server.close().await;
    let server = world.start().await;
    let stream = server.open(id).await;
    assert_eq!(read_from(&stream, 0, 1).await, [batch(id)]);
    drop(stream);
    server.close().await;
}

/// An upload that was not committed may have written what the log has lost since.
#[tokio::test]
async fn orphans_stay_when_records_are_lost() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    let (id, mut next) = (stream.id(), 0);
    for _ in 0..3 {
        append(&server.store, &stream, &batch(id, next, 1, 10_000)).await.await.unwrap();
        next += 1;
    }
    let lost = payload(id, 1, 10_000);
    drop(stream);
    server.crash(&mut world);
    put_orphan(&world).await;
    let image = world.disk.image();
    let at = image.windows(16).position(|window| window == &lost[5000..5016]).expect("it is there");
    world.disk.poke(at as u64, &[image[at] ^ 1]);
    for deleted in [true, false] {
        // Damage in the middle is a gap; what a stream lost that was deleted since is not.
        let server = world.start_with(make_listings_old).await;
        eventually("it has scanned", || server.store.stats().orphans == 1).await;
        assert_eq!(server.recovery.gaps.is_empty(), !deleted);
        if deleted {
            server.store.commit(vec![delete(id)]).await.unwrap();
        }
        assert_eq!((names(&world).await.len(), server.store.stats().orphans_deleted), (1, 0));
        server.crash(&mut world);
    }
}

/// With a real directory, whose files have an age.
#[tokio::test]
async fn old_orphans_of_this_store_are_deleted_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let world = World::new(WAL_BYTES, 1);
    let open = || async {
        let opened = Store::open(
            world.disk.device(),
            world.wal_options.clone(),
            alluvium_stream::local_objects(directory.path()).unwrap(),
            Arc::new(()),
            world.options.clone(),
            None,
        );
        let Opened { store, recovery } = opened.await.unwrap();
        (store, recovery.wal.wal_id)
    };
    let (store, wal_id) = open().await;
    let ids = store.new_stream_ids(1).await.unwrap();
    store.commit(vec![creation(ids[0], KIND_LOG)]).await.unwrap();
    let stream = store.open_stream(ids[0], StreamEpoch(0)).await.unwrap();
    stream.append(new_batch(&batch(ids[0], 0, 1, 100))).unwrap().await.unwrap();
    store.flush().await.unwrap();
    store.close().await.unwrap();

    let ours = directory.path().join("streams").join(wal_id.to_string());
    let mut objects = std::fs::read_dir(&ours).unwrap().map(|file| file.unwrap().path());
    let committed = objects.next().unwrap();
    assert!(objects.next().is_none());
    let create = |path: &Path, age: Duration| -> PathBuf {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "x").unwrap();
        make_old(path, age);
        path.to_path_buf()
    };
    let days = |days: u64| Duration::from_secs(days * 24 * 60 * 60);
    let old = create(&ours.join("0000000000000009-old"), days(2));
    let recent = create(&ours.join("0000000000000009-recent"), days(0));
    let others =
        create(&directory.path().join("streams/another-store/0000000000000001-x"), days(9));
    let foreign = create(&directory.path().join("notes.txt"), days(9));
    // The store below is opened with the second epoch, so it cannot know this object.
    let later = create(&ours.join("0000000300000000-later"), days(9));
    let without_number = create(&ours.join("notes"), days(9));
    make_old(&committed, days(9));

    let (store, _) = open().await;
    eventually("the orphan is deleted", || !old.exists()).await;
    store.close().await.unwrap();
    for kept in [recent, others, foreign, committed, later, without_number] {
        assert!(kept.exists(), "{}", kept.display());
    }
}

/// `LocalFileSystem` writes under such names, and never lists them.
#[test]
fn unfinished_files_are_removed_when_a_local_directory_is_opened() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("new").join("objects");
    let open = || drop(alluvium_stream::local_objects(&directory).unwrap());
    open();
    let ours = directory.join("streams").join("store");
    std::fs::create_dir_all(&ours).unwrap();
    let create = |name: &str, hours: u64| {
        let path = ours.join(name);
        std::fs::write(&path, "x").unwrap();
        make_old(&path, Duration::from_secs(hours * 60 * 60));
        path
    };
    let deleted = format!("0000000000000009-d#{}", u64::MAX);
    let removed = [
        create("0000000000000009-a#1", 25),
        create("0000000000000009-b#12", 99),
        // The truncation has updated its time.
        create(&deleted, 0),
    ];
    let kept = [
        create("0000000000000009-a", 99),
        create("0000000000000009-c#1", 23),
        create("notes#x", 99),
        create("notes#", 99),
    ];
    open();
    assert!(removed.iter().all(|path| !path.exists()));
    assert!(kept.iter().all(|path| path.exists()));

    let file = root.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let error = alluvium_stream::local_objects(&file.join("objects")).expect_err("a file");
    assert!(error.to_string().contains("file/objects"), "{error}");
}

fn make_old(path: &Path, age: Duration) {
    let file = std::fs::File::options().append(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - age).unwrap();
}
