//! Anonymous mappings for what is large and read at random: aligned to huge pages, and asking for
//! them.

use std::fmt;
use std::io;
use std::ops::Deref;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::sync::atomic::AtomicU64;
#[cfg(not(loom))]
use crate::sync::atomic::Ordering;

/// Of x86-64, and of AArch64 with pages of 4 KiB.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Zeroed memory of the process, unmapped on drop.
pub(crate) struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
}

impl Mapping {
    /// `len` bytes, a positive multiple of a page.
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

    /// The same; from the size of a huge page on it begins at a multiple of one and asks for huge
    /// pages, which the system may ignore.
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
            // SAFETY: whole pages of the mapping made above, in front of what is kept; nobody has
            // their address.
            unsafe { munmap(start.as_ptr().cast(), before) }?;
        }
        // SAFETY: the slack is larger than `before`, so `len` bytes from `ptr` on are mapped, and
        // more behind them.
        let end = unsafe { ptr.add(len) };
        // SAFETY: whole pages of the mapping made above, behind what is kept; nobody has their
        // address.
        unsafe { munmap(end.as_ptr().cast(), slack - before) }?;
        // SAFETY: advice about pages that are mapped and that this value owns; it changes nothing
        // that they hold.
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
        // SAFETY: mapped by `zeroed`, `len` bytes of it kept, and unmapped only here. Whoever has
        // handed out addresses owned this value as long as they were used.
        let unmapped = unsafe { munmap(self.ptr.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

// SAFETY: address and length of a mapping that belongs to the process, not to a thread.
unsafe impl Send for Mapping {}
// SAFETY: `&Mapping` hands out an address and a length only.
unsafe impl Sync for Mapping {}

/// Begin to bring what lies at an address into the processor's cache. Unlike a load it waits for
/// nothing, and atomic operations do not wait for it. Nothing happens on processors whose
/// instruction for it is not in the standard library.
#[inline]
pub(crate) fn prefetch(ptr: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint, without a fault whatever the address (Intel SDM, PREFETCHh); SSE, which
        // it belongs to, is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ptr.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = ptr;
}

/// Atomic words in huge pages where the system has them: a large table that is looked up at random.
/// Fresh ones are zero.
#[cfg(not(loom))]
pub struct Words {
    mapping: Mapping,
    len: usize,
}

#[cfg(not(loom))]
impl Words {
    /// `len` zeroes, more than none.
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn zeroed(len: usize) -> io::Result<Self> {
        assert!(len > 0, "a table has at least one word");
        let bytes = len
            .checked_mul(size_of::<AtomicU64>())
            .and_then(|bytes| bytes.checked_next_multiple_of(crate::PAGE_BYTES))
            .ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { mapping: Mapping::huge(bytes)?, len })
    }

    /// Have the system find the memory now, and not when it is written to first; page by page, as
    /// [`crate::Arena::populate`] says. For words that are still zero. Blocks, some 0.1 s for 1
    /// GiB, or 2 s where a host has to find them for a virtual machine.
    pub fn populate(&mut self) {
        for word in self.iter().step_by(crate::PAGE_BYTES / size_of::<AtomicU64>()) {
            word.store(0, Ordering::Relaxed);
        }
    }

    /// Begin to bring the word at `index` into the processor's cache, without waiting for it.
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
        // `AtomicU64`; they live as long as the borrow, and nobody reaches them in another way.
        unsafe { std::slice::from_raw_parts(self.mapping.ptr().as_ptr().cast(), self.len) }
    }
}

/// The same for a model checker, whose atomics are no plain memory.
#[cfg(loom)]
pub struct Words(Box<[AtomicU64]>);

#[cfg(loom)]
impl Words {
    /// `len` zeroes.
    pub fn zeroed(len: usize) -> io::Result<Self> {
        Ok(Self((0..len).map(|_| AtomicU64::new(0)).collect()))
    }

    /// A model's memory is there.
    pub fn populate(&mut self) {}

    /// A model has no cache.
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
