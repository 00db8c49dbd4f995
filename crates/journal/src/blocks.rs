//! What was decompressed not long ago, bounded by bytes.

use std::sync::Arc;

use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{DefaultHashBuilder, OptionsBuilder, Weighter};

use crate::place::JournalNumber;

/// The bytes of a frame, or of several that one record lies in. Values that were read of them keep them alive.
pub(crate) type Block = Arc<Vec<u8>>;

/// A frame of a journal. Its bytes never change, and numbers of journals are not used again; so nothing has to be removed when a journal goes.
type Key = (JournalNumber, u32);

/// What an entry takes beside its bytes, about.
const ENTRY_BYTES: usize = 128;
/// Of a frame of small records, to estimate how many fit.
const USUAL_BYTES: usize = 16 << 10;
/// What was read more than once gets this part; the rest is for what comes in, so that several records are read of it before it goes.
const HOT_PART: f64 = 0.75;

#[derive(Clone)]
struct ByBytes;

impl Weighter<Key, Block> for ByBytes {
    fn weight(&self, _: &Key, block: &Block) -> u64 {
        (block.len() + ENTRY_BYTES) as u64
    }
}

/// Frames by use.
pub(crate) struct Blocks(Option<Cache<Key, Block, ByBytes>>);

impl Blocks {
    /// With less than a frame nothing is kept.
    pub(crate) fn new(max_bytes: usize) -> Self {
        let items = max_bytes / (USUAL_BYTES + ENTRY_BYTES);
        if items == 0 {
            return Self(None);
        }
        let options = OptionsBuilder::new()
            .estimated_items_capacity(items)
            .weight_capacity(max_bytes as u64)
            .hot_allocation(HOT_PART)
            .build()
            .expect("all that has no default is set");
        let hash = DefaultHashBuilder::default();
        Self(Some(Cache::with_options(options, ByBytes, hash, DefaultLifecycle::default())))
    }

    /// A frame, by `read` if it is not there. Of several who want one at a time one reads.
    pub(crate) fn get<E>(
        &self,
        number: JournalNumber,
        frame: usize,
        read: impl FnOnce() -> Result<Block, E>,
    ) -> Result<Block, E> {
        let frame = u32::try_from(frame).expect("a journal has at most 1 GiB");
        match &self.0 {
            Some(cache) => cache.get_or_insert_with(&(number, frame), read),
            None => read(),
        }
    }

    /// Memory of all that is kept, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, |cache| usize::try_from(cache.weight()).unwrap_or(usize::MAX))
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
    fn it_keeps_no_more_than_it_may() {
        for max_bytes in [0, 10_000, 100_000, 1 << 20, 5_000_000] {
            let blocks = Blocks::new(max_bytes);
            for frame in 0..2000 {
                let len = if frame % 10 == 0 { 256 << 10 } else { 16 << 10 };
                let number = JournalNumber(frame as u64 % 7);
                assert_eq!(blocks.get(number, frame, || block(len)).unwrap().len(), len);
                // A few bytes of rounding for each part of it.
                assert!(blocks.bytes() <= max_bytes + 1024, "{} of {max_bytes}", blocks.bytes());
            }
            assert!(blocks.bytes() > 0 || max_bytes < 100_000, "{max_bytes}");
        }
    }

    #[test]
    fn what_is_there_is_not_read_again() {
        let blocks = Blocks::new(1 << 20);
        let number = JournalNumber(1);
        blocks.get(number, 3, || block(100)).unwrap();
        assert_eq!(blocks.get(number, 3, || Err("read again")).unwrap().len(), 100);
        assert_eq!(blocks.get(number, 4, || Err("failed")), Err("failed"));
        assert_eq!(blocks.get(JournalNumber(2), 3, || Err("another")), Err("another"));
        assert_eq!(blocks.get(number, 4, || Ok::<_, &str>(Arc::default())).unwrap().len(), 0);
    }
}
