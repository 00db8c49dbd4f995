//! The server's end: accepting connections of all roles, and the handle with which the process
//! sends.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::clients;
use super::dial::ConnectError;
use super::flow::HANDSHAKE;
use super::frame::{ConnectionRole, Frame};
use super::handshake::{HANDSHAKE_BYTES, Hello, Local, ServerRecord, Welcome};
use super::host::Host;
use super::io::set_options;
use super::messages::{GroupMessage, SenderState, UnsendableMessage};
use super::peer_queue::Pushed;
use super::peers::{self, Dialer};
use super::pulls;
use super::shared::{Accepted, NetLimits, Shared};
use crate::request::{Answer, ErrorCode, RequestError};
use crate::types::ServerId;

/// The pause after a failed accept, typically for lack of file descriptors.
const RETRY_ACCEPT: Duration = Duration::from_millis(100);
/// Time for connections to send `Close` when the server stops.
const STOP: Duration = Duration::from_secs(2);

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
        let shared = Arc::new(Shared::new(local, limits, host));
        Self { shared, dialers: Mutex::default() }
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

    /// What the next frames state about this server. While it drops entries, messages with entries
    /// are not received either.
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
        self.dialers.lock().clear();
        self.shared.stop();
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

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "a connection has panicked");
    }
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

/// Judges a dialer, after a read of the registry for a server that is not known.
async fn judge(
    shared: &Shared,
    hello: &Hello,
) -> Result<(ConnectionRole, Option<OwnedSemaphorePermit>), ErrorCode> {
    let judge = || hello.judge(&shared.local, &mut shared.directory.lock());
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
