//! The bounds of a service in memory or in a file.

/// The memory that an entry or a change takes beyond its keys and values, as the bounds count it.
pub(crate) const OVERHEAD_BYTES: usize = 128;

/// The bounds of a service in memory or in a file.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of all keys and values, with 128 per key.
    pub state_bytes: usize,
    /// Revisions that are kept for watches and lists.
    pub history_revisions: usize,
    /// Bytes of keys and values, new and previous, in those revisions, with 128 per change. The
    /// newest revision is kept in any case.
    pub history_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { state_bytes: 256 << 20, history_revisions: 100_000, history_bytes: 64 << 20 }
    }
}
