//! Recovery: the walk over the records of the write-ahead log (`docs/volumes-design.md`,
//! "Recovery").

use std::collections::VecDeque;

use alluvium_device::sim::SimDisk;
use alluvium_wal::{LogOffset, Options, Wal};
use raft::eraftpb::{ConfState, Entry, HardState};

use super::extents::Extents;
use super::log::{GroupLog, Position};
use super::mutation::Mutation;
use super::record::{GroupCheckpoint, Record};
use super::{GROUPS, SERVERS};

/// What the log has of one group.
#[derive(Default)]
pub(super) struct RecoveredGroup {
    base: Position,
    hard_state: HardState,
    entries: VecDeque<Entry>,
    pub(super) barrier: u64,
    pub(super) extents: Extents,
}

/// What the log has.
pub(super) struct Recovered {
    pub(super) wal: Wal,
    /// The number of the last checkpoint.
    pub(super) checkpoint: u64,
    pub(super) groups: Vec<RecoveredGroup>,
}

impl Recovered {
    /// Opens the write-ahead log. Panics if it is damaged or contradicts itself: the disks of this
    /// campaign keep their promises.
    pub(super) fn open(disk: &SimDisk, options: &Options) -> Self {
        let mut groups: Vec<RecoveredGroup> =
            (0..GROUPS).map(|_| RecoveredGroup::default()).collect();
        let mut checkpoint = 0;
        let mut visit = |record: alluvium_wal::Record| {
            match Record::decode(record.payload) {
                Record::Entries { group, hard_state, entries } => {
                    groups[group].entries(hard_state, entries, record.offset);
                }
                Record::Install { group, barrier } => {
                    groups[group].barrier = groups[group].barrier.max(barrier);
                }
                Record::Checkpoint { number, groups: stated } => {
                    checkpoint = number;
                    for (group, stated) in groups.iter_mut().zip(stated) {
                        group.checkpoint(stated);
                    }
                }
            }
            Ok(())
        };
        let (wal, report) = Wal::open(disk.device(), options, None, &mut visit)
            .unwrap_or_else(|error| panic!("the log does not open: {error}"));
        assert!(report.damage.is_empty(), "damage in the log: {:?}", report.damage);
        Self { wal, checkpoint, groups }
    }
}

impl RecoveredGroup {
    fn entries(&mut self, hard_state: HardState, entries: Vec<Entry>, at: LogOffset) {
        self.hard_state = hard_state;
        let Some((first, last)) = entries.first().zip(entries.last()) else { return };
        let (first, last) = (first.index, last.index);
        while self.entries.back().is_some_and(|entry| entry.index >= first) {
            self.entries.pop_back();
        }
        if let Some(before) = self.entries.back() {
            assert_eq!(before.index + 1, first, "a hole in the recovered log");
        }
        self.extents.overwrite(first);
        self.extents.push(last, at);
        self.entries.extend(entries);
    }

    fn checkpoint(&mut self, stated: GroupCheckpoint) {
        self.base = stated.base;
        self.hard_state = stated.hard_state;
        self.barrier = stated.barrier;
        if stated.completes_install {
            self.entries.clear();
            self.extents.clear();
        }
        while self.entries.front().is_some_and(|entry| entry.index <= self.base.index) {
            self.entries.pop_front();
        }
        self.extents.release(self.base.index);
    }

    /// Returns the group's log with its base and durable commit. The replica is exact once it has
    /// applied up to that commit.
    pub(super) fn log(&mut self, mutation: Mutation) -> GroupLog {
        let base = self.base;
        if let Some(first) = self.entries.front() {
            assert_eq!(first.index, base.index + 1, "the log does not join its checkpoint");
        }
        let last = self.entries.back().map_or(base.index, |entry| entry.index);
        let mut hard_state = self.hard_state.clone();
        hard_state.commit = hard_state.commit.max(base.index);
        if mutation == Mutation::CommitOfInstall {
            hard_state.commit = hard_state.commit.min(last);
        }
        // The commit index belongs to the log that it was written with, and is never clamped.
        assert!(hard_state.commit <= last, "commit {} of a log to {last}", hard_state.commit);
        let entries = std::mem::take(&mut self.entries);
        GroupLog::new(base, hard_state, conf_state(), entries)
    }
}

/// The configuration of every group: it has a replica on each server.
fn conf_state() -> ConfState {
    ConfState { voters: (1..=SERVERS as u64).collect(), ..ConfState::default() }
}
