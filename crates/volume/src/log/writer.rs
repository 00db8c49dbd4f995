//! The queue in front of the write-ahead log. What raft hands out cannot be given back, so a record
//! that the log refuses for lack of space waits here, and all behind it too: the order of events is
//! the order of the log. `docs/format/volume-log.md`, section 5.

use std::collections::VecDeque;

use alluvium_wal::{AppendError, LogOffset, Parts, Placed, Wal, WalError};
use bytes::Bytes;
use raft::eraftpb::Message;

use super::record::{Entries, Record};
use crate::types::{GroupId, HardState, Index, PeerId, Position};

/// A body of at least this many bytes is not copied by the log.
const SHARED_BYTES: usize = 32 << 10;

/// A record as bytes: the parts are written one after the other.
#[derive(Debug)]
pub(crate) struct Encoded {
    head: Vec<u8>,
    data: Vec<Bytes>,
    /// What the record states of its replica.
    pub(crate) states: States,
}

/// What a record states of its replica, as far as the server has to remember it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct States {
    pub(crate) hard_state: Option<HardState>,
    /// The first index and the last entry of the entries.
    pub(crate) entries: Option<(Index, Position)>,
    pub(crate) barrier: Option<Index>,
}

impl Encoded {
    /// A record with entries. `data` has two parts for each, and the entries have none.
    pub(crate) fn entries(entries: &Entries, data: Vec<Bytes>) -> Self {
        let last_term = entries.entries.last().map(|entry| entry.term);
        let states = States {
            hard_state: Some(entries.state),
            entries: last_term
                .map(|term| (entries.first, Position { index: entries.last(), term })),
            barrier: None,
        };
        assert_eq!(data.len(), 2 * entries.entries.len(), "two parts for each entry");
        let lengths = data.chunks(2).map(|parts| parts[0].len() + parts[1].len());
        Self { head: entries.encode(lengths), data, states }
    }

    /// A record without data.
    pub(crate) fn record(record: &Record) -> Self {
        let barrier = match record {
            Record::Install(install) => Some(install.barrier),
            _ => None,
        };
        let states = States { barrier, ..States::default() };
        Self { head: record.encode_head(), data: Vec::new(), states }
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.head.len() + self.data.iter().map(Bytes::len).sum::<usize>()
    }

    /// The slices before the body, and the body.
    fn parts(&self) -> (Vec<&[u8]>, Bytes) {
        let mut head: Vec<&[u8]> = vec![&self.head];
        let body = self.data.last().filter(|last| last.len() >= SHARED_BYTES).cloned();
        let copied = self.data.len() - usize::from(body.is_some());
        head.extend(self.data[..copied].iter().map(|part| &part[..]));
        (head, body.unwrap_or_default())
    }
}

/// What is done when the log has an item durably.
#[derive(Debug)]
pub(crate) enum Promise {
    /// A `Ready` of raft, or a part of one.
    Ready {
        /// The number, if this is its last record.
        number: Option<u64>,
        /// The messages that may be sent then.
        messages: Vec<Message>,
    },
    /// A commit index.
    Commit,
    /// The barrier of an install.
    Install,
    /// The first record of a replica.
    Creation,
    /// A replica is gone.
    Tombstone,
}

/// An item of the log's order of events.
#[derive(Debug)]
pub(crate) struct Item {
    /// The replica. Its group may have another one when the log has the item.
    pub(crate) replica: (GroupId, PeerId),
    pub(crate) promise: Promise,
    /// `None` if all that is before it suffices.
    pub(crate) record: Option<Encoded>,
    /// Where the item ends, once the log has it.
    end: LogOffset,
}

impl Item {
    pub(crate) fn new(
        replica: (GroupId, PeerId),
        promise: Promise,
        record: Option<Encoded>,
    ) -> Self {
        Self { replica, promise, record, end: LogOffset(0) }
    }
}

/// The log, and what waits for it.
pub(crate) struct LogWriter {
    wal: Wal,
    items: VecDeque<Item>,
    /// The first items are in the log, and wait to be durable. The others wait for space.
    placed: usize,
    /// Bytes of the records that wait for space.
    queued_bytes: usize,
}

impl LogWriter {
    pub(crate) fn new(wal: Wal) -> Self {
        Self { wal, items: VecDeque::new(), placed: 0, queued_bytes: 0 }
    }

    pub(crate) fn wal(&self) -> &Wal {
        &self.wal
    }

    /// The log alone. Nothing was promised of the records that wait for space.
    pub(crate) fn into_wal(self) -> Wal {
        self.wal
    }

    /// Number of items that are not durable.
    #[cfg(test)]
    pub(crate) fn items(&self) -> usize {
        self.items.len()
    }

    /// Adds an item behind all others.
    pub(crate) fn push(&mut self, item: Item) {
        self.queued_bytes += item.record.as_ref().map_or(0, Encoded::len);
        self.items.push_back(item);
    }

    /// The end of the oldest item that is not durable yet.
    pub(crate) fn awaits(&self) -> Option<LogOffset> {
        (self.placed > 0).then(|| self.items[0].end)
    }

    /// Bytes of the records that wait for space.
    pub(crate) fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    /// The first index that a record of the replica replaces while it waits for space.
    pub(crate) fn queued_first(&self, replica: (GroupId, PeerId)) -> Option<Index> {
        let queued = self.queued(replica).filter_map(|record| record.states.entries);
        queued.map(|(first, _)| first).min()
    }

    /// Whether a record of the replica waits for space.
    pub(crate) fn has_queued(&self, replica: (GroupId, PeerId)) -> bool {
        self.queued(replica).next().is_some()
    }

    /// Whether an item of the replica is not durable yet that states a commit index of at least
    /// `commit`.
    pub(crate) fn states_commit(&self, replica: (GroupId, PeerId), commit: Index) -> bool {
        self.items.iter().filter(|item| item.replica == replica).any(|item| {
            let states = item.record.as_ref().and_then(|record| record.states.hard_state);
            states.is_some_and(|state| state.commit >= commit)
        })
    }

    fn queued(&self, replica: (GroupId, PeerId)) -> impl Iterator<Item = &Encoded> {
        let queued = self.items.range(self.placed..).filter(move |item| item.replica == replica);
        queued.filter_map(|item| item.record.as_ref())
    }

    /// Appends what waits, as far as the log has space. Calls `placed` for each record that it
    /// takes. Returns false if there was nothing to append, or no space.
    pub(crate) fn append(
        &mut self,
        mut placed: impl FnMut((GroupId, PeerId), &States, LogOffset),
    ) -> Result<bool, WalError> {
        if self.placed == self.items.len() {
            return Ok(false);
        }
        let before = self.placed;
        let queued = self.items.range(self.placed..).filter_map(|item| item.record.as_ref());
        let parts: Vec<(Vec<&[u8]>, Bytes)> = queued.map(Encoded::parts).collect();
        let records: Vec<Parts<'_>> =
            parts.iter().map(|(head, body)| Parts { head, body }).collect();
        let places = self.append_records(&records)?;
        drop(parts);
        let mut places = places.into_iter();
        while self.placed < self.items.len() {
            let end_before = match self.placed {
                0 => self.wal.appended(),
                before => self.items[before - 1].end,
            };
            let item = &mut self.items[self.placed];
            if let Some(record) = &item.record {
                let Some(Placed { offset, end, .. }) = places.next() else { break };
                placed(item.replica, &record.states, offset);
                self.queued_bytes -= record.len();
                item.end = end;
            } else {
                item.end = end_before;
            }
            self.placed += 1;
        }
        Ok(self.placed > before)
    }

    /// Appends a record past the queue, whose first record may wait for the space that this one
    /// frees. `None` if there is no space for it either.
    pub(crate) fn append_now(&self, record: &Encoded) -> Result<Option<Placed>, WalError> {
        let (head, body) = record.parts();
        let placed = self.append_records(&[Parts { head: &head, body: &body }])?;
        Ok(placed.into_iter().next())
    }

    /// Appends records, as far as the log has space for them.
    fn append_records(&self, records: &[Parts<'_>]) -> Result<Vec<Placed>, WalError> {
        let mut placed = Vec::with_capacity(records.len());
        match self.wal.append_batch(records, &mut placed) {
            Ok(()) | Err(AppendError::WindowFull { .. } | AppendError::OverCapacity { .. }) => {
                Ok(placed)
            }
            Err(AppendError::Failed(error)) => Err(error),
            Err(error) => panic!("a record is within the bounds of the log: {error}"),
        }
    }

    /// The oldest item, if the log has it durably.
    pub(crate) fn take_durable(&mut self) -> Option<Item> {
        if self.placed == 0 || self.items[0].end > self.wal.durable() {
            return None;
        }
        self.placed -= 1;
        self.items.pop_front()
    }
}
