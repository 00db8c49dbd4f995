//! The directory of an object: what it states of itself and of its streams.
//! `docs/format/object.md`, section 1.

use alluvium_wal::LogOffset;
use bytes::Bytes;
use uuid::Uuid;

use super::{Block, ENTRY_BYTES, damage};
use crate::damage::{Damage, DecodeError};
use crate::frame;
use crate::types::{KIND_LOG, MAX_LABEL_BYTES, StreamId, StreamOffset};
use crate::wire::{Reader, Writer};

/// The greatest length of the content of a directory, which is compressed.
const MAX_CONTENT_BYTES: u64 = 1 << 30;

/// The generation in the directory of an object with batches that a rebuild has put into holes. In
/// the catalog it is 0.
pub const REBUILD: u32 = u32::MAX;

/// Who wrote an object, and from what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The id of the store.
    pub store: Uuid,
    /// The run of the store that wrote the object.
    pub incarnation: Uuid,
    /// The opening of that run.
    pub opening: u32,
    /// The term that held.
    pub term: u32,
    /// That of the catalog; [`REBUILD`] if it was written by a rebuild.
    pub generation: u32,
    /// See [`crate::catalog::ObjectInfo::created_at_ms`].
    pub created_at_ms: i64,
    /// Of an upload: whatever the log has below this offset of the object's streams is in this
    /// object or in earlier ones. 0 for a compaction or a rebuild.
    pub cut: LogOffset,
}

impl Origin {
    /// Whether the object has batches that a rebuild has put into holes, and nothing else.
    pub fn is_of_rebuild(&self) -> bool {
        self.generation == REBUILD
    }
}

/// A stream in the directory of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryRow {
    /// Its id.
    pub stream: StreamId,
    /// See [`crate::Change::CreateStream`].
    pub kind: u8,
    /// See [`crate::Change::CreateStream`]; `None` in an object of format version 1.
    pub label: Option<Bytes>,
    /// First offset of its first batch.
    pub start: StreamOffset,
    /// Offset after its last batch.
    pub end: StreamOffset,
    /// Payload of its batches, in bytes.
    pub payload_bytes: u64,
    /// Greatest timestamp of its batches.
    pub max_timestamp_ms: i64,
    /// Number of its blocks.
    pub blocks: u64,
}

impl DirectoryRow {
    /// Returns the row of a stream as it follows from its blocks, of which there is at least one.
    fn of_blocks(blocks: &[Block]) -> Self {
        let (first, last) = (&blocks[0], &blocks[blocks.len() - 1]);
        let len_bytes: u64 = blocks.iter().map(|block| u64::from(block.len_bytes)).sum();
        let entries: u64 = blocks.iter().map(|block| u64::from(block.entries)).sum();
        Self {
            stream: first.stream,
            // Streams of other kinds are not written to objects.
            kind: KIND_LOG,
            label: None,
            start: first.start,
            end: last.end,
            // An index is not trusted: it may state more entries than fit.
            payload_bytes: len_bytes.saturating_sub(entries * ENTRY_BYTES as u64),
            max_timestamp_ms: blocks.iter().map(|block| block.max_timestamp_ms).max().unwrap_or(-1),
            blocks: blocks.len() as u64,
        }
    }

    /// Whether it states the same as `other` of the batches.
    fn is_like(&self, other: &Self) -> bool {
        let of_other = other.clone();
        *self == Self { kind: self.kind, label: self.label.clone(), ..of_other }
    }
}

/// Returns the rows of an index, one for each stream. Labels are not known.
pub(crate) fn rows_of(blocks: &[Block]) -> Vec<DirectoryRow> {
    let of_streams = blocks.chunk_by(|one, next| one.stream == next.stream);
    of_streams.map(DirectoryRow::of_blocks).collect()
}

/// Returns the bytes of a directory.
///
/// # Panics
/// If its content has more than 1 GiB.
pub(super) fn encode(origin: &Origin, rows: &[DirectoryRow]) -> Vec<u8> {
    let content = encode_content(origin, rows);
    assert!(content.len() as u64 <= MAX_CONTENT_BYTES, "a directory of {} bytes", content.len());
    frame::compress(&content)
}

pub(super) fn encode_content(origin: &Origin, rows: &[DirectoryRow]) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.uuid(origin.store);
    writer.uuid(origin.incarnation);
    writer.u32(origin.opening);
    writer.u32(origin.term);
    writer.u32(origin.generation);
    writer.u32(u32::try_from(rows.len()).expect("the index of an object fits into memory"));
    writer.u64(origin.created_at_ms.cast_unsigned());
    writer.u64(origin.cut.0);
    let mut before = 0;
    for row in rows {
        writer.varint(row.stream.0 - before);
        writer.u8(row.kind);
        writer.bytes(row.label.as_deref().unwrap_or_default());
        writer.varint(row.start.0);
        writer.varint(row.end.0 - row.start.0);
        writer.varint(row.payload_bytes);
        writer.signed(row.max_timestamp_ms);
        writer.varint(row.blocks);
        before = row.stream.0;
    }
    writer.finish()
}

/// Decodes the directory at `position` from its bytes. Verifies the checksum, and that the rows
/// ascend.
pub(super) fn decode(
    position: u64,
    bytes: &[u8],
    crc32c: u32,
) -> Result<(Origin, Vec<DirectoryRow>), Damage> {
    if crc32c::crc32c(bytes) != crc32c {
        return damage(position, "the directory does not match its checksum");
    }
    let decoded = frame::decompress(bytes, MAX_CONTENT_BYTES)
        .and_then(|content| decode_content(&mut Reader::new(&content)));
    decoded.or_else(|error| match error {
        DecodeError::Damaged(Damage { position: at, reason }) => {
            damage(position, format!("the directory, at byte {at} of its content: {reason}"))
        }
        DecodeError::LaterVersion(reason) => damage(position, reason),
    })
}

fn decode_content(reader: &mut Reader<'_>) -> Result<(Origin, Vec<DirectoryRow>), DecodeError> {
    let (store, incarnation) = (reader.uuid()?, reader.uuid()?);
    let (opening, term, generation) = (reader.u32()?, reader.u32()?, reader.u32()?);
    let count = reader.u32()?;
    let (created_at_ms, cut) = (reader.u64()?.cast_signed(), LogOffset(reader.u64()?));
    // Each row has at least 8 bytes, so a wrong number allocates little more than the content.
    let mut rows: Vec<DirectoryRow> = Vec::with_capacity((count as usize).min(reader.left() / 8));
    for _ in 0..count {
        let before = rows.last().map(|row| row.stream.0);
        let (stream, kind) = (StreamId(reader.next_key(before)?), reader.u8()?);
        let label = reader.bytes()?;
        if label.len() > MAX_LABEL_BYTES {
            return reader.invalid(format!("a label of {} bytes", label.len()));
        }
        let start = StreamOffset(reader.varint()?);
        let end = StreamOffset(reader.above(start.0)?);
        if end == start {
            return reader.invalid(format!("an empty part of stream {stream}"));
        }
        let (payload_bytes, max_timestamp_ms) = (reader.varint()?, reader.signed()?);
        let (label, blocks) = (Some(label), reader.varint()?);
        let row = DirectoryRow {
            stream,
            kind,
            label,
            start,
            end,
            payload_bytes,
            max_timestamp_ms,
            blocks,
        };
        rows.push(row);
    }
    reader.end()?;
    let origin = Origin { store, incarnation, opening, term, generation, created_at_ms, cut };
    Ok((origin, rows))
}

/// Returns whether content is accepted; it is an error if it is then encoded to other bytes.
#[cfg(any(test, fuzzing))]
pub(super) fn check_content(content: &[u8]) -> Result<bool, String> {
    let bytes = Bytes::copy_from_slice(content);
    match decode_content(&mut Reader::new(&bytes)) {
        Ok((origin, rows)) if encode_content(&origin, &rows) == content => Ok(true),
        Ok((origin, rows)) => Err(format!("{content:?} is decoded as {origin:?}, {rows:?}")),
        Err(_) => Ok(false),
    }
}

/// Checks that the rows of a directory at `position` are those of the index.
pub(super) fn check_rows(
    position: u64,
    rows: &[DirectoryRow],
    blocks: &[Block],
) -> Result<(), Damage> {
    let expected = rows_of(blocks);
    if rows.len() != expected.len() {
        let (stated, there) = (rows.len(), expected.len());
        return damage(position, format!("the directory has {stated} streams, the index {there}"));
    }
    match rows.iter().zip(&expected).find(|(row, expected)| !row.is_like(expected)) {
        None => Ok(()),
        Some((row, _)) => {
            let stream = row.stream;
            damage(position, format!("the directory does not match the index at stream {stream}"))
        }
    }
}
