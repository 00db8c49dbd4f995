//! What a batch of appends takes and returns.

use bytes::Bytes;

use crate::layout::LogOffset;

/// A record for [`Wal::append_batch`](crate::Wal::append_batch): the concatenation of `head` and
/// `body`. As in [`Wal::append_shared`](crate::Wal::append_shared), a body of at least 32 KiB is
/// not copied at once.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// The pieces before the body.
    pub head: &'a [&'a [u8]],
    /// The rest of the record; may be empty.
    pub body: &'a Bytes,
}

/// The position of an appended record, which is final but not durable yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The start of the record.
    pub offset: LogOffset,
    /// The end of the record.
    pub end: LogOffset,
    /// CRC-32C of the record's body, of 0 bytes if it has none.
    pub body_crc32c: u32,
}
