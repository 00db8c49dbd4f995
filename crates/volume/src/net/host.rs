//! What the protocol needs from the process that it runs in, and what it hands to it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use super::handshake::{HandshakeError, ServerRecord};
use super::peer::PeerFrame;
use super::pull::Pull;
use super::pull_sender::PullSender;
use crate::request::Request;
use crate::types::ServerId;

/// The process of a server.
pub trait Host: Send + Sync + 'static {
    /// Takes an event. It must not block. What it holds is bounded by the budgets of the
    /// connections, since each event counts until it is dropped ([`Held`]).
    fn event(&self, event: NetEvent);

    /// Reads a server from the registry.
    fn look_up(
        &self,
        server: ServerId,
    ) -> Pin<Box<dyn Future<Output = Option<ServerRecord>> + Send + '_>>;
}

/// A share of a budget that is given back when this is dropped.
#[derive(Clone, Debug)]
pub struct Held {
    _permit: Arc<OwnedSemaphorePermit>,
}

impl Held {
    pub(super) fn new(permit: Arc<OwnedSemaphorePermit>) -> Self {
        Self { _permit: permit }
    }
}

/// Something that has arrived, or has happened to a connection.
#[derive(Debug)]
pub enum NetEvent {
    /// A frame of another server. Slices of its buffers that are kept count against the budget of
    /// entries until the last one is dropped.
    Peer {
        /// The server.
        server: ServerId,
        /// The frame.
        frame: PeerFrame,
        /// Its share of the budget.
        held: Held,
    },
    /// This server can send to the other one.
    PeerUp {
        /// The other server.
        server: ServerId,
    },
    /// This server cannot send to the other one.
    PeerDown {
        /// The other server.
        server: ServerId,
        /// What has sent everything that was received of the server so far is gone: its process
        /// refuses connections, or a newer opening of the server exists. Reported once for each
        /// opening, and before anything that a newer one sends. Otherwise it is not known whether
        /// the process runs.
        is_gone: bool,
    },
    /// A handshake with the other server fails. The connection is tried again. If the reason is
    /// `OldOpening` from the other server, a newer opening of this server exists.
    PeerRefused {
        /// The other server.
        server: ServerId,
        /// The reason.
        error: HandshakeError,
    },
    /// A request of a client. It is answered with [`super::Net::answer`].
    Client {
        /// The connection.
        connection: u64,
        /// The request's number on the connection.
        request_id: u64,
        /// The request.
        request: Request,
        /// Its share of the budget of queued requests, to be dropped when the request leaves the
        /// queue.
        held: Held,
    },
    /// A client's connection has ended; answers to it are dropped.
    ClientGone {
        /// The connection.
        connection: u64,
        /// Its place among the connections.
        held: Held,
    },
    /// A server wants to pull. The stream is sent with `sender`, and ends when that is dropped.
    Pull {
        /// The target's server.
        server: ServerId,
        /// The request.
        pull: Pull,
        /// The stream.
        sender: PullSender,
    },
}
