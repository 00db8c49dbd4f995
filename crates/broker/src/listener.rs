//! The accept loop of a listener.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::connection;
use crate::connections::ConnectionPermit;
use crate::quotas::{Bound, QuotaOwner};
use crate::security::Listener;
use crate::server::Server;

/// The pause after a failed accept, typically for lack of file descriptors: the kernel does not
/// signal when some become free.
const RETRY_ACCEPT: Duration = Duration::from_millis(100);

/// The greatest number of a listener's refused connections that are held open before they are
/// closed. Further ones are closed at once.
const MAX_DELAYED_CLOSES: usize = 256;

/// Accepts and serves connections until the server stops. Then waits for the connections to end, at
/// most for the configured grace period.
pub(crate) async fn run(server: Arc<Server>, listener: Arc<Listener>, socket: TcpListener) {
    let mut connections = JoinSet::new();
    let delayed = Arc::new(Semaphore::new(MAX_DELAYED_CLOSES));
    loop {
        let accepted = tokio::select! {
            accepted = socket.accept() => accepted,
            Some(ended) = connections.join_next() => {
                report(ended);
                continue;
            }
            () = server.stopping() => break,
        };
        match accepted {
            Ok((socket, peer)) => {
                let owner = QuotaOwner::Address(peer.ip());
                let early =
                    server.quotas.try_charge(Bound::Connections, owner, 1.0, Instant::now());
                if let Err(wait) = early {
                    tracing::debug!(
                        %peer,
                        "connection refused: its address exceeds its quota of new connections"
                    );
                    server.metrics.closed("too_fast");
                    if let Ok(permit) = delayed.clone().try_acquire_owned() {
                        connections.spawn(close_delayed(server.clone(), socket, wait, permit));
                    }
                    continue;
                }
                match server.connections.take(peer.ip()) {
                    Err(full) => {
                        tracing::debug!(%peer, "connection refused: {full}");
                        server.metrics.closed(full.reason());
                    }
                    Ok(permit) => {
                        let (server, listener) = (server.clone(), listener.clone());
                        server.metrics.connections.inc();
                        connections.spawn(async move {
                            let _counted = Counted { server: &server, _permit: permit };
                            connection::serve(server.clone(), listener, socket, peer).await;
                        });
                    }
                }
            }
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                sleep(RETRY_ACCEPT).await;
            }
        }
    }
    drop(socket);
    let open = connections.len();
    let all_ended = async {
        while let Some(ended) = connections.join_next().await {
            report(ended);
        }
    };
    if timeout(server.config.shutdown_grace, all_ended).await.is_err() {
        tracing::warn!(
            connections = connections.len(),
            "requests did not complete within the grace period"
        );
        connections.shutdown().await;
    }
    tracing::debug!(connections = open, "all connections closed");
}

/// Closes a refused connection only when its client could open one again: if it were closed at
/// once, the client would retry at once.
async fn close_delayed(
    server: Arc<Server>,
    _socket: TcpStream,
    wait: Duration,
    _permit: OwnedSemaphorePermit,
) {
    tokio::select! {
        () = sleep(wait) => {}
        () = server.stopping() => {}
    }
}

/// Counts a connection for as long as it is open.
struct Counted<'a> {
    server: &'a Server,
    _permit: ConnectionPermit,
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.server.metrics.connections.dec();
    }
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "connection task failed");
    }
}
