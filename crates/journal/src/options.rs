//! What a user chooses.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use alluvium_device::PAGE_BYTES;

/// When a write is on stable storage. `docs/journal-cache.md`, "Durability".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// Some time later: for what can be had again.
    #[default]
    None,
    /// After this time, and what it takes to write and sync what was put meanwhile: writers wait,
    /// so that this takes no longer than the time itself, as the disk was lately. (About 3 MiB may
    /// always be on their way, however slow it is.) Not less than a millisecond.
    Interval(Duration),
    /// When the call returns. Calls at one time share a sync.
    Always,
}

/// What happens when the disk budget is used up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// The oldest records go, but for those that were read. Where that fails (the directory cannot
    /// be written to any more, say), writes fail with its [`crate::Error::Io`] once the budget is
    /// used up, until it succeeds: it is tried again each second.
    #[default]
    Evict,
    /// Writes fail with [`crate::Error::DiskFull`]: puts when three journals of it are left,
    /// deletions when two are. What was deleted or has expired is compacted, and then there is room
    /// again.
    Refuse,
}

/// What journals are compressed with, in the background, once they have left the memory. What is
/// already compressed stays as it is, and is read whatever is chosen here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// They stay as they were written: a read of a small record reads a page.
    None,
    /// LZ4: the fastest to decompress. A read of a small record decompresses 16 KiB.
    #[default]
    Lz4,
    /// zstd, level 3: less disk, several times the processor time of LZ4.
    Zstd,
    /// Snappy: as LZ4, in most respects.
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
            .ok_or_else(|| format!("{text}: journals are compressed by none, lz4, zstd or snappy"))
    }
}

/// What a cache is for, in four bytes that whoever makes it chooses: a program does not take the
/// directory of another one for its own. Default: none is named.
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

/// How a cache is opened.
#[derive(Clone, Debug)]
pub struct Options {
    /// Memory for journals, in bytes: the newest one, those that wait to be written, as many of the
    /// others as fit, and what was read of these that do not (records, and frames that were
    /// decompressed). At least four journals. Default 1 GiB.
    ///
    /// On top come the index, what readers keep (a value of a journal in memory keeps that, one
    /// that was read from disk its record, its frame or, of an iteration, its MiB), a 64th for the
    /// bits that tell what is written, and some MiB for work in the background:
    /// `docs/journal-cache.md`.
    pub memory_bytes: usize,
    /// Disk space for journals, in bytes. At least eight journals; hints come on top (24 bytes for
    /// each record), and what openings have kept aside ([`crate::KeptAside`]). Default 16 GiB.
    pub max_disk_bytes: u64,
    /// Size of a journal's file in bytes, and so bound of a record: a multiple of 4 KiB, 1 MiB to 1
    /// GiB. Of a cache that is already there its own counts. Default 128 MiB.
    pub journal_bytes: usize,
    /// When a write is on stable storage. Default [`Durability::None`].
    pub durability: Durability,
    /// What happens when the disk budget is used up. Default [`WhenFull::Evict`].
    pub when_full: WhenFull,
    /// What journals are compressed with that are not in memory any more. Default
    /// [`Compression::Lz4`].
    pub compression: Compression,
    /// What it is for. One that was made with other contents is refused
    /// ([`crate::Error::OtherContents`]).
    pub contents: Contents,
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
            compression: Compression::default(),
            contents: Contents::default(),
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

/// This part of the memory, at least, is for records and frames that are kept of cold journals, if
/// there are journals to spare.
const BLOCKS_PART: usize = 16;

/// What the memory is used for.
pub(crate) struct Memory {
    /// Number of journals.
    pub(crate) arenas: usize,
    /// For what is kept of cold ones: what whole journals leave.
    pub(crate) block_bytes: usize,
}

impl Options {
    /// How the memory is shared out, with journals of `journal_bytes`, for options without a fault.
    pub(crate) fn memory(&self, journal_bytes: usize) -> Memory {
        let arenas = (self.memory_bytes - self.memory_bytes / BLOCKS_PART) / journal_bytes;
        let arenas = arenas.max(MIN_JOURNALS_IN_MEMORY);
        let block_bytes = self.memory_bytes.saturating_sub(arenas * journal_bytes);
        Memory { arenas, block_bytes }
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_memory_is_used_for_is_no_more_than_there_is() {
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
