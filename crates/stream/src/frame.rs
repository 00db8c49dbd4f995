//! Compression: one zstd frame that states the length of its content.

use std::io::Read;

use bytes::Bytes;
use zstd::stream::read::Decoder;
use zstd::zstd_safe::{find_frame_compressed_size, get_frame_content_size};

use crate::damage::{Damage, DecodeError};

/// The first bytes of a frame (RFC 8878).
const MAGIC: [u8; 4] = 0xFD2F_B528_u32.to_le_bytes();
/// Fast, and within a few percent of slower levels for these bytes.
const LEVEL: i32 = 1;
/// Allocated before anything was decompressed, at most: the stated length may be wrong.
const TRUSTED_BYTES: u64 = 16 << 20;

/// Returns the frame of `content`.
pub(crate) fn compress(content: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(content, LEVEL).expect("zstd compresses into memory")
}

/// Returns the content of a frame, which has at most `most` bytes.
pub(crate) fn decompress(frame: &[u8], most: u64) -> Result<Bytes, DecodeError> {
    let damaged = |reason: String| Err(Damage::of_all(reason).into());
    let stated = match get_frame_content_size(frame) {
        // There are also frames with content that is skipped.
        Ok(Some(stated)) if frame.starts_with(&MAGIC) => stated,
        _ => return damaged("it is no zstd frame that states its length".into()),
    };
    if stated > most {
        return damaged(format!("its content has {stated} bytes, more than {most}"));
    }
    if find_frame_compressed_size(frame) != Ok(frame.len()) {
        return damaged("it is not exactly one zstd frame".into());
    }
    let mut content = Vec::with_capacity(stated.min(TRUSTED_BYTES) as usize);
    let decoder = Decoder::with_buffer(frame);
    match decoder.and_then(|decoder| decoder.take(stated + 1).read_to_end(&mut content)) {
        Ok(_) if content.len() as u64 == stated => Ok(content.into()),
        Ok(_) => damaged(format!("its content has not the {stated} bytes that it states")),
        Err(error) => damaged(format!("it cannot be decompressed: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_has_its_content_and_nothing_else_is_one() {
        let content: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
        let frame = compress(&content);
        assert!(frame.len() < content.len());
        let most = content.len() as u64;
        assert_eq!(decompress(&frame, most).unwrap(), content);
        assert_eq!(decompress(&compress(&[]), 0).unwrap(), Bytes::new());
        assert!(decompress(&frame, most - 1).is_err(), "more than is allowed");
        assert!(decompress(&[&frame[..], &frame].concat(), most).is_err(), "two frames");
        assert!(decompress(&[&frame[..], &[0]].concat(), most).is_err(), "a byte after it");
        for length in [0, 1, 5, frame.len() / 2, frame.len() - 1] {
            assert!(decompress(&frame[..length], most).is_err(), "{length} bytes");
        }
        let skipped = [&[0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0][..], b"abcd"].concat();
        assert!(decompress(&skipped, most).is_err(), "content that is skipped");
        // A stream without a stated length.
        let unsized_frame = zstd::stream::encode_all(&content[..], LEVEL).unwrap();
        assert!(decompress(&unsized_frame, most).is_err());
    }
}
