//! Who is let in at the admin port, and for how long. Nobody has to say there who he is, so nobody
//! is to keep others out by being there: not by many connections, not by silent or slow ones.
//!
//! A connection is for one request, and ends when its time is over, whatever it is at. When there
//! are as many as there may be, the oldest one goes for the next: an honest one is answered within
//! milliseconds, so the oldest is one that does not go on. (Were the next one turned away instead,
//! a few silent ones would keep out whoever asks for the server's health, and restarts it if there
//! is no answer.)

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::{HeaderValue, header};
use axum::response::Response;
use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time::{Timeout, timeout};

/// What those who come may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Connections that are open at the same time, and some more that are being closed. Each holds
    /// up to 400 KiB of a request's head.
    pub(super) connections: usize,
    /// For the request and its answer together.
    pub(super) time: Duration,
}

impl Bounds {
    /// Prometheus gives up after 10 s.
    pub(super) const USUAL: Self = Self { connections: 32, time: Duration::from_secs(30) };
}

/// A listener whose connections end.
pub(super) struct Visits {
    listener: TcpListener,
    bounds: Bounds,
    /// The oldest first. One whose sender is dropped has to go.
    open: VecDeque<oneshot::Sender<()>>,
}

impl Visits {
    pub(super) fn new(listener: TcpListener, bounds: Bounds) -> Self {
        Self { listener, bounds, open: VecDeque::new() }
    }
}

impl Listener for Visits {
    type Io = Visit;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Visit, SocketAddr) {
        let (socket, peer) = Listener::accept(&mut self.listener).await;
        self.open.retain(|visit| !visit.is_closed());
        if self.open.len() >= self.bounds.connections {
            self.open.pop_front();
        }
        let (stay, sent_away) = oneshot::channel();
        self.open.push_back(stay);
        let end = Box::pin(timeout(self.bounds.time, sent_away));
        (Visit { socket, end, is_over: false }, peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection with an end.
pub(super) struct Visit {
    socket: TcpStream,
    /// Its time is over, or it was sent away.
    end: Pin<Box<Timeout<oneshot::Receiver<()>>>>,
    is_over: bool,
}

impl Visit {
    /// An error once it has to end; then, too, the task is woken that asks.
    fn goes_on(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        // What is over must not be asked again.
        self.is_over = self.is_over || self.end.as_mut().poll(cx).is_ready();
        if self.is_over { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }
}

impl AsyncRead for Visit {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.goes_on(cx)?;
        Pin::new(&mut self.socket).poll_read(cx, to)
    }
}

impl AsyncWrite for Visit {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.goes_on(cx)?;
        Pin::new(&mut self.socket).poll_write(cx, from)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.goes_on(cx)?;
        Pin::new(&mut self.socket).poll_write_vectored(cx, from)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

/// Tell the client that this answer is the last one of its connection, and the server.
pub(super) async fn is_last(mut answer: Response) -> Response {
    answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    answer
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::super::{Admin, Health};
    use super::*;

    const SHORT: Duration = Duration::from_millis(200);
    /// Longer than a test takes.
    const LONG: Duration = Duration::from_secs(3600);

    async fn admin(connections: usize, time: Duration) -> Admin {
        let listen = "127.0.0.1:0".parse().unwrap();
        let bounds = Bounds { connections, time };
        let Ok(admin) = Admin::start_within(listen, Health::new(), bounds).await else {
            panic!("a free port is asked for")
        };
        admin
    }

    async fn connect(admin: &Admin) -> TcpStream {
        TcpStream::connect(admin.local_addr()).await.unwrap()
    }

    /// All that comes until the server closes the connection.
    async fn rest(mut socket: TcpStream) -> String {
        let mut rest = Vec::new();
        // What it has not read any more makes a reset of its close.
        let _ = socket.read_to_end(&mut rest).await;
        String::from_utf8(rest).unwrap()
    }

    async fn ask(admin: &Admin, path: &str) -> String {
        let mut socket = connect(admin).await;
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
        socket.write_all(request.as_bytes()).await.unwrap();
        rest(socket).await
    }

    #[tokio::test]
    async fn each_connection_is_for_one_request() {
        let admin = admin(4, LONG).await;
        for (path, status) in [
            ("/livez", "200"),
            ("/readyz", "503"),
            ("/healthz", "200"),
            ("/metrics", "200"),
            ("/none", "404"),
        ] {
            let answer = ask(&admin, path).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
            assert!(answer.contains("\r\nconnection: close\r\n"), "{answer}");
        }
        admin.shutdown().await;
    }

    #[tokio::test]
    async fn many_connections_keep_nobody_out() {
        let admin = admin(4, LONG).await;
        let mut silent = Vec::new();
        for _ in 0..50 {
            silent.push(connect(&admin).await);
            assert!(ask(&admin, "/healthz").await.ends_with("ok\n"));
        }
        let mut newest = silent.pop().unwrap();
        for socket in silent.drain(..40) {
            assert_eq!(rest(socket).await, "");
        }
        // Nobody came who could have taken its place.
        newest.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        assert!(rest(newest).await.ends_with("ok\n"));
    }

    #[tokio::test]
    async fn who_is_silent_or_slow_is_disconnected() {
        let admin = admin(4, SHORT).await;
        assert_eq!(rest(connect(&admin).await).await, "");
        let mut slow = connect(&admin).await;
        slow.write_all(b"GET /healthz HTTP/1.1\r\n").await.unwrap();
        let mut sent = 0;
        while slow.write_all(b"x").await.is_ok() {
            let mut some = [0; 100];
            let heard = timeout(Duration::from_millis(2), slow.read(&mut some)).await;
            if matches!(heard, Ok(Ok(0) | Err(_))) {
                break;
            }
            sent += 1;
            assert!(sent < 20_000, "nobody has disconnected it");
        }
    }
}
