//! The turn of a server: what has become durable, what has landed, raft's output, and one step of
//! the checkpoint, until nothing is left to do.

use raft::eraftpb::Entry;
use raft::{RawNode, Ready, StateRole};

use super::{Outstanding, Running};
use crate::volume::environment::Environment;
use crate::volume::log::Position;
use crate::volume::mutation::Mutation;
use crate::volume::op::Op;
use crate::volume::record::Record;
use crate::volume::replica::Install;
use crate::volume::{BLOCKS, GROUPS};

impl Running {
    pub(super) fn turn(&mut self, environment: &mut Environment) {
        loop {
            let mut is_busy = self.take_durable(environment);
            is_busy |= self.store.take_completions();
            for group in 0..GROUPS {
                let replica = &self.replicas[group];
                if replica.install.is_none() && replica.raft.has_ready() {
                    is_busy = true;
                    self.take_ready(group, environment);
                }
            }
            is_busy |= self.checkpoint_step(environment);
            if !is_busy {
                return;
            }
        }
    }

    /// Handles what the log now has durably. Returns false if there is nothing.
    fn take_durable(&mut self, environment: &mut Environment) -> bool {
        let durable = self.wal.durable();
        let mut is_busy = false;
        while self.outstanding.front().is_some_and(|oldest| oldest.end <= durable) {
            let Some(oldest) = self.outstanding.pop_front() else { break };
            is_busy = true;
            if let Some(ready) = oldest.ready {
                self.replicas[oldest.group].raft.on_persist_ready(ready);
            }
            if let Some(commit) = oldest.commit {
                self.store.commit_is_durable(oldest.group, commit);
            }
            environment.network.send(self.server, oldest.group, oldest.messages);
        }
        is_busy
    }

    /// Handles raft's output of one group: messages of the leader, a snapshot, or entries and
    /// committed entries.
    fn take_ready(&mut self, group: usize, environment: &mut Environment) {
        let mut ready = self.replicas[group].raft.ready();
        let leads = ready.ss().is_some_and(|state| state.raft_state == StateRole::Leader);
        environment.outcome.elections += u64::from(leads);
        environment.network.send(self.server, group, ready.take_messages());
        if ready.snapshot().is_empty() {
            self.take_entries(group, ready, environment);
        } else {
            self.install(group, ready, environment);
        }
    }

    fn take_entries(&mut self, group: usize, mut ready: Ready, environment: &mut Environment) {
        let number = ready.number();
        let mut messages = ready.take_persisted_messages();
        let replica = &mut self.replicas[group];
        if let Some(hard_state) = ready.hs() {
            replica.log_mut().hard_state = hard_state.clone();
        }
        let hard_state_counts = ready.hs().is_some() && ready.must_sync();
        let record = (!ready.entries().is_empty() || hard_state_counts).then(|| {
            if let Some(first) = ready.entries().first() {
                replica.extents.overwrite(first.index);
            }
            replica.log_mut().append(ready.entries());
            let hard_state = replica.log().hard_state.clone();
            Record::Entries { group, hard_state, entries: ready.entries().clone() }
        });
        let mut end = self.wal.appended();
        let mut commit = None;
        if let Some(record) = record {
            let append = self.append(&record);
            let replica = &mut self.replicas[group];
            if let Some(last) = ready.entries().last() {
                replica.extents.push(last.index, append.offset());
            }
            end = append.end();
            commit = Some(replica.log().hard_state.commit);
        }
        let committed = ready.take_committed_entries();
        self.replicas[group].raft.advance_append_async(ready);
        if self.mutation == Mutation::PersistedMessagesEarly {
            environment.network.send(self.server, group, std::mem::take(&mut messages));
        }
        let ready = Some(number);
        self.outstanding.push_back(Outstanding { end, group, ready, messages, commit });
        self.apply(group, &committed, environment);
    }

    /// Applies committed entries to the overlay, and acknowledges those that clients of this server
    /// wait for.
    fn apply(&mut self, group: usize, entries: &[Entry], environment: &mut Environment) {
        for entry in entries {
            let op = Op::decode(&entry.data);
            environment.oracle.applied(group, entry.index, entry.term, op);
            if let Some(op) = op {
                self.store.put(group, op.block, op.value(), entry.index);
            }
            self.replicas[group].applied_to(Position { index: entry.index, term: entry.term });
            if let Some(op) = op {
                self.acknowledge(op, entry.index, environment);
            }
        }
        let replica = &mut self.replicas[group];
        let applied = replica.applied;
        replica.raft.advance_apply_to(applied);
    }

    fn acknowledge(&self, op: Op, index: u64, environment: &mut Environment) {
        let Environment { oracle, outcome, trace, .. } = environment;
        if oracle.acknowledge(op, index, self.server, self.incarnation) {
            outcome.acknowledged += 1;
            outcome.discards += u64::from(op.discards);
            trace.event("acknowledged", &[("op", op.id), ("index", index)]);
        }
    }

    /// Starts an install: the barrier becomes durable, the pulled blocks go to the overlay, and the
    /// log is replaced in memory. The next checkpoint that begins completes it.
    fn install(&mut self, group: usize, mut ready: Ready, environment: &mut Environment) {
        let number = ready.number();
        let messages = ready.take_persisted_messages();
        assert!(ready.entries().is_empty() && ready.committed_entries().is_empty());
        let metadata = ready.snapshot().get_metadata().clone();
        let pulled = environment.network.take_pulled(self.server, group);
        let pulled = pulled.expect("the blocks arrive before the snapshot");
        let snapshot = Position { index: metadata.index, term: metadata.term };
        assert!(pulled.as_of >= snapshot.index, "blocks older than their snapshot");
        environment.outcome.installs += 1;
        environment.trace.event(
            "install",
            &[
                ("server", self.server as u64),
                ("group", group as u64),
                ("index", snapshot.index),
                ("barrier", pulled.as_of),
            ],
        );
        if self.mutation != Mutation::InstallWithoutRecord {
            let record = Record::Install { group, barrier: pulled.as_of };
            let append = self.append(&record);
            self.wait_durable(append.end());
        }
        let replica = &mut self.replicas[group];
        replica.barrier = replica.barrier.max(pulled.as_of);
        replica.applied = snapshot.index;
        let old_hard_state = replica.log().hard_state.clone();
        let log = replica.log_mut();
        log.install(snapshot, metadata.get_conf_state().clone());
        if let Some(hard_state) = ready.hs() {
            log.hard_state = hard_state.clone();
        }
        if self.mutation == Mutation::OldLogReleased {
            replica.extents.clear();
        }
        replica.raft.advance_append_async(ready);
        for block in 0..BLOCKS {
            self.store.put_pulled(group, block, pulled.blocks[block]);
        }
        self.checkpoint.wanted = true;
        if self.mutation == Mutation::InstallReportedEarly {
            let raft = &mut self.replicas[group].raft;
            report(raft, number, snapshot.index);
            environment.network.send(self.server, group, messages);
            return;
        }
        self.replicas[group].install = Some(Install { ready: number, messages, old_hard_state });
    }

    /// Completes an install whose checkpoint is durable.
    pub(super) fn complete_install(&mut self, group: usize, environment: &mut Environment) {
        let replica = &mut self.replicas[group];
        let Install { ready, messages, .. } =
            replica.install.take().expect("only a checkpoint ends an install");
        replica.extents.clear();
        let applied = replica.applied;
        report(&mut replica.raft, ready, applied);
        self.store.commit_is_durable(group, applied);
        environment.network.send(self.server, group, messages);
    }
}

/// Reports to raft that a snapshot is durable and applied.
fn report<S: raft::Storage>(raft: &mut RawNode<S>, ready: u64, applied: u64) {
    raft.on_persist_ready(ready);
    raft.advance_apply_to(applied);
}
