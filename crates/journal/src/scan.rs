//! All keys, a few at a time, with nothing kept between two calls.
//!
//! The order is that of the index, by shard and fingerprint, which never changes for a key. (Not
//! that of the journals, as [`crate::Iter`] has it: what is written meanwhile comes behind
//! everything else there, and a scan that goes slower than the writers would never end.) The price
//! is one read of the disk for each key whose record is not in memory; of a long one it reads the
//! beginning, and believes the key for the sake of its hash: `docs/journal-cache.md`, "A scan".

use crate::error::{Error, Result};
use crate::hash::{KeyHash, SHARD_BITS};
use crate::journal::Journal;
use crate::place::Place;
use crate::record::{Head, Record};
use crate::shared::Shared;

/// A call looks at so many buckets of the index and then returns, however few keys it has found:
/// some ten microseconds.
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
    /// Highest bits: the shard. The others: the highest ones of the fingerprint; the least one of a
    /// bucket has zeroes behind them.
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

/// What an entry of the index stands for.
enum Looked {
    /// This key.
    Present(Vec<u8>),
    /// Nothing that counts, or a record that is damaged.
    Absent,
    /// It was not to be read.
    Refused,
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
                match self.key_of(hash, place, &mut may_read)? {
                    Looked::Present(key) => {
                        key_bytes += key.len();
                        keys.push(key);
                    }
                    Looked::Absent => {}
                    Looked::Refused => {
                        // All of the bucket comes with the next call.
                        keys.truncate(before);
                        return Ok((at != from).then_some(Scanned { keys, next: Some(at) }));
                    }
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
        self.journals.of(place).map_or(0, |journal| journal.cold_bytes(place))
    }

    /// The key of an entry that was just seen in the index.
    fn key_of(
        &self,
        hash: KeyHash,
        seen: Place,
        may_read: &mut impl FnMut(usize) -> bool,
    ) -> Result<Looked> {
        let mut place = seen;
        loop {
            if let Some(journal) = self.journals.of(place) {
                match self.look_at(&journal, hash, place, may_read)? {
                    Looked::Absent => {}
                    looked => return Ok(looked),
                }
            }
            // It was moved or replaced since it was seen, or does not count any more.
            match self.index.find(hash) {
                Some(now) if !now.is_same(place) => place = now,
                _ => return Ok(Looked::Absent),
            }
        }
    }

    fn look_at(
        &self,
        journal: &Journal,
        hash: KeyHash,
        place: Place,
        may_read: &mut impl FnMut(usize) -> bool,
    ) -> Result<Looked> {
        let kept = self.peek(journal, place);
        if kept.is_none()
            && let Some(head_bytes) = journal.head_bytes(place)
        {
            if !may_read(head_bytes) {
                return Ok(Looked::Refused);
            }
            if let Some(key) = self.key_in_head(hash, journal.read_head(place)?.bytes()) {
                return Ok(Looked::Present(key));
            }
        }
        let read_bytes = if kept.is_some() { 0 } else { journal.cold_bytes(place) };
        if !may_read(read_bytes) {
            return Ok(Looked::Refused);
        }
        let loaded = match kept.map_or_else(|| journal.load(place), Ok) {
            Err(Error::Corrupt { .. }) => return Ok(Looked::Absent),
            loaded => loaded?,
        };
        let record = Record::trusted(loaded.bytes()).expect("loaded as a record");
        Ok(match record.has_expired(&self.clock) {
            true => Looked::Absent,
            false => Looked::Present(record.key().to_vec()),
        })
    }

    /// The key in the first bytes of a record, if it is the one that the index has entered there,
    /// and the record seems to count. `None`: whatever these bytes are, nothing follows from them.
    fn key_in_head(&self, hash: KeyHash, head: &[u8]) -> Option<Vec<u8>> {
        let head = Head::unchecked(head)?;
        let found = self.hasher.hash(head.key);
        // All that the index has of it.
        let is_entered = found.fingerprint == hash.fingerprint
            && found.shard() == hash.shard()
            && found.tag() == hash.tag();
        let counts = head.expires_at.is_none_or(|at| at > self.clock.now_millis());
        (is_entered && counts).then(|| head.key.to_vec())
    }
}
