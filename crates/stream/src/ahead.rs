//! Reading ahead: what a late reader will want next is fetched while it is busy with what it has.
//! `docs/late-reads.md`, 3.
//!
//! Nobody says who reads. A reader is known by where its last read has ended: who begins there is
//! taken for the one who ended there, and goes on with its window. Who begins elsewhere is a new
//! one.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use alluvium_wal::LogOffset;
use futures::future::join_all;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::objects::{Budget, Objects, READ_BYTES, Ticket};
use crate::tail::{Source, StreamState};
use crate::types::{StreamId, StreamOffset};

/// The first window, after the second of two reads that follow each other; it doubles with each
/// further one up to one large GET. What is fetched is whole blocks, at least one.
const FIRST_WINDOW_BYTES: u64 = 256 << 10;
/// Readers that are remembered; the one that was away for longest is forgotten first.
const MAX_READERS: usize = 1024;
/// A reader that was away for so long is forgotten, and what was on its way for it given up.
const AWAY: Duration = Duration::from_secs(30);

type Place = (StreamId, StreamOffset);

/// The readers between two reads.
#[derive(Default)]
pub(crate) struct Readers {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    by_place: HashMap<Place, (u64, Reader)>,
    /// Oldest first.
    by_age: BTreeMap<u64, (Instant, Place)>,
    next_number: u64,
}

/// A late reader that has read before. Dropping it gives up what is on its way for it alone.
#[derive(Default)]
pub(crate) struct Reader {
    window_bytes: u64,
    plan: Arc<Plan>,
    task: Option<Task>,
    /// What its last read did not wait for to the end.
    waited_for: Option<Ticket>,
}

/// How far was read ahead.
#[derive(Default)]
struct Plan {
    /// When the reader comes here, it is time to read further ahead: a half is left.
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
    /// The reader whose last read has ended at `from`.
    pub(crate) fn take(&self, stream: StreamId, from: StreamOffset) -> Option<Reader> {
        let mut table = self.table.lock();
        let (number, reader) = table.by_place.remove(&(stream, from))?;
        table.by_age.remove(&number);
        Some(reader)
    }

    /// `reader` comes back to `next`, or so it is hoped.
    pub(crate) fn leave(&self, stream: StreamId, next: StreamOffset, reader: Reader) {
        let place = (stream, next);
        let now = Instant::now();
        let mut forgotten = Vec::new();
        let mut table = self.table.lock();
        let table = &mut *table;
        // Of two at the same place one is enough: what it reads ahead serves both.
        let reader = match table.by_place.remove(&place) {
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
        table.by_place.insert(place, (table.next_number, reader));
        table.by_age.insert(table.next_number, (now, place));
        table.next_number += 1;
        while let Some((&number, &(left, place))) = table.by_age.first_key_value()
            && (table.by_age.len() > MAX_READERS || now.duration_since(left) > AWAY)
        {
            table.by_age.remove(&number);
            forgotten.extend(table.by_place.remove(&place).map(|(_, reader)| reader));
        }
    }
}

impl Reader {
    /// It has read on up to `next`, where the last read has left it: read ahead from there if it is
    /// time.
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

    /// It gave up waiting for this, and will be back for it.
    pub(crate) fn waited_for(&mut self, ticket: Ticket) {
        self.waited_for = Some(ticket);
    }
}

/// Fetch what follows `from`, from one object to the next. Errors are the reader's, when it comes
/// there.
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
        let Ok(blocks) = objects.blocks(&range.object, state.id).await else { break };
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
