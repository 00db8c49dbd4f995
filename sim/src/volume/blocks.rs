//! The few blocks of each volume, and what an op makes of them.

use alluvium_volume::{BLOCK_BYTES, BlockRange, BlockState, ChunkIndex};
use bytes::Bytes;

/// Blocks of a volume. Few, so that ops meet; in two chunks and five slots, at the borders of both.
pub(super) const BLOCKS: usize = PLACES.len();

/// Where each of them is: the chunk, and the block in it.
const PLACES: [(u32, u16); 16] = [
    (0, 0),
    (0, 1),
    (0, 2),
    (0, 3),
    (0, 62),
    (0, 63),
    (0, 64),
    (0, 65),
    (5, 0),
    (5, 1),
    (5, 128),
    (5, 129),
    (5, 4092),
    (5, 4093),
    (5, 4094),
    (5, 4095),
];

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Value {
    Absent,
    Zeros,
    /// The data that the op with this number has written.
    Data(u64),
}

/// The range of at most `count` neighbouring blocks from a block on, and their number.
pub(super) fn range_from(first: usize, count: usize) -> (BlockRange, usize) {
    let (chunk, block) = PLACES[first];
    let is_next = |at: &usize| PLACES.get(first + at) == Some(&(chunk, block + *at as u16));
    let blocks = (0..count).take_while(is_next).count();
    (BlockRange { chunk: ChunkIndex(chunk), first: block, blocks: blocks as u16 }, blocks)
}

/// The blocks of a range.
pub(super) fn blocks_of(range: &BlockRange) -> impl Iterator<Item = usize> {
    let first = PLACES.iter().position(|place| *place == (range.chunk.0, range.first));
    let first = first.expect("an op begins at one of the blocks");
    first..first + usize::from(range.blocks)
}

/// The data that an op writes: its number in each block, followed by bytes derived from it.
pub(super) fn data_of(id: u64, blocks: usize) -> Bytes {
    let mut data = vec![0; BLOCK_BYTES * blocks];
    for (at, block) in data.chunks_mut(BLOCK_BYTES).enumerate() {
        let mut word = id;
        for bytes in block.as_chunks_mut::<8>().0 {
            *bytes = word.to_le_bytes();
            // The multiplier and increment of Knuth's MMIX.
            word = word
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407 + at as u64);
        }
    }
    data.into()
}

/// What a block of an answer is.
///
/// # Panics
/// If its data is not that of an op.
pub(super) fn value_of(state: BlockState, data: &[u8]) -> Value {
    match state {
        BlockState::Absent => Value::Absent,
        BlockState::Zeros => Value::Zeros,
        BlockState::Data => {
            let id = u64::from_le_bytes(data[..8].try_into().expect("eight bytes"));
            Value::Data(id)
        }
    }
}
