//! The times of the records inside a batch: the only place that looks behind a batch's header.
//!
//! Batches come from clients, so nothing in them is believed: records are streamed through a decompressor that is cut off, never
//! collected.

use std::io::{self, BufRead, BufReader, Read};

use crate::batch::{BatchHeader, Codec, HEADER_BYTES};
use crate::errors::ApiError;

/// At most so many bytes of one batch are decompressed.
const MAX_DECOMPRESSED_BYTES: u64 = 256 << 20;

/// What a record without a timestamp has.
const NO_TIMESTAMP: i64 = -1;

/// A record's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) offset: u64,
    pub(crate) timestamp_ms: i64,
}

/// The first record of `batch` whose timestamp is at least `timestamp_ms`. `None` if there is none although the
/// header's greatest timestamp promised one.
///
/// # Errors
/// [`ApiError::CorruptBatch`] when the records can not be read.
pub(crate) fn first_at_or_after(
    batch: &[u8],
    timestamp_ms: i64,
) -> Result<Option<Found>, ApiError> {
    let corrupt =
        |reason: String| ApiError::CorruptBatch(format!("records of a stored batch: {reason}"));
    let header = BatchHeader::parse(batch).ok_or_else(|| corrupt("no header".into()))?;
    let base_offset = header.base_offset as u64;
    if header.is_log_append_time() {
        let found = Found { offset: base_offset, timestamp_ms: header.max_timestamp_ms };
        return Ok((found.timestamp_ms >= timestamp_ms).then_some(found));
    }
    for record in records(&header, &batch[HEADER_BYTES..]).map_err(|e| corrupt(e.to_string()))? {
        let record = record.map_err(|e| corrupt(e.to_string()))?;
        let found = Found {
            offset: base_offset.saturating_add(record.offset_delta),
            timestamp_ms: header.base_timestamp_ms.saturating_add(record.timestamp_delta_ms),
        };
        if found.timestamp_ms >= timestamp_ms {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// The greatest timestamp of the records of `batch`, whatever its header says.
///
/// # Errors
/// [`ApiError::InvalidRecord`] when the records can not be read.
pub(crate) fn max_timestamp_ms(batch: &[u8]) -> Result<i64, ApiError> {
    let invalid = |e: io::Error| ApiError::InvalidRecord(format!("the batch's records: {e}"));
    let header = BatchHeader::parse(batch).ok_or_else(|| invalid(bad("no header")))?;
    let mut max_timestamp_ms = NO_TIMESTAMP;
    for record in records(&header, &batch[HEADER_BYTES..]).map_err(invalid)? {
        let delta_ms = record.map_err(invalid)?.timestamp_delta_ms;
        max_timestamp_ms = max_timestamp_ms.max(header.base_timestamp_ms.saturating_add(delta_ms));
    }
    Ok(max_timestamp_ms)
}

/// The records of a batch, of which the part behind the header is `body`.
fn records<'a>(
    header: &BatchHeader,
    body: &'a [u8],
) -> io::Result<impl Iterator<Item = io::Result<RecordHead>> + use<'a>> {
    let mut input = decompress(header, body)?;
    Ok((0..header.record_count).map(move |_| read_record_head(&mut input)))
}

struct RecordHead {
    timestamp_delta_ms: i64,
    offset_delta: u64,
}

/// Read a record's first fields and skip the rest of it.
fn read_record_head(input: &mut impl BufRead) -> io::Result<RecordHead> {
    let len_bytes = read_varint(input)?.0;
    let len_bytes = u64::try_from(len_bytes).map_err(|_| bad("a record of negative length"))?;
    let _attributes = read_byte(input)?;
    let (timestamp_delta_ms, timestamp_bytes) = read_varint(input)?;
    let (offset_delta, offset_bytes) = read_varint(input)?;
    let offset_delta = u64::try_from(offset_delta).map_err(|_| bad("a negative offset delta"))?;
    let rest = len_bytes
        .checked_sub(1 + timestamp_bytes + offset_bytes)
        .ok_or_else(|| bad("a record that is too short"))?;
    let skipped = io::copy(&mut input.take(rest), &mut io::sink())?;
    if skipped < rest {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(RecordHead { timestamp_delta_ms, offset_delta })
}

fn read_byte(input: &mut impl BufRead) -> io::Result<u8> {
    let mut byte = [0];
    input.read_exact(&mut byte)?;
    Ok(byte[0])
}

/// A zigzag varint and the bytes that it took.
fn read_varint(input: &mut impl BufRead) -> io::Result<(i64, u64)> {
    let mut value = 0u64;
    for at in 0..10 {
        let byte = read_byte(input)?;
        value |= u64::from(byte & 0x7f) << (at * 7);
        if byte < 0x80 {
            return Ok(((value >> 1) as i64 ^ -((value & 1) as i64), at + 1));
        }
    }
    Err(bad("a number of more than ten bytes"))
}

fn bad(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

fn decompress<'a>(header: &BatchHeader, body: &'a [u8]) -> io::Result<impl BufRead + use<'a>> {
    let reader: Box<dyn Read + 'a> = match header.codec() {
        Some(Codec::None) => Box::new(body),
        Some(Codec::Gzip) => Box::new(flate2::read::MultiGzDecoder::new(body)),
        Some(Codec::Lz4) => Box::new(lz4::Decoder::new(body)?),
        Some(Codec::Zstd) => Box::new(zstd::stream::read::Decoder::new(body)?),
        Some(Codec::Snappy) => Box::new(SnappyBlocks::new(body)),
        None => return Err(bad("an unknown compression codec")),
    };
    Ok(BufReader::new(reader.take(MAX_DECOMPRESSED_BYTES)))
}

/// Snappy as Kafka's clients write it: framed as by `snappy-java`, or one bare block.
struct SnappyBlocks<'a> {
    framed: bool,
    rest: &'a [u8],
    block: io::Cursor<Vec<u8>>,
}

impl<'a> SnappyBlocks<'a> {
    /// Magic, then version and compatible version, four bytes each.
    const MAGIC: &'static [u8; 8] = b"\x82SNAPPY\0";
    const FRAME_HEADER_BYTES: usize = 16;

    fn new(body: &'a [u8]) -> Self {
        let framed = body.starts_with(Self::MAGIC) && body.len() >= Self::FRAME_HEADER_BYTES;
        let rest = if framed { &body[Self::FRAME_HEADER_BYTES..] } else { body };
        Self { framed, rest, block: io::Cursor::default() }
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
        // Three bytes of a block give at most 64 bytes of output, so a greater length is a lie that would allocate.
        let len_bytes = snap::raw::decompress_len(compressed)?;
        if len_bytes / 22 > compressed.len() + 3 {
            return Err(bad("a snappy block claims an impossible length"));
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

#[cfg(test)]
mod tests {
    use kafka_protocol::records::Compression;

    use super::*;
    use crate::batch;

    const CODECS: [Compression; 5] = [
        Compression::None,
        Compression::Gzip,
        Compression::Snappy,
        Compression::Lz4,
        Compression::Zstd,
    ];

    fn stored(codec: Compression, timestamps_ms: &[i64]) -> Vec<u8> {
        let mut bytes = batch::tests::encode(codec, (-1, -1, -1), timestamps_ms).to_vec();
        batch::place(&mut bytes, 500, 0);
        bytes
    }

    #[test]
    fn the_exact_record_is_found_under_every_compression() {
        // Many records, so that snappy needs several blocks.
        let mut timestamps_ms: Vec<i64> = (0..3_000).map(|i| 1_000 + i * 2).collect();
        timestamps_ms[1_500] = 50_000;
        for codec in CODECS {
            let batch = stored(codec, &timestamps_ms);
            let find = |ts| first_at_or_after(&batch, ts).unwrap();
            assert_eq!(find(-5), Some(Found { offset: 500, timestamp_ms: 1_000 }), "{codec:?}");
            assert_eq!(find(1_001), Some(Found { offset: 501, timestamp_ms: 1_002 }), "{codec:?}");
            assert_eq!(
                find(2_998),
                Some(Found { offset: 1_499, timestamp_ms: 2_998 }),
                "{codec:?}"
            );
            assert_eq!(
                find(4_001),
                Some(Found { offset: 2_000, timestamp_ms: 50_000 }),
                "{codec:?}"
            );
            assert_eq!(find(50_001), None, "{codec:?}");
        }
    }

    #[test]
    fn a_batch_with_the_time_of_its_append_is_not_opened() {
        let mut batch = stored(Compression::None, &[1, 2]);
        batch::set_log_append_time(&mut batch, 77);
        batch.truncate(HEADER_BYTES);
        assert_eq!(
            first_at_or_after(&batch, 70).unwrap(),
            Some(Found { offset: 500, timestamp_ms: 77 })
        );
        assert_eq!(first_at_or_after(&batch, 78).unwrap(), None);
    }

    #[test]
    fn damaged_records_give_errors() {
        for codec in CODECS {
            let batch = stored(codec, &(0..50).collect::<Vec<_>>());
            for len in 0..batch.len() {
                // Either the record is found before the cut, or the cut is reported; never a panic.
                let _ =
                    first_at_or_after(&batch[..len], i64::MAX).map(|found| assert_eq!(found, None));
            }
            for at in HEADER_BYTES..batch.len() {
                let mut bytes = batch.clone();
                bytes[at] ^= 0xff;
                let _ = first_at_or_after(&bytes, i64::MAX);
            }
            assert!(first_at_or_after(&batch[..HEADER_BYTES + 1], i64::MAX).is_err(), "{codec:?}");
        }
        let mut lie = stored(Compression::Snappy, &[1]);
        lie.truncate(HEADER_BYTES);
        lie.extend_from_slice(&[0xff, 0xff, 0xff, 0xff, 0x0f, 0, 0, 0]);
        assert!(first_at_or_after(&lie, 0).unwrap_err().to_string().contains("impossible length"));
    }
}
