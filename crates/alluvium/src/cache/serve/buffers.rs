//! The memory that all connections share, for incoming requests and outgoing answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The bytes that each connection may use without taking from the shared memory: enough for
/// ordinary requests and answers.
pub(super) const UNCOUNTED_BYTES: usize = 64 << 10;

/// The shared memory, from which connections take what exceeds [`UNCOUNTED_BYTES`].
pub(super) struct Buffers {
    used_bytes: AtomicUsize,
    max_bytes: usize,
}

impl Buffers {
    pub(super) fn new(max_bytes: usize) -> Arc<Self> {
        Arc::new(Self { used_bytes: AtomicUsize::new(0), max_bytes })
    }

    pub(super) fn used_bytes(&self) -> usize {
        self.used_bytes.load(Ordering::Relaxed)
    }
}

/// The memory that one buffer takes, returned when this is dropped.
pub(super) struct Reservation {
    buffers: Arc<Buffers>,
    reserved_bytes: usize,
}

impl Reservation {
    pub(super) fn new(buffers: &Arc<Buffers>) -> Self {
        Self { buffers: buffers.clone(), reserved_bytes: 0 }
    }

    /// Sets the size of the buffer. Returns false, without any change, if there is not enough
    /// memory; it does not wait, since the holders of the memory may need more of it.
    pub(super) fn resize(&mut self, bytes: usize) -> bool {
        let bytes = if bytes <= UNCOUNTED_BYTES { 0 } else { bytes };
        let used = &self.buffers.used_bytes;
        if bytes == self.reserved_bytes {
            return true;
        }
        if let Some(more) = bytes.checked_sub(self.reserved_bytes) {
            let before = used.fetch_add(more, Ordering::Relaxed);
            if before.saturating_add(more) > self.buffers.max_bytes {
                used.fetch_sub(more, Ordering::Relaxed);
                return false;
            }
        } else {
            used.fetch_sub(self.reserved_bytes - bytes, Ordering::Relaxed);
        }
        self.reserved_bytes = bytes;
        true
    }

    /// Raises the size of the buffer to at least `bytes`; false as for [`Self::resize`].
    pub(super) fn grow_to(&mut self, bytes: usize) -> bool {
        bytes <= self.reserved_bytes || self.resize(bytes)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.resize(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_buffers_share_a_bound() {
        let buffers = Buffers::new(300 << 10);
        let (mut one, mut other) = (Reservation::new(&buffers), Reservation::new(&buffers));
        assert!(one.resize(UNCOUNTED_BYTES) && buffers.used_bytes() == 0);
        assert!(one.resize(200 << 10) && !other.resize(101 << 10));
        assert!(other.resize(100 << 10) && !one.resize(201 << 10));
        assert_eq!(buffers.used_bytes(), 300 << 10);
        assert!(one.resize(100 << 10) && other.resize(200 << 10));
        drop(one);
        assert_eq!(buffers.used_bytes(), 200 << 10);
        drop(other);
        assert_eq!(buffers.used_bytes(), 0);
    }
}
