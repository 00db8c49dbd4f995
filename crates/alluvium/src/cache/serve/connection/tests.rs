//! Connections over TCP, each to a server of its own that has little patience.

use std::path::Path;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use super::super::tests::server_in;
use super::*;

/// The servers' patience; their `--idle-timeout` is long.
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
    Arc::get_mut(&mut server).expect("nobody else has it").patience = SHORT;
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

    /// Whether the server has closed it, by now or in a moment.
    async fn is_cut(&mut self) -> bool {
        let mut some = [0; 1024];
        let heard = timeout(Duration::from_millis(2), self.socket.read(&mut some)).await;
        matches!(heard, Ok(Ok(0) | Err(_)))
    }
}

#[tokio::test]
async fn who_does_not_log_in_is_disconnected_whatever_he_says() {
    let directory = tempfile::tempdir().unwrap();
    let mut talk = Talk::with(impatient(directory.path(), Some("secret"))).await;
    let mut said = 0;
    while said < 1_000_000 {
        if talk.socket.write_all(b"PING\r\n").await.is_err() || talk.is_cut().await {
            break;
        }
        said += 1;
    }
    assert!(said < 1_000_000, "nobody has disconnected it");
    assert!(matches!(talk.served.await.unwrap(), End::Silent));
}

#[tokio::test]
async fn who_sends_a_byte_now_and_then_is_disconnected() {
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
    assert!(sent < 20_000, "nobody has disconnected it");
    assert!(matches!(talk.served.await.unwrap(), End::Silent));
}

/// As a client has them waiting that has taken no answers for a while. They need nothing but memory.
#[tokio::test]
async fn many_requests_at_once_leave_others_their_turn() {
    let directory = tempfile::tempdir().unwrap();
    let server = server_in(directory.path(), &[], None);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut peer = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (socket, _) = listener.accept().await.unwrap();
    let client = server.client();
    let mut requests = Requests::new(&server.buffers, server.limits);
    requests.feed(&b"EXISTS a b c\r\n".repeat(10_000));
    let (_stop, stopping) = watch::channel(false);
    let (begun, pace) = (Instant::now(), Pace::new());
    let mut connection = Connection { server, requests, stopping, begun, pace };
    let mut turns = 0;
    {
        let mut answering = std::pin::pin!(connection.answer(&socket, client));
        let answered = std::future::poll_fn(|cx| {
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
async fn writers_that_wait_keep_nobody_from_reading() {
    let directory = tempfile::tempdir().unwrap();
    let mut server = server_in(directory.path(), &[], None);
    // As if all threads for writers waited.
    Arc::get_mut(&mut server).expect("nobody else has it").writers = Semaphore::new(0);
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
