//! Compression of a batch's records.

use std::io::{self, Read, Write};

use super::decompress::{SnappyBlocks, decompress};
use super::{bad, invalid};
use crate::batch::{self, Assembled, BatchHeader, Codec, HEADER_BYTES};
use crate::errors::ApiError;

/// The last level at which zstd's window is no larger than a usual batch. Level 22 uses tables of
/// 700 MiB; with a window of 2 MiB they have 20 MiB.
const ZSTD_LAST_SMALL_LEVEL: i32 = 9;
const ZSTD_WINDOW_LOG: u32 = 21;

/// Recompresses a batch with another codec at `level`; the records stay the same.
///
/// # Errors
/// [`ApiError::InvalidRecord`] if the records cannot be read, [`ApiError::BatchTooLarge`] if the
/// result exceeds `max_bytes`.
pub(crate) fn recompress(
    batch: &[u8],
    codec: Codec,
    level: i32,
    max_bytes: usize,
) -> Result<Vec<u8>, ApiError> {
    let header = BatchHeader::parse(batch).ok_or_else(|| invalid(&bad("no header")))?;
    let mut records = decompress(&header, &batch[HEADER_BYTES..]).map_err(|e| invalid(&e))?;
    let mut out = Bounded { bytes: batch[..HEADER_BYTES].to_vec(), max_bytes };
    compress(&mut records, codec, level, &mut out).map_err(|error| match error.kind() {
        io::ErrorKind::FileTooLarge => {
            ApiError::BatchTooLarge { len_bytes: max_bytes as u64 + 1, max_bytes: max_bytes as u64 }
        }
        _ => invalid(&error),
    })?;
    batch::set_codec(&mut out.bytes, codec);
    Ok(out.bytes)
}

fn compress(
    records: &mut impl Read,
    codec: Codec,
    level: i32,
    out: &mut Bounded,
) -> io::Result<()> {
    match codec {
        Codec::None => {
            io::copy(records, out)?;
        }
        Codec::Gzip => {
            let level = u32::try_from(level)
                .map_or_else(|_| flate2::Compression::default(), flate2::Compression::new);
            let mut encoder = flate2::write::GzEncoder::new(out, level);
            io::copy(records, &mut encoder)?;
            encoder.finish()?;
        }
        Codec::Snappy => {
            out.write_all(SnappyBlocks::MAGIC)?;
            out.write_all(&[0, 0, 0, 1, 0, 0, 0, 1])?;
            let mut block = Vec::with_capacity(SnappyBlocks::BLOCK_BYTES);
            loop {
                block.clear();
                records.by_ref().take(SnappyBlocks::BLOCK_BYTES as u64).read_to_end(&mut block)?;
                if block.is_empty() {
                    break;
                }
                let compressed = snap::raw::Encoder::new().compress_vec(&block)?;
                let len =
                    u32::try_from(compressed.len()).map_err(|_| bad("a block is too long"))?;
                out.write_all(&len.to_be_bytes())?;
                out.write_all(&compressed)?;
            }
        }
        Codec::Lz4 => {
            // As Kafka's clients write it: the Java client cannot read linked blocks. Level 9
            // selects the fast compressor.
            let mut encoder = lz4::EncoderBuilder::new()
                .block_size(lz4::BlockSize::Max64KB)
                .block_mode(lz4::BlockMode::Independent)
                .block_checksum(lz4::liblz4::BlockChecksum::NoBlockChecksum)
                .checksum(lz4::ContentChecksum::NoChecksum)
                .level(if level == 9 { 0 } else { u32::try_from(level).unwrap_or(0) })
                .build(out)?;
            io::copy(records, &mut encoder)?;
            encoder.finish().1?;
        }
        Codec::Zstd => {
            let mut encoder = zstd::stream::write::Encoder::new(out, level)?;
            if level > ZSTD_LAST_SMALL_LEVEL {
                use zstd::stream::raw::CParameter;
                encoder.window_log(ZSTD_WINDOW_LOG)?;
                encoder.set_parameter(CParameter::HashLog(ZSTD_WINDOW_LOG - 1))?;
                encoder.set_parameter(CParameter::ChainLog(ZSTD_WINDOW_LOG))?;
            }
            io::copy(records, &mut encoder)?;
            encoder.finish()?;
        }
    }
    Ok(())
}

/// Compresses the records of a batch at the codec's default level.
///
/// # Errors
/// The codec fails, which is not expected.
fn compress_all(codec: Codec, mut records: &[u8]) -> io::Result<Vec<u8>> {
    let level = match codec {
        Codec::Gzip => -1,
        Codec::Lz4 => 9,
        Codec::None | Codec::Snappy | Codec::Zstd => 3,
    };
    let mut out = Bounded { bytes: Vec::new(), max_bytes: usize::MAX };
    compress(&mut records, codec, level, &mut out)?;
    Ok(out.bytes)
}

/// Compresses records with the header's codec, and returns the batch.
pub(crate) fn assemble(mut header: Assembled, records: &[u8]) -> Vec<u8> {
    match compress_all(header.codec, records) {
        Ok(compressed) => header.batch(&compressed),
        Err(error) => {
            tracing::warn!(
                %error,
                codec = ?header.codec,
                "compression failed; records are stored uncompressed"
            );
            header.codec = Codec::None;
            header.batch(records)
        }
    }
}

/// A byte buffer with a limit.
struct Bounded {
    bytes: Vec<u8>,
    max_bytes: usize,
}

impl Write for Bounded {
    fn write(&mut self, more: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + more.len() > self.max_bytes {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(more);
        Ok(more.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
