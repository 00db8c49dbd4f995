//! Positions and batches.

use std::fmt;

use bytes::Bytes;

/// The greatest length of a stream's label.
pub const MAX_LABEL_BYTES: usize = 512;

/// Identifies a stream; never reused, not even after the stream is deleted.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub struct StreamId(pub u64);

/// A record's position in its stream. A batch of `n` records takes `n` consecutive offsets.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    serde::Serialize,
    serde::Deserialize,
)]
pub struct StreamOffset(pub u64);

/// Identifies an object in the catalog; never reused.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub struct ObjectId(pub u64);

/// Number of a stream's writer; each later writer has a greater one. The component that appoints
/// writers assigns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct StreamEpoch(pub u64);

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for StreamOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for StreamEpoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A batch to append. Its offset must be the next one of the stream: the stream's single writer
/// assigns offsets, because they may be part of the payload.
#[derive(Clone, Debug)]
pub struct NewBatch {
    /// Offset of the first record; must equal [`crate::Stream::next_offset`].
    pub base: StreamOffset,
    /// Number of offsets that the batch takes; at least 1.
    pub count: u32,
    /// Greatest timestamp in the batch, in milliseconds since the Unix epoch; -1 if there is none.
    /// Used to find offsets by time.
    pub max_timestamp_ms: i64,
    /// The bytes; opaque to this layer. The log cache keeps this reference, so its allocation
    /// should not be larger than the slice.
    pub payload: Bytes,
}

/// A batch that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Offset of the first record.
    pub base: StreamOffset,
    /// Number of offsets that the batch takes.
    pub count: u32,
    /// Greatest timestamp in the batch, as given to append.
    pub max_timestamp_ms: i64,
    /// The bytes as they were appended.
    pub payload: Bytes,
}

impl Batch {
    /// Returns the offset after the batch's last record.
    pub fn end(&self) -> StreamOffset {
        StreamOffset(self.base.0 + u64::from(self.count))
    }

    /// Copies the payload, so that it does not keep a larger allocation alive.
    pub(crate) fn own_payload(&mut self) {
        self.payload = Bytes::copy_from_slice(&self.payload);
    }
}

/// The kind of a stream whose batches are written to objects.
pub const KIND_LOG: u8 = 0;
/// The kind of a stream of which only the checkpoint is kept. Every greater kind behaves in the
/// same way: an owner with several such streams selects the fold by kind.
pub const KIND_STATE: u8 = 1;
