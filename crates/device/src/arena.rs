//! Memory that many threads append to without a lock while others read it.
//!
//! Each granule of 8 bytes goes through three states: *free*; *taken*, by the one [`Reservation`]
//! that may write it; *published*, after which it never changes. A bit per granule marks the
//! published ones, and [`Arena::read`] returns published granules only: a byte that may still be
//! written is never visible.

#[cfg(all(test, loom))]
mod models;
#[cfg(all(test, not(loom)))]
mod tests;

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;

use crate::PAGE_BYTES;
use crate::memory::{Mapping, prefetch};
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Unit of positions in an [`Arena`].
pub const GRANULE_BYTES: usize = 8;

const CACHE_LINE_BYTES: usize = 64;
/// The processor's own prefetcher continues beyond these bytes.
const PREFETCHED_BYTES: usize = 256;
/// Granules per word of the published bitmap.
const WORD_BITS: usize = u64::BITS as usize;

/// The value of [`Taken::end`] until a reservation finds the arena full.
const OPEN: usize = usize::MAX;

/// Memory that is appended to without a lock and read without a copy. See the module documentation.
pub struct Arena {
    mapping: Mapping,
    /// Whether the system has allocated all of the memory.
    is_populated: bool,
    taken: Taken,
    /// Granules below this index are published, whatever the bits say.
    sealed: AtomicUsize,
    /// The published bitmap: one bit per granule.
    published: Box<[AtomicU64]>,
    /// Represents the granules' bytes for the model checker, which observes only its own cells.
    #[cfg(loom)]
    cells: Box<[loom::cell::UnsafeCell<()>]>,
}

/// The fields that writers change, in a cache line of their own so that readers of published bytes
/// do not contend for it.
#[repr(align(64))]
struct Taken {
    /// Number of granules taken; keeps growing when the arena is full.
    tail: AtomicUsize,
    /// End of the granules taken, once the arena is full; [`OPEN`] before.
    end: AtomicUsize,
}

// SAFETY: the mapping's bytes are accessed through `Reservation`, which is unique for its granules,
// until it publishes them, and through `read` after that.
unsafe impl Sync for Arena {}
// SAFETY: no field is tied to a thread.
unsafe impl Send for Arena {}

impl Arena {
    /// Creates an empty arena of `capacity_bytes`, a positive multiple of [`PAGE_BYTES`].
    ///
    /// # Errors
    /// The memory cannot be allocated.
    pub fn new(capacity_bytes: usize) -> io::Result<Self> {
        let mapping = Mapping::huge(capacity_bytes)?;
        let words = (capacity_bytes / GRANULE_BYTES).div_ceil(WORD_BITS);
        Ok(Self {
            mapping,
            is_populated: false,
            taken: Taken { tail: AtomicUsize::new(0), end: AtomicUsize::new(OPEN) },
            sealed: AtomicUsize::new(0),
            published: (0..words).map(|_| AtomicU64::new(0)).collect(),
            #[cfg(loom)]
            cells: (0..capacity_bytes / GRANULE_BYTES)
                .map(|_| loom::cell::UnsafeCell::new(()))
                .collect(),
        })
    }

    /// Makes the system allocate all memory now instead of at the first writes. Blocks the first
    /// time, about 50 ms for 128 MiB, and then panics if the arena is not empty.
    ///
    /// It touches page by page instead of calling `madvise(MADV_POPULATE_WRITE)`, which holds the
    /// lock of the process's address space throughout, so that any thread that maps or unmaps
    /// memory waits for it; since Linux 6.4 a fault takes only the lock of its own mapping.
    pub fn populate(&mut self) {
        if std::mem::replace(&mut self.is_populated, true) {
            return;
        }
        assert_eq!(self.taken_bytes(), Some(0), "the arena must be empty");
        for page in self.memory().chunks_mut(PAGE_BYTES) {
            page[0] = 0;
        }
    }

    /// Starts to prefetch the first `len_bytes` at `at_bytes` (256 at most) into the processor's
    /// cache without waiting for them.
    #[inline]
    pub fn prefetch(&self, at_bytes: usize, len_bytes: usize) {
        let end = (at_bytes + len_bytes.min(PREFETCHED_BYTES)).min(self.capacity_bytes());
        for at in (at_bytes..end).step_by(CACHE_LINE_BYTES) {
            prefetch(self.mapping.ptr().as_ptr().wrapping_add(at));
        }
    }

    /// The capacity in bytes.
    pub fn capacity_bytes(&self) -> usize {
        self.mapping.len()
    }

    fn granules(&self) -> usize {
        self.capacity_bytes() / GRANULE_BYTES
    }

    /// Takes the next `len_bytes`, rounded up to granules, for writing. Returns `None` if they are
    /// not free; the arena is then full and refuses every further reservation, smaller ones
    /// included.
    ///
    /// Costs one atomic addition. Panics on zero bytes.
    #[inline]
    pub fn reserve(&self, len_bytes: usize) -> Option<Reservation<'_>> {
        assert!(len_bytes > 0, "a reservation has at least one byte");
        // Repeated calls must not overflow the counter.
        if self.taken.end.load(Ordering::Relaxed) != OPEN {
            return None;
        }
        let granules = len_bytes.div_ceil(GRANULE_BYTES).min(self.granules() + 1);
        let first = self.taken.tail.fetch_add(granules, Ordering::Relaxed);
        if first.saturating_add(granules) <= self.granules() {
            return Some(Reservation { arena: self, first, granules, len_bytes });
        }
        self.found_full(first);
        None
    }

    /// Refuses further reservations. Existing ones may still be published.
    pub fn close(&self) {
        if self.taken.end.load(Ordering::Relaxed) != OPEN {
            return;
        }
        let first = self.taken.tail.fetch_add(self.granules() + 1, Ordering::Relaxed);
        self.found_full(first);
    }

    /// Records the end of the arena: the first reservation that does not fit determines it. All
    /// earlier ones did fit, and all later ones start beyond the capacity.
    #[cold]
    fn found_full(&self, first: usize) {
        // `first` is at most the capacity for exactly one caller: the one whose addition moved the
        // tail beyond it.
        if first <= self.granules() {
            self.taken.end.store(first, Ordering::Release);
        }
    }

    /// The end of the bytes taken so far. `None` in the short interval between a reservation
    /// finding the arena full and recording its end.
    pub fn taken_bytes(&self) -> Option<usize> {
        let tail = self.taken.tail.load(Ordering::Acquire);
        let end = self.taken.end.load(Ordering::Acquire);
        let is_known = end != OPEN || tail <= self.granules();
        is_known.then(|| tail.min(end) * GRANULE_BYTES)
    }

    /// The end of the bytes that are or will be published, once the arena is full or closed.
    pub fn end_bytes(&self) -> Option<usize> {
        let end = self.taken.end.load(Ordering::Acquire);
        (end != OPEN).then(|| end * GRANULE_BYTES)
    }

    /// Returns the bytes of `range` if all of it is published.
    #[inline]
    pub fn read(&self, range: Range<usize>) -> Option<&[u8]> {
        if range.start > range.end || range.end > self.capacity_bytes() {
            return None;
        }
        let (first, end) = (range.start / GRANULE_BYTES, range.end.div_ceil(GRANULE_BYTES));
        if end > self.sealed.load(Ordering::Acquire) && !self.are_published(first, end) {
            return None;
        }
        #[cfg(loom)]
        self.cells[first..end].iter().for_each(|cell| cell.with(|_| ()));
        // SAFETY: `range` lies in the mapping, by the first check.
        let ptr = unsafe { self.mapping.ptr().add(range.start) };
        // SAFETY: all granules of the range are published, by a bit or by `sealed`, read with
        // Acquire; so their writer is done (it published with Release after its last write, and
        // gave up its `Reservation`), and no other code can ever write them: `reserve` hands out
        // each granule once, and `reset` and `memory` take `&mut self`, which ends this borrow.
        Some(unsafe { std::slice::from_raw_parts(ptr.as_ptr(), range.len()) })
    }

    fn are_published(&self, first: usize, end: usize) -> bool {
        masks(first, end)
            .all(|(word, mask)| self.published[word].load(Ordering::Acquire) & mask == mask)
    }

    /// Returns the end, in bytes, of the contiguous published range that starts at `from_bytes` (a
    /// multiple of [`GRANULE_BYTES`]); `from_bytes` itself if its granule is not published.
    pub fn published_from(&self, from_bytes: usize) -> usize {
        let mut at = from_bytes / GRANULE_BYTES;
        let limit = self.granules();
        while at < limit {
            let word = self.published[at / WORD_BITS].load(Ordering::Acquire) >> (at % WORD_BITS);
            let left = WORD_BITS - at % WORD_BITS;
            let run = (word.trailing_ones() as usize).min(left);
            at += run;
            if run < left {
                break;
            }
        }
        at.min(limit) * GRANULE_BYTES
    }

    /// Whether the arena is full or closed, and completely published. Once this has returned true,
    /// reads no longer check the bitmap.
    pub fn try_seal(&self) -> bool {
        let end = self.taken.end.load(Ordering::Acquire);
        if end == OPEN {
            return false;
        }
        let from = self.sealed.load(Ordering::Acquire);
        let is_complete =
            from >= end || self.published_from(from * GRANULE_BYTES) >= end * GRANULE_BYTES;
        if is_complete {
            self.sealed.store(end, Ordering::Release);
        }
        is_complete
    }

    /// Empties the arena. Its bytes stay until they are overwritten, but cannot be read.
    pub fn reset(&mut self) {
        // Freshly allocated words would be cheaper than this loop only if there were many. They
        // take 1/64 of the memory, and are in the processor's cache afterwards.
        for word in &self.published {
            word.store(0, Ordering::Relaxed);
        }
        self.sealed.store(0, Ordering::Relaxed);
        self.taken.end.store(OPEN, Ordering::Relaxed);
        self.taken.tail.store(0, Ordering::Relaxed);
    }

    /// All of its memory, for an exclusive owner, who calls [`Self::seal`] or `reset` afterwards.
    pub fn memory(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has that many initialised bytes, and `&mut self` is the only access:
        // every slice and reservation borrows the arena.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.ptr().as_ptr(), self.mapping.len()) }
    }

    /// Publishes exactly the first `len_bytes` (a multiple of [`GRANULE_BYTES`]) and refuses
    /// further reservations.
    pub fn seal(&mut self, len_bytes: usize) {
        assert!(
            len_bytes <= self.capacity_bytes() && len_bytes.is_multiple_of(GRANULE_BYTES),
            "an arena of {} bytes cannot be sealed at {len_bytes}",
            self.capacity_bytes()
        );
        let granules = len_bytes / GRANULE_BYTES;
        self.taken.tail.store(self.granules() + 1, Ordering::Relaxed);
        self.taken.end.store(granules, Ordering::Relaxed);
        self.sealed.store(granules, Ordering::Relaxed);
    }

    fn publish(&self, first: usize, end: usize) {
        for (word, mask) in masks(first, end) {
            self.published[word].fetch_or(mask, Ordering::Release);
        }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({} bytes)", self.capacity_bytes())
    }
}

/// The words of the bitmap, and the bits in each, of the granules from `first` to before `end`.
#[inline]
fn masks(first: usize, end: usize) -> impl Iterator<Item = (usize, u64)> {
    let mut at = first;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let (word, bit) = (at / WORD_BITS, at % WORD_BITS);
            let bits = (end - at).min(WORD_BITS - bit);
            at += bits;
            (word, (u64::MAX >> (WORD_BITS - bits)) << bit)
        })
    })
}

/// Bytes of an [`Arena`] that belong to one writer. If it is dropped without [`Self::publish`],
/// these bytes stay unreadable for ever, and a wait for all bytes before a later position never
/// ends; only a panic should cause that.
pub struct Reservation<'a> {
    arena: &'a Arena,
    first: usize,
    granules: usize,
    len_bytes: usize,
}

impl Reservation<'_> {
    /// The position of its first byte.
    pub fn at(&self) -> usize {
        self.first * GRANULE_BYTES
    }

    /// Publishes the bytes: they become readable and never change again.
    #[inline]
    pub fn publish(mut self) {
        let (len, padded) = (self.len_bytes, self.granules * GRANULE_BYTES);
        if len < padded {
            // The padding up to a granule: a reused arena holds old bytes there.
            self.padded()[len..].fill(0);
        }
        self.arena.publish(self.first, self.first + self.granules);
    }

    fn ptr(&self) -> NonNull<u8> {
        // SAFETY: `reserve` has checked that the granules are within the capacity.
        unsafe { self.arena.mapping.ptr().add(self.at()) }
    }

    fn padded(&mut self) -> &mut [u8] {
        #[cfg(loom)]
        self.arena.cells[self.first..self.first + self.granules]
            .iter()
            .for_each(|cell| cell.with_mut(|_| ()));
        // SAFETY: these granules lie in the mapping, were taken by this value alone (the addition
        // in `reserve` gives each granule once), and are not published, so no reader has them.
        unsafe {
            std::slice::from_raw_parts_mut(self.ptr().as_ptr(), self.granules * GRANULE_BYTES)
        }
    }
}

impl Deref for Reservation<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: as in `padded`; `&self` only reads.
        unsafe { std::slice::from_raw_parts(self.ptr().as_ptr(), self.len_bytes) }
    }
}

impl DerefMut for Reservation<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        let len = self.len_bytes;
        &mut self.padded()[..len]
    }
}

impl fmt::Debug for Reservation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reservation({} bytes at {})", self.len_bytes, self.at())
    }
}

const _: () = assert!(PAGE_BYTES.is_multiple_of(GRANULE_BYTES));
