//! Errors of opening and of I/O.
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::io::Errno;

use crate::ByteSize;

/// A failed request. Cheap to clone: a latched device returns the same cause for every request.
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
    /// The error that the kernel returned.
    pub source: Arc<io::Error>,
}

impl DeviceError {
    /// Whether the device refused a write because another host has reserved it
    /// ([`crate::Device::reserve`]).
    pub fn is_reserved(&self) -> bool {
        self.source.get_ref().and_then(|cause| cause.downcast_ref::<Reserved>()).is_some()
    }
}

/// The source of a [`DeviceError`] for which [`DeviceError::is_reserved`] holds.
#[derive(Debug, thiserror::Error)]
#[error("another host has reserved the device")]
pub(crate) struct Reserved;

impl Reserved {
    /// Translates `source`, the error of a write to a block device: the block layer reports a
    /// reservation conflict under an unrelated error number (`EBADE`).
    pub(crate) fn recognise(source: io::Error) -> io::Error {
        match source.raw_os_error() {
            Some(errno) if errno == Errno::BADE.raw_os_error() => {
                io::Error::new(io::ErrorKind::PermissionDenied, Self)
            }
            _ => source,
        }
    }
}

/// Why a device could not be reserved. Any earlier reservation stays in force, and so does what
/// other software has registered for this host.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// The device lacks persistent reservations or a required part of them, or this process may not
    /// use them.
    #[error("{device}: cannot be reserved: {reason}")]
    Unsupported {
        /// Name of the device.
        device: String,
        /// What is missing.
        reason: String,
    },
    /// The device is reserved, or this host is registered, under a key other than Alluvium's; or
    /// another host has reserved it at the same moment.
    #[error(
        "{device}: is reserved, or this host is registered with it, under a key that is not \
         Alluvium's; or another host has just reserved it"
    )]
    Held {
        /// Name of the device.
        device: String,
    },
    /// Any other system error.
    #[error("{device}: cannot be reserved: {command}: {source}")]
    Io {
        /// Name of the device.
        device: String,
        /// The command that failed.
        command: &'static str,
        /// The error that the kernel returned.
        source: io::Error,
    },
}

impl ReserveError {
    pub(crate) fn system(device: &str, command: &'static str, errno: Errno) -> Self {
        let device = device.into();
        match errno {
            Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL => {
                let reason =
                    "the device or its driver has no persistent reservations of this kind".into();
                Self::Unsupported { device, reason }
            }
            Errno::PERM => {
                let reason = "the kernel does not permit it to this process, which before \
                    Linux 6.6 needs CAP_SYS_ADMIN"
                    .into();
                Self::Unsupported { device, reason }
            }
            errno => Self::Io { device, command, source: errno.into() },
        }
    }
}

/// Why a device could not be opened. The message says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The target does not exist, and no size to create it with was given.
    #[error("{0}: no such file or device")]
    NotFound(PathBuf),
    /// The target is in use elsewhere.
    #[error("{0}: in use by another process (a mounted file system, or another alluvium)")]
    InUse(PathBuf),
    /// Permission denied.
    #[error("{0}: permission denied")]
    Permission(PathBuf),
    /// The device is smaller than required.
    #[error(
        "{path}: {} requested, but it has {}",
        ByteSize(*wanted_bytes),
        ByteSize(*actual_bytes)
    )]
    TooSmall {
        /// Target.
        path: PathBuf,
        /// Required size.
        wanted_bytes: u64,
        /// Actual size.
        actual_bytes: u64,
    },
    /// The file system has no space for the new file. Nothing of it is left behind.
    #[error("{path}: no space for a file of {}", ByteSize(*wanted_bytes))]
    NoSpace {
        /// Target.
        path: PathBuf,
        /// Size of the file.
        wanted_bytes: u64,
    },
    /// The target is not a regular file or block device, its logical block is larger than a page,
    /// or its length is not a multiple of a page.
    #[error("{path}: {reason}")]
    Unsuitable {
        /// Target.
        path: PathBuf,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// Any other system error.
    #[error("{path}: {action}: {source}")]
    Io {
        /// Target.
        path: PathBuf,
        /// The action that failed.
        action: &'static str,
        /// The error that the kernel returned.
        source: io::Error,
    },
}
