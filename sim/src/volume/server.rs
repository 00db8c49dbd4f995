//! A server: its disks, and the shard of `alluvium-volume` while its process runs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use alluvium_device::sim::{Faults, Mode, SimDisk, SimOptions};
use alluvium_volume::shard::{Input, Notice, Opening, Output, Recovered, Shard, ShardOptions};
use alluvium_volume::store::{META_START, Owner, SECTOR_BYTES, Store};
use alluvium_volume::{BLOCK_BYTES, GroupId, GroupView, PeerId, PullFrame, ServerId};
use alluvium_wal::{Damage, FormatOptions, LogOffset, Options, Wal};
use uuid::Uuid;

use super::environment::Environment;
use super::network::{ClientMessage, Envelope, Stream};
use super::{GROUPS, Outcome, RING_BYTES, group_id, peer_id, server_id, view};

/// Greatest length of a record with several entries. Few ops, so that many readies are split.
pub(super) const RECORD_BYTES: usize = 8 << 10;

/// Bytes in front of the ring of a log.
const LOG_HEADER_BYTES: u64 = 64 << 10;

/// At least as many sectors as a store has.
const SECTORS: u64 = 48;

const CLUSTER: &str = "simulation";

/// How a server ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    PowerCut,
    Kill,
}

/// Sizes that depend on the schedule.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    /// Of the store's device.
    pub(super) store_bytes: u64,
    /// Of the memory for entries.
    pub(super) entry_cache_bytes: usize,
    /// Requests of write-back in flight.
    pub(super) store_queue_depth: usize,
}

/// A server with its disks, running or not.
pub(super) struct Server {
    index: usize,
    seed: u64,
    log_disk: SimDisk,
    store_disk: SimDisk,
    store_id: Uuid,
    sizes: Sizes,
    /// The replicas that the registry records as created.
    created: BTreeSet<GroupId>,
    /// The replicas that the registry records as lost.
    lost: BTreeSet<GroupId>,
    /// The disks were damaged: damage and lost replicas are expected.
    is_damaged: bool,
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
    /// A server with empty disks.
    pub(super) fn new(index: usize, seed: u64, sizes: Sizes) -> Self {
        let (log_disk, store_disk) = disks(index, seed, sizes.store_bytes);
        let mut server = Self {
            index,
            seed,
            sizes,
            log_disk,
            store_disk,
            store_id: Uuid::nil(),
            created: BTreeSet::new(),
            lost: BTreeSet::new(),
            is_damaged: false,
            running: None,
            is_stopped: false,
            has_fault: false,
            clock: 0,
            outcome: Outcome::default(),
        };
        server.format(1);
        server
    }

    /// Formats the disks, as those of the `generation`-th store of the server.
    fn format(&mut self, generation: u128) {
        let options = FormatOptions { window_bytes: Some(120 << 10), ..FormatOptions::default() };
        let log = self.log_disk.device();
        let header = Wal::format(&log, &options).expect("an empty disk is formatted");
        self.store_id = Uuid::from_u128(100 * generation + self.index as u128);
        let owner = Owner {
            wal_id: header.wal_id,
            store_id: self.store_id,
            server: server_id(self.index),
            cluster: CLUSTER.to_owned(),
        };
        Store::format(&self.store_disk.device(), owner, Some(self.sizes.store_bytes), 0)
            .expect("an empty disk is formatted");
    }

    /// Replaces both disks of a server that does not run by empty ones.
    pub(super) fn replace_disks(&mut self, environment: &mut Environment) {
        environment.outcome.replaced_disks += 1;
        environment.trace.event("replace disks", &[("server", self.index as u64)]);
        let generation = environment.random.next_u64();
        let seed = self.seed.wrapping_add(generation);
        (self.log_disk, self.store_disk) = disks(self.index, seed, self.sizes.store_bytes);
        self.format(generation.into());
        self.is_damaged = true;
    }

    /// Damages a record of the log of a server that does not run, if the log can prove that it was
    /// durable. Other damage looks like a write that a crash has torn.
    pub(super) fn rot_record(&mut self, environment: &mut Environment) {
        let device = self.log_disk.device();
        let mut records = Vec::new();
        let mut visit = |record: alluvium_wal::Record| {
            records.push(record.offset);
            Ok(())
        };
        Wal::scan(&device, None, &mut visit).expect("the log is readable");
        if records.is_empty() {
            return;
        }
        // Mostly after the last checkpoint, which states what came before it.
        let behind = environment.random.index(records.len().min(12));
        let offset = records[records.len() - 1 - behind].0;
        let at = LOG_HEADER_BYTES + offset % RING_BYTES;
        let before = self.log_disk.peek(at, 8);
        self.log_disk.rot(at..at + 8, 1);
        let found = Wal::scan(&device, None, &mut |_| Ok(())).expect("the log is readable");
        // The log may have earlier damage.
        let is_record = |damage: &Damage| damage.range.contains(&LogOffset(offset));
        if !found.damage.iter().any(is_record) {
            self.log_disk.poke(at, &before);
            return;
        }
        environment.outcome.rotten_records += 1;
        environment.trace.event("rot record", &[("server", self.index as u64), ("at", offset)]);
        self.is_damaged = true;
    }

    /// Damages a sector of the store of a server that does not run.
    pub(super) fn rot_sector(&mut self, environment: &mut Environment) {
        let sectors = (0..SECTORS).map(|sector| META_START.0 + SECTOR_BYTES as u64 * sector);
        let is_used =
            |at: &u64| self.store_disk.peek(*at, SECTOR_BYTES).iter().any(|byte| *byte != 0);
        let used: Vec<u64> = sectors.filter(is_used).collect();
        if used.is_empty() {
            return;
        }
        let sector = used[environment.random.index(used.len())];
        environment.outcome.rotten_sectors += 1;
        environment.trace.event("rot sector", &[("server", self.index as u64), ("at", sector)]);
        self.store_disk.rot(sector..sector + SECTOR_BYTES as u64, 1);
        self.is_damaged = true;
    }

    /// Whether the replica of a group has forgotten what it acknowledged.
    pub(super) fn has_lost(&self, group: usize) -> bool {
        self.lost.contains(&group_id(group))
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
            entry_cache_bytes: self.sizes.entry_cache_bytes,
            overlay_bytes: 256 << 10,
            record_bytes: RECORD_BYTES,
            store_queue_depth: self.sizes.store_queue_depth,
            reserved_slots: 2,
            pull_blocks: 2,
            round_bytes: 3 * BLOCK_BYTES as u64,
            round_ms: 0,
            progress_ms: 3_000,
            broken: environment.mutation.broken(),
            ..ShardOptions::new(server_id(self.index))
        };
        let replicas: BTreeMap<GroupId, (PeerId, GroupView, bool)> = (0..GROUPS)
            .filter(|group| !self.has_lost(*group))
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
        let opened = Shard::open(opening, &mut wait, &mut |_| Arc::new(|_, _| {}));
        let Recovered { shard, notices, report, applied } = match opened {
            Ok(recovered) => recovered,
            Err(_) if self.is_damaged => {
                // The operator gives the disks up.
                self.replace_disks(environment);
                return self.open(environment);
            }
            Err(error) => panic!("server {} does not open: {error}", self.index),
        };
        assert!(self.is_damaged || report.damage.is_empty(), "damage: {:?}", report.damage);
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
            Notice::Created { group, peer, .. } => {
                self.created.insert(group);
                self.input(Input::Activate { group, peer });
            }
            Notice::Lost { group, .. } if self.is_damaged => drop(self.lost.insert(group)),
            Notice::UnknownGroup { group } if self.lost.contains(&group) => {}
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

    /// Whether a replica has applied an entry that no durable record of the log calls committed.
    pub(super) fn has_unstated_commit(&self) -> bool {
        let Some(shard) = self.shard() else { return false };
        let status = (0..GROUPS).filter_map(|group| shard.replica_status(group_id(group)));
        status.into_iter().any(|status| status.applied > status.durable_commit)
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
            // The power is often cut before the server starts again.
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
        let statuses: Vec<String> =
            (0..GROUPS).map(|group| shard.describe(group_id(group))).collect();
        format!("server {}: {}, {}", self.index, shard.describe_server(), statuses.join(", "))
    }
}

/// The disks of a log and of a store.
fn disks(index: usize, seed: u64, store_bytes: u64) -> (SimDisk, SimDisk) {
    let disk = |number: u64, capacity_bytes| {
        let seed = seed.wrapping_mul(31).wrapping_add(2 * index as u64 + number);
        SimDisk::new(SimOptions { capacity_bytes, seed, ..SimOptions::default() })
    };
    (disk(2, RING_BYTES + LOG_HEADER_BYTES), disk(3, store_bytes))
}

/// What the target of a stream that breaks gets.
pub(super) fn broken_stream(stream: &Stream) -> Input {
    Input::PullFrame { attempt: stream.attempt, group: stream.group, frame: PullFrame::Failed }
}

/// The connection to a server has ended.
pub(super) fn peer_down(server: usize, is_gone: bool) -> Input {
    let server: ServerId = server_id(server);
    Input::PeerDown { server, is_gone }
}
