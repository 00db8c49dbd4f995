//! The accept loop of a listener.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::connection;
use crate::security::Listener;
use crate::server::Server;

/// After an accept that failed, typically for want of file descriptors: the kernel offers no event for when there are some again.
const RETRY_ACCEPT: Duration = Duration::from_millis(100);

/// Accept and serve connections until the server stops; then wait for the connections to end, at most for the configured
/// grace period.
pub(crate) async fn run(server: Arc<Server>, listener: Arc<Listener>, socket: TcpListener) {
    let mut connections = JoinSet::new();
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
            Ok((socket, peer)) => match server.free_connections.clone().try_acquire_owned() {
                Err(_) => {
                    tracing::debug!(%peer, limit = server.config.max_connections, "connection refused: too many are open");
                    server.metrics.closed("too_many");
                    drop(socket);
                }
                Ok(place) => {
                    let (server, listener) = (server.clone(), listener.clone());
                    server.metrics.connections.inc();
                    connections.spawn(async move {
                        let _counted = Counted { server: &server, _place: place };
                        connection::serve(server.clone(), listener, socket, peer).await;
                    });
                }
            },
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
            "requests in flight did not end within the grace period"
        );
        connections.shutdown().await;
    }
    tracing::debug!(connections = open, "all connections are closed");
}

/// A connection, as long as it is open.
struct Counted<'a> {
    server: &'a Server,
    _place: OwnedSemaphorePermit,
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.server.metrics.connections.dec();
    }
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "a connection's task failed");
    }
}
