//! Ticks, elections, and connections to other servers.

use raft::eraftpb::{Message, MessageType};
use raft::{Progress, ProgressState, SnapshotStatus, StateRole};

use super::ready::send;
use super::replica::Replica;
use super::{Output, Shard};
use crate::types::{GroupId, PeerId, ServerId, Term};

/// Times after the activation of a new group's first founder at which it holds an election. The
/// other founders are activated at about the same time, and take no part before that.
const FIRST_CAMPAIGNS_MS: [u64; 4] = [0, 50, 150, 400];

/// Time between the proof that a leader's process is gone and the first election, and what each
/// rank adds to it.
const CAMPAIGN_MS: u64 = 50;
const CAMPAIGN_RANK_MS: u64 = 150;
/// Elections for one such proof, the time between two, and what each rank adds to it. The first one
/// can fail: a replica whose own proof comes later still follows the leader, and ignores requests
/// for its vote. The election timeout would be a second at least.
const CAMPAIGNS: u64 = 8;
const CAMPAIGN_AGAIN_MS: u64 = 150;
const CAMPAIGN_AGAIN_RANK_MS: u64 = 200;
/// Time in which messages of a leader whose process is gone are dropped. They were on their way, on
/// another connection than the one that was refused, and would make it the leader again.
const GONE_MS: u64 = 1000;

impl Shard {
    /// Advances time. Ticks that were missed, because the process did not run, are left out: they
    /// would depose leaders that are well.
    pub(super) fn tick(&mut self, out: &mut Output) {
        self.campaign();
        if self.now < self.next_tick {
            return;
        }
        self.next_tick = match self.next_tick + self.options.tick_ms {
            next if next > self.now => next,
            _ => self.now + self.options.tick_ms,
        };
        let is_stalled = self.watch_devices();
        for replica in self.replicas.values_mut() {
            if !replica.takes_part() || replica.is_installing() || is_stalled {
                continue;
            }
            if replica.is_leader() {
                replica.give_up_on_snapshots(self.now, self.options.progress_ms);
            } else {
                replica.snapshots.clear();
            }
            if replica.tick() && !replica.send_at_once(out) {
                self.dirty.insert(replica.group);
            }
        }
        self.expire_pulls(out);
    }

    /// The registry records that a replica was created. The first founder of a new group does not
    /// wait for an election timeout, since a client waits for the group.
    pub(super) fn activate(&mut self, group: GroupId, peer: PeerId) {
        let replica = self.replicas.get_mut(&group).filter(|replica| replica.peer == peer);
        let Some(replica) = replica else { return };
        replica.activate();
        self.dirty.insert(group);
        if replica.term() == Term(0) && replica.view.founders.first() == Some(&replica.peer) {
            let times = FIRST_CAMPAIGNS_MS.map(|after| (self.now + after, group));
            self.campaigns.extend(times);
        }
    }

    /// The connection to a server has ended.
    pub(super) fn peer_down(&mut self, server: ServerId, is_gone: bool) {
        self.others.remove(&server);
        for replica in self.replicas.values_mut().filter(|replica| replica.takes_part()) {
            if replica.is_installing() {
                continue;
            }
            let peers = replica.view.peers.iter().filter(|(_, on)| **on == server);
            let peers: Vec<PeerId> = peers.map(|(peer, _)| *peer).collect();
            for peer in peers {
                replica.raft.report_unreachable(peer.0);
                if is_gone && peer == replica.leader() {
                    // While a replica follows a leader, it ignores requests for its vote.
                    let term = replica.raft.raft.term;
                    replica.raft.raft.become_follower(term, raft::INVALID_ID);
                    replica.gone = Some((peer, Term(term), self.now + GONE_MS));
                    let rank = replica.rank(peer);
                    let first = self.now + CAMPAIGN_MS + rank * CAMPAIGN_RANK_MS;
                    let again = CAMPAIGN_AGAIN_MS + rank * CAMPAIGN_AGAIN_RANK_MS;
                    let times = (0..CAMPAIGNS).map(|count| first + count * again);
                    self.campaigns.extend(times.map(|time| (time, replica.group)));
                }
            }
            self.dirty.insert(replica.group);
        }
    }

    /// Holds the elections that are due, of groups that have no leader.
    fn campaign(&mut self) {
        let is_stalled = self.is_stalled();
        while let Some((at, group)) = self.campaigns.first().copied().filter(|it| it.0 <= self.now)
        {
            self.campaigns.remove(&(at, group));
            let Some(replica) = self.replicas.get_mut(&group) else { continue };
            let may_campaign = replica.takes_part() && !replica.is_installing() && !is_stalled;
            // Also if it is a candidate already, and has split the votes with another one.
            if may_campaign
                && replica.leader() == PeerId(raft::INVALID_ID)
                && !replica.awaits_votes()
            {
                drop(replica.raft.campaign());
                self.dirty.insert(group);
            }
        }
    }
}

impl Replica {
    /// Takes a heartbeat, or the response to one, that only shows that its sender is there: the
    /// group is idle. Raft would do the same, and answer through a ready. Returns false if raft has
    /// to take the message.
    pub(super) fn take_idle(&mut self, message: &Message, out: &mut Output) -> bool {
        let (term, kind) = (self.memory().hard_state.term, message.get_msg_type());
        let may_take = self.takes_part() && !self.is_installing();
        if !may_take || term != message.term || term != self.raft.raft.term {
            return false;
        }
        let is_durable = self.last_ready == self.durable_ready;
        let raft = &mut self.raft.raft;
        match (kind, raft.state) {
            (MessageType::MsgHeartbeat, StateRole::Follower)
                if raft.leader_id == message.from
                    && message.commit <= raft.raft_log.committed
                    && is_durable =>
            {
                raft.election_elapsed = 0;
                let response = Message {
                    msg_type: MessageType::MsgHeartbeatResponse,
                    from: self.peer.0,
                    to: message.from,
                    term,
                    commit: raft.raft_log.committed,
                    ..Message::default()
                };
                send(self, vec![response], out);
                true
            }
            (MessageType::MsgHeartbeatResponse, StateRole::Leader) => {
                let last = raft.raft_log.last_index();
                let progress = raft.mut_prs().get_mut(message.from);
                let is_equal = |it: &&mut Progress| {
                    it.state == ProgressState::Replicate && it.matched == last && !it.ins.full()
                };
                let Some(progress) = progress.filter(is_equal) else { return false };
                progress.recent_active = true;
                true
            }
            _ => false,
        }
    }

    /// Gives up on snapshots without an outcome. Raft itself waits forever for it, but the message
    /// or its receiver can be lost.
    fn give_up_on_snapshots(&mut self, now: u64, after_ms: u64) {
        let progress = self.raft.raft.prs().iter();
        let waiting: Vec<PeerId> = progress
            .filter(|(_, progress)| progress.state == ProgressState::Snapshot)
            .map(|(peer, _)| PeerId(*peer))
            .collect();
        self.snapshots.retain(|peer, _| waiting.contains(peer));
        for peer in waiting {
            let since = *self.snapshots.entry(peer).or_insert(now);
            if now >= since + after_ms {
                self.snapshots.remove(&peer);
                self.raft.report_snapshot(peer.0, SnapshotStatus::Failure);
            }
        }
    }
}
