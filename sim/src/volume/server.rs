//! A server: one write-ahead log and one store for the replicas of all groups.

mod checkpoint;
mod turn;

use std::collections::VecDeque;

use alluvium_device::sim::{Mode, SimDisk, SimOptions};
use alluvium_wal::{Append, AppendError, FormatOptions, LogOffset, Options, Wal};
use raft::eraftpb::Message;

use self::checkpoint::Checkpoint;
use super::environment::Environment;
use super::mutation::Mutation;
use super::op::{Op, Value};
use super::record::Record;
use super::recovery::Recovered;
use super::replica::Replica;
use super::store::{STORE_BYTES, Store};
use super::{GROUPS, RING_BYTES};

/// Bytes of the log's window with which proposals are still taken.
const PROPOSAL_WINDOW_BYTES: u64 = 64 << 10;

/// Entries that a leader has not applied, above which it takes no proposal.
const UNAPPLIED_ENTRIES: u64 = 10;

/// How a server ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    PowerCut,
    Kill,
}

/// A server with its disks, running or not.
pub(super) struct Server {
    index: usize,
    /// The number of its openings.
    incarnation: u64,
    log_disk: SimDisk,
    store_disk: SimDisk,
    running: Option<Running>,
}

/// A process of a server.
pub(super) struct Running {
    server: usize,
    incarnation: u64,
    mutation: Mutation,
    wal: Wal,
    log_disk: SimDisk,
    store: Store,
    replicas: Vec<Replica>,
    outstanding: VecDeque<Outstanding>,
    checkpoint: Checkpoint,
}

/// A `Ready` of raft, or a record of a commit index, that the log does not have durably yet.
struct Outstanding {
    end: LogOffset,
    group: usize,
    /// The number of the `Ready`.
    ready: Option<u64>,
    /// What may be sent once it is durable.
    messages: Vec<Message>,
    /// The commit index that the record states.
    commit: Option<u64>,
}

impl Server {
    pub(super) fn new(index: usize, seed: u64) -> Self {
        let disk = |number: u64, capacity_bytes| {
            let seed = seed.wrapping_mul(31).wrapping_add(2 * index as u64 + number);
            SimDisk::new(SimOptions { capacity_bytes, seed, ..SimOptions::default() })
        };
        let log_disk = disk(2, RING_BYTES + (64 << 10));
        let store_disk = disk(3, STORE_BYTES);
        let options = FormatOptions { window_bytes: Some(256 << 10), ..FormatOptions::default() };
        Wal::format(&log_disk.device(), &options).expect("an empty disk can be formatted");
        Self { index, incarnation: 0, log_disk, store_disk, running: None }
    }

    pub(super) fn open(&mut self, mutation: Mutation) {
        assert!(self.running.is_none(), "the server is running");
        self.incarnation += 1;
        let options = Options {
            window_bytes: 512 << 10,
            block_bytes: 32 << 10,
            max_record_bytes: 200 << 10,
            io_depth: 4,
            ..Options::default()
        };
        let Recovered { wal, checkpoint, groups } = Recovered::open(&self.log_disk, &options);
        self.log_disk.set_mode(Mode::Queued);
        let mut store = Store::open(self.index, &self.store_disk, mutation);
        let logger = slog::Logger::root(slog::Discard, slog::o!());
        let mut replicas = vec![];
        for (group, recovered) in groups.into_iter().enumerate() {
            let (replica, commit) = Replica::open(self.index, recovered, mutation, &logger);
            store.commit_is_durable(group, commit);
            replicas.push(replica);
        }
        self.running = Some(Running {
            server: self.index,
            incarnation: self.incarnation,
            mutation,
            wal,
            log_disk: self.log_disk.clone(),
            store,
            replicas,
            outstanding: VecDeque::new(),
            checkpoint: Checkpoint::after(checkpoint),
        });
    }

    pub(super) fn end(&mut self, end: End) {
        // The disks end first: the process is not there to see its requests fail.
        let after = |disk: &SimDisk| match end {
            End::PowerCut => disk.power_cut(),
            End::Kill => disk.process_crash(),
        };
        self.log_disk = after(&self.log_disk);
        self.store_disk = after(&self.store_disk);
        self.running = None;
    }

    pub(super) fn index(&self) -> usize {
        self.index
    }

    pub(super) fn incarnation(&self) -> u64 {
        self.incarnation
    }

    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Whether the server is running and its replica considers itself the leader.
    pub(super) fn leads(&self, group: usize) -> bool {
        self.running().is_some_and(|running| running.replica(group).is_leader())
    }

    pub(super) fn running(&self) -> Option<&Running> {
        self.running.as_ref()
    }

    pub(super) fn running_mut(&mut self) -> Option<&mut Running> {
        self.running.as_mut()
    }

    /// Does everything that needs neither a tick nor a message.
    pub(super) fn turn(&mut self, environment: &mut Environment) {
        if let Some(running) = &mut self.running {
            running.turn(environment);
        }
    }

    /// Completes one request of the log's disk.
    pub(super) fn step_log(&self) -> bool {
        self.log_disk.step()
    }

    /// Completes one request of the store's disk.
    pub(super) fn step_store(&self) -> bool {
        self.store_disk.step()
    }

    /// Reads a block from an exact replica that has applied up to the token. Returns the applied
    /// index too.
    pub(super) fn read(&self, group: usize, block: usize, token: u64) -> Option<(Value, u64)> {
        let running = self.running.as_ref()?;
        let replica = &running.replicas[group];
        let serves = replica.is_exact() && replica.applied >= token;
        serves.then(|| (running.store.read(group, block), replica.applied))
    }
}

impl Running {
    pub(super) fn replica(&self, group: usize) -> &Replica {
        &self.replicas[group]
    }

    pub(super) fn ring_used_bytes(&self) -> u64 {
        self.wal.stats().used_bytes
    }

    /// Requests a checkpoint.
    pub(super) fn want_checkpoint(&mut self) {
        self.checkpoint.wanted = true;
    }

    /// Whether an install waits for the checkpoint that completes it.
    pub(super) fn has_install(&self) -> bool {
        self.replicas.iter().any(|replica| replica.install.is_some())
    }

    /// Whether the replica has applied, installed and written back everything.
    pub(super) fn is_caught_up(&self, group: usize) -> bool {
        self.replicas[group].is_caught_up() && self.store.is_drained(group)
    }

    /// Describes what may keep the server from making progress.
    pub(super) fn describe(&self) -> String {
        let replicas: Vec<String> = self.replicas.iter().map(Replica::describe).collect();
        let (server, stats) = (self.server, self.wal.stats());
        format!(
            "server {server}: ring {} bytes, window {} bytes, groups {}",
            stats.used_bytes,
            stats.window_used_bytes,
            replicas.join(", ")
        )
    }

    /// Proposes an operation, unless backpressure or raft refuses it.
    pub(super) fn propose(&mut self, group: usize, op: Op) -> bool {
        let stats = self.wal.stats();
        let replica = &mut self.replicas[group];
        if stats.used_bytes > RING_BYTES / 2
            || stats.window_used_bytes > PROPOSAL_WINDOW_BYTES
            || replica.last_index() - replica.applied > UNAPPLIED_ENTRIES
        {
            return false;
        }
        replica.raft.propose(vec![], op.encode()).is_ok()
    }

    /// Takes a message from another replica. Messages that raft refuses are dropped, and so is what
    /// arrives during an install.
    pub(super) fn step(&mut self, group: usize, message: Message) {
        let replica = &mut self.replicas[group];
        if !replica.is_installing() {
            drop(replica.raft.step(message));
        }
    }

    pub(super) fn tick(&mut self, environment: &mut Environment) {
        for replica in &mut self.replicas {
            replica.tick();
        }
        self.record_commits(environment);
    }

    /// Records commit indices that are applied and not durable. Without that they would wait for
    /// the next entry.
    fn record_commits(&mut self, environment: &mut Environment) {
        for group in 0..GROUPS {
            let replica = &self.replicas[group];
            let is_recorded = replica.applied <= self.store.durable_commit(group)
                || self.outstanding.iter().any(|it| it.group == group && it.commit.is_some());
            if replica.install.is_some() || is_recorded {
                continue;
            }
            let hard_state = replica.log().hard_state.clone();
            let commit = Some(hard_state.commit);
            let record = Record::Entries { group, hard_state, entries: vec![] };
            if let Ok(append) = self.wal.append(&[&record.encode()]) {
                let end = append.end();
                let messages = vec![];
                self.outstanding.push_back(Outstanding {
                    end,
                    group,
                    ready: None,
                    messages,
                    commit,
                });
                environment.outcome.commit_records += 1;
            }
        }
    }

    /// Appends a record that cannot wait: a `Ready` cannot be given back to raft. While the window
    /// is full, the disk continues.
    fn append(&self, record: &Record) -> Append {
        let payload = record.encode();
        loop {
            match self.wal.append(&[&payload]) {
                Ok(append) => return append,
                Err(AppendError::WindowFull { .. }) => {
                    assert!(self.log_disk.step(), "the window is full and nothing is in flight");
                }
                Err(error) => panic!("server {}: {error}", self.server),
            }
        }
    }

    /// Lets the disk continue until a record is durable.
    fn wait_durable(&self, end: LogOffset) {
        while self.wal.durable() < end {
            assert!(self.log_disk.step(), "a record is not durable and nothing is in flight");
        }
    }
}
