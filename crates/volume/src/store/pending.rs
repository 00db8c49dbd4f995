//! Reads, comparisons of pulled blocks, and the checkpoint in progress.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;

use super::overlay::ChunkKey;
use super::sector::Word;
use super::slots::DirtyPage;
use crate::request::BlockState;
use crate::types::{CheckpointNumber, ChunkIndex, GroupId, Layer, PeerId, VolumeId};

/// The number that the caller has given a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReadId(pub u64);

/// Blocks that were read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlocksRead {
    /// The state of each block.
    pub states: Vec<BlockState>,
    /// CRC32C of each block with data, in order; empty if only states were requested.
    pub crcs: Vec<u32>,
    /// The blocks with data, in order; empty if only states were requested.
    pub data: Bytes,
}

/// A block that the device does not return as it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "block {block} of chunk {chunk} of volume {volume}, group {group}, is damaged: the device \
     returns something else than was written, or cannot read it"
)]
pub struct DamagedBlock {
    /// The group.
    pub group: GroupId,
    /// The volume.
    pub volume: VolumeId,
    /// The layer.
    pub layer: Layer,
    /// The chunk.
    pub chunk: ChunkIndex,
    /// The block in the chunk.
    pub block: u16,
}

/// Blocks that lie next to each other on the device, as a read was submitted.
#[derive(Debug)]
pub(super) struct DeviceRun {
    pub(super) key: ChunkKey,
    pub(super) first: u16,
    pub(super) words: Vec<Word>,
    /// The number of changes of words before.
    pub(super) stamp: u64,
    pub(super) purpose: RunPurpose,
}

/// What a device read is for.
#[derive(Clone, Copy, Debug)]
pub(super) enum RunPurpose {
    /// The read with this number in [`Reads`].
    Read(u64),
    /// The comparison with this number in [`Pulls`].
    Pull(u64),
}

/// A read in progress.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) id: ReadId,
    pub(super) key: ChunkKey,
    pub(super) first: u16,
    pub(super) states: Vec<BlockState>,
    pub(super) is_states_only: bool,
    /// Data with checksums, by first block.
    pub(super) data: BTreeMap<u16, (Bytes, Vec<u32>)>,
    /// Device reads in progress.
    pub(super) runs: usize,
    pub(super) damaged: Option<DamagedBlock>,
}

/// The reads of a store.
#[derive(Debug, Default)]
pub(super) struct Reads {
    pub(super) reads: BTreeMap<u64, Read>,
    pub(super) runs: BTreeMap<u64, DeviceRun>,
    /// The number of the next read or device read.
    pub(super) next: u64,
    pub(super) done: Vec<(ReadId, Result<BlocksRead, DamagedBlock>)>,
}

impl Reads {
    pub(super) fn next_number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

/// Pulled blocks that are being compared with those of the device.
#[derive(Debug, Default)]
pub(super) struct Pulls {
    pub(super) comparisons: BTreeMap<u64, Comparison>,
    pub(super) bytes: usize,
}

#[derive(Debug)]
pub(super) struct Comparison {
    pub(super) group: GroupId,
    pub(super) peer: PeerId,
    pub(super) data: Bytes,
    pub(super) crcs: Vec<u32>,
}

/// How far the checkpoint in progress is.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// The last complete checkpoint.
    pub(super) complete: CheckpointNumber,
    /// Requests of the present step in flight.
    pub(super) requests: usize,
    /// Pages of sectors that are not yet submitted.
    pub(super) pages: VecDeque<DirtyPage>,
}
