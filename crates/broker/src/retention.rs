//! Retention: deletes the oldest records of topics with a limit, and expired producer state.

use std::sync::Arc;

use alluvium_stream::StoreError;
use tokio::task::yield_now;

use crate::server::Server;
use crate::topics::Topic;

/// Applies retention to all topics periodically until the server stops.
pub(crate) async fn run(server: Arc<Server>) {
    loop {
        tokio::select! {
            () = server.stopping() => return,
            () = tokio::time::sleep(server.config.retention_check_interval) => {}
        }
        run_once(&server).await;
    }
}

/// Applies retention to all topics once.
pub(crate) async fn run_once(server: &Server) {
    let mut deferred = 0;
    for topic in server.topics.all() {
        match trim(server, &topic).await {
            Ok(()) => {}
            // An upload frees space, not a trim. Once one fails, the store reports that.
            Err(StoreError::LogFull) => deferred += 1,
            // The topic was deleted concurrently.
            Err(StoreError::InvalidChange(reason)) => {
                tracing::debug!(topic = %topic.name, reason, "retention");
            }
            Err(error) => tracing::warn!(topic = %topic.name, %error, "retention"),
        }
        sweep(&topic);
        yield_now().await;
    }
    if deferred > 0 {
        tracing::info!(topics = deferred, "log is full: old records are deleted by a later run");
    }
}

/// Drops expired producers, and aborted transactions whose records are deleted.
fn sweep(topic: &Topic) {
    let refused: Vec<u64> = topic.partitions.iter().map(|partition| partition.sweep()).collect();
    let batches: u64 = refused.iter().sum();
    if batches > 0 {
        let partitions = refused.iter().filter(|refused| **refused > 0).count();
        tracing::warn!(
            topic = %topic.name,
            partitions,
            batches,
            "transactions refused: too many aborted ones are tracked; shorten the retention or use \
             DeleteRecords"
        );
    }
}

/// Trims all partitions of a topic that exceed a limit, in one commit.
async fn trim(server: &Server, topic: &Topic) -> Result<(), StoreError> {
    let (changes, offsets) = topic.trims(topic.rules.retention)?;
    if changes.is_empty() {
        return Ok(());
    }
    let partitions = changes.len();
    server.store.commit(changes).await?;
    tracing::info!(topic = %topic.name, partitions, offsets, "old records deleted");
    Ok(())
}
