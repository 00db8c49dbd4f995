//! Objects of format version 1, as earlier versions have written them.

use bytes::{Bytes, BytesMut};

use super::index::{IndexPlace, encode_entries};
use super::{FOOTER_BYTES, Footer, HEADER_BYTES, VERSION_1, Whole, encode_header};

/// Returns the object of format version 1 with the nonce and the blocks of an intact object.
pub(crate) fn version_1(bytes: &Bytes) -> Bytes {
    let Whole { nonce, blocks, .. } = Whole::open(bytes.clone()).unwrap();
    let data_end = blocks.last().map_or(HEADER_BYTES as u64, super::Block::position_end);
    let mut object = BytesMut::from(&encode_header(VERSION_1, nonce)[..]);
    object.extend_from_slice(&bytes[HEADER_BYTES..usize::try_from(data_end).unwrap()]);
    let index_at = object.len();
    encode_entries(&blocks, &mut object);
    let index = IndexPlace {
        format: VERSION_1,
        position: data_end,
        len_bytes: (object.len() - index_at) as u64,
        crc32c: crc32c::crc32c(&object[index_at..]),
    };
    let footer = Footer { index, nonce, directory_bytes: 0, blocks: 0, directory_crc32c: 0 };
    object.extend_from_slice(&footer.encode());
    assert_eq!(object.len(), index_at + blocks.len() * 56 + FOOTER_BYTES);
    object.freeze()
}
