//! Bytes that cannot be decoded: why, and where.

/// Bytes of an object that do not match its index or the catalog.
#[derive(Debug, thiserror::Error)]
#[error("damaged at byte {position}: {reason}")]
pub struct Damage {
    /// Position in the object of the first damaged byte or of the damaged structure.
    pub position: u64,
    /// What is wrong there.
    pub reason: String,
}

impl Damage {
    /// Returns damage of an object that has no place of its own in it.
    pub(crate) fn of_all(reason: impl Into<String>) -> Self {
        Self { position: 0, reason: reason.into() }
    }
}

/// Why the bytes of an object are not decoded.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// They are not what was written.
    #[error(transparent)]
    Damaged(#[from] Damage),
    /// A later version of this program has written them.
    #[error("{0}")]
    LaterVersion(String),
}
