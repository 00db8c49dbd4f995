//! Where in a journal records are that the index does not name any more: `docs/journal-cache.md`, "Iteration".

use std::sync::atomic::{AtomicU64, Ordering};

use crate::place::Granule;

/// A bit stands for the records that begin in so many bytes: 64 KiB of memory for a journal of 128 MiB.
const UNIT_BYTES: usize = 256;
const WORD_BITS: usize = u64::BITS as usize;

/// The parts of a journal in which a record begins that has been replaced or removed. In all others the index names each value.
#[derive(Debug)]
pub(crate) struct Dead(Box<[AtomicU64]>);

impl Dead {
    /// None, in a journal of so many bytes.
    pub(crate) fn none(journal_bytes: usize) -> Self {
        let words = journal_bytes.div_ceil(UNIT_BYTES).div_ceil(WORD_BITS);
        Self((0..words).map(|_| AtomicU64::new(0)).collect())
    }

    /// The index does not name the record any more that begins at `first`. What is told to another thread afterwards by any other means, that thread finds here.
    pub(crate) fn mark(&self, first: Granule) {
        let (word, bit) = self.bit(first);
        // Most are there already when much of a journal is dead, and nobody has to wait for the line then.
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// False: the index names the record that begins at `first`, if it is a value of a sealed journal.
    #[inline]
    pub(crate) fn may_be(&self, first: Granule) -> bool {
        let (word, bit) = self.bit(first);
        word.load(Ordering::Relaxed) & bit != 0
    }

    #[inline]
    fn bit(&self, first: Granule) -> (&AtomicU64, u64) {
        let unit = first.byte() / UNIT_BYTES;
        (&self.0[unit / WORD_BITS], 1 << (unit % WORD_BITS))
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        size_of_val::<[_]>(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_covers_its_unit_alone() {
        const JOURNAL_BYTES: usize = 1 << 20;
        let dead = Dead::none(JOURNAL_BYTES);
        assert_eq!(dead.memory_bytes(), JOURNAL_BYTES / UNIT_BYTES / 8);
        let marked = [4096, 4096 + UNIT_BYTES - 8, 9000, JOURNAL_BYTES - 8];
        for at in marked {
            dead.mark(Granule::at(at));
        }
        for at in (0..JOURNAL_BYTES).step_by(8) {
            let is_marked = marked.iter().any(|it| it / UNIT_BYTES == at / UNIT_BYTES);
            assert_eq!(dead.may_be(Granule::at(at)), is_marked, "{at}");
        }
    }
}
