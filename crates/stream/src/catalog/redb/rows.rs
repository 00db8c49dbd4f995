//! The values of rows. Each begins with its own version, so that one of them can change without the
//! others.

use uuid::Uuid;

use super::Failure;
use crate::catalog::{Incarnation, ObjectInfo, ObjectRange, StreamRow};
use crate::fields::u64_at;
use crate::types::{ObjectId, StreamEpoch, StreamOffset};

/// From before there were epochs.
const STREAM_BYTES_V1: usize = 1 + 1 + 8 + 8;
const STREAM_BYTES: usize = STREAM_BYTES_V1 + 8;
const RANGE_BYTES: usize = 1 + 8 + 8 + 8 + 8;
const INCARNATION_BYTES: usize = 8 + 16;
const VALUE_VERSION: u8 = 1;
const STREAM_VERSION: u8 = 2;

fn u64_to(value: &mut [u8], at: usize, number: u64) {
    value[at..at + 8].copy_from_slice(&number.to_le_bytes());
}

/// Encodes a stream row, except for what is in other tables.
pub(super) fn encode_stream(row: &StreamRow) -> [u8; STREAM_BYTES] {
    let mut value = [0; STREAM_BYTES];
    value[0] = STREAM_VERSION;
    value[1] = row.kind;
    u64_to(&mut value, 2, row.start.0);
    u64_to(&mut value, 10, row.uploaded_end.0);
    u64_to(&mut value, STREAM_BYTES_V1, row.epoch.0);
    value
}

pub(super) fn decode_stream(value: &[u8]) -> Result<StreamRow, Failure> {
    let epoch = match (value.first(), value.len()) {
        (Some(&VALUE_VERSION), STREAM_BYTES_V1) => 0,
        (Some(&STREAM_VERSION), STREAM_BYTES) => u64_at(value, STREAM_BYTES_V1),
        (version, len) => {
            let version = version.map_or_else(|| "no".into(), u8::to_string);
            return Err(Failure::Value(format!("a stream row of version {version}, {len} bytes")));
        }
    };
    Ok(StreamRow {
        kind: value[1],
        epoch: StreamEpoch(epoch),
        start: StreamOffset(u64_at(value, 2)),
        uploaded_end: StreamOffset(u64_at(value, 10)),
        ..StreamRow::default()
    })
}

pub(super) fn decode_wal_id(value: &[u8]) -> Result<Uuid, Failure> {
    Uuid::from_slice(value).map_err(|e| Failure::Value(format!("WAL id: {e}")))
}

pub(super) fn encode_range(range: &ObjectRange) -> [u8; RANGE_BYTES] {
    let mut value = [0; RANGE_BYTES];
    value[0] = VALUE_VERSION;
    value[1..9].copy_from_slice(&range.object.0.to_le_bytes());
    value[9..17].copy_from_slice(&range.end.0.to_le_bytes());
    value[17..25].copy_from_slice(&range.payload_bytes.to_le_bytes());
    value[25..].copy_from_slice(&range.max_timestamp_ms.to_le_bytes());
    value
}

pub(super) fn decode_range(start: StreamOffset, value: &[u8]) -> Result<ObjectRange, Failure> {
    let value: &[u8; RANGE_BYTES] = value
        .try_into()
        .map_err(|_| Failure::Value(format!("a range row of {} bytes", value.len())))?;
    if value[0] != VALUE_VERSION {
        return Err(Failure::Value(format!("a range row of version {}", value[0])));
    }
    Ok(ObjectRange {
        object: ObjectId(u64_at(value, 1)),
        start,
        end: StreamOffset(u64_at(value, 9)),
        payload_bytes: u64_at(value, 17),
        max_timestamp_ms: u64_at(value, 25).cast_signed(),
    })
}

pub(super) fn encode_incarnations(incarnations: &[Incarnation]) -> Vec<u8> {
    let mut value = vec![VALUE_VERSION];
    for Incarnation { after_version, id } in incarnations {
        value.extend(after_version.to_le_bytes());
        value.extend(id.as_bytes());
    }
    value
}

pub(super) fn decode_incarnations(value: &[u8]) -> Result<Vec<Incarnation>, Failure> {
    let damaged = || Failure::Value(format!("a `lives` row of {} bytes", value.len()));
    let (&version, rows) = value.split_first().ok_or_else(damaged)?;
    if version != VALUE_VERSION {
        return Err(Failure::Value(format!("a `lives` row of version {version}")));
    }
    let (incarnations, rest) = rows.as_chunks::<INCARNATION_BYTES>();
    if !rest.is_empty() {
        return Err(damaged());
    }
    let decode = |incarnation: &[u8; INCARNATION_BYTES]| {
        let id = Uuid::from_slice(&incarnation[8..]).expect("16 bytes");
        Incarnation { after_version: u64_at(incarnation, 0), id }
    };
    Ok(incarnations.iter().map(decode).collect())
}

/// Encodes an object row as JSON: there are few, and tools can read them.
pub(super) fn encode_object(object: &ObjectInfo) -> Result<Vec<u8>, Failure> {
    serde_json::to_vec(object).map_err(|e| Failure::Value(format!("object {}: {e}", object.id)))
}

pub(super) fn decode_object(value: &[u8]) -> Result<ObjectInfo, Failure> {
    serde_json::from_slice(value).map_err(|e| Failure::Value(format!("an object row: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values as earlier versions wrote them. Every later version of this code must decode them.
    #[test]
    fn values_of_all_versions_decode() {
        let mut stream = StreamRow {
            kind: 1,
            start: StreamOffset(2),
            uploaded_end: StreamOffset(3),
            ..StreamRow::default()
        };
        let bytes = [1, 1, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0];
        assert!(decode_stream(&bytes).is_ok_and(|decoded| decoded == stream), "its epoch is 0");
        stream.epoch = StreamEpoch(4);
        let bytes = [&[2], &bytes[1..], &[4, 0, 0, 0, 0, 0, 0, 0]].concat();
        assert_eq!(encode_stream(&stream).as_slice(), bytes);
        assert!(decode_stream(&bytes).is_ok_and(|decoded| decoded == stream));
        let other_lengths = [&bytes[..0], &bytes[..18], &[1; 26], &[2; 27], &[3; 26]];
        assert!(other_lengths.iter().all(|other| decode_stream(other).is_err()));
        let range = ObjectRange {
            object: ObjectId(4),
            start: StreamOffset(5),
            end: StreamOffset(6),
            payload_bytes: 7,
            max_timestamp_ms: -1,
        };
        let mut bytes =
            vec![1, 4, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0];
        bytes.extend([0xff; 8]);
        assert_eq!(encode_range(&range).as_slice(), bytes);
        assert!(decode_range(StreamOffset(5), &bytes).is_ok_and(|decoded| decoded == range));
        let incarnations =
            [1, 2].map(|id| Incarnation { after_version: id + 6, id: Uuid::from_u128(id.into()) });
        let mut bytes = vec![1, 7, 0, 0, 0, 0, 0, 0, 0];
        bytes.extend([0; 15]);
        bytes.extend([1, 8, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend([0; 15]);
        bytes.push(2);
        assert_eq!(encode_incarnations(&incarnations), bytes);
        assert!(decode_incarnations(&bytes).is_ok_and(|decoded| decoded == incarnations));
        assert!([&bytes[..0], &bytes[..48]].iter().all(|cut| decode_incarnations(cut).is_err()));
        let object = br#"{"id":1,"name":"a/b","size_bytes":2,"index_position":3,"index_bytes":4,
            "index_crc32c":5,"created_at_ms":6}"#;
        assert!(
            decode_object(object)
                .is_ok_and(|object| object.name == "a/b" && object.index_crc32c == 5)
        );
    }
}
