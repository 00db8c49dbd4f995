//! Fallible allocation of heap memory of more than a few pages. (A failed allocation by Rust's own
//! types ends the process.)

use std::io;

use alluvium_device::AlignedBuf;

#[cfg(all(test, not(loom)))]
thread_local! {
    static IS_REFUSED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Makes allocations on this thread fail while set.
#[cfg(all(test, not(loom)))]
pub(crate) fn refuse(is_refused: bool) {
    IS_REFUSED.set(is_refused);
}

/// Called before a library allocates.
pub(crate) fn check() -> io::Result<()> {
    #[cfg(all(test, not(loom)))]
    if IS_REFUSED.get() {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    Ok(())
}

/// Allocates whole pages of zeroes.
///
/// # Errors
/// There is no memory; as for all functions of this module.
pub(crate) fn pages(len_bytes: usize) -> io::Result<AlignedBuf> {
    check()?;
    AlignedBuf::try_zeroed(len_bytes)
}

/// Allocates this many zeroes.
pub(crate) fn zeroes(len_bytes: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reserve(&mut bytes, len_bytes)?;
    bytes.resize(len_bytes, 0);
    Ok(bytes)
}

/// Copies the bytes.
pub(crate) fn copy(from: &[u8]) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reserve(&mut bytes, from.len())?;
    bytes.extend_from_slice(from);
    Ok(bytes)
}

/// Reserves capacity for exactly this many more elements.
pub(crate) fn reserve<T>(to: &mut Vec<T>, more: usize) -> io::Result<()> {
    check()?;
    Ok(to.try_reserve_exact(more)?)
}
