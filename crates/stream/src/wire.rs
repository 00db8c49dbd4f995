//! Numbers of variable length and byte strings: `docs/format/chain.md`. Also in directories of
//! objects.

use std::fmt::Display;

use bytes::Bytes;
use uuid::Uuid;

use crate::damage::{Damage, DecodeError};

/// Most bytes of a number of variable length.
const MAX_VARINT_BYTES: usize = 10;

/// Appends fields.
#[derive(Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn uuid(&mut self, id: Uuid) {
        self.0.extend_from_slice(id.as_bytes());
    }

    pub(crate) fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    pub(crate) fn signed(&mut self, value: i64) {
        self.varint((value.cast_unsigned() << 1) ^ (value >> 63).cast_unsigned());
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    /// Appends 1 and the bytes, or 0 if there are none.
    pub(crate) fn optional(&mut self, bytes: Option<&[u8]>) {
        self.u8(u8::from(bytes.is_some()));
        if let Some(bytes) = bytes {
            self.bytes(bytes);
        }
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Takes fields. Each error names the position.
pub(crate) struct Reader<'a> {
    bytes: &'a Bytes,
    at: usize,
}

type Result<T> = std::result::Result<T, DecodeError>;

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a Bytes) -> Self {
        Self { bytes, at: 0 }
    }

    /// Returns an error at the current position.
    pub(crate) fn invalid<T>(&self, reason: impl Into<String>) -> Result<T> {
        Err(Damage { position: self.at as u64, reason: reason.into() }.into())
    }

    /// Returns the error for something that only a later version of this program writes.
    pub(crate) fn unknown<T>(&self, what: impl Display) -> Result<T> {
        let reason = format!("{what} at byte {} is not known to this version", self.at);
        Err(DecodeError::LaterVersion(reason))
    }

    /// The number of bytes that were not taken.
    pub(crate) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Whether all bytes were taken.
    pub(crate) fn is_empty(&self) -> bool {
        self.left() == 0
    }

    /// Takes this number of bytes.
    fn take(&mut self, count: usize) -> Result<Bytes> {
        match self.at.checked_add(count).filter(|end| *end <= self.bytes.len()) {
            Some(end) => {
                let taken = self.bytes.slice(self.at..end);
                self.at = end;
                Ok(taken)
            }
            None => self.invalid("the body ends inside a field"),
        }
    }

    #[inline]
    pub(crate) fn u8(&mut self) -> Result<u8> {
        // Not with `take`, which counts references: numbers are read byte by byte.
        let Some(byte) = self.bytes.get(self.at) else {
            return self.invalid("the body ends inside a field");
        };
        self.at += 1;
        Ok(*byte)
    }

    pub(crate) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.take(4)?[..].try_into().expect("4 bytes")))
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.take(8)?[..].try_into().expect("8 bytes")))
    }

    pub(crate) fn uuid(&mut self) -> Result<Uuid> {
        Ok(Uuid::from_slice(&self.take(16)?).expect("16 bytes"))
    }

    #[inline]
    pub(crate) fn varint(&mut self) -> Result<u64> {
        let mut value = 0;
        for at in 0..MAX_VARINT_BYTES {
            let byte = self.u8()?;
            let part = u64::from(byte & 0x7f);
            let shift = 7 * at as u32;
            if (part << shift) >> shift != part {
                return self.invalid("a number has more than 64 bits");
            }
            value |= part << shift;
            if byte & 0x80 == 0 {
                if byte == 0 && at > 0 {
                    return self.invalid("a number is not in its shortest form");
                }
                return Ok(value);
            }
        }
        self.invalid("a number has more than 64 bits")
    }

    /// Takes whether an optional field follows.
    pub(crate) fn flag(&mut self) -> Result<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => self.invalid(format!("{other} where 0 or 1 is expected")),
        }
    }

    pub(crate) fn signed(&mut self) -> Result<i64> {
        let value = self.varint()?;
        Ok((value >> 1).cast_signed() ^ -(value & 1).cast_signed())
    }

    /// Takes a number and adds it to `base`.
    pub(crate) fn above(&mut self, base: u64) -> Result<u64> {
        let difference = self.varint()?;
        match base.checked_add(difference) {
            Some(sum) => Ok(sum),
            None => self.invalid("a sum has more than 64 bits"),
        }
    }

    /// Takes the difference of a key to the one before it, and returns the key: keys ascend.
    pub(crate) fn next_key(&mut self, before: Option<u64>) -> Result<u64> {
        let key = self.above(before.unwrap_or(0))?;
        match before == Some(key) {
            true => self.invalid("two rows with one key"),
            false => Ok(key),
        }
    }

    /// Takes the number of elements that follow, each of which has at least one byte.
    pub(crate) fn count(&mut self) -> Result<usize> {
        let count = self.varint()?;
        let left = self.left();
        match usize::try_from(count).ok().filter(|count| *count <= left) {
            Some(count) => Ok(count),
            None => self.invalid(format!("{count} elements in {left} bytes")),
        }
    }

    pub(crate) fn bytes(&mut self) -> Result<Bytes> {
        let length = self.count()?;
        self.take(length)
    }

    pub(crate) fn text(&mut self) -> Result<String> {
        let bytes = self.bytes()?;
        match std::str::from_utf8(&bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => self.invalid("a key is not UTF-8"),
        }
    }

    /// Checks that no byte is left.
    pub(crate) fn end(&self) -> Result<()> {
        match self.left() {
            0 => Ok(()),
            left => self.invalid(format!("{left} bytes after the last field")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn written(write: impl FnOnce(&mut Writer)) -> Bytes {
        let mut writer = Writer::default();
        write(&mut writer);
        writer.finish().into()
    }

    #[test]
    fn numbers_have_the_bytes_of_the_document() {
        for (value, bytes) in [
            (0, &[0][..]),
            (0x7f, &[0x7f]),
            (0x80, &[0x80, 1]),
            (300, &[0xac, 2]),
            (u64::MAX, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]),
        ] {
            assert_eq!(written(|writer| writer.varint(value)), bytes);
        }
        for (value, bytes) in [(0, &[0][..]), (-1, &[1]), (1, &[2]), (-2, &[3]), (64, &[0x80, 1])] {
            assert_eq!(written(|writer| writer.signed(value)), bytes);
        }
    }

    #[test]
    fn other_forms_of_numbers_are_refused() {
        for bytes in [
            &[0x80, 0][..],
            &[0xff],
            &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2],
            &[0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 1],
        ] {
            let bytes = Bytes::copy_from_slice(bytes);
            assert!(Reader::new(&bytes).varint().is_err(), "{bytes:?}");
        }
        let two = written(|writer| writer.varint(2));
        assert!(Reader::new(&two).above(u64::MAX - 1).is_err());
        assert!(Reader::new(&two).bytes().is_err(), "more bytes than there are");
        assert!(Reader::new(&two).end().is_err());
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(
            (unsigned, signed) in any::<(u64, i64)>(),
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            let all = written(|writer| {
                writer.varint(unsigned);
                writer.signed(signed);
                writer.bytes(&bytes);
            });
            let mut reader = Reader::new(&all);
            prop_assert_eq!(reader.varint().unwrap(), unsigned);
            prop_assert_eq!(reader.signed().unwrap(), signed);
            prop_assert_eq!(reader.bytes().unwrap(), bytes);
            reader.end().unwrap();
        }
    }
}
