//! Fences and deltas as objects of a sequence. `docs/format/chain.md`, section 3.

use bytes::Bytes;
use uuid::Uuid;

use super::body::{Body, ObjectKind, SNAPSHOT_KIND};
use crate::damage::Damage;
use crate::frame;
use crate::sequence::{DecodeError, Sealed, link as link_of};
use crate::wire::{Reader, Writer};

const COMPRESSED: u16 = 1;
const ELSEWHERE: u16 = 2;
/// The greatest length of a body before compression.
const MAX_CONTENT_BYTES: u64 = 1 << 30;
/// Shorter bodies are not compressed.
const WORTH_COMPRESSING_BYTES: usize = 512;

/// A fence or a delta.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its number in the chain.
    pub number: u64,
    /// A random number that identifies it.
    pub nonce: Uuid,
    /// The link of the object that this one extends.
    pub previous: u64,
    /// The term that holds after it.
    pub term: u32,
    /// Whether it is a fence or a delta.
    pub kind: ObjectKind,
    /// Its contents.
    pub body: Body,
}

/// An entry as it is stored.
#[derive(Clone, Debug)]
pub(super) struct SealedEntry {
    pub(super) object: Sealed,
    /// The body, if it is an object of its own, which must be complete before `object` is created.
    pub(super) body_elsewhere: Option<Bytes>,
}

/// The body of an object of the chain that is an object of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Elsewhere {
    pub(super) length_bytes: u64,
    crc32c: u32,
}

impl Entry {
    /// Returns the bytes. A body of more than `max_body_bytes` as it is stored is an object of its
    /// own.
    ///
    /// # Panics
    /// If the body is not that of this kind ([`Body::encode`]), or cannot be decoded: a chain with
    /// such an object would be lost.
    pub(super) fn seal(&self, max_body_bytes: usize) -> SealedEntry {
        let plain = self.body.encode(self.kind);
        assert!(plain.len() as u64 <= MAX_CONTENT_BYTES, "a body of {} bytes", plain.len());
        let mut flags = 0;
        let mut body = Bytes::from(plain);
        if body.len() >= WORTH_COMPRESSING_BYTES {
            let compressed = frame::compress(&body);
            if compressed.len() < body.len() {
                flags |= COMPRESSED;
                body = compressed.into();
            }
        }
        let mut body_elsewhere = None;
        if body.len() > max_body_bytes {
            flags |= ELSEWHERE;
            let mut writer = Writer::default();
            writer.u64(body.len() as u64);
            writer.u32(crc32c::crc32c(&body));
            body_elsewhere = Some(std::mem::replace(&mut body, writer.finish().into()));
        }
        let object = Sealed {
            kind: self.kind.number(),
            flags,
            term: self.term,
            number: self.number,
            nonce: self.nonce,
            previous: self.previous,
            body,
        };
        let body = body_elsewhere.as_ref().unwrap_or(&object.body);
        let decoded = Self::decode(&object, body);
        assert!(decoded.is_ok_and(|decoded| decoded == *self), "an entry that cannot be decoded");
        SealedEntry { object, body_elsewhere }
    }

    /// Returns where the body of an object is, if it is not in the object.
    pub(super) fn body_elsewhere(object: &Sealed) -> Result<Option<Elsewhere>, DecodeError> {
        let reader = Reader::new(&object.body);
        if object.kind == SNAPSHOT_KIND {
            return reader.invalid("it is a snapshot");
        }
        if ObjectKind::of(object.kind).is_none() {
            return reader.unknown(format!("kind {}", object.kind));
        }
        if object.flags & !(COMPRESSED | ELSEWHERE) != 0 {
            return reader.unknown(format!("flags {:#x}", object.flags));
        }
        if object.flags & ELSEWHERE == 0 {
            return Ok(None);
        }
        let mut reader = reader;
        let elsewhere = Elsewhere { length_bytes: reader.u64()?, crc32c: reader.u32()? };
        reader.end()?;
        match elsewhere.length_bytes {
            ..=MAX_CONTENT_BYTES => Ok(Some(elsewhere)),
            stated => reader.invalid(format!("it states a body of {stated} bytes")),
        }
    }

    /// Decodes an object whose body is `body`, in the object or elsewhere.
    pub(super) fn decode(object: &Sealed, body: &Bytes) -> Result<Self, DecodeError> {
        let damaged = |reason: String| Err(Damage::of_all(reason).into());
        if let Some(elsewhere) = Self::body_elsewhere(object)? {
            if body.len() as u64 != elsewhere.length_bytes {
                let stated = elsewhere.length_bytes;
                return damaged(format!("its body has {} bytes, not {stated}", body.len()));
            }
            if crc32c::crc32c(body) != elsewhere.crc32c {
                return damaged("its body does not match its checksum".into());
            }
        }
        let kind = ObjectKind::of(object.kind).expect("checked with the flags");
        let body = match object.flags & COMPRESSED {
            0 => Body::decode(kind, body)?,
            _ => Body::decode(kind, &frame::decompress(body, MAX_CONTENT_BYTES)?)?,
        };
        let Sealed { number, nonce, previous, term, .. } = *object;
        Ok(Self { number, nonce, previous, term, kind, body })
    }

    /// Returns what the next object states as `previous`.
    pub fn link(&self) -> u64 {
        link_of(self.nonce)
    }
}

#[cfg(test)]
mod tests {
    use alluvium_device::sim::Random;

    use super::super::body::tests::{KINDS, body};
    use super::*;
    use crate::chain::ChainChange;
    use crate::sequence::MAX_BODY_BYTES;

    fn entry(kind: ObjectKind, body: Body) -> Entry {
        let nonce = Uuid::from_u128(7);
        Entry { number: 3, nonce, previous: 5, term: 2, kind, body }
    }

    /// The body as it is read.
    fn stored(sealed: &SealedEntry) -> Bytes {
        sealed.body_elsewhere.clone().unwrap_or_else(|| sealed.object.body.clone())
    }

    #[test]
    fn entries_are_decoded_as_they_were_sealed() {
        let mut random = Random::new(1);
        let mut compressed = 0;
        for kind in KINDS.repeat(200) {
            let entry = entry(kind, body(kind, &mut random));
            let sealed = entry.seal(MAX_BODY_BYTES);
            compressed += u32::from(sealed.object.flags == COMPRESSED);
            assert_eq!(Entry::body_elsewhere(&sealed.object).unwrap(), None);
            assert_eq!(Entry::decode(&sealed.object, &stored(&sealed)).unwrap(), entry);
            assert_eq!(sealed.object.link(), entry.link());
        }
        assert!(compressed > 0);
    }

    #[test]
    fn a_large_body_is_an_object_of_its_own() {
        let mut random = Random::new(1);
        let value: Vec<u8> = (0..5 << 20).map(|_| random.next_u64() as u8).collect();
        let changes = vec![ChainChange::PutMeta { key: "a".into(), value: value.into() }];
        let mut large = body(ObjectKind::Delta, &mut random);
        let version = large.header.version - 1;
        large.recorded = vec![crate::chain::Recorded { version, changes }];
        let entry = entry(ObjectKind::Delta, large);
        let sealed = entry.seal(MAX_BODY_BYTES);
        let body = stored(&sealed);
        assert!(body.len() > MAX_BODY_BYTES && sealed.object.body.len() == 12);
        let elsewhere = Entry::body_elsewhere(&sealed.object).unwrap().unwrap();
        assert_eq!(elsewhere.length_bytes, body.len() as u64);
        assert_eq!(Entry::decode(&sealed.object, &body).unwrap(), entry);
        // Another body.
        assert!(Entry::decode(&sealed.object, &body.slice(1..)).is_err());
        let mut changed = body.to_vec();
        changed[1 << 20] ^= 1;
        assert!(Entry::decode(&sealed.object, &changed.into()).is_err());
    }

    #[test]
    fn unknown_kinds_and_flags_are_of_a_later_version() {
        let mut random = Random::new(1);
        let sealed = entry(ObjectKind::Fence, body(ObjectKind::Fence, &mut random))
            .seal(MAX_BODY_BYTES)
            .object;
        for later in [Sealed { kind: 9, ..sealed.clone() }, Sealed { flags: 4, ..sealed.clone() }] {
            let error = Entry::decode(&later, &later.body).unwrap_err();
            assert!(matches!(error, DecodeError::LaterVersion(_)), "{error}");
        }
        let without_length = Sealed { flags: ELSEWHERE, body: Bytes::new(), ..sealed };
        let error = Entry::body_elsewhere(&without_length).unwrap_err();
        assert!(matches!(error, DecodeError::Damaged(_)), "{error}");
    }
}
