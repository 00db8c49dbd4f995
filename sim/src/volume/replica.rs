//! A replica: raft's state machine of one group, and what the server keeps beside it.

use raft::eraftpb::{HardState, Message};
use raft::{Config, ProgressState, RawNode, SnapshotStatus, StateRole};

use super::SERVERS;
use super::extents::Extents;
use super::log::{GroupLog, Position};
use super::mutation::Mutation;
use super::recovery::RecoveredGroup;

/// Ticks after which the leader gives up on a snapshot. Raft itself waits forever for its outcome,
/// but the message or its receiver can be lost.
const SNAPSHOT_TICKS: u32 = 30;

/// An install that no checkpoint has completed yet. Raft takes no message and no tick meanwhile,
/// since its applied index lies below the first index of its log.
pub(super) struct Install {
    /// The number of raft's `Ready`.
    pub(super) ready: u64,
    /// What is sent once the install is durable.
    pub(super) messages: Vec<Message>,
    /// The hard state of the old log, which stays the one that counts until then.
    pub(super) old_hard_state: HardState,
}

/// A member of a group on one server.
pub(super) struct Replica {
    pub(super) raft: RawNode<GroupLog>,
    /// The last applied index.
    pub(super) applied: u64,
    /// The index below which an install may have left blocks that are too new.
    pub(super) barrier: u64,
    /// The durable commit that recovery has found. The replica is not exact before it has applied
    /// up to it.
    replay_end: u64,
    pub(super) extents: Extents,
    pub(super) install: Option<Install>,
    /// Ticks for which raft has waited for the outcome of a snapshot, by target.
    snapshot_ticks: [u32; SERVERS],
}

impl Replica {
    /// Creates the replica from what the log has of it. Returns its durable commit too.
    pub(super) fn open(
        server: usize,
        mut recovered: RecoveredGroup,
        mutation: Mutation,
        logger: &slog::Logger,
    ) -> (Self, u64) {
        let log = recovered.log(mutation);
        let (applied, commit) = (log.applied.index, log.hard_state.commit);
        // Raft draws the timeout from a generator of its own, which does not replay. A range of one
        // tick makes it a constant.
        let election_ticks = 13 + 3 * server;
        let config = Config {
            id: server as u64 + 1,
            election_tick: 10,
            heartbeat_tick: 2,
            min_election_tick: election_ticks,
            max_election_tick: election_ticks + 1,
            check_quorum: true,
            pre_vote: true,
            applied,
            max_size_per_msg: 64 << 10,
            max_inflight_msgs: 32,
            ..Config::default()
        };
        let raft = RawNode::new(&config, log, logger)
            .unwrap_or_else(|error| panic!("raft does not start: {error}"));
        let replica = Self {
            raft,
            applied,
            barrier: recovered.barrier,
            replay_end: commit,
            extents: recovered.extents,
            install: None,
            snapshot_ticks: [0; SERVERS],
        };
        (replica, commit)
    }

    pub(super) fn log(&self) -> &GroupLog {
        self.raft.store()
    }

    pub(super) fn log_mut(&mut self) -> &mut GroupLog {
        self.raft.mut_store()
    }

    pub(super) fn is_leader(&self) -> bool {
        self.raft.raft.state == StateRole::Leader
    }

    /// Whether the replica serves exactly the committed log up to its applied index.
    pub(super) fn is_exact(&self) -> bool {
        self.applied >= self.barrier && self.applied >= self.replay_end && self.install.is_none()
    }

    pub(super) fn last_index(&self) -> u64 {
        self.raft.raft.raft_log.last_index()
    }

    /// Whether there is nothing left to apply or to install.
    pub(super) fn is_caught_up(&self) -> bool {
        self.is_exact() && self.applied == self.last_index()
    }

    /// Describes the role and the indices.
    pub(super) fn describe(&self) -> String {
        let role = self.raft.raft.state;
        let installing = if self.install.is_some() { " installing" } else { "" };
        format!(
            "{role:?}{installing} applied {} of {} barrier {} oldest {:?}",
            self.applied,
            self.last_index(),
            self.barrier,
            self.extents.oldest()
        )
    }

    /// Notes that all entries up to `at` are applied.
    pub(super) fn applied_to(&mut self, at: Position) {
        self.applied = at.index;
        self.log_mut().applied = at;
    }

    /// Whether raft must take no message and no tick: a snapshot waits for its `Ready`, or for the
    /// checkpoint that completes it. A message in between would put entries into the same `Ready`.
    pub(super) fn is_installing(&self) -> bool {
        self.install.is_some() || self.raft.snap().is_some()
    }

    /// Advances raft's clock.
    pub(super) fn tick(&mut self) {
        if self.is_installing() {
            return;
        }
        if self.is_leader() {
            self.give_up_on_snapshots();
        }
        self.raft.tick();
    }

    fn give_up_on_snapshots(&mut self) {
        let progress = self.raft.raft.prs();
        let waits = |peer| {
            progress.get(peer).is_some_and(|progress| progress.state == ProgressState::Snapshot)
        };
        let mut failed = vec![];
        for (server, ticks) in self.snapshot_ticks.iter_mut().enumerate() {
            let peer = server as u64 + 1;
            *ticks = if waits(peer) { *ticks + 1 } else { 0 };
            if *ticks > SNAPSHOT_TICKS {
                *ticks = 0;
                failed.push(peer);
            }
        }
        for peer in failed {
            self.raft.report_snapshot(peer, SnapshotStatus::Failure);
        }
    }
}
