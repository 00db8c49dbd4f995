//! Positions and batches.

use std::fmt;
use std::ops::Range;

use bytes::Bytes;

use crate::mend::Damaged;

/// Names a stream; never reused, not even after the stream was deleted.
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

/// Names an object in the catalog; never reused.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub struct ObjectId(pub u64);

/// Which of a stream's writers, one after the other, somebody is: greater for each later one.
/// Whoever appoints writers gives it out.
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

/// A batch to append. Its offset must be the stream's next: the one writer of a stream decides
/// offsets, because they may be part of the payload.
#[derive(Clone, Debug)]
pub struct NewBatch {
    /// Offset of the first record; must equal [`crate::Stream::next_offset`].
    pub base: StreamOffset,
    /// Number of offsets that the batch takes; at least 1.
    pub count: u32,
    /// Greatest timestamp in the batch, milliseconds since the Unix epoch; -1 when there is none.
    /// Lets an offset be found by time.
    pub max_timestamp_ms: i64,
    /// The bytes; opaque to this layer. The log cache keeps this reference, so it should own no
    /// more memory than it shows.
    pub payload: Bytes,
}

/// A batch that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Offset of the first record.
    pub base: StreamOffset,
    /// Number of offsets that it takes.
    pub count: u32,
    /// As given to append.
    pub max_timestamp_ms: i64,
    /// The bytes as they were appended.
    pub payload: Bytes,
}

impl Batch {
    /// The offset after the batch's last record.
    pub fn end(&self) -> StreamOffset {
        StreamOffset(self.base.0 + u64::from(self.count))
    }

    /// Let the payload be no part of something larger that it would keep alive.
    pub(crate) fn own_payload(&mut self) {
        self.payload = Bytes::copy_from_slice(&self.payload);
    }
}

/// The kind of a stream whose batches are written to objects.
pub const KIND_LOG: u8 = 0;
/// The kind of a stream that is kept as its checkpoint alone. So is every greater kind: an owner of
/// several such streams tells their folds apart by it.
pub const KIND_STATE: u8 = 1;

/// Derives a stream's **checkpoint** from its batches: a summary that its owner needs after a
/// restart and that would be lost, or slow to rebuild, once the batches have left the WAL (producer
/// sequences, group offsets).
///
/// The store folds exactly the batches of an upload into the previous checkpoint, and commits the
/// result together with the objects, so a checkpoint always describes the stream up to the uploaded
/// end, never more and never less. Batches below the stream's start count too: a trim does not undo
/// what they did. The owner rebuilds its state from [`crate::Stream::replay`].
pub trait Fold: Send + Sync + 'static {
    /// The checkpoint at the end of `offsets`, given that `previous` describes the stream up to
    /// their start, and `batches` are all that there is of them. A jump in offsets, from the start
    /// to the first batch, between two, or from the last one to the end, is a loss that recovery
    /// has reported ([`crate::Recovery::gaps`]); there are no other jumps. There may be no batch at
    /// all. `None` where the stream needs none. Must depend on its arguments alone, but for what it
    /// forgets because it is old by a clock: one upload may call it several times, each call
    /// getting a piece of the batches and the result of the call before, and a restart may cut the
    /// pieces differently, and come later. Runs on a thread that may block.
    ///
    /// A checkpoint need not speak of what lies below `start`: it cannot be read any more, or the
    /// owner has said so ([`crate::Stream::settle`]).
    fn fold(
        &self,
        stream: StreamId,
        kind: u8,
        offsets: Range<StreamOffset>,
        start: StreamOffset,
        previous: Option<&[u8]>,
        batches: &[Batch],
    ) -> Option<Vec<u8>>;

    /// Recovery has found gaps: the batches to put in them, each within one gap, before anybody
    /// reads or folds the streams. The same loss is found at every start until the batches behind
    /// it are uploaded, so the result must be a function of what the log and the catalog hold.
    fn mend(&self, damaged: &Damaged<'_>) -> Vec<(StreamId, Batch)> {
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
