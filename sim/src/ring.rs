//! A second implementation of the mapping from the log to the device: the model must not rely on
//! the log's own arithmetic.

use std::ops::Range;

use alluvium_wal::HeaderInfo;

// `docs/format/wal.md`, section 2.
pub(crate) const PAGE: u64 = 4096;
/// The header slots, a page each.
pub(crate) const SLOT_AT: [u64; 2] = [0, 32 * 1024];
/// First byte of the ring.
pub(crate) const DATA_START: u64 = 64 * 1024;
pub(crate) const MIN_CAPACITY: u64 = DATA_START + 128 * 1024;
/// Length of a record header: section 4.
pub(crate) const HEADER: u64 = 32;

/// End of the padding that may follow a record which ends at `end`.
pub(crate) fn padded(end: u64) -> u64 {
    if end.is_multiple_of(PAGE) { end } else { (end + HEADER).next_multiple_of(PAGE) }
}

/// The ring; see the module documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ring {
    pub(crate) bytes: u64,
    origin: u64,
}

impl Ring {
    pub(crate) fn of(header: &HeaderInfo) -> Self {
        Self { bytes: header.capacity_bytes - DATA_START, origin: header.origin_bytes }
    }

    /// The bytes of the device that hold `range` of the log.
    pub(crate) fn on_device(self, range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        let start = (range.start + self.origin) % self.bytes;
        let len = (range.end - range.start).min(self.bytes);
        let first = len.min(self.bytes - start);
        let wrapped = (first < len).then(|| DATA_START..DATA_START + len - first);
        std::iter::once(DATA_START + start..DATA_START + start + first).chain(wrapped)
    }

    /// The lap of `offset`.
    pub(crate) fn lap(self, offset: u64) -> u64 {
        (offset + self.origin) / self.bytes
    }

    /// Whether a page of `live` has another position in `other`.
    pub(crate) fn differs(self, other: Self, live: &Range<u64>) -> bool {
        let mut pages = (live.start / PAGE * PAGE..live.end).step_by(PAGE as usize);
        pages.any(|page| !self.on_device(&(page..page + 1)).eq(other.on_device(&(page..page + 1))))
    }
}
