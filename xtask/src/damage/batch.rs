//! Record batches as they are on the wire: encoding, and decoding with their checksums.

use bytes::{Buf, Bytes, BytesMut};
use kafka_protocol::records::{
    Compression, Record as WireRecord, RecordBatchDecoder, RecordBatchEncoder, RecordEncodeOptions,
    TimestampType,
};

use super::model::Record;
use crate::Error;

/// Bytes of a batch before its records: offset, length, leader epoch, magic, checksum, ..., count.
const BATCH_HEADER_BYTES: usize = 61;
const AT_LENGTH: usize = 8;
const AT_CRC: usize = 17;
const AT_ATTRIBUTES: usize = 21;
const AT_LAST_DELTA: usize = 23;
const AT_PRODUCER_ID: usize = 43;
const AT_COUNT: usize = 57;

/// The producer of a batch; all fields are -1 for a producer without an ID.
#[derive(Clone, Copy)]
pub(super) struct Producer {
    pub(super) id: i64,
    pub(super) epoch: i16,
    pub(super) sequence: i32,
    pub(super) transactional: bool,
}

impl Producer {
    pub(super) const NONE: Self = Self { id: -1, epoch: -1, sequence: -1, transactional: false };
}

/// Encodes a batch as a producer sends it. Offsets start at 0: the server assigns them.
pub(super) fn encode_batch(records: &[Record], producer: Producer) -> Result<Bytes, Error> {
    let wire: Vec<WireRecord> = (0..)
        .zip(records)
        .map(|(delta, record)| WireRecord {
            transactional: producer.transactional,
            control: false,
            delete_horizon: false,
            partition_leader_epoch: -1,
            producer_id: producer.id,
            producer_epoch: producer.epoch,
            timestamp_type: TimestampType::Creation,
            offset: delta,
            sequence: producer.sequence.max(0) + delta as i32,
            timestamp: record.timestamp_ms,
            key: record.key.clone().map(Bytes::from),
            value: Some(record.value().into()),
            headers: Default::default(),
        })
        .collect();
    let options = RecordEncodeOptions { version: 2, compression: Compression::None };
    let mut batch = BytesMut::new();
    RecordBatchEncoder::encode(&mut batch, &wire, &options).map_err(|error| error.to_string())?;
    Ok(batch.freeze())
}

/// The purpose of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BatchKind {
    Data,
    CommitMarker,
    AbortMarker,
}

/// A fetched batch.
pub(super) struct Batch {
    pub(super) base: i64,
    /// The offset after the batch.
    pub(super) end: i64,
    pub(super) kind: BatchKind,
    pub(super) transactional: bool,
    pub(super) producer_id: i64,
    /// Offset, timestamp, key and value.
    pub(super) records: Vec<(i64, i64, Option<Bytes>, Option<Bytes>)>,
}

/// Decodes the batches of a fetch. An incomplete last batch is left out, as every client does.
///
/// # Errors
/// The errors that a client would report: a wrong checksum, or an invalid batch.
pub(super) fn decode_batches(mut bytes: Bytes) -> Result<Vec<Batch>, Error> {
    let mut batches = Vec::new();
    while bytes.len() >= BATCH_HEADER_BYTES {
        let int = |at: usize| (&bytes[at..at + 4]).get_i32();
        let length = usize::try_from(int(AT_LENGTH))? + 12;
        if bytes.len() < length {
            break;
        }
        let mut batch = bytes.slice(..length);
        let base = (&batch[..8]).get_i64();
        let attributes = (&batch[AT_ATTRIBUTES..]).get_i16();
        let end = base + i64::from((&batch[AT_LAST_DELTA..]).get_i32()) + 1;
        if crc32c::crc32c(&batch[AT_ATTRIBUTES..]) != (&batch[AT_CRC..]).get_u32() {
            return Err(format!("the batch at offset {base} has a wrong checksum").into());
        }
        let producer_id = (&batch[AT_PRODUCER_ID..]).get_i64();
        let count = (&batch[AT_COUNT..]).get_i32();
        let records = match count {
            0 => Vec::new(), // compaction has removed all records of the batch
            _ => RecordBatchDecoder::decode(&mut batch).map_err(|error| error.to_string())?.records,
        };
        let kind = match attributes & 0x20 {
            0 => BatchKind::Data,
            // The key of a marker consists of its version and its type.
            _ => match records.first().and_then(|marker| marker.key.as_deref()) {
                Some([_, _, 0, 0]) => BatchKind::AbortMarker,
                Some([_, _, 0, 1]) => BatchKind::CommitMarker,
                other => return Err(format!("offset {base}: a marker with key {other:?}").into()),
            },
        };
        let records = records
            .into_iter()
            .map(|record| (record.offset, record.timestamp, record.key, record.value));
        batches.push(Batch {
            base,
            end,
            kind,
            transactional: attributes & 0x10 != 0,
            producer_id,
            records: records.collect(),
        });
        bytes.advance(length);
    }
    Ok(batches)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_decoded_unchanged_and_a_flipped_bit_is_refused() {
        let record =
            |id| Record { id, bytes: 50, key: Some("k".into()), timestamp_ms: 7, txn: None };
        let records = [record(1), record(2)];
        let bytes = encode_batch(&records, Producer::NONE).unwrap();
        let batches = decode_batches(bytes.clone()).unwrap();
        assert_eq!((batches.len(), batches[0].base, batches[0].end), (1, 0, 2));
        let values: Vec<_> =
            batches[0].records.iter().map(|each| each.3.clone().unwrap()).collect();
        assert_eq!(values, records.map(|each| Bytes::from(each.value())));
        let mut flipped = bytes.to_vec();
        *flipped.last_mut().unwrap() ^= 1;
        assert!(decode_batches(flipped.into()).is_err());
        assert!(decode_batches(bytes.slice(..bytes.len() - 1)).unwrap().is_empty());
    }
}
