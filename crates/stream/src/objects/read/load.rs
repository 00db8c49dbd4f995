//! The tasks of shared reads: they load an index or blocks from the disk cache or the object store,
//! verify them and put them into the block cache.

use std::ops;
use std::sync::Arc;

use bytes::Bytes;

use super::{Cached, Core, Decoded, FetchResult, FetchedParts, Key, ReadAheadGrant, span_bytes};
use crate::catalog::ObjectInfo;
use crate::object::{self, Block, Damage, FirstRead, Top};
use crate::object_error::ObjectError;
use crate::objects::get::{get, read_again};
use crate::objects::numbers::Ahead;
use crate::request_class::RequestClass;
use crate::types::Batch;

/// Larger data is decoded on a thread that may block. A MiB takes less time than a task may run
/// without yielding.
const DECODE_INLINE_BYTES: usize = 2 << 20;

impl Core {
    /// Loads the index of an object, or its top if that is read alone, from the disk cache or else
    /// from the object store.
    pub(super) async fn load_index(self: Arc<Self>, object: Arc<ObjectInfo>) -> FetchResult {
        let first = object.index().first_read().map_err(|damage| self.damaged(&object, damage))?;
        let (FirstRead::Whole(range) | FirstRead::Top(range)) = &first;
        let _permit = self.acquire_memory(range.end - range.start).await;
        let key = Key::Index(object.id);
        let index = match self.index_on_disk(&object, &first).await {
            Some(index) => index,
            None => self.fetch_index(&object, &first).await?,
        };
        self.cache.insert(key, index.clone());
        Ok(Arc::new(FetchedParts { parts: vec![(key, Ok(index))], _permit }))
    }

    async fn index_on_disk(&self, object: &Arc<ObjectInfo>, first: &FirstRead) -> Option<Cached> {
        let disk = self.disk.as_ref().filter(|_| object.index_bytes > 0)?;
        let bytes = disk.get(&object.name, &[object.index_position]).await.remove(0)?;
        let index = decode_index(object, first, bytes).await;
        index.inspect_err(|damage| disk.damaged(&object.name, damage)).ok().map(|(index, _)| index)
    }

    async fn fetch_index(
        &self,
        object: &Arc<ObjectInfo>,
        first: &FirstRead,
    ) -> Result<Cached, ObjectError> {
        let index = match decode_index(object, first, self.get_index(object, first).await?).await {
            Ok(index) => Ok(index),
            Err(damage) => {
                let bytes = self.get_index(object, first).await?;
                read_again(&object.name, &damage, decode_index(object, first, bytes).await)
            }
        };
        let (index, bytes) = index.inspect_err(|_| self.numbers.failed())?;
        self.keep_on_disk(object, object.index_position, &bytes);
        Ok(index)
    }

    async fn get_index(
        &self,
        object: &ObjectInfo,
        first: &FirstRead,
    ) -> Result<Bytes, ObjectError> {
        let (FirstRead::Whole(range) | FirstRead::Top(range)) = first;
        let len_bytes = range.end - range.start;
        if len_bytes == 0 {
            return Ok(Bytes::new());
        }
        self.transfers.acquire(RequestClass::Read, len_bytes).await;
        let len_bytes = usize::try_from(len_bytes).unwrap_or(usize::MAX);
        Ok(self.get(object, range.start, vec![len_bytes]).await?.remove(0))
    }

    /// Loads neighbouring pages of an index, from the disk cache or else from the object store.
    pub(super) async fn load_pages(
        self: Arc<Self>,
        object: Arc<ObjectInfo>,
        top: Arc<Top>,
        numbers: ops::Range<usize>,
    ) -> FetchResult {
        let page_bytes = |numbers: ops::Range<usize>| numbers.map(|number| top.page_bytes(number));
        let all_bytes: usize = page_bytes(numbers.clone()).sum();
        let _permit = self.acquire_memory(all_bytes as u64).await;
        let on_disk = self.pages_on_disk(&object, &top, numbers.clone()).await;
        let missing = from_first_to_last(&on_disk, Option::is_none);
        let mut fetched = Vec::new().into_iter();
        if !missing.is_empty() {
            let run = numbers.start + missing.start..numbers.start + missing.end;
            let lens: Vec<_> = page_bytes(run.clone()).collect();
            let missing_bytes: usize = lens.iter().sum();
            self.transfers.acquire(RequestClass::Read, missing_bytes as u64).await;
            let position = top.page_position(run.start);
            fetched = self.get(&object, position, lens).await?.into_iter();
        }
        let mut parts = Vec::with_capacity(numbers.len());
        for (at, (number, on_disk)) in numbers.zip(on_disk).enumerate() {
            let key = Key::Page(object.id, number);
            let bytes = if missing.contains(&at) { fetched.next() } else { None };
            let page = match (on_disk, bytes) {
                (Some(page), _) => Ok(page),
                (None, Some(bytes)) => self.decoded_page(&object, &top, number, bytes).await,
                (None, None) => Err(ObjectError::defect(&object.name)),
            };
            let page = page.map(|page| {
                let page = Cached::Page(Arc::new(page));
                self.cache.insert(key, page.clone());
                page
            });
            parts.push((key, page));
        }
        Ok(Arc::new(FetchedParts { parts, _permit }))
    }

    /// Returns those verified pages that are in the disk cache.
    async fn pages_on_disk(
        &self,
        object: &ObjectInfo,
        top: &Top,
        numbers: ops::Range<usize>,
    ) -> Vec<Option<Vec<Block>>> {
        let Some(disk) = &self.disk else { return vec![None; numbers.len()] };
        let positions: Vec<_> = numbers.clone().map(|number| top.page_position(number)).collect();
        let found = disk.get(&object.name, &positions).await;
        let decode = |(number, bytes): (usize, Option<Bytes>)| {
            let page = top.decode_page(number, &bytes?);
            page.inspect_err(|damage| disk.damaged(&object.name, damage)).ok()
        };
        numbers.zip(found).map(decode).collect()
    }

    /// Decodes a page from its bytes or, if these are damaged, from a second read.
    async fn decoded_page(
        &self,
        object: &ObjectInfo,
        top: &Top,
        number: usize,
        bytes: Bytes,
    ) -> Result<Vec<Block>, ObjectError> {
        let position = top.page_position(number);
        let (page, bytes) = match top.decode_page(number, &bytes) {
            Ok(page) => (page, bytes),
            Err(damage) => {
                let len_bytes = top.page_bytes(number);
                self.transfers.acquire(RequestClass::Read, len_bytes as u64).await;
                let bytes = self.get(object, position, vec![len_bytes]).await?.remove(0);
                let page = read_again(&object.name, &damage, top.decode_page(number, &bytes))
                    .inspect_err(|_| self.numbers.failed())?;
                (page, bytes)
            }
        };
        self.keep_on_disk(object, position, &bytes);
        Ok(page)
    }

    /// Loads neighbouring blocks, from the disk cache or else from the object store. `grant` is
    /// what read-ahead was granted.
    pub(super) async fn load(
        self: Arc<Self>,
        object: Arc<ObjectInfo>,
        blocks: Vec<Block>,
        grant: Option<ReadAheadGrant>,
    ) -> FetchResult {
        let ReadAheadGrant { permit: _permit, granted_bytes, ahead } = match grant {
            Some(grant) => grant,
            None => {
                let permit = self.acquire_memory(span_bytes(&blocks)).await;
                ReadAheadGrant { permit, granted_bytes: 0, ahead: Vec::new() }
            }
        };
        let on_disk = self.blocks_on_disk(&object, &blocks).await;
        let missing = from_first_to_last(&on_disk, Option::is_none);
        let mut fetched = Vec::new().into_iter();
        let mut failure = None;
        if !missing.is_empty() {
            match self.get_blocks(&object, &blocks[missing.clone()], granted_bytes).await {
                Ok(bytes) => fetched = bytes.into_iter(),
                // Blocks in the disk cache can be read even so.
                Err(error) if missing.len() < blocks.len() => failure = Some(error),
                Err(error) => return Err(error),
            }
        }
        let mut parts = Vec::with_capacity(blocks.len());
        let mut ahead = ahead.into_iter();
        for (at, (block, on_disk)) in blocks.iter().zip(on_disk).enumerate() {
            let key = Key::Block(object.id, block.position);
            let ahead = ahead.next();
            let bytes = if missing.contains(&at) { fetched.next() } else { None };
            let batches = match (on_disk, bytes, &failure) {
                (Some(batches), ..) => Ok(batches),
                (None, Some(bytes), _) => self.decoded(&object, block, bytes).await,
                (None, None, Some(error)) => Err(error.clone()),
                (None, None, None) => Err(ObjectError::defect(&object.name)),
            };
            let decoded = batches.map(|batches| {
                let ahead = ahead.map(Ahead::fetched);
                let decoded = Decoded { batches, len_bytes: block.len_bytes, ahead };
                let decoded = Arc::new(decoded);
                self.keep(key, &decoded);
                Cached::Block(decoded)
            });
            parts.push((key, decoded));
            // Decoding never waits; let other tasks use the thread.
            tokio::task::yield_now().await;
        }
        Ok(Arc::new(FetchedParts { parts, _permit }))
    }

    /// Returns the verified batches of those blocks that are in the disk cache.
    async fn blocks_on_disk(
        &self,
        object: &ObjectInfo,
        blocks: &[Block],
    ) -> Vec<Option<Vec<Batch>>> {
        let Some(disk) = &self.disk else { return vec![None; blocks.len()] };
        let positions: Vec<_> = blocks.iter().map(|block| block.position).collect();
        let mut on_disk = Vec::with_capacity(blocks.len());
        for (block, bytes) in blocks.iter().zip(disk.get(&object.name, &positions).await) {
            let Some(bytes) = bytes else {
                on_disk.push(None);
                continue;
            };
            let batches = decode_block(block, bytes).await;
            let batches = batches.inspect_err(|damage| disk.damaged(&object.name, damage));
            on_disk.push(batches.ok().map(|(batches, _)| batches));
            tokio::task::yield_now().await;
        }
        on_disk
    }

    /// Reads the bytes of neighbouring blocks from the object store; `granted_bytes` of bandwidth
    /// are acquired already.
    async fn get_blocks(
        &self,
        object: &ObjectInfo,
        blocks: &[Block],
        granted_bytes: u64,
    ) -> Result<Vec<Bytes>, ObjectError> {
        let owed_bytes = span_bytes(blocks).saturating_sub(granted_bytes);
        if owed_bytes > 0 {
            self.transfers.acquire(RequestClass::Read, owed_bytes).await;
        }
        let lens = blocks.iter().map(|block| block.len_bytes as usize).collect();
        self.get(object, blocks[0].position, lens).await
    }

    /// Decodes a block's batches from its bytes or, if these are damaged, from a second read.
    async fn decoded(
        &self,
        object: &ObjectInfo,
        block: &Block,
        bytes: Bytes,
    ) -> Result<Vec<Batch>, ObjectError> {
        let (batches, bytes) = match decode_block(block, bytes).await {
            Ok(decoded) => decoded,
            Err(damage) => {
                self.transfers.acquire(RequestClass::Read, u64::from(block.len_bytes)).await;
                let lens = vec![block.len_bytes as usize];
                let bytes = self.get(object, block.position, lens).await?.remove(0);
                read_again(&object.name, &damage, decode_block(block, bytes).await)
                    .inspect_err(|_| self.numbers.failed())?
            }
        };
        self.keep_on_disk(object, block.position, &bytes);
        Ok(batches)
    }

    /// Puts verified bytes of an object into the disk cache.
    fn keep_on_disk(&self, object: &ObjectInfo, position: u64, bytes: &Bytes) {
        if let Some(disk) = self.disk.as_ref().filter(|_| !bytes.is_empty()) {
            disk.put(&object.name, position, bytes);
        }
    }

    async fn get(
        &self,
        object: &ObjectInfo,
        from: u64,
        lens: Vec<usize>,
    ) -> Result<Vec<Bytes>, ObjectError> {
        self.numbers.get(lens.iter().map(|len| *len as u64).sum());
        let got = get(self.stores.get(RequestClass::Read), &object.name, from, lens).await;
        match &got {
            Ok(_) => self.losses.was_read(object.id),
            Err(_) => self.numbers.failed(),
        }
        got
    }
}

/// Returns the shortest range that contains all of `items` for which `is_so` returns true.
fn from_first_to_last<T>(items: &[T], is_so: impl Fn(&T) -> bool) -> ops::Range<usize> {
    let first = items.iter().position(&is_so).unwrap_or(items.len());
    first..items.iter().rposition(&is_so).map_or(first, |last| last + 1)
}

/// Decodes the index of an object, or its top, from the bytes of the first read, and returns its
/// own bytes too.
async fn decode_index(
    object: &Arc<ObjectInfo>,
    first: &FirstRead,
    bytes: Bytes,
) -> Result<(Cached, Bytes), Damage> {
    let (len_bytes, index) = (bytes.len(), object.index());
    let is_whole = matches!(first, FirstRead::Whole(_));
    decode(len_bytes, move || {
        if !is_whole {
            let top = index.decode_top(&bytes)?;
            return Ok((Cached::Top(Arc::new(top)), bytes));
        }
        let (blocks, index_bytes) = index.decode(&bytes, None)?;
        let index_at = bytes.len() - index_bytes;
        Ok((Cached::Index(Arc::new(blocks)), bytes.slice(index_at..)))
    })
    .await
}

/// Decodes the batches of a block from its bytes, and returns these too.
async fn decode_block(block: &Block, bytes: Bytes) -> Result<(Vec<Batch>, Bytes), Damage> {
    let (len_bytes, block) = (block.len_bytes as usize, block.clone());
    decode(len_bytes, move || Ok((object::decode_block(&block, &bytes)?, bytes))).await
}

/// Verifies and decodes this number of bytes.
async fn decode<T: Send + 'static>(
    len_bytes: usize,
    decode: impl FnOnce() -> Result<T, Damage> + Send + 'static,
) -> Result<T, Damage> {
    if len_bytes <= DECODE_INLINE_BYTES {
        return decode();
    }
    match tokio::task::spawn_blocking(decode).await {
        Ok(decoded) => decoded,
        Err(ended) => match ended.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime ends, and this task with it.
            Err(_) => std::future::pending().await,
        },
    }
}
