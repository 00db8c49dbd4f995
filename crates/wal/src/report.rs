//! The results of recovery and inspection.

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
    /// Start of the record in the log.
    pub offset: LogOffset,
    /// End of the record; a later record may start there or after a padding.
    pub end: LogOffset,
    /// Epoch of the writer that appended it.
    pub epoch: u32,
    /// The bytes appended. They may be part of a 256 KiB read buffer, which they keep alive: copy
    /// them to keep them for long.
    pub payload: Bytes,
}

/// A part of the log that was durable and cannot be read back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Range of the log.
    pub range: Range<LogOffset>,
    /// Start of the range on the device.
    pub device_at: DeviceOffset,
    /// What was found at the start of the range.
    pub reason: String,
}

/// A single damaged range of the log; several adjacent ones may form one [`Damage`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedRange {
    /// Range of the log. A record starts here, and another one, or the end of the log, follows.
    pub range: Range<LogOffset>,
    /// Whether the record header is intact: the range is then exactly one record, and only its
    /// payload is damaged.
    pub is_one_record: bool,
    /// The first bytes of the payload as they are on the device, if a record header precedes them:
    /// at most [`DamagedRange::HEAD_BYTES`]. Not verified by any checksum of the log.
    pub head: Bytes,
}

impl DamagedRange {
    /// Upper bound of [`DamagedRange::head`].
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

/// The result of recovery or of a read-only scan.
#[derive(Clone, Debug)]
pub struct RecoveryReport {
    /// Identity of the WAL, fixed when it was formatted.
    pub wal_id: Uuid,
    /// Number of records handed out.
    pub records: u64,
    /// Total bytes of their payloads.
    pub payload_bytes: u64,
    /// Start of the log: the trim offset.
    pub start: LogOffset,
    /// End of the log, where the next record goes.
    pub end: LogOffset,
    /// Whether the last writer closed the WAL.
    pub clean_shutdown: bool,
    /// Acknowledged data that cannot be read back, in log order. Never handed out.
    pub damage: Vec<Damage>,
    /// The damage without merging adjacent ranges, with the remains of each record, for a user
    /// that can identify from them what was lost.
    pub damaged_ranges: Vec<DamagedRange>,
    /// Intact records after the end. A crash lost something before them, so they were never
    /// acknowledged.
    pub dropped_records: u64,
    /// After [`Wal::open`](crate::Wal::open), the epoch of this writer; after a scan, that of the
    /// last writer.
    pub epoch: u32,
    /// Size of the ring.
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
            if self.clean_shutdown { "a clean" } else { "an unclean" },
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
    /// Increases by one with each header write. The newest header is the one with the greater
    /// epoch, then the greater generation.
    pub generation: u64,
    /// Bytes of the device in use.
    pub capacity_bytes: u64,
    /// The trim offset: records before it are gone.
    pub trim: LogOffset,
    /// Bound on the bytes that a crash can leave behind the first hole.
    pub window_bytes: u64,
    /// Epoch of the writer.
    pub epoch: u32,
    /// Node of the writer.
    pub node_id: u32,
    /// Start of the epoch in the log.
    pub epoch_start: LogOffset,
    /// The durable offset when this header was written.
    pub durable: LogOffset,
    /// Unix time in milliseconds; for information only.
    pub written_at_ms: u64,
    /// Whether the log ends exactly at `durable`.
    pub clean_shutdown: bool,
    /// Byte of the ring at logical offset 0; 0 until the WAL is resized.
    pub origin_bytes: u64,
    /// The user's mark, which never decreases; 0 until one is set. See
    /// [`Wal::set_mark`](crate::Wal::set_mark).
    pub mark: u64,
}

/// The content of a header slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slot {
    /// An intact header.
    Valid(HeaderInfo),
    /// All zero.
    Empty,
    /// A header of a later version, described by the text.
    Future(String),
    /// A damaged header; the text says what is wrong.
    Damaged(String),
    /// Something else.
    Foreign,
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Valid(header) => write!(f, "valid, generation {}", header.generation),
            Self::Empty => write!(f, "empty"),
            Self::Future(found) => write!(f, "{found}, not supported by this program"),
            Self::Damaged(reason) => write!(f, "damaged: {reason}"),
            Self::Foreign => write!(f, "not a header"),
        }
    }
}

/// Both header slots and the valid header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspection {
    /// The content of the slots.
    pub slots: [Slot; 2],
    /// The slot of the valid header, 0 or 1.
    pub newest: usize,
    /// The valid header.
    pub header: HeaderInfo,
    /// Size of the ring.
    pub ring_bytes: u64,
}
