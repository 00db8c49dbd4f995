//! Batches that the owner of the streams puts into holes, and the objects that have them.
//! `docs/format/chain.md`, section 10.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStore;
use uuid::Uuid;

use super::source::retried;
use crate::bandwidth::Transfers;
use crate::catalog::{ObjectInfo, ObjectRange};
use crate::chain::{ChainObject, ChainState, ChainStream};
use crate::fold::{Filler, Fold};
use crate::naming::object_name;
use crate::object_error::ObjectError;
use crate::objects::StoreHandle;
use crate::output::{Attempt, Author, Output, Source};
use crate::request_class::RequestClass;
use crate::tail::{StreamState, Tail};
use crate::types::{Batch, ObjectId, StreamId, StreamOffset};

/// Returns what the owner puts into a hole of a stream, whose checkpoint describes it up to
/// `checkpoint_end`.
///
/// # Panics
/// If a batch is not within the hole, or they are not in order.
pub(super) fn hole(
    fold: &dyn Fold,
    kind: u8,
    hole: Range<StreamOffset>,
    checkpoint: Option<&[u8]>,
    checkpoint_end: StreamOffset,
) -> Vec<Filler> {
    let Some(checkpoint) = checkpoint else { return Vec::new() };
    let fillers = fold.fill(kind, hole.clone(), checkpoint, checkpoint_end);
    let mut at = hole.start;
    for Filler { batch, .. } in &fillers {
        let is_next = batch.base >= at && batch.end() <= hole.end;
        assert!(is_next, "a batch at {} for hole {hole:?}, after {at}", batch.base);
        at = batch.end();
    }
    fillers
}

/// Returns what the owner puts into these holes of a stream as far as its checkpoint describes
/// them.
pub(super) fn known(
    fold: &dyn Fold,
    stream: &ChainStream,
    holes: &[Range<StreamOffset>],
) -> Vec<Filler> {
    let end = stream.uploaded_end;
    let known = holes.iter().map(|hole| hole.start.max(stream.start)..hole.end.min(end));
    let checkpoint = stream.checkpoint.as_deref();
    known
        .filter(|known| !known.is_empty())
        .flat_map(|known| hole(fold, stream.kind, known, checkpoint, end))
        .collect()
}

/// Neighbouring batches of a stream.
#[derive(Debug, PartialEq)]
struct Run {
    stream: StreamId,
    batches: Vec<Batch>,
}

/// Assigns batches to objects: what an object has of a stream must have no hole, or later rebuilds
/// would take the hole for a part of it.
fn objects_of(mut filled: Vec<(StreamId, Batch)>) -> Vec<Vec<Run>> {
    filled.sort_by_key(|(stream, batch)| (*stream, batch.base));
    let mut objects: Vec<Vec<Run>> = Vec::new();
    for of_stream in filled.chunk_by(|(one, _), (next, _)| one == next) {
        let runs = of_stream.chunk_by(|(_, batch), (_, next)| batch.end() == next.base);
        for (number, run) in runs.enumerate() {
            if objects.len() == number {
                objects.push(Vec::new());
            }
            let batches = run.iter().map(|(_, batch)| batch.clone()).collect();
            objects[number].push(Run { stream: run[0].0, batches });
        }
    }
    objects
}

/// Whether a range of the stream has the offset: that of a damaged block. Reads of the block fail,
/// so the batch for it counts in the checkpoint alone.
fn is_in_range(stream: &ChainStream, offset: StreamOffset) -> bool {
    let at = stream.ranges.partition_point(|range| range.end <= offset);
    stream.ranges.get(at).is_some_and(|range| range.start <= offset)
}

/// Writes batches for holes between ranges to new objects, and adds these to the catalog. `last` is
/// the greatest number of an object.
pub(super) async fn write(
    objects: &Arc<dyn ObjectStore>,
    retry: (Duration, Duration),
    state: &mut ChainState,
    last: ObjectId,
    mut filled: Vec<(StreamId, Batch)>,
) -> Result<(), ObjectError> {
    filled.retain(|(stream, batch)| !is_in_range(&state.streams[stream], batch.base));
    let mut id = last;
    for runs in objects_of(filled) {
        id = ObjectId(id.0 + 1);
        let (object, ranges) = retried(retry, || write_object(objects, state, id, &runs)).await?;
        state.objects.insert(id, ChainObject::of(&object));
        for (stream, range) in ranges {
            let ranges = &mut state.streams.get_mut(&stream).expect("it has a hole").ranges;
            let at = ranges.partition_point(|other| other.start < range.start);
            ranges.insert(at, range);
        }
    }
    Ok(())
}

async fn write_object(
    objects: &Arc<dyn ObjectStore>,
    state: &ChainState,
    id: ObjectId,
    runs: &[Run],
) -> Result<(ObjectInfo, Vec<(StreamId, ObjectRange)>), ObjectError> {
    let (store, nonce) = (state.header.store, Uuid::new_v4());
    let by = Author {
        store,
        incarnation: Uuid::new_v4(),
        opening: state.header.opening,
        term: state.head.term,
    };
    let attempt = Attempt { id, nonce, name: object_name(store, id, nonce), by };
    let transfers = Transfers::new(0);
    let handle = StoreHandle::new(&**objects, &transfers, RequestClass::Upload);
    let bytes = runs.iter().flat_map(|run| &run.batches).map(|batch| batch.payload.len() as u64);
    let mut output = Output::new(handle, &attempt, Source::Rebuild, bytes.sum());
    let mut ranges = Vec::new();
    for Run { stream: id, batches } in runs {
        let ChainStream { kind, label, .. } = &state.streams[id];
        let stream = StreamState::new(*id, *kind, label.clone(), Tail::default());
        let mut range = None;
        for batch in batches {
            if let Some(block) = output.push(&stream, batch, None, &mut range) {
                output.write(block).await?;
            }
        }
        ranges.extend(range.map(|range| (*id, range)));
    }
    Ok((output.finish().await?, ranges))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn batch(base: u64, count: u32) -> Batch {
        Batch { base: StreamOffset(base), count, max_timestamp_ms: 0, payload: Bytes::new() }
    }

    #[test]
    fn each_object_has_one_run_of_a_stream() {
        let filled = [(2, 5, 1), (1, 10, 1), (1, 12, 2), (1, 11, 1), (1, 20, 1), (3, 0, 1)];
        let filled = filled.map(|(stream, base, count)| (StreamId(stream), batch(base, count)));
        let found: Vec<Vec<(u64, Vec<u64>)>> = objects_of(filled.into())
            .iter()
            .map(|runs| {
                let bases = |run: &Run| run.batches.iter().map(|batch| batch.base.0).collect();
                runs.iter().map(|run| (run.stream.0, bases(run))).collect()
            })
            .collect();
        let first = vec![(1, vec![10, 11, 12]), (2, vec![5]), (3, vec![0])];
        assert_eq!(found, [first, vec![(1, vec![20])]]);
    }
}
