//! Caches on a simulated disk in memory that can be full or fail, for tests of code that uses a
//! cache. With the feature `sim` only.

use std::fmt;

use crate::cache::Cache;
use crate::error::Result;
use crate::files::sim::SimDirectory;
use crate::options::Options;

/// A directory on a simulated disk. Clones refer to the same directory.
#[derive(Clone, Default)]
pub struct SimulatedDirectory(SimDirectory);

impl SimulatedDirectory {
    /// Opens a cache as [`Cache::open`], but without a lock: it must not be open already.
    ///
    /// # Errors
    /// As [`Cache::open`].
    pub fn open(&self, options: Options) -> Result<Cache> {
        Cache::open_in(Box::new(self.0.clone()), options)
    }

    /// Limits the disk to this many bytes, including what is there.
    pub fn limit(&self, space_bytes: u64) {
        self.0.limit(space_bytes);
    }

    /// Makes writes and syncs fail from now on.
    pub fn fail_writes(&self) {
        self.0.fail_writes();
    }

    /// Makes reads fail from now on.
    pub fn fail_reads(&self) {
        self.0.fail_reads(u64::MAX);
    }
}

impl fmt::Debug for SimulatedDirectory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedDirectory").finish_non_exhaustive()
    }
}
