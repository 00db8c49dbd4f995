//! Changes of the catalog: they are durable in the log at once, and in the object store later.
//! `docs/format/chain.md`, sections 5, 6 and 8.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use alluvium_device::sim::{Random, SimDisk};
use alluvium_stream::chain::ChainState;
use alluvium_stream::{
    AppendError, Change, ErrorKind, Gap, GapCause, KIND_LOG, KIND_STATE, ObjectError, Options,
    Reason, Store, StoreError, StreamEpoch, StreamId, StreamOffset, StreamRecord, decode_record,
};
use alluvium_wal::Wal;
use bytes::Bytes;
use common::*;
use object_store::ObjectStoreExt;
use object_store::path::Path;

const WAL_BYTES: u64 = 1 << 20;
const DATA_START: u64 = 64 << 10;
const SOON: Duration = Duration::from_millis(1);

/// The ways in which a run may end prematurely.
const ENDS: [fn(Server, &mut World); 2] = [Server::crash, Server::power_cut];

fn world(catalog_interval: Option<Duration>) -> World {
    let mut world = World::new(WAL_BYTES, 1);
    world.options.catalog_interval = catalog_interval.unwrap_or(world.options.catalog_interval);
    world
}

fn put(key: &str, value: u64) -> Change {
    Change::PutMeta { key: key.into(), value: value.to_string().into() }
}

/// Waits until the catalog in the object store is `wanted`.
async fn published(world: &World, wanted: impl Fn(&ChainState) -> bool) -> ChainState {
    let begun = std::time::Instant::now();
    loop {
        let state = world.catalog().await;
        if wanted(&state) {
            return state;
        }
        assert!(begun.elapsed() < HANG, "it is not published: {state:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Creates a stream with a label.
async fn create(server: &Server, kind: u8, label: &'static [u8]) -> StreamId {
    let id = server.store.new_stream_ids(1).await.unwrap()[0];
    let label = Bytes::from_static(label);
    server.store.commit(vec![Change::CreateStream { id, kind, label }]).await.unwrap();
    id
}

/// Appends batches of one offset each up to `end`.
async fn fill(server: &Server, id: StreamId, end: u64) {
    let stream = server.open(id).await;
    for base in stream.next_offset().0..end {
        append(&server.store, &stream, &batch(id, base, 1, 300)).await.await.unwrap();
    }
}

/// The streams with their kinds, epochs, starts and ends, and the metadata.
type Found = (BTreeMap<StreamId, (u64, u64, u64)>, Vec<(String, Vec<u8>)>);

fn found(server: &Server) -> Found {
    let streams = server.store.stream_ids().into_iter().map(|id| {
        let stream = server.store.stream(id).unwrap();
        let (start, end) = (stream.start_offset().0, stream.durable_end().0);
        (id, (stream.newest_epoch().0, start, end))
    });
    (streams.collect(), server.store.meta(""))
}

/// Makes changes of each kind, with those of earlier calls as their subject.
async fn change_everything(server: &Server, round: u64) {
    let store = &server.store;
    let [kept, trimmed, deleted] =
        [create(server, KIND_LOG, b"kept").await, create(server, KIND_LOG, b"trimmed").await, {
            let id = store.new_stream_ids(1).await.unwrap()[0];
            store.commit(vec![creation(id, KIND_STATE), put("with", round)]).await.unwrap();
            id
        }];
    for id in [kept, trimmed, deleted] {
        fill(server, id, 10).await;
    }
    let writer = store.open_stream(kept, StreamEpoch(3 + round)).await.unwrap();
    writer.trim(StreamOffset(2)).await.unwrap();
    server.open(trimmed).await.trim(StreamOffset(10)).await.unwrap();
    store.commit(vec![delete(deleted), put("a", round), put("b", round)]).await.unwrap();
    store.commit(vec![Change::DeleteMeta("b".into()), put("c", round)]).await.unwrap();
    // Streams of earlier rounds.
    for (id, (epoch, start, end)) in found(server).0 {
        if id < kept && start + 2 < end {
            let to = StreamOffset(start + 2);
            let epoch = StreamEpoch(epoch);
            store.commit(vec![Change::TrimStream { id, epoch, to }]).await.unwrap();
            store.open_stream(id, StreamEpoch(epoch.0 + 1)).await.unwrap();
        }
    }
}

async fn assert_readable(server: &Server) {
    for (id, (_, start, end)) in found(server).0 {
        let stream = server.store.stream(id).unwrap();
        let expected: Vec<_> = (start..end).map(|base| batch(id, base, 1, 300)).collect();
        assert_eq!(read_from(&stream, start, 1000).await, expected, "stream {id}");
    }
}

/// In whatever state of the publication the run ends.
#[tokio::test]
async fn changes_survive_a_crash_before_and_after_their_publication() {
    for end in ENDS {
        for interval in [None, Some(SOON)] {
            for uploads in [false, true] {
                let mut world = world(interval);
                for round in 0..4 {
                    let server = world.start().await;
                    assert_readable(&server).await;
                    change_everything(&server, round).await;
                    if uploads {
                        server.store.flush().await.unwrap();
                        // Unpublished ones, after published ones.
                        change_everything(&server, round + 100).await;
                    }
                    let before = found(&server);
                    let live = before.0.len();
                    if interval.is_some() {
                        let last = before.1.iter().find(|(key, _)| key == "c").unwrap();
                        let is_last = |state: &ChainState| {
                            state.meta.get("c").is_some_and(|value| **value == last.1)
                                && state.streams.len() == live
                        };
                        let state = published(&world, is_last).await;
                        let labels = state.streams.values().map(|stream| &stream.label[..]);
                        let labels: BTreeSet<_> = labels.collect();
                        assert_eq!(labels, BTreeSet::from([&b"kept"[..], b"trimmed"]));
                    }
                    end(server, &mut world);
                    let server = world.start().await;
                    assert_eq!(found(&server), before);
                    assert_eq!((server.recovery.lost_lists, &server.recovery.gaps), (0, &vec![]));
                    assert_readable(&server).await;
                    end(server, &mut world);
                }
                // The end of a run publishes everything.
                let server = world.start().await;
                let before = found(&server);
                server.close().await;
                let state = world.catalog().await;
                let starts = |streams: &BTreeMap<StreamId, (u64, u64, u64)>| {
                    let starts = streams.iter().map(|(id, it)| (*id, (it.0, it.1)));
                    starts.collect::<BTreeMap<_, _>>()
                };
                let streams = state.streams.iter();
                let streams = streams.map(|(id, it)| (*id, (it.epoch.0, it.start.0, 0)));
                assert_eq!(starts(&streams.collect()), starts(&before.0));
                let meta = state.meta.into_iter().map(|(key, value)| (key, value.to_vec()));
                assert_eq!(meta.collect::<Vec<_>>(), before.1);
            }
        }
    }
}

#[tokio::test]
async fn changes_go_on_while_the_object_store_is_down() {
    for end in ENDS {
        let mut world = world(Some(SOON));
        let server = world.start().await;
        change_everything(&server, 0).await;
        let published_before = world.catalog_objects().await;
        server.objects.down.store(true, Ordering::SeqCst);
        change_everything(&server, 1).await;
        eventually("it is reported", || server.reports(Reason::CatalogBehind)).await;
        change_everything(&server, 2).await;
        assert!(server.store.failure().is_none());
        let detail = server.store.degraded().into_iter().map(|it| it.detail).next().unwrap();
        assert!(detail.contains("injected 503"), "{detail}");
        let before = found(&server);
        let is_prefix = world.catalog_objects().await.starts_with(&published_before);
        assert!(is_prefix, "nothing has changed there");
        end(server, &mut world);

        let server = world.start().await;
        assert_eq!(found(&server), before);
        assert_readable(&server).await;
        server.objects.down.store(true, Ordering::SeqCst);
        server.store.commit(vec![put("a", 7)]).await.unwrap();
        eventually("it is reported", || server.reports(Reason::CatalogBehind)).await;
        server.objects.down.store(false, Ordering::SeqCst);
        published(&world, |state| state.meta["a"] == "7").await;
        eventually("the report ends", || server.store.degraded().is_empty()).await;
        server.close().await;
    }
}

/// The data directory has nothing that is needed: log and object store are enough.
#[tokio::test]
async fn a_server_is_opened_from_the_log_and_the_object_store() {
    let world = world(None);
    let server = world.start().await;
    change_everything(&server, 0).await;
    server.store.flush().await.unwrap();
    change_everything(&server, 1).await;
    let before = found(&server);
    // A copy while it runs, as another machine would find it after a crash.
    let other = world.copy().await;
    let elsewhere = other.start().await;
    assert_eq!(found(&elsewhere), before);
    assert_readable(&elsewhere).await;
    elsewhere.close().await;
    let prefix = format!("catalogs/{}/chain/", world.header().wal_id);
    let names = other.catalog_objects().await.into_iter().map(|(name, _)| name.to_string());
    // Two fences, each with a delta; an upload, and the end.
    let expected: Vec<_> = (1..=6).map(|number| format!("{prefix}{number:016x}")).collect();
    assert_eq!(names.collect::<Vec<_>>(), expected);
    server.close().await;
}

#[tokio::test]
async fn an_opening_waits_for_the_object_store() {
    let mut world = world(None);
    let server = world.start().await;
    change_everything(&server, 0).await;
    let before = found(&server);
    server.crash(&mut world);
    let controls = parking_lot::Mutex::new(None);
    let down = |objects: &Objects| {
        objects.down.store(true, Ordering::SeqCst);
        *controls.lock() = Some((objects.down.clone(), objects.failed.clone()));
    };
    let mut opening = Box::pin(world.start_with(down));
    let early = tokio::time::timeout(Duration::from_millis(50), &mut opening).await;
    let (down, failed) = controls.lock().clone().unwrap();
    assert!(early.is_err() && failed.load(Ordering::SeqCst) > 3, "it tries again");
    down.store(false, Ordering::SeqCst);
    let server = tokio::time::timeout(HANG, opening).await.expect("it goes on");
    assert_eq!(found(&server), before);
    server.close().await;
}

/// Changes that were recorded in quick succession are in one object.
#[tokio::test]
async fn changes_are_published_together() {
    let world = world(Some(Duration::from_millis(100)));
    let server = world.start().await;
    let first = world.catalog().await.head.number;
    for i in 0..200 {
        server.store.commit(vec![put("a", i)]).await.unwrap();
    }
    let state = published(&world, |state| state.meta.get("a").is_some_and(|it| it == "199")).await;
    assert!(state.head.number - first <= 50, "{}", state.head.number - first);
    // An idle server publishes nothing.
    let before = world.catalog_objects().await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(world.catalog_objects().await == before);
    server.close().await;
}

/// The delta is in the chain, and its server has no answer: what the log has is applied once.
#[tokio::test]
async fn a_crash_after_a_delta_was_created_applies_nothing_twice() {
    for end in ENDS {
        let mut world = world(Some(SOON));
        let server = world.start().await;
        server.objects.set_catalog(CatalogMode::LosesAnswers);
        let [kept, gone] = [create(&server, KIND_LOG, b"a").await, create(&server, 0, b"b").await];
        fill(&server, kept, 5).await;
        server.store.commit(vec![delete(gone), put("a", 1), put("b", 1)]).await.unwrap();
        server.store.commit(vec![put("a", 2), Change::DeleteMeta("b".into())]).await.unwrap();
        server.open(kept).await.trim(StreamOffset(3)).await.unwrap();
        // The first of them are in the frozen delta, perhaps all.
        published(&world, |state| state.streams.contains_key(&kept)).await;
        let other = create(&server, KIND_LOG, b"c").await;
        fill(&server, other, 2).await;
        let before = found(&server);
        end(server, &mut world);
        for _ in 0..2 {
            let server = world.start().await;
            assert_eq!(found(&server), before);
            assert_eq!(server.recovery.lost_lists, 0);
            assert_readable(&server).await;
            end(server, &mut world);
        }
        let server = world.start().await;
        server.store.flush().await.unwrap();
        server.close().await;
        let state = world.catalog().await;
        assert!(state.streams.keys().eq(&[kept, other]) && state.meta["a"] == "2");
        assert_eq!(state.objects.len(), 1);
    }
}

/// Deleted streams, ids of which nothing is left in the log, and ids in a run that was killed.
#[tokio::test]
async fn ids_of_streams_are_never_used_again() {
    let mut random = Random::new(1);
    let mut world = world(None);
    let mut used = BTreeSet::new();
    let mut live: Vec<StreamId> = Vec::new();
    for round in 0..60 {
        world.options.catalog_interval = [SOON, Duration::from_secs(3600)][random.index(2)];
        let server = world.start().await;
        for _ in 0..random.below(5) {
            let many = server.store.new_stream_ids(1 + random.below(3) as u32).await.unwrap();
            for id in many {
                // Some are not used.
                if random.below(3) > 0 {
                    server.store.commit(vec![creation(id, KIND_LOG)]).await.unwrap();
                    assert!(used.insert(id), "round {round}: {id} is used again");
                    live.push(id);
                    if random.below(2) == 0 {
                        fill(&server, id, 2).await;
                    }
                }
            }
            if live.len() > 3 {
                let id = live.swap_remove(random.index(live.len()));
                server.store.commit(vec![delete(id)]).await.unwrap();
            }
        }
        if random.below(4) == 0 {
            server.store.flush().await.unwrap();
        }
        match random.below(3) {
            0 => server.close().await,
            1 => server.crash(&mut world),
            _ => server.power_cut(&mut world),
        }
        let server = world.start().await;
        let ids: BTreeSet<_> = server.store.stream_ids().into_iter().collect();
        assert_eq!(ids, live.iter().copied().collect());
        server.crash(&mut world);
    }
    assert!(used.len() > 60, "{}", used.len());
}

#[tokio::test]
async fn a_list_that_is_longer_than_a_record_is_refused() {
    let mut world = world(None);
    let server = world.start().await;
    let max_bytes = world.wal_options.max_record_bytes as usize;
    let id = server.store.new_stream_ids(1).await.unwrap()[0];
    let list = |value_bytes: usize| {
        let value = vec![7; value_bytes];
        vec![creation(id, KIND_LOG), put("a", 1), Change::PutMeta { key: "large".into(), value }]
    };
    let before = (server.store.stats().wal.appended, found(&server));
    // Two headers; the changes with their tags and lengths.
    let overhead_bytes = 80 + 4 + 5 + 10;
    for value_bytes in [max_bytes - overhead_bytes + 1, max_bytes, 10 * max_bytes] {
        let error = server.store.commit(list(value_bytes)).await.unwrap_err();
        let StoreError::InvalidChange(reason) = error else { panic!("{error}") };
        assert!(reason.contains(&format!("at most {max_bytes}")), "{reason}");
        assert_eq!((server.store.stats().wal.appended, found(&server)), before);
    }
    server.store.commit(list(max_bytes - overhead_bytes)).await.unwrap();
    let before = found(&server);
    server.crash(&mut world);
    let server = world.start().await;
    assert_eq!(found(&server), before);
    server.close().await;
}

/// Fills the log, as far as batches may.
async fn fill_log(server: &Server, id: StreamId) {
    let stream = server.open(id).await;
    for len_bytes in [10_000, 300] {
        loop {
            let next = batch(id, stream.next_offset().0, 1, len_bytes);
            match stream.append(new_batch(&next)) {
                Ok(done) => done.await.unwrap(),
                Err(AppendError::Full) => break,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// While the object store is away: a part of the ring is kept for topics, and trims do not use it.
#[tokio::test]
async fn a_full_log_has_space_for_topics_but_not_for_trims() {
    for end in ENDS {
        let mut world = world(None);
        world.options.cache_bytes = 4 * WAL_BYTES;
        let server = world.start().await;
        let (id, other) = (create(&server, KIND_LOG, b"").await, create(&server, 0, b"").await);
        fill(&server, other, 3).await;
        server.objects.down.store(true, Ordering::SeqCst);
        fill_log(&server, id).await;
        let wal = server.store.stats().wal;
        let kept_bytes = wal.ring_bytes - wal.used_bytes;
        // Up to the page of the last record.
        let expected = wal.ring_bytes / 16 - 4096..wal.ring_bytes / 16 + 4096;
        assert!(expected.contains(&kept_bytes), "{kept_bytes}");

        let before = server.store.stats().wal.appended;
        let trim = |id| Change::TrimStream { id, epoch: StreamEpoch(0), to: StreamOffset(2) };
        let refused = server.store.commit(vec![trim(id), trim(other)]).await;
        assert!(matches!(refused, Err(StoreError::LogFull)), "{refused:?}");
        assert_eq!(server.store.stats().wal.appended, before);
        assert_eq!(server.store.stream(id).unwrap().start_offset(), StreamOffset(0));
        // Topics can be created, changed and deleted.
        server.store.commit(vec![put("a", 1), trim(other)]).await.unwrap();
        let mut created = vec![create(&server, KIND_LOG, b"new").await];
        server.store.commit(vec![delete(created.pop().unwrap())]).await.unwrap();
        server.store.open_stream(id, StreamEpoch(1)).await.unwrap();
        let refused = server.open(id).await.trim(StreamOffset(1)).await;
        assert!(matches!(refused, Err(StoreError::LogFull)), "{refused:?}");
        // Until that part is used, too.
        let refused = loop {
            let id = server.store.new_stream_ids(1).await.unwrap()[0];
            match server.store.commit(vec![creation(id, KIND_LOG)]).await {
                Ok(()) => created.push(id),
                Err(refused) => break refused,
            }
        };
        assert!(matches!(refused, StoreError::LogFull), "{refused}");
        assert!(created.len() >= 10, "{}", created.len());
        assert!(server.store.failure().is_none());
        let before = found(&server);
        assert_eq!(before.0.len(), 2 + created.len(), "a refusal changes nothing");
        end(server, &mut world);

        let server = world.start().await;
        assert_eq!(found(&server), before);
        let writer = server.open(id).await;
        let trimmed = async {
            while let Err(error) = writer.trim(StreamOffset(1)).await {
                assert!(matches!(error, StoreError::LogFull), "{error}");
                server.store.wait_for_space().await;
            }
        };
        tokio::time::timeout(HANG, trimmed).await.expect("an upload frees space");
        create(&server, KIND_LOG, b"").await;
        drop(writer);
        server.close().await;
    }
}

/// Returns the lists of changes in the log: where they are, and their versions.
fn lists(disk: &SimDisk) -> Vec<(Range<u64>, u64)> {
    let mut found = Vec::new();
    let report = Wal::scan(&disk.device(), None, &mut |record| {
        if let StreamRecord::Catalog(list) = decode_record(&record.payload)? {
            found.push((record.offset.0..record.end.0, list.version));
        }
        Ok(())
    });
    report.unwrap();
    found
}

/// Overwrites a record of the log, in its first lap.
fn destroy(disk: &SimDisk, range: &Range<u64>) {
    let zeros = vec![0; usize::try_from(range.end - range.start).unwrap()];
    disk.poke(DATA_START + range.start, &zeros);
}

/// Damages the last byte of a record, so that its headers are left.
fn damage(disk: &SimDisk, range: &Range<u64>) {
    let at = DATA_START + range.end - 1;
    disk.poke(at, &[disk.peek(at, 1)[0] ^ 0x10]);
}

/// The creation of a stream is lost with its metadata, and its batches are kept: in memory, in the
/// log, and in objects.
#[tokio::test]
async fn the_batches_of_a_stream_whose_creation_is_lost_are_kept() {
    for destroy_list in [destroy, damage] {
        for (after, is_published) in [(true, false), (false, false), (true, true)] {
            let mut world = world(None);
            let server = world.start().await;
            let first = create(&server, KIND_LOG, b"first").await;
            let id = server.store.new_stream_ids(1).await.unwrap()[0];
            server.store.commit(vec![creation(id, KIND_LOG), put("topic", 1)]).await.unwrap();
            for id in [first, id] {
                fill(&server, id, 5).await;
            }
            let mut last = id;
            if after {
                last = create(&server, KIND_LOG, b"last").await;
                fill(&server, last, 2).await;
            }
            if is_published {
                let flush = server.fail_an_upload(CatalogMode::Fails).await;
                server.objects.set_catalog(CatalogMode::LosesAnswers);
                published(&world, |state| state.streams.contains_key(&last)).await;
                abandon(flush).await;
            }
            let before = found(&server);
            server.crash(&mut world);
            destroy_list(&world.disk, &lists(&world.disk)[1].0);
            for start in 0..3 {
                let server = world.start().await;
                let lost = u64::from(start == 0 && !is_published);
                assert_eq!(server.recovery.lost_lists, lost);
                assert_eq!(server.store.stats().lost.lists, lost);
                let text = server.recovery.to_string();
                let says = "1 lists of changes of the catalog are LOST";
                assert_eq!(text.contains(says), lost > 0, "{text}");
                let streams: BTreeMap<_, _> =
                    found(&server).0.into_iter().map(|(id, found)| (id, found.2)).collect();
                let expected: BTreeMap<_, _> =
                    before.0.iter().map(|(id, found)| (*id, found.2)).collect();
                assert_eq!(streams, expected, "start {start}");
                let stream = server.store.stream(id).unwrap();
                let batches: Vec<_> = (0..5).map(|base| batch(id, base, 1, 300)).collect();
                assert_eq!(read_from(&stream, 0, 1000).await, batches);
                assert_eq!(server.store.meta_value("topic").is_some(), is_published);
                if start == 1 {
                    server.store.begin_uploads();
                    server.store.flush().await.unwrap();
                    assert!(!world.catalog().await.streams[&id].ranges.is_empty());
                }
                server.crash(&mut world);
            }
            let server = world.start().await;
            assert_eq!(server.recovery.wal.damage, [], "it was trimmed");
            let next = server.store.new_stream_ids(1).await.unwrap()[0];
            assert!(!before.0.contains_key(&next) && next > last);
            server.store.commit(vec![delete(id)]).await.unwrap();
            server.close().await;
        }
    }
}

/// Changes other than creations are lost, too, and are reported.
#[tokio::test]
async fn lost_changes_are_reported() {
    let mut world = world(None);
    let server = world.start().await;
    let id = create(&server, KIND_LOG, b"").await;
    fill(&server, id, 4).await;
    server.store.commit(vec![put("a", 1)]).await.unwrap();
    server.store.commit(vec![put("a", 2), put("b", 2)]).await.unwrap();
    server.open(id).await.trim(StreamOffset(2)).await.unwrap();
    server.store.commit(vec![put("c", 3)]).await.unwrap();
    fill(&server, id, 5).await;
    server.crash(&mut world);
    let lists = lists(&world.disk);
    assert_eq!(lists.len(), 5);
    assert!(lists.windows(2).all(|two| two[0].1 < two[1].1));
    // The list after the first one shows it, and the headers of the second one are left.
    destroy(&world.disk, &lists[2].0);
    damage(&world.disk, &lists[4].0);
    let server = world.start().await;
    assert_eq!(server.recovery.lost_lists, 2);
    assert_eq!(server.store.meta(""), [("a".into(), b"1".to_vec())], "as it was before");
    assert_eq!(found(&server).0[&id], (0, 2, 5));
    let faults = server.store.degraded();
    let fault = faults.iter().find(|fault| fault.reason == Reason::LogDamaged).unwrap();
    assert!(fault.detail.contains("2 lists of changes of topics"), "{}", fault.detail);
    assert_eq!(server.store.term(), 1, "what is lost may include epochs");
    server.close().await;
}

/// The chain shows how far streams were durable, so the end of a damaged log is known exactly.
#[tokio::test]
async fn the_chain_shows_the_ends_of_streams() {
    let mut world = world(Some(SOON));
    let server = world.start().await;
    let id = create(&server, KIND_LOG, b"").await;
    fill(&server, id, 6).await;
    server.store.commit(vec![put("a", 1)]).await.unwrap();
    published(&world, |state| state.hints.get(&id) == Some(&StreamOffset(6))).await;
    server.crash(&mut world);
    let mut records = Vec::new();
    Wal::scan(&world.disk.device(), None, &mut |record| {
        records.push(record.offset.0..record.end.0);
        Ok(())
    })
    .unwrap();
    // The last two batches, before the last list.
    for range in &records[records.len() - 3..records.len() - 1] {
        destroy(&world.disk, range);
    }
    let server = world.try_start(Arc::new(())).await.unwrap();
    let offsets = StreamOffset(4)..StreamOffset(6);
    let lost = Gap { stream: id, offsets, cause: GapCause::Lost };
    assert_eq!(server.recovery.gaps.first(), Some(&lost));
    assert!(server.store.stream(id).unwrap().next_offset() >= StreamOffset(6));
    server.crash(&mut world);
}

/// Snapshots are written now and then, and an opening reads the newest one. One that is damaged, or
/// cannot be written, changes nothing.
#[tokio::test]
async fn snapshots_are_written_and_loaded() {
    let mut world = world(Some(SOON));
    let server = world.start().await;
    change_everything(&server, 0).await;
    let names = async |world: &World| {
        let all = world.catalog_objects().await;
        let names = all.into_iter().map(|(name, _)| name);
        names.filter(|name| name.as_ref().contains("/snapshots/")).collect::<Vec<_>>()
    };
    let failed = Arc::new(std::sync::atomic::AtomicU64::new(0));
    server.objects.decide_catalog({
        let failed = failed.clone();
        move |name| {
            let is_snapshot = name.as_ref().contains("/snapshots/");
            match is_snapshot && failed.fetch_add(1, Ordering::SeqCst) < 3 {
                true => CatalogMode::Fails,
                false => CatalogMode::Works,
            }
        }
    });
    let begun = std::time::Instant::now();
    for i in 0.. {
        assert!(begun.elapsed() < HANG, "no snapshot");
        server.store.commit(vec![put("counter", i)]).await.unwrap();
        if !names(&world).await.is_empty() {
            break;
        }
        tokio::time::sleep(SOON).await;
    }
    assert!(failed.load(Ordering::SeqCst) >= 4, "it was written again");
    assert!(world.catalog().await.head.number > 64);
    change_everything(&server, 1).await;
    let before = found(&server);
    server.crash(&mut world);
    let snapshot = names(&world).await.remove(0);
    for is_damaged in [false, true] {
        if is_damaged {
            let found = world.objects.get(&snapshot).await.unwrap();
            let mut bytes = found.bytes().await.unwrap().to_vec();
            *bytes.last_mut().unwrap() ^= 1;
            world.objects.put(&snapshot, bytes.into()).await.unwrap();
        } else {
            // What lies below it is not read.
            let first = Path::from(format!("catalogs/{}/chain/{:016x}", world.header().wal_id, 9));
            let whole = world.objects.get(&first).await.unwrap().bytes().await.unwrap();
            world.objects.put(&first, "damaged".into()).await.unwrap();
            let server = world.start().await;
            assert_eq!(found(&server), before);
            server.crash(&mut world);
            world.objects.put(&first, whole.into()).await.unwrap();
        }
        let server = world.start().await;
        assert_eq!(found(&server), before);
        assert_readable(&server).await;
        server.crash(&mut world);
    }
}

/// A delta with a large body, which is an object of its own.
#[tokio::test]
async fn large_deltas_are_published() {
    for mode in [CatalogMode::Works, CatalogMode::Fails, CatalogMode::LosesAnswers] {
        let mut world = World::new(64 << 20, 1);
        let server = world.start().await;
        let id = create(&server, KIND_LOG, b"").await;
        fill(&server, id, 3).await;
        let value = |i: u64| payload(StreamId(99), i, 1 << 20).to_vec();
        for i in 0..6 {
            let list = vec![Change::PutMeta { key: i.to_string(), value: value(i) }];
            server.store.commit(list).await.unwrap();
        }
        let flush = server.fail_an_upload(mode).await;
        if mode == CatalogMode::Works {
            flush.await.unwrap().unwrap();
        } else {
            abandon(flush).await;
        }
        server.crash(&mut world);
        let bodies = async |world: &World| {
            let all = world.catalog_objects().await;
            all.iter().filter(|(name, _)| name.as_ref().contains("/bodies/")).count()
        };
        assert_eq!(bodies(&world).await, usize::from(mode != CatalogMode::Fails), "{mode:?}");
        let server = world.start().await;
        for i in 0..6 {
            assert!(server.store.meta_value(&i.to_string()) == Some(value(i)), "{mode:?}: {i}");
        }
        assert_readable(&server).await;
        server.store.flush().await.unwrap();
        server.close().await;
        let state = world.catalog().await;
        assert_eq!(state.meta.len(), 6);
        assert_eq!(state.streams[&id].uploaded_end, StreamOffset(3));
    }
}

/// A chain with a damaged, a missing or an unknown object is refused with its name, and nothing is
/// written.
#[tokio::test]
async fn a_damaged_chain_is_refused_with_the_name_of_the_object() {
    let mut world = world(None);
    let server = world.start().await;
    for round in 0..3 {
        change_everything(&server, round).await;
        server.store.flush().await.unwrap();
    }
    let before = found(&server);
    server.crash(&mut world);
    let last = world.catalog().await.head.number;
    let name =
        |number: u64| Path::from(format!("catalogs/{}/chain/{number:016x}", world.header().wal_id));
    for (number, at, what) in [
        (1, Some(300), "checksum"),
        (2, Some(0), "no object of a sequence"),
        (3, Some(30), "checksum"),
        (3, None, "missing"),
        (last, Some(200), "checksum"),
    ] {
        let whole = world.objects.get(&name(number)).await.unwrap().bytes().await.unwrap();
        match at {
            Some(at) => {
                let mut bytes = whole.to_vec();
                bytes[at.min(whole.len() - 1)] ^= 1;
                world.objects.put(&name(number), bytes.into()).await.unwrap();
            }
            None => world.objects.delete(&name(number)).await.unwrap(),
        }
        let state = (contents(&world.objects).await, world.disk.image());
        let refused = world.try_start(Arc::new(Hash)).await.err().expect("it is damaged");
        let StoreError::Object(error @ ObjectError::Damaged { .. }) = &refused else {
            panic!("{refused}");
        };
        let text = error.to_string();
        assert!(text.contains(name(number).as_ref()) && text.contains(what), "{text}");
        assert!((contents(&world.objects).await, world.disk.image()) == state);
        world.objects.put(&name(number), whole.into()).await.unwrap();
    }
    let server = world.start().await;
    assert_eq!(found(&server), before);
    server.close().await;
}

/// The last object is gone, as in an older copy of the object store: nothing is put after it until
/// it is back.
#[tokio::test]
async fn nothing_is_published_after_a_missing_object() {
    let world = world(Some(SOON));
    let server = world.start().await;
    server.store.commit(vec![put("a", 1)]).await.unwrap();
    let state = published(&world, |state| state.meta.contains_key("a")).await;
    let last = format!("catalogs/{}/chain/{:016x}", state.header.store, state.head.number);
    let last = Path::from(last);
    let whole = world.objects.get(&last).await.unwrap().bytes().await.unwrap();
    world.objects.delete(&last).await.unwrap();
    let before = world.catalog_objects().await;
    server.store.commit(vec![put("a", 2)]).await.unwrap();
    eventually("it is noticed", || server.reports(Reason::CatalogBehind)).await;
    let detail = server.store.degraded().remove(0).detail;
    assert!(detail.contains(last.as_ref()) && detail.contains("not mounted"), "{detail}");
    server.store.commit(vec![put("b", 2)]).await.unwrap();
    assert!(world.catalog_objects().await == before);
    world.objects.put(&last, whole.into()).await.unwrap();
    published(&world, |state| state.meta["a"] == "2" && state.meta.contains_key("b")).await;
    eventually("the report ends", || server.store.degraded().is_empty()).await;
    server.close().await;
}

/// A request that the object store refuses for good: the opening fails, rather than wait.
#[tokio::test]
async fn an_opening_that_the_object_store_refuses_fails() {
    let world = world(None);
    world.start().await.close().await;
    let refuse = |objects: &Objects| {
        objects.refuses.store(true, Ordering::SeqCst);
        objects.down.store(true, Ordering::SeqCst);
    };
    let refused = world.start_with_fold(Arc::new(Hash), refuse).await.err().expect("it fails");
    let StoreError::Object(ObjectError::Store { kind, .. }) = &refused else { panic!("{refused}") };
    assert!(*kind != ErrorKind::NotFound && refused.to_string().contains("injected 403"));
    world.start().await.close().await;
}

/// The catalog can be followed while the server runs.
#[tokio::test]
async fn a_reader_follows_the_chain() {
    let world = world(Some(SOON));
    let server = world.start().await;
    let options = Options { poll_interval: 10 * SOON, ..world.options.clone() };
    let reader =
        Store::follow(world.objects.clone(), world.header().wal_id, options).await.unwrap();
    for round in 0..5 {
        change_everything(&server, round).await;
        let wanted = server.store.meta_value("c");
        eventually("it is published", || reader.meta_value("c") == wanted).await;
    }
    server.close().await;
    reader.catch_up().await.unwrap();
    let state = world.catalog().await;
    assert_eq!(reader.catalog_version(), state.header.version);
    let meta = state.meta.into_iter().map(|(key, value)| (key, value.to_vec()));
    assert_eq!(reader.meta(""), meta.collect::<Vec<_>>());
}
