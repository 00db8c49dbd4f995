//! Checkpoints of streams whose uploaded end a rebuild has moved: folded from their records.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use parking_lot::Mutex;
use uuid::Uuid;

use super::source::{RebuildStep, Source};
use crate::bandwidth::Bandwidth;
use crate::catalog::ObjectRange;
use crate::chain::{ChainObject, ChainState, ChainStream};
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
}

/// A stream whose checkpoint describes it up to the start of `offsets`, and shall describe it up to
/// their end.
struct Work {
    id: StreamId,
    offsets: Range<StreamOffset>,
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
    unfolded: Vec<(StreamId, Range<StreamOffset>)>,
) -> Result<Folded, ObjectError> {
    let ChainState { header, streams, objects, .. } = state;
    let work: Vec<Work> = unfolded
        .into_iter()
        .map(|(id, offsets)| {
            let stream = streams.get_mut(&id).expect("a stream of the catalog");
            let first = stream.ranges.partition_point(|range| range.end <= offsets.start);
            let ranges = stream.ranges[first..].to_vec();
            let ChainStream { kind, start, .. } = *stream;
            Work { id, offsets, kind, start, checkpoint: stream.checkpoint.take(), ranges }
        })
        .collect();
    let ranges = work.iter().flat_map(|work| &work.ranges);
    let reader = Reader {
        source,
        store: header.store,
        objects,
        bandwidth: Bandwidth::new(0),
        indices: Mutex::default(),
        done: AtomicU64::new(0),
        total: ranges.map(|range| range.payload_bytes).sum(),
    };
    let mut done =
        futures::stream::iter(work).map(|work| reader.fold(work)).buffer_unordered(STREAMS);
    let mut all = Folded::default();
    while let Some(Done { id, end, checkpoint, folded }) = done.try_next().await? {
        let stream = streams.get_mut(&id).expect("a stream of the catalog");
        (stream.uploaded_end, stream.checkpoint) = (end, checkpoint);
        all.lost.extend(folded.lost);
        all.damaged.extend(folded.damaged);
    }
    Ok(all)
}

/// Reads records of objects.
struct Reader<'a> {
    source: &'a Source<'a>,
    store: Uuid,
    objects: &'a BTreeMap<ObjectId, ChainObject>,
    bandwidth: Bandwidth,
    /// The blocks of objects that were read: an object has parts of many streams.
    indices: Mutex<BTreeMap<ObjectId, Arc<Vec<Block>>>>,
    done: AtomicU64,
    total: u64,
}

impl Reader<'_> {
    async fn fold(&self, work: Work) -> Result<Done, ObjectError> {
        let Work { id, offsets, kind, start, mut checkpoint, ranges } = work;
        let (mut at, mut folded) = (offsets.start, Folded::default());
        for range in ranges {
            let blocks = match self.blocks(range.object).await {
                Ok(blocks) => blocks,
                Err(error) if error.is_loss() => {
                    folded.damaged.push(error);
                    folded.lost.push((id, range.start.max(offsets.start)..range.end));
                    continue;
                }
                Err(error) => return Err(error),
            };
            let first = blocks.partition_point(|block| (block.stream, block.end) <= (id, at));
            for block in blocks[first..].iter().take_while(|block| block.stream == id) {
                let whole = block.start.max(at)..block.end;
                match self.batches(range.object, block).await {
                    Ok(mut batches) => {
                        batches.retain(|batch| batch.base >= at);
                        let part = at..whole.end;
                        checkpoint =
                            self.fold_batches(id, kind, part, start, checkpoint, batches).await?;
                        at = whole.end;
                    }
                    Err(error) if error.is_loss() => {
                        folded.damaged.push(error);
                        folded.lost.push((id, whole));
                    }
                    Err(error) => return Err(error),
                }
                let bytes = u64::from(block.len_bytes);
                let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
                (self.source.progress)(RebuildStep::Records, done.min(self.total), self.total);
            }
        }
        // The last block may be one that cannot be read.
        if at < offsets.end {
            let part = at..offsets.end;
            checkpoint = self.fold_batches(id, kind, part, start, checkpoint, Vec::new()).await?;
        }
        Ok(Done { id, end: offsets.end, checkpoint, folded })
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
        StoreHandle::new(&**self.source.objects, &self.bandwidth, RequestClass::Read)
    }

    async fn fold_batches(
        &self,
        id: StreamId,
        kind: u8,
        offsets: Range<StreamOffset>,
        start: StreamOffset,
        previous: Option<Bytes>,
        batches: Vec<Batch>,
    ) -> Result<Option<Bytes>, ObjectError> {
        let fold = self.source.fold.clone();
        let folded = tokio::task::spawn_blocking(move || {
            fold.fold(id, kind, offsets, start, previous.as_deref(), &batches)
        });
        let folded = folded.await.map_err(|ended| ObjectError::defect(&ended.to_string()))?;
        Ok(folded.map(Bytes::from))
    }
}
