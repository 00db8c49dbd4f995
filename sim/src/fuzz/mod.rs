//! The checks of the fuzz targets in `fuzz/`, as functions of bytes. The same functions run as an
//! ordinary test, with a bounded number of inputs.
//!
//! Each takes arbitrary bytes, builds the image of a device or the history of a log from them, and
//! compares the behaviour of the WAL with a statement of `docs/format/wal.md` that shares no code
//! with it. A defect is an `Err` that describes it, or a panic.

mod header;
mod ledger;
mod meter;
mod record;
mod recovery;
mod reference;

pub use header::headers;
pub use record::records;
pub use recovery::{recovery, recovery_on};

/// The input bytes, from which all decisions are read. They are followed by zeros, so that every
/// input is complete.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next `len` bytes, or as many as are left.
    fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.bytes(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// A number below `bound`, which is positive, from as few bytes as that takes.
    fn below(&mut self, bound: u64) -> u64 {
        let number = match bound {
            ..=0x100 => u64::from(self.u8()),
            0x101..=0x1_0000 => u64::from(self.u16()),
            _ => u64::from(self.u32()),
        };
        number % bound
    }

    /// True once in `n` for random bytes, and false after the end.
    fn once_in(&mut self, n: u8) -> bool {
        self.u8() % n == 1
    }
}
