//! Reading: verified blocks and indexes, and a cache of them.

use std::sync::Arc;

use bytes::Bytes;
use object_store::{ObjectStore, ObjectStoreExt};
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use super::{ObjectError, Request, within};
use crate::catalog::ObjectInfo;
use crate::object::{self, Block, ENTRY_BYTES};
use crate::types::{Batch, ObjectId, StreamId, StreamOffset};

/// One GET fetches neighbouring blocks up to this size.
const READ_BYTES: u64 = 8 << 20;

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
        match within(Request::Delete, name, self.store.delete(&name.into())).await {
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
        let get = || within(Request::Get, &object.name, self.store.get_range(&path, range.clone()));
        match get().await {
            // A connection that has died unnoticed is the likeliest reason, and the next one a new one.
            Err(error) if error.may_pass() => get().await,
            answer => answer,
        }
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
