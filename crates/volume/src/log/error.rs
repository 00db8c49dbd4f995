//! Why a record of the log is refused.

use crate::fields::FieldError;

/// Why the payload of a record is not one of a volume server's log. The WAL has verified the bytes,
/// so it is not damage: the log is another program's, or a newer version has written it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The first byte is another one.
    #[error("not a record of a volume server's log: it begins with {0:#04x}")]
    Magic(u8),
    /// Another version has written it.
    #[error("version {0} of the format is not supported; a newer version has written this log")]
    Version(u8),
    /// The kind is unknown.
    #[error("record kind {0} is unknown; a newer version has written this log")]
    Kind(u8),
    /// A flag is unknown.
    #[error("flags {flags:#x} of a {of} are unknown; a newer version has written this log")]
    Flags {
        /// What has the flags.
        of: &'static str,
        /// The flags.
        flags: u32,
    },
    /// A field that a decoder of this version does not accept.
    #[error("a record of the log is not valid: {0}")]
    Field(#[from] FieldError),
}
