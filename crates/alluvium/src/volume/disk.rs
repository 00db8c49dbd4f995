//! An attached volume as the disk of an NBD export.

use std::sync::Arc;

use alluvium_nbd::{Allocation, Disk, DiskError, Extent, Part, ZeroMode};
use alluvium_volume::gateway::{Failure, Volume};
use alluvium_volume::{Attached, BlockState};
use async_trait::async_trait;
use bytes::Bytes;

use super::export_metrics::Times;

/// The longest range whose states are asked for at a time: a chunk.
const STATUS_BYTES: u64 = 16 << 20;

/// An attached volume.
pub(super) struct VolumeDisk {
    attached: Arc<Attached>,
    times: Arc<Times>,
}

impl VolumeDisk {
    pub(super) fn new(attached: Arc<Attached>, times: Arc<Times>) -> Self {
        Self { attached, times }
    }

    fn volume(&self) -> &Volume {
        &self.attached.volume
    }
}

fn disk_error(failure: Failure) -> DiskError {
    match failure {
        Failure::NoSpace(_) => DiskError::NoSpace,
        Failure::Fenced | Failure::Dropped | Failure::Detached => DiskError::Fenced,
        Failure::OutOfBounds { .. } => DiskError::Invalid(failure.to_string()),
        other => DiskError::Io(other.to_string()),
    }
}

#[async_trait]
impl Disk for VolumeDisk {
    fn size_bytes(&self) -> u64 {
        self.volume().size()
    }

    fn is_read_only(&self) -> bool {
        false
    }

    async fn read(&self, at: u64, len: u32) -> Result<Vec<Part>, DiskError> {
        let read = self.times.of("read", self.volume().read(at, len.into()));
        let data = read.await.map_err(disk_error)?;
        Ok(vec![Part::Data(data)])
    }

    async fn write(&self, at: u64, data: Bytes) -> Result<(), DiskError> {
        self.times.of("write", self.volume().write(at, data)).await.map_err(disk_error)
    }

    async fn zero(&self, at: u64, len: u64, mode: ZeroMode) -> Result<(), DiskError> {
        match mode {
            // Blocks that are covered in part are not discarded: what the client wants zeroed must
            // read as zeros.
            ZeroMode::MayFree if is_aligned(at, len) => self.discard(at, len).await,
            ZeroMode::MayFree | ZeroMode::Allocate => {
                self.times.of("zero", self.volume().zero(at, len)).await.map_err(disk_error)
            }
        }
    }

    fn is_zero_fast(&self, at: u64, len: u64, _: ZeroMode) -> bool {
        is_aligned(at, len)
    }

    async fn discard(&self, at: u64, len: u64) -> Result<(), DiskError> {
        self.times.of("discard", self.volume().discard(at, len)).await.map_err(disk_error)
    }

    async fn flush(&self) -> Result<(), DiskError> {
        self.volume().flush().await.map_err(disk_error)
    }

    async fn status(
        &self,
        at: u64,
        len: u64,
        max_extents: usize,
    ) -> Result<Vec<Extent>, DiskError> {
        let len = len.min(STATUS_BYTES);
        let status = self.times.of("status", self.volume().status(at, len));
        let extents = status.await.map_err(disk_error)?;
        let extents = extents.into_iter().take(max_extents).map(|extent| Extent {
            len: extent.len,
            allocation: match extent.state {
                BlockState::Absent => Allocation::Hole,
                BlockState::Zeros => Allocation::Zeros,
                BlockState::Data => Allocation::Data,
            },
        });
        Ok(extents.collect())
    }
}

fn is_aligned(at: u64, len: u64) -> bool {
    let block = alluvium_volume::BLOCK_BYTES as u64;
    at.is_multiple_of(block) && len.is_multiple_of(block)
}
