//! The first pass over a log: which checkpoint is the last complete one, and which replicas may
//! have forgotten what they acknowledged. `docs/format/volume-log.md`, sections 6 and 7.

use std::collections::BTreeMap;

use alluvium_wal::{Damage, LogOffset};

use super::checkpoint::{Assembler, Checkpoint};
use super::group::GroupCheckpoint;
use super::record::{Entries, Record};
use crate::types::{GroupId, Index, PeerId, Term};

/// What a log has, as far as the opening must know before it replays the records.
#[derive(Debug)]
pub struct Survey {
    /// The last complete checkpoint, and where its first part begins.
    pub checkpoint: Option<(LogOffset, Checkpoint)>,
    /// The log is damaged behind the first part of that checkpoint: every replica of the server may
    /// have forgotten something, also one that has no record left.
    pub is_damaged_behind: bool,
    /// The replicas that the log has, and why those are lost that are.
    pub replicas: BTreeMap<(GroupId, PeerId), Result<(), Loss>>,
}

/// Why a replica may have forgotten what it acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Loss {
    /// The damaged place may have had a record of any replica, and no later checkpoint states what
    /// that was.
    #[error("the log is damaged behind its last checkpoint")]
    DamageBehindCheckpoint,
    /// Entries above the base are missing, or are not the ones that a later record continues.
    #[error("the entries do not join after index {0}")]
    Join(Index),
    /// The registry records that the replica was created, and the log has no record of it.
    #[error("the log has no record of it, although it was created")]
    Missing,
    /// The sector that is damaged may have described blocks of any replica.
    #[error("a sector of the store is damaged")]
    Sector,
    /// The checkpoint states another end of the replica's log.
    #[error("the log ends at index {found}, and the checkpoint states {stated}")]
    End {
        /// The last index found.
        found: Index,
        /// The last index that the checkpoint states.
        stated: Index,
    },
    /// An entry that was committed is missing.
    #[error("index {commit} is committed, and the log ends at {last}")]
    Commit {
        /// The commit index.
        commit: Index,
        /// The last index.
        last: Index,
    },
}

/// Takes the records of a log in order.
#[derive(Debug, Default)]
pub struct Surveyor {
    assembler: Assembler,
    /// Where the first part of the checkpoint begins of which parts are being collected.
    part_start: LogOffset,
    checkpoint: Option<(LogOffset, Checkpoint)>,
    traces: BTreeMap<(GroupId, PeerId), Trace>,
}

impl Surveyor {
    /// Takes the next record, which begins at `offset`.
    pub fn record(&mut self, offset: LogOffset, record: Record) {
        let part = match record {
            Record::Checkpoint(part) => part,
            other => {
                self.assembler.interrupt();
                match other {
                    Record::Entries(entries) => {
                        self.trace(entries.group, entries.peer).append(&entries);
                    }
                    Record::Install(install) => {
                        self.trace(install.group, install.peer);
                    }
                    Record::Tombstone(gone) => {
                        self.traces.remove(&(gone.group, gone.peer));
                    }
                    Record::Checkpoint(_) => unreachable!("handled above"),
                }
                return;
            }
        };
        if part.part == 0 {
            self.part_start = offset;
        }
        if let Some(checkpoint) = self.assembler.push(part) {
            self.checkpointed(checkpoint);
        }
    }

    /// The log is damaged between the record before and the next one: what is left of a checkpoint
    /// that is cut in two does not count.
    pub fn damage(&mut self) {
        self.assembler.interrupt();
    }

    fn trace(&mut self, group: GroupId, peer: PeerId) -> &mut Trace {
        self.traces.entry((group, peer)).or_default()
    }

    /// A checkpoint has all replicas of the server, and each as of this place in the log.
    fn checkpointed(&mut self, checkpoint: Checkpoint) {
        let mut before = std::mem::take(&mut self.traces);
        for group in &checkpoint.groups {
            let key = (group.group, group.peer);
            let trace = before.remove(&key).unwrap_or_default();
            self.traces.insert(key, trace.checkpointed(group));
        }
        self.checkpoint = Some((self.part_start, checkpoint));
    }

    /// Judges the replicas, with the damage that the log has reported.
    pub fn finish(self, damage: &[Damage]) -> Survey {
        let start = self.checkpoint.as_ref().map_or(LogOffset(0), |(start, _)| *start);
        let is_damaged_behind = damage.iter().any(|damage| damage.range.end > start);
        let judge = |trace: &Trace| match is_damaged_behind {
            true => Err(Loss::DamageBehindCheckpoint),
            false => trace.judge(),
        };
        let replicas = self.traces.iter().map(|(key, trace)| (*key, judge(trace))).collect();
        Survey { checkpoint: self.checkpoint, is_damaged_behind, replicas }
    }
}

/// What is known of a replica's log: the terms of consecutive entries, and where that began.
#[derive(Debug, Default)]
struct Trace {
    base: Index,
    base_term: Term,
    /// Index before the first entry that is known.
    before: Index,
    /// Runs of entries with one term: the last index and the term of each, ascending.
    runs: Vec<(Index, Term)>,
    /// Indices at which an entry was to follow one that is not known, with the term of that one.
    gaps: Vec<(Index, Term)>,
    commit: Index,
    /// What is lost for certain: the last checkpoint states another end, or a record behind it
    /// begins below its base.
    loss: Option<Loss>,
}

impl Trace {
    /// Index of the last entry that is known, or the one before the first.
    fn last(&self) -> Index {
        self.runs.last().map_or(self.before, |(last, _)| *last)
    }

    /// The term of an entry that is known.
    fn term(&self, index: Index) -> Option<Term> {
        if index <= self.before {
            return None;
        }
        let run = self.runs.partition_point(|(last, _)| *last < index);
        self.runs.get(run).map(|(_, term)| *term)
    }

    fn append(&mut self, entries: &Entries) {
        self.commit = self.commit.max(entries.state.commit);
        let previous = Index(entries.first.0 - 1);
        if previous < self.base {
            // What is at or below a base is committed, and nothing replaces it: the record is of a
            // log that an install has made void.
            self.loss = self.loss.or(Some(Loss::Join(previous)));
        }
        // What was missing there is replaced.
        self.gaps.retain(|(index, _)| *index < previous);
        if self.term(previous) == Some(entries.previous_term) {
            self.truncate(previous);
        } else {
            self.gaps.push((previous, entries.previous_term));
            self.forget_up_to(previous);
        }
        for (index, entry) in (entries.first.0..).map(Index).zip(&entries.entries) {
            match self.runs.last_mut() {
                Some((last, term)) if *term == entry.term => *last = index,
                _ => self.runs.push((index, entry.term)),
            }
        }
    }

    /// Removes the entries above `last`, which is known.
    fn truncate(&mut self, last: Index) {
        let run = self.runs.partition_point(|(end, _)| *end < last);
        self.runs.truncate(run + 1);
        self.runs[run].0 = last;
    }

    /// Nothing is known up to `before`, and nothing beyond it.
    fn forget_up_to(&mut self, before: Index) {
        self.before = before;
        self.runs.clear();
    }

    /// The trace as of a checkpoint, which is the last one so far.
    fn checkpointed(mut self, stated: &GroupCheckpoint) -> Self {
        (self.base, self.base_term) = (stated.base, stated.base_term);
        self.commit = stated.state.commit;
        self.loss = None;
        // What is missing below the base does not matter any more.
        self.gaps.retain(|(index, _)| *index >= stated.base);
        if stated.completes_install || stated.last == stated.base {
            self.gaps.clear();
            self.forget_up_to(stated.base);
        } else if self.last() != stated.last || self.term(stated.last) != Some(stated.last_term) {
            self.loss = Some(Loss::End { found: self.last(), stated: stated.last });
        }
        self
    }

    fn judge(&self) -> Result<(), Loss> {
        if let Some(loss) = self.loss {
            return Err(loss);
        }
        let base = (self.base, self.base_term);
        let gap = self.gaps.iter().find(|gap| gap.0 >= self.base && **gap != base);
        if let Some((index, _)) = gap {
            return Err(Loss::Join(*index));
        }
        let last = self.last().max(self.base);
        match self.commit > last {
            true => Err(Loss::Commit { commit: self.commit, last }),
            false => Ok(()),
        }
    }
}
