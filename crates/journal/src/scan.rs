//! A scan of all keys, a few at a time, without state between two calls.
//!
//! The order is that of the index, by shard and fingerprint, which never changes for a key. (In the
//! order of the journals, which [`crate::Iter`] uses, what is written meanwhile comes last, and a
//! scan that is slower than the writers would never end.) The cost is one disk read for each key
//! whose record is not in memory. Of a long record only the beginning is read, and its key is
//! trusted because its hash matches: `docs/journal-cache-design.md`, "Scan".

use crate::error::{Error, Result};
use crate::hash::{KeyHash, SHARD_BITS};
use crate::journal::Journal;
use crate::position::Position;
use crate::record::{Head, Record};
use crate::shared::Shared;

/// A call visits at most this many buckets of the index, however few keys it finds: some ten
/// microseconds.
const MAX_BUCKETS: usize = 8192;
/// A call returns once its keys have this many bytes together.
const ENOUGH_BYTES: usize = 1 << 20;

/// The position at which a [`crate::Cache::scan`] continues. Any number is valid; 0 is the
/// beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanCursor(pub u64);

/// The result of a [`crate::Cache::scan`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scanned {
    /// Keys, in no meaningful order.
    pub keys: Vec<Vec<u8>>,
    /// The cursor to continue from, never 0; `None` at the end.
    pub next: Option<ScanCursor>,
}

impl ScanCursor {
    /// The highest bits are the shard, the others the highest bits of the fingerprint. The smallest
    /// fingerprint of a bucket has zeroes in its lower bits.
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

/// The result of looking up the key of an index entry.
enum KeyLookup {
    /// The entry has this key.
    Present(Vec<u8>),
    /// The record has expired or been removed, or is damaged.
    Absent,
    /// `may_read` refused the read.
    Refused,
}

impl Shared {
    /// Scans as [`crate::Cache::scan_within`]; `None` if `may_read` refused before anything was
    /// found.
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
            for (hash, position) in found.drain(..) {
                match self.key_of(hash, position, &mut may_read)? {
                    KeyLookup::Present(key) => {
                        key_bytes += key.len();
                        keys.push(key);
                    }
                    KeyLookup::Absent => {}
                    KeyLookup::Refused => {
                        // The next call returns the whole bucket.
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

    /// Returns the memory that reading the record at `position` allocates; 0 if it is in memory.
    pub(crate) fn cold_bytes(&self, position: Position) -> usize {
        self.journals.of(position).map_or(0, |journal| journal.cold_bytes(position))
    }

    /// Returns the key of an index entry.
    fn key_of(
        &self,
        hash: KeyHash,
        seen: Position,
        may_read: &mut impl FnMut(usize) -> bool,
    ) -> Result<KeyLookup> {
        let mut position = seen;
        loop {
            if let Some(journal) = self.journals.of(position) {
                match self.read_key(&journal, hash, position, may_read)? {
                    KeyLookup::Absent => {}
                    found => return Ok(found),
                }
            }
            // It was moved or replaced since the index was read, or is no longer live.
            match self.index.find_after_writer(hash) {
                Some(now) if !now.is_same(position) => position = now,
                _ => return Ok(KeyLookup::Absent),
            }
        }
    }

    fn read_key(
        &self,
        journal: &Journal,
        hash: KeyHash,
        position: Position,
        may_read: &mut impl FnMut(usize) -> bool,
    ) -> Result<KeyLookup> {
        let kept = self.peek(journal, position);
        if kept.is_none()
            && let Some(head_bytes) = journal.head_bytes(position)
        {
            if !may_read(head_bytes) {
                return Ok(KeyLookup::Refused);
            }
            if let Some(key) = self.key_in_head(hash, journal.read_head(position)?.bytes()) {
                return Ok(KeyLookup::Present(key));
            }
        }
        let read_bytes = if kept.is_some() { 0 } else { journal.cold_bytes(position) };
        if !may_read(read_bytes) {
            return Ok(KeyLookup::Refused);
        }
        let loaded = match kept.map_or_else(|| journal.load(position), Ok) {
            Err(Error::Corrupt { .. }) => return Ok(KeyLookup::Absent),
            loaded => loaded?,
        };
        let record = Record::trusted(loaded.bytes()).expect("loaded as a record");
        Ok(match record.has_expired(&self.clock) {
            true => KeyLookup::Absent,
            false => KeyLookup::Present(record.key().to_vec()),
        })
    }

    /// Returns the key in the first bytes of a record, if it is the one that the index has for it
    /// and the record appears not to have expired. `None` says nothing about the record.
    fn key_in_head(&self, hash: KeyHash, head: &[u8]) -> Option<Vec<u8>> {
        let head = Head::unchecked(head)?;
        let found = self.hasher.hash(head.key);
        // Compares everything that the index stores of the hash.
        let is_same_key = found.fingerprint == hash.fingerprint
            && found.shard() == hash.shard()
            && found.tag() == hash.tag();
        let counts = head.expires_at.is_none_or(|at| at > self.clock.now_millis());
        (is_same_key && counts).then(|| head.key.to_vec())
    }
}
