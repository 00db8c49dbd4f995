//! The gateway's side of an attached volume. `docs/gateway.md` explains it.
//!
//! A [`Session`] decides, without I/O, clock and runtime; a [`Volume`] is the handle around it.
//!
//! - `types.rs`: inputs and outputs of a session; `counters.rs`: what it counts
//! - `map.rs`: from blocks of the volume to regions and chunks
//! - `range_lock.rs`: the order of overlapping changes; `numbers.rs`: numbers of ops, their floor
//! - `group.rs`, `piece.rs`: what a session keeps of a group, and of a request to a server
//! - `session.rs`: inputs, outputs and time; `session/users.rs`: requests of the user, from lock to
//!   completion; `session/pieces.rs`: requests to servers, their answers and errors;
//!   `session/stuck.rs`: what requests wait for
//! - `volume.rs`: the asynchronous handle; `trouble.rs`: what operators learn of it

mod counters;
mod group;
mod map;
mod numbers;
mod piece;
mod range_lock;
mod session;
mod trouble;
mod types;
mod volume;

#[cfg(test)]
mod tests;

pub use counters::{Counter, Counters, KindCounters};
pub use map::{REGION_BLOCKS, RegionIndex};
pub use session::Session;
pub use trouble::Trouble;
pub use types::{
    Attachment, Closed, Done, Extent, Failure, GroupError, GroupReplicas, Output, SendId,
    SessionConfig, UserId, UserRequest,
};
pub use volume::{Completion, Groups, Servers, Volume, VolumeConfig};
