//! fjall.

use fjall::config::CompressionPolicy;
use fjall::{Database, Keyspace, KeyspaceCreateOptions, PersistMode};

use crate::engine::{Engine, Result, Session, Setup, to_error};
use crate::workload::Key;

pub struct Fjall {
    database: Database,
    entries: Keyspace,
}

/// The maximum that its documentation recommends.
const MAX_MEMTABLE_BYTES: usize = 64 << 20;
/// One being filled, and two being written.
const WRITE_BUFFERS: u64 = 3;

impl Engine for Fjall {
    type Session<'a> = &'a Fjall;

    fn open(setup: &Setup) -> Result<Self> {
        let cache = setup.block_cache_bytes(WRITE_BUFFERS) as u64;
        // Its log is written a buffer at a time, like ours, and not with a system call for each
        // put.
        let database = Database::builder(&setup.path)
            .cache_size(cache)
            .manual_journal_persist(true)
            .open()
            .map_err(to_error)?;
        let memtable = setup.write_buffer_bytes().min(MAX_MEMTABLE_BYTES) as u64;
        let options = || {
            KeyspaceCreateOptions::default()
                .manual_journal_persist(true)
                .max_memtable_size(memtable)
                .data_block_compression_policy(CompressionPolicy::disabled())
        };
        let entries = database.keyspace("bench", options).map_err(to_error)?;
        Ok(Self { database, entries })
    }

    fn session(&self) -> Result<&Fjall> {
        Ok(self)
    }

    fn close(self) -> Result<()> {
        self.database.persist(PersistMode::Buffer).map_err(to_error)
    }
}

impl Session for &Fjall {
    fn put(&mut self, key: &Key, value: &[u8]) -> Result<()> {
        self.entries.insert(&key[..], value).map_err(to_error)
    }

    fn get(&mut self, key: &Key, see: impl FnOnce(&[u8])) -> Result<()> {
        if let Some(value) = self.entries.get(key).map_err(to_error)? {
            see(&value);
        }
        Ok(())
    }

    fn scan(&mut self, mut see: impl FnMut(&[u8], &[u8]) -> bool) -> Result<()> {
        for entry in self.entries.iter() {
            let (key, value) = entry.into_inner().map_err(to_error)?;
            if !see(&key, &value) {
                break;
            }
        }
        Ok(())
    }
}
