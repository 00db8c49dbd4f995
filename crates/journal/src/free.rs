//! Names that go for good, and the room of files that have lost theirs.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::files::File;
use crate::prepare::LET_GO_WITHIN;
use crate::shared::Shared;

/// Given back to the file system at a time.
const FREED_BYTES: u64 = 4 << 20;
/// Whether somebody still reads a file is looked at this often.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

impl Shared {
    /// Names that were made, changed and removed until now are on stable storage. If that fails
    /// nothing is written any more, and no journal removed: what the disk has of the names is not
    /// known then, and the system tells an error once, so that a sync that succeeds afterwards says
    /// nothing of what was before.
    pub(crate) fn sync_names(&self) -> Result<()> {
        // So nobody's success stands beside the failure of somebody else that is not known yet.
        let _alone = self.flush.naming.lock();
        if let Some(error) = self.flush.failure() {
            return Err(error);
        }
        let path = self.directory.path();
        let synced = self.directory.sync().map_err(Error::io(path, "syncing the directory"));
        synced.inspect_err(|error| self.flush.fail(error.clone()))
    }

    /// Give back what a file holds that has no name any more, on stable storage: from its end,
    /// resting after each step for as long as it took, unless writers wait for the room. A file
    /// system that is mounted with `discard` tells the disk what is free, and a disk that discards
    /// 128 MiB at once does nothing else meanwhile: the flushes of a log on it take 30 ms and more,
    /// and 4 ms beside steps of 4 MiB.
    ///
    /// A file that is still read in comes free with the last one who has it open, at once.
    pub(crate) fn free(&self, mut file: Arc<dyn File>) {
        let asked = Instant::now();
        while Arc::get_mut(&mut file).is_none() {
            // A read is soon over; an iteration may take for ever.
            if asked.elapsed() >= LET_GO_WITHIN {
                return;
            }
            thread::sleep(LOOK_AGAIN);
        }
        let Ok(mut len_bytes) = file.len_bytes() else { return };
        // The last step is to close it.
        while len_bytes > FREED_BYTES && !self.keep.waker.is_closing() {
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
