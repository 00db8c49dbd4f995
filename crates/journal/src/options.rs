//! The options of a cache.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use alluvium_device::PAGE_BYTES;

/// When a write reaches stable storage. See `docs/journal-cache.md`, "Durability".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// At some later time: for data that can be obtained again.
    #[default]
    None,
    /// Within this time plus the time to write and sync what was put meanwhile. Writers wait so
    /// that the latter does not exceed the interval at the recent speed of the disk. (About 3 MiB
    /// may always be outstanding, however slow the disk is.) At least one millisecond.
    Interval(Duration),
    /// When the call returns. Concurrent calls share a sync.
    Always,
}

/// What happens when the disk budget is used up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// The oldest records are evicted, except those that were read. If eviction fails (for example
    /// because the directory is no longer writable), writes fail with its [`crate::Error::Io`] once
    /// the budget is used up, until a retry succeeds; it is retried every second.
    #[default]
    Evict,
    /// Writes fail with [`crate::Error::DiskFull`]: puts when space for three journals is left,
    /// deletions when space for two is left. Compacting what was deleted or has expired makes space
    /// again.
    Refuse,
}

/// The compression of journals that are no longer in memory, applied in the background. Journals
/// that are already compressed stay as they are, and are readable whatever is chosen here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// No compression: a read of a small record reads a page.
    None,
    /// LZ4: the fastest to decompress. A read of a small record decompresses 16 KiB.
    #[default]
    Lz4,
    /// zstd, level 3: smaller on disk, several times the processor time of LZ4.
    Zstd,
    /// Snappy: similar to LZ4 in most respects.
    Snappy,
}

impl Compression {
    const ALL: [(Self, &str); 4] =
        [(Self::None, "none"), (Self::Lz4, "lz4"), (Self::Zstd, "zstd"), (Self::Snappy, "snappy")];
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = Self::ALL.iter().find(|(compression, _)| compression == self);
        f.pad(named.expect("all are named").1)
    }
}

impl FromStr for Compression {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|(_, name)| *name == text);
        found
            .map(|(compression, _)| *compression)
            .ok_or_else(|| format!("{text}: compression is none, lz4, zstd or snappy"))
    }
}

/// A tag of four bytes, chosen by the program that creates the cache, that keeps a program from
/// opening another program's cache. Default: no tag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contents(pub [u8; 4]);

impl fmt::Display for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self == Self::default() {
            true => f.write_str("no contents"),
            false => write!(f, "contents `{}`", self.0.escape_ascii()),
        }
    }
}

/// The options for opening a cache.
#[derive(Clone, Debug)]
pub struct Options {
    /// Memory for journals, in bytes: the newest one, those waiting to be written, as many others
    /// as fit, and cached parts (records and decompressed frames) of those that do not fit. At
    /// least four journals. Default 1 GiB.
    ///
    /// Not included are the index; what readers keep (a value of a journal in memory keeps that
    /// journal; a value read from disk keeps its record, its frame or, in an iteration, its MiB);
    /// the bits that track publication, a 64th of this; and some MiB for background work. See
    /// `docs/journal-cache.md`.
    pub memory_bytes: usize,
    /// Disk space for journals, in bytes. At least eight journals. Not included are hints (24 bytes
    /// for each record) and files that openings set aside ([`crate::SetAside`]). Default 16 GiB.
    pub max_disk_bytes: u64,
    /// The size of a journal's file in bytes, which bounds a record: a multiple of 4 KiB, 1 MiB to
    /// 1 GiB. An existing cache keeps its own size. Default 128 MiB.
    pub journal_bytes: usize,
    /// When a write reaches stable storage. Default [`Durability::None`].
    pub durability: Durability,
    /// What happens when the disk budget is used up. Default [`WhenFull::Evict`].
    pub when_full: WhenFull,
    /// The compression of journals that are no longer in memory. Default [`Compression::Lz4`].
    pub compression: Compression,
    /// The tag of the program that uses the cache. A cache that was created with another tag is
    /// refused ([`crate::Error::OtherContents`]).
    pub contents: Contents,
    /// Whether to create the directory and the cache if they do not exist. Default true.
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
            compression: Compression::default(),
            contents: Contents::default(),
            create: true,
        }
    }
}

/// The newest journal, its successor, one being written and one being read.
const MIN_JOURNALS_IN_MEMORY: usize = 4;
/// Includes what eviction needs to move the records that it keeps.
const MIN_JOURNALS_ON_DISK: u64 = 8;

/// Returns whether journals may have this size.
pub(crate) fn is_size(journal_bytes: usize) -> bool {
    journal_bytes.is_multiple_of(PAGE_BYTES) && (MIB..=1024 * MIB).contains(&journal_bytes)
}

/// At least one part in this many of the memory is for cached records and frames of cold journals,
/// if there are more than the minimum of journals.
const BLOCKS_PART: usize = 16;

/// How the memory budget is divided.
pub(crate) struct Memory {
    /// The number of journals.
    pub(crate) arenas: usize,
    /// For cached parts of cold journals: what whole journals do not use.
    pub(crate) block_bytes: usize,
}

impl Options {
    /// Divides the memory among journals of `journal_bytes` and cached parts. The options must be
    /// valid.
    pub(crate) fn memory(&self, journal_bytes: usize) -> Memory {
        let arenas = (self.memory_bytes - self.memory_bytes / BLOCKS_PART) / journal_bytes;
        let arenas = arenas.max(MIN_JOURNALS_IN_MEMORY);
        let block_bytes = self.memory_bytes.saturating_sub(arenas * journal_bytes);
        Memory { arenas, block_bytes }
    }

    /// Returns what is wrong with the options, for journals of `journal_bytes`.
    pub(crate) fn fault(&self, journal_bytes: usize) -> Option<String> {
        if !is_size(journal_bytes) {
            return Some(format!(
                "journal_bytes is {journal_bytes}; it must be 1 MiB to 1 GiB, a multiple of 4 KiB"
            ));
        }
        let min_memory_bytes = MIN_JOURNALS_IN_MEMORY * journal_bytes;
        if self.memory_bytes < min_memory_bytes {
            return Some(format!(
                "memory_bytes is {}; with journals of {journal_bytes} bytes it must be at least \
                 {min_memory_bytes}: give it more, or create a new cache with smaller journals",
                self.memory_bytes
            ));
        }
        let min_disk_bytes = MIN_JOURNALS_ON_DISK * journal_bytes as u64;
        if self.max_disk_bytes < min_disk_bytes {
            return Some(format!(
                "max_disk_bytes is {}; with journals of {journal_bytes} bytes it must be at least \
                 {min_disk_bytes}",
                self.max_disk_bytes
            ));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_the_memory_budget_do_not_exceed_it() {
        for memory_bytes in [4 * MIB, 5 * MIB, 5 * MIB + 4096, 8 * MIB, 100 * MIB] {
            for (compression, name) in Compression::ALL {
                let options = Options { memory_bytes, compression, ..Options::default() };
                let memory = options.memory(MIB);
                assert_eq!(memory.arenas * MIB + memory.block_bytes, memory_bytes);
                assert!(memory.arenas >= MIN_JOURNALS_IN_MEMORY);
                if memory_bytes > 5 * MIB {
                    assert!(memory.block_bytes >= memory_bytes / BLOCKS_PART);
                }
                assert_eq!(name.parse(), Ok(compression));
                assert_eq!(compression.to_string(), name);
            }
        }
        assert!("gzip".parse::<Compression>().is_err());
    }
}
