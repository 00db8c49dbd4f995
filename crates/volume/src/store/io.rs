//! Requests of the store to its device, and their completions, which wait for the store's thread.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use alluvium_device::{AlignedBuf, DeviceError, DeviceOffset, Request, SharedBuf, SharedDevice};
use parking_lot::Mutex;

use super::overlay::FlightId;

/// What a request was for.
#[derive(Clone, Debug)]
pub(super) enum Purpose {
    /// Writes blocks of a write-back, in neighbouring slots.
    Blocks { flight: FlightId, slots: Range<u32> },
    /// Writes sectors or a copy of the superblock.
    Checkpoint,
    /// Makes a checkpoint durable.
    Flush,
    /// Reads blocks, by number.
    Read(u64),
}

/// A request that has completed.
pub(super) type Completed = (Purpose, Result<Option<AlignedBuf>, DeviceError>);

/// Called when a request has completed: on a thread of the device, or within a call of the store.
/// It must neither block nor call the store.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// Counts of what a store has submitted to its device since the opening.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreCounters {
    /// Writes of blocks.
    pub block_writes: u64,
    /// Bytes of these writes.
    pub block_bytes: u64,
    /// Bytes of sectors and superblocks, which checkpoints write.
    pub checkpoint_bytes: u64,
    /// Flushes, and writes that carry one.
    pub flushes: u64,
}

/// The device, with the completions that were not taken yet.
pub(super) struct Io {
    device: SharedDevice,
    counters: StoreCounters,
    completed: Arc<Mutex<Vec<Completed>>>,
    wake: Wake,
}

impl Io {
    pub(super) fn new(device: SharedDevice, wake: Wake) -> Self {
        Self { device, counters: StoreCounters::default(), completed: Arc::default(), wake }
    }

    pub(super) fn alloc(&self, len_bytes: usize) -> AlignedBuf {
        self.device.alloc(len_bytes)
    }

    pub(super) fn read(&self, at: DeviceOffset, len_bytes: usize, number: u64) {
        let buf = self.device.alloc(len_bytes);
        self.submit(Request::Read { at, buf }, Purpose::Read(number));
    }

    pub(super) fn counters(&self) -> StoreCounters {
        self.counters
    }

    pub(super) fn write(
        &mut self,
        at: DeviceOffset,
        buf: SharedBuf,
        durable: bool,
        purpose: Purpose,
    ) {
        let len_bytes = buf.len() as u64;
        if let Purpose::Blocks { .. } = purpose {
            self.counters.block_writes += 1;
            self.counters.block_bytes += len_bytes;
        } else {
            self.counters.checkpoint_bytes += len_bytes;
        }
        self.counters.flushes += u64::from(durable);
        self.submit(Request::Write { at, buf, durable }, purpose);
    }

    pub(super) fn flush(&mut self) {
        self.counters.flushes += 1;
        self.submit(Request::Flush, Purpose::Flush);
    }

    fn submit(&self, request: Request, purpose: Purpose) {
        let (completed, wake) = (self.completed.clone(), self.wake.clone());
        let done = move |result| {
            let is_first = {
                let completed = &mut *completed.lock();
                completed.push((purpose, result));
                completed.len() == 1
            };
            if is_first {
                wake();
            }
        };
        self.device.submit(request, Box::new(done));
    }

    /// Takes what has completed, in exchange for an empty vector.
    pub(super) fn take(&self, completed: &mut Vec<Completed>) {
        std::mem::swap(&mut *self.completed.lock(), completed);
    }
}

impl fmt::Debug for Io {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.device.fmt(f)
    }
}
