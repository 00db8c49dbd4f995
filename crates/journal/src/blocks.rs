//! A cache of what was recently read from the disk: decompressed frames, and records that were read
//! more than once. Bounded by bytes.

use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{DefaultHashBuilder, OptionsBuilder, Weighter};

use crate::memory;
use crate::position::{Granule, JournalNumber};
use crate::sync::Arc;

/// The bytes of a frame, of several frames that contain one record, or of a record. Values that
/// refer to them keep them in memory.
pub(crate) type Block = Arc<Vec<u8>>;

/// The key of a frame or of the beginning of a record. The bytes never change and numbers of
/// journals are not reused, so nothing has to be removed when a journal is removed or compressed.
type Key = (JournalNumber, u32);

/// A longer record is not cached by itself: it would evict much that is read more often.
const MOST_RECORD_BYTES: usize = 64 << 10;

/// Frames have one part in this many of the memory. Each read of an uncached record brings in a
/// frame of 16 KiB; in a common queue these would evict records before they are read again.
const FRAMES_PART: usize = 4;

/// The approximate overhead of an entry.
const ENTRY_BYTES: usize = 128;
/// Typical sizes of a frame of small records and of a small record, to estimate how many fit.
const USUAL_FRAME_BYTES: usize = 16 << 10;
const USUAL_RECORD_BYTES: usize = 512;
/// The part for what was read more than once; the rest is for new entries, so that several records
/// of a frame can be read before it is evicted.
const HOT_PART: f64 = 0.75;

#[derive(Clone)]
struct ByBytes;

impl Weighter<Key, Block> for ByBytes {
    fn weight(&self, _: &Key, block: &Block) -> u64 {
        (block.len() + ENTRY_BYTES) as u64
    }
}

type PartCache = Cache<Key, Block, ByBytes>;

/// Returns `None` if not even one entry would fit.
fn new_cache(max_bytes: usize, usual_bytes: usize) -> Option<PartCache> {
    let items = max_bytes / (usual_bytes + ENTRY_BYTES);
    if items == 0 {
        return None;
    }
    let options = OptionsBuilder::new()
        .estimated_items_capacity(items)
        .weight_capacity(max_bytes as u64)
        .hot_allocation(HOT_PART)
        .build()
        .expect("all that has no default is set");
    let hash = DefaultHashBuilder::default();
    Some(Cache::with_options(options, ByBytes, hash, DefaultLifecycle::default()))
}

/// Frames and records, evicted by use.
pub(crate) struct Blocks {
    frames: Option<PartCache>,
    records: Option<PartCache>,
}

impl Blocks {
    pub(crate) fn new(max_bytes: usize) -> Self {
        let frames_bytes = max_bytes / FRAMES_PART;
        Self {
            frames: new_cache(frames_bytes, USUAL_FRAME_BYTES),
            records: new_cache(max_bytes - frames_bytes, USUAL_RECORD_BYTES),
        }
    }

    /// Returns a frame, calling `read` if it is not cached. Of concurrent callers for one frame,
    /// one reads it.
    pub(crate) fn get<E>(
        &self,
        number: JournalNumber,
        frame: usize,
        read: impl FnOnce() -> Result<Block, E>,
    ) -> Result<Block, E> {
        let frame = u32::try_from(frame).expect("a journal has at most 1 GiB");
        match &self.frames {
            Some(frames) => frames.get_or_insert_with(&(number, frame), read),
            None => read(),
        }
    }

    /// Returns the bytes of the record that begins at `first`, if it is cached.
    pub(crate) fn record(&self, number: JournalNumber, first: Granule) -> Option<Block> {
        self.records.as_ref()?.get(&(number, first.0))
    }

    /// Returns a cached record without counting a use, for callers that remove it or visit all
    /// records.
    pub(crate) fn peek_record(&self, number: JournalNumber, first: Granule) -> Option<Block> {
        self.records.as_ref()?.peek(&(number, first.0))
    }

    /// Caches a record that was read from the disk, and not for the first time: one key in a
    /// thousand may be requested as often as all others together, anywhere on the disk. A journal
    /// in memory for it would take a thousand times as much, a frame a hundred times.
    pub(crate) fn insert_record(&self, number: JournalNumber, first: Granule, record: &[u8]) {
        let Some(records) = &self.records else { return };
        if record.len() <= MOST_RECORD_BYTES
            && let Ok(record) = memory::copy(record)
        {
            records.insert((number, first.0), Arc::new(record));
        }
    }

    /// Returns whether a frame is cached.
    pub(crate) fn has(&self, number: JournalNumber, frame: usize) -> bool {
        let frame = u32::try_from(frame).expect("a journal has at most 1 GiB");
        self.frames.as_ref().is_some_and(|frames| frames.contains_key(&(number, frame)))
    }

    /// Returns the memory of all cached data, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let caches = [&self.frames, &self.records].into_iter().flatten();
        caches.map(|cache| usize::try_from(cache.weight()).unwrap_or(usize::MAX)).sum()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn block(len: usize) -> Result<Block, Infallible> {
        Ok(Arc::new(vec![7; len]))
    }

    #[test]
    fn the_block_cache_is_bounded() {
        for max_bytes in [0, 10_000, 100_000, 1 << 20, 5_000_000] {
            let blocks = Blocks::new(max_bytes);
            for frame in 0..2000 {
                let len = if frame % 10 == 0 { 256 << 10 } else { 16 << 10 };
                let number = JournalNumber(frame as u64 % 7);
                assert_eq!(blocks.get(number, frame, || block(len)).unwrap().len(), len);
                blocks.insert_record(number, Granule(frame as u32 + 1), &vec![1; frame * 50]);
                // A few bytes of rounding for each part.
                assert!(blocks.bytes() <= max_bytes + 1024, "{} of {max_bytes}", blocks.bytes());
            }
            let kept = [&blocks.frames, &blocks.records]
                .map(|kept| kept.as_ref().map_or(0, PartCache::weight));
            assert!(
                kept.iter().all(|bytes| *bytes > 0) || max_bytes < 1 << 20,
                "{kept:?} of {max_bytes}"
            );
        }
    }

    #[test]
    fn records_and_frames_do_not_collide_and_long_records_are_not_cached() {
        let blocks = Blocks::new(10 << 20);
        let (number, other) = (JournalNumber(1), JournalNumber(2));
        blocks.get(number, 3, || block(100)).unwrap();
        assert!(blocks.record(number, Granule(3)).is_none());
        blocks.insert_record(number, Granule(3), b"three");
        assert_eq!(**blocks.record(number, Granule(3)).unwrap(), *b"three");
        assert!(blocks.record(number, Granule(4)).is_none());
        assert!(blocks.record(other, Granule(3)).is_none());
        assert_eq!(blocks.get(number, 3, || Err("read again")).unwrap().len(), 100);
        blocks.insert_record(other, Granule(1), &vec![1; MOST_RECORD_BYTES]);
        blocks.insert_record(other, Granule(2), &vec![1; MOST_RECORD_BYTES + 1]);
        assert!(blocks.record(other, Granule(1)).is_some());
        assert!(blocks.record(other, Granule(2)).is_none());
        // There is no space to cache it.
        Blocks::new(0).insert_record(number, Granule(3), b"three");
    }

    /// Keys that are read repeatedly stay, whatever else is read once.
    #[test]
    fn frequently_read_blocks_outlive_those_read_once() {
        let blocks = Blocks::new(4 << 20);
        let number = JournalNumber(1);
        let record = [7; 150];
        let often = 1000;
        let mut missed = 0;
        for round in 0..200u32 {
            for first in 0..often {
                if blocks.record(number, Granule(first)).is_none() {
                    missed += u32::from(round >= 10);
                    blocks.insert_record(number, Granule(first), &record);
                }
            }
            for once in 0..1000 {
                blocks.insert_record(number, Granule(often + round * 1000 + once), &record);
            }
        }
        assert!(missed < 190 * often / 100, "{missed} of {} reads", 190 * often);
        assert!(blocks.bytes() <= (4 << 20) + 1024);
    }

    #[test]
    fn cached_blocks_are_not_read_again() {
        let blocks = Blocks::new(1 << 20);
        let number = JournalNumber(1);
        blocks.get(number, 3, || block(100)).unwrap();
        assert_eq!(blocks.get(number, 3, || Err("read again")).unwrap().len(), 100);
        assert_eq!(blocks.get(number, 4, || Err("failed")), Err("failed"));
        assert_eq!(blocks.get(JournalNumber(2), 3, || Err("another")), Err("another"));
        assert!(blocks.has(number, 3) && !blocks.has(number, 4) && !Blocks::new(0).has(number, 3));
        assert_eq!(blocks.get(number, 4, || Ok::<_, &str>(Arc::default())).unwrap().len(), 0);
    }
}
