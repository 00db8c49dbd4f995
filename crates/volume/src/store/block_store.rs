//! The blocks of a volume server on its device: apply and write-back.
//! `docs/format/volume-store.md`, sections 5 and 6.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use alluvium_wal::{DeviceOffset, LogOffset};
use bytes::Bytes;

use super::error::StoreError;
use super::io::{Completed, Io, Purpose, StoreCounters};
use super::layout::SLOT_BLOCKS;
use super::overlay::{ChunkKey, Content, FlightId, Overlay, WriteBack, first_key};
use super::pending::{Progress, Pulls, Reads};
use super::sector::{Address, BlockEpoch, Word};
use super::slots::Slots;
use super::superblock::{Current, Owner};
use crate::op::{BLOCK_BYTES, BlockRange, CHUNK_BLOCKS};
use crate::rules::{Broken, Rule};
use crate::types::{
    CheckpointNumber, GroupId, Index, Layer, PeerId, SlotIndex, SlotNumber, VolumeId, replicas_of,
};

/// Slots of a chunk.
pub(super) const CHUNK_SLOTS: usize = CHUNK_BLOCKS as usize / SLOT_BLOCKS;

/// Greatest number of blocks of a request to the device: 512 KiB.
pub(super) const REQUEST_BLOCKS: u16 = 128;

/// How a store works.
#[derive(Clone, Copy, Debug)]
pub struct StoreOptions {
    /// Requests of write-back in flight, at least 1. A checkpoint has a quarter of that of its own.
    pub queue_depth: usize,
    /// Blocks are written durably. Checkpoints flush all the same.
    pub durable_writes: bool,
    /// The rule that is broken, if any.
    pub broken: Broken,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self { queue_depth: 32, durable_writes: false, broken: Broken::default() }
    }
}

/// What the last complete checkpoint of the log states of a replica, as far as an opening needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownReplica {
    /// The index that the checkpoint covers.
    pub base: Index,
    /// The barrier.
    pub barrier: Index,
    /// The volumes.
    pub volumes: BTreeSet<VolumeId>,
}

/// What an opening compares the store with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The server and its log.
    pub owner: Owner,
    /// The last complete checkpoint in the log; 0 if there is none.
    pub checkpoint: CheckpointNumber,
    /// The end of the log.
    pub log_end: LogOffset,
    /// The replicas of that checkpoint.
    pub replicas: BTreeMap<(GroupId, PeerId), KnownReplica>,
    /// That checkpoint lists no replica, and no record of one follows it.
    pub has_no_replica: bool,
}

/// There are too few free slots. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the store has too few free slots")]
pub struct NoSlots;

/// The slots of a chunk.
#[derive(Clone, Debug)]
pub(super) struct ChunkSlots([SlotIndex; CHUNK_SLOTS]);

impl ChunkSlots {
    /// Marks the absence of a slot.
    const NONE: SlotIndex = SlotIndex(u32::MAX);

    pub(super) fn get(&self, number: usize) -> Option<SlotIndex> {
        Some(self.0[number]).filter(|slot| *slot != Self::NONE)
    }

    pub(super) fn set(&mut self, number: usize, slot: SlotIndex) {
        self.0[number] = slot;
    }

    /// The slots that there are, by number.
    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = (usize, SlotIndex)> {
        self.0.iter().copied().enumerate().filter(|(_, slot)| *slot != Self::NONE)
    }

    /// Where the slot with a number would be next to one that there is.
    fn preferred(&self, number: usize) -> Option<SlotIndex> {
        let (near, slot) = self.iter().min_by_key(|(other, _)| other.abs_diff(number))?;
        (slot.0 as usize + number).checked_sub(near).map(|slot| SlotIndex(slot as u32))
    }
}

/// The used slots of a replica that an opening has found.
#[derive(Debug, Default)]
pub(super) struct Unclaimed {
    pub(super) chunks: BTreeMap<ChunkKey, Box<ChunkSlots>>,
    /// Those of which the opening could not decide whether their owner still exists.
    pub(super) undecided: Vec<SlotIndex>,
}

/// The store of a volume server: the blocks of its replicas on a device.
///
/// It has no thread and no clock. Its owner calls it in turns: [`Store::take_completions`],
/// [`Store::write_back`], then [`Store::apply`]. The memory of what is applied and not written is
/// not bounded here; the owner stops to apply when [`Store::overlay_bytes`] is too large.
#[derive(Debug)]
pub struct Store {
    pub(super) io: Io,
    pub(super) options: StoreOptions,
    /// The copy of the superblock that counts, or will when it is durable.
    pub(super) superblock: Current,
    pub(super) slots: Slots,
    /// The slots of all chunks of the replicas that were added, by chunk. A chunk has at least one.
    pub(super) index: BTreeMap<ChunkKey, Box<ChunkSlots>>,
    pub(super) overlay: Overlay,
    pub(super) replicas: BTreeMap<GroupId, PeerId>,
    /// Used slots of replicas that were not added since the opening.
    pub(super) unclaimed: BTreeMap<(GroupId, PeerId), Unclaimed>,
    /// Used slots of which the opening could not decide whether their owner still exists.
    pub(super) undecided: BTreeMap<GroupId, Vec<SlotIndex>>,
    pub(super) progress: Progress,
    pub(super) reads: Reads,
    pub(super) pulls: Pulls,
    /// The number of requests in flight of each write-back.
    flights: BTreeMap<FlightId, usize>,
    /// Requests of write-back in flight.
    requests: usize,
    /// The chunk of the last write-back.
    after: Option<ChunkKey>,
    /// Empty; kept for its memory.
    completed: Vec<Completed>,
}

impl Store {
    pub(super) fn new(io: Io, options: StoreOptions, superblock: Current, slots: Slots) -> Self {
        assert!(options.queue_depth > 0, "a store has requests in flight");
        Self {
            io,
            options,
            superblock,
            slots,
            index: BTreeMap::new(),
            overlay: Overlay::default(),
            replicas: BTreeMap::new(),
            unclaimed: BTreeMap::new(),
            undecided: BTreeMap::new(),
            progress: Progress::default(),
            reads: Reads::default(),
            pulls: Pulls::default(),
            flights: BTreeMap::new(),
            requests: 0,
            after: None,
            completed: Vec::new(),
        }
    }

    pub(super) fn breaks(&self, rule: Rule) -> bool {
        self.options.broken.is(rule)
    }

    /// The number of slots.
    pub fn slots(&self) -> u32 {
        self.slots.layout().slots()
    }

    /// The number of free slots.
    pub fn free_slots(&self) -> u32 {
        self.slots.free_count()
    }

    /// Whether a checkpoint would free slots.
    pub fn has_freed_slots(&self) -> bool {
        self.slots.freed_count() > 0
    }

    /// The number of slots that are out of use because their sector is damaged. While there are
    /// any, the store may lack blocks of any replica that existed at the opening.
    pub fn damaged_slots(&self) -> u32 {
        self.slots.lost_count()
    }

    /// Counts of what the store has written.
    pub fn counters(&self) -> StoreCounters {
        self.io.counters()
    }

    /// Memory of blocks that are applied or pulled and not yet written, in bytes.
    pub fn overlay_bytes(&self) -> usize {
        self.overlay.bytes() + self.pulls.bytes
    }

    /// Whether nothing of a group waits to be written or compared.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn is_drained(&self, group: GroupId) -> bool {
        !self.overlay.has_group(group) && !self.has_pulls(group)
    }

    // -- Replicas

    /// Adds a replica. After an opening it gets the blocks that the store has of it.
    ///
    /// # Panics
    /// If the group has a replica.
    pub fn add_replica(&mut self, group: GroupId, peer: PeerId) {
        let before = self.replicas.insert(group, peer);
        assert_eq!(before, None, "group {group} has a replica");
        let claims = |other: PeerId| other == peer || self.breaks(Rule::FormerReplica);
        let of_group = self.unclaimed.range(replicas_of(group));
        let claimed: Vec<_> = of_group.map(|(key, _)| *key).filter(|key| claims(key.1)).collect();
        for replica in claimed.into_iter().filter_map(|key| self.unclaimed.remove(&key)) {
            self.index.extend(replica.chunks);
            self.undecided.entry(group).or_default().extend(replica.undecided);
        }
    }

    /// Removes a replica. The log has recorded its removal, durably or not, before the next
    /// checkpoint.
    pub fn remove_replica(&mut self, group: GroupId) {
        self.replicas.remove(&group).expect("only replicas that were added are removed");
        self.overlay.remove_group(group);
        self.undecided.remove(&group);
        let keys = self.index.range(first_key(group)..).map(|(key, _)| *key);
        let keys: Vec<ChunkKey> = keys.take_while(|key| key.group == group).collect();
        for chunk in keys.into_iter().filter_map(|key| self.index.remove(&key)) {
            chunk.iter().for_each(|(_, slot)| self.slots.free_owner_gone(slot));
        }
    }

    /// Decides which slots of a replica count that the opening could not decide: those of volumes
    /// that the replica knows. To be called when the replay has reached the durable commit, and
    /// again with `is_past_barrier` when the applied index has reached the barrier.
    pub fn replayed(
        &mut self,
        group: GroupId,
        knows: &dyn Fn(VolumeId) -> bool,
        is_past_barrier: bool,
    ) {
        let mut rest = Vec::new();
        for slot in self.undecided.remove(&group).unwrap_or_default() {
            // It may have been freed, and used again.
            let used = self.slots.used(slot).filter(|used| used.is_undecided);
            let Some(address) = used.map(|used| used.sector.address) else { continue };
            if knows(address.volume) {
                self.slots.set_decided(slot);
            } else if !is_past_barrier {
                rest.push(slot);
            } else {
                self.remove_from_index(key_of(&address), usize::from(address.number.0));
                self.slots.free_owner_gone(slot);
            }
        }
        if !rest.is_empty() {
            self.undecided.insert(group, rest);
        }
    }

    pub(super) fn remove_from_index(&mut self, key: ChunkKey, number: usize) {
        let chunk = self.index.get_mut(&key).expect("the chunk has a slot");
        chunk.set(number, ChunkSlots::NONE);
        if chunk.iter().next().is_none() {
            self.index.remove(&key);
        }
    }

    // -- Apply

    /// The number of slots that have to be allocated for a write of these blocks.
    pub fn missing_slots(
        &self,
        group: GroupId,
        volume: VolumeId,
        layer: Layer,
        range: BlockRange,
    ) -> u32 {
        self.missing(chunk_key(group, volume, layer, range), &blocks_of(range))
    }

    fn missing(&self, key: ChunkKey, blocks: &Range<u16>) -> u32 {
        let numbers = slot_numbers(blocks);
        match self.index.get(&key) {
            Some(chunk) => numbers.filter(|number| chunk.get(*number).is_none()).count() as u32,
            None => numbers.len() as u32,
        }
    }

    /// Applies a change of blocks, of the entry with this index, and reserves the slots for it.
    ///
    /// # Errors
    /// There are too few free slots. Nothing has changed; the entry is to be applied later.
    ///
    /// # Panics
    /// If the group has no replica.
    pub fn apply(
        &mut self,
        group: GroupId,
        volume: VolumeId,
        layer: Layer,
        range: BlockRange,
        content: Content,
        index: Index,
    ) -> Result<(), NoSlots> {
        assert!(index > Index(0), "entries are counted from 1");
        let key = chunk_key(group, volume, layer, range);
        self.put(key, blocks_of(range), content, index)
    }

    /// Puts blocks into the overlay.
    pub(super) fn put(
        &mut self,
        key: ChunkKey,
        blocks: Range<u16>,
        content: Content,
        index: Index,
    ) -> Result<(), NoSlots> {
        let needs_slot = content.needs_slot();
        if needs_slot && !self.breaks(Rule::SlotAtApply) {
            self.reserve(key, &blocks)?;
        }
        if self.breaks(Rule::WordAtSubmission) {
            for (number, part) in parts(&blocks) {
                self.set_words(key, number, &part, &content, blocks.start);
            }
        }
        self.overlay.insert(key, blocks.clone(), content, index);
        if !needs_slot {
            for number in slot_numbers(&blocks) {
                let slot = self.slot(key, number);
                if slot.and_then(|slot| self.slots.used(slot)).is_some_and(|used| used.stamp == 0) {
                    self.free_if_empty(key, number);
                }
            }
        }
        Ok(())
    }

    /// Whether the device has completed the writes of these blocks, as the entry `index` has made
    /// them or newer.
    pub fn has_landed(
        &self,
        group: GroupId,
        volume: VolumeId,
        layer: Layer,
        range: BlockRange,
        index: Index,
    ) -> bool {
        let key = chunk_key(group, volume, layer, range);
        !self.overlay.has_up_to(key, &blocks_of(range), index)
    }

    fn reserve(&mut self, key: ChunkKey, blocks: &Range<u16>) -> Result<(), NoSlots> {
        let missing = self.missing(key, blocks);
        if missing == 0 {
            return Ok(());
        }
        if missing > self.slots.free_count() {
            return Err(NoSlots);
        }
        let peer = *self.replicas.get(&key.group).expect("blocks are those of a replica");
        let ChunkKey { group, volume, chunk, layer } = key;
        let slots = self.index.entry(key).or_default();
        for number in slot_numbers(blocks) {
            if slots.get(number).is_none() {
                let address =
                    Address { group, peer, volume, layer, chunk, number: SlotNumber(number as u8) };
                let slot = self.slots.reserve(address, slots.preferred(number));
                slots.set(number, slot.expect("counted above"));
            }
        }
        Ok(())
    }

    pub(super) fn slot(&self, key: ChunkKey, number: usize) -> Option<SlotIndex> {
        self.index.get(&key)?.get(number)
    }

    /// Frees a slot that has no block, and that no applied block needs.
    fn free_if_empty(&mut self, key: ChunkKey, number: usize) {
        let Some(slot) = self.slot(key, number) else { return };
        let first = (number * SLOT_BLOCKS) as u16;
        let blocks = first..first + SLOT_BLOCKS as u16;
        if !self.overlay.needs_slot(key, &blocks) && self.slots.free_empty(slot) {
            self.remove_from_index(key, number);
        }
    }

    // -- Write-back

    /// Submits what may be written, as far as the queue has space. `durable_commit` is the greatest
    /// commit index of a group in a durable record of the log.
    pub fn write_back(&mut self, durable_commit: &dyn Fn(GroupId) -> Index) {
        if self.breaks(Rule::CommitRule) {
            self.overlay.commit(|_| Index(u64::MAX));
        } else {
            self.overlay.commit(durable_commit);
        }
        while self.requests < self.options.queue_depth {
            let Some(write) = self.overlay.next_write(self.after, REQUEST_BLOCKS) else { break };
            self.after = Some(write.key);
            self.submit(&write);
        }
    }

    /// Sets the words of a write-back, and submits its data.
    fn submit(&mut self, write: &WriteBack) {
        let WriteBack { id, key, runs } = write;
        let mut requests = Requests::default();
        let mut is_stuck = false;
        for (blocks, content) in runs {
            if content.needs_slot() && self.breaks(Rule::SlotAtApply) {
                // Without a slot it never lands.
                is_stuck |= self.reserve(*key, blocks).is_err();
                if is_stuck {
                    continue;
                }
            }
            for (number, part) in parts(blocks) {
                let Some(slot) = self.set_words(*key, number, &part, content, blocks.start) else {
                    continue;
                };
                if let Content::Data(data, _) = content {
                    let start = usize::from(part.start - blocks.start) * BLOCK_BYTES;
                    let data = data.slice(start..start + part.len() * BLOCK_BYTES);
                    requests.add(slot, usize::from(part.start) % SLOT_BLOCKS, data);
                } else {
                    self.free_if_empty(*key, number);
                }
            }
        }
        let count = requests.0.len();
        self.flights.insert(*id, count + usize::from(is_stuck));
        self.requests += count;
        for RequestOfBlocks { slot, block, blocks, parts } in requests.0 {
            let mut buf = self.io.alloc(blocks * BLOCK_BYTES);
            let mut at = 0;
            for part in parts {
                buf[at..at + part.len()].copy_from_slice(&part);
                at += part.len();
            }
            let slots = slot.0..slot.0 + (block + blocks).div_ceil(SLOT_BLOCKS) as u32;
            self.slots.submitted(slots.clone());
            let purpose = Purpose::Blocks { flight: *id, slots };
            let at = self.slots.layout().block_at(slot, block);
            self.io.write(at, buf.freeze(), self.options.durable_writes, purpose);
        }
        if count == 0 && !is_stuck {
            self.landed(*id);
        }
    }

    /// Sets the words of blocks in one slot, a part of those that begin with block `start` of the
    /// chunk. Returns the slot; `None` if there is none, and so no block.
    fn set_words(
        &mut self,
        key: ChunkKey,
        number: usize,
        part: &Range<u16>,
        content: &Content,
        start: u16,
    ) -> Option<SlotIndex> {
        let slot = self.slot(key, number)?;
        let epoch = BlockEpoch::after(self.progress.complete);
        let first = usize::from(part.start) % SLOT_BLOCKS;
        let word = |block| content.word(key, block, usize::from(block - start));
        self.slots.set_words(slot, first, part.clone().map(word), epoch);
        Some(slot)
    }

    /// The word of each block in the store, and the position of its data on the device, if it has
    /// any.
    pub(super) fn stored(
        &self,
        key: ChunkKey,
        blocks: &Range<u16>,
    ) -> impl Iterator<Item = (u16, Word, Option<DeviceOffset>)> {
        parts(blocks).flat_map(move |(number, part)| {
            let slot = self.slot(key, number);
            let used = slot.map(|slot| (slot, self.slots.used(slot).expect("it is indexed")));
            part.map(move |block| {
                let in_slot = usize::from(block) % SLOT_BLOCKS;
                let Some((slot, used)) = used else { return (block, Word::ABSENT, None) };
                let word = used.sector.words[in_slot];
                let at = word.has_data().then(|| self.slots.layout().block_at(slot, in_slot));
                (block, word, at)
            })
        })
    }

    fn landed(&mut self, id: FlightId) {
        self.flights.remove(&id);
        self.overlay.landed(id);
    }

    /// Takes the completions of the device. Returns whether there were any.
    ///
    /// # Errors
    /// A write or a flush has failed. The store is not to be used any more.
    pub fn take_completions(&mut self) -> Result<bool, StoreError> {
        let mut completed = std::mem::take(&mut self.completed);
        self.io.take(&mut completed);
        let is_any = !completed.is_empty();
        for (purpose, result) in completed.drain(..) {
            match purpose {
                Purpose::Read(number) => self.read_completed(number, result.ok().flatten()),
                Purpose::Blocks { flight, slots } => {
                    result?;
                    self.slots.completed(slots);
                    self.requests -= 1;
                    let requests = self.flights.get_mut(&flight).expect("it is there");
                    *requests -= 1;
                    if *requests == 0 {
                        self.landed(flight);
                    }
                }
                Purpose::Checkpoint => {
                    result?;
                    self.progress.requests -= 1;
                }
                Purpose::Flush => {
                    if !self.breaks(Rule::FlushResult) {
                        result?;
                    }
                    self.progress.requests -= 1;
                }
            }
        }
        self.completed = completed;
        self.submit_sectors();
        Ok(is_any)
    }

    /// Panics unless the index and the slots agree.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let mut indexed = BTreeMap::new();
        for (key, chunk) in &self.index {
            for (number, slot) in chunk.iter() {
                let peer = self.replicas[&key.group];
                let ChunkKey { group, volume, chunk, layer } = *key;
                let number = SlotNumber(number as u8);
                let address = Address { group, peer, volume, layer, chunk, number };
                let before = indexed.insert(slot, address);
                assert_eq!(before, None, "slot {slot} is {address:?} too");
            }
        }
        for (key, chunk) in self.unclaimed.values().flat_map(|replica| &replica.chunks) {
            for (_, slot) in chunk.iter() {
                let address = self.slots.used(slot).expect("it is used").sector.address;
                assert_eq!(key_of(&address), *key);
                let before = indexed.insert(slot, address);
                assert_eq!(before, None, "slot {slot} is {address:?} too");
            }
        }
        self.slots.check(&indexed);
    }
}

impl Default for ChunkSlots {
    fn default() -> Self {
        Self([Self::NONE; CHUNK_SLOTS])
    }
}

/// The requests of a write-back: blocks that lie next to each other on the device.
#[derive(Default)]
struct Requests(Vec<RequestOfBlocks>);

struct RequestOfBlocks {
    slot: SlotIndex,
    /// The first block in the slot.
    block: usize,
    blocks: usize,
    parts: Vec<Bytes>,
}

impl Requests {
    /// Adds blocks of one slot.
    fn add(&mut self, slot: SlotIndex, block: usize, data: Bytes) {
        let blocks = data.len() / BLOCK_BYTES;
        if let Some(last) = self.0.last_mut() {
            let end = last.slot.0 as usize * SLOT_BLOCKS + last.block + last.blocks;
            let is_next = end == slot.0 as usize * SLOT_BLOCKS + block;
            if is_next && last.blocks + blocks <= usize::from(REQUEST_BLOCKS) {
                last.blocks += blocks;
                last.parts.push(data);
                return;
            }
        }
        self.0.push(RequestOfBlocks { slot, block, blocks, parts: vec![data] });
    }
}

pub(super) fn key_of(address: &Address) -> ChunkKey {
    let Address { group, volume, chunk, layer, .. } = *address;
    ChunkKey { group, volume, chunk, layer }
}

/// The chunk of a range.
///
/// # Panics
/// If the range is not within a chunk, or the layer is not 0: there are no layers yet.
pub(super) fn chunk_key(
    group: GroupId,
    volume: VolumeId,
    layer: Layer,
    range: BlockRange,
) -> ChunkKey {
    assert_eq!(layer, Layer(0), "there are no layers yet");
    assert!(
        range.blocks > 0 && u32::from(range.first) + u32::from(range.blocks) <= CHUNK_BLOCKS.into(),
        "{range:?}"
    );
    ChunkKey { group, volume, chunk: range.chunk, layer }
}

pub(super) fn blocks_of(range: BlockRange) -> Range<u16> {
    range.first..range.first + range.blocks
}

/// The numbers of the slots of blocks of a chunk.
fn slot_numbers(blocks: &Range<u16>) -> Range<usize> {
    usize::from(blocks.start) / SLOT_BLOCKS..usize::from(blocks.end).div_ceil(SLOT_BLOCKS)
}

/// Blocks of a chunk by slot: the number of the slot, and its part of the blocks.
pub(super) fn parts(blocks: &Range<u16>) -> impl Iterator<Item = (usize, Range<u16>)> + use<> {
    let blocks = blocks.clone();
    slot_numbers(&blocks).map(move |number| {
        let first = (number * SLOT_BLOCKS) as u16;
        let end = first + SLOT_BLOCKS as u16;
        (number, blocks.start.max(first)..blocks.end.min(end))
    })
}
