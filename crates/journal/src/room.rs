//! Room on disk: how many journals the budget still has, and for whom. Why a cache that may not
//! evict does not stay full for ever: `docs/journal-cache.md`, "Full".

use parking_lot::Mutex;

use crate::options::WhenFull;

/// Who appends. Each leaves whole journals of the budget to those below him: when puts have used up
/// what is theirs, keys can be deleted, and when deletions have, journals can be compacted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    /// Puts of users.
    User,
    /// Deletions of users.
    Deletion,
    /// What makes room: it may take the last journal.
    Maintenance,
}

/// What [`Who::User`] leaves.
const MOST_LEFT: usize = 3;

impl Who {
    /// Journals that he leaves in a cache that may not evict.
    pub(crate) fn leaves(self) -> usize {
        match self {
            Self::User => MOST_LEFT,
            // One to write to, and one for what that wastes: what is moved is written plain, and
            // its file, if it is compressed, gives back less than a journal.
            Self::Deletion => 2,
            Self::Maintenance => 0,
        }
    }
}

/// What a hint leaves of the disk: no opening needs one. In a cache that may not evict, what puts
/// leave and one more, since a hint may be as long as its journal.
pub(crate) fn hint_leaves_bytes(when_full: WhenFull, journal_bytes: usize) -> u64 {
    match when_full {
        WhenFull::Evict => 0,
        WhenFull::Refuse => (MOST_LEFT + 1) as u64 * journal_bytes as u64,
    }
}

/// The disk budget, or less where the disk itself has less. What is taken is looked at and changed
/// under one lock, so that no two take the same room.
///
/// The journal that is made before the newest one is full, the *spare*, is not in it before it
/// takes over; whoever sets something aside leaves the room of one journal for it.
pub(crate) struct Room {
    max_bytes: u64,
    journal_bytes: u64,
    /// For so many journals there are places in the table.
    places: usize,
    taken: Mutex<Taken>,
}

#[derive(Clone, Copy, Default)]
struct Taken {
    journals: usize,
    file_bytes: u64,
    /// Of files that are being made beside those that they replace.
    set_aside_bytes: u64,
    /// What the disk had when it was last looked at, for files of the cache: those that were there,
    /// and what was free.
    disk_bytes: Option<u64>,
    /// Of a journal that is among `file_bytes` some may be free already.
    is_removing: bool,
}

impl Taken {
    /// What files may take.
    fn bound_bytes(&self, max_bytes: u64) -> u64 {
        self.disk_bytes.map_or(max_bytes, |disk_bytes| max_bytes.min(disk_bytes))
    }
}

impl Room {
    pub(crate) fn new(max_bytes: u64, journal_bytes: usize, places: usize) -> Self {
        let journal_bytes = journal_bytes as u64;
        Self { max_bytes, journal_bytes, places, taken: Mutex::default() }
    }

    /// The disk has so much left beside the cache's files, of which `spare_bytes` are the spare's.
    /// Others may take it: what is told of the room is as true as this.
    pub(crate) fn see_disk(&self, free_bytes: u64, spare_bytes: u64) {
        let mut taken = self.taken.lock();
        let seen_bytes = (taken.file_bytes + spare_bytes).saturating_add(free_bytes);
        taken.disk_bytes = match taken.is_removing {
            // Nothing is counted twice.
            true => taken.disk_bytes.map(|before| before.min(seen_bytes)),
            false => Some(seen_bytes),
        };
    }

    /// The room of a journal comes free bit by bit, until it is given back.
    pub(crate) fn removing(&self) {
        self.taken.lock().is_removing = true;
    }

    /// Whether there is room for so many journals. What is set aside is taken for free: it may be
    /// given up at any time.
    pub(crate) fn has(&self, journals: usize) -> bool {
        let taken = *self.taken.lock();
        self.fits(journals, &taken, taken.file_bytes)
    }

    /// The same beside what is set aside.
    pub(crate) fn has_now(&self, journals: usize) -> bool {
        let taken = *self.taken.lock();
        self.fits(journals, &taken, taken.file_bytes + taken.set_aside_bytes)
    }

    fn fits(&self, journals: usize, taken: &Taken, taken_bytes: u64) -> bool {
        taken_bytes + journals as u64 * self.journal_bytes <= taken.bound_bytes(self.max_bytes)
            && taken.journals + journals < self.places
    }

    /// Whole journals that there is room for, as far as anybody has to leave some.
    pub(crate) fn left(&self) -> usize {
        (1..=MOST_LEFT).rev().find(|journals| self.has(*journals)).unwrap_or(0)
    }

    /// Bytes that no journal takes.
    pub(crate) fn free_bytes(&self) -> u64 {
        let taken = *self.taken.lock();
        taken.bound_bytes(self.max_bytes).saturating_sub(taken.file_bytes)
    }

    /// Set room aside until the return is dropped; `None` if it would not leave the room of a
    /// journal.
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

    /// A journal is there.
    pub(crate) fn add(&self, file_bytes: u64) {
        let mut taken = self.taken.lock();
        taken.journals += 1;
        taken.file_bytes += file_bytes;
    }

    /// A journal has another file.
    pub(crate) fn exchange(&self, old_bytes: u64, new_bytes: u64) {
        let mut taken = self.taken.lock();
        taken.file_bytes = taken.file_bytes + new_bytes - old_bytes;
    }

    /// A journal is gone.
    pub(crate) fn give_back(&self, file_bytes: u64) {
        let mut taken = self.taken.lock();
        taken.journals -= 1;
        taken.file_bytes -= file_bytes;
        taken.is_removing = false;
    }

    /// Journals that are there.
    pub(crate) fn journals(&self) -> usize {
        self.taken.lock().journals
    }

    /// What they take on disk.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.taken.lock().file_bytes
    }
}

/// Room for a file that is being made.
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
    fn who_comes_first_leaves_most_and_what_is_set_aside_is_taken_once() {
        let room = Room::new(8 << 20, 1 << 20, 64);
        (0..4).for_each(|_| room.add(1 << 20));
        assert_eq!(room.left(), 3);
        assert!(room.has(1 + Who::User.leaves()) && !room.has(5));
        let set_aside = room.set_aside(1 << 20).unwrap();
        assert!(room.has(4) && room.has_now(3) && !room.has_now(4));
        let second = room.set_aside(2 << 20).unwrap();
        // What is left is the spare's.
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
    fn a_disk_that_is_smaller_than_the_budget_is_what_there_is() {
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
        // What comes free of one that goes is not there twice.
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
    fn the_table_has_a_place_for_each() {
        let room = Room::new(u64::MAX >> 8, 1 << 20, 4);
        (0..2).for_each(|_| room.add(1 << 20));
        assert!(room.has(1) && !room.has(2));
    }
}
