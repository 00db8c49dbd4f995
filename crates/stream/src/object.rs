//! Encoding and verified decoding of objects, without I/O. Layout and rationale:
//! `docs/format/object.md`.

use alluvium_wal::crc32c_concat;
use bytes::{BufMut, Bytes, BytesMut};
use object_store::PutPayload;
use uuid::Uuid;

use crate::fields::{u32_at, u64_at};
use crate::types::{Batch, StreamId, StreamOffset};

const HEADER_MAGIC: [u8; 8] = *b"ALLUVOBJ";
const FOOTER_MAGIC: [u8; 8] = *b"ALLUVEND";
/// The format version that is written and read.
pub const VERSION: u32 = 1;

/// magic, version, CRC32C of the rest, nonce.
pub(crate) const HEADER_BYTES: usize = 8 + 4 + 4 + 16;
/// base, count, payload length, greatest timestamp.
pub const ENTRY_BYTES: usize = 8 + 4 + 4 + 8;
/// stream, start, end, position, length, entries, greatest timestamp, CRC32C, reserved.
pub(crate) const INDEX_ENTRY_BYTES: usize = 8 + 8 + 8 + 8 + 4 + 4 + 8 + 4 + 4;
/// index position, index length, index CRC32C, version, nonce, reserved, magic, CRC32C of the
/// preceding bytes.
pub(crate) const FOOTER_BYTES: usize = 8 + 8 + 4 + 4 + 16 + 12 + 8 + 4;
const _: () = assert!(
    HEADER_BYTES == 32 && ENTRY_BYTES == 24 && INDEX_ENTRY_BYTES == 56 && FOOTER_BYTES == 64
);

/// A block is closed before it would grow past this. A larger batch has a block to itself. Together
/// with its header and the rest of its pages a block fits into 1 MiB, which allocators hand out
/// without waste; slightly more would take 1.25 MiB.
pub(crate) const BLOCK_TARGET_BYTES: usize = (1 << 20) - (16 << 10);
/// A payload of this size or more is not copied into its block: sending one more piece costs less
/// than the copy.
const SHARED_BYTES: usize = 4 << 10;
/// Copied bytes are gathered in pieces of about this size; smaller ones if the block has less.
const PIECE_BYTES: usize = 64 << 10;

/// Bytes of an object that do not match its index or the catalog.
#[derive(Debug, thiserror::Error)]
#[error("damaged at byte {position}: {reason}")]
pub struct Damage {
    /// Position in the object of the first damaged byte or of the damaged structure.
    pub position: u64,
    /// What is wrong there.
    pub reason: String,
}

impl Damage {
    /// Returns damage of an object that has no place of its own in it.
    pub(crate) fn of_all(reason: impl Into<String>) -> Self {
        Self { position: 0, reason: reason.into() }
    }
}

fn damage<T>(position: u64, reason: impl Into<String>) -> Result<T, Damage> {
    Err(Damage { position, reason: reason.into() })
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

/// Encodes an object block by block; holds one block and the index. Large payloads are part of a
/// block by reference, so their allocations live until the block is written.
pub(crate) struct Encoder {
    nonce: Uuid,
    /// Position of the open block in the object.
    position: u64,
    /// The block being filled. Until it is sealed, its length and checksum cover only `pieces`.
    open: Option<Block>,
    pieces: Vec<Bytes>,
    /// Bytes of the block behind `pieces`, with spare capacity for more.
    copied: BytesMut,
    index: Vec<Block>,
}

/// What the catalog stores so that an object can be read without its footer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Summary {
    pub(crate) size_bytes: u64,
    pub(crate) index_position: u64,
    pub(crate) index_bytes: u64,
    pub(crate) index_crc32c: u32,
}

impl Encoder {
    /// Returns an encoder and the object's first piece.
    pub(crate) fn new(nonce: Uuid) -> (Self, Bytes) {
        let mut header = BytesMut::with_capacity(HEADER_BYTES);
        header.put_slice(&HEADER_MAGIC);
        header.put_u32_le(VERSION);
        header.put_u32_le(header_crc(&header, nonce.as_bytes()));
        header.put_slice(nonce.as_bytes());
        let encoder = Self {
            nonce,
            position: HEADER_BYTES as u64,
            open: None,
            pieces: Vec::new(),
            copied: BytesMut::new(),
            index: Vec::new(),
        };
        (encoder, header.freeze())
    }

    /// Adds a batch, with its payload's checksum if known; returns the block that this completed,
    /// if any. Streams must come in ascending order, and the batches of each in offset order.
    pub(crate) fn push(
        &mut self,
        stream: StreamId,
        batch: &Batch,
        payload_crc32c: Option<u32>,
    ) -> Option<PutPayload> {
        let payload_bytes = u32::try_from(batch.payload.len())
            .expect("the WAL's record limit or the rewriter bounds a batch");
        let len_bytes = ENTRY_BYTES + batch.payload.len();
        let fits = self.open.as_ref().is_some_and(|open| {
            let with_it = open.len_bytes as usize + self.copied.len() + len_bytes;
            open.stream == stream && with_it <= BLOCK_TARGET_BYTES
        });
        let sealed = if fits { None } else { self.seal() };
        if let Some(before) = self.open.as_ref().or(self.index.last()) {
            assert!(
                before.stream < stream || (before.stream == stream && before.end <= batch.base),
                "batch {} of stream {stream} follows offset {} of stream {}",
                batch.base,
                before.end,
                before.stream
            );
        }
        let open = self.open.get_or_insert(Block {
            stream,
            start: batch.base,
            end: batch.base,
            position: self.position,
            len_bytes: 0,
            entries: 0,
            max_timestamp_ms: batch.max_timestamp_ms,
            crc32c: 0,
        });
        open.end = batch.end();
        open.entries += 1;
        open.max_timestamp_ms = open.max_timestamp_ms.max(batch.max_timestamp_ms);
        let is_shared = batch.payload.len() >= SHARED_BYTES;
        let copied_bytes = if is_shared { ENTRY_BYTES } else { len_bytes };
        if self.copied.capacity() - self.copied.len() < copied_bytes {
            self.close_piece();
            self.copied = BytesMut::with_capacity(PIECE_BYTES);
        }
        self.copied.put_u64_le(batch.base.0);
        self.copied.put_u32_le(batch.count);
        self.copied.put_u32_le(payload_bytes);
        self.copied.put_i64_le(batch.max_timestamp_ms);
        if is_shared {
            self.close_piece();
            let crc32c = payload_crc32c.unwrap_or_else(|| crc32c::crc32c(&batch.payload));
            self.add(batch.payload.clone(), crc32c);
        } else {
            self.copied.put_slice(&batch.payload);
        }
        sealed
    }

    /// Adds the copied bytes to the open block as a piece.
    fn close_piece(&mut self) {
        if !self.copied.is_empty() {
            let piece = self.copied.split().freeze();
            let crc32c = crc32c::crc32c(&piece);
            self.add(piece, crc32c);
        }
    }

    fn add(&mut self, piece: Bytes, crc32c: u32) {
        let open = self.open.as_mut().expect("what is added belongs to a block");
        let piece_bytes = u32::try_from(piece.len()).ok();
        open.len_bytes = piece_bytes
            .and_then(|bytes| open.len_bytes.checked_add(bytes))
            .expect("a block is one batch or at most the target size");
        open.crc32c = crc32c_concat(open.crc32c, crc32c, piece.len() as u32);
        self.pieces.push(piece);
    }

    fn seal(&mut self) -> Option<PutPayload> {
        self.open.as_ref()?;
        self.close_piece();
        let block = self.open.take()?;
        self.position = block.position_end();
        self.index.push(block);
        Some(PutPayload::from_iter(self.pieces.drain(..)))
    }

    /// Returns the object's last pieces: the open block, then index and footer.
    pub(crate) fn finish(mut self) -> (Option<PutPayload>, Bytes, Summary) {
        let last = self.seal();
        let mut tail = BytesMut::with_capacity(self.index.len() * INDEX_ENTRY_BYTES + FOOTER_BYTES);
        for block in &self.index {
            tail.put_u64_le(block.stream.0);
            tail.put_u64_le(block.start.0);
            tail.put_u64_le(block.end.0);
            tail.put_u64_le(block.position);
            tail.put_u32_le(block.len_bytes);
            tail.put_u32_le(block.entries);
            tail.put_i64_le(block.max_timestamp_ms);
            tail.put_u32_le(block.crc32c);
            tail.put_u32_le(0);
        }
        let index_bytes = tail.len() as u64;
        let index_crc32c = crc32c::crc32c(&tail);
        let footer_at = tail.len();
        tail.put_u64_le(self.position);
        tail.put_u64_le(index_bytes);
        tail.put_u32_le(index_crc32c);
        tail.put_u32_le(VERSION);
        tail.put_slice(self.nonce.as_bytes());
        tail.put_bytes(0, 12);
        tail.put_slice(&FOOTER_MAGIC);
        tail.put_u32_le(crc32c::crc32c(&tail[footer_at..]));
        let summary = Summary {
            size_bytes: self.position + tail.len() as u64,
            index_position: self.position,
            index_bytes,
            index_crc32c,
        };
        (last, tail.freeze(), summary)
    }
}

/// Returns the checksum over magic, version and nonce: all of the header except the checksum
/// itself.
fn header_crc(magic_and_version: &[u8], nonce: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(magic_and_version), nonce)
}

/// Decodes the blocks of an object from the bytes of its index at `position`. Verifies the
/// checksum, and that the blocks tile the object from its header to the index, sorted by stream and
/// offset.
pub(crate) fn decode_index(position: u64, bytes: &[u8], crc32c: u32) -> Result<Vec<Block>, Damage> {
    if crc32c::crc32c(bytes) != crc32c {
        return damage(position, "the index does not match its checksum");
    }
    if !bytes.len().is_multiple_of(INDEX_ENTRY_BYTES) {
        return damage(
            position,
            format!("an index of {} bytes is not a whole number of entries", bytes.len()),
        );
    }
    let mut blocks: Vec<Block> = Vec::with_capacity(bytes.len() / INDEX_ENTRY_BYTES);
    let mut tiled_to = HEADER_BYTES as u64;
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
        if block.position != tiled_to
            || block.entries == 0
            || block.start >= block.end
            || !ordered
            || u32_at(entry, 52) != 0
        {
            return damage(at, format!("index entry {number} is impossible: {block:?}"));
        }
        // Bounded by the object's size: the sum of the lengths must end at the index.
        tiled_to = match tiled_to.checked_add(u64::from(block.len_bytes)) {
            Some(end) if end <= position => end,
            _ => return damage(at, format!("index entry {number} reaches beyond the data")),
        };
        blocks.push(block);
    }
    if tiled_to != position {
        return damage(position, format!("the blocks end at {tiled_to}"));
    }
    Ok(blocks)
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

/// Decodes the nonce of an object from its header.
pub(crate) fn decode_header(header: &[u8]) -> Result<Uuid, Damage> {
    if header[..8] != HEADER_MAGIC {
        return damage(0, "not an object: the magic is missing");
    }
    if u32_at(header, 12) != header_crc(&header[..12], &header[16..]) {
        return damage(0, "the header does not match its checksum");
    }
    if u32_at(header, 8) != VERSION {
        return damage(
            8,
            format!("format version {} is not known, only {VERSION}", u32_at(header, 8)),
        );
    }
    Ok(Uuid::from_slice(&header[16..]).expect("16 bytes"))
}

/// Decodes the location of an object's index from its footer at `position`; `nonce` is the
/// header's.
pub(crate) fn decode_footer(position: u64, footer: &[u8], nonce: Uuid) -> Result<Summary, Damage> {
    if u32_at(footer, 60) != crc32c::crc32c(&footer[..60]) {
        return damage(position, "the footer does not match its checksum");
    }
    if footer[52..60] != FOOTER_MAGIC
        || u32_at(footer, 20) != VERSION
        || footer[24..40] != *nonce.as_bytes()
        || footer[40..52] != [0; 12]
    {
        return damage(position, "the footer does not belong to the header");
    }
    let (index_position, index_bytes) = (u64_at(footer, 0), u64_at(footer, 8));
    if index_position < HEADER_BYTES as u64
        || index_position.checked_add(index_bytes) != Some(position)
    {
        return damage(
            position,
            format!(
                "an index of {index_bytes} bytes at {index_position} does not end at the footer"
            ),
        );
    }
    Ok(Summary {
        size_bytes: position + FOOTER_BYTES as u64,
        index_position,
        index_bytes,
        index_crc32c: u32_at(footer, 16),
    })
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
    /// A random number that is also in the object's name.
    pub nonce: Uuid,
    /// Its blocks in order.
    pub blocks: Vec<Block>,
}

impl Whole {
    /// Decodes and verifies header, footer and index.
    pub fn open(bytes: Bytes) -> Result<Self, Damage> {
        check_length(bytes.len() as u64)?;
        let nonce = decode_header(&bytes[..HEADER_BYTES])?;
        let footer_at = bytes.len() - FOOTER_BYTES;
        let footer = decode_footer(footer_at as u64, &bytes[footer_at..], nonce)?;
        let index_at =
            usize::try_from(footer.index_position).expect("below the length of the bytes");
        let index = &bytes[index_at..footer_at];
        let blocks = decode_index(footer.index_position, index, footer.index_crc32c)?;
        Ok(Self { bytes, nonce, blocks })
    }

    /// Decodes and verifies the batches of a block.
    pub fn batches(&self, block: &Block) -> Result<Vec<Batch>, Damage> {
        // The index was verified to tile the object, so the positions are inside.
        let at = usize::try_from(block.position).expect("below the length of the bytes");
        decode_block(block, &self.bytes.slice(at..at + block.len_bytes as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(base: u64, count: u32, len_bytes: usize) -> Batch {
        let payload: Vec<u8> = (0..len_bytes).map(|i| (base as usize * 31 + i * 7) as u8).collect();
        Batch {
            base: StreamOffset(base),
            count,
            max_timestamp_ms: 1000 - base.cast_signed(),
            payload: payload.into(),
        }
    }

    type Content = Vec<(StreamId, Batch)>;

    fn encode(content: &Content) -> (Bytes, Summary) {
        let (mut encoder, header) = Encoder::new(Uuid::from_u128(0x1234_5678));
        let mut object = BytesMut::from(&header[..]);
        for (at, (stream, batch)) in content.iter().enumerate() {
            let crc32c = (at % 2 == 0).then(|| crc32c::crc32c(&batch.payload));
            object.extend(encoder.push(*stream, batch, crc32c).into_iter().flatten().flatten());
        }
        let (last, tail, summary) = encoder.finish();
        object.extend(last.into_iter().flatten().flatten());
        object.extend(tail);
        assert_eq!(object.len() as u64, summary.size_bytes);
        (object.freeze(), summary)
    }

    fn decode(bytes: Bytes) -> Result<Content, Damage> {
        let object = Whole::open(bytes)?;
        let mut content = Vec::new();
        for block in &object.blocks {
            content.extend(object.batches(block)?.into_iter().map(|batch| (block.stream, batch)));
        }
        Ok(content)
    }

    fn small() -> Content {
        vec![
            (StreamId(1), batch(0, 2, 5)),
            (StreamId(1), batch(2, 1, 0)),
            (StreamId(1), batch(9, 1, 3)), // a gap before it
            (StreamId(2), batch(u64::from(u32::MAX), u32::MAX, 4)),
            (StreamId(u64::MAX), batch(7, 1, 1)),
        ]
    }

    #[test]
    fn encoded_batches_decode_unchanged() {
        let (bytes, summary) = encode(&small());
        let object = Whole::open(bytes.clone()).unwrap();
        assert_eq!(object.nonce, Uuid::from_u128(0x1234_5678));
        assert_eq!(object.blocks.len(), 3, "a block holds one stream");
        assert_eq!(object.blocks[0].end, StreamOffset(10));
        assert_eq!(
            object.blocks[1].end,
            StreamOffset(u64::from(u32::MAX) * 2),
            "offsets have 64 bits"
        );
        assert_eq!(summary.index_bytes, 3 * INDEX_ENTRY_BYTES as u64);
        assert_eq!(decode(bytes).unwrap(), small());
        assert_eq!(decode(encode(&Vec::new()).0).unwrap(), Vec::new(), "an empty object is valid");
    }

    #[test]
    fn blocks_have_about_the_target_size() {
        let quarter = BLOCK_TARGET_BYTES / 4;
        let mut content: Content = (0..10).map(|i| (StreamId(1), batch(i, 1, quarter))).collect();
        content.push((StreamId(1), batch(10, 1, 3 * BLOCK_TARGET_BYTES)));
        content.push((StreamId(1), batch(11, 1, 1)));
        let (bytes, _) = encode(&content);
        let object = Whole::open(bytes.clone()).unwrap();
        let entries: Vec<_> = object.blocks.iter().map(|block| block.entries).collect();
        assert_eq!(entries, [3, 3, 3, 1, 1, 1], "a large batch has a block to itself");
        assert_eq!(decode(bytes).unwrap(), content);
    }

    #[test]
    fn only_small_payloads_are_copied() {
        let (mut encoder, _) = Encoder::new(Uuid::from_u128(1));
        let small = batch(0, 1, SHARED_BYTES - 1);
        let large = batch(1, 1, SHARED_BYTES);
        for batch in [&small, &large, &batch(2, 1, 10), &batch(3, 1, 10)] {
            assert!(encoder.push(StreamId(1), batch, None).is_none());
        }
        let (block, ..) = encoder.finish();
        let pieces: Vec<Bytes> = block.unwrap().into_iter().collect();
        assert!(pieces.iter().any(|piece| piece.as_ptr() == large.payload.as_ptr()));
        assert_eq!(pieces.len(), 3, "copied payloads share a piece");
    }

    /// Every bit of a small object flipped, one at a time, and every truncation gives an error:
    /// never other content, never a panic.
    #[test]
    fn every_flipped_bit_and_every_truncation_is_detected() {
        let (bytes, _) = encode(&small());
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut flipped = bytes.to_vec();
                flipped[at] ^= 1 << bit;
                assert!(decode(flipped.into()).is_err(), "bit {bit} of byte {at}");
            }
        }
        for len in 0..bytes.len() {
            assert!(decode(bytes.slice(..len)).is_err(), "cut at {len}");
            assert!(decode(bytes.slice(len + 1..)).is_err(), "begun at {}", len + 1);
        }
        let mut longer = bytes.to_vec();
        longer.push(0);
        assert!(decode(longer.into()).is_err());
    }

    proptest::proptest! {
        /// Damage with matching checksums, as a defect of a writer would leave it, never causes a
        /// panic.
        #[test]
        fn invalid_contents_with_valid_checksums_do_not_panic(
            index_patches in proptest::collection::vec((0usize..168, proptest::num::u8::ANY), 0..6),
            data_patches in proptest::collection::vec((0usize..134, proptest::num::u8::ANY), 0..6),
        ) {
            let (bytes, summary) = encode(&small());
            let mut bytes = bytes.to_vec();
            let data_len = usize::try_from(summary.index_position).unwrap() - HEADER_BYTES;
            for (at, value) in data_patches {
                bytes[HEADER_BYTES + at % data_len] ^= value;
            }
            let index_at = usize::try_from(summary.index_position).unwrap();
            for (at, value) in index_patches {
                bytes[index_at + at] ^= value;
            }
            let index_end = index_at + usize::try_from(summary.index_bytes).unwrap();
            let mut index = bytes[index_at..index_end].to_vec();
            for entry in index.chunks_exact_mut(INDEX_ENTRY_BYTES) {
                let at = u64_at(entry, 24);
                let end = at.saturating_add(u64::from(u32_at(entry, 32)));
                if let (Ok(at), Ok(end)) = (usize::try_from(at), usize::try_from(end))
                    && let Some(data) = bytes.get(at..end)
                {
                    let crc = crc32c::crc32c(data);
                    entry[48..52].copy_from_slice(&crc.to_le_bytes());
                }
            }
            let crc = crc32c::crc32c(&index);
            if let Ok(blocks) = decode_index(summary.index_position, &index, crc) {
                for block in &blocks {
                    let at = usize::try_from(block.position).unwrap();
                    let data = Bytes::copy_from_slice(&bytes[at..at + block.len_bytes as usize]);
                    if let Ok(batches) = decode_block(block, &data) {
                        proptest::prop_assert_eq!(batches[0].base, block.start);
                        proptest::prop_assert_eq!(batches[batches.len() - 1].end(), block.end);
                    }
                }
            }
        }
    }

    /// An object of format version 1. Every later version of this code must decode it.
    #[test]
    fn version_1_still_decodes() {
        let content: Content = vec![(
            StreamId(3),
            Batch {
                base: StreamOffset(5),
                count: 2,
                max_timestamp_ms: -1,
                payload: Bytes::from_static(b"alluvium"),
            },
        )];
        let bytes = Bytes::from_static(include_bytes!("../tests/data/object-v1.bin"));
        assert_eq!(decode(bytes.clone()).unwrap(), content);
        assert_eq!(encode(&content).0, bytes, "and the encoding is unchanged");
    }
}
