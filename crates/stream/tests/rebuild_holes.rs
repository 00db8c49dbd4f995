//! Objects are lost: the owner of the streams puts batches into the holes that a rebuild finds.

mod common;

use std::ops::Range;
use std::sync::Arc;

use alluvium_stream::{
    Batch, Change, Filler, Fold, KIND_LOG, Rebuild, RebuildError, StreamId, StreamOffset,
};
use bytes::Bytes;
use object_store::ObjectStoreExt;
use uuid::Uuid;

use common::*;

const WAL_BYTES: u64 = 1 << 20;

/// A fold whose checkpoint is the number of batches, and that puts it into holes: three bytes for
/// one of the checkpoint at the start of the hole, four for one of a later checkpoint.
struct Counting;

impl Fold for Counting {
    fn fold(
        &self,
        _: StreamId,
        _: u8,
        _: Range<StreamOffset>,
        _: StreamOffset,
        previous: Option<&[u8]>,
        batches: &[Batch],
    ) -> Option<Vec<u8>> {
        let before = previous.map_or(0, |count| count[0]);
        Some(vec![before + batches.len() as u8])
    }

    fn fill(
        &self,
        kind: u8,
        hole: Range<StreamOffset>,
        checkpoint: &[u8],
        checkpoint_end: StreamOffset,
    ) -> Vec<Filler> {
        assert_eq!(kind, KIND_LOG);
        let is_known = checkpoint_end >= hole.end;
        assert!(is_known || checkpoint_end == hole.start);
        let payload = vec![checkpoint[0]; if is_known { 4 } else { 3 }];
        let batch =
            Batch { base: hole.start, count: 1, max_timestamp_ms: 0, payload: payload.into() };
        let invalidated = (!is_known).then_some(StreamOffset(0)..hole.start);
        vec![Filler { batch, invalidated }]
    }
}

async fn start(world: &World) -> Server {
    world.try_start(Arc::new(Counting)).await.unwrap()
}

async fn from_objects(world: &World, store: Uuid) -> Result<Rebuild, RebuildError> {
    world.rebuild_from_objects(store, true, Arc::new(Counting)).await
}

/// Returns a server that has crashed, with an object for each of ten batches of ten offsets of two
/// streams.
async fn loaded() -> (World, Uuid, [StreamId; 2]) {
    let mut world = World::new(WAL_BYTES, 1);
    let store = world.header().wal_id;
    let server = start(&world).await;
    let ids = server.store.new_stream_ids(2).await.unwrap();
    for id in &ids {
        let (id, label) = (*id, Bytes::from_static(b"label"));
        let create = Change::CreateStream { id, kind: KIND_LOG, label };
        server.store.commit(vec![create]).await.unwrap();
    }
    for at in 0..10 {
        for id in &ids {
            let stream = server.open(*id).await;
            append(&server.store, &stream, &batch(*id, 10 * at, 10, 100)).await.await.unwrap();
        }
        server.store.flush().await.unwrap();
    }
    server.crash(&mut world);
    assert_eq!(names(&world).await.len(), 10);
    (world, store, [ids[0], ids[1]])
}

async fn lose(world: &World, numbers: &[usize]) {
    let names = names(world).await;
    for number in numbers {
        world.objects.delete(&names[*number].as_str().into()).await.unwrap();
    }
}

async fn lose_chain(world: &World) {
    for (name, _) in contents(&world.objects).await {
        if name.as_ref().starts_with("catalogs/") {
            world.objects.delete(&name).await.unwrap();
        }
    }
}

/// Flips a bit of the first block of an object.
async fn damage(world: &World, number: usize) {
    let name = names(world).await[number].as_str().into();
    let mut bytes = world.objects.get(&name).await.unwrap().bytes().await.unwrap().to_vec();
    bytes[40] ^= 1;
    world.objects.put(&name, bytes.into()).await.unwrap();
}

fn lost(rebuild: &Rebuild) -> Vec<(u64, u64, u64)> {
    let lost = &rebuild.found().unwrap().lost;
    let mut lost: Vec<_> =
        lost.iter().map(|(id, range)| (id.0, range.start.0, range.end.0)).collect();
    lost.sort_unstable();
    lost
}

/// Reads the batches that were put into holes, up to a damaged block: offset and payload.
async fn filled(server: &Server, id: StreamId) -> Vec<(u64, Vec<u8>)> {
    let stream = server.store.stream(id).unwrap();
    let (mut filled, mut next) = (Vec::new(), stream.start_offset());
    while let Ok(fetched) = stream.fetch(next, 1).await
        && let Some(last) = fetched.batches.last()
    {
        next = last.end();
        let found = fetched.batches.iter().filter(|batch| batch.count == 1);
        filled.extend(found.map(|batch| (batch.base.0, batch.payload.to_vec())));
    }
    filled
}

#[tokio::test]
async fn holes_that_a_checkpoint_describes_are_filled_from_it() {
    let (world, store, ids) = loaded().await;
    lose(&world, &[0, 3, 4, 8]).await;
    let rebuild = from_objects(&world, store).await.unwrap();
    let holes = |id: StreamId| [(id.0, 0, 10), (id.0, 30, 50), (id.0, 80, 90)];
    assert_eq!(lost(&rebuild), [holes(ids[0]), holes(ids[1])].concat());
    let found = rebuild.found().unwrap();
    assert_eq!(found.filled.len(), 6);
    assert!(found.filled.iter().all(|(_, filler)| filler.invalidated.is_none()));
    rebuild.bind(&world.store(), &world.header(), 1).await.unwrap();
    // One object for each batch of a stream.
    assert_eq!(names(&world).await.len(), 9);
    let expected = [0, 30, 80].map(|offset| (offset, vec![10; 4]));
    for _ in 0..2 {
        let server = start(&world).await;
        for id in ids {
            assert_eq!(filled(&server, id).await, expected);
            assert_eq!(read_all(&server, id).await.len(), 9);
            let stream = server.store.stream(id).unwrap();
            assert_eq!(stream.replay().checkpoint.as_deref(), Some(&[10][..]));
            assert!(stream.next_offset().0 >= 100);
        }
        server.close().await;
    }
}

#[tokio::test]
async fn holes_are_filled_while_checkpoints_are_folded() {
    let (world, store, ids) = loaded().await;
    lose(&world, &[3, 4]).await;
    lose_chain(&world).await;
    // The block of the first stream; after the loss it is the sixth object.
    damage(&world, 5).await;
    let dry = from_objects(&world, store).await.unwrap();
    let expected = [(ids[0].0, 30, 50), (ids[0].0, 70, 80), (ids[1].0, 30, 50)];
    assert_eq!(lost(&dry), expected);
    assert_eq!(names(&world).await.len(), 8, "nothing is written before");
    let invalidated = |rebuild: &Rebuild| -> Vec<(u64, u64)> {
        let filled = &rebuild.found().unwrap().filled;
        let ends = filled.iter().map(|(id, filler)| (id.0, filler.invalidated.clone().unwrap()));
        let mut ends: Vec<_> = ends.map(|(id, range)| (id, range.end.0)).collect();
        ends.sort_unstable();
        ends
    };
    assert_eq!(invalidated(&dry), [(ids[0].0, 30), (ids[0].0, 70), (ids[1].0, 30)]);
    dry.bind(&world.store(), &world.header(), 1).await.unwrap();
    let server = start(&world).await;
    // The batches in holes are folded, also that for the damaged block.
    assert_eq!(filled(&server, ids[0]).await, [(30, vec![3; 3])]);
    assert_eq!(filled(&server, ids[1]).await, [(30, vec![3; 3])]);
    let checkpoint = |id| server.store.stream(id).unwrap().replay().checkpoint.unwrap()[0];
    assert_eq!((checkpoint(ids[0]), checkpoint(ids[1])), (9, 9));
    server.close().await;
    // Another rebuild derives the same again, from the records alone.
    lose_chain(&world).await;
    let again = from_objects(&world, store).await.unwrap();
    assert_eq!(lost(&again), expected);
    assert_eq!(invalidated(&again), [(ids[0].0, 30), (ids[0].0, 70), (ids[1].0, 30)]);
    again.bind(&world.store(), &world.header(), 1).await.unwrap();
    let server = start(&world).await;
    assert_eq!(filled(&server, ids[0]).await, [(30, vec![3; 3])]);
    server.close().await;
}

/// A rebuild ends after it has written its objects. Then a lost object is found again.
#[tokio::test]
async fn objects_of_an_abandoned_rebuild_are_not_used() {
    let (world, store, ids) = loaded().await;
    let lost_name = names(&world).await[3].as_str().into();
    let bytes = world.objects.get(&lost_name).await.unwrap().bytes().await.unwrap();
    lose(&world, &[3]).await;
    let abandoned = world.copy().await;
    let rebuild = from_objects(&abandoned, store).await.unwrap();
    rebuild.bind(&abandoned.store(), &abandoned.header(), 1).await.unwrap();
    let written = names(&abandoned).await.pop().unwrap().as_str().into();
    let left = abandoned.objects.get(&written).await.unwrap().bytes().await.unwrap();
    world.objects.put(&written, left.into()).await.unwrap();
    // It states the same when it is repeated.
    let again = from_objects(&world, store).await.unwrap();
    assert_eq!(lost(&again), [(ids[0].0, 30, 40), (ids[1].0, 30, 40)]);
    world.objects.put(&lost_name, bytes.into()).await.unwrap();
    lose_chain(&world).await;
    let rebuild = from_objects(&world, store).await.unwrap();
    assert_eq!(lost(&rebuild), []);
    rebuild.bind(&world.store(), &world.header(), 1).await.unwrap();
    let server = start(&world).await;
    for id in ids {
        assert_eq!(filled(&server, id).await, []);
        assert_eq!(read_all(&server, id).await.len(), 10);
    }
    server.close().await;
}
