//! Disk space: how many journals the budget still permits, and for which write class. Why a cache
//! that may not evict does not stay full permanently: `docs/journal-cache-design.md`, "Full".

use parking_lot::Mutex;

use crate::options::WhenFull;

/// The class of an append. Each class leaves whole journals of the budget to the classes below it:
/// when puts have used up their share, keys can still be deleted, and when deletions have, journals
/// can still be compacted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteClass {
    /// Puts of users.
    Put,
    /// Deletions of users.
    Deletion,
    /// Tasks that make space: they may take the last journal.
    Maintenance,
}

/// The headroom that [`WriteClass::Put`] leaves, in journals.
const MAX_HEADROOM: usize = 3;

impl WriteClass {
    /// Returns the headroom that the class leaves in a cache that may not evict, in journals.
    pub(crate) fn headroom(self) -> usize {
        match self {
            Self::Put => MAX_HEADROOM,
            // One to write to, and one for the loss in moving records: they are written plain, and
            // a compressed file gives back less than a journal.
            Self::Deletion => 2,
            Self::Maintenance => 0,
        }
    }
}

/// Returns the disk space that hints leave free, since openings can do without them. In a cache
/// that may not evict: the headroom of puts and one journal more, since a hint may be as long as
/// its journal.
pub(crate) fn hint_headroom_bytes(when_full: WhenFull, journal_bytes: usize) -> u64 {
    match when_full {
        WhenFull::Evict => 0,
        WhenFull::Refuse => (MAX_HEADROOM + 1) as u64 * journal_bytes as u64,
    }
}

/// The disk budget, or less where the disk has less. Checks and changes happen under one lock, so
/// that no space is taken twice.
///
/// The journal created ahead of need, the *spare*, counts only once it takes over; reservations
/// leave the space of one journal for it.
pub(crate) struct DiskBudget {
    max_bytes: u64,
    journal_bytes: u64,
    /// The number of slots in the table of journals.
    slots: usize,
    taken: Mutex<Taken>,
}

#[derive(Clone, Copy, Default)]
struct Taken {
    journals: usize,
    file_bytes: u64,
    /// Reserved for files that are being written next to those that they replace.
    reserved_bytes: u64,
    /// The disk space for files of the cache at the last check: their size and the free space.
    disk_bytes: Option<u64>,
    /// A journal in `file_bytes` is being truncated, so that part of its space may already be free.
    has_removal: bool,
}

impl Taken {
    /// Returns what files may take.
    fn bound_bytes(&self, max_bytes: u64) -> u64 {
        self.disk_bytes.map_or(max_bytes, |disk_bytes| max_bytes.min(disk_bytes))
    }
}

impl DiskBudget {
    pub(crate) fn new(max_bytes: u64, journal_bytes: usize, slots: usize) -> Self {
        let journal_bytes = journal_bytes as u64;
        Self { max_bytes, journal_bytes, slots, taken: Mutex::default() }
    }

    /// Records the free space of the disk apart from the cache's files, of which the spare has
    /// `spare_bytes`. Other programs may use it up, so it is valid only at the time of the check.
    pub(crate) fn update_free_space(&self, free_bytes: u64, spare_bytes: u64) {
        let mut taken = self.taken.lock();
        let available_bytes = (taken.file_bytes + spare_bytes).saturating_add(free_bytes);
        taken.disk_bytes = match taken.has_removal {
            // Nothing is counted twice.
            true => taken.disk_bytes.map(|before| before.min(available_bytes)),
            false => Some(available_bytes),
        };
    }

    /// Records that the space of a journal becomes free gradually, until it is given back.
    pub(crate) fn begin_removal(&self) {
        self.taken.lock().has_removal = true;
    }

    /// Returns whether there is space for this many journals. Reserved space counts as free, since
    /// reservations may be given up at any time.
    pub(crate) fn permits(&self, journals: usize) -> bool {
        let taken = *self.taken.lock();
        self.fits(journals, &taken, taken.file_bytes)
    }

    /// Returns whether there is space for this many journals in addition to reserved space.
    pub(crate) fn permits_with_reservations(&self, journals: usize) -> bool {
        let taken = *self.taken.lock();
        self.fits(journals, &taken, taken.file_bytes + taken.reserved_bytes)
    }

    fn fits(&self, journals: usize, taken: &Taken, taken_bytes: u64) -> bool {
        taken_bytes + journals as u64 * self.journal_bytes <= taken.bound_bytes(self.max_bytes)
            && taken.journals + journals < self.slots
    }

    /// Returns the number of journals that there is space for, up to the largest headroom of a
    /// class.
    pub(crate) fn free_journals(&self) -> usize {
        (1..=MAX_HEADROOM).rev().find(|journals| self.permits(*journals)).unwrap_or(0)
    }

    /// Returns the bytes not taken by journals.
    pub(crate) fn free_bytes(&self) -> u64 {
        let taken = *self.taken.lock();
        taken.bound_bytes(self.max_bytes).saturating_sub(taken.file_bytes)
    }

    /// Reserves space until the returned guard is dropped; `None` if that would not leave the space
    /// of a journal.
    pub(crate) fn reserve(&self, bytes: u64) -> Option<Reservation<'_>> {
        let mut taken = self.taken.lock();
        let with_it = taken.file_bytes + taken.reserved_bytes + bytes;
        let leaves_one = with_it + self.journal_bytes <= taken.bound_bytes(self.max_bytes);
        leaves_one.then(|| {
            taken.reserved_bytes += bytes;
            Reservation { budget: self, bytes }
        })
    }

    pub(crate) fn has_reservation(&self) -> bool {
        self.taken.lock().reserved_bytes > 0
    }

    /// Counts a new journal.
    pub(crate) fn add(&self, file_bytes: u64) {
        let mut taken = self.taken.lock();
        taken.journals += 1;
        taken.file_bytes += file_bytes;
    }

    /// Counts a replacement of a journal's file.
    pub(crate) fn exchange(&self, old_bytes: u64, new_bytes: u64) {
        let mut taken = self.taken.lock();
        taken.file_bytes = taken.file_bytes + new_bytes - old_bytes;
    }

    /// Counts a removed journal.
    pub(crate) fn give_back(&self, file_bytes: u64) {
        let mut taken = self.taken.lock();
        taken.journals -= 1;
        taken.file_bytes -= file_bytes;
        taken.has_removal = false;
    }

    /// Returns the number of journals.
    pub(crate) fn journals(&self) -> usize {
        self.taken.lock().journals
    }

    /// Returns the disk space of journals.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.taken.lock().file_bytes
    }
}

/// A reservation for a file being written.
pub(crate) struct Reservation<'a> {
    budget: &'a DiskBudget,
    bytes: u64,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.budget.taken.lock().reserved_bytes -= self.bytes;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn write_classes_leave_headroom_and_reservations_count_once() {
        let budget = DiskBudget::new(8 << 20, 1 << 20, 64);
        (0..4).for_each(|_| budget.add(1 << 20));
        assert_eq!(budget.free_journals(), 3);
        assert!(budget.permits(1 + WriteClass::Put.headroom()) && !budget.permits(5));
        let reserve = budget.reserve(1 << 20).unwrap();
        assert!(
            budget.permits(4)
                && budget.permits_with_reservations(3)
                && !budget.permits_with_reservations(4)
        );
        let second = budget.reserve(2 << 20).unwrap();
        // The rest is for the spare.
        assert!(
            budget.reserve(1).is_none()
                && budget.permits_with_reservations(1)
                && !budget.permits_with_reservations(2)
        );
        drop((reserve, second));
        assert!(!budget.has_reservation() && budget.permits_with_reservations(4));
        budget.add(1 << 20);
        assert!(
            !budget.permits(1 + WriteClass::Put.headroom())
                && budget.permits(1 + WriteClass::Deletion.headroom())
        );
        budget.add(1 << 20);
        assert!(
            !budget.permits(1 + WriteClass::Deletion.headroom())
                && budget.permits(1 + WriteClass::Maintenance.headroom())
        );
        (0..2).for_each(|_| budget.add(1 << 20));
        assert_eq!(
            (budget.free_journals(), budget.permits(0), budget.permits(1)),
            (0, true, false)
        );
        budget.exchange(1 << 20, 1 << 18);
        assert_eq!((budget.free_journals(), budget.free_bytes()), (0, 3 << 18));
        budget.exchange(1 << 20, 1 << 18);
        assert_eq!(budget.free_journals(), 1);
        budget.give_back(1 << 18);
        assert_eq!(
            (budget.free_journals(), budget.journals(), budget.file_bytes()),
            (1, 7, (6 << 20) + (1 << 18))
        );
    }

    #[test]
    fn a_disk_smaller_than_the_budget_is_the_limit() {
        let budget = DiskBudget::new(8 << 20, 1 << 20, 64);
        (0..3).for_each(|_| budget.add(1 << 20));
        // The spare and two others.
        budget.update_free_space(2 << 20, 1 << 20);
        assert_eq!((budget.free_journals(), budget.free_bytes()), (3, 3 << 20));
        assert!(budget.permits(3) && !budget.permits(4));
        budget.add(1 << 20);
        assert_eq!(budget.free_journals(), 2);
        assert!(budget.reserve(1 << 20).is_some() && budget.reserve((1 << 20) + 1).is_none());
        budget.give_back(1 << 20);
        assert_eq!(budget.free_journals(), 3);
        // Space freed by a journal being removed is not counted twice.
        budget.begin_removal();
        budget.update_free_space(3 << 20, 1 << 20);
        assert_eq!((budget.free_journals(), budget.free_bytes()), (3, 3 << 20));
        budget.update_free_space(1 << 20, 1 << 20);
        assert_eq!((budget.free_journals(), budget.free_bytes()), (2, 2 << 20));
        budget.give_back(1 << 20);
        budget.update_free_space(2 << 20, 1 << 20);
        assert_eq!((budget.free_journals(), budget.free_bytes()), (3, 3 << 20));
        budget.add(1 << 20);
        budget.update_free_space(u64::MAX, 0);
        assert!(budget.permits(5) && !budget.permits(6));
    }

    #[test]
    fn the_table_has_a_slot_for_each_journal() {
        let budget = DiskBudget::new(u64::MAX >> 8, 1 << 20, 4);
        (0..2).for_each(|_| budget.add(1 << 20));
        assert!(budget.permits(1) && !budget.permits(2));
    }
}
