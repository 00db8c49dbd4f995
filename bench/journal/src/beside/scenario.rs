//! What is measured, beside what.

use serde::Serialize;

/// After so many journals' worth of puts, what was put is replaced where something is: after all
/// that is read.
pub const REPLACED: u64 = 24;
/// One put in so many is replaced after twice the time, so that compaction has something to move;
/// and is read as soon as it is put, so that eviction has.
pub const LASTING: u64 = 8;

/// What works in the background.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scenario {
    /// The flusher alone: nothing is replaced, nothing compressed, and there is room for
    /// everything.
    Quiet,
    /// The same, but what the fill has left on disk was compressed before; nothing more is.
    Compressed,
    /// Journals have few live bytes, one after the other: what is put replaces something.
    Compaction,
    /// Journals that leave the memory are compressed.
    Compression,
    /// The disk budget is used up: for each new journal the oldest one goes.
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

    /// The number of the key of a put.
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

    /// Nothing works in the background but the flusher: what the others are compared with.
    pub fn is_quiet(self) -> bool {
        matches!(self, Self::Quiet | Self::Compressed)
    }

    /// What the fill has left on disk is compressed before anything is measured.
    pub fn has_compressed(self) -> bool {
        matches!(self, Self::Compressed | Self::Compression)
    }

    /// Which reads are measured beside it.
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
    /// Keys that were put not long ago.
    Memory,
    /// Keys whose records are not in memory any more, nor compressed.
    Disk,
    /// Keys whose records are in compressed journals: those that the fill has left on disk.
    Compressed,
}

pub const READS: [Reads; 3] = [Reads::Memory, Reads::Disk, Reads::Compressed];

impl Reads {
    /// What the others are compared with.
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
