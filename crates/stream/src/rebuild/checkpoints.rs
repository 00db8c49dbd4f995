//! Checkpoints of streams whose uploaded end a rebuild has moved: folded from their records, and
//! from the batches that the owner of the streams puts into holes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use parking_lot::Mutex;
use uuid::Uuid;

use super::fill;
use super::offsets::Offsets;
use super::source::{RebuildStep, Source};
use crate::bandwidth::Transfers;
use crate::catalog::ObjectRange;
use crate::chain::{ChainObject, ChainState, ChainStream};
use crate::fold::{Filler, Fold};
use crate::object::Block;
use crate::object_error::ObjectError;
use crate::objects::{Scan, StoreHandle, index};
use crate::request_class::RequestClass;
use crate::types::{Batch, ObjectId, StreamId, StreamOffset};

/// Streams that are read at the same time.
const STREAMS: usize = 8;

/// What cannot be read.
#[derive(Default)]
pub(super) struct Folded {
    /// Offsets of records in damaged blocks.
    pub(super) lost: Vec<(StreamId, Range<StreamOffset>)>,
    pub(super) damaged: Vec<ObjectError>,
    /// Batches for holes.
    pub(super) filled: Vec<(StreamId, Filler)>,
}

/// A part of a stream to fold.
pub(super) struct Unfolded {
    pub(super) id: StreamId,
    /// The checkpoint describes the stream up to their start, and shall describe it up to their
    /// end.
    pub(super) offsets: Range<StreamOffset>,
    /// What of `offsets` is lost with the objects.
    pub(super) holes: Offsets,
}

struct Work {
    unfolded: Unfolded,
    kind: u8,
    start: StreamOffset,
    checkpoint: Option<Bytes>,
    ranges: Vec<ObjectRange>,
}

/// The result for a stream.
struct Done {
    id: StreamId,
    end: StreamOffset,
    checkpoint: Option<Bytes>,
    folded: Folded,
}

/// Moves uploaded ends and checkpoints to the ends of these offsets.
pub(super) async fn fold(
    source: &Source<'_>,
    state: &mut ChainState,
    unfolded: Vec<Unfolded>,
) -> Result<Folded, ObjectError> {
    let ChainState { header, streams, objects, .. } = state;
    let work: Vec<Work> = unfolded
        .into_iter()
        .map(|unfolded| {
            let stream = streams.get_mut(&unfolded.id).expect("a stream of the catalog");
            let first = stream.ranges.partition_point(|range| range.end <= unfolded.offsets.start);
            let ranges = stream.ranges[first..].to_vec();
            let ChainStream { kind, start, .. } = *stream;
            Work { unfolded, kind, start, checkpoint: stream.checkpoint.take(), ranges }
        })
        .collect();
    let ranges = work.iter().flat_map(|work| &work.ranges);
    let reader = Reader {
        source,
        store: header.store,
        objects,
        transfers: Transfers::new(0),
        indices: Mutex::default(),
        done: AtomicU64::new(0),
        total: ranges.map(|range| range.payload_bytes).sum(),
    };
    let mut done = futures::stream::iter(work).map(|work| reader.fold(work)).buffered(STREAMS);
    let mut all = Folded::default();
    while let Some(Done { id, end, checkpoint, folded }) = done.try_next().await? {
        let stream = streams.get_mut(&id).expect("a stream of the catalog");
        (stream.uploaded_end, stream.checkpoint) = (end, checkpoint);
        all.lost.extend(folded.lost);
        all.damaged.extend(folded.damaged);
        all.filled.extend(folded.filled);
    }
    Ok(all)
}

/// Reads records of objects.
struct Reader<'a> {
    source: &'a Source<'a>,
    store: Uuid,
    objects: &'a BTreeMap<ObjectId, ChainObject>,
    transfers: Transfers,
    /// The blocks of objects that were read: an object has parts of many streams.
    indices: Mutex<BTreeMap<ObjectId, Arc<Vec<Block>>>>,
    done: AtomicU64,
    total: u64,
}

impl Reader<'_> {
    async fn fold(&self, work: Work) -> Result<Done, ObjectError> {
        let Work { unfolded: Unfolded { id, offsets, holes }, kind, start, checkpoint, ranges } =
            work;
        let (at, fold) = (offsets.start, self.source.fold.clone());
        let mut stream = Folding { id, kind, start, at, checkpoint, holes, fold };
        let mut folded = Folded::default();
        // Damaged since the last batch.
        let mut damaged: Vec<Range<StreamOffset>> = Vec::new();
        for range in ranges {
            let blocks = match self.blocks(range.object).await {
                Ok(blocks) => blocks,
                Err(error) if error.is_loss() => {
                    folded.damaged.push(error);
                    let lost = range.start.max(offsets.start)..range.end;
                    folded.lost.push((id, lost.clone()));
                    damaged.push(lost);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let at = stream.at;
            let first = blocks.partition_point(|block| (block.stream, block.end) <= (id, at));
            for block in blocks[first..].iter().take_while(|block| block.stream == id) {
                match self.batches(range.object, block).await {
                    Ok(mut batches) => {
                        let filled = stream.pass(block.start, damaged.drain(..)).await?;
                        folded.filled.extend(filled);
                        batches.retain(|batch| batch.base >= stream.at);
                        stream.fold(block.end, batches).await?;
                    }
                    Err(error) if error.is_loss() => {
                        folded.damaged.push(error);
                        let lost = block.start.max(stream.at)..block.end;
                        folded.lost.push((id, lost.clone()));
                        damaged.push(lost);
                    }
                    Err(error) => return Err(error),
                }
                let bytes = u64::from(block.len_bytes);
                let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
                (self.source.progress)(RebuildStep::Records, done.min(self.total), self.total);
            }
        }
        // The last block may be one that cannot be read.
        folded.filled.extend(stream.pass(offsets.end, damaged.drain(..)).await?);
        if stream.at < offsets.end {
            stream.fold(offsets.end, Vec::new()).await?;
        }
        Ok(Done { id, end: offsets.end, checkpoint: stream.checkpoint, folded })
    }

    async fn blocks(&self, object: ObjectId) -> Result<Arc<Vec<Block>>, ObjectError> {
        if let Some(blocks) = self.indices.lock().get(&object) {
            return Ok(blocks.clone());
        }
        let info = self.objects[&object].info(self.store);
        let blocks = self.source.read(|| index(self.handle(), &info)).await?;
        let blocks = Arc::new(blocks);
        self.indices.lock().insert(object, blocks.clone());
        Ok(blocks)
    }

    async fn batches(&self, object: ObjectId, block: &Block) -> Result<Vec<Batch>, ObjectError> {
        let info = Arc::new(self.objects[&object].info(self.store));
        let read = || async {
            let mut scan = Scan::new(self.handle(), info.clone(), [block.clone()].into());
            Ok(scan.next().await?.unwrap_or_default())
        };
        self.source.read(read).await
    }

    fn handle(&self) -> StoreHandle<'_> {
        StoreHandle::new(&**self.source.objects, &self.transfers, RequestClass::Read)
    }
}

/// A stream while it is folded.
struct Folding {
    id: StreamId,
    kind: u8,
    start: StreamOffset,
    /// The checkpoint describes the stream up to here.
    at: StreamOffset,
    checkpoint: Option<Bytes>,
    /// See [`Unfolded::holes`].
    holes: Offsets,
    fold: Arc<dyn Fold>,
}

impl Folding {
    /// Passes over offsets up to `to` that have no readable batch. Returns what was put into holes:
    /// into those that were known, and into what is `damaged`.
    async fn pass(
        &mut self,
        to: StreamOffset,
        damaged: impl Iterator<Item = Range<StreamOffset>>,
    ) -> Result<Vec<(StreamId, Filler)>, ObjectError> {
        let passed = self.at.max(self.start)..to;
        let holes = self.holes.within(&passed).into_ranges().into_iter().chain(damaged);
        let mut filled = Vec::new();
        for hole in Offsets::of(holes).within(&passed).into_ranges() {
            if hole.start > self.at {
                self.fold(hole.start, Vec::new()).await?;
            }
            let fillers = fill::hole(
                &*self.fold,
                self.kind,
                hole.clone(),
                self.checkpoint.as_deref(),
                hole.start,
            );
            let batches = fillers.iter().map(|filler| filler.batch.clone()).collect();
            self.fold(hole.end, batches).await?;
            filled.extend(fillers.into_iter().map(|filler| (self.id, filler)));
        }
        Ok(filled)
    }

    /// Folds all batches up to an offset.
    async fn fold(&mut self, to: StreamOffset, batches: Vec<Batch>) -> Result<(), ObjectError> {
        let Self { id, kind, start, .. } = *self;
        let (offsets, previous) = (self.at..to, self.checkpoint.take());
        let fold = self.fold.clone();
        let folded = tokio::task::spawn_blocking(move || {
            fold.fold(id, kind, offsets, start, previous.as_deref(), &batches)
        });
        let folded = folded.await.map_err(|ended| ObjectError::defect(&ended.to_string()))?;
        (self.at, self.checkpoint) = (to, folded.map(Bytes::from));
        Ok(())
    }
}
