//! The bound of the log cache: the total memory of all streams' tails, and what is evicted when it
//! is reached.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use alluvium_wal::LogOffset;
use parking_lot::{Mutex, MutexGuard};

use crate::tail::{Released, StreamState};
use crate::types::StreamId;

/// An eviction frees at least this much if it can, so that not every append has to evict.
const EVICTION_STEP_BYTES: u64 = 256 << 10;
/// Streams take turns in an eviction: each gives up batches within this many bytes of the log from
/// the oldest evictable batch on.
const EVICTION_TURN_BYTES: u64 = 256 << 10;

pub(crate) struct LogCache {
    bound_bytes: u64,
    /// Bytes reserved by the tails of all streams.
    used_bytes: AtomicU64,
    /// The part of it that is not uploaded.
    pinned_bytes: AtomicU64,
    /// Streams with batches that are uploaded and still cached, once each, by the log offset of the
    /// oldest such batch or an older one; equal to [`crate::tail::Tail::evictable_at`]. Locked
    /// before a stream's tail, never while one is held.
    evictable: Mutex<Evictable>,
}

type Evictable = BTreeMap<(LogOffset, StreamId), Arc<StreamState>>;

impl LogCache {
    pub(crate) fn new(bound_bytes: u64) -> Self {
        Self {
            bound_bytes,
            used_bytes: AtomicU64::new(0),
            pinned_bytes: AtomicU64::new(0),
            evictable: Mutex::default(),
        }
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes.load(Ordering::Relaxed)
    }

    /// Reserves `cost_bytes` for a batch, evicting if necessary; false if the bound does not allow
    /// it. The caller must not hold the lock of a tail.
    pub(crate) fn reserve(&self, cost_bytes: u64) -> bool {
        self.try_reserve(cost_bytes) || self.reserve_by_evicting(cost_bytes, self.evictable.lock())
    }

    fn try_reserve(&self, cost_bytes: u64) -> bool {
        let within_bound =
            |used: u64| used.checked_add(cost_bytes).filter(|sum| *sum <= self.bound_bytes);
        self.used_bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, within_bound).is_ok()
    }

    /// Evicts until the reservation succeeds. Space freed by others before the lock was taken
    /// counts too.
    fn reserve_by_evicting(
        &self,
        cost_bytes: u64,
        mut evictable: MutexGuard<'_, Evictable>,
    ) -> bool {
        loop {
            if self.try_reserve(cost_bytes) {
                return true;
            }
            let over = (self.used_bytes() + cost_bytes).saturating_sub(self.bound_bytes);
            if self.evict(&mut evictable, over.max(EVICTION_STEP_BYTES)) == 0 {
                return self.try_reserve(cost_bytes);
            }
        }
    }

    /// Returns an unused reservation.
    pub(crate) fn unreserve(&self, cost_bytes: u64) {
        self.used_bytes.fetch_sub(cost_bytes, Ordering::AcqRel);
    }

    /// Counts a reserved batch as pinned, once it is in its tail.
    pub(crate) fn pin(&self, cost_bytes: u64) {
        self.pinned_bytes.fetch_add(cost_bytes, Ordering::AcqRel);
    }

    /// Counts a recovered batch, which is cached whether it fits or not.
    pub(crate) fn restore(&self, cost_bytes: u64) {
        self.used_bytes.fetch_add(cost_bytes, Ordering::AcqRel);
        self.pin(cost_bytes);
    }

    pub(crate) fn release(&self, released: Released) {
        self.used_bytes.fetch_sub(released.freed_bytes, Ordering::AcqRel);
        self.pinned_bytes.fetch_sub(released.unpinned_bytes, Ordering::AcqRel);
    }

    /// Lists `stream`, which was uploaded, if it has batches to evict.
    pub(crate) fn offer(&self, stream: &Arc<StreamState>) {
        let mut evictable = self.evictable.lock();
        let mut tail = stream.tail.lock();
        if tail.evictable_at.is_none()
            && let Some(at) = tail.first_evictable()
        {
            tail.evictable_at = Some(at);
            evictable.insert((at, stream.id), stream.clone());
        }
    }

    /// Removes `stream`, which was deleted, from the list.
    pub(crate) fn withdraw(&self, stream: &StreamState) {
        let mut evictable = self.evictable.lock();
        let at = stream.tail.lock().evictable_at.take();
        at.and_then(|at| evictable.remove(&(at, stream.id)));
    }

    /// Evicts down to the bound, as far as uploads allow.
    pub(crate) fn evict_to_bound(&self) {
        let over = self.used_bytes().saturating_sub(self.bound_bytes);
        if over > 0 {
            self.evict(&mut self.evictable.lock(), over);
        }
    }

    /// Frees at least `want_bytes` if possible, oldest batches first; returns the number of bytes
    /// freed.
    fn evict(&self, evictable: &mut Evictable, want_bytes: u64) -> u64 {
        let mut freed_bytes = 0;
        while freed_bytes < want_bytes
            && let Some(((at, id), stream)) = evictable.pop_first()
        {
            let mut tail = stream.tail.lock();
            let limit = LogOffset(at.0.saturating_add(EVICTION_TURN_BYTES));
            freed_bytes += tail.evict(limit, want_bytes - freed_bytes);
            tail.evictable_at = tail.first_evictable();
            if let Some(at) = tail.evictable_at {
                drop(tail);
                evictable.insert((at, id), stream);
            }
        }
        self.used_bytes.fetch_sub(freed_bytes, Ordering::AcqRel);
        freed_bytes
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::budget::Budget;
    use crate::tail::{Cached, Source, Tail, UploadedPart, cost_bytes};
    use crate::types::{KIND_LOG, StreamOffset};

    const PAYLOAD_BYTES: usize = 1000;
    const COST_BYTES: u64 = cost_bytes(PAYLOAD_BYTES);

    fn stream(id: u64) -> Arc<StreamState> {
        Arc::new(StreamState::new(StreamId(id), KIND_LOG, Bytes::new(), Tail::default()))
    }

    /// Appends a batch with one offset at the log's end.
    fn append(cache: &LogCache, stream: &StreamState, log_end: u64) {
        assert!(cache.reserve(COST_BYTES));
        cache.pin(COST_BYTES);
        let mut tail = stream.tail.lock();
        let base = tail.next;
        tail.push(Cached {
            base,
            count: 1,
            max_timestamp_ms: 0,
            log_end: LogOffset(log_end),
            payload: Bytes::from(vec![0; PAYLOAD_BYTES]),
            crc32c: 0,
        });
    }

    fn upload(cache: &LogCache, stream: &Arc<StreamState>) {
        let released = {
            let mut tail = stream.tail.lock();
            let (uploaded_end, start) = (tail.next, tail.start);
            tail.uploaded(UploadedPart { uploaded_end, start, checkpoint: None, range: None })
        };
        cache.release(released);
        cache.offer(stream);
    }

    fn cached_from(stream: &StreamState) -> Option<StreamOffset> {
        let source =
            stream.tail.lock().source(StreamOffset(0), &mut Budget::new(1), LogOffset(u64::MAX));
        let Source::Cached(batches) = source else { panic!("there are no objects") };
        batches.first().map(|batch| batch.base)
    }

    #[test]
    fn a_stream_is_listed_once_and_not_after_its_deletion() {
        let cache = LogCache::new(1 << 20);
        let kept = stream(0);
        let deleted = stream(1);
        for round in 0..100 {
            append(&cache, &kept, round * 2);
            append(&cache, &deleted, round * 2 + 1);
            upload(&cache, &kept);
            upload(&cache, &deleted);
        }
        assert_eq!(cache.evictable.lock().len(), 2);
        let (released, _) = deleted.tail.lock().delete();
        cache.release(released);
        cache.withdraw(&deleted);
        assert_eq!(Arc::strong_count(&deleted), 1, "there is no other reference");
        assert!(cache.reserve(1 << 20));
        assert_eq!((cached_from(&kept), cache.evictable.lock().len()), (None, 0));
        assert_eq!(cache.used_bytes(), 1 << 20);
    }

    #[test]
    fn the_oldest_batches_of_all_streams_are_evicted_first() {
        let cache = LogCache::new(400 * COST_BYTES);
        let streams: Vec<_> = (0..4).map(stream).collect();
        // 100 batches each, 16 KiB of log apart; the last two streams come after the first two.
        for i in 0..100 {
            for (at, stream) in streams.iter().enumerate() {
                append(&cache, stream, (at as u64 / 2 * 100 + i) << 14);
            }
        }
        streams.iter().for_each(|stream| upload(&cache, stream));
        cache.evict(&mut cache.evictable.lock(), 100 * COST_BYTES);
        let left: Vec<_> =
            streams.iter().map(|stream| 100 - cached_from(stream).unwrap().0).collect();
        assert_eq!(left.iter().sum::<u64>(), 300);
        assert!(left[0].abs_diff(left[1]) <= 17, "turns of 256 KiB: {left:?}");
        assert_eq!(left[2..], [100, 100]);
    }

    #[test]
    fn pinned_batches_stay_and_are_not_listed() {
        let cache = LogCache::new(4 * COST_BYTES);
        let stream = stream(0);
        (0..2).for_each(|i| append(&cache, &stream, i));
        upload(&cache, &stream);
        (2..4).for_each(|i| append(&cache, &stream, i));
        assert!(cache.reserve(2 * COST_BYTES));
        assert_eq!(cached_from(&stream), Some(StreamOffset(2)));
        assert!(cache.evictable.lock().is_empty());
        assert!(!cache.reserve(1));
    }

    #[test]
    fn space_freed_by_another_caller_is_used() {
        let cache = LogCache::new(4 * COST_BYTES);
        let stream = stream(0);
        (0..4).for_each(|i| append(&cache, &stream, i));
        upload(&cache, &stream);
        assert!(!cache.try_reserve(COST_BYTES));
        // Another caller has evicted everything before this one gets the lock.
        cache.evict(&mut cache.evictable.lock(), 4 * COST_BYTES);
        assert!(cache.reserve_by_evicting(COST_BYTES, cache.evictable.lock()));
    }
}
