//! Ends records: the end of each stream, written to the WAL behind its batches. They show recovery
//! what a damaged part of the log held, also at the end of a stream, so that no offset is handed
//! out twice. Layout and rationale: `docs/format/stream-record.md`.

mod evidence;
pub(crate) mod task;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use alluvium_wal::{AppendError, LogOffset, Wal};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::error::StoreError;
use crate::record::{End, encode_ends};

pub(crate) use evidence::{Continuation, Evidence};

/// An upper bound of the number of offsets in any batch of the WAL. The catalog has it before a
/// larger batch is appended, so that recovery has a bound for batches of which nothing is left.
/// Never decreases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LargestCount(pub(crate) u32);

impl Default for LargestCount {
    fn default() -> Self {
        Self::FIRST
    }
}

impl LargestCount {
    /// More than clients put into a batch with their defaults.
    const FIRST: Self = Self(16 << 10);
    /// The only bound for a WAL with batches of a build that did not record one.
    pub(crate) const UNKNOWN: Self = Self(u32::MAX);

    /// Rounds up, so that the bound is raised only a few times.
    pub(crate) fn at_least(count: u32) -> Self {
        Self(count.checked_next_power_of_two().unwrap_or(u32::MAX)).max(Self::FIRST)
    }
}

/// The state of this module's task.
pub(crate) struct Ends {
    /// A batch was appended since the task last checked.
    changed: AtomicBool,
    wanted: Notify,
    /// The ends of the ranges covered by the last two lists. The next list covers the log from the
    /// first one on, so that each part of it is covered twice.
    covered: Mutex<[LogOffset; 2]>,
    /// Bound of the length of a WAL record.
    max_record_bytes: u32,
    /// The durable [`LargestCount`].
    largest_count: AtomicU32,
    raising: AtomicBool,
}

impl Ends {
    /// Creates the state. The first list covers the log from `from` on. With `changed` it is
    /// written without waiting for an append.
    pub(crate) fn new(
        from: LogOffset,
        changed: bool,
        max_record_bytes: u32,
        largest_count: LargestCount,
    ) -> Self {
        let ends = Self {
            changed: AtomicBool::new(false),
            wanted: Notify::new(),
            covered: Mutex::new([from; 2]),
            max_record_bytes,
            largest_count: largest_count.0.into(),
            raising: AtomicBool::new(false),
        };
        if changed {
            ends.appended();
        }
        ends
    }

    /// Returns the bound of the length of a record of the WAL.
    pub(crate) fn max_record_bytes(&self) -> u32 {
        self.max_record_bytes
    }

    /// Returns the current bound: a batch with more offsets is not appended now.
    pub(crate) fn largest_count(&self) -> u32 {
        self.largest_count.load(Ordering::Acquire)
    }

    /// Sets the bound, once it is in the catalog.
    pub(crate) fn set_largest_count(&self, largest: LargestCount) {
        self.largest_count.store(largest.0, Ordering::Release);
    }

    /// Returns false if the bound is being raised already.
    pub(crate) fn begin_to_raise(&self) -> bool {
        !self.raising.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn end_to_raise(&self) {
        self.raising.store(false, Ordering::Release);
    }

    /// Records that a batch was appended to the log. Costs one load while the task has work to do
    /// anyway.
    ///
    /// The load comes after the append has taken the WAL's lock, and the task clears the flag
    /// before it takes that lock for its cut. So either this call sees the flag cleared, or the cut
    /// lies after the batch.
    pub(crate) fn appended(&self) {
        if !self.changed.load(Ordering::Acquire) && !self.changed.swap(true, Ordering::AcqRel) {
            self.wanted.notify_one();
        }
    }
}

/// Appends the list of `ends`, which covers this range of the log. `catalog_version` is that of the
/// last catalog record in the log. Returns false if there is no space.
pub(crate) fn append(
    wal: &Wal,
    covered: std::ops::Range<LogOffset>,
    ends: &[End],
    catalog_version: u64,
    max_record_bytes: u32,
) -> Result<bool, StoreError> {
    for payload in encode_ends(covered, ends, catalog_version, max_record_bytes) {
        match wal.append(&[&payload]) {
            Ok(_) => {}
            Err(AppendError::OverCapacity { .. } | AppendError::WindowFull { .. }) => {
                return Ok(false);
            }
            Err(AppendError::Failed(error)) => return Err(StoreError::Wal(error)),
            Err(AppendError::Closed) => return Err(StoreError::Closed),
            Err(error) => return Err(StoreError::Failed(format!("an ends record: {error}"))),
        }
    }
    Ok(true)
}
