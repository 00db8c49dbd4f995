use alluvium_wal::LogOffset;
use object_store::memory::InMemory;
use object_store::path::Path;
use tokio::time::Instant;

use super::super::state::tests::Builder;
use super::super::{
    By, ChainChange, ChainWriter, CleanUp, Delta, Fence, FenceError, Hints, PublishError, Recorded,
};
use super::*;
use crate::types::{StreamId, StreamOffset};

pub(in crate::chain) const STORE: Uuid = Uuid::from_u128(1);
pub(in crate::chain) const RETRY: (Duration, Duration) =
    (Duration::from_millis(1), Duration::from_millis(1));

fn chain(store: &Arc<InMemory>) -> Chain {
    Chain::new(store.clone(), STORE, RETRY)
}

/// Returns an object store with a chain of this many objects, and the states after each.
pub(in crate::chain) async fn built(seed: u64, objects: u64) -> (Arc<InMemory>, Vec<ChainState>) {
    let store = Arc::new(InMemory::new());
    let mut builder = Builder::new(seed);
    let sequence = chain(&store).sequence;
    let until = Instant::now() + Duration::from_secs(60);
    sequence.create(&builder.first.seal(MAX_BODY_BYTES).object, until).await.unwrap();
    let mut states = vec![builder.state.clone()];
    for _ in 1..objects {
        let entry = builder.next();
        sequence.create(&entry.seal(MAX_BODY_BYTES).object, until).await.unwrap();
        builder.state.apply(entry).unwrap();
        states.push(builder.state.clone());
    }
    (store, states)
}

pub(in crate::chain) async fn snapshot(store: &Arc<InMemory>, state: &ChainState) -> Path {
    let snapshot = Snapshot::of(state.clone());
    let name = chain(store).snapshot_name(state.head.number, snapshot.nonce);
    chain(store).write_snapshot(snapshot).await.unwrap();
    name.into()
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

pub(in crate::chain) fn object(number: u64) -> Path {
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
async fn a_snapshot_beyond_the_end_shows_that_objects_are_missing() {
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

/// Puts a fence after a state.
async fn opened(chain: Chain, state: Option<ChainState>) -> ChainWriter {
    let until = Instant::now() + Duration::from_secs(60);
    match ChainWriter::open(chain, state, until, |_| Ok::<_, ()>(fence())).await {
        Ok(writer) => writer,
        Err(error) => panic!("{error:?}"),
    }
}

/// The fence after it names it, by the link.
#[tokio::test]
async fn the_snapshot_of_a_migration_counts_once_a_fence_names_it() {
    let store = Arc::new(InMemory::new());
    let mut state = Builder::new(8).state;
    state.head.number = 0;
    let [other, migrated] = [9, 8].map(|opening| {
        let mut state = state.clone();
        state.header.node = opening;
        Snapshot::of_new_base(state)
    });
    for snapshot in [&other, &migrated] {
        chain(&store).write_snapshot(snapshot.clone()).await.unwrap();
    }
    assert_eq!(chain(&store).load().await.unwrap(), None);
    let writer = opened(chain(&store), Some(migrated.state.clone())).await;
    assert_eq!(writer.state().streams, migrated.state.streams);
    assert_eq!(chain(&store).load().await.unwrap().as_ref(), Some(writer.state()));
    let counts = async |snapshot: &Snapshot| {
        let listed = chain(&store).snapshots().await.unwrap();
        let listed = listed.iter().find(|listed| listed.nonce == snapshot.nonce).unwrap();
        chain(&store).read_snapshot(listed).await.unwrap()
    };
    assert_eq!((counts(&migrated).await, counts(&other).await), (Some(migrated), None));
}

/// Of two snapshots of one number, both of which count, whatever their nonces.
#[tokio::test]
async fn the_snapshot_of_a_rebuild_is_newer_than_another_one_of_its_number() {
    for seed in 0..8 {
        let (store, states) = built(seed, 20).await;
        let rebuilt = Snapshot::of_new_base(states[19].clone());
        chain(&store).write_snapshot(rebuilt.clone()).await.unwrap();
        snapshot(&store, &states[19]).await;
        assert_eq!(chain(&store).load().await.unwrap().unwrap(), states[19], "no fence names it");
        let writer = opened(chain(&store), Some(rebuilt.state)).await;
        assert_eq!(writer.state().head.number, 21);
        assert_eq!(chain(&store).load().await.unwrap().as_ref(), Some(writer.state()));
    }
}

fn fence() -> Fence {
    Fence {
        wal: Uuid::from_u128(2),
        epoch: 3,
        incarnation: Uuid::new_v4(),
        node: 0,
        written_at_ms: 0,
        term: None,
        next_stream: StreamId(0),
        own: Vec::new(),
        hints: Hints::new(),
    }
}

/// A delta with one change in a list that was recorded with this version.
fn delta(writer: &ChainWriter, recorded: u64, value: Bytes) -> Delta {
    Delta {
        version: writer.state().header.version + 2,
        recorded: vec![Recorded {
            version: recorded,
            changes: vec![ChainChange::PutMeta { key: "a".into(), value }],
        }],
        own: Vec::new(),
        hints: Hints::new(),
        cut: LogOffset(0),
        wal_mark: 0,
        next_stream: StreamId(0),
        is_clean: false,
        written_at_ms: 0,
    }
}

fn until() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

#[tokio::test]
async fn a_large_delta_has_its_body_elsewhere_until_it_is_deleted() {
    let (store, _) = built(9, 1).await;
    let state = chain(&store).load().await.unwrap();
    let mut writer = opened(chain(&store), state).await;
    let mut random = alluvium_device::sim::Random::new(1);
    let words = std::iter::repeat_with(|| random.next_u64().to_le_bytes());
    // Several parts and several pieces.
    let value: Bytes = words.take(20 << 17).flatten().collect::<Vec<_>>().into();
    let recorded = writer.state().header.version + 1;
    writer.freeze(delta(&writer, recorded, value.clone()));
    // The body of an object that a crash has prevented, and that of a later one.
    let left = |number: u64| {
        let nonce = Uuid::new_v4().simple();
        Path::from(format!("catalogs/{STORE}/bodies/{number:016x}-{nonce}"))
    };
    let (left, later) = (left(3), left(4));
    for name in [&left, &later] {
        store.put(name, b"left".to_vec().into()).await.unwrap();
    }
    writer.publish(until()).await.unwrap();
    let snapshot = writer.due_snapshot().expect("what is after the last one is larger");
    let loaded = chain(&store).load().await.unwrap().unwrap();
    assert_eq!((&loaded, &loaded.meta["a"]), (writer.state(), &value));

    let bodies = chain(&store).list(&chain(&store).bodies_prefix()).await.unwrap();
    let mut names = bodies.iter().map(|body| &body.location);
    let body = names.find(|name| ![&left, &later].contains(name)).unwrap();
    let mut clean_up = CleanUp::new(chain(&store));
    assert_eq!(clean_up.run(Duration::from_secs(3600)).await.unwrap(), 0);
    assert_eq!(clean_up.run(Duration::ZERO).await.unwrap(), 1);
    assert!(store.head(&left).await.is_err());
    assert!(store.head(body).await.is_ok() && store.head(&later).await.is_ok());
    let size_bytes = chain(&store).write_snapshot(snapshot).await.unwrap();
    writer.snapshot_written(writer.state().head.number, size_bytes);
    assert_eq!(writer.due_snapshot(), None);
    change(&store, body, |bytes| bytes[1000] ^= 1).await;
    assert_eq!(chain(&store).load().await.unwrap().as_ref(), Some(writer.state()));
    let error = without_snapshots(&store).await.unwrap_err();
    assert!(error.is_loss() && error.to_string().contains("bodies"), "{error}");
    store.delete(body).await.unwrap();
    let error = without_snapshots(&store).await.unwrap_err();
    assert!(error.is_loss() && error.to_string().contains("bodies"), "{error}");
}

#[tokio::test]
async fn a_snapshot_is_due_after_64_objects() {
    let (store, states) = built(9, 10).await;
    let mut writer = opened(chain(&store), states.last().cloned()).await;
    for number in 12..=64 {
        assert_eq!(writer.due_snapshot(), None, "before number {number}");
        let recorded = writer.state().header.version + 1;
        writer.freeze(delta(&writer, recorded, Bytes::new()));
        writer.publish(until()).await.unwrap();
    }
    assert_eq!(writer.due_snapshot().unwrap().state.head.number, 64);
    // Meanwhile there are more objects.
    writer.snapshot_written(60, 1000);
    assert_eq!(writer.due_snapshot(), None);
}

/// The object store that a writer finds, and the result of its delta.
#[tokio::test]
async fn a_writer_knows_its_object_store_by_the_last_object() {
    let (store, states) = built(10, 5).await;
    let mut writer = opened(chain(&store), states.last().cloned()).await;
    let recorded = writer.state().header.version + 1;
    writer.freeze(delta(&writer, recorded, Bytes::new()));
    let is_other = |result: Result<(), PublishError>| match result {
        Err(PublishError::OtherObjectStore { name }) => name.ends_with('6'),
        _ => false,
    };
    let last = store.get(&object(6)).await.unwrap().bytes().await.unwrap();
    // An emptied one, and an old copy in which another server has put its own.
    store.delete(&object(6)).await.unwrap();
    assert!(is_other(writer.publish(until()).await));
    let (others, _) = built(11, 7).await;
    let other = async |number: u64| {
        let bytes = others.get(&object(number)).await.unwrap().bytes().await.unwrap();
        store.put(&object(number), bytes.into()).await.unwrap();
    };
    other(6).await;
    assert!(is_other(writer.publish(until()).await));
    // Another server has the store, and has deleted what this one knows.
    other(7).await;
    for _ in 0..2 {
        let result = writer.publish(until()).await;
        assert!(matches!(result, Err(PublishError::Fenced { number: 7, .. })), "{result:?}");
        store.delete(&object(6)).await.unwrap();
    }
    // The other server is a later version.
    store.put(&object(6), last.into()).await.unwrap();
    change(&store, &object(7), |bytes| {
        bytes[18] |= 8;
        let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes[..12]), &bytes[16..64]);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    })
    .await;
    let result = writer.publish(until()).await;
    assert!(matches!(result, Err(PublishError::Fenced { by: By::Unknown, .. })), "{result:?}");
    store.delete(&object(7)).await.unwrap();
    writer.publish(until()).await.unwrap();
}

#[tokio::test]
async fn an_opening_begins_only_after_the_last_object() {
    let (store, states) = built(12, 9).await;
    // The chain has grown since it was loaded, and then the object store is another one.
    let writer = opened(chain(&store), Some(states[3].clone())).await;
    assert_eq!(writer.state().head.number, 10);
    for at in [0, 1] {
        let empty = Arc::new(InMemory::new());
        let (others, _) = built(13, 9).await;
        let other = [empty, others][at].clone();
        let state = Some(states[8].clone());
        let opening =
            ChainWriter::open(chain(&other), state, until(), |_| Ok::<_, ()>(fence())).await;
        assert!(matches!(opening, Err(FenceError::Object(error)) if error.is_loss()));
        let last = chain(&other).sequence.last(1).await.unwrap();
        assert_eq!(last, [None, Some(9)][at], "nothing was written");
    }
}

/// After a crash the first delta has lists from before the fence.
#[tokio::test]
async fn recorded_lists_may_be_older_than_the_fence() {
    let (store, _) = built(14, 1).await;
    let mut writer = opened(chain(&store), chain(&store).load().await.unwrap()).await;
    let first = writer.state().header.version + 1;
    writer.freeze(delta(&writer, first, Bytes::new()));
    writer.publish(until()).await.unwrap();
    let covers = writer.state().header.covers;
    let mut writer = opened(chain(&store), Some(writer.state().clone())).await;
    assert!(writer.state().header.version > covers + 1);
    assert_eq!(writer.state().header.covers, covers);
    writer.freeze(delta(&writer, covers + 1, Bytes::from_static(b"late")));
    writer.publish(until()).await.unwrap();
    assert_eq!(writer.state().meta["a"], "late");
    assert_eq!(chain(&store).load().await.unwrap().as_ref(), Some(writer.state()));
}

#[tokio::test]
async fn a_fence_states_what_holds_after_it() {
    let (store, states) = built(15, 6).await;
    let state = states.last().unwrap();
    let stream = *state.streams.first_key_value().unwrap().0;
    let end = StreamOffset(1 << 40);
    let (from, to) = (StreamOffset(1 << 30), end);
    let stated = Fence {
        wal: Uuid::from_u128(7),
        term: Some(state.head.term + 3),
        next_stream: StreamId(0),
        own: vec![ChainChange::Gap { stream, offsets: from..to }],
        hints: [(stream, end)].into(),
        ..fence()
    };
    let decide = |_: Option<&ChainState>| Ok::<_, ()>(stated.clone());
    let writer = ChainWriter::open(chain(&store), Some(state.clone()), until(), decide).await;
    let Ok(writer) = writer else { panic!("it opens") };
    let then = writer.state();
    assert_eq!((then.head.term, then.header.wal), (state.head.term + 3, stated.wal));
    assert_eq!((then.header.cut, then.header.wal_mark, then.header.epoch), (LogOffset(0), 0, 0));
    assert_eq!(then.reserved.0, state.reserved.0 + (1 << 20));
    assert_eq!((then.gaps[&(stream, from)], then.hints[&stream]), (end, end));
    let begun = then.incarnations.last().unwrap();
    assert_eq!((begun.after_version, begun.id), (state.header.version, stated.incarnation));
}

/// What is deleted, and what stays.
#[tokio::test]
async fn only_what_is_needless_and_old_is_deleted() {
    let (store, states) = built(16, 60).await;
    let fences: Vec<u64> = states
        .windows(2)
        .filter(|two| two[0].header.opening != two[1].header.opening)
        .map(|two| two[1].head.number)
        .collect();
    let mut clean_up = CleanUp::new(chain(&store));
    assert_eq!(clean_up.run(Duration::ZERO).await.unwrap(), 0, "there is no snapshot");
    for at in [9, 29, 49] {
        snapshot(&store, &states[at]).await;
    }
    // One of the newest two is damaged, so it does not count.
    let damaged = snapshot(&store, &states[54]).await;
    change(&store, &damaged, |bytes| bytes[70] ^= 1).await;
    // One object is damaged.
    change(&store, &object(5), |bytes| bytes[40] ^= 1).await;
    // Names that are not those of objects.
    for name in ["5", "x/0000000000000003", "+3"] {
        let name = format!("catalogs/{STORE}/chain/{name}").into();
        store.put(&name, b"".to_vec().into()).await.unwrap();
    }
    // The newest object decides about the age.
    let newest = store.get(&object(60)).await.unwrap().bytes().await.unwrap();
    store.put(&object(60), newest.into()).await.unwrap();
    assert_eq!(clean_up.run(Duration::from_secs(3600)).await.unwrap(), 0);
    let deleted = clean_up.run(Duration::ZERO).await.unwrap();
    let left = chain(&store).sequence.listed(1).await.unwrap();
    let stays = |number: u64| {
        number >= 30
            || [1, 4, 5].contains(&number)
            || fences.contains(&number)
            || fences.contains(&(number + 1))
    };
    assert_eq!(left, (1..=60).filter(|number| stays(*number)).collect::<Vec<_>>());
    assert_eq!(deleted, 60 - left.len() + 1, "and a snapshot");
    let numbers = chain(&store).snapshots().await.unwrap();
    assert_eq!(numbers.iter().map(|it| it.number).collect::<Vec<_>>(), [55, 50, 30]);
    assert_eq!(clean_up.run(Duration::ZERO).await.unwrap(), 0);
    assert_eq!(chain(&store).load().await.unwrap().as_ref(), states.last());
}

/// An ordinary snapshot may have the number of that of a rebuild, which alone leads to the fence.
#[tokio::test]
async fn the_snapshot_of_a_rebuild_stays_beside_another_one_of_its_number() {
    for nonce in [Uuid::nil(), Uuid::max()] {
        let (store, states) = built(17, 20).await;
        let ordinary = Snapshot { nonce, state: states[19].clone() };
        chain(&store).write_snapshot(ordinary).await.unwrap();
        let rebuilt = Snapshot::of_new_base(states[19].clone());
        chain(&store).write_snapshot(rebuilt.clone()).await.unwrap();
        let mut writer = opened(chain(&store), Some(rebuilt.state)).await;
        let recorded = writer.state().header.version + 1;
        writer.freeze(delta(&writer, recorded, Bytes::new()));
        writer.publish(until()).await.unwrap();
        let newest = snapshot(&store, writer.state()).await;
        CleanUp::new(chain(&store)).run(Duration::ZERO).await.unwrap();
        change(&store, &newest, |bytes| bytes[70] ^= 1).await;
        let loaded = chain(&store).load().await.unwrap();
        assert_eq!(loaded.as_ref(), Some(writer.state()), "nonce {nonce}");
    }
}

#[tokio::test]
async fn a_directory_has_a_chain() {
    let directory = tempfile::tempdir().unwrap();
    let store = crate::objects::local_objects(directory.path()).unwrap();
    let chain = Chain::new(store, STORE, RETRY);
    assert_eq!(chain.load().await.unwrap(), None);
    let writer = opened(chain.clone(), None).await;
    chain.write_snapshot(Snapshot::of(writer.state().clone())).await.unwrap();
    assert_eq!(chain.load().await.unwrap().as_ref(), Some(writer.state()));
    for part in ["chain", "snapshots"] {
        let path = directory.path().join(format!("catalogs/{STORE}/{part}"));
        assert_eq!(std::fs::read_dir(path).unwrap().count(), 1);
    }
}
