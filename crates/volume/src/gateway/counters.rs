//! What a gateway has done, as counters for metrics.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Its value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }
}

/// The counters of one kind of requests.
#[derive(Debug, Default)]
pub struct KindCounters {
    /// Requests of the user.
    pub requests: Counter,
    /// Bytes of these requests.
    pub bytes: Counter,
    /// Requests that failed.
    pub failures: Counter,
    /// Requests to servers, the repeated ones included.
    pub sends: Counter,
    /// Requests to servers that were sent again after an error or a closed connection.
    pub retries: Counter,
    /// Copies that were sent to another replica because no answer had arrived in time.
    pub copies: Counter,
}

/// The counters of an attached volume.
#[derive(Debug, Default)]
pub struct Counters {
    /// Writes.
    pub write: KindCounters,
    /// Zeroes.
    pub zero: KindCounters,
    /// Discards.
    pub discard: KindCounters,
    /// Reads, without those of unaligned writes.
    pub read: KindCounters,
    /// Queries of which blocks exist.
    pub status: KindCounters,
    /// `Attach` ops to groups; only `sends`, `retries` and `copies` are counted.
    pub attach: KindCounters,
    /// Requests that waited for the lock of a range.
    pub lock_waits: Counter,
    /// Requests that read blocks because a block was changed in part.
    pub merges: Counter,
    /// Answers that were not valid, or whose blocks did not have their checksums.
    pub bad_answers: Counter,
}
