//! Marks for the regions of a journal with records that the index no longer names:
//! `docs/journal-cache-design.md`, "Iteration".

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::position::Granule;

/// One bit covers the records that begin in this many bytes: at most 16 KiB of memory for a journal
/// of 128 MiB. Replacing a record accesses a random bit: with a bit for every 256 bytes the bits
/// did not fit the processor's cache, and a put took a fifth longer.
const UNIT_BYTES: usize = 1024;
const WORD_BITS: usize = u64::BITS as usize;
/// Bits for 4 MiB of a journal.
const PART_WORDS: usize = 64;
const PART_BYTES: usize = UNIT_BYTES * WORD_BITS * PART_WORDS;

/// The regions of a journal in which a record begins that has been replaced or removed. In all
/// others the index names each value.
///
/// Memory is allocated for every 4 MiB with such a record: with large values or few replacements,
/// marks for all regions would take more than the index.
#[derive(Debug)]
pub(crate) struct DeadMarks {
    parts: Box<[OnceLock<Box<Part>>]>,
    /// Number of allocated parts.
    made: AtomicUsize,
}

type Part = [AtomicU64; PART_WORDS];

impl DeadMarks {
    /// Creates marks for a journal of this many bytes, all clear.
    pub(crate) fn new(journal_bytes: usize) -> Self {
        let parts = (0..journal_bytes.div_ceil(PART_BYTES)).map(|_| OnceLock::new()).collect();
        Self { parts, made: AtomicUsize::new(0) }
    }

    /// Marks the record that begins at `first`, which the index no longer names. A thread that
    /// learns of this change by any other synchronisation sees the mark.
    pub(crate) fn mark(&self, first: Granule) {
        let part = self.parts[first.byte() / PART_BYTES].get_or_init(|| {
            self.made.fetch_add(1, Ordering::Relaxed);
            Box::new([const { AtomicU64::new(0) }; PART_WORDS])
        });
        let (word, bit) = word_and_bit(first);
        // In a mostly dead journal most bits are set already, and the cache line is then not
        // contended.
        if part[word].load(Ordering::Relaxed) & bit == 0 {
            part[word].fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// False if the index names the record that begins at `first`, provided that it is a value of a
    /// sealed journal.
    #[inline]
    pub(crate) fn may_be_dead(&self, first: Granule) -> bool {
        let Some(part) = self.parts[first.byte() / PART_BYTES].get() else { return false };
        let (word, bit) = word_and_bit(first);
        part[word].load(Ordering::Relaxed) & bit != 0
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        let made = self.made.load(Ordering::Relaxed);
        size_of_val::<[_]>(&self.parts) + made * size_of::<Part>()
    }
}

/// Returns the word of a part, and the bit in it, that marks a record.
#[inline]
fn word_and_bit(first: Granule) -> (usize, u64) {
    let unit = first.byte() % PART_BYTES / UNIT_BYTES;
    (unit / WORD_BITS, 1 << (unit % WORD_BITS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_covers_only_its_unit() {
        const JOURNAL_BYTES: usize = 3 * PART_BYTES + 4096;
        let dead = DeadMarks::new(JOURNAL_BYTES);
        assert!(dead.memory_bytes() < 100, "{}", dead.memory_bytes());
        let marked = [4096, 4096 + UNIT_BYTES - 8, 9000, PART_BYTES - 8, JOURNAL_BYTES - 8];
        for at in marked {
            dead.mark(Granule::at(at));
        }
        for at in (0..JOURNAL_BYTES).step_by(8) {
            let is_marked = marked.iter().any(|it| it / UNIT_BYTES == at / UNIT_BYTES);
            assert_eq!(dead.may_be_dead(Granule::at(at)), is_marked, "{at}");
        }
        // The first part, and the last one.
        let bytes = dead.memory_bytes() - DeadMarks::new(JOURNAL_BYTES).memory_bytes();
        assert_eq!(bytes, 2 * PART_BYTES / UNIT_BYTES / 8);
    }
}
