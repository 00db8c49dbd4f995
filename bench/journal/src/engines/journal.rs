//! The journal cache of this repository.

use std::fs;
use std::path::Path;

use alluvium_journal::{Cache, Compression, Options};

use crate::engine::{Engine, Result, Session, Setup};
use crate::workload::Key;

pub struct Journal(Cache);

/// Smaller journals make more files, larger ones fewer that can be in memory.
const MAX_JOURNAL_BYTES: u64 = 128 << 20;
const MIN_JOURNAL_BYTES: u64 = 1 << 20;
/// The minimum number of journals in memory.
const JOURNALS_IN_MEMORY: u64 = 16;

impl Engine for Journal {
    type Session<'a> = &'a Cache;

    fn open(setup: &Setup) -> Result<Self> {
        // Its index is outside its own budget, so it is subtracted here.
        let arenas = setup.memory_bytes - setup.index_bytes;
        let largest = (arenas / JOURNALS_IN_MEMORY).max(MIN_JOURNAL_BYTES);
        let journal = (1_u64 << largest.ilog2()).min(MAX_JOURNAL_BYTES);
        let options = Options {
            memory_bytes: usize::try_from(arenas.max(4 * journal))?,
            max_disk_bytes: setup.disk_bytes.max(16 * journal),
            journal_bytes: usize::try_from(journal)?,
            // As for all engines here.
            compression: Compression::None,
            ..Options::default()
        };
        Ok(Self(Cache::open(&setup.path, options)?))
    }

    fn session(&self) -> Result<&Cache> {
        Ok(&self.0)
    }

    fn close(self) -> Result<()> {
        Ok(self.0.close()?)
    }
}

impl Session for &Cache {
    fn put(&mut self, key: &Key, value: &[u8]) -> Result<()> {
        Ok(Cache::put(self, key, value)?)
    }

    fn get(&mut self, key: &Key, see: impl FnOnce(&[u8])) -> Result<()> {
        if let Some(value) = Cache::get(self, key)? {
            see(&value);
        }
        Ok(())
    }

    fn get_many(&mut self, keys: &[Key], mut see: impl FnMut(usize, &[u8])) -> Result<()> {
        for (at, value) in Cache::get_many(self, keys).into_iter().enumerate() {
            if let Some(value) = value? {
                see(at, &value);
            }
        }
        Ok(())
    }

    fn scan(&mut self, mut see: impl FnMut(&[u8], &[u8]) -> bool) -> Result<()> {
        for entry in self.iter() {
            let entry = entry?;
            if !see(entry.key(), entry.value()) {
                break;
            }
        }
        Ok(())
    }
}

/// Removes hints, so that the next opening has none.
pub fn remove_hints(directory: &Path) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "hint") {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}
