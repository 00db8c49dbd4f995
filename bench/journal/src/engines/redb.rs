//! redb.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use redb::{
    Builder, Database, Durability, ReadOnlyTable, ReadableDatabase, ReadableTable, StorageBackend,
    TableDefinition, WriteTransaction,
};

use crate::engine::{Engine, Result, Session, Setup, to_error};
use crate::workload::{Key, Puts};

const ENTRIES: TableDefinition<'static, &'static [u8; 16], &'static [u8]> =
    TableDefinition::new("bench");
/// One transaction in this many is committed durably; without it the pages of the others are not
/// reused. (Durably except for the sync: see below.)
const TRANSACTIONS_PER_COMMIT: u64 = 64;

/// Its file, which is never synced, as with all engines here.
#[derive(Debug)]
struct NoSync(File);

impl StorageBackend for NoSync {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(out, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }
}

pub struct Redb {
    database: Database,
    transactions: AtomicU64,
    batch: u32,
}

impl Redb {
    /// Begins the next write transaction.
    fn begin(&self) -> Result<WriteTransaction> {
        let mut transaction = self.database.begin_write().map_err(to_error)?;
        let number = self.transactions.fetch_add(1, Ordering::Relaxed);
        let is_for_good = number.is_multiple_of(TRANSACTIONS_PER_COMMIT);
        let durability = if is_for_good { Durability::Immediate } else { Durability::None };
        transaction.set_durability(durability).map_err(to_error)?;
        Ok(transaction)
    }
}

impl Engine for Redb {
    const HAS_TRANSACTIONS: bool = true;
    type Session<'a> = RedbSession<'a>;

    fn open(setup: &Setup) -> Result<Self> {
        let path = setup.path.join("redb");
        let file =
            File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        let database = Builder::new()
            .set_cache_size(usize::try_from(setup.memory_bytes)?)
            .create_with_backend(NoSync(file))
            .map_err(to_error)?;
        let redb = Self { database, transactions: AtomicU64::new(0), batch: setup.batch };
        let transaction = redb.begin()?;
        // Opening it creates it.
        drop(transaction.open_table(ENTRIES).map_err(to_error)?);
        transaction.commit().map_err(to_error)?;
        Ok(redb)
    }

    fn session(&self) -> Result<RedbSession<'_>> {
        Ok(RedbSession { redb: self, reading: None })
    }

    fn close(self) -> Result<()> {
        // It makes the preceding transactions durable.
        self.transactions.store(0, Ordering::Relaxed);
        self.begin()?.commit().map_err(to_error)
    }
}

/// It reads in one transaction until it puts something.
pub struct RedbSession<'a> {
    redb: &'a Redb,
    reading: Option<ReadOnlyTable<&'static [u8; 16], &'static [u8]>>,
}

impl RedbSession<'_> {
    fn entries(&mut self) -> Result<&ReadOnlyTable<&'static [u8; 16], &'static [u8]>> {
        if self.reading.is_none() {
            let transaction = self.redb.database.begin_read().map_err(to_error)?;
            self.reading = Some(transaction.open_table(ENTRIES).map_err(to_error)?);
        }
        Ok(self.reading.as_ref().expect("opened above"))
    }
}

impl Session for RedbSession<'_> {
    fn put(&mut self, key: &Key, value: &[u8]) -> Result<()> {
        self.reading = None;
        let transaction = self.redb.begin()?;
        transaction.open_table(ENTRIES).map_err(to_error)?.insert(key, value).map_err(to_error)?;
        transaction.commit().map_err(to_error)
    }

    fn fill(&mut self, puts: &mut Puts<'_>) -> Result<()> {
        self.reading = None;
        let mut has_more = true;
        while has_more {
            let transaction = self.redb.begin()?;
            let mut entries = transaction.open_table(ENTRIES).map_err(to_error)?;
            for _ in 0..self.redb.batch {
                let Some((key, value)) = puts.draw() else {
                    has_more = false;
                    break;
                };
                entries.insert(&key, value).map_err(to_error)?;
            }
            drop(entries);
            transaction.commit().map_err(to_error)?;
        }
        Ok(())
    }

    fn get(&mut self, key: &Key, see: impl FnOnce(&[u8])) -> Result<()> {
        if let Some(value) = self.entries()?.get(key).map_err(to_error)? {
            see(value.value());
        }
        Ok(())
    }

    fn scan(&mut self, mut see: impl FnMut(&[u8], &[u8]) -> bool) -> Result<()> {
        for entry in self.entries()?.iter().map_err(to_error)? {
            let (key, value) = entry.map_err(to_error)?;
            if !see(key.value(), value.value()) {
                break;
            }
        }
        Ok(())
    }
}
