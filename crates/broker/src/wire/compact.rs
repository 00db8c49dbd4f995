//! Fields of flexible versions: compact lengths, strings, tagged fields.

use anyhow::{Context as _, Result, bail};
use bytes::{BufMut, Bytes, BytesMut};
use kafka_protocol::protocol::buf::ByteBuf;
use kafka_protocol::protocol::{Encodable, StrBytes};

/// Takes a compact length; `None` is null.
pub(super) fn take_len(buf: &mut Bytes) -> Result<Option<usize>> {
    Ok(take_varint(buf)?.checked_sub(1).map(|len| len as usize))
}

fn take_varint(buf: &mut Bytes) -> Result<u32> {
    let mut value = 0;
    for shift in (0..35).step_by(7) {
        let byte = buf.try_get_bytes(1)?[0];
        value |= u32::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    bail!("a varint has more than five bytes")
}

/// Takes a nullable string.
pub(super) fn take_text(buf: &mut Bytes) -> Result<Option<StrBytes>> {
    let Some(len) = take_len(buf)? else { return Ok(None) };
    Ok(Some(StrBytes::from_utf8(buf.try_get_bytes(len)?)?))
}

/// Takes a nullable array. Allocates nothing for missing elements.
pub(super) fn take_array<T>(
    buf: &mut Bytes,
    mut take: impl FnMut(&mut Bytes) -> Result<T>,
) -> Result<Option<Vec<T>>> {
    let Some(len) = take_len(buf)? else { return Ok(None) };
    let mut elements = Vec::new();
    for _ in 0..len {
        elements.push(take(buf)?);
    }
    Ok(Some(elements))
}

/// Skips the tagged fields at the end of a structure; none is supported.
pub(super) fn skip_tagged(buf: &mut Bytes) -> Result<()> {
    for _ in 0..take_varint(buf)? {
        take_varint(buf)?;
        let len = take_varint(buf)?;
        buf.try_get_bytes(len as usize)?;
    }
    Ok(())
}

/// Refuses null in a field that must not be null.
pub(super) fn not_null<T>(value: Option<T>, field: &'static str) -> Result<T> {
    value.with_context(|| format!("{field} is null"))
}

/// Writes a compact length. Saturates: the check of the frame's length refuses longer ones.
pub(super) fn put_len(buffer: &mut impl BufMut, len: usize) {
    let mut value = u32::try_from(len + 1).unwrap_or(u32::MAX);
    while value >= 0x80 {
        buffer.put_u8(value as u8 | 0x80);
        value >>= 7;
    }
    buffer.put_u8(value as u8);
}

pub(super) fn put_text(buffer: &mut impl BufMut, text: Option<&StrBytes>) {
    match text {
        None => buffer.put_u8(0),
        Some(text) => {
            put_len(buffer, text.len());
            buffer.put_slice(text.as_bytes());
        }
    }
}

/// Ends a structure without tagged fields.
pub(super) fn put_no_tagged(buffer: &mut impl BufMut) {
    buffer.put_u8(0);
}

/// The length of a message. The trait requires it, but it is not called before encoding here.
pub(super) fn encoded_len<M: Encodable>(message: &M, version: i16) -> Result<usize> {
    let mut bytes = BytesMut::new();
    message.encode(&mut bytes, version)?;
    Ok(bytes.len())
}
