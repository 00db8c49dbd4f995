//! The first pass of log compaction: finds the last record of each key in the part of a partition
//! that is not compacted yet.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hash, Hasher, RandomState};

use alluvium_stream::Batch;

use crate::batch::BatchHeader;
use crate::producer_state::Aborted;
use crate::records::Unpacked;

/// The greatest number of keys in one pass: a hash table of 2^20 slots, 25 MiB.
pub(super) const MAX_KEYS: usize = (1 << 20) / 8 * 7;
/// A batch with more records is not read, so that a pass can hold the keys of one batch at least.
const MAX_RECORDS: i32 = 400_000;

/// Decompresses the records of a batch. `None` for a batch that stays unchanged: its records cannot
/// be read, or are too many.
pub(super) fn unpack(batch: &Batch) -> Option<Unpacked> {
    let header = BatchHeader::parse(&batch.payload)?;
    if !(0..=MAX_RECORDS).contains(&header.record_count)
        || header.base_offset as u64 != batch.base.0
    {
        return None;
    }
    Unpacked::new(&batch.payload).ok()
}

/// A key's hash: 128 bits that cannot be predicted.
#[derive(Clone, Copy, PartialEq, Eq)]
struct KeyHash(u64, u64);

impl Hash for KeyHash {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0);
    }
}

/// A hasher that returns a part of a key, which is a hash already.
#[derive(Default)]
struct PassThroughHasher(u64);

impl Hasher for PassThroughHasher {
    fn write(&mut self, _: &[u8]) {
        unreachable!("a key's hash is written as a number");
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The greatest offset of each key, by its hash. The seed is random, so clients cannot construct
/// two keys with the same hash.
#[derive(Default)]
pub(super) struct Keys {
    seed: RandomState,
    latest: HashMap<KeyHash, u64, BuildHasherDefault<PassThroughHasher>>,
}

impl Keys {
    fn hash(&self, key: &[u8]) -> KeyHash {
        // SipHash with one secret key, of two different messages.
        let half = |which: u8| {
            let mut hasher = self.seed.build_hasher();
            hasher.write_u8(which);
            hasher.write(key);
            hasher.finish()
        };
        KeyHash(half(0), half(1))
    }

    /// Whether there is a record with this key after `offset`.
    pub(super) fn is_replaced(&self, key: &[u8], offset: u64) -> bool {
        self.latest.get(&self.hash(key)).is_some_and(|latest| *latest > offset)
    }
}

/// The aborted transactions of a partition.
#[derive(Default)]
pub(super) struct AbortedTransactions(HashMap<i64, Vec<Aborted>>);

impl AbortedTransactions {
    pub(super) fn new(aborted: Vec<Aborted>) -> Self {
        let mut by_producer: HashMap<i64, Vec<Aborted>> = HashMap::new();
        for aborted in aborted {
            by_producer.entry(aborted.producer_id).or_default().push(aborted);
        }
        Self(by_producer)
    }

    /// Whether a batch is part of one of them.
    pub(super) fn has(&self, header: &BatchHeader, base: u64) -> bool {
        if !header.is_transactional() || header.is_control() {
            return false;
        }
        let of_producer = self.0.get(&header.producer_id).map_or(&[][..], Vec::as_slice);
        // A producer has one transaction at a time.
        let at = of_producer.partition_point(|aborted| aborted.marker_offset <= base);
        of_producer.get(at).is_some_and(|aborted| aborted.first_offset <= base)
    }
}

/// The state and result of the first pass.
pub(super) struct FirstPass {
    pub(super) keys: Keys,
    pub(super) aborted: AbortedTransactions,
    /// The offset below which all keys are known.
    pub(super) end: u64,
    /// Whether the keys of the next batch do not fit.
    pub(super) is_full: bool,
    max_keys: usize,
}

impl FirstPass {
    pub(super) fn new(from: u64, aborted: AbortedTransactions, max_keys: usize) -> Self {
        Self { keys: Keys::default(), aborted, end: from, is_full: false, max_keys }
    }

    /// Adds the keys of the next batches; returns false when no more fit.
    pub(super) fn batches(&mut self, batches: &[Batch]) -> bool {
        for batch in batches {
            if !self.batch(batch) {
                self.is_full = true;
                return false;
            }
        }
        true
    }

    fn batch(&mut self, batch: &Batch) -> bool {
        let header = BatchHeader::parse(&batch.payload);
        let has_keys = header
            .is_some_and(|header| !header.is_control() && !self.aborted.has(&header, batch.base.0));
        if let Some(unpacked) = unpack(batch).filter(|_| has_keys) {
            let count = unpacked.header().record_count as usize;
            if self.keys.latest.len() + count > self.max_keys && !self.keys.latest.is_empty() {
                return false;
            }
            for record in unpacked.records() {
                if let Some(key) = record.key {
                    self.keys.latest.insert(self.keys.hash(key), record.offset);
                }
            }
        }
        self.end = batch.end().0;
        true
    }
}
