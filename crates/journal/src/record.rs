//! One record: `docs/format/journal.md`, section 3.

use std::ops::Range;

use alluvium_device::GRANULE_BYTES;
use crc32c::{crc32c, crc32c_append};

use crate::clock::Clock;
use crate::fields::{u32_at, u64_at};
use crate::hash::KeyHash;
use crate::position::{Granule, JournalNumber, Position};

const CHECKSUM: usize = 0;
const KIND: usize = CHECKSUM + size_of::<u32>();
const FLAGS: usize = KIND + size_of::<u8>();
const KEY_LEN: usize = FLAGS + size_of::<u8>();
const VALUE_LEN: usize = KEY_LEN + size_of::<u16>();
const RESERVED: usize = VALUE_LEN + size_of::<u32>();
/// Bytes before the expiry, or the key.
pub(crate) const HEADER_BYTES: usize = RESERVED + size_of::<u32>();
const EXPIRY_BYTES: usize = size_of::<u64>();
const _: () = assert!(HEADER_BYTES == 16);

const KIND_VALUE: u8 = 1;
const KIND_TOMBSTONE: u8 = 2;
const FLAG_EXPIRES: u8 = 1;

/// The maximum length of a key, in bytes.
pub const MAX_KEY_BYTES: usize = u16::MAX as usize;

/// A random number that is part of all checksums of a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Salt(pub(crate) u64);

impl Salt {
    /// Computes the checksum of data at `position`, a granule or the number of a block, whose bytes
    /// after the checksum are `rest`.
    pub(crate) fn checksum(self, position: u32, rest: &[u8]) -> u32 {
        crc32c_append(self.seed(position), rest)
    }

    /// Computes the checksum of no bytes, to be continued.
    fn seed(self, position: u32) -> u32 {
        let mut seed = [0; 12];
        seed[..8].copy_from_slice(&self.0.to_le_bytes());
        seed[8..].copy_from_slice(&position.to_le_bytes());
        crc32c(&seed)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Value,
    Tombstone,
}

/// The header of a record: sufficient to locate its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    expires: bool,
    key_len: u16,
    value_len: u32,
}

impl Header {
    /// Parses a header from at least [`HEADER_BYTES`]; `None` if the bytes are not one.
    #[inline]
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HEADER_BYTES] = bytes.first_chunk()?;
        let kind = match bytes[KIND] {
            KIND_VALUE => Kind::Value,
            KIND_TOMBSTONE => Kind::Tombstone,
            _ => return None,
        };
        let flags = bytes[FLAGS];
        let key_len = u16::from_le_bytes([bytes[KEY_LEN], bytes[KEY_LEN + 1]]);
        let value_len = u32_at(bytes, VALUE_LEN);
        let is_plausible = flags & !FLAG_EXPIRES == 0
            && key_len > 0
            && (kind == Kind::Value || (value_len == 8 && flags == 0))
            && u32_at(bytes, RESERVED) == 0;
        is_plausible.then_some(Self {
            kind,
            expires: flags & FLAG_EXPIRES != 0,
            key_len,
            value_len,
        })
    }

    fn key_at(self) -> usize {
        HEADER_BYTES + if self.expires { EXPIRY_BYTES } else { 0 }
    }

    fn value_at(self) -> usize {
        self.key_at() + usize::from(self.key_len)
    }

    /// Returns the length of the record without its padding.
    pub(crate) fn len_bytes(self) -> usize {
        self.value_at() + self.value_len as usize
    }

    /// Returns the length of the record with its padding.
    pub(crate) fn padded_bytes(self) -> usize {
        self.len_bytes().next_multiple_of(GRANULE_BYTES)
    }
}

/// A record to be written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewRecord<'a> {
    pub(crate) key: &'a [u8],
    pub(crate) content: Content<'a>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Content<'a> {
    Value {
        value: &'a [u8],
        /// Milliseconds since 1970.
        expires_at: Option<u64>,
    },
    /// The journal that it was first written to; `None`: the one that it is being written to.
    Tombstone { origin: Option<JournalNumber> },
}

impl NewRecord<'_> {
    pub(crate) fn expires(&self) -> bool {
        matches!(self.content, Content::Value { expires_at: Some(_), .. })
    }

    fn value_len(&self) -> usize {
        match self.content {
            Content::Value { value, .. } => value.len(),
            Content::Tombstone { .. } => size_of::<u64>(),
        }
    }

    /// Returns the length without padding.
    #[inline]
    pub(crate) fn len_bytes(&self) -> usize {
        let expiry = if self.expires() { EXPIRY_BYTES } else { 0 };
        HEADER_BYTES + expiry + self.key.len() + self.value_len()
    }

    /// Returns the bytes of key and value.
    pub(crate) fn user_bytes(&self) -> usize {
        self.key.len() + self.value_len()
    }

    /// Writes the record into `to`, which has exactly [`Self::len_bytes`]. Key and value must be
    /// within their bounds.
    #[inline]
    pub(crate) fn write(&self, to: &mut [u8], salt: Salt, number: JournalNumber, first: Granule) {
        let key_len = u16::try_from(self.key.len()).expect("checked before space is reserved");
        let value_len = u32::try_from(self.value_len()).expect("checked before space is reserved");
        let (kind, flags) = match self.content {
            Content::Value { expires_at, .. } => {
                (KIND_VALUE, if expires_at.is_some() { FLAG_EXPIRES } else { 0 })
            }
            Content::Tombstone { .. } => (KIND_TOMBSTONE, 0),
        };
        to[KIND] = kind;
        to[FLAGS] = flags;
        to[KEY_LEN..VALUE_LEN].copy_from_slice(&key_len.to_le_bytes());
        to[VALUE_LEN..RESERVED].copy_from_slice(&value_len.to_le_bytes());
        to[RESERVED..HEADER_BYTES].fill(0);
        let mut at = HEADER_BYTES;
        if let Content::Value { expires_at: Some(expires_at), .. } = self.content {
            to[at..at + EXPIRY_BYTES].copy_from_slice(&expires_at.to_le_bytes());
            at += EXPIRY_BYTES;
        }
        let (key, rest) = to[at..].split_at_mut(self.key.len());
        key.copy_from_slice(self.key);
        match self.content {
            Content::Value { value, .. } => rest.copy_from_slice(value),
            Content::Tombstone { origin } => {
                rest.copy_from_slice(&origin.unwrap_or(number).0.to_le_bytes());
            }
        }
        let checksum = salt.checksum(first.0, &to[KIND..]);
        to[CHECKSUM..KIND].copy_from_slice(&checksum.to_le_bytes());
    }
}

/// A whole record, as read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record<'a> {
    header: Header,
    bytes: &'a [u8],
}

impl<'a> Record<'a> {
    /// Returns the record at the beginning of `bytes` without verifying it: it was written or
    /// verified by this process. `None` if there cannot be one.
    #[inline]
    pub(crate) fn trusted(bytes: &'a [u8]) -> Option<Self> {
        let header = Header::parse(bytes)?;
        Some(Self { header, bytes: bytes.get(..header.len_bytes())? })
    }

    /// Returns the record at the beginning of `bytes`, if it was written at `first` of the journal
    /// with this salt and is undamaged.
    pub(crate) fn checked(bytes: &'a [u8], salt: Salt, first: Granule) -> Option<Self> {
        let record = Self::trusted(bytes)?;
        let checksum = salt.checksum(first.0, &record.bytes[KIND..]);
        (u32_at(record.bytes, CHECKSUM) == checksum).then_some(record)
    }

    /// Returns the index entry of the record, if it is at `first` of this journal.
    pub(crate) fn position(
        &self,
        number: JournalNumber,
        first: Granule,
        hash: KeyHash,
    ) -> Position {
        Position::new(number, first, self.header.len_bytes(), self.header.expires, hash)
    }

    pub(crate) fn header(&self) -> Header {
        self.header
    }

    /// Returns the range of its key in the record.
    pub(crate) fn key_range(&self) -> Range<usize> {
        self.header.key_at()..self.header.value_at()
    }

    pub(crate) fn key(&self) -> &'a [u8] {
        &self.bytes[self.key_range()]
    }

    /// Returns the range of its value in the record.
    pub(crate) fn value_range(&self) -> Range<usize> {
        self.header.value_at()..self.header.len_bytes()
    }

    pub(crate) fn value(&self) -> &'a [u8] {
        &self.bytes[self.value_range()]
    }

    /// Returns the time from which it counts as absent, in milliseconds since 1970.
    pub(crate) fn expires_at(&self) -> Option<u64> {
        self.header.expires.then(|| u64_at(self.bytes, HEADER_BYTES))
    }

    /// Returns whether it counts as absent. Reads the clock only if it has a time to live.
    #[inline]
    pub(crate) fn has_expired(&self, clock: &Clock) -> bool {
        self.expires_at().is_some_and(|at| at <= clock.now_millis())
    }

    /// Returns the journal that a tombstone was first written to.
    pub(crate) fn origin(&self) -> Option<JournalNumber> {
        let at = self.header.value_at();
        (self.header.kind == Kind::Tombstone).then(|| JournalNumber(u64_at(self.bytes, at)))
    }
}

/// The part of a record before its value. Not verified: the checksum covers the value too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head<'a> {
    pub(crate) key: &'a [u8],
    /// As [`Record::expires_at`].
    pub(crate) expires_at: Option<u64>,
}

impl<'a> Head<'a> {
    /// Parses the record at the beginning of `bytes`, which may end within its value. `None` if it
    /// is not a value or its key does not end in `bytes`.
    pub(crate) fn unchecked(bytes: &'a [u8]) -> Option<Self> {
        let header = Header::parse(bytes).filter(|header| header.kind == Kind::Value)?;
        let key = bytes.get(header.key_at()..header.value_at())?;
        let expires_at = header.expires.then(|| u64_at(bytes, HEADER_BYTES));
        Some(Self { key, expires_at })
    }
}

/// Verifies the records of a journal, piece by piece and without memory for a whole record:
/// undamaged, and without gaps between them.
pub(crate) struct Chain {
    salt: Salt,
    /// The position of the next byte.
    at: usize,
    head: [u8; HEADER_BYTES],
    head_bytes: usize,
    /// What is left of the record that the head belongs to, and then of its padding.
    left_bytes: usize,
    padding_bytes: usize,
    checksum: u32,
}

impl Chain {
    /// `at`: where the first record begins.
    pub(crate) fn new(salt: Salt, at: usize) -> Self {
        let head = [0; HEADER_BYTES];
        Self { salt, at, head, head_bytes: 0, left_bytes: 0, padding_bytes: 0, checksum: 0 }
    }

    /// Processes the next bytes; false if they are not records.
    pub(crate) fn follow(&mut self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            let taken = if self.head_bytes < HEADER_BYTES {
                self.take_head(bytes)
            } else if self.left_bytes > 0 {
                self.take_record(bytes)
            } else {
                Some(self.take_padding(bytes))
            };
            let Some(taken) = taken else { return false };
            self.at += taken;
            bytes = &bytes[taken..];
        }
        true
    }

    fn take_head(&mut self, bytes: &[u8]) -> Option<usize> {
        let taken = bytes.len().min(HEADER_BYTES - self.head_bytes);
        self.head[self.head_bytes..self.head_bytes + taken].copy_from_slice(&bytes[..taken]);
        self.head_bytes += taken;
        if self.head_bytes == HEADER_BYTES {
            let header = Header::parse(&self.head)?;
            let first = Granule::at(self.at + taken - HEADER_BYTES);
            self.left_bytes = header.len_bytes() - HEADER_BYTES;
            self.padding_bytes = header.padded_bytes() - header.len_bytes();
            self.checksum = crc32c_append(self.salt.seed(first.0), &self.head[KIND..]);
        }
        Some(taken)
    }

    fn take_record(&mut self, bytes: &[u8]) -> Option<usize> {
        let taken = bytes.len().min(self.left_bytes);
        self.checksum = crc32c_append(self.checksum, &bytes[..taken]);
        self.left_bytes -= taken;
        if self.left_bytes == 0 {
            if self.checksum != u32_at(&self.head, CHECKSUM) {
                return None;
            }
            self.end_if_padded();
        }
        Some(taken)
    }

    fn take_padding(&mut self, bytes: &[u8]) -> usize {
        let taken = bytes.len().min(self.padding_bytes);
        self.padding_bytes -= taken;
        self.end_if_padded();
        taken
    }

    fn end_if_padded(&mut self) {
        if self.padding_bytes == 0 {
            self.head_bytes = 0;
        }
    }

    /// Returns whether the last record was complete.
    pub(crate) fn is_complete(&self) -> bool {
        self.head_bytes == 0
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn written(record: &NewRecord<'_>, salt: Salt, first: Granule) -> Vec<u8> {
        let mut bytes = vec![0xee; record.len_bytes()];
        record.write(&mut bytes, salt, JournalNumber(9), first);
        bytes
    }

    proptest! {
        #[test]
        fn records_are_read_as_written(
            key in vec(any::<u8>(), 1..300),
            value in vec(any::<u8>(), 0..3000),
            expires_at in any::<Option<u64>>(),
            salt in any::<u64>(),
            first in any::<u32>(),
        ) {
            let (salt, first) = (Salt(salt), Granule(first));
            let content = Content::Value { value: &value, expires_at };
            let new = NewRecord { key: &key, content };
            let bytes = written(&new, salt, first);
            let record = Record::checked(&bytes, salt, first).unwrap();
            prop_assert_eq!(record.header().len_bytes(), bytes.len());
            prop_assert_eq!((record.key(), record.value()), (&key[..], &value[..]));
            prop_assert_eq!((record.expires_at(), record.origin()), (expires_at, None));
            prop_assert!(Record::checked(&bytes, Salt(!salt.0), first).is_none());
            prop_assert!(Record::checked(&bytes, salt, Granule(!first.0)).is_none());
        }

        #[test]
        fn a_head_ends_where_its_key_does(
            key in vec(any::<u8>(), 1..300),
            expires_at in any::<Option<u64>>(),
        ) {
            let content = Content::Value { value: &[7; 50], expires_at };
            let new = NewRecord { key: &key, content };
            let bytes = written(&new, Salt(7), Granule(512));
            let end = bytes.len() - 50;
            for len in [end, end + 1, bytes.len()] {
                let head = Head::unchecked(&bytes[..len]).unwrap();
                prop_assert_eq!((head.key, head.expires_at), (&key[..], expires_at));
            }
            prop_assert!((0..end).all(|len| Head::unchecked(&bytes[..len]).is_none()));
        }

        #[test]
        fn a_flipped_bit_is_detected(
            key in vec(any::<u8>(), 1..40),
            value in vec(any::<u8>(), 0..100),
            expires_at in any::<Option<u64>>(),
            bit in any::<proptest::sample::Index>(),
        ) {
            let content = Content::Value { value: &value, expires_at };
            let new = NewRecord { key: &key, content };
            let mut bytes = written(&new, Salt(7), Granule(512));
            let bit = bit.index(bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            bytes.resize(bytes.len() + (1 << 20), 0);
            prop_assert!(Record::checked(&bytes, Salt(7), Granule(512)).is_none());
        }

        #[test]
        fn a_chain_of_records_is_verified_across_pieces(
            values in vec(vec(any::<u8>(), 0..300), 1..20),
            piece in 1usize..700,
            bit in any::<proptest::sample::Index>(),
        ) {
            let salt = Salt(7);
            let mut bytes = Vec::new();
            let mut ends = Vec::new();
            for value in &values {
                let first = Granule::at(4096 + bytes.len());
                let content = Content::Value { value, expires_at: Some(1) };
                bytes.extend(written(&NewRecord { key: b"key", content }, salt, first));
                ends.push(bytes.len());
                bytes.resize(bytes.len().next_multiple_of(GRANULE_BYTES), 0);
            }
            let follow = |bytes: &[u8]| {
                let mut chain = Chain::new(salt, 4096);
                bytes.chunks(piece).all(|piece| chain.follow(piece)) && chain.is_complete()
            };
            prop_assert!(follow(&bytes));
            prop_assert!(!follow(&bytes[..bytes.len() - GRANULE_BYTES]));
            let bit = bit.index(bytes.len() * 8);
            // The padding is not verified.
            let is_padding = ends.iter().any(|end| {
                (*end..end.next_multiple_of(GRANULE_BYTES)).contains(&(bit / 8))
            });
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(follow(&bytes), is_padding);
        }

        #[test]
        fn arbitrary_bytes_are_not_a_record(bytes in vec(any::<u8>(), 0..200)) {
            prop_assert!(Record::checked(&bytes, Salt(7), Granule(512)).is_none());
        }
    }

    #[test]
    fn a_tombstone_records_its_origin() {
        for (origin, expected) in [(None, 9), (Some(JournalNumber(4)), 4)] {
            let new = NewRecord { key: b"k", content: Content::Tombstone { origin } };
            let bytes = written(&new, Salt(1), Granule(512));
            let record = Record::checked(&bytes, Salt(1), Granule(512)).unwrap();
            assert_eq!((record.key(), record.expires_at()), (&b"k"[..], None));
            assert_eq!(record.origin(), Some(JournalNumber(expected)));
        }
        assert!(Record::checked(&[0; 64], Salt(1), Granule(512)).is_none());
        let bytes = written(
            &NewRecord { key: b"k", content: Content::Tombstone { origin: None } },
            Salt(1),
            Granule(512),
        );
        assert!(Head::unchecked(&bytes).is_none());
    }
}
