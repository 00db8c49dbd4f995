//! Inputs and outputs of a session.

use std::time::Duration;

use bytes::{Bytes, BytesMut};

use super::map::{BLOCK, RegionIndex};
use crate::op::BLOCK_BYTES;
use crate::request::{BlockState, ErrorCode, Request};
use crate::rules::Broken;
use crate::types::{AttachEpoch, GroupId, Layer, Parent, ServerId, VolumeId};

/// The attachment of a volume by a gateway, as it is in the registry.
#[derive(Clone, Debug)]
pub struct Attachment {
    /// The volume.
    pub volume: VolumeId,
    /// What the volume is a clone of.
    pub parent: Option<Parent>,
    /// The volume's current layer.
    pub layer: Layer,
    /// Size in bytes, a multiple of 4 KiB.
    pub size_bytes: u64,
    /// Epoch of the attachment.
    pub epoch: AttachEpoch,
    /// Random number of the attachment.
    pub nonce: u32,
    /// The server with this gateway.
    pub gateway: Option<ServerId>,
    /// The groups that exist, as read from the registry after the epoch was written there.
    pub groups: Vec<(RegionIndex, GroupReplicas)>,
}

/// A group and its replicas, as the registry has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupReplicas {
    /// The group.
    pub group: GroupId,
    /// The servers with its replicas.
    pub replicas: Vec<ServerId>,
}

/// Settings of a session.
#[derive(Clone, Copy, Debug, Default)]
pub struct SessionConfig {
    /// After this time a request fails. `None`: requests are repeated without end.
    pub io_timeout: Option<Duration>,
    /// Seed of the random part of back-offs.
    pub seed: u64,
    /// A rule that a test breaks.
    pub broken: Broken,
}

/// A request of the user, in bytes of the volume.
#[derive(Clone, Debug)]
pub enum UserRequest {
    /// Replace bytes. Blocks that are replaced in part are read and merged.
    Write {
        /// Offset of the first byte.
        offset: u64,
        /// The bytes.
        data: Bytes,
    },
    /// Make bytes read as zeros. Whole blocks keep their space.
    Zero {
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Free whole blocks, which then read as zeros. Blocks that are covered in part do not change.
    Discard {
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Read bytes.
    Read {
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Find out which blocks exist.
    Status {
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Make answered writes durable. They are, so it does nothing.
    Flush,
}

impl UserRequest {
    /// The bytes of the volume: offset and length.
    pub(super) fn span(&self) -> (u64, u64) {
        match self {
            Self::Write { offset, data } => (*offset, data.len() as u64),
            Self::Zero { offset, len }
            | Self::Discard { offset, len }
            | Self::Read { offset, len }
            | Self::Status { offset, len } => (*offset, *len),
            Self::Flush => (0, 0),
        }
    }

    /// The memory that it takes until it is completed, in blocks.
    pub(super) fn memory_blocks(&self) -> u64 {
        match self {
            Self::Write { .. } | Self::Read { .. } => self.span().1.div_ceil(BLOCK).max(1),
            _ => 1,
        }
    }
}

/// The number of a request of the user, from 1 in the order of their submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UserId(pub u64);

/// One sending of a request to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SendId {
    pub(super) piece: u64,
    pub(super) attempt: u32,
}

/// What a session asks its user to do.
#[derive(Debug)]
pub enum Output {
    /// Send a request, and pass the outcome to [`super::Session::answer`].
    Send {
        /// The sending.
        id: SendId,
        /// The server.
        server: ServerId,
        /// The request.
        request: Request,
    },
    /// Create the group of a region unless it exists, and pass it to
    /// [`super::Session::group_known`].
    CreateGroup {
        /// The region.
        region: RegionIndex,
    },
    /// Read a group from the registry, and pass it to [`super::Session::group_known`].
    ReadGroup {
        /// The region.
        region: RegionIndex,
        /// The group.
        group: GroupId,
    },
    /// All groups know the attachment: requests may be submitted.
    Attached,
    /// A request is completed.
    Complete {
        /// The request.
        id: UserId,
        /// Its result.
        result: Result<Done, Failure>,
    },
    /// Requests are stuck, for the reason in the text, which changes as they wait; or none is stuck
    /// any more.
    Stuck(Option<String>),
    /// A server refuses writes for lack of space, with the text; or none has done so for a while.
    Full(Option<String>),
    /// The attachment has ended. All requests are completed.
    Ended(Failure),
}

/// The result of a request that succeeded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Done {
    /// It is applied and durable.
    Changed,
    /// The bytes.
    Read(Bytes),
    /// What exists, from the request's first block on. It may end before the request does.
    Status(Vec<Extent>),
}

/// Successive bytes of a volume in blocks of one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The number of bytes.
    pub len: u64,
    /// The state of their blocks.
    pub state: BlockState,
}

/// Why a request failed or an attachment ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Ends the attachment.
    #[error("the volume is attached elsewhere; this attachment has ended")]
    Fenced,
    /// Ends the attachment.
    #[error("the volume is deleted")]
    Dropped,
    /// The handle of the volume was dropped.
    #[error("the volume is detached")]
    Detached,
    /// A write may still take effect, until a later one of the same blocks is answered.
    #[error("no answer in time: {0}")]
    TimedOut(String),
    /// A replica would have too few free slots.
    #[error("the volume's servers have no space left ({0}); add space or discard blocks")]
    NoSpace(String),
    /// All replicas have lost a block.
    #[error("a block fails its checksum on all replicas")]
    Damaged,
    /// The memory of the gateway has changed a block of a write.
    #[error("a block of the write has changed in memory since it was submitted")]
    Corrupted,
    /// The request is not within the volume.
    #[error("the request ends at byte {end} of a volume of {size_bytes} bytes")]
    OutOfBounds {
        /// End of the request.
        end: u64,
        /// Size of the volume.
        size_bytes: u64,
    },
    /// A server refuses the request for good.
    #[error("a server refuses the request: {}: {text}", code.name())]
    Refused {
        /// The server's code.
        code: ErrorCode,
        /// The server's text.
        text: String,
    },
}

/// Why the registry did not deliver a group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// The registry has a newer attachment of the volume.
    #[error("the volume is attached elsewhere")]
    Fenced,
    /// The volume is deleted.
    #[error("the volume is deleted")]
    Dropped,
    /// To be tried again.
    #[error("the registry is not available: {0}")]
    Unavailable(String),
}

/// The connection ended before the answer arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the connection is closed")]
pub struct Closed;

/// Blocks as a replica has answered them.
#[derive(Debug)]
pub(super) struct ReadPart {
    /// The first block.
    pub(super) first: u64,
    /// The state of each block.
    pub(super) states: Vec<BlockState>,
    /// The blocks with data; empty if only states were requested.
    pub(super) data: Bytes,
}

impl ReadPart {
    /// The extents of the bytes `offset..end` of the volume. Blocks that no part has are absent.
    pub(super) fn extents_of(parts: &mut [Self], offset: u64, end: u64) -> Vec<Extent> {
        parts.sort_by_key(|part| part.first);
        let mut extents: Vec<Extent> = Vec::new();
        let mut at = offset;
        let mut extend = |to: u64, state: BlockState| {
            let len = to.min(end).saturating_sub(at);
            match extents.last_mut() {
                Some(last) if last.state == state => last.len += len,
                _ if len > 0 => extents.push(Extent { len, state }),
                _ => {}
            }
            at += len;
        };
        for part in parts {
            extend(part.first * BLOCK, BlockState::Absent);
            for (block, state) in (part.first..).zip(&part.states) {
                extend((block + 1) * BLOCK, *state);
            }
        }
        extend(end, BlockState::Absent);
        extents
    }

    /// The bytes `offset..offset + len` of the volume. Blocks that no part has are absent.
    pub(super) fn bytes_of(parts: &[Self], offset: u64, len: u64) -> Bytes {
        if let [part] = parts
            && part.data.len() == part.states.len() * BLOCK_BYTES
            && part.first * BLOCK <= offset
            && offset + len <= part.first * BLOCK + part.data.len() as u64
        {
            let start = (offset - part.first * BLOCK) as usize;
            return part.data.slice(start..start + len as usize);
        }
        let mut out = BytesMut::zeroed(len as usize);
        for part in parts {
            let blocks = part.data.chunks(BLOCK_BYTES);
            let present = (part.first..).zip(&part.states);
            let present = present.filter(|(_, state)| **state == BlockState::Data);
            for ((block, _), bytes) in present.zip(blocks) {
                let from = (block * BLOCK).max(offset);
                let to = ((block + 1) * BLOCK).min(offset + len);
                if from < to {
                    let source = (from - block * BLOCK) as usize..(to - block * BLOCK) as usize;
                    let target = (from - offset) as usize..(to - offset) as usize;
                    out[target].copy_from_slice(&bytes[source]);
                }
            }
        }
        out.freeze()
    }
}
