//! Group commit: records into blocks, and which block goes to the device when.

use std::time::Duration;

use bytes::Bytes;

use super::{BlockWrite, Flight, Shared, State};
use crate::AppendError;
use crate::block::{Block, Piece};
use crate::layout::{LogOffset, RECORD_HEADER_BYTES};
use crate::record::{Kind, RecordHeader};

/// From this length on, a body is referred to, not copied at once.
const SHARED_BYTES: usize = 32 * 1024;

/// Blocks that are not full go while fewer writes than this are in flight.
const EARLY_WRITES: usize = 2;
/// The same where writes are limited.
const EARLY_PACED_WRITES: usize = 3;

/// A record on its way into blocks.
struct Placing {
    offset: LogOffset,
    end: LogOffset,
    /// A block may be larger than its size where that completes the record.
    complete: bool,
}

/// How a block goes.
#[derive(Clone, Copy)]
enum Form {
    /// The first of those that are closed.
    Sealed,
    /// The current one, to its end; the next one repeats its last page.
    Cut,
    /// The current one, with a padding.
    Padded,
    /// The whole pages of the current one.
    Pages,
}

impl State {
    /// Put a record at the end of the log, or change nothing.
    pub(super) fn append(
        &mut self,
        shared: &Shared,
        payload_len: u32,
        payload_crc: u32,
        head: &[&[u8]],
        body: &Bytes,
    ) -> Result<(LogOffset, LogOffset), AppendError> {
        let record_bytes = RECORD_HEADER_BYTES as u64 + u64::from(payload_len);
        let offset = self.cursors.appended();
        let end = LogOffset(offset.0 + record_bytes);
        if let Err(refused) = self.cursors.admit(end) {
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
            payload_len,
            offset,
            epoch: shared.epoch,
            proof: self.cursors.durable(),
            payload_crc,
        });
        let record = Placing {
            offset,
            end,
            // With others before it there is no hurry, and blocks of the same size are the best
            // that there is.
            complete: self.sealed.is_empty()
                && match self.limiter {
                    None => self.flights.len() < shared.options.io_depth,
                    // One that is late must not cost the next record a second write.
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
        assert_eq!(at, end, "the record's place in the log");
        self.window.appended(&self.cursors);
        self.counters.records += 1;
        self.counters.payload_bytes += u64::from(payload_len);
        Ok((offset, end))
    }

    /// Put a piece of a record at `at`, into as many blocks as it takes. Returns where it ends.
    fn put(
        &mut self,
        shared: &Shared,
        record: &Placing,
        mut at: LogOffset,
        piece: Piece<'_>,
    ) -> LogOffset {
        let (device, len) = (&*shared.device, piece.bytes().len());
        let mut done = 0;
        while done < len {
            let block = self.current.get_or_insert_with(|| {
                Block::open(device, shared.options.block_bytes, at, record.offset, &self.tail)
            });
            let room = block.room(record.end.0 - at.0, record.complete) as usize;
            let next = len.min(done + room);
            block.push(device, piece, done..next);
            at.0 += (next - done) as u64;
            done = next;
            let rest = record.end.0 - at.0;
            if rest == 0 {
                block.end_record();
                self.cursors.append(record.end);
            }
            if block.is_full() && (rest == 0 || block.room(rest, record.complete) == 0) {
                self.seal();
            }
        }
        at
    }

    /// Close the current block. If it is not full to the page, then with a padding, so that the
    /// next one need not wait for it.
    fn seal(&mut self) {
        let Some(mut block) = self.current.take() else { return };
        let padding = block.pad();
        if padding > 0 {
            self.cursors.append(block.end());
            self.counters.padding_bytes += padding;
        }
        self.sealed.push_back(block);
    }

    /// The block that goes to the device next, if one can.
    ///
    /// Group commit, and no timer in it: what is appended while writes are in flight goes with the
    /// next one. Full blocks go as soon as a slot is free; `next_form` says which others do.
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
        let mut block = block.expect("next_form has looked at it");
        match form {
            Form::Cut => block.cut(device, &mut self.tail),
            Form::Pages => self.current = block.carry(device),
            Form::Sealed | Form::Padded => {}
        }
        let (end, boundary) = (block.end(), block.boundary());
        assert_eq!(block.write_bytes(), bytes, "what the limit was asked for");
        self.cursors.submit(end);
        let pending = self.ring.pieces(block.base(), bytes).count();
        let flight = self.first_flight + self.flights.len() as u64;
        self.flights.push_back(Flight { boundary, bytes, pending, handed_over: false });
        Some(BlockWrite { flight, ring: self.ring, block, durable: self.cursors.durable() })
    }

    /// How the next block goes, if it does, and the bytes of its write.
    ///
    /// With nothing in flight, so that nothing would complete and send the rest, all there is goes:
    /// cut where it ends, so that small records at a low rate take the space of records, not of
    /// pages; or padded if it is at least a quarter of a block, which costs 6% at most, so that the
    /// next one need not wait for it.
    ///
    /// While writes are in flight, a block that is not full is sent early if it is at least a
    /// quarter full and fewer than two writes are in flight. So small blocks never take the slots
    /// of full ones, and as the device slows down blocks grow by themselves. Two is measured: as
    /// good as one at 1 KiB and 1,024 outstanding, better at 64 KiB and 64 outstanding, while with
    /// six the same load goes in more and smaller writes and comes out about a tenth slower in all
    /// of these.
    ///
    /// A limit on writes paces them instead, at even distances and with at most three in flight (a
    /// disk of 3,000 writes/s and 0.7 ms has two on average; when it queues, blocks grow here too).
    /// Then a block is padded if that wastes less than half of its pages; or, unless there are
    /// bytes to spare, sent up to its last page boundary: no byte is padded or written twice, and
    /// what is behind it goes with the next one.
    fn next_form(&mut self, shared: &Shared, now: Option<Duration>) -> Option<(Form, u64)> {
        let idle = self.flights.is_empty();
        if let Some(block) = self.sealed.front() {
            // A first page that is the last page of the block before: that one has to be durable.
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

    /// Whether a limit forbids a write of `bytes` now; then the alarm is set.
    fn throttled(&mut self, shared: &Shared, now: Duration, bytes: u64) -> bool {
        let Some(limiter) = &mut self.limiter else { return false };
        if now >= self.throttled_until {
            match limiter.take(now, bytes) {
                Ok(()) => return false,
                Err(wait) => self.throttled_until = now + wait,
            }
        }
        // Also if it was set for this before: an early block may have had it ring sooner.
        shared.alarm().set(shared.started + self.throttled_until);
        true
    }

    /// The device has all requests of `flight`, which may be gone already.
    pub(super) fn handed_over(&mut self, flight: u64) {
        let flight = flight.checked_sub(self.first_flight);
        if let Some(flight) = flight.and_then(|index| self.flights.get_mut(index as usize)) {
            flight.handed_over = true;
        }
    }

    /// A request of `flight` has completed, so long after the block was submitted. Returns the new
    /// durable offset if it moved, with the count of moves, and whether the block had been handed
    /// over.
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
