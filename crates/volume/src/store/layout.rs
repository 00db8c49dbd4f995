//! Sizes and positions of the areas of a store. `docs/format/volume-store.md`, section 2.

use alluvium_device::ByteSize;
use alluvium_wal::DeviceOffset;

use crate::op::BLOCK_BYTES;
use crate::types::SlotIndex;

const MIB: u64 = 1 << 20;

/// Bytes of a slot.
pub const SLOT_BYTES: u64 = 256 << 10;
/// Blocks of a slot.
pub const SLOT_BLOCKS: usize = 64;
const _: () = assert!(SLOT_BLOCKS * BLOCK_BYTES == SLOT_BYTES as usize);
/// Bytes of a sector, which describes a slot.
pub const SECTOR_BYTES: usize = 512;
/// Sectors of a page, the unit in which they are written.
pub const PAGE_SECTORS: u32 = 8;
/// Positions of the superblock copies.
pub const SUPERBLOCK_AT: [DeviceOffset; 2] = [DeviceOffset(0), DeviceOffset(32 << 10)];
/// Bytes of a superblock copy, with the zeros at its end.
pub const SUPERBLOCK_BYTES: usize = 4096;
/// Start of the sectors.
pub const META_START: DeviceOffset = DeviceOffset(MIB);
/// Least number of bytes that a store uses.
pub const MIN_CAPACITY_BYTES: u64 = 4 * MIB;
/// Greatest number of bytes that a store can grow to.
pub const MAX_CAPACITY_BYTES: u64 = 16 << 40;

/// How many times its capacity a new store can grow to by default.
const DEFAULT_GROWTH: u64 = 4;

/// Positions in a store, derived from the number of bytes that it uses and can grow to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    capacity_bytes: u64,
    max_capacity_bytes: u64,
    data_start: u64,
    slots: u32,
}

/// Why sizes are not those of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A size is not a multiple of 1 MiB.
    #[error("the {field} of {} is not a multiple of 1MiB", ByteSize(*bytes))]
    Unaligned {
        /// Which size.
        field: &'static str,
        /// Its value.
        bytes: u64,
    },
    /// The capacity is below the least one.
    #[error(
        "the capacity of {} is below the smallest of {}",
        ByteSize(*.0),
        ByteSize(MIN_CAPACITY_BYTES)
    )]
    TooSmall(u64),
    /// The store could grow beyond the bound of the format.
    #[error(
        "the maximum capacity of {} is above the largest of {}",
        ByteSize(*.0),
        ByteSize(MAX_CAPACITY_BYTES)
    )]
    TooLarge(u64),
    /// The store is already larger than it can grow to.
    #[error(
        "the capacity of {} is above the maximum of {}",
        ByteSize(*capacity_bytes),
        ByteSize(*max_capacity_bytes)
    )]
    AboveMaximum {
        /// The capacity.
        capacity_bytes: u64,
        /// What it can grow to.
        max_capacity_bytes: u64,
    },
    /// The sectors for the maximum capacity leave no space for data.
    #[error(
        "a capacity of {} has no space for data: a maximum of {} takes at least {}",
        ByteSize(*capacity_bytes),
        ByteSize(*max_capacity_bytes),
        ByteSize(*least_bytes)
    )]
    NoSlots {
        /// The capacity.
        capacity_bytes: u64,
        /// What it can grow to.
        max_capacity_bytes: u64,
        /// The least capacity with this maximum.
        least_bytes: u64,
    },
}

impl Layout {
    /// The layout of a store that uses `capacity_bytes` and can grow to `max_capacity_bytes`.
    ///
    /// # Errors
    /// A size is out of its bounds, or there is no space for a page of slots.
    pub fn new(capacity_bytes: u64, max_capacity_bytes: u64) -> Result<Self, LayoutError> {
        let sizes = [("capacity", capacity_bytes), ("maximum capacity", max_capacity_bytes)];
        for (field, bytes) in sizes {
            if !bytes.is_multiple_of(MIB) {
                return Err(LayoutError::Unaligned { field, bytes });
            }
        }
        if capacity_bytes < MIN_CAPACITY_BYTES {
            return Err(LayoutError::TooSmall(capacity_bytes));
        }
        if max_capacity_bytes > MAX_CAPACITY_BYTES {
            return Err(LayoutError::TooLarge(max_capacity_bytes));
        }
        if capacity_bytes > max_capacity_bytes {
            return Err(LayoutError::AboveMaximum { capacity_bytes, max_capacity_bytes });
        }
        let meta_bytes = (max_capacity_bytes / SECTOR_BYTES as u64).next_multiple_of(MIB);
        let data_start = META_START.0 + meta_bytes;
        let page_bytes = u64::from(PAGE_SECTORS) * SLOT_BYTES;
        let pages = capacity_bytes.saturating_sub(data_start) / page_bytes;
        if pages == 0 {
            let least_bytes = data_start + page_bytes;
            return Err(LayoutError::NoSlots { capacity_bytes, max_capacity_bytes, least_bytes });
        }
        let slots = u32::try_from(pages).expect("a capacity of 16 TiB") * PAGE_SECTORS;
        Ok(Self { capacity_bytes, max_capacity_bytes, data_start, slots })
    }

    /// The layout of a new store on a device, which can grow to `max_capacity_bytes`, by default
    /// four times the capacity.
    ///
    /// # Errors
    /// As for [`Layout::new`].
    pub fn for_device(
        device_bytes: u64,
        max_capacity_bytes: Option<u64>,
    ) -> Result<Self, LayoutError> {
        let capacity_bytes = (device_bytes / MIB * MIB).min(MAX_CAPACITY_BYTES);
        let default = (capacity_bytes * DEFAULT_GROWTH).min(MAX_CAPACITY_BYTES);
        Self::new(capacity_bytes, max_capacity_bytes.unwrap_or(default))
    }

    /// The layout after growth to the size of the device, as far as the maximum capacity allows.
    /// It equals this one if there is nothing to grow to.
    pub fn grown(&self, device_bytes: u64) -> Self {
        let device_bytes = (device_bytes / MIB * MIB).min(self.max_capacity_bytes);
        let capacity_bytes = device_bytes.max(self.capacity_bytes);
        Self::new(capacity_bytes, self.max_capacity_bytes).expect("a larger store has a layout")
    }

    /// Bytes of the device that the store uses.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Bytes that the store can grow to.
    pub fn max_capacity_bytes(&self) -> u64 {
        self.max_capacity_bytes
    }

    /// Bytes of the area of sectors.
    pub fn meta_bytes(&self) -> u64 {
        self.data_start - META_START.0
    }

    /// Start of the slots.
    pub fn data_start(&self) -> DeviceOffset {
        DeviceOffset(self.data_start)
    }

    /// Number of slots, a multiple of [`PAGE_SECTORS`].
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Position of a slot's sector.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn sector_at(&self, slot: SlotIndex) -> DeviceOffset {
        self.check(slot);
        DeviceOffset(META_START.0 + SECTOR_BYTES as u64 * u64::from(slot.0))
    }

    /// Position of a block of a slot.
    ///
    /// # Panics
    /// If there is no such slot or block.
    pub fn block_at(&self, slot: SlotIndex, block: usize) -> DeviceOffset {
        self.check(slot);
        assert!(
            block < SLOT_BLOCKS,
            "a slot has {SLOT_BLOCKS} blocks, and {block} is none of them"
        );
        let start = self.data_start + SLOT_BYTES * u64::from(slot.0);
        DeviceOffset(start + (BLOCK_BYTES * block) as u64)
    }

    fn check(&self, slot: SlotIndex) {
        assert!(slot.0 < self.slots, "the store has {} slots, and not slot {slot}", self.slots);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;
    const TIB: u64 = 1 << 40;

    /// The table of the document.
    #[test]
    fn the_examples_of_the_document_hold() {
        let table = [
            (4 * MIB, 16 * MIB, MIB, 2_097_152, 8, 3_932_160),
            (GIB, 4 * GIB, 8 * MIB, 9_437_184, 4_056, 1_072_431_104),
            (99_999_547_392, 399_999_238_144, 746 * MIB, 783_286_272, 378_480, 99_999_285_248),
            (TIB, 4 * TIB, 8 * GIB, 8_590_983_168, 4_161_528, 1_099_510_317_056),
            (16 * TIB, 16 * TIB, 32 * GIB, 34_360_786_944, 66_977_784, 17_592_184_733_696),
        ];
        for (capacity, max, meta_bytes, data_start, slots, last) in table {
            let layout = Layout::new(capacity, max).unwrap();
            assert_eq!((layout.capacity_bytes(), layout.max_capacity_bytes()), (capacity, max));
            assert_eq!(layout.meta_bytes(), meta_bytes, "{capacity}");
            assert_eq!(layout.data_start().0, data_start, "{capacity}");
            assert_eq!(layout.slots(), slots, "{capacity}");
            assert_eq!(layout.block_at(SlotIndex(slots - 1), 0).0, last, "{capacity}");
        }
    }

    #[test]
    fn sizes_out_of_bounds_are_refused_with_their_reason() {
        let refusal = |capacity, max| Layout::new(capacity, max).unwrap_err();
        let unaligned = |field, bytes| LayoutError::Unaligned { field, bytes };
        assert_eq!(refusal(4 * MIB + 512, 16 * MIB), unaligned("capacity", 4 * MIB + 512));
        assert_eq!(refusal(4 * MIB, 16 * MIB - 1), unaligned("maximum capacity", 16 * MIB - 1));
        assert_eq!(refusal(3 * MIB, 16 * MIB), LayoutError::TooSmall(3 * MIB));
        assert_eq!(refusal(0, 0), LayoutError::TooSmall(0));
        assert_eq!(refusal(TIB, 16 * TIB + MIB), LayoutError::TooLarge(16 * TIB + MIB));
        let largest = u64::MAX / MIB * MIB;
        assert_eq!(refusal(largest, largest), LayoutError::TooLarge(largest));
        assert_eq!(
            refusal(8 * MIB, 7 * MIB),
            LayoutError::AboveMaximum { capacity_bytes: 8 * MIB, max_capacity_bytes: 7 * MIB }
        );
        let least_bytes = 32 * GIB + 3 * MIB;
        assert_eq!(
            refusal(least_bytes - MIB, 16 * TIB),
            LayoutError::NoSlots {
                capacity_bytes: least_bytes - MIB,
                max_capacity_bytes: 16 * TIB,
                least_bytes,
            }
        );
        assert_eq!(Layout::new(least_bytes, 16 * TIB).unwrap().slots(), 8);
    }

    #[test]
    fn a_new_store_takes_the_device_and_can_grow_to_four_times_its_size() {
        let sizes = |device_bytes, max| {
            let layout = Layout::for_device(device_bytes, max).unwrap();
            (layout.capacity_bytes(), layout.max_capacity_bytes())
        };
        assert_eq!(sizes(GIB + MIB - 1, None), (GIB, 4 * GIB));
        assert_eq!(sizes(GIB, Some(GIB)), (GIB, GIB));
        assert_eq!(sizes(5 * TIB, None), (5 * TIB, 16 * TIB));
        assert_eq!(sizes(u64::MAX, None), (16 * TIB, 16 * TIB));
        assert_eq!(Layout::for_device(MIB, None), Err(LayoutError::TooSmall(MIB)));
    }

    proptest! {
        /// Areas follow one another without overlap, and end within the capacity; growth moves
        /// nothing.
        #[test]
        fn areas_are_disjoint_and_growth_moves_nothing(
            capacity_mib in 4..(16_u64 << 20),
            extra_mib in 0..(16_u64 << 20),
            device_bytes: u64,
            slot: prop::sample::Index,
        ) {
            let max_mib = (capacity_mib + extra_mib).min(16 << 20);
            let Ok(layout) = Layout::new(capacity_mib * MIB, max_mib * MIB) else {
                // The least capacity depends on the maximum only, so more space helps.
                let bytes = max_mib * MIB;
                prop_assert!(max_mib > 4 * 100 && Layout::new(bytes, bytes).is_ok());
                return Ok(());
            };
            let slot = SlotIndex(slot.index(layout.slots() as usize) as u32);
            let last = SlotIndex(layout.slots() - 1);
            prop_assert!(layout.slots().is_multiple_of(PAGE_SECTORS) && layout.slots() < 1 << 26);
            prop_assert!(layout.sector_at(last).0 + 512 <= layout.data_start().0);
            let end = layout.block_at(last, SLOT_BLOCKS - 1).0 + BLOCK_BYTES as u64;
            prop_assert!(end <= layout.capacity_bytes());
            prop_assert!(layout.capacity_bytes() - end < 2 * MIB, "another page has space");

            let grown = layout.grown(device_bytes);
            prop_assert!(grown.capacity_bytes() >= layout.capacity_bytes());
            prop_assert!(grown.slots() >= layout.slots());
            prop_assert_eq!(grown.sector_at(slot), layout.sector_at(slot));
            prop_assert_eq!(grown.block_at(slot, 63), layout.block_at(slot, 63));
        }
    }
}
