//! Ends records: how far each stream had gone, written into the WAL behind its batches. With them
//! recovery knows what a damaged part of the log held, also at the end of a stream, so that no
//! offset is handed out twice. Layout and argument: `docs/format/stream-record.md`.

mod evidence;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use alluvium_wal::{AppendError, LogOffset, Wal};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::catalog::Change;
use crate::record::{End, encode_ends};
use crate::store::{Shared, StoreError};
use crate::tail::StreamState;

pub(crate) use evidence::{Evidence, GoesOn};

/// Streams that are looked at in one go.
const CHUNK_STREAMS: usize = 1024;

/// Where the catalog's metadata has [`LargestCount`].
const LARGEST_COUNT_KEY: &str = "stream/largest-count";

/// No batch that was appended to the WAL has more offsets. The catalog has it before a larger batch
/// is appended, so that recovery has a bound for batches of which nothing is left. Never goes back.
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
    /// What is true of a WAL with batches by a build that did not keep it.
    pub(crate) const UNKNOWN: Self = Self(u32::MAX);

    /// With room for more, so that it is raised only a few times.
    pub(crate) fn at_least(count: u32) -> Self {
        Self(count.checked_next_power_of_two().unwrap_or(u32::MAX)).max(Self::FIRST)
    }

    /// As the catalog has it; `None` if it never had one.
    pub(crate) fn of(meta: &BTreeMap<String, Vec<u8>>) -> Option<Self> {
        let text = std::str::from_utf8(meta.get(LARGEST_COUNT_KEY)?).ok()?;
        text.parse().ok().map(Self)
    }

    pub(crate) fn change(self) -> Change {
        Change::PutMeta { key: LARGEST_COUNT_KEY.into(), value: self.0.to_string().into() }
    }
}

/// What the task of this module knows.
pub(crate) struct Ends {
    /// Something was appended since the task last looked.
    changed: AtomicBool,
    wanted: Notify,
    /// The ends of the ranges that the last two lists have covered. The next list covers the log
    /// from the first one on, so that each part of it is covered twice.
    covered: Mutex<[LogOffset; 2]>,
    /// Of a WAL record.
    max_record_bytes: u32,
    /// [`LargestCount`], durable.
    largest_count: AtomicU32,
    raising: AtomicBool,
}

impl Ends {
    /// The first list is to cover the log from `from` on. `changed`: without waiting for an append.
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

    /// A batch with more offsets is not appended now.
    pub(crate) fn largest_count(&self) -> u32 {
        self.largest_count.load(Ordering::Acquire)
    }

    /// The catalog has it.
    pub(crate) fn set_largest_count(&self, largest: LargestCount) {
        self.largest_count.store(largest.0, Ordering::Release);
    }

    /// False if somebody is at it.
    pub(crate) fn begin_to_raise(&self) -> bool {
        !self.raising.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn end_to_raise(&self) {
        self.raising.store(false, Ordering::Release);
    }

    /// A batch was put into the log. Costs a load while the task has work to do anyway.
    ///
    /// The load comes after the WAL's lock was taken for the append, and the task clears the flag
    /// before it takes that lock for its cut: so either this sees the flag cleared, or the cut lies
    /// behind the batch.
    pub(crate) fn appended(&self) {
        if !self.changed.load(Ordering::Acquire) && !self.changed.swap(true, Ordering::AcqRel) {
            self.wanted.notify_one();
        }
    }
}

/// While batches are appended, writes a list of ends at each interval; after the last one the list,
/// then the WAL's durable offset into its header.
pub(crate) async fn run(shared: Arc<Shared>) {
    let ends = &shared.ends;
    let interval = shared.options.ends_interval;
    loop {
        ends.wanted.notified().await;
        tokio::time::sleep(interval).await;
        while ends.changed.swap(false, Ordering::AcqRel) {
            match write(&shared).await {
                Ok(true) => {}
                // The log is full, perhaps for long, so that it may be idle. What is not covered
                // now the next list covers.
                Ok(false) => {
                    ends.changed.store(true, Ordering::Release);
                    if let Err(error) = persist_durable(&shared).await {
                        return shared.fail(error);
                    }
                }
                Err(error) => return shared.fail(error),
            }
            tokio::time::sleep(interval).await;
        }
        if let Err(error) = persist_durable(&shared).await {
            return shared.fail(error);
        }
    }
}

async fn persist_durable(shared: &Shared) -> Result<(), StoreError> {
    shared.wal.wait_durable(shared.wal.appended()).await?;
    shared.wal.persist_durable();
    Ok(())
}

/// Before the WAL is closed: the last list, if there is room for it.
pub(crate) async fn close(shared: &Shared) -> Result<(), StoreError> {
    if shared.ends.changed.swap(false, Ordering::AcqRel) {
        // Nothing is appended any more, so the whole window is free then.
        shared.wal.wait_durable(shared.wal.appended()).await?;
        write(shared).await?;
    }
    Ok(())
}

/// Append a list that covers the log up to its end. False if there is no room.
async fn write(shared: &Shared) -> Result<bool, StoreError> {
    let ends = &shared.ends;
    let [from, last] = *ends.covered.lock();
    let to = shared.wal.appended();
    // After the cut: an append holds its stream's tail from the WAL to the push, so every batch
    // below the cut is in its tail by now.
    let streams: Vec<_> = shared.streams.read().values().cloned().collect();
    let mut next = Vec::new();
    for some in streams.chunks(CHUNK_STREAMS) {
        next.extend(some.iter().filter_map(|stream| end_since(stream, from)));
        tokio::task::yield_now().await;
    }
    let is_written = append(&shared.wal, from..to, &next, ends.max_record_bytes)?;
    if is_written {
        *ends.covered.lock() = [last, to];
    }
    Ok(is_written)
}

/// The stream's next offset, if the log may have to tell it: a batch was appended at or behind
/// `from` that is not uploaded, or the stream ends with lost offsets, of which no batch tells.
fn end_since(stream: &StreamState, from: LogOffset) -> Option<End> {
    let tail = stream.tail.lock();
    let since = tail.log_end() > from || tail.ends_with_gap();
    (!tail.deleted && since && tail.next > tail.uploaded_end).then_some(End {
        stream: stream.id,
        next: tail.next,
        known: tail.next,
    })
}

/// Append the list of `ends`, which covers that range of the log. False if there is no room.
pub(crate) fn append(
    wal: &Wal,
    covered: std::ops::Range<LogOffset>,
    ends: &[End],
    max_record_bytes: u32,
) -> Result<bool, StoreError> {
    for payload in encode_ends(covered, ends, max_record_bytes) {
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
