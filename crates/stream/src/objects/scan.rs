//! Reading chosen blocks of an object once, in order, past the cache: for compaction.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use object_store::{ObjectStore, ObjectStoreExt};

use super::{ObjectError, Request, within};
use crate::bandwidth::{Bandwidth, Class};
use crate::catalog::ObjectInfo;
use crate::object::{self, Block};
use crate::types::Batch;

/// One GET fetches neighbouring blocks up to this size: what a scan holds in memory, beside the index.
const SPAN_BYTES: u64 = 4 << 20;

/// The index of `object`, verified.
pub(crate) async fn index(
    store: &dyn ObjectStore,
    bandwidth: &Bandwidth,
    object: &ObjectInfo,
) -> Result<Vec<Block>, ObjectError> {
    let range = object.index_position..object.index_position + object.index_bytes;
    let bytes = match range.is_empty() {
        true => Bytes::new(),
        false => get(store, bandwidth, &object.name, range).await?,
    };
    object::decode_index(object.index_position, &bytes, object.index_crc32c)
        .map_err(|damage| ObjectError::damaged(&object.name, damage))
}

async fn get(
    store: &dyn ObjectStore,
    bandwidth: &Bandwidth,
    name: &str,
    range: Range<u64>,
) -> Result<Bytes, ObjectError> {
    bandwidth.acquire(Class::Compaction, range.end - range.start).await;
    let path = name.into();
    let get = || within(Request::Get, name, store.get_range(&path, range.clone()));
    match get().await {
        // A connection that has died unnoticed is the likeliest reason, and the next one a new one.
        Err(error) if error.may_pass() => get().await,
        answer => answer,
    }
}

/// Goes through blocks of one object.
pub(crate) struct Scan<'a> {
    store: &'a dyn ObjectStore,
    bandwidth: &'a Bandwidth,
    object: Arc<ObjectInfo>,
    /// Not read yet.
    blocks: VecDeque<Block>,
    /// Read, and not handed out yet.
    span: VecDeque<(Block, Bytes)>,
}

impl<'a> Scan<'a> {
    /// `blocks` are of `object`, in order.
    pub(crate) fn new(
        store: &'a dyn ObjectStore,
        bandwidth: &'a Bandwidth,
        object: Arc<ObjectInfo>,
        blocks: VecDeque<Block>,
    ) -> Self {
        Self { store, bandwidth, object, blocks, span: VecDeque::new() }
    }

    /// The next block's batches, verified; `None` after the last.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<Batch>>, ObjectError> {
        if self.span.is_empty() {
            self.read().await?;
        }
        let Some((block, bytes)) = self.span.pop_front() else { return Ok(None) };
        match object::decode_block(&block, &bytes) {
            Ok(batches) => Ok(Some(batches)),
            Err(damage) => Err(ObjectError::damaged(&self.object.name, damage)),
        }
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
        let bytes = get(self.store, self.bandwidth, &self.object.name, from..to).await?;
        for block in self.blocks.drain(..count) {
            // What is missing at the end is found by the block's check.
            let at = |position: u64| (position - from).min(bytes.len() as u64) as usize;
            let bytes = bytes.slice(at(block.position)..at(block.position_end()));
            self.span.push_back((block, bytes));
        }
        Ok(())
    }
}
