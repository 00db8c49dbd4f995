//! Pull connections: one request and its stream, which TCP slows down to the speed of the target.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::connection::{Control, send};
use super::dial::{ConnectError, connect};
use super::error::WireError;
use super::error_frame::decode_error;
use super::flow::SILENCE;
use super::frame::{ConnectionRole, FrameType};
use super::handshake::{Directory, HandshakeError, Identity, Local};
use super::host::NetEvent;
use super::io::{End, FrameReader, Pulse};
use super::pull::{Pull, PullFrame};
use super::pull_sender::{Ended, PullSender, Slot, Stream};
use super::receive::{common_frame, end_of, next_header};
use super::shared::{Accepted, Shared};
use crate::request::RequestError;
use crate::types::ServerId;

/// A stream whose target takes nothing for this long ends. Its leader has given it up by then.
const STALL: Duration = Duration::from_secs(30);

/// Serves a pull of another server.
pub(super) async fn serve(
    shared: &Arc<Shared>,
    accepted: Accepted,
    peer: Identity,
    _slot: OwnedSemaphorePermit,
) {
    let Accepted { socket, connection, .. } = accepted;
    let stream = Arc::new(Stream::default());
    let ended = Ended(&stream);
    let mark = peer.opening.mark;
    let _registration = shared.register(peer.server, mark, false, &stream.control);
    let (read, write) = socket.into_split();
    let role = ConnectionRole::Pull;
    let mut reader = FrameReader::new(read, connection, role, None);
    let slot = Mutex::new(Slot(Arc::clone(&stream)));
    let sending = send(&stream.control, &slot, write, connection, None, STALL);
    let receive = async {
        let mut is_begun = false;
        loop {
            match receive_pull(&mut reader, &stream, is_begun).await {
                Ok(None) => {}
                Ok(Some(pull)) => {
                    is_begun = true;
                    let sender = PullSender::new(&stream);
                    let server = peer.server;
                    shared.host.event(NetEvent::Pull { server, pull, sender });
                }
                Err(end) => return end,
            }
        }
    };
    let end = end_of(&stream.control, receive, sending).await;
    tracing::debug!(server = %peer.server, %end, "pull ended");
    drop(ended);
    reader.drain().await;
}

async fn receive_pull(
    reader: &mut FrameReader,
    stream: &Stream,
    is_begun: bool,
) -> Result<Option<Pull>, End> {
    let header = next_header(reader).await?;
    let Some(header) = common_frame(reader, header, &stream.control).await? else {
        return Ok(None);
    };
    if is_begun {
        return Err(WireError::Type(header.kind as u16).into());
    }
    let frame = timeout(SILENCE, reader.body(header, None)).await;
    Ok(Some(Pull::decode(&frame.unwrap_or(Err(End::Silent))?)?))
}

/// Why a pull ends before its `PullEnd`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PullError {
    /// The source cannot be reached, or the connection is lost.
    #[error("the source cannot be reached: {0}")]
    Connection(String),
    /// The handshake fails.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// The source violates the protocol, or a block does not have its checksum.
    #[error("the source violates the protocol: {0}")]
    Wire(#[from] WireError),
    /// The source has closed the connection.
    #[error("the source has closed the connection: {0}")]
    Closed(RequestError),
}

/// The target's end of a stream. The source waits while no frame is read.
pub struct PullStream {
    reader: FrameReader,
    pulse: Arc<Pulse>,
    /// Until it has ended.
    sender: Option<JoinHandle<End>>,
}

impl PullStream {
    /// Connects to a source and sends the request.
    ///
    /// # Errors
    /// The source cannot be reached, or refuses the connection.
    pub async fn connect(
        local: &Local,
        directory: &Mutex<Directory>,
        address: &str,
        server: ServerId,
        pull: &Pull,
    ) -> Result<Self, PullError> {
        let role = ConnectionRole::Pull;
        let connected = connect(local, role, address, Some(server), Some(directory)).await;
        let (socket, welcome) = connected.map_err(|error| match error {
            ConnectError::Handshake(error) => PullError::Handshake(error),
            other => PullError::Connection(other.to_string()),
        })?;
        let (read, write) = socket.into_split();
        let pulse = Arc::new(Pulse::new());
        let connection = welcome.connection;
        let queue = Mutex::new(Some(pull.encode()));
        let sending = Some(Arc::clone(&pulse));
        let sender = tokio::spawn(async move {
            send(&Control::default(), &queue, write, connection, sending, STALL).await
        });
        pulse.pause();
        let reader = FrameReader::new(read, connection, role, Some(Arc::clone(&pulse)));
        Ok(Self { reader, pulse, sender: Some(sender) })
    }

    /// Reads the next frame. Nothing follows [`PullFrame::End`]. If the future is dropped before it
    /// is ready, the stream cannot be read any more.
    ///
    /// # Errors
    /// See [`PullError`].
    pub async fn next(&mut self) -> Result<PullFrame, PullError> {
        let Some(sender) = &mut self.sender else {
            return Err(PullError::Connection(End::Closed.to_string()));
        };
        self.pulse.resume();
        let frame = async {
            loop {
                let header = self.reader.header().await?;
                let frame = self.reader.body(header, None).await?;
                match header.kind {
                    FrameType::Pong => {}
                    FrameType::Close => return Ok(Err(PullError::Closed(decode_error(&frame)?))),
                    _ => return Ok(Ok(PullFrame::decode(&frame)?)),
                }
            }
        };
        let lost = |end: End| match end {
            End::Wire(error) => PullError::Wire(error),
            end => PullError::Connection(end.to_string()),
        };
        let frame = tokio::select! {
            biased;
            frame = frame => frame,
            end = sender => {
                self.sender = None;
                Err(end.unwrap_or(End::Closed))
            }
        };
        self.pulse.pause();
        frame.map_err(lost)?
    }
}

impl Drop for PullStream {
    fn drop(&mut self) {
        if let Some(sender) = &self.sender {
            sender.abort();
        }
    }
}
