//! Repair of gaps that recovery found: the owner of the streams supplies batches for them.

use std::collections::{BTreeMap, HashMap};

use alluvium_wal::LogOffset;

use crate::fold::{DamagedStreams, Fold};
use crate::report::Gap;
use crate::tail::{self, Cached, Tail};
use crate::types::{Batch, StreamId};

/// Asks `fold` for batches for the gaps and inserts them. Such a batch becomes durable with the
/// batch before it, or is durable from `log_start` on, and is uploaded like any other. Returns the
/// memory cost of each.
///
/// # Errors
/// A batch does not lie within a gap.
pub(crate) fn repair(
    fold: &dyn Fold,
    streams: &mut HashMap<StreamId, (u8, Tail)>,
    meta: &BTreeMap<String, Vec<u8>>,
    gaps: &[Gap],
    log_start: LogOffset,
) -> Result<Vec<u64>, String> {
    if gaps.is_empty() {
        return Ok(Vec::new());
    }
    let batches = fold.repair(&DamagedStreams { streams, meta, gaps });
    let mut costs = Vec::with_capacity(batches.len());
    for (id, batch) in batches {
        let lies_in = |gap: &Gap| gap.offsets.start <= batch.base && batch.end() <= gap.offsets.end;
        // Gaps are sorted.
        let first = gaps.partition_point(|gap| (gap.stream, gap.offsets.end) <= (id, batch.base));
        let is_in_gap = gaps.get(first).is_some_and(|gap| gap.stream == id && lies_in(gap));
        let tail = streams.get_mut(&id).filter(|_| is_in_gap);
        let Batch { base, count, max_timestamp_ms, payload } = batch;
        let crc32c = crc32c::crc32c(&payload);
        costs.push(tail::cost_bytes(payload.len()));
        let cached = Cached { base, count, max_timestamp_ms, log_end: log_start, payload, crc32c };
        if !tail.is_some_and(|(_, tail)| tail.fill(cached)) {
            return Err(format!("stream {id}: offset {base} is not in a gap"));
        }
    }
    Ok(costs)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use bytes::Bytes;

    use super::*;
    use crate::report::GapCause;
    use crate::types::StreamOffset;

    struct Owner(Vec<(u64, u64)>);

    impl Fold for Owner {
        fn fold(
            &self,
            _: StreamId,
            _: u8,
            _: std::ops::Range<StreamOffset>,
            _: StreamOffset,
            _: Option<&[u8]>,
            _: &[Batch],
        ) -> Option<Vec<u8>> {
            None
        }

        fn repair(&self, damaged: &DamagedStreams<'_>) -> Vec<(StreamId, Batch)> {
            let replay = damaged.replay(StreamId(1)).unwrap();
            assert_eq!(
                replay.gaps(),
                damaged.gaps().iter().map(|gap| gap.offsets.clone()).collect::<Vec<_>>()
            );
            let batch = |(id, base): &(u64, u64)| {
                let payload = Bytes::from_static(b"repair");
                let base = StreamOffset(*base);
                (StreamId(*id), Batch { base, count: 1, max_timestamp_ms: -1, payload })
            };
            self.0.iter().map(batch).collect()
        }
    }

    /// Stream 1 is uploaded up to 10, has batches at 12 and 13, and ends at 16.
    fn repaired(batches: &[(u64, u64)]) -> Result<Vec<(u64, u64)>, String> {
        let mut tail = Tail::restored(StreamOffset(0), StreamOffset(10), None, VecDeque::new());
        for base in [12, 13] {
            let payload = Bytes::from_static(b"kept");
            tail.push(Cached {
                base: StreamOffset(base),
                count: 1,
                max_timestamp_ms: -1,
                log_end: LogOffset(100 * base),
                payload,
                crc32c: 0,
            });
        }
        tail.next = StreamOffset(16);
        let mut streams = HashMap::from([(StreamId(1), (0, tail))]);
        let lost = |from, to| Gap {
            stream: StreamId(1),
            offsets: StreamOffset(from)..StreamOffset(to),
            cause: GapCause::Lost,
        };
        let gaps = [lost(10, 12), lost(14, 16)];
        let owner = Owner(batches.to_vec());
        let costs = repair(&owner, &mut streams, &BTreeMap::new(), &gaps, LogOffset(7))?;
        assert_eq!(costs, vec![tail::cost_bytes(6); batches.len()]);
        let (_, tail) = &streams[&StreamId(1)];
        assert_eq!(tail.next, StreamOffset(16));
        Ok(tail.pinned().map(|batch| (batch.base.0, batch.log_end.0)).collect())
    }

    #[test]
    fn batches_in_gaps_become_durable_with_the_batch_before_them() {
        let before = [(12, 1_200), (13, 1_300)];
        assert_eq!(repaired(&[]).unwrap(), before);
        let all = [(10, 7), (11, 7), (12, 1_200), (13, 1_300), (14, 1_300), (15, 1_300)];
        assert_eq!(repaired(&[(1, 15), (1, 11), (1, 10), (1, 14)]).unwrap(), all);
    }

    #[test]
    fn a_batch_outside_of_a_gap_is_refused() {
        for wrong in [(1, 9), (1, 12), (1, 16), (2, 10)] {
            assert!(repaired(&[wrong]).is_err(), "{wrong:?}");
        }
        assert!(repaired(&[(1, 10), (1, 10)]).is_err(), "the offset is taken");
    }
}
