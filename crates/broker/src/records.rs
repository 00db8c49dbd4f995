//! The records inside a batch: the only module that reads past a batch's header.
//!
//! Batches come from clients, so no field in them is trusted: records are streamed through a
//! decompressor with a limit, never collected.
//!
//! All records of a producer are checked: uncompressed ones by [`check_plain`], others by
//! [`small_summary`] or [`summary`].

use std::cell::RefCell;
use std::io::{self, BufRead, Read};

use crate::batch::{BatchHeader, HEADER_BYTES};
use crate::errors::ApiError;

use decompress::{Scratch, decompress};

mod compress;
mod decompress;

pub(crate) use compress::{assemble, recompress};
pub(crate) use decompress::check_frame;

/// The decompressed size up to which a batch is decompressed on a serving thread: it takes less
/// than a millisecond with the slowest codec.
const SMALL_BYTES: usize = 256 << 10;

/// The decompressed size up to which a batch is decompressed into memory to be checked. Larger ones
/// are streamed, which takes up to twice as long.
const AT_ONCE_BYTES: usize = 8 << 20;

/// The timestamp of a record without one.
pub(crate) const NO_TIMESTAMP: i64 = -1;

/// A record's offset and timestamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) offset: u64,
    pub(crate) timestamp_ms: i64,
}

/// The properties of a batch's records that topic settings restrict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Summary {
    /// The greatest timestamp; [`NO_TIMESTAMP`] if no record has one.
    pub(crate) max_timestamp_ms: i64,
    /// The smallest timestamp of the records that have one; `None` if none has.
    pub(crate) min_timestamp_ms: Option<i64>,
    /// Whether any record has no key.
    pub(crate) lacks_keys: bool,
    /// The size of the largest record, without the length in front of it.
    pub(crate) largest_bytes: u64,
}

/// The result of checking a record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checked {
    pub(crate) timestamp_ms: i64,
    pub(crate) has_key: bool,
    /// The record's size, without the length in front of it.
    pub(crate) len_bytes: u64,
}

impl Summary {
    const EMPTY: Self = Self {
        max_timestamp_ms: NO_TIMESTAMP,
        min_timestamp_ms: None,
        lacks_keys: false,
        largest_bytes: 0,
    };

    fn add(&mut self, Checked { timestamp_ms, has_key, len_bytes }: Checked) {
        self.max_timestamp_ms = self.max_timestamp_ms.max(timestamp_ms);
        if timestamp_ms != NO_TIMESTAMP {
            let oldest = self.min_timestamp_ms.unwrap_or(timestamp_ms).min(timestamp_ms);
            self.min_timestamp_ms = Some(oldest);
        }
        self.lacks_keys |= !has_key;
        self.largest_bytes = self.largest_bytes.max(len_bytes);
    }
}

/// Finds the first record of `batch` at or after offset `from` whose timestamp is at least
/// `timestamp_ms`. `None` if there is none, although the header's greatest timestamp announced one.
///
/// # Errors
/// [`ApiError::CorruptBatch`] if the records cannot be read.
pub(crate) fn first_at_or_after(
    batch: &[u8],
    from: u64,
    timestamp_ms: i64,
) -> Result<Option<Found>, ApiError> {
    let corrupt = |reason: String| {
        ApiError::CorruptBatch(format!("records of a stored batch cannot be read: {reason}"))
    };
    let header = BatchHeader::parse(batch).ok_or_else(|| corrupt("no header".into()))?;
    let base_offset = header.base_offset as u64;
    if header.is_log_append_time() {
        let offset = base_offset.max(from);
        let found = Found { offset, timestamp_ms: header.max_timestamp_ms };
        return Ok((found.timestamp_ms >= timestamp_ms).then_some(found));
    }
    for record in records(&header, &batch[HEADER_BYTES..]).map_err(|e| corrupt(e.to_string()))? {
        let record = record.map_err(|e| corrupt(e.to_string()))?;
        let found = Found {
            offset: base_offset.saturating_add(record.offset_delta),
            timestamp_ms: header.base_timestamp_ms.saturating_add(record.timestamp_delta_ms),
        };
        if found.offset >= from && found.timestamp_ms >= timestamp_ms {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Checks the uncompressed records in `body`, the part of a batch after its header: their number
/// must be the header's, each must be filled exactly by its fields, and the offset deltas must be
/// 0, 1, 2 and so on. The summary comes from the records, not from the header. It takes one pass
/// and does not allocate.
///
/// Kafka makes the same checks except that of the deltas. With other deltas a reader would find
/// other offsets than those that the log assigned.
///
/// # Errors
/// [`ApiError::InvalidRecord`] with the first violation, as Kafka.
pub(crate) fn check_plain(header: &BatchHeader, mut body: &[u8]) -> Result<Summary, ApiError> {
    let count = header.record_count;
    let mut summary = Summary::EMPTY;
    for index in 0..count {
        let checked =
            check_record(&mut body, header, index).map_err(|e| bad_record(index, count, &e))?;
        summary.add(checked);
    }
    if !body.is_empty() {
        return Err(ApiError::InvalidRecord(format!(
            "{} bytes follow the last record of a batch of {count}",
            body.len()
        )));
    }
    Ok(summary)
}

fn bad_record(index: i32, count: i32, error: &io::Error) -> ApiError {
    let reason = match error.kind() {
        io::ErrorKind::UnexpectedEof => "it ends within a field".to_owned(),
        _ => error.to_string(),
    };
    ApiError::InvalidRecord(format!("record {index} of a batch of {count}: {reason}"))
}

/// Checks the record at the start of `body`, and removes it from `body`.
fn check_record(body: &mut &[u8], header: &BatchHeader, offset_delta: i32) -> io::Result<Checked> {
    let mut fields = take_field(body)?.ok_or_else(null)?;
    let len_bytes = fields.len() as u64;
    let _attributes = read_byte(&mut fields)?;
    let (delta_ms, _) = read_varint(&mut fields, LONG_BYTES)?;
    let (found, _) = read_varint(&mut fields, INT_BYTES)?;
    if found != i64::from(offset_delta) {
        return Err(bad("its offset delta is not its index"));
    }
    let has_key = take_field(&mut fields)?.is_some();
    let _value = take_field(&mut fields)?;
    check_headers(fields)?;
    let timestamp_ms = header.base_timestamp_ms.saturating_add(delta_ms);
    Ok(Checked { timestamp_ms, has_key, len_bytes })
}

/// Checks that the rest of a record is a valid list of headers.
fn check_headers(mut fields: &[u8]) -> io::Result<()> {
    let (headers, _) = read_varint(&mut fields, INT_BYTES)?;
    if headers < 0 {
        return Err(bad("the number of headers is negative"));
    }
    for _ in 0..headers {
        let _name = take_field(&mut fields)?.ok_or_else(null)?;
        let _value = take_field(&mut fields)?;
    }
    if !fields.is_empty() {
        return Err(bad("bytes follow its fields"));
    }
    Ok(())
}

/// Takes a length-prefixed field from `input`. A length of -1 is null.
fn take_field<'a>(input: &mut &'a [u8]) -> io::Result<Option<&'a [u8]>> {
    let (len_bytes, _) = read_varint(input, INT_BYTES)?;
    if len_bytes == -1 {
        return Ok(None);
    }
    let len_bytes = usize::try_from(len_bytes).map_err(|_| bad("a field has a negative length"))?;
    let (field, rest) = input.split_at_checked(len_bytes).ok_or(io::ErrorKind::UnexpectedEof)?;
    *input = rest;
    Ok(Some(field))
}

/// The error for a null in a field that must not be null.
fn null() -> io::Error {
    bad("a field has a negative length")
}

/// Checks the records of a compressed `batch` as [`check_plain`] does if they have at most
/// [`SMALL_BYTES`]: these are decompressed on the calling thread, in scratch memory of that thread.
/// `None` if there are more, or if they cannot be decompressed; then [`summary`] gives the reason.
///
/// # Errors
/// [`ApiError::InvalidRecord`] with the first violation.
pub(crate) fn small_summary(batch: &[u8]) -> Result<Option<Summary>, ApiError> {
    let header = BatchHeader::parse(batch).ok_or_else(|| invalid(&bad("no header")))?;
    SCRATCH.with_borrow_mut(|scratch| {
        let is_whole = scratch.decompress(&header, &batch[HEADER_BYTES..], SMALL_BYTES);
        is_whole.then(|| check_plain(&header, &scratch.bytes)).transpose()
    })
}

/// Summarizes the records of `batch`, independently of its header. All of them are checked as by
/// [`check_plain`].
///
/// # Errors
/// [`ApiError::InvalidRecord`] with the first violation.
pub(crate) fn summary(batch: &[u8]) -> Result<Summary, ApiError> {
    let header = BatchHeader::parse(batch).ok_or_else(|| invalid(&bad("no header")))?;
    let mut scratch = Scratch::default();
    if scratch.decompress(&header, &batch[HEADER_BYTES..], AT_ONCE_BYTES) {
        return check_plain(&header, &scratch.bytes);
    }
    drop(scratch);
    let mut summary = Summary::EMPTY;
    for_each(batch, |_, checked| summary.add(checked))?;
    Ok(summary)
}

/// Calls `visit` with the index of each record of `batch` and the result of its check, which is
/// that of [`check_plain`].
///
/// # Errors
/// [`ApiError::InvalidRecord`] with the first violation.
pub(crate) fn for_each(batch: &[u8], mut visit: impl FnMut(i32, Checked)) -> Result<(), ApiError> {
    let header = BatchHeader::parse(batch).ok_or_else(|| invalid(&bad("no header")))?;
    let count = header.record_count;
    let mut records = decompress(&header, &batch[HEADER_BYTES..]).map_err(|e| invalid(&e))?;
    for index in 0..count {
        let checked =
            check_next(&mut records, &header, index).map_err(|e| bad_record(index, count, &e))?;
        visit(index, checked);
    }
    if !records.fill_buf().map_err(|e| invalid(&e))?.is_empty() {
        let reason = format!("bytes follow the last record of a batch of {count}");
        return Err(ApiError::InvalidRecord(reason));
    }
    Ok(())
}

/// Checks the next record of a stream, as [`check_record`].
fn check_next(
    records: &mut impl BufRead,
    header: &BatchHeader,
    offset_delta: i32,
) -> io::Result<Checked> {
    let (len_bytes, _) = read_varint(records, INT_BYTES)?;
    let len_bytes = u64::try_from(len_bytes).map_err(|_| null())?;
    let mut fields = records.take(len_bytes);
    let _attributes = read_byte(&mut fields)?;
    let (delta_ms, _) = read_varint(&mut fields, LONG_BYTES)?;
    let (found, _) = read_varint(&mut fields, INT_BYTES)?;
    if found != i64::from(offset_delta) {
        return Err(bad("its offset delta is not its index"));
    }
    let has_key = skip_field(&mut fields)?;
    let _has_value = skip_field(&mut fields)?;
    let (headers, _) = read_varint(&mut fields, INT_BYTES)?;
    if headers < 0 {
        return Err(bad("the number of headers is negative"));
    }
    for _ in 0..headers {
        if !skip_field(&mut fields)? {
            return Err(null());
        }
        let _has_value = skip_field(&mut fields)?;
    }
    if fields.limit() > 0 {
        return Err(bad("bytes follow its fields"));
    }
    let timestamp_ms = header.base_timestamp_ms.saturating_add(delta_ms);
    Ok(Checked { timestamp_ms, has_key, len_bytes })
}

/// Skips a length-prefixed field of a stream, as [`take_field`]. Returns whether it is not null.
fn skip_field(fields: &mut impl BufRead) -> io::Result<bool> {
    let (len_bytes, _) = read_varint(fields, INT_BYTES)?;
    if len_bytes == -1 {
        return Ok(false);
    }
    let len_bytes = u64::try_from(len_bytes).map_err(|_| null())?;
    let skipped = io::copy(&mut fields.take(len_bytes), &mut io::sink())?;
    if skipped < len_bytes {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(true)
}

fn invalid(error: &io::Error) -> ApiError {
    ApiError::InvalidRecord(format!("the batch's records are invalid: {error}"))
}

/// A record of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record<'a> {
    pub(crate) offset: u64,
    pub(crate) timestamp_ms: i64,
    pub(crate) attributes: u8,
    pub(crate) key: Option<&'a [u8]>,
    /// Whether the record has no value, which deletes its key.
    pub(crate) is_tombstone: bool,
    /// The record's bytes from the length of the key on.
    pub(crate) rest: &'a [u8],
}

/// The greatest number of bytes of a batch's records that are [unpacked](Unpacked), or of a Snappy
/// block, which cannot be streamed.
const MAX_UNPACKED_BYTES: u64 = 64 << 20;

/// The decompressed records of a batch.
pub(crate) struct Unpacked {
    header: BatchHeader,
    bytes: Vec<u8>,
}

impl Unpacked {
    /// Decompresses the records of `batch` and checks that each can be read: as [`check_plain`],
    /// except that offsets may be missing.
    ///
    /// # Errors
    /// The records cannot be read, or exceed 64 MiB.
    pub(crate) fn new(batch: &[u8]) -> io::Result<Self> {
        let header = BatchHeader::parse(batch).ok_or_else(|| bad("no header"))?;
        let mut bytes = Vec::new();
        let limited = decompress(&header, &batch[HEADER_BYTES..])?;
        limited.take(MAX_UNPACKED_BYTES + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > MAX_UNPACKED_BYTES {
            return Err(bad("too many bytes"));
        }
        let unpacked = Self { header, bytes };
        let mut rest = &unpacked.bytes[..];
        let mut next = unpacked.header.base_offset as u64;
        let end = next.saturating_add(u64::from(unpacked.header.offsets()));
        for _ in 0..unpacked.header.record_count {
            let offset = take_record(&mut rest, &unpacked.header)?.offset;
            if offset < next || offset >= end {
                return Err(bad("an offset is out of order"));
            }
            next = offset + 1;
        }
        if !rest.is_empty() {
            return Err(bad("bytes follow the last record"));
        }
        Ok(unpacked)
    }

    pub(crate) fn header(&self) -> &BatchHeader {
        &self.header
    }

    /// The bytes of all records.
    pub(crate) fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn records(&self) -> impl Iterator<Item = Record<'_>> {
        let mut rest = &self.bytes[..];
        let read = move |_| take_record(&mut rest, &self.header).expect("it was checked in `new`");
        (0..self.header.record_count).map(read)
    }
}

/// Takes the record at the start of `input`.
fn take_record<'a>(input: &mut &'a [u8], header: &BatchHeader) -> io::Result<Record<'a>> {
    let mut fields = take_field(input)?.ok_or_else(null)?;
    let attributes = read_byte(&mut fields)?;
    let (timestamp_delta_ms, _) = read_varint(&mut fields, LONG_BYTES)?;
    let (offset_delta, _) = read_varint(&mut fields, INT_BYTES)?;
    let offset_delta =
        u64::try_from(offset_delta).map_err(|_| bad("an offset delta is negative"))?;
    let rest = fields;
    let key = take_field(&mut fields)?;
    let is_tombstone = take_field(&mut fields)?.is_none();
    check_headers(fields)?;
    Ok(Record {
        offset: (header.base_offset as u64).saturating_add(offset_delta),
        timestamp_ms: header.base_timestamp_ms.saturating_add(timestamp_delta_ms),
        attributes,
        key,
        is_tombstone,
        rest,
    })
}

/// Appends a record to those of a batch.
pub(crate) fn put_record(
    out: &mut Vec<u8>,
    record: &Record<'_>,
    timestamp_delta_ms: i64,
    offset_delta: i32,
) {
    let (mut head, mut len) = ([0; 1 + (LONG_BYTES + INT_BYTES) as usize], 1);
    head[0] = record.attributes;
    for value in [timestamp_delta_ms, offset_delta.into()] {
        len += put_varint(&mut head[len..], value);
    }
    let mut length = [0; LONG_BYTES as usize];
    let length_len = put_varint(&mut length, (len + record.rest.len()) as i64);
    out.extend_from_slice(&length[..length_len]);
    out.extend_from_slice(&head[..len]);
    out.extend_from_slice(record.rest);
}

/// Writes a zigzag varint at the start of `out` and returns its length.
fn put_varint(out: &mut [u8], value: i64) -> usize {
    let mut left = (value << 1 ^ value >> 63).cast_unsigned();
    let mut len = 0;
    while left >= 0x80 {
        out[len] = left as u8 | 0x80;
        left >>= 7;
        len += 1;
    }
    out[len] = left as u8;
    len + 1
}

/// A reader of the decompressed records in `body`, the part of a batch after its header.
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

/// Reads a record's first fields and skips its rest.
fn read_record_head(input: &mut impl BufRead) -> io::Result<RecordHead> {
    let len_bytes = read_varint(input, INT_BYTES)?.0;
    let len_bytes = u64::try_from(len_bytes).map_err(|_| bad("a record has a negative length"))?;
    let _attributes = read_byte(input)?;
    let (timestamp_delta_ms, timestamp_bytes) = read_varint(input, LONG_BYTES)?;
    let (offset_delta, offset_bytes) = read_varint(input, INT_BYTES)?;
    let offset_delta =
        u64::try_from(offset_delta).map_err(|_| bad("an offset delta is negative"))?;
    let rest = len_bytes
        .checked_sub(1 + timestamp_bytes + offset_bytes)
        .ok_or_else(|| bad("a record is too short"))?;
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

/// The greatest length of a 32-bit varint: readers refuse longer ones, padded ones included.
const INT_BYTES: u64 = 32_u64.div_ceil(7);
/// The greatest length of a 64-bit varint.
const LONG_BYTES: u64 = 64_u64.div_ceil(7);

/// Reads a zigzag varint of 32 or 64 bits, depending on `max_bytes`. Returns its value and its
/// length.
fn read_varint(input: &mut impl BufRead, max_bytes: u64) -> io::Result<(i64, u64)> {
    let mut value = 0u64;
    for at in 0..max_bytes {
        let byte = read_byte(input)?;
        // The last byte holds only the remaining bits: 4 of 32, 1 of 64.
        if at == max_bytes - 1 && byte >> (if max_bytes == INT_BYTES { 4 } else { 1 }) != 0 {
            break;
        }
        value |= u64::from(byte & 0x7f) << (at * 7);
        if byte < 0x80 {
            return Ok(((value >> 1) as i64 ^ -((value & 1) as i64), at + 1));
        }
    }
    Err(bad("a varint has too many bits"))
}

thread_local!(
    /// The scratch memory of [`small_summary`].
    static SCRATCH: RefCell<Scratch> = RefCell::default()
);

fn bad(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use kafka_protocol::ResponseError;
    use kafka_protocol::records::{Compression, RecordBatchDecoder};
    use proptest::prelude::*;

    use super::decompress::SnappyBlocks;
    use super::*;
    use crate::batch;
    use crate::batch::Codec;
    use crate::batch::tests::CODECS;

    fn stored(codec: Compression, timestamps_ms: &[i64]) -> Vec<u8> {
        let mut bytes = batch::tests::encode(codec, (-1, -1, -1), timestamps_ms).to_vec();
        batch::set_base(&mut bytes, 500, 0);
        bytes
    }

    #[test]
    fn the_exact_record_is_found_under_every_compression() {
        // Enough records that Snappy needs several blocks.
        let mut timestamps_ms: Vec<i64> = (0..3_000).map(|i| 1_000 + i * 2).collect();
        timestamps_ms[1_500] = 50_000;
        for codec in CODECS {
            let batch = stored(codec, &timestamps_ms);
            let find = |ts| first_at_or_after(&batch, 0, ts).unwrap();
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

    /// A zstd frame (RFC 8878, 3.1.1) with one uncompressed block.
    fn zstd_frame(window_descriptor: u8, content: &[u8]) -> Vec<u8> {
        let block_header = (content.len() as u32) << 3 | 1;
        let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0, window_descriptor];
        frame.extend(&block_header.to_le_bytes()[..3]);
        frame.extend(content);
        frame
    }

    #[test]
    fn a_zstd_window_that_no_streaming_decoder_accepts_is_refused() {
        let plain = stored(Compression::None, &[1, 2, 3]);
        let records = &plain[HEADER_BYTES..];
        let compressed = stored(Compression::Zstd, &[1, 2, 3]);
        let with_body = |body: &[u8]| [&compressed[..HEADER_BYTES], body].concat();
        // The upper five bits are the exponent, counted from 2^10; the lower three are eighths.
        let window = |log: u8, eighths: u8| (log - 10) << 3 | eighths;
        let frame = |descriptor| with_body(&zstd_frame(descriptor, records));
        for descriptor in [window(10, 0), window(21, 7), window(27, 0)] {
            let checked = small_summary(&frame(descriptor)).unwrap().expect("they are few");
            assert_eq!(checked.max_timestamp_ms, 3);
            summary(&frame(descriptor)).unwrap();
        }
        for descriptor in [window(27, 1), window(28, 0), window(31, 0), window(41, 7)] {
            assert!(small_summary(&frame(descriptor)).unwrap().is_none(), "{descriptor}");
            summary(&frame(descriptor)).unwrap_err();
        }
        // Windows of later frames are checked too.
        let first = zstd_frame(window(20, 0), &records[..5]);
        let second = |log| zstd_frame(window(log, 0), &records[5..]);
        summary(&with_body(&[first.clone(), second(27)].concat())).unwrap();
        summary(&with_body(&[first, second(28)].concat())).unwrap_err();
    }

    #[test]
    fn a_batch_with_log_append_time_is_not_decompressed() {
        let mut batch = stored(Compression::None, &[1, 2]);
        batch::set_log_append_time(&mut batch, 77);
        batch.truncate(HEADER_BYTES);
        assert_eq!(
            first_at_or_after(&batch, 0, 70).unwrap(),
            Some(Found { offset: 500, timestamp_ms: 77 })
        );
        assert_eq!(first_at_or_after(&batch, 0, 78).unwrap(), None);
    }

    #[test]
    fn damaged_records_give_errors() {
        for codec in CODECS {
            let batch = stored(codec, &(0..50).collect::<Vec<_>>());
            for len in 0..batch.len() {
                // Either the record is found before the cut, or the cut is reported; no panic.
                let _ = first_at_or_after(&batch[..len], 0, i64::MAX)
                    .map(|found| assert_eq!(found, None));
            }
            for at in HEADER_BYTES..batch.len() {
                let mut bytes = batch.clone();
                bytes[at] ^= 0xff;
                let _ = first_at_or_after(&bytes, 0, i64::MAX);
            }
            assert!(
                first_at_or_after(&batch[..HEADER_BYTES + 1], 0, i64::MAX).is_err(),
                "{codec:?}"
            );
        }
        let mut lie = stored(Compression::Snappy, &[1]);
        lie.truncate(HEADER_BYTES);
        lie.extend_from_slice(&[0xff, 0xff, 0xff, 0xff, 0x0f, 0, 0, 0]);
        assert!(
            first_at_or_after(&lie, 0, 0).unwrap_err().to_string().contains("impossible length")
        );
    }

    /// A block is decompressed as a whole, so no limit of a stream bounds its memory.
    #[test]
    fn a_snappy_block_is_limited() {
        let block = |len: usize| snap::raw::Encoder::new().compress_vec(&vec![0; len]).unwrap();
        let read = |block: &[u8], most| SnappyBlocks::new(block, most).read(&mut [0; 9]);
        assert_eq!(read(&block(1 << 20), 1 << 20).unwrap(), 9);
        for most in [SMALL_BYTES, MAX_UNPACKED_BYTES as usize] {
            let error = read(&block(most + 1), most).unwrap_err();
            assert!(error.to_string().contains("too large"), "{error}");
        }
        // Scratch memory does not accept a block larger than the limit of the caller.
        let mut batch = stored(Compression::Snappy, &[1]);
        batch.truncate(HEADER_BYTES);
        let (header, body) = (BatchHeader::parse(&batch).unwrap(), block(4 << 20));
        let mut scratch = Scratch::default();
        assert!(!scratch.decompress(&header, &body, SMALL_BYTES));
        assert_eq!(scratch.bytes.capacity(), 0);
    }

    #[test]
    fn recompression_keeps_the_records() {
        let timestamps_ms: Vec<i64> = (0..3_000).map(|i| 1_000 + i * 2).collect();
        let read = |batch: &[u8]| {
            let batch = Bytes::copy_from_slice(batch);
            RecordBatchDecoder::decode(&mut batch.clone()).unwrap().records
        };
        let plain = stored(Compression::None, &timestamps_ms);
        let records = read(&plain);
        assert_eq!(records.len(), 3_000);
        for from in CODECS {
            let batch = stored(from, &timestamps_ms);
            for (to, levels) in [
                (Codec::None, &[0][..]),
                (Codec::Gzip, &[-1, 1, 9]),
                (Codec::Snappy, &[0]),
                (Codec::Lz4, &[1, 9, 17]),
                (Codec::Zstd, &[-5, 3, 22]),
            ] {
                for level in levels {
                    let out = recompress(&batch, to, *level, 1 << 20).unwrap();
                    let header = BatchHeader::parse(&out).unwrap();
                    assert_eq!((header.codec(), header.len_bytes), (Some(to), out.len()));
                    assert!(to == Codec::None || out.len() < plain.len());
                    assert_eq!(read(&out), records, "{from:?} to {to:?}");
                    let too_long = recompress(&batch, to, *level, out.len() - 1).unwrap_err();
                    assert_eq!(too_long.kind(), ResponseError::MessageTooLarge);
                    assert!(recompress(&batch, to, *level, out.len()).is_ok());
                }
            }
        }
    }

    #[test]
    fn keys_and_times_are_seen_under_every_compression() {
        let times_ms = [5, 9, 3, -1];
        for codec in CODECS {
            let expected = Summary {
                max_timestamp_ms: 9,
                min_timestamp_ms: Some(3),
                lacks_keys: false,
                largest_bytes: 28,
            };
            assert_eq!(summary(&stored(codec, &times_ms)).unwrap(), expected, "{codec:?}");
        }
        let none = Summary {
            lacks_keys: true,
            max_timestamp_ms: 1_000,
            min_timestamp_ms: Some(1_000),
            largest_bytes: 6,
        };
        let batch = batch_of(1, &[12, 0, 0, 0, 1, 1, 0]);
        assert_eq!(summary(&batch).unwrap(), none);
        assert_eq!(
            check_plain(&BatchHeader::parse(&batch).unwrap(), &batch[HEADER_BYTES..]).unwrap(),
            none
        );
    }

    fn check(batch: &[u8]) -> Result<i64, ApiError> {
        let header = BatchHeader::parse(batch).unwrap();
        check_plain(&header, &batch[HEADER_BYTES..]).map(|summary| summary.max_timestamp_ms)
    }

    /// A batch with `fields` as its records and `record_count` in its header.
    fn batch_of(record_count: i32, fields: &[u8]) -> Vec<u8> {
        let mut batch = stored(Compression::None, &[1_000]);
        batch.truncate(HEADER_BYTES);
        batch[HEADER_BYTES - 4..].copy_from_slice(&record_count.to_be_bytes());
        batch.extend_from_slice(fields);
        batch
    }

    #[test]
    fn records_that_are_not_compressed_are_checked_field_by_field() {
        assert_eq!(check(&stored(Compression::None, &[1_000, 3_000, 2_000])).unwrap(), 3_000);
        assert_eq!(check(&stored(Compression::None, &[-1, -1])).unwrap(), -1);
        // Varints are zigzag: 1 is -1, 2 is 1. The fields are length, attributes, timestamp,
        // offset, key, value, headers.
        let smallest = [12, 0, 0, 0, 1, 1, 0];
        assert_eq!(check(&batch_of(1, &smallest)).unwrap(), 1_000);
        let with_header = [18, 0, 2, 0, 2, b'k', 0, 2, 0, 1];
        for (record_count, fields, reason) in [
            (2, &smallest[..], "record 1 of a batch of 2: it ends within a field"),
            (i32::MAX, &smallest, "record 1 of"),
            (2, &[smallest, smallest].concat(), "offset delta"),
            (1, &[smallest, smallest].concat(), "7 bytes follow"),
            (1, &[], "ends within a field"),
            (1, &[14, 0, 0, 0, 1, 1, 0], "ends within a field"),
            (1, &[14, 0, 0, 0, 1, 1, 0, 0], "bytes follow its fields"),
            (1, &[10, 0, 0, 0, 1, 1, 0], "ends within a field"),
            (1, &[1, 0, 0, 0, 1, 1, 0], "negative length"),
            (1, &[12, 0, 0, 0, 3, 1, 0], "negative length"),
            (1, &[12, 0, 0, 0, 1, 3, 0], "negative length"),
            (1, &[12, 0, 0, 2, 1, 1, 0], "offset delta"),
            (1, &[12, 0, 0, 1, 1, 1, 0], "offset delta"),
            (1, &[12, 0, 0, 0, 1, 1, 1], "number of headers is negative"),
            (1, &[12, 0, 0, 0, 1, 1, 2], "ends within a field"),
            (1, &[16, 0, 0, 0, 1, 1, 2, 1, 1], "negative length"),
            (1, &[22, 0, 0, 0, 0x80, 0x80, 0x80, 0x80, 0x80, 0, 1, 0], "too many bits"),
            (1, &[20, 0, 0, 0, 0x80, 0x80, 0x80, 0x80, 0x10, 1, 0], "too many bits"),
        ] {
            let error = check(&batch_of(record_count, fields)).unwrap_err();
            assert_eq!(error.kind(), ResponseError::InvalidRecord);
            assert!(error.to_string().contains(reason), "{fields:?}: {error}");
            for codec in [Codec::Gzip, Codec::Snappy, Codec::Lz4, Codec::Zstd] {
                let batch = recompress(&batch_of(record_count, fields), codec, 1, 1 << 20).unwrap();
                let refused = summary(&batch).map_err(|error| error.kind());
                assert_eq!(refused, Err(ResponseError::InvalidRecord), "{codec:?} {fields:?}");
            }
        }
        assert_eq!(check(&batch_of(1, &with_header)).unwrap(), 1_001);
        let compressed = recompress(&batch_of(1, &with_header), Codec::Zstd, 1, 1 << 20).unwrap();
        assert_eq!(summary(&compressed).unwrap().max_timestamp_ms, 1_001);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn no_bytes_after_a_header_cause_a_panic(
            record_count in any::<i32>(),
            fields in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let _ = check(&batch_of(record_count, &fields));
        }

        /// A client can read every batch that passes, and finds the offsets that the log assigned.
        #[test]
        fn damaged_records_that_pass_can_be_read(
            timestamps_ms in proptest::collection::vec(0i64..1_000_000, 1..6),
            edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        ) {
            let mut batch = stored(Compression::None, &timestamps_ms);
            for (at, byte) in edits {
                let at = HEADER_BYTES + at.index(batch.len() - HEADER_BYTES);
                // Text stays text, since a client may refuse a header name that is not.
                batch[at] = if batch[at].is_ascii_lowercase() { b'a' + byte % 26 } else { byte };
            }
            let Ok(max_timestamp_ms) = check(&batch) else { return Ok(()) };
            batch::set_max_timestamp(&mut batch, max_timestamp_ms);
            let read = RecordBatchDecoder::decode(&mut Bytes::from(batch)).unwrap().records;
            let offsets: Vec<i64> = read.iter().map(|record| record.offset).collect();
            prop_assert_eq!(offsets, (500..500 + timestamps_ms.len() as i64).collect::<Vec<_>>());
            let greatest = read.iter().map(|record| record.timestamp).max();
            prop_assert_eq!(greatest.map(|ms| ms.max(NO_TIMESTAMP)), Some(max_timestamp_ms));
        }
    }
}
