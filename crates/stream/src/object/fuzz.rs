//! The checks of the fuzz target `object`: arbitrary bytes as directories, tops and pages of an
//! index, with valid checksums.

use super::index::{INDEX_ENTRY_BYTES, IndexPlace, PAGE_BYTES};
use super::{Block, VERSION, VERSION_1, directory};
use crate::fields::u32_at;

/// Takes the first byte of `data` as what the rest is: the content of a directory (0), pages and
/// top of an index after the number of pages in one byte (1), or (others) an index of format
/// version 1.
///
/// What is accepted is encoded to the same bytes, or tiles the data before it.
pub fn object(data: &[u8]) -> Result<(), String> {
    check(data).map(drop)
}

/// Returns whether the bytes are accepted.
fn check(data: &[u8]) -> Result<bool, String> {
    match data.split_first() {
        None => Ok(false),
        Some((0, content)) => directory::check_content(content),
        Some((1, rest)) => check_pages(rest),
        Some((_, entries)) => check_version_1(entries),
    }
}

/// The bytes before the index: the greatest number that an index may refer to.
const DATA_END: u64 = 1 << 40;

fn check_version_1(entries: &[u8]) -> Result<bool, String> {
    // The index ends the object, wherever its last block says that this is.
    let end = entries.rchunks_exact(INDEX_ENTRY_BYTES).next().map_or(32, end_of);
    let (position, crc32c) = (end.min(DATA_END), crc32c::crc32c(entries));
    let len_bytes = entries.len() as u64;
    let place = IndexPlace { format: VERSION_1, position, len_bytes, crc32c };
    match place.decode(entries, None) {
        Ok((blocks, _)) => check_tiling(&blocks, position).map(|()| true),
        Err(_) => Ok(false),
    }
}

/// Returns the position after the block of an entry.
fn end_of(entry: &[u8]) -> u64 {
    let position = u64::from_le_bytes(entry[24..32].try_into().expect("8 bytes"));
    position.saturating_add(u32_at(entry, 32).into())
}

fn check_pages(rest: &[u8]) -> Result<bool, String> {
    let Some((pages, rest)) = rest.split_first() else { return Ok(false) };
    let top_bytes = 8 + 24 * usize::from(*pages);
    let Some(top_at) = rest.len().checked_sub(top_bytes) else { return Ok(false) };
    let (entries, top) = rest.split_at(top_at);
    // The checksums of the pages are made valid, so that more than the first check is reached.
    let mut top = top.to_vec();
    for (page, stated) in entries.chunks(PAGE_BYTES).zip(top[8..].chunks_exact_mut(24)) {
        stated[16..20].copy_from_slice(&crc32c::crc32c(page).to_le_bytes());
    }
    let position = DATA_END + entries.len() as u64;
    let len_bytes = top.len() as u64;
    let place = IndexPlace { format: VERSION, position, len_bytes, crc32c: crc32c::crc32c(&top) };
    let Ok(decoded) = place.decode_top(&top) else { return Ok(false) };
    if decoded.page_position(0) != DATA_END {
        return Ok(false);
    }
    let mut blocks: Vec<Block> = Vec::new();
    for (number, page) in entries.chunks(PAGE_BYTES).enumerate().take((*pages).into()) {
        let Ok(page) = decoded.decode_page(number, page) else { continue };
        let (first, last) = (&page[0], &page[page.len() - 1]);
        for (stream, from) in [(first.stream, first.start), (last.stream, last.start)] {
            if !decoded.pages_of(stream, from).contains(&number) {
                return Err(format!("page {number} is not one of stream {stream} from {from}"));
            }
        }
        blocks.extend(page);
    }
    match place.decode(&[entries, &top].concat(), None) {
        Ok((whole, _)) if whole == blocks => check_tiling(&whole, DATA_END).map(|()| true),
        Ok((whole, _)) => Err(format!("the pages have {blocks:?}, the index {whole:?}")),
        Err(_) => Ok(false),
    }
}

fn check_tiling(blocks: &[Block], data_end: u64) -> Result<(), String> {
    let mut tiled_to = 32;
    for block in blocks {
        if block.position != tiled_to || block.position_end() > data_end {
            return Err(format!("{block:?} is accepted after {tiled_to}"));
        }
        tiled_to = block.position_end();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use bytes::BytesMut;
    use proptest::prelude::*;

    use super::super::{ORIGIN, index};
    use super::*;
    use crate::types::{StreamId, StreamOffset};

    /// Returns an input of each kind that is accepted.
    fn seeds() -> [Vec<u8>; 3] {
        let block = |number: u64| Block {
            stream: StreamId(number / 3),
            start: StreamOffset(number),
            end: StreamOffset(number + 1),
            position: 32 + 25 * number,
            len_bytes: 25,
            entries: 1,
            max_timestamp_ms: number.cast_signed() - 5,
            crc32c: 7,
        };
        let blocks: Vec<_> = (0..75).map(block).collect();
        let rows = directory::rows_of(&blocks);
        let mut index = BytesMut::new();
        index::encode(&blocks, &mut index);
        let mut entries = BytesMut::new();
        index::encode_entries(&blocks[..5], &mut entries);
        let content = directory::encode_content(&ORIGIN, &rows);
        [
            [&[0][..], &content].concat(),
            [&[1, 2][..], &index].concat(),
            [&[2][..], &entries].concat(),
        ]
    }

    #[test]
    fn what_is_encoded_is_accepted() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/object");
        for (number, seed) in seeds().iter().enumerate() {
            assert_eq!(check(seed), Ok(true));
            let stored = fs::read(directory.join(format!("{number:02}"))).unwrap();
            assert_eq!(&stored, seed, "a stored seed");
        }
    }

    proptest! {
        #[test]
        fn changed_seeds_do_no_harm(
            kind in 0..3_usize,
            patches in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        ) {
            let mut bytes = seeds()[kind].clone();
            for (at, value) in patches {
                let at = 1 + at.index(bytes.len() - 1);
                bytes[at] ^= value;
            }
            prop_assert_eq!(object(&bytes), Ok(()));
        }
    }
}
