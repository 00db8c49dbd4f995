//! The log of a group in memory, as raft reads it. The server writes it to the write-ahead log.

use std::collections::VecDeque;

use raft::eraftpb::{ConfState, Entry, HardState, Snapshot};
use raft::{GetEntriesContext, RaftState, Storage, StorageError};

/// The index and term of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) index: u64,
    pub(super) term: u64,
}

/// Hard state, configuration and the entries above `truncated`.
pub(super) struct GroupLog {
    pub(super) hard_state: HardState,
    pub(super) conf_state: ConfState,
    entries: VecDeque<Entry>,
    truncated: Position,
    /// The last applied entry: what a snapshot would have.
    pub(super) applied: Position,
}

impl GroupLog {
    /// Creates a log whose entries begin behind `base`, which is applied.
    pub(super) fn new(
        base: Position,
        hard_state: HardState,
        conf_state: ConfState,
        entries: VecDeque<Entry>,
    ) -> Self {
        Self { hard_state, conf_state, entries, truncated: base, applied: base }
    }

    pub(super) fn last_index(&self) -> u64 {
        self.entries.back().map_or(self.truncated.index, |entry| entry.index)
    }

    /// Appends entries; those from the index of the first one on are replaced.
    pub(super) fn append(&mut self, entries: &[Entry]) {
        let Some(first) = entries.first() else { return };
        assert!(first.index > self.truncated.index, "entry {} was compacted", first.index);
        assert!(
            first.index <= self.last_index() + 1,
            "a hole in the log: {} after {}",
            first.index,
            self.last_index()
        );
        while self.last_index() >= first.index {
            self.entries.pop_back();
        }
        self.entries.extend(entries.iter().cloned());
    }

    /// Replaces the log by a snapshot.
    pub(super) fn install(&mut self, at: Position, conf_state: ConfState) {
        self.entries.clear();
        self.truncated = at;
        self.applied = at;
        self.conf_state = conf_state;
    }

    /// The term of an entry in memory, or of the last one that is not.
    pub(super) fn term_at(&self, index: u64) -> Option<u64> {
        if index == self.truncated.index {
            return Some(self.truncated.term);
        }
        let at = index.checked_sub(self.truncated.index + 1)?;
        self.entries.get(at as usize).map(|entry| entry.term)
    }

    /// The entries above `index`.
    pub(super) fn above(&self, index: u64) -> Vec<Entry> {
        self.entries.iter().filter(|entry| entry.index > index).cloned().collect()
    }

    /// Drops the entries at or below `to` from memory.
    pub(super) fn compact(&mut self, to: u64) {
        if to <= self.truncated.index {
            return;
        }
        let Some(term) = self.term_at(to) else { return };
        while self.entries.front().is_some_and(|entry| entry.index <= to) {
            self.entries.pop_front();
        }
        self.truncated = Position { index: to, term };
    }
}

impl Storage for GroupLog {
    fn initial_state(&self) -> raft::Result<RaftState> {
        Ok(RaftState::new(self.hard_state.clone(), self.conf_state.clone()))
    }

    fn entries(
        &self,
        low: u64,
        high: u64,
        max_size: impl Into<Option<u64>>,
        _: GetEntriesContext,
    ) -> raft::Result<Vec<Entry>> {
        if low <= self.truncated.index {
            return Err(raft::Error::Store(StorageError::Compacted));
        }
        let skipped = (low - self.truncated.index - 1) as usize;
        let taken = (high - low) as usize;
        let mut entries: Vec<Entry> =
            self.entries.iter().skip(skipped).take(taken).cloned().collect();
        raft::util::limit_size(&mut entries, max_size.into());
        Ok(entries)
    }

    fn term(&self, index: u64) -> raft::Result<u64> {
        if index < self.truncated.index {
            return Err(raft::Error::Store(StorageError::Compacted));
        }
        self.term_at(index).ok_or(raft::Error::Store(StorageError::Unavailable))
    }

    fn first_index(&self) -> raft::Result<u64> {
        Ok(self.truncated.index + 1)
    }

    fn last_index(&self) -> raft::Result<u64> {
        Ok(Self::last_index(self))
    }

    fn snapshot(&self, request_index: u64, _: u64) -> raft::Result<Snapshot> {
        if self.applied.index < request_index {
            return Err(raft::Error::Store(StorageError::SnapshotTemporarilyUnavailable));
        }
        let mut snapshot = Snapshot::default();
        let metadata = snapshot.mut_metadata();
        metadata.index = self.applied.index;
        metadata.term = self.applied.term;
        metadata.set_conf_state(self.conf_state.clone());
        Ok(snapshot)
    }
}
