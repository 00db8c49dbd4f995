//! The protocol between volume servers and with gateways: `docs/format/volume-wire.md`.
//!
//! # Modules
//!
//! - `frame.rs`, `error.rs`, `error_frame.rs`: frames with their checksums and bounds; why they are
//!   refused; errors as frames
//! - `handshake.rs`: `Hello` and `Welcome`, and their checks
//! - `messages.rs`, `peer.rs`: raft messages, and what else servers send each other
//! - `client.rs`: requests of clients and their answers
//! - `pull.rs`: frames of pulls
//! - `peer_queue.rs`, `flow.rs`: what waits for another server; windows, back-off and timeouts
//! - `io.rs`, `connection.rs`: frames on sockets; the sending half of a connection
//! - `dial.rs`, `server.rs`, `receive.rs`: opening and accepting connections, and what accepting
//!   ends have in common
//! - `host.rs`, `shared.rs`: the events for the process; what the connections of a server share
//! - `peers.rs`: connections from and to other servers
//! - `clients.rs`, `client_queue.rs`: the server's end of client connections
//! - `pulls.rs`, `pull_sender.rs`: both ends of pulls
//! - `client_connection.rs`: the client's end
//! - `fuzz.rs`: the check of the fuzz target `volume_net`

mod client;
mod client_connection;
mod client_queue;
mod clients;
mod cluster;
mod connection;
#[cfg(test)]
mod connection_tests;
mod dial;
mod error;
mod error_frame;
mod flow;
mod frame;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod handshake;
#[cfg(test)]
mod handshake_tests;
mod host;
#[cfg(test)]
mod hostile_tests;
mod io;
mod messages;
mod peer;
mod peer_queue;
mod peers;
#[cfg(test)]
mod peers_tests;
mod pull;
mod pull_sender;
mod pulls;
mod receive;
#[cfg(test)]
mod round_trip_tests;
mod server;
mod shared;
#[cfg(test)]
mod tests;

pub use client::{
    Expected, Refused, answer_type, decode_answer, decode_request, encode_answer, encode_request,
    request_cost,
};
pub use client_connection::{CallError, ClientConnection, ConnectFailure};
pub use cluster::cluster_id;
pub use error::WireError;
pub use error_frame::{close_frame, decode_error};
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
pub use host::{Held, Host, NetEvent};
pub use messages::{
    Entries, GroupMessage, MAX_APPEND_ENTRIES, MAX_CONFIGURATION_IDS, Messages, SenderState,
    UnknownOp, UnsendableMessage, check_sendable, decode_messages,
};
pub use peer::{Gone, PeerFrame, encode_gone};
pub use peer_queue::{MAX_APPEND_BYTES, MAX_URGENT_BYTES, PeerQueue, Pushed};
pub use pull::{
    MAX_FINISHED_VOLUMES, MAX_PULLED_LAYERS, Pull, PullBatch, PullBegin, PullEnd, PullFrame,
    PullOffer, PullParties, PullPin, Pulled, PulledVolume,
};
pub use pull_sender::{PullClosed, PullSender};
pub use pulls::{PullError, PullStream};
pub use server::Net;
pub use shared::NetLimits;
