//! Servers that open, lose and write one chain concurrently, by seed, over an object store that is
//! slow, loses requests and answers, and delivers some requests after it has reported an error.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use alluvium_device::sim::Random;
use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    Result,
};
use parking_lot::Mutex;

use super::*;
use crate::chain::CleanUp;
use crate::sequence::Sealed;

const STORE: Uuid = Uuid::from_u128(1);
const WAL: Uuid = Uuid::from_u128(2);
/// Age at which objects are deleted: longer than it takes to load a chain.
const KEPT: Duration = Duration::from_secs(300);
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// An object store with faults.
#[derive(Clone)]
struct Faulty {
    inner: Arc<InMemory>,
    random: Arc<Mutex<Random>>,
    /// The chance of a fault, in percent.
    fault_percent: u64,
    created: Arc<Mutex<Created>>,
    /// When each object was written, from the start of the run.
    written: Arc<Mutex<BTreeMap<Path, Duration>>>,
    start: Instant,
    hides_snapshots: bool,
}

/// The objects of the chain that were ever created, also if they were deleted since.
#[derive(Default)]
struct Created {
    first: BTreeMap<u64, Bytes>,
    /// Numbers that were used before.
    again: Vec<u64>,
    bodies: BTreeMap<Path, Bytes>,
}

impl Faulty {
    fn new(seed: u64, fault_percent: u64) -> Self {
        Self {
            inner: Arc::new(InMemory::new()),
            random: Arc::new(Mutex::new(Random::new(seed))),
            fault_percent,
            created: Arc::default(),
            written: Arc::default(),
            start: Instant::now(),
            hides_snapshots: false,
        }
    }

    /// Waits as long as a request takes. Returns 0 if there is no fault, else its kind.
    async fn fault(&self) -> u64 {
        let (delay, fault) = {
            let mut random = self.random.lock();
            let most = if random.chance(0.1) { 4000 } else { 50 };
            let has_fault = random.below(100) < self.fault_percent;
            (random.below(most), if has_fault { 1 + random.below(3) } else { 0 })
        };
        tokio::time::sleep(Duration::from_millis(delay)).await;
        fault
    }

    /// Puts an object and records it.
    async fn put(&self, to: Path, data: PutPayload, options: PutOptions) -> Result<PutResult> {
        let is_create = options.mode == PutMode::Create;
        let bytes = Bytes::from_iter(data.iter().flatten().copied());
        let result = self.inner.put_opts(&to, data, options).await?;
        let mut created = self.created.lock();
        if is_create {
            let number = u64::from_str_radix(to.filename().unwrap(), 16).unwrap();
            match created.first.entry(number) {
                Entry::Vacant(entry) => drop(entry.insert(bytes)),
                Entry::Occupied(_) => created.again.push(number),
            }
        } else {
            created.bodies.insert(to.clone(), bytes);
        }
        self.written.lock().insert(to, self.start.elapsed());
        Ok(result)
    }

    async fn delete(&self, name: Path) -> Result<Path> {
        match self.fault().await {
            0 => {}
            1 => return Self::failed(),
            2 => {
                let _ = self.inner.delete(&name).await;
                return Self::failed();
            }
            _ => {
                let (inner, name) = (self.inner.clone(), name.clone());
                let delay = Duration::from_secs(self.random.lock().below(100));
                tokio::spawn(async move {
                    tokio::time::sleep(delay).await;
                    let _ = inner.delete(&name).await;
                });
                return Self::failed();
            }
        }
        self.inner.delete(&name).await.map(|()| name)
    }

    fn failed<T>() -> Result<T> {
        Err(Error::Generic { store: "Faulty", source: "broken pipe".into() })
    }
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

#[async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(
        &self,
        to: &Path,
        data: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let this = self.clone();
        let (is_create, name) = (options.mode == PutMode::Create, to.to_string());
        let to = to.clone();
        let request = async move { this.put(to, data, options).await };
        // S3 answers a create that meets another one with 409.
        if is_create && self.random.lock().below(200) < self.fault_percent {
            let source = "409 ConditionalRequestConflict".into();
            return Err(Error::AlreadyExists { path: name, source });
        }
        match self.fault().await {
            0 => request.await,
            1 => Self::failed(),
            2 => {
                let _ = request.await;
                Self::failed()
            }
            _ => {
                let delay = Duration::from_secs(self.random.lock().below(100));
                tokio::spawn(async move {
                    tokio::time::sleep(delay).await;
                    let _ = request.await;
                });
                Self::failed()
            }
        }
    }

    async fn put_multipart_opts(
        &self,
        to: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(to, options).await
    }

    async fn get_opts(&self, from: &Path, options: GetOptions) -> Result<GetResult> {
        match self.fault().await {
            0 => self.inner.get_opts(from, options).await,
            _ => Self::failed(),
        }
    }

    fn delete_stream(
        &self,
        names: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let this = self.clone();
        let delete = move |name: Result<Path>| {
            let this = this.clone();
            async move { this.delete(name?).await }
        };
        names.then(delete).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let is_of_snapshots = prefix.is_some_and(|prefix| prefix.as_ref().ends_with("snapshots"));
        if is_of_snapshots && self.hides_snapshots {
            return futures::stream::empty().boxed();
        }
        let (this, prefix) = (self.clone(), prefix.cloned());
        let listing = async move {
            if this.fault().await != 0 {
                return futures::stream::iter([Self::failed()]).boxed();
            }
            let with_time = move |object: Result<ObjectMeta>| {
                let mut object = object?;
                let time = SystemTime::UNIX_EPOCH + this.written.lock()[&object.location];
                object.last_modified = time.into();
                Ok(object)
            };
            // Names in no particular order.
            let mut found: Vec<_> = this.inner.list(prefix.as_ref()).map(with_time).collect().await;
            if !found.is_empty() {
                let first = this.random.lock().index(found.len());
                found.rotate_left(first);
            }
            futures::stream::iter(found).boxed()
        };
        futures::stream::once(listing).flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

/// A rule that a run leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    Nothing,
    /// No rule, but the deletion of this module instead of that of the product.
    DeletesHere,
    /// Fences are deleted like other objects.
    KeepsNoFence,
    /// The object right below a fence is deleted like others.
    KeepsFencesAlone,
    /// An opening does not list the snapshots after its fence.
    ListsNoSnapshots,
    /// A writer gives up a delta that was not answered, and publishes another one.
    RewritesAfterTimeout,
}

/// What the servers of a run share.
struct World {
    objects: Faulty,
    broken: Broken,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    /// Fences that were won: their openings and numbers.
    fences: Vec<(u32, u64)>,
    /// Metadata whose delta was published.
    published: BTreeMap<String, Bytes>,
    next_value: u64,
    happened: Happened,
}

/// What happened in the runs.
#[derive(Clone, Copy, Debug, Default)]
struct Happened {
    opened: usize,
    published: usize,
    fenced: usize,
    snapshots: usize,
    deleted: usize,
    began_again: usize,
}

type Outcome = std::result::Result<(), String>;

/// One process after the other on one machine.
struct Server {
    node: u32,
    random: Random,
    chain: Chain,
    world: Arc<World>,
}

impl Server {
    async fn run(mut self) -> Outcome {
        for _ in 0..6 {
            let state = match self.chain.load().await {
                Ok(state) => state,
                Err(error) if error.is_loss() => return Err(format!("a load: {error}")),
                Err(_) => continue,
            };
            self.sleep(5000).await;
            if let Some(mut writer) = self.open(state).await? {
                let mut clean_up = CleanUp::new(self.chain.clone());
                while !self.random.chance(0.02) && self.work(&mut writer, &mut clean_up).await? {
                    self.sleep(2000).await;
                    if writer.is_frozen() && self.random.chance(0.3) {
                        // It is replaced meanwhile, with a delta in flight.
                        self.sleep(5 * KEPT.as_millis() as u64).await;
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns a deadline for a request, which often permits only one attempt.
    fn deadline(&mut self) -> Instant {
        let most_ms = if self.random.chance(0.5) { 1 } else { 30_000 };
        Instant::now() + Duration::from_millis(self.random.below(most_ms))
    }

    /// Sleeps for at most this long, and sometimes much longer than objects are kept.
    async fn sleep(&mut self, most_ms: u64) {
        let most_ms = if self.random.chance(0.05) { 5 * KEPT.as_millis() as u64 } else { most_ms };
        tokio::time::sleep(Duration::from_millis(self.random.below(most_ms))).await;
    }

    async fn open(
        &mut self,
        state: Option<ChainState>,
    ) -> std::result::Result<Option<ChainWriter>, String> {
        let known = self.world.seen.lock().published.clone();
        let (node, least_epoch) = (self.node, 1 + self.random.below(3) as u32);
        let mut decisions = 0;
        let decide = |state: Option<&ChainState>| {
            decisions += 1;
            Ok::<_, ()>(Fence {
                wal: WAL,
                epoch: least_epoch.max(state.map_or(0, |state| state.header.epoch)),
                incarnation: Uuid::new_v4(),
                node,
                written_at_ms: 0,
                term: None,
                next_stream: StreamId(0),
                own: Vec::new(),
                hints: Hints::new(),
            })
        };
        let until = self.deadline();
        let chain = match self.world.broken {
            Broken::ListsNoSnapshots => {
                let objects = Faulty { hides_snapshots: true, ..self.world.objects.clone() };
                chain(objects)
            }
            _ => self.chain.clone(),
        };
        let mut writer = match ChainWriter::open(chain, state, until, decide).await {
            Ok(writer) => writer,
            Err(FenceError::Object(error)) if !error.is_loss() => return Ok(None),
            Err(error) => return Err(format!("{error:?}")),
        };
        writer.chain = self.chain.clone();
        let state = writer.state();
        let mut seen = self.world.seen.lock();
        seen.fences.push((state.header.opening, state.head.number));
        seen.happened.opened += 1;
        seen.happened.began_again += usize::from(decisions > 1);
        // What was published before this opening began; later ones may be after its fence.
        match known.iter().find(|(key, value)| state.meta.get(*key) != Some(value)) {
            Some((key, _)) => Err(format!("{key} was published, and an opening lacks it")),
            None => Ok(Some(writer)),
        }
    }

    /// Returns false if the server has stopped.
    async fn work(
        &mut self,
        writer: &mut ChainWriter,
        clean_up: &mut CleanUp,
    ) -> std::result::Result<bool, String> {
        let world = self.world.clone();
        match self.random.below(20) {
            0 | 1 => {
                let snapshot = Snapshot::of(writer.state().clone());
                let is_written = self.chain.write_snapshot(snapshot).await.is_ok();
                world.seen.lock().happened.snapshots += usize::from(is_written);
            }
            2 => {
                let deleted = match world.broken {
                    Broken::DeletesHere | Broken::KeepsNoFence | Broken::KeepsFencesAlone => {
                        self.clean_up_here().await
                    }
                    _ => clean_up.run(KEPT).await,
                };
                match deleted {
                    Ok(deleted) => world.seen.lock().happened.deleted += deleted,
                    Err(error) if error.is_loss() => return Err(format!("clean-up: {error}")),
                    Err(_) => {}
                }
            }
            _ => return self.publish(writer).await,
        }
        Ok(true)
    }

    async fn publish(&mut self, writer: &mut ChainWriter) -> std::result::Result<bool, String> {
        let world = self.world.clone();
        if world.broken == Broken::RewritesAfterTimeout {
            writer.frozen = None;
        }
        if !writer.is_frozen() {
            let key = {
                let mut seen = world.seen.lock();
                seen.next_value += 1;
                format!("{}", seen.next_value)
            };
            // Some bodies are objects of their own.
            let length = if self.random.chance(0.3) { 400 } else { 40 };
            let length = self.random.index(length);
            let value: Bytes = (0..length).map(|_| self.random.next_u64() as u8).collect();
            let version = writer.state().header.version;
            let changes = vec![ChainChange::PutMeta { key, value }];
            writer.freeze(Delta {
                version: version + 2,
                recorded: vec![Recorded { version: version + 1, changes }],
                own: Vec::new(),
                hints: Hints::new(),
                cut: LogOffset(version),
                wal_mark: 0,
                next_stream: StreamId(0),
                is_clean: false,
                written_at_ms: 0,
            });
        }
        let entry = writer.frozen.clone().unwrap().entry;
        let until = self.deadline();
        let result = writer.publish(until).await;
        let mut seen = world.seen.lock();
        match result {
            Ok(()) => {
                let BodyHeader { opening, .. } = entry.body.header;
                let later =
                    seen.fences.iter().find(|(it, fence)| *it > opening && *fence <= entry.number);
                if let Some((later, fence)) = later {
                    return Err(format!(
                        "opening {opening} has published number {} after fence {fence} of \
                         opening {later}",
                        entry.number
                    ));
                }
                if world.objects.created.lock().again.contains(&entry.number) {
                    return Err(format!("number {} was created twice", entry.number));
                }
                let ChainChange::PutMeta { key, value } = &entry.body.recorded[0].changes[0] else {
                    unreachable!("it was built so");
                };
                seen.published.insert(key.clone(), value.clone());
                seen.happened.published += 1;
                Ok(true)
            }
            Err(PublishError::Fenced { by, .. }) => {
                seen.happened.fenced += 1;
                match by {
                    By::Server { incarnation, .. }
                        if incarnation == entry.body.header.incarnation =>
                    {
                        Err("a server was fenced by itself".into())
                    }
                    _ => Ok(false),
                }
            }
            Err(PublishError::Object(error)) if !error.is_loss() => Ok(true),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Deletes as [`CleanUp`], or without one of its rules.
    async fn clean_up_here(&mut self) -> std::result::Result<usize, ObjectError> {
        let chain = &self.chain;
        let snapshots = chain.snapshots().await?;
        let objects = chain.sequence.listed_with_times().await?;
        let (Some(second), Some((_, newest))) = (snapshots.get(1), objects.last_key_value()) else {
            return Ok(0);
        };
        let is_old = |written: SystemTime| written + KEPT <= *newest;
        let mut deleted = 0;
        for (number, written) in &objects {
            if *number >= second.number || !is_old(*written) || !is_old(second.written) {
                continue;
            }
            let is_fence = async |number: u64| {
                let found = chain.sequence.identity(number).await?;
                Ok(found.is_some_and(|it| it.kind == ObjectKind::Fence.number()))
            };
            let stays = match self.world.broken {
                Broken::KeepsNoFence => false,
                Broken::KeepsFencesAlone => is_fence(*number).await?,
                _ => is_fence(*number).await? || is_fence(*number + 1).await?,
            };
            if !stays {
                chain.sequence.delete([*number]).await?;
                deleted += 1;
            }
        }
        for snapshot in snapshots[2..].iter().filter(|snapshot| is_old(snapshot.written)) {
            chain.delete_snapshot(snapshot).await?;
        }
        Ok(deleted)
    }
}

/// The chain as a server sees it: bodies of more than 200 bytes are objects of their own.
fn chain(objects: Faulty) -> Chain {
    let mut chain = Chain::new(Arc::new(objects), STORE, RETRY);
    chain.max_body_bytes = 200;
    chain
}

/// Compares the chain with everything that was ever created.
async fn check(world: &World) -> Outcome {
    let quiet = Chain::new(world.objects.inner.clone(), STORE, RETRY);
    let Some(loaded) = quiet.load().await.map_err(|error| error.to_string())? else {
        return Ok(());
    };
    let seen = world.seen.lock();
    for (key, value) in &seen.published {
        if loaded.meta.get(key) != Some(value) {
            return Err(format!("{key} was published and is lost"));
        }
    }
    let mut state = None;
    let created = world.objects.created.lock();
    for (number, bytes) in &created.first {
        let object = Sealed::decode(*number, bytes).unwrap();
        let name = format!("{}/{number:016x}-{}", quiet.bodies_prefix(), object.nonce.simple());
        let body = created.bodies.get(&name.as_str().into()).unwrap_or(&object.body);
        let entry = super::Entry::decode(&object, body).unwrap();
        quiet.extend(&mut state, entry).map_err(|error| error.to_string())?;
    }
    match state.as_ref() == Some(&loaded) {
        true => Ok(()),
        false => Err("the loaded state is not that of all objects".into()),
    }
}

async fn run(seed: u64, broken: Broken) -> std::result::Result<Happened, String> {
    let mut random = Random::new(seed);
    let fault_percent = [0, 5, 20][random.index(3)];
    let objects = Faulty::new(seed, fault_percent);
    let world = Arc::new(World { objects: objects.clone(), broken, seen: Mutex::default() });
    let servers = (0..3).map(|node| {
        let chain = chain(objects.clone());
        let random = Random::new(random.next_u64());
        tokio::spawn(Server { node, random, chain, world: world.clone() }.run())
    });
    for server in servers.collect::<Vec<_>>() {
        server.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?;
    }
    tokio::time::sleep(Duration::from_secs(200)).await;
    check(&world).await?;
    let happened = world.seen.lock().happened;
    Ok(happened)
}

fn in_simulated_time<T>(run: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_time().start_paused(true).build().unwrap().block_on(run)
}

fn seeds(default: u64) -> u64 {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    number("ALLUVIUM_MODEL_SEEDS").unwrap_or(default)
}

#[test]
fn one_server_at_a_time_has_the_chain_and_nothing_published_is_lost() {
    let mut all = Happened::default();
    for seed in 0..seeds(150) {
        let happened = in_simulated_time(run(seed, Broken::Nothing))
            .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        all.opened += happened.opened;
        all.published += happened.published;
        all.fenced += happened.fenced;
        all.snapshots += happened.snapshots;
        all.deleted += happened.deleted;
        all.began_again += happened.began_again;
    }
    println!("{all:?}");
    let Happened { opened, published, fenced, snapshots, deleted, began_again } = all;
    assert!(opened > 0 && published > 0 && fenced > 0 && snapshots > 0);
    assert!(deleted > 0 && began_again > 0);
}

/// Where the error is, by which the absence of a rule is found.
#[test]
fn each_broken_rule_is_found() {
    for (broken, expected) in [
        (Broken::KeepsNoFence, ["is not the object that this server knows", "after fence"]),
        (Broken::KeepsFencesAlone, ["is not the object that this server knows", "created twice"]),
        (Broken::ListsNoSnapshots, ["and an opening lacks it", "published and is lost"]),
        (Broken::RewritesAfterTimeout, ["fenced by itself", "fenced by itself"]),
    ] {
        let found = (0..2000).find_map(|seed| in_simulated_time(run(seed, broken)).err());
        let found = found.unwrap_or_else(|| panic!("{broken:?} is not found"));
        assert!(expected.iter().any(|text| found.contains(text)), "{broken:?}: {found}");
        println!("{broken:?}: {found}");
    }
    for seed in 0..seeds(30) {
        in_simulated_time(run(seed, Broken::DeletesHere))
            .unwrap_or_else(|error| panic!("seed {seed}, no rule is broken: {error}"));
    }
}
