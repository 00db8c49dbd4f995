//! The record header: 32 bytes before each payload, and the padding record. `docs/format/wal.md`,
//! section 4.

use std::fmt;

use uuid::Uuid;

use crate::layout::{LogOffset, PAGE, RECORD_HEADER_BYTES};
use crate::options::MAX_WINDOW_BYTES;

const MAGIC_DATA: [u8; 4] = *b"ALRD";
const MAGIC_PADDING: [u8; 4] = *b"ALRP";
/// The common prefix of both, for which the search for records in damaged ranges looks.
pub(crate) const MAGIC_PREFIX: [u8; 3] = *b"ALR";

/// No window is large enough for more. The bound keeps any header, however it came about, from
/// making a reader allocate more.
const MAX_PAYLOAD_BYTES: u32 = (MAX_WINDOW_BYTES / 2) as u32;

const MAGIC_AT: usize = 0;
const LEN_AT: usize = MAGIC_AT + 4;
const OFFSET_AT: usize = LEN_AT + 4;
const EPOCH_AT: usize = OFFSET_AT + 8;
const LAG_AT: usize = EPOCH_AT + 4;
const PAYLOAD_CRC_AT: usize = LAG_AT + 4;
const HEADER_CRC_AT: usize = PAYLOAD_CRC_AT + 4;
const _: () = assert!(HEADER_CRC_AT + 4 == RECORD_HEADER_BYTES);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Data,
    Padding,
}

/// A record header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordHeader {
    pub(crate) kind: Kind,
    pub(crate) payload_len: u32,
    pub(crate) offset: LogOffset,
    pub(crate) epoch: u32,
    /// Everything before it was durable when this header was written. Stored as the distance from
    /// `offset`.
    pub(crate) proof: LogOffset,
    pub(crate) payload_crc: u32,
}

impl RecordHeader {
    /// The end of the record.
    pub(crate) fn end(&self) -> LogOffset {
        LogOffset(self.offset.0 + RECORD_HEADER_BYTES as u64 + u64::from(self.payload_len))
    }
}

/// Why bytes are not a record header of this WAL at this position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotARecord {
    Magic([u8; 4]),
    Checksum,
    Misplaced { stated: LogOffset },
    Length(u32),
}

impl fmt::Display for NotARecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Magic([0, 0, 0, 0]) => write!(f, "zeros where a record should be"),
            Self::Magic(_) => write!(f, "no record header"),
            Self::Checksum => write!(f, "record header with a wrong checksum"),
            Self::Misplaced { stated } => write!(f, "a record that belongs at {stated}"),
            Self::Length(len) => write!(f, "record header with an impossible length of {len}"),
        }
    }
}

/// Encodes and decodes the headers of one WAL: the checksum is seeded with the WAL's id, so headers
/// of another WAL fail.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Codec {
    id_crc: u32,
}

impl Codec {
    pub(crate) fn new(wal_id: Uuid) -> Self {
        Self { id_crc: crc32c::crc32c(wal_id.as_bytes()) }
    }

    pub(crate) fn encode(self, header: &RecordHeader) -> [u8; RECORD_HEADER_BYTES] {
        let lag =
            u32::try_from(header.offset.0 - header.proof.0).expect("the window is at most 1 GiB");
        let mut bytes = [0; RECORD_HEADER_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(
            MAGIC_AT,
            match header.kind {
                Kind::Data => &MAGIC_DATA,
                Kind::Padding => &MAGIC_PADDING,
            },
        );
        put(LEN_AT, &header.payload_len.to_le_bytes());
        put(OFFSET_AT, &header.offset.0.to_le_bytes());
        put(EPOCH_AT, &header.epoch.to_le_bytes());
        put(LAG_AT, &lag.to_le_bytes());
        put(PAYLOAD_CRC_AT, &header.payload_crc.to_le_bytes());
        let crc = crc32c::crc32c_append(self.id_crc, &bytes[..HEADER_CRC_AT]);
        bytes[HEADER_CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Decodes the header at `x`. The caller checks the payload and the epoch.
    pub(crate) fn decode(
        self,
        x: LogOffset,
        bytes: &[u8; RECORD_HEADER_BYTES],
    ) -> Result<RecordHeader, NotARecord> {
        let u32_at =
            |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let magic: [u8; 4] = bytes[MAGIC_AT..LEN_AT].try_into().expect("four bytes");
        let kind = match magic {
            MAGIC_DATA => Kind::Data,
            MAGIC_PADDING => Kind::Padding,
            _ => return Err(NotARecord::Magic(magic)),
        };
        if u32_at(HEADER_CRC_AT) != crc32c::crc32c_append(self.id_crc, &bytes[..HEADER_CRC_AT]) {
            return Err(NotARecord::Checksum);
        }
        let offset = LogOffset(u64::from_le_bytes(
            bytes[OFFSET_AT..EPOCH_AT].try_into().expect("eight bytes"),
        ));
        if offset != x {
            return Err(NotARecord::Misplaced { stated: offset });
        }
        let (payload_len, lag) = (u32_at(LEN_AT), u64::from(u32_at(LAG_AT)));
        let header = RecordHeader {
            kind,
            payload_len,
            offset,
            epoch: u32_at(EPOCH_AT),
            proof: LogOffset(x.0.saturating_sub(lag)),
            payload_crc: u32_at(PAYLOAD_CRC_AT),
        };
        let possible = match kind {
            Kind::Data => (1..=MAX_PAYLOAD_BYTES).contains(&payload_len),
            Kind::Padding => header.end().0.is_multiple_of(PAGE) && u64::from(payload_len) < PAGE,
        };
        if !possible || lag > x.0 {
            return Err(NotARecord::Length(payload_len));
        }
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample() -> RecordHeader {
        RecordHeader {
            kind: Kind::Data,
            payload_len: 100,
            offset: LogOffset(0x0102_0304),
            epoch: 5,
            proof: LogOffset(0x0102_0300),
            payload_crc: 0xdead_beef,
        }
    }

    #[test]
    fn version_1_keeps_its_bytes() {
        let bytes = Codec::new(Uuid::from_u128(1)).encode(&sample());
        assert_eq!(
            bytes[..28],
            [
                b'A', b'L', b'R', b'D', 100, 0, 0, 0, 4, 3, 2, 1, 0, 0, 0, 0, 5, 0, 0, 0, 4, 0, 0,
                0, 0xef, 0xbe, 0xad, 0xde
            ]
        );
        assert_eq!(bytes[28..], 0xce18_ae36_u32.to_le_bytes(), "the checksum of these fields");
    }

    #[test]
    fn each_kind_of_invalid_header_is_refused() {
        let codec = Codec::new(Uuid::from_u128(1));
        let (x, bytes) = (sample().offset, codec.encode(&sample()));
        assert_eq!(codec.decode(x, &bytes), Ok(sample()));
        assert_eq!(
            Codec::new(Uuid::from_u128(2)).decode(x, &bytes),
            Err(NotARecord::Checksum),
            "another WAL"
        );
        assert_eq!(
            codec.decode(LogOffset(9), &bytes),
            Err(NotARecord::Misplaced { stated: x }),
            "an earlier lap"
        );
        assert_eq!(codec.decode(x, &[0; 32]), Err(NotARecord::Magic([0; 4])));
        let empty = codec.encode(&RecordHeader { payload_len: 0, ..sample() });
        assert_eq!(codec.decode(x, &empty), Err(NotARecord::Length(0)));
        let huge = codec.encode(&RecordHeader { payload_len: (512 << 20) + 1, ..sample() });
        assert_eq!(codec.decode(x, &huge), Err(NotARecord::Length((512 << 20) + 1)));
        let padding = codec.encode(&RecordHeader { kind: Kind::Padding, ..sample() });
        assert_eq!(
            codec.decode(x, &padding),
            Err(NotARecord::Length(100)),
            "padding ends on a page boundary"
        );
    }

    proptest! {
        #[test]
        fn a_header_decodes_to_its_fields(
            offset in 0u64..1 << 62, lag in 0u32..1 << 30, payload_len in 1..=MAX_PAYLOAD_BYTES,
            epoch: u32, payload_crc: u32, id: u128,
        ) {
            let codec = Codec::new(Uuid::from_u128(id));
            let offset = LogOffset(offset + u64::from(lag));
            let header = RecordHeader {
                kind: Kind::Data,
                payload_len,
                offset,
                epoch,
                payload_crc,
                proof: LogOffset(offset.0 - u64::from(lag)),
            };
            prop_assert_eq!(codec.decode(offset, &codec.encode(&header)), Ok(header));
        }

        #[test]
        fn no_flipped_bit_passes(bit in 0usize..RECORD_HEADER_BYTES * 8) {
            let codec = Codec::new(Uuid::from_u128(1));
            let mut bytes = codec.encode(&sample());
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(codec.decode(sample().offset, &bytes).is_err());
        }
    }
}
