//! Page-aligned buffers: unique and writable, then shared and read-only.
//!
//! Direct I/O requires aligned memory, positions and lengths; here alignment is a property of the
//! type. A buffer has exactly one owner while it can be written ([`AlignedBuf`]); frozen
//! ([`SharedBuf`]) it can be shared, split and kept while the kernel reads it. Pooled memory
//! returns to its [`Pool`] when the last owner drops it.

#[cfg(test)]
mod tests;

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;

use crate::memory::Mapping;
use crate::sync::Mutex;

/// Unit of position and length of every request, and alignment of every buffer: 4 KiB, whatever the
/// device's logical block size (larger ones are refused).
pub const PAGE_BYTES: usize = 4096;

/// Rounds `len_bytes` up to whole pages. Panics on zero: an empty buffer can be neither read nor
/// written.
fn round_up(len_bytes: usize) -> usize {
    assert!(len_bytes > 0, "a buffer has at least one byte");
    len_bytes.checked_next_multiple_of(PAGE_BYTES).expect("length of a buffer overflows")
}

// -------------------------------------------------------------------------------------------------
// Memory

/// Page-aligned, initialised bytes on the heap. Freed on drop.
struct Heap {
    ptr: NonNull<u8>,
    layout: Layout,
}

impl Heap {
    /// Allocates `bytes` zeroes, a positive multiple of a page.
    fn zeroed(bytes: usize) -> Self {
        let layout = Self::layout(bytes);
        Self::try_zeroed(layout).unwrap_or_else(|| handle_alloc_error(layout))
    }

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, PAGE_BYTES).expect("length of a buffer overflows")
    }

    /// Allocates zeroes; `None` if there is no memory.
    fn try_zeroed(layout: Layout) -> Option<Self> {
        assert!(layout.size() > 0 && layout.size().is_multiple_of(PAGE_BYTES));
        // SAFETY: the size is not zero, by the assertion above.
        let ptr = unsafe { alloc_zeroed(layout) };
        Some(Self { ptr: NonNull::new(ptr)?, layout })
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated in `try_zeroed` with this very layout, and freed only here.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) }
    }
}

// SAFETY: plain memory that only this value owns; nothing about it is tied to a thread.
unsafe impl Send for Heap {}
// SAFETY: through `&Heap` bytes are only read (`SharedBuf`, `&AlignedBuf`); writing takes `&mut
// AlignedBuf`.
unsafe impl Sync for Heap {}

/// The memory of a buffer; the variant determines where it goes on drop.
enum Memory {
    /// Heap memory outside any pool; freed.
    Heap(Heap),
    /// Heap memory that returns to the pool if its bound allows, which saves the page faults of a
    /// fresh allocation. Always `Some` until dropped.
    Spare(Option<Heap>, Arc<Pool>),
    /// A slot of the pool's region, by index; unique to this value.
    Slot(usize, Arc<Pool>),
}

impl Memory {
    fn ptr(&self) -> NonNull<u8> {
        match self {
            Self::Heap(heap) | Self::Spare(Some(heap), _) => heap.ptr,
            Self::Spare(None, _) => unreachable!("taken by drop only"),
            Self::Slot(index, pool) => pool.slot(*index),
        }
    }

    fn capacity(&self) -> usize {
        match self {
            Self::Heap(heap) | Self::Spare(Some(heap), _) => heap.layout.size(),
            Self::Spare(None, _) => unreachable!("taken by drop only"),
            Self::Slot(_, pool) => pool.slot_bytes,
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match self {
            Self::Heap(_) => {} // frees itself
            Self::Spare(heap, pool) => pool.give_back_spare(heap.take().expect("taken only here")),
            Self::Slot(index, pool) => pool.free.lock().slots.push(*index),
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Buffers

/// A page-aligned buffer with one owner: writable, always initialised, its length a positive
/// multiple of [`PAGE_BYTES`].
pub struct AlignedBuf {
    memory: Memory,
    len: usize,
}

impl AlignedBuf {
    /// Allocates `len_bytes` (rounded up to a page) zeroes on the heap, outside any pool. Panics if
    /// `len_bytes` is zero.
    pub fn zeroed(len_bytes: usize) -> Self {
        let len = round_up(len_bytes);
        Self { memory: Memory::Heap(Heap::zeroed(len)), len }
    }

    /// Allocates like [`Self::zeroed`], but returns an error instead of aborting.
    ///
    /// # Errors
    /// The memory cannot be allocated ([`io::ErrorKind::OutOfMemory`]).
    pub fn try_zeroed(len_bytes: usize) -> io::Result<Self> {
        let len = round_up(len_bytes);
        match Heap::try_zeroed(Heap::layout(len)) {
            Some(heap) => Ok(Self { memory: Memory::Heap(heap), len }),
            None => Err(io::ErrorKind::OutOfMemory.into()),
        }
    }

    /// Keeps the first `len_bytes`. The memory behind them stays with the buffer and returns to the
    /// pool with it.
    ///
    /// Panics unless `len_bytes` is a positive multiple of a page and at most the present length.
    pub fn truncate(&mut self, len_bytes: usize) {
        assert!(
            len_bytes > 0 && len_bytes.is_multiple_of(PAGE_BYTES) && len_bytes <= self.len,
            "a buffer of {} bytes cannot be cut to {len_bytes}",
            self.len
        );
        self.len = len_bytes;
    }

    /// Makes the buffer read-only and shareable, without a copy.
    pub fn freeze(self) -> SharedBuf {
        SharedBuf { start: 0, len: self.len, memory: Arc::new(self.memory) }
    }

    /// Whether the memory is part of [`Pool::region`].
    pub(crate) fn registered(&self) -> bool {
        matches!(self.memory, Memory::Slot(..))
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `memory` holds `capacity >= len` initialised bytes and lives as long as the
        // borrow of `self`; they are written only through `&mut self`, or by the kernel while the
        // engine owns this value.
        unsafe { std::slice::from_raw_parts(self.memory.ptr().as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.memory.ptr().as_ptr(), self.len) }
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuf({} of {} bytes)", self.len, self.memory.capacity())
    }
}

/// A frozen buffer, or whole pages of one: read-only, cheap to clone.
#[derive(Clone)]
pub struct SharedBuf {
    memory: Arc<Memory>,
    start: usize,
    len: usize,
}

impl SharedBuf {
    /// Returns the pages `range` (in bytes) of this buffer, without a copy.
    ///
    /// Panics unless both ends are multiples of [`PAGE_BYTES`] inside the buffer and the range is
    /// not empty.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(
            range.start < range.end
                && range.end <= self.len
                && range.start.is_multiple_of(PAGE_BYTES)
                && range.end.is_multiple_of(PAGE_BYTES),
            "{range:?} is not a range of pages in a buffer of {} bytes",
            self.len
        );
        Self { memory: self.memory.clone(), start: self.start + range.start, len: range.len() }
    }

    /// Converts into [`Bytes`] without a copy. The memory returns to its pool when the last
    /// reference is dropped.
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }

    /// Whether the memory is part of [`Pool::region`].
    pub(crate) fn registered(&self) -> bool {
        matches!(*self.memory, Memory::Slot(..))
    }
}

impl Deref for SharedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` lies within the `capacity` bytes of `memory`, by `slice`.
        let ptr = unsafe { self.memory.ptr().add(self.start) };
        // SAFETY: so does `start + len`; all are initialised, and live as long as the borrow of
        // `self`. No code writes them: `freeze` consumed the unique `AlignedBuf`.
        unsafe { std::slice::from_raw_parts(ptr.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for SharedBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<AlignedBuf> for SharedBuf {
    fn from(buf: AlignedBuf) -> Self {
        buf.freeze()
    }
}

impl fmt::Debug for SharedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBuf({} bytes at {} of {})", self.len, self.start, self.memory.capacity())
    }
}

// -------------------------------------------------------------------------------------------------
// Pool

/// The buffers of one device: `slots` of `slot_bytes` in one mapping, which io_uring can register
/// as a whole. When they are exhausted, and for larger buffers, heap memory is used and kept for
/// reuse up to a bound in bytes. A fresh buffer costs more than filling it: the kernel has to find
/// and clear each of its pages.
///
/// Buffers keep the pool alive; the mapping is freed with the last of them.
pub(crate) struct Pool {
    /// `None` if there are no slots.
    region: Option<Mapping>,
    slot_bytes: usize,
    max_spare_bytes: usize,
    free: Mutex<Free>,
}

struct Free {
    slots: Vec<usize>,
    /// Spare buffers by size, a multiple of [`SPARE_STEP`].
    spares: BTreeMap<usize, Vec<Heap>>,
    /// Total size of the spares.
    spare_bytes: usize,
}

/// Heap buffers are sized in multiples of this, so that records of similar length can reuse each
/// other's buffers.
const SPARE_STEP: usize = 16 * PAGE_BYTES;

impl Pool {
    /// Creates a pool. `slot_bytes` is a positive multiple of a page.
    pub(crate) fn new(
        slot_bytes: usize,
        slots: usize,
        max_spare_bytes: usize,
    ) -> io::Result<Arc<Self>> {
        assert!(
            slot_bytes > 0 && slot_bytes.is_multiple_of(PAGE_BYTES),
            "a slot of {slot_bytes} bytes"
        );
        let bytes = slot_bytes.checked_mul(slots).expect("size of the pool overflows");
        let region = (bytes > 0).then(|| Mapping::zeroed(bytes)).transpose()?;
        let free = Free {
            // In reverse, so that low slots are used first and an idle pool touches little memory.
            slots: (0..slots).rev().collect(),
            spares: BTreeMap::new(),
            spare_bytes: 0,
        };
        Ok(Arc::new(Self { region, slot_bytes, max_spare_bytes, free: Mutex::new(free) }))
    }

    /// Allocates `len_bytes` rounded up to a page: a slot if it fits and one is free, otherwise
    /// heap memory.
    pub(crate) fn alloc(self: &Arc<Self>, len_bytes: usize) -> AlignedBuf {
        let len = round_up(len_bytes);
        let mut free = self.free.lock();
        if len <= self.slot_bytes
            && let Some(index) = free.slots.pop()
        {
            drop(free);
            return AlignedBuf { memory: Memory::Slot(index, self.clone()), len };
        }
        let size = len
            .max(self.slot_bytes)
            .checked_next_multiple_of(SPARE_STEP)
            .expect("length of a buffer overflows");
        let spare = free.spares.get_mut(&size).and_then(Vec::pop);
        free.spare_bytes -= spare.as_ref().map_or(0, |_| size);
        drop(free);
        let heap = spare.unwrap_or_else(|| Heap::zeroed(size));
        AlignedBuf { memory: Memory::Spare(Some(heap), self.clone()), len }
    }

    fn give_back_spare(&self, heap: Heap) {
        let size = heap.layout.size();
        let mut free = self.free.lock();
        if free.spare_bytes + size <= self.max_spare_bytes {
            free.spare_bytes += size;
            free.spares.entry(size).or_default().push(heap);
        }
    }

    /// The memory of all slots, to be registered with io_uring as one fixed buffer. `None` if there
    /// are no slots.
    pub(crate) fn region(&self) -> Option<(*mut u8, usize)> {
        self.region.as_ref().map(|region| (region.ptr().as_ptr(), region.len()))
    }

    fn slot(&self, index: usize) -> NonNull<u8> {
        let region = self.region.as_ref().expect("a slot belongs to a region");
        let at = index * self.slot_bytes;
        assert!(at < region.len());
        // SAFETY: inside the mapping, by the assertion.
        unsafe { region.ptr().add(at) }
    }
}
