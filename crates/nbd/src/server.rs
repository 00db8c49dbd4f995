//! Listeners and connections.

#[cfg(test)]
mod tests;

use std::io;
use std::panic;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt::{
    set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use crate::budget::{Budget, REQUEST_CHARGE};
use crate::counters::{Counters, Gauge, add};
use crate::exports::Exports;
use crate::handshake::negotiate;
use crate::protocol::MAX_PAYLOAD;
use crate::transmission::{End, Environment, transmit};

/// Pause after a connection could not be accepted, as when there are too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time for a handshake in progress when the server stops.
const HANDSHAKE_GRACE: Duration = Duration::from_secs(1);
/// An idle TCP connection whose peer is gone is closed after the first time and as many probes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 6;

/// Bounds of a server.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Open connections. Further ones are closed at once.
    pub max_connections: usize,
    /// Bytes in flight of all connections, beyond the 1 MiB that each has for itself. At least 33
    /// MiB are used.
    pub pool_bytes: usize,
    /// What a connection may use of the pool. At least 33 MiB are used.
    pub connection_bytes: u32,
    /// Time for the handshake.
    pub handshake_timeout: Duration,
    /// Time in which a client must send a header or 1 MiB of a payload that it has begun, and
    /// receive 1 MiB of replies.
    pub stall_timeout: Duration,
    /// Time in which the requests in flight may complete when a connection or the server ends.
    pub grace: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            max_connections: 1024,
            pool_bytes: 512 << 20,
            connection_bytes: 64 << 20,
            handshake_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(30),
            grace: Duration::from_secs(10),
        }
    }
}

/// A socket that accepts connections.
#[derive(Debug)]
pub enum Listener {
    /// TCP
    Tcp(TcpListener),
    /// A Unix socket
    Unix(UnixListener),
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self::Tcp(listener)
    }
}

impl From<UnixListener> for Listener {
    fn from(listener: UnixListener) -> Self {
        Self::Unix(listener)
    }
}

/// An accepted connection.
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Listener {
    async fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                // If it fails, the connection is broken, which its first read reports.
                let _ = prepare(&stream);
                Ok(Stream::Tcp(stream))
            }
            Self::Unix(listener) => Ok(Stream::Unix(listener.accept().await?.0)),
        }
    }
}

/// Sends replies without delay, and notices when an idle peer is gone.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    set_socket_keepalive(stream, true)?;
    set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    Ok(())
}

/// An NBD server. Its bounds hold for all of its listeners together.
#[derive(Clone)]
pub struct Server(Arc<Shared>);

struct Shared {
    exports: Arc<Exports>,
    options: Options,
    counters: Arc<Counters>,
    pool: Arc<Semaphore>,
    /// Connections that may be opened.
    slots: Arc<Semaphore>,
}

impl Server {
    /// Creates a server without listeners.
    pub fn new(exports: Arc<Exports>, options: Options) -> Self {
        // The largest reply that has to be in memory as a whole.
        let least = MAX_PAYLOAD + REQUEST_CHARGE;
        let pool_bytes = options.pool_bytes.clamp(least as usize, Semaphore::MAX_PERMITS);
        let connection_bytes = options.connection_bytes.max(least);
        let slots = options.max_connections.min(Semaphore::MAX_PERMITS);
        Self(Arc::new(Shared {
            slots: Arc::new(Semaphore::new(slots)),
            exports,
            options: Options { pool_bytes, connection_bytes, ..options },
            counters: Arc::default(),
            pool: Arc::new(Semaphore::new(pool_bytes)),
        }))
    }

    /// What the server counts.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.0.counters
    }

    /// Serves one connection.
    #[cfg(test)]
    pub(crate) async fn serve_stream(
        &self,
        stream: impl AsyncRead + AsyncWrite,
        stop: watch::Receiver<bool>,
    ) {
        let (reader, writer) = tokio::io::split(Box::pin(stream));
        let slot = Arc::clone(&self.0.slots).acquire_owned().await.expect("it is never closed");
        connection(Arc::clone(&self.0), reader, writer, stop, slot).await;
    }

    /// Accepts and serves connections until `shutdown` completes.
    ///
    /// Then it accepts no more. Connections complete the requests in flight, read no further ones,
    /// and end, so that a client that reconnects can send the others again. What has not ended
    /// after the grace period is dropped.
    pub async fn serve(&self, listener: impl Into<Listener>, shutdown: impl Future<Output = ()>) {
        let listener = listener.into();
        let stop = watch::Sender::new(false);
        let mut connections = JoinSet::new();
        let mut shutdown = std::pin::pin!(shutdown);
        loop {
            let accepted = tokio::select! {
                () = &mut shutdown => break,
                Some(ended) = connections.join_next(), if !connections.is_empty() => {
                    resume_panic(ended);
                    continue;
                }
                accepted = listener.accept() => accepted,
            };
            let stream = match accepted {
                Ok(stream) => stream,
                // The client has closed the connection before it was accepted.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => {
                    warn!(%error, "connection not accepted");
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Ok(slot) = Arc::clone(&self.0.slots).try_acquire_owned() else {
                add(&self.0.counters.refused_connections, 1);
                debug!("connection refused: too many");
                continue;
            };
            let (shared, stop) = (Arc::clone(&self.0), stop.subscribe());
            match stream {
                Stream::Tcp(stream) => {
                    let (reader, writer) = stream.into_split();
                    connections.spawn(connection(shared, reader, writer, stop, slot));
                }
                Stream::Unix(stream) => {
                    let (reader, writer) = stream.into_split();
                    connections.spawn(connection(shared, reader, writer, stop, slot));
                }
            }
        }
        drop(listener);
        stop.send_replace(true);
        let ending = async {
            while let Some(ended) = connections.join_next().await {
                resume_panic(ended);
            }
        };
        if timeout(self.0.options.grace, ending).await.is_err() {
            warn!(connections = connections.len(), "connections dropped at the end of the grace");
            connections.shutdown().await;
        }
    }
}

/// A panic of a connection is one of its server.
fn resume_panic(ended: Result<(), JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        panic::resume_unwind(error.into_panic());
    }
}

/// Serves a connection from its greeting to its end.
async fn connection<R, W>(
    shared: Arc<Shared>,
    mut reader: R,
    mut writer: W,
    stop: watch::Receiver<bool>,
    _slot: OwnedSemaphorePermit,
) where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let Shared { exports, options, counters, pool, .. } = &*shared;
    add(&counters.connections, 1);
    let _open = Gauge::enter(&counters.open_connections);
    let mut stopping = stop.clone();
    let negotiated = tokio::select! {
        negotiated = negotiate(&mut reader, &mut writer, exports, &stop) => {
            negotiated.map_err(|error| error.to_string())
        }
        () = sleep(options.handshake_timeout) => Err("the client is too slow".to_owned()),
        () = async {
            // The sender lives as long as this task.
            let _ = stopping.wait_for(|is_set| *is_set).await;
            sleep(HANDSHAKE_GRACE).await;
        } => Err("the server stops".to_owned()),
    };
    let negotiated = match negotiated {
        Ok(Some(negotiated)) => negotiated,
        Ok(None) => return,
        Err(reason) => {
            add(&counters.failed_handshakes, 1);
            debug!(reason, "handshake failed");
            return;
        }
    };
    let export = negotiated.export.0.name.clone();
    debug!(export, "client connected");
    let budget = Budget::new(options.connection_bytes, Arc::clone(pool), Arc::clone(counters));
    let environment = Environment {
        budget,
        counters: Arc::clone(counters),
        stall_timeout: options.stall_timeout,
        grace: options.grace,
    };
    let end = transmit(reader, writer, negotiated, environment, stop).await;
    match &end {
        End::Violation(what) => {
            add(&counters.violations, 1);
            debug!(export, what, "client violated the protocol");
        }
        End::Failed(error) if error.kind() == io::ErrorKind::TimedOut => {
            add(&counters.stalled_connections, 1);
        }
        _ => {}
    }
    debug!(export, ?end, "client disconnected");
}
