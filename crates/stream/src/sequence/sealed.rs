//! The bytes of a numbered object. `docs/format/sequence.md`, section 3.

use std::ops::Range;

use bytes::{BufMut, Bytes, BytesMut};
use uuid::Uuid;

use crate::damage::Damage;
pub use crate::damage::DecodeError;
use crate::fields::{u32_at, u64_at};

const MAGIC: [u8; 8] = *b"ALLUVSEQ";
/// The format version that is written and read.
const VERSION: u32 = 1;

/// The numbers of objects.
pub(crate) const NUMBERS: Range<u64> = 1..1 << 63;

/// Length of the header.
pub const HEADER_BYTES: usize = 64;
/// The greatest length of a body.
pub const MAX_BODY_BYTES: usize = 4 << 20;

const VERSION_AT: usize = 8;
const CRC_AT: usize = 12;
const KIND_AT: usize = 16;
const FLAGS_AT: usize = 18;
const BODY_BYTES_AT: usize = 20;
const BODY_CRC_AT: usize = 24;
const TERM_AT: usize = 28;
const NUMBER_AT: usize = 32;
const NONCE_AT: usize = 40;
const PREVIOUS_AT: usize = 56;
const _: () = assert!(PREVIOUS_AT + 8 == HEADER_BYTES);

/// An object of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sealed {
    /// What the body is.
    pub kind: u16,
    /// Flags of the body.
    pub flags: u16,
    /// The term of the writer.
    pub term: u32,
    /// The number in the sequence; at least 1, below 2^63.
    pub number: u64,
    /// A random number that identifies the object.
    pub nonce: Uuid,
    /// The [link](Self::link) of the object that this one extends; 0 if there is none.
    pub previous: u64,
    /// At most [`MAX_BODY_BYTES`] in a sequence.
    pub body: Bytes,
}

impl Sealed {
    /// Returns what the next object states as `previous`.
    pub fn link(&self) -> u64 {
        link(self.nonce)
    }

    /// Returns the bytes of the object.
    ///
    /// # Panics
    /// If the body is longer than [`MAX_BODY_BYTES`], or the number is not valid.
    pub fn encode(&self) -> Bytes {
        assert!(NUMBERS.contains(&self.number), "number {}", self.number);
        assert!(self.body.len() <= MAX_BODY_BYTES, "a body of {} bytes", self.body.len());
        let mut bytes = BytesMut::with_capacity(HEADER_BYTES + self.body.len());
        bytes.put_slice(&self.header());
        bytes.put_slice(&self.body);
        bytes.freeze()
    }

    /// Returns the bytes in front of the body.
    ///
    /// # Panics
    /// If the body has 4 GiB or more.
    pub(crate) fn header(&self) -> Bytes {
        let body_bytes = u32::try_from(self.body.len()).expect("a body of less than 4 GiB");
        let mut header = BytesMut::with_capacity(HEADER_BYTES);
        header.put_slice(&MAGIC);
        header.put_u32_le(VERSION);
        header.put_u32_le(0);
        header.put_u16_le(self.kind);
        header.put_u16_le(self.flags);
        header.put_u32_le(body_bytes);
        header.put_u32_le(crc32c::crc32c(&self.body));
        header.put_u32_le(self.term);
        header.put_u64_le(self.number);
        header.put_slice(self.nonce.as_bytes());
        header.put_u64_le(self.previous);
        let crc = header_crc(&header);
        header[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        header.freeze()
    }

    /// Decodes and verifies the object with a number.
    ///
    /// # Errors
    /// It is damaged, has another number, or is of a later version.
    pub fn decode(number: u64, bytes: &Bytes) -> Result<Self, DecodeError> {
        Self::decode_within(number, bytes, MAX_BODY_BYTES)
    }

    /// Decodes an object as [`Self::decode`], with another limit of the length of its body.
    pub(crate) fn decode_within(
        number: u64,
        bytes: &Bytes,
        max_body_bytes: usize,
    ) -> Result<Self, DecodeError> {
        let header = checked_header(number, bytes)?;
        let body = bytes.slice(HEADER_BYTES..);
        let body_bytes = u32_at(header, BODY_BYTES_AT) as usize;
        if body_bytes > max_body_bytes {
            return damage(BODY_BYTES_AT, format!("it states a body of {body_bytes} bytes"));
        }
        if body.len() != body_bytes {
            let reason = format!("its body has {} bytes, not {body_bytes}", body.len());
            return damage(BODY_BYTES_AT, reason);
        }
        if crc32c::crc32c(&body) != u32_at(header, BODY_CRC_AT) {
            return damage(HEADER_BYTES, "its body does not match its checksum");
        }
        let u16_at = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        Ok(Self {
            kind: u16_at(KIND_AT),
            flags: u16_at(FLAGS_AT),
            term: u32_at(header, TERM_AT),
            number,
            nonce: Uuid::from_slice(&header[NONCE_AT..PREVIOUS_AT]).expect("16 bytes"),
            previous: u64_at(header, PREVIOUS_AT),
            body,
        })
    }
}

/// Returns the header of the object with a number, without its body. Verifies it.
fn checked_header(number: u64, bytes: &[u8]) -> Result<&[u8], DecodeError> {
    let Some(header) = bytes.get(..HEADER_BYTES) else {
        return damage(0, format!("it has {} bytes and no whole header", bytes.len()));
    };
    if header[..VERSION_AT] != MAGIC {
        return damage(0, "it is no object of a sequence");
    }
    if header_crc(header) != u32_at(header, CRC_AT) {
        return damage(0, "its header does not match its checksum");
    }
    let version = u32_at(header, VERSION_AT);
    if version != VERSION {
        let known = "this version of the program knows";
        let reason = format!("it is of format version {version}, and {known} {VERSION}");
        return Err(DecodeError::LaterVersion(reason));
    }
    let stated = u64_at(header, NUMBER_AT);
    if stated != number {
        return damage(NUMBER_AT, format!("it has number {stated}, not {number}"));
    }
    Ok(header)
}

/// Returns what the header of the object with a number states.
///
/// # Errors
/// As [`Sealed::decode`], as far as the header shows it.
pub(crate) fn identify(number: u64, bytes: &[u8]) -> Result<Identity, DecodeError> {
    let header = checked_header(number, bytes)?;
    let kind = u16::from_le_bytes([header[KIND_AT], header[KIND_AT + 1]]);
    let nonce = Uuid::from_slice(&header[NONCE_AT..PREVIOUS_AT]).expect("16 bytes");
    Ok(Identity { kind, link: link(nonce), previous: u64_at(header, PREVIOUS_AT) })
}

/// What distinguishes an object from others of its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// See [`Sealed::kind`].
    pub(crate) kind: u16,
    /// See [`Sealed::link`].
    pub(crate) link: u64,
    /// See [`Sealed::previous`].
    pub(crate) previous: u64,
}

/// Returns what an object that extends the one with this nonce states as `previous`.
pub(crate) fn link(nonce: Uuid) -> u64 {
    u64_at(nonce.as_bytes(), 0)
}

fn damage<T>(at: usize, reason: impl Into<String>) -> Result<T, DecodeError> {
    Err(Damage { position: at as u64, reason: reason.into() }.into())
}

/// The checksum of a header, which lies in the middle of what it covers.
fn header_crc(header: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&header[..CRC_AT]), &header[KIND_AT..HEADER_BYTES])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn example() -> Sealed {
        Sealed {
            kind: 2,
            flags: 1,
            term: 3,
            number: 0x0102_0304_0506_0708,
            nonce: Uuid::from_bytes(std::array::from_fn(|at| 0x11 + at as u8)),
            previous: 0x2122_2324_2526_2728,
            body: Bytes::from_static(b"alluvium"),
        }
    }

    #[test]
    fn the_example_of_the_document_has_its_checksums() {
        let bytes = example().encode();
        assert_eq!(
            (u32_at(&bytes, BODY_CRC_AT), u32_at(&bytes, CRC_AT)),
            (0x8ab5_1db3, 0x0ec6_3300)
        );
        assert_eq!(example().link(), 0x1817_1615_1413_1211);
    }

    #[test]
    fn each_changed_byte_and_each_other_length_is_damage() {
        let sealed = example();
        let bytes = sealed.encode();
        assert_eq!(Sealed::decode(sealed.number, &bytes).unwrap(), sealed);
        assert!(Sealed::decode(sealed.number + 1, &bytes).is_err());
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut changed = bytes.to_vec();
                changed[at] ^= 1 << bit;
                assert!(Sealed::decode(sealed.number, &changed.into()).is_err(), "byte {at}");
            }
        }
        for len in 0..bytes.len() {
            assert!(Sealed::decode(sealed.number, &bytes.slice(..len)).is_err(), "{len} bytes");
        }
        let longer = [&bytes[..], b"x"].concat().into();
        assert!(Sealed::decode(sealed.number, &longer).is_err());
    }

    #[test]
    fn an_object_of_a_later_version_is_no_damage() {
        let mut bytes = example().encode().to_vec();
        bytes[VERSION_AT] = 2;
        let crc = header_crc(&bytes[..HEADER_BYTES]).to_le_bytes();
        bytes[CRC_AT..CRC_AT + 4].copy_from_slice(&crc);
        // Also if it has other lengths.
        bytes.push(0);
        let error = Sealed::decode(example().number, &bytes.into()).unwrap_err();
        assert!(matches!(error, DecodeError::LaterVersion(_)), "{error}");
    }

    proptest! {
        #[test]
        fn what_was_encoded_is_decoded(
            (kind, flags, term) in any::<(u16, u16, u32)>(),
            number in NUMBERS,
            (nonce, previous) in any::<(u128, u64)>(),
            body in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            let nonce = Uuid::from_u128(nonce);
            let sealed = Sealed { kind, flags, term, number, nonce, previous, body: body.into() };
            prop_assert_eq!(Sealed::decode(number, &sealed.encode()).unwrap(), sealed);
        }
    }
}
