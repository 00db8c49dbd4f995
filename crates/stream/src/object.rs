//! Encoding and verified decoding of objects, without I/O. Layout and rationale:
//! `docs/format/object.md`.

mod directory;
mod encoder;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod index;
#[cfg(test)]
mod version_1;

use std::ops::Range;

use bytes::{BufMut, Bytes, BytesMut};
use uuid::Uuid;

pub use crate::damage::{Damage, DecodeError};
use crate::fields::{u32_at, u64_at};
use crate::types::{Batch, StreamId, StreamOffset};
pub(crate) use directory::rows_of;
pub use directory::{DirectoryRow, Origin, REBUILD};
pub(crate) use encoder::{Encoder, Summary};
pub(crate) use index::{FirstRead, IndexPlace, Top};
#[cfg(test)]
pub(crate) use version_1::version_1;

const HEADER_MAGIC: [u8; 8] = *b"ALLUVOBJ";
const FOOTER_MAGIC: [u8; 8] = *b"ALLUVEND";
/// The format version that is written.
pub const VERSION: u32 = 2;
/// The format version before it, which is read.
pub const VERSION_1: u32 = 1;

/// magic, version, CRC32C of the rest, nonce.
pub(crate) const HEADER_BYTES: usize = 8 + 4 + 4 + 16;
/// base, count, payload length, greatest timestamp.
pub const ENTRY_BYTES: usize = 8 + 4 + 4 + 8;
/// position, length and CRC32C of the top, version, nonce, length of the directory, number of
/// blocks, CRC32C of the directory, magic, CRC32C of the preceding bytes.
pub(crate) const FOOTER_BYTES: usize = 8 + 8 + 4 + 4 + 16 + 4 + 4 + 4 + 8 + 4;
const _: () = assert!(HEADER_BYTES == 32 && ENTRY_BYTES == 24 && FOOTER_BYTES == 64);

/// A block is closed before it would grow past this. A larger batch has a block to itself. Together
/// with its header and the rest of its pages a block fits into 1 MiB, which allocators hand out
/// without waste; slightly more would take 1.25 MiB.
pub(crate) const BLOCK_TARGET_BYTES: usize = (1 << 20) - (16 << 10);

fn damage<T, E: From<Damage>>(position: u64, reason: impl Into<String>) -> Result<T, E> {
    Err(Damage { position, reason: reason.into() }.into())
}

/// A data block, as described by the index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The stream of all its batches.
    pub stream: StreamId,
    /// First offset of its first batch.
    pub start: StreamOffset,
    /// Offset after its last batch.
    pub end: StreamOffset,
    /// Position of its first byte in the object.
    pub position: u64,
    /// Its length.
    pub len_bytes: u32,
    /// Number of batches.
    pub entries: u32,
    /// Greatest timestamp of its batches.
    pub max_timestamp_ms: i64,
    /// CRC32C of its bytes.
    pub crc32c: u32,
}

impl Block {
    /// Returns the position after its last byte.
    pub fn position_end(&self) -> u64 {
        self.position + u64::from(self.len_bytes)
    }
}

/// Returns the checksum over magic, version and nonce: all of the header except the checksum
/// itself.
fn header_crc(magic_and_version: &[u8], nonce: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(magic_and_version), nonce)
}

/// Decodes the batches of a block. Verifies length and checksum, and that the entries match the
/// index.
pub(crate) fn decode_block(block: &Block, bytes: &Bytes) -> Result<Vec<Batch>, Damage> {
    if bytes.len() as u64 != u64::from(block.len_bytes) {
        return damage(
            block.position,
            format!("{} bytes were read of a block of {}", bytes.len(), block.len_bytes),
        );
    }
    if crc32c::crc32c(bytes) != block.crc32c {
        return damage(block.position, "the block does not match its checksum");
    }
    let mut batches: Vec<Batch> =
        Vec::with_capacity(bytes.len().min(block.entries as usize * ENTRY_BYTES) / ENTRY_BYTES);
    let mut at = 0;
    while at < bytes.len() {
        let position = block.position + at as u64;
        let Some(entry) = bytes.get(at..at + ENTRY_BYTES) else {
            return damage(position, "an entry is truncated");
        };
        let (base, count) = (u64_at(entry, 0), u32_at(entry, 8));
        let payload_at = at + ENTRY_BYTES;
        let payload_end = payload_at + u32_at(entry, 12) as usize;
        let follows = batches.last().is_none_or(|before| before.end().0 <= base);
        if payload_end > bytes.len()
            || count == 0
            || base.checked_add(u64::from(count)).is_none()
            || !follows
        {
            return damage(
                position,
                format!("an impossible entry: {count} records at offset {base}"),
            );
        }
        batches.push(Batch {
            base: StreamOffset(base),
            count,
            max_timestamp_ms: u64_at(entry, 16).cast_signed(),
            payload: bytes.slice(payload_at..payload_end),
        });
        at = payload_end;
    }
    let as_indexed = batches.len() == block.entries as usize
        && batches.first().is_some_and(|first| first.base == block.start)
        && batches.last().is_some_and(|last| last.end() == block.end)
        && batches.iter().map(|batch| batch.max_timestamp_ms).max() == Some(block.max_timestamp_ms);
    if !as_indexed {
        return damage(block.position, "the entries do not match the index");
    }
    Ok(batches)
}

/// Returns the header of an object.
fn encode_header(version: u32, nonce: Uuid) -> Bytes {
    let mut header = BytesMut::with_capacity(HEADER_BYTES);
    header.put_slice(&HEADER_MAGIC);
    header.put_u32_le(version);
    header.put_u32_le(header_crc(&header, nonce.as_bytes()));
    header.put_slice(nonce.as_bytes());
    header.freeze()
}

/// Returns the error for an object that a later version of this program has written.
fn unknown_version<T>(version: u32) -> Result<T, DecodeError> {
    let known = format!("only {VERSION_1} and {VERSION} are");
    Err(DecodeError::LaterVersion(format!("format version {version} is not known, {known}")))
}

/// Decodes the format version and the nonce of an object from its header.
pub(crate) fn decode_header(header: &[u8]) -> Result<(u32, Uuid), DecodeError> {
    if header[..8] != HEADER_MAGIC {
        return damage(0, "not an object: the magic is missing");
    }
    if u32_at(header, 12) != header_crc(&header[..12], &header[16..]) {
        return damage(0, "the header does not match its checksum");
    }
    match u32_at(header, 8) {
        known @ (VERSION_1 | VERSION) => {
            Ok((known, Uuid::from_slice(&header[16..]).expect("16 bytes")))
        }
        other => unknown_version(other),
    }
}

/// What an object has between its blocks and its footer.
pub(crate) struct Contents {
    /// `None` in format version 1.
    pub(crate) origin: Option<Origin>,
    pub(crate) rows: Vec<DirectoryRow>,
    pub(crate) blocks: Vec<Block>,
}

/// The footer of an object.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Footer {
    pub(crate) index: IndexPlace,
    pub(crate) nonce: Uuid,
    /// Length of the directory; 0 in format version 1, which has none.
    pub(crate) directory_bytes: u32,
    /// Number of blocks; 0 in format version 1, where the length of the index has it.
    pub(crate) blocks: u32,
    pub(crate) directory_crc32c: u32,
}

impl Footer {
    fn encode(&self) -> Bytes {
        let mut footer = BytesMut::with_capacity(FOOTER_BYTES);
        footer.put_u64_le(self.index.position);
        footer.put_u64_le(self.index.len_bytes);
        footer.put_u32_le(self.index.crc32c);
        footer.put_u32_le(self.index.format);
        footer.put_slice(self.nonce.as_bytes());
        footer.put_u32_le(self.directory_bytes);
        footer.put_u32_le(self.blocks);
        footer.put_u32_le(self.directory_crc32c);
        footer.put_slice(&FOOTER_MAGIC);
        footer.put_u32_le(crc32c::crc32c(&footer));
        footer.freeze()
    }

    /// Decodes the footer at `position`. Verifies that directory and index end there.
    pub(crate) fn decode(position: u64, footer: &[u8]) -> Result<Self, DecodeError> {
        if u32_at(footer, 60) != crc32c::crc32c(&footer[..60]) {
            return damage(position, "the footer does not match its checksum");
        }
        if footer[52..60] != FOOTER_MAGIC {
            return damage(position, "the magic of the footer is missing");
        }
        let index = IndexPlace {
            format: u32_at(footer, 20),
            position: u64_at(footer, 0),
            len_bytes: u64_at(footer, 8),
            crc32c: u32_at(footer, 16),
        };
        let is_reserved_zero = footer[40..52] == [0; 12];
        match index.format {
            VERSION_1 if is_reserved_zero => {}
            VERSION_1 => return damage(position, "a reserved part of the footer is not zero"),
            VERSION => {}
            other => return unknown_version(other),
        }
        let footer = Self {
            index,
            nonce: Uuid::from_slice(&footer[24..40]).expect("16 bytes"),
            directory_bytes: u32_at(footer, 40),
            blocks: u32_at(footer, 44),
            directory_crc32c: u32_at(footer, 48),
        };
        if index.position.checked_add(index.len_bytes) != Some(position)
            || footer.data_end().is_none_or(|data_end| data_end < HEADER_BYTES as u64)
        {
            let (len_bytes, at) = (index.len_bytes, index.position);
            let reason =
                format!("an index of {len_bytes} bytes at {at} does not end at the footer");
            return damage(position, reason);
        }
        Ok(footer)
    }

    /// Returns the position after the directory: that of the first page, or of the index.
    fn directory_end(&self) -> Option<u64> {
        let pages_bytes = u64::from(self.blocks) * index::INDEX_ENTRY_BYTES as u64;
        self.index.position.checked_sub(pages_bytes)
    }

    /// Returns the position after the last block: that of the directory.
    fn data_end(&self) -> Option<u64> {
        self.directory_end()?.checked_sub(self.directory_bytes.into())
    }

    /// Returns the positions of the directory; none if the object has none.
    pub(crate) fn directory(&self) -> Range<u64> {
        let verified = "checked when the footer was decoded";
        self.data_end().expect(verified)..self.directory_end().expect(verified)
    }

    /// Checks that a header, which [`decode_header`] has returned, is that of the same object.
    pub(crate) fn check_header(&self, header: (u32, Uuid)) -> Result<(), Damage> {
        match header == (self.index.format, self.nonce) {
            true => Ok(()),
            false => damage(self.position(), "the footer does not belong to the header"),
        }
    }

    /// Returns its position.
    pub(crate) fn position(&self) -> u64 {
        self.index.position + self.index.len_bytes
    }

    /// Decodes the directory from its bytes.
    pub(crate) fn decode_directory(
        &self,
        bytes: &[u8],
    ) -> Result<(Origin, Vec<DirectoryRow>), Damage> {
        directory::decode(self.directory().start, bytes, self.directory_crc32c)
    }

    /// Decodes everything after the blocks from the bytes between them and the footer, and verifies
    /// each part against the others.
    pub(crate) fn decode_contents(&self, bytes: &[u8]) -> Result<Contents, Damage> {
        let data_end = self.directory().start;
        let (directory, index) = bytes.split_at(self.directory_bytes as usize);
        let (blocks, len_bytes) = self.index.decode(index, Some(data_end))?;
        if len_bytes != index.len() {
            let (stated, there) = (self.blocks, blocks.len());
            let reason = format!("the footer states {stated} blocks, the top of the index {there}");
            return damage(self.index.position, reason);
        }
        let (origin, rows) = match self.index.format {
            VERSION_1 => (None, rows_of(&blocks)),
            _ => {
                let (origin, rows) = self.decode_directory(directory)?;
                directory::check_rows(data_end, &rows, &blocks)?;
                (Some(origin), rows)
            }
        };
        Ok(Contents { origin, rows, blocks })
    }
}

/// Checks that an object is at least as long as its header and footer.
pub(crate) fn check_length(len_bytes: u64) -> Result<(), Damage> {
    if len_bytes < (HEADER_BYTES + FOOTER_BYTES) as u64 {
        return damage(0, format!("{len_bytes} bytes are too short for an object"));
    }
    Ok(())
}

/// A whole object in memory, read without the catalog. Opening it verifies all bytes except the
/// data blocks, which [`Whole::batches`] verifies.
#[derive(Debug)]
pub struct Whole {
    bytes: Bytes,
    /// Its format version.
    pub format: u32,
    /// A random number that is also in the object's name.
    pub nonce: Uuid,
    /// Who wrote it; `None` in format version 1.
    pub origin: Option<Origin>,
    /// Its streams, in the order of their ids.
    pub rows: Vec<DirectoryRow>,
    /// Its blocks in order.
    pub blocks: Vec<Block>,
}

impl Whole {
    /// Decodes and verifies header, footer, directory and index.
    pub fn open(bytes: Bytes) -> Result<Self, DecodeError> {
        check_length(bytes.len() as u64)?;
        let header = decode_header(&bytes[..HEADER_BYTES])?;
        let footer_at = bytes.len() - FOOTER_BYTES;
        let footer = Footer::decode(footer_at as u64, &bytes[footer_at..])?;
        footer.check_header(header)?;
        let data_end = usize::try_from(footer.directory().start).expect("before the footer");
        let Contents { origin, rows, blocks } =
            footer.decode_contents(&bytes[data_end..footer_at])?;
        let (format, nonce) = header;
        Ok(Self { bytes, format, nonce, origin, rows, blocks })
    }

    /// Decodes and verifies the batches of a block.
    pub fn batches(&self, block: &Block) -> Result<Vec<Batch>, Damage> {
        // The index was verified to tile the object, so the positions are inside.
        let at = usize::try_from(block.position).expect("below the length of the bytes");
        decode_block(block, &self.bytes.slice(at..at + block.len_bytes as usize))
    }
}

/// The origin of the objects of tests.
#[cfg(test)]
pub(crate) const ORIGIN: Origin = Origin {
    store: Uuid::from_u128(1),
    incarnation: Uuid::from_u128(2),
    opening: 3,
    term: 4,
    generation: 5,
    created_at_ms: -6,
    cut: alluvium_wal::LogOffset(7),
};

#[cfg(test)]
mod tests;
