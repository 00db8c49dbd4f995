//! The record batch of Kafka's message format 2: its header, and the checks of a producer's batch.
//!
//! The records after the header stay opaque bytes, compressed or not.

use bytes::{Bytes, BytesMut};

use crate::errors::ApiError;

// Layout, big-endian. The CRC covers everything from the attributes to the end, so base offset and
// leader epoch can be set without recomputing it.
const BASE_OFFSET: usize = 0;
const LENGTH: usize = BASE_OFFSET + 8;
const LEADER_EPOCH: usize = LENGTH + 4;
const MAGIC: usize = LEADER_EPOCH + 4;
const CRC: usize = MAGIC + 1;
const ATTRIBUTES: usize = CRC + 4;
const LAST_OFFSET_DELTA: usize = ATTRIBUTES + 2;
const BASE_TIMESTAMP: usize = LAST_OFFSET_DELTA + 4;
const MAX_TIMESTAMP: usize = BASE_TIMESTAMP + 8;
const PRODUCER_ID: usize = MAX_TIMESTAMP + 8;
const PRODUCER_EPOCH: usize = PRODUCER_ID + 8;
const BASE_SEQUENCE: usize = PRODUCER_EPOCH + 2;
const RECORD_COUNT: usize = BASE_SEQUENCE + 4;
/// The length of a batch header; the records follow it.
pub(crate) const HEADER_BYTES: usize = RECORD_COUNT + 4;
const _: () = assert!(HEADER_BYTES == 61);

/// The bytes that the length field does not count: itself and the base offset.
const UNCOUNTED_BYTES: usize = LEADER_EPOCH;

const CODEC_MASK: i16 = 0b111;
const LOG_APPEND_TIME: i16 = 1 << 3;
const TRANSACTIONAL: i16 = 1 << 4;
const CONTROL: i16 = 1 << 5;

/// The compression codec of a batch's records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Codec {
    None,
    Gzip,
    Snappy,
    Lz4,
    Zstd,
}

/// The fields of a batch header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchHeader {
    pub(crate) base_offset: i64,
    /// The length of the whole batch in bytes, including base offset and length field.
    pub(crate) len_bytes: usize,
    pub(crate) magic: i8,
    pub(crate) crc: u32,
    pub(crate) attributes: i16,
    pub(crate) last_offset_delta: i32,
    pub(crate) base_timestamp_ms: i64,
    pub(crate) max_timestamp_ms: i64,
    pub(crate) producer_id: i64,
    pub(crate) producer_epoch: i16,
    pub(crate) base_sequence: i32,
    pub(crate) record_count: i32,
}

impl BatchHeader {
    /// Parses the header at the start of `bytes`. `None` if there are too few bytes for a header,
    /// or if the length field is smaller than a header.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        fn at<const N: usize>(header: &[u8; HEADER_BYTES], from: usize) -> [u8; N] {
            std::array::from_fn(|i| header[from + i])
        }
        let header: &[u8; HEADER_BYTES] = bytes.first_chunk()?;
        let length = usize::try_from(i32::from_be_bytes(at(header, LENGTH))).ok()?;
        let len_bytes = length.checked_add(UNCOUNTED_BYTES)?;
        if len_bytes < HEADER_BYTES {
            return None;
        }
        Some(Self {
            base_offset: i64::from_be_bytes(at(header, BASE_OFFSET)),
            len_bytes,
            magic: header[MAGIC] as i8,
            crc: u32::from_be_bytes(at(header, CRC)),
            attributes: i16::from_be_bytes(at(header, ATTRIBUTES)),
            last_offset_delta: i32::from_be_bytes(at(header, LAST_OFFSET_DELTA)),
            base_timestamp_ms: i64::from_be_bytes(at(header, BASE_TIMESTAMP)),
            max_timestamp_ms: i64::from_be_bytes(at(header, MAX_TIMESTAMP)),
            producer_id: i64::from_be_bytes(at(header, PRODUCER_ID)),
            producer_epoch: i16::from_be_bytes(at(header, PRODUCER_EPOCH)),
            base_sequence: i32::from_be_bytes(at(header, BASE_SEQUENCE)),
            record_count: i32::from_be_bytes(at(header, RECORD_COUNT)),
        })
    }

    /// The compression codec; `None` for one that Kafka does not define.
    pub(crate) fn codec(&self) -> Option<Codec> {
        match self.attributes & CODEC_MASK {
            0 => Some(Codec::None),
            1 => Some(Codec::Gzip),
            2 => Some(Codec::Snappy),
            3 => Some(Codec::Lz4),
            4 => Some(Codec::Zstd),
            _ => None,
        }
    }

    /// Whether all records carry the time at which the server appended them, which is the header's
    /// greatest timestamp.
    pub(crate) fn is_log_append_time(&self) -> bool {
        self.attributes & LOG_APPEND_TIME != 0
    }

    /// Whether the batch carries a producer ID and sequence numbers.
    pub(crate) fn is_idempotent(&self) -> bool {
        self.producer_id >= 0
    }

    /// Whether the batch is part of its producer's transaction.
    pub(crate) fn is_transactional(&self) -> bool {
        self.attributes & TRANSACTIONAL != 0
    }

    /// Whether the batch is a control batch: written by the server to end a transaction.
    pub(crate) fn is_control(&self) -> bool {
        self.attributes & CONTROL != 0
    }

    /// The number of offsets that the batch covers.
    pub(crate) fn offsets(&self) -> u32 {
        self.last_offset_delta.unsigned_abs() + 1
    }

    /// The offset after the last one that the batch covers.
    pub(crate) fn end(&self) -> u64 {
        self.base_offset.cast_unsigned().saturating_add(self.offsets().into())
    }
}

/// Checks the record set that a producer sent for one partition: exactly one intact batch that a
/// client may write. The rules are those of Kafka's `ProduceRequest.validateRecords`,
/// `UnifiedLog.analyzeAndValidateRecords` and `LogValidator.validateBatch`.
///
/// The records after the header are not examined here; see [`crate::admission`].
///
/// # Errors
/// The errors of these methods: a damaged batch is corrupt, a batch that a client may not send is
/// an invalid record. A truncated batch is an invalid record too; Kafka 4.4 finds no batch in it.
pub(crate) fn check_produced(
    records: &[u8],
    version: i16,
    max_bytes: u32,
) -> Result<BatchHeader, ApiError> {
    let invalid = |reason: String| Err(ApiError::InvalidRecord(reason));
    let header = check_intact(records, max_bytes)?;
    if leader_epoch(records) == IMPORT_EPOCH {
        return invalid(
            "the batch is one of an import, and the topic is not being imported".into(),
        );
    }
    if header.base_offset != 0 {
        return invalid(format!(
            "a producer's batch must start at offset 0, this one starts at {}",
            header.base_offset
        ));
    }
    if header.last_offset_delta < 0 || header.record_count <= 0 {
        return invalid(format!(
            "the batch announces {} records and a last offset delta of {}",
            header.record_count, header.last_offset_delta
        ));
    }
    if header.last_offset_delta != header.record_count - 1 {
        return invalid(format!(
            "{} records do not match a last offset delta of {}",
            header.record_count, header.last_offset_delta
        ));
    }
    match header.codec() {
        None => {
            return Err(ApiError::UnsupportedCompression(format!(
                "compression codec {} is unknown",
                header.attributes & CODEC_MASK
            )));
        }
        Some(Codec::Zstd) if version < 7 => {
            return Err(ApiError::UnsupportedCompression(
                "zstd needs version 7 or later of the produce request".into(),
            ));
        }
        Some(_) => {}
    }
    if header.is_control() {
        return invalid("clients may not write control batches".into());
    }
    if header.is_transactional() && !header.is_idempotent() {
        return invalid("a transactional batch must have a producer ID".into());
    }
    if header.is_log_append_time() {
        return Err(ApiError::InvalidTimestamp(
            "only the server may set the timestamp type LogAppendTime".into(),
        ));
    }
    if header.is_idempotent() && (header.base_sequence < 0 || header.producer_epoch < 0) {
        return invalid(format!(
            "producer {} sent the invalid epoch {} or sequence number {}",
            header.producer_id, header.producer_epoch, header.base_sequence
        ));
    }
    Ok(header)
}

/// The leader epoch of a batch that an import sends: no leader has it, and no producer sends it.
pub(crate) const IMPORT_EPOCH: i32 = -2;

/// The greatest number of offsets that an imported batch covers. It bounds the offsets that are
/// skipped after damage of the log.
pub(crate) const MOST_IMPORTED_OFFSETS: u32 = 1 << 20;

/// Checks the record set that an import sent for one partition: exactly one intact batch, which has
/// an offset and no producer. Offsets may be missing in it. The records after the header are not
/// examined here.
///
/// # Errors
/// [`ApiError::Importing`] for a batch of a producer; else as [`check_produced`].
pub(crate) fn check_imported(records: &[u8], max_bytes: u32) -> Result<BatchHeader, ApiError> {
    let invalid = |reason: &str| Err(ApiError::InvalidRecord(format!("imported batch: {reason}")));
    let header = check_intact(records, max_bytes)?;
    if leader_epoch(records) != IMPORT_EPOCH {
        return Err(ApiError::Importing);
    }
    if header.base_offset < 0 || header.last_offset_delta < 0 {
        return invalid("an offset is negative");
    }
    if !(0..=i64::from(header.offsets())).contains(&header.record_count.into()) {
        return invalid("the number of records does not match the offsets");
    }
    if header.offsets() > MOST_IMPORTED_OFFSETS {
        return invalid("it covers more than 1048576 offsets");
    }
    if header.codec().is_none() {
        return invalid("the compression codec is unknown");
    }
    if header.is_control() || header.is_transactional() || header.is_idempotent() {
        return invalid("it has a producer");
    }
    Ok(header)
}

/// Checks that there is exactly one batch, and its CRC.
fn check_intact(records: &[u8], max_bytes: u32) -> Result<BatchHeader, ApiError> {
    let invalid = |reason: String| Err(ApiError::InvalidRecord(reason));
    if records.is_empty() {
        return invalid("a produce request must hold one record batch for each partition".into());
    }
    if let Err(reason) = check_format(records) {
        let is_later = records.get(MAGIC).is_some_and(|magic| *magic > 2);
        return if is_later { Err(ApiError::CorruptBatch(reason)) } else { invalid(reason) };
    }
    let Some(header) = BatchHeader::parse(records) else {
        return Err(ApiError::CorruptBatch(format!(
            "{} bytes are too short for a record batch",
            records.len()
        )));
    };
    if header.len_bytes > records.len() {
        return invalid(format!(
            "the batch announces {} bytes, but {} were sent",
            header.len_bytes,
            records.len()
        ));
    }
    if header.len_bytes < records.len() {
        return invalid(
            "a produce request must hold exactly one record batch for each partition".into(),
        );
    }
    if header.len_bytes > max_bytes as usize {
        return Err(ApiError::BatchTooLarge {
            len_bytes: header.len_bytes as u64,
            max_bytes: max_bytes.into(),
        });
    }
    check_crc(records, &header).map_err(ApiError::CorruptBatch)?;
    Ok(header)
}

/// Checks that a batch has format 2, if it is long enough to have one.
pub(crate) fn check_format(batch: &[u8]) -> Result<(), String> {
    // Older formats have their magic byte at the same position and are shorter than a header of
    // format 2.
    match batch.get(MAGIC) {
        Some(&magic) if magic != 2 => {
            Err(format!("message format {magic} is not supported, only 2"))
        }
        _ => Ok(()),
    }
}

/// Checks the CRC of a whole batch.
pub(crate) fn check_crc(batch: &[u8], header: &BatchHeader) -> Result<(), String> {
    let crc = crc32c::crc32c(&batch[ATTRIBUTES..]);
    match crc == header.crc {
        true => Ok(()),
        false => Err(format!(
            "the batch's CRC field is {:#010x}, the CRC of its content is {crc:#010x}",
            header.crc
        )),
    }
}

/// Makes a batch mutable: in place if there is no other reference to its bytes, else as a copy.
pub(crate) fn into_mut(batch: Bytes) -> BytesMut {
    batch.try_into_mut().unwrap_or_else(|shared| BytesMut::from(&shared[..]))
}

/// The epoch of a batch that no leader has appended; Kafka's `NO_PARTITION_LEADER_EPOCH`.
pub(crate) const NO_LEADER_EPOCH: i32 = -1;

/// Returns the epoch of the leader that has appended a batch; -1 if there is none, or no header.
pub(crate) fn leader_epoch(batch: &[u8]) -> i32 {
    match batch.get(LEADER_EPOCH..MAGIC) {
        Some(bytes) => i32::from_be_bytes(bytes.try_into().expect("4 bytes")),
        None => NO_LEADER_EPOCH,
    }
}

/// Sets a batch's base offset and leader epoch. Both fields lie before the part that the CRC
/// covers.
pub(crate) fn set_base(batch: &mut [u8], base_offset: u64, leader_epoch: i32) {
    batch[BASE_OFFSET..BASE_OFFSET + 8].copy_from_slice(&base_offset.to_be_bytes());
    batch[LEADER_EPOCH..LEADER_EPOCH + 4].copy_from_slice(&leader_epoch.to_be_bytes());
}

/// Sets the time of append of all records of a batch to `now_ms`, and recomputes the CRC.
pub(crate) fn set_log_append_time(batch: &mut [u8], now_ms: i64) {
    batch[ATTRIBUTES + 1] |= LOG_APPEND_TIME as u8;
    set_max_timestamp(batch, now_ms);
}

/// Sets the codec of the bytes after the header, sets the length field to the length of the slice,
/// and recomputes the CRC.
pub(crate) fn set_codec(batch: &mut [u8], codec: Codec) {
    let bits = match codec {
        Codec::None => 0,
        Codec::Gzip => 1,
        Codec::Snappy => 2,
        Codec::Lz4 => 3,
        Codec::Zstd => 4,
    };
    batch[ATTRIBUTES + 1] = batch[ATTRIBUTES + 1] & !(CODEC_MASK as u8) | bits;
    let length = i32::try_from(batch.len() - UNCOUNTED_BYTES).expect("batches are bounded");
    batch[LENGTH..LENGTH + 4].copy_from_slice(&length.to_be_bytes());
    set_crc(batch);
}

#[cfg(test)]
pub(crate) fn set_last_offset_delta(batch: &mut [u8], delta: i32) {
    batch[LAST_OFFSET_DELTA..LAST_OFFSET_DELTA + 4].copy_from_slice(&delta.to_be_bytes());
    set_crc(batch);
}

/// Removes producer and transaction from a batch, and recomputes the CRC.
pub(crate) fn remove_producer(batch: &mut [u8]) {
    batch[ATTRIBUTES + 1] &= !(TRANSACTIONAL as u8);
    // Producer ID, epoch and base sequence are neighbours, and -1 each.
    batch[PRODUCER_ID..RECORD_COUNT].fill(0xff);
    set_crc(batch);
}

/// Sets the greatest timestamp, and recomputes the CRC.
pub(crate) fn set_max_timestamp(batch: &mut [u8], max_timestamp_ms: i64) {
    batch[MAX_TIMESTAMP..MAX_TIMESTAMP + 8].copy_from_slice(&max_timestamp_ms.to_be_bytes());
    set_crc(batch);
}

fn set_crc(batch: &mut [u8]) {
    let crc = crc32c::crc32c(&batch[ATTRIBUTES..]);
    batch[CRC..CRC + 4].copy_from_slice(&crc.to_be_bytes());
}

/// The header of a batch that the server assembles. It has no producer; [`set_base`] sets the
/// leader epoch.
pub(crate) struct Assembled {
    pub(crate) base_offset: u64,
    pub(crate) last_offset_delta: i32,
    pub(crate) codec: Codec,
    /// Whether all records carry the greatest timestamp.
    pub(crate) is_log_append_time: bool,
    pub(crate) base_timestamp_ms: i64,
    pub(crate) max_timestamp_ms: i64,
    pub(crate) record_count: i32,
}

impl Assembled {
    /// Builds the batch; `records` are compressed with the header's codec.
    pub(crate) fn batch(&self, records: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes.extend_from_slice(records);
        let length = i32::try_from(bytes.len() - UNCOUNTED_BYTES).expect("a batch is bounded");
        let time_type = if self.is_log_append_time { LOG_APPEND_TIME } else { 0 };
        let mut set = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        set(BASE_OFFSET, &self.base_offset.to_be_bytes());
        set(LENGTH, &length.to_be_bytes());
        set(MAGIC, &[2]);
        set(ATTRIBUTES, &(self.codec as i16 | time_type).to_be_bytes());
        set(LAST_OFFSET_DELTA, &self.last_offset_delta.to_be_bytes());
        set(BASE_TIMESTAMP, &self.base_timestamp_ms.to_be_bytes());
        set(PRODUCER_ID, &(-1i64).to_be_bytes());
        set(PRODUCER_EPOCH, &(-1i16).to_be_bytes());
        set(BASE_SEQUENCE, &(-1i32).to_be_bytes());
        set(RECORD_COUNT, &self.record_count.to_be_bytes());
        set_max_timestamp(&mut bytes, self.max_timestamp_ms);
        bytes
    }
}

/// The greatest number of offsets that one batch can cover.
pub(crate) const MOST_OFFSETS: u64 = 1 << 31;

/// Builds a batch without records that covers `count` offsets, from 1 to [`MOST_OFFSETS`]. Kafka's
/// log compaction leaves such batches; clients continue at their end.
pub(crate) fn without_records(base_offset: u64, count: u64, leader_epoch: i32) -> Vec<u8> {
    let header = Assembled {
        base_offset,
        last_offset_delta: i32::try_from(count - 1).expect("at most 2^31 offsets"),
        codec: Codec::None,
        is_log_append_time: false,
        base_timestamp_ms: -1,
        max_timestamp_ms: -1,
        record_count: 0,
    };
    let mut bytes = header.batch(&[]);
    set_base(&mut bytes, base_offset, leader_epoch);
    bytes
}

/// The outcome of a transaction that a control batch records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Abort,
    Commit,
}

/// The only record of a control batch. Key: version and type; value: version and coordinator epoch
/// (Kafka's `ControlRecordType` and `EndTransactionMarker`).
const MARKER_RECORD: [u8; 17] = [
    32, // Length of what follows, as a zigzag varint, like the other lengths.
    0,  // Attributes.
    0,  // Timestamp delta.
    0,  // Offset delta.
    8,  // Length of the key.
    0, 0, 0, 0, 12, // Length of the value.
    0, 0, 0, 0, 0, 0, 0, // No headers.
];
const MARKER_TYPE: usize = HEADER_BYTES + 8;

/// Builds the control batch that ends a transaction, at offset 0.
pub(crate) fn marker(
    producer_id: i64,
    producer_epoch: i16,
    outcome: Outcome,
    now_ms: i64,
) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_BYTES];
    bytes.extend_from_slice(&MARKER_RECORD);
    bytes[MARKER_TYPE] = outcome as u8;
    let mut set = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    set(LENGTH, &((HEADER_BYTES + MARKER_RECORD.len() - UNCOUNTED_BYTES) as i32).to_be_bytes());
    set(MAGIC, &[2]);
    set(ATTRIBUTES, &(TRANSACTIONAL | CONTROL).to_be_bytes());
    set(BASE_TIMESTAMP, &now_ms.to_be_bytes());
    set(PRODUCER_ID, &producer_id.to_be_bytes());
    set(PRODUCER_EPOCH, &producer_epoch.to_be_bytes());
    set(BASE_SEQUENCE, &(-1i32).to_be_bytes());
    set(RECORD_COUNT, &1i32.to_be_bytes());
    set_max_timestamp(&mut bytes, now_ms);
    bytes
}

/// Why recovery wrote a marker in place of a lost one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Repaired {
    /// The outcome that the coordinator had decided.
    Decided,
    /// The coordinator's decision is unknown; the transaction is aborted.
    Unknown,
}

/// The position of the coordinator epoch, which no client examines. Values below all epochs mark a
/// marker that recovery wrote.
const COORDINATOR_EPOCH: usize = HEADER_BYTES + 12;

/// Marks a marker as written by recovery.
pub(crate) fn set_repaired(marker: &mut [u8], repaired: Repaired) {
    let epoch: i32 = match repaired {
        Repaired::Decided => -1,
        Repaired::Unknown => -2,
    };
    marker[COORDINATOR_EPOCH..COORDINATOR_EPOCH + 4].copy_from_slice(&epoch.to_be_bytes());
    set_crc(marker);
}

/// Why recovery wrote this marker; `None` if recovery did not write it.
pub(crate) fn repaired(marker: &[u8]) -> Option<Repaired> {
    let epoch = marker.get(COORDINATOR_EPOCH..COORDINATOR_EPOCH + 4)?;
    match i32::from_be_bytes(epoch.try_into().ok()?) {
        -1 => Some(Repaired::Decided),
        -2 => Some(Repaired::Unknown),
        _ => None,
    }
}

/// The outcome in a control batch built by [`marker`]; `None` for other control batches.
pub(crate) fn outcome(batch: &[u8]) -> Option<Outcome> {
    match batch.get(HEADER_BYTES + 5..=MARKER_TYPE)? {
        [0, 0, 0, 0] => Some(Outcome::Abort),
        [0, 0, 0, 1] => Some(Outcome::Commit),
        _ => None,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use kafka_protocol::ResponseError;
    use kafka_protocol::records::{
        Compression, Record, RecordBatchEncoder, RecordEncodeOptions, TimestampType,
    };

    use super::*;

    pub(crate) const CODECS: [Compression; 5] = [
        Compression::None,
        Compression::Gzip,
        Compression::Snappy,
        Compression::Lz4,
        Compression::Zstd,
    ];

    /// Encodes a batch as a producer does: `(producer ID, epoch, base sequence)`, and the
    /// timestamps of its records.
    pub(crate) fn encode(
        compression: Compression,
        producer: (i64, i16, i32),
        timestamps_ms: &[i64],
    ) -> Bytes {
        let records: Vec<Record> = timestamps_ms
            .iter()
            .enumerate()
            .map(|(i, &timestamp)| Record {
                transactional: false,
                control: false,
                delete_horizon: false,
                partition_leader_epoch: -1,
                producer_id: producer.0,
                producer_epoch: producer.1,
                timestamp_type: TimestampType::Creation,
                offset: i as i64,
                sequence: producer.2.wrapping_add(i as i32),
                timestamp,
                key: Some(Bytes::from(format!("key {i}"))),
                value: Some(Bytes::from(format!("value {i} of {timestamp}"))),
                headers: [("h".into(), Some(Bytes::from_static(b"x")))].into(),
            })
            .collect();
        let mut out = BytesMut::new();
        RecordBatchEncoder::encode(
            &mut out,
            &records,
            &RecordEncodeOptions { version: 2, compression },
        )
        .unwrap();
        out.freeze()
    }

    pub(crate) fn plain(timestamps_ms: &[i64]) -> Bytes {
        encode(Compression::None, (-1, -1, -1), timestamps_ms)
    }

    /// Marks the batch as part of its producer's transaction.
    pub(crate) fn transactional(batch: &Bytes) -> Bytes {
        edited(batch, |b| b[ATTRIBUTES + 1] |= TRANSACTIONAL as u8).into()
    }

    /// Changes a field and recomputes the CRC.
    fn edited(batch: &Bytes, edit: impl FnOnce(&mut [u8])) -> Vec<u8> {
        let mut bytes = batch.to_vec();
        edit(&mut bytes);
        let crc = crc32c::crc32c(&bytes[ATTRIBUTES..]);
        bytes[CRC..CRC + 4].copy_from_slice(&crc.to_be_bytes());
        bytes
    }

    const MAX: u32 = 1 << 20;

    #[test]
    fn the_codec_library_reads_our_markers() {
        use kafka_protocol::records::RecordBatchDecoder;
        for said in [Outcome::Abort, Outcome::Commit] {
            let bytes = marker(77, 3, said, 1_234);
            let header = BatchHeader::parse(&bytes).unwrap();
            assert_eq!(header.len_bytes, bytes.len());
            assert!(header.is_control() && header.is_transactional());
            assert_eq!((header.producer_id, header.producer_epoch), (77, 3));
            assert_eq!(outcome(&bytes), Some(said));
            let read = RecordBatchDecoder::decode(&mut Bytes::from(bytes)).unwrap();
            let record = &read.records[0];
            assert_eq!((read.records.len(), record.control, record.transactional), (1, true, true));
            assert_eq!((record.timestamp, record.offset), (1_234, 0));
            assert_eq!(record.key.as_deref(), Some(&[0, 0, 0, said as u8][..]));
            assert_eq!(record.value.as_deref(), Some(&[0; 6][..]));
        }
    }

    #[test]
    fn we_read_the_batches_of_the_codec_library() {
        let batch = encode(Compression::Gzip, (77, 3, 5), &[1_000, 3_000, 2_000]);
        let header = check_produced(&batch, 9, MAX).unwrap();
        assert_eq!(header.len_bytes, batch.len());
        assert_eq!((header.producer_id, header.producer_epoch, header.base_sequence), (77, 3, 5));
        assert_eq!((header.record_count, header.offsets(), header.last_offset_delta), (3, 3, 2));
        assert_eq!((header.base_timestamp_ms, header.max_timestamp_ms), (1_000, 3_000));
        assert_eq!(header.codec(), Some(Codec::Gzip));
    }

    #[test]
    fn every_flipped_bit_after_the_crc_is_detected() {
        let batch = plain(&[1, 2]);
        for at in ATTRIBUTES..batch.len() {
            let mut bytes = batch.to_vec();
            bytes[at] ^= 0x10;
            assert!(
                matches!(check_produced(&bytes, 9, MAX), Err(ApiError::CorruptBatch(_))),
                "byte {at}"
            );
        }
    }

    #[test]
    fn every_truncation_is_refused() {
        let batch = plain(&[1, 2]);
        for len in 0..batch.len() {
            assert!(check_produced(&batch[..len], 9, MAX).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn refusals_have_kafkas_error_codes() {
        use ResponseError as E;
        let batch = plain(&[1, 2]);
        let two = [batch.clone(), batch.clone()].concat();
        let cases: Vec<(&str, Vec<u8>, E)> = vec![
            ("two batches", two, E::InvalidRecord),
            ("no batch", vec![], E::InvalidRecord),
            ("old format", edited(&batch, |b| b[MAGIC] = 1), E::InvalidRecord),
            ("new format", edited(&batch, |b| b[MAGIC] = 3), E::CorruptMessage),
            ("cut", batch[..batch.len() - 3].to_vec(), E::InvalidRecord),
            ("a base offset", edited(&batch, |b| b[7] = 1), E::InvalidRecord),
            ("control batch", edited(&batch, |b| b[ATTRIBUTES + 1] |= 1 << 5), E::InvalidRecord),
            (
                "transactional, no producer",
                edited(&batch, |b| b[ATTRIBUTES + 1] |= 1 << 4),
                E::InvalidRecord,
            ),
            (
                "time of append",
                edited(&batch, |b| b[ATTRIBUTES + 1] |= 1 << 3),
                E::InvalidTimestamp,
            ),
            (
                "unknown codec",
                edited(&batch, |b| b[ATTRIBUTES + 1] |= 5),
                E::UnsupportedCompressionType,
            ),
            ("record count", edited(&batch, |b| b[RECORD_COUNT + 3] = 3), E::InvalidRecord),
            (
                "no records",
                edited(&batch, |b| b[RECORD_COUNT..RECORD_COUNT + 4].fill(0)),
                E::InvalidRecord,
            ),
            (
                "negative delta",
                edited(&batch, |b| b[LAST_OFFSET_DELTA..LAST_OFFSET_DELTA + 4].fill(0xff)),
                E::InvalidRecord,
            ),
            (
                "producer without sequence",
                edited(&batch, |b| b[PRODUCER_ID..PRODUCER_ID + 8].fill(0)),
                E::InvalidRecord,
            ),
            ("length too long", edited(&batch, |b| b[LENGTH + 2] += 1), E::InvalidRecord),
        ];
        for (what, bytes, expected) in cases {
            let error = check_produced(&bytes, 9, MAX).expect_err(what);
            assert_eq!(error.kind(), expected, "{what}: {error}");
        }
        let error = check_produced(&batch, 9, batch.len() as u32 - 1).unwrap_err();
        assert_eq!(error.kind(), E::MessageTooLarge, "{error}");
        assert!(check_produced(&batch, 9, batch.len() as u32).is_ok());
        let zstd = encode(Compression::Zstd, (-1, -1, -1), &[1]);
        assert_eq!(
            check_produced(&zstd, 6, MAX).unwrap_err().kind(),
            E::UnsupportedCompressionType
        );
        assert!(check_produced(&zstd, 7, MAX).is_ok());
    }

    #[test]
    fn a_batch_without_other_references_is_changed_in_place() {
        let batch = Bytes::from(plain(&[1, 2]).to_vec());
        let at = batch.as_ptr();
        let mut own = into_mut(batch);
        assert_eq!(own.as_ptr(), at);
        set_base(&mut own, 7, 0);
        let placed = own.freeze();
        assert_eq!(placed.as_ptr(), at);
        let mut copy = into_mut(placed.clone());
        assert_ne!(copy.as_ptr(), at);
        set_base(&mut copy, 8, 0);
        assert_eq!(BatchHeader::parse(&placed).unwrap().base_offset, 7);
        drop(copy);
        assert_eq!(into_mut(placed).as_ptr(), at, "the other reference was dropped");
    }

    #[test]
    fn placing_a_batch_keeps_its_crc() {
        let mut batch = plain(&[1, 2]).to_vec();
        set_base(&mut batch, 4_000_000_000, 7);
        let header = BatchHeader::parse(&batch).unwrap();
        assert_eq!(header.base_offset, 4_000_000_000);
        assert_eq!(header.crc, crc32c::crc32c(&batch[ATTRIBUTES..]));
        set_log_append_time(&mut batch, 99);
        let header = BatchHeader::parse(&batch).unwrap();
        assert!(header.is_log_append_time());
        assert_eq!(header.max_timestamp_ms, 99);
        assert_eq!(header.crc, crc32c::crc32c(&batch[ATTRIBUTES..]));
    }
}
