//! What recovery found.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use alluvium_wal::{LogOffset, RecoveryReport};

use crate::types::{StreamId, StreamOffset};

/// What recovery found.
#[derive(Clone, Debug)]
pub struct Recovery {
    /// The report of the WAL, its damage in particular.
    pub wal: RecoveryReport,
    /// Streams in the catalog.
    pub streams: usize,
    /// Batches taken from the WAL into the log cache.
    pub batches: u64,
    /// Their payload in bytes.
    pub payload_bytes: u64,
    /// Batches in the WAL that are uploaded already: the last run ended between commit and trim.
    pub skipped_uploaded: u64,
    /// Batches in the WAL whose stream was deleted.
    pub skipped_deleted: u64,
    /// Offsets without records because of damage to the WAL, sorted by stream and offset. Readers
    /// skip them. Not logged here, because only the owner of the streams has names for them.
    pub gaps: Vec<Gap>,
    /// Set if the log ends before its uploaded end: its end is damaged, or the device holds an old
    /// copy. What was in this range is uploaded; what was after it is lost.
    pub missing_end: Option<Range<LogOffset>>,
    /// Streams with a gap that a rebuild has declared, because a WAL was lost. While there are any,
    /// objects that the catalog does not have may hold a part of what was lost, and are kept.
    pub declared_gaps: usize,
    /// Lists of changes of the catalog that were in the log and are lost, at least.
    pub lost_lists: u64,
    /// From the first read of the catalog to the end.
    pub elapsed: Duration,
}

/// Offsets of a stream that have no records because of damage to the WAL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gap {
    /// The stream.
    pub stream: StreamId,
    /// The offsets.
    pub offsets: Range<StreamOffset>,
    /// What is known of them.
    pub cause: GapCause,
}

/// Why offsets have no records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GapCause {
    /// Their records were in the WAL and are lost.
    Lost,
    /// Some of them may have been in the WAL. It is unknown which, if any, so all of them are
    /// skipped: they are an upper bound of what is lost.
    Skipped,
}

impl Gap {
    fn len(&self) -> u64 {
        self.offsets.end.0 - self.offsets.start.0
    }
}

impl Recovery {
    /// Returns the amount of missing data.
    pub(crate) fn lost(&self) -> Lost {
        let damaged = self.wal.damage.iter().map(|damage| &damage.range).chain(&self.missing_end);
        let mut lost = Lost {
            damaged_ranges: damaged.clone().count(),
            damaged_bytes: damaged.map(|range| range.end.0 - range.start.0).sum(),
            lists: self.lost_lists,
            ..Lost::default()
        };
        for gap in &self.gaps {
            let (gaps, offsets) = match gap.cause {
                GapCause::Lost => (&mut lost.gaps, &mut lost.offsets),
                GapCause::Skipped => (&mut lost.skipped_gaps, &mut lost.skipped_offsets),
            };
            *gaps += 1;
            *offsets = offsets.saturating_add(gap.len()); // each stream has up to u64::MAX
        }
        lost
    }
}

impl fmt::Display for Recovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            wal,
            streams,
            batches,
            payload_bytes,
            skipped_uploaded,
            skipped_deleted,
            gaps,
            missing_end,
            declared_gaps: _,
            lost_lists,
            elapsed,
        } = self;
        write!(
            f,
            "{streams} streams; {batches} batches ({payload_bytes} bytes) to upload, \
             {skipped_uploaded} uploaded before, {skipped_deleted} of deleted streams; {:.3} s; \
             WAL: {wal}",
            elapsed.as_secs_f64()
        )?;
        let count = |cause| gaps.iter().filter(|gap| gap.cause == cause).count();
        let (lost, skipped) = (count(GapCause::Lost), count(GapCause::Skipped));
        if lost > 0 {
            write!(f, "; {lost} ranges of offsets are LOST")?;
        }
        if skipped > 0 {
            write!(f, "; {skipped} ranges of offsets are SKIPPED, since they may have been used")?;
        }
        if let Some(missing) = missing_end {
            write!(
                f,
                "; the log's end, {}..{} and what lay behind it, is LOST",
                missing.start, missing.end
            )?;
        }
        if *lost_lists > 0 {
            write!(f, "; {lost_lists} lists of changes of the catalog are LOST")?;
        }
        Ok(())
    }
}

/// What recovery expected to find and did not. All 0 unless the WAL's device is damaged or the
/// catalog does not belong to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lost {
    /// Parts of the WAL that were durable and cannot be read back, [`Recovery::missing_end`]
    /// included.
    pub damaged_ranges: usize,
    /// Their total size.
    pub damaged_bytes: u64,
    /// Lists of changes of the catalog that are lost, at least.
    pub lists: u64,
    /// Ranges of stream offsets whose records are lost; see [`Recovery::gaps`].
    pub gaps: usize,
    /// Offsets in these ranges.
    pub offsets: u64,
    /// Ranges of stream offsets that were skipped because some of them may have been used.
    pub skipped_gaps: usize,
    /// Offsets in these ranges: an upper bound of what is lost in addition to [`Self::offsets`].
    pub skipped_offsets: u64,
}
