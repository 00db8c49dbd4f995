//! A block: the bytes of the log that go to the device in one write.
//!
//! Small records are copied at once into the buffer that the device reads. Large ones are only
//! referenced, and copied when the block is written: the number of buffers in use is then that of
//! writes in flight, and they stay in the processor's caches. If a record continues in the next
//! block, [`Block::boundary`] is the end of the last whole one.

use std::fmt;
use std::ops::Range;

use alluvium_device::{AlignedBuf, Device, SharedBuf, copy_in_steps};
use bytes::Bytes;

use crate::layout::{LogOffset, PAGE, RECORD_HEADER_BYTES, padding_len, page_ceil, page_floor};
use crate::record::{Codec, Kind, RecordHeader};

/// The bytes of the log's last page up to its end, which the next write of that page has to repeat.
#[derive(Clone)]
pub(crate) struct Tail {
    page: Box<[u8; PAGE as usize]>,
    len: usize,
}

impl Tail {
    /// `bytes` are those from the page boundary to the end of the log, less than a page.
    pub(crate) fn new(bytes: &[u8]) -> Self {
        let mut tail = Self { page: Box::new([0; PAGE as usize]), len: 0 };
        tail.set(bytes);
        tail
    }

    fn set(&mut self, bytes: &[u8]) {
        assert!(bytes.len() < PAGE as usize);
        self.page[..bytes.len()].copy_from_slice(bytes);
        self.len = bytes.len();
    }
}

impl fmt::Debug for Tail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tail({} bytes)", self.len)
    }
}

/// Bytes by which a block may exceed its size to complete a record.
const EXTRA_BYTES: u64 = 3 * PAGE;

/// A block of the log; see the module documentation. It grows at its end; once closed, only the
/// proof of its padding still changes.
#[derive(Debug)]
pub(crate) struct Block {
    /// Allocated from the device with the first byte copied.
    buf: Option<AlignedBuf>,
    /// Bytes not yet copied to `buf`, and their positions.
    referred: Vec<(usize, Bytes)>,
    /// Log offset of the buffer's first byte: a page boundary.
    base: u64,
    /// Bytes of the first page that an earlier block has written already.
    repeated: usize,
    /// Bytes in use, including the repeated ones.
    len: usize,
    /// Bytes of the padding record at the end of a closed block; at most a page and a header.
    padding: usize,
    /// The size at which it is full; completing a record may exceed it by [`EXTRA_BYTES`].
    block_bytes: u64,
    /// End of the last record that ends in the block, or start of the first one that begins in it.
    boundary: LogOffset,
    /// As `boundary`, up to the last page boundary in the block.
    whole_boundary: LogOffset,
}

/// A piece of a record.
#[derive(Clone, Copy)]
pub(crate) enum Piece<'a> {
    /// Copied at once.
    Copied(&'a [u8]),
    /// Referenced, and copied later.
    Shared(&'a Bytes),
}

impl Piece<'_> {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Copied(bytes) => bytes,
            Self::Shared(bytes) => bytes,
        }
    }
}

impl Block {
    /// Opens an empty block at `start`, for a record that begins there or, at `record`, in an
    /// earlier block. If `start` is inside a page, `tail` holds the preceding bytes of this page.
    pub(crate) fn open(
        device: &dyn Device,
        block_bytes: u32,
        start: LogOffset,
        record: LogOffset,
        tail: &Tail,
    ) -> Self {
        let base = page_floor(start.0);
        let repeated = (start.0 - base) as usize;
        let mut block = Self {
            buf: None,
            referred: Vec::new(),
            base,
            repeated,
            len: repeated,
            padding: 0,
            block_bytes: u64::from(block_bytes),
            boundary: record,
            whole_boundary: record,
        };
        if repeated > 0 {
            assert_eq!(tail.len, repeated, "the tail's bytes are those before {start}");
            block.buf(device)[..repeated].copy_from_slice(&tail.page[..repeated]);
        }
        block
    }

    fn buf(&mut self, device: &dyn Device) -> &mut AlignedBuf {
        // A padding may need one page more than the records.
        let capacity = self.block_bytes + EXTRA_BYTES + PAGE;
        self.buf.get_or_insert_with(|| device.alloc(capacity as usize))
    }

    /// Number of the `rest_bytes` of a record that fit. With `complete`, the block may exceed its
    /// size if that completes the record.
    pub(crate) fn fitting_bytes(&self, rest_bytes: u64, complete: bool) -> u64 {
        let len = self.len as u64;
        if complete && len + rest_bytes <= self.block_bytes + EXTRA_BYTES {
            return rest_bytes;
        }
        rest_bytes.min(self.block_bytes.saturating_sub(len))
    }

    /// Whether it has reached its size.
    pub(crate) fn is_full(&self) -> bool {
        self.len as u64 >= self.block_bytes
    }

    /// Appends `range` of `piece`. The caller ensures that it fits.
    pub(crate) fn push(&mut self, device: &dyn Device, piece: Piece<'_>, range: Range<usize>) {
        let at = self.len;
        self.len += range.len();
        match piece {
            Piece::Shared(bytes) => self.referred.push((at, bytes.slice(range))),
            Piece::Copied(bytes) => {
                let len = self.len;
                copy_in_steps(&mut self.buf(device)[at..len], &bytes[range]);
            }
        }
    }

    /// Copies the referenced pieces.
    fn fill(&mut self, device: &dyn Device) -> &mut AlignedBuf {
        let referred = std::mem::take(&mut self.referred);
        let buf = self.buf(device);
        for (at, bytes) in referred {
            copy_in_steps(&mut buf[at..at + bytes.len()], &bytes);
        }
        buf
    }

    /// Records that a record ends at the block's current end.
    pub(crate) fn end_record(&mut self) {
        let end = self.end();
        let last_page = page_floor(end.0);
        self.whole_boundary = match self.boundary {
            _ if end.0 == last_page => end,
            before if before.0 <= last_page => before,
            _ => self.whole_boundary,
        };
        self.boundary = end;
    }

    /// Log offset of its first byte: a page boundary.
    pub(crate) fn base(&self) -> LogOffset {
        LogOffset(self.base)
    }

    /// End of the last byte in use, or of the padding.
    pub(crate) fn end(&self) -> LogOffset {
        LogOffset(self.base + self.len as u64)
    }

    /// End of whole records: when this block and all before it are durable, so are the records
    /// before this offset.
    pub(crate) fn boundary(&self) -> LogOffset {
        self.boundary
    }

    /// Whether its first page repeats bytes of the previous block, which must be durable before
    /// this one is written.
    pub(crate) fn repeats_page(&self) -> bool {
        self.repeated > 0
    }

    /// Number of bytes not written by an earlier block.
    pub(crate) fn new_bytes(&self) -> u64 {
        (self.len - self.repeated) as u64
    }

    /// Bytes of its write.
    pub(crate) fn write_bytes(&self) -> u64 {
        page_ceil(self.len as u64)
    }

    /// Bytes of its write with a padding.
    pub(crate) fn padded_bytes(&self) -> u64 {
        self.len as u64 + padding_len(self.len as u64)
    }

    /// Bytes of its whole pages.
    pub(crate) fn whole_bytes(&self) -> u64 {
        page_floor(self.len as u64)
    }

    /// Closes the block at its last page boundary. The rest, less than a page, begins the next
    /// block.
    pub(crate) fn carry(&mut self, device: &dyn Device) -> Option<Self> {
        let (whole, len) = (page_floor(self.len as u64) as usize, self.len);
        if whole == len {
            return None;
        }
        let mut next = Self {
            buf: None,
            referred: Vec::new(),
            base: self.base + whole as u64,
            repeated: 0,
            len: 0,
            padding: 0,
            ..*self
        };
        let rest = self.fill(device)[whole..len].to_vec();
        next.push(device, Piece::Copied(&rest), 0..rest.len());
        self.len = whole;
        self.boundary = self.whole_boundary;
        Some(next)
    }

    /// Closes the block with a padding record, so that the next block starts on its own page.
    /// Returns the padding's length, which is 0 if the block ends on a page boundary, possibly
    /// inside a record.
    pub(crate) fn pad(&mut self) -> u64 {
        let padding = padding_len(self.len as u64);
        if padding > 0 {
            assert_eq!(self.boundary, self.end(), "a padding inside a record");
            self.padding = padding as usize;
            self.len += self.padding;
            self.end_record();
        }
        padding
    }

    /// Closes the block at its end and remembers its last, unfinished page, in which the next block
    /// continues.
    pub(crate) fn cut(&mut self, device: &dyn Device, tail: &mut Tail) {
        assert_eq!(self.boundary, self.end(), "a cut inside a record");
        let unfinished = page_floor(self.len as u64) as usize..self.len;
        tail.set(&self.fill(device)[unfinished]);
    }

    /// Returns the finished pages. The padding's header is encoded only now: a later proof covers
    /// more.
    pub(crate) fn into_write(
        mut self,
        device: &dyn Device,
        codec: Codec,
        epoch: u32,
        durable: LogOffset,
    ) -> (LogOffset, SharedBuf) {
        let write_bytes = self.write_bytes() as usize;
        self.fill(device);
        let mut buf = self.buf.expect("just filled");
        if self.padding > 0 {
            let at = self.len - self.padding;
            let header = codec.encode(&RecordHeader {
                kind: Kind::Padding,
                payload_len: (self.padding - RECORD_HEADER_BYTES) as u32,
                offset: LogOffset(self.base + at as u64),
                epoch,
                proof: durable,
                payload_crc: 0,
            });
            buf[at..at + RECORD_HEADER_BYTES].copy_from_slice(&header);
            buf[at + RECORD_HEADER_BYTES..self.len].fill(0);
        }
        // Reused buffers contain old bytes; only the part that no record covers has to be cleared.
        buf[self.len..write_bytes].fill(0);
        buf.truncate(write_bytes);
        (LogOffset(self.base), buf.freeze())
    }
}

#[cfg(test)]
mod tests {
    use alluvium_device::SharedDevice;
    use alluvium_device::sim::{SimDisk, SimOptions};
    use uuid::Uuid;

    use super::*;

    const BLOCK: u32 = 2 * PAGE as u32;

    fn codec() -> Codec {
        Codec::new(Uuid::from_u128(1))
    }

    fn device() -> SharedDevice {
        SimDisk::new(SimOptions::default()).device()
    }

    fn open(device: &SharedDevice, start: u64, tail: &Tail) -> Block {
        Block::open(&**device, BLOCK, LogOffset(start), LogOffset(start), tail)
    }

    fn push(block: &mut Block, device: &SharedDevice, bytes: &[u8]) {
        block.push(&**device, Piece::Copied(bytes), 0..bytes.len());
        block.end_record();
    }

    #[test]
    fn a_padded_block_is_tiled_to_the_page_boundary() {
        // A record that ends on the boundary (no padding), and one that leaves 8 bytes (padding
        // over the next page).
        for (record, padding, pages) in
            [(4096, 0, 1), (4088, 8 + 4096, 2), (4032, 64, 1), (4064, 32, 1), (132, 3964, 1)]
        {
            let device = device();
            let mut block = open(&device, 40960, &Tail::new(&[]));
            block.buf(&*device).fill(0xee); // a reused buffer
            push(&mut block, &device, &vec![1; record]);
            assert_eq!(block.pad(), padding);
            assert_eq!(block.end(), LogOffset(40960 + pages * PAGE));
            assert_eq!(block.boundary(), block.end());
            let (base, bytes) = block.into_write(&*device, codec(), 3, LogOffset(40000));
            assert_eq!((base, bytes.len() as u64), (LogOffset(40960), pages * PAGE));
            if padding > 0 {
                let header = codec().decode(
                    LogOffset(40960 + record as u64),
                    bytes[record..record + 32].try_into().unwrap(),
                );
                let header = header.expect("a padding record");
                assert_eq!((header.kind, header.end().0 % PAGE), (Kind::Padding, 0));
                assert_eq!((header.epoch, header.proof), (3, LogOffset(40000)));
                assert!(
                    bytes[record + 32..].iter().all(|&byte| byte == 0),
                    "old bytes of the buffer are cleared"
                );
            }
        }
    }

    #[test]
    fn a_cut_block_is_continued_by_the_next_one() {
        let device = device();
        let mut tail = Tail::new(&[]);
        let mut first = open(&device, 0, &tail);
        push(&mut first, &device, &[1; 5032]);
        first.cut(&*device, &mut tail);
        assert_eq!(first.end(), LogOffset(5032));
        let second = open(&device, 5032, &tail);
        assert!(second.repeats_page() && !first.repeats_page());
        assert_eq!((second.end(), second.new_bytes()), (LogOffset(5032), 0));
        let (_, first) = first.into_write(&*device, codec(), 1, LogOffset(0));
        assert!(first[5032..].iter().all(|&byte| byte == 0));
        let (base, second) = second.into_write(&*device, codec(), 1, LogOffset(0));
        assert_eq!(base, LogOffset(4096));
        assert_eq!(second[..936], first[4096..5032]);
    }

    #[test]
    fn carried_bytes_go_with_the_next_block_and_whole_records_count() {
        let device = device();
        let (mut ends, mut at) = (Vec::new(), 0);
        let mut block = open(&device, 0, &Tail::new(&[]));
        for (index, len) in [100, 3900, 50, 46, 2000, 2100].into_iter().enumerate() {
            push(&mut block, &device, &vec![index as u8 + 1; len]);
            at += len as u64;
            ends.push(at);
            let whole = ends.iter().rev().find(|&&end| end <= page_floor(at)).copied().unwrap_or(0);
            assert_eq!(block.whole_boundary, LogOffset(whole), "after {len} bytes");
        }
        let end = block.end();
        let mut next = block.carry(&*device).expect("8,196 bytes");
        assert_eq!((block.end(), block.boundary()), (LogOffset(8192), LogOffset(6096)));
        assert_eq!((next.base(), next.end(), next.boundary()), (LogOffset(8192), end, end));
        assert!(!next.repeats_page(), "nothing is written twice");
        let (_, bytes) = block.into_write(&*device, codec(), 1, LogOffset(0));
        push(&mut next, &device, &[7; 4092]);
        assert!(next.carry(&*device).is_none(), "it ends on a page boundary");
        let (_, rest) = next.into_write(&*device, codec(), 1, LogOffset(0));
        assert_eq!((bytes[8191], &rest[..5]), (6, &[6, 6, 6, 6, 7][..]));
    }

    #[test]
    fn a_block_exceeds_its_size_only_to_complete_a_record() {
        let device = device();
        let block_bytes = u64::from(BLOCK);
        let mut block = open(&device, 0, &Tail::new(&[]));
        assert_eq!(block.fitting_bytes(block_bytes + EXTRA_BYTES, true), block_bytes + EXTRA_BYTES);
        assert_eq!(block.fitting_bytes(block_bytes + EXTRA_BYTES, false), block_bytes);
        assert_eq!(block.fitting_bytes(block_bytes + EXTRA_BYTES + 1, true), block_bytes);
        push(&mut block, &device, &vec![1; BLOCK as usize]);
        assert!(block.is_full());
        assert_eq!((block.fitting_bytes(9, true), block.fitting_bytes(9, false)), (9, 0));
        // The largest block, with the largest padding.
        push(&mut block, &device, &[1; EXTRA_BYTES as usize - 1]);
        assert_eq!(block.pad(), 1 + PAGE);
        let (_, bytes) = block.into_write(&*device, codec(), 1, LogOffset(0));
        assert_eq!(bytes.len() as u64, block_bytes + EXTRA_BYTES + PAGE);
    }

    #[test]
    fn shared_pieces_are_copied_only_into_the_write() {
        let device = device();
        let payload = Bytes::from((0..10_000).map(|index| (index % 251) as u8).collect::<Vec<_>>());
        let mut block = open(&device, 0, &Tail::new(&[]));
        block.push(&*device, Piece::Shared(&payload), 7..7 + BLOCK as usize);
        assert!(block.buf.is_none() && block.is_full());
        assert_eq!(block.boundary(), LogOffset(0), "the record continues in the next block");
        assert_eq!(block.pad(), 0);
        let (_, bytes) = block.into_write(&*device, codec(), 1, LogOffset(0));
        assert_eq!(bytes[..], payload[7..7 + BLOCK as usize]);

        let (mut block, mut tail) = (open(&device, 0, &Tail::new(&[])), Tail::new(&[]));
        push(&mut block, &device, &[9; 4000]);
        block.push(&*device, Piece::Shared(&payload), 0..1000);
        block.end_record();
        block.cut(&*device, &mut tail);
        assert_eq!(tail.page[..tail.len], payload[96..1000]);
        let (_, bytes) = block.into_write(&*device, codec(), 1, LogOffset(0));
        assert_eq!((&bytes[..4000], &bytes[4000..5000]), (&[9; 4000][..], &payload[..1000]));
    }
}
