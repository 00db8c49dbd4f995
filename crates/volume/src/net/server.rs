//! The server's end: accepting connections of all roles, and the handle with which the process
//! sends.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::clients;
use super::connection::Control;
use super::flow::HANDSHAKE;
use super::frame::{ConnectionId, ConnectionRole, Frame};
use super::handshake::{
    Directory, Features, HANDSHAKE_BYTES, HandshakeError, Hello, Local, ServerRecord, Welcome,
};
use super::host::Host;
use super::io::set_options;
use super::messages::{GroupMessage, SenderState, UnsendableMessage};
use super::peer_queue::Pushed;
use super::peers::{self, Dialer};
use super::pulls;
use crate::request::{Answer, ErrorCode, RequestError};
use crate::types::ServerId;

/// The pause after a failed accept, typically for lack of file descriptors.
const RETRY_ACCEPT: Duration = Duration::from_millis(100);
/// Time for connections to send `Close` when the server stops.
const STOP: Duration = Duration::from_secs(2);

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

/// What all connections of a server share.
pub(super) struct Shared {
    pub(super) local: Local,
    pub(super) host: Arc<dyn Host>,
    pub(super) directory: Mutex<Directory>,
    pub(super) entry_bytes: Arc<Semaphore>,
    pub(super) message_bytes: Arc<Semaphore>,
    pub(super) request_bytes: Arc<Semaphore>,
    pub(super) sender: Mutex<SenderState>,
    pub(super) clients: Mutex<HashMap<u64, clients::Client>>,
    client_slots: Arc<Semaphore>,
    pull_slots: Arc<Semaphore>,
    pub(super) handshakes: Arc<Semaphore>,
    /// One at a time, so that a flood of unknown servers does not become one of the registry.
    look_ups: tokio::sync::Mutex<()>,
    servers: Mutex<Vec<ServerConnection>>,
    next_id: AtomicU64,
    stopping: watch::Sender<bool>,
}

impl Shared {
    pub(super) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Records a connection from or to a server. A new incoming peer connection replaces the one
    /// before it, and connections of earlier openings of the server are closed.
    pub(super) fn register(
        self: &Arc<Self>,
        server: ServerId,
        mark: u64,
        is_incoming_peer: bool,
        control: &Arc<Control>,
    ) -> Registration {
        let id = self.next_id();
        let mut servers = self.servers.lock();
        for other in servers.iter().filter(|other| other.server == server) {
            if other.mark < mark {
                other.control.close(ErrorCode::OldOpening, "a newer opening of the server exists");
            } else if is_incoming_peer && other.is_incoming_peer {
                other.control.close(ErrorCode::Superseded, "a newer connection replaces it");
            }
        }
        let control = Arc::clone(control);
        servers.push(ServerConnection { id, server, mark, is_incoming_peer, control });
        Registration { shared: Arc::clone(self), id }
    }
}

/// A recorded connection, until it ends.
pub(super) struct Registration {
    shared: Arc<Shared>,
    id: u64,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.shared.servers.lock().retain(|connection| connection.id != self.id);
    }
}

/// The connections of a server. When it is dropped, the connections to other servers end.
pub struct Net {
    pub(super) shared: Arc<Shared>,
    dialers: Mutex<HashMap<ServerId, Dialer>>,
}

impl Net {
    /// A server without connections, which states `local` in handshakes.
    ///
    /// # Panics
    /// `local` has no identity.
    pub fn new(local: Local, limits: NetLimits, host: Arc<dyn Host>) -> Self {
        assert!(local.identity.is_some(), "a server has an identity");
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        let shared = Shared {
            local,
            host,
            directory: Mutex::default(),
            entry_bytes: semaphore(limits.entry_bytes),
            message_bytes: semaphore(limits.message_bytes),
            request_bytes: semaphore(limits.request_bytes),
            sender: Mutex::default(),
            clients: Mutex::default(),
            client_slots: semaphore(limits.clients),
            pull_slots: semaphore(limits.pulls),
            handshakes: semaphore(limits.handshakes),
            look_ups: tokio::sync::Mutex::default(),
            servers: Mutex::default(),
            next_id: AtomicU64::new(1),
            stopping: watch::Sender::new(false),
        };
        Self { shared: Arc::new(shared), dialers: Mutex::default() }
    }

    /// Records what the registry has for a server.
    pub fn update_server(&self, server: ServerId, record: ServerRecord) {
        self.shared.directory.lock().update(server, record);
    }

    /// Removes a server that the registry no longer has.
    pub fn remove_server(&self, server: ServerId) {
        self.shared.directory.lock().remove(server);
    }

    /// Sets the servers to which this one is connected, with their addresses (`host:port`). A
    /// connection whose address is the same stays.
    ///
    /// # Panics
    /// Not called within a tokio runtime.
    pub fn set_peers(&self, peers: &HashMap<ServerId, String>) {
        let mut dialers = self.dialers.lock();
        dialers.retain(|server, dialer| peers.get(server) == Some(&dialer.address));
        for (server, address) in peers {
            dialers
                .entry(*server)
                .or_insert_with(|| peers::dial(&self.shared, *server, address.clone()));
        }
    }

    /// What the next frames state about this server.
    pub fn set_sender_state(&self, state: SenderState) {
        *self.shared.sender.lock() = state;
    }

    /// Sends raft messages to a server. Messages to a server that is not connected, and those that
    /// its queues do not hold, are dropped: raft repeats them. Returns the number of dropped ones.
    ///
    /// # Errors
    /// A message has no bytes in the protocol, which is a defect of its sender. Those before it are
    /// sent.
    pub fn send_peer(
        &self,
        server: ServerId,
        messages: impl IntoIterator<Item = GroupMessage>,
    ) -> Result<usize, UnsendableMessage> {
        let dialers = self.dialers.lock();
        let Some(dialer) = dialers.get(&server) else { return Ok(messages.into_iter().count()) };
        dialer.push(messages)
    }

    /// Sends a frame that has no raft messages to a server: [`super::encode_gone`], or of pulls.
    pub fn send_peer_frame(&self, server: ServerId, frame: Frame) -> Pushed {
        match self.dialers.lock().get(&server) {
            Some(dialer) => dialer.push_frame(frame),
            None => Pushed::Dropped,
        }
    }

    /// Answers a request. The answer is dropped if the connection has ended.
    ///
    /// # Panics
    /// The answer is not one to the request.
    pub fn answer(&self, connection: u64, request_id: u64, answer: &Result<Answer, RequestError>) {
        clients::answer(&self.shared, connection, request_id, answer);
    }

    /// Ends all connections and [`Net::serve`] with `Stopping`.
    pub fn stop(&self) {
        self.shared.stopping.send_replace(true);
        self.dialers.lock().clear();
        let text = "the server shuts down";
        for connection in &*self.shared.servers.lock() {
            connection.control.close(ErrorCode::Stopping, text);
        }
        for client in self.shared.clients.lock().values() {
            client.control.close(ErrorCode::Stopping, text);
        }
    }

    /// Accepts connections until [`Net::stop`]. When the future is dropped, they end at once.
    pub async fn serve(&self, listener: TcpListener) {
        let mut connections = JoinSet::new();
        let mut stopping = self.shared.stopping.subscribe();
        loop {
            let handshakes = Arc::clone(&self.shared.handshakes);
            let accepted = async {
                let permit = handshakes.acquire_owned().await.expect("it is never closed");
                listener.accept().await.map(|(socket, _)| (socket, permit))
            };
            let stopped = async { stopping.wait_for(|stopping| *stopping).await.is_ok() };
            tokio::select! {
                _ = stopped => break,
                Some(ended) = connections.join_next() => report(ended),
                accepted = accepted => match accepted {
                    Ok((socket, permit)) => {
                        let shared = Arc::clone(&self.shared);
                        connections.spawn(async move {
                            if let Err(error) = accept(&shared, socket, permit).await {
                                tracing::debug!(%error, "a handshake has failed");
                            }
                        });
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a connection could not be accepted");
                        sleep(RETRY_ACCEPT).await;
                    }
                },
            }
        }
        drop(listener);
        let all_ended = async {
            while let Some(ended) = connections.join_next().await {
                report(ended);
            }
        };
        // What does not end by itself is aborted.
        let _ = timeout(STOP, all_ended).await;
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        self.dialers.lock().clear();
    }
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "a connection has panicked");
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("no answer in time")]
    Timeout,
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
}

/// A connection whose handshake is complete.
pub(super) struct Accepted {
    pub(super) socket: TcpStream,
    pub(super) connection: ConnectionId,
    pub(super) features: Features,
}

/// Does the handshake of an accepted socket, and serves the connection.
async fn accept(
    shared: &Arc<Shared>,
    mut socket: TcpStream,
    handshake: OwnedSemaphorePermit,
) -> Result<(), ConnectError> {
    set_options(&socket)?;
    let greeted = timeout(HANDSHAKE, greet(shared, &mut socket)).await;
    let greeted = greeted.map_err(|_| ConnectError::Timeout)??;
    drop(handshake);
    let Some((hello, role, slot)) = greeted else { return Ok(()) };
    let features = hello.features.and(shared.local.features);
    let accepted = Accepted { socket, connection: hello.connection, features };
    match (role, hello.identity, slot) {
        (ConnectionRole::Peer, Some(peer), _) => peers::serve(shared, accepted, peer).await,
        (ConnectionRole::Pull, Some(peer), Some(slot)) => {
            pulls::serve(shared, accepted, peer, slot).await;
        }
        (ConnectionRole::Client, _, Some(slot)) => clients::serve(shared, accepted, slot).await,
        _ => unreachable!("the handshake has checked the identity"),
    }
    Ok(())
}

type Greeted = (Hello, ConnectionRole, Option<OwnedSemaphorePermit>);

/// Reads `Hello` and answers it. Returns nothing if the dialer is refused.
async fn greet(
    shared: &Arc<Shared>,
    socket: &mut TcpStream,
) -> Result<Option<Greeted>, ConnectError> {
    let mut bytes = [0; HANDSHAKE_BYTES];
    socket.read_exact(&mut bytes).await?;
    let decoded = Hello::decode(&bytes);
    let judged = match &decoded {
        Ok(hello) => judge(shared, hello).await,
        Err(error) => Err(error.code().ok_or(*error)?),
    };
    let result = judged.as_ref().map(drop).map_err(|code| *code);
    let welcome = Welcome::new(&shared.local, decoded.as_ref().ok(), result);
    socket.write_all(&welcome.encode()).await?;
    match (decoded, judged) {
        (Ok(hello), Ok((role, slot))) => Ok(Some((hello, role, slot))),
        (_, judged) => {
            tracing::debug!(code = ?judged.err(), "a connection was refused");
            socket.shutdown().await?;
            Ok(None)
        }
    }
}

/// Judges a dialer, with a look into the registry for a server that is not known.
async fn judge(
    shared: &Shared,
    hello: &Hello,
) -> Result<(ConnectionRole, Option<OwnedSemaphorePermit>), ErrorCode> {
    let judge = || hello.judge(&shared.local, |_| true, &mut shared.directory.lock());
    let mut judged = judge();
    if let (Err(ErrorCode::UnknownServer), Some(peer)) = (judged, &hello.identity) {
        let _one = shared.look_ups.lock().await;
        if let Some(record) = shared.host.look_up(peer.server).await {
            shared.directory.lock().update(peer.server, record);
            judged = judge();
        }
    }
    let role = judged?;
    let slots = match role {
        ConnectionRole::Peer => return Ok((role, None)),
        ConnectionRole::Client => &shared.client_slots,
        ConnectionRole::Pull => &shared.pull_slots,
    };
    let slot = Arc::clone(slots).try_acquire_owned().map_err(|_| ErrorCode::Busy)?;
    Ok((role, Some(slot)))
}
