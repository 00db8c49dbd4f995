//! A store that follows its writer: after each read of the chain it has what the chain has, reads
//! give what the writer has appended, and nothing is written to the object store.

mod common;
#[path = "common/reads_only.rs"]
mod reads_only;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use alluvium_device::sim::{Random, SimDisk, SimOptions};
use alluvium_stream::chain::{Chain, ChainState, CleanUp};
use alluvium_stream::{
    AppendError, Batch, Change, FetchError, KIND_LOG, KIND_STATE, NewBatch, ObjectError, Options,
    Reason, Rebuild, Store, StoreError, StreamEpoch, StreamId, StreamOffset,
};
use alluvium_wal::{FormatOptions, Wal};
use bytes::Bytes;
use common::*;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use reads_only::ReadsOnly;
use tokio::sync::Notify;
use uuid::Uuid;

const WAL_BYTES: u64 = 1 << 20;
/// Only the tests read the chain.
const NEVER: Duration = Duration::from_secs(3600);
const SOON: Duration = Duration::from_millis(10);

/// A store that follows, and its object store.
struct Reader {
    store: Store,
    objects: Arc<ReadsOnly>,
}

fn options(poll_interval: Duration) -> Options {
    let short = Duration::from_millis(1);
    Options {
        poll_interval,
        retry_initial: short,
        retry_max: short,
        block_cache_bytes: 0,
        ..Options::default()
    }
}

async fn follow(world: &World, poll_interval: Duration) -> Reader {
    try_follow(world, poll_interval, store_id(world).await).await.unwrap()
}

async fn try_follow(world: &World, interval: Duration, id: Uuid) -> Result<Reader, StoreError> {
    let objects = Arc::new(ReadsOnly::new(world.objects.clone()));
    let store = Store::follow(objects.clone(), id, options(interval)).await?;
    Ok(Reader { store, objects })
}

async fn store_id(world: &World) -> Uuid {
    world.catalog().await.header.store
}

impl Reader {
    /// Reads the chain, and checks that the store has what the chain has. The writer may publish
    /// something meanwhile, which a read of a deleted object finds; then the check begins again.
    async fn check(&self, world: &World, lists: &BTreeMap<StreamId, Vec<Batch>>) {
        let begun = std::time::Instant::now();
        loop {
            assert!(begun.elapsed() < HANG, "the writer does not rest");
            self.store.catch_up().await.unwrap();
            let state = world.catalog().await;
            if state.header.version != self.store.catalog_version() {
                continue;
            }
            let following = self.store.following().unwrap();
            assert_eq!((following.number, following.term), (state.head.number, state.head.term));
            assert_eq!(following.written_at_ms, state.header.written_at_ms);
            self.equals(&state);
            let mut wrong = Vec::new();
            for (id, row) in state.streams.iter().filter(|(_, row)| row.kind == KIND_LOG) {
                let expected = lists[id]
                    .iter()
                    .filter(|batch| batch.end() > row.start && batch.end() <= row.uploaded_end);
                let found = self.read(*id, row.start).await;
                if found.as_deref().ok() != Some(&expected.cloned().collect::<Vec<_>>()[..]) {
                    let found = found.map(|found| bases(&found));
                    wrong.push(format!("stream {id} from {}: {found:?}", row.start));
                }
            }
            if state.header.version == self.store.catalog_version() {
                assert!(wrong.is_empty(), "{wrong:?}");
                return;
            }
        }
    }

    /// Reads a stream in two ways.
    async fn read(&self, id: StreamId, from: StreamOffset) -> Result<Vec<Batch>, FetchError> {
        let stream = self.store.stream(id).ok_or(FetchError::Deleted)?;
        let (mut read, mut next) = (Vec::<Batch>::new(), from);
        loop {
            let fetched = stream.fetch(next, 20_000).await?;
            let Some(last) = fetched.batches.last() else { break };
            next = last.end();
            read.extend(fetched.batches);
        }
        let first = stream.find_time(0).await?.map(|batch| batch.base);
        assert!(first == read.first().map(|batch| batch.base) || stream.start_offset() > from);
        Ok(read)
    }

    fn equals(&self, state: &ChainState) {
        let ids: BTreeSet<_> = self.store.stream_ids().into_iter().collect();
        assert_eq!(ids, state.streams.keys().copied().collect());
        let meta: Vec<_> =
            state.meta.iter().map(|(key, value)| (key.clone(), value.to_vec())).collect();
        assert_eq!(self.store.meta(""), meta);
        let mut used = BTreeSet::new();
        for (id, row) in &state.streams {
            let stream = self.store.stream(*id).unwrap();
            let end = row.uploaded_end.max(row.start);
            assert_eq!(stream.start_offset(), row.start, "stream {id}");
            assert_eq!((stream.durable_end(), stream.next_offset()), (end, end), "stream {id}");
            assert_eq!(stream.newest_epoch(), row.epoch, "stream {id}");
            let replay = stream.replay();
            assert_eq!(replay.checkpoint, row.checkpoint, "stream {id}");
            assert_eq!(replay.checkpoint_end, row.uploaded_end, "stream {id}");
            let parts = stream.stored_parts(StreamOffset(0));
            let parts: Vec<_> =
                parts.iter().map(|part| (part.start, part.end, part.payload_bytes)).collect();
            let ranges: Vec<_> =
                row.ranges.iter().map(|it| (it.start, it.end, it.payload_bytes)).collect();
            assert_eq!(parts, ranges, "stream {id}");
            let bytes: u64 = row.ranges.iter().map(|range| range.payload_bytes).sum();
            assert_eq!(stream.size_bytes(), bytes, "stream {id}");
            used.extend(row.ranges.iter().map(|range| range.object));
        }
        let stats = self.store.stats();
        assert_eq!((stats.streams, stats.objects), (state.streams.len(), used.len()));
        let bytes: u64 = used.iter().map(|id| state.objects[id].size_bytes).sum();
        assert_eq!(stats.object_bytes, bytes);
        let retired = state.objects.keys().filter(|id| !used.contains(id)).count();
        assert!(stats.retired_objects <= retired);
        assert_eq!((stats.damaged_objects.count, stats.missing_objects.count), (0, 0));
    }
}

fn bases(batches: &[Batch]) -> Vec<u64> {
    batches.iter().map(|batch| batch.base.0).collect()
}

/// What the writer does, at random.
struct Run {
    random: Random,
    world: World,
    lists: BTreeMap<StreamId, Vec<Batch>>,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut world = World::new(WAL_BYTES, seed);
        world.options.compaction_bytes = [0, 64 << 10, 1 << 20][random.index(3)];
        world.options.upload_bytes = [16 << 10, 64 << 10][random.index(2)];
        let seldom = world.options.catalog_interval;
        world.options.catalog_interval = [Duration::from_millis(1), seldom][random.index(2)];
        Self { random, world, lists: BTreeMap::new() }
    }

    async fn run(&mut self) {
        let server = self.world.start().await;
        let mut reader = follow(&self.world, NEVER).await;
        self.run_server(&server, &reader).await;
        self.end(server).await;
        for _ in 0..self.random.below(3) {
            if self.random.below(4) == 0 {
                reader = follow(&self.world, NEVER).await;
            }
            let server = self.world.start().await;
            self.forget_lost(&server);
            reader.check(&self.world, &self.lists).await;
            self.run_server(&server, &reader).await;
            self.end(server).await;
        }
        reader.check(&self.world, &self.lists).await;
        let fresh = follow(&self.world, NEVER).await;
        fresh.check(&self.world, &self.lists).await;
        reader.store.close().await.unwrap();
    }

    /// Drops what a crash has lost: it was not acknowledged.
    fn forget_lost(&mut self, server: &Server) {
        let there: BTreeSet<_> = server.store.stream_ids().into_iter().collect();
        self.lists.retain(|id, _| there.contains(id));
        for (id, list) in &mut self.lists {
            let end = server.store.stream(*id).unwrap().next_offset();
            list.truncate(list.partition_point(|batch| batch.end() <= end));
        }
    }

    async fn end(&mut self, server: Server) {
        match self.random.below(3) {
            0 => server.close().await,
            1 => server.power_cut(&mut self.world),
            _ => server.crash(&mut self.world),
        }
    }

    async fn run_server(&mut self, server: &Server, reader: &Reader) {
        let store = &server.store;
        for _ in 0..self.random.below(60) {
            if self.lists.is_empty() || (self.lists.len() < 5 && self.random.below(10) == 0) {
                let id = store.new_stream_ids(1).await.unwrap()[0];
                let (key, value) = (id.to_string(), vec![self.random.below(256) as u8]);
                let create = vec![creation(id, KIND_LOG), Change::PutMeta { key, value }];
                self.with_space(server, || create.clone()).await;
                self.lists.insert(id, Vec::new());
            }
            let id = *self.lists.keys().nth(self.random.index(self.lists.len())).unwrap();
            let stream = server.open(id).await;
            let (epoch, durable) = (stream.epoch(), stream.durable_end());
            match self.random.below(16) {
                0..6 => {
                    let list = self.lists.get_mut(&id).unwrap();
                    let base = list.last().map_or(0, |last| last.end().0).max(durable.0);
                    let length = 1 + self.random.below(8_000) as usize;
                    let next = batch(id, base, 1 + self.random.below(3) as u32, length);
                    append(store, &stream, &next).await.await.unwrap();
                    list.push(next);
                }
                6..9 => store.flush().await.unwrap(),
                9 => {
                    let to = StreamOffset(self.random.below(durable.0 + 1));
                    self.with_space(server, || vec![Change::TrimStream { id, epoch, to }]).await;
                }
                10 if self.random.below(4) == 0 => {
                    let forget = Change::DeleteMeta(id.to_string());
                    self.with_space(server, || {
                        vec![Change::DeleteStream { id, epoch }, forget.clone()]
                    })
                    .await;
                    // The chain has it until the next delta.
                }
                11 => {
                    let (key, value) = ("key".to_owned(), vec![self.random.below(256) as u8]);
                    self.with_space(server, || {
                        vec![Change::PutMeta { key: key.clone(), value: value.clone() }]
                    })
                    .await;
                }
                12 => {
                    drop(store.open_stream(id, StreamEpoch(epoch.0 + 1)).await);
                }
                13 => {
                    // Compaction and the object cleaner work.
                    tokio::time::sleep(Duration::from_millis(self.random.below(8))).await;
                }
                _ => reader.check(&self.world, &self.lists).await,
            }
            let there: BTreeSet<_> = store.stream_ids().into_iter().collect();
            if !there.contains(&id) {
                // The reader may still have it, and reads it.
                self.world_without(&id, store, reader).await;
            }
        }
    }

    /// Publishes the deletion of a stream, and forgets it.
    async fn world_without(&mut self, id: &StreamId, store: &Store, reader: &Reader) {
        store.commit(vec![Change::DeleteMeta("none".into())]).await.unwrap();
        store.flush().await.unwrap();
        let gone = reader.store.stream(*id);
        reader.check(&self.world, &self.lists).await;
        if let Some(gone) = gone {
            let fetched = gone.fetch(gone.start_offset(), 1).await;
            assert!(matches!(fetched, Err(FetchError::Deleted)), "{fetched:?}");
        }
        self.lists.remove(id);
    }

    async fn with_space(&self, server: &Server, changes: impl Fn() -> Vec<Change>) {
        loop {
            match server.store.commit(changes()).await {
                Err(StoreError::LogFull) => server.store.wait_for_space().await,
                done => return done.unwrap(),
            }
        }
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect(name))
}

#[test]
fn a_reader_has_what_the_chain_has() {
    let (start, seeds) = (number("ALLUVIUM_MODEL_START", 0), number("ALLUVIUM_MODEL_SEEDS", 40));
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    for seed in start..start + seeds {
        let run = std::panic::AssertUnwindSafe(|| runtime.block_on(Run::new(seed).run()));
        if let Err(panic) = std::panic::catch_unwind(run) {
            eprintln!("seed {seed}: ALLUVIUM_MODEL_START={seed} ALLUVIUM_MODEL_SEEDS=1");
            std::panic::resume_unwind(panic);
        }
    }
}

/// Appends and uploads batches `from..to`, each as an object of its own.
async fn uploaded(server: &Server, id: StreamId, from: u64, to: u64) -> Vec<Batch> {
    upload_each(server, &server.open(id).await, from, to).await
}

#[tokio::test]
async fn nothing_can_be_written() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let id = server.create_log().await.id();
    let batches = uploaded(&server, id, 0, 3).await;
    let reader = follow(&world, NEVER).await;
    let refused = |result: Result<(), StoreError>| {
        assert!(matches!(result, Err(StoreError::ReadOnly)), "{result:?}");
    };
    let store = &reader.store;
    refused(store.commit(vec![delete(id)]).await);
    refused(store.commit(Vec::new()).await);
    refused(store.new_stream_ids(1).await.map(drop));
    refused(store.open_stream(id, StreamEpoch(0)).await.map(drop));
    refused(store.flush().await);
    store.begin_uploads();
    store.wait_for_space().await;
    assert_eq!(read_from(&store.stream(id).unwrap(), 0, 1000).await, batches);
    assert_eq!(store.failure(), None);
    store.clone().close().await.unwrap();
    assert_eq!(store.failure(), Some(StoreError::Closed.to_string()));
    assert!(matches!(store.catch_up().await, Err(StoreError::Closed)));
    assert!(matches!(store.failed().await, StoreError::Closed));
    server.close().await;
}

/// The chain is read in the background, and what arrives wakes readers that wait.
#[tokio::test]
async fn waiting_readers_are_woken_by_uploads() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let id = server.create_log().await.id();
    uploaded(&server, id, 0, 1).await;
    let reader = follow(&world, SOON).await;
    let stream = reader.store.stream(id).unwrap();
    let notify = Arc::new(Notify::new());
    let watch = stream.watch(&notify);
    let mut versions = reader.store.versions().unwrap();
    versions.borrow_and_update();
    uploaded(&server, id, 1, 2).await;
    tokio::time::timeout(HANG, notify.notified()).await.expect("a lost wake-up");
    tokio::time::timeout(HANG, versions.changed()).await.expect("a lost wake-up").unwrap();
    eventually("all of it", || stream.durable_end() == StreamOffset(2)).await;
    drop(watch);
    // A deletion, too.
    let watch = stream.watch(&notify);
    server.store.commit(vec![delete(id)]).await.unwrap();
    let other = server.create_log().await.id();
    uploaded(&server, other, 0, 1).await;
    tokio::time::timeout(HANG, notify.notified()).await.expect("a lost wake-up");
    eventually("its deletion", || reader.store.stream(id).is_none()).await;
    drop(watch);
    server.close().await;
}

/// The writer merges objects and deletes the old ones, or trims the stream, while the reader does
/// not read the chain.
#[tokio::test]
async fn a_read_of_a_deleted_object_reads_the_chain() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let (kept, trimmed) = (server.create_log().await.id(), server.create_log().await.id());
    let batches = uploaded(&server, kept, 0, 24).await;
    uploaded(&server, trimmed, 0, 2).await;
    server.close().await;
    let reader = follow(&world, NEVER).await;
    let [stream, gone] = [kept, trimmed].map(|id| reader.store.stream(id).unwrap());
    let before = reader.store.following().unwrap();

    world.options.compaction_bytes = 1 << 20;
    let server = world.start().await;
    server.open(trimmed).await.trim(StreamOffset(2)).await.unwrap();
    let merged = || {
        let stats = server.store.stats();
        stats.compactions > 0 && stats.objects < 8 && stats.retired_objects == 0
    };
    eventually("the old objects are deleted", merged).await;
    assert_eq!(reader.store.following().unwrap().number, before.number);
    assert_eq!(read_from(&stream, 0, 3000).await, batches);
    assert!(reader.store.following().unwrap().number > before.number);
    let fetched = gone.fetch(StreamOffset(0), 1000).await;
    assert!(matches!(fetched, Err(FetchError::OutOfRange { .. })), "{fetched:?}");
    assert_eq!(reader.store.stats().missing_objects.count, 0);
    server.close().await;
}

/// Publishes this number of deltas.
async fn deltas(server: &Server, count: u64) {
    for value in 0..count {
        let value = value.to_le_bytes().to_vec();
        server.store.commit(vec![Change::PutMeta { key: "a".into(), value }]).await.unwrap();
        server.store.flush().await.unwrap();
    }
}

async fn clean_up(world: &World) -> usize {
    let chain = Chain::new(world.objects.clone(), store_id(world).await, world.options.retry());
    CleanUp::new(chain).run(Duration::ZERO).await.unwrap()
}

/// A reader that was suspended finds that the objects after its last one were deleted.
#[tokio::test]
async fn a_reader_that_was_suspended_for_long_loads_the_catalog_again() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let id = server.create_log().await.id();
    let mut batches = uploaded(&server, id, 0, 2).await;
    let reader = follow(&world, NEVER).await;
    reader.check(&world, &BTreeMap::from([(id, batches.clone())])).await;
    assert_eq!(reader.store.following().unwrap().reloads, 0);
    batches.extend(uploaded(&server, id, 2, 4).await);
    let created = server.create_log().await.id();
    deltas(&server, 150).await;
    let begun = std::time::Instant::now();
    // Snapshots are written in the background.
    while clean_up(&world).await < 50 {
        assert!(begun.elapsed() < HANG, "nothing is deleted");
        tokio::time::sleep(SOON).await;
    }
    let lists = BTreeMap::from([(id, batches), (created, Vec::new())]);
    reader.check(&world, &lists).await;
    assert_eq!(reader.store.following().unwrap().reloads, 1);
    // It goes on from there.
    deltas(&server, 3).await;
    reader.check(&world, &lists).await;
    assert_eq!(reader.store.following().unwrap().reloads, 1);
    server.close().await;
}

/// While nothing is written, a poll is one request; the snapshots are listed once a minute.
#[tokio::test]
async fn a_poll_without_changes_is_one_request() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    deltas(&server, 3).await;
    let reader = follow(&world, SOON).await;
    let count = |of: &std::sync::atomic::AtomicU64| of.load(Ordering::SeqCst);
    let polls = || reader.store.following().unwrap().polls;
    let (lists, reads, before) =
        (count(&reader.objects.lists), count(&reader.objects.chain_reads), polls());
    eventually("polls", || polls() >= before + 20).await;
    let reads = count(&reader.objects.chain_reads) - reads;
    assert!((19..=60).contains(&reads), "{reads} requests");
    assert_eq!(count(&reader.objects.lists), lists);
    server.close().await;
}

#[tokio::test]
async fn a_lost_log_and_its_rebuild_are_followed() {
    let mut world = World::new(WAL_BYTES, 1);
    let id = store_of_new(&world).await;
    let server = world.try_start(Arc::new(())).await.unwrap();
    let stream = server.create_log().await.id();
    let mut batches = uploaded(&server, stream, 0, 2).await;
    let reader = try_follow(&world, NEVER, id).await.unwrap();
    // Acknowledged, and never uploaded.
    let lost = batch(stream, 2, 1, 100);
    append(&server.store, &server.open(stream).await, &lost).await.await.unwrap();
    server.crash(&mut world);

    world.disk = SimDisk::new(SimOptions { capacity_bytes: WAL_BYTES, ..SimOptions::default() });
    let wal = Wal::format(&world.disk.device(), &FormatOptions::default()).unwrap();
    let objects: Arc<dyn ObjectStore> = world.objects.clone();
    let rebuild = Rebuild::load(&objects, id, &Options::default()).await.unwrap();
    assert!(rebuild.bind(&objects, &wal, 1).await.unwrap());
    reader.store.catch_up().await.unwrap();
    assert_eq!(reader.store.term(), 1, "as the fence says");
    assert_eq!(reader.store.stream(stream).unwrap().durable_end(), StreamOffset(2));

    let server = world.try_start(Arc::new(())).await.unwrap();
    let writer = server.open(stream).await;
    let next = batch(stream, writer.next_offset().0, 1, 100);
    assert!(next.base.0 > 1 << 33);
    append(&server.store, &writer, &next).await.await.unwrap();
    server.store.flush().await.unwrap();
    batches.push(next.clone());
    reader.store.catch_up().await.unwrap();
    let followed = reader.store.stream(stream).unwrap();
    assert_eq!(followed.durable_end(), next.end());
    let fetched = followed.fetch(StreamOffset(2), 1000).await.unwrap();
    assert_eq!(
        (&fetched.batches[..], fetched.gap(StreamOffset(2)).end),
        (&[next][..], batches[2].base)
    );
    drop(writer);
    server.close().await;
}

/// Returns the id of the store that a new world will have.
async fn store_of_new(world: &World) -> Uuid {
    world.header().wal_id
}

/// While the object store is away, what was read before is served.
#[tokio::test]
async fn an_outage_is_reported_and_passes() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let id = server.create_log().await.id();
    let mut batches = uploaded(&server, id, 0, 2).await;
    let reader = follow(&world, SOON).await;
    let stream = reader.store.stream(id).unwrap();
    let reports = || {
        let reasons = reader.store.degraded().into_iter().map(|fault| fault.reason);
        reasons.collect::<Vec<_>>()
    };
    assert_eq!(reports(), []);
    reader.objects.down.store(true, Ordering::SeqCst);
    eventually("it is reported", || reports() == [Reason::CatalogNotFollowed]).await;
    assert_eq!((stream.durable_end(), reader.store.failure()), (StreamOffset(2), None));
    assert!(reader.store.following().unwrap().failures > 0);
    batches.extend(uploaded(&server, id, 2, 4).await);
    reader.objects.down.store(false, Ordering::SeqCst);
    eventually("the report ends", || reports().is_empty()).await;
    eventually("it goes on", || stream.durable_end() == StreamOffset(4)).await;
    assert_eq!(read_from(&stream, 0, 1000).await, batches);
    server.crash(&mut world);

    // At the start it is waited for.
    let objects = Arc::new(ReadsOnly::new(world.objects.clone()));
    objects.down.store(true, Ordering::SeqCst);
    let opening = Store::follow(objects.clone(), store_id(&world).await, options(NEVER));
    let opening = tokio::spawn(opening);
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(!opening.is_finished());
    objects.down.store(false, Ordering::SeqCst);
    let opened = tokio::time::timeout(HANG, opening).await.expect("it hangs").unwrap().unwrap();
    assert_eq!(read_from(&opened.stream(id).unwrap(), 0, 1000).await, batches);
}

async fn change(world: &World, name: &Path, change: impl FnOnce(&mut Vec<u8>)) -> Bytes {
    let whole = world.objects.get(name).await.unwrap().bytes().await.unwrap();
    let mut bytes = whole.to_vec();
    change(&mut bytes);
    world.objects.put(name, bytes.into()).await.unwrap();
    whole
}

/// Damage, and an object of a later version: an opening is refused, with the object's name; what
/// was read before is served, and the reader goes on when the object is restored.
#[tokio::test]
async fn damage_is_refused_at_the_start_and_reported_later() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let id = server.create_log().await.id();
    let mut batches = uploaded(&server, id, 0, 1).await;
    let reader = follow(&world, NEVER).await;
    for is_later_version in [false, true] {
        let from = batches.len() as u64;
        batches.extend(uploaded(&server, id, from, from + 2).await);
        let state = world.catalog().await;
        let last = format!("catalogs/{}/chain/{:016x}", state.header.store, state.head.number);
        // The version of the format, or a byte that a checksum covers.
        let at = if is_later_version { 8 } else { 70 };
        let whole = change(&world, &last.as_str().into(), |bytes| bytes[at] ^= 0x40).await;
        let error = reader.store.catch_up().await.unwrap_err();
        assert!(error.to_string().contains(&last), "{error}");
        let stream = reader.store.stream(id).unwrap();
        let before = &batches[..batches.len() - 1];
        assert_eq!(read_from(&stream, 0, 1000).await, before, "what precedes the damage is there");
        let fault = reader.store.degraded().remove(0);
        assert_eq!(fault.reason, Reason::CatalogNotFollowed);
        assert!(fault.detail.contains(&last), "{}", fault.detail);
        let refused = try_follow(&world, NEVER, state.header.store).await.err().unwrap();
        let StoreError::Object(refused) = refused else { panic!("{refused}") };
        let name = match &refused {
            ObjectError::Damaged { name, .. } | ObjectError::Store { name, .. } => name,
        };
        assert_eq!(*name, last, "{refused}");
        world.objects.put(&last.as_str().into(), whole.into()).await.unwrap();
        eventually("it goes on", || stream.durable_end().0 == batches.len() as u64).await;
        assert_eq!(read_from(&stream, 0, 1000).await, batches);
        assert_eq!(reader.store.degraded(), []);
    }
    let unknown = try_follow(&world, NEVER, Uuid::nil()).await.err().unwrap();
    assert!(matches!(unknown, StoreError::NoStore { .. }), "{unknown}");
    server.close().await;
}

/// A copy of the bucket takes its place, which may be written to: numbers of objects repeat, so
/// nothing that is in a cache can be used.
#[tokio::test]
async fn a_replaced_object_store_ends_the_store() {
    for is_used in [false, true] {
        let world = World::new(WAL_BYTES, 1);
        let server = world.start().await;
        let id = server.create_log().await.id();
        uploaded(&server, id, 0, 2).await;
        server.close().await;
        let copy = world.copy().await;
        let server = world.start().await;
        uploaded(&server, id, 2, 4).await;
        let reader = follow(&world, NEVER).await;
        server.close().await;
        reader.store.catch_up().await.unwrap();
        let stream = reader.store.stream(id).unwrap();
        assert_eq!(stream.durable_end(), StreamOffset(4));

        if is_used {
            let server = copy.start().await;
            uploaded(&server, id, 2, 9).await;
            server.close().await;
        }
        for (name, _) in contents(&world.objects).await {
            world.objects.delete(&name).await.unwrap();
        }
        // A directory that is not mounted.
        let error = reader.store.catch_up().await.unwrap_err();
        assert!(error.to_string().contains("missing"), "{error}");
        assert_eq!(reader.store.failure(), None);
        for (name, bytes) in contents(&copy.objects).await {
            world.objects.put(&name, bytes.into()).await.unwrap();
        }
        let failed = tokio::time::timeout(HANG, reader.store.failed()).await.expect("it hangs");
        assert!(matches!(failed, StoreError::OtherHistory), "{failed}");
        assert_eq!(stream.durable_end(), StreamOffset(4));
        let reader = follow(&world, NEVER).await;
        let end = if is_used { 9 } else { 2 };
        assert_eq!(reader.store.stream(id).unwrap().durable_end(), StreamOffset(end));
    }
}

/// A checkpoint of a stream whose batches are not kept.
#[tokio::test]
async fn checkpoints_of_state_streams_are_followed() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let writer = server.create(KIND_STATE).await;
    let reader = follow(&world, NEVER).await;
    for base in 0..3 {
        let record = NewBatch {
            base: StreamOffset(base),
            count: 1,
            max_timestamp_ms: -1,
            payload: Bytes::from(vec![base as u8; 10]),
        };
        match writer.append(record) {
            Ok(append) => append.await.unwrap(),
            Err(AppendError::Full) => unreachable!("there is space"),
            Err(error) => panic!("{error}"),
        }
        server.store.flush().await.unwrap();
        reader.check(&world, &BTreeMap::new()).await;
        let followed = reader.store.stream(writer.id()).unwrap();
        assert_eq!(state_of(&followed), state_of(&writer));
        assert_eq!(followed.replay().end, StreamOffset(base + 1));
    }
    drop(writer);
    server.close().await;
}
