//! The grower: a thread that replaces a crowded table before its writers have to, since they would
//! wait for the kernel to find the memory. Meanwhile they continue in the crowded table, and wait
//! only while entries are moved.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Index, Table};
use crate::flush::PanicReporter;
use crate::hash::SHARD_BITS;
use crate::shared::Shared;
use crate::sync::Arc;
use crate::waker::Waker;

/// The interface of the grower to the writers.
#[derive(Default)]
pub(crate) struct Grower {
    pub(crate) waker: Waker,
    /// One bit for each shard whose table is crowded.
    crowded: AtomicU64,
}

const _: () = assert!(1 << SHARD_BITS <= u64::BITS);

impl Grower {
    /// Reports that the table of a shard is crowded.
    pub(super) fn report(&self, shard: usize) {
        self.crowded.fetch_or(1 << shard, Ordering::Release);
        self.waker.wake();
    }

    /// Returns a reported shard and clears its report.
    pub(super) fn next(&self) -> Option<usize> {
        let crowded = self.crowded.load(Ordering::Acquire);
        let shard = (crowded != 0).then(|| crowded.trailing_zeros() as usize)?;
        self.crowded.fetch_and(!(1 << shard), Ordering::AcqRel);
        Some(shard)
    }

    /// Runs the thread until the cache is closed.
    pub(crate) fn run(shared: &Shared) {
        let _reporter = PanicReporter(shared);
        let index = &shared.index;
        let grower = &index.grower;
        grower.waker.register();
        loop {
            grower.waker.begin_check();
            while !grower.waker.is_closing() && index.grow_crowded() {}
            if grower.waker.is_closing() {
                return;
            }
            grower.waker.sleep(None);
        }
    }
}

impl Index {
    /// Replaces one reported table, unless a writer has done so meanwhile. False if none is
    /// reported.
    ///
    /// Without memory for it nothing is done; writers get the error when the table is full.
    pub(super) fn grow_crowded(&self) -> bool {
        let Some(at) = self.grower.next() else { return false };
        if let Some(buckets_log2) = self.required_size(at)
            && let Ok(mut made) = Table::new(buckets_log2)
        {
            made.words.populate();
            self.replace(at, made);
        }
        true
    }

    /// Returns the size of the table that should replace the shard's, if that is crowded.
    pub(super) fn required_size(&self, shard: usize) -> Option<u32> {
        let mut owned = self.shards[shard].writer.0.lock();
        // Entries may have been removed: a writer that finds it crowded again reports it again.
        owned.has_requested = owned.is_crowded();
        owned.has_requested.then(|| owned.next_log2())
    }

    /// Replaces the shard's table by `made`, unless the required size has changed meanwhile.
    pub(super) fn replace(&self, shard: usize, made: Table) {
        let (shard, made) = (&self.shards[shard], Arc::new(made));
        let mut owned = shard.writer.0.lock();
        let unneeded = if owned.is_crowded() && owned.next_log2() == made.buckets_log2 {
            owned.move_to(made, shard)
        } else {
            // Otherwise it would not be reported again, and the table would be full before it
            // grows.
            owned.has_requested = false;
            made
        };
        drop(owned);
        // After the lock is released, since memory is returned to the system.
        drop(unneeded);
    }
}
