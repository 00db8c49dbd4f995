//! What can go wrong, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;

use crate::options::Contents;
use crate::place::JournalNumber;
use crate::record::MAX_KEY_BYTES;

/// Why a call failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another process, or another handle of this one, has the cache open.
    #[error(
        "{path}: the cache is in use by another process, or by another handle of this one; a cache has one user at a time"
    )]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// What is in the directory is no cache that this version can use; or the options are outside
    /// of their bounds, or too small for the journals that are there. The reason says which: not
    /// each of these is one to [`crate::clear`] the directory.
    #[error("{path}: {reason}")]
    NoCache {
        /// File or directory.
        path: PathBuf,
        /// What is wrong with it, and what would help.
        reason: String,
    },
    /// The cache in the directory is for something else: another program's, as a rule.
    #[error(
        "{path}: the cache that is there was made with {found}, and is asked for with {expected}: something else is kept in it. Choose a directory of its own; or, if nobody needs that cache, remove it"
    )]
    OtherContents {
        /// The directory.
        path: PathBuf,
        /// What it was made for.
        found: Contents,
        /// What [`crate::Options::contents`] says.
        expected: Contents,
    },
    /// A key without a byte.
    #[error("a key has at least one byte")]
    KeyEmpty,
    /// A key of more than [`MAX_KEY_BYTES`].
    #[error("a key of {len_bytes} bytes; it may have {MAX_KEY_BYTES}")]
    KeyTooLong {
        /// Its length, in bytes.
        len_bytes: usize,
    },
    /// A record that fits into no journal: more than [`crate::Cache::max_record_bytes`].
    #[error(
        "a record of {len_bytes} bytes (key, value, and a header); this cache's journals take up to {max_bytes}: open a new cache with larger journals"
    )]
    ValueTooLong {
        /// Length of the whole record, in bytes: key, value and header.
        len_bytes: usize,
        /// What a journal takes: [`crate::Cache::max_record_bytes`].
        max_bytes: usize,
    },
    /// There is no room for another journal, within the budget or on the disk itself, and nothing
    /// that may be evicted for it. It passes when keys are deleted or expire: what they leave is
    /// compacted.
    #[error(
        "{path}: there is no room for another journal, and nothing that may be evicted: the cache has used up the {max_bytes} bytes of disk that it may use, or the disk itself is full. Delete keys and let it compact; where that is refused too, since the budget is smaller than what the cache has grown to, open it with a larger one or with eviction; or make room on the disk"
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
        /// The journal's file, under the cache's directory as that was given.
        path: PathBuf,
        /// Which journal.
        journal: JournalNumber,
        /// The record's first byte in its file, or in what that was before it was compressed.
        offset: u64,
    },
    /// A file could not be read or written. After a failed write or sync nothing is written any
    /// more; reads go on.
    #[error("{path}: {action}: {source}")]
    Io {
        /// File or directory; under the cache's, as that was given.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// Somebody has removed or replaced the newest journal, or the lock, from under the open cache,
    /// perhaps with the whole directory. Nothing is written any more, since it would go into a file
    /// that nobody finds again, or beside another process; what is open can be read.
    #[error(
        "{path} was removed or replaced while the cache is open, by somebody else: what is written would be lost with it. Close the cache and open it again; it goes on with the files that are left"
    )]
    Removed {
        /// What is missing, or another file now, under the cache's directory as that was given.
        path: PathBuf,
    },
    /// There is no memory for a journal, a larger index, or what is read from the disk. Nothing was
    /// done; it may pass.
    #[error("{path}: no memory for {what}: {source}")]
    NoMemory {
        /// The directory, or the file that was to be read.
        path: PathBuf,
        /// What it was for.
        what: &'static str,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// A thread of the cache has ended by a panic, which is a defect. Nothing is written any more;
    /// reads go on.
    #[error(
        "{path}: a thread of the cache has panicked, which is a defect of it; nothing is written any more"
    )]
    Panicked {
        /// The directory.
        path: PathBuf,
    },
}

/// Why one of the threads behind a cache did not come to the end of what it was at.
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

    /// The process, or the system, has as many files open as it may. That passes.
    pub(crate) fn is_want_of_files(&self) -> bool {
        let Self::Io { source, .. } = self else { return false };
        let wants = [Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error);
        source.raw_os_error().is_some_and(|code| wants.contains(&code))
    }

    /// There was no memory for it, ours or the system's own. That passes.
    pub(crate) fn is_want_of_memory(&self) -> bool {
        match self {
            Self::NoMemory { .. } => true,
            Self::Io { source, .. } => source.kind() == io::ErrorKind::OutOfMemory,
            _ => false,
        }
    }

    pub(crate) fn no_memory(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> Self {
        // The path is copied only here: this is on the way of each record, and of each journal that
        // is made.
        move |source| Self::NoMemory { path: path.to_owned(), what, source: Arc::new(source) }
    }
}

/// What calls return.
pub type Result<T> = std::result::Result<T, Error>;
