//! The index of an object: entries of blocks, in pages since format version 2, and the top with the
//! pages' checksums. `docs/format/object.md`, sections 1 and 7.

use std::ops::Range;

use bytes::{BufMut, BytesMut};

use super::{Block, HEADER_BYTES, VERSION, VERSION_1, damage};
use crate::damage::Damage;
use crate::fields::{u32_at, u64_at};
use crate::types::{StreamId, StreamOffset};

/// stream, start, end, position, length, entries, greatest timestamp, CRC32C, reserved.
pub(crate) const INDEX_ENTRY_BYTES: usize = 8 + 8 + 8 + 8 + 4 + 4 + 8 + 4 + 4;
/// Number of entries in a page; the last page has the rest.
pub(crate) const PAGE_ENTRIES: usize = 73;
pub(crate) const PAGE_BYTES: usize = PAGE_ENTRIES * INDEX_ENTRY_BYTES;
/// number of blocks, reserved.
const TOP_HEADER_BYTES: usize = 4 + 4;
/// stream, start, CRC32C, reserved.
const TOP_ENTRY_BYTES: usize = 8 + 8 + 4 + 4;
/// Pages and top are read together up to this length.
const TOGETHER_BYTES: u64 = 16 << 10;
const _: () = assert!(INDEX_ENTRY_BYTES == 56 && PAGE_BYTES == 4088 && TOP_ENTRY_BYTES == 24);

/// Where an object's index is: what the catalog states of it. Since format version 2 this is the
/// place of the top, which the pages end at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IndexPlace {
    /// The format version of the object.
    pub(crate) format: u32,
    pub(crate) position: u64,
    pub(crate) len_bytes: u64,
    pub(crate) crc32c: u32,
}

/// What a reader of one stream fetches first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FirstRead {
    /// The whole index: these bytes end with it.
    Whole(Range<u64>),
    /// Only the top, since the pages are many.
    Top(Range<u64>),
}

impl IndexPlace {
    /// Returns the position after the index, which is that of the footer.
    fn end(&self) -> Result<u64, Damage> {
        match self.position.checked_add(self.len_bytes) {
            Some(end) => Ok(end),
            None => damage(self.position, format!("an index of {} bytes", self.len_bytes)),
        }
    }

    /// Returns the number of pages, which follows from the length of the top.
    fn pages(&self) -> Result<u64, Damage> {
        let of_pages = self.len_bytes.checked_sub(TOP_HEADER_BYTES as u64);
        match of_pages.filter(|bytes| bytes.is_multiple_of(TOP_ENTRY_BYTES as u64)) {
            Some(bytes) => Ok(bytes / TOP_ENTRY_BYTES as u64),
            None => {
                let reason = format!("a top of {} bytes is impossible", self.len_bytes);
                damage(self.position, reason)
            }
        }
    }

    /// Returns a range of the object's bytes that ends with the whole index. Before the index it
    /// may have up to a page of other bytes: how full the last page is follows only from the
    /// content of the top.
    pub(crate) fn whole(&self) -> Result<Range<u64>, Damage> {
        let from = match self.format {
            VERSION_1 => self.position,
            VERSION => {
                let pages_bytes = self.pages()?.saturating_mul(PAGE_BYTES as u64);
                self.position.saturating_sub(pages_bytes).max(HEADER_BYTES as u64)
            }
            other => return damage(self.position, format!("format version {other} is not known")),
        };
        let end = self.end()?;
        Ok(from.min(end)..end)
    }

    /// Returns what a reader of one stream fetches first.
    pub(crate) fn first_read(&self) -> Result<FirstRead, Damage> {
        let whole = self.whole()?;
        match self.format == VERSION_1 || whole.end - whole.start <= TOGETHER_BYTES {
            true => Ok(FirstRead::Whole(whole)),
            false => Ok(FirstRead::Top(self.position..whole.end)),
        }
    }

    /// Decodes all blocks from bytes that end with the index, and returns its length, too. Verifies
    /// the checksums, and that the blocks tile the object from its header up to `data_end`, or to a
    /// position before the index if that is not known, sorted by stream and offset.
    pub(crate) fn decode(
        &self,
        bytes: &[u8],
        data_end: Option<u64>,
    ) -> Result<(Vec<Block>, usize), Damage> {
        if self.format == VERSION_1 {
            return Ok((decode_version_1(self.position, bytes, self.crc32c)?, bytes.len()));
        }
        let Some(pages_bytes) = bytes.len().checked_sub(self.top_bytes()) else {
            return damage(self.position, format!("{} bytes were read of the index", bytes.len()));
        };
        let (pages, top) = bytes.split_at(pages_bytes);
        let top = self.decode_top(top)?;
        let Some(unused) = pages.len().checked_sub(top.blocks as usize * INDEX_ENTRY_BYTES) else {
            let reason = format!("{} bytes were read of the pages of the index", pages.len());
            return damage(top.position, reason);
        };
        let mut blocks: Vec<Block> = Vec::with_capacity(top.blocks as usize);
        for (number, page) in pages[unused..].chunks(PAGE_BYTES).enumerate() {
            let page = top.decode_page(number, page)?;
            let tiled_to = blocks.last().map_or(HEADER_BYTES as u64, Block::position_end);
            if page[0].position != tiled_to {
                let reason = format!("the blocks before page {number} end at {tiled_to}");
                return damage(top.page_position(number), reason);
            }
            blocks.extend(page);
        }
        let tiled_to = blocks.last().map_or(HEADER_BYTES as u64, Block::position_end);
        match data_end.is_none_or(|data_end| data_end == tiled_to) {
            true => Ok((blocks, bytes.len() - unused)),
            false => damage(top.position, format!("the blocks end at {tiled_to}")),
        }
    }

    /// Returns the length of the top; of an impossible one the greatest number.
    fn top_bytes(&self) -> usize {
        usize::try_from(self.len_bytes).unwrap_or(usize::MAX)
    }

    /// Decodes the top from its bytes. Verifies the checksum, and that the pages are sorted and
    /// fit into the object.
    pub(crate) fn decode_top(&self, bytes: &[u8]) -> Result<Top, Damage> {
        let position = self.position;
        if bytes.len() != self.top_bytes() {
            return damage(position, format!("{} bytes were read of the top", bytes.len()));
        }
        let pages = self.pages()?;
        if crc32c::crc32c(bytes) != self.crc32c {
            return damage(position, "the top of the index does not match its checksum");
        }
        let (blocks, reserved) = (u32_at(bytes, 0), u32_at(bytes, 4));
        let pages_bytes = u64::from(blocks) * INDEX_ENTRY_BYTES as u64;
        let first_page = position.checked_sub(pages_bytes);
        let Some(first_page) = first_page.filter(|first| *first >= HEADER_BYTES as u64) else {
            return damage(position, format!("an index of {blocks} blocks is impossible here"));
        };
        if reserved != 0 || u64::from(blocks).div_ceil(PAGE_ENTRIES as u64) != pages {
            return damage(position, format!("a top of {pages} pages for {blocks} blocks"));
        }
        let mut starts: Vec<PageStart> = Vec::with_capacity(pages as usize);
        for (number, entry) in bytes[TOP_HEADER_BYTES..].chunks_exact(TOP_ENTRY_BYTES).enumerate() {
            let page = PageStart {
                stream: StreamId(u64_at(entry, 0)),
                start: StreamOffset(u64_at(entry, 8)),
                crc32c: u32_at(entry, 16),
            };
            let ascends = starts.last().is_none_or(|before| before.key() < page.key());
            if !ascends || u32_at(entry, 20) != 0 {
                let at = position + (TOP_HEADER_BYTES + number * TOP_ENTRY_BYTES) as u64;
                return damage(at, format!("page {number} of the index is impossible: {page:?}"));
            }
            starts.push(page);
        }
        Ok(Top { position: first_page, blocks, pages: starts })
    }
}

/// The top of an index, verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Top {
    /// Position of the first page.
    position: u64,
    /// Number of blocks.
    blocks: u32,
    pages: Vec<PageStart>,
}

/// What the top states of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageStart {
    /// The stream of its first entry.
    stream: StreamId,
    /// The start of its first entry.
    start: StreamOffset,
    crc32c: u32,
}

impl PageStart {
    fn key(&self) -> (StreamId, StreamOffset) {
        (self.stream, self.start)
    }
}

impl Top {
    /// Returns the numbers of the pages that have entries of the blocks of `stream` that end after
    /// `from`.
    pub(crate) fn pages_of(&self, stream: StreamId, from: StreamOffset) -> Range<usize> {
        // The page before may end with the block that contains `from`.
        let first = self.pages.partition_point(|page| page.key() <= (stream, from));
        let end = self.pages.partition_point(|page| page.stream <= stream);
        first.saturating_sub(1)..end
    }

    pub(crate) fn page_position(&self, number: usize) -> u64 {
        self.position + (number * PAGE_BYTES) as u64
    }

    pub(crate) fn page_bytes(&self, number: usize) -> usize {
        let entries = (self.blocks as usize).saturating_sub(number * PAGE_ENTRIES);
        entries.min(PAGE_ENTRIES) * INDEX_ENTRY_BYTES
    }

    /// Returns its length in memory.
    pub(crate) fn memory_bytes(&self) -> usize {
        size_of::<Self>() + self.pages.len() * size_of::<PageStart>()
    }

    /// Decodes a page, which has at least one entry. Verifies the checksum, and that the entries
    /// begin as the top states, and are sorted and neighbours in the object.
    pub(crate) fn decode_page(&self, number: usize, bytes: &[u8]) -> Result<Vec<Block>, Damage> {
        let (position, page) = (self.page_position(number), self.pages[number]);
        if bytes.len() != self.page_bytes(number) {
            let reason = format!("{} bytes were read of page {number} of the index", bytes.len());
            return damage(position, reason);
        }
        if crc32c::crc32c(bytes) != page.crc32c {
            let reason = format!("page {number} of the index does not match its checksum");
            return damage(position, reason);
        }
        let blocks = decode_entries(position, bytes, None, self.position)?;
        let is_as_stated =
            blocks.first().is_some_and(|first| (first.stream, first.start) == page.key());
        let precedes_next = match (blocks.last(), self.pages.get(number + 1)) {
            (Some(last), Some(next)) => {
                last.stream < next.stream || (last.stream == next.stream && last.end <= next.start)
            }
            _ => true,
        };
        match is_as_stated && precedes_next {
            true => Ok(blocks),
            false => damage(position, format!("page {number} of the index is another one")),
        }
    }
}

/// Appends pages and top; returns the length of the top.
pub(super) fn encode(blocks: &[Block], out: &mut BytesMut) -> usize {
    let mut starts = Vec::with_capacity(blocks.len().div_ceil(PAGE_ENTRIES));
    for page in blocks.chunks(PAGE_ENTRIES) {
        let at = out.len();
        encode_entries(page, out);
        let (stream, start) = (page[0].stream, page[0].start);
        starts.push(PageStart { stream, start, crc32c: crc32c::crc32c(&out[at..]) });
    }
    let at = out.len();
    out.put_u32_le(u32::try_from(blocks.len()).expect("the index of an object fits into memory"));
    out.put_u32_le(0);
    for page in starts {
        out.put_u64_le(page.stream.0);
        out.put_u64_le(page.start.0);
        out.put_u32_le(page.crc32c);
        out.put_u32_le(0);
    }
    out.len() - at
}

/// Returns the length of pages and top.
pub(super) fn encoded_bytes(blocks: usize) -> usize {
    let pages = blocks.div_ceil(PAGE_ENTRIES);
    blocks * INDEX_ENTRY_BYTES + TOP_HEADER_BYTES + pages * TOP_ENTRY_BYTES
}

/// Appends entries.
pub(super) fn encode_entries(blocks: &[Block], out: &mut BytesMut) {
    for block in blocks {
        out.put_u64_le(block.stream.0);
        out.put_u64_le(block.start.0);
        out.put_u64_le(block.end.0);
        out.put_u64_le(block.position);
        out.put_u32_le(block.len_bytes);
        out.put_u32_le(block.entries);
        out.put_i64_le(block.max_timestamp_ms);
        out.put_u32_le(block.crc32c);
        out.put_u32_le(0);
    }
}

/// Decodes the index of format version 1 at `position`: entries that tile the object up to there.
fn decode_version_1(position: u64, bytes: &[u8], crc32c: u32) -> Result<Vec<Block>, Damage> {
    if crc32c::crc32c(bytes) != crc32c {
        return damage(position, "the index does not match its checksum");
    }
    if !bytes.len().is_multiple_of(INDEX_ENTRY_BYTES) {
        return damage(
            position,
            format!("an index of {} bytes is not a whole number of entries", bytes.len()),
        );
    }
    let header_end = HEADER_BYTES as u64;
    let blocks = decode_entries(position, bytes, Some(header_end), position)?;
    let tiled_to = blocks.last().map_or(header_end, Block::position_end);
    match tiled_to == position {
        true => Ok(blocks),
        false => damage(position, format!("the blocks end at {tiled_to}")),
    }
}

/// Decodes entries that begin at `position`. Verifies that they are sorted by stream and offset,
/// and that the blocks are neighbours, from `from` on if it is known, and end at or before
/// `data_end`.
fn decode_entries(
    position: u64,
    bytes: &[u8],
    from: Option<u64>,
    data_end: u64,
) -> Result<Vec<Block>, Damage> {
    let mut blocks: Vec<Block> = Vec::with_capacity(bytes.len() / INDEX_ENTRY_BYTES);
    let mut tiled_to = from;
    for (number, entry) in bytes.chunks_exact(INDEX_ENTRY_BYTES).enumerate() {
        let at = position + (number * INDEX_ENTRY_BYTES) as u64;
        let block = Block {
            stream: StreamId(u64_at(entry, 0)),
            start: StreamOffset(u64_at(entry, 8)),
            end: StreamOffset(u64_at(entry, 16)),
            position: u64_at(entry, 24),
            len_bytes: u32_at(entry, 32),
            entries: u32_at(entry, 36),
            max_timestamp_ms: u64_at(entry, 40).cast_signed(),
            crc32c: u32_at(entry, 48),
        };
        let ordered = blocks.last().is_none_or(|before| {
            before.stream < block.stream
                || (before.stream == block.stream && before.end <= block.start)
        });
        let is_neighbour = match tiled_to {
            Some(tiled_to) => block.position == tiled_to,
            None => block.position >= HEADER_BYTES as u64,
        };
        if !is_neighbour
            || block.entries == 0
            || block.start >= block.end
            || !ordered
            || u32_at(entry, 52) != 0
        {
            return damage(at, format!("index entry {number} is impossible: {block:?}"));
        }
        // Bounded by the object's size: the blocks must end before the index.
        tiled_to = match block.position.checked_add(u64::from(block.len_bytes)) {
            Some(end) if end <= data_end => Some(end),
            _ => return damage(at, format!("index entry {number} reaches beyond the data")),
        };
        blocks.push(block);
    }
    Ok(blocks)
}
