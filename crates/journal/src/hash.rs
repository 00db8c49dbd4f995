//! The hash that represents a key in the index and in hints: `docs/format/journal.md`, section 4.

use siphasher::sip128::SipHasher13;

/// Shards of the index, by the highest bits of [`KeyHash::high`]. Two in a model, which creates all
/// of them each time.
pub(crate) const SHARD_BITS: u32 = if cfg!(loom) { 1 } else { 6 };
/// The number of lowest bits of [`KeyHash::high`] that an entry stores.
pub(crate) const TAG_BITS: u32 = 8;

/// 128 bits of hash of a key, keyed by the cache's secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyHash {
    pub(crate) high: u64,
    /// Stored completely in the entry; its highest bits select the bucket.
    pub(crate) fingerprint: u64,
}

impl KeyHash {
    pub(crate) fn shard(self) -> usize {
        (self.high >> (u64::BITS - SHARD_BITS)) as usize
    }

    pub(crate) fn tag(self) -> u64 {
        self.high & ((1 << TAG_BITS) - 1)
    }
}

/// The hash function of one cache.
#[derive(Clone, Copy)]
pub(crate) struct KeyHasher {
    sip: SipHasher13,
    #[cfg(test)]
    collides: bool,
}

/// In tests: with this secret, keys that begin with the same byte have the same hash.
#[cfg(test)]
pub(crate) const COLLIDING: [u8; 16] = *b"first bytes only";

impl KeyHasher {
    pub(crate) fn new(secret: &[u8; 16]) -> Self {
        Self {
            sip: SipHasher13::new_with_key(secret),
            #[cfg(test)]
            collides: *secret == COLLIDING,
        }
    }

    #[inline]
    pub(crate) fn hash(&self, key: &[u8]) -> KeyHash {
        #[cfg(test)]
        let key = if self.collides { &key[..key.len().min(1)] } else { key };
        let hash = self.sip.hash(key);
        KeyHash { high: hash.h1, fingerprint: hash.h2 }
    }
}
