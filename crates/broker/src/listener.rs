//! The accept loop.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::connection;
use crate::server::Server;

/// After an accept that failed, typically for want of file descriptors: the kernel offers no event for when there are some again.
const RETRY_ACCEPT: Duration = Duration::from_millis(100);

/// Accept and serve connections until the server stops; then wait for the connections to end, at most for the configured
/// grace period.
pub(crate) async fn run(server: Arc<Server>, listener: TcpListener) {
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(ended) = connections.join_next() => {
                report(ended);
                server.metrics.connections.set(connections.len() as i64);
                continue;
            }
            () = server.stopping() => break,
        };
        match accepted {
            Ok((socket, peer)) if connections.len() >= server.config.max_connections as usize => {
                tracing::debug!(%peer, limit = server.config.max_connections, "connection refused: too many are open");
                server.metrics.closed("too_many");
                drop(socket);
            }
            Ok((socket, _)) => {
                connections.spawn(connection::serve(server.clone(), socket));
                server.metrics.connections.set(connections.len() as i64);
            }
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                sleep(RETRY_ACCEPT).await;
            }
        }
    }
    drop(listener);
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
    server.metrics.connections.set(0);
    tracing::debug!(connections = open, "all connections are closed");
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "a connection's task failed");
    }
}
