//! The grower: a thread that makes a crowded table anew before its writers have to, who would wait
//! for the system to find the memory. They go on in the crowded one meanwhile, and wait while
//! entries are moved.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Index, Table};
use crate::flush::TellOfPanic;
use crate::hash::SHARD_BITS;
use crate::shared::Shared;
use crate::sync::Arc;
use crate::waker::Waker;

/// How others reach it.
#[derive(Default)]
pub(crate) struct Grower {
    pub(crate) waker: Waker,
    /// A bit for each shard whose table is crowded.
    crowded: AtomicU64,
}

const _: () = assert!(1 << SHARD_BITS <= u64::BITS);

impl Grower {
    /// The table of a shard is crowded.
    pub(super) fn ask(&self, shard: usize) {
        self.crowded.fetch_or(1 << shard, Ordering::Release);
        self.waker.wake();
    }

    /// A shard whose writers have asked, and which is not told again until they ask again.
    pub(super) fn next(&self) -> Option<usize> {
        let crowded = self.crowded.load(Ordering::Acquire);
        let shard = (crowded != 0).then(|| crowded.trailing_zeros() as usize)?;
        self.crowded.fetch_and(!(1 << shard), Ordering::AcqRel);
        Some(shard)
    }

    /// Until the cache is closed.
    pub(crate) fn run(shared: &Shared) {
        let _told = TellOfPanic(shared);
        let index = &shared.index;
        let grower = &index.grower;
        grower.waker.is_here();
        loop {
            grower.waker.look();
            while !grower.waker.is_closing() && index.grow_crowded() {}
            if grower.waker.is_closing() {
                return;
            }
            grower.waker.sleep(None);
        }
    }
}

impl Index {
    /// Make the table anew of one of those whose writers have asked for it, unless one of them has
    /// done so meanwhile. False if nobody has asked.
    ///
    /// Where there is no memory for it nothing is done: who puts keys hears of it when the table is
    /// full.
    pub(super) fn grow_crowded(&self) -> bool {
        let Some(at) = self.grower.next() else { return false };
        if let Some(buckets_log2) = self.wanted(at)
            && let Ok(mut made) = Table::new(buckets_log2)
        {
            made.words.populate();
            self.replace(at, made);
        }
        true
    }

    /// The size of the table that the shard's is to be replaced by, if it is crowded.
    pub(super) fn wanted(&self, shard: usize) -> Option<u32> {
        let mut owned = self.shards[shard].writer.0.lock();
        // Entries may have gone: whoever finds it crowded again asks again.
        owned.has_asked = owned.is_crowded();
        owned.has_asked.then(|| owned.next_log2())
    }

    /// Replace the shard's table by one that was made for it, unless what is wanted has changed
    /// meanwhile.
    pub(super) fn replace(&self, shard: usize, made: Table) {
        let (shard, made) = (&self.shards[shard], Arc::new(made));
        let mut owned = shard.writer.0.lock();
        let unneeded = if owned.is_crowded() && owned.next_log2() == made.buckets_log2 {
            owned.move_to(made, shard)
        } else {
            // Or nobody would ask again, and the table be full before it grows.
            owned.has_asked = false;
            made
        };
        drop(owned);
        // Behind the lock, as it is given back to the system.
        drop(unneeded);
    }
}
