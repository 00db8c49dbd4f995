//! Sectors: what a slot holds, with the checksums and epochs of its blocks.
//! `docs/format/volume-store.md`, section 4.

use uuid::Uuid;

use super::error::{Ahead, StoreError};
use super::layout::{SECTOR_BYTES, SLOT_BLOCKS};
use super::{field, is_zero, put, u32_at, u64_at};
use crate::op::{CHUNK_BLOCKS, MAX_CHUNKS};
use crate::types::{
    BlockIndex, CheckpointNumber, ChunkIndex, GroupId, Layer, PeerId, SlotIndex, SlotNumber,
    VolumeId,
};

const VERSION: u16 = 1;
const MAGIC: [u8; 4] = *b"ALVS";
/// Flag of a sector whose bytes were damaged.
const LOST: u8 = 1;

const VERSION_AT: usize = 4;
const NUMBER_AT: usize = 6;
const FLAGS_AT: usize = 7;
const GROUP_AT: usize = 8;
const VOLUME_AT: usize = 16;
const CHUNK_AT: usize = 20;
const LAYER_AT: usize = 24;
const CHECKPOINT_AT: usize = 28;
const WORDS_AT: usize = 32;
const EPOCHS_AT: usize = WORDS_AT + 4 * SLOT_BLOCKS;
const PEER_AT: usize = EPOCHS_AT + 3 * SLOT_BLOCKS;
const RESERVED_AT: usize = PEER_AT + 8;
const CRC_AT: usize = SECTOR_BYTES - 4;
const _: () = assert!(EPOCHS_AT == 288 && PEER_AT == 480 && RESERVED_AT + 20 == CRC_AT);

/// Returns what identifies a block, to be combined with the checksum of its data. `block` is its
/// number in the chunk.
pub fn mix(group: GroupId, volume: VolumeId, chunk: ChunkIndex, block: BlockIndex) -> u32 {
    let mut bytes = [0; 20];
    put(&mut bytes, 0, &group.0.to_le_bytes());
    put(&mut bytes, 8, &volume.0.to_le_bytes());
    put(&mut bytes, 12, &chunk.0.to_le_bytes());
    put(&mut bytes, 16, &u32::from(block.0).to_le_bytes());
    crc32c::crc32c(&bytes)
}

/// What a sector states of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Word(u32);

impl Word {
    /// The slot does not have the block: what is below decides.
    pub const ABSENT: Self = Self(0);
    /// The block is zeros, and has no data on the device.
    pub const ZEROS: Self = Self(1);

    /// The word of a block with data. `crc` is the CRC32C of the data, `mix` that of its identity
    /// ([`mix`]).
    pub fn of_data(crc: u32, mix: u32) -> Self {
        match crc ^ mix {
            0 => Self(2),
            1 => Self(3),
            word => Self(word),
        }
    }

    /// Whether the block has data on the device.
    pub fn has_data(self) -> bool {
        self != Self::ABSENT && self != Self::ZEROS
    }
}

/// The checkpoint after the one that was complete when a word was last set, modulo 2^24.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockEpoch([u8; 3]);

/// The number of checkpoints after which epochs repeat.
const EPOCHS: u64 = 1 << 24;

impl BlockEpoch {
    /// The epoch of a word that is set while `complete` is the last complete checkpoint.
    pub fn after(complete: CheckpointNumber) -> Self {
        let [a, b, c, ..] = (complete.0 + 1).to_le_bytes();
        Self([a, b, c])
    }

    /// How many checkpoints ago the word was set at least, while `complete` is the last complete
    /// one. Never more than the true age: an epoch that has wrapped around looks younger.
    pub(super) fn age(self, complete: CheckpointNumber) -> u64 {
        let [a, b, c] = self.0;
        let epoch = u64::from(u32::from_le_bytes([a, b, c, 0]));
        (complete.0 + 1).wrapping_sub(epoch) % EPOCHS
    }

    /// Whether the block may have changed above the base of checkpoint `since`. `complete` is the
    /// last complete checkpoint.
    ///
    /// It never returns false for a block that has. Ages are below 2^24, so every block is needed
    /// if `since` is that many checkpoints ago. A number `since` above `complete` + 1, which
    /// no checkpoint has, makes every block needed.
    pub fn is_needed(self, since: CheckpointNumber, complete: CheckpointNumber) -> bool {
        let distance = (complete.0 + 1).checked_sub(since.0);
        distance.is_none_or(|distance| self.age(complete) <= distance)
    }
}

/// What a slot holds blocks of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// The group.
    pub group: GroupId,
    /// The replica of the group that the slot belongs to.
    pub peer: PeerId,
    /// The volume.
    pub volume: VolumeId,
    /// The layer of the volume.
    pub layer: Layer,
    /// The chunk of the volume.
    pub chunk: ChunkIndex,
    /// The part of the chunk.
    pub number: SlotNumber,
}

impl Address {
    /// The number in its chunk of block `block` of the slot.
    pub fn block(&self, block: usize) -> BlockIndex {
        assert!(
            block < SLOT_BLOCKS,
            "a slot has {SLOT_BLOCKS} blocks, and {block} is none of them"
        );
        BlockIndex(u16::from(self.number.0) * SLOT_BLOCKS as u16 + block as u16)
    }

    /// What identifies block `block` of the slot ([`mix`]).
    pub fn mix(&self, block: usize) -> u32 {
        mix(self.group, self.volume, self.chunk, self.block(block))
    }

    /// Whether all fields keep to their bounds.
    fn is_in_bounds(&self) -> bool {
        self.group.0 > 0
            && self.peer.0 > 0
            && self.volume.0 > 0
            && self.chunk.0 < MAX_CHUNKS
            && usize::from(self.number.0) < usize::from(CHUNK_BLOCKS) / SLOT_BLOCKS
    }
}

/// What a slot holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sector {
    /// The blocks that the slot is for.
    pub address: Address,
    /// The checkpoint that has written the sector.
    pub checkpoint: CheckpointNumber,
    /// The word of each block, at least one of which is not [`Word::ABSENT`].
    pub words: [Word; SLOT_BLOCKS],
    /// The epoch of each block.
    pub epochs: [BlockEpoch; SLOT_BLOCKS],
}

impl Sector {
    /// Encodes the sector of slot `slot`.
    ///
    /// # Panics
    /// If a field is out of its bounds, or the slot has no block: the sector of a free slot is
    /// zeros.
    pub fn encode(&self, store_id: Uuid, slot: SlotIndex, out: &mut [u8; SECTOR_BYTES]) {
        let Address { group, peer, volume, layer, chunk, number } = self.address;
        assert!(self.address.is_in_bounds(), "{:?}", self.address);
        assert!(self.words.iter().any(|word| *word != Word::ABSENT), "slot {slot} has no block");
        begin(out, 0, self.checkpoint);
        out[NUMBER_AT] = number.0;
        put(out, GROUP_AT, &group.0.to_le_bytes());
        put(out, VOLUME_AT, &volume.0.to_le_bytes());
        put(out, CHUNK_AT, &chunk.0.to_le_bytes());
        put(out, LAYER_AT, &layer.0.to_le_bytes());
        for (block, word) in self.words.iter().enumerate() {
            put(out, WORDS_AT + 4 * block, &word.0.to_le_bytes());
        }
        for (block, epoch) in self.epochs.iter().enumerate() {
            put(out, EPOCHS_AT + 3 * block, &epoch.0);
        }
        put(out, PEER_AT, &peer.0.to_le_bytes());
        end(out, store_id, slot);
    }

    /// Reads the fields of a sector whose magic, checksum, version and flags are right. `None` if
    /// one is out of its bounds.
    fn read(bytes: &[u8; SECTOR_BYTES], checkpoint: CheckpointNumber) -> Option<Self> {
        let address = Address {
            group: GroupId(u64_at(bytes, GROUP_AT)),
            peer: PeerId(u64_at(bytes, PEER_AT)),
            volume: VolumeId(u32_at(bytes, VOLUME_AT)),
            layer: Layer(u32_at(bytes, LAYER_AT)),
            chunk: ChunkIndex(u32_at(bytes, CHUNK_AT)),
            number: SlotNumber(bytes[NUMBER_AT]),
        };
        let words = std::array::from_fn(|block| Word(u32_at(bytes, WORDS_AT + 4 * block)));
        let epochs = std::array::from_fn(|block| BlockEpoch(field(bytes, EPOCHS_AT + 3 * block)));
        let has_block = words.iter().any(|word| *word != Word::ABSENT);
        (address.is_in_bounds() && has_block).then_some(Self { address, checkpoint, words, epochs })
    }
}

/// Encodes the sector of a slot that is out of use, because its sector was damaged.
pub fn encode_lost(
    checkpoint: CheckpointNumber,
    store_id: Uuid,
    slot: SlotIndex,
    out: &mut [u8; SECTOR_BYTES],
) {
    begin(out, LOST, checkpoint);
    end(out, store_id, slot);
}

fn begin(out: &mut [u8; SECTOR_BYTES], flags: u8, checkpoint: CheckpointNumber) {
    let checkpoint = u32::try_from(checkpoint.0).expect("checkpoint numbers are below 2^32");
    assert!(checkpoint > 0, "the first checkpoint has number 1");
    out.fill(0);
    put(out, 0, &MAGIC);
    put(out, VERSION_AT, &VERSION.to_le_bytes());
    out[FLAGS_AT] = flags;
    put(out, CHECKPOINT_AT, &checkpoint.to_le_bytes());
}

fn end(out: &mut [u8; SECTOR_BYTES], store_id: Uuid, slot: SlotIndex) {
    let crc = checksum(out, store_id, slot);
    put(out, CRC_AT, &crc.to_le_bytes());
}

/// The checksum of a sector, which begins with its store and its place.
fn checksum(bytes: &[u8; SECTOR_BYTES], store_id: Uuid, slot: SlotIndex) -> u32 {
    let crc = crc32c::crc32c(store_id.as_bytes());
    let crc = crc32c::crc32c_append(crc, &slot.0.to_le_bytes());
    crc32c::crc32c_append(crc, &bytes[..CRC_AT])
}

/// What is at the position of a sector.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "a sector is decoded and taken apart at once")]
pub enum SectorState {
    /// Zeros: the slot is free.
    Free,
    /// The slot is in use, as far as the sector alone can tell.
    Valid(Sector),
    /// The slot is out of use: its sector was damaged when that checkpoint was written.
    Lost(CheckpointNumber),
    /// A sector of another version or with an unknown flag. Nothing else is known of it.
    Future {
        /// The version.
        version: u16,
        /// The flags.
        flags: u8,
    },
    /// Anything else, also the sector of another store or slot.
    Damaged,
}

impl SectorState {
    /// Decodes the sector of slot `slot`. Reserved bytes are ignored.
    pub fn decode(store_id: Uuid, slot: SlotIndex, bytes: &[u8; SECTOR_BYTES]) -> Self {
        if bytes[..VERSION_AT] != MAGIC {
            return if is_zero(bytes) { Self::Free } else { Self::Damaged };
        }
        if checksum(bytes, store_id, slot) != u32_at(bytes, CRC_AT) {
            return Self::Damaged;
        }
        let version = u16::from_le_bytes(field(bytes, VERSION_AT));
        let flags = bytes[FLAGS_AT];
        if version != VERSION || flags & !LOST != 0 {
            return Self::Future { version, flags };
        }
        let checkpoint = CheckpointNumber(u32_at(bytes, CHECKPOINT_AT).into());
        if checkpoint.0 == 0 {
            return Self::Damaged;
        }
        if flags == LOST {
            let fields = [NUMBER_AT..FLAGS_AT, GROUP_AT..CHECKPOINT_AT, WORDS_AT..RESERVED_AT];
            let is_lost = fields.into_iter().all(|range| is_zero(&bytes[range]));
            return if is_lost { Self::Lost(checkpoint) } else { Self::Damaged };
        }
        Sector::read(bytes, checkpoint).map_or(Self::Damaged, Self::Valid)
    }

    /// Refuses a sector of another version, one of a checkpoint after the one that a crash may have
    /// interrupted, and one of a layer, which this version does not have. `log` is the last
    /// complete checkpoint in the log, 0 if there is none.
    pub fn check(&self, slot: SlotIndex, log: CheckpointNumber) -> Result<(), StoreError> {
        let (sector, layer) = match self {
            Self::Free | Self::Damaged => return Ok(()),
            Self::Future { version, flags } => {
                let (version, flags) = ((*version).into(), (*flags).into());
                return Err(StoreError::FutureVersion { found: "sector", version, flags });
            }
            Self::Valid(sector) => (sector.checkpoint, sector.address.layer),
            Self::Lost(checkpoint) => (*checkpoint, Layer(0)),
        };
        if sector.0.saturating_sub(log.0) > 1 {
            return Err(StoreError::LogBehindStore(Ahead::Sector { slot, sector, log }));
        }
        match layer {
            Layer(0) => Ok(()),
            layer => Err(StoreError::UnknownLayer { slot, layer }),
        }
    }
}
