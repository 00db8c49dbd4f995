//! The body of a fence or delta. `docs/format/chain.md`, section 3.

use std::collections::BTreeMap;

use alluvium_wal::LogOffset;
use bytes::Bytes;
use uuid::Uuid;

use super::change::{ChainChange, Place};
use crate::sequence::DecodeError;
use crate::types::{StreamId, StreamOffset};
use crate::wire::{Reader, Writer};

const CLEAN: u32 = 1;
/// The kind in the header of a snapshot.
pub(super) const SNAPSHOT_KIND: u16 = 3;

/// The kind of an object of the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectKind {
    /// An opening begins.
    Fence,
    /// Changes of the catalog.
    Delta,
}

impl ObjectKind {
    /// Returns the kind in the header of the object.
    pub fn number(self) -> u16 {
        match self {
            Self::Fence => 1,
            Self::Delta => 2,
        }
    }

    /// Returns the kind with this number, if it is that of a fence or delta.
    pub fn of(number: u16) -> Option<Self> {
        [Self::Fence, Self::Delta].into_iter().find(|kind| kind.number() == number)
    }

    fn place_of_own(self) -> Place {
        match self {
            Self::Fence => Place::Fence,
            Self::Delta => Place::Delta,
        }
    }
}

/// A list of changes that was recorded in the WAL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Its version.
    pub version: u64,
    /// At least one.
    pub changes: Vec<ChainChange>,
}

/// The fields at fixed positions in the body of a fence, a delta or a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyHeader {
    /// The store.
    pub store: Uuid,
    /// The WAL that the store is bound to.
    pub wal: Uuid,
    /// The run of the store that writes the object.
    pub incarnation: Uuid,
    /// The version of the object: greater than all before it.
    pub version: u64,
    /// The epoch of the WAL; in a fence the one that is about to begin, in a snapshot that of the
    /// newest delta of this WAL, or 0.
    pub epoch: u32,
    /// Greater than in every fence before.
    pub opening: u32,
    /// The writer, for people.
    pub node: u32,
    /// Nothing in the WAL is needed. Never in a fence.
    pub is_clean: bool,
    /// Unix time, for people.
    pub written_at_ms: u64,
    /// Each recorded list up to this version is in the chain.
    pub covers: u64,
    /// What the WAL holds below it is in the chain, or not needed.
    pub cut: LogOffset,
    /// The greatest mark that both headers of the WAL are known to have had.
    pub wal_mark: u64,
    /// Ids below it were given to streams.
    pub next_stream: StreamId,
}

impl BodyHeader {
    pub(super) const BYTES: usize = 112;

    /// Returns the values before the first object of the chain of a store.
    pub(super) fn none(store: Uuid) -> Self {
        Self {
            store,
            wal: Uuid::nil(),
            incarnation: Uuid::nil(),
            version: 0,
            epoch: 0,
            opening: 0,
            node: 0,
            is_clean: false,
            written_at_ms: 0,
            covers: 0,
            cut: LogOffset(0),
            wal_mark: 0,
            next_stream: StreamId(0),
        }
    }

    pub(super) fn encode(&self, writer: &mut Writer) {
        for id in [self.store, self.wal, self.incarnation] {
            writer.uuid(id);
        }
        writer.u64(self.version);
        for field in [self.epoch, self.opening, self.node] {
            writer.u32(field);
        }
        writer.u32(if self.is_clean { CLEAN } else { 0 });
        let next_stream = self.next_stream.0;
        for field in [self.written_at_ms, self.covers, self.cut.0, self.wal_mark, next_stream] {
            writer.u64(field);
        }
    }

    pub(super) fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let [store, wal, incarnation] = [reader.uuid()?, reader.uuid()?, reader.uuid()?];
        let version = reader.u64()?;
        let [epoch, opening, node] = [reader.u32()?, reader.u32()?, reader.u32()?];
        let flags = reader.u32()?;
        if flags & !CLEAN != 0 {
            return reader.unknown(format!("body flags {flags:#x}"));
        }
        if version >> 32 != u64::from(opening) {
            return reader.invalid("the upper half of the version is not the opening");
        }
        Ok(Self {
            store,
            wal,
            incarnation,
            version,
            epoch,
            opening,
            node,
            is_clean: flags & CLEAN != 0,
            written_at_ms: reader.u64()?,
            covers: reader.u64()?,
            cut: LogOffset(reader.u64()?),
            wal_mark: reader.u64()?,
            next_stream: StreamId(reader.u64()?),
        })
    }
}

/// The body of a fence or delta.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Body {
    /// The fields at fixed positions.
    pub header: BodyHeader,
    /// In ascending order of versions. None in a fence.
    pub recorded: Vec<Recorded>,
    /// The changes of the chain alone, which follow the recorded ones.
    pub own: Vec<ChainChange>,
    /// The durable ends of streams with batches after their uploaded ends.
    pub hints: Hints,
}

/// The durable ends of streams.
pub type Hints = BTreeMap<StreamId, StreamOffset>;

impl Body {
    /// Returns the bytes.
    ///
    /// # Panics
    /// If a change may not be where it is, or the fields contradict the kind.
    pub fn encode(&self, kind: ObjectKind) -> Vec<u8> {
        if let Some(reason) = self.contradiction(kind) {
            panic!("{reason}");
        }
        let mut writer = Writer::default();
        self.header.encode(&mut writer);
        writer.varint(self.recorded.len() as u64);
        for Recorded { version, changes } in &self.recorded {
            writer.varint(*version);
            encode_changes(Place::Recorded, changes, &mut writer);
        }
        encode_changes(kind.place_of_own(), &self.own, &mut writer);
        writer.varint(self.hints.len() as u64);
        encode_hints(&self.hints, &mut writer);
        writer.finish()
    }

    /// Decodes and checks the bytes.
    ///
    /// # Errors
    /// They are not what [`Self::encode`] returns, or were written by a later version.
    pub fn decode(kind: ObjectKind, bytes: &Bytes) -> Result<Self, DecodeError> {
        let reader = &mut Reader::new(bytes);
        let header = BodyHeader::decode(reader)?;
        let mut recorded = Vec::new();
        for _ in 0..reader.count()? {
            let version = reader.varint()?;
            recorded.push(Recorded { version, changes: decode_changes(Place::Recorded, reader)? });
        }
        let own = decode_changes(kind.place_of_own(), reader)?;
        let count = reader.count()?;
        let hints = decode_hints(reader, |hints, _| hints.len() < count)?;
        let body = Self { header, recorded, own, hints };
        match body.contradiction(kind) {
            Some(reason) => reader.invalid(reason),
            None => reader.end().map(|()| body),
        }
    }

    /// A field that contradicts the kind, or another field.
    fn contradiction(&self, kind: ObjectKind) -> Option<&'static str> {
        let BodyHeader { version, covers, is_clean, opening, .. } = self.header;
        let ascends = |two: &[Recorded]| two[0].version < two[1].version;
        let is_empty = |list: &Recorded| list.changes.is_empty();
        let last = self.recorded.last().map_or(0, |last| last.version);
        match kind {
            ObjectKind::Fence if is_clean => Some("a fence is not a clean end"),
            ObjectKind::Fence if !self.recorded.is_empty() => Some("a fence has recorded lists"),
            ObjectKind::Fence if covers >= version => Some("a fence covers itself"),
            ObjectKind::Delta if covers != version => Some("a delta does not cover itself"),
            _ if last >= version => Some("a recorded list has a version that is not below"),
            _ if !self.recorded.windows(2).all(ascends) => Some("recorded lists do not ascend"),
            _ if self.recorded.iter().any(is_empty) => Some("a recorded list is empty"),
            _ if version >> 32 != u64::from(opening) => {
                Some("the upper half of the version is not the opening")
            }
            _ => None,
        }
    }
}

pub(super) fn encode_hints(hints: &Hints, writer: &mut Writer) {
    let mut before = 0;
    for (stream, end) in hints {
        writer.varint(stream.0 - before);
        writer.varint(end.0);
        before = stream.0;
    }
}

/// Takes hints while `has_more`.
pub(super) fn decode_hints(
    reader: &mut Reader<'_>,
    has_more: impl Fn(&Hints, &Reader<'_>) -> bool,
) -> Result<Hints, DecodeError> {
    let mut hints = Hints::new();
    let mut before = None;
    while has_more(&hints, reader) {
        let stream = reader.next_key(before)?;
        before = Some(stream);
        hints.insert(StreamId(stream), StreamOffset(reader.varint()?));
    }
    Ok(hints)
}

fn encode_changes(place: Place, changes: &[ChainChange], writer: &mut Writer) {
    writer.varint(changes.len() as u64);
    changes.iter().for_each(|change| change.encode(place, writer));
}

fn decode_changes(place: Place, reader: &mut Reader<'_>) -> Result<Vec<ChainChange>, DecodeError> {
    (0..reader.count()?).map(|_| ChainChange::decode(place, reader)).collect()
}

#[cfg(test)]
pub(super) mod tests;
