//! Anonymous mappings for large, randomly accessed memory: aligned to huge pages, and advised to
//! use them.

use std::fmt;
use std::io;
use std::ops::Deref;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::sync::atomic::AtomicU64;
#[cfg(not(loom))]
use crate::sync::atomic::Ordering;

/// Size of a huge page on x86-64, and on AArch64 with 4 KiB pages.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Zeroed memory of the process, unmapped on drop.
pub(crate) struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
}

impl Mapping {
    /// Maps `len` zero bytes, a positive multiple of a page.
    pub(crate) fn zeroed(len: usize) -> io::Result<Self> {
        assert!(len > 0 && len.is_multiple_of(crate::PAGE_BYTES), "a mapping of {len} bytes");
        // SAFETY: with a null hint and without MAP_FIXED the kernel picks free address space, so no
        // existing mapping changes (mmap(2)).
        let ptr = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }?;
        let ptr = NonNull::new(ptr.cast()).expect("mmap without MAP_FIXED never maps address zero");
        Ok(Self { ptr, len })
    }

    /// Maps `len` zero bytes. From the size of a huge page on, the mapping is aligned to huge pages
    /// and asks for them; the system may ignore that.
    pub(crate) fn huge(len: usize) -> io::Result<Self> {
        if len < HUGE_PAGE_BYTES {
            return Self::zeroed(len);
        }
        let slack = HUGE_PAGE_BYTES;
        let whole = Self::zeroed(len.checked_add(slack).ok_or(io::ErrorKind::OutOfMemory)?)?;
        let start = whole.ptr;
        std::mem::forget(whole); // unmapped in three parts: two here, one by `mapping`
        let before = start.as_ptr().align_offset(HUGE_PAGE_BYTES);
        // SAFETY: `before` is less than the slack that was mapped in addition.
        let ptr = unsafe { start.add(before) };
        let mapping = Self { ptr, len };
        if before > 0 {
            // SAFETY: whole pages of the mapping made above, before the part that is kept; no code
            // has their address.
            unsafe { munmap(start.as_ptr().cast(), before) }?;
        }
        // SAFETY: the slack is larger than `before`, so `len` bytes from `ptr` on are mapped, and
        // more behind them.
        let end = unsafe { ptr.add(len) };
        // SAFETY: whole pages of the mapping made above, after the part that is kept; no code has
        // their address.
        unsafe { munmap(end.as_ptr().cast(), slack - before) }?;
        // SAFETY: advice about pages that are mapped and that this value owns; it does not change
        // their content.
        let advised = unsafe { madvise(ptr.as_ptr().cast(), len, Advice::LinuxHugepage) };
        if let Err(error) = advised {
            tracing::debug!("no huge pages for {len} bytes: {error}");
        }
        Ok(mapping)
    }

    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `zeroed`, `len` bytes of it kept, and unmapped only here. Code that
        // hands out addresses owns this value as long as they are used.
        let unmapped = unsafe { munmap(self.ptr.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

// SAFETY: address and length of a mapping that belongs to the process, not to a thread.
unsafe impl Send for Mapping {}
// SAFETY: `&Mapping` hands out an address and a length only.
unsafe impl Sync for Mapping {}

/// Starts to prefetch the cache line at an address. Unlike a load it does not stall, and atomic
/// operations do not wait for it. No effect on processors whose prefetch instruction is not in the
/// standard library.
#[inline]
pub(crate) fn prefetch(ptr: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint that never faults, whatever the address (Intel SDM, PREFETCHh); it belongs
        // to SSE, which is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ptr.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = ptr;
}

/// Atomic words, initially zero, in huge pages where available: for a large table with random
/// access.
#[cfg(not(loom))]
pub struct Words {
    mapping: Mapping,
    len: usize,
}

#[cfg(not(loom))]
impl Words {
    /// Allocates `len` zero words, at least one.
    ///
    /// # Errors
    /// The memory cannot be allocated.
    pub fn zeroed(len: usize) -> io::Result<Self> {
        assert!(len > 0, "a table needs at least one word");
        let bytes = len
            .checked_mul(size_of::<AtomicU64>())
            .and_then(|bytes| bytes.checked_next_multiple_of(crate::PAGE_BYTES))
            .ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { mapping: Mapping::huge(bytes)?, len })
    }

    /// Makes the system allocate the memory now instead of at the first writes, page by page as
    /// [`crate::Arena::populate`] does. Only for words that are still zero. Blocks, for 1 GiB about
    /// 0.1 s, or 2 s where a host has to find the memory for a virtual machine.
    pub fn populate(&mut self) {
        for word in self.iter().step_by(crate::PAGE_BYTES / size_of::<AtomicU64>()) {
            word.store(0, Ordering::Relaxed);
        }
    }

    /// Starts to prefetch the word at `index` into the processor's cache without waiting for it.
    #[inline]
    pub fn prefetch(&self, index: usize) {
        if let Some(word) = self.get(index) {
            prefetch(std::ptr::from_ref(word).cast());
        }
    }
}

#[cfg(not(loom))]
impl Deref for Words {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: `len` words lie in the mapping, aligned to a page and zeroed, which is a valid
        // `AtomicU64`; they live as long as the borrow, and there is no other access to them.
        unsafe { std::slice::from_raw_parts(self.mapping.ptr().as_ptr().cast(), self.len) }
    }
}

/// The model checker's variant: its atomics are not plain memory.
#[cfg(loom)]
pub struct Words(Box<[AtomicU64]>);

#[cfg(loom)]
impl Words {
    /// Allocates `len` zero words.
    pub fn zeroed(len: usize) -> io::Result<Self> {
        Ok(Self((0..len).map(|_| AtomicU64::new(0)).collect()))
    }

    /// No effect in a model.
    pub fn populate(&mut self) {}

    /// No effect in a model.
    pub fn prefetch(&self, _: usize) {}
}

#[cfg(loom)]
impl Deref for Words {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        &self.0
    }
}

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Words({})", self.len())
    }
}
