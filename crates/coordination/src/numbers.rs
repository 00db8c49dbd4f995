//! Revisions, the numbers of leases, and the identity of a service.

use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The number of a state of all keys. Each transaction that changes something makes the next one.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Revision(pub u64);

impl Revision {
    /// Returns the revision that follows this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.checked_add(1).expect("revisions are used up"))
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of a lease. It is not 0, and is not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LeaseId(pub u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The identity of the history that a service has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Random. It is new when a service is created, and when one was restored from a backup.
    pub store: Uuid,
    /// How often the service was restored from a backup. A backup lacks the numbers that were given
    /// out after it, so functions that give out numbers begin a new range after each restore.
    pub restores: u32,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "store {} (restores: {})", self.store, self.restores)
    }
}
