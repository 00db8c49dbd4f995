//! Rows of the file as bytes: `docs/format/coordination.md`.

use std::time::Duration;

use bytes::Bytes;

use uuid::Uuid;

use crate::history::{Changed, Recorded};
use crate::{Entry, Identity, Lease, LeaseId, Revision};

/// The format that this version writes. Format 1 has no identity.
pub(super) const FORMAT: u32 = 2;

/// The tables, as they enter the checksums of their rows.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Meta = 1,
    Entry = 2,
    Lease = 3,
    Revision = 4,
}

/// The row of the table `meta`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Meta {
    pub(super) identity: Identity,
    pub(super) revision: u64,
    pub(super) oldest: u64,
    pub(super) next_lease: u64,
    /// The sum of the checksums of all rows of the other tables, modulo 2^64.
    pub(super) sum: u64,
}

const PREVIOUS: u8 = 1;
const PRESENT: u8 = 2;

/// Returns the row: its checksum, then the body.
pub(super) fn seal(kind: Kind, key: &[u8], body: &[u8]) -> Vec<u8> {
    let mut row = checksum(kind, key, body).to_le_bytes().to_vec();
    row.extend_from_slice(body);
    row
}

/// Returns the checksum that a row begins with; 0 for a row that is too short for one.
pub(super) fn stored_checksum(row: &[u8]) -> u64 {
    row.first_chunk().map_or(0, |bytes| u64::from(u32::from_le_bytes(*bytes)))
}

/// Returns the body of a row whose checksum is right.
pub(super) fn unseal<'a>(kind: Kind, key: &[u8], row: &'a [u8]) -> Result<&'a [u8], String> {
    let (stored, body) = row.split_first_chunk().ok_or("the row has no checksum")?;
    if u32::from_le_bytes(*stored) != checksum(kind, key, body) {
        return Err("the checksum of the row is wrong".to_owned());
    }
    Ok(body)
}

fn checksum(kind: Kind, key: &[u8], body: &[u8]) -> u32 {
    let length = u32::try_from(key.len()).expect("a key is bounded");
    let crc = crc32c::crc32c_append(crc32c::crc32c(&[kind as u8]), &length.to_le_bytes());
    crc32c::crc32c_append(crc32c::crc32c_append(crc, key), body)
}

pub(super) fn encode_meta(meta: &Meta) -> Vec<u8> {
    let mut body = FORMAT.to_le_bytes().to_vec();
    for field in [meta.revision, meta.oldest, meta.next_lease, meta.sum] {
        body.extend_from_slice(&field.to_le_bytes());
    }
    body.extend_from_slice(meta.identity.store.as_bytes());
    body.extend_from_slice(&meta.identity.restores.to_le_bytes());
    body
}

/// Decodes the row. In format 1 the identity is `new`, which the next write stores.
pub(super) fn decode_meta(body: &[u8], new: Identity) -> Result<Meta, String> {
    let mut fields = Fields(body);
    let format = fields.u32()?;
    if !(1..=FORMAT).contains(&format) {
        return Err(format!("it has format {format}, and this version reads 1 to {FORMAT}"));
    }
    let mut meta = Meta {
        revision: fields.u64()?,
        oldest: fields.u64()?,
        next_lease: fields.u64()?,
        sum: fields.u64()?,
        identity: new,
    };
    if format > 1 {
        let store = Uuid::from_bytes(fields.array()?);
        meta.identity = Identity { store, restores: fields.u32()? };
    }
    fields.end()?;
    Ok(meta)
}

pub(super) fn encode_lease(lease: &Lease) -> Vec<u8> {
    let ms = u64::try_from(lease.ttl.as_millis()).expect("a time to live is bounded");
    ms.to_le_bytes().to_vec()
}

pub(super) fn decode_lease(id: u64, body: &[u8]) -> Result<Lease, String> {
    let mut fields = Fields(body);
    let ttl = Duration::from_millis(fields.u64()?);
    fields.end()?;
    Ok(Lease { id: LeaseId(id), ttl })
}

pub(super) fn encode_entry(entry: &Entry) -> Vec<u8> {
    let mut body = Vec::with_capacity(28 + entry.value.len());
    put_entry(&mut body, entry);
    body
}

pub(super) fn decode_entry(key: &str, body: &[u8]) -> Result<Entry, String> {
    let mut fields = Fields(body);
    let entry = fields.entry(key)?;
    fields.end()?;
    Ok(entry)
}

pub(super) fn encode_revision(changed: &[Changed]) -> Vec<u8> {
    let mut body = Vec::new();
    put_length(&mut body, changed.len());
    for one in changed {
        put_length(&mut body, one.key.len());
        body.extend_from_slice(one.key.as_bytes());
        let previous = if one.previous.is_some() { PREVIOUS } else { 0 };
        let present = if one.entry.is_some() { PRESENT } else { 0 };
        body.push(previous | present);
        for entry in [&one.previous, &one.entry].into_iter().flatten() {
            put_entry(&mut body, entry);
        }
    }
    body
}

pub(super) fn decode_revision(revision: u64, body: &[u8]) -> Result<Recorded, String> {
    let mut fields = Fields(body);
    let count = fields.u32()?;
    let mut changed = Vec::new();
    for _ in 0..count {
        let length = fields.u32()?;
        let key = std::str::from_utf8(fields.take(length)?).map_err(|error| error.to_string())?;
        let [flags] = fields.array()?;
        if flags & !(PREVIOUS | PRESENT) != 0 {
            return Err(format!("a change has unknown flags {flags}"));
        }
        let previous = (flags & PREVIOUS != 0).then(|| fields.entry(key)).transpose()?;
        let entry = (flags & PRESENT != 0).then(|| fields.entry(key)).transpose()?;
        changed.push(Changed { key: key.to_owned(), previous, entry });
    }
    fields.end()?;
    if changed.is_empty() {
        return Err("the revision has no change".to_owned());
    }
    Ok(Recorded { revision: Revision(revision), changed: changed.into() })
}

fn put_length(body: &mut Vec<u8>, length: usize) {
    let length = u32::try_from(length).expect("keys, values and revisions are bounded");
    body.extend_from_slice(&length.to_le_bytes());
}

fn put_entry(body: &mut Vec<u8>, entry: &Entry) {
    let lease = entry.lease.map_or(0, |lease| lease.0);
    for field in [entry.created.0, entry.modified.0, lease] {
        body.extend_from_slice(&field.to_le_bytes());
    }
    put_length(body, entry.value.len());
    body.extend_from_slice(&entry.value);
}

/// Bytes of a body that are not read yet.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, length: u32) -> Result<&'a [u8], String> {
        let length = usize::try_from(length).map_err(|error| error.to_string())?;
        let (taken, rest) = self.0.split_at_checked(length).ok_or("the row is too short")?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let (taken, rest) = self.0.split_first_chunk().ok_or("the row is too short")?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }

    fn entry(&mut self, key: &str) -> Result<Entry, String> {
        let (created, modified) = (Revision(self.u64()?), Revision(self.u64()?));
        let lease = Some(self.u64()?).filter(|lease| *lease != 0).map(LeaseId);
        let length = self.u32()?;
        let value = Bytes::copy_from_slice(self.take(length)?);
        Ok(Entry { key: key.to_owned(), value, created, modified, lease })
    }

    fn end(&self) -> Result<(), String> {
        if self.0.is_empty() { Ok(()) } else { Err("the row is too long".to_owned()) }
    }
}
