//! Bytes from the client.

use std::io;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::{Instant, timeout_at};

use crate::budget::PIECE_BYTES;
use crate::protocol::REQUEST_BYTES;

/// Memory for headers. A payload is read into memory of its own, except for what follows a header
/// here.
const BUFFER_BYTES: usize = 1 << 10;
/// Memory for payloads that are not used.
const SKIP_BYTES: usize = 64 << 10;

/// Reads requests. A client may be idle between two of them without a limit; a header or a piece of
/// a payload must arrive within the stall timeout of its first byte.
pub(crate) struct Input<R> {
    reader: R,
    buffer: Box<[u8; BUFFER_BYTES]>,
    /// The bytes of the buffer that are not used yet.
    start: usize,
    end: usize,
    /// When the header of which a part has arrived must be complete.
    deadline: Option<Instant>,
    stall_timeout: Duration,
}

impl<R: AsyncRead + Unpin> Input<R> {
    pub(crate) fn new(reader: R, stall_timeout: Duration) -> Self {
        let buffer = Box::new([0; BUFFER_BYTES]);
        Self { reader, buffer, start: 0, end: 0, deadline: None, stall_timeout }
    }

    /// Reads the header of the next request; `None` if the client has closed the connection. May be
    /// dropped and called again.
    pub(crate) async fn header(&mut self) -> io::Result<Option<[u8; REQUEST_BYTES]>> {
        loop {
            if let Some(header) = self.buffer[self.start..self.end].first_chunk() {
                let header = *header;
                self.start += REQUEST_BYTES;
                self.deadline = None;
                return Ok(Some(header));
            }
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            let reading = self.reader.read(&mut self.buffer[self.end..]);
            let read = if self.end == 0 {
                reading.await?
            } else {
                let limit = || Instant::now() + self.stall_timeout;
                let deadline = *self.deadline.get_or_insert_with(limit);
                timeout_at(deadline, reading).await??
            };
            match read {
                0 if self.end == 0 => return Ok(None),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => self.end += read,
            }
        }
    }

    /// Reads a piece of a payload into memory of exactly its length.
    pub(crate) async fn payload(&mut self, len: u32) -> io::Result<Bytes> {
        let len = len as usize;
        let mut data = BytesMut::with_capacity(len);
        let buffered = len.min(self.end - self.start);
        data.put_slice(&self.buffer[self.start..self.start + buffered]);
        self.start += buffered;
        let deadline = Instant::now() + self.stall_timeout;
        while data.len() < len {
            // Not more than the payload, which the next header follows.
            let missing = len - data.len();
            let mut rest = (&mut data).limit(missing);
            if timeout_at(deadline, self.reader.read_buf(&mut rest)).await?? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(data.freeze())
    }

    /// Reads a payload and drops it.
    pub(crate) async fn skip(&mut self, len: u32) -> io::Result<()> {
        let mut missing = len as usize;
        let buffered = missing.min(self.end - self.start);
        self.start += buffered;
        missing -= buffered;
        let mut scratch = Vec::new();
        while missing > 0 {
            let deadline = Instant::now() + self.stall_timeout;
            let mut piece = missing.min(PIECE_BYTES as usize);
            missing -= piece;
            while piece > 0 {
                scratch.resize(piece.min(SKIP_BYTES), 0);
                match timeout_at(deadline, self.reader.read(&mut scratch)).await?? {
                    0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    read => piece -= read,
                }
            }
        }
        Ok(())
    }

    /// Reads and drops what arrives until the client closes the connection, but not more than
    /// `len` bytes.
    pub(crate) async fn discard(&mut self, mut len: usize) {
        while len > 0
            && let Ok(read) = self.reader.read(&mut self.buffer[..]).await
            && read > 0
        {
            len = len.saturating_sub(read);
        }
    }
}
