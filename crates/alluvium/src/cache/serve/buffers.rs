//! The memory that all connections share, for incoming requests and outgoing answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What each connection may use without taking from the shared memory: enough for ordinary requests
/// and answers.
pub(super) const FREE_BYTES: usize = 64 << 10;

/// The memory that connections use beyond their own part.
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

/// The part of one buffer, given back when it is dropped.
pub(super) struct Share {
    buffers: Arc<Buffers>,
    held_bytes: usize,
}

impl Share {
    pub(super) fn new(buffers: &Arc<Buffers>) -> Self {
        Self { buffers: buffers.clone(), held_bytes: 0 }
    }

    /// Sets the size of the buffer. False, without any change, if there is not enough memory: there
    /// is no waiting, since the holders of the memory may need more of it.
    pub(super) fn hold(&mut self, bytes: usize) -> bool {
        let bytes = if bytes <= FREE_BYTES { 0 } else { bytes };
        let used = &self.buffers.used_bytes;
        if bytes == self.held_bytes {
            return true;
        }
        if let Some(more) = bytes.checked_sub(self.held_bytes) {
            let before = used.fetch_add(more, Ordering::Relaxed);
            if before.saturating_add(more) > self.buffers.max_bytes {
                used.fetch_sub(more, Ordering::Relaxed);
                return false;
            }
        } else {
            used.fetch_sub(self.held_bytes - bytes, Ordering::Relaxed);
        }
        self.held_bytes = bytes;
        true
    }

    /// Raises the size of the buffer to at least `bytes`; false as [`Self::hold`].
    pub(super) fn hold_at_least(&mut self, bytes: usize) -> bool {
        bytes <= self.held_bytes || self.hold(bytes)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.hold(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_buffers_share_a_bound() {
        let buffers = Buffers::new(300 << 10);
        let (mut one, mut other) = (Share::new(&buffers), Share::new(&buffers));
        assert!(one.hold(FREE_BYTES) && buffers.used_bytes() == 0);
        assert!(one.hold(200 << 10) && !other.hold(101 << 10));
        assert!(other.hold(100 << 10) && !one.hold(201 << 10));
        assert_eq!(buffers.used_bytes(), 300 << 10);
        assert!(one.hold(100 << 10) && other.hold(200 << 10));
        drop(one);
        assert_eq!(buffers.used_bytes(), 200 << 10);
        drop(other);
        assert_eq!(buffers.used_bytes(), 0);
    }
}
