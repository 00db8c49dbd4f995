//! The WAL is lost: what the rebuild states is exactly what is lost, and no offset is handed out
//! twice.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use alluvium_device::sim::{Random, SimDisk};
use alluvium_stream::{
    Batch, Change, KIND_LOG, LostEnd, NewBatch, Options, Rebuild, RebuildError, StoreError,
    StreamId, StreamOffset,
};
use alluvium_wal::HeaderInfo;
use bytes::Bytes;
use object_store::ObjectStore;
use uuid::Uuid;

use common::{Server, World, append, batch, payload, read_all};

const WAL_BYTES: u64 = 1 << 20;
/// Offsets that a stream skips after what it may have had.
const SKIPPED: u64 = 1 << 33;

async fn load(world: &World, store: Uuid) -> Rebuild {
    let objects: Arc<dyn ObjectStore> = world.objects.clone();
    Rebuild::load(&objects, store, &Options::default()).await.unwrap()
}

async fn bind(world: &World, rebuild: Rebuild, wal: &HeaderInfo) -> Result<bool, RebuildError> {
    let objects: Arc<dyn ObjectStore> = world.objects.clone();
    rebuild.bind(&objects, wal, 1).await
}

async fn start(world: &World) -> Server {
    // The fold of other tests refuses gaps.
    world.try_start(Arc::new(())).await.unwrap()
}

#[tokio::test]
async fn after_a_clean_end_nothing_is_lost() {
    let mut world = World::new(WAL_BYTES, 1);
    let store = world.header().wal_id;
    let server = start(&world).await;
    let stream = server.create_log().await;
    let first = batch(stream.id(), 0, 2, 100);
    append(&server.store, &stream, &first).await.await.unwrap();
    server.store.flush().await.unwrap();
    let id = stream.id();
    drop(stream);
    server.close().await;

    let wal = world.lose_disk(WAL_BYTES);
    let rebuild = load(&world, store).await;
    assert!(rebuild.is_clean() && rebuild.lost_ends().is_empty());
    assert!(bind(&world, rebuild, &wal).await.unwrap());
    let server = start(&world).await;
    assert_eq!(read_all(&server, id).await, std::slice::from_ref(&first));
    assert_eq!(server.store.term(), 0, "nothing was truncated");
    let stream = server.open(id).await;
    let second = batch(id, 2, 1, 100);
    append(&server.store, &stream, &second).await.await.unwrap();
    assert_eq!(read_all(&server, id).await, [first, second], "without a gap");
    drop(stream);
    server.close().await;
}

#[tokio::test]
async fn a_rebuild_can_be_repeated_and_needs_a_new_log() {
    let mut world = World::new(WAL_BYTES, 1);
    let (store, old) = (world.header().wal_id, world.disk.image());
    let server = start(&world).await;
    server.close().await;
    let other = World::new(WAL_BYTES, 2);
    other.try_start(Arc::new(())).await.unwrap().close().await;
    let used = other.header();
    let refused = bind(&world, load(&world, store).await, &used).await;
    assert!(matches!(refused, Err(RebuildError::UsedWal { .. })), "{refused:?}");

    let wal = world.lose_disk(WAL_BYTES);
    assert!(bind(&world, load(&world, store).await, &wal).await.unwrap());
    assert!(!bind(&world, load(&world, store).await, &wal).await.unwrap(), "it is bound");
    // The log belongs to the store of this chain, and to no other one.
    let another = World { objects: world.objects.clone(), ..World::new(WAL_BYTES, 3) };
    let another_store = another.header().wal_id;
    another.try_start(Arc::new(())).await.unwrap().close().await;
    let refused = bind(&world, load(&another, another_store).await, &wal).await;
    assert!(matches!(refused, Err(RebuildError::OtherStore { .. })), "{refused:?}");

    start(&world).await.close().await;
    // The old log is not that of the store any more.
    world.disk = SimDisk::from_image(&old, world.disk_options());
    let refused = world.try_start(Arc::new(())).await.err().unwrap();
    assert!(matches!(refused, StoreError::WrongWal { .. }), "{refused}");
    let objects: Arc<dyn ObjectStore> = world.objects.clone();
    let unknown = Rebuild::load(&objects, Uuid::nil(), &Options::default()).await.err().unwrap();
    assert!(matches!(unknown, RebuildError::NoCatalog(_)), "{unknown}");
}

/// However large the batches are, no stream passes what a rebuild skips.
#[tokio::test]
async fn a_stream_does_not_outrun_the_chain() {
    let mut world = World::new(WAL_BYTES, 1);
    let store = world.header().wal_id;
    let server = start(&world).await;
    let stream = server.create_log().await;
    server.store.flush().await.unwrap();
    server.objects.down.store(true, std::sync::atomic::Ordering::SeqCst);
    let mut next = 0;
    let large = |base: u64| NewBatch {
        base: StreamOffset(base),
        count: 1 << 31,
        max_timestamp_ms: -1,
        payload: Bytes::from_static(b"large"),
    };
    // The first one waits until the chain has the largest count.
    assert!(stream.append(large(0)).is_err());
    server.objects.down.store(false, std::sync::atomic::Ordering::SeqCst);
    let first = loop {
        match stream.append(large(0)) {
            Ok(done) => break done,
            Err(_) => server.store.wait_for_space().await,
        }
    };
    first.await.unwrap();
    server.objects.down.store(true, std::sync::atomic::Ordering::SeqCst);
    let mut used = 1 << 31;
    while let Ok(done) = stream.append(large(used)) {
        done.await.unwrap();
        used += 1 << 31;
        next += 1;
        assert!(next < 100);
    }
    assert!(used <= SKIPPED + (1 << 31), "{used}");
    let id = stream.id();
    drop(stream);
    server.crash(&mut world);

    let wal = world.lose_disk(WAL_BYTES);
    let rebuild = load(&world, store).await;
    let [lost] = rebuild.lost_ends()[..] else { panic!("one stream") };
    assert!(lost.resume.0 >= used, "{lost:?}, and {used} were used");
    bind(&world, rebuild, &wal).await.unwrap();
    let server = start(&world).await;
    assert_eq!(server.store.stream(id).unwrap().next_offset(), lost.resume);
    server.close().await;
}

/// Everything that was ever acknowledged.
#[derive(Default)]
struct Journal {
    /// By stream.
    batches: BTreeMap<StreamId, Vec<Batch>>,
    /// The greatest offset that a stream has had.
    ends: BTreeMap<StreamId, StreamOffset>,
    ids: BTreeSet<StreamId>,
}

async fn run_randomly(world: &mut World, random: &mut Random, journal: &mut Journal) -> bool {
    let mut server = start(world).await;
    for _ in 0..random.next_u64() % 60 {
        let streams: Vec<_> = server.store.stream_ids();
        let any = |random: &mut Random| {
            (!streams.is_empty())
                .then(|| streams[(random.next_u64() % streams.len() as u64) as usize])
        };
        match random.next_u64() % 12 {
            0 | 1 if streams.len() < 5 => {
                let id = server.store.new_stream_ids(1).await.unwrap()[0];
                assert!(journal.ids.insert(id), "id {id} was handed out before");
                let create = Change::CreateStream { id, kind: KIND_LOG, label: Bytes::new() };
                server.store.commit(vec![create]).await.unwrap();
            }
            2 | 3 => server.store.flush().await.unwrap(),
            4 if random.next_u64().is_multiple_of(4) => {
                server.crash(world);
                server = start(world).await;
            }
            _ => {
                let Some(id) = any(random) else { continue };
                let stream = server.open(id).await;
                let base = stream.next_offset();
                assert!(journal.ends.get(&id).is_none_or(|end| *end <= base), "stream {id}");
                let count = 1 + (random.next_u64() % 5) as u32;
                let bytes = 1 + (random.next_u64() % 2000) as usize;
                let batch = Batch {
                    base,
                    count,
                    max_timestamp_ms: -1,
                    payload: payload(id, base.0, bytes),
                };
                append(&server.store, &stream, &batch).await.await.unwrap();
                journal.ends.insert(id, batch.end());
                journal.batches.entry(id).or_default().push(batch);
            }
        }
    }
    if random.next_u64().is_multiple_of(3) {
        server.store.flush().await.unwrap();
    }
    match random.next_u64() % 2 {
        0 => server.power_cut(world),
        _ => server.close().await,
    }
    true
}

#[tokio::test]
async fn what_is_stated_is_what_is_lost() {
    let seeds = std::env::var("ALLUVIUM_MODEL_SEEDS").ok();
    let seeds = seeds.map_or(40, |seeds| seeds.parse().expect("a number"));
    let mut clean = 0;
    for seed in 0..seeds {
        let mut random = Random::new(seed);
        let mut world = World::new(WAL_BYTES, seed);
        let store = world.header().wal_id;
        let mut journal = Journal::default();
        for round in 0..3 {
            run_randomly(&mut world, &mut random, &mut journal).await;
            let wal = world.lose_disk(WAL_BYTES);
            let rebuild = load(&world, store).await;
            let lost: BTreeMap<StreamId, LostEnd> =
                rebuild.lost_ends().into_iter().map(|lost| (lost.stream, lost)).collect();
            let left: BTreeSet<StreamId> = rebuild.state().streams.keys().copied().collect();
            let is_clean = rebuild.is_clean();
            clean += u64::from(is_clean);
            let at = format!("seed {seed}, round {round}, clean {is_clean}");
            assert!(bind(&world, rebuild, &wal).await.unwrap(), "{at}");

            let server = start(&world).await;
            let found: BTreeSet<StreamId> = server.store.stream_ids().into_iter().collect();
            assert_eq!(found, left, "{at}");
            for (id, batches) in &mut journal.batches {
                if !left.contains(id) {
                    assert!(!is_clean, "{at}: stream {id} is lost");
                    continue;
                }
                if let Some(lost) = lost.get(id) {
                    let end = batches.last().map_or(StreamOffset(0), Batch::end);
                    assert!(lost.known_end <= end.max(lost.from), "{at}: {lost:?}");
                    batches.retain(|batch| batch.end() <= lost.from);
                }
                assert_eq!(read_all(&server, *id).await, *batches, "{at}: stream {id}");
                let next = server.store.stream(*id).unwrap().next_offset();
                assert!(next >= journal.ends[id], "{at}: stream {id} continues at {next}");
            }
            journal.batches.retain(|id, _| left.contains(id));
            server.close().await;
        }
    }
    assert!(clean > seeds / 10, "{clean}");
}
