//! The opening of a server: its log is scanned for the last checkpoint and for damage, the store is
//! opened against that, and the records of the log are replayed. `docs/format/volume-log.md`,
//! sections 6 and 7, and `docs/format/volume-store.md`, section 8.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use alluvium_device::SharedDevice;
use alluvium_wal::{Damage, LogOffset, Options, Progress, RecoveryReport, Wal};
use raft::eraftpb;

use super::checkpoint::Checkpointing;
use super::entries::{EntryCache, apply_entry};
use super::lag::Delayed;
use super::pairs::Pairs;
use super::replica::{Logged, Replica, Standing, Start};
use super::stall::Stall;
use super::{LostReplica, Notice, Output, Shard, ShardCounters, ShardOptions};
use crate::group::GroupView;
use crate::log::{
    Entries, Extents, GroupCheckpoint, Install, LogWriter, Loss, Record, RecordError, Survey,
    Surveyor,
};
use crate::op::Op;
use crate::raft::{
    MemoryLog, conf_to_raft, entry_bytes, entry_from_log, hard_state_to_raft, position,
};
use crate::rules::Rule;
use crate::state::GroupState;
use crate::store::{Expected, KnownReplica, Owner, SECTOR_BYTES, Store, StoreError, StoreOptions};
use crate::types::{
    CheckpointNumber, ConfState, GroupId, HardState, Index, PeerId, Position, Term, replicas_of,
};

/// What an opening needs.
pub struct Opening {
    /// The log's device.
    pub log: SharedDevice,
    /// Options of the log.
    pub log_options: Options,
    /// The store's device.
    pub store: SharedDevice,
    /// The identity of the store, as the server's registration has it.
    pub store_id: uuid::Uuid,
    /// The cluster.
    pub cluster: String,
    /// The replicas of this server that the registry has, and whether it records that they were
    /// created.
    pub replicas: BTreeMap<GroupId, (PeerId, GroupView, bool)>,
    /// Options of the shard.
    pub options: ShardOptions,
    /// The time.
    pub now: u64,
    /// Unix time in milliseconds, for information only.
    pub unix_ms: u64,
    /// Called on another thread when the store's device has completed a request.
    pub wake: Arc<dyn Fn() + Send + Sync>,
}

/// A server that is open.
pub struct Recovered {
    /// The shard.
    pub shard: Shard,
    /// What the registry is to record.
    pub notices: Vec<Notice>,
    /// What the log had.
    pub report: RecoveryReport,
    /// The entries that were applied, for the oracle of a simulation.
    #[cfg(feature = "simulation")]
    pub applied: Vec<super::AppliedEntry>,
}

/// Is called at the beginning of each step of an opening with what the server is doing: `reading
/// the log`. Returns what is called with the bytes that are done, and with all bytes of the step.
pub type Steps<'a> = dyn FnMut(&'static str) -> Progress + 'a;

/// Why a server does not open.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The log.
    #[error("the write-ahead log does not open: {0}")]
    Log(alluvium_wal::OpenError),
    /// The store.
    #[error("the store does not open: {0}")]
    Store(#[from] StoreError),
    /// A record of the log is not one of a volume server.
    #[error("the record at {offset} of the log: {error}")]
    Record {
        /// Where it begins.
        offset: LogOffset,
        /// What is wrong.
        error: RecordError,
    },
}

impl From<alluvium_wal::OpenError> for OpenError {
    fn from(error: alluvium_wal::OpenError) -> Self {
        match error {
            alluvium_wal::OpenError::Visit { at, source } => match source.downcast() {
                Ok(error) => Self::Record { offset: at, error: *error },
                Err(source) => Self::Log(alluvium_wal::OpenError::Visit { at, source }),
            },
            other => Self::Log(other),
        }
    }
}

impl Shard {
    /// Opens a server. `wait` blocks until `wake` was called since the last time; `step` is called
    /// as [`Steps`] says.
    ///
    /// # Errors
    /// Log or store do not open, or do not belong together. Nothing was changed then that a later
    /// opening needs.
    pub fn open(
        opening: Opening,
        wait: &mut dyn FnMut(),
        step: &mut Steps<'_>,
    ) -> Result<Recovered, OpenError> {
        let broken = opening.options.broken;
        let read_log = step("reading the log");
        let (survey, end) = survey(&opening, &read_log, broken.is(Rule::DamageInLog))?;
        let wal_id = Wal::inspect(&opening.log)?.header.wal_id;
        let owner = Owner {
            wal_id,
            store_id: opening.store_id,
            server: opening.options.server,
            cluster: opening.cluster.clone(),
        };
        let mut losses = losses(&opening, &survey);
        let store_options = StoreOptions {
            queue_depth: opening.options.store_queue_depth,
            durable_writes: opening.options.apply == super::Apply::Dsync,
            broken,
        };
        let read_store = step("reading the metadata of the store");
        let mut slots = |done: u32, all: u32| {
            let bytes = |slots: u32| u64::from(slots) * SECTOR_BYTES as u64;
            read_store(bytes(done), bytes(all));
        };
        let mut store = Store::open(
            opening.store.clone(),
            &expected(owner, &survey, end),
            store_options,
            opening.unix_ms,
            opening.wake.clone(),
            &mut slots,
        )?;
        if store.damaged_slots() > 0 {
            // A block that the store lacks may be one whose sector is damaged.
            let created = opening.replicas.iter().filter(|(_, (_, _, is_created))| *is_created);
            let created = created.map(|(group, (peer, ..))| (*group, *peer));
            for (group, peer) in survey.replicas.keys().copied().chain(created) {
                let loss = Loss::Sector;
                losses.entry((group, peer)).or_insert(LostReplica { group, peer, loss });
            }
        }
        let mut walk = Walk::new(&opening, &survey, &losses, &mut store);
        let mut visit = |record: alluvium_wal::Record| {
            walk.record(record.offset, Record::decode(&record.payload)?, wait);
            Ok(())
        };
        let replay = step("replaying the log");
        let log = opening.log.clone();
        let (wal, report) = Wal::open(log, &opening.log_options, Some(replay), &mut visit)?;
        #[cfg(feature = "simulation")]
        let applied = std::mem::take(&mut walk.applied);
        let Walk { groups, cache, .. } = walk;
        let now = opening.now;
        let ring_bytes = wal.stats().ring_bytes;
        let mut options = opening.options;
        options.proposal_bytes = options.proposal_bytes.min((ring_bytes / 32) as usize);
        let logger = slog::Logger::root(slog::Discard, slog::o!());
        let mut shard = Self {
            options,
            logger,
            replicas: BTreeMap::new(),
            log: LogWriter::new(wal),
            store,
            checkpoint: Checkpointing::new(),
            dirty: BTreeSet::new(),
            accepted_bytes: 0,
            proposing: BTreeSet::new(),
            pulling: BTreeSet::new(),
            campaigns: BTreeSet::new(),
            applying: BTreeSet::new(),
            lazy: VecDeque::new(),
            cache,
            lagging: BTreeMap::new(),
            delayed: Delayed::default(),
            reads: BTreeMap::new(),
            next_read: 0,
            sources: BTreeMap::new(),
            next_attempt: 0,
            others: BTreeMap::new(),
            durable_answers: Vec::new(),
            stall: Stall::default(),
            now,
            next_tick: now,
            counters: ShardCounters::default(),
        };
        let mut out = Output::default();
        for LostReplica { group, peer, loss } in losses.into_values() {
            shard.bury(group, peer);
            out.notices.push(Notice::Lost { group, peer, reason: loss.to_string() });
        }
        for ((group, peer), walked) in groups {
            match opening.replicas.get(&group) {
                Some((known, view, is_created)) if *known == peer => {
                    let standing = if *is_created { Standing::Active } else { Standing::Creating };
                    if !is_created {
                        out.notices.push(Notice::Created { group, peer, is_recovered: true });
                    }
                    let start = walked.start(group, peer, view.clone(), standing);
                    let replica = Replica::new(start, broken, ring_bytes, &shard.logger);
                    shard.replicas.insert(group, replica);
                    shard.applying.insert(group);
                    shard.dirty.insert(group);
                }
                // The registry has another replica of the group here, or none.
                _ => {
                    shard.bury(group, peer);
                    shard.store.remove_replica(group);
                }
            }
        }
        for (group, (peer, view, is_created)) in opening.replicas {
            let is_new = !is_created || broken.is(Rule::CreatedOnce);
            if is_new && !shard.replicas.contains_key(&group) {
                shard.create(group, peer, view);
            }
        }
        Ok(Recovered {
            shard,
            notices: out.notices,
            report,
            #[cfg(feature = "simulation")]
            applied,
        })
    }
}

/// The first pass over the log: its last complete checkpoint, its damage, and its end.
fn survey(
    opening: &Opening,
    progress: &Progress,
    ignores_damage: bool,
) -> Result<(Survey, LogOffset), OpenError> {
    let pass = |damage: &[Damage]| -> Result<_, OpenError> {
        let mut surveyor = Surveyor::default();
        let mut damage = damage.iter().peekable();
        let mut visit = |record: alluvium_wal::Record| {
            while damage.next_if(|damage| damage.range.end <= record.offset).is_some() {
                surveyor.damage();
            }
            surveyor.record(record.offset, Record::decode(&record.payload)?);
            Ok(())
        };
        let report = Wal::scan(&opening.log, Some(progress.clone()), &mut visit)?;
        Ok((surveyor, report))
    };
    let (surveyor, report) = pass(&[])?;
    if report.damage.is_empty() || ignores_damage {
        return Ok((surveyor.finish(&[]), report.end));
    }
    // Where the damage is, was known only at the end of the first pass.
    let (surveyor, report) = pass(&report.damage)?;
    Ok((surveyor.finish(&report.damage), report.end))
}

/// The replicas that may have forgotten what they acknowledged.
fn losses(opening: &Opening, survey: &Survey) -> BTreeMap<(GroupId, PeerId), LostReplica> {
    let broken = opening.options.broken;
    let mut losses = BTreeMap::new();
    for ((group, peer), judgement) in &survey.replicas {
        if let Err(loss) = judgement {
            let (group, peer, loss) = (*group, *peer, *loss);
            losses.insert((group, peer), LostReplica { group, peer, loss });
        }
    }
    for (group, (peer, _, is_created)) in &opening.replicas {
        let (group, peer) = (*group, *peer);
        let is_missing = *is_created && !survey.replicas.contains_key(&(group, peer));
        if is_missing && !broken.is(Rule::CreatedOnce) {
            losses.insert((group, peer), LostReplica { group, peer, loss: Loss::Missing });
        }
    }
    losses
}

/// What the store is opened against.
fn expected(owner: Owner, survey: &Survey, log_end: LogOffset) -> Expected {
    let groups = survey.checkpoint.iter().flat_map(|(_, checkpoint)| &checkpoint.groups);
    let known = |group: &GroupCheckpoint| KnownReplica {
        base: group.base,
        barrier: group.barrier,
        volumes: group.volumes.iter().map(|state| state.volume).collect(),
    };
    let number = survey.checkpoint.as_ref().map(|(_, checkpoint)| checkpoint.number);
    Expected {
        owner,
        checkpoint: number.unwrap_or(CheckpointNumber(0)),
        log_end,
        replicas: groups.map(|group| ((group.group, group.peer), known(group))).collect(),
        has_no_replica: survey.checkpoint.is_some() && survey.replicas.is_empty(),
    }
}

/// What a checkpoint states of each replica.
type Stated = BTreeMap<(GroupId, PeerId), GroupCheckpoint>;

/// The second pass over the log.
struct Walk<'a> {
    groups: BTreeMap<(GroupId, PeerId), Walked>,
    lost: BTreeSet<(GroupId, PeerId)>,
    views: &'a BTreeMap<GroupId, (PeerId, GroupView, bool)>,
    /// Where the last complete checkpoint begins, and what it states.
    checkpoint: Option<(LogOffset, Stated)>,
    /// Whether the walk has passed it.
    has_passed: bool,
    store: &'a mut Store,
    options: &'a ShardOptions,
    cache: EntryCache,
    #[cfg(feature = "simulation")]
    applied: Vec<super::AppliedEntry>,
}

/// A replica during the walk.
pub(super) struct Walked {
    base: Position,
    /// Records before this offset are void: an install has completed there.
    void_before: LogOffset,
    entries: VecDeque<eraftpb::Entry>,
    /// The entry before the first one in `entries`.
    truncated: Position,
    state: GroupState,
    conf: ConfState,
    applied: Position,
    logged: Logged,
    extents: Extents,
    pairs: Pairs,
}

impl<'a> Walk<'a> {
    fn new(
        opening: &'a Opening,
        survey: &'a Survey,
        losses: &BTreeMap<(GroupId, PeerId), LostReplica>,
        store: &'a mut Store,
    ) -> Self {
        let checkpoint = survey.checkpoint.as_ref().map(|(at, checkpoint)| {
            let groups = checkpoint.groups.iter();
            (*at, groups.map(|group| ((group.group, group.peer), group.clone())).collect())
        });
        Self {
            groups: BTreeMap::new(),
            lost: losses.keys().copied().collect(),
            views: &opening.replicas,
            checkpoint,
            has_passed: false,
            store,
            options: &opening.options,
            cache: EntryCache::default(),
            #[cfg(feature = "simulation")]
            applied: Vec::new(),
        }
    }

    fn record(&mut self, offset: LogOffset, record: Record, wait: &mut dyn FnMut()) {
        match record {
            Record::Entries(entries) => {
                let key = (entries.group, entries.peer);
                if self.lost.contains(&key) {
                    return;
                }
                if self.walked(key).is_some_and(|walked| walked.entries(entries, offset)) {
                    self.apply(key, wait);
                }
            }
            Record::Install(Install { group, peer, barrier, .. }) => {
                let key = (group, peer);
                if self.lost.contains(&key) {
                    return;
                }
                if let Some(walked) = self.walked(key) {
                    walked.logged.has_record = true;
                    walked.logged.barrier = walked.logged.barrier.max(barrier);
                    walked.pairs.clear();
                }
            }
            Record::Checkpoint(_) => {
                let is_last = self.checkpoint.as_ref().is_some_and(|(at, _)| *at == offset);
                if is_last && !self.has_passed {
                    self.has_passed = true;
                    self.checkpointed(wait);
                }
            }
            Record::Tombstone(gone) => {
                if self.groups.remove(&(gone.group, gone.peer)).is_some() {
                    self.store.remove_replica(gone.group);
                }
            }
        }
    }

    /// The replica, which begins at the base that the last checkpoint states. `None` if neither the
    /// checkpoint nor the registry knows it.
    fn walked(&mut self, key: (GroupId, PeerId)) -> Option<&mut Walked> {
        if !self.groups.contains_key(&key) {
            let stated = self
                .checkpoint
                .as_ref()
                .and_then(|(at, groups)| groups.get(&key).map(|group| (*at, group)));
            let walked = match (stated, self.views.get(&key.0)) {
                (Some((at, group)), _) => Walked::stated(group, at),
                (None, Some((peer, view, _))) if *peer == key.1 => Walked::created(view),
                _ => return None,
            };
            self.store.add_replica(key.0, key.1);
            self.groups.insert(key, walked);
        }
        self.groups.get_mut(&key)
    }

    fn checkpointed(&mut self, wait: &mut dyn FnMut()) {
        let Some((_, groups)) = self.checkpoint.clone() else { return };
        for (key, stated) in groups {
            if self.lost.contains(&key) {
                continue;
            }
            if let Some(walked) = self.walked(key) {
                walked.checkpointed(&stated);
                self.apply(key, wait);
            }
        }
    }

    /// Applies what is known to be committed, as far as the entries have no gap and the store has
    /// slots. A record that was handed out stays in the log, so its commit index is durable.
    fn apply(&mut self, key: (GroupId, PeerId), wait: &mut dyn FnMut()) {
        loop {
            let walked = self.groups.get_mut(&key).expect("the caller has looked it up");
            let Some((at, op, bytes)) = walked.apply_next(key.0, self.store, self.options) else {
                break;
            };
            #[cfg(feature = "simulation")]
            self.applied.push(super::AppliedEntry { group: key.0, at, op });
            #[cfg(not(feature = "simulation"))]
            drop(op);
            self.cache.push(key.0, at.index, bytes);
            self.evict();
            while self.store.overlay_bytes() > self.options.overlay_bytes {
                let groups = &self.groups;
                let commit = |group: GroupId| {
                    let walked = groups.range(replicas_of(group)).next();
                    walked.map_or(Index(0), |(_, walked)| walked.logged.state.commit)
                };
                self.store.write_back(&commit);
                match self.store.take_completions() {
                    Ok(true) => {}
                    Ok(false) => wait(),
                    // The device has latched: the shard finds out with its first turn.
                    Err(_) => return,
                }
            }
        }
    }

    fn evict(&mut self) {
        let budget_bytes = self.options.entry_cache_bytes;
        while let Some((group, index)) = self.cache.pop_above(budget_bytes) {
            for (_, walked) in self.groups.range_mut(replicas_of(group)) {
                walked.compact(index);
            }
        }
    }
}

impl Walked {
    /// A replica that the last checkpoint, which begins at `at`, states.
    fn stated(group: &GroupCheckpoint, at: LogOffset) -> Self {
        let base = Position { index: group.base, term: group.base_term };
        Self {
            base,
            void_before: if group.completes_install { at } else { LogOffset(0) },
            entries: VecDeque::new(),
            truncated: base,
            state: GroupState::new(group.volumes.clone()),
            conf: group.conf.clone(),
            applied: base,
            logged: Logged { last: base, ..Logged::default() },
            extents: Extents::default(),
            pairs: Pairs::default(),
        }
    }

    /// A replica without a checkpoint.
    pub(super) fn created(view: &GroupView) -> Self {
        Self {
            base: Position::default(),
            void_before: LogOffset(0),
            entries: VecDeque::new(),
            truncated: Position::default(),
            state: GroupState::new(view.volumes.clone()),
            conf: view.founders_conf(),
            applied: Position::default(),
            logged: Logged::default(),
            extents: Extents::default(),
            pairs: Pairs::default(),
        }
    }

    /// Takes entries and hard state. Returns false if the record is void.
    fn entries(&mut self, record: Entries, offset: LogOffset) -> bool {
        self.logged.has_record = true;
        if offset < self.void_before {
            return false;
        }
        let Entries { first, previous_term, state, entries, .. } = record;
        let commit = state.commit.max(self.logged.state.commit);
        self.logged.state = HardState { commit, ..state };
        let last = Index(first.0 - 1 + entries.len() as u64);
        if let Some(entry) = entries.last() {
            self.extents.push(first, last, offset);
            self.logged.last = Position { index: last, term: entry.term };
        } else if last != self.logged.last.index {
            self.logged.last = Position { index: last, term: previous_term };
        }
        // What the record replaces. Nothing that is applied is ever replaced.
        while self.entries.back().is_some_and(|entry| entry.index >= first.0) {
            self.entries.pop_back();
        }
        let before = Index(first.0 - 1);
        if before > self.truncated.index && self.term_at(before) != Some(previous_term) {
            // A record that replaced them was damaged.
            self.entries.clear();
        }
        let indexed = (first.0..).map(Index).zip(&entries);
        let above = indexed.filter(|(index, _)| *index > self.truncated.index);
        self.entries.extend(above.map(|(index, entry)| entry_from_log(index, entry)));
        true
    }

    fn term_at(&self, index: Index) -> Option<Term> {
        if index == self.truncated.index {
            return Some(self.truncated.term);
        }
        let first = self.entries.front()?.index;
        let at = index.0.checked_sub(first)?;
        self.entries.get(at as usize).map(|entry| Term(entry.term))
    }

    /// The last checkpoint's place in the log.
    fn checkpointed(&mut self, stated: &GroupCheckpoint) {
        let commit = stated.state.commit.max(self.logged.state.commit);
        let commit = if stated.completes_install { stated.state.commit } else { commit };
        self.logged.has_record = true;
        self.logged.state = HardState { commit, ..stated.state };
        self.logged.last = Position { index: stated.last, term: stated.last_term };
        self.logged.barrier = stated.barrier;
        self.pairs = Pairs::of_record(&stated.pairs);
        self.extents.release(stated.base);
        if stated.completes_install {
            self.extents.clear();
            self.entries.clear();
        }
        // The record that replaced them was damaged, and its own entries are at or below the base.
        while self.entries.back().is_some_and(|entry| entry.index > stated.last.0) {
            self.entries.pop_back();
        }
    }

    /// Applies the next entry. `None` if there is none, or no slot for it.
    fn apply_next(
        &mut self,
        group: GroupId,
        store: &mut Store,
        options: &ShardOptions,
    ) -> Option<(Position, Option<Op>, usize)> {
        let next = self.applied.index.0 + 1;
        if next > self.logged.state.commit.0 {
            return None;
        }
        let at = next.checked_sub(self.entries.front()?.index)?;
        let entry = self.entries.get(at as usize)?;
        let applied = apply_entry(group, entry, &mut self.state, store, options.broken).ok()?;
        self.applied = position(entry);
        Some((self.applied, applied.map(|(op, _)| op), entry_bytes(entry)))
    }

    /// Drops applied entries from memory.
    fn compact(&mut self, to: Index) {
        let to = to.min(self.applied.index);
        while let Some(entry) = self.entries.pop_front_if(|entry| entry.index <= to.0) {
            self.truncated = position(&entry);
        }
    }

    pub(super) fn start(
        self,
        group: GroupId,
        peer: PeerId,
        view: GroupView,
        standing: Standing,
    ) -> Start {
        let hard_state = hard_state_to_raft(self.logged.state);
        let log =
            MemoryLog::new(self.truncated, hard_state, conf_to_raft(&self.conf), self.entries);
        Start {
            group,
            peer,
            view,
            log,
            state: self.state,
            applied: self.applied,
            logged: self.logged,
            extents: self.extents,
            base: self.base.index,
            pairs: self.pairs,
            standing,
        }
    }
}
