//! What is measured, and the background work meanwhile.

use serde::Serialize;

/// The number of journals' worth of puts after which a put is replaced, in scenarios with
/// replacement: later than everything that is read.
pub const REPLACED: u64 = 24;
/// One put in this many is replaced after twice that, so that compaction has something to move, and
/// is read right after it is put, so that eviction has.
pub const LASTING: u64 = 8;

/// The background work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scenario {
    /// The flusher alone: nothing is replaced or compressed, and there is space for everything.
    Quiet,
    /// As `Quiet`, but what the fill has left on disk was compressed before; nothing more is.
    Compressed,
    /// Puts replace earlier ones, so that one journal after the other has few live bytes.
    Compaction,
    /// Journals that leave the memory are compressed.
    Compression,
    /// The disk budget is used up: the oldest journal is evicted for each new one.
    Eviction,
}

pub const SCENARIOS: [Scenario; 5] = [
    Scenario::Quiet,
    Scenario::Compressed,
    Scenario::Compaction,
    Scenario::Compression,
    Scenario::Eviction,
];

impl Scenario {
    pub fn text(self) -> &'static str {
        match self {
            Self::Quiet => "quiet",
            Self::Compressed => "quiet, compressed",
            Self::Compaction => "compaction",
            Self::Compression => "compression",
            Self::Eviction => "eviction",
        }
    }

    /// Returns the number of the key of a put.
    pub fn number(self, put: u64, journal_records: u64) -> u64 {
        if self != Self::Compaction {
            return put;
        }
        // In whole units of `LASTING`, so that none of the lasting numbers is one of the others.
        let replaced = (REPLACED * journal_records).next_multiple_of(LASTING);
        match put.is_multiple_of(LASTING) {
            true => put % (2 * replaced),
            false => put % replaced,
        }
    }

    /// Returns whether only the flusher works in the background: the baseline of the others.
    pub fn is_quiet(self) -> bool {
        matches!(self, Self::Quiet | Self::Compressed)
    }

    /// Returns whether what the fill has left on disk is compressed before anything is measured.
    pub fn has_compressed(self) -> bool {
        matches!(self, Self::Compressed | Self::Compression)
    }

    /// Returns which reads are measured with it.
    pub fn reads(self) -> &'static [Reads] {
        match self {
            Self::Compressed => &[Reads::Compressed],
            Self::Compression => &[Reads::Memory, Reads::Compressed],
            Self::Quiet | Self::Compaction | Self::Eviction => &[Reads::Memory, Reads::Disk],
        }
    }
}

/// What is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Reads {
    /// Keys that were put recently.
    Memory,
    /// Keys whose records are no longer in memory, and not compressed.
    Disk,
    /// Keys whose records are in compressed journals: those that the fill has left on disk.
    Compressed,
}

pub const READS: [Reads; 3] = [Reads::Memory, Reads::Disk, Reads::Compressed];

impl Reads {
    /// Returns the baseline.
    pub fn without(self) -> Scenario {
        match self {
            Self::Memory | Self::Disk => Scenario::Quiet,
            Self::Compressed => Scenario::Compressed,
        }
    }

    pub fn text(self) -> &'static str {
        match self {
            Self::Memory => "in memory",
            Self::Disk => "of the disk",
            Self::Compressed => "of compressed journals",
        }
    }
}
