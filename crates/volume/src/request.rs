//! Requests of clients to a volume server, and their answers. `docs/format/volume-wire.md`,
//! sections 5 to 7, defines their bytes and what a client does with each error.

use bytes::Bytes;

use crate::op::{BlockRange, Op};
use crate::types::{
    AttachEpoch, CheckpointNumber, GroupId, Index, Layer, PeerId, ServerId, Term, VolumeId,
};

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Propose an op, and answer when it is applied.
    Op {
        /// The group.
        group: GroupId,
        /// The op; not a configuration.
        op: Op,
    },
    /// Read blocks.
    Read(ReadRequest),
    /// The state of the server and of its replicas.
    Status {
        /// Only this group; `None` for all.
        group: Option<GroupId>,
        /// Only groups above it; 0 for all.
        after: GroupId,
    },
}

/// A request to read blocks of a group, of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// The group.
    pub group: GroupId,
    /// Epoch of the attachment; 0 for a reader without one.
    pub epoch: AttachEpoch,
    /// The replica must have applied up to this index.
    pub token: Index,
    /// The volume.
    pub volume: VolumeId,
    /// The layer.
    pub layer: Layer,
    /// The blocks, at most [`MAX_READ_BLOCKS`] with data, and [`crate::CHUNK_BLOCKS`] without.
    pub range: BlockRange,
    /// Only the state of each block, without checksums and data.
    pub states_only: bool,
}

/// Greatest number of blocks of a read with data.
pub const MAX_READ_BLOCKS: u16 = 256;

/// The answer to a request that succeeded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The op is applied at the leader, so a majority has it durably.
    Op(OpAnswer),
    /// The blocks.
    Read(ReadAnswer),
    /// The state.
    Status(StatusAnswer),
}

/// The answer to an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpAnswer {
    /// Index of the op's entry, or of a duplicate, the applied index. The client raises its token
    /// to it.
    pub index: Index,
    /// Epoch of the volume's attachment as of the op.
    pub epoch: AttachEpoch,
    /// An earlier copy of the op had taken effect.
    pub is_duplicate: bool,
}

/// The answer to a read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadAnswer {
    /// The applied index when the last block had been read. The client raises its token to it.
    pub applied: Index,
    /// The state of each block.
    pub states: Vec<BlockState>,
    /// CRC32C of each block with data, in order; empty if only states were requested.
    pub crcs: Vec<u32>,
    /// The blocks with data, in order; empty if only states were requested.
    pub data: Bytes,
}

/// What a replica has of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// Nothing: it reads as zeros, and takes no space.
    Absent,
    /// It reads as zeros, and keeps its space.
    Zeros,
    /// It has data.
    Data,
}

/// The state of a server and of its replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusAnswer {
    /// The server.
    pub server: ServerId,
    /// The mark of its log's opening.
    pub mark: u64,
    /// Slots of its store.
    pub slots: u32,
    /// Free slots of its store.
    pub free_slots: u32,
    /// Bytes of its log's ring.
    pub ring_bytes: u64,
    /// Bytes of the ring in use.
    pub ring_used_bytes: u64,
    /// The last complete checkpoint.
    pub checkpoint: CheckpointNumber,
    /// More groups follow those of `replicas`.
    pub has_more: bool,
    /// The replicas, by group in ascending order, at most [`MAX_STATUS_ROWS`].
    pub replicas: Vec<ReplicaStatus>,
}

/// Greatest number of replicas in one answer.
pub const MAX_STATUS_ROWS: usize = 4096;

/// The state of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaStatus {
    /// The group.
    pub group: GroupId,
    /// This replica.
    pub peer: PeerId,
    /// The leader that the replica follows; 0 for none.
    pub leader: PeerId,
    /// The leader's server, if it is known.
    pub leader_server: Option<ServerId>,
    /// Raft's role.
    pub role: Role,
    /// Whether it serves.
    pub state: ReplicaState,
    /// The current term.
    pub term: Term,
    /// Index of the last entry of the log.
    pub last: Index,
    /// The commit index.
    pub commit: Index,
    /// The applied index.
    pub applied: Index,
    /// The greatest commit index in a durable record of the server's log.
    pub durable_commit: Index,
    /// The base of the last checkpoint.
    pub base: Index,
    /// Below it, an install may have left blocks that are too new; 0 for none.
    pub barrier: Index,
}

/// Raft's role of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It follows a leader, or has none.
    Follower,
    /// It holds an election.
    Candidate,
    /// It leads.
    Leader,
    /// It gets entries and does not vote.
    Learner,
}

/// Whether a replica serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaState {
    /// What it would serve equals the committed log up to its applied index.
    Exact,
    /// It applies what its log had at the start.
    Replaying,
    /// It replaces its blocks by those of another replica.
    Installing,
    /// It may have forgotten what it acknowledged, and takes part in nothing.
    Lost,
    /// It has met a state that no sound group has, and takes part in nothing.
    Stopped,
    /// It is being created.
    Creating,
}

/// A request that did not succeed. It says nothing about other copies of an op.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {text}", code.name())]
pub struct RequestError {
    /// What the client does is decided by the code.
    pub code: ErrorCode,
    /// Time to wait before the same server is asked again, in milliseconds; 0 without a wish.
    pub retry_after_ms: u32,
    /// The group; 0 if the error is not about one.
    pub group: GroupId,
    /// The applied index or the epoch, depending on the code; else 0.
    pub value: u64,
    /// The leader's server, of [`ErrorCode::NotLeader`].
    pub leader: Option<ServerId>,
    /// What happened, for people; at most [`MAX_ERROR_TEXT_BYTES`].
    pub text: String,
}

/// Greatest length of the text of an error in bytes.
pub const MAX_ERROR_TEXT_BYTES: usize = 512;

impl RequestError {
    /// An error about a group, without a value.
    pub fn new(code: ErrorCode, group: GroupId, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { code, retry_after_ms: 0, group, value: 0, leader: None, text }
    }
}

/// Defines the error codes, whose numbers are never reused.
macro_rules! error_codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal,)*) => {
        /// Why a request or a connection did not succeed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u16)]
        pub enum ErrorCode {
            $($(#[$doc])* $name = $code,)*
        }

        impl ErrorCode {
            /// All codes.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The code with this number.
            pub fn from_number(number: u16) -> Option<Self> {
                Self::ALL.iter().copied().find(|code| *code as u16 == number)
            }

            /// Its name in the protocol.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                }
            }
        }
    };
}

error_codes! {
    /// Bytes violate the protocol.
    BadFrame = 1,
    /// No common version.
    Version = 2,
    /// Another cluster.
    WrongCluster = 3,
    /// Not the expected server, store and log.
    WrongServer = 4,
    /// The registry, or the acceptor's view of it, does not have the server.
    UnknownServer = 5,
    /// A newer opening of this server exists.
    OldOpening = 6,
    /// The role is unknown or not served.
    Role = 7,
    /// The unanswered requests of the connection exceed its window.
    TooManyBytes = 8,
    /// The server shuts down.
    Stopping = 9,
    /// A newer connection of the dialer has replaced this one.
    Superseded = 10,
    /// A field is wrong for the group.
    BadRequest = 16,
    /// A feature that was not agreed.
    Unsupported = 17,
    /// A block of the request does not have its checksum.
    BadChecksum = 18,
    /// The server has no replica of the group.
    UnknownGroup = 19,
    /// The replica is not the leader, or no longer.
    NotLeader = 20,
    /// The applied index is below the token.
    Behind = 21,
    /// The replica is not exact.
    NotReady = 22,
    /// The volume has a newer attachment.
    Fenced = 23,
    /// The attachment has not reached the group.
    NotAttached = 24,
    /// The volume is deleted.
    Dropped = 25,
    /// A replica would have too few free slots.
    NoSpace = 26,
    /// The log, a queue or a limit is full.
    Busy = 27,
    /// A block fails its checksum at this replica.
    Damaged = 28,
}
