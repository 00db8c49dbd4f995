//! Caches on a disk in memory that can be full or fail, for tests of what is built on a cache. With
//! the feature `sim` only.

use std::fmt;

use crate::cache::Cache;
use crate::error::Result;
use crate::files::sim::SimDirectory;
use crate::options::Options;

/// A directory on such a disk. Clones are the same one.
#[derive(Clone, Default)]
pub struct SimulatedDirectory(SimDirectory);

impl SimulatedDirectory {
    /// As [`Cache::open`], but for the lock: nobody else must have it open.
    ///
    /// # Errors
    /// As [`Cache::open`].
    pub fn open(&self, options: Options) -> Result<Cache> {
        Cache::open_in(Box::new(self.0.clone()), options)
    }

    /// There is room for so many bytes, what is there included, from now on.
    pub fn limit(&self, room_bytes: u64) {
        self.0.limit(room_bytes);
    }

    /// Writes and syncs fail from now on.
    pub fn fail_writes(&self) {
        self.0.break_down();
    }

    /// Reads fail from now on.
    pub fn fail_reads(&self) {
        self.0.fail_reads(u64::MAX);
    }
}

impl fmt::Debug for SimulatedDirectory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedDirectory").finish_non_exhaustive()
    }
}
