//! All keys, a few at a time, with nothing kept between two calls.
//!
//! The order is that of the index, by shard and fingerprint, which never changes for a key. (Not that of the journals, as [`crate::Iter`] has it: what is written meanwhile comes behind everything else there, and
//! a scan that goes slower than the writers would never end.) The price is one read of the disk for each key whose record is not in memory.

use crate::error::{Error, Result};
use crate::hash::{KeyHash, SHARD_BITS};
use crate::place::Place;
use crate::record::Record;
use crate::shared::{Shared, now_millis};

/// A call looks at so many buckets of the index and then returns, however few keys it has found: some ten microseconds.
const MAX_BUCKETS: usize = 8192;
/// Keys are returned as soon as they have so many bytes together.
const ENOUGH_BYTES: usize = 1 << 20;

/// Where a [`crate::Cache::scan`] goes on. Any number is a place; 0 is the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanCursor(pub u64);

/// What a [`crate::Cache::scan`] has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scanned {
    /// Some keys, in no order that means anything.
    pub keys: Vec<Vec<u8>>,
    /// Where to go on; never 0. `None`: that was all.
    pub next: Option<ScanCursor>,
}

impl ScanCursor {
    /// Highest bits: the shard. The others: the highest ones of the fingerprint; the least one of a bucket has zeroes behind them.
    fn new(shard: usize, fingerprint: u64) -> Self {
        Self((shard as u64) << (u64::BITS - SHARD_BITS) | fingerprint >> SHARD_BITS)
    }

    fn shard(self) -> usize {
        (self.0 >> (u64::BITS - SHARD_BITS)) as usize
    }

    fn fingerprint(self) -> u64 {
        self.0 << SHARD_BITS
    }
}

impl Shared {
    /// `None` if `may_read` has said no before anything was found.
    pub(crate) fn scan(
        &self,
        from: ScanCursor,
        limit: usize,
        mut may_read: impl FnMut(usize) -> bool,
    ) -> Result<Option<Scanned>> {
        let (mut at, mut keys, mut key_bytes) = (from, Vec::new(), 0);
        let mut found = Vec::new();
        for _ in 0..MAX_BUCKETS {
            let (shard, before) = (at.shard(), keys.len());
            let behind = self.index.bucket(shard, at.fingerprint(), &mut found);
            for (hash, place) in found.drain(..) {
                if !may_read(self.cold_bytes(place)) {
                    // All of the bucket comes with the next call.
                    keys.truncate(before);
                    return Ok((at != from).then_some(Scanned { keys, next: Some(at) }));
                }
                if let Some(key) = self.key_of(hash, place)? {
                    key_bytes += key.len();
                    keys.push(key);
                }
            }
            at = match behind {
                Some(fingerprint) => ScanCursor::new(shard, fingerprint),
                None if shard + 1 < 1 << SHARD_BITS => ScanCursor::new(shard + 1, 0),
                None => return Ok(Some(Scanned { keys, next: None })),
            };
            if keys.len() >= limit || key_bytes >= ENOUGH_BYTES {
                break;
            }
        }
        Ok(Some(Scanned { keys, next: Some(at) }))
    }

    /// Memory that reading the record at this place takes for itself; 0 if it is in memory.
    pub(crate) fn cold_bytes(&self, place: Place) -> usize {
        match self.journals.of(place) {
            Some(journal) if journal.arena.is_none() => place.max_len_bytes(),
            _ => 0,
        }
    }

    /// The key of an entry that was just seen in the index, if it counts as present.
    fn key_of(&self, hash: KeyHash, seen: Place) -> Result<Option<Vec<u8>>> {
        let mut place = seen;
        loop {
            if let Some(journal) = self.journals.of(place) {
                let loaded = match journal.load(place) {
                    Err(Error::Corrupt { .. }) => return Ok(None),
                    loaded => loaded?,
                };
                let record = Record::trusted(loaded.bytes()).expect("loaded as a record");
                if !record.has_expired(now_millis) {
                    return Ok(Some(record.key().to_vec()));
                }
            }
            // It was moved or replaced since it was seen, or does not count any more.
            match self.index.find(hash) {
                Some(now) if !now.is_same(place) => place = now,
                _ => return Ok(None),
            }
        }
    }
}
