//! The index by itself, to compare it with concurrent maps. With the feature `bench` only.

use std::fmt;
use std::io;

use crate::hash::KeyHash;
use crate::index::Index;
use crate::journal::FIRST_RECORD;
use crate::position::{Granule, JournalNumber, Position};

/// A map from 128-bit keys to 32-bit numbers.
pub struct KeyDirectory(Index);

/// The number of bits of a number that become the granule; the others become the journal number.
const GRANULE_BITS: u32 = 20;

fn hash(key: u128) -> KeyHash {
    KeyHash { high: (key >> 64) as u64, fingerprint: key as u64 }
}

impl KeyDirectory {
    /// Creates an empty map.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Index::with_capacity(0)?))
    }

    /// Sets the number of a key.
    ///
    /// # Errors
    /// There is no memory for a larger table.
    pub fn put(&self, key: u128, number: u32) -> io::Result<()> {
        let hash = hash(key);
        let mut writer = self.0.lock(hash);
        writer.reserve_slot()?;
        let first = Granule::at(FIRST_RECORD).0 + (number & ((1 << GRANULE_BITS) - 1));
        let journal = JournalNumber(u64::from(number >> GRANULE_BITS));
        writer.set(Position::new(journal, Granule(first), 1, false, hash));
        Ok(())
    }

    /// Returns the number of a key.
    pub fn get(&self, key: u128) -> Option<u32> {
        let position = self.0.find(hash(key))?;
        let granule = position.first().0 - Granule::at(FIRST_RECORD).0;
        Some(position.short_number() << GRANULE_BITS | granule)
    }
}

impl fmt::Debug for KeyDirectory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyDirectory").finish_non_exhaustive()
    }
}
