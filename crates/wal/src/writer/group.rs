//! Group commit: records into blocks, and the choice of the next block to write.

use std::time::Duration;

use super::{BlockWrite, Flight, Payload, Shared, State};
use crate::AppendError;
use crate::batch::Placed;
use crate::block::{Block, Piece};
use crate::layout::{LogOffset, RECORD_HEADER_BYTES};
use crate::record::{Kind, RecordHeader};

/// Minimum length of a body that is referenced instead of copied at once.
const SHARED_BYTES: usize = 32 * 1024;

/// Partial blocks are written while fewer writes than this are in flight.
const EARLY_WRITES: usize = 2;
/// The equivalent of [`EARLY_WRITES`] under a limit on writes.
const EARLY_PACED_WRITES: usize = 3;

/// A record that is being placed into blocks.
struct Placement {
    offset: LogOffset,
    end: LogOffset,
    /// Whether a block may exceed its size to complete the record.
    complete: bool,
}

/// How a block is written.
#[derive(Clone, Copy)]
enum Form {
    /// The first closed block.
    Sealed,
    /// The current block to its end; the next block repeats its last page.
    Cut,
    /// The current block with a padding.
    Padded,
    /// The whole pages of the current block.
    Pages,
}

impl State {
    /// Appends a record, or changes nothing.
    pub(super) fn append(
        &mut self,
        shared: &Shared,
        payload: &Payload<'_>,
    ) -> Result<Placed, AppendError> {
        let Payload { head, body, .. } = *payload;
        let record_bytes = RECORD_HEADER_BYTES as u64 + u64::from(payload.len);
        let offset = self.cursors.appended();
        let end = LogOffset(offset.0 + record_bytes);
        if let Err(refused) = self.cursors.check_fits(end) {
            let fits = match refused {
                AppendError::WindowFull { needed_bytes, .. } => {
                    self.window.refused(&mut self.cursors, needed_bytes)
                }
                _ => false,
            };
            if !fits {
                return Err(refused);
            }
        }
        let header = shared.codec.encode(&RecordHeader {
            kind: Kind::Data,
            payload_len: payload.len,
            offset,
            epoch: shared.epoch,
            proof: self.cursors.durable(),
            payload_crc: payload.crc,
        });
        let record = Placement {
            offset,
            end,
            // With blocks queued before it there is no hurry, and equally sized blocks are best.
            complete: self.sealed.is_empty()
                && match self.limiter {
                    None => self.flights.len() < shared.options.io_depth,
                    // A late record must not cost the next one a second write.
                    Some(_) => self.flights.len() < EARLY_WRITES,
                },
        };
        let mut at = offset;
        if body.len() >= SHARED_BYTES {
            let head = [&[&header[..]], head].concat().concat();
            at = self.put(shared, &record, at, Piece::Shared(&head.into()));
            at = self.put(shared, &record, at, Piece::Shared(body));
        } else {
            for piece in std::iter::once(&&header[..]).chain(head).chain([&&body[..]]) {
                at = self.put(shared, &record, at, Piece::Copied(piece));
            }
        }
        assert_eq!(at, end, "the record's position in the log");
        self.window.appended(&self.cursors);
        self.counters.records += 1;
        self.counters.payload_bytes += u64::from(payload.len);
        Ok(Placed { offset, end, body_crc32c: payload.body_crc })
    }

    /// Appends a piece of a record at `at`, across as many blocks as needed. Returns its end.
    fn put(
        &mut self,
        shared: &Shared,
        record: &Placement,
        mut at: LogOffset,
        piece: Piece<'_>,
    ) -> LogOffset {
        let (device, len) = (&*shared.device, piece.bytes().len());
        let mut done = 0;
        while done < len {
            let block = self.current.get_or_insert_with(|| {
                Block::open(device, shared.options.block_bytes, at, record.offset, &self.tail)
            });
            let fitting = block.fitting_bytes(record.end.0 - at.0, record.complete) as usize;
            let next = len.min(done + fitting);
            block.push(device, piece, done..next);
            at.0 += (next - done) as u64;
            done = next;
            let rest = record.end.0 - at.0;
            if rest == 0 {
                block.end_record();
                self.cursors.append(record.end);
            }
            if block.is_full() && (rest == 0 || block.fitting_bytes(rest, record.complete) == 0) {
                self.seal();
            }
        }
        at
    }

    /// Closes the current block, with a padding unless it ends on a page boundary, so that the next
    /// block need not wait for it.
    fn seal(&mut self) {
        let Some(mut block) = self.current.take() else { return };
        let padding = block.pad();
        if padding > 0 {
            self.cursors.append(block.end());
            self.counters.padding_bytes += padding;
        }
        self.sealed.push_back(block);
    }

    /// Takes the block to be written next, if one can be.
    ///
    /// This is group commit without a timer: records appended while writes are in flight share the
    /// next one. Full blocks are written as soon as a slot is free; `next_form` decides about
    /// partial ones.
    pub(super) fn next_write(&mut self, shared: &Shared) -> Option<BlockWrite> {
        if self.flights.len() >= shared.options.io_depth
            || self.resizing.holds_blocks()
            || shared.marks.stopped.get().is_some()
        {
            return None;
        }
        let now = self.limiter.is_some().then(|| shared.started.elapsed());
        let (form, bytes) = self.next_form(shared, now)?;
        if let Some(now) = now
            && self.throttled(shared, now, bytes)
        {
            return None;
        }
        let device = &*shared.device;
        let block = match form {
            Form::Sealed => self.sealed.pop_front(),
            Form::Padded => {
                self.seal();
                self.sealed.pop_front()
            }
            Form::Cut | Form::Pages => self.current.take(),
        };
        let mut block = block.expect("next_form has selected a block");
        match form {
            Form::Cut => block.cut(device, &mut self.tail),
            Form::Pages => self.current = block.carry(device),
            Form::Sealed | Form::Padded => {}
        }
        let (end, boundary) = (block.end(), block.boundary());
        assert_eq!(block.write_bytes(), bytes, "the size charged to the limiter");
        self.cursors.submit(end);
        let pending = self.ring.pieces(block.base(), bytes).count();
        let flight = self.first_flight + self.flights.len() as u64;
        self.flights.push_back(Flight { boundary, bytes, pending, handed_over: false });
        Some(BlockWrite { flight, ring: self.ring, block, durable: self.cursors.durable() })
    }

    /// Decides how the next block is written, if it is, and returns the bytes of its write.
    ///
    /// A partial block is written:
    ///
    /// - with nothing in flight and less than a quarter of a block, cut at its end: small records
    ///   at a low rate take their own size, not whole pages;
    /// - with nothing in flight and at least a quarter of a block, padded, so that the next block
    ///   need not wait for it, which costs 6% at most;
    /// - with one write in flight and at least a quarter of a block, early and padded;
    /// - otherwise not yet.
    ///
    /// With nothing in flight everything is written, since no completion would trigger a later
    /// write. Small blocks never take the slots of full ones, and blocks grow by themselves as the
    /// device slows down. Two writes in flight is measured: as good as one at 1 KiB and 1,024
    /// outstanding, better at 64 KiB and 64 outstanding; with six the same load takes more and
    /// smaller writes and is about a tenth slower in all of these cases.
    ///
    /// Under a limit on writes, early blocks are paced at even distances instead, with at most
    /// three in flight (a disk of 3,000 writes/s and 0.7 ms has two on average; when it queues,
    /// blocks grow here too). A block is then padded if that wastes less than half of its pages;
    /// or, unless bandwidth is to spare, written up to its last page boundary: no byte is padded or
    /// written twice, and the rest goes with the next block.
    fn next_form(&mut self, shared: &Shared, now: Option<Duration>) -> Option<(Form, u64)> {
        let idle = self.flights.is_empty();
        if let Some(block) = self.sealed.front() {
            // If its first page is the last page of the previous block, that block must be durable
            // first.
            return (idle || !block.repeats_page()).then(|| (Form::Sealed, block.write_bytes()));
        }
        let block = self.current.as_ref()?;
        let small = block.new_bytes() < u64::from(shared.options.block_bytes) / 4;
        let padded = (Form::Padded, block.padded_bytes());
        let cut = (Form::Cut, block.write_bytes());
        if let (Some(limiter), Some(now)) = (&mut self.limiter, now)
            && limiter.limits_writes()
        {
            let early = if limiter.has_bytes_to_spare(now) {
                (2 * block.new_bytes() >= padded.1).then_some(padded)
            } else {
                (block.whole_bytes() > 0).then(|| (Form::Pages, block.whole_bytes()))
            };
            if idle {
                return Some(early.unwrap_or(cut));
            }
            if block.repeats_page() || self.flights.len() >= EARLY_PACED_WRITES {
                return None;
            }
            if let (Some(_), Some(wait)) = (early, limiter.early_wait(now)) {
                shared.alarm().set(shared.started + now + wait);
                return None;
            }
            return early;
        }
        match idle {
            true => Some(if small { cut } else { padded }),
            false => (!small && !block.repeats_page() && self.flights.len() < EARLY_WRITES)
                .then_some(padded),
        }
    }

    /// Whether a limit forbids a write of `bytes` now; if so, sets the alarm.
    fn throttled(&mut self, shared: &Shared, now: Duration, bytes: u64) -> bool {
        let Some(limiter) = &mut self.limiter else { return false };
        if now >= self.throttled_until {
            match limiter.take(now, bytes) {
                Ok(()) => return false,
                Err(wait) => self.throttled_until = now + wait,
            }
        }
        // Even if it was set for this time before: an early block may have made it ring sooner.
        shared.alarm().set(shared.started + self.throttled_until);
        true
    }

    /// Records that the device has all requests of `flight`, which may have completed already.
    pub(super) fn handed_over(&mut self, flight: u64) {
        let flight = flight.checked_sub(self.first_flight);
        if let Some(flight) = flight.and_then(|index| self.flights.get_mut(index as usize)) {
            flight.handed_over = true;
        }
    }

    /// Records the completion of a request of `flight`, `took` after the block was submitted.
    /// Returns the new durable offset if it moved, with the count of moves, and whether the block
    /// had been handed over.
    pub(super) fn landed(
        &mut self,
        flight: u64,
        took: Duration,
    ) -> (Option<(LogOffset, u64)>, bool) {
        let index = usize::try_from(flight - self.first_flight).expect("few are in flight");
        let handed_over = self.flights[index].handed_over;
        self.flights[index].pending -= 1;
        if self.flights[index].pending == 0 {
            self.counters.write_times.add(took);
        }
        self.counters.requests += 1;
        let mut durable = None;
        while let Some(first) = self.flights.front()
            && first.pending == 0
        {
            durable = Some(first.boundary);
            self.counters.block_writes += 1;
            self.counters.device_bytes += first.bytes;
            self.flights.pop_front();
            self.first_flight += 1;
        }
        // In the middle of a large record nothing becomes durable.
        let moved = durable.filter(|durable| *durable > self.cursors.durable()).map(|durable| {
            self.cursors.complete(durable);
            self.counters.moves += 1;
            (durable, self.counters.moves)
        });
        (moved, handed_over)
    }
}
