//! The walk over the log: it finds records, damage and the end of the log, and writes nothing.
//! Reasons and crash argument: `docs/format/wal.md`, section 6.

use std::time::{Duration, Instant};

use alluvium_device::{Device, DeviceError};
use bytes::Bytes;

use crate::layout::{LogOffset, RECORD_HEADER_BYTES, page_floor};
use crate::record::{Codec, Kind, MAGIC_PREFIX, RecordHeader};
use crate::report::{Damage, DamagedRange, HeaderInfo, Record, RecoveryReport};
use crate::tape::Tape;
use crate::{OpenError, Progress, VisitError};

/// The callback that receives each record of the log, in order.
pub(crate) type Visit<'a> = &'a mut dyn FnMut(Record) -> Result<(), VisitError>;

/// The content at a position of the log.
#[derive(Debug)]
enum Content {
    /// An intact record.
    Data(RecordHeader, Bytes),
    /// A padding record.
    Padding(RecordHeader),
    /// A record header of this log whose payload fails its checksum.
    BadPayload(RecordHeader),
    /// No record, with the reason.
    Nothing(String),
}

impl Content {
    fn header(&self) -> Option<&RecordHeader> {
        match self {
            Self::Data(header, _) | Self::Padding(header) | Self::BadPayload(header) => {
                Some(header)
            }
            Self::Nothing(_) => None,
        }
    }
}

/// The walk's decision at a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// An intact record of the log.
    Take,
    /// It was durable once and is not intact. The log continues behind it.
    Damage,
    /// The log ends here.
    End,
}

/// The table of section 6.
fn judge(at_clean_end: bool, intact: bool, known_durable: bool) -> Verdict {
    match (at_clean_end, intact, known_durable) {
        (true, _, _) => Verdict::End,
        (false, true, _) => Verdict::Take,
        (false, false, true) => Verdict::Damage,
        (false, false, false) => Verdict::End,
    }
}

/// Reads the log described by one header.
struct Reader<'a> {
    header: &'a HeaderInfo,
    codec: Codec,
    tape: Tape<'a>,
    /// No record extends beyond it: the page of the trim offset follows, one lap on.
    limit: LogOffset,
}

impl<'a> Reader<'a> {
    fn new(device: &'a dyn Device, header: &'a HeaderInfo, to: LogOffset) -> Self {
        let limit = LogOffset(page_floor(header.trim.0) + header.ring().bytes());
        let tape = Tape::new(device, header.ring(), to.min(limit));
        Self { header, codec: Codec::new(header.wal_id), tape, limit }
    }

    /// Whether a record of `epoch` is allowed at `x`, after one of epoch `before`.
    fn allowed(&self, x: LogOffset, epoch: u32, before: u32) -> bool {
        if x >= self.header.epoch_start {
            epoch == self.header.epoch
        } else {
            epoch < self.header.epoch && epoch >= before
        }
    }

    /// The record header at `x`, or why there is none.
    fn header_at(&mut self, x: LogOffset, before: u32) -> Result<RecordHeader, String> {
        if x.0 + RECORD_HEADER_BYTES as u64 > self.limit.0 {
            return Err("the ring is full up to here".into());
        }
        let mut bytes = [0; RECORD_HEADER_BYTES];
        self.tape.read(x, &mut bytes);
        let header = self.codec.decode(x, &bytes).map_err(|reason| reason.to_string())?;
        if header.end() > self.limit {
            return Err(format!("record header with an end of {}, beyond the ring", header.end()));
        }
        let reaches_over = |y: LogOffset| x < y && y < header.end();
        if reaches_over(self.header.durable) || reaches_over(self.header.epoch_start) {
            return Err("record header whose record overlaps another one".into());
        }
        if !self.allowed(x, header.epoch, before) {
            return Err(format!("record of epoch {}, which is not allowed here", header.epoch));
        }
        Ok(header)
    }

    fn content_at(&mut self, x: LogOffset, before: u32) -> Content {
        let header = match self.header_at(x, before) {
            Ok(header) => header,
            Err(reason) => return Content::Nothing(reason),
        };
        if header.kind == Kind::Padding {
            return Content::Padding(header);
        }
        let from = LogOffset(x.0 + RECORD_HEADER_BYTES as u64);
        let payload = self.tape.take(from, header.payload_len as usize);
        if crc32c::crc32c(&payload) == header.payload_crc {
            Content::Data(header, payload)
        } else {
            Content::BadPayload(header)
        }
    }

    /// The first position in `from..to` with a record header. Records begin at any byte, so every
    /// byte is checked.
    fn find(&mut self, from: LogOffset, to: LogOffset, before: u32) -> Option<LogOffset> {
        let (mut x, to) = (from.0, to.min(self.limit).0);
        while x < to {
            let bytes = self.tape.slice(LogOffset(x), (to - x) as usize);
            let candidate = (0..bytes.len()).find(|&at| {
                // The magic may continue in the next chunk.
                let here = &bytes[at..bytes.len().min(at + MAGIC_PREFIX.len())];
                here[0] == MAGIC_PREFIX[0] && MAGIC_PREFIX.starts_with(here)
            });
            match candidate {
                None => x += bytes.len() as u64,
                Some(at) => {
                    x += at as u64;
                    if self.header_at(LogOffset(x), before).is_ok() {
                        return Some(LogOffset(x));
                    }
                    x += 1;
                }
            }
        }
        None
    }
}

/// The findings after a hole.
#[derive(Debug, Default)]
struct Beyond {
    /// The greatest proof in a record header there.
    proof: LogOffset,
    /// Number of intact data records.
    records: u64,
    /// The first unreadable page.
    unreadable: Option<(LogOffset, DeviceError)>,
}

/// The result of the walk.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) report: RecoveryReport,
    /// The bytes before the end of the log on its last page.
    pub(crate) tail: Vec<u8>,
}

/// Walks the log that `header` describes, from its trim offset to its end.
pub(crate) fn walk(
    device: &dyn Device,
    header: &HeaderInfo,
    progress: Option<Progress>,
    visit: Visit<'_>,
) -> Result<Found, OpenError> {
    let started = Instant::now();
    // If the end is known, nothing is read ahead of it.
    let to = if header.clean_shutdown { header.durable } else { LogOffset(u64::MAX) };
    let mut walk = Walk {
        device,
        header,
        reader: Reader::new(device, header, to),
        known: header.durable,
        epoch: 0,
        progress,
        next_progress: 0,
        report: RecoveryReport {
            wal_id: header.wal_id,
            records: 0,
            payload_bytes: 0,
            start: header.trim,
            end: header.trim,
            clean_shutdown: header.clean_shutdown,
            damage: Vec::new(),
            damaged_ranges: Vec::new(),
            dropped_records: 0,
            epoch: header.epoch,
            ring_bytes: header.ring().bytes(),
            elapsed: Duration::ZERO,
        },
    };
    let end = walk.run(visit)?;
    let tail = walk.tail(end)?;
    Ok(Found { report: RecoveryReport { end, elapsed: started.elapsed(), ..walk.report }, tail })
}

struct Walk<'a> {
    device: &'a dyn Device,
    header: &'a HeaderInfo,
    reader: Reader<'a>,
    /// Everything before it was durable once, according to the header or the greatest proof so far.
    known: LogOffset,
    /// Epoch of the last record.
    epoch: u32,
    progress: Option<Progress>,
    /// Bytes of the log at which `progress` is called next.
    next_progress: u64,
    report: RecoveryReport,
}

/// Bytes between two calls of the progress callback.
const PROGRESS_STEP: u64 = 4 * 1024 * 1024;

impl Walk<'_> {
    /// Hands out the records and returns the end of the log.
    fn run(&mut self, visit: Visit<'_>) -> Result<LogOffset, OpenError> {
        let mut x = self.header.trim;
        loop {
            self.report_progress(x);
            self.reader.tape.unreadable = None;
            let content = self.reader.content_at(x, self.epoch);
            let intact = matches!(content, Content::Data(..) | Content::Padding(_));
            let at_clean_end = self.header.clean_shutdown && x == self.header.durable;
            let mut beyond = Beyond::default();
            if !intact && !at_clean_end && x >= self.known {
                beyond = self.search_beyond(x, &content);
                self.known = self.known.max(beyond.proof);
            }
            match (judge(at_clean_end, intact, x < self.known), content) {
                (Verdict::Take, Content::Data(header, payload)) => {
                    self.report.records += 1;
                    self.report.payload_bytes += payload.len() as u64;
                    visit(Record { offset: x, end: header.end(), epoch: header.epoch, payload })
                        .map_err(|source| OpenError::Visit { at: x, source })?;
                    x = self.passed(&header);
                }
                (Verdict::Take, Content::Padding(header)) => x = self.passed(&header),
                (Verdict::Take, Content::BadPayload(_) | Content::Nothing(_)) => {
                    unreachable!("only an intact record is taken")
                }
                (Verdict::Damage, content) => x = self.damaged(x, &content),
                (Verdict::End, _) => {
                    if let Some((at, cause)) = beyond.unreadable {
                        return Err(OpenError::EndUnreadable { at, cause });
                    }
                    self.report.dropped_records = beyond.records;
                    return Ok(x);
                }
            }
        }
    }

    fn report_progress(&mut self, x: LogOffset) {
        let done = x.0 - self.header.trim.0;
        if let Some(progress) = &self.progress
            && done >= self.next_progress
        {
            // The length of the log is known only at its end; it is at least what is known to be
            // durable.
            progress(done, self.known.0.max(x.0) - self.header.trim.0);
            self.next_progress = done + PROGRESS_STEP;
        }
    }

    /// Passes an intact record.
    fn passed(&mut self, header: &RecordHeader) -> LogOffset {
        self.known = self.known.max(header.proof);
        self.epoch = header.epoch;
        header.end()
    }

    /// Records the damage at `x` and returns the next position to examine: the one after it if its
    /// header is intact and not an old one, otherwise the next header, but not beyond what is known
    /// to have been durable, where a record began in any case.
    fn damaged(&mut self, x: LogOffset, content: &Content) -> LogOffset {
        let reason = match (&self.reader.tape.unreadable, content) {
            (Some((_, cause)), _) => format!("not readable: {cause}"),
            (None, Content::Nothing(reason)) => reason.clone(),
            (None, _) => "payload with a wrong checksum".into(),
        };
        let from = LogOffset(x.0 + 1);
        let end = content.header().map_or(self.known, RecordHeader::end).min(self.known);
        let next = match content.header() {
            // A record never contains another. If a record of a later epoch is inside this one,
            // this header is old, and reappeared because the write over it was lost.
            Some(header) if header.epoch < self.header.epoch => {
                self.reader.find(from, end, header.epoch + 1)
            }
            Some(_) => None,
            None => self.reader.find(from, end, self.epoch),
        };
        let next = next.unwrap_or(end);
        let head = self.head(x, next);
        self.report.damaged_ranges.push(DamagedRange {
            range: x..next,
            is_one_record: content.header().is_some_and(|header| header.end() == next),
            head,
        });
        match self.report.damage.last_mut() {
            Some(last) if last.range.end == x => last.range.end = next,
            _ => self.report.damage.push(Damage {
                range: x..next,
                device_at: self.header.ring().device_offset(x),
                reason,
            }),
        }
        next
    }

    /// The bytes where the payload of a record at `x` begins, as far as they are before `next`.
    fn head(&mut self, x: LogOffset, next: LogOffset) -> Bytes {
        let from = x.0 + RECORD_HEADER_BYTES as u64;
        let len = next.0.saturating_sub(from).min(DamagedRange::HEAD_BYTES as u64);
        let mut head = vec![0; len as usize];
        // Unreadable bytes are read as zeros. They are part of the damage already recorded.
        self.reader.tape.read(LogOffset(from), &mut head);
        head.into()
    }

    /// Searches for records after a hole at `x`. Everything ever written is within one window of
    /// the durable offset: if `x` was not durable, nothing is beyond `x + window`. If it was, and
    /// the log continues, a proof of it may be as far as the window after that, since each record's
    /// proof may be a window old.
    fn search_beyond(&self, x: LogOffset, content: &Content) -> Beyond {
        let reach = |windows: u64| LogOffset(x.0 + windows * self.header.window_bytes);
        let mut reader = Reader::new(self.device, self.header, reach(2));
        let mut beyond =
            Beyond { unreadable: self.reader.tape.unreadable.clone(), ..Beyond::default() };
        let mut to = reach(1);
        let mut epoch = self.epoch;
        // The next record header follows directly, unless that is damaged too.
        let mut from = content.header().map_or(LogOffset(x.0 + 1), RecordHeader::end);
        while let Some(here) = reader.find(from, to, epoch) {
            let content = reader.content_at(here, epoch);
            let header = content.header().expect("a header was found here");
            beyond.proof = beyond.proof.max(header.proof);
            beyond.records += u64::from(matches!(content, Content::Data(..)));
            (epoch, from, to) = (header.epoch, header.end(), reach(2));
        }
        beyond.unreadable = beyond.unreadable.or(reader.tape.unreadable);
        beyond
    }

    /// The bytes before `end` on its page, which the next write has to repeat.
    fn tail(&mut self, end: LogOffset) -> Result<Vec<u8>, OpenError> {
        let mut tail = vec![0; (end.0 - page_floor(end.0)) as usize];
        self.reader.tape.unreadable = None;
        self.reader.tape.read(LogOffset(page_floor(end.0)), &mut tail);
        match self.reader.tape.unreadable.take() {
            Some((at, cause)) => Err(OpenError::EndUnreadable { at, cause }),
            None => Ok(tail),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hole_is_damage_only_in_the_durable_part() {
        use Verdict::{Damage, End, Take};
        let table = [
            ((true, true, true), End),
            ((true, true, false), End),
            ((true, false, true), End),
            ((true, false, false), End),
            ((false, true, true), Take),
            ((false, true, false), Take),
            ((false, false, true), Damage),
            ((false, false, false), End),
        ];
        for ((at_clean_end, intact, known_durable), verdict) in table {
            assert_eq!(judge(at_clean_end, intact, known_durable), verdict);
        }
    }
}
