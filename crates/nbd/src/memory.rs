//! A sparse disk in memory, for tests.

use std::collections::BTreeMap;
use std::ops::Range;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use parking_lot::RwLock;

use crate::disk::{Allocation, Disk, DiskError, Extent, Part, ZeroMode};

/// Bytes that are allocated together.
const BLOCK_BYTES: u64 = 4096;

/// A sparse disk in memory, for tests. Its content is lost with it, so no write is durable.
///
/// The trait's functions change it even if clients see it as read-only.
pub struct MemoryDisk {
    size_bytes: u64,
    is_read_only: bool,
    capacity_blocks: usize,
    /// Allocated blocks by their number.
    blocks: RwLock<BTreeMap<u64, Block>>,
}

enum Block {
    Data(Bytes),
    Zeros,
}

impl MemoryDisk {
    /// Creates a disk that is one hole.
    pub fn new(size_bytes: u64) -> Self {
        Self {
            size_bytes,
            is_read_only: false,
            capacity_blocks: usize::MAX,
            blocks: RwLock::default(),
        }
    }

    /// Makes it read-only for clients.
    #[must_use]
    pub fn read_only(self) -> Self {
        Self { is_read_only: true, ..self }
    }

    /// Bounds the allocated bytes: what would exceed the bound fails for lack of space.
    #[must_use]
    pub fn with_capacity_bytes(self, bytes: u64) -> Self {
        let capacity_blocks = usize::try_from(bytes / BLOCK_BYTES).unwrap_or(usize::MAX);
        Self { capacity_blocks, ..self }
    }

    /// Bytes that are allocated.
    pub fn allocated_bytes(&self) -> u64 {
        self.blocks.read().len() as u64 * BLOCK_BYTES
    }

    /// The part of each block that the range covers.
    fn covered(at: u64, len: u64) -> impl Iterator<Item = (u64, Range<usize>)> {
        let end = at + len;
        (at / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES)).map(move |number| {
            let start = number * BLOCK_BYTES;
            let from = at.saturating_sub(start);
            let to = (end - start).min(BLOCK_BYTES);
            (number, from as usize..to as usize)
        })
    }

    fn check_range(&self, at: u64, len: u64) -> Result<(), DiskError> {
        match at.checked_add(len).is_some_and(|end| end <= self.size_bytes) {
            true => Ok(()),
            false => Err(DiskError::Invalid(format!("{len} bytes at {at} are not in the disk"))),
        }
    }

    /// Whether the blocks of the range that are holes can be allocated.
    fn check_space(
        &self,
        blocks: &BTreeMap<u64, Block>,
        at: u64,
        len: u64,
    ) -> Result<(), DiskError> {
        let range = at / BLOCK_BYTES..(at + len).div_ceil(BLOCK_BYTES);
        let missing = (range.end - range.start) as usize - blocks.range(range).count();
        match missing <= self.capacity_blocks.saturating_sub(blocks.len()) {
            true => Ok(()),
            false => Err(DiskError::NoSpace),
        }
    }
}

fn is_whole(covered: &Range<usize>) -> bool {
    covered.len() == BLOCK_BYTES as usize
}

#[async_trait]
impl Disk for MemoryDisk {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    async fn read(&self, at: u64, len: u32) -> Result<Vec<Part>, DiskError> {
        self.check_range(at, len.into())?;
        let blocks = self.blocks.read();
        let mut parts = Vec::new();
        for (number, covered) in Self::covered(at, len.into()) {
            match (blocks.get(&number), parts.last_mut()) {
                (Some(Block::Data(data)), _) => parts.push(Part::Data(data.slice(covered))),
                (_, Some(Part::Zeros(zeros))) => *zeros += covered.len() as u32,
                _ => parts.push(Part::Zeros(covered.len() as u32)),
            }
        }
        Ok(parts)
    }

    async fn write(&self, at: u64, data: Bytes) -> Result<(), DiskError> {
        let len = data.len() as u64;
        self.check_range(at, len)?;
        let mut blocks = self.blocks.write();
        self.check_space(&blocks, at, len)?;
        let mut rest = data;
        for (number, covered) in Self::covered(at, len) {
            let new = rest.split_to(covered.len());
            let block = if is_whole(&covered) {
                new
            } else {
                let mut merged = BytesMut::zeroed(BLOCK_BYTES as usize);
                if let Some(Block::Data(old)) = blocks.get(&number) {
                    merged.copy_from_slice(old);
                }
                merged[covered].copy_from_slice(&new);
                merged.freeze()
            };
            blocks.insert(number, Block::Data(block));
        }
        Ok(())
    }

    async fn zero(&self, at: u64, len: u64, mode: ZeroMode) -> Result<(), DiskError> {
        self.check_range(at, len)?;
        let mut blocks = self.blocks.write();
        if mode == ZeroMode::Allocate {
            self.check_space(&blocks, at, len)?;
        }
        for (number, covered) in Self::covered(at, len) {
            let zeroed = match blocks.get(&number) {
                Some(Block::Data(old)) if !is_whole(&covered) => {
                    let mut merged = BytesMut::from(&old[..]);
                    merged[covered].fill(0);
                    Some(Block::Data(merged.freeze()))
                }
                Some(Block::Zeros) if !is_whole(&covered) => Some(Block::Zeros),
                _ => (mode == ZeroMode::Allocate).then_some(Block::Zeros),
            };
            match zeroed {
                Some(block) => blocks.insert(number, block),
                None => blocks.remove(&number),
            };
        }
        Ok(())
    }

    fn is_zero_fast(&self, _at: u64, _len: u64, _mode: ZeroMode) -> bool {
        true
    }

    async fn discard(&self, at: u64, len: u64) -> Result<(), DiskError> {
        self.check_range(at, len)?;
        let whole = at.div_ceil(BLOCK_BYTES)..(at + len) / BLOCK_BYTES;
        self.blocks.write().retain(|number, _| !whole.contains(number));
        Ok(())
    }

    async fn flush(&self) -> Result<(), DiskError> {
        Ok(())
    }

    async fn status(
        &self,
        at: u64,
        len: u64,
        max_extents: usize,
    ) -> Result<Vec<Extent>, DiskError> {
        self.check_range(at, len)?;
        let blocks = self.blocks.read();
        let mut extents: Vec<Extent> = Vec::new();
        let (mut position, end) = (at, at + len);
        let mut allocated = blocks.range(at / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES)).peekable();
        while position < end {
            let number = position / BLOCK_BYTES;
            let next = allocated.peek().map_or(u64::MAX, |(number, _)| **number);
            let (until, allocation) = match allocated.next_if(|(next, _)| **next == number) {
                Some((_, Block::Data(_))) => ((number + 1) * BLOCK_BYTES, Allocation::Data),
                Some((_, Block::Zeros)) => ((number + 1) * BLOCK_BYTES, Allocation::Zeros),
                None => (next.saturating_mul(BLOCK_BYTES), Allocation::Hole),
            };
            let len = until.min(end) - position;
            let count = extents.len();
            match extents.last_mut() {
                Some(last) if last.allocation == allocation => last.len += len,
                _ if count == max_extents => break,
                _ => extents.push(Extent { len, allocation }),
            }
            position += len;
        }
        Ok(extents)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    /// The disk's operations complete at once.
    fn now<T>(operation: impl Future<Output = T>) -> T {
        operation.now_or_never().expect("operations in memory complete at once")
    }

    fn content(disk: &MemoryDisk, at: u64, len: u32) -> Vec<u8> {
        let parts = now(disk.read(at, len)).unwrap();
        let bytes = parts.into_iter().map(|part| match part {
            Part::Data(data) => data.to_vec(),
            Part::Zeros(len) => vec![0; len as usize],
        });
        bytes.flatten().collect()
    }

    fn extents(disk: &MemoryDisk, at: u64, len: u64) -> Vec<(u64, Allocation)> {
        let extents = now(disk.status(at, len, 100)).unwrap();
        extents.into_iter().map(|extent| (extent.len, extent.allocation)).collect()
    }

    #[test]
    fn bytes_are_written_across_blocks_and_the_rest_stays() {
        let disk = MemoryDisk::new(20_000);
        now(disk.write(4090, Bytes::from_static(&[7; 20]))).unwrap();
        let expected = [&[0; 90][..], &[7; 20], &[0; 90]].concat();
        assert_eq!(content(&disk, 4000, 200), expected);
        now(disk.zero(4095, 2, ZeroMode::MayFree)).unwrap();
        assert_eq!(content(&disk, 4090, 20), [&[7; 5][..], &[0; 2], &[7; 13]].concat());
        assert_eq!(disk.allocated_bytes(), 8192);
        assert!(matches!(now(disk.read(19_999, 2)), Err(DiskError::Invalid(_))));
    }

    #[test]
    fn status_separates_data_zeros_and_holes() {
        use Allocation::{Data, Hole, Zeros};
        let disk = MemoryDisk::new(10 * 4096 + 100);
        now(disk.write(4096, Bytes::from_static(&[1; 4097]))).unwrap();
        now(disk.zero(5 * 4096, 4096, ZeroMode::Allocate)).unwrap();
        let all = [(4096, Hole), (8192, Data), (8192, Hole), (4096, Zeros), (4 * 4096 + 100, Hole)];
        assert_eq!(extents(&disk, 0, disk.size_bytes), all);
        assert_eq!(extents(&disk, 8000, 500), [(500, Data)]);
        assert_eq!(now(disk.status(0, 40_000, 1)).unwrap().len(), 1);
        now(disk.discard(4000, 8000)).unwrap();
        assert_eq!(extents(&disk, 0, 4 * 4096), [(8192, Hole), (4096, Data), (4096, Hole)]);
        now(disk.zero(0, 10 * 4096 + 100, ZeroMode::MayFree)).unwrap();
        assert_eq!(content(&disk, 0, 40_000), vec![0; 40_000]);
    }

    #[test]
    fn a_full_disk_accepts_what_needs_no_space() {
        let disk = MemoryDisk::new(1 << 20).with_capacity_bytes(8192);
        now(disk.write(0, Bytes::from_static(&[1; 8192]))).unwrap();
        assert_eq!(now(disk.write(8192, Bytes::from_static(&[1]))), Err(DiskError::NoSpace));
        assert_eq!(now(disk.zero(0, 8193, ZeroMode::Allocate)), Err(DiskError::NoSpace));
        assert_eq!(content(&disk, 0, 2), [1, 1]);
        now(disk.write(0, Bytes::from_static(&[2; 8192]))).unwrap();
        now(disk.zero(0, 1 << 20, ZeroMode::MayFree)).unwrap();
        now(disk.write(8192, Bytes::from_static(&[1]))).unwrap();
    }
}
