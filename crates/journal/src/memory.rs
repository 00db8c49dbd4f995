//! Memory of more than some pages, from the heap: whoever wants it is told where there is none.
//! (What Rust takes by itself ends the process then.)

use std::io;

use alluvium_device::AlignedBuf;

#[cfg(all(test, not(loom)))]
thread_local! {
    static IS_REFUSED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// For this thread there is none as long as this is so.
#[cfg(all(test, not(loom)))]
pub(crate) fn refuse(is_refused: bool) {
    IS_REFUSED.set(is_refused);
}

/// Before a library takes some.
pub(crate) fn check() -> io::Result<()> {
    #[cfg(all(test, not(loom)))]
    if IS_REFUSED.get() {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    Ok(())
}

/// Whole pages of zeroes.
///
/// # Errors
/// There is no memory, as of all here.
pub(crate) fn pages(len_bytes: usize) -> io::Result<AlignedBuf> {
    check()?;
    AlignedBuf::try_zeroed(len_bytes)
}

/// So many zeroes.
pub(crate) fn zeroes(len_bytes: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reserve(&mut bytes, len_bytes)?;
    bytes.resize(len_bytes, 0);
    Ok(bytes)
}

/// The same bytes once more.
pub(crate) fn copy(from: &[u8]) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reserve(&mut bytes, from.len())?;
    bytes.extend_from_slice(from);
    Ok(bytes)
}

/// Room for so many more, and no others.
pub(crate) fn reserve<T>(to: &mut Vec<T>, more: usize) -> io::Result<()> {
    check()?;
    Ok(to.try_reserve_exact(more)?)
}
