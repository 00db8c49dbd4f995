//! Responses as they go to the socket.

use bytes::{BufMut, Bytes, BytesMut};
use kafka_protocol::protocol::Encodable;
use tokio::sync::OwnedSemaphorePermit;

/// A framed response: its length, its header and its body, in pieces that are written one after the
/// other without being copied together.
pub(crate) struct Response {
    pub(crate) pieces: Vec<Bytes>,
    /// Given back when the response has been written or dropped.
    pub(crate) budgets: Vec<OwnedSemaphorePermit>,
}

impl Response {
    /// Encode a message behind a response header.
    ///
    /// # Errors
    /// The message has a field set that its version does not have.
    pub(crate) fn encode<M: Encodable>(
        correlation_id: i32,
        header_version: i16,
        message: &M,
        version: i16,
    ) -> Result<Self, EncodeError> {
        let mut builder = Builder::new(correlation_id, header_version);
        message.encode(builder.buffer(), version).map_err(|e| EncodeError(format!("{e:#}")))?;
        builder.finish()
    }

    /// Bytes with nothing but their length before them.
    pub(crate) fn bare(bytes: Bytes) -> Self {
        let len = u32::try_from(bytes.len()).expect("messages of SASL are short");
        let pieces = vec![Bytes::copy_from_slice(&len.to_be_bytes()), bytes];
        Self { pieces, budgets: Vec::new() }
    }

    /// Length of everything, the four bytes of the frame's length included.
    pub(crate) fn len_bytes(&self) -> usize {
        self.pieces.iter().map(Bytes::len).sum()
    }
}

/// A response could not be encoded: a fault of this program.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct EncodeError(String);

/// Puts a response together from encoded fields and from bytes that exist already.
pub(crate) struct Builder {
    pieces: Vec<Bytes>,
    current: BytesMut,
}

impl Builder {
    pub(crate) fn new(correlation_id: i32, header_version: i16) -> Self {
        let mut current = BytesMut::with_capacity(256);
        current.put_i32(correlation_id);
        if header_version >= 1 {
            current.put_u8(0); // No tagged fields.
        }
        // The first piece will be the frame's length.
        Self { pieces: vec![Bytes::new()], current }
    }

    /// Where fields are appended.
    pub(crate) fn buffer(&mut self) -> &mut BytesMut {
        &mut self.current
    }

    /// Append bytes without copying them.
    pub(crate) fn append(&mut self, bytes: Bytes) {
        if bytes.is_empty() {
            return;
        }
        if !self.current.is_empty() {
            self.pieces.push(self.current.split().freeze());
        }
        self.pieces.push(bytes);
    }

    /// Set the frame's length.
    ///
    /// # Errors
    /// More than 2 GiB.
    pub(crate) fn finish(mut self) -> Result<Response, EncodeError> {
        self.pieces.push(self.current.freeze());
        let len: usize = self.pieces.iter().map(Bytes::len).sum();
        let len =
            i32::try_from(len).map_err(|_| EncodeError(format!("a response of {len} bytes")))?;
        self.pieces[0] = Bytes::copy_from_slice(&len.to_be_bytes());
        Ok(Response { pieces: self.pieces, budgets: Vec::new() })
    }
}
