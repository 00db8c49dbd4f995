//! What a stream moves to the object store and from it.

use std::iter::Sum;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a stream has in the object store, and what it has moved since the start of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Payload in objects, in bytes. If a trim ends inside an object, all of the stream's batches
    /// in that object still count.
    pub stored_bytes: u64,
    /// Ranges in objects.
    pub stored_ranges: u64,
    /// Payload that is not in objects yet, in bytes.
    pub waiting_bytes: u64,
    /// Payload that uploads have written, in bytes.
    pub copied_bytes: u64,
    /// Ranges that uploads have written.
    pub copies: u64,
    /// Payload that reads have taken from objects, whether a cache had it or not, in bytes.
    pub read_bytes: u64,
    /// Reads of objects that returned payload.
    pub reads: u64,
    /// Reads that failed.
    pub failed_reads: u64,
    /// Ranges that trims have removed.
    pub removed: u64,
}

impl Sum for Moved {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, of| Self {
            stored_bytes: sum.stored_bytes + of.stored_bytes,
            stored_ranges: sum.stored_ranges + of.stored_ranges,
            waiting_bytes: sum.waiting_bytes + of.waiting_bytes,
            copied_bytes: sum.copied_bytes + of.copied_bytes,
            copies: sum.copies + of.copies,
            read_bytes: sum.read_bytes + of.read_bytes,
            reads: sum.reads + of.reads,
            failed_reads: sum.failed_reads + of.failed_reads,
            removed: sum.removed + of.removed,
        })
    }
}

/// The counters of [`Moved`].
#[derive(Default)]
pub(crate) struct MovedCounters {
    copied_bytes: AtomicU64,
    copies: AtomicU64,
    read_bytes: AtomicU64,
    reads: AtomicU64,
    failed_reads: AtomicU64,
    removed: AtomicU64,
}

impl MovedCounters {
    pub(crate) fn copied(&self, bytes: u64) {
        self.copies.fetch_add(1, Ordering::Relaxed);
        self.copied_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn read(&self, bytes: u64) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn read_failed(&self) {
        self.failed_reads.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn removed(&self, ranges: usize) {
        self.removed.fetch_add(ranges as u64, Ordering::Relaxed);
    }

    /// Returns the counts; what is stored and waits is 0.
    pub(crate) fn counts(&self) -> Moved {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Moved {
            copied_bytes: count(&self.copied_bytes),
            copies: count(&self.copies),
            read_bytes: count(&self.read_bytes),
            reads: count(&self.reads),
            failed_reads: count(&self.failed_reads),
            removed: count(&self.removed),
            ..Moved::default()
        }
    }
}
