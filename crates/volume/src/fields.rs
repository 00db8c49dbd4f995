//! Reading and writing little-endian fields.

use bytes::Bytes;

/// A field that a decoder of this version does not accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    /// Reserved bytes are not zero.
    #[error("reserved bytes at {at} are not zero; a newer version has written them")]
    Reserved {
        /// Offset in the bytes.
        at: usize,
    },
    /// A count or length does not agree with the number of bytes.
    #[error("the fields do not agree with the length of {len} bytes")]
    Length {
        /// Length in bytes.
        len: usize,
    },
    /// A field has a value that no writer produces.
    #[error("the {field} is {value}, which is not valid")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
}

/// The fields of encoded bytes, from the front.
pub(crate) struct Reader<'a> {
    bytes: &'a Bytes,
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a Bytes) -> Self {
        Self { bytes, at: 0 }
    }

    /// The number of bytes that are left.
    pub(crate) fn rest(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next `len` bytes, as a part of the same buffer.
    pub(crate) fn bytes(&mut self, len: usize) -> Result<Bytes, FieldError> {
        if len > self.rest() {
            return Err(FieldError::Length { len: self.bytes.len() });
        }
        let bytes = self.bytes.slice(self.at..self.at + len);
        self.at += len;
        Ok(bytes)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], FieldError> {
        let bytes = self.bytes[self.at..].first_chunk();
        let bytes = *bytes.ok_or(FieldError::Length { len: self.bytes.len() })?;
        self.at += N;
        Ok(bytes)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, FieldError> {
        self.array().map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, FieldError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, FieldError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, FieldError> {
        self.array().map(u64::from_le_bytes)
    }

    /// Refuses reserved bytes that are not zero.
    pub(crate) fn zeros<const N: usize>(&mut self) -> Result<(), FieldError> {
        let at = self.at;
        match self.array::<N>()? == [0; N] {
            true => Ok(()),
            false => Err(FieldError::Reserved { at }),
        }
    }

    /// Refuses a count of elements that the remaining bytes cannot hold, before any are allocated.
    pub(crate) fn check_count(&self, count: usize, bytes_each: usize) -> Result<(), FieldError> {
        match count.checked_mul(bytes_each) {
            Some(bytes) if bytes <= self.rest() => Ok(()),
            _ => Err(FieldError::Length { len: self.bytes.len() }),
        }
    }

    /// Refuses bytes after the last field, except for the zeros that pad it to a multiple of 8.
    pub(crate) fn end_padded(&mut self) -> Result<(), FieldError> {
        self.padding()?;
        self.end()
    }

    /// Skips the zeros up to the next multiple of 8.
    pub(crate) fn padding(&mut self) -> Result<(), FieldError> {
        let at = self.at;
        let padding = self.bytes(at.next_multiple_of(8) - at)?;
        match padding.iter().all(|byte| *byte == 0) {
            true => Ok(()),
            false => Err(FieldError::Reserved { at }),
        }
    }

    /// Refuses bytes after the last field.
    pub(crate) fn end(&self) -> Result<(), FieldError> {
        match self.rest() {
            0 => Ok(()),
            _ => Err(FieldError::Length { len: self.bytes.len() }),
        }
    }
}

/// Appends fields to a buffer.
pub(crate) trait Put {
    fn put_u16(&mut self, value: u16);
    fn put_u32(&mut self, value: u32);
    fn put_u64(&mut self, value: u64);
    fn put_zeros(&mut self, count: usize);
}

impl Put for Vec<u8> {
    fn put_u16(&mut self, value: u16) {
        self.extend(value.to_le_bytes());
    }

    fn put_u32(&mut self, value: u32) {
        self.extend(value.to_le_bytes());
    }

    fn put_u64(&mut self, value: u64) {
        self.extend(value.to_le_bytes());
    }

    fn put_zeros(&mut self, count: usize) {
        self.resize(self.len() + count, 0);
    }
}
