//! Where the entries of a group are in the write-ahead log, as far as a trim has to know it.

use std::collections::VecDeque;

use alluvium_wal::LogOffset;

/// The records with entries of one group, oldest first, each with the last index that the group's
/// log has from it.
#[derive(Clone, Debug, Default)]
pub(super) struct Extents(VecDeque<(u64, LogOffset)>);

impl Extents {
    /// Adds a record whose entries end at `last`.
    pub(super) fn push(&mut self, last: u64, at: LogOffset) {
        self.0.push_back((last, at));
    }

    /// Notes that the entries from `first` on are overwritten. A record holds the trim back only
    /// for those of its entries that are left.
    pub(super) fn overwrite(&mut self, first: u64) {
        for (last, _) in &mut self.0 {
            *last = (*last).min(first - 1);
        }
    }

    /// Drops the records without an entry above `base`.
    pub(super) fn release(&mut self, base: u64) {
        self.0.retain(|(last, _)| *last > base);
    }

    /// Drops all records.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// The oldest record that still has an entry.
    pub(super) fn oldest(&self) -> Option<LogOffset> {
        self.0.iter().map(|(_, at)| *at).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overwritten_entries_do_not_hold_the_trim_back() {
        let mut extents = Extents::default();
        extents.push(4, LogOffset(100));
        extents.push(9, LogOffset(200));
        // Another leader replaces the entries 3 to 9 by a shorter suffix.
        extents.overwrite(3);
        extents.push(3, LogOffset(300));
        extents.release(2);
        assert_eq!(extents.oldest(), Some(LogOffset(300)));
    }

    #[test]
    fn a_record_is_kept_while_one_of_its_entries_is_above_the_base() {
        let mut extents = Extents::default();
        extents.push(4, LogOffset(100));
        extents.push(9, LogOffset(200));
        extents.release(3);
        assert_eq!(extents.oldest(), Some(LogOffset(100)));
        extents.release(4);
        assert_eq!(extents.oldest(), Some(LogOffset(200)));
        extents.clear();
        assert_eq!(extents.oldest(), None);
    }
}
