//! A server with a small log over a store on a simulated disk.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use alluvium_device::sim::{Faults, Mode, SimDisk, SimOptions};
use alluvium_wal::LogOffset;
use uuid::Uuid;

use super::log::{Covered, Install, Record, Replica};
use super::steps::*;
use crate::op::{BLOCK_BYTES, BlockRange, CHUNK_BLOCKS};
use crate::request::BlockState;
use crate::rules::Broken;
use crate::store::*;
use crate::types::{CheckpointNumber, ChunkIndex, GroupId, Index, PeerId, ServerId, VolumeId};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Landing,
    Sectors,
    Flush,
    Record(usize),
    SecondCopy,
}

/// The checkpoint in progress.
#[derive(Clone, Debug)]
pub(super) struct Running {
    stage: Stage,
    /// What the replicas were at the swap: base, applied, volumes, whether it completes an install.
    swap: BTreeMap<PeerId, (u64, u64, BTreeSet<VolumeId>, bool)>,
}

// -- The server

pub(super) struct Server {
    disk: SimDisk,
    store: Option<Store>,
    options: StoreOptions,
    owner: Owner,
    log: Vec<Record>,
    durable: usize,
    /// The committed ops of the group of each replica, as the cluster has them.
    committed: BTreeMap<PeerId, Vec<ModelOp>>,
    replicas: BTreeMap<GroupId, Replica>,
    running: Option<Running>,
    reads: BTreeMap<ReadId, (GroupId, PeerId, BlockRange, u32, u64)>,
    next_id: u64,
    next_peer: u64,
}

pub(super) type Check = Result<(), String>;

impl Server {
    pub(super) fn new(seed: u64, broken: Broken) -> Self {
        let disk = SimDisk::new(SimOptions {
            capacity_bytes: DEVICE_BYTES[seed as usize % 2],
            seed,
            ..SimOptions::default()
        });
        let owner = Owner {
            wal_id: Uuid::from_u128(2),
            store_id: Uuid::from_u128(1),
            server: ServerId(1),
            cluster: "model".into(),
        };
        Store::format(&disk.device(), owner.clone(), Some(MAX_BYTES), 0).unwrap();
        let options = StoreOptions { queue_depth: 3, durable_writes: seed % 8 < 2, broken };
        let mut server = Self {
            disk,
            store: None,
            options,
            owner,
            log: Vec::new(),
            durable: 0,
            committed: BTreeMap::new(),
            replicas: BTreeMap::new(),
            running: None,
            reads: BTreeMap::new(),
            next_id: 0,
            next_peer: 0,
        };
        for group in 1..=GROUPS {
            server.create(GroupId(group));
        }
        server.durable = server.log.len();
        server.open().unwrap();
        server
    }

    fn store(&mut self) -> &mut Store {
        self.store.as_mut().expect("the server runs")
    }

    fn ops(&self, group: GroupId) -> &[ModelOp] {
        &self.committed[&self.replicas[&group].peer]
    }

    fn create(&mut self, group: GroupId) {
        self.next_peer += 1;
        let peer = PeerId(self.next_peer);
        self.log.push(Record::Created(group, peer));
        self.committed.insert(peer, Vec::new());
        self.replicas.insert(group, Replica { peer, is_replayed: true, ..Replica::default() });
    }

    fn open(&mut self) -> Check {
        // The walk of the log.
        let checkpoints = self.log.iter().enumerate();
        let checkpoints = checkpoints.filter_map(|(at, record)| match record {
            Record::Checkpoint(covered) => Some((at, covered.clone())),
            _ => None,
        });
        let checkpoints: Vec<_> = checkpoints.collect();
        let last = checkpoints.last().cloned();
        let mut replicas: BTreeMap<GroupId, Replica> = BTreeMap::new();
        for (at, record) in self.log.iter().enumerate() {
            match record {
                Record::Created(group, peer) => {
                    replicas.insert(*group, Replica { peer: *peer, ..Replica::default() });
                }
                Record::Removed(group) => drop(replicas.remove(group)),
                Record::Entry(group, index, op) => {
                    let replica = replicas.get_mut(group).unwrap();
                    replica.entries.split_off(index);
                    replica.entries.insert(*index, (*op, at));
                }
                Record::Commit(group, _, commit) => {
                    let replica = replicas.get_mut(group).unwrap();
                    replica.commit = replica.commit.max(*commit);
                }
                Record::Install(group, barrier) => {
                    let replica = replicas.get_mut(group).unwrap();
                    replica.barrier = replica.barrier.max(*barrier);
                }
                Record::Checkpoint(covered) => {
                    for (group, covered) in covered {
                        let replica = replicas.get_mut(group).unwrap();
                        assert_eq!(replica.peer, covered.peer);
                        replica.base = covered.base;
                        replica.barrier = covered.barrier;
                        replica.commit = replica.commit.max(covered.commit);
                        replica.entries = match covered.completes {
                            true => BTreeMap::new(),
                            false => replica.entries.split_off(&(covered.base + 1)),
                        };
                    }
                }
            }
        }
        let covered = last.as_ref().map(|(_, covered)| covered.clone()).unwrap_or_default();
        let after = &self.log[last.as_ref().map_or(0, |(at, _)| *at)..];
        let is_created = after.iter().any(|record| matches!(record, Record::Created(..)));
        let expected = Expected {
            owner: self.owner.clone(),
            checkpoint: CheckpointNumber(checkpoints.len() as u64),
            log_end: LogOffset(self.log.len() as u64),
            has_no_replica: covered.is_empty() && !is_created,
            replicas: covered
                .iter()
                .map(|(group, covered)| {
                    let (base, barrier) = (Index(covered.base), Index(covered.barrier));
                    let volumes = covered.volumes.clone();
                    ((*group, covered.peer), KnownReplica { base, barrier, volumes })
                })
                .collect(),
        };
        let wake = Arc::new(|| {});
        let device = self.disk.device();
        let store = Store::open(device, &expected, self.options, 0, wake, &mut |_, _| {});
        let mut store = store.map_err(|error| format!("not opened: {error}"))?;
        self.disk.set_mode(Mode::Queued);
        for (group, replica) in &mut replicas {
            replica.applied = replica.base;
            replica.durable_commit = replica.commit;
            replica.found = replica.commit;
            assert!(replica.commit <= replica.last(), "{replica:?}");
            store.add_replica(*group, replica.peer);
        }
        self.store = Some(store);
        self.replicas = replicas;
        self.durable = self.log.len();
        self.running = None;
        self.reads.clear();
        for group in 1..=GROUPS {
            let group = GroupId(group);
            if self.replicas.contains_key(&group) {
                self.after_apply(group)?;
            } else {
                // Its creation was lost.
                self.create(group);
                let peer = self.replicas[&group].peer;
                self.store().add_replica(group, peer);
            }
        }
        Ok(())
    }

    /// Ends the server, with a part of what was appended to the log and is not durable.
    fn crash(&mut self, is_power_cut: bool, keeps: u8) -> Check {
        let appended = self.log.len() - self.durable;
        let kept = self.durable + usize::from(keeps) % (appended + 1);
        self.log.truncate(kept);
        self.store = None;
        let next = if is_power_cut { self.disk.power_cut() } else { self.disk.process_crash() };
        self.disk = next;
        self.disk.set_faults(Faults::default());
        self.open()
    }

    pub(super) fn step(&mut self, step: Step) -> Check {
        match step {
            Step::Propose(group, op) => self.propose(GroupId(group), op),
            Step::Sync => self.sync(),
            Step::Commit(group) => self.commit(GroupId(group)),
            Step::Apply(group, count) => self.apply(GroupId(group), count.into())?,
            Step::WriteBack => self.write_back(),
            Step::Device(count) => self.device(count.into())?,
            Step::Turn(group, count) => {
                self.sync();
                self.commit(GroupId(group));
                self.sync();
                self.device(usize::from(count))?;
                self.write_back();
                self.apply(GroupId(group), usize::MAX)?;
                self.write_back();
            }
            Step::Hurry(group, op, count) => {
                self.propose(GroupId(group), op);
                self.sync();
                self.commit(GroupId(group));
                self.apply(GroupId(group), usize::MAX)?;
                self.write_back();
                self.device(usize::from(count))?;
            }
            Step::Checkpoint(count) => {
                for _ in 0..count {
                    self.checkpoint(true)?;
                }
            }
            Step::Complete => self.complete()?,
            Step::Read(group) => self.read(GroupId(group)),
            Step::Replace(group, op) => self.replace(GroupId(group), op),
            Step::Recreate(group) => self.recreate(GroupId(group)),
            Step::HandOver(group) => {
                self.recreate(GroupId(group));
                self.apply(GroupId(GROUPS + 1 - group), usize::MAX)?;
                self.write_back();
                self.device(2)?;
            }
            Step::Elsewhere(group, op) => self.elsewhere(GroupId(group), op),
            Step::CatchUp(group, count) => self.catch_up(GroupId(group), count.into()),
            Step::Install(group, behind) => self.install(GroupId(group), behind.into()),
            Step::FailFlush => {
                self.disk.set_faults(Faults { flush_error: 1.0, ..Faults::default() });
            }
            Step::Crash { is_power_cut, keeps } => self.crash(is_power_cut, keeps)?,
        }
        self.store().check();
        Ok(())
    }

    fn numbered(&mut self, op: ModelOp) -> ModelOp {
        self.next_id += 1;
        ModelOp { id: self.next_id, ..op }
    }

    fn append(&mut self, group: GroupId, index: u64, op: ModelOp) {
        let at = self.log.len();
        self.log.push(Record::Entry(group, index, op));
        let replica = self.replicas.get_mut(&group).unwrap();
        replica.entries.split_off(&index);
        replica.entries.insert(index, (op, at));
    }

    /// The number of entries that are those of the cluster, or could become so.
    fn agreed(&self, group: GroupId) -> u64 {
        let (replica, committed) = (&self.replicas[&group], self.ops(group));
        let differs = |index: u64, op: &ModelOp| {
            committed.get(index as usize - 1).is_some_and(|other| other != op)
        };
        let first = replica.entries.iter().find(|(index, (op, _))| differs(**index, op));
        first.map_or(replica.last(), |(index, _)| index - 1)
    }

    fn propose(&mut self, group: GroupId, op: ModelOp) {
        let last = self.replicas[&group].last();
        let leads = last >= self.ops(group).len() as u64 && self.agreed(group) == last;
        if leads && self.replicas[&group].install.is_none() {
            let op = self.numbered(op);
            self.append(group, last + 1, op);
        }
    }

    fn replace(&mut self, group: GroupId, op: ModelOp) {
        let committed = self.ops(group).len() as u64;
        let replica = &self.replicas[&group];
        if replica.last() > committed && replica.install.is_none() && committed >= replica.base {
            let op = self.numbered(op);
            self.append(group, committed + 1, op);
        }
    }

    fn sync(&mut self) {
        for record in &self.log[self.durable..] {
            if let Record::Commit(group, peer, commit) = record
                && let Some(replica) = self.replicas.get_mut(group)
                && replica.peer == *peer
            {
                replica.durable_commit = replica.durable_commit.max(*commit);
            }
        }
        self.durable = self.log.len();
    }

    fn commit(&mut self, group: GroupId) {
        let agreed = self.agreed(group);
        let durable = self.durable;
        let replica = self.replicas.get_mut(&group).unwrap();
        let entries = replica.entries.range(..=agreed);
        let is_durable = |(_, (_, at)): &(&u64, &(ModelOp, usize))| *at < durable;
        let last = entries.take_while(is_durable).last().map_or(0, |(index, _)| *index);
        if last > replica.commit && replica.install.is_none() {
            replica.commit = last;
            let committed = self.committed.get_mut(&replica.peer).unwrap();
            let known = committed.len() as u64;
            let ops = replica.entries.iter().filter(|(index, _)| **index > known);
            let ops = ops.take_while(|(index, _)| **index <= last);
            committed.extend(ops.map(|(_, (op, _))| *op));
            self.log.push(Record::Commit(group, replica.peer, last));
        }
    }

    pub(super) fn apply(&mut self, group: GroupId, count: usize) -> Check {
        for _ in 0..count {
            let replica = &self.replicas[&group];
            let next = replica.applied + 1;
            if next > replica.commit || replica.install.is_some() {
                break;
            }
            let (op, at) = replica.entries[&next];
            assert!(at < self.durable, "a commit follows its entries");
            let volume = VolumeId(op.volume);
            let missing = match op.kind {
                Kind::Discard => 0,
                _ => self.store().missing_slots(group, volume, LAYER, op.range()),
            };
            let is_full = missing > self.store().free_slots();
            let applied =
                self.store().apply(group, volume, LAYER, op.range(), op.content(), Index(next));
            if self.options.broken == Broken::default() {
                assert_eq!(applied.is_err(), is_full);
            }
            if applied.is_err() {
                break;
            }
            self.replicas.get_mut(&group).unwrap().applied = next;
            self.after_apply(group)?;
        }
        Ok(())
    }

    /// The replay may have reached the commit index, or the barrier.
    fn after_apply(&mut self, group: GroupId) -> Check {
        let replica = self.replicas[&group].clone();
        if replica.applied < replica.found {
            return Ok(());
        }
        let is_past_barrier = replica.applied >= replica.barrier;
        let was_exact = replica.is_exact();
        let knows = volumes_after(self.ops(group), replica.applied);
        self.store().replayed(group, &|volume| knows.contains(&volume), is_past_barrier);
        self.replicas.get_mut(&group).unwrap().is_replayed = true;
        if was_exact || !self.replicas[&group].is_exact() { Ok(()) } else { self.check(group) }
    }

    fn write_back(&mut self) {
        let durable: BTreeMap<GroupId, Index> = self
            .replicas
            .iter()
            .map(|(group, replica)| (*group, Index(replica.durable_commit)))
            .collect();
        self.store().write_back(&|group| durable[&group]);
    }

    fn device(&mut self, count: usize) -> Check {
        for _ in 0..count {
            if !self.disk.step() {
                break;
            }
            self.take()?;
        }
        Ok(())
    }

    fn take(&mut self) -> Check {
        if self.store().take_completions().is_err() {
            // The server ends, and the machine with it.
            return self.crash(true, 0);
        }
        let mut done = Vec::new();
        self.store().take_reads(&mut done);
        done.into_iter().try_for_each(|(id, result)| self.check_read(id, result))
    }

    // -- Checkpoints

    /// Takes one step of the checkpoint in progress, or begins one. Returns whether it did.
    fn checkpoint(&mut self, begins: bool) -> Result<bool, String> {
        let offset = LogOffset(self.durable as u64);
        let Some(running) = self.running.clone() else {
            if begins {
                self.swap();
            }
            return Ok(begins);
        };
        let store = self.store.as_mut().expect("the server runs");
        if !store.checkpoint_is_idle() {
            return Ok(false);
        }
        let stage = match running.stage {
            Stage::Landing if store.has_awaited() => return Ok(false),
            Stage::Landing => {
                store.write_sectors(offset, 0);
                Stage::Sectors
            }
            Stage::Sectors => {
                store.flush();
                Stage::Flush
            }
            Stage::Flush => {
                self.log.push(Record::Checkpoint(self.covered(&running)));
                Stage::Record(self.log.len())
            }
            Stage::Record(end) if self.durable < end => return Ok(false),
            Stage::Record(_) => {
                store.second_copy(offset, 0);
                Stage::SecondCopy
            }
            Stage::SecondCopy => {
                store.release();
                self.running = None;
                return self.released(&running).map(|()| true);
            }
        };
        self.running = Some(Running { stage, ..running });
        Ok(true)
    }

    fn swap(&mut self) {
        let mut swap = BTreeMap::new();
        let mut bases = BTreeMap::new();
        for (group, replica) in &self.replicas {
            let is_pulled = |install: &&Install| {
                install.rest.as_ref().is_some_and(Vec::is_empty)
                    && !self.store.as_ref().unwrap().has_pulls(*group)
            };
            let completes = replica.install.as_ref().filter(is_pulled);
            let base = match completes {
                Some(install) => install.snapshot,
                None => replica.applied.min(replica.durable_commit),
            };
            let applied = replica.applied.max(base);
            let volumes = volumes_after(&self.committed[&replica.peer], base);
            swap.insert(replica.peer, (base, applied, volumes, completes.is_some()));
            bases.insert(*group, Index(base));
        }
        self.store().swap(&|group| bases[&group]);
        self.running = Some(Running { stage: Stage::Landing, swap });
    }

    fn covered(&self, running: &Running) -> BTreeMap<GroupId, Covered> {
        let covered = self.replicas.iter().map(|(group, replica)| {
            let created = (0, 0, BTreeSet::new(), false);
            let (base, applied, volumes, completes) =
                running.swap.get(&replica.peer).cloned().unwrap_or(created);
            let commit = if completes { base } else { applied.max(replica.durable_commit) };
            let (peer, barrier) = (replica.peer, replica.barrier);
            (*group, Covered { peer, base, commit, barrier, volumes, completes })
        });
        covered.collect()
    }

    fn released(&mut self, running: &Running) -> Check {
        let groups: Vec<GroupId> = self.replicas.keys().copied().collect();
        for group in groups {
            let replica = self.replicas.get_mut(&group).unwrap();
            let Some((base, _, _, completes)) = running.swap.get(&replica.peer) else { continue };
            replica.base = *base;
            replica.entries = replica.entries.split_off(&(base + 1));
            if *completes {
                replica.install = None;
                replica.entries.clear();
                (replica.applied, replica.commit, replica.durable_commit) = (*base, *base, *base);
                (replica.found, replica.is_replayed) = (0, true);
                self.after_apply(group)?;
                let replica = &self.replicas[&group];
                if replica.is_exact() {
                    self.check(group)?;
                }
            }
        }
        Ok(())
    }

    /// Runs a checkpoint to its end.
    fn complete(&mut self) -> Check {
        let mut has_begun = self.running.is_some();
        for _ in 0..2000 {
            if has_begun && self.running.is_none() {
                return Ok(());
            }
            self.sync();
            let groups: Vec<GroupId> = self.replicas.keys().copied().collect();
            groups.into_iter().for_each(|group| self.commit_applied(group));
            self.write_back();
            self.checkpoint(!has_begun)?;
            has_begun = true;
            self.device(1)?;
        }
        Err("a checkpoint does not end".into())
    }

    /// A record states the commit index of what is applied.
    fn commit_applied(&mut self, group: GroupId) {
        let replica = &self.replicas[&group];
        if replica.durable_commit < replica.applied {
            self.log.push(Record::Commit(group, replica.peer, replica.applied));
        }
    }

    // -- Replicas

    fn recreate(&mut self, group: GroupId) {
        self.log.push(Record::Removed(group));
        self.store().remove_replica(group);
        self.create(group);
        let peer = self.replicas[&group].peer;
        self.store().add_replica(group, peer);
    }

    fn elsewhere(&mut self, group: GroupId, op: ModelOp) {
        // This replica does not lead, so its tail is replaced.
        let op = self.numbered(op);
        let peer = self.replicas[&group].peer;
        self.committed.get_mut(&peer).unwrap().push(op);
    }

    fn catch_up(&mut self, group: GroupId, count: u64) {
        let replica = &self.replicas[&group];
        let agreed = self.agreed(group).min(self.ops(group).len() as u64);
        if replica.install.is_some() || agreed < replica.commit {
            return;
        }
        let ops = self.ops(group).to_vec();
        for index in (agreed + 1..).take(count as usize) {
            let Some(op) = ops.get(index as usize - 1) else { break };
            self.append(group, index, *op);
        }
    }

    /// Begins an install, or pulls the next chunk of it.
    fn install(&mut self, group: GroupId, behind: u64) {
        let replica = &self.replicas[&group];
        let source = self.ops(group).len() as u64;
        let Some(install) = replica.install.clone() else {
            // There is something to pull, and the replay is complete.
            if source > replica.commit && replica.applied == replica.commit && replica.is_replayed {
                let snapshot = source.saturating_sub(behind).max(replica.commit + 1);
                let record = self.log.len();
                self.log.push(Record::Install(group, source));
                let replica = self.replicas.get_mut(&group).unwrap();
                replica.barrier = replica.barrier.max(source);
                replica.install = Some(Install { snapshot, source, record, rest: None });
            }
            return;
        };
        let state = state_after(self.ops(group), install.source);
        let chunks: BTreeSet<(u32, u32)> =
            state.keys().map(|(volume, chunk, _)| (*volume, *chunk)).collect();
        let rest = match install.rest {
            None if install.record >= self.durable => return,
            None => {
                for (volume, chunk) in CHUNKS {
                    if !chunks.contains(&(volume, chunk)) {
                        let (volume, chunk) = (VolumeId(volume), ChunkIndex(chunk));
                        self.store().pull_retain(group, volume, LAYER, chunk, &[0; _]);
                    }
                }
                chunks.into_iter().collect()
            }
            Some(mut rest) => {
                let Some((volume, chunk)) = rest.pop() else { return };
                if !self.pull(group, &state, VolumeId(volume), ChunkIndex(chunk)) {
                    rest.push((volume, chunk));
                }
                rest
            }
        };
        let replica = self.replicas.get_mut(&group).unwrap();
        replica.install.as_mut().unwrap().rest = Some(rest);
    }

    fn pull(&mut self, group: GroupId, state: &State, volume: VolumeId, chunk: ChunkIndex) -> bool {
        let mut present = [0; CHUNK_BLOCKS as usize / 8];
        let blocks = state.range((volume.0, chunk.0, 0)..=(volume.0, chunk.0, u16::MAX));
        let blocks: Vec<(u16, Value)> = blocks.map(|(place, value)| (place.2, *value)).collect();
        for (block, _) in &blocks {
            present[usize::from(*block) / 8] |= 1 << (block % 8);
        }
        self.store().pull_retain(group, volume, LAYER, chunk, &present);
        for (block, value) in blocks {
            let content = value.map_or(Content::Zeros, |id| data(block..block + 1, id));
            let range = BlockRange { chunk, first: block, blocks: 1 };
            if self.store().pull(group, volume, LAYER, range, &content).is_err() {
                return false;
            }
        }
        true
    }

    // -- Reads

    fn read(&mut self, group: GroupId) {
        let replica = &self.replicas[&group];
        if !replica.is_exact() {
            return;
        }
        let (peer, applied) = (replica.peer, replica.applied);
        for (volume, chunk) in CHUNKS {
            self.next_id += 1;
            let id = ReadId(self.next_id);
            let range = BlockRange { chunk: ChunkIndex(chunk), first: 0, blocks: 192 };
            self.reads.insert(id, (group, peer, range, volume, applied));
            self.store().read(id, group, VolumeId(volume), LAYER, range, false);
        }
    }

    /// Reads all blocks of a replica that is exact, before any write goes on.
    fn check(&mut self, group: GroupId) -> Check {
        self.read(group);
        let is_read = |queued: &(&str, u64, usize)| queued.0 == "read";
        while let Some(next) = self.disk.queued().iter().position(is_read) {
            self.disk.step_at(next);
            self.store().take_completions().map_err(|error| error.to_string())?;
        }
        let mut done = Vec::new();
        self.store().take_reads(&mut done);
        done.into_iter().try_for_each(|(id, result)| self.check_read(id, result))
    }

    fn check_read(&mut self, id: ReadId, result: Result<BlocksRead, DamagedBlock>) -> Check {
        let Some((group, peer, range, volume, from)) = self.reads.remove(&id) else {
            return Ok(());
        };
        let replica = &self.replicas[&group];
        if replica.peer != peer || !replica.is_exact() {
            return Ok(());
        }
        let read = result.map_err(|damaged| damaged.to_string())?;
        let states: Vec<State> =
            (from..=replica.applied).map(|index| state_after(self.ops(group), index)).collect();
        let (mut data, mut crcs) = (&read.data[..], read.crcs.iter());
        for (block, found) in (range.first..).zip(&read.states) {
            let found = match found {
                BlockState::Absent => None,
                BlockState::Zeros => Some(None),
                BlockState::Data => {
                    let (block_data, rest) = data.split_at(BLOCK_BYTES);
                    data = rest;
                    assert_eq!(crcs.next(), Some(&crc32c::crc32c(block_data)));
                    let id = u64::from_le_bytes(block_data[..8].try_into().unwrap()) >> 16;
                    assert_eq!(block_data, page(block, id), "block {block}");
                    Some(Some(id))
                }
            };
            let place = (volume, range.chunk.0, block);
            let is_right = states.iter().any(|state| state.get(&place).copied() == found);
            if !is_right {
                let expected = states[0].get(&place);
                return Err(format!(
                    "{place:?} of group {group} is {found:?} and not {expected:?} at {from}"
                ));
            }
        }
        assert!(data.is_empty() && crcs.next().is_none());
        Ok(())
    }

    /// Everything lands, and nothing is left over.
    pub(super) fn end(&mut self) -> Check {
        self.disk.set_faults(Faults::default());
        // A checkpoint frees slots, with which a replica may go on.
        let (mut before, mut rounds) = (None, 0);
        loop {
            let applied: Vec<u64> = self.replicas.values().map(|replica| replica.applied).collect();
            let now = Some((self.store().free_slots(), applied));
            rounds += 1;
            if rounds > 4 && now == before {
                break;
            }
            before = now;
            for group in (1..=GROUPS).map(GroupId) {
                self.sync();
                for _ in 0..20 {
                    if self.replicas[&group].install.is_some() {
                        self.install(group, 0);
                    }
                    self.sync();
                }
                self.catch_up(group, u64::MAX >> 1);
                self.sync();
                self.commit(group);
                self.sync();
                self.apply(group, usize::MAX)?;
            }
            self.device(1000)?;
            self.complete()?;
        }
        let mut used = BTreeSet::new();
        for group in (1..=GROUPS).map(GroupId) {
            if !self.store().is_drained(group) {
                return Err(format!("group {group} does not drain"));
            }
            let replica = self.replicas[&group].clone();
            if !replica.is_exact() {
                return self.check_full(group, &replica);
            }
            let state = state_after(self.ops(group), replica.applied);
            used.extend(state.keys().map(|(v, c, block)| (group, *v, *c, block / 64)));
            self.check(group)?;
        }
        let store = self.store();
        match (store.slots() - store.free_slots()) as usize {
            taken if taken == used.len() => Ok(()),
            taken => Err(format!("{taken} slots are taken, and {} are needed", used.len())),
        }
    }

    /// A replica stays behind only if the store is too full for its next entry, or its install.
    fn check_full(&mut self, group: GroupId, replica: &Replica) -> Check {
        let missing = match replica.entries.get(&(replica.applied + 1)) {
            Some((op, _)) if replica.install.is_none() => {
                self.store().missing_slots(group, VolumeId(op.volume), LAYER, op.range())
            }
            _ => 3,
        };
        match self.store().free_slots() {
            free if free < missing => Ok(()),
            free => Err(format!("group {group} stays behind with {free} slots: {replica:?}")),
        }
    }
}
