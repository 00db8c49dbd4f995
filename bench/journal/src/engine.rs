//! The interface of an engine, the same for all of them.

use std::fmt::Display;
use std::path::PathBuf;

use crate::workload::{Key, Puts};

pub type Error = Box<dyn std::error::Error + Send + Sync>;
pub type Result<T> = std::result::Result<T, Error>;

/// Converts an engine's error to its text: some of them cannot be sent to another thread.
pub fn to_error(error: impl Display) -> Error {
    error.to_string().into()
}

/// What an engine may use.
#[derive(Clone, Debug)]
pub struct Setup {
    /// An existing directory.
    pub path: PathBuf,
    /// The number of keys that it will hold.
    pub entries: u64,
    /// Bytes of their keys and values.
    pub data_bytes: u64,
    /// All memory that it may use: caches, write buffers, indexes.
    pub memory_bytes: u64,
    /// The part of it that an in-memory index of 32 bytes for each key would take.
    pub index_bytes: u64,
    /// Disk space that engines with a limit may use.
    pub disk_bytes: u64,
    /// Puts in a transaction, for engines that are filled by transactions.
    pub batch: u32,
    /// The data is larger than the memory.
    pub is_large: bool,
}

impl Setup {
    /// Returns the size of a write buffer of a log-structured merge tree: an eighth of the memory,
    /// within what the engines' authors recommend.
    pub fn write_buffer_bytes(&self) -> usize {
        usize::try_from((self.memory_bytes / 8).clamp(4 << 20, 128 << 20)).unwrap_or(usize::MAX)
    }

    /// Returns what is left for the block cache next to this many write buffers; at least a
    /// quarter.
    pub fn block_cache_bytes(&self, write_buffers: u64) -> usize {
        let buffers = write_buffers * self.write_buffer_bytes() as u64;
        let left = self.memory_bytes.saturating_sub(buffers).max(self.memory_bytes / 4);
        usize::try_from(left).unwrap_or(usize::MAX)
    }
}

/// An open store.
pub trait Engine: Sized + Sync {
    /// Whether it can iterate over all entries.
    const SCANS: bool = true;
    /// Whether it uses `Setup::batch`.
    const HAS_TRANSACTIONS: bool = false;

    /// The state of one thread.
    type Session<'a>: Session
    where
        Self: 'a;

    /// Opens the store in the directory, or creates it.
    fn open(setup: &Setup) -> Result<Self>;

    fn session(&self) -> Result<Self::Session<'_>>;

    /// Writes everything to its files, and closes the store.
    fn close(self) -> Result<()>;
}

/// The operations of one thread on a store. It sees its own puts.
pub trait Session {
    fn put(&mut self, key: &Key, value: &[u8]) -> Result<()>;

    /// Executes all puts of a workload that only writes.
    fn fill(&mut self, puts: &mut Puts<'_>) -> Result<()> {
        while let Some((key, value)) = puts.draw() {
            self.put(&key, value)?;
        }
        Ok(())
    }

    /// Passes the value of a key to `see`, if there is one.
    fn get(&mut self, key: &Key, see: impl FnOnce(&[u8])) -> Result<()>;

    /// Passes the values of keys to `see`, with their positions in `keys`.
    fn get_many(&mut self, keys: &[Key], mut see: impl FnMut(usize, &[u8])) -> Result<()> {
        for (at, key) in keys.iter().enumerate() {
            self.get(key, |value| see(at, value))?;
        }
        Ok(())
    }

    /// Passes all keys and values to `see`, in any order, until it returns false.
    fn scan(&mut self, see: impl FnMut(&[u8], &[u8]) -> bool) -> Result<()>;
}
