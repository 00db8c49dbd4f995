//! The fetch response, versions 4 to 18. It has its own encoder because the generated one copies
//! the records, which are nearly all of the response.

use bytes::{BufMut, Bytes, BytesMut};
use uuid::Uuid;

use super::response::{Builder, EncodeError, Response};

/// The first version with compact lengths and tagged fields.
const FLEXIBLE: i16 = 12;

/// A fetch response.
#[derive(Default)]
pub(crate) struct FetchResponse {
    /// How long the client is throttled because of its quota.
    pub(crate) throttle_time_ms: i32,
    /// The error of the request as a whole.
    pub(crate) error_code: i16,
    pub(crate) session_id: i32,
    pub(crate) topics: Vec<Topic>,
}

/// A topic's part; versions up to 12 name it, later ones have its ID.
pub(crate) struct Topic {
    pub(crate) name: std::sync::Arc<str>,
    pub(crate) id: Uuid,
    pub(crate) partitions: Vec<Partition>,
}

/// A partition's part.
pub(crate) struct Partition {
    pub(crate) index: i32,
    pub(crate) error_code: i16,
    pub(crate) high_watermark: i64,
    /// Kafka's last stable offset.
    pub(crate) last_stable_offset: i64,
    pub(crate) log_start: i64,
    /// For a reader of committed records: producer ID and first offset of the aborted transactions
    /// among the records.
    pub(crate) aborted: Option<Vec<(i64, i64)>>,
    /// Record batches, in order.
    pub(crate) records: Vec<Bytes>,
}

impl FetchResponse {
    /// Encodes the response for `version`, which is 4 to 18.
    ///
    /// # Errors
    /// More than 2 GiB.
    pub(crate) fn encode(self, correlation_id: i32, version: i16) -> Result<Response, EncodeError> {
        let flexible = version >= FLEXIBLE;
        let mut out = Builder::new(correlation_id, i16::from(flexible));
        let buffer = out.buffer();
        buffer.put_i32(self.throttle_time_ms);
        if version >= 7 {
            buffer.put_i16(self.error_code);
            buffer.put_i32(self.session_id);
        }
        put_len(buffer, self.topics.len(), flexible);
        for topic in self.topics {
            let buffer = out.buffer();
            if version >= 13 {
                buffer.put_slice(topic.id.as_bytes());
            } else {
                put_name(buffer, &topic.name, flexible);
            }
            put_len(buffer, topic.partitions.len(), flexible);
            for partition in topic.partitions {
                partition.encode(&mut out, version);
            }
            end_of_struct(out.buffer(), flexible);
        }
        end_of_struct(out.buffer(), flexible);
        out.finish()
    }
}

impl Partition {
    fn encode(self, out: &mut Builder, version: i16) {
        let flexible = version >= FLEXIBLE;
        let buffer = out.buffer();
        buffer.put_i32(self.index);
        buffer.put_i16(self.error_code);
        buffer.put_i64(self.high_watermark);
        buffer.put_i64(self.last_stable_offset);
        if version >= 5 {
            buffer.put_i64(self.log_start);
        }
        match (&self.aborted, flexible) {
            (Some(aborted), _) => put_len(buffer, aborted.len(), flexible),
            (None, true) => buffer.put_u8(0),
            (None, false) => buffer.put_i32(-1),
        }
        for (producer_id, first_offset) in self.aborted.into_iter().flatten() {
            buffer.put_i64(producer_id);
            buffer.put_i64(first_offset);
            end_of_struct(buffer, flexible);
        }
        if version >= 11 {
            buffer.put_i32(-1); // No preferred read replica.
        }
        put_len(buffer, self.records.iter().map(Bytes::len).sum(), flexible);
        for batch in self.records {
            out.append(batch);
        }
        end_of_struct(out.buffer(), flexible);
    }
}

/// Writes the length of an array or of bytes, which have the same encoding. Saturates: the check of
/// the frame's length refuses longer ones.
fn put_len(buffer: &mut BytesMut, len: usize, flexible: bool) {
    if flexible {
        put_unsigned_varint(buffer, u32::try_from(len + 1).unwrap_or(u32::MAX));
    } else {
        buffer.put_i32(i32::try_from(len).unwrap_or(i32::MAX));
    }
}

fn put_name(buffer: &mut BytesMut, name: &str, flexible: bool) {
    if flexible {
        put_unsigned_varint(buffer, u32::try_from(name.len() + 1).unwrap_or(u32::MAX));
    } else {
        // The name comes from a request of the same version, so its length fits.
        buffer.put_i16(i16::try_from(name.len()).unwrap_or(i16::MAX));
    }
    buffer.put_slice(name.as_bytes());
}

fn end_of_struct(buffer: &mut BytesMut, flexible: bool) {
    if flexible {
        buffer.put_u8(0); // No tagged fields.
    }
}

fn put_unsigned_varint(buffer: &mut BytesMut, mut value: u32) {
    while value >= 0x80 {
        buffer.put_u8(value as u8 | 0x80);
        value >>= 7;
    }
    buffer.put_u8(value as u8);
}

#[cfg(test)]
mod tests {
    use bytes::Buf;
    use kafka_protocol::messages::FetchResponse as Decoded;
    use kafka_protocol::messages::ResponseHeader;
    use kafka_protocol::protocol::Decodable;

    use super::*;

    fn example() -> FetchResponse {
        let partition = |index, records: Vec<Bytes>| Partition {
            index,
            error_code: (index % 2) as i16 * 3,
            high_watermark: 1 << 40,
            last_stable_offset: 1 << 39,
            log_start: 17,
            aborted: [None, Some(vec![]), Some(vec![(7, 8), (9, 10)])][index as usize].clone(),
            records,
        };
        let topic = |name: &str, partitions| Topic {
            name: name.into(),
            id: Uuid::from_u128(name.len() as u128),
            partitions,
        };
        FetchResponse {
            throttle_time_ms: 1_234,
            error_code: 0,
            session_id: 99,
            topics: vec![
                topic(
                    "a",
                    vec![partition(
                        0,
                        vec![Bytes::from(vec![1; 300]), Bytes::from_static(b"second")],
                    )],
                ),
                topic(
                    "longer.name",
                    vec![partition(1, vec![]), partition(2, vec![Bytes::from_static(b"x")])],
                ),
                topic("none", vec![]),
            ],
        }
    }

    #[test]
    fn the_decoder_reads_every_version() {
        for version in 4..=18 {
            let response = example().encode(4711, version).unwrap();
            let mut bytes = Bytes::from(response.pieces.concat());
            assert_eq!(bytes.get_i32() as usize, bytes.len(), "v{version}");
            let header = ResponseHeader::decode(&mut bytes, i16::from(version >= 12)).unwrap();
            assert_eq!(header.correlation_id, 4711);
            let decoded = Decoded::decode(&mut bytes, version).unwrap();
            assert!(bytes.is_empty(), "v{version}");

            assert_eq!(decoded.session_id, if version >= 7 { 99 } else { 0 });
            assert_eq!(decoded.responses.len(), 3);
            for (topic, wanted) in decoded.responses.iter().zip(example().topics) {
                if version >= 13 {
                    assert_eq!(topic.topic_id, wanted.id);
                } else {
                    assert_eq!(&**topic.topic, &*wanted.name);
                }
                assert_eq!(topic.partitions.len(), wanted.partitions.len());
                for (partition, wanted) in topic.partitions.iter().zip(wanted.partitions) {
                    assert_eq!(partition.partition_index, wanted.index);
                    assert_eq!(partition.error_code, wanted.error_code);
                    assert_eq!(partition.high_watermark, wanted.high_watermark);
                    assert_eq!(partition.last_stable_offset, wanted.last_stable_offset);
                    assert_eq!(partition.log_start_offset, if version >= 5 { 17 } else { -1 });
                    let aborted = partition.aborted_transactions.as_ref().map(|aborted| {
                        let pairs = aborted.iter().map(|a| (a.producer_id.0, a.first_offset));
                        pairs.collect::<Vec<_>>()
                    });
                    assert_eq!(aborted, wanted.aborted);
                    assert_eq!(partition.records.as_ref().unwrap(), &wanted.records.concat());
                }
            }
        }
    }
}
