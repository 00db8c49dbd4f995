//! The table of journals: from a position in the index to its journal.

#[cfg(all(test, loom))]
mod models;

use std::ops::Deref;

use crate::disk_budget::DiskBudget;
use crate::hash::KeyHash;
use crate::index::Index;
use crate::journal::Journal;
use crate::options::Options;
use crate::position::{JournalNumber, Position};
use crate::sync::{Arc, ArcSwapOption, Guard};

/// Journals by number. Readers take no lock.
pub(crate) struct Journals {
    /// Indexed by the lowest bits of the number.
    slots: Box<[ArcSwapOption<Journal>]>,
    /// Number of times that all journals were listed.
    #[cfg(all(test, not(loom)))]
    pub(crate) listings: std::sync::atomic::AtomicUsize,
    /// The disk space of the journals, and what is left.
    pub(crate) budget: DiskBudget,
}

impl Journals {
    /// Creates a table for up to `len` consecutive numbers, a power of two, with the disk budget of
    /// the options.
    pub(crate) fn new(len: usize, options: &Options, journal_bytes: usize) -> Self {
        assert!(len.is_power_of_two());
        let slots = (0..len).map(|_| ArcSwapOption::empty()).collect();
        Self {
            slots,
            #[cfg(all(test, not(loom)))]
            listings: Default::default(),
            budget: DiskBudget::new(options.max_disk_bytes, journal_bytes, len),
        }
    }

    fn slot(&self, short_number: u64) -> &ArcSwapOption<Journal> {
        &self.slots[short_number as usize & (self.slots.len() - 1)]
    }

    /// Returns the journal that `position` is in; `None` if it has been removed.
    #[inline]
    pub(crate) fn of(&self, position: Position) -> Option<impl Deref<Target = Journal>> {
        let guard = self.slot(u64::from(position.short_number())).load();
        match &*guard {
            Some(journal) if position.is_in(journal.number) => Some(JournalRef(guard)),
            _ => None,
        }
    }

    /// Returns position and journal of the record that the index has `named` for a key, or names
    /// now if the journal has been removed since. `None` if there is none.
    #[inline]
    pub(crate) fn find(
        &self,
        index: &Index,
        hash: KeyHash,
        mut named: Option<Position>,
    ) -> Option<(Position, impl Deref<Target = Journal>)> {
        loop {
            let position = named?;
            if let Some(journal) = self.of(position) {
                return Some((position, journal));
            }
            // Removed between the two lookups. The index was changed before that, so this loop
            // ends.
            named = index.find(hash);
        }
    }

    /// Returns the journal with this number, if it exists.
    pub(crate) fn get(&self, number: JournalNumber) -> Option<Arc<Journal>> {
        self.slot(number.0).load_full().filter(|journal| journal.number == number)
    }

    /// Returns whether the slot for this number is free.
    pub(crate) fn is_free(&self, number: JournalNumber) -> bool {
        self.slot(number.0).load().is_none()
    }

    /// Adds a journal. Its slot must be free: [`Self::is_free`].
    pub(crate) fn put(&self, journal: Arc<Journal>) {
        self.budget.add(journal.file_bytes);
        let old = self.slot(journal.number.0).swap(Some(journal));
        debug_assert!(old.is_none());
    }

    /// Replaces `old` by `new`, which is the same journal on another level or in another file; has
    /// no effect if another thread replaced it first.
    pub(crate) fn replace(&self, old: &Arc<Journal>, new: Arc<Journal>) {
        debug_assert_eq!(old.number, new.number);
        let new_bytes = new.file_bytes;
        let was = self.slot(old.number.0).compare_and_swap(&Some(old.clone()), Some(new));
        if (*was).as_ref().is_some_and(|was| Arc::ptr_eq(was, old)) {
            self.budget.exchange(old.file_bytes, new_bytes);
        }
    }

    /// Removes a journal from the table. The space of its file stays counted.
    pub(crate) fn remove(&self, number: JournalNumber) -> Arc<Journal> {
        let old = self.slot(number.0).swap(None).expect("removed once, by one thread at a time");
        debug_assert_eq!(old.number, number);
        old
    }

    /// Returns the number of journals.
    pub(crate) fn len(&self) -> usize {
        self.budget.journals()
    }

    fn slots(&self) -> impl Iterator<Item = &ArcSwapOption<Journal>> {
        #[cfg(all(test, not(loom)))]
        self.listings.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.slots.iter()
    }

    /// Returns all journals, oldest first.
    pub(crate) fn all(&self) -> Vec<Arc<Journal>> {
        let mut all: Vec<_> = self.slots().filter_map(ArcSwapOption::load_full).collect();
        all.sort_unstable_by_key(|journal| journal.number);
        all
    }

    /// Returns the numbers of the journals from `first` on, in order.
    pub(crate) fn numbers_from(&self, first: JournalNumber) -> Vec<JournalNumber> {
        let mut numbers: Vec<_> = self.numbers().filter(|number| *number >= first).collect();
        numbers.sort_unstable();
        numbers
    }

    /// Returns the number of the oldest journal.
    pub(crate) fn oldest(&self) -> Option<JournalNumber> {
        self.numbers().min()
    }

    /// Returns the number of the oldest journal other than `number`.
    pub(crate) fn oldest_but(&self, number: JournalNumber) -> Option<JournalNumber> {
        self.numbers().filter(|other| *other != number).min()
    }

    /// Returns the numbers, in no order. It holds no journal: the memory of each must be released
    /// when it is taken away.
    fn numbers(&self) -> impl Iterator<Item = JournalNumber> {
        self.slots().filter_map(|slot| slot.load().as_ref().map(|journal| journal.number))
    }

    /// Records that the record at `position` is no longer the newest of its key.
    pub(crate) fn mark_dead(&self, position: Position) {
        if let Some(journal) = self.of(position) {
            journal.counts.mark_dead(position);
        }
    }
}

/// The journal of an occupied slot.
struct JournalRef(Guard<Option<Arc<Journal>>>);

impl Deref for JournalRef {
    type Target = Journal;

    #[inline]
    fn deref(&self) -> &Journal {
        self.0.as_ref().expect("only made of a slot that is not empty")
    }
}
