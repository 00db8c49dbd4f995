//! The catalog is damaged or lost: what a rebuild from the objects states is exactly what is lost,
//! everything else is there, and no offset is handed out twice.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use alluvium_device::sim::{Random, SimDisk, SimOptions};
use alluvium_stream::chain::{Chain, Snapshot};
use alluvium_stream::{
    Batch, Change, Fold, KIND_LOG, Rebuild, RebuildError, StreamEpoch, StreamId, StreamOffset,
};
use bytes::Bytes;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use uuid::Uuid;

use common::*;

const WAL_BYTES: u64 = 1 << 20;

/// A fold whose checkpoint is a sum over all batches, whatever gaps there are.
struct Sum;

fn sum_of(batch: &Batch) -> u64 {
    let crc32c = u64::from(crc32c::crc32c(&batch.payload));
    batch.base.0.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(crc32c << 7)
}

impl Fold for Sum {
    fn fold(
        &self,
        _: StreamId,
        _: u8,
        _: Range<StreamOffset>,
        _: StreamOffset,
        previous: Option<&[u8]>,
        batches: &[Batch],
    ) -> Option<Vec<u8>> {
        let previous = previous.map_or(0, |sum| u64::from_le_bytes(sum.try_into().unwrap()));
        let sum = batches.iter().map(sum_of).fold(previous, u64::wrapping_add);
        Some(sum.to_le_bytes().to_vec())
    }
}

/// What was acknowledged of a stream.
#[derive(Default)]
struct Written {
    /// What should be readable.
    batches: Vec<Batch>,
    /// Everything that was ever acknowledged. What was trimmed or deleted may be back.
    ever: Vec<Batch>,
    start: u64,
    uploaded_end: u64,
    is_deleted: bool,
    /// `batches` lacks some that the checkpoint has.
    is_partial: bool,
}

impl Written {
    fn end(&self) -> u64 {
        self.ever.last().map_or(0, |last| last.end().0)
    }
}

#[derive(Default)]
struct Journal {
    streams: BTreeMap<StreamId, Written>,
}

/// What is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Damage {
    Nothing,
    NewestEntry,
    AnEntry,
    SeveralEntries,
    NewestSnapshot,
    AllSnapshots,
    Chain,
}

const DAMAGES: [Damage; 7] = [
    Damage::Nothing,
    Damage::NewestEntry,
    Damage::AnEntry,
    Damage::SeveralEntries,
    Damage::NewestSnapshot,
    Damage::AllSnapshots,
    Damage::Chain,
];

async fn listed(world: &World, part: &str) -> Vec<Path> {
    let all = contents(&world.objects).await.into_iter().map(|(name, _)| name);
    all.filter(|name| name.as_ref().starts_with("catalogs/") && name.as_ref().contains(part))
        .collect()
}

/// Deletes an object, or changes one of its bytes.
async fn damage_object(world: &World, name: &Path, random: &mut Random) {
    if random.next_u64().is_multiple_of(2) {
        return world.objects.delete(name).await.unwrap();
    }
    let mut bytes = world.objects.get(name).await.unwrap().bytes().await.unwrap().to_vec();
    let at = (random.next_u64() % bytes.len() as u64) as usize;
    bytes[at] ^= 1 << (random.next_u64() % 8);
    world.objects.put(name, bytes.into()).await.unwrap();
}

async fn do_damage(world: &World, damage: Damage, random: &mut Random) {
    let entries = listed(world, "/chain/").await;
    let snapshots = listed(world, "/snapshots/").await;
    let any = |random: &mut Random| (random.next_u64() % entries.len() as u64) as usize;
    match damage {
        Damage::Nothing => {}
        Damage::NewestEntry => {
            damage_object(world, entries.last().unwrap(), random).await;
        }
        Damage::AnEntry => damage_object(world, &entries[any(random)], random).await,
        Damage::SeveralEntries => {
            let chosen: BTreeSet<usize> = (0..3).map(|_| any(random)).collect();
            for entry in chosen {
                damage_object(world, &entries[entry], random).await;
            }
        }
        Damage::NewestSnapshot => {
            if let Some(newest) = snapshots.last() {
                damage_object(world, newest, random).await;
            }
        }
        Damage::AllSnapshots => {
            for snapshot in &snapshots {
                damage_object(world, snapshot, random).await;
            }
        }
        Damage::Chain => {
            for name in entries.iter().chain(&snapshots) {
                world.objects.delete(name).await.unwrap();
            }
        }
    }
}

async fn start(world: &World, at: &str) -> Server {
    let started = world.try_start(Arc::new(Sum)).await;
    started.unwrap_or_else(|error| panic!("{at}: {error}"))
}

async fn flush(server: &Server, journal: &mut Journal) {
    server.store.flush().await.unwrap();
    for written in journal.streams.values_mut() {
        written.uploaded_end = written.end();
    }
}

async fn run_randomly(world: &mut World, random: &mut Random, journal: &mut Journal, at: &str) {
    let server = start(world, at).await;
    let store = locate_store(world).await;
    for _ in 0..10 + random.next_u64() % 80 {
        let mut ids: Vec<_> = server.store.stream_ids();
        ids.sort_unstable();
        let any = |random: &mut Random| {
            (!ids.is_empty()).then(|| ids[(random.next_u64() % ids.len() as u64) as usize])
        };
        match random.next_u64() % 16 {
            0 | 1 if ids.len() < 5 => {
                let id = server.store.new_stream_ids(1).await.unwrap()[0];
                assert!(!journal.streams.contains_key(&id), "id {id} was handed out before");
                let label = Bytes::from(format!("label of {id}"));
                let create = Change::CreateStream { id, kind: KIND_LOG, label };
                server.store.commit(vec![create]).await.unwrap();
                journal.streams.insert(id, Written::default());
            }
            2..=4 => flush(&server, journal).await,
            5 if random.next_u64().is_multiple_of(3) => {
                // Written by the server every 64 objects, which is too seldom here.
                let chain = Chain::new(world.store(), store, world.options.retry());
                let state = chain.load().await.unwrap().unwrap();
                chain.write_snapshot(Snapshot::of(state)).await.unwrap();
            }
            6 => {
                let Some(id) = any(random) else { continue };
                let written = journal.streams.get_mut(&id).unwrap();
                let to = written.start + random.next_u64() % (written.end() - written.start + 1);
                let change = Change::TrimStream { id, epoch: StreamEpoch(0), to: StreamOffset(to) };
                server.store.commit(vec![change]).await.unwrap();
                written.start = to;
            }
            7 if random.next_u64().is_multiple_of(4) => {
                let Some(id) = any(random) else { continue };
                server.store.commit(vec![delete(id)]).await.unwrap();
                journal.streams.get_mut(&id).unwrap().is_deleted = true;
            }
            _ => {
                let Some(id) = any(random) else { continue };
                let stream = server.open(id).await;
                let base = stream.next_offset();
                let written = journal.streams.get_mut(&id).unwrap();
                assert!(written.end() <= base.0, "{at}: stream {id}");
                let count = 1 + (random.next_u64() % 5) as u32;
                let bytes = 1 + (random.next_u64() % 2000) as usize;
                let payload = payload(id, base.0, bytes);
                let batch = Batch { base, count, max_timestamp_ms: -1, payload };
                append(&server.store, &stream, &batch).await.await.unwrap();
                written.ever.push(batch.clone());
                written.batches.push(batch);
            }
        }
    }
    match random.next_u64() % 4 {
        0 => {
            flush(&server, journal).await;
            server.close().await;
        }
        1 => server.close().await,
        2 => server.crash(world),
        _ => server.power_cut(world),
    }
}

async fn locate_store(world: &World) -> Uuid {
    alluvium_stream::locate(&*world.objects, world.header().wal_id).await.unwrap()
}

async fn from_objects(world: &World, store: Uuid, has_log: bool) -> Result<Rebuild, RebuildError> {
    world.rebuild_from_objects(store, has_log, Arc::new(Sum)).await
}

async fn check(seed: u64, damage: Damage, is_log_lost: bool, compacts: bool) {
    let at = format!("seed {seed}, {damage:?}, log lost: {is_log_lost}, compaction: {compacts}");
    let mut random = Random::new(seed);
    let mut world = World::new(WAL_BYTES, seed);
    world.options.compaction_bytes = if compacts { 64 << 10 } else { 0 };
    let store = world.header().wal_id;
    let mut journal = Journal::default();
    for round in 0..2 {
        let at = format!("{at}, round {round}");
        run_randomly(&mut world, &mut random, &mut journal, &at).await;
        do_damage(&world, damage, &mut random).await;
        let mut wal = world.header();
        if is_log_lost {
            wal = world.lose_disk(WAL_BYTES);
        }
        let rebuild = match from_objects(&world, store, !is_log_lost).await {
            Err(RebuildError::NotNeeded(_)) => None,
            Err(RebuildError::NoCatalog(_)) if is_log_lost && damage != Damage::Nothing => {
                assert!(names(&world).await.is_empty(), "{at}: there are objects");
                return;
            }
            rebuild => Some(rebuild.unwrap_or_else(|error| panic!("{at}: {error}"))),
        };
        let mut lost: Vec<(StreamId, Range<StreamOffset>)> = Vec::new();
        let mut may_lack_streams = false;
        let mut known_ends = BTreeMap::new();
        if let Some(rebuild) = rebuild {
            let found = rebuild.found().unwrap();
            for (id, offsets) in &found.lost {
                let end = journal.streams.get(id).map_or(0, Written::end);
                // A gap that an earlier rebuild has declared may be in the lost part of the chain.
                let is_known = offsets.end.0 <= end || round > 0;
                assert!(is_known, "{at}: {id} {offsets:?} of {end}");
            }
            lost.extend(found.lost.iter().cloned());
            may_lack_streams = !found.lost_entries.is_empty() || found.is_old || is_log_lost;
            if let Some(log) = rebuild.log_loss() {
                lost.extend(log.gaps.iter().map(|gap| (gap.stream, gap.offsets.clone())));
                may_lack_streams |= log.lost_lists > 0;
            }
            for end in rebuild.lost_ends() {
                known_ends.insert(end.stream, end.known_end);
                lost.push((end.stream, end.from..StreamOffset(u64::MAX)));
            }
            // A stream that was adopted in the first round has no label.
            for id in found.restored.iter().filter(|_| round == 0) {
                let label = Bytes::from(format!("label of {id}"));
                assert_eq!(rebuild.state().streams[id].label, label, "{at}: stream {id}");
            }
            assert!(rebuild.bind(&world.store(), &wal, 1).await.unwrap(), "{at}");
        }
        let server = start(&world, &at).await;
        let ids: BTreeSet<StreamId> = server.store.stream_ids().into_iter().collect();
        assert!(ids.iter().all(|id| journal.streams.contains_key(id)), "{at}");
        for (id, written) in &mut journal.streams {
            if !ids.contains(id) {
                let is_stated = may_lack_streams
                    && (is_log_lost && written.uploaded_end <= written.start
                        || written.start == written.end());
                assert!(written.is_deleted || is_stated, "{at}: stream {id} is lost");
                continue;
            }
            assert!(!written.is_deleted || may_lack_streams, "{at}: stream {id} is back");
            let is_lost = |batch: &Batch| {
                lost.iter().any(|(stream, offsets)| {
                    stream == id && offsets.start < batch.end() && batch.base < offsets.end
                })
            };
            let read = read_all(&server, *id).await;
            for batch in &read {
                assert!(written.ever.contains(batch), "{at}: stream {id} has {}", batch.base);
                assert!(
                    !is_lost(batch),
                    "{at}: stream {id} has {}, stated as lost: {lost:?}",
                    batch.base
                );
            }
            let expected = written
                .batches
                .iter()
                .filter(|batch| batch.end().0 > written.start && !is_lost(batch));
            if !written.is_deleted {
                let have: BTreeSet<u64> = read.iter().map(|batch| batch.base.0).collect();
                for batch in expected {
                    assert!(
                        have.contains(&batch.base.0),
                        "{at}: stream {id} lacks {}..{}, which is not stated as lost: {lost:?}",
                        batch.base,
                        batch.end()
                    );
                }
                let stream = server.store.stream(*id).unwrap();
                assert!(stream.next_offset().0 >= written.end(), "{at}: stream {id}");
                let has_loss = lost.iter().any(|(stream, offsets)| {
                    stream == id && offsets.start < StreamOffset(written.end())
                });
                if !has_loss && !written.is_partial && written.start == 0 {
                    let replay = stream.replay();
                    let checkpoint = replay.checkpoint.map(|bytes| bytes.to_vec());
                    let end = replay.checkpoint_end;
                    let below = written.batches.iter().filter(|batch| batch.end() <= end);
                    let sum = below.map(sum_of).fold(0, u64::wrapping_add);
                    let expected = (end.0 > 0).then(|| sum.to_le_bytes().to_vec());
                    assert_eq!(checkpoint, expected, "{at}: the checkpoint of stream {id}");
                }
            }
            written.is_partial |= read != written.batches;
            if written.is_deleted {
                // It continues after what is left of it.
                written.ever.retain(|batch| read.contains(batch));
            }
            written.batches = read;
        }
        for (id, written) in &mut journal.streams {
            // What was trimmed or deleted may be back.
            written.is_deleted = !ids.contains(id);
            written.start = written.start.min(written.batches.first().map_or(0, |b| b.base.0));
        }
        server.close().await;
    }
}

async fn campaign(compacts: bool) {
    let seeds = std::env::var("ALLUVIUM_MODEL_SEEDS").ok();
    let seeds = seeds.map_or(12, |seeds| seeds.parse().expect("a number"));
    let first =
        std::env::var("ALLUVIUM_FIRST_SEED").map_or(0, |seed| seed.parse().expect("a number"));
    for seed in first..seeds {
        for damage in DAMAGES {
            for is_log_lost in [false, true] {
                check(seed, damage, is_log_lost, compacts).await;
            }
        }
    }
}

#[tokio::test]
async fn what_is_stated_is_what_is_lost() {
    campaign(false).await;
}

#[tokio::test]
async fn what_is_stated_is_what_is_lost_with_compaction() {
    campaign(true).await;
}

fn cloned(disk: &SimDisk) -> SimDisk {
    SimDisk::from_image(&disk.image(), SimOptions { seed: 1, ..SimOptions::default() })
}

/// Returns a world with a server, and the id of its store.
async fn begun(seed: u64) -> (World, Uuid, Server) {
    let world = World::new(WAL_BYTES, seed);
    let store = world.header().wal_id;
    let server = start(&world, "").await;
    (world, store, server)
}

/// Binds a rebuilt store to the log that is there, and starts it. Returns where a stream continues.
async fn bound(world: &World, rebuild: Rebuild, id: StreamId) -> (Server, StreamOffset) {
    rebuild.bind(&world.store(), &world.header(), 1).await.unwrap();
    let server = start(world, "").await;
    let next = server.store.stream(id).unwrap().next_offset();
    (server, next)
}

async fn create(server: &Server) -> StreamId {
    let id = server.store.new_stream_ids(1).await.unwrap()[0];
    let label = Bytes::from(format!("label of {id}"));
    server.store.commit(vec![Change::CreateStream { id, kind: KIND_LOG, label }]).await.unwrap();
    id
}

async fn put(server: &Server, id: StreamId, base: u64, count: u32) {
    let stream = server.open(id).await;
    append(&server.store, &stream, &batch(id, base, count, 100)).await.await.unwrap();
}

async fn trim(server: &Server, id: StreamId, to: u64) {
    let change = Change::TrimStream { id, epoch: StreamEpoch(0), to: StreamOffset(to) };
    server.store.commit(vec![change]).await.unwrap();
}

/// The newest delta is lost, and with it the end of a stream that was trimmed before its upload.
async fn trimmed_before_upload(has_hint: bool) -> (World, Uuid, StreamId) {
    let (mut world, store, server) = begun(1).await;
    let (id, other) = (create(&server).await, create(&server).await);
    server.store.flush().await.unwrap();
    let mut server = server;
    if has_hint {
        put(&server, id, 0, 10).await;
        server.crash(&mut world);
        server = start(&world, "").await;
    } else {
        put(&server, id, 0, 10).await;
    }
    put(&server, id, 10, 10).await;
    put(&server, other, 0, 1).await;
    trim(&server, id, 20).await;
    server.store.flush().await.unwrap();
    server.crash(&mut world);
    let newest = listed(&world, "/chain/").await.pop().unwrap();
    world.objects.delete(&newest).await.unwrap();
    (world, store, id)
}

#[tokio::test]
async fn a_stale_hint_does_not_hide_the_lost_end() {
    for has_hint in [false, true] {
        let (world, store, id) = trimmed_before_upload(has_hint).await;
        let rebuild = from_objects(&world, store, true).await.unwrap();
        let (server, next) = bound(&world, rebuild, id).await;
        assert!(next.0 >= 20, "hint {has_hint}: offsets from {next} are handed out again");
        server.close().await;
    }
}

#[tokio::test]
async fn a_rebuild_that_is_repeated_after_its_snapshot_skips_the_same_offsets() {
    let (world, store, id) = trimmed_before_upload(false).await;
    let first = from_objects(&world, store, true).await.unwrap();
    let chain = Chain::new(world.store(), store, world.options.retry());
    chain.write_snapshot(Snapshot::of_new_base(first.state().clone())).await.unwrap();
    let second = from_objects(&world, store, true).await.unwrap();
    let (server, next) = bound(&world, second, id).await;
    assert!(next.0 >= 20, "offsets from {next} are handed out again");
    server.close().await;
}

#[tokio::test]
async fn an_old_copy_of_the_log_is_refused() {
    let (mut world, store, server) = begun(1).await;
    let id = create(&server).await;
    put(&server, id, 0, 1).await;
    server.store.flush().await.unwrap();
    let old = cloned(&world.disk);
    for base in 1..4 {
        put(&server, id, base, 1).await;
        server.store.flush().await.unwrap();
    }
    put(&server, id, 4, 1).await;
    server.crash(&mut world);
    world.disk = old;
    assert!(world.try_start(Arc::new(Sum)).await.is_err());
    let entries = listed(&world, "/chain/").await;
    world.objects.delete(&entries[2]).await.unwrap();
    let refused = from_objects(&world, store, true).await.err();
    assert!(matches!(refused, Some(RebuildError::Log(_))), "{refused:?}");
}

#[tokio::test]
async fn the_log_of_a_lost_fence_is_accepted() {
    let (mut world, store, server) = begun(1).await;
    let id = create(&server).await;
    put(&server, id, 0, 1).await;
    server.store.flush().await.unwrap();
    server.crash(&mut world);
    let wal = world.lose_disk(WAL_BYTES);
    let before = listed(&world, "/chain/").await.len();
    let rebuild = Rebuild::load(&world.store(), store, &world.options).await.unwrap();
    rebuild.bind(&world.store(), &wal, 1).await.unwrap();
    let server = start(&world, "").await;
    let next = server.store.stream(id).unwrap().next_offset();
    put(&server, id, next.0, 1).await;
    server.crash(&mut world);
    for entry in listed(&world, "/chain/").await.split_off(before) {
        world.objects.delete(&entry).await.unwrap();
    }
    let rebuild = from_objects(&world, store, true).await;
    assert!(rebuild.is_ok(), "{}", rebuild.err().unwrap());
}

#[tokio::test]
async fn a_stream_whose_end_is_known_is_kept() {
    let (mut world, store, server) = begun(1).await;
    let id = create(&server).await;
    put(&server, id, 0, 5).await;
    server.store.flush().await.unwrap();
    let entries = listed(&world, "/chain/").await;
    trim(&server, id, 5).await;
    server.store.flush().await.unwrap();
    let other = create(&server).await;
    put(&server, other, 0, 1).await;
    server.store.flush().await.unwrap();
    server.crash(&mut world);
    world.objects.delete(entries.last().unwrap()).await.unwrap();
    let rebuild = from_objects(&world, store, true).await.unwrap();
    assert!(rebuild.state().streams.contains_key(&id), "the end of {id} is forgotten");
}

/// Here an intact delta follows the lost one.
#[tokio::test]
async fn a_rebuild_that_is_repeated_after_its_snapshot_states_the_same() {
    let (mut world, store, server) = begun(1).await;
    let (id, other) = (create(&server).await, create(&server).await);
    server.store.flush().await.unwrap();
    put(&server, id, 0, 20).await;
    put(&server, other, 0, 1).await;
    trim(&server, id, 20).await;
    server.store.flush().await.unwrap();
    let lost = listed(&world, "/chain/").await.pop().unwrap();
    put(&server, other, 1, 1).await;
    server.store.flush().await.unwrap();
    server.crash(&mut world);
    world.objects.delete(&lost).await.unwrap();
    let first = from_objects(&world, store, true).await.unwrap();
    let chain = Chain::new(world.store(), store, world.options.retry());
    chain.write_snapshot(Snapshot::of_new_base(first.state().clone())).await.unwrap();
    let second = from_objects(&world, store, true).await.unwrap();
    let (server, next) = bound(&world, second, id).await;
    assert!(next.0 >= 20, "offsets from {next} are handed out again");
    server.close().await;
}

#[tokio::test]
async fn a_copy_of_the_log_from_before_the_last_trim_is_refused() {
    let (mut world, store, server) = begun(1).await;
    let id = create(&server).await;
    server.store.flush().await.unwrap();
    put(&server, id, 0, 1).await;
    let old = cloned(&world.disk);
    server.store.flush().await.unwrap();
    put(&server, id, 1, 1).await;
    // A delta without an upload states the mark that the upload has set.
    publish(&server, id).await;
    put(&server, id, 2, 1).await;
    put(&server, id, 3, 1).await;
    server.crash(&mut world);
    world.disk = old;
    assert!(world.try_start(Arc::new(Sum)).await.is_err());
    let entries = listed(&world, "/chain/").await;
    world.objects.delete(&entries[1]).await.unwrap();
    let refused = from_objects(&world, store, true).await.err();
    assert!(matches!(refused, Some(RebuildError::Log(_))), "{refused:?}");
}

/// Writes a delta without an upload: raises the greatest number of offsets of a batch.
async fn publish(server: &Server, id: StreamId) {
    let stream = server.open(id).await;
    let not_next = stream.next_offset().0 + 1;
    let mut has_waited = false;
    for count in (15..32).map(|shift| 1 << shift) {
        loop {
            match stream.append(new_batch(&batch(id, not_next, count, 1))) {
                Err(alluvium_stream::AppendError::NotNext { .. }) if has_waited => return,
                Err(alluvium_stream::AppendError::NotNext { .. }) => break,
                Err(alluvium_stream::AppendError::Full) => has_waited = true,
                other => panic!("{:?}", other.err()),
            }
            server.store.wait_for_space().await;
        }
    }
}

#[tokio::test]
async fn the_log_has_lost_no_list_if_only_the_chain_is_damaged() {
    let (mut world, store, server) = begun(1).await;
    let first = create(&server).await;
    for base in 0..3 {
        put(&server, first, base, 1).await;
        create(&server).await;
        server.store.flush().await.unwrap();
    }
    create(&server).await;
    server.crash(&mut world);
    let entries = listed(&world, "/chain/").await;
    // The second of the three.
    world.objects.delete(&entries[entries.len() - 2]).await.unwrap();
    let rebuild = from_objects(&world, store, true).await.unwrap();
    assert_eq!(rebuild.log_loss().unwrap().lost_lists, 0);
}

#[tokio::test]
async fn stream_ids_are_not_handed_out_again_after_a_second_loss() {
    let (mut world, store, server) = begun(1).await;
    let id = create(&server).await;
    put(&server, id, 0, 1).await;
    server.store.flush().await.unwrap();
    server.crash(&mut world);
    let mut given = Vec::new();
    for round in 0..2 {
        let wal = world.lose_disk(WAL_BYTES);
        let before = listed(&world, "/chain/").await.len();
        let rebuild = from_objects(&world, store, false).await.unwrap();
        rebuild.bind(&world.store(), &wal, 1).await.unwrap();
        let server = start(&world, "").await;
        let new = create(&server).await;
        assert!(!given.contains(&new), "round {round}: {new} is handed out again");
        given.push(new);
        server.crash(&mut world);
        // The fence of the rebuild is damaged, and what follows is lost.
        for (at, entry) in listed(&world, "/chain/").await.split_off(before).iter().enumerate() {
            match at {
                0 => world.objects.put(entry, Bytes::from_static(b"damage").into()).await.map(drop),
                _ => world.objects.delete(entry).await,
            }
            .unwrap();
        }
    }
}

/// An abandoned attempt of an upload has the number of the object, and less in it if a stream was
/// trimmed in between, or more. Its nonce decides which one is listed first.
#[tokio::test]
async fn of_two_objects_with_one_number_the_one_with_more_is_used() {
    for attempt in 0..8 {
        let mut world = World::new(WAL_BYTES, attempt);
        let store = world.header().wal_id;
        let server = start(&world, "").await;
        let (id, other) = (create(&server).await, create(&server).await);
        server.close().await;
        let twin = world.copy().await;
        for (world, streams) in [(&world, &[id, other][..]), (&twin, &[id])] {
            let server = start(world, "").await;
            for stream in streams {
                put(&server, *stream, 0, 1).await;
            }
            server.store.flush().await.unwrap();
            server.close().await;
        }
        let less = Path::from(names(&twin).await.remove(0));
        let bytes = twin.objects.get(&less).await.unwrap().bytes().await.unwrap();
        world.objects.put(&less, bytes.into()).await.unwrap();
        let found = names(&world).await;
        let number = |name: &str| name.rsplit_once('-').unwrap().0.to_owned();
        assert!(found.len() == 2 && number(&found[0]) == number(&found[1]), "{found:?}");
        do_damage(&world, Damage::Chain, &mut Random::new(1)).await;
        let wal = world.lose_disk(WAL_BYTES);
        let rebuild = from_objects(&world, store, false).await.unwrap();
        rebuild.bind(&world.store(), &wal, 1).await.unwrap();
        let server = start(&world, "").await;
        for stream in [id, other] {
            assert_eq!(read_all(&server, stream).await.len(), 1, "{attempt}: stream {stream}");
        }
        server.close().await;
    }
}

#[tokio::test]
async fn an_object_of_another_store_is_not_used() {
    let mut worlds = Vec::new();
    for seed in 0..2 {
        let mut world = World::new(WAL_BYTES, seed);
        let server = start(&world, "").await;
        let id = create(&server).await;
        put(&server, id, 0, 1).await;
        if seed == 1 {
            put(&server, id, 1, 1).await;
        }
        server.store.flush().await.unwrap();
        server.crash(&mut world);
        worlds.push(world);
    }
    let store = worlds[0].header().wal_id;
    let name = names(&worlds[1]).await.remove(0);
    let bytes = worlds[1].objects.get(&name.as_str().into()).await.unwrap().bytes().await.unwrap();
    let copy = name.replace(&worlds[1].header().wal_id.to_string(), &store.to_string());
    let copy = copy.replace("0000000100000000", "0000000100000005");
    worlds[0].objects.put(&copy.as_str().into(), bytes.into()).await.unwrap();
    do_damage(&worlds[0], Damage::Chain, &mut Random::new(1)).await;
    let rebuild = from_objects(&worlds[0], store, false).await.unwrap();
    let ranges = &rebuild.state().streams[&StreamId(0)].ranges;
    assert_eq!(ranges[0].end, StreamOffset(1), "it has the records of another store");
}
