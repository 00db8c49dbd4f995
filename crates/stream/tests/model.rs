//! Streams compared with plain lists, by seed: appends, fetches, searches, trims, deletions,
//! uploads, compaction, changes of metadata that are published or not, an object store that fails
//! at times, crashes and power cuts. `cargo xtask model` goes further.
//!
//! For each stream the list has what was appended and how much of it was acknowledged. After a
//! crash a stream holds a prefix of the list that has at least that much; from then on that prefix
//! is the list.
//!
//! Each stream has one writer, until a newer one opens it while the older one still appends: what
//! is accepted of that is in the list, and everything that the older one tries later is refused, in
//! this run or a later one.

mod common;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use alluvium_device::sim::Random;
use alluvium_stream::{
    Append, AppendError, Batch, Change, FetchError, KIND_LOG, Lost, StoreError, Stream,
    StreamEpoch, StreamId, StreamOffset, StreamWriter,
};
use common::*;
use futures::FutureExt;

const WAL_BYTES: u64 = 1 << 20;

#[derive(Default)]
struct List {
    batches: Vec<Batch>,
    /// The number of them that were acknowledged.
    acknowledged: usize,
    start: StreamOffset,
    epoch: u64,
    /// The epoch of an opening whose outcome is unknown.
    opening: Option<u64>,
}

impl List {
    fn next(&self) -> u64 {
        self.batches.last().map_or(0, |last| last.end().0)
    }

    /// Returns what a reader may see from `from` on, if it is durable.
    fn from(&self, from: StreamOffset) -> &[Batch] {
        &self.batches[self.batches.partition_point(|batch| batch.end() <= from)..]
    }
}

/// The writers of one run.
type Writers = BTreeMap<StreamId, StreamWriter>;

struct Run {
    random: Random,
    world: World,
    lists: BTreeMap<StreamId, List>,
    meta: BTreeMap<String, Vec<u8>>,
    /// A value of metadata whose change has an unknown outcome.
    changing: Option<Vec<u8>>,
    compactions: u64,
    uploads: u64,
}

/// The key of [`Run::changing`].
const CHANGING: &str = "changing";

/// Repairs the object store: what waits for it, or for space in the log, would wait forever.
fn repair(objects: &Objects) {
    objects.down.store(false, Ordering::SeqCst);
    objects.set_catalog(CatalogMode::Works);
}

/// Repeats a change while the log is full.
async fn with_space<T>(
    server: &Server,
    change: impl AsyncFn() -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    loop {
        match change().await {
            Err(StoreError::LogFull) => {
                repair(&server.objects);
                tokio::time::timeout(HANG, server.store.wait_for_space())
                    .await
                    .expect("a lost wake-up");
            }
            done => return done,
        }
    }
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut world = World::new(WAL_BYTES, seed);
        world.options.compaction_bytes = [0, 64 << 10, 64 << 10, 1 << 20][random.below(4) as usize];
        world.options.block_cache_bytes = [0, 100 << 10, 1 << 20][random.below(3) as usize];
        world.options.cache_bytes = [128 << 10, WAL_BYTES][random.below(2) as usize];
        world.options.upload_bytes = [16 << 10, 64 << 10][random.below(2) as usize];
        let seldom = world.options.catalog_interval;
        world.options.catalog_interval =
            [Duration::from_millis(1), seldom][random.below(2) as usize];
        Self {
            random,
            world,
            lists: BTreeMap::new(),
            meta: BTreeMap::new(),
            changing: None,
            compactions: 0,
            uploads: 0,
        }
    }

    fn chance(&mut self, one_in: u64) -> bool {
        self.random.below(one_in) == 0
    }

    async fn run_servers(&mut self) {
        for _ in 0..1 + self.random.below(4) {
            let server = self.world.start().await;
            self.found(&server).await;
            self.run_server(&server).await;
            if self.chance(2) {
                self.begin_to_open(&server).await;
            }
            if self.chance(2) {
                self.begin_to_change(&server).await;
            }
            let stats = server.store.stats();
            self.compactions += stats.compactions;
            self.uploads += stats.uploads;
            match self.random.below(4) {
                0 => {
                    repair(&server.objects);
                    server.close().await;
                    self.lists.values_mut().for_each(|list| list.acknowledged = list.batches.len());
                }
                1 => server.power_cut(&mut self.world),
                _ => server.crash(&mut self.world),
            }
        }
        let server = self.world.start().await;
        self.found(&server).await;
        server.close().await;
        let state = self.world.catalog().await;
        assert!(state.streams.keys().eq(self.lists.keys()), "all of them are published");
        let published = state.meta.into_iter().map(|(key, value)| (key, value.to_vec()));
        assert_eq!(published.collect::<BTreeMap<_, _>>(), self.meta);
    }

    /// Checks after a start that at least what was acknowledged is there, and that everything there
    /// was appended.
    async fn found(&mut self, server: &Server) {
        let mut ids = server.store.stream_ids();
        ids.sort_unstable();
        assert_eq!(ids, self.lists.keys().copied().collect::<Vec<_>>());
        assert_eq!(server.store.stats().lost, Lost::default());
        let meta: BTreeMap<_, _> = server.store.meta("").into_iter().collect();
        if let Some(value) = self.changing.take()
            && meta.get(CHANGING) == Some(&value)
        {
            self.meta.insert(CHANGING.into(), value);
        }
        assert_eq!(meta, self.meta);
        for (id, list) in &mut self.lists {
            let stream = server.store.stream(*id).unwrap();
            let newest = stream.newest_epoch().0;
            assert!(newest == list.epoch || Some(newest) == list.opening, "stream {id}: {newest}");
            (list.epoch, list.opening) = (newest, None);
            if let Some(older) = newest.checked_sub(1) {
                assert_refused(server.store.open_stream(*id, StreamEpoch(older)).await.err());
            }
            assert_eq!(stream.start_offset(), list.start, "stream {id}");
            let end = stream.durable_end();
            assert_eq!(end, stream.next_offset(), "stream {id}");
            let there = list.batches.partition_point(|batch| batch.end() <= end);
            assert!(
                there >= list.acknowledged,
                "stream {id} ends at {end}: {there} batches, {} were acknowledged",
                list.acknowledged
            );
            list.batches.truncate(there);
            list.acknowledged = there;
            assert_eq!(StreamOffset(list.next()).max(list.start), end, "stream {id}");
            let expected = list.from(list.start);
            assert_eq!(read_from(&stream, list.start.0, 1 << 20).await, expected, "stream {id}");
            assert_eq!(state_of(&stream), expected_state(*id, &list.batches), "stream {id}");
        }
    }

    async fn run_server(&mut self, server: &Server) {
        let mut writers = Writers::new();
        for (id, list) in &self.lists {
            let opened = server.store.open_stream(*id, StreamEpoch(list.epoch)).await;
            writers.insert(*id, opened.expect("it has this epoch"));
        }
        let mut pending: Vec<(StreamId, Append, usize)> = Vec::new();
        for _ in 0..self.random.below(80) {
            if self.lists.is_empty() || (self.lists.len() < 6 && self.chance(20)) {
                let id = server.store.new_stream_ids(1).await.unwrap()[0];
                let (key, value) = (id.to_string(), vec![self.random.below(256) as u8]);
                self.meta.insert(key.clone(), value.clone());
                let list = vec![creation(id, KIND_LOG), Change::PutMeta { key, value }];
                with_space(server, async || server.store.commit(list.clone()).await).await.unwrap();
                self.lists.insert(id, List::default());
                writers.insert(id, server.open(id).await);
                continue;
            }
            let at = self.random.below(self.lists.len() as u64) as usize;
            let id = *self.lists.keys().nth(at).unwrap();
            let stream = &writers[&id];
            match self.random.below(20) {
                0..9 => pending.push(self.append(server, stream).await),
                9..11 => self.acknowledge(&mut pending).await,
                11..13 => self.fetch(server, stream).await,
                13 => self.take_over(server, id, &mut writers).await,
                14 => self.search(server, stream).await,
                15 => {
                    // Otherwise it waits.
                    repair(&server.objects);
                    server.store.flush().await.unwrap();
                }
                16 => self.trim(server, stream).await,
                17 if self.chance(6) => {
                    let epoch = writers.remove(&id).unwrap().epoch();
                    let forget = Change::DeleteMeta(id.to_string());
                    let list = vec![Change::DeleteStream { id, epoch }, forget];
                    with_space(server, async || server.store.commit(list.clone()).await)
                        .await
                        .unwrap();
                    self.meta.remove(&id.to_string());
                    pending.retain(|(of, _, _)| *of != id);
                    self.lists.remove(&id);
                }
                18 => {
                    let down = self.chance(3);
                    server.objects.down.store(down, Ordering::SeqCst);
                    server.objects.set_catalog(match self.random.below(6) {
                        0 => CatalogMode::Fails,
                        1 => CatalogMode::LosesAnswers,
                        _ => CatalogMode::Works,
                    });
                    server.objects.fail_writes.store(self.random.below(3), Ordering::SeqCst);
                }
                _ => tokio::time::sleep(Duration::from_micros(self.random.below(500))).await,
            }
            // Those that are complete: what was acknowledged must stay.
            for (of, append, count) in &mut pending {
                if append.now_or_never().is_some_and(|done| done.is_ok()) {
                    let list = self.lists.get_mut(of).unwrap();
                    list.acknowledged = list.acknowledged.max(*count);
                }
            }
            let lists = &self.lists;
            pending.retain(|(of, _, count)| lists[of].acknowledged < *count);
        }
    }

    async fn append(
        &mut self,
        server: &Server,
        stream: &StreamWriter,
    ) -> (StreamId, Append, usize) {
        let longest = [100, 3000, 20_000][self.random.below(3) as usize];
        let (count, len) = (1 + self.random.below(3) as u32, 1 + self.random.below(longest));
        let list = self.lists.get_mut(&stream.id()).unwrap();
        let batch = batch(stream.id(), list.next().max(list.start.0), count, len as usize);
        let append = loop {
            match stream.append(new_batch(&batch)) {
                Ok(append) => break append,
                Err(AppendError::Full) => {
                    repair(&server.objects);
                    tokio::time::timeout(HANG, server.store.wait_for_space())
                        .await
                        .expect("a lost wake-up");
                }
                Err(error) => panic!("append: {error}"),
            }
        };
        list.batches.push(batch);
        (stream.id(), append, list.batches.len())
    }

    /// A newer writer opens the stream while the older one appends as fast as it can, and then
    /// tries every operation.
    async fn take_over(&mut self, server: &Server, id: StreamId, writers: &mut Writers) {
        let list = self.lists.get_mut(&id).unwrap();
        let epoch = StreamEpoch(list.epoch + 1 + self.random.below(3));
        let older = writers.remove(&id).unwrap();
        let opening = tokio::spawn({
            let (store, objects) = (server.store.clone(), server.objects.clone());
            async move {
                loop {
                    match store.open_stream(id, epoch).await {
                        Err(StoreError::LogFull) => {
                            repair(&objects);
                            store.wait_for_space().await;
                        }
                        opened => return opened.expect("it is the newest"),
                    }
                }
            }
        });
        let last = loop {
            let next = batch(id, list.next().max(list.start.0), 1, 100);
            match older.append(new_batch(&next)) {
                Ok(_) => list.batches.push(next),
                // Never forever: opening uses space that appends do not use.
                Err(AppendError::Full) => {}
                Err(AppendError::Fenced { newest, .. }) => break newest,
                Err(error) => panic!("append: {error}"),
            }
            tokio::task::yield_now().await;
        };
        assert_eq!(last, epoch);
        let newer = tokio::time::timeout(HANG, opening).await.expect("it hangs").unwrap();
        let end = newer.next_offset();
        assert_eq!((end, end), (newer.durable_end(), StreamOffset(list.next()).max(list.start)));
        (list.epoch, list.acknowledged) = (epoch.0, list.batches.len());
        assert_refused(older.trim(end).await.err());
        assert_refused(server.store.open_stream(id, older.epoch()).await.err());
        match self.random.below(2) {
            0 => assert_refused(older.delete().await.err()),
            _ => assert_refused(older.close().await.err()),
        }
        writers.insert(id, newer);
    }

    /// Begins to set a value; the run may end at any moment of that.
    async fn begin_to_change(&mut self, server: &Server) {
        let (key, value) = (CHANGING.to_owned(), vec![self.random.below(256) as u8]);
        self.changing = Some(value.clone());
        let store = server.store.clone();
        tokio::spawn(async move { store.commit(vec![Change::PutMeta { key, value }]).await });
        for _ in 0..self.random.below(20) {
            tokio::task::yield_now().await;
        }
    }

    /// Begins to open a stream; the run may end at any moment of that.
    async fn begin_to_open(&mut self, server: &Server) {
        let Some((id, list)) = self.lists.iter_mut().next() else { return };
        let (id, epoch) = (*id, list.epoch + 1);
        list.opening = Some(epoch);
        let store = server.store.clone();
        tokio::spawn(async move { drop(store.open_stream(id, StreamEpoch(epoch)).await) });
        for _ in 0..self.random.below(20) {
            tokio::task::yield_now().await;
        }
    }

    async fn acknowledge(&mut self, pending: &mut Vec<(StreamId, Append, usize)>) {
        for (of, append, count) in pending.drain(..) {
            append.await.unwrap();
            let list = self.lists.get_mut(&of).unwrap();
            list.acknowledged = list.acknowledged.max(count);
        }
    }

    async fn fetch(&mut self, server: &Server, stream: &Stream) {
        let max_bytes = 1 + self.random.below(30_000) as usize;
        let list = &self.lists[&stream.id()];
        let from = StreamOffset(self.random.below(list.next() + 2));
        let durable = stream.durable_end();
        match stream.fetch(from, max_bytes).await {
            Ok(fetched) => {
                assert!(from >= list.start && from.0 <= list.next().max(list.start.0));
                let expected = list.from(from);
                assert_eq!(fetched.batches, expected[..fetched.batches.len()], "from {from}");
                assert!(fetched.durable_end >= durable);
                let anything = expected.first().is_some_and(|first| first.end() <= durable);
                assert!(!fetched.batches.is_empty() || !anything, "nothing from {from}");
            }
            Err(FetchError::OutOfRange { .. }) => {
                assert!(from < list.start || from.0 > list.next(), "{from} is there");
            }
            Err(FetchError::Failed(error)) => {
                assert!(server.objects.down.load(Ordering::SeqCst), "{error}");
            }
            Err(error) => panic!("{error}"),
        }
    }

    async fn search(&mut self, server: &Server, stream: &Stream) {
        let list = &self.lists[&stream.id()];
        let time = self.random.below(list.next() * 10 + 20).cast_signed();
        let durable = stream.durable_end();
        let expected = list.from(list.start).iter().find(|batch| batch.max_timestamp_ms >= time);
        match stream.find_time(time).await {
            Ok(Some(found)) => assert_eq!(Some(&found), expected, "at {time}"),
            Ok(None) => assert!(expected.is_none_or(|batch| batch.end() > durable), "at {time}"),
            Err(error) => assert!(server.objects.down.load(Ordering::SeqCst), "{error}"),
        }
    }

    async fn trim(&mut self, server: &Server, stream: &StreamWriter) {
        let list = self.lists.get_mut(&stream.id()).unwrap();
        // At most the durable end.
        let to = StreamOffset(self.random.below(stream.durable_end().0 + 1));
        with_space(server, async || stream.trim(to).await).await.unwrap();
        list.start = list.start.max(to);
        assert_eq!(stream.start_offset(), list.start);
        // What is trimmed was durable.
        let durable = list.batches.partition_point(|batch| batch.end() <= to);
        list.acknowledged = list.acknowledged.max(durable);
    }
}

fn assert_refused(error: Option<StoreError>) {
    match error {
        Some(StoreError::Fenced { epoch, newest, .. }) => assert!(epoch < newest),
        other => panic!("an older writer was not refused as one: {other:?}"),
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect(name))
}

#[test]
fn streams_are_lists() {
    let (start, seeds) = (number("ALLUVIUM_MODEL_START", 0), number("ALLUVIUM_MODEL_SEEDS", 150));
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (mut compactions, mut uploads) = (0, 0);
    for seed in start..start + seeds {
        let mut run = Run::new(seed);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            runtime.block_on(run.run_servers());
        }));
        if let Err(panic) = outcome {
            eprintln!("seed {seed}: ALLUVIUM_MODEL_START={seed} ALLUVIUM_MODEL_SEEDS=1");
            std::panic::resume_unwind(panic);
        }
        compactions += run.compactions;
        uploads += run.uploads;
        if (seed + 1 - start).is_multiple_of(1000) {
            println!(
                "{} of {seeds} seeds: {uploads} uploads, {compactions} compactions",
                seed + 1 - start
            );
        }
    }
    assert!(
        uploads > seeds && (seeds < 100 || compactions > seeds / 10),
        "{uploads} {compactions}"
    );
}
