//! A stream's state: its tail, and what does not change or needs no lock.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::Tail;
use crate::moved::{Moved, MovedCounters};
use crate::types::{KIND_STATE, StreamId};

/// A stream's state, shared by its handles, the uploader and the log cache.
pub(crate) struct StreamState {
    pub(crate) id: StreamId,
    pub(crate) kind: u8,
    /// See [`crate::Change::CreateStream`]; in the directory of each object with the stream.
    pub(crate) label: Bytes,
    /// Locked from the append to the WAL to the push of the batch. So code that reads the end of
    /// the log and then locks the tail finds every batch below that end in it. Never held over I/O.
    pub(crate) tail: Mutex<Tail>,
    pub(crate) moved: MovedCounters,
}

impl StreamState {
    pub(crate) fn new(id: StreamId, kind: u8, label: Bytes, tail: Tail) -> Self {
        Self { id, kind, label, tail: Mutex::new(tail), moved: MovedCounters::default() }
    }

    /// Returns the watchers, to be notified when no lock is held any more: wakers are foreign code.
    pub(crate) fn watchers(&self) -> Vec<Arc<Notify>> {
        self.tail.lock().watchers.clone()
    }

    /// Whether only the stream's checkpoint is kept.
    pub(crate) fn is_state(&self) -> bool {
        self.kind >= KIND_STATE
    }

    /// Returns what the stream has in the object store and has moved since the start.
    pub(crate) fn moved(&self) -> Moved {
        let tail = self.tail.lock();
        Moved {
            stored_bytes: tail.range_bytes,
            stored_ranges: tail.ranges.len() as u64,
            waiting_bytes: tail.tail_bytes,
            ..self.moved.counts()
        }
    }
}
