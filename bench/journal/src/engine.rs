//! What is asked of an engine, and of all of them the same.

use std::fmt::Display;
use std::path::PathBuf;

use crate::workload::{Key, Puts};

pub type Error = Box<dyn std::error::Error + Send + Sync>;
pub type Result<T> = std::result::Result<T, Error>;

/// An engine's own error, as what it says: some of them cannot be sent to another thread.
pub fn told(error: impl Display) -> Error {
    error.to_string().into()
}

/// What an engine may use.
#[derive(Clone, Debug)]
pub struct Setup {
    /// A directory that is there.
    pub path: PathBuf,
    /// Keys that it will hold.
    pub entries: u64,
    /// Bytes of their keys and values.
    pub data_bytes: u64,
    /// All memory that it may use: caches, write buffers, indexes.
    pub memory_bytes: u64,
    /// The part of it that an index in memory of 32 bytes for each key would take.
    pub index_bytes: u64,
    /// Disk space that engines with a bound may use.
    pub disk_bytes: u64,
    /// Puts in a transaction, where a fill is made of transactions.
    pub batch: u32,
    /// The data is larger than the memory.
    pub is_large: bool,
}

impl Setup {
    /// Of the write buffers of a log-structured merge tree: an eighth of the memory, within what
    /// their authors recommend.
    pub fn write_buffer_bytes(&self) -> usize {
        usize::try_from((self.memory_bytes / 8).clamp(4 << 20, 128 << 20)).unwrap_or(usize::MAX)
    }

    /// What is left to the block cache beside so many write buffers; at least a quarter.
    pub fn block_cache_bytes(&self, write_buffers: u64) -> usize {
        let buffers = write_buffers * self.write_buffer_bytes() as u64;
        let left = self.memory_bytes.saturating_sub(buffers).max(self.memory_bytes / 4);
        usize::try_from(left).unwrap_or(usize::MAX)
    }
}

/// An open store.
pub trait Engine: Sized + Sync {
    /// Whether it can hand out all entries.
    const SCANS: bool = true;
    /// Whether `Setup::batch` matters to it.
    const HAS_TRANSACTIONS: bool = false;

    /// What one thread works with.
    type Session<'a>: Session
    where
        Self: 'a;

    /// Open what is in the directory, or make it there.
    fn open(setup: &Setup) -> Result<Self>;

    fn session(&self) -> Result<Self::Session<'_>>;

    /// Have everything in its files, and end.
    fn close(self) -> Result<()>;
}

/// What one thread does with a store. It sees what it has put itself.
pub trait Session {
    fn put(&mut self, key: &Key, value: &[u8]) -> Result<()>;

    /// All puts of a workload that only writes.
    fn fill(&mut self, puts: &mut Puts<'_>) -> Result<()> {
        while let Some((key, value)) = puts.draw() {
            self.put(&key, value)?;
        }
        Ok(())
    }

    /// Show the value of a key, if there is one.
    fn get(&mut self, key: &Key, see: impl FnOnce(&[u8])) -> Result<()>;

    /// Show the values of keys with their places among these.
    fn get_many(&mut self, keys: &[Key], mut see: impl FnMut(usize, &[u8])) -> Result<()> {
        for (at, key) in keys.iter().enumerate() {
            self.get(key, |value| see(at, value))?;
        }
        Ok(())
    }

    /// Show all keys and values, in any order, until `see` returns false.
    fn scan(&mut self, see: impl FnMut(&[u8], &[u8]) -> bool) -> Result<()>;
}
