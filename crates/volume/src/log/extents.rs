//! Where the entries of a replica are in the log, as far as a trim has to know it.

use std::collections::VecDeque;

use alluvium_wal::LogOffset;

use crate::types::Index;

/// The records with entries of one replica, oldest first, each with the last index that the
/// replica's log has from it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extents(VecDeque<(Index, LogOffset)>);

impl Extents {
    /// Adds a record with the entries `first` to `last`. Those from `first` on are replaced, and a
    /// record holds the trim back only for those of its entries that are left.
    pub(crate) fn push(&mut self, first: Index, last: Index, at: LogOffset) {
        // The last indexes ascend, so only records at the end are affected.
        for (known, _) in self.0.iter_mut().rev() {
            if *known < first {
                break;
            }
            *known = Index(first.0 - 1);
        }
        self.0.push_back((last, at));
    }

    /// Drops the records without an entry above `base`.
    pub(crate) fn release(&mut self, base: Index) {
        self.0.retain(|(last, _)| *last > base);
    }

    /// Drops all records.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// The oldest record that still has an entry.
    pub(crate) fn oldest(&self) -> Option<LogOffset> {
        self.0.front().map(|(_, at)| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaced_entries_do_not_hold_the_trim_back() {
        let mut extents = Extents::default();
        extents.push(Index(1), Index(4), LogOffset(100));
        extents.push(Index(5), Index(9), LogOffset(200));
        // Another leader replaces the entries 3 to 9 by a shorter end.
        extents.push(Index(3), Index(3), LogOffset(300));
        extents.release(Index(2));
        assert_eq!(extents.oldest(), Some(LogOffset(300)));
    }

    #[test]
    fn a_record_is_kept_while_one_of_its_entries_is_above_the_base() {
        let mut extents = Extents::default();
        extents.push(Index(1), Index(4), LogOffset(100));
        extents.push(Index(5), Index(9), LogOffset(200));
        extents.release(Index(3));
        assert_eq!(extents.oldest(), Some(LogOffset(100)));
        extents.release(Index(4));
        assert_eq!(extents.oldest(), Some(LogOffset(200)));
        extents.clear();
        assert_eq!(extents.oldest(), None);
    }
}
