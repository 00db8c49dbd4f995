//! What a user chooses.

use std::time::Duration;

use alluvium_device::PAGE_BYTES;

/// When a write is on stable storage. `docs/journal-cache.md`, "Durability".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// Some time later: for what can be had again.
    #[default]
    None,
    /// After this time at most, and what a sync takes. Not less than a millisecond.
    Interval(Duration),
    /// When the call returns. Calls at one time share a sync.
    Always,
}

/// What happens when the disk budget is used up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// The oldest records go, but for those that were read.
    #[default]
    Evict,
    /// Writes fail with [`crate::Error::DiskFull`].
    Refuse,
}

/// How a cache is opened.
#[derive(Clone, Debug)]
pub struct Options {
    /// Memory for journals, in bytes: the newest one, those that wait to be written, and as many of the others as fit. The index comes on top. At least four journals. Default 1 GiB.
    pub memory_bytes: usize,
    /// Disk space for journals, in bytes. At least eight journals; hints come on top (24 bytes for each record). Default 16 GiB.
    pub max_disk_bytes: u64,
    /// Size of a journal's file in bytes, and so bound of a record: a multiple of 4 KiB, 1 MiB to 1 GiB. Of a cache that is already there its own counts. Default 128 MiB.
    pub journal_bytes: usize,
    /// When a write is on stable storage. Default [`Durability::None`].
    pub durability: Durability,
    /// What happens when the disk budget is used up. Default [`WhenFull::Evict`].
    pub when_full: WhenFull,
    /// Make the directory and the cache if they are not there. Default true.
    pub create: bool,
}

const MIB: usize = 1 << 20;

impl Default for Options {
    fn default() -> Self {
        Self {
            memory_bytes: 1024 * MIB,
            max_disk_bytes: 16 << 30,
            journal_bytes: 128 * MIB,
            durability: Durability::default(),
            when_full: WhenFull::default(),
            create: true,
        }
    }
}

/// The newest journal, its successor, one that is written, and one that is read.
const MIN_JOURNALS_IN_MEMORY: usize = 4;
/// What eviction needs for moving what is kept.
const MIN_JOURNALS_ON_DISK: u64 = 8;

/// Whether journals may have this size.
pub(crate) fn is_size(journal_bytes: usize) -> bool {
    journal_bytes.is_multiple_of(PAGE_BYTES) && (MIB..=1024 * MIB).contains(&journal_bytes)
}

impl Options {
    /// What is wrong with them, with journals of `journal_bytes`.
    pub(crate) fn fault(&self, journal_bytes: usize) -> Option<String> {
        if !is_size(journal_bytes) {
            return Some(format!(
                "journal_bytes is {journal_bytes}; a journal has 1 MiB to 1 GiB, in whole units of 4 KiB"
            ));
        }
        let min_memory_bytes = MIN_JOURNALS_IN_MEMORY * journal_bytes;
        if self.memory_bytes < min_memory_bytes {
            return Some(format!(
                "memory_bytes is {}; with journals of {journal_bytes} bytes it has to be {min_memory_bytes} at least: give it more, or open a new cache with smaller journals",
                self.memory_bytes
            ));
        }
        let min_disk_bytes = MIN_JOURNALS_ON_DISK * journal_bytes as u64;
        if self.max_disk_bytes < min_disk_bytes {
            return Some(format!(
                "max_disk_bytes is {}; with journals of {journal_bytes} bytes it has to be {min_disk_bytes} at least",
                self.max_disk_bytes
            ));
        }
        None
    }
}
