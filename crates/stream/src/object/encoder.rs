//! Encoding of objects, block by block. `docs/format/object.md`.

use alluvium_wal::crc32c_concat;
use bytes::{BufMut, Bytes, BytesMut};
use object_store::PutPayload;
use uuid::Uuid;

use super::directory::{self, Origin};
use super::index::{self, IndexPlace};
use super::{
    BLOCK_TARGET_BYTES, Block, ENTRY_BYTES, FOOTER_BYTES, Footer, HEADER_BYTES, VERSION,
    encode_header,
};
use crate::types::{Batch, StreamId};

/// A payload of this size or more is not copied into its block: sending one more piece costs less
/// than the copy.
pub(super) const SHARED_BYTES: usize = 4 << 10;
/// Copied bytes are gathered in pieces of about this size; smaller ones if the block has less.
const PIECE_BYTES: usize = 64 << 10;

/// Encodes an object block by block; holds one block, the index and the directory. Large payloads
/// are part of a block by reference, so their allocations live until the block is written.
pub(crate) struct Encoder {
    nonce: Uuid,
    /// A block is closed before it would grow past this.
    block_bytes: usize,
    /// Position of the open block in the object.
    position: u64,
    /// The block being filled. Until it is sealed, its length and checksum cover only `pieces`.
    open: Option<Block>,
    pieces: Vec<Bytes>,
    /// Bytes of the block after `pieces`, with spare capacity for more.
    copied: BytesMut,
    index: Vec<Block>,
    /// Id, kind and label of each stream so far.
    streams: Vec<(StreamId, u8, Bytes)>,
}

/// What the catalog stores so that an object can be read without its footer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Summary {
    pub(crate) size_bytes: u64,
    pub(crate) index: IndexPlace,
}

impl Encoder {
    /// Returns an encoder and the object's first piece.
    pub(crate) fn new(nonce: Uuid) -> (Self, Bytes) {
        let encoder = Self {
            nonce,
            block_bytes: BLOCK_TARGET_BYTES,
            position: HEADER_BYTES as u64,
            open: None,
            pieces: Vec::new(),
            copied: BytesMut::new(),
            index: Vec::new(),
            streams: Vec::new(),
        };
        (encoder, encode_header(VERSION, nonce))
    }

    /// Makes small blocks, so that a small object has many of them.
    #[cfg(test)]
    pub(crate) fn with_block_bytes(self, block_bytes: usize) -> Self {
        Self { block_bytes, ..self }
    }

    /// Begins the part of a stream, with its kind and label. Streams must come in ascending order;
    /// one that has begun is ignored.
    pub(crate) fn begin(&mut self, stream: StreamId, kind: u8, label: &Bytes) {
        if self.streams.last().is_none_or(|(last, ..)| *last != stream) {
            self.streams.push((stream, kind, label.clone()));
        }
    }

    /// Adds a batch of the stream that has begun, with its payload's checksum if known; returns the
    /// block that this completed, if any. Batches must come in offset order.
    pub(crate) fn push(
        &mut self,
        batch: &Batch,
        payload_crc32c: Option<u32>,
    ) -> Option<PutPayload> {
        let stream = self.streams.last().expect("a stream has begun").0;
        let payload_bytes = u32::try_from(batch.payload.len())
            .expect("the WAL's record limit or the rewriter bounds a batch");
        let len_bytes = ENTRY_BYTES + batch.payload.len();
        let fits = self.open.as_ref().is_some_and(|open| {
            let with_it = open.len_bytes as usize + self.copied.len() + len_bytes;
            open.stream == stream && with_it <= self.block_bytes
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

    /// Returns the object's last pieces: the open block, then directory, index and footer.
    pub(crate) fn finish(mut self, origin: &Origin) -> (Option<PutPayload>, Bytes, Summary) {
        let last = self.seal();
        let mut rows = directory::rows_of(&self.index);
        assert_eq!(rows.len(), self.streams.len(), "each stream that has begun has a batch");
        for (row, (_, kind, label)) in rows.iter_mut().zip(self.streams) {
            (row.kind, row.label) = (kind, Some(label));
        }
        let directory = directory::encode(origin, &rows);
        let index_bytes = index::encoded_bytes(self.index.len());
        let mut tail = BytesMut::with_capacity(directory.len() + index_bytes + FOOTER_BYTES);
        tail.put_slice(&directory);
        let top_bytes = index::encode(&self.index, &mut tail);
        let top_at = tail.len() - top_bytes;
        let index = IndexPlace {
            format: VERSION,
            position: self.position + top_at as u64,
            len_bytes: top_bytes as u64,
            crc32c: crc32c::crc32c(&tail[top_at..]),
        };
        let footer = Footer {
            index,
            nonce: self.nonce,
            directory_bytes: u32::try_from(directory.len()).expect("its content has 1 GiB at most"),
            blocks: u32::try_from(self.index.len()).expect("the top states it, too"),
            directory_crc32c: crc32c::crc32c(&directory),
        };
        tail.put_slice(&footer.encode());
        let size_bytes = self.position + tail.len() as u64;
        (last, tail.freeze(), Summary { size_bytes, index })
    }
}
