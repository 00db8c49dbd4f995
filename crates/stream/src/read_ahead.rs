//! Read-ahead: fetches what a lagging reader will want next while it is busy with what it has. See
//! `docs/cold-reads.md`, 3.
//!
//! Reads carry no identity. A reader is recognized by where its last read ended: a read that begins
//! there is treated as the same reader and continues with its window. A read that begins elsewhere
//! is a new reader.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use alluvium_wal::LogOffset;
use futures::future::join_all;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::budget::Budget;
use crate::objects::{FlightGuard, Objects, READ_BYTES};
use crate::tail::{Source, StreamState};
use crate::types::{StreamId, StreamOffset};

/// The first window, after the second of two consecutive reads; it doubles with each further one up
/// to one large GET. Whole blocks are fetched, at least one.
const FIRST_WINDOW_BYTES: u64 = 256 << 10;
/// Number of readers that are remembered; the one with the oldest read is dropped first.
const MAX_READERS: usize = 1024;
/// A reader that has not read for this long is dropped, and its requests in flight are cancelled.
const READER_TIMEOUT: Duration = Duration::from_secs(30);

type Position = (StreamId, StreamOffset);

/// The lagging readers between two reads.
#[derive(Default)]
pub(crate) struct Readers {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    by_position: HashMap<Position, (u64, Reader)>,
    /// Oldest first.
    by_age: BTreeMap<u64, (Instant, Position)>,
    next_number: u64,
}

/// A lagging reader that has read before. Dropping it cancels requests that are in flight for it
/// alone.
#[derive(Default)]
pub(crate) struct Reader {
    window_bytes: u64,
    plan: Arc<Plan>,
    task: Option<Task>,
    /// The request that its last read stopped waiting for.
    waited_for: Option<FlightGuard>,
}

/// How far was read ahead.
#[derive(Default)]
struct Plan {
    /// The reader reads further ahead when it gets here: half of the window is left.
    half: AtomicU64,
    end: AtomicU64,
}

struct Task(JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Readers {
    /// Removes and returns the reader whose last read ended at `from`.
    pub(crate) fn take(&self, stream: StreamId, from: StreamOffset) -> Option<Reader> {
        let mut table = self.table.lock();
        let (number, reader) = table.by_position.remove(&(stream, from))?;
        table.by_age.remove(&number);
        Some(reader)
    }

    /// Stores `reader`, which is expected to continue at `next`.
    pub(crate) fn store(&self, stream: StreamId, next: StreamOffset, reader: Reader) {
        let position = (stream, next);
        let now = Instant::now();
        let mut forgotten = Vec::new();
        let mut table = self.table.lock();
        let table = &mut *table;
        // Of two readers at the same position one suffices: what it reads ahead serves both.
        let reader = match table.by_position.remove(&position) {
            Some((number, other)) => {
                table.by_age.remove(&number);
                let (kept, dropped) = match other.window_bytes > reader.window_bytes {
                    true => (other, reader),
                    false => (reader, other),
                };
                forgotten.push(dropped);
                kept
            }
            None => reader,
        };
        table.by_position.insert(position, (table.next_number, reader));
        table.by_age.insert(table.next_number, (now, position));
        table.next_number += 1;
        while let Some((&number, &(left, position))) = table.by_age.first_key_value()
            && (table.by_age.len() > MAX_READERS || now.duration_since(left) > READER_TIMEOUT)
        {
            table.by_age.remove(&number);
            forgotten.extend(table.by_position.remove(&position).map(|(_, reader)| reader));
        }
    }
}

impl Reader {
    /// Records that the reader has read up to `next`, starting where its last read ended, and reads
    /// ahead from there if it is time.
    pub(crate) fn read_on(
        &mut self,
        objects: &Objects,
        state: &Arc<StreamState>,
        next: StreamOffset,
    ) {
        self.waited_for = None;
        let is_busy = self.task.as_ref().is_some_and(|task| !task.0.is_finished());
        self.window_bytes = (self.window_bytes * 2).clamp(FIRST_WINDOW_BYTES, READ_BYTES);
        if is_busy || !objects.reads_ahead() || next.0 < self.plan.half.load(Ordering::Relaxed) {
            return;
        }
        let from = next.max(StreamOffset(self.plan.end.load(Ordering::Relaxed)));
        let (plan, window_bytes) = (self.plan.clone(), self.window_bytes);
        let task = read_ahead(objects.clone(), state.clone(), from, window_bytes, plan);
        self.task = Some(Task(objects.background().spawn(task)));
    }

    /// Keeps alive a request that the reader stopped waiting for and will come back for.
    pub(crate) fn waited_for(&mut self, guard: FlightGuard) {
        self.waited_for = Some(guard);
    }
}

/// Fetches what follows `from`, from one object to the next. Errors are ignored: the reader meets
/// them when it gets there.
async fn read_ahead(
    objects: Objects,
    state: Arc<StreamState>,
    from: StreamOffset,
    window_bytes: u64,
    plan: Arc<Plan>,
) {
    let mut under_way = Vec::new();
    let mut left_bytes = window_bytes;
    let (mut half, mut end) = (from, from);
    while left_bytes > 0 {
        let source = {
            let tail = state.tail.lock();
            if tail.deleted {
                return;
            }
            tail.source(end, &mut Budget::new(0), LogOffset(0))
        };
        let Source::Object(range) = source else { break };
        let Ok(blocks) = objects.blocks(&range.object, state.id, end).await else { break };
        let blocks = blocks.after(end);
        let wanted = blocks.iter().take_while(|block| {
            let is_wanted = left_bytes > 0;
            left_bytes = left_bytes.saturating_sub(block.len_bytes.into());
            if is_wanted && left_bytes >= window_bytes / 2 {
                half = block.end;
            }
            is_wanted
        });
        let wanted = wanted.count();
        let (done, flights) = objects.fetch_ahead(&range.object, &blocks[..wanted]);
        under_way.extend(flights);
        if done < blocks.len() {
            end = end.max(blocks[done].start);
            break;
        }
        end = range.end;
    }
    plan.half.store(half.min(end).0, Ordering::Relaxed);
    plan.end.store(end.0, Ordering::Relaxed);
    join_all(under_way).await;
}
