//! Numbers for metrics and tools.

use crate::LogOffset;

/// A snapshot; the numbers belong to one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of the ring.
    pub ring_bytes: u64,
    /// Bytes of the ring that can not be reused yet: from the durable trim offset to the next record's offset.
    pub used_bytes: u64,
    /// The bound, at the moment, on bytes that are appended and not durable. It grows on demand.
    pub window_bytes: u64,
    /// Bytes that are appended and not durable.
    pub window_used_bytes: u64,
    /// Block writes in flight.
    pub in_flight: usize,
    /// Blocks that wait for an I/O slot.
    pub sealed_blocks: usize,
    /// Start of the log: the oldest record that is not durably trimmed.
    pub trimmed: LogOffset,
    /// Everything before it is on stable storage.
    pub durable: LogOffset,
    /// The next record's offset.
    pub appended: LogOffset,
    /// Records appended since the WAL was opened.
    pub records: u64,
    /// Bytes of their payloads.
    pub payload_bytes: u64,
    /// Bytes handed to the device in block writes: headers, padding and rewritten pages included.
    pub device_bytes: u64,
    /// Block writes completed. A block that crosses the end of the ring is two writes and counts once.
    pub block_writes: u64,
    /// Block and header writes completed that carried a flush or FUA: all, or none where the device is trusted.
    pub flushed_writes: u64,
    /// Header slots written.
    pub header_writes: u64,
    /// Bytes that filled up blocks to a page boundary.
    pub padding_bytes: u64,
    /// The capacity that it is to have, if a request for another one waits or is taking effect.
    pub resize_to_bytes: Option<u64>,
    /// Bytes by which the trim offset has to move before the request that waits takes effect, at most.
    pub resize_distance_bytes: u64,
    /// Whether the WAL has failed.
    pub failed: bool,
}
