//! The protocol between volume servers and with gateways: `docs/format/volume-wire.md`.
//!
//! # Modules
//!
//! - `frame.rs`, `error.rs`: frames with their checksums and bounds; errors
//! - `handshake.rs`: `Hello` and `Welcome`, and their checks
//! - `messages.rs`, `peer.rs`: raft messages, and what else servers send each other
//! - `client.rs`: requests of clients and their answers
//! - `pull.rs`: frames of pulls
//! - `peer_queue.rs`, `flow.rs`: what waits for another server; windows, back-off and timeouts
//! - `fuzz.rs`: the check of the fuzz target `volume_net`

mod client;
mod error;
mod flow;
mod frame;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod handshake;
#[cfg(test)]
mod handshake_tests;
mod messages;
mod peer;
mod peer_queue;
mod pull;
#[cfg(test)]
mod round_trip_tests;
#[cfg(test)]
mod tests;

pub use client::{
    Expected, Refused, answer_type, decode_answer, decode_request, encode_answer, encode_request,
    request_cost,
};
pub use error::{WireError, close_frame, decode_error};
pub use flow::{
    BackOff, Duty, HANDSHAKE, Liveness, PING_AFTER, PONG_WITHIN, RequestWindow, SILENCE,
    WRITE_STALL,
};
pub use frame::{
    ConnectionId, ConnectionRole, Frame, FrameType, HEADER_BYTES, Header, MAX_DATA_BYTES,
    MAX_META_BYTES, Received, Side,
};
pub use handshake::{
    Directory, Features, HANDSHAKE_BYTES, HandshakeError, Hello, Identity, Local, MIN_WINDOW_BYTES,
    ServerRecord, VERSION, Welcome,
};
pub use messages::{
    Entries, GroupMessage, MAX_APPEND_ENTRIES, MAX_CONFIGURATION_IDS, Messages, SenderState,
    UnknownOp, UnsendableMessage, check_sendable, decode_messages,
};
pub use peer::{Gone, PeerFrame, encode_gone};
pub use peer_queue::{MAX_APPEND_BYTES, MAX_URGENT_BYTES, PeerQueue, Pushed};
pub use pull::{
    MAX_FINISHED_VOLUMES, MAX_PULLED_LAYERS, Position, Pull, PullBatch, PullBegin, PullContent,
    PullEnd, PullFrame, PullItem, PullOffer, PullParties, PullPin, Pulled, PulledVolume,
};
