//! Durable removal of names, and freeing the space of removed files.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::allocator::RELEASE_WITHIN;
use crate::error::{Error, Result};
use crate::files::File;
use crate::shared::Shared;

/// Bytes given back to the file system at a time.
const FREED_BYTES: u64 = 4 << 20;
/// The interval for checking whether a file is still being read.
const RECHECK_AFTER: Duration = Duration::from_millis(1);

impl Shared {
    /// Makes names that were created, changed and removed until now durable. If this fails nothing
    /// is written any more and no journal is removed: which names the disk has is then unknown, and
    /// the kernel reports an error only once, so a later successful sync proves nothing about
    /// earlier changes.
    pub(crate) fn sync_names(&self) -> Result<()> {
        // Serialised, so that a success cannot be reported next to another thread's failure that is
        // not yet recorded.
        let _alone = self.flush.naming.lock();
        if let Some(error) = self.flush.failure() {
            return Err(error);
        }
        let path = self.directory.path();
        let synced = self.directory.sync().map_err(Error::io(path, "syncing the directory"));
        synced.inspect_err(|error| self.flush.fail(error.clone()))
    }

    /// Frees the space of a file whose name is durably removed. It is truncated from its end, with
    /// a rest after each step that lasts as long as the step, unless writers wait for the space. On
    /// a file system mounted with `discard`, the disk is informed of free space; a disk that
    /// discards 128 MiB at once does nothing else meanwhile: flushes of a log on it then take 30 ms
    /// and more, compared with 4 ms next to steps of 4 MiB.
    ///
    /// A file that is still being read is freed at once when it is last closed.
    pub(crate) fn free_file(&self, mut file: Arc<dyn File>) {
        let asked = Instant::now();
        while Arc::get_mut(&mut file).is_none() {
            // A read is short; an iteration may last indefinitely.
            if asked.elapsed() >= RELEASE_WITHIN {
                return;
            }
            thread::sleep(RECHECK_AFTER);
        }
        let Ok(mut len_bytes) = file.len_bytes() else { return };
        // The last step is closing the file.
        while len_bytes > FREED_BYTES && !self.maintenance.waker.is_closing() {
            len_bytes -= FREED_BYTES;
            let begun = Instant::now();
            if file.truncate(len_bytes).is_err() {
                return;
            }
            if !self.flush.is_short() {
                thread::sleep(begun.elapsed());
            }
        }
    }
}
