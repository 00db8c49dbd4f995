//! The state of each slot, and the sectors as the next checkpoint writes them.
//! `docs/format/volume-store.md`, sections 4 and 5.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use uuid::Uuid;

use super::free::FreeSlots;
use super::layout::{Layout, PAGE_SECTORS, SECTOR_BYTES, SLOT_BLOCKS};
use super::sector::{Address, BlockEpoch, Sector, Word, encode_lost};
use crate::op::BLOCK_BYTES;
use crate::types::{CheckpointNumber, SlotIndex};

/// What a slot is.
#[derive(Debug)]
enum Slot {
    Free,
    /// Reserved or used.
    Used(Box<Used>),
    /// Not used again before the checkpoint that covers the freeing is complete. The sector of an
    /// owner that is gone stays as it is until then.
    Freed(Option<Box<Used>>),
    /// Its sector was damaged. The number is that of the checkpoint that has written that.
    Lost(CheckpointNumber),
}

/// A slot that is reserved or used.
#[derive(Debug)]
pub(super) struct Used {
    /// The sector, with the number of the checkpoint that has written it, 0 if none has.
    pub(super) sector: Sector,
    /// The last change of a word ([`Slots::stamp`]); 0 if no word was set since the reservation.
    pub(super) stamp: u64,
    /// The opening could not decide whether the owner still exists.
    pub(super) is_undecided: bool,
    /// Writes in flight.
    in_flight: u16,
    /// The owner is gone; the slot is freed when its last write has completed.
    is_leaving: bool,
}

/// A page of sectors to be written: its number, and a bit for each sector that has changed.
pub(super) type DirtyPage = (u32, u8);

/// All slots of a store.
#[derive(Debug)]
pub(super) struct Slots {
    layout: Layout,
    store_id: Uuid,
    slots: Vec<Slot>,
    free: FreeSlots,
    /// For each page of sectors, a bit for each sector that the next checkpoint writes.
    dirty: Vec<u8>,
    /// The slots that are free when a checkpoint is complete, by its number.
    freed: BTreeMap<CheckpointNumber, Vec<SlotIndex>>,
    /// The checkpoint that covers what is freed now.
    covering: CheckpointNumber,
    /// A freed slot is free at once: a broken rule.
    frees_at_once: bool,
    stamp: u64,
    lost: u32,
}

impl Slots {
    /// The slots of a store, all free.
    pub(super) fn new(
        layout: Layout,
        store_id: Uuid,
        covering: CheckpointNumber,
        frees_at_once: bool,
    ) -> Self {
        let count = layout.slots();
        let mut free = FreeSlots::new(count);
        (0..count).for_each(|slot| free.insert(SlotIndex(slot)));
        Self {
            layout,
            store_id,
            slots: (0..count).map(|_| Slot::Free).collect(),
            free,
            dirty: vec![0; (count / PAGE_SECTORS) as usize],
            freed: BTreeMap::new(),
            covering,
            frees_at_once,
            stamp: 0,
            lost: 0,
        }
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The number of free slots.
    pub(super) fn free_count(&self) -> u32 {
        self.free.count()
    }

    /// The number of slots that a checkpoint will free.
    pub(super) fn freed_count(&self) -> usize {
        self.freed.values().map(Vec::len).sum()
    }

    /// The number of slots whose sector was damaged.
    pub(super) fn lost_count(&self) -> u32 {
        self.lost
    }

    /// The number of changes of words so far.
    pub(super) fn stamp(&self) -> u64 {
        self.stamp
    }

    /// A slot that is reserved or used.
    pub(super) fn used(&self, slot: SlotIndex) -> Option<&Used> {
        match &self.slots[slot.0 as usize] {
            Slot::Used(used) => Some(used),
            _ => None,
        }
    }

    fn used_mut(&mut self, slot: SlotIndex) -> Option<&mut Used> {
        match &mut self.slots[slot.0 as usize] {
            Slot::Used(used) => Some(used),
            _ => None,
        }
    }

    // -- At the opening

    fn take_free(&mut self, slot: SlotIndex, state: Slot) {
        let taken = self.free.take(Some(slot), 0);
        assert_eq!(taken, Some(slot), "an opening finds each slot once");
        self.slots[slot.0 as usize] = state;
    }

    /// Notes a slot that is in use.
    pub(super) fn found(&mut self, slot: SlotIndex, sector: Sector, is_undecided: bool) {
        self.stamp += 1;
        let stamp = self.stamp;
        let used = Used { sector, stamp, is_undecided, in_flight: 0, is_leaving: false };
        self.take_free(slot, Slot::Used(Box::new(used)));
    }

    /// Notes a slot whose sector is damaged; the next checkpoint writes that.
    pub(super) fn found_lost(&mut self, slot: SlotIndex) {
        self.take_free(slot, Slot::Lost(self.covering));
        self.lost += 1;
        self.mark_dirty(slot);
    }

    /// Notes a slot that is free after the next checkpoint, which leaves `sector` as it is, or
    /// writes zeros.
    pub(super) fn found_freed(&mut self, slot: SlotIndex, sector: Option<Sector>) {
        match sector {
            Some(sector) => {
                self.found(slot, sector, false);
                self.free_owner_gone(slot);
            }
            None => {
                self.take_free(slot, Slot::Freed(None));
                self.freed.entry(self.covering).or_default().push(slot);
                self.mark_dirty(slot);
            }
        }
    }

    /// Frees a slot that was found, because another one has its address.
    pub(super) fn free_loser(&mut self, slot: SlotIndex) {
        self.mark_dirty(slot);
        self.set_freed(slot, None);
    }

    /// Notes that the owner of a slot exists.
    pub(super) fn set_decided(&mut self, slot: SlotIndex) {
        if let Some(used) = self.used_mut(slot) {
            used.is_undecided = false;
        }
    }

    // -- Use

    /// Reserves a slot, near `preferred` if that is possible.
    pub(super) fn reserve(
        &mut self,
        address: Address,
        preferred: Option<SlotIndex>,
    ) -> Option<SlotIndex> {
        let slot = self.free.take(preferred, address.number.0)?;
        let sector = Sector {
            address,
            checkpoint: CheckpointNumber(0),
            words: [Word::ABSENT; SLOT_BLOCKS],
            epochs: [BlockEpoch::default(); SLOT_BLOCKS],
        };
        let used = Used { sector, stamp: 0, is_undecided: false, in_flight: 0, is_leaving: false };
        self.slots[slot.0 as usize] = Slot::Used(Box::new(used));
        Some(slot)
    }

    /// Sets the words of neighbouring blocks. The sector is dirty, even if it is the same.
    pub(super) fn set_words(
        &mut self,
        slot: SlotIndex,
        first: usize,
        words: impl IntoIterator<Item = Word>,
        epoch: BlockEpoch,
    ) {
        self.stamp += 1;
        let stamp = self.stamp;
        let used = self.used_mut(slot).expect("words are set in slots that are used");
        used.stamp = stamp;
        for (block, word) in (first..).zip(words) {
            used.sector.words[block] = word;
            used.sector.epochs[block] = epoch;
        }
        self.mark_dirty(slot);
    }

    /// Notes that a write to neighbouring slots was submitted.
    pub(super) fn submitted(&mut self, slots: Range<u32>) {
        for slot in slots {
            self.used_mut(SlotIndex(slot)).expect("only used slots are written").in_flight += 1;
        }
    }

    /// Notes that a write to neighbouring slots has completed.
    pub(super) fn completed(&mut self, slots: Range<u32>) {
        for slot in slots.map(SlotIndex) {
            let used = self.used_mut(slot).expect("a slot with writes in flight is not freed");
            used.in_flight -= 1;
            if used.in_flight == 0 && used.is_leaving {
                self.free_owner_gone(slot);
            }
        }
    }

    /// Frees a slot whose words are all 0, and that no applied block needs. Returns whether that
    /// is so.
    pub(super) fn free_empty(&mut self, slot: SlotIndex) -> bool {
        let used = self.used(slot).expect("the caller has found it in the index");
        if used.in_flight > 0 || used.sector.words.iter().any(|word| *word != Word::ABSENT) {
            return false;
        }
        if used.stamp == 0 {
            self.slots[slot.0 as usize] = Slot::Free;
            self.free.insert(slot);
        } else {
            self.mark_dirty(slot);
            self.set_freed(slot, None);
        }
        true
    }

    /// Frees a slot whose owner is gone, when no write to it is in flight. Its sector is not
    /// written.
    pub(super) fn free_owner_gone(&mut self, slot: SlotIndex) {
        let state = std::mem::replace(&mut self.slots[slot.0 as usize], Slot::Free);
        let Slot::Used(mut used) = state else { panic!("slot {slot} is {state:?}") };
        if used.in_flight > 0 {
            used.is_leaving = true;
            self.slots[slot.0 as usize] = Slot::Used(used);
        } else if used.stamp == 0 {
            self.free.insert(slot);
        } else {
            self.set_freed(slot, Some(used));
        }
    }

    fn set_freed(&mut self, slot: SlotIndex, kept: Option<Box<Used>>) {
        if self.frees_at_once {
            self.slots[slot.0 as usize] = Slot::Free;
            self.free.insert(slot);
            return;
        }
        self.slots[slot.0 as usize] = Slot::Freed(kept);
        self.freed.entry(self.covering).or_default().push(slot);
    }

    fn mark_dirty(&mut self, slot: SlotIndex) {
        self.dirty[(slot.0 / PAGE_SECTORS) as usize] |= 1 << (slot.0 % PAGE_SECTORS);
    }

    // -- Checkpoints

    /// Takes the pages with dirty sectors: what becomes dirty from now on belongs to the next
    /// checkpoint, and what is freed from now on is covered by it.
    pub(super) fn begin_sectors(&mut self) -> VecDeque<DirtyPage> {
        self.covering.0 += 1;
        let pages = (0..).zip(&mut self.dirty).filter(|(_, dirty)| **dirty != 0);
        pages.map(|(page, dirty)| (page, std::mem::take(dirty))).collect()
    }

    /// Frees what was freed before the sectors of checkpoint `complete` were written.
    pub(super) fn release(&mut self, complete: CheckpointNumber) {
        let behind = self.freed.split_off(&CheckpointNumber(complete.0 + 1));
        for slot in std::mem::replace(&mut self.freed, behind).into_values().flatten() {
            self.slots[slot.0 as usize] = Slot::Free;
            self.free.insert(slot);
        }
    }

    /// Encodes a page of sectors. Those that have changed get the number of the checkpoint.
    pub(super) fn encode_page(
        &mut self,
        (page, changed): DirtyPage,
        checkpoint: CheckpointNumber,
        out: &mut [u8],
    ) {
        let (sectors, _) = out.as_chunks_mut::<SECTOR_BYTES>();
        for (sector, out) in (0..PAGE_SECTORS).zip(sectors) {
            let slot = SlotIndex(page * PAGE_SECTORS + sector);
            let is_changed = changed & 1 << sector != 0;
            match &mut self.slots[slot.0 as usize] {
                Slot::Used(used) | Slot::Freed(Some(used)) => {
                    if is_changed {
                        used.sector.checkpoint = checkpoint;
                    }
                    // A sector that no checkpoint was to write yet stays zero.
                    let is_written = used.sector.checkpoint.0 > 0;
                    if is_written && used.sector.words.iter().any(|word| *word != Word::ABSENT) {
                        used.sector.encode(self.store_id, slot, out);
                    } else {
                        out.fill(0);
                    }
                }
                Slot::Lost(written) => {
                    if is_changed {
                        *written = checkpoint;
                    }
                    encode_lost(*written, self.store_id, slot, out);
                }
                Slot::Free | Slot::Freed(None) => out.fill(0),
            }
        }
    }

    /// Panics unless each slot is in one state, and is in the index if it is used.
    #[cfg(test)]
    pub(super) fn check(&self, indexed: &BTreeMap<SlotIndex, Address>) {
        let freed: Vec<SlotIndex> = self.freed.values().flatten().copied().collect();
        for (slot, state) in (0..).map(SlotIndex).zip(&self.slots) {
            let is_free = matches!(state, Slot::Free);
            assert_eq!(self.free.contains(slot), is_free, "{slot}: {state:?}");
            let times_freed = freed.iter().filter(|other| **other == slot).count();
            assert_eq!(times_freed, usize::from(matches!(state, Slot::Freed(_))), "{slot}");
            let address = match state {
                Slot::Used(used) if !used.is_leaving => Some(used.sector.address),
                _ => None,
            };
            assert_eq!(indexed.get(&slot).copied(), address, "{slot}");
        }
    }
}

/// Bytes of a page of sectors.
pub(super) const PAGE_OF_SECTORS_BYTES: usize = PAGE_SECTORS as usize * SECTOR_BYTES;
const _: () = assert!(PAGE_OF_SECTORS_BYTES == BLOCK_BYTES);
