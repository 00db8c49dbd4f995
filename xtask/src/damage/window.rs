//! The silent window: the last records before a kill, which neither a header of the log nor a later
//! record proves to be durable. Damage to them is indistinguishable from a torn write
//! (docs/format/wal.md, section 8), so they may be missing without a report.

use std::collections::BTreeMap;
use std::ops::Range;

use super::files::{Content, Files, WAL};
use super::layout::{Class, WalRecord, header_durable, wal_records};
use super::model::Partition;

/// Offsets by partition.
pub(super) type Offsets = BTreeMap<Partition, Vec<Range<i64>>>;

/// Whether an offset is in one of the ranges.
pub(super) fn has(offsets: &Offsets, partition: &Partition, offset: i64) -> bool {
    let ranges = offsets.get(partition);
    ranges.is_some_and(|ranges| ranges.iter().any(|range| range.contains(&offset)))
}

/// Returns the records of `before`, a log without damage, that may be missing from `now`, the same
/// log with damage. `None` if none of them is damaged.
pub(super) fn unproven(before: &Files, now: &Files) -> Option<Vec<WalRecord>> {
    let records = wal_records(before);
    let nothing = Content::default();
    let [was, is] = [before, now].map(|files| files.get(WAL).unwrap_or(&nothing));
    let is_intact =
        |record: &&WalRecord| was.range(record.at, record.len) == is.range(record.at, record.len);
    let proofs = records.iter().filter(is_intact).map(|record| record.proof);
    let headers = header_durable(before).max(header_durable(now));
    let proven = proofs.max().unwrap_or(0).max(headers);
    let unproven: Vec<WalRecord> =
        records.iter().filter(|record| record.end > proven).cloned().collect();
    (!unproven.iter().all(|record| is_intact(&record))).then_some(unproven)
}

/// Returns the partitions' offsets in records of the log.
pub(super) fn offsets(records: &[WalRecord], streams: &BTreeMap<u64, Partition>) -> Offsets {
    let mut offsets = Offsets::new();
    for WalRecord { class, extent, .. } in records {
        if let (Class::Data | Class::Transactional | Class::Marker, Some(partition)) =
            (class, streams.get(&extent.stream))
        {
            let range = extent.start as i64..extent.end as i64;
            offsets.entry(partition.clone()).or_default().push(range);
        }
    }
    offsets
}
