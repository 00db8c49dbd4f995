//! The dialer's half of a handshake.

use std::io;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use uuid::Uuid;

use super::flow::HANDSHAKE;
use super::frame::{ConnectionId, ConnectionRole};
use super::handshake::{Directory, HANDSHAKE_BYTES, HandshakeError, Hello, Local, Welcome};
use super::io::set_options;
use crate::types::ServerId;

/// Why a connection is not established.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("no answer in time")]
    Timeout,
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
}

/// Time after which a second attempt replaces the first one. The kernel of a process that has just
/// ended may drop the first segment of a connection, and it would be repeated after 1 s only. The
/// second attempt is refused, which shows that the process is gone.
const SECOND_ATTEMPT: Duration = Duration::from_millis(200);

/// Opens a socket.
async fn open(address: &str) -> io::Result<TcpStream> {
    match timeout(SECOND_ATTEMPT, TcpStream::connect(address)).await {
        Ok(opened) => opened,
        Err(_) => TcpStream::connect(address).await,
    }
}

/// Connects to a server and does the handshake. Without a directory, only cluster and server are
/// compared.
pub(super) async fn connect(
    local: &Local,
    role: ConnectionRole,
    address: &str,
    expected: Option<ServerId>,
    directory: Option<&Mutex<Directory>>,
) -> Result<(TcpStream, Welcome), ConnectError> {
    let handshake = async {
        let mut socket = open(address).await?;
        set_options(&socket)?;
        let random = Uuid::new_v4().into_bytes();
        let random = *random.first_chunk().expect("a UUID is longer");
        let hello = Hello::new(local, role, expected, ConnectionId(random));
        socket.write_all(&hello.encode()).await?;
        let mut bytes = [0; HANDSHAKE_BYTES];
        socket.read_exact(&mut bytes).await?;
        let welcome = Welcome::decode(&bytes)?;
        match directory {
            Some(directory) => welcome.judge(&hello, Some(&mut directory.lock()))?,
            None => welcome.judge(&hello, None)?,
        }
        Ok((socket, welcome))
    };
    timeout(HANDSHAKE, handshake).await.unwrap_or(Err(ConnectError::Timeout))
}
