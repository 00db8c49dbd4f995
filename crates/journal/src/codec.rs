//! What compresses the frames of a cold journal: `docs/format/journal.md`, section 6.

use std::cell::RefCell;
use std::io;

use crate::memory;
use crate::options::Compression;

/// How a frame is stored. The numbers stand in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Codec {
    /// As it is: compressing makes it no shorter.
    Stored = 0,
    /// An LZ4 block, without LZ4's own frame.
    Lz4 = 1,
    Zstd = 2,
    /// Raw Snappy, without its framing.
    Snappy = 3,
}

thread_local! {
    /// Making one costs more than decompressing a frame.
    static ZSTD: RefCell<zstd::bulk::Decompressor<'static>> = RefCell::default();
}

impl Codec {
    pub(crate) fn of(number: u8) -> Option<Self> {
        [Self::Stored, Self::Lz4, Self::Zstd, Self::Snappy]
            .into_iter()
            .find(|codec| *codec as u8 == number)
    }

    /// What a user calls it.
    pub(crate) fn name(self) -> Compression {
        match self {
            Self::Stored => Compression::None,
            Self::Lz4 => Compression::Lz4,
            Self::Zstd => Compression::Zstd,
            Self::Snappy => Compression::Snappy,
        }
    }

    /// Undo the compression; false if it does not give exactly what `to` has room for.
    pub(crate) fn decompress(self, from: &[u8], to: &mut [u8]) -> bool {
        let len = match self {
            Self::Stored if from.len() == to.len() => {
                to.copy_from_slice(from);
                Some(from.len())
            }
            Self::Stored => None,
            Self::Lz4 => lz4_flex::block::decompress_into(from, to).ok(),
            Self::Zstd => ZSTD.with_borrow_mut(|it| it.decompress_to_buffer(from, to)).ok(),
            Self::Snappy => snap::raw::Decoder::new().decompress(from, to).ok(),
        };
        len == Some(to.len())
    }
}

/// Compresses frames, one after the other.
pub(crate) enum Encoder {
    Lz4,
    Zstd(zstd::bulk::Compressor<'static>),
    Snappy(Box<snap::raw::Encoder>),
}

/// zstd's own default.
const ZSTD_LEVEL: i32 = 3;

impl Encoder {
    /// `None`: nothing is to be compressed.
    ///
    /// # Errors
    /// There is no memory for it.
    pub(crate) fn new(compression: Compression) -> io::Result<Option<Self>> {
        Ok(match compression {
            Compression::None => None,
            Compression::Lz4 => Some(Self::Lz4),
            Compression::Zstd => Some(Self::Zstd(zstd::bulk::Compressor::new(ZSTD_LEVEL)?)),
            Compression::Snappy => Some(Self::Snappy(Box::new(snap::raw::Encoder::new()))),
        })
    }

    pub(crate) fn codec(&self) -> Codec {
        match self {
            Self::Lz4 => Codec::Lz4,
            Self::Zstd(_) => Codec::Zstd,
            Self::Snappy(_) => Codec::Snappy,
        }
    }

    /// Memory for [`Self::compress`] of so many bytes.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn room(plain_bytes: usize) -> io::Result<Vec<u8>> {
        memory::zeroes(most_bytes(plain_bytes))
    }

    /// `from` in fewer bytes; `None` if there is no such thing. `room` is memory for it, which is made as large as it has to be.
    pub(crate) fn compress<'r>(&mut self, from: &[u8], room: &'r mut Vec<u8>) -> Option<&'r [u8]> {
        let most = most_bytes(from.len());
        if room.len() < most {
            room.resize(most, 0);
        }
        let to = &mut room[..];
        let len = match self {
            Self::Lz4 => lz4_flex::block::compress_into(from, to).ok(),
            Self::Zstd(encoder) => encoder.compress_to_buffer(from, to).ok(),
            Self::Snappy(encoder) => encoder.compress(from, to).ok(),
        };
        let len = len.filter(|len| *len < from.len())?;
        Some(&room[..len])
    }
}

/// More than any of them makes of what can not be compressed: LZ4 a tenth and 20 bytes, Snappy a sixth and 32, zstd a 256th and 64.
fn most_bytes(plain_bytes: usize) -> usize {
    plain_bytes + plain_bytes / 4 + 256
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const ALL: [Compression; 3] = [Compression::Lz4, Compression::Zstd, Compression::Snappy];

    proptest! {
        #[test]
        fn what_is_compressed_comes_back(part in vec(any::<u8>(), 1..200), times in 1usize..200) {
            let plain = part.repeat(times);
            for compression in ALL {
                let mut encoder = Encoder::new(compression).unwrap().unwrap();
                let mut room = Vec::new();
                let Some(stored) = encoder.compress(&plain, &mut room) else { continue };
                prop_assert!(stored.len() < plain.len());
                let mut back = vec![0xee; plain.len()];
                prop_assert!(encoder.codec().decompress(stored, &mut back));
                prop_assert_eq!(&back, &plain);
                // Of another length it is something else.
                back.push(0);
                prop_assert!(!encoder.codec().decompress(stored, &mut back));
                let short = plain.len() - 1;
                prop_assert!(!encoder.codec().decompress(stored, &mut back[..short]));
            }
        }

        /// Whatever the checksum in front of it let through: no panic, no byte beyond `to`.
        #[test]
        fn nonsense_is_refused_or_decompressed(bytes in vec(any::<u8>(), 0..300), len in 1usize..2000) {
            for codec in [Codec::Stored, Codec::Lz4, Codec::Zstd, Codec::Snappy] {
                let mut to = vec![0; len];
                codec.decompress(&bytes, &mut to);
            }
        }
    }

    #[test]
    fn what_compresses_well_does() {
        for compression in ALL {
            let mut encoder = Encoder::new(compression).unwrap().unwrap();
            let plain = [b'x'; 16 << 10];
            let mut room = Vec::new();
            assert!(encoder.compress(&plain, &mut room).unwrap().len() < 1200, "{compression}");
            assert_eq!(Codec::of(encoder.codec() as u8), Some(encoder.codec()));
            assert_eq!(encoder.codec().name(), compression);
        }
        assert!(Encoder::new(Compression::None).unwrap().is_none());
        assert_eq!(Codec::of(4), None);
    }
}
