//! Replicated block volumes: raft groups on one write-ahead log per server, applied without waiting
//! for the disk. In development.
//! Formats: `docs/format/volume-log.md`, `volume-store.md`, `volume-wire.md` and
//! `volume-registry.md`; rules and campaign: `docs/volumes-design.md`.
//!
//! # Modules
//!
//! - `types.rs`, `fields.rs`: identities, positions, raft's state; little-endian fields
//! - `op.rs`: the commands of the replicated state machine
//! - `request.rs`: requests of clients, and their answers
//! - `rules.rs`: rules that the simulation breaks
//! - `state.rs`, `window.rs`: the replicated state of a group: attachments, and the ops that were
//!   applied
//! - `log/`: records of the log as bytes (`record.rs`, `error.rs`); checkpoints and
//!   their parts (`checkpoint.rs`, `group.rs`); which replicas a log has, and which are lost
//!   (`survey.rs`); where entries are (`extents.rs`); the queue in front of the log (`writer.rs`)
//! - `store/`: the block store of a server. Bytes: positions (`layout.rs`), the superblock and the
//!   copy that counts (`superblock.rs`), the description of a slot with the checksums of its blocks
//!   (`sector.rs`). Memory: blocks that are applied and not yet written (`overlay.rs`), the state
//!   of each slot (`slots.rs`, `free.rs`), what is in progress (`pending.rs`). The store: apply and
//!   write-back (`block_store.rs`), reads (`read.rs`), installs (`pull.rs`), checkpoints
//!   (`checkpoint.rs`), format and opening (`open.rs`), requests to the device (`io.rs`)
//! - `raft/`: raft of one group: the log in memory, checks of messages, conversions
//! - `shard/`: the replicas of a server, without I/O, clock and runtime; `messages.rs`, `group.rs`:
//!   what it exchanges with others
//! - `registry/`: what the servers share: values of the keys (`values.rs`), transactions about
//!   servers, volumes, groups and attachments, numbers and placement
//! - `net/`: the protocol between servers and with clients
//! - `serve/`: a server: the shard with sockets, devices and registry
//! - `gateway/`: the client's side of an attached volume; `cluster.rs`: its connections, and the
//!   registry
//! - `fuzz.rs`: the checks of the fuzz targets `volume_log` and `volume_store`
#![forbid(unsafe_code)]

mod cluster;
mod fields;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod gateway;
mod group;
pub mod log;
mod messages;
pub mod net;
mod op;
mod raft;
pub mod registry;
mod request;
mod rules;
pub mod serve;
pub mod shard;
mod state;
pub mod store;
mod types;
mod window;

pub use cluster::{AttachError, AttachOptions, Attached, Cluster};
pub use fields::FieldError;
pub use group::{GroupView, REGION_CHUNKS};
pub use messages::{
    PeerBody, PeerMessage, PullChunk, PullContent, PullFrame, PullItem, PullRequest,
};
pub use op::{
    Attach, BLOCK_BYTES, BlockOp, BlockRange, CHUNK_BLOCKS, Change, ChangeKind, Configuration,
    MAX_CHANGES, MAX_CHUNKS, MAX_FLOOR_DISTANCE, MAX_WRITE_BLOCKS, Op, OpError, Transition,
};
pub use request::{
    Answer, BlockState, ErrorCode, MAX_ERROR_TEXT_BYTES, MAX_READ_BLOCKS, MAX_STATUS_ROWS,
    OpAnswer, ReadAnswer, ReadRequest, ReplicaState, ReplicaStatus, Request, RequestError, Role,
    StatusAnswer,
};
pub use rules::{Broken, Rule};
pub use state::{Applied, GroupState, Refusal, VolumeState};
pub use types::{
    AttachEpoch, BlockIndex, CheckpointNumber, ChunkIndex, ConfState, GroupId, HardState, Index,
    Layer, Parent, PeerId, Position, Sequence, ServerId, SlotIndex, SlotNumber, Term, VolumeId,
};
pub use window::{WINDOW_NUMBERS, Window, Write};
