//! Blocks that an install pulls from another replica, and what a source needs to know of its own.
//! `docs/format/volume-store.md`, sections 4 (epochs) and 6 (W1).
//!
//! A block that is equal already is not written: a crash could tear it, and no entry would write it
//! again. Its word alone does not prove that it is equal, since an earlier install may have been
//! interrupted between the word and the block; so it is read and compared.

use std::ops::Range;

use alluvium_device::DeviceOffset;

use super::block_store::{NoSlots, REQUEST_BLOCKS, Store, blocks_of, chunk_key};
use super::layout::SLOT_BLOCKS;
use super::overlay::{ChunkKey, Content};
use super::pending::{Comparison, DeviceRun, RunPurpose};
use super::sector::{BlockEpoch, Word};
use crate::op::{BLOCK_BYTES, BlockRange, CHUNK_BLOCKS};
use crate::rules::Rule;
use crate::types::{CheckpointNumber, ChunkIndex, GroupId, Index, Layer, VolumeId};

/// A bit for each block of a chunk: bit `b % 8` of byte `b / 8` for block `b`.
pub type ChunkBits = [u8; CHUNK_BLOCKS as usize / 8];

/// The index of what no entry has changed.
const PULLED: Index = Index(0);

/// What becomes of a pulled block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It is equal.
    Dropped,
    /// It is different.
    Put,
    /// Its word is equal.
    Compared(DeviceOffset, Word),
}

impl Fate {
    fn word(&self) -> Option<Word> {
        match self {
            Self::Compared(_, word) => Some(*word),
            Self::Dropped | Self::Put => None,
        }
    }
}

impl Store {
    /// Takes blocks that another replica has. The log has durably recorded the install.
    ///
    /// # Errors
    /// There are too few free slots. Nothing has changed.
    pub fn pull(
        &mut self,
        group: GroupId,
        volume: VolumeId,
        layer: Layer,
        range: BlockRange,
        content: &Content,
    ) -> Result<(), NoSlots> {
        let key = chunk_key(group, volume, layer, range);
        let fates = self.fates(key, &blocks_of(range), content);
        if content.needs_slot() {
            // Slots that are there need none, so this also counts blocks that are not put.
            let missing = self.missing_slots(group, volume, layer, range);
            if missing > self.free_slots() {
                return Err(NoSlots);
            }
        }
        let mut at = 0;
        while at < fates.len() {
            let len = run_len(&fates[at..]);
            let first = range.first + at as u16;
            let blocks = first..first + len as u16;
            let part = content.slice(at..at + len);
            match (fates[at], part) {
                (Fate::Dropped, _) => {}
                (Fate::Compared(device_at, _), Content::Data(data, crcs)) => {
                    let words = fates[at..at + len].iter().filter_map(Fate::word).collect();
                    let number = self.reads.next_number();
                    let peer = *self.replicas.get(&group).expect("a replica pulls blocks");
                    self.pulls.bytes += data.len();
                    let comparison = Comparison { group, peer, data, crcs };
                    self.pulls.comparisons.insert(number, comparison);
                    self.read_run(key, first, device_at, words, RunPurpose::Pull(number));
                }
                (_, part) => self.put(key, blocks, part, PULLED)?,
            }
            at += len;
        }
        Ok(())
    }

    fn fates(&self, key: ChunkKey, blocks: &Range<u16>, content: &Content) -> Vec<Fate> {
        let stored = self.stored(key, blocks).enumerate();
        let fate = |(at, (block, word, device_at))| match device_at {
            _ if word != content.word(key, block, at) => Fate::Put,
            Some(device_at) if !self.breaks(Rule::PulledWord) => Fate::Compared(device_at, word),
            _ => Fate::Dropped,
        };
        let mut fates: Vec<Fate> = stored.map(fate).collect();
        // What the overlay has is newer than the words.
        for (found, _) in self.overlay.read(key, blocks.clone()) {
            let at = usize::from(found.start - blocks.start)..usize::from(found.end - blocks.start);
            fates[at].fill(Fate::Put);
        }
        fates
    }

    /// The device has returned blocks whose words are those of pulled ones; `None` if it could not.
    pub(super) fn compare(&mut self, number: u64, run: &DeviceRun, found: Option<&[u8]>) {
        let comparison = self.pulls.comparisons.remove(&number).expect("it is compared once");
        let Comparison { group, peer, data, crcs } = comparison;
        self.pulls.bytes -= data.len();
        if self.replicas.get(&group) != Some(&peer) {
            return;
        }
        for (at, word) in run.words.iter().enumerate() {
            let bytes = at * BLOCK_BYTES..(at + 1) * BLOCK_BYTES;
            if found.is_some_and(|found| found[bytes.clone()] == data[bytes.clone()]) {
                continue;
            }
            let block = run.first + at as u16;
            let blocks = block..block + 1;
            let is_same_word = self.stored(run.key, &blocks).all(|(_, now, _)| now == *word);
            // What was put there meanwhile is newer.
            if is_same_word && !self.overlay.has(run.key, &blocks) {
                let content = Content::Data(data.slice(bytes), vec![crcs[at]]);
                self.put(run.key, blocks, content, PULLED).expect("the slot is used");
            }
        }
    }

    /// Whether pulled blocks of a group are being compared.
    pub fn has_pulls(&self, group: GroupId) -> bool {
        self.pulls.comparisons.values().any(|comparison| comparison.group == group)
    }

    /// Removes the blocks of a chunk that the source of an install lacks.
    pub fn pull_retain(
        &mut self,
        group: GroupId,
        volume: VolumeId,
        layer: Layer,
        chunk: ChunkIndex,
        present: &ChunkBits,
    ) {
        if self.breaks(Rule::InstallRemoves) {
            return;
        }
        let own = self.present(group, volume, layer, chunk);
        let is_surplus = |block: u16| has_block(&own, block) && !has_block(present, block);
        let mut first = 0;
        while first < CHUNK_BLOCKS {
            let blocks =
                (first..CHUNK_BLOCKS).take_while(|block| is_surplus(*block)).count() as u16;
            if blocks > 0 {
                let range = BlockRange { chunk, first, blocks };
                let removed = self.pull(group, volume, layer, range, &Content::Absent);
                removed.expect("no slot is needed for a block that is removed");
            }
            first += blocks.max(1);
        }
    }

    /// The next chunk of a volume, at or after `from`, in which the replica may have blocks.
    pub fn next_chunk_of(
        &self,
        group: GroupId,
        volume: VolumeId,
        layer: Layer,
        from: ChunkIndex,
    ) -> Option<ChunkIndex> {
        let first = ChunkKey { group, volume, chunk: from, layer: Layer(0) };
        let keys = self.index.range(first..).map(|(key, _)| key);
        let mut of_volume = keys.take_while(|key| (key.group, key.volume) == (group, volume));
        of_volume.find(|key| key.layer == layer).map(|key| key.chunk)
    }

    /// The blocks of a chunk that may have changed above the base of checkpoint `since`: those
    /// whose words were set since, and those that wait in the overlay. Blocks that were removed are
    /// not among them: [`Store::present`] shows these.
    pub fn changed(
        &self,
        group: GroupId,
        volume: VolumeId,
        layer: Layer,
        chunk: ChunkIndex,
        since: CheckpointNumber,
    ) -> ChunkBits {
        let complete = self.checkpoint();
        self.blocks_that(
            ChunkKey { group, volume, chunk, layer },
            |word, epoch| word != Word::ABSENT && epoch.is_needed(since, complete),
            |_, in_store| in_store || !self.breaks(Rule::OverlayChanged),
        )
    }

    /// The blocks of a chunk that the replica has.
    pub fn present(
        &self,
        group: GroupId,
        volume: VolumeId,
        layer: Layer,
        chunk: ChunkIndex,
    ) -> ChunkBits {
        self.blocks_that(
            ChunkKey { group, volume, chunk, layer },
            |word, _| word != Word::ABSENT,
            |content, _| content.needs_slot(),
        )
    }

    /// The blocks of a chunk whose words and epochs `in_store` accepts; where the overlay has
    /// something newer, `in_overlay` decides, which also gets what `in_store` has returned.
    fn blocks_that(
        &self,
        key: ChunkKey,
        in_store: impl Fn(Word, BlockEpoch) -> bool,
        in_overlay: impl Fn(&Content, bool) -> bool,
    ) -> ChunkBits {
        let mut bits = [0; _];
        for (number, slot) in self.index.get(&key).into_iter().flat_map(|chunk| chunk.iter()) {
            let sector = &self.slots.used(slot).expect("it is indexed").sector;
            for (block, (word, epoch)) in sector.words.iter().zip(&sector.epochs).enumerate() {
                let is_set = in_store(*word, *epoch);
                set_bit(&mut bits, (number * SLOT_BLOCKS + block) as u16, is_set);
            }
        }
        for (blocks, content) in self.overlay.read(key, 0..CHUNK_BLOCKS) {
            for block in blocks {
                let is_set = in_overlay(&content, has_block(&bits, block));
                set_bit(&mut bits, block, is_set);
            }
        }
        bits
    }
}

/// How many of the first fates are one run: the same, and of blocks that are neighbours.
fn run_len(fates: &[Fate]) -> usize {
    let is_next = |(at, fate): &(usize, &Fate)| match (fates[0], **fate) {
        (Fate::Compared(first, _), Fate::Compared(other, _)) => {
            other.0 == first.0 + (at * BLOCK_BYTES) as u64 && *at < usize::from(REQUEST_BLOCKS)
        }
        (Fate::Compared(..), _) | (_, Fate::Compared(..)) => false,
        (first, other) => first == other,
    };
    fates.iter().enumerate().take_while(is_next).count()
}

/// Whether the bit of a block is set.
pub(crate) fn has_block(bits: &ChunkBits, block: u16) -> bool {
    bits[usize::from(block) / 8] & 1 << (block % 8) != 0
}

fn set_bit(bits: &mut ChunkBits, block: u16, is_set: bool) {
    let byte = &mut bits[usize::from(block) / 8];
    let bit = 1 << (block % 8);
    *byte = if is_set { *byte | bit } else { *byte & !bit };
}
