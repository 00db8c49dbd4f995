//! Openings that are interrupted, and openings of two servers at the same time.
//! `docs/format/chain.md`, sections 8 and 9.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use alluvium_device::sim::Faults;
use alluvium_stream::{StoreError, StreamId};
use alluvium_wal::Wal;
use bytes::Bytes;
use common::*;
use futures::FutureExt;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use parking_lot::Mutex;
use uuid::Uuid;

const WAL_BYTES: u64 = 1 << 20;

/// Begins to open the store; ends when the process has died, or the disk has failed.
async fn begin_to_open(world: &World, prepare: impl Fn(&Objects)) -> Option<StoreError> {
    let died = Arc::new(Mutex::new(None));
    let keep = |objects: &Objects| {
        prepare(objects);
        *died.lock() = Some(objects.catalog_failed.clone());
    };
    let opened = world.start_with_fold(Arc::new(Hash), keep);
    let mut opened = Box::pin(opened);
    let begun = std::time::Instant::now();
    loop {
        if let Some(done) = (&mut opened).now_or_never() {
            return Some(done.err().expect("it fails"));
        }
        let failures = died.lock().clone();
        // Its retries find that the process is dead.
        if failures.is_some_and(|failures| failures.load(Ordering::SeqCst) > 0) {
            tokio::time::sleep(Duration::from_millis(20)).await;
            return None;
        }
        assert!(begun.elapsed() < HANG, "it neither fails nor dies");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Lets the process die at PUT number `at` of the catalog.
fn dies(at: u64, mode: CatalogMode) -> impl Fn(&Objects) {
    move |objects| {
        let mut puts = 0;
        objects.decide_catalog(move |_| {
            puts += 1;
            if puts == at { mode } else { CatalogMode::Works }
        });
    }
}

/// An interrupted opening may have written its fence, the header of the log, and its first delta.
#[tokio::test]
async fn interrupted_openings_do_not_prevent_the_next_one() {
    for is_new in [true, false] {
        let mut world = World::new(WAL_BYTES, 1);
        let mut batches = Vec::new();
        if !is_new {
            let server = world.start().await;
            let stream = server.create_log().await;
            batches = upload_each(&server, &stream, 0, 2).await;
            batches.push(batch(stream.id(), 2, 1, 1000));
            append(&server.store, &stream, &batches[2]).await.await.unwrap();
            drop(stream);
            server.crash(&mut world);
        }
        let number =
            async |world: &World| world.try_catalog().await.map_or(0, |state| state.head.number);
        for _ in 0..3 {
            // Before any change.
            let (had, marked) = (number(&world).await, world.header().mark);
            begin_to_open(&world, dies(1, CatalogMode::Dies)).await;
            assert_eq!((number(&world).await, world.header().mark), (had, marked));
            // Between the fence and the header.
            begin_to_open(&world, dies(1, CatalogMode::DiesAfter)).await;
            assert_eq!((number(&world).await, world.header().mark), (had + 1, marked));
            world.disk.set_faults(Faults { write_error: 1.0, ..Faults::default() });
            let error = begin_to_open(&world, |_| ()).await;
            assert!(matches!(error, Some(StoreError::Open(_))), "{error:?}");
            assert_eq!(number(&world).await, had + 2);
            world.disk = world.disk.power_cut();
            world.disk.set_faults(Faults::default());
            assert_eq!(world.header().mark, marked);
            // Between the header and the first delta, and after it.
            for (mode, objects) in [(CatalogMode::Dies, 3), (CatalogMode::DiesAfter, 5)] {
                begin_to_open(&world, dies(2, mode)).await;
                world.disk = world.disk.power_cut();
                assert_eq!(number(&world).await, had + objects);
                assert!(world.header().mark > marked);
            }
        }
        let server = world.start().await;
        assert_eq!(server.recovery.batches, u64::from(!is_new));
        let id = match is_new {
            true => server.create_log().await.id(),
            false => StreamId(0),
        };
        let stream = server.open(id).await;
        assert_eq!(read_from(&stream, 0, 1500).await, batches);
        drop(stream);
        server.close().await;
    }
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

        let opening = world.catalog().await.header.opening + 1;
        let (device, mut options) = (world.disk.device(), world.wal_options.clone());
        if marks {
            // With a copy of the object store, and a fence of the same version.
            options.mark = Some(u64::from(opening) << 32);
        }
        let prepare = move |objects: &Objects| {
            let (device, options) = (device.clone(), options.clone());
            let mut is_first = true;
            objects.decide_catalog(move |_| {
                if std::mem::take(&mut is_first) {
                    let opened = Wal::open(device.clone(), &options, None, &mut |_| Ok(()));
                    let (wal, _) = opened.expect("it comes first");
                    wal.trim(..wal.appended()).wait().expect("it is the owner");
                }
                CatalogMode::Works
            });
        };
        match world.start_with_fold(Arc::new(Hash), prepare).await {
            Err(StoreError::OldCatalog { version, mark, uploaded, trimmed }) => {
                assert_eq!(version >> 32, u64::from(opening));
                assert!(version <= mark && (marks || uploaded < trimmed), "{uploaded} {trimmed}");
            }
            other => panic!("{:?}", other.map(|server| server.recovery.to_string())),
        }
    }
}

/// The objects that another server's opening has put into the chain: its fence, or that and its
/// first delta.
async fn opening_of_another(world: &World, has_delta: bool) -> Vec<(Path, Bytes)> {
    let other = world.copy().await;
    let before = contents(&other.objects).await;
    if has_delta {
        drop(other.start().await);
    } else {
        begin_to_open(&other, dies(1, CatalogMode::DiesAfter)).await;
    }
    let mut added = contents(&other.objects).await;
    added.retain(|object| !before.contains(object));
    assert_eq!(added.len(), 1 + usize::from(has_delta));
    added
}

/// Two servers with clones of the device open the store at the same time, and the other one takes
/// the number of the fence. If it has got no further, this one comes after it.
#[tokio::test]
async fn a_fence_whose_number_is_taken_is_compared_again() {
    for has_delta in [false, true] {
        let mut world = World::new(WAL_BYTES, 1);
        let server = world.start().await;
        let (stream, batches) = three_objects(&server).await;
        let id = stream.id();
        drop(stream);
        server.crash(&mut world);
        let before = world.catalog().await;
        let added = Mutex::new(Some(opening_of_another(&world, has_delta).await));
        let prepare = |objects: &Objects| {
            let (inner, mut added) = (world.objects.clone(), added.lock().take());
            objects.decide_catalog(move |_| {
                for (name, bytes) in added.take().unwrap_or_default() {
                    let put = inner.put(&name, bytes.into()).now_or_never();
                    put.expect("in memory").unwrap();
                }
                CatalogMode::Works
            });
        };
        match world.start_with_fold(Arc::new(Hash), prepare).await {
            Ok(server) => {
                assert!(!has_delta);
                let state = world.catalog().await;
                // The other one's fence, and its own fence and delta.
                assert_eq!(state.head.number, before.head.number + 3);
                assert_eq!(state.header.opening, before.header.opening + 2);
                assert_eq!(state.incarnations.len(), before.incarnations.len() + 2);
                let stream = server.open(id).await;
                assert_eq!(read_from(&stream, 0, 1 << 20).await, batches);
                drop(stream);
                server.close().await;
            }
            Err(StoreError::OldWal { mark, seen }) => assert!(has_delta && mark < seen),
            Err(other) => panic!("{other}"),
        }
    }
}

#[tokio::test]
async fn each_opening_is_in_the_chain() {
    let mut world = World::new(WAL_BYTES, 1);
    world.wal_options.node_id = 7;
    let mut before = None;
    for opening in 1..4_u32 {
        let server = world.start().await;
        let state = world.catalog().await;
        assert_eq!(
            (state.header.opening, state.header.epoch, state.header.node),
            (opening, opening, 7)
        );
        assert_eq!(state.head.number, 2 * u64::from(opening), "a fence and a delta");
        assert!(state.header.written_at_ms > 1_600_000_000_000);
        assert_eq!(state.incarnations.len(), opening as usize);
        let last = state.incarnations.last().unwrap();
        assert_eq!(last.id, state.header.incarnation);
        assert_eq!(last.after_version, before.map_or(0, |before: (u64, Uuid)| before.0));
        assert!(before.is_none_or(|before| before.1 != last.id));
        before = Some((state.header.version, last.id));
        server.crash(&mut world);
    }
}
