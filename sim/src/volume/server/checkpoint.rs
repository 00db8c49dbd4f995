//! The checkpoint of a server, for all its groups at once: swap, landing, sectors, flush, record,
//! trim (`docs/volumes-design.md`, "The checkpoint").

use alluvium_wal::LogOffset;
use raft::eraftpb::HardState;

use super::Running;
use crate::volume::environment::Environment;
use crate::volume::log::Position;
use crate::volume::mutation::Mutation;
use crate::volume::record::{GroupCheckpoint, Record};
use crate::volume::replica::Replica;
use crate::volume::store::Awaited;
use crate::volume::{KEPT_ENTRIES, RING_BYTES};

/// Bytes of all records that one checkpoint carries forward.
const CARRIED_BYTES: usize = (RING_BYTES / 16) as usize;

/// The state of the checkpoint.
pub(super) struct Checkpoint {
    /// The number of the last one.
    number: u64,
    pub(super) wanted: bool,
    /// The end of the log, if another checkpoint could not free more of it than the last one.
    covered: Option<LogOffset>,
    step: Step,
    swap: Swap,
}

/// What the checkpoint waits for.
enum Step {
    Idle,
    /// Blocks at or below the bases.
    Landing(Vec<Awaited>),
    /// Writes of sectors.
    Sectors,
    Flush,
    /// The durability of the record at `at`.
    Record {
        at: LogOffset,
        end: LogOffset,
    },
}

/// What the checkpoint will state, fixed at its start.
#[derive(Default)]
struct Swap {
    at: LogOffset,
    groups: Vec<GroupSwap>,
}

struct GroupSwap {
    base: Position,
    /// An install was pending, which this checkpoint completes.
    completes_install: bool,
    was_leader: bool,
}

impl Checkpoint {
    /// The state of a server whose log has this checkpoint as its last one.
    pub(super) fn after(number: u64) -> Self {
        Self { number, wanted: false, covered: None, step: Step::Idle, swap: Swap::default() }
    }
}

impl Running {
    /// Goes on with the checkpoint. Returns false if it has to wait, or none is wanted.
    pub(super) fn checkpoint_step(&mut self, environment: &mut Environment) -> bool {
        let next = match std::mem::replace(&mut self.checkpoint.step, Step::Idle) {
            Step::Idle if self.wants_checkpoint() => self.swap(),
            Step::Landing(mut awaited) => {
                awaited.retain(|awaited| !self.store.has_landed(*awaited));
                if !awaited.is_empty() {
                    self.checkpoint.step = Step::Landing(awaited);
                    return false;
                }
                self.store.write_sectors();
                Step::Sectors
            }
            Step::Sectors if self.store.checkpoint_is_idle() => {
                if self.flushes() {
                    self.store.flush();
                }
                Step::Flush
            }
            Step::Flush if self.store.checkpoint_is_idle() => self.record(environment),
            Step::Record { at, end } if self.wal.durable() >= end => {
                self.trim(at, environment);
                Step::Idle
            }
            waiting => {
                self.checkpoint.step = waiting;
                return false;
            }
        };
        self.checkpoint.step = next;
        true
    }

    /// Whether a checkpoint was requested, or the ring is a quarter full: a follower that refuses
    /// entries must free its ring without further traffic.
    fn wants_checkpoint(&self) -> bool {
        let fills = self.ring_used_bytes() > RING_BYTES / 4
            && self.checkpoint.covered != Some(self.wal.appended())
            && self.mutation != Mutation::FullRingIgnored;
        self.checkpoint.wanted || fills
    }

    /// Fixes the base of each group and what has to land.
    fn swap(&mut self) -> Step {
        self.checkpoint.wanted = false;
        let mut groups = vec![];
        let mut awaited = vec![];
        for (group, replica) in self.replicas.iter().enumerate() {
            let completes_install = replica.install.is_some();
            let index = match completes_install {
                true => replica.applied,
                false => replica.applied.min(self.store.durable_commit(group)),
            };
            let term = replica.log().term_at(index).expect("the log has the base's term");
            let was_leader = replica.is_leader();
            if self.waits_for_landings(was_leader) {
                awaited.extend(self.store.to_land(group, index));
            }
            let base = Position { index, term };
            groups.push(GroupSwap { base, completes_install, was_leader });
        }
        self.checkpoint.swap = Swap { at: self.wal.appended(), groups };
        Step::Landing(awaited)
    }

    fn waits_for_landings(&self, is_leader: bool) -> bool {
        match self.mutation {
            Mutation::NoLandingWait => false,
            Mutation::FollowersSkipCheckpoint => is_leader,
            _ => true,
        }
    }

    fn flushes(&self) -> bool {
        match self.mutation {
            Mutation::NoFlush => false,
            Mutation::FollowersSkipCheckpoint => {
                self.checkpoint.swap.groups.iter().any(|group| group.was_leader)
            }
            _ => true,
        }
    }

    /// Carries forward the groups that hold the trim back, and appends the record.
    fn record(&mut self, environment: &mut Environment) -> Step {
        self.checkpoint.number += 1;
        self.carry_groups_forward(environment);
        let stated = self.replicas.iter().zip(&self.checkpoint.swap.groups);
        let groups = stated.map(|(replica, swap)| GroupCheckpoint {
            base: swap.base,
            hard_state: self.stated_hard_state(replica, swap),
            barrier: match self.mutation {
                Mutation::BarrierDropped => 0,
                _ => replica.barrier,
            },
            completes_install: swap.completes_install,
        });
        let groups = groups.collect();
        let record = Record::Checkpoint { number: self.checkpoint.number, groups };
        let is_new = self.wal.appended() > self.checkpoint.swap.at;
        let append = self.append(&record);
        // What was appended between the swap and the record is left for the next checkpoint.
        self.checkpoint.covered = (!is_new).then(|| self.wal.appended());
        Step::Record { at: append.offset(), end: append.end() }
    }

    /// The hard state that the record states: of the log that counts from the record on. Its commit
    /// index is not below what was applied at the swap.
    fn stated_hard_state(&self, replica: &Replica, swap: &GroupSwap) -> HardState {
        let current = &replica.log().hard_state;
        match &replica.install {
            // Until an install is complete the old log counts, and so must its own commit index.
            Some(install) if !swap.completes_install => match self.mutation {
                Mutation::CommitOfInstall => current.clone(),
                _ => install.old_hard_state.clone(),
            },
            _ => match self.mutation {
                Mutation::CheckpointCommitLow => {
                    HardState { commit: swap.base.index, ..current.clone() }
                }
                _ => current.clone(),
            },
        }
    }

    /// Carries groups forward, those with the oldest records first, within a bound: what frees the
    /// ring must fit into it.
    fn carry_groups_forward(&mut self, environment: &mut Environment) {
        let swap = &self.checkpoint.swap;
        let mut groups = vec![];
        for (group, (replica, swap)) in self.replicas.iter_mut().zip(&swap.groups).enumerate() {
            if replica.install.is_none() {
                replica.extents.release(swap.base.index);
                groups.extend(replica.extents.oldest().map(|oldest| (oldest, group)));
            }
        }
        groups.sort();
        let mut left_bytes = CARRIED_BYTES;
        let holds_back = |oldest: LogOffset| swap.at.0.saturating_sub(oldest.0) > RING_BYTES / 4;
        groups.retain(|(oldest, _)| holds_back(*oldest));
        for (_, group) in groups {
            let record = self.carried(group).encode();
            if self.mutation == Mutation::TrimToCheckpoint || record.len() > left_bytes {
                continue;
            }
            if let Ok(append) = self.wal.append(&[&record]) {
                let replica = &mut self.replicas[group];
                let last = replica.log().last_index();
                replica.extents.clear();
                replica.extents.push(last, append.offset());
                left_bytes -= record.len();
                environment.outcome.carried_forward += 1;
            }
        }
    }

    /// A record with all entries of a group above its base. A shorter one would cut its log.
    fn carried(&self, group: usize) -> Record {
        let log = self.replicas[group].log();
        let mut entries = log.above(self.checkpoint.swap.groups[group].base.index);
        if self.mutation == Mutation::CarryForwardPart {
            entries.truncate(entries.len().div_ceil(2));
        }
        Record::Entries { group, hard_state: log.hard_state.clone(), entries }
    }

    /// Trims the log behind a durable record, and completes the installs that it covers.
    fn trim(&mut self, record: LogOffset, environment: &mut Environment) {
        environment.outcome.checkpoints += 1;
        let swap = std::mem::take(&mut self.checkpoint.swap);
        let mut to = record;
        if self.mutation != Mutation::TrimToCheckpoint {
            let held = self.replicas.iter().zip(&swap.groups);
            let held = held.filter(|(_, swap)| !swap.completes_install);
            let oldest = held.filter_map(|(replica, _)| replica.extents.oldest()).min();
            to = oldest.map_or(to, |oldest| oldest.min(to));
        }
        drop(self.wal.trim(..to));
        environment.trace.event(
            "checkpoint",
            &[("server", self.server as u64), ("number", self.checkpoint.number), ("trim", to.0)],
        );
        for (group, swap) in swap.groups.iter().enumerate() {
            if swap.completes_install {
                self.complete_install(group, environment);
            }
            let to = swap.base.index.saturating_sub(KEPT_ENTRIES);
            self.replicas[group].log_mut().compact(to);
        }
    }
}
