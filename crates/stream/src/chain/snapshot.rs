//! The bytes of a snapshot. `docs/format/chain.md`, section 7.

use std::collections::BTreeMap;
use std::ops::Range;

#[cfg(any(test, fuzzing))]
use alluvium_wal::LogOffset;
use bytes::Bytes;
use uuid::Uuid;

use super::body::{BodyHeader, ObjectKind, SNAPSHOT_KIND, decode_hints, encode_hints};
use super::change::{ChainObject, decode_range_fields, encode_range_fields};
use super::state::{ChainState, ChainStream, Gaps, Head};
use crate::catalog::Incarnation;
use crate::damage::Damage;
use crate::fields::{u32_at, u64_at};
use crate::frame;
use crate::sequence::{DecodeError, Sealed, link as link_of};
use crate::types::{ObjectId, StreamEpoch, StreamId, StreamOffset};
use crate::wire::{Reader, Writer};

/// The number of sections, whose kinds are 1 to this.
pub(super) const SECTIONS: usize = 7;
const RESERVED_AT: usize = BodyHeader::BYTES;
const LARGEST_COUNT_AT: usize = RESERVED_AT + 8;
const SECTIONS_AT: usize = LARGEST_COUNT_AT + 4;
const DIRECTORY_AT: usize = SECTIONS_AT + 4;
const ENTRY_BYTES: usize = 24;
const CRC_AT: usize = DIRECTORY_AT + SECTIONS * ENTRY_BYTES;
const CONTENTS_AT: usize = CRC_AT + 4;
const _: () = assert!(DIRECTORY_AT == 128 && CONTENTS_AT == 300);
/// The greatest length of the content of a section.
const MAX_SECTION_BYTES: u64 = 1 << 32;
/// The greatest length of a body.
const MAX_BODY_BYTES: usize = u32::MAX as usize;

/// A snapshot: the state after an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// A random number in the name of the object.
    pub nonce: Uuid,
    /// The state. Of a migration or a rebuild its link is that of the snapshot itself.
    pub state: ChainState,
}

impl Snapshot {
    /// Returns a snapshot of the state after an object of the chain.
    pub fn of(state: ChainState) -> Self {
        Self { nonce: Uuid::new_v4(), state }
    }

    /// Returns the snapshot with which a migration or a rebuild begins.
    pub fn of_new_base(mut state: ChainState) -> Self {
        let nonce = Uuid::new_v4();
        state.head = Head { link: link_of(nonce), is_snapshot: true, ..state.head };
        Self { nonce, state }
    }

    /// The link of the object with its number; 0 if it was made by a migration or a rebuild.
    pub(super) fn previous(&self) -> u64 {
        match self.state.head.is_snapshot {
            true => 0,
            false => self.state.head.link,
        }
    }

    /// Returns the bytes: the header, then the body.
    ///
    /// # Panics
    /// If the body has 4 GiB or more.
    pub fn encode(&self) -> [Bytes; 2] {
        let ChainState { head, header, reserved, largest_count, .. } = &self.state;
        let sections = sections(&self.state);
        let body = encode_body(header, reserved.0, *largest_count, &sections);
        let object = Sealed {
            kind: SNAPSHOT_KIND,
            flags: 0,
            term: head.term,
            number: head.number,
            nonce: self.nonce,
            previous: self.previous(),
            body,
        };
        [object.header(), object.body]
    }

    /// Decodes and verifies the object with a number and a nonce.
    ///
    /// # Errors
    /// It is damaged, has another number or nonce, or is of a later version.
    pub fn decode(number: u64, nonce: Uuid, bytes: &Bytes) -> Result<Self, DecodeError> {
        let object = Sealed::decode_within(number, bytes, MAX_BODY_BYTES)?;
        let body = &object.body;
        let reader = &mut Reader::new(body);
        if ObjectKind::of(object.kind).is_some() {
            return reader.invalid(format!("it has kind {}, which is no snapshot", object.kind));
        }
        if (object.kind, object.flags) != (SNAPSHOT_KIND, 0) {
            return reader.unknown(format!("kind {} with flags {}", object.kind, object.flags));
        }
        if object.nonce != nonce {
            return reader.invalid("it has another nonce than its name");
        }
        let header = BodyHeader::decode(reader)?;
        if header.covers > header.version {
            return reader.invalid("it covers more than its version");
        }
        let (reserved, largest_count) = (reader.u64()?, reader.u32()?);
        let count = reader.u32()?;
        if count as usize != SECTIONS {
            return reader.unknown(format!("{count} sections"));
        }
        let directory = directory(body)?;
        let content = |section: usize| {
            let bytes = &body[directory[section].0.clone()];
            match crc32c::crc32c(bytes) == directory[section].1 {
                true => frame::decompress(bytes, MAX_SECTION_BYTES),
                false => {
                    let position = directory[section].0.start as u64;
                    let reason = format!("section {} does not match its checksum", section + 1);
                    Err(Damage { position, reason }.into())
                }
            }
        };
        let mut streams = decode_streams(&content(0)?)?;
        decode_ranges(&content(2)?, &mut streams)?;
        let hints = content(6)?;
        let link = match object.previous {
            0 => object.link(),
            previous => previous,
        };
        let state = ChainState {
            head: Head { number, link, term: object.term, is_snapshot: object.previous == 0 },
            header,
            reserved: StreamId(reserved),
            largest_count,
            streams,
            objects: decode_objects(&content(1)?)?,
            meta: decode_meta(&content(3)?)?,
            incarnations: decode_incarnations(&content(4)?)?,
            gaps: decode_gaps(&content(5)?)?,
            hints: decode_hints(&mut Reader::new(&hints), |_, reader| !reader.is_empty())?,
        };
        Ok(Self { nonce, state })
    }
}

/// Returns a body with these contents of sections.
fn encode_body(
    header: &BodyHeader,
    reserved: u64,
    largest_count: u32,
    contents: &[impl AsRef<[u8]>; SECTIONS],
) -> Bytes {
    let sections = contents.each_ref().map(|content| frame::compress(content.as_ref()));
    let mut writer = Writer::default();
    header.encode(&mut writer);
    writer.u64(reserved);
    writer.u32(largest_count);
    writer.u32(SECTIONS as u32);
    let mut position = CONTENTS_AT;
    for (kind, section) in (1..).zip(&sections) {
        writer.u32(kind);
        writer.u32(crc32c::crc32c(section));
        writer.u64(position as u64);
        writer.u64(section.len() as u64);
        position += section.len();
    }
    let mut body = writer.finish();
    body.reserve_exact(4 + position - CONTENTS_AT);
    body.extend_from_slice(&crc32c::crc32c(&body).to_le_bytes());
    sections.iter().for_each(|section| body.extend_from_slice(section));
    body.into()
}

/// Returns the nonce and the bytes of a snapshot after number 1 with these contents of sections.
#[cfg(any(test, fuzzing))]
pub(super) fn with_sections(contents: &[&[u8]; SECTIONS]) -> (Uuid, Bytes) {
    let nonce = Uuid::from_u128(3);
    let header = BodyHeader {
        store: Uuid::nil(),
        wal: Uuid::nil(),
        incarnation: Uuid::nil(),
        version: 1 << 32,
        epoch: 0,
        opening: 1,
        node: 0,
        is_clean: false,
        written_at_ms: 0,
        covers: 0,
        cut: LogOffset(0),
        wal_mark: 0,
        next_stream: StreamId(0),
    };
    let body = encode_body(&header, 0, 0, contents);
    let object =
        Sealed { kind: SNAPSHOT_KIND, flags: 0, term: 0, number: 1, nonce, previous: 1, body };
    (nonce, [object.header(), object.body].concat().into())
}

/// The position of each section, and its checksum.
type Directory = [(Range<usize>, u32); SECTIONS];

/// Decodes the directory, whose sections follow one another up to the end of the body.
fn directory(body: &Bytes) -> Result<Directory, DecodeError> {
    let damaged =
        |at: usize, reason: &str| Err(Damage { position: at as u64, reason: reason.into() }.into());
    if body.len() < CONTENTS_AT {
        return damaged(body.len(), "it ends in its directory");
    }
    if crc32c::crc32c(&body[..CRC_AT]) != u32_at(body, CRC_AT) {
        return damaged(CRC_AT, "its directory does not match its checksum");
    }
    let mut sections = std::array::from_fn(|_| (0..0, 0));
    let mut end = CONTENTS_AT;
    for (index, section) in sections.iter_mut().enumerate() {
        let at = DIRECTORY_AT + index * ENTRY_BYTES;
        let (kind, crc32c) = (u32_at(body, at), u32_at(body, at + 4));
        let (position, length) = (u64_at(body, at + 8), u64_at(body, at + 16));
        if (kind as usize, position) != (index + 1, end as u64) {
            return damaged(at, "its sections are not in order");
        }
        let Some(next) = usize::try_from(length).ok().and_then(|length| end.checked_add(length))
        else {
            return damaged(at, "a section is longer than the snapshot");
        };
        *section = (end..next, crc32c);
        end = next;
    }
    match end == body.len() {
        true => Ok(sections),
        false => damaged(CRC_AT, "its sections do not end where it ends"),
    }
}

/// Returns the contents of the sections.
fn sections(state: &ChainState) -> [Vec<u8>; SECTIONS] {
    let writers: [Writer; SECTIONS] = Default::default();
    let [mut streams, mut objects, mut ranges, mut meta, mut incarnations, mut gaps, mut hints] =
        writers;
    let (mut before, mut before_of_ranges) = (0, 0);
    for (id, stream) in &state.streams {
        streams.varint(id.0 - before);
        streams.u8(stream.kind);
        streams.bytes(&stream.label);
        for field in [stream.epoch.0, stream.start.0, stream.uploaded_end.0] {
            streams.varint(field);
        }
        streams.optional(stream.checkpoint.as_deref());
        before = id.0;
        if !stream.ranges.is_empty() {
            ranges.varint(id.0 - before_of_ranges);
            ranges.varint(stream.ranges.len() as u64);
            stream.ranges.iter().for_each(|range| encode_range_fields(range, &mut ranges));
            before_of_ranges = id.0;
        }
    }
    state.objects.values().for_each(|object| object.encode(&mut objects));
    for (key, value) in &state.meta {
        meta.bytes(key.as_bytes());
        meta.bytes(value);
    }
    for Incarnation { after_version, id } in &state.incarnations {
        incarnations.varint(*after_version);
        incarnations.uuid(*id);
    }
    for ((stream, start), end) in &state.gaps {
        for field in [stream.0, start.0, end.0] {
            gaps.varint(field);
        }
    }
    encode_hints(&state.hints, &mut hints);
    [streams, objects, ranges, meta, incarnations, gaps, hints].map(Writer::finish)
}

fn decode_streams(content: &Bytes) -> Result<BTreeMap<StreamId, ChainStream>, DecodeError> {
    let reader = &mut Reader::new(content);
    let (mut rows, mut before) = (Vec::new(), None);
    while !reader.is_empty() {
        let id = reader.next_key(before)?;
        before = Some(id);
        let stream = ChainStream {
            kind: reader.u8()?,
            label: reader.bytes()?,
            epoch: StreamEpoch(reader.varint()?),
            start: StreamOffset(reader.varint()?),
            uploaded_end: StreamOffset(reader.varint()?),
            checkpoint: reader.flag()?.then(|| reader.bytes()).transpose()?,
            ranges: Vec::new(),
        };
        rows.push((StreamId(id), stream));
    }
    Ok(rows.into_iter().collect())
}

fn decode_objects(content: &Bytes) -> Result<BTreeMap<ObjectId, ChainObject>, DecodeError> {
    let reader = &mut Reader::new(content);
    let mut rows: Vec<(ObjectId, ChainObject)> = Vec::new();
    while !reader.is_empty() {
        let object = ChainObject::decode(reader)?;
        if rows.last().is_some_and(|(before, _)| *before >= object.id) {
            return reader.invalid("objects do not ascend");
        }
        rows.push((object.id, object));
    }
    Ok(rows.into_iter().collect())
}

fn decode_ranges(
    content: &Bytes,
    streams: &mut BTreeMap<StreamId, ChainStream>,
) -> Result<(), DecodeError> {
    let reader = &mut Reader::new(content);
    let mut before = None;
    while !reader.is_empty() {
        let id = reader.next_key(before)?;
        before = Some(id);
        let Some(stream) = streams.get_mut(&StreamId(id)) else {
            return reader.invalid(format!("ranges of stream {id}, which does not exist"));
        };
        let count = reader.count()?;
        if count == 0 {
            return reader.invalid(format!("stream {id} is listed without ranges"));
        }
        // Each has at least 5 bytes, so a wrong number allocates little more than the content.
        stream.ranges.reserve_exact(count.min(reader.left() / 5));
        for _ in 0..count {
            let range = decode_range_fields(reader)?;
            if stream.ranges.last().is_some_and(|last| last.end > range.start) {
                return reader.invalid(format!("ranges of stream {id} overlap"));
            }
            stream.ranges.push(range);
        }
    }
    Ok(())
}

fn decode_meta(content: &Bytes) -> Result<BTreeMap<String, Bytes>, DecodeError> {
    let reader = &mut Reader::new(content);
    let mut rows: Vec<(String, Bytes)> = Vec::new();
    while !reader.is_empty() {
        let key = reader.text()?;
        if rows.last().is_some_and(|(before, _)| *before >= key) {
            return reader.invalid("keys of metadata do not ascend");
        }
        rows.push((key, reader.bytes()?));
    }
    Ok(rows.into_iter().collect())
}

fn decode_incarnations(content: &Bytes) -> Result<Vec<Incarnation>, DecodeError> {
    let reader = &mut Reader::new(content);
    let mut rows = Vec::new();
    while !reader.is_empty() {
        rows.push(Incarnation { after_version: reader.varint()?, id: reader.uuid()? });
    }
    Ok(rows)
}

fn decode_gaps(content: &Bytes) -> Result<Gaps, DecodeError> {
    let reader = &mut Reader::new(content);
    let mut gaps = Gaps::new();
    while !reader.is_empty() {
        let (stream, start) = (StreamId(reader.varint()?), StreamOffset(reader.varint()?));
        let end = StreamOffset(reader.varint()?);
        if gaps.last_key_value().is_some_and(|(before, _)| *before >= (stream, start)) {
            return reader.invalid("gaps do not ascend");
        }
        if end <= start {
            return reader.invalid("an empty gap");
        }
        gaps.insert((stream, start), end);
    }
    Ok(gaps)
}

#[cfg(test)]
mod tests;
