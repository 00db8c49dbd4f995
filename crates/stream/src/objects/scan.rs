//! Reads chosen blocks of an object once, in order, without the cache: for object compaction.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;

use super::StoreHandle;
use super::get::{get, read_again};
use crate::catalog::ObjectInfo;
use crate::object::{self, Block, Damage};
use crate::object_error::ObjectError;
use crate::types::Batch;

/// One GET fetches neighbouring blocks up to this size, which a scan holds in memory in addition to
/// the index. Object compaction has eight scans at a time and is not urgent: twice the size would
/// save half of its GETs, which cost less than its parts, and take 16 MiB more.
const SPAN_BYTES: u64 = 2 << 20;

/// Returns the verified index of `object`.
pub(crate) async fn index(
    handle: StoreHandle<'_>,
    object: &ObjectInfo,
) -> Result<Vec<Block>, ObjectError> {
    match read_index(handle, object).await? {
        Ok(blocks) => Ok(blocks),
        Err(damage) => read_again(&object.name, &damage, read_index(handle, object).await?),
    }
}

async fn read_index(
    handle: StoreHandle<'_>,
    object: &ObjectInfo,
) -> Result<Result<Vec<Block>, Damage>, ObjectError> {
    let index = object.index();
    let range = match index.whole() {
        Ok(range) => range,
        Err(damage) => return Ok(Err(damage)),
    };
    let len_bytes = range.end - range.start;
    handle.acquire(len_bytes).await;
    let lens = vec![usize::try_from(len_bytes).expect("it fits into memory")];
    let bytes = match len_bytes {
        0 => Bytes::new(),
        _ => get(handle.store, &object.name, range.start, lens).await?.remove(0),
    };
    Ok(index.decode(&bytes, None).map(|(blocks, _)| blocks))
}

/// A scan over blocks of one object.
pub(crate) struct Scan<'a> {
    handle: StoreHandle<'a>,
    object: Arc<ObjectInfo>,
    /// Blocks to be read.
    blocks: VecDeque<Block>,
    /// Blocks that were read and not returned yet.
    span: VecDeque<(Block, Bytes)>,
}

impl<'a> Scan<'a> {
    /// Creates a scan of `blocks`, which are of `object` and in order.
    pub(crate) fn new(
        handle: StoreHandle<'a>,
        object: Arc<ObjectInfo>,
        blocks: VecDeque<Block>,
    ) -> Self {
        Self { handle, object, blocks, span: VecDeque::new() }
    }

    /// Returns the next block's verified batches; `None` after the last one.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<Batch>>, ObjectError> {
        if self.span.is_empty() {
            self.read().await?;
        }
        let Some((block, bytes)) = self.span.pop_front() else { return Ok(None) };
        let batches = match object::decode_block(&block, &bytes) {
            Ok(batches) => batches,
            Err(damage) => {
                let bytes = self.get(block.position, vec![block.len_bytes as usize]).await?;
                let again = object::decode_block(&block, &bytes[0]);
                read_again(&self.object.name, &damage, again)?
            }
        };
        Ok(Some(batches))
    }

    /// Returns the next block without reading it.
    pub(crate) fn peek(&self) -> Option<&Block> {
        self.span.front().map(|(block, _)| block).or_else(|| self.blocks.front())
    }

    /// Whether the next block must be fetched first.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.span.is_empty() && !self.blocks.is_empty()
    }

    async fn read(&mut self) -> Result<(), ObjectError> {
        let Some(first) = self.blocks.front() else { return Ok(()) };
        let (from, mut to) = (first.position, first.position);
        let mut count = 0;
        for block in &self.blocks {
            let fits = count == 0 || block.position_end() - from <= SPAN_BYTES;
            if block.position != to || !fits {
                break;
            }
            (to, count) = (block.position_end(), count + 1);
        }
        let lens = self.blocks.range(..count).map(|block| block.len_bytes as usize).collect();
        let pieces = self.get(from, lens).await?;
        self.span.extend(self.blocks.drain(..count).zip(pieces));
        Ok(())
    }

    /// Reads as many pieces as `lens` has. If the object ends too early, the checks of the blocks
    /// find it.
    async fn get(&self, from: u64, lens: Vec<usize>) -> Result<Vec<Bytes>, ObjectError> {
        self.handle.acquire(lens.iter().map(|len| *len as u64).sum()).await;
        get(self.handle.store, &self.object.name, from, lens).await
    }
}
