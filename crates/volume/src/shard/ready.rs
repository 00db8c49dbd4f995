//! What raft hands out: messages, records for the log, and committed entries. What the log has
//! durably: messages that promise it, and the commit index up to which blocks may be written.

use raft::eraftpb::{Entry, Message, MessageType};
use raft::{Ready, StateRole};

use super::entries::{apply_entry, encode};
use super::recovery::Walked;
use super::replica::{Replica, Standing};
use super::{Apply, Notice, Output, Shard, ShardFailure, ShardOptions};
use crate::group::GroupView;
use crate::log::{Encoded, Item, LogWriter, MAX_ENTRIES, Promise, Record, Tombstone};
use crate::messages::{PeerBody, PeerMessage};
use crate::raft::{Check, Receiver, check, entry_bytes, hard_state_from_raft, position};
use crate::rules::{Broken, Rule};
use crate::state::Applied;
use crate::types::{GroupId, HardState, Index, PeerId, Position, Term};

/// Time after which a commit index gets a record of its own, if no other record states it.
const COMMIT_RECORD_MS: u64 = 20;

impl Shard {
    // -- Messages

    /// Hands a message of raft to the replica, if a sound group can have sent it.
    pub(super) fn step(&mut self, group: GroupId, mut message: Message, out: &mut Output) {
        let ring_is_full = !message.entries.is_empty() && self.ring_is_above(3, 4);
        let Some(replica) = self.replicas.get_mut(&group) else { return };
        // What was on its way when the leader's process ended would make it the leader again.
        if replica.is_installing() || replica.is_of_gone_leader(&message, self.now) {
            return;
        }
        if self.options.refuses(replica, &message, ring_is_full) {
            // raft sends the entries again. The rest states what is committed, and without that the
            // entries before would wait forever.
            message.entries.clear();
            self.counters.refused_appends += 1;
        }
        let entries_bytes: usize = message.entries.iter().map(entry_bytes).sum();
        let raft_log = &replica.raft.raft.raft_log;
        let receiver = Receiver {
            term_at: &|index| {
                let term = raft_log.term(index.0).ok()?;
                (term > 0 || index == Index(0)).then_some(Term(term))
            },
            last: replica.last_index(),
            term: replica.term(),
            commit: replica.committed(),
            is_leader: replica.is_leader(),
            leader: replica.leader().0,
            pulled: match self.options.broken.is(Rule::InstallIndex) {
                true => {
                    let metadata = message.get_snapshot().get_metadata();
                    Some((Index(metadata.index), Term(metadata.term)))
                }
                false => replica.pulled_position().map(|at| (at.index, at.term)),
            },
        };
        match check(&receiver, &message) {
            Check::Drop => {}
            Check::Step => {
                let is_snapshot = message.get_msg_type() == MessageType::MsgSnapshot;
                self.accepted_bytes += entries_bytes;
                replica.accepted_bytes += entries_bytes;
                replica.step_raft(message);
                if is_snapshot {
                    self.snapshot_stepped(group, out);
                }
            }
            Check::Lost(reason) => self.lose(group, reason, out),
            Check::Breach(reason) => {
                replica.standing = Standing::Stopped;
                let peer = replica.peer;
                out.notices.push(Notice::Stopped { group, peer, reason });
            }
        }
    }

    /// Whether more than `numerator` / `denominator` of the ring are in use, or will be when what
    /// was accepted is in the log. A process that was stopped accepts much in one pass.
    pub(super) fn ring_is_above(&self, numerator: u64, denominator: u64) -> bool {
        let stats = self.log.wal().stats();
        let used_bytes = stats.used_bytes + (self.log.queued_bytes() + self.accepted_bytes) as u64;
        used_bytes > stats.ring_bytes / denominator * numerator
    }

    // -- What raft hands out

    /// Takes the readies of all groups that may have one. Returns false if there is none.
    pub(super) fn take_readies(&mut self, out: &mut Output) -> bool {
        let mut is_busy = false;
        for group in std::mem::take(&mut self.dirty) {
            while let Some(replica) = self.replicas.get_mut(&group) {
                let may_hand_out = replica.takes_part() && replica.install.is_none();
                if !may_hand_out || !replica.raft.has_ready() {
                    break;
                }
                is_busy = true;
                self.take_ready(group, out);
            }
            if let Some(replica) = self.replicas.get_mut(&group) {
                replica.accepted_bytes = 0;
            }
            self.offer_pulls(group, out);
        }
        self.accepted_bytes = 0;
        is_busy
    }

    fn take_ready(&mut self, group: GroupId, out: &mut Output) {
        let replica = self.replicas.get_mut(&group).expect("the caller has looked it up");
        let mut ready = replica.raft.ready();
        replica.last_ready = ready.number();
        if let Some(state) = ready.ss() {
            let leads = state.raft_state == StateRole::Leader;
            self.counters.elections += u64::from(leads);
            if !leads {
                replica.refuse_waiting(out);
                self.refuse_delayed(group, out);
            } else {
                // A leader applies its entries, which it must have.
                self.give_up_pull(group, out);
            }
        }
        let replica = self.replicas.get_mut(&group).expect("the caller has looked it up");
        send(replica, ready.take_messages(), out);
        if ready.snapshot().is_empty() {
            self.take_entries(group, ready, out);
        } else {
            self.install(group, ready, out);
        }
    }

    fn take_entries(&mut self, group: GroupId, mut ready: Ready, out: &mut Output) {
        let replica = self.replicas.get_mut(&group).expect("the caller has looked it up");
        let number = ready.number();
        let mut messages = ready.take_persisted_messages();
        if self.options.broken.is(Rule::PersistedMessages) {
            send(replica, std::mem::take(&mut messages), out);
        }
        let is_promise = ready.must_sync();
        if let Some(state) = ready.hs() {
            replica.memory_mut().hard_state = state.clone();
        }
        let first = Index(ready.entries().first().map_or(0, |entry| entry.index));
        let end = replica.memory().last();
        replica.memory_mut().append(ready.entries());
        let promise = Promise::Ready { number: Some(number), messages };
        if ready.entries().is_empty() {
            let record = is_promise.then(|| {
                let state = hard_state_from_raft(&replica.memory().hard_state);
                replica.record(state, end, &[])
            });
            self.log.push(Item::new(replica.key(), promise, record));
        } else {
            let before = Index(first.0 - 1);
            let term = replica.memory().term_at(before).expect("the entries join the log");
            let before = Position { index: before, term };
            let bounds = (self.options.record_bytes, self.options.broken);
            push_entries(&mut self.log, replica, before, ready.entries(), promise, bounds);
        }
        let committed = ready.take_committed_entries();
        replica.raft.advance_append_async(ready);
        if !committed.is_empty() {
            replica.to_apply.extend(committed);
            self.applying.insert(group);
        }
    }

    // -- The log

    /// Appends what waits for the log. Returns false if there is nothing, or no space.
    pub(super) fn append(&mut self) -> Result<bool, ShardFailure> {
        let Self { log, replicas, .. } = self;
        let placed = log.append(|(group, peer), states, offset| {
            if let Some(replica) = replicas.get_mut(&group).filter(|it| it.peer == peer) {
                replica.placed(states, offset);
            }
        })?;
        Ok(placed)
    }

    /// Handles what the log has durably. Returns false if there is nothing.
    pub(super) fn take_durable(&mut self, out: &mut Output) -> bool {
        let mut is_busy = false;
        while let Some(Item { replica: (group, peer), promise, record, .. }) =
            self.log.take_durable()
        {
            is_busy = true;
            let replica = self.replicas.get_mut(&group).filter(|replica| replica.peer == peer);
            let Some(replica) = replica else { continue };
            let states = record.map(|record| record.states).unwrap_or_default();
            if let Some(state) = states.hard_state {
                replica.commit_is_durable(state.commit);
            }
            if let Some(barrier) = states.barrier {
                replica.durable_barrier = replica.durable_barrier.max(barrier);
            }
            match promise {
                Promise::Ready { number, messages } => {
                    if let Some(number) = number.filter(|_| replica.standing != Standing::Lost) {
                        replica.persisted(number);
                    }
                    if replica.takes_part() {
                        send(replica, messages, out);
                    }
                    self.dirty.insert(group);
                }
                Promise::Creation if replica.standing == Standing::Creating => {
                    out.notices.push(Notice::Created { group, peer, is_recovered: false });
                }
                Promise::Commit | Promise::Creation | Promise::Install | Promise::Tombstone => {}
            }
        }
        is_busy
    }

    /// Records commit indices that are applied and not in the log. Otherwise they would wait for
    /// the next entry, and the blocks with them.
    pub(super) fn state_commits(&mut self) {
        while let Some((_, group)) = self.lazy.pop_front_if(|(at, _)| *at <= self.now) {
            let Some(replica) = self.replicas.get_mut(&group) else { continue };
            replica.is_lazy = false;
            let applied = replica.applied.index;
            let is_stated = replica.durable_commit >= applied
                || self.log.states_commit(replica.key(), applied)
                || replica.install.is_some()
                || replica.standing == Standing::Lost;
            if is_stated {
                continue;
            }
            let state = hard_state_from_raft(&replica.memory().hard_state);
            let last = replica.memory().last();
            let record = replica.record(state, last, &[]);
            self.log.push(Item::new(replica.key(), Promise::Commit, Some(record)));
            self.counters.commit_records += 1;
        }
    }

    // -- Applying

    /// Applies committed entries. A group stops at an entry for which the store has no slot, and
    /// all stop while the overlay is full. Returns false if nothing was applied.
    pub(super) fn apply(&mut self, out: &mut Output) -> bool {
        let mut is_busy = false;
        for group in std::mem::take(&mut self.applying) {
            let is_drained = loop {
                let Some(replica) = self.replicas.get(&group) else { break true };
                if replica.to_apply.is_empty() {
                    break true;
                }
                if !replica.may_apply()
                    || self.store.overlay_bytes() > self.options.overlay_bytes
                    || !self.apply_next(group, out)
                {
                    break false;
                }
                is_busy = true;
            };
            self.applied(group);
            if !is_drained {
                self.applying.insert(group);
            }
        }
        is_busy
    }

    /// Applies the next entry of a group. Returns false if the store has no slot for it.
    fn apply_next(&mut self, group: GroupId, out: &mut Output) -> bool {
        let Self { replicas, store, options, counters, .. } = self;
        let replica = replicas.get_mut(&group).expect("the caller has looked it up");
        let entry = replica.to_apply.front().expect("the caller has looked at it");
        let at = position(entry);
        let Ok(applied) = apply_entry(group, entry, &mut replica.state, store, options.broken)
        else {
            return false;
        };
        self.cache.push(group, at.index, entry_bytes(entry));
        replica.to_apply.pop_front();
        let op = applied.as_ref().map(|(op, _)| op);
        replica.applied_entry(at, op);
        #[cfg(feature = "simulation")]
        out.applied.push(super::AppliedEntry { group, at, op: op.cloned() });
        if let Some(ticket) = replica.answered(at, out) {
            let (op, outcome) = applied.expect("an entry with a ticket has an op");
            counters.ops += 1;
            counters.duplicates += u64::from(outcome == Applied::Duplicate);
            self.answer_applied(group, ticket, &op, at.index, outcome, out);
        }
        true
    }

    /// What follows when entries of a group were applied.
    fn applied(&mut self, group: GroupId) {
        let Some(replica) = self.replicas.get_mut(&group) else { return };
        let applied = replica.applied.index;
        if replica.install.is_none() && applied.0 > replica.raft.raft.raft_log.applied {
            replica.raft.advance_apply_to(applied.0);
            self.dirty.insert(group);
        }
        replica.fold();
        if !replica.is_replayed && applied >= replica.replay_end {
            replica.is_replayed = applied >= replica.barrier;
            let state = &replica.state;
            let knows = |volume| state.has(volume);
            self.store.replayed(group, &knows, replica.is_replayed);
        }
        if applied > replica.durable_commit && !replica.is_lazy {
            replica.is_lazy = true;
            let delay = match self.options.apply {
                Apply::Deferred => COMMIT_RECORD_MS,
                Apply::Dsync => 0,
            };
            self.lazy.push_back((self.now + delay, group));
        }
        self.evict();
    }

    /// Drops applied entries from memory, the oldest first, as far as the budget demands it.
    fn evict(&mut self) {
        self.note_lagging();
        let budget_bytes = self.options.entry_cache_bytes;
        while let Some((group, index)) = self.cache.pop_above(budget_bytes) {
            if let Some(replica) = self.replicas.get_mut(&group) {
                let to = replica.may_compact_to(self.now).min(index);
                replica.memory_mut().compact(to);
            }
        }
    }

    // -- Replicas come and go

    /// Writes the first record of a replica, which takes part when the registry knows that.
    pub(super) fn create(&mut self, group: GroupId, peer: PeerId, view: GroupView) {
        if self.replicas.contains_key(&group) {
            return;
        }
        let start = Walked::created(&view).start(group, peer, view, Standing::Creating);
        let ring_bytes = self.log.wal().stats().ring_bytes;
        let mut replica = Replica::new(start, self.options.broken, ring_bytes, &self.logger);
        replica.is_replayed = true;
        let record = replica.record(HardState::default(), Position::default(), &[]);
        self.replicas.insert(group, replica);
        self.store.add_replica(group, peer);
        self.log.push(Item::new((group, peer), Promise::Creation, Some(record)));
    }

    /// Removes a replica that the registry does not have any more.
    pub(super) fn remove(&mut self, group: GroupId, out: &mut Output) {
        self.give_up_pull(group, out);
        if let Some(replica) = self.replicas.remove(&group) {
            self.bury(group, replica.peer);
            self.store.remove_replica(group);
            self.sources.retain(|_, source| source.group() != group);
        }
    }

    /// Writes the record that a replica is gone.
    pub(super) fn bury(&mut self, group: GroupId, peer: PeerId) {
        let record = Encoded::record(&Record::Tombstone(Tombstone { group, peer }));
        self.log.push(Item::new((group, peer), Promise::Tombstone, Some(record)));
    }
}

/// Sends messages of raft to the servers of their replicas.
pub(super) fn send(replica: &Replica, messages: Vec<Message>, out: &mut Output) {
    for message in messages {
        let (from, to) = (replica.peer, PeerId(message.to));
        let Some(server) = replica.view.peers.get(&to) else { continue };
        let body = PeerBody::Raft(Box::new(message));
        out.messages.push((*server, PeerMessage { group: replica.group, from, to, body }));
    }
}

/// Hands the entries of a ready to the log, in records of bounded length. Only the last one has the
/// ready's commit index: a crash in between would leave one above the end of the log.
fn push_entries(
    log: &mut LogWriter,
    replica: &mut Replica,
    mut before: Position,
    entries: &[Entry],
    promise: Promise,
    (max_bytes, broken): (usize, Broken),
) {
    let state = hard_state_from_raft(&replica.memory().hard_state);
    let mut rest = entries;
    let mut promise = Some(promise);
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = rest.iter().take(MAX_ENTRIES as usize).take_while(|entry| {
            bytes += entry.data.len() + entry.context.len();
            bytes <= max_bytes
        });
        let (part, others) = rest.split_at(fits.count().max(1));
        rest = others;
        let is_last = rest.is_empty();
        let commit = match is_last || broken.is(Rule::CommitInLastRecord) {
            true => state.commit,
            false => replica.stated_commit,
        };
        let record = replica.record(HardState { commit, ..state }, before, part);
        let promise = match is_last {
            true => promise.take().expect("there is one last part"),
            false => Promise::Ready { number: None, messages: Vec::new() },
        };
        log.push(Item::new(replica.key(), promise, Some(record)));
        let last = part.last().expect("a part has an entry");
        before = position(last);
    }
}

impl ShardOptions {
    /// Whether the entries of a message are refused, because the ring is full or too many wait to
    /// be applied. Entries that the message replaces do not count, and those of a message that does
    /// not join the log are left to raft, which answers where the logs differ. The bound is above
    /// that of a leader: entries of earlier terms are committed only with one of the leader's own,
    /// which a follower with just as many entries as the leader must take.
    fn refuses(&self, replica: &Replica, message: &Message, ring_is_full: bool) -> bool {
        if message.get_msg_type() != MessageType::MsgAppend || message.entries.is_empty() {
            return false;
        }
        let joins = replica.raft.raft.raft_log.match_term(message.index, message.log_term);
        let waits = || replica.unapplied_bytes(Index(message.index)) + replica.accepted_bytes;
        joins && (ring_is_full || waits() > self.proposal_bytes / 2 * 3)
    }
}

impl Replica {
    /// Sends raft's messages if it has nothing else to hand out, and they promise nothing that the
    /// log does not have durably: all earlier readies of a follower are. Returns false if there is
    /// more to do. Heartbeats and their responses of idle groups need no ready and no place in the
    /// log's order this way, and do not wait for the records of other groups.
    pub(super) fn send_at_once(&mut self, out: &mut Output) -> bool {
        let is_durable =
            self.last_ready == self.durable_ready || self.broken.is(Rule::EarlierReadies);
        let may_send = self.takes_part() && self.install.is_none();
        if !may_send || !(is_durable || self.is_leader()) || self.memory().has_wanted() {
            return false;
        }
        let messages = std::mem::take(&mut self.raft.raft.msgs);
        if self.raft.has_ready() {
            self.raft.raft.msgs = messages;
            return false;
        }
        // What was accepted has been handed out before.
        self.accepted_bytes = 0;
        send(self, messages, out);
        true
    }

    /// The log has a ready durably.
    pub(super) fn persisted(&mut self, ready: u64) {
        self.durable_ready = ready;
        self.raft.on_persist_ready(ready);
    }

    /// A record with entries after `before`, and a hard state.
    pub(super) fn record(
        &mut self,
        state: HardState,
        before: Position,
        entries: &[Entry],
    ) -> Encoded {
        self.stated_commit = self.stated_commit.max(state.commit);
        encode(self.group, self.peer, state, before, entries.iter())
    }

    /// Bytes of the entries up to `to` that are not applied.
    pub(super) fn unapplied_bytes(&self, to: Index) -> usize {
        self.memory().bytes_between(self.applied.index, to)
    }
}
