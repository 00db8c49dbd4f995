//! LMDB, by `heed`, which includes its source.

use heed::types::Bytes;
use heed::{Database, Env, EnvFlags, EnvOpenOptions, RoTxn, WithTls};

use crate::engine::{Engine, Result, Session, Setup, to_error};
use crate::workload::{Key, Puts};

pub struct Lmdb {
    env: Env<WithTls>,
    entries: Database<Bytes, Bytes>,
    batch: u32,
}

/// The map only reserves address space, and its file is sparse: it has to be large enough for
/// half-empty pages and for pages that are not yet free.
const MAP_PER_DATA: u64 = 8;
const MIN_MAP_BYTES: u64 = 1 << 30;

impl Engine for Lmdb {
    const HAS_TRANSACTIONS: bool = true;
    type Session<'a> = LmdbSession<'a>;

    fn open(setup: &Setup) -> Result<Self> {
        let map = (MAP_PER_DATA * setup.data_bytes).max(MIN_MAP_BYTES);
        let mut options = EnvOpenOptions::new();
        options.map_size(usize::try_from(map.next_multiple_of(1 << 20))?);
        let mut flags = EnvFlags::NO_SYNC | EnvFlags::WRITE_MAP;
        if setup.is_large {
            // The setting that its documentation recommends then.
            flags |= EnvFlags::NO_READ_AHEAD;
        }
        // SAFETY: without syncs a power cut may damage the file, which is not opened after one; and
        // nothing here writes to memory that it does not own, which the writable map would accept.
        unsafe { options.flags(flags) };
        // SAFETY: the directory belongs to this bench, is on a local disk, and is open in one
        // process.
        let env = unsafe { options.open(&setup.path) }.map_err(to_error)?;
        let mut transaction = env.write_txn().map_err(to_error)?;
        let entries = env.create_database(&mut transaction, None).map_err(to_error)?;
        transaction.commit().map_err(to_error)?;
        Ok(Self { env, entries, batch: setup.batch })
    }

    fn session(&self) -> Result<LmdbSession<'_>> {
        Ok(LmdbSession { lmdb: self, reading: None })
    }

    fn close(self) -> Result<()> {
        self.env.prepare_for_closing().wait();
        Ok(())
    }
}

/// It reads in one transaction until it puts something.
pub struct LmdbSession<'a> {
    lmdb: &'a Lmdb,
    reading: Option<RoTxn<'a, WithTls>>,
}

impl<'a> LmdbSession<'a> {
    fn reading(&mut self) -> Result<&RoTxn<'a, WithTls>> {
        if self.reading.is_none() {
            self.reading = Some(self.lmdb.env.read_txn().map_err(to_error)?);
        }
        Ok(self.reading.as_ref().expect("begun above"))
    }
}

impl Session for LmdbSession<'_> {
    fn put(&mut self, key: &Key, value: &[u8]) -> Result<()> {
        self.reading = None;
        let mut transaction = self.lmdb.env.write_txn().map_err(to_error)?;
        self.lmdb.entries.put(&mut transaction, &key[..], value).map_err(to_error)?;
        transaction.commit().map_err(to_error)
    }

    fn fill(&mut self, puts: &mut Puts<'_>) -> Result<()> {
        self.reading = None;
        let mut has_more = true;
        while has_more {
            let mut transaction = self.lmdb.env.write_txn().map_err(to_error)?;
            for _ in 0..self.lmdb.batch {
                let Some((key, value)) = puts.draw() else {
                    has_more = false;
                    break;
                };
                self.lmdb.entries.put(&mut transaction, &key[..], value).map_err(to_error)?;
            }
            transaction.commit().map_err(to_error)?;
        }
        Ok(())
    }

    fn get(&mut self, key: &Key, see: impl FnOnce(&[u8])) -> Result<()> {
        let entries = self.lmdb.entries;
        if let Some(value) = entries.get(self.reading()?, &key[..]).map_err(to_error)? {
            see(value);
        }
        Ok(())
    }

    fn scan(&mut self, mut see: impl FnMut(&[u8], &[u8]) -> bool) -> Result<()> {
        let entries = self.lmdb.entries;
        for entry in entries.iter(self.reading()?).map_err(to_error)? {
            let (key, value) = entry.map_err(to_error)?;
            if !see(key, value) {
                break;
            }
        }
        Ok(())
    }
}
