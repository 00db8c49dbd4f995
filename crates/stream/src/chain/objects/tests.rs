use std::collections::BTreeMap;

use object_store::memory::InMemory;
use object_store::path::Path;
use tokio::time::Instant;

use super::super::state::tests::Builder;
use super::super::{ChainChange, ChainWriter, Delta, Fence, Hints, Recorded};
use super::*;
use crate::types::StreamId;
use alluvium_wal::LogOffset;

const STORE: Uuid = Uuid::from_u128(1);
const RETRY: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(1));

fn chain(store: &Arc<InMemory>) -> Chain {
    Chain::new(store.clone(), STORE, RETRY)
}

/// Returns an object store with a chain of this many objects, and the states after each.
async fn built(seed: u64, objects: u64) -> (Arc<InMemory>, Vec<ChainState>) {
    let store = Arc::new(InMemory::new());
    let mut builder = Builder::new(seed);
    let sequence = chain(&store).sequence;
    let until = Instant::now() + Duration::from_secs(60);
    sequence.create(&builder.first.seal().object, until).await.unwrap();
    let mut states = vec![builder.state.clone()];
    for _ in 1..objects {
        let entry = builder.next();
        sequence.create(&entry.seal().object, until).await.unwrap();
        builder.state.apply(entry).unwrap();
        states.push(builder.state.clone());
    }
    (store, states)
}

async fn snapshot(store: &Arc<InMemory>, state: &ChainState) -> Path {
    let written = chain(store).write_snapshot(Snapshot::of(state.clone())).await.unwrap();
    chain(store).snapshot_name(written.number, written.nonce).into()
}

async fn change(store: &Arc<InMemory>, name: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = store.get(name).await.unwrap().bytes().await.unwrap().to_vec();
    change(&mut bytes);
    store.put(name, bytes.into()).await.unwrap();
}

/// Loads the chain from its first object.
async fn without_snapshots(store: &Arc<InMemory>) -> Result<Option<ChainState>, ObjectError> {
    for snapshot in chain(store).snapshots().await? {
        chain(store).delete_snapshot(&snapshot).await?;
    }
    chain(store).load().await
}

fn object(number: u64) -> Path {
    format!("catalogs/{STORE}/chain/{number:016x}").into()
}

#[tokio::test]
async fn a_chain_is_loaded_with_and_without_snapshots() {
    let nothing = Arc::new(InMemory::new());
    assert_eq!(chain(&nothing).load().await.unwrap(), None);
    let (store, states) = built(1, 40).await;
    let loaded = || async { chain(&store).load().await.unwrap().unwrap() };
    assert_eq!(loaded().await, states[39]);
    for at in [1, 30, 39] {
        snapshot(&store, &states[at]).await;
        assert_eq!(loaded().await, states[39]);
    }
    // What is below the newest snapshot is not needed.
    for number in 1..40 {
        store.delete(&object(number)).await.unwrap();
    }
    assert_eq!(loaded().await, states[39]);
}

#[tokio::test]
async fn a_damaged_snapshot_or_one_of_another_chain_is_passed_over() {
    let (store, states) = built(2, 20).await;
    snapshot(&store, &states[5]).await;
    let newest = snapshot(&store, &states[15]).await;
    change(&store, &newest, |bytes| bytes[70] ^= 1).await;
    assert_eq!(chain(&store).load().await.unwrap().unwrap(), states[19]);
    let mut other = states[17].clone();
    other.head.link ^= 1;
    snapshot(&store, &other).await;
    // An unfinished object, and one that is none.
    for name in ["0000000000000012-abc", "x"] {
        let name = format!("catalogs/{STORE}/snapshots/{name}").into();
        store.put(&name, b"".to_vec().into()).await.unwrap();
    }
    assert_eq!(chain(&store).load().await.unwrap().unwrap(), states[19]);
    assert_eq!(chain(&store).snapshots().await.unwrap().len(), 3);
}

#[tokio::test]
async fn a_damaged_or_missing_object_is_named() {
    let (store, states) = built(3, 20).await;
    snapshot(&store, &states[9]).await;
    let error = || async { chain(&store).load().await.unwrap_err() };
    let copy = store.get(&object(15)).await.unwrap().bytes().await.unwrap();
    for name in [object(15), object(20)] {
        change(&store, &name, |bytes| bytes[70] ^= 1).await;
        let error = error().await;
        assert!(error.is_loss() && error.to_string().contains(name.as_ref()), "{error}");
        change(&store, &name, |bytes| bytes[70] ^= 1).await;
    }
    store.delete(&object(15)).await.unwrap();
    let missing = error().await;
    assert!(missing.to_string().contains("000000000000000f: "), "{missing}");
    // In its place one of another chain with the same numbers.
    let (others, _) = built(4, 20).await;
    let other = others.get(&object(15)).await.unwrap().bytes().await.unwrap();
    store.put(&object(15), other.into()).await.unwrap();
    let error = error().await;
    assert!(error.is_loss() && error.to_string().contains("does not extend"), "{error}");
    store.put(&object(15), copy.into()).await.unwrap();
    assert_eq!(chain(&store).load().await.unwrap().unwrap(), states[19]);
}

#[tokio::test]
async fn a_snapshot_behind_the_end_shows_that_objects_are_missing() {
    let (store, states) = built(5, 20).await;
    snapshot(&store, &states[4]).await;
    snapshot(&store, &states[19]).await;
    for number in 15..=20 {
        store.delete(&object(number)).await.unwrap();
    }
    let error = chain(&store).load().await.unwrap_err();
    assert!(error.is_loss() && error.to_string().contains("0000000000000014"), "{error}");
    for number in 1..15 {
        store.delete(&object(number)).await.unwrap();
    }
    assert!(chain(&store).load().await.unwrap_err().is_loss(), "only snapshots are left");
}

#[tokio::test]
async fn a_reader_follows_the_chain_also_past_deleted_objects() {
    let (store, states) = built(6, 60).await;
    let (part, _) = built(7, 1).await;
    for number in 1..=10 {
        let bytes = store.get(&object(number)).await.unwrap().bytes().await.unwrap();
        part.put(&object(number), bytes.into()).await.unwrap();
    }
    let chain = chain(&part);
    let mut state = chain.load().await.unwrap().unwrap();
    assert_eq!(state, states[9]);
    assert!(!chain.follow(&mut state).await.unwrap());
    for number in 11..=20 {
        let bytes = store.get(&object(number)).await.unwrap().bytes().await.unwrap();
        part.put(&object(number), bytes.into()).await.unwrap();
    }
    assert!(chain.follow(&mut state).await.unwrap());
    assert_eq!(state, states[19]);
    // Meanwhile the objects behind it were deleted.
    for number in 50..=60 {
        let bytes = store.get(&object(number)).await.unwrap().bytes().await.unwrap();
        part.put(&object(number), bytes.into()).await.unwrap();
    }
    snapshot(&part, &states[54]).await;
    assert!(chain.follow(&mut state).await.unwrap());
    assert_eq!(state, states[59]);
}

/// The fence behind it names it, by the link.
#[tokio::test]
async fn the_snapshot_of_a_migration_counts_once_a_fence_names_it() {
    let store = Arc::new(InMemory::new());
    let mut state = Builder::new(8).state;
    state.head.number = 0;
    let migrated = Snapshot { previous: 0, ..Snapshot::of(state) };
    let written = chain(&store).write_snapshot(migrated).await.unwrap();
    assert_eq!(chain(&store).load().await.unwrap(), None);
    let snapshot = chain(&store).decode_snapshot(&written).await.unwrap();
    let opened = ChainWriter::open(
        chain(&store),
        Some(snapshot.state.clone()),
        Instant::now() + Duration::from_secs(60),
        |state| Ok::<_, ()>(fence(state.unwrap())),
    );
    let Ok(opened) = opened.await else { panic!("it opens") };
    assert_eq!(opened.state().streams, snapshot.state.streams);
    assert_eq!(chain(&store).load().await.unwrap().as_ref(), Some(opened.state()));
}

fn fence(state: &ChainState) -> Fence {
    Fence {
        store: state.header.store,
        wal: state.header.wal,
        epoch: 3,
        incarnation: Uuid::new_v4(),
        node: 0,
        written_at_ms: 0,
        term: None,
        own: Vec::new(),
        hints: Hints::new(),
    }
}

#[tokio::test]
async fn a_large_delta_has_its_body_elsewhere_until_it_is_deleted() {
    let (store, _) = built(9, 1).await;
    let state = chain(&store).load().await.unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    let opened =
        ChainWriter::open(chain(&store), state, until, |it| Ok::<_, ()>(fence(it.unwrap())));
    let Ok(mut writer) = opened.await else { panic!("it opens") };
    let mut random = alluvium_device::sim::Random::new(1);
    let value: Bytes = (0..5 << 20).map(|_| random.next_u64() as u8).collect::<Vec<_>>().into();
    let version = writer.state().header.version;
    let changes = vec![ChainChange::PutMeta { key: "a".into(), value: value.clone() }];
    writer.freeze(Delta {
        version: version + 2,
        recorded: vec![Recorded { version: version + 1, changes }],
        own: Vec::new(),
        hints: Hints::new(),
        cut: LogOffset(0),
        wal_mark: 0,
        next_stream: StreamId(0),
        is_clean: false,
        written_at_ms: 0,
    });
    // The body of an object that a crash has prevented.
    let left = format!("catalogs/{STORE}/bodies/{:016x}-{}", 3, Uuid::new_v4().simple()).into();
    store.put(&left, b"left".to_vec().into()).await.unwrap();
    writer.publish(until).await.unwrap();
    assert!(writer.is_snapshot_due(), "what is behind the last one is larger");
    let loaded = chain(&store).load().await.unwrap().unwrap();
    assert_eq!((&loaded, &loaded.meta["a"]), (writer.state(), &value));

    let bodies = chain(&store).list(&chain(&store).bodies_prefix()).await.unwrap();
    let body = &bodies.iter().find(|body| body.location != left).unwrap().location;
    for _ in 0..2 {
        writer.write_snapshot().await.unwrap();
    }
    assert_eq!(writer.clean_up(Duration::from_secs(3600)).await.unwrap(), 0);
    assert_eq!(writer.clean_up(Duration::ZERO).await.unwrap(), 1);
    assert!(store.head(&left).await.is_err() && store.head(body).await.is_ok());
    change(&store, body, |bytes| bytes[1000] ^= 1).await;
    let error = without_snapshots(&store).await.unwrap_err();
    assert!(error.is_loss() && error.to_string().contains("bodies"), "{error}");
    store.delete(body).await.unwrap();
    let error = without_snapshots(&store).await.unwrap_err();
    assert!(error.is_loss() && error.to_string().contains("bodies"), "{error}");
}

#[tokio::test]
async fn a_directory_has_a_chain() {
    let directory = tempfile::tempdir().unwrap();
    let store = crate::objects::local_objects(directory.path()).unwrap();
    let chain = Chain::new(store, STORE, RETRY);
    assert_eq!(chain.load().await.unwrap(), None);
    let until = Instant::now() + Duration::from_secs(60);
    let first = |_: Option<&ChainState>| Ok::<_, ()>(fence(&Builder::new(1).state));
    let Ok(mut writer) = ChainWriter::open(chain.clone(), None, until, first).await else {
        panic!("it opens")
    };
    writer.write_snapshot().await.unwrap();
    assert_eq!(chain.load().await.unwrap().as_ref(), Some(writer.state()));
    let names: BTreeMap<_, _> = [("chain", 1), ("snapshots", 1)].into();
    for (part, count) in names {
        let store = writer.state().header.store;
        let path = directory.path().join(format!("catalogs/{store}/{part}"));
        assert_eq!(std::fs::read_dir(path).unwrap().count(), count);
    }
}
