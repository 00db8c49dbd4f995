//! Disk space: how many journals the budget still permits, and for which write class. Why a cache
//! that may not evict does not stay full permanently: `docs/journal-cache-design.md`, "Full".

use parking_lot::Mutex;

use crate::options::WhenFull;

/// The class of an append. Each class leaves whole journals of the budget to the classes below it:
/// when puts have used up their share, keys can still be deleted, and when deletions have, journals
/// can still be compacted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    /// Puts of users.
    User,
    /// Deletions of users.
    Deletion,
    /// Tasks that make space: they may take the last journal.
    Maintenance,
}

/// The headroom that [`Who::User`] leaves, in journals.
const MOST_LEFT: usize = 3;

impl Who {
    /// Returns the headroom that the class leaves in a cache that may not evict, in journals.
    pub(crate) fn leaves(self) -> usize {
        match self {
            Self::User => MOST_LEFT,
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
pub(crate) fn hint_leaves_bytes(when_full: WhenFull, journal_bytes: usize) -> u64 {
    match when_full {
        WhenFull::Evict => 0,
        WhenFull::Refuse => (MOST_LEFT + 1) as u64 * journal_bytes as u64,
    }
}

/// The disk budget, or less where the disk has less. Checks and changes happen under one lock, so
/// that no space is taken twice.
///
/// The journal created ahead of need, the *spare*, counts only once it takes over; reservations
/// leave the space of one journal for it.
pub(crate) struct Room {
    max_bytes: u64,
    journal_bytes: u64,
    /// The number of slots in the table of journals.
    places: usize,
    taken: Mutex<Taken>,
}

#[derive(Clone, Copy, Default)]
struct Taken {
    journals: usize,
    file_bytes: u64,
    /// Reserved for files that are being written next to those that they replace.
    set_aside_bytes: u64,
    /// The disk space for files of the cache at the last check: their size and the free space.
    disk_bytes: Option<u64>,
    /// A journal in `file_bytes` is being truncated, so that part of its space may already be free.
    is_removing: bool,
}

impl Taken {
    /// Returns what files may take.
    fn bound_bytes(&self, max_bytes: u64) -> u64 {
        self.disk_bytes.map_or(max_bytes, |disk_bytes| max_bytes.min(disk_bytes))
    }
}

impl Room {
    pub(crate) fn new(max_bytes: u64, journal_bytes: usize, places: usize) -> Self {
        let journal_bytes = journal_bytes as u64;
        Self { max_bytes, journal_bytes, places, taken: Mutex::default() }
    }

    /// Records the free space of the disk apart from the cache's files, of which the spare has
    /// `spare_bytes`. Other programs may use it up, so it is valid only at the time of the check.
    pub(crate) fn see_disk(&self, free_bytes: u64, spare_bytes: u64) {
        let mut taken = self.taken.lock();
        let seen_bytes = (taken.file_bytes + spare_bytes).saturating_add(free_bytes);
        taken.disk_bytes = match taken.is_removing {
            // Nothing is counted twice.
            true => taken.disk_bytes.map(|before| before.min(seen_bytes)),
            false => Some(seen_bytes),
        };
    }

    /// Records that the space of a journal becomes free gradually, until it is given back.
    pub(crate) fn removing(&self) {
        self.taken.lock().is_removing = true;
    }

    /// Returns whether there is space for this many journals. Reserved space counts as free, since
    /// reservations may be given up at any time.
    pub(crate) fn has(&self, journals: usize) -> bool {
        let taken = *self.taken.lock();
        self.fits(journals, &taken, taken.file_bytes)
    }

    /// Returns whether there is space for this many journals in addition to reserved space.
    pub(crate) fn has_now(&self, journals: usize) -> bool {
        let taken = *self.taken.lock();
        self.fits(journals, &taken, taken.file_bytes + taken.set_aside_bytes)
    }

    fn fits(&self, journals: usize, taken: &Taken, taken_bytes: u64) -> bool {
        taken_bytes + journals as u64 * self.journal_bytes <= taken.bound_bytes(self.max_bytes)
            && taken.journals + journals < self.places
    }

    /// Returns the number of journals that there is space for, up to the largest headroom of a
    /// class.
    pub(crate) fn left(&self) -> usize {
        (1..=MOST_LEFT).rev().find(|journals| self.has(*journals)).unwrap_or(0)
    }

    /// Returns the bytes not taken by journals.
    pub(crate) fn free_bytes(&self) -> u64 {
        let taken = *self.taken.lock();
        taken.bound_bytes(self.max_bytes).saturating_sub(taken.file_bytes)
    }

    /// Reserves space until the returned guard is dropped; `None` if that would not leave the space
    /// of a journal.
    pub(crate) fn set_aside(&self, bytes: u64) -> Option<SetAside<'_>> {
        let mut taken = self.taken.lock();
        let with_it = taken.file_bytes + taken.set_aside_bytes + bytes;
        let leaves_one = with_it + self.journal_bytes <= taken.bound_bytes(self.max_bytes);
        leaves_one.then(|| {
            taken.set_aside_bytes += bytes;
            SetAside { room: self, bytes }
        })
    }

    pub(crate) fn is_set_aside(&self) -> bool {
        self.taken.lock().set_aside_bytes > 0
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
        taken.is_removing = false;
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
pub(crate) struct SetAside<'a> {
    room: &'a Room,
    bytes: u64,
}

impl Drop for SetAside<'_> {
    fn drop(&mut self) {
        self.room.taken.lock().set_aside_bytes -= self.bytes;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn write_classes_leave_headroom_and_reservations_count_once() {
        let room = Room::new(8 << 20, 1 << 20, 64);
        (0..4).for_each(|_| room.add(1 << 20));
        assert_eq!(room.left(), 3);
        assert!(room.has(1 + Who::User.leaves()) && !room.has(5));
        let set_aside = room.set_aside(1 << 20).unwrap();
        assert!(room.has(4) && room.has_now(3) && !room.has_now(4));
        let second = room.set_aside(2 << 20).unwrap();
        // The rest is for the spare.
        assert!(room.set_aside(1).is_none() && room.has_now(1) && !room.has_now(2));
        drop((set_aside, second));
        assert!(!room.is_set_aside() && room.has_now(4));
        room.add(1 << 20);
        assert!(!room.has(1 + Who::User.leaves()) && room.has(1 + Who::Deletion.leaves()));
        room.add(1 << 20);
        assert!(!room.has(1 + Who::Deletion.leaves()) && room.has(1 + Who::Maintenance.leaves()));
        (0..2).for_each(|_| room.add(1 << 20));
        assert_eq!((room.left(), room.has(0), room.has(1)), (0, true, false));
        room.exchange(1 << 20, 1 << 18);
        assert_eq!((room.left(), room.free_bytes()), (0, 3 << 18));
        room.exchange(1 << 20, 1 << 18);
        assert_eq!(room.left(), 1);
        room.give_back(1 << 18);
        assert_eq!(
            (room.left(), room.journals(), room.file_bytes()),
            (1, 7, (6 << 20) + (1 << 18))
        );
    }

    #[test]
    fn a_disk_smaller_than_the_budget_is_the_limit() {
        let room = Room::new(8 << 20, 1 << 20, 64);
        (0..3).for_each(|_| room.add(1 << 20));
        // The spare and two others.
        room.see_disk(2 << 20, 1 << 20);
        assert_eq!((room.left(), room.free_bytes()), (3, 3 << 20));
        assert!(room.has(3) && !room.has(4));
        room.add(1 << 20);
        assert_eq!(room.left(), 2);
        assert!(room.set_aside(1 << 20).is_some() && room.set_aside((1 << 20) + 1).is_none());
        room.give_back(1 << 20);
        assert_eq!(room.left(), 3);
        // Space freed by a journal being removed is not counted twice.
        room.removing();
        room.see_disk(3 << 20, 1 << 20);
        assert_eq!((room.left(), room.free_bytes()), (3, 3 << 20));
        room.see_disk(1 << 20, 1 << 20);
        assert_eq!((room.left(), room.free_bytes()), (2, 2 << 20));
        room.give_back(1 << 20);
        room.see_disk(2 << 20, 1 << 20);
        assert_eq!((room.left(), room.free_bytes()), (3, 3 << 20));
        room.add(1 << 20);
        room.see_disk(u64::MAX, 0);
        assert!(room.has(5) && !room.has(6));
    }

    #[test]
    fn the_table_has_a_slot_for_each_journal() {
        let room = Room::new(u64::MAX >> 8, 1 << 20, 4);
        (0..2).for_each(|_| room.add(1 << 20));
        assert!(room.has(1) && !room.has(2));
    }
}
