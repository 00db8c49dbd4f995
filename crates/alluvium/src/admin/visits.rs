//! Admission of connections to the admin port, and their time limit. The port has no
//! authentication, so no client may keep others out, neither by many connections nor by silent or
//! slow ones.
//!
//! A connection serves one request and ends at its deadline in any state. At the limit on
//! connections, the oldest one is closed in favor of a new one: a well-behaved client is answered
//! within milliseconds, so the oldest connection is a stalled one. (If new connections were refused
//! instead, a few silent ones would keep out the supervisor that checks the server's health and
//! restarts it when there is no answer.)

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

/// Limits on connections to the admin port.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Open connections, not counting those that are being closed. Each holds up to 400 KiB of a
    /// request's head.
    pub(super) connections: usize,
    /// Time limit for the request and its answer together.
    pub(super) time: Duration,
}

impl Bounds {
    /// Prometheus gives up after 10 s.
    pub(super) const USUAL: Self = Self { connections: 32, time: Duration::from_secs(30) };
}

/// A listener whose connections have a deadline.
pub(super) struct AdminListener {
    listener: TcpListener,
    bounds: Bounds,
    /// The oldest first. Dropping a sender ends its connection.
    open: VecDeque<oneshot::Sender<()>>,
}

impl AdminListener {
    pub(super) fn new(listener: TcpListener, bounds: Bounds) -> Self {
        Self { listener, bounds, open: VecDeque::new() }
    }
}

impl Listener for AdminListener {
    type Io = AdminConnection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (AdminConnection, SocketAddr) {
        let (socket, peer) = Listener::accept(&mut self.listener).await;
        self.open.retain(|connection| !connection.is_closed());
        if self.open.len() >= self.bounds.connections {
            self.open.pop_front();
        }
        let (keep, close) = oneshot::channel();
        self.open.push_back(keep);
        let end = Box::pin(timeout(self.bounds.time, close));
        (AdminConnection { socket, end, is_over: false }, peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection with a deadline.
pub(super) struct AdminConnection {
    socket: TcpStream,
    /// Completes at the deadline, or when the connection is closed in favor of another one.
    end: Pin<Box<Timeout<oneshot::Receiver<()>>>>,
    is_over: bool,
}

impl AdminConnection {
    /// Fails once the connection must end; also registers the calling task to be woken then.
    fn check_deadline(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        // A completed future must not be polled again.
        self.is_over = self.is_over || self.end.as_mut().poll(cx).is_ready();
        if self.is_over { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }
}

impl AsyncRead for AdminConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_deadline(cx)?;
        Pin::new(&mut self.socket).poll_read(cx, to)
    }
}

impl AsyncWrite for AdminConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check_deadline(cx)?;
        Pin::new(&mut self.socket).poll_write(cx, from)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check_deadline(cx)?;
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

/// Marks the answer as the last one of its connection, for the client and for the HTTP server.
pub(super) async fn mark_last(mut answer: Response) -> Response {
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
            panic!("a free port is requested")
        };
        admin
    }

    async fn connect(admin: &Admin) -> TcpStream {
        TcpStream::connect(admin.local_addr()).await.unwrap()
    }

    /// Reads until the server closes the connection.
    async fn rest(mut socket: TcpStream) -> String {
        let mut rest = Vec::new();
        // If the server closes with unread input, the read ends with a reset.
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
    async fn each_connection_serves_one_request() {
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
    async fn many_silent_connections_keep_no_client_out() {
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
        // No newer connection took its place.
        newest.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        assert!(rest(newest).await.ends_with("ok\n"));
    }

    #[tokio::test]
    async fn silent_and_slow_clients_are_disconnected() {
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
            assert!(sent < 20_000, "the server has not closed the connection");
        }
    }
}
