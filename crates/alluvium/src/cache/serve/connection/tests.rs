//! Connections over TCP, each to a server of its own with short timeouts.

use std::future::poll_fn;
use std::path::Path;
use std::task::Poll;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use super::super::buffers::Share;
use super::super::tests::server_in;
use super::*;

/// The patience of the servers; their `--idle-timeout` is long.
const SHORT: Duration = Duration::from_millis(200);

/// A client's end of a connection.
struct Talk {
    socket: TcpStream,
    served: JoinHandle<End>,
    /// The server stops when it is dropped.
    _stop: watch::Sender<bool>,
}

fn impatient(directory: &Path, password: Option<&str>) -> Arc<Server> {
    let mut server = server_in(directory, &[], password);
    Arc::get_mut(&mut server).expect("this is the only reference").patience.time = SHORT;
    server
}

impl Talk {
    async fn with(server: Arc<Server>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        let client = server.client();
        let (stop, stopping) = watch::channel(false);
        let served = tokio::spawn(serve(server, accepted, client, stopping));
        Self { socket, served, _stop: stop }
    }

    async fn say(&mut self, text: &str) {
        self.socket.write_all(text.as_bytes()).await.unwrap();
    }

    async fn expect(&mut self, answer: &str) {
        let mut came = vec![0; answer.len()];
        self.socket.read_exact(&mut came).await.unwrap();
        assert_eq!(String::from_utf8_lossy(&came), answer);
    }

    /// Returns whether the server has closed it, by now or in a moment.
    async fn is_cut(&mut self) -> bool {
        let mut some = [0; 1024];
        let heard = timeout(Duration::from_millis(2), self.socket.read(&mut some)).await;
        matches!(heard, Ok(Ok(0) | Err(_)))
    }
}

#[tokio::test]
async fn a_client_that_does_not_authenticate_is_disconnected() {
    let directory = tempfile::tempdir().unwrap();
    let mut talk = Talk::with(impatient(directory.path(), Some("secret"))).await;
    let mut said = 0;
    while said < 1_000_000 {
        if talk.socket.write_all(b"PING\r\n").await.is_err() || talk.is_cut().await {
            break;
        }
        said += 1;
    }
    assert!(said < 1_000_000, "the server has not closed the connection");
    assert!(matches!(talk.served.await.unwrap(), End::Silent));
}

#[tokio::test]
async fn a_client_that_sends_an_occasional_byte_is_disconnected() {
    let directory = tempfile::tempdir().unwrap();
    let mut talk = Talk::with(impatient(directory.path(), None)).await;
    talk.say("*2\r\n$3\r\nGET\r\n$60000\r\n").await;
    let mut sent = 0;
    while sent < 20_000 && talk.socket.write_all(b"x").await.is_ok() {
        if talk.is_cut().await {
            break;
        }
        sent += 1;
    }
    assert!(sent < 20_000, "the server has not closed the connection");
    assert!(matches!(talk.served.await.unwrap(), End::Silent));
}

/// A server that requires a high rate: clients that are never silent for long could otherwise hold
/// the memory of requests or answers for hours.
fn hasty(directory: &Path) -> Arc<Server> {
    let mut server = impatient(directory, None);
    Arc::get_mut(&mut server).expect("this is the only reference").patience.least_rate = 1 << 30;
    server
}

#[tokio::test]
async fn a_client_that_sends_too_slowly_is_disconnected() {
    let directory = tempfile::tempdir().unwrap();
    let mut talk = Talk::with(hasty(directory.path())).await;
    talk.say("*2\r\n$3\r\nGET\r\n$1000000\r\n").await;
    let mut sent = 0;
    while sent < 1000 && talk.socket.write_all(&[b'x'; 1000]).await.is_ok() {
        if talk.is_cut().await {
            break;
        }
        sent += 1;
    }
    assert!(sent < 1000, "the server has not closed the connection");
    assert!(matches!(talk.served.await.unwrap(), End::Silent));
}

#[tokio::test]
async fn a_client_that_receives_too_slowly_is_disconnected() {
    let directory = tempfile::tempdir().unwrap();
    let server = hasty(directory.path());
    server.cache.put(b"large", &[b'x'; 900_000]).unwrap();
    let mut talk = Talk::with(server).await;
    // More than the system buffers.
    talk.say(&"GET large\r\n".repeat(100)).await;
    let (mut some, mut taken) = ([0; 1000], 0);
    while !talk.served.is_finished() {
        assert!(taken < 50_000_000, "the server has not closed the connection");
        taken += talk.socket.read(&mut some).await.unwrap_or(0);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(matches!(talk.served.await.unwrap(), End::Deaf));
}

/// Each request is fast enough and small enough by itself, but all of them together are too large.
#[tokio::test]
async fn incomplete_requests_share_a_limit() {
    let directory = tempfile::tempdir().unwrap();
    let server = server_in(directory.path(), &["--buffer-memory", "2MiB"], None);
    let buffers = server.buffers.clone();
    // The key is too long to exist, but not for a request.
    let whole = [&b"*2\r\n$3\r\nGET\r\n$900000\r\n"[..], &[b'x'; 900_000], b"\r\n"].concat();
    let mut talks = Vec::new();
    for _ in 0..3 {
        let mut talk = Talk::with(server.clone()).await;
        // It may be closed before all of this was sent.
        let _ = talk.socket.write_all(&whole[..whole.len() - 3]).await;
        talks.push(talk);
    }
    let told_one = poll_fn(|cx| {
        let is_told = |talk: &Talk| talk.socket.poll_read_ready(cx).is_ready();
        talks.iter().position(is_told).map_or(Poll::Pending, Poll::Ready)
    });
    let at = told_one.await;
    let mut refused = talks.swap_remove(at);
    let told = "-ERR the memory for requests and answers (--buffer-memory) is used up\r\n";
    refused.expect(told).await;
    drop(refused.socket);
    assert!(matches!(refused.served.await.unwrap(), End::Left));
    // The memory of the others is released when they end, and available to the next one.
    for talk in talks {
        drop(talk.socket);
        talk.served.await.unwrap();
    }
    assert_eq!(buffers.used_bytes(), 0);
    let mut next = Talk::with(server).await;
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
        let mut others = Share::new(&buffers);
        // Before authentication none of it is used, even if it is available.
        assert!(password.is_some() || others.hold(1 << 20));
        let mut talk = Talk::with(server).await;
        let (mut from_server, mut to_server) = talk.socket.split();
        let answer = b"-ERR unknown command 'a', with args beginning with: \r\n";
        let said = async {
            to_server.write_all(&b"a\n".repeat(COUNT)).await.unwrap();
        };
        let heard = async {
            let mut answers = vec![0; answer.len() * COUNT];
            for part in answers.chunks_mut(10_000) {
                from_server.read_exact(part).await.unwrap();
                assert!(password.is_none() || buffers.used_bytes() == 0);
            }
            assert!(answers == answer.repeat(COUNT));
        };
        tokio::join!(said, heard);
    }
}

/// As a client that sends a whole value before it checks for an answer.
#[tokio::test]
async fn a_client_that_is_still_sending_receives_the_reason_of_its_disconnection() {
    let directory = tempfile::tempdir().unwrap();
    let server = server_in(directory.path(), &[], None);
    let buffers = server.buffers.clone();
    let most = server.limits.argument_bytes;
    let mut talk = Talk::with(server).await;
    talk.say("*2\r\n$3\r\nGET\r\n$20000000\r\n").await;
    // Far more than the system buffers.
    talk.socket.write_all(&vec![b'x'; 20_000_000]).await.unwrap();
    let told = "-ERR Protocol error: invalid bulk length: 20000000 bytes; an argument may have at \
        most";
    talk.expect(&format!("{told} {most}\r\n")).await;
    assert_eq!(talk.socket.read(&mut [0; 10]).await.unwrap(), 0);
    assert_eq!(buffers.used_bytes(), 0);
    // Also if it stays.
    assert!(matches!(talk.served.await.unwrap(), End::Left));
}

#[tokio::test]
async fn discarding_the_input_of_a_disconnected_client_is_bounded() {
    let directory = tempfile::tempdir().unwrap();
    let mut talk = Talk::with(server_in(directory.path(), &[], None)).await;
    talk.say("*x\r\n").await;
    let (some, mut sent) = (vec![b'x'; 64 << 10], 0);
    while talk.socket.write_all(&some).await.is_ok() {
        sent += some.len();
        assert!(sent < 4 * MAX_HEARD, "the server has not closed the connection");
    }
    assert!(matches!(talk.served.await.unwrap(), End::Left));
}

/// Returns how many seconds a client may take that transfers `bytes` in each second; `None` if it
/// is disconnected.
fn seconds(bytes: usize, of_bytes: usize) -> Option<usize> {
    let patience = Patience { time: Duration::from_secs(30), least_rate: 64 << 10 };
    let mut pace = Pace::new(patience);
    for (second, moved) in (1..).zip((bytes..=of_bytes).step_by(bytes)) {
        assert!(pace.left().is_some_and(|left| left <= patience.time));
        pace.waited(Duration::from_secs(1));
        pace.left()?;
        pace.moved(bytes);
        if moved == of_bytes {
            return Some(second);
        }
    }
    unreachable!("{of_bytes} are a multiple of {bytes}")
}

#[test]
fn a_client_may_take_the_patience_and_the_time_at_the_minimum_rate() {
    const KIB: usize = 1 << 10;
    const MIB: usize = 1 << 20;
    // At the rate there is no limit; at half of it nearly twice the patience.
    assert_eq!(seconds(64 * KIB, 64 * MIB), Some(1024));
    assert_eq!(seconds(32 * KIB, 58 * 32 * KIB), Some(58));
    assert_eq!(seconds(32 * KIB, 64 * MIB), None);
    assert_eq!(seconds(1, 29), Some(29));
    assert_eq!(seconds(1, 31), None);
    // A fast transfer earns no credit.
    let mut pace = Pace::new(Patience { time: Duration::from_secs(30), least_rate: 64 << 10 });
    pace.moved(64 * MIB);
    pace.waited(Duration::from_secs(29));
    assert_eq!(pace.left(), Some(Duration::from_secs(1)));
    pace.waited(Duration::from_secs(1));
    assert_eq!(pace.left(), None);
    // Late progress counts: it was the server that was slow.
    pace.waited(Duration::from_secs(100));
    pace.moved(64 * KIB);
    assert_eq!(pace.left(), Some(Duration::from_secs(1)));
}

/// As queued by a client that has not received answers for a while. They need only memory.
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
    let mut turns = 0;
    {
        let mut answering = std::pin::pin!(connection.answer(&socket, client));
        let answered = poll_fn(|cx| {
            turns += 1;
            answering.as_mut().poll(cx)
        });
        assert!(answered.await.is_ok());
    }
    assert!(turns > 50, "{turns}");
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
    let mut writer = Talk::with(server.clone()).await;
    let mut reader = Talk::with(server.clone()).await;
    writer.say("SET a 1 NX\r\n").await;
    reader.say("DBSIZE\r\nSCAN 0\r\n").await;
    reader.expect(":0\r\n*2\r\n$1\r\n0\r\n*0\r\n").await;
    server.writers.add_permits(1);
    writer.expect("+OK\r\n").await;
    writer.say("DEL a\r\n").await;
    writer.expect(":1\r\n").await;
}
