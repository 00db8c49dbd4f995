//! What a stream's owner rebuilds its state from.

use alluvium_wal::LogOffset;
use bytes::Bytes;

use crate::tail::{Cached, Tail};
use crate::types::{Batch, StreamOffset};

/// What a stream's owner rebuilds its state from, by folding `batches` into `checkpoint`.
#[derive(Clone, Debug, Default)]
pub struct Replay {
    /// The checkpoint that [`crate::Fold`] returned at the last upload.
    pub checkpoint: Option<Bytes>,
    /// The offset up to which the checkpoint describes the stream.
    pub checkpoint_end: StreamOffset,
    /// All batches after the checkpoint, in order, durable or not, including those below the
    /// stream's start if a trim has passed them.
    pub batches: Vec<Batch>,
    /// The end of the stream: after the last batch, or further if offsets after it are lost.
    pub end: StreamOffset,
}

impl Replay {
    pub(crate) fn of(tail: &Tail) -> Self {
        Self {
            checkpoint: tail.checkpoint.clone(),
            checkpoint_end: tail.uploaded_end,
            batches: tail.pinned().map(Cached::to_batch).collect(),
            end: tail.next,
        }
    }

    /// Returns the lost offsets: those between the end of a batch and the start of the next one,
    /// and those after the last batch.
    pub fn gaps(&self) -> Vec<std::ops::Range<StreamOffset>> {
        let starts = self.batches.iter().map(|batch| batch.base).chain([self.end]);
        let ends = [self.checkpoint_end].into_iter().chain(self.batches.iter().map(Batch::end));
        ends.zip(starts).filter(|(end, start)| end < start).map(|(end, start)| end..start).collect()
    }
}

/// A [`Replay`] with the positions of its batches in the log.
#[derive(Clone, Debug)]
pub struct History {
    /// The stream's checkpoint and batches.
    pub replay: Replay,
    /// For each batch, the log offset at which its record ends. All streams share the log, so these
    /// positions show in which order batches of different streams were appended.
    pub log_ends: Vec<LogOffset>,
}

impl History {
    pub(crate) fn of(tail: &Tail) -> Self {
        let log_ends = tail.pinned().map(|cached| cached.log_end).collect();
        Self { replay: Replay::of(tail), log_ends }
    }
}
