//! What all connections of a server share.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};

use super::client_queue::Client;
use super::connection::Control;
use super::frame::ConnectionId;
use super::handshake::{Directory, Features, Local};
use super::host::{Host, NetEvent};
use super::messages::SenderState;
use crate::request::ErrorCode;
use crate::types::ServerId;

/// Bounds of what connections hold in memory.
#[derive(Clone, Copy, Debug)]
pub struct NetLimits {
    /// Connections of clients.
    pub clients: usize,
    /// Pulls of other servers.
    pub pulls: usize,
    /// Connections in their handshake.
    pub handshakes: usize,
    /// Bytes of received frames with entries. Above it, their messages with entries are dropped.
    pub entry_bytes: usize,
    /// Bytes of other received frames of servers that wait. Above it, frames are dropped.
    pub message_bytes: usize,
    /// Bytes of queued requests of all clients. Above it, no client is read.
    pub request_bytes: usize,
    /// Bytes of answers that are reserved for requests of all clients, beyond those of the largest
    /// answer that each connection has for itself. Above it, a client with an unanswered request is
    /// not read.
    pub answer_bytes: usize,
}

impl Default for NetLimits {
    fn default() -> Self {
        Self {
            clients: 1024,
            pulls: 16,
            handshakes: 64,
            entry_bytes: 64 << 20,
            message_bytes: 16 << 20,
            request_bytes: 32 << 20,
            answer_bytes: 128 << 20,
        }
    }
}

/// A connection from or to a server.
struct ServerConnection {
    id: u64,
    server: ServerId,
    mark: u64,
    /// Whether a newer one of the same server replaces it.
    is_incoming_peer: bool,
    control: Arc<Control>,
}

/// The connections from and to servers, and the newest opening of each server that one was from or
/// to.
#[derive(Default)]
struct Servers {
    connections: Vec<ServerConnection>,
    newest: HashMap<ServerId, Newest>,
}

/// The newest opening of a server that a connection was from or to.
struct Newest {
    mark: u64,
    /// It was reported that it is gone.
    is_gone: bool,
}

/// What all connections of a server share.
pub(super) struct Shared {
    pub(super) local: Local,
    pub(super) host: Arc<dyn Host>,
    pub(super) directory: Mutex<Directory>,
    pub(super) entry_bytes: Arc<Semaphore>,
    pub(super) message_bytes: Arc<Semaphore>,
    pub(super) request_bytes: Arc<Semaphore>,
    pub(super) answer_bytes: Arc<Semaphore>,
    pub(super) sender: Mutex<SenderState>,
    pub(super) clients: Mutex<HashMap<u64, Client>>,
    pub(super) client_slots: Arc<Semaphore>,
    pub(super) pull_slots: Arc<Semaphore>,
    pub(super) handshakes: Arc<Semaphore>,
    /// One at a time, so that a flood of unknown servers does not become one of the registry.
    pub(super) look_ups: tokio::sync::Mutex<()>,
    servers: Mutex<Servers>,
    next_id: AtomicU64,
    pub(super) stopping: watch::Sender<bool>,
}

impl Shared {
    pub(super) fn new(local: Local, limits: NetLimits, host: Arc<dyn Host>) -> Self {
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        Self {
            local,
            host,
            directory: Mutex::default(),
            entry_bytes: semaphore(limits.entry_bytes),
            message_bytes: semaphore(limits.message_bytes),
            request_bytes: semaphore(limits.request_bytes),
            answer_bytes: semaphore(limits.answer_bytes),
            sender: Mutex::default(),
            clients: Mutex::default(),
            client_slots: semaphore(limits.clients),
            pull_slots: semaphore(limits.pulls),
            handshakes: semaphore(limits.handshakes),
            look_ups: tokio::sync::Mutex::default(),
            servers: Mutex::default(),
            next_id: AtomicU64::new(1),
            stopping: watch::Sender::new(false),
        }
    }

    /// Ends all connections.
    pub(super) fn stop(&self) {
        self.stopping.send_replace(true);
        let text = "the server shuts down";
        for connection in &self.servers.lock().connections {
            connection.control.close(ErrorCode::Stopping, text);
        }
        for client in self.clients.lock().values() {
            client.control.close(ErrorCode::Stopping, text);
        }
    }

    pub(super) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Records a connection from or to a server, before anything is received on it. A new incoming
    /// peer connection replaces the one before it. Connections of earlier openings of the server
    /// are closed; that they are gone is reported before anything of the newer one arrives, which
    /// may soon lead groups itself.
    pub(super) fn register(
        self: &Arc<Self>,
        server: ServerId,
        mark: u64,
        is_incoming_peer: bool,
        control: &Arc<Control>,
    ) -> Registration {
        let id = self.next_id();
        let text = "a newer opening of the server exists";
        let Servers { connections, newest } = &mut *self.servers.lock();
        let known = newest.entry(server).or_insert(Newest { mark, is_gone: false });
        if mark < known.mark {
            // The newer one came after the handshake.
            control.close(ErrorCode::OldOpening, text);
        } else {
            if mark > known.mark && !known.is_gone {
                self.host.event(NetEvent::PeerDown { server, is_gone: true });
            }
            *known = Newest { mark, is_gone: false };
        }
        for other in connections.iter().filter(|other| other.server == server) {
            if other.mark < mark {
                other.control.close(ErrorCode::OldOpening, text);
            } else if is_incoming_peer && other.is_incoming_peer {
                other.control.close(ErrorCode::Superseded, "a newer connection replaces it");
            }
        }
        let control = Arc::clone(control);
        connections.push(ServerConnection { id, server, mark, is_incoming_peer, control });
        Registration { shared: Arc::clone(self), id }
    }

    /// A connection is refused at the address where an opening of the server was reached: its
    /// process is gone. That says nothing of a newer opening, which may have another address.
    pub(super) fn refused(&self, server: ServerId, mark: u64) {
        let mut servers = self.servers.lock();
        let known = servers.newest.get_mut(&server);
        if let Some(known) = known.filter(|known| known.mark == mark && !known.is_gone) {
            known.is_gone = true;
            self.host.event(NetEvent::PeerDown { server, is_gone: true });
        }
    }
}

/// A recorded connection, until it ends.
pub(super) struct Registration {
    shared: Arc<Shared>,
    id: u64,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut servers = self.shared.servers.lock();
        servers.connections.retain(|connection| connection.id != self.id);
    }
}

/// A connection whose handshake is complete.
pub(super) struct Accepted {
    pub(super) socket: TcpStream,
    pub(super) connection: ConnectionId,
    pub(super) features: Features,
}
