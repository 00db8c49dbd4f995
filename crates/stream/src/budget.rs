//! The byte limit of a fetch.

/// The payload that a fetch may still return; the first batch always fits.
pub(crate) struct Budget {
    left_bytes: usize,
    first: bool,
}

impl Budget {
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self { left_bytes: max_bytes, first: true }
    }

    /// Takes the size of a batch from the budget; returns false if it does not fit.
    pub(crate) fn take(&mut self, len_bytes: usize) -> bool {
        if !self.first && (self.left_bytes == 0 || len_bytes > self.left_bytes) {
            self.left_bytes = 0;
            return false;
        }
        self.first = false;
        self.left_bytes = self.left_bytes.saturating_sub(len_bytes);
        true
    }

    /// Spends the rest, unless nothing was taken yet. Returns whether it did.
    pub(crate) fn close(&mut self) -> bool {
        if !self.first {
            self.left_bytes = 0;
        }
        !self.first
    }

    /// Whether nothing more fits.
    pub(crate) fn is_spent(&self) -> bool {
        self.left_bytes == 0 && !self.first
    }

    pub(crate) fn left_bytes(&self) -> usize {
        self.left_bytes
    }
}
