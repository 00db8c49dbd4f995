//! Sizes and positions of `docs/format/wal.md`, and the mapping from the log to the device.

use std::fmt;
use std::ops::Range;

use alluvium_device::{DeviceOffset, PAGE_BYTES};

/// A position in the endless log, in bytes. It only grows and is never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogOffset(pub u64);

impl fmt::Display for LogOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Size of a page: writes begin and end on page boundaries.
pub(crate) const PAGE: u64 = PAGE_BYTES as u64;

/// A header slot is one page; the two are far enough apart that one torn or misdirected request
/// reaches only one.
pub(crate) const HEADER_SLOT_BYTES: u64 = PAGE;
const HEADER_GAP_BYTES: u64 = 28 * 1024;
pub(crate) const HEADER_SLOT_AT: [DeviceOffset; 2] =
    [DeviceOffset(0), DeviceOffset(HEADER_SLOT_BYTES + HEADER_GAP_BYTES)];
pub(crate) const DATA_START: u64 = 2 * (HEADER_SLOT_BYTES + HEADER_GAP_BYTES);

pub(crate) const RECORD_HEADER_BYTES: usize = 32;

/// The smallest ring, which has space for twice the smallest window and a page on either side.
pub(crate) const MIN_RING_BYTES: u64 = 128 * 1024;

pub(crate) const MIN_CAPACITY_BYTES: u64 = DATA_START + MIN_RING_BYTES;

/// Whether `bytes` is a valid capacity of a WAL.
pub(crate) const fn is_capacity(bytes: u64) -> bool {
    bytes.is_multiple_of(PAGE) && bytes >= MIN_CAPACITY_BYTES
}

const _: () = assert!(HEADER_SLOT_AT[1].0 == 32 * 1024);
const _: () = assert!(DATA_START == 64 * 1024 && DATA_START.is_multiple_of(PAGE));

pub(crate) const fn page_floor(x: u64) -> u64 {
    x - x % PAGE
}

/// Rounds up to a page. Panics on overflow, 2^64 bytes into the log.
pub(crate) const fn page_ceil(x: u64) -> u64 {
    x.next_multiple_of(PAGE)
}

/// Length of the padding record that fills a block which ends at `end`: 0 on a page boundary,
/// otherwise up to the next boundary, or the one after it if less than a record header remains.
pub(crate) const fn padding_len(end: u64) -> u64 {
    let rest = page_ceil(end) - end;
    match rest {
        0 => 0,
        1..=31 => rest + PAGE,
        _ => rest,
    }
}
const _: () = assert!(RECORD_HEADER_BYTES == 32); // the 31 above

/// The ring: a pure mapping from log offsets to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ring {
    bytes: u64,
    /// Position of log offset 0 in the ring: a page boundary.
    origin: u64,
}

impl Ring {
    /// The ring of a WAL with this capacity ([`is_capacity`]), with log offset 0 at the page
    /// boundary `origin`.
    pub(crate) fn new(capacity_bytes: u64, origin: u64) -> Self {
        assert!(is_capacity(capacity_bytes), "a capacity of {capacity_bytes} bytes");
        let bytes = capacity_bytes - DATA_START;
        assert!(origin.is_multiple_of(PAGE) && origin < bytes);
        Self { bytes, origin }
    }

    pub(crate) fn bytes(self) -> u64 {
        self.bytes
    }

    pub(crate) fn capacity_bytes(self) -> u64 {
        DATA_START + self.bytes
    }

    pub(crate) fn origin_bytes(self) -> u64 {
        self.origin
    }

    /// The byte of the ring at `x`.
    pub(crate) fn position(self, x: LogOffset) -> u64 {
        // Both are below 2^63.
        (x.0 + self.origin) % self.bytes
    }

    pub(crate) fn device_offset(self, x: LogOffset) -> DeviceOffset {
        DeviceOffset(DATA_START + self.position(x))
    }

    /// The device ranges of `len` bytes from `x`: one, or two if the ring ends in between. `len` is
    /// positive and at most the ring.
    pub(crate) fn pieces(self, x: LogOffset, len: u64) -> impl Iterator<Item = Piece> {
        assert!(len > 0 && len <= self.bytes, "{len} bytes in a ring of {}", self.bytes);
        let first = len.min(self.bytes - self.position(x));
        let piece = move |range: Range<u64>| Piece {
            at: self.device_offset(LogOffset(x.0 + range.start)),
            range: range.start as usize..range.end as usize,
        };
        std::iter::once(piece(0..first)).chain((first < len).then(|| piece(first..len)))
    }
}

/// A part of a logical range that is contiguous on the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) at: DeviceOffset,
    /// The part of the logical range, in bytes from its start.
    pub(crate) range: Range<usize>,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn padding_never_leaves_less_than_a_header() {
        for end in 0..3 * PAGE {
            let padding = padding_len(end);
            assert!((end + padding).is_multiple_of(PAGE), "{end}");
            assert!(padding == 0 || padding >= RECORD_HEADER_BYTES as u64, "{end}");
            assert!(padding < PAGE + 32, "{end}");
        }
    }

    proptest! {
        #[test]
        fn pieces_tile_the_range_and_stay_in_the_ring(
            pages in 32u64..200, x in 0u64..10_000_000, len_permille in 1u64..=1000,
            origin in 0u64..32,
        ) {
            let ring = Ring::new(DATA_START + pages * PAGE, origin * PAGE);
            let len = (ring.bytes() * len_permille / 1000).max(1);
            let pieces: Vec<_> = ring.pieces(LogOffset(x), len).collect();
            prop_assert!(pieces.len() <= 2);
            let mut next = 0;
            for piece in &pieces {
                prop_assert_eq!(piece.range.start, next);
                prop_assert!(piece.range.end > piece.range.start);
                prop_assert!(piece.at.0 >= DATA_START);
                prop_assert!(piece.at.0 + piece.range.len() as u64 <= DATA_START + ring.bytes());
                let start = LogOffset(x + piece.range.start as u64);
                prop_assert_eq!(piece.at, ring.device_offset(start));
                next = piece.range.end;
            }
            prop_assert_eq!(next as u64, len);
        }
    }
}
