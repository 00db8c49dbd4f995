//! Reading and writing little-endian fields.

use bytes::Bytes;

use super::error::RecordError;

/// The fields of a record, from the front.
pub(super) struct Reader<'a> {
    record: &'a Bytes,
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(record: &'a Bytes) -> Self {
        Self { record, at: 0 }
    }

    /// The number of bytes that are left.
    pub(super) fn rest(&self) -> usize {
        self.record.len() - self.at
    }

    /// The next `len` bytes, as a part of the record.
    pub(super) fn bytes(&mut self, len: usize) -> Result<Bytes, RecordError> {
        if len > self.rest() {
            return Err(RecordError::Length { len: self.record.len() });
        }
        let bytes = self.record.slice(self.at..self.at + len);
        self.at += len;
        Ok(bytes)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], RecordError> {
        let bytes = self.record[self.at..].first_chunk();
        let bytes = *bytes.ok_or(RecordError::Length { len: self.record.len() })?;
        self.at += N;
        Ok(bytes)
    }

    pub(super) fn u8(&mut self) -> Result<u8, RecordError> {
        self.array().map(u8::from_le_bytes)
    }

    pub(super) fn u16(&mut self) -> Result<u16, RecordError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, RecordError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, RecordError> {
        self.array().map(u64::from_le_bytes)
    }

    /// Refuses reserved bytes that are not zero.
    pub(super) fn zeros<const N: usize>(&mut self) -> Result<(), RecordError> {
        let at = self.at;
        match self.array::<N>()? == [0; N] {
            true => Ok(()),
            false => Err(RecordError::Reserved { at }),
        }
    }

    /// Refuses a count of elements that the remaining bytes cannot hold, before any are allocated.
    pub(super) fn check_count(&self, count: usize, bytes_each: usize) -> Result<(), RecordError> {
        match count.checked_mul(bytes_each) {
            Some(bytes) if bytes <= self.rest() => Ok(()),
            _ => Err(RecordError::Length { len: self.record.len() }),
        }
    }

    /// Refuses bytes behind the last field.
    pub(super) fn end(&self) -> Result<(), RecordError> {
        match self.rest() {
            0 => Ok(()),
            _ => Err(RecordError::Length { len: self.record.len() }),
        }
    }
}

/// Appends fields to a buffer.
pub(super) trait Put {
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
