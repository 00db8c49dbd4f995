//! Positions and batches.

use std::fmt;
use std::ops::Range;

use bytes::Bytes;

use crate::repair::DamagedStreams;

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

/// Derives a stream's **checkpoint** from its batches: a summary that its owner needs after a
/// restart and that would be lost, or slow to rebuild, once the batches have left the WAL (producer
/// sequences, group offsets).
///
/// The store folds exactly the batches of an upload into the previous checkpoint and commits the
/// result together with the objects, so a checkpoint always describes the stream exactly up to the
/// uploaded end. Batches below the stream's start count too: a trim does not undo their effects.
/// The owner rebuilds its state from [`crate::Stream::replay`].
pub trait Fold: Send + Sync + 'static {
    /// Returns the checkpoint at the end of `offsets`, where `previous` describes the stream up to
    /// their start, and `batches` are all batches in them. A jump in offsets (from the start to the
    /// first batch, between two, or from the last one to the end) is a loss that recovery has
    /// reported ([`crate::Recovery::gaps`]); there are no other jumps. There may be no batch at
    /// all. Returns `None` if the stream needs no checkpoint. The result must depend on the
    /// arguments alone, except for what is dropped because it is old by a clock: one upload may
    /// make several calls, each with a part of the batches and the result of the previous call, and
    /// after a restart the parts and the time may differ. Runs on a thread that may block.
    ///
    /// A checkpoint need not describe anything below `start`: it cannot be read any more, or the
    /// owner has declared so ([`crate::Stream::raise_checkpoint_start`]).
    fn fold(
        &self,
        stream: StreamId,
        kind: u8,
        offsets: Range<StreamOffset>,
        start: StreamOffset,
        previous: Option<&[u8]>,
        batches: &[Batch],
    ) -> Option<Vec<u8>>;

    /// Returns batches to insert into gaps that recovery found, each within one gap; called before
    /// the streams are read or folded. The same loss is found at every start until the batches
    /// behind it are uploaded, so the result must be a function of the contents of the log and the
    /// catalog.
    fn repair(&self, damaged: &DamagedStreams<'_>) -> Vec<(StreamId, Batch)> {
        let _ = damaged;
        Vec::new()
    }
}

/// A fold for streams without checkpoints.
impl Fold for () {
    fn fold(
        &self,
        _: StreamId,
        _: u8,
        _: Range<StreamOffset>,
        _: StreamOffset,
        _: Option<&[u8]>,
        _: &[Batch],
    ) -> Option<Vec<u8>> {
        None
    }
}
