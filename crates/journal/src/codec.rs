//! Codecs for the frames of a cold journal: `docs/format/journal.md`, section 6.

use std::cell::RefCell;
use std::io;

use zstd::zstd_safe::{CCtx, CParameter, DCtx, SafeResult};

use crate::memory;
use crate::options::Compression;

/// How a frame is stored. The numbers are persisted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Codec {
    /// Uncompressed, because compression does not shorten it.
    Stored = 0,
    /// An LZ4 block, without LZ4's own frame.
    Lz4 = 1,
    Zstd = 2,
    /// Raw Snappy, without its framing.
    Snappy = 3,
}

thread_local! {
    /// Creating one costs more than decompressing a frame.
    static ZSTD: RefCell<Option<DCtx<'static>>> = const { RefCell::new(None) };
}

/// zstd's error code for lack of memory, as its functions return it.
const NO_MEMORY: usize = 64_usize.wrapping_neg();

/// Converts a result of zstd to the length that it produced, if it succeeded.
fn length(result: SafeResult) -> io::Result<Option<usize>> {
    match result {
        Ok(len) => Ok(Some(len)),
        Err(NO_MEMORY) => Err(io::ErrorKind::OutOfMemory.into()),
        Err(_) => Ok(None),
    }
}

fn decompress_zstd(from: &[u8], to: &mut [u8]) -> io::Result<Option<usize>> {
    memory::check()?;
    ZSTD.with_borrow_mut(|context| {
        if context.is_none() {
            *context = DCtx::try_create();
        }
        length(context.as_mut().map_or(Err(NO_MEMORY), |it| it.decompress(to, from)))
    })
}

impl Codec {
    pub(crate) fn of(number: u8) -> Option<Self> {
        [Self::Stored, Self::Lz4, Self::Zstd, Self::Snappy]
            .into_iter()
            .find(|codec| *codec as u8 == number)
    }

    /// Returns the option that selects it.
    pub(crate) fn name(self) -> Compression {
        match self {
            Self::Stored => Compression::None,
            Self::Lz4 => Compression::Lz4,
            Self::Zstd => Compression::Zstd,
            Self::Snappy => Compression::Snappy,
        }
    }

    /// Decompresses `from`; false if the result does not have exactly the length of `to`.
    ///
    /// # Errors
    /// There is no memory for it.
    pub(crate) fn decompress(self, from: &[u8], to: &mut [u8]) -> io::Result<bool> {
        let len = match self {
            Self::Stored if from.len() == to.len() => {
                to.copy_from_slice(from);
                Some(from.len())
            }
            Self::Stored => None,
            Self::Lz4 => lz4_flex::block::decompress_into(from, to).ok(),
            Self::Zstd => decompress_zstd(from, to)?,
            Self::Snappy => snap::raw::Decoder::new().decompress(from, to).ok(),
        };
        Ok(len == Some(to.len()))
    }
}

/// Compresses frames, one after the other.
pub(crate) enum Encoder {
    Lz4,
    Zstd(CCtx<'static>),
    Snappy(Box<snap::raw::Encoder>),
}

/// zstd's default.
const ZSTD_LEVEL: i32 = 3;

impl Encoder {
    /// Creates an encoder; `None` if nothing is to be compressed.
    ///
    /// # Errors
    /// There is no memory for it.
    pub(crate) fn new(compression: Compression) -> io::Result<Option<Self>> {
        Ok(match compression {
            Compression::None => None,
            Compression::Lz4 => Some(Self::Lz4),
            Compression::Zstd => {
                memory::check()?;
                let mut context = CCtx::try_create().ok_or(io::ErrorKind::OutOfMemory)?;
                length(context.set_parameter(CParameter::CompressionLevel(ZSTD_LEVEL)))?;
                Some(Self::Zstd(context))
            }
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

    /// Allocates the buffer for [`Self::compress`] of this many bytes.
    ///
    /// # Errors
    /// There is no memory for it.
    pub(crate) fn buffer(plain_bytes: usize) -> io::Result<Vec<u8>> {
        memory::zeroes(most_bytes(plain_bytes))
    }

    /// Compresses `from`; `None` if the result is not shorter. `buffer` is the buffer for it, which
    /// is enlarged as needed.
    ///
    /// # Errors
    /// There is no memory for it.
    pub(crate) fn compress<'r>(
        &mut self,
        from: &[u8],
        buffer: &'r mut Vec<u8>,
    ) -> io::Result<Option<&'r [u8]>> {
        let most = most_bytes(from.len());
        if buffer.len() < most {
            buffer.resize(most, 0);
        }
        let to = &mut buffer[..];
        let len = match self {
            Self::Lz4 => lz4_flex::block::compress_into(from, to).ok(),
            Self::Zstd(context) => length(context.compress2(to, from))?,
            Self::Snappy(encoder) => encoder.compress(from, to).ok(),
        };
        Ok(len.filter(|len| *len < from.len()).map(|len| &buffer[..len]))
    }
}

/// Returns an upper bound of the output for incompressible data: LZ4 adds a tenth and 20 bytes,
/// Snappy a sixth and 32, zstd a 256th and 64.
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
        fn compressed_data_is_decompressed(part in vec(any::<u8>(), 1..200), times in 1usize..200) {
            let plain = part.repeat(times);
            for compression in ALL {
                let mut encoder = Encoder::new(compression).unwrap().unwrap();
                let mut buffer = Vec::new();
                let Some(stored) = encoder.compress(&plain, &mut buffer).unwrap() else { continue };
                prop_assert!(stored.len() < plain.len());
                let mut back = vec![0xee; plain.len()];
                prop_assert!(encoder.codec().decompress(stored, &mut back).unwrap());
                prop_assert_eq!(&back, &plain);
                // With another length it must be refused.
                back.push(0);
                prop_assert!(!encoder.codec().decompress(stored, &mut back).unwrap());
                let short = plain.len() - 1;
                prop_assert!(!encoder.codec().decompress(stored, &mut back[..short]).unwrap());
            }
        }

        /// Data that passed its checksum by accident causes no panic, and nothing is written beyond
        /// `to`.
        #[test]
        fn arbitrary_bytes_are_refused_or_decompressed(
            bytes in vec(any::<u8>(), 0..300),
            len in 1usize..2000,
        ) {
            for codec in [Codec::Stored, Codec::Lz4, Codec::Zstd, Codec::Snappy] {
                let mut to = vec![0; len];
                codec.decompress(&bytes, &mut to).unwrap();
            }
        }
    }

    #[test]
    fn zstd_reports_lack_of_memory_by_this_number() {
        let name = zstd::zstd_safe::get_error_name(NO_MEMORY);
        assert_eq!(name, "Allocation error : not enough memory");
        // This thread has not decompressed anything yet.
        let mut to = [0; 10];
        memory::refuse(true);
        let decompressed = Codec::Zstd.decompress(b"whatever", &mut to);
        let made = Encoder::new(Compression::Zstd).map(drop);
        memory::refuse(false);
        for error in [decompressed.map(drop).unwrap_err(), made.unwrap_err()] {
            assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
        }
    }

    #[test]
    fn compressible_values_are_compressed() {
        for compression in ALL {
            let mut encoder = Encoder::new(compression).unwrap().unwrap();
            let plain = [b'x'; 16 << 10];
            let mut buffer = Vec::new();
            assert!(
                encoder.compress(&plain, &mut buffer).unwrap().unwrap().len() < 1200,
                "{compression}"
            );
            assert_eq!(Codec::of(encoder.codec() as u8), Some(encoder.codec()));
            assert_eq!(encoder.codec().name(), compression);
        }
        assert!(Encoder::new(Compression::None).unwrap().is_none());
        assert_eq!(Codec::of(4), None);
    }
}
