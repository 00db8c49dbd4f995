//! What recovery and inspection say.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use alluvium_device::DeviceOffset;
use bytes::Bytes;
use uuid::Uuid;

use crate::LogOffset;

/// A record as recovery hands it out: intact, and certain to stay in the log until it is trimmed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Where it starts in the log.
    pub offset: LogOffset,
    /// Where it ends; a later record may start there or behind a padding.
    pub end: LogOffset,
    /// Of the writer that appended it.
    pub epoch: u32,
    /// What was appended. It may be a part of a read buffer of 1 MiB, which it keeps alive: copy
    /// what is kept for long.
    pub payload: Bytes,
}

/// A part of the log that was durable once and cannot be read back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Where in the log.
    pub range: Range<LogOffset>,
    /// Where the range starts on the device.
    pub device_at: DeviceOffset,
    /// What was found at its start.
    pub reason: String,
}

/// A place of the log that is damaged; several of them may make one [`Damage`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedPlace {
    /// Where in the log. A record starts here, and another one, or the end of the log, follows.
    pub range: Range<LogOffset>,
    /// Whether the record header is intact: then the range is exactly one record, and only its
    /// payload is damaged.
    pub is_one_record: bool,
    /// The first bytes of the payload as they are on the device, if a record header stands before
    /// them: at most [`DamagedPlace::HEAD_BYTES`]. Not verified by any checksum of the log.
    pub head: Bytes,
}

impl DamagedPlace {
    /// How much of the payload is reported.
    pub const HEAD_BYTES: usize = 96;
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Range { start, end } = &self.range;
        write!(
            f,
            "log {start}..{end} ({} bytes), device {}: {}",
            end.0 - start.0,
            self.device_at.0,
            self.reason
        )
    }
}

/// What recovery, or a read-only scan, found.
#[derive(Clone, Debug)]
pub struct RecoveryReport {
    /// Identity of the WAL, fixed when it was formatted.
    pub wal_id: Uuid,
    /// Records handed out.
    pub records: u64,
    /// Bytes of their payloads.
    pub payload_bytes: u64,
    /// Where the log starts: the trim offset.
    pub start: LogOffset,
    /// Where it ends, and the next record goes.
    pub end: LogOffset,
    /// Whether the last writer closed the WAL.
    pub clean_shutdown: bool,
    /// Acknowledged data that cannot be read back, in log order. Never handed out.
    pub damage: Vec<Damage>,
    /// The same, place by place, with what is left of each record: for a user that can tell from it
    /// what was lost.
    pub damaged_places: Vec<DamagedPlace>,
    /// Intact records behind the end: a crash lost something before them, so that they were never
    /// acknowledged.
    pub dropped_records: u64,
    /// The epoch of this writer after [`Wal::open`](crate::Wal::open); of the last one after a
    /// scan.
    pub epoch: u32,
    /// Bytes of the ring.
    pub ring_bytes: u64,
    /// Time from the first read to the last.
    pub elapsed: Duration,
}

impl fmt::Display for RecoveryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} records, {} bytes of payload, log {}..{} after {} shutdown, epoch {}, {:.3} s",
            self.records,
            self.payload_bytes,
            self.start,
            self.end,
            if self.clean_shutdown { "a clean" } else { "no clean" },
            self.epoch,
            self.elapsed.as_secs_f64()
        )?;
        if self.dropped_records > 0 {
            write!(f, "; {} unacknowledged records behind the end dropped", self.dropped_records)?;
        }
        for damage in &self.damage {
            write!(f, "; damaged: {damage}")?;
        }
        Ok(())
    }
}

/// The content of a header slot; see `docs/format/wal.md`, section 3.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderInfo {
    /// Identity, fixed by `format`.
    pub wal_id: Uuid,
    /// +1 with each header write; the newest header is the one with the greater epoch, then the
    /// greater generation.
    pub generation: u64,
    /// Bytes of the device in use.
    pub capacity_bytes: u64,
    /// Records before it are gone.
    pub trim: LogOffset,
    /// Bound on what a crash can leave behind the first hole.
    pub window_bytes: u64,
    /// Of the writer.
    pub epoch: u32,
    /// Of the writer.
    pub node_id: u32,
    /// Where the epoch began.
    pub epoch_start: LogOffset,
    /// All before it was durable when this header was written.
    pub durable: LogOffset,
    /// Unix time in milliseconds; for people, decides nothing.
    pub written_at_ms: u64,
    /// Whether the log ends exactly at `durable`.
    pub clean_shutdown: bool,
    /// Byte of the ring at which logical offset 0 lies; 0 until the WAL is resized.
    pub origin_bytes: u64,
    /// A number of the log's user, which never goes back; 0 until one is set. See
    /// [`Wal::set_mark`](crate::Wal::set_mark).
    pub mark: u64,
}

/// What one header slot holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slot {
    /// Intact.
    Valid(HeaderInfo),
    /// All zero.
    Empty,
    /// Written by a later version; the text says which.
    Future(String),
    /// Starts like a header and is none; the text says what is wrong.
    Damaged(String),
    /// Something else.
    Foreign,
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Valid(header) => write!(f, "valid, generation {}", header.generation),
            Self::Empty => write!(f, "empty"),
            Self::Future(found) => write!(f, "{found}, unknown here"),
            Self::Damaged(reason) => write!(f, "damaged: {reason}"),
            Self::Foreign => write!(f, "not a header"),
        }
    }
}

/// Both header slots and what follows from them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspection {
    /// What the slots hold.
    pub slots: [Slot; 2],
    /// The slot that counts, 0 or 1.
    pub newest: usize,
    /// Its content.
    pub header: HeaderInfo,
    /// Bytes of the ring.
    pub ring_bytes: u64,
}
