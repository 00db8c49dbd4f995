//! Peer connections: the one that this server dials to another one and sends on, and the one that
//! the other one has dialed.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout};

use super::connection::{Control, Queue, send};
use super::dial::{ConnectError, connect};
use super::error_frame::decode_error;
use super::flow::{BackOff, SILENCE, WRITE_STALL};
use super::frame::{ConnectionRole, Frame, FrameType};
use super::handshake::{Identity, Welcome};
use super::host::{Held, NetEvent};
use super::io::{End, FrameReader, Pulse};
use super::messages::{Entries, GroupMessage, SenderState, UnsendableMessage};
use super::peer::PeerFrame;
use super::peer_queue::{PeerQueue, Pushed};
use super::receive::{common_frame, end_of, next_header};
use super::shared::{Accepted, Shared};
use crate::types::ServerId;

/// A connection that was at least this long open is opened again without a delay.
const STEADY: Duration = Duration::from_secs(1);

/// The task that keeps a connection to another server.
pub(super) struct Dialer {
    pub(super) address: String,
    outbound: Arc<Outbound>,
    task: AbortHandle,
}

impl Drop for Dialer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What waits for another server.
struct Outbound {
    shared: Arc<Shared>,
    state: Mutex<OutboundState>,
}

#[derive(Default)]
struct OutboundState {
    queue: PeerQueue,
    /// The connection, if there is one.
    control: Option<Arc<Control>>,
}

impl Dialer {
    pub(super) fn push(
        &self,
        messages: impl IntoIterator<Item = GroupMessage>,
    ) -> Result<usize, UnsendableMessage> {
        let mut state = self.outbound.state.lock();
        let Some(control) = state.control.clone() else { return Ok(messages.into_iter().count()) };
        let (mut dropped, mut result) = (0, Ok(()));
        for message in messages {
            match state.queue.push(message) {
                Ok(Pushed::Queued) => {}
                Ok(Pushed::Dropped) => dropped += 1,
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        control.wake();
        result.map(|()| dropped)
    }

    pub(super) fn push_frame(&self, frame: Frame) -> Pushed {
        let mut state = self.outbound.state.lock();
        let Some(control) = state.control.clone() else { return Pushed::Dropped };
        let pushed = state.queue.push_frame(frame);
        control.wake();
        pushed
    }
}

/// The queue of a peer connection as its sender sees it.
struct PeerFrames {
    outbound: Arc<Outbound>,
}

impl Queue for PeerFrames {
    fn take(&mut self) -> Option<Frame> {
        let sender: SenderState = *self.outbound.shared.sender.lock();
        self.outbound.state.lock().queue.next(sender)
    }
}

/// Starts the task that keeps a connection to another server.
pub(super) fn dial(shared: &Arc<Shared>, server: ServerId, address: String) -> Dialer {
    let shared = Arc::clone(shared);
    let outbound = Arc::new(Outbound { shared, state: Mutex::default() });
    let task = tokio::spawn(keep_connected(Arc::clone(&outbound), server, address.clone()));
    Dialer { address, outbound, task: task.abort_handle() }
}

async fn keep_connected(outbound: Arc<Outbound>, server: ServerId, address: String) {
    let shared = &outbound.shared;
    let mut back_off = BackOff::default();
    // The error that was reported of the present outage.
    let mut reported = None;
    // The opening that was reached last at this address.
    let mut reached = None;
    loop {
        let directory = Some(&shared.directory);
        let role = ConnectionRole::Peer;
        match connect(&shared.local, role, &address, Some(server), directory).await {
            Ok((socket, welcome)) => {
                (reached, reported) = (Some(welcome.identity.opening.mark), None);
                let opened = Instant::now();
                let end = run(&outbound, server, socket, &welcome).await;
                tracing::debug!(%server, %end, "connection to a server lost");
                if opened.elapsed() >= STEADY {
                    back_off = BackOff::after_loss();
                    continue;
                }
            }
            Err(ConnectError::Io(error)) if error.kind() == ErrorKind::ConnectionRefused => {
                // At an address that was never reached it says nothing of the server.
                if let Some(mark) = reached {
                    shared.refused(server, mark);
                }
            }
            Err(ConnectError::Handshake(error)) => {
                if reported.replace(error) != Some(error) {
                    shared.host.event(NetEvent::PeerRefused { server, error });
                }
            }
            Err(error) => tracing::debug!(%server, %error, "a server could not be reached"),
        }
        sleep(back_off.delay()).await;
    }
}

/// The state of a connection that is open, until it is dropped.
struct Open<'a> {
    outbound: &'a Outbound,
    server: ServerId,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        *self.outbound.state.lock() = OutboundState::default();
        let event = NetEvent::PeerDown { server: self.server, is_gone: false };
        self.outbound.shared.host.event(event);
    }
}

/// Sends on a connection until it ends.
async fn run(
    outbound: &Arc<Outbound>,
    server: ServerId,
    socket: TcpStream,
    welcome: &Welcome,
) -> End {
    let shared = &outbound.shared;
    let control = Arc::new(Control::default());
    let mark = welcome.identity.opening.mark;
    let _registration = shared.register(server, mark, false, &control);
    outbound.state.lock().control = Some(Arc::clone(&control));
    let _open = Open { outbound, server };
    shared.host.event(NetEvent::PeerUp { server });
    let (read, write) = socket.into_split();
    let pulse = Arc::new(Pulse::new());
    let frames = Mutex::new(PeerFrames { outbound: Arc::clone(outbound) });
    let (connection, role) = (welcome.connection, ConnectionRole::Peer);
    let mut reader = FrameReader::new(read, connection, role, Some(Arc::clone(&pulse)));
    let receive = async {
        loop {
            if let Err(end) = receive_pong(&mut reader).await {
                return end;
            }
        }
    };
    tokio::select! {
        end = receive => end,
        end = send(&control, &frames, write, connection, Some(pulse), WRITE_STALL) => end,
    }
}

/// Reads what an acceptor sends on a connection on which only the dialer has something to say.
async fn receive_pong(reader: &mut FrameReader) -> Result<(), End> {
    let header = reader.header().await?;
    let frame = reader.body(header, None).await?;
    if header.kind == FrameType::Close {
        let error = decode_error(&frame)?;
        tracing::info!(%error, "the other server has closed the connection");
        return Err(End::Closed);
    }
    Ok(())
}

/// Receives what another server sends on the connection that it has dialed.
pub(super) async fn serve(shared: &Arc<Shared>, accepted: Accepted, peer: Identity) {
    let Accepted { socket, connection, .. } = accepted;
    let control = Arc::new(Control::default());
    let _registration = shared.register(peer.server, peer.opening.mark, true, &control);
    let (read, write) = socket.into_split();
    let role = ConnectionRole::Peer;
    let mut reader = FrameReader::new(read, connection, role, None);
    let nothing = Mutex::new(None::<Frame>);
    let sending = send(&control, &nothing, write, connection, None, WRITE_STALL);
    let receive = async {
        loop {
            if let Err(end) = receive_frame(shared, peer.server, &mut reader, &control).await {
                return end;
            }
        }
    };
    let end = end_of(&control, receive, sending).await;
    tracing::debug!(server = %peer.server, %end, "connection of a server ended");
    reader.drain().await;
}

/// Receives a frame. The socket is always read, or raft would also miss heartbeats: what exceeds
/// the budgets is read and dropped.
async fn receive_frame(
    shared: &Shared,
    server: ServerId,
    reader: &mut FrameReader,
    control: &Control,
) -> Result<(), End> {
    let header = next_header(reader).await?;
    let Some(header) = common_frame(reader, header, control).await? else { return Ok(()) };
    let take = |budget: &Arc<Semaphore>, bytes: usize| {
        let permit = Arc::clone(budget).try_acquire_many_owned(bytes as u32);
        permit.ok().map(Arc::new)
    };
    // What this server states about itself is what it does.
    let drops_entries = shared.sender.lock().drops_entries;
    let body = async {
        if header.kind == FrameType::Raft
            && !drops_entries
            && let Some(permit) = take(&shared.entry_bytes, header.meta_bytes + header.data_bytes)
        {
            let frame = reader.body(header, Some(Arc::clone(&permit))).await?;
            return Ok(Some((frame, permit, Entries::Keep)));
        }
        let Some(permit) = take(&shared.message_bytes, header.meta_bytes) else {
            reader.skip(header.meta_bytes + header.data_bytes).await?;
            return Ok(None);
        };
        Ok(Some((reader.meta_only(header).await?, permit, Entries::Drop)))
    };
    let body = timeout(SILENCE, body).await.unwrap_or(Err(End::Silent))?;
    let Some((frame, permit, entries)) = body else {
        tracing::debug!(%server, "a frame was dropped, because earlier ones are not handled");
        return Ok(());
    };
    let frame = PeerFrame::decode(&frame, entries)?;
    shared.host.event(NetEvent::Peer { server, frame, held: Held::new(permit) });
    Ok(())
}
