//! Gaps that recovery has found, and what the owner of the streams puts in them.

use std::collections::{BTreeMap, HashMap};

use alluvium_wal::LogOffset;

use crate::recover::Gap;
use crate::stream::Replay;
use crate::tail::{self, Cached, Tail};
use crate::types::{Batch, Fold, StreamId};

/// The streams as recovery has found them.
pub struct Damaged<'a> {
    pub(crate) streams: &'a HashMap<StreamId, (u8, Tail)>,
    pub(crate) meta: &'a BTreeMap<String, Vec<u8>>,
    pub(crate) gaps: &'a [Gap],
}

impl Damaged<'_> {
    /// What is lost, by stream and offset.
    pub fn gaps(&self) -> &[Gap] {
        self.gaps
    }

    /// The catalog's metadata.
    pub fn meta(&self) -> &BTreeMap<String, Vec<u8>> {
        self.meta
    }

    /// What there is of a stream, as [`crate::Stream::replay`] gives it.
    pub fn replay(&self, stream: StreamId) -> Option<Replay> {
        self.streams.get(&stream).map(|(_, tail)| Replay::of(tail))
    }
}

/// Ask `fold` for what belongs in the gaps, and put it there. Such a batch counts as durable with the one before it, or from `log_start` on, and is uploaded like
/// any other. Returns the memory that each costs.
///
/// # Errors
/// A batch that does not lie within a gap.
pub(crate) fn mend(
    fold: &dyn Fold,
    streams: &mut HashMap<StreamId, (u8, Tail)>,
    meta: &BTreeMap<String, Vec<u8>>,
    gaps: &[Gap],
    log_start: LogOffset,
) -> Result<Vec<u64>, String> {
    if gaps.is_empty() {
        return Ok(Vec::new());
    }
    let batches = fold.mend(&Damaged { streams, meta, gaps });
    let mut costs = Vec::with_capacity(batches.len());
    for (id, batch) in batches {
        let lies_in = |gap: &Gap| {
            gap.stream == id && gap.lost.start <= batch.base && batch.end() <= gap.lost.end
        };
        let tail = streams.get_mut(&id).filter(|_| gaps.iter().any(lies_in));
        let Batch { base, count, max_timestamp_ms, payload } = batch;
        let crc32c = crc32c::crc32c(&payload);
        costs.push(tail::cost_bytes(payload.len()));
        let cached = Cached { base, count, max_timestamp_ms, log_end: log_start, payload, crc32c };
        if !tail.is_some_and(|(_, tail)| tail.fill(cached)) {
            return Err(format!("stream {id}: offset {base} is in no gap"));
        }
    }
    Ok(costs)
}
