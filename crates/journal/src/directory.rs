//! The key directory by itself, for measuring it beside concurrent maps. With the feature `bench`
//! only.

use std::fmt;
use std::io;

use crate::hash::KeyHash;
use crate::index::Index;
use crate::journal::FIRST_RECORD;
use crate::place::{Granule, JournalNumber, Place};

/// 128 bits that stand for a key, and a number of 32 bits for it.
pub struct KeyDirectory(Index);

/// Of which a number takes the first ones for a granule, and the others for a journal.
const GRANULE_BITS: u32 = 20;

fn hash(key: u128) -> KeyHash {
    KeyHash { high: (key >> 64) as u64, fingerprint: key as u64 }
}

impl KeyDirectory {
    /// Without entries.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Index::with_room(0)?))
    }

    /// The key has this number from now on.
    ///
    /// # Errors
    /// There is no memory for a larger table.
    pub fn put(&self, key: u128, number: u32) -> io::Result<()> {
        let hash = hash(key);
        let mut writer = self.0.lock(hash);
        writer.make_room()?;
        let first = Granule::at(FIRST_RECORD).0 + (number & ((1 << GRANULE_BITS) - 1));
        let journal = JournalNumber(u64::from(number >> GRANULE_BITS));
        writer.set(Place::new(journal, Granule(first), 1, false, hash));
        Ok(())
    }

    /// Its number.
    pub fn get(&self, key: u128) -> Option<u32> {
        let place = self.0.find(hash(key))?;
        let granule = place.first().0 - Granule::at(FIRST_RECORD).0;
        Some(place.short_number() << GRANULE_BITS | granule)
    }
}

impl fmt::Debug for KeyDirectory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyDirectory").finish_non_exhaustive()
    }
}
