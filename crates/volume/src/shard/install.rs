//! A replica that replaces its blocks by those of another one, because the entries that it lacks
//! are in no memory. `docs/format/volume-wire.md`, section 11, and `docs/format/volume-log.md`,
//! section 5.
//!
//! While blocks are pulled, nothing is applied: an older entry would replace a newer block. The
//! record of the barrier is durable before the first block is handed to the store. When everything
//! is there, the leader's raft sends its snapshot message, and the next checkpoint completes the
//! install.

use std::collections::VecDeque;

use raft::Ready;
use raft::eraftpb::{Message, MessageType};

use super::replica::{Begin, Install, Replica, Round, Target};
use super::{Output, Shard};
use crate::log::{self, Encoded, Item, Promise, Record};
use crate::messages::{
    PeerBody, PeerMessage, PullContent, PullFrame, PullItem, PullRequest, data_bytes,
};
use crate::op::BlockRange;
use crate::raft::{conf_from_raft, conf_to_raft};
use crate::rules::Rule;
use crate::state::GroupState;
use crate::store::{Content, NoSlots, Store};
use crate::types::{ChunkIndex, GroupId, HardState, Index, PeerId, Position, Term};

/// Time after which the leader is informed again.
const REPEAT_MS: u64 = 2_000;
/// Time between two pins, and between two offers to the same replica.
const PIN_MS: u64 = 5_000;
const OFFER_MS: u64 = 1_000;

impl Replica {
    /// What was pulled completely, and waits for the leader's snapshot.
    pub(super) fn pulled_position(&self) -> Option<Position> {
        let target = self.target.as_ref()?;
        target.pulled_at?;
        target.begin.as_ref().map(|begin| begin.at)
    }

    fn message(&self, to: PeerId, body: PeerBody) -> PeerMessage {
        PeerMessage { group: self.group, from: self.peer, to, body }
    }
}

impl Shard {
    // -- The leader

    /// Offers the blocks to the peers whose next entries raft has not found in memory.
    pub(super) fn offer_pulls(&mut self, group: GroupId, out: &mut Output) {
        let Some(replica) = self.replicas.get_mut(&group) else { return };
        for peer in replica.memory_mut().take_wanted() {
            let last = replica.offered.get(&peer).copied();
            if last.is_some_and(|last| self.now < last + OFFER_MS) || !replica.has_blocks() {
                continue;
            }
            let Some(server) = replica.view.peers.get(&peer).copied() else { continue };
            replica.offered.insert(peer, self.now);
            let offer = PeerBody::Offer { term: replica.term(), applied: replica.applied.index };
            out.messages.push((server, replica.message(peer, offer)));
        }
    }

    // -- The target

    /// The leader offers the blocks: they are pulled from it.
    pub(super) fn offered(
        &mut self,
        group: GroupId,
        leader: PeerId,
        term: Term,
        applied: Index,
        out: &mut Output,
    ) {
        let Some(replica) = self.replicas.get(&group) else { return };
        // A pull that has ended waits for its leader, which may be gone: another one needs this
        // replica to commit.
        let is_of_earlier_leader = replica.target.as_ref().is_some_and(|it| it.leader.1 < term);
        if is_of_earlier_leader && term >= replica.term() && !replica.is_installing() {
            self.give_up_pull(group, out);
        }
        let Some(replica) = self.replicas.get_mut(&group) else { return };
        let Some(server) = replica.view.peers.get(&leader).copied() else { return };
        let is_busy = replica.target.is_some() || replica.is_installing();
        if term < replica.term() || replica.is_leader() || is_busy {
            return;
        }
        if applied <= replica.applied.index {
            // The leader's raft has gone back too far in search of a common entry, and would offer
            // the same forever. An append without entries makes raft respond with its commit index.
            let append = Message {
                msg_type: MessageType::MsgAppend,
                from: leader.0,
                to: replica.peer.0,
                term: term.0,
                ..Message::default()
            };
            self.step(group, append, out);
            return;
        }
        let attempt = self.next_attempt;
        self.next_attempt += 1;
        self.pulling.insert(group);
        replica.target = Some(Target {
            attempt,
            leader: (leader, term, server),
            begin: None,
            round: Round {
                number: 1,
                at: self.now,
                since: replica.applied.index,
                ..Round::default()
            },
            retry_at: None,
            batches: VecDeque::new(),
            has_ended: false,
            pulled_at: None,
            pinned_at: None,
            progress_at: self.now,
        });
        let (target, since) = (replica.peer, replica.applied.index);
        out.pulls.push((attempt, server, PullRequest { group, target, since, is_first: true }));
        self.forget_pairs(group);
    }

    /// Handles a frame of a pull.
    pub(super) fn pull_frame(
        &mut self,
        group: GroupId,
        attempt: u64,
        frame: PullFrame,
        out: &mut Output,
    ) {
        let Some(replica) = self.replicas.get_mut(&group) else { return };
        let applied = replica.applied.index;
        let Some(target) = replica.target.as_mut().filter(|target| target.attempt == attempt)
        else {
            return;
        };
        if frame == PullFrame::Failed && target.failed(self.now) {
            return;
        }
        target.progress_at = self.now;
        match frame {
            PullFrame::Begin { at, conf, volumes, sends_everything, .. }
                if at.index > applied && !target.round.has_begun =>
            {
                let first = target.begin.as_ref();
                let sends_everything =
                    first.map_or(sends_everything, |first| first.sends_everything);
                target.begin = Some(Begin { at, conf, volumes, sends_everything });
                target.round.has_begun = true;
                target.pinned_at = None;
            }
            PullFrame::Batch { newest, items }
                if target.round.has_begun
                    && target.begin.as_ref().is_some_and(|begin| newest >= begin.at.index) =>
            {
                target.round.bytes += data_bytes(&items);
                target.batches.push_back((newest, items));
                if newest > replica.barrier {
                    replica.barrier = newest;
                    if !self.options.broken.is(Rule::InstallRecord) {
                        let record = Encoded::record(&Record::Install(log::Install {
                            group,
                            peer: replica.peer,
                            barrier: newest,
                            applied,
                            progress: None,
                        }));
                        let item = Item::new(replica.key(), Promise::Install, Some(record));
                        self.log.push(item);
                    } else {
                        replica.durable_barrier = newest;
                    }
                }
            }
            PullFrame::End if target.round.has_begun => target.has_ended = true,
            _ => self.give_up_pull(group, out),
        }
    }

    /// Hands the batches to the store whose barrier is durable, as far as the overlay has space. A
    /// pull for which the store has too few slots is given up. Returns false if there is none.
    pub(super) fn store_pulled(&mut self, out: &mut Output) -> bool {
        let Self { replicas, store, options, pulling, now, .. } = self;
        let mut is_busy = false;
        let mut refused = Vec::new();
        for group in &*pulling {
            let Some(replica) = replicas.get_mut(group) else { continue };
            let durable = replica.durable_barrier;
            let Some(target) = &mut replica.target else { continue };
            while store.overlay_bytes() <= options.overlay_bytes
                && let Some((_, items)) = target.batches.pop_front_if(|batch| batch.0 <= durable)
            {
                is_busy = true;
                target.progress_at = *now;
                out.taken.push(target.attempt);
                let is_full =
                    items.into_iter().any(|item| store_item(store, *group, item).is_err());
                if is_full {
                    refused.push(*group);
                    break;
                }
            }
        }
        for group in refused {
            self.give_up_pull(group, out);
        }
        is_busy
    }

    /// Informs leaders of pulls that are complete, and of those that go on. Returns false if there
    /// is nothing to send.
    pub(super) fn send_pulled(&mut self, out: &mut Output) -> bool {
        let Self { replicas, store, options, next_attempt, now, .. } = self;
        let mut is_busy = false;
        for group in &self.pulling {
            let Some(replica) = replicas.get_mut(group) else { continue };
            let Some(target) = &mut replica.target else { continue };
            let (leader, term, server) = target.leader;
            let has_all = target.has_ended && target.batches.is_empty() && !store.has_pulls(*group);
            let next = match target.retry_at {
                Some(at) => (*now >= at).then_some(target.round.since),
                None if has_all && target.pulled_at.is_none() => target.next_round(options, *now),
                None => None,
            };
            if let Some(since) = next {
                target.retry_at = None;
                target.attempt = *next_attempt;
                *next_attempt += 1;
                let (group, peer) = (*group, replica.peer);
                let request = PullRequest { group, target: peer, since, is_first: false };
                out.pulls.push((target.attempt, server, request));
                is_busy = true;
                continue;
            }
            let Some(begin) = &target.begin else { continue };
            let is_due = target.pulled_at.is_none_or(|at| *now >= at + REPEAT_MS);
            // What the overlay has of entries must land before the checkpoint that completes the
            // install, and needs their commit record, which no install makes.
            let is_complete = has_all && replica.durable_commit >= replica.applied.index;
            let body = if is_complete && is_due {
                target.pulled_at = Some(*now);
                PeerBody::Pulled { term, at: begin.at, conf: begin.conf.clone() }
            } else if target.pulled_at.is_none()
                && target.round.has_begun
                && target.pinned_at.is_none_or(|at| *now >= at + PIN_MS)
                && !target.round.is_long(options, *now)
            {
                target.pinned_at = Some(*now);
                PeerBody::Pin { term, at: begin.at }
            } else {
                continue;
            };
            is_busy = true;
            let message = replica.message(leader, body);
            out.messages.push((server, message));
        }
        is_busy
    }

    /// Gives up the pull of a group: entries are applied again. The barrier stays until they have
    /// passed it.
    pub(super) fn give_up_pull(&mut self, group: GroupId, out: &mut Output) {
        let Some(replica) = self.replicas.get_mut(&group) else { return };
        if let Some(target) = replica.target.take() {
            self.pulling.remove(&group);
            self.applying.insert(group);
            out.cancelled.push(target.attempt);
        }
    }

    /// Gives up pulls without progress.
    pub(super) fn expire_pulls(&mut self, out: &mut Output) {
        let is_expired = |group: &GroupId| {
            let target = self.replicas.get(group).and_then(|replica| replica.target.as_ref());
            target.is_some_and(|target| self.now >= target.progress_at + self.options.progress_ms)
        };
        let expired: Vec<GroupId> = self.pulling.iter().copied().filter(is_expired).collect();
        for group in expired {
            self.give_up_pull(group, out);
        }
    }

    /// Raft has taken the snapshot whose blocks were pulled. It is handed out at once, before any
    /// other message: a ready with a snapshot and entries could not be divided between the old log
    /// and the new one. If the log has the snapshot's entry, raft only commits: the pull has ended,
    /// and entries are applied again.
    pub(super) fn snapshot_stepped(&mut self, group: GroupId, out: &mut Output) {
        let Some(replica) = self.replicas.get_mut(&group) else { return };
        if replica.raft.snap().is_none() {
            self.give_up_pull(group, out);
        }
        self.dirty.insert(group);
    }

    /// Begins an install: the log is replaced in memory. The next checkpoint that begins completes
    /// it.
    pub(super) fn install(&mut self, group: GroupId, mut ready: Ready, out: &mut Output) {
        let replica = self.replicas.get_mut(&group).expect("the caller has looked it up");
        let number = ready.number();
        let messages = ready.take_persisted_messages();
        assert!(ready.entries().is_empty() && ready.committed_entries().is_empty());
        let metadata = ready.snapshot().get_metadata().clone();
        let at = Position { index: Index(metadata.index), term: Term(metadata.term) };
        let target = replica.target.take().expect("only a pulled snapshot is handed to raft");
        self.pulling.remove(&group);
        let begin = target.begin.expect("a pull that has ended has begun");
        let conf = conf_from_raft(metadata.get_conf_state());
        let volumes = match self.options.broken.is(Rule::InstallVolumes) {
            true => replica.state.volumes().cloned().collect(),
            false => begin.volumes,
        };
        let old_applied = replica.applied.index;
        let old = replica.install_state(at, GroupState::new(volumes), conf.clone());
        let memory = replica.memory_mut();
        memory.install(at, conf_to_raft(&conf));
        if let Some(state) = ready.hs() {
            memory.hard_state = state.clone();
        }
        let state = memory.hard_state.clone();
        replica.raft.advance_append_async(ready);
        if self.options.broken.is(Rule::OldLogStays) {
            replica.extents.clear();
        }
        self.counters.installs += 1;
        self.checkpoint.wanted = true;
        let is_of_changes = !begin.sends_everything;
        let install =
            Install { ready: number, messages, at, state, old, old_applied, is_of_changes };
        if self.options.broken.is(Rule::InstallReported) {
            replica.report(install, out);
        } else {
            replica.install = Some(install);
        }
    }

    /// Completes an install whose checkpoint is durable.
    pub(super) fn complete_install(&mut self, group: GroupId, out: &mut Output) {
        let Some(replica) = self.replicas.get_mut(&group) else { return };
        let Some(install) = replica.install.take() else { return };
        let Position { index, .. } = install.at;
        let state = HardState {
            term: Term(install.state.term),
            vote: PeerId(install.state.vote),
            commit: index,
        };
        replica.extents.clear();
        (replica.logged.state, replica.logged.last) = (state, install.at);
        replica.stated_commit = index;
        replica.commit_is_durable(index);
        let is_of_changes = install.is_of_changes;
        replica.report(install, out);
        self.counters.installs_completed += 1;
        self.counters.installs_of_changes += u64::from(is_of_changes);
        self.dirty.insert(group);
        self.applying.insert(group);
    }
}

impl Replica {
    /// Reports to raft that a snapshot is durable and applied.
    fn report(&mut self, install: Install, out: &mut Output) {
        self.persisted(install.ready);
        self.raft.advance_apply_to(install.at.index.0);
        super::ready::send(self, install.messages, out);
    }
}

/// Hands a part of a batch to the store.
fn store_item(store: &mut Store, group: GroupId, item: PullItem) -> Result<(), NoSlots> {
    let PullItem { at, content } = item;
    match content {
        PullContent::Blocks { first, crcs, data } => {
            let range = BlockRange { chunk: at.chunk, first, blocks: crcs.len() as u16 };
            store.pull(group, at.volume, at.layer, range, &Content::Data(data, crcs))
        }
        PullContent::Zeros { first, blocks } => {
            let range = BlockRange { chunk: at.chunk, first, blocks };
            store.pull(group, at.volume, at.layer, range, &Content::Zeros)
        }
        PullContent::Bitmap { bits, .. } => {
            store.pull_retain(group, at.volume, at.layer, at.chunk, &bits);
            Ok(())
        }
        PullContent::Absent { chunks } => {
            let end = at.chunk.0 + chunks;
            let mut from = at.chunk;
            while let Some(chunk) = store.next_chunk_of(group, at.volume, at.layer, from) {
                if chunk.0 >= end {
                    break;
                }
                store.pull_retain(group, at.volume, at.layer, chunk, &[0; _]);
                from = ChunkIndex(chunk.0 + 1);
            }
            Ok(())
        }
    }
}
