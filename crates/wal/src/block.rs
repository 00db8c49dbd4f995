//! A block: the records that go to the device in one write, encoded once, in the buffer that the device reads.

use std::fmt;

use alluvium_device::{AlignedBuf, SharedBuf, copy_to_device};

use crate::layout::{LogOffset, PAGE, RECORD_HEADER_BYTES, padding_len, page_ceil, page_floor};
use crate::record::{Codec, Kind, RecordHeader};

/// The bytes of the page in which the log ends, up to its end: what the next write of that page has to repeat.
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

/// See the module. It grows at its end; when it is closed, nothing in it changes any more but the proof of its padding.
#[derive(Debug)]
pub(crate) struct Block {
    buf: AlignedBuf,
    /// Logical offset of the buffer's first byte: a page boundary.
    base: u64,
    /// Bytes of the first page that an earlier block has written already.
    repeated: usize,
    /// Bytes in use, the repeated ones included.
    len: usize,
    /// Bytes of the padding record at the end of a closed block; at most a page and a header.
    padding: usize,
}

impl Block {
    /// Bytes that a block needs to hold one record of `record_bytes` at `start`, and the padding after it.
    pub(crate) fn bytes_for(start: LogOffset, record_bytes: u64) -> u64 {
        let end = start.0 + record_bytes;
        end + padding_len(end) - page_floor(start.0)
    }

    /// An empty block at `start`. If that is inside a page, `tail` holds what is before it in this page.
    pub(crate) fn open(mut buf: AlignedBuf, start: LogOffset, tail: &Tail) -> Self {
        let base = page_floor(start.0);
        let repeated = (start.0 - base) as usize;
        if repeated > 0 {
            assert_eq!(tail.len, repeated, "the tail's bytes are those before {start}");
            buf[..repeated].copy_from_slice(&tail.page[..repeated]);
        }
        Self { buf, base, repeated, len: repeated, padding: 0 }
    }

    /// Whether a record of `record_bytes`, and the padding after it, fit.
    pub(crate) fn fits(&self, record_bytes: u64) -> bool {
        let end = self.len as u64 + record_bytes;
        end + padding_len(end) <= self.buf.len() as u64
    }

    /// Whether nothing can be added: not even the smallest record.
    pub(crate) fn is_full(&self) -> bool {
        !self.fits(RECORD_HEADER_BYTES as u64 + 1)
    }

    /// Append a record. The caller has made sure that it fits.
    pub(crate) fn push(&mut self, header: &[u8; RECORD_HEADER_BYTES], parts: &[&[u8]]) {
        let mut at = self.len;
        for part in std::iter::once(&header[..]).chain(parts.iter().copied()) {
            copy_to_device(&mut self.buf[at..at + part.len()], part);
            at += part.len();
        }
        self.len = at;
    }

    /// Where the block's last record, or its padding, ends.
    pub(crate) fn end(&self) -> LogOffset {
        LogOffset(self.base + self.len as u64)
    }

    /// Whether its first page repeats bytes of the block before, which must be durable before this one is written.
    pub(crate) fn repeats_page(&self) -> bool {
        self.repeated > 0
    }

    /// Bytes that are new.
    pub(crate) fn new_bytes(&self) -> u64 {
        (self.len - self.repeated) as u64
    }

    /// Bytes of the write that it becomes.
    pub(crate) fn write_bytes(&self) -> u64 {
        page_ceil(self.len as u64)
    }

    /// Close it with a padding record, so that the next block has its pages for itself. Returns the padding's length.
    pub(crate) fn pad(&mut self) -> u64 {
        let padding = padding_len(self.len as u64);
        self.padding = padding as usize;
        self.len += self.padding;
        padding
    }

    /// Close it where it ends and remember its last, unfinished page: the next block goes on in it.
    pub(crate) fn cut(&self, tail: &mut Tail) {
        tail.set(&self.buf[page_floor(self.len as u64) as usize..self.len]);
    }

    /// The finished pages. The padding's header is encoded only now: its proof is the better the later it is made.
    pub(crate) fn into_write(
        mut self,
        codec: Codec,
        epoch: u32,
        durable: LogOffset,
    ) -> (LogOffset, SharedBuf) {
        let write_bytes = self.write_bytes() as usize;
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
            self.buf[at..at + RECORD_HEADER_BYTES].copy_from_slice(&header);
            self.buf[at + RECORD_HEADER_BYTES..self.len].fill(0);
        }
        // Buffers come with old bytes in them; only what no record covers has to be cleared.
        self.buf[self.len..write_bytes].fill(0);
        self.buf.truncate(write_bytes);
        (LogOffset(self.base), self.buf.freeze())
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    const EMPTY: [u8; RECORD_HEADER_BYTES] = [7; RECORD_HEADER_BYTES];

    fn codec() -> Codec {
        Codec::new(Uuid::from_u128(1))
    }

    fn dirty(len: usize) -> AlignedBuf {
        let mut buf = AlignedBuf::zeroed(len);
        buf.fill(0xee);
        buf
    }

    #[test]
    fn a_padded_block_is_tiled_to_the_page_boundary() {
        // A record that ends on the boundary (no padding), one that leaves 8 bytes (padding over the next page).
        for (payload, padding, pages) in
            [(4064, 0, 1), (4056, 8 + 4096, 2), (4000, 64, 1), (4032, 32, 1), (100, 3964, 1)]
        {
            let mut block = Block::open(dirty(8192), LogOffset(40960), &Tail::new(&[]));
            assert!(block.fits(32 + payload));
            block.push(
                &EMPTY,
                &[&vec![1; payload as usize / 2], &vec![2; (payload - payload / 2) as usize]],
            );
            assert_eq!(block.pad(), padding);
            assert_eq!(block.end(), LogOffset(40960 + pages * PAGE));
            let (base, bytes) = block.into_write(codec(), 3, LogOffset(40000));
            assert_eq!((base, bytes.len() as u64), (LogOffset(40960), pages * PAGE));
            if padding > 0 {
                let at = 32 + payload as usize;
                let header = codec()
                    .decode(LogOffset(40960 + at as u64), bytes[at..at + 32].try_into().unwrap());
                let header = header.expect("a padding record");
                assert_eq!((header.kind, header.end().0 % PAGE), (Kind::Padding, 0));
                assert_eq!((header.epoch, header.proof), (3, LogOffset(40000)));
                assert!(
                    bytes[at + 32..].iter().all(|&byte| byte == 0),
                    "old bytes of the buffer are cleared"
                );
            }
        }
    }

    #[test]
    fn a_cut_block_is_repeated_by_the_next_one() {
        let mut tail = Tail::new(&[]);
        let mut first = Block::open(dirty(8192), LogOffset(0), &tail);
        first.push(&EMPTY, &[&[1; 5000]]);
        first.cut(&mut tail);
        assert_eq!(first.end(), LogOffset(5032));
        let second = Block::open(dirty(8192), first.end(), &tail);
        assert!(second.repeats_page() && !first.repeats_page());
        assert_eq!((second.end(), second.new_bytes()), (LogOffset(5032), 0));
        let (_, first) = first.into_write(codec(), 1, LogOffset(0));
        assert!(first[5032..].iter().all(|&byte| byte == 0));
        let (base, second) = second.into_write(codec(), 1, LogOffset(0));
        assert_eq!(base, LogOffset(4096));
        assert_eq!(second[..936], first[4096..5032]);
    }

    #[test]
    fn what_bytes_for_promises_fits() {
        for start in [0, 1, 100, 4064, 4095, 4096] {
            for record in [33, 100, 4000, 4064, 4065, 4096, 10_000] {
                let start = LogOffset(start);
                let tail = Tail::new(&vec![1; (start.0 % PAGE) as usize]);
                let block =
                    Block::open(dirty(Block::bytes_for(start, record) as usize), start, &tail);
                assert!(block.fits(record) && !block.fits(record + PAGE));
            }
        }
    }
}
