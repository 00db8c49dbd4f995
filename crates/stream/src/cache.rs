//! The bound of the log cache: what all streams' tails may cost together, and who has to go when it is reached.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::tail::{Released, StreamState};
use crate::types::StreamOffset;

/// An eviction frees at least this much if it can, so that not every append has to evict.
const EVICTION_STEP_BYTES: u64 = 256 << 10;

pub(crate) struct LogCache {
    bound_bytes: u64,
    /// Reserved by the tails of all streams.
    used_bytes: AtomicU64,
    /// The part of it that is not uploaded.
    pinned_bytes: AtomicU64,
    /// Uploaded and still cached, oldest upload first: a stream and the offset up to which it may be evicted.
    /// Locked before a stream's tail, never while one is held.
    evictable: Mutex<VecDeque<(Arc<StreamState>, StreamOffset)>>,
}

impl LogCache {
    pub(crate) fn new(bound_bytes: u64) -> Self {
        Self {
            bound_bytes,
            used_bytes: AtomicU64::new(0),
            pinned_bytes: AtomicU64::new(0),
            evictable: Mutex::new(VecDeque::new()),
        }
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes.load(Ordering::Relaxed)
    }

    /// Take `cost_bytes` for a batch, evicting if need be; false if the bound leaves no room. Must not be called with a
    /// tail locked.
    pub(crate) fn reserve(&self, cost_bytes: u64) -> bool {
        loop {
            let within_bound =
                |used: u64| used.checked_add(cost_bytes).filter(|sum| *sum <= self.bound_bytes);
            match self.used_bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, within_bound) {
                Ok(_) => return true,
                Err(used) => {
                    let over = (used + cost_bytes).saturating_sub(self.bound_bytes);
                    if self.evict(over.max(EVICTION_STEP_BYTES)) == 0 {
                        return false;
                    }
                }
            }
        }
    }

    /// Give back a reservation that came to nothing.
    pub(crate) fn unreserve(&self, cost_bytes: u64) {
        self.used_bytes.fetch_sub(cost_bytes, Ordering::AcqRel);
    }

    /// A reserved batch is in its tail.
    pub(crate) fn pin(&self, cost_bytes: u64) {
        self.pinned_bytes.fetch_add(cost_bytes, Ordering::AcqRel);
    }

    /// Recovered batches are there whether they fit or not.
    pub(crate) fn restore(&self, cost_bytes: u64) {
        self.used_bytes.fetch_add(cost_bytes, Ordering::AcqRel);
        self.pin(cost_bytes);
    }

    pub(crate) fn release(&self, released: Released) {
        self.used_bytes.fetch_sub(released.freed_bytes, Ordering::AcqRel);
        self.pinned_bytes.fetch_sub(released.unpinned_bytes, Ordering::AcqRel);
    }

    /// `stream` may be evicted up to `up_to`.
    pub(crate) fn offer(&self, stream: Arc<StreamState>, up_to: StreamOffset) {
        self.evictable.lock().push_back((stream, up_to));
    }

    /// Bring the use down to the bound, as far as uploads allow.
    pub(crate) fn evict_to_bound(&self) {
        let over = self.used_bytes().saturating_sub(self.bound_bytes);
        if over > 0 {
            self.evict(over);
        }
    }

    fn evict(&self, want_bytes: u64) -> u64 {
        let mut evictable = self.evictable.lock();
        let mut freed_bytes = 0;
        while freed_bytes < want_bytes
            && let Some((stream, up_to)) = evictable.front()
        {
            let (freed, more) = stream.tail.lock().evict(*up_to, want_bytes - freed_bytes);
            freed_bytes += freed;
            if !more {
                evictable.pop_front();
            }
        }
        self.used_bytes.fetch_sub(freed_bytes, Ordering::AcqRel);
        freed_bytes
    }
}
