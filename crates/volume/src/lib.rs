//! Replicated block volumes. In development: so far this crate has the records of a volume server's
//! log, the judgement of its replicas at an opening, and the window of writes that were applied.
//! Formats: `docs/format/volume-log.md`, `volume-store.md` and `volume-wire.md`.
//!
//! # Modules
//!
//! - `types.rs`: identities, positions, raft's state
//! - `window.rs`: which writes of an attachment were applied
//! - `log/`: records of the log as bytes (`record.rs`, `fields.rs`, `error.rs`); checkpoints and
//!   their parts (`checkpoint.rs`, `group.rs`); which replicas a log has, and which are lost
//!   (`survey.rs`)
#![forbid(unsafe_code)]

pub mod log;
mod types;
mod window;

pub use types::{
    AttachEpoch, CheckpointNumber, ConfState, GroupId, HardState, Index, Layer, PeerId, Sequence,
    Term, VolumeId,
};
pub use window::{WINDOW_NUMBERS, Window, Write};
