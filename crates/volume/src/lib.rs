//! Replicated block volumes. In development: so far this crate has the records of a volume server's
//! log and the judgement of its replicas at an opening, ops, the replicated state of a group, and
//! the block store.
//! log and the judgement of its replicas at an opening, ops, the replicated state of a group, the
//! structures of the store, and the protocol between servers and with clients.
//! Formats: `docs/format/volume-log.md`, `volume-store.md` and `volume-wire.md`.
//! log and the judgement of its replicas at an opening, ops, the replicated state of a group, the
//! structures of the store, and the registry.
//! Formats: `docs/format/volume-log.md`, `volume-store.md`, `volume-wire.md` and
//! `volume-registry.md`.
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
//!   (`survey.rs`)
//! - `fuzz.rs`: the checks of the fuzz targets `volume_log` and `volume_store`
//! - `store/`: the block store of a server. Bytes: positions (`layout.rs`), the superblock and the
//!   copy that counts (`superblock.rs`), the description of a slot with the checksums of its blocks
//!   (`sector.rs`). Memory: blocks that are applied and not yet written (`overlay.rs`), the state
//!   of each slot (`slots.rs`, `free.rs`), what is in progress (`pending.rs`). The store: apply and
//!   write-back (`block_store.rs`), reads (`read.rs`), installs (`pull.rs`), checkpoints
//!   (`checkpoint.rs`), format and opening (`open.rs`), requests to the device (`io.rs`)
//! - `registry/`: what the servers share: values of the keys (`values.rs`), transactions about
//!   servers, volumes, groups and attachments, numbers and placement
//! - `net/`: the protocol between servers and with clients
//! - `gateway/`: the client's side of an attached volume
//! - `fuzz.rs`: the check of the fuzz target `volume_log`
//! - `store/`: positions in a store (`layout.rs`), its superblock and the copy that counts
//!   (`superblock.rs`), the description of a slot with the checksums of its blocks (`sector.rs`);
//!   blocks that are applied and not yet written (`overlay.rs`)
#![forbid(unsafe_code)]

mod fields;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod gateway;
pub mod log;
pub mod net;
mod op;
pub mod registry;
mod request;
mod rules;
mod state;
pub mod store;
mod types;
mod window;

pub use fields::FieldError;
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
    Layer, Parent, PeerId, Sequence, ServerId, SlotIndex, SlotNumber, Term, VolumeId,
};
pub use window::{WINDOW_NUMBERS, Window, Write};
