//! A server: its disks, and the shard of `alluvium-volume` while its process runs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use alluvium_device::sim::{Faults, Mode, SimDisk, SimOptions};
use alluvium_volume::shard::{Input, Notice, Opening, Output, Recovered, Shard, ShardOptions};
use alluvium_volume::store::{Owner, Store};
use alluvium_volume::{GroupId, GroupView, PeerId, PullFrame, ServerId};
use alluvium_wal::{FormatOptions, Options, Wal};
use uuid::Uuid;

use super::environment::Environment;
use super::network::{ClientMessage, Envelope, Stream};
use super::{GROUPS, Outcome, RING_BYTES, group_id, peer_id, server_id, view};

/// Greatest length of a record with several entries. Few ops, so that many readies are split.
pub(super) const RECORD_BYTES: usize = 8 << 10;

const CLUSTER: &str = "simulation";

/// How a server ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    PowerCut,
    Kill,
}

/// A server with its disks, running or not.
pub(super) struct Server {
    index: usize,
    seed: u64,
    log_disk: SimDisk,
    store_disk: SimDisk,
    store_id: Uuid,
    entry_cache_bytes: usize,
    /// The replicas that the registry records as created.
    created: BTreeSet<GroupId>,
    running: Option<Running>,
    /// The process gets no turns (SIGSTOP).
    is_stopped: bool,
    /// A device fails its writes or flushes.
    has_fault: bool,
    clock: u64,
    /// Counters of the processes that have ended.
    outcome: Outcome,
}

/// A process of a server.
struct Running {
    shard: Shard,
    inbox: VecDeque<Input>,
}

/// A device of a server.
#[derive(Clone, Copy)]
pub(super) enum Device {
    Log,
    Store,
}

impl Server {
    /// A server with empty disks, whose entries take at most `entry_cache_bytes` of memory.
    pub(super) fn new(index: usize, seed: u64, store_bytes: u64, entry_cache_bytes: usize) -> Self {
        let disk = |number: u64, capacity_bytes| {
            let seed = seed.wrapping_mul(31).wrapping_add(2 * index as u64 + number);
            SimDisk::new(SimOptions { capacity_bytes, seed, ..SimOptions::default() })
        };
        let log_disk = disk(2, RING_BYTES + (64 << 10));
        let store_disk = disk(3, store_bytes);
        let options = FormatOptions { window_bytes: Some(120 << 10), ..FormatOptions::default() };
        let header = Wal::format(&log_disk.device(), &options).expect("an empty disk is formatted");
        let store_id = Uuid::from_u128(index as u128 + 1);
        let owner = Owner {
            wal_id: header.wal_id,
            store_id,
            server: server_id(index),
            cluster: CLUSTER.to_owned(),
        };
        Store::format(&store_disk.device(), owner, Some(store_bytes), 0)
            .expect("an empty disk is formatted");
        Self {
            index,
            seed,
            log_disk,
            store_disk,
            store_id,
            entry_cache_bytes,
            created: BTreeSet::new(),
            running: None,
            is_stopped: false,
            has_fault: false,
            clock: 0,
            outcome: Outcome::default(),
        }
    }

    pub(super) fn open(&mut self, environment: &mut Environment) {
        assert!(self.running.is_none(), "the server is running");
        environment.trace.event("open", &[("server", self.index as u64)]);
        let log_options = Options {
            window_bytes: 120 << 10,
            block_bytes: 32 << 10,
            max_record_bytes: 52 << 10,
            io_depth: 4,
            ..Options::default()
        };
        let options = ShardOptions {
            entry_cache_bytes: self.entry_cache_bytes,
            overlay_bytes: 256 << 10,
            record_bytes: RECORD_BYTES,
            store_queue_depth: 4,
            reserved_slots: 5,
            progress_ms: 3_000,
            seed: self.seed,
            broken: environment.mutation.broken(),
            ..ShardOptions::new(server_id(self.index))
        };
        let replicas: BTreeMap<GroupId, (PeerId, GroupView, bool)> = (0..GROUPS)
            .map(|group| {
                let id = group_id(group);
                let is_created = self.created.contains(&id);
                (id, (peer_id(group, self.index), view(group), is_created))
            })
            .collect();
        let opening = Opening {
            log: self.log_disk.device(),
            log_options,
            store: self.store_disk.device(),
            store_id: self.store_id,
            cluster: CLUSTER.to_owned(),
            replicas,
            options,
            now: self.clock,
            unix_ms: 0,
            wake: Arc::new(|| {}),
        };
        let mut wait = || panic!("the disk completes requests at once during an opening");
        let Recovered { shard, notices, report, applied } =
            Shard::open(opening, &mut wait, &mut |_, _, _| {})
                .unwrap_or_else(|error| panic!("server {} does not open: {error}", self.index));
        assert!(report.damage.is_empty(), "damage in the log: {:?}", report.damage);
        for entry in applied {
            environment.oracle.applied(entry);
        }
        self.log_disk.set_mode(Mode::Queued);
        self.store_disk.set_mode(Mode::Queued);
        self.running = Some(Running { shard, inbox: VecDeque::new() });
        for notice in notices {
            self.notice(notice);
        }
    }

    /// The registry records what the server reports.
    fn notice(&mut self, notice: Notice) {
        match notice {
            Notice::Created { group, .. } => {
                self.created.insert(group);
                self.input(Input::Activate { group });
            }
            other => panic!("server {}: {other:?}", self.index),
        }
    }

    /// Ends the process, if it runs.
    pub(super) fn end(&mut self, end: End, environment: &mut Environment) {
        let name = if end == End::PowerCut { "power cut" } else { "kill" };
        environment.trace.event(name, &[("server", self.index as u64)]);
        // The disks end first: the process is not there to see its requests fail.
        let after = |disk: &SimDisk| match end {
            End::PowerCut => disk.power_cut(),
            End::Kill => disk.process_crash(),
        };
        self.log_disk = after(&self.log_disk);
        self.store_disk = after(&self.store_disk);
        self.repair();
        (self.has_fault, self.is_stopped) = (false, false);
        if let Some(running) = self.running.take() {
            self.outcome.add_counters(running.shard.counters());
        }
        let index = self.index;
        environment.network.streams.retain(|stream| stream.target != index);
    }

    /// From now on a device of a running server fails its writes, or its flushes.
    pub(super) fn fail_device(&mut self, device: Device, fails_flushes: bool) {
        let faults = match fails_flushes {
            true => Faults { flush_error: 1.0, ..Faults::default() },
            false => Faults { write_error: 1.0, ..Faults::default() },
        };
        if self.running.is_none() {
            return;
        }
        match device {
            Device::Log => self.log_disk.set_faults(faults),
            Device::Store => self.store_disk.set_faults(faults),
        }
        self.has_fault = true;
    }

    /// The devices do not fail any more. A process whose request has failed still ends.
    pub(super) fn repair(&mut self) {
        self.log_disk.set_faults(Faults::default());
        self.store_disk.set_faults(Faults::default());
    }

    /// Stops the process, which gets no turns until it continues.
    pub(super) fn set_stopped(&mut self, is_stopped: bool) {
        self.is_stopped = is_stopped;
    }

    pub(super) fn outcome(&self) -> Outcome {
        let mut outcome = self.outcome;
        if let Some(running) = &self.running {
            outcome.add_counters(running.shard.counters());
        }
        outcome
    }

    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    pub(super) fn shard(&self) -> Option<&Shard> {
        self.running.as_ref().map(|running| &running.shard)
    }

    /// Whether the server is running and its replica considers itself the leader.
    pub(super) fn leads(&self, group: usize) -> bool {
        let status = self.shard().and_then(|shard| shard.replica_status(group_id(group)));
        status.is_some_and(|status| status.role == alluvium_volume::Role::Leader)
    }

    pub(super) fn applied(&self, group: usize) -> Option<u64> {
        let status = self.shard()?.replica_status(group_id(group))?;
        Some(status.applied.0)
    }

    pub(super) fn ring_used_bytes(&self) -> u64 {
        self.shard().map_or(0, |shard| shard.wal().stats().used_bytes)
    }

    pub(super) fn input(&mut self, input: Input) {
        if let Some(running) = &mut self.running {
            running.inbox.push_back(input);
        }
    }

    pub(super) fn advance_clock(&mut self, ms: u64) {
        self.clock += ms;
    }

    /// Completes one request of the log's disk.
    pub(super) fn step_log(&self) -> bool {
        self.log_disk.step()
    }

    /// Completes one request of the store's disk.
    pub(super) fn step_store(&self) -> bool {
        self.store_disk.step()
    }

    /// Does everything that can be done now. A process whose device has failed ends.
    pub(super) fn turn(&mut self, environment: &mut Environment) {
        let Some(running) = self.running.as_mut().filter(|_| !self.is_stopped) else { return };
        let mut out = Output::default();
        if let Err(error) = running.shard.turn(self.clock, &mut running.inbox, &mut out) {
            assert!(self.has_fault, "server {}: {error}", self.index);
            environment.outcome.failed_devices += 1;
            // The power is often cut before somebody starts the server again.
            let end = if environment.random.chance(0.5) { End::PowerCut } else { End::Kill };
            self.end(end, environment);
            return;
        }
        for entry in out.applied {
            environment.oracle.applied(entry);
        }
        let network = &mut environment.network;
        for (to, message) in out.messages {
            let to = to.0 as usize - 1;
            network.peers.push(Envelope { from: self.index, to, message });
        }
        for (ticket, answer) in out.answers {
            network.clients.push(ClientMessage::Answer { ticket, answer });
        }
        for (attempt, source, request) in out.pulls {
            let id = network.stream_id();
            let group = request.group;
            network.streams.push(Stream {
                id,
                source: source.0 as usize - 1,
                target: self.index,
                attempt,
                group,
                request: Some(Input::Pull { stream: id, request }),
                frames: VecDeque::new(),
            });
        }
        for (stream, frame) in out.frames {
            let found = network.streams.iter_mut().find(|it| it.id == stream);
            if let Some(stream) = found.filter(|stream| stream.source == self.index) {
                stream.frames.push_back(frame);
            }
        }
        for attempt in out.cancelled {
            let index = self.index;
            network.streams.retain(|it| (it.target, it.attempt) != (index, attempt));
        }
        for notice in out.notices {
            self.notice(notice);
        }
    }

    /// Describes what may keep the server from making progress.
    pub(super) fn describe(&self) -> String {
        let Some(shard) = self.shard() else { return format!("server {}: down", self.index) };
        let stats = shard.wal().stats();
        let statuses: Vec<String> =
            (0..GROUPS).map(|group| shard.describe(group_id(group))).collect();
        format!(
            "server {}: ring {} bytes, window {} bytes, {}",
            self.index,
            stats.used_bytes,
            stats.window_used_bytes,
            statuses.join(", ")
        )
    }
}

/// What the target of a stream that breaks gets.
pub(super) fn broken_stream(stream: &Stream) -> Input {
    Input::PullFrame { attempt: stream.attempt, group: stream.group, frame: PullFrame::Failed }
}

/// The connection to a server has ended.
pub(super) fn peer_down(server: usize, is_refused: bool) -> Input {
    let server: ServerId = server_id(server);
    Input::PeerDown { server, is_refused }
}
