//! Why a store is not opened.

use std::fmt;

use alluvium_device::{ByteSize, DeviceError};
use alluvium_wal::LogOffset;

use super::layout::LayoutError;
use crate::fields::FieldError;
use crate::types::{CheckpointNumber, Layer, SlotIndex};

/// Why an opening refuses a store. `docs/format/volume-store.md`, section 8.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// A superblock copy or a sector has another version or an unknown flag.
    #[error(
        "the {found} has version {version} and flags {flags:#x}; a newer version of this program \
         has written the store"
    )]
    FutureVersion {
        /// The structure.
        found: &'static str,
        /// Its version.
        version: u32,
        /// Its flags.
        flags: u32,
    },
    /// A slot is of a layer, which this version does not have.
    #[error(
        "slot {slot} has blocks of layer {layer}; a newer version of this program has written the \
         store"
    )]
    UnknownLayer {
        /// The slot.
        slot: SlotIndex,
        /// The layer.
        layer: Layer,
    },
    /// Both superblock copies are valid, and not of one store.
    #[error("the two superblock copies contradict each other in their {field}")]
    SuperblockConflict {
        /// The field.
        field: &'static str,
    },
    /// No superblock copy is valid, and one of them was.
    #[error(
        "no superblock copy is valid ({0}; {1}); the store must be formatted again, and its \
         replicas are lost",
        copies[0],
        copies[1]
    )]
    SuperblockDamaged {
        /// What each copy is.
        copies: [String; 2],
    },
    /// The device is empty: [`alluvium_wal::looks_like`] finds nothing.
    #[error("the device is not formatted as a store")]
    NotFormatted,
    /// The device has other data.
    #[error("the device holds {looks_like}, not a volume store")]
    NotAStore {
        /// What was recognised.
        looks_like: String,
    },
    /// The device is smaller than the store.
    #[error(
        "the store uses {}, and the device has {}; attach the device that the store was made on",
        ByteSize(*capacity_bytes),
        ByteSize(*device_bytes)
    )]
    LargerThanDevice {
        /// Bytes that the store uses.
        capacity_bytes: u64,
        /// Bytes of the device.
        device_bytes: u64,
    },
    /// The store belongs to another log or server.
    #[error("the store has {field} {found}, and this server has {expected}")]
    ForeignStore {
        /// The field that differs.
        field: &'static str,
        /// Its value in the store.
        found: String,
        /// Its value in the server's registration or log.
        expected: String,
    },
    /// The log has a checkpoint that the store does not have.
    #[error(
        "the store is at checkpoint {store}, behind checkpoint {log} of its log; the store is an \
         old copy, or its device has lost flushed writes"
    )]
    StoreBehindLog {
        /// Number in the superblock.
        store: CheckpointNumber,
        /// Number of the last complete checkpoint in the log.
        log: CheckpointNumber,
    },
    /// The device cannot hold a store.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A request to the device has failed. After a failed write or flush nothing is known of what
    /// the device has: the process ends.
    #[error("{0}")]
    Device(String),
    /// The store has something that the log does not know yet.
    #[error("{0}; the log is an old copy, or has lost its end")]
    LogBehindStore(Ahead),
}

impl From<DeviceError> for StoreError {
    fn from(error: DeviceError) -> Self {
        Self::Device(error.to_string())
    }
}

/// What of the store is ahead of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// The number of the superblock.
    Superblock {
        /// Number in the superblock.
        store: CheckpointNumber,
        /// Number of the last complete checkpoint in the log.
        log: CheckpointNumber,
    },
    /// The log offset of the superblock.
    Offset {
        /// Offset in the superblock.
        durable: LogOffset,
        /// End of the log.
        end: LogOffset,
    },
    /// The number of a sector.
    Sector {
        /// The slot.
        slot: SlotIndex,
        /// Number in the sector.
        sector: CheckpointNumber,
        /// Number of the last complete checkpoint in the log.
        log: CheckpointNumber,
    },
}

impl fmt::Display for Ahead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Superblock { store, log } => {
                write!(
                    f,
                    "the store is at checkpoint {store}, ahead of checkpoint {log} of its log"
                )
            }
            Self::Offset { durable, end } => {
                write!(f, "the log was durable up to {durable} and ends at {end}")
            }
            Self::Sector { slot, sector, log } => write!(
                f,
                "the sector of slot {slot} is of checkpoint {sector}, ahead of checkpoint {log} of \
                 the log"
            ),
        }
    }
}

/// Why a superblock copy is damaged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CopyDamage {
    /// The checksum is not that of the bytes.
    #[error("its checksum is wrong")]
    Checksum,
    /// A field is out of its bounds.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// The cluster id is not text with zeros behind it.
    #[error("its cluster id is not UTF-8 with zeros behind it")]
    Cluster,
    /// Capacity and greatest capacity do not fit together.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}
