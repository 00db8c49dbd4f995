//! The checkpoint of a server, for all its replicas at once: swap, landing, sectors, flush, record,
//! second copy, trim. `docs/format/volume-log.md`, section 5.

use std::collections::BTreeMap;

use alluvium_wal::LogOffset;

use super::entries::encode;
use super::replica::{Replica, Standing};
use super::{Output, Shard, ShardFailure};
use crate::log::{Checkpoint, Encoded, GroupCheckpoint, Pair, Record};
use crate::rules::{Broken, Rule};
use crate::state::VolumeState;
use crate::types::{
    CheckpointNumber, ConfState, GroupId, HardState, Index, PeerId, Position, Term, replicas_of,
};

/// Greatest length of a part of a checkpoint's record.
const PART_BYTES: usize = 1 << 20;
/// Bounds of what a group may have that is carried forward.
const CARRIED_BYTES: usize = 16 << 20;
const CARRIED_ENTRIES: u64 = 65_536;

/// The state of the checkpoint.
pub(super) struct Checkpointing {
    /// A checkpoint was requested.
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
    Landing,
    /// Writes of sectors and of the first copy of the superblock.
    Sectors,
    Flush,
    /// Space in the log for the parts of the record that are left.
    Append(std::vec::IntoIter<Encoded>),
    /// The durability of the record.
    Record,
    /// The second copy of the superblock.
    SecondCopy,
}

/// What the checkpoint will state, fixed at its start, and where its record is.
#[derive(Default)]
struct Swap {
    at: LogOffset,
    groups: BTreeMap<(GroupId, PeerId), GroupSwap>,
    /// Whether a group was led from here.
    leads: bool,
    record: LogOffset,
    end: LogOffset,
    trim_to: LogOffset,
}

struct GroupSwap {
    base: Position,
    applied: Index,
    conf: ConfState,
    volumes: Vec<VolumeState>,
    /// The commit index that the record states.
    commit: Index,
    /// An install was pending, which this checkpoint completes.
    completes_install: bool,
    /// The base of this checkpoint becomes a pair: the replica was exact at the swap, and has
    /// pulled nothing since.
    makes_pair: bool,
}

impl Checkpointing {
    pub(super) fn new() -> Self {
        Self { wanted: false, covered: None, step: Step::Idle, swap: Swap::default() }
    }

    /// Whether a checkpoint is in progress.
    pub(super) fn is_running(&self) -> bool {
        !matches!(self.step, Step::Idle)
    }

    /// Describes what the checkpoint waits for, for simulations that stand still.
    #[cfg(feature = "simulation")]
    pub(super) fn describe(&self) -> &'static str {
        match &self.step {
            Step::Idle => "idle",
            Step::Landing => "landing",
            Step::Sectors => "sectors",
            Step::Flush => "flush",
            Step::Append(_) => "append",
            Step::Record => "record",
            Step::SecondCopy => "second copy",
        }
    }

    /// What the log must have durably for the checkpoint to go on.
    pub(super) fn awaits_log(&self) -> Option<LogOffset> {
        matches!(self.step, Step::Record).then_some(self.swap.end)
    }

    /// Whether no other record may be appended: the parts of a checkpoint stand together, and state
    /// what the log holds in front of them.
    pub(super) fn blocks_log(&self) -> bool {
        matches!(self.step, Step::Append(_))
    }
}

impl Shard {
    /// Goes on with the checkpoint. Returns false if it has to wait, or none is wanted.
    pub(super) fn checkpoint_step(&mut self, out: &mut Output) -> Result<bool, ShardFailure> {
        let next = match std::mem::replace(&mut self.checkpoint.step, Step::Idle) {
            Step::Idle if self.wants_checkpoint() => self.swap(),
            Step::Landing if !self.store.has_awaited() || self.skips_steps() => {
                if !self.skips_steps() {
                    self.store.write_sectors(self.log.wal().durable(), self.now);
                }
                Step::Sectors
            }
            Step::Sectors if self.store.checkpoint_is_idle() => {
                if !self.skips_steps() {
                    self.store.flush();
                }
                Step::Flush
            }
            Step::Flush if self.store.checkpoint_is_idle() => self.begin_record()?,
            Step::Append(mut parts) => {
                let is_placed = self.append_parts(&mut parts)?;
                match parts.as_slice().is_empty() {
                    true => self.recorded(),
                    false => {
                        self.checkpoint.step = Step::Append(parts);
                        return Ok(is_placed);
                    }
                }
            }
            Step::Record if self.log.wal().durable() >= self.checkpoint.swap.end => {
                self.store.second_copy(self.checkpoint.swap.end, self.now);
                Step::SecondCopy
            }
            Step::SecondCopy if self.store.checkpoint_is_idle() => {
                self.release(out);
                Step::Idle
            }
            waiting => {
                self.checkpoint.step = waiting;
                return Ok(false);
            }
        };
        self.checkpoint.step = next;
        Ok(true)
    }

    /// Whether a checkpoint was requested, or a quarter of the ring is in use, with or without
    /// traffic: a follower that refuses entries gets none that could start it. It is left out if it
    /// could free nothing: nothing was appended since the swap of the last one, and no base has
    /// moved. (The record itself states commit indices, which move bases.) It is also due when the
    /// store is nearly full and has slots that the next one frees: refused ops fill no ring.
    fn wants_checkpoint(&self) -> bool {
        let is_short = self.store.free_slots() < 2 * self.options.reserved_slots;
        if self.checkpoint.wanted || is_short && self.store.has_freed_slots() {
            return true;
        }
        let is_full = self.ring_is_above(1, 4) && !self.options.broken.is(Rule::FullRing);
        let moves =
            |replica: &Replica| replica.install.is_none() && replica.folded.at.index > replica.base;
        is_full
            && (self.checkpoint.covered != Some(self.log.wal().appended())
                || self.replicas.values().any(moves))
    }

    /// Whether a follower leaves out the steps of the store: the defect of CurveBS.
    fn skips_steps(&self) -> bool {
        self.options.broken.is(Rule::FollowersCheckpoint) && !self.checkpoint.swap.leads
    }

    /// Step 1: fixes the bases.
    fn swap(&mut self) -> Step {
        self.checkpoint.wanted = false;
        let Self { replicas, log, store, options, .. } = self;
        let mut swap = Swap { at: log.wal().appended(), ..Swap::default() };
        for replica in replicas.values_mut().filter(|replica| replica.standing != Standing::Lost) {
            swap.leads |= replica.is_leader();
            replica.fold();
            let completes_install = replica.install.is_some() && !log.has_queued(replica.key());
            let (folded, applied) = match &replica.install {
                Some(install) if !completes_install => (&install.old, install.old_applied),
                _ => (&replica.folded, replica.applied.index),
            };
            let group = GroupSwap {
                base: folded.at,
                applied,
                conf: folded.conf.clone(),
                volumes: folded.state.volumes().cloned().collect(),
                commit: Index(0),
                completes_install,
                makes_pair: replica.makes_pairs() || options.broken.is(Rule::PairWhenExact),
            };
            swap.groups.insert((replica.group, replica.peer), group);
        }
        let groups = &swap.groups;
        let base = |group: GroupId| {
            groups.range(replicas_of(group)).next().map_or(Index(0), |(_, swap)| swap.base.index)
        };
        store.swap(&base);
        self.checkpoint.swap = swap;
        Step::Landing
    }

    /// Drops the pairs of a replica that begins to pull, and the one that a checkpoint in progress
    /// would make.
    pub(super) fn forget_pairs(&mut self, group: GroupId) {
        let Some(replica) = self.replicas.get_mut(&group) else { return };
        replica.pairs.clear();
        if let Some(swap) = self.checkpoint.swap.groups.get_mut(&(group, replica.peer)) {
            swap.makes_pair = false;
        }
    }

    /// Step 5: carries groups forward, and makes the record.
    fn begin_record(&mut self) -> Result<Step, ShardFailure> {
        self.carry_groups_forward()?;
        let number = CheckpointNumber(self.store.checkpoint().0 + 1);
        let Self { replicas, checkpoint, options, .. } = self;
        let listed = replicas
            .values()
            .filter(|replica| replica.logged.has_record && replica.standing != Standing::Lost);
        let groups = listed
            .map(|replica| {
                let swap = checkpoint.swap.groups.entry((replica.group, replica.peer));
                // A replica that was created since the swap.
                let swap = swap.or_insert_with(|| GroupSwap {
                    base: Position::default(),
                    applied: Index(0),
                    conf: replica.view.founders_conf(),
                    volumes: replica.view.volumes.clone(),
                    commit: Index(0),
                    completes_install: false,
                    makes_pair: false,
                });
                let stated = replica.stated(number, swap, options.broken);
                swap.commit = stated.state.commit;
                stated
            })
            .collect();
        let parts = Checkpoint { number, groups }.into_parts(PART_BYTES);
        let parts = parts.into_iter().map(|part| Encoded::record(&Record::Checkpoint(part)));
        let is_new = self.log.wal().appended() > self.checkpoint.swap.at;
        self.checkpoint.covered = (!is_new).then_some(LogOffset(0));
        self.checkpoint.swap.record = LogOffset(u64::MAX);
        Ok(Step::Append(parts.collect::<Vec<_>>().into_iter()))
    }

    /// Appends parts of the record, with no other record in between. Returns false if there is no
    /// space.
    fn append_parts(
        &mut self,
        parts: &mut std::vec::IntoIter<Encoded>,
    ) -> Result<bool, ShardFailure> {
        let mut is_placed = false;
        while let Some(part) = parts.as_slice().first() {
            let Some(placed) = self.log.append_now(part)? else { break };
            let swap = &mut self.checkpoint.swap;
            swap.record = swap.record.min(placed.offset);
            swap.end = placed.end;
            parts.next();
            is_placed = true;
        }
        Ok(is_placed)
    }

    /// The record is in the log. What is trimmed is fixed now: a record after it may not be
    /// durable, so it replaces nothing here.
    fn recorded(&mut self) -> Step {
        let Self { replicas, checkpoint, log, options, .. } = self;
        let swap = &mut checkpoint.swap;
        if checkpoint.covered.is_some() {
            // What was appended between the swap and the record is left for the next checkpoint.
            checkpoint.covered = Some(log.wal().appended());
        }
        let held = replicas.values_mut().filter_map(|replica| {
            let group = swap.groups.get(&(replica.group, replica.peer))?;
            if group.completes_install {
                return None;
            }
            replica.extents.release(group.base.index);
            replica.extents.oldest()
        });
        let oldest = held.min().filter(|_| !options.broken.is(Rule::TrimKeepsEntries));
        swap.trim_to = oldest.map_or(swap.record, |oldest| oldest.min(swap.record));
        Step::Record
    }

    /// Carries groups forward that hold the trim back, those with the oldest records first, within
    /// bounds: what frees the ring must fit into it.
    fn carry_groups_forward(&mut self) -> Result<(), ShardFailure> {
        let Self { replicas, checkpoint, log, counters, options, .. } = self;
        let stats = log.wal().stats();
        let ring_bytes = stats.ring_bytes;
        // An eighth of the ring stays free: the record itself must fit, and so must the next one.
        let free_bytes = (ring_bytes / 8 * 7).saturating_sub(stats.used_bytes);
        let mut left_bytes = (ring_bytes / 16).min(free_bytes) as usize;
        let mut holding: Vec<(LogOffset, GroupId)> = Vec::new();
        for replica in replicas.values_mut() {
            let Some(swap) = checkpoint.swap.groups.get(&(replica.group, replica.peer)) else {
                continue;
            };
            if replica.install.is_some() || replica.standing == Standing::Lost {
                continue;
            }
            replica.extents.release(swap.base.index);
            let oldest = replica.extents.oldest();
            let holds_back =
                |at: &LogOffset| checkpoint.swap.at.0.saturating_sub(at.0) > ring_bytes / 4;
            holding.extend(oldest.filter(holds_back).map(|oldest| (oldest, replica.group)));
        }
        holding.sort();
        for (_, group) in holding {
            let replica = replicas.get_mut(&group).expect("taken from the map");
            let base = checkpoint.swap.groups[&(group, replica.peer)].base;
            let to = log.queued_first(replica.key()).map_or(replica.logged.last.index, |first| {
                replica.logged.last.index.min(Index(first.0 - 1))
            });
            let Some(record) =
                replica.carried(base, to, options.broken.is(Rule::CarryForwardWhole))
            else {
                continue;
            };
            if record.len() > left_bytes || options.broken.is(Rule::TrimKeepsEntries) {
                continue;
            }
            if let Some(placed) = log.append_now(&record)? {
                left_bytes -= record.len();
                replica.extents.clear();
                replica.placed(&record.states, placed.offset);
                counters.carried_forward += 1;
            }
        }
        Ok(())
    }

    /// Step 7: trims the log behind a durable record, frees slots, and completes installs.
    fn release(&mut self, out: &mut Output) {
        let swap = std::mem::take(&mut self.checkpoint.swap);
        drop(self.log.wal().trim(..swap.trim_to));
        self.store.release();
        let number = self.store.checkpoint();
        self.counters.checkpoints += 1;
        for ((group, peer), swap) in swap.groups {
            let Some(replica) = self.replicas.get_mut(&group).filter(|it| it.peer == peer) else {
                continue;
            };
            replica.base = replica.base.max(swap.base.index);
            if swap.makes_pair {
                replica.pairs.push(Pair { number, base: swap.base.index });
            }
            if swap.completes_install {
                self.complete_install(group, out);
            } else {
                replica.commit_is_durable(swap.commit);
            }
        }
    }
}

impl Replica {
    /// What the record states of the replica.
    fn stated(
        &self,
        number: CheckpointNumber,
        swap: &GroupSwap,
        broken: Broken,
    ) -> GroupCheckpoint {
        let completing = self.install.as_ref().filter(|_| swap.completes_install);
        let (last, state) = match completing {
            Some(install) => {
                let (term, vote) = (Term(install.state.term), PeerId(install.state.vote));
                (install.at, HardState { term, vote, commit: install.at.index })
            }
            None => {
                let commit = match () {
                    () if broken.is(Rule::CheckpointCommit) => swap.base.index,
                    () if broken.is(Rule::CommitOfOldLog) && self.install.is_some() => {
                        self.applied.index.min(self.logged.last.index)
                    }
                    () => self.logged.state.commit.max(swap.applied),
                };
                (self.logged.last, HardState { commit, ..self.logged.state })
            }
        };
        let barrier = if broken.is(Rule::Barrier) { Index(0) } else { self.logged.barrier };
        let pair = swap.makes_pair.then_some(Pair { number, base: swap.base.index });
        GroupCheckpoint {
            group: self.group,
            peer: self.peer,
            base: swap.base.index,
            base_term: swap.base.term,
            last: last.index,
            last_term: last.term,
            state,
            barrier: if swap.base.index >= barrier { Index(0) } else { barrier },
            completes_install: swap.completes_install,
            conf: swap.conf.clone(),
            pairs: self.pairs.for_record(pair),
            volumes: swap.volumes.clone(),
        }
    }

    /// A record with all entries of the log above the base. A shorter one would cut the log. `None`
    /// if they are not in memory or too many: the group has moved since the swap, and the next base
    /// is past them.
    fn carried(&mut self, base: Position, to: Index, only_a_part: bool) -> Option<Encoded> {
        let count = to.0.saturating_sub(base.index.0);
        let mut entries = self.memory().range(base.index, to)?;
        let bytes: usize =
            entries.clone().map(|entry| entry.data.len() + entry.context.len()).sum();
        if count == 0 || count > CARRIED_ENTRIES || bytes > CARRIED_BYTES {
            return None;
        }
        let state = self.logged.state;
        let part = if only_a_part { count.div_ceil(2) } else { count };
        let (group, peer) = (self.group, self.peer);
        Some(encode(group, peer, state, base, entries.by_ref().take(part as usize)))
    }
}
