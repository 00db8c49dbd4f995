//! The catalog's file, on a disk that may be full.
//!
//! redb accepts nothing after an I/O error until its file is opened again. An error of a full disk,
//! unlike others, leaves no doubt about the state, if the order of writes is right: a transaction
//! takes effect when the header is written, in place, at the beginning of the file. [`Disk`] holds
//! the header back until redb asks for a sync, and so writes it after all pages. Pages of a
//! transaction are never pages of an earlier one. Hence, if there is no space for a page, the
//! header on disk is still that of the last transaction, and opening the file again gives exactly
//! that one.
//!
//! [`Reserve`] keeps some space for the transactions that free space or let the WAL be trimmed.

use std::fs::File;
use std::io;
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use redb::backends::FileBackend;
use redb::{BackendError, StorageBackend};
use rustix::fs::FallocateFlags;

/// Size of the reserve.
pub(super) const RESERVE_BYTES: u64 = 8 << 20;

/// Whether the disk is full or the quota of this user is used up.
pub(super) fn is_no_space(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

/// What has happened to a [`Disk`] since the transaction began.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// The header that redb has written, not in the file yet.
    header: Option<Vec<u8>>,
    /// There was no space for a page or for the new length of the file.
    no_space: bool,
    /// A header is in the file, or may be.
    is_published: bool,
}

/// Shared by a [`Disk`] and the code that has passed it to redb.
#[derive(Clone, Debug, Default)]
pub(super) struct Watched {
    outcome: Arc<Mutex<Outcome>>,
    /// Bytes of pages that there is space for.
    #[cfg(test)]
    left_bytes: Option<Arc<std::sync::atomic::AtomicU64>>,
}

impl Watched {
    /// Simulates a disk with space for this many more bytes of pages.
    #[cfg(test)]
    pub(super) fn with_space(left_bytes: Arc<std::sync::atomic::AtomicU64>) -> Self {
        Self { left_bytes: Some(left_bytes), ..Self::default() }
    }

    /// Resets the outcome when a transaction begins.
    pub(super) fn begin(&self) {
        let mut outcome = self.outcome.lock();
        (outcome.no_space, outcome.is_published) = (false, false);
    }

    /// Whether the transaction failed for lack of space and had no effect.
    pub(super) fn is_refused(&self) -> bool {
        let outcome = self.outcome.lock();
        outcome.no_space && !outcome.is_published
    }

    #[cfg(test)]
    fn take_space(&self, bytes: usize) -> io::Result<()> {
        let Some(left) = &self.left_bytes else { return Ok(()) };
        let (all, order) = (bytes as u64, Ordering::Relaxed);
        let taken = left.fetch_update(order, order, |left| left.checked_sub(all));
        taken.map(drop).map_err(|_| io::ErrorKind::StorageFull.into())
    }
}

/// The file, as redb sees it.
#[derive(Debug)]
pub(super) struct Disk {
    file: FileBackend,
    watched: Watched,
}

impl Disk {
    /// Opens the file at `path`, and creates it if it is missing. The `Disk` that had `watched`
    /// before must be closed.
    pub(super) fn open(path: &Path, watched: Watched) -> Result<Self, redb::DatabaseError> {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
        let file = FileBackend::new(file.map_err(redb::StorageError::from)?)?;
        *watched.outcome.lock() = Outcome::default();
        Ok(Self { file, watched })
    }

    fn noted<T>(&self, result: io::Result<T>) -> io::Result<T> {
        result.inspect_err(|error| {
            if is_no_space(error) {
                self.watched.outcome.lock().no_space = true;
            }
        })
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read(offset, out)?;
        let outcome = self.watched.outcome.lock();
        if let Some(header) = &outcome.header {
            let from = usize::try_from(offset).unwrap_or(usize::MAX).min(header.len());
            let newer = &header[from..];
            let len = newer.len().min(out.len());
            out[..len].copy_from_slice(&newer[..len]);
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.noted(self.file.set_len(len))
    }

    fn sync_data(&self) -> io::Result<()> {
        let header = {
            let mut outcome = self.watched.outcome.lock();
            outcome.is_published |= outcome.header.is_some();
            outcome.header.take()
        };
        if let Some(header) = header {
            self.file.write(0, &header)?;
        }
        self.file.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if offset > 0 {
            #[cfg(test)]
            self.noted(self.watched.take_space(data.len()))?;
            return self.noted(self.file.write(offset, data));
        }
        let mut outcome = self.watched.outcome.lock();
        let header = outcome.header.get_or_insert_default();
        header.resize(header.len().max(data.len()), 0);
        header[..data.len()].copy_from_slice(data);
        Ok(())
    }

    fn close(&self) -> io::Result<()> {
        self.file.close()
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.file.try_lock_range(start, end)
    }

    fn try_lock_shared_range(
        &self,
        start: Bound<u64>,
        end: Bound<u64>,
    ) -> Result<bool, BackendError> {
        self.file.try_lock_shared_range(start, end)
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.file.lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.file.lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.file.unlock_range(start, end)
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.file.query_lock_range(start, end)
    }
}

/// A file next to the catalog that occupies space, which is given up for a transaction that must
/// not fail.
#[derive(Debug)]
pub(super) struct Reserve {
    path: PathBuf,
    bytes: u64,
    /// Whether the file is known to have its full size.
    is_whole: AtomicBool,
}

impl Reserve {
    pub(super) fn new(catalog: &Path, bytes: u64) -> Self {
        let mut path = catalog.as_os_str().to_owned();
        path.push(".reserve");
        Self { path: path.into(), bytes, is_whole: AtomicBool::new(false) }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Allocates the space, if that is not done yet. On a file system that cannot allocate space in
    /// advance there is no reserve.
    pub(super) fn fill(&self) -> io::Result<()> {
        if self.is_whole.load(Ordering::Relaxed) {
            return Ok(());
        }
        let file = File::options().write(true).create(true).truncate(false).open(&self.path)?;
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, self.bytes) {
            Ok(()) => {}
            Err(rustix::io::Errno::OPNOTSUPP) => {
                tracing::warn!(
                    "{}: the file system cannot allocate space in advance, so a full disk may \
                     delay deletions",
                    self.path.display()
                );
            }
            Err(error) => return Err(error.into()),
        }
        self.is_whole.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Releases the space, except for `kept_bytes`; returns false if there is none to release.
    pub(super) fn release(&self, kept_bytes: u64) -> io::Result<bool> {
        self.is_whole.store(false, Ordering::Relaxed);
        match File::options().write(true).open(&self.path) {
            Ok(file) if file.metadata()?.len() > kept_bytes => {
                file.set_len(kept_bytes).map(|()| true)
            }
            Ok(_) => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}
