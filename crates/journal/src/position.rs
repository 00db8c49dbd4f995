//! Positions: of a journal among journals, of a record in a journal, and both in one word of the
//! index.

use std::fmt;

use alluvium_device::GRANULE_BYTES;

use crate::hash::{KeyHash, TAG_BITS};

/// The number of a journal of a cache; newer journals have larger numbers. (The next opening may
/// reuse the number of a journal without a record.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JournalNumber(pub u64);

impl fmt::Display for JournalNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl JournalNumber {
    /// Returns whether this journal is newer than that of `position`. Both must exist at the same
    /// time.
    pub(crate) fn is_behind(self, position: Position) -> bool {
        ahead(self.0, u64::from(position.short_number())).is_some_and(|ahead| ahead > 0)
    }
}

/// Returns by how much a truncated journal number is ahead of another one; `None` if the other one
/// is ahead.
fn ahead(number: u64, other: u64) -> Option<u64> {
    let ahead = number.wrapping_sub(other) & ((1 << NUMBER_BITS) - 1);
    (ahead < 1 << (NUMBER_BITS - 1)).then_some(ahead)
}

/// A position in a journal, in units of [`GRANULE_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Granule(pub(crate) u32);

impl Granule {
    pub(crate) fn at(byte: usize) -> Self {
        debug_assert!(byte.is_multiple_of(GRANULE_BYTES));
        Self(u32::try_from(byte / GRANULE_BYTES).expect("a journal has at most 1 GiB"))
    }

    pub(crate) fn byte(self) -> usize {
        self.0 as usize * GRANULE_BYTES
    }
}

/// The number of low bits of a journal's number that a position stores.
pub(crate) const NUMBER_BITS: u32 = 20;
/// The numbers of journals that exist at the same time differ by less than this: otherwise it could
/// not be determined which of two positions is newer.
pub(crate) const MAX_SPAN: u64 = 1 << (NUMBER_BITS - 1);
const GRANULE_BITS: u32 = 27;
const SIZE_BITS: u32 = 7;

const READ: u64 = 1;
const EXPIRES: u64 = 1 << 1;
const TAG_SHIFT: u32 = 2;
const SIZE_SHIFT: u32 = TAG_SHIFT + TAG_BITS;
const GRANULE_SHIFT: u32 = SIZE_SHIFT + SIZE_BITS;
const NUMBER_SHIFT: u32 = GRANULE_SHIFT + GRANULE_BITS;
const _: () = assert!(NUMBER_SHIFT + NUMBER_BITS == u64::BITS);

/// The position of the newest record of a key, as stored in the index: `docs/format/journal.md`,
/// section 4. Never 0 or 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position(pub(crate) u64);

impl Position {
    /// Creates the position of a record of `len_bytes`. `expires`: the record has a time to live.
    pub(crate) fn new(
        number: JournalNumber,
        first: Granule,
        len_bytes: usize,
        expires: bool,
        hash: KeyHash,
    ) -> Self {
        debug_assert!(first.0 > 0 && u64::from(first.0) < 1 << GRANULE_BITS);
        let number = number.0 & ((1 << NUMBER_BITS) - 1);
        let size = size_class(len_bytes.div_ceil(GRANULE_BYTES));
        Self(
            number << NUMBER_SHIFT
                | u64::from(first.0) << GRANULE_SHIFT
                | u64::from(size) << SIZE_SHIFT
                | hash.tag() << TAG_SHIFT
                | if expires { EXPIRES } else { 0 },
        )
    }

    /// Returns the stored bits of the journal's number.
    pub(crate) fn short_number(self) -> u32 {
        (self.0 >> NUMBER_SHIFT) as u32
    }

    pub(crate) fn is_in(self, number: JournalNumber) -> bool {
        u64::from(self.short_number()) == number.0 & ((1 << NUMBER_BITS) - 1)
    }

    pub(crate) fn first(self) -> Granule {
        Granule((self.0 >> GRANULE_SHIFT) as u32 & ((1 << GRANULE_BITS) - 1))
    }

    /// Returns an upper bound of the record's length.
    pub(crate) fn max_len_bytes(self) -> usize {
        class_granules((self.0 >> SIZE_SHIFT) as u32 & ((1 << SIZE_BITS) - 1)) * GRANULE_BYTES
    }

    pub(crate) fn tag(self) -> u64 {
        self.0 >> TAG_SHIFT & ((1 << TAG_BITS) - 1)
    }

    pub(crate) fn expires(self) -> bool {
        self.0 & EXPIRES != 0
    }

    pub(crate) fn was_read(self) -> bool {
        self.0 & READ != 0
    }

    pub(crate) fn marked_read(self) -> Self {
        Self(self.0 | READ)
    }

    /// Returns whether both are the same record, ignoring the bit that says whether it was read.
    pub(crate) fn is_same(self, other: Self) -> bool {
        (self.0 ^ other.0) & !READ == 0
    }

    /// Returns whether it is newer than `other`. Their journals must exist at the same time.
    pub(crate) fn is_newer(self, other: Self) -> bool {
        match ahead(self.short_number().into(), other.short_number().into()) {
            Some(0) => self.first() > other.first(),
            ahead => ahead.is_some(),
        }
    }
}

/// Returns the smallest class whose size is at least `granules`: four steps for each power of two.
fn size_class(granules: usize) -> u32 {
    if granules <= 4 {
        return granules as u32;
    }
    let top = granules.ilog2();
    let step = 1usize << (top - 2);
    let steps = granules.div_ceil(step) as u32; // 4 to 8
    (top - 1) * 4 + (steps - 4)
}

/// Returns the size of a class, in granules.
fn class_granules(class: u32) -> usize {
    if class <= 4 {
        return class as usize;
    }
    let top = class / 4 + 1;
    (4 + class as usize % 4) << (top - 2)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn size_classes_are_at_most_a_quarter_too_large() {
        for granules in (1..5000).chain((5000..1 << GRANULE_BITS).step_by(977)) {
            let class = size_class(granules);
            assert!(class < 1 << SIZE_BITS, "{granules}");
            let size = class_granules(class);
            assert!(
                size >= granules && size <= granules + granules / 4,
                "{granules}: {class}, {size}"
            );
            assert!(class == 0 || class_granules(class - 1) < granules, "{granules}: {class}");
        }
        let largest = 1 << GRANULE_BITS;
        assert_eq!(class_granules(size_class(largest)), largest);
    }

    proptest! {
        #[test]
        fn a_position_preserves_its_parts(
            number in any::<u64>(),
            first in 1u32..1 << GRANULE_BITS,
            len_bytes in 1usize..1 << 30,
            expires: bool,
            high in any::<u64>(),
        ) {
            let hash = KeyHash { high, fingerprint: 0 };
            let first = Granule(first);
            let position = Position::new(JournalNumber(number), first, len_bytes, expires, hash);
            prop_assert!(position.is_in(JournalNumber(number)));
            prop_assert!(!position.is_in(JournalNumber(number ^ 1)));
            prop_assert_eq!(position.first(), first);
            prop_assert!(position.max_len_bytes() >= len_bytes);
            prop_assert_eq!((position.tag(), position.expires()), (hash.tag(), expires));
            prop_assert!(!position.was_read() && position.marked_read().was_read());
            prop_assert!(position.is_same(position.marked_read()));
            prop_assert!(position.0 > 1);
        }

        #[test]
        fn a_position_is_newer_by_its_journal_then_by_its_granule(
            number in any::<u32>(),
            ahead in 0u64..1 << (NUMBER_BITS - 1),
            first in 1u32..1 << GRANULE_BITS,
            other in 1u32..1 << GRANULE_BITS,
        ) {
            let hash = KeyHash { high: 0, fingerprint: 0 };
            let number = u64::from(number);
            let old = Position::new(JournalNumber(number), Granule(first), 8, false, hash);
            let new = Position::new(JournalNumber(number + ahead), Granule(other), 8, false, hash);
            let is_newer = ahead > 0 || other > first;
            prop_assert_eq!(new.is_newer(old), is_newer);
            prop_assert_eq!(old.is_newer(new), ahead == 0 && first > other);
        }
    }
}
