//! What the registry states of a group.

use std::collections::BTreeMap;

use crate::op::BlockRange;
use crate::state::VolumeState;
use crate::types::{ChunkIndex, ConfState, PeerId, ServerId, VolumeId};

/// Chunks of a region, which one group replicates.
pub const REGION_CHUNKS: u32 = 4096;

/// What the registry states of a group. It changes when replicas come and go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupView {
    /// The region of its volumes, which begins at chunk `region` x [`REGION_CHUNKS`].
    pub region: u16,
    /// The family of its volumes: the first ancestor.
    pub family: VolumeId,
    /// The replicas with which the group began.
    pub founders: Vec<PeerId>,
    /// The servers of its replicas, also of those that raft's configuration does not have yet.
    pub peers: BTreeMap<PeerId, ServerId>,
    /// The volumes with which the group began, in ascending order: the attachments of that time.
    pub volumes: Vec<VolumeState>,
}

impl GroupView {
    /// The configuration at index 0.
    pub fn founders_conf(&self) -> ConfState {
        ConfState { voters: self.founders.clone(), ..ConfState::default() }
    }

    /// The first chunk of the region.
    pub fn first_chunk(&self) -> ChunkIndex {
        ChunkIndex(u32::from(self.region) * REGION_CHUNKS)
    }

    /// Whether the blocks are in the region.
    pub fn has(&self, range: &BlockRange) -> bool {
        range.chunk.0 / REGION_CHUNKS == u32::from(self.region)
    }
}
