//! Connections over TCP, each to a server of its own that has little patience.

use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
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
    _directory: TempDir,
}

impl Talk {
    async fn begin(password: Option<&str>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut server = server_in(directory.path(), &[], password);
        Arc::get_mut(&mut server).expect("nobody else has it").patience = SHORT;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        let client = server.client();
        let (stop, stopping) = watch::channel(false);
        let served = tokio::spawn(serve(server, accepted, client, stopping));
        Self { socket, served, _stop: stop, _directory: directory }
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
    let mut talk = Talk::begin(Some("secret")).await;
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
    let mut talk = Talk::begin(None).await;
    talk.socket.write_all(b"*2\r\n$3\r\nGET\r\n$60000\r\n").await.unwrap();
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
