//! Reading chosen blocks of an object once, in order, past the cache: for compaction.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;

use super::get::{get, read_again};
use super::{ObjectError, Way};
use crate::catalog::ObjectInfo;
use crate::object::{self, Block, Damage};
use crate::types::Batch;

/// One GET fetches neighbouring blocks up to this size: what a scan holds in memory, beside the
/// index. Compaction has eight of them at a time, and nobody waits for it: twice the size would
/// save half of its GETs, which cost less than its parts, and take 16 MiB more.
const SPAN_BYTES: u64 = 2 << 20;

/// The index of `object`, verified.
pub(crate) async fn index(way: Way<'_>, object: &ObjectInfo) -> Result<Vec<Block>, ObjectError> {
    match read_index(way, object).await? {
        Ok(blocks) => Ok(blocks),
        Err(damage) => read_again(&object.name, &damage, read_index(way, object).await?),
    }
}

async fn read_index(
    way: Way<'_>,
    object: &ObjectInfo,
) -> Result<Result<Vec<Block>, Damage>, ObjectError> {
    way.acquire(object.index_bytes).await;
    let lens = vec![usize::try_from(object.index_bytes).expect("it fits into memory")];
    let bytes = match object.index_bytes {
        0 => Bytes::new(),
        _ => get(way.store, &object.name, object.index_position, lens).await?.remove(0),
    };
    Ok(object::decode_index(object.index_position, &bytes, object.index_crc32c))
}

/// Goes through blocks of one object.
pub(crate) struct Scan<'a> {
    way: Way<'a>,
    object: Arc<ObjectInfo>,
    /// Not read yet.
    blocks: VecDeque<Block>,
    /// Read, and not handed out yet.
    span: VecDeque<(Block, Bytes)>,
}

impl<'a> Scan<'a> {
    /// `blocks` are of `object`, in order.
    pub(crate) fn new(way: Way<'a>, object: Arc<ObjectInfo>, blocks: VecDeque<Block>) -> Self {
        Self { way, object, blocks, span: VecDeque::new() }
    }

    /// The next block's batches, verified; `None` after the last.
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

    /// The next block to be handed out.
    pub(crate) fn peek(&self) -> Option<&Block> {
        self.span.front().map(|(block, _)| block).or_else(|| self.blocks.front())
    }

    /// Whether the next block has to be fetched.
    pub(crate) fn is_dry(&self) -> bool {
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

    /// As many pieces as `lens`. What is missing at the end is found by the blocks' checks.
    async fn get(&self, from: u64, lens: Vec<usize>) -> Result<Vec<Bytes>, ObjectError> {
        self.way.acquire(lens.iter().map(|len| *len as u64).sum()).await;
        get(self.way.store, &self.object.name, from, lens).await
    }
}
