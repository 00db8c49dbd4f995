//! The payload of a WAL record: a batch with its position in a stream, or the ends of streams.
//! Layout: `docs/format/stream-record.md`.

use bytes::Bytes;

use alluvium_wal::LogOffset;

use crate::fields::{u32_at, u64_at};
use crate::types::{Batch, StreamId, StreamOffset};

/// The first version: a header without its own checksum, and batches only.
const VERSION_1: u8 = 1;
const VERSION_2: u8 = 2;
const KIND_BATCH: u8 = 1;
const KIND_ENDS: u8 = 2;
/// Ends that also state up to which offset each stream's offsets are known to have been used.
const KIND_BOUNDS: u8 = 3;
/// Changes of the catalog.
const KIND_CATALOG: u8 = 4;
/// Ends as of [`KIND_BOUNDS`], after the version of the last catalog record.
const KIND_VERSIONED: u8 = 5;

// Field offsets, each the sum of the lengths before it.
const AT_VERSION: usize = 0;
const AT_KIND: usize = AT_VERSION + 1;
const AT_RESERVED: usize = AT_KIND + 1;
const AT_COUNT: usize = AT_RESERVED + 2;
const AT_STREAM: usize = AT_COUNT + 4;
const AT_BASE: usize = AT_STREAM + 8;
const AT_MAX_TIMESTAMP: usize = AT_BASE + 8;
const HEADER_BYTES_1: usize = AT_MAX_TIMESTAMP + 8;
const AT_LENGTH: usize = HEADER_BYTES_1;
const AT_CRC: usize = AT_LENGTH + 4;
const _: () = assert!(HEADER_BYTES_1 == 32);

/// Bytes before the payload of a batch.
pub(crate) const HEADER_BYTES: usize = AT_CRC + 4;
const _: () = assert!(HEADER_BYTES == 40);

/// The least length of a record in the WAL, of any version and kind: a range of the log holds at
/// most its length divided by this number of records.
pub(crate) const MIN_RECORD_BYTES: u64 = WAL_HEADER_BYTES + HEADER_BYTES_1 as u64;
/// Length of the WAL's own record header.
pub(crate) const WAL_HEADER_BYTES: u64 = 32;

// Fields of the ends record in place of those of a batch.
const AT_FROM: usize = AT_STREAM;
const AT_TO: usize = AT_BASE;
const AT_PART: usize = AT_MAX_TIMESTAMP;
const AT_PARTS: usize = AT_PART + 4;
/// The header is stored twice before the entries of ends, and before the changes of the catalog.
const TWO_HEADERS_BYTES: usize = 2 * HEADER_BYTES;
/// The version of the last catalog record, before the entries.
const VERSION_BYTES: usize = 8;

// Fields of the catalog record in place of those of a batch.
const AT_CATALOG_VERSION: usize = AT_STREAM;
const AT_BEFORE: usize = AT_BASE;
const AT_NEXT_STREAM: usize = AT_MAX_TIMESTAMP;
const ENTRY_BYTES: usize = 16;
const BOUNDS_ENTRY_BYTES: usize = 24;
/// The part of a damaged record that recovery gets must include both headers.
const _: () = assert!(TWO_HEADERS_BYTES <= alluvium_wal::DamagedRange::HEAD_BYTES);

/// A decoded record of the WAL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamRecord {
    /// A batch of a stream.
    Batch(StreamId, Batch),
    /// The ends of streams.
    Ends(Ends),
    /// Changes of the catalog.
    Catalog(CatalogRecord),
}

/// A list of changes of the catalog. Layout of the changes: `docs/format/chain.md`, section 4.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CatalogRecord {
    /// The version of the list.
    pub version: u64,
    /// The version of the catalog record before it in this log; 0 for the first one.
    pub before: u64,
    /// Ids below it were given to streams.
    pub next_stream: StreamId,
    /// The number of changes, at least 1.
    pub count: u32,
    /// The changes.
    pub changes: Bytes,
}

/// A part of a list of stream ends: of every stream with a batch whose record begins in `from..to`,
/// and possibly of others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ends {
    /// First log offset that the list covers.
    pub from: LogOffset,
    /// The end of that range.
    pub to: LogOffset,
    /// The number of this part of the list, from 0 on.
    pub part: u32,
    /// The number of parts of the list.
    pub parts: u32,
    /// Streams with their next offsets: at least the end of each batch in `from..to`.
    pub ends: Vec<End>,
    /// The version of the last catalog record before the list; `None` in a list of a build that
    /// did not write catalog records.
    pub catalog_version: Option<u64>,
}

/// The end of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The stream.
    pub stream: StreamId,
    /// Its next offset.
    pub next: StreamOffset,
    /// The offset below which its offsets are known to have been handed out. Less than `next` if a
    /// recovery skipped the offsets in between because it did not know whether they had been used.
    pub known: StreamOffset,
}

/// What a damaged record was, judging by what is left of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Identified {
    /// A batch with this number of offsets of a stream, from this offset on.
    Batch(StreamId, StreamOffset, u32),
    /// A list of ends for a range that ends here.
    Ends(LogOffset),
    /// Changes of the catalog with this version.
    Catalog(u64),
}

/// What is left of a damaged record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Remains {
    pub(crate) record: Identified,
    /// The length of the whole record in the WAL.
    pub(crate) record_bytes: u64,
}

/// Returns the length of an entry in a list of this kind.
fn entry_bytes(kind: u8) -> usize {
    if kind == KIND_ENDS { ENTRY_BYTES } else { BOUNDS_ENTRY_BYTES }
}

/// Returns the bytes between the headers and the entries in a list of this kind.
fn version_bytes(kind: u8) -> usize {
    if kind == KIND_VERSIONED { VERSION_BYTES } else { 0 }
}

/// Encodes the record of a list of changes of the catalog.
pub(crate) fn encode_catalog(record: &CatalogRecord) -> Vec<u8> {
    let CatalogRecord { version, before, next_stream, count, changes } = record;
    let mut header = [0; HEADER_BYTES];
    header[AT_CATALOG_VERSION..AT_BEFORE].copy_from_slice(&version.to_le_bytes());
    header[AT_BEFORE..AT_NEXT_STREAM].copy_from_slice(&before.to_le_bytes());
    header[AT_NEXT_STREAM..HEADER_BYTES_1].copy_from_slice(&next_stream.0.to_le_bytes());
    let len = u32::try_from(changes.len()).expect("the WAL's record limit bounds a list");
    seal(&mut header, KIND_CATALOG, *count, len);
    [&header[..], &header, changes].concat()
}

/// Writes the fields that all kinds have, and the checksum.
fn seal(header: &mut [u8; HEADER_BYTES], kind: u8, count: u32, len: u32) {
    header[AT_VERSION] = VERSION_2;
    header[AT_KIND] = kind;
    header[AT_COUNT..AT_STREAM].copy_from_slice(&count.to_le_bytes());
    header[AT_LENGTH..AT_CRC].copy_from_slice(&len.to_le_bytes());
    let crc = crc32c::crc32c(&header[..AT_CRC]);
    header[AT_CRC..].copy_from_slice(&crc.to_le_bytes());
}

/// Encodes the header of the record for a batch of `stream` with a payload of `len` bytes.
pub(crate) fn encode_header(
    stream: StreamId,
    base: StreamOffset,
    count: u32,
    max_timestamp_ms: i64,
    len: u32,
) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[AT_STREAM..AT_BASE].copy_from_slice(&stream.0.to_le_bytes());
    header[AT_BASE..AT_MAX_TIMESTAMP].copy_from_slice(&base.0.to_le_bytes());
    header[AT_MAX_TIMESTAMP..HEADER_BYTES_1].copy_from_slice(&max_timestamp_ms.to_le_bytes());
    seal(&mut header, KIND_BATCH, count, len);
    header
}

/// Encodes the records of a list of ends, none longer than `max_record_bytes`; at least one.
/// `catalog_version` is that of the last catalog record before the list, 0 if there is none.
pub(crate) fn encode_ends(
    covered: std::ops::Range<LogOffset>,
    ends: &[End],
    catalog_version: u64,
    max_record_bytes: u32,
) -> Vec<Vec<u8>> {
    let before_bytes = TWO_HEADERS_BYTES + VERSION_BYTES;
    let entries_per_record =
        (max_record_bytes as usize).saturating_sub(before_bytes) / BOUNDS_ENTRY_BYTES;
    let chunks: Vec<_> = match ends.is_empty() {
        true => vec![ends],
        false => ends.chunks(entries_per_record.max(1)).collect(),
    };
    let parts = u32::try_from(chunks.len()).expect("fewer than 2^32 records");
    let encode = |(part, entries): (u32, &&[End])| {
        let mut header = [0; HEADER_BYTES];
        header[AT_FROM..AT_TO].copy_from_slice(&covered.start.0.to_le_bytes());
        header[AT_TO..AT_PART].copy_from_slice(&covered.end.0.to_le_bytes());
        header[AT_PART..AT_PARTS].copy_from_slice(&part.to_le_bytes());
        header[AT_PARTS..HEADER_BYTES_1].copy_from_slice(&parts.to_le_bytes());
        let count = u32::try_from(entries.len()).expect("fits into a record");
        let len = VERSION_BYTES as u32 + count * BOUNDS_ENTRY_BYTES as u32;
        seal(&mut header, KIND_VERSIONED, count, len);
        let mut record = [header, header].concat();
        record.extend(catalog_version.to_le_bytes());
        for End { stream, next, known } in *entries {
            record.extend([stream.0, next.0, known.0].iter().flat_map(|field| field.to_le_bytes()));
        }
        record
    };
    (0..).zip(&chunks).map(encode).collect()
}

/// Returns an upper bound of the bytes in the log of a list of this many ends.
pub(crate) fn encoded_bytes(ends: usize, max_record_bytes: u32) -> u64 {
    let entries_bytes = ends as u64 * BOUNDS_ENTRY_BYTES as u64;
    let per_record = (TWO_HEADERS_BYTES + VERSION_BYTES) as u64 + WAL_HEADER_BYTES;
    let least_bytes = u64::from(max_record_bytes).saturating_sub(per_record).max(1);
    entries_bytes + (1 + entries_bytes.div_ceil(least_bytes)) * per_record
}

/// Decodes a WAL record. The WAL has verified its checksum, so invalid contents were written so, by
/// a newer version or a defect. Either way the record must not be skipped silently.
///
/// The payload is copied: a recovered record may be a slice of a large read buffer, and the log
/// cache accounts for the memory that it keeps alive.
pub fn decode_record(payload: &Bytes) -> Result<StreamRecord, String> {
    let too_short =
        || format!("a record of {} bytes is shorter than a stream header", payload.len());
    let header = payload.get(..HEADER_BYTES_1).ok_or_else(too_short)?;
    let header_bytes = match header[AT_VERSION] {
        VERSION_1 => HEADER_BYTES_1,
        VERSION_2 => {
            let header = payload.get(..HEADER_BYTES).ok_or_else(too_short)?;
            if crc32c::crc32c(&header[..AT_CRC]) != u32_at(header, AT_CRC) {
                return Err("a stream header has a wrong checksum".into());
            }
            HEADER_BYTES
        }
        version => {
            return Err(format!(
                "stream record version {version} is not known, only {VERSION_1} and {VERSION_2}"
            ));
        }
    };
    if header[AT_RESERVED..AT_COUNT] != [0; 2] {
        return Err("reserved bytes of a stream record are not zero".into());
    }
    let body = |header_bytes: usize| {
        let body = payload.get(header_bytes..).ok_or_else(too_short)?;
        match header[AT_VERSION] == VERSION_1 || body.len() == u32_at(payload, AT_LENGTH) as usize {
            true => Ok(body),
            false => Err("the length in a stream header is not that of its record".to_owned()),
        }
    };
    let count = u32_at(header, AT_COUNT);
    match (header[AT_VERSION], header[AT_KIND]) {
        (_, KIND_BATCH) => {
            let base = u64_at(header, AT_BASE);
            if count == 0 || base.checked_add(u64::from(count)).is_none() {
                return Err(format!("a batch of {count} records at offset {base} is impossible"));
            }
            let batch = Batch {
                base: StreamOffset(base),
                count,
                max_timestamp_ms: u64_at(header, AT_MAX_TIMESTAMP).cast_signed(),
                payload: Bytes::copy_from_slice(body(header_bytes)?),
            };
            Ok(StreamRecord::Batch(StreamId(u64_at(header, AT_STREAM)), batch))
        }
        (VERSION_2, kind @ (KIND_ENDS | KIND_BOUNDS | KIND_VERSIONED)) => {
            let entry_bytes = entry_bytes(kind);
            let (from, to) = (u64_at(header, AT_FROM), u64_at(header, AT_TO));
            let (part, parts) = (u32_at(header, AT_PART), u32_at(header, AT_PARTS));
            let Some((version, entries)) =
                body(TWO_HEADERS_BYTES)?.split_at_checked(version_bytes(kind))
            else {
                return Err("an ends record ends before its entries".into());
            };
            if from > to
                || part >= parts
                || entries.len() as u64 != u64::from(count) * entry_bytes as u64
            {
                return Err("the fields of an ends record contradict each other".into());
            }
            let end = |entry: &[u8]| {
                let (stream, next) = (StreamId(u64_at(entry, 0)), StreamOffset(u64_at(entry, 8)));
                let known = match kind {
                    KIND_ENDS => next,
                    _ => StreamOffset(u64_at(entry, 16)).min(next),
                };
                End { stream, next, known }
            };
            Ok(StreamRecord::Ends(Ends {
                from: LogOffset(from),
                to: LogOffset(to),
                part,
                parts,
                ends: entries.chunks_exact(entry_bytes).map(end).collect(),
                catalog_version: (kind == KIND_VERSIONED).then(|| u64_at(version, 0)),
            }))
        }
        (VERSION_2, KIND_CATALOG) => {
            let (version, before) = (u64_at(header, AT_CATALOG_VERSION), u64_at(header, AT_BEFORE));
            if count == 0 || before >= version {
                let what = format!("{count} changes of version {version} after {before}");
                return Err(format!("a catalog record with {what} is impossible"));
            }
            Ok(StreamRecord::Catalog(CatalogRecord {
                version,
                before,
                next_stream: StreamId(u64_at(header, AT_NEXT_STREAM)),
                count,
                changes: Bytes::copy_from_slice(body(TWO_HEADERS_BYTES)?),
            }))
        }
        (_, kind) => Err(format!("stream record kind {kind} is not known")),
    }
}

/// Returns what a damaged record was, if one of its headers is intact; `head` is the beginning of
/// its payload. Records of version 1 have no checksum that could show this.
pub(crate) fn remains(head: &[u8]) -> Option<Remains> {
    let header_at = |at: usize| {
        let header = head.get(at..at + HEADER_BYTES)?;
        let intact = header[AT_VERSION] == VERSION_2
            && header[AT_RESERVED..AT_COUNT] == [0; 2]
            && crc32c::crc32c(&header[..AT_CRC]) == u32_at(header, AT_CRC);
        intact.then_some(header)
    };
    // A batch may contain anything after its header, so the second position is used only for other
    // kinds, and only if the first header is invalid.
    let first = header_at(0);
    let second = || header_at(HEADER_BYTES).filter(|header| header[AT_KIND] != KIND_BATCH);
    let header = first.or_else(second)?;
    let len = u64::from(u32_at(header, AT_LENGTH));
    match header[AT_KIND] {
        KIND_BATCH => Some(Remains {
            record: Identified::Batch(
                StreamId(u64_at(header, AT_STREAM)),
                StreamOffset(u64_at(header, AT_BASE)),
                u32_at(header, AT_COUNT),
            ),
            record_bytes: WAL_HEADER_BYTES + HEADER_BYTES as u64 + len,
        }),
        kind @ (KIND_ENDS | KIND_BOUNDS | KIND_VERSIONED | KIND_CATALOG) => Some(Remains {
            record: match kind {
                KIND_CATALOG => Identified::Catalog(u64_at(header, AT_CATALOG_VERSION)),
                _ => Identified::Ends(LogOffset(u64_at(header, AT_TO))),
            },
            record_bytes: WAL_HEADER_BYTES + TWO_HEADERS_BYTES as u64 + len,
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAYLOAD: &[u8] = b"payload";

    fn header(stream: u64, base: u64, count: u32, max_timestamp_ms: i64) -> [u8; HEADER_BYTES] {
        let len = PAYLOAD.len() as u32;
        encode_header(StreamId(stream), StreamOffset(base), count, max_timestamp_ms, len)
    }

    fn record(header: &[u8]) -> Bytes {
        [header, PAYLOAD].concat().into()
    }

    fn batch(base: u64, count: u32, max_timestamp_ms: i64) -> Batch {
        let payload = Bytes::from_static(PAYLOAD);
        Batch { base: StreamOffset(base), count, max_timestamp_ms, payload }
    }

    #[test]
    fn a_record_decodes_as_it_was_encoded() {
        let decoded = decode_record(&record(&header(7, 1 << 40, 3, -1))).unwrap();
        assert_eq!(decoded, StreamRecord::Batch(StreamId(7), batch(1 << 40, 3, -1)));
    }

    /// Bytes of format version 1. Every later version of this code must decode them.
    #[test]
    fn version_1_still_decodes() {
        #[rustfmt::skip]
        let bytes: [u8; 32] = [
            1, 1, 0, 0, 2, 0, 0, 0,
            9, 0, 0, 0, 0, 0, 0, 0,
            0, 1, 0, 0, 0, 0, 0, 0,
            0xff, 0, 0, 0, 0, 0, 0, 0,
        ];
        let decoded = decode_record(&record(&bytes)).unwrap();
        assert_eq!(decoded, StreamRecord::Batch(StreamId(9), batch(256, 2, 255)));
        assert_eq!(remains(&record(&bytes)), None, "nothing verifies it");
    }

    fn end(stream: u64, next: u64) -> End {
        let next = StreamOffset(next);
        End { stream: StreamId(stream), next, known: next }
    }

    /// Bytes of format version 2, and ends of kinds that are no longer written. Every later version
    /// of this code must decode them.
    #[test]
    fn version_2_still_decodes() {
        #[rustfmt::skip]
        let bytes: [u8; 40] = [
            2, 1, 0, 0, 2, 0, 0, 0,
            9, 0, 0, 0, 0, 0, 0, 0,
            0, 1, 0, 0, 0, 0, 0, 0,
            0xff, 0, 0, 0, 0, 0, 0, 0,
            7, 0, 0, 0, 147, 222, 79, 89,
        ];
        assert_eq!(header(9, 256, 2, 255), bytes);
        let decoded = decode_record(&record(&bytes)).unwrap();
        assert_eq!(decoded, StreamRecord::Batch(StreamId(9), batch(256, 2, 255)));
        let ends_of = |end| {
            let (from, to) = (LogOffset(3), LogOffset(512));
            let (part, parts, catalog_version) = (0, 1, None);
            StreamRecord::Ends(Ends { from, to, part, parts, ends: vec![end], catalog_version })
        };
        let remains_of =
            |record_bytes| Some(Remains { record: Identified::Ends(LogOffset(512)), record_bytes });
        #[rustfmt::skip]
        let half: [u8; 40] = [
            2, 2, 0, 0, 1, 0, 0, 0,
            3, 0, 0, 0, 0, 0, 0, 0,
            0, 2, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 1, 0, 0, 0,
            16, 0, 0, 0, 175, 101, 132, 215,
        ];
        let entry = [9, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0];
        let bytes = [&half[..], &half, &entry].concat();
        assert_eq!(remains(&bytes), remains_of(32 + 96));
        assert_eq!(decode_record(&bytes.into()).unwrap(), ends_of(end(9, 258)));
        #[rustfmt::skip]
        let half: [u8; 40] = [
            2, 3, 0, 0, 1, 0, 0, 0,
            3, 0, 0, 0, 0, 0, 0, 0,
            0, 2, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 1, 0, 0, 0,
            24, 0, 0, 0, 106, 144, 6, 0,
        ];
        let bytes = [&half[..], &half, &entry, &KNOWN].concat();
        assert_eq!(remains(&bytes), remains_of(32 + 104));
        assert_eq!(decode_record(&bytes.into()).unwrap(), ends_of(bound()));
    }

    const KNOWN: [u8; 8] = [7, 0, 0, 0, 0, 0, 0, 0];

    /// The end that the entry of these tests with [`KNOWN`] states.
    fn bound() -> End {
        End { known: StreamOffset(7), ..end(9, 258) }
    }

    /// Bytes of kinds 4 and 5. Every later version of this code must decode them.
    #[test]
    fn changes_of_the_catalog_and_ends_with_a_version_have_these_bytes() {
        #[rustfmt::skip]
        let half: [u8; 40] = [
            2, 5, 0, 0, 1, 0, 0, 0,
            3, 0, 0, 0, 0, 0, 0, 0,
            0, 2, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 1, 0, 0, 0,
            32, 0, 0, 0, 240, 34, 148, 12,
        ];
        let version = [7, 0, 0, 0, 1, 0, 0, 0];
        let entry = [9, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0];
        let bytes = [&half[..], &half, &version, &entry, &KNOWN].concat();
        let (from, to, catalog_version) = (LogOffset(3), LogOffset(512), (1 << 32) + 7);
        let encoded = encode_ends(from..to, &[bound()], catalog_version, 1000);
        assert_eq!(encoded.concat(), bytes);
        let (part, parts, ends) = (0, 1, vec![bound()]);
        let ends = Ends { from, to, part, parts, ends, catalog_version: Some(catalog_version) };
        assert_eq!(decode_record(&bytes.into()).unwrap(), StreamRecord::Ends(ends));

        #[rustfmt::skip]
        let half: [u8; 40] = [
            2, 4, 0, 0, 1, 0, 0, 0,
            7, 0, 0, 0, 1, 0, 0, 0,
            5, 0, 0, 0, 1, 0, 0, 0,
            9, 0, 0, 0, 0, 0, 0, 0,
            3, 0, 0, 0, 51, 159, 97, 56,
        ];
        // The deletion of the key "k".
        let changes = [5, 1, b'k'];
        let bytes = [&half[..], &half, &changes].concat();
        let list = list(&changes);
        assert_eq!(encode_catalog(&list), bytes);
        assert_eq!(decode_record(&bytes.into()).unwrap(), StreamRecord::Catalog(list));
    }

    fn list(changes: &[u8]) -> CatalogRecord {
        CatalogRecord {
            version: (1 << 32) + 7,
            before: (1 << 32) + 5,
            next_stream: StreamId(9),
            count: 1,
            changes: Bytes::copy_from_slice(changes),
        }
    }

    #[test]
    fn unknown_and_impossible_records_are_refused() {
        let with = |at: usize, value: u8| {
            let mut header = header(1, 0, 1, 0);
            header[at] = value;
            let crc = crc32c::crc32c(&header[..AT_CRC]);
            header[AT_CRC..].copy_from_slice(&crc.to_le_bytes());
            record(&header)
        };
        let refused = |payload: &Bytes| decode_record(payload).unwrap_err();
        assert!(decode_record(&with(AT_VERSION, VERSION_2)).is_ok());
        assert!(refused(&with(AT_VERSION, 3)).contains("version 3"));
        assert!(refused(&with(AT_KIND, 9)).contains("kind 9"));
        assert!(refused(&with(AT_RESERVED, 1)).contains("reserved"));
        assert!(refused(&with(AT_COUNT, 0)).contains("impossible"));
        assert!(refused(&with(AT_LENGTH, 1)).contains("length"));
        assert!(refused(&with(AT_KIND, KIND_ENDS)).contains("shorter"));
        assert!(refused(&with(AT_KIND, KIND_VERSIONED)).contains("shorter"));
        let good = record(&header(1, 0, 1, 0));
        assert!(refused(&good.slice(..31)).contains("shorter"));
        assert!(refused(&good.slice(..39)).contains("shorter"));
        assert!(refused(&record(&header(1, u64::MAX, 1, 0))).contains("impossible"));
        let mut wrong = header(1, 0, 1, 0);
        wrong[AT_CRC] ^= 1;
        assert!(refused(&record(&wrong)).contains("checksum"));
        for list in [
            CatalogRecord { count: 0, ..list(b"x") },
            CatalogRecord { before: 1 << 33, ..list(b"x") },
        ] {
            assert!(refused(&encode_catalog(&list).into()).contains("impossible"));
        }
        let good = encode_catalog(&list(b"changes"));
        assert!(refused(&Bytes::copy_from_slice(&good[..79])).contains("shorter"));
        assert!(refused(&Bytes::copy_from_slice(&good[..85])).contains("length"));
        // The length is that of an ends record without a version.
        let mut header = [0; HEADER_BYTES];
        header[AT_PARTS] = 1;
        seal(&mut header, KIND_VERSIONED, 0, 0);
        assert!(refused(&[header, header].concat().into()).contains("before its entries"));
        // Version 1 has no ends records.
        let mut old = [0; 47];
        (old[AT_VERSION], old[AT_KIND]) = (VERSION_1, KIND_ENDS);
        assert!(refused(&Bytes::copy_from_slice(&old)).contains("kind 2"));
    }

    #[test]
    fn ends_are_split_to_the_size_of_a_record() {
        let all: Vec<_> = (0..10).map(|id| end(id, id * 100)).collect();
        let covered = LogOffset(5)..LogOffset(99);
        let most = TWO_HEADERS_BYTES + VERSION_BYTES + 4 * BOUNDS_ENTRY_BYTES + 23;
        let encoded = encode_ends(covered, &all, 77, most as u32);
        assert_eq!(encoded.len(), 3);
        let mut back = Vec::new();
        for (part, payload) in (0..).zip(encoded) {
            let StreamRecord::Ends(ends) = decode_record(&payload.into()).unwrap() else {
                panic!("not ends")
            };
            assert_eq!((ends.from, ends.to), (LogOffset(5), LogOffset(99)));
            assert_eq!((ends.part, ends.parts), (part, 3));
            assert_eq!(ends.catalog_version, Some(77));
            back.extend(ends.ends);
        }
        assert_eq!(back, all);
        assert_eq!(encode_ends(LogOffset(0)..LogOffset(0), &[], 0, 1000).len(), 1);
    }

    /// Whichever byte of the record is damaged: a batch is identified unless the byte is in its
    /// header; ends and changes of the catalog always.
    #[test]
    fn the_remains_of_a_damaged_record_identify_it() {
        let good = record(&header(7, 40, 3, 5));
        for at in 0..good.len() {
            let mut damaged = good.to_vec();
            damaged[at] ^= 0x10;
            let record = Identified::Batch(StreamId(7), StreamOffset(40), 3);
            let expected = Remains { record, record_bytes: 32 + good.len() as u64 };
            assert_eq!(remains(&damaged), (at >= HEADER_BYTES).then_some(expected), "byte {at}");
        }
        let bound = End { known: StreamOffset(3), ..end(2, 9) };
        let ends = |ends: [End; 2]| {
            let mut encoded = encode_ends(LogOffset(1)..LogOffset(2), &ends, 5, 1000);
            (encoded.remove(0), Identified::Ends(LogOffset(2)))
        };
        let list = list(b"changes");
        for (good, record) in [
            ends([end(1, 1), end(2, 9)]),
            ends([end(1, 1), bound]),
            (encode_catalog(&list), Identified::Catalog(list.version)),
        ] {
            for at in 0..good.len() {
                let mut damaged = good.clone();
                damaged[at] ^= 0x10;
                let expected = Remains { record, record_bytes: 32 + good.len() as u64 };
                assert_eq!(remains(&damaged), Some(expected), "byte {at}");
            }
        }
        assert_eq!(remains(b"short"), None);
    }
}
