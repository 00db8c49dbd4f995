//! Why bytes of a connection are refused, and errors as bytes.
//! `docs/format/volume-wire.md`, section 5.

use bytes::Bytes;

use super::frame::{Frame, FrameType, Received};
use crate::fields::{FieldError, Put, Reader};
use crate::op::OpError;
use crate::request::{ErrorCode, MAX_ERROR_TEXT_BYTES, RequestError};
use crate::types::{GroupId, ServerId};

/// Why a frame is refused. The connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The header does not have its checksum, or is of another connection.
    #[error("the header of a frame does not have its checksum")]
    HeaderChecksum,
    /// The meta does not have its checksum.
    #[error("the meta of a frame does not have its checksum")]
    MetaChecksum,
    /// The type is unknown, or is not sent in this direction of such a connection.
    #[error("frame type {0:#06x} is not accepted here")]
    Type(u16),
    /// A raft message of a type that does not come from the network.
    #[error("raft message type {0} is not accepted from a peer")]
    MessageType(u8),
    /// A field that a decoder of this version does not accept.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// An op is not valid, or one of its blocks does not have its checksum.
    #[error(transparent)]
    Op(#[from] OpError),
    /// A block does not have its checksum.
    #[error("block {block} of a frame does not have its checksum")]
    Block {
        /// Number of the block in the frame's data.
        block: usize,
    },
}

impl WireError {
    pub(crate) fn field(field: &'static str, value: impl Into<u64>) -> Self {
        FieldError::Field { field, value: value.into() }.into()
    }

    /// The code that the other end is sent.
    pub fn code(self) -> ErrorCode {
        match self {
            Self::Block { .. } | Self::Op(OpError::Checksum { .. }) => ErrorCode::BadChecksum,
            _ => ErrorCode::BadFrame,
        }
    }
}

/// Builds a frame whose meta is `error`. A text that is too long is cut.
pub(crate) fn error_frame(kind: FrameType, request_id: u64, error: &RequestError) -> Frame {
    let mut text = error.text.as_str();
    if text.len() > MAX_ERROR_TEXT_BYTES {
        text = &text[..text.floor_char_boundary(MAX_ERROR_TEXT_BYTES)];
    }
    let mut frame = Frame::error(kind, request_id);
    let meta = frame.meta();
    meta.put_u16(error.code as u16);
    meta.put_zeros(2);
    meta.put_u32(error.retry_after_ms);
    meta.put_u64(error.group.0);
    meta.put_u64(error.value);
    meta.put_u32(error.leader.map_or(0, |server| server.0));
    meta.put_u32(text.len() as u32);
    meta.extend(text.as_bytes());
    frame
}

/// The frame that ends a connection.
pub fn close_frame(error: &RequestError) -> Frame {
    error_frame(FrameType::Close, 0, error)
}

/// Decodes the error that is the meta of `frame`.
///
/// # Errors
/// The code is unknown, or a bound is violated.
pub fn decode_error(frame: &Received) -> Result<RequestError, WireError> {
    let reader = &mut Reader::new(&frame.meta);
    let number = reader.u16()?;
    let code =
        ErrorCode::from_number(number).ok_or_else(|| WireError::field("error code", number))?;
    reader.zeros::<2>()?;
    let retry_after_ms = reader.u32()?;
    let (group, value) = (GroupId(reader.u64()?), reader.u64()?);
    let leader = ServerId(reader.u32()?);
    let text_bytes = reader.u32()?;
    if text_bytes as usize > MAX_ERROR_TEXT_BYTES {
        return Err(WireError::field("length of an error's text", text_bytes));
    }
    let text: Bytes = reader.bytes(text_bytes as usize)?;
    let text = str::from_utf8(&text)
        .map_err(|error| WireError::field("text of an error", error.valid_up_to() as u64))?;
    reader.end_padded()?;
    Ok(RequestError {
        code,
        retry_after_ms,
        group,
        value,
        leader: (leader != ServerId(0)).then_some(leader),
        text: text.to_owned(),
    })
}
