//! Reading objects: verified blocks and indexes, a cache of them in memory and one on disk, and a
//! bound on the bytes in flight. How cold reads avoid disturbing other traffic:
//! `docs/cold-reads.md`.

mod ahead_buffer;
mod load;
mod stream_blocks;

use std::ops;
use std::pin::Pin;
use std::sync::Arc;

use object_store::ObjectStore;
use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{DefaultHashBuilder, OptionsBuilder, Weighter};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::counted::CountedStores;
use super::disk::{DiskCache, DiskCacheStats};
use super::flight::{Flight, FlightGuard, Flights, UnderWay};
use super::numbers::{Ahead, ReadNumbers, ReadStats};
use super::whole::delete_object;
use super::{Requests, StoreHandle};
use crate::background::Background;
use crate::bandwidth::Transfers;
use crate::budget::Budget;
use crate::catalog::ObjectInfo;
use crate::error::StoreError;
use crate::losses::Losses;
use crate::object::{Block, Damage, ENTRY_BYTES, Top};
use crate::object_error::ObjectError;
use crate::options::Options;
use crate::range::Range;
use crate::request_class::RequestClass;
use crate::types::{Batch, ObjectId, StreamId, StreamOffset};
use ahead_buffer::ReadAheadBuffer;
use stream_blocks::StreamBlocks;

/// One GET fetches neighbouring blocks up to this size.
pub(crate) const READ_BYTES: u64 = 8 << 20;
/// The share of the cache for blocks that were read more than once. The rest is for new blocks,
/// which must stay until the readers that follow a first reader have read them. (The policy's own
/// default leaves 3 % for that.)
const HOT_SHARE: f64 = 0.5;
/// Bytes per permit of the bound on bytes in flight.
const PERMIT_BYTES: u64 = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Key {
    /// The whole index, or its top.
    Index(ObjectId),
    /// By number.
    Page(ObjectId, usize),
    /// By position.
    Block(ObjectId, u64),
}

#[derive(Clone)]
enum Cached {
    /// A whole index.
    Index(Arc<Vec<Block>>),
    Top(Arc<Top>),
    Page(Arc<Vec<Block>>),
    Block(Arc<Decoded>),
}

/// The verified batches of a block.
pub(crate) struct Decoded {
    pub(crate) batches: Vec<Batch>,
    len_bytes: u32,
    /// Set if it was read ahead, before any request.
    ahead: Option<Ahead>,
}

#[derive(Clone)]
struct ByBytes;

impl Weighter<Key, Cached> for ByBytes {
    fn weight(&self, _: &Key, value: &Cached) -> u64 {
        match value {
            Cached::Index(blocks) | Cached::Page(blocks) => {
                (blocks.len() * size_of::<Block>()) as u64 + 64
            }
            Cached::Top(top) => top.memory_bytes() as u64,
            Cached::Block(block) => {
                u64::from(block.len_bytes) + (block.batches.len() * size_of::<Batch>()) as u64
            }
        }
    }
}

/// The result of a GET, until all of its readers have taken it.
struct FetchedParts {
    parts: Vec<(Key, Result<Cached, ObjectError>)>,
    /// Permits of the bound on bytes in flight.
    _permit: OwnedSemaphorePermit,
}

type FetchResult = Result<Arc<FetchedParts>, ObjectError>;

/// What read-ahead was granted before it begins.
struct ReadAheadGrant {
    permit: OwnedSemaphorePermit,
    /// Bytes of bandwidth granted; 0 for blocks that seem to be on disk.
    granted_bytes: u64,
    ahead: Vec<Ahead>,
}

/// The object store with a cache of verified blocks and indexes. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Objects {
    core: Arc<Core>,
}

struct Core {
    stores: CountedStores,
    cache: Cache<Key, Cached, ByBytes>,
    cache_bytes: u64,
    /// Blocks that were read ahead. Their memory is taken from the cache's: the amount that may be
    /// read ahead.
    ahead_buffer: ReadAheadBuffer,
    disk: Option<DiskCache>,
    flights: Flights<Key, FetchResult>,
    background: Arc<Background>,
    /// Permits for bytes in flight, in units of [`PERMIT_BYTES`]. First come, first served.
    permits: Arc<Semaphore>,
    total_permits: u32,
    /// Bound on blocks read ahead that are in flight or unread.
    ahead_bytes: u64,
    transfers: Transfers,
    numbers: Arc<ReadNumbers>,
    losses: Arc<Losses>,
}

/// Completes when a reader stops waiting. It is not polled again after that.
pub(crate) type Deadline<'a> = Pin<&'a mut (dyn Future<Output = ()> + Send + 'a)>;

/// What was read of an object.
#[derive(Default)]
pub(crate) struct Part {
    pub(crate) batches: Vec<Batch>,
    /// The fetch that the reader stopped waiting for. It runs as long as this is kept.
    pub(crate) deferred: Option<FlightGuard>,
}

/// The result of waiting with a deadline.
enum Outcome<T> {
    Ready(T),
    Deferred(FlightGuard),
}

impl Objects {
    /// Creates the reader.
    ///
    /// # Errors
    /// The threads for cold reads cannot be started.
    pub(crate) fn new(
        stores: CountedStores,
        options: &Options,
        losses: Arc<Losses>,
    ) -> Result<Self, StoreError> {
        let background = Arc::new(Background::start(options.background_threads)?);
        let ahead_bytes = (options.cold_read_bytes / 2).min(options.block_cache_bytes / 4);
        let cache_bytes = options.block_cache_bytes - ahead_bytes;
        let expected_items =
            usize::try_from(cache_bytes >> 18).unwrap_or(usize::MAX).clamp(16, 1 << 20);
        // One shard: a block may be as large as the share of a shard, and the lock is held only
        // briefly.
        let cache_options = OptionsBuilder::new()
            .shards(1)
            .estimated_items_capacity(expected_items)
            .weight_capacity(cache_bytes)
            .hot_allocation(HOT_SHARE)
            .build()
            .expect("every option without a default is set");
        let cache = Cache::with_options(
            cache_options,
            ByBytes,
            DefaultHashBuilder::default(),
            DefaultLifecycle::default(),
        );
        let total_permits = permits_for(options.cold_read_bytes);
        let core = Core {
            stores,
            cache,
            cache_bytes,
            ahead_buffer: ReadAheadBuffer::default(),
            disk: options.disk_cache.as_ref().map(DiskCache::start),
            flights: Flights::new(background.clone()),
            background,
            permits: Arc::new(Semaphore::new(total_permits as usize)),
            total_permits,
            ahead_bytes,
            transfers: Transfers::new(options.object_store_bytes_per_s),
            numbers: Arc::default(),
            losses,
        };
        Ok(Self { core: Arc::new(core) })
    }

    /// Returns the limits on transfers.
    pub(crate) fn transfers(&self) -> &Transfers {
        &self.core.transfers
    }

    /// Returns the access to the object store for transfers of many bytes.
    pub(crate) fn handle(&self, class: RequestClass) -> StoreHandle<'_> {
        StoreHandle::new(self.store(class), &self.core.transfers, class)
    }

    /// Returns the object store for requests of this class.
    pub(crate) fn store(&self, class: RequestClass) -> &dyn ObjectStore {
        self.core.stores.get(class)
    }

    pub(crate) fn requests(&self) -> Vec<Requests> {
        self.core.stores.requests()
    }

    /// Returns where cold reads and other background work run.
    pub(crate) fn background(&self) -> &Background {
        &self.core.background
    }

    pub(crate) fn cached_bytes(&self) -> u64 {
        self.core.cache.weight() + self.core.ahead_buffer.bytes()
    }

    pub(crate) fn read_stats(&self) -> ReadStats {
        self.core.numbers.stats()
    }

    pub(crate) fn disk_cache_stats(&self) -> DiskCacheStats {
        self.core.disk.as_ref().map(DiskCache::stats).unwrap_or_default()
    }

    /// Closes the disk cache. Reads continue without it.
    pub(crate) async fn close(&self) {
        if let Some(disk) = &self.core.disk {
            disk.close().await;
        }
    }

    /// Deletes an object; a missing one counts as deleted.
    pub(crate) async fn delete(&self, name: &str) -> Result<(), ObjectError> {
        delete_object(self.store(RequestClass::CleanUp), name).await
    }

    /// Returns the blocks of `stream` that end after `from`, in offset order, perhaps with some
    /// before them.
    pub(crate) async fn blocks(
        &self,
        object: &Arc<ObjectInfo>,
        stream: StreamId,
        from: StreamOffset,
    ) -> Result<StreamBlocks, ObjectError> {
        match self.blocks_by_deadline(object, stream, from, &mut None).await? {
            Outcome::Ready(blocks) => Ok(blocks),
            Outcome::Deferred(_) => unreachable!("a read without a deadline is never deferred"),
        }
    }

    async fn blocks_by_deadline(
        &self,
        object: &Arc<ObjectInfo>,
        stream: StreamId,
        from: StreamOffset,
        deadline: &mut Option<Deadline<'_>>,
    ) -> Result<Outcome<StreamBlocks>, ObjectError> {
        let index = match self.index_by_deadline(object, deadline).await? {
            Outcome::Ready(index) => index,
            Outcome::Deferred(guard) => return Ok(Outcome::Deferred(guard)),
        };
        let top = match index {
            Cached::Index(index) => {
                return Ok(Outcome::Ready(StreamBlocks::new(index, stream)));
            }
            Cached::Top(top) => top,
            Cached::Page(_) | Cached::Block(_) => unreachable!("the key is an index's"),
        };
        let numbers = top.pages_of(stream, from);
        match self.pages_by_deadline(object, &top, numbers, deadline).await? {
            Outcome::Ready(pages) => Ok(Outcome::Ready(StreamBlocks::of_pages(&pages, stream))),
            Outcome::Deferred(guard) => Ok(Outcome::Deferred(guard)),
        }
    }

    /// Returns the index of an object, or its top.
    async fn index_by_deadline(
        &self,
        object: &Arc<ObjectInfo>,
        deadline: &mut Option<Deadline<'_>>,
    ) -> Result<Outcome<Cached>, ObjectError> {
        let key = Key::Index(object.id);
        let mut last_try = false;
        loop {
            if let Some(index) = self.core.cache.get(&key) {
                return Ok(Outcome::Ready(index));
            }
            let mut flight = {
                let mut under_way = self.core.flights.lock();
                match under_way.join(&key) {
                    Some(flight) => flight,
                    None if self.core.cache.peek(&key).is_some() => continue,
                    None => {
                        last_try = true;
                        let fetch = self.core.clone().load_index(object.clone());
                        self.core.flights.start(&mut under_way, vec![key], fetch)
                    }
                }
            };
            match self.wait(&object.name, &mut flight, object.index_bytes, deadline).await {
                Ok(Outcome::Ready(fetched)) => return fetched.part(key).map(Outcome::Ready),
                Ok(Outcome::Deferred(guard)) => return Ok(Outcome::Deferred(guard)),
                Err(error) if last_try => return Err(error),
                // The failed fetch may have begun long before this reader came.
                Err(_) => last_try = true,
            }
        }
    }

    /// Returns pages of an index by number. One GET fetches those that are neighbours and not
    /// cached.
    async fn pages_by_deadline(
        &self,
        object: &Arc<ObjectInfo>,
        top: &Arc<Top>,
        numbers: ops::Range<usize>,
        deadline: &mut Option<Deadline<'_>>,
    ) -> Result<Outcome<Vec<Arc<Vec<Block>>>>, ObjectError> {
        let core = &self.core;
        let key = |number| Key::Page(object.id, number);
        let mut pages = Vec::with_capacity(numbers.len());
        let mut last_try = false;
        while pages.len() < numbers.len() {
            let next = numbers.start + pages.len();
            if let Some(Cached::Page(page)) = core.cache.get(&key(next)) {
                pages.push(page);
                last_try = false;
                continue;
            }
            let mut flight = {
                let mut under_way = core.flights.lock();
                match under_way.join(&key(next)) {
                    Some(flight) => flight,
                    None if core.cache.peek(&key(next)).is_some() => continue,
                    None => {
                        last_try = true;
                        let is_missing = |number: &usize| {
                            let key = key(*number);
                            !under_way.has(&key) && core.cache.peek(&key).is_none()
                        };
                        let count = (next..numbers.end).take_while(is_missing).count();
                        let run = next..next + count;
                        let keys = run.clone().map(key).collect();
                        let fetch = core.clone().load_pages(object.clone(), top.clone(), run);
                        core.flights.start(&mut under_way, keys, fetch)
                    }
                }
            };
            let len_bytes = numbers.clone().map(|number| top.page_bytes(number) as u64).sum();
            match self.wait(&object.name, &mut flight, len_bytes, deadline).await {
                Ok(Outcome::Ready(fetched)) => {
                    match fetched.part(key(next))? {
                        Cached::Page(page) => pages.push(page),
                        _ => unreachable!("the key is a page's"),
                    }
                    last_try = false;
                    for number in next + 1..numbers.end {
                        let Ok(Cached::Page(page)) = fetched.part(key(number)) else { break };
                        pages.push(page);
                    }
                }
                Ok(Outcome::Deferred(guard)) => return Ok(Outcome::Deferred(guard)),
                Err(error) if last_try => return Err(error),
                Err(_) => last_try = true,
            }
        }
        Ok(Outcome::Ready(pages))
    }

    /// Returns what [`Self::blocks`] would, as far as that part of the index is cached.
    fn cached_blocks(
        &self,
        object: &ObjectInfo,
        stream: StreamId,
        from: StreamOffset,
    ) -> Option<StreamBlocks> {
        let top = match self.core.cache.get(&Key::Index(object.id))? {
            Cached::Index(index) => return Some(StreamBlocks::new(index, stream)),
            Cached::Top(top) => top,
            Cached::Page(_) | Cached::Block(_) => unreachable!("the key is an index's"),
        };
        let cached = |number| match self.core.cache.get(&Key::Page(object.id, number)) {
            Some(Cached::Page(page)) => Some(page),
            _ => None,
        };
        let pages: Vec<_> = top.pages_of(stream, from).map_while(cached).collect();
        Some(StreamBlocks::of_pages(&pages, stream))
    }

    /// Returns the batches of one block.
    pub(crate) async fn block(
        &self,
        object: &Arc<ObjectInfo>,
        block: &Block,
    ) -> Result<Arc<Decoded>, ObjectError> {
        match self.read(object, std::slice::from_ref(block), &mut None).await? {
            Outcome::Ready(mut run) => Ok(run.blocks.remove(0)),
            Outcome::Deferred(_) => unreachable!("a read without a deadline is never deferred"),
        }
    }

    /// Returns the first of `blocks`, and those after it that the same GET fetched or the cache
    /// had.
    async fn read(
        &self,
        object: &Arc<ObjectInfo>,
        blocks: &[Block],
        deadline: &mut Option<Deadline<'_>>,
    ) -> Result<Outcome<Run>, ObjectError> {
        let core = &self.core;
        let cached = |block: &Block| core.cached_block(object.id, block);
        let mut last_try = false;
        loop {
            let found: Vec<_> = blocks.iter().map_while(cached).collect();
            if !found.is_empty() {
                for (block, decoded) in blocks.iter().zip(&found) {
                    core.numbers.hit();
                    core.wanted(Key::Block(object.id, block.position), decoded);
                }
                return Ok(Outcome::Ready(Run { blocks: found, _fetched: None }));
            }
            let first = Key::Block(object.id, blocks[0].position);
            let mut flight = {
                let mut under_way = core.flights.lock();
                match under_way.join(&first) {
                    Some(flight) => flight,
                    None if cached(&blocks[0]).is_some() => continue,
                    None => {
                        last_try = true;
                        core.start(&mut under_way, object, blocks)
                    }
                }
            };
            let len_bytes = u64::from(blocks[0].len_bytes);
            match self.wait(&object.name, &mut flight, len_bytes, deadline).await {
                Ok(Outcome::Ready(fetched)) => {
                    let mut run = Vec::new();
                    for block in blocks {
                        let key = Key::Block(object.id, block.position);
                        match fetched.part(key) {
                            Ok(Cached::Block(decoded)) => {
                                core.numbers.miss();
                                core.wanted(key, &decoded);
                                run.push(decoded);
                            }
                            // The blocks before the damage can be read; a reader that continues
                            // from there gets the error first.
                            Err(error) if run.is_empty() => return Err(error),
                            _ => break,
                        }
                    }
                    return Ok(Outcome::Ready(Run { blocks: run, _fetched: Some(fetched) }));
                }
                Ok(Outcome::Deferred(guard)) => return Ok(Outcome::Deferred(guard)),
                Err(error) if last_try => return Err(error),
                // The failed fetch may have been for other blocks, or have had no reader at first.
                Err(_) => last_try = true,
            }
        }
    }

    /// Waits for a fetch until the reader's deadline. The deadline is ignored for data that the
    /// cache cannot keep until the reader comes back for it.
    async fn wait(
        &self,
        name: &str,
        flight: &mut Flight<FetchResult>,
        len_bytes: u64,
        deadline: &mut Option<Deadline<'_>>,
    ) -> Result<Outcome<Arc<FetchedParts>>, ObjectError> {
        let _waiting = self.core.numbers.waiting();
        let is_kept = len_bytes.saturating_mul(2) <= self.core.cache_bytes;
        let result = match deadline {
            Some(deadline) if is_kept => tokio::select! {
                biased;
                result = flight.result() => result,
                () = deadline => return Ok(Outcome::Deferred(flight.guard())),
            },
            _ => flight.result().await,
        };
        result.unwrap_or_else(|| Err(ObjectError::defect(name))).map(Outcome::Ready)
    }

    /// Returns batches of `stream` that end after `from`, up to the budget, the reader's deadline,
    /// or data that cannot be read; fails only if the latter comes first. They keep at most twice
    /// the memory of their payload alive.
    pub(crate) async fn fetch(
        &self,
        object: &Arc<ObjectInfo>,
        stream: StreamId,
        from: StreamOffset,
        budget: &mut Budget,
        deadline: &mut Option<Deadline<'_>>,
    ) -> Result<Part, ObjectError> {
        let mut part = Part::default();
        let blocks = match self.blocks_by_deadline(object, stream, from, deadline).await? {
            Outcome::Ready(blocks) => blocks,
            Outcome::Deferred(guard) => return Ok(Part { deferred: Some(guard), ..part }),
        };
        let blocks = blocks.after(from);
        let mut next = 0;
        while next < blocks.len() && !budget.is_spent() {
            // A block is not fetched for the rest of the budget if hardly one of its batches would
            // fit.
            let a_batch_bytes = (blocks[next].len_bytes / blocks[next].entries) as usize;
            if budget.left_bytes() < a_batch_bytes
                && self.core.cached_block(object.id, &blocks[next]).is_none()
                && budget.close()
            {
                break;
            }
            // Do not read beyond the budget: a block's bytes are nearly all payload.
            let mut ahead = 0;
            let wanted = blocks[next..].iter().take_while(|block| {
                let wanted = ahead == 0 || ahead < budget.left_bytes();
                ahead += block.len_bytes as usize;
                wanted
            });
            let wanted = wanted.count();
            match self.read(object, &blocks[next..next + wanted], deadline).await {
                Ok(Outcome::Ready(run)) => {
                    for block in &run.blocks {
                        next += 1;
                        part.take(block, from, budget);
                    }
                }
                Ok(Outcome::Deferred(guard)) => {
                    part.deferred = Some(guard);
                    break;
                }
                Err(_) if !part.batches.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        self.core.numbers.returned(&part.batches);
        Ok(part)
    }

    /// Returns the error for an intact object whose index has no batches in this range and so
    /// contradicts the catalog.
    pub(crate) fn missing(&self, range: &Range) -> ObjectError {
        let (position, (start, end)) = (range.object.index_position, (range.start, range.end));
        let reason =
            format!("the index has no batches in {start}..{end}, where the catalog has some");
        self.core.damaged(&range.object, Damage { position, reason })
    }

    /// Returns what [`Self::fetch`] would, as far as it is in the cache.
    pub(crate) fn fetch_cached(
        &self,
        object: &ObjectInfo,
        stream: StreamId,
        from: StreamOffset,
        budget: &mut Budget,
    ) -> Vec<Batch> {
        let mut part = Part::default();
        if let Some(blocks) = self.cached_blocks(object, stream, from) {
            for block in blocks.after(from) {
                if budget.is_spent() {
                    break;
                }
                let Some(decoded) = self.core.cached_block(object.id, block) else { break };
                self.core.numbers.hit();
                self.core.wanted(Key::Block(object.id, block.position), &decoded);
                part.take(&decoded, from, budget);
            }
        }
        self.core.numbers.returned(&part.batches);
        part.batches
    }

    /// Whether read-ahead is possible: there must be memory for its blocks.
    pub(crate) fn reads_ahead(&self) -> bool {
        self.core.ahead_bytes > 0
    }

    /// Fetches those of `blocks` that are neither cached nor in flight, as far as spare memory and
    /// bandwidth allow. Returns the number of blocks that are taken care of, and the fetches, which
    /// run as long as the futures are kept.
    pub(crate) fn fetch_ahead(
        &self,
        object: &Arc<ObjectInfo>,
        blocks: &[Block],
    ) -> (usize, Vec<impl Future<Output = ()> + use<>>) {
        let core = &self.core;
        let mut flights: Vec<Flight<FetchResult>> = Vec::new();
        let mut under_way = core.flights.lock();
        let mut next = 0;
        while let Some(first) = blocks.get(next) {
            if let Some(flight) = under_way.join(&Key::Block(object.id, first.position)) {
                flights.push(flight);
                next += 1;
                continue;
            }
            let run = core.run(&under_way, object, &blocks[next..]);
            if run == 0 {
                next += 1; // it is in the cache
                continue;
            }
            let run = &blocks[next..next + run];
            let Some(grant) = core.grant_read_ahead(object, run) else { break };
            let fetch = core.clone().load(object.clone(), run.to_vec(), Some(grant));
            flights.push(core.flights.start(&mut under_way, keys(object.id, run), fetch));
            next += run.len();
        }
        let completed =
            |mut flight: Flight<FetchResult>| async move { drop(flight.result().await) };
        (next, flights.into_iter().map(completed).collect())
    }
}

impl Core {
    /// Caches a block that was fetched.
    fn keep(&self, key: Key, decoded: &Arc<Decoded>) {
        match decoded.ahead {
            None => self.cache.insert(key, Cached::Block(decoded.clone())),
            Some(_) => self.ahead_buffer.insert(key, decoded.clone()),
        }
    }

    /// Records a request for a block. One that was read ahead moves to the cache, as if it was
    /// fetched now.
    fn wanted(&self, key: Key, decoded: &Arc<Decoded>) {
        if decoded.ahead.as_ref().is_some_and(Ahead::wanted) {
            self.cache.insert(key, Cached::Block(decoded.clone()));
            self.ahead_buffer.remove(&key);
        }
    }

    fn cached_block(&self, object: ObjectId, block: &Block) -> Option<Arc<Decoded>> {
        let key = Key::Block(object, block.position);
        match self.cache.get(&key) {
            Some(Cached::Block(block)) => Some(block),
            _ => self.ahead_buffer.get(&key),
        }
    }

    fn may_be_on_disk(&self, object: &ObjectInfo, block: &Block) -> bool {
        self.disk.as_ref().is_some_and(|disk| disk.may_have(&object.name, block.position))
    }

    /// Returns how many blocks, from the first on, one GET or the disk is to read: a stream's
    /// blocks are neighbours in the object. The two are not mixed, so that a reader of blocks on
    /// disk does not wait for the object store.
    fn run(
        &self,
        under_way: &UnderWay<Key, FetchResult>,
        object: &ObjectInfo,
        blocks: &[Block],
    ) -> usize {
        let Some(first) = blocks.first() else { return 0 };
        let is_missing = |block: &Block| {
            let key = Key::Block(object.id, block.position);
            !under_way.has(&key) && self.cache.peek(&key).is_none() && !self.ahead_buffer.has(&key)
        };
        let is_on_disk = self.may_be_on_disk(object, first);
        let fits = |block: &Block| {
            block.position == first.position
                || block.position_end() - first.position <= READ_BYTES
                    && self.may_be_on_disk(object, block) == is_on_disk
        };
        blocks.iter().take_while(|block| is_missing(block) && fits(block)).count()
    }

    /// Starts a fetch for the first of `blocks`, which is missing, and for those after it that fit
    /// into the same GET.
    fn start(
        self: &Arc<Self>,
        under_way: &mut UnderWay<Key, FetchResult>,
        object: &Arc<ObjectInfo>,
        blocks: &[Block],
    ) -> Flight<FetchResult> {
        let run = self.run(under_way, object, blocks).max(1);
        let run = &blocks[..run];
        let fetch = self.clone().load(object.clone(), run.to_vec(), None);
        self.flights.start(under_way, keys(object.id, run), fetch)
    }

    async fn acquire_memory(&self, len_bytes: u64) -> OwnedSemaphorePermit {
        let wanted = permits_for(len_bytes).min(self.total_permits);
        let permit = self.permits.clone().acquire_many_owned(wanted).await;
        permit.expect("the semaphore is never closed")
    }

    /// Reserves what it takes to read a run of blocks ahead, if it is not needed otherwise: half of
    /// it is left for reads that are being waited for.
    fn grant_read_ahead(&self, object: &ObjectInfo, run: &[Block]) -> Option<ReadAheadGrant> {
        let len_bytes = span_bytes(run);
        let missing_bytes =
            |ahead_bytes: u64| (ahead_bytes + len_bytes).saturating_sub(self.ahead_bytes);
        if len_bytes <= self.ahead_bytes {
            self.ahead_buffer.drop_unrequested(missing_bytes(self.numbers.ahead_bytes()));
        }
        if missing_bytes(self.numbers.ahead_bytes()) > 0 {
            return None;
        }
        let permit = self.permits.clone().try_acquire_many_owned(permits_for(len_bytes)).ok()?;
        let granted_bytes = if self.may_be_on_disk(object, &run[0]) { 0 } else { len_bytes };
        if granted_bytes > 0 && !self.transfers.try_acquire_spare(granted_bytes) {
            return None;
        }
        let ahead = Ahead::begin(&self.numbers, run.iter().map(|block| block.len_bytes));
        Some(ReadAheadGrant { permit, granted_bytes, ahead })
    }

    fn damaged(&self, object: &ObjectInfo, damage: Damage) -> ObjectError {
        let error = ObjectError::damaged(&object.name, damage);
        self.numbers.failed();
        error
    }
}

impl FetchedParts {
    fn part(&self, key: Key) -> Result<Cached, ObjectError> {
        let part = self.parts.iter().find(|(part, _)| *part == key);
        part.map_or_else(|| Err(ObjectError::defect("of another flight")), |(_, part)| part.clone())
    }
}

/// Blocks that were read, and what holds their permits.
struct Run {
    blocks: Vec<Arc<Decoded>>,
    _fetched: Option<Arc<FetchedParts>>,
}

impl Part {
    /// Takes batches that are visible and fit into the budget.
    fn take(&mut self, block: &Decoded, from: StreamOffset, budget: &mut Budget) {
        let visible = block.batches.iter().filter(|batch| batch.end() > from);
        let fitting = visible.take_while(|batch| budget.take(batch.payload.len()));
        let before = self.batches.len();
        self.batches.extend(fitting.cloned());
        let taken = &mut self.batches[before..];
        let shown = taken.iter().map(|batch| ENTRY_BYTES + batch.payload.len());
        if shown.sum::<usize>() < block.len_bytes as usize / 2 {
            taken.iter_mut().for_each(Batch::own_payload);
        }
    }
}

fn keys(object: ObjectId, blocks: &[Block]) -> Vec<Key> {
    blocks.iter().map(|block| Key::Block(object, block.position)).collect()
}

/// Returns the length from the beginning of the first block to the end of the last one.
fn span_bytes(blocks: &[Block]) -> u64 {
    blocks[blocks.len() - 1].position_end() - blocks[0].position
}

fn permits_for(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(PERMIT_BYTES)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
