//! Decompression of a batch's records. A batch comes from a client, so every length is bounded.

use std::io::{self, BufRead, BufReader, Read};

use super::{MAX_UNPACKED_BYTES, bad, invalid};
use crate::batch::{BatchHeader, Codec};
use crate::errors::ApiError;

/// The greatest number of bytes to which one batch is decompressed.
const MAX_DECOMPRESSED_BYTES: u64 = 256 << 20;

/// The default of the zstd library for streaming decoders (`ZSTD_WINDOWLOG_LIMIT_DEFAULT`), which
/// Kafka's brokers and clients use.
const MAX_ZSTD_WINDOW_BYTES: u64 = 1 << 27;

/// Reused memory for decompressed batches and zstd's decoder state: setting these up takes longer
/// than decompressing a small batch.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) bytes: Vec<u8>,
    zstd: Option<zstd::bulk::Decompressor<'static>>,
}

impl Scratch {
    /// Decompresses the records in `body`, the part of a batch after its header. Returns whether
    /// that succeeded within `max_bytes`.
    pub(super) fn decompress(
        &mut self,
        header: &BatchHeader,
        body: &[u8],
        max_bytes: usize,
    ) -> bool {
        self.bytes.clear();
        if body.len() > max_bytes {
            return false;
        }
        let result = match header.codec() {
            Some(Codec::Zstd) => self.decompress_zstd(body, max_bytes),
            Some(Codec::Snappy) => SnappyBlocks::new(body, max_bytes)
                .take(max_bytes as u64 + 1)
                .read_to_end(&mut self.bytes),
            _ => decompress(header, body).and_then(|records| {
                records.take(max_bytes as u64 + 1).read_to_end(&mut self.bytes)
            }),
        };
        result.is_ok_and(|len_bytes| len_bytes <= max_bytes)
    }

    fn decompress_zstd(&mut self, body: &[u8], max_bytes: usize) -> io::Result<usize> {
        let zstd = match &mut self.zstd {
            Some(zstd) => zstd,
            none => none.insert(zstd::bulk::Decompressor::new()?),
        };
        check_zstd_windows(body)?;
        self.bytes.reserve_exact(max_bytes);
        zstd.decompress_to_buffer(body, &mut self.bytes)
    }
}

/// Refuses zstd frames whose window is larger than a streaming decoder accepts, here and in
/// clients. Decompression into a buffer needs no window and does not check it.
///
/// The layout of the frame header is in RFC 8878, section 3.1.1.1.
fn check_zstd_windows(mut body: &[u8]) -> io::Result<()> {
    const MAGIC: [u8; 4] = 0xfd2f_b528_u32.to_le_bytes();
    while !body.is_empty() {
        if let Some((magic, [descriptor, window, ..])) = body.split_first_chunk::<4>()
            && *magic == MAGIC
            // In a single segment, the window is the content.
            && descriptor & 0x20 == 0
        {
            let base = 1u64 << (10 + (window >> 3));
            let window_bytes = base + base / 8 * u64::from(window & 7);
            if window_bytes > MAX_ZSTD_WINDOW_BYTES {
                return Err(bad("a zstd window is larger than 128 MiB"));
            }
        }
        let len = zstd::zstd_safe::find_frame_compressed_size(body)
            .map_err(|code| bad(zstd::zstd_safe::get_error_name(code)))?;
        body = body.get(len..).unwrap_or_default();
    }
    Ok(())
}

/// Checks that every client can decompress the records in `body`, the part of a produced batch
/// after its header. Records that cannot be decompressed at all may pass.
///
/// # Errors
/// [`ApiError::InvalidRecord`] if Kafka's clients cannot read it.
pub(crate) fn check_frame(header: &BatchHeader, body: &[u8]) -> Result<(), ApiError> {
    match header.codec() {
        Some(Codec::Lz4) => check_lz4_frame(body).map_err(|e| invalid(&e)),
        _ => Ok(()),
    }
}

/// Checks that Kafka's clients can read an LZ4 frame: its blocks do not depend on each other, it
/// needs no dictionary, and it has an end mark. The decoder here also reads other frames. Neither
/// reads bytes after the frame.
///
/// The rules are those of `Lz4BlockInputStream` in Apache Kafka 4.4.0; the layout is in the LZ4
/// frame format 1.6.
///
/// # Errors
/// What is wrong with the frame.
fn check_lz4_frame(body: &[u8]) -> io::Result<()> {
    const MAGIC: [u8; 4] = 0x184d_2204_u32.to_le_bytes();
    const VERSION: u8 = 0b1100_0000;
    const INDEPENDENT_BLOCKS: u8 = 0b10_0000;
    const BLOCK_CHECKSUMS: u8 = 0b1_0000;
    const CONTENT_SIZE: u8 = 0b1000;
    const CONTENT_CHECKSUM: u8 = 0b100;
    const DICTIONARY_ID: u8 = 1;
    const CHECKSUM_BYTES: usize = 4;
    let ends_early = || bad("an LZ4 frame ends early");
    let skip = |rest: &mut &[u8], len_bytes: usize| {
        *rest = rest.get(len_bytes..).ok_or_else(ends_early)?;
        Ok::<(), io::Error>(())
    };
    let Some((&MAGIC, [flags, _block_size, rest @ ..])) = body.split_first_chunk::<4>() else {
        return Err(bad("not an LZ4 frame"));
    };
    if flags & VERSION != 0b0100_0000 {
        return Err(bad("an LZ4 frame of an unknown version"));
    }
    if flags & INDEPENDENT_BLOCKS == 0 {
        return Err(bad("blocks of an LZ4 frame depend on each other"));
    }
    if flags & DICTIONARY_ID != 0 {
        return Err(bad("an LZ4 frame needs a dictionary"));
    }
    let mut rest = rest;
    let content_size_bytes = if flags & CONTENT_SIZE == 0 { 0 } else { 8 };
    let descriptor_checksum_bytes = 1;
    skip(&mut rest, content_size_bytes + descriptor_checksum_bytes)?;
    loop {
        let (block, after) = rest.split_first_chunk::<4>().ok_or_else(ends_early)?;
        rest = after;
        // The highest bit marks a block that is not compressed.
        let block_bytes = u32::from_le_bytes(*block) & !(1 << 31);
        if block_bytes == 0 {
            break;
        }
        let checksum_bytes = if flags & BLOCK_CHECKSUMS == 0 { 0 } else { CHECKSUM_BYTES };
        skip(&mut rest, block_bytes as usize + checksum_bytes)?;
    }
    if flags & CONTENT_CHECKSUM != 0 {
        skip(&mut rest, CHECKSUM_BYTES)?;
    }
    Ok(())
}

pub(super) fn decompress<'a>(
    header: &BatchHeader,
    body: &'a [u8],
) -> io::Result<impl BufRead + use<'a>> {
    let reader: Box<dyn Read + 'a> = match header.codec() {
        Some(Codec::None) => Box::new(body),
        Some(Codec::Gzip) => Box::new(flate2::read::MultiGzDecoder::new(body)),
        Some(Codec::Lz4) => Box::new(lz4::Decoder::new(body)?),
        Some(Codec::Zstd) => Box::new(zstd::stream::read::Decoder::new(body)?),
        Some(Codec::Snappy) => Box::new(SnappyBlocks::new(body, MAX_UNPACKED_BYTES as usize)),
        None => return Err(bad("unknown compression codec")),
    };
    Ok(BufReader::new(reader.take(MAX_DECOMPRESSED_BYTES)))
}

/// A reader of Snappy data as Kafka's clients write it: framed as by `snappy-java`, or one bare
/// block.
pub(super) struct SnappyBlocks<'a> {
    framed: bool,
    rest: &'a [u8],
    /// The limit of a block, which is decompressed as a whole.
    max_block_bytes: usize,
    block: io::Cursor<Vec<u8>>,
}

impl<'a> SnappyBlocks<'a> {
    /// The magic bytes; version and compatible version follow, four bytes each.
    pub(super) const MAGIC: &'static [u8; 8] = b"\x82SNAPPY\0";
    pub(super) const FRAME_HEADER_BYTES: usize = 16;
    /// The uncompressed bytes of each block that this server writes.
    pub(super) const BLOCK_BYTES: usize = 32 << 10;

    pub(super) fn new(body: &'a [u8], max_block_bytes: usize) -> Self {
        let framed = body.starts_with(Self::MAGIC) && body.len() >= Self::FRAME_HEADER_BYTES;
        let rest = if framed { &body[Self::FRAME_HEADER_BYTES..] } else { body };
        Self { framed, rest, max_block_bytes, block: io::Cursor::default() }
    }

    fn next_block(&mut self) -> io::Result<()> {
        let compressed = if self.framed {
            let (len, rest) = self
                .rest
                .split_first_chunk::<4>()
                .ok_or_else(|| bad("a snappy frame ends early"))?;
            let len = u32::from_be_bytes(*len) as usize;
            let block = rest.get(..len).ok_or_else(|| bad("a snappy block ends early"))?;
            self.rest = &rest[len..];
            block
        } else {
            std::mem::take(&mut self.rest)
        };
        // Three bytes of a block yield at most 64 bytes of output. A greater length is invalid and
        // must not be allocated.
        let len_bytes = snap::raw::decompress_len(compressed)?;
        if len_bytes / 22 > compressed.len() + 3 {
            return Err(bad("a snappy block claims an impossible length"));
        }
        if len_bytes > self.max_block_bytes {
            return Err(bad("a snappy block is too large to be decompressed"));
        }
        self.block = io::Cursor::new(snap::raw::Decoder::new().decompress_vec(compressed)?);
        Ok(())
    }
}

impl Read for SnappyBlocks<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            let n = self.block.read(out)?;
            if n > 0 || out.is_empty() || self.rest.is_empty() {
                return Ok(n);
            }
            self.next_block()?;
        }
    }
}
