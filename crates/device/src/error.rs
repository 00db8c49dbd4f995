//! Errors of opening and of I/O.
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// A failed request. Cheap to clone: a latched device hands the same cause to everybody.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{operation} of {len_bytes} bytes at {at} on {device}: {source}")]
pub struct DeviceError {
    /// Name of the device.
    pub device: Arc<str>,
    /// `read`, `write` or `flush`.
    pub operation: &'static str,
    /// First byte of the request.
    pub at: u64,
    /// Length of the request.
    pub len_bytes: u64,
    /// What the kernel said.
    pub source: Arc<io::Error>,
}

/// Why a device could not be opened. The message says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The target does not exist and no capacity to create it with was given.
    #[error("{0}: no such file or device")]
    NotFound(PathBuf),
    /// Someone else holds it.
    #[error("{0}: in use by another process (a mounted file system, or another alluvium)")]
    InUse(PathBuf),
    /// No permission.
    #[error("{0}: permission denied")]
    Permission(PathBuf),
    /// The device is smaller than what was asked for.
    #[error("{path}: {wanted_bytes} bytes wanted, the device has {actual_bytes}")]
    TooSmall {
        /// Target.
        path: PathBuf,
        /// Asked for.
        wanted_bytes: u64,
        /// There.
        actual_bytes: u64,
    },
    /// The file system has no room for the file that was to be created; nothing of it is left behind.
    #[error("{path}: no space for a file of {wanted_bytes} bytes")]
    NoSpace {
        /// Target.
        path: PathBuf,
        /// Asked for.
        wanted_bytes: u64,
    },
    /// Not a regular file or block device, a logical block above a page, a length that is no multiple of a page.
    #[error("{path}: {reason}")]
    Unsuitable {
        /// Target.
        path: PathBuf,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// Anything else that the system said.
    #[error("{path}: {action}: {source}")]
    Io {
        /// Target.
        path: PathBuf,
        /// What was being done.
        action: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}
