//! Space that is kept for the catalog. When the disk is full, changes that drop data must still be
//! written, since objects are deleted only after that: docs/storage-faults.md.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use rustix::fs::FallocateFlags;

/// The file. `LocalFileSystem` neither lists nor opens a file with such a name.
pub const RESERVE: &str = "alluvium-reserve#0";
const RESERVE_BYTES: u64 = 8 << 20;
/// Bytes that are given up at a time.
const STEP_BYTES: u64 = 256 << 10;

/// The reserve of a directory.
#[derive(Debug)]
pub(super) struct Reserve {
    path: PathBuf,
    /// Whether the file is known to have its full size.
    is_whole: Mutex<bool>,
}

impl Reserve {
    pub(super) fn new(directory: &Path) -> Self {
        Self { path: directory.join(RESERVE), is_whole: Mutex::new(false) }
    }

    pub(super) fn is_whole(&self) -> bool {
        *self.is_whole.lock()
    }

    /// Allocates the space, if that is not done yet. On a file system that cannot allocate space in
    /// advance there is no reserve. Blocking.
    pub(super) fn fill(&self) -> io::Result<()> {
        let mut is_whole = self.is_whole.lock();
        if *is_whole {
            return Ok(());
        }
        let file = File::options().write(true).create(true).truncate(false).open(&self.path)?;
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, RESERVE_BYTES) {
            Ok(()) => {}
            Err(rustix::io::Errno::OPNOTSUPP) => {
                tracing::warn!(
                    "{}: the file system cannot allocate space in advance, so a full disk may \
                     delay deletions",
                    self.path.display()
                );
            }
            Err(error) => {
                let error = io::Error::from(error);
                let path = self.path.display();
                return Err(io::Error::new(error.kind(), format!("the reserve {path}: {error}")));
            }
        }
        *is_whole = true;
        Ok(())
    }

    /// Gives up a part of the space; returns false if there is none left. Blocking.
    pub(super) fn give_up(&self) -> io::Result<bool> {
        let mut is_whole = self.is_whole.lock();
        *is_whole = false;
        match File::options().write(true).open(&self.path) {
            Ok(file) => {
                let bytes = file.metadata()?.len();
                file.set_len(bytes.saturating_sub(STEP_BYTES)).map(|()| bytes > 0)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}
