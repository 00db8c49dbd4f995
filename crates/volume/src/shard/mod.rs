//! The shard: the replicas of a server, from its inputs to its outputs. It does no I/O of its own
//! besides appending to the log and submitting requests to the store's device, and has no clock, no
//! thread and no runtime: the same inputs give the same outputs, so that a simulation can replay
//! them. `docs/volumes-design.md` has the rules.
//!
//! - `replica.rs`: a replica: raft, the replicated state, and what is known of its durability
//! - `recovery.rs`: the opening of a server from its log and its store
//! - `ready.rs`: what raft hands out; what the log has durably; applying
//! - `entries.rs`: an entry that is applied, and the memory of those that were
//! - `clients.rs`: requests of clients
//! - `lag.rs`: followers for which a leader waits
//! - `checkpoint.rs`: the checkpoint of all replicas
//! - `install.rs`, `source.rs`: a replica that pulls the blocks of another one, and its source
//! - `time.rs`: ticks, elections, connections
//! - `stall.rs`: a disk that hangs

mod checkpoint;
mod clients;
#[cfg(test)]
mod election_tests;
mod entries;
mod install;
mod lag;
mod pairs;
mod ready;
mod recovery;
mod replica;
mod source;
mod stall;
#[cfg(test)]
mod tests;
mod time;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use alluvium_wal::WalError;

use self::checkpoint::Checkpointing;
use self::clients::{DurableAnswer, Reading};
use self::entries::EntryCache;
use self::lag::{Delayed, Lagging};
use self::replica::Replica;
use self::source::Source;
use self::stall::Stall;
use crate::group::GroupView;
use crate::log::{LogWriter, Loss};
use crate::messages::{PeerBody, PeerMessage, PullFrame, PullRequest};
use crate::request::{Answer, MAX_READ_BLOCKS, Request, RequestError};
use crate::rules::Broken;
use crate::store::{ReadId, Store, StoreCounters, StoreError};
use crate::types::{GroupId, Index, PeerId, ServerId};

pub use recovery::{OpenError, Opening, Recovered, Steps};

/// When a write is answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Apply {
    /// When it is applied in memory: the log holds it durably on a majority.
    #[default]
    Deferred,
    /// When its blocks are durable in the leader's store, too.
    Dsync,
}

/// Options of a shard.
#[derive(Clone, Debug)]
pub struct ShardOptions {
    /// This server.
    pub server: ServerId,
    /// When a write is answered.
    pub apply: Apply,
    /// Memory for entries that are applied and may be needed by a slow follower, in bytes.
    pub entry_cache_bytes: usize,
    /// Memory for blocks that have not landed, in bytes. Above it nothing is applied.
    pub overlay_bytes: usize,
    /// Proposals of a group that are not applied, in bytes. Above it ops are refused. At most 1/32
    /// of the ring is used, so that each group can be carried forward.
    pub proposal_bytes: usize,
    /// Greatest length of a record with several entries, in bytes.
    pub record_bytes: usize,
    /// Requests of the store's device in flight.
    pub store_queue_depth: usize,
    /// Slots of the store that are kept free of new ops.
    pub reserved_slots: u32,
    /// Most blocks of a batch of a pull: at most [`MAX_READ_BLOCKS`].
    pub pull_blocks: u16,
    /// A round of a pull is followed by another one if it had so many bytes and took so long.
    pub round_bytes: u64,
    /// See `round_bytes`, in milliseconds.
    pub round_ms: u64,
    /// Time without progress after which a pull or a snapshot is given up, in milliseconds.
    pub progress_ms: u64,
    /// Time between two ticks of raft, in milliseconds.
    pub tick_ms: u64,
    /// A rule that a simulation breaks.
    pub broken: Broken,
}

impl ShardOptions {
    /// The defaults of a server.
    pub fn new(server: ServerId) -> Self {
        Self {
            server,
            apply: Apply::Deferred,
            entry_cache_bytes: 128 << 20,
            overlay_bytes: 64 << 20,
            proposal_bytes: 8 << 20,
            record_bytes: 1 << 20,
            store_queue_depth: 32,
            reserved_slots: 64,
            pull_blocks: MAX_READ_BLOCKS,
            round_bytes: 64 << 20,
            round_ms: 2_000,
            progress_ms: 30_000,
            tick_ms: 200,
            broken: Broken::default(),
        }
    }
}

/// What a server states of itself to the others.
#[derive(Clone, Copy, Debug, Default)]
pub struct ServerState {
    /// Free slots of its store.
    pub free_slots: u32,
    /// One of its devices has completed nothing for ten ticks.
    pub is_stalled: bool,
}

/// What happens outside of the shard.
#[derive(Debug)]
pub enum Input {
    /// A message from a replica on another server.
    Peer {
        /// The server.
        server: ServerId,
        /// The message.
        message: PeerMessage,
    },
    /// What another server states of itself with its messages.
    PeerState {
        /// The server.
        server: ServerId,
        /// What it states.
        state: ServerState,
    },
    /// The connection to another server has ended.
    PeerDown {
        /// The server.
        server: ServerId,
        /// The process that has sent everything of it so far is gone.
        is_gone: bool,
    },
    /// A request of a client.
    Client {
        /// Names the request in its answer.
        ticket: u64,
        /// The request.
        request: Request,
    },
    /// Another server asks for blocks.
    Pull {
        /// Names the stream of the answer.
        stream: u64,
        /// The request.
        request: PullRequest,
    },
    /// The stream takes another frame.
    PullReady {
        /// The stream.
        stream: u64,
    },
    /// The stream has ended.
    PullClosed {
        /// The stream.
        stream: u64,
    },
    /// A frame of a pull of this server.
    PullFrame {
        /// The pull.
        attempt: u64,
        /// The group.
        group: GroupId,
        /// The frame.
        frame: PullFrame,
    },
    /// The registry states this of a group.
    View {
        /// The group.
        group: GroupId,
        /// What it states.
        view: GroupView,
    },
    /// The registry has a replica of this server that was never created.
    Create {
        /// The group.
        group: GroupId,
        /// The replica.
        peer: PeerId,
        /// What the registry states of the group.
        view: GroupView,
    },
    /// The registry records that the replica was created: it may take part.
    Activate {
        /// The group.
        group: GroupId,
        /// The replica.
        peer: PeerId,
    },
    /// The registry has the replica no longer.
    Remove {
        /// The group.
        group: GroupId,
    },
    /// A checkpoint is wanted.
    Checkpoint,
}

/// What the shard wants done.
#[derive(Debug, Default)]
pub struct Output {
    /// Messages to replicas on other servers.
    pub messages: Vec<(ServerId, PeerMessage)>,
    /// Answers to clients.
    pub answers: Vec<(u64, Result<Answer, RequestError>)>,
    /// Frames of pulls that other servers have requested.
    pub frames: Vec<(u64, PullFrame)>,
    /// Pulls that this server requests: the pull, the source, and the request.
    pub pulls: Vec<(u64, ServerId, PullRequest)>,
    /// Pulls of this server of which a batch was handed to the store, so that another one may come.
    pub taken: Vec<u64>,
    /// Pulls of this server that are given up.
    pub cancelled: Vec<u64>,
    /// What the registry is to record.
    pub notices: Vec<Notice>,
    /// The entries that were applied, for the oracle of a simulation.
    #[cfg(feature = "simulation")]
    pub applied: Vec<AppliedEntry>,
}

/// An entry that a replica has applied.
#[cfg(feature = "simulation")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppliedEntry {
    /// The group.
    pub group: GroupId,
    /// The position of the entry.
    pub at: crate::types::Position,
    /// The op; `None` for the empty entry of a new leader.
    pub op: Option<crate::op::Op>,
}

/// What the registry is to record, or an operator to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The replica's first record is durable: it waits for [`Input::Activate`].
    Created {
        /// The group.
        group: GroupId,
        /// The replica.
        peer: PeerId,
        /// Whether the log had the replica when it was opened.
        is_recovered: bool,
    },
    /// The replica may have forgotten what it acknowledged. It takes part in nothing any more.
    Lost {
        /// The group.
        group: GroupId,
        /// The replica.
        peer: PeerId,
        /// Why.
        reason: String,
    },
    /// The replica has met a state that no sound group has. It takes part in nothing until an
    /// operator has seen it.
    Stopped {
        /// The group.
        group: GroupId,
        /// The replica.
        peer: PeerId,
        /// Why.
        reason: String,
    },
    /// A message names a group that this server does not have.
    UnknownGroup {
        /// The group.
        group: GroupId,
    },
}

/// Why a shard cannot go on. The process ends: the next opening finds out what is durable.
#[derive(Debug, thiserror::Error)]
pub enum ShardFailure {
    /// The log.
    #[error("the write-ahead log has failed: {0}")]
    Log(#[from] WalError),
    /// The store.
    #[error("the store has failed: {0}")]
    Store(#[from] StoreError),
}

/// The replicas of a server.
pub struct Shard {
    options: ShardOptions,
    logger: slog::Logger,
    replicas: BTreeMap<GroupId, Replica>,
    log: LogWriter,
    store: Store,
    checkpoint: Checkpointing,
    /// Groups whose raft may have something to hand out.
    dirty: BTreeSet<GroupId>,
    /// Bytes of the entries that were accepted since the last readies: they are not in the log, nor
    /// in the queue in front of it.
    accepted_bytes: usize,
    /// Groups with ops that raft has not been given yet.
    proposing: BTreeSet<GroupId>,
    /// Groups that pull blocks.
    pulling: BTreeSet<GroupId>,
    /// Groups whose leader's process is gone, with the time of the election.
    campaigns: BTreeSet<(u64, GroupId)>,
    /// Groups with entries to apply.
    applying: BTreeSet<GroupId>,
    /// Groups whose durable commit may be behind their applied index, with the time at which a
    /// record of its own states it.
    lazy: VecDeque<(u64, GroupId)>,
    cache: EntryCache,
    /// Servers with followers that lag.
    lagging: BTreeMap<ServerId, Lagging>,
    /// Ops that wait for these servers.
    delayed: Delayed,
    reads: BTreeMap<ReadId, Reading>,
    next_read: u64,
    sources: BTreeMap<u64, Source>,
    next_attempt: u64,
    /// What the servers that are connected have stated last.
    others: BTreeMap<ServerId, ServerState>,
    /// Ops that are applied and whose blocks are not durable in the store yet.
    durable_answers: Vec<DurableAnswer>,
    stall: Stall,
    now: u64,
    next_tick: u64,
    counters: ShardCounters,
}

/// Counts of what a shard has done, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardCounters {
    /// Turns: calls of [`Shard::turn`].
    pub turns: u64,
    /// Ops that were applied at their leader and answered.
    pub ops: u64,
    /// Ops among them that had taken effect before.
    pub duplicates: u64,
    /// Ops that were refused because too much waits: the client sends them again.
    pub busy: u64,
    /// Reads that were answered.
    pub reads: u64,
    /// Completed checkpoints.
    pub checkpoints: u64,
    /// Groups that checkpoints have carried forward.
    pub carried_forward: u64,
    /// Installs that have begun.
    pub installs: u64,
    /// Installs that have completed.
    pub installs_completed: u64,
    /// Completed installs whose source has sent only the changed blocks.
    pub installs_of_changes: u64,
    /// Messages with entries that were dropped because the ring is full.
    pub refused_appends: u64,
    /// Records of a commit index alone.
    pub commit_records: u64,
    /// Elections that a replica of this server has won.
    pub elections: u64,
    /// Times that a device has stalled.
    pub stalls: u64,
}

impl Shard {
    /// One pass over everything that can be done now. Never waits. What is to be sent or answered
    /// is added to `out`.
    ///
    /// # Errors
    /// The log or the store has failed: nothing of `out` may be sent, and the process ends.
    pub fn turn(
        &mut self,
        now: u64,
        inputs: &mut VecDeque<Input>,
        out: &mut Output,
    ) -> Result<(), ShardFailure> {
        self.now = now;
        self.counters.turns += 1;
        // What waits for the log does not append, and would wait forever.
        if let Some(stopped) = self.log.wal().stopped() {
            return Err(stopped.into());
        }
        // The devices may have made progress since the last tick.
        self.take_durable(out);
        self.take_landed(out)?;
        self.tick(out);
        loop {
            let mut is_busy = self.take_durable(out);
            is_busy |= self.take_landed(out)?;
            // Before apply: the commit of a block becomes durable in the pass that applies the next
            // one, and a block that is replaced all the time would never be written otherwise.
            self.write_back();
            while let Some(input) = inputs.pop_front() {
                is_busy = true;
                self.input(input, out);
            }
            self.accept_delayed(out);
            self.propose(out);
            is_busy |= self.take_readies(out);
            is_busy |= self.apply(out);
            self.state_commits();
            is_busy |= !self.checkpoint.blocks_log() && self.append()?;
            is_busy |= self.store_pulled(out);
            is_busy |= self.send_pulled(out);
            is_busy |= self.checkpoint_step(out)?;
            if !is_busy {
                return Ok(());
            }
        }
    }

    fn input(&mut self, input: Input, out: &mut Output) {
        match input {
            Input::Peer { server, message } => self.peer(server, message, out),
            Input::PeerState { server, state } => {
                self.others.insert(server, state);
            }
            Input::PeerDown { server, is_gone } => self.peer_down(server, is_gone),
            Input::Client { ticket, request } => self.client(ticket, request, out),
            Input::Pull { stream, request } => self.open_source(stream, &request, out),
            Input::PullReady { stream } => self.continue_source(stream, out),
            Input::PullClosed { stream } => drop(self.sources.remove(&stream)),
            Input::PullFrame { attempt, group, frame } => {
                self.pull_frame(group, attempt, frame, out);
            }
            Input::View { group, view } => {
                if let Some(replica) = self.replicas.get_mut(&group) {
                    replica.view = view;
                }
            }
            Input::Create { group, peer, view } => self.create(group, peer, view),
            Input::Activate { group, peer } => self.activate(group, peer),
            Input::Remove { group } => self.remove(group, out),
            Input::Checkpoint => self.checkpoint.wanted = true,
        }
    }

    /// Hands a message from another replica to raft, or to the install.
    fn peer(&mut self, server: ServerId, message: PeerMessage, out: &mut Output) {
        let PeerMessage { group, from, to, body } = message;
        let log_is_stalled = self.log_is_stalled();
        let Some(replica) = self.replicas.get_mut(&group) else {
            out.notices.push(Notice::UnknownGroup { group });
            return;
        };
        let is_from_there = replica.view.peers.get(&from) == Some(&server);
        if replica.peer != to || !is_from_there || !replica.takes_part() {
            return;
        }
        if let PeerBody::Raft(message) = &body
            && (log_is_stalled || replica.take_idle(message, out))
        {
            // A response would wait for the log, and so many could wait.
            return;
        }
        match body {
            PeerBody::Raft(message) => self.step(group, *message, out),
            PeerBody::Offer { term, applied } => self.offered(group, from, term, applied, out),
            PeerBody::Pin { term, at } => {
                replica.pin(from, term, at, self.now + self.options.progress_ms);
            }
            PeerBody::Pulled { term, at, conf } => replica.pulled(from, term, at, &conf),
        }
        let replica = self.replicas.get_mut(&group);
        if !replica.is_some_and(|replica| replica.send_at_once(out)) {
            self.dirty.insert(group);
        }
    }

    /// Writes what may be written to the store.
    fn write_back(&mut self) {
        let Self { store, replicas, .. } = self;
        store.write_back(&|group| {
            replicas.get(&group).map_or(Index(0), |replica| replica.durable_commit)
        });
    }

    /// The time at which the shard has something to do without an input.
    pub fn wakes_at(&self) -> u64 {
        let lazy = self.lazy.front().map_or(u64::MAX, |(at, _)| *at);
        let campaign = self.campaigns.first().map_or(u64::MAX, |(at, _)| *at);
        self.next_tick.min(lazy).min(campaign)
    }

    /// What the log must have durably for the shard to go on; `None` if nothing waits for it.
    pub fn awaits_log(&self) -> Option<alluvium_wal::LogOffset> {
        let record = self.checkpoint.awaits_log();
        [self.log.awaits(), record].into_iter().flatten().min()
    }

    /// Whether records wait for space in the log.
    pub fn waits_for_space(&self) -> bool {
        self.log.queued_bytes() > 0 || self.checkpoint.blocks_log()
    }

    /// Bytes of the ops of a group that may wait to be applied. Above it ops are refused.
    pub fn proposal_bytes(&self) -> usize {
        self.options.proposal_bytes
    }

    /// Slots of the store, and how many of them are free.
    pub fn slots(&self) -> (u32, u32) {
        (self.store.slots(), self.store.free_slots())
    }

    /// Whether so much of the ring is in use that entries of other servers are dropped.
    pub fn refuses_entries(&self) -> bool {
        self.ring_is_above(3, 4)
    }

    /// Number of items that wait for the log.
    #[cfg(test)]
    fn waiting_items(&self) -> usize {
        self.log.items()
    }

    /// The log.
    pub fn wal(&self) -> &alluvium_wal::Wal {
        self.log.wal()
    }

    /// Ends the shard, and returns the log, which may be closed. The store needs no end of its own:
    /// the next opening treats it as after a crash.
    pub fn into_wal(self) -> alluvium_wal::Wal {
        self.log.into_wal()
    }

    /// Whether the replica is exact and has nothing left to apply, to install or to write.
    #[cfg(feature = "simulation")]
    pub fn is_settled(&self, group: GroupId) -> bool {
        let Some(replica) = self.replicas.get(&group) else { return false };
        replica.is_exact()
            && replica.applied.index == replica.last_index()
            && replica.target.is_none()
            && self.store.is_drained(group)
    }

    /// Whether an install waits for the checkpoint that completes it, or blocks are pulled.
    #[cfg(feature = "simulation")]
    pub fn is_installing(&self) -> bool {
        let mut replicas = self.replicas.values();
        replicas.any(|replica| replica.install.is_some() || replica.target.is_some())
    }

    /// Describes what a replica waits for.
    #[cfg(feature = "simulation")]
    pub fn describe(&self, group: GroupId) -> String {
        let Some(replica) = self.replicas.get(&group) else { return "none".to_owned() };
        format!(
            "{:?} install {} target {:?} queued {} progress {:?} memory {:?}..{:?}",
            replica.status(),
            replica.install.is_some(),
            replica.target,
            self.log.has_queued(replica.key()),
            replica.raft.status().progress.map(|it| format!("{:?}", it.iter().collect::<Vec<_>>())),
            replica.memory().truncated(),
            replica.memory().last(),
        )
    }

    /// Describes what the server waits for.
    #[cfg(feature = "simulation")]
    pub fn describe_server(&self) -> String {
        let stats = self.log.wal().stats();
        format!(
            "ring {} of {} bytes, window {} bytes, overlay {} bytes, {} free slots, checkpoint {}",
            stats.used_bytes,
            stats.ring_bytes,
            stats.window_used_bytes,
            self.store.overlay_bytes(),
            self.store.free_slots(),
            self.checkpoint.describe(),
        )
    }

    /// Whether a checkpoint is in progress.
    pub fn is_checkpointing(&self) -> bool {
        self.checkpoint.is_running()
    }

    /// Memory of blocks that are not written to the store yet, in bytes.
    pub fn overlay_bytes(&self) -> usize {
        self.store.overlay_bytes()
    }

    /// Counts of what the store has written.
    pub fn store_counters(&self) -> StoreCounters {
        self.store.counters()
    }

    /// Counts of what the shard has done.
    pub fn counters(&self) -> ShardCounters {
        self.counters
    }

    /// Marks a replica as lost. It is not heard of any more under its peer id.
    fn lose(&mut self, group: GroupId, reason: String, out: &mut Output) {
        let Some(replica) = self.replicas.get_mut(&group) else { return };
        let peer = replica.peer;
        replica.lose();
        self.give_up_pull(group, out);
        self.bury(group, peer);
        out.notices.push(Notice::Lost { group, peer, reason });
    }
}

/// A replica that the opening has found to be lost.
#[derive(Clone, Debug)]
pub struct LostReplica {
    /// The group.
    pub group: GroupId,
    /// The replica.
    pub peer: PeerId,
    /// Why.
    pub loss: Loss,
}
