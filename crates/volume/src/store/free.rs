//! The free slots of a store. They are kept in frames of 64 neighbouring slots: a chunk has 64, so
//! that one that is written in sequence lies in sequence on the device.

use std::collections::BTreeSet;

use super::layout::SLOT_BLOCKS;
use crate::types::SlotIndex;

/// Slots of a frame, as many as a chunk has.
const FRAME_SLOTS: u32 = 64;
const _: () = assert!(FRAME_SLOTS as usize * SLOT_BLOCKS == crate::op::CHUNK_BLOCKS as usize);

/// The set of free slots.
#[derive(Debug)]
pub(super) struct FreeSlots {
    /// A bit for each free slot.
    frames: Vec<u64>,
    /// The frames of which some slots are free.
    partial: BTreeSet<u32>,
    /// The frames of which all slots are free.
    whole: BTreeSet<u32>,
    count: u32,
}

impl FreeSlots {
    /// The free slots of a store with `slots` slots, none yet.
    pub(super) fn new(slots: u32) -> Self {
        let frames = slots.div_ceil(FRAME_SLOTS) as usize;
        Self { frames: vec![0; frames], partial: BTreeSet::new(), whole: BTreeSet::new(), count: 0 }
    }

    /// The number of free slots.
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Whether a slot is free. There may be no such slot.
    pub(super) fn contains(&self, slot: SlotIndex) -> bool {
        let bits = self.frames.get((slot.0 / FRAME_SLOTS) as usize);
        bits.is_some_and(|bits| bits & bit(slot) != 0)
    }

    /// Adds a slot.
    pub(super) fn insert(&mut self, slot: SlotIndex) {
        assert!(!self.contains(slot), "slot {slot} is free already");
        self.change(slot);
        self.count += 1;
    }

    /// Takes `preferred` if it is free. Otherwise takes the lowest slot in a frame that is in use;
    /// but for the first slot of a chunk, which has no preferred one, the slot with this number in
    /// a frame that is all free.
    pub(super) fn take(&mut self, preferred: Option<SlotIndex>, number: u8) -> Option<SlotIndex> {
        let slot = match preferred {
            Some(slot) if self.contains(slot) => Some(slot),
            Some(_) => None,
            None => {
                let frame = self.whole.first();
                frame.map(|frame| SlotIndex(frame * FRAME_SLOTS + u32::from(number)))
            }
        };
        let slot = slot.or_else(|| self.lowest())?;
        self.change(slot);
        self.count -= 1;
        Some(slot)
    }

    fn lowest(&self) -> Option<SlotIndex> {
        let frame = *self.partial.first().or_else(|| self.whole.first())?;
        let bit = self.frames[frame as usize].trailing_zeros();
        Some(SlotIndex(frame * FRAME_SLOTS + bit))
    }

    fn change(&mut self, slot: SlotIndex) {
        let frame = slot.0 / FRAME_SLOTS;
        let bits = &mut self.frames[frame as usize];
        let before = *bits;
        *bits ^= bit(slot);
        let after = *bits;
        match before {
            0 => {}
            u64::MAX => drop(self.whole.remove(&frame)),
            _ if after == 0 || after == u64::MAX => drop(self.partial.remove(&frame)),
            _ => {}
        }
        match after {
            0 => {}
            u64::MAX => drop(self.whole.insert(frame)),
            _ if before == 0 || before == u64::MAX => drop(self.partial.insert(frame)),
            _ => {}
        }
    }
}

fn bit(slot: SlotIndex) -> u64 {
    1 << (slot.0 % FRAME_SLOTS)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(slots: u32) -> FreeSlots {
        let mut free = FreeSlots::new(slots);
        (0..slots).for_each(|slot| free.insert(SlotIndex(slot)));
        free
    }

    #[test]
    fn a_chunk_lies_in_sequence_and_chunks_share_a_frame_only_when_none_is_left() {
        let mut free = all(3 * FRAME_SLOTS + 8);
        assert_eq!(free.take(None, 3), Some(SlotIndex(3)));
        assert_eq!(free.take(Some(SlotIndex(4)), 4), Some(SlotIndex(4)));
        // A preferred slot that is taken or beyond the end is replaced, in a frame that is in use.
        assert_eq!(free.take(Some(SlotIndex(3)), 9), Some(SlotIndex(0)));
        assert_eq!(free.take(Some(SlotIndex(1000)), 9), Some(SlotIndex(1)));
        // Other chunks take other frames, and then the lowest slot.
        assert_eq!(free.take(None, 0), Some(SlotIndex(64)));
        assert_eq!(free.take(None, 63), Some(SlotIndex(191)));
        assert_eq!(free.take(None, 9), Some(SlotIndex(2)));
        assert_eq!(free.count(), 3 * FRAME_SLOTS + 8 - 7);
        // Without a frame in use, one that is all free is begun.
        let mut free = all(FRAME_SLOTS);
        assert_eq!(free.take(Some(SlotIndex(1000)), 9), Some(SlotIndex(0)));
    }

    proptest! {
        #[test]
        fn each_free_slot_is_taken_once(
            slots in 1..300_u32,
            steps in prop::collection::vec((any::<bool>(), any::<u16>(), 0..64_u8), 1..300),
        ) {
            let mut free = all(slots);
            let mut expected: BTreeSet<u32> = (0..slots).collect();
            for (is_take, slot, number) in steps {
                let slot = SlotIndex(u32::from(slot) % slots);
                if is_take {
                    let preferred = number.is_multiple_of(2).then_some(slot);
                    match free.take(preferred, number) {
                        Some(taken) => prop_assert!(expected.remove(&taken.0)),
                        None => prop_assert!(expected.is_empty()),
                    }
                } else if expected.insert(slot.0) {
                    free.insert(slot);
                }
                prop_assert_eq!(free.count() as usize, expected.len());
                prop_assert_eq!(free.contains(slot), expected.contains(&slot.0));
            }
            while let Some(taken) = free.take(None, 0) {
                prop_assert!(expected.remove(&taken.0));
            }
            prop_assert!(expected.is_empty());
        }
    }
}
