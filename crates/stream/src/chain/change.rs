//! Changes of the catalog. `docs/format/chain.md`, section 4.

use std::ops::RangeInclusive;

use bytes::Bytes;
use uuid::Uuid;

use crate::catalog::{Change, MAX_LABEL_BYTES, ObjectInfo, ObjectRange, Replaced, Uploaded};
use crate::naming::{object_name, object_nonce};
use crate::sequence::DecodeError;
use crate::types::{ObjectId, StreamEpoch, StreamId, StreamOffset};
use crate::wire::{Reader, Writer};

/// The format versions of objects that this version reads. `docs/format/object.md`.
const OBJECT_FORMATS: RangeInclusive<u8> = 1..=2;

const CREATE_STREAM: u8 = 1;
const DELETE_STREAM: u8 = 2;
const TRIM_STREAM: u8 = 3;
const PUT_META: u8 = 4;
const DELETE_META: u8 = 5;
const OPEN_STREAM: u8 = 6;
const ADD_OBJECT: u8 = 32;
const UPLOADED: u8 = 33;
const REPLACED: u8 = 34;
const REMOVE_OBJECT: u8 = 35;
const RESERVE_STREAMS: u8 = 36;
const LARGEST_COUNT: u8 = 37;
const INCARNATION: u8 = 64;
const BIND_WAL: u8 = 65;
const TERM: u8 = 66;
const GAP: u8 = 67;

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChainChange {
    /// Creates a stream.
    CreateStream {
        /// Its id.
        id: StreamId,
        /// See [`crate::Change::CreateStream`].
        kind: u8,
        /// Opaque; at most 512 bytes.
        label: Bytes,
    },
    /// Deletes a stream.
    DeleteStream {
        /// The stream.
        id: StreamId,
        /// The epoch of its writer.
        epoch: StreamEpoch,
    },
    /// Removes the records before an offset.
    TrimStream {
        /// The stream.
        id: StreamId,
        /// The epoch of its writer.
        epoch: StreamEpoch,
        /// The new start.
        to: StreamOffset,
    },
    /// Sets metadata.
    PutMeta {
        /// The key.
        key: String,
        /// The value.
        value: Bytes,
    },
    /// Removes metadata.
    DeleteMeta {
        /// The key.
        key: String,
    },
    /// Sets the epoch of a stream's writer.
    OpenStream {
        /// The stream.
        id: StreamId,
        /// The epoch of its new writer.
        epoch: StreamEpoch,
    },
    /// Adds an object.
    AddObject(ChainObject),
    /// Records the upload of a stream.
    Uploaded(Uploaded),
    /// Replaces ranges of a stream by one in another object.
    Replaced(Replaced),
    /// Removes an object that was deleted.
    RemoveObject(ObjectId),
    /// Allows ids below this one for streams.
    ReserveStreams(StreamId),
    /// Bounds the number of offsets of a batch.
    LargestCount(u32),
    /// Begins a run of the store.
    BeginIncarnation(Uuid),
    /// Binds the store to a WAL.
    BindWal(Uuid),
    /// Sets the term.
    SetTerm(u32),
    /// Declares that offsets of a stream are lost.
    Gap {
        /// The stream.
        stream: StreamId,
        /// The offsets.
        offsets: std::ops::Range<StreamOffset>,
    },
}

/// What the chain has of an object. Its name follows from the store, the number and the nonce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainObject {
    /// Its number.
    pub id: ObjectId,
    /// In its name.
    pub nonce: Uuid,
    /// Its length.
    pub size_bytes: u64,
    /// Position of its index; since format version 2 of the top of the index.
    pub index_position: u64,
    /// Length of its index; since format version 2 of the top.
    pub index_bytes: u64,
    /// CRC32C of its index; since format version 2 of the top.
    pub index_crc32c: u32,
    /// See [`crate::catalog::ObjectInfo::created_at_ms`].
    pub created_at_ms: i64,
    /// See [`crate::catalog::ObjectInfo::generation`].
    pub generation: u8,
    /// Bytes of payload that were written.
    pub payload_bytes: u64,
    /// Its format version, 1 or 2. `docs/format/object.md`.
    pub format: u8,
}

/// Where a change may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In a list that is recorded in the WAL first.
    Recorded,
    /// Among the own changes of a delta.
    Delta,
    /// Among the own changes of a fence.
    Fence,
}

impl Place {
    const ALL: [Self; 3] = [Self::Recorded, Self::Delta, Self::Fence];

    fn allows(self, tag: u8) -> bool {
        match self {
            Self::Recorded => (CREATE_STREAM..=OPEN_STREAM).contains(&tag),
            Self::Delta => (ADD_OBJECT..=LARGEST_COUNT).contains(&tag),
            Self::Fence => {
                (ADD_OBJECT..=LARGEST_COUNT).contains(&tag) || (INCARNATION..=GAP).contains(&tag)
            }
        }
    }
}

impl ChainChange {
    fn tag(&self) -> u8 {
        match self {
            Self::CreateStream { .. } => CREATE_STREAM,
            Self::DeleteStream { .. } => DELETE_STREAM,
            Self::TrimStream { .. } => TRIM_STREAM,
            Self::PutMeta { .. } => PUT_META,
            Self::DeleteMeta { .. } => DELETE_META,
            Self::OpenStream { .. } => OPEN_STREAM,
            Self::AddObject(_) => ADD_OBJECT,
            Self::Uploaded(_) => UPLOADED,
            Self::Replaced(_) => REPLACED,
            Self::RemoveObject(_) => REMOVE_OBJECT,
            Self::ReserveStreams(_) => RESERVE_STREAMS,
            Self::LargestCount(_) => LARGEST_COUNT,
            Self::BeginIncarnation(_) => INCARNATION,
            Self::BindWal(_) => BIND_WAL,
            Self::SetTerm(_) => TERM,
            Self::Gap { .. } => GAP,
        }
    }

    /// Appends the change.
    ///
    /// # Panics
    /// If it may not be in this place, or a label is too long.
    pub(super) fn encode(&self, place: Place, writer: &mut Writer) {
        let tag = self.tag();
        assert!(place.allows(tag), "{self:?} in {place:?}");
        writer.u8(tag);
        match self {
            Self::CreateStream { id, kind, label } => {
                assert!(label.len() <= MAX_LABEL_BYTES, "a label of {} bytes", label.len());
                writer.varint(id.0);
                writer.u8(*kind);
                writer.bytes(label);
            }
            Self::DeleteStream { id, epoch } | Self::OpenStream { id, epoch } => {
                writer.varint(id.0);
                writer.varint(epoch.0);
            }
            Self::TrimStream { id, epoch, to } => {
                writer.varint(id.0);
                writer.varint(epoch.0);
                writer.varint(to.0);
            }
            Self::PutMeta { key, value } => {
                writer.bytes(key.as_bytes());
                writer.bytes(value);
            }
            Self::DeleteMeta { key } => writer.bytes(key.as_bytes()),
            Self::AddObject(object) => object.encode(writer),
            Self::Uploaded(uploaded) => {
                let Uploaded { stream, uploaded_end, start, checkpoint, range } = uploaded;
                writer.varint(stream.0);
                writer.varint(uploaded_end.0);
                writer.varint(start.0);
                writer.optional(checkpoint.as_deref());
                encode_range(range.as_ref(), writer);
            }
            Self::Replaced(Replaced { stream, old, new }) => {
                writer.varint(stream.0);
                writer.varint(old.len() as u64);
                let mut before = 0;
                for start in old {
                    writer.varint(start.0 - before);
                    before = start.0;
                }
                encode_range(Some(new), writer);
            }
            Self::RemoveObject(object) => writer.varint(object.0),
            Self::ReserveStreams(end) => writer.varint(end.0),
            Self::LargestCount(count) => writer.varint((*count).into()),
            Self::BeginIncarnation(id) | Self::BindWal(id) => writer.uuid(*id),
            Self::SetTerm(term) => writer.varint((*term).into()),
            Self::Gap { stream, offsets } => {
                writer.varint(stream.0);
                writer.varint(offsets.start.0);
                writer.varint(offsets.end.0);
            }
        }
    }

    /// Takes a change.
    pub(super) fn decode(place: Place, reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let tag = reader.u8()?;
        if !place.allows(tag) {
            return match Place::ALL.iter().any(|place| place.allows(tag)) {
                true => reader.invalid(format!("a change with tag {tag}, which belongs elsewhere")),
                false => reader.unknown(format!("tag {tag} of a change")),
            };
        }
        Ok(match tag {
            CREATE_STREAM => {
                let (id, kind) = (stream(reader)?, reader.u8()?);
                let label = reader.bytes()?;
                if label.len() > MAX_LABEL_BYTES {
                    return reader.invalid(format!("a label of {} bytes", label.len()));
                }
                Self::CreateStream { id, kind, label }
            }
            DELETE_STREAM => Self::DeleteStream { id: stream(reader)?, epoch: epoch(reader)? },
            TRIM_STREAM => {
                let (id, epoch) = (stream(reader)?, epoch(reader)?);
                Self::TrimStream { id, epoch, to: offset(reader)? }
            }
            PUT_META => Self::PutMeta { key: reader.text()?, value: reader.bytes()? },
            DELETE_META => Self::DeleteMeta { key: reader.text()? },
            OPEN_STREAM => Self::OpenStream { id: stream(reader)?, epoch: epoch(reader)? },
            ADD_OBJECT => Self::AddObject(ChainObject::decode(reader)?),
            UPLOADED => Self::Uploaded(Uploaded {
                stream: stream(reader)?,
                uploaded_end: offset(reader)?,
                start: offset(reader)?,
                checkpoint: reader.flag()?.then(|| reader.bytes()).transpose()?,
                range: decode_range(reader)?,
            }),
            REPLACED => {
                let (stream, count) = (stream(reader)?, reader.count()?);
                // Not allocated by the stated number, which may be wrong.
                let mut old = Vec::new();
                for _ in 0..count {
                    let before = old.last().map_or(0, |before: &StreamOffset| before.0);
                    let start = reader.above(before)?;
                    if !old.is_empty() && start == before {
                        return reader.invalid("two ranges with one start");
                    }
                    old.push(StreamOffset(start));
                }
                match decode_range(reader)?.filter(|_| count > 0) {
                    Some(new) => Self::Replaced(Replaced { stream, old, new }),
                    None => return reader.invalid("a replacement without a range"),
                }
            }
            REMOVE_OBJECT => Self::RemoveObject(ObjectId(reader.varint()?)),
            RESERVE_STREAMS => Self::ReserveStreams(stream(reader)?),
            LARGEST_COUNT => Self::LargestCount(narrow(reader)?),
            INCARNATION => Self::BeginIncarnation(reader.uuid()?),
            BIND_WAL => Self::BindWal(reader.uuid()?),
            TERM => Self::SetTerm(narrow(reader)?),
            GAP => {
                let (stream, start, end) = (stream(reader)?, offset(reader)?, offset(reader)?);
                if end <= start {
                    return reader.invalid("an empty gap");
                }
                Self::Gap { stream, offsets: start..end }
            }
            tag => unreachable!("no place allows tag {tag}"),
        })
    }
}

impl From<Change> for ChainChange {
    fn from(change: Change) -> Self {
        match change {
            Change::CreateStream { id, kind, label } => Self::CreateStream { id, kind, label },
            Change::DeleteStream { id, epoch } => Self::DeleteStream { id, epoch },
            Change::TrimStream { id, epoch, to } => Self::TrimStream { id, epoch, to },
            Change::PutMeta { key, value } => Self::PutMeta { key, value: value.into() },
            Change::DeleteMeta(key) => Self::DeleteMeta { key },
        }
    }
}

impl ChainObject {
    /// Returns what the chain has of an object.
    ///
    /// # Panics
    /// If its name has no nonce.
    pub(crate) fn of(object: &ObjectInfo) -> Self {
        Self {
            id: object.id,
            nonce: object_nonce(&object.name).expect("a name with a nonce"),
            size_bytes: object.size_bytes,
            index_position: object.index_position,
            index_bytes: object.index_bytes,
            index_crc32c: object.index_crc32c,
            created_at_ms: object.created_at_ms,
            generation: object.generation,
            payload_bytes: object.payload_bytes,
            format: object.format,
        }
    }

    /// Returns its path in the object store.
    pub fn name(&self, store: Uuid) -> String {
        object_name(store, self.id, self.nonce)
    }

    /// Returns the object of a store.
    pub(crate) fn info(&self, store: Uuid) -> ObjectInfo {
        ObjectInfo {
            id: self.id,
            name: self.name(store),
            size_bytes: self.size_bytes,
            format: self.format,
            index_position: self.index_position,
            index_bytes: self.index_bytes,
            index_crc32c: self.index_crc32c,
            created_at_ms: self.created_at_ms,
            generation: self.generation,
            payload_bytes: self.payload_bytes,
        }
    }

    pub(super) fn encode(&self, writer: &mut Writer) {
        writer.varint(self.id.0);
        writer.uuid(self.nonce);
        writer.varint(self.size_bytes);
        writer.varint(self.index_position);
        writer.varint(self.index_bytes);
        writer.u32(self.index_crc32c);
        writer.signed(self.created_at_ms);
        writer.u8(self.generation);
        writer.varint(self.payload_bytes);
        writer.u8(self.format);
    }

    pub(super) fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            id: ObjectId(reader.varint()?),
            nonce: reader.uuid()?,
            size_bytes: reader.varint()?,
            index_position: reader.varint()?,
            index_bytes: reader.varint()?,
            index_crc32c: reader.u32()?,
            created_at_ms: reader.signed()?,
            generation: reader.u8()?,
            payload_bytes: reader.varint()?,
            format: decode_format(reader)?,
        })
    }
}

fn decode_format(reader: &mut Reader<'_>) -> Result<u8, DecodeError> {
    match reader.u8()? {
        known if OBJECT_FORMATS.contains(&known) => Ok(known),
        later => reader.unknown(format!("format version {later} of an object")),
    }
}

/// Encodes the changes of a list that is recorded in the WAL.
///
/// # Panics
/// If one of them may not be recorded, or a label is too long.
pub(crate) fn encode_recorded(changes: &[ChainChange]) -> Vec<u8> {
    let mut writer = Writer::default();
    changes.iter().for_each(|change| change.encode(Place::Recorded, &mut writer));
    writer.finish()
}

/// Decodes the `count` changes of a list that was recorded in the WAL.
pub(crate) fn decode_recorded(count: u32, bytes: &Bytes) -> Result<Vec<ChainChange>, DecodeError> {
    let reader = &mut Reader::new(bytes);
    // Not allocated by the stated number, which may be wrong.
    let mut changes = Vec::new();
    for _ in 0..count {
        changes.push(ChainChange::decode(Place::Recorded, reader)?);
    }
    reader.end().map(|()| changes)
}

fn encode_range(range: Option<&ObjectRange>, writer: &mut Writer) {
    writer.u8(u8::from(range.is_some()));
    if let Some(range) = range {
        encode_range_fields(range, writer);
    }
}

pub(super) fn encode_range_fields(range: &ObjectRange, writer: &mut Writer) {
    let ObjectRange { object, start, end, payload_bytes, max_timestamp_ms } = range;
    writer.varint(object.0);
    writer.varint(start.0);
    writer.varint(end.0 - start.0);
    writer.varint(*payload_bytes);
    writer.signed(*max_timestamp_ms);
}

fn decode_range(reader: &mut Reader<'_>) -> Result<Option<ObjectRange>, DecodeError> {
    reader.flag()?.then(|| decode_range_fields(reader)).transpose()
}

pub(super) fn decode_range_fields(reader: &mut Reader<'_>) -> Result<ObjectRange, DecodeError> {
    let (object, start) = (ObjectId(reader.varint()?), offset(reader)?);
    let end = StreamOffset(reader.above(start.0)?);
    if end == start {
        return reader.invalid("an empty range");
    }
    let (payload_bytes, max_timestamp_ms) = (reader.varint()?, reader.signed()?);
    Ok(ObjectRange { object, start, end, payload_bytes, max_timestamp_ms })
}

fn stream(reader: &mut Reader<'_>) -> Result<StreamId, DecodeError> {
    reader.varint().map(StreamId)
}

fn epoch(reader: &mut Reader<'_>) -> Result<StreamEpoch, DecodeError> {
    reader.varint().map(StreamEpoch)
}

fn offset(reader: &mut Reader<'_>) -> Result<StreamOffset, DecodeError> {
    reader.varint().map(StreamOffset)
}

fn narrow(reader: &mut Reader<'_>) -> Result<u32, DecodeError> {
    let value = reader.varint()?;
    match u32::try_from(value) {
        Ok(value) => Ok(value),
        Err(_) => reader.invalid(format!("{value} has more than 32 bits")),
    }
}
