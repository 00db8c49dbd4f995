//! Restarts at every stage, and a model: each stream is the list of what was appended to it.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use alluvium_device::sim::{Random, SimDisk, SimOptions};
use alluvium_stream::{
    AppendError, Batch, Change, Gap, GapCause, KIND_LOG, KIND_STATE, Lost, StoreError, StreamEpoch,
    StreamId, StreamOffset,
};
use common::*;
use futures::FutureExt;

const WAL_BYTES: u64 = 1 << 20;

/// Appends ten batches to each of three streams, one of them a state stream.
async fn fill(server: &Server) -> Vec<(StreamId, Vec<Batch>)> {
    let mut all = Vec::new();
    for kind in [KIND_LOG, KIND_LOG, KIND_STATE] {
        let stream = server.create(kind).await;
        let batches: Vec<Batch> = (0..10).map(|i| batch(stream.id(), i, 1, 1000)).collect();
        for batch in &batches {
            append(&server.store, &stream, batch).await.await.unwrap();
        }
        all.push((stream.id(), batches));
    }
    all
}

async fn check(server: &Server, all: &[(StreamId, Vec<Batch>)]) {
    for (id, batches) in all {
        let stream = server.open(*id).await;
        assert_eq!(stream.next_offset(), batches.last().unwrap().end());
        let start = stream.start_offset().0;
        assert_eq!(
            read_from(&stream, start, 3500).await,
            batches[usize::try_from(start).unwrap()..]
        );
        assert_eq!(state_of(&stream), expected_state(*id, batches));
    }
}

/// Restarts and checks that everything is there once; then uploads everything and restarts again.
async fn check_after_restarts(world: &mut World, all: &[(StreamId, Vec<Batch>)], skipped: u64) {
    let server = world.start().await;
    assert_eq!(server.recovery.skipped_uploaded, skipped);
    assert_eq!((&server.recovery.gaps, &server.recovery.missing_end), (&vec![], &None));
    check(&server, all).await;
    server.store.flush().await.unwrap();
    check(&server, all).await;
    server.crash(world);

    let server = world.start().await;
    assert_eq!(
        (server.recovery.batches, server.recovery.skipped_uploaded),
        (0, 0),
        "the WAL was trimmed"
    );
    check(&server, all).await;
    let stats = server.store.stats();
    assert_eq!(stats.objects, 1);
    server.close().await;
}

/// The ways in which a run may end prematurely.
const ENDS: [fn(Server, &mut World); 2] = [Server::crash, Server::power_cut];

#[tokio::test]
async fn a_crash_before_the_cut_loses_nothing() {
    for end in ENDS {
        let mut world = World::new(WAL_BYTES, 1);
        let server = world.start().await;
        let all = fill(&server).await;
        end(server, &mut world);
        check_after_restarts(&mut world, &all, 0).await;
    }
}

/// An object store that is down affects neither appends nor reads of what is cached.
#[tokio::test]
async fn a_crash_while_the_object_cannot_be_written_loses_nothing() {
    for end in ENDS {
        let mut world = World::new(WAL_BYTES, 1);
        let server = world.start().await;
        let all = fill(&server).await;
        server.objects.down.store(true, Ordering::SeqCst);
        let flush = server.begin_flush();
        let failures = || server.store.stats().upload_failing.map_or(0, |failing| failing.failures);
        eventually("three attempts", || failures() >= 3).await;
        let failing = server.store.stats().upload_failing.expect("it keeps failing");
        assert!(failing.error.contains("injected 503"), "{failing:?}");
        check(&server, &all).await;
        assert_eq!(server.objects.reads.load(Ordering::SeqCst), 0);
        abandon(flush).await;
        end(server, &mut world);
        check_after_restarts(&mut world, &all, 0).await;
    }
}

#[tokio::test]
async fn the_age_of_the_log_counts_from_the_cut_that_it_is_trimmed_to() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let age = || server.store.stats().log_age;
    assert_eq!(age(), Duration::ZERO, "there is nothing in it");
    fill(&server).await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(10_000)).await;
    assert!(age() >= Duration::from_secs(10_000));
    tokio::time::resume();
    server.store.flush().await.unwrap();
    assert_eq!(age(), Duration::ZERO);
    fill(&server).await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(1000)).await;
    assert!((1000..10_000).contains(&age().as_secs()), "{:?}", age());
    tokio::time::resume();
    server.crash(&mut world);
    let server = world.start().await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(10)).await;
    assert!((10..1000).contains(&server.store.stats().log_age.as_secs()), "since the start");
    tokio::time::resume();
    server.close().await;
}

#[tokio::test]
async fn a_crash_between_the_object_and_the_delta_loses_nothing() {
    for end in ENDS {
        let mut world = World::new(WAL_BYTES, 1);
        let server = world.start().await;
        let all = fill(&server).await;
        let flush = server.fail_an_upload(CatalogMode::Fails).await;
        assert_eq!(count_objects(&world).await, 1, "written, not published");
        check(&server, &all).await;
        abandon(flush).await;
        end(server, &mut world);
        check_after_restarts(&mut world, &all, 0).await;
        assert_eq!(count_objects(&world).await, 2, "the orphan is too new to be deleted");
    }
}

#[tokio::test]
async fn a_crash_between_the_delta_and_the_trim_loses_nothing() {
    for end in ENDS {
        let mut world = World::new(WAL_BYTES, 1);
        let server = world.start().await;
        let all = fill(&server).await;
        let flush = server.fail_an_upload(CatalogMode::LosesAnswers).await;
        check(&server, &all).await;
        abandon(flush).await;
        end(server, &mut world);
        check_after_restarts(&mut world, &all, 30).await;
        assert_eq!(count_objects(&world).await, 1);
    }
}

/// The process dies at each PUT of the catalog, before or after its effect: those of uploads, and
/// of a deletion.
#[tokio::test]
async fn a_crash_at_any_publication_loses_nothing() {
    let mut deaths = 0;
    for dies in [CatalogMode::Dies, CatalogMode::DiesAfter] {
        for at in 0..4 {
            let mut world = World::new(WAL_BYTES, 1);
            let server = world.start().await;
            let all = fill(&server).await;
            server.crash(&mut world);

            let server = world.start().await;
            let mut left = at;
            server.objects.decide_catalog(move |_| {
                left -= 1;
                if left < 0 { dies } else { CatalogMode::Works }
            });
            let is_dead = || server.objects.catalog_failed.load(Ordering::SeqCst) > 0;
            let deleted = server.create_log().await;
            let id = deleted.id();
            append(&server.store, &deleted, &batch(id, 0, 1, 1000)).await.await.unwrap();
            for step in 0..3 {
                let work = tokio::spawn({
                    let store = server.store.clone();
                    async move {
                        if step == 1 {
                            store.commit(vec![delete(id)]).await.unwrap();
                        }
                        store.flush().await
                    }
                });
                eventually("it ends", || work.is_finished() || is_dead()).await;
                abandon(work).await;
                if is_dead() {
                    break;
                }
                if step == 1 {
                    let left = || server.store.stats().retired_objects;
                    eventually("it is forgotten", || left() == 0 || is_dead()).await;
                }
            }
            deaths += u32::from(is_dead());
            let is_deleted = server.store.stream(id).is_none();
            drop(deleted);
            server.crash(&mut world);
            let server = world.start().await;
            assert_eq!((&server.recovery.gaps, server.recovery.lost_lists), (&vec![], 0));
            assert_eq!(server.store.stream(id).is_none(), is_deleted, "{dies:?} at {at}");
            check(&server, &all).await;
            server.store.flush().await.unwrap();
            check(&server, &all).await;
            server.close().await;
            let server = world.start().await;
            check(&server, &all).await;
            let state = world.catalog().await;
            for (id, batches) in &all[..2] {
                // Each offset is in one range.
                let ranges = &state.streams[id].ranges;
                assert!(ranges.windows(2).all(|two| two[0].end == two[1].start));
                let end = batches.last().unwrap().end();
                assert_eq!((ranges[0].start.0, ranges.last().unwrap().end), (0, end));
            }
            server.close().await;
        }
    }
    assert!(deaths >= 4, "{deaths}");
}

#[tokio::test]
async fn failed_writes_are_retried_under_new_names() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let all = fill(&server).await;
    server.objects.fail_writes.store(5, Ordering::SeqCst);
    server.store.flush().await.unwrap();
    assert_eq!(server.store.stats().upload_failures, 5);
    assert_eq!(server.store.stats().upload_failing, None);
    check(&server, &all).await;
    assert_eq!(count_objects(&world).await, 1, "what failed attempts left behind was removed");
    server.crash(&mut world);
    check_after_restarts(&mut world, &all, 0).await;
}

async fn count_objects(world: &World) -> usize {
    names(world).await.len()
}

#[tokio::test]
async fn damage_in_the_wal_is_a_gap_that_is_reported_and_skipped() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let stream = server.create_log().await;
    let id = stream.id();
    let batches: Vec<Batch> = (0..5).map(|i| batch(id, i * 10, 10, 10_000)).collect();
    for batch in &batches {
        append(&server.store, &stream, batch).await.await.unwrap();
    }
    drop(stream);
    server.crash(&mut world);
    let image = world.disk.image();
    let middle = &batches[2].payload[5000..5016];
    let at = image
        .windows(16)
        .position(|window| window == middle)
        .expect("the third batch is on the disk");
    world.disk.poke(at as u64, &[image[at] ^ 1]);

    let server = world.start().await;
    assert_eq!(server.recovery.wal.damage.len(), 1);
    assert_eq!(server.recovery.gaps.len(), 1);
    assert_eq!(
        (server.recovery.gaps[0].stream, server.recovery.gaps[0].offsets.clone()),
        (id, StreamOffset(20)..StreamOffset(30))
    );
    let lost = server.store.stats().lost;
    assert_eq!((lost.damaged_ranges, lost.gaps, lost.offsets), (1, 1, 10));
    assert!(lost.damaged_bytes > 10_000, "{lost:?}");
    let stream = server.open(id).await;
    let rest = [&batches[..2], &batches[3..]].concat();
    assert_eq!(read_from(&stream, 0, 15_000).await, rest);
    assert_eq!(read_from(&stream, 25, 15_000).await, rest[2..], "from inside the gap");
    assert_eq!((stream.next_offset(), stream.durable_end()), (StreamOffset(50), StreamOffset(50)));
    drop(stream);
    server.close().await;

    // The same data from objects; a fold that requires contiguity cannot be used for this.
    let server = world.try_start(Arc::new(())).await.unwrap();
    server.store.flush().await.unwrap();
    drop(server.store);
    drop(server.stepper);
    let server = world.try_start(Arc::new(())).await.unwrap();
    let stream = server.open(id).await;
    assert_eq!(server.recovery.batches, 0);
    assert_eq!(read_from(&stream, 0, 15_000).await, rest);
    assert_eq!(read_from(&stream, 25, 15_000).await, rest[2..]);
}

#[tokio::test]
async fn an_old_catalog_is_refused_once_the_log_was_trimmed_past_it() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let all = fill(&server).await;
    let before_upload = world.catalog_objects().await;
    server.store.flush().await.unwrap();
    let after_upload = world.catalog_objects().await;
    let stream = server.open(all[0].0).await;
    append(&server.store, &stream, &batch(all[0].0, 10, 1, 1000)).await.await.unwrap();
    drop(stream);
    server.crash(&mut world);

    for (copy, is_old) in [(before_upload, true), (after_upload, false)] {
        let newest = world.replace_catalog(&copy).await;
        let image = world.disk.image();
        match world.try_start(Arc::new(Hash)).await {
            Ok(server) => {
                assert!(!is_old);
                check(&server, &all[1..]).await;
                server.crash(&mut world);
            }
            Err(StoreError::OldCatalog { version, mark, uploaded, trimmed }) => {
                assert!(is_old && version < mark && uploaded < trimmed, "{version} {mark}");
                assert!(world.disk.image() == image, "a refusal changes nothing");
                assert_eq!(world.catalog_objects().await, copy);
            }
            Err(other) => panic!("{other}"),
        }
        world.objects = newest;
    }
    world.replace_catalog(&Vec::new()).await;
    let refused = world.try_start(Arc::new(Hash)).await.err();
    assert!(matches!(refused, Some(StoreError::NoCatalog { .. })), "{refused:?}");
    assert_eq!(world.catalog_objects().await, []);
}

#[tokio::test]
async fn an_empty_upload_does_not_make_the_catalog_old() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let all = fill(&server).await;
    server.store.flush().await.unwrap();
    let stream = server.open(all[0].0).await;
    append(&server.store, &stream, &batch(all[0].0, 10, 1, 1000)).await.await.unwrap();
    drop(stream);
    server.store.commit(vec![delete(all[0].0)]).await.unwrap();
    server.store.flush().await.unwrap();
    server.crash(&mut world);
    let server = world.start().await;
    assert_eq!((server.recovery.wal.records, server.recovery.skipped_deleted), (0, 0), "trimmed");
    check(&server, &all[1..]).await;
    server.close().await;
}

/// The log's end is damaged, or the device holds a copy that has the last mark that the catalog
/// knows. Streams skip offsets for this only once.
#[tokio::test]
async fn a_log_that_ends_too_early_is_reported() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let all = fill(&server).await;
    let old = world.disk.image();
    let stream = server.open(all[0].0).await;
    append(&server.store, &stream, &batch(all[0].0, 10, 1, 1000)).await.await.unwrap();
    drop(stream);
    abandon(server.fail_an_upload(CatalogMode::LosesAnswers).await).await;
    let uploaded = world.catalog().await.header.cut;
    server.crash(&mut world);
    world.disk = SimDisk::from_image(&old, SimOptions::default());
    let mut first: Option<(Vec<Gap>, Vec<StreamOffset>)> = None;
    for start in 0..3_u32 {
        let server = world.start().await;
        if start == 0 {
            let missing = server.recovery.missing_end.clone().expect("the end is missing");
            assert_eq!(missing, server.recovery.wal.end..uploaded);
            assert!(missing.start < missing.end && server.recovery.to_string().contains("LOST"));
            let lost = server.store.stats().lost;
            let bytes = missing.end.0 - missing.start.0;
            assert_eq!((lost.damaged_ranges, lost.damaged_bytes), (1, bytes));
        } else {
            assert_eq!(server.recovery.missing_end, None, "start {start}");
        }
        // The skipped offsets are found again at each start.
        assert_eq!(server.store.term(), start + 1);
        let next = all.iter().map(|(id, _)| server.store.stream(*id).unwrap().next_offset());
        let found = (server.recovery.gaps.clone(), next.collect());
        assert!(found.0.iter().all(|gap| gap.cause == GapCause::Skipped), "{found:?}");
        assert_eq!(*first.get_or_insert(found.clone()), found, "start {start}");
        // It is unknown what is missing, so each stream skips more than the ring can hold.
        for (id, batches) in &all {
            let stream = server.store.stream(*id).unwrap();
            assert!(stream.next_offset() > StreamOffset(11), "stream {id}");
            assert_eq!(stream.next_offset(), stream.durable_end(), "stream {id}");
            if *id == all[1].0 {
                let fetched = stream.fetch(StreamOffset(0), 100_000).await.unwrap();
                assert_eq!(fetched.batches, *batches, "stream {id}");
            }
        }
        server.crash(&mut world);
    }
    // When the log is trimmed, the catalog from before the upload is an old one.
    let before = world.catalog_objects().await;
    let server = world.try_start(Arc::new(())).await.unwrap();
    let stream = server.open(all[0].0).await;
    let next = stream.next_offset().0;
    append(&server.store, &stream, &batch(all[0].0, next, 1, 10)).await.await.unwrap();
    drop(stream);
    server.store.flush().await.unwrap();
    let appended = server.store.stats().wal.appended;
    assert!(appended < uploaded);
    assert_eq!(world.catalog().await.header.cut, appended);
    server.crash(&mut world);
    let newest = world.replace_catalog(&before).await;
    let refused = world.try_start(Arc::new(Hash)).await.err();
    assert!(matches!(refused, Some(StoreError::OldCatalog { .. })), "{refused:?}");
    world.objects = newest;
    let recovery = world.start().await.recovery;
    assert_eq!((recovery.wal.start, recovery.missing_end), (appended, None));
}

#[tokio::test]
async fn recovered_batches_may_exceed_the_bound_of_the_cache() {
    let mut world = World::new(WAL_BYTES, 1);
    world.options.upload_bytes = WAL_BYTES / 4;
    let server = world.start().await;
    let stream = server.create_log().await;
    let id = stream.id();
    let batches: Vec<Batch> = (0..200).map(|i| batch(id, i, 1, 1000)).collect();
    for batch in &batches {
        append(&server.store, &stream, batch).await.await.unwrap();
    }
    drop(stream);
    server.crash(&mut world);

    world.options.cache_bytes = 64 << 10;
    world.options.upload_bytes = 32 << 10;
    let server = world.start().await;
    let stream = server.open(id).await;
    assert_eq!(server.recovery.batches, 200);
    let more = batch(id, 200, 1, 1000);
    append(&server.store, &stream, &more).await.await.unwrap();
    assert!(server.store.stats().cache_used_bytes <= 64 << 10, "back within the bound");
    assert_eq!(read_from(&stream, 0, 50_000).await, [batches, vec![more]].concat());
    server.close().await;
}

/// The model of a stream.
struct Model {
    id: StreamId,
    kind: u8,
    start: u64,
    epoch: u64,
    acknowledged: Vec<Batch>,
}

/// The owner's metadata, and a change of it whose outcome is unknown.
#[derive(Default)]
struct Meta {
    values: BTreeMap<String, Vec<u8>>,
    unknown: Option<u8>,
}

const UNKNOWN: &str = "unknown";

impl Meta {
    /// Sets a value, and waits until that is durable.
    async fn change(&mut self, server: &Server, value: u8) {
        let (key, value) = ("changed".to_owned(), vec![value]);
        self.values.insert(key.clone(), value.clone());
        server.store.commit(vec![Change::PutMeta { key, value }]).await.unwrap();
    }

    /// Begins to set a value; the run may end at any moment of that.
    async fn begin_to_change(&mut self, server: &Server, value: u8, yields: u64) {
        self.unknown = Some(value);
        let (key, value, store) = (UNKNOWN.into(), vec![value], server.store.clone());
        let commit = async move { store.commit(vec![Change::PutMeta { key, value }]).await };
        let commit = tokio::spawn(commit);
        for _ in 0..yields {
            tokio::task::yield_now().await;
        }
        abandon(commit).await;
    }

    fn check(&mut self, server: &Server) {
        let found: BTreeMap<_, _> = server.store.meta("").into_iter().collect();
        if let Some(value) = self.unknown.take() {
            match found.get(UNKNOWN) {
                Some(found) if *found == [value] => {
                    self.values.insert(UNKNOWN.into(), vec![value]);
                }
                _ => {}
            }
        }
        assert_eq!(found, self.values);
    }
}

/// Random appends, fetches, trims, uploads, changes of the catalog, failures, deletions, crashes
/// and power cuts, compared with lists in memory.
async fn run_model(seed: u64) {
    let mut random = Random::new(seed);
    let mut world = World::new(512 << 10, seed);
    world.options.cache_bytes = 128 << 10;
    world.options.upload_bytes = 16 << 10;
    if random.chance(0.5) {
        world.options.upload_interval = Duration::from_millis(3);
    }
    if random.chance(0.5) {
        world.options.catalog_interval = Duration::from_millis(2);
    }
    let mut models: Vec<Model> = Vec::new();
    let mut meta = Meta::default();
    let mut server = world.start().await;
    for round in 0..30 {
        match random.below(20) {
            0 if models.len() < 5 => {
                let kind = u8::from(random.chance(0.3));
                // With the change of metadata that a topic has.
                let id = server.store.new_stream_ids(1).await.unwrap()[0];
                let (key, value) = (id.to_string(), vec![round]);
                meta.values.insert(key.clone(), value.clone());
                let put = Change::PutMeta { key, value };
                let is_down = random.chance(0.3);
                server.objects.down.store(is_down, Ordering::SeqCst);
                server.store.commit(vec![creation(id, kind), put]).await.unwrap();
                server.objects.down.store(false, Ordering::SeqCst);
                models.push(Model { id, kind, start: 0, epoch: 0, acknowledged: Vec::new() });
            }
            1 if models.len() > 3 => {
                let model = models.swap_remove(random.index(models.len()));
                let forget = Change::DeleteMeta(model.id.to_string());
                meta.values.remove(&model.id.to_string());
                let (id, epoch) = (model.id, StreamEpoch(model.epoch));
                let delete = Change::DeleteStream { id, epoch };
                server.store.commit(vec![forget, delete]).await.unwrap();
            }
            2 => server.store.flush().await.unwrap(),
            3 => server.objects.fail_writes.store(random.below(4), Ordering::SeqCst),
            4 => {
                let modes = [CatalogMode::Fails, CatalogMode::LosesAnswers];
                let flush = server.fail_an_upload(modes[random.index(2)]).await;
                // Changes go on meanwhile.
                meta.change(&server, round).await;
                if random.chance(0.3) {
                    server.objects.set_catalog(CatalogMode::Works);
                    let done = tokio::time::timeout(HANG, flush).await.expect("it hangs");
                    done.unwrap().unwrap();
                } else {
                    abandon(flush).await;
                    ENDS[random.index(2)](server, &mut world);
                    server = go_on(&world, &mut models, &mut meta, &mut random).await;
                }
            }
            5 | 6 => {
                if random.chance(0.5) {
                    meta.begin_to_change(&server, round, random.below(4)).await;
                }
                match random.below(3) {
                    0 => server.crash(&mut world),
                    1 => server.power_cut(&mut world),
                    _ => server.close().await,
                }
                server = go_on(&world, &mut models, &mut meta, &mut random).await;
            }
            12 => meta.change(&server, round).await,
            7 | 8 if !models.is_empty() => {
                let at = random.index(models.len());
                let model = &mut models[at];
                let stream = server.open(model.id).await;
                let (start, end) = (stream.start_offset().0, stream.durable_end().0);
                let to = start + random.below(end - start + 1);
                stream.trim(StreamOffset(to)).await.unwrap();
                model.start = model.start.max(to);
            }
            9 | 10 if !models.is_empty() => {
                let at = random.index(models.len());
                models[at].check(&server, &mut random).await;
            }
            11 if !models.is_empty() => {
                let at = random.index(models.len());
                models[at].take_over(&server).await;
            }
            _ if !models.is_empty() => {
                // A burst, spread over the streams; acknowledged together.
                let mut writers = Vec::new();
                for model in &models {
                    writers.push(server.open(model.id).await);
                }
                let mut pending = Vec::new();
                for _ in 0..1 + random.below(40) {
                    let at = random.index(models.len());
                    let (model, stream) = (&mut models[at], &writers[at]);
                    let count = 1 + u32::try_from(random.below(4)).unwrap();
                    let longest = if random.chance(0.1) { 12_000 } else { 300 };
                    let len = usize::try_from(random.below(longest)).unwrap();
                    let batch = batch(model.id, stream.next_offset().0, count, len);
                    pending.push(append(&server.store, stream, &batch).await);
                    model.acknowledged.push(batch);
                }
                for done in pending {
                    done.await.unwrap();
                }
            }
            _ => {}
        }
    }
    for model in &mut models {
        model.check(&server, &mut random).await;
    }
    server.store.flush().await.unwrap();
    server.power_cut(&mut world);
    let server = go_on(&world, &mut models, &mut meta, &mut random).await;
    server.close().await;
    // Everything is in the object store, too.
    let state = world.catalog().await;
    let values = state.meta.into_iter().map(|(key, value)| (key, value.to_vec()));
    assert_eq!(values.collect::<BTreeMap<_, _>>(), meta.values);
    assert_eq!(state.streams.len(), models.len());
    for Model { id, epoch, start, kind, .. } in models {
        let stream = &state.streams[&id];
        assert_eq!((stream.kind, stream.epoch), (kind, StreamEpoch(epoch)));
        assert!(kind == KIND_STATE || stream.start.0 == start);
    }
}

/// Starts the next run, which must find everything.
async fn go_on(
    world: &World,
    models: &mut [Model],
    meta: &mut Meta,
    random: &mut Random,
) -> Server {
    let server = world.start().await;
    assert_eq!((&server.recovery.gaps, &server.recovery.missing_end), (&vec![], &None));
    assert_eq!(server.store.stats().lost, Lost::default());
    let mut ids = server.store.stream_ids();
    ids.sort_unstable();
    let mut expected: Vec<_> = models.iter().map(|model| model.id).collect();
    expected.sort_unstable();
    assert_eq!(ids, expected);
    meta.check(&server);
    for model in models {
        model.check(&server, random).await;
    }
    server
}

impl Model {
    /// A newer writer opens the stream while the older one has something in flight.
    async fn take_over(&mut self, server: &Server) {
        let older = server.open(self.id).await;
        let in_flight = batch(self.id, older.next_offset().0, 1, 100);
        let done = append(&server.store, &older, &in_flight).await;
        self.epoch += 1;
        let newer = server.store.open_stream(self.id, StreamEpoch(self.epoch)).await.unwrap();
        assert!(done.now_or_never().is_some_and(|done| done.is_ok()), "it is waited for");
        assert_eq!(newer.durable_end(), in_flight.end());
        self.acknowledged.push(in_flight);
        let refused = older.append(new_batch(&batch(self.id, newer.next_offset().0, 1, 100)));
        assert!(matches!(refused, Err(AppendError::Fenced { .. })), "{:?}", refused.err());
        assert!(matches!(older.close().await, Err(StoreError::Fenced { .. })));
    }

    async fn check(&mut self, server: &Server, random: &mut Random) {
        let stream = server.store.stream(self.id).expect("an acknowledged stream");
        assert_eq!(stream.newest_epoch(), StreamEpoch(self.epoch), "stream {}", self.id);
        let end = self.acknowledged.last().map_or(0, |last| last.end().0);
        assert_eq!(stream.next_offset().0, end, "stream {}", self.id);
        assert_eq!(stream.durable_end().0, end, "stream {}", self.id);
        assert_eq!(
            state_of(&stream),
            expected_state(self.id, &self.acknowledged),
            "stream {}",
            self.id
        );
        if self.kind == KIND_STATE {
            return; // uploads move its start meanwhile
        }
        assert_eq!(stream.start_offset().0, self.start, "stream {}", self.id);
        let from = self.start + random.below(end - self.start + 1);
        let max_bytes = 1 + usize::try_from(random.below(20_000)).unwrap();
        let expected: Vec<_> =
            self.acknowledged.iter().filter(|batch| batch.end().0 > from).cloned().collect();
        assert_eq!(
            read_from(&stream, from, max_bytes).await,
            expected,
            "stream {} from {from}",
            self.id
        );

        let time = (random.below(end + 2) * 10).cast_signed();
        let visible = || self.acknowledged.iter().filter(|batch| batch.end().0 > self.start);
        let expected = visible().find(|batch| batch.max_timestamp_ms >= time);
        assert_eq!(
            stream.find_time(time).await.unwrap().as_ref(),
            expected,
            "stream {} at {time}",
            self.id
        );
        assert_eq!(
            stream.max_time().await.unwrap().as_ref(),
            visible().last(),
            "stream {}",
            self.id
        );
    }
}

/// A failing seed is named by the panic of its task; `ALLUVIUM_SEED=n` runs it alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn model() {
    let seeds = match std::env::var("ALLUVIUM_SEED") {
        Ok(seed) => vec![seed.parse().expect("ALLUVIUM_SEED is a number")],
        Err(_) => (0..200).collect::<Vec<u64>>(),
    };
    for seed in seeds {
        if let Err(error) = tokio::spawn(run_model(seed)).await {
            panic!("seed {seed}: {error}");
        }
    }
}
