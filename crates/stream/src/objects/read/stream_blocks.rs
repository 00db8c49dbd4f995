//! The blocks of one stream in one object.

use std::ops;
use std::sync::Arc;

use crate::object::Block;
use crate::types::{StreamId, StreamOffset};

/// Neighbouring blocks of one stream in one object.
pub(crate) struct StreamBlocks {
    /// The index, or a page of it, if at least half of it is of the stream, otherwise the stream's
    /// part of it.
    index: Arc<Vec<Block>>,
    blocks: ops::Range<usize>,
}

impl StreamBlocks {
    /// Returns the blocks of a stream in an index or a page of one.
    pub(super) fn new(index: Arc<Vec<Block>>, stream: StreamId) -> Self {
        let of_stream = part_of(&index, stream);
        // A waiting reader must not keep other streams' parts of the index alive: they count in no
        // bound once the cache has evicted the index.
        if 2 * of_stream.len() < index.len() {
            let blocks = 0..of_stream.len();
            return Self { index: Arc::new(index[of_stream].to_vec()), blocks };
        }
        Self { index, blocks: of_stream }
    }

    /// Returns the blocks of a stream in neighbouring pages of an index.
    pub(super) fn of_pages(pages: &[Arc<Vec<Block>>], stream: StreamId) -> Self {
        if let [page] = pages {
            return Self::new(page.clone(), stream);
        }
        let parts: Vec<_> = pages.iter().map(|page| &page[part_of(page, stream)]).collect();
        let index = Arc::new(parts.concat());
        let blocks = 0..index.len();
        Self { index, blocks }
    }

    /// Returns the blocks that end after `from`.
    pub(crate) fn after(&self, from: StreamOffset) -> &[Block] {
        let blocks = &self.index[self.blocks.clone()];
        &blocks[blocks.partition_point(|block| block.end <= from)..]
    }

    /// Returns all of the memory that it keeps alive.
    #[cfg(test)]
    pub(super) fn index(&self) -> &Arc<Vec<Block>> {
        &self.index
    }
}

/// Returns where the blocks of a stream are in sorted blocks.
fn part_of(blocks: &[Block], stream: StreamId) -> ops::Range<usize> {
    let first = blocks.partition_point(|block| block.stream < stream);
    first..blocks.partition_point(|block| block.stream <= stream)
}
