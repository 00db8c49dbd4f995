//! Sequential reading of the ring: large reads, a few in flight, with bounded memory.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::mpsc::{Receiver, sync_channel};

use alluvium_device::{AlignedBuf, Device, DeviceError, DeviceOffset, Request};
use bytes::Bytes;

use crate::layout::{DATA_START, LogOffset, PAGE, Ring};

/// Bytes per read: as large as a block, so that its buffer comes from the pool, and small enough
/// that all buffers in use stay in the processor's caches from the device to the checksum. Reads of
/// 1 MiB were slower by a quarter (`docs/benchmarks/recovery.md`).
const CHUNK: u64 = 256 * 1024;
/// Number of chunks read ahead.
const AHEAD: usize = 8;
/// Number of chunks kept: a record header may cross the boundary of two.
const KEPT: usize = 2;

type ReadResult = Result<Option<AlignedBuf>, DeviceError>;

/// Reads the log at logical offsets, best in ascending order.
#[derive(Debug)]
pub(crate) struct Tape<'a> {
    device: &'a dyn Device,
    ring: Ring,
    /// End of the range to read.
    end: u64,
    kept: VecDeque<Chunk>,
    ahead: VecDeque<(Range<u64>, Receiver<ReadResult>)>,
    /// The first unreadable page met since this was last cleared, and the error.
    pub(crate) unreadable: Option<(LogOffset, DeviceError)>,
}

/// A range of the log that does not cross the end of the ring. Unreadable pages are zero.
#[derive(Debug)]
struct Chunk {
    range: Range<u64>,
    bytes: Bytes,
    bad: Vec<(u64, DeviceError)>,
}

impl<'a> Tape<'a> {
    pub(crate) fn new(device: &'a dyn Device, ring: Ring, end: LogOffset) -> Self {
        Self {
            device,
            ring,
            end: end.0,
            kept: VecDeque::new(),
            ahead: VecDeque::new(),
            unreadable: None,
        }
    }

    /// Copies the bytes from `at` on. Unreadable ones are zero, and recorded in `unreadable`.
    pub(crate) fn read(&mut self, at: LogOffset, into: &mut [u8]) {
        let mut done = 0;
        while done < into.len() {
            let from = at.0 + done as u64;
            let part = self.slice(LogOffset(from), into.len() - done);
            into[done..done + part.len()].copy_from_slice(part);
            done += part.len();
        }
    }

    /// Returns `len` bytes from `at` on: a part of the chunk, or a copy if they span several.
    /// Unreadable ones are treated as in [`Tape::read`].
    pub(crate) fn take(&mut self, at: LogOffset, len: usize) -> Bytes {
        if self.slice(at, len).len() == len {
            let chunk = self.kept.back().expect("just loaded");
            let start = (at.0 - chunk.range.start) as usize;
            return chunk.bytes.slice(start..start + len);
        }
        let mut bytes = vec![0; len];
        self.read(at, &mut bytes);
        bytes.into()
    }

    /// Returns the bytes from `at` to the end of the chunk, at least one and at most `limit`.
    pub(crate) fn slice(&mut self, at: LogOffset, limit: usize) -> &[u8] {
        self.load(at.0);
        let chunk = self.kept.back().expect("just loaded");
        let start = (at.0 - chunk.range.start) as usize;
        let len = limit.min(chunk.bytes.len() - start);
        let read = at.0..at.0 + len as u64;
        if self.unreadable.is_none() {
            let hit =
                chunk.bad.iter().find(|(page, _)| *page < read.end && page + PAGE > read.start);
            self.unreadable =
                hit.map(|(page, cause)| (LogOffset((*page).max(at.0)), cause.clone()));
        }
        &chunk.bytes[start..start + len]
    }

    /// The chunk that holds `x`. Chunks have fixed positions in the ring, so none crosses its end.
    fn chunk_of(&self, x: u64) -> Range<u64> {
        let in_ring = self.ring.position(LogOffset(x));
        let (before, after) =
            (in_ring % CHUNK, (CHUNK - in_ring % CHUNK).min(self.ring.bytes() - in_ring));
        // The first lap may begin inside the ring.
        x.saturating_sub(before)..x + after
    }

    /// Loads the chunk that holds `x` as the last of `kept`.
    fn load(&mut self, x: u64) {
        if self.kept.back().is_some_and(|chunk| chunk.range.contains(&x)) {
            return;
        }
        if let Some(index) = self.kept.iter().position(|chunk| chunk.range.contains(&x)) {
            let chunk = self.kept.remove(index).expect("just found");
            self.kept.push_back(chunk);
            return;
        }
        let wanted = self.chunk_of(x);
        if !self.ahead.iter().any(|(range, _)| *range == wanted) {
            self.ahead.clear();
        }
        self.ahead.retain(|(range, _)| range.start >= wanted.start);
        let mut next = self.ahead.back().map_or(wanted.start, |(range, _)| range.end);
        while self.ahead.len() <= AHEAD && (next < self.end || self.ahead.is_empty()) {
            let range = self.chunk_of(next);
            next = range.end;
            let read = self.submit(&range);
            self.ahead.push_back((range, read));
        }
        let (range, read) = self.ahead.pop_front().expect("the requested chunk is in front");
        assert_eq!(range, wanted);
        let chunk = match read.recv().expect("an engine completes every request") {
            Ok(buf) => {
                let buf = buf.expect("a read returns its buffer");
                Chunk { range, bytes: buf.freeze().into_bytes(), bad: Vec::new() }
            }
            Err(_) => self.by_page(range),
        };
        if self.kept.len() == KEPT {
            self.kept.pop_front();
        }
        self.kept.push_back(chunk);
    }

    fn location(&self, range: &Range<u64>) -> (DeviceOffset, usize) {
        let at = self.ring.device_offset(LogOffset(range.start));
        let len = range.end - range.start;
        assert!(
            at.0 >= DATA_START && at.0 + len <= DATA_START + self.ring.bytes(),
            "{range:?} leaves the ring"
        );
        (at, len as usize)
    }

    fn submit(&self, range: &Range<u64>) -> Receiver<ReadResult> {
        let (at, len) = self.location(range);
        let (done, read) = sync_channel(1);
        let buf = self.device.alloc(len);
        self.device
            .submit(Request::Read { at, buf }, Box::new(move |result| drop(done.send(result))));
        read
    }

    /// Reads page by page a chunk that cannot be read as a whole, to lose only the unreadable
    /// pages.
    fn by_page(&self, range: Range<u64>) -> Chunk {
        let (at, len) = self.location(&range);
        let mut buf = AlignedBuf::zeroed(len);
        let mut bad = Vec::new();
        for page in (0..len).step_by(PAGE as usize) {
            match self.device.read(DeviceOffset(at.0 + page as u64), PAGE as usize) {
                Ok(bytes) => buf[page..page + PAGE as usize].copy_from_slice(&bytes),
                Err(cause) => bad.push((range.start + page as u64, cause)),
            }
        }
        Chunk { range, bytes: buf.freeze().into_bytes(), bad }
    }
}

#[cfg(test)]
mod tests {
    use alluvium_device::SharedDevice;
    use alluvium_device::sim::{Faults, SimDisk, SimOptions};

    use super::*;

    /// A disk on which each eight bytes of the ring hold their position.
    fn numbered(ring_bytes: u64) -> (SimDisk, SharedDevice, Ring) {
        let disk = SimDisk::new(SimOptions {
            capacity_bytes: DATA_START + ring_bytes,
            ..SimOptions::default()
        });
        let bytes: Vec<u8> =
            (0..ring_bytes / 8).flat_map(|index| (index * 8).to_le_bytes()).collect();
        disk.poke(DATA_START, &bytes);
        let device = disk.device();
        (disk, device, Ring::new(DATA_START + ring_bytes, 0))
    }

    #[test]
    fn any_range_of_the_ring_can_be_read_in_any_order() {
        let ring_bytes = 3 * CHUNK + 5 * PAGE; // the last chunk is short
        let (_disk, device, ring) = numbered(ring_bytes);
        let mut tape = Tape::new(&*device, ring, LogOffset(4 * ring_bytes));
        let mut check = |at: u64, len: usize| {
            let mut bytes = vec![0; len];
            tape.read(LogOffset(at), &mut bytes);
            for (index, eight) in bytes.chunks_exact(8).enumerate() {
                let expected = (at + 8 * index as u64) % ring_bytes;
                assert_eq!(
                    u64::from_le_bytes(eight.try_into().unwrap()),
                    expected,
                    "{at} + {index} * 8"
                );
            }
        };
        check(0, 64);
        check(CHUNK - 32, 64);
        check(8, 64); // back by a chunk
        check(ring_bytes - 32, 64); // over the end of the ring
        check(2 * ring_bytes + 16, (2 * CHUNK) as usize);
        check(ring_bytes + CHUNK, (ring_bytes - 8) as usize);
    }

    #[test]
    fn an_unreadable_page_loses_only_itself() {
        let (disk, device, ring) = numbered(2 * CHUNK);
        // Requests that begin on this page fail, including the read of the whole chunk that begins
        // with it.
        let faults = Faults { read_error: 1.0, ..Faults::default() };
        disk.set_zone_faults(DATA_START + CHUNK..DATA_START + CHUNK + PAGE, faults);
        let mut tape = Tape::new(&*device, ring, LogOffset(2 * CHUNK));
        let mut bytes = vec![0xff; 2 * PAGE as usize];
        tape.read(LogOffset(CHUNK), &mut bytes);
        assert!(bytes[..PAGE as usize].iter().all(|&byte| byte == 0));
        assert_eq!(bytes[PAGE as usize..PAGE as usize + 8], (CHUNK + PAGE).to_le_bytes());
        let (at, cause) = tape.unreadable.take().expect("noted");
        assert_eq!((at, cause.operation), (LogOffset(CHUNK), "read"));
        tape.read(LogOffset(CHUNK + PAGE), &mut bytes);
        assert!(tape.unreadable.is_none(), "the pages behind it are fine");
    }
}
