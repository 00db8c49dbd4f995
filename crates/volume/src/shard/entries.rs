//! Entries: how they are encoded as a record of the log, how a committed one is applied to the
//! replicated state and the store, while the server runs and when its log is replayed, and which
//! applied ones stay in memory.

use std::collections::VecDeque;

use bytes::Bytes;
use raft::eraftpb::Entry;

use crate::log::{self, Encoded, Entries};
use crate::op::{BlockOp, Change, Op};
use crate::raft::{entry_to_log, position};
use crate::rules::Broken;
use crate::state::{Applied, GroupState};
use crate::store::{Content, NoSlots, Store};
use crate::types::{GroupId, HardState, Index, PeerId, Position};

/// Applies an entry. Returns its op and the outcome, and `None` for the empty entry of a new
/// leader. Without a slot for its blocks nothing changes.
///
/// # Panics
/// If the entry has no op that this version knows. The log's checksums hold, and whatever comes
/// from the network was decoded before it was appended.
pub(super) fn apply_entry(
    group: GroupId,
    entry: &Entry,
    state: &mut GroupState,
    store: &mut Store,
    broken: Broken,
) -> Result<Option<(Op, Applied)>, NoSlots> {
    if entry.data.is_empty() {
        return Ok(None);
    }
    let at = position(entry).index;
    let op = Op::decode_parts(&entry.data, &entry.context)
        .unwrap_or_else(|error| panic!("entry {at} has no valid op: {error}"));
    // The state changes only if the entry is applied: a slot is looked for before that.
    if let Op::Blocks(op) = &op
        && op.change != Change::Discard
        && state.admits(op.volume, op.epoch)
        && store.missing_slots(group, op.volume, op.layer, op.range) > store.free_slots()
    {
        return Err(NoSlots);
    }
    let outcome = state.apply_unless(&op, broken);
    if let (Applied::Effect, Op::Blocks(op)) = (outcome, &op) {
        store
            .apply(group, op.volume, op.layer, op.range, content(op), at)
            .expect("there are enough slots");
    }
    Ok(Some((op, outcome)))
}

/// What an op makes of its blocks.
fn content(op: &BlockOp) -> Content {
    match &op.change {
        Change::Write { crcs, data } => Content::Data(data.clone(), crcs.clone()),
        Change::Zero => Content::Zeros,
        Change::Discard => Content::Absent,
    }
}

/// The applied entries in memory of all groups, in the order in which they were applied.
#[derive(Default)]
pub(super) struct EntryCache {
    entries: VecDeque<(GroupId, Index, usize)>,
    bytes: usize,
    /// The oldest entries, which [`EntryCache::pass`] has returned, and the bytes of the others.
    passed: usize,
    newer_bytes: usize,
}

impl EntryCache {
    pub(super) fn push(&mut self, group: GroupId, index: Index, bytes: usize) {
        self.entries.push_back((group, index, bytes));
        self.bytes += bytes;
        self.newer_bytes += bytes;
    }

    /// Returns each entry once, when those after it have at least `bytes`.
    pub(super) fn pass(&mut self, bytes: usize) -> Option<(GroupId, Index)> {
        let (group, index, own_bytes) = *self.entries.get(self.passed)?;
        let behind_bytes = self.newer_bytes - own_bytes;
        if behind_bytes < bytes {
            return None;
        }
        self.passed += 1;
        self.newer_bytes = behind_bytes;
        Some((group, index))
    }

    /// Takes the oldest entry if all entries together have more than `budget_bytes`.
    pub(super) fn pop_above(&mut self, budget_bytes: usize) -> Option<(GroupId, Index)> {
        if self.bytes <= budget_bytes {
            return None;
        }
        let (group, index, bytes) = self.entries.pop_front()?;
        self.bytes -= bytes;
        match self.passed.checked_sub(1) {
            Some(left) => self.passed = left,
            None => self.newer_bytes -= bytes,
        }
        Some((group, index))
    }
}

/// A record with entries after `before`, and a hard state.
pub(super) fn encode<'a>(
    group: GroupId,
    peer: PeerId,
    state: HardState,
    before: Position,
    entries: impl Iterator<Item = &'a Entry>,
) -> Encoded {
    let (entries, data): (Vec<log::Entry>, Vec<[Bytes; 2]>) = entries.map(entry_to_log).unzip();
    let record = Entries {
        group,
        peer,
        state,
        first: Index(before.index.0 + 1),
        previous_term: before.term,
        entries,
    };
    Encoded::entries(&record, data.into_iter().flatten().collect())
}
