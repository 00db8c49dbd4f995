//! Errors of the cache, and what to do about them.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;

use crate::options::Contents;
use crate::position::JournalNumber;
use crate::record::MAX_KEY_BYTES;

/// Why a call failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another process, or another handle in this process, has the cache open.
    #[error("{path}: the cache is in use by another process, or by another handle of this one")]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// The directory does not contain a cache that this version can use, or the options are out of
    /// bounds or too small for the existing journals. The reason says which; not every one of them
    /// calls for [`crate::clear`].
    #[error("{path}: {reason}")]
    NoCache {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong, and what to do about it.
        reason: String,
    },
    /// The cache in the directory has another contents tag; normally it belongs to another program.
    #[error(
        "{path}: the cache was created with {found}, and opened with {expected}: it belongs to \
         something else; choose another directory, or remove the cache if it is not needed"
    )]
    OtherContents {
        /// The directory.
        path: PathBuf,
        /// The tag that the cache was created with.
        found: Contents,
        /// The value of [`crate::Options::contents`].
        expected: Contents,
    },
    /// The key is empty.
    #[error("the key is empty; a key has at least one byte")]
    KeyEmpty,
    /// The key is longer than [`MAX_KEY_BYTES`].
    #[error("the key has {len_bytes} bytes; at most {MAX_KEY_BYTES} are allowed")]
    KeyTooLong {
        /// The length of the key, in bytes.
        len_bytes: usize,
    },
    /// The record does not fit into a journal: it is longer than
    /// [`crate::Cache::max_record_bytes`].
    #[error(
        "the record has {len_bytes} bytes (key, value, and a header); the journals of this cache \
         allow at most {max_bytes}: create a new cache with larger journals"
    )]
    ValueTooLong {
        /// The length of the whole record, in bytes: key, value and header.
        len_bytes: usize,
        /// The maximum length of a record: [`crate::Cache::max_record_bytes`].
        max_bytes: usize,
    },
    /// There is no space for another journal, within the budget or on the disk, and no journal may
    /// be evicted. It is temporary if keys are deleted or expire: their space is compacted.
    #[error(
        "{path}: no space for another journal, and none may be evicted: the disk budget of \
         {max_bytes} bytes is used up, or the disk is full; delete keys, so that compaction makes \
         space; if deletions are refused too, open the cache with a larger budget or with \
         eviction, or free space on the disk"
    )]
    DiskFull {
        /// The directory.
        path: PathBuf,
        /// The budget, in bytes: [`crate::Options::max_disk_bytes`].
        max_bytes: u64,
    },
    /// A record is damaged on disk.
    #[error("{path}, byte {offset}: the record is damaged; delete the key, or write it again")]
    Corrupt {
        /// The file of the journal, below the path with which the cache was opened.
        path: PathBuf,
        /// The number of the journal.
        journal: JournalNumber,
        /// The offset of the record's first byte in its file, or in the plain journal if the file
        /// is compressed.
        offset: u64,
    },
    /// A file could not be read or written. After a failed write or sync nothing is written any
    /// more; reads continue.
    #[error("{path}: {action}: {source}")]
    Io {
        /// The file or directory, below the path with which the cache was opened.
        path: PathBuf,
        /// The operation that failed.
        action: &'static str,
        /// The error of the system.
        source: Arc<io::Error>,
    },
    /// The newest journal or the lock file was removed or replaced while the cache was open,
    /// perhaps with the whole directory. Nothing is written any more: it would go to a file that
    /// cannot be found again, or conflict with another process. Data that is open remains readable.
    #[error(
        "{path} was removed or replaced while the cache was open, so writes would be lost; close \
         the cache and open it again with the files that are left"
    )]
    Removed {
        /// The missing or replaced file, below the path with which the cache was opened.
        path: PathBuf,
    },
    /// There is no memory for a journal, for a larger index, or for a read from the disk. The call
    /// had no effect; the condition may be temporary.
    #[error("{path}: no memory for {what}: {source}")]
    NoMemory {
        /// The directory, or the file to read.
        path: PathBuf,
        /// What the memory was for.
        what: &'static str,
        /// The error of the system.
        source: Arc<io::Error>,
    },
    /// A background thread of the cache panicked, which is a defect. Nothing is written any more;
    /// reads continue.
    #[error(
        "{path}: a thread of the cache has panicked, which is a defect; nothing is written any more"
    )]
    Panicked {
        /// The directory.
        path: PathBuf,
    },
}

/// Why a background thread did not finish its task.
#[derive(Debug)]
pub(crate) enum Stopped {
    /// The cache is being closed.
    Closing,
    Failed(Error),
}

impl From<Error> for Stopped {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl Error {
    pub(crate) fn io(
        path: impl Into<PathBuf>,
        action: &'static str,
    ) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { path: path.into(), action, source: Arc::new(source) }
    }

    /// Returns whether the process or the system has reached its limit of open files, which is
    /// temporary.
    pub(crate) fn is_out_of_files(&self) -> bool {
        let Self::Io { source, .. } = self else { return false };
        let wants = [Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error);
        source.raw_os_error().is_some_and(|code| wants.contains(&code))
    }

    /// Returns whether memory was lacking, in the process or in the kernel, which is temporary.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        match self {
            Self::NoMemory { .. } => true,
            Self::Io { source, .. } => source.kind() == io::ErrorKind::OutOfMemory,
            _ => false,
        }
    }

    pub(crate) fn no_memory(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> Self {
        // The path is copied only on failure: this is called for each record and each journal that
        // is created.
        move |source| Self::NoMemory { path: path.to_owned(), what, source: Arc::new(source) }
    }
}

/// The result of a call.
pub type Result<T> = std::result::Result<T, Error>;
