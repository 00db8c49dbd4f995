//! Checkpoints of streams, and what their owner derives them from.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use crate::replay::{History, Replay};
use crate::report::Gap;
use crate::tail::Tail;
use crate::types::{Batch, StreamId, StreamOffset};

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
    /// after it are uploaded, so the result must be a function of the contents of the log and the
    /// catalog.
    fn repair(&self, damaged: &DamagedStreams<'_>) -> Vec<(StreamId, Batch)> {
        let _ = damaged;
        Vec::new()
    }

    /// Returns batches to put into a hole of a stream of this kind, in offset order, each within
    /// it: a rebuild has found that all records of the hole are lost with the objects that had
    /// them. `checkpoint` describes the stream up to `checkpoint_end`: the start of the hole, or an
    /// offset at or after its end. The same hole may be found by a later rebuild, so the result
    /// must depend on the arguments alone.
    fn fill(
        &self,
        kind: u8,
        hole: Range<StreamOffset>,
        checkpoint: &[u8],
        checkpoint_end: StreamOffset,
    ) -> Vec<Filler> {
        let _ = (kind, hole, checkpoint, checkpoint_end);
        Vec::new()
    }
}

/// A batch that a rebuild puts into a hole of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filler {
    /// The batch.
    pub batch: Batch,
    /// Readable offsets before the hole whose records the batch may invalidate, because nothing
    /// shows what the lost ones had decided.
    pub invalidated: Option<Range<StreamOffset>>,
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

/// The streams as recovery found them.
pub struct DamagedStreams<'a> {
    pub(crate) streams: &'a HashMap<StreamId, (u8, Tail)>,
    pub(crate) meta: &'a BTreeMap<String, Vec<u8>>,
    pub(crate) gaps: &'a [Gap],
}

impl DamagedStreams<'_> {
    /// Returns what is lost, by stream and offset.
    pub fn gaps(&self) -> &[Gap] {
        self.gaps
    }

    /// Returns the catalog's metadata.
    pub fn meta(&self) -> &BTreeMap<String, Vec<u8>> {
        self.meta
    }

    /// Returns what is left of a stream, like [`crate::Stream::replay`].
    pub fn replay(&self, stream: StreamId) -> Option<Replay> {
        self.streams.get(&stream).map(|(_, tail)| Replay::of(tail))
    }

    /// Returns [`Self::replay`] with positions in the log.
    pub fn history(&self, stream: StreamId) -> Option<History> {
        self.streams.get(&stream).map(|(_, tail)| History::of(tail))
    }
}
