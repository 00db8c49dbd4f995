//! What the volumes must do, independent of how they do it (`docs/volumes-design.md`, "What the
//! campaign checks"): a log of committed entries per group, and the blocks and attachments that
//! follow from it.

use std::collections::{BTreeMap, BTreeSet};

use alluvium_volume::shard::AppliedEntry;
use alluvium_volume::{Attach, BlockOp, Change, Op, Position};

use super::GROUPS;
use super::blocks::{BLOCKS, Value, blocks_of};

/// A group as its committed log makes it.
#[derive(Default)]
struct Model {
    /// The committed entries from index 1 on.
    log: Vec<(Position, Option<Op>)>,
    epoch: u64,
    nonce: u32,
    floor: u64,
    /// The numbers of the attachment that counts that took effect.
    done: BTreeSet<u64>,
    /// The index at which each op of each attachment took effect.
    effects: BTreeMap<(u64, u64), u64>,
    /// The index at which each attachment took effect.
    attachments: BTreeMap<(u64, u32), u64>,
    /// The greatest number of the attachment that counts that has changed each block.
    newest: [u64; BLOCKS],
    /// The values of each block, each with the index from which it holds.
    versions: [Vec<(u64, Value)>; BLOCKS],
    /// The index below which no client may see a block any more.
    seen: [u64; BLOCKS],
}

impl Model {
    fn apply(&mut self, index: u64, op: &Op) {
        match op {
            Op::Attach(Attach { epoch, nonce, .. }) if epoch.0 > self.epoch => {
                (self.epoch, self.nonce, self.floor) = (epoch.0, *nonce, 1);
                self.done.clear();
                self.newest = [0; BLOCKS];
                self.attachments.insert((epoch.0, *nonce), index);
            }
            Op::Blocks(op) if op.epoch.0 == self.epoch => {
                let number = op.number.0;
                self.floor = self.floor.max(op.floor().0);
                if number < self.floor || !self.done.insert(number) {
                    return;
                }
                let before = self.effects.insert((self.epoch, number), index);
                assert_eq!(before, None, "TWICE: op {number} of attachment {}", self.epoch);
                let value = value_of(op);
                for block in blocks_of(&op.range) {
                    // A gateway sends overlapping ops one after the other.
                    let newest = std::mem::replace(&mut self.newest[block], number);
                    assert!(newest < number, "ORDER: op {number} after {newest} at block {block}");
                    self.versions[block].push((index, value));
                }
            }
            _ => {}
        }
    }

    /// The index of the oldest version of a block with a value that holds at some index between
    /// `from` and `to`.
    fn version(&self, block: usize, value: Value, from: u64, to: u64) -> Option<u64> {
        let versions = &self.versions[block];
        // From the newest version that holds at or below `to` back to the one that holds at `from`.
        let above = versions.partition_point(|(start, _)| *start <= to);
        let below = versions.partition_point(|(start, _)| *start <= from);
        let at = |version: usize| match version {
            0 => (0, Value::Absent),
            version => versions[version - 1],
        };
        (below..=above).map(at).find(|(_, found)| *found == value).map(|(start, _)| start)
    }

    fn at(&self, block: usize, index: u64) -> Value {
        let version = self.versions[block].iter().rev().find(|(from, _)| *from <= index);
        version.map_or(Value::Absent, |(_, value)| *value)
    }
}

fn value_of(op: &BlockOp) -> Value {
    match &op.change {
        Change::Write { data, .. } => {
            Value::Data(u64::from_le_bytes(data[..8].try_into().expect("eight bytes")))
        }
        Change::Zero => Value::Zeros,
        Change::Discard => Value::Absent,
    }
}

/// The committed log of each group.
pub(super) struct Oracle {
    groups: Vec<Model>,
}

impl Oracle {
    pub(super) fn new() -> Self {
        Self { groups: (0..GROUPS).map(|_| Model { floor: 1, ..Model::default() }).collect() }
    }

    /// A group begins with an attachment.
    pub(super) fn attached(&mut self, group: usize, epoch: u64, nonce: u32) {
        let model = &mut self.groups[group];
        (model.epoch, model.nonce) = (epoch, nonce);
        model.attachments.insert((epoch, nonce), 0);
    }

    /// Notes that a replica has applied an entry. Panics if another one has applied a different
    /// entry at the same index.
    pub(super) fn applied(&mut self, entry: AppliedEntry) {
        let group = entry.group.0 as usize - 1;
        let model = &mut self.groups[group];
        let index = entry.at.index.0;
        let applied = (entry.at, entry.op);
        match model.log.get(index as usize - 1) {
            Some(known) => {
                assert!(*known == applied, "SPLIT: two entries at index {index} of group {group}");
            }
            None => {
                assert_eq!(model.log.len() as u64 + 1, index, "SPLIT: a hole in group {group}");
                if let Some(op) = &applied.1 {
                    model.apply(index, op);
                }
                model.log.push(applied);
            }
        }
    }

    /// Checks an op that was acknowledged: it has taken effect. From now on no client may see its
    /// blocks as they were before.
    pub(super) fn acknowledged(&mut self, group: usize, epoch: u64, number: u64, block: usize) {
        let model = &mut self.groups[group];
        let Some(index) = model.effects.get(&(epoch, number)).copied() else {
            panic!("LOST: op {number} of attachment {epoch} of group {group} has no effect");
        };
        model.seen[block] = model.seen[block].max(index);
    }

    /// Checks an attachment that was acknowledged.
    pub(super) fn attachment_acknowledged(&self, group: usize, epoch: u64, nonce: u32) {
        let is_known = self.groups[group].attachments.contains_key(&(epoch, nonce));
        assert!(is_known, "LOST: attachment {epoch} of group {group}");
    }

    /// The index below which no client may see a block any more.
    pub(super) fn seen(&self, group: usize, block: usize) -> u64 {
        self.groups[group].seen[block]
    }

    /// Checks what a client has read: the block as it was at some index from `from`, what clients
    /// had seen when the read was sent, to `to`, what the replica had applied when it answered.
    pub(super) fn read(&mut self, group: usize, block: usize, value: Value, from: u64, to: u64) {
        let model = &mut self.groups[group];
        match model.version(block, value, from, to) {
            Some(index) => model.seen[block] = model.seen[block].max(index),
            None => panic!(
                "STALE or LOST: read {value:?} from block {block} of group {group}, which clients \
                 have seen as of index {from}; the replica had applied {to}"
            ),
        }
    }

    /// Checks what a replica serves: the block as it was at some index from `from` to `to`, what it
    /// had applied before and after the read.
    pub(super) fn compare(
        &self,
        server: usize,
        group: usize,
        block: usize,
        value: Value,
        (from, to): (u64, u64),
    ) {
        let model = &self.groups[group];
        assert!(
            model.version(block, value, from, to).is_some(),
            "NOT EXACT: server {server} serves {value:?} for block {block} of group {group} at \
             index {from} to {to}, and the log has {:?}",
            model.at(block, to)
        );
    }

    /// The length of the committed log of a group.
    pub(super) fn len(&self, group: usize) -> u64 {
        self.groups[group].log.len() as u64
    }
}
