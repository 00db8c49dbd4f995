//! The store's steps of a checkpoint. The server's loop drives them, and has the log's steps.
//! `docs/format/volume-store.md`, section 7.

use alluvium_wal::{DeviceOffset, LogOffset};

use super::block_store::Store;
use super::io::Purpose;
use super::layout::{META_START, SUPERBLOCK_BYTES};
use super::slots::PAGE_OF_SECTORS_BYTES;
use super::superblock::Current;
use crate::rules::Rule;
use crate::types::{CheckpointNumber, GroupId, Index};

/// Greatest number of neighbouring pages of sectors in one request. A page takes 7 us to encode, so
/// that the requests of one turn take about 1 ms.
const REQUEST_PAGES: usize = 16;
/// The share of the queue's depth that sectors may use: they yield to blocks.
const SHARE: usize = 4;

impl Store {
    /// The last complete checkpoint.
    pub fn checkpoint(&self) -> CheckpointNumber {
        self.progress.complete
    }

    fn next_checkpoint(&self) -> CheckpointNumber {
        CheckpointNumber(self.progress.complete.0 + 1)
    }

    /// Step 1: what the overlay has at or below the base of its group, or in flight, is waited for.
    /// All replicas of the log have been added.
    pub fn swap(&mut self, base: &dyn Fn(GroupId) -> Index) {
        // What no replica has claimed belongs to one that is gone.
        for replica in std::mem::take(&mut self.unclaimed).into_values() {
            let slots = replica.chunks.values().flat_map(|chunk| chunk.iter());
            slots.for_each(|(_, slot)| self.slots.free_owner_gone(slot));
        }
        self.overlay.swap(base);
    }

    /// Step 2: whether there is something to be waited for.
    pub fn has_awaited(&self) -> bool {
        self.overlay.has_awaited() && !self.breaks(Rule::LandingWait)
    }

    /// Step 3: submits the dirty sectors, and the first copy of the superblock. `wal_offset` is
    /// durable in the log.
    pub fn write_sectors(&mut self, wal_offset: LogOffset, now_ms: u64) {
        assert!(self.checkpoint_is_idle(), "one step at a time");
        self.progress.pages = self.slots.begin_sectors();
        self.write_superblock(wal_offset, now_ms, false);
        self.submit_sectors();
    }

    /// Step 4: submits the flush, after the step before is idle.
    pub fn flush(&mut self) {
        assert!(self.checkpoint_is_idle(), "one step at a time");
        if !self.breaks(Rule::Flush) {
            self.progress.requests += 1;
            self.io.flush();
        }
    }

    /// Step 6: submits the second copy of the superblock, durably, after the log has the record of
    /// the checkpoint durably, below `wal_offset`.
    pub fn second_copy(&mut self, wal_offset: LogOffset, now_ms: u64) {
        assert!(self.checkpoint_is_idle(), "one step at a time");
        self.write_superblock(wal_offset, now_ms, true);
    }

    /// Whether all requests of the step have completed.
    pub fn checkpoint_is_idle(&self) -> bool {
        self.progress.requests == 0 && self.progress.pages.is_empty()
    }

    /// Step 7: the checkpoint is complete. What it has freed is free.
    pub fn release(&mut self) {
        assert!(self.checkpoint_is_idle(), "one step at a time");
        let complete = self.next_checkpoint();
        self.slots.release(complete);
        self.progress.complete = complete;
    }

    fn write_superblock(&mut self, wal_offset: LogOffset, now_ms: u64, durable: bool) {
        let next = self.superblock.checkpointed(self.next_checkpoint(), wal_offset, now_ms);
        let mut buf = self.io.alloc(SUPERBLOCK_BYTES);
        encode(&next, &mut buf);
        self.progress.requests += 1;
        self.io.write(next.at(), buf.freeze(), durable, Purpose::Checkpoint);
        self.superblock = next;
    }

    /// Submits pages of sectors as far as the queue has space.
    pub(super) fn submit_sectors(&mut self) {
        let checkpoint = self.next_checkpoint();
        let depth = (self.options.queue_depth / SHARE).max(1);
        while self.progress.requests < depth {
            let pages = &mut self.progress.pages;
            let Some((first, _)) = pages.front().copied() else { break };
            let neighbours = (first..).zip(&*pages).take_while(|(page, next)| *page == next.0);
            let count = neighbours.take(REQUEST_PAGES).count();
            let mut buf = self.io.alloc(count * PAGE_OF_SECTORS_BYTES);
            for (page, out) in pages.drain(..count).zip(buf.chunks_exact_mut(PAGE_OF_SECTORS_BYTES))
            {
                self.slots.encode_page(page, checkpoint, out);
            }
            let at = META_START.0 + u64::from(first) * PAGE_OF_SECTORS_BYTES as u64;
            self.progress.requests += 1;
            self.io.write(DeviceOffset(at), buf.freeze(), false, Purpose::Checkpoint);
        }
    }
}

/// Encodes a copy of the superblock into a buffer of its size.
pub(super) fn encode(copy: &Current, buf: &mut [u8]) {
    let page = buf.try_into().expect("a buffer of a page");
    copy.superblock().encode(page);
}
