//! The grower: a thread that makes a crowded table anew before its writers have to, who would wait for the system to find the memory. They go on in the crowded one meanwhile, and wait while entries are moved.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Index, Table};
use crate::flush::TellOfPanic;
use crate::hash::SHARD_BITS;
use crate::shared::Shared;
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
    /// Make the table anew of one of those whose writers have asked for it, unless one of them has done so meanwhile. False if nobody has asked.
    ///
    /// Where there is no memory for it nothing is done: who puts keys hears of it when the table is full.
    pub(super) fn grow_crowded(&self) -> bool {
        let crowded = self.grower.crowded.load(Ordering::Acquire);
        if crowded == 0 {
            return false;
        }
        let at = crowded.trailing_zeros() as usize;
        self.grower.crowded.fetch_and(!(1 << at), Ordering::AcqRel);
        let shard = &self.shards[at];
        let wanted = {
            let mut owned = shard.writer.0.lock();
            // Entries may have gone: whoever finds it crowded again asks again.
            owned.has_asked = owned.is_crowded();
            owned.has_asked.then(|| owned.next_log2())
        };
        let Some(buckets_log2) = wanted else { return true };
        let Ok(mut larger) = Table::new(buckets_log2) else { return true };
        larger.words.populate();
        let mut owned = shard.writer.0.lock();
        let old = (owned.is_crowded() && owned.next_log2() == buckets_log2)
            .then(|| owned.move_to(larger, shard));
        drop(owned);
        // Behind the lock, as it is given back to the system.
        drop(old);
        true
    }
}
