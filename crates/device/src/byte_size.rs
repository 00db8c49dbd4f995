//! Sizes as text.

use std::fmt;

use crate::PAGE_BYTES;

/// A page, for error messages.
pub(crate) const PAGE: ByteSize = ByteSize(PAGE_BYTES as u64);

/// A number of bytes. Its text is exact, in the largest unit that divides it: `64MiB`, `4097B`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// The units, by falling size.
    pub const UNITS: [(&str, u64); 5] =
        [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(bytes) = *self;
        let divides = |factor: u64| bytes >= factor && bytes.is_multiple_of(factor);
        let unit = Self::UNITS.iter().find(|(_, factor)| divides(*factor));
        let (unit, factor) = unit.unwrap_or(&("B", 1));
        write!(f, "{}{unit}", bytes / factor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_the_largest_unit_that_divides() {
        let text = |bytes| ByteSize(bytes).to_string();
        assert_eq!([0, 1, 1023, 1025].map(text), ["0B", "1B", "1023B", "1025B"]);
        assert_eq!([1 << 10, 3 << 20, 5 << 30].map(text), ["1KiB", "3MiB", "5GiB"]);
        assert_eq!(text(1025 << 30), "1025GiB");
        assert_eq!(text(2 << 40), "2TiB");
        assert_eq!(text(u64::MAX), "18446744073709551615B");
    }
}
