//! foyer: its hybrid cache with a memory and a disk tier.
//!
//! It is asynchronous. What is in memory is returned without its runtime; for the rest the calling
//! thread waits, and the read itself uses processor time of other threads.

use foyer::{
    BlockEngineConfig, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder,
    HybridCachePolicy, HybridCacheProperties, PsyncIoEngineConfig,
};
use tokio::runtime::{Builder, Runtime};

use crate::engine::{Engine, Result, Session, Setup, to_error};
use crate::workload::Key;

pub struct Foyer {
    cache: HybridCache<u128, Vec<u8>>,
    /// Dropped after what runs on it.
    runtime: Runtime,
}

/// The overhead of an entry in memory: the key, the record, two counters, its links in the table
/// and in the eviction order, and what the allocator adds.
const ENTRY_OVERHEAD_BYTES: usize = 200;
const WORKER_THREADS: usize = 2;

impl Engine for Foyer {
    const SCANS: bool = false;
    type Session<'a> = &'a Foyer;

    fn open(setup: &Setup) -> Result<Self> {
        let runtime =
            Builder::new_multi_thread().worker_threads(WORKER_THREADS).enable_all().build()?;
        let buffers = (setup.memory_bytes / 16).clamp(16 << 20, 128 << 20);
        // The index of the disk tier is in memory too.
        let taken = 3 * buffers + setup.index_bytes;
        let entries = setup.memory_bytes.saturating_sub(taken).max(setup.memory_bytes / 4);
        let device = FsDeviceBuilder::new(&setup.path)
            .with_capacity(usize::try_from(setup.disk_bytes)?)
            .build()
            .map_err(to_error)?;
        let buffers = usize::try_from(buffers)?;
        let blocks = BlockEngineConfig::<u128, Vec<u8>, HybridCacheProperties>::new(device)
            .with_buffer_pool_size(buffers)
            .with_submit_queue_size_threshold(2 * buffers);
        // Each entry is written to the disk, as with all engines here.
        let building = HybridCacheBuilder::new()
            .with_policy(HybridCachePolicy::WriteOnInsertion)
            .memory(usize::try_from(entries)?)
            .with_weighter(|_key: &u128, value: &Vec<u8>| value.len() + ENTRY_OVERHEAD_BYTES)
            .storage()
            .with_io_engine_config(PsyncIoEngineConfig::new())
            .with_engine_config(blocks)
            .build();
        let cache = runtime.block_on(building).map_err(to_error)?;
        Ok(Self { cache, runtime })
    }

    fn session(&self) -> Result<&Foyer> {
        Ok(self)
    }

    fn close(self) -> Result<()> {
        self.runtime.block_on(self.cache.close()).map_err(to_error)
    }
}

impl Session for &Foyer {
    fn put(&mut self, key: &Key, value: &[u8]) -> Result<()> {
        self.cache.insert(u128::from_be_bytes(*key), value.to_vec());
        Ok(())
    }

    fn get(&mut self, key: &Key, see: impl FnOnce(&[u8])) -> Result<()> {
        let found = match self.cache.get(&u128::from_be_bytes(*key)).try_unwrap() {
            Ok(entry) => Some(entry),
            Err(reading) => self.runtime.block_on(reading).map_err(to_error)?,
        };
        if let Some(entry) = found {
            see(entry.value().as_slice());
        }
        Ok(())
    }

    fn scan(&mut self, _see: impl FnMut(&[u8], &[u8]) -> bool) -> Result<()> {
        Err("foyer has no iteration".into())
    }
}
