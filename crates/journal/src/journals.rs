//! The table of all journals: from a place that the index names to the journal that has it.

#[cfg(all(test, loom))]
mod models;

use std::ops::Deref;

use crate::hash::KeyHash;
use crate::index::Index;
use crate::journal::Journal;
use crate::options::Options;
use crate::place::{JournalNumber, Place};
use crate::room::Room;
use crate::sync::{Arc, ArcSwapOption, Guard};

/// Journals by number. Readers take no lock.
pub(crate) struct Journals {
    /// By the lowest bits of the number.
    slots: Box<[ArcSwapOption<Journal>]>,
    /// How many times somebody has gone through all of them.
    #[cfg(all(test, not(loom)))]
    pub(crate) listings: std::sync::atomic::AtomicUsize,
    /// What they take on disk, and what is left.
    pub(crate) room: Room,
}

impl Journals {
    /// For up to `len` numbers in a row, a power of two, and as much room as the options give.
    pub(crate) fn new(len: usize, options: &Options, journal_bytes: usize) -> Self {
        assert!(len.is_power_of_two());
        let slots = (0..len).map(|_| ArcSwapOption::empty()).collect();
        Self {
            slots,
            #[cfg(all(test, not(loom)))]
            listings: Default::default(),
            room: Room::new(options.max_disk_bytes, journal_bytes, len),
        }
    }

    fn slot(&self, short_number: u64) -> &ArcSwapOption<Journal> {
        &self.slots[short_number as usize & (self.slots.len() - 1)]
    }

    /// The journal that `place` is in; `None` if it is gone.
    #[inline]
    pub(crate) fn of(&self, place: Place) -> Option<impl Deref<Target = Journal>> {
        let guard = self.slot(u64::from(place.short_number())).load();
        match &*guard {
            Some(journal) if place.is_in(journal.number) => Some(There(guard)),
            _ => None,
        }
    }

    /// The record of a key that the index has `named`, or names by now if the journal of that one
    /// has gone: its place, and the journal that it is in. `None`: there is none.
    #[inline]
    pub(crate) fn find(
        &self,
        index: &Index,
        hash: KeyHash,
        mut named: Option<Place>,
    ) -> Option<(Place, impl Deref<Target = Journal>)> {
        loop {
            let place = named?;
            if let Some(journal) = self.of(place) {
                return Some((place, journal));
            }
            // Gone between the two looks. The index had something else to say before that, so this
            // does not go on for ever.
            named = index.find(hash);
        }
    }

    /// The journal with this number, if it is there.
    pub(crate) fn get(&self, number: JournalNumber) -> Option<Arc<Journal>> {
        self.slot(number.0).load_full().filter(|journal| journal.number == number)
    }

    /// Whether a journal with this number would have a place.
    pub(crate) fn is_free(&self, number: JournalNumber) -> bool {
        self.slot(number.0).load().is_none()
    }

    /// Its place has to be free: [`Self::is_free`].
    pub(crate) fn put(&self, journal: Arc<Journal>) {
        self.room.add(journal.file_bytes);
        let old = self.slot(journal.number.0).swap(Some(journal));
        debug_assert!(old.is_none());
    }

    /// `new` in place of `old`, which is the same journal on another level, or in another file;
    /// nothing happens if somebody else was first.
    pub(crate) fn replace(&self, old: &Arc<Journal>, new: Arc<Journal>) {
        debug_assert_eq!(old.number, new.number);
        let new_bytes = new.file_bytes;
        let was = self.slot(old.number.0).compare_and_swap(&Some(old.clone()), Some(new));
        if (*was).as_ref().is_some_and(|was| Arc::ptr_eq(was, old)) {
            self.room.exchange(old.file_bytes, new_bytes);
        }
    }

    /// Nobody finds it any more; the room of its file is still taken.
    pub(crate) fn remove(&self, number: JournalNumber) -> Arc<Journal> {
        let old = self.slot(number.0).swap(None).expect("removed once, by whoever has the turn");
        debug_assert_eq!(old.number, number);
        old
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.room.journals()
    }

    fn slots(&self) -> impl Iterator<Item = &ArcSwapOption<Journal>> {
        #[cfg(all(test, not(loom)))]
        self.listings.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.slots.iter()
    }

    /// All, the oldest first.
    pub(crate) fn all(&self) -> Vec<Arc<Journal>> {
        let mut all: Vec<_> = self.slots().filter_map(ArcSwapOption::load_full).collect();
        all.sort_unstable_by_key(|journal| journal.number);
        all
    }

    /// The numbers of those that are there from `first` on, in their order.
    pub(crate) fn numbers_from(&self, first: JournalNumber) -> Vec<JournalNumber> {
        let mut numbers: Vec<_> = self.numbers().filter(|number| *number >= first).collect();
        numbers.sort_unstable();
        numbers
    }

    /// The oldest one's number.
    pub(crate) fn oldest(&self) -> Option<JournalNumber> {
        self.numbers().min()
    }

    /// The same beside one of them.
    pub(crate) fn oldest_but(&self, number: JournalNumber) -> Option<JournalNumber> {
        self.numbers().filter(|other| *other != number).min()
    }

    /// In no order. No journal is held by it: the memory of each has to come free when it is taken
    /// from it.
    fn numbers(&self) -> impl Iterator<Item = JournalNumber> {
        self.slots().filter_map(|slot| slot.load().as_ref().map(|journal| journal.number))
    }

    /// The record at `place` is not the newest of its key any more.
    pub(crate) fn forget(&self, place: Place) {
        if let Some(journal) = self.of(place) {
            journal.counts.forget(place);
        }
    }
}

/// A slot that is not empty.
struct There(Guard<Option<Arc<Journal>>>);

impl Deref for There {
    type Target = Journal;

    #[inline]
    fn deref(&self) -> &Journal {
        self.0.as_ref().expect("only made of a slot that is not empty")
    }
}
