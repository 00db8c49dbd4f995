//! Responses in the form in which they are written to the socket.

use bytes::{BufMut, Bytes, BytesMut};
use kafka_protocol::protocol::Encodable;
use tokio::sync::OwnedSemaphorePermit;

/// A framed response: length, header and body, in pieces that are written one after the other
/// without being copied together.
pub(crate) struct Response {
    pub(crate) pieces: Vec<Bytes>,
    /// Released when the response is written or dropped.
    pub(crate) budgets: Vec<OwnedSemaphorePermit>,
}

impl Response {
    /// Encodes a message after a response header.
    ///
    /// # Errors
    /// A field of the message is set that its version does not have.
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

    /// Frames bytes with their length only.
    pub(crate) fn bare(bytes: Bytes) -> Self {
        let len = u32::try_from(bytes.len()).expect("SASL messages are short");
        let pieces = vec![Bytes::copy_from_slice(&len.to_be_bytes()), bytes];
        Self { pieces, budgets: Vec::new() }
    }

    /// The length of the whole frame, including the four bytes of its length field.
    pub(crate) fn len_bytes(&self) -> usize {
        self.pieces.iter().map(Bytes::len).sum()
    }
}

/// A response could not be encoded, which is a defect.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct EncodeError(String);

/// Builds a response from encoded fields and existing bytes.
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
        // Reserved for the frame's length.
        Self { pieces: vec![Bytes::new()], current }
    }

    /// The buffer that fields are appended to.
    pub(crate) fn buffer(&mut self) -> &mut BytesMut {
        &mut self.current
    }

    /// Appends bytes without copying them.
    pub(crate) fn append(&mut self, bytes: Bytes) {
        if bytes.is_empty() {
            return;
        }
        if !self.current.is_empty() {
            self.pieces.push(self.current.split().freeze());
        }
        self.pieces.push(bytes);
    }

    /// Sets the frame's length.
    ///
    /// # Errors
    /// More than 2 GiB.
    pub(crate) fn finish(mut self) -> Result<Response, EncodeError> {
        self.pieces.push(self.current.freeze());
        let len: usize = self.pieces.iter().map(Bytes::len).sum();
        let len =
            i32::try_from(len).map_err(|_| EncodeError(format!("the response has {len} bytes")))?;
        self.pieces[0] = Bytes::copy_from_slice(&len.to_be_bytes());
        Ok(Response { pieces: self.pieces, budgets: Vec::new() })
    }
}
