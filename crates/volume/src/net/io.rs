//! Frames on sockets. A frame is read into two buffers, of which one is its blocks, and is written
//! from its buffers without a copy.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use parking_lot::Mutex;
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout};

use super::error::WireError;
use super::flow::{Duty, Liveness};
use super::frame::{ConnectionId, ConnectionRole, HEADER_BYTES, Header, Received, Side};

/// Bytes that the kernel holds for one connection before it has sent them.
const NOT_SENT_BYTES: u32 = 256 << 10;
/// Buffers of one system call.
const MAX_SLICES: usize = 64;
/// Bytes that a closing connection still reads, so that the other end receives `Close`.
const MAX_DRAINED_BYTES: u64 = 1 << 20;
const DRAIN: Duration = Duration::from_secs(1);

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    /// The other end has closed it, or the network has.
    #[error("the connection was closed")]
    Closed,
    /// The socket has failed.
    #[error("the socket has failed: {0}")]
    Io(#[from] io::Error),
    /// The other end violates the protocol.
    #[error("the other end violates the protocol: {0}")]
    Wire(#[from] WireError),
    /// Nothing arrives, or nothing can be sent.
    #[error("the other end does not respond")]
    Silent,
}

/// Sets the options of a socket of this protocol.
pub(super) fn set_options(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    SockRef::from(socket).set_tcp_notsent_lowat(NOT_SENT_BYTES)
}

/// The time-out state of a connection that this process has dialed.
pub(super) struct Pulse {
    start: Instant,
    liveness: Mutex<Liveness>,
}

impl Pulse {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), liveness: Mutex::new(Liveness::new(Duration::ZERO)) }
    }

    pub(super) fn sent(&self) {
        self.liveness.lock().sent(self.start.elapsed());
    }

    pub(super) fn pause(&self) {
        self.liveness.lock().pause();
    }

    pub(super) fn resume(&self) {
        self.liveness.lock().resume(self.start.elapsed());
    }

    pub(super) fn duty(&self) -> Duty {
        self.liveness.lock().duty(self.start.elapsed())
    }

    /// The moment of a [`Duty::WaitUntil`].
    pub(super) fn at(&self, since_start: Duration) -> Instant {
        self.start + since_start
    }

    fn received(&self) {
        self.liveness.lock().received(self.start.elapsed());
    }
}

/// Reads frames from a socket.
pub(super) struct FrameReader {
    socket: BufReader<OwnedReadHalf>,
    connection: ConnectionId,
    role: ConnectionRole,
    /// Of a dialer; `None` for an acceptor.
    pulse: Option<Arc<Pulse>>,
}

impl FrameReader {
    pub(super) fn new(
        socket: OwnedReadHalf,
        connection: ConnectionId,
        role: ConnectionRole,
        pulse: Option<Arc<Pulse>>,
    ) -> Self {
        Self { socket: BufReader::new(socket), connection, role, pulse }
    }

    /// Reads the header of the next frame. Not more than it is in memory until the body is read.
    pub(super) async fn header(&mut self) -> Result<Header, End> {
        let mut header = [0; HEADER_BYTES];
        let mut rest = &mut header[..];
        while rest.has_remaining_mut() {
            // A connection that is cut between frames and one that is cut in a frame are the same:
            // what was not read completely does not exist.
            if self.socket.read_buf(&mut rest).await? == 0 {
                return Err(End::Closed);
            }
            self.received();
        }
        let side = if self.pulse.is_some() { Side::Dialer } else { Side::Acceptor };
        Ok(Header::decode(&header, self.connection, self.role, side)?)
    }

    /// Reads the body of a frame. The permit is held until the last slice of its buffers is
    /// dropped.
    pub(super) async fn body(
        &mut self,
        header: Header,
        permit: Option<Arc<OwnedSemaphorePermit>>,
    ) -> Result<Received, End> {
        let meta = self.exactly(header.meta_bytes).await?;
        let data = self.exactly(header.data_bytes).await?;
        let counted = |buffer: BytesMut| match &permit {
            Some(permit) if !buffer.is_empty() => {
                Bytes::from_owner(Counted { buffer, _permit: Arc::clone(permit) })
            }
            _ => buffer.freeze(),
        };
        Ok(header.with_body(counted(meta), counted(data))?)
    }

    /// Reads the meta of a frame, and its data into nothing.
    pub(super) async fn meta_only(&mut self, header: Header) -> Result<Received, End> {
        let meta = self.exactly(header.meta_bytes).await?.freeze();
        self.skip(header.data_bytes).await?;
        Ok(header.with_body(meta, Bytes::new())?)
    }

    /// Reads bytes into nothing.
    pub(super) async fn skip(&mut self, bytes: usize) -> Result<(), End> {
        let mut scratch = BytesMut::with_capacity(bytes.min(16 << 10));
        let mut left = bytes;
        while left > 0 {
            scratch.clear();
            let mut space = (&mut scratch).limit(left.min(16 << 10));
            match self.socket.read_buf(&mut space).await? {
                0 => return Err(End::Closed),
                read => left -= read,
            }
            self.received();
        }
        Ok(())
    }

    async fn exactly(&mut self, bytes: usize) -> Result<BytesMut, End> {
        let mut buffer = BytesMut::with_capacity(bytes);
        while buffer.len() < bytes {
            let left = bytes - buffer.len();
            let mut space = (&mut buffer).limit(left);
            if self.socket.read_buf(&mut space).await? == 0 {
                return Err(End::Closed);
            }
            self.received();
        }
        Ok(buffer)
    }

    fn received(&self) {
        if let Some(pulse) = &self.pulse {
            pulse.received();
        }
    }

    /// Reads what has arrived before the socket is closed. A socket that is closed with unread
    /// bytes is reset, and the other end may lose the `Close` that was sent to it.
    pub(super) async fn drain(&mut self) {
        let mut rest = (&mut self.socket).take(MAX_DRAINED_BYTES);
        let _ = timeout(DRAIN, tokio::io::copy(&mut rest, &mut tokio::io::sink())).await;
    }
}

/// A buffer that counts against a budget until its last slice is dropped.
struct Counted {
    buffer: BytesMut,
    _permit: Arc<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

/// Writes buffers with as few system calls as possible. Fails if there is no progress for `stall`.
pub(super) async fn write_all(
    socket: &mut OwnedWriteHalf,
    buffers: impl IntoIterator<Item = Bytes>,
    stall: Duration,
) -> Result<(), End> {
    let mut buffers: VecDeque<Bytes> = buffers.into_iter().collect();
    while !buffers.is_empty() {
        let slices: Vec<_> =
            buffers.iter().take(MAX_SLICES).map(|buffer| IoSlice::new(buffer)).collect();
        let written = timeout(stall, socket.write_vectored(&slices)).await;
        let mut written = match written.map_err(|_| End::Silent)?? {
            0 => return Err(End::Closed),
            written => written,
        };
        while let Some(first) = buffers.front_mut() {
            if written < first.len() {
                first.advance(written);
                break;
            }
            written -= first.len();
            buffers.pop_front();
        }
    }
    Ok(())
}
