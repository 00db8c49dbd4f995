//! Where the blocks of a volume are: regions, which are groups, and chunks.

use crate::group::REGION_CHUNKS;
use crate::op::{BLOCK_BYTES, BlockRange, CHUNK_BLOCKS};
use crate::types::ChunkIndex;

/// Bytes of a block.
pub(super) const BLOCK: u64 = BLOCK_BYTES as u64;

/// Blocks of a region: 64 GiB.
pub const REGION_BLOCKS: u64 = REGION_CHUNKS as u64 * CHUNK_BLOCKS as u64;

/// A region of 64 GiB of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionIndex(pub u16);

impl RegionIndex {
    /// The region of a block of the volume.
    pub fn of_block(block: u64) -> Self {
        Self((block / REGION_BLOCKS) as u16)
    }

    /// The first block behind the region.
    pub(super) fn end(self) -> u64 {
        (u64::from(self.0) + 1) * REGION_BLOCKS
    }
}

/// The longest part of the blocks `first..end` that begins at `first`, lies in one chunk, and has
/// at most `most` blocks. The range is not empty.
pub(super) fn first_part(first: u64, end: u64, most: u16) -> BlockRange {
    let in_chunk = (first % u64::from(CHUNK_BLOCKS)) as u16;
    let blocks = (end - first).min(most.into()).min((CHUNK_BLOCKS - in_chunk).into()) as u16;
    let chunk = ChunkIndex((first / u64::from(CHUNK_BLOCKS)) as u32);
    BlockRange { chunk, first: in_chunk, blocks }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_end_at_chunks_and_at_the_greatest_length() {
        let mut parts = Vec::new();
        let (mut at, end) = (REGION_BLOCKS - 300, REGION_BLOCKS + 260);
        while at < end {
            let part = first_part(at, end, 256);
            parts.push((RegionIndex::of_block(at).0, part.chunk.0, part.first, part.blocks));
            at += u64::from(part.blocks);
        }
        let expected = [(0, 4095, 3796, 256), (0, 4095, 4052, 44), (1, 4096, 0, 256)];
        assert_eq!(parts[..3], expected);
        assert_eq!(parts[3..], [(1, 4096, 256, 4)]);
    }
}
