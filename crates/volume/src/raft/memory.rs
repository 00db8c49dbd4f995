//! The log of a group in memory, as raft reads it.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use raft::eraftpb::{ConfState, Entry, HardState, Snapshot};
use raft::{GetEntriesContext, RaftState, Storage, StorageError};

use crate::types::{Index, PeerId, Position, Term};

/// Memory of an entry beside its data, for budgets.
const ENTRY_BYTES: usize = 128;

/// Hard state, configuration, and the entries above `truncated`.
pub(crate) struct MemoryLog {
    pub(crate) hard_state: HardState,
    pub(crate) conf: ConfState,
    entries: VecDeque<Entry>,
    truncated: Position,
    snapshots: RefCell<Snapshots>,
}

/// What raft is answered when it asks for a snapshot.
#[derive(Default)]
struct Snapshots {
    /// Peers whose next entries are not in memory.
    wanted: BTreeSet<PeerId>,
    /// Peers that have pulled the blocks as of a snapshot.
    pulled: BTreeMap<PeerId, Snapshot>,
}

impl MemoryLog {
    /// A log whose entries begin after `base`.
    pub(crate) fn new(
        base: Position,
        hard_state: HardState,
        conf: ConfState,
        entries: VecDeque<Entry>,
    ) -> Self {
        let snapshots = RefCell::default();
        Self { hard_state, conf, entries, truncated: base, snapshots }
    }

    /// The last entry, or the one before the first.
    pub(crate) fn last(&self) -> Position {
        self.entries.back().map_or(self.truncated, position)
    }

    /// Memory of the entries above an index and up to another one, in bytes.
    pub(crate) fn bytes_between(&self, above: Index, to: Index) -> usize {
        let entries = self.entries.iter().rev().skip_while(|entry| entry.index > to.0);
        entries.take_while(|entry| entry.index > above.0).map(entry_bytes).sum()
    }

    /// The entry before the first one in memory.
    pub(crate) fn truncated(&self) -> Position {
        self.truncated
    }

    /// Appends entries; those from the index of the first one on are replaced.
    pub(crate) fn append(&mut self, entries: &[Entry]) {
        let Some(first) = entries.first().map(|entry| entry.index) else { return };
        assert!(first > self.truncated.index.0, "entry {first} is not in memory");
        assert!(first <= self.last().index.0 + 1, "a hole before entry {first}");
        while self.last().index.0 >= first {
            self.entries.pop_back();
        }
        self.entries.extend(entries.iter().cloned());
    }

    /// Whether raft has asked for a snapshot since [`MemoryLog::take_wanted`].
    pub(crate) fn has_wanted(&self) -> bool {
        !self.snapshots.borrow().wanted.is_empty()
    }

    /// Replaces the log by a snapshot.
    pub(crate) fn install(&mut self, at: Position, conf: ConfState) {
        self.entries.clear();
        (self.truncated, self.conf) = (at, conf);
    }

    /// The term of an entry in memory, or of the last one that is not.
    pub(crate) fn term_at(&self, index: Index) -> Option<Term> {
        if index == self.truncated.index {
            return Some(self.truncated.term);
        }
        let at = index.0.checked_sub(self.truncated.index.0 + 1)?;
        self.entries.get(usize::try_from(at).ok()?).map(|entry| Term(entry.term))
    }

    /// The entries above `above` up to `to`; `None` if one of them is not in memory.
    pub(crate) fn range(
        &self,
        above: Index,
        to: Index,
    ) -> Option<impl Iterator<Item = &Entry> + Clone> {
        if above < self.truncated.index || to > self.last().index {
            return None;
        }
        let skipped = (above.0 - self.truncated.index.0) as usize;
        let taken = to.0.saturating_sub(above.0) as usize;
        Some(self.entries.iter().skip(skipped).take(taken))
    }

    /// Drops the entries at or below `to` from memory.
    pub(crate) fn compact(&mut self, to: Index) {
        if to <= self.truncated.index {
            return;
        }
        let Some(term) = self.term_at(to) else { return };
        while self.entries.front().is_some_and(|entry| entry.index <= to.0) {
            self.entries.pop_front();
        }
        self.truncated = Position { index: to, term };
    }

    /// Takes the peers whose next entries are not in memory.
    pub(crate) fn take_wanted(&mut self) -> BTreeSet<PeerId> {
        std::mem::take(&mut self.snapshots.get_mut().wanted)
    }

    /// Lets raft send a snapshot to a peer that has pulled its blocks.
    pub(crate) fn offer_snapshot(&mut self, peer: PeerId, at: Position, conf: ConfState) {
        let mut snapshot = Snapshot::default();
        let metadata = snapshot.mut_metadata();
        (metadata.index, metadata.term) = (at.index.0, at.term.0);
        metadata.set_conf_state(conf);
        self.snapshots.get_mut().pulled.insert(peer, snapshot);
    }
}

/// The position of an entry.
pub(crate) fn position(entry: &Entry) -> Position {
    Position { index: Index(entry.index), term: Term(entry.term) }
}

/// Memory of an entry in bytes.
pub(crate) fn entry_bytes(entry: &Entry) -> usize {
    ENTRY_BYTES + entry.data.len() + entry.context.len()
}

impl Storage for MemoryLog {
    fn initial_state(&self) -> raft::Result<RaftState> {
        Ok(RaftState::new(self.hard_state.clone(), self.conf.clone()))
    }

    fn entries(
        &self,
        low: u64,
        high: u64,
        max_size: impl Into<Option<u64>>,
        _: GetEntriesContext,
    ) -> raft::Result<Vec<Entry>> {
        if low <= self.truncated.index.0 {
            return Err(raft::Error::Store(StorageError::Compacted));
        }
        let Some(entries) = self.range(Index(low - 1), Index(high - 1)) else {
            return Err(raft::Error::Store(StorageError::Unavailable));
        };
        let max_bytes = max_size.into().unwrap_or(u64::MAX);
        let mut taken = Vec::new();
        let mut bytes = 0;
        for entry in entries {
            bytes += entry_bytes(entry) as u64;
            if bytes > max_bytes && !taken.is_empty() {
                break;
            }
            taken.push(entry.clone());
        }
        Ok(taken)
    }

    fn term(&self, index: u64) -> raft::Result<u64> {
        if index < self.truncated.index.0 {
            return Err(raft::Error::Store(StorageError::Compacted));
        }
        let term = self.term_at(Index(index));
        term.map(|term| term.0).ok_or(raft::Error::Store(StorageError::Unavailable))
    }

    fn first_index(&self) -> raft::Result<u64> {
        Ok(self.truncated.index.0 + 1)
    }

    fn last_index(&self) -> raft::Result<u64> {
        Ok(self.last().index.0)
    }

    /// Raft repeats the question with each response of the peer to a heartbeat.
    fn snapshot(&self, request_index: u64, to: u64) -> raft::Result<Snapshot> {
        let snapshots = &mut *self.snapshots.borrow_mut();
        let peer = PeerId(to);
        match snapshots.pulled.remove(&peer) {
            Some(snapshot) if snapshot.get_metadata().index >= request_index => Ok(snapshot),
            _ => {
                snapshots.wanted.insert(peer);
                Err(raft::Error::Store(StorageError::SnapshotTemporarilyUnavailable))
            }
        }
    }
}
