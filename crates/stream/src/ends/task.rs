//! The task that writes lists of ends to the log.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use alluvium_wal::LogOffset;

use super::append;
use crate::error::StoreError;
use crate::record::{End, encoded_bytes};
use crate::shared::Shared;
use crate::tail::StreamState;

/// Runs the task: while batches are appended, it writes a list of ends at each interval; after the
/// last batch it writes the list and then the WAL's durable offset into the WAL's header.
pub(crate) async fn run(shared: Arc<Shared>) {
    let ends = &shared.ends;
    let interval = shared.options.ends_interval;
    loop {
        ends.wanted.notified().await;
        tokio::time::sleep(interval).await;
        while ends.changed.swap(false, Ordering::AcqRel) {
            match write(&shared).await {
                Ok(true) => {}
                // The log is full, perhaps for a long time in which it is idle. The next list
                // covers what is not covered now.
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

/// Writes the last list before the WAL is closed, if there is space for it.
pub(crate) async fn close(shared: &Shared) -> Result<(), StoreError> {
    if shared.ends.changed.swap(false, Ordering::AcqRel) {
        // Nothing is appended any more, so the whole window is free after this.
        shared.wal.wait_durable(shared.wal.appended()).await?;
        write(shared).await?;
    }
    Ok(())
}

/// Appends a list that covers the log up to its end. Returns false if there is no space.
async fn write(shared: &Shared) -> Result<bool, StoreError> {
    let ends = &shared.ends;
    let [from, last] = *ends.covered.lock();
    let to = shared.wal.appended();
    // After the cut: an append holds the lock of its stream's tail from the WAL to the push, so
    // every batch below the cut is in its tail by now.
    let mut next = Vec::new();
    shared.visit_streams(|stream| next.extend(end_since(stream, from))).await;
    // The rest of a full log is for changes of the catalog.
    if !shared.has_space_for(encoded_bytes(next.len(), ends.max_record_bytes)) {
        return Ok(false);
    }
    let recorded = shared.catalog.recorded.load(Ordering::Acquire);
    let is_written = append(&shared.wal, from..to, &next, recorded, ends.max_record_bytes)?;
    if is_written {
        *ends.covered.lock() = [last, to];
    }
    Ok(is_written)
}

/// Returns the stream's next offset, if the log may need it: a batch that is not uploaded was
/// appended at or after `from`, or the stream ends with lost offsets, which no batch shows.
fn end_since(stream: &StreamState, from: LogOffset) -> Option<End> {
    let tail = stream.tail.lock();
    let since = tail.log_end() > from || tail.ends_with_gap();
    (!tail.deleted && since && tail.next > tail.uploaded_end).then_some(End {
        stream: stream.id,
        next: tail.next,
        known: tail.next,
    })
}
