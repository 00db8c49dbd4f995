//! Connections over TCP, each to a server of its own with short timeouts.

use std::future::poll_fn;
use std::path::Path;
use std::task::Poll;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use super::super::buffers::Reservation;
use super::super::tests::server_in;
use super::*;

/// The maximum lag; `--idle-timeout` is long.
const SHORT: Duration = Duration::from_millis(200);

/// A client's end of a connection.
struct Peer {
    socket: TcpStream,
    served: JoinHandle<End>,
    /// The server stops when it is dropped.
    _stop: watch::Sender<bool>,
}

fn server_with_short_lag(directory: &Path, password: Option<&str>) -> Arc<Server> {
    let mut server = server_in(directory, &[], password);
    Arc::get_mut(&mut server).expect("this is the only reference").slow_clients.max_lag = SHORT;
    server
}

impl Peer {
    async fn with(server: Arc<Server>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        let client = server.client();
        let (stop, stopping) = watch::channel(false);
        let served = tokio::spawn(serve(server, accepted, client, stopping));
        Self { socket, served, _stop: stop }
    }

    async fn send(&mut self, text: &str) {
        self.socket.write_all(text.as_bytes()).await.unwrap();
    }

    async fn expect(&mut self, answer: &str) {
        let mut received = vec![0; answer.len()];
        self.socket.read_exact(&mut received).await.unwrap();
        assert_eq!(String::from_utf8_lossy(&received), answer);
    }

    /// Returns whether the server has closed the connection, or does so within 2 ms.
    async fn is_closed(&mut self) -> bool {
        let mut buffer = [0; 1024];
        let read = timeout(Duration::from_millis(2), self.socket.read(&mut buffer)).await;
        matches!(read, Ok(Ok(0) | Err(_)))
    }
}

#[tokio::test]
async fn a_client_that_does_not_authenticate_is_disconnected() {
    let directory = tempfile::tempdir().unwrap();
    let mut peer = Peer::with(server_with_short_lag(directory.path(), Some("secret"))).await;
    let mut sent = 0;
    while sent < 1_000_000 {
        if peer.socket.write_all(b"PING\r\n").await.is_err() || peer.is_closed().await {
            break;
        }
        sent += 1;
    }
    assert!(sent < 1_000_000, "the server has not closed the connection");
    assert!(matches!(peer.served.await.unwrap(), End::ReadTimeout));
}

#[tokio::test]
async fn a_client_that_sends_an_occasional_byte_is_disconnected() {
    let directory = tempfile::tempdir().unwrap();
    let mut peer = Peer::with(server_with_short_lag(directory.path(), None)).await;
    peer.send("*2\r\n$3\r\nGET\r\n$60000\r\n").await;
    let mut sent = 0;
    while sent < 20_000 && peer.socket.write_all(b"x").await.is_ok() {
        if peer.is_closed().await {
            break;
        }
        sent += 1;
    }
    assert!(sent < 20_000, "the server has not closed the connection");
    assert!(matches!(peer.served.await.unwrap(), End::ReadTimeout));
}

/// Returns a server that requires a high rate: otherwise clients that transfer a little all the
/// time could hold the memory of requests or answers for hours.
fn server_with_high_rate(directory: &Path) -> Arc<Server> {
    let mut server = server_with_short_lag(directory, None);
    Arc::get_mut(&mut server).expect("this is the only reference").slow_clients.min_rate = 1 << 30;
    server
}

#[tokio::test]
async fn a_client_that_sends_too_slowly_is_disconnected() {
    let directory = tempfile::tempdir().unwrap();
    let mut peer = Peer::with(server_with_high_rate(directory.path())).await;
    peer.send("*2\r\n$3\r\nGET\r\n$1000000\r\n").await;
    let mut sent = 0;
    while sent < 1000 && peer.socket.write_all(&[b'x'; 1000]).await.is_ok() {
        if peer.is_closed().await {
            break;
        }
        sent += 1;
    }
    assert!(sent < 1000, "the server has not closed the connection");
    assert!(matches!(peer.served.await.unwrap(), End::ReadTimeout));
}

#[tokio::test]
async fn a_client_that_receives_too_slowly_is_disconnected() {
    let directory = tempfile::tempdir().unwrap();
    let server = server_with_high_rate(directory.path());
    server.cache.put(b"large", &[b'x'; 900_000]).unwrap();
    let mut peer = Peer::with(server).await;
    // More than the system buffers.
    peer.send(&"GET large\r\n".repeat(100)).await;
    let (mut buffer, mut received) = ([0; 1000], 0);
    while !peer.served.is_finished() {
        assert!(received < 50_000_000, "the server has not closed the connection");
        received += peer.socket.read(&mut buffer).await.unwrap_or(0);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(matches!(peer.served.await.unwrap(), End::WriteTimeout));
}

/// Each request is fast enough and small enough by itself, but all of them together are too large.
#[tokio::test]
async fn incomplete_requests_share_a_limit() {
    let directory = tempfile::tempdir().unwrap();
    let server = server_in(directory.path(), &["--buffer-memory", "2MiB"], None);
    let buffers = server.buffers.clone();
    // The key is too long to exist, but not for a request.
    let whole = [&b"*2\r\n$3\r\nGET\r\n$900000\r\n"[..], &[b'x'; 900_000], b"\r\n"].concat();
    let mut peers = Vec::new();
    for _ in 0..3 {
        let mut peer = Peer::with(server.clone()).await;
        // It may be closed before all of this was sent.
        let _ = peer.socket.write_all(&whole[..whole.len() - 3]).await;
        peers.push(peer);
    }
    let first_answered = poll_fn(|cx| {
        let is_answered = |peer: &Peer| peer.socket.poll_read_ready(cx).is_ready();
        peers.iter().position(is_answered).map_or(Poll::Pending, Poll::Ready)
    });
    let index = first_answered.await;
    let mut refused = peers.swap_remove(index);
    let error = "-ERR the memory for requests and answers (--buffer-memory) is used up\r\n";
    refused.expect(error).await;
    drop(refused.socket);
    assert!(matches!(refused.served.await.unwrap(), End::ClosedByServer));
    // The memory of the others is released when they end, and available to the next one.
    for peer in peers {
        drop(peer.socket);
        peer.served.await.unwrap();
    }
    assert_eq!(buffers.used_bytes(), 0);
    let mut next = Peer::with(server).await;
    next.socket.write_all(&whole).await.unwrap();
    next.expect("$-1\r\n").await;
}

/// A refused client gets an error even if others use all of the shared memory.
#[tokio::test]
async fn errors_need_no_shared_memory() {
    const COUNT: usize = 20_000;
    for password in [None, Some("secret")] {
        let directory = tempfile::tempdir().unwrap();
        let server = server_in(directory.path(), &["--buffer-memory", "1MiB"], password);
        let buffers = server.buffers.clone();
        let mut others = Reservation::new(&buffers);
        // Before authentication none of it is used, even if it is available.
        assert!(password.is_some() || others.resize(1 << 20));
        let mut peer = Peer::with(server).await;
        let (mut from_server, mut to_server) = peer.socket.split();
        let answer = b"-ERR unknown command 'a', with args beginning with: \r\n";
        let sending = async {
            to_server.write_all(&b"a\n".repeat(COUNT)).await.unwrap();
        };
        let receiving = async {
            let mut answers = vec![0; answer.len() * COUNT];
            for part in answers.chunks_mut(10_000) {
                from_server.read_exact(part).await.unwrap();
                assert!(password.is_none() || buffers.used_bytes() == 0);
            }
            assert!(answers == answer.repeat(COUNT));
        };
        tokio::join!(sending, receiving);
    }
}

/// Such a client sends a whole value before it reads an answer.
#[tokio::test]
async fn a_client_that_is_still_sending_receives_the_reason_of_its_disconnection() {
    let directory = tempfile::tempdir().unwrap();
    let server = server_in(directory.path(), &[], None);
    let buffers = server.buffers.clone();
    let max_bytes = server.limits.argument_bytes;
    let mut peer = Peer::with(server).await;
    peer.send("*2\r\n$3\r\nGET\r\n$20000000\r\n").await;
    // Far more than the system buffers.
    peer.socket.write_all(&vec![b'x'; 20_000_000]).await.unwrap();
    let error = "-ERR Protocol error: invalid bulk length: 20000000 bytes; an argument may have at \
        most";
    peer.expect(&format!("{error} {max_bytes}\r\n")).await;
    assert_eq!(peer.socket.read(&mut [0; 10]).await.unwrap(), 0);
    assert_eq!(buffers.used_bytes(), 0);
    // The connection ends even if the client stays connected.
    assert!(matches!(peer.served.await.unwrap(), End::ClosedByServer));
}

#[tokio::test]
async fn discarding_the_input_of_a_disconnected_client_is_bounded() {
    let directory = tempfile::tempdir().unwrap();
    let mut peer = Peer::with(server_in(directory.path(), &[], None)).await;
    peer.send("*x\r\n").await;
    let (piece, mut sent) = (vec![b'x'; 64 << 10], 0);
    while peer.socket.write_all(&piece).await.is_ok() {
        sent += piece.len();
        assert!(sent < 4 * MAX_DRAINED_BYTES, "the server has not closed the connection");
    }
    assert!(matches!(peer.served.await.unwrap(), End::ClosedByServer));
}

/// Returns how many seconds a client that transfers `bytes` in each second takes for `total_bytes`;
/// `None` if it is disconnected before.
fn seconds(bytes: usize, total_bytes: usize) -> Option<usize> {
    let limits = SlowClientLimits { max_lag: Duration::from_secs(30), min_rate: 64 << 10 };
    let mut lag = TransferLag::new(limits);
    for (second, transferred) in (1..).zip((bytes..=total_bytes).step_by(bytes)) {
        assert!(lag.remaining().is_some_and(|remaining| remaining <= limits.max_lag));
        lag.add_wait(Duration::from_secs(1));
        lag.remaining()?;
        lag.add_bytes(bytes);
        if transferred == total_bytes {
            return Some(second);
        }
    }
    unreachable!("{total_bytes} are a multiple of {bytes}")
}

#[test]
fn a_transfer_may_take_the_maximum_lag_plus_the_time_at_the_minimum_rate() {
    const KIB: usize = 1 << 10;
    const MIB: usize = 1 << 20;
    // At the minimum rate there is no limit; at half of it nearly twice the maximum lag.
    assert_eq!(seconds(64 * KIB, 64 * MIB), Some(1024));
    assert_eq!(seconds(32 * KIB, 58 * 32 * KIB), Some(58));
    assert_eq!(seconds(32 * KIB, 64 * MIB), None);
    assert_eq!(seconds(1, 29), Some(29));
    assert_eq!(seconds(1, 31), None);
    // A fast transfer earns no credit.
    let limits = SlowClientLimits { max_lag: Duration::from_secs(30), min_rate: 64 << 10 };
    let mut lag = TransferLag::new(limits);
    lag.add_bytes(64 * MIB);
    lag.add_wait(Duration::from_secs(29));
    assert_eq!(lag.remaining(), Some(Duration::from_secs(1)));
    lag.add_wait(Duration::from_secs(1));
    assert_eq!(lag.remaining(), None);
    // Late progress counts: it was the server that was slow.
    lag.add_wait(Duration::from_secs(100));
    lag.add_bytes(64 * KIB);
    assert_eq!(lag.remaining(), Some(Duration::from_secs(1)));
}

/// Requests that need only memory, as queued by a client that has not received answers for a while.
#[tokio::test]
async fn many_queued_requests_yield_to_other_connections() {
    let directory = tempfile::tempdir().unwrap();
    let server = server_in(directory.path(), &[], None);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut peer = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (socket, _) = listener.accept().await.unwrap();
    let client = server.client();
    let mut requests = Requests::new(&server.buffers, server.limits);
    requests.feed(&b"EXISTS a b c\r\n".repeat(10_000));
    let (_stop, stopping) = watch::channel(false);
    let mut connection = Connection::new(server, requests, stopping);
    let mut polls = 0;
    {
        let mut answering = std::pin::pin!(connection.answer(&socket, client));
        let answered = poll_fn(|cx| {
            polls += 1;
            answering.as_mut().poll(cx)
        });
        assert!(answered.await.is_ok());
    }
    assert!(polls > 50, "{polls}");
    let mut answers = vec![0; 40_000];
    peer.read_exact(&mut answers).await.unwrap();
    assert_eq!(answers, b":0\r\n".repeat(10_000));
}

#[tokio::test]
async fn waiting_writers_do_not_block_readers() {
    let directory = tempfile::tempdir().unwrap();
    let mut server = server_in(directory.path(), &[], None);
    // As if all threads for writers were waiting.
    Arc::get_mut(&mut server).expect("this is the only reference").writers = Semaphore::new(0);
    let mut writer = Peer::with(server.clone()).await;
    let mut reader = Peer::with(server.clone()).await;
    writer.send("SET a 1 NX\r\n").await;
    reader.send("DBSIZE\r\nSCAN 0\r\n").await;
    reader.expect(":0\r\n*2\r\n$1\r\n0\r\n*0\r\n").await;
    server.writers.add_permits(1);
    writer.expect("+OK\r\n").await;
    writer.send("DEL a\r\n").await;
    writer.expect(":1\r\n").await;
}
