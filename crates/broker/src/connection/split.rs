//! The two halves of a connection: one for reading and one for writing.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::FutureExt;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf, Ready};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio_rustls::server::TlsStream;

/// The reading half.
pub(super) trait Incoming: AsyncRead + Unpin {
    /// Whether the client has closed its side, even if bytes that it sent before are not read yet.
    fn has_ended(&self) -> bool;
}

impl Incoming for OwnedReadHalf {
    fn has_ended(&self) -> bool {
        has_ended(self.as_ref())
    }
}

/// The kernel reports this separately from the bytes; a read would report it only after them.
fn has_ended(socket: &TcpStream) -> bool {
    match socket.ready(Interest::READABLE).now_or_never() {
        None => false,
        Some(ready) => ready.is_ok_and(Ready::is_read_closed),
    }
}

/// One half of an encrypted connection. Unlike tokio's halves it gives access to the socket below.
pub(super) struct Half(Arc<Mutex<TlsStream<TcpStream>>>);

/// Splits an encrypted connection. One task polls both halves, so neither waits for the other.
pub(super) fn split(stream: TlsStream<TcpStream>) -> (Half, Half) {
    let stream = Arc::new(Mutex::new(stream));
    (Half(stream.clone()), Half(stream))
}

impl Incoming for Half {
    fn has_ended(&self) -> bool {
        has_ended(self.0.lock().get_ref().0)
    }
}

impl AsyncRead for Half {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.lock()).poll_read(cx, buf)
    }
}

impl AsyncWrite for Half {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0.lock()).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0.lock()).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.lock().is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.lock()).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.lock()).poll_shutdown(cx)
    }
}
