//! What servers send to one another, as the shard sees it. `docs/format/volume-wire.md`, sections 9
//! and 11, defines the bytes.

use bytes::Bytes;
use raft::eraftpb::Message;

use crate::op::CHUNK_BLOCKS;
use crate::state::VolumeState;
use crate::types::{
    ChunkIndex, ConfState, GroupId, Index, Layer, PeerId, Position, Term, VolumeId,
};

/// A message between two replicas of a group.
#[derive(Clone, Debug)]
pub struct PeerMessage {
    /// The group.
    pub group: GroupId,
    /// The replica that has sent it.
    pub from: PeerId,
    /// The replica that it is for.
    pub to: PeerId,
    /// The content.
    pub body: PeerBody,
}

/// The content of a message between replicas.
#[derive(Clone, Debug)]
pub enum PeerBody {
    /// A message of raft.
    Raft(Box<Message>),
    /// The leader's next entries for the replica are in no memory: it offers the blocks instead.
    Offer {
        /// The leader's term.
        term: Term,
        /// The leader's applied index.
        applied: Index,
    },
    /// A pull goes on: the leader keeps the entries above `at` in memory.
    Pin {
        /// The term in which the leader has offered the pull.
        term: Term,
        /// What the pulled blocks are at least as new as.
        at: Position,
    },
    /// A pull has completed.
    Pulled {
        /// The term in which the leader has offered the pull.
        term: Term,
        /// What the pulled blocks are at least as new as.
        at: Position,
        /// The configuration as of that index.
        conf: ConfState,
    },
}

/// A request of blocks from another replica. The answer is a stream of [`PullFrame`]s.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullRequest {
    /// The group.
    pub group: GroupId,
    /// The replica that pulls.
    pub target: PeerId,
    /// Blocks that have not changed since may be left out: what the target has applied, or in a
    /// later round, what the source had applied when the round before began. 0 for everything.
    pub since: Index,
    /// The first round of the pull. A source does not know it.
    pub is_first: bool,
}

/// A part of the answer to a pull.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PullFrame {
    /// The first one.
    Begin {
        /// What the source had applied when the pull began.
        at: Position,
        /// The replica that answers.
        source: PeerId,
        /// The configuration as of that index.
        conf: ConfState,
        /// The volumes as of exactly that index.
        volumes: Vec<VolumeState>,
        /// Whether all blocks are sent, and not only those that have changed.
        sends_everything: bool,
    },
    /// Blocks.
    Batch {
        /// What the source had applied when the last block of the batch had been read.
        newest: Index,
        /// The blocks, by volume and chunk.
        items: Vec<PullItem>,
    },
    /// Everything was sent.
    End,
    /// The source cannot go on.
    Failed,
}

/// A part of a batch, about a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullItem {
    /// The chunk.
    pub at: PullChunk,
    /// What it states of the chunk.
    pub content: PullContent,
}

impl PullItem {
    /// The length of its blocks.
    pub(crate) fn data_bytes(&self) -> u64 {
        match &self.content {
            PullContent::Blocks { data, .. } => data.len() as u64,
            PullContent::Zeros { .. } | PullContent::Bitmap { .. } | PullContent::Absent { .. } => {
                0
            }
        }
    }
}

/// The length of the blocks of items.
pub(crate) fn data_bytes(items: &[PullItem]) -> u64 {
    items.iter().map(PullItem::data_bytes).sum()
}

/// What an item states of a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PullContent {
    /// Neighbouring blocks with data.
    Blocks {
        /// The first block in the chunk.
        first: u16,
        /// CRC32C of each block.
        crcs: Vec<u32>,
        /// The blocks.
        data: Bytes,
    },
    /// Neighbouring blocks that read as zeros and keep their space.
    Zeros {
        /// The first block in the chunk.
        first: u16,
        /// Number of blocks.
        blocks: u16,
    },
    /// The blocks of the chunk that exist. It follows them.
    Bitmap {
        /// Bit n mod 8 of byte n / 8 represents block n.
        bits: Box<[u8; CHUNK_BLOCKS as usize / 8]>,
        /// The chunk's last bitmap: other layers have no block.
        is_last: bool,
    },
    /// The source has no block of this chunk and of those that follow it.
    Absent {
        /// Number of chunks.
        chunks: u32,
    },
}

/// A chunk in a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PullChunk {
    /// The volume.
    pub volume: VolumeId,
    /// The layer.
    pub layer: Layer,
    /// The chunk.
    pub chunk: ChunkIndex,
}
