//! A replica: raft's state machine of one group, the replicated state, and what is known of its
//! durability.

use std::collections::{BTreeMap, VecDeque};

use alluvium_wal::LogOffset;
use raft::eraftpb::{Entry, HardState as RaftHardState, Message, MessageType};
use raft::{Config, RawNode, StateRole};

use super::ShardOptions;
use super::pairs::Pairs;
use crate::group::GroupView;
use crate::log::{Extents, States};
use crate::messages::PullItem;
use crate::op::Op;
use crate::raft::{MemoryLog, conf_from_raft, conf_to_raft};
use crate::request::{ReplicaState, Role};
use crate::rules::Broken;
use crate::state::{GroupState, VolumeState};
use crate::types::{ConfState, GroupId, HardState, Index, PeerId, Position, ServerId, Term};

/// raft's ticks: of an election timeout, and between two heartbeats.
const ELECTION_TICKS: usize = 5;
const HEARTBEAT_TICKS: usize = 1;
/// Ticks by which an election is later than the timeout: the others ignore requests for their votes
/// until their timeouts have passed, too, and each server has ticks at times of its own.
const ELECTION_DELAY_TICKS: usize = 1;
/// Ticks between the elections of two ranks: at least one, whatever the phases of the ticks.
const RANK_TICKS: usize = 2;
/// Bound of the entries of a message. At most 1/64 of the ring is used, so that what a follower
/// accepts can be carried forward.
const MESSAGE_BYTES: u64 = 1 << 20;
/// Messages to a follower in flight.
const MESSAGES_IN_FLIGHT: usize = 64;
/// Committed entries that raft hands out at a time, in bytes.
const COMMITTED_BYTES: u64 = 4 << 20;

/// Whether a replica takes part in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Its first record is not durable, or not known to the registry.
    Creating,
    Active,
    /// It may have forgotten what it acknowledged.
    Lost,
    /// It has met a state that no sound group has.
    Stopped,
}

/// What the log holds of a replica. It may be behind what raft has handed out.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Logged {
    /// Whether the log has a record of the replica.
    pub(super) has_record: bool,
    pub(super) state: HardState,
    pub(super) last: Position,
    /// The greatest barrier of an install.
    pub(super) barrier: Index,
}

/// The replicated state as of an index that recovery would find committed: what a checkpoint
/// states.
pub(super) struct Folded {
    pub(super) at: Position,
    pub(super) state: GroupState,
    pub(super) conf: ConfState,
    /// The entries that are applied and not folded. Ops have no data.
    pending: VecDeque<(Position, Option<Op>)>,
}

/// A proposal that waits for its entry to be applied.
pub(super) struct Waiting {
    pub(super) term: Term,
    pub(super) ticket: u64,
}

/// Ops that raft has not been given yet.
#[derive(Default)]
pub(super) struct Proposals {
    pub(super) entries: Vec<Entry>,
    pub(super) tickets: Vec<u64>,
    /// Memory of the entries.
    pub(super) bytes: usize,
}

/// A pull in progress.
#[derive(Debug)]
pub(super) struct Target {
    /// Names the pull in the frames that arrive.
    pub(super) attempt: u64,
    /// The leader that has offered it, its term and its server.
    pub(super) leader: (PeerId, Term, ServerId),
    /// What the first frame of the last round has stated.
    pub(super) begin: Option<Begin>,
    pub(super) round: Round,
    /// When a later round that has failed is asked for again.
    pub(super) retry_at: Option<u64>,
    /// Batches that wait until the record of their barrier is durable.
    pub(super) batches: VecDeque<(Index, Vec<PullItem>)>,
    /// All frames have arrived.
    pub(super) has_ended: bool,
    /// The leader was informed, the last time then.
    pub(super) pulled_at: Option<u64>,
    pub(super) pinned_at: Option<u64>,
    /// The time of the last progress.
    pub(super) progress_at: u64,
}

/// Time after which a round that has failed is asked for again, in milliseconds.
const ROUND_RETRY_MS: u64 = 500;

/// A pass over all chunks. Blocks change meanwhile, so another one follows, as long as they become
/// fewer: the entries above the last one have to fit into the leader's memory.
#[derive(Debug, Default)]
pub(super) struct Round {
    /// Its number, from 1.
    pub(super) number: u32,
    /// When it began.
    pub(super) at: u64,
    /// What it asks for.
    pub(super) since: Index,
    /// Its first frame has arrived.
    pub(super) has_begun: bool,
    /// Its blocks, in bytes, and those of the round before; 0 for the first round.
    pub(super) bytes: u64,
    pub(super) previous_bytes: u64,
}

impl Round {
    /// Whether another round is to follow, which leaves fewer entries. The second one may be as
    /// long as the first: the source has not completed a checkpoint in between.
    pub(super) fn is_long(&self, options: &ShardOptions, now: u64) -> bool {
        self.bytes >= options.round_bytes
            && now >= self.at + options.round_ms
            && (self.number <= 2 || self.bytes < self.previous_bytes / 4 * 3)
    }
}

impl Target {
    /// Ends a round of which the store has everything. Returns the index since which the blocks of
    /// another one are to be sent; `None` if it was the last one.
    pub(super) fn next_round(&mut self, options: &ShardOptions, now: u64) -> Option<Index> {
        let begin = self.begin.as_ref().filter(|_| self.round.is_long(options, now))?;
        let (number, since) = (self.round.number + 1, begin.at.index);
        let previous_bytes = self.round.bytes;
        self.round = Round { number, at: now, since, previous_bytes, ..Round::default() };
        self.has_ended = false;
        self.progress_at = now;
        Some(since)
    }

    /// Notes that a round has failed. Returns whether it can be asked for again: what the rounds
    /// before it have brought is kept.
    pub(super) fn failed(&mut self, now: u64) -> bool {
        if self.round.number == 1 {
            return false;
        }
        self.batches.clear();
        self.has_ended = false;
        (self.round.has_begun, self.round.bytes) = (false, 0);
        self.retry_at = Some(now + ROUND_RETRY_MS);
        true
    }
}

/// What the blocks of a pull are at least as new as, and the state as of exactly that index.
#[derive(Debug)]
pub(super) struct Begin {
    pub(super) at: Position,
    pub(super) conf: ConfState,
    pub(super) volumes: Vec<VolumeState>,
    /// All blocks are sent, and not only those that have changed.
    pub(super) sends_everything: bool,
}

/// An install whose checkpoint is not complete.
pub(super) struct Install {
    /// The number of raft's ready.
    pub(super) ready: u64,
    /// What is sent when the install is durable.
    pub(super) messages: Vec<Message>,
    /// The snapshot's position, which becomes the base.
    pub(super) at: Position,
    /// Term and vote as raft has them.
    pub(super) state: RaftHardState,
    /// What the old log is folded to, and what was applied of it. It counts until then.
    pub(super) old: Folded,
    pub(super) old_applied: Index,
    /// Only changed blocks were pulled.
    pub(super) is_of_changes: bool,
}

/// What a follower's pull keeps in memory at the leader.
#[derive(Clone, Copy)]
pub(super) struct Pin {
    pub(super) above: Index,
    pub(super) until: u64,
}

pub(super) struct Replica {
    pub(super) group: GroupId,
    pub(super) peer: PeerId,
    pub(super) view: GroupView,
    pub(super) standing: Standing,
    pub(super) raft: RawNode<MemoryLog>,
    /// The replicated state as of `applied`.
    pub(super) state: GroupState,
    pub(super) applied: Position,
    /// Committed entries that are not applied yet.
    pub(super) to_apply: VecDeque<Entry>,
    pub(super) folded: Folded,
    /// The greatest commit index in a durable record.
    pub(super) durable_commit: Index,
    /// The greatest barrier of an install in a durable record.
    pub(super) durable_barrier: Index,
    pub(super) logged: Logged,
    /// The commit index of the last record that was handed to the log.
    pub(super) stated_commit: Index,
    pub(super) extents: Extents,
    /// The base of the last checkpoint.
    pub(super) base: Index,
    /// The bases of the checkpoints at which the replica was exact, since its last pull.
    pub(super) pairs: Pairs,
    /// Below it, an install may have left blocks that are too new.
    pub(super) barrier: Index,
    /// The durable commit that recovery has found. Below it the replica is not exact.
    pub(super) replay_end: Index,
    /// Whether the store knows that the replay has ended.
    pub(super) is_replayed: bool,
    /// A pull in progress. Nothing is applied meanwhile.
    pub(super) target: Option<Target>,
    /// An install that no checkpoint has completed yet. Raft takes no message and no tick
    /// meanwhile, since its applied index lies below the first index of its log.
    pub(super) install: Option<Install>,
    pub(super) proposals: Proposals,
    /// Memory of the entries that were accepted from a leader since the last ready.
    pub(super) accepted_bytes: usize,
    pub(super) waiting: BTreeMap<Index, Waiting>,
    /// Whether a record of the commit index is due at a time in the shard's list.
    pub(super) is_lazy: bool,
    pub(super) pins: BTreeMap<PeerId, Pin>,
    /// The time since which raft waits for the outcome of a snapshot, by target.
    pub(super) snapshots: BTreeMap<PeerId, u64>,
    /// When an offer of a pull was sent last, by target.
    pub(super) offered: BTreeMap<PeerId, u64>,
    /// A leader whose process has ended, its term, and the time until which what it has sent may
    /// still arrive.
    pub(super) gone: Option<(PeerId, Term, u64)>,
    /// The number of the last ready.
    pub(super) last_ready: u64,
    /// The number of the last ready that the log has durably.
    pub(super) durable_ready: u64,
    pub(super) broken: Broken,
}

/// What recovery, or the creation of a replica, starts from.
pub(super) struct Start {
    pub(super) group: GroupId,
    pub(super) peer: PeerId,
    pub(super) view: GroupView,
    pub(super) log: MemoryLog,
    /// The replicated state, and the entry as of which it is.
    pub(super) state: GroupState,
    pub(super) applied: Position,
    pub(super) logged: Logged,
    pub(super) extents: Extents,
    pub(super) base: Index,
    pub(super) pairs: Pairs,
    pub(super) standing: Standing,
}

impl Replica {
    /// A replica of a server whose log has a ring of `ring_bytes`.
    pub(super) fn new(
        start: Start,
        broken: Broken,
        ring_bytes: u64,
        logger: &slog::Logger,
    ) -> Self {
        let Start {
            group,
            peer,
            view,
            log,
            state,
            applied,
            logged,
            extents,
            base,
            pairs,
            standing,
        } = start;
        let commit = logged.state.commit;
        // Everything that was applied is at or below the durable commit.
        let folded = Folded {
            at: applied,
            state: state.clone(),
            conf: conf_from_raft(&log.conf),
            pending: VecDeque::new(),
        };
        let config = Config {
            id: peer.0,
            election_tick: ELECTION_TICKS,
            heartbeat_tick: HEARTBEAT_TICKS,
            // raft draws the timeout from a generator of its own, which does not replay. With a
            // range of one tick it is a constant; the shard delays elections instead.
            min_election_tick: ELECTION_TICKS,
            max_election_tick: ELECTION_TICKS + 1,
            check_quorum: true,
            pre_vote: true,
            skip_bcast_commit: true,
            applied: applied.index.0,
            max_size_per_msg: MESSAGE_BYTES.min(ring_bytes / 64),
            max_inflight_msgs: MESSAGES_IN_FLIGHT,
            max_committed_size_per_ready: COMMITTED_BYTES,
            ..Config::default()
        };
        let raft = RawNode::new(&config, log, logger)
            .unwrap_or_else(|error| panic!("the configuration of raft is valid: {error}"));
        Self {
            group,
            peer,
            view,
            standing,
            raft,
            state,
            applied,
            to_apply: VecDeque::new(),
            folded,
            durable_commit: commit,
            durable_barrier: logged.barrier,
            logged,
            stated_commit: commit,
            extents,
            base,
            pairs,
            barrier: logged.barrier,
            replay_end: commit,
            is_replayed: false,
            target: None,
            install: None,
            proposals: Proposals::default(),
            accepted_bytes: 0,
            waiting: BTreeMap::new(),
            is_lazy: false,
            pins: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            offered: BTreeMap::new(),
            gone: None,
            last_ready: 0,
            durable_ready: 0,
            broken,
        }
    }

    pub(super) fn memory(&self) -> &MemoryLog {
        self.raft.store()
    }

    pub(super) fn memory_mut(&mut self) -> &mut MemoryLog {
        self.raft.mut_store()
    }

    pub(super) fn takes_part(&self) -> bool {
        self.standing == Standing::Active
    }

    pub(super) fn activate(&mut self) {
        if self.standing == Standing::Creating {
            self.standing = Standing::Active;
        }
    }

    pub(super) fn lose(&mut self) {
        self.standing = Standing::Lost;
        self.to_apply.clear();
    }

    pub(super) fn is_leader(&self) -> bool {
        self.raft.raft.state == StateRole::Leader
    }

    /// The leader that the replica follows; 0 for none.
    pub(super) fn leader(&self) -> PeerId {
        PeerId(self.raft.raft.leader_id)
    }

    /// Whether a leader has sent a message before its process ended.
    pub(super) fn is_of_gone_leader(&self, message: &Message, now: u64) -> bool {
        use MessageType::{MsgAppend, MsgHeartbeat, MsgSnapshot};
        let Some((peer, term, _)) = self.gone.filter(|(.., until)| now < *until) else {
            return false;
        };
        matches!(message.get_msg_type(), MsgAppend | MsgHeartbeat | MsgSnapshot)
            && (PeerId(message.from), Term(message.term)) == (peer, term)
    }

    pub(super) fn term(&self) -> Term {
        Term(self.raft.raft.term)
    }

    /// The last entry as raft has it.
    pub(super) fn last_index(&self) -> Index {
        Index(self.raft.raft.raft_log.last_index())
    }

    /// Whether what the replica serves equals the committed log up to its applied index.
    pub(super) fn is_exact(&self) -> bool {
        self.has_blocks() && self.applied.index >= self.barrier
    }

    /// Whether the base, after [`Replica::fold`], may become a pair: the replica is exact, pulls
    /// nothing, and all that it ever pulled is at or below the base. (A pulled block goes to the
    /// store at once, also in place of one whose entry is above the durable commit.)
    pub(super) fn makes_pairs(&self) -> bool {
        self.is_exact() && self.target.is_none() && self.folded.at.index >= self.barrier
    }

    /// Whether each block is as new as the applied index, and at most as new as the barrier: the
    /// replica is exact but for an interrupted install. It may be the source of another one, whose
    /// barrier is as high. Two such replicas could otherwise wait for each other forever.
    pub(super) fn has_blocks(&self) -> bool {
        self.takes_part() && self.install.is_none() && self.applied.index >= self.replay_end
    }

    /// The index that no block is newer than.
    pub(super) fn newest_block(&self) -> Index {
        self.applied.index.max(self.barrier)
    }

    /// Whether raft must take no message, no tick and no ready: a snapshot waits for its ready, or
    /// for the checkpoint that completes it.
    pub(super) fn is_installing(&self) -> bool {
        self.install.is_some() || self.raft.snap().is_some()
    }

    /// Whether committed entries may be applied.
    pub(super) fn may_apply(&self) -> bool {
        self.takes_part() && self.target.is_none() && self.install.is_none()
    }

    /// Notes an entry as applied.
    pub(super) fn applied_entry(&mut self, at: Position, op: Option<&Op>) {
        self.applied = at;
        self.folded.pending.push_back((at, op.map(Op::without_data)));
    }

    /// Folds what recovery would find committed.
    pub(super) fn fold(&mut self) {
        let Folded { at, state, pending, .. } = &mut self.folded;
        while let Some((next, op)) =
            pending.pop_front_if(|next| next.0.index <= self.durable_commit)
        {
            *at = next;
            if let Some(op) = op {
                state.apply_unless(&op, self.broken);
            }
        }
    }

    /// Replaces the replicated state by that of an install. Returns what the old log is folded to.
    pub(super) fn install_state(
        &mut self,
        at: Position,
        state: GroupState,
        conf: ConfState,
    ) -> Folded {
        self.applied = at;
        self.to_apply.clear();
        self.is_replayed = false;
        let folded = Folded { at, state: state.clone(), conf, pending: VecDeque::new() };
        self.state = state;
        std::mem::replace(&mut self.folded, folded)
    }

    /// A record of the replica is in the log.
    pub(super) fn placed(&mut self, states: &States, offset: LogOffset) {
        let logged = &mut self.logged;
        logged.has_record = true;
        if let Some(state) = states.hard_state {
            let commit = state.commit.max(logged.state.commit);
            logged.state = HardState { commit, ..state };
        }
        if let Some((first, last)) = states.entries {
            logged.last = last;
            self.extents.push(first, last.index, offset);
        }
        logged.barrier = logged.barrier.max(states.barrier.unwrap_or_default());
    }

    /// A record that states `commit` is durable.
    pub(super) fn commit_is_durable(&mut self, commit: Index) {
        if commit > self.durable_commit {
            self.durable_commit = commit;
            self.fold();
        }
    }

    /// The index up to which applied entries may leave memory.
    pub(super) fn may_compact_to(&self, now: u64) -> Index {
        let pins = self.pins.values().filter(|pin| pin.until > now).map(|pin| pin.above);
        pins.min().map_or(self.applied.index, |above| above.min(self.applied.index))
    }

    pub(super) fn pin(&mut self, peer: PeerId, term: Term, at: Position, until: u64) {
        if self.is_leader() && term == self.term() {
            // One whose entries are gone would keep others in vain.
            match self.memory().truncated().index <= at.index {
                true => drop(self.pins.insert(peer, Pin { above: at.index, until })),
                false => drop(self.pins.remove(&peer)),
            }
        }
    }

    /// A peer has pulled the blocks as of `at`: raft may send the snapshot.
    pub(super) fn pulled(&mut self, peer: PeerId, term: Term, at: Position, conf: &ConfState) {
        let is_known = self.memory().term_at(at.index).is_none_or(|known| known == at.term);
        if self.is_leader() && term == self.term() && at.index <= self.committed() && is_known {
            self.memory_mut().offer_snapshot(peer, at, conf_to_raft(conf));
        }
    }

    pub(super) fn committed(&self) -> Index {
        Index(self.raft.raft.raft_log.committed)
    }

    pub(super) fn conf(&self) -> ConfState {
        conf_from_raft(&self.memory().conf)
    }

    /// The place of the replica in the order in which those without a leader, or without this one,
    /// hold elections. The order of two replicas is the same in each term: after a split vote, the
    /// first candidate is the first one again.
    pub(super) fn rank(&self, leader: PeerId) -> u64 {
        let others = self.view.peers.keys().filter(|peer| **peer != leader);
        others.filter(|peer| **peer < self.peer).count() as u64
    }

    /// The last entry that the replica on a server is known to have, if this one leads.
    pub(super) fn matched(&self, server: ServerId) -> Option<Index> {
        let (peer, _) = self.view.peers.iter().find(|(_, on)| **on == server)?;
        let progress = self.raft.raft.prs().get(peer.0).filter(|_| self.is_leader())?;
        Some(Index(progress.matched))
    }

    /// Advances raft's clock by a tick. Returns whether raft may have something to hand out.
    pub(super) fn tick(&mut self) -> bool {
        let elapsed = self.raft.raft.election_elapsed + 1;
        if !self.is_leader() && (ELECTION_TICKS..self.election_ticks()).contains(&elapsed) {
            // Raft's clock goes on: a replica whose clock stood still would count as one that has
            // heard from its leader, and ignore the elections of the others until its own.
            self.raft.raft.election_elapsed = elapsed;
            return false;
        }
        self.raft.tick()
    }

    /// Ticks without a sign of a leader after which the replica holds an election, and after which
    /// one that has no result is replaced by another one. They differ by rank, so that two replicas
    /// do not split the votes. If they do, their next elections are further apart.
    fn election_ticks(&self) -> usize {
        let rank = self.rank(self.leader()) as usize;
        ELECTION_TICKS + ELECTION_DELAY_TICKS + rank * RANK_TICKS
    }

    /// Whether an election is in progress that can still be won: no vote was refused.
    pub(super) fn awaits_votes(&self) -> bool {
        let raft = &self.raft.raft;
        raft.state == StateRole::Candidate && raft.prs().tally_votes().1 == 0
    }

    /// Names the replica in the queue in front of the log.
    pub(super) fn key(&self) -> (GroupId, PeerId) {
        (self.group, self.peer)
    }

    /// Hands a message to raft. What raft refuses is dropped: its peers repeat what matters.
    pub(super) fn step_raft(&mut self, message: Message) {
        drop(self.raft.step(message));
    }

    pub(super) fn role(&self) -> Role {
        match self.raft.raft.state {
            StateRole::Leader => Role::Leader,
            StateRole::Candidate | StateRole::PreCandidate => Role::Candidate,
            StateRole::Follower if self.raft.raft.promotable() => Role::Follower,
            StateRole::Follower => Role::Learner,
        }
    }

    pub(super) fn replica_state(&self) -> ReplicaState {
        match self.standing {
            Standing::Creating => ReplicaState::Creating,
            Standing::Lost => ReplicaState::Lost,
            Standing::Stopped => ReplicaState::Stopped,
            Standing::Active if self.is_exact() => ReplicaState::Exact,
            Standing::Active
                if self.target.is_some()
                    || self.install.is_some()
                    || self.applied.index < self.barrier =>
            {
                ReplicaState::Installing
            }
            Standing::Active => ReplicaState::Replaying,
        }
    }
}
