//! The payload of a WAL record: a batch with its place in a stream. Layout: `docs/format/stream-record.md`.

use bytes::Bytes;

use crate::types::{Batch, StreamId, StreamOffset};

const VERSION: u8 = 1;
const KIND_BATCH: u8 = 1;

// Field offsets, each the sum of what lies before it.
const AT_VERSION: usize = 0;
const AT_KIND: usize = AT_VERSION + 1;
const AT_RESERVED: usize = AT_KIND + 1;
const AT_COUNT: usize = AT_RESERVED + 2;
const AT_STREAM: usize = AT_COUNT + 4;
const AT_BASE: usize = AT_STREAM + 8;
const AT_MAX_TIMESTAMP: usize = AT_BASE + 8;

/// Bytes before the batch's payload.
pub(crate) const HEADER_BYTES: usize = AT_MAX_TIMESTAMP + 8;
const _: () = assert!(HEADER_BYTES == 32);

/// The header of the record that carries a batch of `stream`.
pub(crate) fn encode_header(
    stream: StreamId,
    base: StreamOffset,
    count: u32,
    max_timestamp_ms: i64,
) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[AT_VERSION] = VERSION;
    header[AT_KIND] = KIND_BATCH;
    header[AT_COUNT..AT_STREAM].copy_from_slice(&count.to_le_bytes());
    header[AT_STREAM..AT_BASE].copy_from_slice(&stream.0.to_le_bytes());
    header[AT_BASE..AT_MAX_TIMESTAMP].copy_from_slice(&base.0.to_le_bytes());
    header[AT_MAX_TIMESTAMP..].copy_from_slice(&max_timestamp_ms.to_le_bytes());
    header
}

/// What a WAL record says. The WAL has verified its checksum, so anything odd here was written so: by a newer version
/// or by a defect. Either way it must not be skipped silently.
///
/// The payload is copied: a recovered record may be a slice of a large read buffer, and the log cache charges for what it
/// holds.
pub fn decode_record(payload: &Bytes) -> Result<(StreamId, Batch), String> {
    let Some(header) = payload.get(..HEADER_BYTES) else {
        return Err(format!("a record of {} bytes is shorter than a stream header", payload.len()));
    };
    let u64_at = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("8 bytes"));
    if header[AT_VERSION] != VERSION {
        return Err(format!(
            "stream record version {} is not known, only {VERSION}",
            header[AT_VERSION]
        ));
    }
    if header[AT_KIND] != KIND_BATCH {
        return Err(format!("stream record kind {} is not known", header[AT_KIND]));
    }
    if header[AT_RESERVED..AT_COUNT] != [0; 2] {
        return Err("reserved bytes of a stream record are not zero".into());
    }
    let count = u32::from_le_bytes(header[AT_COUNT..AT_STREAM].try_into().expect("4 bytes"));
    let base = u64_at(AT_BASE);
    if count == 0 || base.checked_add(u64::from(count)).is_none() {
        return Err(format!("a batch of {count} records at offset {base} is impossible"));
    }
    let batch = Batch {
        base: StreamOffset(base),
        count,
        max_timestamp_ms: u64_at(AT_MAX_TIMESTAMP).cast_signed(),
        payload: Bytes::copy_from_slice(&payload[HEADER_BYTES..]),
    };
    Ok((StreamId(u64_at(AT_STREAM)), batch))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(header: &[u8]) -> Bytes {
        [header, b"payload"].concat().into()
    }

    #[test]
    fn a_record_comes_back_as_it_was_written() {
        let header = encode_header(StreamId(7), StreamOffset(1 << 40), 3, -1);
        let (stream, batch) = decode_record(&record(&header)).unwrap();
        assert_eq!(stream, StreamId(7));
        assert_eq!(
            batch,
            Batch {
                base: StreamOffset(1 << 40),
                count: 3,
                max_timestamp_ms: -1,
                payload: Bytes::from_static(b"payload")
            }
        );
    }

    /// Bytes of format version 1. They must decode in every later version of this code.
    #[test]
    fn version_1_still_decodes() {
        #[rustfmt::skip]
        let bytes: [u8; 32] = [
            1, 1, 0, 0, 2, 0, 0, 0,
            9, 0, 0, 0, 0, 0, 0, 0,
            0, 1, 0, 0, 0, 0, 0, 0,
            0xff, 0, 0, 0, 0, 0, 0, 0,
        ];
        let (stream, batch) = decode_record(&record(&bytes)).unwrap();
        assert_eq!(
            (stream, batch.base, batch.count, batch.max_timestamp_ms),
            (StreamId(9), StreamOffset(256), 2, 255)
        );
        assert_eq!(encode_header(StreamId(9), StreamOffset(256), 2, 255), bytes);
    }

    #[test]
    fn the_unknown_and_the_impossible_are_refused() {
        let good = encode_header(StreamId(1), StreamOffset(0), 1, 0);
        let with = |at: usize, value: u8| {
            let mut header = good;
            header[at] = value;
            record(&header)
        };
        assert!(decode_record(&record(&good)).is_ok());
        assert!(decode_record(&with(AT_VERSION, 2)).unwrap_err().contains("version 2"));
        assert!(decode_record(&with(AT_KIND, 9)).unwrap_err().contains("kind 9"));
        assert!(decode_record(&with(AT_RESERVED, 1)).unwrap_err().contains("reserved"));
        assert!(decode_record(&with(AT_COUNT, 0)).unwrap_err().contains("impossible"));
        assert!(
            decode_record(&Bytes::copy_from_slice(&good[..31])).unwrap_err().contains("shorter")
        );
        let last = encode_header(StreamId(1), StreamOffset(u64::MAX), 1, 0);
        assert!(decode_record(&record(&last)).unwrap_err().contains("impossible"));
    }
}
