//! Classes of requests to the object store, by urgency.

/// What requests are made for, the most urgent first. Reads at a stream's tail need no request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RequestClass {
    /// While an upload waits, the log fills up; when it is full, writers wait.
    Upload,
    /// A reader waits for it.
    Read,
    /// Nothing waits for it.
    Compaction,
    /// Deletions, listings and ownership checks; it transfers hardly any bytes, so it never waits
    /// for bandwidth.
    CleanUp,
}
