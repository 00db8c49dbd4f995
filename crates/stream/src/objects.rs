//! The object store: writing objects in bounded memory, reading them with verification and a small cache.

use std::fs::File;
use std::future::Future;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use object_store::local::LocalFileSystem;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload, WriteMultipart};
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use crate::catalog::ObjectInfo;
use crate::object::{self, Block, Damage, ENTRY_BYTES};
use crate::types::{Batch, ObjectId, StreamId, StreamOffset};

/// Objects up to this size are one PUT; larger ones are written in parts of this size. At least 5 MiB, S3's minimum.
const PART_BYTES: usize = 8 << 20;
/// Parts in flight: with the one being filled, the memory that an upload takes.
const PARTS_IN_FLIGHT: usize = 4;
/// One GET fetches neighbouring blocks up to this size.
const READ_BYTES: u64 = 8 << 20;

/// The objects of all stores lie under it, each store's in a directory of its own.
pub(crate) const OBJECTS_DIRECTORY: &str = "streams";
/// Longer than the writing of any object takes.
const UNFINISHED_AGE: Duration = Duration::from_secs(24 * 60 * 60);
/// A request that makes no progress for so long has failed: the longest that flushing a large object to a slow disk may take.
const STALL: Duration = Duration::from_secs(300);

/// An object could not be written, read or deleted.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ObjectError {
    /// The object store refused or could not be reached.
    #[error("object {name}: {source}")]
    Store {
        /// Its path in the object store.
        name: String,
        /// Cause.
        source: Arc<object_store::Error>,
    },
    /// It is not what was written.
    #[error("object {name}: {source}")]
    Damaged {
        /// Its path in the object store.
        name: String,
        /// Where and what.
        source: Arc<Damage>,
    },
}

impl ObjectError {
    fn store(name: &str, source: object_store::Error) -> Self {
        Self::Store { name: name.into(), source: Arc::new(source) }
    }

    fn damaged(name: &str, source: Damage) -> Self {
        Self::Damaged { name: name.into(), source: Arc::new(source) }
    }

    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Store { source, .. } if matches!(**source, object_store::Error::NotFound { .. }))
    }
}

/// The answer to a request about `name`, or an error if it does not come.
pub(crate) async fn within<T>(
    name: &str,
    request: impl Future<Output = object_store::Result<T>>,
) -> Result<T, ObjectError> {
    let stalled = |_| object_store::Error::Generic {
        store: "object store",
        source: format!("no answer for {STALL:?}").into(),
    };
    let answer = tokio::time::timeout(STALL, request).await.map_err(stalled);
    answer.and_then(|answer| answer).map_err(|error| ObjectError::store(name, error))
}

/// A local directory as an object store, created if it is not there. Its writes are on stable storage when they
/// complete; `LocalFileSystem` does not do that by default, and the WAL is trimmed on the strength of it.
///
/// `LocalFileSystem` writes to a file next to the object, and never lists such files. What a process that was killed has left of
/// them is removed here when it is a day old.
pub fn local_objects(directory: &Path) -> Result<Arc<dyn ObjectStore>, object_store::Error> {
    create_durably(directory).map_err(|error| object_store::Error::Generic {
        store: "LocalFileSystem",
        source: format!("can not create {}: {error}", directory.display()).into(),
    })?;
    if let Err(error) = remove_unfinished(directory) {
        tracing::warn!("can not remove unfinished files under {}: {error}", directory.display());
    }
    Ok(Arc::new(LocalFileSystem::new_with_prefix(directory)?.with_fsync(true)))
}

/// Create the directory and its parents, each on stable storage.
fn create_durably(directory: &Path) -> io::Result<()> {
    match std::fs::create_dir(directory) {
        Ok(()) => {}
        Err(_) if directory.is_dir() => return Ok(()),
        Err(error) => {
            let parent = directory.parent().filter(|parent| !parent.exists());
            create_durably(parent.ok_or(error)?)?;
            std::fs::create_dir(directory)?;
        }
    }
    let parent = directory.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

fn remove_unfinished(directory: &Path) -> io::Result<()> {
    let all = directory.join(OBJECTS_DIRECTORY);
    if !all.exists() {
        return Ok(());
    }
    for store in std::fs::read_dir(all)? {
        let store = store?;
        if !store.file_type()?.is_dir() {
            continue;
        }
        for file in std::fs::read_dir(store.path())? {
            let file = file?;
            let name = file.file_name();
            let number = name.to_str().and_then(|name| Some(name.rsplit_once('#')?.1));
            let is_unfinished = number.is_some_and(|number| number.parse::<u64>().is_ok());
            let age = file.metadata()?.modified()?.elapsed().unwrap_or_default();
            if is_unfinished && age > UNFINISHED_AGE {
                std::fs::remove_file(file.path())?;
                tracing::info!("removed {}, which was never finished", file.path().display());
            }
        }
    }
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Key {
    Index(ObjectId),
    /// By position.
    Block(ObjectId, u64),
}

#[derive(Clone)]
enum Cached {
    Index(Arc<Vec<Block>>),
    Block(Arc<Vec<Batch>>, u32),
}

#[derive(Clone)]
struct ByBytes;

impl Weighter<Key, Cached> for ByBytes {
    fn weight(&self, _: &Key, value: &Cached) -> u64 {
        match value {
            Cached::Index(blocks) => (blocks.len() * size_of::<Block>()) as u64 + 64,
            Cached::Block(batches, len_bytes) => {
                u64::from(*len_bytes) + (batches.len() * size_of::<Batch>()) as u64
            }
        }
    }
}

/// The object store with a cache of verified blocks and indexes.
pub(crate) struct Objects {
    store: Arc<dyn ObjectStore>,
    cache: Cache<Key, Cached, ByBytes>,
}

impl Objects {
    pub(crate) fn new(store: Arc<dyn ObjectStore>, cache_bytes: u64) -> Self {
        let expected_items =
            usize::try_from(cache_bytes >> 18).unwrap_or(usize::MAX).clamp(16, 1 << 20);
        Self { store, cache: Cache::with_weighter(expected_items, cache_bytes, ByBytes) }
    }

    pub(crate) fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    pub(crate) fn cached_bytes(&self) -> u64 {
        self.cache.weight()
    }

    /// Delete an object; one that is not there counts as deleted.
    pub(crate) async fn delete(&self, name: &str) -> Result<(), ObjectError> {
        match within(name, self.store.delete(&name.into())).await {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }

    /// The blocks that hold `stream`, in offset order.
    pub(crate) async fn blocks(
        &self,
        object: &ObjectInfo,
        stream: StreamId,
    ) -> Result<StreamBlocks, ObjectError> {
        let key = Key::Index(object.id);
        let index = match self.cache.get(&key) {
            Some(Cached::Index(index)) => index,
            _ => {
                let range = object.index_position..object.index_position + object.index_bytes;
                let bytes = self.get(object, range).await?;
                let index =
                    object::decode_index(object.index_position, &bytes, object.index_crc32c)
                        .map_err(|damage| ObjectError::damaged(&object.name, damage))?;
                let index = Arc::new(index);
                self.cache.insert(key, Cached::Index(index.clone()));
                index
            }
        };
        let first = index.partition_point(|block| block.stream < stream);
        let end = index.partition_point(|block| block.stream <= stream);
        Ok(StreamBlocks { index, first, end })
    }

    /// The batches of one block.
    pub(crate) async fn batches(
        &self,
        object: &ObjectInfo,
        block: &Block,
    ) -> Result<Arc<Vec<Batch>>, ObjectError> {
        Ok(self.read(object, std::slice::from_ref(block)).await?.remove(0))
    }

    /// The batches of the first of `blocks`, and of those after it that the same GET brought or the cache had.
    async fn read(
        &self,
        object: &ObjectInfo,
        blocks: &[Block],
    ) -> Result<Vec<Arc<Vec<Batch>>>, ObjectError> {
        let cached = |block: &Block| match self.cache.get(&Key::Block(object.id, block.position)) {
            Some(Cached::Block(batches, _)) => Some(batches),
            _ => None,
        };
        let found: Vec<_> = blocks.iter().map_while(cached).collect();
        if !found.is_empty() {
            return Ok(found);
        }
        // A stream's blocks are neighbours in the object.
        let from = blocks[0].position;
        let wanted = blocks
            .iter()
            .enumerate()
            .take_while(|(i, block)| {
                *i == 0 || (block.position_end() - from <= READ_BYTES && cached(block).is_none())
            })
            .count();
        let bytes = self.get(object, from..blocks[wanted - 1].position_end()).await?;
        let mut read = Vec::with_capacity(wanted);
        for block in &blocks[..wanted] {
            let at = usize::try_from(block.position - from).expect("within one read");
            let end = (at + block.len_bytes as usize).min(bytes.len());
            // A cached block must own no more memory than it is charged for, and what a read brings may be a part of anything.
            let slice = Bytes::copy_from_slice(&bytes[at.min(end)..end]);
            let batches = match object::decode_block(block, &slice) {
                Ok(batches) => batches,
                // What lies before the damage can be read; who goes on from there meets it first.
                Err(_) if !read.is_empty() => break,
                Err(damage) => return Err(ObjectError::damaged(&object.name, damage)),
            };
            let batches = Arc::new(batches);
            self.cache.insert(
                Key::Block(object.id, block.position),
                Cached::Block(batches.clone(), block.len_bytes),
            );
            read.push(batches);
        }
        Ok(read)
    }

    /// Batches of `stream` that end after `from`, as far as the budget goes or to what can not be read; an error only if that comes
    /// first. They keep at most twice the memory of their payload.
    pub(crate) async fn fetch(
        &self,
        object: &ObjectInfo,
        stream: StreamId,
        from: StreamOffset,
        budget: &mut Budget,
    ) -> Result<Vec<Batch>, ObjectError> {
        let blocks = self.blocks(object, stream).await?;
        let blocks = blocks.after(from);
        let mut taken = Vec::new();
        let mut next = 0;
        while next < blocks.len() {
            // Read no further than the budget reaches: a block's bytes are nearly all payload.
            let mut ahead = 0;
            let wanted = blocks[next..].iter().take_while(|block| {
                let wanted = ahead == 0 || ahead < budget.left_bytes();
                ahead += block.len_bytes as usize;
                wanted
            });
            let wanted = wanted.count();
            let read = match self.read(object, &blocks[next..next + wanted]).await {
                Ok(read) => read,
                Err(_) if !taken.is_empty() => break,
                Err(error) => return Err(error),
            };
            for (block, batches) in blocks[next..].iter().zip(read) {
                next += 1;
                let visible = batches.iter().filter(|batch| batch.end() > from);
                let fitting = visible.take_while(|batch| budget.take(batch.payload.len()));
                let before = taken.len();
                taken.extend(fitting.cloned());
                let shown = taken[before..].iter().map(|batch| ENTRY_BYTES + batch.payload.len());
                if shown.sum::<usize>() < block.len_bytes as usize / 2 {
                    taken[before..].iter_mut().for_each(Batch::own_payload);
                }
                if budget.is_spent() {
                    return Ok(taken);
                }
            }
        }
        Ok(taken)
    }

    async fn get(
        &self,
        object: &ObjectInfo,
        range: std::ops::Range<u64>,
    ) -> Result<Bytes, ObjectError> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let path = object.name.as_str().into();
        within(&object.name, self.store.get_range(&path, range)).await
    }
}

/// The blocks of one stream in one object.
pub(crate) struct StreamBlocks {
    index: Arc<Vec<Block>>,
    first: usize,
    end: usize,
}

impl StreamBlocks {
    pub(crate) fn all(&self) -> &[Block] {
        &self.index[self.first..self.end]
    }

    /// Those that end after `from`.
    pub(crate) fn after(&self, from: StreamOffset) -> &[Block] {
        let blocks = self.all();
        &blocks[blocks.partition_point(|block| block.end <= from)..]
    }
}

/// The payload that a fetch may still return: the first batch always fits.
pub(crate) struct Budget {
    left_bytes: usize,
    first: bool,
}

impl Budget {
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self { left_bytes: max_bytes, first: true }
    }

    /// Whether a batch of this size may be returned.
    pub(crate) fn take(&mut self, len_bytes: usize) -> bool {
        if !self.first && (self.left_bytes == 0 || len_bytes > self.left_bytes) {
            self.left_bytes = 0;
            return false;
        }
        self.first = false;
        self.left_bytes = self.left_bytes.saturating_sub(len_bytes);
        true
    }

    /// Whether nothing more fits.
    pub(crate) fn is_spent(&self) -> bool {
        self.left_bytes == 0 && !self.first
    }

    pub(crate) fn left_bytes(&self) -> usize {
        self.left_bytes
    }
}

/// Writes one object: a small one with a single PUT, a large one in parts, so that memory stays bounded.
pub(crate) struct Writer<'a> {
    store: &'a dyn ObjectStore,
    name: &'a str,
    small: Vec<Bytes>,
    small_bytes: usize,
    large: Option<WriteMultipart>,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(store: &'a dyn ObjectStore, name: &'a str) -> Self {
        Self { store, name, small: Vec::new(), small_bytes: 0, large: None }
    }

    pub(crate) async fn write(&mut self, piece: Bytes) -> Result<(), ObjectError> {
        if let Some(large) = &mut self.large {
            within(self.name, large.wait_for_capacity(PARTS_IN_FLIGHT)).await?;
            large.put(piece);
            return Ok(());
        }
        self.small_bytes += piece.len();
        self.small.push(piece);
        if self.small_bytes > PART_BYTES {
            let upload = within(self.name, self.store.put_multipart(&self.name.into())).await?;
            let large = self.large.insert(WriteMultipart::new_with_chunk_size(upload, PART_BYTES));
            self.small.drain(..).for_each(|piece| large.put(piece));
        }
        Ok(())
    }

    /// The object is complete and durable when this succeeds. After an error, here or in [`Self::write`], there may be an
    /// object or parts of one, and [`Self::abort`] should be tried.
    pub(crate) async fn finish(&mut self) -> Result<(), ObjectError> {
        let (store, name) = (self.store, self.name);
        let result = match self.large.take() {
            Some(large) => within(name, large.finish()).await,
            None => {
                let payload = PutPayload::from_iter(self.small.drain(..));
                within(name, store.put(&name.into(), payload)).await
            }
        };
        result.map(drop)
    }

    /// Give up: remove what was written, as far as the object store lets us.
    pub(crate) async fn abort(self) -> Result<(), ObjectError> {
        if let Some(large) = self.large {
            within(self.name, large.abort()).await?;
        }
        match within(self.name, self.store.delete(&self.name.into())).await {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }
}
