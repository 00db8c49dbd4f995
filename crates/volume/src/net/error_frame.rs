//! Errors as the meta of frames. `docs/format/volume-wire.md`, section 5.

use bytes::Bytes;

use super::error::WireError;
use super::frame::{Frame, FrameType, Received};
use crate::fields::{Put, Reader};
use crate::request::{ErrorCode, MAX_ERROR_TEXT_BYTES, RequestError};
use crate::types::{GroupId, ServerId};

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
